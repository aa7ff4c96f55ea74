"""The lessons: complete as committed, equal to the models' files, and running with their exercises' answers.

    pytest tests/test_23_lessons.py
"""
import ast
import base64
import importlib
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image
from test_15_readme import README, leads_somewhere, table_rows
from test_16_notebooks import outputs_at_smoke

import settings

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))
os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
import lab  # noqa: E402
import lesson  # noqa: E402
import pictures  # noqa: E402
import progress  # noqa: E402

ORDER = ["quickstart", "data", "dt", "dc", "lsdt", "radt", "starformer", "dm"]
LESSONS = ["data", "dt", "dc", "lsdt", "radt", "starformer", "dm"]
NOTEBOOKS = ["quickstart", *LESSONS]
MODELS = [name for name in LESSONS if name in settings.MODELS]
ANSWER = re.compile(r"<details>\n<summary>Answer (\d)</summary>\n\n```python\n(.*?)```\n\n</details>", re.S)
LINKS = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def notebook(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def cells(name, kind):
    return [cell for cell in notebook(name).cells if cell.cell_type == kind]


def prose(name):
    return "\n\n".join(cell.source for cell in cells(name, "markdown"))


def outputs(name):
    return [out for cell in cells(name, "code") for out in cell.outputs]


def shown(name, kind):
    """All outputs of a mime type."""
    return [out.data[kind] for out in outputs(name) if kind in out.get("data", {})]


def last_statement(code):
    """Of what is inside, if the code ends in a with block."""
    body = ast.parse(code).body
    while isinstance(body[-1], ast.With):
        body = body[-1].body
    return body[-1]


def answers(name):
    """[(number, code)] of the exercises, in their order."""
    return ANSWER.findall(prose(name))


# ------------------------------------------------------------------- as committed

@pytest.mark.parametrize("name", NOTEBOOKS)
def test_as_committed(name):
    """Executed from top to bottom without a warning; light, with lines that a page shows whole."""
    nb = notebook(name)
    nbformat.validate(nb)
    assert (FOLDER / f"{name}.ipynb").stat().st_size <= 700_000
    code = cells(name, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    wrong = [out for out in outputs(name) if out.output_type == "error" or out.get("name") == "stderr"]
    assert not wrong and "Scale `smoke`" not in json.dumps(nb.cells) and "Ready: " in json.dumps(nb.cells)
    lines = [line for cell in code for line in cell.source.splitlines()]
    assert max(map(len, lines)) <= 100
    assert sum(bool(line.strip()) for line in lines) <= 200
    printed = "".join(out.text for out in outputs(name) if out.output_type == "stream")
    assert max(map(len, printed.splitlines()), default=0) <= 110
    words = prose(name) + printed
    assert not re.search(r"TODO|—|/tmp/|/home/|/root/", words)
    assert {kind for out in outputs(name) for kind in out.get("data", {}) if "image" in kind} == {"image/png"}


@pytest.mark.parametrize("name", LESSONS)
def test_the_parts_of_a_lesson(name):
    """Minutes in every heading, equations, a drawing, pictures, and three folded answers."""
    text = prose(name)
    headings = re.findall(r"^## (.*)$", text, re.M)
    timed = [h for h in headings if "xercise" not in h]
    assert len(timed) >= 4 and all(re.search(r"\(\d+ minutes?\b.*\)$", h) for h in timed)
    assert re.search(r"^\*\d+ minutes to read\..*\bcompute\b", text, re.M)
    assert len(shown(name, "image/png")) >= 3
    assert [number for number, _ in answers(name)] == ["1", "2", "3"]
    for _, code in answers(name):
        assert isinstance(last_statement(code), ast.Assert), "an answer ends in an assert"
        assert max(map(len, code.splitlines())) <= 100
    assert text.count("**Exercise ") == 3 and "(README.md#glossary)" in text


def test_the_parts_of_the_data_lesson():
    """Equation, drawing, a gather() of at most ten lines that is data.py's, numbers that have a source."""
    text, code = prose("data"), [cell.source for cell in cells("data", "code")]
    assert text.count("$$") == 2 and re.search(r"!\[[^\]]{20,}\]\(\.\./docs/[\w-]+\.svg\)", text)
    functions = [x for cell in code for x in ast.parse(cell).body if isinstance(x, ast.FunctionDef)]
    own, = (x for x in functions if x.name == "gather")
    assert own.end_lineno - own.lineno < 10
    for equal in ("assert torch.equal(toy.rtg", "assert_close(slow[key], fast[key])",
                  "- expected).abs().max() <", "assert_close(windows.mean"):
        assert sum(equal in cell for cell in code) == 1, equal
    source = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("## Where windows lie")[1]
    quoted = re.findall(r"\d+ to \d+ %", text)
    assert len(quoted) == 2 and all(x in source for x in quoted)


def test_the_parts_of_the_quickstart():
    """Few cells, a film of two wishes, other wishes to try, and where to go on."""
    text, code = prose("quickstart"), [cell.source for cell in cells("quickstart", "code")]
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert len(headings) >= 4 and all(re.search(r"\(\d+ minutes?\b.*\)$", h) for h in headings)
    assert re.search(r"^\*\d+ minutes to read\..*\bcompute\b", text, re.M)
    assert len(code) <= 6 and sum(len(cell.splitlines()) for cell in code) <= 20
    first = Image.open(io.BytesIO(base64.b64decode(shown("quickstart", "image/png")[0])))
    assert first.n_frames > 10 and first.size == (510, 312)
    printed = json.dumps([out.get("data", {}) for out in outputs("quickstart")], ensure_ascii=False)
    assert "2,000 updates and" in printed, "as committed it trains, with a line that tells how far it is"
    assert "targets=[20, 60, 250]" in "".join(code)
    for link in ("README.md#glossary", "../docs/results.md#what-is-normal", "data.ipynb", "dt.ipynb"):
        assert f"]({link})" in text, link


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_its_minutes_are_those_of_the_tables(name):
    """In notebooks/README.md and in the README's learning path."""
    minutes = re.search(r"^\*(\d+) minutes to read\.", prose(name), re.M)[1]
    rows = table_rows((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert [row[1] for row in rows if row[0] == f"[{name}.ipynb]({name}.ipynb)"] == [minutes]
    row, = (row for row in table_rows(README) if row[0] == f"lesson [{name}](notebooks/{name}.ipynb)")
    assert row[1] == minutes


PAPERS = {
    "dt": "arxiv.org/abs/2106.01345", "dc": "arxiv.org/abs/2310.03022", "radt": "arxiv.org/abs/2402.03923",
    "lsdt": "github.com/WangJinCheng1998/LONG-SHORT-DECISION-TRANSFORMER",
    "starformer": "arxiv.org/abs/2110.06206", "dm": "proceedings.mlr.press/v267/zheng25m"}


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_a_model_lesson(name):
    """Its equations with a table of symbols, drawing, paper, film, and an equality with models/<name>.py."""
    text = prose(name)
    assert text.count("$$") >= 2 and "| symbol | meaning | shape | name in the code |" in text
    assert re.search(r"!\[[^\]]{20,}\]\(\.\./docs/[\w-]+\.svg\)", text), "a drawing with a text in its place"
    assert PAPERS[name] in text, "a link to the paper, or else to its authors' code"
    for link in (f"../models/{name}.py", f"experiments/{name}.ipynb"):
        assert f"]({link}" in text, link
    films = [Image.open(io.BytesIO(base64.b64decode(x))) for x in shown(name, "image/png")]
    assert max(film.n_frames if film.is_animated else 1 for film in films) > 10, "a film"
    assert "change this number" in "".join(cell.source for cell in cells(name, "code"))
    equal = [cell.source for cell in cells(name, "code")
             if re.search(r"^ *(assert|torch\.testing\.assert_close)\b", cell.source, re.M)]
    assert len(equal) >= 2
    assert re.search(rf"\b{name}\.[A-Z]\w+\(", "".join(cell.source for cell in cells(name, "code")))


@pytest.mark.parametrize("name", [*NOTEBOOKS, "README"])
def test_links(name):
    """They lead somewhere, in texts and in outputs, and those with line numbers to today's lines."""
    if name == "README":
        text = (FOLDER / "README.md").read_text(encoding="utf-8")
    else:
        text = "\n".join([prose(name), *shown(name, "text/markdown")])
    links = [x for x in LINKS.findall(text) if not x.startswith("http")]
    assert len(links) >= 4
    for link in links:
        assert leads_somewhere(link, FOLDER / "README.md"), link
    named = len(lesson.LINK.findall(text))
    assert len(re.findall(r"#L\d", text)) == named, "a link with lines has the name of its thing"
    assert lesson.relinked(text) == text, "python notebooks/lesson.py puts the line numbers right"


@pytest.mark.parametrize("name", MODELS)
def test_links_of_the_experiments(name):
    """They lead to a file, and in a page to a heading; links inside the notebook are in test_16."""
    links = [x for x in LINKS.findall(prose(f"experiments/{name}")) if not x.startswith(("http", "#"))]
    assert f"../{name}.ipynb" in links and f"../../models/{name}.py" in links
    for link in links:
        assert leads_somewhere(link, FOLDER / "experiments" / f"{name}.ipynb"), link


def test_the_drawings_are_what_their_script_draws():
    sys.path.insert(0, str(ROOT / "docs"))
    import draw
    for name, draws in draw.LESSONS.items():
        assert (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8") == draws(), "python docs/draw.py"


# ------------------------------------------------------------------- executed

def test_all_run_with_their_answers(alone, monkeypatch):
    """Each answer runs where it stands. From their folder, and the quickstart from the repository's too."""
    jobs = [("quickstart", ROOT), *((name, FOLDER) for name in NOTEBOOKS)]
    with_answers = []
    for name, folder in jobs:
        nb = notebook(name)
        nb.cells = [part for cell in nb.cells for part in [
            cell, *(nbformat.v4.new_code_cell(code) for _, code in ANSWER.findall(cell.source))]]
        with_answers.append((nb, folder))
    done = outputs_at_smoke(with_answers, 120, monkeypatch)
    for (name, _), found in zip(jobs, done, strict=True):
        assert not [out for out in found if out.get("name") == "stderr"], name
        assert len(found) > (8 if name in LESSONS else 5), name


# ------------------------------------------------------------------- what the lessons share

@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """A lesson that has begun at scale smoke, with its runs in a folder of their own."""
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    monkeypatch.setenv("SCALE", "smoke")
    for name in ("name", "scale", "own"):
        monkeypatch.setattr(lab.here, name, getattr(lab.here, name))
    lesson.begin()
    return tmp_path


@pytest.mark.parametrize("name", [name for name in pictures.LOOKS if name != "BC"])
def test_the_quickstart_runs_with_any_model(smoke, monkeypatch, name):
    """A word is changed, in either cell that has one, and no later cell breaks; all models are on offer."""
    shown, texts, names, changed = [], [], {}, 0
    monkeypatch.setattr(lesson, "display", shown.append)
    monkeypatch.setattr(lab, "picture", shown.append)
    monkeypatch.setattr(lab, "show", texts.append)
    for cell in cells("quickstart", "code"):
        code, n = re.subn(r'^(name|other) = "\w+"', f'\\1 = "{name}"', cell.source, flags=re.M)
        if n:
            offered = re.findall(r'"(\w+)"', cell.source.split("# change this word:")[1].splitlines()[0])
            own = re.search(r'^(?:name|other) = "(\w+)"', cell.source, re.M)[1]
            assert own not in offered and {*offered, own, "DT"} == pictures.LOOKS.keys() - {"BC"}
        exec(code, names)
        changed += n
    assert changed == 2 and names["agent"].cfg.model == name.lower() and len(shown) == 3
    assert list(names["agents"]) == [name] and f"{name}: mean" in texts[-1]


class Handle:
    """Stands for a notebook's place of output."""

    def __init__(self, data):
        self.lines = [data["text/plain"]]

    def update(self, data, **given):
        self.lines.append(data["text/plain"])


@pytest.fixture
def line(monkeypatch):
    """A list of the progress lines that are displayed."""
    handles = []

    def display(data, **given):
        handles.append(Handle(data))
        return handles[-1]
    monkeypatch.setattr(progress, "get_ipython", lambda: True)
    monkeypatch.setattr(progress, "display", display)
    return handles


def test_a_run_shows_its_progress_and_is_found_again(smoke, line, capsys):
    r = lesson.fit("DT", "dt")
    lines = line[0].lines
    assert lines[0].startswith("DT: loading its data")
    assert "3 of 3 updates" in lines[-2] and "█" * 20 in lines[-2] and "it plays episodes" in lines[-2]
    assert re.fullmatch(r"DT: 3 updates and \d+ episodes in \d s", lines[-1])
    assert "found again" not in capsys.readouterr().out
    again = lesson.fit("other", "dt")
    assert again.folder == r.folder and "other: found again, 3 updates" in capsys.readouterr().out
    assert lesson.fit("BC", "dt", condition="none").folder != r.folder
    assert len(line) == 2 and lesson.fit("DT", "dt", fresh=True).folder == r.folder and len(line) == 3


def test_progress_by_hand(line, monkeypatch):
    """24 updates in 4.8 seconds: 75 more take 15. A run that goes on counts its own alone."""
    now = iter([100.0, 104.8])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    bar = progress.Progress("a")
    run = SimpleNamespace(done=1, cfg=SimpleNamespace(steps=100), loss=float("nan"))
    bar(run)
    run.done, run.loss = 25, 0.5
    bar(run)
    assert line[0].lines[-1] == "a: █████░░░░░░░░░░░░░░░ 25 of 100 updates, loss 0.5000, about 15 s left"
    assert not any(" 1 of 100" in x for x in line[0].lines)     # one update is no measure
    assert (progress.clock(99), progress.clock(125)) == ("99 s", "2 minutes")


def test_an_interrupted_cell_says_so_in_a_line_and_goes_on(smoke, monkeypatch):
    """Ctrl-C, which a notebook sends as this signal, after the second update."""
    ours, done = lab.train.Run.update, []

    def update(run):
        ours(run)
        done.append(run.done)
        if done == [1, 2]:
            os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(lab.train.Run, "update", update)
    with pytest.raises(progress.Stopped) as caught:
        lesson.fit("DT", "dt")
    assert caught.value._render_traceback_() == ["stopped; run the cell again to go on"]
    assert caught.value.__suppress_context__
    lesson.fit("DT", "dt")
    assert done == [1, 2, 3]
    monkeypatch.setattr(lab, "load", lambda *args: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(progress.Stopped):       # before the first update
        lesson.fit("DT", "dt", d=16, seed=1)


@pytest.mark.parametrize("env", ["pointmaze-umaze", "hopper-medium-replay", "breakout"])
def test_windows_are_what_the_agent_saw(smoke, env):
    """The prediction at a window's last step is the action that was played after it."""
    model, meta = lesson.fit("a", "dt", env).checkpoint
    batch = lesson.windows((model, meta), 5.0)
    K, T = model.cfg.context_len, len(batch["mask"]) + model.cfg.context_len - 1
    assert batch["mask"].all() and T == 10 and batch["timesteps"][-1].tolist() == list(range(10 - K, 10))
    torch.testing.assert_close(batch["rtg"][0, 0, 0], torch.tensor(5.0 / meta["rtg_scale"]))
    with torch.no_grad():
        y = model(**batch)[:, -1]
    played = batch["actions"][:, -1]
    if model.cfg.discrete:
        assert (y.argmax(-1) == played).all()
    else:
        torch.testing.assert_close(y, played, atol=1e-5, rtol=0)


@pytest.mark.parametrize("env", ["pointmaze-umaze", "antmaze-umaze", "hopper-medium-replay", "breakout"])
def test_a_film_shows_each_wish_and_needs_no_renderer(smoke, env, monkeypatch):
    agent, films = lesson.fit("a", "dt", env).checkpoint, []
    monkeypatch.setattr(lesson, "display", films.append)
    lesson.film(agent, [1.0, 9.0])
    film = Image.open(io.BytesIO(films[0].data))
    assert film.format == "PNG" and film.n_frames == 11 and film.size == (510, 312)
    assert "asked for 1: " in films[0].alt and len(films[0].data) < 400_000
    film.seek(10)
    frame = np.asarray(film.convert("RGB"), float)
    left, right = frame[:, 20:230], frame[:, 270:480]
    assert left.std() > 5 and (left != right).any(), "the words differ"


def test_the_film_draws_the_ball_where_it_is(smoke):
    """By hand: the middle of the maze is that of the view, which is four metres wide. The ball is blue."""
    model, meta = lesson.fit("a", "dt").checkpoint
    tape = lesson.camera.Tape(lab.envs.make(meta["env_spec"]), meta["layout"])
    tape.reset(seed=0, options=meta["starts"]["far"])
    (place, _, radius), = tape.shots[0]
    assert radius == pytest.approx(0.1)
    np.testing.assert_allclose(place, tape.unwrapped.point_env.unwrapped.data.qpos, atol=1e-9)
    pane = lesson.camera.Pane(tape, 5.0, 10, 10.0)
    image = Image.new("RGB", (520, 624))
    pane.draw(image, 0)
    x, y = ((10 + 16 + 104 + 52 * place[0]) * 2, (40 + 104 - 52 * place[1]) * 2)
    assert image.getpixel((round(x), round(y))) == (0x35, 0x61, 0x8f)
    assert image.getpixel((round(x), round(y) + 40)) != (0x35, 0x61, 0x8f)


def test_trained_takes_weights_first(smoke, capsys):
    made = lesson.trained("dt")[0]
    assert "there is no weights/dt-pointmaze-umaze" in capsys.readouterr().out
    run = lesson.fit("dt on pointmaze-umaze", "dt")
    lab.records.commit_weights(run.folder, smoke)
    capsys.readouterr()
    found, meta = lesson.trained("dt")
    assert not capsys.readouterr().out and meta["env"] == "pointmaze-umaze"
    for one, other in zip(found.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_play_shows_means_and_extremes(smoke, monkeypatch):
    texts, asked = [], []

    def returns(agent, targets, *rest):
        asked.append((agent, *rest))
        return {float(x): [x - 1, x + 3] for x in targets}
    monkeypatch.setattr(lesson, "returns", returns)
    monkeypatch.setattr(lab, "show", texts.append)
    monkeypatch.setattr(lab, "picture", lambda fig: texts.append(fig.axes[0].get_legend_handles_labels()[1]))
    lesson.play({"DT": 1, "DT, K = 1": 2}, [20, 60.5], 2, "far")
    assert texts[0].splitlines()[2:] == ["| 20 | 21 (19 to 23) | 21 (19 to 23) |",
                                         "| 60.5 | 62 (60 to 64) | 62 (60 to 64) |"]
    assert texts[1] == ["what was asked for", "DT", "DT, K = 1"]
    assert asked == [(1, 2, "far"), (2, 2, "far")]
    for name in pictures.LOOKS:     # three variants of a model can be told apart without colour
        _, *others = zip(*pictures.looks([name, f"{name}, K = 1", f"{name}, K = 2"]).values(), strict=True)
        assert all(len(set(map(str, shapes))) == 3 for shapes in others), name
    looks = pictures.looks(["RADT", "RADT, K = 1", "what else", "DT"])
    assert looks["RADT"] == pictures.LOOKS["RADT"] and looks["DT"] == pictures.LOOKS["DT"]
    colors, _, styles = zip(*looks.values(), strict=True)
    assert len(set(styles)) == len({str(color) for color in colors}) == 4
    many = [*pictures.LOOKS, *map(str, range(20))]
    for labels in (["DT", "DT, no goal", "LSDT"], ["ours", "all", "DC"], many):
        assert len({str(look[1:]) for look in pictures.looks(labels).values()}) == len(labels), labels


def test_names_and_cells_of_a_matrix(monkeypatch):
    figures = []
    monkeypatch.setattr(lab, "picture", figures.append)
    lesson.matrices({"a": torch.tensor([[0.0, 1.234], [-torch.inf, 2.0]])}, lesson.tokens(1, "Rs"))
    ax, = figures[0].axes
    assert [text.get_text() for text in ax.texts] == ["0", "1.23", "2.00"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["R₁", "s₁"]
    assert [tick.get_color() for tick in ax.get_yticklabels()] == [lesson.KINDS["R"], lesson.KINDS["s"]]
    assert lesson.tokens(10)[-3:] == ["R₁₀", "s₁₀", "a₁₀"]


def test_links_are_put_right():
    first = 1 + [line.startswith("class Attention") for line in
                 (ROOT / "models" / "dt.py").read_text(encoding="utf-8").splitlines()].index(True)
    new = lesson.link("dt.Attention")
    form = r'\[models/dt\.py, lines (\d+) to (\d+)\]\(\.\./models/dt\.py#L\1-L\2 "dt\.Attention"\)'
    assert re.fullmatch(form, new)
    assert f"#L{first}-" in new and lesson.link("data.Windows.gather").startswith("[data.py, lines ")
    old = f"See {new} and {new}.".replace(str(first), "7")
    assert old != lesson.relinked(old) == f"See {new} and {new}."
    assert lesson.relinked(json.dumps(old)) == json.dumps(f"See {new} and {new}.")
    with pytest.raises(AttributeError):
        lesson.relinked(new.replace("dt.Attention", "dt.Gone"))


@pytest.mark.parametrize("name", ["lab", "lesson"])
def test_a_missing_package_is_said_in_a_line(name, monkeypatch):
    """As where requirements.txt has not been installed; for the experiments and for the lessons."""
    monkeypatch.setitem(sys.modules, "filelock", None)
    for module in ("progress", "lab", "lesson"):
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(Exception, match="filelock is missing: .*pip install -r requirements.txt") as error:
        importlib.import_module(name)
    assert error.value._render_traceback_() == [str(error.value)]
