"""Q-value regularised Transformer (QT; Hu et al., 2024, arXiv 2405.17098) around any of the six models.

Imitation does not join the good beginning of one episode to the good end of another. Two critics learn what
an action is worth in a state; the model, here the actor, learns to please them as well as to imitate, and in
acting they choose among what it would do:

    loss = the model's own + error of the next state - eta * Q(s, actor's action) / mean |Q|

    python qt.py --model dm --env hopper-medium-replay --source local       QT with DM's trunk: QDM

The same as train.py --model qt-dm; eval.py plays the run.

B batch, K context steps, S state size, A action size, n candidates, M returns.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import copy
import functools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import data
import train
from errors import Parser, run_command


@dataclass
class Switches:
    """What QT adds to a model's Config."""
    eta: float = 1.0            # weight of the Q term
    gamma: float = 0.99         # discount of rewards in Q
    critic_d: int = 256         # width of the critics
    polyak: float = 0.005       # share of their way that slow copies move
    next_state: bool = True     # NOTE(code): the actor also learns to predict the next state
    pick: Literal["softmax", "best", "first"] = "softmax"       # of the candidates; first: without critics
    copies: int = 50            # n
    # the released code's
    drop_last: bool = False     # NOTE(code): a window's last reward counts nowhere, though its episode ends
    stale: bool = False         # NOTE(code): the slow actor is untrained up to update 1,000, and has dropout
    q_return: bool = False      # NOTE(code): one candidate is asked for Q, which is not divided by rtg_scale
    report_best: bool = False   # NOTE(code): of all evaluations the best is reported, not the last
    offsets: tuple[float, ...] = (0.0,)     # (M,) targets less the first, divided by rtg_scale; the run's


class Critics(nn.Module):
    """Q1 and Q2: (2, ...) from normalised states (..., S) and actions (..., A)."""

    def __init__(self, S, A, d):
        super().__init__()
        self.both = nn.ModuleList(
            nn.Sequential(nn.Linear(S + A, d), nn.Mish(), nn.Linear(d, d), nn.Mish(),
                          nn.Linear(d, d), nn.Mish(), nn.Linear(d, 1))
            for _ in range(2))

    def forward(self, states, actions):
        x = torch.cat([states, actions], -1)
        return torch.stack([Q(x)[..., 0] for Q in self.both])


def n_step_targets(rewards, mask, terminals, value, gamma, drop_last=False):
    """(y, what of it is known), both (B, K): what Q should be in windows whose last step is e.

        y[t] = sum over k from t to e - 1 of gamma^(k - t) r[k]  +  gamma^(e - t) V

    V is r[e] at a terminal. Elsewhere, at a time limit and a cut too, it is value (B,), and e itself is not
    known. rewards (B, K); mask, terminals (B, K) bool.
    """
    last = mask & ~F.pad(mask[:, 1:], (0, 1))
    end = torch.where(terminals, rewards * (not drop_last), value[:, None])
    x = torch.where(last, end, rewards * mask)
    steps = torch.arange(mask.shape[1], device=mask.device)
    ahead = steps[:, None] - steps                              # (K, K): k - t
    y = (x[:, :, None] * gamma ** ahead.clamp(min=0) * (ahead >= 0)).sum(1)
    return y, mask & ~last if drop_last else mask & (~last | terminals)


def mean(x, where):
    return (x * where).sum() / where.sum().clamp(min=1)


