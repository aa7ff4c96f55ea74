"""Loading data sets, and the windows that models train on.

    python data.py list                      every name, and where its data can come from
    python data.py info hopper-medium        facts, and statistics of the set if it is at hand
    python data.py collect pointmaze-umaze   regenerate a set offline    --steps N --seed S
    python data.py download hopper-medium    fetch a published set       --source minari|d4rl --data FOLDER

N transitions, E episodes, S state size, A action size, G goal size, B batch, K context steps.
"""
import argparse
import copy
import dataclasses
import errno
import json
import math
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from envs import D4RL_URL, ENVS, HUGE, SIDE, Env, UserError, describe, flat, get_env, make_env, nearest, observe, short, stepper, sticky  # noqa: F401 (part of this module's face)
from frames import gray, load_replay
from policies import collect

# --------------------------------------------------------------------------- trajectories

def numbers(x, shape, what):
    """x as a float32 array of this shape (-1: any one size), not copied if it is one already. Raises UserError if it is not finite or HUGE."""
    x = np.asarray(x)
    if len(shape) == 1 and x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.dtype.kind not in "fiub" or x.ndim != len(shape) or x.shape[0] != shape[0] or 0 in x.shape:
        wanted = ", ".join("any" if n < 0 else str(n) for n in shape)
        raise UserError(f"{what} have shape {x.shape} and type {x.dtype}; ({wanted}) numbers are needed")
    with np.errstate(over="ignore"):        # what float32 cannot hold becomes infinity, and is refused as that
        x = np.ascontiguousarray(x, np.float32)
    if not (x.min() >= -HUGE and x.max() <= HUGE):      # two quick passes that NaN fails too; the search runs only then
        bad = np.flatnonzero(~(np.abs(x.reshape(len(x), -1)) <= HUGE).all(1))
        kind = f"numbers beyond {HUGE:g}" if np.isfinite(x[bad]).all() else "NaN or infinity"
        raise UserError(f"{what} hold {kind} in {len(bad)} of {len(x)} transitions, the first at transition {bad[0]}")
    return x


