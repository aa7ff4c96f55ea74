"""Environments and their facts, loading data sets, and the windows that models train on.

    python data.py list                      every name, and where its data can come from
    python data.py info hopper-medium        facts, and statistics of the set if it is at hand
    python data.py collect pointmaze-umaze   regenerate a set offline    --steps N --seed S
    python data.py download hopper-medium    fetch a published set       --source minari|d4rl --data FOLDER

N transitions, E episodes, S state size, A action size, G goal size, B batch, K context steps.
"""
import argparse
import copy
import difflib
import json
import os
import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from policies import collect


class UserError(Exception):
    """Something the user can put right; commands print it as one message and leave with exit code 2."""


# --------------------------------------------------------------------------- environments

@dataclass(frozen=True)
class Env:
    """What is known of an environment. A paper's choices (context, learning rate, targets) are in the model file's PRESETS."""
    family: str                             # key of PRESETS, between "*" and the exact name
    id: str                                 # gymnasium id to act in
    state_dim: int                          # S without the goal
    act_dim: int
    max_ep_len: int                         # the environment's own step limit
    rtg_scale: float                        # returns-to-go are divided by it before a model sees them
    ref: tuple[float, float] | None = None  # returns that score 0 and 100
    minari: str | None = None               # published Minari id
    d4rl: str | None = None                 # published HDF5 file, below D4RL_URL
    kwargs: dict = field(default_factory=dict)
    d4rl_kwargs: dict = field(default_factory=dict)     # what the environment needs to resemble D4RL's
    d4rl_rtg_scale: float | None = None     # where D4RL's rewards are of another size
    goal_dim: int = 0
    starts: dict = field(default_factory=lambda: {"random": None})     # name -> reset options of the episodes that evaluation plays
    note: str = ""

    def scale(self, source):
        """What returns-to-go of this source's data are divided by."""
        return self.d4rl_rtg_scale if source == "d4rl" and self.d4rl_rtg_scale else self.rtg_scale


D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
ENVS: dict[str, Env] = {}

# Reference returns: D4RL (Fu et al., 2020), its infos.py; they are the same for every version of an environment.
# Return scale 1000: the released Decision Transformer. S of ant: the first 27 numbers; contact forces (D4RL 111, v5 105) are left out.
for _family, _id, _S, _A, _ref in [
        ("hopper", "Hopper-v5", 11, 3, (-20.272305, 3234.3)), ("halfcheetah", "HalfCheetah-v5", 17, 6, (-280.178953, 12135.0)),
        ("walker2d", "Walker2d-v5", 17, 6, (1.629008, 4592.3)), ("ant", "Ant-v5", 27, 8, (-325.6, 3879.7))]:
    for _level in ("medium", "medium-replay", "medium-expert", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, _id, _S, _A, 1000, 1000.0, _ref, d4rl=f"gym_mujoco_v2/{_family}_{_level.replace('-', '_')}-v2.hdf5",
            minari=f"mujoco/{_family}/{_level}-v0" if _level in ("medium", "expert") else None,      # Minari publishes no mixtures
            kwargs={"include_cfrc_ext_in_observation": False} if _family == "ant" else {},
            d4rl_kwargs={"xml_file": "walker2d.xml"} if _family == "walker2d" else {},               # the old foot friction
            note="D4RL's data come from older physics than the environment that scores them here")

# Mazes: one goal per episode, and an episode goes on after success, so the longest possible return is the step limit.
_MAZE = {"continuing_task": True, "reset_target": False}
_NOTE = "D4RL's maze has other coordinates than gymnasium-robotics' maze that scores here; to act, train on Minari or local data"
for _size, _id, _len, _reset, _goal, _ref in [
        ("umaze", "UMaze", 300, [1, 1], [3, 1], (23.85, 161.86)), ("medium", "Medium", 600, [1, 1], [6, 5], (13.13, 277.39)),
        ("large", "Large", 800, [7, 1], [7, 10], (6.7, 273.99))]:
    for _name in ("pointmaze", "maze2d"):       # two names for one environment; D4RL's files and reference returns belong to maze2d
        ENVS[f"{_name}-{_size}"] = Env(
            "maze2d", f"PointMaze_{_id}-v3", 4, 2, _len, float(_len), _ref if _name == "maze2d" else None, f"D4RL/pointmaze/{_size}-v2",
            f"maze2d/maze2d-{_size}-sparse-v1.hdf5" if _name == "maze2d" else None, _MAZE, goal_dim=2, note=_NOTE,
            # from a fixed far pair the agent's speed decides the return; from elsewhere the distance does
            starts={"random": None, "far": {"reset_cell": _reset, "goal_cell": _goal}})
