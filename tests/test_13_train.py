"""Settings, one training step, run folders, resuming, and whole runs through the real libraries.

    pytest tests/test_13_train.py
"""
import argparse
import copy
import csv
import dataclasses
import importlib
import json
import math
import os
import re
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
import envs
import eval as E
import settings as config
import train as T
from data import Trajectories
from errors import Parser, UserError, run_command
from eval import evaluate, load_run

ROOT = Path(__file__).parent.parent
TINY = dict(steps=20, batch_size=8, d=8, n_layer=1, context_len=3, eval_episodes=0, size="small")


def toy(N=200, S=4, A=2, seed=0, **kwargs):
    g = np.random.default_rng(seed)
    states = g.standard_normal((N, S)).astype(np.float32)
    return Trajectories(states, np.tanh(states[:, :A]), g.random(N), [20] * (N // 20),
                        action_low=-1.0, action_high=1.0, **kwargs)


def command(*args, cwd=ROOT, env=None):
    """Run a script as a user would; returns (exit code, stdout, stderr)."""
    run = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True,
                         timeout=300, env=os.environ | (env or {}))
    return run.returncode, run.stdout, run.stderr


def here(main, capsys, *args):
    """The same in this process: runs a script's main."""
    capsys.readouterr()
    old, sys.argv, code = sys.argv, ["x.py", *map(str, args)], 0
    try:
        run_command(main)
    except SystemExit as e:
        code = e.code
    finally:
        sys.argv = old
    return code, *capsys.readouterr()


def cart_set(tmp_path, monkeypatch):
    """The name of a set of CartPole's shapes."""
    make_set("my/cart-v0", box(4), Discrete(2), tmp_path, monkeypatch, env="CartPole-v1")
    return "minari:my/cart-v0"


