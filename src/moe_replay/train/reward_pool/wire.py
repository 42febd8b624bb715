"""Messages between the trainer and the processes of rewards: JSON, with a tag for values that JSON does not have.

Nothing is pickled. A message is its length in 8 bytes and then the text; values that have no form here are refused.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from moe_replay.errors import MoeReplayError
from moe_replay.utils.messages import one_line

LENGTH = struct.Struct("<Q")
_TAG = "\0moe-replay"


class RewardWireError(MoeReplayError):
    """A value that cannot be sent to a process of a reward."""


class TokenIds:
    """Token ids of a sample on their way: sent as an array, received as a list of int."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def tolist(self) -> list[int]:
        """Return them as a reward function gets them."""
        return self.ids.tolist()


def to_frame(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes, its length first."""
    try:
        content = json.dumps(message, default=_tagged, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise _refused(one_line(error)) from error
    return LENGTH.pack(len(content)) + content


def from_content(content: bytes) -> dict[str, Any]:
    """Return the message of a frame, without its length."""
    return json.loads(content, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, TokenIds):
        return {_TAG: "tokens", "value": _text(np.asarray(value.ids, "<i8").tobytes())}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "value": _text(bytes(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        array = {"dtype": value.dtype.str, "shape": value.shape}
        return {_TAG: "array", "value": _text(np.ascontiguousarray(value).tobytes()), **array}
    if isinstance(value, np.ndarray):
        return {_TAG: "objects", "value": value.tolist()}
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    for kind, name in ((datetime, "datetime"), (date, "date"), (time, "time")):  # a datetime is a date
        if isinstance(value, kind):
            return {_TAG: name, "value": value.isoformat()}
    if isinstance(value, Decimal):
        return {_TAG: "decimal", "value": str(value)}
    if isinstance(value, (set, frozenset)):
        return {_TAG: "set", "value": list(value)}
    raise _refused(type(value).__qualname__)


def _refused(found: str) -> RewardWireError:
    return RewardWireError(
        "a value cannot be sent to a process of a reward",
        expected="what JSON has, bytes, dates, decimals, sets or numpy arrays",
        found=found,
        remedy="Store the column in another form, or set reward.workers = 0",
    )


def _untagged(found: dict[str, Any]) -> Any:
    kind, value = found.get(_TAG), found.get("value", "")
    match kind:
        case None:
            return found
        case "tokens":
            return np.frombuffer(base64.b64decode(str(value)), "<i8").tolist()
        case "bytes":
            return base64.b64decode(str(value))
        case "array":
            return np.frombuffer(base64.b64decode(str(value)), found["dtype"]).reshape(found["shape"]).copy()
        case "objects":
            return np.array(value, object)
        case "timedelta":
            return timedelta(*value)
        case "datetime":
            return datetime.fromisoformat(str(value))
        case "date":
            return date.fromisoformat(str(value))
        case "time":
            return time.fromisoformat(str(value))
        case "decimal":
            return Decimal(str(value))
        case "set":
            return set(value)
    raise RewardWireError("a message of a reward has an unknown tag", found=kind)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
