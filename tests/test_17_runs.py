"""What hours-long runs meet: kills, two processes in one folder, full disks, odd numbers, slips, warnings.

    pytest tests/test_17_runs.py
"""
import errno
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from test_13_train import ROOT, TINY, command, here, toy

import data
import eval as E
import settings as config
import train as T
from data import Trajectories
from errors import UserError, run_command
from eval import evaluate, load_run

SMALL = TINY | dict(device="cpu")
CART = {"id": "CartPole-v1", "kwargs": {}}


def cart(**kwargs):
    g = np.random.default_rng(0)
    return Trajectories(g.standard_normal((60, 4)), g.integers(0, 2, 60), np.ones(60), [20] * 3, n_actions=2,
                        env_spec=CART, **kwargs)


def files_of(run):
    return {p.name: p.read_bytes() for p in run.iterdir()}


# ------------------------------------------------------------------ kills

@pytest.mark.skipif(not hasattr(os, "fork"), reason="an attempt is a fork")
def test_a_run_killed_at_random_moments_resumes_to_the_log_and_weights_of_one_left_alone():
    """kill.py of this folder; by hand it makes 50 rounds of all six models."""
    code, out, err = command("tests/kill.py", "--rounds", 3, "--model", "dt")
    assert code == 0 and "3 rounds: every run ended" in out, out + err


