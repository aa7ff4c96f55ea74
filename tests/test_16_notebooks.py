"""The notebooks: complete, executed, small; every one runs at scale smoke without a display; and lab.py's maps, quirks and tables are right."""
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
import lab  # noqa: E402

from models import dc, dm, dt, lsdt, radt, starformer  # noqa: E402

NAMES = ["quickstart", "data", "dt", "dc", "lsdt", "radt", "starformer", "dm"]
# every table and figure of the five papers that is a section; "X" are our own
IDS = {
    "dc": "DC-F3 DC-T1 DC-T3 DC-F5 DC-F6 DC-T5 DC-T11 DC-T12 DC-T13 DC-T14 DC-T17 DC-T18 DC-T19 X-3",
    "lsdt": "LSDT-F3 LSDT-T1 LSDT-T2 LSDT-T3 LSDT-T4 LSDT-F6 LSDT-F7 LSDT-F8 LSDT-F9 LSDT-F10 LSDT-F11 LSDT-F12 LSDT-B5 LSDT-T6 LSDT-T7 "
            "LSDT-T8 LSDT-T9 LSDT-T15",
    "radt": "RADT-F2 RADT-F5 RADT-F6 RADT-F7 RADT-F8 RADT-F9 RADT-T1 RADT-T2 RADT-T3 X-1 X-3",
    "starformer": "STAR-T1 STAR-F9 STAR-F10 STAR-T2 STAR-T3 STAR-F13 X-3",
    "dm": "DM-T1 DM-F2 DM-T2 DM-F4 DM-F5 DM-T3 DM-T6 DM-T10 DM-T11 X-2",
}


def notebook(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)


# --------------------------------------------------------------------------- as committed

@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs(name):
    file = ROOT / "notebooks" / f"{name}.ipynb"
    assert file.stat().st_size <= 2**20, "at most 1 MiB"
    nb = notebook(name)
    nbformat.validate(nb)
    code = [c for c in nb.cells if c.cell_type == "code"]
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert code[0].source.startswith("SCALE = ")
    stamp = "".join(o.data.get("text/markdown", "") for o in code[0].outputs)
    assert "Scale `local`" in stamp, "executed at the scale that is committed"
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1)), "executed from top to bottom"
    assert {k for o in outputs if "data" in o for k in o.data if k.startswith("image/")} <= {"image/png"}
    assert sum(bool(line.strip()) for c in code for line in c.source.splitlines()) <= 160
    assert not re.search(r"TODO", json.dumps(nb.cells))


@pytest.mark.parametrize("name", IDS)
def test_every_id_is_a_section_with_something_to_see(name):
    found, shown = [], {}
    for c in notebook(name).cells:
        if c.cell_type == "markdown" and (m := re.match(r"#+ ((?:DC|LSDT|RADT|STAR|DM)-[TFB][0-9]+|X-[0-9])\b", c.source)):
            found.append(m[1])
        elif c.cell_type == "code" and found:
            shown[found[-1]] = shown.get(found[-1], 0) + sum("image/png" in o.get("data", {}) or "|" in o.get("data", {}).get("text/markdown", "")
                                                            or o.output_type == "stream" for o in c.outputs)
    assert sorted(found) == sorted(IDS[name].split())
    assert not [id for id in found if not shown.get(id)], "a section without a table, a picture or a line"


def test_results_name_every_run():
    files = sorted((ROOT / "notebooks" / "results").glob("*.csv"))
    assert {f.stem for f in files} >= set(IDS) | {"dt"}
    for file in files:
        rows = file.read_text(encoding="utf-8").splitlines()
        assert rows[0] == ",".join(lab.COLUMNS) and len(rows) > 10 and file.stat().st_size < 2**20


# --------------------------------------------------------------------------- executed

def test_all_run_at_scale_smoke(monkeypatch):
    """From the notebooks' folder, and quickstart from the repository's as well; two at a time. CASES: no display, no network, minutes."""
    for key in ("DISPLAY", "MPLBACKEND"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("SCALE", "smoke")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def execute(job):
        name, folder = job
        nb = notebook(name)
        NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT / folder)}}).execute()
        text = json.dumps(nb.cells)
        assert "Scale `smoke`" in text
        return name, sum(len(c.outputs) for c in nb.cells if c.cell_type == "code")
    jobs = [(name, "notebooks") for name in sorted(NAMES, key=lambda n: -len(IDS.get(n, "")))] + [("quickstart", ".")]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(execute, jobs))
    assert all(n > 3 for _, n in done) and len(done) == len(NAMES) + 1


