"""Spoilt data files: each ends in a consistent set or in one short message that names the file; none hangs, crashes, eats memory or runs code.

    pytest tests/test_18_fuzz.py
    python tests/test_18_fuzz.py --cases 1000                     of each kind: d4rl, minari, images, replay
    python tests/test_18_fuzz.py --kind minari --first 17 --cases 1 --seed 3        one of them again

Cases run in a process of their own, with 1 GiB of address space beyond what its imports take and 20 s for each, and are told that 256 MiB of
memory are free. Case i of a seed is always the same. Numbers changed inside an array that has no checksum load as other numbers.
"""
import argparse
import gzip
import importlib
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import h5py  # noqa: E402
import torch  # noqa: E402

import data  # noqa: E402
import eval as E  # noqa: E402
import train as T  # noqa: E402
from data import ENVS, UserError, Windows  # noqa: E402

KINDS = ("d4rl", "minari", "images", "replay")
CASES = 100        # of each kind, in a test; more by hand
FREE, SPACE, SECONDS = 2**28, 2**30, 20


# ------------------------------------------------------------------ what a loaded set must satisfy

def check(t, aligned):
    """Raises AssertionError unless t is consistent; aligned: its states and rewards still hold the number of their row, so they must agree."""
    N, E_, K = len(t), len(t.lengths), 3
    lengths = t.lengths.tolist()
    assert sum(lengths) == N > 0 and min(lengths) >= 1, "lengths"
    assert t.starts.tolist() == [sum(lengths[:e]) for e in range(E_ + 1)], "starts"
    assert len(t.states) == len(t.actions) == len(t.rtg) == N and len(t.terminated) == len(t.truncated) == len(t.returns) == E_, "sizes"
    assert t.goals is None or len(t.goals) == N, "goals"
    rewards, slow, left = t.rewards.tolist(), [0.0] * N, 0.0
    last = {int(s) - 1 for s in t.starts[1:]}
    for i in reversed(range(N)):
        left = rewards[i] + (0.0 if i in last else left)
        slow[i] = left
    scale = max(1.0, max(map(abs, rewards)) * max(lengths))
    assert all(math.isfinite(x) and abs(x - y) <= 1e-5 * scale for x, y in zip(t.rtg.tolist(), slow, strict=True)), "returns-to-go"
    if t.n_actions is None:
        assert t.actions.dtype == torch.float32 and bool((t.actions.abs() <= 1).all()), "action bounds"
        assert bool((t.action_high > t.action_low).all()) and bool(torch.isfinite(t.action_high - t.action_low).all()), "bounds"
    else:
        assert t.actions.dtype == torch.int64 and 0 <= int(t.actions.min()) and int(t.actions.max()) < t.n_actions, "action ids"
    if aligned:
        own = t.states[:, 0, 0] if t.stack else t.states[:, 0]
        assert t.raw_returns.tolist() == [float(own[a:b].double().sum()) for a, b in zip(t.starts, t.starts[1:], strict=False)], "rows have moved"
    windows = Windows(t, K)
    batch = windows.at(torch.randint(N, (min(N, 8),), generator=torch.Generator().manual_seed(0)))
    assert all(bool(torch.isfinite(x.float()).all()) for x in batch.values()) and bool(batch["mask"][:, 0].all()), "windows"
    assert int(batch["timesteps"].max()) < t.max_ep_len, "timesteps"
    t.summary()


# ------------------------------------------------------------------ whole files, in which the row number i stands in states, rewards and actions

def rows(N, S, A):
    i = np.arange(N)
    return dict(observations=np.repeat(i[:, None], S, 1).astype(np.float32) + np.float32([0, *[0.5] * (S - 1)]),
                actions=np.repeat(i[:, None] % 7 / 7, A, 1).astype(np.float32), rewards=i.astype(np.float32))


def write_d4rl(folder):
    x = rows(60, 11, 3) | dict(terminals=np.arange(60) % 20 == 9, timeouts=np.arange(60) % 20 == 19)
    with h5py.File(folder / "hopper_medium-v2.hdf5", "w") as f:
        for k, v in x.items():
            f.create_dataset(k, data=v, **({"compression": "gzip", "chunks": (20, *v.shape[1:])} if k in ("observations", "actions") else {}))
        f["infos/goal"] = np.zeros((60, 2), np.float32)


BOX = '{"type": "Box", "dtype": "float32", "shape": [%d], "low": [%s], "high": [%s]}'


