"""What the notebooks share: runs that are kept and found again, tables, pictures.

A notebook begins with lab.begin(name, scale). A section is then a call of compare(): it finds finished runs,
trains the others, and prints a table. Scales:

    smoke   seconds, for tests: 3 updates on random play, episodes of 10 steps; it shows that everything runs
    local   minutes on 2 CPU cores: the small presets on data regenerated here. trained=True: three seeds and
            the preset's updates; otherwise one seed and 200 updates (40 on frames), which the table says
    paper   the papers' data, presets and seeds: hours on a GPU, printed before they begin

Runs are kept in runs/notebooks/<scale>/, by model, environment, settings and seed; all notebooks share them.
Tables' rows and pictures go to its results/. Results that come with the project, in notebooks/results/
and docs/, are taken first, and written by commit_results() alone. See records.py.
"""
from progress import Progress, resumable  # noqa: I001 (first: it says which package is missing)
import contextlib
import copy
import functools
import inspect
import io
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import filelock
import numpy as np
import torch
from IPython.display import Image, Markdown, display

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pictures  # noqa: E402 (found once the repository's folder is on the path)
import records  # noqa: E402
import released  # noqa: E402
from maps import (  # noqa: E402, F401
    attention_maps,
    even_shares,
    filters,
    gates,
    group_maps,
    kernel_maps,
    looked_back,
    mean_attention,
)
from pictures import axes, heat_maps, lines, mazes, picture, plain, tracks  # noqa: E402, F401
from records import COLUMNS, markdown  # noqa: E402, F401

import data  # noqa: E402
import envs  # noqa: E402
import eval as player  # noqa: E402
import online  # noqa: E402
import settings  # noqa: E402
import sweep as many  # noqa: E402
import train  # noqa: E402
from eval import interval  # noqa: E402
from models import dc, dm, dt, lsdt, radt, starformer  # noqa: E402, F401 (for notebooks)

SCALES = dict(
    smoke="3 updates on random play, so no number below means anything",
    local="small sizes on data regenerated here: scores compare with each other, never with a paper's table",
    paper="the papers' data, sizes and seeds")
# the notebook that runs; own: folders of runs for which the project's result is not taken
here = SimpleNamespace(name="", scale="local", own=set())
# ms of an update of the papers' size on one NVIDIA H100 (docs/speed.md), vectors and frames
MS = dict(dt=(1.3, 7.0), dc=(0.9, 3.8), lsdt=(1.9, 13.1), radt=(2.2, 13.2), starformer=(4.1, 48.3),
          dm=(12.2, 12.4))

FILES = *records.ALSO, "notebooks/maps.py"
# before anyone edits a file
LOADED = {model: settings.code_of(model, "", also=FILES) for model in settings.MODELS}


# ------------------------------------------------------------------- scales

def begin(name, scale):
    """Start a notebook; the environment variable SCALE wins over its scale."""
    here.name, here.scale, here.own = name, os.environ.get("SCALE") or scale, set()
    if here.scale not in SCALES:
        raise ValueError(f"SCALE={here.scale!r}: choose from {', '.join(SCALES)}")
    torch.set_float32_matmul_precision("high")
    show(f"**Scale `{here.scale}`**: {SCALES[here.scale]}. {train.machine(settings.pick_device('auto'))}, "
         f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}.")


def pick(smoke=None, local=None, paper=None):
    """The value for the scale at hand; smoke's is local's unless given."""
    return dict(smoke=local if smoke is None else smoke, local=local, paper=paper)[here.scale]


def long(**more):
    """Settings for questions of range: at scale local windows of 20 steps, longer than the presets' ones.

    There are three layers; DM is given n_layer=4, so that two of them choose.
    """
    steps = dict(context_len=pick(smoke=3, local=20), windows="end", n_layer=3, batch_size=64, steps=2500)
    return pick(local=steps, paper={}) | more