# --------------------------------------------------------------------------- maps

def batch(cfg, B=3, seed=0):
    g, K = torch.Generator().manual_seed(seed), cfg.context_len
    return dict(states=torch.randn(B, K, *cfg.state_shape, generator=g), actions=torch.rand(B, K, cfg.act_dim, generator=g) * 2 - 1,
                rewards=torch.rand(B, K, 1, generator=g), rtg=torch.rand(B, K, 1, generator=g), timesteps=torch.arange(K).expand(B, K),
                mask=torch.ones(B, K, dtype=torch.bool))


def spread(model, seed=0):
    """Weights large enough that maps differ from plain averages."""
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return model.double().eval()


@pytest.mark.parametrize("module, cfg", [
    (dt, dt.Config(context_len=4, d=16, n_layer=2, n_head=2)), (lsdt, lsdt.Config(context_len=4, d=16, n_layer=2, n_head=2, conv_ratio=0.5)),
    (starformer, starformer.Config(context_len=4, d=16, n_layer=2, n_head=2))])
def test_attention_maps_give_the_layers_own_output(module, cfg):
    """The weights times V are what the layer computes by its fused kernel, at the positions that it computes."""
    model = spread(module.Model(cfg))
    kinds = {dt: dt.Attention, lsdt: lsdt.LongBranch, starformer: starformer.Attention}[module]
    x = {k: v.double() if v.is_floating_point() else v for k, v in batch(cfg).items()}
    maps = lab.attention_maps(model, x)
    assert list(maps) == ["layer 1", "layer 2"]
    seen, hooks = [], []
    for m in (m for m in model.modules() if isinstance(m, kinds)):
        hooks.append(m.register_forward_hook(lambda m, args, out: seen.append((m, args, out))))
    lab.forward(model, x)
    for weights, (m, args, out) in zip(maps.values(), seen, strict=True):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert (weights.triu(1) == 0).all()
        v = torch.nn.functional.linear(args[0], m.qkv.weight, m.qkv.bias).chunk(3, -1)[2].unflatten(-1, (m.n_head, -1)).transpose(1, 2)
        y = (weights @ v).transpose(1, 2).flatten(2)
        y = m.proj(y) if hasattr(m, "proj") else y
        rows = args[1] if len(args) > 1 and args[1] is not None else slice(None)
        torch.testing.assert_close(y[:, rows], out)


def test_maps_of_the_direct_mixer_are_its_matrix():
    model = dt.Model(dt.Config(context_len=2, d=16, n_layer=1, mixer="direct"))
    want = [[1, 0, 0, 0, 0, 0], [1 / 2] * 2 + [0] * 4, [1 / 3] * 3 + [0] * 3, [1 / 4] * 4 + [0] * 2, [1 / 5] * 5 + [0], [1 / 6] * 6]
    torch.testing.assert_close(lab.attention_maps(model, batch(model.cfg))["layer 1"][0, 0], torch.tensor(want))


def test_kernel_maps_are_what_the_convolution_applies():
    """The mean over kernels stands at (token, token that it weighs); and those kernels, applied by hand, are the layer's output."""
    model = spread(lsdt.Model(lsdt.Config(context_len=3, d=16, n_layer=1, conv_ratio=1.0, kernel=4)))
    x = {k: v.double() if v.is_floating_point() else v for k, v in batch(model.cfg).items()}
    (m,), conv = lab.kernel_maps(model, x).values(), model.blocks[0].mixer.short
    torch.testing.assert_close(m.sum(-1), torch.ones_like(m[..., 0]))
    inputs = []
    with lab.watch(model, lsdt.DynamicConv, lambda name, module, x: inputs.append(x)):
        lab.forward(model, x)
    u = torch.nn.functional.glu(conv.expand(inputs[0]), -1)
    k = conv.kernels(u, None)
    for t in range(9):
        for s in range(9):
            want = k[:, t, t - s].mean(-1) if 0 <= t - s < 4 else torch.zeros(3, dtype=torch.float64)
            torch.testing.assert_close(m[:, t, s], want)


