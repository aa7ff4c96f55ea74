"""Kill a small run again and again, resume it to its end, and compare it with one that was left alone.

    python tests/kill.py                        50 rounds, about ten minutes on one core
    python tests/kill.py --rounds 3 --model dm

Log and weights must be equal bit for bit. A round kills a run one to four times (kill -9), once in its middle
at least: at a random moment from outside, or from inside at a random update, step of an evaluation, half
written file, or file written but not yet renamed. Each attempt is a fork of this process, which has imported
everything and trained nothing.
"""
import argparse
import csv
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))
import matplotlib.backends.backend_agg  # noqa: E402, F401 (what loads late loads here, once for all forks)
import matplotlib.figure  # noqa: E402, F401
import numpy as np  # noqa: E402
import scipy.stats  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401

import train as T  # noqa: E402
from data import Trajectories  # noqa: E402
from envs import make  # noqa: E402
from settings import MODELS  # noqa: E402

# every second update is logged and every eleventh saved, so that a checkpoint holds half a row of the log
GIVEN = dict(steps=220, batch_size=4, d=8, n_layer=1, n_head=1, context_len=3, dropout=0.1, size="small",
             device="cpu", eval_episodes=2, eval_every=80, targets=(20.0, 40.0))
PLACES = ["update", "play", "half", "rename"]


def cart():
    g = np.random.default_rng(0)
    return Trajectories(g.standard_normal((200, 4)), g.integers(0, 2, 200), np.ones(200), [20] * 10,
                        n_actions=2, max_ep_len=500, env_spec={"id": "CartPole-v1", "kwargs": {}})


def trap(place, number):
    """Let this process kill itself at the number-th event of this kind. Returns the counts of events so far.

    With number 0 the events are counted only.
    """
    seen = dict.fromkeys(PLACES, 0)

    def event(name, last_act=lambda: None):
        seen[name] += 1
        if (name, seen[name]) == (place, number):
            last_act()
            os.kill(os.getpid(), signal.SIGKILL)
    update, replace = T.Run.update, os.replace

    def one_update(self):
        event("update")
        update(self)

    def rename(part, path):
        event("half", lambda: os.truncate(part, os.path.getsize(part) // 2))
        event("rename")
        replace(part, path)

    from gymnasium.envs.classic_control.cartpole import CartPoleEnv
    step = CartPoleEnv.step

    def play(self, action):
        event("play")
        return step(self, action)
    T.Run.update, os.replace, CartPoleEnv.step = one_update, rename, play
    return seen


def attempt(model, out, resume, place=None, number=0, seconds=None):
    """One process that trains; from outside it is killed after some seconds.

    Returns (was it killed, its counts of events).
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.stdout = open(os.devnull, "w")
            seen = trap(place, number)
            if resume:
                T.train(cart(), resume=out / "run")
            else:
                T.train(cart(), model=model, out=out, run="run", **GIVEN)
            os.write(writer, " ".join(map(str, seen.values())).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)        # a run that has ended by then is a zombie, which does not mind
    _, status = os.waitpid(pid, 0)
    with open(reader) as f:
        counts = f.read().split()
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"{model} in {out}: training failed, see above")
    return os.WIFSIGNALED(status), dict(zip(PLACES, map(int, counts), strict=bool(counts)))


def same(a, b):
    """Whether two nests of dicts, lists and tensors are equal to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def differences(run, whole):
    """What of a finished run differs from the run left alone; nothing should."""
    wrong = []
    for name in ("last.pt", "best.pt"):
        states = [torch.load(p / name, weights_only=True) for p in (run, whole)]
        for state in states:
            state["settings"]["train"].pop("out")       # the folders differ, and the time that it took
            state.pop("seconds", None)
        if not same(*states):
            wrong.append(name)
    if (run / "log.csv").read_bytes() != (whole / "log.csv").read_bytes():
        wrong.append("log.csv")
    if {p.name for p in run.iterdir()} != {p.name for p in whole.iterdir()}:
        wrong.append(f"the files ({', '.join(sorted(p.name for p in run.iterdir()))})")
    return wrong


def kill_and_resume(model, out, whole, counts, seconds, g):
    """One round in the empty folder out; returns where the kills fell, as text."""
    kills, reached, middle, last = [], 0, False, out / "run" / "last.pt"
    for i in reversed(range(g.randint(1, 4))):
        place = g.choice([*PLACES, "moment"])
        left = g.random() * (1 - reached / GIVEN["steps"])      # a resumed run has fewer events
        where = dict(seconds=seconds * left)
        if place != "moment":
            where = dict(place=place, number=1 + int(counts[place] * left))
        if i == 0 and not middle:       # once at least between the first checkpoint and the last
            shutil.rmtree(out, ignore_errors=True)
            reached, where = 0, dict(place="update", number=g.randint(20, GIVEN["steps"]))
        begun = last.exists()
        if not begun:       # killed before its first checkpoint: it starts again
            shutil.rmtree(out, ignore_errors=True)
        killed, _ = attempt(model, out, begun, **where)
        if last.exists():
            step = torch.load(last, weights_only=True)["done"]      # whole, or this raises
            assert step >= reached, f"{last} went back from update {reached} to {step}"
            reached, middle = step, middle or killed and 0 < step < GIVEN["steps"]
        kills.append(f"{where.get('place', 'moment')}@{reached}" if killed else "missed")
    killed, _ = attempt(model, out, last.exists())
    wrong = differences(out / "run", whole)
    if killed or wrong:
        raise SystemExit(f"{model} after {', '.join(kills)}: {', '.join(wrong)} differ from the run left "
                         f"alone; see {out}")
    return ", ".join(kills)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--model", choices=MODELS, help="default: all six in turn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)        # a fork inherits no threads to wait for
    for name in MODELS:
        importlib.import_module(f"models.{name}")
    make(cart().env_spec).close()
    g, alone, folder = random.Random(args.seed), {}, Path(tempfile.mkdtemp(prefix="kill-"))
    for i in range(args.rounds):
        model = args.model or MODELS[i % len(MODELS)]
        if model not in alone:
            began = time.time()
            _, counts = attempt(model, folder / f"{model}-whole", False)
            alone[model] = counts, time.time() - began
        out = folder / str(i)
        kills = kill_and_resume(model, out, folder / f"{model}-whole" / "run", *alone[model], g)
        print(f"{i + 1:3d} {model:10s} {kills}", flush=True)
        shutil.rmtree(out)
    rows = sum(1 for _ in csv.reader(open(next(folder.glob("*-whole")) / "run" / "log.csv")))
    print(f"{args.rounds} rounds: every run ended with the log ({rows} lines) and the weights of the run "
          "left alone")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
