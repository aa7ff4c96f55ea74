"""How fast loading, sampling and evaluation are. Not a test: it prints and asserts nothing.

    python tests/bench.py        about a minute on 2 CPU cores
"""
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import settings  # noqa: E402
import train  # noqa: E402
from data import ENVS, Trajectories, Windows, load_d4rl, make_env  # noqa: E402
from eval import evaluate  # noqa: E402


def timed(f, n=1):
    begin = time.perf_counter()
    for _ in range(n):
        out = f()
    return (time.perf_counter() - begin) / n, out


def sample_in_a_loop(t, g, B, K, mean, std, max_ep_len):
    """A batch as it is usually drawn: pick an episode by length, slice, normalise, sum the rewards that follow, pad; one sample at a time."""
    lengths, starts = t.lengths.numpy(), t.starts.numpy()
    states, actions, rewards = t.states.numpy(), t.actions.numpy(), t.rewards.numpy()
    p, out = lengths / lengths.sum(), [[] for _ in range(6)]
    for e in g.choice(len(lengths), B, p=p):
        i, end = starts[e] + g.integers(lengths[e]), starts[e + 1]
        n = min(K, end - i)

        def pad(x, n=n):
            return np.concatenate([x, np.zeros((K - n, *x.shape[1:]), x.dtype)])
        rtg = rewards[i:end].copy()
        for j in reversed(range(len(rtg) - 1)):     # as the released code sums returns-to-go, anew for every sample
            rtg[j] += rtg[j + 1]
        rtg = rtg[:n, None]
        parts = ((states[i: i + n] - mean) / std, actions[i: i + n], rewards[i: i + n, None], rtg / 1000, np.arange(i - starts[e], i - starts[e] + n),
                 np.ones(n, bool))
        for column, x in zip(out, parts, strict=True):
            column.append(pad(x))
    return [torch.from_numpy(np.stack(column)) for column in out]


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main():
    g, N = np.random.default_rng(0), 1_000_000
    env = ENVS["hopper-medium"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hopper_medium-v2.hdf5"
        with h5py.File(path, "w") as f:
            f["observations"], f["actions"] = g.standard_normal((N, 11), np.float32), g.uniform(-1, 1, (N, 3)).astype(np.float32)
            f["rewards"], f["terminals"], f["timeouts"] = g.random(N, np.float32), np.zeros(N, bool), np.arange(N) % 500 == 499
        size, before = os.path.getsize(path) / 2**20, peak_mib()
        load_d4rl(path, env)
        seconds, t = timed(lambda: load_d4rl(path, env))
        windows_s, w = timed(lambda: Windows(t, 20, rtg_scale=1000.0))
    print(f"1,000,000 transitions, {size:.0f} MiB of arrays: loaded in {seconds:.2f} s, windows ready in {windows_s:.2f} s more, "
          f"peak memory {peak_mib() - before:.0f} MiB above the start, {(peak_mib() - before) / size:.1f} times the arrays (loaded twice)")

    B, K, generator = 64, 20, torch.Generator().manual_seed(0)
    mean, std = w.mean.numpy(), w.std.numpy()
    ours = min(timed(lambda: w.sample(B, generator), 200)[0] for _ in range(3))
    loop = min(timed(lambda: sample_in_a_loop(t, g, B, K, mean, std, 1000), 20)[0] for _ in range(3))
    print(f"a batch of {B} x {K}: {1e3 * ours:.3f} ms; one sample at a time {1e3 * loop:.2f} ms, {loop / ours:.0f} times as long")

    for name in ("pointmaze-umaze", "hopper-medium"):
        env = ENVS[name]
        toy = Trajectories(g.standard_normal((2000, env.state_dim)), g.uniform(-1, 1, (2000, env.act_dim)), g.random(2000), [100] * 20,
                           goals=g.standard_normal((2000, 2)) if env.goal_dim else None, max_ep_len=env.max_ep_len, action_low=-1.0, action_high=1.0,
                           env_spec={"id": env.id, "kwargs": env.kwargs})
        cfg, values, origin = settings.settings(dict(env=name, size="small"))
        model, _, meta, _ = train.prepare(cfg, values, origin, toy)
        envs = [make_env(meta["env_spec"]) for _ in range(20)]
        together, rows = timed(lambda: evaluate(model, meta, [("random", 1.0, 20)], envs=envs))      # noqa: B023
        alone, _ = timed(lambda: [evaluate(model, meta, [("random", 1.0, 1)], seed=s, envs=envs[:1]) for s in range(4)])     # noqa: B023
        steps = rows[0]["length"] * 20
        single = np.mean([evaluate(model, meta, [("random", 1.0, 1)], seed=s, envs=envs[:1])[0]["length"] for s in range(4)]) * 4
        print(f"{name}: 20 episodes side by side {steps / together:,.0f} steps/s, one by one {single / alone:,.0f} steps/s "
              f"({steps / together / (single / alone):.1f} times as fast)")


if __name__ == "__main__":
    main()