def test_one_process_writes_to_a_run_folder_and_its_lock_dies_with_it(tmp_path):
    given = SMALL | dict(out=str(tmp_path))
    run = T.train(toy(), **given)["run"]
    before = files_of(run)
    work = (f"import pathlib, sys, train\nwith train.hold(pathlib.Path({str(run)!r})):\n"
            "    print('held', flush=True)\n    sys.stdin.read()")
    holder = subprocess.Popen([sys.executable, "-c", work], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(T.Busy, match="dt-arrays-s0 is being written by another process") as e:
            T.train(toy(), resume=run)
        assert files_of(run) == before and len(str(e.value).splitlines()) == 1
    finally:
        holder.kill()
        holder.communicate()
    assert T.train(toy(), resume=run)["run"] == run
    with T.hold(run):
        other = T.train(toy(), **given)["run"]
    assert other.name == "dt-arrays-s0-2", "a run that is not resumed takes a folder of its own"


def test_a_disk_that_knows_no_locks_is_written_all_the_same(tmp_path, monkeypatch):
    """Some network disks; filelock says so by NotImplementedError."""
    def acquire(*_, **__):
        raise NotImplementedError("no locks here")
    monkeypatch.setattr(filelock.BaseFileLock, "acquire", acquire)
    run = T.train(toy(), **SMALL | dict(out=str(tmp_path)))["run"]
    assert T.train(toy(), resume=run)["run"] == run


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
@pytest.mark.skipif(os.name == "nt", reason="Unix signals")
def test_ctrl_c_while_the_libraries_load_is_quiet(script):
    """torch takes seconds to import: a user who sees the slip just typed does not wait."""
    process = subprocess.Popen([sys.executable, "-X", "importtime", script, "runs/none"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:     # one for each module, as it has been imported
        if line.split("|")[-1].strip() == "errors":
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    err = [line for line in err.splitlines() if not line.startswith("import time")]
    assert process.returncode and not err and not out


# ------------------------------------------------------------------ from a GPU to a CPU

def from_a_gpu(run):
    """Make a CPU run's checkpoint one as a GPU writes it; a machine without one cannot.

    AdamW was capturable, its learning rate a tensor; a CUDA generator's state has 16 bytes.
    """
    state = torch.load(run / "last.pt", weights_only=True)
    state["settings"]["train"].update(device="auto", amp=True, graph=True)
    for moments in state["optimizer"].values():
        moments["step"] = moments["step"].double().float()
    state |= dict(generator=torch.zeros(16, dtype=torch.uint8), cuda_rng=torch.zeros(16, dtype=torch.uint8))
    torch.save(state, run / "last.pt")


def test_a_run_begun_on_a_gpu_goes_on_on_a_cpu(tmp_path):
    from test_13_train import stop_at
    given = TINY | dict(out=str(tmp_path), steps=60, warmup=30)
    stop_at(20)
    with pytest.raises(SystemExit):
        T.train(toy(), **given)
    (run,) = tmp_path.iterdir()
    from_a_gpu(run)
    T.train(toy(), resume=run, device="cpu")
    after = torch.load(run / "last.pt", weights_only=True)
    assert after["done"] == 60 and all(x["step"] == 60 for x in after["optimizer"].values())
    rates = [row["lr"] for row in after["rows"] if "lr" in row]
    assert rates[:30] == sorted(set(rates[:30])) and len(rates) == 60, "the warm-up has gone on"
    assert after["settings"]["train"]["device"] == "cpu"


# ------------------------------------------------------------------ disks

@pytest.mark.parametrize("limit, file", [(500, "log.csv"), (5_000, "last.pt")])
def test_a_disk_that_fills_up_gives_one_message_and_leaves_the_last_checkpoint_whole(
        limit, file, tmp_path, monkeypatch, capsys):
    """A limit on the size of files stands in for a full disk: writing fails half way, as there."""
    resource = pytest.importorskip("resource")
    given = SMALL | dict(out=str(tmp_path), steps=40)
    fill, rename = iter(range(10**6)), os.replace

    def replace(*args):     # the disk is full from the tenth write on
        if next(fill) == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return rename(*args)
    monkeypatch.setattr(os, "replace", replace)
    try:
        with pytest.raises(SystemExit) as e:
            run_command(lambda: T.train(toy(), **given))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    err, run = capsys.readouterr().err, tmp_path / "dt-arrays-s0"
    assert e.value.code == 2 and len(err.splitlines()) == 1
    assert f"cannot write {run / file}" in err and "the last checkpoint is whole" in err
    assert torch.load(run / "last.pt", weights_only=True)["done"] == 10
    assert files_of(run).keys() - {"lock"} == {"log.csv", "last.pt"}
    monkeypatch.undo()
    T.train(toy(), resume=run)
    assert "resuming after update 10" in capsys.readouterr().out


def test_a_disk_that_is_full_at_the_very_end_keeps_the_finished_run(tmp_path, monkeypatch, capsys):
    """The pictures and the table come last."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(T, "plot_curve", full)
    with pytest.raises(SystemExit) as e:
        run_command(lambda: T.train(toy(), **SMALL | dict(out=str(tmp_path))))
    run = tmp_path / "dt-arrays-s0"
    assert e.value.code == 2 and "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    assert load_run(run)[1]["step"] == 20
    T.train(toy(), resume=run)
    assert (run / "curve.png").exists()


@pytest.fixture
def no_root():
    """Root may write anywhere: do without."""
    if os.name == "nt":
        pytest.skip("Unix permissions")
    me = os.geteuid()
    folder = Path(tempfile.mkdtemp())
    T.train(toy(), **SMALL | dict(out=str(folder / "first")))       # what loads late loads now
    os.chown(folder, 65534, -1) if me == 0 else None
    os.seteuid(65534) if me == 0 else None
    try:
        yield folder
    finally:
        os.seteuid(me)
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)
        subprocess.run(["rm", "-r", folder], check=True)


def test_a_read_only_folder_is_reported_before_training_and_left_as_it_is(no_root):
    try:
        open(torch.__file__).close()
    except PermissionError:
        pytest.skip("the packages are root's alone: as another user, torch cannot load what it loads late")
    given = SMALL | dict(out=str(no_root / "runs"))
    run = T.train(toy(), **given)["run"]
    before = files_of(run)
    attempts = (run.parent, lambda: T.train(toy(), **given | dict(steps=10**9))), (
        run, lambda: T.train(toy(), resume=run))
    for folder, attempt in attempts:
        for p in (*folder.iterdir(), folder):
            p.chmod(0o500)
        with pytest.raises(UserError, match="cannot write to") as e:
            attempt()
        assert len(str(e.value).splitlines()) == 1
        for p in (*folder.iterdir(), folder):
            p.chmod(0o700)
    assert files_of(run) == before


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"),
                                   OSError(errno.EROFS, "Read-only file system")])
def test_a_folder_that_became_read_only_is_reported_and_left_as_it_is(error, tmp_path, monkeypatch):
    """As above, for whoever may write anywhere."""
    run = T.train(toy(), **SMALL | dict(out=str(tmp_path)))["run"]
    before = files_of(run)

    def acquire(*_, **__):
        raise error
    monkeypatch.setattr(filelock.BaseFileLock, "acquire", acquire)
    with pytest.raises(UserError, match="cannot write to"):
        T.train(toy(), resume=run)
    assert files_of(run) == before


@pytest.mark.parametrize("given", [dict(out="runs"), dict(out="runs/below"), dict(run=300 * "a"),
                                   dict(run="a\0b")])
def test_an_output_that_can_be_no_folder_is_reported(given, tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot write to .*--out"):
        T.train(toy(), **SMALL | dict(out="others") | given)


# ------------------------------------------------------------------ numbers

def numbers(case):
    """(a data set, settings, targets) of one odd kind."""
    g, N = np.random.default_rng(0), 120
    x = dict(states=g.standard_normal((N, 4)), actions=g.uniform(-1, 1, (N, 2)), rewards=g.random(N),
             lengths=[40] * 3)
    given, targets = {}, [1.0]
    if case == "extreme targets":
        targets = [1e9, -1e9, 0.0]
    elif case == "constant and huge states":
        x["states"][:, 0] = 1e8
        x["states"][:, 1] *= 1e8
        x["states"][:, 2] += 1e8
    elif case == "episodes beyond the timestep table":
        given = dict(max_ep_len=5)
    elif case == "K = 1, batch 1":
        given = dict(context_len=1, batch_size=1)
    elif case == "one episode of length 1":
        x = {k: v[:1] for k, v in x.items()} | dict(lengths=[1])
    elif case == "equal rewards":
        x["rewards"] = np.zeros(N)
    elif case == "rewards of a million":
        x["rewards"] = 1e6 * g.standard_normal(N)
    return Trajectories(**x, action_low=-1.0, action_high=1.0), given, targets


CASES = ["extreme targets", "constant and huge states", "episodes beyond the timestep table",
         "K = 1, batch 1", "one episode of length 1", "equal rewards", "rewards of a million"]


def begun(t, name, **given):
    return T.begin(config.resolve(SMALL | dict(env="arrays", model=name, d=16) | given), t)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", config.MODELS)
def test_odd_numbers_give_finite_losses_and_actions_in_float32_and_bfloat16(name, case):
    t, given, targets = numbers(case)
    run = begun(t, name, lr=1e-2, warmup=0, **given)
    for _ in range(10):
        run.update()
    assert all(x.isfinite().all() for x in run.sums.values())
    assert all(p.isfinite().all() for p in run.model.parameters())
    run.model.eval()
    meta, K, n = run.meta, run.settings.model.context_len, len(targets)
    for steps in (1, K, K + 7):     # a history from its first step to beyond the window and the table
        rows = torch.arange(steps) % len(t)
        history = (
            ((t.states[rows] - meta["state_mean"]) / meta["state_std"]).expand(n, -1, -1),
            torch.zeros(n, steps, 2),
            t.rewards[rows][None, :, None].expand(n, -1, -1),
            (torch.tensor(targets) / meta["rtg_scale"])[:, None, None].expand(-1, steps, 1),
            torch.arange(steps).clamp(max=run.settings.model.max_ep_len - 1).expand(n, -1))
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
                generator = torch.Generator().manual_seed(1)
                loss, _ = run.model.loss(run.windows.sample(run.cfg.batch_size, generator))
                a = run.model.act(*history)
            assert loss.isfinite() and a.shape == (n, 2) and a.isfinite().all() and a.abs().max() <= 1


@pytest.mark.parametrize("name", config.MODELS)
def test_huge_states_of_an_environment_play_to_the_end(name):
    """CartPole's numbers are far outside these data: normalised, its states are of the order of millions."""
    narrow = 1e-5 * np.random.default_rng(0).standard_normal((60, 4))
    t = Trajectories(narrow, np.zeros(60, int), np.ones(60), [20] * 3, n_actions=2, max_ep_len=500,
                     env_spec=CART)
    run = begun(t, name)
    rows = evaluate(run.model, run.meta, [("random", x, 1) for x in (1e9, -1e9, 0.0)])
    assert all(8 <= r["return_mean"] <= 500 for r in rows)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", config.MODELS)
def test_a_target_that_no_float_carries_is_blamed_for_what_it_does(name, sample):
    """Its square is infinity. Choices are drawn from logits: NaN there is torch's RuntimeError."""
    t = cart(max_ep_len=500)
    run = begun(t, name)
    plan = [("random", 1e29, 1)]
    try:
        rows = evaluate(run.model, run.meta, plan, sample=sample)
        assert rows[0]["return_mean"] >= 8, "it may also be played to the end"
    except UserError as e:
        assert "target" in str(e) and "diverged" not in str(e)


# ------------------------------------------------------------------ slips

SLIPS = [
    ("train --modle dt", "no flag --modle; did you mean --model"),
    ("train --model dtt", "no model is called 'dtt'; did you mean dt"),
    ("train --model", "--model: expected one argument"),
    ("train dt", "what is 'dt'? Settings are given as --name value"),
    ("train --env hoper-medium", "'hoper-medium'; did you mean hopper-medium"),
    ("train --env Hopper-v5", "did you mean hopper-medium"),
    ("train --lr abc", "--lr takes a number, not 'abc'"),
    ("train --lr -1", "--lr must be in (0, 10], not -1"),
    ("train --steps 1e4", "--steps takes a whole number, not '1e4'"),
    ("train --steps 20 40", "what is '40'?"),
    ("train --targets x", "--targets takes a number, not 'x'"),
    ("train --targets 1,2", "parted by spaces"), ("train --targets", "--targets: expected at least one"),
    ("train --batch_size 0", "--batch_size must be in [1,"),
    ("train --context_len 0", "--context_len must be in [1, 10000], not 0"),
    ("train --d 100 --n_head 3", "n_head=3 does not divide d=100"),
    ("train --rtg_scale inf", "--rtg_scale must be in"),
    ("train --seeds a b", "--seeds: invalid int value: 'a'"),
    ("train --seeds", "--seeds: expected at least one"),
    ("train --seeds 0 1 --seed 3", "--seeds names each seed once, and goes without --seed"),
    ("train --seeds 0 1 --resume run", "--resume: not allowed with argument --seeds"),
    ("train --seeds 0 -7", "--seed must be in [0,"), ("train --seeds 0 9999999", "--seed must be in [0,"),
    ("train --bench 0", "--bench"), ("train --bench 5 --seeds 0 1", "--bench"),
    ("train --bench 5 --resume run", "--bench"), ("train --show --resume run", "--show"),
    ("train --device cuda:7", "--device cuda:7"), ("train --device tpu", "--device tpu cannot be used here"),
    ("train --model lsdt --conv_ratio 7", "--conv_ratio must be in [0, 1], not 7"),
    ("train --model lsdt --kernel 0", "kernel"), ("train --model dm --fixed_k 0", "fixed_k"),
    ("train --model starformer --env breakout --source local --patch 5", "patch=5"),
    ("train --model radt --cross_attention false --adaln false", "adaln"),
    ("train --model dt --use_actions false --goal action", "goal=action has no effect without"),
    ("train --model dt --mixer soft", "--mixer soft: choose from attention, direct"),
    ("train --run a/b", "--run a/b: the name of a folder in --out"),
    ("train --resume", "--resume: expected one argument"),
    ("train --resume runs/x", "nothing to resume: runs/x/last.pt does not exist"),
    ("train --resume empty", "nothing to resume: empty/last.pt does not exist"),
    ("train --resume run --model dc", "takes its settings from the run; leave out --model"),
    ("train --resume run --steps 50", "takes its settings from the run; leave out --steps"),
    ("train --resume run", "arrays of your own"),
    ("train --env minari:foo", "'foo' is not a Minari id"),
    ("train --env hopper-medium-replay --source minari",
     "hopper-medium-replay has no minari data; its sources are d4rl, local"),
    ("train --env cheetah-vel", "To make data here: python train.py --env cheetah-vel --source local"),
    ("train --data nonexistent", "--data nonexistent: there is no folder"),
    ("train --source dqn", "has no dqn data"), ("train --sticky 0.2", "--sticky is for Atari games"),
    ("train --show --env hopper-medium --act_dim 9", "--act_dim comes from the data, where it is 3"),
    ("eval runs/none", "runs/none"), ("eval empty", "empty"), ("eval file", "file"),
    ("eval run/x.pt", "there is no run/x.pt"), ("eval rum", "there is no rum/last.pt"),
    ("eval run --video out.avi --targets 1", "ends in .gif"),
    ("eval run --video none/x.gif --targets 1", "no film none/x.gif"),
    ("eval run --start nowhere", "--start nowhere: there are: random"),
    ("eval run --targets nan", "--targets must be in"), ("eval run --targets 1e40", "--targets must be in"),
    ("eval run --episodes 0", "--episodes must be in [1,"),
    ("eval run --episodes 1000000000 --targets 1", "--episodes must be in [1,"),
    ("eval run --seed -1", "--seed must be in"), ("eval run --sticky 0.5", "arguments: --sticky"),
    ("eval run --device tpu", "--device tpu cannot be used here"),
    ("eval run/best.pt", "best.pt"),
    ("data collect", "the following arguments are required: env"),
    ("data collect hoper-medium", "did you mean hopper-medium"),
    ("data collect kitchen-complete", "no set is called 'kitchen-complete'"),
    ("data info minari:x", "'x' is not a Minari id"),
    ("data collect hopper-medium --steps 0", "steps must be at least 1"),
    ("data download hopper-medium --data nonexistent", "there is no folder")]

# each field has its range, and a value beyond it is refused before any data are loaded
BEYOND = """
--timestep_std -1 | --dropout 2 | --dropout 1 | --dropout -0.1 | --context_len 100000000
--batch_size 1000000000
--rtg_scale 1e-30 | --rtg_scale 0 | --reward_scale -1 | --reward_scale 1e31 | --lr 0 | --lr nan | --lr inf
--lr 11 | --betas 1 0.9 | --betas 0.9 0.9 0.9 | --weight_decay -1 | --weight_decay nan | --warmup -1
--lr_floor 1.1 | --clip 0 | --clip inf | --pct_traj 0 | --pct_traj 1.1 | --targets inf | --eval_episodes -1
--eval_episodes 1000000000 | --eval_every -1 | --sticky 1 | --transitions 0 | --seed -1 | --seed 2000000
--steps 0 | --batch_size 0 | --context_len 0 | --context_len 10000 --batch_size 1000 | --n_layer 0
--n_layer 10000 | --d 0 | --d 100000 | --max_ep_len 0 | --max_ep_len 100000000 | --n_head 0
--env breakout --source dqn --patch 0
--model dc --window 5000 | --model dc --window 0 | --model lsdt --kernel 0 | --model lsdt --kernel 1000000
--model lsdt --conv_ratio 1.5 | --model lsdt --conv_dropout 2
--model dm --k_cost -5 | --model dm --k_cost inf
--model dm --aux_lr_scale nan | --model dm --aux_lr_scale -1 | --model starformer --step_d 0
--model starformer --step_d 100000000 | --model starformer --step_heads 0
--model starformer --dropkey 2 | --model dt --attn_dropout 2
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A folder with a run, an empty folder and a file in it."""
    folder = tmp_path_factory.mktemp("slips")
    T.train(cart(), **SMALL | dict(out=str(folder), run="run"))
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    return folder


def slip(line, played, monkeypatch, capsys):
    """Exit code 2, at most three short lines, no traceback; before any data are loaded or collected."""
    script, *argv = shlex.split(line)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(played / "none"))
    monkeypatch.chdir(played)
    if script == "train":
        monkeypatch.setattr(data, "collect_local", lambda *_, **__: pytest.fail("data are collected first"))
    monkeypatch.setattr(E, "evaluate", lambda *_, **__: pytest.fail("it plays first"))
    main = dict(train=T.main, eval=E.command_line, data=data.command_line)[script]
    code, _, err = here(main, capsys, *argv)
    assert code == 2 and len(err.splitlines()) <= 3 and err.startswith("error: ") and "Traceback" not in err
    assert max(map(len, err.splitlines())) < 700
    return err


@pytest.mark.parametrize("line, words", SLIPS)
def test_a_slip_ends_in_a_short_message_that_names_it(line, words, played, monkeypatch, capsys):
    before = files_of(played / "run")
    assert words in slip(line, played, monkeypatch, capsys)
    assert files_of(played / "run") == before and not (played / "runs").exists()


@pytest.mark.parametrize("line", [x.strip() for x in BEYOND.replace("\n", "|").split("|") if x.strip()])
def test_a_value_beyond_its_range_is_refused_in_one_line_before_the_data_load(
        line, played, monkeypatch, capsys):
    """Nobody's memory is eaten, nobody waits: "killed" is no message."""
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("the data are loaded first"))
    start = time.monotonic()
    err = slip(f"train {line}", played, monkeypatch, capsys)
    flag = [word for word in line.split() if word.startswith("--")][-1]
    assert time.monotonic() - start < 10 and len(err.splitlines()) == 1
    assert flag.lstrip("-") in err or "parameters" in err or "multiple" in err or "at most" in err


@pytest.mark.skipif(torch.backends.mps.is_available() or torch.xpu.is_available(), reason="they are here")
@pytest.mark.parametrize("device", ["mps", "xpu", "cuda", "meta", "CPU", "''"])
def test_a_device_that_is_not_here_is_refused_in_one_short_line(device, played, monkeypatch, capsys):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("the data are loaded first"))
    for line in ("train", "train --env hopper-medium --bench 1", "eval run --targets 1"):
        err = slip(f"{line} --device {device}", played, monkeypatch, capsys)
        assert len(err) < 450 and len(err.splitlines()) == 1 and "use --device auto or cpu" in err


