"""Environments: what each is called, where its data are published, how to make one and read its observations.

ENVS is the table; 'python data.py list' prints it. S state size, A action size, G goal size.
"""
import contextlib
import io
import math
import os
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from errors import UserError, nearest, short

SIDE = 84       # pixels of a frame each way
HUGE = 1e30     # data beyond it are refused: sums and differences of such numbers may not fit into float32
CLIP = 20.0     # normalised state numbers are cut to [-CLIP, CLIP], in training and playing alike
D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"


@dataclass(frozen=True)
class Env:
    """What is known of an environment. What papers chose for it is in the models' PRESETS."""
    family: str                 # key of PRESETS, between "*" and the exact name
    id: str                     # gymnasium id to act in
    state_dim: int              # S without the goal; 0 for frames
    act_dim: int                # A numbers, or A choices if discrete
    max_ep_len: int             # the environment's own step limit
    rtg_scale: float            # returns-to-go are divided by it before a model sees them
    ref: tuple[float, float] | None = None      # returns that score 0 and 100
    minari: str | None = None   # published Minari id
    d4rl: str | None = None     # published HDF5 file, below D4RL_URL
    kwargs: dict = field(default_factory=dict)
    d4rl_kwargs: dict = field(default_factory=dict)     # what makes the environment resemble D4RL's
    d4rl_rtg_scale: float | None = None         # for D4RL's data, where it is another
    goal_dim: int = 0
    discrete: bool = False
    stack: int = 0              # frames that make one state; 0: states are vectors
    clip_rewards: bool = False  # rewards and targets count in [-1, 1] a step, scores in points
    starts: dict = field(default_factory=lambda: {"random": None})      # name -> reset options of evaluation
    note: str = ""

    @property
    def state_shape(self):
        return (self.stack, SIDE, SIDE) if self.stack else (self.state_dim,)

    def scale(self, source):
        """What returns-to-go of this source's data are divided by."""
        return (source == "d4rl" and self.d4rl_rtg_scale) or self.rtg_scale


ENVS: dict[str, Env] = {}

# Reference returns: D4RL (Fu et al., 2020), its infos.py. Return scale: 1000, as released, with D4RL's data;
# with others about the largest return of the local sets, which small models follow better.
# S of ant: its first 27 numbers, without contact forces, of which D4RL and v5 have unequally many.
for _name, _S, _A, _scale, _ref in [
    ("Hopper", 11, 3, 3000.0, (-20.272305, 3234.3)),
    ("HalfCheetah", 17, 6, 7000.0, (-280.178953, 12135.0)),
    ("Walker2d", 17, 6, 3000.0, (1.629008, 4592.3)),
    ("Ant", 27, 8, 1000.0, (-325.6, 3879.7)),
]:
    _family = _name.lower()
    for _level in ("medium", "medium-replay", "medium-expert", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, f"{_name}-v5", _S, _A, 1000, _scale, _ref,
            minari=f"mujoco/{_family}/{_level}-v0" if _level in ("medium", "expert") else None,
            d4rl=f"gym_mujoco_v2/{_family}_{_level.replace('-', '_')}-v2.hdf5",
            kwargs={"include_cfrc_ext_in_observation": False} if _family == "ant" else {},
            d4rl_kwargs={"xml_file": "walker2d.xml"} if _family == "walker2d" else {},     # old friction
            d4rl_rtg_scale=1000.0,
            note="D4RL's data come from older physics than the environment that scores them here")

# Mazes: one goal an episode, which goes on after success: the largest return is the step limit.
_MAZE = dict(kwargs={"continuing_task": True, "reset_target": False}, goal_dim=2, note=(
    "D4RL's maze has other coordinates than gymnasium-robotics' maze that scores here; "
    "to act, train on Minari or local data"))
# Far: from this pair of cells the agent's speed decides the return; from random ones the distance does.
for _size, _id, _len, _reset, _goal, _ref in [
    ("umaze", "UMaze", 300, [1, 1], [3, 1], (23.85, 161.86)),
    ("medium", "Medium", 600, [1, 1], [6, 5], (13.13, 277.39)),
    ("large", "Large", 800, [7, 1], [7, 10], (6.7, 273.99)),
]:
    _maze = ENVS[f"pointmaze-{_size}"] = Env(
        "maze2d", f"PointMaze_{_id}-v3", 4, 2, _len, float(_len), minari=f"D4RL/pointmaze/{_size}-v2",
        starts={"random": None, "far": {"reset_cell": _reset, "goal_cell": _goal}}, **_MAZE)
    # the same environment under the name of D4RL's file and references
    ENVS[f"maze2d-{_size}"] = replace(_maze, ref=_ref, d4rl=f"maze2d/maze2d-{_size}-sparse-v1.hdf5")
