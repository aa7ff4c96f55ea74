"""Return-Aligned Decision Transformer (Tanaka et al., 2024, arXiv 2402.03923).

A Decision Transformer that earns the return it is asked for, not just a high one. In DT the return is one
token in three, and attention may pass over it. Here the returns are taken out of the sequence, and each block
lets them in twice: all tokens attend to them, and they set the scales and shifts of the layer norms.

    s1 a1 s2 a2 s3 a3                 R1 R2 R3
            │                            │
     self-attention
           norm  ◄── scale and shift ────┤   by the return of the token's own step (Eq. 10)
     cross-attention  ◄── key, value ────┤   the returns up to its own step (Eq. 7)
           norm  ◄── scale and shift ────┤
           MLP                           │
           norm  ◄── scale and shift ────┘
            │
     the next block; the last output at s3 predicts a3

    python radt.py      learns one random batch by heart and prints the loss

B batch, K context steps, n tokens a step (2), L tokens (2K), d width, S state size, A action size.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    state_shape: tuple[int, ...] = (11,)    # (S,), goal included; or (C, height, width): C stacked frames
    act_dim: int = 3                        # A numbers in [-1, 1]; or A choices, if discrete
    discrete: bool = False
    goal_dim: int = 0                       # the last numbers of the state, where there is a goal
    goal: Literal["none", "state"] = "state"
    context_len: int = 20                   # K
    max_ep_len: int = 1000                  # later steps share the position of the last
    n_layer: int = 3
    n_head: int = 1
    d: int = 128
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"
    # the paper's switches
    cross_attention: bool = True            # Table 2; False takes it out, and the norm behind it
    adaln: bool = True                      # Table 2; False: plain layer norms in the same places
    alpha: bool = True                      # Table 3; False adds the cross-attention's output as it is
    # the released code's. learned: a table of timesteps; window (Atari): the first one's, and one of places
    position: Literal["sinusoidal", "learned", "window"] = "sinusoidal"
    # ours
    condition: Literal["rtg", "reward", "none"] = "rtg"     # none: a constant in the return's place
    use_actions: bool = True                # False: the sequence is states only, n = 1
    timestep_std: float = 0.02              # spread of a learned timestep table at the start


class AdaptiveNorm(nn.Module):
    """A layer norm whose scale and shift come from the return of the token's own step (Eq. 10):

        (1 + gamma) * LN(x) + beta,    gamma and beta linear in SiLU(c)

    The linear layer starts at zero, so this starts as a plain layer norm; without `adaptive` it is one.
    """

    def __init__(self, d, adaptive):
        super().__init__()
        self.adaptive = adaptive
        self.ln = nn.LayerNorm(d, eps=1e-6, elementwise_affine=not adaptive)
        if adaptive:
            self.scale_shift = nn.Linear(d, 2 * d)

    def forward(self, x, c):  # x (B, K, n, d), c (B, K, d)
        if not self.adaptive:
            return self.ln(x)
        # in float32 under autocast as well: in bfloat16, 1 + gamma is 1 for a small gamma
        both = self.scale_shift(F.silu(c)).to(self.scale_shift.weight.dtype)
        gamma, beta = both[:, :, None].chunk(2, -1)  # each (B, K, 1, d)
        return torch.addcmul(beta, 1 + gamma, self.ln(x))


class ReturnAttention(nn.Module):
    """Cross-attention of states and actions to the returns up to their own step (Eq. 7 to 9):

        x + (1 + alpha) * z,    z = attention(x; keys of c + p, values of c),    alpha = W [z; x] + b

    x states and actions, c returns, p positions. W and b start at zero, so this starts as a plain sum.
    NOTE(paper): Eq. 7 makes keys and values of the same returns. Positions in the keys alone, and a norm
    before each, are the released code's.
    """

    def __init__(self, cfg):
        super().__init__()
        d = cfg.d
        self.scaled = cfg.alpha
        self.mixer = QKVAttention(d, cfg.n_head, cfg.dropout)
        self.ln_key = nn.LayerNorm(d)
        self.ln_value = nn.LayerNorm(d)
        if cfg.alpha:
            self.alpha = nn.Linear(2 * d, d)

    def forward(self, x, c, p):  # x (B, K, n, d); c, p (B, K, d)
        K, n = x.shape[1:3]
        seen = torch.ones(K, K, dtype=torch.bool, device=x.device).tril()  # step t sees R_1 .. R_t
        seen = seen.repeat_interleave(n, 0)  # (L, K): s_t and a_t see the same returns
        z = self.mixer(x.flatten(1, 2), self.ln_key(c + p), self.ln_value(c), seen).view_as(x)
        if self.scaled:
            z = (1 + self.alpha(torch.cat([z, x], -1))) * z
        return x + z


class QKVAttention(nn.Module):
    """Attention from one sequence to another (Eq. 2), as released without biases in Q, K and V.

    mask (queries, keys): True where a query sees a key; None: causal.
    """

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d, bias=False)
        self.proj = nn.Linear(d, d)

    def forward(self, query, key, value, mask=None):
        inputs = self.q(query), self.k(key), self.v(value)
        # each (B, n_head, its length, d / n_head)
        q, k, v = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for x in inputs)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class ReturnBlock(nn.Module):
    """Self-attention, cross-attention to the returns, MLP: each is added to x, and the sum normalised.

    With the norms behind the sums, no path goes around the returns' scale and shift (Section 3.2).
    NOTE(code): without adaln the released block turns pre-norm as well; here only one thing changes.
    """

    def __init__(self, cfg):
        super().__init__()
        d = cfg.d
        self.mixer = QKVAttention(d, cfg.n_head, cfg.dropout)  # states and actions among themselves
        self.returns = ReturnAttention(cfg) if cfg.cross_attention else None
        activation = nn.ReLU() if cfg.activation == "relu" else nn.GELU()
        self.mlp = nn.Sequential(
            nn.Linear(d, 4 * d), activation,
            nn.Linear(4 * d, d), nn.Dropout(cfg.dropout),
        )
        self.norms = nn.ModuleList(AdaptiveNorm(d, cfg.adaln) for _ in range(2 + cfg.cross_attention))

    def forward(self, x, c, p, last=False):  # x (B, K, n, d); c, p (B, K, d)
        tokens = x.flatten(1, 2)  # (B, L, d): s1 a1 s2 a2 ...
        x = x + self.mixer(tokens, tokens, tokens).view_as(x)
        if last:  # only states predict
            x = x[:, :, :1]
        x = self.norms[0](x, c)
        if self.returns is not None:
            x = self.norms[1](self.returns(x, c, p), c)
        return self.norms[-1](x + self.mlp(x), c)


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


class ReturnAlignedDecisionTransformer(nn.Module):

    def __init__(self, cfg: Config):
        super().__init__()
        if min(cfg.act_dim, cfg.context_len, cfg.max_ep_len, cfg.n_layer, cfg.n_head, cfg.d) < 1:
            raise ValueError("sizes must be at least 1")
        if cfg.d % cfg.n_head:
            raise ValueError(f"d={cfg.d} is not a multiple of n_head={cfg.n_head}")
        if cfg.position == "sinusoidal" and cfg.d % 2:
            raise ValueError(f"d={cfg.d} is odd, but sinusoidal positions are pairs of a sine and a cosine")
        if cfg.position == "sinusoidal" and cfg.timestep_std != Config.timestep_std:
            raise ValueError(f"timestep_std={cfg.timestep_std}: position='sinusoidal' has no table to spread")
        if not cfg.cross_attention and not cfg.adaln:
            raise ValueError("cross_attention and adaln are both off: nothing would read the return")
        if not cfg.cross_attention and not cfg.alpha:
            raise ValueError("alpha=False: without cross_attention there is nothing to scale")
        self.cfg = cfg
        d = cfg.d
        self.frames = len(cfg.state_shape) == 3

        self.embed_state = (FrameEncoder if self.frames else nn.Linear)(*cfg.state_shape, d)
        self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        sinusoidal = cfg.position == "sinusoidal"
        self.embed_timestep = nn.Linear(d, d) if sinusoidal else nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(cfg.context_len, d))
        self.blocks = nn.ModuleList(ReturnBlock(cfg) for _ in range(cfg.n_layer))
        # no norm before the head: a block ends in one. NOTE(code): on Atari the released head has no bias
        self.head = nn.Linear(d, cfg.act_dim)
        self.init_weights()

    def init_weights(self):
        """NOTE(code): N(0, 0.02) everywhere; the paper gives only the zeros of alpha, gamma and beta."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                zero = name.endswith((".alpha", ".scale_shift"))
                nn.init.normal_(module.weight, std=0.0 if zero else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.cfg.position != "sinusoidal":
            nn.init.normal_(self.embed_timestep.weight, std=self.cfg.timestep_std)

    def positions(self, timesteps):
        """(B, K, d): where each step stands in its episode.

        NOTE(code): a linear layer behind the sines and cosines, of which the paper does not speak.
        """
        d, dtype = self.cfg.d, self.head.weight.dtype
        t = timesteps.clamp(max=self.cfg.max_ep_len - 1)
        if self.cfg.position == "learned":
            return self.embed_timestep(t)
        if self.cfg.position == "window":  # NOTE(code): released acting takes the last step's timestep
            return self.embed_timestep(t[:, :1]) + self.embed_place[:t.shape[1]]
        frequency = torch.exp(torch.arange(0, d, 2, device=t.device, dtype=dtype) * (-math.log(10_000) / d))
        angle = t[..., None] * frequency  # (B, K, d / 2)
        return self.embed_timestep(torch.stack([angle.sin(), angle.cos()], -1).flatten(2))

    def features(
        self,
        states,         # (B, K, S) normalised; or (B, K, C, height, width), 0 to 255
        actions,        # (B, K, A) in [-1, 1]; or (B, K) int64
        rewards,        # (B, K, 1)
        rtg,            # (B, K, 1) return-to-go, the step's own reward included
        timesteps,      # (B, K) int64, the step's place in its episode
        mask=None,      # (B, K) bool, False where padded: on the right, where no causal attention looks
    ):
        """(B, K, d): what each step's action is predicted from.

        NOTE(code): the released mask is inverted: in a padded window, real steps attend to the padding alone.
        """
        cfg = self.cfg
        dtype = self.head.weight.dtype
        if cfg.condition == "rtg":
            c = rtg.to(dtype)
        elif cfg.condition == "reward":  # the one that led to this state
            c = F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))
        else:
            c = torch.ones_like(rtg, dtype=dtype)
        c = self.embed_condition(c)  # (B, K, d)
        p = self.positions(timesteps)  # (B, K, d)
        # NOTE(paper): "the same CNN encoder as DT", where frames, returns and actions go through a tanh; as
        # released, there is a SiLU and no tanh. NOTE(code): on frames, the released x has a dropout
        tokens = [F.silu(self.embed_state(states)) if self.frames else self.embed_state(states.to(dtype))]
        if cfg.use_actions:
            tokens.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        x = torch.stack(tokens, 2) + p[:, :, None]  # (B, K, n, d)
        for i, block in enumerate(self.blocks):
            x = block(x, c, p, last=i == cfg.n_layer - 1)
        return x[:, :, 0]

    def predict(self, features):
        y = self.head(features)
        return y if self.cfg.discrete else y.tanh()

    def forward(self, *inputs, **named):
        """(B, K, A): each step's action from what came before; logits if discrete. Inputs: see features()."""
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


