"""Properties that hold for every structure of episodes, each against a slow loop that one can check by eye.

    pytest tests/test_19_properties.py

Hypothesis draws the structures, the same every time. Rewards are multiples of 1/4, so that sums are exact.
"""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from minari.data_collector import EpisodeBuffer

import data
import eval as E
from data import Trajectories, Windows, episode_ends

few = settings(
    derandomize=True, deadline=None, database=None, max_examples=60, suppress_health_check=list(HealthCheck)
)
quarters = st.integers(-40, 40).map(lambda i: i / 4)
structures = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@st.composite
def sets(draw, frames=False):
    """Trajectories whose states say which row they are; episodes end in all ways, and in both at once."""
    lengths = draw(structures)
    E_, N = len(lengths), sum(lengths)
    rewards = np.array(draw(st.lists(quarters, min_size=N, max_size=N)))
    ends = {
        k: np.array(draw(st.lists(st.booleans(), min_size=E_, max_size=E_)))
        for k in ("terminated", "truncated")
    }
    i = np.arange(N)
    discrete = draw(st.booleans())
    actions = i % 3 if discrete else np.stack([np.cos(i), np.sin(i)], 1)
    states = (
        np.repeat(i.astype(np.uint8) + 1, 4).reshape(N, 2, 2)
        if frames
        else np.stack([i, i**2 / 10, np.full(N, 5.0)], 1)
    )
    goals = None if frames or draw(st.booleans()) else np.stack([np.repeat(np.arange(E_), lengths), -i], 1)
    return Trajectories(
        states,
        actions,
        rewards,
        lengths,
        goals=goals,
        n_actions=3 if discrete else None,
        stack=draw(st.integers(1, 4)),
        clip_rewards=draw(st.booleans()),
        **ends,
    )


def spans(t):
    return list(pairwise(t.starts.tolist()))


# ------------------------------------------------------------------ episodes and returns


@few
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
@example([(True, True)])
def test_episode_ends_are_those_of_a_loop_over_the_steps(steps):
    want, n = [], 0
    for terminal, timeout in steps:
        n += 1
        if terminal or timeout:
            want.append((n, terminal, timeout))
            n = 0
    if n:
        want.append((n, False, False))
    lengths, terminated, truncated = episode_ends([a for a, _ in steps], [b for _, b in steps])
    assert list(zip(lengths.tolist(), terminated.tolist(), truncated.tolist(), strict=True)) == want


@few
@given(sets())
def test_returns_to_go_and_returns_are_sums_up_to_the_episodes_end(t):
    rewards = t.rewards.tolist()
    assert t.rtg.tolist() == [sum(rewards[i:b]) for a, b in spans(t) for i in range(a, b)]
    assert t.returns.tolist() == [sum(rewards[a:b]) for a, b in spans(t)]
    assert not t.clip_rewards or max(map(abs, rewards)) <= 1
    cut = int((~t.terminated & ~t.truncated).sum())
    truncated = int((t.truncated & ~t.terminated).sum())
    assert f"{int(t.terminated.sum())} terminated, {truncated} truncated, {cut} cut off" in t.summary()


@few
@given(sets(), st.floats(0.001, 1.0))
def test_the_top_fraction_is_that_of_a_loop_over_sorted_episodes(t, fraction):
    keep, held = [], 0
    for e in sorted(
        range(len(t.lengths)), key=lambda e: -t.returns[e].item()
    ):  # sorted() is stable, as the rule must be
        held += int(t.lengths[e])
        if keep and held > fraction * len(t):
            break
        keep.append(e)
    keep.sort()
    top, rows = t.top(fraction), [i for e in keep for i in range(*spans(t)[e])]
    for name in ("states", "actions", "rewards", "rtg", *(["goals"] if t.goals is not None else [])):
        assert torch.equal(getattr(top, name), getattr(t, name)[rows]), name
    for name in ("lengths", "terminated", "truncated", "returns"):
        assert torch.equal(getattr(top, name), getattr(t, name)[keep]), name
    assert top.raw_returns.tolist() == t.raw_returns[keep].tolist() and top.starts.tolist() == [
        0,
        *np.cumsum(top.lengths.tolist()),
    ]


# ------------------------------------------------------------------ windows


