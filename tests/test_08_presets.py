"""The papers' tables, typed in a second time from the papers, against what train.py would use: a preset with
a slip in it trains a whole paper's experiments wrongly, and nothing else would notice.

    pytest tests/test_08_presets.py
"""
import pytest
import torch

import settings

BODIES = ("hopper", "halfcheetah", "walker2d")
LOCOMOTION = [f"{e}-{s}" for e in BODIES for s in ("medium", "medium-replay", "medium-expert")]
GAMES = ("breakout", "qbert", "pong", "seaquest", "asterix", "frostbite", "assault", "gopher")
MAZES = [f"antmaze-{m}" for m in ("umaze", "umaze-diverse", "medium-play", "medium-diverse")]


def used(model, env, **given):
    """{field: value} of a run of the paper's size."""
    return settings.resolve(dict(model=model, env=env, size="paper") | given).values()


def check(model, env, given=None, **expected):
    got = used(model, env, **given or {})
    assert {k: got[k] for k in expected} == expected, f"{model} on {env}"


# ------------------------------------------------------------------------------- Decision Transformer

@pytest.mark.parametrize("env", LOCOMOTION)
def test_dt_gym_settings(env):
    """DT paper, Table 9 (gym), and the released code: warm-up 10,000, timestep table N(0, 1)."""
    check("dt", env, n_layer=3, n_head=1, d=128, context_len=20, batch_size=64, dropout=0.1,
          activation="relu", lr=1e-4, weight_decay=1e-4, clip=0.25, warmup=10_000, steps=100_000,
          schedule="constant", timestep_std=1.0, betas=(0.9, 0.999))


@pytest.mark.parametrize("env, targets", [
    ("hopper-medium", (3600, 1800)), ("walker2d-medium-replay", (5000, 2500)),
    ("halfcheetah-medium", (6000, 12000)), ("antmaze-umaze", (1,)), ("maze2d-umaze", (280, 140)),
    ("pen-human", (3100, 1550)), ("door-cloned", (2900, 1450)), ("hammer-human", (12800, 6400)),
    ("relocate-human", (4300, 2150)),
])
def test_dt_targets(env, targets):
    assert used("dt", env)["targets"] == targets


def test_dt_as_lsdts_baseline_on_antmaze():
    check("dt", "antmaze-umaze", batch_size=128, lr=4e-4, weight_decay=3e-4, activation="gelu",
          context_len=20, d=128)


# DC paper, Table 6: 1 or 5 times the largest return of the data
ATARI_TARGETS = dict(breakout=90, qbert=2500, pong=20, seaquest=1450, asterix=520, frostbite=950, assault=780,
                     gopher=2750)


@pytest.mark.parametrize("env", GAMES)
def test_dt_atari_settings(env):
    """DT paper, Table 8. DC paper, Tables 6 and 7 and B.2: four games more, of ten epochs instead of five."""
    pong = env == "pong"
    epochs = 5 if env in GAMES[:4] else 10
    batch_size = 512 if pong else 128
    check("dt", env, n_layer=6, n_head=8, d=128, context_len=50 if pong else 30, batch_size=batch_size,
          dropout=0.1, lr=6e-4, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, activation="gelu",
          position="window", sample=True, rtg_scale=1.0, targets=(ATARI_TARGETS[env],))
    assert used("dt", env)["steps"] * batch_size == pytest.approx(epochs * 500_000, rel=0.001)


# ------------------------------------------------------------------------------- Decision ConvFormer

@pytest.mark.parametrize("env", LOCOMOTION + MAZES[:2])
def test_dc_table_4_and_the_choices_listed_under_it(env):
    """Embedding 256 in hopper-medium and -replay; rate 1e-4 there, in walker2d-medium and antmaze, 1e-3
    elsewhere; no actions in hopper-replay."""
    wide = env in ("hopper-medium", "hopper-medium-replay")
    slow = wide or env == "walker2d-medium" or env.startswith("antmaze")
    check("dc", env, n_layer=3, context_len=8, window=6, batch_size=64, dropout=0.1, activation="gelu",
          weight_decay=1e-4, clip=0.25, warmup=10_000, steps=100_000, d=256 if wide else 128,
          lr=1e-4 if slow else 1e-3, use_actions=env != "hopper-medium-replay", hybrid=False,
          schedule="constant")


