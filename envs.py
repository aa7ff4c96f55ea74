"""Environments and their facts: what each is called, where its data are published, and how to make one.

ENVS is the table; 'python data.py list' prints it. S state size, A action size, G goal size.
"""
import difflib
import json
import os
import sys
from dataclasses import dataclass, field

import numpy as np

from policies import collect


class UserError(Exception):
    """Something the user can put right; commands print it as one message and leave with exit code 2."""


SIDE = 84       # pixels of a frame each way
HUGE = 1e30     # sums, means and differences of numbers up to it still fit into float32; data beyond it are refused


def short(error):
    """A library's message in one line of at most 300 letters, for a UserError."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True)
class Env:
    """What is known of an environment. A paper's choices (context, learning rate, targets) are in the model file's PRESETS."""
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
    clip_rewards: bool = False              # rewards and targets count in [-1, 1] a step, scores in the environment's own points
    starts: dict = field(default_factory=lambda: {"random": None})     # name -> reset options of the episodes that evaluation plays
    note: str = ""

    @property
    def state_shape(self):
        return (self.stack, SIDE, SIDE) if self.stack else (self.state_dim,)

    def scale(self, source):
        """What returns-to-go of this source's data are divided by."""
        return self.d4rl_rtg_scale if source == "d4rl" and self.d4rl_rtg_scale else self.rtg_scale


D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
ENVS: dict[str, Env] = {}

