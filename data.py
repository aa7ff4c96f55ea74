"""Environments and their facts, loading data sets, and the windows that models train on.

    python data.py list                      every name, and where its data can come from
    python data.py info hopper-medium        facts, and statistics of the set if it is at hand
    python data.py collect pointmaze-umaze   regenerate a set offline    --steps N --seed S
    python data.py download hopper-medium    fetch a published set       --source minari|d4rl --data FOLDER

N transitions, E episodes, S state size, A action size, G goal size, B batch, K context steps.
"""
import argparse
import difflib
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch


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
    goal_dim: int = 0
    starts: dict = field(default_factory=lambda: {"random": None})     # name -> reset options of the episodes that evaluation plays
    note: str = ""


D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
ENVS: dict[str, Env] = {}

# Reference returns: D4RL (Fu et al., 2020), its infos.py; they are the same for every version of an environment.
# Return scale 1000: the released Decision Transformer. S of ant: the first 27 numbers; contact forces (D4RL 111, v5 105) are left out.
for _family, _id, _S, _A, _ref in [("hopper", "Hopper-v5", 11, 3, (-20.272305, 3234.3)), ("halfcheetah", "HalfCheetah-v5", 17, 6, (-280.178953, 12135.0)),
                                   ("walker2d", "Walker2d-v5", 17, 6, (1.629008, 4592.3)), ("ant", "Ant-v5", 27, 8, (-325.6, 3879.7))]:
    for _level in ("medium", "medium-replay", "medium-expert", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, _id, _S, _A, 1000, 1000.0, _ref, d4rl=f"gym_mujoco_v2/{_family}_{_level.replace('-', '_')}-v2.hdf5",
            minari=f"mujoco/{_family}/{_level}-v0" if _level in ("medium", "expert") else None,      # Minari publishes no mixtures
            kwargs={"include_cfrc_ext_in_observation": False} if _family == "ant" else {},
            d4rl_kwargs={"xml_file": "walker2d.xml"} if _family == "walker2d" else {},               # the old foot friction
            note="D4RL's data come from older physics than the environment that scores them here")

# Mazes: one goal per episode, and an episode goes on after success. Minari's mazes are not D4RL's, though the names agree.
_MAZE = {"continuing_task": True, "reset_target": False}
_D4RL_MAZE = "D4RL's maze has other coordinates than gymnasium-robotics' maze that scores here: train on Minari or local data to act"
for _size, _id, _len, _far, _ref in [("umaze", "UMaze", 300, ([1, 1], [3, 1]), (23.85, 161.86)), ("medium", "Medium", 600, ([1, 1], [6, 6]), (13.13, 277.39)),
                                     ("large", "Large", 800, ([1, 1], [7, 10]), (6.7, 273.99))]:
    for _family in ("pointmaze", "maze2d"):     # two names for one environment; D4RL's files and reference scores belong to maze2d
        ENVS[f"{_family}-{_size}"] = Env(
            "maze2d", f"PointMaze_{_id}-v3", 4, 2, _len, float(_len), _ref if _family == "maze2d" else None, f"D4RL/pointmaze/{_size}-v2",
            f"maze2d/maze2d-{_size}-sparse-v1.hdf5" if _family == "maze2d" else None, _MAZE, goal_dim=2,
            # a fixed far pair is where following a return target can be seen: elsewhere the distance decides the return
            starts={"random": None, "far": {"reset_cell": _far[0], "goal_cell": _far[1]}}, note=_D4RL_MAZE)

_ANTMAZE = "Ant_maze_{}_noreset_multistart_{}_multigoal_{}_sparse_fixed.hdf5"
for _name, _id, _len, _goal, _file in [
        ("umaze", "UMaze", 700, [3, 1], ("u-maze", False, False)), ("umaze-diverse", "UMaze", 700, [3, 1], ("u-maze", True, True)),
        ("medium-play", "Medium", 1000, [6, 6], ("big-maze", True, False)), ("medium-diverse", "Medium", 1000, [6, 6], ("big-maze", True, True)),
        ("large-play", "Large", 1000, [7, 10], ("hardest-maze", True, False)), ("large-diverse", "Large", 1000, [7, 10], ("hardest-maze", True, True))]:
    ENVS[f"antmaze-{_name}"] = Env(
        "antmaze", f"AntMaze_{_id}-v4", 29, 8, _len, 1.0, (0.0, 1.0), f"D4RL/antmaze/{_name}-v1", "ant_maze_v2/" + _ANTMAZE.format(*_file),
        _MAZE, goal_dim=2, starts={"fixed": {"reset_cell": [1, 1], "goal_cell": _goal}}, note=_D4RL_MAZE)     # the published eval_env_spec

