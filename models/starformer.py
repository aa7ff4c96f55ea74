"""StARformer (Shang et al., 2022, arXiv 2110.06206): look closely at each step first, then along the whole sequence.

Two transformers side by side. The step transformer sees one step at a time, as a group of small tokens: the action that led there,
the reward that came with it, and every patch of the frame (every number of a vector); they attend to each other without a mask. After
each of its layers the group is folded into one token g_t, and the sequence transformer reads g_1 h_1 g_2 h_2 ..., where h_t is the
state as a whole. The output at h_t predicts a_t. One file, torch only: copy it where you need it.

    python starformer.py        fits one random batch and prints the loss

B batch, K context steps, n tokens in a step's group, L tokens of the sequence (2K), H heads, d width, S state size, A action size;
frames are C x height x width.
"""
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
    max_ep_len: int = 1000                  # not read: a position is a place in the window
    n_layer: int = 3
    n_head: int = 1                         # of the sequence transformer
    d: int = 128                            # its width
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"
    condition: Literal["rtg", "reward", "none"] = "reward"  # a third token of a step: return-to-go, the reward before it, or no token
    use_actions: bool = True                # False: no previous action in the group
    goal_dim: int = 0                       # how many of the S numbers are the goal; each is a token like the others
    goal: Literal["none", "state"] = "state"
    step_d: int = 16                        # width and heads of the step transformer
    step_heads: int = 4
    patch: int = 7                          # a frame's patches, side in pixels
    step_state: Literal["patch", "conv"] = "patch"          # Table 2, the state in the group: a token per patch, or one for the whole state
    seq_state: Literal["conv", "patch", "none"] = "conv"    # Table 2, the state in the sequence, h: from convolutions, from patches, or no h
    connect: Literal["layerwise", "fusion", "stack"] = "layerwise"      # Fig. 12: g beside h in every layer, added to h, or only the last g


PRESETS = {
    "*": dict(      # the released gym code; the paper's own tables are Atari and DMC
        n_layer=3, n_head=1, d=128, step_heads=4, step_d=16, context_len=20, dropout=0.1, activation="gelu", batch_size=64, lr=1e-4,
        weight_decay=1e-4, decay="matrices", betas=(0.9, 0.95), clip=0.25, steps=100_000, warmup=10_000, schedule="constant",
        eval_episodes=10,                   # Sec. 5.2
        condition="reward",                 # Sec. 6.4; the gym code's default is none. RADT's comparison runs it with "rtg"
    ),
    "atari": dict(  # Table 4; K = 30 (Sec. 6.1; Fig. 9 also has 10 and 20, and 50 for Pong), batch and 10 epochs of 500,000 windows from the README
        n_layer=6, n_head=8, d=192, step_heads=4, step_d=64, patch=7, context_len=30, dropout=0.1, activation="gelu", condition="reward",
        batch_size=64, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=78_120, warmup=5, schedule="cosine",
        # NOTE(paper): the rate is to end after 2 * 500,000 * K tokens, two of the ten epochs; code: after ten, but the script runs 15 unless
        # asked, and it climbs again to half. Here the cosine spans the run and stays at its floor. NOTE(paper): "frame skip 2"; code: 4, ours.
        # NOTE(code): there training clamps rewards to [0, 1], so that a lost point looks like none, and acting does not; ours are the data's
        lr_floor=0.1, rtg_scale=1.0, eval_episodes=10, sample=True,
    ),
    "dmc": dict(    # Table 5; batch and epochs as Atari, of the 100,000 windows in its "final tokens". NOTE(code): patch 7, lr 1e-4
        n_layer=6, n_head=8, d=192, step_heads=4, step_d=64, patch=12, context_len=30, dropout=0.1, activation="gelu", condition="reward",
        batch_size=64, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine",
        lr_floor=0.1, eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop. Only a return-to-go can be followed
        condition="rtg", n_layer=2, d=64, context_len=3, dropout=0.0, batch_size=106, steps=2500, lr=1.5e-3, warmup=100,
        schedule="cosine", eval_episodes=10,
    ),
    "small-frames": dict(   # ours, on top of "small". Without the previous action, which a short training learns to repeat. The likeliest action:
        # a drawn press is wrong now and then, and throws a paddle off
        patch=14, n_layer=3, n_head=2, d=96, step_heads=4, step_d=32, context_len=2, use_actions=False, batch_size=64, steps=3000, lr=1.5e-3,
        eval_every=0, sample=False,
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


class Patches(nn.Module):
    """Frames (..., C, height, width), 0 to 255, cut into squares row by row, each through one linear layer: (..., n, width)."""

    def __init__(self, shape, patch, width):
        super().__init__()
        C, *sides = shape
        if any(n % patch for n in sides):
            raise ValueError(f"patch={patch} does not divide frames of {sides[0]} x {sides[1]} pixels")
        self.patch, self.n = patch, sides[0] * sides[1] // patch ** 2
        self.fc = nn.Linear(C * patch ** 2, width)

    def forward(self, x):
        y, w = F.pixel_unshuffle(x.flatten(0, -4), self.patch).flatten(2).transpose(1, 2), self.fc.weight       # (frames, n, C * patch^2)
        # cast and laid out in one pass, and exact in bfloat16: see FrameEncoder
        y = y.to(torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else w.dtype,
                 memory_format=torch.contiguous_format)
        return F.linear(y, w / 255, self.fc.bias).unflatten(0, x.shape[:-3])


class Attention(nn.Module):
    """Causal self-attention over L tokens. rows: a slice of the positions whose output is wanted; None means all of them."""

    def __init__(self, d, n_head, dropout, projection=True):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d) if projection else nn.Identity()

    def forward(self, x, rows=None):
        B, L, d = x.shape
        if rows is None:
            q, k, v = self.qkv(x).view(B, L, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)     # 3 x (B, H, L, d/H)
            mask = None
        else:   # queries for the wanted rows only: exact, and cheaper, since nobody reads the others
            w, b = self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, rows], w[:d], b[:d]).view(B, -1, self.n_head, d // self.n_head).transpose(1, 2)   # (B, H, rows, d/H)
            k, v = F.linear(x, w[d:], b[d:]).view(B, L, 2, self.n_head, -1).permute(2, 0, 3, 1, 4)              # 2 x (B, H, L, d/H)
            mask = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()[rows]                             # (rows, L)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).flatten(2))                                      # (B, L or rows, d)


class GroupAttention(nn.Module):
    """Self-attention inside a group, without a mask: everything in the group of step t is known before a_t."""

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)       # q, k, v: 3 x (groups, H, n, d/H)

    def weights(self, x):
        """(groups, H, n, n): who reads whom, a row each. For looking at; the fused kernel below does not give them away."""
        q, k, _ = self.split(x)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)

    def forward(self, x):
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).flatten(2))                                      # (groups, n, d)


