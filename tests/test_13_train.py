"""Settings, one training step, run folders, resuming, and whole runs through the real libraries.

    pytest tests/test_13_train.py
"""
import copy
import csv
import dataclasses
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from minari.data_collector import EpisodeBuffer
from test_11_data import box, make_set, store, write_hdf5

import data
import settings as cfgs
import train as T
from data import Trajectories, UserError
from eval import load_run

ROOT = Path(__file__).parent.parent
TINY = dict(steps=20, batch_size=8, d=8, n_layer=1, context_len=3, eval_episodes=0)


def toy(N=200, S=4, A=2, seed=0, **kwargs):
    g = np.random.default_rng(seed)
    states = g.standard_normal((N, S)).astype(np.float32)
    return Trajectories(states, np.tanh(states[:, :A]), g.random(N), [20] * (N // 20), action_low=-1.0, action_high=1.0, **kwargs)


def command(*args, cwd=ROOT, env=None):
    """Run a script as a user would; returns (exit code, stdout, stderr)."""
    run = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | (env or {}))
    return run.returncode, run.stdout, run.stderr


# ------------------------------------------------------------------ settings

def test_a_value_comes_from_the_most_particular_place_that_names_it(monkeypatch):
    """default < "*" < family < environment < "small" < command line."""
    dt = importlib.import_module("models.dt")
    monkeypatch.setattr(dt, "PRESETS", {"*": dict(lr=1.0, clip=1.0, d=16, warmup=1, steps=1), "hopper": dict(clip=2.0, d=32, warmup=2, steps=2),
                                        "hopper-medium": dict(d=64, warmup=3, steps=3), "small": dict(warmup=4, steps=4)})
    cfg, values, origin = cfgs.settings(dict(env="hopper-medium", size="small", steps=5))
    assert (cfg.batch_size, cfg.lr, cfg.clip, values["d"], cfg.warmup, cfg.steps) == (64, 1.0, 2.0, 64, 4, 5)
    assert [origin[k] for k in ("batch_size", "lr", "clip", "d", "warmup", "steps")] == \
        ["default", 'preset "*"', 'preset "hopper"', 'preset "hopper-medium"', 'preset "small"', "command line"]
    assert cfgs.settings(dict(env="hopper-medium", size="paper"))[0].warmup == 3


def test_flags_are_made_from_the_fields_and_typed_by_them():
    line = "--lr 3e-4 --steps 1_000 --use_actions false --targets 1 2.5 --betas .9 .95 --context-len 5 --compile --no-goal"
    options, given = cfgs.parse(line.split())
    assert given == dict(lr=3e-4, steps=1000, use_actions=False, targets=(1.0, 2.5), betas=(0.9, 0.95), context_len=5, compile=True, goal="none")
    assert cfgs.parse(["--seeds", "0", "1", "--rtg_scale", "none"]) == (dict(show=None, bench=None, resume=None, seeds=[0, 1]), dict(rtg_scale=None))


@pytest.mark.parametrize("argv, words", [
    ("--lrr 1", "no flag --lrr; did you mean --lr"), ("--model dtt", "did you mean dt"), ("--env hoper-medium", "did you mean hopper-medium"),
    ("--steps many", "not a whole number"), ("--steps 0", "--steps must be above 0"), ("--pct_traj 2", "--pct_traj"),
    ("--mixer conv", "invalid choice: 'conv'"), ("--use_actions perhaps", "neither true nor false"), ("hopper", "what is 'hopper'"),
    ("--source web", "invalid choice"), ("--d 10 --n_head 3", "multiple"), ("--device cuda:9", "CUDA"), ("--device gpu", "no such device"),
    ("--lr", "expected one argument"), ("--lr nan", "--lr must be above 0"), ("--source dqn", "Atari"), ("--env minari:no/such-v0", "no/such-v0"),
    ("--env minari:", "not a Minari id"), ("--env minari:/", "not a Minari id"), ("--env minari:../x-v0", "not a Minari id"),
    ("--data /no/such/folder", "there is no folder"), ("--resume --run never", "nothing to resume"), ("--run ../x", "the name of a folder"),
    ("--env kitchen-complete --source d4rl", "no file for kitchen-complete"), ("--env hopper-medium-replay --source minari", "Minari publishes no"),
    ("--goal rtg --condition none --source local", "needs the token"), ("--steps none", "cannot be none"), ("--n_head 0", "at least 1"),
    ("--betas 0.9", "--betas takes two"), ("--dropout nan", "--dropout"), ("--seed -1", "--seed must be"), ("--targets nan", "finite"),
    ("--seeds 0 0", "twice"), ("--act_dim 77", "--act_dim comes from the data, where it is 2"), ("--max_ep_len 0", "--max_ep_len")])
def test_a_slip_gives_one_helpful_message_and_exit_code_2(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", *argv.split()])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    monkeypatch.setattr(data, "collect_local", lambda name, *_: make_tiny_maze(tmp_path, monkeypatch))
    with pytest.raises(SystemExit) as e:
        data.run_command(T.main)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and words in err and "Traceback" not in err


def make_tiny_maze(tmp_path, monkeypatch):
    space = Dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2))
    o = np.random.default_rng(0).uniform(-1, 1, (13, 4))
    make_set("local/pointmaze/umaze-v0", space, box(2, dtype=np.float32), tmp_path, monkeypatch, observation=o, achieved_goal=o[:, :2].copy())
    return "local/pointmaze/umaze-v0"


