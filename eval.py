"""Playing episodes with a trained model, all side by side, and what they score.

    python eval.py runs/dt-pointmaze-umaze-s0                    the table of the run's own targets
    python eval.py runs/... --targets 1800 3600 --episodes 20    other targets (raw returns)
    python eval.py runs/... --video out.gif                      one episode of the headline target as a film
    python eval.py runs/... --zero rtg                           what the model does without its target (DC paper, Fig. 5)

A run's folder is all that is needed: normalisation, bounds, goal and environment are in its checkpoint.
"""
import argparse
import importlib
import math
import pickle
from pathlib import Path

import numpy as np
import torch

from data import UserError, make_env, nearest, observe, run_command

ROWS = 50       # episodes played side by side


@torch.no_grad()
def rollout(model, meta, envs, targets, seeds, options=None, sample=False, generator=None, zero=(), on_step=None):
    """Play one episode in each environment, one batched act a step; a finished episode drops out of the batch.

    envs: n gymnasium environments; targets (n,): raw returns asked for; seeds (n,): of the environments' resets; options: n reset options.
    zero: names out of rtg, states, actions to blank in the model's normalised input (states: the past ones).
    Returns {"return", "length", "success"}, each (n,); success is NaN where the environment does not report it.
    """
    n, K, device = len(envs), model.cfg.context_len, next(model.parameters()).device
    discrete = meta["n_actions"] is not None
    limit = (envs[0].spec and envs[0].spec.max_episode_steps) or meta["max_ep_len"]
    mean, std = meta["state_mean"].cpu().numpy(), meta["state_std"].cpu().numpy()
    states = torch.zeros(n, limit, len(mean), device=device)
    actions = torch.zeros((n, limit) if discrete else (n, limit, meta["act_dim"]), dtype=torch.int64 if discrete else torch.float32, device=device)
    rewards, rtg = torch.zeros(n, limit, 1, device=device), torch.zeros(n, limit, 1, device=device)
    timesteps = torch.arange(limit, device=device).clamp(max=meta["max_ep_len"] - 1)
    if not discrete:
        low, high = meta["action_low"].cpu().numpy(), meta["action_high"].cpu().numpy()
    returns, lengths, success = np.zeros(n), np.zeros(n, int), np.full(n, np.nan)
    alive = np.arange(n)
    observations = [env.reset(seed=int(s), options=o)[0] for env, s, o in zip(envs, seeds, options or [None] * n, strict=True)]
    for t in range(limit):
        pairs = [observe(o, meta["layout"]) for o in observations]
        x = np.stack([np.concatenate(p) if meta["goal"] else p[0] for p in pairs])
        if t == 0 and x.shape[1] != len(mean):
            raise UserError(f"{envs[0].spec.id} gives {x.shape[1]} state numbers, but the model was trained on {len(mean)} ({meta['dataset']})")
        rows = torch.as_tensor(alive, device=device)
        states[rows, t] = torch.from_numpy((x - mean) / std).to(device)
        if "rtg" not in zero:
            rtg[rows, t, 0] = torch.from_numpy((targets[alive] - returns[alive]) / meta["rtg_scale"]).float().to(device)
        window = slice(max(0, t + 1 - K), t + 1)
        # full batches are views; copies are made only once some episode has ended
        history = [h[:, window] if len(alive) == n else h[:, window][rows] for h in (states, actions, rewards, rtg)]
        if "states" in zero:
            history[0] = torch.cat([torch.zeros_like(history[0][:, :-1]), history[0][:, -1:]], 1)
        if "actions" in zero:
            history[1] = torch.zeros_like(history[1])
        a = model.act(*history, timesteps[window].expand(len(alive), -1), sample=sample, generator=generator)
        actions[rows, t] = a
        a = a.cpu().numpy()
        if not discrete:
            if not np.isfinite(a).all():
                raise UserError("the model's action is NaN: training has diverged (a smaller --lr may help)")
            a = np.clip(low + (a + 1) * 0.5 * (high - low), low, high).astype(np.float32)       # clip: rounding may step over a bound
        observations, r = [], np.zeros(len(alive), np.float32)
        going = np.ones(len(alive), bool)
        for j, i in enumerate(alive):
            o, reward, terminated, truncated, info = envs[i].step(int(a[j]) + meta["action_start"] if discrete else a[j])
            returns[i] += reward
            lengths[i] += 1
            r[j] = reward
            if "success" in info:
                success[i] = max(float(info["success"]), 0.0 if np.isnan(success[i]) else success[i])
            if terminated or truncated:
                going[j] = False
            else:
                observations.append(o)
        rewards[rows, t, 0] = torch.from_numpy(r / meta["reward_scale"]).to(device)
        if on_step:
            on_step(t)
        alive = alive[going]
        if not len(alive):
            break
    return {"return": returns, "length": lengths, "success": success}


