"""Train a model on a data set, evaluate it, and leave a run folder that eval.py and Model.load can use alone.

    python train.py                                              dt on pointmaze-umaze, collected on the spot
    python train.py --model dt --env hopper-medium               any model of models/, any environment of 'python data.py list'
    python train.py --env minari:my/set-v0                       a Minari set of your own
    python train.py --show | --bench 200 | --resume | --seeds 0 1 2

Every field of TrainConfig and of the model's Config is a flag. A value comes from the first of: command line, the "small" preset
(--size small, the default without a GPU), the environment's preset, its family's, "*", the field's default; --show says which.
"""
import contextlib
import csv
import dataclasses
import importlib
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.attention
from torch import nn
from tqdm import tqdm

import data
from data import Prefetch, UserError, Windows
from eval import evaluate, load_run, pick_device, plot_curve, plot_targets, seeds_table, table, title
from settings import describe, holds, parse, settings

# --------------------------------------------------------------------------- model

def build_model(cfg, values, origin, state_shape, act_dim, discrete, max_ep_len, goal_dim):
    """The model, its sizes taken from the data; seeded, so that the same seed gives the same weights."""
    facts = dict(state_shape=tuple(state_shape), act_dim=act_dim, discrete=discrete, max_ep_len=max_ep_len, goal_dim=goal_dim)
    for key, x in facts.items():
        if origin[key] == "command line" and key != "max_ep_len" and values[key] != x:
            raise UserError(f"--{key} comes from the data, where it is {x}")
        if key != "max_ep_len" or origin[key] == "default":     # a paper may ask for a longer timestep table
            values[key], origin[key] = x, "data"
    module = importlib.import_module(f"models.{cfg.model}")
    torch.manual_seed(cfg.seed)
    try:
        return module.Model(module.Config(**values))
    except ValueError as e:
        raise UserError(str(e)) from e


def planned(cfg, values, origin):
    """The model as the facts of its environment make it, before any data are loaded."""
    env = data.get_env(cfg.env)
    goal_dim = env.goal_dim if values["goal"] != "none" else 0
    shape = env.state_shape if env.stack else (env.state_dim + goal_dim,)
    return build_model(cfg, values, origin, shape, env.act_dim, env.discrete, env.max_ep_len, goal_dim)


def counters(model, values):
    """{"params", "mixer_params", "macs"}: all parameters, those of token mixers, multiply-accumulates to predict one window's actions."""
    from torch.utils.flop_counter import FlopCounterMode
    device, K, A = next(model.parameters()).device, values["context_len"], values["act_dim"]
    actions = torch.zeros(1, K, dtype=torch.int64) if values["discrete"] else torch.zeros(1, K, A)
    states = torch.zeros(1, K, *values["state_shape"], dtype=torch.uint8 if len(values["state_shape"]) == 3 else torch.float32)
    batch = dict(states=states, actions=actions, rewards=torch.zeros(1, K, 1), rtg=torch.zeros(1, K, 1),
                 timesteps=torch.arange(K)[None], mask=torch.ones(1, K, dtype=torch.bool))
    was_training = model.training
    # in plain matrix products: the counter knows those, but not the CPU's fused attention
    with torch.no_grad(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        model.train()(**{k: x.to(device) for k, x in batch.items()})       # as in training: an untrained DM acts by an untrained predictor
    model.train(was_training)
    return dict(params=sum(p.numel() for p in model.parameters()), macs=flops.get_total_flops() // 2,
                mixer_params=sum(p.numel() for name, p in model.named_parameters() if ".mixer." in name))


# --------------------------------------------------------------------------- one training step

def learning_rate(cfg, step):
    """The learning rate of update step (from 0): linear warm-up, then constant or a half cosine down to lr_floor of it."""
    warm = min(1.0, (step + 1) / max(1, cfg.warmup))
    if cfg.schedule == "constant":
        return cfg.lr * warm
    p = min(1.0, max(0.0, (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)))      # clamped: unclamped, the rate climbs again
    return cfg.lr * warm * max(cfg.lr_floor, 0.5 * (1 + math.cos(math.pi * p)))     # the floor cuts the cosine, as released for Atari


def make_optimizer(model, cfg, device):
    groups = (model.param_groups(cfg.weight_decay) if hasattr(model, "param_groups")
              else [dict(params=list(model.parameters()), weight_decay=cfg.weight_decay)])
    if cfg.decay == "matrices":
        matrices = {id(p) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.MultiheadAttention))
                    for name, p in m.named_parameters(recurse=False) if name.endswith("weight")}
        groups = [dict(g, params=[p for p in g["params"] if (id(p) in matrices) == decays], weight_decay=g["weight_decay"] * decays)
                  for g in groups for decays in (True, False)]
    cuda = device.type == "cuda"
    # the rate is a tensor on CUDA, so that a captured graph reads today's value and not the one of its capture
    groups = [dict(g, lr=torch.tensor(cfg.lr, device=device) if cuda else cfg.lr) for g in groups]
    return torch.optim.AdamW(groups, betas=tuple(cfg.betas), fused=True, capturable=cuda)


