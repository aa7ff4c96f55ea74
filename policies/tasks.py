"""Environments of many tasks: a model learns some of them and is tested on others (DM paper, Appendix D).

An episode has one task, which decides its rewards (in MetaWorld also what stands on the table) and is not in
the observation. reset(options={"tasks": [...]}) says from which tasks it comes; without, from all.
"""
import contextlib
import math
import warnings

import gymnasium
import numpy as np

from policies.players import actor, seen_from_heading

SPEEDS = 0.075 * np.arange(1, 41)       # m/s: as Prompt-DT's code spaces the 40 tasks in (0, 3]
ANGLES = 2 * math.pi * np.arange(50) / 50     # ours: nobody published the papers', which were drawn


def task_of(tasks, seed):
    """The task of an episode that is reset with this seed: n seeds in a row play each of n tasks once, and
    few seeds already spread over them all (13 shares no factor with any of our numbers of tasks)."""
    return tasks[13 * seed % len(tasks)]


def label(name, task):
    """What a task of the environment of this name is, in words."""
    if name == "cheetah-vel":
        return f"{SPEEDS[task]:.3f} m/s"
    if name == "ant-dir":
        return f"{math.degrees(ANGLES[task]):.0f} degrees"
    with contextlib.suppress(ImportError):
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        return list(ALL_V3_ENVIRONMENTS)[task].removesuffix("-v3")
    return f"task {task}"


class Tasks(gymnasium.Wrapper):
    """An environment in which an episode has one of `count` tasks, told to nobody but in info["task"]."""
    count = 0

    def reset(self, *, seed=None, options=None):
        tasks = (options or {}).get("tasks", range(self.count))
        self.task = task_of(tasks, int(self.np_random.integers(2**31)) if seed is None else seed)
        observation, info = self.env.reset(seed=seed)
        return observation, info | {"task": self.task}


class CheetahVel(Tasks):
    """The cheetah should run at a speed: reward -|speed - SPEEDS[task]| - 0.05 |action|^2."""
    count = len(SPEEDS)

    def step(self, action):
        observation, _, terminated, truncated, info = self.env.step(action)
        reward = -abs(info["x_velocity"] - SPEEDS[self.task]) + info["reward_ctrl"]
        return observation, reward, terminated, truncated, info


class AntDir(Tasks):
    """The ant should run in a direction: the reward of Ant-v5, with the speed along ANGLES[task] as its
    forward part. An episode ends where the ant is no longer healthy."""
    count = len(ANGLES)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        angle = ANGLES[self.task]
        along = math.cos(angle) * info["x_velocity"] + math.sin(angle) * info["y_velocity"]
        return observation, reward - info["reward_forward"] + along, terminated, truncated, info


class MetaWorld(gymnasium.Env):
    """The 50 tasks of MetaWorld, numbered as in its own list. A seed decides the task, and the goal and the
    places of things in it, drawn as by the benchmark; the goal is hidden from the observation, as in ML10."""
    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}

    def __init__(self, render_mode=None):
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        self.classes, self.render_mode = list(ALL_V3_ENVIRONMENTS.items()), render_mode
        self.task, self.robot = None, None
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float64)
        self.action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        task = task_of((options or {}).get("tasks", range(len(self.classes))), seed)
        if task != self.task:       # each has physics of its own, of 26 MB: one at a time is kept
            self.close()
            self.task, (self.name, kind) = task, self.classes[task]
            self.robot = kind(render_mode=self.render_mode)
        self.robot._set_task_called, self.robot._freeze_rand_vec = True, False
        self.robot.seeded_rand_vec, self.robot._partially_observable = True, True
        self.robot.seed(seed)
        observation, _ = self.robot.reset()
        return observation, {"task": self.task}

    def step(self, action):
        observation, reward, _, _, info = self.robot.step(action)
        return observation, reward, False, False, {"task": self.task, "success": info["success"]}

    def render(self):
        return self.robot.render()

    def close(self):
        if self.robot:
            self.robot.close()


def cheetah_vel(render_mode=None):
    # 0.05: the weight of the action's cost in the benchmark; HalfCheetah-v5's own is 0.1
    return CheetahVel(gymnasium.make("HalfCheetah-v5", ctrl_cost_weight=0.05, render_mode=render_mode))


def ant_dir(render_mode=None):
    return AntDir(gymnasium.make("Ant-v5", include_cfrc_ext_in_observation=False, render_mode=render_mode))


for _id, _entry, _steps in [("CheetahVel-v0", "cheetah_vel", 200), ("AntDir-v0", "ant_dir", 200),
                            ("MetaWorld-v0", "MetaWorld", 500)]:
    gymnasium.register(_id, f"policies.tasks:{_entry}", max_episode_steps=_steps)


# ----- players, as in players.py

PERIOD, AFRESH = 10, 100     # steps


def errors(rng, low, high):
    """How far one episode's aim is from its task's, step by step, without end.

    Every AFRESH steps it begins anywhere between low and high. Every PERIOD steps the player corrects a share
    of it, which is drawn for the episode: how good its player is. In between it stays, so that past actions
    do not tell where it goes next, and a model must read rewards. It is never below 0, so that a reward tells
    which way to go.
    """
    share = rng.uniform(0.5, 1)
    while True:
        error = rng.uniform(low, high)
        for _ in range(AFRESH // PERIOD):
            for _ in range(PERIOD):
                yield error
            error *= 1 - share


TOP = 3.3       # m/s, with which an episode begins
# Speed (m/s) of halfcheetah's level 5 whose actions are multiplied by STRENGTH: means of 180 steps.
STRENGTH, SPEED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (0.0, 0.39, 1.1, 1.84, 2.65, 3.65)


def pacer(env, first, rng):
    """The cheetah at about the speed of its task or faster: a stored actor, as weak as it takes."""
    run = actor(env, first, rng, "halfcheetah", [5], spread=0)
    goal = SPEEDS[env.get_wrapper_attr("task")]
    error = errors(rng, TOP - goal, TOP - goal)

    def act(observation):
        strength = np.interp(goal + next(error), SPEED, STRENGTH)
        return np.clip(strength * run(observation) + 0.01 * rng.standard_normal(6), -1, 1)
    return act


def runner(env, first, rng):
    """The ant in the direction of its task or to the left of it."""
    run = actor(env, first, rng, "ant", [3], spread=0)
    goal, error = ANGLES[env.get_wrapper_attr("task")], errors(rng, 0, math.pi)

    def act(observation):
        action = run(seen_from_heading(observation, goal + next(error)))
        return np.clip(action + 0.01 * rng.standard_normal(8), -1, 1)
    return act


def sawyer(env, first, rng):
    """MetaWorld's own scripted policy, which sees the goal, with noise of a size drawn for the episode."""
    from metaworld.policies import ENV_POLICY_MAP
    world, noise = env.unwrapped, rng.uniform(0, 1)
    policy = ENV_POLICY_MAP[world.name]()
    warnings.filterwarnings("ignore", message="Constant")       # that it asks for more than an action can be

    def act(observation):
        full = np.concatenate([observation[:-3], world.robot._get_pos_goal()])
        return np.clip(policy.get_action(full) + noise * rng.standard_normal(4), -1, 1)
    return act
