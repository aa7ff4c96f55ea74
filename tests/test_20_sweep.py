"""Many runs: the same numbers as one by one, whatever trains them and whatever interrupts it."""
import csv
import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from test_13_train import ROOT, cart_set, here

import settings
import sweep
import train
from errors import UserError

GIVEN = dict(size="small", device="cpu", steps=40, batch_size=4, d=8, n_layer=1, n_head=1, context_len=3,
             dropout=0.1, eval_episodes=2, eval_every=15, targets=(20.0, 40.0))


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield cart_set(tmp_path_factory.mktemp("data"), patch)


@pytest.fixture(scope="module")
def todo(cart):
    """Twelve runs: three models, two seeds, two learning rates."""
    return [GIVEN | dict(model=model, env=cart, seed=seed, lr=lr)
            for model, seed, lr in itertools.product(("dt", "dc", "radt"), (0, 1), (1e-3, 1e-2))]


@pytest.fixture(scope="module")
def alone(todo, tmp_path_factory):
    """The folder of the same runs, trained one by one in this process with one thread."""
    out, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    for given in todo:
        train.train(**given, out=str(out), run=sweep.name_of(given))
    torch.set_num_threads(threads)
    return out


def same(folder, other):
    """Whether two run folders hold the same weights, log and rows."""
    a, b = (torch.load(x / "last.pt", weights_only=True) for x in (folder, other))
    weights = all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
    logs = (folder / "log.csv").read_bytes() == (other / "log.csv").read_bytes()
    return weights and logs and sweep.finished(folder)["rows"] == sweep.finished(other)["rows"]


def table_file(todo, path):
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, [*todo[0], "use_actions"])
        out.writeheader()
        out.writerows(given | dict(targets="20 40") for given in todo)
    return path


