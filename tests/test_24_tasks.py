"""Unseen tasks: what an episode's task is, who knows of it, and how it enters data and evaluation.

A result on unseen tasks is worth nothing if one of them was in the data, or if evaluation pays for another
task than it says. Rewards are recomputed here in gymnasium's own environments, which know no tasks.

    pytest tests/test_24_tasks.py
"""
import sys
from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("minari")
import data  # noqa: E402
import envs  # noqa: E402
import eval as player  # noqa: E402
import online  # noqa: E402
import settings  # noqa: E402
import unseen  # noqa: E402
from errors import UserError  # noqa: E402
from policies import collect, tasks  # noqa: E402
from train import train  # noqa: E402

NAMES = ["cheetah-vel", "ant-dir", "metaworld-ml10", "metaworld-ml45"]
# DM paper, Table 9, typed in again, ranges and all
UNSEEN = {"cheetah-vel": [2, 7, 15, 23, 26], "ant-dir": [6, 17, 23, 30, 41],
          "metaworld-ml10": [11, 24, 41], "metaworld-ml45": [11, 17, 25, 36, 41]}
SEEN = {
    "cheetah-vel": [(0, 1), (3, 6), (8, 14), (16, 22), (24, 25), (27, 39)],
    "ant-dir": [(0, 5), (7, 16), (18, 22), (24, 29), (31, 40), (42, 49)],
    "metaworld-ml10": [(i, i) for i in (0, 9, 19, 29, 33, 36, 39, 40, 48, 49)],
    "metaworld-ml45": [(0, 10), (12, 16), (18, 24), (26, 35), (37, 40), (42, 49)],
}
SEEN = {name: [i for a, b in parts for i in range(a, b + 1)] for name, parts in SEEN.items()}
metaworld = pytest.mark.skipif(not find_spec("metaworld"), reason="metaworld is not installed")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Sets of a few episodes, of this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("sets")))
        patch.chdir(tmp_path_factory.mktemp("runs"))
        for name in ("cheetah-vel", "ant-dir"):
            collect.collect(name, 5000, progress=False)
        yield


def stored(name):
    """(episodes of a set, the seeds that they were reset with)."""
    import minari

    dataset = minari.load_dataset(collect.SETS[name].id)
    numbers = range(dataset.total_episodes)
    return list(dataset), [m["seed"] for m in dataset.storage.get_episode_metadata(numbers)]


def replayed(name, seed, actions):
    """(velocities (T, 2) of the body from its places, rewards that no task changes (T,), states (T, S))."""
    ant = name == "ant-dir"
    env = gymnasium.make("Ant-v5", include_cfrc_ext_in_observation=False) if ant else \
        gymnasium.make("HalfCheetah-v5")
    state, _ = env.reset(seed=int(seed))
    velocity, rest, states = [], [], []
    for action in actions:
        before = env.unwrapped.data.body("torso").xpos.copy()
        x = env.unwrapped.data.qpos[0]
        states.append(state)
        state, _, *_, info = env.step(action)
        moved = (env.unwrapped.data.body("torso").xpos - before)[:2]
        if not ant:
            moved = np.array([env.unwrapped.data.qpos[0] - x, 0])
        velocity.append(moved / 0.05)       # seconds a step
        square = float((action**2).sum())       # in the action's own float32, as gymnasium's bodies
        rest.append(info["reward_survive"] + info["reward_contact"] - 0.5 * square if ant else -0.05 * square)
    return np.array(velocity), np.array(rest), np.array(states)


def pay(name, task, velocity, rest):
    """Rewards (T,) of a task, by the papers' words."""
    if name == "cheetah-vel":
        return rest - np.abs(velocity[:, 0] - 0.075 * (task + 1))
    angle = np.radians(7.2 * task)
    return rest + velocity @ [np.cos(angle), np.sin(angle)]


# ------------------------------------------------------------------- tasks

@pytest.mark.parametrize("name", NAMES)
def test_the_split_is_that_of_the_papers_table_9(name):
    starts = envs.ENVS[name].starts
    assert list(starts) == ["unseen", "seen"]       # the best checkpoint is chosen by the last
    assert starts["unseen"]["tasks"] == UNSEEN[name] and starts["seen"]["tasks"] == SEEN[name]
    assert not set(UNSEEN[name]) & set(SEEN[name])
    assert len(SEEN[name]) == {"cheetah-vel": 35, "metaworld-ml10": 10}.get(name, 45)


