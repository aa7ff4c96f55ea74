"""Decision ConvFormer as a specification: its filters (Eq. 4), what they can see, what they cost, and every switch of the paper.

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

from models.dc import PRESETS, Config, DecisionConvFormer, Model, TokenFilters, unread

S, A, K, B, D = 4, 2, 5, 2, 8
CONDITION, STATE, ACTION = 0, 1, 2      # the types of token, in their order within a step


def build(stir=True, **switches):
    """A small double-precision model in eval mode; stir gives every parameter something to say."""
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


def count(model, part=""):
    return sum(p.numel() for name, p in model.named_parameters() if part in name)


def tokens_seen(model, steps):
    """Indices of the embedded tokens that the last step's prediction depends on."""
    tokens = []
    handle = model.embed_ln.register_forward_hook(lambda module, inputs, output: tokens.append(output.requires_grad_()) or output)
    y = model(**make_batch(steps))
    handle.remove()
    grad, = torch.autograd.grad(y[:, -1].sum(), tokens[0])
    return torch.nonzero(grad.abs().amax((0, 2))).flatten().tolist()


# ---------------------------------------------------------------------------------------------------- the convolution

def plain_filters(filters, x):
    """Eq. 4, one number at a time: C[p, q] = bias + sum_l w[l] X[p - l, q], w chosen by p mod the number of types."""
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
    """There each filter runs over all 3K positions and two thirds of its output are thrown away. torch's convolution is a
    cross-correlation: its last tap is the current token, Eq. 4's w[0], so the filters look reversed when plotted side by side."""
    torch.manual_seed(0)
    filters, x = TokenFilters(D, 6, 3).double(), torch.randn(B, 3 * K, D).double()
    padded = F.pad(x.transpose(1, 2), (5, 0))
    expected = torch.empty_like(x)
    for kind in (CONDITION, STATE, ACTION):
        everywhere = F.conv1d(padded, filters.weight[kind].flip(0).t()[:, None], filters.bias[kind], groups=D)
        expected[:, kind::3] = everywhere.transpose(1, 2)[:, kind::3]
    assert torch.allclose(filters(x), expected)


class OnCuda(torch.Tensor):
    is_cuda = True      # a tensor in the computer's memory that goes the way of one on a GPU


@pytest.mark.parametrize("types, rows", [(3, None), (2, None), (1, None), (3, slice(STATE, None, 3)), (3, slice(13, 14)), (1, slice(1, None, 3))])
def test_on_a_gpu_two_large_kernels_give_the_same_values_and_gradients(types, rows):
    torch.manual_seed(0)
    filters, x = TokenFilters(D, 6, types).double(), torch.randn(B, 6 * K, D).double().requires_grad_()
    y, there = filters(x, rows), filters(x.as_subclass(OnCuda), rows).as_subclass(torch.Tensor)
    v, to = torch.randn_like(y), (x, filters.weight, filters.bias)
    assert torch.allclose(y, there)
    assert all(torch.allclose(a, b) for a, b in zip(torch.autograd.grad(y, to, v), torch.autograd.grad(there, to, v), strict=True))