def rows_of(run):
    with open(run / "log.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def losses_of(run):
    return [r["loss"] for r in rows_of(run) if r["loss"]]


# ------------------------------------------------------------------ settings

def test_a_value_comes_from_the_most_particular_place_that_names_it(monkeypatch):
    """default < "*" < family < environment < "small" < "small" of the place < command line."""
    dt = importlib.import_module("models.dt")
    monkeypatch.setattr(dt, "PRESETS", {
        "*": dict(lr=1.0, clip=1.0, d=16, warmup=1, n_layer=1, n_head=1, steps=1),
        "hopper": dict(clip=2.0, d=32, warmup=2, n_layer=2, n_head=2, steps=2),
        "hopper-medium": dict(d=64, warmup=3, n_layer=3, n_head=4, steps=3),
        "small-hopper-medium": dict(n_head=8, steps=6),
        "small-hopper": dict(n_layer=5, n_head=16, steps=5),
        "small-walker2d": dict(warmup=9),
        "small": dict(warmup=4, n_layer=4, n_head=4, steps=4)})
    settings = config.resolve(dict(env="hopper-medium", size="small", steps=7))
    keys = "batch_size lr clip d warmup n_layer n_head steps".split()
    assert [settings.values()[k] for k in keys] == [64, 1.0, 2.0, 64, 4, 5, 8, 7]
    assert [settings.origin[k] for k in keys] == [
        "default", 'preset "*"', 'preset "hopper"', 'preset "hopper-medium"', 'preset "small"',
        'preset "small-hopper"', 'preset "small-hopper-medium"', "command line"]
    assert config.resolve(dict(env="hopper-medium", size="paper")).train.warmup == 3
    assert settings.train.source == "auto" and config.resolve({}).train.source == "local"


def test_settings_never_change_and_a_replaced_value_says_where_it_comes_from():
    settings = config.resolve(dict(env="hopper-medium", size="paper", device="cpu"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.train.lr = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.train = None
    new = settings.replace("data", lr=0.5, d=64)
    assert (new.train.lr, new.model.d, new.origin["lr"], new.origin["d"]) == (0.5, 64, "data", "data")
    assert settings.train.lr != 0.5 and settings.origin["lr"] != "data"
    assert new.origin.keys() == new.values().keys()


def test_flags_are_made_from_the_fields_and_typed_by_them():
    def read(line):
        parser = Parser(argument_default=argparse.SUPPRESS)
        parser.add_argument("--seeds", type=int, nargs="+")
        options, given = config.parse(line.split(), parser)
        values = config.resolve(given).values()
        return options, {key: values[key] for key in given}
    options, given = read("--lr 3e-4 --steps 1_000 --use_actions false --targets 1 2.5 --betas .9 .95 "
                          "--context-len 5 --compile --no-goal")
    assert options == {}
    assert given == dict(lr=3e-4, steps=1000, use_actions=False, targets=(1.0, 2.5), betas=(0.9, 0.95),
                         context_len=5, compile=True, goal="none")
    assert read("--seeds 0 1 --rtg_scale none") == (dict(seeds=[0, 1]), dict(rtg_scale=None))
    assert read("--targets -1e3 -2.5E+2 -3 -.5 --seed 1")[1]["targets"] == (-1000.0, -250.0, -3.0, -0.5)


def test_help_says_what_each_field_means_and_its_default(capsys):
    code, out, _ = here(T.main, capsys, "--model", "dm", "--help")
    text = " ".join(out.split())
    assert code == 0 and "--weight_decay" in text and "AdamW's [0.0001]" in text
    fields = [*dataclasses.fields(config.TrainConfig), *dataclasses.fields(config.model_module("dm").Config)]
    assert all(f"--{f.name}" in text for f in fields)


def make_tiny_maze(tmp_path, monkeypatch, id="local/pointmaze/umaze-v0"):
    space = Dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2))
    o = np.random.default_rng(0).uniform(-1, 1, (13, 4))
    make_set(id, space, box(2, dtype=np.float32), tmp_path, monkeypatch, observation=o,
             achieved_goal=o[:, :2].copy())
    return id


@pytest.mark.parametrize("argv, words", [
    ("--lrr 1", "no flag --lrr; did you mean --lr"), ("--model dtt", "did you mean dt"),
    ("--env hoper-medium", "did you mean hopper-medium"), ("--steps many", "--steps takes a whole number"),
    ("--steps 0", "--steps must be in [1, inf), not 0"), ("--pct_traj 2", "--pct_traj"),
    ("--mixer conv", "--mixer conv: choose from"), ("--use_actions perhaps", "takes true or false"),
    ("hopper", "what is 'hopper'"), ("--source web", "--source web: choose from"),
    ("--d 10 --n_head 3", "n_head=3 does not divide d=10"),
    ("--device cuda:9", "--device cuda:9 cannot be used"),
    ("--device gpu", "--device gpu cannot be used"), ("--lr", "expected one argument"),
    ("--lr nan", "--lr must be in (0, 10]"), ("--source dqn", "has no dqn data"),
    ("--env minari:no/such-v0", "no/such-v0"), ("--env minari:", "not a Minari id"),
    ("--env minari:/", "not a Minari id"), ("--env minari:../x-v0", "not a Minari id"),
    ("--data /no/such/folder", "there is no folder"), ("--resume never", "nothing to resume"),
    ("--run ../x", "the name of a folder"),
    ("--env kitchen-complete --source d4rl", "kitchen-complete has no d4rl data"),
    ("--env hopper-medium-replay --source minari", "has no minari data"),
    ("--goal rtg --condition none --source local", "goal=rtg has no effect without"),
    ("--steps none", "--steps takes a whole number, not 'none'"), ("--n_head 0", "--n_head must be in [1,"),
    ("--betas 0.9", "--betas takes two"), ("--dropout nan", "--dropout"),
    ("--seed -1", "--seed must be in [0,"), ("--targets nan", "--targets"),
    ("--seeds 0 0", "names each seed once"), ("--act_dim 77", "--act_dim comes from the data, where it is 2"),
    ("--max_ep_len 0", "--max_ep_len")])
def test_a_slip_gives_one_helpful_message_and_exit_code_2(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    monkeypatch.setattr(data, "collect_local", lambda name, *_: make_tiny_maze(tmp_path, monkeypatch))
    code, _, err = here(T.main, capsys, *argv.split())
    assert code == 2 and err.startswith("error: ") and words in err and "Traceback" not in err


def test_show_prints_every_value_with_its_source_and_the_models_size():
    code, out, _ = command("train.py", "--show", "--env", "hopper-medium", "--size", "paper", "--lr", "0.5")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and lines["lr"].endswith("command line") and lines["d"].endswith('preset "*"')
    assert lines["state_shape"].endswith("data")
    assert "726,019 params" in out and "198,144 mixer_params" in out
    dt = importlib.import_module("models.dt")
    fields = {f.name for f in (*dataclasses.fields(config.TrainConfig), *dataclasses.fields(dt.Config))}
    assert fields <= lines.keys()


# ------------------------------------------------------------------ one step

def test_the_learning_rate_warms_up_then_stays_or_falls_to_zero_and_never_climbs_again():
    """Released Atari code does not clamp the cosine: in 10 epochs its rate climbs back to three quarters."""
    cfg = config.TrainConfig(lr=1.0, warmup=10, steps=110, schedule="cosine")
    rates = [T.learning_rate(cfg, s) for s in range(200)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[60] == pytest.approx(0.5)
    assert rates[110:] == [0.0] * 90
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert T.learning_rate(dataclasses.replace(cfg, schedule="constant"), 150) == 1.0


def test_a_step_is_sample_loss_backward_clip_adamw():
    """One update by our function against the same written out with torch.optim.AdamW in its plain form."""
    run, _ = T.begin(config.resolve(TINY | dict(env="arrays", clip=0.01)), toy())
    model, cfg = run.model, run.cfg
    reference = type(model)(model.cfg)
    reference.load_state_dict(model.state_dict())
    optimizer = T.make_optimizer(model, cfg, torch.device("cpu"))
    T.set_learning_rate(optimizer, 0.01)
    T.make_step(model, run.windows, optimizer, cfg, torch.Generator().manual_seed(5))()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, betas=cfg.betas, weight_decay=cfg.weight_decay,
                              foreach=False)
    loss, _ = reference.loss(run.windows.sample(8, torch.Generator().manual_seed(5)))
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in reference.parameters()))
    for p in reference.parameters():
        p.grad *= min(1.0, 0.01 / (float(norm) + 1e-6))
    plain.step()
    assert norm > 0.01, "clipping must have something to do"
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_with_ema_an_average_of_the_weights_acts_and_training_goes_on_from_the_weights(tmp_path, monkeypatch):
    """The first update's weights, and from then on 0.8 of the average and 0.2 of the new weights."""
    after = []
    update = T.Run.update

    def watched(run):
        update(run)
        after.append([p.detach().clone() for p in run.model.parameters()])
    monkeypatch.setattr(T.Run, "update", watched)
    plain, folder = (T.train(toy(), **TINY, ema=x, out=str(tmp_path))["run"] for x in (0.0, 0.8))
    assert all(map(torch.equal, sum(after[:20], []), sum(after[20:], []))), "averaging changed the training"
    average = [x.double() for x in after[0]]
    for weights in after[1:20]:
        average = [0.8 * a + 0.2 * x.double() for a, x in zip(average, weights, strict=True)]
    for a, b in zip(load_run(folder)[0].parameters(), average, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-6)
    last = list(load_run(plain)[0].parameters())
    assert max(float((a - b).abs().max().detach()) for a, b in zip(last, average, strict=True)) > 1e-4


