"""Long-Short Decision Transformer (Wang et al., ICLR 2025).

A Decision Transformer that mixes tokens in two ways side by side. Some of a token's channels attend to the
whole window; the others average the last six tokens, by weights that each token computes anew:

      R1   s1   a1   R2   s2   a2   R3   s3   a3      one token each for return-to-go, state, action
       └────┴────┴────┴────┴────┴────┴────┤           long: attention, d - c channels
                 └────┴────┴────┴────┴────┤           short: convolution, c channels
                                          │
                            a gate for each channel, a projection,
                            MLP, then the next block; the last output at s3 predicts a3

conv_ratio=0 makes it a Decision Transformer, 1 the paper's CDT; branch="dc" makes it the paper's LSDC.

    python lsdt.py        learns one random batch by heart and prints the loss

B batch, K context steps, L tokens (3K), d width, c channels of the short branch, S state size, A action size.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    # sizes
    state_shape: tuple[int, ...] = (11,)  # (S,), goal included; or (C, height, width): C gray frames
    act_dim: int = 3              # A numbers in [-1, 1]; or A choices, if discrete
    discrete: bool = False        # actions are choices
    goal_dim: int = 0             # the last numbers of the state, where there is a goal
    context_len: int = 10         # K
    max_ep_len: int = 4096        # rows of the timestep table; later steps share the last
    n_layer: int = 3              # blocks
    n_head: int = 1               # of the long branch
    d: int = 128                  # width, a multiple of 4
    # the paper's switches
    conv_ratio: float = 0.5       # the short branch's share of the channels (Section 4.5)
    kernel: int = 6               # tokens that the short branch sees, its own included (B.7's k_m)
    branch: Literal["dynamic", "dc"] = "dynamic"  # the short branch; dc: DC's filters (Section 4.4)
    fusion: Literal["hfm", "hfm_scaled", "hfm_time", "concat"] = "hfm"  # see Fusion (B.3)
    routing: Literal["split", "residual", "weight"] = "split"  # see LongShort (B.10)
    goal: Literal["none", "state"] = "state"  # state: the goal is part of it (Section 3.3)
    use_actions: bool = True      # False: no action tokens (D.2, hopper-medium)
    activation: Literal["relu", "gelu"] = "gelu"  # of the MLP
    dropout: float = 0.25         # after mixer and MLP; 0 turns the others off as well
    conv_dropout: float = 0.2     # of dynamic kernels
    dropkey: bool = False         # drop keys before the softmax, not weights after it (B.8)
    # the released code's
    attn_dropout: float = 0.1     # of attention weights, or of keys
    position: Literal["timestep", "window"] = "timestep"  # window: the place in it (DT's code for Atari)
    timestep_std: float = 0.022   # spread of the timestep table: xavier's for 4096 x 128
    # ours
    condition: Literal["rtg", "reward", "none"] = "rtg"  # first token of a step; none: behaviour cloning


class LongShort(nn.Module):
    """Two branches side by side, their fusion, one projection (Fig. 4). (B, L, d) to (B, L, d).

    routing  split     the long branch is given the first d - c channels, the short one the other c
             residual  the same of x + route(x): LSDT-res. NOTE(paper): B.10 has "two separate linear
                       projections"; here each reads all channels, and the two are one matrix
             weight    each is given all d channels, whatever conv_ratio is: LSDT-weight
    """

    def __init__(self, cfg, kinds):
        super().__init__()
        self.widths = branch_widths(cfg)
        long, short = self.widths
        self.whole = cfg.routing == "weight"
        rates = (cfg.attn_dropout, cfg.conv_dropout) if cfg.dropout else (0.0, 0.0)

        self.route = nn.Linear(cfg.d, cfg.d) if cfg.routing == "residual" else None
        self.long = LongBranch(long, cfg.n_head, rates[0], cfg.dropkey) if long else None
        if not short:
            self.short = None
        elif cfg.branch == "dynamic":
            self.short = DynamicConv(short, cfg.kernel, rates[1])
        else:
            self.short = TokenFilters(short, cfg.kernel, kinds)
        self.fusion = None
        if long and short and cfg.fusion != "concat":
            self.fusion = Fusion(long + short, "weight" if self.whole else cfg.fusion)
        self.proj = nn.Linear(cfg.d, cfg.d)

    def forward(self, x):
        if self.route:
            x = x + self.route(x)
        parts = (x, x) if self.whole else x.split(self.widths, -1)
        branches = zip((self.long, self.short), parts, strict=True)
        y = torch.cat([branch(part) for branch, part in branches if branch], -1)
        if self.fusion:
            y = self.fusion(y)
        return self.proj(y)


def branch_widths(cfg):
    """[channels of the long branch, c]: c is a multiple of 4, since four channels share a kernel."""
    if cfg.routing == "weight":
        return [cfg.d, cfg.d]
    c = 4 * round(cfg.conv_ratio * cfg.d / 4)
    return [cfg.d - c, c]


class DynamicConv(nn.Module):
    """A causal convolution whose kernel each token computes from itself (Eq. 1). (B, L, c) to (B, L, c).

        u = GLU(expand(x));    y[t] = out(bias + sum over j of softmax_j(logits(u[t]))[j] * u[t - j])

    j from 0 to width - 1. The softmax is over the taps in the window: the first token's kernel has one.
    NOTE(code): Eq. 1 is centred and its future half masked (5 of the released 11 taps); it is left out here.
    NOTE(code): kernels are computed from the GLU's output, and dropout falls on their logits.
    NOTE(paper): Eq. 1 gives a kernel to 4 adjacent channels. Here they stand c / 4 apart: the same functions
    with channels renamed, and quicker.
    """

    def __init__(self, c, width, dropout):
        super().__init__()
        self.width = width
        self.heads = c // 4
        self.expand = nn.Linear(c, 2 * c)
        self.logits = nn.Linear(c, width * self.heads)
        self.drop = Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(c))
        self.out = nn.Linear(c, c)

    def kernels(self, u):
        """(B, L, width, heads): what each token weighs the token j steps back with; sums to 1 over j."""
        z = self.drop(self.logits(u)).unflatten(-1, (self.width, self.heads))
        outside = z.new_full((u.shape[1], self.width), -torch.inf).triu(1)  # j > t: before the window
        return (z + outside[:, :, None]).softmax(-2)

    def forward(self, x):
        L = x.shape[1]
        last = self.width - 1
        u = F.glu(self.expand(x), -1)
        padded = F.pad(u, (0, 0, last, 0)).unflatten(-1, (4, self.heads))
        y = self.bias.view(4, self.heads)
        for j, weight in enumerate(self.kernels(u).unbind(2)):  # weight (B, L, heads)
            past = padded[:, last - j: last - j + L]            # u[t - j] in place t
            y = torch.addcmul(y, past, weight[:, :, None])      # (B, L, 4, heads)
        return self.out(y.flatten(2))


class LongBranch(nn.Module):
    """Causal self-attention; the projection that follows is LongShort's. (B, L, d) to (B, L, d).

    NOTE(code): dropout falls on the weights, as in B.8; the released code drops entries of weights @ v.
    NOTE(code): the released DropKey is commented out, and would add 1e-13, which drops nothing.
    """

    def __init__(self, d, n_head, dropout, dropkey):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.dropkey = dropkey
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x):
        B, L, _ = x.shape
        # each (B, n_head, L, d / n_head)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mask = None
        if self.dropkey and dropout:
            kept = torch.rand(B, self.n_head, L, L, device=x.device) >= dropout
            own = torch.eye(L, dtype=torch.bool, device=x.device)   # stays: the first token has no other key
            mask = kept.tril(-1) | own
            dropout = 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
        return y.transpose(1, 2).flatten(2)


class TokenFilters(nn.Module):
    """A causal convolution, one filter a channel, chosen by the kind of the token it makes (DC paper, Eq. 4):

        y[p, q] = bias[q] + sum over l of w[l, q] * x[p - l, q],    w and bias those of the kind of token p

    p place of a token, q channel, l from 0 to window - 1; x (B, L, d) is zero before the first token.
    NOTE(code): Eq. 4 has no bias; the paper's counts (8,064 parameters) include one, and so does its code.
    """

    def __init__(self, d, window, kinds):
        super().__init__()
        bound = window**-0.5                                        # torch's default for such a convolution
        self.weight = nn.Parameter(torch.empty(kinds, window, d).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(kinds, d).uniform_(-bound, bound))

    def forward(self, x):
        kinds, window, _ = self.weight.shape
        L = x.shape[1]
        padded = F.pad(x, (0, 0, window - 1, 0))                    # (B, window - 1 + L, d)
        y = self.bias
        # A sum of shifted copies: torch's own convolution is three times slower with one filter a channel.
        for l in range(window):  # noqa: E741 (Eq. 4's letter)
            past = padded[:, window - 1 - l: window - 1 - l + L]    # x[p - l] in place p
            past = past.unflatten(1, (-1, kinds))                   # (B, L / kinds, kinds, d)
            y = torch.addcmul(y, past, self.weight[:, l])
        return y.flatten(1, 2)


class Fusion(nn.Module):
    """Hybrid fusion module (Eqs. 2 to 4): gates(y) * y, for y the channels of both branches.

    kind  hfm         softmax over the channels: about 1 / d each
          hfm_scaled  d times that: about 1 each, at the start nearly a plain concatenation
          hfm_time    softmax over the tokens up to this one, channel by channel
          weight      softmax over the two branches, channel by channel, and the sum of both
    NOTE(paper): the text says softmax over time, which would show the future; the code takes channels, and so
    does the default. It leaves a hundredth of the branches at first; hfm_scaled does not.
    NOTE(paper): weight is our reading of B.10, "a learnable weighted sum" by "a modified version" of this.
    """

    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        self.squeeze = nn.Linear(width, width // 2)  # W_f
        self.expand = nn.Linear(width // 2, width)   # W_f1 and W_f2 in one

    def gates(self, y):
        z = self.expand(F.relu(self.squeeze(y)))  # (B, L, width)
        if self.kind == "hfm":
            return z.softmax(-1)
        if self.kind == "hfm_scaled":
            return z.softmax(-1) * z.shape[-1]
        if self.kind == "hfm_time":
            z = z.to(torch.promote_types(z.dtype, torch.float32))   # autocast does so for softmax alone
            return (z - z.logcumsumexp(1)).exp()
        return z.unflatten(-1, (2, -1)).softmax(-2).flatten(-2)

    def forward(self, y):
        y = self.gates(y) * y
        return y.unflatten(-1, (2, -1)).sum(-2) if self.kind == "weight" else y


class Dropout(nn.Dropout):
    """torch's own, drawn by comparing uniform numbers, which saves a tenth of a training step on a CPU."""

    def forward(self, x):
        if not self.training or not 0 < self.p < 1:
            return super().forward(x)
        return x * torch.rand_like(x).ge_(self.p).div_(1 - self.p)


