"""README and docs are run: what a newcomer pastes works, and every number, link and picture has its source.

    pytest tests/test_15_readme.py
"""
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_11_data import write_hdf5

import data
import eval as player
import settings
import train

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
README, RESULTS = TEXTS["README.md"], TEXTS["results.md"]


def without_blocks(text):
    return re.sub(r"```.*?```", "", text, flags=re.S)


def table_rows(text):
    """[[cell, ...]] of all Markdown tables in a text, without the lines under their heads."""
    lines = re.findall(r"^\|(?!--)(.*)\|$", without_blocks(text), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def run(command, folder):
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)


# ------------------------------------------------------------------- blocks

@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """A folder with a tiny run of hopper-medium and of the maze, and a little of the maze's data."""
    folder = tmp_path_factory.mktemp("newcomer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "sets"))
        patch.chdir(folder)
        write_hdf5(folder / "hopper_medium-v2.hdf5")
        given = dict(steps=2, size="small", device="cpu")
        train.train(env="hopper-medium", source="d4rl", data=str(folder), eval_episodes=0, **given)
        data.collect_local("pointmaze-umaze", 3000)
        train.train(env="pointmaze-umaze", source="local", eval_episodes=1, eval_every=0, **given)
        yield folder


@pytest.mark.filterwarnings("ignore::UserWarning:minari")      # what a set that is published should say
@pytest.mark.parametrize("page", [name for name, text in TEXTS.items() if "```python" in text])
def test_every_python_block_runs_in_order_and_gives_the_shapes_in_its_comments(page, newcomer):
    """The tiny runs stand in for the reader's own; the rest is executed as printed."""
    names, checked = {}, 0
    for block in re.findall(r"```python\n(.*?)```", TEXTS[page], re.S):
        exec(compile(block, page, "exec"), names)
        for code, shape in re.findall(r"^(\S.*?)\s+# (torch\.Size\(.*\))$", block, re.M):
            assert eval(code, names) == eval(shape, {"torch": torch}), code
            checked += 1
    assert names["result"]["run"].is_dir()
    assert checked == (2 if page == "README.md" else 0)
    if page == "data.md":
        assert len(names["r"]) >= 5 and [row["episodes"] for row in names["result"]["rows"]][:1] == [1]


BASH = [block for text in TEXTS.values() for block in re.findall(r"```bash\n(.*?)```", text, re.S)]
COMMANDS = sorted({line.strip() for block in BASH for line in re.findall(r"^python [^#\n]*", block, re.M)})
SHORTER = [(r"--bench \d+", "--bench 1"), (r"--episodes \d+", "--episodes 1"),
           (r"collect \S+", r"\g<0> --steps 3000")]
SHORTER += [(r"--video \S+", ""), (r"--seeds [\d ]+", ""), (r" runs/qt-\S+", " runs/dt-pointmaze-umaze-s0")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command, newcomer):
    """As printed, with fewer episodes and updates; what would train for minutes only shows its settings."""
    for long, short in SHORTER:
        command = re.sub(long, short, command)
    script, *words = command.split()[1:]
    if script == "online.py":       # its own tests fine-tune; here its flags are read
        words = ["--help"]
    if script in ("train.py", "qt.py") and not {"--bench", "--resume", "--show"} & set(words):
        words.append("--show")
    if script == "sweep.py":
        words += "--steps 1 --eval_episodes 0 --device cpu --workers 1".split()
    result = run([ROOT / script, *words], newcomer)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()


def test_the_blocks_have_enough_commands():
    assert len(COMMANDS) >= 12


def test_every_flag_named_is_a_flag_of_some_command():
    commands = [["train.py", "--model", name, "--help"] for name in settings.MODELS]
    commands += [[script, "--help"] for script in ("eval.py", "data.py", "sweep.py", "online.py", "qt.py")]
    known = set(re.findall(r"--[a-z][\w-]*", " ".join(run(command, ROOT).stdout for command in commands)))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "".join(TEXTS.values()))) - {"--index-url"}
    assert len(named) > 15 and named - known == set()


def test_the_output_shown_is_the_output_printed():
    """The table of the README has the head, and the width of rows, of the table that is printed today."""
    row = dict(
        start="far", target=52.2, episodes=10, return_mean=45.7, return_std=25.3, score=None, success=100.0,
        length=300.0, abs_error=23.5, achieved=[45.7], returns=[45.7], achieved_mean=45.7)
    head, line = player.table([row]).splitlines()
    assert head in README.splitlines()
    shown = [x for x in README.splitlines() if re.match(r"far +\d", x)]
    assert len(shown) == 3 and {len(x) for x in shown} == {len(line)}


# ------------------------------------------------------------------- numbers

def plain_runs():
    """{(set, model): runs with preset settings, of those that come with the project}."""
    plain, groups = set("model env seed size source eval_every amp".split()), {}
    for file in (ROOT / "notebooks" / "results" / "runs").glob("*.json"):
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["model"] in settings.MODELS and run["rows"] and set(run["kept"]["spec"]) <= plain:
            groups.setdefault((run["env"], run["model"]), []).append(run)
    return groups


