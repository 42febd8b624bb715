"""What every test run shares: the same examples each time, no network, marks, and what is costly to make."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import settings

from tests import bfloat16
from tests.distributed import harness
from tests.ports import reserved_port

# The garbage collector looks at none of the millions of objects that modules are made of: it is off while they are
# imported, and sees what tests make from then on.
gc.disable()

torch.set_num_threads(1)  # sums in several threads are not bit for bit the same twice

# Before anything imports huggingface_hub: a test that needs a download is a test that fails on a plane.
os.environ["HF_HUB_OFFLINE"] = "1"

# A red run must be red again for the next person. Deadlines measure the machine, not the code.
# To look for new examples: pytest --hypothesis-profile=explore
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci")

# A shell that runs the tests in the background ignores SIGINT, nohup ignores SIGHUP, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

MARKS_OF_FOLDERS = {"distributed": "distributed", "real_vllm": "engine", "real_sglang": "engine"}
MARKS_OF_FIXTURES = {"demo_files": "slow"}  # who asks for it trains
MARKS_OF_OTHER_TARGETS = ("faults_long", "thorough")  # tests that only an expression with the mark selects
IN_ONE_PROCESS = os.environ.get("PYTEST_XDIST_WORKER") is None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they start; in several workers, begin with the files that take long, to end together."""
    held_back = [name for name in MARKS_OF_OTHER_TARGETS if name not in config.option.markexpr]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, held_back))]
    for item in items:
        folders, fixtures = item.nodeid.partition("::")[0].split("/"), getattr(item, "fixturenames", ())
        for marks, found in ((MARKS_OF_FOLDERS, folders), (MARKS_OF_FIXTURES, fixtures)):
            for name in marks.keys() & set(found):
                item.add_marker(marks[name])
    if not IN_ONE_PROCESS:
        ranks: dict[Any, int] = {}
        for item in items:
            ranks[item.path] = min(ranks.get(item.path, 2), _rank(item))
        items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish() -> None:
    """Leave the objects of all imported modules to the permanent generation."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("engine"):
        return 0
    return 1 if item.get_closest_marker("distributed") or item.get_closest_marker("slow") else 2


@pytest.fixture(autouse=True)
def ranks_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started by tests with a mark alone, so that `make test-quick` starts none."""
    if not any(request.node.get_closest_marker(mark) for mark in ("distributed", "engine")):
        monkeypatch.setattr(harness, "_server", _no_ranks)


def _no_ranks() -> NoReturn:
    pytest.fail("a test that starts ranks is marked with pytest.mark.distributed")


@pytest.fixture(autouse=True)
def megatron_is_taken_back() -> Iterator[None]:
    """A run with Megatron-Core in this process patches torch and turns its compiler off: not for the tests after it."""
    yield
    megatron_cpu = sys.modules.get("moe_replay.megatron.cpu")
    if megatron_cpu is not None and megatron_cpu.enable.cache_info().currsize:
        megatron_cpu.enable().close()
        megatron_cpu.enable.cache_clear()


@pytest.fixture(scope="module")
def fast_bfloat16() -> Iterator[None]:
    """For tests that compute in bfloat16, wherever they run: see tests/bfloat16.py."""
    with bfloat16.fast_bfloat16():
        yield


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The quick version of the embedded default, made once for all workers: model and data; the model knows little."""
    pytest.importorskip("transformers")
    from moe_replay import demo

    folder = tmp_path_factory.getbasetemp()
    folder = folder if IN_ONE_PROCESS else folder.parent
    with open(folder / "demo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return demo.prepare(folder / "demo", quick=True, status=lambda line: None)


@pytest.fixture
def port() -> Iterator[int]:
    """A port for a server of the test's own; until that listens, connections are refused."""
    with reserved_port() as number:
        yield number
