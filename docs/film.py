"""The film of the README, docs/maze.gif: one trained agent, the same start, three returns asked for.

    python train.py
    python docs/film.py runs/dt-pointmaze-umaze-s0

A step at the goal earns 1, so the return that is asked for decides how fast the agent has to get there. The
episodes are the first that the run's own table counts: nothing is picked. No renderer is needed.
"""
import sys
from pathlib import Path

import gymnasium
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

from camera import BODY, CARD, GOAL, INK, INNER, PAGE, RETURN, TRAIL, WALL, palette  # noqa: E402

import envs  # noqa: E402 (found once the repository's folders are on the path)
from errors import Parser, UserError, run_command  # noqa: E402
from eval import evaluate, load_run  # noqa: E402

SCALE = 2               # drawn so many times as large, then shrunk: smooth edges
PANE, GAP, MAZE = 232, 14, 204
WIDTH, HEIGHT = 3 * PANE + 4 * GAP, 322
EVERY = 3               # steps of the maze to a frame
MILLISECONDS, LAST = 60, 2500


class Recorder(gymnasium.Wrapper):
    """Keeps where the ball was and what it earned, step by step."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        self.goal = observation["desired_goal"].copy()
        self.places = [observation["achieved_goal"].copy()]
        self.returns = [0.0]
        return observation, info

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.places.append(observation["achieved_goal"].copy())
        self.returns.append(self.returns[-1] + float(reward))
        return observation, reward, *rest


def record(run):
    """(targets, recorders): an episode each of the lowest, middle and highest target, from the far start."""
    model, meta = load_run(run)
    targets = sorted({target for start, target, _ in meta["plan"] if start == "far"})
    if len(targets) < 3:
        raise UserError(f"{run} has no three targets from a far start: train on pointmaze-umaze")
    targets = [targets[0], targets[len(targets) // 2], targets[-1]]
    recorders = [Recorder(envs.make(meta["env_spec"])) for _ in targets]
    evaluate(model, meta, [("far", target, 1) for target in targets], seed=0, envs=recorders)
    return targets, recorders


def font(size, weight="normal"):
    path = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans", weight=weight))
    return ImageFont.truetype(path, size * SCALE)


class Film:
    """Three panes side by side: the maze, and a bar of what is earned with a mark at what was asked for."""

    def __init__(self, targets, recorders):
        self.targets, self.recorders = targets, recorders
        self.bold, self.plain = font(14, "bold"), font(12)
        self.most = 1.1 * max(targets)          # right end of the bars
        cells = recorders[0].unwrapped.maze.maze_map
        self.walls = [(x, y) for y, row in enumerate(cells) for x, cell in enumerate(row) if cell == 1]
        self.size = len(cells)
        self.still = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), CARD)
        for i, target in enumerate(targets):
            self.draw_still(ImageDraw.Draw(self.still), i, target)

    def pixel(self, i, place):
        """A place of the maze (metres, the middle is 0) in pane i. Half a cell of the outer wall is shown."""
        unit = MAZE / (self.size - 1)
        left = GAP + i * (PANE + GAP) + (PANE - MAZE) / 2
        x = left + MAZE / 2 + place[0] * unit
        y = 44 + MAZE / 2 - place[1] * unit
        return x * SCALE, y * SCALE

    def disc(self, pen, centre, radius, **colors):
        x, y = centre
        r = radius * SCALE
        pen.ellipse((x - r, y - r, x + r, y + r), **colors)

    def draw_still(self, pen, i, target):
        """Everything that does not move."""
        left = (GAP + i * (PANE + GAP)) * SCALE
        pane = (left, 8 * SCALE, left + PANE * SCALE, (HEIGHT - 8) * SCALE)
        pen.rounded_rectangle(pane, 8 * SCALE, fill=PAGE)
        pen.text((left + PANE * SCALE / 2, 27 * SCALE), f"asked for {target:.0f}", INK, self.bold, "mm")
        half = (self.size - 1) / 2
        edges = (*self.pixel(i, (-half, half)), *self.pixel(i, (half, -half)))
        pen.rectangle(edges, fill=CARD)
        for x, y in self.walls:
            place = (x - half, half - y)
            x0, y0 = self.pixel(i, (place[0] - 0.5, place[1] + 0.5))
            x1, y1 = self.pixel(i, (place[0] + 0.5, place[1] - 0.5))
            inside = max(x0, edges[0]), max(y0, edges[1]), min(x1, edges[2]), min(y1, edges[3])
            pen.rectangle(inside, fill=WALL)
        goal = self.pixel(i, self.recorders[i].goal)
        self.disc(pen, goal, 0.45 * MAZE / (self.size - 1), fill=INNER, outline=GOAL, width=2 * SCALE)

    def frame(self, step):
        image = self.still.copy()
        pen = ImageDraw.Draw(image)
        for i, (target, seen) in enumerate(zip(self.targets, self.recorders, strict=True)):
            way = [self.pixel(i, place) for place in seen.places[:step + 1]]
            if len(way) > 1:
                pen.line(way, TRAIL, 3 * SCALE, "curve")
            self.disc(pen, way[-1], 8, fill=BODY)
            left = GAP + i * (PANE + GAP) + 14
            top, width = 262, PANE - 28
            bar = (left * SCALE, top * SCALE, (left + width) * SCALE, (top + 12) * SCALE)
            pen.rounded_rectangle(bar, 4 * SCALE, fill=CARD, outline=WALL, width=SCALE)
            earned = seen.returns[step]
            if earned:
                full = (left + max(8, width * earned / self.most)) * SCALE
                pen.rounded_rectangle((bar[0], bar[1], full, bar[3]), 4 * SCALE, fill=RETURN)
            mark = (left + width * target / self.most) * SCALE
            pen.line((mark, (top - 4) * SCALE, mark, (top + 16) * SCALE), INK, 2 * SCALE)
            middle = (left + width / 2) * SCALE
            pen.text((middle, 292 * SCALE), f"return {earned:.0f} after {step} steps", INK, self.plain, "mm")
        return image.resize((WIDTH, HEIGHT), Image.LANCZOS)

    def save(self, path):
        length = len(self.recorders[0].places) - 1
        steps = [*range(0, length, EVERY), length]
        frames = [self.frame(step) for step in steps]
        frames = [f.quantize(palette=palette(), dither=Image.Dither.NONE) for f in frames]
        durations = [MILLISECONDS] * (len(frames) - 1) + [LAST]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)


def main():
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run folder")
    parser.add_argument("file", nargs="?", default=str(ROOT / "docs" / "maze.gif"))
    args = parser.parse_args()
    targets, recorders = record(args.run)
    Film(targets, recorders).save(args.file)
    got = ", ".join(f"{t:.0f} -> {r.returns[-1]:.0f}" for t, r in zip(targets, recorders, strict=True))
    print(f"{args.file}: {Path(args.file).stat().st_size / 1000:.0f} kB; asked for -> achieved: {got}")


if __name__ == "__main__":
    run_command(main)
