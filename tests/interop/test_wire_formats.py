"""What gateways send and tools write, as their own code wrote it (recorded/), becomes the trace that it means.

Dynamo: `_serialize_routed_experts` of ai-dynamo 1.6.1. Megatron: `RouterTracer` of megatron-core 0.19.2. NeMo-RL:
`r3_trace.py` of its repository, August 2026. ART's body and Dynamo's base85 are built here from what was read of them.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_replay import MoeTopology, RouteTrace, interop
from moe_replay.interop import RouteFormatError
from moe_replay.interop.wire_formats import read_art
from moe_replay.routes import MoeLayer

RECORDED = Path(__file__).with_name("recorded")
TOPOLOGY = MoeTopology(5, tuple(MoeLayer(layer, 16, 2) for layer in (1, 3, 4)))
DYNAMO: dict[str, Any] = json.loads((RECORDED / "dynamo.json").read_text(encoding="utf-8"))
IDS: list[int] = DYNAMO["token_ids"]
TRUTH = np.array(DYNAMO["routed_experts"], np.uint8)
TRACER = (RECORDED / "router_trace_rank0.jsonl").read_text(encoding="utf-8").splitlines()
DIGESTS = (RECORDED / "nemo_rl_r3_trace.jsonl").read_text(encoding="utf-8").splitlines()


def assert_true(trace: RouteTrace, covered: slice) -> None:
    wanted = TRUTH[:, [1, 3, 4]]
    assert trace.layers == (1, 3, 4)
    assert np.array_equal(trace.routed_experts[covered], wanted[covered])
    assert trace.valid[covered].all()
    assert trace.valid.sum() == 3 * len(range(*covered.indices(len(IDS))))


# ---- Dynamo ----------------------------------------------------------------------------------------------------------


def test_dynamo_in_front_of_vllm() -> None:
    assert_true(interop.from_dynamo(DYNAMO["whole"], IDS, TOPOLOGY), slice(0, 5))
    assert_true(interop.from_dynamo(DYNAMO["from_2"], IDS, TOPOLOGY), slice(2, 5))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_dynamo_in_base85(dtype: str) -> None:
    data = base64.b85encode(TRUTH[:5].astype(dtype).tobytes()).decode()
    assert_true(interop.from_dynamo({"data": data, "shape": [5, 5, 2]}, IDS, TOPOLOGY), slice(0, 5))


def test_dynamo_in_front_of_sglang() -> None:
    text = base64.b64encode(TRUTH[:5].astype("<i4").tobytes()).decode()
    assert_true(interop.from_dynamo(text, IDS, TOPOLOGY), slice(0, 5))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"data": "A" * 10**6}, "larger than those of these tokens"),
        ({"data": "%%%"}, "cannot be read"),
        ({"shape": [5, 5, 3]}, "truncated, or not of the shape"),
        ({"shape": [2**62, 5, 2]}, "truncated, or not of the shape"),
        ({"dtype": "object"}, "unknown dtype"),
        ({"start": 6}, "start outside the tokens"),
        ({"start": -1}, "start outside the tokens"),
        ({"start": 2}, "do not fit the tokens"),
        ({"dtype": None, "data": "~" * 10**6}, "no base85 text of these tokens"),
        ({"dtype": None, "data": "\x00\x00"}, "cannot be read"),
        ({"dtype": None, "data": "00000", "shape": "555"}, "impossible shape"),
    ],
)
def test_damaged_answers_of_dynamo(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(RouteFormatError, match=named):
        interop.from_dynamo(DYNAMO["whole"] | changed, IDS, TOPOLOGY)
    with pytest.raises(RouteFormatError, match="no packed array"):
        interop.from_dynamo({"data": ""}, IDS, TOPOLOGY)


# ---- ART -------------------------------------------------------------------------------------------------------------


def art_body(arrays: dict[int, np.ndarray], completion: bytes = b'{"choices": []}') -> bytes:
    body = struct.pack("<8sQII", b"ARTRTE2\0", len(completion), len(arrays), 16) + completion
    for choice, array in arrays.items():
        body += struct.pack("<IB3xQQQ", choice, array.dtype.itemsize, *array.shape) + array.tobytes()
    return body


def art_rows() -> np.ndarray:
    rows = TRUTH[:5].copy()
    rows[:, [0, 2]] = np.arange(2)  # its filler in dense layers
    return rows


def test_the_body_of_art() -> None:
    body = art_body({0: art_rows(), 1: art_rows().astype("<u2")})
    assert read_art(body).completion == b'{"choices": []}'
    traces = interop.from_art(body, {0: IDS, 1: IDS}, TOPOLOGY, weight_version=4)
    for trace in traces.values():
        assert_true(trace, slice(0, 5))
    assert sorted(traces) == [0, 1]


def test_routes_in_dense_layers_of_art_are_refused() -> None:
    rows = art_rows()
    rows[2, 2] = 5, 6
    with pytest.raises(RouteFormatError, match="no router"):
        interop.from_art(art_body({0: rows}), {0: IDS}, TOPOLOGY)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "no answer of ART"),
        (b"ARTRTE1\0" + bytes(16), "no answer of ART"),
        (struct.pack("<8sQII", b"ARTRTE2\0", 2**63, 1, 16), "cut off"),
        (struct.pack("<8sQII", b"ARTRTE2\0", 0, 2**31, 16), "too many choices"),
        (art_body({0: art_rows()})[:-1], "truncated"),
        (art_body({0: art_rows()}) + b"x", "behind its arrays"),
        (art_body({0: art_rows()})[:60], r"truncated|header of array 0"),
        (art_body({0: art_rows().astype("<i4")}), "unknown dtype"),
        (struct.pack("<8sQII", b"ARTRTE2\0", 0, 1, 16) + struct.pack("<IB3xQQQ", 0, 1, 2**60, 2, 2), "truncated"),
        (art_body({1: art_rows()}), "other choices"),
    ],
)
def test_damaged_bodies_of_art(body: bytes, named: str) -> None:
    with pytest.raises(RouteFormatError, match=named):
        interop.from_art(body, {0: IDS}, TOPOLOGY)


# ---- Megatron's router trace -----------------------------------------------------------------------------------------


def test_the_router_trace_of_megatron() -> None:
    trace = interop.from_router_trace(TRACER, IDS, TOPOLOGY)
    assert np.array_equal(trace.routed_experts, np.sort(TRUTH[:, [1, 3, 4]], axis=-1))
    assert trace.valid.all()


def test_layers_of_other_stages_are_uncovered() -> None:
    stage = [line.replace('"layer": 1', '"layer": 0') for line in TRACER if '"layer": 1,' in line]
    trace = interop.from_router_trace(stage, IDS, TOPOLOGY, first_layer=1)
    assert trace.valid.all(0).tolist() == [True, False, False]
    assert np.array_equal(trace.routed_experts[:, 0], np.sort(TRUTH[:, 1], axis=-1))


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["{"], "line 1 of Megatron's router trace is no JSON"),
        (["", "[1]"], "line 2 of Megatron's router trace is no object"),
        ([*TRACER, TRACER[0]], "line 5 .* of one that was there"),
        ([TRACER[0].replace('"layer": 1', '"layer": 2')], "layer that does not route"),
        ([TRACER[0].replace('"layer": 1', '"layer": "1"')], "layer that does not route"),
        ([TRACER[0].replace("[[3, 7], ", "[")], "does not fit the tokens"),
        ([TRACER[0].replace("[3, 7]", "[3, -7]", 1)], "does not fit the tokens"),
        ([TRACER[0].replace("[3, 7]", "[3, 7.5]", 1)], "does not fit the tokens"),
        ([TRACER[0].replace("[3, 7]", "5", 1)], "does not fit the tokens"),
        ([TRACER[0].replace("[3, 7]", "{}", 1)], "does not fit the tokens"),
        (["x" * 10**7], "line 1 .* too long"),
        ([], "nothing of step 0"),
    ],
)
def test_damaged_router_traces(lines: list[str], named: str) -> None:
    with pytest.raises(RouteFormatError, match=named):
        interop.from_router_trace(lines, IDS, TOPOLOGY)


# ---- NeMo-RL's digests -----------------------------------------------------------------------------------------------


def test_digests_of_nemo_rl_tell_which_samples_have_these_routes() -> None:
    trace = interop.from_vllm(TRUTH[:5], IDS, TOPOLOGY)
    found = interop.check_nemo_rl_digests(DIGESTS, {"a": trace, "b": trace}, TOPOLOGY)
    assert [(one.event, one.key, one.matches) for one in found] == [
        ("rollout_payload_sample", "a", True),
        ("rollout_payload_sample", "b", False),
        ("tq_fetch_sample train", "a", True),
        ("tq_fetch_sample train", "b", False),
    ]
    assert interop.check_nemo_rl_digests(DIGESTS, {"c": trace}, TOPOLOGY) == []
    without_key = ['{"event": "tq_fetch_sample", "key": ["a"], "routed_experts": {}}']
    assert interop.check_nemo_rl_digests(without_key, {"a": trace}, TOPOLOGY) == []


@pytest.mark.parametrize(
    "span", ['{"dtype": "torch.float32", "valid_shape": [6, 5, 2]}', "7", '{"dtype": "torch.int16"}']
)
def test_damaged_digests(span: str) -> None:
    line = f'{{"event": "rollout_payload_sample", "key": "a", "routed_experts": {span}}}'
    with pytest.raises(RouteFormatError, match="line 1 of NeMo-RL's trace has no digest"):
        interop.check_nemo_rl_digests([line], {"a": interop.from_vllm(TRUTH[:5], IDS, TOPOLOGY)}, TOPOLOGY)
