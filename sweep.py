"""Many runs: over processes, together on one GPU, or over a Ray cluster.

    python sweep.py --models dt dc --envs hopper-medium-replay walker2d-medium --seeds 0 1 2
    python sweep.py --models dt --envs pointmaze-umaze --seeds 0 1 --context_len 3 20 --lr 1e-3 3e-4
    python sweep.py --file runs.csv         a line a run; columns are settings, empty cells are left out
    python sweep.py ... --workers 4         runs at once; otherwise one a core, or 8 on a GPU
    python sweep.py ... --ray auto          as tasks of a Ray cluster (pip install ray): auto, or its address

Every setting of train.py may have several values here, but for those that take several numbers: --targets
50 100 150 is one value for all runs. In a file, too, such numbers stand in one cell, parted by spaces.
A run's folder is named by its settings: the same command again finds finished runs and goes on with the
others. The folder --out gets results.csv (a row a run and target), table.txt and scores.png.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import contextlib
import csv
import functools
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path

import filelock
import numpy as np
import torch
from tqdm import tqdm

import data
import envs
import settings as config
import train
from errors import Parser, UserError, explained, run_command, short
from eval import alignments, evaluate, interval
from policies import collect

UNNAMED = {"out", "run", "device"}      # settings that decide no number
MANY = {"targets", "betas"}     # settings of several numbers
COLUMNS = (
    "model env label seed dataset source start target headline episodes return_mean return_std score success "
    "abs_error steps seconds machine date error").split()


# ------------------------------------------------------------------- one run

def name_of(given, kind=config.Settings):
    """A run's folder: model, environment, seed, and eight digits that all of its settings decide."""
    values = config.resolve(given, kind).values()
    version = collect.SETS[values["env"]].version if values["env"] in collect.SETS else 0
    text = json.dumps([version, {key: x for key, x in values.items() if key not in UNNAMED}], sort_keys=True)
    name = "{model}-{env}-s{seed}-".format(**values) + hashlib.sha1(text.encode()).hexdigest()[:8]
    return name.replace("minari:", "").replace("/", "-")


def finished(folder):
    """What a run's result.json says, or None."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def beside(folder, ending):
    """A file about a run that must be there before its folder is."""
    return folder.parent / "sweep" / f"{folder.name}.{ending}"


def how(given, folder):
    """Arguments of train.train(): to go on with a run, or to begin it."""
    if (folder / "last.pt").exists():
        return dict(resume=folder) | {key: given[key] for key in given.keys() & train.MAY_CHANGE}
    if folder.is_dir():     # stopped before its first checkpoint
        with train.hold(folder):
            shutil.rmtree(folder)
    return given | dict(out=str(folder.parent), run=folder.name)


def work(given, folder):
    """Train a run to its end, unless it is; returns its result, or None if another process is at it.

    What it prints goes to sweep/<run>.txt.
    """
    with contextlib.suppress(filelock.Timeout), filelock.FileLock(beside(folder, "lock"), timeout=0):
        if finished(folder) is None:
            text = open(beside(folder, "txt"), "a", encoding="utf-8")
            with text, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                try:
                    train.train(**how(given, folder))
                except Exception as error:      # whatever it is, the other runs go on
                    return failure(error, given, folder)
        return finished(folder)


def failure(error, given, folder, kind=config.Settings):
    """The result of a run that failed. It is kept where the run would fail again."""
    cfg = config.resolve(given, kind).train
    result = dict(
        model=cfg.model, env=cfg.env, dataset=cfg.env, source=cfg.source, seed=cfg.seed, steps=cfg.steps,
        seconds=0.0, machine="", date=time.strftime("%Y-%m-%d"),
        code=config.code_of(cfg.model, cfg.env, also=kind.CODE), asked=None, rows=[], error=short(error))
    if isinstance(error, train.Diverged):
        folder.mkdir(exist_ok=True)
        train.write_result(folder, result)
    return result


# ------------------------------------------------------------------- on this machine

def begin_process():
    """One thread a process, which ends when the process that began it has ended, however that was."""
    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=follow, daemon=True).start()
    torch.set_num_threads(1)
    data.load = functools.lru_cache(1)(data.load)       # runs that follow each other mostly share their data


class Lane:
    """A run's turns() on a device that others use, too. Random numbers, and on CUDA a stream, are its own."""

    def __init__(self, turns, device, stream=None):
        self.turns, self.stream = turns, stream
        self.cuda, self.cpu = None, torch.get_rng_state()
        if device.type == "cuda":
            self.stream = stream or torch.cuda.Stream()
            self.default = torch.cuda.default_generators[torch.cuda.current_device()]
            self.cuda = self.default.clone_state()

    def turn(self):
        """What turns() yields next. Raises StopIteration after the last update."""
        others = torch.get_rng_state()
        torch.set_rng_state(self.cpu)
        if self.cuda:       # a state of its own, and not its numbers in a common one: graphs read it later
            others_cuda = self.default.graphsafe_get_state()
            self.default.graphsafe_set_state(self.cuda)
        try:
            with torch.cuda.stream(self.stream):
                return next(self.turns)
        finally:
            self.cpu = torch.get_rng_state()
            torch.set_rng_state(others)
            if self.cuda:
                self.default.graphsafe_set_state(others_cuda)


