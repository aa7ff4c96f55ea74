"""The nine promises that every file in models/ keeps. Read this first: it is what "a model" means here.

    pytest tests/test_01_contract.py -k dc        one model

What a model is known not to do is listed in KNOWN, with the reason; everything else is asked of it.
"""
import ast
import dataclasses
import importlib
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MODELS = sorted(path.stem for path in (ROOT / "models").glob("*.py") if path.stem != "__init__")
S, A, K, B = 5, 3, 6, 4

SPACES = [(False, "rtg"), (True, "rtg"), (False, "reward"), (False, "none")]
CASES = [(name, dict(discrete=discrete, condition=condition)) for name in MODELS
         for discrete, condition in SPACES]
CASES += [
    ("dt", dict(mixer="direct")), ("dt", dict(mixer="none")), ("dt", dict(use_actions=False)),
    ("dt", dict(goal_dim=2, goal="action")), ("dt", dict(goal_dim=2, goal="rtg")),
    ("dt", dict(goal_dim=2, goal="embed")), ("dt", dict(projection=False)),
    ("dc", dict(hybrid=True)), ("radt", dict(position="learned")),
]
CASES += [(name, dict(use_actions=False)) for name in MODELS if name in ("dc", "lsdt", "dm")]
FRAMES = dict(state_shape=(2, 36, 36))      # two stacked frames, as small as the convolutions allow
CASES += [(name, FRAMES | dict(discrete=discrete, position=position)) for name in MODELS
          for discrete, position in [(True, "window"), (False, "timestep")]]
CASES += [
    ("dt", FRAMES | dict(discrete=True, encoder="patch", patch=12, condition="none")),
    ("dc", FRAMES | dict(discrete=True, hybrid=True, projection=True)),
]
CASES += [("starformer", FRAMES | dict(discrete=True, step_state=step, seq_state=seq))
          for step in ("patch", "conv") for seq in ("patch", "none")]


def spell(case):
    text = "-".join(f"{k}={v}" for k, v in case[1].items() if k != "patch")
    return f"{case[0]}-{text}".replace("state_shape=(2, 36, 36)", "frames")


every_model = pytest.mark.parametrize("case", CASES, ids=spell)


# --------------------------------------------------------------- the known exceptions to promises 3 and 7

def reach(cfg, taps):
    """How many tokens back a prediction sees, by convolutions alone."""
    return cfg.n_layer * (taps - 1)


def first(cfg):
    """The state's place among the tokens of a step, which are 1 + first + use_actions."""
    return int(cfg.condition != "none")


def convolutions(name, cfg):
    """The tokens that a convolution sees, if nothing else mixes; else None."""
    if name == "dc" and not cfg.hybrid:
        return cfg.window
    if name == "lsdt" and round(cfg.conv_ratio * cfg.d / 4) == cfg.d // 4 and cfg.routing != "weight":
        return cfg.kernel
    return None


def short(name, cfg, tokens):
    """Whether convolutions are all that mixes, and end before so many tokens back."""
    taps = convolutions(name, cfg)
    return taps is not None and reach(cfg, taps) < tokens


KNOWN = [   # (when, the inputs not read and parameters without a gradient: names or their beginnings, why)
    (lambda name, cfg: cfg.condition != "rtg", "rtg", "the condition is another"),
    (lambda name, cfg: cfg.condition != "reward", "rewards", "the condition is another"),
    (lambda name, cfg: not cfg.use_actions, "actions", "there are no action tokens"),
    (lambda name, cfg: name == "starformer", "timesteps", "a position is a place in the window"),
    (lambda name, cfg: name == "dc" and not cfg.timestep_embedding, "timesteps", "there is no table"),
    (lambda name, cfg: name == "dt" and cfg.mixer == "none", "rtg rewards actions history "
     "embed_condition embed_action", "without a mixer s_t sees itself alone"),
    (lambda name, cfg: short(name, cfg, first(cfg)), "rtg rewards embed_condition",
     "convolutions end before this step's first token"),
    (lambda name, cfg: short(name, cfg, first(cfg) + 1), "actions embed_action",
     "convolutions end before the last action"),
    (lambda name, cfg: short(name, cfg, 1 + first(cfg) + cfg.use_actions), "history",
     "convolutions end before the last state"),
    (lambda name, cfg: name == "lsdt" and cfg.branch == "dynamic" and cfg.kernel == 1,
     r"blocks\.\d+\.mixer\.short\.logits", "the softmax of a single tap is 1"),
    (lambda name, cfg: name == "dm" and getattr(cfg, "k_gradient", "") == "none", r"blocks\.\d+\.hyper",
     "k is rounded without a gradient, as released"),
]