def test_dc_targets_are_dts_times_one_to_twenty():
    for env, base in (("hopper-medium", 3600), ("halfcheetah-medium", 6000), ("walker2d-medium", 5000)):
        targets = used("dc", env)["targets"]
        assert targets[0] == base and targets[-1] == 20 * base and len(targets) == 6
    assert used("dc", "antmaze-umaze")["targets"] == (1, 2, 5, 10, 50, 100)


def test_dc_hybrid_is_lsdts_baseline_on_maze2d():
    check("dc", "maze2d-medium", hybrid=True, n_head=2, lr=1e-4, n_layer=3, context_len=8, batch_size=64)


# DC paper, Table 13: games with a projection, of DC and of DC-hybrid
PROJECTION = {
    False: ("qbert", "seaquest", "frostbite", "assault"),
    True: ("qbert", "seaquest", "asterix", "frostbite", "assault"),
}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("env", GAMES)
def test_dc_atari_tables_6_7_and_13(env, hybrid):
    """Table 6: layers, width, batch, rate, clip, decay. K is 8; the hybrid's, by Table 7, 30 or 50."""
    K = (50 if env == "pong" else 30) if hybrid else 8
    given = dict(hybrid=True) if hybrid else {}
    check("dc", env, given, n_layer=6, d=128, context_len=K, batch_size=256, dropout=0.1, lr=6e-4,
          weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, activation="gelu", window=6, schedule="cosine",
          targets=(ATARI_TARGETS[env],), projection=env in PROJECTION[hybrid], hybrid=hybrid,
          n_head=8 if hybrid else 1, position="window")
    steps = used("dc", env, **given)["steps"]
    assert steps * 256 == pytest.approx(10 * 500_000, rel=0.001)      # ten epochs of 500,000 windows


def test_dc_hybrid_of_the_small_size_keeps_the_small_context():
    for env in ("pong", "asterix"):
        got = used("dc", env, hybrid=True, size="small")
        assert (got["context_len"], got["hybrid"]) == (2, True)


# ------------------------------------------------------------------------------- Long-Short DT

LSDT_RATIO = {  # Table 14, % of the channels that are convolved
    "antmaze-umaze": 50, "antmaze-umaze-diverse": 75, "antmaze-medium-play": 75, "antmaze-medium-diverse": 50,
    "maze2d-umaze": 50, "maze2d-medium": 12.5, "maze2d-large": 25,
    "walker2d-medium": 12.5, "walker2d-medium-replay": 50, "walker2d-medium-expert": 12.5,
    "halfcheetah-medium": 50, "halfcheetah-medium-replay": 50, "halfcheetah-medium-expert": 75,
    "hopper-medium": 100, "hopper-medium-replay": 100, "hopper-medium-expert": 75,
}
LSDT_K = {  # Table 5; maze2d 20, all others 10
    "walker2d-medium": 5, "hopper-medium-replay": 20, "hopper-medium-expert": 20,
}


@pytest.mark.parametrize("env", LSDT_RATIO)
def test_lsdt_tables_5_13_and_14(env):
    maze2d, maze = env.startswith("maze2d"), env.startswith(("maze2d", "antmaze"))
    target = 10000.0 if env.endswith("expert") else 7000.0
    if maze:
        target = 300.0 if maze2d else 100.0
    if env == "halfcheetah-medium-expert":
        target = 15000.0
    check("lsdt", env, conv_ratio=LSDT_RATIO[env] / 100, context_len=20 if maze2d else LSDT_K.get(env, 10),
          kernel=3 if maze2d else 6, n_layer=3, n_head=2 if maze and env != "antmaze-umaze" else 1,
          d=256 if env in ("hopper-medium", "hopper-medium-replay") else 128, batch_size=256 if maze else 64,
          dropout=0.25, conv_dropout=0.2, fusion="hfm", branch="dynamic", activation="gelu",
          lr=2e-4 if maze and env != "antmaze-medium-diverse" else 1e-4, schedule="cosine", warmup=10_000,
          steps=100_000, weight_decay=1e-4, clip=0.25, targets=(target,), rtg_scale=1.0 if maze else 1000.0,
          use_actions=env != "hopper-medium")


