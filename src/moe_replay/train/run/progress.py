"""What a run tells on the console: a line for each finished step and, in a terminal, one that lives while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any

from moe_replay.distributed.ranks import rank
from moe_replay.errors import MissingExtraError
from moe_replay.train.run.sinks.types import Metrics

PARTS = ("rollout", "score", "train", "sync")  # time/<part> of a step


class Progress:
    """Shows how a run of `steps` steps goes; on other ranks than the first it is silent.

        with Progress(steps=100) as progress:
            progress.phase("rollout", done=12, total=64)    # as often as there is news
            progress.step(3, metrics)                       # one line

    Into a file or a pipe go the lines of the steps alone.
    """

    def __init__(self, steps: int, file: IO[str] | None = None) -> None:
        self._steps = steps
        self._file = file or sys.stdout
        self._shown = rank() == 0
        self._open = ExitStack()
        self._live: _LiveLine | None = None
        self._current = 0

    def __enter__(self) -> Progress:
        if self._shown and self._file.isatty():
            self._live = self._open.enter_context(_LiveLine(self._file))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._live = None
        self._open.close()

    def resume(self, step: int) -> None:
        """Steps up to this one were done before."""
        self._current = step

    def phase(self, name: str, done: int, total: int) -> None:
        """How far a part of the current step is: samples of a rollout, micro-batches of a pass."""
        if self._live is not None:
            self._live.show(f"step {self._current + 1}/{self._steps}  {name}", done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        """One line for a finished step."""
        self._current = step
        self.say(step_line(step, self._steps, metrics))

    def say(self, text: str) -> None:
        """One line of any text."""
        if self._live is not None:
            self._live.say(text)
        elif self._shown:
            print(text, file=self._file, flush=True)


class _LiveLine:
    """The line that is drawn again and again at the foot of a terminal."""

    def __init__(self, file: IO[str]) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError as error:
            raise MissingExtraError(
                "progress in a terminal needs rich", remedy="pip install 'moe-replay[train]'"
            ) from error
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._rich: Any = Progress(*columns, console=Console(file=file), transient=True)
        self._task = self._rich.add_task("", visible=False)
        self._text = ""

    def __enter__(self) -> _LiveLine:
        self._rich.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._rich.stop()

    def show(self, text: str, done: int, total: int) -> None:
        if text == self._text:
            self._rich.update(self._task, completed=done, total=total)  # drawn some times a second
            return
        self._text = text
        self._rich.reset(self._task, description=text, completed=done, total=total, visible=True)
        self._rich.refresh()

    def say(self, text: str) -> None:
        self._rich.console.print(text, markup=False, highlight=False, soft_wrap=True)


# ---- the line of a step ---------------------------------------------------------------------------------------------


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """What matters most of a step; what was not measured is left out."""
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *_parts(metrics)])


def _parts(metrics: Mapping[str, float]) -> Iterator[str]:
    shown: dict[str, Callable[[float], str]] = {
        "reward/mean": "reward {:.3f}".format,
        "eval/reward": "eval {:.3f}".format,
        "mismatch/rollout_vs_old/k3_kl": "k3 {:.2g}".format,
        "mismatch/rollout_vs_native/k3_kl": "(native {:.2g})".format,
        "routing/agreement": "routes {:.1%} alike".format,
        "time/tokens_per_second": lambda rate: f"{_short(rate)} tokens/s",
        "time/step": "{:.1f} s".format,
    }
    yield from (show(metrics[name]) for name, show in shown.items() if name in metrics)
    if metrics.get("time/step"):
        shares = {part: metrics[f"time/{part}"] / metrics["time/step"] for part in PARTS if f"time/{part}" in metrics}
        if shares:
            yield "(" + " ".join(f"{part} {share:.0%}" for part, share in shares.items()) + ")"
    if metrics.get("loss/skipped"):
        yield "UPDATE SKIPPED: its gradient was not finite"


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
