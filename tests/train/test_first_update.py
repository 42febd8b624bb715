"""The first update of a step against the old log-probs: exact, or within the noise of kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_replay.errors import ReplayStateError
from moe_replay.train.backends.base import Routing, Scores
from moe_replay.train.learn.step_checks import NOISE_MARGIN, FirstUpdateCheck
from moe_replay.train.setup import launch

BATCHES: Any = [SimpleNamespace(is_dummy=False), SimpleNamespace(is_dummy=True)]
REPLAY = Routing("native")


class Noisy:
    """A backend whose passes differ by `noise` from one to the next."""

    device = torch.device("cpu")
    is_compiled = False

    def __init__(self, noise: float) -> None:
        self.noise, self.passes = noise, 0

    def score(self, batches: Any, routing: Routing) -> list[Scores]:
        self.passes += 1
        value = torch.full((3,), self.noise * (self.passes % 2))
        return [Scores(value, value), Scores(value * 100, value)]  # a dummy's tokens do not count


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with launch.process_group(torch.device("cpu")):
        assert dist.is_initialized()
        yield


def check(one: FirstUpdateCheck, largest: float, backend: Noisy) -> None:
    one.check(largest, backend, BATCHES, REPLAY)  # type: ignore[arg-type]


def test_deterministic_kernels_are_held_to_zero_and_measured_only_on_a_difference() -> None:
    one, backend = FirstUpdateCheck("auto", "float32"), Noisy(0.0)
    check(one, 0.0, backend)
    assert backend.passes == 0
    with pytest.raises(ReplayStateError, match=r"exactly 1.*1e-07 apart"):
        check(one, 1e-7, backend)


def test_noise_of_kernels_is_measured_said_and_accepted(caplog: pytest.LogCaptureFixture) -> None:
    one, backend = FirstUpdateCheck("auto", "bfloat16"), Noisy(0.125)
    with caplog.at_level(logging.WARNING):
        check(one, NOISE_MARGIN * 0.125, backend)
    assert one.noise == 0.125
    assert "two identical passes give log-probs up to 0.125 apart" in caplog.text
    assert "replay.deterministic" in caplog.text
    passes = backend.passes
    check(one, 0.5, backend)
    assert backend.passes == passes  # known by now


def test_more_than_noise_stops_the_run() -> None:
    one, backend = FirstUpdateCheck("auto", "bfloat16"), Noisy(0.01)
    with pytest.raises(ReplayStateError, match=r"8 times the noise floor of 0.01.*0.09 apart"):
        check(one, 0.09, backend)


def test_noise_that_grows_is_measured_again() -> None:
    one, backend = FirstUpdateCheck("auto", "bfloat16"), Noisy(0.01)
    check(one, 0.05, backend)
    backend.noise = 0.02
    check(one, 0.15, backend)
    assert one.noise == pytest.approx(0.02)


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 0.002), ("float16", 0.2), ("bfloat16", 0.5)])
def test_noise_that_no_order_of_additions_explains_stops_the_run(dtype: Any, noise: float) -> None:
    """Were it accepted, eight times as much would be, and the check would pass whatever the update computes."""
    one, backend = FirstUpdateCheck("auto", dtype), Noisy(noise)
    with pytest.raises(ReplayStateError, match=rf"apart in {dtype}, found log-probs up to {noise:g} apart") as caught:
        check(one, noise, backend)
    assert "replay.deterministic = true" in str(caught.value)
    check(one, 0.0, backend)  # nothing differs: nothing is measured
    with pytest.raises(ReplayStateError, match="two identical passes"):
        check(one, noise / 100, backend)  # it is not known as a noise floor


@pytest.mark.parametrize("largest", [0.2, float("nan")])
def test_a_given_tolerance_is_final(largest: float) -> None:
    one, backend = FirstUpdateCheck(0.1, "float32"), Noisy(1.0)
    check(one, 0.1, backend)
    with pytest.raises(ReplayStateError, match=r"within 0.1"):
        check(one, largest, backend)
    assert backend.passes == 0


def test_deterministic_kernels_are_asked_for_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with launch.deterministic_kernels(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with launch.deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_noise_of_compiled_layers_is_that_against_their_own_code(caplog: pytest.LogCaptureFixture) -> None:
    """Two identical passes agree; the pass with gradients is another graph, which rounds differently."""

    class Compiled(Noisy):
        is_compiled = True

        def score_uncompiled(self, batches: Any, routing: Routing) -> list[Scores]:
            value = torch.full((3,), 0.01)
            return [Scores(value, value), Scores(value * 100, value)]

    one, backend = FirstUpdateCheck("auto", "bfloat16"), Compiled(0.0)
    with caplog.at_level(logging.WARNING):
        check(one, 0.05, backend)
    assert one.noise == pytest.approx(0.01)
    assert "layers round differently when they are compiled" in caplog.text
    assert "model.compile = false" in caplog.text
    with pytest.raises(ReplayStateError, match=r"8 times the noise floor of 0.01.*0.09 apart"):
        check(one, 0.09, backend)
