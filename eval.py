"""Playing episodes with a trained model, all side by side, and what they score.

    python eval.py runs/dt-pointmaze-umaze-s0                    the table of the run's own targets
    python eval.py runs/... --targets 1800 3600 --episodes 20    other targets (raw returns)
    python eval.py runs/... --video out.gif                      also an episode of the first target as a film
    python eval.py runs/... --zero rtg                           without its target (DC paper, Fig. 5)

A run's folder is all that is needed.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import json
import math
from itertools import compress
from pathlib import Path

import numpy as np
import torch

from envs import CLIP, describe, make, observe
from errors import Parser, UserError, explained, nearest, run_command
from settings import check_range, model_module, pick_device

ROWS = 50               # episodes played side by side
LONGEST = 10_000        # steps that an environment without a declared limit may play, at least


# ------------------------------------------------------------------- playing

def check_finite(x, what):
    if not torch.as_tensor(x).isfinite().all():
        raise UserError(f"{what} holds NaN or infinity")


@torch.no_grad()
def rollout(
    model,
    meta,               # a checkpoint's "meta"
    envs,               # n gymnasium environments
    targets,            # (n,) returns asked for
    seeds,              # (n,) of the environments' resets
    options=None,       # n reset options
    sample=False,       # draw discrete actions instead of taking the likeliest
    generator=None,
    zero=(),            # rtg, states (the past ones), actions: what the model sees zeros instead of
    record=None,        # n lists that get (state, goal, the model's action, counted reward) of each step
):
    """Play one episode in each environment, one batched act a step. A finished episode leaves the batch.

    Returns {"return", "achieved", "length", "success"}, each (n,). achieved is the return in the targets'
    unit: where the data's rewards were cut to [-1, 1], so are these. success is NaN where none is reported.
    """
    n, device, targets = len(envs), next(model.parameters()).device, np.asarray(targets, float)
    if np.abs(targets).max() > 1e9 * meta["rtg_scale"]:
        raise UserError(f"a target return of {np.abs(targets).max():g} is too far from those of the data")
    low, high = meta["action_low"], meta["action_high"]
    no_action = torch.zeros(n, dtype=torch.int64) if low is None else torch.zeros(n, len(low))
    longest = (envs[0].spec and envs[0].spec.max_episode_steps) or max(LONGEST, meta["max_ep_len"])
    result = {key: np.zeros(n) for key in ("return", "achieved", "length")} | {"success": np.full(n, np.nan)}
    resets = zip(envs, seeds, options or [None] * n, strict=True)
    observations = [env.reset(seed=int(seed), options=option)[0] for env, seed, option in resets]
    rows, playing, history = np.arange(n), envs, {}     # what still plays, and its last steps
    context = meta.get("act_context") or model.cfg.context_len
    for t in range(longest):
        state, goal = zip(*(observe(seen, meta["layout"]) for seen in observations), strict=True)
        seen = state = np.array(state)
        if meta["layout"]["stack"]:
            past = torch.zeros(n, *meta["state_shape"], dtype=torch.uint8)
            if t:
                past = history["states"][:, -1].cpu()
            state = torch.cat([past[:, 1:], torch.from_numpy(state)[:, None]], 1)
        else:
            if meta["goal"]:
                state = np.concatenate([state, goal], 1)
            check_finite(state, f"the environment's observation at step {t}")
            state = (torch.from_numpy(state) - meta["state_mean"].cpu()) / meta["state_std"].cpu()
            state = state.clamp(-CLIP, CLIP)
        rtg = (targets[rows] - result["achieved"][rows]) / meta["rtg_scale"]
        step = dict(
            states=state,
            actions=no_action[rows],        # the present action and reward are not known yet
            rewards=torch.zeros(len(rows), 1),
            rtg=torch.from_numpy(rtg).float()[:, None] * ("rtg" not in zero),
            timesteps=torch.full((len(rows),), min(t, meta["max_ep_len"] - 1)),
        )
        for key, x in step.items():
            x = x.to(device)[:, None]
            history[key] = torch.cat([history.get(key, x[:, :0]), x], 1)[:, -context:]
        for key in zero:
            history[key][:, :-1] = 0

        action = model.act(**history, sample=sample, generator=generator)
        history["actions"][:, -1] = action
        action = action.cpu()
        chosen = action.numpy()
        check_finite(action, f"the model's action at step {t}")
        if low is None:
            action = (action + meta["action_start"]).tolist()
        else:
            action = low + (action + 1) * 0.5 * (high - low)
            action = action.clamp(low, high).float().numpy()        # rounding may step over a bound
        steps = [env.step(a) for env, a in zip(playing, action, strict=True)]
        observations, reward, terminated, truncated, infos = zip(*steps, strict=True)

        reward = np.array(reward, float)
        check_finite(reward, f"the environment's reward at step {t}")
        counted = reward.clip(-1, 1) if meta["clip_rewards"] else reward
        history["rewards"][:, -1, 0] = torch.from_numpy(counted / meta["reward_scale"])
        for i, row in enumerate(rows if record else ()):
            record[row].append((seen[i], goal[i], chosen[i], counted[i]))
        result["return"][rows] += reward
        result["achieved"][rows] += counted
        result["length"][rows] += 1
        told = [np.ravel(info.get("success", info.get("is_success", np.nan)))[0] for info in infos]
        result["success"][rows] = np.fmax(result["success"][rows], np.array(told, float))   # NaN gives way
        goes_on = ~np.logical_or(terminated, truncated)
        if not goes_on.all():
            rows = rows[goes_on]
            playing, observations = (list(compress(x, goes_on)) for x in (playing, observations))
            history = {key: x[torch.from_numpy(goes_on)] for key, x in history.items()}
        if not len(rows):
            break
    if len(rows):
        print(f"note: {len(rows)} episodes had no end and were cut after {longest:,} steps")
    return result


def check_environment(env, meta):
    """Raise UserError where an environment's observations or actions are not those of the data."""
    place = f"{meta['dataset']} does not fit its environment {env.spec and env.spec.id}"
    observation, _ = env.reset(seed=0)
    with explained(f"{place}: the observation has another layout"):
        state, goal = observe(observation, meta["layout"])
    goal_dim, space = meta["goal_dim"], env.action_space        # None: hidden from the model
    first, *frame = meta["state_shape"]
    given = f"{space.n} choices" if hasattr(space, "n") else f"{(space.shape or [0])[0]} numbers"
    facts = [
        ("states", frame or [first - (goal_dim or 0)], list(state.shape)),
        ("goal", goal_dim, 0 if goal is None else len(goal)),
        ("actions", f"{meta['act_dim']} {'choices' if meta['n_actions'] else 'numbers'}", given),
    ]
    wrong = [f"{what}: {a} in the data, {b} in the environment" for what, a, b in facts if a not in (b, None)]
    if wrong:
        raise UserError(f"{place}: {'; '.join(wrong)}")