class StARLayer(nn.Module):
    """A pre-norm transformer layer, x + mixer(LN(x)), then x + MLP(LN(x)), of either transformer: F_step or F_sequence."""

    def __init__(self, cfg, d, mixer):
        super().__init__()
        self.ln1, self.mixer = nn.LayerNorm(d), mixer
        self.ln2, self.drop = nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, rows=None):
        mixed = self.drop(self.mixer(self.ln1(x)) if rows is None else self.mixer(self.ln1(x), rows))
        x = (x if rows is None else x[:, rows]) + mixed
        return x + self.drop(self.mlp(self.ln2(x)))


class Fold(nn.Module):
    """Eq. 4 without the position: a group's n tokens, side by side, become one StAR-representation g_t."""

    def __init__(self, n, step_d, d):
        super().__init__()
        self.ln_in, self.fc, self.ln_out = nn.LayerNorm(step_d), nn.Linear(n * step_d, d), nn.LayerNorm(d)  # NOTE(code): the norms

    def forward(self, z):
        return self.ln_out(self.fc(self.ln_in(z).flatten(-2)))                              # (groups, d)


class Model(nn.Module):
    """StARformer for frames or vectors; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        if cfg.step_d % cfg.step_heads or cfg.d % cfg.n_head:
            raise ValueError(f"heads must divide widths: step_d={cfg.step_d} by step_heads={cfg.step_heads}, d={cfg.d} by n_head={cfg.n_head}")
        d, step_d, shape, self.frames = cfg.d, cfg.step_d, cfg.state_shape, len(cfg.state_shape) == 3
        if cfg.seq_state == "patch" and not self.frames:
            raise ValueError("seq_state='patch' is for frames: a vector's numbers, side by side, are the whole state that seq_state='conv' reads")
        # the group's part of the state. NOTE(paper): "convolutional features" are one token, as DT has one
        parts = 1
        if cfg.step_state == "conv":
            self.embed_parts = FrameEncoder(shape, step_d) if self.frames else nn.Linear(*shape, step_d)
        else:   # one linear layer for all patches, or all numbers (code; the paper has frames only): the spatial embedding tells them apart
            self.embed_parts = Patches(shape, cfg.patch, step_d) if self.frames else nn.Linear(1, step_d)
            parts = self.embed_parts.n if self.frames else shape[0]
            self.embed_spatial = nn.Parameter(torch.zeros(parts, step_d))
        if cfg.use_actions:     # one row more for "none"; A numbers say it by zeros
            self.embed_action = nn.Embedding(cfg.act_dim + 1, step_d) if cfg.discrete else nn.Linear(cfg.act_dim, step_d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, step_d)
        if cfg.seq_state == "conv":
            self.embed_state = FrameEncoder(shape, d) if self.frames else nn.Linear(*shape, d)
        elif cfg.seq_state == "patch":      # NOTE(paper): how patches make one token is not said; released: side by side, with weights of their own
            cut = Patches(shape, cfg.patch, step_d)
            self.embed_state = nn.Sequential(cut, nn.Flatten(-2), nn.Linear(cut.n * step_d, d))
        # NOTE(code): with frames, as released, a tanh ends each embedding but those of patches and of choices. A vector's are linear, as the
        # paper says (Sec. 4.2); released, its reward has a tanh too
        self.squash = nn.Tanh() if self.frames else nn.Identity()
        self.embed_time = nn.Parameter(torch.zeros(cfg.context_len, d))
        self.drop = nn.Dropout(cfg.dropout)
        n = parts + cfg.use_actions + (cfg.condition != "none")
        self.steps = nn.ModuleList(StARLayer(cfg, step_d, GroupAttention(step_d, cfg.step_heads, cfg.dropout)) for _ in range(cfg.n_layer))
        self.folds = nn.ModuleList(Fold(n, step_d, d) for _ in range(1 if cfg.connect == "stack" else cfg.n_layer))
        self.sequence = nn.ModuleList(StARLayer(cfg, d, Attention(d, cfg.n_head, cfg.dropout)) for _ in range(cfg.n_layer))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, cfg.act_dim)
        for module in self.modules():       # NOTE(code): the paper gives no initialisation; tables keep torch's N(0, 1), convolutions its own
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def inputs(self, states, actions, rewards, rtg):
        """What the groups are made of: s_t, a_{t-1}, and r_{t-1} or R_t, for each of a window's steps.

        The first has no previous action and the reward 0, in training and in acting alike.
        NOTE(code): the released gym training feeds r_t, which the action to be predicted has earned, and acting r_{t-1}.
        """
        cfg, dtype = self.cfg, self.head.weight.dtype
        a = F.pad(actions[:, :-1], (1, 0), value=cfg.act_dim) if cfg.discrete else F.pad(actions.to(dtype)[:, :-1], (0, 0, 1, 0))
        c = rtg.to(dtype) if cfg.condition == "rtg" else F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))         # (B, K, 1)
        return states if self.frames else states.to(dtype), a, c

    def groups(self, states, a, c):
        """(B * K, n, step_d): Z^0, the tokens a_{t-1}, r_{t-1} or R_t, s_t^1 .. of every step (Sec. 4.2); no token for what is switched off."""
        cfg = self.cfg
        if cfg.step_state == "conv":
            z = [self.squash(self.embed_parts(states))[:, :, None]]                         # (B, K, 1, step_d)
        else:
            z = [self.embed_parts(states if self.frames else states[..., None]) + self.embed_spatial]           # (B, K, parts, step_d)
        if cfg.condition != "none":
            z.insert(0, self.squash(self.embed_condition(c))[:, :, None])
        if cfg.use_actions:
            a = self.embed_action(a)
            z.insert(0, (a if cfg.discrete else self.squash(a))[:, :, None])
        return self.drop(torch.cat(z, 2).flatten(0, 1))

    def look(self, states, a, c):
        """[g^1, .., g^layers, h^0], each (B, K, d): all that is made of the steps one by one, before their places in the window are added."""
        z, out = self.groups(states, a, c), []
        for i, step in enumerate(self.steps):
            z = step(z)
            if self.cfg.connect != "stack" or i == self.cfg.n_layer - 1:
                out.append(self.folds[len(out)](z).unflatten(0, states.shape[:2]))
        return out if self.cfg.seq_state == "none" else [*out, self.squash(self.embed_state(states))]

    def recall(self, memory, *inputs):
        """look, and what memory holds of earlier steps is not computed again; it then holds this window's: (B, K, tensors of look, d)."""
        old, K = memory.get("steps"), inputs[0].shape[1]
        if old is None or K == 1:
            x = torch.stack(self.look(*inputs), 2)
        elif old.shape[1] == K - 1:
            x = torch.cat([old, torch.stack(self.look(*(x[:, -1:] for x in inputs)), 2)], 1)
        elif old.shape[1] == K:     # the window slides; its first step has lost its previous action and reward, so it is made anew
            first, new = torch.stack(self.look(*(torch.cat([x[:, :1], x[:, -1:]], 1) for x in inputs)), 2).split(1, 1)
            x = torch.cat([first, old[:, 2:], new], 1)
        else:
            raise ValueError(f"memory holds {old.shape[1]} steps, but the history, {K} of them, is to be one longer than at the last call")
        memory["steps"] = x
        return x.unbind(2)

    def hidden(self, states, actions, rewards, rtg, last=False, memory=None):
        """(B, K, d): the last layer at h_1 .. h_K (at g, without h); (B, 1, d) if only the last step is wanted."""
        cfg, inputs = self.cfg, self.inputs(states, actions, rewards, rtg)
        seen, time = self.look(*inputs) if memory is None else self.recall(memory, *inputs), self.embed_time[:states.shape[1]]
        x = 0 if cfg.seq_state == "none" else self.drop(seen[-1] + time)                    # Eq. 5, (B, K, d)
        woven = cfg.seq_state != "none" and cfg.connect != "fusion"
        for i, sequence in enumerate(self.sequence):
            top, rows = i == cfg.n_layer - 1, None
            if i == 0 or cfg.connect != "stack":
                g = seen[i] + time                                                          # Eq. 4, (B, K, d)
                # NOTE(paper): without h, Table 2's P+_, the sequence is made of g alone; released: each layer's g is added to the last layer's output
                x = torch.stack([g, x], 2).flatten(1, 2) if woven else g + x                # Eq. 6, (B, 2K, d): g_1 h_1 g_2 h_2 ...
            # The outputs at g are dropped (Sec. 4.3), so h alone asks: half of the queries, projections and MLPs are never computed.
            # NOTE(paper): "stacked on top" is all it says; we let g and h go on together, as in any transformer. NOTE(code): no h in the stack
            if woven and (top or cfg.connect == "layerwise"):
                rows = slice(1, None, 2)
            x = sequence(x, slice(-1, None) if top and last else rows)                      # (B, K, d), 2K below the top of a stack
        return self.ln_f(x)

    def predict(self, x):
        y = self.head(x)
        return y if self.cfg.discrete else torch.tanh(y)

    def forward(self, states, actions, rewards, rtg, timesteps, mask=None):
        """Predict every step's action from what came before it.

        states (B, K, S) or frames (B, K, C, height, width) from 0 to 255, actions (B, K, A) or (B, K) int64, rewards and rtg (B, K, 1).
        Returns (B, K, A): actions in [-1, 1], or logits. timesteps are not read: positions count from the start of the window. Padding
        stands right of the real steps, where causal attention cannot see it: mask is not read.
        """
        return self.predict(self.hidden(states, actions, rewards, rtg))

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
        memory: a dict, empty at first, handed back at each next step of the same B episodes; a step is then looked at once, and once
        more when it comes to stand first in the window.
        """
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg)]
        y = self.predict(self.hidden(*history, last=True, memory=memory))[:, -1]
        if not self.cfg.discrete:
            return y
        return torch.multinomial(y.softmax(-1), 1, generator=generator)[:, 0] if sample else y.argmax(-1)

    @torch.no_grad()
    def maps(self, batch):
        """(layers, B, K, H, n, n): the step transformer's attention, a row for each token that asks, its weights summing to 1 (Fig. 10).

        Tokens stand in the group's order: the previous action, the reward or return, then the patches row by row. Of a frame cut into
        h x w patches, maps[layer, b, t, head, 0, -h * w:].view(h, w) is what the action looks at. In eval mode.
        """
        z, out = self.groups(*self.inputs(*(batch[k] for k in ("states", "actions", "rewards", "rtg")))), []
        for step in self.steps:
            out.append(step.mixer.weights(step.ln1(z)))
            z = step(z)
        return torch.stack(out).unflatten(1, batch["states"].shape[:2])

    @classmethod
    def load(cls, run, which="last", device="cpu"):
        """(model in eval mode, meta) from a run folder; meta holds all that acting needs besides the weights."""
        checkpoint = torch.load(Path(run) / f"{which}.pt", map_location=device, weights_only=True)
        model = cls(Config(**checkpoint["model_config"])).to(device)
        model.load_state_dict(checkpoint["model"])
        return model.eval(), checkpoint["meta"]


StARformer = Model


def unread(cfg):
    """{input or parameter: why} for what the model is known not to read; the tests hold the model to everything else."""
    out = {"timesteps": "a position is a place in the window, not a step of the episode"}
    if cfg.condition != "rtg":
        out["rtg"] = "condition is not rtg"
    if cfg.condition != "reward":
        out["rewards"] = "condition is not reward"
    if not cfg.use_actions:
        out["actions"] = "no previous action in the groups"
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
