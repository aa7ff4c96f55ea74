"""Environments: what each is called, where its data are published, how to make one and read its observations.

ENVS is the table; 'python data.py list' prints it. S state size, A action size, G goal size.
"""
import contextlib
import io
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from errors import UserError, nearest, short

SIDE = 84       # pixels of a frame each way
HUGE = 1e30     # data beyond it are refused: sums and differences of such numbers may not fit into float32
CLIP = 20.0     # normalised state numbers are cut to [-CLIP, CLIP], in training and playing alike


@dataclass(frozen=True)
class Env:
    """What is known of an environment. A paper's choices (context, targets) are in the models' PRESETS."""
    family: str                             # key of PRESETS, between "*" and the exact name
    id: str                                 # gymnasium id to act in
    state_dim: int                          # S without the goal; 0 for frames
    act_dim: int                            # A numbers, or A choices if discrete
    max_ep_len: int                         # the environment's own step limit
    rtg_scale: float                        # returns-to-go are divided by it before a model sees them
    ref: tuple[float, float] | None = None  # returns that score 0 and 100
    minari: str | None = None               # published Minari id
    d4rl: str | None = None                 # published HDF5 file, below D4RL_URL
    kwargs: dict = field(default_factory=dict)
    d4rl_kwargs: dict = field(default_factory=dict)     # what the environment needs to resemble D4RL's
    d4rl_rtg_scale: float | None = None     # where D4RL's rewards are of another size
    goal_dim: int = 0
    discrete: bool = False
    stack: int = 0                          # frames that make one state; 0: states are vectors
    clip_rewards: bool = False              # rewards and targets count in [-1, 1] a step, scores in points
    starts: dict = field(default_factory=lambda: {"random": None})      # name -> reset options of evaluation
    note: str = ""

    @property
    def state_shape(self):
        return (self.stack, SIDE, SIDE) if self.stack else (self.state_dim,)

    def scale(self, source):
        """What returns-to-go of this source's data are divided by."""
        return self.d4rl_rtg_scale if source == "d4rl" and self.d4rl_rtg_scale else self.rtg_scale


D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
ENVS: dict[str, Env] = {}

# Reference returns: D4RL (Fu et al., 2020), its infos.py; every version of an environment has the same.
# Return scale 1000: the released Decision Transformer. S of ant: its first 27 numbers, without contact forces
# (with them, D4RL's observation has 111 numbers and that of v5 105).
for _family, _id, _S, _A, _ref in [
    ("hopper", "Hopper-v5", 11, 3, (-20.272305, 3234.3)),
    ("halfcheetah", "HalfCheetah-v5", 17, 6, (-280.178953, 12135.0)),
    ("walker2d", "Walker2d-v5", 17, 6, (1.629008, 4592.3)),
    ("ant", "Ant-v5", 27, 8, (-325.6, 3879.7)),
]:
    for _level in ("medium", "medium-replay", "medium-expert", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, _id, _S, _A, 1000, 1000.0, _ref,
            minari=f"mujoco/{_family}/{_level}-v0" if _level in ("medium", "expert") else None,
            d4rl=f"gym_mujoco_v2/{_family}_{_level.replace('-', '_')}-v2.hdf5",
            kwargs={"include_cfrc_ext_in_observation": False} if _family == "ant" else {},
            # the old foot friction
            d4rl_kwargs={"xml_file": "walker2d.xml"} if _family == "walker2d" else {},
            note="D4RL's data come from older physics than the environment that scores them here")

# Mazes: one goal an episode, which goes on after success, so the longest possible return is the step limit.
_MAZE = {"continuing_task": True, "reset_target": False}
_NOTE = ("D4RL's maze has other coordinates than gymnasium-robotics' maze that scores here; "
         "to act, train on Minari or local data")
# From a fixed far pair of cells the agent's speed decides the return; from elsewhere the distance does.
for _size, _id, _len, _reset, _goal, _ref in [
    ("umaze", "UMaze", 300, [1, 1], [3, 1], (23.85, 161.86)),
    ("medium", "Medium", 600, [1, 1], [6, 5], (13.13, 277.39)),
    ("large", "Large", 800, [7, 1], [7, 10], (6.7, 273.99)),
]:
    for _name in ("pointmaze", "maze2d"):       # one environment; D4RL's files and references are maze2d's
        ENVS[f"{_name}-{_size}"] = Env(
            "maze2d", f"PointMaze_{_id}-v3", 4, 2, _len, float(_len), _ref if _name == "maze2d" else None,
            minari=f"D4RL/pointmaze/{_size}-v2",
            d4rl=f"maze2d/maze2d-{_size}-sparse-v1.hdf5" if _name == "maze2d" else None,
            kwargs=_MAZE, goal_dim=2, note=_NOTE,
            starts={"random": None, "far": {"reset_cell": _reset, "goal_cell": _goal}})