@few
@given(sets(), st.integers(1, 12), st.booleans(), st.integers(1, 12))
def test_windows_equal_a_loop_over_their_steps(t, K, goal, max_ep_len):
    w = Windows(t, K, rtg_scale=4.0, reward_scale=2.0, goal=goal, max_ep_len=max_ep_len)
    batch = w.gather(torch.arange(len(t)))
    parts = [t.states] + ([t.goals] if goal and t.goals is not None else [])
    x = np.concatenate([p.numpy() for p in parts], 1).astype(np.float64)
    mean, std = x.mean(0), x.std(0)
    x = (x - mean) / np.where(std <= 1e-4 * np.abs(x).max(0), 1, std)
    for a, b in spans(t):
        for start in range(a, b):
            for k in range(K):
                i, real = start + k, start + k < b
                got = {name: v[start, k].numpy() for name, v in batch.items()}
                assert got["mask"] == real
                if not real:
                    assert not any(v.any() for v in got.values())
                    continue
                assert np.abs(got["states"] - x[i]).max() < 1e-4
                assert np.array_equal(got["actions"], t.actions[i].numpy())
                assert (
                    got["rewards"] == float(t.rewards[i]) / 2
                    and got["rtg"] == sum(t.rewards[i:b].tolist()) / 4
                )
                assert got["timesteps"] == min(i - a, max_ep_len - 1)


@few
@given(sets(frames=True), st.integers(1, 12))
def test_stacks_of_frames_equal_a_loop_over_their_frames(t, K):
    batch = Windows(t, K).gather(torch.arange(len(t)))
    for a, b in spans(t):
        for start in range(a, b):
            for k in range(K):
                for c in range(t.stack):
                    i = start + k - (t.stack - 1 - c)
                    want = i + 1 if start + k < b and i >= a else 0
                    assert (batch["states"][start, k, c] == want).all(), (start, k, c)


# ------------------------------------------------------------------ scores


def slow_ranks(v):
    return [sum(y < x for y in v) + (sum(y == x for y in v) + 1) / 2 for x in v]


@few
@given(st.lists(st.tuples(st.integers(0, 4), quarters), min_size=1, max_size=12))
@example([(1, 2.0)])
def test_rank_correlation_is_pearsons_of_ranks_with_ties_shared(pairs):
    x, y = (slow_ranks([p[k] for p in pairs]) for k in (0, 1))
    n, mx, my = len(pairs), sum(x) / len(x), sum(y) / len(y)
    sx, sy = sum((a - mx) ** 2 for a in x) / n, sum((b - my) ** 2 for b in y) / n
    rows = [dict(target=target, achieved=np.array([got]), episodes=1) for target, got in pairs]
    got = E.alignment(rows)["rank_correlation"]
    if sx == 0 or sy == 0:
        assert math.isnan(got)
    else:
        assert (
            abs(got - sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / n / math.sqrt(sx * sy))
            < 1e-9
        )


@few
@given(st.lists(st.tuples(quarters, st.lists(quarters, min_size=1, max_size=5)), min_size=1, max_size=5))
def test_alignment_is_over_all_episodes_of_all_targets(rows):
    out = E.alignment(
        [
            dict(target=target, achieved=np.array(achieved), episodes=len(achieved))
            for target, achieved in rows
        ]
    )
    errors = [abs(target - x) for target, achieved in rows for x in achieved]
    assert out["episodes"] == len(errors) and abs(out["abs_error"] - sum(errors) / len(errors)) < 1e-9


# ------------------------------------------------------------------ what a Minari set may hold


@settings(few, max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4
    ),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore")
def test_a_stored_set_comes_back_row_by_row(tmp_path_factory, episodes, discrete):
    """T or T + 1 observations, and every way of ending."""
    import minari

    root = tmp_path_factory.mktemp("minari")
    buffers, states, at = [], [], 0
    for e, (n, last, terminated, truncated) in enumerate(episodes):
        i = np.arange(at, at + n + last)
        states += list(range(at, at + n))
        at += n + 1  # the last observation, where there is one, is nobody's state
        end = np.arange(n) == n - 1
        buffers.append(
            EpisodeBuffer(
                id=e,
                observations=np.stack([i, -i], 1).astype(np.float32),
                rewards=i[:n].astype(float),
                actions=i[:n] % 3 if discrete else np.cos(i[:n, None]).astype(np.float32),
                terminations=end & terminated,
                truncations=end & truncated,
            )
        )
    with pytest.MonkeyPatch.context() as m, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m.setenv("MINARI_DATASETS_PATH", str(root))
        minari.create_dataset_from_buffers(
            "my/set-v0",
            buffers,
            observation_space=Box(-1e3, 1e3, (2,)),
            action_space=Discrete(3) if discrete else Box(-1, 1, (1,)),
        )
        t = data.load("minari:my/set-v0")
    assert t.states[:, 0].tolist() == t.rewards.tolist() == states and t.lengths.tolist() == [
        n for n, *_ in episodes
    ]
    assert t.terminated.tolist() == [x for _, _, x, _ in episodes] and t.truncated.tolist() == [
        x for *_, x in episodes
    ]
    i = np.array(states)
    assert np.allclose(t.actions.numpy(), i % 3 if discrete else np.cos(i[:, None]), atol=1e-6)
