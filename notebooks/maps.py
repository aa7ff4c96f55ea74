"""What a model looks at, as maps for pictures: read by hooks, so that the models' files stay as they are.

B batch, K context steps, L tokens, H heads, n tokens in a group, d width.
"""
import functools
import math

import torch
import torch.nn.functional as F

from models import dc, dm, dt, lsdt, starformer


def layer(name):
    """The title of a module's layer, counted from 1: "layer 1" for blocks.0.mixer."""
    return f"layer {int(name.split('.')[1]) + 1}"


def watched(model, batch, kinds, read):
    """{"layer i": read(module, its input)} for the modules of these classes, in one forward as in acting."""
    maps, hooks = {}, []

    def visit(module, args, name):
        maps[layer(name)] = read(module, args[0])
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            hooks.append(module.register_forward_pre_hook(functools.partial(visit, name=name)))
    try:
        with torch.no_grad():
            model.eval()(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return maps


def attention_maps(model, batch):
    """{"layer i": (B, H, L, L)}, where there is attention: who looks at whom, in rows that sum to 1.

    DT's learned matrix (mixer="direct") comes as it is, (1, 1, L, L). LSDT's are its long branch. A mixer
    layer of DM is over the tokens that it selected, put back in their places, zero elsewhere.
    """
    def weights(module, x):
        q, k, _ = module.qkv(x).unflatten(-1, (3, module.n_head, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1]**0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1)
    kinds = dt.Attention, dc.Attention, lsdt.LongBranch, dm.Attention, starformer.Attention
    maps = watched(model, batch, kinds, weights)
    maps |= watched(model, batch, dt.DirectMixer, lambda module, x: module.A.tril()[None, None])
    short = watched(model, batch, dm.MixerLayer, lambda module, x: None)
    for title, kept in zip(short, model.selected(batch) if short else [], strict=True):
        maps[title] = put_back(maps[title], kept)
    return maps


def mean_attention(run):
    """{"layer i": (L, L)}: of a lab.Run, the mean over heads and windows of a batch, kept with it."""
    def compute(run):
        found = attention_maps(run.net, run.batch())
        return {title: m.double().mean((0, 1)).round(decimals=4).tolist() for title, m in found.items()}
    maps = run.keep("attention", compute)
    return {title: torch.tensor(m) for title, m in maps.items()}


def even_shares(weights, most=4.0):
    """A map (L, L) of weights in units of an even share, so that its first rows don't outshine the others.

    1 is what a token gets if its reader weighs all that it sees alike; larger ones are cut at most.
    """
    m = torch.as_tensor(weights).abs()
    seen = torch.arange(1, len(m) + 1)[:, None]     # how many tokens a row sees
    return (m / m.sum(1, keepdim=True) * seen).clamp(max=most)


def looked_back(m):
    """(L,): how many tokens back the rows of a map (L, L) look, each in its mean."""
    at = torch.arange(len(m))
    return (m * (at[:, None] - at)).sum(1)


def put_back(short, kept):
    """Maps (B, H, C, C) over each row's selected tokens, kept (B, L), in their places: (B, H, L, L)."""
    B, L = kept.shape
    out = short.new_zeros(B, short.shape[1], L, L)
    for b in range(B):
        places = kept[b].nonzero()[:, 0]
        out[b][:, places[:, None], places] = short[b, :, :len(places), :len(places)]
    return out


def group_maps(model, batch):
    """(layers, B, K, H, n, n): whom each token of a step's group looks at in StARformer."""
    maps = watched(model, batch, starformer.GroupAttention, lambda module, z: module.weights(z))
    return torch.stack(list(maps.values())).unflatten(1, batch["states"].shape[:2])


def kernel_maps(model, batch):
    """{"layer i": (B, L, L)}: how LSDT's convolution weighs earlier tokens, the mean over its kernels."""
    def weights(module, x):
        kernels = module.kernels(F.glu(module.expand(x), -1)).mean(-1)      # (B, L, width)
        L, width = kernels.shape[1:]
        return sum(torch.diag_embed(kernels[:, j:, j], -j) for j in range(min(width, L)))
    return watched(model, batch, lsdt.DynamicConv, weights)


def gates(model, batch):
    """{"layer i": (B, L, d)}: LSDT's HFM weights, the long branch's channels first."""
    return watched(model, batch, lsdt.Fusion, lambda module, y: module.gates(y))


def filters(model):
    """{"layer i": (kinds, window, d)}: DC's filters, w[kind, l, channel] for the token l places back."""
    return {layer(name): module.weight.detach() for name, module in model.named_modules()
            if isinstance(module, dc.TokenFilters | lsdt.TokenFilters)}
