"""Episodes played side by side: what the model is shown, what the environment is given, and the scores.

    pytest tests/test_12_eval.py

The environments and the models here are a few lines each, so that every number can be followed by hand.
"""
import math
import os
import re
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

import eval as E
from envs import CLIP, ENVS, make, observe
from errors import UserError
from eval import alignment, check_environment, evaluate, film, interval, normalised, rollout, table


class Counter(gymnasium.Env):
    """The state is [steps so far, seed], the reward the step's number; it ends after 3 + seed % 3 steps."""
    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Box(-2, 2, (1,))
    spec = SimpleNamespace(max_episode_steps=10, id="Counter")

    def reset(self, seed=None, options=None):
        self.t, self.seed, self.given, self.options = 0, seed, [], options
        return np.array([0.0, seed]), {}

    def step(self, action):
        assert self.t < 3 + self.seed % 3, "a finished episode must not be stepped"
        self.given.append(action)
        self.t += 1
        done = self.t == 3 + self.seed % 3
        return np.array([self.t, self.seed], float), float(self.t), done, False, {"success": self.t == 4}


def quarter(states):
    return torch.full((len(states), 1), 0.25)


class Recorder(torch.nn.Module):
    """A model that acts by a rule and keeps its inputs."""

    def __init__(self, K=2, rule=quarter):
        super().__init__()
        self.cfg, self.rule, self.seen = SimpleNamespace(context_len=K), rule, []
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        self.seen.append([x.clone() for x in (states, actions, rewards, rtg, timesteps)])
        return self.rule(states)


META = dict(
    model="dt", env="counter", dataset="d", source="s", env_spec={"id": "Counter", "kwargs": {}},
    layout={"first": None, "position": False, "stack": 0}, clip_rewards=False, state_shape=[2],
    goal=False, goal_dim=0, state_mean=torch.tensor([1.0, 0.0]), state_std=torch.tensor([2.0, 1.0]),
    rtg_scale=10.0, reward_scale=2.0, act_dim=1, n_actions=None, action_start=0,
    action_low=torch.tensor([-2.0]), action_high=torch.tensor([2.0]), max_ep_len=10, ref=(0.0, 50.0),
    starts={"random": None, "far": {"cell": 1}}, sample=False)
CHOICES = dict(n_actions=3, act_dim=3, action_low=None, action_high=None)


def play(model, seeds=(0, 1, 2), targets=(20.0, 30.0, 40.0), meta=META, **kwargs):
    envs = [Counter() for _ in seeds]
    return envs, rollout(model, meta, envs, np.array(targets), seeds, **kwargs)


# ------------------------------------------------------------------ one rollout

def test_each_episode_collects_its_own_return_and_finished_ones_drop_out():
    model = Recorder()
    _, out = play(model)
    assert out["return"].tolist() == [6, 10, 15] and out["length"].tolist() == [3, 4, 5]
    assert out["success"].tolist() == [0, 1, 1]
    assert [len(seen[0]) for seen in model.seen] == [3, 3, 3, 2, 1]


def test_the_model_sees_normalised_states_and_the_target_less_the_rewards_so_far():
    """For the episode of 5 steps: rewards 1, 2, 3, 4, so that 40, 39, 37, 34, 30 are left, divided by 10."""
    model = Recorder()
    play(model)
    states, actions, rewards, rtg, timesteps = model.seen[4]
    assert torch.allclose(rtg[:, :, 0], torch.tensor([[3.4, 3.0]])) and timesteps.tolist() == [[3, 4]]
    assert torch.allclose(states[0], torch.tensor([[(3 - 1) / 2, 2.0], [(4 - 1) / 2, 2.0]]))
    assert torch.allclose(rewards[0, 0], torch.tensor([4 / 2.0]))
    assert torch.allclose(actions[0, 0], torch.tensor([0.25]))
    assert actions[0, 1] == 0 and rewards[0, 1] == 0, "the present action and reward are not known yet"


def test_normalised_states_are_cut_as_those_of_the_training_windows_are():
    """A number that hardly varied in the data may be thousands of spreads away at play."""
    model = Recorder()
    play(model, meta=META | dict(state_std=torch.tensor([1e-4, 1e6])))
    assert torch.allclose(model.seen[4][0][0], torch.tensor([[CLIP, 2e-6], [CLIP, 2e-6]]))
    assert model.seen[0][0][0, 0, 0] == -CLIP, "the first state, 0, lies below the mean, 1"


