"""Playing episodes with a trained model, all side by side, and what they score.

    python eval.py runs/dt-pointmaze-umaze-s0                    the table of the run's own targets
    python eval.py runs/... --targets 1800 3600 --episodes 20    other targets (raw returns)
    python eval.py runs/... --video out.gif                      one episode of the headline target as a film
    python eval.py runs/... --zero rtg                           without its target (DC paper, Fig. 5)

A run's folder is all that is needed: normalisation, bounds, goal and environment are in its checkpoint.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import json
import math
from pathlib import Path

import numpy as np
import torch

from envs import CLIP, describe, make, observe, sticky
from errors import Parser, UserError, nearest, run_command, short
from settings import check_range, model_module, pick_device

ROWS = 50               # episodes played side by side
LONGEST = 10_000        # an environment that declares no step limit may play at least so many steps


# ------------------------------------------------------------------- playing

def batched(observations):
    """n observations, arrays or dicts or tuples of them, as one with a leading axis n."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: batched([o[key] for o in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(batched, zip(*observations, strict=True)))
    return np.array(observations)


def check_finite(x, what):
    if not np.isfinite(x).all():
        raise UserError(f"the environment gave NaN or infinity as {what}")


@torch.no_grad()
def rollout(
    model,
    meta,               # what acting needs besides the weights: a checkpoint's "meta"
    envs,               # n gymnasium environments
    targets,            # (n,) returns asked for
    seeds,              # (n,) of the environments' resets
    options=None,       # n reset options
    sample=False,       # draw discrete actions instead of taking the likeliest
    generator=None,
    zero=(),            # rtg, states (the past ones), actions: what the model sees zeros instead of
    on_step=None,       # called with the step's number after each step
):
    """Play one episode in each environment, one batched act a step. A finished episode leaves the batch.

    Returns {"return", "achieved", "length", "success"}, each (n,). achieved is the return in the targets'
    unit, with rewards cut to [-1, 1] where those of the data were; success is NaN where nobody reports it.
    """
    n, device = len(envs), next(model.parameters()).device
    targets = np.asarray(targets, float)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError("the model's weights hold NaN or infinity: training has diverged")
    if np.abs(targets).max() > 1e9 * meta["rtg_scale"]:
        raise UserError(f"a target return of {np.abs(targets).max():g} is too far from those of the data")
    stack = meta["layout"]["stack"]
    mean, std, low, high = (
        None if meta[key] is None else meta[key].cpu().numpy()
        for key in ("state_mean", "state_std", "action_low", "action_high"))
    no_action = torch.zeros(n, dtype=torch.int64) if low is None else torch.zeros(n, len(low))
    limit = envs[0].spec and envs[0].spec.max_episode_steps
    longest = limit or max(LONGEST, meta["max_ep_len"])
    result = {key: np.zeros(n) for key in ("return", "achieved", "length")} | {"success": np.full(n, np.nan)}
    resets = zip(envs, seeds, options or [None] * n, strict=True)
    observations = [env.reset(seed=int(seed), options=option)[0] for env, seed, option in resets]
    rows, playing, history = np.arange(n), list(envs), {}       # what still plays, and its last K steps
    for t in range(longest):
        state, goal = observe(batched(observations), meta["layout"])
        if stack:
            past = torch.zeros(n, stack - 1, *state.shape[1:], dtype=torch.uint8)
            if t:
                past = history["states"][:, -1, 1:].cpu()
            state = torch.cat([past, torch.from_numpy(state)[:, None]], 1)
        else:
            if meta["goal"]:
                state = np.concatenate([state, goal], 1)
            check_finite(state, f"an observation at step {t}")
            state = torch.from_numpy(((state - mean) / std).clip(-CLIP, CLIP))
        rtg = (targets[rows] - result["achieved"][rows]) / meta["rtg_scale"]
        step = dict(
            states=state,
            actions=no_action[:len(rows)].clone(),
            rewards=torch.zeros(len(rows), 1),
            rtg=torch.from_numpy(rtg).float()[:, None] * ("rtg" not in zero),
            timesteps=torch.full((len(rows),), min(t, meta["max_ep_len"] - 1)),
        )
        step = {key: x.to(device)[:, None] for key, x in step.items()}
        if t:
            K = model.cfg.context_len
            step = {key: torch.cat([history[key], x], 1)[:, -K:] for key, x in step.items()}
        history = step
        seen = dict(history)
        if "states" in zero:
            seen["states"] = history["states"].clone()
            seen["states"][:, :-1] = 0
        if "actions" in zero:
            seen["actions"] = torch.zeros_like(history["actions"])

        action = model.act(**seen, sample=sample, generator=generator)
        history["actions"][:, -1] = action
        action = action.cpu().numpy()
        if low is None:
            action = (action + meta["action_start"]).tolist()
        else:
            if not np.isfinite(action).all():
                raise UserError(f"the model's action is no number at step {t}")
            action = low + (action + 1) * 0.5 * (high - low)
            action = np.clip(action, low, high).astype(np.float32)      # rounding may step over a bound
        steps = [env.step(a) for env, a in zip(playing, action, strict=True)]
        observations, reward, terminated, truncated, infos = zip(*steps, strict=True)

        reward = np.array(reward, float)
        check_finite(reward, f"a reward at step {t}")
        counted = reward.clip(-1, 1) if meta["clip_rewards"] else reward
        history["rewards"][:, -1, 0] = torch.from_numpy(counted / meta["reward_scale"])
        result["return"][rows] += reward
        result["achieved"][rows] += counted
        result["length"][rows] += 1
        told = [np.ravel(info.get("success", info.get("is_success", np.nan)))[0] for info in infos]
        result["success"][rows] = np.fmax(result["success"][rows], np.array(told, float))   # NaN gives way
        if on_step:
            on_step(t)
        keep = np.flatnonzero(~(np.array(terminated, bool) | np.array(truncated, bool)))
        if len(keep) < len(rows):
            rows = rows[keep]
            playing, observations = ([x[i] for i in keep] for x in (playing, observations))
            history = {key: x[torch.from_numpy(keep).to(device)] for key, x in history.items()}
        if not len(rows):
            break
    if len(rows) and not limit:
        print(f"note: {len(rows)} episodes had no end and were cut after {longest:,} steps")
    return result


