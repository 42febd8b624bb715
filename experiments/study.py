"""A study: a question, the arms that answer it, and its figure. One module each; `main` is its command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments import results
from experiments.arms import Arm
from experiments.results import Result
from experiments.scales import SCALES, Scales
from moe_replay.demo.files import default_cache
from moe_replay.errors import MissingExtraError

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "images" / "experiments"
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A question, the arms that answer it, in the order in which they run, and how to draw the answer.

    draw    takes a matplotlib figure and the results of those arms that have been run
    table   takes the same results, returns the rows of a table, its header first
    scales  model and length of its runs, by device
    folder  of its results
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    draw: Callable[[Any, Sequence[Result]], None]
    table: Callable[[Sequence[Result]], list[list[str]]]
    size: tuple[float, float] = (9.0, 3.4)
    scales: Scales = field(default_factory=lambda: SCALES)
    folder: Path = results.FOLDER


def with_seeds(arms: Sequence[Arm], seeds: Sequence[int] = SEEDS) -> tuple[Arm, ...]:
    """Return the arms with each seed, the first seed of all of them first."""
    return tuple(replace(arm, seed=seed) for seed in seeds for arm in arms)


def same_but_seed(runs: Sequence[Result]) -> dict[Arm, list[Result]]:
    """Return results grouped by arm, seeds together."""
    groups: dict[Arm, list[Result]] = {}
    for result in runs:
        groups.setdefault(replace(result.arm, seed=0), []).append(result)
    return groups


def draw(study: Study, runs: Sequence[Result], figures: Path = FIGURES) -> Path:
    """Draw the figure of a study, and return its file."""
    return save_figure(study.name, study.size, lambda figure: study.draw(figure, runs), figures)


def save_figure(name: str, size: tuple[float, float], fill: Callable[[Any], None], figures: Path = FIGURES) -> Path:
    """Save a figure that `fill` draws, and return its file."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingExtraError("figures need matplotlib", remedy="pip install 'moe-replay[report]'") from missing

    figure = Figure(figsize=size, layout="constrained")
    fill(figure)
    figures.mkdir(parents=True, exist_ok=True)
    path = figures / f"{name}.svg"
    with matplotlib.rc_context({"svg.hashsalt": "moe-replay"}):  # the same results make the same file
        figure.savefig(path, metadata={"Date": None})
    return path


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in Markdown."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(study: Study) -> None:
    """Run what is missing, then print the table and draw the figure."""
    options = argparse.ArgumentParser(description=study.question)
    options.add_argument("--device", choices=study.scales, default="cpu")
    options.add_argument("--draw", action="store_true", help="only draw what has been run")
    options.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same command continues")
    options.add_argument("--together", type=int, default=1, help="runs at the same time on the device")
    options.add_argument("--seeds", type=int, nargs="+", help="only these")
    work = default_cache() / "experiments" / ("" if study.folder == results.FOLDER else study.name)
    options.add_argument("--work", type=Path, default=work, help="folder of model and runs")
    options.add_argument("--results", type=Path, help="results folder; on the CPU, inside the folder of runs")
    options.add_argument("--figures", type=Path, help="figures folder; on the CPU, the results folder")
    chosen = options.parse_args()
    is_tiny = chosen.device == "cpu" and not chosen.draw  # tiny runs are not results
    into = chosen.results or (chosen.work / "tiny-results" if is_tiny else study.folder)
    arms = [arm for arm in study.arms if chosen.seeds is None or arm.seed in chosen.seeds]
    if not chosen.draw:
        from experiments.runs import run_arms

        scale = study.scales[chosen.device]
        run_arms(arms, scale, chosen.device, chosen.work, together=chosen.together, minutes=chosen.minutes, into=into)
    runs = results.read(study.arms, into)
    if not runs:
        print(f"{study.name}: nothing has been run")
        return
    print(table_text(study.table(runs)))
    print(draw(study, runs, chosen.figures or (into if is_tiny else FIGURES)))
