"""The policies that play the sets of collect.py: functions (env, first observation, rng) -> act.

Each is called when an episode has been reset, and draws what differs between episodes. act(observation)
returns an action, (A,) in [-1, 1] or a number.
"""
import itertools
import math
from collections import deque
from functools import cache
from pathlib import Path

import numpy as np

# ----- mazes

def next_cells(maze_map, goal):
    """{free cell: the next one of a shortest way to `goal`}, by breadth-first search."""
    step, queue = {goal: goal}, deque([goal])
    while queue:
        i, j = queue.popleft()
        for cell in ((i, j + 1), (i + 1, j), (i, j - 1), (i - 1, j)):
            if cell not in step and maze_map[cell[0]][cell[1]] != 1:
                step[cell] = (i, j)
                queue.append(cell)
    return step


class Way:
    """The shortest way to the goal of a maze, from an episode's first observation."""

    def __init__(self, env, first):
        self.maze, self.goal = env.unwrapped.maze, first["desired_goal"]
        self.last = self.cell(self.goal)
        self.next = next_cells(self.maze.maze_map, self.last)
        points, cell = [first["achieved_goal"]], self.next[self.cell(first["achieved_goal"])]
        while cell != self.last:
            points.append(self.maze.cell_rowcol_to_xy(cell))
            cell = self.next[cell]
        self.length = np.linalg.norm(np.diff([*points, self.goal], axis=0), axis=1).sum()     # m

    def cell(self, xy):
        return tuple(self.maze.cell_xy_to_rowcol(xy))

    def ahead(self, xy):
        """(vector to the centre of the next cell or, in its cell, to the goal; whether to the goal)."""
        cell = self.cell(xy)
        arriving = cell == self.last
        end = self.goal if arriving else self.maze.cell_rowcol_to_xy(self.next[cell])
        return end - xy, arriving


def waypoints(env, first, rng, arrival, noise=None):
    """Pushes the point along the shortest way, to arrive after a number of steps uniform in `arrival`.

    noise: standard deviation of what is added to actions; without one, small and drawn for each episode.
    """
    way = Way(env, first)
    seconds = 0.01 * rng.uniform(*arrival)
    # m/s: 0.45 m from the goal is there, 5 is the limit; from slower ones models learn to stand still.
    cruise = np.clip((way.length - 0.45) / seconds, 0.8, 5)
    if noise is None:
        noise = 0.2 if rng.random() < 0.25 else 0.05

    def act(observation):
        position, velocity = np.split(observation["observation"], 2)
        ahead, arriving = way.ahead(position)
        distance = np.linalg.norm(ahead)
        speed = min(cruise, 6 * distance) if arriving else cruise       # brakes at the goal only
        wanted = speed * ahead / max(distance, 1e-9)
        return np.clip(wanted - velocity + noise * rng.standard_normal(2), -1, 1)
    return act


# ----- bodies

@cache
def stored_actor(body, level):
    """[w0, b0, w1, b1, w2, b2], float32, of a level of a body's .npz."""
    with np.load(Path(__file__).with_name(f"{body}.npz")) as file:
        return [file[f"{level}/{kind}{i}"].astype(np.float32) for i in range(3) for kind in "wb"]


def actor(env, first, rng, body, levels, spread=1.0):
    """A stored actor, at a level drawn from `levels`.

    spread: factor on its own standard deviation, or the two ends of what one is drawn from for each episode.
    """
    w0, b0, w1, b1, w2, b2 = stored_actor(body, levels[rng.integers(len(levels))])
    if isinstance(spread, tuple):
        spread = rng.uniform(*spread)

    def act(inputs):
        h = np.maximum(w0 @ inputs.astype(np.float32) + b0, 0)
        h = np.maximum(w1 @ h + b1, 0)
        mean, raw = np.split(w2 @ h + b2, 2)        # (A,) each
        std = np.exp(-5 + 3.5 * (np.tanh(raw) + 1))
        return np.tanh(mean + spread * std * rng.standard_normal(len(mean)))
    return act


