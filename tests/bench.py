"""How fast loading, sampling and evaluation are. Not a test: it prints and asserts nothing.

    python tests/bench.py             two to three minutes on 2 CPU cores; OMP_NUM_THREADS=1 where others use them too
    python tests/bench.py ratios      whole training steps of all six against a plain Decision Transformer's, in turn; three minutes
    python tests/bench.py growth      how a training step's cost grows with context and batch: a table, and docs/growth.png
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
import train  # noqa: E402
from data import ENVS, Trajectories, Windows, load_d4rl, make_env  # noqa: E402
from eval import ROWS, evaluate  # noqa: E402
from policies.collect import Actor  # noqa: E402


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


class Skilled(nn.Module):
    """The model's own forward, and the actions of a stored policy, so that episodes last as they do after training."""

    def __init__(self, model, meta, body, level):
        super().__init__()
        self.model, self.cfg, self.mean, self.std = model, model.cfg, meta["state_mean"], meta["state_std"]
        self.net = [torch.from_numpy(x).to(self.mean.device) for x in Actor(body, [level]).nets[0]]

    @torch.no_grad()
    def act(self, states, *rest, **kwargs):
        self.model.act(states, *rest, **kwargs)
        w0, b0, w1, b1, w2, b2 = self.net
        h = (states[:, -1] * self.std + self.mean) @ w0.T + b0
        h = h.relu() @ w1.T + b1
        return (h.relu() @ w2.T + b2).chunk(2, -1)[0].tanh()


def toy_run(name, size):
    """(model, meta) of an untrained DT on random numbers of an environment's shape."""
    env, g = ENVS[name], np.random.default_rng(0)
    toy = Trajectories(g.standard_normal((2000, env.state_dim)), g.uniform(-1, 1, (2000, env.act_dim)), g.random(2000), [100] * 20,
                       goals=g.standard_normal((2000, 2)) if env.goal_dim else None, max_ep_len=env.max_ep_len, action_low=-1.0, action_high=1.0,
                       env_spec={"id": env.id, "kwargs": env.kwargs})
    torch.manual_seed(0)
    cfg, values, origin = settings.settings(dict(env=name, size=size))
    model, _, meta, _ = train.prepare(cfg, values, origin, toy)
    return model.eval(), meta


def loading(g):
    N, env = 1_000_000, ENVS["hopper-medium"]
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
    return t, w


def batches(g, t, w):
    B, K, generator = 64, 20, torch.Generator().manual_seed(0)
    mean, std = w.mean.numpy(), w.std.numpy()
    ours = min(timed(lambda: w.sample(B, generator), 200)[0] for _ in range(3))
    loop = min(timed(lambda: sample_in_a_loop(t, g, B, K, mean, std, 1000), 20)[0] for _ in range(3))
    print(f"a batch of {B} x {K}: {1e3 * ours:.3f} ms; one sample at a time {1e3 * loop:.2f} ms, {loop / ours:.0f} times as long")
    cfg, values, origin = settings.settings(dict(env="hopper-medium", size="paper", device="cpu"))
    model, windows, _, _ = train.prepare(cfg, values, origin, t)
    step = train.make_step(model.train(), windows, train.make_optimizer(model, cfg, torch.device("cpu")), cfg, generator)
    whole = min(timed(step)[0] for _ in range(5))
    print(f"a training step of DT's paper size on the CPU: {1e3 * whole:.0f} ms, of which the batch is {100 * ours / whole:.2f} %")