class PostNormBlock(nn.Module):
    """LN(x + mixer(x)), then LN(x + MLP(x)).

    NOTE(code): norms after the sums, and none after the last block; the paper says "most settings as DT".
    """

    def __init__(self, cfg, kinds):
        super().__init__()
        d = cfg.d
        self.mixer = LongShort(cfg, kinds)
        self.ln1 = nn.LayerNorm(d)
        self.ln2 = nn.LayerNorm(d)
        activation = nn.ReLU() if cfg.activation == "relu" else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), activation, nn.Linear(4 * d, d))
        self.drop = Dropout(cfg.dropout)

    def forward(self, x, keep=None):
        y = self.mixer(x)
        if keep is not None:    # the last block: only states predict
            x, y = x[:, keep], y[:, keep]
        x = self.ln1(x + self.drop(y))
        return self.ln2(x + self.drop(self.mlp(x)))


class FrameEncoder(nn.Sequential):
    """DQN's convolutions (Mnih et al., 2015) and a linear layer: (B, K, C, height, width) to (B, K, d)."""

    def __init__(self, C, height, width, d):
        if min(height, width) < 36:
            raise ValueError(f"frames of {height} x {width} pixels: the convolutions need 36 x 36 at least")
        places = ((height - 4) // 8 - 3) * ((width - 4) // 8 - 3)  # 7 * 7 for 84 x 84 pixels
        super().__init__(
            nn.Conv2d(C, 32, 8, 4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * places, d),
        )

    def forward(self, frames):
        # channels last: the quickest layout for convolutions
        pixels = frames.flatten(0, 1).to(self[0].weight.dtype, memory_format=torch.channels_last)
        return super().forward(pixels / 255).unflatten(0, frames.shape[:2])


class LongShortDecisionTransformer(nn.Module):

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.frames = len(cfg.state_shape) == 3
        self.state_at = int(cfg.condition != "none")        # the state's place among a step's tokens
        self.kinds = self.state_at + 1 + cfg.use_actions    # the number of them
        self.check()
        d = cfg.d

        self.embed_state = (FrameEncoder if self.frames else nn.Linear)(*cfg.state_shape, d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(self.kinds * cfg.context_len, d))
        self.embed_ln = nn.LayerNorm(d)         # NOTE(code): no dropout follows, as it does in DT
        self.blocks = nn.ModuleList(PostNormBlock(cfg, self.kinds) for _ in range(cfg.n_layer))
        self.head = nn.Linear(d, cfg.act_dim)
        self.init_weights()

    def check(self):
        """Raises ValueError for sizes that make no model, and for a switch that has no effect.

        Presets set conv_ratio, n_head and kernel: these may have none.
        """
        cfg = self.cfg
        sizes = "act_dim", "context_len", "max_ep_len", "n_layer", "n_head", "d", "kernel"
        for name, least in (dict.fromkeys(sizes, 1) | dict(timestep_std=0)).items():
            if getattr(cfg, name) < least:
                raise ValueError(f"{name}={getattr(cfg, name)} must be at least {least}")
        if not 0 <= cfg.conv_ratio <= 1:
            raise ValueError(f"conv_ratio={cfg.conv_ratio} is a share of the channels: between 0 and 1")
        if cfg.d % 4:
            raise ValueError(f"d={cfg.d} must be a multiple of 4: four channels share a kernel")
        long, short = branch_widths(cfg)
        if long % cfg.n_head:
            raise ValueError(f"n_head={cfg.n_head} does not divide the {long} channels of the long branch")
        tokens = self.kinds * cfg.context_len
        if cfg.kernel > max(tokens, Config.kernel):
            raise ValueError(f"kernel={cfg.kernel} is more than the {tokens} tokens of a window")
        dynamic = short and cfg.branch == "dynamic" and cfg.kernel > 1
        for name, works, need in (
            ("branch", short, "conv_ratio above 0"),
            ("fusion", long and short, "conv_ratio between 0 and 1"),
            ("fusion", cfg.routing != "weight", "another routing: weight has its own"),
            ("attn_dropout", long and cfg.dropout, "dropout above 0 and conv_ratio below 1"),
            ("dropkey", long and cfg.dropout, "dropout above 0 and conv_ratio below 1"),
            ("dropkey", cfg.attn_dropout, "attn_dropout above 0"),
            ("conv_dropout", dynamic and cfg.dropout, "dropout above 0 and dynamic kernels of several taps"),
        ):
            value = getattr(cfg, name)
            if value and value != getattr(Config, name) and not works:
                raise ValueError(f"{name}={value} has no effect without {need}")

    def init_weights(self):
        """Xavier-uniform everywhere but in TokenFilters, and biases of zero, as released."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.xavier_uniform_(layer.weight)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)
        for mixer in [block.mixer for block in self.blocks]:    # what are several layers there
            parts = list(mixer.long.qkv.weight.chunk(3)) if mixer.long else []
            if mixer.fusion:
                parts += mixer.fusion.expand.weight.split(mixer.widths)
            for part in parts:
                nn.init.xavier_uniform_(part)
        bound = 3**0.5 * self.cfg.timestep_std
        nn.init.uniform_(self.embed_timestep.weight, -bound, bound)
        if self.cfg.discrete:   # ours: with xavier's, the loss would start far above ln(A)
            nn.init.normal_(self.head.weight, std=0.02)

    def features(
        self,
        states,         # (B, K, S) normalised; or (B, K, C, height, width), 0 to 255
        actions,        # (B, K, A) in [-1, 1]; or (B, K) int64
        rewards,        # (B, K, 1)
        rtg,            # (B, K, 1) return-to-go: the rewards from this step on, its own included
        timesteps,      # (B, K) int64, the step's place in its episode
        mask=None,      # (B, K) bool, False where padded: on the right, which no real step sees
    ):
        """(B, K, d): what each step's action is predicted from."""
        cfg = self.cfg
        dtype = self.head.weight.dtype
        tokens = []
        if cfg.condition != "none":  # reward: the one that led to this state
            c = rtg if cfg.condition == "rtg" else F.pad(rewards[:, :-1], (0, 0, 1, 0))
            tokens.append(self.embed_condition(c.to(dtype)))
        tokens.append(self.embed_state(states if self.frames else states.to(dtype)))
        if cfg.use_actions:
            tokens.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        time = timesteps[:, :1] if cfg.position == "window" else timesteps  # as in DT
        time = self.embed_timestep(time.clamp(max=cfg.max_ep_len - 1))
        x = torch.stack(tokens, 2) + time[:, :, None]   # (B, K, kinds, d)
        x = x.flatten(1, 2)                             # (B, L, d): R1 s1 a1 R2 ...
        if cfg.position == "window":
            x = x + self.embed_place[:x.shape[1]]
        x = self.embed_ln(x)

        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1](x, keep=slice(self.state_at, None, self.kinds))

    def predict(self, features):
        """(B, K, A): actions in [-1, 1], or logits."""
        y = self.head(features)
        return y if self.cfg.discrete else y.tanh()

    def forward(self, *inputs, **named):
        """(B, K, A): each step's predicted action; inputs as in features()."""
        return self.predict(self.features(*inputs, **named))

    def loss(self, batch):
        """(mean over real steps, what to log): squared error, or cross-entropy if discrete."""
        y = self(**batch).float()
        if self.cfg.discrete:
            error = F.cross_entropy(y.transpose(1, 2), batch["actions"], reduction="none")  # (B, K)
        else:
            error = (y - batch["actions"]).square().mean(-1)
        loss = (error * batch["mask"]).sum() / batch["mask"].sum()
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        """(B, A) or (B,): the action for a history's last step, whose own action and reward are not read."""
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg, timesteps)]
        y = self(*history)[:, -1]
        if not self.cfg.discrete:
            return y
        return torch.multinomial(y.softmax(-1), 1, generator=generator)[:, 0] if sample else y.argmax(-1)


