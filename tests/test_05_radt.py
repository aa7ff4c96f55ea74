"""Return-Aligned Decision Transformer as a specification: the paper's equations, its ablations, its sizes.

    pytest tests/test_05_radt.py
"""
import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.radt import PRESETS, Config, Model

S, A, K, B, D = 4, 2, 5, 2, 8
SWITCHES = [dict(), dict(cross_attention=False), dict(adaln=False), dict(alpha=False),
            dict(adaln=False, alpha=False)]
every_ablation = pytest.mark.parametrize("switches", SWITCHES, ids=str)


def build(stir=True, **switches):
    """A small double-precision model in eval mode.

    stir moves it off its initialisation, where alpha, gamma and beta are zero.
    """
    torch.manual_seed(0)
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=50, n_layer=2, n_head=2, d=D,
                 dropout=0.0)
    model = Model(Config(**sizes | switches)).double().eval()
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model


def make_batch(steps=K):
    g = torch.Generator().manual_seed(1)
    return dict(
        states=torch.randn(B, steps, S, generator=g),
        actions=torch.rand(B, steps, A, generator=g) * 2 - 1,
        rewards=torch.randn(B, steps, 1, generator=g),
        rtg=torch.randn(B, steps, 1, generator=g),
        timesteps=torch.arange(steps).expand(B, steps) + 7,
        mask=torch.ones(B, steps, dtype=torch.bool),
    )


def parameters(model):
    return {name: p.numel() for name, p in model.named_parameters()}


def streams():
    """What a block reads: states and actions (1, K, 2, D), returns and positions (1, K, D)."""
    x, c, p = (torch.randn(1, K, *size).double() for size in ((2, D), (D,), (D,)))
    return x, c, p


# ------------------------------------------------------------ the equations, written plainly

def plain_norm(x, eps, weight=1.0, bias=0.0):
    x = x - x.mean()
    return x / (x.square().mean() + eps).sqrt() * weight + bias


def plain_attention(mixer, queries, keys, values, sees):
    """Eq. 2 and 7 for lists of vectors: one query, one head and one key at a time.

    sees(i): how many keys query i may read.
    """
    d, heads = len(queries[0]), mixer.n_head
    size, out = d // heads, []
    for i, x in enumerate(queries):
        q, z = mixer.q.weight @ x, []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            k = [(mixer.k.weight @ y)[part] for y in keys[:sees(i)]]
            v = [(mixer.v.weight @ y)[part] for y in values[:sees(i)]]
            weights = torch.stack([q[part] @ y / math.sqrt(size) for y in k]).exp()
            z.append(sum(w * y for w, y in zip(weights / weights.sum(), v, strict=True)))
        out.append(mixer.proj.weight @ torch.cat(z) + mixer.proj.bias)
    return out


