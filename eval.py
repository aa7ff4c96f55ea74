"""Playing episodes with a trained model, all side by side, and what they score.

    python eval.py runs/dt-pointmaze-umaze-s0                    the table of the run's own targets
    python eval.py runs/... --targets 1800 3600 --episodes 20    other targets (raw returns)
    python eval.py runs/... --video out.gif                      one episode of the headline target as a film
    python eval.py runs/... --zero rtg                           what the model does without its target (DC paper, Fig. 5)

A run's folder is all that is needed: normalisation, bounds, goal and environment are in its checkpoint.
"""
import argparse
import importlib
import json
import math
import pickle
import struct
from pathlib import Path

import numpy as np
import torch

from data import HUGE, UserError, describe, make_env, nearest, observe, run_command, stepper, sticky, stop

ROWS = 50       # episodes played side by side


def batched(observations):
    """n observations, arrays or dicts of them, as one with a leading axis n."""
    first = observations[0]
    return {k: batched([o[k] for o in observations]) for k in first} if isinstance(first, dict) else np.array(observations)


@torch.no_grad()
def rollout(model, meta, envs, targets, seeds, options=None, sample=False, generator=None, zero=(), on_step=None):
    """Play one episode in each environment, one batched act a step; a finished episode drops out of the batch.

    envs: n gymnasium environments; targets (n,): returns asked for; seeds (n,): of the environments' resets; options: n reset options.
    zero: names out of rtg, states, actions to blank in the model's normalised input (states: the past ones).
    Returns {"return", "achieved", "length", "success"}, each (n,): achieved is the return in the targets' unit, with rewards cut to [-1, 1]
    where those of the data were; success is NaN where the environment does not report it.
    """
    n, K, device = len(envs), model.cfg.context_len, next(model.parameters()).device
    discrete, stack, clip = meta["n_actions"] is not None, meta["layout"].get("stack", 0), meta.get("clip_rewards")
    limit = (envs[0].spec and envs[0].spec.max_episode_steps) or meta["max_ep_len"]
    span, at = min(limit, 4 * K), -1        # a stretch of history is kept; when it is full, its last K - 1 steps move to the front
    if stack:
        states, memory = torch.zeros(n, span, *meta["state_shape"], dtype=torch.uint8, device=device), None if "states" in zero else {}
    else:
        mean, std = meta["state_mean"].cpu().numpy(), meta["state_std"].cpu().numpy()
        states, memory = torch.zeros(n, span, len(mean), device=device), None
    actions = (torch.zeros(n, span, dtype=torch.int64, device=device) if discrete else torch.zeros(n, span, meta["act_dim"], device=device))
    rewards, rtg = torch.zeros(n, span, 1, device=device), torch.zeros(n, span, 1, device=device)
    timesteps = torch.arange(limit, device=device).clamp(max=meta["max_ep_len"] - 1)
    if not discrete:
        low, high = meta["action_low"].cpu().numpy(), meta["action_high"].cpu().numpy()
    returns, achieved, lengths, success = np.zeros(n), np.zeros(n), np.zeros(n, int), np.full(n, np.nan)
    alive, playing, step = np.arange(n), list(envs), stepper(envs)
    observations = [env.reset(seed=int(s), options=o)[0] for env, s, o in zip(envs, seeds, options or [None] * n, strict=True)]
    for t in range(limit):
        at += 1
        if at == span:
            at = K - 1
            for h in (states, actions, rewards, rtg):
                h[:, :at] = h[:, span - at:].clone()
        x, goal = observe(batched(observations), meta["layout"])
        if stack:
            if t:
                states[:, at, :-1] = states[:, at - 1, 1:]      # -1 for K = 1 alone, whose step before is the stretch's last
            states[:, at, -1] = torch.from_numpy(x)
        else:
            x = np.concatenate([x, goal], 1) if meta["goal"] else x
            if t == 0 and x.shape[1] != len(mean):
                raise UserError(f"the environment gives {x.shape[1]} state numbers, but the data ({meta['dataset']}) have {len(mean)}")
            states[:, at] = torch.from_numpy((x - mean) / std)
        if "rtg" not in zero:
            rtg[:, at, 0] = torch.from_numpy((targets[alive] - achieved[alive]) / meta["rtg_scale"])
        window = slice(max(0, at + 1 - K), at + 1)
        # views while all rows play, then copies: matrix products may round a lone row by its address in memory
        history = [h[:, window] if len(alive) == n else h[:, window].clone() for h in (states, actions, rewards, rtg)]
        if "states" in zero:
            history[0] = torch.cat([torch.zeros_like(history[0][:, :-1]), history[0][:, -1:]], 1)
        if "actions" in zero:
            history[1] = torch.zeros_like(history[1])
        history.append(timesteps[t + 1 - history[0].shape[1]: t + 1].expand(len(alive), -1))
        a = model.act(*history, sample=sample, generator=generator, **({} if memory is None else {"memory": memory}))
        actions[:, at] = a
        a = a.cpu().numpy()
        if discrete:
            a = (a + meta["action_start"]).tolist()
        else:
            if not np.isfinite(a).all():
                raise UserError("the model's action is NaN: training has diverged (a smaller --lr may help)")
            a = np.clip(low + (a + 1) * 0.5 * (high - low), low, high).astype(np.float32)       # clip: rounding may step over a bound
        observations, r, terminated, truncated, infos = step(playing, a)
        r = np.array(r, float)
        counted = r.clip(-1, 1) if clip else r
        returns[alive] += r
        achieved[alive] += counted
        lengths[alive] += 1
        success[alive] = np.fmax(success[alive], [float(info.get("success", np.nan)) for info in infos])        # NaN gives way to a number
        rewards[:, at, 0] = torch.from_numpy(counted.astype(np.float32) / meta["reward_scale"])
        if on_step:
            on_step(t)
        keep = np.flatnonzero(~(np.array(terminated, bool) | np.array(truncated, bool)))
        if not len(keep):
            break
        if len(keep) < len(alive):      # the rows that play on move up, once, and no step has to pick them out again
            alive, playing, observations = alive[keep], [playing[j] for j in keep], [observations[j] for j in keep]
            rows = torch.as_tensor(keep, device=device)
            memory = memory and {k: v[rows] for k, v in memory.items()}
            for h in (states, actions, rewards, rtg):
                h[: len(keep), window] = h[rows, window]
            states, actions, rewards, rtg = (h[: len(keep)] for h in (states, actions, rewards, rtg))
    return {"return": returns, "achieved": achieved, "length": lengths, "success": success}