for _id, _len, _goal, _maze, _names in [
    ("UMaze", 700, [3, 1], "u-maze", ("umaze", "umaze-diverse")),
    ("Medium", 1000, [6, 6], "big-maze", ("medium-play", "medium-diverse")),
    ("Large", 1000, [7, 10], "hardest-maze", ("large-play", "large-diverse")),
]:
    for _name in _names:
        _many = f"multistart_{_name != 'umaze'}_multigoal_{_name.endswith('diverse')}"
        ENVS[f"antmaze-{_name}"] = Env(
            "antmaze", f"AntMaze_{_id}-v4", 29, 8, _len, float(_len), (0.0, 1.0), f"D4RL/antmaze/{_name}-v1",
            f"ant_maze_v2/Ant_maze_{_maze}_noreset_{_many}_sparse_fixed.hdf5",
            d4rl_rtg_scale=1.0,         # there an episode ends at the goal, with a return of 1
            starts={"fixed": {"reset_cell": [1, 1], "goal_cell": _goal}}, **_MAZE)      # as the sets ask for

# Return scales: the Decision Mixer's released code, but for kitchen, whose returns are 0 to 4.
for _family, _S, _A, _scale, _ref in [
    ("pen", 45, 24, 1000.0, (96.262799, 3076.8331017826877)),
    ("hammer", 46, 26, 1000.0, (-274.856578, 12794.134825156867)),
    ("door", 39, 28, 100.0, (-56.512833, 2880.5693087298737)),
    ("relocate", 39, 30, 1000.0, (-6.425911, 4233.877797728884)),
]:
    for _level in ("human", "cloned", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, f"AdroitHand{_family.capitalize()}-v1", _S, _A, 200, _scale, _ref,
            f"D4RL/{_family}/{_level}-v2", f"hand_dapg_v1/{_family}-{_level}-v1.hdf5")
for _name in ("complete", "partial", "mixed"):
    _tasks = ["bottom burner", "light switch"] if _name == "mixed" else ["light switch", "slide cabinet"]
    ENVS[f"kitchen-{_name}"] = Env(     # without D4RL's file, whose 60 numbers are not this environment's 59
        "kitchen", "FrankaKitchen-v1", 59, 9, 280, 1.0, (0.0, 4.0), f"D4RL/kitchen/{_name}-v2",
        kwargs={"tasks_to_complete": ["microwave", "kettle", *_tasks]})

# Atari: every fourth frame, gray, 84 x 84, stacked by 4; at most 108,000 frames. Reference returns: random
# player and gamer of DreamerV2's table, as in the papers' scores (Mnih et al., 2015, rounded). Return scale:
# about the largest return of the published data, whose rewards are clipped.
for _name, _A, _scale, _ref in [
    ("Breakout", 4, 90.0, (2.0, 30.0)), ("Qbert", 6, 500.0, (164.0, 13455.0)),
    ("Pong", 6, 20.0, (-21.0, 15.0)), ("Seaquest", 18, 290.0, (68.0, 42055.0)),
    ("Asterix", 9, 100.0, (210.0, 8503.0)), ("Frostbite", 18, 190.0, (65.0, 4335.0)),
    ("Assault", 7, 150.0, (222.0, 742.0)), ("Gopher", 8, 550.0, (258.0, 2412.0)),
    ("Boxing", 18, 100.0, (0.0, 12.0)),
]:
    _game = _name.lower()
    ENVS[_game] = Env("atari", f"ALE/{_name}-v5", 0, _A, 27_000, _scale, _ref, f"atari/{_game}/expert-v0",
                      discrete=True, stack=4, clip_rewards=True)

