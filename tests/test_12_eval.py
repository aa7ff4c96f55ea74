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
from data import UserError, make_env, observe, stepper
from envs import step_bodies
from eval import alignment, batched, evaluate, normalised, rank_correlation, rollout, table


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


class Walk(gymnasium.Env):
    """The state is [position, seed]; an action moves it and is paid for by where it leads; it ends after 3 to 9 steps and says nothing of success."""
    observation_space, action_space = gymnasium.spaces.Box(-99, 99, (2,)), gymnasium.spaces.Box(-2, 2, (1,))
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
    """An episode of Walk as a plain loop over lists: (what the model is to see at each step, actions and rewards up to the last; return)."""
    env, shown, s, a, r = Walk(), [], [], [], []
    state, done = env.reset(seed)[0], False
    while not done:
        s.append((state.astype(np.float32) - np.array([1, 0], np.float32)) / np.array([2, 1], np.float32))
        first, left = max(0, len(s) - K), [(target - sum(r[:i])) / 10 for i in range(len(s))]
        rows = [np.array(s[first:]), np.reshape(a[first:], (-1, 1)), np.reshape(r[first:], (-1, 1)) / 2, np.reshape(left[first:], (-1, 1))]
        shown.append([torch.tensor(x, dtype=torch.float32) for x in rows] + [torch.arange(first, len(s))])
        a.append(walk_rule(shown[-1][0][None])[0].tolist())
        state, reward, done, _, _ = env.step(np.float32(2) * np.array(a[-1], np.float32))
        r.append(reward)
    return shown, sum(r)


