"""Impossible layouts: all problems at once, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moe_replay.errors import LayoutError
from moe_replay.replay.adapters.megatron_settings import WRONG_EXPERT_GRADIENTS, has_wrong_expert_gradients
from moe_replay.routes.layer_rules import setting
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeTopology, text_config
from moe_replay.tools.plan.parallel import Parallel
from moe_replay.tools.plan.work import Work


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a model that parallel sizes must divide; None is not checked."""

    heads: int | None = None
    key_value_heads: int | None = None
    vocabulary: int | None = None
    expert_width: int | None = None

    @classmethod
    def from_config(cls, config: Any) -> Dimensions:
        """Read the sizes from a Transformers config."""
        text = text_config(config)
        width = setting(text, "moe_intermediate_size") or setting(text, "intermediate_size")
        return cls(
            setting(text, "num_attention_heads"),
            setting(text, "num_key_value_heads"),
            setting(text, "vocab_size"),
            width if isinstance(width, int) else None,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a layout is impossible."""

    problem: str
    expected: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem}: expected {self.expected}, found {self.found}" + (
            f". {self.remedy}" if self.remedy else ""
        )


class ImpossibleLayoutError(LayoutError):
    """An impossible parallel layout, with all reasons in `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("impossible layout" + "".join(f"\n  - {problem}" for problem in problems))


def find_problems(
    topology: MoeTopology, parallel: Parallel, work: Work, dimensions: Dimensions | None = None
) -> list[Problem]:
    """Return all reasons why a model cannot be trained in a layout; sizes below one are reported alone."""
    return list(_sizes(parallel, work)) or [
        *_model(topology, parallel, dimensions or Dimensions()),
        *_pipeline(topology, parallel, work),
        *_experts(topology, parallel),
        *_tokens(parallel, work),
    ]


def _sizes(parallel: Parallel, work: Work) -> Iterator[Problem]:
    sizes = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
    numbers = {name: size for name, size in sizes.items() if name not in ("sp", "chunk_layers") and size is not None}
    numbers |= {"micro_batches": work.micro_batches, "group": work.group, "sequences": len(work.lengths)}
    for name, size in numbers.items():
        if size < 1:
            yield Problem(f"invalid size {name}", "at least 1", str(size))
    if min(work.lengths, default=1) < 1:
        yield Problem("a sequence without tokens", "at least 1 token", str(min(work.lengths)))


def _divides(what: str, number: int | None, of: str, size: int, remedy: str = "") -> Iterator[Problem]:
    if number is not None and number % size:
        yield Problem(f"{what} cannot be divided evenly", f"a multiple of {of} {size}", str(number), remedy)


def _model(topology: MoeTopology, parallel: Parallel, model: Dimensions) -> Iterator[Problem]:
    yield from _divides("attention heads", model.heads, "tp", parallel.tp)
    groups = model.key_value_heads
    if groups is not None and groups % parallel.tp and parallel.tp % groups:
        yield Problem(
            "key-value heads cannot be divided evenly", f"a multiple or a divisor of tp {parallel.tp}", str(groups)
        )
    yield from _divides(
        "the vocabulary", model.vocabulary, "tp", parallel.tp, "Padding it would change the log-probabilities"
    )
    yield from _divides("the hidden size of an expert", model.expert_width, "etp", parallel.expert_tensor)
    if parallel.tp > 1 and parallel.sequence_shards == 1:
        yield Problem(
            "Megatron-Core does not train MoE models with tensor parallelism alone",
            "sequence parallelism with tp above 1",
            f"tp {parallel.tp} without it",
            "Leave sp on",
        )
    inside = [layer for layer in topology.layers if layer >= ATTENTION_ROUTER]
    if inside:
        yield Problem("routers inside the attention", "routers of MLP layers", f"{len(inside)} others")


def _pipeline(topology: MoeTopology, parallel: Parallel, work: Work) -> Iterator[Problem]:
    chunks, given = parallel.pp * parallel.vpp, parallel.chunk_layers
    if parallel.vpp > 1 and parallel.pp == 1:
        yield Problem("chunks without stages", "vpp above 1 only with pp above 1", f"vpp {parallel.vpp}, pp 1")
    if given is None:
        yield from _divides("decoder layers", topology.num_layers, "pp * vpp", chunks, "Or set chunk_layers")
    elif len(given) != chunks or sum(given) != topology.num_layers or min(given) < 0:
        yield Problem(
            "chunk_layers does not fit the model",
            f"{chunks} numbers that add up to {topology.num_layers}",
            f"{len(given)} numbers that add up to {sum(given)}",
        )
    if parallel.vpp > 1:
        yield from _divides(
            "micro-batches of an interleaved pipeline", work.micro_batches, "pp", parallel.pp, "Change the batch size"
        )


def _experts(topology: MoeTopology, parallel: Parallel) -> Iterator[Problem]:
    for number in sorted({moe.num_experts for moe in topology.moe_layers}):
        yield from _divides("experts", number, "ep", parallel.ep)
    ranks, wanted = parallel.tp * parallel.cp * parallel.dp, parallel.ep * parallel.expert_tensor
    yield from _divides("the ranks of a stage, tp * cp * dp,", ranks, "ep * etp", wanted, "Change dp, ep or etp")
    if has_wrong_expert_gradients(parallel.tp, parallel.expert_tensor, parallel.ep):
        yield Problem(
            WRONG_EXPERT_GRADIENTS,
            f"etp {parallel.tp}, as tp",
            f"etp {parallel.expert_tensor}",
            "Set them equal, or use ep above 1",
        )


def _tokens(parallel: Parallel, work: Work) -> Iterator[Problem]:
    multiple, width = parallel.column_multiple, work.width
    needed = replace(work, width=None).fed_shape(multiple)[1]
    if width is not None and (width % multiple or width < needed):
        yield Problem(
            "the input width cannot be divided evenly",
            f"at least {needed} and a multiple of {multiple} (2 * cp with cp above 1, times tp)",
            str(width),
        )
    if work.prompt and work.prompt >= min(work.lengths):
        yield Problem("the prompt is the whole sequence", f"below {min(work.lengths)} tokens", str(work.prompt))
