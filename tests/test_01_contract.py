"""The nine promises that every file in models/ keeps. Read this first: it is what "a model" means here.

    pytest tests/test_01_contract.py -k dt        one model

What a model is known not to do stands in its own unread(cfg), with a reason; everything else is asked of it.
"""
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MODELS = sorted(path.stem for path in (ROOT / "models").glob("*.py") if path.stem != "__init__")
S, A, K, B = 5, 3, 6, 4

CASES = [(name, dict(discrete=discrete, condition=condition)) for name in MODELS for discrete, condition in
         [(False, "rtg"), (True, "rtg"), (False, "reward"), (False, "none")]]
CASES += [("dt", dict(mixer="direct")), ("dt", dict(mixer="none")), ("dt", dict(use_actions=False)),
          ("dt", dict(goal_dim=2, goal="action")), ("dt", dict(goal_dim=2, goal="rtg")), ("dt", dict(goal_dim=2, goal="embed"))]
CASES += [(name, dict(use_actions=False)) for name in MODELS if name in ("dc", "lsdt", "dm")]
FRAMES = dict(state_shape=(2, 36, 36), patch=12)        # two stacked frames, as small as the convolutions allow
CASES += [(name, FRAMES | dict(discrete=discrete, position=position)) for name in MODELS for discrete, position in
          [(True, "window"), (False, "timestep")]]
CASES += [("dt", FRAMES | dict(discrete=True, encoder="patch", condition="none")), ("dt", dict(projection=False)),
          ("dc", FRAMES | dict(discrete=True, hybrid=True, projection=True)), ("radt", dict(position="learned"))]
CASES += [("starformer", FRAMES | dict(discrete=True, step_state=step, seq_state=seq)) for step in ("patch", "conv") for seq in ("patch", "none")]


def spell(case):
    return case[0] + "-" + "-".join(f"{k}={v}" for k, v in case[1].items() if k != "patch").replace("state_shape=(2, 36, 36)", "frames")


every_model = pytest.mark.parametrize("case", CASES, ids=spell)


OTHERS = {"radt": [("position", "timestep")]}       # its default is called otherwise


def build(case, dtype=torch.float32, stir=True, **more):
    """A small model in eval mode. stir moves it off its initialisation, where zero-initialised gates hide what they will read."""
    name, switches = case
    module = importlib.import_module(f"models.{name}")
    known = {f.name for f in dataclasses.fields(module.Config)}
    sizes = dict(state_shape=(S,), act_dim=A, context_len=K, max_ep_len=50, n_layer=2, n_head=2, d=16, dropout=0.0)
    cfg = module.Config(**{k: v for k, v in (sizes | switches | more).items() if k in known and (k, v) not in OTHERS.get(name, ())})
    torch.manual_seed(0)
    model = module.Model(cfg).to(dtype)
    if stir:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
    return model.eval(), cfg, module.unread(cfg)


def make_batch(cfg, dtype=torch.float32, rows=B, steps=K, seed=1):
    g = torch.Generator().manual_seed(seed)
    actions = (torch.randint(A, (rows, steps), generator=g) if cfg.discrete
               else torch.rand(rows, steps, A, generator=g, dtype=torch.float64).to(dtype) * 2 - 1)
    states = (torch.randint(256, (rows, steps, *cfg.state_shape), generator=g, dtype=torch.uint8) if len(cfg.state_shape) == 3
              else torch.randn(rows, steps, S, generator=g, dtype=torch.float64).to(dtype))
    return dict(states=states, actions=actions,
                rewards=torch.randn(rows, steps, 1, generator=g, dtype=torch.float64).to(dtype),
                rtg=torch.randn(rows, steps, 1, generator=g, dtype=torch.float64).to(dtype),
                timesteps=torch.arange(steps).expand(rows, steps).clone() + torch.randint(20, (rows, 1), generator=g),
                mask=torch.ones(rows, steps, dtype=torch.bool))


def scrambled(x, name, where):
    """x with other contents at the time indices in where."""
    x = x.clone()
    if x.dtype == torch.uint8:
        x[:, where] = 255 - x[:, where]
        return x
    x[:, where] = (x[:, where] + 1) % (A if name == "actions" else 50) if x.dtype == torch.int64 else x[:, where] + 3.0
    return x


