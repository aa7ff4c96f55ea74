"""Decision Transformer (Chen et al., 2021, arXiv 2106.01345): choose the action that goes with the return you ask for.

Three tokens a step, R_t s_t a_t, run through a causal GPT-2; the output at s_t predicts a_t. R_t is the return-to-go: at test
time it starts as the return you want and the rewards you collect are taken off. One file, torch only: copy it where you need it.

    python dt.py        fits one random batch and prints the loss

B batch, K context steps, L tokens (3K), H heads, d width, S state size, A action size, G goal size; frames are C x height x width.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    state_shape: tuple[int, ...] = (11,)    # (S,), the goal's G numbers included where there is a goal; or (C, height, width): C stacked frames
    act_dim: int = 3                        # A numbers, or A choices if discrete
    discrete: bool = False
    context_len: int = 20                   # K
    max_ep_len: int = 1000                  # rows of the timestep table; later steps share its last row
    n_layer: int = 3
    n_head: int = 1
    d: int = 128
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "relu"
    condition: Literal["rtg", "reward", "none"] = "rtg"     # first token: return-to-go, the previous reward, or no token (BC)
    use_actions: bool = True                # False: no action tokens (DC paper, Table 12)
    goal_dim: int = 0                       # G, the last G numbers of the state
    goal: Literal["none", "state", "action", "rtg", "embed"] = "state"     # which token reads the goal (LSDT paper, B.5)
    mixer: Literal["attention", "direct", "none"] = "attention"            # direct: DC paper, Fig. 3; none: its Appendix G
    projection: bool = True                 # attention's last linear layer (DC paper, Table 13)
    position: Literal["timestep", "window"] = "timestep"    # window: the token's place in it, and the timestep of its first step (Atari)
    timestep_std: float = 1.0               # spread of the timestep table at initialisation
    encoder: Literal["conv", "patch"] = "conv"              # of frames; patch: StARformer paper, Table 2, "DT with ViT"
    patch: int = 7                          # its patches' side in pixels


PRESETS = {     # fields of Config, and of train.py's TrainConfig
    "*": dict(      # the released gym code; table and code agree except where noted
        n_layer=3, n_head=1, d=128, context_len=20, dropout=0.1, activation="relu", batch_size=64, lr=1e-4,
        weight_decay=1e-4, betas=(0.9, 0.999), clip=0.25, steps=100_000, schedule="constant", eval_episodes=100,
        warmup=10_000,                      # NOTE(paper): the table prints 100,000; every code base of the family uses 10,000
        timestep_std=1.0,                   # NOTE(code): torch's default; it outweighs every other embedding at the start
    ),
    "hopper": dict(targets=(3600.0, 1800.0)),
    "halfcheetah": dict(targets=(6000.0, 12000.0)),     # the paper's; the code plays 12000 first
    "walker2d": dict(targets=(5000.0, 2500.0)),
    "antmaze": dict(activation="gelu", batch_size=128, lr=4e-4, weight_decay=3e-4, targets=(1.0,)),   # LSDT paper's DT baseline
    "maze2d": dict(activation="gelu", rtg_scale=1.0, targets=(280.0, 140.0)),      # to relocate: targets, scale and GELU of CORL's configurations
    "pen": dict(activation="gelu", rtg_scale=1.0, targets=(3100.0, 1550.0)),
    "door": dict(activation="gelu", rtg_scale=1.0, targets=(2900.0, 1450.0)),
    "hammer": dict(activation="gelu", rtg_scale=1.0, targets=(12800.0, 6400.0)),
    "relocate": dict(activation="gelu", rtg_scale=1.0, targets=(4300.0, 2150.0)),
    "atari": dict(      # Atari, Tables 8 and 9 of its appendix and the released code; steps: 5 epochs of 500,000 windows
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, activation="gelu", position="window", timestep_std=0.0, batch_size=128,
        lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=19_530, warmup=3, schedule="cosine",
        # NOTE(paper): the rate is to end after 2 * 500,000 * K tokens, two of the five epochs; code: after six, and it climbs again from
        # there. Here the cosine spans the run and stays at its floor
        lr_floor=0.1, rtg_scale=1.0, eval_episodes=10, sample=True,
    ),
    "breakout": dict(targets=(90.0,)),
    # NOTE(paper): targets in raw points, while the data's rewards are clipped; code: qbert 14000, seaquest 1150
    "qbert": dict(targets=(2500.0,)),
    "pong": dict(context_len=50, batch_size=512, steps=4_880, targets=(20.0,)),
    "seaquest": dict(targets=(1450.0,)),
    "dmc": dict(        # StARformer paper's DT baseline: Table 5 in its appendix, batch size and updates as its Atari runs
        n_layer=6, n_head=8, d=128, context_len=30, dropout=0.1, activation="gelu", position="window", timestep_std=0.0, batch_size=64,
        lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", clip=1.0, steps=15_620, warmup=5, schedule="cosine", lr_floor=0.1,
        eval_episodes=10,
    ),
    "small": dict(  # ours: minutes on a laptop. Short context and a narrow timestep table decide whether it follows its target
        n_layer=2, d=64, context_len=3, dropout=0.0, activation="relu", timestep_std=0.1, batch_size=106, steps=3700, lr=1.5e-3,
        warmup=100, schedule="cosine", eval_episodes=10, rtg_scale=None,        # None: the environment's
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


class ViT(FrameEncoder):
    """The same by patches that attend to each other (StARformer paper, Table 2, "DT with ViT").

    NOTE(paper): only the patches and 13 million parameters in all are given. We take the trunk's own layers, heads and width, and lay the
    patches side by side before the last linear layer, as that paper does with a step's tokens: 10.9 million at its sizes.
    """

    def __init__(self, cfg):
        nn.Module.__init__(self)
        C, height, width = cfg.state_shape
        if height % cfg.patch or width % cfg.patch:
            raise ValueError(f"patch={cfg.patch} does not divide frames of {height} x {width} pixels")
        n, d = height * width // cfg.patch ** 2, cfg.d
        self.first = nn.Conv2d(C, d, cfg.patch, cfg.patch)      # a linear layer on each patch
        self.place, self.drop = nn.Parameter(torch.zeros(n, d)), nn.Dropout(cfg.dropout)
        layer = dict(d_model=d, nhead=cfg.n_head, dim_feedforward=4 * d, dropout=cfg.dropout, activation=cfg.activation)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer, batch_first=True, norm_first=True) for _ in range(cfg.n_layer))
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(n * d, d)

    def encode(self, x):
        x = self.drop(x.flatten(2).transpose(1, 2) + self.place)                            # (frames, patches, d)
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.norm(x).flatten(1))


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


class DirectMixer(nn.Module):
    """One learned lower-triangular matrix for all inputs in place of softmax(QK'), and V (DC paper, Fig. 3b)."""

    def __init__(self, d, length):
        super().__init__()
        # NOTE(paper): initialisation and row sums are not given. We start from the plain average over the past, as attention does
        self.A = nn.Parameter(torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None])
        self.V = nn.Linear(d, d)

    def forward(self, x, rows=None):
        L = x.shape[1]
        A = self.A[:L, :L].tril()
        return (A if rows is None else A[rows]) @ self.V(x)


