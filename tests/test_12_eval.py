"""Episodes played side by side: what the model is shown, what the environment is given, and the scores made of it.

    pytest tests/test_12_eval.py

The environments and the models here are a few lines each, so that every number can be followed by hand.
"""
import math
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

import eval as E
from data import UserError
from eval import alignment, evaluate, normalised, rank_correlation, rollout, table


class Counter(gymnasium.Env):
    """The state is [steps so far, seed]; the reward is the step's number; it ends after 3 + seed % 3 steps. It keeps what it was given."""
    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (2,)), gymnasium.spaces.Box(-2, 2, (1,))
    spec = SimpleNamespace(max_episode_steps=10, id="Counter")

    def reset(self, seed=None, options=None):
        self.t, self.seed, self.given, self.options = 0, seed, [], options
        return np.array([0.0, seed]), {}

    def step(self, action):
        assert self.t < 3 + self.seed % 3, "a finished episode must not be stepped"
        self.given.append(action)
        self.t += 1
        return np.array([self.t, self.seed], float), float(self.t), self.t == 3 + self.seed % 3, False, {"success": self.t == 4}


class Recorder(torch.nn.Module):
    """A model that acts by a rule and keeps its inputs."""

    def __init__(self, K=2, rule=lambda states: torch.full((len(states), 1), 0.25)):
        super().__init__()
        self.cfg, self.rule, self.seen, self.weight = SimpleNamespace(context_len=K), rule, [], torch.nn.Parameter(torch.zeros(1))

    def act(self, states, actions, rewards, rtg, timesteps, sample=False, generator=None):
        self.seen.append([x.clone() for x in (states, actions, rewards, rtg, timesteps)])
        return self.rule(states)


META = dict(model="dt", env="counter", dataset="d", source="s", env_spec={"id": "Counter", "kwargs": {}},
            layout={"first": None, "position": False, "stack": 0},
            clip_rewards=False, goal=False, state_mean=torch.tensor([1.0, 0.0]), state_std=torch.tensor([2.0, 1.0]),
            rtg_scale=10.0, reward_scale=2.0, act_dim=1,
            n_actions=None, action_start=0, action_low=torch.tensor([-2.0]), action_high=torch.tensor([2.0]), max_ep_len=10, ref=(0.0, 50.0),
            starts={"random": None, "far": {"cell": 1}}, sample=False)


def play(model, seeds=(0, 1, 2), targets=(20.0, 30.0, 40.0), meta=META, **kwargs):
    envs = [Counter() for _ in seeds]
    return envs, rollout(model, meta, envs, np.array(targets), seeds, **kwargs)


def test_each_episode_collects_its_own_return_and_finished_ones_drop_out():
    envs, out = play(Recorder())
    assert out["return"].tolist() == [6, 10, 15] and out["length"].tolist() == [3, 4, 5] and out["success"].tolist() == [0, 1, 1]
    model = Recorder()
    play(model)
    assert [len(seen[0]) for seen in model.seen] == [3, 3, 3, 2, 1]


def test_the_model_sees_normalised_states_and_the_target_less_the_rewards_so_far():
    """By hand for the episode of 5 steps: rewards 1, 2, 3, 4, so the return to go is 40, 39, 37, 34, 30, divided by 10."""
    model = Recorder()
    play(model)
    states, actions, rewards, rtg, timesteps = model.seen[4]
    assert torch.allclose(rtg[:, :, 0], torch.tensor([[3.4, 3.0]])) and timesteps.tolist() == [[3, 4]]
    assert torch.allclose(states[0], torch.tensor([[(3 - 1) / 2, 2.0], [(4 - 1) / 2, 2.0]]))
    assert torch.allclose(rewards[0, 0], torch.tensor([4 / 2.0])) and torch.allclose(actions[0, 0], torch.tensor([0.25]))
    assert actions[0, 1] == 0 and rewards[0, 1] == 0, "the present action and reward are not known yet"


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
    meta = META | dict(n_actions=3, action_start=5)
    model = Recorder(rule=lambda s: torch.full((len(s),), 2))
    envs, _ = play(model, meta=meta)
    assert envs[0].given == [7, 7, 7] and type(envs[0].given[0]) is int
    assert model.seen[1][1].tolist() == [[2, 0]] * 3 and model.seen[1][1].dtype == torch.int64, "the history holds the model's own numbering"


def test_playing_side_by_side_equals_playing_one_by_one():
    def rule(states):       # depends on the state, so that a row taking another's place would show
        return torch.tanh(states[:, -1, :1] - 0.3 * states[:, -1, 1:])
    _, together = play(Recorder(rule=rule))
    for i, target in enumerate((20.0, 30.0, 40.0)):
        _, alone = play(Recorder(rule=rule), seeds=(i,), targets=(target,))
        assert all(alone[k][0] == together[k][i] for k in alone)


