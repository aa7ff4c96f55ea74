"""Spoilt data files: each ends in a consistent set or in one short message that names the file; none hangs.

    pytest tests/test_18_fuzz.py
    python tests/test_18_fuzz.py --cases 500                      of each kind: d4rl, minari, images, replay
    python tests/test_18_fuzz.py --kind minari --first 17 --cases 1 --seed 3        one of them again

Files are cut, bytes flipped, arrays given other types, shapes and values, keys taken away, episodes emptied.
Cases run in a process of their own, 20 s each, with 1 GiB of memory beyond the imports'. Case i of a seed is
always the same. Numbers changed inside an array that has no checksum load as other numbers.
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
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import h5py  # noqa: E402
import torch  # noqa: E402

import data  # noqa: E402
import eval as E  # noqa: E402
import train as T  # noqa: E402
from data import Windows  # noqa: E402
from envs import ENVS  # noqa: E402
from errors import UserError  # noqa: E402

KINDS = ("d4rl", "minari", "images", "replay")
CASES = 60      # of each kind, in a test; more by hand
SECONDS, SPACE = 20, 2**30


# ------------------------------------------------------------------ what a loaded set must satisfy


def check(t, aligned):
    """Raises AssertionError unless t is consistent.

    aligned: its states and rewards still hold the number of their row, so they must agree.
    """
    N, lengths = len(t), t.lengths.tolist()
    E_ = len(lengths)
    assert sum(lengths) == N > 0 and min(lengths) >= 1, "lengths"
    assert t.starts.tolist() == [sum(lengths[:e]) for e in range(E_ + 1)], "starts"
    assert len(t.states) == len(t.actions) == len(t.rtg) == N, "steps"
    assert len(t.terminated) == len(t.truncated) == len(t.returns) == E_, "episodes"
    assert t.goals is None or len(t.goals) == N, "goals"
    rewards, slow, left = t.rewards.tolist(), [0.0] * N, 0.0
    last = {int(s) - 1 for s in t.starts[1:]}
    for i in reversed(range(N)):
        left = rewards[i] + (0.0 if i in last else left)
        slow[i] = left
    scale = 1e-5 * max(1.0, max(map(abs, rewards)) * max(lengths))
    pairs = zip(t.rtg.tolist(), slow, strict=True)
    assert all(math.isfinite(x) and abs(x - y) <= scale for x, y in pairs), "returns-to-go"
    if t.n_actions is None:
        assert t.actions.dtype == torch.float32 and bool((t.actions.abs() <= 1).all()), "action bounds"
        assert bool((t.action_high > t.action_low).all()), "bounds"
        assert bool(torch.isfinite(t.action_high - t.action_low).all()), "bounds"
    else:
        assert t.actions.dtype == torch.int64, "action ids"
        assert 0 <= int(t.actions.min()) and int(t.actions.max()) < t.n_actions, "action ids"
    if aligned:
        own = t.states[:, 0, 0] if t.stack else t.states[:, 0]
        sums = [float(own[a:b].double().sum()) for a, b in zip(t.starts, t.starts[1:], strict=False)]
        assert t.raw_returns.tolist() == sums, "rows have moved"
    index = torch.randint(N, (min(N, 8),), generator=torch.Generator().manual_seed(0))
    batch = Windows(t, 3).gather(index)
    assert all(bool(torch.isfinite(x.float()).all()) for x in batch.values()), "windows"
    assert bool(batch["mask"][:, 0].all()) and int(batch["timesteps"].max()) < t.max_ep_len, "windows"
    t.summary()


# ------------------------------------------------------------------ whole files: the reward of row i is i


def rows(N, S, A):
    i = np.arange(N)
    return dict(
        observations=np.repeat(i[:, None], S, 1).astype(np.float32) + np.float32([0, *[0.5] * (S - 1)]),
        actions=np.repeat(i[:, None] % 7 / 7, A, 1).astype(np.float32),
        rewards=i.astype(np.float32),
    )


def write_d4rl(folder):
    x = rows(60, 11, 3) | dict(terminals=np.arange(60) % 20 == 9, timeouts=np.arange(60) % 20 == 19)
    with h5py.File(folder / "hopper_medium-v2.hdf5", "w") as f:
        for k, v in x.items():
            packed = dict(compression="gzip", chunks=(20, *v.shape[1:])) if v.ndim > 1 else {}
            f.create_dataset(k, data=v, **packed)


def box(n):
    return {"type": "Box", "dtype": "float32", "shape": [n], "low": [-1e3] * n, "high": [1e3] * n}


def minari_folder(root):
    return root / "my" / "set-v0" / "data"


def write_minari(folder):
    """By hand, so that a case costs a file's copy: numbers, a goal, five episodes of 6 to 10 steps."""
    import minari

    place, first = minari_folder(folder), 0
    place.mkdir(parents=True)
    with h5py.File(place / "main_data.hdf5", "w") as f:
        for e, n in enumerate((6, 10, 7, 6, 9)):
            x = rows(first + n + 1, 4, 2)
            g = f.create_group(f"episode_{e}")
            g["observations/observation"] = x["observations"][first:]
            g["observations/achieved_goal"] = x["observations"][first:, [0, 0]]
            g["observations/desired_goal"] = np.ones((n + 1, 2))
            g["actions"], g["rewards"] = x["actions"][first:-1], x["rewards"][first:-1].astype(np.float64)
            g["terminations"], g["truncations"] = np.zeros(n, bool), np.arange(n) == n - 1
            g["infos/success"] = np.zeros(n + 1, bool)
            g.attrs["id"], g.attrs["total_steps"] = e, n
            first += n
    space = {"type": "Dict", "subspaces": dict(observation=box(4), achieved_goal=box(2), desired_goal=box(2))}
    spec = dict(
        id="CartPole-v1",
        entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        reward_threshold=None,
        nondeterministic=False,
        max_episode_steps=50,
        disable_env_checker=False,
        kwargs={},
        additional_wrappers=[],
        vector_entry_point=None,
    )
    facts = dict(
        total_episodes=5,
        total_steps=first,
        data_format="hdf5",
        jpeg_encoding=True,
        observation_space=json.dumps(space),
        action_space=json.dumps(box(2) | dict(low=[-1, -1], high=[1, 1])),
        env_spec=json.dumps(spec),
        dataset_id="my/set-v0",
        minari_version=minari.__version__,
    )
    (place / "metadata.json").write_text(json.dumps(facts))


