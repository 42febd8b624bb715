"""Data sets by their name on the hub, e.g. "trl-lib/DeepMath-103K": cached, or downloaded where the network allows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.utils.messages import one_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".jsonl", ".json", ".parquet")


class HubDataError(MoeReplayError):
    """A data set of the hub that is neither cached nor downloadable, or lacks what was asked for."""


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path that does not exist here may be the name of a data set on the hub."""
    text = str(path)
    return bool(_NAME.fullmatch(text)) and not text.endswith(_FILES) and not Path(path).exists()


def hub_rows(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
    """Return the rows of one split. Files of the data set are read; code that comes with it never runs."""
    try:
        import datasets
        from pyarrow import ArrowException
    except ImportError as error:
        raise MissingExtraError(
            "data sets of the hub need datasets", remedy="pip install 'moe-replay[train]'"
        ) from error
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
        return [dict(row) for row in loaded]  # type: ignore[arg-type]  a split is a Dataset
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ArrowException) as error:
        chosen = f"{name!r}{f', subset {subset!r}' if subset else ''}, split {split!r}"
        raise HubDataError(
            f"the data set {chosen} cannot be read: {type(error).__name__}: {one_line(error)}",
            expected="a file or folder here, or a data set of the hub that is cached or can be downloaded",
            remedy="Without a network, write it to a folder elsewhere (datasets.load_dataset(...).save_to_disk) and "
            "set data.path to that; data.subset and data.split choose what is read",
        ) from error
