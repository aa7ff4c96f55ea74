"""Trajectories, windows and the sources they come from. Every loader's mistake here would train silently on wrong numbers.

    pytest tests/test_11_data.py
"""
import dataclasses
import http.server
import json
import os
import socketserver
import threading
import warnings

import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from minari.data_collector import EpisodeBuffer

import data
from data import ENVS, Trajectories, UserError, Windows, episode_ends, load_d4rl
from policies import collect


def episodes(lengths, S=3, A=2, seed=0, **kwargs):
    """Trajectories of random numbers whose first state number is the episode's index: mixing would show."""
    g, N = np.random.default_rng(seed), sum(lengths)
    states = g.standard_normal((N, S))
    states[:, 0] = np.repeat(np.arange(len(lengths)), lengths)
    return Trajectories(states, g.uniform(-1, 1, (N, A)), g.standard_normal(N), lengths, action_low=-1.0, action_high=1.0, **kwargs)


def write_hdf5(path, N=60, S=11, A=3, drop=(), **change):
    g = np.random.default_rng(0)
    x = dict(observations=g.standard_normal((N, S), np.float32), actions=g.uniform(-1, 1, (N, A)).astype(np.float32),
             rewards=g.random(N, np.float32), terminals=np.arange(N) % 20 == 19, timeouts=np.zeros(N, bool)) | change
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
    t = Trajectories(np.zeros((1_000_000, 1), np.float32), np.zeros((1_000_000, 1), np.float32), rewards, [1000] * 1000)
    exact = np.cumsum(rewards[-1000:][::-1].astype(np.float64))[::-1]
    assert np.abs(t.rtg[-1000:].numpy() - exact).max() < 1e-3