def write_images(folder):
    """The same with pictures of 36 x 36 for states and one of three choices for actions."""
    write_minari(folder)
    place, side = minari_folder(folder), (36, 36)
    bounds = dict(low=np.zeros(side, int).tolist(), high=np.full(side, 255).tolist())
    space = {"type": "Box", "dtype": "uint8", "shape": side} | bounds
    action = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}
    facts = json.loads((place / "metadata.json").read_text()) | dict(jpeg_encoding=False)
    facts |= dict(observation_space=json.dumps(space), action_space=json.dumps(action))
    (place / "metadata.json").write_text(json.dumps(facts))
    with h5py.File(place / "main_data.hdf5", "r+") as f:
        for g in f.values():
            i = np.append(g["rewards"][()], 0).astype(np.uint8)
            del g["observations"], g["actions"]
            g["observations"] = np.broadcast_to(i[:, None, None], (len(i), *side))
            g["actions"] = i[:-1].astype(np.int64) % 3


def replay_arrays(s):
    """20 steps with two ends; the reward and every pixel are the row's number, 1 to 40."""
    i = np.arange(20) + 20 * s + 1
    return dict(
        observation=np.repeat(i.astype(np.uint8), 84 * 84).reshape(20, 84, 84),
        action=(i % 4).astype(np.int32),
        reward=i.astype(np.float32),
        terminal=np.isin(i % 20, (7, 15)).astype(np.uint8),
    )


def zipped(x):
    raw = io.BytesIO()
    np.save(raw, x, allow_pickle=True)
    return gzip.compress(raw.getvalue(), 1)


def replay_file(folder, name, s):
    return folder / "Breakout" / "1" / "replay_logs" / f"$store$_{name}_ckpt.{s}.gz"


