"""Folders of runs and attributions that never happened, with everything a report can show."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from moe_replay.verification.attribution import (
    AGAIN,
    HISTOGRAM_EDGES,
    NATIVE,
    R2,
    R3,
    AlignmentSummary,
    Attribution,
    PassScores,
    RoutingScores,
)

MISMATCH = (
    "k1_kl",
    "k3_kl",
    "logprob_abs_diff/mean",
    "logprob_abs_diff/max",
    "ratio/mean",
    "ratio/max",
    "ess",
    "frac_ratio_gt2",
)
CONFIG = """
name = "tiny"
steps = {steps}
[model]
path = "{model}"
dtype = "float32"
[backend]
kind = "fsdp"
[data]
path = "sums.jsonl"
[rollout]
engine = "transformers"
dtype = "bfloat16"
[replay]
mode = "{mode}"
[algorithm]
updates_per_rollout = 4
"""
FIGURES = {
    *("reward", "rewards", "length", "signal", "staleness"),
    *("mismatch-k3-kl", "mismatch-logprob-abs-diff-mean", "mismatch-ratio-max", "mismatch-frac-ratio-gt2"),
    *("ratio-mean", "policy-change", "agreement", "agreement-layers", "replayed", "load"),
    *("loss", "grad-norm", "entropy", "clipped", "time", "speed"),
}
ATTRIBUTION_FIGURES = {"scatter", "ratios", "agreement-positions", "shifts", "agreement-bars", "differing"}


def full_line(step: int, chance: random.Random) -> dict[str, Any]:
    """All that a step of training logs."""
    line: dict[str, Any] = {"step": step, "time": 1e9 + step, "version": step}
    parts = {
        "reward": ("mean", "std", "unscored", "frac_groups_zero_std", "accuracy", "format"),
        "loss": ("total", "policy", "entropy", "grad_norm", "clip_low", "clip_high", "lr"),
        "completion": ("length_mean", "truncated", "staleness_mean", "staleness_max"),
        "routing": ("agreement", "replayed_fraction", "unrouted_fraction", "load_violation"),
        "routing/agreement": ("layer_001", "layer_002", "layer_005"),
        "time": ("rollout", "score", "train", "sync", "step", "tokens_per_second"),
        "mismatch/rollout_vs_old": MISMATCH,
        "mismatch/old_vs_train": MISMATCH,
        "mismatch/rollout_vs_train": MISMATCH,
    }
    for section, names in parts.items():
        line |= {f"{section}/{name}": 0.2 + 0.2 * chance.random() for name in names}
    line |= {"completion/length_min": 0.0, "completion/length_max": 9.0, "loss/skipped": 0, "routing/aligned": 1}
    if step % 2 == 0:
        line |= {f"mismatch/rollout_vs_native/{name}": 0.5 + chance.random() for name in MISMATCH}
        line["eval/reward"] = chance.random()
    return line


def write_run(folder: Path, lines: list[dict[str, Any]], mode: str = "r3", model: str = "tiny/model") -> Path:
    """A folder of a run with these lines; returns it."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(mode=mode, model=model, steps=len(lines)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_full_run(folder: Path, steps: int = 30, mode: str = "r3", seed: int = 0) -> Path:
    """A folder of a run with everything in it."""
    chance = random.Random(seed)
    return write_run(folder, [full_line(step, chance) for step in range(1, steps + 1)], mode)


def attribution(*, routes_only: bool = False) -> Attribution:
    """An attribution in which native passes are far and R3 is near."""
    chance = random.Random(0)

    def scores(size: float, own: bool) -> PassScores:
        numbers = dict.fromkeys(MISMATCH, size)
        return PassScores(
            mismatch=numbers,
            extreme={2: 3, 5: 1, 10: 0},
            histogram=tuple(chance.randrange(9) for _ in range(len(HISTOGRAM_EDGES) + 1)),
            own=numbers if own else {},
        )

    passes = {NATIVE: scores(0.009, False), AGAIN: scores(0.008, True), R2: scores(0.008, True), R3: scores(1e-3, True)}
    points = [(-5 * chance.random(), chance.gauss(0, 0.3)) for _ in range(300)]
    layers = (1, 2, 5)
    return Attribution(
        samples=4,
        tokens=400,
        scored=0 if routes_only else 300,
        passes={} if routes_only else passes,
        scatter={}
        if routes_only
        else {NATIVE: tuple((x, x + d) for x, d in points), R3: tuple((x, x + d / 9) for x, d in points)},
        routing=RoutingScores(
            layers=layers,
            compared=(400,) * 3,
            agreement=(0.99, 0.95, 0.9),
            noise=(1.0, 1.0, math.nan) if not routes_only else (math.nan,) * 3,
            router_alone=(0.99, 0.98, 0.98) if not routes_only else (math.nan,) * 3,
            position_edges=(0, 8, 16, 24, 32),
            by_position=((0.9, 0.9, 1.0, math.nan),) * 3,
            differing=(350, 40, 10, 0),
        ),
        alignment=AlignmentSummary(
            status="aligned",
            cause="none",
            detail="",
            layers=(),
            samples=(),
            layer_shift=None,
            token_shift=None,
            covered=0.98,
            notes=(),
            shifts=(-2, -1, 0, 1, 2),
            above_chance=tuple(
                tuple(0.97 if row == column == 2 else math.nan if row == 0 else -0.001 for column in range(5))
                for row in range(5)
            ),
        ),
        labels={"model": "a <b>tiny</b> one"},
    )


class Tags(HTMLParser):
    """What a page is made of: tags with their attributes, ids, and its text outside of style sheets."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[str] = []
        self._in_style = False
        self.feed(page)
        self.close()

    @property
    def ids(self) -> list[str]:
        return [str(given["id"]) for _, given in self.tags if "id" in given]

    @property
    def titles(self) -> set[str]:
        """Names of the figures."""
        return {name.removeprefix("title-") for name in self.ids if name.startswith("title-")}

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if not self._in_style:
            self._texts.append(data)