@pytest.mark.parametrize("given, words", [
    (dict(steps=20.5), "--steps takes a whole number, not 20.5"),
    (dict(steps=float("inf")), "--steps takes a whole number, not inf"),
    (dict(steps=[5]), "--steps takes a whole number"), (dict(steps=True), "--steps takes a whole number"),
    (dict(lr="fast"), "--lr takes a number, not 'fast'"), (dict(lr=None), "--lr takes a number, not None"),
    (dict(graph=2), "--graph takes true or false, not 2"), (dict(graph="on"), "--graph takes true or false"),
    (dict(targets="high"), "--targets takes a number, not 'high'"),
    (dict(targets=[[1], [2, 3]]), "--targets takes a number, not [1]"),
    (dict(d=True), "--d takes a whole number"), (dict(betas=(0.9, "x")), "--betas takes a number"),
    (dict(env=3), "no environment is called '3'"),
    (dict(source=["local"]), "--source ['local']: choose from"),
    (dict(model=None), "no model is called None"), (dict(stepz=3), "did you mean steps")])
def test_a_keyword_of_the_wrong_type_is_refused_by_name(given, words, tmp_path):
    """20.5 updates would never be done: the loop would end without its last checkpoint."""
    with pytest.raises(UserError) as e:
        T.train(toy(), **SMALL | dict(out=tmp_path) | given)
    assert words in str(e.value) and not list(tmp_path.iterdir())


