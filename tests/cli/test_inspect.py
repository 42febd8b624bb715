"""`moe-replay inspect`: the numbers are those of the traces, and what cannot be read ends with status 1."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_replay import AlignmentError, MoeTopology, RouteTrace, TraceWriter
from moe_replay.cli.inspect import bars, summary_text
from moe_replay.cli.main import main
from moe_replay.errors import TraceFormatError
from moe_replay.routes import MoeLayer
from moe_replay.routes.trace_parts import VersionSpan
from moe_replay.tools.inspect import read_traces, summarize
from tests.routes.parts import trace_from_parts

pytest.importorskip("tyro", reason="the command line needs tyro")

FIRST = RouteTrace(
    [5, 6, 7, 8],
    [[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[0, 3], [2, 0]], [[0, 0], [0, 0]]],
    layers=(1, 3),
    valid=[True, True, True, False],
    weight_version=[(0, 4), (2, 5)],
    num_experts=4,
)
SECOND = RouteTrace([9], [[[3, 0], [1, 2]]], layers=(1, 3), weight_version=5, num_experts=4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.mrt"
    with TraceWriter(path) as writer:
        for trace in (FIRST, SECOND, FIRST):
            writer.append(trace)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    main(["inspect", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_numbers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, str(file))
    assert (found["traces"], found["tokens"], found["longest"], found["repeated_traces"]) == (3, 9, 4, 1)
    assert found["coverage"] == pytest.approx(7 / 9)
    assert found["routers"] == [{"top_k": 2, "num_experts": 4, "traces": 3}]
    assert found["weight_versions"] == {"4": 4, "5": 5}
    assert found["duplicates"] == 0
    one, three = found["layers"]
    assert (one["layer"], one["tokens"], one["covered"], one["load"]) == (1, 9, 7, [7, 2, 2, 3])
    assert (three["layer"], three["load"], three["unused"]) == (3, [2, 3, 7, 2], 0)
    assert one["peak"] == pytest.approx(2.0)
    shares = np.array([7, 2, 2, 3]) / 14
    assert one["entropy"] == pytest.approx(-(shares * np.log2(shares)).sum() / 2)


def test_a_single_blob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.bin"
    path.write_bytes(FIRST.to_bytes())
    assert told(capsys, str(path))["layers"][0]["load"] == [3, 1, 1, 1]


def test_entropy_from_even_to_one_expert() -> None:
    even = RouteTrace(range(4), [[[i]] for i in range(4)], (0,), num_experts=4)
    alone = RouteTrace(range(4), [[[2]]] * 4, (0,), num_experts=4)
    nothing = RouteTrace.uncovered(range(4), (0,), 1, num_experts=4)
    found = [summarize([trace]).layers[0] for trace in (even, alone, nothing)]
    assert [layer.entropy for layer in found] == pytest.approx([1.0, 0.0, 0.0])
    assert [(layer.peak, layer.unused) for layer in found] == [(1.0, 0), (4.0, 3), (0.0, 4)]


def test_traces_of_several_models_and_of_unknown_experts() -> None:
    other = RouteTrace([1, 2], [[[7]], [[0]]], layers=(2,))
    summary = summarize([FIRST, other])
    assert sorted(summary.layers) == [1, 2, 3]
    assert summary.routers == {(2, 4): 1, (1, None): 1}
    assert summary.layers[2].load.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


def test_rows_that_name_an_expert_twice_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = np.array([[[1, 1]], [[2, 3]], [[0, 0]]], np.uint8)
    valid = np.array([[True], [True], [False]])
    broken = trace_from_parts(np.arange(3, dtype=np.int32), experts, (0,), valid, (VersionSpan(0, 0),), 4)
    path = tmp_path / "broken.mrt"
    with TraceWriter(path) as writer:
        writer.append(broken)
    assert told(capsys, str(path))["duplicates"] == 1
    assert "BROKEN: 1 rows" in summary_text(summarize(read_traces(path)))


def test_bars() -> None:
    assert bars(np.array([0, 1, 4, 8]), 64) == " ▁▄█"
    assert bars(np.array([1, 3, 8, 8]), 2) == "▂█"
    assert bars(np.full(5, 3), 2) == "██"  # of two and of three experts
    assert bars(np.array([2, 1]), 2, levels="abc") == "cb"
    assert bars(np.zeros(3, np.int64), 64) == ""
    assert len(bars(np.arange(1, 301), 64)) == 64


def test_text_has_a_line_for_each_layer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 traces, 9 tokens")
    assert "4 (4 tokens), 5 (5 tokens)" in lines[1]
    assert [line.split()[0] for line in lines[-2:]] == ["1", "3"]


# ---- against a model -------------------------------------------------------------------------------------------------


def model(layers: tuple[int, ...] = (1, 3), experts: int = 4, top_k: int = 2) -> MoeTopology:
    return MoeTopology(4, tuple(MoeLayer(layer, experts, top_k) for layer in layers))


def test_a_model_that_fits_and_models_that_do_not() -> None:
    summary = summarize([FIRST])
    assert summary.differences(model()) == []
    summary.check(model())
    for wrong, words in (
        (model(layers=(0, 1)), r"layers: \[0, 1\] in the model"),
        (model(top_k=1), "experts per token"),
        (model(experts=8), "experts: 8 in the model, 4"),
    ):
        with pytest.raises(AlignmentError, match=words):
            summary.check(wrong)
    unknown = RouteTrace([1], [[[7, 3], [1, 2]]], layers=(1, 3))
    with pytest.raises(AlignmentError, match="expert 7 was selected"):
        summarize([unknown]).check(model())


def test_check_reads_the_config_of_a_folder(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(num_hidden_layers=4, num_experts=4, num_experts_per_tok=2)
    config.mlp_only_layers = [0, 2]
    config.save_pretrained(tmp_path / "fits")
    assert told(capsys, str(file), "--check", str(tmp_path / "fits"))["differences"] == []
    config.mlp_only_layers = [0]
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match="the traces do not match the model"):
        main(["inspect", str(file), "--check", str(tmp_path / "other"), "--json"])
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 1


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_a_chart_without_width_is_an_error(file: Path) -> None:
    with pytest.raises(SystemExit, match="error: --width must be at least 1: found 0") as ended:
        main(["inspect", str(file), "--width", "0"])
    assert ended.value.code == 2


def test_damage_is_an_error(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for name, content in (("cut", whole[:-30]), ("flipped", bytes(flipped)), ("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceFormatError):
            summarize(read_traces(tmp_path / name))
        with pytest.raises(SystemExit, match="error: ") as ended:
            main(["inspect", str(tmp_path / name)])
        assert ended.value.code == 2
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["inspect", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["inspect", str(tmp_path)])