class QT(nn.Module):
    """An actor, two critics, and slow copies of both, which say what the critics should learn."""

    def __init__(self, cfg, actor):
        super().__init__()
        if cfg.discrete or len(cfg.state_shape) != 1:
            raise ValueError("QT's critics read vectors: no frames, and no actions to choose from")
        (S,), A = cfg.state_shape, cfg.act_dim
        self.cfg, self.actor = cfg, actor
        self.next_state = nn.Linear(cfg.d + A, S)
        self.critics = Critics(S, A, cfg.critic_d)
        self.slow_actor = copy.deepcopy(actor).requires_grad_(False)
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(False)

    def param_groups(self, weight_decay):
        """The critics are clipped apart from the actor, and their weights do not decay."""
        groups = [dict(params=list(self.actor.parameters()), weight_decay=weight_decay)]
        if hasattr(self.actor, "param_groups"):
            groups = self.actor.param_groups(weight_decay)
        groups[0]["params"] += self.next_state.parameters()
        return groups + [dict(params=list(self.critics.parameters()), weight_decay=0.0, part="critics")]

    @torch.no_grad()
    def follow(self, updates):
        """Move the slow copies, the actor's at every fifth update; up to 1,000 it is the actor."""
        step = self.cfg.polyak
        share = step * (updates % 5 == 0) if updates > 1000 else float(not self.cfg.stale)
        torch._foreach_lerp_(list(self.slow_critics.parameters()), list(self.critics.parameters()), step)
        torch._foreach_lerp_(list(self.slow_actor.parameters()), list(self.actor.parameters()), share)

    def forward(self, *inputs, terminals=None, **named):
        """(B, K, A): the actor's actions."""
        return self.actor(*inputs, **named)

    def worth(self, states, actions):
        """The smaller Q of the slow critics."""
        return self.slow_critics(states, actions).amin(0)

    def loss(self, batch):
        """(the sum of all losses, what to log: "loss" is the model's own). batch: with "terminals" (B, K)."""
        cfg, batch = self.cfg, dict(batch)
        terminals = batch.pop("terminals")
        states, actions, mask = (batch[key] for key in ("states", "actions", "mask"))
        total, log = self.actor.loss(batch)
        features = self.actor.seen
        if cfg.next_state:
            guess = self.next_state(torch.cat([features, actions], -1))[:, :-1]
            error = mean((guess - states[:, 1:]).square().mean(-1), mask[:, 1:])
            total, log["next_state"] = total + error, error.detach()

        # one critic, by a coin, over the other's size; neither learns from it
        fixed = {name: p.detach() for name, p in self.critics.named_parameters()}
        q = functional_call(self.critics, fixed, (states, self.actor.predict(features)))        # (2, B, K)
        one, other = torch.where(torch.rand((), device=q.device) < 0.5, q, q.flip(0))
        total = total - cfg.eta * mean(one, mask) / mean(other.abs(), mask).detach().clamp(min=1e-6)

        with torch.no_grad():
            rows, last = torch.arange(len(mask), device=mask.device), mask.sum(1) - 1
            likely = self.slow_actor.train(cfg.stale)(**batch)
            value = self.worth(states[rows, last], likely[rows, last])                          # (B,)
            y, known = n_step_targets(
                batch["rewards"][..., 0], mask, terminals, value, cfg.gamma, cfg.drop_last)
        critic = mean((self.critics(states, actions) - y).square().sum(0), known)
        self.actor.seen = None
        return total + critic, log | {"critic": critic.detach(), "q": mean(q.detach().mean(0), mask)}

    @torch.no_grad()
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        """(B, A): one of n actions for the history's last step; sample has no effect.

        The M returns are asked for in turn, after the first M actions with noise in the last return-to-go.
        """
        cfg, B = self.cfg, len(states)
        n, M = (1, 1) if cfg.pick == "first" else (cfg.copies, len(cfg.offsets))
        history = states, actions, rewards, rtg, timesteps
        states, actions, rewards, rtg, timesteps = (
            x[:, -cfg.context_len:].repeat_interleave(n, 0) for x in history)
        asked = rtg + torch.tensor((cfg.offsets * n)[:n], device=rtg.device).repeat(B)[:, None, None]
        noise = 0.1 * torch.randn(B, n, device=rtg.device, generator=generator)
        noise[:, :M] = 0
        asked[:, -1, 0] += noise.flatten()
        if cfg.q_return and n > M and rtg.shape[1] > 1:
            q = self.worth(states[:, -2], actions[:, -2]) - (rtg[:, -2, 0] - rtg[:, -1, 0])
            asked[n - 1::n, -1, 0] = q[n - 1::n]
        y = self.actor(states, actions, rewards, asked, timesteps)[:, -1]       # (B n, A)
        q = self.worth(states[:, -1], y).view(B, n)
        chosen = q.argmax(-1)
        if cfg.pick == "softmax":
            chosen = torch.multinomial(q.softmax(-1), 1, generator=generator)[:, 0]
        return y.view(B, n, -1)[torch.arange(B, device=y.device), chosen]


class Windows(data.Windows):
    """Batches with "terminals" (B, K) bool: the steps that end their episode, limits and cuts aside."""

    def __init__(self, trajectories, *args, **named):
        super().__init__(trajectories, *args, **named)
        self.terminated = trajectories.terminated.repeat_interleave(trajectories.lengths).to(self.device)

    def gather(self, index, size=None):
        batch = super().gather(index, size)
        ends = self.left[index][:, None] == self.offsets + 1        # (B, K)
        return batch | dict(terminals=ends & batch["mask"] & self.terminated[index][:, None])


