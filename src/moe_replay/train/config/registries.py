"""Built-in implementations by the name in a setting, as `module:name`; none is imported here.

A new implementation is a function or class, and one line in its table. The tables are the only lists of built-in names:
checks, help texts and docs/config.md read them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from moe_replay.utils.plugins import is_path, resolve

if TYPE_CHECKING:  # the tables are read where pydantic is not installed
    from pydantic.fields import FieldInfo

ImportanceLevel = Literal["token", "sequence"]
Correction = Literal["off", "token_truncate", "token_mask", "sequence_mask"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
TurnAdvantages = Literal["episode", "discounted", "last"]

ADVANTAGES: Mapping[str, Any] = {
    "grpo": "moe_replay.train.rollout.advantages:std_normalized",
    "dr_grpo": "moe_replay.train.rollout.advantages:mean_centered",
    "rloo": "moe_replay.train.rollout.advantages:leave_one_out",
}

LOSSES: Mapping[str, Any] = {
    "ppo_clip": "moe_replay.train.learn.losses:clipped_surrogate",
    "sapo": "moe_replay.train.learn.losses:soft_gated_surrogate",
    "cispo": "moe_replay.train.learn.losses:clipped_weights",
}

REWARDS: Mapping[str, Any] = {
    "math_verify": "moe_replay.train.rollout.rewards:math_equality",
    "think_format": "moe_replay.train.rollout.rewards:think_format",
    "accuracy": "moe_replay.train.rollout.rewards:accuracy",
    "format": "moe_replay.train.rollout.rewards:think_answer_format",
}

ENVIRONMENTS: Mapping[str, Any] = {"tools": "moe_replay.train.rollout.environments:answer_tool_calls"}

TOOL_FORMATS: Mapping[str, Any] = {
    "hermes": "moe_replay.train.rollout.tools:parse_tagged",
    "json": "moe_replay.train.rollout.tools:parse_json",
}

SINKS: Mapping[str, Any] = {
    "jsonl": "moe_replay.train.output.sinks:JsonLines",
    "mlflow": "moe_replay.train.output.trackers:Mlflow",
    "tensorboard": "moe_replay.train.output.trackers:TensorBoard",
    "trackio": "moe_replay.train.output.trackers:Trackio",
    "wandb": "moe_replay.train.output.trackers:WeightsAndBiases",
}


@dataclass(frozen=True, slots=True)
class WeightTransport:
    """A built-in transport (`weights/transports.py`).

    is_transfer   tensors do not travel in requests, and the engine must take part
    """

    description: str
    is_transfer: bool = False


WEIGHT_TRANSPORTS: Mapping[str, WeightTransport] = {
    "auto": WeightTransport("ipc if trainer and engine share GPUs, nccl between different GPUs, else http."),
    "http": WeightTransport("Tensors in requests to the engine, through the host memory of rank 0."),
    "ipc": WeightTransport("CUDA IPC: engine workers map the trainer's memory on the same devices.", True),
    "nccl": WeightTransport(
        "Broadcasts from rank 0 to all engine workers, of divided experts from their ranks; gloo on CPUs.", True
    ),
}


@dataclass(frozen=True)
class PluginName:
    """Annotation of a key whose value names an implementation: a name in a registry, or the user's `module:name`.

    registry   returns the registry: name -> implementation
    kind       the noun in error messages: "reward"
    forms      accepted forms besides the names in the registry
    offered    returns the names to list, if not all in the registry make sense for this key
    renamed    former names: not accepted, but an error names the new one
    """

    registry: Callable[[], Mapping[str, Any]]
    kind: str
    forms: tuple[str, ...] = ("module:name",)
    offered: Callable[[], Iterable[str]] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, field: FieldInfo) -> PluginName | None:
        """Return the annotation of a field, or None."""
        return next((annotation for annotation in field.metadata if isinstance(annotation, cls)), None)

    def names(self) -> list[str]:
        """Return the built-in names, in the order of the registry."""
        return list(self.registry() if self.offered is None else self.offered())

    def problem(self, name: str) -> str | None:
        """Return the problem with a name and the remedy, or None. Imports nothing."""
        if name in self.registry() or is_path(name):
            return None
        if name in self.renamed:
            return f"{self.kind} {name!r} is now {self.renamed[name]}"
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown {self.kind} {name!r}; write {', '.join([*self.names(), *self.forms])}{hint}"

    def summaries(self) -> Iterator[tuple[str, str]]:
        """Yield built-in names with their description, or the first line of their docstring."""
        for name in self.names():
            entry = resolve(name, self.registry(), kind=self.kind, key=self.kind)
            is_code = isinstance(entry, (type, FunctionType))  # other objects have the docstring of their class
            text = getattr(entry, "description", None) or (is_code and inspect.getdoc(entry)) or ""
            if text:
                yield name, text.partition("\n")[0].removeprefix("Return ")


# ---- types of the settings that select an implementation -----------------------------------------------------------

_ADVANTAGE_NAMES = {"std": "'grpo'", "none": "'dr_grpo'", "leave_one_out": "'rloo'"}
_LOSS_NAMES = {
    "clipped": "'ppo_clip'",
    "dapo": "algorithm.loss_aggregation = 'token_mean'",
    "grpo": "algorithm.loss_aggregation = 'seq_mean_token_mean'",
    "dr_grpo": "algorithm.loss_aggregation = 'seq_mean_token_sum_norm'",
}


def _weight_families() -> Mapping[str, Any]:
    from moe_replay.megatron.weights import WEIGHT_MAPS  # imports torch, which settings do without

    return WEIGHT_MAPS


WeightFamilyChoice = Annotated[str | None, PluginName(_weight_families, "weight family")]
EnvironmentChoice = Annotated[str | None, PluginName(lambda: ENVIRONMENTS, "environment")]
ToolFormatChoice = Annotated[str, PluginName(lambda: TOOL_FORMATS, "tool call format")]
TransportChoice = Annotated[str, PluginName(lambda: WEIGHT_TRANSPORTS, "weight transport")]
AdvantageChoice = Annotated[str, PluginName(lambda: ADVANTAGES, "advantage estimator", renamed=_ADVANTAGE_NAMES)]
LossChoice = Annotated[str, PluginName(lambda: LOSSES, "policy loss", renamed=_LOSS_NAMES)]
RewardChoices = Annotated[
    tuple[str, ...], PluginName(lambda: REWARDS, "reward", forms=("module:name", "verl:module:name"))
]
SinkChoices = Annotated[tuple[str, ...], PluginName(lambda: SINKS, "metric sink")]
