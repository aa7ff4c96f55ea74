"""What a run is made of, and where each value comes from: TrainConfig, the models' PRESETS, the command line.

A value comes from the first of: command line, the presets "small-frames" (frames only) and "small" (--size small, the default without a
GPU), the environment's preset, its family's, "*", the field's default. 'python train.py --show' says which.
"""
import argparse
import dataclasses
import importlib
import math
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import data
from data import HUGE, UserError, nearest, stop
from eval import pick_device

MODELS = sorted(p.stem for p in (Path(__file__).parent / "models").glob("[a-z]*.py"))


@dataclass
class TrainConfig:
    model: str = "dt"
    env: str = "pointmaze-umaze"
    source: typing.Literal["auto", "minari", "d4rl", "dqn", "local"] = "auto"
    data: str = ""                          # folder of the data: a Minari root, HDF5 files, or a DQN replay
    transitions: int = 500_000              # about how many to load, of frames (the papers' 1 % of the DQN replay)
    size: typing.Literal["auto", "paper", "small"] = "auto"     # auto: paper on a GPU, small elsewhere
    seed: int = 0
    steps: int = 100_000                    # gradient updates
    batch_size: int = 64
    lr: float = 1e-4
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 1e-4
    decay: typing.Literal["all", "matrices"] = "all"    # which parameters decay; matrices: weights of linear layers and convolutions alone
    warmup: int = 10_000                    # updates over which the learning rate rises linearly
    schedule: typing.Literal["constant", "cosine"] = "constant"     # cosine: to lr_floor at the last step
    lr_floor: float = 0.0                   # the cosine's lowest point, as a share of lr
    clip: float = 0.25                      # largest gradient norm
    pct_traj: float = 1.0                   # train on the best episodes that hold this fraction of the data
    rtg_scale: float | None = None          # None: the environment's
    reward_scale: float = 1.0
    # returns to ask for, raw but for Atari, where rewards count in [-1, 1]; None: five between the data's 5th and 95th percentile
    targets: tuple[float, ...] | None = None
    eval_episodes: int = 10                 # per target; 0: no evaluation, and no environment is made
    eval_every: int | None = None           # None: four times a run; 0: at the end only
    sticky: float = 0.0                     # Atari: probability that the emulator repeats an action while evaluating; 0.25 in the data
    sample: bool = False                    # discrete actions are drawn while evaluating, not the likeliest taken
    device: str = "auto"
    amp: bool | None = None                 # CUDA: bfloat16 autocast. None: for frames, from d = 256 on and with compile; else casting costs more
    graph: bool = True                      # CUDA: the whole step as one graph
    compile: bool = False                   # torch.compile
    out: str = "runs"
    run: str = ""                           # name of the run's folder in out; default: model-env-sSEED, numbered if taken


def settings(given):
    """(TrainConfig, values of the model's Config, {name: where it came from}) for the fields in given, on top of the presets."""
    name = given.get("model", TrainConfig.model)
    if name not in MODELS:
        raise UserError(f"no model is called {name!r}; {nearest(str(name), MODELS)}")
    module = importlib.import_module(f"models.{name}")
    fields = {f.name: f for f in (*dataclasses.fields(TrainConfig), *dataclasses.fields(module.Config))}
    for key in given:
        if key not in fields:
            raise UserError(f"{name} has no setting {key!r}; {nearest(key, fields)}")
    # NumPy's numbers and paths to plain Python: a checkpoint holds nothing else
    given = {k: x.tolist() if isinstance(x, (np.generic, np.ndarray)) else str(x) if isinstance(x, Path) else x for k, x in given.items()}
    given = {k: tuple(x) if isinstance(x, list) else x for k, x in given.items()}
    hints = typing.get_type_hints(TrainConfig) | typing.get_type_hints(module.Config)
    for key, x in given.items():        # the command line sees to most of this, a keyword of train() is seen here first
        if typing.get_origin(hints[key]) is typing.Literal and x not in typing.get_args(hints[key]):
            raise UserError(f"--{key} {x}: choose from {', '.join(map(str, typing.get_args(hints[key])))}")
        if x is None and type(None) not in typing.get_args(hints[key]):
            raise UserError(f"--{key} cannot be none")
        if not fits(x, hints[key]):
            raise UserError(f"--{key} takes {getattr(hints[key], '__name__', hints[key])}, not {x!r}")
    env = given.get("env", TrainConfig.env)
    size = given.get("size", "auto")
    if size == "auto":
        size = "paper" if pick_device(given.get("device", "auto")).type == "cuda" else "small"
    own = env == "arrays" or env.startswith("minari:")      # data that no paper had
    frames = not own and data.get_env(env).stack
    keys = ["*"] + ([] if own else [data.get_env(env).family, env]) + (["small"] + ["small-frames"] * bool(frames) if size == "small" else [])
    value = {k: f.default for k, f in fields.items()}
    origin = dict.fromkeys(value, "default")
    for source, new in [(f'preset "{key}"', module.PRESETS.get(key, {})) for key in keys] + [("command line", given)]:
        value |= new
        origin |= dict.fromkeys(new, source)
    value["size"] = size
    if "env" not in given and "source" not in given:
        value["source"], origin["source"] = "local", "default without --env"
    cfg = TrainConfig(**{f.name: value.pop(f.name) for f in dataclasses.fields(TrainConfig)})
    for key in ("steps", "batch_size", "lr", "clip", "reward_scale"):
        if not 0 < getattr(cfg, key) < math.inf:
            raise UserError(f"--{key} must be above 0, not {getattr(cfg, key)}")
    if not 0 <= cfg.seed < 2**20:
        raise UserError(f"--seed must be from 0 to about a million, not {cfg.seed}")
    if len(cfg.betas) != 2 or not all(0 <= b < 1 for b in cfg.betas) or not 0 <= cfg.weight_decay < math.inf or not 0 <= value["dropout"] < 1:
        raise UserError("--betas takes two numbers from 0 to below 1, --dropout one, and --weight_decay must not be negative")
    if cfg.targets and not all(abs(x) < HUGE for x in cfg.targets):
        raise UserError("--targets must be finite returns")
    if cfg.transitions < 1 or not 0 <= cfg.lr_floor <= 1:
        raise UserError(f"--transitions must be at least 1, and --lr_floor a share from 0 to 1; not {cfg.transitions} and {cfg.lr_floor}")
    if not 0 < cfg.pct_traj <= 1:
        raise UserError(f"--pct_traj must be above 0 and at most 1, not {cfg.pct_traj}")
    if not 0 <= cfg.sticky < 1:
        raise UserError(f"--sticky is a probability, from 0 to below 1, not {cfg.sticky}")
    if cfg.run and (Path(cfg.run).name != cfg.run or cfg.run == ".."):
        raise UserError(f"--run {cfg.run}: the name of a folder in --out is needed")
    if min(cfg.eval_episodes, cfg.eval_every or 0, cfg.warmup) < 0 or not (cfg.rtg_scale is None or 0 < cfg.rtg_scale < math.inf):
        raise UserError("--eval_episodes, --eval_every and --warmup must not be negative, and --rtg_scale must be above 0 and finite")
    for key in ("context_len", "n_layer", "n_head", "d", "max_ep_len"):
        if value[key] < 1:
            raise UserError(f"--{key} must be at least 1, not {value[key]}")
    if value["d"] % value["n_head"]:
        raise UserError(f"--d {value['d']} must be a multiple of --n_head {value['n_head']}")
    return cfg, value, origin