def test_sticky_actions_are_for_atari_games_in_own_arrays_too(tmp_path):
    with pytest.raises(UserError, match="--sticky is for Atari games"):
        T.train(cart(), **SMALL | dict(out=str(tmp_path / "runs"), sticky=0.2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [
    dict(steps="20"), dict(steps=20.0), dict(lr="1e-3"), dict(graph=1), dict(targets=5.0),
    dict(batch_size=np.int32(8)), dict(graph=np.bool_(True))])
def test_a_keyword_that_means_one_value_only_is_taken_for_it(given, tmp_path):
    (key, x), = given.items()
    wanted = dict(steps=20, lr=0.001, graph=True, targets=(5.0,), batch_size=8)[key]
    got = config.resolve(SMALL | dict(env="arrays") | given).values()[key]
    assert got == wanted and type(got) is type(wanted)


# ------------------------------------------------------------------ warnings

def test_nothing_is_said_on_stderr_when_all_is_well(tmp_path, monkeypatch):
    """Training, evaluation and data, each in a process of its own, outside a terminal."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    data.collect_local("pointmaze-umaze", 900)
    flags = "--steps 20 --eval_episodes 1 --eval_every 10 --targets 50 --d 8 --n_layer 1 --context_len 3"
    for args in (["train.py", *flags.split(), "--out", tmp_path / "runs"],
                 ["eval.py", tmp_path / "runs" / "dt-pointmaze-umaze-s0", "--start", "far"],
                 ["data.py", "info", "pointmaze-umaze"]):
        code, out, err = command(*args)
        assert code == 0 and out and err == "", err


# ------------------------------------------------------------------ other processes and places

WORK = """
import json, multiprocessing, sys
import numpy as np, torch
import train
from data import Trajectories
from eval import load_run

def predict():
    model, meta = load_run("runs/dt-arrays-s0")
    g = torch.Generator().manual_seed(0)
    x = dict(states=torch.randn(2, 3, 4, generator=g), actions=torch.rand(2, 3, 2, generator=g),
             rewards=torch.rand(2, 3, 1, generator=g), rtg=torch.rand(2, 3, 1, generator=g),
             timesteps=torch.arange(3).expand(2, 3))
    with torch.no_grad():
        return model(**x).flatten().tolist()

def work(queue):
    x = np.random.default_rng(0).uniform(-1, 1, (200, 7))
    t = Trajectories(x[:, :4], x[:, 4:6], x[:, 6], [20] * 10)
    train.train(t, steps=200, batch_size=8, d=8, n_layer=1, context_len=3, size="small")
    queue.put(predict())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    theirs = queue.get(timeout=200)
    process.join()
    print(json.dumps([theirs, predict()]))
"""


def test_a_spawned_process_trains_in_an_odd_folder_and_another_predicts_the_same(tmp_path):
    """Windows and macOS spawn; LC_ALL=C knows no umlauts."""
    place = tmp_path / "mein Läufe"
    place.mkdir()
    (place / "work.py").write_text(WORK, encoding="utf-8")
    code, out, err = command("work.py", cwd=place, env=dict(PYTHONPATH=str(ROOT), LC_ALL="C"))
    assert code == 0, err
    theirs, ours = json.loads(out.splitlines()[-1])
    assert theirs == ours and len(ours) == 12
    assert not (place / "runs" / "dt-arrays-s0" / "table.txt").exists()


def test_a_checkpoint_written_with_compile_on_loads_with_it_off(tmp_path, monkeypatch):
    """The eager backend stands in for the compiler: what could differ is the names of the weights."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    given = SMALL | dict(steps=10, out=str(tmp_path))
    compiled, plain = (T.train(toy(), compile=on, run=f"{on}", **given)["run"] for on in (True, False))
    a, b = (load_run(run)[0].state_dict() for run in (compiled, plain))
    assert a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)
    assert T.train(toy(), resume=compiled, compile=False)["run"] == compiled
