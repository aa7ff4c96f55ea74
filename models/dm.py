"""Decision Mixer (Zheng et al., ICML 2025).

A Decision Transformer in which every second layer attends over a few tokens, and learns how many and which:

     R1    s1    a1    R2    s2    a2    R3    s3    a3    return-to-go, state and action: a token each
    0.2   1.4   0.9   0.1   1.2  -0.3   0.7   1.6   0.8    w from a router R, k = 4 from a hypernetwork H
           s1    a1          s2                s3          the k tokens of largest weight, in their order
           └─────┴───────────┴─────────────────┘           attention and MLP among these alone make Z
     R1  1.4 Z 0.9 Z   R2  1.2 Z   a2    R3  1.6 Z   a3    w Z in their places; the others as they were

Training chooses with the whole window in view. Acting cannot see the future: there an auxiliary predictor
(aux) chooses, which has learned to tell from one token whether training would keep it.

    python dm.py        learns one random batch by heart

B batch, K context steps, L tokens (3K; the paper's S), d width, S state size, A action size.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    # what the data decide
    state_shape: tuple[int, ...] = (11,)  # (S,), goal included; or (C, height, width): C stacked frames
    act_dim: int = 3           # A numbers in [-1, 1]; or A choices, if discrete
    discrete: bool = False
    goal_dim: int = 0          # the last numbers of the state, where there is a goal
    max_ep_len: int = 1000     # rows of the timestep table; later steps share its last
    # sizes
    context_len: int = 20      # K, the steps that a prediction may depend on
    n_layer: int = 6
    n_head: int = 4
    d: int = 256               # width of a token
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"  # of the MLPs
    # the paper's switches
    layers: Literal["alternating", "all"] = "alternating"  # mixer layers: 2nd, 4th, 6th; or all (Fig. 5)
    selection: Literal["learned", "fixed", "none"] = "learned"  # k by H, or fixed; none: no mixer layers
    fixed_k: float = 0.5       # a fixed k, as a share of the tokens (Table 2)
    strategy: Literal["window", "prefix", "token"] = "window"  # tokens in H's view: Table 6 (3), (2), (1)
    aux: bool | None = None    # auxiliary predictor (Table 2); None: where strategy is window
    # the released code's
    hyper_input: Literal["pooled", "flattened"] = "pooled"  # flattened: H reads all tokens side by side
    k_gradient: Literal["straight-through", "none"] = "straight-through"  # none: H does not learn
    position: Literal["timestep", "window"] = "timestep"  # window: the place in it, as DT on Atari
    # ours
    condition: Literal["rtg", "reward", "none"] = "rtg"  # a step's first token; none: no token
    use_actions: bool = True   # False: no action tokens
    goal: Literal["none", "state"] = "state"  # none: the trainer hides it
    timestep_std: float = 1.0  # spread of the timestep table at the start; released: 1
    router: Literal["raw", "sigmoid"] = "raw"  # sigmoid: w lies between 0 and 1
    router_bias: float = 1.0   # w at the start, about; before a sigmoid
    residual: bool = False     # True: x + w (Z - x), as in Mixture-of-Depths; False: w Z
    k_start: float = 0.5       # k at the start, about, as a share of the tokens
    k_cost: float = 0.0        # loss added if all tokens are kept; half of them cost half


class MixerLayer(nn.Module):
    """Attention and MLP for the k tokens of largest weight; the others pass by (Section 3.2, Eq. 4):

        x'[i] = w[i] Z[i]   if w[i] is among the k largest,   else   x[i]

    with w[i] = R(x[i]), k = H(x), and Z what a standard layer (Eq. 3) makes of the k tokens.
    NOTE(paper): Z[i] contains x[i], so w also scales what earlier layers wrote there.
    """

    static_shapes = False  # True, for a CUDA graph: rows keep their length; results are equal

    def __init__(self, cfg, length):
        super().__init__()
        self.cfg = cfg
        d = cfg.d
        self.layer = StandardLayer(cfg)
        self.router = nn.Linear(d, 1)  # R; sizes: Table 8
        if cfg.selection == "learned":
            self.hyper = Hypernetwork(d, length if cfg.hyper_input == "flattened" else 1)  # H
        self.aux = None
        if cfg.strategy == "window" and cfg.aux is not False:  # Section 3.3
            self.aux = nn.Sequential(nn.Linear(d, d // 2), nn.SiLU(), nn.Linear(d // 2, 2))

    def forward(self, x, mask, acting, wanted=None):
        """x (B, L, d), mask (B, L) False where padded -> (x', Choice). wanted: x' for this slice alone."""
        L, d = x.shape[1:]
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would make many weights equal
            w = self.router(x)  # (B, L, 1)
            choice = self.choose(x, w.detach()[..., 0], mask, acting)
        kept, ramp = choice.kept, choice.ramp
        gate = (kept + (ramp - ramp.detach()))[..., None]  # value: kept; gradient: the ramp's

        # C tokens a row: those kept, in order; then those on the ramp, whose gradient needs Z; then any.
        # Attention is causal, so those kept see each other alone.
        C = L if self.static_shapes else max(1, int((ramp > 0).sum(1).max()))
        order = (kept.int() + (ramp > 0)).argsort(dim=1, descending=True, stable=True)
        index = order[:, :C, None].expand(-1, -1, d)
        z = self.layer.attend(x.gather(1, index))  # (B, C, d)
        if wanted is None:
            z = x.scatter(1, index, self.layer.feed(z))  # (B, L, d)
        else:  # the MLP only for those wanted
            z = self.layer.feed(x.scatter(1, index, z)[:, wanted])
            x, w, gate = x[:, wanted], w[:, wanted], gate[:, wanted]
        if self.cfg.router == "sigmoid":
            w = w.sigmoid()
        z = torch.lerp(x, z, w) if self.cfg.residual else w * z  # lerp: x + w (z - x)
        return torch.lerp(x, z, gate), choice

    def choose(self, x, w, mask, acting):
        """The Choice among tokens x (B, L, d) of weights w (B, L)."""
        cfg = self.cfg
        if acting and self.aux is not None:  # Algorithm 2
            kept = (self.aux(x).argmax(-1) == 1) & mask
            return Choice(kept, kept.to(w.dtype), None, None)

        # NOTE(paper): without a predictor, acting looks at no later token
        view = "prefix" if acting and cfg.strategy == "window" else cfg.strategy
        n = in_view(mask.long(), view).clamp(min=1)  # real tokens in view, (B, 1) or (B, L)
        share = self.hyper(x * mask[..., None], n, view) if cfg.selection == "learned" else cfg.fixed_k
        k = (share * n).round().clamp(min=0 if view == "token" else 1)
        rank = ranks(w, mask, view)
        kept = (rank < k) & mask  # NOTE(code): there k - 1, padding among them
        ramp = kept.to(w.dtype)
        # NOTE(code): k has no gradient there, and H stays as it began. Here a ramp from 1 to 0 over the four
        # ranks around k tells H what a token more or less is worth: an estimate, since those not kept stand
        # last in their row, see later steps and are seen by none.
        if cfg.selection == "learned" and cfg.k_gradient != "none" and not acting:
            margin = share * n - rank - 0.5  # ranks by which a token is kept; negative: it passes by
            ramp = mask * (F.hardtanh(margin, -2, 2) / 4 + 0.5)
        return Choice(kept, ramp, share, None if self.aux is None else self.aux(x.detach()))


class Choice(NamedTuple):
    """What a mixer layer decides about the tokens of each row."""
    kept: torch.Tensor  # (B, L) bool
    ramp: torch.Tensor  # (B, L): as kept; where H learns, with a slope around k that teaches it
    share: torch.Tensor | float | None  # (B, 1) or (B, L): k as a share of the tokens in view
    aux_logits: torch.Tensor | None  # (B, L, 2): the auxiliary predictor's, of passing by and kept


def in_view(y, view):
    """y (B, L, ...) summed over the tokens that a choice looks at (Table 6).

    "window": all, (B, 1, ...). "prefix": for each token those up to it, (B, L, ...). "token": it alone.
    """
    if view == "window":
        return y.sum(1, keepdim=True)
    return y.cumsum(1) if view == "prefix" else y


def ranks(w, mask, view):
    """(B, L): each token's place by weight among those in view, 0 for the largest; ties: the earlier first.

    NOTE(paper): Table 6 limits what H reads; here the ranks too, as acting knows no other tokens.
    """
    if view == "window":
        order = w.masked_fill(~mask, -math.inf).argsort(dim=1, descending=True, stable=True)
        return order.argsort(dim=1)
    if view == "prefix":
        return (w[:, None] >= w[:, :, None]).tril(-1).sum(2)  # [b, i, j]: w[j] >= w[i], j < i
    return torch.zeros_like(w)


class Hypernetwork(nn.Module):
    """H of Section 3.2: k as a share of the real tokens in view.

    NOTE(paper): Table 8 has K * d inputs and no sigmoid; released 3K * d (7.9 million parameters at K 20),
    padding included. Here pooled is the mean real token, and padding is zeros.
    """

    def __init__(self, d, length):
        super().__init__()
        self.first = nn.Linear(length * d, 512)  # length 1: pooled
        self.last = nn.Linear(512, 1)

    def forward(self, x, n, view):
        """x (B, L, d), zero where padded, n real tokens in view -> (B, 1) or (B, L)."""
        L, d = x.shape[1:]
        if self.first.in_features == d:
            h = self.first(in_view(x, view) / n[..., None])  # of the mean token
        else:  # of all side by side, those out of view as zeros: the sum of what each adds
            weight = self.first.weight.unflatten(1, (-1, d))[:, :L]  # (512, L, d)
            h = in_view(torch.einsum("bld,hld->blh", x, weight), view) + self.first.bias
        return self.last(F.leaky_relu(h)).sigmoid().squeeze(-1)


class StandardLayer(nn.Module):
    """A transformer block in its two halves: Z1 = x + Att(LN(x)), Z2 = Z1 + FFN(LN(Z1)).

    NOTE(paper): Eq. 3 lacks "Z1 +"; the released block has it.
    """

    def __init__(self, cfg):
        super().__init__()
        d = cfg.d
        self.ln1 = nn.LayerNorm(d)
        self.mixer = Attention(d, cfg.n_head, cfg.dropout)  # so named in all models
        self.ln2 = nn.LayerNorm(d)
        activation = nn.ReLU() if cfg.activation == "relu" else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), activation, nn.Linear(4 * d, d))
        self.drop = nn.Dropout(cfg.dropout)

    def attend(self, x):
        return x + self.drop(self.mixer(self.ln1(x)))

    def feed(self, z):
        return z + self.drop(self.mlp(self.ln2(z)))

    def forward(self, x, wanted=None):  # x (B, L, d); wanted as in MixerLayer
        z = self.attend(x)
        return self.feed(z if wanted is None else z[:, wanted])


class Attention(nn.Module):
    """Causal self-attention: each token reads itself and the tokens before it. (B, L, d) to (B, L, d)."""

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        # each (B, n_head, L, d / n_head)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


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


class DecisionMixer(nn.Module):
    """Chooses tokens as in training if in training mode, else as in acting."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        # NOTE(paper): does not say which kind is first; standard, as released
        self.mixes = [cfg.selection != "none" and (cfg.layers == "all" or i % 2) for i in range(cfg.n_layer)]
        self.check()
        d = cfg.d
        self.frames = len(cfg.state_shape) == 3
        self.state_at = int(cfg.condition != "none")  # the state's place among a step's tokens
        self.kinds = self.state_at + 1 + cfg.use_actions  # the number of them
        length = self.kinds * cfg.context_len

        self.embed_state = (FrameEncoder if self.frames else nn.Linear)(*cfg.state_shape, d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(length, d))
        # frames: a tanh, as in DT
        self.embed_ln = nn.Identity() if self.frames else nn.LayerNorm(d)
        self.drop = nn.Dropout(cfg.dropout)

        self.blocks = nn.ModuleList(MixerLayer(cfg, length) if m else StandardLayer(cfg) for m in self.mixes)
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, cfg.act_dim)
        self.init_weights()

    def check(self):
        """Raises ValueError for sizes that make no model, and for most switches without effect."""
        cfg = self.cfg
        sizes = cfg.act_dim, cfg.max_ep_len, cfg.context_len, cfg.n_layer, cfg.n_head, cfg.d
        if min(*sizes, *cfg.state_shape) < 1 or cfg.timestep_std < 0 or cfg.d % cfg.n_head:
            raise ValueError(f"n_head={cfg.n_head} does not divide d={cfg.d}, or size or timestep_std is low")
        if not (0 < cfg.fixed_k <= 1 and 0 < cfg.k_start < 1 and 0 <= cfg.k_cost < math.inf):
            raise ValueError("fixed_k must lie in (0, 1], k_start in (0, 1), k_cost in [0, inf)")
        mixes = any(self.mixes)
        H = mixes and cfg.selection == "learned"
        several = cfg.strategy != "token"
        for name, works, need in (
            ("layers", mixes, "mixer layers"),
            ("aux", mixes and cfg.strategy == "window", "mixer layers of strategy='window'"),
            ("fixed_k", cfg.selection == "fixed", "selection='fixed'"),
            ("selection", several or cfg.selection != "fixed", "several tokens"),
            ("hyper_input", H and several, "an H of several tokens"),
            ("k_gradient", H, "an H"),
            ("k_cost", H and cfg.k_gradient != "none", "an H that learns"),
        ):
            if getattr(cfg, name) != getattr(Config, name) and not works:
                raise ValueError(f"{name}={getattr(cfg, name)} has no effect without {need}")

    def init_weights(self):
        """GPT-2's N(0, 0.02) in the blocks, and for frames in two more; else torch's."""
        cfg = self.cfg
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        if self.frames:
            nn.init.normal_(self.head.weight, std=0.02)
            if cfg.use_actions and cfg.discrete:
                nn.init.normal_(self.embed_action.weight, std=0.02)
        nn.init.normal_(self.embed_timestep.weight, std=cfg.timestep_std)
        for block in self.blocks:
            if isinstance(block, MixerLayer):
                # NOTE(code): w starts around 0 there; around 1, a kept token begins as its Z
                nn.init.constant_(block.router.bias, cfg.router_bias)
                if cfg.selection == "learned":
                    nn.init.constant_(block.hyper.last.bias, math.log(cfg.k_start / (1 - cfg.k_start)))

    def param_groups(self, weight_decay):
        """Auxiliary predictors learn at a tenth of the rate (lr_scale), without decay, as released.

        NOTE(code): there their gradients count in the norm that clips the model's.
        """
        aux, rest = [], []
        for name, p in self.named_parameters():
            (aux if ".aux." in name else rest).append(p)
        groups = [dict(params=rest, weight_decay=weight_decay, lr_scale=1.0)]
        return groups + [dict(params=aux, weight_decay=0.0, lr_scale=0.1)] if aux else groups

    def features(
        self,
        states,         # (B, K, S) normalised; or (B, K, C, height, width), 0 to 255
        actions,        # (B, K, A) in [-1, 1]; or (B, K) int64
        rewards,        # (B, K, 1)
        rtg,            # (B, K, 1) return-to-go: the rewards from this step on, its own included
        timesteps,      # (B, K) int64, the step's place in its episode
        mask=None,      # (B, K) bool, False where padded: on the right, never kept
    ):
        """(B, K, d): what each step's action is predicted from."""
        return self.encode(states, actions, rewards, rtg, timesteps, mask)[0]

    def encode(self, states, actions, rewards, rtg, timesteps, mask=None):
        """(features, [each mixer layer's Choice]); inputs as in features()."""
        cfg = self.cfg
        dtype = self.head.weight.dtype
        tokens = []
        if cfg.condition != "none":  # reward: the one that led to this state
            c = rtg if cfg.condition == "rtg" else F.pad(rewards[:, :-1], (0, 0, 1, 0))
            tokens.append(self.embed_condition(c.to(dtype)))
        tokens.append(self.embed_state(states if self.frames else states.to(dtype)))
        if cfg.use_actions:
            tokens.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        x = torch.stack(tokens, 2)  # (B, K, kinds, d)
        if self.frames:
            x = x.tanh()
        time = timesteps[:, :1] if cfg.position == "window" else timesteps  # as in DT
        time = self.embed_timestep(time.clamp(max=cfg.max_ep_len - 1))
        x = (x + time[:, :, None]).flatten(1, 2)  # (B, L, d): R1 s1 a1 R2 ...
        if cfg.position == "window":
            x = x + self.embed_place[:x.shape[1]]
        x = self.drop(self.embed_ln(x))

        if mask is None:
            mask = torch.ones_like(timesteps, dtype=torch.bool)
        mask = mask.repeat_interleave(self.kinds, 1)  # (B, L)
        choices = []
        for i, block in enumerate(self.blocks, 1):  # in the last layer, only the states predict
            wanted = slice(self.state_at, None, self.kinds) if i == cfg.n_layer else None
            if isinstance(block, MixerLayer):
                x, choice = block(x, mask, not self.training, wanted)
                choices.append(choice)
            else:
                x = block(x, wanted)
        return self.ln_f(x), choices

    def predict(self, features):
        """(B, K, A): actions in [-1, 1], or logits."""
        y = self.head(features)
        return y if self.cfg.discrete else y.tanh()

    def forward(self, *inputs, **named):
        """(B, K, A): predicted actions; inputs as in features()."""
        return self.predict(self.features(*inputs, **named))

    def loss(self, batch):
        """(total, what to log). log["loss"]: squared error (Eq. 6), or cross-entropy, mean over real steps.

        In training mode total adds each mixer layer's Eq. 5, which teaches its auxiliary predictor alone, and
        k_cost times the share to keep. log["kept_1"], ...: tokens that each keeps (Table 10).
        """
        features, choices = self.encode(**batch)
        y = self.predict(features).float()
        if self.cfg.discrete:
            error = F.cross_entropy(y.transpose(1, 2), batch["actions"], reduction="none")  # (B, K)
        else:
            error = (y - batch["actions"]).square().mean(-1)
        total = loss = (error * batch["mask"]).sum() / batch["mask"].sum()
        log = {"loss": loss.detach()}
        log |= {f"kept_{i}": c.kept.sum(1).float().mean() for i, c in enumerate(choices, 1)}

        mask = batch["mask"].repeat_interleave(self.kinds, 1)  # (B, L)

        def mean(values):  # over layers and real tokens
            return (torch.stack(values) * mask).sum() / (len(values) * mask.sum())

        if choices and choices[0].aux_logits is not None:
            # NOTE(paper): Eq. 5 has a sigmoid of each logit; softmax over both, as released
            aux = mean([F.cross_entropy(c.aux_logits.mT, c.kept.long(), reduction="none") for c in choices])
            total = total + len(choices) * aux
            log["aux"] = aux.detach()
            log["aux_accuracy"] = mean([c.aux_logits.argmax(-1) == c.kept for c in choices])
        if self.training and self.cfg.k_cost:
            total = total + self.cfg.k_cost * mean([c.share.expand_as(mask) for c in choices])
        return total, log

    @torch.no_grad()
    def selected(self, batch):
        """(mixer layers, B, L) bool: the tokens kept (Fig. 4)."""
        return torch.stack([choice.kept for choice in self.encode(**batch)[1]])

    @torch.no_grad()
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        """(B, A) or (B,): the action for a history's last step, whose own action and reward are not read."""
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg, timesteps)]
        y = self(*history)[:, -1]
        if not self.cfg.discrete:
            return y
        return torch.multinomial(y.softmax(-1), 1, generator=generator)[:, 0] if sample else y.argmax(-1)


