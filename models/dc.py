"""Decision ConvFormer (Kim et al., 2024, arXiv 2310.03022): Decision Transformer with a short convolution in place of attention.

The tokens R_t s_t a_t and all the rest are Decision Transformer's. What mixes tokens is one filter per channel over the last 6
tokens, which is about the present step and the one before: all that a Markov process needs. Three filters, chosen by what stands at the output's
place: a return, a state or an action. 8,064 mixing parameters where attention has 198,144. One file, torch only: copy it where you need it.

    python dc.py        fits one random batch and prints the loss

B batch, K context steps, L tokens (3K), H heads, d width, S state size, A action size; frames are C x height x width.
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
    context_len: int = 8                    # K
    max_ep_len: int = 1000                  # rows of the timestep table; later steps share its last row
    n_layer: int = 3
    n_head: int = 1                         # of the attention block, if hybrid
    d: int = 128
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "gelu"            # Table 11
    condition: Literal["rtg", "reward", "none"] = "rtg"     # first token: return-to-go, the previous reward, or no token (BC)
    use_actions: bool = True                # False: no action tokens (Table 12)
    goal_dim: int = 0                       # the last numbers of the state, if there is a goal
    goal: Literal["none", "state"] = "state"
    window: int = 6                         # tokens that a filter sees, its own included (Table 18)
    filters: Literal["per-type", "shared"] = "per-type"     # shared: one filter for all positions (Table 17)
    hybrid: bool = False                    # the last block mixes by attention (Section 3.2, Table 3)
    projection: bool = False                # a linear layer after each mixer (Table 13). NOTE(code): attention always has its own there
    position: Literal["timestep", "window"] = "timestep"    # window: the token's place in it, and the timestep of its first step (Atari)
    timestep_embedding: bool = True         # Table 9 switches it for ODC; the released DC always has it
    timestep_std: float = 1.0               # spread of the timestep table at initialisation


PRESETS = {
    "*": dict(      # Table 4. The text gives 1e-4 to the hopper sets named below, walker2d-medium and AntMaze, 1e-3 to the others
        n_layer=3, d=128, context_len=8, window=6, dropout=0.1, activation="gelu", batch_size=64, lr=1e-3, weight_decay=1e-4,
        betas=(0.9, 0.999), clip=0.25, steps=100_000, warmup=10_000, schedule="constant", eval_episodes=100,
        timestep_std=1.0,                   # NOTE(code): torch's default, as in DT. The code's context_len is 20 unless asked
    ),
    # DT's target times 1, 2, 5, 10, 15, 20 (AntMaze 1 to 100). NOTE(paper): only the ends are named; code: 1, 2, 10, 20
    "hopper": dict(targets=(3600.0, 7200.0, 18000.0, 36000.0, 54000.0, 72000.0)),
    "halfcheetah": dict(targets=(6000.0, 12000.0, 30000.0, 60000.0, 90000.0, 120000.0)),
    "walker2d": dict(targets=(5000.0, 10000.0, 25000.0, 50000.0, 75000.0, 100000.0)),
    "antmaze": dict(lr=1e-4, rtg_scale=1.0, targets=(1.0, 2.0, 5.0, 10.0, 50.0, 100.0)),        # code: 1, 10, 100, 1000, 100000
    "maze2d": dict(hybrid=True, n_head=2, lr=1e-4, rtg_scale=1.0, targets=(300.0,)),    # LSDT paper's Table 12; target as its LSDT's
    "atari": dict(      # Table 6; steps: 10 epochs of 500,000 windows
        n_layer=6, n_head=8, d=128, context_len=8, position="window", timestep_std=0.0,
        batch_size=256,                     # code: 128, pong 512
        lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=19_530, warmup=5, schedule="cosine",
        # NOTE(paper): the rate is to end after 2 * 500,000 * K tokens, two of the ten epochs; code: after six, and it climbs again to 0.75
        # of its height. Here the cosine spans the run and stays at its floor
        lr_floor=0.1, rtg_scale=1.0, eval_episodes=10, sample=True,
    ),
    # Table 6: 1 or 5 times the largest return in the data, in raw points, while the data's rewards are clipped. Projections: Table 13's
    # column of DC. For --hybrid: context_len 30 (pong 50, Table 7), and its column differs for asterix (yes)
    "breakout": dict(targets=(90.0,)),
    "qbert": dict(targets=(2500.0,), projection=True),      # code: 14000
    "pong": dict(targets=(20.0,)),
    "seaquest": dict(targets=(1450.0,), projection=True),   # code: 1150
    "asterix": dict(targets=(520.0,)),
    "frostbite": dict(targets=(950.0,), projection=True),
    "assault": dict(targets=(780.0,), projection=True),
    "gopher": dict(targets=(2750.0,)),
    "hopper-medium": dict(d=256, lr=1e-4),                              # Table 5
    "hopper-medium-replay": dict(d=256, lr=1e-4, use_actions=False),    # Tables 5 and 12
    "walker2d-medium": dict(lr=1e-4),
    "dmc": dict(        # not in the paper: as StARformer's comparison runs DT
        n_layer=6, n_head=8, d=128, context_len=8, dropout=0.1, position="window", timestep_std=0.0, batch_size=64, lr=1e-3, betas=(0.9, 0.95),
        weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1, eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop; DT's recipe, more updates since each costs less, and a filter of one step's length
        n_layer=2, n_head=1, d=64, context_len=3, window=3, hybrid=False, dropout=0.0, timestep_std=0.1, batch_size=106, steps=5000,
        lr=1.5e-3, warmup=100, schedule="cosine", eval_episodes=10, rtg_scale=None,         # None: the environment's
    ),
    "small-frames": dict(   # ours, on top of "small": as StARformer's
        d=96, context_len=2, timestep_std=0.0, batch_size=64, steps=3000, eval_every=0, sample=False,
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


class ConvMixer(nn.Module):
    """The filters, and a linear layer after them if projection."""

    def __init__(self, d, window, types, projection):
        super().__init__()
        self.filters = TokenFilters(d, window, types)
        self.proj = nn.Linear(d, d) if projection else nn.Identity()

    def forward(self, x, rows=None):
        return self.proj(self.filters(x, rows))


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


class MetaFormerBlock(nn.Module):
    """x + mixer(LN(x)), then x + MLP(LN(x)): a transformer block with the token mixer left open (Fig. 1)."""

    def __init__(self, cfg, types, attention):
        super().__init__()
        d = cfg.d
        self.ln1, self.ln2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        self.mixer = Attention(d, cfg.n_head, cfg.dropout) if attention else ConvMixer(d, cfg.window, types, cfg.projection)
        self.drop_mixed = self.drop if attention or cfg.projection else nn.Identity()   # as released: a bare convolution has no dropout
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, rows=None):
        x = (x if rows is None else x[:, rows]) + self.drop_mixed(self.mixer(self.ln1(x), rows))
        return x + self.drop(self.mlp(self.ln2(x)))


class Model(nn.Module):
    """Decision ConvFormer for vectors or frames; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        d, self.frames = cfg.d, len(cfg.state_shape) == 3
        if cfg.window < 1:
            raise ValueError(f"window={cfg.window}: a filter sees its own token at least, so window is 1 or more")
        if cfg.hybrid and d % cfg.n_head:
            raise ValueError(f"the attention block of hybrid=True needs d={d} divisible by n_head={cfg.n_head}")
        self.tokens = 1 + (cfg.condition != "none") + cfg.use_actions       # per step
        self.state_at = int(cfg.condition != "none")                        # the state's place among them
        self.embed_state = FrameEncoder(cfg.state_shape, d) if self.frames else nn.Linear(*cfg.state_shape, d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        if cfg.timestep_embedding:
            self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(self.tokens * cfg.context_len, d))
        # NOTE(code): with frames, as released for Atari, each embedding goes through a tanh, in place of a norm for all
        self.embed_ln, self.drop = nn.Identity() if self.frames else nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        types = self.tokens if cfg.filters == "per-type" else 1
        # The last block's return and action filters reach no prediction; they stay, since the paper's 8,064 counts them
        self.blocks = nn.ModuleList(MetaFormerBlock(cfg, types, cfg.hybrid and i == cfg.n_layer - 1) for i in range(cfg.n_layer))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, cfg.act_dim)
        # NOTE(code): GPT-2's N(0, 0.02) for the blocks' linear layers only; filters, embeddings and head keep torch's defaults
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        if self.frames:     # but for these two
            nn.init.normal_(self.head.weight, std=0.02)
            if cfg.use_actions and cfg.discrete:
                nn.init.normal_(self.embed_action.weight, std=0.02)
        if cfg.timestep_embedding:
            nn.init.normal_(self.embed_timestep.weight, std=cfg.timestep_std)

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
        x = torch.stack(x, 2)                                                               # (B, K, tokens, d)
        if self.frames:
            x = x.tanh()
        if cfg.timestep_embedding:
            # released for Atari: the first step's timestep for the whole window, and the place in it. NOTE(code): acting used the last step's
            t = timesteps[:, :1] if cfg.position == "window" else timesteps
            x = x + self.embed_timestep(t.clamp(max=cfg.max_ep_len - 1))[:, :, None]
        x = x.flatten(1, 2)                                                                 # (B, L, d): R_1 s_1 a_1 R_2 ...
        if cfg.position == "window":
            x = x + self.embed_place[:x.shape[1]]
        x = self.drop(self.embed_ln(x))
        for i, block in enumerate(self.blocks):
            x = block(x, rows if i == cfg.n_layer - 1 else None)
        return self.ln_f(x)

    def predict(self, x):
        y = self.head(x)
        return y if self.cfg.discrete else torch.tanh(y)

    def forward(self, states, actions, rewards, rtg, timesteps, mask=None):
        """Predict every step's action from what came before it.

        states (B, K, S) or frames (B, K, C, height, width) from 0 to 255, actions (B, K, A) or (B, K) int64, rewards and rtg (B, K,
        1), timesteps (B, K) int64. Returns (B, K, A): actions in [-1, 1], or logits. mask is not read: padding stands right of the
        real steps, where no causal filter reaches.
        NOTE(code): released windows are padded on the left, with action -10 in training and 0 in evaluation, and the filters see it.
        """
        return self.predict(self.hidden(states, actions, rewards, rtg, timesteps, slice(self.state_at, None, self.tokens)))

    def loss(self, batch):
        """(loss, {"loss": loss}): squared error (Eq. 5), or cross-entropy if discrete, averaged over the real steps of the batch."""
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


DecisionConvFormer = Model


def unread(cfg):
    """{input or parameter: why} for what the model is known not to read; the tests hold the model to everything else."""
    out = {}
    if cfg.condition != "rtg":
        out["rtg"] = "condition is not rtg"
    if cfg.condition != "reward":
        out["rewards"] = "condition is not reward"
    if not cfg.use_actions:
        out["actions"] = "no action tokens"
    if not cfg.timestep_embedding:
        out["timesteps"] = "no timestep embedding"
    tokens, state_at = 1 + (cfg.condition != "none") + cfg.use_actions, int(cfg.condition != "none")
    if not cfg.hybrid:      # s_t's tokens back: R_t 1, a_{t-1} one more than that, s_{t-1} a whole step
        reach = cfg.n_layer * (cfg.window - 1)
        if reach < state_at:
            out |= dict.fromkeys(["rtg", "rewards", "embed_condition"], "the filters end before this step's first token")
        if reach < state_at + 1:
            out |= dict.fromkeys(["actions", "embed_action"], "the filters end before the last action")
        if reach < tokens:
            out["history"] = "the filters end before the last state"
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
