from __future__ import annotations

import errno
import io
import os
import pty
import threading
from collections.abc import Iterator

import pytest

from moe_replay.train.output.console import ConsoleProgress, step_line
from tests.distributed.harness import run_ranks

METRICS = {
    "reward/mean": 0.53125,
    "mismatch/rollout_vs_old/k3_kl": 1.2e-5,
    "mismatch/rollout_vs_native/k3_kl": 0.0034,
    "routing/agreement": 0.9871,
    "time/tokens_per_second": 12345.0,
    "time/step": 40.0,
    "time/rollout": 25.0,
    "time/score": 3.0,
    "time/train": 10.0,
    "time/sync": 2.0,
    "loss/skipped": 0,
}
LINE = (
    "step   7/100  reward 0.531  k3 1.2e-05  (native 0.0034)  routes 98.7% agree  12.3k tokens/s  40.0 s  "
    "(rollout 62% score 8% train 25% sync 5%)"
)


def test_the_line_of_a_step() -> None:
    assert step_line(7, 100, METRICS) == LINE


def test_the_line_has_the_rate_of_each_of_several_gpus_and_what_they_use_of_their_peak() -> None:
    speed = {"time/tokens_per_second_per_gpu": 1543.1, "time/score_mfu": 0.361, "time/train_mfu": 0.27}
    line = step_line(7, 100, METRICS | speed)
    assert "12.3k tokens/s (1.5k per GPU)  40.0 s" in line
    assert line.endswith("sync 5%)  MFU score 36.1% train 27.0%")
    assert step_line(7, 100, METRICS | {"time/tokens_per_second_per_gpu": 12345.0}) == LINE


def test_what_was_not_measured_is_left_out() -> None:
    few = {"reward/mean": float("nan"), "time/step": 0.0, "time/tokens_per_second": 12.0}
    assert step_line(1, 5, few) == "step 1/5  reward nan  12 tokens/s  0.0 s"
    assert step_line(1, 5, {}) == "step 1/5"


def test_a_skipped_update_is_seen() -> None:
    assert "UPDATE SKIPPED" in step_line(1, 5, {"loss/skipped": 1})
    assert "UPDATE SKIPPED" not in LINE


def test_into_a_file_go_plain_lines() -> None:
    file = io.StringIO()
    with ConsoleProgress(100, file) as progress:
        progress.phase("rollout", 3, 64)
        progress.step(7, METRICS)
        progress.message("saved")
    assert file.getvalue() == LINE + "\nsaved\n"


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal is sent."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")  # narrower than the line of a step
    ours, theirs = pty.openpty()
    sent: list[bytes] = []
    reader = threading.Thread(target=lambda: sent.extend(until_closed(ours)))
    reader.start()
    with os.fdopen(theirs, "w") as file, ConsoleProgress(100, file) as progress:
        progress.resume(6)
        progress.phase("rollout", 13, 64)
        progress.phase("train", 2, 5)
        progress.step(7, METRICS)
        progress.phase("rollout", 1, 64)
        progress.phase("rollout", 17, 64)
    reader.join()
    os.close(ours)
    return b"".join(sent).decode()


def until_closed(terminal: int) -> Iterator[bytes]:
    """Everything that is written to a terminal; where its other end is closed, Linux reports EIO instead of an end."""
    try:
        while part := os.read(terminal, 4096):
            yield part
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def test_a_terminal_shows_the_phase_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = in_terminal(monkeypatch)
    assert "step 7/100  rollout" in sent
    assert "13/64" in sent
    assert "step 7/100  train" in sent
    assert LINE in sent, "the line of a step is neither wrapped nor coloured"
    after = sent[sent.index(LINE) :]
    assert "step 8/100  rollout" in after
    assert "17/64" in after


def said_on_rank() -> str:
    file = io.StringIO()
    with ConsoleProgress(100, file) as progress:
        progress.step(7, METRICS)
    return file.getvalue()


@pytest.mark.distributed
def test_only_the_first_rank_speaks() -> None:
    assert run_ranks(2, said_on_rank) == [LINE + "\n", ""]


def test_the_line_says_how_fast_the_weights_went() -> None:
    synced = {"time/step": 2.0, "weights/gb": 1.6, "time/weights": 0.25, "time/weights_gb_per_second": 6.4}
    assert step_line(1, 5, synced).endswith("weights 1.6 GB at 6.4 GB/s in 0.25 s")
    assert step_line(1, 5, {**synced, "weights/gb": 0.0015}).endswith("weights 1.5 MB in 0.25 s")
    large = {**synced, "weights/gb": 2051.3, "time/weights": 123.4, "time/weights_gb_per_second": 166.2}
    assert step_line(1, 5, large).endswith("weights 2051 GB at 166 GB/s in 123 s")
    assert step_line(1, 5, {**synced, "weights/gb": 0.0996}).endswith("weights 100 MB in 0.25 s")
