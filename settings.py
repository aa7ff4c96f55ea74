"""What a run is made of, and where each value comes from.

The first of these that names a value decides: the command line; --size LAYERS-HEADS-WIDTH; with --size small,
the default without a GPU, the presets "small-ENVIRONMENT", "small-FAMILY", "small-frames" (of frames) and
"small"; the environment's preset, its family's, "*"; the default of the field. Papers' targets and return
scales hold for d4rl and dqn alone. What the data decide is filled in when they are loaded. 'python train.py
--show' prints all.
"""
import ast
import dataclasses
import functools
import hashlib
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

import envs
from errors import Parser, UserError, explained, nearest

MODELS = sorted(path.stem for path in (Path(__file__).parent / "models").glob("[a-z]*.py"))

# the last three: layers, heads and width of the DM paper's Table 4, with what else "paper" presets say
Size = Literal["auto", "paper", "small", "3-1-256", "6-4-256", "12-12-768"]


@dataclass(frozen=True)
class TrainConfig:
    model: str = "dt"               # a file of models/
    env: str = "pointmaze-umaze"    # a name of 'python data.py list', or minari:<id> of your own set
    source: Literal["auto", "minari", "d4rl", "dqn", "local"] = "auto"      # auto: cached or downloaded
    data: str = ""                  # folder of the data: a Minari root, HDF5 files, or a DQN replay
    transitions: int = 500_000      # of frames: about how many to load (papers: 1 % of the replay)
    size: Size = "auto"             # auto: paper on a GPU, small elsewhere; others: LAYERS-HEADS-WIDTH
    seed: int = 0                   # of weights, batches, dropout and evaluation
    steps: int = 100_000            # gradient updates
    batch_size: int = 64            # windows an update
    windows: Literal["start", "end", "cover"] = "start"     # start (released) or end anywhere; cover: both
    lr: float = 1e-4                # learning rate of AdamW
    betas: tuple[float, ...] = (0.9, 0.999)     # AdamW's two averages
    weight_decay: float = 1e-4      # AdamW's
    decay: Literal["all", "matrices"] = "all"   # matrices: no decay of biases, norms and tables
    warmup: int = 10_000            # updates over which the learning rate rises linearly
    schedule: Literal["constant", "cosine"] = "constant"    # cosine: to lr_floor at the last update
    lr_floor: float = 0.0           # the cosine's lowest point, as a share of lr
    clip: float = 0.25              # largest gradient norm
    ema: float = 0.0                # weights that act are an average: this share of it stays; 0: the last
    pct_traj: float = 1.0           # train on the best episodes that hold this share of the data
    rtg_scale: float | None = None  # returns are divided by it; none: the environment's
    reward_scale: float = 1.0       # rewards are divided by it
    targets: tuple[float, ...] | None = None    # returns to ask for; none: five from the data's 5th to 95th %
    eval_episodes: int = 10         # per target; 0: no evaluation, and no environment is made
    eval_every: int | None = None   # updates between evaluations; none: a quarter; 0: at the end only
    sticky: float = 0.0             # Atari: chance that the emulator repeats an action (data: 0.25)
    sample: bool = False            # evaluation samples discrete actions: not the likeliest
    device: str = "auto"            # auto: cuda where there is one, else cpu
    amp: bool | None = None         # bfloat16; none: on CUDA for frames, compile, and from d = 256
    graph: bool = True              # CUDA: the whole update as one graph
    compile: bool = False           # torch.compile
    out: str = "runs"               # folder of the run folders
    run: str = ""                   # name of the run's folder, if not model-env-sSEED


# What numbers may be, in TrainConfig and in the models' Config alike. All others must be finite.
RANGES = {
    "[0, inf)": "weight_decay warmup eval_every k_cost timestep_std temperature eta",
    "(0, inf)": "clip",
    "[0, 1]": "lr_floor conv_ratio gamma",
    "(0, 1]": "pct_traj polyak",
    "[0, 1)": "betas ema sticky dropout attn_dropout conv_dropout",
    "(0, 10]": "lr temperature_lr",
    "[0, 1000000]": "seed eval_episodes",
    "[1, 100]": "n_layer",
    "[1, 10000]": "context_len d step_d n_head step_heads patch act_context rollouts copies critic_d",
    "[1, 1000000]": "batch_size episodes",
    "[1, 10000000]": "max_ep_len",
    "[1, inf)": "transitions steps window kernel env_steps updates buffer eval_rounds",
    "[1e-06, 1e+30]": "rtg_scale reward_scale",
    "(-1e+30, 1e+30)": "targets explore",
}


