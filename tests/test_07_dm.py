"""Decision Mixer: a layer that attends over the tokens it picks, and learns how many to pick. Sections and tables are the paper's.

The slow versions below loop over rows, tokens and heads and compute what the text says, no more; the model must agree with them.
"""
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from models import dm, dt

S, A, K, B, D = 4, 2, 4, 5, 8
RAGGED = (K, 1, 3, 2, K)        # real steps of the rows


def build(training=True, dtype=torch.float64, seed=0, **switches):
    """A small model moved off its initialisation, so that routers, hypernetworks and predictors disagree between tokens and rows."""
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=20, n_layer=2, n_head=2, d=D, dropout=0.0)
    torch.manual_seed(seed)
    model = dm.Model(dm.Config(**(sizes | switches))).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.train(training)


def make_batch(lengths=RAGGED, steps=K, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    n = len(lengths)
    batch = dict(states=torch.randn(n, steps, S, generator=g), actions=torch.rand(n, steps, A, generator=g) * 2 - 1,
                 rewards=torch.randn(n, steps, 1, generator=g), rtg=torch.randn(n, steps, 1, generator=g))
    batch = {k: v.to(dtype) for k, v in batch.items()}
    return batch | dict(timesteps=torch.arange(steps).expand(n, steps), mask=torch.arange(steps) < torch.tensor(lengths)[:, None])


def tokens(lengths=RAGGED, seed=2):
    """x (B, L, D) as it enters a layer, and valid (B, L)."""
    L = 3 * K
    x = torch.randn(len(lengths), L, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(L) < 3 * torch.tensor(lengths)[:, None]


def gradients(model, batch):
    model.zero_grad()
    model.loss(batch)[0].backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# --------------------------------------------------------------------------- the paper, slowly

def slow_k(layer, real):
    """k for the real tokens (n, D) of one row: a share of them, by an MLP that reads their mean; at least one token."""
    h = layer.hyper
    share = torch.sigmoid(h.last(F.leaky_relu(h.first(real.mean(0))))).item()
    return min(max(round(share * len(real)), 1), len(real))


def slow_top(weights, k):
    """Places of the k largest weights, in the order of the sequence."""
    return sorted(sorted(range(len(weights)), key=lambda i: -weights[i])[:k])


def slow_block(layer, x):
    """Eq. 3 for the selected tokens (k, D) of one row: pre-norm attention over themselves, causally, head by head, then the MLP."""
    h = layer.ln1(x)
    q, key, v = layer.mixer.qkv(h).split(D, -1)
    mixed, size = torch.zeros_like(x), D // layer.mixer.n_head
    for i in range(len(x)):
        for c in range(0, D, size):
            scores = torch.stack([q[i, c: c + size] @ key[j, c: c + size] / math.sqrt(size) for j in range(i + 1)]).softmax(0)
            mixed[i, c: c + size] = sum(p * v[j, c: c + size] for j, p in enumerate(scores))
    z = x + layer.mixer.proj(mixed)
    return z + layer.mlp(layer.ln2(z))


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


@pytest.mark.parametrize("switches", [{}, dict(router="sigmoid"), dict(residual=True), dict(activation="relu"), dict(capacity=1.0)])
def test_the_gathered_layer_is_equation_4_computed_token_by_token(switches):
    layer = build(**switches).blocks[1]
    x, valid = tokens()
    y, note = layer(x, valid, acting=False)
    assert (y - slow_layer(layer, x, valid))[valid].abs().max() < 1e-12
    assert 0 < note["keep"].sum() < valid.sum()      # some tokens went through, some passed by


def test_the_short_rows_give_the_same_outputs_and_gradients_as_the_whole_rows_under_a_mask():
    """The plain masked computation: all tokens go through the block, a mask hides the unselected, and a 0/1 factor puts them back."""
    layer = build(k_gradient="none").blocks[1]
    x, valid = tokens()
    y, note = layer(x, valid, acting=False)
    (y * valid[..., None]).square().sum().backward()
    fast = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    keep, L = note["keep"], x.shape[1]
    see = torch.ones(L, L).tril().bool() & (keep[:, None] | torch.eye(L).bool())
    plain = torch.where(keep[..., None], layer.router(x) * layer.block(x, x, see[:, None]), x)
    (plain * valid[..., None]).square().sum().backward()
    assert (y - plain)[valid].abs().max() < 1e-12
    assert all((p.grad - fast[name]).abs().max() < 1e-10 for name, p in layer.named_parameters() if p.grad is not None) and len(fast) > 8


def test_the_last_layer_computed_at_the_state_positions_only_is_exact():
    for switches in ({}, dict(layers="all", n_layer=1), dict(layers="all"), dict(n_layer=3), dict(capacity=0.5), dict(selection="fixed")):
        for training in (True, False):
            model = build(training, **switches)
            batch = make_batch()
            history = [batch[k] for k in ("states", "actions", "rewards", "rtg", "timesteps", "mask")]
            whole = model.hidden(*history, None, acting=not training)[0][:, 1::3]
            assert (model(**batch) - model.predict(whole))[batch["mask"]].abs().max() < 1e-12


# --------------------------------------------------------------------------- how many, and which

def test_exactly_k_tokens_are_kept_the_best_by_weight_and_only_real_ones():
    """The released code keeps those strictly above the k-th largest weight: k - 1 of them, and none at all for k = 1."""
    seen = set()
    for seed in range(8):
        layer = build(seed=seed).blocks[1]
        torch.nn.init.normal_(layer.hyper.last.bias, std=2.0)
        x, valid = tokens(seed=seed)
        keep = layer(x, valid, acting=False)[1]["keep"]
        for b in range(B):
            real = x[b, valid[b]]
            k = slow_k(layer, real)
            assert keep[b].nonzero()[:, 0].tolist() == slow_top(layer.router(real)[:, 0].tolist(), k)
            seen.add((k, len(real)))
    assert (1, 3) in seen and any(k == n for k, n in seen) and len({k for k, _ in seen}) > 4


def test_equal_weights_still_give_exactly_k_tokens_the_earliest():
    layer = build(selection="fixed").blocks[1]
    torch.nn.init.zeros_(layer.router.weight)
    x, valid = tokens()
    keep = layer(x, valid, acting=False)[1]["keep"]
    assert keep.tolist() == [[i < max(round(1.5 * n), 1) for i in range(3 * K)] for n in RAGGED]


def test_the_pooled_hypernetwork_reads_the_mean_real_token_and_the_flattened_one_all_of_them_in_a_row():
    x, valid = tokens()
    pooled, flat = build().blocks[1].hyper, build(hyper_input="flattened").blocks[1].hyper
    for b in range(B):
        want = pooled.last(F.leaky_relu(pooled.first(x[b, valid[b]].mean(0)))).sigmoid()
        assert (pooled(x, valid, "window")[b] - want).abs() < 1e-12
        row = torch.zeros(3 * K * D, dtype=torch.float64)       # shorter histories are padded right with zeros
        row[: valid[b].sum() * D] = x[b, valid[b]].flatten()
        assert (flat(x, valid, "window")[b] - flat.last(F.leaky_relu(flat.first(row))).sigmoid()).abs() < 1e-12
    short = slice(0, 3 * 2)
    assert torch.allclose(flat(x[:, short], valid[:, short], "window")[3], flat(x, valid, "window")[3])


@pytest.mark.parametrize("hyper_input", ["pooled", "flattened"])
def test_strategy_prefix_decides_for_every_token_as_strategy_window_would_if_the_sequence_ended_there(hyper_input):
    """Table 6 (2). The decision of a token never changes afterwards, so training and acting agree and no predictor is needed."""
    model = build(strategy="prefix", hyper_input=hyper_input)
    layer, whole = model.blocks[1], build(hyper_input=hyper_input).blocks[1]
    whole.load_state_dict(layer.state_dict(), strict=False)
    x, valid = tokens((K,) * B)
    keep = layer(x, valid, acting=False)[1]["keep"]
    for i in range(3 * K):
        upto = slice(0, i + 1)
        assert torch.equal(keep[:, i], whole(x[:, upto], valid[:, upto], acting=False)[1]["keep"][:, i])
    assert keep[:, 0].all() and 0 < keep[:, 1:].sum() < keep[:, 1:].numel()
    assert layer.aux is None and torch.equal(keep, layer(x, valid, acting=True)[1]["keep"])


def test_strategy_token_decides_for_each_token_by_itself_alone():
    """Table 6 (1): a sequence of one token, of which the hypernetwork keeps round(sigmoid(H(x_i))), nothing or all."""
    layer = build(strategy="token").blocks[1]
    x, valid = tokens()
    keep = layer(x, valid, acting=False)[1]["keep"]
    h = layer.hyper
    for b in range(B):
        for i in range(3 * K):
            assert keep[b, i] == (valid[b, i] and h.last(F.leaky_relu(h.first(x[b, i]))) > 0)
    assert torch.equal(keep, layer(x, valid, acting=True)[1]["keep"]) and 0 < keep.sum() < valid.sum() and layer.aux is None


def test_a_fixed_share_is_kept_whatever_the_tokens_say_and_without_a_hypernetwork():
    """Table 2, row 2: half the tokens."""
    for share in (0.5, 0.25):
        model = build(selection="fixed", fixed_k=share)
        kept = model.selected(make_batch()).sum(-1)
        assert kept.tolist() == [[max(round(3 * n * share), 1) for n in RAGGED]]
        assert not any("hyper" in name for name, _ in model.named_parameters()) and model.blocks[1].aux is not None


def test_without_selection_the_model_is_the_decision_transformer_of_the_same_weights():
    """Table 2, row 1."""
    model = build(selection="none")
    same = {k: getattr(model.cfg, k) for k in dt.Config.__dataclass_fields__ if hasattr(model.cfg, k)}
    plain = dt.Model(dt.Config(**same)).double()
    plain.load_state_dict(model.state_dict())
    batch = make_batch()
    assert (model(**batch) - plain(**batch))[batch["mask"]].abs().max() < 1e-12
    assert (model.loss(batch)[0] - plain.loss(batch)[0]).abs() < 1e-7 and list(model.loss(batch)[1]) == ["loss"]


def test_every_second_layer_is_a_mixer_layer_or_all_are():
    kinds = {layers: "".join("m" if isinstance(b, dm.MixerLayer) else "s" for b in build(n_layer=6, layers=layers).blocks)
             for layers in ("alternating", "all")}
    assert kinds == {"alternating": "smsmsm", "all": "mmmmmm"}


# --------------------------------------------------------------------------- acting

def test_acting_follows_the_auxiliary_predictor_which_sees_one_token_at_a_time():
    """Algorithm 2. The router still weighs what the predictor lets through; rank and k play no part."""
    layer = build().blocks[1]
    x, valid = tokens()
    y, note = layer(x, valid, acting=True)
    chosen = [[i for i in range(3 * n) if layer.aux(x[b, i])[1] > layer.aux(x[b, i])[0]] for b, n in enumerate(RAGGED)]
    assert [row.nonzero()[:, 0].tolist() for row in note["keep"]] == chosen
    assert (y - slow_layer(layer, x, valid, chosen))[valid].abs().max() < 1e-12


def test_a_layer_whose_predictor_chooses_nothing_passes_everything_on_and_all_if_it_chooses_all(monkeypatch):
    """And no query is left without a key: a softmax over nothing is NaN in some kernels, and 0 times NaN is NaN."""
    attend = F.scaled_dot_product_attention

    def checked(q, k, v, mask, *args, **kwargs):
        assert mask is None or mask.any(-1).all()
        return attend(q, k, v, mask, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    layer = build().blocks[1]
    x, valid = tokens()
    for bias, chosen in ((-50.0, [[] for _ in RAGGED]), (50.0, [list(range(3 * n)) for n in RAGGED])):
        with torch.no_grad():
            layer.aux[2].bias.copy_(torch.tensor([0.0, bias]))
        for rows in (None, slice(1, None, 3)):
            y, want = layer(x, valid, True, rows)[0], slow_layer(layer, x, valid, chosen)
            assert (y - (want if rows is None else want[:, rows]))[valid if rows is None else valid[:, rows]].abs().max() < 1e-12


def test_training_sees_the_whole_window_and_acting_does_not():
    """In training mode the future moves a prediction through the choice of tokens, as in the paper; in evaluation mode it must not."""
    batch = make_batch((K,) * B)
    changed = dict(batch, states=batch["states"].clone())
    changed["states"][:, -1] += 5
    for training in (True, False):
        moved = [(m(**batch) - m(**changed))[:, :-1].abs().max() > 1e-9 for m in (build(training, seed=s, n_layer=4) for s in range(4))]
        assert any(moved) == training


def test_without_the_predictor_acting_judges_each_token_among_those_before_it():
    """Table 2, row 3. The paper does not say how; this way a decision stays made and the prediction stays causal."""
    model = build(aux=False)
    layer, prefix = model.blocks[1], build(strategy="prefix").blocks[1]
    prefix.load_state_dict(layer.state_dict())
    x, valid = tokens()
    assert torch.equal(layer(x, valid, acting=True)[0], prefix(x, valid, acting=True)[0])
    assert not torch.equal(layer(x, valid, acting=True)[1]["keep"], layer(x, valid, acting=False)[1]["keep"])
    assert len(model.param_groups(0.1)) == 1 and "aux" not in model.loss(make_batch())[1]


def test_the_predictor_learns_the_selection_by_cross_entropy_and_its_loss_reaches_nothing_else():
    """Eq. 5, over the real tokens; the losses of the two mixer layers add up, the log has their means."""
    model, without = build(n_layer=4), build(n_layer=4, aux=False)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if ".aux." not in k})
    batch, entered, error, right = make_batch(), {}, [], []
    valid = batch["mask"].repeat_interleave(3, 1)
    for i in (1, 3):
        model.blocks[i].register_forward_hook(lambda layer, inputs, _: entered.update({layer: inputs[0]}))
    selected = model.selected(batch)
    for (layer, x), keep in zip(entered.items(), selected, strict=True):
        for b, i in valid.nonzero().tolist():
            guess = layer.aux(x[b, i])
            error.append(-guess.log_softmax(-1)[int(keep[b, i])])
            right.append(int(guess.argmax() == keep[b, i]))
    total, log = model.loss(batch)
    assert len(error) == 2 * valid.sum() and (log["aux"] - torch.stack(error).mean()).abs() < 1e-12
    assert (total - 2 * log["aux"] - without.loss(batch)[0]).abs() < 1e-7 and abs(float(log["aux_accuracy"]) - sum(right) / len(right)) < 1e-6
    ours, theirs = gradients(model, batch), gradients(without, batch)
    assert all((ours[k] - g).abs().max() < 1e-12 for k, g in theirs.items()) and ours["blocks.1.aux.0.weight"].abs().max() > 0


def test_the_predictor_has_a_parameter_group_of_its_own():
    """So that the trainer clips and paces it apart from the model: released, its gradients inflated the norm that clips all others."""
    model = build(n_layer=4)
    rest, aux = model.param_groups(0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in aux["params"]} == {f"blocks.{i}.aux.{j}.{k}" for i in (1, 3) for j in (0, 2) for k in ("weight", "bias")}
    assert {id(p) for p in rest["params"] + aux["params"]} == set(names) and len(names) == len(rest["params"]) + len(aux["params"])
    assert (rest["weight_decay"], rest["lr_scale"], aux["weight_decay"], aux["lr_scale"]) == (0.1, 1.0, 0.0, 0.1)


# --------------------------------------------------------------------------- how k learns

def test_the_gate_that_teaches_k_changes_no_output():
    """Straight-through: 0 or 1 going forward. The unselected tokens that fill up a short row are computed and thrown away."""
    for switches in ({}, dict(layers="all"), dict(strategy="prefix"), dict(strategy="token")):
        batch, outputs = make_batch(), []
        for gate in (dict(k_margin=1), dict(k_margin=2), dict(k_margin=50), dict(k_gradient="none")):
            outputs.append(build(**switches, **gate)(**batch)[batch["mask"]])
        assert all((y - outputs[0]).abs().max() < 1e-12 for y in outputs)


def test_k_feels_what_the_tokens_around_the_boundary_would_gain_or_lose():
    """d loss / d k is the ramp's slope 1 / (2 margin) times, summed over the 2 * margin tokens ranked around k, how the loss moves
    when x_i turns into w_i Z_i. Z of an unselected token: what the block makes of it behind the selected ones."""
    layer = build(k_margin=2).blocks[1]
    torch.nn.init.zeros_(layer.hyper.last.weight)
    share = torch.full((1,), 0.52, dtype=torch.float64)
    layer.hyper.last.bias = torch.nn.Parameter(share.logit())
    x, valid = tokens((K,))
    v = torch.randn(x.shape[1], D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (layer(x, valid, acting=False)[0][0] * v).sum().backward()       # d loss / d x'_i is v_i
    w, n = layer.router(x[0])[:, 0], x.shape[1]
    order = sorted(range(n), key=lambda i: -w[i].item())
    k = round(0.52 * n)                                              # 6 of 12, from 6.24
    near = [i for r, i in enumerate(order) if abs(0.52 * n - r - 0.5) < 2]
    assert (k, len(near)) == (6, 4)
    picked = slow_top(w.tolist(), k)
    rest = [i for i in range(n) if i in near and i not in picked]
    z = dict(zip(picked + rest, slow_block(layer, x[0, picked + rest]), strict=True))
    slope = sum(v[i] @ (w[i] * z[i] - x[0, i]) for i in near) / 4
    assert (layer.hyper.last.bias.grad - slope * n * share * (1 - share)).abs() < 1e-10


def test_static_shapes_change_neither_outputs_nor_gradients():
    """A CUDA graph needs every row as long as the window (or a bucket); without one, rows are as long as the fullest needs."""
    batch = make_batch()
    for switches in ({}, dict(layers="all")):
        eager, static = build(**switches), build(**switches, capacity=1.0)
        a, b = gradients(eager, batch), gradients(static, batch)
        assert (eager(**batch) - static(**batch))[batch["mask"]].abs().max() < 1e-12
        assert all((a[k] - b[k]).abs().max() < 1e-11 for k in a)


class NoReading(TorchDispatchMode):
    """Stops at what a CUDA graph cannot hold: a number read back from the device, or a shape that depends on numbers."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().removeprefix("aten::").split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        return op(*args, **(kwargs or {}))


def test_nothing_is_read_back_from_the_device_where_shapes_are_static():
    def step(**switches):
        model, batch = build(**switches), make_batch()
        with NoReading():
            model.loss(batch)[0].backward()

    for switches in (dict(capacity=1.0), dict(capacity=0.5), dict(capacity=0.5, k_cost=0.1), dict(selection="fixed")):
        step(**switches)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        step()


def test_a_k_above_its_ceiling_still_feels_the_loss():
    """Cutting k and its gradient together would leave it where it is for ever."""
    model, batch = build(capacity=0.25, k_start=0.8), make_batch()
    model.loss(batch)[0].backward()
    for block in model.blocks:
        if hasattr(block, "hyper"):
            assert block.hyper.last.bias.grad.abs() > 0


def test_capacity_is_a_ceiling_on_k():
    model, batch = build(capacity=0.25), make_batch()
    free = build()
    for m in (model, free):
        torch.nn.init.constant_(m.blocks[1].hyper.last.bias, 3.0)
    want, got = free.selected(batch)[0].sum(-1), model.selected(batch)[0].sum(-1)
    assert got.tolist() == [min(k, 3) for k in want.tolist()] and want.max() > 3


def task(kind, n, g):
    """n windows of K states. many: every action is a product of two numbers of its state, which takes the MLP; few: it is linear."""
    s = torch.randn(n, 8, 4, generator=g)
    product = torch.stack([s[..., 0] * s[..., 1], s[..., 2].abs() - 0.8], -1)
    return dict(states=s, actions=(product if kind == "many" else 0.5 * s[..., :2]).tanh(), rewards=torch.zeros(n, 8, 1),
                rtg=torch.zeros(n, 8, 1), timesteps=torch.arange(8).expand(n, 8), mask=torch.ones(n, 8, dtype=torch.bool))


def train(kind, start, steps, **switches):
    """[(loss, tokens kept of 8)] at the first and the last step of one mixer layer over 8 state tokens, from the share start of them."""
    torch.manual_seed(0)
    model = dm.Model(dm.Config(state_shape=(4,), act_dim=2, context_len=8, max_ep_len=8, n_layer=1, n_head=1, d=32, dropout=0.0,
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
    """Released, w starts around 0: about half the tokens selected come back with their sign flipped, and all of them small."""
    for share, bias in ((0.5, 1.0), (0.1, 0.0)):
        model = dm.Model(dm.Config(state_shape=(S,), act_dim=A, k_start=share, router_bias=bias))
        assert all((b.hyper.last.bias.sigmoid() - share).abs() < 1e-6 and b.router.bias == bias for b in model.blocks[1::2])
        log = model.loss(make_batch((20,) * B, 20, torch.float32))[1]
        assert all(abs(float(log[f"kept_{i}"]) - 60 * share) < 3 for i in (1, 2, 3))


def test_k_cost_is_the_share_of_tokens_kept_added_in_training_only():
    batch = make_batch((K,) * B)
    for training in (True, False):
        free, priced = build(training, n_layer=4), build(training, n_layer=4, k_cost=0.5)
        entered = {}
        for i in (1, 3):
            free.blocks[i].register_forward_hook(lambda layer, inputs, _, entered=entered: entered.update({layer: inputs[0]}))
        (a, log_a), (b, log_b) = free.loss(batch), priced.loss(batch)
        shares = torch.cat([layer.hyper(x, torch.ones(B, 3 * K, dtype=torch.bool), "window") for layer, x in entered.items()])
        assert torch.equal(log_a["loss"], log_b["loss"]) and len(shares) == 2 * B
        assert (b - a - (0.5 * shares.mean() if training else 0)).abs() < 1e-7


def test_as_released_the_hypernetwork_gets_no_gradient_and_by_default_it_does():
    batch = make_batch()
    for switches, moves in ((dict(hyper_input="flattened", k_gradient="none"), False), ({}, True), (dict(hyper_input="flattened"), True)):
        grads = gradients(build(**switches), batch)
        assert all((g.abs().max() > 0) == moves for name, g in grads.items() if ".hyper." in name)


# --------------------------------------------------------------------------- what it reports and costs

def test_the_log_holds_the_mean_number_of_tokens_kept_in_each_mixer_layer():
    """Table 10. Tensors, so that logging never waits for the device."""
    for training in (True, False):
        model, batch = build(training, n_layer=4), make_batch()
        log, kept = model.loss(batch)[1], model.selected(batch)
        assert kept.shape == (2, B, 3 * K) and not (kept & ~batch["mask"].repeat_interleave(3, 1)).any()
        assert [float(log["kept_1"]), float(log["kept_2"])] == pytest.approx(kept.sum(-1).double().mean(-1).tolist())
        assert all(isinstance(v, torch.Tensor) and not v.requires_grad for v in log.values())


def count(model, part):
    return sum(p.numel() for name, p in model.named_parameters() if part in f".{name}")


def test_parameters_at_the_papers_size_by_hand():
    """Six blocks hold 4.74 million. The released hypernetworks hold five times as many, pooled ones a twelfth."""
    d, model = 256, dm.Model(dm.Config())
    block = (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d) + 4 * d
    router, aux, pooled = d + 1, (d * d // 2 + d // 2) + 2 * (d // 2) + 2, (512 * d + 512) + 512 + 1
    assert (6 * block, 3 * aux, pooled) == (4_738_560, 99_462, 132_097)
    assert count(model, ".mixer.") == 6 * (4 * d * d + 4 * d)
    assert (count(model, ".router."), count(model, ".aux."), count(model, ".hyper.")) == (3 * router, 3 * aux, 3 * pooled)
    assert count(model, ".blocks.") == 6 * block + 3 * (router + aux + pooled)
    embeddings = (11 + 1 + 3) * d + 3 * d + 1000 * d + 2 * d
    assert count(model, ".") == count(model, ".blocks.") + embeddings + 2 * d + 3 * d + 3
    assert count(dm.Model(dm.Config(hyper_input="flattened")), ".hyper.") == 3 * 7_865_345


def macs(model, batch):
    """Multiply-accumulates of the linear layers: some attention kernels are counted and some are not."""
    with FlopCounterMode(display=False) as counter:
        model(**batch)
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.addmm", "aten.mm")) // 2


def test_tokens_passed_by_are_multiplications_not_done():
    """With half the tokens kept, mixer layers cost half, and the last of six asks at states only: 0.73 of six full layers. (47 % saved,
    Table 3, would need about 4 tokens of 60 kept.)"""
    L, d, k = 60, 32, 30
    sizes = dict(n_layer=6, n_head=4, d=d, dropout=0.0)
    torch.manual_seed(0)
    batch = make_batch((20,), steps=20, dtype=torch.float32)
    embed, head = (S + A + 1) * 20 * d, 20 * d * A
    common = dict(state_shape=(S,), act_dim=A, **sizes)
    half = dm.Model(dm.Config(selection="fixed", aux=False, **common)).train()

    def layer(tokens, asking=None):         # keys and values for all its tokens, the rest for those that ask
        return 2 * tokens * d * d + 10 * (asking or tokens) * d * d

    router = 3 * L * d + (2 * k + 20) * d       # to rank all, and again with a gradient for those that it weighs
    want = 3 * layer(L) + 2 * layer(k) + layer(k, 20) + router + embed + head       # all 20 states ask
    assert macs(half, batch) == want
    full = macs(dm.Model(dm.Config(selection="none", **common)), batch)
    assert full == 5 * layer(L) + layer(L, 20) + embed + head
    assert 0.72 < want / (6 * layer(L)) < 0.74
    fixed = [dm.Model(dm.Config(selection="fixed", fixed_k=share, aux=False, **common)) for share in (0.1, 0.3, 0.6, 1.0)]
    cost = [macs(model.train(), batch) for model in fixed]
    assert cost == sorted(cost) and cost[0] < 0.65 * full


# --------------------------------------------------------------------------- settings

def test_presets_are_the_papers_table_7_and_the_released_targets():
    common = dm.PRESETS["*"]
    table_7 = dict(context_len=20, batch_size=512, lr=1e-3, weight_decay=1e-4, n_layer=6, n_head=4, d=256, activation="gelu", dropout=0.1)
    assert table_7.items() <= common.items() and common["clip"] == 0.25 and common["steps"] == 25_000 and common["warmup"] == 250
    scales = {k: v["rtg_scale"] for k, v in dm.PRESETS.items() if "rtg_scale" in v and k not in ("small", "atari")}
    assert scales == dict(antmaze=1, maze2d=10, kitchen=100, pen=1000, hammer=1000, door=100, relocate=1000)
    targets = {k: v["targets"] for k, v in dm.PRESETS.items() if "targets" in v}
    assert targets == dict(
        hopper=(3600, 7200, 36000, 72000), halfcheetah=(6000, 12000, 60000, 120000), walker2d=(5000, 10000, 50000, 100000),
        antmaze=(1, 10, 100, 1000, 100000), maze2d=(300, 200, 150, 100, 50, 20), kitchen=(500, 250), pen=(12000, 6000),
        hammer=(12000, 6000, 3000), door=(2000, 1000, 500), relocate=(3000, 1000))
    sizes = {k: common[k] for k in dm.Config.__dataclass_fields__ if k in common}
    assert sizes.items() <= vars(dm.Config()).items()       # the default model is the paper's


@pytest.mark.parametrize("switches", [
    dict(k_cost=0.1, selection="fixed"), dict(k_cost=0.1, k_gradient="none"), dict(hyper_input="flattened", strategy="token"),
    dict(capacity=0.5, strategy="prefix"), dict(capacity=0.0), dict(capacity=1.5), dict(k_margin=0), dict(fixed_k=0.0), dict(k_start=1.0),
    dict(selection="fixed", strategy="token"), dict(selection="fixed", capacity=0.5)])
def test_switches_that_contradict_each_other_are_refused_in_a_sentence(switches):
    with pytest.raises(ValueError, match=" "):
        build(**switches)


def test_the_choice_is_made_in_float32_under_bfloat16_autocast():
    """bfloat16 has 8 bits for a weight: near neighbours tie, and another token is kept."""
    model, batch = build(dtype=torch.float32), make_batch(dtype=torch.float32)
    layer = copy.deepcopy(model.blocks[1])
    x, valid = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        total, log = model.loss(batch)
        keep = layer(x.float(), valid, acting=False)[1]["keep"]
    assert torch.equal(keep, layer(x.float(), valid, acting=False)[1]["keep"])
    assert total.dtype == torch.float32 and total.isfinite()