def evaluate(model, meta, plan, seed=0, envs=None, sample=False, zero=()):
    """Play a plan, [(name of a start in meta["starts"], raw target return, number of episodes)], and return one row for each.

    A row is a dict: start, target, episodes, returns (per episode), return_mean, return_std, score (0-100, None without references),
    success (%, None where the environment has none), length, achieved (per episode, in the target's unit: Atari's targets count clipped
    rewards, its returns and scores the game's points), achieved_mean, abs_error (mean over episodes of |target - achieved|, RADT paper
    Eq. 4), error_of_mean (|target - mean achieved|, what RADT's code selects by). Episode j has the same seed in every row. envs: a list of
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
        options = [meta["starts"][s] for s in start]
        out.append(rollout(model, meta, envs[: len(part)], np.array(target, float), seeds, options, sample, generator, zero))
    model.train(was_training)
    result = {k: np.concatenate([o[k] for o in out]) for k in out[0]}
    rows, at = [], 0
    for start, target, count in plan:
        r, achieved, length, success = (result[k][at: at + count] for k in ("return", "achieved", "length", "success"))
        at += count
        rows.append(dict(
            start=start, target=float(target), episodes=count, returns=r.tolist(), return_mean=float(r.mean()), return_std=float(r.std()),
            score=normalised(r.mean(), meta["ref"]), success=None if np.isnan(success).all() else float(100 * np.nanmean(success)),
            length=float(length.mean()), achieved=achieved.tolist(), achieved_mean=float(achieved.mean()),
            abs_error=float(np.abs(achieved - target).mean()), error_of_mean=float(abs(achieved.mean() - target))))
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
    achieved = np.concatenate([r["achieved"] for r in rows])
    return dict(rank_correlation=rank_correlation(target, achieved), abs_error=float(np.abs(target - achieved).mean()), episodes=len(target))


def title(meta):
    """Which model, on which environment, from which data."""
    spec = meta["env_spec"]
    where = "no environment" if spec is None else (spec if isinstance(spec, dict) else json.loads(spec))["id"]
    return f"{meta['model']} on {meta['env']} ({where}), data {meta['dataset']} ({meta['source']})"


def table(rows, headline=None):
    """The rows as text, the headline target starred, and under them how closely each start's returns follow the targets."""
    clipped = any(r["achieved"] != r["returns"] for r in rows)
    lines = [f"{'start':8s}{'target':>9s}  episodes{'return':>19s}{'score':>8s}{'success':>9s}{'length':>8s}{'  achieved' if clipped else ''}"
             f"  |target - achieved|{'   (targets and achieved: rewards cut to [-1, 1])' if clipped else ''}"]
    for r in rows:
        score = "-" if r["score"] is None else f"{r['score']:.1f}"
        success = "-" if r["success"] is None else f"{r['success']:.1f} %"
        lines.append(f"{r['start']:8s}{r['target']:9.1f}{'*' if r['target'] == headline else ' '}{r['episodes']:9d}{r['return_mean']:10.1f} ± "
                     f"{r['return_std']:6.1f}{score:>8s}{success:>9s}{r['length']:8.0f}{format(r['achieved_mean'], '10.1f') if clipped else ''}"
                     f"{r['abs_error']:21.1f}")
    for start in dict.fromkeys(r["start"] for r in rows):
        group = [r for r in rows if r["start"] == start]
        if len(group) > 1:
            a = alignment(group)
            rank = "- (all returns equal)" if math.isnan(a["rank_correlation"]) else f"{a['rank_correlation']:.2f}"
            lines.append(f"{start} start, all targets: rank correlation {rank}, "
                         f"mean |target - achieved| {a['abs_error']:.1f} over {a['episodes']} episodes")
    return "\n".join(lines)


