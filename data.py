"""Loading data sets, and the windows that models train on.

    python data.py list                      every name, and where its data can come from
    python data.py info hopper-medium        facts, and statistics of the sets at hand
    python data.py collect pointmaze-umaze   regenerate a set offline    --steps N --seed S
    python data.py download hopper-medium    fetch a published set       --source minari|d4rl --data FOLDER

N transitions, E episodes, S state size, A action size, G goal size, B batch, K context steps.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import copy
import json
import os
import re
import socket
import tempfile
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch

from envs import CLIP, D4RL_URL, ENVS, HUGE, SIDE, get_env, is_picture, observe, shapes_of
from errors import Parser, UserError, explained, run_command
from replay import load_replay, reading


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
    Raises UserError where fields disagree or hold NaN.
    """

    def __init__(self, states, actions, rewards, lengths, terminated=None, truncated=None, goals=None, *,
                 n_actions=None, action_start=0, action_low=-np.inf, action_high=np.inf, dataset="arrays",
                 source="arrays", env_spec=None, layout=None, max_ep_len=None, stack=4, clip_rewards=False):
        if isinstance(env_spec, str) and not env_spec.startswith("{"):     # a gymnasium id
            env_spec = {"id": env_spec, "kwargs": {}}
        self.dataset, self.source, self.env_spec = dataset, source, env_spec
        self.lengths = checked(lengths, (-1,), "lengths", 1, 1e9, np.int64)
        N, E = int(self.lengths.sum()), len(self.lengths)
        self.max_ep_len = int(max_ep_len or self.lengths.max())
        never = np.zeros(E, bool)
        self.terminated = checked(never if terminated is None else terminated, (E,), "terminated", 0, 1, bool)
        self.truncated = checked(never if truncated is None else truncated, (E,), "truncated", 0, 1, bool)
        states = np.asarray(states)
        self.stack = stack if states.ndim == 3 and states.dtype == np.uint8 else 0
        self.layout = (layout or {"first": None, "position": False}) | {"stack": self.stack}
        if self.stack:
            self.states = checked(states, (N, -1, -1), "frames", dtype=np.uint8)
            self.state_shape = (self.stack, *states.shape[1:])
        else:
            self.states = checked(states, (N, -1), "states")
            self.state_shape = states.shape[1:]
        self.goals = None if goals is None else checked(goals, (N, -1), "goals")
        self.goal_dim = 0 if goals is None else self.goals.shape[1]

        # plain integers: NumPy's would make a checkpoint that torch's safe loader refuses
        self.n_actions, self.action_start = n_actions and int(n_actions), int(action_start)
        self.discrete, self.action_low, self.action_high = n_actions is not None, None, None
        self.clipped = 0        # actions outside their bounds
        if self.discrete:
            first, last = self.action_start, self.action_start + self.n_actions - 1
            what = f"actions of {self.n_actions} choices"
            self.actions = checked(actions, (N,), what, first, last, np.int64) - first
            self.act_dim = self.n_actions
        else:
            self.actions = checked(actions, (N, -1), "actions")
            self.act_dim = self.actions.shape[1]
            self.scale_actions(action_low, action_high)

        rewards = checked(rewards, (N,), "rewards")
        self.clip_rewards = clip_rewards
        self.rewards = rewards.clip(-1, 1) if clip_rewards else rewards
        raw_returns = np.add.reduceat(rewards.numpy().astype(np.float64), self.starts[:-1].numpy())
        self.raw_returns = torch.from_numpy(raw_returns)        # (E,)
        # the total up to the episode's end minus the total before t, in float64 so that no digits are lost
        total = torch.cat([torch.zeros(1, dtype=torch.float64), self.rewards.double().cumsum(0)])
        self.rtg = (total[self.starts[1:]].repeat_interleave(self.lengths) - total[:-1]).float()
        self.returns = self.rtg[self.starts[:-1]]       # (E,)

    def __len__(self):
        return len(self.rewards)

    @property
    def starts(self):
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))      # (E + 1,)

    def scale_actions(self, low, high):
        """Scale actions to [-1, 1] from their bounds or, where these are beyond 1e6, the data's own."""
        actions, shape = self.actions.numpy(), (self.act_dim,)
        bounds = [x if np.ndim(x) else np.full(shape, x) for x in (low, high)]
        bounds = np.stack([checked(x, shape, "bounds of actions", -np.inf, np.inf, float) for x in bounds])
        given = np.abs(bounds) < 1e6        # (2, A)
        low, high = np.where(given, bounds, [actions.min(0), actions.max(0)]).astype(np.float32)
        if (high < low).any():
            raise UserError(f"the lower bounds of actions {low} are above the upper ones {high}")
        for i in np.flatnonzero(~given.all(0)):     # one wild action squeezes all others
            share = np.ptp(np.percentile(actions[:, i], [0.5, 99.5])) / max(high[i] - low[i], 1e-30)
            if 0 < share < 0.1:
                print(f"note: 99 % of the values of action number {i} fill {100 * share:.0f} % of their "
                      f"range, {low[i]:g} to {high[i]:g}; action_low and action_high set other bounds")
        high = np.where(high > low, high, low + 1)      # an action that never varies
        self.clipped = int(((actions < low - 1e-3) | (actions > high + 1e-3)).any(1).sum())
        if (low != -1).any() or (high != 1).any():
            actions = 2 * (actions - low) / (high - low) - 1
        self.actions, self.action_low, self.action_high = map(
            torch.from_numpy, (actions.clip(-1, 1), low, high))

    def top(self, fraction):
        """The best episodes that together hold this share of the transitions (%BC of the DT paper)."""
        order = self.returns.argsort(descending=True, stable=True)
        count = int((self.lengths[order].cumsum(0).double() <= fraction * len(self)).sum())
        episodes = torch.zeros(len(order), dtype=torch.bool)
        episodes[order[:max(1, count)]] = True
        steps = episodes.repeat_interleave(self.lengths)
        out = copy.copy(self)
        for name in ("lengths", "terminated", "truncated", "returns", "raw_returns"):
            setattr(out, name, getattr(self, name)[episodes])
        for name in ("states", "goals", "actions", "rewards", "rtg"):
            if getattr(self, name) is not None:
                setattr(out, name, getattr(self, name)[steps])
        return out

    def summary(self):
        """A few lines of text: sizes, returns, how episodes end."""
        r, raw = self.returns.double().numpy(), self.raw_returns.numpy()
        truncated = int((self.truncated & ~self.terminated).sum())
        cut = int((~self.truncated & ~self.terminated).sum())
        percentiles = " / ".join(f"{x:.1f}" for x in np.percentile(r, [5, 50, 95]))
        lines = [
            f"{self.dataset} ({self.source}): {len(self):,} transitions, {len(r):,} episodes of "
            f"{self.lengths.min()} to {self.lengths.max()} steps",
            f"{'clipped ' * self.clip_rewards}returns {r.mean():.1f} ± {r.std():.1f}, from {r.min():.1f} to "
            f"{r.max():.1f}, 5/50/95 % {percentiles}",
            f"ends: {self.terminated.sum()} terminated, {truncated} truncated, {cut} cut off"
            + " (their returns are lower bounds)" * (cut > 0)]
        if self.clip_rewards and not np.allclose(raw, r):
            lines[1] += f"; the game's own points {raw.mean():.1f} ± {raw.std():.1f}, up to {raw.max():g}"
        if self.clipped:
            lines.append(f"{self.clipped} actions outside their bounds were clipped")
        return "\n".join(lines)