def set_learning_rate(optimizer, value):
    for group in optimizer.param_groups:
        lr = value * group.get("lr_scale", 1.0)
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def make_step(model, windows, optimizer, cfg, generator, feed=None):
    """A function that makes one update (sample, forward, backward, clip, AdamW) and returns the model's log of tensors.

    feed: a Prefetch, where the windows are not on the model's device.
    """
    device = next(model.parameters()).device
    loss_of = torch.compile(model.loss) if cfg.compile else model.loss
    inbox = {k: v.clone() for k, v in feed.coming.result().items()} if feed else None       # a batch's fixed place, from which a graph reads
    clipped = {}        # one norm for all that share a learning rate; a predictor with a rate of its own neither shrinks the rest nor is shrunk
    for group in optimizer.param_groups:
        clipped.setdefault(group.get("lr_scale", 1.0), []).extend(group["params"])

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and bool(cfg.amp)):
            loss, log = loss_of(windows.sample(cfg.batch_size, generator) if inbox is None else inbox)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for params in clipped.values():
            nn.utils.clip_grad_norm_(params, cfg.clip)
        optimizer.step()
        return log

    run = step
    if device.type == "cuda" and cfg.graph:
        try:
            run = capture(step, model, optimizer, None if feed else generator)
        except Exception as e:      # whatever cannot be captured still runs, slower
            print(f"the step does not fit a CUDA graph ({type(e).__name__}: {str(e).splitlines()[0]}); it runs without")

    def fed():
        for k, x in feed.next().items():
            inbox[k].copy_(x)
        return run()
    return fed if feed else run


def capture(step, model, optimizer, generator):
    """The step as one CUDA graph. Warming up must not count as training: weights, optimiser and generators are put back."""
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    moments = {k: {n: x.clone() if torch.is_tensor(x) else x for n, x in s.items()} for k, s in optimizer.state.items()}
    noise, cuda_noise = generator and generator.get_state(), torch.cuda.get_rng_state()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if generator:
            graph.register_generator_state(generator)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            log = step()
    finally:
        torch.cuda.synchronize()
        model.load_state_dict(weights)
        for p, s in optimizer.state.items():    # in place: the graph holds these very tensors
            for n, x in s.items():
                x.copy_(moments[p][n]) if p in moments else x.zero_()
        if generator:
            generator.set_state(noise)
        torch.cuda.set_rng_state(cuda_noise)

    def replay():
        graph.replay()
        return log
    return replay


# --------------------------------------------------------------------------- run folder

class NothingToResume(UserError):
    pass


class Busy(UserError):
    pass


def run_folder(cfg, resume):
    """The folder of this run: new and empty, or the newest of its name to resume."""
    name = cfg.run or f"{cfg.model}-{cfg.env.replace('minari:', '').replace('/', '-')}-s{cfg.seed}"
    out = Path(cfg.out).expanduser()
    if resume:
        numbered = re.compile(re.escape(name) + r"(-\d+)?")
        begun = [p for p in (out.iterdir() if out.is_dir() else []) if numbered.fullmatch(p.name) and (p / "last.pt").is_file()]
        if not begun:
            raise NothingToResume(f"nothing to resume: no {out / name} with a checkpoint")
        return max(begun, key=lambda p: (len(p.name), p.name))
    try:
        for number in range(1, 10_000):
            folder = out / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
    except OSError as e:
        raise UserError(f"cannot write to {out} ({e}); choose another folder with --out") from e
    raise UserError(f"{out} is full of runs called {name}")


