"""online.py: the policy's numbers against integrals, the buffer by hand, runs that are stopped and killed.

    pytest tests/test_21_online.py
"""
import csv
import json
import os
import random
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from test_13_train import cart_set, here

import online as O
import settings as config
import train as T
from data import Trajectories
from eval import evaluate, load_run

SMALL = dict(size="small", device="cpu", steps=20, batch_size=8, d=8, n_layer=1, context_len=3, eval_every=0,
             eval_episodes=2, env_steps=20, updates=5, eval_rounds=2, targets=(8.0,), buffer=6)


class Stub(gymnasium.Env):
    """An episode of 3 + seed % 4 steps: rewards 0.5, 1.5, 2.5, ..., and states that tell of the action."""
    observation_space = Box(-100, 100, (3,), np.float32)

    def __init__(self, kind="numbers"):
        self.kind = kind
        self.action_space = Discrete(3, start=2) if "choices" in kind else Box(-2, 2, (2,), np.float32)

    def see(self, action=0.0):
        x = np.array([self.seed % 5, np.sum(action), self.t], np.float32)
        if "frames" in self.kind:
            return np.full((84, 84), 10 * self.t + self.seed % 5, np.uint8)
        return dict(observation=x, desired_goal=np.array([self.seed % 3, 1.0])) if "goal" in self.kind else x

    def reset(self, seed=None, options=None):
        self.seed, self.t = seed, 0
        return self.see(), {}

    def step(self, action):
        self.t += 1
        return self.see(action), self.t - 0.5, self.t == 3 + self.seed % 4, False, {}


gymnasium.register("OnlineStub-v0", Stub, max_episode_steps=50)


def stub_data(kind="numbers", returns=(5.0, 1.0, 3.0, 2.0), T=4):
    """Episodes of T steps with these returns, an equal share of it a step."""
    g, E = np.random.default_rng(0), len(returns)
    states = g.standard_normal((E * T, 3)).astype(np.float32)
    actions, how = g.uniform(-2, 2, (E * T, 2)), dict(action_low=-2.0, action_high=2.0)
    if "frames" in kind:
        states = g.integers(0, 256, (E * T, 84, 84), np.uint8)
        how["stack"] = 2
    if "choices" in kind:
        actions, how["n_actions"], how["action_start"] = g.integers(2, 5, E * T), 3, 2
    goals = g.standard_normal((E * T, 2)) if "goal" in kind else None
    return Trajectories(states, actions, np.repeat(returns, T) / T, [T] * E, goals=goals, max_ep_len=50,
                        env_spec={"id": "OnlineStub-v0", "kwargs": {"kind": kind}}, **how)


def begun(t=None, **given):
    """An OnlineRun without a folder."""
    settings = config.resolve(SMALL | dict(env="arrays") | given, O.OnlineSettings)
    return T.begin(settings, t or stub_data(), O.OnlineRun)[0]