def check_environment(env, meta):
    """Raise UserError where an environment's observations or actions are not those of the data."""
    place = f"{meta['dataset']} does not fit its environment {env.spec.id if env.spec else env}"
    try:
        state, goal = observe(env.reset(seed=0)[0], meta["layout"])
    except (KeyError, ValueError, TypeError, IndexError, UserError) as error:
        raise UserError(f"{place}: the observation has another layout ({short(error)})") from error
    goal_dim, space = meta["goal_dim"], env.action_space
    first, *frame = meta["state_shape"]
    states = frame if meta["layout"]["stack"] else [first - (goal_dim or 0)]
    actions = f"{meta['act_dim']} {'choices' if meta['n_actions'] else 'numbers'}"
    given = f"{space.n} choices" if hasattr(space, "n") else str(space)
    if len(space.shape or ()) == 1 and not hasattr(space, "n"):
        given = f"{space.shape[0]} numbers"
    pairs = dict(
        states=(states, list(np.shape(state))),
        goal=(goal_dim, 0 if goal is None else len(goal)),
        actions=(actions, given),
    )
    wrong = [f"{what}: {a} in the data, {b} in the environment" for what, (a, b) in pairs.items()
             if a != b and a is not None]
    if wrong:
        raise UserError(f"{place}: {'; '.join(wrong)}")