def test_the_window_grows_to_the_context_length_and_stays_there():
    model = Recorder(K=3)
    play(model)
    assert [seen[0].shape[1] for seen in model.seen] == [1, 2, 3, 3, 3]


def test_actions_are_sent_in_the_environments_own_bounds_as_float32():
    """A saturated model must reach 2 here, and rounding must not carry it over."""
    for value, sent in ((1.0, 2.0), (-1.0, -2.0), (0.25, 0.5)):
        envs, _ = play(Recorder(rule=lambda s, value=value: torch.full((len(s), 1), value)))
        assert envs[0].given[0].dtype == np.float32 and envs[0].given[0].tolist() == [sent]


def test_choices_are_sent_as_python_integers_with_their_offset():
    model = Recorder(rule=lambda s: torch.full((len(s),), 2))
    envs, _ = play(model, meta=META | CHOICES | dict(action_start=5))
    assert envs[0].given == [7, 7, 7] and type(envs[0].given[0]) is int
    assert model.seen[1][1].tolist() == [[2, 0]] * 3, "the history holds the model's own numbering"
    assert model.seen[1][1].dtype == torch.int64


def test_playing_side_by_side_equals_playing_one_by_one():
    def rule(states):       # depends on the state, so that a row taking another's place would show
        return torch.tanh(states[:, -1, :1] - 0.3 * states[:, -1, 1:])
    _, together = play(Recorder(rule=rule))
    for i, target in enumerate((20.0, 30.0, 40.0)):
        _, alone = play(Recorder(rule=rule), seeds=(i,), targets=(target,))
        assert all(alone[k][0] == together[k][i] for k in alone)


class Walk(gymnasium.Env):
    """The state is [position, seed]; an action moves it, and is paid for by where it leads.

    It ends after 3 to 9 steps and says nothing of success.
    """
    observation_space = gymnasium.spaces.Box(-99, 99, (2,))
    action_space = gymnasium.spaces.Box(-2, 2, (1,))
    spec = SimpleNamespace(max_episode_steps=10, id="Walk")

    def reset(self, seed=None, options=None):
        self.t, self.seed, self.x = 0, seed, 0.1 * seed
        return np.array([self.x, seed]), {}

    def step(self, action):
        self.t, self.x = self.t + 1, self.x + float(action[0])
        return np.array([self.x, self.seed]), 0.3 * self.x, self.t == 3 + self.seed % 7, False, {}


def walk_rule(states):
    return torch.cos(0.2 * states[:, -1, :1] + 0.1 * states[:, 0, :1] + states[:, -1, 1:])


def slow_walk(K, seed, target):
    """An episode of Walk as a plain loop over lists: (what the model is to see at each step, return)."""
    env, shown, s, a, r = Walk(), [], [], [], []
    state, done = env.reset(seed)[0], False
    while not done:
        s.append((state.astype(np.float32) - np.array([1, 0], np.float32)) / np.array([2, 1], np.float32))
        first = max(0, len(s) - K)
        left = [(target - sum(r[:i])) / 10 for i in range(len(s))]
        rows = [np.array(s[first:]), np.reshape(a[first:], (-1, 1)), np.reshape(r[first:], (-1, 1)) / 2,
                np.reshape(left[first:], (-1, 1))]
        shown.append([torch.tensor(x, dtype=torch.float32) for x in rows] + [torch.arange(first, len(s))])
        a.append(walk_rule(shown[-1][0][None])[0].tolist())
        state, reward, done, _, _ = env.step(np.float32(2) * np.array(a[-1], np.float32))
        r.append(reward)
    return shown, sum(r)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_every_row_is_shown_its_own_episode_and_nothing_else_whoever_leaves_first(K):
    """Against a plain loop over each episode by itself."""
    seeds, targets = [5, 0, 13, 2, 6, 1, 7], np.linspace(-20, 40, 7)
    model = Recorder(K, walk_rule)
    out = rollout(model, META, [Walk() for _ in seeds], targets, seeds)
    assert out["length"].tolist() == [8, 3, 9, 5, 9, 4, 3]
    assert np.isnan(out["success"]).all(), "where nothing is said of success, none is made up"
    for seed, target, total in zip(seeds, targets, out["return"], strict=True):
        shown, slow_total = slow_walk(K, seed, target)
        assert total == pytest.approx(slow_total, abs=1e-5)
        mine = [[x[row] for x in seen] for seen in model.seen
                for row in range(len(seen[0])) if seen[0][row, -1, 1] == seed]
        assert len(mine) == len(shown)
        for (states, actions, rewards, *rest), want in zip(mine, shown, strict=True):
            got = states, actions[:-1], rewards[:-1], *rest         # nobody reads the last two of those
            for x, y in zip(got, want, strict=True):
                assert x.shape == y.shape and torch.allclose(x, y, atol=1e-5)


