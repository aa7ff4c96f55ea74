"""Trajectories, windows and the sources they come from. A loader's mistake would train on wrong numbers.

pytest tests/test_11_data.py
"""

import dataclasses
import fcntl
import http.server
import json
import math
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text, Tuple
from minari.data_collector import EpisodeBuffer

import data
import envs
from data import Trajectories, Windows, episode_ends, load_d4rl
from envs import ENVS
from errors import UserError
from policies import collect

ROOT = Path(__file__).parent.parent


def episodes(lengths, S=3, A=2, seed=0, **kwargs):
    """Trajectories of random numbers whose first state number is the episode's index: mixing would show."""
    g, N = np.random.default_rng(seed), sum(lengths)
    states = g.standard_normal((N, S))
    states[:, 0] = np.repeat(np.arange(len(lengths)), lengths)
    return Trajectories(
        states,
        g.uniform(-1, 1, (N, A)),
        g.standard_normal(N),
        lengths,
        action_low=-1.0,
        action_high=1.0,
        **kwargs,
    )


def write_hdf5(path, N=60, S=11, A=3, drop=(), **change):
    g = np.random.default_rng(0)
    x = (
        dict(
            observations=g.standard_normal((N, S), np.float32),
            actions=g.uniform(-1, 1, (N, A)).astype(np.float32),
            rewards=g.random(N, np.float32),
            terminals=np.arange(N) % 20 == 19,
            timeouts=np.zeros(N, bool),
        )
        | change
    )
    with h5py.File(path, "w") as f:
        for k in x.keys() - set(drop):
            f[k] = x[k]
    return path


# ------------------------------------------------------------------ trajectories


def test_return_to_go_counts_the_reward_of_its_own_step_and_stops_at_the_episodes_end():
    t = Trajectories(np.zeros((5, 1)), np.zeros((5, 1)), [1, 2, 3, 10, 20], [3, 2])
    assert t.rtg.tolist() == [6, 5, 3, 30, 20] and t.returns.tolist() == [6, 30]


def test_return_to_go_keeps_its_digits_over_a_million_steps():
    """A float32 running total over the whole set would lose three digits by its end."""
    rewards = np.random.default_rng(0).random(1_000_000).astype(np.float32) * 10
    t = Trajectories(
        np.zeros((1_000_000, 1), np.float32), np.zeros((1_000_000, 1), np.float32), rewards, [1000] * 1000
    )
    exact = np.cumsum(rewards[-1000:][::-1].astype(np.float64))[::-1]
    assert np.abs(t.rtg[-1000:].numpy() - exact).max() < 1e-3


def test_episodes_end_at_flags_and_an_unfinished_tail_is_kept_and_counted():
    lengths, terminated, truncated = episode_ends([0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert (
        lengths.tolist() == [2, 2, 2]
        and terminated.tolist() == [True, False, False]
        and truncated.tolist() == [False, True, False]
    )
    t = Trajectories(np.zeros((6, 1)), np.zeros((6, 1)), np.ones(6), lengths, terminated, truncated)
    assert "1 terminated, 1 truncated, 1 cut off (their returns are lower bounds)" in t.summary()


def test_arrays_of_the_right_type_are_not_copied():
    states = np.zeros((4, 2), np.float32)
    assert Trajectories(states, np.zeros((4, 1)), np.zeros(4), [4]).states.data_ptr() == states.ctypes.data


def test_actions_are_scaled_from_their_bounds_to_minus_one_and_one():
    t = Trajectories(
        np.zeros((3, 1)), [[-2.0], [0.0], [1.0]], np.zeros(3), [3], action_low=[-2], action_high=[2]
    )
    assert t.actions[:, 0].tolist() == [-1, 0, 0.5] and t.clipped == 0
    assert (
        Trajectories(
            np.zeros((2, 1)), [[-9.0], [0.0]], np.zeros(2), [2], action_low=[-2], action_high=[2]
        ).clipped
        == 1
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(states=np.full((4, 2), np.nan)),
            "states: nan in row 0 is not in [-1e+30, 1e+30]",
        ),
        (
            dict(rewards=[0, 0, np.inf, 0]),
            "rewards: inf in row 2 is not in [-1e+30, 1e+30]",
        ),
        (dict(lengths=[]), "lengths have shape (0,)"),
        (dict(lengths=[4, 0]), "lengths: 0 in row 1"),
        (dict(lengths=[5]), "(5, any) numbers are needed"),
        (dict(states=np.zeros(4)), "shape (4,)"),
        (dict(actions=np.array([["a"]] * 4)), "numbers are needed"),
        (dict(lengths=4), "lengths have shape () and type int64; (any,) whole numbers are needed"),
        (dict(lengths=[2.5, 1.5]), "lengths have shape (2,) and type float64; (any,) whole numbers are"),
        (dict(terminated=[True] * 4), "terminated have shape (4,) and type bool; (1,) numbers are needed"),
        (dict(action_low=[1.0], action_high=[-1.0]), "above the upper ones"),
        (dict(action_low=[-1.0, -1.0]), "bounds of actions have shape (2,) and type float64; (1,) numbers"),
        (dict(actions=[0, 1, 9, 0], n_actions=6), "actions of 6 choices: 9 in row 2 is not in [0, 5]"),
        (dict(actions=[0, -1, 2, 0], n_actions=6), "actions of 6 choices: -1 in row 1"),
        (dict(actions=[0.0, 1.0, 2.0, 3.0], n_actions=6), "type float64"),
    ],
)
def test_arrays_that_disagree_are_refused_with_the_numbers(change, words):
    arrays = (
        dict(states=np.zeros((4, 2)), actions=np.zeros((4, 1)), rewards=np.zeros(4), lengths=[4]) | change
    )
    with pytest.raises(UserError) as e:
        Trajectories(**arrays)
    assert words in str(e.value)


