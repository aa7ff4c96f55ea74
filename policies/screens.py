"""Environments whose observation is a gray frame, uint8 (84, 84): Atari and DeepMind Control."""
import ctypes.util
import math
import os
import sys

import cv2
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from errors import short

FRAMES = 108_000        # of an Atari episode at most: half an hour


def ours(id):
    """Whether an environment id is made here."""
    return id.startswith(("ALE/", "dm_control/"))


def register_atari():
    """Importing ale_py registers its games. Emulators print no banner from now on."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def atari(game, sticky, frame_skip, noop_max, render_mode=None):
    """A game, seen as the maximum of the last two of each `frame_skip` frames.

    sticky: chance that the emulator repeats its last action, in each frame. An episode starts with 1 to
    noop_max frames of no action (0: none), goes on after a lost life, and is truncated after 108,000 frames.
    """
    register_atari()
    env = gymnasium.make(
        f"ALE/{game}-v5", frameskip=1, repeat_action_probability=sticky, full_action_space=False,
        max_num_frames_per_episode=FRAMES, render_mode=render_mode, disable_env_checker=True)
    return gymnasium.wrappers.AtariPreprocessing(env, noop_max, frame_skip, screen_size=84)


class Control(gymnasium.Env):
    """A task of the DeepMind Control suite, seen by its camera 0 in gray: uint8 (size, size).

    An action (A,), in the task's bounds, is held for `action_repeat` of the suite's steps, whose rewards are
    added up. Raises ValueError for a task that the suite lacks, RuntimeError where nothing can render.
    """

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, domain, task, action_repeat, size, render_mode=None):
        self.repeat, self.size, self.render_mode = action_repeat, size, render_mode
        try:
            self.suite = load_suite().load(domain, task)
            self.frame()
        except ValueError:      # the suite has no such task
            raise
        except Exception as error:      # each driver has its own
            raise RuntimeError(
                f"frames of dm_control can't be rendered with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}. "
                "Without a display, egl and osmesa can: on Debian, apt-get install libegl1 libgl1-mesa-dri "
                f"(or libosmesa6), and MUJOCO_GL=egl (or osmesa). {short(error)}") from error
        self.metadata = self.metadata | {"render_fps": 1 / (action_repeat * self.suite.control_timestep())}
        bounds = self.suite.action_spec()
        self.action_space = gymnasium.spaces.Box(np.float32(bounds.minimum), np.float32(bounds.maximum))
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.suite.task.random.seed(seed)
        self.suite.reset()
        return self.frame(), {}

    def step(self, action):
        reward = 0.0
        for _ in range(self.repeat):
            time = self.suite.step(action)
            reward += time.reward
            if time.last():
                break
        terminated = time.last() and time.discount == 0     # at its time limit the suite's discount stays 1
        return self.frame(), reward, terminated, time.last() and not terminated, {}

    def render(self, size=320):
        return self.suite.physics.render(size, size, camera_id=0)       # (size, size, 3)

    def frame(self):
        return cv2.cvtColor(self.render(self.size), cv2.COLOR_RGB2GRAY)

    def close(self):
        self.suite.close()


def load_suite():
    """dm_control's suite. It reads MUJOCO_GL, what to render with, when it is imported: here, if at all."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY") and "MUJOCO_GL" not in os.environ:
        found = [name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)]
        if not found:
            raise ImportError("neither library was found")
        os.environ["MUJOCO_GL"] = found[0].lower()
    from dm_control import suite
    return suite


def spec(id, **kwargs):
    """The EnvSpec of ALE/<Game>-v5 (kwargs of atari) or dm_control/<domain>-<task>-v0 (of Control)."""
    name = id.partition("/")[2].rpartition("-")[0]
    if id.startswith("ALE/"):
        register_atari()
        gymnasium.spec(id)
        kwargs = {"game": name, "sticky": 0.0, "frame_skip": 4, "noop_max": 30} | kwargs
        entry, steps = "atari", math.ceil(FRAMES / kwargs["frame_skip"])
    else:
        domain, _, task = name.partition("-")
        kwargs = {"domain": domain, "task": task, "action_repeat": 4, "size": 84} | kwargs
        entry, steps = "Control", math.ceil(1000 / kwargs["action_repeat"])
    return EnvSpec(id, f"policies.screens:{entry}", max_episode_steps=steps, kwargs=kwargs)


def make(id, **kwargs):
    """The environment of an id (kwargs: as of spec(), and render_mode), or of an EnvSpec as it was recorded.

    Of a spec kwargs can only change render_mode. Raises ValueError or gymnasium's error for a wrong name.
    """
    if isinstance(id, str):
        render_mode = kwargs.pop("render_mode", None)
        id, kwargs = spec(id, **kwargs), {"render_mode": render_mode}
    elif id.id.startswith("ALE/"):
        register_atari()
    return gymnasium.make(id, disable_env_checker=True, **kwargs)


def describe(env):
    """One line about an environment made here."""
    name, limit = env.spec.name, f"{env.spec.max_episode_steps:,} steps"
    if not env.spec.id.startswith("ALE/"):
        return f"{name}: action repeat {env.unwrapped.repeat}, {limit}"
    skip, noops = env.get_wrapper_attr("frame_skip"), env.get_wrapper_attr("noop_max")
    sticky = round(env.unwrapped.ale.getFloat("repeat_action_probability"), 3)
    actions = env.unwrapped.get_action_meanings()
    return (f"{name}: skip {skip}, sticky {sticky}, {len(actions)} actions ({' '.join(actions)}), "
            f"up to {noops} no-ops, at most {limit}")