def test_gates_sum_to_one_and_filters_are_the_weights():
    model = lsdt.Model(lsdt.Config(context_len=2, d=16, n_layer=2))
    g = lab.gates(model, batch(model.cfg))
    assert [v.shape for v in g.values()] == [(3, 6, 16), (3, 2, 16)]            # the last layer's at state tokens
    torch.testing.assert_close(g["layer 1"].sum(-1), torch.ones(3, 6))
    model = dc.Model(dc.Config(context_len=2, d=16, n_layer=2, hybrid=True, window=3))
    assert {k: v.shape for k, v in lab.filters(model).items()} == {"layer 1": (3, 3, 16)}
    assert list(lab.attention_maps(model, batch(model.cfg))) == ["layer 2"]


def test_mixer_maps_stand_in_their_tokens_places():
    model = spread(dm.Model(dm.Config(context_len=3, d=16, n_layer=2, n_head=1, strategy="window", selection="fixed", fixed_k=0.5, aux=False)))
    x = {k: v.double() if v.is_floating_point() else v for k, v in batch(model.cfg).items()}
    keep, maps = model.selected(x)[0], lab.attention_maps(model, x)
    torch.testing.assert_close(maps["layer 1"].sum(-1), torch.ones(3, 1, 9, dtype=torch.float64))
    rows = maps["layer 2"].sum(-1)[:, 0]
    torch.testing.assert_close(rows, keep.double())                             # a selected token's row sums to 1, another's is empty
    assert (maps["layer 2"].sum(-2)[:, 0][~keep] == 0).all()                    # and nobody looks at an unselected one
    short = torch.tensor([[[[1.0, 0.0], [0.3, 0.7]]]])
    back = lab.put_back(short, torch.tensor([[False, True, False, True]]))[0, 0]
    torch.testing.assert_close(back, torch.tensor([[0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0], [0, 0.3, 0, 0.7]]))


# --------------------------------------------------------------------------- quirks of released code

def short_set():
    g = np.random.default_rng(0)
    return lab.data.Trajectories(g.normal(size=(8, 2)) + 5, g.uniform(-1, 1, (8, 1)), np.arange(8.0), [5, 3])


def test_left_padding_by_hand():
    t = short_set()
    windows, index = lab.data.Windows(t, 4), torch.tensor([6, 0])       # the second episode's last two steps; a whole window
    plain = windows.at(index)
    with lab.quirks("left padding"):
        b = windows.at(index)
    assert b["mask"].tolist() == [[False, False, True, True], [True] * 4]
    for k in b:
        torch.testing.assert_close(b[k][0, 2:], plain[k][0, :2])
        torch.testing.assert_close(b[k][1], plain[k][1])
    assert b["actions"][0, :2].tolist() == [[-10.0], [-10.0]] and b["timesteps"][0].tolist() == [0, 0, 1, 2]
    torch.testing.assert_close(b["states"][0, 0] * windows.std + windows.mean, torch.zeros(2), atol=1e-5, rtol=0)      # zero before normalisation
    torch.testing.assert_close(windows.at(index)["actions"], plain["actions"])          # put back


def test_left_padding_reaches_decision_convformer_when_it_acts():
    model = dc.Model(dc.Config(state_shape=(2,), act_dim=1, context_len=4, d=16)).eval()
    x = batch(model.cfg)
    history = [x[k][:, :2] for k in ("states", "actions", "rewards", "rtg", "timesteps")]
    plain = model.act(*history)
    with lab.quirks("left padding"):
        padded = model.act(*history)
    assert (plain - padded).abs().max() > 1e-4
    full = [x[k] for k in ("states", "actions", "rewards", "rtg", "timesteps")]
    with lab.quirks("left padding"):
        torch.testing.assert_close(model.act(*full), dc.Model.act(model, *full))