def stacked(observations):
    if isinstance(observations[0], dict):
        return {key: stacked([o[key] for o in observations]) for key in observations[0]}
    return np.array(observations)


@pytest.mark.parametrize("layout, kind", [
    ({"first": None, "position": False}, "box"), ({"first": 3, "position": True}, "maze"),
    ({"first": None, "position": False}, "nested"), ({"stack": 2}, "frame")])
def test_observations_taken_together_equal_those_taken_one_by_one(layout, kind):
    g = np.random.default_rng(0)
    one = dict(
        box=lambda: g.random(4),
        frame=lambda: g.integers(0, 256, (5, 5), np.uint8),
        maze=lambda: dict(observation=g.random(5), achieved_goal=g.random(2), desired_goal=g.random(2)),
        nested=lambda: dict(hand=g.random(3), desired_goal=dict(b=g.random(1), a=g.random(2)),
                            achieved_goal=dict(b=g.random(1))))
    several = [one[kind]() for _ in range(3)]
    state, goal = observe(stacked(several), layout)
    alone = [observe(o, layout) for o in several]
    assert np.array_equal(state, np.stack([s for s, _ in alone])) and state.dtype == alone[0][0].dtype
    assert (goal is None) == (kind != "maze") == (alone[0][1] is None)
    if goal is not None:
        assert np.array_equal(goal, np.stack([each for _, each in alone]))


class Maze(Walk):
    def see(self):
        return dict(observation=np.array([self.seed, self.t], float), achieved_goal=np.array([self.x]),
                    desired_goal=np.array([-self.seed], float))

    def reset(self, seed=None, options=None):
        super().reset(seed)
        return self.see(), {}

    def step(self, action):
        return self.see(), *super().step(action)[1:4], {"success": np.bool_(self.t == 2)}


