"""Decision Mixer (Zheng et al., ICML 2025): each layer picks the tokens that are worth attending over.

A Decision Transformer in which every other layer is a *mixer layer*. There a router gives every token a weight w_i, a hypernetwork
says how many tokens k this window deserves, and only the k tokens of largest weight go through attention and MLP; they come back
multiplied by w_i, the others pass by untouched. Training chooses with the whole window in view; acting cannot, so a small auxiliary
predictor learns to guess from one token whether it would be chosen. One file, torch only: copy it where you need it.

    python dm.py        fits one random batch and prints the loss

B batch, K context steps, L tokens (3K), H heads, d width, S state size, A action size, n real tokens of a row, C slots of the short row.
"""
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    state_shape: tuple[int, ...] = (11,)    # (S,), the goal's G numbers included where there is a goal; or stacked frames, say (4, 84, 84)
    act_dim: int = 3                        # A numbers, or A choices if discrete
    discrete: bool = False
    context_len: int = 20                   # K
    max_ep_len: int = 1000                  # rows of the timestep table; later steps share its last row
    n_layer: int = 6
    n_head: int = 4
    d: int = 256
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"
    condition: Literal["rtg", "reward", "none"] = "rtg"     # first token: return-to-go, the previous reward, or no token (BC)
    use_actions: bool = True                # False: no action tokens
    goal_dim: int = 0                       # G, the last G numbers of the state
    goal: Literal["none", "state"] = "state"
    position: Literal["timestep", "window"] = "timestep"    # window: the token's place in it, and the timestep of its first step (Atari)
    timestep_std: float = 1.0               # spread of the timestep table at initialisation
    layers: Literal["alternating", "all"] = "alternating"               # which layers are mixer layers: 2nd, 4th, 6th, or all (DM-ALL)
    selection: Literal["learned", "fixed", "none"] = "learned"          # how many tokens: hypernetwork, fixed_k, or no mixer layer at all
    fixed_k: float = 0.5                    # share of a row's real tokens kept by selection="fixed" (Table 2)
    aux: bool = True                        # auxiliary predictor for acting (Table 2)
    aux_lr_scale: float = 0.1               # its learning rate: 1e-4 beside the model's 1e-3 in the released code
    strategy: Literal["window", "prefix", "token"] = "window"           # what the choice may look at while training: Table 6 (3), (2), (1)
    router: Literal["raw", "sigmoid"] = "raw"                           # w_i = R(x_i) or its sigmoid
    router_bias: float = 1.0                # R(x_i) of a new model, but for noise
    residual: bool = False                  # False: w_i Z_i (Eq. 4); True: x_i + w_i (Z_i - x_i), as in Mixture-of-Depths
    hyper_input: Literal["pooled", "flattened"] = "pooled"              # H reads the mean real token, or all 3K tokens in a row (released)
    k_gradient: Literal["straight-through", "none"] = "straight-through"    # none: H stays a random function (released)
    k_start: float = 0.5                    # share of its tokens that a new model keeps, but for noise; 0.5 as released
    k_margin: int = 2                       # ranks on each side of k that tell H whether one token more would pay
    k_cost: float = 0.0                     # price of keeping everything, added to the loss as k_cost * share kept
    capacity: float | None = None           # most tokens a window may keep in training, as a share of 3K: shapes are static then; None: all