def load(name, source="auto", folder="", goal=True, transitions=500_000, scale=None):
    """data.load(); a few episodes of random play where nothing can be regenerated, and at scale smoke."""
    smoke = (scale or here.scale) == "smoke"
    if source == "local" and (smoke or data.local_id(name) is None):
        return random_play(name, smoke)
    return data.load(name, source, folder, goal, transitions)


@functools.cache
def random_play(name, smoke):
    """Trajectories of actions drawn at random: an environment's shapes, and nothing to learn.

    smoke: episodes of 10 steps, here and where the model will act.
    """
    fact = envs.ENVS[name]
    whole = {"id": fact.id, "kwargs": fact.kwargs}
    spec = envs.make(whole).spec
    spec.max_episode_steps = 10 if smoke else 200
    env = envs.make(spec)
    ant = fact.family in ("ant", "antmaze")
    layout = dict(first=27 if ant else None, position=fact.family == "antmaze", stack=fact.stack)
    env.action_space.seed(0)
    steps = []
    for seed in range(6 if smoke else 20):
        observation, ended = env.reset(seed=seed)[0], False
        while not ended:
            action = env.action_space.sample()
            seen = envs.observe(observation, layout)
            observation, reward, *ends, _ = env.step(action)
            steps.append((*seen, action, reward, *ends))
            ended = any(ends)
    env.close()
    states, goals, actions, rewards, *ends = (np.array(x) for x in zip(*steps, strict=True))
    space = dict(n_actions=fact.act_dim)
    if not fact.discrete:
        space = dict(action_low=env.action_space.low, action_high=env.action_space.high)
    return data.Trajectories(
        states, actions, rewards, *data.episode_ends(*ends), goals if fact.goal_dim else None, source="local",
        dataset=f"random play of {fact.id}", env_spec=spec.to_json() if smoke else whole, layout=layout,
        max_ep_len=fact.max_ep_len, stack=fact.stack or 4, clip_rewards=fact.clip_rewards, **space)


# ------------------------------------------------------------------- runs

