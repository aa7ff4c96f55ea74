"""Frames on disk: DQN-replay folders, and images of any size, as single gray frames of 84 x 84 in a memory-mapped cache.

A state is a stack of the last 4 frames (3 in DMC), so storing stacks would take four times the space. Frames are stored once, one byte a
pixel (500,000 transitions: 3.3 GiB), on disk, and stacked while sampling. N transitions.
"""
import errno
import gzip
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np

from envs import HUGE, SIDE, UserError, short

ARRAY = re.compile(r"(?:\$store\$_)?(observation|action|reward|terminal)(?:_ckpt)?(?:\.(\d+))?\.gz")
PART = 1000     # frames decompressed at once


def gray(frames):
    """(T, 84, 84) uint8 from images (T, H, W), (T, H, W, 1 or 3), or from stacks (T, C, H, W) and (T, H, W, C), whose last frame counts.

    Colours by their luminance, sizes by the mean over areas, as the Atari environment does both. Raises UserError for other shapes.
    """
    x = np.asarray(frames)
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise UserError(f"images have shape {x.shape[1:]} and type {x.dtype}; uint8 of (H, W), (H, W, 3) or a stack of gray frames is needed")
    if x.ndim == 4 and x.shape[-1] == 3:
        x = np.concatenate([np.rint(part @ np.float32([0.299, 0.587, 0.114])).astype(np.uint8) for part in np.array_split(x, len(x) // 500 + 1)])
    elif x.ndim == 4:
        x = x[..., -1] if x.shape[-1] <= 4 else x[:, -1]
    if x.shape[1:] != (SIDE, SIDE):
        import cv2
        x = np.stack([cv2.resize(f, (SIDE, SIDE), interpolation=cv2.INTER_AREA) for f in x])
    return x


# --------------------------------------------------------------------------- DQN replay

def shards(folder, game):
    """[{"observation": path, "action": ..., "reward": ..., "terminal": ...}] of a folder in the published layout, checkpoint by checkpoint.

    folder: what holds <Game>/1/replay_logs/$store$_observation_ckpt.0.gz, or any folder on the way down. Of several runs the first counts, as
    in the papers. Raises UserError if there is none, or one of a checkpoint's four arrays is missing.
    """
    root = Path(folder)
    root = root / game if (root / game).is_dir() else root
    root = root / "1" if (root / "1").is_dir() and (root.name == game or (root / "1" / "replay_logs").is_dir()) else root
    found = {}
    for path in sorted(root.rglob("*.gz")):
        if (match := ARRAY.fullmatch(path.name)) and path.is_file():     # opening a pipe would wait for ever
            found.setdefault((str(path.parent), int(match[2] or 0)), {})[match[1]] = path
    if not found:
        raise UserError(f"{root} holds no DQN-replay arrays ($store$_observation_ckpt.0.gz and its like). The published ones:\n"
                        f"gsutil -m cp -R gs://atari-replay-datasets/dqn/{game}/1 FOLDER/{game}/, then --data FOLDER")
    for (place, number), arrays in found.items():
        for name in ("observation", "action", "reward", "terminal"):
            if name not in arrays:
                raise UserError(f"{place}: checkpoint {number} lacks its {name} array; it has {', '.join(sorted(p.name for p in arrays.values()))}. "
                                "Fetch the missing file again, or remove the others of that checkpoint")
    return [found[key] for key in sorted(found, key=lambda key: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", f"{key[0]}.{key[1]}")])]


def damaged(path, error):
    return UserError(f"{path} cannot be read ({short(error)}). Fetch it again, or remove all four arrays of its checkpoint")


def header(f):
    """(shape, dtype) of the array that follows in an open .npy stream; ValueError if it is none, or holds Python objects."""
    if np.lib.format.read_magic(f) != (1, 0):       # later versions are for headers of more than 64 KiB, up to 4 GiB
        raise ValueError("not version 1.0 of the .npy format, which replays are in")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(f)
    if dtype.hasobject or fortran and len(shape) > 1 or math.prod(shape) > 2**40 or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype}, shape {shape}, is not one of a replay")
    return shape, dtype


def numbers_of(path, kinds):
    """A small array (N,), whole."""
    try:
        with gzip.open(path) as f:
            shape, dtype = header(f)
            if len(shape) != 1 or dtype.kind not in kinds or shape[0] > 10**7:
                raise ValueError(f"shape {shape} and type {dtype}, where one number a step is expected")
            x = np.frombuffer(f.read(shape[0] * dtype.itemsize), dtype)
            if len(x) != shape[0]:
                raise EOFError(f"{len(x)} of {shape[0]} numbers")
            if f.read(1):       # to the end, where gzip's checksum stands
                raise ValueError("more bytes than its header says")
            if not (np.abs(x) <= HUGE).all():
                raise ValueError(f"NaN, infinity, or numbers beyond {HUGE:g}")
            return x
    except Exception as e:      # what gzip, zlib, NumPy and its parser of headers raise on damaged files has no common name
        raise damaged(path, e) from e


def plan(arrays, wanted, first_of_all):
    """(rows, start, stop, actions, rewards, terminals) of a checkpoint of so many rows: whole episodes that hold the wanted transitions, or all."""
    actions, rewards = numbers_of(arrays["action"], "iu").astype(np.int64), numbers_of(arrays["reward"], "fiu").astype(np.float32)
    terminals = numbers_of(arrays["terminal"], "biu")
    if not len(actions) == len(rewards) == len(terminals):
        raise UserError(f"{arrays['action'].parent}: {arrays['action'].name} holds {len(actions)} steps, {arrays['reward'].name} {len(rewards)} and "
                        f"{arrays['terminal'].name} {len(terminals)}. Fetch the three again")
    if not np.isin(terminals, (0, 1)).all():
        raise UserError(f"{arrays['terminal']}: terminals are 0 or 1, not up to {terminals.max()}")
    ends = np.flatnonzero(terminals) + 1
    # the checkpoint begins wherever the one before was full: the rest of that episode has lost its beginning
    start = 0 if first_of_all or not len(ends) or ends[0] == len(actions) else int(ends[0])
    enough = ends[ends >= start + wanted]
    stop = int(enough[0]) if len(enough) else len(actions)
    return len(actions), start, stop, actions[start:stop], rewards[start:stop], terminals[start:stop].astype(bool)


def copy_frames(path, rows, start, stop, actions, rewards, terminals, out):
    """Append the frames start to stop of a checkpoint of so many rows to the open file out; returns (stop - start,) bool: those kept.

    Dopamine puts three blank steps before every episode, so that stacks begin with zeros. Ours do so by themselves, and the steps go.
    """
    try:
        with gzip.open(path) as f:
            shape, dtype = header(f)
            if shape[1:] != (SIDE, SIDE) or dtype != np.uint8 or shape[0] != rows:
                raise ValueError(f"frames of shape {shape} and type {dtype}; ({rows}, {SIDE}, {SIDE}) of uint8 are needed, one for each action")
            keep, since = np.ones(stop - start, bool), 0        # since: steps since the episode's start
            for begin in range(0, stop, PART):
                n = min(PART, stop - begin)
                x = np.frombuffer(f.read(n * SIDE * SIDE), np.uint8)
                if x.size != n * SIDE * SIDE:
                    raise EOFError(f"it ends within frame {begin + x.size // (SIDE * SIDE)} of {shape[0]}")
                x = x.reshape(n, SIDE, SIDE)[max(0, start - begin):]
                at = max(begin, start) - start                  # of x[0], in keep
                blank = ~x.any((1, 2))
                for i in range(len(x)):
                    if blank[i] and since < 3 and actions[at + i] == 0 and rewards[at + i] == 0 and not terminals[at + i]:
                        keep[at + i] = False
                    since = 0 if terminals[at + i] else since + 1
                out.write(x[keep[at: at + len(x)]].tobytes())
            if stop == shape[0] and f.read(1):      # to the end, where gzip's checksum stands
                raise ValueError("more bytes than its header says")
            return keep
    except Exception as e:
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:      # the cache's fault, not the array's
            raise
        raise damaged(path, e) from e


def cache_folder(root, name):
    """Where a cache of this name may be written: beside the data, or in the user's cache folder where the data are read-only."""
    if os.access(root, os.W_OK):
        return root / name
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "decision-sequence-frames"
    home.mkdir(parents=True, exist_ok=True)
    return home / f"{name}-{zlib.crc32(str(root.resolve()).encode()):08x}"


def load_replay(folder, game, transitions):
    """{"states" (N, 84, 84) uint8, memory-mapped, "actions" (N,), "rewards" (N,), "lengths" (E,), "terminated" (E,)} of about that many transitions.

    Whole episodes, in equal parts from every checkpoint, so from all of the agent's life. The first call streams them out of the gzip files
    into a cache, which later calls map into memory in no time; changed files make a new one.
    """
    found = shards(folder, game)
    root = Path(os.path.commonpath([arrays["observation"].parent for arrays in found]))
    source = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for arrays in found for p in arrays.values()]
    cache = cache_folder(root, f"frames-{transitions}")
    stamp, steps, pixels = (cache / name for name in ("source.json", "steps.npz", "frames.u8"))
    try:
        fresh = all(p.is_file() for p in (stamp, steps, pixels)) and json.loads(stamp.read_text()) == source
    except (OSError, ValueError, RecursionError):
        fresh = False
    if not fresh:
        build_replay(found, root, cache, transitions, source)
    try:
        with np.load(steps, allow_pickle=False) as f:
            kinds = dict(actions=np.int64, rewards=np.float32, lengths=np.int64, terminated=bool)
            out = {k: f[k].astype(kind, casting="safe") for k, kind in kinds.items()}
        if out["lengths"].shape != out["terminated"].shape or out["lengths"].sum() != len(out["actions"]):
            raise ValueError("its episodes are not those of its steps")
        states = np.memmap(pixels, np.uint8, "c")
        return out | {"states": states.reshape(len(out["actions"]), SIDE, SIDE)}
    except Exception as e:
        raise UserError(f"the cache {cache} is damaged ({short(e)}). Delete it (rm -r '{cache}') and run the same command again") from e


def build_replay(found, root, cache, transitions, source):
    from tqdm import tqdm
    wanted = math.ceil(transitions / len(found))
    plans = [plan(arrays, wanted, i == 0) for i, arrays in enumerate(found)]
    total = sum(stop - start for _, start, stop, *_ in plans)
    need, free = total * SIDE * SIDE, shutil.disk_usage(cache.parent).free
    if need > 0.95 * free:
        raise UserError(f"{total:,} frames take {need / 2**30:.1f} GiB, and {cache.parent} has {free / 2**30:.1f} GiB left; "
                        "fewer transitions take less: --transitions N")
    print(f"reading {total:,} of the transitions in {len(found)} checkpoints of {root}, once: {need / 2**30:.2f} GiB are kept in {cache}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".frames-", dir=cache.parent) as staging:
            new, fields = Path(staging, "new"), {"actions": [], "rewards": [], "terminals": []}
            new.mkdir()
            ends = []       # the last transition of every checkpoint ends its episode, flagged or not
            with open(new / "frames.u8", "wb") as out, tqdm(total=total, unit="frame", disable=None, desc=root.name) as bar:
                for arrays, (rows, start, stop, *steps) in zip(found, plans, strict=True):
                    keep = copy_frames(arrays["observation"], rows, start, stop, *steps, out)
                    for name, x in zip(fields, steps, strict=True):
                        fields[name].append(x[keep])
                    ends.append(np.arange(1, keep.sum() + 1) == keep.sum())
                    bar.update(stop - start)
            x = {k: np.concatenate(v) for k, v in fields.items()}
            if not len(x["actions"]):
                raise UserError(f"{root} holds no steps but blank ones before episodes")
            last = np.flatnonzero(x["terminals"] | np.concatenate(ends))
            np.savez(new / "steps.npz", actions=x["actions"], rewards=x["rewards"],
                     lengths=np.diff(last, prepend=-1), terminated=x["terminals"][last])
            (new / "source.json").write_text(json.dumps(source))
            if cache.exists():
                cache.rename(Path(staging, "old"))
            new.rename(cache)
    except OSError as e:
        raise UserError(f"the cache of frames could not be written to {cache} ({e})") from e
