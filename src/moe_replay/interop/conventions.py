"""Conventions of other projects for `routed_experts`, read into `RouteTrace`s and written back. One section a project.

Each section says which tokens have rows, which layers, the dtype, and how a missing route is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_replay.interop.arrays import (
    PackedRoutes,
    RouteFormatError,
    TokenIds,
    WeightVersion,
    all_but_last,
    array_of,
    by_decoder_layer,
    covered_prefix,
    covered_tokens,
    from_base64,
    from_npy,
    in_decoder_layers,
    max_bytes,
    num_written,
    pack_routes,
    to_array,
    to_base64,
    to_ids,
    to_npy,
    trace_of,
    unpack_routes,
)
from moe_replay.interop.capture import captured_layers
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace


@dataclass(frozen=True, slots=True)
class Convention:
    """Requirements on one project's `routed_experts` (rows, layers, K)."""

    project: str  # name in errors
    remedy: str  # where the number of rows is another
    rows: Callable[[int], Sequence[int]] = lambda tokens: (tokens - 1, tokens)  # allowed numbers of rows

    @property
    def engine(self) -> str:
        """Whose capture it is, in errors."""
        is_engine = self.project in ("vLLM", "SGLang")
        return f"the {self.project} engine" if is_engine else f"the engine behind {self.project}"

    def check(self, routed_experts: np.ndarray, tokens: int, sample: int | None = None) -> None:
        """Raise unless the rows are those of `tokens` tokens."""
        allowed = self.rows(tokens)
        if routed_experts.ndim != 3 or len(routed_experts) not in allowed:
            counts = " or ".join(str(count) for count in sorted(set(allowed)))
            raise RouteFormatError(
                f"routes of {self.project} do not fit the tokens",
                sample=sample,
                expected=f"({counts}, layers, top_k)",
                found=routed_experts.shape,
                remedy=self.remedy,
            )

    def trace(
        self,
        routed_experts: np.ndarray,
        token_ids: TokenIds,
        topology: MoeTopology,
        *,
        first_token: int = 0,
        weight_version: WeightVersion,
        sample: int | None,
    ) -> RouteTrace:
        """Return the trace of rows (n, decoder layers, K), from `first_token` on; their number is checked."""
        tokens = len(to_ids(token_ids))
        is_number = isinstance(first_token, int | np.integer) and not isinstance(first_token, bool)  # from JSON
        if not is_number or not 0 <= first_token <= tokens:
            raise RouteFormatError(
                f"routes of {self.project} begin at an impossible token",
                sample=sample,
                expected=f"a start of 0 to {tokens}",
                found=repr(first_token),
            )
        self.check(routed_experts, tokens - first_token, sample)
        return trace_of(
            routed_experts,
            token_ids,
            topology,
            self.engine,
            positions=first_token + np.arange(len(routed_experts)),
            weight_version=weight_version,
            sample=sample,
        )


_ALL_IDS = "Give all token ids, and the first token that was requested"
VLLM = Convention("vLLM", _ALL_IDS)
SGLANG = Convention("SGLang", _ALL_IDS)
SLIME = Convention("slime", "Sample.tokens and its routes were cut or extended apart", lambda tokens: (tokens - 1,))
MS_SWIFT = Convention("ms-swift", "Routes and encoded tokens were cut or extended apart")
SKYRL = Convention(
    "SkyRL", "Routes of several turns must be joined, not appended whole", lambda tokens: range(tokens + 1)
)
VERL = Convention("verl", "Routes must be cut where the response is cut")
PRIME_RL = Convention("prime-rl", "Routes must be cut where the tokens are cut", lambda tokens: (tokens,))
PRIME_RL_ENDPOINT = Convention("prime-rl", _ALL_IDS)
NEMO_RL = Convention("NeMo-RL", "Give all token ids, prompt and completion", lambda tokens: (tokens,))


# ---- vLLM: `routed_experts` of a completion --------------------------------------------------------------------------
# rows     prompt + completion - 1, from `routed_experts_prompt_start` on; the last token has none
# layers   every decoder layer, zeros in dense ones
# dtype    uint8, or uint16 above 256 experts; over HTTP base64 of a .npy file


