"""Make the data sets of this project again, offline and seeded: python policies/collect.py NAME --steps N --seed S

A set is episodes of a scripted or stored policy (README.md beside this file) in gymnasium's own environments, or in those of
screens.py, so every observation, reward and end is the environment's. The sets are stored as Minari stores its own, and
`minari.load_dataset(id)` reads them. They are stand-ins of the same kind as the published data, not the published data.
"""

import argparse
import contextlib
import copy
import difflib
import io
import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

if not __package__:
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a script, only its own folder is on the path


@dataclass(frozen=True)
class Set:
    """How one set is made. The parts make equally many of its transitions, one after the other."""

    name: str
    steps: int  # transitions by default
    env: str  # gymnasium's name
    parts: tuple  # functions () -> policy
    kwargs: dict = field(default_factory=dict)  # of the environment
    task: tuple | None = None  # (reset cell, goal cell) of a maze; None: drawn by the environment
    eval_env: str | None = None  # the environment to evaluate in, where it differs
    eval_task: tuple | None = None
    group: str = ""  # of the id, where it isn't the first word of the name
    version: int = 1  # raised when the same (name, steps, seed) gives other numbers than before

    @property
    def id(self):
        return f"local/{self.group}/{self.name}-v0" if self.group else f"local/{self.name.replace('-', '/', 1)}-v0"


ONE_GOAL = {"continuing_task": True, "reset_target": False}  # success doesn't end an episode, nor move its goal
# The pair of cells with the longest way between them: the hardest task of a maze, and one fixed task to evaluate on.
FAR = {
    "pointmaze-umaze": {"reset_cell": [1, 1], "goal_cell": [3, 1]},
    "pointmaze-medium": {"reset_cell": [1, 1], "goal_cell": [6, 5]},
    "pointmaze-large": {"reset_cell": [7, 1], "goal_cell": [7, 10]},
}


# ---------------------------------------------------------------- policies
# options(index): what episode number `index` passes to env.reset; start(env, observation, rng): its first observation;
# act(observation, rng) -> (A,): an action in [-1, 1], or the number of one


def next_cells(maze_map, goal):
    """{cell: the next cell of a shortest way to `goal`} for all free cells, by breadth-first search from the goal."""
    step, queue = {goal: goal}, deque([goal])
    while queue:
        i, j = queue.popleft()
        for cell in ((i, j + 1), (i + 1, j), (i, j - 1), (i - 1, j)):
            if cell not in step and maze_map[cell[0]][cell[1]] != 1:
                step[cell] = (i, j)
                queue.append(cell)
    return step


class Way:
    """The shortest way to the goal of a maze, from the first observation of an episode."""

    def __init__(self, maze, first):
        self.maze, self.goal = maze, first["desired_goal"]
        self.next = next_cells(self.maze.maze_map, self.cell(self.goal))
        points, cell = [first["achieved_goal"]], self.cell(first["achieved_goal"])
        while self.next[cell] != cell:
            cell = self.next[cell]
            points.append(self.maze.cell_rowcol_to_xy(cell))
        points = np.array([*points[: max(1, len(points) - 1)], self.goal])  # in the last cell, to the goal instead of the centre
        self.length = np.linalg.norm(np.diff(points, axis=0), axis=1).sum()  # m

    def cell(self, xy):
        return tuple(self.maze.cell_xy_to_rowcol(xy))

    def aim(self, xy):
        """(vector to head along, whether it ends at the goal) from `xy`: to the centre of the NEXT cell, not to stop at centres."""
        cell = self.cell(xy)
        arriving = self.next[cell] == cell
        return (self.goal if arriving else self.maze.cell_rowcol_to_xy(self.next[cell])) - xy, arriving