def test_speeds_and_directions_are_spread_over_their_range():
    assert len(tasks.SPEEDS) == 40 and tasks.SPEEDS[0] == 0.075 and tasks.SPEEDS[-1] == pytest.approx(3)
    assert len(tasks.ANGLES) == 50 and np.allclose(np.diff(np.degrees(tasks.ANGLES)), 7.2)
    held = np.degrees(tasks.ANGLES[UNSEEN["ant-dir"]])
    assert np.diff(np.append(held, held[0] + 360)).max() < 120      # a fixed direction cannot suit them all


@pytest.mark.parametrize("name", NAMES)
def test_as_many_seeds_in_a_row_as_there_are_tasks_play_each_once(name):
    """From wherever they begin: evaluation counts from 1000 times the run's seed."""
    for group in (UNSEEN[name], SEEN[name]):
        for first in (0, 1000, 3007):
            assert sorted(tasks.task_of(group, first + j) for j in range(len(group))) == group


def test_ten_episodes_already_meet_slow_and_fast_tasks():
    for first in (0, 1000, 2000):
        met = tasks.SPEEDS[[tasks.task_of(SEEN["cheetah-vel"], first + j) for j in range(10)]]
        assert np.histogram(met, 3, (0, 3))[0].min() >= 2


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_task_changes_rewards_and_nothing_that_is_seen(name):
    env = envs.make({"id": envs.ENVS[name].id})
    rng, seen, paid = np.random.default_rng(0), [], []
    actions = rng.uniform(-1, 1, (15, *env.action_space.shape)).astype(np.float32)
    for task in UNSEEN[name]:
        first, info = env.reset(seed=5, options={"tasks": [task]})
        assert info["task"] == task
        steps = [env.step(a) for a in actions]
        seen.append(np.array([first, *(step[0] for step in steps)]))
        paid.append([step[1] for step in steps])
        velocity, rest, _ = replayed(name, 5, actions)
        assert np.allclose(paid[-1], pay(name, task, velocity, rest), rtol=0, atol=1e-6)
    assert all(np.array_equal(seen[0], other) for other in seen)
    assert len({np.sum(x) for x in paid}) == 5
    assert env.spec.max_episode_steps == 200


# ------------------------------------------------------------------- data

@pytest.mark.parametrize("name", NAMES[:2])
def test_the_stored_rewards_are_those_of_one_training_task_an_episode(name):
    """Found by trying all: exactly one task explains an episode's rewards, and it is a training task."""
    found = []
    for episode, seed in zip(*stored(name), strict=True):
        velocity, rest, states = replayed(name, seed, episode.actions)
        assert np.allclose(states, episode.observations[:-1], rtol=0, atol=1e-8)
        fits = [task for task in range(len(SEEN[name]) + 5)
                if np.allclose(pay(name, task, velocity, rest), episode.rewards, rtol=0, atol=1e-6)]
        assert len(fits) == 1
        found += fits
    assert len(found) >= 25 and set(found) <= set(SEEN[name]) and len(set(found)) > 12


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_same_seed_gives_the_same_set_and_another_another(name):
    def load(seed):
        collect.collect(name, 400, seed, progress=False)
        t = data.load(name, "local")
        return torch.cat([t.states, t.actions, t.rewards[:, None]], 1)

    try:
        first, again, other = load(3), load(3), load(4)
    finally:
        collect.collect(name, 5000, progress=False)
    assert torch.equal(first, again) and not torch.equal(first[:100], other[:100])


def test_the_better_a_task_is_done_the_larger_the_return():
    """Returns of the speeds fall with the distance from the speed asked for; the ant goes where it should."""
    speed, course = stored("cheetah-vel"), stored("ant-dir")
    goal = np.array([tasks.SPEEDS[tasks.task_of(SEEN["cheetah-vel"], x)] for x in speed[1]])
    miss = [abs(e.observations[1:, 8] - x).mean() for e, x in zip(speed[0], goal, strict=True)]
    returns = np.array([e.rewards.sum() for e in speed[0]])
    assert np.corrcoef(returns, miss)[0, 1] < -0.9 and returns.std() > 5
    angle = np.array([tasks.ANGLES[tasks.task_of(SEEN["ant-dir"], x)] for x in course[1]])
    moved = np.array([e.observations[20:, 13:15].mean(0) for e in course[0]])
    along = (moved * np.stack([np.cos(angle), np.sin(angle)], 1)).sum(1)
    assert (along > 0.3).mean() > 0.6 and along.max() > 1
    returns = np.array([e.rewards.sum() for e in course[0]])
    assert np.corrcoef(returns, along)[0, 1] > 0.5