def fits(x, hint):
    """Whether a value is of a field's type; whole numbers are numbers too, and True is none."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return x in args
    if typing.get_origin(hint) is tuple:
        return isinstance(x, tuple) and all(fits(y, args[0]) for y in x)
    if args:        # one type or None
        return any(fits(x, kind) for kind in args)
    return isinstance(x, (int, float) if hint is float else hint) and (hint is bool or not isinstance(x, bool))


def holds(key, origin, source):
    """Whether a return scale or targets apply to data of this source: a paper's do to the paper's data, the command line's to any."""
    return origin[key] == "command line" or source in ("d4rl", "dqn")


def describe(cfg, values, origin):
    """The settings, one line for each place they come from."""
    groups = {}
    for key, x in (dataclasses.asdict(cfg) | values).items():
        groups.setdefault(origin[key], []).append(f"{key}={x}")
    return "\n".join(f"  {source}: {' '.join(items)}" for source, items in groups.items())


def convert(kind, text):
    """A flag's text as its field's type."""
    if text.lower() == "none":
        return None
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
        return text.lower() in ("true", "1", "yes")
    try:
        return kind(text.replace("_", "")) if kind is int else kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}"
                                         f"{'; several are parted by spaces' if ',' in text else ''}") from None


def parse(argv):
    """(options of the command, {field: value}) from the command line; flags are made from the dataclasses' fields."""
    model = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    model.error = stop
    model.add_argument("--model", default=TrainConfig.model)
    name = model.parse_known_args(argv)[0].model
    if name not in MODELS:
        raise UserError(f"no model is called {name!r}; {nearest(name, MODELS)}")
    module = importlib.import_module(f"models.{name}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="print every setting and where it came from, and stop")
    parser.add_argument("--bench", type=int, metavar="N", help="time N updates; no evaluation")
    parser.add_argument("--resume", action="store_true", help="go on with the last run of this name; give the same flags again")
    parser.add_argument("--seeds", type=int, nargs="+", help="train one run for each seed and print one table")
    parser.add_argument("--no-goal", "--no_goal", dest="goal", action="store_const", const="none", help="mazes: hide the goal from the model")
    for config in (TrainConfig, module.Config):
        hints = typing.get_type_hints(config)
        group = parser.add_argument_group(f"{config.__module__}.{config.__name__}")
        for f in dataclasses.fields(config):
            kind, args = hints[f.name], {}
            options = [a for a in typing.get_args(kind) if a is not type(None)]
            if typing.get_origin(kind) is typing.Literal:
                args = dict(choices=options)
            else:
                if type(None) in typing.get_args(kind):
                    kind = options[0]
                if typing.get_origin(kind) is tuple:
                    args, kind = dict(nargs="+"), typing.get_args(kind)[0]
                elif kind is bool:
                    args = dict(nargs="?", const=True)
                args["type"] = lambda text, kind=kind: convert(kind, text)
                args["metavar"] = kind.__name__.upper()
            names = dict.fromkeys(["--" + f.name, "--" + f.name.replace("_", "-")])
            group.add_argument(*names, dest=f.name, help=f"default {f.default}", **args)
    flags = [s for a in parser._actions for s in a.option_strings]
    parser.error = stop
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        raise UserError(f"{name} has no flag {word}; {nearest(word, flags)}" if word.startswith("-")
                        else f"what is {word!r}? Settings are given as --name value")
    given = {k: (None if v == [None] else tuple(v)) if isinstance(v, list) and k != "seeds" else v for k, v in vars(args).items()}
    options = {k: given.pop(k, None) for k in ("show", "bench", "resume", "seeds")}
    return options, given