class Waypoints:
    """Pushes the point mass along the shortest way, at a speed that differs between episodes so that returns spread.

    far: {"reset_cell", "goal_cell"} of one episode in five; the others start and end where the environment says.
    arrival: (low, high) steps; the arrival time wanted is uniform in it.
    """

    def __init__(self, far, arrival):
        self.far, self.arrival = far, arrival

    def options(self, index):
        return self.far if index % 5 == 0 else None

    def start(self, env, observation, rng):
        self.way = Way(env.unwrapped.maze, observation)
        seconds = 0.01 * rng.uniform(*self.arrival)
        # m/s: 0.45 m from the goal is there, 5 is the environment's limit, and a model of short context that sees
        # slower ones learns to stand still.
        self.speed = np.clip((self.way.length - 0.45) / seconds, 0.8, 5)
        self.noise = 0.2 if rng.random() < 0.25 else 0.05

    def act(self, observation, rng):
        position, velocity = np.split(observation["observation"], 2)
        way, arriving = self.way.aim(position)
        distance = np.linalg.norm(way)
        speed = min(self.speed, 6 * distance) if arriving else self.speed  # brakes at the goal only
        wanted = speed * way / max(distance, 1e-9)
        return np.clip(wanted - velocity + self.noise * rng.standard_normal(2), -1, 1)


class Actor:
    """A stored actor, at a level of skill drawn anew for each episode from `levels`.

    body: an .npz beside this file. spread: factor on the actor's own standard deviation: 1 acts as it was trained, 0 by the mean.
    """

    def __init__(self, body, levels, spread=1.0):
        with np.load(Path(__file__).with_name(f"{body}.npz")) as file:
            self.nets = [[file[f"{n}/{key}"].astype(np.float32) for key in ("w0", "b0", "w1", "b1", "w2", "b2")] for n in levels]
        self.spread = spread

    def options(self, index):
        return None

    def start(self, env, observation, rng):
        self.net = self.nets[rng.integers(len(self.nets))]

    def act(self, inputs, rng):
        w0, b0, w1, b1, w2, b2 = self.net
        h = np.maximum(w0 @ inputs.astype(np.float32) + b0, 0)
        h = np.maximum(w1 @ h + b1, 0)
        mean, raw = np.split(w2 @ h + b2, 2)  # (A,) each
        std = np.exp(-5 + 3.5 * (np.tanh(raw) + 1))
        return np.tanh(mean + self.spread * std * rng.standard_normal(len(mean)))


class AntFollower(Actor):
    """The ant's actor, which runs in a wanted direction: along the shortest way of a maze, or along +x on the plain.

    noise, turn: an episode draws two standard deviations, uniform from 0 to these: of the noise on each action, and
    of the noise in radians on each wanted direction.
    """

    def __init__(self, levels, noise, turn):
        super().__init__("ant", levels)
        self.most = noise, turn

    def start(self, env, observation, rng):
        super().start(env, observation, rng)
        self.noise, self.turn = rng.uniform(0, self.most)
        self.way = Way(env.unwrapped.maze, observation) if isinstance(observation, dict) else None

    def act(self, observation, rng):
        way = (1, 0)
        if self.way:
            way, _ = self.way.aim(observation["achieved_goal"])
            observation = observation["observation"]
        angle = np.arctan2(way[1], way[0]) + self.turn * rng.standard_normal()
        action = super().act(self.inputs(observation, angle), rng)
        return np.clip(action + self.noise * rng.standard_normal(8), -1, 1)

    @staticmethod
    def inputs(observation, angle):
        """(29,): the ant's 27 numbers seen from its own heading, and there the wanted direction, given in radians."""
        w, x, y, z = observation[1:5]
        yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        c, s = np.cos(yaw / 2), np.sin(yaw / 2)
        tilt = np.array([c * w + s * z, c * x + s * y, c * y - s * x, c * z - s * w])  # (c, 0, 0, -s) * quaternion: no yaw
        tilt = tilt if tilt[0] >= 0 else -tilt
        c, s = np.cos(yaw), np.sin(yaw)
        vx, vy, vz = observation[13:16]
        velocity = c * vx + s * vy, c * vy - s * vx, vz
        wanted = np.cos(angle - yaw), np.sin(angle - yaw)
        return np.concatenate([observation[:1], tilt, observation[5:13], velocity, observation[16:], wanted])