Model = ReturnAlignedDecisionTransformer  # the name by which train.py finds it


def seven(low, high):
    """Seven evenly spaced targets (Section 4.2) from the data's 95th percentile of returns to its 5th."""
    return dict(targets=tuple(round(high + (low - high) * i / 6, 2) for i in range(7)))


# The paper's hyper-parameters: "*", then the environment's family, then its name. "small" is ours.
PRESETS = {
    "*": dict(  # Table 4; batch size and betas from the released code
        n_layer=3, n_head=1, d=128, context_len=20, dropout=0.1, activation="gelu", batch_size=64, lr=1e-4,
        weight_decay=1e-4, betas=(0.9, 0.999), clip=0.25, steps=100_000, schedule="constant",
        warmup=10_000,  # NOTE(paper): prints 100,000, the whole run; code: 10,000
        eval_episodes=20,  # Section 4.2; code: 100
    ),
    "antmaze": dict(d=256, batch_size=256, targets=(1.0,)),  # not in the paper: the code's sizes
    # NOTE(code): d=256 for halfcheetah-medium, n_layer=2 for hopper-medium; Table 4 has one size
    "hopper-medium": seven(799.52, 2038.58),
    "halfcheetah-medium": seven(4488.95, 5056.43),
    "walker2d-medium": seven(892.23, 3833.17),
    "ant-medium": seven(449.81, 3972.21),
    "hopper-medium-replay": seven(0.984, 1488.35),
    "halfcheetah-medium-replay": seven(-237.03, 4685.02),
    "walker2d-medium-replay": seven(-4.90, 3053.78),
    "ant-medium-replay": seven(-82.87, 3160.46),
    "hopper-medium-expert": seven(845.70, 3629.42),
    "halfcheetah-medium-expert": seven(4567.05, 10905.77),
    "walker2d-medium-expert": seven(982.94, 4963.50),
    "ant-medium-expert": dict(d=256) | seven(543.01, 5350.66),  # not in the paper: the code's
    "atari": dict(  # Table 5 (its caption says MuJoCo)
        n_layer=6, n_head=8, d=128, context_len=30, batch_size=128, lr=6e-4, betas=(0.9, 0.95), rtg_scale=1.0,
        weight_decay=0.1, decay="matrices", warmup=3, eval_episodes=10, sample=True,
        position="sinusoidal",  # NOTE(code): "window"
        # 5 epochs of 500,000 windows. NOTE(code): 15, and clip 1.0. The paper's rate would end after
        # 2 * 500,000 * K tokens, two epochs; the code's after six, and rise again. Here it ends with the run
        steps=19_530, clip=0.1, schedule="cosine", lr_floor=0.1,
    ),
    # NOTE(code): a slip asks for 100 in every game; these are its settings' seven, in clipped points
    "breakout": seven(12.0, 77.0),
    "pong": dict(context_len=50, batch_size=512, steps=4_880) | seven(3.0, 21.0),
    "qbert": seven(15.0, 283.0),
    "seaquest": seven(13.0, 200.0),
    "dmc": dict(  # not in the paper: as StARformer's comparison runs DT
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, batch_size=64, lr=1e-3, betas=(0.9, 0.95),
        weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1,
        eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop; the short context is DT's
        n_layer=2, d=64, context_len=3, dropout=0.0, batch_size=106, steps=3000, lr=1.5e-3, warmup=100,
        schedule="cosine", eval_episodes=10,
    ),
    "small-antmaze": dict(  # ours, on top of "small"
        n_layer=3, d=128, batch_size=256, steps=10_000, weight_decay=0.01,
    ),
    "small-antmaze-umaze": dict(dropout=0.1, steps=10_000),     # without dropout its ant is slow
    "small-frames": dict(  # ours, on top of "small": as StARformer's
        n_head=2, d=96, context_len=2, batch_size=64, steps=3000, eval_every=0, sample=False,
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
        loss, _ = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