def rows_of(run):
    with open(run / "log.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def state_of(run):
    return torch.load(run / "last.pt", weights_only=True)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


# ------------------------------------------------------------------ the policy

GRID = torch.linspace(-15, 15, 200_001, dtype=torch.float64)        # of u; of a = tanh(u) with its slope


@pytest.mark.parametrize("mean, log_std", [(0.0, 0.0), (1.3, -0.7), (-2.0, 0.5), (0.4, -4.0)])
def test_density_and_entropy_are_those_of_numerical_integrals(mean, log_std):
    mean, log_std = torch.tensor([mean], dtype=torch.float64), torch.tensor([log_std], dtype=torch.float64)
    p = O.squashed_gaussian(mean, log_std)
    a, slope = GRID.tanh(), 1 - GRID.tanh()**2
    inside = slope > 1e-12
    log_p = p.log_prob(a[:, None]).where(inside, 0)
    # the same in other words: as many u as a in an interval
    gauss = torch.distributions.Normal(mean, log_std.exp()).log_prob(GRID)
    assert torch.allclose((log_p + slope.log())[inside], gauss[inside], atol=1e-3)
    assert torch.trapezoid(log_p.exp() * slope, GRID).item() == pytest.approx(1, abs=1e-5)
    entropy = -torch.trapezoid(log_p.exp() * log_p * slope, GRID).item()
    torch.manual_seed(0)
    drawn = O.squashed_gaussian(mean.expand(400_000, 1), log_std.expand(400_000, 1))
    assert -drawn.log_prob(drawn.rsample()).mean().item() == pytest.approx(entropy, abs=0.02)
    two = O.squashed_gaussian(mean.expand(2), log_std.expand(2))
    assert two.log_prob(a[70_000:70_002]).item() == pytest.approx(log_p[70_000:70_002].sum().item())


def test_the_density_is_exact_where_tanh_is_one_in_float32():
    p = O.squashed_gaussian(torch.tensor([[30.0, -30.0]]), torch.full((1, 2), -20.0))
    drawn = p.rsample()
    assert drawn.abs().tolist() == [[1, 1]]
    u = p.base_dist.base_dist.log_prob(torch.tensor([[30.0, -30.0]])).sum().item()
    # the slope is 4 exp(-60)
    assert p.log_prob(drawn).item() == pytest.approx(u - 2 * (np.log(4) - 60), abs=5)


def batch_of(run, padded=2):
    """Windows of which the last steps are padding."""
    batch = run.windows.gather(torch.tensor([0, 5, 9]))
    batch["mask"][:, -padded:] = False
    return batch


@pytest.mark.parametrize("kind", ["numbers", "choices"])
def test_the_loss_is_likelihood_and_entropy_of_real_steps_and_the_temperature_learns_apart(kind):
    run = begun(stub_data(kind), model="dt", temperature=0.3, context_len=4)
    model, batch = run.model, batch_of(run)
    torch.manual_seed(0)
    loss, log = model.loss(batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    features, mask = model.features(**batch), batch["mask"]
    if kind == "choices":
        p = torch.distributions.Categorical(logits=model.head(features))
        nll, entropy, target = -p.log_prob(batch["actions"]), p.entropy(), 0.1 * np.log(3)
    else:
        mean = model.head(features)
        log_std = -5 + 3.5 * (model.stochastic_std(features).tanh() + 1)
        p = torch.distributions.Independent(torch.distributions.TransformedDistribution(
            torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform()), 1)
        torch.manual_seed(0)
        u = mean + log_std.exp() * torch.empty_like(mean).normal_()
        nll, entropy, target = -p.log_prob(batch["actions"]), -p.log_prob(u.tanh()), -2
    nll, entropy = nll[mask].mean(), entropy[mask].mean()
    by_hand = nll - 0.3 * entropy
    by_hand.backward()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-3)
    assert log["nll"].item() == pytest.approx(nll.item(), rel=1e-4)
    assert log["entropy"].item() == pytest.approx(entropy.item(), rel=1e-3)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert torch.allclose(grads[name], p.grad, atol=1e-4, rtol=1e-3), name
    assert {"head.weight", "embed_state.weight"} <= grads.keys()
    got = model.stochastic_log_temperature.grad.item()
    assert got == pytest.approx(0.3 * (entropy.item() - target), rel=2e-3)
    # padding contents change nothing
    torch.manual_seed(0)
    batch["actions"] = torch.where(mask.view(3, 4, *[1] * (batch["actions"].ndim - 2)), batch["actions"], 0)
    assert model.loss(batch)[0].item() == pytest.approx(loss.item(), rel=1e-6)


def test_actions_at_their_bounds_have_a_finite_loss():
    run = begun()
    batch = batch_of(run, padded=1)
    batch["actions"] = batch["actions"].sign()
    loss, _ = run.model.loss(batch)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in run.model.head.parameters())


def test_drawn_actions_have_the_density_of_the_loss_and_undrawn_ones_are_the_mean():
    run = begun(model="dc", window=3)
    model = run.model.eval()
    torch.nn.init.zeros_(model.stochastic_std.weight)       # a spread that is narrow enough for atanh
    model.stochastic_std.bias.data.copy_(torch.tensor([-0.3, 0.0]))
    one = run.windows.sample(1)
    history = {key: x.expand(20_000, *x.shape[1:]) for key, x in one.items() if key != "mask"}
    a = model.act(**history, sample=True, generator=torch.Generator().manual_seed(0))
    normal = model.policy(model.features(**history)[0, -1]).base_dist.base_dist
    mean = normal.mean
    assert torch.allclose(a.atanh().mean(0), mean, atol=0.03)
    assert torch.allclose(a.atanh().std(0), normal.stddev, rtol=0.03)
    assert torch.allclose(model.act(**history)[0], mean.tanh(), atol=1e-6)
    long = {key: torch.cat([torch.ones_like(x), x], 1)[:1] for key, x in history.items()}
    assert torch.allclose(model.act(**long), model.act(**history)[:1], atol=1e-6)
    drawn = [model.act(**x, sample=True, generator=torch.Generator().manual_seed(1))[0] for x in (
        long, {key: x[:1] for key, x in history.items()})]
    assert torch.allclose(*drawn, atol=1e-6)


