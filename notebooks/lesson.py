"""What the lessons share: small runs, trained agents, films, pictures of tokens, links to lines of code.

    lesson.begin()                                      first
    dt = lesson.fit("DT", "dt")                         train for a minute, or find that run again
    lesson.play({"DT": dt}, targets=[20, 60, 250])      ask for returns, and see what comes
    lesson.film(dt)                                     two wishes, side by side

An agent is a run of fit(), or (model, meta) of trained(). With SCALE=smoke in the environment, for tests, all
training is tiny. python notebooks/lesson.py puts right the line numbers in the lessons' links.
"""
import lab  # noqa: I001 (first: it says which package is missing, and finds the repository's files)
import functools
import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import camera
import numpy as np
import torch
from IPython.display import Image, display
from maps import watched
from pictures import LOOKS  # noqa: F401 (for notebooks)

import data

KINDS = {"R": "#b07510", "r": "#b07510", "s": "#35618f", "a": "#3f8a62"}       # as in the drawings


def begin():
    """Fix the random numbers, and show a line about this machine."""
    lab.here.name, lab.here.own = "lesson", set()
    lab.here.scale = "smoke" if os.environ.get("SCALE") == "smoke" else "local"
    torch.manual_seed(0)
    tiny = " Scale `smoke`, for tests." * (lab.here.scale == "smoke")
    lab.show(f"Ready: Python {sys.version.split()[0]}, torch {torch.__version__}, "
             f"{lab.train.machine(lab.settings.pick_device('auto'))}.{tiny}")


# ------------------------------------------------------------------- agents

def fit(label, model="dt", env="pointmaze-umaze", seed=0, fresh=False, **given):
    """Train a small run, or find it again; other settings make another run. Returns a lab.Run.

    given: settings as on the command line, such as context_len=8. fresh: train it anew.
    """
    given = dict(model=model, steps=2000, eval_episodes=2) | given
    folder = lab.folder_of(lab.values_of(env, seed, True, given))
    if not fresh and (result := lab.many.finished(folder)):
        print(f"{label}: found again, {result['steps']:,} updates of {result['date']}; "
              "fresh=True trains it anew")
    return lab.run(env, seed, label, trained=True, own=True, fresh=fresh, **given)


def trained(model, env="pointmaze-umaze"):
    """(model, meta) of weights/, which come with the project or, without them, of a small run."""
    folder = lab.ROOT / "weights" / f"{model}-{env}"
    if (folder / "last.pt").is_file():
        return lab.player.load_run(folder)
    print(f"there is no weights/{folder.name}: a small run is trained")
    return fit(f"{model} on {env}", model, env).checkpoint


def pair(agent):
    """(model, meta) of an agent."""
    return getattr(agent, "checkpoint", agent)


def last_start(meta):
    """Of a maze the far one, where speed alone decides the return."""
    return list(meta["starts"])[-1]


def returns(agent, targets, episodes=5, start=None):
    """{target: the returns of that many episodes}."""
    model, meta = pair(agent)
    episodes = lab.pick(smoke=1, local=episodes)
    plan = [(start or last_start(meta), float(x), episodes) for x in targets]
    rows = lab.player.evaluate(model, meta, plan, sample=meta["sample"])
    return {row["target"]: row["achieved"] for row in rows}


def play(agents, targets=(20, 60, 250), episodes=5, start=None):
    """Ask each of {label: agent} for returns: a table, and a picture with a dot for each episode."""
    got = {label: returns(agent, targets, episodes, start) for label, agent in agents.items()}
    lab.show(lab.markdown(
        ["asked for", *(f"{label}: mean (lowest to highest)" for label in got)],
        [[f"{x:g}", *(f"{np.mean(r[x]):.0f} ({min(r[x]):.0f} to {max(r[x]):.0f})" for r in got.values())]
         for x in map(float, targets)]))
    fig, (ax,) = lab.axes(1, width=5.6, height=3.6)
    ends = [min(targets), max(targets)]
    ax.plot(ends, ends, color="0.6", linewidth=1, label="what was asked for")
    look = lab.pictures.looks(got)
    for label, r in got.items():
        color, marker, line = look[label]
        ax.plot(list(r), [np.mean(x) for x in r.values()], color=color, marker=marker, linestyle=line,
                label=label)
        ax.plot(list(r), list(r.values()), ".", color=color, markersize=4, alpha=0.5)
    ax.set(xlabel="return asked for", ylabel="return achieved")
    ax.set_title("a small dot is an episode, a line goes through their means", fontsize=9)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    lab.picture(fig)


def film(agent, wishes=None, start=None, seed=0):
    """An episode for each wish, from the same start. Default: a low and a high wish."""
    model, meta = pair(agent)
    targets = [x for _, x, _ in meta["plan"]]
    wishes = wishes or [min(targets), max(targets)]
    picture, got = camera.film(model, meta, wishes, start or last_start(meta), seed)
    words = ", ".join(f"asked for {x:g}: {y:.0f}" for x, y in zip(wishes, got, strict=True))
    display(Image(picture, format="png", alt=f"film of episodes; returns when {words}"))


