"""Routes as gateways send them and as tools write them: Dynamo, ART, Megatron-Core's router trace, NeMo-RL's digests.

All of it is data from outside: nothing is unpickled or evaluated, sizes are checked before anything is decoded, and an
error names the record, choice or line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_replay.interop.arrays import (
    RouteFormatError,
    TokenIds,
    WeightVersion,
    array_of,
    from_base64,
    in_decoder_layers,
    max_bytes,
    to_ids,
    trace_of,
)
from moe_replay.interop.capture import captured_layers
from moe_replay.interop.conventions import from_sglang, from_vllm
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.misc import one_line

# ---- Dynamo: `nvext.routed_experts` of an answer ---------------------------------------------------------------------
# vLLM     {"data": base64, "shape", "start", "dtype"}: rows from token `start` on (1.6.1)
#          {"data": base85, "shape"}, the width of an id by the number of bytes: known from its discussions, in none of
#          the releases 1.1.1, 1.3.1 and 1.6.1
# SGLang   its own base64 text, unchanged


def from_dynamo(
    routed_experts: str | Mapping[str, Any],
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    first_token: int = 0,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of an answer, of vLLM or of SGLang behind Dynamo.

    first_token   of the rows, where the answer does not say it
    """
    common: dict[str, Any] = {"weight_version": weight_version, "sample": sample}
    if isinstance(routed_experts, str):
        return from_sglang(routed_experts, token_ids, topology, first_token=first_token, **common)
    if not {"data", "shape"} <= routed_experts.keys():
        raise RouteFormatError(
            "routes of Dynamo are no packed array", sample=sample, expected="data, shape", found=sorted(routed_experts)
        )
    start = routed_experts.get("start", first_token)
    if type(start) is not int or not 0 <= start < len(to_ids(token_ids)):
        raise RouteFormatError("routes of Dynamo start outside the tokens", sample=sample, found=repr(start))
    limit = max_bytes(len(to_ids(token_ids)), topology)
    shape, dtype = routed_experts["shape"], routed_experts.get("dtype")
    if dtype is None:
        raw = _from_base85(routed_experts["data"], limit, sample)
        dtype = _dtype_by_size(len(raw), shape)
    else:
        raw = from_base64(routed_experts["data"], limit, "Dynamo", sample)
    array = array_of(raw, dtype, shape, "Dynamo", sample)
    return from_vllm(array, token_ids, topology, first_token=start, **common)


