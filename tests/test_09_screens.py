"""Screens: the protocol under which Atari and DeepMind Control are played, one gray frame at a time.

A score on Atari means little without its protocol (frames skipped, sticky actions, no-ops, what ends an
episode), so each part of it is held here to a slow version or to the emulator's own counters.

    pytest tests/test_09_screens.py
"""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("ale_py")
from gymnasium.envs.registration import EnvSpec  # noqa: E402

import envs  # noqa: E402
from errors import UserError  # noqa: E402
from policies import screens  # noqa: E402

ROOT = Path(screens.__file__).parent.parent


def fresh(code, **variables):
    """A new process in the repository's folder; variables set to None are removed."""
    given = {key: value for key, value in (os.environ | variables).items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=given)


def frames_of(env):
    return env.unwrapped.ale.getEpisodeFrameNumber()


def fire(env, steps, seed=0):
    """The frames of an episode that presses FIRE only."""
    first, _ = env.reset(seed=seed)
    return np.array([first] + [env.step(1)[0] for _ in range(steps)])


# ---------------------------------------------------------------- Atari


def test_a_fresh_process_finds_the_game_and_prints_nothing():
    """No import or registration by the user, and no banner of the emulator."""
    run = fresh("import envs; env = envs.make('ALE/Breakout-v5'); env.reset(seed=0); env.step(1)")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("id", [env.id for env in envs.ENVS.values() if env.family == "atari"])
def test_all_games_give_one_gray_frame_and_advance_four_a_step(id):
    """A wrong skip (gymnasium's default skips 4 in the emulator) would make 16 of 4, and other scores."""
    env = screens.make(id)
    frame, _ = env.reset(seed=0)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    assert frame in env.observation_space
    assert env.action_space == gymnasium.spaces.Discrete(len(env.unwrapped.ale.getMinimalActionSet()))
    before, total = frames_of(env), env.unwrapped.ale.getFrameNumber()
    for step in range(1, 6):
        frame = env.step(env.action_space.n - 1)[0]
        assert frames_of(env) == before + 4 * step
        assert env.unwrapped.ale.getFrameNumber() == total + 4 * step
        assert frame in env.observation_space


def test_a_frame_is_the_maximum_of_the_last_two_in_gray_at_84_by_84():
    """Against the emulator stepped by hand, and areas averaged by two matrices in float64."""
    env, other = screens.make("ALE/Breakout-v5"), screens.make("ALE/Breakout-v5")
    shown, _ = fire(env, 30), fire(other, 0)
    ale = other.unwrapped.ale

    def areas(n):  # (84, n): the share of each of n pixels in each of 84
        edges, pixels = np.arange(85)[:, None] * n / 84, np.arange(n)
        return np.clip(np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels), 0, 1) * 84 / n

    differ = 0
    for frame in shown[1:]:
        raw = []
        for _ in range(4):
            ale.act(1)
            raw.append(ale.getScreenGrayscale().astype(float))
        small = areas(210) @ np.maximum(raw[2], raw[3]) @ areas(160).T
        assert np.abs(small - frame).max() <= 0.51
        differ += np.abs(areas(210) @ raw[3] @ areas(160).T - frame).max() > 5
        luminance = ale.getScreenRGB() @ [0.299, 0.587, 0.114]
        assert np.abs(luminance - raw[3]).max() < 2
    assert differ > 5  # the last frame alone lacks where the ball just was


def test_actions_are_never_sticky_unless_asked_for():
    """Evaluation plays without, the DQN-replay data were made with 0.25: both must be what they say."""
    for kwargs, probability in ({}, 0), ({"sticky": 0.25}, 0.25):
        ale = screens.make("ALE/Pong-v5", **kwargs).unwrapped.ale
        assert ale.getFloat("repeat_action_probability") == probability

    def paddle(sticky):
        env = screens.make("ALE/Pong-v5", sticky=sticky)
        env.reset(seed=0)
        return [env.step(2)[0] is not None and env.unwrapped.ale.getRAM()[51] for _ in range(10)]

    assert len(set(paddle(0.0))) > 3
    assert len(set(paddle(1.0))) == 1       # always sticky: the no-op of the start is repeated for ever


def test_a_lost_life_ends_nothing():
    """Five lives are one episode; pressing FIRE without moving loses them one by one."""
    env = screens.make("ALE/Breakout-v5")
    env.reset(seed=0)
    lives, ended = [], False
    while not ended:
        _, _, terminated, truncated, info = env.step(1)
        lives.append(info["lives"])
        ended = terminated or truncated
    assert terminated and not truncated and lives[-1] == 0 and set(lives) == {5, 4, 3, 2, 1, 0}


