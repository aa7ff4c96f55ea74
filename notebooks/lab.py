"""What the notebooks share: runs that are kept and found again, tables, pictures, maps from hooks.

A notebook begins with lab.begin(name, scale). A section is then one call of compare(): it trains what is not yet there, prints a table
and adds a row for each target to results/<name>.csv. Scales:

    smoke   seconds, for tests: 3 updates on random play, episodes of 10 steps. Nothing comes out but that everything runs
    local   minutes on 2 CPU cores: the small presets on data regenerated here. trained=True: three seeds, the preset's updates;
            otherwise one seed and a twentieth of it, and the table says that it shows the mechanism only
    paper   the papers' data, presets, seeds: hours on a GPU, printed before they begin. A finished run is loaded, never repeated

Runs are kept in runs/notebooks/<scale>/, by model, environment, settings and seed, and shared by all notebooks.
"""
import contextlib
import csv
import functools
import hashlib
import inspect
import io
import json
import math
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from IPython.display import Image, Markdown, display
from matplotlib import colormaps
from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402 (found once the repository's folder is on the path)
import eval as player  # noqa: E402
import settings  # noqa: E402
import train  # noqa: E402
from eval import interval  # noqa: E402
from models import dc, dm, dt, lsdt, radt, starformer  # noqa: E402

SCALES = ("smoke", "local", "paper")
here = SimpleNamespace(name="", scale="local", rows=[])     # the notebook that runs
# ms of an update of the papers' size on one NVIDIA H100 (README, "Speed"), vectors and frames: what the hours announced are made of
MS = dict(dt=(1.3, 7.0), dc=(0.9, 3.8), lsdt=(1.9, 13.1), radt=(2.2, 13.2), starformer=(4.1, 48.3), dm=(12.2, 12.4))
COLUMNS = ["id", "label", "model", "env", "dataset", "source", "settings", "scale", "trained", "seed", "start", "target", "headline", "episodes",
           "return_mean", "return_std", "score", "success", "abs_error", "steps", "seconds", "machine", "date"]


# --------------------------------------------------------------------------- scales

def begin(name, scale):
    """Start a notebook; the environment variable SCALE wins over its scale."""
    here.name, here.scale, here.rows = name, os.environ.get("SCALE") or scale, []
    if here.scale not in SCALES:
        raise ValueError(f"SCALE={here.scale!r}: choose from {', '.join(SCALES)}")
    torch.set_float32_matmul_precision("high")
    data.load = load
    if here.scale == "smoke":
        data.make_env = player.make_env = short_env
    what = dict(smoke="3 updates on random play, so no number below means anything", paper="the papers' data, sizes and seeds",
                local="small sizes on data regenerated here: scores compare with each other, never with a paper's table")[here.scale]
    show(f"**Scale `{here.scale}`**: {what}. {machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}.")


def pick(smoke=None, local=None, paper=None):
    """The value for the scale at hand; smoke's is local's unless given."""
    return dict(smoke=local if smoke is None else smoke, local=local, paper=paper)[here.scale]


def machine():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        return next(line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name"))
    return platform.processor() or platform.machine()


real_load, real_make_env = data.load, data.make_env


def short_env(spec, **kwargs):
    """Episodes of 10 steps, for scale smoke."""
    import gymnasium
    return gymnasium.wrappers.TimeLimit(real_make_env(spec, **kwargs), 10)


def load(name, source="auto", folder="", goal=True, transitions=500_000):
    """data.load; where nothing can be regenerated (Adroit, kitchen), and at scale smoke, a few episodes of random play."""
    if source == "local" and (here.scale == "smoke" or data.local_id(name) is None):
        return random_play(name)
    return real_load(name, source, folder, goal, transitions)


@functools.cache
def random_play(name):
    """Trajectories of actions drawn at random: the environment's own shapes, bounds and ends, and nothing worth learning."""
    fact, (episodes, steps) = data.ENVS[name], (6, 10) if here.scale == "smoke" else (20, 200)
    spec = {"id": fact.id, "kwargs": fact.kwargs}
    layout = {"first": 27 if fact.family in ("ant", "antmaze") else None, "position": fact.family == "antmaze", "stack": fact.stack}
    env = real_make_env(spec)
    env.action_space.seed(0)
    seen, actions, rewards, lengths, ends = [], [], [], [], []
    for e in range(episodes):
        observation = env.reset(seed=e)[0]
        for _ in range(steps):
            seen.append(data.observe(observation, layout))
            actions.append(env.action_space.sample())
            observation, r, terminated, truncated, _ = env.step(actions[-1])
            rewards.append(r)
            if terminated or truncated:
                break
        lengths.append(len(seen) - sum(lengths))
        ends.append((terminated, truncated))
    env.close()
    states, goals = zip(*seen, strict=True)
    space = dict(n_actions=fact.act_dim) if fact.discrete else dict(action_low=env.action_space.low, action_high=env.action_space.high)
    goals = None if goals[0] is None else np.array(goals)
    return data.Trajectories(np.array(states), np.array(actions), rewards, lengths, *np.transpose(ends), goals, source="local",
                             dataset=f"random play of {fact.id}", env_spec=spec, layout=layout,
                             max_ep_len=fact.max_ep_len, stack=fact.stack or 4, clip_rewards=fact.clip_rewards, **space)


# --------------------------------------------------------------------------- runs

class Run:
    """A finished run: settings, seed, folder, rows (of its last evaluation), log (rows of log.csv), net and meta (its last checkpoint)."""

    def __init__(self, label, env, seed, given, folder, trained=False):
        self.label, self.env, self.seed, self.settings, self.folder = label, env, seed, given, Path(folder)
        self.__dict__ |= json.loads((self.folder / "result.json").read_text(encoding="utf-8"))     # what keep() wrote
        self.trained = bool(trained) or here.scale == "paper"

    def __getattr__(self, name):        # read when first asked for
        if name in ("net", "meta"):
            self.net, self.meta = player.load_run(self.folder, device=player.pick_device("auto"))
        elif name == "log":
            with open(self.folder / "log.csv", newline="", encoding="utf-8") as f:
                self.log = list(csv.DictReader(f))
        elif name == "windows":         # the data that it learnt from, as the model sees them
            own = {"data": "", "transitions": 500_000, "pct_traj": 1} | self.settings
            t = load(self.env, self.source, own["data"], self.meta["goal"], own["transitions"])
            t = t.top(own["pct_traj"]) if own["pct_traj"] < 1 else t
            self.windows = data.Windows(t, self.net.cfg.context_len, "cpu", self.meta["rtg_scale"], self.meta["reward_scale"],
                                        self.meta["max_ep_len"], self.meta["goal"])
        if name not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__[name]

    def batch(self, size=64, seed=0):
        """A batch of whole windows of the data that the run learnt from, in the model contract's keys."""
        whole = (self.windows.left >= self.windows.K).nonzero()[:, 0]
        index = whole[torch.randint(len(whole), (size,), generator=torch.Generator().manual_seed(seed))]
        return {k: x.to(next(self.net.parameters()).device) for k, x in self.windows.at(index).items()}

    def best_return(self):
        """The largest return of an episode of that data."""
        return float(self.windows.table[self.windows.step == 0, -1].max()) * self.meta["rtg_scale"]

    def headline(self):
        """The row that stands for the run: at its headline target, from the first start that has it."""
        return next((r for r in self.rows if r["target"] == self.asked), self.rows[0])

    def last_start(self):
        """Its rows from the last start alone: of mazes the far one, where the model's speed decides the return."""
        return [r for r in self.rows if r["start"] == self.rows[-1]["start"]]

    def play(self, targets=None, zero=(), episodes=None):
        """Rows of another evaluation, from the last start: other targets, or inputs blanked."""
        start, episodes = self.rows[-1]["start"], episodes or pick(smoke=1, local=10, paper=100)
        plan = [(start, float(x), episodes) for x in (targets or [self.asked])]
        return player.evaluate(self.net, self.meta, plan, self.seed, None, self.meta["sample"], zero)


def published(env):
    """The source of a set at scale paper. The papers' own files; but of mazes, whose D4RL coordinates no environment here has, and of kitchen,
    Minari's. Nobody publishes frames of DMC: there, an agent's of your own under the set's name, or the stand-in set."""
    fact = data.ENVS[env]
    if fact.family in ("maze2d", "antmaze") or not (fact.d4rl or fact.stack):
        return "minari"
    return {"atari": "dqn", "dmc": "local"}.get(fact.family, "d4rl")


def run(env, seed=0, label="", trained=False, quirk=None, **given):
    """Train, or find again, one run. given: settings as on the command line; quirk: a name in QUIRKS; trained: see the module's head."""
    base, frames, fixed = dict(size="paper", source=published(env)), data.ENVS[env].stack > 0, ()
    if here.scale == "local":
        base = dict(size="small", source="local", eval_every=0)
        if not trained:
            base |= dict(steps=40, batch_size=16, context_len=4, eval_episodes=2) if frames else dict(steps=200, eval_episodes=2)
    if here.scale == "smoke":
        base = dict(size="small", source="local", steps=3, batch_size=4, d=32, warmup=1, targets=(1.0,), eval_episodes=1, eval_every=0)
        base |= dict(n_head=1, context_len=2) if frames else {}
        fixed = ("d", "steps", "batch_size", "warmup", "targets", "eval_episodes", "eval_every")
    values = base | {k: v for k, v in given.items() if k not in fixed} | {"env": env, "seed": seed}
    cfg, model, _ = settings.settings(values)       # with the presets' values: a changed preset makes another run
    version = data.collect.SETS[env].version if cfg.source == "local" and data.local_id(env) else 1
    key = json.dumps([vars(cfg), model, quirk, *([version] if version > 1 else [])], sort_keys=True)
    name = f"{cfg.model}-{env}-{hashlib.sha1(key.encode()).hexdigest()[:8]}-s{seed}"
    out = ROOT / "runs" / "notebooks" / here.scale
    out.mkdir(parents=True, exist_ok=True)
    (out / (name + ".hold")).mkdir(exist_ok=True)
    while True:     # another notebook may be at the very run
        try:
            with train.hold(out / (name + ".hold")):
                folder = out / name
                if not (folder / "last.pt").is_file():      # stopped before its first checkpoint
                    shutil.rmtree(folder, ignore_errors=True)
                if not (folder / "result.json").is_file():
                    with open(out / f"{name}.txt", "a", encoding="utf-8") as text, contextlib.redirect_stdout(text), quirks(quirk):
                        keep(train.train(resume=(folder / "last.pt").is_file(), out=str(out), run=name, **values))
            return Run(label or name, env, seed, given | ({"quirk": quirk} if quirk else {}), folder, trained)
        except train.Busy:
            time.sleep(2)


def keep(result):
    """Write what train() returned beside its checkpoints: a run with a result is finished."""
    meta = result["meta"]
    facts = dict(model=meta["model"], dataset=meta["dataset"], source=meta["source"], steps=meta["step"], seconds=round(result["seconds"], 1),
                 machine=machine(), date=time.strftime("%Y-%m-%d"), asked=meta["headline"], rows=result["rows"])
    text = json.dumps(facts, default=float)
    train.write_atomically(result["run"] / "result.json", lambda path: path.write_text(text, encoding="utf-8"))


def sweep(id, variants, envs, trained=False, seeds=None, **common):
    """All runs of {label: settings} on every environment and seed, in that order; their rows go into the notebook's CSV file.

    Settings that depend on the environment are a function of its name."""
    envs = [envs] if isinstance(envs, str) else list(envs)
    seeds = range(seeds) if isinstance(seeds, int) else seeds or pick(smoke=[0], local=range(3) if trained else [0], paper=range(3))
    todo = [(label, env, seed, common | (given(env) if callable(given) else given))
            for env in envs for label, given in variants.items() for seed in seeds]
    if here.scale == "paper":
        hours = sum(hours_of(env, given) for _, env, _, given in todo)
        print(f"{id}: {len(todo)} runs, about {hours:.1f} hours to train on one H100 at default sizes, evaluation on top; finished runs are loaded")
    out = []
    for label, env, seed, given in tqdm(todo, desc=id, unit="run", leave=False, mininterval=2, disable=here.scale == "smoke"):
        out.append(run(env, seed, label, trained, **given))
        record(id, out[-1])
    return out


def hours_of(env, given):
    cfg, _, _ = settings.settings({k: v for k, v in given.items() if k != "quirk"} | {"env": env, "size": "paper"})
    return cfg.steps * MS[cfg.model][data.ENVS[env].stack > 0] / 3.6e6


def record(id, r):
    """Add a finished run's rows to the notebook's CSV file."""
    changed = " ".join(f"{k}={v}" for k, v in r.settings.items() if k != "model")
    facts = dict(id=id, scale=here.scale, settings=changed)
    for row in r.rows:
        values = {k: x for k, x in (r.__dict__ | row | facts | {"headline": row is r.headline()}).items() if k in COLUMNS}
        here.rows.append({k: round(x, 3) if isinstance(x, float) else x for k, x in values.items()})
    folder = ROOT / "notebooks" / "results" if here.scale != "smoke" else ROOT / "runs" / "notebooks" / "smoke"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{here.name}{'-paper' if here.scale == 'paper' else ''}.csv", "w", newline="", encoding="utf-8") as f:
        out = csv.DictWriter(f, COLUMNS)
        out.writeheader()
        out.writerows(here.rows)


# --------------------------------------------------------------------------- tables

def show(text):
    display(Markdown(text))


def source(*things):
    """The code of classes and functions, as it stands in the model's file."""
    show("\n".join(f"```python\n{inspect.getsource(x)}```" for x in things))


def markdown(head, rows):
    """A table as text."""
    return "\n".join("| " + " | ".join(map(str, r)) + " |" for r in [head, ["---"] * len(head), *rows])


def stamp(runs):
    """What a table's numbers are worth, in a line."""
    seeds, steps = sorted({r.seed for r in runs}), sorted({r.steps for r in runs})
    updates = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "") + " updates"
    worth = ("trained" if all(r.trained for r in runs) or here.scale == "paper" else
             "**mechanism only**: untrained, the switch works and the numbers mean nothing")
    sets = ", ".join(dict.fromkeys(f"{r.dataset} ({r.source})" for r in runs))
    seconds = sum(r.seconds for r in runs)
    return (f"*Scale {here.scale}, {worth}; {updates}, seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}; data {sets}; "
            f"{len(runs)} runs, {seconds / 60:.1f} minutes to train and evaluate. ± is the 95 % interval over seeds.*")


def table(runs, paper=None, each_target=False):
    """A row for each environment and variant (and target), ours and the paper's figures side by side. paper: {label: figure}, or one such for each
    environment by name."""
    paper, rows = paper or {}, []
    columns = dict(return_mean="return", score="score", success="success %", abs_error="mean abs. error of the target")
    groups = {}
    for r in runs:
        for row in r.rows if each_target else [r.headline()]:
            at = (row["start"], f"{row['target']:g}") if each_target else ()
            groups.setdefault((r.env, r.label, *at), []).append(row)
    there = {k: name for k, name in columns.items() if any(row[k] is not None for g in groups.values() for row in g)}
    for (env, label, *at), g in groups.items():
        figure = [paper.get(env, paper).get(label, "-")] if paper else []
        rows.append([env, label, *at, *(interval([row[k] for row in g]) for k in there), *figure])
    head = ["set", "variant", *(["start", "target"] if each_target else []), *there.values(), *(["paper, its own data"] if paper else [])]
    show(markdown(head, rows) + "\n\n" + stamp(runs))


def compare(id, variants, envs, trained=False, seeds=None, paper=None, each_target=False, **common):
    """sweep() and table() in one; returns the runs."""
    runs = sweep(id, variants, envs, trained, seeds, **common)
    table(runs, paper, each_target)
    return runs


def alignment(runs, paper=None, played=None):
    """How closely achieved returns follow their targets, from the last start: rank correlation and mean |target - achieved|, in the return's unit
    and as a share of the targets' span. played: in place of the runs' own rows, one list for each."""
    groups, rows = {}, []
    for r, last in zip(runs, played or [r.last_start() for r in runs], strict=True):
        span, a = max(x["target"] for x in last) - min(x["target"] for x in last), player.alignment(last)
        groups.setdefault((r.env, r.label), []).append((a["rank_correlation"], a["abs_error"], 100 * a["abs_error"] / span if span else None))
    for (env, label), g in groups.items():
        rank, error, share = zip(*g, strict=True)
        figure = [paper.get(env, paper).get(label, "-")] if paper else []
        vary = [x for x in rank if not math.isnan(x)]
        note = "" if len(vary) == len(rank) else f" ({len(vary)} of {len(rank)} seeds; all returns of the others are equal)"
        rows.append([env, label, interval(vary, 2) + note, interval(error), interval(share), *figure])
    head = ["set", "variant", "rank correlation", "mean abs. error", "in % of the targets' span", *(["paper, its own data"] if paper else [])]
    show(markdown(head, rows) + "\n\n" + stamp(runs))


def expected(folder=ROOT / "notebooks" / "results"):
    """Text: score, spread and minutes of every (model, set) that was trained with default settings, from all results/*.csv."""
    groups = {}
    for file in sorted(Path(folder).glob("*.csv")):
        with open(file, newline="", encoding="utf-8") as f:
            for row in csv.DictReader(f):
                if row["trained"] == "True" and row["headline"] == "True" and not row["settings"]:
                    seeds = groups.setdefault((row["env"], row["model"], row["dataset"], row["source"]), {})
                    seeds[row["seed"]] = row
    rows = []
    for (env, model, dataset, source), seeds in sorted(groups.items()):
        value = {k: interval([float(r[k]) for r in seeds.values() if r[k]]) for k in ("return_mean", "score", "success", "abs_error")}
        rows.append([env, model, f"{dataset} ({source})", len(seeds), value["return_mean"], value["score"], value["success"], value["abs_error"],
                     f"{np.mean([float(r['seconds']) for r in seeds.values()]) / 60:.1f}"])
    return markdown(["set", "model", "data", "seeds", "return", "score", "success %", "mean abs. error", "minutes a run"], rows)


def counters(env, **given):
    """{"params", "mixer_params", "macs"} of a model at the paper's size, without training it."""
    cfg, values, origin = settings.settings(dict(size="paper", env=env) | given)
    return train.counters(train.planned(cfg, values, origin), values)


def bench(env, updates=None, **given):
    """{"ms_per_step", "peak_mib", ...} of whole updates on random data of the environment's shape: train.py --bench, at the paper's size."""
    text, held = io.StringIO(), 0
    if torch.cuda.is_available():       # the peak of these updates, not of what ran before, nor of the models that are still there
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved() / 2**20
    with contextlib.redirect_stdout(text):
        train.bench(updates or pick(smoke=1, local=5, paper=200), dict(size="paper", env=env) | given)
    result = json.loads(text.getvalue().splitlines()[-1])
    return result | {"peak_mib": round(result["peak_mib"] - held)}


# --------------------------------------------------------------------------- pictures

def picture(fig, save=None):
    """Show a figure as a PNG; save: also keep it as docs/<save>.png (scale local), for the README."""
    fig.tight_layout()
    whole, out = io.BytesIO(), io.BytesIO()
    fig.savefig(whole, dpi=90)
    PIL.Image.open(whole).convert("RGB").quantize(64).save(out, "PNG", optimize=True)       # a third of the bytes
    if save and here.scale == "local":
        (ROOT / "docs" / f"{save}.png").write_bytes(out.getvalue())
    display(Image(out.getvalue()))


def axes(columns, rows=1, width=3.4, height=2.9, **kwargs):
    """(figure, flat list of axes)."""
    fig = Figure(figsize=(width * columns, height * rows))
    return fig, list(fig.subplots(rows, columns, squeeze=False, **kwargs).flat)


def plain(x):
    """A tensor or anything like an array, as an array in the computer's memory."""
    return x.detach().cpu().numpy() if torch.is_tensor(x) else np.asarray(x)


def heat_maps(maps, save=None, xlabel="token looked at", ylabel="token that looks", columns=4):
    """Gray pictures of {title: (rows, columns) array}: darker is more."""
    fig, at = axes(min(columns, len(maps)), -(-len(maps) // columns))
    for ax, (title, m) in zip(at, maps.items(), strict=False):
        m = plain(m)
        shown = ax.imshow(m, cmap="Greys", aspect="auto", interpolation="nearest", vmin=min(0, m.min()))
        ax.set_title(title, fontsize=9)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.locator_params(integer=True, min_n_ticks=1)
        fig.colorbar(shown, ax=ax)
    for ax in at[len(maps):]:
        ax.set_visible(False)
    picture(fig, save)


STYLES = ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2))]