def write_replay(folder):
    replay_file(folder, "reward", 0).parent.mkdir(parents=True)
    for s in (0, 1):
        for name, x in replay_arrays(s).items():
            replay_file(folder, name, s).write_bytes(zipped(x))


WRITE = dict(d4rl=write_d4rl, minari=write_minari, images=write_images, replay=write_replay)
LOAD = dict(
    d4rl=lambda p: data.load_d4rl(p / "hopper_medium-v2.hdf5", ENVS["hopper-medium"]),
    minari=lambda p: data.load_minari("my/set-v0"),
    images=lambda p: data.load_minari("my/set-v0"),
    replay=lambda p: data.load("breakout", "dqn", str(p), transitions=1000),
)
# what a message about the set names: its file, its folder, or its id
NAMES = dict(d4rl=["hopper_medium-v2.hdf5"], minari=["my/set-v0"], images=["my/set-v0"],
             replay=["Breakout", "frames-1000"])


# ------------------------------------------------------------------ ways to spoil them

SHIFTS = dict(  # these keep the numbers and change which rows there are: what loads must still be aligned
    shorter=lambda x: x[:-1],
    longer=lambda x: np.concatenate([x, x[-1:]]),
    twice=lambda x: np.concatenate([x, x]),
    none=lambda x: x[:0],
    one=lambda x: x[:1],
    flat=lambda x: x.reshape(-1),
    turned=lambda x: x.T,
    wrapped=lambda x: x[None],
    column=lambda x: x[..., None],
    first_only=lambda x: x[0] if len(x) else x,
    split=lambda x: x.reshape(2, -1) if x.size % 2 == 0 else x,
)
KEEPS = dict(  # the same numbers in another type
    f8=lambda x: x.astype("f8"),
    big=lambda x: x.astype(">f4"),
    f2=lambda x: x.astype("f2"),
    c16=lambda x: x.astype("c16"),
    S=lambda x: x.astype("S8"),
    O=lambda x: np.vectorize(str, otypes=[object])(x) if x.size else x.astype("S1"),
)
VALUES = dict(
    i8=lambda x: x.astype("i8"),
    b=lambda x: x.astype(bool),
    u8=lambda x: np.full(x.shape, 2**64 - 1, "u8"),
    void=lambda x: np.zeros(x.shape, [("a", "f4"), ("b", "i2")]),
    most=lambda x: np.full(x.shape, np.iinfo(np.int64).max),
    least=lambda x: np.full(x.shape, np.iinfo(np.int64).min),
    negative=lambda x: -np.abs(x.astype("f4")) - 1,
    zeros=np.zeros_like,
    nines=lambda x: np.full(x.shape, 9, x.dtype),
    no_columns=lambda x: np.zeros((*x.shape[:1], 0), "f4"),
    wide=lambda x: np.zeros((*x.shape, 3), "f4"),
)
POINTS = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e31, 1e30, 1e300, -1.0, 255.0, 1e9, 2.0)


def spoil(rng, x):
    """(array, aligned): x with one thing wrong."""
    x = np.asarray(x)
    how = rng.choice(["shift", "keep", "value", "point", "point"])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if how == "point" and x.size:
            y = x.astype(rng.choice(["f4", "f8"]))
            chosen = rng.sample(range(y.size), min(y.size, rng.choice([1, 3, 10**6])))
            y.reshape(-1)[chosen] = rng.choice(POINTS)
            return y, False
        table = dict(shift=SHIFTS, keep=KEEPS).get(how, VALUES)
        return table[rng.choice(sorted(table))](x), table is not VALUES


def spoil_bytes(rng, b):
    b, n = bytearray(b), len(b)
    how = rng.choice("cut flip flip head head zero insert remove append empty text".split())
    if how == "empty" or not n:
        return b""
    if how == "text":
        pointer = b"version https://git-lfs.github.com/spec/v1\n"
        return rng.choice([b"<html>not found</html>", pointer, bytes(300), rng.randbytes(3000)])
    place, size = rng.randrange(n), rng.choice([1, 8, 512])
    if how == "cut":
        return bytes(b[:place])
    if how in ("flip", "head"):  # headers and indices are small: half of the flips go there
        for _ in range(rng.choice([1, 1, 4, 40])):
            chosen = rng.randrange(n if how == "flip" else min(n, 2500))
            b[chosen] = rng.choice([0, 1, 255, rng.randrange(256)])
    elif how == "zero":
        b[place : place + size] = bytes(len(b[place : place + size]))
    elif how == "insert":
        b[place:place] = rng.randbytes(size)
    elif how == "remove":
        del b[place : place + size]
    else:
        b += rng.randbytes(size)
    return bytes(b)


