"""Decision ConvFormer as a specification: its filters (Eq. 4), what they see and cost, and every switch.

    pytest tests/test_03_dc.py
"""
import dataclasses
import inspect
import itertools

import pytest
import test_01_contract as contract
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.dc import PRESETS, Config, DecisionConvFormer, Model, TokenFilters

S, A, K, B, D = 4, 2, 5, 2, 8
CONDITION, STATE, ACTION = 0, 1, 2      # the types of token, in their order within a step
GAMES = "breakout qbert pong seaquest asterix frostbite assault gopher".split()


def build(stir=True, **switches):
    """A small double-precision model in eval mode; stir gives every parameter something to say."""
    torch.manual_seed(0)
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=50, n_layer=2, d=D, dropout=0.0)
    if switches.get("hybrid"):
        sizes["n_head"] = 2
    model = Model(Config(**sizes | switches)).double().eval()
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model


def make_batch(steps=K):
    g = torch.Generator().manual_seed(1)
    return dict(
        states=torch.randn(B, steps, S, generator=g), actions=torch.rand(B, steps, A, generator=g) * 2 - 1,
        rewards=torch.randn(B, steps, 1, generator=g), rtg=torch.randn(B, steps, 1, generator=g),
        timesteps=torch.arange(steps).expand(B, steps) + 7, mask=torch.ones(B, steps, dtype=torch.bool),
    )


def count(model, part=""):
    return sum(p.numel() for name, p in model.named_parameters() if part in name)


def tokens_seen(model, steps):
    """Indices of the embedded tokens that the last step's prediction depends on."""
    tokens = []
    handle = model.embed_ln.register_forward_hook(
        lambda module, inputs, output: tokens.append(output.requires_grad_()) or output)
    y = model(**make_batch(steps))
    handle.remove()
    grad, = torch.autograd.grad(y[:, -1].sum(), tokens[0])
    return torch.nonzero(grad.abs().amax((0, 2))).flatten().tolist()


# --------------------------------------------------------------- the convolution

def plain_filters(filters, x):
    """Eq. 4, one number at a time: bias + sum over l of w[l] X[p - l, q], w chosen by p mod the types."""
    types, window, d = filters.weight.shape
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for p in range(x.shape[1]):
            for q in range(d):
                out[b, p, q] = filters.bias[p % types, q]
                for delay in range(window):
                    if p - delay >= 0:                          # zeros stand before the window
                        out[b, p, q] += filters.weight[p % types, delay, q] * x[b, p - delay, q]
    return out


@pytest.mark.parametrize("types, window", [(3, 6), (3, 3), (2, 6), (1, 6), (3, 1), (3, 30)])
def test_equation_4_each_position_is_filtered_by_the_filter_of_its_own_type(types, window):
    torch.manual_seed(0)
    filters, x = TokenFilters(D, window, types).double(), torch.randn(B, types * K, D).double()
    assert torch.allclose(filters(x), plain_filters(filters, x))


def test_it_is_what_the_released_code_computes_by_running_three_convolutions_over_everything():
    """There each filter runs over all 3K positions and two thirds of its output are thrown away.

    torch's convolution is a cross-correlation: its last tap is the current token, Eq. 4's w[0], so the
    filters look reversed when plotted side by side.
    """
    torch.manual_seed(0)
    filters, x = TokenFilters(D, 6, 3).double(), torch.randn(B, 3 * K, D).double()
    padded = F.pad(x.transpose(1, 2), (5, 0))
    expected = torch.empty_like(x)
    for kind in (CONDITION, STATE, ACTION):
        everywhere = F.conv1d(padded, filters.weight[kind].flip(0).t()[:, None], filters.bias[kind], groups=D)
        expected[:, kind::3] = everywhere.transpose(1, 2)[:, kind::3]
    assert torch.allclose(filters(x), expected)


