"""The papers' tables, typed in a second time from the papers, against what train.py would use: a preset with a slip in it trains a whole
paper's experiments wrongly, and nothing else would notice.

    pytest tests/test_08_presets.py
"""
import dataclasses

import pytest

import settings

LOCOMOTION = [f"{e}-{s}" for e in ("hopper", "halfcheetah", "walker2d") for s in ("medium", "medium-replay", "medium-expert")]


def used(model, env):
    cfg, values, _ = settings.settings(dict(model=model, env=env, size="paper"))
    return dataclasses.asdict(cfg) | values


def check(model, env, **expected):
    got = used(model, env)
    assert {k: got[k] for k in expected} == expected, f"{model} on {env}"


@pytest.mark.parametrize("env", LOCOMOTION)
def test_dt_gym_settings(env):
    """DT paper, Table 9 (gym), and the released code: warm-up 10,000, timestep table N(0, 1)."""
    check("dt", env, n_layer=3, n_head=1, d=128, context_len=20, batch_size=64, dropout=0.1, activation="relu", lr=1e-4, weight_decay=1e-4,
          clip=0.25, warmup=10_000, steps=100_000, schedule="constant", timestep_std=1.0, betas=(0.9, 0.999))


@pytest.mark.parametrize("env, targets", [
    ("hopper-medium", (3600, 1800)), ("walker2d-medium-replay", (5000, 2500)), ("halfcheetah-medium", (6000, 12000)), ("antmaze-umaze", (1,)),
    ("maze2d-umaze", (280, 140)), ("pen-human", (3100, 1550)), ("door-cloned", (2900, 1450)), ("hammer-human", (12800, 6400)),
    ("relocate-human", (4300, 2150))])
def test_dt_targets(env, targets):
    assert used("dt", env)["targets"] == targets


def test_dt_as_lsdts_baseline_on_antmaze():
    check("dt", "antmaze-umaze", batch_size=128, lr=4e-4, weight_decay=3e-4, activation="gelu", context_len=20, d=128)


@pytest.mark.parametrize("env", LOCOMOTION + ["antmaze-umaze", "antmaze-umaze-diverse"])
def test_dc_table_4_and_the_choices_listed_under_it(env):
    """Embedding 256 in hopper-medium and -replay; rate 1e-4 there, in walker2d-medium and antmaze, 1e-3 elsewhere; no actions in hopper-replay."""
    slow = env in ("hopper-medium", "hopper-medium-replay", "walker2d-medium") or env.startswith("antmaze")
    check("dc", env, n_layer=3, context_len=8, window=6, batch_size=64, dropout=0.1, activation="gelu", weight_decay=1e-4, clip=0.25, warmup=10_000,
          steps=100_000, d=256 if env in ("hopper-medium", "hopper-medium-replay") else 128, lr=1e-4 if slow else 1e-3,
          use_actions=env != "hopper-medium-replay", hybrid=False, schedule="constant")


def test_dc_targets_are_dts_times_one_to_twenty():
    for env, base in (("hopper-medium", 3600), ("halfcheetah-medium", 6000), ("walker2d-medium", 5000)):
        targets = used("dc", env)["targets"]
        assert targets[0] == base and targets[-1] == 20 * base and len(targets) == 6
    assert used("dc", "antmaze-umaze")["targets"] == (1, 2, 5, 10, 50, 100)


def test_dc_hybrid_is_lsdts_baseline_on_maze2d():
    check("dc", "maze2d-medium", hybrid=True, n_head=2, lr=1e-4, n_layer=3, context_len=8, batch_size=64)


LSDT_RATIO = {  # Table 14, % of the channels that are convolved
    "antmaze-umaze": 50, "antmaze-umaze-diverse": 75, "antmaze-medium-play": 75, "antmaze-medium-diverse": 50, "maze2d-umaze": 50,
    "maze2d-medium": 12.5, "maze2d-large": 25, "walker2d-medium": 12.5, "walker2d-medium-replay": 50, "walker2d-medium-expert": 12.5,
    "halfcheetah-medium": 50, "halfcheetah-medium-replay": 50, "halfcheetah-medium-expert": 75,
    "hopper-medium": 100, "hopper-medium-replay": 100, "hopper-medium-expert": 75}
LSDT_K = {"walker2d-medium": 5, "hopper-medium-replay": 20, "hopper-medium-expert": 20}     # Table 5; maze2d 20, all others 10


