"""StARformer (Shang et al., 2022, arXiv 2110.06206): look closely at each step first, then along the whole sequence.

Two transformers side by side. The step transformer sees one step at a time, as a group of small tokens: the action that led there,
the reward that came with it, and every number of the state; they attend to each other without a mask. After each of its layers the
group is folded into one token g_t, and the sequence transformer reads g_1 h_1 g_2 h_2 ..., where h_t is the state as a whole. The
output at h_t predicts a_t. One file, torch only: copy it where you need it.

    python starformer.py        fits one random batch and prints the loss

B batch, K context steps, n tokens in a step's group (S + 2), L tokens of the sequence (2K), H heads, d width, S state size, A action size.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    state_shape: tuple[int, ...] = (11,)    # (S,), the goal's numbers included where there is a goal
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
    connect: Literal["layerwise", "fusion", "stack"] = "layerwise"      # Fig. 12: g beside h in every layer, added to h, or only the last g


PRESETS = {
    "*": dict(      # the released gym code; the paper's own tables are Atari and DMC
        n_layer=3, n_head=1, d=128, step_heads=4, step_d=16, context_len=20, dropout=0.1, activation="gelu", batch_size=64, lr=1e-4,
        weight_decay=1e-4, betas=(0.9, 0.95), clip=0.25, steps=100_000, warmup=10_000, schedule="constant",
        eval_episodes=10,                   # Sec. 5.2
        condition="reward",                 # Sec. 6.4; the gym code's default is none. RADT's comparison runs it with "rtg"
    ),
    "small": dict(  # ours: minutes on a laptop. Only a return-to-go can be followed
        condition="rtg", n_layer=2, d=64, context_len=3, dropout=0.0, batch_size=106, steps=2500, lr=1.5e-3, warmup=100,
        schedule="cosine", eval_episodes=10,
    ),
}


class Attention(nn.Module):
    """Causal self-attention over L tokens. rows: a slice of the positions whose output is wanted; None means all of them."""

    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

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

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)    # 3 x (groups, H, n, d/H)
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
    """StARformer for vector states; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        if cfg.step_d % cfg.step_heads or cfg.d % cfg.n_head:
            raise ValueError(f"heads must divide widths: step_d={cfg.step_d} by step_heads={cfg.step_heads}, d={cfg.d} by n_head={cfg.n_head}")
        d, step_d, (S,) = cfg.d, cfg.step_d, cfg.state_shape
        n = S + cfg.use_actions + (cfg.condition != "none")
        # one Linear for all state numbers: the spatial embedding tells them apart (code; the paper has frames only, cut into patches)
        self.embed_number, self.embed_spatial = nn.Linear(1, step_d), nn.Parameter(torch.zeros(S, step_d))
        if cfg.use_actions:     # one row more for "none"; A numbers say it by zeros
            self.embed_action = nn.Embedding(cfg.act_dim + 1, step_d) if cfg.discrete else nn.Linear(cfg.act_dim, step_d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, step_d)
        self.embed_state = nn.Linear(S, d)
        self.embed_time = nn.Parameter(torch.zeros(cfg.context_len, d))
        self.drop = nn.Dropout(cfg.dropout)
        self.steps = nn.ModuleList(StARLayer(cfg, step_d, GroupAttention(step_d, cfg.step_heads, cfg.dropout)) for _ in range(cfg.n_layer))
        self.folds = nn.ModuleList(Fold(n, step_d, d) for _ in range(1 if cfg.connect == "stack" else cfg.n_layer))
        self.sequence = nn.ModuleList(StARLayer(cfg, d, Attention(d, cfg.n_head, cfg.dropout)) for _ in range(cfg.n_layer))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, cfg.act_dim)
        for module in self.modules():               # NOTE(code): the paper gives no initialisation; tables keep torch's N(0, 1)
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def groups(self, states, actions, rewards, rtg):
        """(B * K, n, step_d): Z^0, the tokens a_{t-1}, r_{t-1} or R_t, s_t^1 .. s_t^S of every step (Sec. 4.2).

        A window's first step has no previous action and the reward 0, in training and in acting alike.
        NOTE(code): the released gym training feeds r_t, which the action to be predicted has earned, and acting r_{t-1}.
        """
        cfg, dtype = self.cfg, self.head.weight.dtype
        z = [self.embed_number(states[..., None]) + self.embed_spatial]                     # (B, K, S, step_d)
        if cfg.condition != "none":
            c = rtg.to(dtype) if cfg.condition == "rtg" else F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))     # (B, K, 1)
            z.insert(0, self.embed_condition(c)[:, :, None])
        if cfg.use_actions:
            a = F.pad(actions[:, :-1], (1, 0), value=cfg.act_dim) if cfg.discrete else F.pad(actions.to(dtype)[:, :-1], (0, 0, 1, 0))
            z.insert(0, self.embed_action(a)[:, :, None])
        return self.drop(torch.cat(z, 2).flatten(0, 1))

    def hidden(self, states, actions, rewards, rtg, last):
        """(B, K, d): the last layer at h_1 .. h_K; (B, 1, d) if only the last step is wanted."""
        cfg, (B, K) = self.cfg, states.shape[:2]
        states = states.to(self.head.weight.dtype)
        z, time = self.groups(states, actions, rewards, rtg), self.embed_time[:K]           # time (K, d)
        h = self.drop(self.embed_state(states) + time)                                      # Eq. 5, (B, K, d)

        def star(fold, z):
            return fold(z).view(B, K, -1) + time                                            # Eq. 4, (B, K, d)

        def woven(g, h):
            return torch.stack([g, h], 2).flatten(1, 2)                                     # Eq. 6, (B, 2K, d): g_1 h_1 g_2 h_2 ...

        if cfg.connect == "stack":
            for step in self.steps:
                z = step(z)
            g = star(self.folds[0], z)
        for i, sequence in enumerate(self.sequence):
            top = i == cfg.n_layer - 1
            if cfg.connect != "stack":
                z = self.steps[i](z)
                g = star(self.folds[i], z)
            # The outputs at g are dropped (Sec. 4.3), so h alone asks: half of the queries, projections and MLPs are never computed
            if cfg.connect == "layerwise":
                x, rows = woven(g, h), slice(1, None, 2)
            elif cfg.connect == "fusion":
                x, rows = h + g, None
            else:   # NOTE(paper): "stacked on top" is all it says; we let g and h go on together, as in any transformer
                x, rows = h if i else woven(g, h), slice(1, None, 2) if top else None
            h = sequence(x, slice(-1, None) if top and last else rows)                      # (B, K, d), 2K below the top of a stack
        return self.ln_f(h)

    def predict(self, x):
        y = self.head(x)
        return y if self.cfg.discrete else torch.tanh(y)

    def forward(self, states, actions, rewards, rtg, timesteps, mask=None):
        """Predict every step's action from what came before it.

        states (B, K, S), actions (B, K, A) or (B, K) int64, rewards and rtg (B, K, 1). Returns (B, K, A): actions in [-1, 1], or
        logits. timesteps are not read: positions count from the start of the window. Padding stands right of the real steps, where
        causal attention cannot see it: mask is not read.
        """
        return self.predict(self.hidden(states, actions, rewards, rtg, last=False))

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
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        """The action for the last step of a history of any length; its own action and reward are placeholders that nobody reads.

        Shapes as in forward. Returns (B, A), or (B,) int64: the likeliest choice, or one drawn with the generator if sample.
        """
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg)]
        y = self.predict(self.hidden(*history, last=True))[:, -1]
        if not self.cfg.discrete:
            return y
        return torch.multinomial(y.softmax(-1), 1, generator=generator)[:, 0] if sample else y.argmax(-1)

    def param_groups(self, weight_decay):
        """Decay on the matrices of the linear layers alone; none on biases, norms and embeddings (released code)."""
        matrices = {id(module.weight) for module in self.modules() if isinstance(module, nn.Linear)}
        return [{"params": [p for p in self.parameters() if id(p) in matrices], "weight_decay": weight_decay},
                {"params": [p for p in self.parameters() if id(p) not in matrices], "weight_decay": 0.0}]

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
