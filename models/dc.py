"""Decision ConvFormer (Kim et al., 2024, arXiv 2310.03022).

A Decision Transformer that mixes its tokens by a short causal convolution instead of attention. In a Markov
process the last step tells all that the steps before it could, so each token is mixed with five others only:

    R1   s1   a1   R2   s2   a2   R3   s3   a3      return-to-go, state and action: a token each
              └────┴────┴────┴────┴────┤
                                  filter of s       three filters, one for each kind of token
                                       │
                                      MLP           this block three times, and the output at s3 predicts a3

8,064 parameters mix tokens here, where Decision Transformer's attention has 198,144.

    python dc.py        learns one random batch by heart and prints the loss

B batch, K context steps, L tokens (3K), d width, S state size, A action size; frames are C x height x width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    # what the data decide
    state_shape: tuple[int, ...] = (11,)    # (S,), goal included; or (C, height, width): C stacked frames
    act_dim: int = 3                        # A numbers in [-1, 1]; or A choices, if discrete
    discrete: bool = False
    goal_dim: int = 0                       # the last numbers of the state, where there is a goal
    max_ep_len: int = 1000                  # rows of the timestep table; later steps share its last
    # sizes
    context_len: int = 8                    # K, the steps that a prediction may depend on
    n_layer: int = 3                        # blocks
    n_head: int = 1                         # heads of the attention block, if hybrid
    d: int = 128                            # width of a token
    dropout: float = 0.1
    # the paper's switches
    window: int = 6                         # tokens that a filter sees, its own included (Table 18)
    filters: Literal["per-type", "shared"] = "per-type"     # shared: one filter for all tokens (Table 17)
    hybrid: bool = False                    # the last block mixes by attention (Section 3.2, Table 3)
    projection: bool = False                # a linear layer after each filter (Table 13)
    activation: Literal["relu", "gelu"] = "gelu"            # of the MLPs (Table 11)
    condition: Literal["rtg", "reward", "none"] = "rtg"     # a step's first token; none: behaviour cloning
    use_actions: bool = True                # False: no action tokens (Table 12)
    timestep_embedding: bool = True         # Table 9 switches it off for online fine-tuning
    # the released code's, for Atari
    position: Literal["timestep", "window"] = "timestep"    # window: the place in it
    # ours
    goal: Literal["none", "state"] = "state"                # none: hidden from the model
    timestep_std: float = 1.0               # spread of the timestep table at the start; released: 1


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


class MetaFormerBlock(nn.Module):
    """x + mixer(LN(x)), then x + MLP(LN(x)): a transformer's block with the mixer left open (Fig. 1)."""

    def __init__(self, cfg, kinds, attention):
        super().__init__()
        d = cfg.d
        if attention:       # NOTE(code): with its own linear layer, whatever Table 13 says of the hybrid
            mixer = [Attention(d, cfg.n_head, cfg.dropout), nn.Dropout(cfg.dropout)]
        else:
            mixer = [TokenFilters(d, cfg.window, kinds)]            # as released, without dropout
            if cfg.projection:
                mixer += [nn.Linear(d, d), nn.Dropout(cfg.dropout)]
        self.ln1 = nn.LayerNorm(d)
        self.mixer = nn.Sequential(*mixer)
        self.ln2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(
            nn.Linear(d, 4 * d), nn.ReLU() if cfg.activation == "relu" else nn.GELU(),
            nn.Linear(4 * d, d), nn.Dropout(cfg.dropout),
        )

    def forward(self, x, keep=slice(None)):
        x = x + self.mixer(self.ln1(x))
        x = x[:, keep]                      # after the last mixer, only the tokens that predict
        return x + self.mlp(self.ln2(x))


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