@pytest.mark.parametrize("K", [1, 2, 3])
def test_every_row_is_shown_its_own_episode_and_nothing_else_whoever_leaves_first(K):
    """Against a plain loop over each episode by itself; the longest has 9 steps, and 4 K are kept at a time, so history moves for K = 1 and 2."""
    seeds, targets = [5, 0, 13, 2, 6, 1, 7], np.linspace(-20, 40, 7)
    model = Recorder(K, walk_rule)
    out = rollout(model, META, [Walk() for _ in seeds], targets, seeds)
    assert out["length"].tolist() == [8, 3, 9, 5, 9, 4, 3] and np.isnan(out["success"]).all(), "where nothing is said of success, none is made up"
    for seed, target, total in zip(seeds, targets, out["return"], strict=True):
        shown, slow_total = slow_walk(K, seed, target)
        assert total == pytest.approx(slow_total, abs=1e-5)
        mine = [[x[row] for x in seen] for seen in model.seen for row in range(len(seen[0])) if seen[0][row, -1, 1] == seed]
        assert len(mine) == len(shown)
        for (states, actions, rewards, *rest), want in zip(mine, shown, strict=True):
            got = states, actions[:-1], rewards[:-1], *rest         # nobody reads the last two of those
            assert all(x.shape == y.shape and torch.allclose(x, y, atol=1e-5) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("layout,kind", [({"first": None, "position": False}, "box"), ({"first": 3, "position": True}, "maze"),
                                         ({"first": None, "position": False}, "nested"), ({"stack": 2}, "frame")])
def test_observations_taken_together_equal_those_taken_one_by_one(layout, kind):
    g = np.random.default_rng(0)
    make = dict(box=lambda: g.random(4), frame=lambda: g.integers(0, 256, (5, 5), np.uint8),
                maze=lambda: dict(observation=g.random(5), achieved_goal=g.random(2), desired_goal=g.random(2)),
                nested=lambda: dict(hand=g.random(3), desired_goal=dict(b=g.random(1), a=g.random(2)), achieved_goal=dict(b=g.random(1))))
    several = [make[kind]() for _ in range(3)]
    together, alone = observe(batched(several), layout), [observe(o, layout) for o in several]
    assert np.array_equal(together[0], np.stack([s for s, _ in alone])) and together[0].dtype == alone[0][0].dtype
    assert together[1] is None if alone[0][1] is None else np.array_equal(together[1], np.stack([goal for _, goal in alone]))
    assert (together[1] is None) == (kind != "maze")


class Maze(Walk):
    def see(self):
        return dict(observation=np.array([self.seed, self.t], float), achieved_goal=np.array([self.x]), desired_goal=np.array([-self.seed], float))

    def reset(self, seed=None, options=None):
        super().reset(seed)
        return self.see(), {}

    def step(self, action):
        return self.see(), *super().step(action)[1:4], {"success": np.bool_(self.t == 2)}


def test_a_mazes_goal_stands_behind_its_state_and_a_success_once_had_is_kept():
    meta = META | dict(goal=True, layout={"first": 1, "position": True, "stack": 0}, state_mean=torch.zeros(3), state_std=torch.ones(3))
    model = Recorder(rule=lambda s: torch.full((len(s), 1), 0.5))
    out = rollout(model, meta, [Maze() for _ in range(3)], np.zeros(3), [4, 0, 3])
    assert torch.allclose(model.seen[0][0][:, 0], torch.tensor([[0.4, 4, -4], [0, 0, 0], [0.3, 3, -3]]))
    assert out["length"].tolist() == [7, 3, 6] and out["success"].tolist() == [1, 1, 1]


class Picture(gymnasium.Env):
    """A frame of one pixel: the seed, times 10, plus the step from 1 on."""
    spec = SimpleNamespace(max_episode_steps=10, id="Picture")

    def reset(self, seed=None, options=None):
        self.seed, self.t = seed, 1
        return np.full((1, 1), 10 * seed + 1, np.uint8), {}

    def step(self, action):
        self.t += 1
        return np.full((1, 1), 10 * self.seed + self.t, np.uint8), 0.0, self.t > 3 + self.seed, False, {}


@pytest.mark.parametrize("K", [1, 2])
def test_frames_and_the_models_memory_follow_their_row(K):
    """K = 1 keeps 4 steps of history at a time and the longest episode has 9: its stacks reach back over two moves."""
    class Model(Recorder):
        def act(self, states, *rest, memory=None, **kwargs):
            now = states[:, -1, -1, 0, 0].clone()
            assert not memory or torch.equal(memory["last"] + 1, now)
            memory["last"] = now
            return super().act(states, *rest)
    meta = META | dict(layout={"stack": 3}, state_shape=[3, 1, 1], state_mean=None, state_std=None)
    model = Model(K, lambda s: torch.zeros(len(s), 1))
    rollout(model, meta, [Picture() for _ in range(4)], np.zeros(4), [2, 0, 6, 1])
    for t, (states, *_) in enumerate(model.seen):
        alive = [s for s in (2, 0, 6, 1) if t < 3 + s]
        want = [[[10 * s + i + 1 if i >= 0 else 0 for i in range(k - 2, k + 1)] for k in range(max(0, t + 1 - K), t + 1)] for s in alive]
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


# ------------------------------------------------------------------ gymnasium's bodies, stepped together

BODIES = [("Hopper-v5", {}), ("Hopper-v5", dict(exclude_current_positions_from_observation=False, ctrl_cost_weight=0.3, forward_reward_weight=2.0,
                                                healthy_reward=0.5, terminate_when_unhealthy=False)),
          ("Walker2d-v5", {}), ("Walker2d-v5", dict(xml_file="walker2d.xml", exclude_current_positions_from_observation=False)),
          ("HalfCheetah-v5", {}), ("HalfCheetah-v5", dict(exclude_current_positions_from_observation=False, ctrl_cost_weight=0.7)),
          ("Ant-v5", {}), ("Ant-v5", dict(include_cfrc_ext_in_observation=False, contact_cost_weight=0.01, main_body=3))]


@pytest.mark.parametrize("id, kwargs", BODIES)
def test_bodies_stepped_together_move_and_score_bit_for_bit_as_one_by_one(id, kwargs):
    pytest.importorskip("mujoco")
    together, alone = ([make_env({"id": id, "kwargs": kwargs}) for _ in range(5)] for _ in range(2))
    step, g, ends = stepper(together), np.random.default_rng(0), 0
    assert step is step_bodies
    for pair in zip(together, alone, strict=True):
        assert len({env.reset(seed=0)[0].tobytes() for env in pair}) == 1
    for t in range(200):
        rows = np.flatnonzero(g.random(5) < 0.8)        # not all play on
        if not len(rows):
            continue
        actions = g.uniform(-1, 1, (len(rows), alone[0].action_space.shape[0])).astype(np.float32)
        got = step([together[i] for i in rows], actions)
        for i, u, (observation, reward, terminated, truncated, info) in zip(rows, actions, zip(*got, strict=True), strict=True):
            expected = alone[i].step(u)
            assert np.array_equal(observation, expected[0]) and (reward, terminated) == expected[1:3] and not truncated and info == {}
            if terminated:
                ends += 1
                for env in (together[i], alone[i]):
                    env.reset(seed=t)
    assert ends > 5 or "HalfCheetah" in id or kwargs.get("terminate_when_unhealthy") is False


def test_only_unaltered_bodies_are_stepped_together():
    pytest.importorskip("mujoco")
    hoppers = [make_env({"id": "Hopper-v5", "kwargs": {}}) for _ in range(2)]
    walker, heavy = make_env({"id": "Walker2d-v5", "kwargs": {}}), make_env({"id": "Hopper-v5", "kwargs": {"ctrl_cost_weight": 9.0}})
    bare, brief = type(walker.unwrapped)(), make_env({"id": "Hopper-v5", "kwargs": {"max_episode_steps": 3}})
    wrapped = gymnasium.wrappers.ClipReward(hoppers[1], -1, 1)

    class Mine(type(hoppers[0].unwrapped)):
        pass
    assert stepper(hoppers) is step_bodies
    mixed = [[hoppers[0], other] for other in (walker, heavy, brief, wrapped)]
    for others in (*mixed, [bare], [Mine()], [Counter()], [Counter(), hoppers[0]]):
        assert stepper(others) is not step_bodies
    hoppers[0].step = hoppers[0].step       # as someone does who watches it
    assert stepper(hoppers) is not step_bodies


def test_an_evaluation_is_the_same_with_bodies_stepped_one_by_one(monkeypatch):
    """Of Hopper: episodes that end by a fall, and some at the time limit."""
    pytest.importorskip("mujoco")
    spec = {"id": "Hopper-v5", "kwargs": {"max_episode_steps": 20}}
    meta = META | dict(state_mean=torch.zeros(11), state_std=torch.ones(11), act_dim=3, action_low=-torch.ones(3), action_high=torch.ones(3),
                       max_ep_len=1000, env_spec=spec)

    def outcome():
        envs = [make_env(spec) for _ in range(4)]
        return rollout(Recorder(rule=lambda states: (900 * states[:, -1, :3]).sin()), meta, envs, np.full(4, 100.0), [3, 4, 5, 6])
    fast = outcome()
    monkeypatch.setattr(E, "stepper", lambda envs: stepper([Counter()]))     # gives the way of other environments
    slow = outcome()
    assert all(np.array_equal(fast[k], slow[k], equal_nan=True) for k in fast) and min(fast["length"]) < 20 == max(fast["length"]), fast
