"""Frames: replay folders, stacks and windows that never mix episodes, clipped rewards, memory, training."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import minari
import numpy as np
import pytest
import torch
from minari.data_collector import EpisodeBuffer

import data
import envs
import eval as E
import settings as cfgs
import train as T
from data import Trajectories, Windows
from envs import gray
from errors import UserError

ROOT = Path(__file__).parent.parent
SIDE = 84


def replay(folder, shards=2, episodes=((5, 3), (4, 6)), game="Breakout", blanks=3, cut_tail=True):
    """A replay in the published layout: the pixels of shard s, episode e, step t are all 50 s + 10 e + t + 1.

    The reward is t, the action t % 4. Every episode begins with blank steps, as Dopamine writes them; a last
    episode of 2 steps without an end follows if cut_tail.
    """
    place = folder / game / "1" / "replay_logs"
    place.mkdir(parents=True)
    for s in range(shards):
        obs, act, rew, ter = [], [], [], []
        for e, T_ in enumerate((*episodes[s], *([2] if cut_tail else []))):
            for _ in range(blanks):
                obs.append(0), act.append(0), rew.append(0), ter.append(0)
            for t in range(T_):
                obs.append(50 * s + 10 * e + t + 1), act.append(t % 4), rew.append(float(t))
                ter.append(int(t == T_ - 1 and e < len(episodes[s])))
        arrays = dict(
            observation=np.repeat(np.array(obs, np.uint8), SIDE * SIDE).reshape(-1, SIDE, SIDE),
            action=np.array(act, np.int32),
            reward=np.array(rew, np.float32),
            terminal=np.array(ter, np.uint8),
        )
        for name, x in arrays.items():
            with gzip.open(place / f"$store$_{name}_ckpt.{s}.gz", "wb") as f:
                np.save(f, x, allow_pickle=False)
    return folder


def load(folder, transitions=1000):
    return data.load("breakout", "dqn", str(folder), transitions=transitions)


# ------------------------------------------------------------------ replay folders


def test_a_replay_is_cut_into_its_episodes_without_the_blank_steps_and_without_beginnings_that_are_missing(
    tmp_path,
):
    """Shard 0 begins the agent's life; shard 1 begins in some episode, whose rest, its first, is left out."""
    t = load(replay(tmp_path))
    assert t.lengths.tolist() == [5, 3, 2, 6, 2] and t.terminated.tolist() == [True, True, False, True, False]
    assert t.states[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 11, 12, 13, 21, 22, 61, 62, 63, 64, 65, 66, 71, 72]
    assert (t.states == t.states[:, :1, :1]).all() and t.states.dtype == torch.uint8
    assert t.actions[:5].tolist() == [0, 1, 2, 3, 0] and t.n_actions == 4
    assert t.rewards[:5].tolist() == [0, 1, 1, 1, 1]  # cut to [-1, 1]
    assert t.rtg[:5].tolist() == [4, 4, 3, 2, 1]


@pytest.mark.parametrize("blanks", [0, 1, 2])
def test_only_blank_frames_are_left_out_before_an_episode(tmp_path, blanks):
    """The first step of an episode here has no reward and action 0, as blank ones have, but a picture."""
    t = load(replay(tmp_path, blanks=blanks))
    assert t.lengths.tolist() == [5, 3, 2, 6, 2] and t.states[:, 0, 0].tolist()[:6] == [1, 2, 3, 4, 5, 11]


def test_equal_parts_come_from_every_checkpoint_and_the_second_time_from_the_cache(tmp_path, capsys):
    replay(tmp_path)
    t = load(tmp_path, transitions=6)  # 3 of each: one whole episode of each
    assert t.lengths.tolist() == [5, 6] and "reading" in capsys.readouterr().out
    again = load(tmp_path, transitions=6)
    assert (
        torch.equal(again.states, t.states)
        and torch.equal(again.rtg, t.rtg)
        and capsys.readouterr().out == ""
    )


def test_changed_files_make_a_new_cache(tmp_path):
    replay(tmp_path)
    load(tmp_path)
    place = tmp_path / "Breakout" / "1" / "replay_logs"
    with gzip.open(place / "$store$_reward_ckpt.0.gz", "wb") as f:
        np.save(f, np.zeros(19, np.float32))
    assert load(tmp_path).rewards[:10].abs().max() == 0