Model = DecisionMixer  # the name by which the trainer finds it


FRAMES = dict(  # not in the paper: DT's
    n_head=8, d=128, context_len=30, position="window", timestep_std=0.0, betas=(0.9, 0.95), weight_decay=0.1,
    decay="matrices", clip=1.0, schedule="cosine", lr_floor=0.1,
)

# The paper's settings: "*", then family, then name, then "small". Keys that Config lacks: the trainer's.
PRESETS = {
    "*": dict(  # Table 7, else as released
        n_layer=6, n_head=4, d=256, context_len=20, dropout=0.1, activation="gelu", lr=1e-3, clip=0.25,
        weight_decay=1e-4, betas=(0.9, 0.999), schedule="constant", eval_episodes=10,
        batch_size=512,  # code: 256, with context_len 120
        warmup=250, steps=25_000,  # NOTE(paper): not given; code: 1,000 rounds of 25, 10 to warm up
    ),
    # as released; MuJoCo: DT's target times 1, 2, 10, 20
    "hopper": dict(targets=(3600.0, 7200.0, 36000.0, 72000.0)),
    "halfcheetah": dict(targets=(6000.0, 12000.0, 60000.0, 120000.0)),
    "walker2d": dict(targets=(5000.0, 10000.0, 50000.0, 100000.0)),
    "antmaze": dict(rtg_scale=1.0, targets=(1.0, 10.0, 100.0, 1000.0, 100000.0)),
    "maze2d": dict(rtg_scale=10.0, targets=(300.0, 200.0, 150.0, 100.0, 50.0, 20.0)),
    "pen": dict(rtg_scale=1000.0, targets=(12000.0, 6000.0)),
    "hammer": dict(rtg_scale=1000.0, targets=(12000.0, 6000.0, 3000.0)),
    "door": dict(rtg_scale=100.0, targets=(2000.0, 1000.0, 500.0)),
    "relocate": dict(rtg_scale=1000.0, targets=(3000.0, 1000.0)),
    "kitchen": dict(rtg_scale=100.0, targets=(500.0, 250.0)),
    "atari": FRAMES | dict(batch_size=128, lr=6e-4, steps=19_530, warmup=3, rtg_scale=1.0, sample=True),
    "dmc": FRAMES | dict(batch_size=64, steps=15_620, warmup=5),  # as StARformer's paper runs DT
    "small": dict(  # ours
        n_layer=2, n_head=1, d=64, context_len=3, dropout=0.0, timestep_std=0.1, batch_size=106, steps=3700,
        lr=1.5e-3, warmup=100, schedule="cosine", rtg_scale=None,
        # Table 6 (2): acting chooses as training does. With (3), a small DM seldom follows its target
        strategy="prefix", router="sigmoid", router_bias=2.0, residual=True, k_start=0.9,
    ),
    "small-antmaze": dict(
        n_layer=4, d=128, batch_size=256, steps=10_000, weight_decay=0.01,
    ),
    "small-frames": dict(
        n_head=2, d=96, context_len=2, timestep_std=0.0, batch_size=64, steps=3000, eval_every=0, sample=False
    ),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    B, K, S, A = 8, 20, 11, 3
    model = Model(Config(d=64, n_layer=2, dropout=0.0))
    batch = dict(
        states=torch.randn(B, K, S), actions=torch.rand(B, K, A) * 2 - 1, rewards=torch.rand(B, K, 1),
        rtg=torch.rand(B, K, 1), timesteps=torch.arange(K).expand(B, K),
        mask=torch.ones(B, K, dtype=torch.bool),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(101):
        loss, log = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {log['loss']:.4f}  {log['kept_1']:.1f} of 60 tokens kept")