def begin(*args):
    command = [sys.executable, "sweep.py", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_sweep_killed_five_times_ends_with_the_numbers_of_single_runs(todo, alone, tmp_path):
    """kill -9 of the sweep alone: its processes must end too, or two would train the same run."""
    g, file = random.Random(0), table_file(todo, tmp_path / "runs.csv")
    out = tmp_path / "runs"
    for _ in range(5):
        process, before = begin("--file", file, "--out", out), time.time()
        while time.time() - before < 120 and process.poll() is None and not list(out.glob("*/last.pt")):
            time.sleep(0.1)
        time.sleep(g.uniform(0, 3))
        process.kill()
        process.communicate()
    process = begin("--file", file, "--out", out)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    folders = {path.name for path in out.iterdir() if path.is_dir()} - {"sweep"}
    assert folders == {sweep.name_of(given) for given in todo}
    assert all(same(out / name, alone / name) for name in folders)
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24 and sum(row["headline"] == "True" for row in rows) == 12
    assert {row["label"] for row in rows} == {"lr=0.001", "lr=0.01"}
    table = (out / "table.txt").read_text()
    assert table in text and "dc lr=0.01" in table and (out / "scores.png").stat().st_size > 1000


def test_two_sweeps_at_once_train_no_run_twice(todo, alone, tmp_path):
    file, out = table_file(todo[:4], tmp_path / "runs.csv"), tmp_path / "runs"
    both = [begin("--file", file, "--out", out, "--workers", 1) for _ in range(2)]
    texts = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    for given in todo[:4]:
        name = sweep.name_of(given)
        assert (out / "sweep" / f"{name}.txt").read_text().count("trained in") == 1
        assert same(out / name, alone / name)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(1, get_context("spawn"), sweep.begin_process) as pool:
        yield pool


def in_turns(todo, out, pool, lanes):
    """What together() does with runs, on the CPU in place of a GPU."""
    (out / "sweep").mkdir(exist_ok=True)
    runs, threads = {out / sweep.name_of(given): given for given in todo}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return dict(sweep.together(runs, lanes, pool, torch.device("cpu")))
    finally:
        torch.set_num_threads(threads)


def test_runs_that_take_turns_have_the_numbers_of_single_runs(todo, alone, pool, tmp_path, monkeypatch):
    """Also one that was stopped before, beside one that ends early and one that diverges."""
    stopped, short, bad = todo[0], todo[4] | dict(steps=10), todo[8] | dict(lr=10.0, clip=1e30)
    turns, update = [], train.Run.update

    def watched(run):
        turns.append(run.folder.name)
        if run.done == 12 and run.folder.name == sweep.name_of(bad):
            next(run.model.parameters()).data.fill_(float("nan"))
        update(run)
    monkeypatch.setattr(train.Run, "update", watched)
    first = sweep.turns(stopped, tmp_path / sweep.name_of(stopped), pool)
    (tmp_path / "sweep").mkdir()
    while not list(tmp_path.glob("*/last.pt")):
        next(first)
    first.close()
    turns.clear()
    results = in_turns([*todo[:6], short, bad], tmp_path, pool, 3)
    names = [sweep.name_of(given) for given in (*todo[:6], short)]
    assert all(same(tmp_path / name, alone / name) for name in names[:6])
    assert sweep.finished(tmp_path / names[6])["steps"] == 10
    assert "diverged" in results[tmp_path / sweep.name_of(bad)]["error"]
    assert len(results) == 8 and len(set(turns[:3])) == 3, "three at once, one update each"
    assert turns.count(names[0]) < 40, "the stopped run went on where it was"
    again = in_turns([*todo[:6], short], tmp_path, pool, 3)
    assert len(again) == 7 and turns.count(names[1]) == 40, "finished runs are found again"


def test_a_run_that_does_not_fit_beside_others_comes_later(todo, alone, pool, tmp_path, monkeypatch):
    update, seen = train.Run.update, []

    def full(run):
        if run.done == 7 and not seen:
            seen.append(run.folder.name)
            raise torch.OutOfMemoryError("no room")
        update(run)
    monkeypatch.setattr(train.Run, "update", full)
    results = in_turns(todo[:3], tmp_path, pool, 3)
    assert len(results) == 3 and seen
    assert all(same(folder, alone / folder.name) for folder in results)


def test_each_run_has_the_random_numbers_of_its_own(todo, pool, tmp_path):
    """What others draw, and what is drawn outside, changes nothing of a lane's numbers."""
    (tmp_path / "sweep").mkdir()
    before = torch.get_rng_state()
    lane = sweep.Lane(sweep.turns(todo[0], tmp_path / "run", pool), torch.device("cpu"))
    lane.turn()
    state = lane.cpu
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(state, before)
    torch.rand(5)
    lane.turn()
    assert not torch.equal(lane.cpu, state), "dropout draws"
    lane.turns.close()


@pytest.mark.parametrize("words, message", [
    ("--models dt --colour red", "dt has no setting 'colour'"), ("--models dt dd", "no model is called 'dd'"),
    ("--lr 1e-3 fast", "--lr takes a number, not 'fast'"), ("dt", "what is 'dt'?"),
    ("--models dt --d 10 --n_head 3", "n_head=3 does not divide d=10"),
    ("--envs no-such-thing", "no environment is called"), ("--file no.csv", "no.csv cannot be read")])
def test_a_wrong_column_or_value_is_one_message_before_anything_starts(words, message, tmp_path, capsys):
    code, _, err = here(sweep.main, capsys, *words.split(), "--out", tmp_path / "runs")
    assert code == 2 and message in err and "Traceback" not in err and not (tmp_path / "runs").exists()


def test_a_name_is_decided_by_what_decides_numbers():
    given = dict(model="dt", env="hopper-medium", seed=3)
    name = sweep.name_of(given)
    assert name.startswith("dt-hopper-medium-s3-")
    assert name == sweep.name_of(given | dict(out="x", device="cpu"))
    steps = settings.resolve(given).train.steps
    assert name == sweep.name_of(given | dict(steps=steps)), "a default, said aloud"
    others = [sweep.name_of(given | dict(lr=0.5)), sweep.name_of(given | dict(source="local"))]
    assert len({name, *others}) == 3


def test_every_combination_of_the_lists_is_a_run():
    """Settings that take several numbers take all that follow, as on train.py's command line."""
    runs = sweep.listed("--models dt dc --seeds 0 1 --targets 20 40 --betas".split() + ["0.9 0.95"])
    assert len(runs) == 4 and runs[0] == dict(model="dt", seed="0", targets="20 40", betas="0.9 0.95")
    assert settings.resolve(runs[0]).train.targets == (20, 40)
    several = {f.name for f in dataclasses.fields(settings.TrainConfig) if "tuple" in str(f.type)}
    assert several == sweep.MANY
    assert sweep.listed("--use_actions --lr 1 2".split()) == [
        dict(use_actions=True, lr="1"), dict(use_actions=True, lr="2")]
    assert sweep.listed("--lr=1e-3 2e-3 --no-goal --rtg-scale=5".split()) == [
        dict(lr="1e-3", goal="none", rtg_scale="5"), dict(lr="2e-3", goal="none", rtg_scale="5")]


def test_a_killed_process_is_a_message(cart, tmp_path, monkeypatch):
    """As the system kills one that takes too much memory."""
    class Pool(ProcessPoolExecutor):
        def submit(self, function, *args):
            return super().submit(os._exit, 9)
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", Pool)
    with pytest.raises(UserError, match="a process was killed.*--workers"):
        sweep.sweep([GIVEN | dict(env=cart, model="dt")], tmp_path, workers=1)


def test_tasks_of_a_cluster_one_node_of_which_dies_end_as_local_runs(todo, alone, tmp_path):
    """Two nodes of one core; one is killed once it has sent a checkpoint back."""
    pytest.importorskip("ray")
    script = f"""
import pathlib, sys, threading, time
sys.path[:0] = [{str(ROOT)!r}]
import sweep
from ray.cluster_utils import Cluster
if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False))
    node = [cluster.add_node(num_cpus=1) for _ in range(2)][0]
    out = pathlib.Path({str(tmp_path)!r})
    def kill():
        while not list(out.glob("*/last.pt")):
            time.sleep(0.1)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
    threading.Thread(target=kill, daemon=True).start()
    (out / "sweep").mkdir()
    runs = {{out / sweep.name_of(given): given for given in {todo[::5]!r}}}
    ended = [folder.name for folder, result in sweep.over_ray(runs, cluster.address, dict(num_cpus=1), 0.5)]
    assert sorted(ended) == sorted(folder.name for folder in runs), ended
"""
    code = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
                          timeout=400, env=os.environ | dict(RAY_DEDUP_LOGS="0"))
    assert code.returncode == 0, code.stdout[-2000:] + code.stderr[-2000:]
    assert all(same(tmp_path / name, alone / name) for name in map(sweep.name_of, todo[::5]))