for _name, _id, _len, _goal, _file in [
        ("umaze", "UMaze", 700, [3, 1], ("u-maze", False, False)), ("umaze-diverse", "UMaze", 700, [3, 1], ("u-maze", True, True)),
        ("medium-play", "Medium", 1000, [6, 6], ("big-maze", True, False)),
        ("medium-diverse", "Medium", 1000, [6, 6], ("big-maze", True, True)),
        ("large-play", "Large", 1000, [7, 10], ("hardest-maze", True, False)),
        ("large-diverse", "Large", 1000, [7, 10], ("hardest-maze", True, True))]:
    ENVS[f"antmaze-{_name}"] = Env(
        "antmaze", f"AntMaze_{_id}-v4", 29, 8, _len, float(_len), (0.0, 1.0), f"D4RL/antmaze/{_name}-v1",
        "ant_maze_v2/Ant_maze_{}_noreset_multistart_{}_multigoal_{}_sparse_fixed.hdf5".format(*_file), _MAZE, goal_dim=2, note=_NOTE,
        d4rl_rtg_scale=1.0,                                                 # there an episode ends at the goal, with a return of 1
        starts={"fixed": {"reset_cell": [1, 1], "goal_cell": _goal}})       # as in the published eval_env_spec

# Adroit and kitchen return scales: the Decision Mixer's released code, but for kitchen (0 to 4 tasks; it divides them by 100).
for _family, _id, _S, _A, _scale, _ref in [
        ("pen", "Pen", 45, 24, 1000.0, (96.262799, 3076.8331017826877)),
        ("hammer", "Hammer", 46, 26, 1000.0, (-274.856578, 12794.134825156867)),
        ("door", "Door", 39, 28, 100.0, (-56.512833, 2880.5693087298737)),
        ("relocate", "Relocate", 39, 30, 1000.0, (-6.425911, 4233.877797728884))]:
    for _level in ("human", "cloned", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(_family, f"AdroitHand{_id}-v1", _S, _A, 200, _scale, _ref, f"D4RL/{_family}/{_level}-v2",
                                          f"hand_dapg_v1/{_family}-{_level}-v1.hdf5")
for _name, _third, _fourth in [("complete", "light switch", "slide cabinet"), ("partial", "light switch", "slide cabinet"),
                               ("mixed", "bottom burner", "light switch")]:
    ENVS[f"kitchen-{_name}"] = Env(         # no D4RL file: its 60 numbers are not this environment's 59
        "kitchen", "FrankaKitchen-v1", 59, 9, 280, 1.0, (0.0, 4.0), f"D4RL/kitchen/{_name}-v2",
        kwargs={"tasks_to_complete": ["microwave", "kettle", _third, _fourth]})


def nearest(word, words):
    """'did you mean ...?' for a name that is not among words, or all of them if none is near."""
    near = difflib.get_close_matches(word, words, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(words)}"


def get_env(name):
    if name not in ENVS:
        raise UserError(f"no environment is called {name!r}; {nearest(name, ENVS)}\n"
                        "('python data.py list' shows all; a Minari set of your own is minari:<id>)")
    return ENVS[name]


def make_env(spec, **kwargs):
    """A gymnasium environment from {"id": ..., "kwargs": {...}} or an EnvSpec's JSON text; kwargs are handed on to gymnasium.make."""
    if "render_mode" in kwargs and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")       # only now: where EGL is missing, mujoco with this set cannot even be imported
    gymnasium = collect.robotics()
    if not isinstance(spec, dict):
        spec = json.loads(spec)
    try:
        if "entry_point" in spec:
            return collect.make(gymnasium.envs.registration.EnvSpec.from_json(json.dumps(spec)), **kwargs)
        return collect.make(spec["id"], **spec["kwargs"], **kwargs)
    except (gymnasium.error.Error, ImportError, AttributeError, TypeError, OSError, ValueError, KeyError, AssertionError) as e:
        raise UserError(f"the environment {spec['id']} cannot be made: {e}\n"
                        "Is the package that registers it installed? To train without acting, add --eval_episodes 0") from e


def flat(x):
    """A nested dict of (..., n) arrays as one (..., sum n) array, keys in sorted order."""
    return np.concatenate([flat(x[k]) for k in sorted(x)], -1) if isinstance(x, dict) else np.asarray(x)


def observe(observation, layout):
    """(state (..., S), goal (..., G) or None) out of one observation or a batch of them; layout comes with the Trajectories."""
    goal = None
    if isinstance(observation, dict):
        if "desired_goal" in observation and not isinstance(observation["desired_goal"], dict):
            goal = np.asarray(observation["desired_goal"], np.float32)
        state = (observation["observation"] if "observation" in observation
                 else flat({k: v for k, v in observation.items() if goal is None or k != "desired_goal"}))
        state = np.asarray(state, np.float32)[..., : layout["first"]]
        if layout["position"]:
            state = np.concatenate([np.asarray(observation["achieved_goal"], np.float32), state], -1)
    else:
        state = np.asarray(observation, np.float32)[..., : layout["first"]]
    return state, goal


# --------------------------------------------------------------------------- trajectories

def numbers(x, shape, what):
    """x as a float32 array of this shape (-1: any one size), not copied if it is one already. Raises UserError if it is not finite."""
    x = np.asarray(x)
    if len(shape) == 1 and x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.dtype.kind not in "fiub" or x.ndim != len(shape) or x.shape[0] != shape[0]:
        wanted = ", ".join("any" if n < 0 else str(n) for n in shape)
        raise UserError(f"{what} have shape {x.shape} and type {x.dtype}; ({wanted}) numbers are needed")
    x = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(x.sum(dtype=np.float64)):        # one quick pass; the search runs only if it fails
        bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))
        if len(bad):
            raise UserError(f"{what} hold NaN or infinity in {len(bad)} of {len(x)} transitions, the first at transition {bad[0]}")
    return x