def short_rows(batch, lengths, fill=0):
    """The batch with row i cut to lengths[i] real steps and its padding, on the right, filled."""
    batch = {k: v.clone() for k, v in batch.items()}
    for i, n in enumerate(lengths):
        batch["mask"][i, n:] = False
        for k in batch.keys() - {"mask"}:
            batch[k][i, n:] = fill
    return batch


@every_model
def test_promise_1_any_window_up_to_the_context_length_gives_one_action_per_step(case):
    model, cfg, _ = build(case)
    for steps in (1, 2, K):
        y = model(**make_batch(cfg, steps=steps))
        assert y.shape == (B, steps, A) and y.dtype == torch.float32
        assert cfg.discrete or y.abs().max() <= 1
        a = model.act(**{k: v for k, v in make_batch(cfg, steps=steps).items() if k != "mask"})
        assert (a.shape, a.dtype) == (((B,), torch.int64) if cfg.discrete else ((B, A), torch.float32))


@every_model
def test_promise_2_a_prediction_never_sees_the_future_nor_its_own_action(case):
    """A leak here turns training into copying the label: the loss looks wonderful and the agent cannot act."""
    model, cfg, _ = build(case)
    batch = make_batch(cfg)
    y = model(**batch)
    for t in range(K):
        later = {k: scrambled(v, k, slice(t if k in ("actions", "rewards") else t + 1, None)) for k, v in batch.items() if k != "mask"}
        assert (model(**later)[:, : t + 1] - y[:, : t + 1]).abs().max() < 1e-5, f"step {t} sees what comes later"


@every_model
def test_promise_3_a_prediction_does_depend_on_everything_the_model_says_it_reads(case):
    model, cfg, unread = build(case, torch.float64)
    batch = make_batch(cfg, torch.float64)
    y = model(**batch)

    def moved(name, t, at):
        return (model(**batch | {name: scrambled(batch[name], name, t)}) - y)[:, at].abs().max()

    for name, lag in dict(states=0, timesteps=0, rtg=0, actions=1, rewards=1).items():
        change = max(moved(name, t, t + lag) for t in range(K - lag))
        assert change == 0 if name in unread else change > 1e-7, f"{name}: {change}"
    change = max(moved("states", t, t + 1) for t in range(K - 1))
    assert change == 0 if "history" in unread else change > 1e-7, f"the previous state: {change}"


@every_model
def test_promise_4_what_stands_in_the_padding_changes_nothing(case):
    for training in (False, True):
        model, cfg, _ = build(case)
        model.train(training)
        clean, dirty = (short_rows(make_batch(cfg), (1, 3, K, 4), fill) for fill in (0, 2))
        real = clean["mask"]
        assert torch.allclose(model(**clean)[real], model(**dirty)[real], atol=1e-6)
        assert torch.allclose(model.loss(clean)[0], model.loss(dirty)[0], atol=1e-6)


@every_model
def test_promise_5_rows_of_a_batch_do_not_mix(case):
    for training in (False, True):
        model, cfg, _ = build(case)
        model.train(training)
        batch = short_rows(make_batch(cfg), (1, 3, K, 4))
        alone = torch.cat([model(**{k: v[i: i + 1] for k, v in batch.items()}) for i in range(B)])
        real = batch["mask"]
        assert torch.allclose(model(**batch)[real], alone[real], atol=1e-5)


@every_model
def test_promise_6_the_loss_is_the_mean_over_real_steps(case):
    """Averaging over padding too would shrink the loss, and with it the learning rate, wherever episodes end."""
    model, cfg, _ = build(case)
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
    model, cfg, unread = build(case, torch.float64)
    model.train()
    model.loss(make_batch(cfg, torch.float64, rows=16))[0].backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert [name for name in idle if not any(name.startswith(known) for known in unread)] == []