def test_show_prints_every_value_with_its_source_and_the_models_size():
    code, out, _ = command("train.py", "--show", "--env", "hopper-medium", "--size", "paper", "--lr", "0.5")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and lines["lr"].endswith("command line") and lines["d"].endswith('preset "*"') and lines["state_shape"].endswith("data")
    assert "726,019 params" in out and "198,144 mixer_params" in out
    fields = {f.name for f in (*dataclasses.fields(cfgs.TrainConfig), *dataclasses.fields(importlib.import_module("models.dt").Config))}
    assert fields <= lines.keys()


@pytest.mark.parametrize("name", cfgs.MODELS)
def test_presets_name_only_fields_that_exist(name):
    module = importlib.import_module(f"models.{name}")
    known = {f.name for f in (*dataclasses.fields(cfgs.TrainConfig), *dataclasses.fields(module.Config))}
    families = {"*", "small", "small-frames"} | set(data.ENVS) | {env.family for env in data.ENVS.values()}
    assert set(module.PRESETS) <= families
    for key, preset in module.PRESETS.items():
        assert set(preset) <= known, key


# ------------------------------------------------------------------ one step

def test_the_learning_rate_warms_up_then_stays_or_falls_to_zero_and_never_climbs_again():
    """Released Atari code forgets to clamp the cosine: with 10 epochs its rate climbs back to three quarters of its peak."""
    cfg = cfgs.TrainConfig(lr=1.0, warmup=10, steps=110, schedule="cosine")
    rates = [T.learning_rate(cfg, s) for s in range(200)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[60] == pytest.approx(0.5) and rates[110:] == [0.0] * 90
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert T.learning_rate(dataclasses.replace(cfg, schedule="constant"), 150) == 1.0


def test_a_step_is_sample_loss_backward_clip_adamw():
    """One update by our function against the same written out with torch.optim.AdamW in its plain form."""
    cfg, values, origin = cfgs.settings(TINY | dict(clip=0.01, size="small"))
    model, windows, meta, _ = T.prepare(cfg, values, origin, toy())
    reference = type(model)(model.cfg)
    reference.load_state_dict(model.state_dict())
    optimizer = T.make_optimizer(model, cfg, torch.device("cpu"))
    T.set_learning_rate(optimizer, 0.01)
    T.make_step(model, windows, optimizer, cfg, torch.Generator().manual_seed(5))()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=cfg.betas, weight_decay=cfg.weight_decay, foreach=False)
    loss, _ = reference.loss(windows.sample(8, torch.Generator().manual_seed(5)))
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in reference.parameters()))
    for p in reference.parameters():
        p.grad *= min(1.0, 0.01 / (float(norm) + 1e-6))
    plain.step()
    assert norm > 0.01, "clipping must have something to do"
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_groups_with_a_rate_of_their_own_are_scaled_and_clipped_apart():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))

        def param_groups(self, weight_decay):
            return [dict(params=[self.a], weight_decay=0.0), dict(params=[self.b], weight_decay=0.0, lr_scale=0.1)]

        def loss(self, batch):
            loss = (1000 * self.a + self.b).sum()
            return loss, {"loss": loss.detach()}
    model, cfg = Two(), cfgs.TrainConfig(lr=0.01, clip=10.0)
    optimizer = T.make_optimizer(model, cfg, torch.device("cpu"))
    T.set_learning_rate(optimizer, 0.01)
    windows = type("W", (), dict(table=torch.zeros(1), sample=lambda *_: {}))
    T.make_step(model, windows, optimizer, cfg, None)()
    assert model.a.grad.item() == pytest.approx(10) and model.b.grad.item() == 1, "a large gradient in one group must not shrink the other"
    assert 1 - model.a.item() == pytest.approx(0.01, rel=1e-3) and 1 - model.b.item() == pytest.approx(0.001, rel=1e-3)


