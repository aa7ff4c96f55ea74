"""The Decision Transformer against a slow version written from its description, in float64.

    pytest tests/test_02_dt.py
"""
import math

import pytest
import torch
from test_01_contract import build, make_batch

from models.dt import PRESETS, Config, DecisionTransformer, Model


def slow_layer_norm(x, norm):
    mean = x.mean()
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean() + 1e-5) * norm.weight + norm.bias


def slow_attention(x, mixer, H):
    """x: list of L vectors. Each sees itself and what came before, one head and one pair at a time."""
    d = len(x[0])
    q, k, v = zip(*[(mixer.qkv(z)).split(d) for z in x], strict=True)
    out = []
    for i in range(len(x)):
        heads = []
        for h in range(H):
            part = slice(h * d // H, (h + 1) * d // H)
            scores = [(q[i][part] @ k[j][part]) / math.sqrt(d / H) for j in range(i + 1)]
            scores = torch.stack(scores)
            weights = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(w * v[j][part] for j, w in enumerate(weights)))
        out.append(mixer.proj(torch.cat(heads)))
    return out


def slow_forward(model, batch, row):
    """Predictions of one row, a list of K vectors."""
    cfg, tokens = model.cfg, []
    K = batch["states"].shape[1]
    G = cfg.goal_dim if cfg.goal in ("action", "rtg", "embed") else 0
    for t in range(K):
        s = batch["states"][row, t]
        s, goal = (s[:-G], s[-G:]) if G else (s, s[:0])
        time = model.embed_timestep.weight[batch["timesteps"][row, t]]
        if G and cfg.goal == "embed":
            time = time + model.embed_goal(goal)
        if cfg.condition == "rtg":
            c = batch["rtg"][row, t]
        elif t > 0:
            c = batch["rewards"][row, t - 1]
        else:
            c = torch.zeros_like(batch["rewards"][row, 0])
        if cfg.condition != "none":
            c = torch.cat([c, goal]) if cfg.goal == "rtg" else c
            tokens.append(model.embed_condition(c) + time)
        tokens.append(model.embed_state(s) + time)
        if cfg.use_actions:
            a = model.embed_action(batch["actions"][row, t])
            if G and cfg.goal == "action":
                a = a + model.embed_goal(goal)
            tokens.append(a + time)
    x = [slow_layer_norm(z, model.embed_ln) for z in tokens]
    for block in model.blocks:
        if cfg.mixer == "attention":
            mixed = slow_attention([slow_layer_norm(z, block.ln1) for z in x], block.mixer, cfg.n_head)
        elif cfg.mixer == "direct":
            v = [block.mixer.V(slow_layer_norm(z, block.ln1)) for z in x]
            mixed = [sum(block.mixer.A[i, j] * v[j] for j in range(i + 1)) for i in range(len(x))]
        else:
            mixed = [torch.zeros_like(z) for z in x]
        x = [z + m for z, m in zip(x, mixed, strict=True)]
        x = [z + block.mlp(slow_layer_norm(z, block.ln2)) for z in x]
    x = x[int(cfg.condition != "none")::1 + (cfg.condition != "none") + cfg.use_actions]
    y = [model.head(slow_layer_norm(z, model.ln_f)) for z in x]
    return torch.stack(y if cfg.discrete else [torch.tanh(z) for z in y])


@pytest.mark.parametrize("switches", [
    dict(), dict(discrete=True), dict(condition="reward"), dict(condition="none"), dict(use_actions=False),
    dict(condition="none", use_actions=False), dict(mixer="direct"), dict(mixer="none"),
    dict(projection=False), dict(activation="gelu"), dict(goal_dim=2, goal="action"),
    dict(goal_dim=2, goal="action", discrete=True),
    dict(goal_dim=2, goal="rtg"), dict(goal_dim=2, goal="embed"), dict(goal_dim=2, goal="state")], ids=str)
def test_predictions_equal_the_slow_version(switches):
    model, cfg = build(("dt", switches), torch.float64)
    batch = make_batch(cfg, torch.float64, rows=2)
    with torch.no_grad():
        fast = model(**batch)
        for row in range(2):
            assert (fast[row] - slow_forward(model, batch, row)).abs().max() < 1e-10


def test_hopper_has_the_released_number_of_parameters():
    """By hand. The released 727,695 holds state and return heads and a word table besides, all unused."""
    d, S, A, T = 128, 11, 3, 1000
    embeddings = (1 * d + d) + (S * d + d) + (A * d + d) + T * d
    attention = (d * 3 * d + 3 * d) + (d * d + d)
    mlp = (d * 4 * d + 4 * d) + (4 * d * d + d)
    total = embeddings + 2 * d + 3 * (2 * d + attention + 2 * d + mlp) + 2 * d + (d * A + A)
    model = Model(Config())
    assert sum(p.numel() for p in model.parameters()) == total == 726_019
    mixing = sum(p.numel() for name, p in model.named_parameters() if ".mixer." in name)
    assert mixing == 3 * attention == 198_144
    assert 727_695 - total == 128 + (d * S + S) + (d * 1 + 1)