@every_model
def test_promise_8_act_is_the_last_step_of_forward_whatever_stands_in_the_placeholder(case):
    model, cfg, _ = build(case)
    for steps in (1, 2, K, K + 3):
        batch = make_batch(cfg, steps=steps)
        history = {k: v for k, v in batch.items() if k != "mask"}
        y = model(**{k: v[:, -K:] for k, v in history.items()})[:, -1]
        for name in ("actions", "rewards"):
            history[name] = scrambled(history[name], name, -1)
        a = model.act(**history)
        assert torch.equal(a, y.argmax(-1)) if cfg.discrete else torch.allclose(a, y, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if "state_shape" in c[1]], ids=spell)
def test_promise_8_what_acting_remembers_of_earlier_steps_changes_no_action(case):
    """Rows leave as their episodes end, and the window slides: the memory must follow both."""
    model, cfg, _ = build(case)
    batch, memory, rows = make_batch(cfg, steps=K + 4), {}, torch.arange(B)
    for t in range(1, K + 5):
        if t in (3, K + 2):
            rows = rows[1:]
            memory = {k: v[1:] for k, v in memory.items()}
        history = {k: v[rows, :t] for k, v in batch.items() if k != "mask"}
        assert torch.allclose(model.act(**history), model.act(**history, memory=memory), atol=1e-5)
    assert memory


def test_promise_8_sampled_actions_repeat_with_their_generator_and_vary_without():
    for name in MODELS:
        model, cfg, _ = build((name, dict(discrete=True)))
        history = {k: v for k, v in make_batch(cfg, rows=64).items() if k != "mask"}
        a, b, c = (model.act(**history, sample=True, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1))
        assert torch.equal(a, b) and not torch.equal(a, c)


@every_model
def test_promise_9_weights_come_from_the_seed_survive_a_round_trip_and_any_float_input_is_cast(case):
    model, cfg, _ = build(case, stir=False)
    twin, _, _ = build(case, stir=False)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    other, _, _ = build(case)
    other.load_state_dict(model.state_dict())
    batch = make_batch(cfg)
    y = model(**batch)
    assert torch.equal(other(**batch), y)
    doubles = {k: v.double() if v.is_floating_point() or v.dtype == torch.uint8 else v for k, v in batch.items()}
    assert torch.allclose(model(**doubles), y, atol=1e-6) and model(**doubles).dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_model
def test_promise_9_cpu_and_cuda_agree(case):
    model, cfg, _ = build(case)
    batch = make_batch(cfg)
    y = model(**batch)
    there = model.cuda()(**{k: v.cuda() for k, v in batch.items()})
    assert torch.allclose(there.cpu(), y, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_works_alone_in_an_empty_folder_with_only_torch(name, tmp_path):
    """-I keeps the project off the path: an import from it, or of numpy by name, would fail here."""
    (tmp_path / f"{name}.py").write_text((ROOT / "models" / f"{name}.py").read_text())
    run = subprocess.run([sys.executable, "-I", f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split("loss")[1].split()[0]) for line in run.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


def test_classes_of_the_same_name_are_the_same_code_in_every_model_file():
    """The attention block is repeated so that a file can be copied; this keeps the copies from drifting apart."""
    import ast
    seen = {}
    for name in MODELS:
        for node in ast.parse((ROOT / "models" / f"{name}.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in ("Config", "Model"):
                first, code = seen.setdefault(node.name, (name, ast.dump(node)))
                assert code == ast.dump(node), f"class {node.name} differs between models/{first}.py and models/{name}.py"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_imports_torch_and_the_standard_library_only(name):
    import ast
    tree = ast.parse((ROOT / "models" / f"{name}.py").read_text())
    imported = {(node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
                for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    assert imported <= {"torch"} | set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls_to_nearly_nothing_on_one_batch(name):
    """Overfitting one batch is the cheapest proof that inputs, outputs and gradients are connected."""
    model, cfg, _ = build((name, dict(discrete=True)), stir=False, d=32)
    model.train()
    batch = make_batch(cfg, rows=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = float(model.loss(batch)[1]["loss"])
    assert abs(first - torch.log(torch.tensor(float(A)))) < 0.7     # near ln(choices) before anything is learnt
    for _ in range(150):
        loss, log = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(log["loss"]) < 0.2
