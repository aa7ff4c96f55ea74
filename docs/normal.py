"""What is normal: draws docs/normal.png, writes its table into docs/results.md, from notebooks/results/runs.

    python docs/normal.py

A mark is the mean of a model's runs with preset settings, and a line its 95 % interval over seeds.
"""
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

import pictures  # noqa: E402 (found once the repository's folders are on the path)
import records  # noqa: E402

from eval import margin  # noqa: E402

MODELS = ["DT", "DC", "LSDT", "RADT", "StARformer", "DM"]


def shares(run):
    """(return, error) of a run in % of what was asked for: at its headline, and over its last start.

    The return is in the target's unit: in Atari, rewards cut to [-1, 1]. For AntMaze (success in %, error):
    there few return as much as is asked for, though most arrive.
    """
    reached = 100 * records.headline(run)["achieved_mean"] / run["asked"]
    if run["env"].startswith("antmaze"):
        reached = np.mean([row["success"] for row in records.last_start(run)])
    return reached, 100 * records.abs_error(run) / run["asked"]


def draw(groups):
    """A row for each set: what was reached on the left, the error on the right."""
    sets = sorted({env for env, _ in groups})
    fig = Figure(figsize=(9.6, 1.45 * len(sets)))
    panes = fig.subplots(len(sets), 2, squeeze=False, sharex="col", sharey=True)
    for env, (left, right) in zip(sets, panes, strict=True):
        what = "success" if env.startswith("antmaze") else "return"
        left.set_title(f"{env}: {what}", fontsize=9, loc="left")
        right.set_title("error", fontsize=9, loc="left")
        left.axvline(100, color="0.6", linewidth=0.8)
        for i, name in enumerate(MODELS):
            runs = groups.get((env, name.lower()), [])
            color, marker, _ = pictures.LOOKS[name]
            for ax, values in zip((left, right), np.transpose([shares(r) for r in runs]), strict=False):
                half = margin(values) if len(values) > 1 else 0.0
                ax.errorbar(values.mean(), i, xerr=half, fmt=marker, color=color, markersize=5, linewidth=1.2)
        for ax in (left, right):
            ax.set_yticks(range(len(MODELS)), MODELS, fontsize=8)
            ax.grid(axis="y", color="0.92")
    panes[0, 0].invert_yaxis()
    panes[-1, 0].set(xlim=(0, 130), xlabel="% of the return asked for, or of episodes")
    panes[-1, 1].set(xlim=(0, 70), xlabel="|target - achieved|, % of the return asked for at the headline")
    for ax in panes[-1]:
        ax.xaxis.label.set_size(9)
    fig.tight_layout()
    return fig


def write(path, table):
    """Put a table in the place of the one in a text that has the same head."""
    lines, rows = path.read_text(encoding="utf-8").splitlines(), table.splitlines()
    start = lines.index(rows[0])
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    lines[start + 2:end] = rows[2:]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    names = {name.lower() for name in MODELS}
    found = {name: run for name, run in records.committed(ROOT).items() if run["model"] in names}
    write(ROOT / "docs" / "results.md", records.expected(found))
    draw(records.normal(found)).savefig(ROOT / "docs" / "normal.png", dpi=90)