def test_a_mazes_goal_stands_behind_its_state_and_a_success_once_had_is_kept():
    meta = META | dict(goal=True, layout={"first": 1, "position": True, "stack": 0},
                       state_mean=torch.zeros(3), state_std=torch.ones(3))
    model = Recorder(rule=lambda s: torch.full((len(s), 1), 0.5))
    out = rollout(model, meta, [Maze() for _ in range(3)], np.zeros(3), [4, 0, 3])
    assert torch.allclose(model.seen[0][0][:, 0], torch.tensor([[0.4, 4, -4], [0, 0, 0], [0.3, 3, -3]]))
    assert out["length"].tolist() == [7, 3, 6] and out["success"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("told", [
    lambda x: {"success": x}, lambda x: {"is_success": x}, lambda x: {"is_success": np.array([x])},
    lambda x: {"success": np.float32(x)}, lambda x: {"is_success": float(x)} if x else {}])
def test_success_has_two_names_and_may_be_a_one_element_array(told):
    class Told(Counter):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, told(info["success"])
    out = rollout(Recorder(), META, [Told() for _ in range(3)], np.zeros(3), [0, 1, 2])
    assert out["success"][1:].tolist() == [1, 1] and not out["success"][0] == 1


class Picture(gymnasium.Env):
    """A frame of one pixel: the seed, times 10, plus the step from 1 on."""
    spec = SimpleNamespace(max_episode_steps=10, id="Picture")

    def reset(self, seed=None, options=None):
        self.seed, self.t = seed, 1
        return np.full((1, 1), 10 * seed + 1, np.uint8), {}

    def step(self, action):
        self.t += 1
        frame = np.full((1, 1), 10 * self.seed + self.t, np.uint8)
        return frame, 0.0, self.t > 3 + self.seed, False, {}


@pytest.mark.parametrize("K", [1, 2])
def test_frames_are_stacked_and_follow_their_row(K):
    """The stacks reach back beyond the context of K = 1, and before the first frame there are zeros."""
    meta = META | dict(layout={"stack": 3}, state_shape=[3, 1, 1], state_mean=None, state_std=None)
    model = Recorder(K, lambda s: torch.zeros(len(s), 1))
    rollout(model, meta, [Picture() for _ in range(4)], np.zeros(4), [2, 0, 6, 1])
    for t, (states, *_) in enumerate(model.seen):
        alive = [s for s in (2, 0, 6, 1) if t < 3 + s]
        want = [[[10 * s + i + 1 if i >= 0 else 0 for i in range(k - 2, k + 1)]
                 for k in range(max(0, t + 1 - K), t + 1)] for s in alive]
        assert states[..., 0, 0].tolist() == want
    env = Picture()
    env.spec = SimpleNamespace(max_episode_steps=1)
    assert rollout(model, meta, [env], np.zeros(1), [0])["length"] == 1


def test_zeroing_blanks_one_input_and_leaves_the_others():
    full, model = Recorder(), Recorder()
    play(full)
    play(model, zero=["rtg"])
    assert not model.seen[2][3].any() and torch.equal(model.seen[2][0], full.seen[2][0])
    model = Recorder()
    play(model, zero=["actions", "states"])
    states, actions, _, rtg, _ = model.seen[2]
    assert not actions.any() and not states[:, :-1].any(), "past states only"
    assert torch.equal(states[:, -1], full.seen[2][0][:, -1]) and torch.equal(rtg, full.seen[2][3])


# ------------------------------------------------------------------ how long an episode is

class Endless(Counter):
    """It declares no step limit, and ends itself after as many steps as its seed says; never, at 0."""
    spec = SimpleNamespace(max_episode_steps=None, id="Endless")

    def step(self, action):
        self.t += 1
        return np.array([self.t, self.seed], float), 1.0, self.t == self.seed, False, {}


def test_an_environment_without_a_declared_limit_is_played_to_its_own_end(capsys):
    """It ends itself at 200 steps; the data's episodes have at most 40."""
    model = Recorder()
    out = rollout(model, META | dict(max_ep_len=40), [Endless(), Endless()], np.zeros(2), [200, 7])
    assert out["length"].tolist() == [200, 7] and capsys.readouterr().out == ""
    assert max(int(seen[4].max()) for seen in model.seen) == 39, "the timestep table has 40 rows"


def test_an_environment_without_any_end_is_cut_and_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(E, "LONGEST", 60)
    out = rollout(Recorder(), META | dict(max_ep_len=40), [Endless(), Endless()], np.zeros(2), [0, 7])
    assert out["length"].tolist() == [60, 7]
    assert re.search("1 episode.* cut after 60 steps", capsys.readouterr().out)


# ------------------------------------------------------------------ whose fault it is

def not_a_number(states):
    return torch.full((len(states), 1), math.nan)


def test_a_model_that_says_nan_is_reported_and_not_sent_to_the_environment():
    with pytest.raises(UserError, match="the model's action at step 0 holds NaN") as e:
        play(Recorder(rule=not_a_number))
    assert "diverged" not in str(e.value)


@pytest.mark.parametrize("target", [1e29, -1e29, 1e12])
def test_a_target_beyond_all_reason_is_blamed_and_not_the_training(target):
    with pytest.raises(UserError, match=r"a target return of 1e\+(29|12) is too far") as e:
        play(Recorder(), targets=(1.0, target, 1.0))
    assert "diverged" not in str(e.value)
    play(Recorder(), targets=(1.0, 1e9, -1e9))


@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_environment_that_gives_no_numbers_is_blamed_by_step(what, value):
    class Broken(Counter):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            if self.t == 2:
                observation, reward = (observation, value) if what == "reward" else (value * observation, 1)
            return observation, reward, *rest
    with pytest.raises(UserError, match=f"the environment's {what} at step [12] holds NaN or inf") as e:
        rollout(Recorder(), META, [Broken(), Broken()], np.zeros(2), [1, 2])
    assert "diverged" not in str(e.value)


# ------------------------------------------------------------------ data and environment that do not fit

class Choices(Counter):
    action_space = gymnasium.spaces.Discrete(3)


class Goals(Maze):
    """As Maze, with a goal of two numbers."""
    def see(self):
        return super().see() | dict(desired_goal=np.zeros(2))


MAZE = META | dict(state_shape=[4], goal=True, goal_dim=1,
                   layout={"first": None, "position": True, "stack": 0})
FITS = [(Counter, META), (Choices, META | CHOICES), (Maze, MAZE),
        (Maze, MAZE | dict(state_shape=[3], goal=False, goal_dim=None)),        # the goal is hidden
        (Picture, META | dict(layout={"stack": 3}, state_shape=[3, 1, 1]))]
FRAMES = META | dict(layout={"stack": 3}, state_shape=[3, 84, 84])
Picture.action_space = Counter.action_space


@pytest.mark.parametrize("env, meta", FITS)
def test_an_environment_that_fits_its_data_is_taken(env, meta):
    check_environment(env(), meta)


@pytest.mark.parametrize("env, meta, words, others", [
    (Counter, META | dict(state_shape=[3]), "states: [3] in the data, [2] in the", "actions goal"),
    (Counter, META | dict(act_dim=4), "actions: 4 numbers in the data, 1 numbers in", "states goal"),
    (Counter, META | CHOICES, "actions: 3 choices in the data, 1 numbers in", "states"),
    (Choices, META, "actions: 1 numbers in the data, 3 choices in", "states"),
    (Choices, META | CHOICES | dict(n_actions=4, act_dim=4), "4 choices in the data, 3 choices in", "states"),
    (Counter, META | dict(state_shape=[5], goal=True, goal_dim=3), "goal: 3 in the data, 0 in the", "states"),
    (Maze, META, "goal: 0 in the data, 1 in the environment", "states actions"),
    (Goals, MAZE, "goal: 1 in the data, 2 in the environment", "states actions"),
    (Counter, MAZE, "the observation has another layout", "NoneType"),
    (Maze, META | dict(layout=MAZE["layout"]), "states: [2] in the data, [3] in the", "actions"),
    (Counter, FRAMES, "states: [84, 84] in the data, [2] in the environment", "goal"),
    (Picture, META, "states: [2] in the data", "goal")])
def test_what_does_not_fit_is_named_once_and_what_fits_is_not(env, meta, words, others, monkeypatch):
    """Sizes are without the goal's; one message, whoever asks: before training, in eval.py, in evaluate()."""
    for ask in (lambda: check_environment(env(), meta),
                lambda: evaluate(Recorder(), meta, [("random", 1.0, 2)], envs=[env(), env()])):
        with pytest.raises(UserError) as e:
            ask()
        text = str(e.value)
        assert text.startswith("d does not fit its environment") and words in text and "\n" not in text
        assert env().spec.id in text and not any(f"{other}:" in text for other in others.split())


# ------------------------------------------------------------------ plans, rows, scores

def test_a_plan_gives_one_row_each_with_the_same_seeds_for_every_target(monkeypatch):
    """What differs between two rows is the target alone. 120 episodes are played 50 at a time."""
    made = []
    monkeypatch.setattr(E, "make", lambda spec: made.append(Counter()) or made[-1])
    rows = evaluate(Recorder(), META, [("random", 5.0, 60), ("far", 9.0, 60)], seed=3)
    assert len(made) == 50 and [r["episodes"] for r in rows] == [60, 60]
    expected = np.array([sum(range(1, 4 + (3000 + j) % 3)) for j in range(60)])
    assert rows[0]["returns"] == rows[1]["returns"] == expected.tolist()
    assert made[0].options == {"cell": 1}
    assert rows[0]["return_mean"] == np.mean(expected)
    assert rows[1]["abs_error"] == np.mean(np.abs(expected - 9))
    assert rows[0]["score"] == pytest.approx(2 * np.mean(expected))
    assert rows[0]["success"] == pytest.approx(100 * np.mean(expected >= 10))


def test_evaluating_touches_neither_torchs_generator_nor_the_training_mode(monkeypatch):
    monkeypatch.setattr(E, "make", lambda spec: Counter())
    model, before = Recorder().train(), torch.get_rng_state()
    evaluate(model, META, [("random", 5.0, 2)])
    assert model.training and torch.equal(before, torch.get_rng_state())


def test_scores_are_d4rls():
    """D4RL's own example of the formula: hopper's expert return scores 100, its random return 0."""
    ref = (-20.272305, 3234.3)
    assert normalised(3234.3, ref) == 100 and normalised(-20.272305, ref) == 0
    assert normalised(1607.0138475, ref) == pytest.approx(50.0) and normalised(1.0, None) is None


def rank(targets, achieved):
    rows = [dict(target=t, episodes=1, achieved=[a]) for t, a in zip(targets, achieved, strict=True)]
    return alignment(rows)["rank_correlation"]


def test_rank_correlation_by_hand_with_ties():
    """Spearman on ranks (1.5, 1.5, 3.5, 3.5) and (1, 2, 4, 3): covariance 4, variances 4 and 5."""
    assert rank([1, 1, 2, 2], [0, 5, 9, 7]) == pytest.approx(4 / math.sqrt(4 * 5))
    assert rank([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(rank([1, 1], [1, 2])) and math.isnan(rank([1, 2], [4, 4]))


def test_alignment_is_over_episodes_and_not_over_means():
    """Errors of +10 and -10 average to zero; per episode they are 10 (RADT paper, Eq. 4)."""
    a = alignment([dict(target=50.0, episodes=2, achieved=[40.0, 60.0]),
                   dict(target=90.0, episodes=1, achieved=[90.0])])
    assert a["abs_error"] == pytest.approx(20 / 3) and a["episodes"] == 3


ROW = dict(start="far", target=5.0, episodes=2, returns=[0.0, 0.0], return_mean=0.0, return_std=0.0,
           score=0.0, success=0.0, length=3.0, achieved=[0.0, 0.0], achieved_mean=0.0, abs_error=5.0)


def test_the_table_prints_zeros_as_zeros_and_stars_the_headline():
    text = table([ROW, ROW | dict(target=6.0, score=None, success=None)], headline=5.0)
    assert "5.0*" in text and "0.0 ±    0.0     0.0    0.0 %" in text
    assert text.splitlines()[2].split()[6:8] == ["-", "-"] and "* the headline target" in text
    assert "*" not in table([ROW], headline=4.0)        # another target was asked for


def row_of(x, **more):
    return dict(start="far", target=1.0, return_mean=x, score=None, success=None, abs_error=x, episodes=1,
                returns=[x], achieved=[x]) | more


def test_seeds_are_summed_up_by_mean_and_students_interval():
    """Three values 1, 2, 3: mean 2, standard error 1/sqrt(3), times 4.30 for two degrees of freedom."""
    assert interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5" and f"{4.30 / math.sqrt(3):.1f}" == "2.5"
    assert interval([1.0, 2.0, 3.0], 3) == "2.000 ± 2.484" and interval([2.0]) == "2.0"
    assert interval([]) == interval([1.0, None]) == interval([math.nan, 1.0]) == "-"


@pytest.mark.filterwarnings("error")
def test_seeds_of_equal_returns_print_no_nan():
    """No rank correlation exists between targets and returns that never vary; scipy would warn."""
    for each in ((7.0, 7.0), (7.0, 8.0)):
        runs = [[row_of(x), row_of(x, target=2.0)] for x in each]
        (start, found), = E.alignments(runs)
        assert start == "far" and len(found) == 2
        assert interval([a["rank_correlation"] for a in found], 2) == "-"
    text = table([ROW, ROW | dict(target=6.0)])
    assert "nan" not in text and "rank correlation -" in text


# ------------------------------------------------------------------ films

class Painted(Counter):
    def render(self):
        return np.full((40, 60, 3), 10 * self.t, np.uint8)


@pytest.fixture
def painted(monkeypatch):
    monkeypatch.setattr(E, "make", lambda spec, **kwargs: Painted())


def test_a_film_shows_one_episode_and_its_return(painted, tmp_path):
    import imageio
    model = Recorder()
    for _ in range(2):      # the second overwrites the first
        got = film(model, META, tmp_path / "x.gif", "far", 1.0, seed=2)
        assert got == 15, "of five steps, since 2000 % 3 is 2"
    assert len(model.seen) == 10
    frames = imageio.mimread(tmp_path / "x.gif")
    assert [int(x[0, 0, 0]) for x in frames] == [10, 30, 50], "every second frame"
    assert frames[0].shape[:2] == (20, 30), "at half size"


def test_a_film_of_a_gymnasium_environment(tmp_path):
    pytest.importorskip("pygame")
    meta = META | CHOICES | dict(env_spec={"id": "CartPole-v1", "kwargs": {}}, state_shape=[4], n_actions=2,
                                 act_dim=2, state_mean=torch.zeros(4), state_std=torch.ones(4))
    model = Recorder(rule=lambda states: torch.zeros(len(states), dtype=torch.int64))
    assert 8 <= film(model, meta, tmp_path / "x.gif", "random", 1.0) == len(model.seen)


@pytest.mark.parametrize("name", ["pointmaze-umaze", "pointmaze-medium", "antmaze-umaze"])
def test_a_film_shows_the_whole_maze_from_above(name):
    """The pixels that change when the agent is put into another cell lie where the two cells are."""
    pytest.importorskip("mujoco")
    env = make({"id": ENVS[name].id}, render_mode="rgb_array")
    E.look_from_above(env.unwrapped)
    env.reset(seed=0)
    try:
        env.render()
    except Exception as error:      # as many ways as there are drivers
        pytest.skip(f"no OpenGL here: {error}")
    inner, maze = env.unwrapped, env.unwrapped.maze
    body = E.body_of(inner)
    metres = maze.maze_size_scaling * (max(maze.map_length, maze.map_width) - 1)

    def picture(cell):
        position, velocity = body.unwrapped.data.qpos.copy(), body.unwrapped.data.qvel.copy()
        position[:2] = cell
        body.unwrapped.set_state(position, velocity)
        return env.render().astype(int)
    cells = [min(maze.unique_reset_locations, key=sum), max(maze.unique_reset_locations, key=sum)]
    first, second = map(picture, cells)
    rows, columns = np.nonzero(np.abs(first - second).sum(2) > 60)
    height, width, _ = first.shape
    places = np.stack([columns / width - 0.5, 0.5 - rows / height], 1) * metres
    distance = [np.hypot(*(places - cell).T) for cell in cells]
    half = maze.maze_size_scaling / 2
    for d in distance:
        assert (d < half).sum() > 20, "it is seen in either cell"
    assert (np.minimum(*distance) < 1.5 * half).mean() > 0.95, "and nowhere else, but for its shadow"
    env.close()


def make_unwritable(tmp_path, how):
    if how == "a folder of that name":
        (tmp_path / "x.gif").mkdir()
        return tmp_path / "x.gif"
    if how == "no such folder":
        return tmp_path / "none" / "x.gif"
    if how == "below a file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file" / "x.gif"
    if how == "a folder of others":
        if os.name == "nt" or os.geteuid() == 0:
            pytest.skip("this user may write anywhere")
        (tmp_path / "shut").mkdir(0o500)
        return tmp_path / "shut" / "x.gif"
    return tmp_path / how


@pytest.mark.parametrize("how", [
    "a folder of that name", "no such folder", "below a file", "a folder of others",
    "x.mp4", "x.avi", "x", "x.png"])
def test_a_film_that_cannot_be_written_is_refused_before_anything_is_played(how, painted, tmp_path):
    path, model = make_unwritable(tmp_path, how), Recorder()
    with pytest.raises(UserError) as e:
        film(model, META, path, "random", 1.0)
    assert str(path) in str(e.value) and not model.seen, "played first"
    assert not path.is_file() and len(str(e.value).splitlines()) == 1


def test_a_film_that_fails_leaves_an_older_one_alone_or_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(E, "make", lambda spec, **kwargs: Counter())        # which draws nothing
    with pytest.raises(UserError, match="no film"):
        film(Recorder(), META, tmp_path / "x.gif", "random", 1.0)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ gymnasium's own bodies

def test_an_evaluation_of_a_body_counts_falls_and_the_time_limit():
    """Against gymnasium's own loop: episodes of Hopper that end by a fall, and some after 20 steps."""
    pytest.importorskip("mujoco")
    spec = {"id": "Hopper-v5", "kwargs": {"max_episode_steps": 20}}
    meta = META | dict(state_mean=torch.zeros(11), state_std=torch.ones(11), act_dim=3, state_shape=[11],
                       action_low=-torch.ones(3), action_high=torch.ones(3), max_ep_len=1000, env_spec=spec)

    def rule(states):
        return (900 * states[:, -1, :3]).sin()
    out = rollout(Recorder(rule=rule), meta, [make(spec) for _ in range(4)], np.full(4, 100.0), [3, 4, 5, 6])
    env = make(spec)
    for seed, total, length in zip((3, 4, 5, 6), out["return"], out["length"], strict=True):
        state, done, rewards = env.reset(seed=seed)[0], False, []
        while not done:
            action = rule(torch.from_numpy(state.astype(np.float32))[None, None])[0].numpy()
            action = -1 + (action + 1) * 0.5 * 2        # the rounding of bounds of -1 and 1
            state, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            done = terminated or truncated
        assert (total, length) == (pytest.approx(sum(rewards)), len(rewards))
    assert min(out["length"]) < 20 == max(out["length"]), out