@pytest.mark.parametrize("model", config.MODELS)
def test_an_update_in_bfloat16_is_near_the_one_in_float32_on_a_cpu_too(model, tmp_path):
    losses = []
    for amp in (False, True):
        run, _ = T.begin(config.resolve(TINY | dict(env="arrays", model=model, amp=amp, d=32)), toy())
        for _ in range(3):
            losses.append(float(run.step()["loss"]))
    assert losses[3:] == pytest.approx(losses[:3], rel=0.03) and losses[3:] != losses[:3]


class Two(torch.nn.Module):
    """Two weights in two groups, and a loss with these gradients."""

    def __init__(self, gradients, *options):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        self.gradients, self.options = gradients, options

    def param_groups(self, weight_decay):
        return [dict(params=[p], weight_decay=0.0) | more
                for p, more in zip((self.a, self.b), self.options, strict=True)]

    def loss(self, batch):
        loss = (self.gradients[0] * self.a + self.gradients[1] * self.b).sum()
        return loss, {"loss": loss.detach()}

    def one_step(self, clip):
        class Windows:
            device = torch.device("cpu")

            def sample(self, batch_size, generator):
                return {}
        cfg = config.TrainConfig(lr=0.01, clip=clip)
        optimizer = T.make_optimizer(self, cfg, torch.device("cpu"))
        T.set_learning_rate(optimizer, 0.01)
        T.make_step(self, Windows(), optimizer, cfg, None)()
        return self


def test_groups_with_a_rate_of_their_own_are_scaled_and_clipped_apart():
    model = Two((1000, 1), {}, dict(lr_scale=0.1)).one_step(clip=10.0)
    assert model.a.grad.item() == pytest.approx(10)
    assert model.b.grad.item() == 1, "a large gradient in one group must not shrink the other"
    assert 1 - model.a.item() == pytest.approx(0.01, rel=1e-3)
    assert 1 - model.b.item() == pytest.approx(0.001, rel=1e-3)


def test_groups_that_differ_in_decay_alone_are_clipped_by_one_norm():
    """StARformer decays matrices and not biases; its gradient norm is still one, as in its paper's code."""
    model = Two((30, 40), dict(weight_decay=0.1), {}).one_step(clip=5.0)
    assert [model.a.grad.item(), model.b.grad.item()] == pytest.approx([3, 4], rel=1e-4)


def test_the_loss_falls_on_a_task_that_can_be_learnt(tmp_path):
    losses = losses_of(T.train(toy(), **TINY | dict(steps=300, out=str(tmp_path)))["run"])
    assert float(losses[-1]) < 0.1 * float(losses[0])


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path):
    def losses(seed):
        return losses_of(T.train(toy(), **TINY | dict(out=str(tmp_path), seed=seed))["run"])
    assert losses(0) == losses(0) != losses(1)


def test_evaluating_more_often_never_changes_training(tmp_path, monkeypatch):
    env = cart_set(tmp_path, monkeypatch)

    def losses(**kwargs):
        given = TINY | dict(out=str(tmp_path / "runs"), dropout=0.1) | kwargs
        return losses_of(T.train(env=env, **given)["run"])
    assert losses() == losses(eval_episodes=1, eval_every=1)


def test_without_a_gpu_nothing_asks_cuda_for_anything(tmp_path, monkeypatch):
    """Builds of torch without CUDA raise at most of its functions."""
    for name in ("get_device_name", "get_rng_state", "set_rng_state", "synchronize", "max_memory_reserved",
                 "current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: pytest.fail("a call of torch.cuda"))
    given = TINY | dict(out=str(tmp_path), device="cpu")
    T.train(toy(), resume=T.train(toy(), **given)["run"])
    T.bench(1, dict(env="hopper-medium", batch_size=4, device="cpu"))


# ------------------------------------------------------------------ run folders and checkpoints

def test_a_second_run_takes_a_new_folder_and_leaves_the_first_alone(tmp_path):
    first, second = (T.train(toy(), **TINY | dict(out=str(tmp_path)))["run"] for _ in range(2))
    assert first.name == "dt-arrays-s0" and second.name == "dt-arrays-s0-2" and (first / "last.pt").exists()


def test_a_checkpoint_holds_tensors_and_plain_python_and_gives_the_same_predictions(tmp_path):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path)))["run"]
    model, meta = load_run(run)
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    assert checkpoint["done"] == meta["step"] == 20 and meta["dataset"] == "arrays"
    assert meta["state_mean"].shape == (4,)
    again = type(model)(model.cfg)
    again.load_state_dict(checkpoint["model"])
    x = dict(states=torch.randn(2, 3, 4), actions=torch.rand(2, 3, 2), rewards=torch.rand(2, 3, 1),
             rtg=torch.rand(2, 3, 1), timesteps=torch.zeros(2, 3, dtype=torch.int64))
    assert torch.equal(again.eval()(**x), model(**x))
    assert torch.equal(load_run(run / "last.pt")[0](**x), model(**x)), "the file is as good as its folder"


def test_a_checkpoint_holds_settings_that_make_the_run_again(tmp_path):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path), lr=0.003))["run"]
    parts = torch.load(run / "last.pt", weights_only=True)["settings"]
    settings = config.Settings.of(parts["train"] | parts["model"], parts["origin"])
    assert settings.train.lr == 0.003 and settings.origin["lr"] == "command line"
    assert settings.model.state_shape == (4,) and settings.origin["state_shape"] == "data"
    assert settings.origin.keys() == settings.values().keys()