for _name, _id, _len, _goal, _file in [
    ("umaze", "UMaze", 700, [3, 1], ("u-maze", False, False)),
    ("umaze-diverse", "UMaze", 700, [3, 1], ("u-maze", True, True)),
    ("medium-play", "Medium", 1000, [6, 6], ("big-maze", True, False)),
    ("medium-diverse", "Medium", 1000, [6, 6], ("big-maze", True, True)),
    ("large-play", "Large", 1000, [7, 10], ("hardest-maze", True, False)),
    ("large-diverse", "Large", 1000, [7, 10], ("hardest-maze", True, True)),
]:
    ENVS[f"antmaze-{_name}"] = Env(
        "antmaze", f"AntMaze_{_id}-v4", 29, 8, _len, float(_len), (0.0, 1.0),
        minari=f"D4RL/antmaze/{_name}-v1",
        d4rl="ant_maze_v2/Ant_maze_{}_noreset_multistart_{}_multigoal_{}_sparse_fixed.hdf5".format(*_file),
        d4rl_rtg_scale=1.0,         # there an episode ends at the goal, with a return of 1
        kwargs=_MAZE, goal_dim=2, note=_NOTE,
        starts={"fixed": {"reset_cell": [1, 1], "goal_cell": _goal}})       # as the published sets ask for

# Return scales: the Decision Mixer's released code, but for kitchen, whose returns are 0 to 4.
for _family, _id, _S, _A, _scale, _ref in [
    ("pen", "Pen", 45, 24, 1000.0, (96.262799, 3076.8331017826877)),
    ("hammer", "Hammer", 46, 26, 1000.0, (-274.856578, 12794.134825156867)),
    ("door", "Door", 39, 28, 100.0, (-56.512833, 2880.5693087298737)),
    ("relocate", "Relocate", 39, 30, 1000.0, (-6.425911, 4233.877797728884)),
]:
    for _level in ("human", "cloned", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, f"AdroitHand{_id}-v1", _S, _A, 200, _scale, _ref, f"D4RL/{_family}/{_level}-v2",
            f"hand_dapg_v1/{_family}-{_level}-v1.hdf5")
for _name, _third, _fourth in [
    ("complete", "light switch", "slide cabinet"),
    ("partial", "light switch", "slide cabinet"),
    ("mixed", "bottom burner", "light switch"),
]:
    ENVS[f"kitchen-{_name}"] = Env(     # without D4RL's file, whose 60 numbers are not this environment's 59
        "kitchen", "FrankaKitchen-v1", 59, 9, 280, 1.0, (0.0, 4.0), f"D4RL/kitchen/{_name}-v2",
        kwargs={"tasks_to_complete": ["microwave", "kettle", _third, _fourth]})

# Atari: gray frames of 84 x 84, every fourth one, stacked by 4; at most 108,000 frames. Reference returns:
# random player and gamer of DreamerV2's table, as in the papers' scores (Mnih et al., 2015, rounded).
# Return scale: about the largest return of the published data, whose rewards are clipped.
for _name, _A, _scale, _ref in [
    ("Breakout", 4, 90.0, (2.0, 30.0)), ("Qbert", 6, 500.0, (164.0, 13455.0)),
    ("Pong", 6, 20.0, (-21.0, 15.0)), ("Seaquest", 18, 290.0, (68.0, 42055.0)),
    ("Asterix", 9, 100.0, (210.0, 8503.0)), ("Frostbite", 18, 190.0, (65.0, 4335.0)),
    ("Assault", 7, 150.0, (222.0, 742.0)), ("Gopher", 8, 550.0, (258.0, 2412.0)),
    ("Boxing", 18, 100.0, (0.0, 12.0)),
]:
    ENVS[_name.lower()] = Env(
        "atari", f"ALE/{_name}-v5", 0, _A, 27_000, _scale, _ref, f"atari/{_name.lower()}/expert-v0",
        discrete=True, stack=4, clip_rewards=True)

# DeepMind Control from pixels: gray frames of 84 x 84, stacked by 3; 1,000 physics steps, each worth at most
# 1. Action repeats: StARformer paper, Table 5, and for cup and finger the paper that it refers to.
for _name, _A, _repeat in [
    ("cheetah-run", 6, 4), ("ball-in-cup-catch", 2, 4), ("finger-spin", 2, 2), ("reacher-easy", 2, 4),
    ("walker-walk", 6, 2),
]:
    ENVS[_name] = Env(
        "dmc", f"dm_control/{_name.replace('ball-in-cup', 'ball_in_cup')}-v0", 0, _A, 1000 // _repeat, 1000.0,
        kwargs={"action_repeat": _repeat}, stack=3,
        note="nobody publishes frames of these tasks: collect or record your own")


def get_env(name):
    if name not in ENVS:
        raise UserError(f"no environment is called {name!r}; {nearest(name, ENVS)}\n"
                        "('python data.py list' shows all; a Minari set of your own is minari:<id>)")
    return ENVS[name]


# ------------------------------------------------------------------ making environments

RELEASES = "gymnasium-robotics==1.4.2 mujoco==3.3.0 ale-py==0.12.1 dm-control==1.0.28"      # known to work


def robotics():
    """gymnasium, with the robotics environments registered, and without their notice about other versions."""
    import gymnasium
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics
        gymnasium.register_envs(gymnasium_robotics)
    return gymnasium