def checked(x, shape, what, low=-HUGE, high=HUGE, dtype=np.float32):
    """x as a tensor of this shape (-1: any size) and type. Raises UserError, with the place and the number,
    for another shape or kind of numbers, for NaN and for what is outside [low, high]."""
    x = np.asarray(x)
    if x.ndim == 2 and len(shape) == x.shape[1] == 1:
        x = x[:, 0]
    kinds = "iub" if dtype in (np.int64, np.uint8) else "fiub"
    fits = x.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or 0 in x.shape or x.dtype.kind not in kinds:
        wanted = str(shape).replace("-1", "any") + " whole" * ("f" not in kinds)
        raise UserError(f"{what} have shape {x.shape} and type {x.dtype}; {wanted} numbers are needed")
    if dtype is np.uint8:       # frames: a mapped file is not read here
        return torch.from_numpy(np.ascontiguousarray(x))
    if not (float(x.min()) >= low and float(x.max()) <= high):      # NaN fails these two quick passes too
        x = x.astype(float)
        place = np.argwhere(~((x >= low) & (x <= high)))[0]
        raise UserError(f"{what}: {x[tuple(place)]:g} in row {place[0]} is not in [{low:g}, {high:g}]")
    return torch.from_numpy(np.ascontiguousarray(x, dtype))