def test_the_top_fraction_keeps_whole_episodes_of_highest_return():
    t = Trajectories(np.arange(10)[:, None], np.zeros((10, 1)), [1, 1, 9, 0, 5, 5, 5, 2, 2, 2], [2, 2, 3, 3])
    top = t.top(0.5)
    assert (
        top.returns.tolist() == [9, 15]
        and top.states[:, 0].tolist() == [2, 3, 4, 5, 6]
        and top.starts.tolist() == [0, 2, 5]
    )
    assert len(t.top(1e-9).lengths) == 1 and len(t.top(1.0)) == 10


# ------------------------------------------------------------------ windows


def slow_window(t, start, K, mean, std, rtg_scale, reward_scale):
    """The window at one transition, step by step, as one would write it first."""
    e = int(np.searchsorted(t.starts.numpy(), start, side="right")) - 1
    out = dict(
        states=np.zeros((K, t.states.shape[1])),
        actions=np.zeros((K, t.actions.shape[1])),
        rewards=np.zeros((K, 1)),
        rtg=np.zeros((K, 1)),
        timesteps=np.zeros(K, int),
        mask=np.zeros(K, bool),
    )
    for k in range(K):
        i = start + k
        if i < int(t.starts[e + 1]):
            out["states"][k] = (t.states[i].numpy() - mean) / std
            out["actions"][k] = t.actions[i].numpy()
            out["rewards"][k] = float(t.rewards[i]) / reward_scale
            out["rtg"][k] = sum(float(r) for r in t.rewards[i : int(t.starts[e + 1])]) / rtg_scale
            out["timesteps"][k], out["mask"][k] = i - int(t.starts[e]), True
    return out


def test_every_window_equals_the_slow_one():
    t = episodes([1, 4, 9, 2])
    w = Windows(t, 5, rtg_scale=10.0, reward_scale=2.0)
    mean, std = t.states.double().mean(0).numpy(), t.states.double().std(0, correction=0).numpy()
    batch = w.gather(torch.arange(len(t)))
    for i in range(len(t)):
        for k, x in slow_window(t, i, 5, mean, std, 10.0, 2.0).items():
            assert np.allclose(batch[k][i].numpy(), x, atol=1e-5), (i, k)
    assert {k: v.dtype for k, v in batch.items()} == dict(
        states=torch.float32,
        actions=torch.float32,
        rewards=torch.float32,
        rtg=torch.float32,
        timesteps=torch.int64,
        mask=torch.bool,
    )


def test_a_window_never_crosses_an_episode():
    t = episodes([1, 4, 9, 2])
    w = Windows(t, 8)
    batch = w.gather(torch.arange(len(t)))
    episode = (batch["states"][..., 0] * w.std[0] + w.mean[0]).round()
    first = torch.repeat_interleave(torch.arange(4), t.lengths)[:, None]
    assert torch.equal(batch["mask"] * first, batch["mask"] * episode.long())
    assert not any(batch[k][~batch["mask"]].any() for k in batch), "padding is zeros"


def test_every_transition_starts_a_window_equally_often():
    """Uniform over transitions: episodes in proportion to their length, and not each as often as another.

    100,000 draws of 5 starts: each count is within 20,000 ± 700, more than 5 standard deviations.
    """
    t = Trajectories(np.arange(5)[:, None], np.zeros((5, 1)), np.zeros(5), [1, 4])
    w = Windows(t, 1)
    counts = torch.bincount(
        (w.sample(100_000, torch.Generator().manual_seed(0))["states"][:, 0, 0] * w.std + w.mean)
        .round()
        .long()
    )
    assert (counts - 20_000).abs().max() < 700


@pytest.mark.parametrize("kind", ["start", "end", "cover"])
@pytest.mark.parametrize("K", [1, 3])
def test_windows_of_each_kind_are_those_listed_by_hand_and_equally_likely(kind, K):
    """Episodes of 2 and of 5 steps. All windows, as (first step, last step), written out by a loop."""
    lengths, expected, first = [2, 5], Counter(), 0
    for n in lengths:
        positions = range(n)        # of a window's first step, before its episode's where that is negative
        if kind == "end":
            positions = range(1 - K, n - K + 1)
        elif kind == "cover":
            positions = range(1 - K, n)
        for position in positions:
            expected[first + max(position, 0), first + min(position + K, n) - 1] += 1
        first += n
    t = Trajectories(np.arange(7.0)[:, None], np.zeros((7, 1)), np.zeros(7), lengths)
    w, draws = Windows(t, K, windows=kind), 60_000
    batch = w.sample(draws, torch.Generator().manual_seed(0))
    number = (batch["states"][..., 0] * w.std + w.mean).round().long()      # of each step
    last = number.gather(1, batch["mask"].sum(1, keepdim=True) - 1)[:, 0]
    found = Counter(zip(number[:, 0].tolist(), last.tolist(), strict=True))
    total = sum(expected.values())
    assert found.keys() == expected.keys()
    for window, count in expected.items():      # within five standard deviations of a multinomial draw
        share = count / total
        assert abs(found[window] - draws * share) < 5 * math.sqrt(draws * share * (1 - share)), window
    assert (batch["mask"].long().diff() <= 0).all() and not batch["states"][~batch["mask"]].any()
    assert torch.equal(batch["timesteps"][batch["mask"]], w.step[number[batch["mask"]]])
    if kind == "cover":
        steps = torch.bincount(number[batch["mask"]], minlength=7).double()
        assert (steps / steps.mean() - 1).abs().max() < 0.05, "each step is as frequent as any other"


