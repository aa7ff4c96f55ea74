"""Verdicts, trained again: writes the table of that name in docs/results.md.

    python docs/again.py            from the runs that came along, and those of this machine
    python docs/again.py --train    trains what is missing first, which takes hours

It takes the verdicts of the notebooks on the hopper and the small maze that a small margin decided, asks
the same of the seeds 10 to 14 alone, and then of all.
"""
import ast
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import lab  # noqa: E402 (found once the repository's folders are on the path)
import records  # noqa: E402
from normal import write  # noqa: E402

SETS = "hopper-medium-replay", "maze2d-umaze"
SEEDS = range(10, 15)
HEAD = ["claim", "first seeds", "seeds 10 to 14", "all seeds"]
SHOWN = re.compile(r"^- (.+ in \w+): \*\*(.+)\*\*, a difference of (\S+) ± (\S+) over", re.M)


def shown(root):
    """{claim: (word, difference, its margin)} of the verdicts that the experiments' notebooks show."""
    found = {}
    for path in sorted((root / "notebooks" / "experiments").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for out in cell.get("outputs", []):
                text = "".join(out.get("data", {}).get("text/markdown", [])).replace("\u00a0", " ")
                for claim, word, *figures in SHOWN.findall(text):
                    found[claim] = (word, *map(float, figures))
    return found


def narrow(found):
    """The claims that are judged, with a margin of more than half of the difference, on one of SETS."""
    return [claim for claim, (word, middle, half) in found.items()
            if word != "cannot tell" and half > 0.5 * abs(middle)
            and records.CLAIM.fullmatch(claim)[2] in SETS]


def value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):       # a word
        return text


def given(model, settings):
    """The settings of a row of notebooks/results/*.csv: "lr=0.001 betas=(0.9, 0.95)"."""
    pairs = re.findall(r"(\w+)=(.*?)(?= \w+=|$)", settings)
    return dict(model=model) | {key: value(text) for key, text in pairs}


def variants(claim, groups):
    """{(section, set, label): settings} of what a claim compares."""
    section, env, one, _, other, _ = records.CLAIM.fullmatch(claim).groups()
    return {tuple(place): given(model, settings) for (*place, _, model, settings) in groups
            if place in ([section, env, one], [section, env, other])}


def rows_again(places):
    """As records.rows_of(), of the runs of SEEDS, trained where they are missing. places: see variants()."""
    todo = [(place[1], seed, place, how) for place, how in places.items() for seed in SEEDS]
    found = {}
    for run, (_, seed, place, _) in zip(lab.runs_of(todo, trained=True), todo, strict=True):
        rows = [row | dict(headline=row is run.headline()) for row in run.rows]
        found[*place, str(seed), run.model, "again"] = rows
    return found


def trained(places):
    return all(lab.found(lab.values_of(place[1], seed, True, how)) for place, how in places.items()
               for seed in SEEDS)


def table(root, train=False):
    """Text: a row for each narrow verdict of a notebook. train: also for those whose runs are missing."""
    groups = {}
    for path in (root / "notebooks" / "results").glob("*.csv"):
        groups |= records.rows_of(path)
    claims = {claim: variants(claim, groups) for claim in narrow(shown(root))}
    ready = {claim: places for claim, places in claims.items() if train or trained(places)}
    print(f"{len(ready)} of {len(claims)} narrow verdicts have runs of other seeds")
    new = rows_again({place: x for places in ready.values() for place, x in places.items()})
    rows = []
    for claim in ready:
        found = [records.verdict(claim, some) for some in (groups, new, groups | new)]
        rows.append([claim, *(f"{word}, {text.removeprefix('a difference of ')}" for word, text in found)])
    return records.markdown(HEAD, rows)


if __name__ == "__main__":
    os.environ.pop("SCALE", None)
    lab.show = print
    lab.begin("again", "local")
    write(ROOT / "docs" / "results.md", table(ROOT, "--train" in sys.argv[1:]))