class Run:
    """A finished run: its result, label, settings as given, spec (see values_of), cfg and folder.

    One that diverged has an error, and one row of NaN.
    """

    def __init__(self, label, spec, given, result, trained):
        vars(self).update(dict(code={}, kept={}, log_csv=None) | result)
        if "error" in result:
            nan = dict.fromkeys("target return_mean length abs_error achieved_mean".split(), math.nan)
            self.rows = [dict.fromkeys(COLUMNS) | nan | dict(start="random", episodes=1, achieved=[math.nan])]
        self.label, self.spec, self.settings, self.scale = label, spec, given, here.scale
        self.folder, self.cfg = folder_of(spec), resolved(spec).train
        self.trained = trained or here.scale == "paper"
        code = records.code_now(result)
        self.differs = [file for file, x in code.items() if self.code.get(file) != x]
        self.training = f"{self.date} {self.seconds}"      # tells trainings of the same settings apart
        self.read_kept()

    def read_kept(self):
        """Add what this machine has kept of this run, and of no other of the same settings."""
        with contextlib.suppress(FileNotFoundError):
            mine = json.loads(many.beside(self.folder, "json").read_text(encoding="utf-8"))
            if mine.get("of") in (None, self.training):
                code = {key: x for key, x in self.kept.get("code", {}).items() if key not in mine}
                self.kept = self.kept | mine | dict(code=code | mine.get("code", {}))

    def keep(self, name, compute):
        """compute(this run), or what it gave before, by the same code. It is committed with the run."""
        code, before = records.code_of(compute), self.kept.get("code", {})
        if name not in self.kept or before.get(name) != code:
            if name in self.kept:
                print(f"{self.label}, {name}: computed anew, since its code has changed")
            value = compute(self)
            with lock_of(self.folder):      # another notebook may keep more
                self.read_kept()
                codes = {key: x for key, x in self.kept.get("code", {}).items() if key != name}
                codes |= {name: code} if code else {}
                self.kept |= {name: value, "code": codes, "of": self.training}
                records.write_json(many.beside(self.folder, "json"), self.kept)
                self.read_kept()        # as it will be read
        return self.kept[name]

    @functools.cached_property
    def checkpoint(self):
        """(model, meta) of weights/, of the run's folder, or else trained now. On the CPU, as data are."""
        folder = records.weights(ROOT, self.folder.name) if self.log_csv else None
        if not folder:
            folder = self.folder
            if not many.finished(folder):       # it may have begun, and have a checkpoint
                minutes = self.seconds / 60
                print(f"{folder.name} comes without weights: training it, about {minutes:.0f} minutes")
                learn(self.spec)
        return player.load_run(folder, device="cpu")

    net = property(lambda self: self.checkpoint[0])
    meta = property(lambda self: self.checkpoint[1])

    @functools.cached_property
    def log(self):
        """The rows of log.csv, as text."""
        return records.lines(self.log_csv or records.log_csv(self.folder))

    def data(self, goal=True):
        return load(self.env, self.cfg.source, self.cfg.data, goal, self.cfg.transitions, self.scale)

    @functools.cached_property
    def windows(self):
        """The data that it learnt from, as the model sees them."""
        meta, t = self.meta, self.data(self.meta["goal"])
        if self.cfg.pct_traj < 1:
            t = t.top(self.cfg.pct_traj)
        return data.Windows(t, self.net.cfg.context_len, "cpu", meta["rtg_scale"], meta["reward_scale"],
                            meta["max_ep_len"], meta["goal"])

    def batch(self, size=64, seed=0):
        """A batch of whole windows of that data, or of its longest ones, in the model contract's keys."""
        left = self.windows.left
        whole = (left >= min(self.windows.K, int(left.max()))).nonzero()[:, 0]
        index = whole[torch.randint(len(whole), (size,), generator=torch.Generator().manual_seed(seed))]
        return self.windows.gather(index)

    def padded(self):
        """How many of 100 windows are padded: of each episode, those that start in its last K - 1 steps."""
        lengths, K = self.data().lengths, resolved(self.spec).model.context_len
        return 100 * float(lengths.clamp(max=K - 1).sum() / lengths.sum())

    def best_return(self):
        """The largest return of an episode of that data."""
        return self.keep("best return", lambda r: float(r.data().returns.max()))

    def headline(self):
        """The row that stands for the run: at its headline target, from the first start that has it."""
        return records.headline(vars(self))

    def last_start(self):
        """Its rows from the last start: of mazes the far one, where the model's speed decides the return."""
        return records.last_start(vars(self))

    def abs_error(self):
        """Its mean |target - achieved| over the episodes of last_start()."""
        return records.abs_error(vars(self))

    def play(self, targets=None, zero=(), episodes=None):
        """Rows of another evaluation, from the last start: other targets, or inputs blanked."""
        start = self.rows[-1]["start"]
        episodes = episodes or pick(smoke=1, local=10, paper=100)
        plan = [(start, float(x), episodes) for x in targets or [self.asked]]
        name = " ".join([f"play {episodes} {start}", *(f"{x:.4g}" for _, x, _ in plan), *zero])
        device = settings.pick_device("auto")
        with released.quirks(self.spec.get("quirk")):
            return self.keep(name, lambda r: player.evaluate(
                copy.deepcopy(r.net).to(device), r.meta, plan, r.seed, None, r.meta["sample"], zero))


def published(env):
    """The source of a set at scale paper.

    The papers' own; but Minari's of kitchen, and of mazes, whose D4RL coordinates nothing here has.
    Nobody publishes frames of DMC, where your own stand under the set's name, or sets of unseen tasks.
    """
    fact = envs.ENVS[env]
    families = dict(maze2d="minari", antmaze="minari", atari="dqn", dmc="local", tasks="local")
    return families.get(fact.family, "d4rl" if fact.d4rl else "minari")