class Player:
    """Plays a game of Atari by a rule, broken by stretches of one random action held; how often and how long is drawn for each episode.

    rule: function (memory, memory a step before, name of the last action) -> name of the action, from the emulator's 128 bytes, or None to
    play at random. A rule reads only what a few frames and the last action show, so that a model can learn it.
    chance: (low, high) of beginning a stretch in a step, drawn log-uniformly. A stretch lasts at most 1 to 15 steps.
    """

    def __init__(self, rule, chance=(0.005, 0.3)):
        self.rule, self.range = rule, np.log(chance)

    def options(self, index):
        return None

    def start(self, env, observation, rng):
        self.ale, self.names = env.unwrapped.ale, env.unwrapped.get_action_meanings()
        self.chance = np.exp(rng.uniform(*self.range)) if self.rule else 1
        self.most, self.left, self.last, self.before = rng.integers(1, 16), 0, "NOOP", self.memory()

    def memory(self):
        return self.ale.getRAM().tolist()  # 128 numbers; as bytes, a difference would wrap

    def act(self, observation, rng):
        now = self.memory()
        self.last = self.press(now, rng)
        self.before = now
        return self.names.index(self.last)

    def press(self, now, rng):
        """The name of the next action."""
        if self.left == 0 and rng.random() < self.chance:
            self.left, self.held = rng.integers(1, self.most, endpoint=True), self.names[rng.integers(len(self.names))]
        if self.left:
            self.left -= 1
            return self.held
        return self.rule(now, self.before, self.last)


class BreakoutPlayer(Player):
    """Breakout by its rule, but in some of the ball's falls the paddle stands still from the moment it is three quarters down.

    chance: (low, high) of that in a fall. So most steps are the rule's, which a small model can learn, and games still end early.
    """

    def start(self, env, observation, rng):
        super().start(env, observation, rng)
        self.falling = False

    def press(self, now, rng):
        falling = now[101] > 150 and now[101] > self.before[101]
        if falling and not self.falling:
            self.still = rng.random() < self.chance
        self.falling = falling
        return "FIRE" if falling and self.still else self.rule(now, self.before, self.last)


def reflect(x, low, high):
    """Where a ball that would get to x without walls gets to between two."""
    x = (x - low) % (2 * (high - low))
    return low + min(x, 2 * (high - low) - x)


# The rules. Which byte holds what was found by moving and looking at the screen; the numbers added to them are the offsets of the pictures.


def breakout(now, before, last):
    """Follows the ball, a step ahead; a press moves the paddle by 11 in its own step and by 11 in the next. It stands still by FIRE, which
    serves if no ball is in play and else does nothing: who learns from it serves too."""
    x, paddle = now[99], now[72]
    if now[101] == 0:
        return "FIRE"  # no ball is in play
    across = x - before[99] if before[101] and abs(x - before[99]) <= 30 else 0
    aim = x + across - 9 - paddle - {"RIGHT": 11, "LEFT": -11}.get(last, 0)
    return "FIRE" if abs(aim) <= 8 else "RIGHT" if aim > 0 else "LEFT"


def glide(paddle, rest, press, frames, odd):
    """(paddle, rest) of Pong some frames on. rest: where the paddle comes to rest; a press moves that by 5.5 a frame, and the paddle
    goes half the way there in every second frame."""
    for frame in range(frames):
        if (frame + odd) % 2 == 0:
            paddle += (rest - paddle) / 2
        rest = min(203, max(38, rest + 5.5 * press))
    return paddle, rest


def best_press(paddle, rest, frames, odd, y):
    """(worth, press) of the best next press if the ball arrives at height y in so many frames, by trying all rows of presses."""
    options = []
    for press in (0, 1, -1):
        then, there = glide(paddle, rest, press, min(4, frames), odd)
        if frames > 4:
            worth = best_press(then, there, frames - 4, odd, y)[0]
        else:
            off = then - y + 6  # of the paddle's middle from the ball's: beyond 8 it misses, and its ends send the ball away steeply
            steep = (6 <= off <= 8 if y > 125 else -9 <= off <= -7) and 78 < y < 173
            worth = 2 if steep else 1 if abs(off) <= 8 else -abs(off)
        options.append((worth, press == 0, press))
    return max(options)[::2]


