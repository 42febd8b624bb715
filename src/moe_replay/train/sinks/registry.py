"""Metric sinks by name. A new sink is one file with a class, and one line in `SINKS`.

class MySink:                                        # log.sinks = ["my_module:MySink"]
    def __init__(self, context: SinkContext): ...
    def log(self, step, metrics): ...
    def close(self): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from moe_replay.errors import MoeReplayError
from moe_replay.train.sinks.types import Metrics, OpenSink, Sink, SinkContext
from moe_replay.utils.plugins import check_required, resolve, user_code

SINKS: Mapping[str, OpenSink | str] = {
    "jsonl": "moe_replay.train.sinks.jsonl:JsonLines",
    "mlflow": "moe_replay.train.sinks.mlflow:Mlflow",
    "tensorboard": "moe_replay.train.sinks.tensorboard:TensorBoard",
    "wandb": "moe_replay.train.sinks.wandb:WeightsAndBiases",
}
"""Sinks by name; `log.sinks` takes these and `module:name`."""


class SinkError(MoeReplayError):
    """A metric sink that raised."""


def load_sink(name: str) -> OpenSink:
    """Return what opens the sink called `name`; raise if a package that it requires is not installed."""
    found: OpenSink = resolve(name, SINKS, kind="metric sink", key="log.sinks")
    is_built_in = name in SINKS
    check_required(found, f"log.{name}" if is_built_in else f"log.sinks: {name}", name if is_built_in else "")
    return found


class Sinks:
    """All sinks of a run, opened in order; an error that one of them raises names it."""

    def __init__(self, names: Iterable[str], context: SinkContext) -> None:
        openers = {name: load_sink(name) for name in names}
        self._sinks: dict[str, Sink] = {}
        with ExitStack() as opened:
            for name, opener in openers.items():
                with user_code(f"metric sink {name!r}", SinkError):
                    sink = self._sinks[name] = opener(context)
                    opened.callback(sink.close)
            self._opened = opened.pop_all()

    def log(self, step: int, metrics: Metrics) -> None:
        """Pass the metrics of one step to every sink."""
        for name, sink in self._sinks.items():
            with user_code(f"metric sink {name!r}", SinkError, found=f"metrics of step {step}"):
                sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink, the last opened first."""
        self._opened.close()