def test_the_loss_falls_on_a_task_that_can_be_learnt(tmp_path):
    run = T.train(toy(), **TINY | dict(steps=300, out=str(tmp_path), size="small"))["run"]
    losses = [float(r["loss"]) for r in csv.DictReader(open(run / "log.csv")) if r["loss"]]
    assert losses[-1] < 0.1 * losses[0]


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path):
    def losses(seed, **kwargs):
        run = T.train(toy(), **TINY | dict(out=str(tmp_path), seed=seed, size="small") | kwargs)["run"]
        return [r["loss"] for r in csv.DictReader(open(run / "log.csv"))]
    assert losses(0) == losses(0) != losses(1)


def test_evaluating_more_often_never_changes_training(tmp_path, monkeypatch):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")

    def losses(**kwargs):
        run = T.train(env="minari:my/cart-v0", **TINY | dict(out=str(tmp_path / "runs"), dropout=0.1, size="small") | kwargs)["run"]
        return [r["loss"] for r in csv.DictReader(open(run / "log.csv")) if r["loss"]]
    assert losses() == losses(eval_episodes=1, eval_every=1)


# ------------------------------------------------------------------ run folders and checkpoints

def test_a_second_run_takes_a_new_folder_and_leaves_the_first_alone(tmp_path):
    first, second = (T.train(toy(), **TINY | dict(out=str(tmp_path), size="small"))["run"] for _ in range(2))
    assert first.name == "dt-arrays-s0" and second.name == "dt-arrays-s0-2" and (first / "last.pt").exists()


def test_a_checkpoint_holds_tensors_and_plain_python_and_gives_the_same_predictions(tmp_path):
    result = T.train(toy(), **TINY | dict(out=str(tmp_path), size="small"))
    model, meta = load_run(result["run"])
    checkpoint = torch.load(result["run"] / "last.pt", weights_only=True)
    assert checkpoint["step"] == 20 and meta["dataset"] == "arrays" and meta["state_mean"].shape == (4,)
    again = type(model)(model.cfg)
    again.load_state_dict(checkpoint["model"])
    x = dict(states=torch.randn(2, 3, 4), actions=torch.rand(2, 3, 2), rewards=torch.rand(2, 3, 1), rtg=torch.rand(2, 3, 1),
             timesteps=torch.zeros(2, 3, dtype=torch.int64))
    assert torch.equal(again.eval()(**x), model(**x))