def test_the_block_equals_huggingfaces_gpt2_block():
    """An implementation that we did not write, with our weights; its linear layers store the transpose."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model
    cfg = Config(n_head=2, d=32, dropout=0.0)
    torch.manual_seed(0)
    model = Model(cfg).double().eval()
    gpt = GPT2Model(transformers.GPT2Config(
        vocab_size=1, n_positions=64, n_embd=32, n_layer=3, n_head=2, activation_function="relu",
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double().eval()
    with torch.no_grad():
        gpt.wpe.weight.zero_()
        for ours, theirs in zip(model.blocks, gpt.h, strict=True):
            for a, b in ((ours.ln1, theirs.ln_1), (ours.ln2, theirs.ln_2)):
                b.load_state_dict(a.state_dict())
            for a, b in ((ours.mixer.qkv, theirs.attn.c_attn), (ours.mixer.proj, theirs.attn.c_proj),
                         (ours.mlp[0], theirs.mlp.c_fc), (ours.mlp[2], theirs.mlp.c_proj)):
                b.weight.copy_(a.weight.T)
                b.bias.copy_(a.bias)
        x = torch.randn(2, 12, 32, dtype=torch.float64)
        theirs = gpt(inputs_embeds=x).last_hidden_state
        ours = x
        for block in model.blocks:
            ours = block(ours)
        assert (model.ln_f(ours) - theirs).abs().max() < 1e-10


@pytest.mark.parametrize("mixer", ["attention", "direct", "none"])
def test_dropping_the_tokens_that_predict_nothing_changes_nothing(mixer):
    model, cfg = build(("dt", dict(mixer=mixer)), torch.float64)
    x = torch.randn(2, 18, cfg.d, dtype=torch.float64)
    assert torch.allclose(model.blocks[0](x, keep=slice(1, None, 3)), model.blocks[0](x)[:, 1::3], atol=1e-12)


def test_timestep_std_sets_the_spread_of_the_table_and_of_nothing_else():
    torch.manual_seed(0)
    wide = Model(Config(timestep_std=1.0))
    torch.manual_seed(0)
    narrow = Model(Config(timestep_std=0.1))
    assert torch.allclose(wide.embed_timestep.weight, 10 * narrow.embed_timestep.weight, atol=1e-5)
    pairs = zip(wide.named_parameters(), narrow.parameters(), strict=True)
    rest = [(a, b) for (name, a), b in pairs if name != "embed_timestep.weight"]
    assert len(rest) > 10 and all(torch.equal(a, b) for a, b in rest)


@pytest.mark.parametrize("position", ["timestep", "window"])
def test_with_frames_each_embedding_goes_through_a_tanh_and_there_is_no_norm(position):
    """As released for Atari, where one timestep, the first, serves a whole window, and places are learned."""
    switches = dict(state_shape=(2, 36, 36), discrete=True, position=position)
    model, cfg = build(("dt", switches), torch.float64)
    batch = make_batch(cfg, torch.float64, rows=2)
    inputs = []
    model.drop.register_forward_pre_hook(lambda module, x: inputs.append(x[0]))
    model(**batch)
    embedded = [model.embed_condition(batch["rtg"]), model.embed_state(batch["states"]),
                model.embed_action(batch["actions"])]
    for t in range(6):
        time = model.embed_timestep(batch["timesteps"][:, 0 if position == "window" else t])
        for kind, token in enumerate(embedded):
            expected = torch.tanh(token[:, t]) + time
            if position == "window":
                expected = expected + model.embed_place[3 * t + kind]
            assert torch.allclose(inputs[0][:, 3 * t + kind], expected, atol=1e-12)


def test_initial_values_on_frames_are_the_released_ones():
    """GPT-2's N(0, 0.02) in the blocks, the head and the action table; the convolutions keep torch's own."""
    torch.manual_seed(0)
    model = Model(Config(state_shape=(4, 84, 84), discrete=True, act_dim=18, timestep_std=0.0))
    for layer in (model.blocks[0].mlp[0], model.head, model.embed_action):
        assert abs(float(layer.weight.detach().std()) - 0.02) < 2e-3
    bound = (4 * 8 * 8) ** -0.5
    assert 0.95 * bound < float(model.embed_state[0].weight.detach().abs().max()) <= bound
    assert not model.embed_timestep.weight.any()


def test_steps_beyond_the_table_share_its_last_row():
    model, cfg = build(("dt", {}))
    batch = make_batch(cfg)
    last, beyond = (batch | dict(timesteps=torch.full_like(batch["timesteps"], t)) for t in (49, 4900))
    assert torch.equal(model(**last), model(**beyond))


def test_without_a_mixer_a_prediction_depends_on_its_own_state_and_timestep_alone():
    model, cfg = build(("dt", dict(mixer="none")))
    batch = make_batch(cfg)
    other = make_batch(cfg, seed=2)
    mixed = other | dict(states=batch["states"], timesteps=batch["timesteps"])
    assert torch.equal(model(**batch), model(**mixed))


def test_the_direct_matrix_starts_as_the_average_over_the_past():
    A = Model(Config(mixer="direct", context_len=2)).blocks[0].mixer.A
    assert torch.allclose(A.sum(1), torch.ones(6))
    assert A[2].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0])


def test_projection_false_takes_attentions_last_layer_away():
    """DC paper, Table 13."""
    d = Config.d
    with_it, without = Model(Config()), Model(Config(projection=False))
    count = sum(p.numel() for p in with_it.parameters()) - sum(p.numel() for p in without.parameters())
    assert count == 3 * (d * d + d)


@pytest.mark.parametrize("switches, reason", [
    (dict(goal_dim=2, goal="action", use_actions=False), "goal=action .* the token"),
    (dict(goal_dim=2, goal="rtg", condition="none"), "goal=rtg .* the token"),
    (dict(goal="action"), "a goal in the states"), (dict(goal="rtg"), "a goal in the states"),
    (dict(goal="embed"), "a goal in the states"), (dict(goal="embed", goal_dim=11), "a goal in the states"),
    (dict(goal="embed", goal_dim=2, state_shape=(4, 84, 84)), "a goal in the states"),
    (dict(mixer="direct", projection=False), "projection=False .* mixer"),
    (dict(mixer="none", projection=False), "projection=False .* mixer"),
    (dict(mixer="direct", n_head=2), "n_head=2 .* mixer"),
    (dict(mixer="none", n_head=4), "n_head=4 .* mixer"),
    (dict(encoder="patch"), "encoder=patch .* frames"),
    (dict(patch=12), "patch=12 .* encoder"), (dict(patch=12, state_shape=(4, 84, 84)), "patch=12 .* encoder"),
], ids=str)
def test_a_switch_that_would_do_nothing_is_refused_with_the_reason(switches, reason):
    with pytest.raises(ValueError, match=reason):
        Model(Config(**switches))


def test_a_switch_left_at_its_default_is_never_refused():
    """Nor are the heads that the presets for frames set, whatever the mixer."""
    for mixer in ("attention", "direct", "none"):
        for goal in ("state", "none"):
            Model(Config(mixer=mixer, goal=goal, condition="none", use_actions=False))
        Model(Config(mixer=mixer, state_shape=(4, 84, 84), d=32, n_head=8))


@pytest.mark.parametrize("switches, word", [
    (dict(n_head=3), "n_head"), (dict(timestep_std=-1.0), "timestep_std"), (dict(patch=0), "size"),
    (dict(encoder="patch", patch=10, state_shape=(4, 84, 84)), "patch"), (dict(dropout=1.5), "dropout"),
], ids=str)
def test_settings_that_make_no_model_are_refused_by_name(switches, word):
    with pytest.raises(ValueError, match=word):
        Model(Config(**switches))


def test_the_paper_name_is_the_model():
    assert DecisionTransformer is Model


def test_presets_of_the_gym_tasks_are_the_released_ones():
    p = PRESETS["*"]
    sizes = (p["n_layer"], p["n_head"], p["d"], p["context_len"], p["dropout"], p["activation"])
    assert sizes == (3, 1, 128, 20, 0.1, "relu")
    training = (p["batch_size"], p["lr"], p["weight_decay"], p["clip"], p["warmup"], p["steps"])
    assert training == (64, 1e-4, 1e-4, 0.25, 10_000, 100_000)
    assert PRESETS["hopper"]["targets"] == (3600, 1800) and PRESETS["walker2d"]["targets"] == (5000, 2500)


def test_presets_of_the_games_that_dcs_paper_added():
    """Its Table 6 for the targets, its B.2 for 10 epochs: twice the updates of DT's own five."""
    for game, target in dict(asterix=520, frostbite=950, assault=780, gopher=2750).items():
        assert PRESETS[game] == dict(targets=(target,), steps=2 * PRESETS["atari"]["steps"])
