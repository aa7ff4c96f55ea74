"""Quirks of the papers' released code that a score could feel (X-3), our own changes (X-4), a control.

    with quirks("left padding"):        # for one run
        train.train(...)

Our own models and loader have none of them.
"""
import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

import data
import online
import settings
import train
import unseen
from models import dc, dt, radt, starformer

# what is replaced, and which steps of RADT's present batch are real
ours = SimpleNamespace(
    gather=data.Windows.gather, act=dc.Model.act, previous=starformer.Model.previous,
    features=radt.Model.features, attention=radt.QKVAttention.forward, mask=None,
    loss=dt.Model.loss, act_dt=dt.Model.act, begin=train.begin)


def unclamped(cfg, step):
    """The released Atari schedule: the cosine ends after 0.6 of DC's run, ten epochs, and climbs again."""
    progress = max(0.0, (step - cfg.warmup) / max(1, 0.6 * cfg.steps - cfg.warmup))
    warm = min(1.0, (step + 1) / max(1, cfg.warmup))
    return cfg.lr * warm * max(0.1, 0.5 * (1 + math.cos(math.pi * progress)))


def clamped(cfg, step):
    """The same schedule, held at its floor once it got there: what unclamped() is compared with."""
    return unclamped(cfg, min(step, int(0.6 * cfg.steps)))


def left(windows, index, size=None):
    """Windows.gather for vectors, with short windows padded on the left, as released for gym (DT, DC, RADT).

    The padding is unnormalised zeros, and actions of -10.
    """
    batch, K = ours.gather(windows, index, size), windows.K
    missing = K - batch["mask"].sum(1, keepdim=True)
    steps = torch.arange(K, device=index.device) - missing      # (B, K): where each place's step comes from
    padded, steps = steps < 0, steps.clamp(min=0)
    for key, x in batch.items():
        wide = (..., *[None] * (x.ndim - 2))
        x = x.gather(1, steps[wide].expand_as(x))
        batch[key] = x.masked_fill(padded[wide], -10.0 if key == "actions" else 0)
    if not hasattr(windows, "blank"):       # made once: a CUDA graph cannot send it to the GPU anew
        windows.blank = (-windows.mean / windows.std).to(index.device)
    return batch | {"states": torch.where(padded[..., None], windows.blank, batch["states"])}


def act_left(model, states, actions, rewards, rtg, timesteps, **kwargs):
    """Model.act with histories padded on the left by zeros up to K, as the released evaluation of DC does."""
    missing = max(0, model.cfg.context_len - states.shape[1])
    history = [F.pad(x, (0, 0, missing, 0)) for x in (states, actions, rewards, rtg)]
    return ours.act(model, *history, F.pad(timesteps, (missing, 0)), **kwargs)


def remember_mask(model, *inputs, mask=None, **named):
    """RADT's features, which also tells inverted_mask() what is padded. Acting pads nothing."""
    ours.mask = mask
    return ours.features(model, *inputs, **named)


def inverted_mask(module, query, key, value, mask=None):
    """RADT's attention with the released mask.

    In windows with padding, real tokens see the padding before them and nothing else.
    """
    if ours.mask is not None:
        shape = query.shape[1], key.shape[1]
        seen = torch.ones(shape, dtype=torch.bool, device=query.device).tril() if mask is None else mask
        real = ours.mask.repeat_interleave(shape[1] // ours.mask.shape[1], 1)     # (B, keys)
        # where all keys are real it would shift every one alike and change nothing
        hidden = real & ~real.all(1, keepdim=True)
        mask = torch.zeros(len(query), 1, *shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill(hidden[:, None, None], -1e4).masked_fill(~seen, -math.inf)
    return ours.attention(module, query, key, value, mask)


def leaky_previous(model, actions, rewards, rtg):
    """StARformer's released gym training: a step's group holds the reward that its action has earned.

    In acting it holds the one before, since no other is known.
    """
    a, c = ours.previous(model, actions, rewards, rtg)
    return a, rewards.to(c.dtype) if model.training and model.cfg.condition == "reward" else c


def last_step(mask):
    """(B, K) bool: the last real step of each window."""
    return torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1


def loss_of_last(model, batch):
    """DT's loss at the last real step of each window alone."""
    return ours.loss(model, batch | {"mask": last_step(batch["mask"])})


def loss_of_last_return(model, batch):
    """The same, with zeros for the returns of all earlier steps.

    If every step of a window were to learn, later ones would still hear of earlier returns, through states.
    """
    rtg = batch["rtg"] * last_step(batch["mask"])[..., None]
    return loss_of_last(model, batch | {"rtg": rtg})


def act_on_last_return(model, states, actions, rewards, rtg, timesteps, **kwargs):
    """DT's act with zeros for the returns of all steps but the last."""
    rtg = F.pad(rtg[:, -1:], (0, 0, rtg.shape[1] - 1, 0))
    return ours.act_dt(model, states, actions, rewards, rtg, timesteps, **kwargs)


def begin_shuffled(settings, trajectories, *more):
    """train.begin() on data in which each episode has another one's rewards: the control of DM-T4."""
    return ours.begin(settings, unseen.shuffled(trajectories, settings.train.seed), *more)


QUIRKS = {      # name: (class or module, what of it is replaced, by what)
    "left padding": [(data.Windows, "gather", left), (dc.Model, "act", act_left)],
    "inverted mask": [(data.Windows, "gather", left), (radt.Model, "features", remember_mask),
                      (radt.QKVAttention, "forward", inverted_mask)],
    "unclamped cosine": [(train, "learning_rate", unclamped)],
    "clamped cosine": [(train, "learning_rate", clamped)],
    "last step": [(dt.Model, "loss", loss_of_last)],
    "last return": [(dt.Model, "loss", loss_of_last_return), (dt.Model, "act", act_on_last_return)],
    "shuffled rewards": [(train, "begin", begin_shuffled)],
    "label leak": [(starformer.Model, "previous", leaky_previous)],
}


@contextlib.contextmanager
def quirks(name):
    """One quirk of released code, or none, while a run trains and plays."""
    if name is not None and name not in QUIRKS:
        raise ValueError(f"no quirk is called {name!r}: {', '.join(QUIRKS)}")
    with contextlib.ExitStack() as stack:
        if name:        # this file then decides numbers, too
            for kind in (settings.Settings, online.OnlineSettings):
                more = [*kind.CODE, "notebooks/released.py"]
                stack.enter_context(mock.patch.object(kind, "CODE", more))
        for owner, attribute, new in QUIRKS.get(name, []):
            stack.enter_context(mock.patch.object(owner, attribute, new))
        yield