def spoil_hdf5(rng, path):
    """One array or group spoilt; returns whether states and rewards must still agree if the set loads."""
    with h5py.File(path, "r+") as f:
        names, how = [], rng.choice(["array", "array", "array", "array", "gone", "group", "renamed", "empty"])
        f.visititems(lambda name, node: names.append(name))
        if how == "empty":  # all arrays of an episode, or of the file
            group = rng.choice([name for name in f if isinstance(f[name], h5py.Group)] or ["/"])
            names = [name for name in names if name.startswith(group.strip("/"))]
        chosen = names if how == "empty" else [rng.choice(names)]
        aligned = how == "empty"
        for name in chosen:
            if how in ("array", "empty") and isinstance(f[name], h5py.Group):
                continue
            x = f[name][()] if isinstance(f[name], h5py.Dataset) else None
            if how == "renamed":
                f.move(name, name + "_old")
                continue
            del f[name]
            if how == "array":
                f[name], aligned = spoil(rng, x)
            elif how == "empty":
                f[name] = x[:0]
            elif how == "group":
                f.create_group(name + "/inside")
    return aligned


ODD = (None, -1, 0, 3, 10**9, 10**12, 2**63, 1.5, float("nan"), "", "x", "float99", "object", True, {},
       {"type": "Box"}, [], [3], [10**9], [-2], [10**5] * 4)


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


def spoil_replay(rng, folder):
    s, name = rng.randrange(2), rng.choice(["observation", "action", "reward", "terminal"])
    path = replay_file(folder, name, s)
    how = rng.choice(["array", "array", "array", "bytes", "bytes", "inner", "gone", "cache", "cache"])
    if how == "array":
        x, aligned = spoil(rng, replay_arrays(s)[name])
        path.write_bytes(zipped(x))
        return aligned and name != "terminal"
    if how == "bytes":
        path.write_bytes(spoil_bytes(rng, path.read_bytes()))
    elif how == "inner":  # wrong bytes with a right checksum
        path.write_bytes(gzip.compress(spoil_bytes(rng, gzip.decompress(path.read_bytes())), 1))
    elif how == "gone":
        path.unlink()
    else:  # the cache that an earlier call wrote
        LOAD["replay"](folder)
        target = next(folder.rglob("frames-1000")) / rng.choice(["frames.u8", "steps.npz"])
        target.write_bytes(spoil_bytes(rng, target.read_bytes()))
    return False


def spoil_set(rng, kind, folder):
    if kind == "replay":
        return spoil_replay(rng, folder)
    path = folder / "hopper_medium-v2.hdf5" if kind == "d4rl" else minari_folder(folder) / "main_data.hdf5"
    facts = path.with_name("metadata.json")
    how = rng.choice(["bytes"] * 2 + ["inside"] * 3 + ["facts"] * 3 * (kind != "d4rl"))
    if how == "inside":
        return spoil_hdf5(rng, path)
    if how == "bytes":
        path.write_bytes(spoil_bytes(rng, path.read_bytes()))
    elif rng.random() < 0.2:
        facts.write_bytes(spoil_bytes(rng, facts.read_bytes()))
    else:
        facts.write_text(json.dumps(spoil_json(rng, json.loads(facts.read_text()))))
    return False


# ------------------------------------------------------------------ running them


