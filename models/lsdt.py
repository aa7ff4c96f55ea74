"""Long-Short Decision Transformer (Wang et al., ICLR 2025): attention for the long range and convolution for the short, side by side.

The tokens R_t s_t a_t are Decision Transformer's. Inside a block the d channels are split: the first part goes through causal
self-attention, the rest through a convolution over the last 6 tokens whose kernel is computed anew at every token. A gate, HFM,
weighs the channels of both. conv_ratio=0 is attention only, conv_ratio=1 convolution only (the paper's CDT), branch="dc" puts
Decision ConvFormer's fixed filters in the short branch (its LSDC). One file, torch only: copy it where you need it.

    python lsdt.py        fits one random batch and prints the loss

B batch, K context steps, L tokens (3K), H heads, d width, c channels of the short branch, S state size, A action size; frames are C x height x width.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    state_shape: tuple[int, ...] = (11,)    # (S,), the goal's numbers included where there is a goal (Section 3.3); or (C, height, width)
    act_dim: int = 3                        # A numbers, or A choices if discrete
    discrete: bool = False
    context_len: int = 10                   # K
    max_ep_len: int = 4096                  # rows of the timestep table; later steps share its last row
    n_layer: int = 3
    n_head: int = 1                         # of the long branch
    d: int = 128
    dropout: float = 0.25                   # after the projection and the MLP; 0 turns the other two off as well
    activation: Literal["relu", "gelu"] = "gelu"
    condition: Literal["rtg", "reward", "none"] = "rtg"     # first token: return-to-go, the previous reward, or no token (BC)
    use_actions: bool = True                # False: no action tokens (the paper's hopper-medium)
    goal_dim: int = 0                       # the last numbers of the state, if there is a goal
    goal: Literal["none", "state"] = "state"
    conv_ratio: float = 0.5                 # the short branch's share of the channels (Section 4.5)
    branch: Literal["dynamic", "dc"] = "dynamic"            # the short branch: dynamic convolution, or DC's filters (LSDC, Section 4.4)
    kernel: int = 6                         # tokens that the short branch sees, the current one included (B.7's k_m)
    fusion: Literal["hfm", "hfm_scaled", "hfm_time", "concat"] = "hfm"      # how the branches meet (B.3); see Fusion
    routing: Literal["split", "residual", "weight"] = "split"               # what each branch is given (B.10); see LongShort
    dropkey: bool = False                   # drop keys before the softmax instead of weights after it (B.8)
    attn_dropout: float = 0.1               # of attention weights, or of keys
    conv_dropout: float = 0.2               # of dynamic kernels
    position: Literal["timestep", "window"] = "timestep"    # window: the token's place in it, and the timestep of its first step (Atari)
    timestep_std: float = 0.022             # spread of the timestep table: what xavier-uniform gives 4096 x 128


PRESETS = {
    "*": dict(      # Table 13, and "locomotion" in the text below it
        n_layer=3, n_head=1, d=128, context_len=10, max_ep_len=4096, kernel=6, dropout=0.25, conv_dropout=0.2, activation="gelu",
        fusion="hfm", batch_size=64, lr=1e-4, weight_decay=1e-4, betas=(0.9, 0.999), clip=0.25, steps=100_000, warmup=10_000,
        schedule="cosine", eval_episodes=100,
        attn_dropout=0.1,                   # NOTE(paper): one rate, 0.25, for everything; the code has 0.1 here
        conv_ratio=0.5,                     # the paper's advice where its Table 14 has no value
        timestep_std=0.022,
    ),
    # Tables 5 (context, target), 14 (ratio) and Section 4 (episodes)
    "hopper": dict(rtg_scale=1000.0, targets=(7000.0,), eval_episodes=20),
    "halfcheetah": dict(rtg_scale=1000.0, targets=(7000.0,), eval_episodes=20),
    "walker2d": dict(rtg_scale=1000.0, targets=(7000.0,), eval_episodes=20),
    "antmaze": dict(n_head=2, batch_size=256, lr=2e-4, rtg_scale=1.0, targets=(100.0,)),
    # README: context 30. The released LSDC keeps filters of 6 tokens here: --branch dc --kernel 6
    "maze2d": dict(n_head=2, context_len=20, kernel=3, batch_size=256, lr=2e-4, rtg_scale=1.0, targets=(300.0,)),
    # Adroit's context and targets are not given: AntMaze's context, CORL's targets for DT
    "pen": dict(n_head=2, batch_size=256, lr=2e-4, rtg_scale=1.0, targets=(3100.0,), eval_episodes=20),
    "hammer": dict(n_head=2, batch_size=256, lr=2e-4, rtg_scale=1.0, targets=(12800.0,), eval_episodes=20),
    "door": dict(n_head=2, batch_size=256, lr=2e-4, rtg_scale=1.0, targets=(2900.0,), eval_episodes=20),
    "relocate": dict(n_head=2, batch_size=256, lr=2e-4, rtg_scale=1.0, targets=(4300.0,), eval_episodes=20),
    "hopper-medium": dict(d=256, conv_ratio=1.0, use_actions=False),    # D.2; the released code has no such switch
    "hopper-medium-replay": dict(d=256, conv_ratio=1.0, context_len=20),
    "hopper-medium-expert": dict(conv_ratio=0.75, context_len=20, targets=(10000.0,)),
    "halfcheetah-medium": dict(conv_ratio=0.5),
    "halfcheetah-medium-replay": dict(conv_ratio=0.5),
    "halfcheetah-medium-expert": dict(conv_ratio=0.75, targets=(15000.0,)),
    "walker2d-medium": dict(conv_ratio=0.125, context_len=5),
    "walker2d-medium-replay": dict(conv_ratio=0.5),
    "walker2d-medium-expert": dict(conv_ratio=0.125, targets=(10000.0,)),
    "antmaze-umaze": dict(n_head=1, conv_ratio=0.5),
    "antmaze-umaze-diverse": dict(conv_ratio=0.75),
    "antmaze-medium-play": dict(conv_ratio=0.75),
    "antmaze-medium-diverse": dict(conv_ratio=0.5, lr=1e-4),
    "maze2d-umaze": dict(conv_ratio=0.5),
    "maze2d-medium": dict(conv_ratio=0.125),
    "maze2d-large": dict(conv_ratio=0.25),  # NOTE(paper): Table 14 prints Maze2d-medium twice; this is the second
    "atari": dict(      # not in the paper: DT's
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, position="window", timestep_std=0.0, batch_size=128, lr=6e-4,
        betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=19_530, warmup=3, schedule="cosine", lr_floor=0.1,
        rtg_scale=1.0, eval_episodes=10, sample=True,
    ),
    "dmc": dict(        # not in the paper: as StARformer's comparison runs DT
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, position="window", timestep_std=0.0, batch_size=64, lr=1e-3, betas=(0.9, 0.95),
        weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1, eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop; DT's recipe
        n_layer=2, n_head=1, d=64, context_len=3, kernel=6, dropout=0.0, attn_dropout=0.0, conv_dropout=0.0, timestep_std=0.1,
        batch_size=106, steps=3400, lr=1.5e-3, warmup=100, schedule="cosine", eval_episodes=10, rtg_scale=None,     # None: the environment's
    ),
    "small-frames": dict(   # ours, on top of "small": as StARformer's
        n_head=2, d=96, context_len=2, timestep_std=0.0, batch_size=64, steps=3000, eval_every=0, sample=False,
    ),
}


class FrameEncoder(nn.Module):
    """The convolutions of the DQN (Mnih et al., 2015) and one linear layer: frames (B, K, C, height, width), 0 to 255, to (B, K, d)."""

    def __init__(self, shape, d):
        super().__init__()
        C, *sides = shape
        rows, columns = ((((n - 8) // 4 + 1) - 4) // 2 + 1 - 2 for n in sides)
        if min(rows, columns) < 1:
            raise ValueError(f"frames of {sides[0]} x {sides[1]} pixels are too small for the convolutions: 36 x 36 at least")
        self.first, self.conv2, self.conv3 = nn.Conv2d(C, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)
        self.fc = nn.Linear(64 * rows * columns, d)

    def encode(self, x):
        return self.fc(self.conv3(self.conv2(x.relu()).relu()).relu().flatten(1))

    def start(self, x, s):
        """The first convolution of frames x (N, C, height, width). Blocks of s x s pixels become channels: the same sums, and if s is the
        stride, a shape that GPUs are quick at."""
        first, (height, width), device = self.first, x.shape[-2:], x.device.type
        w = first.weight.unflatten(3, (-1, s)).unflatten(2, (-1, s)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)    # (out, C s s, rows, columns)
        x = F.pixel_unshuffle(x[..., : height - height % s, : width - width % s], s)
        x = x.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w.dtype, memory_format=torch.channels_last)
        # whole numbers up to 256 are exact in bfloat16, 255ths are not: the weights are scaled, not the pixels
        return F.conv2d(x, w / 255, first.bias, first.stride[0] // s)

    def forward(self, x, memory=None):
        """memory: a dict that keeps a window's embeddings from one act to the next; a step's own never changes."""
        old = None
        if memory and x.shape[1] > 1:
            old, x = memory["frames"][:, 1 - x.shape[1]:], x[:, -1:]
        y = self.encode(self.start(x.flatten(0, 1), self.first.stride[0] if x.is_cuda else 1)).unflatten(0, x.shape[:2])
        y = y if old is None else torch.cat([old, y], 1)
        if memory is not None:
            memory["frames"] = y
        return y


class Dropout(nn.Dropout):
    """torch's; on a CPU drawn by comparing uniform numbers, since torch's own drawing takes a tenth of a training step there."""

    def forward(self, x):
        if x.is_cuda or not self.training or not 0 < self.p < 1:
            return super().forward(x)
        return x * torch.rand_like(x).ge_(self.p).div_(1 - self.p)


class LongBranch(nn.Module):
    """Causal self-attention over L tokens, without the projection, which both branches share. rows: as in Attention elsewhere."""

    def __init__(self, d, n_head, dropout, dropkey):
        super().__init__()
        self.n_head, self.dropout, self.dropkey = n_head, dropout, dropkey
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x, rows=None):
        L, d = x.shape[1:]
        if rows is None:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            (w_q, w_kv), (b_q, b_kv) = (p.split([d, 2 * d]) for p in (self.qkv.weight, self.qkv.bias))
            q, (k, v) = F.linear(x[:, rows], w_q, b_q), F.linear(x, w_kv, b_kv).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in (q, k, v))   # (B, H, L or rows, d/H)
        rate, mask = self.dropout if self.training else 0.0, None
        if rows is not None or (self.dropkey and rate):
            mask = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()[rows or slice(None)]              # (rows, L)
        if self.dropkey and rate:
            # NOTE(code): the released DropKey is commented out and would add 1e-13, so it drops nothing. Here every query loses each
            # key with this probability, its own excepted: the first token would have nothing left to look at
            own = torch.eye(L, dtype=torch.bool, device=x.device)[rows or slice(None)]
            mask = mask & (own | (torch.rand(len(x), self.n_head, *mask.shape, device=x.device) >= rate))            # (B, H, rows, L)
            rate = 0.0
        # NOTE(code): dropout is on the attention weights, as B.8 has it; the released code drops entries of weights @ v
        y = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=mask is None)
        return y.transpose(1, 2).flatten(2)                                                 # (B, L or rows, d)


class DynamicConv(nn.Module):
    """Dynamic convolution (Eq. 1): every token computes the kernel with which it averages the last few tokens, itself included.

        u = GLU(Linear(x));   y_t = Linear(bias + sum_j softmax_j(W u_t)_j u_{t-j});   4 channels share a kernel

    The softmax runs over the taps that exist, so the first token has a kernel of one tap. rows: positions whose output is wanted.
    """

    def __init__(self, c, width, dropout):
        super().__init__()
        self.width, self.heads, self.drop = width, c // 4, Dropout(dropout)
        self.expand = nn.Linear(c, 2 * c)
        # NOTE(code): Eq. 1 is centred and its future half masked (5 of the released 11 taps never count); only the past taps exist here
        self.logits = nn.Linear(c, width * self.heads)
        self.bias = nn.Parameter(torch.zeros(c))
        self.out = nn.Linear(c, c)

    def kernels(self, u, rows):
        """(B, L or rows, width, heads): what each token weighs the token j steps back with; sums to 1 over j."""
        # NOTE(code): the kernel is read from the GLU's output, Eq. 1's X, not from the raw token; dropout falls on the logits
        at = rows or slice(None)
        z = self.drop(self.logits(u[:, at])).unflatten(-1, (self.width, self.heads))
        missing = torch.full((u.shape[1], self.width), -torch.inf, dtype=z.dtype, device=z.device).triu(1)      # where j > t; 0 elsewhere
        return (z + missing[at, :, None]).softmax(-2)

    def forward(self, x, rows=None):
        L, last, at = x.shape[1], self.width - 1, rows or slice(None)
        u = F.glu(self.expand(x), -1)                                                       # (B, L, c)
        kernels = self.kernels(u, rows)                                                     # (B, L or rows, width, heads)
        # NOTE(paper): Eq. 1 gives a kernel to 4 adjacent channels. Here they stand c/4 apart: the same functions with channels renamed,
        # and heads contiguous in memory
        past = F.pad(u, (0, 0, last, 0)).unflatten(-1, (4, self.heads))                     # (B, last + L, 4, heads)
        y = self.bias.view(4, self.heads)
        if x.is_cuda:   # as in TokenFilters: two large kernels there, on a CPU a sum of shifted copies
            past = past.unfold(1, self.width, 1)[:, at]                                     # (B, L or rows, 4, heads, width), a view
            y = y + (past.movedim(-1, 2) * kernels.flip(2).unsqueeze(3)).sum(2)
        else:           # and not a T x T matrix per head, as released, which is mostly zeros
            for j, kernel in enumerate(kernels.unbind(2)):
                y = torch.addcmul(y, past[:, last - j: last - j + L][:, at], kernel.unsqueeze(2))       # u_{t-j} at t
        return self.out(y.flatten(2))                                                       # (B, L or rows, c)


class TokenFilters(nn.Module):
    """Depthwise causal convolution whose filter is chosen by the type of the output's token (DC paper, Eq. 4).

    C[p, q] = bias + sum_l w[l, q] X[p - l, q] with w, bias those of the type of p; X is zero before the window. Each position is
    computed once, with its own filter. rows: a slice of equally typed positions whose output is wanted; None means all.
    """

    def __init__(self, d, window, types):
        super().__init__()
        # NOTE(code): Eq. 4 shows no bias, but that paper's parameter counts (8K, 16K, 43K) include it, and so does the code
        bound = window ** -0.5                                                  # torch's default for such a convolution, as released
        self.weight = nn.Parameter(torch.empty(types, window, d).uniform_(-bound, bound))       # [type, l, q] is Eq. 4's w_q[l]
        self.bias = nn.Parameter(torch.empty(types, d).uniform_(-bound, bound))

    def forward(self, x, rows=None):
        (types, window, _), L, at = self.weight.shape, x.shape[1], rows or slice(None)
        which = slice(None) if rows is None else slice(rows.start % types, rows.start % types + 1)
        w, y = self.weight[which], self.bias[which]                             # (types or 1, window, d), (types or 1, d)
        padded = F.pad(x, (0, 0, window - 1, 0))
        if x.is_cuda:   # the same sum in two large kernels; on a CPU their temporary array, window times x, takes two to three times as long
            past = padded.unfold(1, window, 1)[:, at].unflatten(1, (-1, len(w)))                # (B, K, types or 1, d, window), a view
            return (y + (past.transpose(-1, -2) * w.flip(1)).sum(-2)).flatten(1, 2)
        # NOTE(code): a sum of shifted copies, one step of all types at a time. The released code runs every filter over every
        # position and keeps a third. torch's Conv1d does too little per channel to be fast: 3 to 4 times slower on a CPU
        for l, tap in enumerate(w.unbind(1)):  # noqa: E741 (Eq. 4's letter)
            shifted = padded[:, window - 1 - l: window - 1 - l + L][:, at]      # X[p - l] at p
            y = torch.addcmul(y, shifted.unflatten(1, (-1, len(w))), tap)       # (B, K, types or 1, d)
        return y.flatten(1, 2)                                                  # (B, L or rows, d)


class Fusion(nn.Module):
    """Hybrid fusion module (Eqs. 2 to 4): Y * gates(Z), where Z = W relu(Wf Y) and Y holds the channels of both branches.

    kind  hfm         softmax over the channels: a step's gates sum to 1, so they are about 1 / d each
          hfm_scaled  the same times d: about 1 each, at the start close to plain concatenation
          hfm_time    softmax over the steps up to this one, channel by channel
          weight      softmax over the two branches, channel by channel, and their sum (B.10, LSDT-weight)
    NOTE(paper): the text says softmax over time, which would show the future; the code takes channels and so does our default. There
    the branches come out a hundred times smaller than they went in (residual and norm carry on): hfm_scaled is the cure.
    """

    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        self.squeeze = nn.Linear(width, width // 2)     # Wf
        self.expand = nn.Linear(width // 2, width)      # W_f1 and W_f2 in one

    def gates(self, y):
        z = self.expand(F.relu(self.squeeze(y)))                                            # (B, L, width)
        if self.kind == "hfm":
            return z.softmax(-1)
        if self.kind == "hfm_scaled":
            return z.softmax(-1) * z.shape[-1]
        if self.kind == "hfm_time":
            z = z.to(torch.promote_types(z.dtype, torch.float32))                           # autocast does this for softmax only
            return (z - z.logcumsumexp(1)).exp()
        return z.unflatten(-1, (2, -1)).softmax(-2).flatten(-2)

    def forward(self, y):
        y = self.gates(y) * y
        return y.unflatten(-1, (2, -1)).sum(-2) if self.kind == "weight" else y


class LongShort(nn.Module):
    """The token mixer: both branches, their fusion, one projection (Fig. 4).

    routing  split     the long branch reads the first d - c channels, the short one the other c
             residual  the same after x + Linear(x) (LSDT-res). NOTE(paper): "two linear projections with residual connections" in
                       words only; each here reads all of x, and the two are one matrix
             weight    both read all d channels; c and fusion are not used (LSDT-weight)
    """

    def __init__(self, cfg, types):
        super().__init__()
        d = cfg.d
        short = d if cfg.routing == "weight" else 4 * round(cfg.conv_ratio * d / 4)
        long = d if cfg.routing == "weight" else d - short
        if long % cfg.n_head:
            raise ValueError(f"conv_ratio={cfg.conv_ratio} leaves {long} of d={d} channels to n_head={cfg.n_head} heads: not divisible")
        self.widths, on = [long, short], cfg.dropout > 0
        self.route = nn.Linear(d, d) if cfg.routing == "residual" else None
        self.long = LongBranch(long, cfg.n_head, cfg.attn_dropout * on, cfg.dropkey) if long else None
        if not short:
            self.short = None
        elif cfg.branch == "dynamic":
            self.short = DynamicConv(short, cfg.kernel, cfg.conv_dropout * on)
        else:
            self.short = TokenFilters(short, cfg.kernel, types)
        kind = "weight" if cfg.routing == "weight" else cfg.fusion
        self.fusion = Fusion(long + short, kind) if long and short and kind != "concat" else None
        self.proj, self.drop = nn.Linear(d, d), Dropout(cfg.dropout)

    def forward(self, x, rows=None):
        if self.route:
            x = x + self.route(x)
        a, b = (x, x) if self.fusion and self.fusion.kind == "weight" else x.split(self.widths, -1)
        over_time = self.fusion and self.fusion.kind == "hfm_time"
        wanted = None if over_time else rows            # gates over time need every position of both branches
        y = torch.cat([branch(z, wanted) for branch, z in ((self.long, a), (self.short, b)) if branch], -1)
        if self.fusion:
            y = self.fusion(y)
        return self.drop(self.proj(y[:, rows] if over_time and rows else y))                # (B, L or rows, d)


class PostNormBlock(nn.Module):
    """LN(x + mixer(x)), then LN(x + MLP(x)). NOTE(code): norms after the sums, not before as in DT; the paper says only "as DT"."""

    def __init__(self, cfg, types):
        super().__init__()
        d = cfg.d
        self.mixer, self.ln1, self.ln2, self.drop = LongShort(cfg, types), nn.LayerNorm(d), nn.LayerNorm(d), Dropout(cfg.dropout)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, rows=None):
        x = self.ln1((x if rows is None else x[:, rows]) + self.mixer(x, rows))
        return self.ln2(x + self.drop(self.mlp(x)))


class Model(nn.Module):
    """Long-Short Decision Transformer for vectors or frames; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        d, self.frames = cfg.d, len(cfg.state_shape) == 3
        if not 0 <= cfg.conv_ratio <= 1:
            raise ValueError(f"conv_ratio={cfg.conv_ratio} is a share of the channels: between 0 and 1")
        if d % 4:
            raise ValueError(f"d={d}: four channels share a kernel, so d must be divisible by 4")
        if cfg.kernel < 1:
            raise ValueError(f"kernel={cfg.kernel}: the short branch sees its own token at least, so kernel is 1 or more")
        if cfg.routing == "weight" and cfg.fusion != "hfm":
            raise ValueError(f"routing='weight' has a fusion of its own: leave fusion at 'hfm' instead of {cfg.fusion!r}")
        self.tokens = 1 + (cfg.condition != "none") + cfg.use_actions       # per step
        self.state_at = int(cfg.condition != "none")                        # the state's place among them
        self.embed_state = FrameEncoder(cfg.state_shape, d) if self.frames else nn.Linear(*cfg.state_shape, d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(self.tokens * cfg.context_len, d))
        self.embed_ln = nn.LayerNorm(d)                                     # no dropout after it, and no norm after the last block
        self.blocks = nn.ModuleList(PostNormBlock(cfg, self.tokens) for _ in range(cfg.n_layer))
        self.head = nn.Linear(d, cfg.act_dim)
        for module in self.modules():                                       # xavier-uniform everywhere but in TokenFilters, as released
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for mixer in (block.mixer for block in self.blocks):                # layers that are one here and several there: part by part
            parts = [*mixer.long.qkv.weight.chunk(3)] if mixer.long else []
            for part in parts + ([*mixer.fusion.expand.weight.split(mixer.widths)] if mixer.fusion else []):
                nn.init.xavier_uniform_(part)
        bound = 3 ** 0.5 * cfg.timestep_std
        nn.init.uniform_(self.embed_timestep.weight, -bound, bound)
        if cfg.discrete:    # NOTE(code): the released model is continuous; xavier's logits would start far above a loss of ln(A)
            nn.init.normal_(self.head.weight, std=0.02)

    def hidden(self, states, actions, rewards, rtg, timesteps, rows, memory=None):
        """(B, number of rows, d): the last layer at the token positions in the slice rows."""
        cfg, dtype = self.cfg, self.head.weight.dtype
        x = [self.embed_state(states, memory) if self.frames else self.embed_state(states.to(dtype))]
        if cfg.condition != "none":
            # the reward that led to s_t; the first step of a window has none
            c = rtg.to(dtype) if cfg.condition == "rtg" else F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))     # (B, K, 1)
            x.insert(0, self.embed_condition(c))
        if cfg.use_actions:
            x.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        # released for Atari: the first step's timestep for the whole window, and the place in it. NOTE(code): acting used the last step's
        time = self.embed_timestep((timesteps[:, :1] if cfg.position == "window" else timesteps).clamp(max=cfg.max_ep_len - 1))
        x = (torch.stack(x, 2) + time[:, :, None]).flatten(1, 2)                            # (B, L, d): R_1 s_1 a_1 R_2 ...
        if cfg.position == "window":
            x = x + self.embed_place[:x.shape[1]]
        x = self.embed_ln(x)
        for i, block in enumerate(self.blocks):
            x = block(x, rows if i == cfg.n_layer - 1 else None)
        return x

    def predict(self, x):
        y = self.head(x)
        return y if self.cfg.discrete else torch.tanh(y)

    def forward(self, states, actions, rewards, rtg, timesteps, mask=None):
        """Predict every step's action from what came before it.

        states (B, K, S) or frames (B, K, C, height, width) from 0 to 255, actions (B, K, A) or (B, K) int64, rewards and rtg (B, K,
        1), timesteps (B, K) int64. Returns (B, K, A): actions in [-1, 1], or logits. Padding stands right of the real steps, where
        neither branch can see it: mask is not read.
        """
        return self.predict(self.hidden(states, actions, rewards, rtg, timesteps, slice(self.state_at, None, self.tokens)))

    def loss(self, batch):
        """(loss, {"loss": loss}): squared error, or cross-entropy if discrete, averaged over the real steps of the batch."""
        y = self(**batch).float()
        if self.cfg.discrete:
            error = F.cross_entropy(y.flatten(0, 1), batch["actions"].flatten(), reduction="none").view(y.shape[:2])    # (B, K)
        else:
            error = (y - batch["actions"]).square().mean(-1)                                # (B, K)
        loss = (error * batch["mask"]).sum() / batch["mask"].sum()
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None, memory=None):
        """The action for the last step of a history of any length; its own action and reward are placeholders that nobody reads.

        Shapes as in forward. Returns (B, A), or (B,) int64: the likeliest choice, or one drawn with the generator if sample.
        memory: a dict, empty at first, handed back at each next step of the same B episodes; frames are then embedded once.
        """
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg, timesteps)]
        at = (history[0].shape[1] - 1) * self.tokens + self.state_at
        y = self.predict(self.hidden(*history, slice(at, at + 1), memory))[:, -1]
        if not self.cfg.discrete:
            return y
        return torch.multinomial(y.softmax(-1), 1, generator=generator)[:, 0] if sample else y.argmax(-1)

    @classmethod
    def load(cls, run, which="last", device="cpu"):
        """(model in eval mode, meta) from a run folder; meta holds all that acting needs besides the weights."""
        checkpoint = torch.load(Path(run) / f"{which}.pt", map_location=device, weights_only=True)
        model = cls(Config(**checkpoint["model_config"])).to(device)
        model.load_state_dict(checkpoint["model"])
        return model.eval(), checkpoint["meta"]


