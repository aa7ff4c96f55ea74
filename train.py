"""Train a model on a data set, evaluate it, and leave a run folder that eval.py can use alone.

    python train.py                                         dt on pointmaze-umaze, collected on the spot
    python train.py --model dm --env hopper-medium          any model, any name of 'python data.py list'
    python train.py --env minari:my/set-v0                  a Minari set of your own
    python train.py --resume runs/dt-pointmaze-umaze-s0     go on with a run that was stopped
    python train.py --show | --bench 200 | --seeds 0 1 2

Every field of settings.TrainConfig and of the model's Config is a flag.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import argparse
import contextlib
import csv
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import time
import typing
import warnings
import zlib
from pathlib import Path

import filelock
import numpy as np
import torch
import torch.nn.attention
from torch import nn
from torch.optim import swa_utils
from tqdm import tqdm

import data
import envs
import settings as config
from errors import Parser, UserError, explained, run_command, short
from eval import check_environment, evaluate, load_run, plot_curve, plot_targets, table, title

PACKAGES = "torch numpy gymnasium gymnasium-robotics mujoco ale-py dm-control minari".split()


# ------------------------------------------------------------------- one update

def learning_rate(cfg, step):
    """The rate of update step, counted from 0: a linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / max(1, cfg.warmup))
    if cfg.schedule == "constant":
        return cfg.lr * warm
    # beyond the last update an unclamped cosine would climb again
    progress = min(1.0, max(0.0, (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)))
    return cfg.lr * warm * max(cfg.lr_floor, 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer, value):
    for group in optimizer.param_groups:
        lr = value * group.get("lr_scale", 1.0)
        if torch.is_tensor(group["lr"]):        # on CUDA, so that a captured graph reads today's rate
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def make_optimizer(model, cfg, device):
    groups = [dict(params=list(model.parameters()), weight_decay=cfg.weight_decay)]
    if hasattr(model, "param_groups"):
        groups = model.param_groups(cfg.weight_decay)
    if cfg.decay == "matrices":
        weights = {id(p) for name, p in model.named_parameters() if name.endswith("weight") and p.ndim > 1}
        weights -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        groups = [
            dict(g, params=[p for p in g["params"] if (id(p) in weights) == decays],
                 weight_decay=g["weight_decay"] * decays)
            for g in groups for decays in (True, False)]
    cuda = device.type == "cuda"
    for group in groups:
        group["lr"] = torch.tensor(cfg.lr, device=device) if cuda else cfg.lr
    return torch.optim.AdamW(groups, betas=cfg.betas, fused=True, capturable=cuda and cfg.graph)


