"""Decision Transformer (Chen et al., 2021, arXiv 2106.01345).

Ask for a return, and get the action that goes with it. An episode is a sequence of tokens; a causal
transformer, GPT-2, predicts each action from all tokens before it in the last K steps:

    R1   s1   a1   R2   s2   a2   R3   s3   a3      return-to-go, state and action: a token each
    └────┴────┴────┴────┴────┴────┴────┤
                                   attention of s3  to itself and to the tokens before it
                                       │
                                      MLP           this block three times, and the output at s3 predicts a3

R is the sum of the rewards to come. In acting it starts as the return that you want; rewards are taken off.

    python dt.py        learns one random batch by heart

B batch, K context steps, L tokens (3K), d width, S, A, G sizes of state, action and goal.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    # what the data decide
    state_shape: tuple[int, ...] = (11,)  # (S,), goal included; or (C, height, width): C stacked frames
    act_dim: int = 3           # A numbers in [-1, 1]; or A choices, if discrete
    discrete: bool = False
    goal_dim: int = 0          # G, the last numbers of the state, where there is a goal
    max_ep_len: int = 1000     # rows of the timestep table; later steps share its last
    # sizes
    context_len: int = 20      # K, the steps that a prediction may depend on
    n_layer: int = 3           # blocks
    n_head: int = 1            # heads of attention
    d: int = 128               # width of a token
    dropout: float = 0.1
    activation: Literal["relu", "gelu"] = "relu"  # of the MLPs
    # switches of papers that compare themselves with DT
    condition: Literal["rtg", "reward", "none"] = "rtg"  # a step's first token; none: behaviour cloning
    use_actions: bool = True   # False: no action tokens (DC paper, Table 12)
    mixer: Literal["attention", "direct", "none"] = "attention"  # DC paper: direct Fig. 3, none G.3
    projection: bool = True    # attention's last linear layer (DC paper, Table 13)
    goal: Literal["none", "state", "action", "rtg", "embed"] = "state"  # what reads it (LSDT paper, B.5)
    encoder: Literal["conv", "patch"] = "conv"  # of frames (StARformer paper, Table 2)
    patch: int = 7             # pixels of a patch's side
    # the released code's, for Atari
    position: Literal["timestep", "window"] = "timestep"  # window: the place in it
    # ours
    timestep_std: float = 1.0  # spread of the timestep table at the start; released: 1


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


class DirectMixer(nn.Module):
    """One learned lower-triangular matrix A for all inputs, in place of softmax(QK') (DC paper, Fig. 3b).

    NOTE(paper): names A and V only, so no output projection follows; A starts here as the mean over the past.
    """

    def __init__(self, d, length):
        super().__init__()
        self.A = nn.Parameter(torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None])
        self.V = nn.Linear(d, d)

    def forward(self, x):
        L = x.shape[1]
        return self.A[:L, :L].tril() @ self.V(x)


class GPTBlock(nn.Module):
    """GPT-2's block: x + mixer(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, cfg, length):
        super().__init__()
        d = cfg.d
        if cfg.mixer == "attention":
            self.mixer = Attention(d, cfg.n_head, cfg.dropout)
            if not cfg.projection:
                self.mixer.proj = nn.Identity()
        else:
            self.mixer = DirectMixer(d, length) if cfg.mixer == "direct" else None
        self.ln1 = nn.LayerNorm(d) if self.mixer else None
        self.ln2 = nn.LayerNorm(d)
        activation = nn.ReLU() if cfg.activation == "relu" else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), activation, nn.Linear(4 * d, d))
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, keep=slice(None)):
        """keep: the tokens that go on; after the last mixer, those that predict."""
        mixed = self.drop(self.mixer(self.ln1(x))[:, keep]) if self.mixer else 0
        x = x[:, keep] + mixed
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


