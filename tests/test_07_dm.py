"""Decision Mixer: a layer that attends over the tokens it picks, and learns how many to pick.

    pytest tests/test_07_dm.py

Sections and tables are the paper's. The slow versions below loop over rows, tokens and heads and compute what
the text says, no more; the model must agree with them.
"""
import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from models import dm, dt

S, A, K, B, D = 4, 2, 4, 5, 8
RAGGED = (K, 1, 3, 2, K)        # real steps of the rows
STATES = slice(1, None, 3)      # the tokens that predict


def build(training=True, dtype=torch.float64, seed=0, static=False, **switches):
    """A small model moved off its start, so that routers, hypernetworks and predictors tell tokens apart."""
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=20, n_layer=2, n_head=2, d=D)
    torch.manual_seed(seed)
    model = dm.Model(dm.Config(**(sizes | dict(dropout=0.0) | switches))).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    for layer in mixer_layers(model):
        layer.static_shapes = static
    return model.train(training)


def mixer_layers(model):
    return [block for block in model.blocks if isinstance(block, dm.MixerLayer)]


def make_batch(lengths=RAGGED, steps=K, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    n = len(lengths)
    batch = dict(
        states=torch.randn(n, steps, S, generator=g), actions=torch.rand(n, steps, A, generator=g) * 2 - 1,
        rewards=torch.randn(n, steps, 1, generator=g), rtg=torch.randn(n, steps, 1, generator=g),
    )
    batch = {k: v.to(dtype) for k, v in batch.items()}
    batch["timesteps"] = torch.arange(steps).expand(n, steps)
    batch["mask"] = torch.arange(steps) < torch.tensor(lengths)[:, None]
    return batch


def tokens(lengths=RAGGED, seed=2):
    """x (B, L, D) as it enters a layer, and valid (B, L)."""
    L = 3 * K
    x = torch.randn(len(lengths), L, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(L) < 3 * torch.tensor(lengths)[:, None]


def gradients(model, batch):
    model.zero_grad()
    model.loss(batch)[0].backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


# --------------------------------------------------------------------------- the paper, slowly

def slow_k(layer, real):
    """k for the real tokens (n, D) of a row: a share of them, by an MLP that reads their mean; 1 at least."""
    h = layer.hyper
    share = torch.sigmoid(h.last(F.leaky_relu(h.first(real.mean(0))))).item()
    return min(max(round(share * len(real)), 1), len(real))


def slow_top(weights, k):
    """Places of the k largest weights, in the order of the sequence."""
    return sorted(sorted(range(len(weights)), key=lambda i: -weights[i])[:k])


def slow_block(layer, x):
    """Eq. 3 for the selected tokens (k, D) of a row: causal attention, head by head, then the MLP."""
    block = layer.layer
    h = block.ln1(x)
    q, key, v = block.mixer.qkv(h).split(D, -1)
    mixed, size = torch.zeros_like(x), D // block.mixer.n_head
    for i in range(len(x)):
        for c in range(0, D, size):
            head = slice(c, c + size)
            scores = [q[i, head] @ key[j, head] / math.sqrt(size) for j in range(i + 1)]
            mixed[i, head] = sum(p * v[j, head] for j, p in enumerate(torch.stack(scores).softmax(0)))
    z = x + block.mixer.proj(mixed)
    return z + block.mlp(block.ln2(z))


def slow_layer(layer, x, valid, chosen=None):
    """Eq. 4 row by row. chosen: the tokens of each row, if not the top k."""
    out, cfg = x.clone(), layer.cfg
    for b in range(len(x)):
        real = x[b, valid[b]]
        w = layer.router(real)[:, 0]
        picked = slow_top(w.tolist(), slow_k(layer, real)) if chosen is None else chosen[b]
        if not picked:
            continue
        z, w = slow_block(layer, real[picked]), w[picked, None]
        w = w.sigmoid() if cfg.router == "sigmoid" else w
        out[b, picked] = real[picked] + w * (z - real[picked]) if cfg.residual else w * z
    return out


@pytest.mark.parametrize("switches", [
    {}, dict(router="sigmoid"), dict(residual=True), dict(activation="relu"), dict(static=True),
    dict(router="sigmoid", residual=True)])
def test_the_gathered_layer_is_equation_4_computed_token_by_token(switches):
    layer = build(**switches).blocks[1]
    x, valid = tokens()
    y, choice = layer(x, valid, acting=False)
    assert (y - slow_layer(layer, x, valid))[valid].abs().max() < 1e-12
    assert 0 < choice.kept.sum() < valid.sum()      # some tokens went through, some passed by


def masked_block(layer, x, see):
    """Eq. 3 for all tokens x (B, L, D), each attending where see (B, L, L) says so."""
    block = layer.layer
    q, k, v = block.mixer.qkv(block.ln1(x)).unflatten(-1, (3, block.mixer.n_head, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=see[:, None])
    return block.feed(x + block.mixer.proj(y.transpose(1, 2).flatten(2)))


def test_the_short_rows_give_the_same_outputs_and_gradients_as_the_whole_rows_under_a_mask():
    """The plain way: all tokens go through the block, a mask hides the unselected, where() undoes them."""
    layer = build(k_gradient="none").blocks[1]
    x, valid = tokens()
    y, choice = layer(x, valid, acting=False)
    (y * valid[..., None]).square().sum().backward()
    fast = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    kept, L = choice.kept, x.shape[1]
    see = torch.ones(L, L).tril().bool() & (kept[:, None] | torch.eye(L).bool())
    plain = torch.where(kept[..., None], layer.router(x) * masked_block(layer, x, see), x)
    (plain * valid[..., None]).square().sum().backward()
    assert (y - plain)[valid].abs().max() < 1e-12 and len(fast) > 8
    slow = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert all((grad - fast[name]).abs().max() < 1e-10 for name, grad in slow.items())


@pytest.mark.parametrize("switches", [
    {}, dict(layers="all", n_layer=1), dict(layers="all"), dict(n_layer=3), dict(static=True),
    dict(selection="fixed"), dict(selection="none")])
def test_the_last_layer_computed_at_the_state_positions_only_is_exact(switches):
    for training in (True, False):
        model, batch, entered = build(training, **switches), make_batch(), []
        model.blocks[-1].register_forward_pre_hook(lambda layer, inputs: entered.append(inputs))  # noqa: B023
        y = model(**batch)
        *inputs, wanted = entered.pop()
        whole = model.blocks[-1](*inputs)
        whole = whole[0] if isinstance(whole, tuple) else whole
        assert wanted == STATES and whole.shape == inputs[0].shape
        assert (y - model.predict(model.ln_f(whole[:, STATES])))[batch["mask"]].abs().max() < 1e-12


# --------------------------------------------------------------------------- how many, and which

def test_exactly_k_tokens_are_kept_the_best_by_weight_and_only_real_ones():
    """The released code keeps those strictly above the k-th largest weight: k - 1, and none for k = 1."""
    seen = set()
    for seed in range(8):
        layer = build(seed=seed).blocks[1]
        torch.nn.init.normal_(layer.hyper.last.bias, std=2.0)
        x, valid = tokens(seed=seed)
        kept = layer(x, valid, acting=False)[1].kept
        for b in range(B):
            real = x[b, valid[b]]
            k = slow_k(layer, real)
            assert kept[b].nonzero()[:, 0].tolist() == slow_top(layer.router(real)[:, 0].tolist(), k)
            seen.add((k, len(real)))
    assert (1, 3) in seen and any(k == n for k, n in seen) and len({k for k, _ in seen}) > 4


def test_equal_weights_still_give_exactly_k_tokens_the_earliest():
    for strategy in ("window", "prefix"):
        layer = build(selection="fixed", strategy=strategy).blocks[1]
        torch.nn.init.zeros_(layer.router.weight)
        x, valid = tokens()
        kept = layer(x, valid, acting=False)[1].kept
        if strategy == "window":
            assert kept.tolist() == [[i < max(round(1.5 * n), 1) for i in range(3 * K)] for n in RAGGED]
        else:       # the last of equals is never among the better half of those up to it, but for the first
            assert kept.tolist() == [[i == 0 for i in range(3 * K)]] * B


def test_the_pooled_hypernetwork_reads_the_mean_real_token_and_the_flattened_one_all_of_them_in_a_row():
    x, valid = tokens()
    x = x * valid[..., None]
    pooled, flat = build().blocks[1].hyper, build(hyper_input="flattened").blocks[1].hyper
    n = valid.sum(1, keepdim=True)
    for b in range(B):
        want = pooled.last(F.leaky_relu(pooled.first(x[b, valid[b]].mean(0)))).sigmoid()
        assert (pooled(x, n, "window")[b] - want).abs() < 1e-12
        row = torch.zeros(3 * K * D, dtype=torch.float64)      # shorter histories are padded right with zeros
        row[: valid[b].sum() * D] = x[b, valid[b]].flatten()
        want = flat.last(F.leaky_relu(flat.first(row))).sigmoid()
        assert (flat(x, n, "window")[b] - want).abs() < 1e-12
    short = slice(0, 3 * 2)
    assert torch.allclose(flat(x[:, short], n, "window")[3], flat(x, n, "window")[3])


@pytest.mark.parametrize("switches", [
    {}, dict(strategy="prefix"), dict(strategy="token"), dict(aux=False),
    dict(selection="fixed", fixed_k=1.0)])
def test_padding_is_never_kept_nor_read(switches):
    x, valid = tokens()
    for acting in (False, True):
        layer = build(**switches, **{} if "selection" in switches else dict(k_start=0.999)).blocks[1]
        y, choice = layer(x, valid, acting)
        assert not (choice.kept & ~valid).any() and torch.equal(y[~valid], x[~valid])
        assert choice.kept.any() or acting and layer.aux is not None
        other = torch.where(valid[..., None], x, 3.0)
        assert torch.equal(layer(other, valid, acting)[0][valid], y[valid])


@pytest.mark.parametrize("hyper_input", ["pooled", "flattened"])
def test_strategy_prefix_decides_as_strategy_window_would_if_the_sequence_ended_there(hyper_input):
    """Table 6 (2). A decision never changes afterwards, so training and acting agree without a predictor."""
    model = build(strategy="prefix", hyper_input=hyper_input)
    layer, whole = model.blocks[1], build(hyper_input=hyper_input).blocks[1]
    whole.load_state_dict(layer.state_dict(), strict=False)
    x, valid = tokens((K,) * B)
    kept = layer(x, valid, acting=False)[1].kept
    for i in range(3 * K):
        upto = slice(0, i + 1)
        assert torch.equal(kept[:, i], whole(x[:, upto], valid[:, upto], acting=False)[1].kept[:, i])
    assert kept[:, 0].all() and 0 < kept[:, 1:].sum() < kept[:, 1:].numel()
    assert layer.aux is None and torch.equal(kept, layer(x, valid, acting=True)[1].kept)


def test_strategy_token_decides_for_each_token_by_itself_alone():
    """Table 6 (1): a sequence of one token, of which H keeps round(sigmoid(H(x_i))), none or all."""
    layer = build(strategy="token").blocks[1]
    x, valid = tokens()
    kept = layer(x, valid, acting=False)[1].kept
    h = layer.hyper
    for b in range(B):
        for i in range(3 * K):
            assert kept[b, i] == (valid[b, i] and h.last(F.leaky_relu(h.first(x[b, i]))) > 0)
    assert torch.equal(kept, layer(x, valid, acting=True)[1].kept)
    assert 0 < kept.sum() < valid.sum() and layer.aux is None


def test_a_fixed_share_is_kept_whatever_the_tokens_say_and_without_a_hypernetwork():
    """Table 2, row 2: half the tokens."""
    for share in (0.5, 0.25):
        model = build(selection="fixed", fixed_k=share)
        kept = model.selected(make_batch()).sum(-1)
        assert kept.tolist() == [[max(round(3 * n * share), 1) for n in RAGGED]]
        assert not any("hyper" in name for name, _ in model.named_parameters())
        assert model.blocks[1].aux is not None


def test_without_selection_the_model_is_the_decision_transformer_of_the_same_weights():
    """Table 2, row 1."""
    model = build(selection="none")
    same = {k: getattr(model.cfg, k) for k in dt.Config.__dataclass_fields__ if hasattr(model.cfg, k)}
    plain = dt.Model(dt.Config(**same)).double()
    plain.load_state_dict(model.state_dict())
    batch = make_batch()
    assert (model(**batch) - plain(**batch))[batch["mask"]].abs().max() < 1e-12
    assert (model.loss(batch)[0] - plain.loss(batch)[0]).abs() < 1e-7
    assert list(model.loss(batch)[1]) == ["loss"]


def test_every_second_layer_is_a_mixer_layer_or_all_are():
    kinds = {}
    for layers in ("alternating", "all"):
        blocks = build(n_layer=6, layers=layers).blocks
        kinds[layers] = "".join("m" if isinstance(b, dm.MixerLayer) else "s" for b in blocks)
    assert kinds == {"alternating": "smsmsm", "all": "mmmmmm"}


# --------------------------------------------------------------------------- acting

def test_acting_follows_the_auxiliary_predictor_which_sees_one_token_at_a_time():
    """Algorithm 2. The router still weighs what the predictor lets through; rank and k play no part."""
    layer = build().blocks[1]
    x, valid = tokens()
    y, choice = layer(x, valid, acting=True)
    chosen = [[i for i in range(3 * n) if layer.aux(x[b, i])[1] > layer.aux(x[b, i])[0]]
              for b, n in enumerate(RAGGED)]
    assert [row.nonzero()[:, 0].tolist() for row in choice.kept] == chosen
    assert (y - slow_layer(layer, x, valid, chosen))[valid].abs().max() < 1e-12


def test_a_layer_whose_predictor_chooses_nothing_passes_everything_on_and_all_if_it_chooses_all():
    """Rows are one token long at least: a softmax over nothing is NaN, and 0 times NaN is NaN."""
    layer, lengths = build().blocks[1], []
    layer.layer.mixer.register_forward_pre_hook(lambda attention, inputs: lengths.append(inputs[0].shape[1]))
    x, valid = tokens()
    for bias, chosen in ((-50.0, [[] for _ in RAGGED]), (50.0, [list(range(3 * n)) for n in RAGGED])):
        with torch.no_grad():
            layer.aux[2].bias.copy_(torch.tensor([0.0, bias]))
        want = slow_layer(layer, x, valid, chosen)
        assert (layer(x, valid, True)[0] - want)[valid].abs().max() < 1e-12
        y = layer(x, valid, True, STATES)[0]
        assert (y - want[:, STATES])[valid[:, STATES]].abs().max() < 1e-12
    assert lengths == [1, 1, 3 * K, 3 * K]


def test_training_sees_the_whole_window_and_acting_does_not():
    """In training the future moves a prediction through the choice, as in the paper; else it must not."""
    batch = make_batch((K,) * B)
    changed = dict(batch, states=batch["states"].clone())
    changed["states"][:, -1] += 5
    for training in (True, False):
        models = [build(training, seed=seed, n_layer=4) for seed in range(4)]
        moved = [(m(**batch) - m(**changed))[:, :-1].abs().max() > 1e-9 for m in models]
        assert any(moved) == training


def test_features_and_selected_choose_as_forward_does_in_the_present_mode():
    batch, kept = make_batch(), {}
    for training in (True, False):
        model = build(training, n_layer=4)
        features, choices = model.encode(**batch)
        assert torch.equal(model.features(**batch), features) and features.shape == (B, K, D)
        assert torch.equal(model(**batch), model.predict(features))
        kept[training] = torch.stack([choice.kept for choice in choices])
        assert torch.equal(model.selected(batch), kept[training])
    assert not torch.equal(kept[True], kept[False])


def test_without_the_predictor_acting_judges_each_token_among_those_before_it():
    """Table 2, row 3. The paper does not say how; this way a decision stays made, the prediction causal."""
    model = build(aux=False)
    layer, prefix = model.blocks[1], build(strategy="prefix").blocks[1]
    prefix.load_state_dict(layer.state_dict())
    x, valid = tokens()
    assert torch.equal(layer(x, valid, acting=True)[0], prefix(x, valid, acting=True)[0])
    acted, trained = (layer(x, valid, acting=acting)[1].kept for acting in (True, False))
    assert not torch.equal(acted, trained)
    assert len(model.param_groups(0.1)) == 1 and "aux" not in model.loss(make_batch())[1]


def test_the_predictor_learns_the_selection_by_cross_entropy_and_its_loss_reaches_nothing_else():
    """Eq. 5, over the real tokens; the losses of the two mixer layers add up, the log has their means."""
    model, without = build(n_layer=4), build(n_layer=4, aux=False)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if ".aux." not in k})
    batch, entered, error, right = make_batch(), {}, [], []
    valid = batch["mask"].repeat_interleave(3, 1)
    for layer in mixer_layers(model):
        layer.register_forward_hook(lambda layer, inputs, _: entered.update({layer: inputs[0]}))
    selected = model.selected(batch)
    for (layer, x), kept in zip(entered.items(), selected, strict=True):
        for b, i in valid.nonzero().tolist():
            guess = layer.aux(x[b, i])
            error.append(-guess.log_softmax(-1)[int(kept[b, i])])
            right.append(int(guess.argmax() == kept[b, i]))
    total, log = model.loss(batch)
    assert len(error) == 2 * valid.sum() and (log["aux"] - torch.stack(error).mean()).abs() < 1e-12
    assert (total - 2 * log["aux"] - without.loss(batch)[0]).abs() < 1e-7
    assert abs(float(log["aux_accuracy"]) - sum(right) / len(right)) < 1e-6
    ours, theirs = gradients(model, batch), gradients(without, batch)
    assert all((ours[k] - g).abs().max() < 1e-12 for k, g in theirs.items())
    assert ours["blocks.1.aux.0.weight"].abs().max() > 0


def test_the_predictor_has_a_parameter_group_of_its_own():
    """For the trainer to clip and pace it apart: released, its gradients inflate the norm that clips all."""
    model = build(n_layer=4)
    rest, aux = model.param_groups(0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    want = {f"blocks.{i}.aux.{j}.{k}" for i in (1, 3) for j in (0, 2) for k in ("weight", "bias")}
    assert {names[id(p)] for p in aux["params"]} == want
    assert {id(p) for p in rest["params"] + aux["params"]} == set(names)
    assert len(names) == len(rest["params"]) + len(aux["params"])
    assert (rest["weight_decay"], rest["lr_scale"]) == (0.1, 1.0)
    assert (aux["weight_decay"], aux["lr_scale"]) == (0.0, 0.1)


# --------------------------------------------------------------------------- how k learns

def test_the_gate_that_teaches_k_changes_no_output():
    """Straight-through: 0 or 1 going forward. Unselected tokens in a short row are computed for nothing."""
    for switches in ({}, dict(layers="all"), dict(strategy="prefix"), dict(strategy="token")):
        batch = make_batch()
        learning, frozen = (build(**switches, k_gradient=g)(**batch) for g in ("straight-through", "none"))
        assert (learning - frozen)[batch["mask"]].abs().max() < 1e-12


@pytest.mark.parametrize("wanted", [None, STATES])
def test_k_feels_what_the_tokens_around_the_boundary_would_gain_or_lose(wanted):
    """d loss / d k is the ramp's slope, 1/4, times, summed over the four tokens ranked around k, how the loss
    moves when x_i turns into w_i Z_i. Z of an unselected token: what the block makes of it behind the
    selected ones. In the last layer only states are asked for."""
    layer = build().blocks[1]
    torch.nn.init.zeros_(layer.hyper.last.weight)
    share = torch.full((1,), 0.52, dtype=torch.float64)
    layer.hyper.last.bias = torch.nn.Parameter(share.logit())
    x, valid = tokens((K,))
    v = torch.randn(x.shape[1], D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    asked = range(len(v)) if wanted is None else range(*wanted.indices(len(v)))
    (layer(x, valid, False, wanted)[0][0] * v[list(asked)]).sum().backward()    # d loss / d x'_i is v_i
    w, n = layer.router(x[0])[:, 0], x.shape[1]
    order = sorted(range(n), key=lambda i: -w[i].item())
    k = round(0.52 * n)                                             # 6 of 12, from 6.24
    near = [i for r, i in enumerate(order) if abs(0.52 * n - r - 0.5) < 2]
    assert (k, len(near)) == (6, 4)
    picked = slow_top(w.tolist(), k)
    rest = [i for i in range(n) if i in near and i not in picked]
    z = dict(zip(picked + rest, slow_block(layer, x[0, picked + rest]), strict=True))
    slope = sum(v[i] @ (w[i] * z[i] - x[0, i]) for i in near if i in asked) / 4
    assert (layer.hyper.last.bias.grad - slope * n * share * (1 - share)).abs() < 1e-10


def test_static_shapes_change_neither_outputs_nor_gradients():
    """A CUDA graph needs every row as long as the window; without, rows are as the fullest needs."""
    batch = make_batch()
    for switches in ({}, dict(layers="all"), dict(strategy="prefix"), dict(selection="fixed")):
        for training in (True, False):
            short, static = (build(training, static=static, **switches) for static in (False, True))
            a, b = gradients(short, batch), gradients(static, batch)
            assert (short(**batch) - static(**batch))[batch["mask"]].abs().max() < 1e-12
            assert all((a[k] - b[k]).abs().max() < 1e-11 for k in a)


class NoReading(TorchDispatchMode):
    """Stops at what a CUDA graph cannot hold: a number read back, or a shape that depends on numbers."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().removeprefix("aten::").split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        return op(*args, **(kwargs or {}))


def test_nothing_is_read_back_from_the_device_where_shapes_are_static():
    def step(**switches):
        model, batch = build(**switches), make_batch()
        with NoReading():
            model.loss(batch)[0].backward()

    for switches in ({}, dict(k_cost=0.1), dict(selection="fixed"), dict(strategy="prefix", aux=None)):
        step(static=True, **switches)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        step()


def task(kind, n, g):
    """n windows of 8 states. many: an action is a product of two numbers of its state, so needs the MLP;
    few: it is linear."""
    s = torch.randn(n, 8, 4, generator=g)
    product = torch.stack([s[..., 0] * s[..., 1], s[..., 2].abs() - 0.8], -1)
    actions = (product if kind == "many" else 0.5 * s[..., :2]).tanh()
    return dict(states=s, actions=actions, rewards=torch.zeros(n, 8, 1), rtg=torch.zeros(n, 8, 1),
                timesteps=torch.arange(8).expand(n, 8), mask=torch.ones(n, 8, dtype=torch.bool))


def train(kind, start, steps, **switches):
    """(loss, tokens kept of 8) at the first and last step of one mixer layer; start is a share of 8."""
    torch.manual_seed(0)
    model = dm.Model(dm.Config(
        state_shape=(4,), act_dim=2, context_len=8, max_ep_len=8, n_layer=1, n_head=1, d=32, dropout=0.0,
        condition="none", use_actions=False, layers="all", timestep_std=0.1, k_start=start, **switches))
    optimizer, g, out = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(1), []
    for _ in range(steps):
        total, log = model.loss(task(kind, 32, g))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        out.append((float(log["loss"]), float(log["kept_1"])))
    return out[0], out[-1]


def test_k_rises_from_a_small_start_where_many_tokens_matter():
    """The released hypernetwork stays where it starts, since its k has no gradient, and so does the loss."""
    (_, first), (loss, last) = train("many", 0.12, 200)
    assert first == 1 and last > 7 and loss < 0.03
    (_, first), (loss, last) = train("many", 0.12, 100, k_gradient="none")
    assert first == last == 1 and loss > 0.1


def test_k_falls_where_few_tokens_matter_if_keeping_them_has_a_price():
    """The paper's own loss asks for no saving: without a price, k is as likely to rise here."""
    (_, first), (loss, last) = train("few", 0.73, 100, k_cost=0.2)
    assert first == 6 and last == 1 and loss < 0.02


def test_a_new_model_keeps_the_share_it_is_told_to_and_weighs_tokens_by_its_router_bias():
    """Released, w starts around 0: half the tokens come back with their sign flipped, all of them small."""
    for share, bias in ((0.5, 1.0), (0.1, 0.0)):
        model = dm.Model(dm.Config(state_shape=(S,), act_dim=A, k_start=share, router_bias=bias))
        for layer in mixer_layers(model):
            assert (layer.hyper.last.bias.sigmoid() - share).abs() < 1e-6 and layer.router.bias == bias
        log = model.loss(make_batch((20,) * B, 20, torch.float32))[1]
        assert all(abs(float(log[f"kept_{i}"]) - 60 * share) < 3 for i in (1, 2, 3))


def test_k_cost_is_the_share_of_tokens_kept_added_in_training_only():
    batch = make_batch((K,) * B)
    for training in (True, False):
        free, priced = build(training, n_layer=4), build(training, n_layer=4, k_cost=0.5)
        entered = {}
        for layer in mixer_layers(free):
            layer.register_forward_hook(
                lambda layer, inputs, _, entered=entered: entered.update({layer: inputs[0]}))
        (a, log_a), (b, log_b) = free.loss(batch), priced.loss(batch)
        n = torch.full((B, 1), 3 * K)
        shares = torch.cat([layer.hyper(x, n, "window") for layer, x in entered.items()])
        assert torch.equal(log_a["loss"], log_b["loss"]) and len(shares) == 2 * B
        assert (b - a - (0.5 * shares.mean() if training else 0)).abs() < 1e-7


def test_as_released_the_hypernetwork_gets_no_gradient_and_by_default_it_does():
    batch, flat = make_batch(), dict(hyper_input="flattened")
    for switches, moves in ((flat | dict(k_gradient="none"), False), ({}, True), (flat, True)):
        grads = gradients(build(**switches), batch)
        assert all((g.abs().max() > 0) == moves for name, g in grads.items() if ".hyper." in name)


# --------------------------------------------------------------------------- what it reports and costs

def test_the_log_holds_the_mean_number_of_tokens_kept_in_each_mixer_layer():
    """Table 10. Tensors, so that logging never waits for the device."""
    for training in (True, False):
        model, batch = build(training, n_layer=4), make_batch()
        log, kept = model.loss(batch)[1], model.selected(batch)
        assert kept.shape == (2, B, 3 * K) and not (kept & ~batch["mask"].repeat_interleave(3, 1)).any()
        want = kept.sum(-1).double().mean(-1).tolist()
        assert [float(log["kept_1"]), float(log["kept_2"])] == pytest.approx(want)
        assert all(isinstance(v, torch.Tensor) and not v.requires_grad for v in log.values())


def count(model, part):
    return sum(p.numel() for name, p in model.named_parameters() if part in f".{name}")


def test_parameters_at_the_papers_size_by_hand():
    """Six blocks hold 4.74 million; the released hypernetworks five times as many, pooled ones a twelfth."""
    d, model = 256, dm.Model(dm.Config())
    block = (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d) + 4 * d
    router, aux, pooled = d + 1, (d * d // 2 + d // 2) + 2 * (d // 2) + 2, (512 * d + 512) + 512 + 1
    assert (6 * block, 3 * aux, pooled) == (4_738_560, 99_462, 132_097)
    assert count(model, ".mixer.") == 6 * (4 * d * d + 4 * d)
    assert count(model, ".router.") == 3 * router and count(model, ".aux.") == 3 * aux
    assert count(model, ".hyper.") == 3 * pooled
    assert count(model, ".blocks.") == 6 * block + 3 * (router + aux + pooled)
    embeddings = (11 + 1 + 3) * d + 3 * d + 1000 * d + 2 * d
    assert count(model, ".") == count(model, ".blocks.") + embeddings + 2 * d + 3 * d + 3
    assert count(dm.Model(dm.Config(hyper_input="flattened")), ".hyper.") == 3 * 7_865_345


def macs(model, batch):
    """Multiply-accumulates of the linear layers: some attention kernels are counted and some are not."""
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    counts = counter.get_flop_counts()["Global"].items()
    return sum(n for op, n in counts if str(op) in ("aten.addmm", "aten.mm")) // 2


def test_tokens_passed_by_are_multiplications_not_done():
    """With half the tokens kept, mixer layers cost half, and the last of six has states alone in its MLP:
    0.73 of six full layers. (47 % saved, Table 3, would need about 4 tokens of 60 kept.)"""
    L, d, k = 60, 32, 30
    sizes = dict(n_layer=6, n_head=4, d=d, dropout=0.0)
    torch.manual_seed(0)
    batch = make_batch((20,), steps=20, dtype=torch.float32)
    embed, head = (S + A + 1) * 20 * d, 20 * d * A
    common = dict(state_shape=(S,), act_dim=A, **sizes)
    half = dm.Model(dm.Config(selection="fixed", aux=False, **common)).train()

    def layer(mixed, predicting=None):          # attention for all its tokens, the MLP for those that predict
        return 4 * mixed * d * d + 8 * (predicting or mixed) * d * d

    want = 3 * layer(L) + 2 * layer(k) + layer(k, 20) + 3 * L * d + embed + head    # three routers weigh all
    assert macs(half, batch) == want
    full = macs(dm.Model(dm.Config(selection="none", **common)), batch)
    assert full == 5 * layer(L) + layer(L, 20) + embed + head
    assert 0.72 < want / (6 * layer(L)) < 0.74
    cost = []
    for share in (0.1, 0.3, 0.6, 1.0):
        model = dm.Model(dm.Config(selection="fixed", fixed_k=share, aux=False, **common))
        cost.append(macs(model.train(), batch))
    assert cost == sorted(cost) and cost[0] < 0.65 * full


# --------------------------------------------------------------------------- settings

def test_presets_are_the_papers_table_7_and_the_released_targets():
    common = dm.PRESETS["*"]
    table_7 = dict(context_len=20, batch_size=512, lr=1e-3, weight_decay=1e-4, n_layer=6, n_head=4, d=256,
                   activation="gelu", dropout=0.1)
    assert table_7.items() <= common.items()
    assert common["clip"] == 0.25 and common["steps"] == 25_000 and common["warmup"] == 250
    scales = {k: v["rtg_scale"] for k, v in dm.PRESETS.items() if "rtg_scale" in v}
    assert scales.pop("small") is None and scales.pop("atari") == 1
    assert scales == dict(antmaze=1, maze2d=10, kitchen=100, pen=1000, hammer=1000, door=100, relocate=1000)
    targets = {k: v["targets"] for k, v in dm.PRESETS.items() if "targets" in v}
    assert targets == dict(
        hopper=(3600, 7200, 36000, 72000), halfcheetah=(6000, 12000, 60000, 120000),
        walker2d=(5000, 10000, 50000, 100000), antmaze=(1, 10, 100, 1000, 100000),
        maze2d=(300, 200, 150, 100, 50, 20), kitchen=(500, 250), pen=(12000, 6000),
        hammer=(12000, 6000, 3000), door=(2000, 1000, 500), relocate=(3000, 1000))
    sizes = {k: common[k] for k in dm.Config.__dataclass_fields__ if k in common}
    assert sizes.items() <= vars(dm.Config()).items()       # the default model is the paper's


@pytest.mark.parametrize("name, switches", [
    ("aux", dict(aux=True, strategy="prefix")), ("aux", dict(aux=True, strategy="token")),
    ("aux", dict(aux=False, strategy="prefix")), ("aux", dict(aux=True, selection="none")),
    ("aux", dict(aux=True, n_layer=1)),
    ("k_cost", dict(k_cost=0.1, selection="fixed")), ("k_cost", dict(k_cost=0.1, selection="none")),
    ("k_cost", dict(k_cost=0.1, k_gradient="none")), ("k_cost", dict(k_cost=0.1, n_layer=1)),
    ("hyper_input", dict(hyper_input="flattened", strategy="token")),
    ("hyper_input", dict(hyper_input="flattened", selection="fixed")),
    ("k_gradient", dict(k_gradient="none", selection="fixed")),
    ("k_gradient", dict(k_gradient="none", n_layer=1)),
    ("fixed_k", dict(fixed_k=0.25)), ("fixed_k", dict(fixed_k=0.25, selection="none")),
    ("layers", dict(layers="all", selection="none")),
    ("selection", dict(selection="fixed", strategy="token"))])
def test_a_switch_that_can_have_no_effect_is_refused_with_the_reason(name, switches):
    with pytest.raises(ValueError, match=f"^{name}=.+ has no effect without .+"):
        build(**switches)


@pytest.mark.parametrize("wrong", [
    dict(k_cost=-5.0), dict(k_cost=math.nan), dict(k_cost=math.inf), dict(fixed_k=0.0, selection="fixed"),
    dict(fixed_k=1.5, selection="fixed"), dict(fixed_k=math.nan, selection="fixed"), dict(k_start=0.0),
    dict(k_start=1.0), dict(k_start=math.nan), dict(n_head=3), dict(timestep_std=-1.0)])
def test_numbers_that_make_no_model_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        build(**wrong)


def test_a_switch_left_at_its_default_or_set_by_a_preset_is_never_refused():
    small = {k: v for k, v in dm.PRESETS["small"].items() if k in dm.Config.__dataclass_fields__}
    choices = dict(selection=("learned", "fixed", "none"), strategy=("window", "prefix", "token"),
                   k_gradient=("straight-through", "none"), layers=("alternating", "all"), n_layer=(1, 2))
    for preset in ({}, small | dict(d=D)):
        for values in itertools.product(*choices.values()):
            switches = dict(zip(choices, values, strict=True))
            no_mixer = switches["n_layer"] == 1 and switches["layers"] == "alternating"
            if switches["selection"] != "learned" or no_mixer:
                del switches["k_gradient"]
            if switches["selection"] == "none":
                del switches["layers"]
            if (switches["selection"], switches["strategy"]) != ("fixed", "token"):
                assert build(**(preset | switches)).loss(make_batch(steps=3, lengths=(3, 1)))[0].isfinite()


def test_the_choice_is_made_in_float32_under_bfloat16_autocast():
    """bfloat16 has 8 bits for a weight: near neighbours tie, and another token is kept."""
    model, batch = build(dtype=torch.float32), make_batch(dtype=torch.float32)
    layer = copy.deepcopy(model.blocks[1])
    x, valid = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        total, log = model.loss(batch)
        kept = layer(x.float(), valid, acting=False)[1].kept
    assert torch.equal(kept, layer(x.float(), valid, acting=False)[1].kept)
    assert total.dtype == torch.float32 and total.isfinite()