def make(spec, **kwargs):
    """A gymnasium environment.

    spec: {"id": ..., "kwargs": {...}}, an id, an EnvSpec, or an EnvSpec's JSON text. kwargs: added to it.
    Raises UserError, with the words of the library that failed, if it cannot be made.
    """
    if "render_mode" in kwargs and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")       # where EGL is missing, mujoco's import fails
    gymnasium = robotics()
    from policies import screens
    name = spec
    try:
        if isinstance(spec, dict):
            name, kwargs = spec["id"], spec.get("kwargs", {}) | kwargs
            spec = name
        elif not isinstance(spec, str) or spec.startswith("{"):
            if isinstance(spec, str):
                spec = gymnasium.envs.registration.EnvSpec.from_json(spec)
            name = spec.id
        if screens.ours(name):
            return screens.make(spec, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # "a newer version exists": the version is the data's
            env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except Exception as error:      # whatever the package behind it raises
        raise UserError(
            f"the environment {name} cannot be made ({short(error)}).\nIs its package installed? Known to "
            f"work: pip install {RELEASES}. To train without acting, add --eval_episodes 0") from error
    if xml := getattr(env.unwrapped, "tmp_xml_file_path", None):
        Path(xml).unlink(missing_ok=True)       # a maze leaves it in the temporary folder
    return env


def sticky(spec, probability):
    """An Atari game's spec with this chance that the emulator repeats an action; None for any other spec."""
    if isinstance(spec, dict) and spec["id"].startswith("ALE/"):
        return spec | {"kwargs": spec.get("kwargs", {}) | {"sticky": probability}}
    return None


def describe(env):
    """What a frame environment does between two frames, in a line; "" for others."""
    from policies import screens
    return screens.describe(env) if env.spec and screens.ours(env.spec.id) else ""


# ------------------------------------------------------------------ reading observations

def is_picture(space):
    """Whether a space holds pictures: uint8, at least 32 x 32. Smaller ones are codes, as in a grid world."""
    shape = space.shape or ()
    return len(shape) in (2, 3) and space.dtype == np.uint8 and sorted(shape)[-2] >= 32


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
    parts = getattr(space, "spaces", None)
    if parts is not None:
        parts = parts if isinstance(parts, dict) else dict(enumerate(parts))
        return {key: shapes_of(part) for key, part in parts.items()}
    kind, shape = type(space).__name__, space.shape or ()
    picture = len(shape) > 1 and sorted(shape)[-2] >= 32
    if picture or kind not in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        raise UserError(
            f"observations hold a {kind} of shape {shape} and type {space.dtype}; numbers are needed, or "
            "one uint8 picture. gymnasium.wrappers.FilterObservation leaves parts out")
    return list(shape)


def flat(x, shapes=None):
    """Numbers (..., n) float32 from arrays (..., *shape) in nested tuples and dicts, in the keys' order.

    shapes: as of shapes_of(); None: all are vectors. Raises ValueError for other shapes and for text.
    """
    if isinstance(x, tuple):
        x = dict(enumerate(x))
    if isinstance(x, dict):
        return np.concatenate([flat(x[key], shapes and shapes[key]) for key in sorted(x)], -1)
    x = np.asarray(x)
    axes = x.ndim - len(shapes) if shapes is not None else 0
    if x.dtype.kind not in "fiub" or axes < 0 or shapes is not None and x.shape[axes:] != tuple(shapes):
        raise ValueError(f"shape {x.shape} and type {x.dtype}" + f", not {shapes}" * (shapes is not None))
    with np.errstate(over="ignore"):        # to infinity, which is refused later
        x = x.astype(np.float32, copy=False)
    return x if shapes is None else x.reshape(*x.shape[:axes], -1)


def observe(observation, layout):
    """(state (..., S) float32, goal (..., G) or None) of one observation or a batch of them.

    layout comes with the Trajectories. "shapes": as in flat(). "position": the state begins with
    achieved_goal. "first": how many of its other numbers count (None: all). "stack": the observation is a
    picture, and the state one gray frame, uint8 (..., height, width), which the caller stacks. Of a dict that
    has an "observation", all counts but achieved_goal and desired_goal.
    Raises ValueError, KeyError, IndexError or UserError where the observation is of another kind.
    """
    shapes, goal = layout.get("shapes"), None
    if layout.get("stack"):
        x = np.asarray(observation)
        if shapes is None:
            return x, None
        frames = gray(x.reshape(-1, *shapes))
        return frames.reshape(*x.shape[:x.ndim - len(shapes)], SIDE, SIDE), None
    state = observation
    if isinstance(observation, dict):
        unused = {"achieved_goal", "desired_goal"} if "observation" in observation else set()
        if "desired_goal" in observation and not isinstance(observation["desired_goal"], dict):
            goal = flat(observation["desired_goal"], shapes and shapes["desired_goal"])
            unused = unused | {"desired_goal"}
        state = {key: x for key, x in observation.items() if key not in unused}
    state = flat(state, shapes)[..., :layout["first"]]
    if layout["position"]:
        state = np.concatenate([flat(observation["achieved_goal"]), state], -1)
    return state, goal
