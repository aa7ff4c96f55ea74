"""Online Decision Transformer (Zheng et al., 2022, arXiv 2202.05607), with any of the six models.

Learn from data, then round by round: play an episode, asking for more than the data hold; keep it, with its
own return; train on windows of what is kept.

    python online.py --model dc --env hopper-medium --source local      pre-train, then fine-tune
    python online.py --from runs/RUN    start from a model of train.py
    python online.py --resume runs/RUN  go on with a stopped run

B batch, d width, A action size.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import argparse
import math
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import distributions, nn
from tqdm import tqdm

import data
import envs
import settings as config
import train
from errors import Parser, UserError, run_command
from eval import load_run, rollout


@dataclass(frozen=True)
class OnlineConfig(config.TrainConfig):
    env_steps: int = 200_000    # to play, to an episode's end
    explore: float | None = None    # return to ask for while learning; none: twice the evaluation's
    rollouts: int = 1           # episodes a round, side by side
    updates: int = 300          # a round, after its episodes
    buffer: int = 1000          # episodes kept
    eval_rounds: int = 10       # rounds between evaluations
    act_context: int = 5        # steps that acting sees, at most context_len
    temperature: float = 0.1    # weight of the entropy, at the start
    temperature_lr: float = 1e-4    # its rate
    keep_head: bool = False     # with --from: keep the last layer


# On top of a model's own: the released ODT, also for ODM; for DC its paper's Tables 8 to 10.
ODT = {
    "*": dict(steps=5000, batch_size=256, lr=1e-4, weight_decay=5e-4, betas=(0.9, 0.999), clip=0.25,
              warmup=10_000, schedule="constant", decay="all", eval_episodes=10),
    "hopper": dict(targets=(3600.0,)),
    "walker2d": dict(targets=(5000.0,), steps=10_000),
    "halfcheetah": dict(targets=(6000.0,)),
    "antmaze": dict(targets=(1.0,), steps=7000, buffer=1500),
    "small": dict(schedule="constant"),
}
SIZES = dict(n_layer=4, d=512)
PRESETS = dict.fromkeys(config.MODELS, ODT) | {
    "dt": ODT | {"*": ODT["*"] | SIZES | dict(      # NOTE(code): released without any position
        n_head=4, context_len=20, activation="relu", timestep_std=0.0)},
    "dc": ODT | {
        "*": ODT["*"] | SIZES | dict(
            context_len=8, activation="gelu", lr=5e-4, weight_decay=1e-4, timestep_embedding=False),
        "antmaze": ODT["antmaze"] | dict(lr=1e-3, weight_decay=0.0, timestep_embedding=True),
        "antmaze-umaze-diverse": dict(d=1024, lr=1e-4),
        # NOTE(paper): Table 9 has a position for these three, Table 8 d=256 for the first; Table 10 has not
        "hopper-medium-replay": dict(weight_decay=5e-5),
        "walker2d-medium-replay": dict(lr=1e-3),
        "halfcheetah-medium-replay": dict(lr=1e-4),
    },
}
# unseen tasks are read from all rewards in sight
PRESETS = {name: table | {"small-tasks": dict(act_context=20)} for name, table in PRESETS.items()}


class OnlineSettings(config.Settings):
    TRAIN, PRESETS, CODE = OnlineConfig, PRESETS, ["online.py"]


def squashed_gaussian(mean, log_std):
    """The distribution of tanh(u) for u from N(mean, exp(log_std)^2), each (..., A); its density is exact."""
    squash = distributions.TanhTransform(cache_size=1)      # remembers u where tanh(u) rounds to 1
    normal = distributions.Normal(mean, log_std.exp(), validate_args=False)
    return distributions.Independent(
        distributions.TransformedDistribution(normal, squash, validate_args=False), 1, validate_args=False)


class Stochastic:
    """Goes before a model's class, to draw actions: numbers as tanh(u), choices by their logits.

    The model's last layer, begun anew, gives the mean of u, and without sample the action.
    """

    def __init__(self, sizes, cfg):
        super().__init__(sizes)
        # NOTE(code): knows no choices; theirs is a tenth of the largest entropy
        self.target_entropy = 0.1 * math.log(sizes.act_dim) if sizes.discrete else -sizes.act_dim
        self.register_buffer("stochastic_log_temperature", torch.tensor(cfg.temperature).log())
        self.stochastic_std = nn.Identity() if sizes.discrete else nn.Linear(sizes.d, sizes.act_dim)
        for x in (*self.head.parameters(), *self.stochastic_std.parameters()):
            nn.init.orthogonal_(x) if x.ndim > 1 else nn.init.zeros_(x)

    def policy(self, features):
        """The distribution of actions, from features (..., d)."""
        with torch.autocast(features.device.type, enabled=False):       # bfloat16 would move a narrow one
            y, z = self.head(features.float()), self.stochastic_std(features.float())
            if self.cfg.discrete:
                return distributions.Categorical(logits=y, validate_args=False)
            return squashed_gaussian(y, 3.5 * z.tanh() - 1.5)

    def loss(self, batch):
        """(negative log-likelihood minus temperature times entropy, what to log); means over real steps."""
        features = []

        def keep(head, inputs, output):
            features.append(inputs[0])
            return output.detach()      # the model's own error teaches nothing; DM's predictor still learns
        with self.head.register_forward_hook(keep):
            total, log = super().loss(batch)
        policy, actions, mask = self.policy(features[0]), batch["actions"], batch["mask"]
        if self.cfg.discrete:
            nll, entropy = -policy.log_prob(actions), policy.entropy()
        else:       # tanh never is 1; one sample for the entropy, as released
            nll = -policy.log_prob(actions.clamp(1e-6 - 1, 1 - 1e-6))
            entropy = -policy.log_prob(policy.rsample())
        # NOTE(code): the released mean of the entropy is over padding, too
        nll, entropy = ((x * mask).sum() / mask.sum() for x in (nll, entropy))
        temperature = self.stochastic_log_temperature.exp()
        loss = nll - temperature.detach() * entropy + total - log["loss"]
        log |= dict(loss=loss, nll=nll, entropy=entropy, temperature=temperature)
        # a gradient alone: the temperature falls while entropy is above its target
        teach = temperature * (entropy.detach() - self.target_entropy)
        return loss + teach - teach.detach(), {key: x.detach() for key, x in log.items()}

    @torch.no_grad()
    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        """(B, A) or (B,): an action for a history's last step, drawn or not."""
        history = [x[:, -self.cfg.context_len:] for x in (states, actions, rewards, rtg, timesteps)]
        if self.cfg.discrete or not sample:
            return super().act(*history, sample=sample, generator=generator)
        normal = self.policy(self.features(*history)[:, -1]).base_dist.base_dist
        return torch.normal(normal.mean, normal.stddev, generator=generator).tanh()