def stop_at(update):
    """Let a signal arrive in this update, counted from 0, once."""
    rate = T.learning_rate

    def learning_rate(cfg, step):
        if step == update:
            T.learning_rate = rate
            signal.raise_signal(signal.SIGTERM)
        return rate(cfg, step)
    T.learning_rate = learning_rate


def interrupted(update, tmp_path, t=toy, **given):
    """Train to a signal in this update, resume, and return the folder."""
    stop_at(update)
    with pytest.raises(SystemExit) as e:
        T.train(t(), **given, out=str(tmp_path))
    assert e.value.code == 130
    (folder,) = tmp_path.iterdir()
    assert torch.load(folder / "last.pt", weights_only=True)["done"] == update + 1
    return T.train(t(), resume=folder)["run"]


def same_end(a, b):
    """Whether two runs have ended with the very same log and weights."""
    first, second = (torch.load(run / "last.pt", weights_only=True)["model"] for run in (a, b))
    same = all(torch.equal(first[k], second[k]) for k in first)
    return same and (a / "log.csv").read_bytes() == (b / "log.csv").read_bytes()


@pytest.mark.parametrize("update, more", [
    (0, {}), (6, {}), (129, {}), (129, dict(ema=0.9)), (6, dict(amp=True)),
    (6, dict(windows="end")), (6, dict(windows="cover"))], ids=str)
def test_a_stopped_and_resumed_run_ends_with_the_very_same_log_and_weights(update, more, tmp_path):
    """250 updates are logged in pairs: stopping between the two must not lose the first one's loss."""
    given = TINY | dict(steps=250, dropout=0.1) | more
    whole = T.train(toy(), **given, out=str(tmp_path / "whole"))["run"]
    assert same_end(interrupted(update, tmp_path / "parts", **given), whole)


def test_a_resumed_run_keeps_its_targets_and_headline_whatever_its_data(tmp_path, monkeypatch):
    """Of the papers' own data a preset's targets hold; where none has any, they come from the data, once."""
    hopper = write_hdf5(tmp_path / "hopper_medium-v2.hdf5")
    monkeypatch.setattr(importlib.import_module("models.dt"), "PRESETS", {"small": dict(warmup=1)})
    given = dict(env="hopper-medium", source="d4rl", data=str(hopper.parent), eval_episodes=1, eval_every=0)
    run = T.train(**TINY | given | dict(out=str(tmp_path / "runs"), steps=2))["run"]
    before, log = torch.load(run / "last.pt", weights_only=True)["meta"], (run / "log.csv").read_bytes()
    assert before["headline"] == before["plan"][-1][1], "the 95th percentile"
    T.train(resume=run)
    after = torch.load(run / "last.pt", weights_only=True)["meta"]
    assert (after["plan"], after["headline"]) == (before["plan"], before["headline"])
    assert (run / "log.csv").read_bytes() == log


def test_resuming_with_other_settings_or_other_data_is_refused_by_name(tmp_path):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path)))["run"]
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    with pytest.raises(UserError, match="began with other data"):
        T.train(toy(seed=1), resume=run)
    with pytest.raises(UserError, match="leave out --lr --steps"):
        T.train(toy(), resume=run, lr=0.5, steps=30)
    other = toy()
    other.states.neg_()
    with pytest.raises(UserError, match="began with other data"):
        T.train(other, resume=run)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


@pytest.mark.parametrize("given, x", [
    (dict(device="cpu"), "cpu"), (dict(amp="false"), False), (dict(graph="false"), False),
    (dict(compile="no"), False), (dict(amp="none"), None), (dict(graph=np.bool_(False)), False)])
def test_what_may_change_when_a_run_goes_on_is_typed_like_any_setting(given, x, tmp_path):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path), steps=2))["run"]
    settings, _ = T.read_checkpoint(run, given)
    (key,) = given
    assert getattr(settings.train, key) == x and settings.origin[key] == "command line"
    with pytest.raises(UserError, match="--graph takes true or false"):
        T.train(toy(), resume=run, graph="perhaps")


def test_resume_needs_no_other_flag_and_names_its_folder(tmp_path, monkeypatch, capsys):
    env = cart_set(tmp_path, monkeypatch)
    given = TINY | dict(env=env, model="dc", out=str(tmp_path / "runs"), run="exp",
                        eval_episodes=1, eval_every=0)
    whole = T.train(**given | dict(out=str(tmp_path / "whole")))["run"]
    (tmp_path / "runs" / "exp").mkdir(parents=True)     # a run that ended before its first checkpoint
    stop_at(10)
    with pytest.raises(SystemExit):
        T.train(**given)
    run = tmp_path / "runs" / "exp-2"
    code, _, err = here(T.main, capsys, "--resume", tmp_path / "runs" / "exp")
    assert code == 2 and "nothing to resume" in err and str(tmp_path / "runs" / "exp") in err
    code, out, err = command("train.py", "--resume", run)
    assert code == 0 and "resuming after update 11" in out, err
    assert same_end(run, whole) and (run / "table.txt").exists()