def lines(curves, xlabel, ylabel, title="", save=None, diagonal=False, logy=False):
    """{label: (x, y)} or {label: (x, y, spread)}: lines that are told apart without colour."""
    fig, (ax,) = axes(1, width=5.6, height=3.4)
    for i, (label, curve) in enumerate(curves.items()):
        x, y, *spread = map(plain, curve)
        line, = ax.plot(x, y, linestyle=STYLES[i % len(STYLES)], marker="osD^v<>x"[i % 8], markersize=4, label=label)
        if spread:
            ax.fill_between(x, y - spread[0], y + spread[0], alpha=0.15, color=line.get_color())
    if diagonal:
        ends = [min(min(c[0]) for c in curves.values()), max(max(c[0]) for c in curves.values())]
        ax.plot(ends, ends, color="0.6", linewidth=1, label="target = achieved")
    if logy:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=9)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    picture(fig, save)


def log_curve(runs, column="loss"):
    """{label: (updates, mean over seeds, standard deviation over seeds)} of a column of log.csv; of an evaluation, the mean over its targets."""
    out = {}
    for r in runs:
        at = {}
        for row in r.log:
            if row.get(column) and row["checkpoint"] != "best":
                at.setdefault(int(row["step"]), []).append(float(row[column]))
        for step, values in at.items():
            out.setdefault(r.label, {}).setdefault(step, []).append(float(np.mean(values)))
    return {label: (list(at), [np.mean(y) for y in at.values()], [np.std(y) for y in at.values()]) for label, at in out.items()}