@pytest.mark.parametrize("kind", [torch.Tensor, OnCuda])
def test_each_position_is_computed_once(kind):
    """A third of the released work: 6 multiplications for each number, and 2 where only the states are wanted."""
    class Multiplications(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if function in (torch.ops.aten.addcmul.default, torch.ops.aten.mul.Tensor):
                self.total += out.numel()
            return out

    filters, x = TokenFilters(D, 6, 3), torch.randn(B, 3 * K, D).as_subclass(kind)
    for rows, expected in ((None, 6 * x.numel()), (slice(STATE, None, 3), 2 * x.numel()), (slice(13, 14), 6 * B * D)):
        with Multiplications() as count_of, torch.no_grad():
            filters(x, rows)
        assert count_of.total == expected


@pytest.mark.parametrize("switches", [dict(), dict(filters="shared"), dict(use_actions=False), dict(projection=True), dict(hybrid=True)],
                         ids=str)
def test_computing_the_wanted_rows_alone_gives_the_same_numbers(switches):
    model = build(**switches)
    x = torch.randn(B, model.tokens * K, D).double()
    for rows in [slice(kind, None, model.tokens) for kind in range(model.tokens)] + [slice(7, 8)]:
        for block in model.blocks:
            assert torch.allclose(block(x, rows), block(x)[:, rows])


# ---------------------------------------------------------------------------------------------------- the whole model

def plain_norm(x, norm):
    x = x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * norm.weight + norm.bias


def test_the_model_is_figure_1_with_convolutions():
    """Embed, add the step's embedding, normalise; N times: x + Conv(LN(x)), x + MLP(LN(x)); normalise, project, squash."""
    model, batch = build(), {k: v.double() if v.is_floating_point() else v for k, v in make_batch().items()}
    expected = torch.empty(B, K, A).double()
    for b in range(B):
        x = []
        for t in range(K):
            time = model.embed_timestep.weight[batch["timesteps"][b, t]]
            for name, embed in (("rtg", model.embed_condition), ("states", model.embed_state), ("actions", model.embed_action)):
                x.append(plain_norm(embed.weight @ batch[name][b, t] + embed.bias + time, model.embed_ln))
        for block in model.blocks:
            normed = torch.stack([plain_norm(token, block.ln1) for token in x])
            mixed = plain_filters(block.mixer.filters, normed[None])[0]
            x = [token + mix for token, mix in zip(x, mixed, strict=True)]
            first, _, second = block.mlp
            x = [token + second.weight @ F.gelu(first.weight @ plain_norm(token, block.ln2) + first.bias) + second.bias for token in x]
        for t in range(K):
            expected[b, t] = torch.tanh(model.head.weight @ plain_norm(x[3 * t + STATE], model.ln_f) + model.head.bias)
    assert torch.allclose(model(**batch), expected)


def test_equation_5_the_loss_is_the_squared_error_of_all_k_predictions():
    model, batch = build(), make_batch()
    y = model(**batch).detach()
    total = sum(float(((y[b, t] - batch["actions"][b, t]) ** 2).mean()) for b in range(B) for t in range(K))
    assert abs(float(model.loss(batch)[1]["loss"]) - total / (B * K)) < 1e-6


def test_three_layers_of_six_taps_see_sixteen_tokens_and_no_more():
    """1 + 3 * 5, counted back from s_t: R_t, then whole steps down to s_{t-5}, but no longer R_{t-5}. K = 8 is more than it needs."""
    last = 3 * 7 + STATE
    assert tokens_seen(build(n_layer=3, context_len=8), 8) == list(range(last - 15, last + 1))
    assert tokens_seen(build(n_layer=3, context_len=8, window=3), 8) == list(range(last - 6, last + 1))     # Table 18


def test_a_window_of_six_is_this_step_and_the_one_before():
    """The Markov assumption: the filter of s_t covers s_t, R_t, a_{t-1}, s_{t-1}, R_{t-1}, and a_{t-2} since s_t is second in its step."""
    assert tokens_seen(build(n_layer=1), K) == list(range(3 * (K - 2) - 1, 3 * (K - 1) + STATE + 1))


def test_two_of_the_last_blocks_three_filters_are_never_used():
    """Only state positions are read after the last block. The paper counts all three, so they stay, and never learn."""
    model = build()
    model.loss(make_batch())[0].backward()
    for i, used in enumerate(([True, True, True], [False, True, False])):
        assert [bool(g.any()) for g in model.blocks[i].mixer.filters.weight.grad] == used


# ---------------------------------------------------------------------------------------------------- sizes

@pytest.mark.parametrize("sizes, expected", [({}, 8_064), (dict(n_layer=6), 16_128), (dict(n_layer=4, d=512), 43_008)],
                         ids=["gym", "Atari", "ODC"])
def test_tables_14_to_16_the_mixers_hold_8k_16k_and_43k_parameters(sizes, expected):
    """layers x 3 filters x d x (6 taps + 1 bias). The text's 3 d L would give 6,912: the biases are in the paper's count."""
    model = Model(Config(**sizes))
    assert count(model, ".mixer.") == expected == model.cfg.n_layer * 3 * model.cfg.d * (6 + 1)


def test_the_hopper_model_holds_535939_parameters():
    """NOTE(paper): Table 14 says 0.8 M, which neither a table of 1000 rows (this count) nor one of 4096 (0.93 M) gives."""
    S, A, d = 11, 3, 128
    embeddings = (S * d + d) + (A * d + d) + (1 * d + d) + 1000 * d + 2 * d
    block = 3 * d * 7 + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * 2 * d
    assert count(Model(Config())) == embeddings + 3 * block + 2 * d + d * A + A == 535_939


def test_the_paper_name_is_the_model():
    assert DecisionConvFormer is Model


# ---------------------------------------------------------------------------------------------------- the switches

def test_filters_shared_is_one_filter_for_all_positions():
    """Eq. 6 of Appendix G.1: a third of the parameters; three equal filters are the same function."""
    one, three = build(filters="shared"), build()
    assert 3 * count(one, ".mixer.") == count(three, ".mixer.")
    three.load_state_dict({k: v.expand_as(three.state_dict()[k]) for k, v in one.state_dict().items()})
    assert torch.allclose(one(**make_batch()), three(**make_batch()))


def test_window_changes_the_taps_and_nothing_else():
    short, long = build(window=3), build(window=6)
    assert count(long) - count(short) == count(long, ".mixer.") - count(short, ".mixer.") == 2 * 3 * D * 3
    padded = {k: F.pad(v, (0, 0, 0, 3)) if k.endswith("filters.weight") else v for k, v in short.state_dict().items()}
    long.load_state_dict(padded)            # three more taps of weight zero
    assert torch.allclose(short(**make_batch()), long(**make_batch()))


def test_hybrid_puts_attention_into_the_last_block_alone():
    plain, hybrid = build(n_layer=3, context_len=8), build(n_layer=3, context_len=8, hybrid=True)
    assert [type(block.mixer).__name__ for block in hybrid.blocks] == ["ConvMixer", "ConvMixer", "Attention"]
    assert count(hybrid) - count(plain) == 4 * (D * D + D) - 3 * D * 7
    assert tokens_seen(hybrid, 8) == list(range(3 * 7 + STATE + 1))         # the whole window, where the plain model sees 16 tokens


def test_projection_is_a_linear_layer_after_each_convolution_and_counts_as_mixer():
    plain, projected = build(), build(projection=True)
    assert count(projected, ".mixer.") - count(plain, ".mixer.") == count(projected) - count(plain) == 2 * (D * D + D)
    weights = plain.state_dict() | {f"blocks.{i}.mixer.proj.weight": torch.eye(D) for i in range(2)}
    projected.load_state_dict(weights | {f"blocks.{i}.mixer.proj.bias": torch.zeros(D) for i in range(2)})
    assert torch.allclose(plain(**make_batch()), projected(**make_batch()))


def test_projection_leaves_the_attention_block_of_a_hybrid_alone():
    """NOTE(paper): Table 13 lists a projection for the hybrid too; the released attention always has its own."""
    assert count(build(hybrid=True, projection=True)) - count(build(hybrid=True)) == D * D + D


def test_use_actions_false_leaves_two_filters_whose_six_taps_now_span_three_steps():
    model = build(use_actions=False, n_layer=1)
    assert model.blocks[0].mixer.filters.weight.shape == (2, 6, D) and not hasattr(model, "embed_action")
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
    relu.blocks.apply(lambda m: m.register_forward_hook(lambda module, x, y: F.gelu(x[0])) if isinstance(m, torch.nn.ReLU) else None)
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
    """Filters and biases uniform in +-1/sqrt(6), linear layers of the blocks N(0, 0.02), the timestep table N(0, timestep_std)."""
    torch.manual_seed(0)
    model = Model(Config(d=256, timestep_std=0.5))
    filters = model.blocks[0].mixer.filters
    for p in (filters.weight, filters.bias):
        assert 0.98 * 6 ** -0.5 < p.detach().abs().max() <= 6 ** -0.5 and abs(float(p.detach().std()) - (6 * 3) ** -0.5) < 0.02
    assert abs(float(model.blocks[0].mlp[0].weight.detach().std()) - 0.02) < 1e-3 and not model.blocks[0].mlp[0].bias.any()
    assert abs(float(model.embed_timestep.weight.std()) - 0.5) < 0.01


EVERY_SWITCH = [dict(filters="shared"), dict(window=1), dict(window=2), dict(window=3), dict(window=30), dict(timestep_embedding=False),
                dict(hybrid=True), dict(projection=True), dict(hybrid=True, projection=True, use_actions=False),
                dict(condition="none", use_actions=False), dict(condition="none", window=1), dict(condition="none", window=2),
                dict(condition="reward", window=2)]
PROMISES = [f for name, f in vars(contract).items()
            if name.startswith("test_promise_") and not ("cuda" in name or "remembers" in name)     # of frames, which no switch here has
            and list(inspect.signature(f).parameters) == ["case"]]


@pytest.mark.parametrize("switches", EVERY_SWITCH, ids=str)
def test_every_switch_keeps_the_promises_of_test_01_contract(switches):
    for promise in PROMISES:
        promise(("dc", switches))


def test_a_single_tap_cannot_read_returns_and_unread_says_so():
    assert {"rtg", "actions", "history"} <= unread(Config(window=1)).keys()
    assert not {"rtg", "actions", "history"} & unread(Config(window=1, hybrid=True)).keys()


@pytest.mark.parametrize("switches, word", [(dict(window=0), "window"), (dict(hybrid=True, n_head=3), "n_head")], ids=str)
def test_settings_that_cannot_work_are_refused_by_name(switches, word):
    with pytest.raises(ValueError, match=word):
        Model(Config(**switches))


def test_every_preset_is_a_setting_that_builds_at_both_sizes():
    """The values themselves are held by test_08_presets."""
    fields = {f.name for f in dataclasses.fields(Config)}
    for env, small in itertools.product(PRESETS, ({}, PRESETS["small"])):
        values = PRESETS["*"] | PRESETS.get(env.split("-")[0], {}) | PRESETS[env] | small
        Model(Config(**{k: v for k, v in values.items() if k in fields}))