def test_after_108_000_frames_an_episode_is_truncated(monkeypatch):
    """No-ops included. The emulator's own count, so a short cap is enough to try it."""
    env = screens.make("ALE/Breakout-v5")
    assert env.unwrapped.ale.getInt("max_num_frames_per_episode") == 108_000
    assert env.spec.max_episode_steps == 27_000
    assert screens.make("ALE/Breakout-v5", frame_skip=3).spec.max_episode_steps == 36_000
    monkeypatch.setattr(screens, "FRAMES", 400)
    env = screens.make("ALE/Breakout-v5")
    assert env.spec.max_episode_steps == 100
    env.reset(seed=0)
    noops, steps, truncated = frames_of(env), 0, False
    while not truncated:
        _, _, terminated, truncated, _ = env.step(0)
        steps += 1
        assert not terminated
    assert noops > 0 and frames_of(env) == 400 and steps == -(-(400 - noops) // 4)


def test_an_episode_starts_after_1_to_30_no_ops():
    """gymnasium draws from 1 to noop_max; 0 turns them off."""
    env = screens.make("ALE/Pong-v5")
    env.reset(seed=0)
    assert {env.reset() and frames_of(env) for _ in range(250)} == set(range(1, 31))
    none = screens.make("ALE/Pong-v5", noop_max=0)
    none.reset(seed=0)
    assert frames_of(none) == 0


def test_the_same_seed_gives_the_same_game_and_two_side_by_side_do_not_meet():
    """Emulators keep their state apart: interleaved, each plays as it would alone."""
    a, b = screens.make("ALE/Breakout-v5"), screens.make("ALE/Pong-v5")
    alone, other = fire(a, 20, seed=3), fire(b, 20, seed=4)
    a.reset(seed=3), b.reset(seed=4)
    pairs = [(a.step(1)[0], b.step(1)[0]) for _ in range(20)]
    assert np.array_equal(alone[1:], [p[0] for p in pairs])
    assert np.array_equal(other[1:], [p[1] for p in pairs])


@pytest.mark.parametrize("id, near", [
    ("ALE/Brakout-v5", "Breakout"), ("ALE/breakout-v5", "Breakout"), ("ALE/Breakout-v4", "Breakout"),
    ("dm_control/cheetahrun-v0", "cheetahrun"),
])
def test_a_wrong_name_is_named(id, near):
    """By the words of gymnasium or of the suite, also to whoever asks through envs.py."""
    if id.startswith("dm_control"):
        pytest.importorskip("dm_control")
    with pytest.raises((ValueError, gymnasium.error.Error), match=near):
        screens.make(id)
    with pytest.raises(UserError, match=near):
        envs.make(id)


def test_a_spec_survives_json_and_makes_the_same_environment():
    """Minari stores the JSON; gymnasium alone can read it, and a film is made from it with render_mode."""
    env = screens.make("ALE/Pong-v5", sticky=0.25, noop_max=5)
    for spec in env.spec, screens.spec("ALE/Pong-v5", sticky=0.25, noop_max=5):
        spec = EnvSpec.from_json(spec.to_json())
        for again in envs.make(spec), gymnasium.make(spec):
            assert screens.describe(again) == screens.describe(env)
            assert again.spec.max_episode_steps == 27_000
            assert np.array_equal(fire(again, 10), fire(env, 10))
    film = envs.make(spec, render_mode="rgb_array")
    film.reset(seed=0)
    assert film.render().shape == (210, 160, 3)
    assert envs.make("ALE/Pong-v5", render_mode="rgb_array").reset(seed=0)[0].shape == (84, 84)


def test_a_spec_of_somebody_else_is_made_as_recorded():
    """Published sets hold colour frames and the emulator's own skip; they must not become ours silently."""
    env = envs.make(EnvSpec.from_json(gymnasium.spec("ALE/Pong-v5").to_json()))
    assert env.observation_space.shape == (210, 160, 3)


def test_the_line_for_the_head_of_a_run():
    """What makes two scores comparable, read from the environment itself."""
    assert screens.describe(screens.make("ALE/Breakout-v5")) == (
        "Breakout: skip 4, sticky 0.0, 4 actions (NOOP FIRE RIGHT LEFT), up to 30 no-ops, "
        "at most 27,000 steps")
    other = screens.describe(screens.make("ALE/Pong-v5", sticky=0.25, frame_skip=2))
    assert "skip 2, sticky 0.25, 6 actions" in other


# ---------------------------------------------------------------- DeepMind Control


@pytest.fixture(scope="module")
def control():
    """screens.make for DeepMind Control tasks, where this machine can render them."""
    pytest.importorskip("dm_control")
    try:
        screens.make("dm_control/cheetah-run-v0").close()
    except RuntimeError as error:
        pytest.skip(str(error))
    return lambda task, **kwargs: screens.make(f"dm_control/{task}-v0", **kwargs)


def episode(env, actions, seed=0):
    """(frames, rewards, truncated) of some actions after a reset."""
    frames, rewards, truncated = [env.reset(seed=seed)[0]], [], False
    for action in actions:
        frame, reward, terminated, truncated, _ = env.step(action)
        assert not terminated
        frames.append(frame)
        rewards.append(reward)
    return np.array(frames), np.array(rewards), truncated


@pytest.mark.parametrize("task, repeat", [
    ("cheetah-run", 4), ("ball_in_cup-catch", 4), ("finger-spin", 2), ("reacher-easy", 4),
    ("walker-walk", 2),
])
def test_the_five_tasks(control, task, repeat):
    """Length, bounds and frames of each; the suite's episodes have 1,000 steps."""
    name = task.replace("_", "-")
    env = control(task, **envs.ENVS[name].kwargs)
    assert env.spec.max_episode_steps == 1000 // repeat
    assert screens.describe(env) == f"{task}: action repeat {repeat}, {1000 // repeat} steps"
    space = env.action_space
    assert space.dtype == np.float32 and (space.low == -1).all() and (space.high == 1).all()
    space.seed(0)
    frames, _, _ = episode(env, [space.sample() for _ in range(3)])
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    assert all(frame in env.observation_space for frame in frames)
    assert all((a != b).any() for a, b in zip(frames, frames[1:], strict=False))
    env.close()


def test_a_step_adds_up_the_rewards_of_the_suites_steps_under_one_action(control):
    """Against the suite stepped by hand, its camera and its luminance."""
    env = control("cheetah-run")
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 6)).astype(np.float32)
    frames, rewards, _ = episode(env, actions, seed=3)
    slow = screens.load_suite().load("cheetah", "run", task_kwargs={"random": 3})
    slow.reset()
    for t, action in enumerate(actions):
        assert rewards[t] == pytest.approx(sum(slow.step(action).reward for _ in range(4)), abs=1e-9)
        r, g, b = np.moveaxis(slow.physics.render(84, 84, camera_id=0).astype(float), -1, 0)
        assert np.abs(frames[t + 1] - (0.299 * r + 0.587 * g + 0.114 * b)).max() <= 0.51


