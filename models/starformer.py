"""StARformer (Shang et al., 2022, arXiv 2110.06206).

A Decision Transformer that looks closely at each step before it looks along the sequence. The step
transformer sees one step at a time, as a group of tokens: the last action, the reward it earned, the patches
of the frame. After each of its layers, the group is folded into one token g, the StAR-representation, which
the sequence transformer reads beside h, the state as a whole:

    a0 r0 ▒▒▒▒       a1 r1 ▒▒▒▒       a2 r2 ▒▒▒▒
    └────┬────┘      └────┬────┘      └────┬────┘     step transformer: inside a group, all tokens see all
        g1   h1          g2   h2          g3   h3
         └────┴───────────┴────┴───────────┴────┤     sequence transformer: each token sees those before it
                            the next layer of both; the last output at h3 predicts a3

    python starformer.py        learns one random batch by heart and prints the loss

B batch, K context steps, n tokens in a group, e their width, d width of g and h, S state, A action size.
"""

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
    max_ep_len: int = 1000                  # not read: a position is a place in the window
    n_layer: int = 3                        # of each of the two transformers
    n_head: int = 1                         # of the sequence transformer
    d: int = 128                            # its width
    step_heads: int = 4                     # of the step transformer
    step_d: int = 16                        # its width, e
    patch: int = 7                          # side of a frame's patches, in pixels
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"
    # the paper's switches
    condition: Literal["rtg", "reward", "none"] = "reward"          # Fig. 13: R_t, r_{t-1} or no such token
    step_state: Literal["patch", "conv"] = "patch"                  # Table 2: the state in the group
    seq_state: Literal["conv", "patch", "none"] = "conv"            # Table 2: h, made in this way or left out
    # Fig. 12: g beside h in each layer; g added to h in each layer; the last layer's g beside h in the first
    connect: Literal["layerwise", "fusion", "stack"] = "layerwise"
    # ours
    use_actions: bool = True                # False: no a_{t-1} in the group


class StARRepresentation(nn.Module):
    """The tokens of a step's group, side by side, through one linear layer (Eq. 4, without its position):

        g = LN(W [LN(z_1); LN(z_2); .. LN(z_n)] + b)

    NOTE(code): the layer norms are not in the paper.
    """

    def __init__(self, n, step_d, d):
        super().__init__()
        self.ln_in = nn.LayerNorm(step_d)
        self.fc = nn.Linear(n * step_d, d)
        self.ln_out = nn.LayerNorm(d)

    def forward(self, z):  # (groups, n, e) to (groups, d)
        return self.ln_out(self.fc(self.ln_in(z).flatten(1)))


class GroupAttention(nn.Module):
    """Self-attention inside a group, without a mask: all in the group of step t is known before a_t."""

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def split(self, x):
        """q, k, v, each (groups, n_head, n, e / n_head)."""
        return self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):  # (groups, n, e)
        q, k, v = self.split(x)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).flatten(2))

    def weights(self, x):
        """(groups, n_head, n, n): whom each token looks at, in rows that sum to 1; for pictures (Fig. 10)."""
        q, k, _ = self.split(x)
        return (q @ k.transpose(-1, -2) / q.shape[-1]**0.5).softmax(-1)


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


class TransformerLayer(nn.Module):
    """x + mixer(LN(x)), then x + MLP(LN(x)): a layer of either transformer, F_step or F_sequence."""

    def __init__(self, d, mixer, cfg):
        super().__init__()
        self.ln1 = nn.LayerNorm(d)
        self.mixer = mixer
        self.ln2 = nn.LayerNorm(d)
        activation = nn.ReLU() if cfg.activation == "relu" else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), activation, nn.Linear(4 * d, d))
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, keep=slice(None)):  # keep: the tokens that somebody reads
        x = x[:, keep] + self.drop(self.mixer(self.ln1(x))[:, keep])
        return x + self.drop(self.mlp(self.ln2(x)))


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


class Patches(nn.Module):
    """Frames in squares, row by row, and a linear layer: (B, K, C, height, width) to (B, K, n, e)."""

    def __init__(self, C, height, width, patch, e):
        super().__init__()
        if patch < 1 or height % patch or width % patch:
            raise ValueError(f"patch={patch} does not divide frames of {height} x {width} pixels")
        self.patch = patch
        self.n = height * width // patch**2
        self.fc = nn.Linear(C * patch**2, e)

    def forward(self, frames):
        pixels = F.pixel_unshuffle(frames.flatten(0, 1), self.patch).flatten(2).transpose(1, 2)
        return self.fc(pixels.to(self.fc.weight.dtype) / 255).unflatten(0, frames.shape[:2])