# ------------------------------------------------------------------------------- Return-Aligned DT

@pytest.mark.parametrize("env", LOCOMOTION + ["ant-medium", "ant-medium-replay"])
def test_radt_table_4(env):
    check("radt", env, n_layer=3, n_head=1, d=128, context_len=20, batch_size=64, dropout=0.1,
          activation="gelu", lr=1e-4, weight_decay=1e-4, clip=0.25, warmup=10_000, steps=100_000,
          schedule="constant", eval_episodes=20)


@pytest.mark.parametrize("env", ["breakout", "pong", "qbert", "seaquest"])
def test_radt_table_5(env):
    """Atari. Five epochs of 500,000 windows."""
    pong = env == "pong"
    batch_size = 512 if pong else 128
    check("radt", env, n_layer=6, n_head=8, d=128, context_len=50 if pong else 30, batch_size=batch_size,
          dropout=0.1, lr=6e-4, weight_decay=0.1, betas=(0.9, 0.95), clip=0.1, activation="gelu",
          position="sinusoidal")
    assert used("radt", env)["steps"] * batch_size == pytest.approx(5 * 500_000, rel=0.001)


RADT_RANGE = {  # 5th and 95th percentile of the data's returns
    "hopper-medium-replay": (0.984, 1488.35), "halfcheetah-medium-replay": (-237.03, 4685.02),
    "walker2d-medium-replay": (-4.90, 3053.78), "ant-medium-replay": (-82.87, 3160.46),
    "hopper-medium": (799.52, 2038.58), "halfcheetah-medium": (4488.95, 5056.43),
    "walker2d-medium": (892.23, 3833.17), "ant-medium": (449.81, 3972.21),
    "hopper-medium-expert": (845.70, 3629.42), "halfcheetah-medium-expert": (4567.05, 10905.77),
    "walker2d-medium-expert": (982.94, 4963.50), "ant-medium-expert": (543.01, 5350.66),
    "breakout": (12.0, 77.0), "pong": (3.0, 21.0), "qbert": (15.0, 283.0), "seaquest": (13.0, 200.0),
}


@pytest.mark.parametrize("env", RADT_RANGE)
def test_radt_asks_for_seven_evenly_spaced_returns(env):
    low, high = RADT_RANGE[env]
    expected = [high - i * (high - low) / 6 for i in range(7)]
    assert used("radt", env)["targets"] == pytest.approx(expected, abs=0.01)


# ------------------------------------------------------------------------------- StARformer

def test_starformer_on_gym_is_the_released_script():
    check("starformer", "hopper-medium", n_layer=3, n_head=1, d=128, step_d=16, step_heads=4, context_len=20,
          batch_size=64, dropout=0.1, lr=1e-4, weight_decay=1e-4, betas=(0.9, 0.95), clip=0.25, warmup=10_000,
          condition="reward", activation="gelu")


@pytest.mark.parametrize("env, patch, lr", [
    ("breakout", 7, 6e-4), ("seaquest", 7, 6e-4), ("cheetah-run", 12, 1e-3), ("walker-walk", 12, 1e-3),
])
def test_starformer_tables_4_and_5(env, patch, lr):
    check("starformer", env, n_layer=6, n_head=8, d=192, step_d=64, step_heads=4, patch=patch,
          context_len=30, batch_size=64, dropout=0.1, lr=lr, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0,
          condition="reward", activation="gelu")


# ------------------------------------------------------------------------------- Decision Mixer

def test_dm_table_7():
    for env in LOCOMOTION:
        check("dm", env, n_layer=6, n_head=4, d=256, context_len=20, batch_size=512, dropout=0.1, lr=1e-3,
              weight_decay=1e-4, clip=0.25, activation="gelu", steps=25_000)


@pytest.mark.parametrize("env, scale, targets", [
    ("maze2d-large", 10, (300, 200, 150, 100, 50, 20)), ("pen-cloned", 1000, (12000, 6000)),
    ("hammer-human", 1000, (12000, 6000, 3000)), ("door-human", 100, (2000, 1000, 500)),
    ("relocate-human", 1000, (3000, 1000)), ("kitchen-mixed", 100, (500, 250)),
])
def test_dm_scales_and_targets_are_the_released_ones(env, scale, targets):
    check("dm", env, rtg_scale=scale, targets=targets)