def evaluate(model, meta, plan, seed=0, envs=None, sample=False, zero=()):
    """Play a plan, [(a name in meta["starts"], raw target return, number of episodes)]: one row for each.

    A row is a dict: start, target, episodes, returns (per episode), return_mean, return_std, score (0-100,
    None without references), success (%, None where nobody reports it), length, achieved (per episode, in the
    target's unit: Atari's targets count clipped rewards, its returns and scores the game's points),
    achieved_mean, abs_error (mean over episodes of |target - achieved|, RADT paper Eq. 4), error_of_mean
    (|target - mean achieved|, what RADT's code selects by). Episode j has the same seed in every row.
    envs: a list of environments to reuse, filled as needed. Raises UserError where they do not fit the data.
    """
    envs = [] if envs is None else envs
    episodes = [(start, target, 1000 * seed + j) for start, target, count in plan for j in range(count)]
    while len(envs) < min(ROWS, len(episodes)):
        envs.append(make(meta["env_spec"]))
    check_environment(envs[0], meta)
    was_training = model.training
    model.eval()
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    played = []
    for first in range(0, len(episodes), ROWS):
        starts, targets, seeds = zip(*episodes[first: first + ROWS], strict=True)
        options = [meta["starts"][start] for start in starts]
        played.append(rollout(
            model, meta, envs[:len(starts)], np.array(targets, float), seeds, options, sample, generator,
            zero))
    model.train(was_training)

    result = {key: np.concatenate([p[key] for p in played]) for key in played[0]}
    rows, first = [], 0
    for start, target, count in plan:
        r, achieved, length, success = (x[first: first + count] for x in result.values())
        first += count
        error = np.abs(achieved - target).mean()
        rows.append(dict(
            start=start, target=float(target), episodes=count,
            returns=r.tolist(), return_mean=float(r.mean()), return_std=float(r.std()),
            score=normalised(r.mean(), meta["ref"]),
            success=None if np.isnan(success).all() else float(100 * np.nanmean(success)),
            length=float(length.mean()), achieved=achieved.tolist(), achieved_mean=float(achieved.mean()),
            abs_error=float(error), error_of_mean=float(abs(achieved.mean() - target)),
        ))
    return rows


# ------------------------------------------------------------------- figures

def normalised(value, ref):
    """100 (R - R_0) / (R_100 - R_0) for ref = (R_0, R_100), D4RL's score; None without references."""
    return None if ref is None else float(100 * (value - ref[0]) / (ref[1] - ref[0]))


def alignment(rows):
    """How closely achieved returns follow their targets, over all episodes of the rows.

    {"rank_correlation" (Spearman's; NaN if one side never varies), "abs_error", "episodes"}
    """
    from scipy.stats import spearmanr
    target = np.repeat([r["target"] for r in rows], [r["episodes"] for r in rows])
    achieved = np.concatenate([r["achieved"] for r in rows])
    vary = np.ptp(target) > 0 and np.ptp(achieved) > 0
    rank = float(spearmanr(target, achieved).statistic) if vary else math.nan
    error = float(np.abs(target - achieved).mean())
    return dict(rank_correlation=rank, abs_error=error, episodes=len(target))


def alignments(runs):
    """(start, [alignment of each run]) for every start that was asked for several targets."""
    for start in dict.fromkeys(r["start"] for r in runs[0]):
        groups = [[r for r in rows if r["start"] == start] for rows in runs]
        if len(groups[0]) > 1:
            yield start, [alignment(group) for group in groups]


def interval(values, digits=1):
    """Text: the mean over seeds ± half of its 95 % interval (Student's t). "-" where a value is missing."""
    from scipy.stats import t as student
    n = len(values)
    if n == 0 or any(x is None or math.isnan(x) for x in values):
        return "-"
    half = student.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else 0
    return f"{np.mean(values):.{digits}f}" + f" ± {half:.{digits}f}" * (n > 1)


def title(meta):
    """Which model, on which environment, from which data."""
    spec = meta["env_spec"] or {"id": "no environment"}
    name = (spec if isinstance(spec, dict) else json.loads(spec))["id"]
    return f"{meta['model']} on {meta['env']} ({name}), data {meta['dataset']} ({meta['source']})"


def table(rows, headline=None):
    """The rows as text, the headline target starred; then how closely the returns from each start follow."""
    clipped = any(r["achieved"] != r["returns"] for r in rows)
    lines = [f"{'start':8s}{'target':>9s}  episodes{'return':>19s}{'score':>8s}{'success':>9s}{'length':>8s}"
             + "  achieved" * clipped + "  |target - achieved|"
             + "   (targets and achieved: rewards cut to [-1, 1])" * clipped]
    for r in rows:
        score = "-" if r["score"] is None else f"{r['score']:.1f}"
        success = "-" if r["success"] is None else f"{r['success']:.1f} %"
        lines.append(
            f"{r['start']:8s}{r['target']:9.1f}{' *'[r['target'] == headline]}{r['episodes']:9d}"
            f"{r['return_mean']:10.1f} ± {r['return_std']:6.1f}{score:>8s}{success:>9s}{r['length']:8.0f}"
            + f"{r['achieved_mean']:10.1f}" * clipped + f"{r['abs_error']:21.1f}")
    for start, (a,) in alignments([rows]):
        rank = f"{a['rank_correlation']:.2f}".replace("nan", "- (all returns equal)")
        lines.append(f"{start} start, all targets: rank correlation {rank}, "
                     f"mean |target - achieved| {a['abs_error']:.1f} over {a['episodes']} episodes")
    return "\n".join(lines)