class PatchEncoder(nn.Module):
    """Patches of a frame that attend to each other: "DT with ViT" (StARformer paper, Table 2).

    NOTE(paper): 13 million parameters. Here 10.9: blocks, heads and width as below, then one linear layer.
    """

    def __init__(self, cfg):
        super().__init__()
        d, (C, height, width) = cfg.d, cfg.state_shape
        if height % cfg.patch or width % cfg.patch:
            raise ValueError(f"patch={cfg.patch} does not divide frames of {height} x {width} pixels")
        n = height * width // cfg.patch**2
        self.patches = nn.Conv2d(C, d, cfg.patch, cfg.patch)  # a linear layer on each patch
        self.place = nn.Parameter(torch.zeros(n, d))
        self.drop = nn.Dropout(cfg.dropout)
        layer = dict(dropout=cfg.dropout, activation=cfg.activation, batch_first=True, norm_first=True)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(d, cfg.n_head, 4 * d, **layer) for _ in range(cfg.n_layer)),
            nn.LayerNorm(d), nn.Flatten(), nn.Linear(n * d, d),
        )

    def forward(self, frames):
        pixels = frames.flatten(0, 1).to(self.place.dtype, memory_format=torch.channels_last)
        x = self.patches(pixels / 255)
        x = self.drop(x.flatten(2).transpose(1, 2) + self.place)  # (B K, n, d)
        return self.layers(x).unflatten(0, frames.shape[:2])


class DecisionTransformer(nn.Module):

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.frames = len(cfg.state_shape) == 3
        self.state_at = int(cfg.condition != "none")  # the state's place among a step's tokens
        self.kinds = self.state_at + 1 + cfg.use_actions  # the number of them
        self.G = 0 if cfg.goal in ("none", "state") else cfg.goal_dim  # goal numbers that other tokens read
        self.check()
        d, G = cfg.d, self.G

        if not self.frames:
            self.embed_state = nn.Linear(cfg.state_shape[0] - G, d)
        elif cfg.encoder == "conv":
            self.embed_state = FrameEncoder(*cfg.state_shape, d)
        else:
            self.embed_state = PatchEncoder(cfg)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1 + G * (cfg.goal == "rtg"), d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        if cfg.goal in ("action", "embed"):  # added to the action's token, or to all of a step
            self.embed_goal = nn.Linear(G, d, bias=cfg.goal == "embed")
        self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(self.kinds * cfg.context_len, d))
        # NOTE(code): for Atari, a tanh of each embedding instead
        self.embed_ln = nn.Identity() if self.frames else nn.LayerNorm(d)
        self.drop = nn.Dropout(cfg.dropout)

        self.blocks = nn.ModuleList(GPTBlock(cfg, self.kinds * cfg.context_len) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, cfg.act_dim)  # NOTE(code): the released Atari head has no bias
        self.init_weights()

    def init_weights(self):
        """NOTE(code): GPT-2's N(0, 0.02) in the blocks, and for Atari in two layers more; else torch's."""
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        if self.frames:
            nn.init.normal_(self.head.weight, std=0.02)
            if self.cfg.use_actions and self.cfg.discrete:
                nn.init.normal_(self.embed_action.weight, std=0.02)
        nn.init.normal_(self.embed_timestep.weight, std=self.cfg.timestep_std)

    def check(self):
        """Raises ValueError for sizes that make no model, and for a switch that has no effect."""
        cfg = self.cfg
        sizes = cfg.act_dim, cfg.max_ep_len, cfg.context_len, cfg.n_layer, cfg.n_head, cfg.d, cfg.patch
        if min(*sizes, *cfg.state_shape) < 1 or cfg.timestep_std < 0 or cfg.d % cfg.n_head:
            raise ValueError(f"n_head={cfg.n_head} does not divide d={cfg.d}, or size or timestep_std is low")
        attention = cfg.mixer == "attention"
        token = dict(action=cfg.use_actions, rtg=cfg.condition != "none").get(cfg.goal, True)
        goal = cfg.goal == "none" or token and not self.frames and 0 < self.G < cfg.state_shape[0]
        for name, works, need in (
            ("projection", attention, "mixer='attention'"),
            ("n_head", attention or self.frames, "mixer='attention'"),  # the presets for frames set it
            ("encoder", self.frames, "frames"),
            ("patch", cfg.encoder == "patch", "encoder='patch'"),
            ("goal", goal, "a goal in the states and the token that reads it"),
        ):
            if getattr(cfg, name) != getattr(Config, name) and not works:
                raise ValueError(f"{name}={getattr(cfg, name)} has no effect without {need}")

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
        # NOTE(code): Atari has one timestep a window, here the first; released acting takes the last
        time = timesteps[:, :1] if cfg.position == "window" else timesteps
        time = self.embed_timestep(time.clamp(max=cfg.max_ep_len - 1))
        if not self.frames:
            states, goal = states.to(dtype).split((states.shape[-1] - self.G, self.G), -1)
        if cfg.goal == "embed":
            time = time + self.embed_goal(goal)

        tokens = []
        if cfg.condition != "none":  # reward: the one that led to this state
            c = rtg if cfg.condition == "rtg" else F.pad(rewards[:, :-1], (0, 0, 1, 0))
            c = c.to(dtype)
            tokens.append(self.embed_condition(torch.cat([c, goal], -1) if cfg.goal == "rtg" else c))
        tokens.append(self.embed_state(states))
        if cfg.use_actions:
            a = self.embed_action(actions if cfg.discrete else actions.to(dtype))
            tokens.append(a + self.embed_goal(goal) if cfg.goal == "action" else a)
        x = torch.stack(tokens, 2)  # (B, K, kinds, d)
        if self.frames:
            x = x.tanh()
        x = (x + time[:, :, None]).flatten(1, 2)  # (B, L, d): R1 s1 a1 R2 ...
        if cfg.position == "window":
            x = x + self.embed_place[:x.shape[1]]
        x = self.drop(self.embed_ln(x))

        for block in self.blocks[:-1]:
            x = block(x)
        return self.ln_f(self.blocks[-1](x, keep=slice(self.state_at, None, self.kinds)))

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