LongShortDecisionTransformer = Model


def unread(cfg):
    """{input or parameter: why} for what the model is known not to read; the tests hold the model to everything else."""
    out = {}
    if cfg.condition != "rtg":
        out["rtg"] = "condition is not rtg"
    if cfg.condition != "reward":
        out["rewards"] = "condition is not reward"
    if not cfg.use_actions:
        out["actions"] = "no action tokens"
    if cfg.branch == "dynamic" and cfg.kernel == 1:
        out |= dict.fromkeys([f"blocks.{i}.mixer.short.logits" for i in range(cfg.n_layer)], "the softmax of a single tap is 1")
    tokens, state_at = 1 + (cfg.condition != "none") + cfg.use_actions, int(cfg.condition != "none")
    if round(cfg.conv_ratio * cfg.d / 4) == cfg.d // 4 and cfg.routing != "weight":     # no long branch: only what the kernels reach
        reach = cfg.n_layer * (cfg.kernel - 1)
        if reach < state_at:
            out |= dict.fromkeys(["rtg", "rewards", "embed_condition"], "the kernels end before this step's first token")
        if reach < state_at + 1:
            out |= dict.fromkeys(["actions", "embed_action"], "the kernels end before the last action")
        if reach < tokens:
            out["history"] = "the kernels end before the last state"
    return out


if __name__ == "__main__":
    torch.manual_seed(0)
    cfg = Config(d=64, n_layer=2, dropout=0.0, attn_dropout=0.0, conv_dropout=0.0)
    model, B, K = Model(cfg), 8, cfg.context_len
    batch = dict(states=torch.randn(B, K, *cfg.state_shape), actions=torch.rand(B, K, cfg.act_dim) * 2 - 1, rewards=torch.rand(B, K, 1),
                 rtg=torch.rand(B, K, 1), timesteps=torch.arange(K).expand(B, K), mask=torch.ones(B, K, dtype=torch.bool))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(101):
        loss, _ = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