def test_a_killed_run_resumes_from_a_whole_checkpoint(tmp_path):
    """kill -9 gives no warning: only what was written atomically can be trusted."""
    run = tmp_path / "dt-arrays-s0"
    make = ("import sys; sys.path[:0] = ['tests', '.']; import train; from test_13_train import toy, TINY\n"
            f"if '--resume' in sys.argv: train.train(toy(), resume={str(run)!r})\n"
            f"else: train.train(toy(), **TINY | dict(steps=1000, out={str(tmp_path)!r}))")
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen([sys.executable, "-c", make], cwd=ROOT, **quiet)
    deadline = time.time() + 120
    while not (run / "last.pt").exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = torch.load(run / "last.pt", weights_only=True)["done"]
    assert 0 < done < 1000
    code, out, err = command("-c", make, "--resume")
    assert code == 0, err
    assert f"resuming after update {done:,}" in out
    assert torch.load(run / "last.pt", weights_only=True)["done"] == 1000


def test_a_diverging_run_stops_with_advice_and_one_that_saved_nothing_leaves_no_folder(tmp_path, monkeypatch):
    given = TINY | dict(out=str(tmp_path), clip=1e30, warmup=0, steps=100)
    make_step = T.make_step

    def diverging(model, *args):
        step = make_step(model, *args)

        def update():
            with torch.no_grad():
                next(model.parameters()).mul_(math.nan if run.done >= at else 1)
            return step()
        return update
    for at in (0, 50):
        load = T.Run.__init__

        def init(self, *args, load=load):
            nonlocal run
            load(self, *args)
            run = self
        run = None
        monkeypatch.setattr(T.Run, "__init__", init)
        monkeypatch.setattr(T, "make_step", diverging)
        with pytest.raises(UserError, match="diverged; a smaller --lr"):
            T.train(toy(), **given, run=f"at-{at}")
        monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["at-50"]
    assert torch.load(tmp_path / "at-50" / "last.pt", weights_only=True)["done"] == 50


@pytest.mark.parametrize("wrong", [
    dict(model="dtt"), dict(context_len=0), dict(d=10, n_head=3), dict(act_dim=7), dict(device="tpu"),
    dict(batch_size=10**6, context_len=10**4)])
def test_a_run_that_fails_before_it_begins_leaves_no_folder(wrong, tmp_path):
    with pytest.raises(UserError):
        T.train(toy(), **TINY | dict(out=str(tmp_path / "runs")) | wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_reported_before_training(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write to"):
        T.train(toy(), **TINY | dict(out=str(tmp_path / "runs")))


def test_a_damaged_checkpoint_is_reported_by_its_path(tmp_path, capsys):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path)))["run"]
    (run / "last.pt").write_bytes((run / "last.pt").read_bytes()[:1000])
    code, _, err = here(E.command_line, capsys, run)
    assert code == 2 and str(run / "last.pt") in err
    with pytest.raises(UserError, match="last.pt cannot be read"):
        T.train(toy(), resume=run)


def spoil(state, how):
    if how == "no meta":
        del state["meta"]
    elif how == "no settings":
        del state["settings"]
    elif how == "other weights":
        state["model"] = {k: v[:1] for k, v in state["model"].items()}
    elif how == "a field of another version":
        state["settings"]["model"]["hidden"] = 3
    elif how == "a field is missing":
        del state["settings"]["train"]["lr"]
    elif how == "another model":
        state["meta"]["model"] = state["settings"]["train"]["model"] = "gpt"
    elif how == "a list":
        return [1, 2]
    elif how == "generator":
        state["generator"] = state["generator"][:-1]
    return state


@pytest.mark.parametrize("how", ["no meta", "no settings", "other weights", "a field of another version",
                                 "a field is missing", "another model", "a list", "generator"])
def test_a_checkpoint_of_another_kind_gives_one_message(how, tmp_path):
    """Written by another version of the program, or by another program."""
    run = T.train(toy(env_spec={"id": "CartPole-v1", "kwargs": {}}), **TINY | dict(out=str(tmp_path)))["run"]
    torch.save(spoil(torch.load(run / "last.pt", weights_only=True), how), run / "last.pt")
    if how not in ("generator", "a field is missing"):
        with pytest.raises(UserError, match="last.pt"):
            load_run(run)
    if how != "no meta":
        with pytest.raises(UserError):
            T.train(toy(env_spec={"id": "CartPole-v1", "kwargs": {}}), resume=run)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "broken-into"),)
    torch.save({"meta": {"model": "dt"}, "x": Evil()}, tmp_path / "last.pt")
    for main, args in ((E.command_line, [tmp_path]), (T.main, ["--resume", tmp_path])):
        code, _, err = here(main, capsys, *args)
        assert code == 2 and str(tmp_path / "last.pt") in err
        assert not (tmp_path / "broken-into").exists()


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
    t = Trajectories(g.random((60, 3)), g.integers(0, 4, 60), g.random(60), [60],
                     n_actions=np.int64(4), max_ep_len=np.int64(60))
    given = dict(out=tmp_path, lr=np.float64(1e-3), seed=np.int64(2), targets=np.array([1.0, 2.0]))
    assert load_run(T.train(t, **TINY | given)["run"])[1]["n_actions"] == 4


# ------------------------------------------------------------------ whole runs

