"""The README is run: what a newcomer pastes must work, print the shapes it says, and name files and flags that exist.

    pytest tests/test_15_readme.py
"""
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_11_data import write_hdf5

import settings
import train

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_python_block_runs_in_order_and_gives_the_shapes_in_its_comments(tmp_path, monkeypatch):
    """One tiny hopper run stands in for the reader's own; the rest is executed as printed."""
    write_hdf5(tmp_path / "hopper_medium-v2.hdf5")
    monkeypatch.chdir(tmp_path)
    train.train(env="hopper-medium", source="d4rl", data=str(tmp_path), steps=2, eval_episodes=0, size="small")
    names, checked = {}, 0
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        exec(compile(block, "README.md", "exec"), names)
        for code, shape in re.findall(r"^(\S.*?)\s+# (torch\.Size\(.*\))$", block, re.M):
            assert eval(code, names) == eval(shape, {"torch": torch}), code
            checked += 1
    assert checked >= 7 and len(names["r"]) >= 5 and names["result"]["run"].is_dir()


@pytest.mark.parametrize("name", settings.MODELS)
def test_every_model_has_its_row_with_the_right_number_of_lines(name):
    row = re.search(rf"^\| `{name}` \| \[models/{name}.py\]\(models/{name}.py\) \| (\d+) \|", TEXT, re.M)
    lines = len((ROOT / "models" / f"{name}.py").read_text().splitlines())
    assert row and abs(int(row[1]) - lines) <= 0.05 * lines, f"{lines} lines"


def test_every_file_linked_or_listed_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    listed = re.findall(r"^([a-z]+(?:\.py|/)) {3,}", TEXT, re.M)
    assert len(links) > 7 and len(listed) >= 6
    assert [x for x in links + listed if not (ROOT / x).exists()] == []


def test_every_flag_named_is_a_flag_of_some_command():
    help_texts = [subprocess.run([sys.executable, *c.split()], cwd=ROOT, capture_output=True, text=True).stdout
                  for c in [f"train.py --model {m} --help" for m in settings.MODELS] + ["eval.py --help", "data.py --help"]]
    known = set(re.findall(r"--[a-z][\w-]*", " ".join(help_texts)))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXT)) - {"--index-url"}
    assert len(named) > 15 and named - known == set()
