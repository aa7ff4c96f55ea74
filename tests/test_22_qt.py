"""QT: targets of the critics, where gradients go, acting, runs, and that it stitches where imitation cannot.

    pytest tests/test_22_qt.py
"""
import copy
import dataclasses
import importlib

import numpy as np
import pytest
import torch
from minari.data_collector import EpisodeBuffer
from test_11_data import box, store, write_hdf5
from test_13_train import TINY, here, interrupted, same_end, stop_at, toy

import data
import qt
import settings as config
import train as T
from data import Trajectories
from errors import UserError
from eval import load_run, rollout

MODELS = config.MODELS


def ends(N=12, lengths=(5, 4, 3)):
    """Episodes of 5, 4 and 3 steps that end in a terminal, at a time limit, and cut off; rewards 1, 2, ..."""
    g = np.random.default_rng(0)
    return Trajectories(g.standard_normal((N, 2)), g.uniform(-1, 1, (N, 1)), 1.0 + np.arange(N), lengths,
                        terminated=[True, False, False], truncated=[False, True, False],
                        action_low=-1.0, action_high=1.0)


def made(model="dt", **given):
    """A QT with random critics, all its weights away from their start, and a batch of real data's shapes."""
    small = dict(model=f"qt-{model}", env="arrays", size="small", d=8, n_layer=2, context_len=4, critic_d=8)
    t = ends()
    settings = config.fitted(config.resolve(small | given), t)
    net = config.model_of(settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    windows = qt.Windows(t, settings.model.context_len)
    return net, windows.gather(torch.arange(len(t)))


# ------------------------------------------------------------------ the critics' targets

def test_every_step_of_a_batch_says_whether_it_ends_its_episode_in_a_terminal():
    batch = qt.Windows(ends(), 4).gather(torch.tensor([0, 1, 2, 4, 5, 6, 9]))
    rows = batch["terminals"].int().tolist()
    assert rows[0] == [0, 0, 0, 0], "four of five steps"
    assert rows[1:4] == [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert not any(map(any, rows[4:])), "a time limit and a cut are no terminals"


@pytest.mark.parametrize("kind", ["start", "end", "cover"])
def test_terminals_are_those_of_the_trajectories_in_windows_of_every_kind(kind):
    t = ends()
    windows = qt.Windows(t, 3, "cpu", 1.0, 1.0, None, True, kind)
    batch = windows.sample(200, torch.Generator().manual_seed(0))
    steps = batch["rewards"][..., 0].long() - 1         # rewards count the transitions
    assert torch.equal(batch["terminals"], (steps == 4) & batch["mask"])
    assert batch["terminals"].any()


def test_a_d4rl_file_brings_its_terminals(tmp_path):
    write_hdf5(tmp_path / "hopper_medium-v2.hdf5")
    t = data.load_d4rl(tmp_path / "hopper_medium-v2.hdf5")
    batch = qt.Windows(t, 20).gather(torch.tensor([0, 5]))
    assert batch["terminals"].nonzero().tolist() == [[0, 19], [1, 14]]


def test_a_minari_set_brings_its_terminals(tmp_path, monkeypatch):
    """Its second episode ends in a terminal, its first one at a time limit."""
    buffers = []
    for i in range(2):
        last = np.arange(5) == 4
        buffers.append(EpisodeBuffer(
            id=i, observations=np.full((6, 3), i, np.float32), actions=np.zeros((5, 2), np.float32),
            rewards=np.ones(5), terminations=last & (i == 1), truncations=last & (i == 0)))
    store("my/ends-v0", buffers, tmp_path, monkeypatch, observation_space=box(3),
          action_space=box(2, dtype=np.float32))
    batch = qt.Windows(data.load("minari:my/ends-v0"), 5).gather(torch.tensor([0, 5]))
    assert batch["terminals"].nonzero().tolist() == [[1, 4]]


def targets_of(start, K=4, **switches):
    """(y, known) of the window that starts here, with a discount of 1/2, and a value of 100 at its end."""
    batch = qt.Windows(ends(), K).gather(torch.tensor([start]))
    y, known = qt.n_step_targets(batch["rewards"][..., 0], batch["mask"], batch["terminals"],
                                 torch.tensor([100.0]), 0.5, **switches)
    return y[0].tolist(), known[0].tolist()


def test_a_window_inside_an_episode_ends_in_the_value_of_its_last_state():
    """Rewards 1 2 3 4, of which the last belongs to the value: 100, 3 + 50, 2 + 26.5, 1 + 14.25."""
    y, known = targets_of(0)
    assert y[:3] == [1 + 14.25, 2 + 26.5, 3 + 50] and known == [True, True, True, False]


def test_a_window_that_ends_in_a_terminal_has_its_last_reward_and_no_value():
    """Rewards 3 4 5 and the end: 5, 4 + 2.5, 3 + 3.25; and the last step's Q is known, too."""
    y, known = targets_of(2)
    assert y[:3] == [3 + 3.25, 4 + 2.5, 5] and known == [True, True, True, False]


@pytest.mark.parametrize("start, first", [(5, 6.0), (6, 7.0), (9, 10.0)])
def test_a_window_that_ends_at_a_time_limit_or_a_cut_goes_on_with_the_value(start, first):
    """There, more rewards would have come. Transitions 5 to 8 end at a limit, 9 to 11 are cut."""
    y, known = targets_of(start)
    n = 4 if start == 5 else 3
    expected = [100.0]
    for r in reversed([first + k for k in range(n - 1)]):
        expected.insert(0, r + 0.5 * expected[0])
    assert y[:n - 1] == expected[:-1]
    assert known == [True] * (n - 1) + [False] * (5 - n)


def test_a_window_of_one_step_teaches_only_what_is_known():
    assert targets_of(4) == ([5, 0, 0, 0], [True, False, False, False]), "the terminal step"
    assert targets_of(11)[1] == [False] * 4, "the last step before a cut"


def test_drop_last_forgets_the_reward_that_ends_an_episode_as_the_released_code_does():
    y, known = targets_of(2, drop_last=True)
    assert y[:3] == [3 + 2, 4, 0] and known == [True, True, False, False]
    assert targets_of(0, drop_last=True) == targets_of(0), "elsewhere nothing changes"


def test_the_critics_loss_is_that_of_a_plain_loop():
    net, batch = made(gamma=0.9)
    torch.manual_seed(5)
    _, log = net.loss(batch)
    plain = {k: x for k, x in batch.items() if k != "terminals"}
    with torch.no_grad():
        slow = net.slow_actor.eval()(**plain)
        Q, errors = net.critics(batch["states"], batch["actions"]), []
        for b in range(len(slow)):
            e = int(batch["mask"][b].sum()) - 1
            y = float(net.slow_critics(batch["states"][b, e], slow[b, e]).min())
            done = bool(batch["terminals"][b, e])
            y = float(batch["rewards"][b, e]) if done else y
            for t in range(e, -1, -1):
                y = y if t == e else float(batch["rewards"][b, t]) + 0.9 * y
                if t < e or done:
                    errors.append(float(((Q[:, b, t] - y) ** 2).sum()))
    assert np.isclose(float(log["critic"]), np.mean(errors), rtol=1e-5)


# ------------------------------------------------------------------ gradients

def gradients(net, batch, **change):
    """{name: gradient or None} of one loss, with switches changed."""
    net = copy.deepcopy(net)
    net.cfg = dataclasses.replace(net.cfg, **change)
    torch.manual_seed(3)
    net.loss(batch)[0].backward()
    return {name: p.grad for name, p in net.named_parameters()}


def part(grads, name):
    return {k: g for k, g in grads.items() if k.startswith(f"{name}.")}


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("model", MODELS)
def test_each_loss_reaches_its_own_weights_and_the_slow_ones_none(model):
    net, batch = made(model)
    net.train()
    grads = gradients(net, batch)
    assert all(g is None for k, g in grads.items() if k.startswith("slow_"))
    assert all(g is not None and g.abs().sum() > 0 for g in part(grads, "critics").values())
    off = gradients(net, batch, eta=0.0)
    assert equal(part(grads, "critics"), part(off, "critics")), "the Q term teaches the critics nothing"
    actor = part(grads, "actor")
    changed = [k for k in actor if actor[k] is not None and not torch.equal(actor[k], part(off, "actor")[k])]
    assert len(changed) > len(actor) / 2, "it does teach the actor"


@pytest.mark.parametrize("model", MODELS)
def test_without_the_q_term_and_the_next_state_the_actor_learns_as_the_model_alone(model):
    net, batch = made(model, next_state=False)
    grads = part(gradients(net, batch, eta=0.0), "actor")
    alone = copy.deepcopy(net.actor)
    torch.manual_seed(3)
    alone.loss({k: x for k, x in batch.items() if k != "terminals"})[0].backward()
    for name, p in alone.named_parameters():
        assert p.grad is None or torch.allclose(p.grad, grads[f"actor.{name}"], atol=1e-7)


def test_the_critics_loss_does_not_move_the_actor():
    net, batch = made()
    other = dict(batch, rewards=batch["rewards"] * 7)       # DT reads no rewards; the critics' targets do
    a, b = gradients(net, batch), gradients(net, other)
    assert equal(part(a, "actor"), part(b, "actor")) and not equal(part(a, "critics"), part(b, "critics"))


def test_the_next_states_head_learns_only_where_a_next_state_is_real():
    net, batch = made()
    assert gradients(net, batch)["next_state.weight"].abs().sum() > 0
    wild = dict(batch, states=torch.where(batch["mask"][..., None], batch["states"], 1e3))
    assert equal(part(gradients(net, batch), "next_state"), part(gradients(net, wild), "next_state"))


def test_the_q_term_pulls_actions_to_a_higher_q_whatever_its_size():
    net, batch = made(next_state=False)
    a = part(gradients(net, batch, eta=1e6), "actor")
    with torch.no_grad():
        before = net.critics(batch["states"], net(**batch))[:, batch["mask"]].mean()
        for name, p in net.named_parameters():
            if name in a and a[name] is not None:
                p -= 1e-9 * a[name]
        after = net.critics(batch["states"], net(**batch))[:, batch["mask"]].mean()
    assert after > before
    bigger = copy.deepcopy(net)
    with torch.no_grad():
        for Q in bigger.critics.both:
            Q[-1].weight.mul_(50)
            Q[-1].bias.mul_(50)
    a, b = (part(gradients(x, batch, eta=1.0), "actor") for x in (net, bigger))
    assert all(a[k] is None or torch.allclose(a[k], b[k], rtol=1e-3, atol=1e-6) for k in a)


def test_groups_give_each_weight_once_and_the_critics_neither_decay_nor_the_actors_clipping():
    net, _ = made("dm", strategy="window")
    groups = net.param_groups(0.1)
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters() if p.requires_grad)
    assert groups[-1]["weight_decay"] == 0 and groups[-1]["part"] == "critics"
    assert [g.get("lr_scale") for g in groups] == [1.0, 0.1, None], "DM's own groups stay"
    run = T.begin(config.resolve(TINY | dict(model="qt-dt", env="arrays", clip=0.5)), toy())[0]
    run.windows.table[:, -2] = 1e6      # rewards for which the critics' gradient is enormous
    run.update()
    norms = [torch.cat([p.grad.flatten() for p in part.parameters()]).norm()
             for part in (run.model.actor, run.model.critics)]
    assert norms[0] > 0.1 and torch.isclose(norms[1], torch.tensor(0.5), rtol=1e-3)


# ------------------------------------------------------------------ slow copies

def test_slow_critics_move_at_every_update_and_the_slow_actor_from_1000_on_at_every_fifth():
    net, _ = made(polyak=0.005)
    start = copy.deepcopy(net)

    def share(name):        # of the way from its start to its fast copy
        slow, fast, old = (next(getattr(m, n).parameters()) for m, n in (
            (net, f"slow_{name}"), (net, name), (start, f"slow_{name}")))
        return float(((slow - old) / (fast - old)).mean().detach())
    net.follow(7)
    assert np.isclose(share("critics"), 0.005, rtol=1e-3) and share("actor") == 1
    net.load_state_dict(start.state_dict())
    net.follow(1001)
    assert share("actor") == 0
    net.follow(1005)
    assert np.isclose(share("actor"), 0.005, rtol=1e-3)
    assert np.isclose(share("critics"), 1 - 0.995**2, rtol=1e-3)


def test_polyak_sets_the_pace_of_both_slow_copies():
    net, _ = made(polyak=0.1)
    start = copy.deepcopy(net)
    net.follow(1005)
    for name in ("actor", "critics"):
        slow, fast, old = (torch.nn.utils.parameters_to_vector(getattr(m, n).parameters())
                           for m, n in ((net, f"slow_{name}"), (net, name), (start, f"slow_{name}")))
        assert torch.allclose(slow, old + 0.1 * (fast - old), atol=1e-6)


@pytest.mark.parametrize("K, polyak, expected", [(5, 0.005, 0.257), (3, 0.05, 0.834)])
def test_q_is_learnt_no_quicker_than_window_and_slow_copies_allow(K, polyak, expected):
    """With a reward of 1 for ever, Q is 1 / (1 - gamma). Critics that learn at once come this far in 2,400
    updates: each brings the slow one nearer by polyak times (1 - the mean of gamma^n), n from 1 to K - 1."""
    gamma, mask = 0.99, torch.ones(1, K, dtype=torch.bool)
    slow = torch.zeros(1, dtype=torch.float64)
    for _ in range(2400):
        y, known = qt.n_step_targets(mask.double(), mask, ~mask, slow, gamma)
        slow = slow + polyak * (y[known].mean() - slow)
    share = float(slow) * (1 - gamma)
    left = 1 - polyak * (1 - np.mean(gamma ** np.arange(1, K)))
    assert np.isclose(share, 1 - left**2400) and np.isclose(share, expected, atol=1e-3)


def test_stale_leaves_the_slow_actor_untrained_as_released_and_acting_with_dropout():
    net, batch = made(stale=True, dropout=0.5)
    before = copy.deepcopy(net.slow_actor.state_dict())
    net.follow(999)
    assert all(torch.equal(x, before[k]) for k, x in net.slow_actor.state_dict().items())
    critic = [float(net.train().loss(batch)[1]["critic"]) for _ in range(2)]
    assert critic[0] != critic[1]
    net, batch = made(dropout=0.5)
    critic = [float(net.train().loss(batch)[1]["critic"]) for _ in range(2)]
    assert critic[0] == critic[1], "without, the critics' targets are no game of chance"


# ------------------------------------------------------------------ acting

def history(B=3, T=6, S=2, A=1):
    g = torch.Generator().manual_seed(0)
    return dict(states=torch.randn(B, T, S, generator=g), actions=torch.rand(B, T, A, generator=g),
                rewards=torch.rand(B, T, 1, generator=g), rtg=torch.rand(B, T, 1, generator=g),
                timesteps=torch.arange(T).expand(B, T))


def with_switches(net, **change):
    net = copy.deepcopy(net).eval()
    net.cfg = dataclasses.replace(net.cfg, **change)
    return net


@pytest.mark.parametrize("model", MODELS)
def test_the_best_of_the_returns_asked_for_is_taken(model):
    """Without noisy copies: each return is asked for by hand, and the smaller slow Q decides."""
    net, _ = made(model)
    offsets = (0.0, -2.0, 3.0)
    h = history()
    got = with_switches(net, copies=3, offsets=offsets, pick="best").act(**h)
    actor = net.actor.eval()
    tries = torch.stack([actor.act(**h | {"rtg": h["rtg"] + x}) for x in offsets], 1)
    worth = net.slow_critics(h["states"][:, -1:].expand(3, 3, 2), tries).amin(0)
    assert torch.allclose(got, tries[torch.arange(3), worth.argmax(1)], atol=1e-6)
    got = with_switches(net, pick="first", offsets=offsets).act(**h)
    assert torch.allclose(got, actor.act(**h), atol=1e-6)


def asked(net, h, **change):
    """The returns-to-go (B, n, K) that the actor is shown."""
    net, seen = with_switches(net, **change), []
    forward = net.actor.forward
    net.actor.forward = lambda *x: seen.append(x[3]) or forward(*x)
    net.act(**h, generator=torch.Generator().manual_seed(0))
    return seen[0][..., 0].unflatten(0, (len(h["rtg"]), -1))


def test_candidates_ask_for_the_returns_in_turn_and_all_but_the_first_with_noise():
    net, _ = made()
    h = history()
    x = asked(net, h, copies=5, offsets=(0.0, -2.0)) - h["rtg"][:, None, -4:, 0]
    expected = torch.tensor([0.0, -2, 0, -2, 0])[:, None].expand(3, 5, 4)
    assert torch.allclose(x[..., :-1], expected[..., :-1], atol=1e-6), "noise is in the last return alone"
    assert torch.allclose(x[:, :2, -1], expected[:, :2, -1], atol=1e-6)
    noise = (x - expected)[:, 2:, -1]
    assert (noise.abs() > 1e-4).all() and noise.abs().max() < 0.5


def test_q_return_asks_the_last_candidate_for_q_less_the_last_reward_as_released():
    net, _ = made()
    h = history()
    x = asked(net, h, copies=3, q_return=True)
    q = net.slow_critics(h["states"][:, -2], h["actions"][:, -2]).amin(0)
    assert torch.allclose(x[:, -1, -1], q - (h["rtg"][:, -2, 0] - h["rtg"][:, -1, 0]), atol=1e-5)
    assert torch.allclose(x[:, 0], h["rtg"][:, -4:, 0])
    asked(net, {k: x[:, :1] for k, x in h.items()}, copies=3, q_return=True)        # no step before the first


def test_an_action_is_drawn_from_the_softmax_of_q():
    net, _ = made()
    h = {k: x[:1].expand(4000, *x.shape[1:]) for k, x in history().items()}
    net = with_switches(net, copies=2, offsets=(0.0, -20.0))
    for Q in net.slow_critics.both:
        torch.nn.init.constant_(Q[-1].weight, 1000.0)
    got = net.act(**h, generator=torch.Generator().manual_seed(0))
    tries = torch.stack([net.actor.act(**{k: x[:1] for k, x in h.items()} | {"rtg": h["rtg"][:1] + x})
                         for x in net.cfg.offsets], 1)
    p = net.worth(h["states"][:1, -1:].expand(1, 2, 2), tries).softmax(-1)[0, 0]
    assert 0.02 < p < 0.98 and p.sub(0.5).abs() > 0.005, "the test must be able to tell"
    share = ((got - tries[:, 0]).abs() < 1e-6).all(1).float().mean()
    assert abs(share - p) < 4 * (p * (1 - p) / 4000) ** 0.5


# ------------------------------------------------------------------ runs

def test_what_cannot_be_read_by_the_critics_is_refused():
    t = Trajectories(np.zeros((20, 2)), np.zeros(20, int), np.zeros(20), [20], n_actions=3)
    with pytest.raises(UserError, match="no actions to choose from"):
        T.train(t, **TINY | dict(model="qt-dt"))
    with pytest.raises(UserError, match="no model is called 'qt-dx'"):
        config.model_module("qt-dx")


@pytest.mark.parametrize("model", MODELS)
def test_a_stopped_and_resumed_run_ends_with_the_very_same_log_and_weights(model, tmp_path):
    given = TINY | dict(model=f"qt-{model}", dropout=0.1, n_layer=2, critic_d=8, steps=12)
    whole = T.train(toy(), **given, out=str(tmp_path / "whole"))["run"]
    assert same_end(interrupted(6, tmp_path / "parts", **given), whole)
    log = (whole / "log.csv").read_text().splitlines()[0].split(",")
    assert {"loss", "critic", "q", "next_state"} <= set(log)


def test_a_run_resumes_beyond_the_update_at_which_the_slow_actor_parts_from_the_actor(tmp_path, monkeypatch):
    monkeypatch.setattr(qt.QT, "follow", lambda self, n, follow=qt.QT.follow: follow(self, n + 995))
    given = TINY | dict(model="qt-dt", critic_d=8)
    whole = T.train(toy(), **given, out=str(tmp_path / "whole"))["run"]
    assert same_end(interrupted(11, tmp_path / "parts", **given), whole)
    state = torch.load(whole / "last.pt", weights_only=True)
    actor, slow = (state["model"][f"{name}.head.weight"] for name in ("actor", "slow_actor"))
    settings = config.Settings.of(state["settings"]["train"] | state["settings"]["model"], {})
    start = config.model_of(settings).actor.head.weight
    assert 0 < (slow - actor).norm() < (start - actor).norm(), "on its way from the start to the actor"


def test_presets_name_only_fields_that_exist_and_a_models_own_for_environments_do_not_hold():
    for model in MODELS:
        module = config.model_module(f"qt-{model}")
        fields = {f.name for c in (config.TrainConfig, module.Config) for f in dataclasses.fields(c)}
        assert all(preset.keys() <= fields for preset in module.PRESETS.values())
    s = config.resolve(dict(model="qt-dt", env="hopper-medium-replay", size="paper"))
    assert (s.model.eta, s.train.clip, s.model.n_layer, s.model.d, s.train.lr) == (3.0, 9.0, 4, 256, 3e-4)
    s = config.resolve(dict(model="qt-dc", env="hopper-medium", size="paper"))
    assert (s.model.eta, s.model.d, s.train.lr) == (1.0, 128, 3e-4), "DC has 256 and 1e-4 there"
    for env, eta, clip, steps in (
            ("kitchen-complete", 0.001, 9, 100_000), ("kitchen-partial", 0.01, 9, 50_000),
            ("hammer-human", 0.1, 5, 60_000), ("hammer-cloned", 0.01, 9, 30_000),
            ("door-human", 0.005, 9, 100_000), ("door-cloned", 0.001, 9, 60_000),
            ("pen-human", 0.1, 9, 100_000),
            ("maze2d-umaze", 5, 20, 100_000), ("antmaze-large-diverse", 0.005, 9, 80_000)):
        s = config.resolve(dict(model="qt-dt", env=env, size="paper"))
        assert (s.model.eta, s.train.clip, s.train.steps) == (eta, clip, steps), env
    s = config.resolve(dict(model="qt-dt", env="relocate-human", size="paper"))
    assert s.train.targets == (3000, 1000) and s.train.weight_decay == 1e-4
    s = config.resolve(dict(model="qt-dm", env="halfcheetah-medium", size="paper"))
    assert (s.model.eta, s.model.context_len, s.model.n_layer) == (5.0, 5, 6)
    assert importlib.import_module("models.dt").PRESETS["*"]["n_layer"] == 3, "and nothing leaks"


@pytest.mark.parametrize("model, env, eta", [
    ("dt", "antmaze-umaze", 0.05), ("dm", "hopper-medium-replay", 0.1), ("lsdt", "halfcheetah-medium", 0.1)])
def test_small_presets_are_the_models_own_with_quicker_critics(model, env, eta):
    own = config.resolve(dict(model=model, env=env, size="small"))
    s = config.resolve(dict(model=f"qt-{model}", env=env, size="small"))
    for key in ("steps", "batch_size", "lr"):
        assert getattr(s.train, key) == getattr(own.train, key), key
    for key in ("d", "n_layer", "dropout", "context_len"):
        assert getattr(s.model, key) == getattr(own.model, key), key
    assert (s.model.eta, s.model.polyak, s.model.critic_d) == (eta, 0.05, 128)


def test_the_command_wraps_the_model_it_is_given(capsys):
    code, out, err = here(qt.main, capsys, "--model", "dc", "--env", "hopper-medium", "--show")
    assert code == 0, err
    assert "qt-dc" in out and "eta" in out and "preset" in out
    code, out, _ = here(qt.main, capsys, "--help")
    assert "weight of the Q term" in out and "weight of the Q term [1.0]" in " ".join(out.split())
    assert "steps that a prediction may depend on" in out, "the model's own comments, too"
    code, _, err = here(qt.main, capsys, "--resume=nowhere")
    assert code == 2 and "nothing to resume" in err
    code, _, err = here(qt.main, capsys, "--model", "dx")
    assert code == 2 and "no model is called" in err


def test_a_whole_run_asks_for_all_targets_at_once_and_eval_plays_it(tmp_path, capsys, monkeypatch):
    """On the point maze's own shapes, without collecting it: a set of two short episodes."""
    t = data.Trajectories(np.random.default_rng(0).standard_normal((40, 4)), np.zeros((40, 2)), np.ones(40),
                          [10, 30], goals=np.zeros((40, 2)), env_spec={"id": "PointMaze_UMaze-v3", "kwargs": {
                              "max_episode_steps": 5}}, layout={"first": None, "position": False})
    given = TINY | dict(eval_episodes=2, targets=(3.0, 1.0, 2.0), copies=4, critic_d=8, report_best=True)
    result = T.train(t, **given | dict(model="qt-dt", out=str(tmp_path), rtg_scale=2.0))
    assert [(r["target"], r["episodes"]) for r in result["rows"]] == [(3.0, 2)]
    alone = T.train(t, **given | dict(model="qt-dt", out=str(tmp_path / "alone"), targets=None))
    model, meta = load_run(alone["run"])
    assert model.cfg.offsets == (0.0,), "of the data's own percentiles only the headline is asked for"
    assert [(r["target"], r["episodes"]) for r in alone["rows"]] == [(alone["asked"], 2)]
    model, meta = load_run(result["run"])
    assert model.cfg.offsets == (0.0, -1.0, -0.5) and meta["model"] == "qt-dt"
    assert "return of the best evaluation" in capsys.readouterr().out
    stop_at(12)
    with pytest.raises(SystemExit):
        T.train(t, **given | dict(model="qt-dt", out=str(tmp_path), rtg_scale=2.0))
    result = T.train(t, resume=tmp_path / "qt-dt-arrays-s0-2")
    assert [(r["target"], r["episodes"]) for r in result["rows"]] == [(3.0, 2)], "and so does a resumed run"


# ------------------------------------------------------------------ what it is for

class Arms:
    """Four steps; at the first and the third an arm is pulled, which pays (1 + a) / 2."""
    spec = None

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.seen(), {}

    def seen(self):
        return np.eye(5, dtype=np.float32)[self.t]

    def step(self, action):
        reward = (1 + float(action[0])) / 2 * (self.t % 2 == 0)
        self.t += 1
        return self.seen(), reward, self.t == 4, False, {}


def arms(seed, E=200):
    """Episodes that pull one good and one bad arm, in either order: each returns 1, where 1.8 can be had."""
    g = np.random.default_rng(seed)
    good = g.integers(0, 2, E)
    actions = g.uniform(-0.1, 0.1, (E, 4))
    actions[:, 0] += 0.8 * (2 * good - 1)
    actions[:, 2] -= 0.8 * (2 * good - 1)
    rewards = (1 + actions) / 2 * [1, 0, 1, 0]
    return Trajectories(np.tile(np.eye(5)[:4], (E, 1)), actions.reshape(-1, 1), rewards.ravel(), [4] * E,
                        terminated=[True] * E, action_low=-1.0, action_high=1.0, max_ep_len=4)


@pytest.mark.parametrize("seed", range(5))
def test_qt_joins_the_good_halves_of_different_episodes_and_dt_does_not(seed, tmp_path):
    """Asked for the best of the data, and for all that can be had."""
    def played(model, **given):
        result = T.train(arms(seed), model=model, seed=seed, steps=150, batch_size=64, d=16, n_layer=1,
                         lr=3e-3, context_len=2, eval_episodes=0, size="small", warmup=10, out=str(tmp_path),
                         **given)
        net, meta = load_run(result["run"])
        generator = torch.Generator().manual_seed(0)
        return [rollout(net, meta, [Arms() for _ in range(20)], [target] * 20, range(20), generator=generator)
                ["return"].mean() for target in (1.1, 2.0)]
    dt, both = played("dt"), played("qt-dt", eta=3.0, critic_d=32, copies=4, polyak=0.005)
    assert both[0] > dt[0] + 0.2 and both[1] > dt[1] + 0.2 and both[1] > 1.8