def test_shuffled_rewards_are_other_episodes_and_all_else_is_kept():
    t = data.load("cheetah-vel", "local")
    s = unseen.shuffled(t, seed=1)
    rows, mixed = t.rewards.view(-1, 200), s.rewards.view(-1, 200)
    place = [(rows == row).all(1).nonzero().item() for row in mixed]
    assert sorted(place) == list(range(len(rows)))      # each once
    assert sum(i == j for i, j in enumerate(place)) < 5
    assert torch.equal(s.states, t.states) and torch.equal(s.actions, t.actions)
    assert torch.allclose(s.rtg.view(-1, 200), t.rtg.view(-1, 200)[place], atol=1e-3)
    assert s.state_shape == t.state_shape and s.env_spec == t.env_spec and s.source == "local"
    assert torch.equal(unseen.shuffled(t, seed=1).rewards, s.rewards)
    assert not torch.equal(unseen.shuffled(t, seed=2).rewards, s.rewards)


def test_shorter_episodes_get_the_beginning_of_a_full_one():
    g, lengths = np.random.default_rng(0), [9, 4, 9, 1, 9]
    N = sum(lengths)
    t = data.Trajectories(g.standard_normal((N, 3)), g.uniform(-1, 1, (N, 2)), np.arange(N), lengths)
    s, full = unseen.shuffled(t), [list(range(i, i + 9)) for i in (0, 13, 23)]
    for i, n in zip(s.starts, lengths, strict=False):
        assert s.rewards[i:i + n].tolist() in [x[:n] for x in full]


# ------------------------------------------------------------------- training and evaluation

TINY = dict(source="local", size="small", steps=4, d=16, batch_size=4, device="cpu", eval_every=0,
            targets=(0.0,), eval_episodes=5)