def evaluate(model, meta, plan, seed=0, envs=None, sample=False, zero=()):
    """Play a plan, [(name of a start in meta["starts"], raw target return, number of episodes)], and return one row for each.

    A row is a dict: start, target, episodes, returns (per episode), return_mean, return_std, score (0-100, None without references),
    success (%, None where the environment has none), length, abs_error (mean over episodes of |target - achieved|, RADT paper Eq. 4),
    error_of_mean (|target - mean achieved|, what RADT's code selects by). Episode j has the same seed in every row. envs: a list of
    environments to reuse; it is filled as needed.
    """
    envs = [] if envs is None else envs
    episodes = [(start, target, 1000 * seed + j) for start, target, count in plan for j in range(count)]
    while len(envs) < min(ROWS, len(episodes)):
        envs.append(make_env(meta["env_spec"]))
    was_training = model.training
    model.eval()
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    out = []
    for i in range(0, len(episodes), ROWS):
        part = episodes[i: i + ROWS]
        start, target, seeds = zip(*part, strict=True)
        out.append(rollout(model, meta, envs[: len(part)], np.array(target, float), seeds, [meta["starts"][s] for s in start], sample, generator, zero))
    model.train(was_training)
    result = {k: np.concatenate([o[k] for o in out]) for k in out[0]}
    rows, at = [], 0
    for start, target, count in plan:
        r, length, success = (result[k][at: at + count] for k in ("return", "length", "success"))
        at += count
        rows.append(dict(start=start, target=float(target), episodes=count, returns=r.tolist(), return_mean=float(r.mean()), return_std=float(r.std()),
                         score=normalised(r.mean(), meta["ref"]), success=None if np.isnan(success).all() else float(100 * np.nanmean(success)),
                         length=float(length.mean()), abs_error=float(np.abs(r - target).mean()), error_of_mean=float(abs(r.mean() - target))))
    return rows


def normalised(value, ref):
    """100 (R - R_0) / (R_100 - R_0) for ref = (R_0, R_100), D4RL's score; None without references."""
    return None if ref is None else float(100 * (value - ref[0]) / (ref[1] - ref[0]))