def interrupted(tmp_path, at, **more):
    """Train to a signal at update `at`, resume, and return the folder."""
    real, seen = T.learning_rate, []

    def rate(cfg, step):
        seen.append(step)
        if len(seen) == at:
            signal.raise_signal(signal.SIGTERM)
        return real(cfg, step)
    T.learning_rate = rate
    given = TINY | dict(steps=60, out=str(tmp_path), dropout=0.1, size="small") | more
    try:
        with pytest.raises(SystemExit) as e:
            T.train(toy(), **given)
        assert e.value.code == 130
    finally:
        T.learning_rate = real
    return T.train(toy(), resume=True, **given)["run"]


@pytest.mark.parametrize("at", [1, 7, 130])
def test_a_stopped_and_resumed_run_ends_with_the_very_same_log_and_weights(at, tmp_path):
    """250 updates are logged in pairs: stopping between the two must not lose the first one's loss."""
    whole = T.train(toy(), **TINY | dict(steps=250, out=str(tmp_path / "whole"), dropout=0.1, size="small"))["run"]
    parts = interrupted(tmp_path / "parts", at, steps=250)
    assert (parts / "log.csv").read_bytes() == (whole / "log.csv").read_bytes()
    a, b = (torch.load(p / "last.pt", weights_only=True)["model"] for p in (parts, whole))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_resuming_with_other_settings_or_other_data_is_refused_by_name(tmp_path):
    given = TINY | dict(out=str(tmp_path), size="small")
    T.train(toy(), **given)
    with pytest.raises(UserError, match="sum_of_states was"):
        T.train(toy(seed=1), resume=True, **given)
    with pytest.raises(UserError, match="lr was 0.0015 and is now 0.5"):
        T.train(toy(), resume=True, **given | dict(lr=0.5))


def test_a_killed_run_resumes_from_a_whole_checkpoint(tmp_path):
    """kill -9 gives no warning: only what was written atomically can be trusted."""
    make = ("import sys; sys.path[:0] = ['tests', '.']; import train; from test_13_train import toy, TINY; "
            f"train.train(toy(), resume='--resume' in sys.argv, **TINY | dict(steps=4000, out={str(tmp_path)!r}, size='small'))")
    process = subprocess.Popen([sys.executable, "-c", make], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last = tmp_path / "dt-arrays-s0" / "last.pt"
    deadline = time.time() + 120
    while not last.exists() and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    step = torch.load(last, weights_only=True)["step"]
    assert 0 < step < 4000
    code, out, err = command("-c", make, "--resume")
    assert code == 0, err
    assert f"resuming after update {step:,}" in out and torch.load(last, weights_only=True)["step"] == 4000


def test_a_diverging_run_stops_with_advice(tmp_path):
    with pytest.raises(UserError, match="diverged; a smaller --lr"):
        T.train(toy(), **TINY | dict(out=str(tmp_path), lr=1e30, clip=1e30, size="small", warmup=0, steps=100))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_reported_before_training(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write to"):
        T.train(toy(), **TINY | dict(out=str(tmp_path / "runs")))


def test_a_damaged_checkpoint_is_reported_by_its_path(tmp_path):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path), size="small"))["run"]
    (run / "last.pt").write_bytes((run / "last.pt").read_bytes()[:1000])
    code, _, err = command("eval.py", run)
    assert code == 2 and str(run / "last.pt") in err and "Traceback" not in err


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "broken-into"),)
    torch.save({"meta": {"model": "dt"}, "x": Evil()}, tmp_path / "last.pt")
    code, _, err = command("eval.py", tmp_path)
    assert code == 2 and "damaged or not a checkpoint" in err and not (tmp_path / "broken-into").exists()


# ------------------------------------------------------------------ whole runs

def rows_of(run):
    return [r for r in csv.DictReader(open(run / "log.csv")) if r["checkpoint"] == "last"]