@pytest.fixture(scope="module")
def runs(folder):
    """{name: what train() returns} of a tiny run on each set."""
    cheetah = train(env="cheetah-vel", **TINY | dict(eval_every=2, eval_episodes=10))
    return {"cheetah-vel": cheetah, "ant-dir": train(env="ant-dir", **TINY)}


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_run_reports_unseen_and_seen_tasks(name, runs):
    rows, n = runs[name]["rows"], 10 if name == "cheetah-vel" else 5
    assert [(r["start"], r["target"], r["episodes"]) for r in rows] == [("unseen", 0, n), ("seen", 0, n)]
    got = unseen.by_task(runs[name])
    assert sorted(got["unseen"]) == UNSEEN[name] and {len(x) for x in got["unseen"].values()} == {n // 5}
    assert len(got["seen"]) == n and set(got["seen"]) <= set(SEEN[name])
    for j, x in enumerate(rows[0]["returns"]):
        assert got["unseen"][UNSEEN[name][13 * j % 5]][j // 5] == x
    assert runs[name]["meta"]["starts"] == envs.ENVS[name].starts


@pytest.mark.parametrize("name", NAMES[:2])
def test_evaluation_pays_for_the_task_that_it_says(name, runs):
    """Side by side, each with its own: the recorded actions, replayed, earn what the task would pay."""
    model, meta = player.load_run(runs[name]["run"])
    played, record = [envs.make(meta["env_spec"]) for _ in range(5)], [[] for _ in range(5)]
    options = [meta["starts"]["unseen"]] * 5
    result = player.rollout(model, meta, played, [0.0] * 5, range(5), options, record=record)
    for j, steps in enumerate(record):
        task = UNSEEN[name][13 * j % 5]
        actions = -1 + (torch.tensor(np.array([step[2] for step in steps])) + 1) * 0.5 * 2      # as rounded
        velocity, rest, _ = replayed(name, j, actions.numpy())
        assert result["return"][j] == pytest.approx(pay(name, task, velocity, rest).sum(), abs=1e-6)


def test_the_best_checkpoint_is_chosen_by_training_tasks(runs):
    """Unseen tasks that choose a checkpoint would no longer be unseen."""
    log = (runs["cheetah-vel"]["run"] / "log.csv").read_text().splitlines()
    head = log[0].split(",")
    rows = [dict(zip(head, line.split(","), strict=True)) for line in log[1:]]
    early = [r["start"] for r in rows if r.get("checkpoint") == "last" and r["step"] != "4"]
    assert early == ["seen"]


def test_the_control_trains_on_shuffled_rewards_and_plays_the_same_tasks(runs):
    result = unseen.control(env="cheetah-vel", **TINY)
    assert result["run"].name == "dt-cheetah-vel-shuffled-s0" and "shuffled" in result["dataset"]
    assert sorted(unseen.by_task(result)["unseen"]) == UNSEEN["cheetah-vel"]
    with pytest.raises(UserError, match="cheetah-vel, ant-dir"):
        unseen.control(env="hopper-medium")


def test_the_command_prints_each_task_and_their_mean(runs, monkeypatch, capsys):
    known = {"cheetah-vel": ("0.225 m/s", "2.025 m/s"), "ant-dir": ("43 degrees", "295 degrees")}
    for name, words in known.items():
        monkeypatch.setattr(sys, "argv", ["unseen.py", str(runs[name]["run"])])
        unseen.main()
        text, mean = capsys.readouterr().out, np.mean(runs[name]["rows"][0]["returns"])
        assert text.count("unseen") == 6 and all(word in text for word in words)
        assert f"{mean:9.1f} over 5 tasks" in text
    monkeypatch.setattr(sys, "argv", ["unseen.py", "nothing"])
    with pytest.raises(UserError, match="no folder of a finished run"):
        unseen.main()
    with pytest.raises(UserError, match="without evaluation"):
        unseen.report(runs["ant-dir"] | {"rows": []})


@pytest.mark.parametrize("model", settings.MODELS)
def test_the_sizes_of_table_4_have_names(model):
    for sizes in ((3, 1, 256), (6, 4, 256), (12, 12, 768)):
        given = dict(model=model, env="ant-dir", size="-".join(map(str, sizes)))
        got = settings.fitted(settings.resolve(given), envs.ENVS["ant-dir"])
        expected = sizes if model != "dc" else (sizes[0], 1, sizes[2])      # without attention: no heads
        assert (got.model.n_layer, got.model.n_head, got.model.d) == expected
        with torch.device("meta"):
            settings.model_of(got)
        assert got.train.lr == settings.resolve(given | {"size": "paper"}).train.lr
    given |= {"d": 24}
    assert settings.resolve(given).model.d == 24


@pytest.mark.parametrize("kind, names", [
    (settings.Settings, ["dt", "dm", "qt-dt", "qt-dm"]), (online.OnlineSettings, ["dt", "dm"])])
def test_with_critics_or_online_a_model_reads_rewards_too(kind, names):
    """The small presets of tasks hold for train.py, qt.py and online.py alike."""
    for name in names:
        for env, sizes in (("cheetah-vel", (2, 64)), ("ant-dir", (3, 128))):
            got = settings.resolve(dict(model=name, env=env, size="small"), kind)
            assert (got.model.context_len, got.model.condition, got.train.reward_scale) == (20, "reward", 2.0)
            assert (got.model.n_layer, got.model.d) == sizes
            assert vars(got.train).get("act_context", 20) == 20


# ------------------------------------------------------------------- MetaWorld

def test_without_metaworld_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "metaworld", None)
    monkeypatch.setitem(sys.modules, "metaworld.env_dict", None)
    assert tasks.label("metaworld-ml10", 11) == "task 11"
    with pytest.raises(UserError, match="metaworld==3.1.1"):
        envs.make({"id": "MetaWorld-v0"})


@metaworld
def test_a_manipulation_has_its_name():
    assert [tasks.label("metaworld-ml10", n) for n in UNSEEN["metaworld-ml10"]] == [
        "dial-turn", "handle-press", "push-wall"]


@metaworld
def test_a_seed_decides_task_goal_and_places_in_metaworld():
    first, again = (envs.make({"id": "MetaWorld-v0"}) for _ in range(2))
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 4)).astype(np.float32)
    goals = []
    for seed in (0, 1, 2, 5):
        played = []
        for env in (first, again):
            start, info = env.reset(seed=seed, options={"tasks": UNSEEN["metaworld-ml45"]})
            np.random.rand(seed + 1)        # other draws in the program change nothing
            assert info["task"] == UNSEEN["metaworld-ml45"][13 * seed % 5] and not start[-3:].any()
            steps = [env.step(a)[:2] for a in actions]
            played.append(np.concatenate([start, *(np.append(*step) for step in steps)]))
        assert np.array_equal(*played)
        goals.append(env.unwrapped.robot._get_pos_goal())
    assert not np.array_equal(goals[0], goals[3])       # seeds 0 and 5: the same task


@metaworld
def test_metaworlds_scripted_policy_collects_and_a_model_trains(folder):
    collect.collect("metaworld-ml10", 2000, progress=False)
    episodes, seeds = stored("metaworld-ml10")
    assert [len(e.rewards) for e in episodes] == [500] * 4
    assert max(e.rewards.sum() for e in episodes) > 500
    assert {tasks.task_of(SEEN["metaworld-ml10"], x) for x in seeds} <= set(SEEN["metaworld-ml10"])
    result = train(env="metaworld-ml10", **TINY | {"eval_episodes": 3})
    assert sorted(unseen.by_task(result)["unseen"]) == UNSEEN["metaworld-ml10"]
    assert result["rows"][0]["success"] is not None