# DeepMind Control: gray frames stacked by 3; 1,000 physics steps, each worth at most 1. Action repeats:
# StARformer paper, Table 5, and for cup and finger the paper that it refers to.
for _name, _A, _repeat in [
    ("cheetah-run", 6, 4), ("ball-in-cup-catch", 2, 4), ("finger-spin", 2, 2), ("reacher-easy", 2, 4),
    ("walker-walk", 6, 2),
]:
    _id = f"dm_control/{_name.replace('ball-in-cup', 'ball_in_cup')}-v0"
    ENVS[_name] = Env("dmc", _id, 0, _A, 1000 // _repeat, 1000.0, kwargs={"action_repeat": _repeat}, stack=3,
                      note="nobody publishes frames of these tasks: collect or record your own")

# Many tasks, some of them unseen in training (DM paper, Appendix D): the numbers of its Table 9, the unseen
# ones first. Training chooses by the last start, so never by the unseen ones. Return scale: ours;
# Prompt-DT divides by 500, in MetaWorld by 650.
for _name, _id, _S, _A, _len, _scale, _unseen, _seen in [
    ("cheetah-vel", "CheetahVel", 17, 6, 200, 100.0, [2, 7, 15, 23, 26], range(40)),
    ("ant-dir", "AntDir", 27, 8, 200, 100.0, [6, 17, 23, 30, 41], range(50)),
    ("metaworld-ml10", "MetaWorld", 39, 4, 500, 1000.0, [11, 24, 41], [0, 9, 19, 29, 33, 36, 39, 40, 48, 49]),
    ("metaworld-ml45", "MetaWorld", 39, 4, 500, 1000.0, [11, 17, 25, 36, 41], range(50)),
]:
    _seen = [i for i in _seen if i not in _unseen]
    ENVS[_name] = Env("tasks", f"{_id}-v0", _S, _A, _len, _scale, note="nobody publishes data of these tasks",
                      starts={"unseen": {"tasks": _unseen}, "seen": {"tasks": _seen}})


def get_env(name):
    if name not in ENVS:
        raise UserError(f"no environment is called {name!r}; {nearest(name, ENVS)}\n"
                        "('python data.py list' shows all; a Minari set of your own is minari:<id>)")
    return ENVS[name]


def robotics():
    """gymnasium, which knows the robotics environments and those of policies/tasks.py from now on."""
    import gymnasium
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics  # noqa: F401     (with a notice about other versions)
    from policies import tasks  # noqa: F401
    return gymnasium


