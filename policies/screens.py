"""Environments whose observation is one gray frame, uint8 (84, 84): Atari games and DeepMind Control tasks.

make("ALE/Breakout-v5") and make("dm_control/cheetah-run-v0") need no import or registration by the user. Frames are single:
whoever reads them stacks them (4 for Atari, 3 for DeepMind Control). The emulator, the skipping, the no-ops and the gray picture
of Atari are ale_py's and gymnasium's own; DeepMind Control has no gymnasium environment, so Control is one.
"""

import ctypes.util
import difflib
import os
import sys

import gymnasium
import numpy as np

GAMES = ("Breakout", "Pong", "Qbert", "Seaquest", "Asterix", "Frostbite", "Assault", "Gopher", "Boxing")
# Action repeats: the StARformer paper's (4, walker 2), for the two tasks it leaves out those of PlaNet, its reference.
CONTROL = {"cheetah-run": 4, "ball_in_cup-catch": 4, "finger-spin": 2, "reacher-easy": 4, "walker-walk": 2}
FRAMES = 108_000  # of an Atari episode at most: half an hour at 60 a second
STEPS = 1000  # of the suite in an episode


def ours(id):
    """Whether an environment id is made here."""
    return id.startswith(("ALE/", "dm_control/"))


def emulator():
    """ale_py, which registers its environments with gymnasium, told not to print its banner; that is too late for an emulator already made."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return ale_py


def atari(game, sticky=0.0, frame_skip=4, noop_max=30, render_mode=None):
    """The game with gray frames, uint8 (84, 84): the maximum over the last two of `frame_skip` frames.

    sticky: probability that the emulator repeats its last action, in each frame. noop_max: an episode starts with 1 to that many
    frames of no action (0: none). A lost life ends nothing; after 108,000 frames, no-ops included, the episode is truncated.
    """
    emulator()
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=sticky, full_action_space=False,
                         max_num_frames_per_episode=FRAMES, render_mode=render_mode, disable_env_checker=True)
    return gymnasium.wrappers.AtariPreprocessing(env, noop_max=noop_max, frame_skip=frame_skip, screen_size=84)


class Control(gymnasium.Env):
    """A task of the DeepMind Control suite, seen by its camera 0 in gray: uint8 (size, size).

    An action is float32 (A,) in the task's bounds and is held for `action_repeat` of the suite's steps, whose rewards are added up.
    The suite's time limit (1,000 of its steps) truncates. render() gives an RGB frame, uint8 (320, 320, 3).
    Raises ValueError for a task the suite lacks, RuntimeError where nothing can render.
    (The quadruped of dm_control 1.0.28 fails with numpy 2.4, which has no in1d any more.)
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(self, domain, task, action_repeat=4, size=84, render_mode=None):
        suite = load_suite()
        names = [f"{d}-{t}" for d, t in suite.ALL_TASKS]
        if f"{domain}-{task}" not in names:
            raise ValueError(f"the suite has no task {domain}-{task}; {nearest(f'{domain}-{task}', names)}")
        self.suite, self.repeat, self.size, self.render_mode = suite.load(domain, task), action_repeat, size, render_mode
        self.metadata = self.metadata | {"render_fps": max(1, round(1 / (action_repeat * self.suite.control_timestep())))}
        bounds = self.suite.action_spec()
        low, high = (np.broadcast_to(bound, bounds.shape).astype(np.float32) for bound in (bounds.minimum, bounds.maximum))
        self.action_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size), np.uint8)
        try:
            self.frame()  # a machine that can't render says so now
        except Exception as error:
            raise no_renderer(error) from error

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.suite.task.random.seed(seed)
        self.suite.reset()
        return self.frame(), {}

    def step(self, action):
        reward = 0.0
        for _ in range(self.repeat):
            time = self.suite.step(np.asarray(action, np.float64))
            reward += time.reward
            if time.last():
                break
        ended = time.last() and time.discount == 0  # the suite's way to tell an end from its time limit
        return self.frame(), reward, ended, time.last() and not ended, {}

    def picture(self, size):
        return self.suite.physics.render(size, size, camera_id=0)  # (size, size, 3)

    def frame(self):
        return np.rint(self.picture(self.size) @ np.float32([0.299, 0.587, 0.114])).astype(np.uint8)  # luminance (ITU-R 601)

    def render(self):
        return self.picture(320)

    def close(self):
        self.suite.close()


