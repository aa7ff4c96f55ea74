"""StARformer as a specification: groups, the two transformers and how they are tied, for vectors and frames.

    pytest tests/test_06_starformer.py
"""
import itertools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.starformer import PRESETS, Config, Model

S, A, K, B = 4, 2, 5, 2
CONNECT = ("layerwise", "fusion", "stack")
# 3 x 4 patches: not a square, so that rows and columns cannot be taken for each other
FRAMES = dict(state_shape=(2, 36, 48), patch=12)
# Table 2: P+C P+P P+_ C+C C+P C+_
VARIANTS = list(itertools.product(("patch", "conv"), ("conv", "patch", "none")))


def build(stir=0.3, **switches):
    """A small double-precision model in eval mode.

    stir moves it off its initialisation, where both position tables are zero.
    """
    torch.manual_seed(0)
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, n_layer=2, n_head=2, d=12, dropout=0.0, step_d=8,
                 step_heads=2)
    model = Model(Config(**sizes | switches)).double().eval()
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(stir * torch.randn_like(p))
    return model


def build_frames(**switches):
    """The same on frames, stirred less: thousands of pixels add up, and a full tanh hides changes."""
    return build(stir=0.05, **FRAMES | switches)


def make_batch(discrete=False, steps=K, shape=None):
    g = torch.Generator().manual_seed(1)
    double = dict(generator=g, dtype=torch.float64)
    if discrete:
        actions = torch.randint(A, (B, steps), generator=g)
    else:
        actions = torch.rand(B, steps, A, **double) * 2 - 1
    states, rewards, rtg = (torch.randn(B, steps, size, **double) for size in (S, 1, 1))
    if shape:
        states = torch.randint(256, (B, steps, *shape), generator=g, dtype=torch.uint8)
    timesteps = torch.arange(steps).expand(B, steps)
    return dict(states=states, actions=actions, rewards=rewards, rtg=rtg, timesteps=timesteps)


def groups(model, batch):
    return model.groups(*(batch[k] for k in ("states", "actions", "rewards", "rtg")))


def parameters(model):
    return {name: p.numel() for name, p in model.named_parameters()}


# ------------------------------------------------------------ the equations, written plainly

def plain_norm(layer, x):
    x = x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * layer.weight + layer.bias


def plain_layer(layer, x, sees):
    """A pre-norm transformer layer (Eq. 1) on a list of tokens, every one of them.

    sees(i): how many tokens token i may read.
    """
    mixer, d = layer.mixer, len(x[0])
    size, y = d // mixer.n_head, [plain_norm(layer.ln1, token) for token in x]
    maps = list(zip(mixer.qkv.weight.split(d), mixer.qkv.bias.split(d), strict=True))
    q, k, v = ([w @ token + bias for token in y] for w, bias in maps)
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


def plain_patches(embed, frame):
    """Every patch's token: its pixels times the weights that stand for them, patches row by row."""
    C, height, width = frame.shape
    p, tokens = embed.patch, []
    for top in range(0, height, p):
        for left in range(0, width, p):
            places = itertools.product(range(C), range(top, top + p), range(left, left + p))
            pixels = [frame[place].double() / 255 for place in places]
            tokens.append(embed.fc.weight @ torch.stack(pixels) + embed.fc.bias)
    return tokens


