"""DQN-replay folders (Agarwal et al., 2020): an Atari agent's whole life, its frames mapped from disk.

A state is a stack of the last 4 frames, so storing stacks would take four times the space. Frames are stored
once, a byte a pixel (500,000 transitions: 3.3 GiB), and stacked while sampling. N transitions, E episodes.
"""
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

from errors import UserError, short

SIDE = 84       # pixels of a frame each way
CHUNK = 1000    # frames decompressed at once
ARRAY = re.compile(r"(?:\$store\$_)?(observation|action|reward|terminal)(?:_ckpt)?(?:\.(\d+))?\.gz")


def load_replay(folder, game, transitions):
    """About so many transitions: whole episodes, equally many from every checkpoint of the agent's life.

    folder: what holds <game>/1/replay_logs/$store$_observation_ckpt.0.gz, or any folder on the way down.
    Returns {"states" (N, 84, 84) uint8, "actions" (N,) int64, "rewards" (N,) float32, "lengths" (E,) int64,
    "terminated" (E,) bool}. The first call streams the gzip files into a cache; later calls map it into
    memory, until the files change. Raises UserError for arrays that are missing, damaged or disagree.
    """
    found = checkpoints(folder, game)
    root = Path(os.path.commonpath([arrays["observation"].parent for arrays in found]))
    source = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for arrays in found for p in arrays.values()]
    cache = cache_folder(root, f"frames-{transitions}")
    try:
        return read_cache(cache, source)
    except Exception:       # there is none, it is of other files, or it is damaged
        write_cache(cache, source, found, root, transitions)
        return read_cache(cache, source)


def checkpoints(folder, game):
    """[{"observation": path, "action": path, "reward": path, "terminal": path}], by their numbers."""
    root = Path(folder)
    if (root / game).is_dir():
        root = root / game
    if (root / "1").is_dir() and (root.name == game or (root / "1" / "replay_logs").is_dir()):
        root = root / "1"       # of several runs the first counts, as in the papers
    found = {}
    for path in sorted(root.rglob("*.gz")):
        if match := ARRAY.fullmatch(path.name):
            found.setdefault((str(path.parent), int(match[2] or 0)), {})[match[1]] = path
    if not found:
        raise UserError(
            f"{root} holds no DQN-replay arrays ($store$_observation_ckpt.0.gz and so on). To fetch them:\n"
            f"gsutil -m cp -R gs://atari-replay-datasets/dqn/{game}/1 FOLDER/{game}/, then --data FOLDER")
    for (place, number), arrays in found.items():
        for name in ("observation", "action", "reward", "terminal"):
            if name not in arrays:
                raise UserError(f"{place}: checkpoint {number} lacks its {name} array. Fetch it again, or "
                                "move the checkpoint's other arrays elsewhere")

    def order(key):     # 2 before 10, in the names of folders too
        return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", f"{key[0]}.{key[1]}")]
    return [found[key] for key in sorted(found, key=order)]


def damaged(path, error):
    return UserError(f"{path} cannot be read ({short(error)}). Fetch it again, or move all four arrays of "
                     "its checkpoint elsewhere")


def vector(path, kinds):
    """A finite number a step, (N,), of these kinds of dtype."""
    try:
        with gzip.open(path) as f:
            x = np.load(f, allow_pickle=False)
            if f.read(1):       # to the end, where gzip's checksum stands
                raise ValueError("it holds more than its header says")
        if x.ndim != 1 or x.dtype.kind not in kinds or not (np.abs(x) < 1e30).all():
            raise ValueError(f"shape {x.shape} and type {x.dtype}; a number a step is needed, and not NaN")
        return x
    except Exception as error:      # gzip, zlib and NumPy raise what the damage happens to cause
        raise damaged(path, error) from error


def steps_of(arrays, wanted, first):
    """(start, stop, actions, rewards, terminals): rows start to stop of a checkpoint hold the wanted steps.

    Those are whole episodes, or else all. Every checkpoint but the first begins where the one before was
    full, so its first episode has lost its beginning and is left out.
    """
    actions, rewards = vector(arrays["action"], "iu"), vector(arrays["reward"], "fiu")
    terminals = vector(arrays["terminal"], "biu")
    if not len(actions) == len(rewards) == len(terminals):
        raise UserError(
            f"{arrays['action'].parent}: {arrays['action'].name} holds {len(actions)} steps, "
            f"{arrays['reward'].name} {len(rewards)} and {arrays['terminal'].name} {len(terminals)}. "
            "Fetch the three again")
    if not np.isin(terminals, (0, 1)).all():
        raise UserError(f"{arrays['terminal']}: terminals are 0 or 1, not up to {terminals.max()}")
    ends = np.flatnonzero(terminals) + 1
    start = 0 if first or not len(ends) or ends[0] == len(actions) else int(ends[0])
    enough = ends[ends >= start + wanted]
    stop = int(enough[0]) if len(enough) else len(actions)
    return start, stop, actions.astype(np.int64), rewards.astype(np.float32), terminals.astype(bool)