PRESETS = {
    "*": dict(      # Table 7; what it leaves out is the released code's
        n_layer=6, n_head=4, d=256, context_len=20, dropout=0.1, activation="gelu", lr=1e-3, weight_decay=1e-4, clip=0.25,
        batch_size=512,                     # code 256, with context_len 120
        betas=(0.9, 0.999), schedule="constant", eval_episodes=10,
        warmup=250, steps=25_000,           # NOTE(paper): gives neither; code: 1,000 rounds of 25 updates, the first 10 rounds warm-up
    ),
    # targets and return scales as released; MuJoCo: DT's target times 1, 2, 10, 20, as in the released DC
    "hopper": dict(targets=(3600.0, 7200.0, 36000.0, 72000.0)),
    "halfcheetah": dict(targets=(6000.0, 12000.0, 60000.0, 120000.0)),
    "walker2d": dict(targets=(5000.0, 10000.0, 50000.0, 100000.0)),
    "antmaze": dict(rtg_scale=1.0, targets=(1.0, 10.0, 100.0, 1000.0, 100000.0)),
    "maze2d": dict(rtg_scale=10.0, targets=(300.0, 200.0, 150.0, 100.0, 50.0, 20.0)),
    "pen": dict(rtg_scale=1000.0, targets=(12000.0, 6000.0)),
    "hammer": dict(rtg_scale=1000.0, targets=(12000.0, 6000.0, 3000.0)),
    "door": dict(rtg_scale=100.0, targets=(2000.0, 1000.0, 500.0)),
    "relocate": dict(rtg_scale=1000.0, targets=(3000.0, 1000.0)),
    "kitchen": dict(rtg_scale=100.0, targets=(500.0, 250.0)),           # as released, though no kitchen episode returns more than 4
    "atari": dict(      # not in the paper: DT's
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, position="window", timestep_std=0.0, batch_size=128, lr=6e-4,
        betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=19_530, warmup=3, schedule="cosine", lr_floor=0.1,
        rtg_scale=1.0, eval_episodes=10, sample=True,
    ),
    "dmc": dict(        # not in the paper: as StARformer's comparison runs DT
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, position="window", timestep_std=0.0, batch_size=64, lr=1e-3, betas=(0.9, 0.95),
        weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1, eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop
        n_layer=2, n_head=1, d=64, context_len=3, dropout=0.0, timestep_std=0.1, batch_size=106, steps=3700, lr=1.5e-3,
        warmup=100, schedule="cosine", eval_episodes=10, rtg_scale=None,
        # Table 6 (2), which chooses while acting as it does while training: with (3), the paper's, a small DM drives to its goal but does
        # not follow its target on most seeds. Why is open: the predictor errs, and a_t has a say in which tokens training keeps
        strategy="prefix", router="sigmoid", router_bias=2.0, residual=True, k_start=0.9,
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


class QueryAttention(nn.Module):
    """Causal self-attention over L tokens, or attention of separate queries to those tokens under a mask of their own."""

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, queries=None, mask=None):
        d = x.shape[-1]
        if queries is None:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            (w_q, w_kv), (b_q, b_kv) = (p.split([d, 2 * d]) for p in (self.qkv.weight, self.qkv.bias))
            q, (k, v) = F.linear(queries, w_q, b_q), F.linear(x, w_kv, b_kv).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in (q, k, v))   # (B, H, L or Q, d/H)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).flatten(2))                                      # (B, L or Q, d)


class StandardLayer(nn.Module):
    """GPT-2's pre-norm block, Eq. 3: Z1 = x + attention(LN(x)), Z2 = Z1 + MLP(LN(Z1)).

    NOTE(paper): Eq. 3 prints no "Z1 +" in Z2; the released block has it, and so do we.
    """

    def __init__(self, cfg, length):
        super().__init__()
        d = cfg.d
        self.ln1, self.mixer = nn.LayerNorm(d), QueryAttention(d, cfg.n_head, cfg.dropout)
        self.ln2, self.drop = nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(), nn.Linear(4 * d, d))

    def block(self, x, queries=None, mask=None):
        """x (B, L, d), causally; or queries (B, Q, d) that see the tokens of x where mask (1 or B, 1, Q, L) says so."""
        if queries is None:
            x = x + self.drop(self.mixer(self.ln1(x)))
        else:
            x = queries + self.drop(self.mixer(self.ln1(x), self.ln1(queries), mask))
        return x + self.drop(self.mlp(self.ln2(x)))

    def forward(self, x, rows=None):
        if rows is None:
            return self.block(x)
        see = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return self.block(x, x[:, rows], see[rows])     # the wanted rows only: exact, since nobody reads the others


class Hypernetwork(nn.Module):
    """H of Section 3.2: the share of its tokens that a row keeps, so that k = n * share for n real tokens.

    NOTE(paper): Table 8 gives H context_length * d inputs; released, 3K * d (7.9 million parameters at K 20, d 256) that hold the
    padding too. By default we show it the mean real token: a sixtieth of the size, and the same H for any history length.
    """

    def __init__(self, d, length):
        super().__init__()
        self.first, self.last = nn.Linear(d * length, 512), nn.Linear(512, 1)      # length 1: pooled

    def forward(self, x, valid, rule):
        """x (B, L, d), valid (B, L). Returns (B, 1): one share for the window; or (B, L): one for every prefix, or every token."""
        (L, d), window = x.shape[1:], rule == "window"
        if self.first.in_features == d:
            if window:
                x = (valid.to(x.dtype) / valid.sum(1, keepdim=True).clamp(min=1))[:, None] @ x          # (B, 1, d)
            elif rule == "prefix":
                x = (x * valid[..., None]).cumsum(1) / torch.arange(1, L + 1, device=x.device)[:, None]
            h = self.first(x)
        else:   # the tokens side by side, short histories padded right with zeros: every token adds its own part of the product
            h = torch.einsum("bld,hld->blh", x * valid[..., None], self.first.weight.view(512, -1, d)[:, :L])
            h = (h.sum(1, keepdim=True) if window else h.cumsum(1)) + self.first.bias
        return self.last(F.leaky_relu(h)).sigmoid().squeeze(-1)


