"""How the mismatch grows: k3, F(2) and agreement by depth, position, experts and precision, natively and with R3.

    python -m experiments.growth                   # trains, samples, measures what has no result yet; hours of a CPU
    python -m experiments.growth --only depth-4    # one point
    python -m experiments.growth --draw            # tables and figure from the results that are kept

Part A of `plan.md`, scoring only: tiny models (`growth_models.py`) are sampled by the real vLLM on a CPU in bfloat16,
and scored by the trainer in float32, with the prompts, options and measures of the study of faults.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.drawing import COLOURS, LABELS
from experiments.fault_models import load
from experiments.faults import OPTIONS, measured_arm, prompts_of, sampled
from experiments.growth_models import Shape, facts_of, prepare
from experiments.results import FOLDER, spread, versions
from experiments.study import FIGURES, save_figure, table_text
from moe_replay.demo.files import default_cache
from moe_replay.demo.warm_start import one_thread
from moe_replay.records import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = FOLDER / "growth"
SEEDS = (0, 1, 2)
DEPTHS = (4, 8, 16, 32, 48)
EXPERTS = ((16, 2), (32, 4), (64, 4), (64, 8), (128, 8))
EDGES = (0, 128, 256, 512, 1024, 2048)
"""Of the bins of positions."""
SEQUENCES = 4
"""Of EDGES[-1] tokens, for each seed."""
LONG: dict[str, Any] = {"max_model_len": EDGES[-1], "max_num_seqs": SEQUENCES}
DRAWS = 10_000
"""Of the bootstrap."""
NUMBERS = {
    "k3_native": "k3, native",
    "k3": "k3, R3",
    "f2_native": "F(2), native",
    "f2": "F(2), R3",
    "agreement": "route agreement",
    "worst_layer": "worst layer",
}


BASE_SHAPE = Shape()


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the study: a shape of the model, the engine's precision, and what is sampled."""

    name: str
    shape: Shape = BASE_SHAPE
    dtype: str = "bfloat16"
    is_long: bool = False


DEPTH = tuple(Point(name=f"depth-{depth}", shape=Shape(depth)) for depth in DEPTHS)
WIDTH = tuple(Point(name=f"experts-{of}-top-{k}", shape=Shape(8, of, k)) for of, k in EXPERTS if (of, k) != (32, 4))
FLOAT32 = Point(name="float32", dtype="float32")
POSITION = Point(name="position", is_long=True)
POINTS = (*DEPTH, FLOAT32, *WIDTH, POSITION)
BASE = DEPTH[1]
"""8 MoE layers, 32 experts, top 4, bfloat16: a point of each table."""

Measured = dict[str, list[dict[str, Any]]]
"""Facts and numbers of each seed, by the name of the point."""


# ---- sampling and scoring --------------------------------------------------------------------------------------------


def run(point: Point, work: Path, seeds: Sequence[int]) -> None:
    """Train, sample and score the models of these seeds, and add them to the result of a point."""
    from moe_replay.engines.vllm.engine import VllmEngine

    folders = {seed: prepare(work, point.shape, seed) for seed in seeds}
    options = OPTIONS | LONG if point.is_long else OPTIONS
    drawn = {}
    with VllmEngine(folders[seeds[0]], dtype=point.dtype, **options) as engine:
        for seed, folder in folders.items():
            engine.update_weights(folder, 0)
            drawn[seed] = long_samples(engine, seed) if point.is_long else sampled(engine, prompts_of(seed), seed)
    found = _content(point).get("seeds", {})
    for seed, folder in folders.items():
        numbers = {"bins": by_position(folder, drawn[seed])} if point.is_long else scored(folder, drawn[seed])
        found[str(seed)] = facts_of(folder) | numbers
        print(point.name, seed, found[str(seed)], flush=True)
    settings = point.shape._asdict() | {"dtype": point.dtype, "sequences": len(drawn[seeds[0]])}
    in_order = {seed: found[seed] for seed in sorted(found, key=int)}
    content = {"settings": settings, "versions": versions(), "seeds": in_order}
    RESULTS.mkdir(parents=True, exist_ok=True)
    _path(point).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _path(point: Point) -> Path:
    return RESULTS / f"{point.name}.json"