def one(kind, seed, i, whole, folder):
    """'loaded' or 'refused'; raises whatever should not have happened."""
    rng = random.Random(f"{kind} {seed} {i}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    aligned = spoil_set(rng, kind, folder)
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    signal.alarm(SECONDS)  # not caught: it ends a process that hangs in C as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            check(LOAD[kind](folder), aligned)
        return "loaded"
    except UserError as e:
        text = str(e)
        assert text.count("\n") < 3 and len(text) < 1500, f"message: {e}"
        assert any(name in text for name in NAMES[kind]), f"message: {e}"
        return "refused"
    finally:
        signal.alarm(0)


def worker(kind, seed, first, cases, folder):
    """Cases first to first + cases; a line of JSON on stdout before each and after it."""
    import minari  # noqa: F401 (before memory is limited)

    folder, out = Path(folder), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what loading prints
    whole = folder / "whole"
    whole.mkdir()
    WRITE[kind](whole)
    shutil.copytree(whole, folder / "copy")
    os.environ["MINARI_DATASETS_PATH"] = str(folder / "copy")
    check(LOAD[kind](folder / "copy"), True)
    used = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize"))
    limit = 1024 * int(used.split()[1]) + SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for i in range(first, first + cases):
        print(json.dumps(dict(i=i)), file=out, flush=True)
        try:
            result = one(kind, seed, i, whole, folder / "case")
        except Exception:
            result = traceback.format_exc()[-1500:]
        print(json.dumps(dict(i=i, result=result)), file=out, flush=True)


def fuzz(kind, seed, cases, first=0):
    """{"loaded": n, "refused": n, "bad": [(i, what)]}. If a process dies another goes on behind its case."""
    out, end = dict(loaded=0, refused=0, bad=[]), first + cases
    while first < end:
        with tempfile.TemporaryDirectory() as folder:
            args = dict(kind=kind, seed=seed, first=first, cases=end - first, worker=folder)
            flags = [word for key, x in args.items() for word in (f"--{key}", str(x))]
            run = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True)
        for line in map(json.loads, run.stdout.splitlines()):
            if "result" not in line:
                begun, first = line["i"], line["i"] + 1
            elif line["result"] in out:
                out[line["result"]] += 1
            else:
                out["bad"].append((line["i"], line["result"]))
        if run.returncode == 0:
            break
        if not run.stdout:
            raise RuntimeError(f"the worker did not start: {run.stderr[-2000:]}")
        out["bad"].append((begun, f"the process ended with {run.returncode}: {run.stderr[-500:]}"))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_spoilt_files_end_in_a_consistent_set_or_in_one_message(kind):
    out = fuzz(kind, 0, CASES)
    assert not out["bad"], f"{len(out['bad'])} cases, the first: {out['bad'][0][0]}\n{out['bad'][0][1]}"
    assert out["loaded"] + out["refused"] == CASES, out
    assert out["loaded"] > 3 and out["refused"] > CASES / 3, out


# ------------------------------------------------------------------ rare cases by name


def change(kind, folder, **arrays):
    """Other arrays in place of the D4RL file's, the first episode's, or the first checkpoint's."""
    for name, x in arrays.items():
        if kind == "replay":
            replay_file(folder, name, 0).write_bytes(zipped(x))
            continue
        path = folder / "hopper_medium-v2.hdf5"
        if kind != "d4rl":
            path = minari_folder(folder) / "main_data.hdf5"
        with h5py.File(path, "r+") as f:
            group = f if kind == "d4rl" else f["episode_0"]
            del group[name]
            group[name] = x