def test_the_same_generator_draws_the_same_batches_and_leaves_torchs_own_alone():
    w, before = Windows(episodes([50]), 3), torch.get_rng_state()
    a, b = (w.sample(4, torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a) and torch.equal(torch.get_rng_state(), before)


def test_a_constant_state_number_becomes_zero_and_not_noise():
    states = np.random.default_rng(0).standard_normal((50, 2))
    states[:, 1] = 3.3
    w = Windows(Trajectories(states, np.zeros((50, 1)), np.zeros(50), [50]), 4)
    assert w.std[1] == torch.inf and w.gather(torch.arange(50))["states"][..., 1].abs().max() < 1e-5


def test_timesteps_stop_at_the_last_row_of_the_table():
    assert Windows(episodes([50]), 4, max_ep_len=10).gather(torch.tensor([8, 40]))["timesteps"].tolist() == [
        [8, 9, 9, 9],
        [9, 9, 9, 9],
    ]


def test_discrete_actions_stay_integers_and_goals_join_the_state():
    t = Trajectories(
        np.zeros((4, 2)),
        [3, 4, 5, 3],
        np.zeros(4),
        [4],
        goals=np.arange(8).reshape(4, 2),
        n_actions=3,
        action_start=3,
    )
    batch = Windows(t, 2).gather(torch.tensor([0, 3]))
    assert (
        batch["actions"].tolist() == [[0, 1], [0, 0]]
        and batch["actions"].dtype == torch.int64
        and batch["states"].shape == (2, 2, 4)
    )
    assert Windows(t, 2, goal=False).gather(torch.tensor([0]))["states"].shape == (1, 2, 2)


# ------------------------------------------------------------------ D4RL files


def test_d4rl_file_becomes_trajectories(tmp_path):
    t = load_d4rl(write_hdf5(tmp_path / "hopper_medium-v2.hdf5"), ENVS["hopper-medium"])
    assert (
        len(t) == 60
        and t.lengths.tolist() == [20, 20, 20]
        and t.terminated.all()
        and t.states.shape == (60, 11)
    )


def test_d4rl_antmaze_of_29_numbers_takes_its_goal_from_infos_and_acts_in_an_environment_of_the_same_width(
    tmp_path,
):
    """D4RL's observation begins with x and y, which the environment keeps apart as achieved_goal."""
    goal = np.tile(np.float32([0, 8]), (60, 1))
    write_hdf5(
        tmp_path / "Ant_maze_u-maze_noreset_multistart_False_multigoal_False_sparse_fixed.hdf5",
        S=29,
        A=8,
        **{"infos/goal": goal},
    )
    t = data.load("antmaze-umaze", "d4rl", str(tmp_path))
    assert t.states.shape == (60, 29) and torch.equal(t.goals, torch.from_numpy(goal))
    env = envs.make(t.env_spec)
    o, _ = env.reset(seed=0, options=ENVS["antmaze-umaze"].starts["fixed"])
    state, desired = envs.observe(o, t.layout)
    assert state.shape == (29,) and np.allclose(state[:2], o["achieved_goal"]) and desired.shape == (2,)
    env.close()


def test_d4rl_ant_of_111_numbers_keeps_the_first_27(tmp_path):
    write_hdf5(tmp_path / "ant_medium-v2.hdf5", S=111, A=8)
    assert data.load("ant-medium", "d4rl", str(tmp_path)).states.shape == (60, 27)


def test_a_maze_file_without_goals_asks_for_no_goal_and_then_loads(tmp_path):
    write_hdf5(tmp_path / "maze2d-umaze-sparse-v1.hdf5", S=4, A=2)
    with pytest.raises(UserError, match="--no-goal"):
        data.load("maze2d-umaze", "d4rl", str(tmp_path))
    assert data.load("maze2d-umaze", "d4rl", str(tmp_path), goal=False).goals is None


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda p: half(write_hdf5(p)), "cannot be read"),
        (lambda p: p.write_bytes(b""), "cannot be read"),
        (lambda p: p.write_text("<html>"), "cannot be read"),
        (
            lambda p: write_hdf5(p, drop=["actions"]),
            "cannot be read (KeyError.*object 'actions' doesn't exist",
        ),
        (lambda p: write_hdf5(p, N=0), "terminals have shape (0,)"),
        (lambda p: write_hdf5(p, S=12), "hopper-medium (Hopper-v5): state_shape is (12,), not (11,)"),
        (lambda p: write_hdf5(p, A=2), "act_dim is 2, not 3"),
        (lambda p: write_hdf5(p, rewards=np.full(60, np.nan, np.float32)), "rewards: nan in row 0"),
        (lambda p: write_hdf5(p, rewards=np.zeros(59, np.float32)), "shape (59,) and type float32; (60,)"),
        (lambda p: p.mkdir(), "cannot be read|does not exist"),
        (lambda p: write_hdf5(p, terminals=np.full(60, np.nan)), "terminals: nan in row 0 is not in .0, 1."),
        (lambda p: write_hdf5(p, terminals=np.zeros((60, 2))), "terminals have shape (60, 2) and"),
    ],
)
def test_a_spoilt_d4rl_file_gives_one_message_with_its_path(spoil, words, tmp_path):
    path = tmp_path / "hopper_medium-v2.hdf5"
    spoil(path)
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")) as e:
        data.load("hopper-medium", "d4rl", str(tmp_path))
    assert path.name in str(e.value)


# ------------------------------------------------------------------ downloads, against a server on loopback


class Server(http.server.BaseHTTPRequestHandler):
    body, cut = bytes(range(256)) * 4000, None

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body[: self.cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Server.cut = None
    with socketserver.TCPServer(("127.0.0.1", 0), Server) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_address[1]}/"
        s.shutdown()


def test_a_download_that_breaks_off_leaves_nothing_behind_and_the_same_call_works(server, tmp_path):
    path = tmp_path / "sub" / "file.hdf5"
    Server.cut = 100_000
    with pytest.raises(UserError, match="could not be downloaded .ContentTooShort"):
        data.fetch(server, path, path.parent)
    assert list(path.parent.iterdir()) == []
    Server.cut = None
    data.fetch(server, path, path.parent)
    assert path.read_bytes() == Server.body and list(path.parent.iterdir()) == [path]


def test_the_named_environments_file_is_downloaded_and_loaded(server, tmp_path, monkeypatch):
    Server.body, old = write_hdf5(tmp_path / "x.hdf5").read_bytes(), Server.body
    monkeypatch.setattr(data, "D4RL_URL", server)
    try:
        assert len(data.load("hopper-medium-replay", "d4rl", str(tmp_path))) == 60
    finally:
        Server.body = old


