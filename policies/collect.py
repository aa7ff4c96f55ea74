"""Make stand-ins for published data sets, offline: python data.py collect NAME --steps N --seed S

A set is episodes of policies of players.py in gymnasium's environments or those of screens.py.
"""
import contextlib
import copy
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import envs
from errors import UserError, explained, nearest
from policies import players, screens, tasks
from policies.players import BreakoutPlayer, Player, actor, ant, galloper, wanderer, waypoints

# transitions a second on one core
SPEED = {"hopper": 6000, "walker2d": 6000, "halfcheetah": 12_000, "ant": 2000, "antmaze": 1500,
         "maze2d": 10_000, "atari": 500, "dmc": 15, "tasks": 1000}


@dataclass(frozen=True)
class Set:
    """One set. envs.ENVS has its environment under the same name."""
    name: str
    steps: int              # transitions by default
    parts: list             # policies; each makes equally many of the transitions
    version: int = 1        # raised when the set becomes another one
    env: str = ""           # where it isn't that of the evaluation
    fixed: bool = False     # whether an antmaze has the start and goal of its evaluation

    @property
    def id(self):
        group = envs.ENVS[self.name].family
        path = self.name.replace("-", "/", 1)
        if group in ("atari", "dmc", "tasks"):
            path = f"{group}/{self.name}"
        return f"local/{path}-v0"

    def spec(self, evaluation=False):
        """The EnvSpec of the environment that the set is made in, or evaluated in."""
        env = envs.ENVS[self.name]
        id = env.id if evaluation else self.env or env.id
        if screens.ours(id):
            return screens.spec(id, **env.kwargs)
        spec = copy.deepcopy(envs.robotics().spec(id))
        spec.kwargs.update(env.kwargs)
        if "fixed" in env.starts and (evaluation or self.fixed):
            for (i, j), mark in zip(env.starts["fixed"].values(), "rg", strict=True):
                spec.kwargs["maze_map"][i][j] = mark        # reset, goal
        return spec


def body(name, replay, medium, expert, more=(), version=1):
    """The four sets of a body, from levels of its stored actor. more: policies in medium-replay, beside."""
    play = partial(actor, body=name)
    medium = partial(play, levels=[medium])
    expert = partial(play, levels=[expert], spread=0.1)     # 1 costs the hopper a fifth of its return
    return [
        Set(f"{name}-medium", 100_000, [medium]),
        Set(f"{name}-medium-replay", 200_000, [partial(play, levels=replay), *more], version),
        Set(f"{name}-medium-expert", 200_000, [medium, expert]),
        Set(f"{name}-expert", 100_000, [expert]),
    ]


def maze(name, version=4, **where):
    return Set(f"antmaze-{name}", 600_000, [ant], version, **where)         # models learn 140,000 by heart


def atari(name, steps=20_000):
    rule = getattr(players, name, None)     # without one, Player presses at random
    return Set(name, steps, [partial(Player, rule=rule)])