def pong(now, before, last):
    """Returns the ball, and if it can so steeply towards the farther wall that the other side, slower than the ball, doesn't get there."""
    x, y, paddle, odd = now[49], now[54], now[51], now[8] & 1
    if y == 0:
        return "NOOP"  # no ball is in play
    across, press = x - before[49], ("LEFT" in last) - ("RIGHT" in last)  # LEFT is down, where byte 51 grows
    rest = before[51] + (paddle - before[51] - (9.6 if odd else 5.5) * press) / 0.75 + 22 * press
    rest, steps = min(203, max(38, rest)), 99
    if across > 0 and before[54] and x < 188:
        steps = (188 - x) / across
        y = reflect(y + (y - before[54]) * steps, 44.5, 206.5)
    if steps <= 4:
        press = best_press(paddle, rest, math.ceil(4 * steps), odd, y)[1]
    else:
        press = 0 if abs(y - 6 - rest) <= 12 else 1 if y - 6 > rest else -1
    return ("NOOP", "LEFT", "RIGHT")[press]


def seaquest(now, before, last):
    """Just below the surface, firing to the side of an enemy; up when the air is short, and there until it is full."""
    x, depth, air = now[70], now[97], now[102]
    if depth > 13 and air <= 12:
        return "UP"
    if depth == 13 and air < 60:
        return "NOOP"
    if abs(depth - 30) > 3:
        return "DOWNFIRE" if depth < 30 else "UPFIRE"
    return "RIGHTFIRE" if now[30] > x else "LEFTFIRE"


def boxing(now, before, last):
    """Up to the other, punching; a button must be let go to punch again."""
    across, down = now[33] - now[32], now[35] - now[34]
    move = ("DOWN" if down > 12 else "UP" if down < -12 else "") + ("RIGHT" if across > 20 else "LEFT" if across < -20 else "")
    return move + "FIRE" if "FIRE" not in last else move or "NOOP"


def gopher(now, before, last):
    """Over the gopher, hitting as in boxing."""
    aim = now[41] - now[31]
    move = "" if abs(aim) <= 6 else "RIGHT" if aim > 0 else "LEFT"
    return move + "FIRE" if "FIRE" not in last else move or "NOOP"


def frostbite(now, before, last):
    """From floe to floe, down and up again."""
    y = now[100]
    return "DOWN" if y <= 60 else "UP" if y >= 100 or last == "UP" else "DOWN"


def assault(now, before, last):
    return "UP"  # which shoots


class Wanderer:
    """Random actions, each held for some steps; how many and how large they are differs between episodes."""

    def options(self, index):
        return None

    def start(self, env, observation, rng):
        self.low, self.high = env.action_space.low, env.action_space.high
        self.hold, self.scale, self.left = rng.integers(1, 16), rng.uniform(0.3, 1), 0

    def act(self, observation, rng):
        if self.left == 0:
            self.left, self.action = self.hold, self.scale * rng.uniform(self.low, self.high)
        self.left -= 1
        return self.action


class Own:
    """A policy of the user's: function (env, rng) -> function observation -> action, called at the start of each episode."""

    def __init__(self, policy):
        self.policy = policy

    def options(self, index):
        return None

    def start(self, env, observation, rng):
        self.step = self.policy(env, rng)

    def act(self, observation, rng):
        return self.step(observation)