def evaluate(model, meta, plan, seed=0, envs=None, sample=False, zero=()):
    """Play a plan, [(a name in meta["starts"], raw target return, number of episodes)]: one row for each.

    A row is a dict: start, target, episodes, returns (one for each episode), return_mean, return_std, score
    (0-100, None without references), success (%, None where none is reported), length, achieved (one for each
    episode, in the target's unit, which clips Atari's rewards), achieved_mean, abs_error (mean |target -
    achieved|, RADT paper Eq. 4). Episode j has the same seed in every row. envs: environments to reuse.
    Raises UserError where they do not fit the data.
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
        starts, targets, seeds = zip(*episodes[first:first + ROWS], strict=True)
        options = [meta["starts"][start] for start in starts]
        played.append(rollout(
            model, meta, envs[:len(starts)], targets, seeds, options, sample, generator, zero))
    model.train(was_training)

    result = {key: np.concatenate([p[key] for p in played]) for key in played[0]}
    rows, first = [], 0
    for start, target, count in plan:
        r, achieved, length, success = (x[first:first + count] for x in result.values())
        first += count
        rows.append(dict(
            start=start, target=float(target), episodes=count,
            returns=r.tolist(), return_mean=float(r.mean()), return_std=float(r.std()),
            score=normalised(r.mean(), meta["ref"]),
            success=None if np.isnan(success).all() else float(100 * np.nanmean(success)),
            length=float(length.mean()), achieved=achieved.tolist(), achieved_mean=float(achieved.mean()),
            abs_error=float(np.abs(achieved - target).mean()),
        ))
    return rows


# ------------------------------------------------------------------- figures and pictures

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
    return dict(
        rank_correlation=float(spearmanr(target, achieved).statistic) if vary else math.nan,
        abs_error=float(np.abs(target - achieved).mean()), episodes=len(target))


def alignments(runs):
    """(start, [alignment of each run]) for every start that was asked for several targets."""
    for start in dict.fromkeys(r["start"] for r in runs[0]):
        groups = [[r for r in rows if r["start"] == start] for rows in runs]
        if len(groups[0]) > 1:
            yield start, [alignment(group) for group in groups]


def margin(values):
    """Half of the 95 % interval of the mean of two values or more (Student's t)."""
    from scipy.stats import t as student
    n = len(values)
    return student.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5


def interval(values, digits=1):
    """Text: the mean over seeds ± its margin(). "-" where a value is missing."""
    values = np.array(values, float)
    n = len(values)
    if n == 0 or np.isnan(values).any():
        return "-"
    text = f"{values.mean():.{digits}f}"
    if n > 1:
        text += f" ± {margin(values):.{digits}f}"
    return text


def title(meta):
    """Which model, on which environment, from which data."""
    spec = meta["env_spec"] or {"id": "no environment"}
    if isinstance(spec, str):
        spec = json.loads(spec)
    return f"{meta['model']} on {meta['env']} ({spec['id']}), data {meta['dataset']} ({meta['source']})"


ROW = "{:8s}{:>10s}{:>9s}{:>19s}{:>8s}{:>9s}{:>8s}{:>21s}"


def table(rows, headline=None):
    """The rows as text, the headline target starred; then how closely the returns from each start follow."""
    clipped = any(r["achieved"] != r["returns"] for r in rows)
    titles = "start", "target ", "episodes", "return", "score", "success", "length", "|target - achieved|"
    lines = [ROW.format(*titles) + "  achieved (it and targets: rewards cut to [-1, 1])" * clipped]
    for r in rows:
        star = "*" if r["target"] == headline else " "
        success = "-" if r["success"] is None else f"{r['success']:.1f} %"
        lines.append(ROW.format(
            r["start"], f"{r['target']:.1f}{star}", str(r["episodes"]),
            f"{r['return_mean']:.1f} ± {r['return_std']:6.1f}", interval([r["score"]]), success,
            f"{r['length']:.0f}", f"{r['abs_error']:.1f}") + f"{r['achieved_mean']:10.1f}" * clipped)
    for start, (a,) in alignments([rows]):
        rank = interval([a["rank_correlation"]], 2)
        lines.append(f"{start} start, all targets: rank correlation {rank}, "
                     f"mean |target - achieved| {a['abs_error']:.1f} over {a['episodes']} episodes")
    star = "* the headline target; " * any(r["target"] == headline for r in rows)
    lines += [f"{star}± is the standard deviation over episodes"] * (headline is not None)
    return "\n".join(lines)


def plot_targets(rows, path, title=""):
    """Achieved return against target, a dot an episode, with the diagonal of a perfect follower."""
    from matplotlib.figure import Figure  # not pyplot: no window system, and a notebook's settings stay
    starts = list(dict.fromkeys(r["start"] for r in rows))
    fig = Figure(figsize=(4.5 * len(starts), 4.2), layout="tight")
    for i, start in enumerate(starts):
        ax = fig.add_subplot(
            1, len(starts), i + 1, title=f"{start} start", xlabel="target return", ylabel="achieved return")
        group = sorted((r for r in rows if r["start"] == start), key=lambda r: r["target"])
        targets = [r["target"] for r in group]
        asked = np.repeat(targets, [r["episodes"] for r in group])
        ax.plot(asked, np.concatenate([r["achieved"] for r in group]), ".", color="0.6", label="an episode")
        ax.plot(targets, [r["achieved_mean"] for r in group], "s-", label="mean of the episodes")
        ax.plot(targets, targets, "k--", label="target = achieved")
        ax.legend()
    fig.suptitle(title, fontsize=9, wrap=True)
    fig.savefig(path, dpi=110)


def plot_curve(rows, path):
    """The loss, and the returns from the last start, against updates. rows: those of a Run."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(9, 3.6), layout="constrained")
    left = fig.add_subplot(1, 2, 1, xlabel="update", ylabel="loss")
    right = fig.add_subplot(1, 2, 2, xlabel="update", ylabel="achieved return (dotted: asked for)")
    loss = [(r["step"], r["loss"]) for r in rows if "loss" in r]
    left.plot(*zip(*loss, strict=True))
    left.set_yscale("log" if min(x for _, x in loss) > 0 else "linear")     # a density's loss may be negative
    played = [r for r in rows if r.get("checkpoint") == "last"]
    played = [r for r in played if r["start"] == played[-1]["start"]]
    for target in sorted({r["target"] for r in played}, reverse=True):
        points = [(r["step"], r["achieved_mean"]) for r in played if r["target"] == target]
        line, = right.plot(*zip(*points, strict=True), "o-", label=f"target {target:.0f}")
        right.axhline(target, color=line.get_color(), linestyle=":")
    if played:
        fig.legend(loc="outside right upper")
    fig.savefig(path, dpi=110)


def film(model, meta, path, start, target, seed=0, sample=False, zero=()):
    """Write one episode as a .gif and return its return.

    Raises UserError if it cannot be rendered, or, before anything is played, if it cannot be written.
    """
    import gymnasium
    import imageio
    path, frames = Path(path), []
    if path.suffix != ".gif":
        raise UserError(f"{path}: the name of a film ends in .gif")

    class Camera(gymnasium.Wrapper):
        def step(self, action):
            result = super().step(action)
            frames.append(self.render()[::2, ::2])
            return result
    try:
        # rendering fails in as many ways as there are drivers
        with explained(f"no film {path}", ". Without a display, try MUJOCO_GL=egl"):
            env = Camera(make(meta["env_spec"], render_mode="rgb_array"))
            look_from_above(env.unwrapped)
            path.open("ab").close()     # a folder, or a place that may not be written, says so here
            row, = evaluate(model, meta, [(start, target, 1)], seed, [env], sample, zero)
            # every second frame at half size: a tenth of the bytes, and as clear
            imageio.mimsave(path, frames[::2], duration=2000 / env.metadata.get("render_fps", 50), loop=0)
            env.close()
    finally:
        if path.is_file() and not path.stat().st_size:
            path.unlink()
    return row["return_mean"]


def body_of(env):
    """The MuJoCo environment that moves in a maze; any other unwrapped environment itself."""
    return getattr(env, "point_env", None) or getattr(env, "ant_env", env)


def look_from_above(env):
    """Show the whole of a maze. AntMaze's own camera stands behind a wall, and the ant walks out of sight."""
    body = body_of(env)
    if body is not env:
        maze = env.maze
        size = maze.maze_size_scaling * (max(maze.map_length, maze.map_width) - 1)      # metres
        renderer = body.unwrapped.mujoco_renderer
        renderer.camera_id = -1     # a free one, which sees 0.83 m at a distance of 1 m
        renderer.default_cam_config = dict(distance=size / 0.83, elevation=-90, lookat=np.zeros(3))


# ------------------------------------------------------------------- run folders and the command line

def load_run(run, which="last", device="cpu"):
    """(model in eval mode, meta) of a run folder, or of a checkpoint in it. Raises UserError without one."""
    run = Path(run)
    file = run if run.suffix == ".pt" else run / f"{which}.pt"
    if not file.is_file():
        raise UserError(f"there is no {file}")
    # torch raises what the damage happens to cause
    with explained(f"{file} cannot be read as a checkpoint of this project"):
        state = torch.load(file, map_location="cpu", weights_only=True)
        meta = state["meta"]
        module = model_module(meta["model"])
        model = module.Model(module.Config(**state["settings"]["model"]))
        # of online.py's policies, only what the mean action or likeliest choice needs
        model.load_state_dict({key: x for key, x in state["model"].items() if "stochastic" not in key})
    return model.to(device).eval(), meta


def command_line():
    parser = Parser(description=__doc__)
    parser.add_argument("run", help="a run folder, or a checkpoint in it, such as RUN/best.pt")
    parser.add_argument("--targets", type=float, nargs="+", help="raw target returns; default: the run's own")
    parser.add_argument("--episodes", type=int, help="per target; default: the run's own, or 10")
    parser.add_argument("--start", help="which start of the environment; default: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero", nargs="+", choices=["rtg", "states", "actions"], default=[])
    parser.add_argument("--video", metavar="FILE", help=".gif of one episode")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for key in ("seed", "targets", "episodes"):
        check_range(key, getattr(args, key))
    model, meta = load_run(args.run, device=pick_device(args.device))
    if meta["env_spec"] is None:
        raise UserError(f"{meta['dataset']} names no environment to act in")
    if args.start and args.start not in meta["starts"]:
        raise UserError(f"--start {args.start}: {nearest(args.start, meta['starts'])}")
    starts = [args.start] if args.start else list(meta["starts"])
    plan = [(s, x, args.episodes or n) for s, x, n in meta["plan"] if s in starts]
    if args.targets:
        plan = [(s, x, args.episodes or 10) for s in starts for x in args.targets]
    if not plan:
        raise UserError("this run was trained without evaluation: give it targets, --targets R1 R2 ...")
    without = f", without {' and '.join(args.zero)}" * bool(args.zero)
    print(f"{title(meta)}, update {meta['step']:,}, seed {args.seed}{without}")
    print(f"playing {sum(n for *_, n in plan)} episodes", flush=True)
    if args.video:      # first: what cannot be written says so before minutes of playing
        target = args.targets[0] if args.targets else meta["headline"]
        got = film(model, meta, args.video, starts[-1], target, args.seed, meta["sample"], args.zero)
        print(f"{args.video}: one episode from the {starts[-1]} start, asked for {target:.1f}, got {got:.1f}")
    envs = [make(meta["env_spec"])]
    print(describe(envs[0]))
    print(table(evaluate(model, meta, plan, args.seed, envs, meta["sample"], args.zero), meta["headline"]))


if __name__ == "__main__":
    run_command(command_line)
