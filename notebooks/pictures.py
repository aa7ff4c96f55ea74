"""Pictures of the notebooks: lines and maps that can be told apart without colour."""
import io
import itertools
import re

import matplotlib
import numpy as np
import PIL.Image
import torch
from IPython.display import Image, display
from matplotlib.figure import Figure

import envs
import eval as player

folder = None       # a function that gives the folder where pictures are kept by name; lab.py sets it

# the looks of models: colour, marker, line
LOOKS = {
    "DT": ("#35618f", "o", "-"), "DC": ("#c2571a", "s", "--"), "LSDT": ("#3f8a62", "D", ":"),
    "RADT": ("#8a4f9e", "^", "-."), "StARformer": ("#b8860b", "v", (0, (5, 1))),
    "DM": ("#b03a5b", "<", (0, (3, 1, 1, 1))), "BC": ("#6f6f6f", "x", (0, (1, 1)))}
MARKERS, STYLES = "osD^v<>x", ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2))]


def looks(labels):
    """{label: (colour, marker, line)}, where no two have the same marker and line.

    A label that begins with a model's name has the model's colour, paler for its second and third variant,
    and the first one has the model's marker and line, too.
    """
    names = {label: re.split(r"\W", label)[0] for label in labels}
    found, used = {}, dict.fromkeys(names.values(), 0)
    taken = {LOOKS[name][1:] for name in used if name in LOOKS}
    for i, (label, name) in enumerate(names.items()):
        color, *own = LOOKS.get(name, (f"C{i % 10}",))
        n = used[name]
        used[name] += 1
        if own and not n:
            found[label] = LOOKS[name]
            continue
        if own:
            color = tuple(1 - (1 - np.array(matplotlib.colors.to_rgb(color))) * 0.65**n)
        pairs = [pair for pair in zip(MARKERS, STYLES, strict=True) if not set(pair) & set(own)]
        start = (n if own else i) % len(pairs)
        some = itertools.chain(pairs[start:], pairs[:start], itertools.product(MARKERS, STYLES))
        pair = next((pair for pair in some if pair not in taken), pairs[start])
        taken.add(pair)
        found[label] = color, *pair
    return found


def picture(fig, save=None):
    """Show a figure as a PNG; save: its name, where it is to be kept as well."""
    fig.tight_layout()
    whole, out = io.BytesIO(), io.BytesIO()
    fig.savefig(whole, dpi=90)
    # fewer bytes
    PIL.Image.open(whole).convert("RGB").quantize(256).save(out, "PNG", optimize=True)
    if save:
        (folder() / f"{save}.png").write_bytes(out.getvalue())
    display(Image(out.getvalue()))


def axes(columns, rows=1, width=3.4, height=2.9):
    """(figure, flat list of axes). Sizes are in inches, and a page shows 12.8 of them side by side."""
    fig = Figure(figsize=(min(width * columns, 12.8), height * rows))
    return fig, list(fig.subplots(rows, columns, squeeze=False).flat)


def plain(x):
    """A tensor or anything like an array, as an array in the computer's memory."""
    return torch.as_tensor(x).detach().cpu().numpy()