def test_a_set_of_choices_trains_and_acts_in_its_own_environment(tmp_path, monkeypatch):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    result = T.train(env="minari:my/cart-v0", out=str(tmp_path / "runs"), **TINY | dict(eval_episodes=2, size="small", targets=(30.0, 60.0)))
    assert [float(r["target"]) for r in rows_of(result["run"])][-2:] == [30, 60] and result["rows"][0]["return_mean"] >= 8
    assert result["meta"]["env"] == "minari:my/cart-v0" and rows_of(result["run"])[0]["dataset"] == "my/cart-v0"
    for name in ("last.pt", "best.pt", "log.csv", "curve.png", "targets.png", "table.txt"):
        assert (result["run"] / name).stat().st_size > 0
    code, out, err = command("eval.py", result["run"], "--targets", 30, "--episodes", 2, env=dict(MINARI_DATASETS_PATH=str(tmp_path / "gone")))
    assert code == 0 and f"{result['rows'][0]['return_mean']:.1f}" in out, err


def test_actions_reach_bounds_beyond_one_and_never_pass_them(tmp_path, monkeypatch):
    """Pendulum's torque goes from -2 to 2; forgetting the scale would leave half of it unused."""
    make_set("my/pend-v0", box(3, low=-8, high=8), Box(-2, 2, (1,), np.float32), tmp_path, monkeypatch, env="Pendulum-v1")
    sent = []
    from gymnasium.envs.classic_control.pendulum import PendulumEnv
    step = PendulumEnv.step
    monkeypatch.setattr(PendulumEnv, "step", lambda self, a: sent.append(a) or step(self, a))
    result = T.train(env="minari:my/pend-v0", out=str(tmp_path / "runs"), **TINY | dict(eval_episodes=1, size="small"))
    model, meta = load_run(result["run"])
    with torch.no_grad():
        model.head.bias.fill_(30.0)
    from eval import evaluate
    evaluate(model, meta, [("random", 0.0, 1)])
    assert all(a.dtype == np.float32 and abs(a).max() <= 2 for a in sent) and sent[-1].max() == 2


def collect_random(id, env_id, tmp_path, monkeypatch, **kwargs):
    """A Minari set of five episodes of 15 steps of random play."""
    env = data.make_env({"id": env_id, "kwargs": kwargs})
    env.action_space.seed(0)
    buffers = []
    for i in range(5):
        seen, actions, rewards = [env.reset(seed=i)[0]], [], []
        for _ in range(15):
            actions.append(env.action_space.sample())
            observation, reward, _, _, _ = env.step(actions[-1])
            seen.append(copy.deepcopy(observation))
            rewards.append(reward)
        buffers.append(EpisodeBuffer(id=i, observations=stack(seen), actions=np.stack(actions), rewards=np.array(rewards),
                                     terminations=np.zeros(15, bool), truncations=np.arange(15) == 14))
    store(id, buffers, tmp_path, monkeypatch, env=env.spec.id, observation_space=env.observation_space, action_space=env.action_space)
    env.close()


def stack(seen):
    return {k: stack([o[k] for o in seen]) for k in seen[0]} if isinstance(seen[0], dict) else np.stack(seen)


@pytest.mark.parametrize("name, kwargs", [
    ("pen-human", {}), ("kitchen-complete", dict(tasks_to_complete=["microwave", "kettle", "light switch", "slide cabinet"]))])
def test_adroit_and_kitchen_train_and_act_through_their_published_ids(name, kwargs, tmp_path, monkeypatch):
    """Five short episodes of random play stand in for the published sets; the path from id to score is the real one."""
    env = data.ENVS[name]
    collect_random(env.minari, env.id, tmp_path, monkeypatch, **kwargs)
    result = T.train(env=name, out=str(tmp_path / "runs"), targets=(1.0,), **TINY | dict(steps=10, eval_episodes=2, eval_every=0, size="small"))
    assert result["meta"]["source"] == "minari" and result["rows"][0]["episodes"] == 2 and result["rows"][0]["score"] is not None
    assert math.isfinite(result["rows"][0]["return_mean"])