def test_the_predictor_of_dm_learns_as_in_its_own_loss():
    run = begun(model="dm", n_layer=2, strategy="window")
    run.model.loss(run.windows.sample(8))[0].backward()
    aux = [p for name, p in run.model.named_parameters() if ".aux." in name]
    assert aux and all(p.grad.abs().sum() > 0 for p in aux)


# ------------------------------------------------------------------ the buffer

def returns_of(run):
    """Of the episodes in the buffer, place by place, in whole numbers."""
    episodes = run.kept | run.new
    return [float(episodes[i]["rewards"].sum()) for i in range(len(episodes))]


def test_new_episodes_take_free_places_then_those_of_the_worst_then_of_the_oldest():
    run = begun(buffer=3, rollouts=1)
    assert returns_of(run) == [2, 3, 5]     # of 5, 1, 3, 2
    # seeds 10**9 + round: episodes of 3, 4, 5, 6, 3 steps, and returns of half their squares
    expected = [[4.5, 3, 5], [4.5, 8, 5], [4.5, 8, 12.5], [18, 8, 12.5], [18, 4.5, 12.5]]
    for returns in expected:
        run.explore()
        assert returns_of(run) == returns
    assert run.env_steps == 3 + 4 + 5 + 6 + 3

    run = begun(buffer=6, rollouts=2)
    run.explore()
    assert returns_of(run) == [1, 2, 3, 5, 4.5, 8]
    run.explore()
    assert returns_of(run) == [12.5, 18, 3, 5, 4.5, 8]


def test_windows_of_the_buffer_hold_the_returns_that_episodes_had():
    """Whatever was asked for. The normalisation stays that of the data."""
    run = begun(buffer=2, rtg_scale=2.0, reward_scale=0.5)
    mean = run.windows.mean
    run.explore()
    run.explore()       # episodes of 3 and 4 steps
    run.look()
    rewards, rtg = run.windows.table[:, -2], run.windows.table[:, -1]
    assert rewards.tolist() == [1, 3, 5, 1, 3, 5, 7]
    assert rtg.tolist() == [2.25, 2, 1.25, 4, 3.75, 3, 1.75]
    assert run.windows.step.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert torch.equal(run.windows.mean, mean) and torch.equal(run.meta["state_mean"], mean)


@pytest.mark.parametrize("kind", ["numbers", "choices", "numbers goal", "frames choices", "frames"])
def test_training_sees_what_the_policy_saw_while_playing(kind, monkeypatch):
    run = begun(stub_data(kind), buffer=1, context_len=3, act_context=3)
    seen, act = [], type(run.model).act

    def spy(self, **history):
        action = act(self, **history)
        kept = {key: x.clone() for key, x in history.items() if torch.is_tensor(x)}
        seen.append(kept | dict(chosen=action))
        return action
    monkeypatch.setattr(type(run.model), "act", spy)
    run.round = 2       # a seed of five steps
    run.explore()
    run.look()
    assert len(seen) == len(run.windows) == 5
    for t, history in enumerate(seen):
        first = max(0, t - 2)
        n = t + 1 - first
        window = {key: x[0, :n] for key, x in run.windows.gather(torch.tensor([first])).items()}
        for key in ("states", "timesteps"):
            assert torch.equal(window[key], history[key][0].to(window[key].dtype)), (t, key)
        for key in ("actions", "rewards"):      # its last ones were not known yet
            assert torch.equal(window[key][:-1], history[key][0, :-1]), (t, key)
        assert torch.equal(window["actions"][-1], history["chosen"][0])
        # asked for 16, twice the evaluation's, less by what came
        asked = 16 - np.cumsum([0, 0.5, 1.5, 2.5, 3.5])[first:t + 1]
        assert np.allclose(history["rtg"][0, :, 0], asked / run.cfg.rtg_scale)
        got = np.array([12.5, 12, 10.5, 8, 4.5])[first:t + 1]
        assert np.allclose(window["rtg"][:, 0] * run.cfg.rtg_scale, got)


