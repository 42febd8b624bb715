"""Routes as other projects hold them, into `RouteTrace`s and back: one file for each project's convention.

    trace = from_sglang(answer["meta_info"]["routed_experts"], prompt + completion, topology)
    traces = from_verl(batch["routed_experts"], batch["input_ids"], batch["attention_mask"], topology=topology)
    batch["routed_experts"] = to_verl(traces, topology, batch["attention_mask"])

Rows, layers, dtypes and ways to say that something is missing differ; a trace says all of it in one way, and what a
convention cannot say is an error on the way back. docs/for-framework-maintainers.md has the table.
"""

from moe_replay.interop.ms_swift import from_ms_swift, to_ms_swift
from moe_replay.interop.nemo_rl import from_nemo_rl, to_nemo_rl
from moe_replay.interop.prime_rl import from_prime_rl, to_prime_rl
from moe_replay.interop.rows import PeerError
from moe_replay.interop.sglang import from_sglang, to_sglang
from moe_replay.interop.skyrl import from_skyrl, to_skyrl
from moe_replay.interop.slime import from_slime, to_slime
from moe_replay.interop.verl import from_verl, to_verl
from moe_replay.interop.vllm import from_vllm, to_vllm

__all__ = [
    "PeerError",
    "from_ms_swift",
    "from_nemo_rl",
    "from_prime_rl",
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