def test_the_d4rl_layout_trains_from_the_command_line_with_walkers_old_feet(tmp_path):
    write_hdf5(tmp_path / "walker2d_medium-v2.hdf5", S=17, A=6)
    flags = "--env walker2d-medium --source d4rl --steps 10 --batch_size 4 --eval_episodes 1 --eval_every 0".split()
    code, out, err = command("train.py", *flags, "--data", tmp_path, "--out", tmp_path / "runs")
    assert code == 0, err
    assert "walker2d on" not in out and "dt on walker2d-medium (Walker2d-v5), data walker2d_medium-v2.hdf5 (d4rl)" in out and "5000.0*" in out
    meta = torch.load(tmp_path / "runs" / "dt-walker2d-medium-s0" / "last.pt", weights_only=True)["meta"]
    assert meta["env_spec"]["kwargs"] == {"xml_file": "walker2d.xml"}


def test_seeds_end_with_one_table_of_mean_and_interval(tmp_path, monkeypatch, capsys):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    argv = f"train.py --env minari:my/cart-v0 --seeds 0 1 --steps 5 --eval_episodes 1 --out {tmp_path / 'runs'}"
    monkeypatch.setattr(sys, "argv", argv.split())
    T.main()
    assert "2 seeds: mean ± 95 % interval" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"dt-my-cart-v0-s0", "dt-my-cart-v0-s1"}


def test_bench_ends_with_one_line_of_json():
    code, out, err = command("train.py", "--bench", 2, "--env", "hopper-medium", "--batch_size", 4)
    result = json.loads(out.splitlines()[-1])
    keys = {"ms_per_step", "steps_per_s", "params", "mixer_params", "macs", "peak_mib", "batch_size", "context_len", "device"}
    assert code == 0 and keys <= result.keys(), err


def test_a_folder_with_a_space_and_an_umlaut_in_its_name_works(tmp_path):
    place = tmp_path / "mein Läufe"
    run = T.train(toy(), **TINY | dict(out=str(place), size="small"))["run"]
    assert load_run(run)[1]["step"] == 20


def test_importing_train_starts_nothing_and_needs_no_gymnasium():
    """The spawn start method imports the main module again; and a model can be timed on a machine without the environments."""
    code, out, _ = command("-c", "import train, sys; print('gymnasium' in sys.modules, 'minari' in sys.modules)")
    assert code == 0 and out.split() == ["False", "False"]


def test_a_papers_return_scale_and_targets_hold_for_the_papers_data_only(tmp_path, monkeypatch):
    """D4RL's AntMaze ends at the goal with a return of 1. Minari's goes on and returns hundreds: divided by 1 they would drown the rest."""
    space = Dict(observation=box(27), achieved_goal=box(2), desired_goal=box(2))
    make_set("D4RL/antmaze/umaze-v1", space, box(8, dtype=np.float32), tmp_path, monkeypatch)
    write_hdf5(tmp_path / "Ant_maze_u-maze_noreset_multistart_False_multigoal_False_sparse_fixed.hdf5", S=29, A=8,
               **{"infos/goal": np.zeros((60, 2), np.float32)})
    given = TINY | dict(model="dc", env="antmaze-umaze", size="paper", n_head=1, out=str(tmp_path / "runs"), device="cpu")
    scales = [T.train(**given, **more)["meta"]["rtg_scale"] for more in
              (dict(), dict(source="d4rl", data=str(tmp_path)), dict(source="minari", data=str(tmp_path), rtg_scale=5.0))]
    assert scales == [700.0, 1.0, 5.0]


def test_groups_that_differ_in_decay_alone_are_clipped_by_one_norm():
    """StARformer decays matrices and not biases; its gradient norm is still one, as in its paper's code."""
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))

        def param_groups(self, weight_decay):
            return [dict(params=[self.a], weight_decay=weight_decay), dict(params=[self.b], weight_decay=0.0)]

        def loss(self, batch):
            loss = (30 * self.a + 40 * self.b).sum()
            return loss, {"loss": loss.detach()}
    model, cfg = Two(), cfgs.TrainConfig(clip=5.0)
    windows = type("W", (), dict(table=torch.zeros(1), sample=lambda *_: {}))
    T.make_step(model, windows, T.make_optimizer(model, cfg, torch.device("cpu")), cfg, None)()
    assert [model.a.grad.item(), model.b.grad.item()] == pytest.approx([3, 4], rel=1e-4)


