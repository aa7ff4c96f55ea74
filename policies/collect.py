"""Make the data sets of this project again, offline and seeded: python policies/collect.py NAME --steps N --seed S

A set is episodes of a scripted or stored policy (README.md beside this file) in gymnasium's own environments, so every
observation, reward and end is the environment's. The sets are stored as Minari stores its own, and
`minari.load_dataset(id)` reads them. They are stand-ins of the same kind as D4RL's, not the published data.
"""

import argparse
import copy
import difflib
import functools
import json
import os
import shutil
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

VERSION = 1  # raise it when the same (name, steps, seed) would give other numbers than before


@dataclass(frozen=True)
class Set:
    """How one set is made. The parts share `steps` equally, one after the other."""

    id: str  # Minari's name of it
    env: str  # gymnasium's name
    steps: int  # transitions by default
    parts: tuple  # functions () -> policy
    kwargs: dict = field(default_factory=dict)  # of the environment
    eval_kwargs: dict | None = None  # where the environment to evaluate in differs
    slots: int = 1  # environments played side by side, for one batched evaluation of the policy


# The pair of cells with the longest way between them: the hardest task of a maze, and one fixed task to evaluate on.
FAR = {
    "pointmaze-umaze": {"reset_cell": [1, 1], "goal_cell": [3, 1]},
    "pointmaze-medium": {"reset_cell": [1, 1], "goal_cell": [6, 5]},
    "pointmaze-large": {"reset_cell": [7, 1], "goal_cell": [7, 10]},
}


# ---------------------------------------------------------------- policies: reset(episode, env), act(episodes) -> (n, A)


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


def aim(maze, step, xy, goal):
    """Where to head from `xy`: the centre of the NEXT cell, so as not to stop at centres; in the goal's cell, the goal."""
    cell = tuple(maze.cell_xy_to_rowcol(xy))
    return goal if step[cell] == cell else maze.cell_rowcol_to_xy(step[cell])


class Waypoints:
    """Pushes the point mass along the shortest way at a speed that differs between episodes, so that returns spread.

    far: {"reset_cell", "goal_cell"} of one episode in five; the others start and end where the environment says.
    arrival: (low, high) steps; the episode's arrival time is uniform in it.
    """

    def __init__(self, far, arrival):
        self.far, self.arrival = far, arrival

    def options(self, episode):
        return self.far if episode.index % 5 == 0 else None

    def reset(self, episode, env):
        rng, maze = episode.rng, env.unwrapped.maze
        start, goal = episode.observations[0]["achieved_goal"], episode.observations[0]["desired_goal"]
        step = next_cells(maze.maze_map, tuple(maze.cell_xy_to_rowcol(goal)))
        way, cell = [start], tuple(maze.cell_xy_to_rowcol(start))
        while step[cell] != cell:
            cell = step[cell]
            way.append(maze.cell_rowcol_to_xy(cell))
        way = np.array(way[:-1] + [goal] if len(way) > 1 else way + [goal])
        distance = np.linalg.norm(np.diff(way, axis=0), axis=1).sum() - 0.45  # 0.45 m from the goal is there
        seconds = 0.01 * rng.uniform(*self.arrival)
        speed = np.clip(distance / seconds, 0.8, 5)  # m/s; the environment allows 5, and below 0.8 a model learns to stand still
        noise = 0.2 if rng.random() < 0.25 else 0.05
        episode.plan = maze, step, goal, speed, noise

    def act(self, episodes):
        return np.array([self.push(episode) for episode in episodes])

    def push(self, episode):
        maze, step, goal, speed, noise = episode.plan
        state = episode.observations[-1]["observation"]
        way = aim(maze, step, state[:2], goal) - state[:2]
        distance = np.linalg.norm(way)
        if step[cell := tuple(maze.cell_xy_to_rowcol(state[:2]))] == cell:
            speed = min(speed, 6 * distance)  # brake
        wanted = speed * way / max(distance, 1e-6)
        return np.clip(wanted - state[2:] + noise * episode.rng.standard_normal(2), -1, 1)


class Actor:
    """A stored actor: three dense layers of an .npz beside this file, levels of rising skill.

    levels, noise: an episode draws one of the levels, and a uniform scale (low, high) of the actor's own spread:
    1 is the policy as it was trained, 0 its mean.
    """

    def __init__(self, body, levels, noise=(1, 1)):
        with np.load(Path(__file__).with_name(f"{body}.npz")) as file:
            self.nets = {n: [file[f"{n}/{key}"].astype(np.float32) for key in ("w0", "b0", "w1", "b1", "w2", "b2")] for n in levels}
        self.levels, self.noise = levels, noise

    def options(self, episode):
        return None

    def reset(self, episode, env):
        episode.plan = int(episode.rng.choice(self.levels)), episode.rng.uniform(*self.noise)

    def act(self, episodes):
        inputs = np.array([self.inputs(episode) for episode in episodes], np.float32)  # (n, S)
        levels = np.array([episode.plan[0] for episode in episodes])
        out = None
        for level in np.unique(levels):  # one product for all episodes of a level
            w0, b0, w1, b1, w2, b2 = self.nets[level]
            h = np.maximum(inputs[levels == level] @ w0.T + b0, 0)
            h = np.maximum(h @ w1.T + b1, 0) @ w2.T + b2
            out = np.zeros((len(episodes), h.shape[1]), np.float32) if out is None else out
            out[levels == level] = h
        mean, raw = np.split(out, 2, axis=1)  # (n, A) each
        spread = np.exp(-5 + 3.5 * (np.tanh(raw) + 1))
        normal = np.array([episode.plan[1] * episode.rng.standard_normal(mean.shape[1]) for episode in episodes])
        return np.tanh(mean + spread * normal)

    def inputs(self, episode):
        return episode.observations[-1]


