"""How do routes agree, layer by layer? From the runs of `collapse`: the rollout's routes and the trainer's own choice.

python -m experiments.layers --draw
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.collapse import STUDY as COLLAPSE
from experiments.drawing import COLOURS, LABELS, described, legend_of_modes
from experiments.results import Result, spread
from experiments.study import Study, main, same_but_seed

KEY = re.compile(r"routing/agreement/layer_(\d+)")


def by_layer(result: Result) -> dict[int, float]:
    """Return the fraction of routes that agree at the end of a run, by decoder layer."""
    layers = {int(match[1]): key for key in result.metrics if (match := KEY.fullmatch(key))}
    return {layer: result.at_end(layers[layer]) for layer in sorted(layers)}


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    axes = figure.subplots()
    for arm, group in same_but_seed(runs).items():
        by_run = [by_layer(result) for result in group]
        depth = sorted(set.intersection(*(set(fractions) for fractions in by_run)))
        style = {1: ":", 4: "--"}.get(arm.updates, "-")
        middle = [float(np.median([fractions[layer] for fractions in by_run])) for layer in depth]
        axes.plot(depth, middle, style, color=COLOURS[arm.mode], label=LABELS[arm.mode])
    axes.set_xlabel("decoder layer; dotted, dashed, solid: 1, 4, 16 updates a rollout")
    axes.set_ylabel("route agreement at the end")
    legend_of_modes(figure)


def _table(runs: Sequence[Result]) -> list[list[str]]:
    rows = [["arm", "first layer that routes", "last layer", "worst layer"]]
    for arm, group in same_but_seed(runs).items():
        by_run = [list(by_layer(result).values()) or [float("nan")] for result in group]
        ends = [[values[0] for values in by_run], [values[-1] for values in by_run], [min(values) for values in by_run]]
        rows.append([described(arm), *map(spread, ends)])
    return rows


STUDY = Study(
    name="layers",
    question="Agreement of routes by decoder layer.",
    arms=COLLAPSE.arms,
    draw=_draw,
    table=_table,
    size=(6.5, 3.6),
)

if __name__ == "__main__":
    main(STUDY)
