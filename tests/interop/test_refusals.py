"""What is wrong in a peer's routes is an error that names it, whether by accident or by malice."""

from __future__ import annotations

import base64
import io
import struct

import numpy as np
import pytest
import torch

from moe_replay import MoeTopology, RouteTrace, interop
from moe_replay.errors import TraceError
from moe_replay.interop import RouteFormatError
from moe_replay.interop.arrays import from_npy
from moe_replay.routes import MoeLayer
from tests.interop.test_conventions import HYBRID, ONE_EXPERT, captured, npy_text, truth

TRACE = truth(9, 1)
ROWS = captured(TRACE)
IDS = TRACE.token_ids


def text_of(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


# ---- bugs that peers have had ----------------------------------------------------------------------------------------


def test_layers_shifted_by_a_dense_one() -> None:
    """verl #5037: routes of MoE layer n written to decoder layer n."""
    shifted = np.zeros_like(ROWS)
    shifted[:, : len(HYBRID.layers)] = ROWS[:, list(HYBRID.layers)]
    with pytest.raises(RouteFormatError, match="no router"):
        interop.from_verl([shifted], [IDS], topology=HYBRID)


def test_a_resumed_request_appended_to_itself() -> None:
    """verl #6029: the full sequence came back and was concatenated."""
    twice = np.concatenate([ROWS, ROWS])
    for read in (
        interop.from_vllm,
        interop.from_slime,
        interop.from_ms_swift,
        interop.from_skyrl,
        interop.from_prime_rl,
    ):
        with pytest.raises(RouteFormatError, match="do not fit"):
            read(twice, IDS, HYBRID)
    with pytest.raises(RouteFormatError, match=r"do not fit|larger"):
        interop.from_sglang(text_of(twice.astype(np.int32)), IDS, HYBRID)


def test_a_response_that_was_cut_without_its_routes() -> None:
    """verl #6027."""
    with pytest.raises(RouteFormatError, match=r"do not fit.*\(4 or 5, layers, top_k\)"):
        interop.from_verl([ROWS], [IDS[:5]], topology=HYBRID)


def test_a_capture_that_was_never_bound() -> None:
    """vLLM #33013."""
    with pytest.raises(RouteFormatError, match="all-zero"):
        interop.from_verl([np.zeros_like(ROWS)], [IDS], topology=HYBRID)
    with pytest.raises(RouteFormatError, match="all-zero"):
        interop.from_vllm(np.zeros_like(ROWS), IDS, HYBRID)


def test_rows_unwritten_in_the_middle_name_their_token() -> None:
    holed = ROWS.copy()
    holed[3] = 0
    with pytest.raises(RouteFormatError, match="unwritten") as caught:
        interop.from_slime(holed, IDS, HYBRID)
    assert (caught.value.token, caught.value.layer) == (3, 1)


def test_a_wrong_row_is_named_by_its_token_and_not_by_its_place_among_the_rows() -> None:
    rows = captured(TRACE, rows=9).astype(np.int8)
    rows[1:4] = -1
    rows[6, 3] = 5  # one expert twice
    envelope = f"nrlre1:int8:9x5x2:{text_of(rows)}"
    with pytest.raises(RouteFormatError, match="cannot be true") as caught:
        interop.from_nemo_rl(envelope, IDS, HYBRID)
    assert (caught.value.token, caught.value.layer) == (6, 3)


def test_physical_ids_of_a_load_balancer() -> None:
    """vLLM #33013, vllm-ascend #13882."""
    physical = ROWS.copy()
    physical[2, 1, 0] = 16
    with pytest.raises(RouteFormatError, match="physical"):
        interop.from_vllm(physical, IDS, HYBRID)


def test_a_marker_for_a_part_of_a_row() -> None:
    rows = captured(TRACE, rows=9).astype(np.int8)
    rows[2, 3] = -1
    with pytest.raises(RouteFormatError, match="a part of a token's row"):
        interop.from_nemo_rl(f"nrlre1:int8:9x5x2:{text_of(rows)}", IDS, HYBRID)


# ---- what is no array at all -----------------------------------------------------------------------------------------

ENVELOPES = [
    "nrlre2:int8:9x5x2:AA==",
    "nrlre1:float16:9x5x2:AA==",
    "nrlre1:uint8:9x5x2:AA==",
    "nrlre1:int8:9x5:AA==",
    "nrlre1:int8:9x5x-2:AA==",
    "nrlre1:int8:9x5x9999999999:AA==",
    "nrlre1:int8:9x5x2:A!",
    "nrlre1:int8:9x5x2:AAAA",
    "nrlre1",
    "",
]


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_envelopes_that_are_none(envelope: str) -> None:
    with pytest.raises(RouteFormatError):
        interop.from_nemo_rl(envelope, IDS, HYBRID)


MAPPINGS = [
    {"shape": [1000000, 5, 2]},
    {"shape": [8, 5, -2]},
    {"shape": "852"},
    {"shape": [8, 5, 2.0]},
    {"shape": [8, True, 2]},
    {"data": "", "shape": [0, 2**31, 2**31]},
    {"data": "", "shape": [0, 10**30, 2]},
    {"dtype": "object"},
    {"dtype": "float32"},
    {"dtype": ["uint8"]},
    {"data": "!"},
    {"data": None},
    {"data": "AAAA" * 100_000},
]


@pytest.mark.parametrize("change", MAPPINGS, ids=str)
def test_mappings_that_are_no_arrays(change: dict) -> None:
    sent = {"data": text_of(ROWS), "shape": [8, 5, 2], "dtype": "uint8", "__ndarray__": True}
    assert interop.from_skyrl(sent, IDS, HYBRID, weight_version=3) == TRACE
    for read in (interop.from_skyrl, interop.from_ms_swift, interop.from_prime_rl):
        with pytest.raises(RouteFormatError):
            read(sent | change, IDS, HYBRID)
        with pytest.raises(RouteFormatError, match="no packed array"):
            read({name: value for name, value in sent.items() if name not in change}, IDS, HYBRID)


@pytest.mark.parametrize("start", [-1, 10, "4", True, None])
def test_routes_of_prime_rl_that_begin_nowhere(start: object) -> None:
    sent = {"data": text_of(ROWS), "shape": [8, 5, 2], "dtype": "uint8", "start": start}
    with pytest.raises(RouteFormatError, match="impossible token"):
        interop.from_prime_rl(sent, IDS, HYBRID)


@pytest.mark.parametrize("first", [-1, 10])
def test_routes_of_engines_that_begin_nowhere(first: int) -> None:
    with pytest.raises(RouteFormatError, match="impossible token"):
        interop.from_vllm(np.concatenate([ROWS, ROWS])[: 8 - first], IDS, HYBRID, first_token=first)
    with pytest.raises(RouteFormatError, match="impossible token"):
        interop.from_sglang(text_of(ROWS.astype(np.int32)), IDS, HYBRID, first_token=first)


def test_token_ids_that_are_none_are_not_blamed_on_the_engine() -> None:
    for ids, problem in ((IDS.astype(float), "one-dimensional integers"), (IDS - 10**6, "token id out of range")):
        with pytest.raises(TraceError, match=problem) as caught:
            interop.from_vllm(ROWS, ids, HYBRID)
        assert "engine" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"data": bytes(79)}, {"data": bytes(100_000)}, {"data": 5}, {"dtype": "object"}, {"shape": [9, 5]}],
    ids=str,
)
def test_bytes_of_prime_rl_that_are_no_routes(change: dict) -> None:
    sent = interop.to_prime_rl(TRACE, HYBRID)
    assert interop.from_prime_rl(sent, IDS, HYBRID, weight_version=3) == TRACE
    with pytest.raises(RouteFormatError):
        interop.from_prime_rl(sent | change, IDS, HYBRID)


