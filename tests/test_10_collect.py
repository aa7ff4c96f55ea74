"""Collecting: python data.py collect NAME makes a set again, offline, from (name, steps, seed).

A learner trusts a result as far as the data under it: these tests say what the sets promise.

    pytest tests/test_10_collect.py
"""
import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("minari")
import envs  # noqa: E402
import settings  # noqa: E402
from errors import UserError  # noqa: E402
from policies import collect as c  # noqa: E402
from policies import players, screens  # noqa: E402

SCRIPT = Path(c.__file__).parent.parent / "data.py"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Sets go to a folder of this test alone."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    return tmp_path / "sets"


def load(name, steps, seed=0):
    """The episodes of a set that has just been collected."""
    import minari

    return list(minari.load_dataset(c.collect(name, steps, seed, progress=False)))


def arrays(episodes):
    """All numbers of some episodes as one flat vector."""
    parts = []
    for e in episodes:
        observations = list(e.observations.values()) if isinstance(e.observations, dict) else [e.observations]
        parts += [*observations, e.actions, e.rewards, e.terminations, e.truncations]
    return np.concatenate([np.ravel(part).astype(np.float64) for part in parts])


def returns(episodes):
    return np.array([e.rewards.sum() for e in episodes])


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", ["pointmaze-umaze", "hopper-medium-replay", "antmaze-umaze"])
def test_the_same_name_steps_and_seed_give_the_same_bits(name):
    """A set is a function of three values, so nobody has to pass data around to compare results."""
    first, again = arrays(load(name, 300)), arrays(load(name, 300))
    assert np.array_equal(first, again)