class AntFollower(Actor):
    """The ant's actor, which runs in a wanted direction: along the shortest way of a maze, or along +x on the plain.

    levels: as of Actor. noise, turn: (low, high) of an episode's standard deviations, of what is added to each action
    and, in radians, to each wanted direction.
    """

    def __init__(self, levels, noise, turn):
        super().__init__("ant", levels)
        self.added, self.turn = noise, turn

    def reset(self, episode, env):
        rng = episode.rng
        goal = maze = step = None
        if isinstance(episode.observations[0], dict):
            maze, goal = env.unwrapped.maze, episode.observations[0]["desired_goal"]
            step = next_cells(maze.maze_map, tuple(maze.cell_xy_to_rowcol(goal)))
        episode.plan = int(rng.choice(self.levels)), 1.0, rng.uniform(*self.added), rng.uniform(*self.turn), maze, step, goal

    def act(self, episodes):
        noise = np.array([episode.plan[2] * episode.rng.standard_normal(8) for episode in episodes])
        return np.clip(super().act(episodes) + noise, -1, 1)

    def inputs(self, episode):
        """29 numbers: the ant's state seen from its own heading, and the wanted direction there."""
        *_, turn, maze, step, goal = episode.plan
        observation = episode.observations[-1]
        angle = turn * episode.rng.standard_normal()
        if maze is not None:
            x, y = aim(maze, step, observation["achieved_goal"], goal) - observation["achieved_goal"]
            angle += np.arctan2(y, x)
            observation = observation["observation"]
        w, x, y, z = observation[1:5]
        yaw = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        c, s = np.cos(yaw / 2), np.sin(yaw / 2)
        upright = np.array([c * w + s * z, c * x + s * y, c * y - s * x, c * z - s * w])  # yaw taken out: (c, 0, 0, -s) * quaternion
        upright *= 1 if upright[0] >= 0 else -1
        c, s = np.cos(yaw), np.sin(yaw)
        vx, vy, vz = observation[13:16]
        velocity = c * vx + s * vy, c * vy - s * vx, vz
        wanted = np.cos(angle - yaw), np.sin(angle - yaw)
        return np.concatenate([observation[:1], upright, observation[5:13], velocity, observation[16:], wanted])


# ---------------------------------------------------------------- the sets


def point_maze(name, steps, arrival):
    env = {"umaze": "PointMaze_UMaze-v3", "medium": "PointMaze_Medium-v3", "large": "PointMaze_Large-v3"}[name]
    part = functools.partial(Waypoints, FAR[f"pointmaze-{name}"], arrival)
    return Set(f"local/pointmaze/{name}-v0", env, steps, (part,), {"continuing_task": True, "reset_target": False})


SETS = {
    "pointmaze-umaze": point_maze("umaze", 75_000, (100, 290)),
    "pointmaze-medium": point_maze("medium", 120_000, (230, 580)),
    "pointmaze-large": point_maze("large", 160_000, (400, 770)),
}
SETS |= {f"maze2d-{maze}": SETS[f"pointmaze-{maze}"] for maze in ("umaze", "medium", "large")}  # another name, the same set
NAMES = {name: made.steps for name, made in SETS.items()}  # name -> transitions by default


# ---------------------------------------------------------------- playing