def test_each_position_is_computed_once():
    """A third of the released work: 6 multiplications for each number."""
    class Multiplications(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if function in (torch.ops.aten.addcmul.default, torch.ops.aten.mul.Tensor):
                self.total += out.numel()
            return out

    filters, x = TokenFilters(D, 6, 3), torch.randn(B, 3 * K, D)
    with Multiplications() as count_of, torch.no_grad():
        filters(x)
    assert count_of.total == 6 * x.numel()


@pytest.mark.parametrize("switches", [dict(), dict(filters="shared"), dict(use_actions=False),
                                      dict(projection=True), dict(hybrid=True)], ids=str)
def test_dropping_the_tokens_that_predict_nothing_changes_nothing(switches):
    model = build(**switches)
    x = torch.randn(B, model.kinds * K, D).double()
    for keep in [slice(kind, None, model.kinds) for kind in range(model.kinds)] + [slice(7, 8)]:
        for block in model.blocks:
            assert torch.allclose(block(x, keep=keep), block(x)[:, keep])


# --------------------------------------------------------------- the whole model

def plain_norm(x, norm):
    x = x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * norm.weight + norm.bias


def test_the_model_is_figure_1_with_convolutions():
    """Embed, add the step's embedding, norm; N times x + Conv(LN(x)), x + MLP(LN(x)); norm, head, tanh."""
    model = build()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in make_batch().items()}
    expected = torch.empty(B, K, A).double()
    for b in range(B):
        x = []
        for t in range(K):
            time = model.embed_timestep.weight[batch["timesteps"][b, t]]
            embeds = dict(rtg=model.embed_condition, states=model.embed_state, actions=model.embed_action)
            for name, embed in embeds.items():
                x.append(plain_norm(embed.weight @ batch[name][b, t] + embed.bias + time, model.embed_ln))
        for block in model.blocks:
            normed = torch.stack([plain_norm(token, block.ln1) for token in x])
            mixed = plain_filters(block.mixer[0], normed[None])[0]
            x = [token + mix for token, mix in zip(x, mixed, strict=True)]
            first, _, second, _ = block.mlp
            hidden = [F.gelu(first.weight @ plain_norm(token, block.ln2) + first.bias) for token in x]
            x = [token + second.weight @ h + second.bias for token, h in zip(x, hidden, strict=True)]
        for t in range(K):
            last = plain_norm(x[3 * t + STATE], model.ln_f)
            expected[b, t] = torch.tanh(model.head.weight @ last + model.head.bias)
    assert torch.allclose(model(**batch), expected)


def test_equation_5_the_loss_is_the_squared_error_of_all_k_predictions():
    model, batch = build(), make_batch()
    y = model(**batch).detach()
    errors = (y - batch["actions"]) ** 2
    total = sum(float(errors[b, t].mean()) for b in range(B) for t in range(K))
    assert abs(float(model.loss(batch)[1]["loss"]) - total / (B * K)) < 1e-6


def test_three_layers_of_six_taps_see_sixteen_tokens_and_no_more():
    """1 + 3 * 5, counted back from s_t: R_t, then whole steps down to s_{t-5}, but no longer R_{t-5}.

    K = 8 is more than it needs.
    """
    last = 3 * 7 + STATE
    assert tokens_seen(build(n_layer=3, context_len=8), 8) == list(range(last - 15, last + 1))
    short = build(n_layer=3, context_len=8, window=3)       # Table 18
    assert tokens_seen(short, 8) == list(range(last - 6, last + 1))


def test_a_window_of_six_is_this_step_and_the_one_before():
    """The Markov assumption. The sixth token is a_{t-2}, since s_t is the second of its step."""
    assert tokens_seen(build(n_layer=1), K) == list(range(3 * (K - 2) - 1, 3 * (K - 1) + STATE + 1))


def test_two_of_the_last_blocks_three_filters_are_never_used():
    """Only state positions are read after the last block. The paper counts all three, so they stay."""
    model = build()
    model.loss(make_batch())[0].backward()
    for i, used in enumerate(([True, True, True], [False, True, False])):
        assert [bool(g.any()) for g in model.blocks[i].mixer[0].weight.grad] == used


# --------------------------------------------------------------- sizes

@pytest.mark.parametrize("sizes, expected", [
    ({}, 8_064), (dict(n_layer=6), 16_128), (dict(n_layer=4, d=512), 43_008),
], ids=["gym", "Atari", "ODC"])
def test_tables_14_to_16_the_mixers_hold_8k_16k_and_43k_parameters(sizes, expected):
    """layers x 3 filters x d x (6 taps + 1 bias); without biases, as the text's 3 d L, it would be 6,912."""
    model = Model(Config(**sizes))
    assert count(model, ".mixer.") == expected == model.cfg.n_layer * 3 * model.cfg.d * (6 + 1)


def test_the_hopper_model_holds_535939_parameters():
    """NOTE(paper): Table 14 says 0.8 M: a table of 1000 rows gives this count, one of 4096 rows 0.93 M."""
    S, A, d = 11, 3, 128
    embeddings = (S * d + d) + (A * d + d) + (1 * d + d) + 1000 * d + 2 * d
    block = 3 * d * 7 + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * 2 * d
    assert count(Model(Config())) == embeddings + 3 * block + 2 * d + d * A + A == 535_939


def test_the_paper_name_is_the_model():
    assert DecisionConvFormer is Model


# --------------------------------------------------------------- the switches