def _content(point: Point) -> dict[str, Any]:
    """Return the result of a point; empty if there is none."""
    return json.loads(_path(point).read_text(encoding="utf-8")) if _path(point).exists() else {}


def long_samples(engine: Any, seed: int) -> list[Sample]:
    """Return sequences that fill all bins; after the answer the model keeps generating problems."""
    prompts = prompts_of(seed)[:SEQUENCES]
    room = EDGES[-1] - max(map(len, prompts))
    return sampled(engine, prompts, seed, max_tokens=room, stop_token_ids=(), ignore_eos=True)


def scored(folder: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the numbers of samples: those of NUMBERS, and the sampled tokens with their mean log-prob."""
    with one_thread():
        numbers = measured_arm(load(folder), samples)
    logprobs = np.concatenate([sample.logprobs for sample in samples])
    kept = {key: numbers[key] for key in NUMBERS}
    return kept | {"tokens": len(logprobs), "logprob": round(float(logprobs.mean()), 4)}


def by_position(folder: Path, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the numbers of each bin; agreement is that of all tokens up to the end of the bin."""
    return [scored(folder, [part_of(sample, *bin_) for sample in samples]) for bin_ in pairwise(EDGES)]


def part_of(sample: Sample, begin: int, end: int) -> Sample:
    """Return the sample whose completion are its sampled tokens at these positions."""
    trace, prompt = sample.trace[:end], max(begin, len(sample.prompt_ids))
    first = prompt - len(sample.prompt_ids)
    return replace(
        sample,
        prompt_ids=trace.token_ids[:prompt],
        completion_ids=trace.token_ids[prompt:],
        logprobs=sample.logprobs[first : first + len(trace) - prompt],
        trace=trace,
    )


# ---- fits ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fit:
    """k3 = scale * x ** exponent, by least squares of logarithms; `draws` (N, 2) of log scale and exponent."""

    scale: float
    exponent: float
    draws: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """Of the exponent, 95 %."""
        low, high = np.quantile(self.draws[:, 1], (0.025, 0.975))
        return float(low), float(high)

    @property
    def grows(self) -> bool:
        """Whether the interval lies above 0, the criterion of `plan.md`."""
        return self.interval[0] > 0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.exponent:.2f} ({low:.2f} to {high:.2f})"


def fitted(places: Sequence[float], values: Sequence[Sequence[float]], *, whole_seeds: bool) -> Fit:
    """Fit values (by place, then by seed); the bootstrap draws whole seeds, or seeds within each place."""
    chance = np.random.default_rng(0)
    logs = [np.log(of_place) for of_place in values]
    drawn = np.empty((DRAWS, len(logs)))
    same = chance.integers(len(logs[0]), size=(DRAWS, len(logs[0])))
    for place, of_place in enumerate(logs):
        chosen = same if whole_seeds else chance.integers(len(of_place), size=(DRAWS, len(of_place)))
        drawn[:, place] = of_place[chosen].mean(1)
    means = np.vstack([[of_place.mean() for of_place in logs], drawn])
    exponents, intercepts = np.polyfit(np.log(places), means.T, 1)
    draws = np.stack([intercepts, exponents], 1)
    return Fit(scale=float(np.exp(draws[0, 0])), exponent=float(draws[0, 1]), draws=draws[1:])


def fit_of_depth(measured: Measured, key: str) -> Fit:
    """Return the fit of a number against depth."""
    points = [point for point in DEPTH if point.name in measured]
    values = [[one[key] for one in measured[point.name]] for point in points]
    return fitted([point.shape.depth for point in points], values, whole_seeds=False)


def fit_of_position(measured: Measured, key: str) -> Fit:
    """Return the fit of a number against the middle of the bins of positions."""
    values = [[one["bins"][number][key] for one in measured[POSITION.name]] for number in range(len(EDGES) - 1)]
    return fitted(middles(), values, whole_seeds=True)


def middles() -> list[float]:
    """Return the middle of each bin of positions."""
    return [(begin + end) / 2 for begin, end in pairwise(EDGES)]


FITS: dict[str, Callable[[Measured, str], Fit]] = {"MoE layers": fit_of_depth, "position": fit_of_position}