@pytest.mark.parametrize(
    "kind,arrays,words",
    [
        ("d4rl", dict(rewards=np.full(60, 3e38)), r"rewards: 3e\+38 in row 0 is not in"),
        ("d4rl", dict(rewards=np.full(60, 1e300)), r"rewards: 1e\+300 in row 0"),
        ("d4rl", dict(observations=np.full((60, 11), -1e35)), r"states: -1e\+35 in row 0"),
        ("d4rl", dict(actions=np.zeros((60, 0))), "numbers are"),
        ("d4rl", dict(terminals=np.zeros(59)), r"v2.hdf5 cannot be read .*shapes \(59,\) \(60,\)"),
        (
            "d4rl",
            {k: 0.0 for k in ("observations", "actions", "rewards", "terminals", "timeouts")},
            r"terminals have shape \(\) and type float64; \(any,\) numbers",
        ),
        ("minari", {"observations/observation": np.ones((7, 4)) * 1j}, "set-v0 cannot be read"),
        ("minari", {"observations/observation": np.full((7, 4), "1.5", "S3")}, "set-v0 cannot be read"),
        ("minari", {"observations/observation": np.ones((7, 5))}, r"set-v0 cannot be read .*shape \(7, 5\)"),
        ("minari", {"observations/desired_goal": np.ones((6, 2))}, "episode 0 differ in length"),
        ("minari", dict(terminations=np.zeros(5, bool)), "episode 0 differ in length"),
        ("minari", dict(truncations=np.zeros(7, bool)), "episode 0 differ in length"),
        ("minari", dict(terminations=np.full(6, np.nan)), "terminated: nan in row 0"),
        ("minari", dict(rewards=np.zeros((6, 2))), "set-v0 cannot be read.*dimension"),
        ("minari", dict(actions=np.zeros((6, 3), np.float32)), "set-v0 cannot be read.*dimension"),
        ("images", dict(actions=np.zeros((1, 6), np.int64)), "episode 0 differ in length"),
        ("images", dict(actions=np.full(6, 3)), "actions of 3 choices: 3 in row 0 is not in"),
        ("replay", dict(reward=np.full(20, np.nan, np.float32)), "reward_ckpt.0.gz cannot be read"),
        ("replay", dict(reward=np.full(20, 1e300)), "reward_ckpt.0.gz cannot be read"),
        ("replay", dict(action=np.full(20, 2**64 - 1, np.uint64)), "actions of 4 choices: -1 in row 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(kind, arrays, words, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    WRITE[kind](tmp_path)
    change(kind, tmp_path, **arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=words):
            LOAD[kind](tmp_path)


def test_choices_in_rows_are_not_read_as_a_column():
    with pytest.raises(UserError, match=r"actions of 2 choices have shape \(2, 3\)"):
        data.Trajectories(np.zeros((6, 1)), np.zeros((2, 3), int), np.zeros(6), [6], n_actions=2)


@pytest.mark.parametrize("n", [4, 6, 10**12, -1, None])
def test_a_set_with_fewer_or_more_episodes_than_it_says_is_refused(n, tmp_path, monkeypatch):
    """Fewer would leave episodes out without a word."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_minari(tmp_path)
    facts = minari_folder(tmp_path) / "metadata.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | dict(total_episodes=n)))
    words = {4: "do not hold the 38 steps", 6: "episode_5", -1: "do not hold the 38 steps"}
    with pytest.raises(UserError, match=words.get(n, "cannot be read")):
        LOAD["minari"](tmp_path)


@pytest.mark.parametrize("n", [37, 39, 10**12, -1])
def test_a_set_with_fewer_or_more_steps_than_it_says_is_refused(n, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_minari(tmp_path)
    facts = minari_folder(tmp_path) / "metadata.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | dict(total_steps=n)))
    with pytest.raises(UserError, match=f"do not hold the {n} steps"):
        LOAD["minari"](tmp_path)


def test_a_replay_of_blank_steps_alone_is_refused_each_time(tmp_path):
    """An empty cache would be taken for a damaged one, and made again as empty."""
    place = tmp_path / "Breakout"
    place.mkdir()
    for name, x in replay_arrays(0).items():
        (place / f"{name}.gz").write_bytes(zipped(np.zeros_like(x[:3])))
    for _ in range(2):
        with pytest.raises(UserError, match="frames-1000 cannot be read"):
            LOAD["replay"](tmp_path)


def test_folders_may_be_called_anything(tmp_path):
    """A superscript two is a digit to str.isdigit and none to int."""
    write_replay(tmp_path)
    place = replay_file(tmp_path, "reward", 0).parent
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
    importlib.import_module(f"models.{model}")
    inside = dict(meta=dict(model=model), model=Evil(marker), settings={}, optimizer={})
    for content in (Evil(marker), inside):
        torch.save(content, tmp_path / "last.pt")
        with pytest.raises(UserError, match="last.pt"):
            E.load_run(tmp_path)
        with pytest.raises(UserError, match="last.pt"):
            T.read_checkpoint(tmp_path, {})
    (tmp_path / "last.pt").write_bytes(pickle.dumps(Evil(marker), 2))
    with pytest.raises(UserError, match="last.pt"):
        E.load_run(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_file_with_a_pickle_is_refused_unopened(kind, tmp_path, monkeypatch):
    root, marker, raw = tmp_path / "set", tmp_path / "marker", io.BytesIO()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    root.mkdir()
    WRITE[kind](root)
    objects = np.array([Evil(marker)] * 20, object)
    np.save(raw, objects, allow_pickle=True)
    evil, saved = pickle.dumps(Evil(marker)), raw.getvalue()
    for path in [p for p in root.rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        for content in (evil, saved, gzip.compress(saved), gzip.compress(evil)):
            path.write_bytes(content)
            assert refuses(lambda: LOAD[kind](root)), path.name
        path.write_bytes(whole)
        LOAD[kind](root)
    for path in [p for p in root.rglob("frames-1000/*") if p.suffix != ".u8"]:  # a cache is made anew
        path.write_bytes(evil)
        LOAD[kind](root)
        if path.suffix == ".npz":
            with np.load(path) as f:
                np.savez(path, **dict(f) | dict(actions=objects))
            LOAD[kind](root)
    assert not marker.exists()


def test_loading_a_minari_set_makes_no_environment(tmp_path, monkeypatch):
    """A set without its spaces would have minari make its environment, which is any function."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_minari(tmp_path)
    file, marker = minari_folder(tmp_path) / "metadata.json", tmp_path / "marker"
    facts = json.loads(file.read_text())
    spec = json.loads(facts["env_spec"]) | dict(entry_point="os:mkdir", kwargs=dict(path=str(marker)))
    spaces = "observation_space", "action_space"
    for gone in ((), spaces[:1], spaces[1:], spaces):
        left = {k: v for k, v in (facts | dict(env_spec=json.dumps(spec))).items() if k not in gone}
        file.write_text(json.dumps(left))
        if gone:
            with pytest.raises(UserError, match="metadata.json lacks"):
                LOAD["minari"](tmp_path)
        else:
            LOAD["minari"](tmp_path)
        assert not marker.exists()


# ------------------------------------------------------------------ sets that do not fit


def memory(monkeypatch, free):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))


@pytest.mark.parametrize(
    "kind,flag", [("d4rl", "train on a part"), ("minari", "train on a part"), ("images", "--transitions N")]
)
def test_a_set_that_does_not_fit_is_refused_before_it_is_read(kind, flag, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    WRITE[kind](tmp_path)
    LOAD[kind](tmp_path)
    import minari

    def read(*_):
        raise AssertionError("read before it was refused")

    monkeypatch.setattr(h5py.Dataset, "__getitem__", read)
    monkeypatch.setattr(minari.MinariDataset, "iterate_episodes", read)
    memory(monkeypatch, 100_000 if kind == "images" else 1000)
    with pytest.raises(UserError, match=f"GiB of memory, and 0.0 GiB are free; .*{flag}"):
        LOAD[kind](tmp_path)


def test_the_size_of_a_set_is_that_of_the_copies_that_training_makes(tmp_path, monkeypatch):
    """2.2 times the file's bytes, in 90 % of what is free."""
    write_d4rl(tmp_path)
    need = (tmp_path / "hopper_medium-v2.hdf5").stat().st_size * 2.2
    memory(monkeypatch, need / 0.9 + 1)
    assert len(LOAD["d4rl"](tmp_path)) == 60
    memory(monkeypatch, need / 0.9 - 1)
    with pytest.raises(UserError, match="hopper_medium-v2.hdf5: it takes about"):
        LOAD["d4rl"](tmp_path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--worker", help="for itself: a folder to work in")
    a = parser.parse_args()
    if a.worker:
        return worker(a.kind, a.seed, a.first, a.cases, a.worker)
    for kind in [a.kind] if a.kind else KINDS:
        start = time.time()
        out = fuzz(kind, a.seed, a.cases, a.first)
        print(f"{kind}: {a.cases} cases, {out['loaded']} loaded, {out['refused']} refused, "
              f"{len(out['bad'])} bad, {time.time() - start:.0f} s")
        for i, what in out["bad"]:
            print(f"  case {i}: {what}")


if __name__ == "__main__":
    main()