def turns(given, folder, pool):
    """A run's updates, one a turn. False is yielded while a process of the pool plays its episodes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(filelock.FileLock(beside(folder, "lock"), timeout=0))
        text = stack.enter_context(open(beside(folder, "txt"), "a", encoding="utf-8"))
        with contextlib.redirect_stdout(text):
            run = stack.enter_context(train.started(**how(given, folder)))
        began = time.perf_counter() - run.seconds
        while run.done < run.cfg.steps:
            run.update()
            plan, checkpoint = run.due()
            if plan:
                weights = {key: x.cpu() for key, x in run.actor.state_dict().items()}
                settings = run.settings.values(), run.settings.origin
                task = pool.submit(play, settings, run.meta, weights, plan)
                while not task.done():
                    yield False
                run.record(task.result())
            run.seconds = time.perf_counter() - began
            if checkpoint:
                run.save()
            yield True


def play(settings, meta, weights, plan):
    """Run.play() in another process, on the device of the run. settings: (values, origin)."""
    settings = config.Settings.of(*settings)
    model = config.model_of(settings).to(config.pick_device(settings.train.device))
    model.load_state_dict(weights)
    return evaluate(model, meta, plan, settings.train.seed, None, settings.train.sample)


def over_processes(todo, workers, pool):
    """Yield (folder, result) of the runs {folder: given} as they end, each trained by a process."""
    waiting, tasks = list(todo), {}
    while waiting or tasks:
        while waiting and len(tasks) < workers:     # what is handed over cannot be taken back
            folder = waiting.pop(0)
            tasks[pool.submit(work, todo[folder], folder)] = folder
        for task in wait(tasks, return_when="FIRST_COMPLETED")[0]:
            folder = tasks.pop(task)
            if result := task.result():
                yield folder, result
            else:       # another sweep is at it
                time.sleep(1)
                waiting.append(folder)


def together(todo, workers, pool, device):
    """The same on one GPU: so many runs take turns in this process; processes play their episodes."""
    waiting, lanes, tasks = dict(todo), {}, {}
    # torch has 32 streams: two lanes that are given the same one would share cuBLAS's work space
    streams = [torch.cuda.Stream() if device.type == "cuda" else None for _ in range(min(workers, 32))]
    workers = len(streams)
    while waiting or lanes or tasks:
        while waiting and len(lanes) < workers:
            folder = next(iter(waiting))
            given = waiting.pop(folder)
            lanes[folder] = Lane(turns(given, folder, pool), device, streams.pop())
        busy = False
        for folder in list(lanes):
            try:
                busy |= lanes[folder].turn()
                continue
            except StopIteration:
                tasks[folder] = pool.submit(work, todo[folder], folder)
            except filelock.Timeout:        # another sweep is at it
                waiting[folder] = todo[folder]
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) and len(lanes) > 1:
                    waiting[folder], workers = todo[folder], len(lanes) - 1     # from its last checkpoint
                else:
                    yield folder, failure(error, todo[folder], folder)
            streams.append(lanes.pop(folder).stream)
            if device.type == "cuda":       # for the processes that play
                gc.collect()
                torch.cuda.empty_cache()
        for folder in [folder for folder, task in tasks.items() if task.done()]:
            if result := tasks.pop(folder).result():
                yield folder, result
            else:       # another sweep was quicker
                waiting[folder] = todo[folder]
        if not busy:
            time.sleep(0.01)


# ------------------------------------------------------------------- over a Ray cluster

def packed(folder):
    """{name: content} of the files of a run's folder."""
    return {path.name: path.read_bytes() for path in folder.glob("[!p]*.*")}        # not part-*


