"""Console output of a run: one line per completed step and, in a terminal, a live line for the current phase."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from moe_replay.distributed.ranks import rank
from moe_replay.errors import needs_extra
from moe_replay.records import Completion
from moe_replay.train.output.completions import printable
from moe_replay.train.output.sinks import Metrics

LOG_WIDTH = 160
SMALL_GB = 0.1
SHOWN_PROMPT, SHOWN_TEXT = 240, 800  # characters of a table's cells
PHASES = ("rollout", "score", "train", "sync")  # time/<phase> of a step


class ConsoleProgress:
    """Shows the progress of a run of `steps` steps; prints on rank 0 only.

        with ConsoleProgress(steps=100) as progress:
            progress.phase("rollout", done=12, total=64)    # as often as it changes
            progress.step(3, metrics)                       # one line

    A file or a pipe receives the lines of completed steps only.
    """

    def __init__(self, steps: int, file: IO[str] | None = None) -> None:
        self._steps = steps
        self._file = file or sys.stdout
        self._is_shown = rank() == 0
        self._live: Any = None  # rich's `Progress`, at the bottom of a terminal
        self._phase = ""
        self._current = 0

    def __enter__(self) -> ConsoleProgress:
        if self._is_shown and self._file.isatty():
            console = _console(self._file)
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._live = Progress(*columns, console=console, transient=True)
            self._task = self._live.add_task("", visible=False)
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def plan(self, steps: int) -> None:
        """Count up to this number of steps from now on."""
        self._steps = steps

    def resume(self, step: int) -> None:
        """Count on from this step, the last completed one."""
        self._current = step

    def phase(self, name: str, done: int, total: int) -> None:
        """Show how far a phase of the current step is: samples of a rollout, updates of a step."""
        if self._live is None:
            return
        text = f"step {self._current + 1}/{self._steps}  {name}"
        if text == self._phase:
            self._live.update(self._task, completed=done, total=total)  # redrawn a few times a second
            return
        self._phase = text
        self._live.reset(self._task, description=text, completed=done, total=total, visible=True)
        self._live.refresh()

    def step(self, step: int, metrics: Metrics) -> None:
        self._current = step
        self.message(step_line(step, self._steps, metrics))

    def completions(self, completions: Sequence[Completion]) -> None:
        """Print a table of completions with their rewards and advantages; nothing if there are none."""
        if completions and self._is_shown:
            console = _console(self._file) if self._live is None else self._live.console
            console.print(completion_table(completions))

    def message(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._is_shown:
            print(text, file=self._file, flush=True)


def _console(file: IO[str]) -> Any:
    """Return a console of rich that prints to a file: as wide as the terminal, or wide enough for a log."""
    with needs_extra("output to a terminal needs rich", "train"):
        from rich.console import Console
    return Console(file=file, width=None if file.isatty() else LOG_WIDTH)


# ---- completions ----------------------------------------------------------------------------------------------------


def completion_table(completions: Sequence[Completion]) -> Any:
    """Return a table for rich: the end of each prompt, the completion, its reward and advantage."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True, expand=True)
    for name, ratio in (("prompt", 2), ("completion", 5)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for name in ("reward", "advantage", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for completion in completions:
        prompt, text = printable(completion.prompt), printable(completion.completion)
        table.add_row(
            Text(prompt if len(prompt) <= SHOWN_PROMPT else f"…{prompt[-SHOWN_PROMPT:]}"),
            Text(text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…"),
            f"{completion.reward:.3f}",
            f"{completion.advantage:+.3f}",
            f"{completion.tokens} ({completion.finish_reason})",
        )
    return table


# ---- line of one step -----------------------------------------------------------------------------------------------


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Return the key metrics of a step in one line; what was not measured is left out."""
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *_parts(metrics)])


def _parts(metrics: Mapping[str, float]) -> Iterator[str]:
    shown: dict[str, Callable[[float], str]] = {
        "reward/mean": "reward {:.3f}".format,
        "eval/reward": "eval {:.3f}".format,
        "mismatch/rollout_vs_old/k3_kl": "k3 {:.2g}".format,
        "mismatch/rollout_vs_native/k3_kl": "(native {:.2g})".format,
        "routing/agreement": "routes {:.1%} agree".format,
        "time/tokens_per_second": lambda rate: f"{_short(rate)} tokens/s{_per_gpu(metrics)}",
        "time/step": "{:.1f} s".format,
    }
    yield from (show(metrics[name]) for name, show in shown.items() if name in metrics)
    if metrics.get("time/step"):
        shares = {
            phase: metrics[f"time/{phase}"] / metrics["time/step"] for phase in PHASES if f"time/{phase}" in metrics
        }
        if shares:
            yield "(" + " ".join(f"{phase} {share:.0%}" for phase, share in shares.items()) + ")"
    used = {phase: metrics[f"time/{phase}_mfu"] for phase in PHASES if f"time/{phase}_mfu" in metrics}
    if used:
        yield "MFU " + " ".join(f"{phase} {mfu:.1%}" for phase, mfu in used.items())
    if metrics.get("weights/gb"):
        size, seconds = metrics["weights/gb"], f"{_digits(metrics['time/weights'], 2)} s"
        if size < SMALL_GB:  # all latency: a rate would say nothing
            yield f"weights {_digits(size * 1000, 2)} MB in {seconds}"
        else:
            rate = _digits(metrics["time/weights_gb_per_second"], 2)
            yield f"weights {_digits(size, 3)} GB at {rate} GB/s in {seconds}"
    if metrics.get("loss/skipped"):
        yield "UPDATE SKIPPED: its gradient was not finite"


def _per_gpu(metrics: Mapping[str, float]) -> str:
    """Return the rate of each GPU, if there are several."""
    whole = metrics["time/tokens_per_second"]
    rate = metrics.get("time/tokens_per_second_per_gpu", whole)
    return "" if rate == whole else f" ({_short(rate)} per GPU)"


def _digits(number: float, least: int) -> str:
    """Return a number with so many significant digits, and never without those before the point."""
    return f"{number:.0f}" if number >= 10 ** (least - 1) else f"{number:.{least}g}"


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