def test_a_set_of_choices_trains_and_acts_in_its_own_environment(tmp_path, monkeypatch, capsys):
    env = cart_set(tmp_path, monkeypatch)
    given = TINY | dict(eval_episodes=2, targets=(30.0, 60.0), out=str(tmp_path / "runs"))
    result = T.train(env=env, **given)
    last = [r for r in rows_of(result["run"]) if r["checkpoint"] == "last"]
    assert [float(r["target"]) for r in last][-2:] == [30, 60] and result["rows"][0]["return_mean"] >= 8
    assert result["meta"]["env"] == "minari:my/cart-v0" and last[0]["dataset"] == "my/cart-v0"
    for name in ("last.pt", "best.pt", "log.csv", "curve.png", "targets.png", "table.txt"):
        assert (result["run"] / name).stat().st_size > 0
    code, out, err = command("eval.py", result["run"], "--targets", 30, "--episodes", 2,
                             env=dict(MINARI_DATASETS_PATH=str(tmp_path / "gone")))
    assert code == 0 and f"{result['rows'][0]['return_mean']:.1f}" in out, err
    for which in ("last", "best"):
        args = ["--targets", 30, "--episodes", 2]
        code, out, _ = here(E.command_line, capsys, result["run"] / f"{which}.pt", *args)
        assert code == 0 and f"update {load_run(result['run'], which)[1]['step']}," in out
    last = result["run"] / "last.pt"
    assert here(E.command_line, capsys, last) == here(E.command_line, capsys, last.parent)


def test_actions_reach_bounds_beyond_one_and_never_pass_them(tmp_path, monkeypatch):
    """Pendulum's torque goes from -2 to 2; forgetting the scale would leave half of it unused."""
    from gymnasium.envs.classic_control.pendulum import PendulumEnv
    space = Box(-2, 2, (1,), np.float32)
    make_set("my/pend-v0", box(3, low=-8, high=8), space, tmp_path, monkeypatch, env="Pendulum-v1")
    sent, step = [], PendulumEnv.step
    monkeypatch.setattr(PendulumEnv, "step", lambda self, a: sent.append(a) or step(self, a))
    given = TINY | dict(eval_episodes=1, out=str(tmp_path / "runs"))
    model, meta = load_run(T.train(env="minari:my/pend-v0", **given)["run"])
    with torch.no_grad():
        model.head.bias.fill_(30.0)
    evaluate(model, meta, [("random", 0.0, 1)])
    assert all(a.dtype == np.float32 and abs(a).max() <= 2 for a in sent) and sent[-1].max() == 2


def collect_random(id, env_id, tmp_path, monkeypatch, **kwargs):
    """A Minari set of five episodes of 15 steps of random play."""
    env = envs.make({"id": env_id, "kwargs": kwargs})
    env.action_space.seed(0)
    buffers = []
    for i in range(5):
        seen, actions, rewards = [env.reset(seed=i)[0]], [], []
        for _ in range(15):
            actions.append(env.action_space.sample())
            observation, reward, _, _, _ = env.step(actions[-1])
            seen.append(copy.deepcopy(observation))
            rewards.append(reward)
        buffers.append(EpisodeBuffer(
            id=i, observations=stack(seen), actions=np.stack(actions), rewards=np.array(rewards),
            terminations=np.zeros(15, bool), truncations=np.arange(15) == 14))
    store(id, buffers, tmp_path, monkeypatch, env=env.spec.id, observation_space=env.observation_space,
          action_space=env.action_space)
    env.close()


def stack(seen):
    if isinstance(seen[0], dict):
        return {k: stack([o[k] for o in seen]) for k in seen[0]}
    return np.stack(seen)


@pytest.mark.parametrize("name, kwargs", [
    ("pen-human", {}),
    ("kitchen-complete", dict(tasks_to_complete=["microwave", "kettle", "light switch", "slide cabinet"]))])
def test_adroit_and_kitchen_train_and_act_through_their_published_ids(name, kwargs, tmp_path, monkeypatch):
    """Five short episodes of random play stand in for the published sets; the rest of the way is real."""
    env = envs.ENVS[name]
    collect_random(env.minari, env.id, tmp_path, monkeypatch, **kwargs)
    given = dict(steps=10, eval_episodes=2, eval_every=0, targets=(1.0,), out=str(tmp_path / "runs"))
    result = T.train(env=name, **TINY | given)
    row = result["rows"][0]
    assert result["meta"]["source"] == "minari" and row["episodes"] == 2 and row["score"] is not None
    assert math.isfinite(row["return_mean"])


def test_the_d4rl_layout_trains_from_the_command_line_with_walkers_old_feet(tmp_path):
    write_hdf5(tmp_path / "walker2d_medium-v2.hdf5", S=17, A=6)
    flags = "--env walker2d-medium --source d4rl --steps 10 --batch_size 4 --eval_episodes 1 --eval_every 0"
    code, out, err = command("train.py", *flags.split(), "--data", tmp_path, "--out", tmp_path / "runs")
    assert code == 0, err
    assert "walker2d on" not in out and "5000.0*" in out
    assert "dt on walker2d-medium (Walker2d-v5), data walker2d_medium-v2.hdf5 (d4rl)" in out
    run = tmp_path / "runs" / "dt-walker2d-medium-s0"
    meta = torch.load(run / "last.pt", weights_only=True)["meta"]
    assert meta["env_spec"]["kwargs"] == {"xml_file": "walker2d.xml"}


def test_seeds_end_with_one_table_of_mean_and_interval(tmp_path, monkeypatch, capsys):
    """Each seed is a run of sweep.py, named by its settings."""
    env = cart_set(tmp_path, monkeypatch)
    line = f"--env {env} --steps 5 --eval_episodes 1 --seeds 0 1 --out"
    code, text, err = here(T.main, capsys, *line.split(), tmp_path / "runs")
    assert code == 0, err
    assert "mean ± 95 % interval over seeds" in text and re.search(r" dt +2 +random ", text)
    names = sorted(path.parent.name[:-8] for path in (tmp_path / "runs").glob("*/result.json"))
    assert names == ["dt-my-cart-v0-s0-", "dt-my-cart-v0-s1-"]