def unpack(files, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        train.write_atomically(folder / name, lambda path, content=content: path.write_bytes(content))


def task(given, name, files, every):
    """A run on a node. Yields (None, its folder's files) with each checkpoint, at last (result, files)."""
    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(1) as thread:
        folder, sent = Path(out, name), None
        beside(folder, "").parent.mkdir()
        if files:
            unpack(files, folder)
        training = thread.submit(work, given, folder)
        while not training.done():
            wait([training], every)
            with contextlib.suppress(FileNotFoundError):
                if sent != (sent := (folder / "last.pt").stat().st_mtime):
                    yield None, packed(folder)
        yield training.result(), packed(folder)


def over_ray(todo, address, share, every=60):
    """The same as tasks of a Ray cluster, each with its share {num_cpus, num_gpus} of a node."""
    import ray
    place = dict(working_dir=str(Path(__file__).parent), excludes=["runs", ".git"])
    ray.init(address, runtime_env=place, log_to_driver=False, ignore_reinit_error=True)
    remote = ray.remote(max_retries=0, **share)(task)
    streams, tries = {}, dict.fromkeys(todo, 0)
    with contextlib.ExitStack() as locks:
        for folder in todo:
            locks.enter_context(filelock.FileLock(beside(folder, "lock")))
        waiting = list(todo)
        while waiting or streams:
            for folder in waiting:
                files = packed(folder) if (folder / "last.pt").exists() else {}
                streams[remote.remote(todo[folder], folder.name, files, every)] = folder
            waiting = []
            stream = ray.wait(list(streams), num_returns=1)[0][0]
            folder = streams[stream]
            try:
                result, files = ray.get(next(stream))
                unpack(files, folder)
            except ray.exceptions.RayError as error:        # a node died: on from the last checkpoint sent
                tries[folder] += 1
                result = failure(error, todo[folder], folder) if tries[folder] > 5 else None
                waiting = [] if result else [folder]
            if result or waiting:
                del streams[stream]
            if result:
                yield folder, result


# ------------------------------------------------------------------- all runs, and what came out

def sweep(todo, out="runs", workers=None, ray=None, share=None):
    """Train the runs of a list of settings, or find them finished.

    ray: the address of a cluster, or auto; share: {num_cpus, num_gpus} of a task there.
    Returns (what each run's result.json says, with its label; a table as text). Raises UserError, before
    anything starts, for settings that make no run.
    """
    out = Path(out).expanduser()
    if not todo:
        raise UserError("no run is asked for")
    if len({str(given.get("device")) for given in todo}) > 1 or (workers or 1) < 1:
        raise UserError("a sweep has one --device, and at least one of --workers")
    # a node may have a GPU where this machine has none: sizes are decided here
    todo = [given | {"size": config.resolve(given).train.size} for given in todo]
    todo = {out / name_of(given): given for given in todo}
    results = {folder: finished(folder) for folder in todo}
    left = {folder: todo[folder] for folder, result in results.items() if not result}
    sets = {}
    for given in left.values():
        settings = config.resolve(given)
        cfg = settings.train
        if env := envs.ENVS.get(cfg.env):
            config.check_model(config.fitted(settings, env))
        sets[cfg.env, cfg.source, cfg.data, settings.model.goal != "none", cfg.transitions] = cfg.device
    (out / "sweep").mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(todo), initial=len(todo) - len(left), unit="run")
    with bar, contextlib.ExitStack() as stack:
        if ray:
            ended = over_ray(left, None if ray == "auto" else ray, share or dict(num_cpus=1))
        elif left:
            for which in sets:
                data.load(*which)       # refused, collected or downloaded now
            device = config.pick_device(sets[which])
            cuda = device.type == "cuda"
            workers = workers or (8 if cuda else os.cpu_count())
            pool = stack.enter_context(ProcessPoolExecutor(
                os.cpu_count() if cuda else workers, multiprocessing.get_context("spawn"), begin_process))
            stack.callback(pool.shutdown, cancel_futures=True)
            ended = together(left, workers, pool, device) if cuda else over_processes(left, workers, pool)
        try:
            for folder, result in ended if left else ():
                results[folder] = result
                bar.update()
        except BrokenExecutor as error:
            raise UserError("a process was killed, perhaps for want of memory; try fewer --workers. "
                            "The same command goes on") from error
    words = [[f"{key}={x}" for key, x in given.items() if key not in UNNAMED | {"model", "env", "seed"}]
             for given in todo.values()]
    common = set(words[0]).intersection(*words)
    results = [results[folder] | dict(label=" ".join(x for x in each if x not in common))
               for folder, each in zip(todo, words, strict=True)]
    write_csv(results, out / "results.csv")
    picture(results, out / "scores.png")
    text = summary(results)
    (out / "table.txt").write_text(text + "\n", encoding="utf-8")
    return results, text