def write_minari(folder):
    """Written by hand, so that a case costs a file's copy: two lists of numbers, a goal, five episodes of 6 to 10 steps."""
    place = folder / "my" / "set-v0" / "data"
    place.mkdir(parents=True)
    at = 0
    with h5py.File(place / "main_data.hdf5", "w") as f:
        for e, n in enumerate((6, 10, 7, 6, 9)):
            x = rows(at + n + 1, 4, 2)
            g = f.create_group(f"episode_{e}")
            g["observations/observation"], g["observations/achieved_goal"] = x["observations"][at:], x["observations"][at:, [0, 0]]
            g["observations/desired_goal"] = np.ones((n + 1, 2))
            g["actions"], g["rewards"] = x["actions"][at:-1], x["rewards"][at:-1].astype(np.float64)
            g["terminations"], g["truncations"], g["infos/success"] = np.zeros(n, bool), np.arange(n) == n - 1, np.zeros(n + 1, bool)
            g.attrs["id"], g.attrs["total_steps"] = e, n
            at += n
    box = {n: json.loads(BOX % (n, ", ".join(["-1e3"] * n), ", ".join(["1e3"] * n))) for n in (2, 4)}
    space = {"type": "Dict", "subspaces": dict(observation=box[4], achieved_goal=box[2], desired_goal=box[2])}
    import minari
    spec = dict(id="CartPole-v1", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv", reward_threshold=None, nondeterministic=False,
                max_episode_steps=50, disable_env_checker=False, kwargs={}, additional_wrappers=[], vector_entry_point=None)
    (place / "metadata.json").write_text(json.dumps(dict(
        total_episodes=5, total_steps=at, data_format="hdf5", jpeg_encoding=True, observation_space=json.dumps(space),
        action_space=BOX % (2, "-1, -1", "1, 1"), env_spec=json.dumps(spec), dataset_id="my/set-v0", minari_version=minari.__version__)))


def write_images(folder):
    """The same with images of 12 x 12 for states and one of three choices for actions."""
    write_minari(folder)
    place = folder / "my" / "set-v0" / "data"
    facts = json.loads((place / "metadata.json").read_text())
    space = {"type": "Box", "dtype": "uint8", "shape": [12, 12], "low": np.zeros((12, 12), int).tolist(), "high": np.full((12, 12), 255).tolist()}
    action = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}
    (place / "metadata.json").write_text(json.dumps(facts | dict(jpeg_encoding=False, observation_space=json.dumps(space),
                                                                 action_space=json.dumps(action))))
    with h5py.File(place / "main_data.hdf5", "r+") as f:
        for g in f.values():
            i = np.append(g["rewards"][()], 0).astype(np.uint8)
            del g["observations"], g["actions"]
            g["observations"], g["actions"] = np.broadcast_to(i[:, None, None], (len(i), 12, 12)), i[:-1].astype(np.int64) % 3


def replay_arrays(s):
    """20 steps with two ends; the reward and every pixel are the row's number, 1 to 40."""
    i = np.arange(20) + 20 * s + 1
    return dict(observation=np.repeat(i.astype(np.uint8), 84 * 84).reshape(20, 84, 84), action=(i % 4).astype(np.int32),
                reward=i.astype(np.float32), terminal=(i % 20 == 7).astype(np.uint8) + (i % 20 == 15).astype(np.uint8))


def zipped(x):
    raw = io.BytesIO()
    np.save(raw, x, allow_pickle=True)
    return gzip.compress(raw.getvalue(), 1)


def write_replay(folder):
    place = folder / "Breakout" / "1" / "replay_logs"
    place.mkdir(parents=True)
    for s in (0, 1):
        for name, x in replay_arrays(s).items():
            (place / f"$store$_{name}_ckpt.{s}.gz").write_bytes(zipped(x))


WRITE = dict(d4rl=write_d4rl, minari=write_minari, images=write_images, replay=write_replay)
LOAD = dict(d4rl=lambda p: data.load_d4rl(p / "hopper_medium-v2.hdf5", ENVS["hopper-medium"]),
            minari=lambda p: data.load_minari("my/set-v0", download=False), images=lambda p: data.load_minari("my/set-v0", download=False),
            replay=lambda p: data.load("breakout", "dqn", str(p), transitions=1000))
# what a message about the set names: its file, its folder, or its id
NAMES = dict(d4rl=("hopper_medium-v2.hdf5",), minari=("my/set-v0",), images=("my/set-v0",), replay=("Breakout", "frames-1000"))


