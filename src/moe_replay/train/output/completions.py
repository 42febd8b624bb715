"""Completions of a run as text, with rewards and advantages: one parquet file for each step in the folder of a run.

    completions/step-00000012.parquet

One row per sample: `step`, `row` of the data set, `group`, `sample` within it, `prompt`, `completion`, `reward`,
`reward/<function>`, `advantage`, `tokens`, `finish_reason`, `weight_version`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_replay.errors import MissingExtraError, MoeReplayError, needs_extra
from moe_replay.records import Completion
from moe_replay.utils.files import flush
from moe_replay.utils.misc import one_line

FOLDER = "completions"
REWARD = "reward/"
_NAME = re.compile(r"step-(\d{8,})\.parquet")


class CompletionsError(MoeReplayError):
    """A file of completions that cannot be read."""


def require_pyarrow() -> None:
    """Raise if parquet files cannot be written here."""
    if find_spec("pyarrow") is None:
        raise MissingExtraError("log.completions needs pyarrow", remedy="pip install 'moe-replay[train]'")


def write_completions(folder: Path, step: int, completions: Sequence[Completion]) -> Path:
    """Write the completions of one step into the folder of a run; an existing file is replaced whole."""
    from pyarrow import Table, parquet

    path = folder / FOLDER / f"step-{step:08d}.parquet"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    parquet.write_table(Table.from_pydict(_columns(step, completions)), partial, compression="zstd")
    flush(partial)
    partial.replace(path)
    return path


def _columns(step: int, completions: Sequence[Completion]) -> dict[str, list[Any]]:
    def fields(*names: str) -> dict[str, list[Any]]:
        return {name: [getattr(completion, name) for completion in completions] for name in names}

    scores = dict.fromkeys(name for completion in completions for name in completion.scores)
    return {
        "step": [step] * len(completions),
        **fields("row", "group", "sample", "prompt", "completion"),
        "reward": [_or_none(completion.reward) for completion in completions],
        **{
            f"{REWARD}{name}": [_or_none(completion.scores.get(name, math.nan)) for completion in completions]
            for name in scores
        },
        **fields("advantage", "tokens", "finish_reason", "weight_version"),
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def completion_steps(folder: Path) -> dict[int, Path]:
    """Return step -> file of the completions in the folder of a run, in the order of steps."""
    matches = ((_NAME.fullmatch(path.name), path) for path in (folder / FOLDER).glob("step-*.parquet"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_completions(path: Path) -> list[Completion]:
    with needs_extra("reading completions needs pyarrow", "train"):
        from pyarrow import ArrowException, parquet
    try:
        rows = parquet.read_table(path).to_pylist()
        return [_completion(row) for row in rows]
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise CompletionsError(f"{path} is not a file of completions, or damaged: {one_line(error)}") from error


def _completion(row: dict[str, Any]) -> Completion:
    scores = {name.removeprefix(REWARD): value for name, value in row.items() if name.startswith(REWARD)}
    return Completion(
        **{name: row[name] for name in Completion.__dataclass_fields__ if name not in ("reward", "scores")},
        reward=_or_nan(row["reward"]),
        scores={name: _or_nan(value) for name, value in scores.items()},
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def remove_completions(folder: Path, after: int) -> None:
    """Delete the completions of steps after `after`, which a resumed run samples again."""
    for step, path in completion_steps(folder).items():
        if step > after:
            path.unlink()


def best_and_worst(completions: Sequence[Completion], count: int) -> list[Completion]:
    """Return `count` completions: half with the highest rewards, half with the lowest, unscored ones last."""
    ranked = sorted(
        completions,
        key=lambda completion: (math.isnan(completion.reward), -completion.reward, completion.group, completion.sample),
    )
    if len(ranked) <= count:
        return ranked
    best = (count + 1) // 2
    scored = sum(not math.isnan(completion.reward) for completion in ranked)
    last = max(scored, count)
    return ranked[:best] + ranked[last - (count - best) : last]


def printable(text: str) -> str:
    """Return text without control characters, which a terminal would interpret: they are shown as escapes."""
    shown = (char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text)
    return "".join(shown)