class StARformer(nn.Module):

    def __init__(self, cfg: Config):
        super().__init__()
        d, e, frames = cfg.d, cfg.step_d, len(cfg.state_shape) == 3
        if min(cfg.act_dim, cfg.context_len, cfg.n_layer, cfg.n_head, d, cfg.step_heads, e) < 1:
            raise ValueError("sizes must be at least 1")
        if e % cfg.step_heads or d % cfg.n_head:
            raise ValueError(f"heads must divide widths: step_d={e} by step_heads={cfg.step_heads}, "
                             f"d={d} by n_head={cfg.n_head}")
        if cfg.seq_state == "patch" and not frames:
            raise ValueError("seq_state='patch' is for frames: 'conv' reads a vector's numbers side by side")
        if cfg.connect == "fusion" and cfg.seq_state == "none":
            raise ValueError("connect='fusion': with seq_state='none' there is no h to add g to")
        if cfg.connect == "stack" and cfg.n_layer == 1:
            raise ValueError("connect='stack' is layerwise if n_layer is 1")
        self.cfg = cfg
        self.frames = frames

        # the group. NOTE(paper): convolutions make one token of a state, as in DT
        encoder = FrameEncoder if frames else nn.Linear
        if cfg.step_state == "conv":
            parts = 1
            self.embed_parts = encoder(*cfg.state_shape, e)
        else:       # the numbers of a vector are its patches, as in the released gym code
            self.embed_parts = Patches(*cfg.state_shape, cfg.patch, e) if frames else nn.Linear(1, e)
            parts = self.embed_parts.n if frames else cfg.state_shape[0]
            self.embed_spatial = nn.Parameter(torch.zeros(parts, e))
        if cfg.use_actions:     # before the first action stands one more choice, or zeros
            A = cfg.act_dim
            self.embed_action = nn.Embedding(A + 1, e) if cfg.discrete else nn.Linear(A, e)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, e)
        # NOTE(code): on frames a tanh ends all embeddings but those of patches and choices. A vector's are
        # linear, as the paper says (Section 4.2); released, its reward has a tanh too
        self.squash = nn.Tanh() if frames else nn.Identity()

        # h
        if cfg.seq_state == "conv":
            self.embed_state = encoder(*cfg.state_shape, d)
        elif cfg.seq_state == "patch":      # NOTE(paper): how patches make one token is not said; as released
            cut = Patches(*cfg.state_shape, cfg.patch, e)
            self.embed_state = nn.Sequential(cut, nn.Flatten(2), nn.Linear(cut.n * e, d))
        self.embed_time = nn.Parameter(torch.zeros(cfg.context_len, d))
        self.drop = nn.Dropout(cfg.dropout)

        n = parts + cfg.use_actions + (cfg.condition != "none")
        layers = range(cfg.n_layer)
        self.steps = nn.ModuleList(
            TransformerLayer(e, GroupAttention(e, cfg.step_heads, cfg.dropout), cfg) for _ in layers)
        self.folds = nn.ModuleList(
            StARRepresentation(n, e, d) for _ in (layers if cfg.connect != "stack" else [0]))
        self.sequence = nn.ModuleList(
            TransformerLayer(d, Attention(d, cfg.n_head, cfg.dropout), cfg) for _ in layers)
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, cfg.act_dim)
        # NOTE(code): the paper gives no initialisation; tables keep torch's N(0, 1), convolutions its own
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def previous(self, actions, rewards, rtg):
        """a_{t-1}, and r_{t-1} or R_t (B, K, 1), of each step; a window begins with no action and reward 0.

        NOTE(code): released gym training reads r_t, which the action to be predicted has earned.
        """
        cfg = self.cfg
        dtype = self.head.weight.dtype
        if cfg.discrete:
            a = F.pad(actions[:, :-1], (1, 0), value=cfg.act_dim)
        else:
            a = F.pad(actions.to(dtype)[:, :-1], (0, 0, 1, 0))
        if cfg.condition == "rtg":
            return a, rtg.to(dtype)
        return a, F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))

    def groups(self, states, actions, rewards, rtg):
        """(B K, n, e): the tokens a_{t-1}, r_{t-1} or R_t, s_t^1 .. s_t^n of each step (Section 4.2).

        Each step is a row of its own, so that no step sees another.
        """
        cfg = self.cfg
        a, c = self.previous(actions, rewards, rtg)
        tokens = []  # each (B, K, number of them, e)
        if cfg.use_actions:
            a = self.embed_action(a)
            tokens.append((a if cfg.discrete else self.squash(a))[:, :, None])
        if cfg.condition != "none":
            tokens.append(self.squash(self.embed_condition(c))[:, :, None])
        if cfg.step_state == "conv":
            tokens.append(self.squash(self.embed_parts(states))[:, :, None])
        else:
            parts = self.embed_parts(states if self.frames else states[..., None])
            tokens.append(parts + self.embed_spatial)
        return self.drop(torch.cat(tokens, 2).flatten(0, 1))

    def features(
        self,
        states,         # (B, K, S) normalised; or (B, K, C, height, width), 0 to 255
        actions,        # (B, K, A) in [-1, 1]; or (B, K) int64
        rewards,        # (B, K, 1)
        rtg,            # (B, K, 1) return-to-go, the step's own reward included
        timesteps,      # not read: positions count from the start of the window
        mask=None,      # (B, K) bool, False where padded: on the right, where no causal attention looks
    ):
        """(B, K, d): what each step's action is predicted from."""
        cfg = self.cfg
        K = states.shape[1]
        if not self.frames:
            states = states.to(self.head.weight.dtype)
        time = self.embed_time[:K]

        # the step transformer: g of each layer, in a stack of the last
        z = self.groups(states, actions, rewards, rtg)
        g = []
        for i, layer in enumerate(self.steps):
            z = layer(z)
            if cfg.connect != "stack" or i == cfg.n_layer - 1:
                g.append(self.folds[len(g)](z).unflatten(0, (-1, K)) + time)        # Eq. 4, (B, K, d)

        # the sequence transformer. NOTE(paper): without h (Table 2's P+_ and C+_) its sequence is g alone;
        # released, each layer's g is added to the output of the layer before
        x = 0
        if cfg.seq_state != "none":
            x = self.drop(self.squash(self.embed_state(states)) + time)             # Eq. 5, h
        woven = cfg.seq_state != "none" and cfg.connect != "fusion"
        for i, layer in enumerate(self.sequence):
            if i < len(g):
                x = torch.stack([g[i], x], 2).flatten(1, 2) if woven else g[i] + x  # Eq. 6: g1 h1 g2 h2 ...
            # what comes out at g is dropped (Section 4.3). NOTE(paper): of the stack it is only said that it
            # stands on top: here g and h go through it together. NOTE(code): no h in the stack
            only_h = woven and (cfg.connect == "layerwise" or i == cfg.n_layer - 1)
            x = layer(x, keep=slice(1, None, 2) if only_h else slice(None))
        return self.ln_f(x)

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


