"""Return-Aligned Decision Transformer (Tanaka et al., 2024, arXiv 2402.03923): get the return you ask for, not just a high one.

In DT the return is one token in three and attention may look past it. Here it is taken out of the sequence: s_t a_t run through a
causal transformer, and in every block the returns come in twice, by a cross-attention that all tokens make to R_1 .. R_t and
by the scales and shifts of the layer norms. The output at s_t predicts a_t. One file, torch only: copy it where you need it.

    python radt.py      fits one random batch and prints the loss

B batch, K context steps, n tokens a step (2), L tokens (2K), H heads, d width, S state size, A action size; frames are C x height x width.
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
    state_shape: tuple[int, ...] = (11,)    # (S,), the goal's numbers included where there is a goal; or (C, height, width): C stacked frames
    act_dim: int = 3                        # A numbers, or A choices if discrete
    discrete: bool = False
    context_len: int = 20                   # K
    max_ep_len: int = 1000                  # later steps share the position of the last one
    n_layer: int = 3
    n_head: int = 1
    d: int = 128
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"
    condition: Literal["rtg", "reward", "none"] = "rtg"     # what stands in the return's place: itself, the previous reward, a constant
    use_actions: bool = True                # False: the sequence holds states only, n = 1
    goal_dim: int = 0                       # how many of the S numbers are the goal; the model reads them like the others
    goal: Literal["none", "state"] = "state"
    cross_attention: bool = True            # Table 2: False takes the cross-attention out, with its residual and the norm behind it
    adaln: bool = True                      # Table 2: False makes every norm a plain LayerNorm, in the same places
    alpha: bool = True                      # Table 3: False adds the cross-attention's output as it is
    position: Literal["sinusoidal", "learned", "window"] = "sinusoidal"     # window: place in it, and the timestep of its first step
    timestep_std: float = 0.02              # spread of the learned table at initialisation; the sinusoidal one has none


def seven(low, high):
    """Seven evenly spaced targets, the highest first (Sec. 4.2); low and high: 5th and 95th percentile of the data's returns."""
    return tuple(round(high + (low - high) * i / 6, 2) for i in range(7))