def windows(agent, target, start=None, seed=0):
    """A batch of all whole windows of an episode that an agent plays, as it sees them."""
    model, meta = pair(agent)
    tape, place = [[]], meta["starts"][start or last_start(meta)]
    env = lab.envs.make(meta["env_spec"])
    lab.player.rollout(model.eval(), meta, [env], [target], [seed], [place], record=tape)
    env.close()
    states, goals, actions, rewards = (np.array(x) for x in zip(*tape[0], strict=True))
    t = data.Trajectories(
        states, actions, rewards, [len(rewards)], goals=goals if meta["goal"] else None, action_low=-1.0,
        action_high=1.0, n_actions=meta["n_actions"], stack=meta["layout"]["stack"] or 4)
    t.rtg = target - torch.cat([torch.zeros(1), t.rewards.cumsum(0)[:-1]])      # what is left of the wish
    normal = None if t.stack else (meta["state_mean"].cpu(), meta["state_std"].cpu())
    cut = data.Windows(t, model.cfg.context_len, "cpu", meta["rtg_scale"], meta["reward_scale"],
                       meta["max_ep_len"], meta["goal"], normal=normal)
    return cut.gather(torch.arange(max(1, len(t) - cut.K + 1)))


# ------------------------------------------------------------------- pictures

def tokens(steps, kinds="Rsa"):
    """["R₁", "s₁", "a₁", "R₂", ...]"""
    return [kind + "".join("₀₁₂₃₄₅₆₇₈₉"[int(x)] for x in str(t + 1)) for t in range(steps) for kind in kinds]


def matrices(panels, rows=None, columns=None, digits=2, xlabel="", ylabel="", size=3.6):
    """{title: matrix} side by side, each number in its cell, darker where it is larger.

    rows, columns: names, coloured where they are those of tokens. What is -inf or NaN stays empty.
    """
    fig, panes = lab.axes(len(panels), width=size, height=size)
    for ax, (title, values) in zip(panes, panels.items(), strict=True):
        values = lab.plain(values).astype(float)
        shown = np.where(np.isfinite(values), values, np.nan)
        low, high = np.nanmin(shown), np.nanmax(shown)
        ax.imshow(shown, cmap="Greys", vmin=low, vmax=2 * high - low + 1e-9, aspect="auto")
        for (i, j), x in np.ndenumerate(shown):
            if np.isfinite(x):
                text = f"{x:.{digits}f}" if x else "0"
                ax.text(j, i, text, ha="center", va="center", fontsize=7, color="0" if x else "0.7")
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.set_title(title, fontsize=9)
        for axis, names, n in ((ax.yaxis, rows, len(shown)), (ax.xaxis, columns, shown.shape[1])):
            axis.set_ticks(range(n) if names else [], names or [])
            for tick, name in zip(axis.get_ticklabels(), names or [], strict=True):
                tick.set_color(KINDS.get(name[0], "0") if len(name) < 4 else "0")
        ax.tick_params(length=0, labelsize=9)
    lab.picture(fig)


def chosen(label, agent, wish, at=None):
    """DM's weights and kept tokens in one window of an episode, by default that with the fewest.

    Returns those kept in all windows: (mixer layers, windows, 3K).
    """
    model, _ = pair(agent)
    batch = windows(agent, wish)
    weights = watched(model, batch, lab.dm.MixerLayer, lambda layer, x: layer.router(x)[..., 0].sigmoid())
    kept = model.selected(batch)
    at = kept.sum((0, 2)).argmin() if at is None else at
    fig, panes = lab.axes(1, len(weights), width=11 if kept.shape[2] > 12 else 5.6, height=1.9)
    for ax, (title, w), row in zip(panes, weights.items(), kept[:, at], strict=True):
        lab.pictures.bars(ax, w[at].tolist(), row, tokens(kept.shape[2] // 3), KINDS, f"{label}, {title}")
        ax.set_ylim(0, 1)
    lab.picture(fig)
    return kept


# ------------------------------------------------------------------- links

LINK = re.compile(r'\[[\w/]+\.py, lines? [\d to]+\]\(\.\./[\w/]+\.py#L[\dL-]+ (\\?")([\w.]+)\\?"\)')


def link(name, quote='"'):
    """[models/dt.py, lines 1 to 9](../models/dt.py#L1-L9 "dt.X") for dt.X."""
    module, *rest = name.split(".")
    module = importlib.import_module(f"models.{module}" if module in lab.settings.MODELS else module)
    code, first = inspect.getsourcelines(functools.reduce(getattr, rest, module))
    file, last = Path(module.__file__).relative_to(lab.ROOT).as_posix(), first + len(code) - 1
    return f"[{file}, lines {first} to {last}](../{file}#L{first}-L{last} {quote}{name}{quote})"


def relinked(text):
    """A text with today's line numbers in its links."""
    return LINK.sub(lambda found: link(found[2], found[1]), text)


def where(*things):
    """Links to classes and functions."""
    names = [f"{x.__module__.removeprefix('models.')}.{x.__qualname__}" for x in things]
    lab.show("\n".join(f"- `{name}`: {link(name)}" for name in names))


if __name__ == "__main__":
    for path in Path(__file__).parent.glob("*.ipynb"):
        old = path.read_text(encoding="utf-8")
        if (new := relinked(old)) != old:
            path.write_text(new, encoding="utf-8")
            print(f"{path.name}: new line numbers")