# ------------------------------------------------------------------ ways to spoil them

SHIFTS = dict(       # these keep the numbers and change which rows there are: what loads must still be aligned
    shorter=lambda x: x[:-1], longer=lambda x: np.concatenate([x, x[-1:]]), twice=lambda x: np.concatenate([x, x]), none=lambda x: x[:0],
    one=lambda x: x[:1], flat=lambda x: x.reshape(-1), turned=lambda x: x.T, wrapped=lambda x: x[None], column=lambda x: x[..., None],
    first_only=lambda x: x[0] if len(x) else x, split=lambda x: x.reshape(2, -1) if x.size % 2 == 0 else x)
KEEPS = dict(        # the same numbers in another type
    f8=lambda x: x.astype("f8"), big=lambda x: x.astype(">f4"), f2=lambda x: x.astype("f2"), c16=lambda x: x.astype("c16"),
    S=lambda x: x.astype("S8"), O=lambda x: np.vectorize(str, otypes=[object])(x) if x.size else x.astype("S1"))
VALUES = dict(
    i8=lambda x: x.astype("i8"), b=lambda x: x.astype(bool), u8=lambda x: np.full(x.shape, 2**64 - 1, "u8"), i1=lambda x: x.astype("i1"),
    void=lambda x: np.zeros(x.shape, [("a", "f4"), ("b", "i2")]), most=lambda x: np.full(x.shape, np.iinfo(np.int64).max),
    least=lambda x: np.full(x.shape, np.iinfo(np.int64).min), negative=lambda x: -np.abs(x.astype("f4")) - 1, zeros=np.zeros_like,
    nines=lambda x: np.full(x.shape, 9, x.dtype), no_columns=lambda x: np.zeros((*x.shape[:1], 0), "f4"),
    wide=lambda x: np.zeros((*x.shape, 3), "f4"))
POINTS = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e31, 1e30, 1e300, -1.0, 255.0, 1e9, 2.0)


def spoil(rng, x):
    """(array, aligned): x with one thing wrong."""
    x = np.asarray(x)
    how = rng.choice(["shift", "keep", "value", "point", "point"])
    if how == "point" and x.size:
        y = x.astype(rng.choice(["f4", "f8"]))
        with np.errstate(over="ignore"):
            y.reshape(-1)[rng.sample(range(y.size), min(y.size, rng.choice([1, 3, 10**6])))] = rng.choice(POINTS)
        return y, False
    table = dict(shift=SHIFTS, keep=KEEPS).get(how, VALUES)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return table[rng.choice(sorted(table))](x), table is not VALUES


def spoil_bytes(rng, b):
    b = bytearray(b)
    how = rng.choice(["cut", "flip", "flip", "head", "head", "zero", "insert", "remove", "swap", "append", "empty", "text"])
    n = len(b)
    if how == "empty" or not n:
        return b""
    if how == "text":
        return rng.choice([b"<html>not found</html>", b"version https://git-lfs.github.com/spec/v1\n", bytes(300), rng.randbytes(3000)])
    at, size = rng.randrange(n), rng.choice([1, 8, 512])
    if how == "cut":
        return bytes(b[:at])
    if how in ("flip", "head"):     # headers and indices of HDF5 and gzip are small: half of the flips go there
        for _ in range(rng.choice([1, 1, 4, 40])):
            b[rng.randrange(n if how == "flip" else min(n, 2500))] = rng.choice([0, 1, 255, rng.randrange(256)])
    elif how == "zero":
        b[at:at + size] = bytes(len(b[at:at + size]))
    elif how == "insert":
        b[at:at] = rng.randbytes(size)
    elif how == "remove":
        del b[at:at + size]
    elif how == "swap":
        other = rng.randrange(n)
        b[at:at + size], b[other:other + size] = b[other:other + size], b[at:at + size]
    else:
        b += rng.randbytes(size)
    return bytes(b)


def spoil_path(rng, path):
    """Something else where the file should be."""
    how = rng.choice(["gone", "folder", "loop", "dangling", "pipe", "device", "unreadable"])
    if how == "unreadable":         # to anyone but root, who reads everything
        return path.chmod(0)
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path.with_name("other"))
        path.with_name("other").symlink_to(path)
    elif how == "dangling":
        path.symlink_to(path.parent / "nowhere")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "device":
        path.symlink_to("/dev/zero")


def nodes(f):
    found = []
    f.visititems(lambda name, node: found.append(name))
    return found


