"""Which capture records routes in vLLM: its own or ours. Settings are checked with it, so it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from moe_replay.errors import EngineOptionError
from moe_replay.rollout.engine import Capture

_NOT_OURS = {
    "worker_cls": "a worker of your own",
    "pipeline_parallel_size": "pipeline parallelism",
    "decode_context_parallel_size": "context parallelism",
    "prefill_context_parallel_size": "context parallelism",
    "kv_transfer_config": "a KV connector",
    "kv_offloading_size": "KV offloading",
    "enable_dbo": "dual-batch overlap",
}


def chosen_capture(
    capture: str, options: Mapping[str, Any], lacks: Sequence[str] = ()
) -> Literal["ours", "vllm", "checked"]:
    """Return which capture records routes in an engine with these options.

    lacks   what our capture uses and the installed vLLM does not have
    """
    if capture not in get_args(Capture):
        raise EngineOptionError("no such route capture", expected=", ".join(get_args(Capture)), found=capture)
    in_the_way = [why for name, why in _NOT_OURS.items() if options.get(name) not in (None, False, 0, 1, "auto")]
    in_the_way += [f"a vLLM without {name}" for name in lacks]
    if capture == "auto":
        return "vllm" if in_the_way else "ours"
    if capture != "vllm" and in_the_way:
        raise EngineOptionError(
            f"capture {capture!r} cannot be used with {', '.join(in_the_way)}",
            remedy='Use capture "auto" or "vllm", or leave that option out; vLLM 0.30 to 0.32 have all it uses',
        )
    return capture  # type: ignore[return-value]