def heat_maps(maps, save=None, xlabel="token looked at", ylabel="token that looks", columns=4, scale=None):
    """Gray pictures of {title: (rows, columns) array}: darker is more.

    scale: what the shades measure; all pictures then have the same ones.
    """
    if not maps:
        return
    maps = {title: plain(values) for title, values in maps.items()}
    least, most = (edge(edge(values.flat) for values in maps.values()) for edge in (min, max))
    fig, panels = axes(min(columns, len(maps)), -(-len(maps) // columns))
    for ax, (title, values) in zip(panels, maps.items(), strict=False):
        ends = (least, most) if scale else (values.min(), None)
        shown = ax.imshow(values, cmap="Greys", aspect="auto", interpolation="nearest",
                          vmin=min(0, ends[0]), vmax=ends[1])
        ax.set_title(title, fontsize=9)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.locator_params(integer=True, min_n_ticks=1)
        fig.colorbar(shown, ax=ax, label=scale)
    for ax in panels[len(maps):]:
        ax.set_visible(False)
    picture(fig, save)


def lines(curves, xlabel, ylabel, title="", save=None, diagonal=False, logy=False, marks=None):
    """{label: (x, y)} or {label: (x, y, spread)}; a spread is a band around its line.

    marks: {label: [x, ...]}, upright dotted lines in the line's colour; the lines are then without markers.
    """
    fig, (ax,) = axes(1, width=5.6, height=3.4)
    look = looks(curves)
    for label, curve in curves.items():
        x, y, *spread = map(plain, curve)
        color, marker, line = look[label]
        ax.plot(x, y, linestyle=line, marker="" if marks else marker, color=color, markersize=4, label=label,
                markevery=max(1, len(x) // 12))
        for at in (marks or {}).get(label, []):
            ax.axvline(at, color=color, linestyle=":")
        if spread:
            ax.fill_between(x, y - spread[0], y + spread[0], alpha=0.15, color=color)
    if diagonal:
        ends = [edge(edge(x) for x, *_ in curves.values()) for edge in (min, max)]
        ax.plot(ends, ends, color="0.6", linewidth=1, label="target = achieved")
    if logy:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=9)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    picture(fig, save)


def tracks(run, n):
    """n episodes from a run's first start: [(goal, reached or not, way)], the maze's walls, a cell's size.

    run: a lab.Run. A way is a hundred places (x, y) at most, the first and the last one among them.
    """
    import gymnasium

    class Tape(gymnasium.ObservationWrapper):
        def observation(self, observation):
            self.seen = [*getattr(self, "seen", []), observation]
            return observation

    tapes = [Tape(envs.make(run.meta["env_spec"])) for _ in range(n)]
    options = [run.meta["starts"][run.rows[0]["start"]]] * n
    result = player.rollout(run.net.eval(), run.meta, tapes, np.full(n, run.asked), range(n), options)
    ways = []
    for tape, reached in zip(tapes, result["success"], strict=True):
        some = tape.seen[:-1:max(1, len(tape.seen) // 50)] + tape.seen[-1:]
        way = np.array([x["achieved_goal"] for x in some])
        ways.append((tape.seen[0]["desired_goal"].round(2).tolist(), bool(reached), way.round(2).tolist()))
        tape.close()
    maze = tapes[0].unwrapped.maze
    walls = [[int(mark == 1) for mark in row] for row in maze.maze_map]
    return dict(ways=ways, walls=walls, size=maze.maze_size_scaling)


def mazes(panels, save=None):
    """Ways through a maze, [(label, tracks())], each shaded by the cell where it ends.

    Dashed is a way that missed its goal (*).
    """
    if not panels:
        return
    fig, axs = axes(min(2, len(panels)), -(-len(panels) // 2), width=4.2, height=3.9)
    for ax in axs[len(panels):]:
        ax.set_visible(False)
    for ax, (label, found) in zip(axs, panels, strict=False):
        size, (height, width) = found["size"], np.shape(found["walls"])
        x, y = width * size / 2, height * size / 2      # (0, 0) is the middle
        free = np.argwhere(np.equal(found["walls"], 0))
        for goal, reached, way in found["ways"]:
            cell = (y - way[-1][1]) // size, (way[-1][0] + x) // size
            place = np.abs(free - cell).sum(1).argmin()
            color = matplotlib.colormaps["viridis"](place / len(free))
            ax.plot(*np.transpose(way), linestyle="-" if reached else "--", color=color, linewidth=1)
            ax.plot(*goal, "*", color=color, markersize=8)
        ax.imshow(found["walls"], cmap="Greys", vmax=6, extent=(-x, x, -y, y))
        share = 100 * np.mean([reached for _, reached, _ in found["ways"]])
        ax.set_title(f"{label}: {share:.0f} % reach the goal (*)", fontsize=9)
        x, y = x - 0.75 * size, y - 0.75 * size         # most of the outer wall is left out
        ax.set(xlabel="x", ylabel="y", xlim=(-x, x), ylim=(-y, y))
    picture(fig, save)


def taps(panels, kinds, colors):
    """What belongs to each tap of DC's filters, {label: {layer: (kinds, W), or (kinds, W, d)}}.

    A row for each label, a column for each kind of token. (kinds, W, d): a dot for each channel, on the
    gray range of a random start. Below a tap stands the token that it reads, the own one on the right.
    """
    shades = ["0.75", "0.45", "0.1"]
    fig, panes = axes(len(kinds), len(panels), width=3.1, height=2.1)
    for row, (label, layers) in enumerate(panels.items()):
        first, *others = panes[row * len(kinds):(row + 1) * len(kinds)]
        first.set_ylabel(label)
        for kind, ax in enumerate([first, *others]):
            if kind:
                ax.sharey(first)
            for i, (layer, values) in enumerate(layers.items()):
                values = plain(values)[kind][::-1]      # in the order of time
                W, shade = len(values), shades[i % 3]
                at = np.arange(W) + 0.25 * (i - 1)
                if values.ndim > 1:
                    ax.axhspan(-W**-0.5, W**-0.5, color="0.93")
                    ax.plot(at, values, ".", color=shade, markersize=3)
                else:
                    ax.bar(at, values, 0.24, color=shade, label=layer)
            read = [divmod(kind - back, len(kinds)) for back in range(W)][::-1]
            ax.set_xticks(range(W), [f"${kinds[k]}_{{t{step or ''}}}$" for step, k in read])
            for tick, (_, k) in zip(ax.get_xticklabels(), read, strict=True):
                tick.set_color(colors[kinds[k]])
            if not row:
                ax.set_title(f"filter of {kinds[kind]}", fontsize=9)
    panes[-1].legend(fontsize=7)
    picture(fig)


def bars(ax, weights, kept, names, colors, title):
    """A bar for each token's weight, and the token below: filled if kept, hollow if it passes by."""
    many = len(names) > 12
    for i, name in enumerate(names):
        color = colors[name[0]]
        ax.bar(i, weights[i], color=color, alpha=1.0 if kept[i] else 0.3)
        box = dict(boxstyle="round,pad=0.25", edgecolor=color, linewidth=0.8,
                   facecolor=color if kept[i] else "white")
        ax.text(i, -0.12, name[0] if many else name, fontsize=6 if many else 10, ha="center", va="center",
                color="white" if kept[i] else color, transform=ax.get_xaxis_transform(), bbox=box)
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set(xticks=[], xlim=(-0.8, len(names) - 0.2), ylabel="weight")
    ax.set_title(f"{title}: {int(sum(kept))} of {len(names)} tokens kept", fontsize=9)