def test_filters_shared_is_one_filter_for_all_positions():
    """Eq. 6 of Appendix G.1: a third of the parameters; three equal filters are the same function."""
    one, three = build(filters="shared"), build()
    assert 3 * count(one, ".mixer.") == count(three, ".mixer.")
    shapes = three.state_dict()
    three.load_state_dict({k: v.expand_as(shapes[k]) for k, v in one.state_dict().items()})
    assert torch.allclose(one(**make_batch()), three(**make_batch()))


def test_window_changes_the_taps_and_nothing_else():
    short, long = build(window=3), build(window=6)
    assert count(long) - count(short) == count(long, ".mixer.") - count(short, ".mixer.") == 2 * 3 * D * 3
    longer = {k: F.pad(v, (0, 0, 0, 3)) if k.endswith("mixer.0.weight") else v
              for k, v in short.state_dict().items()}
    long.load_state_dict(longer)            # three more taps of weight zero
    assert torch.allclose(short(**make_batch()), long(**make_batch()))


def test_hybrid_puts_attention_into_the_last_block_alone():
    plain, hybrid = build(n_layer=3, context_len=8), build(n_layer=3, context_len=8, hybrid=True)
    mixers = [type(block.mixer[0]).__name__ for block in hybrid.blocks]
    assert mixers == ["TokenFilters", "TokenFilters", "Attention"]
    assert count(hybrid) - count(plain) == 4 * (D * D + D) - 3 * D * 7
    assert tokens_seen(hybrid, 8) == list(range(3 * 7 + STATE + 1))     # all; the plain model: 16


def test_projection_is_a_linear_layer_after_each_convolution_and_counts_as_mixer():
    plain, projected = build(), build(projection=True)
    mixing, more = (count(projected, part) - count(plain, part) for part in (".mixer.", ""))
    assert mixing == more == 2 * (D * D + D)
    weights = plain.state_dict() | {f"blocks.{i}.mixer.1.weight": torch.eye(D) for i in range(2)}
    projected.load_state_dict(weights | {f"blocks.{i}.mixer.1.bias": torch.zeros(D) for i in range(2)})
    assert torch.allclose(plain(**make_batch()), projected(**make_batch()))


def test_projection_leaves_the_attention_block_of_a_hybrid_alone():
    """NOTE(paper): Table 13 lists a projection for the hybrid; the released attention always has its own."""
    assert count(build(hybrid=True, projection=True)) - count(build(hybrid=True)) == D * D + D


def test_use_actions_false_leaves_two_filters_whose_six_taps_now_span_three_steps():
    model = build(use_actions=False, n_layer=1)
    assert model.blocks[0].mixer[0].weight.shape == (2, 6, D) and not hasattr(model, "embed_action")
    assert tokens_seen(model, K) == list(range(2 * (K - 3), 2 * K))


def test_timestep_embedding_false_takes_the_table_away_and_nothing_else():
    model, without = build(), build(timestep_embedding=False)
    assert count(model) - count(without) == 50 * D
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("embed_timestep")}
    without.load_state_dict(weights)
    with torch.no_grad():
        model.embed_timestep.weight.zero_()
    assert torch.allclose(model(**make_batch()), without(**make_batch()))


def test_activation_is_the_mlps_nonlinearity():
    gelu, relu = build(), build(activation="relu")
    relu.load_state_dict(gelu.state_dict())
    assert not torch.allclose(gelu(**make_batch()), relu(**make_batch()))
    for module in relu.blocks.modules():
        if isinstance(module, torch.nn.ReLU):
            module.register_forward_hook(lambda module, x, y: F.gelu(x[0]))
    assert torch.allclose(gelu(**make_batch()), relu(**make_batch()))


def test_a_bare_convolution_has_no_dropout_and_a_projected_one_has():
    """As released. With the MLP and the embedding silenced, what is left of dropout is the mixer's."""
    for projection in (False, True):
        block = build(projection=projection, dropout=0.5).blocks[0].train()
        x = torch.randn(B, 3 * K, D).double()
        with torch.no_grad():
            block.mlp[2].weight.zero_()
            block.mlp[2].bias.zero_()
        assert torch.equal(block(x), block(x)) is not projection


def test_initial_values_are_the_released_ones():
    """Filters uniform in +-1/sqrt(6), biases too; linear layers of blocks N(0, 0.02); the table N(0, std)."""
    torch.manual_seed(0)
    model = Model(Config(d=256, timestep_std=0.5))
    filters, linear = model.blocks[0].mixer[0], model.blocks[0].mlp[0]
    for p in (filters.weight.detach(), filters.bias.detach()):
        assert 0.98 * 6 ** -0.5 < p.abs().max() <= 6 ** -0.5
        assert abs(float(p.std()) - (6 * 3) ** -0.5) < 0.02
    assert abs(float(linear.weight.detach().std()) - 0.02) < 1e-3 and not linear.bias.any()
    assert abs(float(model.embed_timestep.weight.detach().std()) - 0.5) < 0.01