SETS = [
    # hopper's levels 2 and 3 stand still: half of all transitions would be that. The others fall by accident,
    # and no model can aim at such returns: so half hops well, with more noise or less
    *body("hopper", replay=[0, 1, 4, 5, 6, 7], medium=7, expert=8, version=2,
          more=[partial(actor, body="hopper", levels=[8], spread=(0, 1))]),
    *body("walker2d", replay=range(7), medium=6, expert=8, version=2,
          more=[partial(actor, body="walker2d", levels=[8], spread=(0, 1))]),
    *body("halfcheetah", replay=range(7), medium=6, expert=9),
    Set("ant-medium-replay", 100_000, [ant]),
    maze("umaze", version=3, fixed=True),
    maze("umaze-diverse"),
    maze("medium-play"),
    maze("medium-diverse", env="AntMaze_Medium_Diverse_GR-v4"),
    maze("large-play"),
    maze("large-diverse", env="AntMaze_Large_Diverse_GR-v4"),
    Set("pointmaze-umaze", 75_000, [partial(waypoints, arrival=(100, 290))]),       # of 300 steps
    # of 600 and 800 steps; D4RL's script can add as much noise. With less, small models learn to repeat their
    # past actions, and stand still on the way
    Set("pointmaze-medium", 600_000, [partial(waypoints, arrival=(230, 580), noise=0.5)], version=2),
    Set("pointmaze-large", 800_000, [partial(waypoints, arrival=(400, 770), noise=0.5)], version=2),
    Set("breakout", 40_000, [partial(BreakoutPlayer, rule=players.breakout, chance=(0.15, 0.7))], version=2),
    atari("pong", 40_000),
    *map(atari, ("qbert", "seaquest", "asterix", "frostbite", "assault", "gopher", "boxing")),
    Set("cheetah-run", 5_000, [galloper], version=3),
    *(Set(name, 5_000, [wanderer], version=2)
      for name in ("ball-in-cup-catch", "finger-spin", "reacher-easy", "walker-walk")),
    # about 40 episodes for each training task, 20 for those of metaworld-ml10, 10 for metaworld-ml45
    Set("cheetah-vel", 280_000, [tasks.pacer], version=2),
    Set("ant-dir", 360_000, [tasks.runner], version=2),
    Set("metaworld-ml10", 100_000, [tasks.sawyer]),
    Set("metaworld-ml45", 225_000, [tasks.sawyer]),
]
SETS = {entry.name: entry for entry in SETS}
SETS |= {f"maze2d-{size}": SETS[f"pointmaze-{size}"] for size in ("umaze", "medium", "large")}


