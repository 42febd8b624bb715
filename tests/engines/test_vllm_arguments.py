"""Options that are handed to vLLM."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from moe_replay.engines.base import LoraSpec, StartRequest
from moe_replay.engines.vllm.arguments import batch_options, engine_arguments, graph_sizes
from moe_replay.errors import EngineName, EngineOptionError
from tests.engines.tiny import tiny_model

ENGINE = EngineName("vLLM", "0")


def test_objects_and_lists_may_be_written_as_json(tmp_path: Path) -> None:
    tiny_model("mixtral").config.save_pretrained(tmp_path)
    options = {"compilation_config": '{"cudagraph_mode": "FULL_DECODE_ONLY"}', "cudagraph_capture_sizes": "[1, 8]"}
    found = engine_arguments(ENGINE, str(tmp_path), "kv_slot", options)
    assert found.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert found.cudagraph_capture_sizes == [1, 8]


def test_an_option_that_is_no_json_is_refused() -> None:
    with pytest.raises(EngineOptionError, match="option compilation_config is not valid JSON"):
        engine_arguments(ENGINE, "m", "kv_slot", {"compilation_config": '{"mode": 0'})


def test_graphs_are_captured_for_the_sequences_of_a_run() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(160) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160]
    for sequences in (1, 2, 5, 100, 512, 1024, 3000):
        sizes = graph_sizes(sequences)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == sequences
        assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("sequences", "options", "expected"),
    [
        (64, {}, {"max_num_seqs": 64, "cudagraph_capture_sizes": graph_sizes(64)}),
        (None, {}, {"max_num_seqs": 256, "cudagraph_capture_sizes": graph_sizes(256)}),
        (10_000, {}, {"max_num_seqs": 256, "cudagraph_capture_sizes": graph_sizes(256)}),
        (64, {"max_num_seqs": 512}, {"cudagraph_capture_sizes": graph_sizes(512)}),
        (64, {"enforce_eager": True}, {"max_num_seqs": 64}),
        (64, {"compilation_config": "{}", "max_num_seqs": 8}, {}),
    ],
)
def test_batches_are_as_large_as_those_of_a_run(
    sequences: int | None, options: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {UsageContext.LLM_CLASS: 256}
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", lambda world: ({}, defaults))
    assert batch_options(StartRequest(model="m", max_sequences=sequences, options=options)) == expected


def test_one_set_of_graphs_serves_an_engine_whose_requests_all_have_the_adapter(tmp_path: Path) -> None:
    tiny_model("mixtral").config.save_pretrained(tmp_path)
    request = StartRequest(model=str(tmp_path), max_sequences=8, lora=LoraSpec(16, ("q_proj",)))
    found = batch_options(request)
    assert found["compilation_config"] == {"cudagraph_specialize_lora": False}
    assert found["cudagraph_capture_sizes"] == graph_sizes(8)
    arguments = engine_arguments(ENGINE, str(tmp_path), "kv_slot", found)
    assert arguments.compilation_config.cudagraph_specialize_lora is False
    given = {"compilation_config": {"mode": 0}}
    assert "compilation_config" not in batch_options(dataclasses.replace(request, options=given))