def test_bench_ends_with_one_line_of_json():
    code, out, err = command("train.py", "--bench", 2, "--env", "hopper-medium", "--batch_size", 4)
    result = json.loads(out.splitlines()[-1])
    keys = "ms_per_step steps_per_s params mixer_params macs peak_mib batch_size context_len device"
    assert code == 0 and set(keys.split()) <= result.keys() and result["peak_mib"] > 0, err


def test_bench_runs_where_a_process_cannot_ask_for_its_memory(monkeypatch, capsys):
    """Windows has no module resource."""
    monkeypatch.setitem(sys.modules, "resource", None)
    line = "--bench 1 --env hopper-medium --batch_size 4 --device cpu"
    result = json.loads(here(T.main, capsys, *line.split())[1].splitlines()[-1])
    assert result["peak_mib"] is None and result["ms_per_step"] > 0


def test_a_folder_with_a_space_and_an_umlaut_in_its_name_works(tmp_path):
    run = T.train(toy(), **TINY | dict(out=str(tmp_path / "mein Läufe")))["run"]
    assert load_run(run)[1]["step"] == 20


def test_importing_train_starts_nothing_and_needs_no_gymnasium():
    """The spawn start method imports the main module again; a model can be timed without environments."""
    ask = "import train, sys; print('gymnasium' in sys.modules, 'minari' in sys.modules)"
    code, out, _ = command("-c", ask)
    assert code == 0 and out.split() == ["False", "False"]


def test_a_papers_return_scale_and_targets_hold_for_the_papers_data_only(tmp_path, monkeypatch):
    """D4RL's AntMaze ends at the goal with a return of 1. Minari's goes on and returns hundreds."""
    space = Dict(observation=box(27), achieved_goal=box(2), desired_goal=box(2))
    make_set("D4RL/antmaze/umaze-v1", space, box(8, dtype=np.float32), tmp_path, monkeypatch)
    name = "Ant_maze_u-maze_noreset_multistart_False_multigoal_False_sparse_fixed.hdf5"
    write_hdf5(tmp_path / name, S=29, A=8, **{"infos/goal": np.zeros((60, 2), np.float32)})
    given = TINY | dict(model="dc", env="antmaze-umaze", size="paper", device="cpu",
                        out=str(tmp_path / "runs"))
    scales = [T.train(**given, **more)["meta"]["rtg_scale"] for more in (
        dict(), dict(source="d4rl", data=str(tmp_path)),
        dict(source="minari", data=str(tmp_path), rtg_scale=5.0))]
    assert scales == [700.0, 1.0, 5.0]


def test_a_keyword_that_is_no_choice_is_refused_as_on_the_command_line(tmp_path):
    for wrong in (dict(activation="tanh"), dict(schedule="linear"), dict(condition="foo"), dict(size="big")):
        with pytest.raises(UserError, match="choose from"):
            T.train(toy(), **TINY | wrong | dict(out=str(tmp_path)))


def test_without_its_goal_the_model_is_neither_trained_on_it_nor_shown_it(tmp_path, monkeypatch):
    make_tiny_maze(tmp_path, monkeypatch, "D4RL/pointmaze/umaze-v2")
    given = TINY | dict(env="pointmaze-umaze", source="minari", out=str(tmp_path / "runs"), steps=2,
                        eval_episodes=1, eval_every=0, targets=(1.0,))
    for goal, width in (("state", 6), ("none", 4)):
        result = T.train(**given, goal=goal)
        model, meta = load_run(result["run"])
        assert model.cfg.state_shape == (width,) and meta["state_mean"].shape == (width,)
        assert meta["goal"] == (width == 6)
        assert result["rows"][0]["length"] == 300, "it acts to the end on states of the width that it knows"


def test_pct_traj_trains_on_the_best_episodes_alone(tmp_path):
    states = np.repeat(np.arange(10.0), 20)[:, None]
    t = Trajectories(states, np.zeros((200, 1)), np.repeat(np.arange(10.0), 20), [20] * 10)
    meta = T.train(t, **TINY | dict(out=str(tmp_path), pct_traj=0.2))["meta"]
    assert meta["state_mean"].item() == 8.5, "episodes 8 and 9"


def test_best_is_the_highest_success_then_return_at_the_target_nearest_the_headline_from_the_last_start():
    def row(start, target, success, mean):
        return dict(start=start, target=target, success=success, return_mean=mean)
    run, saved = object.__new__(T.Run), []
    run.meta, run.cfg = dict(starts={"random": None, "far": {}}, headline=80.0), config.TrainConfig(steps=9)
    run.best, run.done, run.save = None, 1, saved.append
    near = row("far", 90.0, 70.0, 60.0)
    run.keep_best([row("random", 80.0, 100.0, 99.0), row("far", 20.0, 90.0, 21.0), near])
    assert run.best == [70.0, 60.0] and saved == ["best"]
    for worse in ((70.0, 59.0), (69.0, 99.0), (70.0, 60.0)):
        run.keep_best([row("far", 90.0, *worse)])
    assert run.best == [70.0, 60.0] and saved == ["best"]
    run.done = 9        # as good at the end: the later one, which needs no line of its own in the table
    run.keep_best([near])
    assert saved == ["best"] * 2
    run.best = None
    run.keep_best([row("far", 90.0, None, 60.0)])
    assert run.best == [0.0, 60.0]


# ------------------------------------------------------------------ targets