def test_another_seed_gives_another_set():
    """Else five seeds would be one seed, five times."""
    one, other = (load("pointmaze-umaze", 300, seed)[0].actions for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_asking_for_more_keeps_the_episodes_there_were():
    """Each episode has a generator of its own: a larger set of one policy begins with the smaller one."""
    few, many = load("walker2d-medium-replay", 300), load("walker2d-medium-replay", 900)
    assert np.array_equal(arrays(few), arrays(many[: len(few)])) and len(many) > len(few)


@pytest.mark.parametrize("name, steps, cores", [
    ("hopper-medium-expert", 3000, 3), ("pointmaze-umaze", 2000, 2)])
def test_the_number_of_cores_changes_no_bit(name, steps, cores, monkeypatch, capsys):
    """Slow sets are played by a process for each core, and the expected minutes are told before."""
    alone = arrays(load(name, steps))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(c, "SPEED", dict.fromkeys(c.SPEED, 50))
    monkeypatch.setattr(c.os, "cpu_count", lambda: cores)
    assert np.array_equal(alone, arrays(load(name, steps)))
    assert capsys.readouterr().out == ""        # load() has told it to be silent
    c.collect(name, 1800)
    expected = f"{name}: about {0.6 / cores:.1f} minutes on {cores} cores\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("name", ["hopper-medium", "hopper-medium-expert", "pointmaze-umaze"])
@pytest.mark.parametrize("steps", [1, 700])
def test_a_set_is_whole_episodes_and_at_most_one_more_than_asked(name, steps):
    """A cut-off last episode would have a wrong return; many steps too many would be another experiment."""
    episodes = load(name, steps)
    lengths = [len(e.rewards) for e in episodes]
    assert sum(lengths) >= steps > sum(lengths[:-1])
    for e in episodes:
        ends = e.terminations | e.truncations
        assert ends[-1] and not ends[:-1].any()


def test_a_fall_is_a_termination_and_the_time_limit_a_truncation():
    """They differ for whoever bootstraps, so they are stored apart, as the environment says."""
    fallen, stopped = load("hopper-medium", 1)[0], load("halfcheetah-medium", 1)[0]
    assert fallen.terminations[-1] and not fallen.truncations[-1]
    assert stopped.truncations[-1] and not stopped.terminations[-1] and len(stopped.rewards) == 1000


def test_an_episode_has_one_observation_more_than_actions():
    """T + 1 observations, T of everything else; mazes store dicts, as their environment gives them."""
    hopper, ant = load("hopper-medium", 1)[0], load("antmaze-umaze", 1)[0]
    steps = len(hopper.rewards)
    assert hopper.observations.shape == (steps + 1, 11) and hopper.actions.shape == (steps, 3)
    assert {key: value.shape for key, value in ant.observations.items()} == {
        "observation": (701, 27),
        "achieved_goal": (701, 2),
        "desired_goal": (701, 2),
    }
    assert hopper.actions.dtype == np.float32 and ant.actions.shape == (700, 8)


@pytest.mark.parametrize("name", [
    "hopper-expert", "walker2d-medium", "halfcheetah-medium", "ant-medium-replay", "pointmaze-umaze"])
def test_the_stored_actions_played_in_gymnasium_give_the_stored_episode(name):
    """In the environment recovered from the set, reset as it was: the stored observations and rewards."""
    import minari

    dataset = minari.load_dataset(c.collect(name, 1, progress=False))
    episode, env = dataset[0], dataset.recover_environment()
    rng = np.random.default_rng([0, 0])     # its first number is the seed of the episode's reset
    options = envs.ENVS[name].starts.get("far")
    observation, _ = env.reset(seed=int(rng.integers(2**31)), options=options)
    maze = isinstance(observation, dict)
    if maze:
        Path(env.unwrapped.tmp_xml_file_path).unlink(missing_ok=True)
    stored = episode.observations["observation"] if maze else episode.observations
    for t in range(min(len(episode.rewards), 200)):
        assert np.allclose(observation["observation"] if maze else observation, stored[t], rtol=0, atol=1e-8)
        observation, reward, terminated, truncated, _ = env.step(episode.actions[t])
        assert reward == pytest.approx(episode.rewards[t], abs=1e-8)
        assert (terminated, truncated) == (episode.terminations[t], episode.truncations[t])


# ---------------------------------------------------------------- the behaviour


def test_the_point_always_reaches_its_goal_and_the_returns_spread():
    """Success is never the question in this set, only when: what a model can learn from returns."""
    episodes = load("pointmaze-umaze", 6000)
    assert all(e.rewards.max() > 0 for e in episodes)
    assert returns(episodes).std() > 30


def test_one_episode_in_five_runs_the_far_pair():
    """The task of the evaluation, with its own range of returns to aim at."""
    episodes, far = load("pointmaze-umaze", 3000), envs.ENVS["pointmaze-umaze"].starts["far"]
    centre = {key: np.array([cell[1] - 2.0, 2.0 - cell[0]]) for key, cell in far.items()}   # cells of 1 m
    start = np.array([e.observations["achieved_goal"][0] for e in episodes])
    goal = np.array([e.observations["desired_goal"][0] for e in episodes])
    pair = abs(start - centre["reset_cell"]).max(1) <= 0.25
    pair &= abs(goal - centre["goal_cell"]).max(1) <= 0.25
    assert len(episodes) == 10 and pair[::5].all() and pair.sum() <= 4


def test_the_larger_point_mazes_are_as_noisy_as_d4rls():
    """Where a past action tells the next one, models repeat it and stand still on the way."""
    for name, steps in (("pointmaze-medium", 3000), ("pointmaze-large", 4000)):
        episodes = load(name, steps)
        there = [e.actions[e.rewards > 0] for e in episodes]        # the rule asks for no push there
        assert all(e.rewards.max() > 0 for e in episodes)
        assert all(0.45 < a.std() < 0.55 for a in there)


@pytest.mark.parametrize("maze", ["umaze", "medium", "large"])
def test_the_far_pair_is_the_longest_way_of_its_maze(maze):
    """By breadth-first search from every cell."""
    name = f"pointmaze-{maze}"
    maze_map, far = c.SETS[name].spec().kwargs["maze_map"], envs.ENVS[name].starts["far"]

    def steps_to(goal):
        way, count = players.next_cells(maze_map, goal), {}
        for cell in way:
            at, n = cell, 0
            while way[at] != at:
                at, n = way[at], n + 1
            count[cell] = n
        return count

    cells = players.next_cells(maze_map, tuple(far["goal_cell"]))
    longest = max(max(steps_to(goal).values()) for goal in cells)
    assert steps_to(tuple(far["goal_cell"]))[tuple(far["reset_cell"])] == longest


def test_the_ant_runs_where_it_is_told():
    """A quarter turn of the world and of the ant in it changes no input: it knows its heading only."""
    observation = np.random.default_rng(0).standard_normal(27)
    observation[1:5] /= np.linalg.norm(observation[1:5])
    w, x, y, z = observation[1:5]
    s = np.sqrt(0.5)
    turned = observation.copy()
    turned[1:5] = s * np.array([w - z, x - y, y + x, z + w])  # (s, 0, 0, s) * quaternion
    turned[13:15] = -observation[14], observation[13]
    here = players.seen_from_heading(observation, 0.3)
    there = players.seen_from_heading(turned, 0.3 + np.pi / 2)
    assert here.shape == (29,) and np.allclose(here, there)
    observation[1:5] = np.cos(0.5), 0, 0, np.sin(0.5)       # upright, heading 1 rad to the left of +x
    inputs = players.seen_from_heading(observation, 1.0)
    assert np.allclose(inputs[1:5], [1, 0, 0, 0]) and np.allclose(inputs[-2:], [1, 0])


def test_an_antmaze_set_has_successes_and_failures():
    """Seven episodes of eight arrive, all in the one task of the maze; these eight show both kinds."""
    episodes = load("antmaze-umaze", 5600, seed=1)
    assert 4 <= sum(e.rewards.max() > 0 for e in episodes) <= 7
    starts = [e.observations["achieved_goal"][0] for e in episodes]
    assert np.allclose(starts, [-4, 4], atol=1)     # cell [1, 1] of cells of 4 m


def test_a_goal_of_a_diverse_antmaze_moves_after_fifty_steps_at_it():
    """So that most of the steps are on the way; the player then heads for the next one."""
    moved = 0
    for episode in load("antmaze-umaze-diverse", 2100):
        goals = episode.observations["desired_goal"]
        ends = (goals[1:-1] != goals[2:]).any(1).nonzero()[0] + 1       # the last step before each move
        for rewards in np.split(episode.rewards, ends)[:-1]:
            assert rewards.sum() == 51      # at the goal fifty times, and once more when it moves
        moved += len(ends)
    assert moved >= 4
    stays = load("antmaze-umaze", 1400)
    assert all(len(np.unique(e.observations["desired_goal"], axis=0)) == 1 for e in stays)


@pytest.mark.parametrize("body", ["hopper", "walker2d"])
def test_medium_replay_is_of_many_skills_and_expert_is_better_than_medium(body):
    """The sets differ in what they are named for; half of a replay is of the best player."""
    kinds = "medium-replay", "medium", "expert"
    replay, medium, expert = (returns(load(f"{body}-{kind}", 5000)) for kind in kinds)
    assert medium.mean() + medium.std() < expert.mean()
    assert replay.min() < 0.5 * medium.min() and replay.std() > 2 * medium.std()
    assert replay.max() > 0.9 * expert.mean()


def test_medium_expert_is_half_and_half():
    """Half of the transitions, so fewer of the long expert episodes."""
    episodes = load("halfcheetah-medium-expert", 2000)
    assert len(episodes) == 2
    assert returns(episodes)[0] < 9000 < returns(episodes)[1]


# ---------------------------------------------------------------- frames


@pytest.fixture
def short(monkeypatch):
    """Episodes of at most 400 steps in Atari and of 20 in DeepMind Control, for tests that need no more."""
    pytest.importorskip("ale_py")
    monkeypatch.setattr(screens, "FRAMES", 1600)
    fast = replace(envs.ENVS["cheetah-run"], kwargs={"action_repeat": 50})
    monkeypatch.setitem(envs.ENVS, "cheetah-run", fast)


def renders():
    try:
        screens.make("dm_control/cheetah-run-v0").close()
    except (RuntimeError, ImportError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [name for name, env in envs.ENVS.items() if env.family == "atari"])
def test_every_game_is_played_and_stored_as_single_frames_with_raw_rewards(name, short):
    """Frames are stacked, and rewards clipped, by whoever loads them; nobody could undo that."""
    (episode,) = load(name, 1)
    steps = len(episode.rewards)
    assert episode.observations.shape == (steps + 1, 84, 84) and episode.observations.dtype == np.uint8
    assert episode.actions.shape == (steps,) and episode.actions.dtype == np.int64
    assert len(set(episode.actions)) > 1
    assert 20 < steps <= 400 and (episode.truncations[-1] or episode.terminations[-1])
    if name in ("qbert", "seaquest", "asterix"):
        assert max(load(name, 1000), key=lambda e: e.rewards.max()).rewards.max() > 1


@pytest.mark.parametrize("name", ["seaquest", "cheetah-run"])
def test_the_stored_actions_give_the_stored_pixels(name, short):
    """All, in the environment recovered from the set and reset with the stored seed. JPEG would move them."""
    import minari

    if name == "cheetah-run":
        renders()
    dataset = minari.load_dataset(c.collect(name, 1, seed=2, progress=False))
    episode, env = dataset[0], dataset.recover_environment()
    assert env.spec.max_episode_steps == (20 if name == "cheetah-run" else 400)
    (stored,) = dataset.storage.get_episode_metadata([0])
    frame, _ = env.reset(seed=stored["seed"])
    for t, action in enumerate(episode.actions):
        assert np.array_equal(frame, episode.observations[t])
        frame, reward, terminated, truncated, _ = env.step(action)
        assert reward == episode.rewards[t]
        assert (terminated, truncated) == (episode.terminations[t], episode.truncations[t])
    assert np.array_equal(frame, episode.observations[-1]) and terminated or truncated
    env.close()


def test_the_same_seed_gives_the_same_frames(short):
    """As for the other sets; a part of another seed's frames differs."""
    first, again, other = (load("pong", 500, seed) for seed in (0, 0, 1))
    assert len(first) == 2 and np.array_equal(arrays(first), arrays(again))
    assert not np.array_equal(first[0].actions, other[0].actions)


def test_episodes_go_to_the_disk_as_they_finish(short):
    """A set of 40,000 frames has 282 MB; the peak must be an episode or two, not all."""
    load("asterix", 1)  # imports
    tracemalloc.start()
    id = c.collect("asterix", 2000, progress=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    import minari

    sizes = [e.observations.nbytes for e in minari.load_dataset(id)]
    assert len(sizes) >= 5 and peak < 4 * max(sizes) and peak < sum(sizes)


@pytest.mark.parametrize("name, poor, good", [
    ("breakout", 8, 25), ("pong", -4, 4), ("gopher", 300, 400), ("boxing", 5, 25), ("seaquest", 100, 150)])
def test_the_less_noise_the_better_the_player(name, poor, good, monkeypatch):
    """Returns from the random player's to good ones are what a model can learn from. 800 steps show it."""
    pytest.importorskip("ale_py")
    monkeypatch.setattr(screens, "FRAMES", 3200)
    env = envs.make(envs.ENVS[name].id)

    def score(chance):
        policy = partial(c.SETS[name].parts[0], chance=(chance, chance))
        return c.play(env, policy, np.random.default_rng(1)).rewards.sum()

    assert score(1.0) < poor and score(1e-9) > good


def test_returns_of_breakout_spread_within_a_set():
    """Skill is drawn for each episode. The player never rests by NOOP: who learns that seldom serves."""
    pytest.importorskip("ale_py")
    episodes = load("breakout", 3000)
    got = returns(episodes)
    assert got.min() < 10 and got.max() > 40
    assert not any(0 in e.actions for e in episodes)
    assert c.recipe("local/atari/breakout-v0")["version"] == 2


def test_breakouts_player_stands_still_only_while_the_ball_falls_low_and_else_keeps_its_rule(monkeypatch):
    pytest.importorskip("ale_py")
    monkeypatch.setattr(screens, "FRAMES", 1600)
    env, seen = envs.make("ALE/Breakout-v5"), []

    class Watched(players.BreakoutPlayer):
        def __call__(self, frame):
            before, last = self.before, self.last
            action, now = super().__call__(frame), self.memory()
            falling = now[101] > 150 and now[101] > before[101]
            seen.append((falling, self.last, players.breakout(now, before, last)))
            return action

    for chance in (1.0, 1e-9, 0.5):
        seen.clear()
        policy = partial(Watched, rule=players.breakout, chance=(chance, chance))
        c.play(env, policy, np.random.default_rng(1))
        assert all(did == rule for falling, did, rule in seen if not falling)
        falls = [list(steps) for falling, steps in itertools.groupby(seen, lambda step: step[0]) if falling]
        moving = [fall for fall in falls if any(rule != "FIRE" for *_, rule in fall)]
        still = [all(did == "FIRE" for _, did, _ in fall) for fall in moving]
        by_rule = [all(did == rule for _, did, rule in fall) for fall in falls]
        assert len(still) > 3
        assert {1.0: all(still), 1e-9: all(by_rule), 0.5: 0 < sum(still) < len(still)}[chance]
        decided_once = [kept or all(did == "FIRE" for _, did, _ in fall)
                        for fall, kept in zip(falls, by_rule, strict=True)]
        assert all(decided_once)


def test_the_cheetahs_gait_repeats_itself_and_swings_as_far_as_its_skill():
    assert c.SETS["cheetah-run"].parts == [players.galloper] and c.SETS["cheetah-run"].version == 3

    class Draws:        # skill 0.4: so little that no joint is stopped at its bound
        standard_normal = np.random.default_rng(0).standard_normal

        def uniform(self, low, high):
            assert (low, high) == (0.2, 1)
            return 0.4

    act = players.galloper(None, None, Draws())
    actions = np.array([act(None) for _ in range(5000)])
    time = 0.88 * np.arange(1, 5001)[:, None]
    for wave, expected in ((np.sin(time + players.PHASE), players.SIZE), (1, 2 * players.MEAN)):
        amplitude = 2 * (actions * wave).mean(0)
        assert np.allclose(amplitude, 0.4 * expected, atol=0.02)
    assert np.abs(actions).max() <= 1


def test_a_players_random_stretches_last_as_long_as_drawn():
    """chance 1 and no rule: actions in runs, none longer than 15 unless the same is drawn twice."""
    pytest.importorskip("ale_py")
    (episode,) = [load("qbert", 1)[0]]
    changes = np.flatnonzero(np.diff(episode.actions)) + 1
    runs = np.diff([0, *changes, len(episode.actions)])
    assert 1 < runs.mean() < 15 and len(set(episode.actions)) == 6


def test_pongs_paddle_glides_as_the_rule_foresees():
    """Within 2 pixels of the emulator's own, for four steps from rest in the middle, whatever is pressed."""
    pytest.importorskip("ale_py")
    env, phases = screens.make("ALE/Pong-v5"), set()
    for seed in range(8):
        env.reset(seed=seed)
        ale = env.unwrapped.ale
        for presses in [1, 0, 0, 0], [-1, 0, 0, 0], [1, 1, 0, -1], [-1, -1, 1, 0]:
            for _ in range(8):
                env.step(0)
            rest, odd = float(ale.getRAM()[51]), ale.getRAM()[8] & 1
            phases.add(int(odd))        # it moves in odd frames in some episodes, in even ones in others
            for step, press in enumerate(presses, 1):
                env.step((0, 3, 2)[press])
                assert abs(players.glide(rest, rest, presses, 4 * step, odd) - ale.getRAM()[51]) <= 2
    assert phases == {0, 1}


def test_a_policy_of_ones_own_is_recorded(short):
    """Called with the environment and a generator when an episode begins; what it returns plays it."""
    begun = []

    def policy(env, rng):
        begun.append(int(rng.integers(100)))
        seen = []

        def act(frame):
            seen.append(frame)
            return len(seen) % env.action_space.n

        return act

    id = c.collect("qbert", 500, progress=False, policy=policy)
    import minari

    episodes = list(minari.load_dataset(id))
    assert len(episodes) == len(begun) >= 2 and len(set(begun)) > 1
    assert all(np.array_equal(e.actions, (np.arange(len(e.actions)) + 1) % 6) for e in episodes)
    assert c.recipe(id)["policy"] == "the user's" and id == "local/atari/qbert-v0"


def test_a_policy_of_ones_own_for_control(short):
    """Vectors are stored as float32, in the environment's bounds as given."""
    renders()
    import minari

    id = c.collect("cheetah-run", 30, progress=False, policy=lambda env, rng: lambda frame: [0.25] * 6)
    episodes = list(minari.load_dataset(id))
    assert id == "local/dmc/cheetah-run-v0" and [len(e.actions) for e in episodes] == [20, 20]
    assert (episodes[0].actions == np.float32(0.25)).all() and episodes[0].actions.dtype == np.float32


# ---------------------------------------------------------------- the storing


@pytest.mark.parametrize("name", sorted(c.SETS))
def test_every_name_has_an_id_that_minari_can_parse(name):
    """And the maze2d names are the pointmaze sets, under the name that carries D4RL's reference scores."""
    from minari.dataset.minari_dataset import parse_dataset_id

    namespace, rest, version = parse_dataset_id(c.SETS[name].id)
    assert namespace.startswith("local/") and rest and version == 0 and c.SETS[name].steps > 0
    assert c.SETS[name] is c.SETS[name.replace("maze2d", "pointmaze")]


def test_whoever_changes_a_player_is_asked_about_versions():
    """Runs know their set by its version, which a person raises; comments and docstrings change nothing."""
    place = SCRIPT.parent / "policies"
    now = {path.name: settings.digits_of(path, "") for path in place.glob("*.py")}
    now |= {path.name: hashlib.sha1(path.read_bytes()).hexdigest()[:8] for path in place.glob("*.npz")}
    assert now == MADE_BY, "if a set becomes another one, raise its version; then note these digits"


MADE_BY = {
    "ant.npz": "78752137", "collect.py": "b897bcc1", "halfcheetah.npz": "17e3643c", "hopper.npz": "8a01e03f",
    "players.py": "d8188bfe", "screens.py": "17ce3ae5", "tasks.py": "c60fd420", "walker2d.npz": "2a84b6ee",
}


def test_a_set_says_how_it_was_made():
    """The record is enough to make it again, whichever of its names was used."""
    made = c.collect("maze2d-umaze", 300, seed=7, progress=False)
    assert c.recipe(made) == {"name": "pointmaze-umaze", "steps": 300, "seed": 7, "version": 1}
    assert c.recipe("local/hopper/medium-v0") is None


def test_a_maze_set_knows_the_environment_to_evaluate_in():
    """The diverse sets wander; their evaluation has one start and one goal, which ends no episode."""
    c.collect("antmaze-umaze-diverse", 1, progress=False)
    file = Path(os.environ["MINARI_DATASETS_PATH"], "local/antmaze/umaze-diverse-v0/data/metadata.json")
    made, evaluated = (json.loads(json.loads(file.read_text())[key]) for key in ("env_spec", "eval_env_spec"))
    for spec in made, evaluated:
        assert spec["kwargs"]["continuing_task"] is True and spec["kwargs"]["reset_target"] is False
    assert made["kwargs"]["maze_map"][1][1] == 0
    assert evaluated["kwargs"]["maze_map"][1][1] == "r" and evaluated["kwargs"]["maze_map"][3][1] == "g"


def test_collecting_again_replaces_the_set(folder):
    """The old set goes only when the new one is whole; nothing else is left in the folder."""
    load("pointmaze-umaze", 300, 0)
    assert c.recipe("local/pointmaze/umaze-v0")["seed"] == 0
    load("pointmaze-umaze", 300, 1)
    assert c.recipe("local/pointmaze/umaze-v0")["seed"] == 1
    assert [path.name for path in folder.iterdir()] == ["local"]


@pytest.mark.parametrize("where", ["play", "update_metadata", "update_episodes"])
def test_a_failed_collection_leaves_the_old_set(where, monkeypatch, folder):
    """Whether it fails while playing or when the new set has been begun."""
    import minari
    from minari.dataset._storages.hdf5_storage import HDF5Storage

    old = arrays(load("pointmaze-umaze", 300, 0))
    owner = c if where == "play" else HDF5Storage
    before = getattr(owner, where)

    def fails(*args):
        before(*args)
        raise RuntimeError("the power went off")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went off"):
        patch.setattr(owner, where, fails)
        c.collect("pointmaze-umaze", 300, 1, progress=False)
    assert np.array_equal(old, arrays(minari.load_dataset("local/pointmaze/umaze-v0")))
    assert [path.name for path in folder.iterdir()] == ["local"]


def test_a_killed_collection_leaves_the_old_set():
    """kill -9 runs no clean-up: what is half done must be where Minari doesn't look."""
    import minari

    old = arrays(load("pointmaze-umaze", 300, 0))
    killed = """if True:
        import os
        from policies import collect as c
        plays = iter([c.play, lambda *_: os.kill(os.getpid(), 9)])      # one episode is written
        c.play = lambda *args: next(plays)(*args)
        c.collect("pointmaze-umaze", 600, 1)"""
    run = subprocess.run([sys.executable, "-c", killed], cwd=SCRIPT.parent, capture_output=True)
    assert run.returncode == -9
    assert list(minari.list_local_datasets()) == ["local/pointmaze/umaze-v0"]
    assert np.array_equal(old, arrays(minari.load_dataset("local/pointmaze/umaze-v0")))


@pytest.mark.parametrize("killed", ["first", "player"])
def test_a_killed_process_ends_a_parallel_collection(killed, folder):
    """No player lives on alone, and the first process does not wait for a dead one."""
    code = """if True:
        import multiprocessing, os
        from errors import UserError
        from policies import collect as c
        c.SPEED, os.cpu_count, store, players = {"maze2d": 1}, lambda: 2, c.pickle.dump, []
        def dump(*args):        # when one episode has been played
            store(*args)
            if not players:
                players.extend(child.pid for child in multiprocessing.active_children())
                print(*players, flush=True)
                os.kill(os.getpid() if KILLED == "first" else players[1], 9)
        c.pickle.dump = dump
        try:
            c.collect("pointmaze-umaze", 9000)
        except UserError as error:
            print(error)""".replace("KILLED", repr(killed))
    run = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True,
                         timeout=120)
    message, players, *rest = run.stdout.splitlines()
    assert run.returncode == (-9 if killed == "first" else 0) and run.stderr == ""
    assert len(players.split()) == 2
    assert message.startswith("pointmaze-umaze: about")
    deadline = time.time() + 60
    while any(psutil.pid_exists(int(pid)) for pid in players.split()) and time.time() < deadline:
        time.sleep(0.2)
    assert not any(psutil.pid_exists(int(pid)) for pid in players.split())
    assert not (folder / "local").exists()
    if killed == "player":
        assert "a process has ended" in rest[-1] and not any(folder.iterdir())


def test_a_player_that_dies_while_it_sends_an_episode_is_noticed(monkeypatch):
    """Half a message ends in OSError and not, as an empty pipe, in EOFError."""
    def recv():
        raise OSError("got end of file during message")
    stand_in = SimpleNamespace(recv=recv, close=list, start=list, terminate=list, join=list)
    spawn = SimpleNamespace(Pipe=lambda **_: (stand_in, stand_in), Process=lambda **_: stand_in)
    monkeypatch.setattr(c.multiprocessing, "get_context", lambda kind: spawn)
    with pytest.raises(UserError, match="a process has ended"):
        next(c.play_on_cores(2, None, None, 0, 0))


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    """gymnasium-robotics leaves an XML file per maze; another program's files are not ours to remove."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "ant_maze1.xml").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    c.collect("pointmaze-umaze", 1, progress=False)
    c.collect("antmaze-umaze", 1, progress=False)
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["ant_maze1.xml"]


# ---------------------------------------------------------------- mistakes


def test_a_relative_folder_is_taken_from_where_we_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "my sets")
    assert len(load("pointmaze-umaze", 1)) == 1
    assert (tmp_path / "my sets" / "local" / "pointmaze" / "umaze-v0" / "data" / "metadata.json").exists()


def script(*args, folder="/", **variables):
    """python data.py collect in a new process, outside of the project: (exit code, output, messages)."""
    run = subprocess.run([sys.executable, str(SCRIPT), "collect", *args], cwd=folder, capture_output=True,
                         text=True, env=os.environ | variables)
    return run.returncode, run.stdout, run.stderr


def test_the_script_works_from_anywhere():
    assert script("pointmaze-umaze", "--steps", "1", "--seed", "3")[::2] == (0, "")
    made = {"name": "pointmaze-umaze", "steps": 1, "seed": 3, "version": 1}
    assert c.recipe("local/pointmaze/umaze-v0") == made


@pytest.mark.parametrize("name, steps, seed, message", [
    ("pointmaze-umaze", 0, 0, "at least 1"),
    ("pointmaze-umaze", -5, 0, "at least 1"),
    ("pointmaze-umaze", 1, -1, "at least 0"),
])
def test_a_mistake_is_said_before_any_work(name, steps, seed, message, folder):
    """An empty set loads, and fails much later."""
    with pytest.raises(UserError, match=message):
        c.collect(name, steps, seed)
    assert not folder.exists()


def test_a_tilde_is_the_home_folder(tmp_path):
    """As everywhere; minari itself would make a folder of that name."""
    code, *_ = script("pointmaze-umaze", "--steps", "1", folder=tmp_path,
                      HOME=str(tmp_path / "home"), MINARI_DATASETS_PATH="~/my sets")
    assert code == 0 and [path.name for path in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / "my sets" / "local" / "pointmaze" / "umaze-v0" / "data").is_dir()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """HDF5 ends the process by a segmentation fault where it can't write what it holds."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        small = {"MINARI_DATASETS_PATH": str(place)}
        assert script("hopper-medium", "--steps", "1", **small)[0] == 0
        old = sorted(place.rglob("*"))
        for name in "hopper-medium", "pong":        # many small episodes, and one that is too large alone
            code, out, error = script(name, "--steps", "20000", **small)
            assert code == 2 and error.count("\n") == 1
            assert f"{name} can't be stored in {place}" in error and "No space left" in error
            assert sorted(place.rglob("*")) == old
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_room_is_made_sure_of_before_an_episode_is_written(monkeypatch, folder):
    """As on a full disk, or where a quota is used up; and what HDF5 adds to the arrays fits in."""
    import minari
    from minari.dataset._storages.hdf5_storage import HDF5Storage

    spares, grown, update = [], [], HDF5Storage.update_episodes
    unlink = Path.unlink

    def watch(path, *args, **kwargs):
        if path.name == "spare":
            spares.append(path.stat().st_size)
        return unlink(path, *args, **kwargs)

    def write(storage, episodes):
        before = storage.get_size()
        update(storage, episodes)
        grown.append(1e6 * (storage.get_size() - before))

    monkeypatch.setattr(Path, "unlink", watch)
    monkeypatch.setattr(HDF5Storage, "update_episodes", write)
    for name in "hopper-medium-replay", "breakout":
        load(name, 2000)
    assert len(spares) == len(grown) > 5 and all(a > b for a, b in zip(spares, grown, strict=True))

    def full(episode, file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(c.pickle, "dump", full)
    monkeypatch.setattr(HDF5Storage, "update_episodes", None)
    with pytest.raises(UserError, match="No space left on device.*MINARI_DATASETS_PATH"):
        c.collect("pointmaze-umaze", 300)
    assert set(minari.list_local_datasets()) == {"local/hopper/medium-replay-v0", "local/atari/breakout-v0"}
    assert [path.name for path in folder.iterdir()] == ["local"]


def test_ctrl_c_while_collecting_leaves_nothing(monkeypatch, folder):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(c, "play", stop)
    with pytest.raises(KeyboardInterrupt):
        c.collect("pointmaze-umaze", 300)
    assert not any(folder.iterdir())


def test_a_machine_that_cannot_render_says_so(monkeypatch, folder):
    """One message with what to install, and no half set."""
    pytest.importorskip("dm_control")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(screens.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(UserError, match="libegl1"):
        c.collect("cheetah-run", 1)
    assert not any(folder.rglob("*"))


def test_a_folder_that_cannot_be_written_is_said_before_any_work(tmp_path, monkeypatch):
    """Not after five minutes of physics."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "file" / "sets"))
    monkeypatch.setattr(c, "play", None)
    with pytest.raises(UserError, match="MINARI_DATASETS_PATH"):
        c.collect("pointmaze-umaze", 1)


def test_progress_is_silent_when_told_so_and_outside_a_terminal(capfd, monkeypatch):
    """A notebook that collects inside a loop wants no bars, and neither does a log file."""
    c.collect("pointmaze-umaze", 300, progress=False)
    assert "pointmaze" not in capfd.readouterr().err
    c.collect("pointmaze-umaze", 300)
    assert "pointmaze" not in capfd.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    c.collect("pointmaze-umaze", 300)
    assert "pointmaze" in capfd.readouterr().err