def test_the_newest_run_with_a_checkpoint_is_resumed_and_no_other_name(tmp_path):
    given = TINY | dict(out=str(tmp_path), size="small", run="exp")
    first = T.train(toy(), **given)["run"]
    T.train(toy(), **given | dict(run="exp-2layers"))
    (tmp_path / "exp-2").mkdir()        # a run that failed before its first checkpoint
    assert T.train(toy(), resume=True, **given)["run"] == first


def test_an_interrupted_write_leaves_the_old_file_whole(tmp_path):
    (tmp_path / "last.pt").write_text("old")

    def half(path):
        path.write_text("ne")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        T.write_atomically(tmp_path / "last.pt", half)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"] and (tmp_path / "last.pt").read_text() == "old"


def test_numpy_settings_and_sizes_still_make_a_checkpoint_that_loads_safely(tmp_path):
    g = np.random.default_rng(0)
    t = Trajectories(g.random((60, 3)), g.integers(0, 4, 60), g.random(60), [60], n_actions=np.int64(4), max_ep_len=np.int64(60))
    run = T.train(t, **TINY | dict(out=str(tmp_path), size="small", lr=np.float64(1e-3), seed=np.int64(2), targets=np.array([1.0, 2.0])))["run"]
    assert load_run(run)[1]["n_actions"] == 4


def test_a_keyword_that_is_no_choice_is_refused_as_on_the_command_line(tmp_path):
    for wrong in (dict(activation="tanh"), dict(schedule="linear"), dict(condition="foo"), dict(size="big")):
        with pytest.raises(UserError, match="choose from"):
            T.train(toy(), **TINY | wrong | dict(out=str(tmp_path)))


def test_without_its_goal_the_model_is_neither_trained_on_it_nor_shown_it(tmp_path, monkeypatch):
    o = np.random.default_rng(0).uniform(-1, 1, (13, 4))
    make_set("D4RL/pointmaze/umaze-v2", Dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2)), box(2, dtype=np.float32), tmp_path,
             monkeypatch, observation=o, achieved_goal=o[:, :2].copy())
    given = TINY | dict(env="pointmaze-umaze", source="minari", size="small", out=str(tmp_path / "runs"), steps=2, eval_episodes=1, eval_every=0,
                        targets=(1.0,))
    for goal, width in (("state", 6), ("none", 4)):
        result = T.train(**given, goal=goal)
        model, meta = load_run(result["run"])
        assert model.cfg.state_shape == (width,) and meta["state_mean"].shape == (width,) and meta["goal"] == (width == 6)
        assert result["rows"][0]["length"] == 300, "it acts to the end on states of the width that it knows"


def test_pct_traj_trains_on_the_best_episodes_alone(tmp_path):
    states = np.repeat(np.arange(10.0), 20)[:, None]
    t = Trajectories(states, np.zeros((200, 1)), np.repeat(np.arange(10.0), 20), [20] * 10)
    meta = T.train(t, **TINY | dict(out=str(tmp_path), size="small", pct_traj=0.2))["meta"]
    assert meta["state_mean"].item() == 8.5, "episodes 8 and 9"


def test_best_is_the_highest_success_then_return_at_the_headline_from_the_last_start():
    meta = dict(starts={"random": None, "far": {}}, headline=80.0)

    def row(start, target, success, mean):
        return dict(start=start, target=target, success=success, return_mean=mean)
    rows = [row("random", 80.0, 100.0, 99.0), row("far", 20.0, 90.0, 21.0), row("far", 90.0, 70.0, 60.0)]
    assert T.quality(rows, meta) == [70.0, 60.0] and T.quality([row("far", 90.0, None, 60.0)], meta) == [0.0, 60.0]