def test_episodes_end_at_flags_and_an_unfinished_tail_is_kept_and_counted():
    lengths, terminated, truncated = episode_ends([0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert lengths.tolist() == [2, 2, 2] and terminated.tolist() == [True, False, False] and truncated.tolist() == [False, True, False]
    t = Trajectories(np.zeros((6, 1)), np.zeros((6, 1)), np.ones(6), lengths, terminated, truncated)
    assert "1 terminated, 1 truncated, 1 cut off (their returns are lower bounds)" in t.summary()


def test_arrays_of_the_right_type_are_not_copied():
    states = np.zeros((4, 2), np.float32)
    assert Trajectories(states, np.zeros((4, 1)), np.zeros(4), [4]).states.data_ptr() == states.ctypes.data


def test_actions_are_scaled_from_their_bounds_to_minus_one_and_one():
    t = Trajectories(np.zeros((3, 1)), [[-2.0], [0.0], [1.0]], np.zeros(3), [3], action_low=[-2], action_high=[2])
    assert t.actions[:, 0].tolist() == [-1, 0, 0.5] and t.clipped == 0
    assert Trajectories(np.zeros((2, 1)), [[-9.0], [0.0]], np.zeros(2), [2], action_low=[-2], action_high=[2]).clipped == 1


@pytest.mark.parametrize("change, words", [
    (dict(states=np.full((4, 2), np.nan)), "states hold NaN or infinity in 4 of 4 transitions, the first at transition 0"),
    (dict(rewards=[0, 0, np.inf, 0]), "rewards hold NaN or infinity in 1 of 4 transitions, the first at transition 2"),
    (dict(lengths=[]), "no episodes"), (dict(lengths=[4, 0]), "episode 1 is empty"), (dict(lengths=[5]), "(5, any) numbers are needed"),
    (dict(states=np.zeros(4)), "shape (4,)"), (dict(actions=np.array([["a"]] * 4)), "numbers are needed"),
    (dict(lengths=4), "lengths are whole numbers"), (dict(lengths=[2.5, 1.5]), "lengths are whole numbers"),
    (dict(terminated=[True] * 4), "how each of 1 episodes ended"), (dict(action_low=[1.0], action_high=[-1.0]), "above the upper ones"),
    (dict(action_low=[-1.0, -1.0]), "bounds of shape (2,)"),
    (dict(actions=[0, 1, 9, 0], n_actions=6), "action id 9 does not fit an environment with 6 actions"),
    (dict(actions=[0, -1, 2, 0], n_actions=6), "action id -1"), (dict(actions=[0.0, 1.0, 2.0, 3.0], n_actions=6), "type float64"),
])
def test_arrays_that_disagree_are_refused_with_the_numbers(change, words):
    arrays = dict(states=np.zeros((4, 2)), actions=np.zeros((4, 1)), rewards=np.zeros(4), lengths=[4]) | change
    with pytest.raises(UserError) as e:
        Trajectories(**arrays)
    assert words in str(e.value)


def test_the_top_fraction_keeps_whole_episodes_of_highest_return():
    t = Trajectories(np.arange(10)[:, None], np.zeros((10, 1)), [1, 1, 9, 0, 5, 5, 5, 2, 2, 2], [2, 2, 3, 3])
    top = t.top(0.5)
    assert top.returns.tolist() == [9, 15] and top.states[:, 0].tolist() == [2, 3, 4, 5, 6] and top.starts.tolist() == [0, 2, 5]
    assert len(t.top(1e-9).lengths) == 1 and len(t.top(1.0)) == 10


# ------------------------------------------------------------------ windows

def slow_window(t, start, K, mean, std, rtg_scale, reward_scale):
    """The window at one transition, step by step, as one would write it first."""
    e = int(np.searchsorted(t.starts.numpy(), start, side="right")) - 1
    out = dict(states=np.zeros((K, t.states.shape[1])), actions=np.zeros((K, t.actions.shape[1])), rewards=np.zeros((K, 1)), rtg=np.zeros((K, 1)),
               timesteps=np.zeros(K, int), mask=np.zeros(K, bool))
    for k in range(K):
        i = start + k
        if i < int(t.starts[e + 1]):
            out["states"][k] = (t.states[i].numpy() - mean) / std
            out["actions"][k] = t.actions[i].numpy()
            out["rewards"][k] = float(t.rewards[i]) / reward_scale
            out["rtg"][k] = sum(float(r) for r in t.rewards[i: int(t.starts[e + 1])]) / rtg_scale
            out["timesteps"][k], out["mask"][k] = i - int(t.starts[e]), True
    return out


def test_every_window_equals_the_slow_one():
    t = episodes([1, 4, 9, 2])
    w = Windows(t, 5, rtg_scale=10.0, reward_scale=2.0)
    mean, std = t.states.double().mean(0).numpy(), t.states.double().std(0, correction=0).numpy()
    batch = w.at(torch.arange(len(t)))
    for i in range(len(t)):
        for k, x in slow_window(t, i, 5, mean, std, 10.0, 2.0).items():
            assert np.allclose(batch[k][i].numpy(), x, atol=1e-5), (i, k)
    assert {k: v.dtype for k, v in batch.items()} == dict(states=torch.float32, actions=torch.float32, rewards=torch.float32, rtg=torch.float32,
                                                          timesteps=torch.int64, mask=torch.bool)


def test_a_window_never_crosses_an_episode():
    t = episodes([1, 4, 9, 2])
    w = Windows(t, 8)
    batch = w.at(torch.arange(len(t)))
    episode = (batch["states"][..., 0] * w.std[0] + w.mean[0]).round()
    first = torch.repeat_interleave(torch.arange(4), t.lengths)[:, None]
    assert torch.equal(batch["mask"] * first, batch["mask"] * episode.long())
    assert not any(batch[k][~batch["mask"]].any() for k in batch), "padding is zeros"


def test_every_transition_starts_a_window_equally_often():
    """Uniform over transitions is the same as drawing episodes in proportion to their length; uniform over episodes is not.

    100,000 draws of 5 starts: each count is within 20,000 ± 700, more than 5 standard deviations (a false alarm in 300,000 runs).
    """
    t = Trajectories(np.arange(5)[:, None], np.zeros((5, 1)), np.zeros(5), [1, 4])
    w = Windows(t, 1)
    counts = torch.bincount((w.sample(100_000, torch.Generator().manual_seed(0))["states"][:, 0, 0] * w.std + w.mean).round().long())
    assert (counts - 20_000).abs().max() < 700


def test_the_same_generator_draws_the_same_batches_and_leaves_torchs_own_alone():
    w, before = Windows(episodes([50]), 3), torch.get_rng_state()
    a, b = (w.sample(4, torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a) and torch.equal(torch.get_rng_state(), before)


def test_a_constant_state_number_becomes_zero_and_not_noise():
    states = np.random.default_rng(0).standard_normal((50, 2))
    states[:, 1] = 3.3
    w = Windows(Trajectories(states, np.zeros((50, 1)), np.zeros(50), [50]), 4)
    assert w.std[1] == 1 and w.at(torch.arange(50))["states"][..., 1].abs().max() < 1e-5


def test_timesteps_stop_at_the_last_row_of_the_table():
    assert Windows(episodes([50]), 4, max_ep_len=10).at(torch.tensor([8, 40]))["timesteps"].tolist() == [[8, 9, 9, 9], [9, 9, 9, 9]]


def test_discrete_actions_stay_integers_and_goals_join_the_state():
    t = Trajectories(np.zeros((4, 2)), [3, 4, 5, 3], np.zeros(4), [4], goals=np.arange(8).reshape(4, 2), n_actions=3, action_start=3)
    batch = Windows(t, 2).at(torch.tensor([0, 3]))
    assert batch["actions"].tolist() == [[0, 1], [0, 0]] and batch["actions"].dtype == torch.int64 and batch["states"].shape == (2, 2, 4)
    assert Windows(t, 2, goal=False).at(torch.tensor([0]))["states"].shape == (1, 2, 2)


# ------------------------------------------------------------------ D4RL files

def test_d4rl_file_becomes_trajectories(tmp_path):
    t = load_d4rl(write_hdf5(tmp_path / "hopper_medium-v2.hdf5"), ENVS["hopper-medium"])
    assert len(t) == 60 and t.lengths.tolist() == [20, 20, 20] and t.terminated.all() and t.states.shape == (60, 11)


def test_d4rl_antmaze_of_29_numbers_takes_its_goal_from_infos_and_acts_in_an_environment_of_the_same_width(tmp_path):
    """D4RL's observation begins with x and y; the environment keeps them apart as achieved_goal. Both must give the same state."""
    goal = np.tile(np.float32([0, 8]), (60, 1))
    write_hdf5(tmp_path / "Ant_maze_u-maze_noreset_multistart_False_multigoal_False_sparse_fixed.hdf5", S=29, A=8, **{"infos/goal": goal})
    t = data.load("antmaze-umaze", "d4rl", str(tmp_path))
    assert t.states.shape == (60, 29) and torch.equal(t.goals, torch.from_numpy(goal))
    env = data.make_env(t.env_spec)
    o, _ = env.reset(seed=0, options=ENVS["antmaze-umaze"].starts["fixed"])
    state, desired = data.observe(o, t.layout)
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


@pytest.mark.parametrize("spoil, words", [
    (lambda p: half(write_hdf5(p)), "cannot be read"), (lambda p: p.write_bytes(b""), "cannot be read"),
    (lambda p: p.write_text("<html>"), "cannot be read"),
    (lambda p: write_hdf5(p, drop=["actions"]), "lacks actions; it holds observations, rewards, terminals, timeouts"),
    (lambda p: write_hdf5(p, N=0), "no episodes"), (lambda p: write_hdf5(p, S=12), "states have 12 numbers, but hopper-medium (Hopper-v5) has 11"),
    (lambda p: write_hdf5(p, A=2), "actions have 2 numbers"), (lambda p: write_hdf5(p, rewards=np.full(60, np.nan, np.float32)), "rewards hold NaN"),
    (lambda p: write_hdf5(p, rewards=np.zeros(59, np.float32)), "differ in length"), (lambda p: p.mkdir(), "cannot be read|does not exist"),
    (lambda p: write_hdf5(p, terminals=np.full(60, np.nan)), "one 0 or 1 a step"),
    (lambda p: write_hdf5(p, terminals=np.zeros((60, 2))), "one 0 or 1"),
])
def test_a_spoilt_d4rl_file_gives_one_message_with_its_path(spoil, words, tmp_path):
    path = tmp_path / "hopper_medium-v2.hdf5"
    spoil(path)
    with pytest.raises(UserError, match=words.replace("(", r"\(").replace(")", r"\)")) as e:
        data.load("hopper-medium", "d4rl", str(tmp_path))
    assert path.name in str(e.value)


# ------------------------------------------------------------------ downloads, against a server on loopback

class Server(http.server.BaseHTTPRequestHandler):
    body, cut, seen = bytes(range(256)) * 4000, None, []

    def do_GET(self):
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.seen.append(start)
        if start >= len(self.body):
            return self.send_error(416)
        part = self.body[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: self.cut] if self.cut else part)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Server.cut, Server.seen = None, []
    with socketserver.TCPServer(("127.0.0.1", 0), Server) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{s.server_address[1]}/"
        s.shutdown()


def test_a_download_that_breaks_off_goes_on_where_it_stopped(server, tmp_path):
    path = tmp_path / "sub" / "file.hdf5"
    Server.cut = 100_000
    with pytest.raises(UserError, match="run the same command again"):
        data.download(server, path)
    assert not path.exists()
    Server.cut = None
    data.download(server, path)
    assert path.read_bytes() == Server.body and Server.seen == [0, 100_000]


def test_a_left_over_part_that_is_too_long_is_fetched_anew(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * (len(Server.body) + 5))
    data.download(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == Server.body


def test_the_named_environments_file_is_downloaded_and_loaded(server, tmp_path, monkeypatch):
    Server.body, old = write_hdf5(tmp_path / "x.hdf5").read_bytes(), Server.body
    monkeypatch.setattr(data, "D4RL_URL", server)
    try:
        assert len(data.load("hopper-medium-replay", "d4rl", str(tmp_path))) == 60
    finally:
        Server.body = old


def test_without_a_network_the_message_names_the_set_its_place_and_the_offline_command(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "D4RL_URL", "http://127.0.0.1:9/")
    with pytest.raises(UserError) as e:
        data.load("hopper-medium-replay", "auto", str(tmp_path))
    assert str(tmp_path / "hopper_medium_replay-v2.hdf5") in str(e.value)
    assert "python train.py --env hopper-medium-replay --source local" in str(e.value)

    def unreachable(*_, **__):
        raise OSError("no route")
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(UserError) as e:
        data.load("hopper-medium")
    assert "mujoco/hopper/medium-v0" in str(e.value) and str(tmp_path) in str(e.value) and "--source local" in str(e.value)


# ------------------------------------------------------------------ Minari sets

def store(id, buffers, root, monkeypatch, **kwargs):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # minari's, about sets that name no environment to evaluate in
        minari.create_dataset_from_buffers(id, buffers, author="x", author_email="x@example.org", code_permalink="x", algorithm_name="random",
                                           description="test", **kwargs)


def make_set(id, observation_space, action_space, root, monkeypatch, env=None, n=5, T=12, **observation):
    """A Minari set of n episodes of T random steps in the folder root; observation: arrays to use in place of random ones."""
    observation_space.seed(0), action_space.seed(0)

    def draw(space):
        return {k: draw(s) for k, s in space.spaces.items()} if isinstance(space, Dict) else np.stack([space.sample() for _ in range(T + 1)])
    buffers = []
    for i in range(n):
        seen = draw(observation_space)
        actions = np.stack([action_space.sample() for _ in range(T)])
        buffers.append(EpisodeBuffer(id=i, observations=seen | observation if observation else seen, actions=actions, rewards=np.ones(T),
                                     terminations=np.zeros(T, bool), truncations=np.arange(T) == T - 1))
    store(id, buffers, root, monkeypatch, env=env, observation_space=observation_space, action_space=action_space)


def box(*shape, low=-1.0, high=1.0, dtype=np.float64):
    return Box(low, high, shape, dtype)


def test_a_users_minari_set_of_numbers_and_choices(tmp_path, monkeypatch):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    t = data.load("minari:my/cart-v0")
    assert (len(t), t.n_actions, t.states.dtype, t.actions.dtype) == (60, 2, torch.float32, torch.int64)
    assert t.truncated.all() and not t.terminated.any()
    assert data.make_env(t.env_spec).spec.id == "CartPole-v1"


def test_a_users_minari_set_of_wide_bounds_and_nested_observations(tmp_path, monkeypatch):
    make_set("my/pend-v0", Dict(b=box(2), a=Dict(c=box(1), d=box(3))), box(1, low=-2, high=2, dtype=np.float32), tmp_path, monkeypatch)
    t = data.load("minari:my/pend-v0")
    assert t.states.shape == (60, 6) and t.action_low.tolist() == [-2] and t.action_high.tolist() == [2] and t.env_spec is None
    assert 0.5 < t.actions.abs().max() <= 1


def test_a_position_that_the_observation_lacks_is_put_first_and_not_twice(tmp_path, monkeypatch):
    space = Dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2))
    make_set("my/lacks-v0", space, box(2, dtype=np.float32), tmp_path, monkeypatch)
    assert data.load("minari:my/lacks-v0").states.shape == (60, 6) and data.load("minari:my/lacks-v0").goals.shape == (60, 2)
    o = np.random.default_rng(0).uniform(-1, 1, (13, 4))
    make_set("my/holds-v0", space, box(2, dtype=np.float32), tmp_path, monkeypatch, observation=o, achieved_goal=o[:, :2].copy())
    assert data.load("minari:my/holds-v0").states.shape == (60, 4)


def test_minari_states_stand_beside_the_actions_taken_in_them(tmp_path, monkeypatch):
    """T + 1 observations for T actions: keeping the last T instead of the first would show the model where its action led."""
    o = np.arange(13.0)[:, None].repeat(4, 1) / 13
    buffers = [EpisodeBuffer(id=0, observations=o, actions=o[:12, :2].astype(np.float32), rewards=np.ones(12), terminations=np.arange(12) == 11,
                             truncations=np.zeros(12, bool))]
    store("my/order-v0", buffers, tmp_path, monkeypatch, observation_space=box(4), action_space=box(2, dtype=np.float32))
    t = data.load("minari:my/order-v0")
    assert torch.allclose(t.states[:, :2], t.actions, atol=1e-6) and t.terminated.tolist() == [True] and t.truncated.tolist() == [False]


def test_a_named_set_acts_in_the_named_environment_with_its_own_switches(tmp_path, monkeypatch):
    """Without continuing_task success would end a maze; without the cut, contact forces would widen an ant's state."""
    space = Dict(observation=box(105), achieved_goal=box(2), desired_goal=box(2))
    make_set("D4RL/antmaze/umaze-v1", space, box(8, dtype=np.float32), tmp_path, monkeypatch)
    t = data.load("antmaze-umaze", "minari")
    assert t.env_spec["kwargs"] == {"continuing_task": True, "reset_target": False} and t.states.shape == (60, 29) and t.layout["position"]


def test_auto_takes_what_is_cached_before_it_downloads(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "none"))
    write_hdf5(tmp_path / "hopper_medium-v2.hdf5")
    assert data.load("hopper-medium", data=str(tmp_path)).source == "d4rl"
    make_set("mujoco/hopper/medium-v0", box(11), box(3, dtype=np.float32), tmp_path, monkeypatch)
    assert data.load("hopper-medium", data=str(tmp_path)).source == "minari"