Model = StARformer      # the name by which train.py finds it


# The papers' hyper-parameters: "*", then the environment's family, then its name. "small" is ours.
PRESETS = {
    "*": dict(          # the released gym code; the paper's own tables are Atari and DMC
        n_layer=3, n_head=1, d=128, step_heads=4, step_d=16, context_len=20, dropout=0.1, activation="gelu",
        batch_size=64, lr=1e-4, weight_decay=1e-4, decay="matrices", betas=(0.9, 0.95), clip=0.25,
        steps=100_000, warmup=10_000, schedule="constant",
        eval_episodes=10,           # Section 5.2
        condition="reward",         # Section 6.4; the gym code: none; RADT's comparison: rtg
    ),
    "atari": dict(      # Table 4; K: Section 6.1 (Fig. 9 also has 10 and 20, and 50 for Pong); batch: README
        n_layer=6, n_head=8, d=192, step_heads=4, step_d=64, patch=7, context_len=30, dropout=0.1,
        activation="gelu", condition="reward", batch_size=64, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1,
        decay="matrices", clip=1.0, warmup=5, rtg_scale=1.0, eval_episodes=10, sample=True,
        # 10 epochs (README) of 500,000 windows. NOTE(paper): the rate is to end after 2 * 500,000 * K tokens,
        # two of the epochs; code: after ten, but the script runs 15 unless asked, and it climbs again. Here
        # it ends with the run. NOTE(paper): "frame skip 2"; code: 4, as here. NOTE(code): training clamps
        # rewards to [0, 1], so that a lost point looks like none, and acting does not; ours are the data's
        steps=78_120, schedule="cosine", lr_floor=0.1,
    ),
    "dmc": dict(        # Table 5; batch and epochs as Atari, of the 100,000 windows in its "final tokens"
        n_layer=6, n_head=8, d=192, step_heads=4, step_d=64, context_len=30, dropout=0.1, activation="gelu",
        condition="reward", batch_size=64, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0,
        steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1, eval_episodes=10,
        patch=12, lr=1e-3,          # NOTE(code): patch 7, lr 1e-4
    ),
    "small": dict(      # ours: minutes on a laptop. Only a return-to-go can be followed
        condition="rtg", n_layer=2, d=64, context_len=3, dropout=0.0, batch_size=106, steps=2500, lr=1.5e-3,
        warmup=100, schedule="cosine", eval_episodes=10,
    ),
    "small-antmaze": dict(      # ours, on top of "small"
        n_layer=3, d=128, batch_size=256, steps=10_000, weight_decay=0.01,
        step_state="conv", step_d=64,       # 31 tokens of one number each take three times the time
    ),
    "small-frames": dict(           # ours, on top of "small"
        patch=14, n_layer=3, n_head=2, d=96, step_heads=4, step_d=32, context_len=2, batch_size=64,
        steps=3000, lr=1.5e-3, eval_every=0,
        use_actions=False,          # a short training learns to repeat the previous action
        sample=False,               # a drawn press is wrong now and then, and throws a paddle off
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