def test_without_a_network_the_message_names_the_file_its_place_and_the_offline_command(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "D4RL_URL", "http://127.0.0.1:9/")
    with pytest.raises(UserError) as e:
        data.load("hopper-medium-replay", "auto", str(tmp_path))
    assert str(tmp_path / "hopper_medium_replay-v2.hdf5") in str(e.value)
    assert "python train.py --env hopper-medium-replay --source local" in str(e.value)


def run(code, root, **env):
    """(exit code, output, seconds) of code in its own process: the hub's client reads its settings once."""
    start = time.time()
    env = os.environ | {"MINARI_DATASETS_PATH": str(root)} | env
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr, time.time() - start


DOWNLOAD = (
    "import sys, data, errors; sys.argv[1:] = ['download', 'hopper-medium']\n"
    "errors.run_command(data.command_line)"
)


class NotFound(http.server.BaseHTTPRequestHandler):
    asked = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror():
    NotFound.asked = []
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NotFound) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_address[1]}"
        s.shutdown()


def test_a_minari_set_is_asked_of_the_mirror_and_what_cannot_be_had_is_said_with_the_offline_command(
    mirror, tmp_path
):
    code, text, seconds = run(DOWNLOAD, tmp_path, HF_ENDPOINT=mirror)
    assert code == 2 and any("mujoco" in path for path in NotFound.asked), text
    assert "mujoco/hopper/medium-v0 is not at hand" in text and str(tmp_path / "mujoco") in text
    assert "python train.py --env hopper-medium --source local" in text and "Traceback" not in text
    assert seconds < 30 and list(tmp_path.iterdir()) == []


def test_another_store_of_minaris_is_asked_instead(mirror, tmp_path):
    code, text, _ = run(DOWNLOAD, tmp_path, HF_ENDPOINT=mirror, MINARI_REMOTE="gcp://bucket")
    assert code == 2 and not NotFound.asked and "mujoco/hopper/medium-v0" in text and "Traceback" not in text


