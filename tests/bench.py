"""How fast loading, sampling, training and evaluation are. Not a test: it prints and asserts nothing.

    python tests/bench.py             two to three minutes on 2 CPU cores
    python tests/bench.py ratios      whole updates of all six models against a plain DT's; three minutes
    python tests/bench.py growth      how an update's cost grows with context and batch: docs/growth.png
    python tests/bench.py together    runs that take turns on one GPU; under four minutes

OMP_NUM_THREADS=1 where others use the cores too.
"""
import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import settings  # noqa: E402
import sweep  # noqa: E402
import train  # noqa: E402
from data import Trajectories, Windows, load_d4rl  # noqa: E402
from envs import ENVS, make  # noqa: E402
from eval import ROWS, evaluate  # noqa: E402
from policies.players import stored_actor  # noqa: E402

# whole updates of ours, divided by those of a plain DT of the same batch, context, width and layers
TARGETS = dict(dt=0.92, dc=0.70, lsdt=1.0, radt=1.05, starformer=1.5, dm=0.85)
LOADER = 30         # times as fast as the usual loop


def timed(f, n=1):
    begin = time.perf_counter()
    for _ in range(n):
        out = f()
    return (time.perf_counter() - begin) / n, out


def sample_in_a_loop(t, g, B, K, mean, std):
    """A batch as it is usually drawn, one sample at a time.

    An episode is picked by its length, sliced, normalised, its rewards summed from each step on, and padded.
    """
    lengths, starts = t.lengths.numpy(), t.starts.numpy()
    states, actions, rewards = t.states.numpy(), t.actions.numpy(), t.rewards.numpy()
    p, out = lengths / lengths.sum(), [[] for _ in range(6)]
    for e in g.choice(len(lengths), B, p=p):
        i, end = starts[e] + g.integers(lengths[e]), starts[e + 1]
        n = min(K, end - i)

        def pad(x, n=n):
            return np.concatenate([x, np.zeros((K - n, *x.shape[1:]), x.dtype)])
        rtg = rewards[i:end].copy()
        for j in reversed(range(len(rtg) - 1)):     # anew for every sample, as released code does
            rtg[j] += rtg[j + 1]
        rtg = rtg[:n, None]
        first = i - starts[e]
        parts = ((states[i: i + n] - mean) / std, actions[i: i + n], rewards[i: i + n, None], rtg / 1000,
                 np.arange(first, first + n), np.ones(n, bool))
        for column, x in zip(out, parts, strict=True):
            column.append(pad(x))
    return [torch.from_numpy(np.stack(column)) for column in out]


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class Skilled(nn.Module):
    """The model's own forward, and a stored policy's actions: episodes last as they do after training."""

    def __init__(self, model, meta, body, level):
        super().__init__()
        self.model, self.cfg = model, model.cfg
        self.mean, self.std = meta["state_mean"], meta["state_std"]
        self.net = [torch.from_numpy(x).to(self.mean.device) for x in stored_actor(body, level)]

    @torch.no_grad()
    def act(self, states, **rest):
        self.model.act(states, **rest)
        w0, b0, w1, b1, w2, b2 = self.net
        h = (states[:, -1] * self.std + self.mean) @ w0.T + b0
        h = h.relu() @ w1.T + b1
        return (h.relu() @ w2.T + b2).chunk(2, -1)[0].tanh()


def begun(t, **given):
    """A Run on these Trajectories that has made no update yet."""
    return train.begin(settings.resolve(dict(device="cpu", eval_episodes=0) | given), t)[0]


def toy_run(name, size):
    """(model, meta) of an untrained DT on random numbers of an environment's shape."""
    env, g, N = ENVS[name], np.random.default_rng(0), 2000
    toy = Trajectories(
        g.standard_normal((N, env.state_dim)), g.uniform(-1, 1, (N, env.act_dim)), g.random(N), [100] * 20,
        goals=g.standard_normal((N, 2)) if env.goal_dim else None, max_ep_len=env.max_ep_len,
        action_low=-1.0, action_high=1.0, env_spec={"id": env.id, "kwargs": env.kwargs})
    run = begun(toy, env=name, size=size)
    return run.model.eval(), run.meta