def test_acting_sees_as_many_steps_as_asked_for(monkeypatch):
    run, lengths = begun(context_len=3, act_context=2), []
    act = type(run.model).act

    def spy(self, **history):
        lengths.append(history["states"].shape[1])
        return act(self, **history)
    monkeypatch.setattr(type(run.model), "act", spy)
    run.explore()
    assert lengths == [1, 2, 2]


def test_exploring_asks_for_twice_the_evaluations_return_or_what_is_given_on_other_seeds():
    for given, asked in (({}, 16), (dict(targets=(-8.0,)), 0), (dict(explore=3.0), 3)):
        run = begun(**given)
        run.explore()
        assert run.rows[-1]["asked"] == asked and run.rows[-1]["explored"] == 4.5
    first = begun(seed=1)
    first.explore()
    second = begun(seed=1)
    before = torch.get_rng_state()
    second.explore()
    assert torch.equal(torch.get_rng_state(), before)       # training draws as if nothing had been played
    assert torch.equal(first.new[4]["actions"], second.new[4]["actions"])
    second.explore()
    assert not torch.equal(second.new[4]["actions"][:3], second.new[5]["actions"][:3])


# ------------------------------------------------------------------ runs

def test_the_warm_up_counts_the_updates_of_both_phases(tmp_path, monkeypatch):
    rates, set_rate = [], T.set_learning_rate

    def spy(optimizer, rate):
        rates.append(rate)
        set_rate(optimizer, rate)
    monkeypatch.setattr(T, "set_learning_rate", spy)
    given = SMALL | dict(lr=1.0, warmup=100, clip=1e-9, weight_decay=0.0, out=str(tmp_path))
    run = O.fine_tune(stub_data(), **given)["run"]
    rows = [r for r in rows_of(run) if r["lr"]]
    assert {r["phase"] for r in rows} == {"offline", "online"}
    assert [int(r["step"]) for r in rows] == list(range(1, len(rows) + 1)) and len(rows) > 30
    assert [float(r["lr"]) for r in rows] == pytest.approx(rates)
    assert rates == pytest.approx([int(r["step"]) / 100 for r in rows])


def test_a_run_leaves_offline_and_online_rows_and_a_folder_that_eval_reads(tmp_path, capsys):
    result = O.fine_tune(stub_data(), **SMALL, out=str(tmp_path))
    rows = rows_of(result["run"])
    played = [r for r in rows if r["return_mean"] and r["checkpoint"] == "last"]
    assert [r["phase"] for r in played] == ["offline"] + ["online"] * (len(played) - 1) and len(played) > 2
    assert played[0]["env_steps"] == "0" and int(played[0]["step"]) == 20
    rounds = [r for r in rows if r["explored"]]
    steps = np.cumsum([3 + i % 4 for i in range(len(rounds))])
    assert [int(r["env_steps"]) for r in rounds] == steps.tolist() and steps[-2] < 20 <= steps[-1]
    assert [int(r["round"]) for r in rounds] == list(range(1, len(rounds) + 1))
    assert int(played[-1]["step"]) == 20 + 5 * len(rounds)
    kept = json.loads((result["run"] / "result.json").read_text())
    assert kept["offline"]["return_mean"] == float(played[0]["return_mean"])
    assert kept["env_steps"] == steps[-1]
    assert "steps online" in capsys.readouterr().out
    model, meta = load_run(result["run"])
    assert meta["act_context"] == 5 and meta["plan"] == [("random", 8.0, 2)]
    assert evaluate(model, meta, meta["plan"])[0]["return_mean"] == result["rows"][0]["return_mean"]