def ant(env, first, rng):
    """The ant's actor, told to run along +x; or, at its last level, along the shortest way of a maze.

    In a maze each episode draws how hard it pushes: with all of its force it soon lies on its back. Where a
    maze has several goals, the goal moves after 50 steps at it.
    """
    way = Way(env, first) if isinstance(first, dict) else None
    run = actor(env, first, rng, "ant", [3] if way else range(4))
    noise, turn = rng.uniform(0, (0.2, 0.4) if way else (0.3, 0.6))     # of the action; radians
    force = rng.uniform(0.4, 0.8) if way else 1.0
    stayed = 0

    def act(observation):
        nonlocal way, stayed
        ahead = (1, 0)
        if way:
            place, goal = observation["achieved_goal"], observation["desired_goal"]
            if (goal != way.goal).any():
                way, stayed = Way(env, observation), 0
            stayed += np.linalg.norm(place - goal) <= 0.45
            # else the ant would be at its goal in 44 % of umaze-diverse's steps, and not in 18 %
            env.unwrapped.reset_target = bool(stayed >= 50)
            ahead, _ = way.ahead(place)
            observation = observation["observation"]
        angle = np.arctan2(ahead[1], ahead[0]) + turn * rng.standard_normal()
        action = force * run(seen_from_heading(observation, angle))
        return np.clip(action + noise * rng.standard_normal(8), -1, 1)
    return act


def seen_from_heading(observation, angle):
    """(29,): the ant's 27 numbers as seen from its heading, and the direction wanted, angle radians."""
    w, x, y, z = observation[1:5]
    yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    c, s = np.cos(yaw / 2), np.sin(yaw / 2)
    tilt = np.array([c * w + s * z, c * x + s * y, c * y - s * x, c * z - s * w])   # quaternion without yaw
    tilt = tilt if tilt[0] >= 0 else -tilt
    c, s = np.cos(yaw), np.sin(yaw)
    vx, vy, vz = observation[13:16]
    velocity = c * vx + s * vy, c * vy - s * vx, vz
    wanted = np.cos(angle - yaw), np.sin(angle - yaw)
    return np.concatenate([observation[:1], tilt, observation[5:13], velocity, observation[16:], wanted])


# ----- DeepMind Control

def wanderer(env, first, rng):
    """Random actions. An episode draws how long each is held, and how large they are."""
    low, high = env.action_space.low, env.action_space.high
    hold, scale = rng.integers(1, 16), rng.uniform(0.3, 1)
    steps, action = itertools.count(), None

    def act(observation):
        nonlocal action
        if next(steps) % hold == 0:
            action = scale * rng.uniform(low, high)
        return action
    return act


# How each joint of the cheetah swings, found by random search.
SIZE, PHASE, MEAN = np.array([
    [2.4, 0.3, 0.9, 0.2, 0.7, 2.0],
    [1.6, 0.3, 1.2, -0.7, -2.0, -0.8],
    [-0.1, -0.1, -0.4, -0.1, 0.1, 0.2],
])


def galloper(env, first, rng):
    """Swings the cheetah's joints, whatever it sees. An episode draws how far, and so how fast."""
    skill, steps = rng.uniform(0.2, 1), itertools.count(1)

    def act(observation):
        swing = SIZE * np.sin(0.88 * next(steps) + PHASE) + MEAN       # 3.5 times a second
        return np.clip(skill * swing + 0.1 * rng.standard_normal(6), -1, 1)
    return act


# ----- Atari

class Player:
    """Plays a game of Atari by a rule, broken by stretches of one random action held.

    rule: (memory, memory a step before, last action) -> action, of the emulator's 128 bytes. It reads what a
    model can see in a few frames. None: stretches only.
    chance: (low, high) of beginning a stretch in a step, drawn log-uniformly for each episode.
    """

    def __init__(self, env, first, rng, rule=None, chance=(0.005, 0.3)):
        self.ale, self.names = env.unwrapped.ale, env.unwrapped.get_action_meanings()
        self.rng, self.rule = rng, rule
        self.chance = np.exp(rng.uniform(*np.log(chance))) if rule else 1
        self.longest, self.left = rng.integers(1, 16), 0
        self.before, self.last = self.memory(), "NOOP"

    def memory(self):
        return self.ale.getRAM().tolist()       # integers: differences of bytes would wrap

    def __call__(self, frame):
        now = self.memory()
        self.last = self.held_action(now) or self.rule(now, self.before, self.last)
        self.before = now
        return self.names.index(self.last)

    def held_action(self, now):
        """The action of a stretch, or None outside of one."""
        if self.left == 0 and self.rng.random() < self.chance:
            self.left = self.rng.integers(1, self.longest, endpoint=True)
            self.held = self.names[self.rng.integers(len(self.names))]
        if self.left == 0:
            return None
        self.left -= 1
        return self.held