def _from_base85(text: Any, limit: int, sample: int | None) -> bytes:
    if not isinstance(text, str) or len(text) > 5 * -(-limit // 4):
        actual = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise RouteFormatError(
            "routes of Dynamo are no base85 text of these tokens",
            sample=sample,
            expected=f"at most {limit} bytes",
            found=actual,
        )
    try:
        return base64.b85decode(text)
    except ValueError as error:
        raise RouteFormatError(f"routes of Dynamo cannot be read: {error}", sample=sample, expected="base85") from error


def _dtype_by_size(size: int, shape: Any) -> str:
    plausible = isinstance(shape, list | tuple) and all(type(length) is int and length > 0 for length in shape)
    widths = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
    return widths.get(size // math.prod(shape), "uint8") if plausible else "uint8"  # `array_of` checks size and shape


# ---- ART: the body of an answer, `ARTRTE2` ---------------------------------------------------------------------------
# rows     those of vLLM, for each choice; in dense layers 0, 1, ..., K - 1
# dtype    uint8, or uint16 above 256 experts
# Read in its repository, and in no release up to 0.5.18.

ART_MAGIC = b"ARTRTE2\0"
_ART_HEADER = struct.Struct("<8sQII")
_ART_CHOICE = struct.Struct("<IB3xQQQ")
_ART_DTYPES = {1: "uint8", 2: "uint16"}


class ArtBody(NamedTuple):
    """An answer: the text of the chat completion (JSON), and routed_experts (rows, layers, K) by choice."""

    completion: bytes
    routed_experts: dict[int, np.ndarray]


def read_art(body: bytes, max_choices: int = 1024) -> ArtBody:
    """Split the body of an answer of ART's server; lengths in it are checked against its size."""
    if len(body) < _ART_HEADER.size or not body.startswith(ART_MAGIC):
        raise RouteFormatError("no answer of ART with routes", expected=repr(ART_MAGIC), found=repr(bytes(body[:8])))
    _, length, choices, _ = _ART_HEADER.unpack_from(body)
    place = _ART_HEADER.size + length
    if place > len(body) or choices > max_choices:
        raise RouteFormatError(
            "the answer of ART is cut off, or claims too many choices",
            expected=f"{place} bytes and at most {max_choices} choices",
            found=f"{len(body)} bytes, {choices} choices",
        )
    completion, arrays = bytes(body[_ART_HEADER.size : place]), dict[int, np.ndarray]()
    for number in range(choices):
        if place + _ART_CHOICE.size > len(body):
            raise RouteFormatError(f"the answer of ART is cut off in the header of array {number}", found=len(body))
        choice, code, *shape = _ART_CHOICE.unpack_from(body, place)
        if code not in _ART_DTYPES or choice in arrays:
            raise RouteFormatError(
                f"array {number} of ART's answer has an unknown dtype, or a choice that was there before",
                sample=choice,
                expected=f"a dtype among {sorted(_ART_DTYPES)}",
                found=f"dtype {code}",
            )
        place += _ART_CHOICE.size
        stop = place + math.prod(shape) * np.dtype(_ART_DTYPES[code]).itemsize
        arrays[choice] = array_of(bytes(body[place:stop]), _ART_DTYPES[code], shape, "ART", choice)
        place = stop
    if place != len(body):
        raise RouteFormatError("the answer of ART has bytes behind its arrays", found=f"{len(body) - place} bytes")
    return ArtBody(completion, arrays)


def from_art(
    body: bytes, token_ids: Mapping[int, TokenIds], topology: MoeTopology, *, weight_version: WeightVersion = 0
) -> dict[int, RouteTrace]:
    """Return the traces of an answer by choice; `token_ids` are prompt and completion of each."""
    arrays = read_art(body).routed_experts
    if arrays.keys() != token_ids.keys():
        raise RouteFormatError(
            "routes of ART are of other choices", expected=sorted(token_ids), found=f"choices {sorted(arrays)}"
        )
    dense = [layer for layer in range(topology.num_layers) if layer not in topology.layers]
    traces = {}
    for choice, array in arrays.items():
        routed_experts = array.copy()
        if array.ndim == 3 and array.shape[1] == topology.num_layers:
            filler = np.arange(array.shape[2])
            routed_experts[:, dense] = np.where((array[:, dense] == filler).all(-1, keepdims=True), 0, array[:, dense])
        traces[choice] = from_vllm(
            routed_experts, token_ids[choice], topology, weight_version=weight_version, sample=choice
        )
    return traces


# ---- Megatron-Core: `router_trace_rank*.jsonl` of --moe-routing-trace-path (0.19) ------------------------------------
# a line for each step, block and layer: (num_tokens, topk) in ascending order of ids, as the routing map gives them
# layer    index in the decoder of the rank's pipeline chunk; `mtp` blocks have an own number and are left out


def from_router_trace(
    lines: Iterable[str],
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    step: int = 0,
    first_layer: int = 0,
    weight_version: WeightVersion = 0,
) -> RouteTrace:
    """Return the trace of one sequence that was a whole step by itself.

    first_layer   decoder layer that the rank's chunk begins with; layers of other ranks are uncovered
    """
    ids = to_ids(token_ids)
    layers: dict[int, np.ndarray] = {}
    for number, record in _records(lines, max_bytes(len(ids), topology) * 24 + 4096, "Megatron's router trace"):
        if record.get("step") != step or record.get("block") != "decoder":
            continue
        layer, rows = record.get("layer"), record.get("top_indices")
        layer = layer + first_layer if type(layer) is int else -1
        if layer not in topology.layers or layer in layers:
            raise RouteFormatError(
                f"line {number} of Megatron's router trace is of a layer that does not route, or of one that was there",
                expected=f"layers {topology.layers}",
                found=f"layer {layer} in step {step}",
                remedy="A step of several micro-batches cannot be told apart; trace one at a time",
            )
        layers[layer] = _rows(rows, (len(ids), topology.top_k), number)
    if not layers:
        raise RouteFormatError(f"Megatron's router trace has nothing of step {step}")
    wide = np.zeros((len(ids), topology.num_layers, topology.top_k), np.int64)
    for layer, rows in layers.items():
        wide[:, layer] = rows
    if len(layers) == len(topology.layers):
        return trace_of(wide, ids, topology, "Megatron's router trace", weight_version=weight_version)
    present = sorted(layers)
    trace = RouteTrace(ids, wide[:, present], present, None, weight_version, num_experts=topology.num_experts)
    return trace.with_uncaptured_layers(topology.layers)


def _rows(rows: Any, shape: tuple[int, int], line: int) -> np.ndarray:
    is_table = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    actual = (len(rows), *{len(row) for row in rows}) if is_table else None
    if actual != shape or any(type(expert) is not int or not 0 <= expert < 2**31 for row in rows for expert in row):
        raise RouteFormatError(
            f"line {line} of Megatron's router trace does not fit the tokens",
            expected=f"ids of shape {shape}",
            found=actual,
        )
    return np.array(rows, np.int64)


def _records(lines: Iterable[str], limit: int, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line of JSON that is not empty."""
    for number, line in enumerate(lines, 1):
        if len(line) > limit:
            raise RouteFormatError(
                f"line {number} of {source} is too long", expected=f"at most {limit}", found=len(line)
            )
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RouteFormatError(f"line {number} of {source} is no JSON: {one_line(error)}") from error
        if not isinstance(record, dict):
            raise RouteFormatError(f"line {number} of {source} is no object", found=type(record).__name__)
        yield number, record


# ---- NeMo-RL: `r3_trace_*.jsonl` of NRL_R3_TRACE ---------------------------------------------------------------------
# SHA-256 of the valid span of a sample's routes and ids: (valid_length, layers, K) and (valid_length,), C order


class SpanDigest(NamedTuple):
    """One line of NeMo-RL's trace: the digest of a sample's routes at one stage."""

    line: int  # in the file
    event: str  # "rollout_payload_sample", or "tq_fetch_sample" with a stage
    key: str
    matches: bool  # whether the routes of the trace with this key are these


def check_nemo_rl_digests(
    lines: Iterable[str], traces: Mapping[str, RouteTrace], topology: MoeTopology
) -> list[SpanDigest]:
    """Compare the digests that NeMo-RL has written with traces, by the key of a sample; other samples are left out."""
    digests = []
    for number, record in _records(lines, 2**20, "NeMo-RL's trace"):
        digest, key = record.get("routed_experts"), record.get("key")
        is_sample = record.get("event") in ("rollout_payload_sample", "tq_fetch_sample")
        if not is_sample or not isinstance(key, str) or key not in traces:
            continue
        span: dict[str, Any] = digest if isinstance(digest, dict) else {}
        dtype, shape = str(span.get("dtype")).removeprefix("torch."), span.get("valid_shape")
        if dtype not in ("uint8", "int8", "int16", "int32", "int64") or not isinstance(shape, list) or len(shape) != 3:
            raise RouteFormatError(
                f"line {number} of NeMo-RL's trace has no digest of routes",
                expected="dtype, valid_shape and valid_sha256",
                found=f"dtype {dtype}, shape {shape}",
            )
        wide = in_decoder_layers(traces[key], topology).astype(dtype)
        if shape[1] != topology.num_layers:
            wide = wide[:, captured_layers(topology)]
        same = list(wide.shape) == shape and hashlib.sha256(wide.tobytes()).hexdigest() == span.get("valid_sha256")
        stage = f" {record['stage']}" if isinstance(record.get("stage"), str) else ""
        digests.append(SpanDigest(number, f"{record['event']}{stage}", key, same))
    return digests