class Galloper:
    """Runs as the cheetah by swinging each joint at its own phase, whatever it sees; an episode draws how far, and so how fast it runs."""

    # amplitude, phase, mean: the best of 384 gaits drawn in rounds, each near the best of the round before; rounded
    size, phase, shift = np.array([[2.4, 0.3, 0.9, 0.2, 0.7, 2.0], [1.6, 0.3, 1.2, -0.7, -2.0, -0.8], [-0.1, -0.1, -0.4, -0.1, 0.1, 0.2]])

    def options(self, index):
        return None

    def start(self, env, observation, rng):
        self.step, self.skill = 0, rng.uniform(0.2, 1)

    def act(self, observation, rng):
        self.step += 1
        swing = self.size * np.sin(0.88 * self.step + self.phase) + self.shift  # 3.5 times a second
        return np.clip(self.skill * swing + 0.1 * rng.standard_normal(6), -1, 1)


# ---------------------------------------------------------------- the sets


def made(name, steps, env, *parts, **rest):
    return {name: Set(name, steps, env, parts, **rest)}


def mujoco(body, env, replay, medium, expert):
    """The four sets of a body, from the levels of its stored policies."""
    replay, medium = partial(Actor, body, replay), partial(Actor, body, [medium])
    expert = partial(Actor, body, [expert], spread=0.1)  # the last level loses a fifth of its return to its own noise (hopper)
    return (
        made(f"{body}-medium", 100_000, env, medium)
        | made(f"{body}-medium-replay", 200_000, env, replay)
        | made(f"{body}-medium-expert", 200_000, env, medium, expert)
        | made(f"{body}-expert", 100_000, env, expert)
    )


def point_maze(name, steps, env, arrival):
    return made(name, steps, env, partial(Waypoints, FAR[name], arrival), kwargs=ONE_GOAL)


ANT = partial(AntFollower, [0, 1, 2, 3], noise=0.3, turn=0.6)


def ant_maze(name, steps, env, eval_task, **rest):
    return made(name, steps, env, ANT, kwargs=ONE_GOAL, eval_task=eval_task, **rest)


def atari(game, rule=None, steps=20_000, chance=(0.005, 0.3), player=Player, **rest):
    return made(game.lower(), steps, f"ALE/{game}-v5", partial(player, rule, chance), group="atari", **rest)


def control(task, player=Wanderer, **rest):
    return made(task.replace("_", "-"), 5_000, f"dm_control/{task}-v0", player, group="dmc", **rest)


UMAZE, MEDIUM = ((1, 1), (3, 1)), ((1, 1), (6, 6))  # (reset cell, goal cell) to evaluate on
SETS = (
    # hopper's levels 2 and 3 stand still for 1,000 steps: half of all transitions would be that
    mujoco("hopper", "Hopper-v5", replay=[0, 1, 4, 5, 6, 7], medium=7, expert=8)
    | mujoco("walker2d", "Walker2d-v5", replay=range(7), medium=6, expert=8)
    | mujoco("halfcheetah", "HalfCheetah-v5", replay=range(7), medium=6, expert=9)
    | made("ant-medium-replay", 100_000, "Ant-v5", ANT, kwargs={"include_cfrc_ext_in_observation": False})
    | ant_maze("antmaze-umaze", 140_000, "AntMaze_UMaze-v4", UMAZE, task=UMAZE)
    | ant_maze("antmaze-umaze-diverse", 140_000, "AntMaze_UMaze-v4", UMAZE)
    | ant_maze("antmaze-medium-play", 120_000, "AntMaze_Medium-v4", MEDIUM)
    | ant_maze("antmaze-medium-diverse", 120_000, "AntMaze_Medium_Diverse_GR-v4", MEDIUM, eval_env="AntMaze_Medium-v4")
    | point_maze("pointmaze-umaze", 75_000, "PointMaze_UMaze-v3", arrival=(100, 290))  # of 300 steps
    | point_maze("pointmaze-medium", 120_000, "PointMaze_Medium-v3", arrival=(230, 580))  # of 600
    | point_maze("pointmaze-large", 160_000, "PointMaze_Large-v3", arrival=(400, 770))  # of 800
    | atari("Breakout", breakout, 40_000, (0.15, 0.7), BreakoutPlayer, version=2)
    | atari("Pong", pong, 40_000)
    | atari("Qbert")
    | atari("Seaquest", seaquest)
    | atari("Asterix")
    | atari("Frostbite", frostbite)
    | atari("Assault", assault)
    | atari("Gopher", gopher)
    | atari("Boxing", boxing)
    | control("cheetah-run", Galloper, version=2)
    | control("ball_in_cup-catch")
    | control("finger-spin")
    | control("reacher-easy")
    | control("walker-walk")
)
SETS |= {f"maze2d-{maze}": SETS[f"pointmaze-{maze}"] for maze in ("umaze", "medium", "large")}  # another name, the same set
NAMES = {name: entry.steps for name, entry in SETS.items()}  # name -> transitions by default