class Trajectories:
    """Episodes laid end to end, one flat tensor a field, checked on the way in. Build one from arrays of your own:

        Trajectories(states, actions, rewards, lengths)

    states (N, S) float, or frames (N, height, width) uint8 of which stack make a state; actions (N, A) float in the environment's units, or
    (N,) int with n_actions; rewards (N,), cut to [-1, 1] with clip_rewards, and then so are returns and targets; lengths (E,), summing to N;
    terminated, truncated (E,) bool: how each episode ended (neither: cut off, so its returns are lower bounds); goals (N, G) or None;
    action_low, action_high (A,): bounds, by default those of the data. Memory is shared where the type is right already: leave the arrays
    as they are. Raises UserError where fields disagree or hold NaN.
    """

    def __init__(self, states, actions, rewards, lengths, terminated=None, truncated=None, goals=None, *, n_actions=None, action_start=0,
                 action_low=None, action_high=None, dataset="arrays", source="arrays", env_spec=None, layout=None, max_ep_len=None,
                 stack=4, clip_rewards=False):
        self.dataset, self.source, self.env_spec = dataset, source, env_spec
        states = np.asarray(states)
        self.stack = stack if states.ndim == 3 and states.dtype == np.uint8 else 0
        # how observe() makes a state of the environment's observation
        self.layout = ({"first": None, "position": False} if layout is None else layout) | {"stack": self.stack}
        lengths = np.asarray(lengths)
        if lengths.ndim != 1 or lengths.size and lengths.dtype.kind not in "iu":
            raise UserError(f"{dataset}: lengths are whole numbers, one an episode; not shape {lengths.shape} of {lengths.dtype}")
        lengths = lengths.astype(np.int64)
        E, N = len(lengths), int(lengths.sum())
        if N == 0:
            raise UserError(f"{dataset}: no episodes")
        if lengths.min() < 1:
            raise UserError(f"{dataset}: episode {int(lengths.argmin())} is empty")
        if not self.stack:
            states = numbers(states, (N, -1), f"{dataset}: states")
        elif len(states) != N or 0 in states.shape:
            raise UserError(f"{dataset}: frames of shape {states.shape} for episodes of {N:,} steps")
        rewards = numbers(rewards, (N,), f"{dataset}: rewards")
        self.states, self.clip_rewards = torch.from_numpy(states), clip_rewards
        self.raw_returns = np.add.reduceat(rewards.astype(np.float64), lengths.cumsum() - lengths)      # (E,)
        self.rewards = torch.from_numpy(rewards.clip(-1, 1) if clip_rewards else rewards)
        self.goals = None if goals is None else torch.from_numpy(numbers(goals, (N, -1), f"{dataset}: goals"))
        # plain integers: a NumPy one would make a checkpoint that torch's safe loader refuses
        self.n_actions, self.action_start, self.clipped = n_actions and int(n_actions), int(action_start), 0
        if n_actions is not None:
            a = np.asarray(actions)
            if a.dtype.kind not in "iub" or a.shape not in ((N,), (N, 1)):
                raise UserError(f"{dataset}: actions of shape {a.shape} and type {a.dtype} for {N} choices among {n_actions}")
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

    @property
    def state_shape(self):
        """(S,), or (C, height, width) for frames."""
        return (self.stack, *self.states.shape[1:]) if self.stack else (self.states.shape[1],)

    def top(self, fraction):
        """The episodes of highest return that together hold this fraction of the transitions (%BC of the DT paper); at least one."""
        order = self.returns.argsort(descending=True, stable=True)
        keep = order[: max(1, int((self.lengths[order].cumsum(0).double() <= fraction * len(self)).sum()))].sort().values
        index = torch.cat([torch.arange(self.starts[e], self.starts[e + 1]) for e in keep])
        out = copy.copy(self)
        for name, at in dict(lengths=keep, terminated=keep, truncated=keep, returns=keep,
                             states=index, actions=index, rewards=index, rtg=index, goals=index).items():
            x = getattr(self, name)
            setattr(out, name, None if x is None else x[at])
        out.raw_returns = self.raw_returns[keep.numpy()]
        out.starts = torch.cat([torch.zeros(1, dtype=torch.int64), out.lengths.cumsum(0)])
        return out

    def summary(self):
        """A few lines of text: sizes, returns, how episodes end."""
        E, r, terminated = len(self.lengths), self.returns.double(), int(self.terminated.sum())
        truncated = int((self.truncated & ~self.terminated).sum())
        cut, p = E - terminated - truncated, np.percentile(r.numpy(), [5, 50, 95])
        raw = self.raw_returns
        points = (f"; the game's own points {raw.mean():.1f} ± {raw.std():.1f}, from {raw.min():g} to {raw.max():g}"
                  if self.clip_rewards and not np.allclose(raw, r.numpy()) else "")
        return (f"{self.dataset} ({self.source}): {len(self):,} transitions, {E:,} episodes of {self.lengths.min()} to {self.lengths.max()} steps\n"
                f"{'clipped ' if self.clip_rewards else ''}returns {r.mean():.1f} ± {r.std(correction=0):.1f}, from {r.min():.1f} to {r.max():.1f}, "
                f"5/50/95 % {p[0]:.1f} / {p[1]:.1f} / {p[2]:.1f}{points}\n"
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
    if data and source not in ("d4rl", "dqn"):
        os.environ["MINARI_DATASETS_PATH"] = str(Path(data).expanduser().resolve())


def d4rl_root(data=""):
    return Path(data or os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()


def check_memory(need, what, advice):
    """Refuse what will not fit before it is read: the system ends a process that runs out, without a word."""
    free = free_memory()
    if need > 0.9 * free:
        raise UserError(f"{what} {need / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free; {advice}")


# measured at 2.2 for a million hopper transitions: the arrays, what is scaled of them, and the table of Windows
COPIES = 2.2
SMALLER = "free some, take a machine with more, or train on a part of it (README, 'Train on arrays of your own')"


def within(node, path, depth=8):
    """node[path] of an HDF5 file, or None if it isn't there. ValueError where it lies outside the file: a link may point at a pipe without an end."""
    import h5py
    for key in path.strip("/").split("/"):
        link = node.get(key, getlink=True) if isinstance(node, h5py.Group) else None
        if isinstance(link, h5py.SoftLink) and depth:
            node = within(node.file if link.path.startswith("/") else node, link.path, depth - 1)
        elif isinstance(link, h5py.HardLink):
            node = node[key]
        elif link is not None:
            raise ValueError(f"{path[:80]} is a link out of the file, or in a circle")
        else:
            return None
    if isinstance(node, h5py.Dataset) and (node.external or node.is_virtual):
        raise ValueError(f"the numbers of {path[:80]} are in another file")
    return node


def array_bytes(node, depth=8):
    """Bytes of all arrays below an HDF5 group, as they are once read. Links are followed as reading will follow them, in a circle not for ever."""
    if not hasattr(node, "keys"):
        return node.nbytes
    if depth == 0:
        raise ValueError(f"groups within groups without end at {node.name[:80]}")
    return sum(array_bytes(within(node, k), depth - 1) for k in node)


def load_d4rl(path, env=None, name=""):
    """Trajectories from an HDF5 file in D4RL's layout: observations, actions, rewards, terminals, timeouts, and infos/goal for mazes."""
    import h5py
    path, again = Path(path), f"run 'python data.py download {name} --source d4rl'" if name else "fetch it again"
    if not path.is_file():
        raise UserError(f"{path} does not exist; {again}")
    try:
        with h5py.File(path, "r") as f:
            fields = {k: within(f, k) for k in ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal")}
            missing = [k for k in list(fields)[:4] if fields[k] is None]
            if missing:
                raise UserError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(f)) or 'nothing'}. Is it in D4RL's layout?")
            fields = {k: x for k, x in fields.items() if x is not None}
            check_memory(COPIES * sum(map(array_bytes, fields.values())), f"{path} takes about", SMALLER)
            x = {k: v[()] for k, v in fields.items()}
            shapes = ", ".join(f"{k} {np.shape(v)}" for k, v in x.items())
            if len({v.shape[:1] for v in x.values()}) > 1 or x["terminals"].ndim == 0:
                raise UserError(f"{path}: its fields differ in length: {shapes}. Delete it and {again}")
    except UserError:
        raise
    except Exception as e:      # a damaged file makes h5py raise nearly anything
        raise UserError(f"{path} cannot be read ({short(e)}). Delete it and {again}") from e
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


def load_minari(id, env=None, source="minari", download=True, transitions=None):
    """Trajectories from a Minari set, published or your own; the environment is env's, or else the one that the set names.

    transitions: of a set of images, how many to load at most.
    """
    if not re.fullmatch(r"([A-Za-z0-9_-][A-Za-z0-9_.-]*/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*-v\d+", id):
        raise UserError(f"{id!r} is not a Minari id; they look like namespace/name-v0")
    root = minari_root() / id
    again = f"Delete it (rm -r '{root}') and run the same command again"
    file, facts = (root / "data" / name for name in ("main_data.hdf5", "metadata.json"))
    if root.exists() and not (file.is_file() and facts.is_file()):
        raise UserError(f"the data set folder {root} is incomplete. {again}")
    if not root.exists() and download:
        check_network(id, root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import h5py
            import minari
            if download and not root.exists():
                minari.download_dataset(id)
            stated = json.loads(facts.read_text())
            if not stated.keys() >= {"observation_space", "action_space"}:
                # minari would then make the environment to ask it: loading would run whatever code a stranger's set names
                raise UserError(f"{facts} lacks the observation_space or the action_space; store the set with both")
            with h5py.File(file, "r") as f:
                if stated["total_episodes"] != len(f):
                    raise UserError(f"{file} holds {len(f):,} episodes, {facts.name} says {stated['total_episodes']}. {again}")
                sizes = [array_bytes(within(f, k)) for k in f]
            dataset = minari.load_dataset(id)
            images = getattr(dataset.observation_space, "dtype", None) == np.uint8 and len(dataset.observation_space.shape or ()) >= 2
            # images are read episode by episode, and gray_episodes counts what is kept of them
            check_memory(max(sizes, default=0) if images else COPIES * sum(sizes), f"{root} takes about", SMALLER)
            episodes = list(gray_episodes(dataset, transitions) if images else dataset.iterate_episodes())
    except UserError as e:
        raise UserError(f"{id}: {e}") from e
    except Exception as e:      # minari hands on whatever h5py, json or the network raise
        if root.exists():
            raise UserError(f"the data set in {root} cannot be read ({short(e)}). {again}") from e
        raise UserError(f"{id} is not at hand and could not be downloaded ({short(e)}). It would be stored in {root}") from e
    if not episodes:
        raise UserError(f"{id} in {root}: no episodes")
    space, name = dataset.action_space, type(dataset.action_space).__name__
    if name not in ("Box", "Discrete") or name == "Box" and len(space.shape) != 1:
        raise UserError(f"{id}: actions are {space}; one Box of numbers or one Discrete choice is needed")
    kwargs = (dict(n_actions=int(space.n), action_start=int(space.start)) if name == "Discrete"
              else dict(action_low=space.low, action_high=space.high))
    layout = {"first": 27 if env and env.family in ("ant", "antmaze") else None, "position": False, "stack": images}     # ant: contact forces follow
    first = episodes[0].observations
    if isinstance(first, dict) and all(isinstance(first.get(k), np.ndarray) and first[k].ndim == 2 for k in ("observation", "achieved_goal")):
        n = first["achieved_goal"].shape[-1]
        layout["position"] = not np.array_equal(first["observation"][:, :n], first["achieved_goal"])     # AntMaze's observation lacks it
    states, goals, ends, usual = [], [], [], None
    for e in episodes:
        try:
            state, goal = observe(e.observations, layout)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise UserError(f"{id}: observations of episode {e.id} are not vectors of numbers ({short(error)})") from error
        (n, *shape), (n_goals, *goal_shape), (n_actions, *action_shape), (T, *rest) = (
            np.shape(x) or [0] for x in (state, state if goal is None else goal, e.actions, e.rewards))
        shapes = shape, None if goal is None else goal_shape, action_shape
        usual = usual or shapes
        if shapes != usual or rest:
            raise UserError(f"{id}: episode {e.id} has states, goals, actions, rewards of shapes {(*shapes, rest)} a step; the first has {usual}")
        if n not in (T, T + 1) or n_goals != n or n_actions != T or not len(e.terminations) == len(e.truncations) == T:
            raise UserError(f"{id}: episode {e.id} has {n} observations, {n_goals} goals, {n_actions} actions, {T} rewards, {len(e.terminations)} "
                            f"terminations and {len(e.truncations)} truncations. {again}")
        ends.append([flags(x, f"{id}: {what} of episode {e.id}")[-1:].any() for what, x in
                     (("terminations", e.terminations), ("truncations", e.truncations))])
        states.append(state[:T])
        goals.append(None if goal is None else goal[:T])
    if states[0].ndim != 2 and not images:
        raise UserError(f"{id}: observations have shape {states[0].shape[1:]}; vectors of numbers are needed")
    spec = dataset._eval_env_spec or dataset.env_spec      # minari 0.5 has no public name for the first
    limit = spec and spec.max_episode_steps
    limit = limit if isinstance(limit, int) and limit > 0 else max(len(e.rewards) for e in episodes)
    if env:
        spec = {"id": env.id, "kwargs": env.kwargs}
    elif images and spec and spec.id.startswith("ALE/"):        # the set's own wrappers do not matter: its frames are gray and small by now
        spec = {"id": spec.id, "kwargs": {}}
    else:
        spec = spec and spec.to_json()
    states = episodes[0].observations.base[:sum(map(len, states))] if images else np.concatenate(states)
    return Trajectories(states, np.concatenate([e.actions for e in episodes]), np.concatenate([e.rewards for e in episodes]),
                        [len(e.rewards) for e in episodes], *np.transpose(ends), None if goals[0] is None else np.concatenate(goals), dataset=id,
                        source=source, layout=layout, max_ep_len=None if images else env.max_ep_len if env else limit,
                        env_spec=spec, stack=env.stack if env else 4,
                        clip_rewards=env is not None and env.clip_rewards, **kwargs)


def gray_episodes(dataset, transitions):
    """Minari's episodes one by one, their images as gray frames, views of one array for all; no more once transitions are reached."""
    rows = min(dataset.total_steps, (transitions or dataset.total_steps) + 27_000)      # whole episodes, so one may step over
    check_memory(rows * SIDE * SIDE, "its frames take", "load fewer: --transitions N")
    frames, at = np.empty((rows, SIDE, SIDE), np.uint8), 0
    for e in dataset.iterate_episodes():
        T = len(e.rewards)
        if len(e.observations) not in (T, T + 1):
            raise UserError(f"episode {e.id} has {len(e.observations)} images and {T} rewards")
        if at + T > rows:
            return
        frames[at: at + T] = gray(e.observations[:T])
        yield dataclasses.replace(e, observations=frames[at: at + T])
        at += T
        if transitions and at >= transitions:
            return


def free_memory(proc="/proc", groups="/sys/fs/cgroup"):
    """Bytes that can be taken without swapping, of the machine's and of the container's (cgroup 2); infinity where neither says."""
    def value(path, name=""):
        lines = Path(path).read_text().splitlines()
        return int(next(line.removeprefix(name).split()[0] for line in lines if line.startswith(name)))
    free = [math.inf]
    try:
        free.append(1024 * value(f"{proc}/meminfo", "MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        name = Path(f"{proc}/self/cgroup").read_text().rpartition("0::/")[2].strip()
        group = Path(groups, name)
        # cached files count as used there, and are given up when memory is asked for
        free.append(value(group / "memory.max") - value(group / "memory.current") + value(group / "memory.stat", "file "))
    except (OSError, StopIteration, ValueError, IndexError):    # no such group, or its limit is the word max
        pass
    return max(0, min(free))


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
    except (ValueError, RuntimeError) as e:     # the second where nothing can render
        raise UserError(str(e)) from e
    except OSError as e:
        raise UserError(f"{name} could not be collected into {minari_root()}: {e}\nMINARI_DATASETS_PATH can name another folder") from e


def local_id(name):
    """The Minari id of a set that collect.py makes, or None if it does not make this one."""
    return collect.dataset_id(name) if name in collect.NAMES else None


def load(name, source="auto", data="", goal=True, transitions=500_000):
    """Trajectories for a name of ENVS or 'minari:<id>'.

    source: minari, d4rl, local, or auto: what is cached, else a download; never regenerated data in place of published ones.
    source dqn: an Atari game's DQN-replay folder. data: folder of the data (a Minari root, a folder of HDF5 files, or the replay's).
    goal: whether a maze set without goals is an error. transitions: of a replay or another set of frames, about how many to load.
    """
    if data and not Path(data).expanduser().is_dir():
        raise UserError(f"--data {data}: there is no folder of this name")
    use_folder(data, source)
    if name.startswith("minari:"):
        return load_minari(name.removeprefix("minari:"), transitions=transitions)
    env = get_env(name)
    if source == "dqn":
        return load_dqn(env, name, data, transitions)
    file = d4rl_root(data) / Path(env.d4rl).name if env.d4rl else None
    if source == "auto":
        cached = env.minari and (minari_root() / env.minari).exists()
        source = "minari" if cached or env.minari and not (file and file.exists()) else "d4rl"
        if not env.minari and not env.d4rl:
            raise UserError(f"{name}: {env.note}. python train.py --env {name} --source local collects; "
                            "policies/README.md says how to record an agent's")
    try:
        if source == "local":
            id = local_id(name)
            if id is None or not (minari_root() / id).exists():
                print(f"collecting {name}, once: it is kept in {minari_root()}", flush=True)
                id = collect_local(name)
            out = load_minari(id, env, "local", False, transitions)
            made = collect.recipe(id)
            made = made if isinstance(made, dict) else {}
            usual = {"steps": collect.NAMES[name], "version": collect.SETS[name].version}
            if not made.get("policy") and any(made.get(k) != v for k, v in usual.items()):
                print(f"note: the stored {id} was made with steps={made.get('steps')} by version {made.get('version')} of its player; usual are "
                      f"{usual['steps']} and {usual['version']}; 'python data.py collect {name}' makes it anew")
        elif source == "minari":
            if not env.minari:
                raise UserError(f"Minari publishes no {name}; use --source d4rl")
            out = load_minari(env.minari, env, transitions=transitions)
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


def load_dqn(env, name, data, transitions):
    """Trajectories from a game's DQN-replay folder; --data, $DQN_REPLAY_DIR or ~/.dqn_replay holds it."""
    if env.family != "atari":
        raise UserError(f"{name} is no Atari game; source dqn has {', '.join(k for k, e in ENVS.items() if e.family == 'atari')}")
    root = Path(data or os.environ.get("DQN_REPLAY_DIR") or "~/.dqn_replay").expanduser()
    game = env.id.removeprefix("ALE/").removesuffix("-v5")
    if not root.is_dir():
        raise UserError(f"{root} does not exist; --data FOLDER names the folder that holds {game}/1/replay_logs")
    x = load_replay(root, game, transitions)
    truncated = ~x["terminated"] & (x["lengths"] >= env.max_ep_len)
    return Trajectories(x["states"], x["actions"], x["rewards"], x["lengths"], x["terminated"], truncated, n_actions=env.act_dim,
                        dataset=f"dqn-replay/{game}-{len(x['actions'])}", source="dqn", env_spec={"id": env.id, "kwargs": env.kwargs},
                        stack=env.stack, clip_rewards=True)


def check_fit(trajectories, env, name, goal):
    t = trajectories
    states = ("states", t.state_shape, env.state_shape) if t.stack or env.stack else ("states", t.states.shape[1], env.state_dim)
    for what, got, want in (states, ("actions", t.n_actions or t.actions.shape[-1], env.act_dim)):
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
    in them), takes up to K steps and never crosses the episode's end; what is missing on the right is zeros with mask False. Frames
    are stored once and stacked here; a stack never crosses its episode's beginning, before which there are zeros.
    """

    def __init__(self, trajectories, context_len, device="cpu", rtg_scale=1.0, reward_scale=1.0, max_ep_len=None, goal=True):
        t = trajectories
        parts = [] if t.stack else [t.states] + ([t.goals] if goal and t.goals is not None else [])
        S = sum(p.shape[1] for p in parts)
        self.discrete, self.K, self.max_ep_len = t.n_actions is not None, context_len, max_ep_len or t.max_ep_len
        self.sizes = [S] + ([] if self.discrete else [t.actions.shape[1]]) + [1, 1]
        # one table for all numbers of a step: a batch is then one gather and not five
        x = torch.empty(len(t), sum(self.sizes))
        if parts:
            torch.cat(parts, 1, out=x[:, :S]) if len(parts) > 1 else x[:, :S].copy_(t.states)
            self.mean = torch.stack([p.double().mean() for p in x[:, :S].unbind(1)]).float()       # column by column: no second copy in float64
            std = torch.stack([p.double().std(correction=0) for p in x[:, :S].unbind(1)]).float()
            self.std = torch.where(std < 1e-6, 1.0, std)        # a constant number becomes 0, not noise blown up
            x[:, :S].sub_(self.mean).div_(self.std)
        else:
            self.mean = self.std = None
        if not self.discrete:
            x[:, S:-2] = t.actions
        x[:, -2] = t.rewards / reward_scale
        x[:, -1] = t.rtg / rtg_scale
        self.table = x.to(device)
        self.choices = t.actions.to(device) if self.discrete else None
        self.frames = t.states.to(device) if t.stack else None                                  # (N, height, width)
        step = torch.arange(len(t)) - t.starts[:-1].repeat_interleave(t.lengths)
        self.step = step.to(device)                                                             # (N,): place in the episode
        self.left = (t.lengths.repeat_interleave(t.lengths) - step).to(device)                  # (N,): steps to its end, itself included
        self.offsets = torch.arange(context_len, device=device)
        self.back = torch.arange(1 - t.stack, 1, device=device)                                 # (C,): a stack's frames, oldest first

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
        timesteps = self.step[index][:, None] + self.offsets                                    # (B, K)
        states = parts[0] if self.frames is None else self.stacks(rows.view(B, K), timesteps, mask)
        timesteps = timesteps.clamp_(max=self.max_ep_len - 1) * mask
        return dict(states=states, actions=actions, rewards=parts[-2], rtg=parts[-1], timesteps=timesteps, mask=mask)

    def stacks(self, rows, timesteps, mask):
        """(B, K, C, height, width) uint8: the frames of the transitions rows (B, K) and those before them in their episodes."""
        real = (timesteps[..., None] + self.back >= 0) & mask[..., None]                        # (B, K, C)
        x = self.frames.index_select(0, (rows[..., None] + self.back).clamp_(min=0).flatten())
        return x.view(*real.shape, *self.frames.shape[1:]).mul_(real[..., None, None])

    def draw(self, batch_size, generator=None):
        """(B,) int64: where the windows of a random batch start."""
        return torch.randint(len(self), (batch_size,), generator=generator, device=self.step.device)

    def sample(self, batch_size, generator=None):
        """A random batch of the model contract's keys and shapes."""
        return self.at(self.draw(batch_size, generator))


class Prefetch:
    """Batches of windows that stay in the computer's memory, for a model on a GPU: a thread gathers and sends the next one during a step.

    state: the generator's, from before the batch that is on its way; a run that resumes from it draws that batch again.
    """

    def __init__(self, windows, batch_size, generator, device):
        self.windows, self.batch_size, self.generator, self.device = windows, batch_size, generator, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = ThreadPoolExecutor(1)
        self.order()

    def order(self):
        self.state = self.generator.get_state()
        self.coming = self.pool.submit(self.fetch, self.windows.draw(self.batch_size, self.generator))

    def fetch(self, index):
        batch = self.windows.at(index)
        if self.stream is None:
            return batch
        with torch.cuda.stream(self.stream):
            batch = {k: x.pin_memory().to(self.device, non_blocking=True) for k, x in batch.items()}
        self.stream.synchronize()
        return batch

    def next(self):
        batch = self.coming.result()
        self.order()
        return batch


# --------------------------------------------------------------------------- command line

def stop(message):
    """For argparse, which would print its whole usage."""
    raise UserError(f"{message} (--help lists everything)")


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
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # standard output goes to a full disk: what is left in its buffer goes nowhere
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def command_line():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = stop
    parser.add_argument("command", choices=["list", "info", "collect", "download"])
    parser.add_argument("env", nargs="?")
    parser.add_argument("--source", choices=["auto", "minari", "d4rl", "dqn", "local"], default="auto")
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
        print(f"{args.env}: {env.id}, " + (f"{env.stack} stacked frames of 84 x 84" if env.stack else f"{env.state_dim} state numbers")
              + (f" and {env.goal_dim} of the goal" if env.goal_dim else "") +
              f", {env.act_dim} {'actions' if env.discrete else 'action numbers'}, at most {env.max_ep_len} steps, return scale {env.rtg_scale:g}")
        if env.ref:
            print(f"score 0 is a return of {env.ref[0]:g}, score 100 of {env.ref[1]:g} ({'random player and gamer' if env.discrete else 'D4RL'})")
        if env.note:
            print(f"note: {env.note}")
        if env.clip_rewards:
            print("returns-to-go and targets count rewards cut to [-1, 1]; scores count the game's own points")
        local = local_id(args.env)
        places = dict(minari=env.minari and minari_root() / env.minari, d4rl=env.d4rl and d4rl_root(args.data) / Path(env.d4rl).name,
                      local=local and minari_root() / local)
        at_hand = [source for source, path in places.items() if path and path.exists()]
        if args.source != "dqn" and (args.source not in ("auto", *at_hand) or not at_hand):
            what = "data" if args.source == "auto" else f"{args.source} data"
            print(f"no {what} at hand: python data.py download {args.env}" + (f", or python data.py collect {args.env}" if local else ""))
            return
        args.source = at_hand[0] if args.source == "auto" else args.source
    print(load(args.env, args.source, args.data, goal=False).summary())


if __name__ == "__main__":
    run_command(command_line)
