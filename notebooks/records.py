"""What is kept of runs: rows as CSV, results with logs as JSON, weights; and what they say of a claim.

    notebooks/results/<notebook>.csv    the rows of its tables, one for each section, run and target
    notebooks/results/runs/<run>.json   a run's result.json, with its log, and "kept": the settings that were
                                        given ("spec"), what Run.keep() computed, and by which code
    weights/<name>/last.pt, run.txt     a checkpoint to act with, and whose it is
"""
import ast
import csv
import functools
import hashlib
import inspect
import io
import json
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata

import settings
import sweep
import train
from eval import alignment, interval, margin
from sweep import headline

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "id label model env dataset source settings scale trained seed start target headline episodes "
    "return_mean return_std score success abs_error steps seconds machine date error").split()


# ------------------------------------------------------------------- files

def lines(text):
    """The rows of a CSV text, as dicts of text."""
    return list(csv.DictReader(io.StringIO(text)))


def rows_of(path):
    """{(section, set, variant, seed, model, settings): rows} of a CSV file; {} without one."""
    groups = {}
    for row in lines(path.read_text(encoding="utf-8")) if path.exists() else []:
        key = tuple(row[key] for key in ("id", "env", "label", "seed", "model", "settings"))
        groups.setdefault(key, []).append(row)
    return groups


def write_rows(path, groups):
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        out.writeheader()
        out.writerows(row for rows in groups.values() for row in rows)


def replaced(old, new):
    """rows_of() two files in one: new rows take the place of those of the same variant, as it was before."""
    now = {key[:3]: key[4:] for key in new}
    return {key: rows for key, rows in old.items() if now.get(key[:3], key[4:]) == key[4:]} | new


def write_json(path, x):
    """Six digits of each number are enough."""
    short = json.loads(json.dumps(x), parse_float=lambda number: float(f"{float(number):.6g}"))
    train.write_atomically(path, lambda part: part.write_text(json.dumps(short), encoding="utf-8"))


def log_csv(folder):
    """The text of a run's log, without what is the same in all lines; five digits of each number."""
    path = folder / "log.csv"
    rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8")))) if path.exists() else [[]]
    columns = [i for i, key in enumerate(rows[0]) if key not in "model env dataset source seed lr".split()]
    text = "\n".join(",".join(row[i] for i in columns) for row in rows)
    return re.sub(r"\d+\.\d{4,}(e-\d+)?", lambda number: f"{float(number[0]):.5g}", text)


# ------------------------------------------------------------------- what comes with the project

@functools.cache
def committed(root):
    """{name: result} of the runs that come with the project."""
    paths = (root / "notebooks" / "results" / "runs").glob("*.json")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


ALSO = "online.py", "notebooks/released.py"      # they decide the numbers of some runs


def code_now(result):
    """What the code of a run's result would be today; see settings.code_of()."""
    also = [file for file in ALSO if file in result.get("code", {})]
    return settings.code_of(result["model"], result["env"], also=also)


def code_of(function):
    """Digits of a function's code and of what it calls in its own file, or notebook, and in maps.py.

    None without a source: of a lambda it cannot be told from what stands beside it.
    """
    parts, left = {}, [function]
    while left:
        f = left.pop()
        f = inspect.unwrap(getattr(f, "func", f))       # what a partial or a decorator calls
        f = getattr(f, "__func__", f)       # of a method
        if not inspect.isfunction(f) or f.__name__ == "<lambda>":
            return None
        if f.__code__ in parts:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(f)))
        except (OSError, SyntaxError):
            return None
        parts[f.__code__] = repr(settings.bare(tree.body))
        own = {*f.__code__.co_varnames, *f.__code__.co_cellvars}        # tracks(run) is not about lab.run
        names = f.__globals__ | inspect.getclosurevars(f).nonlocals
        names = {key: x for key, x in names.items() if key not in own}
        for node in ast.walk(tree):
            x = names.get(getattr(node, "id", None))
            if isinstance(node, ast.Attribute):     # lab.gates, but never a property of a Run
                owner = names.get(getattr(node.value, "id", None))
                x = getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
            x = inspect.unwrap(x) if callable(x) else x
            if inspect.isfunction(x) and x.__module__ in (f.__module__, "maps"):
                left.append(x)
    return hashlib.sha1(repr(sorted(parts.values())).encode()).hexdigest()[:8]


def commit(folder, root, ending="", whole=False):
    """Make what runs/notebooks/<scale> holds the results that come with the project.

    Rows replace those of the same runs in notebooks/results/*.csv; others stay or, if whole, go. Pictures go
    to docs/, finished runs of today's code to notebooks/results/runs/. Raises ValueError for scale smoke.
    """
    if folder.name == "smoke":
        raise ValueError("what scale smoke gives is no result")
    place = root / "notebooks" / "results"
    (place / "runs").mkdir(parents=True, exist_ok=True)
    for path in (folder / "results").glob("*.csv"):
        old = place / f"{path.stem}{ending}.csv"
        write_rows(old, rows_of(path) if whole else replaced(rows_of(old), rows_of(path)))
    for path in (folder / "results").glob("*.png"):
        shutil.copy(path, root / "docs")
    for path in (folder / "sweep").glob("*.json"):
        result = sweep.finished(folder / path.stem)
        if result and result.get("code") == code_now(result):
            result["kept"] = json.loads(path.read_text(encoding="utf-8"))
            result["kept"].pop("of", None)
            result["log_csv"] = log_csv(folder / path.stem)
            write_json(place / "runs" / path.name, result)
    committed.cache_clear()