def make_step(model, windows, optimizer, cfg, generator):
    """A function of one update (sample, forward, backward, clip, AdamW) that returns the model's log."""
    device = windows.device
    cuda = device.type == "cuda"
    loss_of = torch.compile(model.loss) if cfg.compile else model.loss
    clipped = {}        # one norm for all that share a learning rate: a part with its own shrinks no other
    for group in optimizer.param_groups:
        clipped.setdefault((group.get("lr_scale", 1.0), group.get("part")), []).extend(group["params"])

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(cfg.amp)):
            loss, log = loss_of(windows.sample(cfg.batch_size, generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for params in clipped.values():
            nn.utils.clip_grad_norm_(params, cfg.clip)
        optimizer.step()
        return log
    if not (cuda and cfg.graph):
        return step
    return captured(step, model, generator).__next__


def captured(step, model, generator):
    """The logs of step: of three ordinary calls, which allocate what a graph cannot; then of a CUDA graph."""
    for module in model.modules():
        if hasattr(module, "static_shapes"):        # DM: as many tokens in every update
            module.static_shapes = True
    warnings.filterwarnings("ignore", message=".*capturable=True.*")     # of these three calls
    side = torch.cuda.current_stream()
    if side == torch.cuda.default_stream():     # which captures nothing
        side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            log = step()
        torch.cuda.current_stream().wait_stream(side)
        yield log
    try:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=side):      # cuBLAS keeps its work space by stream
            log = step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:      # a failed capture leaves streams and generators unusable
        raise UserError(f"the update fits no CUDA graph ({short(error)}); add --graph false") from error
    while True:
        graph.replay()
        yield log


# ------------------------------------------------------------------- run folders

class Busy(UserError):
    """Another process writes to the run folder."""


class Diverged(UserError):
    """The loss is no number any more."""


def new_folder(cfg):
    """An empty folder for this run, numbered if its name is taken."""
    name = cfg.run or f"{cfg.model}-{cfg.env.removeprefix('minari:').replace('/', '-')}-s{cfg.seed}"
    out = Path(cfg.out).expanduser()
    for number in itertools.count(1):
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except (OSError, ValueError) as error:
            if not os.path.isdir(folder):
                raise UserError(f"cannot write to {out} ({short(error)}); try another --out") from error


@contextlib.contextmanager
def hold(folder):
    """Keep other processes from writing to a run folder, until this one ends, however it ends."""
    lock = filelock.FileLock(folder / "lock", timeout=0)
    try:
        with contextlib.suppress(NotImplementedError):      # a disk that knows no locks
            lock.acquire()
    except filelock.Timeout as error:
        raise Busy(f"{folder} is being written by another process; wait for it, or stop it") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({short(error)}); nothing in it was changed") from error
    try:
        yield
    finally:
        lock.release()


def write_atomically(path, write):
    """write(temporary path), then rename, so that a killed process never leaves a part of a file."""
    part = path.with_name("part-" + path.name)
    try:
        # torch.save reports a full disk as RuntimeError
        with explained(f"cannot write {path}", "; the last checkpoint is whole", (OSError, RuntimeError)):
            write(part)
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------- a run

SAVED = ("done", "best", "loss", "sums", "count", "rows", "seconds", "fingerprint")


class Run:
    """A model, its data, optimiser and log. Its state is what a checkpoint holds.

    settings are complete (settings.fitted), meta is that of acting_facts. rows are those of
    log.csv, one for each logged update and each (update, target) of an evaluation. They hold no clock:
    a resumed run writes the very file of an uninterrupted one.
    """
    SETTINGS, SAVED, Windows = config.Settings, SAVED, data.Windows     # online.py and qt.py have others

    def __init__(self, settings, trajectories, meta):
        t, cfg = trajectories, settings.train
        self.settings, self.cfg, self.folder = settings, cfg, None
        self.device = config.pick_device(cfg.device)
        self.model = self.make_model().to(self.device).train()
        self.windows = self.windows_of(t)
        self.generator = torch.Generator(self.device).manual_seed(cfg.seed)     # draws batches alone
        self.optimizer = make_optimizer(self.model, cfg, self.device)
        average = swa_utils.get_ema_multi_avg_fn(cfg.ema)
        self.average = swa_utils.AveragedModel(self.model, multi_avg_fn=average) if cfg.ema else None
        self.step = make_step(self.model, self.windows, self.optimizer, cfg, self.generator)
        self.meta = meta | dict(state_mean=self.windows.mean, state_std=self.windows.std)
        arrays = (t.rewards, t.actions) if t.stack else (t.rewards, t.actions, t.states)
        self.fingerprint = [t.dataset, t.source, len(t), *(zlib.crc32(x.numpy()) for x in arrays)]
        self.done, self.best, self.rows, self.envs, self.seconds = 0, None, [], [], 0.0
        self.loss, self.sums, self.count = math.nan, {}, 0      # the last logged loss, and sums since

    def make_model(self):
        return config.model_of(self.settings)

    def windows_of(self, t, **more):
        cfg, sizes = self.cfg, self.settings.model
        return self.Windows(t, sizes.context_len, self.device, cfg.rtg_scale, cfg.reward_scale,
                            sizes.max_ep_len, sizes.goal != "none", cfg.windows, **more)

    @property
    def actor(self):
        """The model whose weights act."""
        return self.average.module if self.average and self.done else self.model

    def load(self, state):
        """Go on from what save() wrote. Raises UserError if the data are not those of its beginning."""
        if state["fingerprint"] != self.fingerprint:
            raise UserError(f"{self.folder} began with other data (set, source, transitions, hashes): "
                            f"{state['fingerprint']}, and not {self.fingerprint}")
        with explained(f"{self.folder / 'last.pt'} cannot be resumed"):     # its parts do not fit each other
            for key in self.SAVED:
                setattr(self, key, state[key])
            self.actor.load_state_dict(state["model"])
            self.model.load_state_dict(state.get("trained", state["model"]))
            groups = self.optimizer.state_dict()["param_groups"]    # those of this device, not of the run's
            self.optimizer.load_state_dict(dict(state=state["optimizer"], param_groups=groups))
            self.sums = {key: x.to(self.device) for key, x in self.sums.items()}
            if self.average:
                self.average.n_averaged.fill_(self.done)
            old, code = state["meta"].get("code", {}), self.meta["code"]
            self.meta["code"] = {file: x if x == old.get(file) else f"{old.get(file)}+{x}"
                                 for file, x in code.items()}     # of both parts
            torch.set_rng_state(state["torch_rng"])
            cuda = self.device.type == "cuda"
            if cuda == (state["cuda_rng"] is not None):
                self.generator.set_state(state["generator"])
                if cuda:
                    torch.cuda.set_rng_state(state["cuda_rng"])
            else:       # begun on another kind of device, whose generator cannot be continued on this one
                self.generator.manual_seed(self.cfg.seed + self.done)

    def save(self, which="last"):
        """Write log.csv and last.pt, from which training goes on; or best.pt, to act with."""
        self.meta["step"] = self.done
        settings = dict(train=vars(self.cfg), model=vars(self.settings.model), origin=self.settings.origin)
        state = dict(model=self.actor.state_dict(), settings=settings, meta=self.meta)
        if which == "last":
            self.write_log()
            if self.average:
                state["trained"] = self.model.state_dict()
            state |= {key: getattr(self, key) for key in self.SAVED} | dict(
                optimizer=self.optimizer.state_dict()["state"], generator=self.generator.get_state(),
                torch_rng=torch.get_rng_state(), cuda_rng=None)
            if self.device.type == "cuda":
                state["cuda_rng"] = torch.cuda.get_rng_state()
        write_atomically(self.folder / f"{which}.pt", lambda path: torch.save(state, path))

    def log(self, **row):
        common = {key: self.meta[key] for key in ("model", "env", "dataset", "source", "seed")}
        self.rows.append(dict(step=self.done) | common | row)

    def write_log(self):
        def write(path):
            with open(path, "w", newline="", encoding="utf-8") as file:
                out = csv.DictWriter(file, dict.fromkeys(key for row in self.rows for key in row))
                out.writeheader()
                out.writerows(self.rows)
        write_atomically(self.folder / "log.csv", write)

    def update(self):
        """One update of the weights, and every hundredth of all updates a row of the log.

        Raises Diverged where the loss is no number any more.
        """
        set_learning_rate(self.optimizer, learning_rate(self.cfg, self.done))
        for key, x in self.step().items():
            self.sums[key] = self.sums[key] + x if key in self.sums else x.clone()
        if self.average:
            self.average.update_parameters(self.model)
        self.done += 1
        self.count += 1
        if self.done % max(1, self.cfg.steps // 100) == 0 or self.done == self.cfg.steps:
            mean = {key: float(x) / self.count for key, x in self.sums.items()}
            self.loss, self.sums, self.count = mean["loss"], {}, 0
            if not math.isfinite(self.loss):
                raise Diverged(f"the loss is {self.loss} at update {self.done}: training has diverged; "
                               "a smaller --lr may help")
            self.log(lr=learning_rate(self.cfg, self.done - 1), **mean)

    def due(self):
        """(the plan of an evaluation that is due after this update, or []; whether a checkpoint is)."""
        cfg, plan = self.cfg, []
        every = max(1, cfg.steps // 4) if cfg.eval_every is None else cfg.eval_every
        if every and self.done % every == 0 and self.done < cfg.steps:
            start = list(self.meta["starts"])[-1]
            plan = [(s, x, min(n, 10)) for s, x, n in self.meta["plan"] if s == start]
        hundredth = max(1, cfg.steps // 100)        # a checkpoint's loss has just been looked at
        every = max(1, cfg.steps // 20) // hundredth * hundredth
        return plan, self.done % every == 0 or self.done == cfg.steps

    def play(self, plan, model=None):
        """Rows of an evaluation."""
        return evaluate(model or self.actor, self.meta, plan, self.cfg.seed, self.envs, self.cfg.sample)

    def record(self, rows, checkpoint="last", **facts):
        """Put the rows of an evaluation into the log, too."""
        for row in rows:
            kept = {key: x for key, x in row.items() if key not in ("returns", "achieved")}
            self.log(**dict(checkpoint=checkpoint) | kept | facts)
        if checkpoint == "last":
            self.keep_best(rows)

    def keep_best(self, rows):
        """Write best.pt if these rows are the best so far: by success where there is one, then by return.

        What counts is the last start, at the target nearest the headline.
        """
        start = list(self.meta["starts"])[-1]
        rows = [r for r in rows if r["start"] == start]
        row = min(rows, key=lambda r: abs(r["target"] - self.meta["headline"]))
        value = [row["success"] or 0.0, row["return_mean"]]
        if self.best is None or value > self.best or self.done == self.cfg.steps and value == self.best:
            self.best = value
            self.save("best")


def acting_facts(settings, t):
    """A checkpoint's meta: normalisation, bounds, environment, and what the run is called by."""
    cfg, sizes = settings.train, settings.model
    env = envs.ENVS.get(cfg.env)
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(
        model=cfg.model, env=t.dataset if cfg.env == "arrays" else cfg.env,
        dataset=t.dataset, source=t.source, layout=t.layout,
        env_spec=envs.sticky(t.env_spec, cfg.sticky),
        goal=sizes.goal_dim > 0, goal_dim=None if sizes.goal == "none" else t.goal_dim,     # None: hidden
        state_shape=list(sizes.state_shape), act_dim=sizes.act_dim, max_ep_len=sizes.max_ep_len,
        rtg_scale=cfg.rtg_scale, reward_scale=cfg.reward_scale, clip_rewards=t.clip_rewards,
        n_actions=t.n_actions, action_start=t.action_start,
        action_low=t.action_low, action_high=t.action_high,
        # D4RL's score of AntMaze is the success rate; here its episodes go on after success
        ref=env.ref if env and env.family != "antmaze" else None,
        starts=env.starts if env else {"random": None},
        sample=cfg.sample, seed=cfg.seed, step=0, versions=versions, plan=[], headline=None,
        code=config.code_of(cfg.model, cfg.env, also=settings.CODE))


def choose_targets(settings, t, env):
    """Which returns to ask for: (settings with the targets, plan, headline, a line that says why)."""
    cfg = settings.train
    known = envs.ENVS.get(cfg.env)
    starts = known.starts if known else {"random": None}
    returns, share, place = t.returns.double().numpy(), 95, " of clipped returns" if t.clip_rewards else ""
    if "far" in starts and t.goals is not None:     # the episodes between the far pair of cells
        maze, pair = env.unwrapped.maze, starts["far"]
        near = torch.ones(len(t.lengths), dtype=torch.bool)
        for x, cell in ((t.states, pair["reset_cell"]), (t.goals, pair["goal_cell"])):
            centre = torch.as_tensor(maze.cell_rowcol_to_xy(np.array(cell)), dtype=torch.float32)
            near &= (x[t.starts[:-1], :2] - centre).abs().amax(1) < 0.5 * maze.maze_size_scaling
        if near.sum() >= 10:
            returns, share, place = returns[near.numpy()], 80, " of the far pair"
    if cfg.targets:
        targets = list(cfg.targets)
        headline, why = targets[0], settings.origin["targets"]
    else:
        ends = np.percentile(returns, [5, 95])
        digits = max(1, 2 - math.floor(math.log10(np.ptp(ends) or 1)))
        targets = np.linspace(*ends, 5).round(digits).tolist()
        headline = float(np.percentile(returns, share).round(digits))
        why = f"{share}th percentile{place}; targets from its 5th to its 95th"
        settings = settings.replace("data", targets=tuple(targets))
    plan = [(s, x, cfg.eval_episodes) for s in starts for x in dict.fromkeys(targets)]
    if headline not in targets:
        plan.insert(0, (list(starts)[0], headline, 5 * cfg.eval_episodes))
    text = f"targets {', '.join(f'{x:g}' for x in targets)}, headline {headline:g} ({why})"
    return settings, plan, headline, text


# ------------------------------------------------------------------- training

@contextlib.contextmanager
def signals():
    """A list that is no longer empty once Ctrl-C or kill has come. A second Ctrl-C ends at once."""
    asked, old = [], {}

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
    with contextlib.suppress(ValueError):       # not the main thread: whoever runs us handles signals
        old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


MAY_CHANGE = {"device", "data", "amp", "graph", "compile"}        # what may change when a run goes on


def read_checkpoint(folder, given, kind=config.Settings):
    """(settings, state) of a run to go on with. Raises UserError if it cannot be."""
    file = folder / "last.pt"
    if not file.is_file():
        raise UserError(f"nothing to resume: {file} does not exist")
    if others := given.keys() - MAY_CHANGE:
        raise UserError(f"--resume takes its settings from the run; leave out --{' --'.join(sorted(others))}")
    with explained(f"{file} cannot be read"):       # torch raises what the damage happens to cause
        state = torch.load(file, map_location="cpu", weights_only=True)
        parts, _ = state["settings"], state["optimizer"]
        alien = ("env_steps" in parts["train"]) != hasattr(kind.TRAIN, "env_steps")
        settings = None if alien else kind.of(parts["train"] | parts["model"], parts["origin"])
    if alien:
        raise UserError(f"{folder} is a run of the other of train.py and online.py: resume it with that one")
    hints = typing.get_type_hints(config.TrainConfig)
    given = {key: config.typed(key, x, hints[key]) for key, x in given.items()}
    return settings.replace("command line", **given), state


@contextlib.contextmanager
def started(trajectories=None, resume=None, kind=Run, **given):
    """A Run or another kind of it, begun or resumed, whose folder no other process writes to; see train()."""
    with contextlib.ExitStack() as stack:
        if resume:
            folder = Path(resume).expanduser()
            folder = folder.parent if folder.suffix == ".pt" else folder
            if folder.is_dir():
                stack.enter_context(hold(folder))
            settings, state = read_checkpoint(folder, given, kind.SETTINGS)
        else:
            given = given if trajectories is None else {"env": "arrays"} | given
            settings = config.resolve(given, kind.SETTINGS)
        run, text = begin(settings, trajectories, kind)
        run.folder = folder if resume else new_folder(run.cfg)      # not before all of the above has worked
        if resume:
            run.load(state)
            text += f"\nresuming after update {run.done:,}"
        else:
            stack.callback(remove_if_unsaved, run.folder)
            stack.enter_context(hold(run.folder))
        print(f"{text}\nrun folder {run.folder}", flush=True)
        yield run


def train(trajectories=None, resume=None, watch=None, **given):
    """Train, evaluate, and write a run folder. given: fields of TrainConfig and of the model's Config.

    trajectories: data of your own in place of a data set. resume: the folder of a run to go on with. watch:
    a function of the Run, called after each update.
    Returns what result.json holds, with {"run" (the folder), "meta"}. "rows" and "best_rows": see
    eval.evaluate; "asked": the headline target; "seconds": of training and evaluation, of all parts of a run.
    Raises UserError for what the user can put right. Ctrl-C leaves a checkpoint and raises SystemExit(130).
    """
    with started(trajectories, resume, **given) as run:
        advance(run, watch)
        if run.done < run.cfg.steps:
            run.save()
            print(f"stopped after update {run.done:,}; python train.py --resume {run.folder} goes on")
            sys.exit(130)
        return finish(run)


def remove_if_unsaved(folder):
    if not (folder / "last.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)


def machine(device):
    """What computes, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text(encoding="utf-8")) if file.exists() else []
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def advance(run, watch=None):
    """Train to the end, or until a signal; see train()."""
    cfg, first, before, quiet = run.cfg, run.done, run.seconds, not sys.stderr.isatty()
    started = time.perf_counter()
    bar = tqdm(total=cfg.steps, initial=first, unit="update", disable=quiet, dynamic_ncols=True)
    with bar, signals() as asked:
        while run.done < cfg.steps and not asked:
            try:
                run.update()
            except torch.OutOfMemoryError as error:
                raise UserError(f"{run.device} is out of memory; try a smaller --batch_size") from error
            plan, checkpoint = run.due()
            if plan:
                run.record(run.play(plan))
            run.seconds = before + time.perf_counter() - started
            if checkpoint:
                run.save()
            if watch:
                watch(run)
            bar.update()
            loss = f"loss {run.loss:.4f}"
            bar.set_postfix_str(loss, refresh=False)
            speed = (run.done - first) / (time.perf_counter() - started)        # updates a second
            if quiet and run.done == first + 20:
                minutes = (cfg.steps - run.done) / speed / 60
                print(f"about {minutes:.1f} minutes to train, without evaluation", flush=True)
            if quiet and run.done % (10 * max(1, cfg.steps // 100)) == 0:
                print(f"update {run.done:6,}  {loss}  {speed:.1f} updates/s", flush=True)


def finish(run, **more):
    """Evaluate a trained run; write tables, pictures and result.json, with more. Returns as train() does."""
    began, folder, headline = time.perf_counter(), run.folder, run.meta["headline"]
    text = (f"{title(run.meta)}, seed {run.cfg.seed}\n"
            f"trained in {run.seconds:.0f} s on {machine(run.device)}")
    rows, best_rows, files = [], [], "last.pt, log.csv, curve.png, result.json"
    if plan := run.meta["plan"]:
        rows = run.play(plan)
        run.record(rows)
        text += f"\nlast checkpoint (update {run.done:,})\n{table(rows, headline)}"
        model, meta = load_run(folder, "best", run.device)
        step = meta["step"]
        if step < run.done:
            best_rows = run.play([p for p in plan if p[1] == headline][:1], model)
            run.record(best_rows, "best", step=step)
            text += f"\nbest checkpoint (update {step:,}, chosen on the way)\n{table(best_rows, headline)}"
        else:
            text += "\nthe best checkpoint is the last"
        plot_targets(rows, folder / "targets.png", title(run.meta))
        (folder / "table.txt").write_text(f"{text}\n", encoding="utf-8")
        files += ", best.pt, targets.png, table.txt"
    run.write_log()
    plot_curve(run.rows, folder / "curve.png")
    meta = run.meta | dict(step=run.done)
    facts = {key: meta[key] for key in ("model", "env", "dataset", "source", "seed", "versions", "code")}
    result = facts | dict(
        steps=run.done, asked=headline, seconds=round(run.seconds + time.perf_counter() - began, 1),
        machine=machine(run.device), date=time.strftime("%Y-%m-%d"), rows=rows, best_rows=best_rows) | more
    write_result(folder, result)
    print(f"\n{text}\n{result['seconds']:.0f} s in all; {folder} holds {files}", flush=True)
    return result | dict(run=folder, meta=meta)


def write_result(folder, result):
    write_atomically(folder / "result.json",
                     lambda path: path.write_text(json.dumps(result), encoding="utf-8"))


def begin(settings, trajectories=None, kind=Run):
    """(a Run without a folder, a text about its data and targets). Collects or downloads the data."""
    cfg, t = settings.train, trajectories
    env = envs.ENVS.get(cfg.env)
    config.pick_device(cfg.device)
    if cfg.sticky and env and env.family != "atari":
        raise UserError("--sticky is for Atari games")
    if t is None:
        if cfg.env == "arrays":
            raise UserError("arrays of your own: train(trajectories) or train(trajectories, resume=folder)")
        if env:
            config.check_model(config.fitted(settings, env))        # before the data load
        t = data.load(cfg.env, cfg.source, cfg.data, settings.model.goal != "none", cfg.transitions)
    if cfg.pct_traj < 1:
        t = t.top(cfg.pct_traj)
    settings = config.fitted(settings, t, t.source)
    config.check_model(settings)
    meta, notes, run_envs = acting_facts(settings, t), ["no evaluation"], []
    if cfg.eval_episodes and t.env_spec is not None:
        run_envs = [envs.make(meta["env_spec"])]
        check_environment(run_envs[0], meta)
        settings, meta["plan"], meta["headline"], why = choose_targets(settings, t, run_envs[0])
        notes = [why, envs.describe(run_envs[0])]
    if t.source == "d4rl" and env and env.note:
        notes.append(f"note: {env.note}")
    rows = settings.model.max_ep_len
    if rows < t.lengths.max():
        notes.append(f"note: episodes have up to {t.lengths.max()} steps, the timestep table {rows} rows: "
                     "later steps share the last one")
    if rows > 30_000:
        notes.append(f"note: the timestep table has {rows:,} rows; --max_ep_len N lets later steps share one")
    run = getattr(config.model_module(cfg.model), "Run", kind)(settings, t, meta)       # qt.py's, if it is QT
    run.envs = run_envs
    windows = f"{run.cfg.batch_size} windows of {run.settings.model.context_len} steps"
    numbers = sum(p.numel() for p in run.model.parameters())
    notes.append(f"{run.cfg.steps:,} updates of {windows}, {numbers:,} parameters, on {machine(run.device)}\n"
                 f"{run.settings.describe()}")
    return run, "\n".join(filter(None, [title(run.meta), t.summary(), *notes]))


# ------------------------------------------------------------------- without training

def random_numbers(env):
    """Trajectories of an environment's shapes that hold nothing to learn: 20 episodes."""
    g = np.random.default_rng(0)
    T = min(1000, env.max_ep_len)
    N = 20 * T
    states = g.standard_normal((N, env.state_dim), np.float32)
    if env.stack:
        states = g.integers(0, 256, (N, *env.state_shape[1:]), np.uint8)
    actions = g.integers(0, env.act_dim, N) if env.discrete else g.uniform(-1, 1, (N, env.act_dim))
    return data.Trajectories(
        states, actions, g.standard_normal(N), [T] * 20, dataset="random numbers", max_ep_len=T,
        stack=env.stack, goals=g.standard_normal((N, env.goal_dim)) if env.goal_dim else None,
        n_actions=env.act_dim if env.discrete else None)


def on_random_numbers(given):
    """A Run, without a folder, of these settings on random_numbers()."""
    settings = config.resolve(given | dict(eval_episodes=0))
    return begin(settings, random_numbers(envs.get_env(settings.train.env)))[0]


def counters(run):
    """{"params": all, "mixer_params": those that mix tokens, "macs": multiply-accumulates of one window}."""
    from torch.utils.flop_counter import FlopCounterMode
    batch = run.windows.gather(torch.zeros(1, dtype=torch.int64, device=run.device))
    plain = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)      # the counter knows no fused attention
    with torch.no_grad(), plain, FlopCounterMode(display=False) as flops:
        run.model(**batch)
    params = {name: p.numel() for name, p in run.model.named_parameters()}
    mixers = sum(n for name, n in params.items() if ".mixer." in name)
    return dict(params=sum(params.values()), mixer_params=mixers, macs=flops.get_total_flops() // 2)


def bench(updates, given):
    """Time whole updates, sampling included, on random data of the environment's shapes; ends with JSON."""
    run = on_random_numbers(given)
    sizes, cuda, times = counters(run), run.device.type == "cuda", []
    for _ in range(20 + updates):
        start = time.perf_counter()
        run.update()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    ms, peak = float(np.median(times[-updates:])), None
    with contextlib.suppress(ImportError):      # Windows has no such module
        import resource
        unit = 2**20 if sys.platform == "darwin" else 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    if cuda:
        peak = torch.cuda.max_memory_reserved() / 2**20
    print(run.settings.describe())
    print(json.dumps(dict(
        model=run.cfg.model, env=run.cfg.env, ms_per_step=round(ms, 3), steps_per_s=round(1e3 / ms, 1),
        **sizes, peak_mib=peak and round(peak), batch_size=run.cfg.batch_size,
        context_len=run.settings.model.context_len, torch=torch.__version__, device=machine(run.device))))


def show(given):
    """Print every setting and where it came from, and the model's size where the environment is known."""
    settings = config.resolve(given)
    if env := envs.ENVS.get(settings.train.env):
        settings = config.fitted(settings, env, settings.train.source)
    for key, x in settings.values().items():
        print(f"{key:16s} {str(x):28s} {settings.origin[key]}")
    if env:
        print(", ".join(f"{x:,} {key}" for key, x in counters(on_random_numbers(given)).items()))


def main():
    usage = "python train.py [--name value ...]"
    parser = Parser(description=__doc__, usage=usage, argument_default=argparse.SUPPRESS)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--show", action="store_true", help="print every setting and where it came from")
    way.add_argument("--bench", type=int, metavar="N", help="time N updates; no evaluation")
    way.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    way.add_argument("--seeds", type=int, nargs="+", help="train a run for each seed, print one table")
    options, given = config.parse(sys.argv[1:], parser)
    if "show" in options:
        show(given)
    elif "bench" in options:
        if options["bench"] < 1:
            raise UserError("--bench needs a number of updates")
        bench(options["bench"], given)
    elif "seeds" in options:
        from sweep import sweep
        seeds = options["seeds"]
        if len(set(seeds)) < len(seeds) or given.keys() & {"seed", "run"}:
            raise UserError("--seeds names each seed once, and goes without --seed and --run")
        print("\n" + sweep([given | {"seed": seed} for seed in seeds], given.get("out", "runs"))[1])
    else:
        train(resume=options.get("resume"), **given)


if __name__ == "__main__":
    run_command(main)