PRESETS = {
    "*": dict(      # Table 4; batch size and betas from the released code
        n_layer=3, n_head=1, d=128, context_len=20, dropout=0.1, activation="gelu", batch_size=64, lr=1e-4,
        weight_decay=1e-4, betas=(0.9, 0.999), clip=0.25, steps=100_000, schedule="constant",
        warmup=10_000,                      # NOTE(paper): the table prints 100,000, which would be the whole run; the code uses 10,000
        eval_episodes=20,                   # Sec. 4.2; code: 100
    ),
    "antmaze": dict(d=256, batch_size=256, targets=(1.0,)),     # not in the paper: the code's sizes, and the return of reaching the goal
    # NOTE(code): Table 4 gives one size for MuJoCo. The code has d=256 for halfcheetah-medium and n_layer=2 for hopper-medium
    "hopper-medium": dict(targets=seven(799.52, 2038.58)),
    "halfcheetah-medium": dict(targets=seven(4488.95, 5056.43)),
    "walker2d-medium": dict(targets=seven(892.23, 3833.17)),
    "ant-medium": dict(targets=seven(449.81, 3972.21)),
    "hopper-medium-replay": dict(targets=seven(0.984, 1488.35)),
    "halfcheetah-medium-replay": dict(targets=seven(-237.03, 4685.02)),
    "walker2d-medium-replay": dict(targets=seven(-4.90, 3053.78)),
    "ant-medium-replay": dict(targets=seven(-82.87, 3160.46)),
    "hopper-medium-expert": dict(targets=seven(845.70, 3629.42)),
    "halfcheetah-medium-expert": dict(targets=seven(4567.05, 10905.77)),
    "walker2d-medium-expert": dict(targets=seven(982.94, 4963.50)),
    "ant-medium-expert": dict(d=256, targets=seven(543.01, 5350.66)),           # not in the paper: the code's
    "atari": dict(      # Table 5 (its caption says MuJoCo); steps: 5 epochs of 500,000 windows
        n_layer=6, n_head=8, d=128, context_len=30, batch_size=128,
        # NOTE(paper): sinusoidal; code: learned, the window's first timestep and the place in it (position="window")
        position="sinusoidal",
        # NOTE(code): 15 epochs and clip 1.0. The rate is to end after 2 * 500,000 * K tokens, two of the five epochs; code: after six, and it
        # climbs back to its full height by the twelfth. Here the cosine spans the run and stays at its floor
        steps=19_530, clip=0.1, schedule="cosine", lr_floor=0.1,
        lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", warmup=3, rtg_scale=1.0, eval_episodes=10, sample=True,
    ),
    # NOTE(code): replaces every target return by 100 on Atari; these are the seven of its configuration, in clipped points
    "breakout": dict(targets=seven(12.0, 77.0)),
    "pong": dict(context_len=50, batch_size=512, steps=4_880, targets=seven(3.0, 21.0)),
    "qbert": dict(targets=seven(15.0, 283.0)),
    "seaquest": dict(targets=seven(13.0, 200.0)),
    "dmc": dict(        # not in the paper: as StARformer's comparison runs DT
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, batch_size=64, lr=1e-3, betas=(0.9, 0.95),
        weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1, eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop; the short context is DT's
        n_layer=2, d=64, context_len=3, dropout=0.0, batch_size=106, steps=3000, lr=1.5e-3, warmup=100, schedule="cosine",
        eval_episodes=10,
    ),
    "small-frames": dict(   # ours, on top of "small": as StARformer's
        n_head=2, d=96, context_len=2, batch_size=64, steps=3000, eval_every=0, sample=False,
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


class QKVAttention(nn.Module):
    """Eq. 2: attention from one sequence to another, without biases in Q, K and V.

    mask (queries, keys): 0 where a query sees a key, -inf where not; None: causal.
    """

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.proj = nn.Linear(d, d)

    def forward(self, query, key, value, mask=None):
        def together(x, *layers):       # one product for all that read x: fewer, larger kernels
            return F.linear(x, torch.cat([f.weight for f in layers])).chunk(len(layers), -1)

        if query is key:
            q, k, v = together(query, self.q, self.k, self.v)
        else:
            q, (k, v) = self.q(query), together(key, self.k, self.v) if key is value else (self.k(key), self.v(value))
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in (q, k, v))   # (B, H, queries or keys, d/H)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).flatten(2))                                      # (B, queries, d)


def unseen(n, x):
    """(n, n): 0 where a position sees another, itself and those before it; -inf where not. Of x's kind and device."""
    return torch.full((n, n), -torch.inf, dtype=x.dtype, device=x.device).triu(1)


class ReturnBlock(nn.Module):
    """Post-norm: self-attention, cross-attention to the returns, MLP, each added to x and then normalised.

    The norms stand behind the residual, so that no path goes around the returns' scale and shift (Sec. 3.2).
    """

    def __init__(self, cfg):
        super().__init__()
        d, self.cfg = cfg.d, cfg
        self.mixer = nn.ModuleDict({"own": QKVAttention(d, cfg.n_head, cfg.dropout)})       # states and actions among themselves
        if cfg.cross_attention:
            self.mixer["cross"] = QKVAttention(d, cfg.n_head, cfg.dropout)
            self.ln_key, self.ln_value = nn.LayerNorm(d), nn.LayerNorm(d)                   # NOTE(code): not in the paper's Eq. 7
            if cfg.alpha:
                self.alpha = nn.Linear(2 * d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(), nn.Linear(4 * d, d))
        self.drop = nn.Dropout(cfg.dropout)
        # NOTE(code): without adaln the released block turns pre-norm as well; here one thing changes, Table 2's "w/o AdaLN"
        self.norms = nn.ModuleList(nn.LayerNorm(d, eps=1e-6, elementwise_affine=not cfg.adaln) for _ in range(2 + cfg.cross_attention))
        if cfg.adaln:
            self.scale_shift = nn.Sequential(nn.SiLU(), nn.Linear(d, 2 * len(self.norms) * d))

    def forward(self, x, c, p, steps=None):
        """x (B, K, n, d) states and actions, c (B, K, d) returns, p (B, K, d) positions. Returns x's shape.

        steps: a slice of the steps whose state token is wanted, (B, number of steps, 1, d); nobody reads the others after the last block.
        """
        K, n = x.shape[1:3]
        tokens = x.flatten(1, 2)                                                            # (B, L, d): s_1 a_1 s_2 a_2 ...
        asking, mask = tokens, None
        if steps is not None:
            mask, x = unseen(K * n, x)[::n][steps], x[:, steps, :1]                         # (steps, L)
            asking = x.flatten(1, 2)
        # step t sees R_1 .. R_t: a square of one token a step is plain causal attention, otherwise s_t and a_t see the same returns
        past = None if x.shape[1:3] == (K, 1) else unseen(K, x)[steps or slice(None)].repeat_interleave(x.shape[2], 0)
        if self.cfg.adaln:
            c_now = c if steps is None else c[:, steps]
            gamma_beta = self.scale_shift(c_now).to(self.scale_shift[1].weight.dtype)       # float32 under autocast as well
            gamma_beta = gamma_beta[:, :, None].chunk(2 * len(self.norms), -1)              # each (B, steps, 1, d)

        def norm(i, x):                                                                     # Eq. 10
            y = self.norms[i](x)
            return (1 + gamma_beta[2 * i]) * y + gamma_beta[2 * i + 1] if self.cfg.adaln else y

        x = norm(0, x + self.drop(self.mixer["own"](asking, tokens, tokens, mask)).view_as(x))
        if self.cfg.cross_attention:
            z = self.drop(self.mixer["cross"](x.flatten(1, 2), self.ln_key(c + p), self.ln_value(c), past)).view_as(x)
            if self.cfg.alpha:
                z = (1 + self.alpha(torch.cat([z, x], -1))) * z                             # Eq. 8
            x = norm(1, x + z)                                                              # Eq. 9
        return norm(-1, x + self.drop(self.mlp(x)))


class Model(nn.Module):
    """Return-Aligned Decision Transformer for vectors or frames; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        if not (cfg.cross_attention or cfg.adaln):
            raise ValueError("cross_attention and adaln are both off: nothing would read the return; leave one of them on")
        self.cfg = cfg
        d, self.frames = cfg.d, len(cfg.state_shape) == 3
        self.embed_state = FrameEncoder(cfg.state_shape, d) if self.frames else nn.Linear(*cfg.state_shape, d)
        self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        self.embed_timestep = nn.Linear(d, d) if cfg.position == "sinusoidal" else nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(cfg.context_len, d))
        self.blocks = nn.ModuleList(ReturnBlock(cfg) for _ in range(cfg.n_layer))
        self.head = nn.Linear(d, cfg.act_dim)           # behind a norm already: no final one
        for module in self.modules():                   # NOTE(code): N(0, 0.02) everywhere; the paper gives only the zeros below
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if cfg.position != "sinusoidal":
            nn.init.normal_(self.embed_timestep.weight, std=cfg.timestep_std)
        for block in self.blocks:                       # the block starts as plain sums and plain layer norms (Sec. 3.2)
            if cfg.adaln:
                nn.init.zeros_(block.scale_shift[1].weight)
            if cfg.cross_attention and cfg.alpha:
                nn.init.zeros_(block.alpha.weight)

    def positions(self, timesteps):
        """(B, K, d): absolute steps of the episode, as a linear map of sines and cosines or from a learned table."""
        t = timesteps.clamp(max=self.cfg.max_ep_len - 1)
        if self.cfg.position == "learned":
            return self.embed_timestep(t)
        if self.cfg.position == "window":       # as released for Atari, but that acting took the last step's timestep there
            return self.embed_timestep(t[:, :1]) + self.embed_place[:t.shape[1]]
        d, dtype = self.cfg.d, self.head.weight.dtype
        frequency = torch.exp(torch.arange(0, d, 2, device=t.device, dtype=dtype) * (-math.log(10000) / d))         # (d/2,)
        angle = t[..., None] * frequency                                                    # (B, K, d/2)
        return self.embed_timestep(torch.stack([angle.sin(), angle.cos()], -1).flatten(-2))

    def hidden(self, states, actions, rewards, rtg, timesteps, steps, memory=None):
        """(B, number of steps, d): the last layer at the state tokens of the steps in the slice steps."""
        cfg, dtype = self.cfg, self.head.weight.dtype
        if cfg.condition == "rtg":
            c = rtg.to(dtype)
        elif cfg.condition == "reward":     # the reward that led to s_t; the first step of a window has none
            c = F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))
        else:
            c = torch.ones_like(rtg, dtype=dtype)
        c, p = self.embed_condition(c), self.positions(timesteps)                           # 2 x (B, K, d)
        # NOTE(code): the encoder of frames ends in a SiLU here, where DT's ends in a tanh
        x = [F.silu(self.embed_state(states, memory)) if self.frames else self.embed_state(states.to(dtype))]
        if cfg.use_actions:
            x.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        x = torch.stack(x, 2) + p[:, :, None]                                               # (B, K, n, d)
        for i, block in enumerate(self.blocks):
            x = block(x, c, p, steps if i == cfg.n_layer - 1 else None)
        return x.squeeze(2)

    def predict(self, x):
        y = self.head(x)
        return y if self.cfg.discrete else torch.tanh(y)

    def forward(self, states, actions, rewards, rtg, timesteps, mask=None):
        """Predict every step's action from what came before it.

        states (B, K, S) or frames (B, K, C, height, width) from 0 to 255, actions (B, K, A) or (B, K) int64, rewards and rtg (B, K,
        1), timesteps (B, K) int64. Returns (B, K, A): actions in [-1, 1], or logits. Padding stands right of the real steps, where
        causal attention cannot see it: mask is not read.
        NOTE(code): the released mask is inverted, so that in a padded window the real steps attend to the padding and to nothing else.
        """
        return self.predict(self.hidden(states, actions, rewards, rtg, timesteps, slice(None)))

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
        last = history[0].shape[1] - 1
        y = self.predict(self.hidden(*history, slice(last, last + 1), memory))[:, -1]
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


ReturnAlignedDecisionTransformer = Model


def unread(cfg):
    """{input or parameter: why} for what the model is known not to read; the tests hold the model to everything else."""
    out = {}
    if cfg.condition != "rtg":
        out["rtg"] = "condition is not rtg"
    if cfg.condition != "reward":
        out["rewards"] = "condition is not reward"
    if not cfg.use_actions:
        out["actions"] = "no action tokens"
    return out


if __name__ == "__main__":
    torch.manual_seed(0)
    cfg = Config(d=64, n_layer=2, dropout=0.0)
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