def commit_weights(run, root, name=None):
    """Write weights/<model>-<env>, or <name>: a run folder's last checkpoint, its numbers in float16.

    eval.py plays it; a Run that came with the project finds it, by the run's name, for its maps and films.
    """
    state = torch.load(run / "last.pt", map_location="cpu", weights_only=True)
    small = {key: x.half() if x.is_floating_point() else x for key, x in state["model"].items()}
    meta = state["meta"]
    state["settings"]["train"] |= dict(out="runs", data="")      # this machine's
    folder = root / "weights" / (name or f"{meta['model']}-{meta['env']}")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(model=small, settings=state["settings"], meta=meta), folder / "last.pt")
    (folder / "run.txt").write_text(run.name, encoding="utf-8")
    return folder


def weights(root, name):
    """The folder in weights/ that holds a run's, or None."""
    names = {path.read_text(encoding="utf-8"): path.parent for path in (root / "weights").glob("*/run.txt")}
    return names.get(name)


# ------------------------------------------------------------------- what numbers say

CLAIM = re.compile(r"(\S+) (\S+): (.+) ([<>]) (.+) in (return|score|success|error)")


def number(x):
    """A figure of a file's row, or of a run's, which may have none."""
    return float("nan" if x in ("", None) else x)


def verdict(claim, groups):
    """("holds", "does not hold" or "cannot tell"; the difference as text) of a claim over rows_of() a file.

    "DC-T1 hopper-medium-replay: DC > DT in return" names a section, a set, and two variants (or one and a
    number), compared at the headline target; error is that of all targets of the last start. The 95 %
    interval of the differences, seed by seed, decides; one seed tells nothing.
    """
    section, env, one, sign, other, what = CLAIM.fullmatch(claim).groups()
    key = dict(error="abs_error", **{"return": "return_mean"}).get(what, what)
    values = {}
    for (*place, label, seed, _, _), rows in groups.items():
        if place == [section, env]:
            chosen = [row for row in rows if str(row["headline"]) == "True"]
            if what == "error":
                chosen = [row for row in rows if row["start"] == rows[-1]["start"]]
            figures, counts = ([number(row[x]) for row in chosen] for x in (key, "episodes"))
            values.setdefault(label, {})[seed] = np.average(figures, weights=counts)
    first = values.get(one, {})
    second = values.get(other, {})
    if re.fullmatch(r"-?[\d.]+", other):
        second = dict.fromkeys(first, float(other))
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    n, word = len(differences), "cannot tell"
    if n > 1:
        middle = np.mean(differences) * (1 if sign == ">" else -1)
        half = margin(differences)
        if middle > half:
            word = "holds"
        elif middle <= -half:
            word = "does not hold"
    missing = [label for label, found in ((one, first), (other, second)) if not found]
    note = f"; there are no rows of {' or '.join(missing)}" if missing else ""
    return word, f"a difference of {interval(differences)} over {n} seed{'s' * (n != 1)}{note}"


def drawn(seeds, n=400):
    """Text: where 95 % of n mean rank correlations lie, of seeds and of their episodes drawn with repetition.

    seeds: the rows of an evaluation of each. A correlation has no interval by Student's t: it ends at 1.
    """
    g, S = np.random.default_rng(0), len(seeds)
    found = np.empty((S, S, n))     # by seed, by the place that it may be drawn for, by draw
    for i, rows in enumerate(seeds):
        targets = rankdata(np.repeat([row["target"] for row in rows], [row["episodes"] for row in rows]))
        achieved = [g.choice(row["achieved"], (S, n, row["episodes"])) for row in rows]
        a, b = targets - targets.mean(), rankdata(np.concatenate(achieved, -1), axis=-1) - targets.mean()
        with np.errstate(invalid="ignore"):         # NaN where all achieved the same
            found[i] = (a * b).sum(-1) / np.sqrt((a * a).sum() * (b * b).sum(-1))
    some = found[g.integers(S, size=(S, n)), np.arange(S)[:, None], np.arange(n)]
    means = [x[~np.isnan(x)].mean() for x in some.T if not np.isnan(x).all()]
    return " ({:.2f} to {:.2f})".format(*np.percentile(means, [2.5, 97.5])) if S > 1 and means else ""


PLAIN = {"model", "env", "seed", "size", "source", "eval_every", "amp"}
SMALL = dict(size="small", source="local")


def last_start(result):
    """A run's rows from its last start: of mazes the far one, where the model's speed decides the return."""
    return [row for row in result["rows"] if row["start"] == result["rows"][-1]["start"]]


def abs_error(result):
    """A run's mean |target - achieved| over the episodes of last_start()."""
    return alignment(last_start(result))["abs_error"]


def normal(results):
    """{(set, model): results} of those committed() results that have small preset settings, on local data."""
    groups = {}
    for result in results.values():
        spec = result["kept"]["spec"]
        if spec.keys() <= PLAIN and spec | SMALL == spec and result["rows"]:
            groups.setdefault((result["env"], result["model"]), []).append(result)
    return dict(sorted(groups.items()))


def expected(results):
    """Text: the table of normal() results.

    Return, score and success at the headline target; rank correlation and error over all targets from the
    last start.
    """
    rows = []
    for key, runs in normal(results).items():
        heads = list(map(headline, runs))
        figures = [interval([row[name] for row in heads]) for name in ("return_mean", "score", "success")]
        rank = interval([np.mean([alignment(last_start(r))["rank_correlation"] for r in runs])], 2)
        minutes = np.mean([r["seconds"] for r in runs]) / 60
        rows.append([*key, len(runs), f"{runs[0]['asked']:g}", *figures, rank,
                     interval(list(map(abs_error, runs))), f"{minutes:.1f}"])
    head = "set, model, seeds, asked for, return, score, success %, rank correlation, error, minutes a run"
    return markdown(head.split(", "), rows)


def markdown(head, rows):
    """A table as text."""
    rows = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