def known(case, cfg):
    """The names that this model is known not to read or to train."""
    return {word for when, words, why in KNOWN if when(case[0], cfg) for word in words.split()}


# --------------------------------------------------------------- models and batches

def build(case, dtype=torch.float32, stir=True, **more):
    """A small model in eval mode. stir moves it off its start, where zero gates hide what they will read."""
    name, switches = case
    module = importlib.import_module(f"models.{name}")
    fields = {f.name for f in dataclasses.fields(module.Config)}
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=50, n_layer=2, d=16, dropout=0.0)
    if name not in ("dt", "dc") or switches.get("hybrid") or switches.get("mixer", name) == "dt":
        sizes["n_head"] = 2                     # where there is attention
    if name == "starformer":
        sizes["patch"] = 12
    values = sizes | switches | more
    if name == "radt" and values.get("position") == "timestep":
        del values["position"]                  # its default has another name
    cfg = module.Config(**{k: v for k, v in values.items() if k in fields})
    torch.manual_seed(0)
    model = module.Model(cfg).to(dtype)
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
    return model.eval(), cfg


def make_batch(cfg, dtype=torch.float32, rows=B, steps=K, seed=1):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    if cfg.discrete:
        actions = torch.randint(A, (rows, steps), generator=g)
    else:
        actions = torch.rand(rows, steps, A, generator=g, dtype=torch.float64).to(dtype) * 2 - 1
    if len(cfg.state_shape) == 3:
        states = torch.randint(256, (rows, steps, *cfg.state_shape), generator=g, dtype=torch.uint8)
    else:
        states = normal(rows, steps, S)
    return dict(
        states=states, actions=actions, rewards=normal(rows, steps, 1), rtg=normal(rows, steps, 1),
        timesteps=torch.arange(steps).expand(rows, steps).clone() + torch.randint(20, (rows, 1), generator=g),
        mask=torch.ones(rows, steps, dtype=torch.bool),
    )


def history_of(batch):
    """What act takes: everything but the mask."""
    return {k: v for k, v in batch.items() if k != "mask"}


def scrambled(x, name, where):
    """x with other contents at the time indices in where."""
    x = x.clone()
    if x.dtype == torch.uint8:
        x[:, where] = 255 - x[:, where]
    elif x.dtype == torch.int64:
        x[:, where] = (x[:, where] + 1) % (A if name == "actions" else 50)
    else:
        x[:, where] = x[:, where] + 3.0
    return x


def short_rows(batch, lengths, fill=0):
    """The batch with row i cut to lengths[i] real steps and its padding, on the right, filled."""
    batch = {k: v.clone() for k, v in batch.items()}
    for i, n in enumerate(lengths):
        batch["mask"][i, n:] = False
        for k in batch.keys() - {"mask"}:
            batch[k][i, n:] = fill
    return batch


# --------------------------------------------------------------- the promises

@every_model
def test_promise_1_any_window_up_to_the_context_length_gives_one_action_per_step(case):
    model, cfg = build(case)
    for steps in range(1, K + 1):
        batch = make_batch(cfg, steps=steps)
        features = model.features(**batch)
        y = model(**batch)
        assert features.shape == (B, steps, cfg.d) and torch.equal(model.predict(features), y)
        assert y.shape == (B, steps, A) and y.dtype == torch.float32
        assert cfg.discrete or y.abs().max() <= 1
        a = model.act(**history_of(batch))
        assert (a.shape, a.dtype) == (((B,), torch.int64) if cfg.discrete else ((B, A), torch.float32))