def plain_convolutions(embed, frame):
    """The DQN's layers on one frame, scaled first, by matrix products over cut-out windows."""
    x = frame.double() / 255
    for layer, stride in ((embed[0], 4), (embed[2], 2), (embed[4], 1)):
        k = layer.kernel_size[0]
        rows, columns = ((n - k) // stride + 1 for n in x.shape[1:])
        windows = [x[:, stride * i: stride * i + k, stride * j: stride * j + k].flatten()
                   for i in range(rows) for j in range(columns)]
        y = torch.stack([layer.weight.flatten(1) @ window + layer.bias for window in windows], 1)
        x = y.relu().view(-1, rows, columns)
    return embed[-1].weight @ x.flatten() + embed[-1].bias


def plain_group(model, batch, b, t):
    """Z_t^0 = {a_{t-1}, r_{t-1} or R_t, s_t^1 .. s_t^n} (Section 4.2).

    On frames a tanh ends a reward, numbers of an action, and convolutions.
    """
    cfg, z, state = model.cfg, [], batch["states"][b, t]
    end = torch.tanh if model.frames else (lambda x: x)
    if cfg.use_actions:
        none = torch.tensor(A) if cfg.discrete else torch.zeros(A).double()
        a = model.embed_action(batch["actions"][b, t - 1] if t else none)
        z.append(a if cfg.discrete else end(a))
    if cfg.condition != "none":
        reward = batch["rewards"][b, t - 1] if t else torch.zeros(1).double()
        z.append(end(model.embed_condition(batch["rtg"][b, t] if cfg.condition == "rtg" else reward)))
    embed = model.embed_parts
    if cfg.step_state == "conv":
        return z + [end(plain_convolutions(embed, state) if model.frames else embed(state))]
    if model.frames:
        parts = plain_patches(embed, state)
    else:
        parts = [embed(state[i: i + 1]) for i in range(S)]
    return z + [part + model.embed_spatial[i] for i, part in enumerate(parts)]


def plain_state(model, state):
    """h_t without its position (Eq. 5)."""
    if not model.frames:
        return model.embed_state(state)
    if model.cfg.seq_state == "conv":
        return torch.tanh(plain_convolutions(model.embed_state, state))
    cut, _, last = model.embed_state
    return torch.tanh(last.weight @ torch.cat(plain_patches(cut, state)) + last.bias)


def plain_model(model, batch):
    cfg, rows = model.cfg, []
    for b in range(B):
        groups, time = [plain_group(model, batch, b, t) for t in range(K)], model.embed_time
        n = len(groups[0])
        h = None
        if cfg.seq_state != "none":                             # Eq. 5
            h = [plain_state(model, batch["states"][b, t]) + time[t] for t in range(K)]

        def represent(fold, groups, time=time):                 # Eq. 4
            g = [fold.fc(torch.cat([plain_norm(fold.ln_in, token) for token in z])) for z in groups]
            return [plain_norm(fold.ln_out, g[t]) + time[t] for t in range(K)]

        def woven(g, h):                                        # Eq. 6
            return [token for pair in zip(g, h, strict=True) for token in pair]

        if cfg.connect == "stack":
            for step in model.steps:
                groups = [plain_layer(step, z, lambda i, n=n: n) for z in groups]
            g = represent(model.folds[0], groups)
            y = woven(g, h) if h else g
            for sequence in model.sequence:
                y = plain_layer(sequence, y, lambda i: i + 1)
            h = y[1::2] if h else y
        else:
            for step, fold, sequence in zip(model.steps, model.folds, model.sequence, strict=True):
                groups = [plain_layer(step, z, lambda i, n=n: n) for z in groups]
                g = represent(fold, groups)
                if h is None:                                   # the first of the layers without h
                    h = plain_layer(sequence, g, lambda i: i + 1)
                elif cfg.connect == "fusion" or cfg.seq_state == "none":
                    h = plain_layer(sequence, [a + c for a, c in zip(g, h, strict=True)], lambda i: i + 1)
                else:
                    h = plain_layer(sequence, woven(g, h), lambda i: i + 1)[1::2]   # y_{2i}, counted from 1
        y = torch.stack([model.head(plain_norm(model.ln_f, token)) for token in h])
        rows.append(y if cfg.discrete else torch.tanh(y))
    return torch.stack(rows)


CASES = [dict(connect=connect) for connect in CONNECT]
CASES += [dict(condition="rtg"), dict(condition="none"), dict(use_actions=False), dict(discrete=True)]
CASES += [dict(step_heads=4, n_head=3, activation="relu"), dict(step_state="conv"), dict(seq_state="none")]
CASES += [dict(seq_state="none", connect="stack")]


@pytest.mark.parametrize("switches", CASES, ids=str)
def test_the_model_is_its_equations_written_as_loops_over_groups_tokens_and_heads(switches):
    """Eq. 1 and 4 to 6. The plain version computes all that comes out at g: leaving out its MLP is exact."""
    model, batch = build(**switches), make_batch(switches.get("discrete", False))
    with torch.no_grad():
        assert torch.allclose(model(**batch), plain_model(model, batch), atol=1e-11)


FRAME_CASES = [dict(step_state=step, seq_state=seq) for step, seq in VARIANTS]
FRAME_CASES += [dict(connect="stack"), dict(connect="stack", seq_state="none"), dict(connect="fusion")]
FRAME_CASES += [dict(condition="rtg", discrete=True), dict(condition="none", discrete=True)]
FRAME_CASES += [dict(use_actions=False)]


@pytest.mark.parametrize("switches", FRAME_CASES, ids=str)
def test_on_frames_too(switches):
    """The six variants of Table 2 and the three connections; patches by loops over pixels."""
    model = build_frames(**switches)
    batch = make_batch(switches.get("discrete", False), shape=FRAMES["state_shape"])
    with torch.no_grad():
        y = model(**batch)
        assert torch.allclose(y, plain_model(model, batch), atol=1e-11)
        darker = batch["states"].clone()
        darker[:, 2] //= 2
        moved = (model(**batch | {"states": darker}) - y).abs().amax((0, 2))
        assert moved.tolist() != [0.0] * K                      # the states do come through


# ------------------------------------------------------------ frames

def test_patches_stand_row_by_row_in_the_group():
    """One lit pixel moves one token, that of the patch it lies in, whatever its channel."""
    model = build_frames()
    embed, dark = model.embed_parts, torch.zeros(1, 1, *FRAMES["state_shape"], dtype=torch.uint8)
    for channel, y, x in ((0, 0, 0), (1, 35, 47), (0, 11, 12), (1, 12, 11), (0, 30, 5)):
        lit = dark.clone()
        lit[0, 0, channel, y, x] = 255
        moved = (embed(lit) - embed(dark))[0, 0].abs().amax(-1) > 0
        assert moved.nonzero().flatten().tolist() == [y // 12 * 4 + x // 12]
        difference = (embed(lit) - embed(dark))[0, 0, y // 12 * 4 + x // 12]
        assert torch.allclose(difference, embed.fc.weight[:, channel * 144 + y % 12 * 12 + x % 12])


@pytest.mark.parametrize("step, seq", VARIANTS)
def test_frames_may_come_as_bytes_or_as_numbers_from_0_to_255(step, seq):
    model = build_frames(step_state=step, seq_state=seq).float()
    batch = make_batch(shape=FRAMES["state_shape"])
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert torch.equal(model(**batch | {"states": batch["states"].to(dtype)}), model(**batch))


def test_bfloat16_tells_all_256_greys_apart():
    """255ths have more digits than bfloat16 keeps, but no two of them are rounded to the same number."""
    model, seen = build_frames().float(), []
    frames = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1, 1).repeat(1, 1, *FRAMES["state_shape"])
    cut, whole = model.embed_parts, model.embed_state
    whole[0].register_forward_hook(lambda module, args, y: seen.append(y[:, 0, 0, 0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for layer in (cut.fc, whole[0]):                        # each gives its first pixel
            layer.weight.zero_().view(len(layer.weight), -1)[0, 0] = 1.0
            layer.bias.zero_()
        seen.append(cut(frames)[0, :, 0, 0])
        whole(frames)
    for x in seen:
        assert x.dtype == torch.bfloat16 and (x.diff() > 0).all()


def test_a_side_that_the_patch_does_not_divide_is_refused_and_so_are_patches_of_a_vector():
    for patch in (7, 16, 0, -12):
        for switches in (dict(), dict(step_state="conv", seq_state="patch")):
            with pytest.raises(ValueError, match="does not divide"):
                build_frames(**dict(patch=patch) | switches)
    assert build_frames(patch=7, step_state="conv")             # nothing is cut
    with pytest.raises(ValueError, match="for frames"):
        build(seq_state="patch")


@pytest.mark.parametrize("switches, words", [
    (dict(connect="fusion", seq_state="none"), "no h to add g to"),
    (dict(connect="stack", n_layer=1), "is layerwise"),
    (dict(n_head=5), "d=12 by n_head=5"),
    (dict(step_heads=3), "step_d=8 by step_heads=3"),
    (dict(n_layer=0), "at least 1"),
    (dict(step_heads=0), "at least 1"),
    (dict(context_len=-1), "at least 1"),
    (dict(state_shape=(2, 28, 84), patch=7), "36 x 36"),
], ids=str)
def test_a_switch_without_effect_and_a_size_without_a_model_are_refused_with_the_reason(switches, words):
    with pytest.raises(ValueError, match=words):
        build(**switches)


def test_what_those_switches_need_makes_them_welcome():
    build(connect="fusion", n_layer=1)
    build(connect="stack", seq_state="none")
    build(seq_state="none", n_layer=1)
    build_frames(state_shape=(2, 28, 84), patch=7, seq_state="patch")       # nothing is convolved


@pytest.mark.parametrize("step, seq, connect", [(*v, connect) for v in VARIANTS for connect in CONNECT
                                                if (v[1], connect) != ("none", "fusion")])
def test_every_variant_sees_all_up_to_its_step_and_nothing_later(step, seq, connect):
    """By gradient: the prediction at t moves with s up to t, a and r before t.

    Frames come as numbers, since bytes have no gradient.
    """
    model = build_frames(step_state=step, seq_state=seq, connect=connect)
    batch = make_batch(shape=FRAMES["state_shape"])
    inputs = {k: batch[k].double().requires_grad_() for k in ("states", "actions", "rewards")}
    y = model(**batch | inputs)
    for t in range(K):
        read = torch.autograd.grad(y[:, t].sum(), list(inputs.values()), retain_graph=True)
        for name, gradient in zip(inputs, read, strict=True):
            past = t + (name == "states")
            reads = (gradient.flatten(2).abs().amax((0, 2)) > 0).tolist()
            assert reads == [True] * past + [False] * (K - past), (name, t)


def test_a_frames_whole_and_its_patches_have_weights_of_their_own():
    """Also in P+P and C+C, where the same picture is read twice in the same way."""
    for step, seq in (("patch", "patch"), ("conv", "conv")):
        model = build_frames(step_state=step, seq_state=seq)
        parts = {id(p) for p in model.embed_parts.parameters()}
        assert parts and not parts & {id(p) for p in model.embed_state.parameters()}


# ------------------------------------------------------------ attention maps

def maps(model, batch):
    """(layers, B, K, n_head, n, n): whom each token of a step's group looks at."""
    seen = []
    hooks = [layer.mixer.register_forward_pre_hook(lambda mixer, args: seen.append(mixer.weights(args[0])))
             for layer in model.steps]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen).unflatten(1, batch["states"].shape[:2])


@pytest.mark.parametrize("switches", [dict(), FRAMES, FRAMES | dict(step_state="conv"),
                                      dict(condition="none", use_actions=False)], ids=str)
def test_maps_are_the_weights_that_the_step_transformer_uses(switches):
    """Recomputed by hand from each layer's input; and in the kernel's place they give a layer's output."""
    model = build(stir=0.1, n_layer=3, **switches)
    batch, used = make_batch(shape=switches.get("state_shape")), []
    hooks = [step.mixer.register_forward_hook(lambda module, args, y: used.append((args[0], y)))
             for step in model.steps]
    model(**batch)
    for hook in hooks:
        hook.remove()
    seen = maps(model, batch)
    n = used[0][0].shape[1]
    assert seen.shape == (3, B, K, 2, n, n)
    assert torch.allclose(seen.sum(-1), torch.ones_like(seen[..., 0]))
    for layer, (step, (x, out)) in enumerate(zip(model.steps, used, strict=True)):
        parts = list(zip(step.mixer.qkv.weight.split(8), step.mixer.qkv.bias.split(8), strict=True))
        q, k, v = ((x @ w.T + bias).view(B * K, n, 2, 4) for w, bias in parts)
        scores = torch.einsum("bihc,bjhc->bhij", q, k) / 2
        weights = seen[layer].flatten(0, 1)
        assert torch.allclose(weights, scores.exp() / scores.exp().sum(-1, keepdim=True))
        mixed = torch.einsum("bhij,bjhc->bihc", weights, v).flatten(2)
        assert torch.allclose(step.mixer.proj(mixed), out)


def test_the_actions_row_of_a_map_can_be_laid_over_the_picture():
    """What the action token sees in the last h * w columns is the patches, row by row: a picture.

    Made to look for the one bright patch, it finds it where it is.
    """
    model = build_frames(n_layer=1, step_heads=1, use_actions=True, discrete=True, condition="none")
    batch = make_batch(discrete=True, shape=FRAMES["state_shape"])
    batch["states"].zero_()
    batch["states"][:, :, :, 12:24, 36:48] = 255                # row 1, column 3
    mixer = model.steps[0].mixer
    with torch.no_grad():
        model.embed_parts.fc.weight.copy_(torch.eye(8)[:, :1].expand(8, 288) / 50 - 1 / 400)
        model.embed_spatial.zero_()
        mixer.qkv.weight.zero_()
        mixer.qkv.bias.zero_()
        mixer.qkv.bias[0] = 5.0                                 # whoever asks, asks for channel 0
        mixer.qkv.weight[8, 0] = 5.0                            # and keys tell it
    picture = maps(model, batch)[0, :, :, 0, 0, -12:].view(B, K, 3, 4)
    assert torch.equal(picture.flatten(2).argmax(-1), torch.full((B, K), 1 * 4 + 3))


# ------------------------------------------------------------ the step transformer

def test_a_group_is_the_previous_action_the_reward_and_a_token_per_number_or_patch_or_whole_state():
    for switches, n in [(dict(), S + 2), (dict(condition="rtg"), S + 2), (dict(condition="none"), S + 1),
                        (dict(use_actions=False), S + 1), (dict(step_state="conv"), 3), (FRAMES, 12 + 2),
                        (FRAMES | dict(step_state="conv"), 3)]:
        model = build(**switches)
        assert groups(model, make_batch(shape=switches.get("state_shape"))).shape == (B * K, n, 8)
        assert model.folds[0].fc.in_features == n * 8


def test_tokens_of_a_group_attend_to_each_other_without_a_mask():
    """Everything in the group of step t is known before a_t: the action reads the state, and back."""
    z = torch.randn(1, S + 2, 8).double().requires_grad_()
    y = build().steps[0](z)
    for i in range(S + 2):
        read, = torch.autograd.grad(y[0, i].square().sum(), z, retain_graph=True)
        assert (read[0].abs().amax(-1) > 0).all()


def test_the_step_transformer_knows_nothing_of_other_steps():
    """What it gives for a step does not change when the step moves on in the window."""
    model = build()
    z = torch.randn(3, S + 2, 8).double()
    assert torch.allclose(model.steps[0](z)[1], model.steps[0](z[1:2])[0])


def test_the_spatial_embedding_tells_state_numbers_apart():
    """One Linear reads all numbers; at the start, without it, swapped numbers give swapped tokens."""
    for stir in (0, 0.3):
        model, batch = build(stir=stir), make_batch()
        order = [0, 1, 2, 4, 3, 5]                              # a, r, s1, s3, s2, s4
        z = model.steps[0](groups(model, batch))
        swapped = model.steps[0](groups(model, batch | {"states": batch["states"][..., [0, 2, 1, 3]]}))
        assert torch.allclose(z[:, order], swapped) == (not stir)


@pytest.mark.parametrize("discrete", [False, True])
def test_the_reward_that_the_predicted_action_earns_is_never_read(discrete):
    """The released gym script gives r_t beside s_t in training: the label's consequence leaks in.

    Here a_{t-1} and r_{t-1} stand in the group of step t, in training mode and in evaluation alike.
    """
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
    """Also where acting cuts a long history to K steps: what came just before the window is not read."""
    model, long = build(discrete=discrete), make_batch(discrete, steps=K + 3)
    window = {k: v[:, 3:] for k, v in long.items()}
    assert torch.equal(model.act(**long), model.act(**window))
    z = groups(model, window).view(B, K, S + 2, 8)
    none = model.embed_action(torch.tensor(A)) if discrete else model.embed_action.bias
    assert torch.equal(z[:, 0, 0], none.expand(B, 8))
    assert torch.equal(z[:, 0, 1], model.embed_condition.bias.expand(B, 8))
    first = model.embed_action(window["actions"][:, 0])
    assert torch.allclose(z[:, 1, 0], first) and (first - none).abs().max() > 1e-3


def test_condition_reads_the_reward_the_return_or_neither():
    batch = make_batch()
    for condition, reads in dict(reward="rewards", rtg="rtg", none=None).items():
        model = build(condition=condition)
        y = model(**batch)
        for name in ("rewards", "rtg"):
            assert torch.equal(model(**batch | {name: batch[name] + 1}), y) == (name != reads)
    assert Config().condition == "reward"                       # the paper's default (Section 6.4)


# ------------------------------------------------------------ the sequence transformer

def test_positions_count_within_the_window():
    """Eq. 4 and 5 add the same learned e_t to g_t in every layer and to h_t once; timesteps are not read."""
    model, batch = build(), make_batch()
    assert torch.equal(model(**batch | {"timesteps": batch["timesteps"] + 100}), model(**batch))
    short = model(**{k: v[:, :3] for k, v in batch.items()})
    assert torch.allclose(short, model(**batch)[:, :3])
    torch.nn.init.zeros_(model.embed_time)
    assert (model(**batch)[:, 1:] - build()(**batch)[:, 1:]).abs().max() > 1e-3


def test_layerwise_reads_every_step_layer_and_stack_only_the_last():
    """Fig. 12: representations from several levels, or one. Fusion: the same weights, half the length."""
    sizes = {connect: parameters(build(connect=connect)) for connect in CONNECT}
    assert sizes["fusion"] == sizes["layerwise"]
    one = {name: n for name, n in sizes["layerwise"].items() if not name.startswith("folds.1")}
    assert sizes["stack"] == one
    lengths = {}
    for seq, connect in itertools.product(("conv", "none"), CONNECT):
        if (seq, connect) == ("none", "fusion"):
            continue
        model, seen = build(connect=connect, seq_state=seq), []
        for layer in model.sequence:
            layer.mixer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[1]))
        model(**make_batch())
        lengths[connect, seq] = seen
    long, short = [2 * K, 2 * K], [K, K]
    assert lengths == {("layerwise", "conv"): long, ("fusion", "conv"): short, ("stack", "conv"): long,
                       ("layerwise", "none"): short, ("stack", "none"): short}


def multiply_accumulates(model, call):
    """Of one call. The plain attention kernel is asked for: the counter does not know the CPU's fused one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        call(model)
    return counter.get_total_flops() // 2


def test_an_mlp_is_computed_only_where_a_later_layer_reads_it():
    """Counted, not timed. In layerwise form nobody reads what comes out at g: it is dropped before the MLP.

    In the stack the outputs at g feed the next layer, except in the last.
    """
    n, step_d, d = S + 2, 8, 12
    embed = K * ((S + 1 + A) * step_d + S * d)
    step = K * (n * 12 * step_d**2 + 2 * n * n * step_d)        # 4 matrices and an MLP of 8; scores, sums
    fold = K * n * step_d * d

    def layer(tokens, kept):
        return tokens * 4 * d * d + 2 * tokens * tokens * d + kept * 8 * d * d

    layers = dict(layerwise=2 * layer(2 * K, K), fusion=2 * layer(K, K),
                  stack=layer(2 * K, 2 * K) + layer(2 * K, K))
    batch = make_batch()
    for connect in CONNECT:
        model, folds = build(connect=connect), 1 if connect == "stack" else 2
        expected = embed + 2 * step + folds * fold + layers[connect] + K * d * A
        assert multiply_accumulates(model, lambda m: m(**batch)) == B * expected, connect


@pytest.mark.parametrize("switches", [dict(), dict(discrete=True), dict(seq_state="none"), FRAMES], ids=str)
def test_features_are_what_the_actions_are_predicted_from(switches):
    model = build(stir=0.1, **switches)
    batch = make_batch(switches.get("discrete", False), shape=switches.get("state_shape"))
    x = model.features(**batch)
    assert x.shape == (B, K, 12) and torch.equal(model.predict(x), model(**batch))
    y = model.head(x)
    assert torch.equal(model.predict(x), y if model.cfg.discrete else y.tanh())


# ------------------------------------------------------------ sizes and settings

def test_hopper_has_the_released_models_692367_parameters_less_two_heads_that_never_get_a_loss():
    """Counted by hand: S 11, A 3, reward, K 20, d 128 and 16, 3 layers.

    The released gym model keeps DT's unused heads for the next state and the return, 128 -> 11 and 128 -> 1;
    without them its 692,367 are our 690,819.
    """
    d, e, n = 128, 16, 1 + 1 + 11

    def layer(d):
        return 2 * 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d)

    # number, spatial, action, reward; state, time
    embed = (e + e) + 11 * e + (3 * e + e) + (e + e) + (11 * d + d) + 20 * d
    fold = 2 * e + (n * e * d + d) + 2 * d
    head = 2 * d + (d * 3 + 3)
    unused = (d * 11 + 11) + (d * 1 + 1)
    sizes = parameters(Model(Config()))
    total = embed + 3 * (layer(e) + fold + layer(d)) + head
    assert sum(sizes.values()) == total == 692_367 - unused == 690_819
    mixers = sum(size for name, size in sizes.items() if ".mixer." in name)
    assert mixers == 3 * (4 * (d * d + d) + 4 * (e * e + e)) == 201_408


def test_breakout_has_the_released_models_14447076_parameters():
    """Counted by hand: 4 frames of 84 x 84, 4 actions, reward, K 30, patch 7, d 192 and 64, 6 layers.

    Three quarters of it fold groups into g.
    """
    d, e, n = 192, 64, 1 + 1 + 144

    def layer(d):
        return 2 * 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d)

    # patches, spatial, actions and none, reward; time
    embed = (4 * 49 * e + e) + 144 * e + (4 + 1) * e + (e + e) + 30 * d
    convolutions = (4 * 64 * 32 + 32) + (32 * 16 * 64 + 64) + (64 * 9 * 64 + 64)
    fold = 2 * e + (n * e * d + d) + 2 * d
    head = 2 * d + (d * 4 + 4)
    sizes = dict(state_shape=(4, 84, 84), act_dim=4, discrete=True, context_len=30, patch=7, d=d, n_head=8,
                 step_d=e, step_heads=4, n_layer=6)
    total = embed + convolutions + (3136 * d + d) + 6 * (layer(e) + fold + layer(d)) + head

    def size(**switches):
        with torch.device("meta"):                              # shapes without numbers
            return sum(parameters(Model(Config(**sizes | switches))).values())

    assert size() == total == 14_447_076
    assert 6 * fold == 10_768_512

    # what the folds lose with one token in place of 144; the group's picture, by convolutions; h, by patches
    grouped = 6 * (n - 3) * e * d
    own = convolutions + (3136 * e + e) - (4 * 49 * e + e) - 144 * e
    cut = (4 * 49 * e + e) + (144 * e * d + d) - convolutions - (3136 * d + d)
    gone = convolutions + 3136 * d + d
    for step, seq in VARIANTS:
        expected = total + (own - grouped if step == "conv" else 0) + dict(conv=0, patch=cut, none=-gone)[seq]
        assert size(step_state=step, seq_state=seq) == expected, (step, seq)


def test_linear_maps_start_small_and_position_tables_at_zero():
    model = build(stir=0, d=120)
    assert not model.embed_spatial.any() and not model.embed_time.any()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert not module.bias.any() and module.weight.abs().max() < 0.1
    assert 0.019 < model.sequence[0].mlp[0].weight.std() < 0.021


def test_presets_hold_the_released_gym_settings_and_the_papers_tables_4_and_5():
    """Typed in a second time, from the script and from the paper.

    512 * 20 tokens of warm-up, B * K of them an update, are 5 updates.
    """
    gym = dict(n_layer=3, n_head=1, d=128, step_heads=4, step_d=16, context_len=20, batch_size=64,
               dropout=0.1, activation="gelu", lr=1e-4, weight_decay=1e-4, betas=(0.9, 0.95),
               decay="matrices", clip=0.25, warmup=10_000, steps=100_000, condition="reward")
    both = dict(n_layer=6, n_head=8, d=192, step_heads=4, step_d=64, context_len=30, dropout=0.1,
                activation="gelu", clip=1.0, weight_decay=0.1, decay="matrices", betas=(0.9, 0.95),
                condition="reward", schedule="cosine", lr_floor=0.1, warmup=round(512 * 20 / (64 * 30)))
    atari = both | dict(lr=6e-4, patch=7, batch_size=64, steps=10 * (500_000 // 64))
    dmc = both | dict(lr=1e-3, patch=12, batch_size=64, steps=10 * (100_000 // 64))
    for name, table in {"*": gym, "atari": atari, "dmc": dmc}.items():
        assert {k: PRESETS[name][k] for k in table} == table, name


def test_small_frames_fit_a_picture_of_84_pixels():
    preset = PRESETS["atari"] | PRESETS["small"] | PRESETS["small-frames"]
    values = {k: v for k, v in preset.items() if hasattr(Config, k)}
    model = Model(Config(state_shape=(4, 84, 84), act_dim=4, discrete=True, **values))
    assert model.embed_parts.n == 36 and sum(parameters(model).values()) < 1_500_000
