"""The examples of `records.py`, run in order, each with the names of those before it."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import pytest

from moe_replay import records

RECORDS = [one for one in vars(records).values() if inspect.isclass(one) and one.__module__ == records.__name__]
WITH_EXAMPLE = {"SamplingParams", "Sample", "Trajectory", "RolloutBatch", "MicroBatch"}


def test_the_page_is_one_page() -> None:
    assert len(inspect.getsource(records).splitlines()) <= 250


def test_the_examples_say_what_they_print() -> None:
    torch = pytest.importorskip("torch")
    from moe_replay.routes.layout import TokenLayout
    from moe_replay.train.learn.batches import make_micro_batch

    names = vars(records) | {"torch": torch, "TokenLayout": TokenLayout, "make_micro_batch": make_micro_batch}
    parser, runner, with_example = doctest.DocTestParser(), doctest.DocTestRunner(), set()
    for record in RECORDS:
        example = parser.get_doctest(record.__doc__ or "", names, record.__name__, records.__file__, 0)
        runner.run(example, clear_globs=False)
        names = example.globs
        with_example |= {record.__name__} if example.examples else set()
    assert runner.summarize(verbose=False).failed == 0
    assert with_example == WITH_EXAMPLE


def test_records_are_imported_without_torch() -> None:
    code = "import sys, moe_replay.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
