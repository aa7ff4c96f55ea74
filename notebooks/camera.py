"""Films of episodes that need no renderer: MuJoCo's bodies are drawn from where the physics has them.

Mazes are seen from above, walkers from the side, and games as the model sees them. A film is an animated PNG,
which browsers, GitHub and editors show like any picture.
"""
import io

import gymnasium
import numpy as np
from matplotlib import font_manager
from PIL import Image, ImageColor, ImageDraw, ImageFont

import envs
from eval import body_of, evaluate

TIMES = 2               # drawn so many times as large, then shrunk: smooth edges
PANE, VIEW, HEIGHT, GAP = 240, 208, 312, 10
FRAMES, MILLISECONDS, LAST = 60, 80, 2500
CARD, PAGE, WALL, INK = "#fbfcfd", "#eef1f5", "#c3cad4", "#28303c"
BODY, TRAIL, GOAL, INNER, RETURN = "#35618f", "#9db8d3", "#3f8a62", "#d7e8de", "#e0a030"
SPHERE, CAPSULE, BOX = 2, 3, 6      # MuJoCo's numbers of shapes


def palette(grays=0):
    """The colours used, what lies between them and the ground, and so many grays, for Image.quantize()."""
    colors = [[256 // grays * i + 128 // grays] * 3 for i in range(grays)]
    for ground in map(ImageColor.getrgb, (CARD, PAGE, INNER)):
        for color in map(ImageColor.getrgb, (INK, WALL, BODY, TRAIL, GOAL, RETURN)):
            for share in (0, 0.25, 0.5, 0.75, 1):
                pairs = zip(color, ground, strict=True)
                colors.append([round(share * c + (1 - share) * g) for c, g in pairs])
    image = Image.new("P", (1, 1))
    image.putpalette([x for color in colors for x in color])
    return image


class Tape(gymnasium.Wrapper):
    """Keeps what there is to draw of each step: the bodies' ends and radii, or the frame; and the return."""

    def __init__(self, env, layout):
        super().__init__(env)
        self.layout, inner = layout, env.unwrapped
        self.maze = getattr(inner, "maze", None)
        self.sim = None if layout["stack"] else body_of(inner).unwrapped
        self.view = [0, 1] if self.maze else [0, 2]     # from above, or from the side

    def bodies(self):
        """[(one end, other end, radius)] of spheres and capsules, on the picture's plane."""
        model, state = self.sim.model, self.sim.data
        moving = (model.geom_bodyid > 0) & np.isin(model.geom_type, (SPHERE, CAPSULE))
        for i in np.flatnonzero(moving):
            radius, half = model.geom_size[i][:2]
            along = state.geom_xmat[i].reshape(3, 3)[:, 2] * half * (model.geom_type[i] == CAPSULE)
            middle = state.geom_xpos[i]
            yield (middle - along)[self.view], (middle + along)[self.view], radius

    def keep(self, observation, reward):
        frame, self.goal = envs.observe(observation, self.layout)
        self.shots.append(list(self.bodies()) if self.sim else frame)
        self.returns.append(self.returns[-1] + reward if self.returns else 0.0)

    def reset(self, **given):
        observation, info = super().reset(**given)
        self.shots, self.returns = [], []
        self.keep(observation, 0.0)
        return observation, info

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.keep(observation, float(reward))
        return observation, reward, *rest

    def walls(self):
        """[(x0, y0, x1, y1)] of a maze, in metres."""
        model = self.sim.model
        for i in np.flatnonzero((model.geom_bodyid == 0) & (model.geom_type == BOX)):
            (x, y), (a, b) = self.sim.data.geom_xpos[i][:2], model.geom_size[i][:2]
            yield x - a, y - b, x + a, y + b


class Pane:
    """One episode's part of the film."""

    def __init__(self, tape, wish, left, most):
        self.tape, self.wish, self.left, self.most = tape, wish, left, most
        path = font_manager.findfont("DejaVu Sans")
        self.font = ImageFont.truetype(path, 12 * TIMES)
        if tape.maze:       # half of the outer wall is shown
            self.boxes = np.array(list(tape.walls()))
            side = self.boxes[0, 2] - self.boxes[0, 0]
            low, high = self.boxes[:, :2].min(0) + side / 2, self.boxes[:, 2:].max(0) - side / 2
            self.unit, self.low = VIEW / (high - low).max(), low
        else:
            self.unit, self.low = VIEW / 3.0, np.array([-1.5, -0.4])       # a picture of 3 metres

    def pixel(self, place, shift=0.0):
        """Metres to pixels."""
        x, y = (np.asarray(place) - self.low - [shift, 0]) * self.unit
        top, left = 40, self.left + (PANE - VIEW) / 2
        return (left + x) * TIMES, (top + VIEW - y) * TIMES

    def disc(self, pen, place, radius, **colors):
        (x, y), r = place, radius * TIMES
        pen.ellipse((x - r, y - r, x + r, y + r), **colors)

    def draw(self, image, step):
        pen = ImageDraw.Draw(image)
        step = min(step, len(self.tape.shots) - 1)
        if self.tape.sim:
            self.draw_bodies(pen, step)
        else:
            place = (int(self.left + (PANE - VIEW) / 2) * TIMES, 40 * TIMES)
            frame = Image.fromarray(np.asarray(self.tape.shots[step], np.uint8))
            image.paste(frame.resize((VIEW * TIMES, VIEW * TIMES), Image.NEAREST), place)
        # what lies outside the view, then the words and the bar of what is earned
        left, right = self.left * TIMES, (self.left + PANE) * TIMES
        for y0, y1 in ((0, 40), (40 + VIEW, HEIGHT)):
            pen.rectangle((left, y0 * TIMES, right, y1 * TIMES), fill=PAGE)
        edge = (PANE - VIEW) / 2 * TIMES
        for x0, x1 in ((left - GAP * TIMES, left + edge), (right - edge, right + GAP * TIMES)):
            pen.rectangle((x0, 0, x1, HEIGHT * TIMES), fill=PAGE)
        middle, earned = (left + right) / 2, self.tape.returns[step]
        pen.text((middle, 22 * TIMES), f"asked for {self.wish:g}", INK, self.font, "mm")
        width, top = right - left - 2 * edge, (HEIGHT - 52) * TIMES
        bar = (left + edge, top, right - edge, top + 10 * TIMES)
        pen.rectangle(bar, fill=CARD, outline=WALL, width=TIMES)
        share = min(1, max(0, earned / self.most))
        pen.rectangle((bar[0], bar[1], bar[0] + share * width, bar[3]), fill=RETURN)
        mark = bar[0] + min(1, self.wish / self.most) * width
        pen.line((mark, top - 4 * TIMES, mark, top + 14 * TIMES), INK, 2 * TIMES)
        words = f"return {earned:.0f} after {step} steps"
        pen.text((middle, (HEIGHT - 22) * TIMES), words, INK, self.font, "mm")

    def draw_bodies(self, pen, step):
        bodies, shift = self.tape.shots[step], 0.0
        if self.tape.maze:
            for x0, y0, x1, y1 in self.boxes:
                pen.rectangle((*self.pixel((x0, y1)), *self.pixel((x1, y0))), fill=WALL)
            radius = max(6, 0.45 * self.unit)       # within 0.45 m an agent is at its goal
            self.disc(pen, self.pixel(self.tape.goal), radius, fill=INNER, outline=GOAL, width=2 * TIMES)
            way = [self.pixel(shot[0][0]) for shot in self.tape.shots[:step + 1]]
            if len(way) > 1:
                pen.line(way, TRAIL, 2 * TIMES, "curve")
        else:
            shift = bodies[0][0][0]     # the camera goes along; a line a metre shows how fast
            for x in range(int(shift) - 2, int(shift) + 4):
                pen.line((*self.pixel((x, 0), shift), *self.pixel((x, -0.4), shift)), WALL, TIMES)
            pen.line((*self.pixel((shift - 2, 0), shift), *self.pixel((shift + 2, 0), shift)), INK, TIMES)
        for one, other, radius in bodies:
            ends = [self.pixel(place, shift) for place in (one, other)]
            radius = max(7.0 if len(bodies) == 1 else 1.3, radius * self.unit)
            pen.line([*ends[0], *ends[1]], BODY, round(2 * radius * TIMES))
            for place in ends:
                self.disc(pen, place, radius, fill=BODY)


def film(model, meta, wishes, start, seed=0):
    """(animated PNG as bytes, returns): one episode for each wish, side by side, from the same start."""
    tapes = [Tape(envs.make(meta["env_spec"]), meta["layout"]) for _ in wishes]
    rows = evaluate(model, meta, [(start, wish, 1) for wish in wishes], seed, tapes, meta["sample"])
    returns = [row["return_mean"] for row in rows]
    most = 1.1 * max(*wishes, *returns, 1e-9)
    panes = [Pane(tape, wish, GAP + i * (PANE + GAP), most)
             for i, (tape, wish) in enumerate(zip(tapes, wishes, strict=True))]
    width, longest = GAP + len(panes) * (PANE + GAP), max(len(tape.shots) for tape in tapes) - 1
    frames, colors = [], palette(grays=32)
    for step in np.linspace(0, longest, min(FRAMES, longest + 1)).round().astype(int):
        image = Image.new("RGB", (width * TIMES, HEIGHT * TIMES), CARD)
        for pane in panes:
            pane.draw(image, step)
        image = image.resize((width, HEIGHT), Image.LANCZOS)
        frames.append(image.quantize(palette=colors, dither=Image.Dither.NONE))
    for tape in tapes:
        tape.close()
    out, times = io.BytesIO(), [MILLISECONDS] * (len(frames) - 1) + [LAST]
    frames[0].save(out, "PNG", save_all=True, append_images=frames[1:], duration=times, loop=0)
    return out.getvalue(), returns
