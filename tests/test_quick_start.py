"""The page that trains a reader's own model on a CPU, run as printed, and the notebook with the same files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-run.md"
NOTEBOOK = ROOT / "examples" / "quick_start.ipynb"


def printed_blocks() -> tuple[dict[str, str], list[str]]:
    """Files by name, and the commands."""
    section = PAGE.read_text().partition("## Train your own model on a CPU")[2].partition("\n## ")[0]
    blocks = [(kind, textwrap.dedent(text)) for kind, text in re.findall(r"    ```(\w+)\n(.*?)    ```", section, re.S)]
    files = {text.split()[1]: text for kind, text in blocks if kind != "sh"}
    (commands,) = [text.splitlines() for kind, text in blocks if kind == "sh"]
    return files, commands


def notebook_blocks() -> tuple[dict[str, str], list[str]]:
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    files = {cell.split()[1]: cell.partition("\n")[2] + "\n" for cell in cells if cell.startswith("%%writefile")}
    return files, [line[1:] for cell in cells for line in cell.splitlines() if line.startswith("!")]


def test_the_notebook_has_the_files_and_commands_of_the_page() -> None:
    assert notebook_blocks() == printed_blocks()


@pytest.mark.slow
def test_the_page_trains_a_model_as_printed(tmp_path: Path) -> None:
    files, commands = printed_blocks()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name, module in (("python", ""), ("moe-replay", "-m moe_replay.cli.main")):
        command = scripts / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        command.chmod(0o755)
    python_path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": python_path}
    done = [
        subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        for line in commands
    ]
    assert [run.returncode for run in done] == [0] * len(commands), done[-1].stderr
    verdict = done[-1].stderr  # once all samples are perfect, groups have equal rewards
    assert verdict.startswith("Healthy: ") or "had equal rewards" in verdict
    rewards = [json.loads(line)["reward/mean"] for line in (tmp_path / "runs/first/metrics.jsonl").open()]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