def write_csv(results, path):
    """A row for each run and target; of a run that failed one row with its error."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        table.writeheader()
        for result in results:
            for row in result["rows"]:
                table.writerow(result | row | dict(headline=row is headline(result)))
            if not result["rows"]:
                table.writerow(result)


def groups_of(results):
    """{(env, model and label): runs}: they differ in their seed alone. Those that failed are left out."""
    groups = {}
    for run in results:
        if run["rows"]:
            groups.setdefault((run["env"], f"{run['model']} {run['label']}".strip()), []).append(run)
    return groups


def headline(run):
    """The row that stands for a run: at its headline target, from the first start that has it."""
    return next((row for row in run["rows"] if row["target"] == run["asked"]), run["rows"][0])


def summary(results):
    """Text: mean and 95 % interval over seeds, at the headline target; of a single group at every target."""
    groups = groups_of(results)
    lines = [["set", "model", "seeds", "start", "target", "return", "score", "success", "|target - achieved|",
              "rank correlation"]]
    for first, runs in groups.items():
        plans = {tuple((row["start"], row["target"]) for row in run["rows"]) for run in runs}
        each = alignments([run["rows"] for run in runs]) if len(plans) == 1 else ()
        ranks = {start: interval([np.mean([a["rank_correlation"] for a in some])], 2) for start, some in each}
        shown = [run["rows"] if len(groups) == len(plans) == 1 else [headline(run)] for run in runs]
        for rows in zip(*shown, strict=True):
            figures = [interval([row[key] for row in rows])
                       for key in ("return_mean", "score", "success", "abs_error")]
            start, target = rows[0]["start"], np.mean([row["target"] for row in rows])
            lines.append([*first, str(len(runs)), start, f"{target:.1f}", *figures, ranks.get(start, "-")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["mean ± 95 % interval over seeds"]
    text += ["  ".join(x.ljust(n) for x, n in zip(line, widths, strict=True)).rstrip() for line in lines]
    for run in results:
        if "error" in run:
            text.append("{model} on {env} {label} seed {seed}: {error}".format(**run))
    return "\n".join(text)


def picture(results, path):
    """Scores (else success, else returns) at the headline target: a bar for each model, a dot a run."""
    from matplotlib.figure import Figure
    groups = groups_of(results)
    sets = dict.fromkeys(env for env, _ in groups)
    figure = Figure(figsize=(1 + 3 * max(1, len(sets)), 3.4), layout="constrained")
    for i, env in enumerate(sets):
        panel = figure.add_subplot(1, len(sets), i + 1, title=env)
        runs = {label: list(map(headline, group)) for (name, label), group in groups.items() if name == env}
        rows = [row for group in runs.values() for row in group]
        key = next(key for key in ("score", "success", "return_mean")
                   if all(row[key] is not None for row in rows))
        for x, rows in enumerate(runs.values()):
            values = [row[key] for row in rows]
            panel.bar(x, np.mean(values), color="0.8")
            panel.plot([x] * len(values), values, "k.")
        panel.set_xticks(range(len(runs)), runs, rotation=20, ha="right", fontsize=7)
        panel.set_ylabel(key.replace("_", " "))
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------- command line

def listed(words):
    """Every combination of --setting value value ..., as dicts."""
    lists, names = {}, dict(models="model", envs="env", seeds="seed")
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if key == "no-goal":        # as train.py has it
                key, equals, value = "goal", "=", "none"
            key = key.replace("-", "_")
            values = lists.setdefault(names.get(key, key), [])
            values += [value] * bool(equals)
        elif not lists:
            raise UserError(f"what is {word!r}? Settings are given as --name value value ...")
        else:
            values.append(word)
    for key in lists.keys() & MANY:
        lists[key] = [" ".join(lists[key])]
    return [dict(zip(lists, values, strict=True))
            for values in itertools.product(*(values or [True] for values in lists.values()))]


def filed(path):
    """The lines of a CSV file, as dicts."""
    with explained(f"{path} cannot be read", kinds=(OSError, ValueError, csv.Error)):
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [[x.strip() for x in line] for line in csv.reader(file) if any(line)]
    if any(len(line) != len(lines[0]) for line in lines):
        raise UserError(f"{path}: not every line has as many cells as the first")
    return [{key: x for key, x in zip(lines[0], line, strict=True) if x} for line in lines[1:]]


def main():
    parser = Parser(description=__doc__, usage="python sweep.py --models M ... --envs E ... --seeds S ...")
    parser.add_argument("--file")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--ray")
    parser.add_argument("--task_cpus", type=float, default=1, help="of a Ray task")
    parser.add_argument("--task_gpus", type=float, default=0, help="of a Ray task: 0.25, say")
    args, words = parser.parse_known_args()
    todo = [given | more for given in (filed(args.file) if args.file else [{}]) for more in listed(words)]
    share = dict(num_cpus=args.task_cpus, num_gpus=args.task_gpus)
    print("\n" + sweep(todo, args.out, args.workers, args.ray, share)[1])
    print(f"{args.out} holds results.csv, table.txt, scores.png and a folder for each run")


if __name__ == "__main__":
    run_command(main)