def test_zeroing_blanks_one_input_and_leaves_the_others():
    full, model = Recorder(), Recorder()
    play(full)
    play(model, zero=["rtg"])
    assert not model.seen[2][3].any() and torch.equal(model.seen[2][0], full.seen[2][0])
    model = Recorder()
    play(model, zero=["actions", "states"])
    assert not model.seen[2][1].any() and not model.seen[2][0][:, :-1].any(), "past states only"
    assert torch.equal(model.seen[2][0][:, -1], full.seen[2][0][:, -1]) and torch.equal(model.seen[2][3], full.seen[2][3])


def test_a_model_that_says_nan_is_reported_and_not_sent_to_the_environment():
    with pytest.raises(UserError, match="NaN"):
        play(Recorder(rule=lambda s: torch.full((len(s), 1), math.nan)))


def test_an_environment_of_another_width_is_refused_with_both_numbers():
    with pytest.raises(UserError, match="gives 2 state numbers.* have 3"):
        play(Recorder(), meta=META | dict(state_mean=torch.zeros(3), state_std=torch.ones(3)))


# ------------------------------------------------------------------ plans, rows, scores

def test_a_plan_gives_one_row_each_with_the_same_seeds_for_every_target(monkeypatch):
    """The same starts for each target: what differs between rows is the target alone. 120 episodes are played 50 at a time."""
    made = []
    monkeypatch.setattr(E, "make_env", lambda spec: made.append(Counter()) or made[-1])
    rows = evaluate(Recorder(), META, [("random", 5.0, 60), ("far", 9.0, 60)], seed=3)
    assert len(made) == 50 and [r["episodes"] for r in rows] == [60, 60]
    expected = [sum(range(1, 4 + (3000 + j) % 3)) for j in range(60)]
    assert rows[0]["returns"] == rows[1]["returns"] == expected and made[0].options == {"cell": 1}
    assert rows[0]["return_mean"] == np.mean(expected) and rows[1]["abs_error"] == np.mean(np.abs(np.array(expected) - 9))
    assert rows[0]["score"] == pytest.approx(2 * np.mean(expected)) and rows[0]["success"] == pytest.approx(100 * np.mean(np.array(expected) >= 10))


def test_evaluating_touches_neither_torchs_generator_nor_the_training_mode(monkeypatch):
    monkeypatch.setattr(E, "make_env", lambda spec: Counter())
    model, before = Recorder().train(), torch.get_rng_state()
    evaluate(model, META, [("random", 5.0, 2)])
    assert model.training and torch.equal(before, torch.get_rng_state())


def test_scores_are_d4rls():
    """D4RL's own example of the formula: hopper's expert return scores 100, its random return 0."""
    ref = (-20.272305, 3234.3)
    assert normalised(3234.3, ref) == 100 and normalised(-20.272305, ref) == 0 and normalised(1.0, None) is None
    assert normalised(1607.0138475, ref) == pytest.approx(50.0)


def test_rank_correlation_by_hand_with_ties():
    """Spearman on ranks (1.5, 1.5, 3.5, 3.5) and (1, 2, 4, 3): covariance 4, variances 4 and 5."""
    assert rank_correlation([1, 1, 2, 2], [0, 5, 9, 7]) == pytest.approx(4 / math.sqrt(4 * 5))
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1) and rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))


def test_alignment_is_over_episodes_and_not_over_means():
    """Errors of +10 and -10 average to zero; per episode they are 10 (RADT paper, Eq. 4)."""
    a = alignment([dict(target=50.0, episodes=2, achieved=[40.0, 60.0]), dict(target=90.0, episodes=1, achieved=[90.0])])
    assert a["abs_error"] == pytest.approx(20 / 3) and a["episodes"] == 3


def test_the_table_prints_zeros_as_zeros_and_stars_the_headline():
    row = dict(start="far", target=5.0, episodes=2, returns=[0.0, 0.0], return_mean=0.0, return_std=0.0, score=0.0, success=0.0, length=3.0,
               achieved=[0.0, 0.0], achieved_mean=0.0, abs_error=5.0, error_of_mean=5.0)
    text = table([row, row | dict(target=6.0, score=None, success=None)], headline=5.0)
    assert "5.0*" in text and "0.0 ±    0.0     0.0    0.0 %" in text and text.splitlines()[2].split()[6:8] == ["-", "-"]


def test_seeds_are_summed_up_by_mean_and_students_interval():
    """Three values 1, 2, 3: mean 2, standard error 1/sqrt(3), times 4.30 for two degrees of freedom."""
    def rows(x):
        return [dict(start="far", target=1.0, return_mean=x, score=None, success=None, abs_error=x, episodes=1, returns=[x], achieved=[x])]
    text = E.seeds_table([rows(1.0), rows(2.0), rows(3.0)])
    assert "2.0 ± 2.5" in text and f"{4.30 / math.sqrt(3):.1f}" == "2.5"