class DecisionConvFormer(nn.Module):

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.frames = len(cfg.state_shape) == 3
        self.state_at = int(cfg.condition != "none")            # the state's place among a step's tokens
        self.kinds = self.state_at + 1 + cfg.use_actions        # the number of them
        self.check()
        d = cfg.d

        self.embed_state = (FrameEncoder if self.frames else nn.Linear)(*cfg.state_shape, d)
        if cfg.condition != "none":
            self.embed_condition = nn.Linear(1, d)
        if cfg.use_actions:
            self.embed_action = nn.Embedding(cfg.act_dim, d) if cfg.discrete else nn.Linear(cfg.act_dim, d)
        if cfg.timestep_embedding:
            self.embed_timestep = nn.Embedding(cfg.max_ep_len, d)
        if cfg.position == "window":
            self.embed_place = nn.Parameter(torch.zeros(self.kinds * cfg.context_len, d))
        # NOTE(code): for Atari, a tanh of each embedding instead
        self.embed_ln = nn.Identity() if self.frames else nn.LayerNorm(d)
        self.drop = nn.Dropout(cfg.dropout)

        filters = self.kinds if cfg.filters == "per-type" else 1
        attention = [cfg.hybrid and layer == cfg.n_layer - 1 for layer in range(cfg.n_layer)]
        # the last block's filters of R and a reach no prediction; they stay, since the paper's 8,064 has them
        self.blocks = nn.ModuleList(MetaFormerBlock(cfg, filters, last) for last in attention)
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, cfg.act_dim)   # NOTE(code): the released Atari head has no bias
        self.init_weights()

    def check(self):
        """Raises ValueError for sizes that make no model, and for a switch that has no effect."""
        cfg = self.cfg
        sizes = cfg.act_dim, cfg.max_ep_len, cfg.context_len, cfg.n_layer, cfg.n_head, cfg.d, cfg.window
        if min(*sizes, *cfg.state_shape) < 1 or cfg.timestep_std < 0 or cfg.d % cfg.n_head:
            raise ValueError(f"n_head={cfg.n_head} does not divide d={cfg.d}, or size or timestep_std is low")
        tokens = self.kinds * cfg.context_len
        for name, works, need in (
            ("window", cfg.window <= tokens, f"a longer context_len: there are {tokens} tokens"),
            ("filters", self.kinds > 1, "a second kind of token"),
            ("hybrid", cfg.n_layer > 1, "a second block"),
            ("n_head", cfg.hybrid, "hybrid=True"),
        ):
            if getattr(cfg, name) != getattr(Config, name) and not works:
                raise ValueError(f"{name}={getattr(cfg, name)} has no effect without {need}")

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
        if self.cfg.timestep_embedding:
            nn.init.normal_(self.embed_timestep.weight, std=self.cfg.timestep_std)

    def features(
        self,
        states,         # (B, K, S) normalised; or (B, K, C, height, width), 0 to 255
        actions,        # (B, K, A) in [-1, 1]; or (B, K) int64
        rewards,        # (B, K, 1)
        rtg,            # (B, K, 1) return-to-go: the rewards from this step on, its own included
        timesteps,      # (B, K) int64, the step's place in its episode
        mask=None,      # (B, K) bool, False where padded: on the right, which no real step sees
    ):
        """(B, K, d): what each step's action is predicted from.

        NOTE(code): released windows are padded on the left, and the filters read that padding.
        """
        cfg = self.cfg
        dtype = self.head.weight.dtype
        tokens = []
        if cfg.condition != "none":  # reward: the one that led to this state
            c = rtg if cfg.condition == "rtg" else F.pad(rewards[:, :-1], (0, 0, 1, 0))
            tokens.append(self.embed_condition(c.to(dtype)))
        tokens.append(self.embed_state(states if self.frames else states.to(dtype)))
        if cfg.use_actions:
            tokens.append(self.embed_action(actions if cfg.discrete else actions.to(dtype)))
        x = torch.stack(tokens, 2)                                  # (B, K, kinds, d)
        if self.frames:
            x = x.tanh()
        if cfg.timestep_embedding:
            # NOTE(code): Atari has one timestep a window, here the first; released acting takes the last
            time = timesteps[:, :1] if cfg.position == "window" else timesteps
            x = x + self.embed_timestep(time.clamp(max=cfg.max_ep_len - 1))[:, :, None]
        x = x.flatten(1, 2)                                         # (B, L, d): R1 s1 a1 R2 ...
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
        """(mean over real steps, what to log): squared error (Eq. 5), or cross-entropy if discrete."""
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