# ---- tables and figure -----------------------------------------------------------------------------------------------


def read_results() -> Measured:
    """Return the seeds of each point that has a result, in the order of POINTS."""
    contents = {point.name: _content(point) for point in POINTS}
    return {name: list(content["seeds"].values()) for name, content in contents.items() if content}


def rows_of_points(measured: Measured, points: Sequence[Point]) -> list[list[str]]:
    """Return the table of some points: median over seeds and range."""
    rows = [["MoE layers", "experts, top-k", "engine", "seeds", "held-out loss", *NUMBERS.values()]]
    for point in points:
        if point.name in measured:
            seeds, shape = measured[point.name], point.shape
            values = [spread([one[key] for one in seeds]) for key in ("loss", *NUMBERS)]
            rows.append([str(shape.depth), f"{shape.experts}, {shape.top_k}", point.dtype, str(len(seeds)), *values])
    return rows


def rows_of_position(measured: Measured) -> list[list[str]]:
    """Return the table of bins of positions."""
    rows = [["positions", "seeds", "mean log-prob", *NUMBERS.values()]]
    seeds = measured[POSITION.name]
    for number, (begin, end) in enumerate(pairwise(EDGES)):
        bins = [one["bins"][number] for one in seeds]
        values = [spread([one[key] for one in bins]) for key in ("logprob", *NUMBERS)]
        rows.append([f"{begin} to {end - 1}", str(len(seeds)), *values])
    return rows


def rows_of_fits(measured: Measured) -> list[list[str]]:
    """Return the table of exponents, with the verdicts by the criteria of `plan.md`."""
    rows = [["k3 against", "exponent, native", "exponent, R3", "native grows", "replay removes the growth"]]
    for name, fit in FITS.items():
        native, replayed = fit(measured, "k3_native"), fit(measured, "k3")
        low, high = replayed.interval
        removed = native.grows and low <= 0 <= high
        rows.append([name, str(native), str(replayed), *("yes" if one else "no" for one in (native.grows, removed))])
    return rows


def tables(measured: Measured) -> Iterator[str]:
    """Yield every table, of what has a result."""
    for points in (DEPTH, (BASE, FLOAT32), (WIDTH[0], BASE, *WIDTH[1:])):
        yield table_text(rows_of_points(measured, points))
    if POSITION.name in measured:
        yield table_text(rows_of_position(measured))
        yield table_text(rows_of_fits(measured))


def draw(measured: Measured, folder: Path = FIGURES) -> Path:
    """Draw k3 by depth and by position, each seed and the fit, and return the file."""
    return save_figure("growth", (9.0, 3.4), lambda figure: _draw(figure, measured), folder)


def _draw(figure: Figure, measured: Measured) -> None:
    row = figure.subplots(1, 2)
    by_depth = [(point.shape.depth, one) for point in DEPTH for one in measured.get(point.name, [])]
    by_place = [item for one in measured[POSITION.name] for item in zip(middles(), one["bins"], strict=True)]
    for axes, values, (name, fit) in zip(row, (by_depth, by_place), FITS.items(), strict=True):
        places = np.unique([place for place, _ in values])
        for key, mode in (("k3_native", "off"), ("k3", "r3")):
            curve = fit(measured, key)
            axes.plot([place for place, _ in values], [one[key] for _, one in values], "o", color=COLOURS[mode])
            line = curve.scale * places**curve.exponent
            axes.plot(places, line, color=COLOURS[mode], label=f"{LABELS[mode]}: exponent {curve}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.set_xlabel(name)
        axes.set_ylabel("k3 of rollout and trainer")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="from the results that are kept")
    parser.add_argument("--only", nargs="+", choices=[point.name for point in POINTS], help="these points")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="these; others keep their result")
    parser.add_argument("--work", type=Path, default=default_cache() / "experiments" / "growth")
    options = parser.parse_args()
    if not options.draw:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less
        for point in POINTS:
            missing = [seed for seed in options.seeds if str(seed) not in _content(point).get("seeds", {})]
            if missing and (not options.only or point.name in options.only):
                run(point, options.work, missing)
    measured = read_results()
    print(*tables(measured), sep="\n\n")
    print(draw(measured))


if __name__ == "__main__":
    main()