def target_curve(runs, rows=None, key="achieved_mean"):
    """{label: (targets, mean over seeds of a row's key, standard deviation over seeds)} from the last start. rows: in place of the runs' own,
    one list for each."""
    out = {}
    for r, own in zip(runs, rows or [r.last_start() for r in runs], strict=True):
        for row in own:
            out.setdefault(r.label, {}).setdefault(row["target"], []).append(row[key])
    return {label: tuple(map(list, zip(*((x, np.mean(y), np.std(y)) for x, y in sorted(points.items())), strict=True)))
            for label, points in out.items()}


def episodes(r):
    """A run's episodes, achieved against target: eval.py's picture."""
    out = io.BytesIO()
    player.plot_targets(r.rows, out, player.title(r.meta))
    display(Image(out.getvalue()))


def paths(runs, n=20, save=None):
    """Where a run's agent goes in its maze, from its first kind of start, shaded by the cell where a path ends; dashed if it missed its goal (*)."""
    import gymnasium

    class Tape(gymnasium.Wrapper):
        def reset(self, **kwargs):
            observation, info = self.env.reset(**kwargs)
            self.track, self.goal = [observation["achieved_goal"]], observation["desired_goal"]
            return observation, info

        def step(self, action):
            result = self.env.step(action)
            self.track.append(result[0]["achieved_goal"])
            return result

    fig, at = axes(len(runs))
    for ax, r in zip(at, runs, strict=True):
        tapes = [Tape(player.make_env(r.meta["env_spec"])) for _ in range(pick(smoke=2, local=n, paper=n))]
        start = r.rows[0]["start"]
        targets, options = np.full(len(tapes), r.asked), [r.meta["starts"][start]] * len(tapes)
        out = player.rollout(r.net.eval(), r.meta, tapes, targets, range(len(tapes)), options)
        for tape, good in zip(tapes, out["success"], strict=True):
            track, maze = np.array(tape.track), tape.unwrapped.maze
            row, column = maze.cell_xy_to_rowcol(track[-1])
            shade = colormaps["viridis"]((row + column * 0.37) / (maze.map_length + maze.map_width * 0.37))
            ax.plot(*track.T, linestyle="-" if good else "--", color=shade, linewidth=1)
            ax.plot(*tape.goal, "*", color=shade, markersize=8)
            tape.close()
        for i, j in np.argwhere(np.array([[c == 1 for c in row] for row in maze.maze_map])):
            x, y = maze.cell_rowcol_to_xy(np.array([i, j]))
            half = maze.maze_size_scaling / 2
            ax.fill([x - half, x + half, x + half, x - half], [y - half, y - half, y + half, y + half], color="0.85")
        ax.set_title(f"{r.label}: {100 * np.nanmean(out['success']):.0f} % reach the goal (*)", fontsize=8)
        ax.set(aspect="equal", xlabel="x", ylabel="y")
    picture(fig, save)