@pytest.mark.parametrize("name", ["frames.u8", "steps.npz"])
def test_a_damaged_cache_is_made_anew(tmp_path, name):
    """It is ours, so nobody is asked to do anything about it."""
    states = load(replay(tmp_path)).states.clone()      # as loaded they are mapped from the cache
    cache = next(tmp_path.rglob(name))
    cache.write_bytes(cache.read_bytes()[:-20])
    assert torch.equal(load(tmp_path).states, states)


@pytest.mark.parametrize("inside", ["Breakout/1/replay_logs", "Breakout/1", "Breakout", "."])
def test_any_folder_on_the_way_down_will_do(tmp_path, inside):
    replay(tmp_path)
    assert len(load(tmp_path / inside).lengths) == 5


def test_a_replay_of_plain_names_in_numbered_folders_is_read_too(tmp_path):
    place = replay(tmp_path) / "Breakout" / "1" / "replay_logs"
    for s in (0, 1):
        (tmp_path / "plain" / str(s)).mkdir(parents=True)
        for name in ("observation", "action", "reward", "terminal"):
            (place / f"$store$_{name}_ckpt.{s}.gz").rename(tmp_path / "plain" / str(s) / f"{name}.gz")
    assert len(load(tmp_path / "plain").lengths) == 5


def file(folder, name, s=0):
    return folder / "Breakout" / "1" / "replay_logs" / f"$store$_{name}_ckpt.{s}.gz"