Model = DecisionTransformer  # the name that the trainer finds


CORL = dict(activation="gelu", rtg_scale=1.0)  # its DT
FRAMES = dict(  # the released Atari code
    n_layer=6, n_head=8, context_len=30, activation="gelu", position="window", timestep_std=0.0, clip=1.0,
    betas=(0.9, 0.95), weight_decay=0.1, decay="matrices", schedule="cosine", lr_floor=0.1, eval_episodes=10,
)
# The papers' settings: "*", then family, then name, then "small".
PRESETS = {
    "*": dict(  # the paper's table and the gym code
        n_layer=3, n_head=1, d=128, context_len=20, dropout=0.1, activation="relu", batch_size=64, lr=1e-4,
        weight_decay=1e-4, clip=0.25, steps=100_000, schedule="constant", eval_episodes=100,
        warmup=10_000,  # NOTE(paper): prints 100,000; every code base of the family has 10,000
        timestep_std=1.0,  # NOTE(code): torch's default; it outweighs all other embeddings
    ),
    "hopper": dict(targets=(3600.0, 1800.0)),
    "halfcheetah": dict(targets=(6000.0, 12000.0)),
    "walker2d": dict(targets=(5000.0, 2500.0)),
    # LSDT paper's DT
    "antmaze": dict(activation="gelu", batch_size=128, lr=4e-4, weight_decay=3e-4, targets=(1.0,)),
    "maze2d": CORL | dict(targets=(280.0, 140.0)),
    "pen": CORL | dict(targets=(3100.0, 1550.0)),
    "door": CORL | dict(targets=(2900.0, 1450.0)),
    "hammer": CORL | dict(targets=(12800.0, 6400.0)),
    "relocate": CORL | dict(targets=(4300.0, 2150.0)),
    # Tables 8 and 9: 5 epochs of 500,000 windows. NOTE(paper): the cosine ends after two, code:
    # after six; here after all
    "atari": FRAMES | dict(batch_size=128, lr=6e-4, steps=19_530, warmup=3, rtg_scale=1.0, sample=True),
    # NOTE(paper): raw points, though the data's rewards are clipped. Code: qbert 14000, seaquest 1150
    "breakout": dict(targets=(90.0,)),
    "qbert": dict(targets=(2500.0,)),
    "pong": dict(context_len=50, batch_size=512, steps=4_880, targets=(20.0,)),
    "seaquest": dict(targets=(1450.0,)),
    # DC paper, Table 6, B.2 (10 epochs). NOTE(paper): Table 13 has DT without projection in qbert, frostbite
    # and gopher; its code always has one
    "asterix": dict(steps=39_060, targets=(520.0,)),
    "frostbite": dict(steps=39_060, targets=(950.0,)),
    "assault": dict(steps=39_060, targets=(780.0,)),
    "gopher": dict(steps=39_060, targets=(2750.0,)),
    "dmc": FRAMES | dict(lr=1e-3, steps=15_620, warmup=5),  # StARformer paper, Table 5; updates: its Atari's
    "small": dict(  # ours, as those below; a short context and a narrow table follow targets
        n_layer=2, d=64, context_len=3, dropout=0.0, activation="relu", timestep_std=0.1, batch_size=106,
        steps=3700, lr=1.5e-3, warmup=100, schedule="cosine", eval_episodes=10, rtg_scale=None,
    ),
    "small-antmaze": dict(
        n_layer=3, d=128, batch_size=256, steps=10_000, weight_decay=0.01,
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
        loss, _ = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