def frames_of(path, rows, stop):
    """Yield (row of the first one, frames (n, 84, 84)) up to the row stop of a file of so many rows."""
    try:
        with gzip.open(path) as f:
            np.lib.format.read_magic(f)
            shape, _, dtype = np.lib.format.read_array_header_1_0(f)
            if shape != (rows, SIDE, SIDE) or dtype != np.uint8:
                raise ValueError(f"frames of shape {shape} and type {dtype}; one for each action is needed, "
                                 f"({rows}, {SIDE}, {SIDE}) of uint8")
            for row in range(0, stop, CHUNK):
                n = min(CHUNK, stop - row)
                yield row, np.frombuffer(f.read(n * SIDE * SIDE), np.uint8).reshape(n, SIDE, SIDE)
            if stop == rows and f.read(1):
                raise ValueError("it holds more than its header says")
    except Exception as error:
        raise damaged(path, error) from error


def cache_folder(root, name):
    """Where the cache is: beside the data, or in the user's own cache folder where the data are read-only."""
    if os.access(root, os.W_OK):
        return root / name
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "decision-sequence-frames"
    home.mkdir(parents=True, exist_ok=True)
    return home / f"{name}-{zlib.crc32(str(root.resolve()).encode()):08x}"


def read_cache(cache, source):
    """What load_replay returns. Raises some error where this is not a whole cache of these files."""
    if json.loads((cache / "source.json").read_text()) != source:
        raise ValueError("the files have changed")
    with np.load(cache / "steps.npz", allow_pickle=False) as f:
        kinds = dict(actions=np.int64, rewards=np.float32, lengths=np.int64, terminated=bool)
        out = {key: f[key].astype(kind, casting="safe") for key, kind in kinds.items()}
    if out["lengths"].shape != out["terminated"].shape or out["lengths"].sum() != len(out["actions"]):
        raise ValueError("its episodes are not those of its steps")
    frames = np.memmap(cache / "frames.u8", np.uint8, "c")      # torch wants memory that may be written to
    return out | {"states": frames.reshape(len(out["actions"]), SIDE, SIDE)}


def write_cache(cache, source, found, root, transitions):
    """Copy the frames wanted into a new cache, which takes its place when it is whole.

    Dopamine, which recorded the replay, puts three blank steps before every episode, so that stacks begin
    with zeros. Windows sees to that itself, and these steps are left out.
    """
    from tqdm import tqdm
    wanted = math.ceil(transitions / len(found))
    parts = [steps_of(arrays, wanted, i == 0) for i, arrays in enumerate(found)]
    total = sum(stop - start for start, stop, *_ in parts)
    need, free = total * SIDE * SIDE / 2**30, shutil.disk_usage(cache.parent).free / 2**30
    if need > 0.95 * free:
        raise UserError(f"{total:,} frames take {need:.1f} GiB, and {cache.parent} has {free:.1f} GiB left; "
                        "fewer transitions take less: --transitions N")
    print(f"reading {total:,} of the transitions in {len(found)} checkpoints of {root}, once: {need:.2f} GiB "
          f"are kept in {cache}", flush=True)
    kept = []
    try:
        with tempfile.TemporaryDirectory(prefix=".frames-", dir=cache.parent) as staging:
            new = Path(staging, "new")
            new.mkdir()
            with open(new / "frames.u8", "wb") as out, tqdm(total=total, unit="frame", disable=None) as bar:
                for arrays, (start, stop, *steps) in zip(found, parts, strict=True):
                    actions, rewards, terminals = (x[start:stop] for x in steps)
                    begins = np.flatnonzero(np.append(True, terminals[:-1]))
                    since = np.arange(len(actions)) - np.repeat(begins, np.diff(begins, append=len(actions)))
                    keep = (since >= 3) | (actions != 0) | (rewards != 0) | terminals
                    for row, frames in frames_of(arrays["observation"], len(steps[0]), stop):
                        frames = frames[max(0, start - row):]
                        part = keep[max(0, row - start):][:len(frames)]
                        part |= frames.any((1, 2))
                        out.write(frames[part].tobytes())
                        bar.update(len(frames))
                    # the last step of a checkpoint ends its episode, flagged or not
                    last = np.arange(1, keep.sum() + 1) == keep.sum()
                    kept.append((actions[keep], rewards[keep], terminals[keep], last))
            actions, rewards, terminals, last = map(np.concatenate, zip(*kept, strict=True))
            if not len(actions):
                raise UserError(f"{root} holds no steps but blank ones before episodes")
            ends = np.flatnonzero(terminals | last)
            np.savez(new / "steps.npz", actions=actions, rewards=rewards, lengths=np.diff(ends, prepend=-1),
                     terminated=terminals[ends])
            (new / "source.json").write_text(json.dumps(source))
            if cache.exists():
                cache.rename(Path(staging, "old"))
            new.rename(cache)
    except OSError as error:
        raise UserError(f"the cache of frames could not be written to {cache} ({error})") from error