def from_vllm(
    routed_experts: str | np.ndarray | Tensor,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    first_token: int = 0,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from what vLLM returned, in process or over HTTP.

    first_token   what was sent as routed_experts_prompt_start: tokens before it are uncovered
    """
    if isinstance(routed_experts, str):
        limit = max_bytes(len(to_ids(token_ids)), topology)
        array = from_npy(from_base64(routed_experts, limit, "vLLM", sample), "vLLM", sample)
    else:
        array = to_array(routed_experts, "vLLM", sample)
    return VLLM.trace(array, token_ids, topology, first_token=first_token, weight_version=weight_version, sample=sample)


def to_vllm(trace: RouteTrace, topology: MoeTopology) -> str:
    """Return what a vLLM server would: base64 of .npy, T-1 rows; all tokens but the last must have routes."""
    return to_base64(np.frombuffer(to_npy(all_but_last(trace, topology, "vLLM")), np.uint8))


# ---- SGLang: `meta_info["routed_experts"]` of `/generate` ------------------------------------------------------------
# rows     prompt + completion - 1, from `routed_experts_start_len` on; the last token has none
# layers   every decoder layer, zeros in dense ones
# dtype    int32, always base64 without a shape


def int32_rows(
    routed_experts: str, tokens: int, topology: MoeTopology, project: str, sample: int | None = None
) -> np.ndarray:
    """(rows, decoder layers, K) int32 from SGLang's text, for at most `tokens` tokens."""
    raw = from_base64(routed_experts, max_bytes(tokens, topology), project, sample)
    row = 4 * topology.num_layers * topology.top_k
    if len(raw) % row:
        raise RouteFormatError(
            f"routes of {project} are no whole number of rows",
            sample=sample,
            expected=f"a multiple of {row} bytes: int32, {topology.num_layers} layers, top {topology.top_k}",
            found=f"{len(raw)} bytes",
            remedy="They come from another model, or from a version that encodes routes in another way",
        )
    return array_of(raw, "int32", (len(raw) // row, topology.num_layers, topology.top_k), project, sample)


def from_sglang(
    routed_experts: str,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    first_token: int = 0,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from what an SGLang server returned.

    first_token   what was sent as routed_experts_start_len: tokens before it are uncovered
    """
    array = int32_rows(routed_experts, len(to_ids(token_ids)), topology, "SGLang", sample)
    return SGLANG.trace(
        array, token_ids, topology, first_token=first_token, weight_version=weight_version, sample=sample
    )


def to_sglang(trace: RouteTrace, topology: MoeTopology) -> str:
    """Return what an SGLang server would return, T-1 rows; all tokens but the last must have routes."""
    return to_base64(all_but_last(trace, topology, "SGLang").astype(np.int32))


# ---- slime: `Sample.rollout_routed_experts` --------------------------------------------------------------------------
# rows     exactly T-1
# layers   every decoder layer, zeros in dense ones
# dtype    int32, decoded from SGLang's base64
# missing  cannot be expressed


def from_slime(
    rollout_routed_experts: str | np.ndarray | Tensor,
    tokens: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of a sample from its routes, as sent (base64) or as an array."""
    if isinstance(rollout_routed_experts, str):
        array = int32_rows(rollout_routed_experts, len(to_ids(tokens)), topology, "slime", sample)
    else:
        array = to_array(rollout_routed_experts, "slime", sample)
    return SLIME.trace(array, tokens, topology, weight_version=weight_version, sample=sample)


def to_slime(trace: RouteTrace, topology: MoeTopology) -> np.ndarray:
    """(T-1, decoder layers, K) int32. All tokens but the last must have routes."""
    return all_but_last(trace, topology, "slime").astype(np.int32)


# ---- ms-swift: `choice.routed_experts` of its rollout server, `OnPolicySample.routed_experts` in its trainer ---------
# rows     T or T-1
# layers   every decoder layer, zeros in dense ones
# dtype    the engine's; over HTTP {"data": base64, "shape", "dtype", "__ndarray__": True}
# missing  cannot be expressed: its trainer pads with zeros, which means expert 0


def from_ms_swift(
    routed_experts: PackedRoutes,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from the routes of a sample, as sent or as an array."""
    tokens = len(to_ids(token_ids))
    array = unpack_routes(routed_experts, tokens, topology, "ms-swift", sample)
    if array.ndim == 4 and len(array) == 1:  # a batch of one
        array = array[0]
    MS_SWIFT.check(array, tokens, sample)
    if len(array) == tokens > 0 and not array[-1].any():  # the collator's padding: no route at top 2 and above
        array = array[:-1]
    return trace_of(array, token_ids, topology, MS_SWIFT.engine, weight_version=weight_version, sample=sample)


def to_ms_swift(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """Return what its rollout server would send: T rows, or T-1 if the last token has no route."""
    array = in_decoder_layers(trace, topology)[: covered_prefix(trace, topology, "ms-swift")]
    replace(MS_SWIFT, remedy="Only the last token may be without a route").check(array, len(trace))
    return pack_routes(array) | {"shape": array.shape, "__ndarray__": True}


# ---- SkyRL: `routed_experts` of its generate endpoint, `rollout_expert_indices` of a trajectory ----------------------
# rows     the first n tokens: those that the engine evaluated; a synthetic end token and late observations have none
# layers   every decoder layer, zeros in dense ones
# dtype    uint8, int16 or int32, the narrowest that holds the largest id; over HTTP {"data": base64, "shape", "dtype"}
# missing  by the number of rows; its trainer masks the rest and fills it with 0, 1, ..., K-1


def from_skyrl(
    routed_experts: PackedRoutes,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of a whole trajectory from the routes of its first tokens."""
    array = unpack_routes(routed_experts, len(to_ids(token_ids)), topology, "SkyRL", sample)
    return SKYRL.trace(array, token_ids, topology, weight_version=weight_version, sample=sample)


def to_skyrl(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """Return what its generate endpoint would send: rows of the tokens with routes, which must come first."""
    array = in_decoder_layers(trace, topology)[: covered_prefix(trace, topology, "SkyRL")]
    return pack_routes(array.astype(np.uint8 if array.max(initial=0) < 2**8 else np.int16))


# ---- verl: `routed_experts` of a batch -------------------------------------------------------------------------------
# rows     padded (B, W, L, K), prompts on the left and responses on the right of one boundary; or jagged, T or T-1 each
# layers   every decoder layer, zeros in dense ones (rollout); those that route (its own recording, R2)
# dtype    that of the engine, or int16
# missing  zeros; its trainer masks the last row only


def from_verl(
    routed_experts: Tensor | Sequence[np.ndarray | Tensor],
    input_ids: Tensor | Sequence[TokenIds],
    attention_mask: Tensor | None = None,
    *,
    topology: MoeTopology,
    weight_version: int = 0,
    may_be_empty: Sequence[bool] | None = None,
) -> list[RouteTrace]:
    """Return one trace per sample of a batch: padded with its `attention_mask`, jagged, or lists of samples.

    Zero rows at the end of a sample are uncovered: the last token, and a tool's output that no later turn has read. A
    sample of zeros alone is an error, unless `may_be_empty` has True for it: verl adds samples without a response to
    make a batch divisible.
    """
    arrays = _unpadded(routed_experts, attention_mask)
    token_ids = [to_ids(ids) for ids in _unpadded(input_ids, attention_mask)]
    if len(arrays) != len(token_ids):
        raise RouteFormatError(
            "routes and tokens of verl are of different batches", expected=len(token_ids), found=len(arrays)
        )
    traces = []
    for sample, (value, ids) in enumerate(zip(arrays, token_ids, strict=True)):
        array = to_array(value, "verl", sample)
        VERL.check(array, len(ids), sample)
        is_empty = may_be_empty is not None and may_be_empty[sample] and not array.any()
        written = 0 if is_empty else num_written(array, len(ids), topology.top_k)
        array = by_decoder_layer(array[:written], topology)
        traces.append(trace_of(array, ids, topology, VERL.engine, weight_version=weight_version, sample=sample))
    return traces


def to_verl(traces: Sequence[RouteTrace], topology: MoeTopology, attention_mask: Tensor | None = None) -> Tensor:
    """int16: jagged (B, T, L, K), or padded (B, W, L, K) with rows where `attention_mask` (B, W) has tokens.

    Only tokens at the end of a sample may be without routes, and at top 1, where zeros are a choice, only the last one:
    verl cannot express it for others.
    """
    for sample, trace in enumerate(traces):
        _check_zeros_can_say_it(trace, topology, "verl", sample)
    arrays = [torch.from_numpy(in_decoder_layers(trace, topology).astype(np.int16)) for trace in traces]
    if attention_mask is None:
        if not arrays:
            raise RouteFormatError(
                "a jagged batch of verl cannot be empty", expected="at least one trace", found="none"
            )
        return torch.nested.as_nested_tensor(arrays, layout=torch.jagged)
    mask = attention_mask.cpu().bool()
    if mask.sum(1).tolist() != [len(trace) for trace in traces]:
        raise RouteFormatError(
            "the attention mask is not that of these traces",
            expected=f"{[len(trace) for trace in traces]} tokens",
            found=mask.sum(1).tolist(),
        )
    padded = torch.zeros((*mask.shape, topology.num_layers, topology.top_k), dtype=torch.int16)
    if arrays:
        padded[mask] = torch.cat(arrays)
    return padded


def _unpadded(batch: Tensor | Sequence[TokenIds], mask: Tensor | None) -> list:
    if not isinstance(batch, Tensor):
        return list(batch)
    if batch.is_nested:
        return list(batch.unbind())
    if mask is None or mask.shape != batch.shape[:2]:
        raise RouteFormatError(
            "a padded batch of verl needs its attention mask",
            expected=f"attention_mask {tuple(batch.shape[:2])}",
            found=None if mask is None else tuple(mask.shape),
        )
    return [sample[is_token] for sample, is_token in zip(batch, mask.bool(), strict=True)]


def _check_zeros_can_say_it(trace: RouteTrace, topology: MoeTopology, project: str, sample: int | None = None) -> None:
    """Raise unless zeros at the end can say which tokens have no route: all tokens before them have one."""
    covered = covered_prefix(trace, topology, project)
    if topology.top_k == 1 and covered < len(trace) - 1:
        raise RouteFormatError(
            f"{project} cannot say at top 1 that a token before the last has no route",
            sample=sample,
            token=covered,
            expected=f"routes for the first {len(trace) - 1} tokens",
            found=f"routes for {covered}; zeros for the others would mean expert 0",
            remedy="Let an engine prefill the sequence again, or cut the trace: trace[:length]",
        )


# ---- prime-rl: `routed_experts` of its generate endpoint, and of a `TrainingSample` on the way to its trainer --------
# rows     endpoint: T-1, from "start" on; trainer: T, with zeros where the engine reported none
# layers   every decoder layer, zeros in dense ones
# dtype    uint8, or uint16 for more than 256 experts; endpoint: {"data": base64, "shape", "start", "dtype"};
#          trainer: raw bytes, shape and dtype
# missing  endpoint: by the number of rows; trainer: zeros at the end, which its model takes for expert 0

_RAW_FIELDS = ("data", "shape", "dtype")


class RawRoutes(Protocol):
    """Routes as a `TrainingSample` of prime-rl holds them: bytes, their shape and dtype."""

    @property
    def data(self) -> bytes: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> str: ...


def from_prime_rl(
    routed_experts: Mapping[str, Any] | RawRoutes | np.ndarray | Tensor,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of a sample: from what the endpoint answered, or from what its trainer gets.

    Zero rows at the end of what the trainer gets are uncovered, e.g. the last token.
    """
    tokens = len(to_ids(token_ids))
    if isinstance(routed_experts, Mapping) and isinstance(routed_experts.get("data"), str):
        array = unpack_routes(routed_experts, tokens, topology, "prime-rl", sample)
        first_token = routed_experts.get("start", 0)
        return PRIME_RL_ENDPOINT.trace(
            array, token_ids, topology, first_token=first_token, weight_version=weight_version, sample=sample
        )
    array = _raw_array(routed_experts, tokens, topology, sample)
    PRIME_RL.check(array, tokens, sample)
    array = array[: num_written(array, tokens, topology.top_k)]
    return trace_of(array, token_ids, topology, PRIME_RL.engine, weight_version=weight_version, sample=sample)


def to_prime_rl(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """Return the fields of its `RoutedExperts`: T rows as bytes, zeros for tokens without routes at the end.

    At top 1, where zeros are a choice, only the last token may be without a route.
    """
    _check_zeros_can_say_it(trace, topology, "prime-rl")
    array = in_decoder_layers(trace, topology)
    array = array.astype(np.uint8 if topology.num_experts <= 2**8 else "<u2")
    return {"data": array.tobytes(), "shape": list(array.shape), "dtype": array.dtype.name}


def _raw_array(routed_experts: Any, tokens: int, topology: MoeTopology, sample: int | None) -> np.ndarray:
    """Return the array in {data: bytes, shape, dtype}, a mapping or an object, or the array itself."""
    if isinstance(routed_experts, np.ndarray | Tensor):
        return unpack_routes(routed_experts, tokens, topology, "prime-rl", sample)
    if isinstance(routed_experts, Mapping):
        fields = routed_experts
    else:
        fields = {name: getattr(routed_experts, name, None) for name in _RAW_FIELDS}
    data, shape, dtype = (fields.get(name) for name in _RAW_FIELDS)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RouteFormatError(
            "routes of prime-rl are no packed array",
            sample=sample,
            expected="data, shape and dtype",
            found=sorted(name for name, value in fields.items() if value is not None),
        )
    if len(data) > max_bytes(tokens, topology):
        raise RouteFormatError(
            "routes of prime-rl are larger than those of these tokens can be",
            sample=sample,
            expected=f"at most {max_bytes(tokens, topology)} bytes",
            found=f"{len(data)} bytes",
        )
    return array_of(bytes(data), dtype, shape, "prime-rl", sample)


# ---- NeMo-RL: the `routed_experts` envelope of its chat endpoint, `nrlre1:<dtype>:<S>x<L>x<K>:<base64>` --------------
# rows     T; the last one is filled with 0, 1, ..., K-1, regardless of the engine's
# layers   every decoder layer (vLLM) or those that route (Megatron inference)
# dtype    int8, int16 or int32, the narrowest that holds the ids and -1
# missing  a row of -1

_ENVELOPE = "nrlre1"
_ENVELOPE_DTYPES = ("int8", "int16", "int32")
_MISSING = -1


def from_nemo_rl(
    routed_experts: str,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from an envelope; rows of -1 and the last row are uncovered."""
    tokens = len(to_ids(token_ids))
    array = _open_envelope(routed_experts, max_bytes(tokens, topology), sample)
    NEMO_RL.check(array, tokens, sample)
    marked = array == _MISSING
    missing = marked.all(axis=(1, 2))
    partly = np.flatnonzero(marked.any(axis=(1, 2)) & ~missing)
    if partly.size:
        raise RouteFormatError(
            "routes of NeMo-RL mark a part of a token's row as missing",
            sample=sample,
            token=int(partly[0]),
            expected=f"{_MISSING} in all layers of a token, or in none",
            found=array[partly[0]].tolist(),
        )
    missing[-1:] = True
    positions = np.flatnonzero(~missing)
    return trace_of(
        by_decoder_layer(array[positions], topology),
        token_ids,
        topology,
        NEMO_RL.engine,
        positions=positions,
        weight_version=weight_version,
        sample=sample,
    )


def to_nemo_rl(trace: RouteTrace, topology: MoeTopology, layers: Literal["decoder", "routing"] = "decoder") -> str:
    """Return the envelope, over all decoder layers or the MoE layers; the route of the last token is lost."""
    covered = covered_tokens(trace, topology, "NeMo-RL")
    array = in_decoder_layers(trace, topology).astype(np.int8 if topology.num_experts <= 128 else np.int16)
    if layers == "routing":
        array = array[:, captured_layers(topology)]
    array[~covered] = _MISSING
    array[-1:] = np.arange(array.shape[2])
    shape = "x".join(str(size) for size in array.shape)
    return f"{_ENVELOPE}:{array.dtype.name}:{shape}:{to_base64(array)}"


def _open_envelope(routed_experts: str, limit: int, sample: int | None) -> np.ndarray:
    """(S, L, K) signed integers."""
    parts = routed_experts.split(":", 3) if isinstance(routed_experts, str) else []
    sizes = parts[2].split("x") if len(parts) == 4 else []
    sane = all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes)
    if len(sizes) != 3 or parts[0] != _ENVELOPE or parts[1] not in _ENVELOPE_DTYPES or not sane:
        raise RouteFormatError(
            "routes of NeMo-RL are no envelope that is known",
            sample=sample,
            expected=f"{_ENVELOPE}:<{'|'.join(_ENVELOPE_DTYPES)}>:<S>x<L>x<K>:<base64>",
            found=repr(":".join(parts[:3]) if parts else routed_experts)[:100],
        )
    raw = from_base64(parts[3], limit, "NeMo-RL", sample)
    return array_of(raw, parts[1], [int(size) for size in sizes], "NeMo-RL", sample)
