"""The bugs that docs/comparison.md lists are in the releases that it names."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not (find_spec("verl") or find_spec("swift")), reason="runs in the environment of `make test-plugins`"
)
ROOT = Path(__file__).parents[2]


def test_the_docs_have_what_the_scripts_show() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.known_bugs"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/comparison.md").read_text().splitlines()
    assert [line for line in done.stdout.splitlines() if line and line not in page] == []