class Trajectories:
    """Episodes laid end to end, one flat tensor a field, checked on the way in. Build one from arrays of your own:

        Trajectories(states, actions, rewards, lengths)

    states (N, S) float; actions (N, A) float in the environment's units, or (N,) int with n_actions; rewards (N,); lengths (E,), summing
    to N; terminated, truncated (E,) bool: how each episode ended (neither: cut off, so its returns are lower bounds); goals (N, G) or None;
    action_low, action_high (A,): bounds, by default those of the data. Memory is shared where the type is right already: leave the arrays
    as they are. Raises UserError where fields disagree or hold NaN.
    """

    def __init__(self, states, actions, rewards, lengths, terminated=None, truncated=None, goals=None, *, n_actions=None, action_start=0,
                 action_low=None, action_high=None, dataset="arrays", source="arrays", env_spec=None, layout=None, max_ep_len=None):
        self.dataset, self.source, self.env_spec = dataset, source, env_spec
        self.layout = layout or {"first": None, "position": False}      # how observe() makes a state of the environment's observation
        lengths = np.asarray(lengths)
        if lengths.ndim != 1 or lengths.size and lengths.dtype.kind not in "iu":
            raise UserError(f"{dataset}: lengths are whole numbers, one an episode; not shape {lengths.shape} of {lengths.dtype}")
        lengths = lengths.astype(np.int64)
        E, N = len(lengths), int(lengths.sum())
        if N == 0:
            raise UserError(f"{dataset}: no episodes")
        if lengths.min() < 1:
            raise UserError(f"{dataset}: episode {int(lengths.argmin())} is empty")
        states, rewards = numbers(states, (N, -1), f"{dataset}: states"), numbers(rewards, (N,), f"{dataset}: rewards")
        self.states, self.rewards = torch.from_numpy(states), torch.from_numpy(rewards)
        self.goals = None if goals is None else torch.from_numpy(numbers(goals, (N, -1), f"{dataset}: goals"))
        # plain integers: a NumPy one would make a checkpoint that torch's safe loader refuses
        self.n_actions, self.action_start, self.clipped = n_actions and int(n_actions), int(action_start), 0
        if n_actions is not None:
            a = np.asarray(actions)
            if a.dtype.kind not in "iub" or a.size != N:
                raise UserError(f"{dataset}: {a.size} actions of type {a.dtype} for {N} choices among {n_actions}")
            a = a.reshape(N).astype(np.int64) - action_start
            wrong = a[(a < 0) | (a >= n_actions)]
            if len(wrong):
                raise UserError(f"{dataset}: action id {wrong[0] + action_start} does not fit an environment with {n_actions} actions "
                                f"({action_start} to {action_start + n_actions - 1})")
            self.action_low = self.action_high = None
        else:
            a = numbers(actions, (N, -1), f"{dataset}: actions")
            bounds = []
            for bound, edge in ((action_low, a.min(0)), (action_high, a.max(0))):
                bound = np.asarray(edge if bound is None else bound, np.float64)
                if bound.ndim and bound.shape != edge.shape:
                    raise UserError(f"{dataset}: bounds of shape {bound.shape} for actions of {len(edge)} numbers")
                bounds.append(np.where(np.abs(bound) < 1e6, bound, edge).astype(np.float32))       # beyond that, the data's own range
            low, high = bounds
            if (high < low).any():
                raise UserError(f"{dataset}: the lower bounds of actions {low} are above the upper ones {high}")
            high = np.where(high > low, high, low + 1).astype(np.float32)       # an action that never varies
            self.clipped = int(((a < low - 1e-3) | (a > high + 1e-3)).any(1).sum())
            if (low != -1).any() or (high != 1).any():
                a = 2 * (a - low) / (high - low) - 1
            a = a.clip(-1, 1)
            self.action_low, self.action_high = torch.from_numpy(low.copy()), torch.from_numpy(high.copy())
        self.actions = torch.from_numpy(a)                                                      # in [-1, 1], or 0 .. n_actions - 1
        self.lengths = torch.from_numpy(lengths)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])    # episode e is [starts[e], starts[e + 1])
        ends = [np.zeros(E, bool) if x is None else np.array(x, bool) for x in (terminated, truncated)]
        if any(x.shape != (E,) for x in ends):
            raise UserError(f"{dataset}: terminated and truncated say how each of {E} episodes ended, not {ends[0].shape} and {ends[1].shape}")
        self.terminated, self.truncated = map(torch.from_numpy, ends)
        self.max_ep_len = int(max_ep_len or lengths.max())
        # rewards from t on, r_t included: total up to the episode's end minus total before t, in float64 so that no digits are lost
        total = torch.cat([torch.zeros(1, dtype=torch.float64), self.rewards.double().cumsum(0)])
        self.rtg = (total[self.starts[1:]].repeat_interleave(self.lengths) - total[:-1]).float()
        self.returns = self.rtg[self.starts[:-1]]                                               # (E,)

    def __len__(self):
        return len(self.rewards)

    def top(self, fraction):
        """The episodes of highest return that together hold this fraction of the transitions (%BC of the DT paper); at least one."""
        order = self.returns.argsort(descending=True, stable=True)
        keep = order[: max(1, int((self.lengths[order].cumsum(0) <= fraction * len(self)).sum()))].sort().values
        index = torch.cat([torch.arange(self.starts[e], self.starts[e + 1]) for e in keep])
        out = copy.copy(self)
        for name, at in dict(lengths=keep, terminated=keep, truncated=keep, returns=keep,
                             states=index, actions=index, rewards=index, rtg=index, goals=index).items():
            x = getattr(self, name)
            setattr(out, name, None if x is None else x[at])
        out.starts = torch.cat([torch.zeros(1, dtype=torch.int64), out.lengths.cumsum(0)])
        return out

    def summary(self):
        """A few lines of text: sizes, returns, how episodes end."""
        E, r, terminated = len(self.lengths), self.returns.double(), int(self.terminated.sum())
        truncated = int((self.truncated & ~self.terminated).sum())
        cut, p = E - terminated - truncated, np.percentile(r.numpy(), [5, 50, 95])
        return (f"{self.dataset} ({self.source}): {len(self):,} transitions, {E:,} episodes of {self.lengths.min()} to {self.lengths.max()} steps\n"
                f"returns {r.mean():.1f} ± {r.std(correction=0):.1f}, from {r.min():.1f} to {r.max():.1f}, "
                f"5/50/95 % {p[0]:.1f} / {p[1]:.1f} / {p[2]:.1f}\n"
                f"ends: {terminated} terminated, {truncated} truncated, {cut} cut off" + (" (their returns are lower bounds)" if cut else "")
                + (f"\n{self.clipped} actions outside their bounds were clipped" if self.clipped else ""))