def values_of(env, seed, trained, given):
    """{field: value} of a run at this scale, its quirk (see released.py), and online, if so."""
    frames = envs.ENVS[env].stack > 0
    base, forced = dict(model="dt", size="small", source="local", eval_every=0), {}
    if here.scale == "paper":
        base = dict(model="dt", size="paper", source=published(env))
    elif here.scale == "smoke":
        base |= dict(n_head=1, context_len=2) if frames else {}
        forced = dict(steps=3, batch_size=4, d=32, warmup=1, targets=(1.0,), eval_episodes=1, eval_every=0)
        forced |= dict(env_steps=20, updates=2, rollouts=1) if given.get("online") else {}
    elif not trained:
        base |= dict(steps=40, batch_size=16, context_len=4) if frames else dict(steps=200)
        base["eval_episodes"] = 2
    return base | given | forced | dict(env=env, seed=seed)


def bare(spec):
    """The settings among a spec's values."""
    return {key: x for key, x in spec.items() if key not in ("quirk", "online")}


def kind_of(spec):
    return online.OnlineSettings if spec.get("online") else settings.Settings


def resolved(spec):
    return settings.resolve(bare(spec), kind_of(spec))


def folder_of(spec):
    """Where a run is kept. All of its settings make its name, so a changed preset makes another run."""
    name = many.name_of(bare(spec), kind_of(spec))
    name = "-".join(filter(None, [name, spec.get("quirk"), "online" * bool(spec.get("online"))]))
    return ROOT / "runs" / "notebooks" / here.scale / name


def lock_of(folder):
    """The lock of whoever trains a run, deletes it, or keeps something of it."""
    many.beside(folder, "").parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(many.beside(folder, "lock"))


def found(spec):
    """The result of a finished run, or None: the project's or, if that is of older code, this machine's."""
    folder = folder_of(spec)
    stored = None if here.scale == "smoke" or folder in here.own else records.committed(ROOT).get(folder.name)
    results = filter(None, [stored, many.finished(folder)])
    return min(results, key=lambda x: x.get("code") != records.code_now(x), default=None)


@resumable
def learn(spec, label=""):
    """Train one run, or go on with it: its result."""
    folder, chosen = folder_of(spec), resolved(spec)
    cfg = chosen.train
    with lock_of(folder):       # another notebook may be at this run
        if not many.finished(folder):
            line = Progress(label or folder.name)
            text = open(many.beside(folder, "txt"), "a", encoding="utf-8")
            with text, contextlib.redirect_stdout(text), released.quirks(spec.get("quirk")):
                t = load(cfg.env, cfg.source, cfg.data, chosen.model.goal != "none", cfg.transitions)
                try:
                    given = many.how(bare(spec), folder)
                    if spec.get("online"):
                        line.write("it learns from data, then by playing")
                        result = online.fine_tune(t, **given)
                    else:
                        result = train.train(t, watch=line, **given)
                    line.finish(result)
                except train.Diverged as error:
                    many.failure(error, bare(spec), folder, kind_of(spec))
    return many.finished(folder)