def episode_ends(terminals, timeouts):
    """(lengths, terminated, truncated), each (E,), from flags (N,). A tail without a flag is cut off."""
    terminals = np.asarray(terminals, bool)
    timeouts = np.asarray(timeouts, bool)
    tail = np.arange(len(terminals)) == len(terminals) - 1
    ends = np.flatnonzero(terminals | timeouts | tail)
    return np.diff(ends, prepend=-1), terminals[ends], timeouts[ends]


# ------------------------------------------------------------------ windows

class Windows:
    """Training windows, gathered without a Python loop on the device where training runs.

    A window has up to K steps of one episode; what is missing on the right is zeros, with mask False. With
    windows="start" they start at any of the N transitions and are short at an episode's end; with "end" they
    end at any and are short at its beginning; with "cover" both, so that each step is as frequent.
    Goals join the states, which are normalised by their own mean and spread, or by others: normal. Frames are
    stacked here; a stack never crosses its episode's beginning, before which there are zeros.
    """

    def __init__(self, trajectories, context_len, device="cpu", rtg_scale=1.0, reward_scale=1.0,
                 max_ep_len=None, goal=True, windows="start", normal=None):
        t = trajectories
        self.kind, self.discrete, self.K = windows, t.discrete, context_len
        self.max_ep_len = max_ep_len or t.max_ep_len
        parts = [] if t.stack else [t.states] + [t.goals] * (goal and t.goal_dim > 0)
        S = sum(x.shape[1] for x in parts)
        self.sizes = [S, 1 if t.discrete else t.act_dim, 1, 1]
        # one table for all numbers of a step: a batch is then one gather and not five
        x = torch.empty(len(t), sum(self.sizes))
        self.mean, self.std = normal or (None, None)
        if parts:
            torch.cat(parts, 1, out=x[:, :S])
        if parts and not normal:
            columns = x[:, :S].unbind(1)        # one by one: no second copy of all in float64
            self.mean = torch.stack([c.double().mean() for c in columns]).float()
            std = torch.stack([c.double().std(correction=0) for c in columns]).float()
            size = torch.stack([c.abs().max() for c in columns])
            # a number that hardly varies for its size becomes 0, and not noise blown up
            self.std = torch.where(std <= 1e-4 * size, torch.inf, std)
        if parts:
            x[:, :S].sub_(self.mean).div_(self.std).clamp_(-CLIP, CLIP)
        x[:, S:-2] = t.actions.view(len(t), -1)
        x[:, -2] = t.rewards / reward_scale
        x[:, -1] = t.rtg / rtg_scale
        self.table = x.to(device)
        self.frames = t.states.to(device) if t.stack else None        # (N, height, width)
        rows = torch.arange(len(t))
        self.step = (rows - t.starts[:-1].repeat_interleave(t.lengths)).to(device)  # (N,): in its episode
        self.left = (t.starts[1:].repeat_interleave(t.lengths) - rows).to(device)   # (N,): steps to its end
        self.begins = t.starts[:-1].to(device)      # (E,)
        self.offsets = torch.arange(context_len, device=device)
        self.back = torch.arange(1 - t.stack, 1, device=device)     # (C,): a stack's frames, oldest first
        self.device = self.step.device

    def __len__(self):
        return len(self.step)

    def sample(self, batch_size, generator=None):
        """A batch of windows, each as likely as any other."""
        N, K, size = len(self), self.K, None
        short = len(self.begins) * (K - 1) * (self.kind == "cover")     # more windows, of 1 to K - 1 steps
        index = torch.randint(N + short, (batch_size,), generator=generator, device=self.device)
        if self.kind == "end":
            size = self.step[index].clamp(max=K - 1) + 1
            index = index - size + 1
        elif short:
            extra = index - N
            size = torch.where(extra < 0, K, extra % (K - 1) + 1)
            index = torch.where(extra < 0, index, self.begins[extra.clamp(min=0) // (K - 1)])
        return self.gather(index, size)

    def gather(self, index, size=None):
        """The batch of windows that start at the transitions index (B,) int64, of K or of size (B,) steps."""
        B, K = len(index), self.K
        mask = self.offsets < self.left[index][:, None]        # (B, K)
        if size is not None:
            mask &= self.offsets < size[:, None]
        # padding reads some later row, and is zeroed
        rows = (index[:, None] + self.offsets).clamp_(max=len(self) - 1).flatten()
        # index_select is several times as fast as table[rows] on a CPU
        x = self.table.index_select(0, rows).view(B, K, -1) * mask[..., None]       # (B, K, S + A + 2)
        states, actions, rewards, rtg = x.split(self.sizes, -1)
        if self.discrete:
            actions = actions[..., 0].long()
        timesteps = self.step[index][:, None] + self.offsets        # (B, K)
        if self.frames is not None:
            states = self.stacks(rows.view(B, K), timesteps, mask)
        timesteps = timesteps.clamp_(max=self.max_ep_len - 1) * mask
        return dict(states=states, actions=actions, rewards=rewards, rtg=rtg, timesteps=timesteps, mask=mask)

    def stacks(self, rows, timesteps, mask):
        """(B, K, C, height, width) uint8: the frames of rows (B, K) and those before, in their episodes."""
        inside = (timesteps[..., None] + self.back >= 0) & mask[..., None]        # (B, K, C)
        x = self.frames.index_select(0, (rows[..., None] + self.back).clamp_(min=0).flatten())
        return x.view(*inside.shape, *self.frames.shape[1:]).mul_(inside[..., None, None])


# ------------------------------------------------------------------ reading files

FOLDERS = dict(minari=("MINARI_DATASETS_PATH", "~/.minari/datasets"),
               d4rl=("D4RL_DATASET_DIR", "~/.d4rl/datasets"), dqn=("DQN_REPLAY_DIR", "~/.dqn_replay"))
COPIES = 2.2    # of a file's size (measured): the arrays, what is scaled of them, and the table of Windows


def folder_of(source, data=""):
    """The folder of a source's files: --data, or what a variable names. Minari is told of its own."""
    variable, usual = FOLDERS[source]
    folder = Path(data or os.environ.get(variable) or usual).expanduser().absolute()
    if data and not folder.is_dir():
        raise UserError(f"--data {data}: there is no folder of this name")
    if source == "minari":
        os.environ[variable] = str(folder)
    return folder


def check_memory(need):
    """Refuse what will not fit before it is read: the system kills a process that runs out."""
    free = psutil.virtual_memory().available
    if need > 0.9 * free:
        raise UserError(
            f"it takes about {need / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free; free "
            "some, or train on a part of it (frames: --transitions N; others: README, 'Your own data')")


def load_d4rl(path, env=None):
    """Trajectories from an HDF5 file in D4RL's layout, with the facts of env, a row of ENVS."""
    import h5py
    path, ant = Path(path), env is not None and env.family in ("ant", "antmaze")
    with reading(path):
        check_memory(COPIES * path.stat().st_size)
        with h5py.File(path, "r") as f:
            states, actions, rewards = (f[key][()] for key in ("observations", "actions", "rewards"))
            ends = [checked(f[key][()], (-1,), key, 0, 1, bool) for key in ("terminals", "timeouts")]
            goals = f["infos/goal"][()] if "infos/goal" in f else None
        if ant:
            states = states[:, :env.state_dim]      # contact forces follow
        return Trajectories(
            states, actions, rewards, *episode_ends(*ends), goals, dataset=path.name, source="d4rl",
            action_low=-1.0, action_high=1.0, max_ep_len=env and env.max_ep_len,
            env_spec=env and {"id": env.id, "kwargs": env.kwargs | env.d4rl_kwargs},
            layout={"first": 27 if ant else None, "position": ant and env.family == "antmaze"})


def load_minari(id, env=None, source="minari", transitions=None):
    """Trajectories from a Minari set, published or your own.

    env: its row of ENVS, whose environment is acted in; None: the one that the set names. transitions: of
    pictures, about how many to load.
    """
    if not re.fullmatch(r"([\w-][\w.-]*/)*[\w-][\w.-]*-v\d+", id, re.ASCII):
        raise UserError(f"{id!r} is not a Minari id; they look like namespace/name-v0")
    root = folder_of("minari") / id
    if not root.exists():
        fetch(id, root, folder_of("minari"))
    with reading(root), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import minari
        facts = json.loads((root / "data" / "metadata.json").read_text())
        if not {"observation_space", "action_space"} <= facts.keys():
            # minari would make the environment to ask it, and so run whatever code the set names
            raise UserError("its metadata.json lacks the observation_space or the action_space")
        dataset = minari.load_dataset(id)
        fields = read_episodes(dataset, root, env, transitions)
        space, pictures = dataset.action_space, fields["layout"]["stack"]
        spec = dataset._eval_env_spec or dataset.env_spec       # minari has no public name for the first
        limit = env.max_ep_len if env else spec and spec.max_episode_steps
        ours = env or pictures and spec and spec.id.startswith("ALE/")
        if ours and pictures:
            fields["layout"]["shapes"] = None       # it gives gray frames
        if env:
            spec = {"id": env.id, "kwargs": env.kwargs}
        elif spec:
            spec = spec.id if ours else spec.to_json()
        if type(space).__name__ == "Discrete":
            fields |= dict(n_actions=space.n, action_start=space.start)
        elif type(space).__name__ == "Box" and len(space.shape) == 1:
            fields |= dict(action_low=space.low, action_high=space.high)
        else:
            raise UserError(f"actions are {space}; one Box of numbers or one Discrete choice is needed")
        if env and pictures:
            fields |= dict(stack=env.stack, clip_rewards=env.clip_rewards)
        return Trajectories(**fields, dataset=id, source=source, env_spec=spec,
                            max_ep_len=None if pictures else limit)


def read_episodes(dataset, root, env, transitions):
    """The arrays, lengths and layout that Trajectories takes, of a Minari set."""
    space, total = dataset.observation_space, int(dataset.total_steps)
    pictures = is_picture(space)
    layout = {"first": 27 if env and env.family in ("ant", "antmaze") else None, "position": False,
              "stack": pictures, "shapes": list(space.shape) if pictures else shapes_of(space)}
    wanted = min(total, transitions or total) if pictures else total
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    check_memory(2 * wanted * SIDE * SIDE if pictures else COPIES * size)
    lengths, parts = [], []
    for episode in dataset.iterate_episodes():
        T, seen = len(episode.rewards), episode.observations
        if not parts and isinstance(seen, dict):
            # AntMaze's observation lacks the position, PointMaze's begins with it
            body, place = (np.asarray(seen.get(key)) for key in ("observation", "achieved_goal"))
            if body.ndim == place.ndim == 2:
                layout["position"] = not np.array_equal(body[:, :place.shape[1]], place)
        state, goal = observe(seen, layout)
        goal = np.zeros((len(state), 0)) if goal is None else goal
        steps = (episode.actions, episode.rewards, episode.terminations, episode.truncations)
        if {len(x) for x in steps} != {T} or not T <= len(state) == len(goal) <= T + 1:
            raise UserError(f"the arrays of episode {episode.id} differ in length")
        parts.append((state[:T], goal[:T], *steps))
        lengths.append(T)
        if sum(lengths) >= wanted < total:
            break
    if not wanted <= sum(lengths) <= total:
        raise UserError(f"its episodes do not hold the {total} steps that its metadata.json says")
    states, goals, actions, rewards, *ends = map(np.concatenate, zip(*parts, strict=True))
    terminated, truncated = (x[np.cumsum(lengths) - 1] for x in ends)
    return dict(states=states, goals=goals if goals.shape[1] else None, actions=actions, rewards=rewards,
                lengths=lengths, terminated=terminated, truncated=truncated, layout=layout)


# ------------------------------------------------------------------ sources

def fetch(what, place, folder):
    """Download a file's URL or a Minari id to place in folder, where it appears when it is whole.

    Minari's client asks the mirror that HF_ENDPOINT names, or the store of MINARI_REMOTE.
    """
    socket.setdefaulttimeout(20)
    advice = f". You can put it in its place by hand: {place}"
    with explained(f"{what} is not at hand and could not be downloaded", advice):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as staging:
            new = Path(staging, place.relative_to(folder))
            if "://" in what:
                print(f"downloading {what}", flush=True)
                urllib.request.urlretrieve(what, new)
            else:
                from huggingface_hub import constants, utils
                from minari.storage.remotes import get_cloud_storage
                if "MINARI_REMOTE" not in os.environ:       # the client waits for a silent server for ever
                    utils.get_session().get(constants.ENDPOINT, timeout=10)
                get_cloud_storage().download_dataset(what, Path(staging))
            place.parent.mkdir(parents=True, exist_ok=True)
            new.rename(place)       # FileNotFoundError where the store has no such set


def from_minari(name, env, data, transitions):
    return load_minari(env.minari, env, transitions=transitions)


def from_d4rl(name, env, data, transitions):
    path = place_of("d4rl", name, data)
    if not path.exists():
        fetch(D4RL_URL + env.d4rl, path, path.parent)
    return load_d4rl(path, env)


def from_dqn(name, env, data, transitions):
    game, folder = env.id.removeprefix("ALE/").removesuffix("-v5"), folder_of("dqn", data)
    fields = load_replay(folder, game, transitions)
    lengths, terminated, _ = episode_ends(fields.pop("terminals"), fields.pop("last"))
    with reading(f"the replay of {game} in {folder}"):
        return Trajectories(
            **fields, lengths=lengths, terminated=terminated, n_actions=env.act_dim, stack=env.stack,
            truncated=~terminated & (lengths >= env.max_ep_len), clip_rewards=True, source="dqn",
            dataset=f"dqn-replay/{game}-{len(fields['actions'])}", env_spec=env.id)


def from_local(name, env, data, transitions):
    """The set that policies/collect.py makes, which is made now if it is not there."""
    from policies import collect
    if not place_of("local", name).exists():
        print(f"collecting {name}, once: it is kept in {folder_of('minari')}", flush=True)
        collect_local(name)
    usual = collect.SETS[name]
    trajectories, made = load_minari(usual.id, env, "local", transitions), collect.recipe(usual.id) or {}
    if "policy" not in made and (made.get("steps"), made.get("version")) != (usual.steps, usual.version):
        print(f"note: the stored {usual.id} was made with steps={made.get('steps')} and version="
              f"{made.get('version')}; usual are {usual.steps} and {usual.version} (data.py collect {name})")
    return trajectories


SOURCES = {"minari": from_minari, "d4rl": from_d4rl, "dqn": from_dqn, "local": from_local}


def local_id(name):
    """The Minari id of the set that policies/collect.py makes under this name, or None."""
    # here, because it loads OpenCV and gymnasium, which arrays of one's own do without
    from policies import collect
    return collect.SETS[name].id if name in collect.SETS else None


def collect_local(name, steps=None, seed=0):
    """Make a set again, offline, with the stored policies; returns its Minari id."""
    from policies import collect
    return collect.collect(name, steps, seed)


def sources_of(name):
    """The sources that have data of this name."""
    env = get_env(name)
    has = dict(minari=env.minari, d4rl=env.d4rl, dqn=env.family == "atari", local=local_id(name))
    return [source for source in SOURCES if has.get(source, True)]


def place_of(source, name, data=""):
    """The Minari set or the file that a source has of this name, whether it is at hand or not."""
    env = get_env(name)
    if source == "d4rl":
        return folder_of("d4rl", data) / Path(env.d4rl).name
    return folder_of("minari") / (env.minari if source == "minari" else local_id(name))


def stored(name, data=""):
    """The sources whose set of this name is at hand, but for replays."""
    sources = [source for source in sources_of(name) if source in ("minari", "d4rl", "local")]
    return [source for source in sources if place_of(source, name, data).exists()]


def load(name, source="auto", data="", goal=True, transitions=500_000):
    """Trajectories for a name of ENVS or minari:<id>.

    source: a key of SOURCES, or auto: published data, cached or else downloaded; never regenerated ones.
    data: their folder. goal: whether a maze set without goals is an error. transitions: of frames, about how
    many to load.
    """
    if source not in ("d4rl", "dqn"):
        folder_of("minari", data)
    if name.startswith("minari:"):
        if source not in ("auto", "minari"):
            raise UserError(f"{name} is a Minari set: leave out --source {source}")
        return load_minari(name.removeprefix("minari:"), transitions=transitions)
    env = get_env(name)
    sources = sources_of(name)
    if source == "auto":
        choices = [key for key in (*stored(name, data), *sources) if key in ("minari", "d4rl")]
        source = (choices or ["published"])[0]
    try:
        if source not in sources:
            note = f". {env.note[:1].upper()}{env.note[1:]}" * bool(env.note)
            raise UserError(f"{name} has no {source} data; its sources are {', '.join(sources)}{note}")
        t = SOURCES[source](name, env, data, transitions)
    except UserError as error:
        if source == "local" or not local_id(name):
            raise
        raise UserError(f"{error}\nTo make data here: python train.py --env {name} --source local") from error
    if goal and env.goal_dim and t.goals is None:
        raise UserError(f"{t.dataset} holds no goals (infos/goal or desired_goal). Train without: --no-goal")
    facts = ["state_shape", "act_dim", "discrete"] + ["goal_dim"] * (t.goals is not None)
    wrong = [f"{key} is {getattr(t, key)}, not {getattr(env, key)}" for key in facts
             if getattr(t, key) != getattr(env, key)]
    if wrong:
        raise UserError(f"{t.dataset} does not fit {name} ({env.id}): {'; '.join(wrong)}")
    return t


# ------------------------------------------------------------------ command line

def command_line():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    for command in ("info", "collect", "download"):
        sub = commands.add_parser(command)
        sub.add_argument("env")
        sub.add_argument("--data", default="", help="folder of the data")
        if command == "collect":
            sub.add_argument("--steps", type=int, help="number of transitions")
            sub.add_argument("--seed", type=int, default=0)
        if command == "download":
            sub.add_argument("--source", choices=["auto", *SOURCES], default="auto")
    args = parser.parse_args()
    if args.command == "list":
        for name, env in ENVS.items():
            print(f"{name:26s} {env.id:34s} {', '.join(sources_of(name))}")
        return
    name, data, sources = args.env, args.data, ["auto"]
    folder_of("minari", data)
    if args.command == "collect":
        collect_local(name, args.steps, args.seed)
        sources = ["local"]
    elif args.command == "download":
        sources = [args.source]
    elif not name.startswith("minari:"):
        sources = stored(name, data)
        for key, x in vars(ENVS[name]).items():
            print(f"{key:15s} {x}")
        if not sources:
            print(f"no data at hand: python data.py download {name}, or collect {name}")
    for source in sources:
        print(load(name, source, data, goal=False).summary())


if __name__ == "__main__":
    run_command(command_line)
