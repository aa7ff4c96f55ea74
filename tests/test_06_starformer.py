"""StARformer as a specification: the groups, the two transformers and how they are tied together.

    pytest tests/test_06_starformer.py
"""
import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.starformer import PRESETS, Config, Model

S, A, K, B = 4, 2, 5, 2
CONNECT = ("layerwise", "fusion", "stack")


def build(stir=True, **switches):
    """A small double-precision model in eval mode; stir moves it off its initialisation, where both position tables are zero."""
    torch.manual_seed(0)
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, n_layer=2, n_head=2, d=12, dropout=0.0, step_d=8, step_heads=2)
    model = Model(Config(**sizes | switches)).double().eval()
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model


def make_batch(discrete=False, steps=K):
    g = torch.Generator().manual_seed(1)
    actions = torch.randint(A, (B, steps), generator=g) if discrete else torch.rand(B, steps, A, generator=g, dtype=torch.float64) * 2 - 1
    states, rewards, rtg = (torch.randn(B, steps, size, generator=g, dtype=torch.float64) for size in (S, 1, 1))
    return dict(states=states, actions=actions, rewards=rewards, rtg=rtg, timesteps=torch.arange(steps).expand(B, steps))


def parameters(model):
    return {name: p.numel() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------- the equations, written plainly

def plain_norm(layer, x):
    x = x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * layer.weight + layer.bias


def plain_layer(layer, x, sees):
    """A pre-norm transformer layer (Eq. 1) on a list of tokens, every one of them. sees(i): how many tokens token i may read."""
    mixer, d = layer.mixer, len(x[0])
    size, y = d // mixer.n_head, [plain_norm(layer.ln1, token) for token in x]
    q, k, v = ([mixer.qkv.weight[i * d: (i + 1) * d] @ token + mixer.qkv.bias[i * d: (i + 1) * d] for token in y] for i in range(3))
    out = []
    for i, token in enumerate(x):
        heads = []
        for h in range(mixer.n_head):
            part = slice(h * size, (h + 1) * size)
            weights = torch.stack([q[i][part] @ k[j][part] / math.sqrt(size) for j in range(sees(i))]).exp()
            heads.append(sum(w * v[j][part] for j, w in enumerate(weights / weights.sum())))
        token = token + mixer.proj(torch.cat(heads))
        out.append(token + layer.mlp(plain_norm(layer.ln2, token)))
    return out


def plain_group(model, batch, b, t):
    """Z_t^0 = {a_{t-1}, r_{t-1} or R_t, s_t^1 .. s_t^S} (Sec. 4.2)."""
    cfg, z = model.cfg, []
    if cfg.use_actions:
        none = torch.tensor(A) if cfg.discrete else torch.zeros(A).double()
        z.append(model.embed_action(batch["actions"][b, t - 1] if t else none))
    if cfg.condition != "none":
        reward = batch["rewards"][b, t - 1] if t else torch.zeros(1).double()
        z.append(model.embed_condition(batch["rtg"][b, t] if cfg.condition == "rtg" else reward))
    return z + [model.embed_number(batch["states"][b, t, i: i + 1]) + model.embed_spatial[i] for i in range(S)]


def plain_model(model, batch):
    cfg, rows = model.cfg, []
    for b in range(B):
        groups, time = [plain_group(model, batch, b, t) for t in range(K)], model.embed_time
        n = len(groups[0])
        h = [model.embed_state(batch["states"][b, t]) + time[t] for t in range(K)]          # Eq. 5

        def represent(fold, groups, time=time):                                             # Eq. 4
            g = [fold.fc(torch.cat([plain_norm(fold.ln_in, token) for token in z])) for z in groups]
            return [plain_norm(fold.ln_out, g[t]) + time[t] for t in range(K)]

        def woven(g, h):                                                                    # Eq. 6
            return [token for pair in zip(g, h, strict=True) for token in pair]

        if cfg.connect == "stack":
            for step in model.steps:
                groups = [plain_layer(step, z, lambda i, n=n: n) for z in groups]
            y = woven(represent(model.folds[0], groups), h)
            for sequence in model.sequence:
                y = plain_layer(sequence, y, lambda i: i + 1)
            h = y[1::2]
        else:
            for step, fold, sequence in zip(model.steps, model.folds, model.sequence, strict=True):
                groups = [plain_layer(step, z, lambda i, n=n: n) for z in groups]
                g = represent(fold, groups)
                if cfg.connect == "fusion":
                    h = plain_layer(sequence, [a + c for a, c in zip(g, h, strict=True)], lambda i: i + 1)
                else:
                    h = plain_layer(sequence, woven(g, h), lambda i: i + 1)[1::2]           # y_{2i}, counted from 1
        y = torch.stack([model.head(plain_norm(model.ln_f, token)) for token in h])
        rows.append(y if cfg.discrete else torch.tanh(y))
    return torch.stack(rows)


CASES = [dict(connect=connect) for connect in CONNECT] + [dict(condition="rtg"), dict(condition="none"), dict(use_actions=False),
                                                          dict(discrete=True), dict(step_heads=4, n_head=3, activation="relu")]


@pytest.mark.parametrize("switches", CASES, ids=str)
def test_the_model_is_its_equations_written_as_loops_over_groups_tokens_and_heads(switches):
    """Eq. 1 and 4 to 6. The plain version also computes what stands at g and throws it away: not computing it is exact."""
    model, batch = build(**switches), make_batch(switches.get("discrete", False))
    with torch.no_grad():
        assert torch.allclose(model(**batch), plain_model(model, batch), atol=1e-11)


# ---------------------------------------------------------------------------------------------------- the step transformer

def test_a_group_holds_the_previous_action_the_reward_and_one_token_per_state_number():
    batch = {k: v for k, v in make_batch().items() if k != "timesteps"}
    for switches, n in [(dict(), S + 2), (dict(condition="rtg"), S + 2), (dict(condition="none"), S + 1), (dict(use_actions=False), S + 1)]:
        model = build(**switches)
        assert model.groups(**batch).shape == (B * K, n, 8)
        assert model.folds[0].fc.in_features == n * 8


def test_tokens_of_a_group_attend_to_each_other_without_a_mask():
    """Everything in the group of step t is known before a_t, so there is nothing to hide: the action reads the state, and back."""
    z = torch.randn(1, S + 2, 8).double().requires_grad_()
    y = build().steps[0](z)
    for i in range(S + 2):
        read, = torch.autograd.grad(y[0, i].square().sum(), z, retain_graph=True)
        assert (read[0].abs().amax(-1) > 0).all()


def test_the_step_transformer_knows_nothing_of_other_steps():
    """Its output for a step could be kept while acting: it does not change when the step moves on in the window."""
    model = build()
    z = torch.randn(3, S + 2, 8).double()
    assert torch.allclose(model.steps[0](z)[1], model.steps[0](z[1:2])[0])


def test_the_spatial_embedding_tells_state_numbers_apart():
    """One Linear reads all numbers; at the start, without it, the step transformer sees a set: swapped numbers give swapped tokens."""
    for stir in (False, True):
        model, batch = build(stir=stir), {k: v for k, v in make_batch().items() if k != "timesteps"}
        order = [0, 1, 2, 4, 3, 5]                                                          # a, r, s1, s3, s2, s4
        z = model.steps[0](model.groups(**batch))
        swapped = model.steps[0](model.groups(**batch | {"states": batch["states"][..., [0, 2, 1, 3]]}))
        assert torch.allclose(z[:, order], swapped) == (not stir)


@pytest.mark.parametrize("discrete", [False, True])
def test_the_reward_that_the_predicted_action_earns_is_never_read(discrete):
    """The released gym script gives r_t beside s_t in training and r_{t-1} in acting: the label's consequence leaks in.
    Here a_{t-1} and r_{t-1} stand in the group of step t, in training mode and in evaluation alike."""
    for training in (True, False):
        model, batch = build(discrete=discrete).train(training), make_batch(discrete)
        y = model(**batch)
        for name in ("actions", "rewards"):
            other = batch[name].clone()
            other[:, 2] = 1 - other[:, 2] if name == "actions" else 5.0
            moved = (model(**batch | {name: other}) - y).abs().amax((0, 2))
            assert (moved > 1e-9).tolist() == [False, False, False, True, True], name


@pytest.mark.parametrize("discrete", [False, True])
def test_a_window_starts_without_a_previous_action_and_with_the_reward_zero(discrete):
    """Also where acting cuts a long history to K steps: what came just before the window is not smuggled in."""
    model, long = build(discrete=discrete), make_batch(discrete, steps=K + 3)
    window = {k: v[:, 3:] for k, v in long.items()}
    assert torch.equal(model.act(**long), model.act(**window))
    z = model.groups(**{k: v for k, v in window.items() if k != "timesteps"}).view(B, K, S + 2, 8)
    none = model.embed_action(torch.tensor(A)) if discrete else model.embed_action.bias
    assert torch.equal(z[:, 0, 0], none.expand(B, 8)) and torch.equal(z[:, 0, 1], model.embed_condition.bias.expand(B, 8))
    real = model.embed_action(window["actions"][:, 0])
    assert torch.allclose(z[:, 1, 0], real) and (real - none).abs().max() > 1e-3


def test_condition_reads_the_reward_the_return_or_neither():
    batch = make_batch()
    for condition, reads in dict(reward="rewards", rtg="rtg", none=None).items():
        model = build(condition=condition)
        y = model(**batch)
        for name in ("rewards", "rtg"):
            assert torch.equal(model(**batch | {name: batch[name] + 1}), y) == (name != reads)
    assert Config().condition == "reward"                                                   # the paper's default (Sec. 6.4)


# ---------------------------------------------------------------------------------------------------- the sequence transformer

def test_positions_count_within_the_window():
    """Eq. 4 and 5 add the same learned e_t to g_t, in every layer, and to h_t, once; the step of the episode is never asked for."""
    model, batch = build(), make_batch()
    assert torch.equal(model(**batch | {"timesteps": batch["timesteps"] + 100}), model(**batch))
    short = model(**{k: v[:, :3] for k, v in batch.items()})
    assert torch.allclose(short, model(**batch)[:, :3])
    torch.nn.init.zeros_(model.embed_time)
    assert (model(**batch)[:, 1:] - build()(**batch)[:, 1:]).abs().max() > 1e-3


def test_layerwise_reads_every_step_layer_and_stack_only_the_last():
    """Fig. 12: representations from several levels, or one. Fusion has the layerwise weights and half as long a sequence."""
    sizes = {connect: parameters(build(connect=connect)) for connect in CONNECT}
    assert sizes["fusion"] == sizes["layerwise"]
    assert sizes["stack"] == {name: n for name, n in sizes["layerwise"].items() if not name.startswith("folds.1")}
    lengths = {}
    for connect in CONNECT:
        model, lengths[connect] = build(connect=connect), []
        for layer in model.sequence:
            layer.mixer.register_forward_pre_hook(lambda module, args, connect=connect: lengths[connect].append(args[0].shape[1]))
        model(**make_batch())
    assert lengths == dict(layerwise=[2 * K, 2 * K], fusion=[K, K], stack=[2 * K, 2 * K])


def multiply_accumulates(model, call):
    """Of one call. The plain attention kernel is asked for: the counter does not know the CPU's fused one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        call(model)
    return counter.get_total_flops() // 2


def test_only_what_a_later_layer_reads_is_computed():
    """Counted, not timed. In layerwise form nobody reads the outputs at g, so h alone asks in every layer; in the stack
    the outputs at g feed the next layer, except in the last. Acting asks at the last h of the last layer."""
    n, step_d, d = S + 2, 8, 12
    embed = K * ((S + 1 + A) * step_d + S * d)
    step = K * (n * 12 * step_d**2 + 2 * n * n * step_d)                                    # 4 matrices and an MLP of 8; scores, sums
    fold = K * n * step_d * d

    def layer(queries, keys):
        return queries * (2 + 8) * d * d + keys * 2 * d * d + 2 * queries * keys * d

    layers = dict(layerwise=[layer(K, 2 * K)] * 2, fusion=[layer(K, K)] * 2, stack=[layer(2 * K, 2 * K), layer(K, 2 * K)])
    final = dict(layerwise=layer(1, 2 * K), fusion=layer(1, K), stack=layer(1, 2 * K))
    batch = make_batch()
    for connect in CONNECT:
        model, shared = build(connect=connect), embed + 2 * step + (1 if connect == "stack" else 2) * fold
        assert multiply_accumulates(model, lambda m: m(**batch)) == B * (shared + sum(layers[connect]) + K * d * A), connect
        assert multiply_accumulates(model, lambda m: m.act(**batch)) == B * (shared + layers[connect][0] + final[connect] + d * A), connect


# ---------------------------------------------------------------------------------------------------- sizes and settings

def test_hopper_has_the_released_models_692367_parameters_less_two_heads_that_never_get_a_loss():
    """Counted by hand: S 11, A 3, reward, K 20, d 128 and 16, 3 layers. The released gym model keeps DT's unused heads for
    the next state and the return, 128 -> 11 and 128 -> 1; without them its 692,367 are our 690,819."""
    d, e, n = 128, 16, 1 + 1 + 11

    def layer(d):
        return 2 * 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d)

    embed = (e + e) + 11 * e + (3 * e + e) + (e + e) + (11 * d + d) + 20 * d                # number, spatial, action, reward, state, time
    fold = 2 * e + (n * e * d + d) + 2 * d
    head = 2 * d + (d * 3 + 3)
    unused = (d * 11 + 11) + (d * 1 + 1)
    sizes = parameters(Model(Config()))
    assert sum(sizes.values()) == embed + 3 * (layer(e) + fold + layer(d)) + head == 692_367 - unused == 690_819
    assert sum(size for name, size in sizes.items() if ".mixer." in name) == 3 * (4 * (d * d + d) + 4 * (e * e + e)) == 201_408


def test_weight_decay_falls_on_matrices_alone():
    for discrete in (False, True):
        model = build(discrete=discrete)
        decay, rest = model.param_groups(0.1)
        assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
        ids = {id(p): name for name, p in model.named_parameters()}
        names = [[ids[id(p)] for p in group["params"]] for group in (decay, rest)]
        assert sorted(names[0] + names[1]) == sorted(ids.values())
        tables = {"embed_spatial", "embed_time"} | ({"embed_action.weight"} if discrete else set())
        assert set(names[1]) == {name for name in ids.values() if name.endswith("bias") or ".ln" in name or name.startswith("ln_")} | tables


def test_linear_maps_start_small_and_position_tables_at_zero():
    model = build(stir=False, d=120)
    assert not model.embed_spatial.any() and not model.embed_time.any()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert not module.bias.any() and module.weight.abs().max() < 0.1
    assert 0.019 < model.sequence[0].mlp[0].weight.std() < 0.021


def test_presets_hold_the_released_gym_settings():
    table = dict(n_layer=3, n_head=1, d=128, step_heads=4, step_d=16, context_len=20, batch_size=64, dropout=0.1, activation="gelu",
                 lr=1e-4, weight_decay=1e-4, betas=(0.9, 0.95), clip=0.25, warmup=10_000, steps=100_000, condition="reward")
    assert {k: PRESETS["*"][k] for k in table} == table


def test_every_preset_names_fields_that_exist():
    trainer = {"batch_size", "lr", "weight_decay", "betas", "warmup", "schedule", "clip", "steps", "targets", "rtg_scale", "reward_scale",
               "eval_episodes", "pct_traj"}
    fields = {f.name for f in dataclasses.fields(Config)}
    for name, preset in PRESETS.items():
        assert preset.keys() <= fields | trainer, name