def plot_targets(rows, path, title=""):
    """Achieved return against target, a dot an episode, with the diagonal that a perfect follower would be on."""
    from matplotlib.figure import Figure  # not pyplot: no window system, and a notebook's own settings stay
    starts = list(dict.fromkeys(r["start"] for r in rows))
    fig = Figure(figsize=(4.5 * len(starts), 4.2))
    axes = fig.subplots(1, len(starts), squeeze=False, sharey=True, sharex=True)
    ends = [min(r["target"] for r in rows), max(r["target"] for r in rows)]
    for ax, start in zip(axes[0], starts, strict=True):
        group = sorted((r for r in rows if r["start"] == start), key=lambda r: r["target"])
        for r in group:
            ax.plot([r["target"]] * r["episodes"], r["achieved"], "o", color="0.45", alpha=0.4, markersize=4)
        ax.plot([r["target"] for r in group], [r["achieved_mean"] for r in group], "s-", color="tab:blue", label="mean")
        ax.plot(ends, ends, "k--", linewidth=1, label="target = achieved")
        ax.set(title=f"{start} start", xlabel="target return")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("achieved return")
    axes[0][0].legend()
    fig.suptitle(title)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def plot_curve(rows, path):
    """The loss, and the return of each target, against updates; rows are those of log.csv."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(9, 3.6))
    left, right = fig.subplots(1, 2)
    loss = [(int(r["step"]), float(r["loss"])) for r in rows if r.get("loss")]
    left.semilogy(*zip(*loss, strict=True), color="0.2")
    left.set(xlabel="update", ylabel="loss")
    curves = {}
    for r in rows:
        if r.get("checkpoint") == "last":
            curves.setdefault((float(r["target"]), r["start"]), []).append((int(r["step"]), float(r["achieved_mean"])))
    often = {k: at for k, at in curves.items() if len(at) > 1} or curves       # what the last evaluation alone plays is no curve
    for (target, start), at in sorted(often.items(), reverse=True):
        line, = right.plot(*zip(*at, strict=True), "o-", markersize=4, label=f"{start} {target:.0f}")
        right.axhline(target, color=line.get_color(), linestyle=":", linewidth=1)
    right.set(xlabel="update", ylabel="achieved return (dotted: asked for)")
    if often:
        right.legend(title="target", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for ax in (left, right):
        ax.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def interval(values, digits=1):
    """Text: the mean over seeds ± half of its 95 % interval (Student's t); one value alone, and "-" for none, or where one is None."""
    n = len(values)
    if n == 0 or None in values:
        return "-"
    t95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07,
           2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04]     # by degrees of freedom, from 1
    half = f" ± {(t95[n - 2] if n <= 31 else 1.96) * np.std(values, ddof=1) / math.sqrt(n):.{digits}f}" if n > 1 else ""
    return f"{np.mean(values):.{digits}f}{half}"


def seeds_table(runs):
    """Text for several seeds' rows: the mean over seeds and its 95 % interval. runs: a list of lists of rows of one plan."""
    lines = [f"{len(runs)} seeds: mean ± 95 % interval",
             f"{'start':8s}{'target':>16s}{'return':>16s}{'score':>16s}{'success':>16s}  |target - achieved|"]
    for group in zip(*runs, strict=True):
        target, value, score, success, error = (interval([r[k] for r in group]) for k in ("target", "return_mean", "score", "success", "abs_error"))
        lines.append(f"{group[0]['start']:8s}{target:>16s}{value:>16s}{score:>16s}{success:>16s}{error:>21s}")
    for start in dict.fromkeys(r["start"] for r in runs[0]):
        if len({r["target"] for r in runs[0] if r["start"] == start}) == 1:
            continue
        each = [alignment([r for r in rows if r["start"] == start]) for rows in runs]
        lines.append(f"{start} start, all targets: rank correlation {interval([a['rank_correlation'] for a in each], 2)}, "
                     f"mean |target - achieved| {interval([a['abs_error'] for a in each])}")
    return "\n".join(lines)


