"""What hours-long runs meet: kills, two processes in one folder, full disks, odd numbers, slips of the hand, warnings.

    pytest tests/test_17_runs.py
"""
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from test_13_train import ROOT, TINY, command, toy

import data
import eval as E
import train as T
from data import Trajectories, UserError
from eval import evaluate, load_run
from settings import MODELS

SMALL = TINY | dict(size="small", device="cpu")


# ------------------------------------------------------------------ kills

def test_a_run_killed_at_random_moments_resumes_to_the_log_and_weights_of_one_left_alone():
    """kill.py of this folder; by hand it makes 50 rounds of all six models."""
    code, out, err = command("tests/kill.py", "--rounds", 3, "--model", "dt")
    assert code == 0 and "3 rounds: every run ended" in out, out + err


def test_one_process_writes_to_a_run_folder_and_its_lock_dies_with_it(tmp_path):
    given = SMALL | dict(out=str(tmp_path))
    run = T.train(toy(), **given)["run"]
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    holder = subprocess.Popen([sys.executable, "-c", f"import pathlib, sys, train\nwith train.hold(pathlib.Path({str(run)!r})):\n"
                               "    print('held', flush=True)\n    sys.stdin.read()"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(T.Busy, match="dt-arrays-s0 is being written by another process") as e:
            T.train(toy(), resume=True, **given)
        assert {p.name: p.read_bytes() for p in run.iterdir()} == before and len(str(e.value).splitlines()) == 1
    finally:
        holder.kill()
        holder.communicate()
    assert T.train(toy(), resume=True, **given)["run"] == run
    with T.hold(run):
        assert T.train(toy(), **given)["run"].name == "dt-arrays-s0-2", "a run that is not resumed takes a folder of its own"


# ------------------------------------------------------------------ disks

@pytest.mark.parametrize("limit, file", [(500, "log.csv"), (5_000, "last.pt")])
def test_a_disk_that_fills_up_gives_one_message_and_leaves_the_last_checkpoint_whole(limit, file, tmp_path, monkeypatch, capsys):
    """A limit on the size of files stands in for a full disk: writing fails half way, as there."""
    resource = pytest.importorskip("resource")
    given = SMALL | dict(out=str(tmp_path), steps=40)
    fill = iter(range(10**6))

    def dump(*args):        # the disk is full from the tenth write on
        if next(fill) == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return rename(*args)
    rename = os.replace
    monkeypatch.setattr(os, "replace", dump)
    try:
        with pytest.raises(SystemExit) as e:
            data.run_command(lambda: T.train(toy(), **given))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    err, run = capsys.readouterr().err, tmp_path / "dt-arrays-s0"
    assert e.value.code == 2 and len(err.splitlines()) == 1 and f"cannot write {run / file}" in err and "nothing was lost" in err
    assert torch.load(run / "last.pt", weights_only=True)["step"] == 10 and {p.name for p in run.iterdir()} == {"lock", "log.csv", "last.pt"}
    monkeypatch.undo()
    assert "resuming after update 10" in (T.train(toy(), resume=True, **given), capsys.readouterr().out)[1]


@pytest.fixture
def no_root():
    """Root may write anywhere: do without."""
    if os.name == "nt":
        pytest.skip("Unix permissions")
    me = os.geteuid()
    folder = Path(tempfile.mkdtemp())
    T.train(toy(), **SMALL | dict(out=str(folder / "first")))       # Python may be root's alone: what loads late loads now
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
        pytest.skip("the packages are root's alone: as another user, torch and matplotlib cannot load what they load late")
    given = SMALL | dict(out=str(no_root / "runs"))
    run = T.train(toy(), **given)["run"]
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    for folder, resume in ((run.parent, False), (run, True)):
        for p in (*folder.iterdir(), folder):
            p.chmod(0o500)
        with pytest.raises(UserError, match="cannot write to") as e:
            T.train(toy(), resume=resume, **given | dict(steps=10**9))
        assert len(str(e.value).splitlines()) == 1
        for p in (*folder.iterdir(), folder):
            p.chmod(0o700)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def test_an_output_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="cannot write to .*--out"):
        T.train(toy(), **SMALL | dict(out=str(tmp_path / "runs")))


# ------------------------------------------------------------------ numbers

def numbers(case):
    """(a data set, settings, targets) of one odd kind."""
    g, N = np.random.default_rng(0), 120
    x = dict(states=g.standard_normal((N, 4)), actions=g.uniform(-1, 1, (N, 2)), rewards=g.random(N), lengths=[40] * 3)
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


CASES = ["extreme targets", "constant and huge states", "episodes beyond the timestep table", "K = 1, batch 1", "one episode of length 1",
         "equal rewards", "rewards of a million"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_odd_numbers_give_finite_losses_and_actions_in_float32_and_bfloat16(name, case):
    t, given, targets = numbers(case)
    cfg, values, origin = T.settings(SMALL | dict(env="arrays", model=name, d=16, lr=1e-2, warmup=0) | given)
    model, windows, meta, _ = T.prepare(cfg, values, origin, t)
    step = T.make_step(model, windows, T.make_optimizer(model, cfg, torch.device("cpu")), cfg, torch.Generator().manual_seed(0))
    for _ in range(10):
        assert all(x.isfinite().all() for x in step().values())
    assert all(p.isfinite().all() for p in model.parameters())
    model.eval()
    K, n = values["context_len"], len(targets)
    for T_ in (1, K, K + 7):        # a history is acted on from its first step to beyond the window and the table
        states = (t.states[torch.arange(T_) % len(t)] - meta["state_mean"]) / meta["state_std"]
        history = (states.expand(n, -1, -1), torch.zeros(n, T_, 2), t.rewards[torch.arange(T_) % len(t)][None, :, None].expand(n, -1, -1),
                   (torch.tensor(targets) / meta["rtg_scale"])[:, None, None].expand(-1, T_, 1),
                   torch.arange(T_).clamp(max=values["max_ep_len"] - 1).expand(n, -1))
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
                loss, _ = model.loss(windows.sample(cfg.batch_size, torch.Generator().manual_seed(1)))
                a = model.act(*history)
            assert loss.isfinite() and a.shape == (n, 2) and a.isfinite().all() and a.abs().max() <= 1


@pytest.mark.parametrize("name", MODELS)
def test_huge_states_of_an_environment_play_to_the_end(name):
    """CartPole's numbers are far outside the narrow states of these data: its normalised states are of the order of millions."""
    t = Trajectories(1e-5 * np.random.default_rng(0).standard_normal((60, 4)), np.zeros(60, int), np.ones(60), [20] * 3, n_actions=2,
                     max_ep_len=500, env_spec={"id": "CartPole-v1", "kwargs": {}})
    cfg, values, origin = T.settings(SMALL | dict(env="arrays", model=name, d=16))
    model, _, meta, _ = T.prepare(cfg, values, origin, t)
    rows = evaluate(model, meta, [("random", x, 1) for x in (1e9, -1e9, 0.0)])
    assert all(8 <= r["return_mean"] <= 500 for r in rows)


# ------------------------------------------------------------------ slips

SLIPS = [
    ("train --modle dt", "no flag --modle; did you mean --model"), ("train --model dtt", "no model is called 'dtt'; did you mean dt"),
    ("train --model", "--model: expected one argument"), ("train dt", "what is 'dt'? Settings are given as --name value"),
    ("train --env hoper-medium", "'hoper-medium'; did you mean hopper-medium"), ("train --env Hopper-v5", "did you mean hopper-medium"),
    ("train --lr abc", "--lr: 'abc' is not a number"), ("train --lr -1", "--lr must be above 0, not -1"),
    ("train --steps 1e4", "--steps: '1e4' is not a whole number"), ("train --steps 20 40", "what is '40'?"),
    ("train --targets x", "--targets: 'x' is not a number"), ("train --targets 1,2", "parted by spaces"),
    ("train --batch_size 0", "--batch_size must be above 0"), ("train --context_len 0", "--context_len must be at least 1, not 0"),
    ("train --d 100 --n_head 3", "--d 100 must be a multiple of --n_head 3"), ("train --rtg_scale inf", "--rtg_scale must be above 0 and finite"),
    ("train --seeds a b", "--seeds: invalid int value: 'a'"), ("train --seeds", "--seeds: expected at least one"),
    ("train --device cuda:7", "--device cuda:7"), ("train --device tpu", "no such device; auto, cpu or cuda"),
    ("train --model dc --window -1", "window=-1"), ("train --model lsdt --conv_ratio 7", "conv_ratio=7.0 is a share"),
    ("train --model lsdt --kernel 0", "kernel=0"), ("train --model dm --fixed_k 0", "fixed_k one above 0"),
    ("train --model starformer --env breakout --source local --patch 5", "patch=5 does not divide"),
    ("train --model radt --cross_attention false --adaln false", "leave one of them on"),
    ("train --model dt --use_actions false --goal action", "use_actions=True"), ("train --model dt --mixer soft", "--mixer: invalid choice: 'soft'"),
    ("train --run a/b", "--run a/b: the name of a folder in --out"),
    ("train --resume", "nothing to resume: no runs/dt-pointmaze-umaze-s0"), ("train --resume runs/x", "what is 'runs/x'?"),
    ("train --env minari:foo", "'foo' is not a Minari id"), ("train --env hopper-medium-replay --source minari", "use --source d4rl"),
    ("train --data nonexistent", "--data nonexistent: there is no folder"), ("train --source dqn", "no Atari game; source dqn has breakout"),
    ("train --show --model dc --env hopper-medium --act_dim 9", "--act_dim comes from the data, where it is 3"),
    ("eval runs/none", "runs/none"), ("eval empty", "empty"), ("eval file", "file"), ("eval run --video out.avi", "a .gif or .mp4 file"),
    ("eval run --start nowhere", "--start nowhere: there are: random"), ("eval run --targets nan", "--targets must be finite"),
    ("eval run --episodes 0", "--episodes must be at least 1"), ("eval run --device tpu", "no such device"),
    ("eval run --checkpoint best", "best.pt"),
    ("data collect", "which environment? python data.py collect ENV"), ("data collect hoper-medium", "did you mean hopper-medium"),
    ("data collect kitchen-complete", "cannot be regenerated here"), ("data info minari:x", "'x' is not a Minari id"),
    ("data collect hopper-medium --steps 0", "--steps must be at least 1"), ("data download hopper-medium --data nonexistent", "there is no folder")]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A folder with a run, an empty folder and a file in it."""
    folder = tmp_path_factory.mktemp("slips")
    t = Trajectories(np.zeros((60, 4)), np.zeros(60, int), np.ones(60), [20] * 3, n_actions=2, env_spec={"id": "CartPole-v1", "kwargs": {}})
    T.train(t, **SMALL | dict(out=str(folder), run="run"))
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    return folder


@pytest.mark.parametrize("line, words", SLIPS)
def test_a_slip_ends_in_a_short_message_that_names_it(line, words, played, monkeypatch, capsys):
    """Exit code 2, at most three lines, no traceback; before any data are loaded or collected."""
    script, *argv = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [script + ".py", *argv])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(played / "none"))
    monkeypatch.chdir(played)
    if script == "train":
        monkeypatch.setattr(data, "collect_local", lambda *_, **__: pytest.fail("data are collected first"))
    with pytest.raises(SystemExit) as e:
        data.run_command(dict(train=T.main, eval=E.command_line, data=data.command_line)[script])
    err = capsys.readouterr().err
    assert e.value.code == 2 and words in err and len(err.splitlines()) <= 3 and err.startswith("error: ") and "Traceback" not in err


@pytest.mark.parametrize("given, words", [
    (dict(steps=20.5), "--steps takes int, not 20.5"), (dict(steps="20"), "--steps takes int, not '20'"), (dict(lr="1e-3"), "--lr takes float"),
    (dict(batch_size=8.0), "--batch_size takes int"), (dict(graph=1), "--graph takes bool"), (dict(targets=5.0), "--targets takes tuple"),
    (dict(d=True), "--d takes int"), (dict(betas=(0.9, "x")), "--betas takes tuple"), (dict(env=3), "--env takes str"),
    (dict(model=None), "no model is called None"), (dict(stepz=3), "did you mean steps")])
def test_a_keyword_of_the_wrong_type_is_refused_by_name(given, words, tmp_path):
    """20.5 updates would never be done: the loop would end without its last checkpoint."""
    with pytest.raises(UserError, match="^[^\n]*$") as e:
        T.train(toy(), **SMALL | dict(out=tmp_path) | given)
    assert words in str(e.value) and not list(tmp_path.iterdir())


# ------------------------------------------------------------------ warnings

def test_nothing_is_said_on_stderr_when_all_is_well(tmp_path, monkeypatch):
    """Training, evaluation and data, each in a process of its own, outside a terminal; what a user cannot act on is noise."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    data.collect_local("pointmaze-umaze", 900)
    flags = "--steps 20 --eval_episodes 1 --eval_every 10 --targets 50 --d 8 --n_layer 1 --context_len 3".split()
    for args in (["train.py", *flags, "--out", tmp_path / "runs"], ["eval.py", tmp_path / "runs" / "dt-pointmaze-umaze-s0", "--start", "far"],
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
    x = dict(states=torch.randn(2, 3, 4, generator=g), actions=torch.rand(2, 3, 2, generator=g), rewards=torch.rand(2, 3, 1, generator=g),
             rtg=torch.rand(2, 3, 1, generator=g), timesteps=torch.arange(3).expand(2, 3))
    with torch.no_grad():
        return model(**x).flatten().tolist()

def work(queue):
    x = np.random.default_rng(0).uniform(-1, 1, (200, 7))
    train.train(Trajectories(x[:, :4], x[:, 4:6], x[:, 6], [20] * 10), steps=200, batch_size=8, d=8, n_layer=1, context_len=3, size="small")
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


def test_a_spawned_process_trains_in_a_folder_with_a_space_and_an_umlaut_and_another_predicts_the_same(tmp_path):
    """Windows and macOS spawn; LC_ALL=C knows no umlauts."""
    place = tmp_path / "mein Läufe"
    place.mkdir()
    (place / "work.py").write_text(WORK, encoding="utf-8")
    code, out, err = command("work.py", cwd=place, env=dict(PYTHONPATH=str(ROOT), LC_ALL="C"))
    assert code == 0, err
    theirs, ours = json.loads(out.splitlines()[-1])
    assert theirs == ours and len(ours) == 12 and (place / "runs" / "dt-arrays-s0" / "table.txt").exists() is False


def test_a_checkpoint_written_with_compile_on_loads_with_it_off(tmp_path, monkeypatch):
    """The eager backend stands in for the compiler: what could differ is the names of the weights."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    given = SMALL | dict(steps=10, out=str(tmp_path))
    compiled, plain = (T.train(toy(), compile=on, run=f"{on}", **given)["run"] for on in (True, False))
    a, b = (load_run(run)[0].state_dict() for run in (compiled, plain))
    assert a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)
    assert T.train(toy(), resume=True, compile=False, run="True", **given)["run"] == compiled