def test_a_run_killed_before_its_first_checkpoint_begins_again(todo, alone, tmp_path):
    folder = tmp_path / sweep.name_of(todo[0])
    (tmp_path / "sweep").mkdir()
    folder.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = sweep.work(todo[0], folder)
    torch.set_num_threads(threads)
    assert result and same(folder, alone / folder.name)
    assert {path.name for path in tmp_path.iterdir()} == {"sweep", folder.name}


def test_one_runs_unexpected_error_is_its_row(todo, tmp_path, monkeypatch):
    (tmp_path / "sweep").mkdir()
    monkeypatch.setattr(train, "train", lambda **_: 1 / 0)
    result = sweep.work(todo[0], tmp_path / "run")
    assert "division by zero" in result["error"] and result["rows"] == []
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "result.json").write_text("{")
    assert sweep.finished(tmp_path / "run") is None, "half a file is no result"


def test_plans_that_differ_are_compared_at_their_headlines_alone(tmp_path):
    """As after a change of the data: other targets, and success told by one of them only."""
    def run(seed, targets, success):
        rows = [dict(start="random", target=x, episodes=1, achieved=[x + seed], return_mean=x + seed,
                     score=None, success=success, abs_error=float(seed)) for x in targets]
        return dict(model="dt", env="e", seed=seed, label="", asked=targets[0], rows=rows)
    runs = [run(0, (20.0, 40.0), 100.0), run(1, (30.0,), None)]
    lines = sweep.summary(runs).splitlines()
    assert len(lines) == 3 and lines[2].split()[:4] == ["e", "dt", "2", "random"]
    sweep.picture(runs, tmp_path / "scores.png")
    sweep.write_csv(runs, tmp_path / "results.csv")
    with open(tmp_path / "results.csv", newline="") as file:
        assert [row["headline"] for row in csv.DictReader(file)] == ["True", "False", "True"]


def test_a_file_of_runs_may_have_spaces_a_mark_and_empty_lines(tmp_path):
    text = "\ufeffmodel, seed, targets\ndt, 0, 20 40\n,,\n\ndc, 1,\n"
    (tmp_path / "runs.csv").write_text(text, encoding="utf-8")
    assert sweep.filed(tmp_path / "runs.csv") == [
        dict(model="dt", seed="0", targets="20 40"), dict(model="dc", seed="1")]
    (tmp_path / "runs.csv").write_text("model,seed\ndt,0,1\n")
    with pytest.raises(UserError, match="not every line has as many cells"):
        sweep.filed(tmp_path / "runs.csv")
    (tmp_path / "runs.csv").write_text("model,seed\n")
    with pytest.raises(UserError, match="no run is asked for"):
        sweep.sweep(sweep.filed(tmp_path / "runs.csv"), tmp_path / "out")