def tokens(model):
    """The names of a window's tokens, step by step: R s a, or what is there of them."""
    cfg = model.cfg
    return (["R" if cfg.condition == "rtg" else "r"] if cfg.condition != "none" else []) + ["s"] + (["a"] if cfg.use_actions else [])


# --------------------------------------------------------------------------- maps: hooks only, the models' fast paths stay as they are

@contextlib.contextmanager
def watch(model, kinds, look):
    """While a forward runs: look(name, module, input) for every module of these classes."""
    hooks = [m.register_forward_pre_hook(lambda module, args, name=name: look(name, module, args[0]))
             for name, m in model.named_modules() if isinstance(m, kinds)]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()


@torch.no_grad()
def forward(model, batch):
    model.eval()
    return model(**batch)


def attention_maps(model, batch):
    """{"layer i": (B, H, L, L)}: who looks at whom, each row summing to 1; layers without attention are left out.

    DT's learned matrix (mixer="direct") comes as it is, (1, 1, L, L), rows not summing to 1. LSDT's are its long branch. A mixer layer of DM is
    over the tokens that it selected, put back in their places, zero elsewhere.
    """
    out = {}
    keep = model.eval().selected(batch) if isinstance(model, dm.Model) else None

    def look(name, module, x):
        q, k, _ = F.linear(x, module.qkv.weight, module.qkv.bias).unflatten(-1, (3, module.n_head, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        out[name] = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf).softmax(-1)
    with watch(model, (dt.Attention, dc.Attention, lsdt.LongBranch, dm.QueryAttention, starformer.Attention), look):
        forward(model, batch)
    for name, m in model.named_modules():
        if isinstance(m, dt.DirectMixer):
            out[name] = m.A.detach().tril()[None, None]
    layer = {name: int(name.split(".")[1]) for name in out}
    if keep is not None:
        mixers = [i for i, b in enumerate(model.blocks) if isinstance(b, dm.MixerLayer)]
        for name in out:
            if layer[name] in mixers:
                out[name] = put_back(out[name], keep[mixers.index(layer[name])])
    return {f"layer {layer[name] + 1}": m for name, m in out.items()}


def put_back(short, keep):
    """Maps (B, H, C, C) over each row's selected tokens, keep (B, L), in their places among all: (B, H, L, L)."""
    B, H = short.shape[:2]
    out = short.new_zeros(B, H, keep.shape[1], keep.shape[1])
    for b in range(B):
        at = keep[b].nonzero().flatten()
        out[b][:, at[:, None], at] = short[b, :, : len(at), : len(at)]
    return out


def kernel_maps(model, batch):
    """{"layer i": (B, L, L)}: what LSDT's dynamic convolution weighs each earlier token with, the mean over its kernels."""
    out = {}

    def look(name, module, x):
        k = module.kernels(F.glu(module.expand(x), -1), None).mean(-1)                      # (B, L, width)
        m = k.new_zeros(len(x), x.shape[1], x.shape[1])
        for j in range(min(k.shape[2], x.shape[1])):
            m += torch.diag_embed(k[:, j:, j], -j)
        out[f"layer {int(name.split('.')[1]) + 1}"] = m
    with watch(model, lsdt.DynamicConv, look):
        forward(model, batch)
    return out


def filters(model):
    """{"layer i": (types, window, d)}: DC's filters, w[type, l, channel] for the token l places back."""
    found = {name: m.weight.detach() for name, m in model.named_modules() if isinstance(m, (dc.TokenFilters, lsdt.TokenFilters))}
    return {f"layer {int(name.split('.')[1]) + 1}": w for name, w in found.items()}


def gates(model, batch):
    """{"layer i": (B, L, d)}: LSDT's HFM weights, the long branch's channels first; the last layer's at state tokens alone."""
    out = {}
    with watch(model, lsdt.Fusion, lambda name, m, y: out.update({f"layer {int(name.split('.')[1]) + 1}": m.gates(y)})):
        forward(model, batch)
    return out


# --------------------------------------------------------------------------- what released code did, for X-3

def unclamped(cfg, step):
    """The released Atari schedule: the cosine ends after 0.6 of the run and climbs again (DC's ten epochs)."""
    p = max(0.0, (step - cfg.warmup) / max(1, 0.6 * cfg.steps - cfg.warmup))
    return cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup)) * max(0.1, 0.5 * (1 + math.cos(math.pi * p)))


