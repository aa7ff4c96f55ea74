"""Loading data sets, and the windows that models train on.

    python data.py list                      every name, and where its data can come from
    python data.py info hopper-medium        facts, and statistics of the set if it is at hand
    python data.py collect pointmaze-umaze   regenerate a set offline    --steps N --seed S
    python data.py download hopper-medium    fetch a published set       --source minari|d4rl --data FOLDER

N transitions, E episodes, S state size, A action size, G goal size, B batch, K context steps.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import copy
import json
import os
import re
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch

from envs import CLIP, D4RL_URL, ENVS, HUGE, SIDE, get_env, is_picture, observe, shapes_of
from errors import Parser, UserError, run_command, short
from replay import load_replay


# ------------------------------------------------------------------ trajectories

class Trajectories:
    """Episodes laid end to end, one flat tensor a field, checked on the way in. From arrays of your own:

        Trajectories(states, actions, rewards, lengths)

    states (N, S) float, or frames (N, height, width) uint8, of which `stack` make a state
    actions (N, A) float in the environment's units, or (N,) int, of n_actions from action_start on
    rewards (N,); with clip_rewards they are cut to [-1, 1], and so are returns and targets
    lengths (E,) int, summing to N
    terminated, truncated (E,) bool: how each ended; neither: cut off, and its return is a lower bound
    goals (N, G) or None
    action_low, action_high (A,): bounds of the actions; without them the data's own

    Here, actions are in [-1, 1] or counted from 0, rtg (N,) is the sum of rewards from a step on, its own
    included, and episode e is [starts[e], starts[e + 1]). Arrays of the right type are shared, not copied.
    Raises UserError, with place and number, where fields disagree or hold NaN.
    """

    def __init__(self, states, actions, rewards, lengths, terminated=None, truncated=None, goals=None, *,
                 n_actions=None, action_start=0, action_low=None, action_high=None, dataset="arrays",
                 source="arrays", env_spec=None, layout=None, max_ep_len=None, stack=4, clip_rewards=False):
        if isinstance(env_spec, str) and not env_spec.startswith("{"):     # a gymnasium id
            env_spec = {"id": env_spec, "kwargs": {}}
        self.dataset, self.source, self.env_spec = dataset, source, env_spec
        if np.size(lengths) == 0 or np.sum(lengths) == 0:
            raise UserError(f"{dataset}: no episodes")
        lengths = array(lengths, (-1,), f"{dataset}: lengths", "iu").astype(np.int64)
        if lengths.min() < 1:
            raise UserError(f"{dataset}: episode {lengths.argmin()} is empty")
        E, N = len(lengths), int(lengths.sum())
        self.lengths = torch.from_numpy(lengths)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.max_ep_len = int(max_ep_len or lengths.max())
        ends = [np.zeros(E) if x is None else x for x in (terminated, truncated)]
        self.terminated = torch.from_numpy(flags(ends[0], E, f"{dataset}: terminated"))
        self.truncated = torch.from_numpy(flags(ends[1], E, f"{dataset}: truncated"))

        states = np.asarray(states)
        self.stack = stack if states.ndim == 3 and states.dtype == np.uint8 else 0
        self.layout = (layout or {"first": None, "position": False}) | {"stack": self.stack}
        if self.stack:
            states = array(states, (N, -1, -1), f"{dataset}: frames")
            self.state_shape = (self.stack, *states.shape[1:])
        else:
            states = numbers(states, (N, -1), f"{dataset}: states")
            self.state_shape = states.shape[1:]
        self.states = torch.from_numpy(states)
        self.goals, self.goal_dim = None, 0
        if goals is not None:
            self.goals = torch.from_numpy(numbers(goals, (N, -1), f"{dataset}: goals"))
            self.goal_dim = self.goals.shape[1]

        # plain integers: NumPy's would make a checkpoint that torch's safe loader refuses
        self.n_actions, self.action_start = n_actions and int(n_actions), int(action_start)
        self.discrete, self.action_low, self.action_high = n_actions is not None, None, None
        self.clipped = 0        # actions outside their bounds
        if not self.discrete:
            actions = numbers(actions, (N, -1), f"{dataset}: actions")
            actions, low, high, self.clipped = scaled(actions, action_low, action_high, dataset)
            self.action_low, self.action_high = torch.from_numpy(low), torch.from_numpy(high)
        else:
            actions = choices(actions, N, self.n_actions, self.action_start, dataset)
        self.actions = torch.from_numpy(actions)
        self.act_dim = self.n_actions or actions.shape[1]

        rewards = numbers(rewards, (N,), f"{dataset}: rewards")
        self.clip_rewards = clip_rewards
        self.raw_returns = np.add.reduceat(rewards.astype(np.float64), self.starts[:-1].numpy())    # (E,)
        self.rewards = torch.from_numpy(rewards.clip(-1, 1) if clip_rewards else rewards)
        # the total up to the episode's end minus the total before t, in float64 so that no digits are lost
        total = torch.cat([torch.zeros(1, dtype=torch.float64), self.rewards.double().cumsum(0)])
        self.rtg = (total[self.starts[1:]].repeat_interleave(self.lengths) - total[:-1]).float()
        self.returns = self.rtg[self.starts[:-1]]       # (E,)

    def __len__(self):
        return len(self.rewards)

    def top(self, fraction):
        """The best episodes that together hold this share of the transitions (%BC of the DT paper)."""
        order = self.returns.argsort(descending=True, stable=True)
        count = int((self.lengths[order].cumsum(0).double() <= fraction * len(self)).sum())
        keep = order[:max(1, count)].sort().values
        rows = torch.cat([torch.arange(self.starts[e], self.starts[e + 1]) for e in keep])
        out = copy.copy(self)
        for name in ("lengths", "terminated", "truncated", "returns"):
            setattr(out, name, getattr(self, name)[keep])
        for name in ("states", "actions", "rewards", "rtg", *(["goals"] if self.goals is not None else [])):
            setattr(out, name, getattr(self, name)[rows])
        out.raw_returns = self.raw_returns[keep.numpy()]
        out.starts = torch.cat([torch.zeros(1, dtype=torch.int64), out.lengths.cumsum(0)])
        return out

    def summary(self):
        """A few lines of text: sizes, returns, how episodes end."""
        r, raw = self.returns.double().numpy(), self.raw_returns
        terminated, truncated = int(self.terminated.sum()), int((self.truncated & ~self.terminated).sum())
        cut = len(r) - terminated - truncated
        text = (
            f"{self.dataset} ({self.source}): {len(self):,} transitions, {len(r):,} episodes of "
            f"{self.lengths.min()} to {self.lengths.max()} steps\n{'clipped ' * self.clip_rewards}"
            f"returns {r.mean():.1f} ± {r.std():.1f}, from {r.min():.1f} to {r.max():.1f}, 5/50/95 % "
            + " / ".join(f"{x:.1f}" for x in np.percentile(r, [5, 50, 95])))
        if self.clip_rewards and not np.allclose(raw, r):
            text += (f"; the game's own points {raw.mean():.1f} ± {raw.std():.1f}, "
                     f"from {raw.min():g} to {raw.max():g}")
        text += f"\nends: {terminated} terminated, {truncated} truncated, {cut} cut off"
        text += " (their returns are lower bounds)" * (cut > 0)
        return text + f"\n{self.clipped} actions outside their bounds were clipped" * (self.clipped > 0)


def array(x, shape, what, kinds="fiub"):
    """x as an array of this shape (-1: any one size) and one of these kinds of dtype. Raises UserError."""
    x = np.asarray(x)
    if len(shape) == 1 and x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    fits = x.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or 0 in x.shape[1:] or x.dtype.kind not in kinds:
        wanted = str(shape).replace("-1", "any")
        kind = "numbers" if "f" in kinds else "whole numbers"
        raise UserError(f"{what} have shape {x.shape} and type {x.dtype}; {wanted} {kind} are needed")
    return x


def numbers(x, shape, what):
    """array() in float32. Raises UserError for NaN and what is HUGE."""
    with np.errstate(over="ignore"):        # to infinity, which is refused below
        x = np.ascontiguousarray(array(x, shape, what), np.float32)
    if not (x.min() >= -HUGE and x.max() <= HUGE):      # NaN fails these two quick passes too
        bad = np.flatnonzero(~(np.abs(x.reshape(len(x), -1)) <= HUGE).all(1))
        kind = f"numbers beyond {HUGE:g}" if np.isfinite(x[bad]).all() else "NaN or infinity"
        raise UserError(f"{what} hold {kind} in {len(bad)} of {len(x)} transitions, "
                        f"the first at transition {bad[0]}")
    return x


def flags(x, n, what):
    """x (n,) as bool. Raises UserError if it holds anything but 0 and 1."""
    x = array(x, (n,), what)
    if not np.isin(x, (0, 1)).all():
        raise UserError(f"{what} hold other than 0 and 1")
    return x.astype(bool)


def choices(actions, N, n, start, dataset):
    """Action ids (N,) int64 counted from 0, from ids counted from start."""
    a = array(actions, (N,), f"{dataset}: actions", "iub").astype(np.int64) - start
    wrong = np.flatnonzero((a < 0) | (a >= n))
    if len(wrong):
        raise UserError(f"{dataset}: action id {a[wrong[0]] + start} does not fit an environment with {n} "
                        f"actions ({start} to {start + n - 1}), first at transition {wrong[0]}")
    return a


def scaled(actions, low, high, dataset):
    """(actions (N, A) in [-1, 1], low (A,), high (A,), how many were outside). Bounds beyond 1e6 are none."""
    bounds, given = [], np.ones(actions.shape[1], bool)
    for bound, edge in ((low, actions.min(0)), (high, actions.max(0))):
        bound = np.asarray(np.inf if bound is None else bound, np.float64)
        if bound.ndim:
            bound = array(bound, edge.shape, f"{dataset}: bounds of actions")
        given &= np.abs(bound) < 1e6
        bounds.append(np.where(np.abs(bound) < 1e6, bound, edge).astype(np.float32))
    low, high = bounds
    if (high < low).any():
        raise UserError(f"{dataset}: the lower bounds of actions {low} are above the upper ones {high}")
    for i in np.flatnonzero(~given):        # one wild action squeezes all others
        share = np.ptp(np.percentile(actions[:, i], [0.5, 99.5])) / max(high[i] - low[i], 1e-30)
        if 0 < share < 0.1:
            print(f"note: {dataset}: 99 % of the values of action number {i} fill {100 * share:.0f} % of "
                  f"their range, {low[i]:g} to {high[i]:g}; action_low and action_high set other bounds")
    high = np.where(high > low, high, low + 1).astype(np.float32)       # an action that never varies
    outside = int(((actions < low - 1e-3) | (actions > high + 1e-3)).any(1).sum())
    if (low != -1).any() or (high != 1).any():
        actions = 2 * (actions - low) / (high - low) - 1
    return actions.clip(-1, 1), low, high, outside


def episode_ends(terminals, timeouts=None):
    """(lengths, terminated, truncated), each (E,), from flags (N,). A tail without a flag is cut off."""
    terminals = np.asarray(terminals, bool)
    timeouts = np.zeros_like(terminals) if timeouts is None else np.asarray(timeouts, bool)
    ends = np.flatnonzero(terminals | timeouts) + 1
    if len(terminals) and (len(ends) == 0 or ends[-1] < len(terminals)):
        ends = np.append(ends, len(terminals))
    return np.diff(ends, prepend=0), terminals[ends - 1], timeouts[ends - 1]


# ------------------------------------------------------------------ windows

class Windows:
    """Training windows, gathered without a Python loop on the device where training runs.

    A window starts at a transition drawn uniformly from all N (the same as drawing episodes in proportion to
    their length, then a start in them), takes up to K steps and never crosses the episode's end; what is
    missing on the right is zeros with mask False. Goals join the states, which are normalised. Frames are
    stored once and stacked here; a stack never crosses its episode's beginning, before which there are zeros.
    Batches have the keys and shapes of the models' contract.
    """

    def __init__(self, trajectories, context_len, device="cpu", rtg_scale=1.0, reward_scale=1.0,
                 max_ep_len=None, goal=True):
        t = trajectories
        self.discrete, self.K, self.max_ep_len = t.discrete, context_len, max_ep_len or t.max_ep_len
        parts = [] if t.stack else [t.states] + [t.goals] * (goal and t.goal_dim > 0)
        S = sum(x.shape[1] for x in parts)
        self.sizes = [S, 1, 1] if t.discrete else [S, t.act_dim, 1, 1]
        # one table for all numbers of a step: a batch is then one gather and not five
        x = torch.empty(len(t), sum(self.sizes))
        self.mean = self.std = None
        if parts:
            torch.cat(parts, 1, out=x[:, :S])
            columns = x[:, :S].unbind(1)        # one by one: no second copy of all in float64
            self.mean = torch.stack([c.double().mean() for c in columns]).float()
            std = torch.stack([c.double().std(correction=0) for c in columns]).float()
            size = torch.stack([c.abs().max() for c in columns])
            # a number that hardly varies for its size becomes 0, and not noise blown up
            self.std = torch.where(std <= 1e-4 * size, torch.inf, std)
            x[:, :S].sub_(self.mean).div_(self.std).clamp_(-CLIP, CLIP)
        if not t.discrete:
            x[:, S:-2] = t.actions
        x[:, -2] = t.rewards / reward_scale
        x[:, -1] = t.rtg / rtg_scale
        self.table = x.to(device)
        self.choices = t.actions.to(device) if t.discrete else None     # (N,)
        self.frames = t.states.to(device) if t.stack else None        # (N, height, width)
        step = torch.arange(len(t)) - t.starts[:-1].repeat_interleave(t.lengths)
        self.step = step.to(device)        # (N,): place in the episode
        self.left = (t.lengths.repeat_interleave(t.lengths) - step).to(device)      # (N,): steps to its end
        self.offsets = torch.arange(context_len, device=device)
        self.back = torch.arange(1 - t.stack, 1, device=device)     # (C,): a stack's frames, oldest first
        self.device = self.step.device

    def __len__(self):
        return len(self.step)

    def sample(self, batch_size, generator=None):
        """A batch of windows that start at random transitions."""
        return self.gather(torch.randint(len(self), (batch_size,), generator=generator, device=self.device))

    def gather(self, index):
        """The batch of windows that start at the transitions index (B,) int64."""
        B, K = len(index), self.K
        mask = self.offsets < self.left[index][:, None]        # (B, K)
        # padding reads some later row, and is zeroed
        rows = (index[:, None] + self.offsets).clamp_(max=len(self) - 1).flatten()
        # index_select is several times as fast as table[rows] on a CPU
        x = self.table.index_select(0, rows).view(B, K, -1) * mask[..., None]       # (B, K, S + A + 2)
        states, *actions, rewards, rtg = x.split(self.sizes, -1)
        if self.discrete:
            actions = [self.choices.index_select(0, rows).view(B, K) * mask]
        timesteps = self.step[index][:, None] + self.offsets        # (B, K)
        if self.frames is not None:
            states = self.stacks(rows.view(B, K), timesteps, mask)
        timesteps = timesteps.clamp_(max=self.max_ep_len - 1) * mask
        return dict(
            states=states, actions=actions[0], rewards=rewards, rtg=rtg, timesteps=timesteps, mask=mask)

    def stacks(self, rows, timesteps, mask):
        """(B, K, C, height, width) uint8: the frames of rows (B, K) and those before, in their episodes."""
        inside = (timesteps[..., None] + self.back >= 0) & mask[..., None]        # (B, K, C)
        x = self.frames.index_select(0, (rows[..., None] + self.back).clamp_(min=0).flatten())
        return x.view(*inside.shape, *self.frames.shape[1:]).mul_(inside[..., None, None])


# ------------------------------------------------------------------ reading files

def d4rl_root(data=""):
    return Path(data or os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()


def minari_root():
    """The folder of Minari's sets. A ~ in MINARI_DATASETS_PATH is the home folder, for minari too."""
    folder = os.path.expanduser(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets")
    os.environ["MINARI_DATASETS_PATH"] = folder
    return Path(folder)


def use_folder(data, source):
    """Check --data. Unless it is of another source it is minari's folder from now on."""
    if data and not Path(data).expanduser().is_dir():
        raise UserError(f"--data {data}: there is no folder of this name")
    if data and source not in ("d4rl", "dqn"):
        os.environ["MINARI_DATASETS_PATH"] = str(Path(data).expanduser().resolve())


def unreadable(what, error):
    """The UserError for data that a library could not read: its words, and what to do."""
    advice = "Move it elsewhere and run the same command again; if it is your own, store it again"
    if "unable to lock file" in str(error):
        advice = ("It is in use, or its disk knows no locks: close the program that uses it, or set "
                  "HDF5_USE_FILE_LOCKING=FALSE")
    elif isinstance(error, PermissionError):
        advice = "Its owner can allow it"
    elif isinstance(error, ImportError):
        advice = "A package is missing"
    return UserError(f"{what} cannot be read ({short(error)}). {advice}")


COPIES = 2.2    # of a file's size (measured): the arrays, what is scaled of them, and the table of Windows
SMALLER = "free some, take a machine with more, or train on a part of it (README, 'Your own data')"


def check_memory(need, what, advice=SMALLER):
    """Refuse what will not fit before it is read: the system kills a process that runs out."""
    free = psutil.virtual_memory().available
    if need > 0.9 * free:
        raise UserError(f"{what} take about {need / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB "
                        f"are free; {advice}")


def load_d4rl(path, env=None):
    """Trajectories from an HDF5 file in D4RL's layout, with env's facts. Raises UserError with the path.

    It holds observations, actions, rewards, terminals, timeouts, and infos/goal for mazes.
    """
    import h5py
    path, needed = Path(path), ("observations", "actions", "rewards", "terminals")
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    check_memory(COPIES * path.stat().st_size, f"the numbers in {path}")
    try:
        with h5py.File(path, "r") as f:
            x = {key: np.asarray(f[key][()]) for key in (*needed, "timeouts", "infos/goal") if key in f}
            names = ", ".join(f) or "nothing"
    except Exception as error:      # a damaged file makes h5py raise nearly anything
        raise unreadable(path, error) from error
    if missing := [key for key in needed if key not in x]:
        raise UserError(f"{path} lacks {', '.join(missing)}; it holds {names}. Is it in D4RL's layout?")
    N = len(np.atleast_1d(x["observations"]))
    ends = [flags(x[key], N, f"{path}: {key}") for key in ("terminals", "timeouts") if key in x]
    if len(ends) == 1 and env:      # an old file: only the step limit tells where an episode was cut
        step = np.arange(N)
        first = np.maximum.accumulate(np.where(np.append(True, ends[0][:-1]), step, 0)) if N else step
        ends.append((step - first + 1) % env.max_ep_len == 0)
    ant = env is not None and env.family in ("ant", "antmaze")
    if ant and x["observations"].ndim == 2:
        x["observations"] = x["observations"][:, :env.state_dim]        # contact forces follow
    return Trajectories(
        x["observations"], x["actions"], x["rewards"], *episode_ends(*ends), x.get("infos/goal"),
        dataset=path.name, source="d4rl", action_low=-1.0, action_high=1.0, max_ep_len=env and env.max_ep_len,
        env_spec=env and {"id": env.id, "kwargs": env.kwargs | env.d4rl_kwargs},
        layout={"first": 27 if ant else None, "position": ant and env.family == "antmaze"})


def load_minari(id, env=None, source="minari", download=True, transitions=None):
    """Trajectories from a Minari set, published or your own. Raises UserError with the path.

    env: its row of ENVS, whose environment is acted in; None: the one that the set names. transitions: of
    pictures, about how many to load.
    """
    if not re.fullmatch(r"([\w-][\w.-]*/)*[\w-][\w.-]*-v\d+", id, re.ASCII):
        raise UserError(f"{id!r} is not a Minari id; they look like namespace/name-v0")
    root = minari_root() / id
    if download and not root.exists():
        fetch(id, root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import minari
            stated = json.loads((root / "data" / "metadata.json").read_text())
            if not {"observation_space", "action_space"} <= stated.keys():
                # minari would make the environment to ask it, and so run whatever code the set names
                raise UserError("its metadata.json lacks the observation_space or the action_space")
            dataset = minari.load_dataset(id)
            spec = dataset._eval_env_spec or dataset.env_spec       # minari has no public name for the first
            fields = read_episodes(dataset, root, env, transitions)
    except UserError as error:
        raise UserError(f"{id}: {error}") from error
    except Exception as error:      # minari hands on whatever h5py, json and others raise
        raise unreadable(f"the data set in {root}", error) from error
    space, kind = dataset.action_space, type(dataset.action_space).__name__
    if kind == "Discrete":
        fields |= dict(n_actions=int(space.n), action_start=int(space.start))
    elif kind == "Box" and len(space.shape) == 1:
        fields |= dict(action_low=space.low, action_high=space.high)
    else:
        raise UserError(f"{id}: actions are {space}; one Box of numbers or one Discrete choice is needed")
    limit, pictures = spec and spec.max_episode_steps, fields["layout"]["stack"]
    if env:
        limit, spec = env.max_ep_len, {"id": env.id, "kwargs": env.kwargs}
    elif pictures and spec and spec.id.startswith("ALE/"):
        spec = {"id": spec.id, "kwargs": {}}
    else:
        spec = spec and spec.to_json()
    if pictures and not isinstance(spec, str):
        fields["layout"]["shapes"] = None       # this environment is made here, and gives gray frames
    if pictures or not isinstance(limit, int) or limit < 1:
        limit = None
    return Trajectories(**fields, dataset=id, source=source, max_ep_len=limit, env_spec=spec,
                        stack=env.stack if env else 4, clip_rewards=env is not None and env.clip_rewards)


def read_episodes(dataset, root, env, transitions):
    """The arrays, lengths and layout that Trajectories takes, of a Minari set."""
    space, total = dataset.observation_space, int(dataset.total_steps)
    pictures = is_picture(space)
    layout = {"first": 27 if env and env.family in ("ant", "antmaze") else None, "position": False,
              "stack": pictures, "shapes": list(space.shape) if pictures else shapes_of(space)}
    limit = min(total, transitions or total) if pictures else total
    if pictures:
        check_memory(2 * limit * SIDE * SIDE, "its frames", "load fewer: --transitions N")
    else:
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        check_memory(COPIES * size, f"the numbers in {root}")
    names = ("actions", "rewards", "terminations", "truncations")
    fields = {key: [] for key in ("states", "goals", *names)}
    lengths = []
    for episode in dataset.iterate_episodes():
        T, seen = len(episode.rewards), episode.observations
        if not lengths and isinstance(seen, dict):
            # AntMaze's observation lacks the position, PointMaze's begins with it
            parts = [np.asarray(seen.get(key)) for key in ("observation", "achieved_goal")]
            if all(x.ndim == 2 for x in parts):
                layout["position"] = not np.array_equal(parts[0][:, :parts[1].shape[1]], parts[1])
        try:
            state, goal = observe(seen, layout)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise UserError(f"observations of episode {episode.id} are not vectors of numbers "
                            f"({short(error)})") from error
        arrays = {"states": state, "goals": goal} | {key: getattr(episode, key) for key in names}
        sizes = {key: len(x) for key, x in arrays.items() if x is not None}
        right = {"states": (T, T + 1), "goals": (len(state),)}
        if any(n not in right.get(key, (T,)) for key, n in sizes.items()):
            raise UserError(f"episode {episode.id} has {', '.join(f'{n} {key}' for key, n in sizes.items())}")
        for key, x in arrays.items():
            fields[key].append(None if x is None else x[:T])
        lengths.append(T)
        if sum(lengths) >= limit < total:
            break
    if not lengths:
        raise UserError("no episodes")
    if limit == total != sum(lengths):
        raise UserError(f"its episodes do not hold the {total} steps that its metadata.json says")
    fields = {key: None if x[0] is None else np.concatenate(x) for key, x in fields.items()}
    last = np.cumsum(lengths) - 1
    ends = [flags(fields.pop(key), last[-1] + 1, key)[last] for key in names[2:]]
    return fields | dict(lengths=lengths, terminated=ends[0], truncated=ends[1], layout=layout)


# ------------------------------------------------------------------ downloads

def fetch(id, root, patience=25):
    """Download a Minari set to the folder root, where it appears when it is whole.

    Minari's client asks the mirror that HF_ENDPOINT names, or the store of MINARI_REMOTE. It would wait
    for ever if no server answers, so it gets a thread of its own, and `patience` seconds for a first file.
    """
    failure = []

    def work(folder):
        try:
            from minari.storage.remotes import get_cloud_storage
            get_cloud_storage().download_dataset(id, Path(folder))
        except Exception as error:
            failure.append(error)
    try:
        minari_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=minari_root()) as folder:
            thread = threading.Thread(target=work, args=[folder], daemon=True)
            thread.start()
            thread.join(patience)
            while thread.is_alive():
                if not any(path.is_file() for path in Path(folder).rglob("*")):
                    raise TimeoutError(f"no answer in {patience} s")
                thread.join(1)
            if failure:
                raise failure[0]
            root.parent.mkdir(parents=True, exist_ok=True)
            Path(folder, id).rename(root)       # FileNotFoundError where the store has no such set
    except Exception as error:      # whatever the network and its libraries raise
        raise UserError(f"{id} is not at hand and could not be downloaded ({short(error)}). "
                        f"It would be stored in {root}") from error


def download(url, path):
    """Fetch url into path. A download that broke off goes on where it stopped. Raises UserError."""
    import http.client
    import urllib.request

    from tqdm import tqdm
    part = Path(f"{path}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=20) as response:
            if response.status != 206:      # the whole file, and not what was left of it
                have = 0
            total = have + int(response.headers.get("Content-Length") or 0)
            bar = tqdm(initial=have, total=total or None, unit="B", unit_scale=True, disable=None)
            with bar, open(part, "ab" if have else "wb") as f:
                while chunk := response.read(1 << 20):
                    f.write(chunk)
                    bar.update(len(chunk))
        size = part.stat().st_size
        if total and size != total:
            raise UserError(f"{url}: got {size:,} of {total:,} bytes; run the same command again to go on")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:       # no network, timeouts and full disks alike
        if getattr(error, "code", None) == 416:     # nothing is left to fetch, or the part is too long
            part.unlink()
            return download(url, path)
        raise UserError(f"{url} could not be downloaded to {path} ({getattr(error, 'reason', error)}). "
                        "You can put the file there by hand") from error


# ------------------------------------------------------------------ sources

def from_minari(name, env, data, transitions):
    if not env.minari:
        raise UserError(f"Minari publishes no {name}; 'python data.py list' shows others")
    return load_minari(env.minari, env, transitions=transitions)


def from_d4rl(name, env, data, transitions):
    if not env.d4rl:
        raise UserError(f"D4RL has no file for {name} that fits {env.id}; 'python data.py list' shows others")
    file = d4rl_root(data) / Path(env.d4rl).name
    if not file.exists():
        download(D4RL_URL + env.d4rl, file)
    return load_d4rl(file, env)


def from_dqn(name, env, data, transitions):
    """A game's DQN-replay folder, in --data, $DQN_REPLAY_DIR or ~/.dqn_replay."""
    if env.family != "atari":
        games = ", ".join(key for key, other in ENVS.items() if other.family == "atari")
        raise UserError(f"{name} is no Atari game; source dqn has {games}")
    root = Path(data or os.environ.get("DQN_REPLAY_DIR") or "~/.dqn_replay").expanduser()
    game = env.id.removeprefix("ALE/").removesuffix("-v5")
    if not root.is_dir():
        raise UserError(f"{root} does not exist; --data FOLDER names what holds {game}/1/replay_logs")
    fields = load_replay(root, game, transitions)
    truncated = ~fields["terminated"] & (fields["lengths"] >= env.max_ep_len)
    return Trajectories(
        **fields, truncated=truncated, n_actions=env.act_dim, stack=env.stack, clip_rewards=True,
        dataset=f"dqn-replay/{game}-{len(fields['actions'])}", source="dqn",
        env_spec={"id": env.id, "kwargs": env.kwargs})


def from_local(name, env, data, transitions):
    """The set that policies/collect.py makes, which is made now if it is not there."""
    from policies import collect
    id = local_id(name)
    if id is None or not (minari_root() / id).exists():
        print(f"collecting {name}, once: it is kept in {minari_root()}", flush=True)
        id = collect_local(name)
    trajectories = load_minari(id, env, "local", False, transitions)
    made, usual = collect.recipe(id), collect.SETS[name]
    made = made if isinstance(made, dict) else {}
    if "policy" not in made and (made.get("steps"), made.get("version")) != (usual.steps, usual.version):
        print(f"note: the stored {id} was made with steps={made.get('steps')} by version "
              f"{made.get('version')} of its player; usual are {usual.steps} and {usual.version}; "
              f"'python data.py collect {name}' makes it anew")
    return trajectories


SOURCES = {"minari": from_minari, "d4rl": from_d4rl, "dqn": from_dqn, "local": from_local}


def local_id(name):
    """The Minari id of the set that policies/collect.py makes under this name, or None."""
    from policies import collect
    return collect.SETS[name].id if name in collect.SETS else None


def collect_local(name, steps=None, seed=0):
    """Regenerate a set offline with the stored policies; returns its Minari id."""
    from policies import collect
    get_env(name)
    if name not in collect.SETS:
        raise UserError(f"{name} cannot be regenerated here; local data exist for: {', '.join(collect.SETS)}")
    return collect.collect(name, steps, seed)


def stored(name, data=""):
    """The sources of an environment's data that are at hand, as Minari sets or as a file."""
    env, local = get_env(name), local_id(name)
    places = dict(minari=env.minari and minari_root() / env.minari, local=local and minari_root() / local,
                  d4rl=env.d4rl and d4rl_root(data) / Path(env.d4rl).name)
    return [key for key in ("minari", "d4rl", "local") if places[key] and places[key].exists()]


def load(name, source="auto", data="", goal=True, transitions=500_000):
    """Trajectories for a name of ENVS or minari:<id>.

    source: a key of SOURCES, or auto: published data, cached or else downloaded; never regenerated ones.
    data: folder of the data: a Minari root, HDF5 files, or a replay. goal: whether a maze set without goals
    is an error. transitions: of frames, about how many to load.
    """
    use_folder(data, source)
    if name.startswith("minari:"):
        if source not in ("auto", "minari"):
            raise UserError(f"{name} is a Minari set: leave out --source {source}")
        return load_minari(name.removeprefix("minari:"), transitions=transitions)
    env = get_env(name)
    if source == "auto":
        places = [key for key in stored(name, data) if key != "local"]
        places += ["minari"] * bool(env.minari) + ["d4rl"] * bool(env.d4rl)
        if not places:
            raise UserError(f"{name}: {env.note} (python train.py --env {name} --source local collects; "
                            "policies/README.md says how to record)")
        source = places[0]
    try:
        trajectories = SOURCES[source](name, env, data, transitions)
    except UserError as error:
        if source == "local" or not local_id(name):
            raise
        raise UserError(f"{error}\nWithout a network, train on regenerated data: "
                        f"python train.py --env {name} --source local") from error
    check_fit(trajectories, name, env, goal)
    return trajectories


def check_fit(t, name, env, goal):
    """Raise UserError, naming all that differs, if these Trajectories are not of the environment's sizes."""
    if goal and env.goal_dim and t.goals is None:
        raise UserError(f"{t.dataset} holds no goals (infos/goal or desired_goal). Train without: --no-goal")

    def sizes(x):
        return dict(states=f"{' x '.join(map(str, x.state_shape))} numbers", goals=f"{x.goal_dim} numbers",
                    actions=f"{x.act_dim} {'choices' if x.discrete else 'numbers'}")
    theirs = sizes(env) if t.goal_dim else sizes(env) | {"goals": "0 numbers"}
    wrong = [f"{key} have {x}, but {name} ({env.id}) has {theirs[key]}"
             for key, x in sizes(t).items() if x != theirs[key]]
    if wrong:
        raise UserError(f"{t.dataset}: {'; '.join(wrong)}. Is it the right data?")


# ------------------------------------------------------------------ command line

def print_facts(name):
    env = ENVS[name]
    states = f"{env.stack} stacked frames of 84 x 84" if env.stack else f"{env.state_dim} state numbers"
    goal = f" and {env.goal_dim} of the goal" * (env.goal_dim > 0)
    actions = "actions" if env.discrete else "action numbers"
    print(f"{name}: {env.id}, {states}{goal}, {env.act_dim} {actions}, at most {env.max_ep_len} steps, "
          f"return scale {env.rtg_scale:g}")
    if env.ref:
        who = "random player and gamer" if env.discrete else "D4RL"
        print(f"score 0 is a return of {env.ref[0]:g}, score 100 of {env.ref[1]:g} ({who})")
    if env.note:
        print(f"note: {env.note}")
    if env.clip_rewards:
        print("returns-to-go and targets count rewards cut to [-1, 1]; scores count the game's own points")


def command_line():
    parser = Parser(description=__doc__)
    parser.add_argument("command", choices=["list", "info", "collect", "download"])
    parser.add_argument("env", nargs="?")
    parser.add_argument("--source", choices=["auto", *SOURCES])
    parser.add_argument("--data", help="folder of the data")
    parser.add_argument("--steps", type=int, help="collect: number of transitions")
    parser.add_argument("--seed", type=int, help="collect: seed")
    args = parser.parse_args()
    takes = {"list": [], "collect": ["env", "data", "steps", "seed"]}
    takes = takes.get(args.command, ["env", "source", "data"])
    for key, x in vars(args).items():
        if x is not None and key not in ("command", *takes):
            raise UserError(f"python data.py {args.command} takes no {key}, here {x}")
    if args.command == "list":
        print(f"{'name':26s} {'minari':31s} {'d4rl':6s} {'local':6s} environment")
        for name, env in ENVS.items():
            d4rl, local = ("yes" if there else "-" for there in (env.d4rl, local_id(name)))
            print(f"{name:26s} {env.minari or '-':31s} {d4rl:6s} {local:6s} {env.id}")
        return
    if not args.env:
        raise UserError(f"which environment? python data.py {args.command} ENV")
    name, source, data = args.env, args.source or "auto", args.data or ""
    use_folder(data, source)
    if args.command == "collect":
        if args.steps is not None and args.steps < 1 or (args.seed or 0) < 0:
            raise UserError("--steps must be at least 1, and --seed must not be negative")
        collect_local(name, args.steps, args.seed or 0)
        source = "local"
    elif args.command == "info" and not name.startswith("minari:"):
        there = stored(name, data)
        print_facts(name)
        if source == "auto" and there:
            source = there[0]
        if source != "dqn" and source not in there:
            what = "data" if source == "auto" else f"{source} data"
            collect = f", or python data.py collect {name}" if local_id(name) else ""
            print(f"no {what} at hand: python data.py download {name}{collect}")
            return
    print(load(name, source, data, goal=False).summary())


if __name__ == "__main__":
    run_command(command_line)