# of all models, with critics and online too; under one name a model's own stand above them
PRESETS = {
    # one that is not told its task must see rewards, and those of more than a few steps
    "small-tasks": dict(context_len=20, batch_size=64, steps=5000, condition="reward", reward_scale=2.0),
    "small-ant-dir": dict(n_layer=3, d=128),        # 64 do not learn to walk
    "small-walker2d": dict(steps=7400),             # with half, DT returns 84 % of what it is asked for
    **dict.fromkeys(("small-maze2d-medium", "small-pointmaze-medium"), dict(batch_size=256, steps=10_000)),
    "small-antmaze-umaze": dict(steps=5000),        # the shortest way of the sets
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; it never changes."""
    # more presets for each model, and more files that decide numbers: online.py has some
    TRAIN, PRESETS, CODE = TrainConfig, {}, []
    train: TrainConfig
    model: object       # the model's Config
    origin: dict            # {field: where its value comes from}

    @classmethod
    def of(cls, values, origin):
        """Settings from one dict of values. Raises UserError for one that is out of its range."""
        for key, x in values.items():
            check_range(key, x)
        if values["batch_size"] * values["context_len"] > 1_000_000:
            raise UserError("--batch_size times --context_len may be at most 1,000,000")
        if len(values["betas"]) != 2:
            raise UserError("--betas takes two numbers")
        if values["run"] != Path(values["run"]).name:
            raise UserError(f"--run {values['run']}: the name of a folder in --out is needed")
        train = {f.name: values[f.name] for f in dataclasses.fields(cls.TRAIN)}
        config = model_module(values["model"]).Config
        return cls(cls.TRAIN(**train), config(**{k: values[k] for k in values.keys() - train}), origin)

    def values(self):
        return vars(self.train) | vars(self.model)

    def replace(self, source, **new):
        """The same with these values, which come from source."""
        return self.of(self.values() | new, self.origin | dict.fromkeys(new, source))

    def describe(self):
        """Text: a line for each place that values come from, but for the defaults."""
        groups = {}
        for key, x in self.values().items():
            if self.origin[key] != "default":
                groups.setdefault(self.origin[key], []).append(f"{key}={x}")
        lines = [f"  {source}: {' '.join(items)}" for source, items in groups.items()]
        return "\n".join(["settings that are not at their defaults", *lines])


def check_range(key, x):
    text = next((text for text, keys in RANGES.items() if key in keys.split()), "(-inf, inf)")
    low, high = map(float, text[1:-1].split(","))
    closed = [low] * (text[0] == "[") + [high] * (text[-1] == "]")
    for n in x if isinstance(x, list | tuple) else [x]:
        if isinstance(n, int | float) and not (low < n < high or n in closed):      # as NaN never is
            raise UserError(f"--{key} must be in {text}, not {n}")


def model_module(name):
    """A file of models/; or for "qt-dt", what qt.py makes of one."""
    method, trunk = parts_of(name)
    if trunk not in MODELS:
        raise UserError(f"no model is called {name!r}; {nearest(str(name), MODELS)}")
    module = importlib.import_module(f"models.{trunk}")
    return importlib.import_module(method).around(module) if method else module


def parts_of(name):
    """("qt", "dt") of "qt-dt"; ("", "dt") of "dt"."""
    trunk = str(name).removeprefix("qt-")
    return "qt" * (trunk != name), trunk


def model_of(settings):
    """The model, its weights decided by the seed. Raises UserError for sizes or switches that make none."""
    torch.manual_seed(settings.train.seed)
    try:
        return model_module(settings.train.model).Model(settings.model)
    except ValueError as error:
        raise UserError(str(error)) from error


def check_model(settings):
    """Raise UserError for sizes or switches that make no model, in no time and memory."""
    with torch.device("meta"):
        count = sum(p.numel() for p in model_of(settings).parameters())
    if count > 2e9:
        raise UserError(f"a model of these sizes has {count:,} parameters; at most 2,000,000,000 fit")


def pick_device(name):
    """A torch device that works here; auto is CUDA where there is one. Matrix products are in TF32."""
    torch.set_float32_matmul_precision("high")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"--device {name} cannot be used here", "; use --device auto or cpu"):
        device = torch.device(name)
        torch.ones(1, device=device).item()
        if device.type == "cuda":
            torch.cuda.set_device(device)       # graphs and generators are those of the current one
    return device


# ------------------------------------------------------------------- where values come from

def resolve(given, kind=Settings):
    """Settings of a kind from {field: value}, on top of presets. Raises UserError for what is wrong."""
    name = given.get("model", TrainConfig.model)
    module = model_module(name)
    fields = {f.name: f for config in (kind.TRAIN, module.Config) for f in dataclasses.fields(config)}
    for key in given:
        if key not in fields:
            raise UserError(f"{name} has no setting {key!r}; {nearest(key, fields)}")
    given = {key: typed(key, x, fields[key].type) for key, x in given.items()}

    size, env = given.get("size", "auto"), given.get("env", TrainConfig.env)
    if size == "auto":
        size = "paper" if pick_device(given.get("device", "auto")).type == "cuda" else "small"
    places, frames = [], []
    if env != "arrays" and not env.startswith("minari:"):       # those are data that no paper had
        places = [envs.get_env(env).family, env]
        frames = ["frames"] * (envs.get_env(env).stack > 0)
    small = ["small", *(f"small-{place}" for place in frames + places)] if size == "small" else []

    values, origin = {}, {}

    def put(new, source):
        values.update(new)
        origin.update(dict.fromkeys(new, source))
    put({key: f.default for key, f in fields.items()}, "default")
    if "env" not in given:
        put({"source": "local"}, "default without --env")
    for group in (["*", *places], small):
        tables = [(preset, table) for preset in group for table in (PRESETS, module.PRESETS)]
        tables += [(preset, kind.PRESETS.get(name, {})) for preset in group]
        for preset, table in tables:
            put(table.get(preset, {}), f'preset "{preset}"')
            for switch in [key for key, x in (values | given).items() if x is True]:
                both = f"{preset} {switch}"     # with --hybrid, "atari hybrid" follows "atari"
                put(table.get(both, {}), f'preset "{both}"')
    if "-" in size:
        sizes = dict(zip(("n_layer", "n_head", "d"), map(int, size.split("-")), strict=True))
        if not (values | given).get("hybrid", True):
            del sizes["n_head"]     # DC without attention has no heads
        put(sizes, f'size "{size}"')
    put(given, "command line")
    return kind.of(values | {"size": size}, origin)


WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def typed(key, x, kind):
    """The value of a field's type that x stands for: a flag's text or an object, NumPy's too."""
    text, kinds = str(x), get_args(kind)
    if type(None) in kinds:     # a flag of several values brings ['none']
        return None if text.strip("[']").lower() == "none" else typed(key, x, kinds[0])
    if Ellipsis in kinds:       # a tuple
        items = x if isinstance(x, list | tuple | np.ndarray) else text.split()
        return tuple(typed(key, item, kinds[0]) for item in items)
    if kinds:       # a Literal
        if text not in kinds:
            raise UserError(f"--{key} {x}: choose from {', '.join(kinds)}")
        return text
    try:
        if kind is bool:
            return WORDS[text.lower()]
        return kind(text.removesuffix(".0") if kind is int else text)
    except (ValueError, KeyError) as error:
        hint = "; several are parted by spaces" * ("," in text)
        raise UserError(f"--{key} takes {KINDS[kind]}, not {x!r}{hint}") from error


def fitted(settings, facts, source="auto"):
    """The settings with what an Env or Trajectories decide: sizes, return scale, and bfloat16 or not.

    Presets' targets and return scales hold for the papers' own data alone, of which source tells.
    """
    cfg, origin, env = settings.train, settings.origin, envs.ENVS.get(settings.train.env)
    goal_dim = facts.goal_dim if settings.model.goal != "none" else 0
    shape = facts.state_shape if facts.stack else (facts.state_shape[0] + goal_dim,)
    new = dict(state_shape=shape, act_dim=facts.act_dim, discrete=facts.discrete, goal_dim=goal_dim)
    for key, x in new.items():
        if origin[key] == "command line" and getattr(settings.model, key) != x:
            raise UserError(f"--{key} comes from the data, where it is {x}")
    if origin["max_ep_len"] in ("default", "data"):     # a paper may ask for a longer timestep table
        new["max_ep_len"] = facts.max_ep_len
    for key in ("targets", "rtg_scale"):
        papers = source in ("d4rl", "dqn") and origin[key].startswith("preset")
        if origin[key] != "command line" and not papers:
            new[key] = None
    if new.get("rtg_scale", cfg.rtg_scale) is None:     # where nothing is known: returns of at most 1
        new["rtg_scale"] = env.scale(source) if env else max(1.0, float(facts.returns.abs().max()))
    if cfg.amp is None:     # bfloat16 costs more in casts than it saves in small products
        large = facts.stack or settings.model.d >= 256 or cfg.compile
        new["amp"] = bool(large) and pick_device(cfg.device).type == "cuda"
    return settings.replace("data", **new)


# ------------------------------------------------------------------- what else decides a run's numbers

DECIDE = {      # of these files, these parts; of the model's all but its presets and its demo
    "data.py": "episode_ends Trajectories.top Windows",
    "envs.py": "make sticky flat observe",
    "eval.py": "rollout evaluate",
    "settings.py": "model_of fitted",
    "train.py": "learning_rate set_learning_rate make_optimizer make_step captured choose_targets "
                "Run.__init__ Run.update Run.play",
}


def code_of(model, env, now=False, also=()):
    """{file, or the environment's name: eight digits} of the code that decides numbers beside the settings.

    They are the same for every version of Python, whatever comments and docstrings say. A process keeps
    those that it saw first, since that is the code that it loaded; now: those of the files as they are.
    also: more files.
    """
    method, trunk = parts_of(model)
    root, names = Path(__file__).parent, DECIDE | {f"models/{trunk}.py": ""} | dict.fromkeys(also, "")
    if method:
        names[f"{method}.py"] = ""
    code = {}
    for file, parts in names.items():
        changed = (root / file).stat().st_mtime_ns if now else None
        code[file] = digits_of(root / file, parts, changed)
    if env in envs.ENVS:
        code[env] = hashlib.sha1(repr(envs.ENVS[env]).encode()).hexdigest()[:8]
    return code


@functools.cache
def digits_of(path, names, changed=None):
    parts = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        name = getattr(node, "name", "")
        if not names and not isinstance(node, ast.If) and not ast.unparse(node).startswith("PRESETS"):
            parts.append(node)
        elif name in names.split():
            parts.append(node)
        elif isinstance(node, ast.ClassDef):
            parts += [x for x in node.body if f"{name}.{getattr(x, 'name', '')}" in names.split()]
    return hashlib.sha1(repr(bare(parts)).encode()).hexdigest()[:8]


def bare(node):
    """A syntax tree as nested lists, without docstrings and without places in the file."""
    if isinstance(node, list):
        return [bare(x) for x in node
                if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    if isinstance(node, ast.AST):
        fields = [(key, bare(x)) for key, x in ast.iter_fields(node) if x is not None and x != []]
        return [type(node).__name__, fields]
    return node


# ------------------------------------------------------------------- the command line

def parse(argv, parser, train=TrainConfig):
    """({name: value} of the parser's own options, {field: value}) from a command line.

    The parser gets a flag for each field of train and of the model's Config, whose comment is its help.
    """
    first = Parser(add_help=False)
    first.add_argument("--model", default=TrainConfig.model)
    name = first.parse_known_args(argv)[0].model
    own = {action.dest for action in parser._actions}
    note = "\nIn brackets: values without a preset. train.py --show prints those of a run.\n"
    parser.description = (parser.description or "") + note
    for title, config in (("training", TrainConfig), ("more", train), (name, model_module(name).Config)):
        group = parser.add_argument_group(title)
        source = "".join(inspect.getsource(kind) for kind in config.__mro__[-2::-1])
        comments = dict(re.findall(r"\n    (\w+):[^#\n]*#\s*(.*)", source))
        for field in dataclasses.fields(config):
            if "--" + field.name in parser._option_string_actions:      # inherited
                continue
            kind = str(field.type)
            count = dict(nargs="+") if "tuple" in kind else {}
            if "bool" in kind:
                count = dict(nargs="?", const=True)
            flags = dict.fromkeys(["--" + field.name, "--" + field.name.replace("_", "-")])
            text = f"{comments.get(field.name, '')} [{field.default}]".replace("%", "%%")
            value = "|".join(re.findall("'(.*?)'", kind)) or "VALUE"
            group.add_argument(*flags, dest=field.name, metavar=value, help=text, **count)
    parser.add_argument("--no-goal", dest="goal", action="store_const", const="none",
                        help="mazes: hide the goal from the model")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0]
        if word.startswith("-"):
            raise UserError(f"{name} has no flag {word}; {nearest(word, parser._option_string_actions)}")
        raise UserError(f"what is {word!r}? Settings are given as --name value")
    given = vars(args)
    return {key: given.pop(key) for key in own & given.keys()}, given