@resumable
def runs_of(todo, trained=False, fresh=False, own=False):
    """A Run for each (environment, seed, label, settings), found or trained."""
    specs = [values_of(env, seed, trained, given) for env, seed, _, given in todo]
    edited = set()
    for model in {spec["model"] for spec in specs} & LOADED.keys():
        edited |= settings.code_of(model, "", True, FILES).items() - LOADED[model].items()
    if edited:
        print(f"edited since this kernel began: {', '.join(sorted(dict(edited)))}. Restart to use it")
    for folder in map(folder_of, specs):
        if fresh:
            with lock_of(folder):
                shutil.rmtree(folder, ignore_errors=True)
                many.beside(folder, "json").unlink(missing_ok=True)
        if fresh or own:
            here.own.add(folder)
    missing = [spec for spec in specs if not found(spec)]
    if here.scale != "smoke":       # side by side what needs nothing of this file
        alike = [spec for spec in missing if not spec.keys() & {"quirk", "online"}
                 and (here.scale == "paper" or data.local_id(spec["env"]))]
        if len(alike) > 1:
            many.sweep(alike, folder_of(alike[0]).parent)
        before = [x["kept"]["spec"] for x in records.committed(ROOT).values()]
        others = [spec for spec in missing if folder_of(spec) not in here.own]
        if n := sum(json.loads(json.dumps(spec)) in before for spec in others):
            print(f"presets or data have changed since {n} of the project's runs, which are trained anew")
    runs = [Run(label or folder_of(spec).name, spec, given, found(spec) or learn(spec, label), trained)
            for spec, (_, _, label, given) in zip(specs, todo, strict=True)]
    for r in runs:
        r.keep("spec", lambda r: r.spec)
        if "error" in vars(r):
            print(f"{r.label} on {r.env}, seed {r.seed}: {r.error}")
    if stale := [r for r in runs if r.differs]:
        files = ", ".join(dict.fromkeys(file for r in stale for file in r.differs))
        print(f"{len(stale)} of {len(runs)} runs are of another {files}; fresh=True trains them anew")
        today = {(r.env, r.label) for r in runs if not r.differs}
        for r in stale:     # in no row with the others
            r.label += ", older code" * ((r.env, r.label) in today)
    return runs


def run(env, seed=0, label="", trained=False, fresh=False, own=False, **given):
    """Train, or find again, one run. given: settings as on the command line, and a quirk.

    fresh: train it anew; own: take no result that comes with the project.
    """
    return runs_of([(env, seed, label, given)], trained, fresh, own)[0]


def sweep(id, variants, names, trained=False, seeds=None, fresh=False, **common):
    """All runs of {label: settings}, on every environment and seed, which also become rows of the CSV file.

    Settings that depend on the environment are a function of its name. seeds: which, or how many.
    """
    if not names:
        print(f"{id}: nothing is trained at scale {here.scale}")
        return []
    if seeds is None:
        seeds = pick(smoke=1, local=3 if trained else 1, paper=3)
    todo = [(env, seed, label, common | (given(env) if callable(given) else given))
            for env in ([names] if isinstance(names, str) else names) for label, given in variants.items()
            for seed in (range(seeds) if isinstance(seeds, int) else seeds)]
    if here.scale == "paper":
        hours = sum(hours_of(env, given) for env, *_, given in todo)
        print(f"{id}: {len(todo)} runs, about {hours:.1f} hours to train on one H100, evaluation on top")
    runs = runs_of(todo, trained, fresh)
    record(id, runs)
    return runs


def hours_of(env, given):
    cfg = resolved(given | dict(env=env, size="paper")).train
    return cfg.steps * MS[settings.parts_of(cfg.model)[1]][envs.ENVS[env].stack > 0] / 3.6e6


# ------------------------------------------------------------------- results

def results():
    """The folder of this scale's rows and pictures."""
    folder = ROOT / "runs" / "notebooks" / here.scale / "results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


pictures.folder = results


def record(id, runs):
    """Put runs' rows into this machine's CSV file of the notebook, in place of theirs from before."""
    path, groups = results() / f"{here.name}.csv", {}
    for r in runs:
        changed = " ".join(f"{key}={x}" for key, x in r.settings.items() if key != "model")
        facts = vars(r) | dict(id=id, settings=changed)
        rows = [row | facts | dict(headline=row is r.headline()) for row in r.rows]
        groups[id, r.env, r.label, str(r.seed), r.model, changed] = [
            {key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()} for row in rows]
    records.write_rows(path, records.replaced(records.rows_of(path), groups))


def commit_results(whole=False):
    """Make this machine's results those that come with the project; see records.commit()."""
    records.commit(results().parent, ROOT, "-paper" * (here.scale == "paper"), whole)


def verdicts(*claims):
    """Show what this machine's rows say of claims; see records.verdict()."""
    groups = records.rows_of(results() / f"{here.name}.csv")
    if claims:
        show("\n".join("- {}: **{}**, {}".format(x, *records.verdict(x, groups)) for x in claims))