def play(env, policy, rng, options=None):
    """One whole episode: T + 1 observations, T of everything else."""
    from minari.data_collector import EpisodeBuffer

    seed = int(rng.integers(2**31))
    observation, _ = env.reset(seed=seed, options=options)
    act = policy(env, observation, rng)
    observations, steps, ended = [observation], [], False
    while not ended:
        action = act(observation)
        # as it is stored: replayed, it gives the same episode
        action = np.asarray(action, np.float32) if env.action_space.shape else int(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        steps.append((action, reward, terminated, truncated))
        ended = terminated or truncated
    if isinstance(observation, dict):
        observations = {key: np.array([o[key] for o in observations]) for key in observation}
    else:
        observations = np.array(observations)
    return EpisodeBuffer(None, seed, None, observations, *map(np.array, zip(*steps, strict=True)))


def play_all(chosen, policy, seed, numbers):
    """Play the episodes of these numbers, each with a generator of its own: the same whoever plays it."""
    starts = envs.ENVS[chosen.name].starts
    with contextlib.closing(envs.make(chosen.spec())) as env:
        for n in numbers:
            # the far pair of a maze in one episode of five; the training tasks in all
            options = starts.get("seen", starts.get("far") if n % 5 == 0 else None)
            yield play(env, policy, np.random.default_rng([seed, n]), options)


def send_all(pipe, *what):
    """play_all in a process of its own, which waits for the reader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is for the first process
    with contextlib.suppress(BrokenPipeError):
        for episode in play_all(*what):
            pipe.send(episode)


def play_on_cores(cores, chosen, policy, seed, first):
    """Play the episodes first, first + 1, ..., each process every cores-th one."""
    if cores == 1:
        yield from play_all(chosen, policy, seed, range(first, sys.maxsize))
    spawn, pipes, processes = multiprocessing.get_context("spawn"), [], []
    try:
        for k in range(cores):
            numbers = range(first + k, sys.maxsize, cores)
            pipe, end = spawn.Pipe(duplex=False)
            process = spawn.Process(target=send_all, args=(end, chosen, policy, seed, numbers), daemon=True)
            process.start()
            end.close()     # so that its death is noticed
            pipes.append(pipe)
            processes.append(process)
        for pipe in itertools.cycle(pipes):
            try:
                episode = pipe.recv()
            except (EOFError, OSError) as error:        # OSError: in the middle of an episode
                raise UserError("a process has ended: its words are above, or memory ran out") from error
            yield episode
    finally:
        for process in processes:
            process.terminate()
            process.join()


def recipe(id):
    """{"name", "steps", "seed", "version"} of a stored set, or None where it isn't made here."""
    from minari.storage import get_dataset_path

    file = get_dataset_path(id) / "data" / "metadata.json"
    return json.loads(file.read_text()).get("recipe") if file.exists() else None


def collect(name, steps=None, seed=0, progress=True, policy=None):
    """Make the set, store it in the place of any older one of its id, and return the id.

    steps: transitions; the last episode is whole. The same (name, steps, seed) gives the same bits on any
    number of one machine's cores. policy: one of your own, played on one core: policy(env, rng), called when
    an episode has been reset, returns the function observation -> action.
    Raises UserError for wrong arguments and for what can't be made.
    """
    if name not in SETS:
        raise UserError(f"no set is called {name!r}; {nearest(name, SETS)}")
    chosen = SETS[name]
    steps = chosen.steps if steps is None else steps
    if steps < 1 or seed < 0:
        raise UserError(f"steps must be at least 1 and seed at least 0, not {steps} and {seed}")
    record = {"name": chosen.name, "steps": steps, "seed": seed, "version": chosen.version}
    parts, cores = chosen.parts, min(os.cpu_count() or 1, 16)       # a process takes up to 0.4 GB
    if policy:
        record["policy"] = "the user's"
        parts, cores = [lambda env, first, rng: policy(env, rng)], 1
    minutes = steps / SPEED[envs.ENVS[name].family] / 60
    if minutes < 0.5:
        cores = 1       # quicker
    elif progress:
        print(f"{name}: about {minutes / cores:.1f} minutes on {cores} cores", flush=True)
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser().resolve()
    os.environ["MINARI_DATASETS_PATH"] = str(root)      # minari itself knows no ~
    with explained(f"{name} can't be stored in {root}", "; see MINARI_DATASETS_PATH", OSError):
        root.mkdir(parents=True, exist_ok=True)
        write(root, chosen, parts, record, progress, cores)
    return chosen.id


def write(root, chosen, parts, record, progress, cores):
    """Store each episode as it ends, in a hidden folder, which becomes the set when it is whole."""
    import minari
    from minari.dataset.minari_storage import MinariStorage
    from tqdm import tqdm

    silent = None if progress else True     # None: outside of a terminal
    bar = tqdm(total=record["steps"], desc=chosen.name, unit="step", disable=silent)
    with bar, tempfile.TemporaryDirectory(prefix=".collecting-", dir=root) as staging:
        new, target, spare = Path(staging, "new"), root / chosen.id, Path(staging, "spare")
        (new / "data").mkdir(parents=True)
        with contextlib.closing(envs.make(chosen.spec())) as env:
            # not minari.DataCollector, which needs jax; not JPEG, which moves pixels
            storage = MinariStorage.new(
                new / "data", env.observation_space, env.action_space, chosen.spec(), jpeg_encoding=False)
        storage.update_metadata({
            "dataset_id": chosen.id,
            "minari_version": minari.__version__,
            "eval_env_spec": chosen.spec(evaluation=True).to_json(),
            "description": "Made by policies/collect.py: a stand-in for published data.",
            "recipe": record,
        })
        taken, count = 0, 0
        for k, policy in enumerate(parts, 1):
            with contextlib.closing(play_on_cores(cores, chosen, policy, record["seed"], count)) as episodes:
                while taken < record["steps"] * k / len(parts):
                    episode = next(episodes)
                    with open(spare, "wb") as file:     # OSError on a full disk, where HDF5 would crash
                        pickle.dump(episode, file)
                        file.write(bytes(2**20 + file.tell() // 8))     # what HDF5 adds
                    spare.unlink()
                    storage.update_episodes([episode])
                    taken, count = taken + len(episode.rewards), count + 1
                    bar.update(min(taken, record["steps"]) - bar.n)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(Path(staging, "old"))
        new.rename(target)