def spoil_hdf5(rng, path, skip_first=False):
    """One dataset or group spoilt; returns whether states and rewards must still agree if the set loads."""
    with h5py.File(path, "r+") as f:
        name = rng.choice(nodes(f))
        node, how = f[name], rng.choice(["array", "array", "array", "array", "gone", "group", "claim", "link", "circle", "outside", "renamed"])
        if how == "array":
            if isinstance(node, h5py.Group):
                return spoil_hdf5_again(rng, f, name)
            x, aligned = spoil(rng, node[()])
            del f[name]
            if rng.random() < 0.3 and x.ndim and x.dtype.kind in "fiu" and x.size:
                f.create_dataset(name, data=x, compression="gzip")
            else:
                f[name] = x
            return aligned
        tail = f[name].shape[1:] if isinstance(node, h5py.Dataset) else ()
        if how == "renamed":
            f.move(name, name + "_old")
            return False
        del f[name]
        if how == "group":
            f.create_group(name + "/inside")
        elif how == "claim":        # rows that are said to be there and take no room in the file, up to a bomb of 8 TB
            f.create_dataset(name, (rng.choice([10**12, 10**9, 2**27]), *tail), "f8", chunks=(1024, *tail), compression=rng.choice([None, "gzip"]))
        elif how == "link":
            f[name] = h5py.SoftLink(rng.choice(["/" + name, "/nowhere", "/"]))
        elif how == "circle":
            f[name] = f["/"]
            f[name + "_too"] = f["/"]
        elif how == "outside":
            f[name] = h5py.ExternalLink(rng.choice([str(path), "/etc/passwd", "nowhere.hdf5"]), "/" + name)
    return False


def spoil_hdf5_again(rng, f, name):
    """An array in a group's place, or an attribute nobody expects."""
    if rng.random() < 0.5:
        f[name].attrs["total_steps"] = rng.choice([-1, 10**15, "x", np.nan])
        return True
    del f[name]
    f[name] = np.zeros(rng.choice([(), (0,), (7,), (7, 2)]))
    return False


ODD = (None, -1, 0, 3, 10**9, 10**12, 2**63, 1.5, float("nan"), "", "x", "float99", "object", True, {}, {"type": "Box"},
       [], [3], [10**9], [-2], [10**5] * 4)


def spoil_json(rng, value):
    """A value somewhere inside replaced or removed; text that is itself JSON is opened."""
    if isinstance(value, str) and value.startswith("{") and rng.random() < 0.9:
        return json.dumps(spoil_json(rng, json.loads(value)))
    if isinstance(value, dict) and value and rng.random() < 0.93:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: spoil_json(rng, value[key])}
    return rng.choice(ODD)


def npy(header, version=(1, 0), body=b""):
    size = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + header + body


def forged(rng, descr="<f4"):
    """A gzip member whose .npy header promises too much, or nothing that can be parsed."""
    shape = rng.choice(["(1000000000000,)", "(-5,)", "(10000000,)", "(20.0,)", "20", "(True,)", "()", "(20, -1)", "(" + "9" * 5000 + ",)", "[20]",
                        "(20,"])
    descr = rng.choice([repr(descr), "'|O'", "'<f2'", "'<U1000000'", "'f99'", "[('a', '<f4')]", "('<f4', (1000,))", "None"])
    how = rng.choice(["shape", "shape", "text", "deep", "long"])
    if how == "long":       # a header said to be 4 GiB long, and 32 MiB of it there, in a small file
        return gzip.compress(npy(b"", (2, 0))[:8] + (2**32 - 1).to_bytes(4, "little") + bytes(2**25), 1)
    if how == "shape":
        header = f"{{'descr': {descr}, 'fortran_order': {rng.choice(['False', 'True', '0'])}, 'shape': {shape}, }}"
    elif how == "deep":
        header = "(" * rng.choice([50, 900, 9000])
    else:
        header = rng.choice(["{'descr'", "__import__('os')", "'''", "{**{}}", "\t1\n  2", "{1: 2}"])
    return gzip.compress(npy(header.encode() + b"\n", body=bytes(rng.choice([0, 80, 10**6]))), 1)


