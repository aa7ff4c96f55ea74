"""Pictures of the notebooks: lines and maps that can be told apart without colour."""
import io
import re

import matplotlib
import numpy as np
import PIL.Image
import torch
from IPython.display import Image, display
from matplotlib.figure import Figure

folder = None       # a function that gives the folder where pictures are kept by name; lab.py sets it

# the looks of models: colour, marker, line
LOOKS = {
    "DT": ("#35618f", "o", "-"), "DC": ("#c2571a", "s", "--"), "LSDT": ("#3f8a62", "D", ":"),
    "RADT": ("#8a4f9e", "^", "-."), "StARformer": ("#b8860b", "v", (0, (5, 1))),
    "DM": ("#b03a5b", "<", (0, (3, 1, 1, 1))), "BC": ("#6f6f6f", "x", (0, (1, 1)))}
MARKERS, STYLES = "osD^v<>x", ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2))]


def looks(labels):
    """{label: (colour, marker, line)}. A label that begins with a model's name has the model's colour,
    paler for its second and third variant, and the first one has the model's marker and line, too."""
    found, used = {}, {}
    for i, label in enumerate(labels):
        name = re.split(r"\W", label)[0]
        color, marker, line = LOOKS.get(name, (f"C{i % 10}", MARKERS[i % 8], STYLES[i % 8]))
        if n := used.get(name, 0):
            rgb = np.array(matplotlib.colors.to_rgb(color))
            color, marker, line = tuple(1 - (1 - rgb) * 0.65**n), MARKERS[(i + 3) % 8], STYLES[(i + 3) % 8]
        used[name] = used.get(name, 0) + (name in LOOKS)
        found[label] = color, marker, line
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
    """(figure, flat list of axes)."""
    fig = Figure(figsize=(width * columns, height * rows))
    return fig, list(fig.subplots(rows, columns, squeeze=False).flat)


def plain(x):
    """A tensor or anything like an array, as an array in the computer's memory."""
    return torch.as_tensor(x).detach().cpu().numpy()


def heat_maps(maps, save=None, xlabel="token looked at", ylabel="token that looks", columns=4):
    """Gray pictures of {title: (rows, columns) array}: darker is more."""
    fig, panels = axes(min(columns, len(maps)), -(-len(maps) // columns))
    for ax, (title, values) in zip(panels, maps.items(), strict=False):
        values = plain(values)
        shown = ax.imshow(values, cmap="Greys", aspect="auto", interpolation="nearest",
                          vmin=min(0, values.min()))
        ax.set_title(title, fontsize=9)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.locator_params(integer=True, min_n_ticks=1)
        fig.colorbar(shown, ax=ax)
    for ax in panels[len(maps):]:
        ax.set_visible(False)
    picture(fig, save)


def lines(curves, xlabel, ylabel, title="", save=None, diagonal=False, logy=False):
    """{label: (x, y)} or {label: (x, y, spread)}; a spread is a band around its line."""
    fig, (ax,) = axes(1, width=5.6, height=3.4)
    look = looks(curves)
    for label, curve in curves.items():
        x, y, *spread = map(plain, curve)
        color, marker, line = look[label]
        ax.plot(x, y, linestyle=line, marker=marker, color=color, markersize=4, label=label)
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
