"""The experiments: complete, executed, small, running at scale smoke; their maps, quirks and tables.

    pytest tests/test_16_notebooks.py
"""
import importlib.util
import json
import linecache
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

import data
import envs
import settings
import train
from errors import UserError
from models import dc, dm, dt, lsdt, radt, starformer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
import lab  # noqa: E402
import maps  # noqa: E402
import records  # noqa: E402
import released  # noqa: E402

EXPERIMENTS = [f"experiments/{name}" for name in ("dt", "dc", "lsdt", "radt", "starformer", "dm")]
# every table and figure of the five papers that is a section; "X" are our own
IDS = {
    "experiments/dt": "DT-1 DT-2 DT-3 DT-4 X-4 X-5",
    "experiments/dc":
        "DC-F3 DC-T1 DC-T2 DC-T3 DC-F5 DC-F6 DC-T5 DC-T11 DC-T12 DC-T13 DC-T14 DC-T17 DC-T18 DC-T19 X-3",
    "experiments/lsdt":
        "LSDT-F3 LSDT-T1 LSDT-T2 LSDT-T3 LSDT-T4 LSDT-F6 LSDT-F7 LSDT-F8 LSDT-F9 LSDT-F10 LSDT-F11 LSDT-F12 "
        "LSDT-B5 LSDT-T6 LSDT-T7 LSDT-T8 LSDT-T9 LSDT-T15",
    "experiments/radt": "RADT-F2 RADT-F5 RADT-F6 RADT-F7 RADT-F8 RADT-F9 RADT-T1 RADT-T2 RADT-T3 X-1 X-3",
    "experiments/starformer": "STAR-T1 STAR-F9 STAR-F10 STAR-T2 STAR-T3 STAR-F13 X-3",
    "experiments/dm": "DM-T1 DM-F2 DM-T2 DM-F4 DM-F5 DM-T3 DM-T4 DM-T5 DM-T6 DM-T10 DM-T11 X-2",
}
SECTION = re.compile(r"#+ ((?:DC|LSDT|RADT|STAR|DM)-[TFB][0-9]+|DT-[0-9]|X-[0-9])\b")


# a word that is records.verdict()'s of a claim, and the difference:
# [holds](../records.py "DT-1 a-set: DT > BC in return") (12.3 ± 4.5)
WORD = re.compile(r'\[([a-z ]+)\]\(\.\./records\.py "(.+?)"\)(?: \((-?[0-9].*?)\))?')


def notebook(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)


def code_cells(name):
    return [cell for cell in notebook(name).cells if cell.cell_type == "code"]


# ------------------------------------------------------------------- as committed