class BreakoutPlayer(Player):
    """Its paddle stands still in the last quarter of a share `chance` of the ball's falls: games are short.

    All other actions are the rule's, which a small model can learn.
    """

    falling = False

    def held_action(self, now):
        falling = now[101] > 150 and now[101] > self.before[101]
        if falling and not self.falling:
            self.still = self.rng.random() < self.chance
        self.falling = falling
        return "FIRE" if falling and self.still else None


# The rules. The meaning of each byte was found by looking at the screen.

def toward(off, near, less, more):
    """less or more, the direction of what is `off` away; "" within `near`."""
    if abs(off) <= near:
        return ""
    return more if off > 0 else less


def breakout(now, before, last):
    """Follows the ball. It stands still by FIRE, which serves: who learns from it serves too."""
    x, y, paddle = now[99], now[101], now[72]
    if y == 0:
        return "FIRE"       # no ball is in play
    moved = x - before[99]
    if before[101] == 0 or abs(moved) > 30:
        moved = 0
    # a step ahead; a press moves the paddle by 11 in its own step and by 11 in the next
    off = x + moved - 9 - paddle - {"RIGHT": 11, "LEFT": -11}.get(last, 0)
    return toward(off, 8, "LEFT", "RIGHT") or "FIRE"


def pong(now, before, last):
    """Returns the ball, and if it can too steeply for the other side."""
    x, y, paddle, odd = now[49], now[54], now[51], now[8] & 1
    if y == 0:
        return "NOOP"       # no ball is in play
    across = x - before[49]
    press = ("LEFT" in last) - ("RIGHT" in last)        # LEFT is down, where byte 51 grows
    rest = before[51] + (paddle - before[51] - (9.6 if odd else 5.5) * press) / 0.75 + 22 * press
    rest = min(203, max(38, rest))
    frames = math.inf       # until the ball arrives
    if across > 0 and before[54] and x < 188:
        steps = (188 - x) / across
        y = reflect(y + (y - before[54]) * steps, 44.5, 206.5)
        frames = math.ceil(4 * steps)
    if frames > 16:
        return toward(y - 6 - rest, 12, "RIGHT", "LEFT") or "NOOP"

    def worth(presses):
        off = glide(paddle, rest, presses, frames, odd) - y + 6     # beyond 8 the ball is missed
        steep = 6 <= off <= 8 if y > 125 else -9 <= off <= -7       # by the end towards the farther wall
        if steep and 78 < y < 173:
            return 2
        return 1 if abs(off) <= 8 else -abs(off)

    rows = itertools.product((0, 1, -1), repeat=math.ceil(frames / 4))
    press = max(rows, key=lambda row: (worth(row), row[0] == 0, row[0]))[0]
    return ("NOOP", "LEFT", "RIGHT")[press]


def reflect(x, low, high):
    """Where a ball that would get to x is, between two walls."""
    x = (x - low) % (2 * (high - low))
    return low + min(x, 2 * (high - low) - x)


def glide(paddle, rest, presses, frames, odd):
    """Where Pong's paddle is some frames on. A press lasts four of them, and moves its place of rest."""
    for frame in range(frames):
        if (frame + odd) % 2 == 0:
            paddle += (rest - paddle) / 2
        rest = min(203, max(38, rest + 5.5 * presses[frame // 4]))
    return paddle


def seaquest(now, before, last):
    """Fires to the side of an enemy; up when air is short, until it is full."""
    x, enemy, depth, air = now[70], now[30], now[97], now[102]
    if depth > 13 and air <= 12:
        return "UP"
    if depth == 13 and air < 60:
        return "NOOP"
    return toward(depth - 30, 3, "DOWNFIRE", "UPFIRE") or ("RIGHTFIRE" if enemy > x else "LEFTFIRE")


def hit(move, last):
    """The move with FIRE, unless it was pressed before: it must be let go to hit again."""
    return move + "FIRE" if "FIRE" not in last else move or "NOOP"


def boxing(now, before, last):
    move = toward(now[35] - now[34], 12, "UP", "DOWN") + toward(now[33] - now[32], 20, "LEFT", "RIGHT")
    return hit(move, last)


def gopher(now, before, last):
    return hit(toward(now[41] - now[31], 6, "LEFT", "RIGHT"), last)


def frostbite(now, before, last):
    y = now[100]        # from floe to floe
    return "UP" if y >= 100 or y > 60 and last == "UP" else "DOWN"


def assault(now, before, last):
    return "UP"     # which shoots