def plain_block(block, cfg, x, c, p):
    """One block on a list of token vectors x: s_1 a_1 s_2 a_2 ..., with returns c and positions p."""
    n = len(x) // len(c)

    def norm(i, x):
        out = []
        for j, y in enumerate(x):
            if cfg.adaln:       # Eq. 10, gamma and beta from R_t alone
                both = block.norms[i].scale_shift(torch.nn.functional.silu(c[j // n]))
                gamma, beta = both[:D], both[D:]
                out.append((1 + gamma) * plain_norm(y, 1e-6) + beta)
            else:
                out.append(plain_norm(y, 1e-6, block.norms[i].ln.weight, block.norms[i].ln.bias))
        return out

    own = plain_attention(block.mixer, x, x, x, lambda i: i + 1)
    x = norm(0, [a + b for a, b in zip(x, own, strict=True)])
    if cfg.cross_attention:
        r = block.returns
        keys = [plain_norm(a + b, 1e-5, r.ln_key.weight, r.ln_key.bias) for a, b in zip(c, p, strict=True)]
        values = [plain_norm(a, 1e-5, r.ln_value.weight, r.ln_value.bias) for a in c]
        z = plain_attention(r.mixer, x, keys, values, lambda i: i // n + 1)     # s_t and a_t see R_1 .. R_t
        pairs = list(zip(z, x, strict=True))
        alpha = [r.alpha(torch.cat(pair)) if cfg.alpha else 0.0 for pair in pairs]  # Eq. 8
        x = norm(1, [(1 + a) * b + y for a, (b, y) in zip(alpha, pairs, strict=True)])      # Eq. 9
    return norm(1 + cfg.cross_attention, [y + block.mlp(y) for y in x])


def plain_model(model, batch):
    cfg, rows = model.cfg, []
    for b in range(B):
        c = [model.embed_condition(r) for r in batch["rtg"][b]]
        p = []
        for t in batch["timesteps"][b].tolist():
            wave = [(math.cos if i % 2 else math.sin)(t / 10000 ** (i // 2 * 2 / D)) for i in range(D)]
            p.append(model.embed_timestep(torch.tensor(wave, dtype=torch.float64)))
        x = []
        for s, a, position in zip(batch["states"][b], batch["actions"][b], p, strict=True):
            x.append(model.embed_state(s) + position)
            if cfg.use_actions:
                x.append(model.embed_action(a) + position)
        for block in model.blocks:
            x = plain_block(block, cfg, x, c, p)
        rows.append(torch.stack([torch.tanh(model.head(y)) for y in x[:: 1 + cfg.use_actions]]))
    return torch.stack(rows)


@pytest.mark.parametrize("switches", [*SWITCHES, dict(use_actions=False), dict(n_head=1, activation="relu")],
                         ids=str)
def test_the_model_is_its_equations_written_as_loops_over_tokens_heads_and_keys(switches):
    """Eq. 2, 5 to 10. The plain version computes every token in every block: leaving actions out is exact."""
    model = build(**switches)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in make_batch().items()}
    with torch.no_grad():
        assert torch.allclose(model(**batch), plain_model(model, batch), atol=1e-12)


def test_state_and_action_of_a_step_read_the_same_returns_up_to_their_own_step():
    """In DT a_t stands two places behind R_t; here both tokens of step t see R_1 .. R_t, and none later."""
    model = build(adaln=False)
    x, c, p = streams()
    c.requires_grad_()
    y = model.blocks[0](x, c, p)
    for t in range(K):
        for token in range(2):
            seen, = torch.autograd.grad(y[0, t, token].square().sum(), c, retain_graph=True)
            assert (seen[0].abs().amax(-1) > 0).tolist() == [u <= t for u in range(K)]


def test_only_the_returns_of_its_own_step_scale_and_shift_a_token():
    """Eq. 10 is local in time; what the past returns have to say comes through the cross-attention."""
    model = build(cross_attention=False)
    x, c, p = streams()
    other = c.clone()
    other[:, 2] += 1
    moved = (model.blocks[0](x, other, p) - model.blocks[0](x, c, p)).abs().amax(-1)[0]        # (K, n)
    assert (moved > 0).tolist() == [[t == 2] * 2 for t in range(K)]


def test_a_small_scale_is_not_rounded_away_under_bfloat16_autocast():
    """bfloat16 has nothing between 1 and 1.0078: 1 + gamma must be float32, or a small gamma is lost."""
    model = build(stir=False).float()
    out = model.blocks[-1].norms[-1].scale_shift
    x, c, p = (v.float() for v in streams())
    y = []
    for gamma in (0.0, 0.001):
        torch.nn.init.constant_(out.bias[:D], gamma)            # gamma of the third norm
        with torch.autocast("cpu", torch.bfloat16):
            y.append(model.blocks[-1](x, c, p))
    assert y[0].dtype == torch.float32 and ((y[1] / y[0] - 1.001).abs() < 1e-5).all()


def test_no_path_goes_around_the_adaptive_norm():
    """Section 3.2's reason for post-norm: gamma = -1 leaves nothing of the states.

    A residual past the norm would carry them on.
    """
    model = build()
    out = model.blocks[-1].norms[-1].scale_shift
    with torch.no_grad():
        out.weight.zero_()
        out.bias[:D] = -1.0                                     # gamma of the third norm
    x, c, p = streams()
    assert torch.allclose(model.blocks[-1](x, c, p), out.bias[D:].expand(1, K, 2, D))


def test_a_padded_window_still_lets_real_steps_see_their_past():
    """The released gym trainer inverts its padding mask: there no real step reads the real ones before it."""
    model, batch = build(), make_batch()
    for name in ("states", "actions", "rewards", "rtg", "timesteps"):
        batch[name][:, 3:] = 0
    states, rtg = batch["states"].requires_grad_(), batch["rtg"].requires_grad_()
    for past in torch.autograd.grad(model(**batch)[:, 2].sum(), (states, rtg)):
        assert (past.abs().amax((0, 2)) > 0).tolist() == [True, True, True, False, False]


# ------------------------------------------------------------ initialisation

@pytest.mark.parametrize("off", ["alpha", "adaln"])
def test_scale_and_norm_start_as_if_they_were_not_there(off):
    """Zero initialisation: 1 + alpha = 1 (below Eq. 9), and the adaptive norm is plain (below Eq. 10)."""
    full, plain = build(stir=False), build(stir=False, **{off: False})
    common = {k: v for k, v in full.state_dict().items() if k in plain.state_dict()}
    missing, surplus = plain.load_state_dict(common, strict=False)
    assert not surplus and all(".norms." in name for name in missing)
    assert torch.equal(full(**make_batch()), plain(**make_batch()))


def test_at_the_start_the_cross_attention_knows_the_sign_of_a_return_but_not_its_size():
    """A lesson in layer norms: LN(R w + b) with b = 0 is LN(w) for every R > 0.

    The size comes in as b grows, and by the adaptive norm.
    """
    model = build(stir=False, d=64)

    def value(r):
        return model.blocks[0].returns.ln_value(model.embed_condition(torch.tensor([r]).double()))

    assert torch.allclose(value(2.0), value(4.0), atol=1e-2) and (value(2.0) - value(-2.0)).abs().mean() > 1
    torch.nn.init.normal_(model.embed_condition.bias, std=0.02)
    assert (value(2.0) - value(4.0)).abs().mean() > 0.1


def test_every_matrix_and_table_starts_at_a_spread_of_a_fiftieth():
    model = build(stir=False, d=128, position="learned")
    for name, p in model.named_parameters():
        if p.ndim == 2 and "alpha" not in name and "scale_shift" not in name:
            assert 0.015 < p.std() < 0.025, name
        elif "scale_shift" in name or ("norms" not in name and "ln_" not in name):
            assert not p.any(), name
    table = build(stir=False, d=128, position="learned", timestep_std=0.1).embed_timestep
    assert 0.09 < table.weight.std() < 0.11


# ------------------------------------------------------------ switches

def test_each_ablation_takes_away_its_own_parameters_and_no_others():
    full = parameters(build())
    # the norm behind the cross-attention goes with it: there are two left, and the last one moves up
    without = {k: n for k, n in full.items() if ".returns." not in k and ".norms.2." not in k}
    norms = [f"blocks.{i}.norms.{j}.ln" for i in range(2) for j in range(3)]
    plain = {f"{norm}.{x}": D for norm in norms for x in ("weight", "bias")}
    expected = {
        "alpha": {k: n for k, n in full.items() if ".alpha." not in k},
        "cross_attention": without,
        "adaln": {k: n for k, n in full.items() if "scale_shift" not in k} | plain,
    }
    for off, names in expected.items():
        assert parameters(build(**{off: False})) == names, off


@every_ablation
def test_norms_stay_behind_the_residual_in_every_ablation(switches):
    """In the released code the row without AdaLN is a pre-norm block, so it compares two things at once.

    A post-norm block hands on tokens of mean 0 and variance 1 at the start, a pre-norm block its residual, a
    thousand here.
    """
    model = build(stir=False, **switches)
    x, c, p = streams()
    for block in model.blocks:
        y = block(1000 * x, c, p)
        assert torch.allclose(y.mean(-1), torch.zeros(()).double(), atol=1e-9)
        assert torch.allclose(y.var(-1, unbiased=False), torch.ones(()).double(), atol=1e-3)


def test_without_alpha_the_cross_attention_is_added_as_it_is():
    """Table 3. With alpha's map pinned to zero the full model is the ablated one whatever else it holds."""
    full, plain = build(), build(alpha=False)
    for block in full.blocks:
        torch.nn.init.zeros_(block.returns.alpha.weight)
        torch.nn.init.zeros_(block.returns.alpha.bias)
    plain.load_state_dict({k: v for k, v in full.state_dict().items() if ".alpha." not in k})
    assert torch.equal(full(**make_batch()), plain(**make_batch()))


@pytest.mark.parametrize("switches, words", [
    (dict(cross_attention=False, adaln=False), "cross_attention and adaln are both off"),
    (dict(cross_attention=False, alpha=False), "nothing to scale"),
    (dict(timestep_std=0.1), "no table to spread"),
    (dict(n_head=3), "d=8 is not a multiple of n_head=3"),
    (dict(d=7, n_head=1), "d=7 is odd"),
    (dict(n_layer=0), "at least 1"),
    (dict(n_head=0), "at least 1"),
    (dict(context_len=-1), "at least 1"),
    (dict(state_shape=(2, 35, 84)), "36 x 36"),
], ids=str)
def test_a_switch_without_effect_and_a_size_without_a_model_are_refused_with_the_reason(switches, words):
    with pytest.raises(ValueError, match=words):
        build(**switches)


def test_what_those_switches_need_makes_them_welcome():
    build(timestep_std=0.1, position="learned")
    build(timestep_std=0.1, position="window")
    build(d=7, n_head=1, position="learned")
    build(cross_attention=False)
    build(alpha=False, adaln=False)


def test_condition_chooses_what_stands_in_the_returns_place():
    batch = make_batch()
    model = build()
    asked = {}
    for condition in ("rtg", "reward", "none"):
        model.cfg.condition = condition
        asked[condition] = model(**batch)
    model.cfg.condition = "rtg"
    shifted = torch.cat([torch.zeros(B, 1, 1), batch["rewards"][:, :-1]], 1)    # r_{t-1}; 0 at the first step
    assert torch.equal(asked["reward"], model(**batch | {"rtg": shifted}))
    assert torch.equal(asked["none"], model(**batch | {"rtg": torch.ones(B, K, 1)}))
    assert not torch.equal(asked["rtg"], asked["reward"]) and not torch.equal(asked["rtg"], asked["none"])


def test_positions_count_in_steps_of_the_episode_and_stop_at_its_longest():
    for position in ("sinusoidal", "learned"):
        model, batch = build(position=position), make_batch()
        y = [model(**batch | {"timesteps": batch["timesteps"] + t}) for t in (0, 1, 60, 61)]
        assert (y[0] - y[1]).abs().max() > 1e-6 and torch.equal(y[2], y[3])


# ------------------------------------------------------------ sizes

def test_hopper_has_the_released_models_1205763_parameters():
    """Counted by hand: S 11, A 3, d 128, 3 layers, one head."""
    d = 128
    embed = (11 * d + d) + (3 * d + d) + (d + d) + (d * d + d)     # state, action, return, position
    attention = 3 * d * d + (d * d + d)                         # Q, K, V without biases, projection with
    block = (2 * attention + 2 * 2 * d                          # LN of keys and values
             + (2 * d * d + d)                                  # alpha
             + (d * 6 * d + 6 * d)                              # gamma and beta of three norms
             + (d * 4 * d + 4 * d) + (4 * d * d + d))           # MLP
    head = d * 3 + 3
    sizes = parameters(Model(Config()))
    assert sum(sizes.values()) == embed + 3 * block + head == 1_205_763
    assert sum(n for name, n in sizes.items() if ".mixer." in name) == 3 * 2 * attention == 393_984


def multiply_accumulates(model, call):
    """Of one call. The plain attention kernel is asked for: the counter does not know the CPU's fused one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        call(model)
    return counter.get_total_flops() // 2


def test_the_last_block_is_computed_at_the_state_tokens_only_once_it_has_mixed_them():
    """Counted, not timed: matrix products with weights, and the two of each attention, a row of the batch."""
    d, L = D, 2 * K
    model, batch = build(), make_batch()

    def block(tokens):
        own = 4 * L * d * d + 2 * L * L * d                     # Q, K, V and projection; scores and sums
        cross = 2 * tokens * d * d + 2 * K * d * d + 2 * tokens * K * d
        rest = tokens * 2 * d * d + K * 6 * d * d + tokens * 8 * d * d          # alpha; gamma and beta; MLP
        return own + cross + rest

    expected = K * (S + A + 1 + d) * d + block(L) + block(K) + K * d * A
    assert multiply_accumulates(model, lambda m: m(**batch)) == B * expected


def test_features_are_what_the_actions_are_predicted_from():
    for switches in (dict(), dict(discrete=True), dict(use_actions=False)):
        model, batch = build(**switches), make_batch()
        if switches.get("discrete"):
            batch["actions"] = batch["actions"][..., 0].sign().clamp(min=0).long()
        x = model.features(**batch)
        assert x.shape == (B, K, D) and torch.equal(model.predict(x), model(**batch))
        if not switches.get("discrete"):
            assert torch.allclose(model.predict(x), model.head(x).tanh())
        else:
            assert torch.equal(model.predict(x), model.head(x))


# ------------------------------------------------------------ settings

def test_presets_hold_table_4_and_the_seven_targets_of_section_4_2():
    """The paper's table typed in a second time.

    Targets: evenly spaced, from the 95th percentile of the data's returns down to the 5th.
    """
    table = dict(n_layer=3, n_head=1, d=128, activation="gelu", context_len=20, dropout=0.1, lr=1e-4,
                 clip=0.25, weight_decay=1e-4)
    assert {k: PRESETS["*"][k] for k in table} == table
    trained = dict(warmup=10_000, batch_size=64, steps=100_000)
    assert {k: PRESETS["*"][k] for k in trained} == trained
    ends = {
        "hopper-medium-replay": (0.984, 1488.35), "halfcheetah-medium-replay": (-237.03, 4685.02),
        "walker2d-medium-replay": (-4.90, 3053.78), "ant-medium-replay": (-82.87, 3160.46),
        "hopper-medium": (799.52, 2038.58), "halfcheetah-medium": (4488.95, 5056.43),
        "walker2d-medium": (892.23, 3833.17), "hopper-medium-expert": (845.70, 3629.42),
        "halfcheetah-medium-expert": (4567.05, 10905.77), "walker2d-medium-expert": (982.94, 4963.50),
        "ant-medium": (449.81, 3972.21), "ant-medium-expert": (543.01, 5350.66),
    }
    for env, (low, high) in ends.items():
        targets = PRESETS[env]["targets"]
        assert targets == pytest.approx(torch.linspace(high, low, 7).tolist(), abs=0.02), env
    assert {k for k in PRESETS if "-medium" in k} == ends.keys()
    assert PRESETS["antmaze"]["d"] == PRESETS["antmaze"]["batch_size"] == 256
    assert PRESETS["ant-medium-expert"]["d"] == 256


def test_every_preset_names_fields_that_exist():
    trainer = {"batch_size", "lr", "weight_decay", "betas", "warmup", "schedule", "clip", "steps", "targets",
               "rtg_scale", "reward_scale", "eval_episodes", "eval_every", "pct_traj", "decay", "lr_floor",
               "sample"}
    fields = {f.name for f in dataclasses.fields(Config)}
    for name, preset in PRESETS.items():
        assert preset.keys() <= fields | trainer, name
        values = {k: v for k, v in (PRESETS["*"] | preset).items() if k in fields}
        with torch.device("meta"):                              # shapes without numbers
            assert Model(Config(**values)).cfg.d == values["d"], name