@pytest.mark.parametrize("kind", ["numbers", "choices goal", "frames", "frames choices"])
@pytest.mark.parametrize("name", config.MODELS)
def test_every_model_learns_from_every_kind_of_data(name, kind, tmp_path):
    given = SMALL | dict(model=name, out=str(tmp_path), steps=4, env_steps=4, updates=2, batch_size=4)
    result = O.fine_tune(stub_data(kind), **given)
    state = state_of(result["run"])
    assert result["steps"] == 8 and len(state["new"]) == 2
    assert all(x.isfinite().all() for x in state["model"].values())
    assert state["model"]["stochastic_log_temperature"] != torch.tensor(0.1).log()


def test_a_run_starts_from_the_body_of_another_with_a_new_head_or_its_own(tmp_path):
    keys = "steps batch_size d n_layer context_len size device eval_episodes targets".split()
    data = stub_data()
    given = {key: SMALL[key] for key in keys} | dict(model="dc", window=2, out=str(tmp_path))
    first = T.train(data, **given)
    old = state_of(first["run"])["model"]
    given = {key: x for key, x in SMALL.items() if key not in ("d", "n_layer", "context_len")}
    given |= dict(out=str(tmp_path), lr=1e-10, temperature_lr=1e-9, weight_decay=0.0, steps=1)
    for keep in (False, True):
        # a rate so low that the weights are still those of the beginning
        run = O.fine_tune(data, body=first["run"], keep_head=keep, **given)["run"]
        new = state_of(run)
        assert new["settings"]["model"]["window"] == 2 and new["settings"]["train"]["model"] == "dc"
        for key, x in old.items():
            same_weights = torch.allclose(new["model"][key], x, atol=1e-6)
            assert same_weights == (keep or not key.startswith("head.")), key


LONGER = SMALL | dict(steps=30, env_steps=60, buffer=3, dropout=0.1, rollouts=2, warmup=5,
                      temperature_lr=0.01)


def end(run):
    """(weights, optimisers, buffer and counters; log.csv) of a run that is through."""
    state = state_of(run)
    kept = "model optimizer tuner_state new round env_steps offline done rows generator torch_rng".split()
    return {key: state[key] for key in kept}, (run / "log.csv").read_bytes()


def matches(run, alone):
    (state, log), (other, other_log) = end(run), end(alone)
    return same(state, other) and log == other_log


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return O.fine_tune(stub_data(), **LONGER, out=str(tmp_path_factory.mktemp("alone")), run="x")["run"]