# ---------------------------------------------------------------- playing


def robotics():
    """gymnasium with the robotics environments registered, without their notice about versions that nothing here uses."""
    import gymnasium as gym

    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics

        gym.register_envs(gymnasium_robotics)
    return gym


def make(spec, **kwargs):
    """gymnasium.make for an id or a spec, screens.make for one of its own, without the XML file that a maze leaves in the temporary folder."""
    from policies import screens  # here: gymnasium takes a second to import, and whoever trains on arrays needs none

    if screens.ours(spec if isinstance(spec, str) else spec.id):
        return screens.make(spec, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a newer version exists": the version is chosen to match the data
        env = robotics().make(spec, disable_env_checker=True, **kwargs)
    if xml := getattr(env.unwrapped, "tmp_xml_file_path", None):
        Path(xml).unlink(missing_ok=True)
    return env


def play(env, policy, index, rng):
    """One whole episode, number `index`, as Minari's EpisodeBuffer: T + 1 observations, T of everything else."""
    from minari.data_collector import EpisodeBuffer

    seed, discrete = int(rng.integers(2**31)), not env.action_space.shape
    observation, _ = env.reset(seed=seed, options=policy.options(index))
    policy.start(env, observation, rng)
    observations, actions, rewards, terminations, truncations = [observation], [], [], [], []
    while not (terminations and (terminations[-1] or truncations[-1])):
        action = policy.act(observation, rng)
        action = int(action) if discrete else np.asarray(action, np.float32)  # the precision stored: replayed, it gives the same episode
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
        rewards.append(reward)
        terminations.append(terminated)
        truncations.append(truncated)
    if isinstance(observation, dict):
        stacked = {key: np.array([o[key] for o in observations]) for key in observation}
    else:
        stacked = np.array(observations)
    rest = {"actions": actions, "rewards": rewards, "terminations": terminations, "truncations": truncations}
    return EpisodeBuffer(seed=seed, observations=stacked, **{key: np.array(values) for key, values in rest.items()})


def spec_of(env, kwargs, task):
    """gymnasium's record of an environment, from which it can be made again. task: (reset cell, goal cell) of a maze, or None."""
    from policies import screens

    if screens.ours(env):
        return screens.spec(env, **kwargs)
    spec = copy.deepcopy(robotics().spec(env))
    spec.kwargs.update(kwargs)
    for (i, j), letter in zip(task or (), "rg", strict=False):  # gymnasium-robotics marks them by letters on the map
        spec.kwargs["maze_map"][i][j] = letter
    return spec


# ---------------------------------------------------------------- storing


def known(name):
    """The Set of this name. Raises ValueError, with the nearest names, if there is none."""
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, 5, 0.4) or SETS
        raise ValueError(f"no set is called {name!r}; the nearest names are: {', '.join(near)}")
    return SETS[name]


def dataset_id(name):
    """Minari's id of a set, e.g. "local/pointmaze/umaze-v0". Raises ValueError for a wrong name."""
    return known(name).id


def recipe(dataset_id):
    """{"name", "steps", "seed", "version"} a stored set was made with; None where it is missing or not made here."""
    from minari.storage import get_dataset_path

    file = get_dataset_path(dataset_id) / "data" / "metadata.json"
    return json.loads(file.read_text()).get("recipe") if file.exists() else None