def frame_batches(g):
    N, B, K, C = 20_000, 128, 30, 4
    t = Trajectories(g.integers(0, 256, (N, 84, 84), np.uint8), g.integers(0, 4, N), g.random(N), [500] * (N // 500), n_actions=4, stack=C)
    w, generator = Windows(t, K), torch.Generator().manual_seed(0)
    batch = w.sample(B, generator)
    # a copy reads and writes each byte once, as a gather must at the least; most of the time goes to memory never used before
    used, x = torch.empty_like(batch["states"]), batch["states"]
    ours, fresh, copied = (min(timed(f)[0] for _ in range(10)) for f in (lambda: w.sample(B, generator), x.clone, lambda: used.copy_(x)))
    print(f"a batch of {B} x {K} x {C} x 84 x 84 frames ({x.numel() / 1e6:.0f} MB): {1e3 * ours:.0f} ms; a plain copy of it takes "
          f"{1e3 * fresh:.0f} ms into new memory, {1e3 * copied:.0f} ms into memory in use: {100 * fresh / ours:.0f} and "
          f"{100 * copied / ours:.0f} % of the bandwidth")


def recorded(f, calls):
    def call(*args, **kwargs):
        calls.append((f, args, kwargs))
        return f(*args, **kwargs)
    return call


def evaluation(label, model, meta, episodes, repeats):
    """An evaluation against its parts alone: the same forwards on the same histories, the same resets and steps of the environments.

    The three are timed in turn, and the best of each counts. evaluate() steps some bodies together, faster than their own step(): below 1 then.
    """
    envs = [make_env(meta["env_spec"]) for _ in range(min(ROWS, episodes))]
    acts, steps, act, plan = [], [], model.act, [("random", 3600.0, episodes)]

    def remember(*history, sample, generator):
        acts.append([x.clone() for x in history])
        return act(*history)
    model.act = remember
    for env in envs:
        env.reset, env.step = recorded(env.reset, steps), recorded(env.step, steps)
    evaluate(model, meta, plan, envs=envs)
    del model.act
    for env in envs:
        del env.reset, env.step

    def forward():
        for history in acts:
            act(*history).cpu()

    def play():
        for f, args, kwargs in steps:
            f(*args, **kwargs)
    parts = forward, play, lambda: evaluate(model, meta, plan, envs=envs)
    times = np.array([[timed(f)[0] for f in parts] for _ in range(repeats)])
    forwards, stepping, whole = times.min(0)
    ratios = np.sort(times[:, 2] / times[:, :2].sum(1))
    n = len(steps) - episodes
    print(f"{label}: {episodes} episodes of {n / episodes:.0f} steps in {whole:.2f} s, {n / whole:,.0f} steps/s; forwards alone {forwards:.2f} s, "
          f"environments alone {stepping:.2f} s; ratio {whole / (forwards + stepping):.2f} (of each round, {ratios[0]:.2f} to {ratios[-1]:.2f})")


def side_by_side():
    for name in ("pointmaze-umaze", "hopper-medium"):
        model, meta = toy_run(name, "small")
        envs = [make_env(meta["env_spec"]) for _ in range(20)]
        together, rows = timed(lambda: evaluate(model, meta, [("random", 1.0, 20)], envs=envs))      # noqa: B023
        alone, _ = timed(lambda: [evaluate(model, meta, [("random", 1.0, 1)], seed=s, envs=envs[:1]) for s in range(4)])     # noqa: B023
        steps = rows[0]["length"] * 20
        single = np.mean([evaluate(model, meta, [("random", 1.0, 1)], seed=s, envs=envs[:1])[0]["length"] for s in range(4)]) * 4
        print(f"{name}: 20 episodes side by side {steps / together:,.0f} steps/s, one by one {single / alone:,.0f} steps/s "
              f"({steps / together / (single / alone):.1f} times as fast)")


class PlainBlock(nn.Module):
    def __init__(self, d, n_head, activation):
        super().__init__()
        self.n_head, self.ln1, self.ln2 = n_head, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU() if activation == "relu" else nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.proj(y.transpose(1, 2).flatten(2)), 0.1)
        return x + self.mlp(self.ln2(x))


class PlainDT(nn.Module):
    """A Decision Transformer as it is usually written: every block at every token, the last one too."""

    def __init__(self, S, A, d, n_layer, n_head, activation):
        super().__init__()
        self.embed, self.time = nn.ModuleList([nn.Linear(1, d), nn.Linear(S, d), nn.Linear(A, d)]), nn.Embedding(1000, d)
        self.blocks = nn.Sequential(nn.LayerNorm(d), nn.Dropout(0.1), *[PlainBlock(d, n_head, activation) for _ in range(n_layer)],
                                    nn.LayerNorm(d))
        self.head = nn.Linear(d, A)

    def forward(self, rtg, states, actions, timesteps):
        x = torch.stack([f(x) for f, x in zip(self.embed, (rtg, states, actions), strict=True)], 2) + self.time(timesteps)[:, :, None]
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
    """Our whole step, batch sampling included, and a plain one of the same batch, context, width and layers without it, one after the other."""
    g, name, N = np.random.default_rng(0), "halfcheetah-medium", 20_000
    t = Trajectories(g.standard_normal((N, 17)), g.uniform(-1, 1, (N, 6)), g.random(N), [1000] * 20, max_ep_len=1000)
    K = {"dc": 8, "lsdt": 10}
    half = dict(selection="fixed")      # DM's paper counts operations at half of the tokens
    for model, extra in [*((m, {}) for m in ("dt", "dc", "lsdt", "radt", "starformer")), ("dm", half), ("dt", dict(n_layer=6, n_head=4, d=256))]:
        given = dict(model=model, env=name, size="paper", device="cpu", batch_size=64, context_len=K.get(model, 20)) | extra
        cfg, values, origin = settings.settings(given)
        net, windows, _, _ = train.prepare(cfg, values, origin, t)
        generator = torch.Generator().manual_seed(0)
        ours = train.make_step(net.train(), windows, train.make_optimizer(net, cfg, torch.device("cpu")), cfg, generator)
        plain = plain_step(windows.sample(64, generator), *(values[k] for k in ("d", "n_layer", "n_head", "activation")))
        for f in (ours, plain) * 2:
            f()
        times = 1e3 * np.array([(timed(ours)[0], timed(plain)[0]) for _ in range(pairs)])
        low, middle, high = np.percentile(times[:, 0] / times[:, 1], (25, 50, 75))
        print(f"{model:10s} 64 x {values['context_len']}, {values['n_layer']} layers, d {values['d']}: {np.median(times[:, 0]):.0f} ms, plain DT "
              f"{np.median(times[:, 1]):.0f} ms; ratio {middle:.2f} (half of the {pairs} pairs: {low:.2f} to {high:.2f})", flush=True)


def growth():
    """ms of a whole update, all six models as for halfcheetah-medium (d 128; DM 256): against K at a batch of 8, against the batch at K = 20."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(9, 3.6))
    axes = fig.subplots(1, 2)
    sweeps = (("context_len", (8, 20, 60, 120, 240), dict(batch_size=8), "context length K, batch 8"),
              ("batch_size", (8, 16, 32, 64, 128), dict(context_len=20), "batch size, K = 20"))
    for ax, (key, values, rest, title) in zip(axes, sweeps, strict=True):
        print(f"{title}: ms an update at {', '.join(map(str, values))}")
        for i, model in enumerate(settings.MODELS):
            ms = []
            for x in values:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    train.bench(5, dict(model=model, env="halfcheetah-medium", size="paper", **rest, **{key: x}))
                ms.append(json.loads(out.getvalue().splitlines()[-1])["ms_per_step"])
            print(f"{model:12s}", *(f"{y:10.1f}" for y in ms), flush=True)
            ax.loglog(values, ms, linestyle=["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1))][i], marker="osD^v<"[i], markersize=4, label=model)
        ax.set(xlabel=title, ylabel="ms an update", xticks=values, xticklabels=values)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.tight_layout()
    path = Path(__file__).parent.parent / "docs" / "growth.png"
    fig.savefig(path, dpi=100)
    print(path)


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
    {"": main, "growth": growth, "ratios": ratios}[" ".join(sys.argv[1:])]()