@every_model
def test_promise_2_a_prediction_never_sees_the_future_nor_its_own_action(case):
    """A leak here turns training into copying the label: the loss looks good, and the agent cannot act."""
    model, cfg = build(case)
    batch = make_batch(cfg)
    y = model(**batch)
    for t in range(K):
        later = {k: scrambled(v, k, slice(t if k in ("actions", "rewards") else t + 1, None))
                 for k, v in history_of(batch).items()}
        change = (model(**later) - y)[:, : t + 1].abs().max()
        assert change < 1e-5, f"step {t} sees what comes later"


@every_model
def test_promise_3_a_prediction_does_depend_on_everything_the_model_says_it_reads(case):
    model, cfg = build(case, torch.float64)
    unread = known(case, cfg)
    batch = make_batch(cfg, torch.float64)
    y = model(**batch)

    def moved(name, t, later):
        return (model(**batch | {name: scrambled(batch[name], name, t)}) - y)[:, later].abs().max()

    for name, lag in dict(states=0, timesteps=0, rtg=0, actions=1, rewards=1).items():
        change = max(moved(name, t, t + lag) for t in range(K - lag))
        assert change == 0 if name in unread else change > 1e-7, f"{name}: {change}"
    change = max(moved("states", t, t + 1) for t in range(K - 1))
    assert change == 0 if "history" in unread else change > 1e-7, f"the previous state: {change}"


@every_model
def test_promise_4_what_stands_in_the_padding_changes_nothing(case):
    for training in (False, True):
        model, cfg = build(case)
        model.train(training)
        clean, dirty = (short_rows(make_batch(cfg), (1, 3, K, 4), fill) for fill in (0, 2))
        mask = clean["mask"]
        assert torch.allclose(model(**clean)[mask], model(**dirty)[mask], atol=1e-6)
        assert torch.allclose(model.loss(clean)[0], model.loss(dirty)[0], atol=1e-6)


@every_model
def test_promise_5_rows_of_a_batch_do_not_mix(case):
    for training in (False, True):
        model, cfg = build(case)
        model.train(training)
        batch = short_rows(make_batch(cfg), (1, 3, K, 4))
        alone = torch.cat([model(**{k: v[i: i + 1] for k, v in batch.items()}) for i in range(B)])
        mask = batch["mask"]
        assert torch.allclose(model(**batch)[mask], alone[mask], atol=1e-5)


@every_model
def test_promise_6_the_loss_is_the_mean_over_real_steps(case):
    """Averaging over padding too would shrink the loss, and with it the steps, wherever episodes end."""
    model, cfg = build(case)
    batch = short_rows(make_batch(cfg), (1, 3, K, 4))
    y, total, n = model(**batch).detach(), 0.0, 0
    for b, length in enumerate((1, 3, K, 4)):
        for t in range(length):
            a = batch["actions"][b, t]
            total += float(-y[b, t].log_softmax(-1)[a] if cfg.discrete else ((y[b, t] - a) ** 2).mean())
            n += 1
    loss, log = model.loss(batch)
    assert abs(float(log["loss"]) - total / n) < 1e-5
    assert loss.ndim == 0 and loss.requires_grad and not any(v.requires_grad for v in log.values())


@every_model
def test_promise_7_every_parameter_gets_a_gradient(case):
    model, cfg = build(case, torch.float64)
    model.train()
    model.loss(make_batch(cfg, torch.float64, rows=16))[0].backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert [name for name in idle if not any(re.match(word, name) for word in known(case, cfg))] == []


@every_model
def test_promise_8_act_is_the_last_step_of_forward_whatever_stands_in_the_placeholder(case):
    model, cfg = build(case)
    for steps in (1, 2, K, K + 3):
        history = history_of(make_batch(cfg, steps=steps))
        y = model(**{k: v[:, -K:] for k, v in history.items()})[:, -1]
        for name in ("actions", "rewards"):
            history[name] = scrambled(history[name], name, -1)
        a = model.act(**history)
        assert torch.equal(a, y.argmax(-1)) if cfg.discrete else torch.allclose(a, y, atol=1e-5)


def test_promise_8_sampled_actions_repeat_with_their_generator_and_vary_without():
    for name in MODELS:
        model, cfg = build((name, dict(discrete=True)))
        history = history_of(make_batch(cfg, rows=64))
        generators = (torch.Generator().manual_seed(seed) for seed in (0, 0, 1))
        a, b, c = (model.act(**history, sample=True, generator=g) for g in generators)
        assert torch.equal(a, b) and not torch.equal(a, c)