def film(model, meta, path, start, target, seed=0, sample=False, zero=()):
    """Write one episode as a film (.gif, or .mp4 where imageio has ffmpeg); returns its return. Raises UserError if it cannot be rendered."""
    import imageio
    frames = []

    def shoot(t):       # every second frame at half size: a tenth of the bytes, and as clear
        if t % 2 == 0:
            frames.append(env.render()[::2, ::2])
    try:
        env = make_env(meta["env_spec"], render_mode="rgb_array")
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        result = rollout(model, meta, [env], np.array([target]), [1000 * seed], [meta["starts"][start]], sample, generator, zero, shoot)
        gif = {"duration": 2000 / env.metadata.get("render_fps", 50), "loop": 0} if str(path).endswith(".gif") else {}
        imageio.mimsave(path, frames, **gif)
        env.close()
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
        meta = torch.load(file, map_location="cpu", weights_only=True)["meta"]
        model, _ = importlib.import_module(f"models.{meta['model']}").Model.load(run, which, device)
        meta["plan"], meta["starts"], meta["env_spec"], meta["state_mean"]      # a KeyError now, not after minutes
        return model, meta
    except (RuntimeError, KeyError, TypeError, IndexError, AttributeError, ValueError, OSError, EOFError, pickle.UnpicklingError, ImportError,
            struct.error) as e:
        raise UserError(f"{file} is damaged or not a checkpoint of this project ({type(e).__name__}: {str(e)[:200]})") from e


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
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, NotImplementedError, AssertionError) as e:
        raise UserError(f"--device {name}: it cannot be used here ({str(e).splitlines()[0]}); use --device cpu") from e
    return device


def command_line():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = stop
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--targets", type=float, nargs="+", help="raw target returns; default: the run's own")
    parser.add_argument("--episodes", type=int, help="per target; default: the run's own plan")
    parser.add_argument("--start", help="which start of the environment; default: all of them")
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sticky", type=float, help="Atari: probability that the emulator repeats an action; default: the run's own, 0")
    parser.add_argument("--zero", nargs="+", choices=["rtg", "states", "actions"], default=[])
    parser.add_argument("--video", metavar="FILE")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.episodes is not None and args.episodes < 1 or not 0 <= args.seed < 2**20:
        raise UserError("--episodes must be at least 1, and --seed from 0 to about a million")
    if args.targets and not all(abs(t) < HUGE for t in args.targets):
        raise UserError("--targets must be finite returns")
    if args.video and (Path(args.video).suffix not in (".gif", ".mp4") or not Path(args.video).absolute().parent.is_dir()):
        raise UserError(f"--video {args.video}: a .gif or .mp4 file in a folder that exists")
    model, meta = load_run(args.run, args.checkpoint, pick_device(args.device))
    if meta["env_spec"] is None:
        raise UserError(f"{meta['dataset']} names no environment to act in")
    if args.sticky is not None:
        meta["env_spec"] = sticky(meta["env_spec"], args.sticky)
        if not 0 <= args.sticky < 1 or meta["env_spec"] is None:
            raise UserError("--sticky is a probability, from 0 to below 1, for Atari games")
    if args.start and args.start not in meta["starts"]:
        raise UserError(f"--start {args.start}: {nearest(args.start, meta['starts'])}")
    starts = [args.start] if args.start else list(meta["starts"])
    if args.targets:
        plan = [(s, t, args.episodes or (meta["plan"][0][2] if meta["plan"] else 10)) for s in starts for t in args.targets]
    elif not meta["plan"]:
        raise UserError("this run was trained without evaluation and has no targets of its own: --targets R1 R2 ...")
    else:
        plan = [(s, t, args.episodes or n) for s, t, n in meta["plan"] if s in starts]
    print(f"{title(meta)}, {args.checkpoint} checkpoint (update {meta['step']:,}), seed {args.seed}"
          + (f", without {' and '.join(args.zero)}" if args.zero else ""))
    envs = [make_env(meta["env_spec"])]
    if text := describe(envs[0]):
        print(text)
    print(table(evaluate(model, meta, plan, args.seed, envs, meta["sample"], args.zero), meta["headline"]))
    if args.video:
        target = args.targets[0] if args.targets else meta["headline"]
        got = film(model, meta, args.video, starts[-1], target, args.seed, meta["sample"], args.zero)
        print(f"{args.video}: one episode from the {starts[-1]} start, target {target:.1f}, achieved {got:.1f}")


if __name__ == "__main__":
    run_command(command_line)