def test_a_server_that_does_not_answer_is_given_up(tmp_path):
    """The hub's client waits for it without end."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        code = (
            f"import data; from pathlib import Path; root = Path({str(tmp_path)!r})\n"
            "data.fetch('mujoco/hopper/medium-v0', root / 'mujoco/hopper/medium-v0', root)"
        )
        _, text, seconds = run(code, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{s.getsockname()[1]}")
    assert "could not be downloaded (ReadTimeout" in text and seconds < 30 and list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ Minari sets


def store(id, buffers, root, monkeypatch, **kwargs):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # minari's, about sets that name no environment to evaluate in
        minari.create_dataset_from_buffers(
            id,
            buffers,
            author="x",
            author_email="x@example.org",
            code_permalink="x",
            algorithm_name="random",
            description="test",
            **kwargs,
        )


def make_set(id, observation_space, action_space, root, monkeypatch, env=None, n=5, T=12, **observation):
    """A Minari set of n episodes of T random steps in the folder root, or of the arrays `observation`."""
    observation_space.seed(0), action_space.seed(0)

    def draw(space):
        return (
            {k: draw(s) for k, s in space.spaces.items()}
            if isinstance(space, Dict)
            else np.stack([space.sample() for _ in range(T + 1)])
        )

    buffers = []
    for i in range(n):
        seen = draw(observation_space)
        actions = np.stack([action_space.sample() for _ in range(T)])
        buffers.append(
            EpisodeBuffer(
                id=i,
                observations=seen | observation if observation else seen,
                actions=actions,
                rewards=np.ones(T),
                terminations=np.zeros(T, bool),
                truncations=np.arange(T) == T - 1,
            )
        )
    store(
        id,
        buffers,
        root,
        monkeypatch,
        env=env,
        observation_space=observation_space,
        action_space=action_space,
    )


def box(*shape, low=-1.0, high=1.0, dtype=np.float64):
    return Box(low, high, shape, dtype)


def test_a_users_minari_set_of_numbers_and_choices(tmp_path, monkeypatch):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    t = data.load("minari:my/cart-v0")
    assert (len(t), t.n_actions, t.states.dtype, t.actions.dtype) == (60, 2, torch.float32, torch.int64)
    assert t.truncated.all() and not t.terminated.any()
    assert envs.make(t.env_spec).spec.id == "CartPole-v1"


def test_a_users_minari_set_of_wide_bounds_and_nested_observations(tmp_path, monkeypatch):
    make_set(
        "my/pend-v0",
        Dict(b=box(2), a=Dict(c=box(1), d=box(3))),
        box(1, low=-2, high=2, dtype=np.float32),
        tmp_path,
        monkeypatch,
    )
    t = data.load("minari:my/pend-v0")
    assert (
        t.states.shape == (60, 6)
        and t.action_low.tolist() == [-2]
        and t.action_high.tolist() == [2]
        and t.env_spec is None
    )
    assert 0.5 < t.actions.abs().max() <= 1


def test_a_position_that_the_observation_lacks_is_put_first_and_not_twice(tmp_path, monkeypatch):
    space = Dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2))
    make_set("my/lacks-v0", space, box(2, dtype=np.float32), tmp_path, monkeypatch)
    assert data.load("minari:my/lacks-v0").states.shape == (60, 6) and data.load(
        "minari:my/lacks-v0"
    ).goals.shape == (60, 2)
    o = np.random.default_rng(0).uniform(-1, 1, (13, 4))
    make_set(
        "my/holds-v0",
        space,
        box(2, dtype=np.float32),
        tmp_path,
        monkeypatch,
        observation=o,
        achieved_goal=o[:, :2].copy(),
    )
    assert data.load("minari:my/holds-v0").states.shape == (60, 4)


def test_minari_states_stand_beside_the_actions_taken_in_them(tmp_path, monkeypatch):
    """T + 1 observations for T actions: the last T of them would show the model where its action led."""
    o = np.arange(13.0)[:, None].repeat(4, 1) / 13
    buffers = [
        EpisodeBuffer(
            id=0,
            observations=o,
            actions=o[:12, :2].astype(np.float32),
            rewards=np.ones(12),
            terminations=np.arange(12) == 11,
            truncations=np.zeros(12, bool),
        )
    ]
    store(
        "my/order-v0",
        buffers,
        tmp_path,
        monkeypatch,
        observation_space=box(4),
        action_space=box(2, dtype=np.float32),
    )
    t = data.load("minari:my/order-v0")
    assert (
        torch.allclose(t.states[:, :2], t.actions, atol=1e-6)
        and t.terminated.tolist() == [True]
        and t.truncated.tolist() == [False]
    )


def test_a_named_set_acts_in_the_named_environment_with_its_own_switches(tmp_path, monkeypatch):
    """Without continuing_task success would end a maze; without the cut, a state had contact forces."""
    space = Dict(observation=box(105), achieved_goal=box(2), desired_goal=box(2))
    make_set("D4RL/antmaze/umaze-v1", space, box(8, dtype=np.float32), tmp_path, monkeypatch)
    t = data.load("antmaze-umaze", "minari")
    assert (
        t.env_spec["kwargs"] == {"continuing_task": True, "reset_target": False}
        and t.states.shape == (60, 29)
        and t.layout["position"]
    )


def test_auto_takes_what_is_cached_before_it_downloads(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "none"))
    write_hdf5(tmp_path / "hopper_medium-v2.hdf5")
    assert data.load("hopper-medium", data=str(tmp_path)).source == "d4rl"
    make_set("mujoco/hopper/medium-v0", box(11), box(3, dtype=np.float32), tmp_path, monkeypatch)
    assert data.load("hopper-medium", data=str(tmp_path)).source == "minari"


def test_a_link_within_a_file_is_followed(tmp_path):
    path = write_hdf5(tmp_path / "x.hdf5")
    plain = load_d4rl(path)
    with h5py.File(path, "a") as f:
        f["deep/gain"] = f["rewards"]
        del f["rewards"]
        f["rewards"] = h5py.SoftLink("/deep/gain")
    torch.testing.assert_close(load_d4rl(path).rewards, plain.rewards)


def test_d4rl_actions_keep_their_bounds_of_one_whatever_the_data_reach(tmp_path):
    x = np.full((60, 3), 0.5, np.float32)
    assert load_d4rl(
        write_hdf5(tmp_path / "x.hdf5", actions=x), ENVS["hopper-medium"]
    ).actions.unique().tolist() == [0.5]


def test_a_local_set_of_another_size_or_version_than_usual_is_pointed_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data.collect_local("pointmaze-umaze", 1)
    assert len(data.load("pointmaze-umaze", "local")) == 300
    assert "note: the stored local/pointmaze/umaze-v0 was made with" in capsys.readouterr().out
    usual = dataclasses.replace(collect.SETS["pointmaze-umaze"], steps=1)
    monkeypatch.setitem(collect.SETS, "pointmaze-umaze", usual)
    data.load("pointmaze-umaze", "local")
    assert "note" not in capsys.readouterr().out
    monkeypatch.setitem(collect.SETS, "pointmaze-umaze", dataclasses.replace(usual, version=2))
    data.load("pointmaze-umaze", "local")
    assert "steps=1 and version=1; usual are 1 and 2" in capsys.readouterr().out


@pytest.mark.parametrize("spoil", ["half", "empty folder", "no metadata"])
def test_a_spoilt_minari_set_names_its_folder_and_the_way_out(spoil, tmp_path, monkeypatch):
    make_set("my/set-v0", box(4), Discrete(2), tmp_path, monkeypatch)
    folder = tmp_path / "my" / "set-v0"
    if spoil == "half":
        half(folder / "data" / "main_data.hdf5")
    else:
        (folder / "data" / "metadata.json").unlink()
        if spoil == "empty folder":
            (folder / "data" / "main_data.hdf5").unlink()
            (folder / "data").rmdir()
    with pytest.raises(UserError) as e:
        data.load("minari:my/set-v0")
    assert str(folder) in str(e.value) and "Move it elsewhere" in str(e.value) and "elete" not in str(e.value)


def test_a_set_whose_environment_is_not_installed_loads_and_only_acting_fails(tmp_path, monkeypatch):
    make_set("my/set-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    meta = tmp_path / "my" / "set-v0" / "data" / "metadata.json"
    text = json.loads(meta.read_text())
    text["env_spec"] = (
        text["env_spec"]
        .replace("CartPole-v1", "Nowhere-v7")
        .replace("gymnasium.envs.classic_control.cartpole", "nowhere")
    )
    meta.write_text(json.dumps(text))
    t = data.load("minari:my/set-v0")
    with pytest.raises(UserError, match="Nowhere-v7 cannot be made.*\n.*--eval_episodes 0"):
        envs.make(t.env_spec)


# ------------------------------------------------------------------ observations of other kinds


def tuple_set(root, monkeypatch, space, observations, n=4, T=3):
    buffers = [
        EpisodeBuffer(
            id=i,
            observations=observations,
            actions=np.arange(T) % 2,
            rewards=np.ones(T),
            terminations=np.zeros(T, bool),
            truncations=np.arange(T) == T - 1,
        )
        for i in range(n)
    ]
    store("my/set-v0", buffers, root, monkeypatch, observation_space=space, action_space=Discrete(2))
    return data.load("minari:my/set-v0")


def test_tuples_and_single_choices_are_rows_of_numbers(tmp_path, monkeypatch):
    """Four observations of a tuple of three: read as an array they would be a 3 x 4 matrix, transposed."""
    space = Tuple((Discrete(9), Discrete(99), Discrete(999)))
    t = tuple_set(tmp_path, monkeypatch, space, (np.arange(4), 10 * np.arange(4), 100 * np.arange(4)))
    assert t.states.tolist() == [[0, 0, 0], [1, 10, 100], [2, 20, 200]] * 4
    state, _ = envs.observe((3, 30, 300), t.layout)
    assert state.tolist() == [3, 30, 300]
    state, _ = envs.observe((np.array([3, 4]), np.array([30, 40]), np.array([300, 400])), t.layout)
    assert state.tolist() == [[3, 30, 300], [4, 40, 400]]


@pytest.mark.parametrize(
    "space, observations, states",
    [
        (Discrete(9), np.arange(4), [[0], [1], [2]]),
        (MultiBinary(2), np.eye(2)[[0, 1, 1, 0]], [[1, 0], [0, 1], [0, 1]]),
        (
            Tuple((Box(-9, 9, (2,)), Discrete(9))),
            (np.ones((4, 2), np.float32), np.arange(4)),
            [[1, 1, i] for i in range(3)],
        ),
        (
            Dict(b=Box(-9, 9, (2, 2)), a=Discrete(9)),
            dict(b=np.ones((4, 2, 2), np.float32), a=np.arange(4)),
            [[i, 1, 1, 1, 1] for i in range(3)],
        ),
        (Box(0, 255, (2, 2, 3), np.uint8), np.full((4, 2, 2, 3), 7, np.uint8), [[7] * 12] * 3),
    ],
)
def test_every_space_of_numbers_becomes_a_vector(space, observations, states, tmp_path, monkeypatch):
    t = tuple_set(tmp_path, monkeypatch, space, observations)
    assert t.states.tolist() == states * 4
    space.seed(0)
    assert envs.observe(space.sample(), t.layout)[0].shape == t.state_shape


def test_a_goal_without_an_observation_beside_it_is_read_too(tmp_path, monkeypatch):
    space = Dict(achieved_goal=box(2), desired_goal=box(2), b=box(3))
    make_set("my/goals-v0", space, box(2, dtype=np.float32), tmp_path, monkeypatch)
    t = data.load("minari:my/goals-v0")
    assert t.states.shape == (60, 5) and t.goals.shape == (60, 2) and not t.layout["position"]


def test_codes_of_a_grid_world_are_no_picture(tmp_path, monkeypatch):
    codes = np.random.default_rng(0).integers(0, 11, (4, 7, 7, 3), np.uint8)
    t = tuple_set(tmp_path, monkeypatch, Box(0, 255, (7, 7, 3), np.uint8), codes)
    assert t.stack == 0 and np.array_equal(t.states[:3].numpy(), codes[:3].reshape(3, 147))
    assert envs.is_picture(Box(0, 255, (32, 32, 3), np.uint8)) and envs.is_picture(
        Box(0, 255, (3, 96, 96), np.uint8)
    )
    assert not envs.is_picture(Box(0, 255, (31, 96, 3), np.uint8))


@pytest.mark.parametrize(
    "space, observations, words",
    [
        (Dict(a=Text(9), b=Discrete(2)), dict(a=["x"] * 4, b=np.zeros(4, int)), "a Text of shape"),
        (
            Box(0, 1, (40, 40, 3)),
            np.zeros((4, 40, 40, 3), np.float32),
            r"a Box of shape \(40, 40, 3\) and type float32",
        ),
        (
            Dict(a=Box(0, 255, (40, 40), np.uint8), b=Discrete(2)),
            dict(a=np.zeros((4, 40, 40), np.uint8), b=np.zeros(4, int)),
            "FilterObservation",
        ),
    ],
)
def test_what_is_not_numbers_is_refused_by_the_name_of_its_space(
    space, observations, words, tmp_path, monkeypatch
):
    with pytest.raises(UserError, match=words):
        tuple_set(tmp_path, monkeypatch, space, observations)


def test_all_numbers_beside_an_observation_are_used_in_training_and_playing(tmp_path, monkeypatch):
    space = Dict(observation=box(4), lidar=box(16), achieved_goal=box(2), desired_goal=box(2))
    make_set("my/lidar-v0", space, box(2, dtype=np.float32), tmp_path, monkeypatch)
    t = data.load("minari:my/lidar-v0")
    assert t.states.shape == (60, 22) and t.goals.shape == (60, 2)  # 16 and 4, after the position that 4 lack
    o = space.sample()
    state, goal = envs.observe(o, t.layout)
    assert (
        np.allclose(state, np.concatenate([o["achieved_goal"], o["lidar"], o["observation"]]))
        and len(goal) == 2
    )


def test_a_set_in_another_format_is_read_or_the_missing_package_is_named(tmp_path, monkeypatch):
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        make_set("my/set-v0", box(4), Discrete(2), tmp_path, monkeypatch)
        facts = tmp_path / "my/set-v0/data/metadata.json"
        facts.write_text(facts.read_text().replace('"hdf5"', '"arrow"'))
        with pytest.raises(UserError, match=r"pip install .minari\[arrow\]") as e:
            data.load("minari:my/set-v0")
        assert "elete" not in str(e.value) and str(tmp_path) in str(e.value)
    else:
        observation = np.random.default_rng(0).uniform(-1, 1, (13, 4))
        kwargs = dict(observation_space=box(4), action_space=Discrete(2))
        buffers = [
            EpisodeBuffer(
                id=i,
                observations=observation + i,
                actions=np.arange(12) % 2,
                rewards=np.ones(12),
                terminations=np.zeros(12, bool),
                truncations=np.arange(12) == 11,
            )
            for i in range(3)
        ]
        for format in ("arrow", "parquet"):
            store(f"my/{format}-v0", buffers, tmp_path, monkeypatch, data_format=format, **kwargs)
            t = data.load(f"minari:my/{format}-v0")
            assert (
                np.allclose(t.states.numpy().reshape(3, 12, 4)[2], observation[:12] + 2) and t.truncated.all()
            )
            assert t.actions.tolist() == [0, 1] * 18


# ------------------------------------------------------------------ files in use, and folders


@pytest.mark.parametrize("kind", ["d4rl", "minari"])
def test_a_file_in_use_is_said_to_be_and_nobody_is_told_to_delete_it(kind, tmp_path, monkeypatch):
    if kind == "d4rl":
        path = write_hdf5(tmp_path / "hopper_medium-v2.hdf5", N=50)
    else:
        make_set("my/set-v0", box(4), Discrete(2), tmp_path, monkeypatch)
        path = tmp_path / "my/set-v0/data/main_data.hdf5"
    name = dict(d4rl="hopper-medium", minari="minari:my/set-v0")[kind]
    source = dict(d4rl="d4rl", minari="auto")[kind]
    with open(path) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use.*HDF5_USE_FILE_LOCKING=FALSE") as e:
            data.load(name, source, str(tmp_path))
        assert str(path if kind == "d4rl" else tmp_path / "my/set-v0") in str(e.value)
    assert len(data.load(name, source, str(tmp_path))) > 0


def test_a_file_that_may_not_be_read_is_said_to_be(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    write_hdf5(tmp_path / "hopper_medium-v2.hdf5")
    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(UserError, match="cannot be read .PermissionError.*Permission denied"):
        data.load("hopper-medium", "d4rl", str(tmp_path))


def test_no_message_asks_to_delete_data():
    for name in ("data.py", "replay.py", "envs.py"):
        assert not re.search(r"rm -r|[Dd]elete|[Rr]emove ", (ROOT / name).read_text()), name


def test_the_home_folder_may_be_a_tilde_for_us_and_for_minari(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_set("my/set-v0", box(4), Discrete(2), tmp_path / "sets", monkeypatch)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "~/sets")
    monkeypatch.chdir(tmp_path)
    assert len(data.load("minari:my/set-v0")) == 60
    assert data.folder_of("minari") == tmp_path / "sets" and not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    "line, words",
    [
        ("info hopper-medium --data /nowhere", "--data /nowhere: there is no folder"),
        ("list extra", "unrecognized arguments: extra"),
        ("list --source d4rl", "unrecognized arguments: --source d4rl"),
        ("info hopper-medium --steps 3", "unrecognized arguments: --steps 3"),
        ("collect pointmaze-umaze --source local", "unrecognized arguments: --source local"),
        ("download hopper-medium --seed 1", "unrecognized arguments: --seed 1"),
    ],
)
def test_the_command_line_refuses_what_it_would_not_use(line, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["data.py", *line.split()])
    with pytest.raises(UserError, match=re.escape(words)):
        data.command_line()


# ------------------------------------------------------------------ numbers that mislead


def test_one_wild_action_is_pointed_out_where_no_bounds_are_given(capsys):
    actions = np.random.default_rng(0).uniform(-1, 1, (1001, 2))
    actions[500, 1] = 50
    arrays = np.zeros((1001, 3)), actions, np.zeros(1001), [1001]
    Trajectories(*arrays)
    text = capsys.readouterr().out
    assert "99 % of the values of action number 1 fill 4 % of their range" in text and "action_high" in text
    assert text.count("\n") == 1
    Trajectories(*arrays, action_low=-1, action_high=1)
    Trajectories(np.zeros((9, 1)), np.full((9, 1), 0.3), np.zeros(9), [9])  # one that never varies is no case
    assert capsys.readouterr().out == ""
    Trajectories(*arrays, action_low=[-1, -np.inf], action_high=[1, np.inf])
    assert "action number 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "column, played",
    [
        (0.3 + 1e-5 * np.random.default_rng(0).standard_normal(1000), 0.35),
        (np.float32(300.3) + np.float32(3e-5) * (np.arange(1000) % 2), 350.0),
        (np.where(np.arange(1000) == 7, 0.001, 0), 0.5),
        (np.zeros(1000), 0.5),
        (1e-8 * np.random.default_rng(0).standard_normal(1000), 0.1),
    ],
)
def test_normalised_numbers_stay_small_in_training_and_playing(column, played):
    states = np.stack([np.random.default_rng(1).standard_normal(1000), column], 1)
    w = Windows(Trajectories(states, np.zeros((1000, 1)), np.zeros(1000), [1000]), 4)
    seen = w.gather(torch.arange(1000))["states"]
    assert seen.abs().max() <= envs.CLIP == 20
    mean, std = w.mean.numpy(), w.std.numpy()
    x = np.clip((np.float32([0, played]) - mean) / std, -envs.CLIP, envs.CLIP)  # as eval.py does
    assert np.abs(x).max() <= 20
    if np.ptp(column) < 1e-4 * np.abs(column).max():
        assert w.std[1] == torch.inf


def test_numbers_of_any_unit_are_normalised():
    """The limit below which a number counts as constant is relative to its size: metres, microns."""
    x = np.random.default_rng(0).standard_normal((1000, 1))
    arrays = np.zeros((1000, 1)), np.zeros(1000), [1000]
    for unit in (1e-9, 1, 1e9):
        w = Windows(Trajectories(unit * x, *arrays), 1)
        assert torch.allclose(w.table[:, 0], Windows(Trajectories(x, *arrays), 1).table[:, 0], atol=1e-4)


# ------------------------------------------------------------------ data and environments that do not fit


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(S=12), "does not fit hopper-medium (Hopper-v5): state_shape is (12,), not (11,)"),
        (
            dict(S=12, A=2),
            "does not fit hopper-medium (Hopper-v5): state_shape is (12,), not (11,); act_dim is 2, not 3",
        ),
        (
            {"infos/goal": np.zeros((60, 2), np.float32)},
            "does not fit hopper-medium (Hopper-v5): goal_dim is 2, not 0",
        ),
    ],
)
def test_all_that_does_not_fit_is_in_one_message(change, words, tmp_path):
    write_hdf5(tmp_path / "hopper_medium-v2.hdf5", **change)
    with pytest.raises(UserError) as e:
        data.load("hopper-medium", "d4rl", str(tmp_path))
    assert words in str(e.value)


def test_choices_for_numbers_and_vectors_for_frames_are_refused(tmp_path, monkeypatch):
    make_set("mujoco/hopper/medium-v0", box(11), Discrete(3), tmp_path, monkeypatch)
    with pytest.raises(
        UserError, match=r"does not fit hopper-medium \(Hopper-v5\): discrete is True, not False"
    ):
        data.load("hopper-medium", "minari")
    make_set("atari/pong/expert-v0", box(11), Discrete(6), tmp_path, monkeypatch)
    with pytest.raises(
        UserError, match=r"does not fit pong \(ALE/Pong-v5\): state_shape is \(11,\), not \(4, 84, 84\)"
    ):
        data.load("pong", "minari")


def test_where_the_robotics_package_has_other_versions_the_message_names_the_release(monkeypatch):
    gymnasium = envs.robotics()
    registry = {k: v for k, v in gymnasium.registry.items() if not re.fullmatch(r"AdroitHand.*-v1", k)}
    for name, spec in gymnasium.registry.items():
        if re.fullmatch(r"AdroitHand.*-v1", name):
            registry[name[:-1] + "2"] = dataclasses.replace(spec, id=name[:-1] + "2")
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    monkeypatch.setattr(envs, "robotics", lambda: gymnasium)
    for name in ("pen-human", "door-human"):
        with pytest.raises(UserError, match="gymnasium-robotics==1.4.2"):
            envs.make({"id": ENVS[name].id, "kwargs": {}})


# ------------------------------------------------------------------ facts


def test_every_d4rl_name_of_the_papers_has_its_row():
    names = {
        f"{e}-{level}"
        for e in ("hopper", "halfcheetah", "walker2d", "ant")
        for level in ("medium", "medium-replay", "medium-expert", "expert")
    }
    names |= {
        f"{e}-{level}"
        for e in ("pen", "door", "hammer", "relocate")
        for level in ("human", "cloned", "expert")
    }
    names |= {f"kitchen-{x}" for x in ("complete", "partial", "mixed")}
    names |= {f"{m}-{x}" for m in ("maze2d", "pointmaze") for x in ("umaze", "medium", "large")}
    names |= {
        f"antmaze-{x}"
        for x in ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse")
    }
    names |= {"breakout", "qbert", "pong", "seaquest", "asterix", "frostbite", "assault", "gopher", "boxing"}
    names |= {"cheetah-run", "ball-in-cup-catch", "finger-spin", "reacher-easy", "walker-walk"}
    names |= {"cheetah-vel", "ant-dir", "metaworld-ml10", "metaworld-ml45"}
    assert names == set(ENVS)


REFERENCES = {  # D4RL's infos.py, typed in again
    "hopper": (-20.272305, 3234.3),
    "halfcheetah": (-280.178953, 12135.0),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
    "antmaze": (0, 1),
    "maze2d-umaze": (23.85, 161.86),
    "maze2d-medium": (13.13, 277.39),
    "maze2d-large": (6.7, 273.99),
    "pointmaze": None,
    "pen": (96.262799, 3076.8331017826877),
    "hammer": (-274.856578, 12794.134825156867),
    "door": (-56.512833, 2880.5693087298737),
    "relocate": (-6.425911, 4233.877797728884),
    "kitchen": (0, 4),
}


# The no-op random player and the gamer of Mnih et al. (2015), Extended Data Table 2, as rounded by DreamerV2
ATARI = {
    "breakout": (2, 30),
    "qbert": (164, 13455),
    "pong": (-21, 15),
    "seaquest": (68, 42055),
    "asterix": (210, 8503),
    "frostbite": (65, 4335),
    "assault": (222, 742),
    "gopher": (258, 2412),
    "boxing": (0, 12),
}


@pytest.mark.parametrize("name", ENVS)
def test_reference_returns_and_sizes_are_those_of_d4rl_and_of_the_environment(name):
    env = ENVS[name]
    if env.family == "dmc":
        assert env.ref is None and env.max_ep_len * env.kwargs["action_repeat"] == 1000
    elif env.family == "atari":
        assert env.ref == ATARI[name] and env.max_ep_len * 4 == 108_000
    elif env.family == "tasks":
        assert env.ref is None and envs.robotics().spec(env.id).max_episode_steps == env.max_ep_len
    else:
        assert env.ref == next(v for k, v in REFERENCES.items() if name == k or name.startswith(k + "-"))
        assert envs.robotics().spec(env.id).max_episode_steps == env.max_ep_len
    assert env.rtg_scale > 0 and (env.minari or env.d4rl or env.family in ("dmc", "tasks"))


@pytest.mark.parametrize(
    "name",
    [
        "hopper-medium",
        "walker2d-medium",
        "halfcheetah-medium",
        "ant-medium",
        "pointmaze-umaze",
        "antmaze-umaze",
        "pen-human",
        "hammer-human",
        "door-human",
        "relocate-human",
        "kitchen-complete",
        "breakout",
        "seaquest",
        "cheetah-vel",
        "ant-dir",
    ],
)
def test_the_environment_gives_states_of_the_width_in_its_row(name):
    row = ENVS[name]
    env = envs.make({"id": row.id, "kwargs": row.kwargs | row.d4rl_kwargs})
    observation, _ = env.reset(seed=0)
    state, goal = envs.observe(
        observation,
        {
            "first": 27 if row.family in ("ant", "antmaze") else None,
            "position": row.family == "antmaze",
            "stack": row.stack,
        },
    )
    assert state.shape == (row.state_shape[1:] or row.state_shape) and state.dtype == (
        np.uint8 if row.stack else np.float32
    )
    assert env.action_space.n == row.act_dim if row.discrete else env.action_space.shape == (row.act_dim,)
    assert (0 if goal is None else len(goal)) == row.goal_dim
    env.close()


def test_making_mazes_leaves_nothing_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("pointmaze-umaze", "antmaze-umaze"):
        envs.make({"id": ENVS[name].id, "kwargs": ENVS[name].kwargs}).close()
    assert os.listdir(tmp_path) == []


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean hopper-medium"):
        data.load("hoper-medium")