@every_model
def test_promise_9_weights_come_from_the_seed_survive_a_round_trip_and_any_float_input_is_cast(case):
    model, cfg = build(case, stir=False)
    twin, _ = build(case, stir=False)
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    other, _ = build(case)
    other.load_state_dict(model.state_dict())
    batch = make_batch(cfg)
    y = model(**batch)
    assert torch.equal(other(**batch), y)
    doubles = {k: v if v.dtype in (torch.int64, torch.bool) else v.double() for k, v in batch.items()}
    assert torch.allclose(model(**doubles), y, atol=1e-6) and model(**doubles).dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_model
def test_promise_9_cpu_and_cuda_agree(case):
    model, cfg = build(case)
    batch = make_batch(cfg)
    y = model(**batch)
    there = model.cuda()(**{k: v.cuda() for k, v in batch.items()})
    assert torch.allclose(there.cpu(), y, atol=1e-3)


# --------------------------------------------------------------- the files

@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_contracts_methods_and_arguments(name):
    module = importlib.import_module(f"models.{name}")
    model = module.Model

    def arguments(method):
        return list(inspect.signature(method).parameters)[1:]

    inputs = ["states", "actions", "rewards", "rtg", "timesteps"]
    assert model.__name__ != "Model" and getattr(module, model.__name__) is model
    assert arguments(model.features) == [*inputs, "mask"]
    assert inspect.signature(model.features).parameters["mask"].default is None
    assert arguments(model.predict) == ["features"] and arguments(model.loss) == ["batch"]
    assert arguments(model.act) == [*inputs, "sample", "generator"]
    common = """state_shape act_dim discrete goal_dim goal context_len max_ep_len n_layer n_head d dropout
                activation condition use_actions""".split()
    assert set(common) <= {f.name for f in dataclasses.fields(module.Config)}
    assert {"*", "small"} <= module.PRESETS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_make_no_model_are_refused(name):
    """A copied file has no trainer that would have looked at them before."""
    wrong = [dict(act_dim=0), dict(context_len=0), dict(n_layer=0), dict(n_head=0), dict(d=0), dict(d=-8),
             dict(d=17, n_head=2, hybrid=True), dict(state_shape=(4, 30, 30)), dict(state_shape=(4, 84, 28))]
    for sizes in wrong:
        with pytest.raises(ValueError):
            build((name, sizes))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_works_alone_in_an_empty_folder(name, tmp_path):
    """-I keeps the project off the path: an import from it would fail here."""
    (tmp_path / f"{name}.py").write_text((ROOT / "models" / f"{name}.py").read_text())
    command = [sys.executable, "-I", f"{name}.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split("loss")[1].split()[0]) for line in run.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_imports_torch_and_the_standard_library_only(name):
    tree = ast.parse((ROOT / "models" / f"{name}.py").read_text())
    imported = {(node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
                for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names}
    assert imported <= {"torch"} | set(sys.stdlib_module_names)


def test_classes_of_the_same_name_are_the_same_code_in_every_model_file():
    """Attention is repeated so that a file can be copied; this keeps the copies from drifting apart."""
    seen = {}
    for name in MODELS:
        text = (ROOT / "models" / f"{name}.py").read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name != "Config":
                code = ast.get_source_segment(text, node)
                first_file, first_code = seen.setdefault(node.name, (name, code))
                assert code == first_code, f"class {node.name} differs between {first_file}.py and {name}.py"
    assert "Attention" in seen and "FrameEncoder" in seen


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls_to_nearly_nothing_on_one_batch(name):
    """Overfitting one batch is the cheapest proof that inputs, outputs and gradients are connected."""
    model, cfg = build((name, dict(discrete=True)), stir=False, d=32)
    model.train()
    batch = make_batch(cfg, rows=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    at_first = float(model.loss(batch)[1]["loss"])
    assert abs(at_first - math.log(A)) < 0.7    # near ln(choices) before anything is learnt
    for _ in range(150):
        loss, log = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(log["loss"]) < 0.2