FIELDS = ("states", "goals", "actions", "rewards")


class OnlineRun(train.Run):
    """A Run that also plays episodes. The rate's warm-up counts all updates.

    Its buffer is {place: episode}: kept of the data, in rising order of return, and new, which take free
    places, then those of the worst, then of the oldest.
    """
    SETTINGS = OnlineSettings
    SAVED = (*train.Run.SAVED, "offline", "round", "env_steps", "new", "tuner_state")

    def __init__(self, settings, t, meta):
        cfg = settings.train
        super().__init__(settings, t, meta | dict(act_context=cfg.act_context))
        temperature = self.model.stochastic_log_temperature.requires_grad_()
        graph = self.device.type == "cuda" and cfg.graph
        self.tuner = torch.optim.Adam([temperature], cfg.temperature_lr, capturable=graph)
        self.optimizer.register_step_post_hook(self.tune)
        fields = {key: getattr(t, key) for key in FIELDS}
        fields = {key: x.split(t.lengths.tolist()) for key, x in fields.items() if x is not None}
        rising = t.returns.argsort(stable=True)[-cfg.buffer:]       # NOTE(code): never the very worst
        self.kept = {i: {key: x[e] for key, x in fields.items()} for i, e in enumerate(rising)}
        self.new, self.offline, self.round, self.env_steps = {}, None, 0, 0

    def make_model(self):
        torch.manual_seed(self.cfg.seed)
        Model = config.model_module(self.cfg.model).Model
        return type("Policy", (Stochastic, Model), {})(self.settings.model, self.cfg)

    def tune(self, *_):
        self.tuner.step()
        self.tuner.zero_grad()

    @property
    def tuner_state(self):
        return self.tuner.state_dict()["state"]

    @tuner_state.setter
    def tuner_state(self, state):
        self.tuner.load_state_dict(self.tuner.state_dict() | dict(state=state))

    def log(self, **row):
        super().log(phase="online" if self.round else "offline", env_steps=self.env_steps, **row)

    def explore(self):
        """Play a round's episodes with drawn actions. Returns their mean return."""
        cfg, meta, n = self.cfg, self.meta, self.cfg.rollouts
        self.envs += [envs.make(meta["env_spec"]) for _ in range(n - len(self.envs))]
        target = meta["headline"] + abs(meta["headline"]) if cfg.explore is None else cfg.explore
        seeds = 10**9 + 1000 * cfg.seed + n * self.round + np.arange(n)     # no evaluation's
        options, record = [list(meta["starts"].values())[-1]] * n, [[] for _ in range(n)]
        generator = torch.Generator(self.device).manual_seed(int(seeds[0]))
        actor = self.actor.eval()
        result = rollout(actor, meta, self.envs[:n], [target] * n, seeds, options, sample=True,
                         generator=generator, record=record)
        actor.train()
        for place, steps in enumerate(record, len(self.kept) + n * self.round):
            fields = zip(FIELDS, zip(*steps, strict=True), strict=True)
            episode = {key: torch.from_numpy(np.array(x)) for key, x in fields if key in self.kept[0]}
            self.new[place % cfg.buffer] = episode      # NOTE(code): its last step is marked terminal
        self.round += 1
        self.env_steps += int(result["length"].sum())
        self.log(round=self.round, episodes=n, explored=float(result["return"].mean()), asked=target)
        return result["return"].mean()

    def look(self):
        """Windows of the buffer, normalised as the data; on CUDA a new graph of an update."""
        episodes = list((self.kept | self.new).values())
        fields = {key: torch.cat([episode[key] for episode in episodes]) for key in episodes[0]}
        lengths = [len(episode["rewards"]) for episode in episodes]
        meta = self.meta        # returns-to-go are summed anew, from real rewards
        t = data.Trajectories(**fields, lengths=lengths, n_actions=meta["n_actions"], action_low=-1.0,
                              action_high=1.0, stack=meta["layout"]["stack"])
        self.windows = self.windows_of(t, normal=(meta["state_mean"], meta["state_std"]))
        self.step = train.make_step(self.model, self.windows, self.optimizer, self.cfg, self.generator)