def test_the_suites_time_limit_truncates(control):
    """1,000 of its steps, whatever the repeat: the last step of ours may hold fewer."""
    for repeat, steps in (250, 4), (300, 4):
        env = control("reacher-easy", action_repeat=repeat)
        assert env.spec.max_episode_steps == steps
        _, _, early = episode(env, np.zeros((steps - 1, 2), np.float32))
        _, rewards, truncated = episode(env, np.zeros((steps, 2), np.float32))
        assert not early and truncated and len(rewards) == steps
        bare = env.unwrapped  # without gymnasium's own limit
        assert episode(bare, np.zeros((steps, 2), np.float32))[2]


def test_the_same_seed_gives_the_same_start_and_another_seed_another(control):
    """And two environments side by side do not meet."""
    a, b = control("reacher-easy"), control("cheetah-run")
    act = np.full(2, 0.5, np.float32), np.full(6, 0.5, np.float32)
    alone, other = episode(a, [act[0]] * 3, seed=1)[0], episode(b, [act[1]] * 3, seed=1)[0]
    first = a.reset(seed=1)[0], b.reset(seed=1)[0]
    pairs = [first] + [(a.step(act[0])[0], b.step(act[1])[0]) for _ in range(3)]
    assert np.array_equal(alone, [p[0] for p in pairs]) and np.array_equal(other, [p[1] for p in pairs])
    assert (a.reset(seed=2)[0] != alone[0]).any() and (a.reset()[0] != alone[0]).any()


def test_a_control_spec_survives_json(control):
    """As Minari stores it; for a film render() is larger, and in colour."""
    spec = EnvSpec.from_json(screens.spec("dm_control/walker-walk-v0", action_repeat=5, size=64).to_json())
    env = envs.make(spec, render_mode="rgb_array")
    assert env.reset(seed=0)[0].shape == (64, 64) and env.render().shape == (320, 320, 3)
    assert env.spec.max_episode_steps == 200
    assert env.metadata["render_fps"] == 8      # 0.025 s a step of the suite
    with pytest.raises(ValueError, match="cheeta"):
        control("cheeta-run")


def test_rendering_is_set_up_only_where_it_is_needed_and_nothing_is_printed(control):
    """MUJOCO_GL is this process's business: Atari leaves it alone, and a user's choice stays."""
    code = ("import os; from policies import screens; e = screens.make({!r}); e.reset(seed=0); e.close(); "
            "print(os.environ.get('MUJOCO_GL'))")
    run = fresh(code.format("ALE/Pong-v5"), MUJOCO_GL=None, DISPLAY=None)
    assert (run.stdout, run.stderr) == ("None\n", "")
    run = fresh(code.format("dm_control/reacher-easy-v0"), MUJOCO_GL=None, DISPLAY=None)
    assert run.stdout in ("egl\n", "osmesa\n") and run.stderr == ""


def test_where_nothing_renders_the_error_says_what_was_tried_and_what_to_install(monkeypatch):
    """dm_control's own message names neither."""
    pytest.importorskip("dm_control")
    monkeypatch.setattr(screens.ctypes.util, "find_library", lambda name: None)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(RuntimeError, match="egl and osmesa can: .* libegl1 .* libosmesa6"):
        screens.make("dm_control/cheetah-run-v0")
    code = "from policies import screens; screens.make('dm_control/cheetah-run-v0')"
    last = fresh(code, MUJOCO_GL="disable").stderr.splitlines()[-1]
    assert "RuntimeError: frames of dm_control can't be rendered with MUJOCO_GL=disable" in last
