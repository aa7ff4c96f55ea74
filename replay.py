"""DQN-replay folders (Agarwal et al., 2020): an Atari agent's whole life, its frames mapped from disk.

Frames are stored once, a byte a pixel (500,000 transitions: 3.3 GiB). Windows stacks them while sampling.
"""
import gzip
import math
import os
import re
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from envs import HUGE, SIDE
from errors import UserError, explained

CHUNK = 1000    # frames decompressed at once
ARRAY = re.compile(r"(?:\$store\$_)?(observation|action|reward|terminal)(?:_ckpt)?(?:\.(\d+))?\.gz")


def reading(what):
    """Whatever a library raises while it reads a file or folder, as a UserError that names it."""
    advice = (
        ".\nIf it is in use, close the other program, or set HDF5_USE_FILE_LOCKING=FALSE on a disk without "
        "locks. Move it elsewhere if it is damaged, and fetch or make it again")
    return explained(what, advice, fails=" cannot be read")


def load_replay(folder, game, transitions):
    """About so many transitions: whole episodes, equally many from every checkpoint of the agent's life.

    folder: what holds <game>/1/replay_logs/$store$_observation_ckpt.0.gz, or any folder on the way down.
    Returns {"states" (N, 84, 84) uint8, "actions" (N,) int64, "rewards" (N,) float32, "terminals" (N,) bool,
    "last" (N,) bool: a checkpoint's last step}. The first call streams the gzip files into a cache beside
    them, which later calls map. Raises UserError for arrays that are missing, damaged or disagree.
    """
    found = checkpoints(folder, game)
    root = Path(os.path.commonpath([arrays["observation"].parent for arrays in found]))
    files = [path for arrays in found for path in arrays.values()]
    source = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    cache = root / f"frames-{transitions}"
    try:
        return read_cache(cache, source)
    except Exception:       # there is none, it is of other files, or it is damaged
        write_cache(cache, source, found, transitions)
    with reading(cache):
        return read_cache(cache, source)


def checkpoints(folder, game):
    """[{"observation": path, "action": path, "reward": path, "terminal": path}], by their numbers."""
    root = Path(folder)
    if (root / game).is_dir():
        root = root / game
    if (root / "1" / "replay_logs").is_dir():
        root = root / "1"       # of several runs the first counts, as in the papers
    found = {}
    for path in root.rglob("*.gz"):
        if match := ARRAY.fullmatch(path.name):
            place = str(path.parent)        # its length puts folder 2 before folder 10
            found.setdefault((len(place), place, int(match[2] or 0)), {})[match[1]] = path
    if not found:
        raise UserError(
            f"{root} holds no DQN-replay arrays ($store$_observation_ckpt.0.gz and so on). To fetch them:\n"
            f"gsutil -m cp -R gs://atari-replay-datasets/dqn/{game}/1 FOLDER/{game}/, then --data FOLDER")
    for (_, place, number), arrays in found.items():
        if missing := {"observation", "action", "reward", "terminal"} - arrays.keys():
            raise UserError(f"{place}: checkpoint {number} lacks its {' and '.join(missing)} array. Fetch it "
                            "again, or move the checkpoint's other arrays elsewhere")
    return [found[key] for key in sorted(found)]


def vector(path, kinds, most=HUGE):
    """A number a step, (N,), of these kinds of dtype and at most so large."""
    with reading(path), gzip.open(path) as f:
        x = np.load(f, allow_pickle=False)
        # to the end, where gzip's checksum stands
        if f.read(1) or x.ndim != 1 or x.dtype.kind not in kinds or not (np.abs(x) <= most).all():
            raise ValueError(f"shape {x.shape} and type {x.dtype}, NaN or beyond {most:g}, or not one a step")
    return x