def load_suite():
    """dm_control's suite. Its way of rendering is fixed by MUJOCO_GL when it is first imported, so that is set here, if at all."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY") and "MUJOCO_GL" not in os.environ:
        found = [name for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")) if ctypes.util.find_library(library)]
        if not found:
            raise no_renderer("neither library was found")
        os.environ["MUJOCO_GL"] = found[0]
    try:
        from dm_control import suite
    except ModuleNotFoundError as error:
        if error.name == "dm_control":
            raise
        raise no_renderer(error) from error
    except Exception as error:  # each driver has its own
        raise no_renderer(error) from error
    return suite


def no_renderer(why):
    why = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return RuntimeError(f"frames of dm_control can't be rendered with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')} ({why}). Without a display, "
                        "egl and osmesa can: on Debian, apt-get install libegl1 libgl1-mesa-dri (or libosmesa6), and MUJOCO_GL=egl (or osmesa)")


def nearest(name, names):
    """The end of a message about a wrong name."""
    near = difflib.get_close_matches(name, names, 5, 0.5)
    return f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(names)}"


def steps(frames, each):
    if each < 1:
        raise ValueError(f"frame_skip and action_repeat must be at least 1, not {each}")
    return -(-frames // each)


def spec(id, **kwargs):
    """gymnasium's EnvSpec of an id "ALE/<Game>-v5" (kwargs: as of `atari`) or "dm_control/<domain>-<task>-v0" (as of `Control`).

    It survives to_json and from_json, so Minari can store it, and gymnasium.make takes it wherever this file can be imported.
    max_episode_steps: 27,000 for Atari, 1,000 / action_repeat for dm_control. Raises ValueError for a wrong name.
    """
    family, name = id.split("/", 1)
    if family == "ALE":
        ale = emulator()
        known = [f"ALE/{ale.registration.rom_id_to_name(rom)}-v5" for rom in ale.roms.get_all_rom_ids()]
        if id not in known:
            raise ValueError(f"no Atari game is called {id}; {nearest(id, known)}")
        entry, kwargs = "atari", {"game": name.removesuffix("-v5"), "sticky": 0.0, "frame_skip": 4, "noop_max": 30} | kwargs
        limit = steps(FRAMES, kwargs["frame_skip"])
    else:
        task = name.removesuffix("-v0")
        if task == name or "-" not in task:
            raise ValueError(f"ids of dm_control are dm_control/<domain>-<task>-v0, as dm_control/cheetah-run-v0, not {id}")
        domain, _, rest = task.partition("-")
        entry, kwargs = "Control", {"domain": domain, "task": rest, "action_repeat": CONTROL.get(task, 4), "size": 84} | kwargs
        limit = steps(STEPS, kwargs["action_repeat"])
    return gymnasium.envs.registration.EnvSpec(id, f"policies.screens:{entry}", max_episode_steps=limit, kwargs=kwargs)


def make(id, **kwargs):
    """A gymnasium environment from an id (kwargs: as of `spec`, and render_mode="rgb_array") or from an EnvSpec with such an id.

    A spec that somebody else recorded, e.g. in a published Minari set, is made as it was recorded. Of a spec, kwargs can change
    render_mode only: its length belongs to its other settings. Raises ValueError for a wrong name.
    """
    if isinstance(id, str):
        render_mode = kwargs.pop("render_mode", None)
        return gymnasium.make(spec(id, **kwargs), render_mode=render_mode, disable_env_checker=True)
    if id.id.startswith("ALE/"):
        emulator()
    return gymnasium.make(id, disable_env_checker=True, **kwargs)


def describe(env):
    """One line about an environment made here, from the environment itself: what a run's head should say."""
    limit = f"{env.spec.max_episode_steps:,} steps"
    if env.spec.id.startswith("ALE/"):
        skip, noops = env.get_wrapper_attr("frame_skip"), env.get_wrapper_attr("noop_max")
        sticky, meanings = env.unwrapped.ale.getFloat("repeat_action_probability"), env.unwrapped.get_action_meanings()
        actions = f"{len(meanings)} actions ({' '.join(meanings)})"
        return f"{env.spec.name}: skip {skip}, sticky {round(sticky, 3)}, {actions}, up to {noops} no-ops, at most {limit}"
    return f"{env.spec.name}: action repeat {env.unwrapped.repeat}, {limit}"