# Adroit and kitchen return scales: the Decision Mixer's released code, but for kitchen (0 to 4 tasks; it divides them by 100).
for _family, _id, _S, _A, _scale, _ref in [("pen", "Pen", 45, 24, 1000.0, (96.262799, 3076.8331017826877)), ("hammer", "Hammer", 46, 26, 1000.0, (-274.856578, 12794.134825156867)),
                                           ("door", "Door", 39, 28, 100.0, (-56.512833, 2880.5693087298737)), ("relocate", "Relocate", 39, 30, 1000.0, (-6.425911, 4233.877797728884))]:
    for _level in ("human", "cloned", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(_family, f"AdroitHand{_id}-v1", _S, _A, 200, _scale, _ref, f"D4RL/{_family}/{_level}-v2", f"hand_dapg_v1/{_family}-{_level}-v1.hdf5")
for _name, _third, _fourth in [("complete", "light switch", "slide cabinet"), ("partial", "light switch", "slide cabinet"), ("mixed", "bottom burner", "light switch")]:
    ENVS[f"kitchen-{_name}"] = Env("kitchen", "FrankaKitchen-v1", 59, 9, 280, 1.0, (0.0, 4.0), f"D4RL/kitchen/{_name}-v2",     # no d4rl: its 60 numbers are other ones
                                   kwargs={"tasks_to_complete": ["microwave", "kettle", _third, _fourth]})


def nearest(word, words):
    """'did you mean ...?' for a name that is not among words, or all of them if none is near."""
    near = difflib.get_close_matches(word, words, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(words)}"


def get_env(name):
    if name not in ENVS:
        raise UserError(f"no environment is called {name!r}; {nearest(name, ENVS)} ('python data.py list' shows all; a Minari set of your own is minari:<id>)")
    return ENVS[name]


def make_env(spec, **kwargs):
    """A gymnasium environment from {"id": ..., "kwargs": {...}} or an EnvSpec's JSON text; kwargs are handed on to gymnasium.make."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")           # must stand before mujoco is imported, or rendering without a display fails
    import gymnasium
    name = spec["id"] if isinstance(spec, dict) else "the set's environment"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # "a newer version exists": the version is chosen to match the data
        try:
            import gymnasium_robotics
            gymnasium.register_envs(gymnasium_robotics)
        except ImportError:
            pass
        try:
            if isinstance(spec, dict):
                env = gymnasium.make(spec["id"], **spec["kwargs"], **kwargs)
            else:
                spec = gymnasium.envs.registration.EnvSpec.from_json(spec)
                name = spec.id
                env = gymnasium.make(spec, **kwargs)
        except (gymnasium.error.Error, ImportError, AttributeError, TypeError) as e:
            raise UserError(f"the environment {name} cannot be made: {e}\nIs the package that registers it installed? Training needs no environment: add --eval_episodes 0") from e
    xml = getattr(env.unwrapped, "tmp_xml_file_path", None)     # mazes leave this file behind each time they are made
    if xml and os.path.exists(xml):
        os.remove(xml)
    return env


def flat(x):
    """A nested dict of (..., n) arrays as one (..., sum n) array, keys in sorted order."""
    return np.concatenate([flat(x[k]) for k in sorted(x)], -1) if isinstance(x, dict) else np.asarray(x)


def observe(observation, layout):
    """(state (..., S), goal (..., G) or None) out of one observation or a batch of them; layout comes with the Trajectories."""
    goal = None
    if isinstance(observation, dict):
        if "desired_goal" in observation and not isinstance(observation["desired_goal"], dict):
            goal = np.asarray(observation["desired_goal"], np.float32)
        state = observation["observation"] if "observation" in observation else flat({k: v for k, v in observation.items() if k != "desired_goal"})
        state = np.asarray(state, np.float32)[..., : layout["first"]]
        if layout["position"]:
            state = np.concatenate([np.asarray(observation["achieved_goal"], np.float32), state], -1)
    else:
        state = np.asarray(observation, np.float32)[..., : layout["first"]]
    return state, goal


# --------------------------------------------------------------------------- trajectories

class Trajectories:
    """Episodes laid end to end, one flat tensor a field, checked on the way in. Build one from arrays of your own:

        Trajectories(states, actions, rewards, lengths)

    states (N, S) float; actions (N, A) float in the environment's units, or (N,) int with n_actions; rewards (N,); lengths (E,), summing
    to N; terminated, truncated (E,) bool: how each episode ended (neither: cut off, so its returns are lower bounds); goals (N, G) or None;
    action_low, action_high (A,): bounds, by default those of the data. Raises UserError where these disagree or are not finite.
    """

    def __init__(self, states, actions, rewards, lengths, terminated=None, truncated=None, goals=None, *, n_actions=None, action_start=0,
                 action_low=None, action_high=None, dataset="arrays", source="arrays", env_spec=None, layout=None, max_ep_len=None):
        self.dataset, self.source, self.env_spec, self.layout = dataset, source, env_spec, layout or {"first": None, "position": False}
        lengths = np.asarray(lengths, np.int64)
        if len(lengths) == 0 or lengths.sum() == 0:
            raise UserError(f"{dataset}: no episodes")
        if lengths.min() < 1:
            raise UserError(f"{dataset}: episode {int(lengths.argmin())} is empty")
        N = int(lengths.sum())
        self.n_actions, self.action_start = n_actions, action_start
        fields = dict(states=states, actions=actions, rewards=rewards) | ({} if goals is None else dict(goals=goals))
        for name, x in fields.items():
            x = np.asarray(x)
            if len(x) != N:
                raise UserError(f"{dataset}: {len(x)} {name} for {N} transitions")
            if x.dtype.kind not in "fiub":
                raise UserError(f"{dataset}: {name} are of type {x.dtype}, not numbers")
            if x.dtype.kind == "f" and not np.isfinite(x.sum(dtype=np.float64)):       # one pass; the search below runs only if it fails
                bad = np.flatnonzero(~np.isfinite(x.reshape(N, -1)).all(1))
                if len(bad):
                    raise UserError(f"{dataset}: {name} hold NaN or infinity in {len(bad)} of {N} transitions, the first at {bad[0]}")
            fields[name] = x
        if fields["states"].ndim != 2:
            raise UserError(f"{dataset}: states have shape {fields['states'].shape}; one row of numbers a step is needed")
        # data are not written to afterwards: from_numpy shares the caller's memory where the type is right already
        self.states, self.goals = (None if x is None else torch.from_numpy(np.ascontiguousarray(x, np.float32)) for x in (fields["states"], fields.get("goals")))
        self.rewards = torch.from_numpy(np.ascontiguousarray(fields["rewards"].reshape(N), np.float32))
        a = fields["actions"]
        self.clipped = 0
        if n_actions is not None:
            if a.dtype.kind == "f":
                raise UserError(f"{dataset}: actions are of type {a.dtype}, but there are {n_actions} choices")
            a = a.reshape(N).astype(np.int64) - action_start
            if a.min() < 0 or a.max() >= n_actions:
                raise UserError(f"{dataset}: action id {int((a.max() if a.max() >= n_actions else a.min()) + action_start)} does not fit an environment with {n_actions} actions")
            self.action_low = self.action_high = None
        else:
            if a.ndim != 2:
                raise UserError(f"{dataset}: actions have shape {a.shape}; one row of numbers a step is needed (n_actions is for discrete ones)")
            low, high = (a.min(0) if action_low is None else action_low), (a.max(0) if action_high is None else action_high)
            low, high = (np.where(np.isfinite(b), b, edge).astype(np.float32) for b, edge in ((low, a.min(0)), (high, a.max(0))))
            high = np.where(high > low, high, low + 1)      # an action that never varies
            self.clipped = int(((a < low - 1e-3) | (a > high + 1e-3)).any(1).sum())
            a = np.clip(a.astype(np.float32) if (low == -1).all() and (high == 1).all() else 2 * (a - low) / (high - low) - 1, -1, 1).astype(np.float32)
            self.action_low, self.action_high = torch.from_numpy(low), torch.from_numpy(high.astype(np.float32))
        self.actions = torch.from_numpy(np.ascontiguousarray(a))      # in [-1, 1], or 0 .. n_actions - 1
        self.lengths = torch.from_numpy(lengths)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])      # (E + 1,): episode e is [starts[e], starts[e + 1])
        E = len(lengths)
        self.terminated, self.truncated = (torch.from_numpy(np.zeros(E, bool) if x is None else np.asarray(x, bool)) for x in (terminated, truncated))
        self.max_ep_len = max_ep_len or int(lengths.max())
        # rewards from t on, r_t included: total up to the episode's end minus total before t, in float64 so that no digits are lost
        total = torch.cat([torch.zeros(1, dtype=torch.float64), self.rewards.double().cumsum(0)])
        self.rtg = (total[self.starts[1:]].repeat_interleave(self.lengths) - total[:-1]).float()      # (N,)
        self.returns = self.rtg[self.starts[:-1]]       # (E,)

    def __len__(self):
        return len(self.rewards)

    def top(self, fraction):
        """The episodes of highest return that together hold this fraction of the transitions (%BC of the DT paper); at least one."""
        order = self.returns.argsort(descending=True, stable=True)
        n = int((self.lengths[order].cumsum(0) <= fraction * len(self)).sum())
        keep = order[: max(n, 1)].sort().values
        index = torch.cat([torch.arange(self.starts[e], self.starts[e + 1]) for e in keep])
        out = object.__new__(Trajectories)
        out.__dict__ = self.__dict__ | dict(lengths=self.lengths[keep], terminated=self.terminated[keep], truncated=self.truncated[keep], returns=self.returns[keep])
        out.starts = torch.cat([torch.zeros(1, dtype=torch.int64), out.lengths.cumsum(0)])
        for name in ("states", "actions", "rewards", "rtg", "goals"):
            x = getattr(self, name)
            setattr(out, name, None if x is None else x[index])
        return out

    def summary(self):
        """One paragraph of text: sizes, how episodes end, returns."""
        E, r, term, trunc = len(self.lengths), self.returns.double(), int(self.terminated.sum()), int((self.truncated & ~self.terminated).sum())
        cut = E - term - trunc
        p = np.percentile(r.numpy(), [5, 50, 95])
        text = (f"{self.dataset} ({self.source}): {len(self):,} transitions, {E:,} episodes of {int(self.lengths.min())} to {int(self.lengths.max())} steps\n"
                f"returns {r.mean():.1f} ± {r.std(correction=0):.1f}, min {r.min():.1f}, 5/50/95 % {p[0]:.1f} / {p[1]:.1f} / {p[2]:.1f}, max {r.max():.1f}\n"
                f"ends: {term} terminated, {trunc} truncated, {cut} cut off" + (" (their returns are lower bounds)" if cut else ""))
        return text + (f"\n{self.clipped} actions outside their bounds were clipped" if self.clipped else "")


def episode_ends(terminals, timeouts=None):
    """(lengths, terminated, truncated), each (E,), from per-step flags (N,). A tail without a flag is kept as a cut-off episode."""
    terminals = np.asarray(terminals).reshape(-1).astype(bool)
    timeouts = np.zeros_like(terminals) if timeouts is None else np.asarray(timeouts).reshape(-1).astype(bool)
    ends = np.flatnonzero(terminals | timeouts) + 1
    if len(terminals) and (len(ends) == 0 or ends[-1] < len(terminals)):
        ends = np.append(ends, len(terminals))
    return np.diff(ends, prepend=0), terminals[ends - 1], timeouts[ends - 1]


# --------------------------------------------------------------------------- sources

def minari_root(data=""):
    if data:
        os.environ["MINARI_DATASETS_PATH"] = str(Path(data).expanduser().resolve())
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()


def d4rl_root(data=""):
    return Path(data or os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()


def load_d4rl(path, env=None, name=""):
    """Trajectories from an HDF5 file in D4RL's layout: observations, actions, rewards, terminals, timeouts, and infos/goal for mazes."""
    import h5py
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist" + (f"; 'python data.py download {name} --source d4rl' fetches it" if name else ""))
    try:
        with h5py.File(path, "r") as f:
            missing = [k for k in ("observations", "actions", "rewards", "terminals") if k not in f]
            if missing:
                raise UserError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(f)) or 'nothing'}. Is it a file in D4RL's layout?")
            x = {k: f[k][()] for k in ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal") if k in f}
    except (OSError, RuntimeError, KeyError) as e:
        raise UserError(f"{path} cannot be read ({e}). Delete it and " + (f"run 'python data.py download {name} --source d4rl'" if name else "fetch it again")) from e
    lengths, terminated, truncated = episode_ends(x["terminals"], x.get("timeouts"))
    states = x["observations"]
    if env and env.family == "ant" and states.ndim == 2:
        states = states[:, : env.state_dim]      # contact forces follow
    return Trajectories(states, x["actions"], x["rewards"], lengths, terminated, truncated, x.get("infos/goal"), dataset=path.name, source="d4rl",
                        action_low=-np.ones(1), action_high=np.ones(1), max_ep_len=env and env.max_ep_len,
                        env_spec=env and {"id": env.id, "kwargs": env.kwargs | env.d4rl_kwargs},
                        layout={"first": 27 if env and env.family in ("ant", "antmaze") else None, "position": bool(env) and env.family == "antmaze"})


def load_minari(id, env=None, source="minari", download=True):
    """Trajectories from a Minari set, published or your own; the environment is env's, or else the set's own."""
    root = minari_root() / id
    redo = (f"python data.py collect {id.split('/', 1)[1].rsplit('-v', 1)[0].replace('/', '-')}" if source == "local" else "the same command")
    if root.exists() and not all((root / "data" / name).is_file() for name in ("main_data.hdf5", "metadata.json")):
        raise UserError(f"the data set folder {root} is incomplete. Delete it (rm -r '{root}') and run {redo} again")
    import minari
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = minari.load_dataset(id, download=download)
            observations, actions, rewards, lengths, terminated, truncated = [], [], [], [], [], []
            for episode in dataset.iterate_episodes():
                T = len(episode.rewards)
                observations.append({k: v[:T] for k, v in episode.observations.items()} if isinstance(episode.observations, dict) else episode.observations[:T])
                if T and len(episode.actions) != T:
                    raise UserError(f"{id}: episode {episode.id} has {len(episode.actions)} actions and {T} rewards")
                actions.append(episode.actions)
                rewards.append(episode.rewards)
                lengths.append(T)
                terminated.append(bool(T and episode.terminations[-1]))
                truncated.append(bool(T and episode.truncations[-1]))
    except UserError:
        raise
    except Exception as e:      # minari passes on whatever h5py, json or the network raise
        if root.exists():
            raise UserError(f"the data set in {root} cannot be read ({type(e).__name__}: {e}). Delete it (rm -r '{root}') and run {redo} again") from e
        raise UserError(f"{id} is not at hand and could not be downloaded ({str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__}). It would be stored in {root}") from e
    if not sum(lengths):
        raise UserError(f"{id} in {root}: no episodes")
    first = observations[0]
    layout = {"first": 27 if env and env.family in ("ant", "antmaze") else None, "position": False}     # ant: contact forces follow
    if isinstance(first, dict) and "observation" in first and "achieved_goal" in first and not isinstance(first["achieved_goal"], dict):
        n = first["achieved_goal"].shape[-1]
        layout["position"] = not np.array_equal(first["observation"][:, :n], first["achieved_goal"])      # AntMaze's observation lacks it
    states, goals = zip(*(observe(o, layout) for o in observations), strict=True)
    del observations
    if states[0].ndim != 2:
        raise UserError(f"{id}: observations have shape {states[0].shape[1:]}; vector observations are needed")
    spec, space = dataset.spec, dataset.spec.action_space
    name = type(space).__name__
    if name not in ("Box", "Discrete") or name == "Box" and len(space.shape) != 1:
        raise UserError(f"{id}: actions are {space}; one Box of numbers or one Discrete choice is needed")
    own = (dataset._eval_env_spec or spec.env_spec) if not env else None      # no public accessor in minari 0.5
    if own is not None:
        own = own.to_json()
    limit = spec.env_spec.max_episode_steps if spec.env_spec else None
    actions = np.concatenate(actions)
    kwargs = (dict(n_actions=int(space.n), action_start=int(space.start)) if name == "Discrete" else dict(action_low=space.low, action_high=space.high))
    return Trajectories(np.concatenate(states), actions, np.concatenate(rewards), lengths, terminated, truncated,
                        None if goals[0] is None else np.concatenate(goals), dataset=id, source=source, layout=layout,
                        max_ep_len=env.max_ep_len if env else max(limit or 0, max(lengths)), env_spec={"id": env.id, "kwargs": env.kwargs} if env else own, **kwargs)


def load_local(name, env, seed=0, steps=None):
    """The regenerated set of this name; collected now if it is not there yet."""
    from policies import collect
    if name not in collect.NAMES:
        raise UserError(f"{name} cannot be regenerated here; local data exist for: {', '.join(collect.NAMES)}")
    id = collect.dataset_id(name)
    if not (minari_root() / id).exists():
        print(f"collecting {name} (once; it is kept in {minari_root() / id})", flush=True)
        collect_local(name, steps, seed)
    return load_minari(id, env, "local", download=False)


def collect_local(name, steps, seed):
    from policies import collect
    try:
        return collect.collect(name, steps, seed)
    except OSError as e:
        raise UserError(f"cannot write to {minari_root()} ({e}). Set MINARI_DATASETS_PATH to a folder of yours") from e
    except ValueError as e:
        raise UserError(str(e)) from e


def load(name, source="auto", data="", goal=True):
    """Trajectories for a name of ENVS or 'minari:<id>'.

    source: minari, d4rl, local, or auto: what is cached, else a download; never regenerated data in place of published ones.
    data: folder of the data (a Minari root, or a folder of HDF5 files). goal: whether a maze set without goals is an error.
    """
    if source == "dqn":
        raise UserError("source dqn is for Atari games, which no model here reads yet; vector environments: --source minari, d4rl or local")
    if name.startswith("minari:"):
        minari_root(data)
        return load_minari(name.removeprefix("minari:"))
    env = get_env(name)
    if data and not Path(data).expanduser().is_dir():
        raise UserError(f"--data {data}: no such folder")
    file = env.d4rl and d4rl_root(data) / Path(env.d4rl).name
    if source == "auto":
        if env.minari and (minari_root() / env.minari).exists():
            source = "minari"
        else:
            source = "d4rl" if file and file.exists() else "minari" if env.minari else "d4rl"
    offline = ""
    from policies import collect
    if name in collect.NAMES:
        offline = f"\nWithout a network, train on regenerated data instead: python train.py --env {name} --source local"
    if source == "local":
        minari_root(data)
        out = load_local(name, env)
    elif source == "minari":
        if not env.minari:
            raise UserError(f"Minari publishes no {name}; use --source d4rl or --source local")
        minari_root(data)
        try:
            out = load_minari(env.minari, env)
        except UserError as e:
            raise UserError(f"{e}{'' if (minari_root() / env.minari).exists() else offline}") from e
    else:
        if not env.d4rl:
            raise UserError(f"D4RL has no file for {name} that fits {env.id}; use --source minari" + (" or --source local" if offline else ""))
        if not file.exists():
            try:
                download(D4RL_URL + env.d4rl, file)
            except UserError as e:
                raise UserError(f"{e}{offline}") from e
        out = load_d4rl(file, env, name)
    check_fit(out, env, name, goal)
    return out


def check_fit(trajectories, env, name, goal):
    S, A = trajectories.states.shape[1], trajectories.actions.shape[-1]
    for what, got, want in (("states", S, env.state_dim), ("actions", A, env.act_dim)):
        if got != want:
            raise UserError(f"{trajectories.dataset}: {what} have {got} numbers, but {name} ({env.id}) has {want}. Is it the right file?")
    if env.goal_dim and goal and trajectories.goals is None:
        raise UserError(f"{trajectories.dataset} holds no goals (infos/goal or desired_goal). Train without: --no-goal")


def download(url, path):
    """Fetch url into path with a progress bar; an interrupted download goes on where it stopped. Raises UserError on failure or wrong size."""
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
    except OSError as e:        # URLError, timeouts and disk errors alike
        raise UserError(f"{url} could not be downloaded to {path} ({getattr(e, 'reason', e)}). You can also put the file there by hand") from e


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
        mask = self.offsets < self.left[index, None]                                            # (B, K)
        rows = (index[:, None] + self.offsets).clamp_(max=len(self) - 1)                        # padding reads a later row, then is zeroed
        x = self.table[rows] * mask[..., None]                                                  # (B, K, S + A + 2)
        parts = x.split(self.sizes, -1)
        return dict(states=parts[0], actions=self.choices[rows] * mask if self.discrete else parts[1], rewards=parts[-2], rtg=parts[-1],
                    timesteps=(self.step[index, None] + self.offsets).clamp_(max=self.max_ep_len - 1) * mask, mask=mask)

    def sample(self, batch_size, generator=None):
        """A random batch of the model contract's keys and shapes."""
        return self.at(torch.randint(len(self), (batch_size,), generator=generator, device=self.step.device))


# --------------------------------------------------------------------------- command line

def run_command(main):
    """Run main(); a UserError becomes one message and exit code 2, Ctrl-C exit code 130."""
    try:
        main()
    except UserError as e:
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
    from policies import collect
    if args.command == "list":
        print(f"{'name':24s} {'minari':28s} {'d4rl':6s} {'local':6s} environment")
        for name, env in ENVS.items():
            print(f"{name:24s} {env.minari or '-':28s} {'yes' if env.d4rl else '-':6s} {'yes' if name in collect.NAMES else '-':6s} {env.id}")
        return
    if not args.env:
        raise UserError(f"which environment? python data.py {args.command} ENV")
    if args.command == "collect":
        get_env(args.env)
        if args.env not in collect.NAMES:
            raise UserError(f"{args.env} cannot be regenerated here; local data exist for: {', '.join(collect.NAMES)}")
        minari_root(args.data)
        collect_local(args.env, args.steps, args.seed)
        print(load(args.env, "local", args.data).summary())
    elif args.command == "download":
        print(load(args.env, args.source, args.data, goal=False).summary())
    else:
        if not args.env.startswith("minari:"):
            env = get_env(args.env)
            print(f"{args.env}: {env.id}, {env.state_dim} state numbers" + (f" and {env.goal_dim} of the goal" if env.goal_dim else "") +
                  f", {env.act_dim} action numbers, at most {env.max_ep_len} steps, return scale {env.rtg_scale:g}\n" +
                  (f"score 0 is a return of {env.ref[0]:g}, score 100 of {env.ref[1]:g} (D4RL)\n" if env.ref else "") + (f"note: {env.note}\n" if env.note else ""), end="")
            has_local = args.env in collect.NAMES and (minari_root(args.data) / collect.dataset_id(args.env)).exists()
            has_d4rl = env.d4rl and (d4rl_root(args.data) / Path(env.d4rl).name).exists()
            if args.source == "auto" and not has_d4rl and not (env.minari and (minari_root() / env.minari).exists()):
                if not has_local:
                    print(f"no data at hand: python data.py download {args.env}" + (f", or python data.py collect {args.env}" if args.env in collect.NAMES else ""))
                    return
                args.source = "local"
        print(load(args.env, args.source, args.data, goal=False).summary())


if __name__ == "__main__":
    run_command(command_line)
