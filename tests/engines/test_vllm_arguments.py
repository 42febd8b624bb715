"""Options that are handed to vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from moe_replay.engines.vllm.arguments import engine_arguments
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