# ------------------------------------------------------------------------------- all six

@pytest.mark.parametrize("model", settings.MODELS)
@pytest.mark.parametrize("env", ["pointmaze-umaze", "antmaze-umaze", "hopper-medium", "kitchen-mixed"])
def test_small_sizes_take_the_environments_own_return_scale(model, env):
    """A paper's scale of 1 leaves returns of hundreds: a small model then does not follow its target (rank
    correlation about 0.1, not 0.98)."""
    assert used(model, env, size="small")["rtg_scale"] is None


@pytest.mark.parametrize("model", settings.MODELS)
def test_a_small_ant_has_a_wider_model_and_larger_batches_than_a_small_point(model):
    point, ant = (used(model, env, size="small") for env in ("pointmaze-umaze", "antmaze-umaze"))
    assert ant["d"] > point["d"] and ant["batch_size"] > point["batch_size"] and ant["lr"] == point["lr"]
    assert (ant["steps"], ant["dropout"]) == ((10_000, 0.1) if model == "radt" else (5000, 0.0))
    large = {"env": "antmaze-large-diverse", "steps": 10_000, "dropout": 0.0}
    assert used(model, "antmaze-large-diverse", size="small") == ant | large


def test_under_one_name_a_models_preset_stands_above_that_of_all_models(monkeypatch):
    assert used("radt", "walker2d-medium", size="small")["steps"] == 7400
    monkeypatch.setitem(settings.model_module("radt").PRESETS, "small-walker2d", dict(steps=9))
    assert used("radt", "walker2d-medium", size="small")["steps"] == 9
    monkeypatch.setitem(settings.PRESETS, "small-walker2d-medium", dict(steps=8))
    assert used("radt", "walker2d-medium", size="small")["steps"] == 8, "a more specific name decides"


@pytest.mark.parametrize("model", settings.MODELS)
def test_dmc_starts_from_starformers_table_5_for_all_six(model):
    """Table 5: 6 layers of 8 heads, dropout 0.1, rate 1e-3, decay 0.1, clip 1.0; it gives its DT baseline the
    same training."""
    given = dict(hybrid=True) if model == "dc" else {}      # without attention DC has no heads
    for env in ("cheetah-run", "ball-in-cup-catch", "finger-spin", "reacher-easy", "walker-walk"):
        check(model, env, given, n_layer=6, n_head=8, dropout=0.1, lr=1e-3, weight_decay=0.1,
              decay="matrices", clip=1.0, betas=(0.9, 0.95), batch_size=64, schedule="cosine")


@pytest.mark.parametrize("model", settings.MODELS)
@pytest.mark.parametrize("env", ["breakout", "cheetah-run"])
def test_small_frames_are_of_one_size_for_all_six(model, env):
    got = used(model, env, size="small")
    assert (got["d"], got["context_len"], got["batch_size"]) == (96, 2, 64)
    assert got["steps"] * got["batch_size"] * got["context_len"] < 400_000


@pytest.mark.parametrize("model", settings.MODELS)
def test_every_preset_names_fields_and_environments_that_exist(model):
    """A misspelt key would be a preset that nobody gets. One may add a switch: "atari hybrid"."""
    module = settings.model_module(model)
    known = {f for config in (settings.TrainConfig, module.Config) for f in config.__dataclass_fields__}
    envs = settings.envs.ENVS
    places = set(envs) | {env.family for env in envs.values()}
    names = {"*", "small", "small-frames"} | places | {f"small-{place}" for place in places}
    for key, values in module.PRESETS.items():
        name, _, switch = key.partition(" ")
        assert name in names and (not switch or switch in known), key
        assert values.keys() <= known, key


@pytest.mark.parametrize("model", settings.MODELS)
def test_every_preset_makes_a_model_at_both_sizes(model):
    """No preset is refused as a switch without effect, nor as sizes that make no model."""
    made = set()
    for env, facts in settings.envs.ENVS.items():
        for size in ("paper", "small"):
            resolved = settings.fitted(settings.resolve(dict(model=model, env=env, size=size)), facts)
            if str(resolved.model) not in made:
                with torch.device("meta"):      # without memory
                    settings.model_of(resolved)
                made.add(str(resolved.model))
