"""What a run is made of, and where each value comes from.

A value comes from the first of these that names it: the command line; the presets "small-frames" (of frames)
and "small" (--size small, the default without a GPU); the environment's preset, its family's, "*"; the
default of the field. 'python train.py --show' prints each value with its source. What only the data can tell
is filled in when they are loaded. After that a run's Settings never change.
"""
import dataclasses
import importlib
import inspect
import re
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import envs
from errors import Parser, UserError, nearest, short

MODELS = sorted(path.stem for path in (Path(__file__).parent / "models").glob("[a-z]*.py"))
PAPER_SOURCES = ("d4rl", "dqn")     # the papers' own data: only there do their targets and return scales hold


@dataclass(frozen=True)
class TrainConfig:
    model: str = "dt"                       # a file of models/
    env: str = "pointmaze-umaze"            # a name of 'python data.py list', or minari:<id> of your own set
    source: typing.Literal["auto", "minari", "d4rl", "dqn", "local"] = "auto"   # auto: cached or downloaded
    data: str = ""                          # folder of the data: a Minari root, HDF5 files, or a DQN replay
    transitions: int = 500_000              # of frames: about how many to load (papers: 1 % of the replay)
    size: typing.Literal["auto", "paper", "small"] = "auto"     # auto: paper on a GPU, small elsewhere
    seed: int = 0                           # of weights, batches, dropout and evaluation
    steps: int = 100_000                    # gradient updates
    batch_size: int = 64                    # windows an update
    lr: float = 1e-4                        # learning rate of AdamW
    betas: tuple[float, ...] = (0.9, 0.999)     # AdamW's two averages
    weight_decay: float = 1e-4              # AdamW's
    decay: typing.Literal["all", "matrices"] = "all"    # matrices: no decay of biases, norms and tables
    warmup: int = 10_000                    # updates over which the learning rate rises linearly
    schedule: typing.Literal["constant", "cosine"] = "constant"     # cosine: to lr_floor at the last update
    lr_floor: float = 0.0                   # the cosine's lowest point, as a share of lr
    clip: float = 0.25                      # largest gradient norm
    pct_traj: float = 1.0                   # train on the best episodes that hold this share of the data
    rtg_scale: float | None = None          # returns are divided by it; none: the environment's
    reward_scale: float = 1.0               # rewards are divided by it
    targets: tuple[float, ...] | None = None    # returns to ask for; none: five from the data's 5th to 95th %
    eval_episodes: int = 10                 # per target; 0: no evaluation, and no environment is made
    eval_every: int | None = None           # updates between evaluations; none: a quarter; 0: at the end only
    sticky: float = 0.0                     # Atari: chance that the emulator repeats an action (data: 0.25)
    sample: bool = False                    # evaluation samples discrete actions: not the likeliest
    device: str = "auto"                    # auto: cuda where there is one, else cpu
    amp: bool | None = None                 # CUDA: bfloat16; none: for frames, compile, and from d = 256
    graph: bool = True                      # CUDA: the whole update as one graph
    compile: bool = False                   # torch.compile
    out: str = "runs"                       # folder of the run folders
    run: str = ""                           # name of the run's folder, if not model-env-sSEED