def flags(x, what):
    """x (N,) or (N, 1) as bool. Raises UserError if it holds anything but 0 and 1."""
    x = np.asarray(x)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1 or x.dtype.kind not in "biuf" or not np.isin(x, (0, 1)).all():
        raise UserError(f"{what} must be one 0 or 1 a step; they have shape {x.shape} and type {x.dtype}")
    return x.astype(bool)


def episode_ends(terminals, timeouts=None):
    """(lengths, terminated, truncated), each (E,), from per-step flags (N,). A tail without a flag is kept as a cut-off episode."""
    terminals = np.asarray(terminals, bool)
    timeouts = np.zeros_like(terminals) if timeouts is None else np.asarray(timeouts, bool)
    ends = np.flatnonzero(terminals | timeouts) + 1
    if len(terminals) and (len(ends) == 0 or ends[-1] < len(terminals)):
        ends = np.append(ends, len(terminals))
    return np.diff(ends, prepend=0), terminals[ends - 1], timeouts[ends - 1]


# --------------------------------------------------------------------------- sources

def minari_root():
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()


def use_folder(data, source):
    """--data for Minari sets: the folder that minari, which reads it from the environment, works in from now on."""
    if data and source != "d4rl":
        os.environ["MINARI_DATASETS_PATH"] = str(Path(data).expanduser().resolve())