def clamped(cfg, step):
    """The same schedule, held at its floor once it got there: what unclamped() is compared with."""
    return unclamped(cfg, min(step, int(0.6 * cfg.steps)))


def left(windows, index):
    """Windows.at for vectors, short windows padded on the left by unnormalised zeros and actions of -10: as released for gym (DT, DC, RADT)."""
    batch, K = real_at(windows, index), windows.K
    source = torch.arange(K, device=index.device) - (K - batch["mask"].sum(1, keepdim=True))        # (B, K): where each place's step comes from
    pad, shift = source < 0, source.clamp(min=0)
    out = {}
    for k, x in batch.items():
        wide = (..., *[None] * (x.ndim - 2))
        out[k] = x.gather(1, shift[wide].expand_as(x)).masked_fill(pad[wide], -10.0 if k == "actions" else 0)
    if not hasattr(windows, "blank"):       # made once: a CUDA graph can't send it to the GPU anew
        windows.blank = (-windows.mean / windows.std).to(index.device)
    return out | {"states": torch.where(pad[..., None], windows.blank, out["states"])}


def act_left(model, states, actions, rewards, rtg, timesteps, **kwargs):
    """Model.act with histories padded on the left by zeros up to K, as the released evaluation of DC does."""
    missing = max(0, model.cfg.context_len - states.shape[1])
    states, actions, rewards, rtg = (F.pad(x, (0, 0, missing, 0)) for x in (states, actions, rewards, rtg))
    return real_dc_act(model, states, actions, rewards, rtg, F.pad(timesteps, (missing, 0)), **kwargs)