def rank_correlation(x, y):
    """Spearman's: the correlation of ranks, ties sharing their mean rank; NaN if one side never varies."""
    def ranks(v):
        _, place, counts = np.unique(v, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[place]
    a, b = ranks(np.asarray(x)), ranks(np.asarray(y))
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else math.nan


def alignment(rows):
    """{"rank_correlation", "abs_error", "episodes"} over all episodes of the rows: how closely achieved returns follow their targets."""
    target = np.repeat([r["target"] for r in rows], [r["episodes"] for r in rows])
    achieved = np.concatenate([r["returns"] for r in rows])
    return {"rank_correlation": rank_correlation(target, achieved), "abs_error": float(np.abs(target - achieved).mean()), "episodes": len(target)}


def table(rows, headline=None):
    """The rows as text, the headline target starred, and under them how closely each start's returns follow the targets."""
    lines = [f"{'start':8s} {'target':>9s} {'episodes':>8s} {'return':>18s} {'score':>7s} {'success':>8s} {'length':>7s} {'|target - achieved|':>20s}"]
    for r in rows:
        lines.append(f"{r['start']:8s} {r['target']:8.1f}{'*' if r['target'] == headline else ' '} {r['episodes']:8d} {r['return_mean']:9.1f} ± {r['return_std']:6.1f} "
                     f"{'-' if r['score'] is None else format(r['score'], '.1f'):>7s} {'-' if r['success'] is None else format(r['success'], '.1f') + ' %':>8s} "
                     f"{r['length']:7.0f} {r['abs_error']:20.1f}")
    for start in dict.fromkeys(r["start"] for r in rows):
        group = [r for r in rows if r["start"] == start]
        if len(group) > 1:
            a = alignment(group)
            lines.append(f"{start} start, all targets: rank correlation {a['rank_correlation']:.2f}, mean |target - achieved| {a['abs_error']:.1f} over {a['episodes']} episodes")
    return "\n".join(lines)


def plot_targets(rows, path, title=""):
    """Achieved return against target, a dot an episode, with the diagonal that a perfect follower would be on."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    starts = list(dict.fromkeys(r["start"] for r in rows))
    fig, axes = plt.subplots(1, len(starts), figsize=(4.5 * len(starts), 4.2), squeeze=False, sharey=True, sharex=True)
    ends = [min(r["target"] for r in rows), max(r["target"] for r in rows)]
    for ax, start in zip(axes[0], starts, strict=True):
        group = sorted((r for r in rows if r["start"] == start), key=lambda r: r["target"])
        for r in group:
            ax.plot([r["target"]] * r["episodes"], r["returns"], "o", color="0.45", alpha=0.4, markersize=4)
        ax.plot([r["target"] for r in group], [r["return_mean"] for r in group], "s-", color="tab:blue", label="mean")
        ax.plot(ends, ends, "k--", linewidth=1, label="target = achieved")
        ax.set(title=f"{start} start", xlabel="target return")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("achieved return")
    axes[0][0].legend()
    fig.suptitle(title)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def film(model, meta, path, start, target, seed=0, sample=False):
    """Write one episode as a film (.gif, or .mp4 where imageio has ffmpeg); returns its return. Raises UserError if nothing can be rendered."""
    import imageio
    frames = []
    try:
        env = make_env(meta["env_spec"], render_mode="rgb_array")
        result = rollout(model, meta, [env], np.array([target]), [1000 * seed], [meta["starts"][start]], sample,
                         torch.Generator(next(model.parameters()).device).manual_seed(seed), on_step=lambda t: frames.append(env.render()[::2, ::2]) if t % 2 == 0 else None)
        env.close()
        imageio.mimsave(path, frames, **({"duration": 2000 / env.metadata.get("render_fps", 50), "loop": 0} if str(path).endswith(".gif") else {}))
    except UserError:
        raise
    except Exception as e:      # rendering fails in as many ways as there are drivers
        raise UserError(f"no video: {type(e).__name__}: {e}. Without a display, try MUJOCO_GL=egl or MUJOCO_GL=osmesa") from e
    return float(result["return"][0])


def load_run(run, which="last", device="cpu"):
    """(model in eval mode, meta) of a run folder, whichever model it holds. Raises UserError if there is none."""
    run = Path(run)
    file = run / f"{which}.pt"
    if not file.is_file():
        near = sorted(p.parent.name for p in run.parent.glob("*/last.pt")) if run.parent.is_dir() else []
        raise UserError(f"{file} does not exist" + (f"; {nearest(run.name, near)}" if near and not run.is_dir() else ""))
    try:
        name = torch.load(file, map_location="cpu", weights_only=True)["meta"]["model"]
        return importlib.import_module(f"models.{name}").Model.load(run, which, device)
    except (RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError, ModuleNotFoundError) as e:
        raise UserError(f"{file} is not a checkpoint of this project or is damaged ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})") from e


def pick_device(name):
    """A torch device; auto is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UserError(f"--device {name}: there is no such device; auto, cpu or cuda") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: this machine or this build of torch has no CUDA; use --device cpu")
    return device


def command_line():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--targets", type=float, nargs="+", help="raw target returns; default: the run's own")
    parser.add_argument("--episodes", type=int, help="per target; default: the run's own plan")
    parser.add_argument("--start", help="which start of the environment; default: all of them")
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero", nargs="+", choices=["rtg", "states", "actions"], default=[])
    parser.add_argument("--video", metavar="FILE")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.episodes is not None and args.episodes < 1:
        raise UserError("--episodes must be at least 1")
    model, meta = load_run(args.run, args.checkpoint, pick_device(args.device))
    if meta["env_spec"] is None:
        raise UserError(f"{meta['dataset']} names no environment to act in")
    if args.start and args.start not in meta["starts"]:
        raise UserError(f"--start {args.start}: {nearest(args.start, meta['starts'])}")
    starts = [args.start] if args.start else list(meta["starts"])
    if args.targets:
        plan = [(s, t, args.episodes or meta["plan"][0][2]) for s in starts for t in args.targets]
    else:
        plan = [(s, t, args.episodes or n) for s, t, n in meta["plan"] if s in starts]
    print(f"{meta['model']} on {meta['env']}, {args.checkpoint} checkpoint (step {meta['step']:,}), data {meta['dataset']} ({meta['source']}), "
          f"seed {args.seed}" + (f", without {' and '.join(args.zero)}" if args.zero else ""))
    print(table(evaluate(model, meta, plan, args.seed, sample=meta["sample"], zero=args.zero), meta["headline"]))
    if args.video:
        target = args.targets[0] if args.targets else meta["headline"]
        got = film(model, meta, args.video, starts[-1], target, args.seed, meta["sample"])
        print(f"{args.video}: one episode, target {target:.1f}, achieved {got:.1f}")


if __name__ == "__main__":
    run_command(command_line)