def steps_of(arrays, wanted, first):
    """(rows, start, actions, rewards, terminals): the wanted steps, and where they start in how many rows.

    These are whole episodes, or else all. Every checkpoint but the first begins where the one before was
    full, so its first episode has lost its beginning and is left out.
    """
    actions = vector(arrays["action"], "iu").astype(np.int64)
    rewards = vector(arrays["reward"], "fiu").astype(np.float32)
    terminals = vector(arrays["terminal"], "bu", 1).astype(bool)
    rows = len(actions)
    if not rows == len(rewards) == len(terminals):
        raise UserError(f"{arrays['action']} holds {rows} steps, but there are {len(rewards)} rewards and "
                        f"{len(terminals)} terminals. Fetch the three again")
    ends = np.flatnonzero(terminals) + 1
    start = 0 if first or not len(ends) or ends[0] == rows else int(ends[0])
    enough = ends[ends >= start + wanted]
    stop = int(enough[0]) if len(enough) else rows
    return rows, start, actions[start:stop], rewards[start:stop], terminals[start:stop]


def frames_of(path, rows, start, stop):
    """Yield the frames (n, 84, 84) from row start to row stop of a file of so many rows."""
    with reading(path), gzip.open(path) as f:
        np.lib.format.read_magic(f)
        shape, _, dtype = np.lib.format.read_array_header_1_0(f)
        if shape != (rows, SIDE, SIDE) or dtype != np.uint8:
            raise ValueError(f"shape {shape} and type {dtype}, not ({rows}, {SIDE}, {SIDE}) and uint8")
        f.seek(start * SIDE * SIDE, os.SEEK_CUR)
        for row in range(start, stop, CHUNK):
            n = min(CHUNK, stop - row)
            yield np.frombuffer(f.read(n * SIDE * SIDE), np.uint8).reshape(n, SIDE, SIDE)
        if stop == rows and f.read(1):      # to the end, where gzip's checksum stands
            raise ValueError("it holds more than its header says")


def read_cache(cache, source):
    """What load_replay returns. Raises some error where this is not a whole cache of these files."""
    with np.load(cache / "steps.npz") as f:
        steps = dict(f)
    if str(steps.pop("source")) != source:
        raise ValueError("the files have changed")
    frames = np.memmap(cache / "frames.u8", np.uint8, "c")      # torch wants memory that may be written to
    return steps | {"states": frames.reshape(len(steps["actions"]), SIDE, SIDE)}


def write_cache(cache, source, found, transitions):
    """Copy the frames wanted into a new cache, which takes its place when it is whole.

    Dopamine, which recorded the replay, puts three blank steps before every episode, so that stacks begin
    with zeros. Windows sees to that itself, and these steps are left out.
    """
    wanted = math.ceil(transitions / len(found))
    parts = [steps_of(arrays, wanted, i == 0) for i, arrays in enumerate(found)]
    total = sum(len(actions) for _, _, actions, *_ in parts)
    print(f"reading {total:,} of the transitions in {len(found)} checkpoints, once: "
          f"{total * SIDE * SIDE / 2**30:.2f} GiB are kept in {cache}", flush=True)
    kept = []
    advice = ". Fewer take less: --transitions N. Beside read-only files use a folder of links to them"
    with explained(f"the cache of frames could not be written to {cache}", advice, OSError):
        with tempfile.TemporaryDirectory(prefix=".frames-", dir=cache.parent) as staging:
            new = Path(staging, "new")
            new.mkdir()
            with open(new / "frames.u8", "wb") as out, tqdm(total=total, unit="frame", disable=None) as bar:
                for arrays, (rows, start, actions, rewards, terminals) in zip(found, parts, strict=True):
                    i, done = np.arange(len(actions)), 0
                    since = i - np.maximum.accumulate(i * np.append(True, terminals[:-1]))
                    keep = (since >= 3) | (actions != 0) | (rewards != 0) | terminals
                    for frames in frames_of(arrays["observation"], rows, start, start + len(i)):
                        part = keep[done: done + len(frames)]
                        part |= frames.any((1, 2))
                        out.write(frames[part].tobytes())
                        done += len(frames)
                        bar.update(len(frames))
                    last = np.arange(1, keep.sum() + 1) == keep.sum()
                    kept.append((actions[keep], rewards[keep], terminals[keep], last))
            actions, rewards, terminals, last = map(np.concatenate, zip(*kept, strict=True))
            np.savez(new / "steps.npz", source=source, actions=actions, rewards=rewards, terminals=terminals,
                     last=last)
            if cache.exists():
                cache.rename(Path(staging, "old"))
            new.rename(cache)