class InvertedMask:
    """RADT's released mask: in windows with padding, real tokens see the padding before them and nothing else. Acting pads nothing."""

    def __init__(self):
        self.mask = None

    def loss(self, model, batch):
        self.mask = batch["mask"]
        try:
            return real_radt_loss(model, batch)
        finally:
            self.mask = None

    def attention(self, module, query, key, value, mask=None):
        if self.mask is not None:
            real = self.mask.repeat_interleave(key.shape[1] // self.mask.shape[1], 1)                           # (B, keys)
            hidden = real & ~real.all(1, keepdim=True)
            # -1e4 as released, on the real keys of a padded window; where all keys are real it would shift every one alike and change nothing
            mask = (radt.unseen(query.shape[1], query) if mask is None else mask) + torch.where(hidden, -1e4, 0.0)[:, None, None]
        return real_attention(module, query, key, value, mask)                                                  # mask (B, 1, queries, keys)

    def patches(self):
        return [(data.Windows, "at", left), (radt.Model, "loss", lambda *args: self.loss(*args)),
                (radt.QKVAttention, "forward", lambda *args: self.attention(*args))]


def leaky_inputs(model, states, actions, rewards, rtg):
    """StARformer's released gym training: a step's group holds the reward that the action to be predicted has earned; acting, the one before."""
    states, a, c = real_inputs(model, states, actions, rewards, rtg)
    return states, a, rewards.to(c.dtype) if model.training and model.cfg.condition == "reward" else c


real_at, real_dc_act, real_inputs = data.Windows.at, dc.Model.act, starformer.Model.inputs
real_radt_loss, real_attention = radt.Model.loss, radt.QKVAttention.forward
QUIRKS = {
    "left padding": [(data.Windows, "at", left), (dc.Model, "act", torch.no_grad()(act_left))],
    "inverted mask": InvertedMask().patches(),
    "unclamped cosine": [(train, "learning_rate", unclamped)],
    "clamped cosine": [(train, "learning_rate", clamped)],
    "label leak": [(starformer.Model, "inputs", leaky_inputs)],
}


@contextlib.contextmanager
def quirks(name):
    """One quirk of released code, or none, while a run trains and plays."""
    if name is not None and name not in QUIRKS:
        raise ValueError(f"no quirk is called {name!r}: {', '.join(QUIRKS)}")
    with contextlib.ExitStack() as stack:
        for owner, attribute, new in QUIRKS.get(name, []):
            stack.enter_context(mock.patch.object(owner, attribute, new))
        yield