@contextlib.contextmanager
def hold(folder):
    """Keep every other process from writing to this run folder; the system lets go of the lock when its process ends, however it ends."""
    try:
        file = open(folder / "lock", "a")
    except OSError as e:
        raise UserError(f"cannot write to {folder} ({e}); nothing in it was changed") from e
    with file:
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as e:
            raise Busy(f"{folder} is being written by another process; wait for it, stop it, or start another run without --resume") from e
        except OSError:     # a network disk that knows no locks
            pass
        yield folder


def write_atomically(path, write):
    """write(temporary path), then rename: a killed process leaves the old file or the new one, never half of one."""
    part = path.with_name("part-" + path.name)
    try:
        write(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as e:        # torch.save reports a full disk as RuntimeError
        raise UserError(f"cannot write {path} ({e}); nothing was lost up to the last checkpoint") from e
    finally:
        part.unlink(missing_ok=True)            # there only if something stopped us


class Log:
    """log.csv: a row for each logged update, and one for each (update, target) of an evaluation; checkpoint says which weights played.

    There is no clock in it, so that a resumed run writes the very file of an uninterrupted one.
    """
    COLUMNS = ["step", "model", "env", "dataset", "source", "seed", "lr", "loss", "checkpoint", "start", "target", "episodes",
               "return_mean", "return_std", "score", "success", "length", "achieved_mean", "abs_error", "error_of_mean"]

    def __init__(self, path, meta):
        self.path, self.columns, self.rows = path, list(self.COLUMNS), []
        self.common = {k: meta[k] for k in ("model", "env", "dataset", "source", "seed")}

    def add(self, **row):
        self.columns += [k for k in row if k not in self.columns]       # a model's own terms of the loss
        self.rows.append(self.common | row)

    def write(self):
        def dump(path):
            with open(path, "w", newline="", encoding="utf-8") as f:
                out = csv.DictWriter(f, self.columns)
                out.writeheader()
                out.writerows(self.rows)
        write_atomically(self.path, dump)


# --------------------------------------------------------------------------- training

def prepare(cfg, values, origin, trajectories=None):
    """(model, windows, meta, trajectories), on the device. meta is all that acting needs besides the weights, in tensors and plain Python."""
    device, env = pick_device(cfg.device), data.ENVS.get(cfg.env) if trajectories is None else None
    goal = values["goal"] != "none"
    t = data.load(cfg.env, cfg.source, cfg.data, goal, cfg.transitions) if trajectories is None else trajectories
    if cfg.pct_traj < 1:
        t = t.top(cfg.pct_traj)
    goal_dim = t.goals.shape[1] if goal and t.goals is not None else 0
    act_dim = t.n_actions or t.actions.shape[1]
    model = build_model(cfg, values, origin, t.state_shape if t.stack else (t.states.shape[1] + goal_dim,), act_dim,
                        t.n_actions is not None, t.max_ep_len, goal_dim).to(device)
    if cfg.rtg_scale is None or not holds("rtg_scale", origin, t.source):
        cfg.rtg_scale = env.scale(t.source) if env else max(1.0, float(t.returns.abs().max()))     # nothing known: returns of at most 1
        origin["rtg_scale"] = "environment" if env else "data"
    home = device
    if t.stack and device.type == "cuda" and t.states.numel() > 0.5 * torch.cuda.mem_get_info()[0]:
        home = torch.device("cpu")      # frames that would fill the GPU stay outside, and batches are sent in ahead of their use
    if cfg.amp is None:
        cfg.amp, origin["amp"] = bool(t.stack) or values["d"] >= 256 or cfg.compile, "size"
    windows = Windows(t, values["context_len"], home, cfg.rtg_scale, cfg.reward_scale, values["max_ep_len"], goal)
    # D4RL's AntMaze score is the success rate, not a return: here an episode goes on after success
    meta = dict(
        model=cfg.model, env=cfg.env if trajectories is None else t.dataset, dataset=t.dataset, source=t.source,
        env_spec=data.sticky(t.env_spec, cfg.sticky) or t.env_spec,
        layout=t.layout, state_shape=list(values["state_shape"]), clip_rewards=t.clip_rewards, goal=goal_dim > 0, state_mean=windows.mean,
        state_std=windows.std, rtg_scale=cfg.rtg_scale, reward_scale=cfg.reward_scale,
        act_dim=act_dim, n_actions=t.n_actions, action_start=t.action_start, action_low=t.action_low, action_high=t.action_high,
        max_ep_len=values["max_ep_len"], ref=env.ref if env and env.family != "antmaze" else None,
        starts=env.starts if env else {"random": None}, sample=cfg.sample,
        seed=cfg.seed, step=0, headline=None, plan=[])
    return model, windows, meta, t


def choose_targets(cfg, origin, meta, t, env):
    """Write into meta which returns to ask for, the headline among them, from which starts and in how many episodes; says why in a line."""
    returns, share, place = t.returns.double().numpy(), 95, " of clipped returns" if t.clip_rewards else ""
    starts = list(meta["starts"])
    if "far" in starts and t.goals is not None:
        maze, pair = env.unwrapped.maze, meta["starts"]["far"]
        near = torch.ones(len(t.lengths), dtype=torch.bool)
        for x, cell in ((t.states, pair["reset_cell"]), (t.goals, pair["goal_cell"])):
            centre = torch.as_tensor(maze.cell_rowcol_to_xy(np.array(cell)), dtype=torch.float32)
            near &= (x[t.starts[:-1], :2] - centre).abs().amax(1) < 0.5 * maze.maze_size_scaling
        if near.sum() >= 10:
            returns, share, place = returns[near.numpy()], 80, " of the far pair"
    asked = cfg.targets and holds("targets", origin, meta["source"])
    targets = list(cfg.targets) if asked else np.linspace(*np.percentile(returns, [5, 95]), 5).round(1).tolist()
    headline = targets[0] if asked else targets[-1] if share == 95 else float(np.percentile(returns, share).round(1))
    cfg.targets, origin["targets"] = tuple(targets), origin["targets"] if asked else "data"
    meta["headline"] = headline
    meta["plan"] = [(s, x, cfg.eval_episodes) for s in starts for x in dict.fromkeys(targets)]
    if headline not in targets:
        meta["plan"].insert(0, (starts[0], headline, 5 * cfg.eval_episodes))
    return (f"targets {', '.join(f'{x:g}' for x in targets)}, headline {headline:g} "
            f"({origin['targets'] if asked else f'{share}th percentile{place}; targets from its 5th to its 95th'})")


def train(trajectories=None, resume=False, **given):
    """Train and evaluate one run; given are the settings of the command line. Returns {"run", "rows", "best_rows", "meta", "seconds"}.

    trajectories: a Trajectories of your own in place of an environment's data; only the presets "*" and "small" apply then.
    """
    with contextlib.ExitStack() as stack:
        return train_in(stack, trajectories, resume, given)


def train_in(stack, trajectories, resume, given):
    """train, with the run folder's lock on the stack: an exception that is looked at later, as in a notebook, must not keep the lock."""
    began = time.time()
    cfg, values, origin = settings(given if trajectories is None else {"env": "arrays"} | given)
    folder = stack.enter_context(hold(run_folder(cfg, resume))) if resume else None      # what cannot be resumed says so before the data load
    if trajectories is None and cfg.env in data.ENVS:
        with torch.device("meta"):      # no memory, no time: sizes that make no model say so before the data load, too
            planned(cfg, dict(values), dict(origin))
    model, windows, meta, t = prepare(cfg, values, origin, trajectories)
    device = next(model.parameters()).device
    generator = torch.Generator(windows.table.device).manual_seed(cfg.seed)         # draws batches and nothing else
    optimizer = make_optimizer(model, cfg, device)
    envs, note = [], "no evaluation"
    if cfg.eval_episodes and meta["env_spec"] is not None:
        envs.append(data.make_env(meta["env_spec"]))
        check_environment(envs[0], meta)
        note = "\n".join(filter(None, [choose_targets(cfg, origin, meta, t, envs[0]), data.describe(envs[0])]))
    folder = folder or stack.enter_context(hold(run_folder(cfg, resume)))       # made no sooner: what fails above leaves no empty folder
    if t.source == "d4rl" and cfg.env in data.ENVS and data.ENVS[cfg.env].note:
        note += f"\nnote: {data.ENVS[cfg.env].note}"
    where = f"{device}, {torch.get_num_threads()} threads" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name()})"
    print(f"{title(meta)}\n{t.summary()}\n{note}\n{cfg.steps:,} updates of {cfg.batch_size} windows of {values['context_len']} steps, "
          f"{sum(p.numel() for p in model.parameters()):,} parameters, on {where}\n"
          f"settings by where they come from\n{describe(cfg, values, origin)}\nrun folder {folder}", flush=True)
    log = Log(folder / "log.csv", meta)
    # what decides the numbers; a run is only continued with the same
    fixed = {k: x for k, x in (dataclasses.asdict(cfg) | values).items() if k not in ("device", "out", "run", "data", "amp", "graph", "compile")}
    some = t.states[::97] if t.stack else t.states      # gigabytes of frames take long to add up
    fixed |= dict(dataset=t.dataset, data_source=t.source, transitions=len(t), sum_of_states=float(some.sum(dtype=torch.float64)),
                  sum_of_rewards=float(t.rewards.sum(dtype=torch.float64)))
    done, best, sums, count = 0, None, {}, 0
    if resume:
        state = read_checkpoint(folder / "last.pt", device, fixed)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["torch_rng"].cpu())
        if device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())
        done, best, sums, count, log.columns, log.rows = (state[k] for k in ("step", "best", "sums", "count", "columns", "rows"))
        print(f"resuming after update {done:,}", flush=True)

    def save(which="last", **more):
        meta["step"] = done
        content = dict(model=model.state_dict(), model_config=values, settings=fixed, meta=meta, step=done, **more)
        write_atomically(folder / f"{which}.pt", lambda path: torch.save(content, path))

    def save_all():
        log.write()
        save(optimizer=optimizer.state_dict(), generator=feed.state if feed else generator.get_state(), torch_rng=torch.get_rng_state(), best=best,
             sums=sums, count=count, columns=log.columns, rows=log.rows, cuda_rng=torch.cuda.get_rng_state() if device.type == "cuda" else None)

    def play(plan, player=model, checkpoint="last", step=None):
        rows = evaluate(player, meta, plan, cfg.seed, envs, cfg.sample)
        for row in rows:
            log.add(step=step or done, checkpoint=checkpoint, **{k: x for k, x in row.items() if k not in ("returns", "achieved")})
        return rows

    model.train()
    feed = Prefetch(windows, cfg.batch_size, generator, device) if windows.table.device != device else None
    step = make_step(model, windows, optimizer, cfg, generator, feed)
    log_every, save_every = max(1, cfg.steps // 100), max(1, cfg.steps // 20)
    eval_every = max(1, cfg.steps // 4) if cfg.eval_every is None else cfg.eval_every
    quick = [(s, x, min(n, 10)) for s, x, n in meta["plan"] if s == list(meta["starts"])[-1]]       # played on the way
    stop, started, first = Stopper(), time.time(), done
    with stop, tqdm(total=cfg.steps, initial=done, unit="update", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        while done < cfg.steps and not stop.asked:
            lr = learning_rate(cfg, done)
            set_learning_rate(optimizer, lr)
            for k, x in step().items():
                sums[k] = sums[k] + x if k in sums else x.clone()
            done, count = done + 1, count + 1
            bar.update()
            if bar.disable and done == first + 20:
                print(f"about {(time.time() - started) / 20 * (cfg.steps - done) / 60:.1f} minutes to train", flush=True)
            if done % log_every == 0 or done == cfg.steps:
                mean = {k: float(x) / count for k, x in sums.items()}
                if not math.isfinite(mean["loss"]):
                    raise UserError(f"the loss is {mean['loss']} at update {done}: training has diverged; a smaller --lr may help")
                log.add(step=done, lr=lr, **mean)
                sums, count = {}, 0
                bar.set_postfix(loss=f"{mean['loss']:.4f}")
                if bar.disable and done % (10 * log_every) == 0:
                    print(f"update {done:6,}  loss {mean['loss']:.4f}  {(done - first) / (time.time() - started):.1f} updates/s", flush=True)
            if quick and eval_every and done % eval_every == 0 and done < cfg.steps:
                value = quality(play(quick), meta)
                if best is None or value > best:
                    best = value
                    save("best")
            if done % save_every == 0 or done == cfg.steps:
                save_all()
    if stop.asked and done < cfg.steps:
        save_all()
        print(f"stopped after update {done:,}; the same command with --resume goes on", flush=True)
        sys.exit(130)

    result = dict(run=folder, rows=[], best_rows=[], meta=meta, seconds=time.time() - began)
    text = f"{title(meta)}, seed {cfg.seed}\ntrained in {time.time() - started:.0f} s on {where}"
    if meta["plan"]:
        rows = result["rows"] = play(meta["plan"])
        value = quality(rows, meta)
        if best is None or value >= best:
            best = value
            save("best")
        text += f"\nlast checkpoint (update {done:,})\n{table(rows, meta['headline'])}"
        if not (folder / "best.pt").is_file():
            save("best")
        best_model, best_meta = load_run(folder, "best", device)
        best_step = best_meta["step"]
        if best_step == done:
            text += "\nthe best checkpoint is the last"
        else:
            plan = [p for p in meta["plan"] if p[1] == meta["headline"]][:1]
            result["best_rows"] = play(plan, best_model, "best", best_step)
            text += f"\nbest checkpoint (update {best_step:,}, chosen on the way)\n{table(result['best_rows'], meta['headline'])}"
        write_atomically(folder / "targets.png", lambda path: plot_targets(rows, path, title(meta)))
        write_atomically(folder / "table.txt", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    log.write()
    write_atomically(folder / "curve.png", lambda path: plot_curve(log.rows, path))
    result["seconds"] = time.time() - began
    files = "last.pt, log.csv, curve.png" + (", best.pt, targets.png, table.txt" if meta["plan"] else "")
    print(f"\n{text}\n{result['seconds']:.0f} s in all; {folder} holds {files}", flush=True)
    return result


def check_environment(env, meta):
    """Refuse, before training, an environment whose states or actions are not those of the data."""
    state, goal = data.observe(env.reset(seed=0)[0], meta["layout"])
    if meta["layout"]["stack"]:
        got, want = list(state.shape), meta["state_shape"][1:]
    else:
        got, want = len(state) + (len(goal) if meta["goal"] else 0), len(meta["state_mean"])
    space = env.action_space
    actions = getattr(space, "n", None) if meta["n_actions"] else (space.shape or [0])[-1]
    if got != want or actions != meta["act_dim"]:
        raise UserError(f"{meta['dataset']} does not fit its environment: states have {want} numbers there and {got} in the environment; actions "
                        f"{meta['act_dim']} and {space}")


def read_checkpoint(path, device, fixed):
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        old, _ = state["settings"], state["optimizer"]
    except Exception as e:      # torch raises what the damage happens to cause
        raise UserError(f"{path} cannot be read ({type(e).__name__}: {str(e)[:200]})") from e
    changed = [f"{k} was {old.get(k)} and is now {x}" for k, x in fixed.items() if old.get(k) != x]
    if changed:
        raise UserError(f"{path.parent} was started with other settings: {'; '.join(changed)}\nTo resume another run, name its folder with --run")
    return state


def quality(rows, meta):
    """What "best" is chosen by: success where there is one, then the return, from the last start at the target nearest the headline."""
    row = min((r for r in rows if r["start"] == list(meta["starts"])[-1]), key=lambda r: abs(r["target"] - meta["headline"]))
    return [row["success"] or 0.0, row["return_mean"]]


class Stopper:
    """Ctrl-C and kill let the current update finish and a checkpoint be written; a second Ctrl-C ends at once."""

    def __init__(self):
        self.asked, self.old = False, {}

    def ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self):
        try:
            self.old = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:      # not the main thread: whoever runs us handles signals
            pass
        return self

    def __exit__(self, *_):
        for s, handler in self.old.items():
            signal.signal(s, handler)


# --------------------------------------------------------------------------- without training

def bench(updates, given):
    """Time whole updates, batch sampling included, on random data of the environment's shape; the last line printed is JSON."""
    cfg, values, origin = settings(given)
    env, g = data.get_env(cfg.env), np.random.default_rng(0)
    N, T = (20_000, 1000) if env.stack else (200_000, env.max_ep_len)
    E = -(-N // T)
    goals = g.standard_normal((E * T, env.goal_dim), np.float32) if env.goal_dim else None
    states = g.integers(0, 256, (E * T, *env.state_shape[1:]), np.uint8) if env.stack else g.standard_normal((E * T, env.state_dim), np.float32)
    actions = g.integers(0, env.act_dim, E * T) if env.discrete else g.uniform(-1, 1, (E * T, env.act_dim))
    t = data.Trajectories(states, actions, g.standard_normal(E * T, np.float32), [T] * E, goals=goals, dataset="random numbers", max_ep_len=T,
                          n_actions=env.act_dim if env.discrete else None, stack=env.stack)
    model, windows, _, _ = prepare(cfg, values, origin, t)
    device = next(model.parameters()).device
    sizes = counters(model, values)
    model.train()
    optimizer = make_optimizer(model, cfg, device)
    set_learning_rate(optimizer, cfg.lr)
    step = make_step(model, windows, optimizer, cfg, torch.Generator(device).manual_seed(cfg.seed))
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(min(20, updates)):
        step()
    wait()
    times = []
    for _ in range(updates):
        begin = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    ms = float(np.median(times))
    if cuda:
        peak = torch.cuda.max_memory_reserved() / 2**20
    else:
        import resource  # Unix only
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    print(describe(cfg, values, origin))
    print(json.dumps(dict(model=cfg.model, env=cfg.env, ms_per_step=round(ms, 3), steps_per_s=round(1e3 / ms, 1), **sizes, peak_mib=round(peak),
                          batch_size=cfg.batch_size, context_len=values["context_len"], torch=torch.__version__,
                          device=torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads")))


def show(given):
    """Print every setting and where it came from, and the size of the model where the environment is one of data.ENVS."""
    cfg, values, origin = settings(given)
    env, sizes = data.ENVS.get(cfg.env), None
    if env:
        sizes = counters(planned(cfg, values, origin), values)
        if cfg.rtg_scale is None or not holds("rtg_scale", origin, cfg.source):
            cfg.rtg_scale, origin["rtg_scale"] = env.scale(cfg.source), "environment"
        if not holds("targets", origin, cfg.source):
            cfg.targets, origin["targets"] = None, "data, when it is loaded"
    for key, x in (dataclasses.asdict(cfg) | values).items():
        print(f"{key:16s} {str(x):28s} {origin[key]}")
    if sizes:
        print(", ".join(f"{x:,} {k}" for k, x in sizes.items()))


# --------------------------------------------------------------------------- command line

def main():
    options, given = parse(sys.argv[1:])
    torch.set_float32_matmul_precision("high")
    if options["show"]:
        show(given)
    elif options["bench"] is not None:
        if options["bench"] < 1:
            raise UserError("--bench needs a number of updates")
        bench(options["bench"], given)
    elif options["seeds"]:
        if len(set(options["seeds"])) < len(options["seeds"]):
            raise UserError("--seeds names a seed twice")
        results = []
        for s in options["seeds"]:
            one = given | {"seed": s} | ({"run": f"{given['run']}-s{s}"} if given.get("run") else {})
            try:        # of several seeds, those not yet begun start now
                results.append(train(resume=bool(options["resume"]), **one))
            except NothingToResume:
                results.append(train(**one))
        if results[0]["rows"]:
            print("\n" + seeds_table([r["rows"] for r in results]))
    else:
        train(resume=bool(options["resume"]), **given)


if __name__ == "__main__":
    data.run_command(main)