@pytest.mark.parametrize("when", [(10, "offline"), (33, "online"), (47, "online")])
def test_ctrl_c_loses_at_most_a_round_and_a_resumed_run_is_the_same(when, alone, tmp_path, monkeypatch):
    """Bit for bit."""
    update, (number, phase) = O.OnlineRun.update, when

    def interrupted(self):
        update(self)
        if self.done == number:
            os.kill(os.getpid(), signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(O.OnlineRun, "update", interrupted)
        with pytest.raises(SystemExit, match="130"):
            O.fine_tune(stub_data(), **LONGER, out=str(tmp_path), run="x")
    state = state_of(tmp_path / "x")
    assert ("online" if state["round"] or state["done"] == 30 else "offline") == phase
    assert phase == "offline" or 0 <= number - state["done"] <= 5
    assert matches(O.fine_tune(stub_data(), resume=tmp_path / "x")["run"], alone)


def fork(place, count, **given):
    """fine_tune() in a fork that kills itself (kill -9) before the count-th call of an OnlineRun's method."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    method, left = getattr(O.OnlineRun, place), [count]

    def deadly(*args, **named):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **named)
    try:
        setattr(O.OnlineRun, place, deadly)
        O.fine_tune(stub_data(), **given)
    finally:
        os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="an attempt is a fork")
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_in_random_rounds_resumes_to_the_numbers_of_one_left_alone(seed, alone, tmp_path):
    g, folder = random.Random(seed), tmp_path / "x"
    fork("explore", g.randint(2, 4), **LONGER, out=str(tmp_path), run="x")
    rounds = [state_of(folder)["round"]]
    for _ in range(3):
        place = g.choice(["explore", "update", "look", "save"])
        fork(place, g.randint(1, 12 if place == "update" else 3), resume=folder)
        rounds.append(state_of(folder)["round"])
    assert rounds == sorted(rounds) and 0 < rounds[0] < state_of(alone)["round"]
    assert matches(O.fine_tune(stub_data(), resume=folder)["run"], alone)


def test_presets_are_those_of_the_papers():
    def settled(**given):
        return config.resolve(dict(size="paper", device="cpu", source="d4rl") | given, O.OnlineSettings)

    def mixing(settings):
        with torch.device("meta"):
            model = config.model_of(settings)
        return sum(p.numel() for name, p in model.named_parameters() if ".mixer." in name)
    odt, odc = (settled(model=name, env="hopper-medium") for name in ("dt", "dc"))
    assert mixing(odt) == 4_202_496 and mixing(odc) == 43_008        # DC paper, Table 15: 4202K and 43K
    table_10 = {    # updates, buffer, d, lr, weight decay, target, position
        "hopper-medium": (5000, 1000, 512, 5e-4, 1e-4, 3600, False),
        "hopper-medium-replay": (5000, 1000, 512, 5e-4, 5e-5, 3600, False),
        "walker2d-medium": (10_000, 1000, 512, 5e-4, 1e-4, 5000, False),
        "walker2d-medium-replay": (10_000, 1000, 512, 1e-3, 1e-4, 5000, False),
        "halfcheetah-medium": (5000, 1000, 512, 5e-4, 1e-4, 6000, False),
        "halfcheetah-medium-replay": (5000, 1000, 512, 1e-4, 1e-4, 6000, False),
        "antmaze-umaze": (7000, 1500, 512, 1e-3, 0, 1, True),
        "antmaze-umaze-diverse": (7000, 1500, 1024, 1e-4, 0, 1, True),
    }
    for env, numbers in table_10.items():
        cfg, sizes = (x := settled(model="dc", env=env)).train, x.model
        assert (cfg.steps, cfg.buffer, sizes.d, cfg.lr, cfg.weight_decay, cfg.targets[0],
                sizes.timestep_embedding) == numbers, env
        common = cfg.updates, cfg.warmup, sizes.context_len, sizes.n_layer, cfg.explore
        assert common == (300, 10_000, 8, 4, None)
    odm = settled(model="dm", env="hopper-medium")
    assert (odm.train.lr, odm.train.batch_size, odm.model.d, odm.model.n_layer) == (1e-4, 256, 256, 6)
    for name in config.MODELS:
        assert settled(model=name, env="pong").train.schedule == "constant"
        assert config.resolve(dict(model=name, env="pong", size="small", device="cpu"),
                              O.OnlineSettings).train.schedule == "constant"


def test_the_command_knows_every_setting_and_refuses_what_cannot_be(tmp_path, capsys):
    code, out, _ = here(O.main, capsys, "--model", "dc", "--help")
    assert code == 0 and all(f"--{key} " in out for key in ("env_steps", "lr", "window", "from", "resume"))
    for args, text in ((["--rollouts", 0], "--rollouts must be in [1, 10000]"),
                       (["--updatez", 3], "did you mean --updates"),
                       (["--resume", tmp_path / "no"], "nothing to resume")):
        code, _, err = here(O.main, capsys, *args)
        assert code == 2 and text in err
    for wrong, text in ((dict(eval_episodes=0), "needs an environment"),
                        (dict(schedule="cosine"), "ends at a rate of 0")):
        with pytest.raises(O.UserError, match=text):
            O.fine_tune(stub_data(), **SMALL | wrong, out=str(tmp_path))


def test_the_command_fine_tunes_and_train_leaves_its_runs_alone(tmp_path, monkeypatch, capsys):
    few = "--steps 20 --env_steps 30 --updates 2 --eval_episodes 1 --d 8 --batch_size 8 --size small".split()
    env = cart_set(tmp_path / "data", monkeypatch)
    code, out, err = here(O.main, capsys, "--env", env, "--out", tmp_path / "runs", "--device", "cpu", *few)
    assert code == 0 and "steps online" in out, out + err
    run, = (tmp_path / "runs").iterdir()
    code, _, err = here(T.main, capsys, "--resume", run)
    assert code == 2 and "resume it with that one" in err
    more = "--steps 1 --env_steps 5 --updates 1 --eval_episodes 1".split()
    code, out, err = here(O.main, capsys, "--from", run, "--out", tmp_path / "runs", "--device", "cpu", *more)
    assert code == 0 and " d=8 " in out, out + err