def test_the_table_of_the_readme_is_what_the_runs_found():
    """Of the small maze, seeds 0 to 4."""
    shown = [row for row in table_rows(README) if any("±" in cell for cell in row)]
    groups, expected = plain_runs(), []
    for name in ("DT", "DC", "LSDT", "RADT", "StARformer", "DM"):
        runs = [run for run in groups["maze2d-umaze", name.lower()] if run["seed"] < 5]
        assert len(runs) == 5
        plan = [(row["start"], row["target"] == runs[0]["asked"]) for row in runs[0]["rows"]]
        success = player.interval([run["rows"][plan.index(("random", True))]["success"] for run in runs])
        (_, near), (_, far) = player.alignments([run["rows"] for run in runs])
        rank = np.mean([each["rank_correlation"] for each in far])
        errors = [player.interval([each["abs_error"] for each in some]) for some in (far, near)]
        minutes = f"{np.mean([run['seconds'] for run in runs]) / 60:.1f}"
        expected.append([name, f"{success} %", f"{rank:.2f}", *errors, f"{runs[0]['steps']:,}", minutes])
    assert shown == expected


def test_what_is_normal_is_what_the_runs_found():
    """Every (set, model) with preset settings, from notebooks/results/runs, to the digit."""
    expected = []
    for key, runs in sorted(plain_runs().items()):
        returns = [next(row for row in r["rows"] if row["target"] == r["asked"])["return_mean"] for r in runs]
        errors = []
        for r in runs:
            last = [row for row in r["rows"] if row["start"] == r["rows"][-1]["start"]]
            count = [row["episodes"] for row in last]
            errors.append(np.average([row["abs_error"] for row in last], weights=count))
        expected.append([*key, str(len(runs)), player.interval(returns), player.interval(errors)])
    assert len(expected) >= 6
    shown = [row for row in table_rows(RESULTS) if len(row) == 10 and row[-1] != "minutes a run"]
    assert [[*row[:3], row[4], row[8]] for row in shown] == expected


# ------------------------------------------------------------------- links, pictures, size

def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[`*]|\[|\]\(.*?\)", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def leads_somewhere(link, page):
    """Whether a page's link is to a file and, if it names a heading of a page, to that."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or target.suffix != ".md" or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", without_blocks(target.read_text(encoding="utf-8")), re.M)
    return anchor in map(slug, headings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = without_blocks(page.read_text(encoding="utf-8"))
    links = [x for x in re.findall(r"\]\(([^)\s]+)\)", text) if not x.startswith("http")]
    assert links
    for link in links:
        assert leads_somewhere(link, page), link
        assert "#" not in link or re.match(r"([^#]*\.md)?#", link), link


def test_every_model_is_introduced_with_its_drawing():
    for name in settings.MODELS:
        assert f"](docs/{name}.svg)<br>" in README
        assert re.search(rf"\]\(models/{name}\.py\)\*\*, `--model {name}`", README), name


def test_the_anatomy_is_that_of_the_file():
    """What the README says stands in models/dc.py stands there, in this order."""
    block = re.search(r"## Anatomy.*?```text\n(.*?)```", README, re.S)[1]
    parts = re.findall(r"^(class \w+|PRESETS|if __name__)", block, re.M)
    text = (ROOT / "models" / "dc.py").read_text(encoding="utf-8")
    places = [re.search(rf"^{part}\b", text, re.M).start() for part in parts]
    assert len(parts) == 6 and places == sorted(places)


def script_of(name):
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_what_is_normal_is_written_and_drawn(tmp_path):
    """Rows under the head are replaced, and nothing else. A mark is a mean over seeds."""
    script, page = script_of("normal"), tmp_path / "page.md"
    page.write_text("before\n\n| a | b |\n|---|---|\n| 1 | old |\n| 2 | old |\n\nafter\n| c |\n")
    script.write(page, "| a | b |\n| --- | --- |\n| 3 | new |")
    assert page.read_text() == "before\n\n| a | b |\n|---|---|\n| 3 | new |\n\nafter\n| c |\n"

    def run(env, achieved):
        row = dict(start="s", target=200.0, achieved_mean=achieved, achieved=[achieved], episodes=1)
        return dict(env=env, asked=200.0, rows=[row | dict(success=40.0)])

    groups = {("antmaze-x", "dm"): [run("antmaze-x", 50.0)],
              ("hopper", "dt"): [run("hopper", 100.0), run("hopper", 140.0)]}
    marks = [[tuple(ax.containers[i][0].get_xdata()) for i in range(len(ax.containers))]
             for ax in script.draw(groups).axes]
    assert marks == [[(40.0,)], [(75.0,)], [(60.0,)], [(40.0,)]]


def test_the_drawings_are_what_their_script_draws():
    script = script_of("draw")
    assert sorted(script.DRAWINGS) == settings.MODELS
    for name, draw in script.DRAWINGS.items():
        shown = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
        assert shown == draw(), f"{name}: python docs/draw.py draws it anew"


def test_the_film_is_made_of_a_run(newcomer):
    """docs/film.py films the tiny run; the film that the README shows has the same size and is light."""
    from PIL import Image
    result = run([ROOT / "docs" / "film.py", "runs/dt-pointmaze-umaze-s0", "maze.gif"], newcomer)
    assert result.returncode == 0, result.stderr[-2000:]
    shown = ROOT / "docs" / "maze.gif"
    assert shown.stat().st_size < 1_000_000
    with Image.open(shown) as film, Image.open(newcomer / "maze.gif") as made:
        assert film.size == made.size and film.n_frames == made.n_frames > 50


def test_the_readme_is_short_and_in_order():
    assert README.count("\n") <= 200
    assert len(README.split()) <= 2200
    order = ["Two commands", "The six models", "Anatomy of a model file", "A learning path", "Copy one",
             "Your own data", "Commands", "Results", "Add a model, a data set", "More"]
    assert re.findall(r"^## (.*)$", README, re.M) == order
    assert README.index("docs/maze.gif") < README.index("## Two commands")