Model = DecisionConvFormer      # the name by which the trainer finds it


FRAMES = dict(  # DT's released Atari code
    n_layer=6, position="window", timestep_std=0.0, clip=1.0, betas=(0.9, 0.95), weight_decay=0.1,
    decay="matrices", warmup=5, schedule="cosine", lr_floor=0.1, eval_episodes=10,
)
# The paper's settings: "*", then the environment's family, then its name, then "small". A key that ends in
# "hybrid" follows the one without it where hybrid is on.
PRESETS = {
    "*": dict(      # Table 4; its text for lr; warm-up, schedule and episodes as in the code
        n_layer=3, d=128, context_len=8, window=6, dropout=0.1, activation="gelu", batch_size=64, lr=1e-3,
        weight_decay=1e-4, clip=0.25, steps=100_000, warmup=10_000, schedule="constant", eval_episodes=100,
    ),
    # DT's target times 1 to 20, or to 100. NOTE(paper): names the ends; code: 1, 2, 10, 20
    "hopper": dict(targets=(3600.0, 7200.0, 18000.0, 36000.0, 54000.0, 72000.0)),
    "halfcheetah": dict(targets=(6000.0, 12000.0, 30000.0, 60000.0, 90000.0, 120000.0)),
    "walker2d": dict(targets=(5000.0, 10000.0, 25000.0, 50000.0, 75000.0, 100000.0)),
    "antmaze": dict(lr=1e-4, rtg_scale=1.0, targets=(1.0, 2.0, 5.0, 10.0, 50.0, 100.0)),    # code: to 100000
    "maze2d": dict(hybrid=True, lr=1e-4, rtg_scale=1.0, targets=(300.0,)),  # LSDT paper, Table 12
    "maze2d hybrid": dict(n_head=2),
    "hopper-medium": dict(d=256, lr=1e-4),  # Table 5
    "hopper-medium-replay": dict(d=256, lr=1e-4, use_actions=False),    # Tables 5 and 12
    "walker2d-medium": dict(lr=1e-4),  # text below Table 4
    # Table 6 (code: batch 128, pong 512); 10 epochs of 500,000 windows. NOTE(paper): the cosine ends after
    # two; code: after six, and rises; here after all
    "atari": FRAMES | dict(batch_size=256, lr=6e-4, steps=19_530, rtg_scale=1.0, sample=True),
    # Table 6: 1 or 5 times the data's largest return, in raw points, though the data's rewards are clipped.
    # Code: qbert 14000, seaquest 1150. Projections: Table 13; heads: DT's code
    "breakout": dict(targets=(90.0,)),
    "qbert": dict(targets=(2500.0,), projection=True),
    "pong": dict(targets=(20.0,)),
    "seaquest": dict(targets=(1450.0,), projection=True),
    "asterix": dict(targets=(520.0,)),
    "frostbite": dict(targets=(950.0,), projection=True),
    "assault": dict(targets=(780.0,), projection=True),
    "gopher": dict(targets=(2750.0,)),
    "atari hybrid": dict(context_len=30, n_head=8),     # Table 7
    "pong hybrid": dict(context_len=50),
    "asterix hybrid": dict(projection=True),
    "dmc": FRAMES | dict(steps=15_620),     # not in the paper: as StARformer's paper runs DT there
    "dmc hybrid": dict(n_head=8),
    "small": dict(  # ours, minutes on a laptop: filters one step long, the environment's return scale
        n_layer=2, n_head=1, d=64, context_len=3, window=3, hybrid=False, dropout=0.0, timestep_std=0.1,
        batch_size=106, steps=5000, lr=1.5e-3, warmup=100, schedule="cosine", eval_episodes=10,
        rtg_scale=None,
    ),
    "small-antmaze": dict(  # ours, on top of "small"
        n_layer=3, d=128, batch_size=256, steps=10_000, weight_decay=0.01, window=6,
    ),
    "small-frames": dict(   # ours, on top of "small"
        d=96, context_len=2, timestep_std=0.0, batch_size=64, steps=3000, eval_every=0, sample=False,
    ),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    B, K, S, A = 8, 8, 11, 3
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