def collect(name, steps=None, seed=0, progress=True, policy=None):
    """Make the set, store it in the place of any older one of its id, and return the id.

    name: a key of NAMES. steps: transitions wanted; whole episodes, at most one episode more. The same
    (name, steps, seed) gives the same arrays, bit for bit, on one machine.
    policy: a player of your own in place of the set's: policy(env, rng) is called when an episode has been reset, and returns the function
    observation -> action that plays it (a float32 vector in the environment's bounds, or a number).
    Raises ValueError for a wrong name or steps < 1, OSError where Minari's folder can't be written, RuntimeError where frames of
    dm_control can't be rendered.
    """
    from minari.storage import get_dataset_path
    from tqdm import tqdm

    chosen = known(name)
    steps = chosen.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    parts = (partial(Own, policy),) if policy else chosen.parts
    record = {"name": chosen.name, "steps": steps, "seed": seed, "version": chosen.version} | ({"policy": "the user's"} if policy else {})
    root = get_dataset_path().resolve()  # minari joins a relative folder to itself
    for old in root.glob(".collecting-*"):  # left by a process that was killed
        if time.time() - old.stat().st_mtime > 86_400:
            shutil.rmtree(old, ignore_errors=True)
    # Written, episode by episode, to a hidden folder beside the others, where Minari doesn't look, and moved to its place when it
    # is whole: whatever stops us on the way, what is in that place is never half a set.
    with tempfile.TemporaryDirectory(prefix=".collecting-", dir=root) as staging:
        new, target, taken, count = Path(staging, "new"), root / chosen.id, 0, 0
        with (
            contextlib.closing(make(spec_of(chosen.env, chosen.kwargs, chosen.task))) as env,
            tqdm(total=steps, desc=name, unit="step", disable=None if progress else True) as bar,
        ):
            storage = store(new, chosen, env, record)
            for k, part in enumerate(parts):
                player = part()
                while taken < steps * (k + 1) / len(parts):
                    rng = np.random.default_rng([seed, count])  # of this episode alone: more episodes change no other
                    episode = play(env, player, count, rng)
                    storage.update_episodes([episode])
                    taken, count = taken + len(episode.rewards), count + 1
                    bar.update(min(taken, steps) - bar.n)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(Path(staging, "old"))
        new.rename(target)
    return chosen.id


def store(folder, chosen, env, record):
    """Begin a Minari set in `folder` and return its storage; minari.create_dataset_from_buffers can only write to the final place, all at once."""
    import minari
    from minari.dataset.minari_storage import MinariStorage

    (folder / "data").mkdir(parents=True)
    spec = spec_of(chosen.env, chosen.kwargs, chosen.task)
    # jpeg_encoding: Minari would store frames by JPEG, which moves pixels
    storage = MinariStorage.new(folder / "data", env.observation_space, env.action_space, spec, jpeg_encoding=False)
    metadata = {
        "dataset_id": chosen.id,
        "minari_version": minari.__version__,
        "eval_env_spec": spec_of(chosen.eval_env or chosen.env, chosen.kwargs, chosen.eval_task).to_json(),
        "algorithm_name": "policies/collect.py",
        "description": f"Made offline by policies/collect.py: {record}. A stand-in, not the published data.",
        "recipe": record,
    }
    storage.update_metadata(metadata)
    return storage


def main(argv=None):
    parser = argparse.ArgumentParser(description="Make a data set again, offline and seeded, and store it for Minari.")
    parser.add_argument("name", help=", ".join(f"{name} ({steps:,} steps)" for name, steps in NAMES.items()))
    parser.add_argument("--steps", type=int, help="transitions (default: the number in the list of names)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        print(f"stored {collect(args.name, args.steps, args.seed)}")
    except (ValueError, RuntimeError, ImportError) as error:  # a wrong name, nothing that renders, a package that is missing
        print(f"collect.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"collect.py: can't write the sets ({error}); set MINARI_DATASETS_PATH to a folder that you can write", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