@pytest.mark.parametrize("position", ["timestep", "window"])
def test_with_frames_each_embedding_goes_through_a_tanh_and_there_is_no_norm(position):
    """As released for Atari, where one timestep, the first, serves a whole window, and places are learned."""
    switches = dict(state_shape=(2, 36, 36), discrete=True, position=position)
    model, cfg = contract.build(("dc", switches), torch.float64)
    batch = contract.make_batch(cfg, torch.float64, rows=2)
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


EVERY_SWITCH = [
    dict(filters="shared"), dict(window=1), dict(window=2), dict(window=3), dict(window=18),
    dict(timestep_embedding=False), dict(hybrid=True), dict(projection=True),
    dict(hybrid=True, projection=True, use_actions=False), dict(condition="none", use_actions=False),
    dict(condition="none", window=1), dict(condition="none", window=2), dict(condition="reward", window=2),
]
PROMISES = [f for name, f in vars(contract).items()
            if name.startswith("test_promise_") and "cuda" not in name
            and list(inspect.signature(f).parameters) == ["case"]]


@pytest.mark.parametrize("switches", EVERY_SWITCH, ids=str)
def test_every_switch_keeps_the_promises_of_test_01_contract(switches):
    assert len(PROMISES) == 9
    for promise in PROMISES:
        promise(("dc", switches))


def test_a_single_tap_cannot_read_returns():
    """What the contract's list of exceptions says of it, asked of the numbers above."""
    assert {"rtg", "actions", "history"} <= contract.known(("dc", {}), Config(window=1))
    assert not {"rtg", "actions", "history"} & contract.known(("dc", {}), Config(window=1, hybrid=True))


@pytest.mark.parametrize("switches, word", [
    (dict(window=0), "size"), (dict(hybrid=True, n_head=3), "n_head"),
    (dict(timestep_std=-1.0), "timestep_std"),
], ids=str)
def test_settings_that_make_no_model_are_refused_by_name(switches, word):
    with pytest.raises(ValueError, match=word):
        Model(Config(**switches))


@pytest.mark.parametrize("switches, reason", [
    (dict(window=5000), "window=5000 .* 24 tokens"), (dict(window=7, context_len=2), "window=7 .* 6 tokens"),
    (dict(window=9, use_actions=False, context_len=4), "window=9 .* 8 tokens"),
    (dict(n_head=2), "n_head=2 .* hybrid=True"),
    (dict(hybrid=True, n_layer=1), "hybrid=True .* second block"),
    (dict(filters="shared", condition="none", use_actions=False), "filters=shared .* kind of token"),
], ids=str)
def test_a_switch_that_would_do_nothing_is_refused_with_the_reason(switches, reason):
    with pytest.raises(ValueError, match=reason):
        Model(Config(**switches))


def test_a_switch_left_at_its_default_is_never_refused():
    """The default window is longer than one step; a filter as long as the window is the longest."""
    for switches in (dict(context_len=1), dict(condition="none", use_actions=False), dict(n_layer=1),
                     dict(context_len=1, condition="none", use_actions=False), dict(window=24)):
        Model(Config(**switches))


def test_presets_of_the_hybrid_follow_those_of_the_plain_model():
    """Table 7: context 30, pong 50. Table 13: projections as without attention, and in asterix too."""
    assert PRESETS["atari hybrid"]["context_len"] == 30 and PRESETS["pong hybrid"] == dict(context_len=50)
    both = [(PRESETS[game], PRESETS[game] | PRESETS.get(f"{game} hybrid", {})) for game in GAMES]
    plain, hybrid = ([p.get("projection", False) for p in column] for column in zip(*both, strict=True))
    assert plain == [False, True, False, True, False, True, True, False]
    assert hybrid == [False, True, False, True, True, True, True, False]


def test_every_preset_is_a_setting_that_builds_at_both_sizes():
    """The values themselves are held by test_08_presets."""
    fields = {f.name for f in dataclasses.fields(Config)}
    for key, small in itertools.product(PRESETS, ([], ["small"])):
        env, _, switch = key.partition(" ")
        values = {"hybrid": True} if switch else {}
        for name in ["*", "atari" if env in GAMES else env.split("-")[0], env, *small]:
            values |= PRESETS.get(name, {})
            if values.get("hybrid"):
                values |= PRESETS.get(f"{name} hybrid", {})
        Model(Config(**{k: v for k, v in values.items() if k in fields}))
