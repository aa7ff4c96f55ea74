"""Make the data sets of this project again, offline: python policies/collect.py NAME --steps N --seed S

A set is episodes of policies of players.py in gymnasium's own environments, or in those of screens.py, stored
as Minari stores its own: minari.load_dataset(id) reads it. It stands in for published data of the same kind.
"""
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))    # a script finds only its own folder

import errors  # noqa: I001, F401 (first: Ctrl-C is quiet while the libraries load)
import contextlib
import copy
import json
import os
import pickle
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

import envs
from errors import Parser, UserError, nearest, run_command
from policies import players, screens
from policies.players import BreakoutPlayer, Player, actor, ant, galloper, wanderer, waypoints


@dataclass(frozen=True)
class Set:
    """How one set is made. envs.ENVS has its environment under the same name."""
    name: str
    steps: int              # transitions by default
    parts: list             # policies; each makes equally many of the transitions, one after the other
    version: int = 1        # raised when the same (name, steps, seed) gives other numbers than before
    env: str = ""           # gymnasium's name of the environment, where it isn't that of the evaluation
    fixed: bool = False     # whether an antmaze has the start and goal of its evaluation

    @property
    def id(self):
        group = envs.ENVS[self.name].family
        path = f"{group}/{self.name}" if group in ("atari", "dmc") else self.name.replace("-", "/", 1)
        return f"local/{path}-v0"

    def spec(self, evaluation=False):
        """gymnasium's record of the environment that the set is made in, or evaluated in."""
        env = envs.ENVS[self.name]
        id = env.id if evaluation else self.env or env.id
        if screens.ours(id):
            return screens.spec(id, **env.kwargs)
        spec = copy.deepcopy(envs.robotics().spec(id))
        spec.kwargs.update(env.kwargs)
        if "fixed" in env.starts and (evaluation or self.fixed):
            for (i, j), mark in zip(env.starts["fixed"].values(), "rg", strict=True):
                spec.kwargs["maze_map"][i][j] = mark        # gymnasium-robotics' own: reset, goal
        return spec


def body(name, replay, medium, expert):
    """The four sets of a body, from levels of its stored policies."""
    play = partial(actor, body=name)
    medium = partial(play, levels=[medium])
    expert = partial(play, levels=[expert], spread=0.1)     # 1 costs the hopper a fifth of its return
    return [
        Set(f"{name}-medium", 100_000, [medium]),
        Set(f"{name}-medium-replay", 200_000, [partial(play, levels=replay)]),
        Set(f"{name}-medium-expert", 200_000, [medium, expert]),
        Set(f"{name}-expert", 100_000, [expert]),
    ]


def atari(name, steps=20_000):
    rule = getattr(players, name, None)     # without one, Player presses at random
    return Set(name, steps, [partial(Player, rule=rule)])


SETS = [
    # hopper's levels 2 and 3 stand still for 1,000 steps: half of all transitions would be that
    *body("hopper", replay=[0, 1, 4, 5, 6, 7], medium=7, expert=8),
    *body("walker2d", replay=range(7), medium=6, expert=8),
    *body("halfcheetah", replay=range(7), medium=6, expert=9),
    Set("ant-medium-replay", 100_000, [ant]),
    Set("antmaze-umaze", 140_000, [ant], fixed=True),
    Set("antmaze-umaze-diverse", 140_000, [ant]),
    Set("antmaze-medium-play", 120_000, [ant]),
    Set("antmaze-medium-diverse", 120_000, [ant], env="AntMaze_Medium_Diverse_GR-v4"),
    Set("pointmaze-umaze", 75_000, [partial(waypoints, arrival=(100, 290))]),       # of 300 steps
    Set("pointmaze-medium", 120_000, [partial(waypoints, arrival=(230, 580))]),     # of 600
    Set("pointmaze-large", 160_000, [partial(waypoints, arrival=(400, 770))]),      # of 800
    Set("breakout", 40_000, [partial(BreakoutPlayer, rule=players.breakout, chance=(0.15, 0.7))], version=2),
    atari("pong", 40_000),
    *map(atari, ("qbert", "seaquest", "asterix", "frostbite", "assault", "gopher", "boxing")),
    Set("cheetah-run", 5_000, [galloper], version=3),
    *(Set(name, 5_000, [wanderer], version=2)
      for name in ("ball-in-cup-catch", "finger-spin", "reacher-easy", "walker-walk")),
]
SETS = {entry.name: entry for entry in SETS}
SETS |= {f"maze2d-{maze}": SETS[f"pointmaze-{maze}"] for maze in ("umaze", "medium", "large")}