def go_online(run):
    """Play and learn until all steps are played; False if a signal came before."""
    cfg, before, began, quiet = run.cfg, run.seconds, time.perf_counter(), not sys.stderr.isatty()
    bar = tqdm(total=cfg.env_steps, initial=run.env_steps, unit="step", disable=quiet, dynamic_ncols=True)
    with bar, train.signals() as asked:
        if not run.offline:
            run.offline, = rows = run.play(run.meta["plan"])
            run.record(rows)
            run.save()
        while run.env_steps < cfg.env_steps:
            played = run.explore()
            run.look()
            for _ in range(cfg.updates):
                if asked:       # this round is not saved, but done again
                    return False
                run.update()
            text = f"loss {run.loss:.3f}, played {played:.1f}"
            bar.set_postfix_str(text, refresh=False)
            bar.update(run.env_steps - bar.n)
            if run.round % cfg.eval_rounds == 0 and run.env_steps < cfg.env_steps:
                run.record(run.play(run.meta["plan"]))
                if quiet:
                    print(f"step {run.env_steps:,}, {text}", flush=True)
            run.seconds = before + time.perf_counter() - began
            run.save()
    return True


def fine_tune(trajectories=None, resume=None, body=None, **given):
    """Pre-train, fine-tune, evaluate, and write a run folder; see train.train().

    body: a run folder, to start from its model. Returns train's result with "offline", the first evaluation.
    """
    if body:
        model, meta = load_run(body)
        keys = ["model", "rtg_scale", "reward_scale"] + ["env", "source"] * (trajectories is None)
        given = vars(model.cfg) | {key: meta[key] for key in keys} | given
    if given.get("model", "dt") not in config.MODELS:
        raise UserError("fine-tuning takes a model of models/")
    with train.started(trajectories, resume, OnlineRun, **given) as run:
        if not run.envs:
            raise UserError("fine-tuning plays: it needs an environment, and --eval_episodes 1 or more")
        if run.cfg.schedule == "cosine" and not run.cfg.lr_floor:
            raise UserError("--schedule cosine ends at a rate of 0: add --lr_floor, to go on learning")
        start = list(run.meta["starts"])[-1]
        run.meta["plan"] = [(start, run.meta["headline"], run.cfg.eval_episodes)]
        if body:
            if not run.cfg.keep_head:
                model.head = run.model.head
            run.model.load_state_dict(model.state_dict(), strict=False)
        train.advance(run)
        if run.done < run.cfg.steps:
            run.save()
        if run.done < run.cfg.steps or not go_online(run):
            print(f"stopped; python online.py --resume {run.folder} goes on")
            sys.exit(130)
        result = train.finish(run, offline=run.offline, env_steps=run.env_steps)
        before, after = (row["return_mean"] for row in (run.offline, *result["rows"]))
        print(f"return {before:.1f} offline, {after:.1f} after {run.env_steps:,} steps online", flush=True)
        return result


def main():
    parser = Parser(description=__doc__, argument_default=argparse.SUPPRESS, usage="online.py [--name value]")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--resume", metavar="RUN", help="go on with this run")
    way.add_argument("--from", metavar="RUN", dest="body", help="start from this run's model")
    options, given = config.parse(sys.argv[1:], parser, OnlineConfig)
    fine_tune(**options, **given)


if __name__ == "__main__":
    run_command(main)