@pytest.mark.parametrize("env", LSDT_RATIO)
def test_lsdt_tables_5_13_and_14(env):
    maze2d, maze = env.startswith("maze2d"), env.startswith(("maze2d", "antmaze"))
    target = 300.0 if maze2d else 100.0 if maze else {"halfcheetah-medium-expert": 15000.0}.get(env, 10000.0 if env.endswith("expert") else 7000.0)
    check("lsdt", env, conv_ratio=LSDT_RATIO[env] / 100, context_len=20 if maze2d else LSDT_K.get(env, 10), kernel=3 if maze2d else 6, n_layer=3,
          n_head=2 if maze and env != "antmaze-umaze" else 1, d=256 if env in ("hopper-medium", "hopper-medium-replay") else 128,
          batch_size=256 if maze else 64, dropout=0.25, lr=2e-4 if maze and env != "antmaze-medium-diverse" else 1e-4, schedule="cosine",
          warmup=10_000, steps=100_000, weight_decay=1e-4, clip=0.25, targets=(target,), rtg_scale=1.0 if maze else 1000.0)


@pytest.mark.parametrize("env", LOCOMOTION + ["ant-medium", "ant-medium-replay"])
def test_radt_table_4(env):
    check("radt", env, n_layer=3, n_head=1, d=128, context_len=20, batch_size=64, dropout=0.1, activation="gelu", lr=1e-4, weight_decay=1e-4,
          clip=0.25, warmup=10_000, steps=100_000, schedule="constant", eval_episodes=20)


RADT_RANGE = {  # 5th and 95th percentile of the data's returns
    "hopper-medium-replay": (0.984, 1488.35), "halfcheetah-medium-replay": (-237.03, 4685.02), "walker2d-medium-replay": (-4.90, 3053.78),
    "ant-medium-replay": (-82.87, 3160.46), "hopper-medium": (799.52, 2038.58), "halfcheetah-medium": (4488.95, 5056.43),
    "walker2d-medium": (892.23, 3833.17), "hopper-medium-expert": (845.70, 3629.42), "halfcheetah-medium-expert": (4567.05, 10905.77),
    "walker2d-medium-expert": (982.94, 4963.50), "ant-medium": (449.81, 3972.21), "ant-medium-expert": (543.01, 5350.66)}


@pytest.mark.parametrize("env", RADT_RANGE)
def test_radt_asks_for_seven_evenly_spaced_returns(env):
    low, high = RADT_RANGE[env]
    expected = [high - i * (high - low) / 6 for i in range(7)]
    assert used("radt", env)["targets"] == pytest.approx(expected, abs=0.01)


def test_starformer_on_gym_is_the_released_script():
    check("starformer", "hopper-medium", n_layer=3, n_head=1, d=128, step_d=16, step_heads=4, context_len=20, batch_size=64, dropout=0.1, lr=1e-4,
          weight_decay=1e-4, betas=(0.9, 0.95), clip=0.25, warmup=10_000, condition="reward", activation="gelu")


def test_dm_table_7():
    for env in LOCOMOTION:
        check("dm", env, n_layer=6, n_head=4, d=256, context_len=20, batch_size=512, dropout=0.1, lr=1e-3, weight_decay=1e-4, clip=0.25,
              activation="gelu", steps=25_000)


@pytest.mark.parametrize("env, scale, targets", [
    ("maze2d-large", 10, (300, 200, 150, 100, 50, 20)), ("pen-cloned", 1000, (12000, 6000)), ("hammer-human", 1000, (12000, 6000, 3000)),
    ("door-human", 100, (2000, 1000, 500)), ("relocate-human", 1000, (3000, 1000)), ("kitchen-mixed", 100, (500, 250))])
def test_dm_scales_and_targets_are_the_released_ones(env, scale, targets):
    check("dm", env, rtg_scale=scale, targets=targets)


@pytest.mark.parametrize("model", settings.MODELS)
@pytest.mark.parametrize("env", ["pointmaze-umaze", "antmaze-umaze", "hopper-medium", "kitchen-mixed"])
def test_small_sizes_take_the_environments_own_return_scale(model, env):
    """A paper's scale of 1 leaves returns of hundreds: a small model then does not follow its target (rank correlation about 0.1, not 0.98)."""
    assert settings.settings(dict(model=model, env=env, size="small"))[0].rtg_scale is None


@pytest.mark.parametrize("model", settings.MODELS)
def test_dmc_starts_from_starformers_table_5_for_all_six(model):
    """Table 5: 6 layers of 8 heads, dropout 0.1, rate 1e-3, decay 0.1, clip 1.0; it gives its DT baseline the same training."""
    for env in ("cheetah-run", "ball-in-cup-catch", "finger-spin", "reacher-easy", "walker-walk"):
        check(model, env, n_layer=6, n_head=8, dropout=0.1, lr=1e-3, weight_decay=0.1, decay="matrices", clip=1.0, betas=(0.9, 0.95),
              batch_size=64, schedule="cosine")


@pytest.mark.parametrize("model", settings.MODELS)
@pytest.mark.parametrize("env", ["breakout", "cheetah-run"])
def test_small_frames_are_of_one_size_for_all_six(model, env):
    cfg, values, _ = settings.settings(dict(model=model, env=env, size="small"))
    assert (values["d"], values["context_len"], cfg.batch_size) == (96, 2, 64) and cfg.steps * cfg.batch_size * values["context_len"] < 400_000