class Episode:
    """One episode while it grows. Its generator is its own, so that its numbers don't depend on the others'."""

    def __init__(self, index, rng, policy, env):
        self.index, self.rng, self.env = index, rng, env
        observation, _ = env.reset(seed=int(rng.integers(2**31)), options=policy.options(self))
        self.observations, self.actions, self.rewards, self.terminations, self.truncations = [observation], [], [], [], []
        policy.reset(self, env)

    def step(self, action):
        """True when the episode has ended."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.observations.append(observation)
        self.actions.append(action)
        self.rewards.append(reward)
        self.terminations.append(terminated)
        self.truncations.append(truncated)
        return terminated or truncated

    def buffer(self):
        from minari.data_collector import EpisodeBuffer

        if isinstance(self.observations[0], dict):
            observations = {key: np.array([o[key] for o in self.observations]) for key in self.observations[0]}
        else:
            observations = np.array(self.observations)  # (T + 1, S)
        return EpisodeBuffer(observations=observations, actions=np.array(self.actions), rewards=np.array(self.rewards),
                             terminations=np.array(self.terminations), truncations=np.array(self.truncations))


def make(spec):
    """An environment of this spec, without the XML file that a maze leaves in the temporary folder."""
    import gymnasium as gym

    env = gym.make(spec, disable_env_checker=True)
    if xml := getattr(env.unwrapped, "tmp_xml_file_path", None):
        Path(xml).unlink(missing_ok=True)
    return env


def play(spec, policy, steps, seed, slots, bar):
    """Whole episodes of at least `steps` transitions and at most one episode more, as a list of Minari's EpisodeBuffer.

    `slots` episodes run side by side. They are kept in the order in which they began: to keep those that end
    first would favour short ones.
    """
    idle, running, done = [], [], []
    begun = taken = 0
    while running or taken < steps:
        while taken + len(running) < steps and len(running) < slots:
            env = idle.pop() if idle else make(spec)
            running.append(Episode(begun, np.random.default_rng([*seed, begun]), policy, env))
            begun += 1
        ended = [e.step(a) for e, a in zip(running, policy.act(running).astype(np.float32), strict=True)]
        taken += len(running)
        bar.update(min(len(running), max(0, bar.total - bar.n)))
        for episode in [e for e, end in zip(running, ended, strict=True) if end]:
            running.remove(episode)
            idle.append(episode.env)
            done.append(episode)
    for env in idle:
        env.close()
    done.sort(key=lambda episode: episode.index)
    ends = np.cumsum([len(episode.rewards) for episode in done])
    return [episode.buffer() for episode in done[: np.searchsorted(ends, steps) + 1]]


def spec_of(env, kwargs):
    import gymnasium as gym
    import gymnasium_robotics

    gym.register_envs(gymnasium_robotics)
    spec = copy.deepcopy(gym.spec(env))
    spec.kwargs.update(kwargs)
    return spec


# ---------------------------------------------------------------- storing


def root():
    """Minari's own rule for where the sets are."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()


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
    file = root() / dataset_id / "data" / "metadata.json"
    return json.loads(file.read_text()).get("recipe") if file.exists() else None


def collect(name, steps=None, seed=0, progress=True):
    """Make the set, store it in the place of any older one of its id, and return the id.

    name: a key of NAMES. steps: transitions wanted; whole episodes, at most one episode more. The same
    (name, steps, seed) gives the same arrays, bit for bit, on one machine.
    Raises ValueError for a wrong name or steps < 1, OSError where Minari's folder can't be written.
    """
    from tqdm import tqdm

    made = known(name)
    steps = made.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    root().mkdir(parents=True, exist_ok=True)
    # The new set grows in a hidden folder of the same disk, which Minari doesn't list, and moves in when it is whole.
    with tempfile.TemporaryDirectory(prefix=".collecting-", dir=root()) as staging:
        spec = spec_of(made.env, made.kwargs)
        episodes = []
        with tqdm(total=steps, desc=name, unit="step", disable=not progress) as bar:
            for k, part in enumerate(made.parts):
                wanted = steps * (k + 1) // len(made.parts) - sum(len(e.rewards) for e in episodes)
                episodes += play(spec, part(), wanted, (seed, k), made.slots, bar)
        eval_spec = spec if made.eval_kwargs is None else spec_of(made.env, made.eval_kwargs)
        record = {"name": name, "steps": steps, "seed": seed, "version": VERSION}
        store(Path(staging, "new"), made.id, spec, eval_spec, episodes, record)
        target = root() / made.id
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(Path(staging, "old"))
        try:
            Path(staging, "new").rename(target)
        except BaseException:
            shutil.move(Path(staging, "old"), target)
            raise
    return made.id


def store(folder, dataset_id, spec, eval_spec, episodes, record):
    """Write a Minari set to `folder`. (minari.create_dataset_from_buffers writes to the final place only.)"""
    import minari
    from minari.dataset.minari_storage import MinariStorage

    env = make(spec)
    (folder / "data").mkdir(parents=True)
    storage = MinariStorage.new(folder / "data", env.observation_space, env.action_space, spec)
    env.close()
    storage.update_metadata({
        "dataset_id": dataset_id,
        "minari_version": minari.__version__,
        "eval_env_spec": eval_spec.to_json(),
        "algorithm_name": "policies/collect.py",
        "description": f"Collected offline by policies/collect.py as {record}; not the published data.",
        "recipe": record,
    })
    storage.update_episodes(episodes)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Make a data set again, offline and seeded, and store it for Minari.")
    parser.add_argument("name", help=", ".join(f"{name} ({steps:,} steps)" for name, steps in NAMES.items()))
    parser.add_argument("--steps", type=int, help="transitions (default: the number in the list of names)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        made = collect(args.name, args.steps, args.seed)
    except (ValueError, OSError) as error:
        print(f"collect.py: {error}", file=sys.stderr)
        return 2
    print(f"stored {made} in {root()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