# What numbers may be, in TrainConfig and in the models' Config alike. All others must be finite.
RANGES = {
    "[0, inf)": "weight_decay warmup eval_every k_cost",
    "[0, 100000]": "eval_episodes",
    "(0, inf)": "clip",
    "[1, inf)": "transitions steps window kernel",
    "[0, 1]": "lr_floor conv_ratio",
    "(0, 1]": "pct_traj",
    "[0, 1)": "betas sticky dropout attn_dropout conv_dropout",
    "(0, 10]": "lr",
    "[0, 1048576)": "seed",
    "[1, 1000000]": "batch_size",
    "[1e-06, 1e+30]": "rtg_scale reward_scale",
    "(-1e+30, 1e+30)": "targets",
    "[1, 1000]": "n_layer n_head step_heads patch",
    "[1, 10000]": "context_len",
    "[1, 100000]": "d step_d episodes",
    "[1, 10000000]": "max_ep_len",
    "[0, 1000]": "timestep_std",
}
RANGE_OF = {key: text for text, keys in RANGES.items() for key in keys.split()}
LARGEST_BATCH = 2**20           # steps in a batch: batch_size * context_len
LARGEST_MODEL = 2 * 10**9       # parameters


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. origin: {field: where its value comes from}."""
    train: TrainConfig
    model: typing.Any       # the model's Config
    origin: dict

    @classmethod
    def of(cls, values, origin):
        """Settings from one dict of values. Raises UserError for one that is out of its range."""
        for key, x in values.items():
            check_range(key, x)
        steps, run = values["batch_size"] * values["context_len"], values["run"]
        if steps > LARGEST_BATCH:
            raise UserError(f"--batch_size times --context_len is {steps:,}; at most {LARGEST_BATCH:,} fit")
        if len(values["betas"]) != 2:
            raise UserError("--betas takes two numbers")
        if run and (Path(run).name != run or run == ".."):
            raise UserError(f"--run {run}: the name of a folder in --out is needed")
        train = {f.name: values[f.name] for f in dataclasses.fields(TrainConfig)}
        config = model_module(values["model"]).Config
        return cls(TrainConfig(**train), config(**{k: values[k] for k in values.keys() - train}), origin)

    def values(self):
        return vars(self.train) | vars(self.model)

    def replace(self, source, **new):
        """The same with these values, which come from source."""
        return Settings.of(self.values() | new, self.origin | dict.fromkeys(new, source))

    def describe(self):
        """A line for each place that values come from."""
        groups = {}
        for key, x in self.values().items():
            groups.setdefault(self.origin[key], []).append(f"{key}={x}")
        return "\n".join(f"  {source}: {' '.join(items)}" for source, items in groups.items())


def model_module(name):
    if name not in MODELS:
        raise UserError(f"no model is called {name!r}; {nearest(str(name), MODELS)}")
    return importlib.import_module(f"models.{name}")


def model_of(settings):
    """The model, its weights decided by the seed. Raises UserError for sizes or switches that make none."""
    torch.manual_seed(settings.train.seed)
    try:
        return model_module(settings.train.model).Model(settings.model)
    except ValueError as error:
        raise UserError(str(error)) from error


def check_model(settings):
    """Raise UserError for sizes or switches that make no model, without the memory that one takes."""
    with torch.device("meta"):
        count = sum(p.numel() for p in model_of(settings).parameters())
    if count > LARGEST_MODEL:
        raise UserError(f"a model of these sizes has {count:,} parameters; at most {LARGEST_MODEL:,} fit")


def pick_device(name):
    """A torch device that works here; auto is CUDA where there is one, with TF32 for matrix products."""
    torch.set_float32_matmul_precision("high")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
        if device.type == "cuda":
            torch.cuda.set_device(device)       # graphs and generators are those of the current one
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        why = short(error)[:150]
        raise UserError(f"--device {name} cannot be used here ({why}); use --device auto or cpu") from error
    return device


# ------------------------------------------------------------------- presets and the command line's values

def resolve(given):
    """Settings from {field: value}, on top of the model's PRESETS. Raises UserError for what is wrong."""
    name = given.get("model", TrainConfig.model)
    module = model_module(name)
    fields = {f.name: f for f in (*dataclasses.fields(TrainConfig), *dataclasses.fields(module.Config))}
    hints = typing.get_type_hints(TrainConfig) | typing.get_type_hints(module.Config)
    for key in given:
        if key not in fields:
            raise UserError(f"{name} has no setting {key!r}; {nearest(key, fields)}")
    given = {key: typed(key, x, hints[key]) for key, x in given.items()}

    env = given.get("env", TrainConfig.env)
    size = given.get("size", "auto")
    if size == "auto":
        size = "paper" if pick_device(given.get("device", "auto")).type == "cuda" else "small"
    keys, known = ["*"], None
    if env != "arrays" and not env.startswith("minari:"):       # those are data that no paper had
        known = envs.get_env(env)
        keys += [known.family, env]
    if size == "small":
        keys += ["small", "small-frames"] if known and known.stack else ["small"]

    values = {key: f.default for key, f in fields.items()}
    origin = dict.fromkeys(values, "default")

    def apply(preset):
        new = module.PRESETS.get(preset, {})
        values.update(new)
        origin.update(dict.fromkeys(new, f'preset "{preset}"'))
    for key in keys:
        apply(key)
        for switch in [name for name, x in (values | given).items() if x is True]:
            apply(f"{key} {switch}")        # with --hybrid, "atari hybrid" follows "atari"
    values |= given | {"size": size}
    origin |= dict.fromkeys(given, "command line")
    if "env" not in given and "source" not in given:
        values["source"] = "local"
        origin["source"] = "default without --env"
    return Settings.of(values, origin)


WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def typed(key, x, hint):
    """x as a value of a field's type, in plain Python: from an object, NumPy's too, or a flag's text."""
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        return None if str(x).lower() == "none" else typed(key, x, kinds[0])
    if typing.get_origin(hint) is typing.Literal:
        if x not in kinds:
            raise UserError(f"--{key} {x}: choose from {', '.join(map(str, kinds))}")
        return x
    try:
        if typing.get_origin(hint) is tuple:
            return tuple(typed(key, item, kinds[0]) for item in np.atleast_1d(x).tolist())
        if hint is bool:
            return WORDS[str(x).lower()]
        value = hint(x)
        if isinstance(x, bool) or hint is not str and not isinstance(x, str) and value != x:
            raise ValueError
        return value
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        name = names.get(hint, "numbers")
        several = "; several are parted by spaces" if "," in str(x) else ""
        raise UserError(f"--{key} takes {name}, not {x!r}{several}") from error


def check_range(key, x):
    text = RANGE_OF.get(key, "(-inf, inf)")
    low, high = map(float, text[1:-1].split(","))
    for n in x if isinstance(x, list | tuple) else [x]:
        if isinstance(n, int | float):
            inside = low < n < high or n == low and text[0] == "[" or n == high and text[-1] == "]"
            if not inside:      # as NaN never is
                raise UserError(f"--{key} must be in {text}, not {n}")


# ------------------------------------------------------------------- values that the data decide

def fitted(settings, facts):
    """The settings with the sizes that an Env or Trajectories say."""
    goal_dim = facts.goal_dim if settings.model.goal != "none" else 0
    shape = facts.state_shape if facts.stack else (facts.state_shape[0] + goal_dim,)
    sizes = dict(state_shape=shape, act_dim=facts.act_dim, discrete=facts.discrete, goal_dim=goal_dim)
    for key, x in sizes.items():
        if settings.origin[key] == "command line" and getattr(settings.model, key) != x:
            raise UserError(f"--{key} comes from the data, where it is {x}")
    if settings.origin["max_ep_len"] in ("default", "data"):    # a paper may ask for a longer timestep table
        sizes["max_ep_len"] = facts.max_ep_len
    return settings.replace("data", **sizes)


def completed(settings, facts, source):
    """fitted(), with the return scale, and without what holds for the papers' own data alone."""
    settings = fitted(settings, facts)
    for key in ("targets", "rtg_scale"):
        kept = ["command line"]
        if source in PAPER_SOURCES:
            kept += [x for x in settings.origin.values() if x.startswith("preset")]
        if settings.origin[key] not in kept:
            settings = settings.replace("data", **{key: None})
    cfg, env = settings.train, envs.ENVS.get(settings.train.env)
    if cfg.rtg_scale is None and env:
        settings = settings.replace("environment", rtg_scale=env.scale(source))
    elif cfg.rtg_scale is None:     # nothing is known: returns of at most 1
        settings = settings.replace("data", rtg_scale=max(1.0, float(facts.returns.abs().max())))
    if cfg.amp is None:     # bfloat16 costs more in casts than it saves in small products
        large = facts.stack or settings.model.d >= 256 or cfg.compile
        settings = settings.replace("size", amp=bool(large))
    return settings


# ------------------------------------------------------------------- flags

def parse(argv, parser):
    """({name: value} of the parser's own options, {field: value}) from a command line.

    The parser gets a flag for each field of TrainConfig, and of the Config of the model that --model names.
    The comment behind a field is its help.
    """
    first = Parser(add_help=False)
    first.add_argument("--model", default=TrainConfig.model)
    name = first.parse_known_args(argv)[0].model
    own = {action.dest for action in parser._actions}
    for title, config in (("training", TrainConfig), (name, model_module(name).Config)):
        group = parser.add_argument_group(title)
        comments = dict(re.findall(r"\n    (\w+):[^#\n]*#\s*(.*)", inspect.getsource(config)))
        for field in dataclasses.fields(config):
            kind = str(field.type)
            several = dict(nargs="+") if "tuple" in kind else {}
            how = dict(nargs="?", const=True) if "bool" in kind else several
            names = dict.fromkeys(["--" + field.name, "--" + field.name.replace("_", "-")])
            text = f"{comments.get(field.name, '')} [{field.default}]".replace("%", "%%")
            value = "|".join(re.findall("'(.*?)'", kind)) or "VALUE"
            group.add_argument(*names, dest=field.name, metavar=value, help=text, **how)
    parser.add_argument("--no-goal", "--no_goal", dest="goal", action="store_const", const="none",
                        help="mazes: hide the goal from the model")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        flags = [text for action in parser._actions for text in action.option_strings]
        wrong = f"{name} has no flag {word}; {nearest(word, flags)}"
        if not word.startswith("-"):
            wrong = f"what is {word!r}? Settings are given as --name value"
        raise UserError(wrong)
    values = {key: None if x == ["none"] else x for key, x in vars(args).items()}
    return ({key: x for key, x in values.items() if key in own},
            {key: x for key, x in values.items() if key not in own})