class Run(train.Run):
    """A run that asks for all targets at once, or for the headline alone if they are the data's."""
    Windows = Windows

    def __init__(self, settings, trajectories, meta):
        cfg, head = settings.train, meta["headline"]
        if meta["plan"]:
            meta["plan"] = [(start, head, cfg.eval_episodes) for start in meta["starts"]]
            # among actions for good and bad returns critics choose badly
            others = cfg.targets if settings.origin["targets"] != "data" else ()
            returns = dict.fromkeys([head, *others])
            settings = settings.replace("data", offsets=tuple((x - head) / cfg.rtg_scale for x in returns))
        super().__init__(settings, trajectories, meta)

    def update(self):
        super().update()
        self.model.follow(self.done)

    def record(self, rows, *args, **facts):
        super().record(rows, *args, **facts)
        if self.settings.model.report_best:
            print(f"return of the best evaluation so far: {self.best[1]:.1f}")


PRESETS = {     # as released for D4RL's sets
    "*": dict(
        batch_size=256, lr=3e-4, decay="all", betas=(0.9, 0.999), warmup=0, clip=9.0,
        schedule="constant", steps=100_000, eval_episodes=10, amp=False,
    ),
    "hopper": dict(targets=(3600, 1800)),
    "hopper-medium-replay": dict(eta=3.0),
    "halfcheetah": dict(eta=5.0, clip=15.0, context_len=5, targets=(12000, 9000, 6000)),
    "halfcheetah-medium-expert": dict(eta=0.4, context_len=20),
    "walker2d": dict(eta=2.0, clip=5.0, targets=(5000, 4000, 2500)),
    "maze2d": dict(eta=5.0, rtg_scale=10.0, targets=(300, 200, 150, 100, 50, 20)),
    "maze2d-umaze": dict(clip=20.0, schedule="cosine"),
    "maze2d-medium": dict(schedule="cosine"),
    "maze2d-large": dict(eta=4.0),
    "antmaze": dict(eta=0.01, targets=(1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3)),
    "antmaze-umaze": dict(eta=0.05),
    "antmaze-medium-diverse": dict(steps=80_000, schedule="cosine"),
    "antmaze-large-diverse": dict(eta=0.005, steps=80_000, schedule="cosine"),
    "pen": dict(eta=0.1, targets=(12000, 6000)),
    "hammer": dict(eta=0.01, targets=(12000, 6000, 3000)),
    "hammer-human": dict(eta=0.1, clip=5.0, steps=60_000),
    "hammer-cloned": dict(steps=30_000),
    "door": dict(eta=0.005, targets=(2000, 1000, 500)),
    "door-cloned": dict(eta=0.001, steps=60_000),
    "relocate": dict(eta=0.01, targets=(3000, 1000)),
    "kitchen": dict(eta=0.01),
    "kitchen-complete": dict(eta=0.001),
    "kitchen-partial": dict(steps=50_000),
    # ours, on top of the model's own: a small eta, as its critics are young
    "small": dict(critic_d=128, copies=10, polyak=0.05),
} | {f"small-{family}": dict(eta=0.1) for family in ("hopper", "walker2d", "halfcheetah", "maze2d")}


@functools.cache
def around(trunk):
    """QT around a file of models/, in the form of such a file."""
    class Config(Switches, trunk.Config):
        pass

    class Actor(trunk.Model):
        def predict(self, features):
            self.seen = features
            return super().predict(features)
    presets = dict(PRESETS, **{"*": trunk.PRESETS["*"] | PRESETS["*"]})
    for key, own in trunk.PRESETS.items():
        if key.startswith("small"):
            presets[key] = own | PRESETS["small"] | PRESETS.get(key, {})
    if trunk.__name__ == "models.dt":       # others keep their own sizes
        presets["*"] |= dict(n_layer=4, n_head=4, d=256, context_len=20, dropout=0.1, activation="relu")
    return SimpleNamespace(
        Config=dataclass(Config), PRESETS=presets, Run=Run, Model=lambda cfg: QT(cfg, Actor(cfg)))


def main():
    parser = Parser(add_help=False)
    parser.add_argument("--model", default="dt")
    options, rest = parser.parse_known_args()
    if not any(x.startswith("--resume") for x in rest):
        rest += ["--model", f"qt-{options.model}"]
    sys.argv[1:] = rest
    train.main()


if __name__ == "__main__":
    run_command(main)