def test_inverted_mask_blinds_real_tokens_of_padded_windows():
    """The last real step's gradient to an earlier real state: zero in a padded window, as measured on the released code, but not in a full one."""
    model = radt.Model(radt.Config(state_shape=(2,), act_dim=1, context_len=4, d=16, n_layer=2, dropout=0.0))
    for first, seen in ((2, False), (4, True)):
        x = batch(model.cfg, B=1)
        x["mask"][:, : 4 - first] = False
        x["states"].requires_grad_()
        only_last = x | {"mask": x["mask"]}
        with lab.quirks("inverted mask"):
            loss, _ = model.loss(only_last)
            y = []
            hook = model.head.register_forward_hook(lambda m, args, out, y=y: y.append(out))
            model.loss(only_last)
            hook.remove()
        grad, = torch.autograd.grad(y[0][0, -1].sum(), x["states"])
        assert bool(grad[0, -2].abs().max() > 1e-8) == seen and grad[0, -1].abs().max() > 1e-8, first
        assert torch.isfinite(loss)
    x = batch(model.cfg)
    with lab.quirks("inverted mask"):
        quirky, _ = model.loss(x)
    torch.testing.assert_close(quirky, model.loss(x)[0], atol=1e-5, rtol=0)             # without padding nothing changes


def test_label_leak_shows_the_present_reward_while_training_only():
    model = starformer.Model(starformer.Config(context_len=3, d=16, n_layer=1, dropout=0.0, condition="reward"))
    x = batch(model.cfg)
    other = x | {"rewards": x["rewards"] + torch.tensor([0.0, 0.0, 1.0])[None, :, None]}
    for leak, training, differs in ((True, True, True), (True, False, False), (False, True, False)):
        with lab.quirks("label leak" if leak else None):
            model.train(training)
            assert bool((model(**x) - model(**other))[:, -1].abs().max() > 1e-7) == differs


def test_unclamped_cosine_climbs_again():
    cfg = lab.settings.TrainConfig(steps=1000, warmup=0, lr=1.0)
    free, held = ([f(cfg, s) for s in range(1001)] for f in (lab.unclamped, lab.clamped))
    assert free[0] == held[0] == 1.0 and min(free) == 0.1 and held[-1] == 0.1
    np.testing.assert_allclose([free[x] for x in (100, 200, 300, 400, 500, 600, 700, 800, 900, 1000)],
                               [.933, .75, .5, .25, .1, .1, .1, .25, .5, .75], atol=2e-3)     # the released multipliers at the ends of ten epochs
    before = lab.train.learning_rate
    with lab.quirks("unclamped cosine"):
        assert lab.train.learning_rate is lab.unclamped
    assert lab.train.learning_rate is before
    with pytest.raises(ValueError, match="label leak"), lab.quirks("no such"):
        pass


# --------------------------------------------------------------------------- runs and tables