def make(spec, **kwargs):
    """A gymnasium environment from {"id": ..., "kwargs": {...}}, an id, an EnvSpec or its JSON text.

    kwargs: added to its own. Raises UserError, with the words of the library that failed.
    """
    if "render_mode" in kwargs and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")       # where EGL is missing, mujoco's import fails
    gymnasium = robotics()
    from policies import screens
    try:
        if isinstance(spec, dict):
            spec, kwargs = spec["id"], spec.get("kwargs", {}) | kwargs
        elif isinstance(spec, str) and spec.startswith("{"):
            spec = gymnasium.envs.registration.EnvSpec.from_json(spec)
        if screens.ours(getattr(spec, "id", spec)):
            return screens.make(spec, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # "a newer version exists": the version is the data's
            env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except Exception as error:      # whatever the package behind it raises
        raise UserError(
            f"the environment {getattr(spec, 'id', spec)} cannot be made ({short(error)}).\nKnown to work: "
            "pip install gymnasium-robotics==1.4.2 mujoco==3.3.0 ale-py==0.12.1 dm-control==1.0.28 "
            "metaworld==3.1.1. To train without acting, add --eval_episodes 0") from error
    if xml := getattr(env.unwrapped, "tmp_xml_file_path", None):
        Path(xml).unlink(missing_ok=True)       # a maze leaves it in the temporary folder
    return env


def sticky(spec, probability):
    """The spec, with this chance that the emulator of an Atari game repeats an action. For no other spec."""
    if not probability:
        return spec
    if not isinstance(spec, dict) or not spec["id"].startswith("ALE/"):
        raise UserError("--sticky is for Atari games")
    return spec | {"kwargs": spec.get("kwargs", {}) | {"sticky": probability}}


def describe(env):
    """What a frame environment does between two frames, in a line; "" for others."""
    from policies import screens
    return screens.describe(env) if env.spec and screens.ours(env.spec.id) else ""


# ------------------------------------------------------------------ reading observations

def large(shape):
    """Whether it is that of a picture, 32 x 32 at least. Smaller ones are codes of a grid world."""
    return len(shape) > 1 and sorted(shape)[-2] >= 32


def is_picture(space):
    return space.dtype == np.uint8 and large(space.shape) and len(space.shape) < 4


def gray(pictures):
    """(T, 84, 84) uint8 from T pictures, as Atari's wrapper does it: luminance, then the mean over areas.

    pictures: uint8 (T, H, W), colours (T, H, W, 3) or (T, 3, H, W), or stacks of gray frames (T, H, W, C) or
    (T, C, H, W), of which the last one counts. Raises UserError for others.
    """
    import cv2
    x = np.asarray(pictures)
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise UserError(f"pictures are of shape {x.shape[1:]} and type {x.dtype}; "
                        "uint8 of (H, W), (H, W, 3) or a stack of gray frames is needed")
    if x.ndim == 4 and x.shape[1] < x.shape[3]:     # channels first
        x = np.moveaxis(x, 1, 3)
    if x.ndim == 4 and x.shape[3] != 3:
        x = x[..., -1]
    out = np.empty((len(x), SIDE, SIDE), np.uint8)
    for i, picture in enumerate(np.ascontiguousarray(x)):
        if picture.ndim == 3:
            picture = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        out[i] = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return out


def shapes_of(space):
    """The shapes of a space's arrays, nested as they are in it. Raises UserError for what is not numbers."""
    if parts := getattr(space, "spaces", None):
        parts = parts if isinstance(parts, dict) else dict(enumerate(parts))
        return {key: shapes_of(part) for key, part in parts.items()}
    if space.shape is None or large(space.shape):
        raise UserError(
            f"observations hold a {type(space).__name__} of shape {space.shape} and type {space.dtype}; "
            "numbers or one uint8 picture are needed. gymnasium.wrappers.FilterObservation leaves parts out")
    return list(space.shape)


def flat(x, shapes=None):
    """Numbers (..., n) float32 from arrays (..., *shape) in nested tuples and dicts, in the keys' order.

    shapes: as of shapes_of(); None: all are vectors. Raises ValueError for other shapes and for text.
    """
    if isinstance(x, tuple):
        x = dict(enumerate(x))
    if isinstance(x, dict):
        return np.concatenate([flat(x[key], shapes and shapes[key]) for key in sorted(x)], -1)
    x = np.asarray(x)
    axes = x.ndim - (1 if shapes is None else len(shapes))
    if x.dtype.kind not in "fiub" or axes < 0 or shapes and list(x.shape[axes:]) != shapes:
        raise ValueError(f"shape {x.shape} and type {x.dtype}, not {shapes or 'a vector'}")
    with np.errstate(over="ignore"):        # to infinity, which is refused later
        return x.astype(np.float32, copy=False).reshape(*x.shape[:axes], math.prod(x.shape[axes:]))


def observe(observation, layout):
    """(state (..., S) float32, goal (..., G) or None) of one observation or a batch of them.

    layout comes with the Trajectories. "shapes": as in flat(). "position": the state begins with
    achieved_goal, which is otherwise left out of a dict that has an "observation". "first": how many of its
    other numbers count (None: all). "stack": the observation is a picture, and the state one gray frame,
    uint8 (..., height, width), which the caller stacks.
    Raises ValueError, KeyError, IndexError or UserError where the observation is of another kind.
    """
    shapes, goal = layout.get("shapes"), None
    if layout.get("stack"):
        x = np.asarray(observation)
        if shapes is not None:
            x = gray(x.reshape(-1, *shapes)).reshape(*x.shape[:x.ndim - len(shapes)], SIDE, SIDE)
        return x, None
    state = observation
    if isinstance(state, dict):
        state = dict(state)
        goal = state.pop("desired_goal", None)
        if isinstance(goal, dict):      # the kitchen's, which never changes
            goal = None
        if goal is not None:
            goal = flat(goal, shapes and shapes["desired_goal"])
        if "observation" in state:
            state.pop("achieved_goal", None)
    state = flat(state, shapes)[..., :layout["first"]]
    if layout["position"]:
        state = np.concatenate([flat(observation["achieved_goal"]), state], -1)
    return state, goal
