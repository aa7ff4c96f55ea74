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
SWITCHES = [dict(), dict(cross_attention=False), dict(adaln=False), dict(alpha=False), dict(adaln=False, alpha=False)]
every_ablation = pytest.mark.parametrize("switches", SWITCHES, ids=str)


def build(stir=True, **switches):
    """A small double-precision model in eval mode; stir moves it off its initialisation, where alpha, gamma and beta are zero."""
    torch.manual_seed(0)
    cfg = Config(**dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=50, n_layer=2, n_head=2, d=D, dropout=0.0) | switches)
    model = Model(cfg).double().eval()
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model


def make_batch(steps=K):
    g = torch.Generator().manual_seed(1)
    return dict(states=torch.randn(B, steps, S, generator=g), actions=torch.rand(B, steps, A, generator=g) * 2 - 1,
                rewards=torch.randn(B, steps, 1, generator=g), rtg=torch.randn(B, steps, 1, generator=g),
                timesteps=torch.arange(steps).expand(B, steps) + 7, mask=torch.ones(B, steps, dtype=torch.bool))


def parameters(model):
    return {name: p.numel() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------- the equations, written plainly

def plain_norm(x, eps, weight=1.0, bias=0.0):
    x = x - x.mean()
    return x / (x.square().mean() + eps).sqrt() * weight + bias


def plain_attention(mixer, queries, keys, values, sees):
    """Eq. 2 and 7 for lists of vectors, one query, one head and one key at a time. sees(i): how many keys query i may read."""
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
            if cfg.adaln:                                                                   # Eq. 10, gamma and beta from R_t alone
                both = block.scale_shift[1](torch.nn.functional.silu(c[j // n]))
                gamma, beta = both[2 * i * D: (2 * i + 1) * D], both[(2 * i + 1) * D: (2 * i + 2) * D]
                out.append((1 + gamma) * plain_norm(y, 1e-6) + beta)
            else:
                out.append(plain_norm(y, 1e-6, block.norms[i].weight, block.norms[i].bias))
        return out

    own = plain_attention(block.mixer["own"], x, x, x, lambda i: i + 1)
    x = norm(0, [a + b for a, b in zip(x, own, strict=True)])
    if cfg.cross_attention:
        keys = [plain_norm(a + b, 1e-5, block.ln_key.weight, block.ln_key.bias) for a, b in zip(c, p, strict=True)]
        values = [plain_norm(a, 1e-5, block.ln_value.weight, block.ln_value.bias) for a in c]
        z = plain_attention(block.mixer["cross"], x, keys, values, lambda i: i // n + 1)    # s_t and a_t see R_1 .. R_t
        alpha = [block.alpha(torch.cat([a, b])) if cfg.alpha else 0.0 for a, b in zip(z, x, strict=True)]   # Eq. 8
        x = norm(1, [(1 + a) * b + y for a, b, y in zip(alpha, z, x, strict=True)])         # Eq. 9
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
            x += [model.embed_state(s) + position] + ([model.embed_action(a) + position] if cfg.use_actions else [])
        for block in model.blocks:
            x = plain_block(block, cfg, x, c, p)
        rows.append(torch.stack([torch.tanh(model.head(y)) for y in x[:: 1 + cfg.use_actions]]))
    return torch.stack(rows)


@pytest.mark.parametrize("switches", SWITCHES + [dict(use_actions=False), dict(n_head=1, activation="relu")], ids=str)
def test_the_model_is_its_equations_written_as_loops_over_tokens_heads_and_keys(switches):
    """Eq. 2, 5 to 10. The plain version computes every token in every block: leaving out the last block's action tokens is exact."""
    model = build(**switches)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in make_batch().items()}
    with torch.no_grad():
        assert torch.allclose(model(**batch), plain_model(model, batch), atol=1e-12)


def test_state_and_action_of_a_step_read_the_same_returns_up_to_their_own_step():
    """In DT a_t stands two places behind R_t; here both tokens of step t see R_1 .. R_t, and none a later one."""
    model = build(adaln=False)
    x, c, p = torch.randn(1, K, 2, D).double(), torch.randn(1, K, D).double().requires_grad_(), torch.randn(1, K, D).double()
    y = model.blocks[0](x, c, p)
    for t in range(K):
        for token in range(2):
            seen, = torch.autograd.grad(y[0, t, token].square().sum(), c, retain_graph=True)
            assert (seen[0].abs().amax(-1) > 0).tolist() == [u <= t for u in range(K)]


def test_only_the_returns_of_its_own_step_scale_and_shift_a_token():
    """Eq. 10 is local in time; what the past returns have to say comes through the cross-attention."""
    model = build(cross_attention=False)
    x, c, p = torch.randn(1, K, 2, D).double(), torch.randn(1, K, D).double(), torch.randn(1, K, D).double()
    other = c.clone()
    other[:, 2] += 1
    moved = (model.blocks[0](x, other, p) - model.blocks[0](x, c, p)).abs().amax(-1)[0]     # (K, n)
    assert (moved > 0).tolist() == [[t == 2] * 2 for t in range(K)]


def test_a_small_scale_is_not_rounded_away_under_bfloat16_autocast():
    """bfloat16 has nothing between 1 and 1.0078: 1 + gamma must be float32, or what gamma learns first is lost."""
    model = build(stir=False).float()
    out = model.blocks[-1].scale_shift[1]
    x, c, p = torch.randn(1, K, 2, D), torch.randn(1, K, D), torch.randn(1, K, D)
    y = []
    for gamma in (0.0, 0.001):
        torch.nn.init.constant_(out.bias[4 * D: 5 * D], gamma)                              # gamma of the third norm
        with torch.autocast("cpu", torch.bfloat16):
            y.append(model.blocks[-1](x, c, p))
    assert y[0].dtype == torch.float32 and ((y[1] / y[0] - 1.001).abs() < 1e-5).all()


def test_no_path_goes_around_the_adaptive_norm():
    """Sec. 3.2's reason for post-norm: with gamma = -1 nothing of the states is left, which a residual past the norm would carry on."""
    model = build()
    out = model.blocks[-1].scale_shift[1]
    with torch.no_grad():
        out.weight.zero_()
        out.bias[4 * D: 5 * D] = -1.0                                                       # gamma of the third norm
    x, c, p = torch.randn(1, K, 2, D).double(), torch.randn(1, K, D).double(), torch.randn(1, K, D).double()
    assert torch.allclose(model.blocks[-1](x, c, p), out.bias[5 * D:].expand(1, K, 2, D))


def test_a_padded_window_still_lets_real_steps_see_their_past():
    """The released gym trainer inverts its padding mask: there the gradient from a real step to the real steps before it is zero."""
    model, batch = build(), make_batch()
    for name in ("states", "actions", "rewards", "rtg", "timesteps"):
        batch[name][:, 3:] = 0
    states, rtg = batch["states"].requires_grad_(), batch["rtg"].requires_grad_()
    for past in torch.autograd.grad(model(**batch)[:, 2].sum(), (states, rtg)):
        assert (past.abs().amax((0, 2)) > 0).tolist() == [True, True, True, False, False]


# ---------------------------------------------------------------------------------------------------- initialisation

@pytest.mark.parametrize("off", ["alpha", "adaln"])
def test_scale_and_norm_start_as_if_they_were_not_there(off):
    """Zero initialisation: 1 + alpha = 1 (below Eq. 9) and the adaptive norm is the plain one (below Eq. 10)."""
    full, plain = build(stir=False), build(stir=False, **{off: False})
    missing, surplus = plain.load_state_dict({k: v for k, v in full.state_dict().items() if k in plain.state_dict()}, strict=False)
    assert not surplus and all(".norms." in name for name in missing)
    assert torch.equal(full(**make_batch()), plain(**make_batch()))


def test_at_the_start_the_cross_attention_knows_the_sign_of_a_return_but_not_its_size():
    """A lesson in layer norms: LN(R w + b) with b = 0 is LN(w) for every R > 0. The size comes in as b grows, and by the adaptive norm."""
    model = build(stir=False, d=64)
    value = [model.blocks[0].ln_value(model.embed_condition(torch.tensor([r]).double())) for r in (2.0, 4.0, -2.0)]
    assert torch.allclose(value[0], value[1], atol=1e-2) and (value[0] - value[2]).abs().mean() > 1
    torch.nn.init.normal_(model.embed_condition.bias, std=0.02)
    value = [model.blocks[0].ln_value(model.embed_condition(torch.tensor([r]).double())) for r in (2.0, 4.0)]
    assert (value[0] - value[1]).abs().mean() > 0.1


def test_every_matrix_and_table_starts_at_a_spread_of_a_fiftieth():
    model = build(stir=False, d=128, position="learned")
    for name, p in model.named_parameters():
        if p.ndim == 2 and "alpha" not in name and "scale_shift" not in name:
            assert 0.015 < p.std() < 0.025, name
        elif "norms" not in name and "ln_" not in name:
            assert not p.any(), name
    assert 0.09 < build(stir=False, d=128, position="learned", timestep_std=0.1).embed_timestep.weight.std() < 0.11


# ---------------------------------------------------------------------------------------------------- switches

def test_each_ablation_takes_away_its_own_parameters_and_no_others():
    full = parameters(build())
    two_thirds = {name: n * 2 // 3 for name, n in full.items() if "scale_shift" in name}
    expected = {
        "alpha": {k: n for k, n in full.items() if ".alpha." not in k},
        "cross_attention": {k: two_thirds.get(k, n) for k, n in full.items() if not any(x in k for x in (".cross.", ".ln_", ".alpha."))},
        "adaln": {k: n for k, n in full.items() if "scale_shift" not in k}
        | {f"blocks.{i}.norms.{j}.{x}": D for i in range(2) for j in range(3) for x in ("weight", "bias")},
    }
    for off, names in expected.items():
        assert parameters(build(**{off: False})) == names, off


@every_ablation
def test_norms_stay_behind_the_residual_in_every_ablation(switches):
    """In the released code the row without AdaLN is a pre-norm block, so it compares two things at once. A post-norm
    block hands on tokens of mean 0 and variance 1 at the start; a pre-norm block hands on its residual, a thousand here."""
    model = build(stir=False, **switches)
    x, c, p = 1000 * torch.randn(B, K, 2, D).double(), torch.randn(B, K, D).double(), torch.randn(B, K, D).double()
    for block in model.blocks:
        y = block(x, c, p)
        assert torch.allclose(y.mean(-1), torch.zeros(()).double(), atol=1e-9)
        assert torch.allclose(y.var(-1, unbiased=False), torch.ones(()).double(), atol=1e-3)


def test_without_alpha_the_cross_attention_is_added_as_it_is():
    """Table 3. With alpha's map pinned to zero the full model is the ablated one, whatever the other weights are."""
    full, plain = build(), build(alpha=False)
    for block in full.blocks:
        torch.nn.init.zeros_(block.alpha.weight)
        torch.nn.init.zeros_(block.alpha.bias)
    plain.load_state_dict({k: v for k, v in full.state_dict().items() if ".alpha." not in k})
    assert torch.equal(full(**make_batch()), plain(**make_batch()))


def test_a_model_that_nothing_conditions_is_refused():
    with pytest.raises(ValueError, match="cross_attention and adaln are both off"):
        build(cross_attention=False, adaln=False)


def test_condition_chooses_what_stands_in_the_returns_place():
    batch = make_batch()
    model = build()
    asked = {}
    for condition in ("rtg", "reward", "none"):
        model.cfg.condition = condition
        asked[condition] = model(**batch)
    model.cfg.condition = "rtg"
    shifted = torch.cat([torch.zeros(B, 1, 1), batch["rewards"][:, :-1]], 1)                # r_{t-1}, none at the first step
    assert torch.equal(asked["reward"], model(**batch | {"rtg": shifted}))
    assert torch.equal(asked["none"], model(**batch | {"rtg": torch.ones(B, K, 1)}))
    assert not torch.equal(asked["rtg"], asked["reward"]) and not torch.equal(asked["rtg"], asked["none"])


def test_positions_count_in_steps_of_the_episode_and_stop_at_its_longest():
    for position in ("sinusoidal", "learned"):
        model, batch = build(position=position), make_batch()
        y = [model(**batch | {"timesteps": batch["timesteps"] + t}) for t in (0, 1, 60, 61)]
        assert (y[0] - y[1]).abs().max() > 1e-6 and torch.equal(y[2], y[3])


# ---------------------------------------------------------------------------------------------------- sizes

def test_hopper_has_the_released_models_1205763_parameters():
    """Counted by hand: S 11, A 3, d 128, 3 layers, one head."""
    d = 128
    embed = (11 * d + d) + (3 * d + d) + (d + d) + (d * d + d)                              # state, action, return, position
    attention = 3 * d * d + (d * d + d)                                                     # Q, K, V without biases, projection with
    block = (2 * attention + 2 * 2 * d                                                      # LN of keys and values
             + (2 * d * d + d)                                                              # alpha
             + (d * 6 * d + 6 * d)                                                          # gamma and beta of three norms
             + (d * 4 * d + 4 * d) + (4 * d * d + d))                                       # MLP
    head = d * 3 + 3
    sizes = parameters(Model(Config()))
    assert sum(sizes.values()) == embed + 3 * block + head == 1_205_763
    assert sum(n for name, n in sizes.items() if ".mixer." in name) == 3 * 2 * attention == 393_984


def multiply_accumulates(model, call):
    """Of one call. The plain attention kernel is asked for: the counter does not know the CPU's fused one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        call(model)
    return counter.get_total_flops() // 2


def test_the_last_block_is_computed_at_the_state_tokens_only_and_for_the_last_one_when_acting():
    """Counted, not timed: matrix products with weights, and the two of each attention, per row of the batch."""
    d, L = D, 2 * K
    model, batch = build(), make_batch()

    def block(queries, steps):
        own = 2 * queries * d * d + 2 * L * d * d + 2 * queries * L * d                     # Q and projection, K and V, scores and sums
        cross = 2 * queries * d * d + 2 * K * d * d + 2 * queries * K * d
        return own + cross + queries * 2 * d * d + steps * 6 * d * d + queries * 8 * d * d  # ... + alpha + gamma, beta + MLP

    embed = K * (S + A + 1 + d) * d
    expected = embed + block(L, K) + block(K, K) + K * d * A
    assert multiply_accumulates(model, lambda m: m(**batch)) == B * expected
    history = {k: v for k, v in batch.items() if k != "mask"}
    assert multiply_accumulates(model, lambda m: m.act(**history)) == B * (embed + block(L, K) + block(1, 1) + d * A)


# ---------------------------------------------------------------------------------------------------- settings

def test_presets_hold_table_4_and_the_seven_targets_of_section_4_2():
    """The paper's table typed in a second time. Targets: evenly spaced, from the 95th percentile of the data's returns down to the 5th."""
    table = dict(n_layer=3, n_head=1, d=128, activation="gelu", context_len=20, dropout=0.1, lr=1e-4, clip=0.25, weight_decay=1e-4)
    assert {k: PRESETS["*"][k] for k in table} == table
    assert PRESETS["*"]["warmup"] == 10_000 and PRESETS["*"]["batch_size"] == 64 and PRESETS["*"]["steps"] == 100_000
    ends = {"hopper-medium-replay": (0.984, 1488.35), "halfcheetah-medium-replay": (-237.03, 4685.02),
            "walker2d-medium-replay": (-4.90, 3053.78), "ant-medium-replay": (-82.87, 3160.46), "hopper-medium": (799.52, 2038.58),
            "halfcheetah-medium": (4488.95, 5056.43), "walker2d-medium": (892.23, 3833.17), "hopper-medium-expert": (845.70, 3629.42),
            "halfcheetah-medium-expert": (4567.05, 10905.77), "walker2d-medium-expert": (982.94, 4963.50),
            "ant-medium": (449.81, 3972.21), "ant-medium-expert": (543.01, 5350.66)}
    for env, (low, high) in ends.items():
        targets = PRESETS[env]["targets"]
        assert targets == pytest.approx(torch.linspace(high, low, 7).tolist(), abs=0.02), env
    assert {k for k in PRESETS if "-medium" in k} == ends.keys()
    assert PRESETS["antmaze"]["d"] == PRESETS["antmaze"]["batch_size"] == PRESETS["ant-medium-expert"]["d"] == 256


def test_every_preset_names_fields_that_exist():
    trainer = {"batch_size", "lr", "weight_decay", "betas", "warmup", "schedule", "clip", "steps", "targets", "rtg_scale", "reward_scale",
               "eval_episodes", "eval_every", "pct_traj", "decay", "lr_floor", "sample"}
    fields = {f.name for f in dataclasses.fields(Config)}
    for name, preset in PRESETS.items():
        assert preset.keys() <= fields | trainer, name