def play(env, policy, rng, options=None):
    """One whole episode: T + 1 observations, T of everything else."""
    from minari.data_collector import EpisodeBuffer

    seed = int(rng.integers(2**31))
    observation, _ = env.reset(seed=seed, options=options)
    act = policy(env, observation, rng)
    observations, steps, ended = [observation], [], False
    while not ended:
        action = act(observation)
        # of the precision that is stored: replayed, it gives the same episode
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


def recipe(id):
    """{"name", "steps", "seed", "version"} of a stored set; None where it is missing or not made here."""
    from minari.storage import get_dataset_path

    file = get_dataset_path(id) / "data" / "metadata.json"
    return json.loads(file.read_text()).get("recipe") if file.exists() else None


def collect(name, steps=None, seed=0, progress=True, policy=None):
    """Make the set, store it in the place of any older one of its id, and return the id.

    steps: transitions wanted; whole episodes, at most one more. The same (name, steps, seed) gives the same
    arrays, bit for bit, on one machine. policy: one of your own in place of the set's: policy(env, rng),
    called when an episode has been reset, returns the function observation -> action that plays it.
    Raises UserError for a wrong name, steps or seed, and where an environment or a file can't be made.
    """
    if name not in SETS:
        raise UserError(f"no set is called {name!r}; {nearest(name, SETS)}")
    chosen = SETS[name]
    steps = chosen.steps if steps is None else steps
    if steps < 1 or seed < 0:
        raise UserError(f"steps must be at least 1 and the seed at least 0, not {steps} and {seed}")
    record = {"name": chosen.name, "steps": steps, "seed": seed, "version": chosen.version}
    parts = chosen.parts
    if policy:
        record["policy"] = "the user's"
        parts = [lambda env, first, rng: policy(env, rng)]
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser().resolve()
    os.environ["MINARI_DATASETS_PATH"] = str(root)      # minari itself knows no ~
    try:
        root.mkdir(parents=True, exist_ok=True)
        write(root, chosen, parts, record, progress)
    except OSError as error:
        message = f"{name} can't be stored in {root} ({error}); MINARI_DATASETS_PATH can name another folder"
        raise UserError(message) from error
    return chosen.id


def write(root, chosen, parts, record, progress):
    """Play the episodes of a set and store each as it ends, in a hidden folder where Minari doesn't look.

    That is moved to its place when it is whole: whatever stops us on the way, no half a set is ever there.
    """
    import minari
    from minari.dataset.minari_storage import MinariStorage
    from tqdm import tqdm

    for old in root.glob(".collecting-*"):      # left by a process that was killed
        if time.time() - old.stat().st_mtime > 86_400:
            shutil.rmtree(old, ignore_errors=True)
    silent = None if progress else True     # None: silent outside of a terminal
    with (
        tempfile.TemporaryDirectory(prefix=".collecting-", dir=root) as staging,
        contextlib.closing(envs.make(chosen.spec())) as env,
        tqdm(total=record["steps"], desc=chosen.name, unit="step", disable=silent) as bar,
    ):
        new, target, spare = Path(staging, "new"), root / chosen.id, Path(staging, "spare")
        (new / "data").mkdir(parents=True)
        # Not minari.DataCollector, which needs jax. Not JPEG, which moves pixels.
        storage = MinariStorage.new(
            new / "data", env.observation_space, env.action_space, chosen.spec(), jpeg_encoding=False)
        storage.update_metadata({
            "dataset_id": chosen.id,
            "minari_version": minari.__version__,
            "eval_env_spec": chosen.spec(evaluation=True).to_json(),
            "description": "Made offline by policies/collect.py: a stand-in for published data.",
            "recipe": record,
        })
        taken, count = 0, 0
        far = envs.ENVS[chosen.name].starts.get("far")      # reset options of one episode in five
        for k, policy in enumerate(parts, 1):
            while taken < record["steps"] * k / len(parts):
                rng = np.random.default_rng([record["seed"], count])    # of this episode alone
                episode = play(env, policy, rng, far if count % 5 == 0 else None)
                with open(spare, "wb") as file:     # raises OSError on a full disk, where HDF5 would crash
                    pickle.dump(episode, file)
                    file.write(bytes(2**20 + file.tell() // 8))     # what HDF5 adds, and more
                spare.unlink()
                storage.update_episodes([episode])
                taken, count = taken + len(episode.rewards), count + 1
                bar.update(min(taken, record["steps"]) - bar.n)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(Path(staging, "old"))
        new.rename(target)


def main():
    parser = Parser(description="Make a data set again, offline and seeded, and store it for Minari.")
    parser.add_argument("name", help=", ".join(f"{name} ({SETS[name].steps:,})" for name in SETS))
    parser.add_argument("--steps", type=int, help="transitions (default: the number beside the name)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"stored {collect(args.name, args.steps, args.seed)}")


if __name__ == "__main__":
    run_command(main)