@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_outputs(name):
    file = ROOT / "notebooks" / f"{name}.ipynb"
    assert file.stat().st_size <= 2**20, "at most 1 MiB"
    nb = notebook(name)
    nbformat.validate(nb)
    code = code_cells(name)
    outputs = [out for cell in code for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert code[0].source.startswith("SCALE = ")
    stamp = "".join(out.data.get("text/markdown", "") for out in code[0].outputs)
    assert "Scale `local`" in stamp, "executed at the scale that is committed"
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "executed from top to bottom"
    pictures = {key for out in outputs if "data" in out for key in out.data if key.startswith("image/")}
    assert pictures <= {"image/png"}
    lines = [0]         # of code: before the first section, and in each one
    for cell in nb.cells:
        if cell.cell_type == "code":
            lines[-1] += sum(bool(line.strip()) for line in cell.source.splitlines())
        elif cell.source.startswith("## "):
            lines.append(0)
    assert max(lines) <= 60 and len(lines) > 4, "a section is read in one go"
    assert not re.search(r"TODO", json.dumps(nb.cells))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_printed_source_is_what_the_files_hold(name, monkeypatch):
    """A cell that shows code shows it as it is today."""
    shown, count = [], 0
    monkeypatch.setattr(lab, "show", shown.append)
    for cell in code_cells(name):
        if cell.source.startswith("lab.source("):
            exec(cell.source, {"lab": lab})
            assert shown.pop() == cell.outputs[0].data["text/markdown"], cell.source
            count += 1
    assert count


@pytest.mark.parametrize("name", IDS)
def test_every_id_is_a_section_with_something_to_see(name):
    found, shown = [], {}
    for cell in notebook(name).cells:
        if cell.cell_type == "markdown" and (match := SECTION.match(cell.source)):
            found.append(match[1])
        elif cell.cell_type == "code" and found:
            shown[found[-1]] = shown.get(found[-1], 0) + sum(
                "image/png" in out.get("data", {}) or "|" in out.get("data", {}).get("text/markdown", "")
                or out.output_type == "stream" for out in cell.outputs)
    assert sorted(found) == sorted(IDS[name].split())
    assert not [id for id in found if not shown.get(id)], "a section without a table, a picture or a line"


def sections(name):
    """{id: its cells}"""
    found, id = {}, None
    for cell in notebook(name).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            match = SECTION.match(cell.source)
            id = match and match[1]
        if id:
            found.setdefault(id, []).append(cell)
    return found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_section_runs_after_the_first_cell_alone(name):
    """No name is another section's."""
    first = code_cells(name)[0].source
    for id, cells in sections(name).items():
        text = "\n".join([first, *(cell.source for cell in cells if cell.cell_type == "code")])
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{id}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_table_of_verdicts_leads_to_the_sections(name):
    """Each judged claim once in its section and once in the table on top, which has every section."""
    cells = [cell.source for cell in notebook(name).cells if cell.cell_type == "markdown"]
    table = next(text for text in cells if text.startswith("## Verdicts"))
    headings = [line.lstrip("# ").replace(" ", "-") for text in cells for line in text.splitlines()
                if line.startswith("#")]
    links = re.findall(r"^\| \[([^]]+)\]\(#(\S+)\) \|", table, re.M)
    assert {link for _, link in links} <= set(headings)
    assert {id for id, _ in links} == set(IDS[name].split()), "every section, judged or not"
    below = [claim for text in cells if text != table for claim in WORD.findall(text)]
    assert below and sorted(WORD.findall(table)) == sorted(below)


def test_results_name_every_run():
    files = sorted((ROOT / "notebooks" / "results").glob("*.csv"))
    assert {file.stem for file in files} >= {Path(name).name for name in EXPERIMENTS}
    for file in files:
        rows = file.read_text(encoding="utf-8").splitlines()
        assert rows[0] == ",".join(records.COLUMNS) and len(rows) > 10 and file.stat().st_size < 2**20


# ------------------------------------------------------------------- executed

def outputs_at_smoke(jobs, timeout, monkeypatch):
    """The outputs of each (notebook, folder), executed there, two at a time, without a display."""
    for key in ("DISPLAY", "MPLBACKEND"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("SCALE", "smoke")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def execute(job):
        nb, folder = job
        place = {"metadata": {"path": str(folder)}}
        NotebookClient(nb, timeout=timeout, kernel_name="python3", resources=place).execute()
        assert "Scale `smoke`" in json.dumps(nb.cells)
        return [out for cell in nb.cells if cell.cell_type == "code" for out in cell.outputs]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(execute, jobs))


def test_all_run_at_scale_smoke(alone, monkeypatch):
    """From their folder, and one from the repository's too."""
    names = sorted(EXPERIMENTS, key=lambda name: -len(IDS.get(name, "")))
    jobs = [(notebook(name), (ROOT / "notebooks" / name).parent) for name in names]
    results = {file: file.read_bytes() for file in (ROOT / "notebooks" / "results").glob("*.csv")}
    done = outputs_at_smoke([*jobs, (notebook("experiments/dt"), ROOT)], 300, monkeypatch)
    assert min(map(len, done)) > 3 and len(done) == len(EXPERIMENTS) + 1
    assert results == {file: file.read_bytes() for file in results}     # as committed


# ------------------------------------------------------------------- maps

def batch(cfg, B=3, seed=0):
    g, K = torch.Generator().manual_seed(seed), cfg.context_len
    return dict(
        states=torch.randn(B, K, *cfg.state_shape, generator=g),
        actions=torch.rand(B, K, cfg.act_dim, generator=g) * 2 - 1,
        rewards=torch.rand(B, K, 1, generator=g), rtg=torch.rand(B, K, 1, generator=g),
        timesteps=torch.arange(K).expand(B, K), mask=torch.ones(B, K, dtype=torch.bool))


def doubled(batch):
    return {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}


def spread(model, seed=0):
    """Weights large enough that maps differ from plain averages."""
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return model.double().eval()


SMALL = dict(context_len=4, d=16, n_layer=2, n_head=2)


@pytest.mark.parametrize("module, cfg, kind", [
    (dt, dt.Config(**SMALL), dt.Attention),
    (lsdt, lsdt.Config(**SMALL, conv_ratio=0.5), lsdt.LongBranch),
    (starformer, starformer.Config(**SMALL), starformer.Attention),
    (dm, dm.Config(**SMALL, selection="none"), dm.Attention)])
def test_attention_maps_give_the_layers_own_output(module, cfg, kind):
    """The weights times V are what the layer computes by its fused kernel."""
    model = spread(module.Model(cfg))
    x = doubled(batch(cfg))
    found = maps.attention_maps(model, x)
    assert list(found) == ["layer 1", "layer 2"]
    for title, (m, z) in maps.watched(model, x, kind, lambda m, z: (m, z)).items():
        weights = found[title]
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert (weights.triu(1) == 0).all()
        v = m.qkv(z).chunk(3, -1)[2].unflatten(-1, (m.n_head, -1)).transpose(1, 2)
        y = (weights @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(m.proj(y) if hasattr(m, "proj") else y, m(z))


def test_maps_of_the_direct_mixer_are_its_matrix():
    model = dt.Model(dt.Config(context_len=2, d=16, n_layer=1, mixer="direct"))
    want = [[1 / n] * n + [0] * (6 - n) for n in range(1, 7)]
    found = maps.attention_maps(model, batch(model.cfg))["layer 1"][0, 0]
    torch.testing.assert_close(found, torch.tensor(want))


def test_group_maps_give_the_layers_own_output():
    """The weights times V are what a step's group gets: its action's token, its return's, and 11 numbers."""
    model = spread(starformer.Model(starformer.Config(**SMALL, condition="rtg")))
    x = doubled(batch(model.cfg))
    found = maps.group_maps(model, x)
    assert found.shape == (2, 3, 4, 4, 13, 13)
    m, z = maps.watched(model, x, starformer.GroupAttention, lambda m, z: (m, z))["layer 2"]
    v = m.qkv(z).chunk(3, -1)[2].unflatten(-1, (m.n_head, -1)).transpose(1, 2)
    torch.testing.assert_close(m.proj((found[1].flatten(0, 1) @ v).transpose(1, 2).flatten(2)), m(z))


def test_kernel_maps_are_what_the_convolution_applies():
    """The mean over kernels stands at (token, token that it weighs)."""
    model = spread(lsdt.Model(lsdt.Config(context_len=3, d=16, n_layer=1, conv_ratio=1.0, kernel=4)))
    x = doubled(batch(model.cfg))
    found = maps.kernel_maps(model, x)["layer 1"]
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    m, z = maps.watched(model, x, lsdt.DynamicConv, lambda m, z: (m, z))["layer 1"]
    k = m.kernels(torch.nn.functional.glu(m.expand(z), -1))
    for t in range(9):
        for s in range(9):
            want = k[:, t, t - s].mean(-1) if 0 <= t - s < 4 else torch.zeros(3, dtype=torch.float64)
            torch.testing.assert_close(found[:, t, s], want)


def test_gates_sum_to_one_and_filters_are_the_weights():
    model = lsdt.Model(lsdt.Config(context_len=2, d=16, n_layer=2))
    gates = maps.gates(model, batch(model.cfg))
    assert {key: x.shape for key, x in gates.items()} == {"layer 1": (3, 6, 16), "layer 2": (3, 6, 16)}
    for x in gates.values():
        torch.testing.assert_close(x.sum(-1), torch.ones(3, 6))
    model = dc.Model(dc.Config(context_len=2, d=16, n_layer=2, hybrid=True, window=3))
    assert {key: x.shape for key, x in maps.filters(model).items()} == {"layer 1": (3, 3, 16)}
    assert list(maps.attention_maps(model, batch(model.cfg))) == ["layer 2"]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_mixer_maps_stand_in_their_tokens_places():
    cfg = dm.Config(context_len=3, d=16, n_layer=2, n_head=1, selection="fixed", aux=False)
    model = spread(dm.Model(cfg))
    x = doubled(batch(cfg))
    found, kept = maps.attention_maps(model, x), model.selected(x)[0]
    torch.testing.assert_close(found["layer 1"].sum(-1), torch.ones(3, 1, 9, dtype=torch.float64))
    # a selected token's row sums to 1, another's is empty, and nobody looks at an unselected one
    torch.testing.assert_close(found["layer 2"].sum(-1)[:, 0], kept.double())
    assert (found["layer 2"].sum(-2)[:, 0][~kept] == 0).all()
    short = torch.tensor([[[[1.0, 0.0], [0.3, 0.7]]]])
    back = maps.put_back(short, torch.tensor([[False, True, False, True]]))[0, 0]
    want = [[0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0], [0, 0.3, 0, 0.7]]
    torch.testing.assert_close(back, torch.tensor(want))


# ------------------------------------------------------------------- quirks of released code

def test_left_padding_by_hand():
    g = np.random.default_rng(0)
    t = data.Trajectories(g.normal(size=(8, 2)) + 5, g.uniform(-1, 1, (8, 1)), np.arange(8.0), [5, 3])
    # the second episode's last two steps; a whole window
    windows, index = data.Windows(t, 4), torch.tensor([6, 0])
    plain = windows.gather(index)
    with released.quirks("left padding"):
        b = windows.gather(index)
        for kind in ("start", "end", "cover"):
            drawn = data.Windows(t, 4, windows=kind).sample(50)["mask"].long()
            assert (drawn.diff() >= 0).all() and drawn[:, -1].all()
    assert b["mask"].tolist() == [[False, False, True, True], [True] * 4]
    for key in b:
        torch.testing.assert_close(b[key][0, 2:], plain[key][0, :2])
        torch.testing.assert_close(b[key][1], plain[key][1])
    assert b["actions"][0, :2].tolist() == [[-10.0], [-10.0]] and b["timesteps"][0].tolist() == [0, 0, 1, 2]
    blank = b["states"][0, 0] * windows.std + windows.mean
    torch.testing.assert_close(blank, torch.zeros(2), atol=1e-5, rtol=0)        # zero before normalisation
    torch.testing.assert_close(windows.gather(index)["actions"], plain["actions"])      # put back


def test_left_padding_reaches_decision_convformer_when_it_acts():
    model = dc.Model(dc.Config(state_shape=(2,), act_dim=1, context_len=4, d=16)).eval()
    x = batch(model.cfg)
    full = [x[key] for key in ("states", "actions", "rewards", "rtg", "timesteps")]
    history = [part[:, :2] for part in full]
    plain, whole = model.act(*history), model.act(*full)
    with released.quirks("left padding"):
        padded = model.act(*history)
        torch.testing.assert_close(model.act(*full), whole)
    assert (plain - padded).abs().max() > 1e-4


def test_inverted_mask_blinds_real_tokens_of_padded_windows():
    """The last step's gradient to the state before is zero in a padded window, and only there."""
    cfg = radt.Config(state_shape=(2,), act_dim=1, context_len=4, d=16, n_layer=2, dropout=0.0)
    model = radt.Model(cfg)
    for real, seen in ((2, False), (4, True)):
        x = batch(cfg, B=1)
        x["mask"][:, :4 - real] = False
        x["states"].requires_grad_()
        outputs = []
        hook = model.head.register_forward_hook(lambda m, args, out, outputs=outputs: outputs.append(out))
        with released.quirks("inverted mask"):
            loss, _ = model.loss(x)
        hook.remove()
        grad, = torch.autograd.grad(outputs[0][0, -1].sum(), x["states"])
        assert bool(grad[0, -2].abs().max() > 1e-8) == seen and grad[0, -1].abs().max() > 1e-8, real
        assert torch.isfinite(loss)
    x = batch(cfg)
    with released.quirks("inverted mask"):
        quirky, _ = model.loss(x)
        acting = model.act(*(x[key] for key in ("states", "actions", "rewards", "rtg", "timesteps")))
    torch.testing.assert_close(quirky, model.loss(x)[0], atol=1e-5, rtol=0)     # without padding the same
    torch.testing.assert_close(acting, model(**x)[:, -1])       # acting pads nothing


def test_of_the_last_return_alone_nothing_before_is_learnt_or_heard():
    """Earlier returns and losses change neither the gradient nor the action; the last return does."""
    cfg = dt.Config(state_shape=(3,), act_dim=2, **SMALL)
    model, inputs = spread(dt.Model(cfg)), doubled(batch(cfg))
    inputs["mask"][0, 2:] = False
    last = torch.tensor([1, 3, 3])
    past = torch.arange(4)[None, :, None] < last[:, None, None]

    def gradient(**new):
        model.zero_grad()
        loss, _ = model.loss(inputs | new)
        loss.backward()
        return loss.item(), model.blocks[0].mixer.qkv.weight.grad.clone()
    with released.quirks("last step"):
        error = (model(**inputs) - inputs["actions"]).square().mean(-1)
        loss, _ = gradient()
        assert loss == pytest.approx(float(error[range(3), last].detach().mean()))
        heard, _ = gradient(rtg=inputs["rtg"] + past)
    assert heard != loss, "all returns are read"
    with released.quirks("last return"):
        loss, slope = gradient()
        again, other = gradient(rtg=inputs["rtg"] + past)
        assert again == loss and torch.equal(slope, other)
        assert gradient(rtg=inputs["rtg"] + ~past)[0] != loss
        history = [inputs[key] for key in ("states", "actions", "rewards", "rtg", "timesteps")]
        action = model.act(*history)
        history[3] = history[3] + (torch.arange(4)[None, :, None] < 3)
        assert torch.equal(model.act(*history), action)
        history[3] = history[3] + 1
        assert not torch.equal(model.act(*history), action)


def test_label_leak_shows_the_present_reward_while_training_only():
    model = starformer.Model(starformer.Config(context_len=3, d=16, n_layer=1, dropout=0.0))
    x = batch(model.cfg)
    other = x | {"rewards": x["rewards"] + torch.tensor([0.0, 0.0, 1.0])[None, :, None]}
    for leak, training, differs in ((True, True, True), (True, False, False), (False, True, False)):
        with released.quirks("label leak" if leak else None):
            model.train(training)
            assert bool((model(**x) - model(**other))[:, -1].abs().max() > 1e-7) == differs


def test_unclamped_cosine_climbs_again():
    cfg = settings.TrainConfig(steps=1000, warmup=0, lr=1.0)
    free, held = ([f(cfg, s) for s in range(1001)] for f in (released.unclamped, released.clamped))
    assert free[0] == held[0] == 1.0 and min(free) == 0.1 and held[-1] == 0.1
    # the released multipliers at the ends of ten epochs
    np.testing.assert_allclose([free[s] for s in range(100, 1001, 100)],
                               [.933, .75, .5, .25, .1, .1, .1, .25, .5, .75], atol=2e-3)
    before = train.learning_rate
    with released.quirks("unclamped cosine"):
        assert train.learning_rate is released.unclamped
    assert train.learning_rate is before
    with pytest.raises(ValueError, match="label leak"), released.quirks("no such"):
        pass


# ------------------------------------------------------------------- runs and tables

@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """lab at scale smoke, its runs in a folder of their own; everything it replaces is put back."""
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    monkeypatch.setenv("SCALE", "smoke")
    for name in ("name", "scale", "own"):
        monkeypatch.setattr(lab.here, name, getattr(lab.here, name))
    (tmp_path / "docs").mkdir()
    lab.begin("mine", "local")
    return tmp_path


TINY = dict(steps=3, batch_size=4, d=8, n_layer=1, n_head=1, context_len=2, warmup=1, targets=(1.0,),
            eval_episodes=2)


@pytest.fixture
def local(smoke, monkeypatch):
    """The same at scale local, on random play; runs are given TINY."""
    monkeypatch.setenv("SCALE", "local")
    monkeypatch.setattr(lab.data, "local_id", lambda name: None)
    lab.begin("mine", "local")
    return smoke


def untrained(monkeypatch):
    """From now on, training is an error."""
    monkeypatch.setattr(train, "train", None)


def test_a_finished_run_is_found_again(smoke, monkeypatch):
    first = lab.run("maze2d-umaze", 0, "one", model="dt")
    monkeypatch.setattr(train, "train", None)       # raises if called
    again = lab.run("maze2d-umaze", 0, "two", model="dt")
    assert again.folder == first.folder and again.rows == first.rows
    assert (first.label, again.label) == ("one", "two")
    with pytest.raises(TypeError):
        lab.run("maze2d-umaze", 1, model="dt")
    with pytest.raises(TypeError):      # a quirk makes another run
        lab.run("maze2d-umaze", 0, model="dt", quirk="unclamped cosine")


def test_an_interrupted_run_goes_on(smoke, monkeypatch):
    run = lab.run("maze2d-umaze", model="dt")
    (run.folder / "result.json").unlink()
    resumed, ours = [], train.train

    def noted(*args, resume=None, **given):
        resumed.append(resume)
        return ours(*args, resume=resume, **given)
    monkeypatch.setattr(train, "train", noted)
    assert lab.run("maze2d-umaze", model="dt").rows == run.rows and resumed == [run.folder]
    for file in ("result.json", "last.pt"):     # stopped before its first checkpoint: begun anew
        (run.folder / file).unlink()
    assert lab.run("maze2d-umaze", model="dt").folder == run.folder and resumed == [run.folder, None]


@pytest.mark.parametrize("env", ["antmaze-umaze", "kitchen-complete", "breakout"])
def test_random_play_fits_its_environment(smoke, env):
    """Episodes of 10 steps with the environment's states, goals and actions; those played are as short."""
    t, fact = lab.load(env, "local"), envs.ENVS[env]
    assert t.lengths.tolist() == [10] * 6 and t.source == "local" and t.state_shape == fact.state_shape
    assert (t.act_dim, t.goal_dim, t.discrete) == (fact.act_dim, fact.goal_dim, fact.discrete)
    run = lab.run(env, model="dt")
    assert [row["length"] for row in run.rows] == [10.0] * len(run.rows)
    whole = run.batch(5)
    assert whole["mask"].all() and whole["states"].shape[0] == 5


def test_a_switch_without_effect_is_refused(smoke):
    with pytest.raises(UserError, match="fusion"):
        lab.run("maze2d-umaze", model="lsdt", conv_ratio=1.0, fusion="concat")


class Untrained(lab.Run):
    """A run with one row, so that cells which loop over environments come to their end."""

    def __init__(self, label, env, given):
        row = dict(start="random", target=1.0, episodes=1, achieved=[1.0], achieved_mean=1.0, return_mean=1.0,
                   score=1.0, success=None, abs_error=0.0)
        vars(self).update(label=label, env=env, seed=0, settings=given, asked=1.0, rows=[row], log=[])

    def play(self, targets=None, zero=(), episodes=None):
        return self.rows

    def best_return(self):
        return 1.0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")      # means of nothing
@pytest.mark.parametrize("scale", ["local", "paper"])
def test_every_variant_is_a_model(scale, monkeypatch):
    """What the notebooks ask for can be built; nothing is trained, timed or loaded."""
    monkeypatch.setenv("SCALE", scale)
    for name in ("scale", "own", "name"):
        monkeypatch.setattr(lab.here, name, getattr(lab.here, name))
    for name in ("show", "table", "alignment", "bench", "load", "picture", "lines", "heat_maps"):
        monkeypatch.setattr(lab, name, lambda *args, **given: None)
    asked, failed, built = set(), [], set()

    def build(env, label, given):
        try:
            fitted = settings.fitted(lab.resolved(given), envs.ENVS[env])
            if (key := f"{fitted.train.model} {fitted.model}") not in built:
                built.add(key)
                with torch.device("meta"):
                    settings.model_of(fitted)
        except UserError as error:
            failed.append((env, label, str(error)))

    def sweep(id, variants, names, trained=False, seeds=None, **common):
        asked.add(id)
        runs = []
        for env in [names] if isinstance(names, str) else names:
            for label, given in variants.items():
                given = common | (given(env) if callable(given) else given)
                runs.append(Untrained(label, env, given))
                if given.get("quirk", "label leak") not in released.QUIRKS:
                    failed.append((env, label, "no such quirk"))
                build(env, f"{id}: {label}", lab.values_of(env, 0, trained, given))
        return runs

    def counters(env, **given):
        build(env, "counters", dict(size="paper", env=env) | given)
        return dict(params=1, mixer_params=1, macs=1)
    monkeypatch.setattr(lab, "sweep", sweep)
    monkeypatch.setattr(lab, "counters", counters)
    for name in IDS:
        names, sections = {}, set()
        asked.clear()
        for cell in code_cells(name):
            sections |= set(re.findall(r'lab\.(?:sweep|compare)\(\s*"([^"]+)"', cell.source))
            try:
                exec(cell.source, names)
            except Exception as error:      # most likely there is no model to show
                if "has no effect" in str(error):
                    failed.append((name, cell.source, str(error)))
        shown = {"STAR-F10"} if scale == "local" else set()     # from weights that come with the project
        assert asked == sections - shown, name
    assert not failed and len(built) > 50


def test_results_and_tables(smoke, monkeypatch):
    shown = []
    monkeypatch.setattr(lab, "show", shown.append)
    variants = {"three": {"model": "dc"}, "one": {"model": "dc", "filters": "shared"}}
    runs = lab.compare("DC-T17", variants, "maze2d-umaze", seeds=2, paper={"three": 94.2})
    assert len(runs) == 4 and "| maze2d-umaze | three |" in shown[0]
    assert "94.2" in shown[0] and "mechanism only" in shown[0]
    rows = (smoke / "runs/notebooks/smoke/results/mine.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(len(r.rows) for r in runs)
    assert rows[-1].startswith("DC-T17,one,dc,maze2d-umaze,")
    assert "filters=shared" in rows[-1] and ",local," in rows[-1]
    with pytest.raises(ValueError, match="scale smoke gives is no result"):
        lab.commit_results()
    assert not (smoke / "notebooks").exists()       # smoke leaves the committed results alone


def test_curves_by_hand():
    """Two seeds. A step's rows are one point, without the best checkpoint's; targets: of the last start."""
    def log(*points):
        return [dict(step=str(s), loss=str(x), checkpoint=c) for s, x, c in points]

    def row(start, target, achieved):
        return dict(start=start, target=target, achieved_mean=achieved, abs_error=abs(target - achieved))

    def run(log, *rows):
        r = lab.Run.__new__(lab.Run)        # without a folder
        vars(r).update(label="a", log=log, rows=rows)
        return r
    one = run(log((10, 1.0, ""), (20, 2.0, "last"), (20, 4.0, "last"), (20, 99.0, "best")),
              row("random", 5.0, 0.0), row("far", 5.0, 3.0), row("far", 1.0, 1.0))
    two = run(log((10, 3.0, ""), (20, 5.0, "last")), row("far", 1.0, 2.0), row("far", 5.0, 5.0))
    assert lab.log_curve([one, two]) == {"a": ([10, 20], [2.0, 4.0], [1.0, 1.0])}
    assert lab.log_curve([run([dict(step="5", loss="2.5")])]) == {"a": ([5], [2.5], [0.0])}    # no evaluation
    assert lab.target_curve([one, two]) == {"a": ([1.0, 5.0], [1.5, 4.0], [0.5, 1.0])}
    assert lab.target_curve([one, two], key="abs_error") == {"a": ([1.0, 5.0], [0.5, 1.0], [0.5, 1.0])}
    assert lab.target_curve([one], [[row("far", 9.0, 7.0)]]) == {"a": ([9.0], [7.0], [0.0])}


# ------------------------------------------------------------------- nothing wrong is kept

def test_smoke_leaves_nothing_behind(local, monkeypatch):
    """In one kernel: episodes of 10 steps end with scale smoke, and so do its data and its runs."""
    monkeypatch.setenv("SCALE", "smoke")
    lab.begin("mine", "smoke")
    short = lab.run("maze2d-umaze", model="dt", **TINY)
    monkeypatch.setenv("SCALE", "local")
    lab.begin("mine", "local")
    long = lab.run("maze2d-umaze", model="dt", **TINY)
    for r, steps in ((short, 10), (long, 300)):
        assert [row["length"] for row in r.rows] == [steps] * len(r.rows)
        assert r.play([1.0])[0]["length"] == steps
    assert len(short.data()) == 60 and len(long.data()) == 4000         # also of a run from before
    assert envs.make({"id": "PointMaze_UMaze-v3", "kwargs": {}}).spec.max_episode_steps == 300
    assert short.folder.parent.name == "smoke" and long.folder.parent.name == "local"


def test_one_section_shortens_no_file_and_only_a_call_commits(local, monkeypatch):
    (local / "notebooks" / "results").mkdir(parents=True)
    kinds = {"a": dict(model="dt"), "b": dict(model="dc")}
    lab.sweep("X-1", kinds, "maze2d-umaze", seeds=2, **TINY)
    lab.sweep("X-2", {"a": kinds["a"]}, "maze2d-umaze", seeds=1, **TINY)
    fig, (ax,) = lab.axes(1)
    lab.picture(fig, save="mine-picture")
    path = local / "runs/notebooks/local/results/mine.csv"
    whole = path.read_text()
    assert not list((local / "notebooks" / "results").iterdir()) and not list((local / "docs").iterdir())
    lab.begin("mine", "local")          # another kernel, and one section of it
    lab.sweep("X-2", {"a": kinds["a"]}, "maze2d-umaze", seeds=1, **TINY)
    assert path.read_text() == whole
    lab.commit_results()
    committed = local / "notebooks/results/mine.csv"
    assert committed.read_text() == whole and (local / "docs/mine-picture.png").exists()
    assert len(list(committed.parent.glob("runs/*.json"))) == 4
    path.unlink()
    lab.sweep("X-1", {"b": kinds["b"]}, "maze2d-umaze", seeds=1, **TINY)
    lab.commit_results()                # a part of them: the others stay
    assert sorted(committed.read_text().splitlines()) == sorted(whole.splitlines())
    lab.commit_results(whole=True)
    assert committed.read_text() == path.read_text() != whole


def test_rows_of_other_settings_go_with_the_next_of_that_variant(local, monkeypatch):
    """A cell is edited, run, and edited back: its verdict is that of the rows that it shows."""
    (local / "notebooks" / "results").mkdir(parents=True)
    path = local / "runs/notebooks/local/results/mine.csv"
    for lr in (1e-3, 1e-1, 1e-3):
        lab.sweep("S", {"a": dict(model="dt", lr=lr), "b": dict(model="dc")}, "maze2d-umaze", seeds=2, **TINY)
        lab.commit_results()
        for file in (path, local / "notebooks/results/mine.csv"):
            groups = records.rows_of(file)
            rates = {key[5].split()[-1] for key in groups if key[2] == "a"}
            assert len(groups) == 4 and rates == {f"lr={lr}"}


def test_what_was_kept_of_a_run_is_not_anothers(local, monkeypatch, capsys):
    """Neither of the project's, where this machine has one of the same settings, nor after fresh=True."""
    one = lab.run("maze2d-umaze", label="a", model="dt", **TINY)
    lab.commit_results()
    path = lab.many.beside(one.folder, "json")
    mine = json.loads(path.read_text()) | {"best return": -1.0}
    path.write_text(json.dumps(mine))
    assert lab.run("maze2d-umaze", model="dt", **TINY).kept["best return"] == -1.0
    path.write_text(json.dumps(mine | {"of": "2020-01-01 5.0"}))
    other = lab.run("maze2d-umaze", model="dt", **TINY)
    assert other.best_return() > -1.0
    two = lab.run("maze2d-umaze", model="dt", **TINY)      # as of two notebooks
    assert other.keep("x", by_name) == 0 and two.keep("y", lambda r: (1, 1 / 3)) == [1, 0.333333]
    assert {"x", "y", "best return"} <= json.loads(path.read_text()).keys()
    capsys.readouterr()
    lab.run("maze2d-umaze", model="dt", fresh=True, **TINY)
    assert not capsys.readouterr().out      # no preset has changed


def test_a_run_plays_with_its_quirk(local, monkeypatch):
    """And on the device at hand, while its net stays with its data."""
    run, seen = lab.run("maze2d-umaze", model="dt", quirk="last return", **TINY), []

    def evaluate(model, *more):
        seen.append((dt.Model.act is released.act_on_last_return, next(model.parameters()).device.type))
        return []
    monkeypatch.setattr(lab.player, "evaluate", evaluate)
    monkeypatch.setattr(settings, "pick_device", lambda name: torch.device("meta"))
    run.play([1.0])
    assert seen == [(True, "meta")] and dt.Model.act is not released.act_on_last_return
    assert next(run.net.parameters()).device.type == "cpu"


def test_the_code_of_a_run_is_what_decides_numbers(tmp_path, monkeypatch):
    """Neither comments nor docstrings, presets or the demo; every other change does."""
    for file in settings.DECIDE:
        have = set(re.findall(r"^(?:def|class) (\w+)", (ROOT / file).read_text(), re.M))
        assert {name.split(".")[0] for name in settings.DECIDE[file].split()} <= have, file
    text, path = (ROOT / "models" / "dc.py").read_text(), tmp_path / "dc.py"

    def digits(text):
        path.write_text(text)
        return settings.digits_of(path, "", text)
    before = digits(text)
    same = [text.replace("\n\n", "\n# a remark\n\n"),
            re.sub(r'""".*?"""', '"""Other words."""', text, flags=re.S),
            text.replace("PRESETS = {", 'PRESETS = {\n    "new": dict(d=8),')]
    assert len({text, *same}) == 4 and {digits(x) for x in same} == {before}
    assert digits(text.replace("window - 1 - l", "window - l", 1)) != before
    code = settings.code_of("dc", "maze2d-umaze")
    assert code.keys() == settings.DECIDE.keys() | {"models/dc.py", "maze2d-umaze"}
    assert settings.code_of("dt", "maze2d-umaze").keys() ^ code.keys() == {"models/dc.py", "models/dt.py"}


def edited(monkeypatch, file="models/dt.py"):
    """Pretend that a file is another today."""
    ours = settings.code_of
    monkeypatch.setattr(settings, "code_of", lambda *run, **now: ours(*run, **now) | {file: "00000000"})
    monkeypatch.setitem(lab.LOADED, "dt", settings.code_of("dt", "", also=lab.FILES))


def test_a_run_of_other_code_is_said_and_trained_anew_only_on_request(smoke, monkeypatch, capsys):
    old = lab.run("maze2d-umaze", model="dt")
    assert old.code == settings.code_of("dt", "maze2d-umaze") and not old.differs
    assert not capsys.readouterr().out
    edited(monkeypatch)
    again = lab.run("maze2d-umaze", model="dt")
    assert again.date == old.date and again.differs == ["models/dt.py"]
    assert capsys.readouterr().out == (
        "1 of 1 runs are of another models/dt.py; fresh=True trains them anew\n")
    shown = []
    monkeypatch.setattr(lab, "show", shown.append)
    lab.table([again])
    assert f"models/dt.py {old.code['models/dt.py']} (not today's)" in shown[0] and old.date in shown[0]
    both = lab.sweep("S", {"DT": dict(model="dt")}, "maze2d-umaze", seeds=[0, 1])
    assert [r.label for r in both] == ["DT, older code", "DT"], "never in one row"
    capsys.readouterr()
    new = lab.run("maze2d-umaze", model="dt", fresh=True)
    assert new.code["models/dt.py"] == "00000000" and not new.differs and not capsys.readouterr().out
    untrained(monkeypatch)
    assert not lab.run("maze2d-umaze", model="dt").differs


def test_an_edit_of_loaded_code_is_said_and_its_digits_are_not_kept(smoke, monkeypatch, capsys):
    ours = settings.digits_of
    monkeypatch.setattr(settings, "digits_of", lambda path, names, changed=None: (
        "00000000" if changed and path.name == "dt.py" else ours(path, names, changed)))
    run = lab.run("maze2d-umaze", model="dt")
    assert "edited since this kernel began: models/dt.py. Restart to use it" in capsys.readouterr().out
    assert run.code["models/dt.py"] == lab.LOADED["dt"]["models/dt.py"] != "00000000"
    lab.run("maze2d-umaze", model="dc")
    assert not capsys.readouterr().out


@pytest.mark.parametrize("file", lab.FILES)
def test_an_edit_of_what_the_notebooks_add_is_said(smoke, monkeypatch, capsys, file):
    ours = settings.digits_of
    monkeypatch.setattr(settings, "digits_of", lambda path, names, changed=None: (
        "00000000" if changed and str(path).endswith(file) else ours(path, names, changed)))
    lab.run("maze2d-umaze", model="dt")
    assert f"edited since this kernel began: {file}. Restart to use it" in capsys.readouterr().out


def test_an_interrupted_runs_seconds_and_code_are_of_all_parts(smoke, monkeypatch, capsys):
    run = lab.run("maze2d-umaze", model="dt")
    (run.folder / "result.json").unlink()
    state = torch.load(run.folder / "last.pt", weights_only=True)
    torch.save(state | dict(seconds=5000.0), run.folder / "last.pt")
    edited(monkeypatch)
    resumed = lab.run("maze2d-umaze", model="dt")
    assert 5000 < resumed.seconds < 5100
    assert resumed.code["models/dt.py"] == f"{run.code['models/dt.py']}+00000000" and resumed.differs
    assert "another models/dt.py" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_diverged_run_is_a_row(local, monkeypatch, capsys):
    ours, shown = train.Run.update, []

    def update(run):
        if run.cfg.seed == 1:
            raise train.Diverged("the loss is nan at update 1")
        ours(run)
    monkeypatch.setattr(train.Run, "update", update)
    monkeypatch.setattr(lab, "show", shown.append)
    runs = lab.compare("X-1", {"a": dict(model="dt")}, "maze2d-umaze", seeds=2, **TINY)
    assert "a on maze2d-umaze, seed 1: Diverged: the loss is nan" in capsys.readouterr().out
    assert "| a (1 of 2 runs diverged) | " + lab.interval([runs[0].headline()["return_mean"]]) in shown[0]
    lab.table(runs, each_target=True)
    lab.alignment(runs)
    error = lab.interval([runs[0].abs_error()])
    assert "| a (1 of 2 runs diverged) | " in shown[-1] and f" | {error} | " in shown[-1]
    lab.alignment(runs[1:])
    assert "| a (1 of 1 runs diverged) | - | - | - |" in shown[-1]
    lab.lines(lab.target_curve(runs), "x", "y")
    lab.lines(lab.log_curve(runs), "x", "y")
    rows = records.lines((local / "runs/notebooks/local/results/mine.csv").read_text())
    assert [row["error"] for row in rows][-2:] == ["", "Diverged: the loss is nan at update 1"]
    groups = records.rows_of(lab.results() / "mine.csv")
    assert records.verdict("X-1 maze2d-umaze: a > 5 in return", groups)[0] == "cannot tell"
    lab.commit_results()                # it is a result, too
    untrained(monkeypatch)
    (runs[1].folder / "result.json").unlink()
    assert lab.run("maze2d-umaze", 1, model="dt", **TINY).error.startswith("Diverged")


def test_a_diverged_run_says_whose_code_it_was(smoke, monkeypatch):
    def update(run):
        raise train.Diverged("the loss is nan at update 1")
    monkeypatch.setattr(train.Run, "update", update)
    tuned, quirk = (lab.run("hopper-medium-replay", model="dt", **more)
                    for more in (dict(online=True), dict(quirk="last step")))
    assert tuned.error.startswith("Diverged") and "online.py" in tuned.code and not tuned.differs
    assert quirk.error.startswith("Diverged") and "notebooks/released.py" in quirk.code and not quirk.differs


# ------------------------------------------------------------------- results that come with the project

def test_committed_results_are_taken_first(local, monkeypatch, capsys):
    """With their log and what was played; no folder, data or training until weights are asked for."""
    first = lab.run("maze2d-umaze", label="a", model="dt", **TINY)
    played, best, curve = first.play([0.5, 2.0], zero=["rtg"]), first.best_return(), lab.log_curve([first])
    lab.commit_results()
    shutil.rmtree(local / "runs")
    with monkeypatch.context() as patch:
        untrained(patch)
        patch.setattr(lab.data, "load", None)
        patch.setattr(lab, "random_play", None)
        r = lab.run("maze2d-umaze", label="a", model="dt", **TINY)
        assert r.rows[0].keys() == first.rows[0].keys() and len(r.rows) == len(first.rows)
        np.testing.assert_allclose([row["abs_error"] for row in r.rows],
                                   [row["abs_error"] for row in first.rows], rtol=1e-5)
        assert r.headline()["target"] == r.asked
        np.testing.assert_allclose(lab.log_curve([r])["a"][1], curve["a"][1], rtol=1e-4)
        assert [row["return_mean"] for row in r.play([0.5, 2.0], zero=["rtg"])] == (
            [row["return_mean"] for row in played])
        assert r.best_return() == pytest.approx(best, abs=1e-5)
        lab.episodes(r)
        for given in (dict(seed=1), dict(quirk="clamped cosine"), dict(fresh=True)):
            with pytest.raises(TypeError):
                lab.run("maze2d-umaze", **dict(model="dt") | TINY | given)
        lab.begin("mine", "local")
        with pytest.raises(TypeError):
            lab.run("maze2d-umaze", model="dt", own=True, **TINY)
        lab.begin("mine", "local")
        edited(patch)
        assert lab.run("maze2d-umaze", model="dt", **TINY).differs == ["models/dt.py"]
    assert not r.folder.exists()
    capsys.readouterr()
    assert r.batch()["states"].shape[1] == 2 and "comes without weights" in capsys.readouterr().out
    (r.folder / "result.json").unlink()     # one that was stopped on its way has a checkpoint, too
    stopped = lab.run("maze2d-umaze", model="dt", **TINY)
    assert stopped.net and "comes without weights" in capsys.readouterr().out and lab.many.finished(r.folder)
    with monkeypatch.context() as patch:        # of two results that of today's code
        edited(patch)
        new = lab.run("maze2d-umaze", model="dt", fresh=True, **TINY)
        lab.begin("mine", "local")
        assert lab.run("maze2d-umaze", model="dt", **TINY).code == new.code != first.code
    assert lab.run("maze2d-umaze", model="dt", **TINY).code == first.code


def test_paths_are_drawn_without_weights(local, monkeypatch):
    """They are what the environment shows, thinned, and stay with the run."""
    monkeypatch.setattr(lab, "load", lambda *args, **kwargs: lab.random_play("maze2d-umaze", False))
    r, drawn = lab.run("maze2d-umaze", label="a", model="dt", **TINY), []
    monkeypatch.setattr(lab.pictures, "picture", lambda fig, save: drawn.append(fig))
    found = lab.tracks(r, 2)
    with lab.envs.make(r.meta["env_spec"]) as env:
        maze, (first, _) = env.unwrapped.maze, env.reset(seed=1)
        steps = []
        options = [r.meta["starts"][r.rows[0]["start"]]]
        lab.player.rollout(r.net, r.meta, [env], [r.asked], [1], options, record=[steps])
        env.reset(seed=1, options=options[0])
        seen = [first] + [env.step(action)[0] for _, _, action, _ in steps]
        goal, reached, way = found["ways"][1]
        assert goal == first["desired_goal"].round(2).tolist() and reached in (True, False)
        np.testing.assert_allclose(way[:-1], [x["achieved_goal"] for x in seen[:-1:6]], atol=0.006)
        place, size = np.array(way[-1]), found["size"]
        np.testing.assert_allclose(place, seen[-1]["achieved_goal"], atol=0.006)
        row, column = maze.cell_xy_to_rowcol(place)
        center = np.shape(found["walls"])[1] * size / 2, np.shape(found["walls"])[0] * size / 2
        assert ((center[1] - place[1]) // size, (place[0] + center[0]) // size) == (row, column)
        assert found["walls"][row][column] == 0 and found["walls"][0][0] == 1
    lab.paths([r], n=2)
    monkeypatch.setattr(lab.player, "load_run", None)
    again = lab.run("maze2d-umaze", label="a", model="dt", **TINY)
    lab.paths([again, again], n=2)
    one, two = ([[line.get_xydata().tolist() for line in ax.lines] for ax in fig.axes] for fig in drawn)
    assert len(one[0]) == 4 and two == [one[0], one[0]]     # two ways and two stars


def test_fine_tuned_runs_and_the_control_are_found_again(smoke):
    """Each in a folder of its own; the code of online.py counts; the control says whose rewards it had."""
    given = dict(env="hopper-medium-replay", model="dt")
    tuned = lab.run(**given, online=True)
    assert tuned.offline["episodes"] == 1 and "online.py" in tuned.code and not tuned.differs
    control = lab.run(**given, quirk="shuffled rewards")
    assert control.dataset.endswith("rewards shuffled") and "online.py" not in control.code
    assert "notebooks/released.py" in control.code and not control.differs      # the quirk's code counts
    assert len({r.folder for r in (tuned, control, lab.run(**given))}) == 3
    assert lab.run(**given, online=True).date == tuned.date and lab.found(tuned.spec)
    both = lab.run(**given, online=True, quirk="last step")
    assert {"online.py", "notebooks/released.py"} <= both.code.keys() and not both.differs


def test_what_is_kept_is_computed_anew_when_its_code_changes(smoke, monkeypatch, capsys, tmp_path):
    """A remark changes nothing; another number, in the function or in one that it calls, does."""
    r, path = lab.run("maze2d-umaze", label="a", model="dt"), tmp_path / "cell.py"
    text = "def two():\n    return 2\n\n\ndef measure(r):\n    return [r.seed, two()]\n"

    def measured(text, r=r):
        """r.keep() with measure() of a cell with this text, as a new kernel would have it."""
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("cell", path)
        cell = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "cell", cell)
        linecache.clearcache()
        exec(compile(text, path, "exec"), vars(cell))
        return r.keep("x", cell.measure)
    assert measured(text) == [0, 2] and not capsys.readouterr().out
    r.kept["x"] = "kept"
    assert measured(text.replace("    return [", "    # a remark\n    return  [")) == "kept"
    again = lab.run("maze2d-umaze", label="a", model="dt")
    assert measured(text, again) == [0, 2] and not capsys.readouterr().out      # from the file
    assert measured(text.replace("r.seed", "r.seed + 1"), again) == [1, 2]
    assert measured(text, again) == [0, 2]
    assert measured(text.replace("return 2", "return 3"), again) == [0, 3]
    assert capsys.readouterr().out == "a, x: computed anew, since its code has changed\n" * 3
    again = lab.run("maze2d-umaze", label="a", model="dt")
    assert measured(text.replace("return 2", "return 3"), again) == [0, 3]
    for other in (lambda r: r.seed, exec_only(), len, SimpleNamespace):
        assert records.code_of(other) is None


two = SimpleNamespace(property_of_a_run=None)


def by_name(two):
    return two.seed


@torch.no_grad()
def without_gradients(r):
    return twice(r.seed)


def twice(x):
    return 2 * x


def test_the_code_of_a_function_is_its_own_and_of_those_that_it_calls(monkeypatch):
    """Not that of a function with a parameter's name; no attribute of an object is looked up."""
    class Loud:
        seed = property(lambda self: 1 / 0)

    def attribute(r):
        return two.seed + r.seed
    digits = records.code_of(by_name), records.code_of(attribute), records.code_of(without_gradients)
    monkeypatch.setitem(globals(), "two", twice)
    assert records.code_of(by_name) == digits[0] is not None
    monkeypatch.setitem(globals(), "two", Loud())
    assert records.code_of(attribute) == digits[1] is not None
    monkeypatch.setitem(globals(), "twice", by_name)
    assert records.code_of(without_gradients) != digits[2] is not None


def exec_only():
    names = {"__name__": "no file"}
    exec("def f(r):\n    return 1", names)
    return names["f"]


def test_changed_presets_are_said(local, monkeypatch, capsys):
    lab.run("maze2d-umaze", model="dt", **TINY)
    lab.commit_results()
    monkeypatch.setitem(dt.PRESETS, "small", dt.PRESETS["small"] | dict(lr=0.5))
    other = lab.run("maze2d-umaze", model="dt", **TINY)
    assert other.cfg.lr == 0.5 and other.log_csv is None
    assert "presets or data have changed since 1 of the project's runs" in capsys.readouterr().out


def test_weights_in_half_precision(local, monkeypatch):
    run = lab.run("maze2d-umaze", model="dt", **TINY)
    lab.commit_results()
    folder = records.commit_weights(run.folder, local)
    assert folder == local / "weights" / "dt-maze2d-umaze"
    state = torch.load(folder / "last.pt", weights_only=True)
    assert {x.dtype for x in state["model"].values()} == {torch.float16} and "optimizer" not in state
    assert (folder / "last.pt").stat().st_size < (run.folder / "last.pt").stat().st_size / 2
    small, whole = lab.player.load_run(folder)[0].state_dict(), run.net.state_dict()
    for key in whole:
        torch.testing.assert_close(small[key], whole[key], atol=1e-3, rtol=1e-3)
    command = [sys.executable, ROOT / "eval.py", folder, "--targets", "1", "--episodes", "1"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "dt on maze2d-umaze" in text and "far" in text
    shutil.rmtree(local / "runs")
    untrained(monkeypatch)
    assert torch.equal(lab.run("maze2d-umaze", model="dt", **TINY).net.state_dict()[key], small[key])


def test_committed_runs_are_small():
    for path in (ROOT / "notebooks" / "results" / "runs").glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        assert path.stat().st_size < 100_000 and "code" in run, path
        of_lambdas = {"spec", "code", "returns", "best return", "mean return"}
        named = {name for name in run["kept"].keys() - of_lambdas if not name.startswith("play ")}
        assert named == run["kept"].get("code", {}).keys(), path
        assert ("notebooks/released.py" in run["code"]) == ("quirk" in run["kept"]["spec"]), path


# ------------------------------------------------------------------- words follow from numbers

def groups_of(**labels):
    """rows_of() a file with a section S and a set e: {label: (return by seed)}; errors are ten times that."""
    groups = {}
    for label, returns in labels.items():
        for seed, x in enumerate(returns):
            row = dict(headline="True", start="random", episodes="2", return_mean=str(x), abs_error="0",
                       score="")
            far = dict(row, headline="False", start="far")
            groups["S", "e", label, str(seed), "dt", ""] = [
                row, dict(far, abs_error=str(10 * x)), dict(far, abs_error=str(10 * x + 3), episodes="1")]
    return groups


def test_verdict_by_hand():
    groups = groups_of(a=(10, 21, 32), b=(1, 10, 22), c=(1, 40, 2), one=(5,))
    tell = {claim: records.verdict(f"S e: {claim}", groups)[0] for claim in (
        "a > b in return", "a < b in return", "b > a in return", "a > c in return", "a > one in return",
        "a > a in return", "b > 0.5 in return", "a < b in error", "b < a in error", "a > b in score")}
    assert tell == {
        "a > b in return": "holds", "a < b in return": "does not hold", "b > a in return": "does not hold",
        "a > c in return": "cannot tell", "a > one in return": "cannot tell",
        "a > a in return": "does not hold", "b > 0.5 in return": "cannot tell",
        "a < b in error": "does not hold", "b < a in error": "holds", "a > b in score": "cannot tell"}
    # 9, 11, 10: t(0.975, 2) = 4.303, times 1 / sqrt(3)
    assert records.verdict("S e: a > b in return", groups)[1] == "a difference of 10.0 ± 2.5 over 3 seeds"
    assert records.verdict("S e: a < b in error", groups)[1] == "a difference of 100.0 ± 24.8 over 3 seeds"
    assert records.verdict("S e: a > one in return", groups)[1] == "a difference of 5.0 over 1 seed"
    assert records.verdict("S e: a > -90.5 in return", groups)[0] == "holds"
    none = "a difference of - over 0 seeds; there are no rows of "
    assert records.verdict("T e: a > one in return", groups) == ("cannot tell", none + "a or one")
    assert records.verdict("S e: a > nobody in return", groups) == ("cannot tell", none + "nobody")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_words_are_what_committed_results_say(name):
    """Text and shown outputs; a claim that the text judges is one that a cell shows, with its figure."""
    groups = records.rows_of(ROOT / "notebooks" / "results" / f"{Path(name).name}.csv")
    cells, shown, count = notebook(name).cells, "", 0
    for cell in cells:
        if cell.cell_type == "code":
            shown += "\n".join(out.get("data", {}).get("text/markdown", "") for out in cell.outputs) + "\n"
    shown = shown.replace("\u00a0", " ")        # around ±
    for claim, word, figure in re.findall(r"^- (.+ in \w+): \*\*(.+)\*\*, (.+)$", shown, re.M):
        assert (word, figure) == records.verdict(claim, groups) and "over 0" not in figure, claim
    for cell in cells:
        if cell.cell_type == "markdown":
            for word, claim, figure in WORD.findall(cell.source):
                found, difference = records.verdict(claim, groups)
                assert word == found, claim
                assert difference == f"a difference of {figure}", claim
                assert f"- {claim}: **{word}**" in shown, claim
                count += 1
    assert count


def test_words_of_the_page_of_results():
    """Each verdict of docs/results.md is what the committed rows say."""
    groups = {}
    for file in (ROOT / "notebooks" / "results").glob("*.csv"):
        groups |= records.rows_of(file)
    text = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    judged = re.findall(r'\[([a-z ]+)\]\(\.\./notebooks/records\.py "(.+?)"\)', text)
    assert len(judged) >= 8
    for word, claim in judged:
        found, figure = records.verdict(claim, groups)
        assert word == found and "over 0" not in figure, claim


@pytest.fixture
def script(monkeypatch):
    """docs/again.py, at scale local; it trains nothing."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    for name in ("name", "scale", "own"):
        monkeypatch.setattr(lab.here, name, getattr(lab.here, name))
    monkeypatch.setenv("SCALE", "local")
    monkeypatch.setattr(lab, "show", print)
    lab.begin("again", "local")
    untrained(monkeypatch)
    monkeypatch.setattr(lab.many, "sweep", None)
    return importlib.import_module("again")


def test_verdicts_of_other_seeds_are_what_the_runs_say(script):
    """The page's table. Its seeds are none of the first ones, and its first words are the notebooks'."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    head, _, *rows = script.table(ROOT).splitlines()
    assert len(rows) >= 8 and "\n".join(rows) + "\n\n" in page.partition(head)[2]
    told = script.shown(ROOT)
    for row in rows:
        claim, first, new, both = row.strip("| ").split(" | ")
        seeds = [int(re.search(r"over (\d+) seeds", x)[1]) for x in (first, new, both)]
        assert first.startswith(told[claim][0]) and seeds[1] == 5 and seeds[2] == seeds[0] + 5, claim


def test_other_seeds_by_hand(script, monkeypatch):
    """Which verdicts are asked again, of which runs, and what of them is counted."""
    maze = "S maze2d-umaze: a > b in return"
    found = {maze: ("holds", 10.0, 5.1), "S maze2d-umaze: a > c in return": ("holds", 10.0, 4.9),
             "S breakout: a > b in return": ("holds", 10.0, 9.0), "S maze2d-umaze: b > c in return":
             ("cannot tell", 1.0, 3.0), "S maze2d-umaze: d > c in error": ("does not hold", -4.0, 3.0)}
    assert script.narrow(found) == [maze, "S maze2d-umaze: d > c in error"]
    assert script.given("dt", "lr=0.001 betas=(0.9, 0.95) windows=end goal=none") == dict(
        model="dt", lr=0.001, betas=(0.9, 0.95), windows="end", goal="none")
    env = "maze2d-umaze"
    groups = {("S", env, label, seed, "dt", f"d={8 + i}"): []
              for i, label in enumerate("abc") for seed in "01"}
    places = script.variants(maze, groups)
    assert places == {("S", env, "a"): dict(model="dt", d=8), ("S", env, "b"): dict(model="dt", d=9)}
    assert not script.trained(places)

    def runs_of(todo, trained):
        assert trained
        for name, seed, _, how in todo:
            far = dict(start="far", episodes=1, success=None, abs_error=seed)
            run = SimpleNamespace(model="dt", rows=[far | dict(return_mean=how["d"] * seed), dict(far)])
            run.headline = lambda rows=run.rows: rows[0]
            assert name == env
            yield run
    monkeypatch.setattr(lab, "runs_of", runs_of)
    new = script.rows_again(places)
    # the seeds' mean; their deviation is 1.58, over the root of five, times t(0.975, 4) = 2.776
    assert len(new) == 10 and records.verdict(maze, new) == (
        "does not hold", "a difference of -12.0 ± 2.0 over 5 seeds")


def test_rank_correlations_drawn():
    """Of one seed no interval; of seeds that follow and one that does not, a wide one within [-1, 1]."""
    def seed(*returns):
        return [dict(target=float(t), achieved=list(x), episodes=len(x)) for t, x in enumerate(returns)]
    follows = seed((1.0, 1.5), (2.0, 2.5), (3.0, 3.5))
    deaf = seed((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    assert records.drawn([follows]) == ""
    assert records.drawn([seed((1.0,), (1.0,))] * 2) == ""        # nothing varies
    low, high = map(float, re.findall(r"-?[0-9.]+", records.drawn([follows, follows, deaf])))
    assert -1 < low < 0.4 and 0.9 < high <= 1.0
    low, high = map(float, re.findall(r"-?[0-9.]+", records.drawn([follows] * 3)))
    assert 0.9 < low <= high <= 1.0 and not math.isnan(low)


# ------------------------------------------------------------------- figures

def test_how_far_a_map_looks_back():
    assert lab.looked_back(torch.eye(4)).tolist() == [0, 0, 0, 0]
    even = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    assert lab.looked_back(even).tolist() == [0, 0.5, 1, 1.5]


def test_share_of_padded_windows():
    """Episodes of 5 steps and of 2: with K = 3, windows from the last two steps of each are padded."""
    spec = lab.values_of("maze2d-umaze", 0, True, dict(model="dt", context_len=3))
    run = SimpleNamespace(spec=spec, data=lambda: SimpleNamespace(lengths=torch.tensor([5, 2])))
    assert lab.Run.padded(run) == pytest.approx(400 / 7)


def test_hours_are_updates_times_milliseconds():
    quirky = {"model": "dt", "quirk": "left padding"}
    assert lab.hours_of("hopper-medium", quirky) == pytest.approx(100_000 * 1.3 / 3.6e6)
    assert lab.hours_of("breakout", {"model": "dt", "steps": 1000}) == pytest.approx(1000 * 7.0 / 3.6e6)


def test_interval_by_hand():
    assert lab.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"     # t(0.975, 2) = 4.303, times 1 / sqrt(3)
    assert (lab.interval([]), lab.interval([None]), lab.interval([0.0])) == ("-", "-", "0.0")
    assert lab.interval([1.25], 2) == "1.25"


def test_expected_by_hand():
    """The headline of runs with preset settings; correlation and error from the last start."""
    def row(start, target, *achieved, score=None):
        mean = sum(achieved) / len(achieved)
        return dict(start=start, target=target, episodes=len(achieved), achieved=list(achieved), score=score,
                    success=None, return_mean=mean, abs_error=np.mean(np.abs(np.array(achieved) - target)))

    def run(seed, rows, **more):
        spec = dict(model="dt", env="e", seed=seed, size="small", source="local", eval_every=0) | more
        return dict(model="dt", env="e", asked=2.0, seconds=60 + 60 * seed, rows=rows, kept=dict(spec=spec))
    far = [row("far", 1.0, 1.0, 2.0), row("far", 3.0, 3.0, 4.0)]
    results = {
        "a": run(0, [row("random", 2.0, 4.0, 6.0), *far]),
        "b": run(1, [row("random", 2.0, 6.0, 8.0), *far]),
        "c": run(2, [row("random", 2.0, 900.0), *far], d=8), "diverged": run(3, []),
        "paper": run(4, [row("random", 2.0, 900.0), *far], size="paper"),
        "published": run(5, [row("random", 2.0, 900.0), *far], source="d4rl")}
    want = "| e | dt | 2 | 2 | 6.0 ± 12.7 | - | - | 0.89 | 0.5 ± 0.0 | 1.5 |"
    found = records.expected(results).splitlines()
    assert found[-1] == want and len(found) == 3


def test_scale_is_checked(monkeypatch):
    monkeypatch.setenv("SCALE", "big")
    with pytest.raises(ValueError, match="smoke, local, paper"):
        lab.begin("x", "local")