def seeds_table(runs):
    """Text for several seeds: mean and 95 % interval over them. runs: for each its rows, all of one plan."""
    lines = [f"{len(runs)} seeds: mean ± 95 % interval",
             f"{'start':8s}{'target':>16s}{'return':>16s}{'score':>16s}{'success':>16s}  |target - achieved|"]
    for group in zip(*runs, strict=True):
        keys = ("target", "return_mean", "score", "success", "abs_error")
        *figures, error = (interval([r[key] for r in group]) for key in keys)
        lines.append(f"{group[0]['start']:8s}{''.join(f'{x:>16s}' for x in figures)}{error:>21s}")
    for start, each in alignments(runs):
        rank = interval([a["rank_correlation"] for a in each], 2)
        error = interval([a["abs_error"] for a in each])
        lines.append(f"{start} start, all targets: rank correlation {rank}, mean |target - achieved| {error}")
    return "\n".join(lines)


# ------------------------------------------------------------------- pictures

def plot_targets(rows, path, title=""):
    """Achieved return against target, a dot an episode, with the diagonal of a perfect follower."""
    from matplotlib.figure import Figure  # not pyplot: no window system, and a notebook's settings stay
    starts = list(dict.fromkeys(r["start"] for r in rows))
    fig = Figure(figsize=(4.5 * len(starts), 4.2))
    axes = fig.subplots(1, len(starts), squeeze=False, sharey=True, sharex=True)[0]
    ends = [min(r["target"] for r in rows), max(r["target"] for r in rows)]
    for ax, start in zip(axes, starts, strict=True):
        group = sorted((r for r in rows if r["start"] == start), key=lambda r: r["target"])
        targets = [r["target"] for r in group]
        for r in group:
            ax.plot([r["target"]] * r["episodes"], r["achieved"], "o", color="0.45", alpha=0.4, markersize=4)
        ax.plot(targets, [r["achieved_mean"] for r in group], "s-", color="tab:blue", label="mean")
        ax.plot(ends, ends, "k--", linewidth=1, label="target = achieved")
        ax.set(title=f"{start} start", xlabel="target return")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("achieved return")
    axes[0].legend()
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
            point = int(r["step"]), float(r["achieved_mean"])
            curves.setdefault((float(r["target"]), r["start"]), []).append(point)
    often = {key: points for key, points in curves.items() if len(points) > 1} or curves
    for (target, start), points in sorted(often.items(), reverse=True):
        line, = right.plot(*zip(*points, strict=True), "o-", markersize=4, label=f"{start} {target:.0f}")
        right.axhline(target, color=line.get_color(), linestyle=":", linewidth=1)
    right.set(xlabel="update", ylabel="achieved return (dotted: asked for)")
    if often:
        right.legend(title="target", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for ax in (left, right):
        ax.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


def film(model, meta, path, start, target, seed=0, sample=False, zero=()):
    """Write one episode as a film (.gif, or .mp4 where imageio has ffmpeg); returns its return.

    Raises UserError if it cannot be rendered, or, before anything is played, if it cannot be written.
    """
    import imageio
    path, frames = Path(path), []
    if path.suffix not in (".gif", ".mp4"):
        raise UserError(f"{path}: the name of a film ends in .gif or .mp4")
    new = not path.exists()

    def shoot(step):        # every second frame at half size: a tenth of the bytes, and as clear
        if step % 2 == 0:
            frames.append(env.render()[::2, ::2])
    try:
        path.open("ab").close()     # a folder, or a place that may not be written, says so here
        if path.suffix == ".mp4":
            import imageio_ffmpeg  # noqa: F401
        env = make(meta["env_spec"], render_mode="rgb_array")
        check_environment(env, meta)
        generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        result = rollout(model, meta, [env], np.array([target]), [1000 * seed], [meta["starts"][start]],
                         sample, generator, zero, shoot)
        fps = env.metadata.get("render_fps", 50)
        settings = dict(duration=2000 / fps, loop=0) if path.suffix == ".gif" else dict(fps=fps / 2)
        imageio.mimsave(path, frames, **settings)
        env.close()
        return float(result["return"][0])
    except Exception as error:      # rendering fails in as many ways as there are drivers
        if new and path.is_file():
            path.unlink()
        if isinstance(error, UserError):
            raise
        raise UserError(f"no film {path}: {short(error)}. Without a display, try MUJOCO_GL=egl or osmesa; "
                        ".mp4 needs 'pip install imageio[ffmpeg]'") from error


# ------------------------------------------------------------------- run folders and the command line

def load_run(run, which="last", device="cpu"):
    """(model in eval mode, meta) of a run folder, or of a checkpoint in it. Raises UserError without one."""
    run = Path(run)
    file = run if run.suffix == ".pt" else run / f"{which}.pt"
    if not file.is_file():
        near = sorted(p.parent.name for p in run.parent.glob("*/last.pt"))
        hint = f"; {nearest(run.name, near)}" if near and not run.is_dir() else ""
        raise UserError(f"{file} does not exist{hint}")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        meta = state["meta"]
        module = model_module(meta["model"])
        model = module.Model(module.Config(**state["settings"]["model"]))
        model.load_state_dict(state["model"])
        meta["plan"], meta["starts"], meta["env_spec"], meta["state_mean"]      # a KeyError now, not later
    except Exception as error:      # torch raises what the damage happens to cause
        raise UserError(f"{file} is damaged or no checkpoint of this project ({short(error)})") from error
    return model.to(device).eval(), meta


def command_line():
    parser = Parser(description=__doc__)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--targets", type=float, nargs="+", help="raw target returns; default: the run's own")
    parser.add_argument("--episodes", type=int, help="per target; default: the run's own plan")
    parser.add_argument("--start", help="which start of the environment; default: all of them")
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sticky", type=float, help="Atari: chance that an action is repeated")
    parser.add_argument("--zero", nargs="+", choices=["rtg", "states", "actions"], default=[])
    parser.add_argument("--video", metavar="FILE", help=".gif or .mp4 of one episode")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for key in ("seed", "targets", "sticky", "episodes"):
        check_range(key, getattr(args, key))
    which = Path(args.run).stem if args.run.endswith(".pt") else args.checkpoint
    model, meta = load_run(args.run, which, pick_device(args.device))
    if meta["env_spec"] is None:
        raise UserError(f"{meta['dataset']} names no environment to act in")
    if args.sticky is not None:
        meta["env_spec"] = sticky(meta["env_spec"], args.sticky)
        if meta["env_spec"] is None:
            raise UserError("--sticky is for Atari games")
    if args.start and args.start not in meta["starts"]:
        raise UserError(f"--start {args.start}: {nearest(args.start, meta['starts'])}")
    starts = [args.start] if args.start else list(meta["starts"])
    plan = [(s, x, args.episodes or n) for s, x, n in meta["plan"] if s in starts]
    if args.targets:
        count = args.episodes or (plan[-1][2] if plan else 10)
        plan = [(s, x, count) for s in starts for x in args.targets]
    if not plan:
        raise UserError("this run was trained without evaluation: give it targets, --targets R1 R2 ...")
    without = f", without {' and '.join(args.zero)}" if args.zero else ""
    print(f"{title(meta)}, {which} checkpoint (update {meta['step']:,}), seed {args.seed}{without}")
    if args.video:      # first: what cannot be written says so before minutes of playing
        target = args.targets[0] if args.targets else meta["headline"]
        got = film(model, meta, args.video, starts[-1], target, args.seed, meta["sample"], args.zero)
        print(f"{args.video}: one episode from the {starts[-1]} start, asked for {target:.1f}, got {got:.1f}")
    envs = [make(meta["env_spec"])]
    if text := describe(envs[0]):
        print(text)
    print(table(evaluate(model, meta, plan, args.seed, envs, meta["sample"], args.zero), meta["headline"]))


if __name__ == "__main__":
    run_command(command_line)