def spoil_replay(rng, folder):
    place = folder / "Breakout" / "1" / "replay_logs"
    s, name = rng.randrange(2), rng.choice(["observation", "action", "reward", "terminal"])
    path = place / f"$store$_{name}_ckpt.{s}.gz"
    how = rng.choice(["array", "array", "array", "bytes", "bytes", "inner", "forged", "path", "names", "cache", "cache"])
    aligned = False
    if how == "array":
        x, aligned = spoil(rng, replay_arrays(s)[name])
        aligned &= name != "terminal"
        path.write_bytes(zipped(x))
    elif how == "bytes":
        path.write_bytes(spoil_bytes(rng, path.read_bytes()))
    elif how == "inner":            # wrong bytes with a right checksum
        path.write_bytes(gzip.compress(spoil_bytes(rng, gzip.decompress(path.read_bytes())), 1))
    elif how == "forged":
        path.write_bytes(forged(rng))
    elif how == "path":
        spoil_path(rng, path)
    elif how == "names":
        where = rng.choice(["$store$_action_ckpt.\u0663.gz", "1\u00b23/action.gz", "$store$_action_ckpt.99999999999999999999.gz", "link/action.gz"])
        if where.startswith("link"):
            (place / "link").symlink_to(folder)
        (place / where).parent.mkdir(exist_ok=True)
        shutil.copy(path, place / where)
    else:                           # the cache that an earlier call wrote
        with open(os.devnull, "w") as null:
            saved, sys.stdout = sys.stdout, null
            try:
                LOAD["replay"](folder)
            finally:
                sys.stdout = saved
        cache = next(folder.rglob("frames-1000"))
        target = cache / rng.choice(["frames.u8", "source.json", "steps.npz", "steps.npz"])
        kind = rng.choice(["bytes", "path", "array"])
        if kind == "path":
            spoil_path(rng, target)
        elif kind == "array" and target.suffix == ".npz":
            with np.load(target) as f:
                x = dict(f)
            key = rng.choice(sorted(x))
            x[key], _ = spoil(rng, x[key])
            np.savez(target, **x)
        else:
            target.write_bytes(spoil_bytes(rng, target.read_bytes()))
    return aligned


def spoil_set(rng, kind, folder):
    if kind == "replay":
        return spoil_replay(rng, folder)
    path = folder / "hopper_medium-v2.hdf5" if kind == "d4rl" else folder / "my" / "set-v0" / "data" / "main_data.hdf5"
    how = rng.choice(["bytes", "bytes", "inside", "inside", "inside", "path", *(["facts"] * 3 if kind != "d4rl" else [])])
    if how == "path":
        spoil_path(rng, path if kind == "d4rl" or rng.random() < 0.5 else path.with_name("metadata.json"))
    elif how == "bytes":
        path.write_bytes(spoil_bytes(rng, path.read_bytes()))
    elif how == "inside":
        return spoil_hdf5(rng, path)
    else:
        facts = path.with_name("metadata.json")
        if rng.random() < 0.2:
            facts.write_bytes(spoil_bytes(rng, facts.read_bytes()))
        else:
            facts.write_text(json.dumps(spoil_json(rng, json.loads(facts.read_text()))))
    return False


# ------------------------------------------------------------------ running them

