"""Functions that a page of the documentation shows, loaded as a run loads them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_replay.train.rollout.environments import load_environment

DOCS = Path(__file__).resolve().parents[2] / "docs"


@contextmanager
def documented_environment(page: str, name: str, folder: Path) -> Iterator[Any]:
    """Load the environment `module:function` from the block of a page that begins with its file name."""
    module, _ = name.split(":")
    (code,) = re.findall(rf"```python\n(# {module}\.py.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (folder / f"{module}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield load_environment(name)
        patch.delitem(sys.modules, module)