@pytest.mark.parametrize("how", ["external", "soft to external", "group", "storage", "virtual", "circle"])
def test_nothing_outside_a_file_is_read(how, tmp_path):
    """Each way out leads to a pipe that nobody writes to: opening it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    path = write_hdf5(tmp_path / "x.hdf5", drop=("rewards",))
    with h5py.File(path, "a") as f:
        if how == "external":
            f["rewards"] = h5py.ExternalLink("pipe", "rewards")
        elif how == "soft to external":
            f["away"], f["rewards"] = h5py.ExternalLink("pipe", "/"), h5py.SoftLink("/away/rewards")
        elif how == "group":
            f["rewards"], f["infos"] = np.zeros(60), h5py.ExternalLink("pipe", "/")
        elif how == "storage":
            f.create_dataset("rewards", (60,), np.float32, external=[(str(tmp_path / "pipe"), 0, 240)])
        elif how == "virtual":
            layout = h5py.VirtualLayout((60,), np.float32)
            layout[:] = h5py.VirtualSource(str(tmp_path / "pipe"), "rewards", (60,))
            f.create_virtual_dataset("rewards", layout)
        else:
            f["rewards"], f["back"] = h5py.SoftLink("/back"), h5py.SoftLink("/rewards")
    with pytest.raises(UserError, match="out of the file|in another file|cannot be read|lacks rewards"):
        load_d4rl(path)


def test_a_minari_set_with_a_link_to_a_pipe_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    id = data.collect_local("pointmaze-umaze", 300)
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / id / "data" / "main_data.hdf5", "a") as f:
        del f["episode_0/rewards"]
        f["episode_0/rewards"] = h5py.ExternalLink(str(tmp_path / "pipe"), "x")
    with pytest.raises(UserError, match="out of the file"):
        data.load("pointmaze-umaze", "local")


def test_a_link_within_a_file_is_followed(tmp_path):
    path = write_hdf5(tmp_path / "x.hdf5")
    plain = load_d4rl(path)
    with h5py.File(path, "a") as f:
        f["deep/gain"] = f["rewards"]
        del f["rewards"]
        f["rewards"] = h5py.SoftLink("/deep/gain")
    torch.testing.assert_close(load_d4rl(path).rewards, plain.rewards)


def test_a_d4rl_file_without_timeouts_is_cut_at_the_step_limit(tmp_path):
    """Episodes of 700 and, by the limit of 1000, 1000 and 300 more: one endless episode would carry rewards across all of them."""
    t = load_d4rl(write_hdf5(tmp_path / "x.hdf5", N=2000, terminals=np.arange(2000) == 699, drop=["timeouts"]), ENVS["hopper-medium"])
    assert t.lengths.tolist() == [700, 1000, 300] and t.truncated.tolist() == [False, True, False] and t.terminated.tolist() == [True, False, False]


def test_d4rl_actions_keep_their_bounds_of_one_whatever_the_data_reach(tmp_path):
    x = np.full((60, 3), 0.5, np.float32)
    assert load_d4rl(write_hdf5(tmp_path / "x.hdf5", actions=x), ENVS["hopper-medium"]).actions.unique().tolist() == [0.5]


def test_a_local_set_of_another_size_or_version_than_usual_is_pointed_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data.collect_local("pointmaze-umaze", 1)
    assert len(data.load("pointmaze-umaze", "local")) == 300
    assert "note: the stored local/pointmaze/umaze-v0 was made with" in capsys.readouterr().out
    monkeypatch.setitem(data.collect.NAMES, "pointmaze-umaze", 1)
    data.load("pointmaze-umaze", "local")
    assert "note" not in capsys.readouterr().out
    monkeypatch.setitem(data.collect.SETS, "pointmaze-umaze", dataclasses.replace(data.collect.SETS["pointmaze-umaze"], version=2))
    data.load("pointmaze-umaze", "local")
    assert "by version 1 of its player; usual are 1 and 2" in " ".join(capsys.readouterr().out.split())


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
    assert str(folder) in str(e.value) and "rm -r" in str(e.value)


def test_a_set_whose_environment_is_not_installed_loads_and_only_acting_fails(tmp_path, monkeypatch):
    make_set("my/set-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    meta = tmp_path / "my" / "set-v0" / "data" / "metadata.json"
    text = json.loads(meta.read_text())
    text["env_spec"] = text["env_spec"].replace("CartPole-v1", "Nowhere-v7").replace("gymnasium.envs.classic_control.cartpole", "nowhere")
    meta.write_text(json.dumps(text))
    t = data.load("minari:my/set-v0")
    with pytest.raises(UserError, match="Nowhere-v7 cannot be made.*\n.*--eval_episodes 0"):
        data.make_env(t.env_spec)


# ------------------------------------------------------------------ facts

def test_every_d4rl_name_of_the_papers_has_its_row():
    names = {f"{e}-{level}" for e in ("hopper", "halfcheetah", "walker2d", "ant") for level in ("medium", "medium-replay", "medium-expert", "expert")}
    names |= {f"{e}-{level}" for e in ("pen", "door", "hammer", "relocate") for level in ("human", "cloned", "expert")}
    names |= {f"kitchen-{x}" for x in ("complete", "partial", "mixed")}
    names |= {f"{m}-{x}" for m in ("maze2d", "pointmaze") for x in ("umaze", "medium", "large")}
    names |= {f"antmaze-{x}" for x in ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse")}
    names |= {"breakout", "qbert", "pong", "seaquest", "asterix", "frostbite", "assault", "gopher", "boxing"}
    names |= {"cheetah-run", "ball-in-cup-catch", "finger-spin", "reacher-easy", "walker-walk"}
    assert names == set(ENVS)


REFERENCES = {  # D4RL's infos.py, typed in again
    "hopper": (-20.272305, 3234.3), "halfcheetah": (-280.178953, 12135.0), "walker2d": (1.629008, 4592.3), "ant": (-325.6, 3879.7),
    "antmaze": (0, 1), "maze2d-umaze": (23.85, 161.86), "maze2d-medium": (13.13, 277.39), "maze2d-large": (6.7, 273.99), "pointmaze": None,
    "pen": (96.262799, 3076.8331017826877), "hammer": (-274.856578, 12794.134825156867), "door": (-56.512833, 2880.5693087298737),
    "relocate": (-6.425911, 4233.877797728884), "kitchen": (0, 4)}


# The no-op random player and the gamer of Mnih et al. (2015), Extended Data Table 2, as rounded by DreamerV2
ATARI = {"breakout": (2, 30), "qbert": (164, 13455), "pong": (-21, 15), "seaquest": (68, 42055), "asterix": (210, 8503), "frostbite": (65, 4335),
         "assault": (222, 742), "gopher": (258, 2412), "boxing": (0, 12)}


@pytest.mark.parametrize("name", ENVS)
def test_reference_returns_and_sizes_are_those_of_d4rl_and_of_the_environment(name):
    env = ENVS[name]
    if env.family == "dmc":
        assert env.ref is None and env.max_ep_len * env.kwargs["action_repeat"] == 1000
    elif env.family == "atari":
        assert env.ref == ATARI[name] and env.max_ep_len * 4 == 108_000
    else:
        assert env.ref == next(v for k, v in REFERENCES.items() if name == k or name.startswith(k + "-"))
        assert collect.robotics().spec(env.id).max_episode_steps == env.max_ep_len
    assert env.rtg_scale > 0 and (env.minari or env.d4rl or env.family == "dmc")


def test_evaluation_starts_from_the_far_pairs_that_the_local_sets_hold():
    for name, pair in collect.FAR.items():
        assert ENVS[name].starts["far"] == {k: list(v) for k, v in pair.items()}


@pytest.mark.parametrize("name", ["hopper-medium", "walker2d-medium", "halfcheetah-medium", "ant-medium", "pointmaze-umaze", "antmaze-umaze",
                                  "pen-human", "hammer-human", "door-human", "relocate-human", "kitchen-complete", "breakout", "seaquest"])
def test_the_environment_gives_states_of_the_width_in_its_row(name):
    row = ENVS[name]
    env = data.make_env({"id": row.id, "kwargs": row.kwargs | row.d4rl_kwargs})
    observation, _ = env.reset(seed=0)
    state, goal = data.observe(observation, {"first": 27 if row.family in ("ant", "antmaze") else None, "position": row.family == "antmaze",
                                             "stack": row.stack})
    assert state.shape == (row.state_shape[1:] or row.state_shape) and state.dtype == (np.uint8 if row.stack else np.float32)
    assert env.action_space.n == row.act_dim if row.discrete else env.action_space.shape == (row.act_dim,)
    assert (0 if goal is None else len(goal)) == row.goal_dim
    env.close()


def test_making_mazes_leaves_nothing_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("pointmaze-umaze", "antmaze-umaze"):
        data.make_env({"id": ENVS[name].id, "kwargs": ENVS[name].kwargs}).close()
    assert os.listdir(tmp_path) == []


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean hopper-medium"):
        data.load("hoper-medium")