# ------------------------------------------------------------------- tables

def show(text):
    text = re.sub(r"\b1 threads", "1 thread", text)
    display(Markdown(text.replace(" ± ", "\u00a0±\u00a0")))      # no line ends at ±


def source(*things):
    """The code of classes and functions, as it stands in the model's file."""
    show("\n".join(f"```python\n{inspect.getsource(x)}```" for x in things))


def stamp(runs):
    """What a table's numbers are worth, in a line."""
    seeds, steps = sorted({r.seed for r in runs}), sorted({r.steps for r in runs})
    updates = " to ".join(f"{x:,}" for x in dict.fromkeys((steps[0], steps[-1])))
    worth = "trained"
    if not all(r.trained for r in runs):
        worth = "**mechanism only**: untrained, the switch works and the numbers mean nothing"
    sets = ", ".join(dict.fromkeys(f"{r.dataset} ({r.source})" for r in runs))
    minutes = sum(r.seconds for r in runs) / 60
    files = [(f"models/{settings.parts_of(r.cfg.model)[1]}.py", r) for r in runs]
    code = ", ".join(sorted({f"{file} {r.code.get(file)}" for file, r in files}))
    when, where = (", ".join(sorted({vars(r)[key] for r in runs})) for key in ("date", "machine"))
    stale = " (not today's)" * any(r.differs for r in runs)
    return (f"*Scale {here.scale}, {worth}; {updates} updates, seed{'s' * (len(seeds) > 1)} "
            f"{' '.join(map(str, seeds))}; data {sets}; {len(runs)} runs, {minutes:.1f} minutes to train and "
            f"evaluate, {when} on {where}; code {code}{stale}. "
            "± is the 95 % interval over seeds.*")


def printed(paper, env, label):
    """The paper's figure in a list, if there are any: paper is {label: figure}, or {env: {label: figure}}."""
    return [paper.get(env, paper).get(label, "-")] if paper else []


def lost(whole, group):
    n = len(group) - len(whole)
    return f" ({n} of {len(group)} runs diverged)" * (n > 0)


def show_stamped(head, rows, paper, runs):
    show(markdown(head + ["paper, its own data"] * bool(paper), rows) + "\n\n" + stamp(runs))


def table(runs, paper=None, each_target=False):
    """A row for each environment and variant (and target), the paper's figures beside ours."""
    if not runs:
        return
    names = dict(return_mean="return", score="score", success="success %",
                 abs_error="mean abs. error of the target")
    groups = {}
    for r in runs:
        for row in r.rows if each_target else [r.headline()]:
            place = (row["start"], f"{row['target']:g}") if each_target else ()
            groups.setdefault((r.env, r.label, *place), []).append(row)
    keys = [key for key in names if any(row[key] is not None for group in groups.values() for row in group)]
    rows = []
    for first, group in groups.items():
        whole = [row for row in group if not math.isnan(row["return_mean"])]
        figures = [interval([row[key] for row in whole]) for key in keys]
        label = first[1] + lost(whole, group)
        rows.append([first[0], label, *first[2:], *figures, *printed(paper, *first[:2])])
    head = ["set", "variant"] + ["start", "target"] * each_target + [names[key] for key in keys]
    show_stamped(head, rows, paper, runs)


def compare(*what, paper=None, each_target=False, claims=(), **given):
    """sweep(), table() and verdicts() in one; returns the runs."""
    runs = sweep(*what, **given)
    if runs:
        table(runs, paper, each_target)
        verdicts(*claims)
    return runs