def d4rl_root(data=""):
    return Path(data or os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()


def load_d4rl(path, env=None, name=""):
    """Trajectories from an HDF5 file in D4RL's layout: observations, actions, rewards, terminals, timeouts, and infos/goal for mazes."""
    import h5py
    path, again = Path(path), f"run 'python data.py download {name} --source d4rl'" if name else "fetch it again"
    if not path.is_file():
        raise UserError(f"{path} does not exist; {again}")
    try:
        with h5py.File(path, "r") as f:
            missing = [k for k in ("observations", "actions", "rewards", "terminals") if k not in f]
            if missing:
                raise UserError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(f)) or 'nothing'}. Is it in D4RL's layout?")
            x = {k: f[k][()] for k in ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal") if k in f}
    except (OSError, RuntimeError, KeyError, TypeError) as e:
        raise UserError(f"{path} cannot be read ({e}). Delete it and {again}") from e
    if len({len(v) if v.ndim else -1 for v in x.values()}) > 1:
        raise UserError(f"{path}: its fields differ in length: {', '.join(f'{k} {v.shape}' for k, v in x.items())}. Delete it and {again}")
    terminals, timeouts = (flags(x[k], f"{path}: {k}") if k in x else None for k in ("terminals", "timeouts"))
    if timeouts is None and env:        # an old file: only the step limit can tell where an episode without a terminal ended
        since = np.arange(len(terminals)) - np.maximum.accumulate(np.where(np.append(True, terminals[:-1]), np.arange(len(terminals)), 0))
        timeouts = (since + 1) % env.max_ep_len == 0
    lengths, terminated, truncated = episode_ends(terminals, timeouts)
    ant = env is not None and env.family in ("ant", "antmaze")
    states = x["observations"][:, : env.state_dim] if ant and x["observations"].ndim == 2 else x["observations"]    # then contact forces
    return Trajectories(states, x["actions"], x["rewards"], lengths, terminated, truncated, x.get("infos/goal"), dataset=path.name,
                        source="d4rl", action_low=-1.0, action_high=1.0, max_ep_len=env and env.max_ep_len,
                        env_spec=env and {"id": env.id, "kwargs": env.kwargs | env.d4rl_kwargs},
                        layout={"first": 27 if ant else None, "position": ant and env.family == "antmaze"})


def load_minari(id, env=None, source="minari", download=True):
    """Trajectories from a Minari set, published or your own; the environment is env's, or else the one that the set names."""
    if not re.fullmatch(r"([A-Za-z0-9_-][A-Za-z0-9_.-]*/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*-v\d+", id):
        raise UserError(f"{id!r} is not a Minari id; they look like namespace/name-v0")
    root = minari_root() / id
    again = f"Delete it (rm -r '{root}') and run the same command again"
    if root.exists() and not all((root / "data" / name).is_file() for name in ("main_data.hdf5", "metadata.json")):
        raise UserError(f"the data set folder {root} is incomplete. {again}")
    if not root.exists() and download:
        check_network(id, root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import minari
            dataset = minari.load_dataset(id, download=download)
            episodes = list(dataset.iterate_episodes())
    except Exception as e:      # minari hands on whatever h5py, json or the network raise
        if root.exists():
            raise UserError(f"the data set in {root} cannot be read ({type(e).__name__}: {e}). {again}") from e
        raise UserError(f"{id} is not at hand and could not be downloaded ({type(e).__name__}: {e}). It would be stored in {root}") from e
    if not episodes:
        raise UserError(f"{id} in {root}: no episodes")
    space, name = dataset.action_space, type(dataset.action_space).__name__
    if name not in ("Box", "Discrete") or name == "Box" and len(space.shape) != 1:
        raise UserError(f"{id}: actions are {space}; one Box of numbers or one Discrete choice is needed")
    kwargs = (dict(n_actions=int(space.n), action_start=int(space.start)) if name == "Discrete"
              else dict(action_low=space.low, action_high=space.high))
    layout = {"first": 27 if env and env.family in ("ant", "antmaze") else None, "position": False}      # ant: contact forces follow
    first = episodes[0].observations
    if isinstance(first, dict) and "observation" in first and isinstance(first.get("achieved_goal"), np.ndarray):
        n = first["achieved_goal"].shape[-1]
        layout["position"] = not np.array_equal(first["observation"][:, :n], first["achieved_goal"])     # AntMaze's observation lacks it
    states, goals, usual = [], [], None
    for e in episodes:
        T = len(e.rewards)
        try:
            state, goal = observe(e.observations, layout)
        except (ValueError, TypeError, IndexError) as error:
            raise UserError(f"{id}: observations of {dataset.observation_space} are not vectors of numbers ({error})") from error
        shapes = state.shape[1:], np.shape(e.actions)[1:], np.shape(e.rewards)[1:]
        usual = usual or shapes
        if shapes != usual or shapes[2]:
            raise UserError(f"{id}: episode {e.id} has states, actions and rewards of shapes {shapes} a step; the first has {usual}")
        if len(state) not in (T, T + 1) or len(e.actions) != T:
            raise UserError(f"{id}: episode {e.id} has {len(state)} observations, {len(e.actions)} actions and {T} rewards. {again}")
        states.append(state[:T])
        goals.append(None if goal is None else goal[:T])
    if states[0].ndim != 2:
        raise UserError(f"{id}: observations have shape {states[0].shape[1:]}; vectors of numbers are needed")
    spec = dataset._eval_env_spec or dataset.env_spec      # minari 0.5 has no public name for the first
    limit = (spec and spec.max_episode_steps) or max(len(e.rewards) for e in episodes)
    return Trajectories(np.concatenate(states), np.concatenate([e.actions for e in episodes]), np.concatenate([e.rewards for e in episodes]),
                        [len(e.rewards) for e in episodes], [bool(e.terminations[-1:].any()) for e in episodes],
                        [bool(e.truncations[-1:].any()) for e in episodes], None if goals[0] is None else np.concatenate(goals), dataset=id,
                        source=source, layout=layout, max_ep_len=env.max_ep_len if env else limit,
                        env_spec={"id": env.id, "kwargs": env.kwargs} if env else spec.to_json() if spec else None, **kwargs)


def check_network(id, root):
    """Fail in seconds where there is no network; the hub's own client retries for minutes."""
    import urllib.error
    import urllib.request
    try:
        urllib.request.urlopen(urllib.request.Request("https://huggingface.co", method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError:
        pass                    # somebody answered
    except OSError as e:
        raise UserError(f"{id} is not at hand and there is no network to fetch it ({getattr(e, 'reason', e)}). It would be stored in {root}") from e


def collect_local(name, steps=None, seed=0):
    """Regenerate a set offline with the stored policies; returns its Minari id."""
    get_env(name)
    if name not in collect.NAMES:
        raise UserError(f"{name} cannot be regenerated here; local data exist for: {', '.join(collect.NAMES)}")
    try:
        return collect.collect(name, steps, seed)
    except ValueError as e:
        raise UserError(str(e)) from e
    except OSError as e:
        raise UserError(f"{name} could not be collected into {minari_root()}: {e}\nMINARI_DATASETS_PATH can name another folder") from e


def local_id(name):
    """The Minari id of a set that collect.py makes, or None if it does not make this one."""
    return collect.dataset_id(name) if name in collect.NAMES else None


def load(name, source="auto", data="", goal=True):
    """Trajectories for a name of ENVS or 'minari:<id>'.

    source: minari, d4rl, local, or auto: what is cached, else a download; never regenerated data in place of published ones.
    data: folder of the data (a Minari root, or a folder of HDF5 files). goal: whether a maze set without goals is an error.
    """
    if source == "dqn":
        raise UserError("source dqn is for Atari games, which no model here reads yet; use --source minari, d4rl or local")
    if data and not Path(data).expanduser().is_dir():
        raise UserError(f"--data {data}: there is no folder of this name")
    use_folder(data, source)
    if name.startswith("minari:"):
        return load_minari(name.removeprefix("minari:"))
    env = get_env(name)
    file = d4rl_root(data) / Path(env.d4rl).name if env.d4rl else None
    if source == "auto":
        cached = env.minari and (minari_root() / env.minari).exists()
        source = "minari" if cached or env.minari and not (file and file.exists()) else "d4rl"
    try:
        if source == "local":
            id = local_id(name)
            if id is None or not (minari_root() / id).exists():
                print(f"collecting {name}, once: it is kept in {minari_root()}", flush=True)
                id = collect_local(name)
            out = load_minari(id, env, "local", download=False)
            made = collect.recipe(id) or {}
            if (made.get("steps"), made.get("version")) != (collect.NAMES[name], collect.VERSION):
                print(f"note: the stored {id} was made with steps={made.get('steps')}, not the usual {collect.NAMES[name]:,}, or by another "
                      f"version of collect.py; 'python data.py collect {name}' makes it anew")
        elif source == "minari":
            if not env.minari:
                raise UserError(f"Minari publishes no {name}; use --source d4rl")
            out = load_minari(env.minari, env)
        else:
            if not env.d4rl:
                raise UserError(f"D4RL has no file for {name} that fits {env.id}; use --source minari")
            if not file.exists():
                download(D4RL_URL + env.d4rl, file)
            out = load_d4rl(file, env, name)
    except UserError as e:
        offline = f"\nWithout a network, train on regenerated data: python train.py --env {name} --source local"
        raise UserError(f"{e}{offline if source != 'local' and local_id(name) else ''}") from e
    check_fit(out, env, name, goal)
    return out


def check_fit(trajectories, env, name, goal):
    for what, x, want in (("states", trajectories.states, env.state_dim), ("actions", trajectories.actions, env.act_dim)):
        got = x.shape[-1]
        if got != want:
            raise UserError(f"{trajectories.dataset}: {what} have {got} numbers, but {name} ({env.id}) has {want}. Is it the right file?")
    if trajectories.goals is not None and env.goal_dim and trajectories.goals.shape[1] != env.goal_dim:
        raise UserError(f"{trajectories.dataset}: goals have {trajectories.goals.shape[1]} numbers, but {name} ({env.id}) has {env.goal_dim}")
    if env.goal_dim and goal and trajectories.goals is None:
        raise UserError(f"{trajectories.dataset} holds no goals (infos/goal or desired_goal). Train without: --no-goal")


def download(url, path):
    """Fetch url into path with a progress bar; a broken-off download goes on where it stopped. Raises UserError on failure or wrong size."""
    import http.client
    import urllib.error
    import urllib.request

    from tqdm import tqdm
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.exists() else 0
        try:
            response = urllib.request.urlopen(urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout=20)
        except urllib.error.HTTPError as e:
            if e.code != 416:       # 416: nothing is left to fetch, or the part is longer than the file; start over in either case
                raise
            part.unlink()
            have, response = 0, urllib.request.urlopen(url, timeout=20)
        with response, open(part, "ab" if response.status == 206 else "wb") as f:
            have = have if response.status == 206 else 0
            left = response.headers.get("Content-Length")
            total = have + int(left) if left else None
            with tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=path.name, disable=None) as bar:
                while chunk := response.read(1 << 20):
                    f.write(chunk)
                    bar.update(len(chunk))
        size = part.stat().st_size
        if total is not None and size != total:
            raise UserError(f"{url}: got {size:,} of {total:,} bytes; run the same command again to go on")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as e:       # URLError, timeouts and disk errors alike
        raise UserError(f"{url} could not be downloaded to {path} ({getattr(e, 'reason', e)}). You can put the file there by hand") from e


# --------------------------------------------------------------------------- windows

class Windows:
    """Training windows, gathered without a Python loop on the device where training runs.

    A window starts at a transition drawn uniformly from all N (the same as drawing episodes in proportion to their length, then a start
    in them), takes up to K steps and never crosses the episode's end; what is missing on the right is zeros with mask False.
    """

    def __init__(self, trajectories, context_len, device="cpu", rtg_scale=1.0, reward_scale=1.0, max_ep_len=None, goal=True):
        t = trajectories
        parts = [t.states] + ([t.goals] if goal and t.goals is not None else [])
        S = sum(p.shape[1] for p in parts)
        self.discrete, self.K, self.max_ep_len = t.n_actions is not None, context_len, max_ep_len or t.max_ep_len
        self.sizes = [S] + ([] if self.discrete else [t.actions.shape[1]]) + [1, 1]
        # one table for all numbers of a step: a batch is then one gather and not five
        x = torch.empty(len(t), sum(self.sizes))
        torch.cat(parts, 1, out=x[:, :S]) if len(parts) > 1 else x[:, :S].copy_(t.states)
        self.mean = torch.stack([p.double().mean() for p in x[:, :S].unbind(1)]).float()       # column by column: no second copy in float64
        std = torch.stack([p.double().std(correction=0) for p in x[:, :S].unbind(1)]).float()
        self.std = torch.where(std < 1e-6, 1.0, std)        # a constant number becomes 0, not noise blown up
        x[:, :S].sub_(self.mean).div_(self.std)
        if not self.discrete:
            x[:, S:-2] = t.actions
        x[:, -2] = t.rewards / reward_scale
        x[:, -1] = t.rtg / rtg_scale
        self.table = x.to(device)
        self.choices = t.actions.to(device) if self.discrete else None
        step = torch.arange(len(t)) - t.starts[:-1].repeat_interleave(t.lengths)
        self.step = step.to(device)                                                             # (N,): place in the episode
        self.left = (t.lengths.repeat_interleave(t.lengths) - step).to(device)                  # (N,): steps to its end, itself included
        self.offsets = torch.arange(context_len, device=device)

    def __len__(self):
        return len(self.step)

    def at(self, index):
        """The batch of windows that start at the transitions index (B,) int64."""
        B, K = len(index), self.K
        mask = self.offsets < self.left[index][:, None]                                         # (B, K)
        rows = (index[:, None] + self.offsets).clamp_(max=len(self) - 1).flatten()              # padding reads a later row, then is zeroed
        # index_select is several times as fast as table[rows] on a CPU
        x = self.table.index_select(0, rows).view(B, K, -1) * mask[..., None]                   # (B, K, S + A + 2)
        parts = x.split(self.sizes, -1)
        actions = self.choices.index_select(0, rows).view(B, K) * mask if self.discrete else parts[1]
        timesteps = (self.step[index][:, None] + self.offsets).clamp_(max=self.max_ep_len - 1) * mask
        return dict(states=parts[0], actions=actions, rewards=parts[-2], rtg=parts[-1], timesteps=timesteps, mask=mask)

    def sample(self, batch_size, generator=None):
        """A random batch of the model contract's keys and shapes."""
        return self.at(torch.randint(len(self), (batch_size,), generator=generator, device=self.step.device))


# --------------------------------------------------------------------------- command line

def run_command(main):
    """Run main(); a UserError becomes one message and exit code 2, Ctrl-C exit code 130."""
    try:
        main()
    except (UserError, PermissionError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:     # the reader of a pipe went away: python data.py list | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def command_line():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "info", "collect", "download"])
    parser.add_argument("env", nargs="?")
    parser.add_argument("--source", choices=["auto", "minari", "d4rl", "local"], default="auto")
    parser.add_argument("--data", default="")
    parser.add_argument("--steps", type=int, help="collect: number of transitions")
    parser.add_argument("--seed", type=int, default=0, help="collect: seed")
    args = parser.parse_args()
    if args.command == "list":
        print(f"{'name':26s} {'minari':31s} {'d4rl':6s} {'local':6s} environment")
        for name, env in ENVS.items():
            print(f"{name:26s} {env.minari or '-':31s} {'yes' if env.d4rl else '-':6s} {'yes' if local_id(name) else '-':6s} {env.id}")
        return
    if not args.env:
        raise UserError(f"which environment? python data.py {args.command} ENV")
    env = None if args.env.startswith("minari:") else get_env(args.env)
    use_folder(args.data, args.source)
    if args.command == "collect":
        if (args.steps is not None and args.steps < 1) or args.seed < 0:
            raise UserError("--steps must be at least 1, and --seed must not be negative")
        collect_local(args.env, args.steps, args.seed)
        args.source = "local"
    elif args.command == "info" and env:
        print(f"{args.env}: {env.id}, {env.state_dim} state numbers" + (f" and {env.goal_dim} of the goal" if env.goal_dim else "") +
              f", {env.act_dim} action numbers, at most {env.max_ep_len} steps, return scale {env.rtg_scale:g}")
        if env.ref:
            print(f"score 0 is a return of {env.ref[0]:g}, score 100 of {env.ref[1]:g} (D4RL)")
        if env.note:
            print(f"note: {env.note}")
        local = local_id(args.env)
        places = dict(minari=env.minari and minari_root() / env.minari, d4rl=env.d4rl and d4rl_root(args.data) / Path(env.d4rl).name,
                      local=local and minari_root() / local)
        at_hand = [source for source, path in places.items() if path and path.exists()]
        if args.source not in ("auto", *at_hand) or not at_hand:
            what = "data" if args.source == "auto" else f"{args.source} data"
            print(f"no {what} at hand: python data.py download {args.env}" + (f", or python data.py collect {args.env}" if local else ""))
            return
        args.source = at_hand[0] if args.source == "auto" else args.source
    print(load(args.env, args.source, args.data, goal=False).summary())


if __name__ == "__main__":
    run_command(command_line)