class Block(nn.Module):
    """GPT-2's pre-norm block: x + mixer(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, cfg, length):
        super().__init__()
        d = cfg.d
        if cfg.mixer != "none":
            self.ln1 = nn.LayerNorm(d)
            self.mixer = Attention(d, cfg.n_head, cfg.dropout, cfg.projection) if cfg.mixer == "attention" else DirectMixer(d, length)
        else:
            self.mixer = None
        self.ln2, self.drop = nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, rows=None):
        mixed = self.drop(self.mixer(self.ln1(x), rows)) if self.mixer else 0
        x = (x if rows is None else x[:, rows]) + mixed
        return x + self.drop(self.mlp(self.ln2(x)))


class Model(nn.Module):
    """Decision Transformer for vectors or frames; actions are A numbers in [-1, 1] or one of A choices."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        d, self.frames = cfg.d, len(cfg.state_shape) == 3
        self.G = G = cfg.goal_dim if cfg.goal in ("action", "rtg", "embed") else 0      # goal numbers read by other tokens
        if (cfg.goal == "action" and not cfg.use_actions) or (cfg.goal == "rtg" and cfg.condition == "none"):
            raise ValueError(f"goal={cfg.goal!r} needs the token that it is written into: use_actions=True, or condition other than none")
        self.tokens = 1 + (cfg.condition != "none") + cfg.use_actions       # per step
        self.state_at = int(cfg.condition != "none")                        # the state's place among them
        if self.frames:
            self.embed_state = FrameEncoder(cfg.state_shape, d) if cfg.encoder == "conv" else ViT(cfg)
        else:
            self.embed_state = nn.Linear(cfg.state_shape[0] - G, d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1 + (G if cfg.goal == "rtg" else 0), d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        if G and cfg.goal == "action":
            self.embed_action_goal = nn.Linear(G, d, bias=False)            # the same as a Linear over [a_t, goal]
        if G and cfg.goal == "embed":
            self.embed_goal = nn.Linear(G, d)
        self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(self.tokens * cfg.context_len, d))
        # NOTE(code): with frames, as released for Atari, each embedding goes through a tanh, in place of a norm for all
        self.embed_ln, self.drop = nn.Identity() if self.frames else nn.LayerNorm(d), nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, self.tokens * cfg.context_len) for _ in range(cfg.n_layer))
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

    def hidden(self, states, actions, rewards, rtg, timesteps, rows, memory=None):
        """(B, number of rows, d): the last layer at the token positions in the slice rows."""
        cfg, dtype = self.cfg, self.head.weight.dtype
        # released for Atari: the first step's timestep for the whole window, and the place in it. NOTE(code): acting used the last step's
        time = self.embed_timestep((timesteps[:, :1] if cfg.position == "window" else timesteps).clamp(max=cfg.max_ep_len - 1))
        if self.frames:
            goal, x = None, [self.embed_state(states, memory)]
        else:
            states, goal = states.to(dtype).split([states.shape[-1] - self.G, self.G], -1)  # goal is empty unless read elsewhere
            x = [self.embed_state(states)]
        if self.G and cfg.goal == "embed":
            time = time + self.embed_goal(goal)                                             # (B, K, d)
        if cfg.condition != "none":
            # the reward that led to s_t; the first step of a window has none
            c = rtg.to(dtype) if cfg.condition == "rtg" else F.pad(rewards.to(dtype)[:, :-1], (0, 0, 1, 0))     # (B, K, 1)
            x.insert(0, self.embed_condition(torch.cat([c, goal], -1) if cfg.goal == "rtg" else c))
        if cfg.use_actions:
            a = self.embed_action(actions if cfg.discrete else actions.to(dtype))
            x.append(a + self.embed_action_goal(goal) if self.G and cfg.goal == "action" else a)
        x = torch.stack([(token.tanh() if self.frames else token) + time for token in x], 2).flatten(1, 2)      # (B, L, d): R_1 s_1 a_1 R_2 ...
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

        states (B, K, S) or frames (B, K, C, height, width) from 0 to 255, actions (B, K, A) or (B, K) int64, rewards and rtg (B, K, 1),
        timesteps (B, K) int64. Returns (B, K, A): actions in [-1, 1], or logits. Padding stands right of the real steps, where causal
        attention cannot see it: mask is not read.
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


DecisionTransformer = Model


def unread(cfg):
    """{input or parameter: why} for what the model is known not to read; the tests hold the model to everything else."""
    out = {}
    if cfg.condition != "rtg":
        out["rtg"] = "condition is not rtg"
    if cfg.condition != "reward":
        out["rewards"] = "condition is not reward"
    if not cfg.use_actions:
        out["actions"] = "no action tokens"
    if cfg.mixer == "none":
        out |= dict.fromkeys(["rtg", "rewards", "actions", "history"], "without a mixer s_t sees itself alone")
        out |= dict.fromkeys(["embed_condition", "embed_action"], "their tokens reach no prediction")
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