def test_targets_run_from_the_5th_to_the_95th_percentile_and_a_papers_own_are_for_its_data():
    t = Trajectories(np.zeros((101, 1)), np.zeros((101, 1)), np.arange(101.0), [1] * 101)

    def choose(source, targets, origin):
        cfg, meta = cfgs.TrainConfig(targets=targets, eval_episodes=2), dict(starts={"random": None}, source=source)
        T.choose_targets(cfg, dict(targets=origin), meta, t, None)
        return [x for _, x, _ in meta["plan"]], meta["headline"]
    assert choose("minari", (3600.0,), 'preset "hopper"') == ([5, 27.5, 50, 72.5, 95], 95)
    assert choose("d4rl", (3600.0, 1800.0), 'preset "hopper"') == ([3600, 1800], 3600)
    assert choose("local", (7.0,), "command line") == ([7], 7)


def test_the_far_pairs_returns_set_the_targets_of_a_point_maze():
    """Ten episodes from the far pair return 0 to 90; the others, that start elsewhere, return 1000 and must not count."""
    env = data.make_env({"id": data.ENVS["pointmaze-umaze"].id, "kwargs": data.ENVS["pointmaze-umaze"].kwargs})
    far = data.ENVS["pointmaze-umaze"].starts["far"]
    start, goal = (env.unwrapped.maze.cell_rowcol_to_xy(np.array(far[k])) for k in ("reset_cell", "goal_cell"))
    states = np.concatenate([np.tile(np.append(start, [0, 0]), (10, 1)), np.tile(np.append(goal, [0, 0]), (10, 1))])
    t = Trajectories(states, np.zeros((20, 2)), np.append(np.arange(0, 100, 10.0), [1000.0] * 10), [1] * 20, goals=np.tile(goal, (20, 1)))
    cfg, meta = cfgs.TrainConfig(eval_episodes=2), dict(starts=data.ENVS["pointmaze-umaze"].starts, source="local")
    T.choose_targets(cfg, dict(targets="default"), meta, t, env)
    assert meta["headline"] == 72 and meta["plan"][0] == ("random", 72.0, 10)
    assert [x for s, x, _ in meta["plan"] if s == "far"] == pytest.approx([4.5, 24.8, 45, 65.2, 85.5], abs=0.11), "rounded to a tenth"


def test_an_environment_that_does_not_fit_the_data_is_refused_before_training(tmp_path, monkeypatch):
    make_set("my/wide-v0", box(7), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    with pytest.raises(UserError, match="states have 7 numbers there and 4 in the environment"):
        T.train(env="minari:my/wide-v0", out=str(tmp_path / "runs"), size="small", steps=10**6)
    make_set("my/five-v0", box(4), Discrete(5), tmp_path, monkeypatch, env="CartPole-v1")
    with pytest.raises(UserError, match=r"actions 5 and Discrete\(2\)"):
        T.train(env="minari:my/five-v0", out=str(tmp_path / "runs"), size="small", steps=10**6)


def test_a_run_trained_without_evaluation_asks_for_targets_and_then_plays(tmp_path, monkeypatch):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    run = T.train(env="minari:my/cart-v0", out=str(tmp_path / "runs"), **TINY | dict(size="small"))["run"]
    code, _, err = command("eval.py", run)
    assert code == 2 and "--targets" in err
    code, out, err = command("eval.py", run, "--targets", 20, "--episodes", 1)
    assert code == 0 and "20.0" in out, err


def test_seeds_resume_those_begun_and_start_the_others(tmp_path, monkeypatch, capsys):
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    argv = f"train.py --env minari:my/cart-v0 --steps 5 --eval_episodes 1 --eval_every 0 --out {tmp_path / 'runs'} --seeds"
    for seeds in ("0", "0 1 --resume"):
        monkeypatch.setattr(sys, "argv", f"{argv} {seeds}".split())
        T.main()
    assert "resuming after update 5" in capsys.readouterr().out and len(list((tmp_path / "runs").iterdir())) == 2