def alignment(runs, paper=None, played=None):
    """How closely achieved returns follow their targets, from the last start.

    Rank correlation (see records.drawn); mean |target - achieved|, also as a share of the targets' span.
    played: in place of the runs' own rows, one list for each.
    """
    if not runs:
        return
    groups, rows = {}, []
    for r, last in zip(runs, played or [r.last_start() for r in runs], strict=True):
        span = np.ptp([row["target"] for row in last])
        a = player.alignment(last)
        share = 100 * a["abs_error"] / span if span else None
        groups.setdefault((r.env, r.label), []).append((a["rank_correlation"], a["abs_error"], share, last))
    for (env, label), group in groups.items():
        whole = [x for x in group if not math.isnan(x[1])]
        rank, error, share, last = zip(*whole, strict=True) if whole else [()] * 4
        vary = [x for x in rank if not math.isnan(x)]
        note = f" ({len(vary)} of {len(rank)} seeds; all returns of the others are equal)"
        text = f"{np.mean(vary):.2f}{records.drawn(last)}" if vary else "-"
        rows.append([env, label + lost(whole, group), text + note * (len(vary) < len(rank)),
                     interval(error), interval(share), *printed(paper, env, label)])
    head = ["set", "variant", "rank correlation (95 %)", "mean abs. error", "in % of the targets' span"]
    show_stamped(head, rows, paper, runs)


def counters(env, **given):
    """{"params", "mixer_params", "macs"} of a model at the paper's size, without training it."""
    return train.counters(train.on_random_numbers(dict(size="paper", env=env) | given))


def bench(env, updates=None, **given):
    """{"ms_per_step", "peak_mib", ...} of whole updates at the paper's size: train.py --bench."""
    text, before = io.StringIO(), 0
    if torch.cuda.is_available():       # the peak of these updates, not of models that are still there
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved() / 2**20
    with contextlib.redirect_stdout(text):
        train.bench(updates or pick(smoke=1, local=5, paper=200), dict(size="paper", env=env) | given)
    result = json.loads(text.getvalue().splitlines()[-1])
    return result | {"peak_mib": result["peak_mib"] and round(result["peak_mib"] - before)}


# ------------------------------------------------------------------- curves and paths

def mean_curves(points):
    """{label: (x, mean, standard deviation)} from [(label, x, y)]."""
    groups = {}
    for label, x, y in points:
        groups.setdefault(label, {}).setdefault(x, []).append(float(y))
    return {label: (sorted(group), *([f(group[x]) for x in sorted(group)] for f in (np.mean, np.std)))
            for label, group in groups.items()}


def log_curve(runs, column="loss"):
    """{label: (updates, mean over seeds, standard deviation over seeds)} of a column of log.csv but lr.

    Where an update has several rows, of an evaluation's targets, their mean counts.
    """
    points = []
    for r in runs:
        rows = [(r.label, int(row["step"]), row[column]) for row in r.log
                if row.get(column) and row.get("checkpoint") != "best"]
        for label, (steps, means, _) in mean_curves(rows).items():
            points += [(label, *point) for point in zip(steps, means, strict=True)]
    return mean_curves(points)


def target_curve(runs, rows=None, key="achieved_mean"):
    """{label: (targets, mean over seeds of a row's key, standard deviation)} from the last start.

    rows: in place of the runs' own, one list for each.
    """
    both = zip(runs, rows or [r.last_start() for r in runs], strict=True)
    return mean_curves([(r.label, row["target"], row[key]) for r, own in both for row in own])


def episodes(run):
    """A run's episodes, achieved against target: eval.py's picture."""
    out = io.BytesIO()
    player.plot_targets(run.rows, out, f"{run.model} on {run.env}, data {run.dataset} ({run.source})")
    display(Image(out.getvalue()))


def paths(runs, n=20, save=None):
    """Where an agent goes in its maze, from its first kind of start: pictures.mazes()."""
    n, found = pick(smoke=2, local=n, paper=n), []
    for r in runs:
        with released.quirks(r.spec.get("quirk")):
            found.append((r.label, r.keep(f"paths {n}", functools.partial(tracks, n=n))))
    mazes(found, save)


def tokens(model):
    """The names of a window's tokens, step by step: R s a, or what is there of them."""
    first = dict(rtg=["R"], reward=["r"], none=[])[model.cfg.condition]
    return first + ["s"] + ["a"] * model.cfg.use_actions
