"""Routes as other projects hold them, into `RouteTrace`s and back.

    trace = from_sglang(answer["meta_info"]["routed_experts"], prompt + completion, topology)
    traces = from_verl(batch["routed_experts"], batch["input_ids"], batch["attention_mask"], topology=topology)
    batch["routed_experts"] = to_verl(traces, topology, batch["attention_mask"])

Rows, layers, dtypes and markers of missing routes differ (`conventions.py`); a trace has one form for all of it, and
what a convention cannot express is an error on the way back. docs/coming-from.md#conventions-of-each-framework has the
table.
"""

from moe_replay.interop.arrays import RouteFormatError
from moe_replay.interop.conventions import (
    from_ms_swift,
    from_nemo_rl,
    from_prime_rl,
    from_sglang,
    from_skyrl,
    from_slime,
    from_verl,
    from_vllm,
    to_ms_swift,
    to_nemo_rl,
    to_prime_rl,
    to_sglang,
    to_skyrl,
    to_slime,
    to_verl,
    to_vllm,
)
from moe_replay.interop.wire_formats import check_nemo_rl_digests, from_art, from_dynamo, from_router_trace

__all__ = [
    "RouteFormatError",
    "check_nemo_rl_digests",
    "from_art",
    "from_dynamo",
    "from_ms_swift",
    "from_nemo_rl",
    "from_prime_rl",
    "from_router_trace",
    "from_sglang",
    "from_skyrl",
    "from_slime",
    "from_verl",
    "from_vllm",
    "to_ms_swift",
    "to_nemo_rl",
    "to_prime_rl",
    "to_sglang",
    "to_skyrl",
    "to_slime",
    "to_verl",
    "to_vllm",
]