@pytest.mark.parametrize("name", ["observation", "action", "reward", "terminal"])
def test_a_cut_array_and_a_missing_one_are_named_with_their_path_and_after_repair_the_same_call_works(
    tmp_path, name
):
    path = file(replay(tmp_path), name, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read") as e:
        load(tmp_path)
    assert str(path) in str(e.value) and "again" in str(e.value)
    path.unlink()
    with pytest.raises(UserError, match=f"checkpoint 1 lacks its {name} array"):
        load(tmp_path)
    path.write_bytes(whole)
    assert len(load(tmp_path).lengths) == 5
    assert not [p for p in path.parent.iterdir() if p.name.startswith(".frames-")]


@pytest.mark.parametrize(
    "name,x,message",
    [
        ("action", np.zeros(18, np.int32), "holds 18 steps"),
        ("action", np.full(19, 9, np.int32), "actions of 4 choices: 9 in row 0"),
        ("action", np.zeros(19, np.float32), "cannot be read"),
        ("reward", np.full(19, np.nan, np.float32), "NaN"),
        ("terminal", np.full(19, 7, np.uint8), "terminal_ckpt.0.gz cannot be read"),
        ("observation", np.zeros((19, 84, 80), np.uint8), "cannot be read"),
        ("observation", np.zeros((7, 84, 84), np.uint8), "cannot be read"),
        ("observation", np.zeros((19, 84, 84), np.float32), "cannot be read"),
        ("observation", np.zeros((20, 84, 84), np.uint8), r"\(19, 84, 84\)"),
        ("reward", np.array([None] * 19, object), "cannot be read"),
    ],
)
def test_arrays_that_disagree_are_refused_with_what_and_where(tmp_path, name, x, message):
    with gzip.open(file(replay(tmp_path), name), "wb") as f:
        np.save(f, x, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_folders_without_a_replay_and_games_without_one_are_explained(tmp_path):
    with pytest.raises(UserError, match="gsutil"):
        load(tmp_path)
    with pytest.raises(UserError, match="does not exist|no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="hopper-medium has no dqn data"):
        data.load("hopper-medium", "dqn", str(tmp_path))


def test_sticky_actions_reach_the_games_made_here_a_minari_set_of_the_users_own_included_and_nothing_else(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data.collect_local("breakout", 20)
    t = data.load("minari:local/atari/breakout-v0")
    assert t.env_spec == {"id": "ALE/Breakout-v5", "kwargs": {}} and t.state_shape == (4, 84, 84)
    made = envs.sticky(t.env_spec, 0.25)
    assert made == {"id": "ALE/Breakout-v5", "kwargs": {"sticky": 0.25}} and t.env_spec["kwargs"] == {}
    assert "sticky 0.25" in envs.describe(envs.make(made))
    for other in ({"id": "Hopper-v5", "kwargs": {}}, "{}"):
        with pytest.raises(UserError, match="--sticky is for Atari games"):
            envs.sticky(other, 0.25)
    run = T.train(t, **SMALL | dict(sticky=0.25, size="small", out=str(tmp_path), steps=1, eval_episodes=0))
    assert run["meta"]["env_spec"] == made


def test_where_nothing_renders_collecting_says_so_in_a_message(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("frames can't be rendered")

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("policies.screens.load_suite", fail)
    with pytest.raises(UserError, match="rendered"):
        data.collect_local("cheetah-run")


def test_a_full_disk_is_said_in_a_message_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="No space left on device.*--transitions"):
        load(replay(tmp_path))
    assert not [*tmp_path.rglob("*frames*")]


def test_loading_takes_a_fraction_of_the_frames_memory(tmp_path):
    """20,000 frames are 141 MB; streamed and mapped, they must not be held: 4 stacked copies would be 564."""
    place = tmp_path / "Pong" / "1" / "replay_logs"
    place.mkdir(parents=True)
    n = 20_000
    terminal = np.zeros(n, np.uint8)
    terminal[99::100] = 1
    for name, x in dict(
        action=np.zeros(n, np.int32), reward=np.zeros(n, np.float32), terminal=terminal
    ).items():
        with gzip.open(place / f"$store$_{name}_ckpt.0.gz", "wb", 1) as f:
            np.save(f, x)
    with gzip.open(place / "$store$_observation_ckpt.0.gz", "wb", 1) as f:
        np.lib.format.write_array_header_1_0(f, dict(descr="|u1", fortran_order=False, shape=(n, SIDE, SIDE)))
        for i in range(n):
            f.write(bytes([1 + i % 200]) * SIDE * SIDE)
    code = (
        "import resource, data, policies.collect\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"before = peak(); t = data.load('pong', 'dqn', {str(tmp_path)!r})\n"
        "print(len(t), (peak() - before) / 1024, t.states[12345, 0, 0].item())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    steps, mib, pixel = run.stdout.splitlines()[-1].split()
    assert (steps, pixel) == ("20000", str(1 + 12345 % 200)) and float(mib) < 60, mib


# ------------------------------------------------------------------ stacks and windows


def counted(lengths=(5, 3, 6), stack=4, **kwargs):
    """Frames of 4 x 4 whose pixels are 10 times the episode (from 1) plus the step."""
    x = np.concatenate([10 * (e + 1) + np.arange(n) for e, n in enumerate(lengths)]).astype(np.uint8)
    x = np.repeat(x, 16).reshape(-1, 4, 4)
    return Trajectories(
        x, np.arange(len(x)) % 3, np.arange(len(x)), lengths, n_actions=3, stack=stack, **kwargs
    )


def test_no_stack_and_no_window_mixes_episodes_whatever_transition_it_starts_at():
    """Against a loop over every start: the pixel says which episode a frame is of; 0: none of them."""
    t, K = counted(), 4
    windows = Windows(t, K)
    batch = windows.gather(torch.arange(len(t)))
    assert batch["states"].shape == (14, K, 4, 4, 4) and batch["states"].dtype == torch.uint8
    index = 0
    for e, n in enumerate((5, 3, 6)):
        for start in range(n):
            for k in range(K):
                for c in range(4):
                    step = start + k - 3 + c
                    want = 10 * (e + 1) + step if start + k < n and step >= 0 else 0
                    got = batch["states"][index, k, c]
                    assert (got == want).all(), (e, start, k, c)
                assert batch["mask"][index, k] == (start + k < n)
            index += 1


@pytest.mark.parametrize("stack", [1, 3])
def test_other_stacks_have_their_own_number_of_frames(stack):
    batch = Windows(counted(stack=stack), 2).gather(torch.tensor([0, 5]))
    assert (
        batch["states"][:, :, -1, 0, 0].tolist() == [[10, 11], [20, 21]] and batch["states"].shape[2] == stack
    )


def test_clipped_rewards_make_clipped_returns_and_the_raw_ones_are_kept():
    t = counted(clip_rewards=True)
    assert t.returns.tolist() == [4, 3, 6] and t.raw_returns.tolist() == [10, 18, 63]
    assert (
        t.top(0.3).raw_returns.tolist() == [63]
        and "own points" in t.summary()
        and "clipped returns" in t.summary()
    )
    assert counted().returns.tolist() == [10, 18, 63] and "own points" not in counted().summary()


def test_pictures_become_gray_and_small():
    g = np.random.default_rng(0)
    x = g.integers(0, 256, (3, 168, 168, 3), np.uint8)
    y = gray(x)
    luminance = x @ np.array([0.299, 0.587, 0.114])
    want = luminance.reshape(3, 84, 2, 84, 2).mean((2, 4))
    assert y.shape == (3, 84, 84) and y.dtype == np.uint8 and np.abs(y - want).max() <= 1.1
    assert np.array_equal(gray(x.transpose(0, 3, 1, 2)), y), "colours, and not three frames"
    stacked = g.integers(0, 256, (3, 4, 84, 84), np.uint8)
    assert np.array_equal(gray(stacked), stacked[:, -1])
    assert np.array_equal(gray(stacked.transpose(0, 2, 3, 1)), stacked[:, -1])
    with pytest.raises(UserError, match="pictures are of shape"):
        gray(x.astype(np.float32))


# ------------------------------------------------------------------ training and acting

SMALL = dict(
    model="dt",
    steps=6,
    batch_size=3,
    context_len=3,
    n_layer=1,
    n_head=2,
    d=16,
    device="cpu",
    position="window",
    lr=1e-3,
)


def big(n=40, **kwargs):
    g = np.random.default_rng(0)
    return Trajectories(
        g.integers(0, 256, (n, 36, 36), np.uint8),
        g.integers(0, 3, n),
        g.standard_normal(n) * 3,
        [n // 2, n - n // 2],
        n_actions=3,
        stack=2,
        **kwargs,
    )


class Screen(gymnasium.Env):
    """A frame whose pixels are the step's number; the reward is 3, then -3, and so on; 7 + seed % 3 steps."""

    observation_space, action_space = (
        gymnasium.spaces.Box(0, 255, (36, 36), np.uint8),
        gymnasium.spaces.Discrete(3),
    )

    def reset(self, seed=None, options=None):
        self.t, self.n = 1, 7 + seed % 3
        return np.full((36, 36), self.t, np.uint8), {}

    def step(self, action):
        assert isinstance(action, int)
        self.t += 1
        return (
            np.full((36, 36), self.t, np.uint8),
            3.0 if self.t % 2 == 0 else -3.0,
            self.t == self.n + 1,
            False,
            {},
        )


gymnasium.register("Screen-v0", entry_point=f"{__name__}:Screen", max_episode_steps=20)


class Watcher(torch.nn.Module):
    def __init__(self, K):
        super().__init__()
        from types import SimpleNamespace

        self.cfg, self.seen, self.weight = (
            SimpleNamespace(context_len=K),
            [],
            torch.nn.Parameter(torch.zeros(1)),
        )

    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        self.seen.append(
            (states[..., 0, 0].clone(), rewards[..., 0].clone(), rtg[..., 0].clone(), timesteps.clone())
        )
        return torch.zeros(len(states), dtype=torch.int64)


META = dict(
    n_actions=3,
    action_start=0,
    layout={"stack": 2},
    state_shape=[2, 36, 36],
    max_ep_len=8,
    act_dim=3,
    clip_rewards=True,
    rtg_scale=2.0,
    reward_scale=1.0,
    goal=False,
    dataset="d",
    state_mean=None,
    state_std=None,
    action_low=None,
    action_high=None,
)


def test_acting_stacks_as_training_does_keeps_the_last_steps_only_and_counts_clipped_rewards():
    K = 2
    model, envs = Watcher(K), [Screen() for _ in range(3)]
    for env in envs:
        env.spec = None
    out = E.rollout(model, META | dict(max_ep_len=12), envs, np.array([5.0, 5.0, 5.0]), [0, 1, 2])
    assert (
        out["length"].tolist() == [7, 8, 9]
        and out["return"].tolist() == [3, 0, 3]
        and out["achieved"].tolist() == [1, 0, 1]
    )
    for t, (states, rewards, rtg, timesteps) in enumerate(model.seen):
        alive = [i for i in range(3) if t < 7 + i]
        steps = list(range(max(0, t - K + 1), t + 1))
        for states_row, rewards_row, rtg_row, times in zip(states, rewards, rtg, timesteps, strict=True):
            assert states_row.tolist() == [
                [s, s + 1] for s in steps
            ]  # pixels: step + 1, and 0 before the beginning
            assert times.tolist() == steps
            assert rewards_row[:-1].tolist() == [1.0 if s % 2 == 0 else -1.0 for s in steps[:-1]]
            assert rtg_row.tolist() == [(5 - s % 2) / 2 for s in steps]  # +1, 0, +1, ... collected so far
        assert len(states) == len(alive)


@pytest.mark.parametrize("model", cfgs.MODELS)
def test_every_model_trains_on_frames_and_its_run_is_played_again_from_its_folder_alone(model, tmp_path):
    t = big(env_spec={"id": "Screen-v0", "kwargs": {}}, clip_rewards=True)
    extra = dict(patch=12, step_d=8, step_heads=2) if model == "starformer" else {}
    left_out = dict(radt=["position"], dc=["n_head"]).get(model, [])
    config = cfgs.model_module(model).Config
    known = {f.name for f in dataclasses.fields(config)} | {"steps", "batch_size", "device", "lr"}
    given = {k: v for k, v in SMALL.items() if k in known and k not in left_out}
    result = T.train(t, **given | extra | dict(model=model, size="small", eval_episodes=2, out=str(tmp_path)))
    assert result["meta"]["state_mean"] is None and result["meta"]["clip_rewards"]
    row = result["rows"][0]
    assert row["achieved"] != row["returns"] or row["achieved"] == [0, 0]
    loaded, meta = E.load_run(result["run"])
    again = E.evaluate(loaded, meta, meta["plan"])
    assert [r["returns"] for r in again] == [r["returns"] for r in result["rows"]]
    text = (result["run"] / "table.txt").read_text()
    assert "achieved" in text and "[-1, 1]" in text


class Colours(gymnasium.Env):
    """Pictures of noise, with colours last or first, or a stack of gray ones; four steps."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape=(96, 96, 3)):
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.picture(), {}

    def picture(self):
        return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)

    def step(self, action):
        self.t += 1
        return self.picture(), 1.0, self.t == 4, False, {}


gymnasium.register("Colours-v0", entry_point=f"{__name__}:Colours", max_episode_steps=20)


@pytest.mark.parametrize("shape", [(96, 96, 3), (3, 96, 96), (96, 96), (96, 96, 1), (4, 40, 50)])
def test_what_is_done_to_the_pictures_of_a_users_set_is_done_to_those_of_its_environment(
    shape, tmp_path, monkeypatch
):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    buffers, seen = [], []
    env = gymnasium.make("Colours-v0", shape=shape)
    for i in range(5):
        observations = [env.reset(seed=i)[0], *(env.step(0)[0] for _ in range(4))]
        seen += observations[:4]
        steps = dict(actions=np.arange(4) % 2, rewards=np.ones(4), terminations=np.arange(4) == 3)
        episode = EpisodeBuffer(
            id=i, observations=np.array(observations), truncations=np.zeros(4, bool), **steps
        )
        buffers.append(episode)
    spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari.create_dataset_from_buffers("my/set-v0", buffers, env=env.spec, jpeg_encoding=False, **spaces)
    t = data.load("minari:my/set-v0")
    assert t.state_shape == (4, 84, 84) and t.actions.tolist() == [0, 1] * 10
    played = envs.make(t.env_spec)
    one, batch = played.reset(seed=3)[0], np.array(seen)
    assert np.array_equal(envs.observe(batch, t.layout)[0], t.states)
    assert np.array_equal(envs.observe(one, t.layout)[0], t.states[12])
    result = T.train(t, **SMALL | dict(size="small", eval_episodes=2, out=str(tmp_path)))
    assert result["rows"][0]["returns"] == [4, 4]


def test_an_environment_of_other_frames_is_refused_before_training(tmp_path):
    g = np.random.default_rng(0)
    t = Trajectories(
        g.integers(0, 256, (20, 40, 40), np.uint8),
        g.integers(0, 3, 20),
        g.random(20),
        [20],
        n_actions=3,
        stack=2,
        env_spec={"id": "Screen-v0", "kwargs": {}},
    )
    with pytest.raises(UserError, match="does not fit"):
        T.train(t, **SMALL | dict(out=str(tmp_path), size="small"))


def test_bench_and_show_take_frames():
    for flags in ("--bench 2 --batch_size 2 --context_len 2 --n_layer 1 --d 16 --n_head 2", "--show"):
        command = [sys.executable, "train.py", "--env", "breakout", "--size", "small", *flags.split()]
        strict = os.environ | {"PYTHONWARNINGS": "error::UserWarning"}
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=strict)
        assert run.returncode == 0, run.stderr
        last = run.stdout.splitlines()[-1]
        assert json.loads(last)["ms_per_step"] > 0 if "bench" in flags else "params" in last