Model = LongShortDecisionTransformer    # the name by which the trainer finds it


# The paper's hyper-parameters: "*", then the environment's family, then its name. "small" is ours.
GYM = dict(rtg_scale=1000.0, targets=(7000.0,), eval_episodes=20)
COMPLEX = dict(n_head=2, batch_size=256, lr=2e-4, rtg_scale=1.0)        # D.2's "more complex tasks"
PIXELS = dict(      # not in the paper: DT's
    n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, position="window", timestep_std=0.0,
    betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, schedule="cosine", lr_floor=0.1,
    eval_episodes=10,
)
PRESETS = {
    "*": dict(  # Table 13, and "locomotion" in the text below it
        n_layer=3, n_head=1, d=128, context_len=10, max_ep_len=4096, kernel=6, dropout=0.25, conv_dropout=0.2,
        activation="gelu", fusion="hfm", batch_size=64, lr=1e-4, weight_decay=1e-4, betas=(0.9, 0.999),
        clip=0.25, steps=100_000, warmup=10_000, schedule="cosine", eval_episodes=100,
        attn_dropout=0.1,       # NOTE(paper): one rate, 0.25, for everything; the code has 0.1 here
        conv_ratio=0.5,         # Section 4.5's advice; below, what Table 14 has else
        timestep_std=0.022,
    ),
    # Tables 5 (context, target), 14 (ratio) and Section 4 (episodes)
    "hopper": GYM, "halfcheetah": GYM, "walker2d": GYM,
    "antmaze": COMPLEX | dict(targets=(100.0,)),
    # the README's context is 30; the released LSDC has filters of 6 tokens here: --branch dc --kernel 6
    "maze2d": COMPLEX | dict(context_len=20, kernel=3, targets=(300.0,)),
    # context and targets are not given: AntMaze's, and CORL's for DT
    "pen": COMPLEX | dict(targets=(3100.0,), eval_episodes=20),
    "hammer": COMPLEX | dict(targets=(12800.0,), eval_episodes=20),
    "door": COMPLEX | dict(targets=(2900.0,), eval_episodes=20),
    "relocate": COMPLEX | dict(targets=(4300.0,), eval_episodes=20),
    "hopper-medium": dict(d=256, conv_ratio=1.0, use_actions=False),    # D.2; the code has no such switch
    "hopper-medium-replay": dict(d=256, conv_ratio=1.0, context_len=20),
    "hopper-medium-expert": dict(conv_ratio=0.75, context_len=20, targets=(10000.0,)),
    "halfcheetah-medium-expert": dict(conv_ratio=0.75, targets=(15000.0,)),
    "walker2d-medium": dict(conv_ratio=0.125, context_len=5),
    "walker2d-medium-expert": dict(conv_ratio=0.125, targets=(10000.0,)),
    "antmaze-umaze": dict(n_head=1),
    "antmaze-umaze-diverse": dict(conv_ratio=0.75),
    "antmaze-medium-play": dict(conv_ratio=0.75),
    "antmaze-medium-diverse": dict(lr=1e-4),
    "maze2d-medium": dict(conv_ratio=0.125),
    "maze2d-large": dict(conv_ratio=0.25),      # NOTE(paper): the second Maze2d-medium of Table 14
    "atari": PIXELS | dict(batch_size=128, lr=6e-4, steps=19_530, warmup=3, rtg_scale=1.0, sample=True),
    "dmc": PIXELS | dict(batch_size=64, lr=1e-3, steps=15_620, warmup=5),   # StARformer's comparison
    "small": dict(  # minutes on a laptop: DT's recipe
        n_layer=2, n_head=1, d=64, context_len=3, kernel=6, dropout=0.0, attn_dropout=0.0, conv_dropout=0.0,
        timestep_std=0.1, batch_size=106, steps=3400, lr=1.5e-3, warmup=100, schedule="cosine",
        eval_episodes=10, rtg_scale=None,   # the environment's
    ),
    "small-antmaze": dict(  # ours, on top of "small"
        n_layer=3, d=128, batch_size=256, steps=10_000, weight_decay=0.01,
    ),
    "small-frames": dict(   # on top of "small": as StARformer's
        n_head=2, d=96, context_len=2, timestep_std=0.0, batch_size=64, steps=3000, eval_every=0,
        sample=False,
    ),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    B, K, S, A = 8, 10, 11, 3
    model = Model(Config(d=64, n_layer=2, dropout=0.0))
    batch = dict(
        states=torch.randn(B, K, S), actions=torch.rand(B, K, A) * 2 - 1, rewards=torch.rand(B, K, 1),
        rtg=torch.rand(B, K, 1), timesteps=torch.arange(K).expand(B, K),
        mask=torch.ones(B, K, dtype=torch.bool),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(101):
        loss, _ = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