def test_two_tokens_without_routes_at_top_1_cannot_be_said_by_prime_rl() -> None:
    of = MoeTopology(3, tuple(MoeLayer(layer, 4, 1) for layer in (1, 2)))
    with pytest.raises(RouteFormatError, match="cannot say at top 1") as caught:
        interop.to_prime_rl(truth(6, 2, of), of)
    assert caught.value.token == 4


def npy_with(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> str:
    text = header.encode()
    return base64.b64encode(b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + body).decode()


@pytest.mark.parametrize(
    "encoded",
    [
        npy_with("{'descr': '|u1', 'fortran_order': False, 'shape': (8, 5, 1000000000000)}\n", b"x"),
        npy_with("{'descr': '|O', 'fortran_order': False, 'shape': (8, 5, 2)}\n", b"x" * 640),
        npy_with("{'descr': '|u1', 'fortran_order': True, 'shape': (8, 5, 2)}\n", ROWS.tobytes()),
        npy_with("{'descr': '>u2', 'fortran_order': False, 'shape': (8, 5, 2)}\n", ROWS.tobytes() * 2),
        npy_with("__import__('os')\n"),
        npy_with("{'descr': '|u1', 'fortran_order': False, 'shape': (8, 5, 2)}\n", ROWS.tobytes(), b"\x03\x00"),
        npy_text(ROWS.astype(np.float32)),
        npy_text(ROWS)[:100],
        base64.b64encode(b"PK\x03\x04").decode(),
        "not base64",
        "A" * 100_000,
    ],
    ids=["huge", "objects", "columns", "big-endian", "code", "version", "floats", "cut off", "zip", "text", "long"],
)
def test_npy_files_that_are_none(encoded: str) -> None:
    with pytest.raises(RouteFormatError):
        interop.from_vllm(encoded, IDS, HYBRID)


@pytest.mark.parametrize("version", [1, 2])
def test_a_damaged_npy_header(version: int) -> None:
    """Every byte of it, replaced by every byte that means something there, and by some that mean nothing."""
    file = io.BytesIO()
    np.lib.format.write_array(file, ROWS, version=(version, 0))
    whole = file.getvalue()
    assert interop.from_vllm(base64.b64encode(whole).decode(), IDS, HYBRID, weight_version=3) == TRACE
    header = whole.index(b"\n") + 1
    for place in range(header):
        for new in b"\x00\xff()[]{}'\",:0-\n ":
            damaged = whole[:place] + bytes([new]) + whole[place + 1 :]
            try:
                read = from_npy(damaged, "vLLM")
            except RouteFormatError:
                continue
            assert np.array_equal(read, ROWS)
    for stop in range(len(whole)):
        with pytest.raises(RouteFormatError):
            from_npy(whole[:stop], "vLLM")
    nested = f"{'-' * 5000}1"
    with pytest.raises(RouteFormatError, match="cannot be read"):
        from_npy(base64.b64decode(npy_with(f"{{'descr': {nested}}}\n")), "vLLM")


def test_text_that_is_too_long_is_not_even_decoded() -> None:
    endless = "A" * 100_001  # no base64 either
    for read in (interop.from_vllm, interop.from_sglang):
        with pytest.raises(RouteFormatError, match="larger than those of these tokens"):
            read(endless, IDS, HYBRID)


def test_text_of_sglang_that_is_no_whole_number_of_rows() -> None:
    with pytest.raises(RouteFormatError, match="whole number of rows"):
        interop.from_sglang(text_of(np.zeros(7, np.int32)), IDS, HYBRID)


def test_floats_and_batches_that_do_not_fit() -> None:
    with pytest.raises(RouteFormatError, match="integers"):
        interop.from_slime(ROWS.astype(float), IDS, HYBRID)
    with pytest.raises(RouteFormatError, match="different batches"):
        interop.from_verl([ROWS, ROWS], [IDS], topology=HYBRID)
    with pytest.raises(RouteFormatError, match="needs its attention mask"):
        interop.from_verl(torch.zeros(1, 9, 5, 2, dtype=torch.int16), torch.zeros(1, 9), topology=HYBRID)
    with pytest.raises(RouteFormatError, match="not that of these traces"):
        interop.to_verl([TRACE], HYBRID, torch.ones(1, 8))


# ---- what a convention cannot say ------------------------------------------------------------------------------------


def test_a_hole_cannot_be_said() -> None:
    valid = np.ones(9, bool)
    valid[4] = False
    holed = RouteTrace(IDS, truth(9, 0).routed_experts, HYBRID.layers, valid, num_experts=16)
    for write in (
        interop.to_vllm,
        interop.to_sglang,
        interop.to_slime,
        interop.to_ms_swift,
        interop.to_skyrl,
        interop.to_prime_rl,
    ):
        with pytest.raises(RouteFormatError, match="cannot say") as caught:
            write(holed, HYBRID)
        assert caught.value.token == 4
    with pytest.raises(RouteFormatError, match="cannot say"):
        interop.to_verl([holed], HYBRID)
    assert interop.from_nemo_rl(interop.to_nemo_rl(holed, HYBRID), IDS, HYBRID).valid[:, 0].tolist() == [
        *valid[:8].tolist(),
        False,
    ]


def test_two_tokens_without_routes_at_the_end_cannot_be_said_by_those_with_t_minus_1_rows() -> None:
    for write in (interop.to_vllm, interop.to_sglang, interop.to_slime, interop.to_ms_swift):
        with pytest.raises(RouteFormatError):
            write(truth(9, 2), HYBRID)


def test_two_tokens_without_routes_at_top_1_cannot_be_said_by_verl() -> None:
    """Zeros are a choice there: they would be read back as expert 0."""
    trace = truth(9, 2, ONE_EXPERT)
    with pytest.raises(RouteFormatError, match="at top 1") as caught:
        interop.to_verl([truth(9, 1, ONE_EXPERT), trace], ONE_EXPERT)
    assert (caught.value.sample, caught.value.token) == (1, 7)


def test_an_empty_jagged_batch_cannot_be_said() -> None:
    with pytest.raises(RouteFormatError, match="cannot be empty"):
        interop.to_verl([], HYBRID)


def test_a_layer_that_was_not_captured_cannot_be_said() -> None:
    fewer = MoeTopology(5, tuple(MoeLayer(layer, 16, 2) for layer in (1, 3)))
    partly = truth(9, 1, fewer).with_uncaptured_layers(HYBRID.layers)
    with pytest.raises(RouteFormatError, match="some layers only") as caught:
        interop.to_slime(partly, HYBRID)
    assert caught.value.layer == 4