def test_targets_run_from_the_5th_to_the_95th_percentile_and_a_papers_own_are_for_its_data():
    zeros = np.zeros((101, 1))
    t = Trajectories(zeros, zeros, np.arange(101.0), [1] * 101)

    def choose(source, targets, origin):
        settings = config.resolve(dict(env="arrays", eval_episodes=2)).replace(origin, targets=targets)
        _, plan, headline, _ = T.choose_targets(config.fitted(settings, t, source), t, None)
        return [x for _, x, _ in plan], headline
    assert choose("minari", (3600.0,), 'preset "hopper"') == ([5, 27.5, 50, 72.5, 95], 95)
    assert choose("d4rl", (3600.0, 1800.0), 'preset "hopper"') == ([3600, 1800], 3600)
    assert choose("local", (7.0,), "command line") == ([7], 7)


def test_the_far_pairs_returns_set_the_targets_of_a_point_maze():
    """Ten episodes from the far pair return 0 to 90; the others start elsewhere and must not count."""
    known = envs.ENVS["pointmaze-umaze"]
    env, far = envs.make({"id": known.id, "kwargs": known.kwargs}), known.starts["far"]
    start, goal = (env.unwrapped.maze.cell_rowcol_to_xy(np.array(cell)) for cell in far.values())
    states = np.repeat([np.append(start, [0, 0]), np.append(goal, [0, 0])], 10, 0)
    t = Trajectories(states, np.zeros((20, 2)), np.append(np.arange(0, 100, 10.0), [1000.0] * 10), [1] * 20,
                     goals=np.tile(goal, (20, 1)))
    settings = config.fitted(config.resolve(dict(eval_episodes=2)), t, "local")
    settings, plan, headline, _ = T.choose_targets(settings, t, env)
    assert headline == 72 and plan[0] == ("random", 72.0, 10)
    wanted = pytest.approx([4.5, 24.8, 45, 65.2, 85.5], abs=0.11)       # rounded to a tenth
    assert [x for s, x, _ in plan if s == "far"] == wanted == list(settings.train.targets)


# ------------------------------------------------------------------ tables and environments that do not fit

def test_a_timestep_table_shorter_than_the_episodes_is_said_in_a_line():
    t = Trajectories(np.zeros((96, 2)), np.zeros((96, 1)), np.zeros(96), [48, 48])
    _, text = T.begin(config.resolve(TINY | dict(env="arrays", max_ep_len=24)), t)
    assert "24" in text and "48" in text and "table" in text and len(text.splitlines()[-1]) < 200
    _, text = T.begin(config.resolve(TINY | dict(env="arrays", max_ep_len=48)), t)
    assert "table" not in text


def test_a_huge_timestep_table_is_not_made_in_silence():
    """One episode of 200,000 steps: its table would be most of the model."""
    N = 200_000
    t = Trajectories(np.zeros((N, 2)), np.zeros((N, 1)), np.zeros(N), [N])
    _, text = T.begin(config.resolve(TINY | dict(env="arrays")), t)
    assert "200,000 rows" in text and "--max_ep_len" in text
    run, text = T.begin(config.resolve(TINY | dict(env="arrays", max_ep_len=500)), t)
    assert "command line: " in text and "max_ep_len=500" in text and "  default:" not in text
    assert "500" in text and run.settings.model.max_ep_len == 500


@pytest.mark.parametrize("space, actions, env, words", [
    (box(7), Discrete(2), "CartPole-v1", "shape (4,) and type float32, not [7]"),
    (box(4), Discrete(5), "CartPole-v1", "actions: 5 choices in the data, 2 choices in the environment"),
    (box(4), box(2, dtype=np.float32), "CartPole-v1", "actions: 2 numbers in the data, 2 choices"),
    (box(3), Discrete(2), "Pendulum-v1", "actions: 2 choices in the data, 1 numbers"),
    (Dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2)), Discrete(2), "CartPole-v1",
     "layout"),
    (box(4), box(2, dtype=np.float32), "PointMaze_UMaze-v3", "PointMaze_UMaze-v3"),
    (Box(0, 255, (40, 40, 3), np.uint8), Discrete(2), "CartPole-v1", "does not fit"),
])
def test_a_set_and_an_environment_that_do_not_fit_are_refused_before_training_and_by_eval(
        space, actions, env, words, tmp_path, monkeypatch, capsys):
    """Also after --eval_episodes 0, when eval.py is the first to make the environment."""
    make_set("my/odd-v0", space, actions, tmp_path, monkeypatch, env=env)
    given = TINY | dict(env="minari:my/odd-v0", out=str(tmp_path / "runs"), context_len=2)
    with pytest.raises(UserError) as e:
        T.train(**given | dict(eval_episodes=1, steps=10**6))
    assert words in str(e.value) and "my/odd-v0" in str(e.value) and env in str(e.value)
    assert len(str(e.value).splitlines()) == 1 and not (tmp_path / "runs").exists()
    run = T.train(**given | dict(steps=1))["run"]
    for more in ([], ["--video", str(tmp_path / "x.gif")]):
        code, _, err = here(E.command_line, capsys, run, "--targets", 1, *more)
        film = f"no film {tmp_path / 'x.gif'}: " * bool(more)
        assert code == 2 and err == f"error: {film}{e.value}\n"


def test_a_run_trained_without_evaluation_asks_for_targets_and_then_plays(tmp_path, monkeypatch, capsys):
    run = T.train(env=cart_set(tmp_path, monkeypatch), out=str(tmp_path / "runs"), **TINY)["run"]
    code, _, err = here(E.command_line, capsys, run)
    assert code == 2 and "--targets" in err
    code, out, err = here(E.command_line, capsys, run, "--targets", 20, "--episodes", 1)
    assert code == 0 and "20.0" in out, err
    code, out, err = here(E.command_line, capsys, run, "--targets", "-1e3", "--episodes", 1)
    assert code == 0 and "-1000.0" in out, err
