"""Identity of weights: which update an engine's weights come from, so that samples of any others are refused.

A version is a number that a restarted server, or one that another run has updated, can have by chance. With each update
the sender gives an id that no other update has; the engine stamps its samples with it. Until an engine has been updated
its id is empty.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.records import Sample

REMEMBERED = 1024
INCOMPLETE = "incomplete"
"""In place of the id, while weights are being replaced on a server that would keep the version of the old ones."""


class CurrentWeights(NamedTuple):
    """Version and id of an engine's weights, as it reports them.

    weights_id   of the update that they come from; empty: of none
    """

    version: int
    weights_id: str


class ForeignWeightsError(EngineUnavailableError):
    """Samples of weights that were never sent: of a server that restarted, or that someone else has updated."""


def version_text(version: int, weights_id: str) -> str:
    """Return version and id as one text, for servers that keep a text as the version of their weights."""
    return f"{version}@{weights_id}" if weights_id else str(version)


def parse_version_text(text: str, initial: int, engine: str) -> CurrentWeights:
    """Read the version of a server: `default` until the first update, then a `version_text`.

    initial   version of the weights that the server was started with
    """
    if text == "default":
        return CurrentWeights(initial, "")
    version, _, weights_id = text.partition("@")
    if not version.isdecimal():
        raise EngineError(
            f"{engine} has a weight version that is not a number",
            found=version,
            remedy="Update its weights through this engine, or with a number as weight_version",
        )
    return CurrentWeights(int(version), weights_id)


def new_weights_id(run_id: str, version: int, probe: Probe | None = None) -> str:
    """Return an id for an update: run, version, and a digest of the probe's log-probs under these weights."""
    content = secrets.token_bytes(16) if probe is None else np.asarray(probe.logprobs, "<f4").tobytes()
    return f"{run_id}-{version}-{hashlib.sha256(content).hexdigest()[:16]}"


class WeightsLedger:
    """The updates that were sent to an engine. Nothing is checked before the first one.

    owner   the engine, for errors
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._versions: dict[str, int] = {}  # by weights id, oldest first

    def record(self, version: int, weights_id: str) -> None:
        """Note an update before it is sent: its samples may arrive before it returns.

        Updates without an id count only where there have been some with one.
        """
        if not weights_id and not self._versions:
            return
        self._versions.pop(weights_id, None)
        self._versions[weights_id] = version
        if len(self._versions) > REMEMBERED:
            del self._versions[next(iter(self._versions))]

    def id_of(self, version: int) -> str | None:
        """Return the id under which the latest weights were sent, if they are of this version."""
        latest = next(reversed(self._versions), None)
        return latest if latest is not None and self._versions[latest] == version else None

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise unless every sample comes from weights that were sent."""
        for index, sample in enumerate(samples):
            version, weights_id = sample.weight_version, sample.weights_id
            if self._versions and self._versions.get(weights_id) != version:
                latest_id, latest_version = next(reversed(self._versions.items()))
                raise ForeignWeightsError(
                    f"{self._owner} sampled with weights that it was not sent",
                    sample=index,
                    expected=f"version {latest_version} of update {latest_id}",
                    found=f"version {version} of {f'update {weights_id}' if weights_id else 'no update'}",
                    remedy="It restarted, or someone else updates it; it is not used until it has the weights again. "
                    "An engine must stamp its samples with the weights_id of update_weights",
                )


# ---- proof -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Log-probs of one sequence under the trainer's weights.

    token_ids    (T,)
    logprobs     (T - 1,) of every token but the first, at temperature 1
    tolerance    on the median difference: 1e-3 is generous for float32, 0.05 for bfloat16
    """

    token_ids: Sequence[int]
    logprobs: np.ndarray
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or np.shape(self.logprobs) != (len(self.token_ids) - 1,):
            raise EngineError(
                "a probe needs one log-prob for every token but the first",
                expected=f"at least 2 tokens; {max(len(self.token_ids), 2) - 1} log-probs",
                found=f"{len(self.token_ids)} tokens, log-probs of shape {np.shape(self.logprobs)}",
            )
        if not 0 < self.tolerance < math.inf:
            raise EngineError(
                "the tolerance of a probe is out of range", expected="positive and finite", found=self.tolerance
            )

    def check(self, logprobs: np.ndarray, engine: str) -> None:
        """Raise unless the engine's log-probs (T - 1,) are the trainer's.

        The median, because a few tokens go to other experts and differ by much; with wrong weights most tokens do.
        """
        difference = np.abs(np.asarray(logprobs, np.float64) - self.logprobs)
        typical = float(np.median(difference))
        if not typical <= self.tolerance:  # also if it is NaN
            worst = int(difference.argmax())
            raise EngineError(
                f"{engine} does not compute with the weights that it was given",
                token=worst + 1,
                expected=f"log-probs within {self.tolerance} of the trainer's in the median",
                found=f"{typical:.4g} off in the median, {difference[worst]:.4g} at most",
                remedy="The update may have skipped the re-packing of expert weights that the engine does at load; "
                "sampling is refused until an update succeeds",
            )