@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """lab at scale smoke, its runs in a folder of their own; everything it replaces is put back."""
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    monkeypatch.setenv("SCALE", "smoke")
    for owner, name in ((lab.data, "load"), (lab.data, "make_env"), (lab.player, "make_env")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("name", "scale", "rows"):
        monkeypatch.setattr(lab.here, name, getattr(lab.here, name))
    lab.begin("mine", "local")
    return tmp_path


def test_a_finished_run_is_found_again(smoke, monkeypatch):
    first = lab.run("maze2d-umaze", 0, "one", model="dt")
    monkeypatch.setattr(lab.train, "train", None)           # would raise if called
    again = lab.run("maze2d-umaze", 0, "two", model="dt")
    assert again.folder == first.folder and again.rows == first.rows and (first.label, again.label) == ("one", "two")
    with pytest.raises(TypeError):
        lab.run("maze2d-umaze", 1, model="dt")
    with pytest.raises(TypeError):
        lab.run("maze2d-umaze", 0, model="dt", quirk="unclamped cosine")        # a quirk makes another run


def test_an_interrupted_run_goes_on(smoke, monkeypatch):
    run = lab.run("maze2d-umaze", model="dt")
    (run.folder / "result.json").unlink()
    asked = []
    real = lab.train.train
    monkeypatch.setattr(lab.train, "train", lambda resume, **k: asked.append(resume) or real(resume=resume, **k))
    assert lab.run("maze2d-umaze", model="dt").rows == run.rows and asked == [True]
    for file in ("result.json", "last.pt"):                 # stopped before its first checkpoint: begun anew, in its own place
        (run.folder / file).unlink()
    assert lab.run("maze2d-umaze", model="dt").folder == run.folder and asked == [True, False]


def test_results_and_tables(smoke, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(lab, "show", shown.append)
    variants = {"three": {"model": "dc"}, "one": {"model": "dc", "filters": "shared"}}
    runs = lab.compare("DC-T17", variants, "maze2d-umaze", seeds=2, paper={"three": 94.2})
    assert len(runs) == 4 and "| maze2d-umaze | three |" in shown[0] and "94.2" in shown[0] and "mechanism only" in shown[0]
    rows = (smoke / "runs/notebooks/smoke/mine.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(len(r.rows) for r in runs) and rows[-1].startswith("DC-T17,one,dc,maze2d-umaze,")
    assert "filters=shared" in rows[-1] and ",local," in rows[-1]
    assert not (smoke / "notebooks").exists()               # smoke leaves the committed results alone


def test_curves_by_hand():
    """Two seeds. A step's rows of several targets are one point, those of the best checkpoint none; targets count from the last start."""
    def log(*points):
        return [dict(step=str(s), loss=str(x), checkpoint=c) for s, x, c in points]

    def row(start, target, achieved):
        return dict(start=start, target=target, achieved_mean=achieved, abs_error=abs(target - achieved))
    def run(log, *rows):
        r = lab.Run.__new__(lab.Run)        # without a folder
        r.__dict__.update(label="a", log=log, rows=rows)
        return r
    one = run(log((10, 1.0, ""), (20, 2.0, "last"), (20, 4.0, "last"), (20, 99.0, "best")),
              row("random", 5.0, 0.0), row("far", 5.0, 3.0), row("far", 1.0, 1.0))
    two = run(log((10, 3.0, ""), (20, 5.0, "last")), row("far", 1.0, 2.0), row("far", 5.0, 5.0))
    assert lab.log_curve([one, two]) == {"a": ([10, 20], [2.0, 4.0], [1.0, 1.0])}
    assert lab.target_curve([one, two]) == {"a": ([1.0, 5.0], [1.5, 4.0], [0.5, 1.0])}
    assert lab.target_curve([one, two], key="abs_error") == {"a": ([1.0, 5.0], [0.5, 1.0], [0.5, 1.0])}
    assert lab.target_curve([one], [[row("far", 9.0, 7.0)]]) == {"a": ([9.0], [7.0], [0.0])}


def test_hours_are_updates_times_milliseconds():
    assert lab.hours_of("hopper-medium", {"model": "dt", "quirk": "left padding"}) == pytest.approx(100_000 * 1.3 / 3.6e6)
    assert lab.hours_of("breakout", {"model": "dt", "steps": 1000}) == pytest.approx(1000 * 7.0 / 3.6e6)


def test_interval_by_hand():
    assert lab.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"     # t(0.975, 2) = 4.303, times 1 / sqrt(3)
    assert (lab.interval([]), lab.interval([None]), lab.interval([0.0]), lab.interval([1.25], 2)) == ("-", "-", "0.0", "1.25")


def test_expected_reads_headlines_of_default_runs(tmp_path):
    line = dict.fromkeys(lab.COLUMNS, "") | dict(model="dt", env="e", dataset="d", source="local", trained="True", headline="True", seconds="60",
                                              success="0.0")
    rows = [line | dict(seed="0", return_mean="9.0", headline="False"), line | dict(seed="0", return_mean="1.0"),
            line | dict(seed="1", return_mean="3.0"),
            line | dict(seed="2", return_mean="7.0", settings="d=8"), line | dict(seed="3", return_mean="7.0", trained="False")]
    text = "\n".join([",".join(lab.COLUMNS)] + [",".join(r[k] for k in lab.COLUMNS) for r in rows])
    (tmp_path / "x.csv").write_text(text)
    assert lab.expected(tmp_path).splitlines()[-1] == "| e | dt | d (local) | 2 | 2.0 ± 12.7 | - | 0.0 ± 0.0 | - | 1.0 |"


def test_scale_is_checked(monkeypatch):
    monkeypatch.setenv("SCALE", "big")
    with pytest.raises(ValueError, match="smoke, local, paper"):
        lab.begin("x", "local")