def front(keep, want, length):
    """(B, length) positions: those to keep in their order, then those only wanted in theirs, then any others. want includes keep."""
    return (keep.int() + want).argsort(dim=-1, descending=True, stable=True)[:, :length]


class MixerLayer(StandardLayer):
    """Eq. 4: w_i Z_i for the tokens selected, x_i for the others.

    The selected tokens move to the front of their row, in their order, and the row is cut to C slots: causal attention over the short
    row is attention among the selected, and costs as little. A row that fills fewer slots is padded right, where no selected token looks,
    first with the unselected tokens nearest the threshold: their Z is not used, but its gradient is an estimate of what one token more
    would have been worth. Only an estimate: there a token sees the selected ones behind it too (in the last layer, those before it), and
    what it would have been worth to others as a key is not counted.
    """

    def __init__(self, cfg, length):
        super().__init__(cfg, length)
        self.cfg, d = cfg, cfg.d
        self.router = nn.Linear(d, 1)
        if cfg.selection == "learned":
            self.hyper = Hypernetwork(d, length if cfg.hyper_input == "flattened" else 1)
        # Table 8. The other strategies choose while acting as they do while training, and need no predictor
        predicts = cfg.aux and cfg.strategy == "window"
        self.aux = nn.Sequential(nn.Linear(d, d // 2), nn.SiLU(), nn.Linear(d // 2, 2)) if predicts else None

    def judge(self, x, valid, rule, bound, learning):
        """Select by rank: keep, gate and want, each (B, L), and share (B, 1 or L).

        gate is 1 or 0, as keep; if learning, with the gradient of a ramp over the ranks around k, and want adds the tokens on that ramp.
        """
        cfg, L, score = self.cfg, x.shape[1], self.router(x.detach()).squeeze(-1)
        earlier = torch.ones(L, L, dtype=torch.bool, device=x.device).tril(-1)
        a, b = score[:, :, None], score[:, None]                                            # token i against token j
        better = torch.where(earlier, b >= a, b > a)                                        # (B, L, L); ties go to the earlier token
        # Table 6: (3) a token ranks among all real tokens of the window, (2) among those up to itself, (1) alone
        if rule == "window":
            rank, n = (better & valid[:, None]).sum(-1), valid.sum(1, keepdim=True)
        elif rule == "prefix":
            rank, n = (better & earlier).sum(-1), torch.arange(1, L + 1, device=x.device)
        else:
            rank, n = torch.zeros_like(valid, dtype=torch.long), 1
        share = self.hyper(x, valid, rule) if cfg.selection == "learned" else cfg.fixed_k
        wish = n * share
        if learning and bound is not None:  # the value is cut, not the gradient: otherwise a k above its bound could never come down
            wish = wish + (wish.clamp(max=bound) - wish).detach()
        k = wish.round().clamp(min=0 if rule == "token" else 1, max=bound)
        # NOTE(code): k is rounded down, and only weights above the k-th largest stay: k - 1 tokens, padding among them. Here: k, and real
        keep = (rank < k) & valid
        if not learning:
            return keep, keep.to(x.dtype), keep, share
        m, inside = cfg.k_margin, wish - rank - 0.5                                         # by how many ranks; below 0: outside
        soft = F.hardtanh(inside, -m, m) / (2 * m)                                          # the ramp, m ranks to each side of k
        return keep, keep + (soft - soft.detach()), valid & (inside > -m), share

    def select(self, x, valid, acting, bound):
        """keep, gate and want, each (B, L), and a note for loss."""
        cfg = self.cfg
        x = x.to(self.router.weight.dtype)      # under autocast the choice is still made in float32
        if acting and self.aux:                 # Algorithm 2
            keep = (self.aux(x).argmax(-1) == 1) & valid
            return keep, keep.to(x.dtype), keep, {"keep": keep}
        # NOTE(paper): how to act without the predictor is not said. A token is then judged among those up to itself, so it stays causal
        rule = "prefix" if acting and cfg.strategy == "window" else cfg.strategy
        # NOTE(code): k is cast to an integer there, so H never receives a gradient
        learning = cfg.selection == "learned" and cfg.k_gradient == "straight-through" and not acting
        keep, gate, want, share = self.judge(x, valid, rule, bound, learning)
        note = {"keep": keep}
        if learning and cfg.k_cost:
            note["share"] = (share * valid).sum() / valid.sum()
        if self.aux:
            note["guess"] = self.aux(x.detach())                                            # (B, L, 2)
        return keep, gate, want, note

    def slots(self, want, bound):
        """C, the length of the short rows: the bound if there is one; all where shapes must be static; else what the fullest row needs."""
        if bound is not None:
            return min(bound, want.shape[1])
        if torch.compiler.is_compiling() or want.is_cuda and torch.cuda.is_current_stream_capturing():
            return want.shape[1]
        return max(1, int(want.sum(1).max()))

    def forward(self, x, valid, acting, rows=None):
        cfg, L = self.cfg, x.shape[1]
        most = None if acting else cfg.fixed_k if cfg.selection == "fixed" else cfg.capacity
        bound = None if most is None or cfg.strategy != "window" else max(1, round(most * L))
        with torch.autocast(x.device.type, enabled=False):
            keep, gate, want, note = self.select(x, valid, acting, bound)
        index = front(keep, want, self.slots(want, bound))                                  # (B, C)
        spread = index[..., None].expand(-1, -1, x.shape[-1])
        short = x.gather(1, spread)                                                         # (B, C, d)
        if rows is None:
            q, gate = short, gate.gather(1, index)
            z = self.block(short)
        else:   # all wanted rows ask, since finding the selected among them costs more; all selected tokens answer
            q, gate, place = x[:, rows], gate[:, rows], torch.arange(L, device=x.device)
            slot, count = place[:index.shape[1]], keep.sum(1)[:, None, None]
            # slot 0 holds the first selected token, which every selected one sees; open to all, no softmax is empty
            mask = (index[:, None] <= place[rows, None]) & (slot < count) | (slot == 0)     # (B, Q, C)
            z = self.block(short, q, mask[:, None])
        # the router once more, for the tokens that w multiplies: the ranks above need no gradient, and that of all tokens would be dear
        with torch.autocast(x.device.type, enabled=False):
            w, gate = self.router(q.to(self.router.weight.dtype)), gate[..., None]          # (B, C or Q, 1)
            w = w.sigmoid() if cfg.router == "sigmoid" else w
        # NOTE(paper): w multiplies Z with its residual inside (Eq. 4, as released): a small w erases a selected token's past
        z = torch.lerp(q, z, gate * w) if cfg.residual else torch.lerp(q, w * z, gate)      # exactly q where the gate is 0
        return z if rows is not None else x.scatter(1, spread, z), note


class Model(nn.Module):
    """Decision Mixer for vectors or frames; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        if cfg.k_cost and (cfg.selection != "learned" or cfg.k_gradient == "none"):
            raise ValueError("k_cost needs a k that learns: selection='learned' and k_gradient='straight-through'")
        if cfg.hyper_input == "flattened" and cfg.strategy == "token":
            raise ValueError("strategy='token' shows the hypernetwork one token: hyper_input='pooled'")
        if cfg.selection == "fixed" and cfg.strategy == "token":
            raise ValueError("a token alone has no rank: selection='fixed' needs strategy='window' or 'prefix'")
        if cfg.capacity is not None and not (0 < cfg.capacity <= 1 and cfg.strategy == "window" and cfg.selection == "learned"):
            raise ValueError(f"capacity is a share of the window, above 0 and up to 1, for a learned k and strategy='window'; not {cfg.capacity}")
        if cfg.k_margin < 1 or not 0 < cfg.k_start < 1 or not 0 < cfg.fixed_k <= 1:
            raise ValueError("k_margin must be at least 1, k_start a share between 0 and 1, and fixed_k one above 0 and up to 1")
        d, self.frames = cfg.d, len(cfg.state_shape) == 3
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
        # NOTE(code): with frames, as released for Atari, each embedding goes through a tanh, in place of a norm for all
        self.embed_ln, self.drop = nn.Identity() if self.frames else nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        # NOTE(paper): does not say which of the alternating layers comes first; standard first, as released
        mixer = [cfg.selection != "none" and (cfg.layers == "all" or i % 2 == 1) for i in range(cfg.n_layer)]
        self.blocks = nn.ModuleList((MixerLayer if m else StandardLayer)(cfg, self.tokens * cfg.context_len) for m in mixer)
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, cfg.act_dim)
        # NOTE(code): GPT-2's N(0, 0.02) holds inside the blocks only; embeddings and head keep torch's defaults, as released
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        if self.frames:     # but for these two
            nn.init.normal_(self.head.weight, std=0.02)
            if cfg.use_actions and cfg.discrete:
                nn.init.normal_(self.embed_action.weight, std=0.02)
        nn.init.normal_(self.embed_timestep.weight, std=cfg.timestep_std)
        for block in self.blocks:
            if isinstance(block, MixerLayer):
                # NOTE(code): starts around 0, where w_i Z_i wipes out or flips every token selected, and k learns to flee; 1 keeps them
                nn.init.constant_(block.router.bias, cfg.router_bias)
                if cfg.selection == "learned":
                    nn.init.constant_(block.hyper.last.bias, math.log(cfg.k_start / (1 - cfg.k_start)))

    def param_groups(self, weight_decay):
        """The auxiliary predictors learn apart from the model they watch: at their own rate, without decay, clipped on their own.

        NOTE(code): each steps its own Adam inside forward there, and its gradients still count in the norm that clips the model's.
        """
        aux = [p for name, p in self.named_parameters() if ".aux." in name]
        rest = [p for name, p in self.named_parameters() if ".aux." not in name]
        groups = [dict(params=rest, weight_decay=weight_decay, lr_scale=1.0)]
        return groups + [dict(params=aux, weight_decay=0.0, lr_scale=self.cfg.aux_lr_scale)] if aux else groups

    def hidden(self, states, actions, rewards, rtg, timesteps, mask, rows, acting, memory=None):
        """(B, number of rows, d): the last layer at the token positions in the slice rows; and a note from each mixer layer."""
        cfg, dtype = self.cfg, self.head.weight.dtype
        # released for Atari: the first step's timestep for the whole window, and the place in it. NOTE(code): acting used the last step's
        time = self.embed_timestep((timesteps[:, :1] if cfg.position == "window" else timesteps).clamp(max=cfg.max_ep_len - 1))
        x = [self.embed_state(states, memory) if self.frames else self.embed_state(states.to(dtype))]
        if cfg.condition != "none":
            # the reward that led to s_t; the first step of a window has none
            c = rtg.to(dtype) if cfg.condition == "rtg" else F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))     # (B, K, 1)
            x.insert(0, self.embed_condition(c))
        if cfg.use_actions:
            x.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        x = torch.stack(x, 2)                                                               # (B, K, tokens, d)
        x = ((x.tanh() if self.frames else x) + time[:, :, None]).flatten(1, 2)             # (B, L, d): R_1 s_1 a_1 R_2 ...
        if cfg.position == "window":
            x = x + self.embed_place[:x.shape[1]]
        x = self.drop(self.embed_ln(x))
        if mask is None:
            mask = torch.ones_like(timesteps, dtype=torch.bool)
        valid, notes = mask.repeat_interleave(self.tokens, 1), []                           # (B, L)
        for i, block in enumerate(self.blocks):
            at = rows if i == cfg.n_layer - 1 else None
            if isinstance(block, MixerLayer):
                x, note = block(x, valid, acting, at)
                notes.append(note)
            else:
                x = block(x, at)
        return self.ln_f(x), notes

    def predict(self, x):
        y = self.head(x)
        return y if self.cfg.discrete else torch.tanh(y)

    def run(self, states, actions, rewards, rtg, timesteps, mask=None):
        """(what forward returns, one note per mixer layer)."""
        rows = slice(self.state_at, None, self.tokens)
        x, notes = self.hidden(states, actions, rewards, rtg, timesteps, mask, rows, acting=not self.training)
        return self.predict(x), notes

    def forward(self, states, actions, rewards, rtg, timesteps, mask=None):
        """Predict every step's action from what came before it.

        states (B, K, S) or frames (B, K, C, height, width) from 0 to 255, actions (B, K, A) or (B, K) int64, rewards and rtg (B, K,
        1), timesteps (B, K) int64, mask (B, K) bool. Returns (B, K, A): actions in [-1, 1], or logits. In training mode tokens are
        selected with the whole window in view (real tokens only: here mask is read), in evaluation mode as when acting, where a
        prediction depends on nothing that comes later.
        """
        return self.run(states, actions, rewards, rtg, timesteps, mask)[0]

    def loss(self, batch):
        """(total, log). log["loss"] is Eq. 6: squared error, or cross-entropy if discrete, averaged over the real steps of the batch.

        In training mode the total adds each auxiliary predictor's own loss (Eq. 5), which reaches nothing but that predictor, and
        k_cost times the share of tokens kept. log has the tokens kept in the mixer layers as kept_1, kept_2, ... (Table 10).
        """
        y, notes = self.run(**batch)
        y = y.float()
        if self.cfg.discrete:
            error = F.cross_entropy(y.flatten(0, 1), batch["actions"].flatten(), reduction="none").view(y.shape[:2])    # (B, K)
        else:
            error = (y - batch["actions"]).square().mean(-1)                                # (B, K)
        steps = batch["mask"].sum()
        total = loss = (error * batch["mask"]).sum() / steps
        log = {"loss": loss.detach()}
        if not notes:
            return total, log
        keep = torch.stack([note["keep"] for note in notes])                                # (mixer layers, B, L)
        if "guess" in notes[0]:
            guess, real = torch.stack([note["guess"] for note in notes]), batch["mask"].repeat_interleave(self.tokens, 1)
            # NOTE(paper): Eq. 5 puts a sigmoid on each of two logits; softmax over the two, as released. Padding is left out
            error = F.cross_entropy(guess.flatten(0, 2), keep.flatten().long(), reduction="none").view(keep.shape)
            aux = (error * real).sum() / (self.tokens * steps)                              # a layer's mean, summed over the layers
            log["aux"] = aux.detach() / len(notes)
            right = ((guess[..., 1] > guess[..., 0]) == keep) & real
            log["aux_accuracy"] = right.sum() / (len(notes) * self.tokens * steps)
            total = total + aux
        if self.cfg.k_cost and self.training:
            total = total + self.cfg.k_cost * torch.stack([note["share"] for note in notes]).mean()
        return total, log | {f"kept_{i}": k for i, k in enumerate(keep.sum(2).float().mean(1), 1)}

    @torch.no_grad()
    def selected(self, batch):
        """(mixer layers, B, L) bool: the tokens that forward would select, in the present mode (Fig. 4)."""
        return torch.stack([note["keep"] for note in self.run(**batch)[1]])

    @torch.no_grad()
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None, memory=None):
        """The action for the last step of a history of any length; its own action and reward are placeholders that nobody reads.

        Shapes as in forward. Returns (B, A), or (B,) int64: the likeliest choice, or one drawn with the generator if sample.
        memory: a dict, empty at first, handed back at each next step of the same B episodes; frames are then embedded once.
        """
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg, timesteps)]
        at = (history[0].shape[1] - 1) * self.tokens + self.state_at
        y = self.predict(self.hidden(*history, None, slice(at, at + 1), True, memory)[0])[:, -1]
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


DecisionMixer = Model


def unread(cfg):
    """{input or parameter: why} for what the model is known not to read; the tests hold the model to everything else."""
    out = {}
    if cfg.condition != "rtg":
        out["rtg"] = "condition is not rtg"
    if cfg.condition != "reward":
        out["rewards"] = "condition is not reward"
    if not cfg.use_actions:
        out["actions"] = "no action tokens"
    if cfg.k_gradient == "none":
        out |= {f"blocks.{i}.hyper": "k is rounded without a gradient, as released" for i in range(cfg.n_layer)}
    return out


if __name__ == "__main__":
    torch.manual_seed(0)
    cfg = Config(d=64, n_layer=2, dropout=0.0)
    model, B, K = Model(cfg), 8, cfg.context_len
    batch = dict(states=torch.randn(B, K, *cfg.state_shape), actions=torch.rand(B, K, cfg.act_dim) * 2 - 1, rewards=torch.rand(B, K, 1),
                 rtg=torch.rand(B, K, 1), timesteps=torch.arange(K).expand(B, K), mask=torch.ones(B, K, dtype=torch.bool))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(101):
        loss, log = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {log['loss'].item():.4f}  tokens kept {log['kept_1'].item():.1f} of {model.tokens * K}")
