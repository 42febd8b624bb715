"""Kinds of weight updates by name: how the policy's weights reach the engine. A new one is a class, and one line here.

class MySync:                                        # weights.kind = "my_module:MySync"
    def __init__(self, config: WeightsConfig): ...
    def send(self, source, engine, version, probe): ...    # returns the bytes that were sent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moe_replay.utils.plugins import import_path, resolve

if TYPE_CHECKING:
    from moe_replay.rollout.types import Probe
    from moe_replay.rollout.weights.source import WeightSource
    from moe_replay.train.synced_engine import SyncedEngine


class WeightSync(Protocol):
    """Sends the policy's weights to the engine. All ranks make it and call `send`; rank 0 alone has the engine."""

    def send(self, source: WeightSource, engine: SyncedEngine | None, version: int, probe: Probe | None) -> int:
        """Send all weights and return their bytes; reading the groups of the source is collective."""
        ...


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A built-in kind.

    sync     its `WeightSync` as "module:name"; None: part of `EngineSync`, which chooses among those for `auto`
    engine   the rollout engine that it is for; None: any
    """

    description: str
    sync: str | None = None
    engine: str | None = None


WEIGHT_KINDS: Mapping[str, WeightKind] = {
    "auto": WeightKind("ipc if trainer and engine share their GPUs, nccl between other GPUs, else http."),
    "http": WeightKind("Tensors in the requests to the engine, by way of rank 0's host memory."),
    "ipc": WeightKind("Memory of the trainer's ranks that the engine's workers open, on the same devices."),
    "nccl": WeightKind("One broadcast from rank 0 to all workers of all engines; over gloo on CPUs."),
    "sharded_rdt": WeightKind(
        "vLLM's transfer engine of this name, on Ray, for servers of `vllm serve` that were started with it.",
        "moe_replay.train.vllm_sync:VllmSync",
        "plain_vllm_server",
    ),
    "nccl_m2n": WeightKind(
        "vLLM's transfer engine of this name, for one server of `vllm serve` that was started with it.",
        "moe_replay.train.vllm_sync:VllmSync",
        "plain_vllm_server",
    ),
}
"""Kinds by name; `weights.kind` takes these and `module:name`."""


def load_sync(kind: str, config: Any) -> WeightSync | None:
    """Return what sends weights by this kind, made with the `WeightsConfig`; None: `EngineSync` itself."""
    found = resolve(kind, WEIGHT_KINDS, kind="kind of weight updates", key="weights.kind")
    if isinstance(found, WeightKind):
        if found.sync is None:
            return None
        found = import_path(found.sync, kind="kind of weight updates", key="weights.kind")
    return found(config)
