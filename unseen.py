"""Tasks that a model never trained on: its returns task by task, and a control.

    python train.py --model dt --env cheetah-vel --source local     trains on 35 speeds, plays 5 others too
    python unseen.py runs/dt-cheetah-vel-s0                         its returns, task by task
    python unseen.py --model dt --env cheetah-vel --source local    the control: rewards of other episodes

The control takes the flags of train.py. It sees the same states and actions, but what its rewards say is of
no use. What a model gains over it, it gains by reading rewards: for the cheetah and the ant no other input
tells the tasks apart.
"""
import errors  # noqa: F401, I001 (first: Ctrl-C is quiet while the libraries load)
import argparse
import json
import sys
from pathlib import Path

import numpy as np

import data
import settings as config
from envs import ENVS, get_env
from errors import Parser, UserError, explained, run_command
from policies.tasks import label, task_of
from train import train


def shuffled(t, seed=0):
    """Trajectories in which each episode has the rewards of another one of full length, cut to its own."""
    lengths, rng = t.lengths.numpy(), np.random.default_rng(seed)
    full = np.flatnonzero(lengths == lengths.max())
    others = rng.choice(full, len(lengths))
    others[full] = rng.permutation(full)
    begins = t.starts[others]
    rewards = [t.rewards[i:i + n] for i, n in zip(begins, lengths, strict=True)]
    return data.Trajectories(
        t.states, t.actions, np.concatenate(rewards), lengths, t.terminated, t.truncated,
        action_low=-1, action_high=1,       # of all environments of tasks
        dataset=f"{t.dataset}, rewards shuffled", source=t.source, env_spec=t.env_spec, layout=t.layout,
        max_ep_len=t.max_ep_len)


def control(**given):
    """train.train() on shuffled rewards."""
    cfg = config.resolve(given).train
    if "unseen" not in get_env(cfg.env).starts:
        names = ", ".join(name for name, env in ENVS.items() if "unseen" in env.starts)
        raise UserError(f"{cfg.env} has no unseen tasks; take --env {names}")
    t = shuffled(data.load(cfg.env, cfg.source, cfg.data), cfg.seed)
    return train(t, **dict(run=f"{cfg.model}-{cfg.env}-shuffled-s{cfg.seed}") | given)


def by_task(result):
    """{start: {task: [return of each of its episodes]}} at the headline target, from what train() returns."""
    starts, out = ENVS[result["env"]].starts, {}
    for row in result["rows"]:
        if row["target"] == result["asked"]:
            tasks = out[row["start"]] = {}
            for j, x in enumerate(row["returns"]):      # seeds as in eval.evaluate
                task = task_of(starts[row["start"]]["tasks"], 1000 * result["seed"] + j)
                tasks.setdefault(task, []).append(x)
    return out


def report(result):
    """by_task as text, with the mean over tasks. Raises UserError for a run that has none."""
    if result["env"] not in ENVS or "unseen" not in ENVS[result["env"]].starts or not result["rows"]:
        raise UserError("this run has no unseen tasks, or was trained without evaluation")
    lines = [f"{result['model']} on {result['env']}, seed {result['seed']}, {result['dataset']}: "
             f"returns at target {result['asked']:g}"]
    for start, tasks in by_task(result).items():
        means = {task: np.mean(x) for task, x in sorted(tasks.items())}
        lines += [f"{start:8s}{label(result['env'], task):>24s}{x:9.1f}" for task, x in means.items()]
        lines.append(f"{start:8s}{'mean':>24s}{np.mean([*means.values()]):9.1f} over {len(means)} tasks")
    return "\n".join(lines)


def main():
    argv = sys.argv[1:]
    if len(argv) != 1 or argv[0].startswith("-"):
        parser = Parser(description=__doc__, argument_default=argparse.SUPPRESS)
        result = control(**config.parse(argv, parser)[1])
    else:
        with explained(f"{argv[0]} is no folder of a finished run", kinds=(OSError, ValueError)):
            result = json.loads((Path(argv[0]) / "result.json").read_text(encoding="utf-8"))
    print(report(result))


if __name__ == "__main__":
    run_command(main)