# Reference returns: D4RL (Fu et al., 2020), its infos.py; they are the same for every version of an environment.
# Return scale 1000: the released Decision Transformer. S of ant: the first 27 numbers; contact forces (D4RL 111, v5 105) are left out.
for _family, _id, _S, _A, _ref in [
        ("hopper", "Hopper-v5", 11, 3, (-20.272305, 3234.3)), ("halfcheetah", "HalfCheetah-v5", 17, 6, (-280.178953, 12135.0)),
        ("walker2d", "Walker2d-v5", 17, 6, (1.629008, 4592.3)), ("ant", "Ant-v5", 27, 8, (-325.6, 3879.7))]:
    for _level in ("medium", "medium-replay", "medium-expert", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(
            _family, _id, _S, _A, 1000, 1000.0, _ref, d4rl=f"gym_mujoco_v2/{_family}_{_level.replace('-', '_')}-v2.hdf5",
            minari=f"mujoco/{_family}/{_level}-v0" if _level in ("medium", "expert") else None,      # Minari publishes no mixtures
            kwargs={"include_cfrc_ext_in_observation": False} if _family == "ant" else {},
            d4rl_kwargs={"xml_file": "walker2d.xml"} if _family == "walker2d" else {},               # the old foot friction
            note="D4RL's data come from older physics than the environment that scores them here")

# Mazes: one goal per episode, and an episode goes on after success, so the longest possible return is the step limit.
_MAZE = {"continuing_task": True, "reset_target": False}
_NOTE = "D4RL's maze has other coordinates than gymnasium-robotics' maze that scores here; to act, train on Minari or local data"
for _size, _id, _len, _reset, _goal, _ref in [
        ("umaze", "UMaze", 300, [1, 1], [3, 1], (23.85, 161.86)), ("medium", "Medium", 600, [1, 1], [6, 5], (13.13, 277.39)),
        ("large", "Large", 800, [7, 1], [7, 10], (6.7, 273.99))]:
    for _name in ("pointmaze", "maze2d"):       # two names for one environment; D4RL's files and reference returns belong to maze2d
        ENVS[f"{_name}-{_size}"] = Env(
            "maze2d", f"PointMaze_{_id}-v3", 4, 2, _len, float(_len), _ref if _name == "maze2d" else None, f"D4RL/pointmaze/{_size}-v2",
            f"maze2d/maze2d-{_size}-sparse-v1.hdf5" if _name == "maze2d" else None, _MAZE, goal_dim=2, note=_NOTE,
            # from a fixed far pair the agent's speed decides the return; from elsewhere the distance does
            starts={"random": None, "far": {"reset_cell": _reset, "goal_cell": _goal}})
for _name, _id, _len, _goal, _file in [
        ("umaze", "UMaze", 700, [3, 1], ("u-maze", False, False)), ("umaze-diverse", "UMaze", 700, [3, 1], ("u-maze", True, True)),
        ("medium-play", "Medium", 1000, [6, 6], ("big-maze", True, False)),
        ("medium-diverse", "Medium", 1000, [6, 6], ("big-maze", True, True)),
        ("large-play", "Large", 1000, [7, 10], ("hardest-maze", True, False)),
        ("large-diverse", "Large", 1000, [7, 10], ("hardest-maze", True, True))]:
    ENVS[f"antmaze-{_name}"] = Env(
        "antmaze", f"AntMaze_{_id}-v4", 29, 8, _len, float(_len), (0.0, 1.0), f"D4RL/antmaze/{_name}-v1",
        "ant_maze_v2/Ant_maze_{}_noreset_multistart_{}_multigoal_{}_sparse_fixed.hdf5".format(*_file), _MAZE, goal_dim=2, note=_NOTE,
        d4rl_rtg_scale=1.0,                                                 # there an episode ends at the goal, with a return of 1
        starts={"fixed": {"reset_cell": [1, 1], "goal_cell": _goal}})       # as in the published eval_env_spec

# Adroit and kitchen return scales: the Decision Mixer's released code, but for kitchen (0 to 4 tasks; it divides them by 100).
for _family, _id, _S, _A, _scale, _ref in [
        ("pen", "Pen", 45, 24, 1000.0, (96.262799, 3076.8331017826877)),
        ("hammer", "Hammer", 46, 26, 1000.0, (-274.856578, 12794.134825156867)),
        ("door", "Door", 39, 28, 100.0, (-56.512833, 2880.5693087298737)),
        ("relocate", "Relocate", 39, 30, 1000.0, (-6.425911, 4233.877797728884))]:
    for _level in ("human", "cloned", "expert"):
        ENVS[f"{_family}-{_level}"] = Env(_family, f"AdroitHand{_id}-v1", _S, _A, 200, _scale, _ref, f"D4RL/{_family}/{_level}-v2",
                                          f"hand_dapg_v1/{_family}-{_level}-v1.hdf5")
for _name, _third, _fourth in [("complete", "light switch", "slide cabinet"), ("partial", "light switch", "slide cabinet"),
                               ("mixed", "bottom burner", "light switch")]:
    ENVS[f"kitchen-{_name}"] = Env(         # no D4RL file: its 60 numbers are not this environment's 59
        "kitchen", "FrankaKitchen-v1", 59, 9, 280, 1.0, (0.0, 4.0), f"D4RL/kitchen/{_name}-v2",
        kwargs={"tasks_to_complete": ["microwave", "kettle", _third, _fourth]})


# Atari: gray frames of 84 x 84, every fourth one, stacked by 4, at most 108,000 frames. Reference returns: the random player's and the gamer's
# as rounded in DreamerV2's table, which the papers' scores use (with one decimal in Mnih et al., 2015). Return scale: about the largest return
# of the published data, whose rewards are clipped.
for _name, _A, _scale, _ref in [
        ("Breakout", 4, 90.0, (2.0, 30.0)), ("Qbert", 6, 500.0, (164.0, 13455.0)), ("Pong", 6, 20.0, (-21.0, 15.0)),
        ("Seaquest", 18, 290.0, (68.0, 42055.0)), ("Asterix", 9, 100.0, (210.0, 8503.0)), ("Frostbite", 18, 190.0, (65.0, 4335.0)),
        ("Assault", 7, 150.0, (222.0, 742.0)), ("Gopher", 8, 550.0, (258.0, 2412.0)), ("Boxing", 18, 100.0, (0.0, 12.0))]:
    ENVS[_name.lower()] = Env("atari", f"ALE/{_name}-v5", 0, _A, 27_000, _scale, _ref, f"atari/{_name.lower()}/expert-v0",
                              discrete=True, stack=4, clip_rewards=True)
# DeepMind Control from pixels: gray frames of 84 x 84 stacked by 3; 1,000 physics steps, each worth at most 1. Action repeats: StARformer paper,
# Table 5, and for cup and finger the paper that it refers to.
for _name, _A, _repeat in [("cheetah-run", 6, 4), ("ball-in-cup-catch", 2, 4), ("finger-spin", 2, 2), ("reacher-easy", 2, 4), ("walker-walk", 6, 2)]:
    ENVS[_name] = Env("dmc", f"dm_control/{_name.replace('ball-in-cup', 'ball_in_cup')}-v0", 0, _A, 1000 // _repeat, 1000.0, stack=3,
                      kwargs={"action_repeat": _repeat}, note="nobody publishes frames of these tasks: collect or record your own")


def nearest(word, words):
    """'did you mean ...?' for a name that is not among words, or all of them if none is near."""
    near = difflib.get_close_matches(word, words, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(words)}"


def get_env(name):
    if name not in ENVS:
        raise UserError(f"no environment is called {name!r}; {nearest(name, ENVS)}\n"
                        "('python data.py list' shows all; a Minari set of your own is minari:<id>)")
    return ENVS[name]


def make_env(spec, **kwargs):
    """A gymnasium environment from {"id": ..., "kwargs": {...}} or an EnvSpec's JSON text; kwargs are handed on to gymnasium.make."""
    if "render_mode" in kwargs and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")       # only now: where EGL is missing, mujoco with this set cannot even be imported
    gymnasium = collect.robotics()
    if not isinstance(spec, dict):
        spec = json.loads(spec)
    try:
        if "entry_point" in spec:
            return collect.make(gymnasium.envs.registration.EnvSpec.from_json(json.dumps(spec)), **kwargs)
        return collect.make(spec["id"], **spec["kwargs"], **kwargs)
    except (gymnasium.error.Error, ImportError, AttributeError, TypeError, OSError, ValueError, KeyError, AssertionError, RuntimeError) as e:
        raise UserError(f"the environment {spec['id']} cannot be made: {e}\n"
                        "Is the package that registers it installed? To train without acting, add --eval_episodes 0") from e


def stepper(envs):
    """A function (some of these environments, n; their actions) -> n observations, rewards, terminated, truncated and infos, a sequence each.

    It calls step() of one after the other. Where all are one of gymnasium's four bodies that D4RL runs, a third of hopper's time there is
    Python: those are stepped together, to the same numbers bit for bit. Their infos are empty then, and whoever counts steps ends the episode.
    """
    if not any(altered(env) for env in envs) and len({(env.spec.id, env.spec.max_episode_steps, str(env.spec.kwargs)) for env in envs}) == 1:
        return step_bodies
    return lambda envs, actions: zip(*[env.step(a) for env, a in zip(envs, actions, strict=True)], strict=True)


BODIES = [f"gymnasium.envs.mujoco.{name}_v5" for name in ("hopper", "walker2d", "half_cheetah", "ant")]


def altered(env):
    """Whether this is anything but one of BODIES with what gymnasium.make puts around it."""
    if env.spec is None:        # not made by gymnasium.make
        return True
    while env is not env.unwrapped:
        if type(env).__name__ not in ("TimeLimit", "OrderEnforcing", "PassiveEnvChecker") or "step" in vars(env):
            return True
        env = env.env
    return type(env).__module__ not in BODIES or "step" in vars(env) or env.render_mode == "human"


def step_bodies(envs, actions):
    """stepper's fast way. The equations are those of step(), _get_rew(), _get_obs() and is_healthy of each body's file in gymnasium."""
    bodies, actions = [env.unwrapped for env in envs], np.array(actions)                        # (n, A) float32
    one, kind = bodies[0], type(bodies[0]).__module__.split(".")[-1]

    def place():        # (n,) along x
        return np.array([body.data.body(body._main_body).xpos[0] if kind == "ant_v5" else body.data.qpos[0] for body in bodies])
    before = place()
    for body, action in zip(bodies, actions, strict=True):
        body.do_simulation(action, body.frame_skip)
    q, v = (np.array([getattr(body.data, name) for body in bodies]) for name in ("qpos", "qvel"))   # (n, positions), (n, velocities)
    state, cost = np.concatenate([q, v], 1), one._ctrl_cost_weight * np.square(actions).sum(1)
    reward = one._forward_reward_weight * ((place() - before) / one.dt)
    if kind == "half_cheetah_v5":
        healthy = np.ones(len(bodies), bool)
    else:
        low, high = one._healthy_z_range
        if kind == "ant_v5":
            healthy = np.isfinite(state).all(1) & (low <= q[:, 2]) & (q[:, 2] <= high)
            force = np.clip([body.data.cfrc_ext for body in bodies], *one._contact_force_range)     # (n, parts, 6)
            cost = cost + one._contact_cost_weight * np.square(force).reshape(len(bodies), -1).sum(1)
        else:
            least, most = one._healthy_angle_range
            healthy = (low < q[:, 1]) & (q[:, 1] < high) & (least < q[:, 2]) & (q[:, 2] < most)
            if kind == "hopper_v5":
                least, most = one._healthy_state_range
                healthy &= ((least < state[:, 2:]) & (state[:, 2:] < most)).all(1)
            v = np.clip(v, -10, 10)
        reward = reward + healthy * one._healthy_reward
    parts = [q[:, one.observation_structure["skipped_qpos"]:], v]
    if one.observation_structure.get("cfrc_ext"):
        parts.append(force[:, 1:].reshape(len(bodies), -1))
    done = ~healthy & getattr(one, "_terminate_when_unhealthy", False)
    return np.concatenate(parts, 1), reward - cost, done, np.zeros(len(bodies), bool), [{}] * len(bodies)


def sticky(spec, probability):
    """The spec of an Atari game that is made here, with this probability that the emulator repeats an action; None for any other spec."""
    if isinstance(spec, dict) and spec["id"].startswith("ALE/"):
        return dict(spec, kwargs=spec["kwargs"] | {"sticky": probability})
    return None


def describe(env):
    """What a frame environment does between two frames, in a line; "" for others."""
    from policies import screens
    return screens.describe(env) if env.spec and screens.ours(env.spec.id) else ""


def flat(x):
    """A nested dict of (..., n) arrays as one (..., sum n) array, keys in sorted order."""
    return np.concatenate([flat(x[k]) for k in sorted(x)], -1) if isinstance(x, dict) else np.asarray(x)


def real(x):
    """x as a float32 array; ValueError for text and complex numbers, which NumPy would turn into others."""
    x = np.asarray(x)
    if x.dtype.kind not in "fiub":
        raise ValueError(f"type {x.dtype}")
    with np.errstate(over="ignore"):        # to infinity, which is refused later
        return x.astype(np.float32, copy=False)


def observe(observation, layout):
    """(state (..., S), goal (..., G) or None) out of one observation or a batch of them; layout comes with the Trajectories.

    A frame (height, width) or (height, width, 3) comes back as it is, uint8: whoever keeps the last ones stacks them.
    """
    if layout.get("stack"):
        return np.asarray(observation), None
    goal = None
    if isinstance(observation, dict):
        if "desired_goal" in observation and not isinstance(observation["desired_goal"], dict):
            goal = real(observation["desired_goal"])
        state = (observation["observation"] if "observation" in observation
                 else flat({k: v for k, v in observation.items() if goal is None or k != "desired_goal"}))
        state = real(state)[..., : layout["first"]]
        if layout["position"]:
            state = np.concatenate([real(observation["achieved_goal"]), state], -1)
    else:
        state = real(observation)[..., : layout["first"]]
    return state, goal