def one(kind, seed, i, whole, folder):
    """'loaded' or 'refused'; raises whatever should not have happened."""
    rng = random.Random(f"{kind} {seed} {i}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder, symlinks=True)
    aligned = spoil_set(rng, kind, folder)
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    signal.alarm(SECONDS)           # not caught: it ends a process that hangs in C as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            t = LOAD[kind](folder)
            check(t, aligned)
        return "loaded"
    except UserError as e:
        assert str(e).count("\n") < 3 and len(str(e)) < 1500 and any(n in str(e) for n in NAMES[kind]), f"message: {e}"
        return "refused"
    finally:
        signal.alarm(0)


def worker(kind, seed, first, cases, folder):
    """Cases first to first + cases; a line of JSON on stdout before each and after it."""
    import minari  # noqa: F401 (imported before memory is limited)
    folder, out = Path(folder), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)        # what loading prints
    whole = folder / "whole"
    whole.mkdir(exist_ok=True)
    WRITE[kind](whole)
    assert one_whole(kind, whole)
    data.free_memory = lambda: FREE
    size = 1024 * int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize")).split()[1])
    resource.setrlimit(resource.RLIMIT_AS, (size + SPACE, size + SPACE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(first, first + cases):
        print(json.dumps(dict(i=i)), file=out, flush=True)
        try:
            result = one(kind, seed, i, whole, folder / "case")
        except Exception:
            result = traceback.format_exc()[-1500:]
        print(json.dumps(dict(i=i, result=result)), file=out, flush=True)
    print(json.dumps(dict(mib=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)), file=out, flush=True)


def one_whole(kind, whole):
    copy = whole.with_name("copy")
    shutil.copytree(whole, copy, dirs_exist_ok=True)
    os.environ["MINARI_DATASETS_PATH"] = str(copy)
    check(LOAD[kind](copy), True)
    return True


def fuzz(kind, seed, cases, folder, first=0):
    """{"loaded": n, "refused": n, "mib": growth of memory, "bad": [(i, what)]}. A process that dies is started again behind its last case."""
    out, end = dict(loaded=0, refused=0, mib=0, bad=[]), first + cases
    while first < end:
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(parents=True)
        run = subprocess.run([sys.executable, __file__, "--worker", "--kind", kind, "--seed", str(seed), "--first", str(first),
                              "--cases", str(end - first), "--folder", str(folder)], capture_output=True, text=True)
        at = None
        for line in map(json.loads, run.stdout.splitlines()):
            if "mib" in line:
                out["mib"], at = max(out["mib"], line["mib"]), None
            elif "result" not in line:
                at = line["i"]
            elif line["result"] in out:
                out[line["result"]] += 1
            else:
                out["bad"].append((line["i"], line["result"]))
        if run.returncode == 0:
            break
        if at is None:
            raise RuntimeError(f"the worker did not start: {run.stderr[-2000:]}")
        out["bad"].append((at, f"the process ended with {run.returncode}: {run.stderr[-500:]}"))
        first = at + 1
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_spoilt_files_end_in_a_consistent_set_or_in_one_message(kind, tmp_path):
    out = fuzz(kind, 0, CASES, tmp_path / "fuzz")
    assert not out["bad"], f"{len(out['bad'])} cases, the first: {out['bad'][0][0]}\n{out['bad'][0][1]}"
    assert out["mib"] < 400 and out["loaded"] + out["refused"] == CASES and out["loaded"] > 5 and out["refused"] > CASES / 3, out


# ------------------------------------------------------------------ what longer runs found, and rare cases by name

def change(kind, folder, **arrays):
    """Write other arrays in place of those of these names: the D4RL file's, the first episode's, or the first checkpoint's."""
    for name, x in arrays.items():
        if kind == "replay":
            (folder / "Breakout" / "1" / "replay_logs" / f"$store$_{name}_ckpt.0.gz").write_bytes(zipped(x))
            continue
        path = folder / "hopper_medium-v2.hdf5" if kind == "d4rl" else folder / "my" / "set-v0" / "data" / "main_data.hdf5"
        with h5py.File(path, "r+") as f:
            group = f if kind == "d4rl" else f["episode_0"]
            del group[name]
            group[name] = x


@pytest.mark.parametrize("kind,arrays,words", [
    ("d4rl", dict(rewards=np.full(60, 3e38)), "rewards hold numbers beyond 1e"), ("d4rl", dict(rewards=np.full(60, 1e300)), "infinity"),
    ("d4rl", dict(observations=np.full((60, 11), -1e35)), "states hold numbers beyond"), ("d4rl", dict(actions=np.zeros((60, 0))), "numbers are"),
    ("d4rl", {k: 0.0 for k in ("observations", "actions", "rewards", "terminals", "timeouts")}, "differ in length"),
    ("minari", {"observations/observation": np.ones((7, 4)) * 1j}, "not vectors of numbers"),
    ("minari", {"observations/observation": np.full((7, 4), "1.5", "S3")}, "not vectors of numbers"),
    ("minari", {"observations/desired_goal": np.ones((6, 2))}, "7 observations, 6 goals"),
    ("minari", dict(terminations=np.zeros(5, bool)), "5 terminations"), ("minari", dict(truncations=np.zeros(7, bool)), "7 truncations"),
    ("minari", dict(terminations=np.full(6, np.nan)), "one 0 or 1 a step"), ("minari", dict(rewards=np.zeros((6, 2))), r"\[2\]"),
    ("images", dict(actions=np.zeros((1, 6), np.int64)), "1 actions, 6 rewards"),
    ("replay", dict(reward=np.full(20, np.nan, np.float32)), "reward_ckpt.0.gz cannot be read"),
    ("replay", dict(reward=np.full(20, 1e300)), "reward_ckpt.0.gz cannot be read"),
    ("replay", dict(action=np.full(20, 2**64 - 1, np.uint64)), "action id -1"),
])
def test_what_cannot_be_meant_is_refused_by_name(kind, arrays, words, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    WRITE[kind](tmp_path)
    change(kind, tmp_path, **arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=words):
            LOAD[kind](tmp_path)


def test_choices_in_rows_are_not_read_as_a_column():
    with pytest.raises(UserError, match=r"actions of shape \(2, 3\)"):
        data.Trajectories(np.zeros((6, 1)), np.zeros((2, 3), int), np.zeros(6), [6], n_actions=2)


def test_a_set_with_fewer_or_more_episodes_than_it_says_is_refused(tmp_path, monkeypatch):
    """More would allot memory for what is not there, fewer would leave episodes out without a word."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_minari(tmp_path)
    facts = tmp_path / "my" / "set-v0" / "data" / "metadata.json"
    for n in (4, 6, 10**12, -1, None):
        facts.write_text(json.dumps(json.loads(facts.read_text()) | dict(total_episodes=n)))
        with pytest.raises(UserError, match="holds 5 episodes"):
            LOAD["minari"](tmp_path)


def test_a_replay_of_blank_steps_alone_is_refused_each_time(tmp_path):
    """An empty cache would be called damaged, and made again as empty."""
    place = tmp_path / "Breakout"
    place.mkdir()
    for name, x in replay_arrays(0).items():
        (place / f"{name}.gz").write_bytes(zipped(np.zeros_like(x[:3])))
    for _ in range(2):
        with pytest.raises(UserError, match="no steps but blank ones"):
            LOAD["replay"](tmp_path)


def test_folders_may_be_called_anything(tmp_path):
    """A superscript two is a digit to str.isdigit and none to int."""
    write_replay(tmp_path)
    place = tmp_path / "Breakout" / "1" / "replay_logs"
    (place / "1\u00b23").mkdir()
    for path in list(place.glob("*_ckpt.1.gz")):
        path.rename(place / "1\u00b23" / path.name)
    check(LOAD["replay"](tmp_path), True)


# ------------------------------------------------------------------ no file of a stranger's runs code

class Evil:
    """What unpickles into a call: it leaves a file behind."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def refuses(call):
    """Whether call() raises; what it raises is the other tests' matter."""
    try:
        call()
    except Exception:
        return True
    return False


def test_the_trap_works(tmp_path):
    """Without this the tests below could pass because the trap never springs."""
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()
    (tmp_path / "marker").unlink()
    torch.save(Evil(tmp_path / "marker"), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("model", ["dt", "dc", "lsdt", "radt", "starformer", "dm"])
def test_a_checkpoint_with_a_pickle_is_refused_unopened(model, tmp_path):
    marker = tmp_path / "marker"
    for content in (Evil(marker), dict(meta=dict(model=model), model=Evil(marker), settings={}, optimizer={})):
        torch.save(content, tmp_path / "last.pt")
        with pytest.raises(UserError, match="last.pt"):
            E.load_run(tmp_path)
        with pytest.raises(UserError, match="last.pt"):
            T.read_checkpoint(tmp_path / "last.pt", "cpu", {})
        assert refuses(lambda: importlib.import_module(f"models.{model}").Model.load(tmp_path))
    (tmp_path / "last.pt").write_bytes(pickle.dumps(Evil(marker), 2))
    with pytest.raises(UserError, match="last.pt"):
        E.load_run(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_file_with_a_pickle_is_refused_unopened(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "set"))
    (tmp_path / "set").mkdir()
    WRITE[kind](tmp_path / "set")
    marker, raw = tmp_path / "marker", io.BytesIO()
    np.save(raw, np.array([Evil(marker)] * 20, object), allow_pickle=True)
    LOAD[kind](tmp_path / "set")        # and the replay's cache is there
    for path in [p for p in (tmp_path / "set").rglob("*") if p.is_file() and p.name != "frames.u8"]:
        whole, date = path.read_bytes(), path.stat()
        for content in (pickle.dumps(Evil(marker)), raw.getvalue(), gzip.compress(raw.getvalue()), gzip.compress(pickle.dumps(Evil(marker)))):
            path.write_bytes(content)
            assert refuses(lambda: LOAD[kind](tmp_path / "set")) or path.name == "source.json", path.name      # its loss costs a new cache only
        path.write_bytes(whole)
        os.utime(path, ns=(date.st_atime_ns, date.st_mtime_ns))
        LOAD[kind](tmp_path / "set")
    for cache in (tmp_path / "set").rglob("steps.npz"):
        np.savez(cache, actions=np.array([Evil(marker)] * 20, object), rewards=np.zeros(20), lengths=[20], terminated=[True])
        assert refuses(lambda: LOAD[kind](tmp_path / "set"))
    assert not marker.exists()


def test_loading_a_minari_set_makes_no_environment(tmp_path, monkeypatch):
    """A set that leaves its spaces out would have minari make its environment, which is any function with any arguments."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_minari(tmp_path)
    file, marker = tmp_path / "my" / "set-v0" / "data" / "metadata.json", tmp_path / "marker"
    facts = json.loads(file.read_text())
    spec = json.loads(facts["env_spec"]) | dict(entry_point="os:mkdir", kwargs=dict(path=str(marker)))
    for gone in ((), ("observation_space",), ("action_space",), ("observation_space", "action_space")):
        file.write_text(json.dumps({k: v for k, v in (facts | dict(env_spec=json.dumps(spec))).items() if k not in gone}))
        if gone:
            with pytest.raises(UserError, match="metadata.json lacks"):
                LOAD["minari"](tmp_path)
        else:
            LOAD["minari"](tmp_path)
        assert not marker.exists()


# ------------------------------------------------------------------ sets that do not fit

@pytest.mark.parametrize("kind,flag", [("d4rl", "train on a part"), ("minari", "train on a part"), ("images", "--transitions N")])
def test_a_set_that_does_not_fit_is_refused_before_it_is_read_with_its_size_and_the_way_out(kind, flag, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    WRITE[kind](tmp_path)
    LOAD[kind](tmp_path)
    import minari

    def read(*_):
        raise AssertionError("read before it was refused")
    monkeypatch.setattr(h5py.Dataset, "__getitem__", read)
    monkeypatch.setattr(minari.MinariDataset, "iterate_episodes", read)
    monkeypatch.setattr(data, "free_memory", lambda: 100_000 if kind == "images" else 1000)
    with pytest.raises(UserError, match=f"GiB of memory, and 0.0 GiB are free; .*{flag}"):
        LOAD[kind](tmp_path)


def test_the_size_of_a_set_is_that_of_the_copies_that_training_makes(tmp_path, monkeypatch):
    """60 steps of 11 + 3 + 1 float32 and two bools, and a goal of 2: 4,200 bytes, 2.2 times, in 90 % of what is free."""
    write_d4rl(tmp_path)
    need = 60 * (4 * (11 + 3 + 1 + 2) + 2) * 2.2
    monkeypatch.setattr(data, "free_memory", lambda: need / 0.9 + 1)
    assert len(LOAD["d4rl"](tmp_path)) == 60
    monkeypatch.setattr(data, "free_memory", lambda: need / 0.9 - 1)
    with pytest.raises(UserError, match="hopper_medium-v2.hdf5 takes about"):
        LOAD["d4rl"](tmp_path)


def test_free_memory_is_the_machines_or_the_containers_whichever_is_less(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "groups" / "job"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    free = lambda: data.free_memory(proc, tmp_path / "groups")      # noqa: E731
    assert free() == math.inf
    (proc / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    500 kB\n")
    assert free() == 500 * 1024
    (proc / "self" / "cgroup").write_text("4:memory:/old\n0::/job\n")
    (group / "memory.current").write_text("90000\n")
    (group / "memory.stat").write_text("anon 50000\nfile_mapped 7\nfile 30000\n")
    for limit, want in (("max", 500 * 1024), ("100000", 40_000), ("900000000", 500 * 1024), ("10", 0)):
        (group / "memory.max").write_text(limit + "\n")
        assert free() == want
    assert 2**20 < data.free_memory() < 2**50


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=700)
    parser.add_argument("--folder", default="")
    parser.add_argument("--worker", action="store_true")
    a = parser.parse_args()
    if a.worker:
        return worker(a.kind, a.seed, a.first, a.cases, a.folder)
    import tempfile
    for kind in [a.kind] if a.kind else KINDS:
        start = time.time()
        with tempfile.TemporaryDirectory() as folder:
            out = fuzz(kind, a.seed, a.cases, Path(folder) / "fuzz", a.first)
        print(f"{kind}: {a.cases} cases, {out['loaded']} loaded, {out['refused']} refused, {len(out['bad'])} bad, "
              f"memory grew by {out['mib']} MiB, {time.time() - start:.0f} s")
        for i, what in out["bad"]:
            print(f"  case {i}: {what}")


if __name__ == "__main__":
    main()