def loading(g):
    N, env = 1_000_000, ENVS["hopper-medium"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hopper_medium-v2.hdf5"
        with h5py.File(path, "w") as f:
            f["observations"] = g.standard_normal((N, 11), np.float32)
            f["actions"] = g.uniform(-1, 1, (N, 3)).astype(np.float32)
            f["rewards"], f["terminals"] = g.random(N, np.float32), np.zeros(N, bool)
            f["timeouts"] = np.arange(N) % 500 == 499
        size, before = os.path.getsize(path) / 2**20, peak_mib()
        load_d4rl(path, env)
        seconds, t = timed(lambda: load_d4rl(path, env))
        windows_s, w = timed(lambda: Windows(t, 20, rtg_scale=1000.0))
    more = peak_mib() - before
    print(f"1,000,000 transitions, {size:.0f} MiB of arrays: loaded in {seconds:.2f} s, windows ready in "
          f"{windows_s:.2f} s more, peak memory {more:.0f} MiB above the start, {more / size:.1f} times the "
          "arrays (loaded twice)")
    return t, w


def batches(g, t, w):
    B, K, generator = 64, 20, torch.Generator().manual_seed(0)
    mean, std = w.mean.numpy(), w.std.numpy()
    ours = min(timed(lambda: w.sample(B, generator), 200)[0] for _ in range(3))
    loop = min(timed(lambda: sample_in_a_loop(t, g, B, K, mean, std), 20)[0] for _ in range(3))
    print(f"a batch of {B} x {K}: {1e3 * ours:.3f} ms; one sample at a time {1e3 * loop:.2f} ms, "
          f"{loop / ours:.0f} times as long (target: {LOADER})")
    run = begun(t, env="hopper-medium", size="paper")
    whole = min(timed(run.update)[0] for _ in range(5))
    print(f"an update of DT's paper size on the CPU: {1e3 * whole:.0f} ms, of which the batch is "
          f"{100 * ours / whole:.2f} %")


def frame_batches(g):
    N, B, K, C = 20_000, 128, 30, 4
    t = Trajectories(g.integers(0, 256, (N, 84, 84), np.uint8), g.integers(0, 4, N), g.random(N),
                     [500] * (N // 500), n_actions=4, stack=C)
    w, generator = Windows(t, K), torch.Generator().manual_seed(0)
    x = w.sample(B, generator)["states"]
    used = torch.empty_like(x)
    # a copy reads and writes each byte once, as a gather must at the least
    ours, fresh, copied = (1e3 * min(timed(f)[0] for _ in range(10)) for f in (
        lambda: w.sample(B, generator), x.clone, lambda: used.copy_(x)))
    print(f"a batch of {B} x {K} x {C} x 84 x 84 frames ({x.numel() / 1e6:.0f} MB): {ours:.0f} ms; a plain "
          f"copy of it takes {fresh:.0f} ms into new memory, {copied:.0f} ms into memory in use: "
          f"{100 * fresh / ours:.0f} and {100 * copied / ours:.0f} % of the bandwidth")


def recorded(f, calls):
    def call(*args, **kwargs):
        calls.append((f, args, kwargs))
        return f(*args, **kwargs)
    return call


def evaluation(label, model, meta, episodes, repeats):
    """An evaluation against its parts alone: the same forwards, and the same resets and steps.

    The three are timed in turn, and the best of each counts.
    """
    envs = [make(meta["env_spec"]) for _ in range(min(ROWS, episodes))]
    acts, steps, act, plan = [], [], model.act, [("random", 3600.0, episodes)]

    def remember(sample, generator, **history):
        acts.append({key: x.clone() for key, x in history.items()})
        return act(**history)
    model.act = remember
    for env in envs:
        env.reset, env.step = recorded(env.reset, steps), recorded(env.step, steps)
    evaluate(model, meta, plan, envs=envs)
    del model.act
    for env in envs:
        del env.reset, env.step

    def forward():
        for history in acts:
            act(**history).cpu()

    def play():
        for f, args, kwargs in steps:
            f(*args, **kwargs)
    parts = forward, play, lambda: evaluate(model, meta, plan, envs=envs)
    times = np.array([[timed(f)[0] for f in parts] for _ in range(repeats)])
    forwards, stepping, whole = times.min(0)
    ratios = np.sort(times[:, 2] / times[:, :2].sum(1))
    n = len(steps) - episodes
    print(f"{label}: {episodes} episodes of {n / episodes:.0f} steps in {whole:.2f} s, "
          f"{n / whole:,.0f} steps/s; forwards alone {forwards:.2f} s, environments alone {stepping:.2f} s; "
          f"ratio {whole / (forwards + stepping):.2f} (of each round, {ratios[0]:.2f} to {ratios[-1]:.2f})")


def side_by_side():
    for name in ("pointmaze-umaze", "hopper-medium"):
        model, meta = toy_run(name, "small")
        envs = [make(meta["env_spec"]) for _ in range(20)]

        def one_by_one(model=model, meta=meta, envs=envs):
            return [evaluate(model, meta, [("random", 1.0, 1)], seed=s, envs=envs[:1])[0] for s in range(4)]
        together, rows = timed(lambda: evaluate(model, meta, [("random", 1.0, 20)], envs=envs))  # noqa: B023
        alone, each = timed(one_by_one)
        fast, slow = rows[0]["length"] * 20 / together, sum(r["length"] for r in each) / alone
        print(f"{name}: 20 episodes side by side {fast:,.0f} steps/s, one by one {slow:,.0f} steps/s "
              f"({fast / slow:.1f} times as fast)")


class PlainBlock(nn.Module):
    def __init__(self, d, n_head, activation):
        super().__init__()
        self.n_head, self.ln1, self.ln2 = n_head, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        nonlinear = nn.ReLU() if activation == "relu" else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nonlinear, nn.Linear(4 * d, d), nn.Dropout(0.1))

    def forward(self, x):
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.proj(y.transpose(1, 2).flatten(2)), 0.1)
        return x + self.mlp(self.ln2(x))


class PlainDT(nn.Module):
    """A Decision Transformer as it is usually written: every block at every token, the last one too."""

    def __init__(self, S, A, d, n_layer, n_head, activation):
        super().__init__()
        self.embed = nn.ModuleList([nn.Linear(1, d), nn.Linear(S, d), nn.Linear(A, d)])
        self.time = nn.Embedding(1000, d)
        blocks = [PlainBlock(d, n_head, activation) for _ in range(n_layer)]
        self.blocks = nn.Sequential(nn.LayerNorm(d), nn.Dropout(0.1), *blocks, nn.LayerNorm(d))
        self.head = nn.Linear(d, A)

    def forward(self, rtg, states, actions, timesteps):
        parts = [f(x) for f, x in zip(self.embed, (rtg, states, actions), strict=True)]
        x = torch.stack(parts, 2) + self.time(timesteps)[:, :, None]
        return self.head(self.blocks(x.flatten(1, 2))[:, 1::3]).tanh()


def plain_step(batch, *size):
    """A whole training step of a PlainDT on one batch that stays the same."""
    states, actions, rtg, timesteps = (batch[k] for k in ("states", "actions", "rtg", "timesteps"))
    model = PlainDT(states.shape[-1], actions.shape[-1], *size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(rtg, states, actions, timesteps), actions).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return step


def ratios(pairs=15):
    """Our whole update, batch sampling included, and a plain one without it, one after the other in pairs."""
    g, N = np.random.default_rng(0), 20_000
    t = Trajectories(g.standard_normal((N, 17)), g.uniform(-1, 1, (N, 6)), g.random(N), [1000] * 20,
                     max_ep_len=1000)
    rows = [(model, {}) for model in ("dt", "dc", "lsdt", "radt", "starformer")]
    # DM's paper counts operations at half of the tokens; its size for DT, too
    rows += [("dm", dict(selection="fixed")), ("dt", dict(n_layer=6, n_head=4, d=256))]
    for model, more in rows:
        K = {"dc": 8, "lsdt": 10}.get(model, 20)
        given = dict(model=model, env="halfcheetah-medium", size="paper", batch_size=64, context_len=K)
        run = begun(t, **given | more)
        cfg = run.settings.model
        batch = run.windows.sample(64, torch.Generator().manual_seed(0))
        plain = plain_step(batch, cfg.d, cfg.n_layer, cfg.n_head, getattr(cfg, "activation", "relu"))
        for f in (run.update, plain) * 2:
            f()
        times = 1e3 * np.array([(timed(run.update)[0], timed(plain)[0]) for _ in range(pairs)])
        low, middle, high = np.percentile(times[:, 0] / times[:, 1], (25, 50, 75))
        ours, theirs = np.median(times, 0)
        print(f"{model:10s} 64 x {K}, {cfg.n_layer} layers, d {cfg.d}: {ours:.0f} ms, plain DT "
              f"{theirs:.0f} ms; ratio {middle:.2f}, target {TARGETS[model]:.2f} (half of the {pairs} pairs: "
              f"{low:.2f} to {high:.2f})", flush=True)


def growth():
    """ms of an update of all six, on halfcheetah-medium: against K at a batch of 8, and against the batch."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(9, 3.6))
    axes = fig.subplots(1, 2)
    sweeps = (("context_len", (8, 20, 60, 120, 240), dict(batch_size=8), "context length K, batch 8"),
              ("batch_size", (8, 16, 32, 64, 128), dict(context_len=20), "batch size, K = 20"))
    lines = ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1))]
    for ax, (key, values, rest, title) in zip(axes, sweeps, strict=True):
        print(f"{title}: ms an update at {', '.join(map(str, values))}")
        for model, line, marker in zip(settings.MODELS, lines, "osD^v<", strict=True):
            ms, given = [], dict(model=model, env="halfcheetah-medium", size="paper") | rest
            for x in values:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    train.bench(5, given | {key: x})
                ms.append(json.loads(out.getvalue().splitlines()[-1])["ms_per_step"])
            print(f"{model:12s}", *(f"{y:10.1f}" for y in ms), flush=True)
            ax.loglog(values, ms, linestyle=line, marker=marker, markersize=4, label=model)
        ax.set(xlabel=title, ylabel="ms an update", xticks=values, xticklabels=values)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.tight_layout()
    path = Path(__file__).parent.parent / "docs" / "growth.png"
    fig.savefig(path, dpi=100)
    print(path)


def together(updates=100):
    """How many updates a second all runs make that share a device, and whether numbers stay those of one."""
    device = settings.pick_device("auto")

    def turns(seed, **given):
        common = dict(env="hopper-medium", size="paper", batch_size=64, seed=seed)
        run = train.on_random_numbers(common | given)
        while True:
            run.update()
            yield run

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()
    for model in ("dt", "dc", "lsdt", "radt", "dm"):
        first = {}
        for count in (1, 2, 4, 8, 16):
            lanes = [sweep.Lane(turns(seed, model=model), device) for seed in range(count)]
            for lane in lanes * 5:      # three ordinary updates, the capture, one replay
                run = lane.turn()
            wait()
            begin = time.perf_counter()
            for lane in lanes * updates:
                lane.turn()
            wait()
            ms = 1e3 * (time.perf_counter() - begin) / updates
            weights = [p.detach().clone() for p in lanes[0].turn().model.parameters()]
            wait()
            first = first or dict(ms=ms, weights=weights)
            equal = all(map(torch.equal, weights, first["weights"]))
            memory = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else peak_mib() / 1024
            print(f"{model:6s}{count:3d} runs: {ms:8.2f} ms for an update of each, "
                  f"{count * first['ms'] / ms:5.2f} times the runs an hour of one; {run.device}, "
                  f"{memory:.1f} GiB; numbers of one run {'kept' if equal else 'CHANGED'}", flush=True)
            del lanes, run


def main():
    g = np.random.default_rng(0)
    t, w = loading(g)
    batches(g, t, w)
    del t, w
    frame_batches(g)
    for size in ("small", "paper"):
        model, meta = toy_run("hopper-medium", size)
        evaluation(f"hopper, DT {size}, untrained", model, meta, 100, 5)
    model, meta = toy_run("hopper-medium", "small")
    evaluation("hopper, DT small, a stored policy's actions", Skilled(model, meta, "hopper", 8), meta, 100, 3)
    side_by_side()


if __name__ == "__main__":
    {"": main, "growth": growth, "ratios": ratios, "together": together}[" ".join(sys.argv[1:])]()
