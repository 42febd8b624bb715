"""A vLLM that was never run: its route capture is tested on the loaded model, and what has changed is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_replay.engines.vllm.engine import VllmEngine
from moe_replay.errors import EngineError
from moe_replay.records import SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.engines.tiny import assert_sampled_from, tiny_model
from tests.real_vllm.conftest import SHARED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    tiny_model("qwen3_moe").save_pretrained(path)
    return path


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed vLLM, by its version newer than any that was run."""
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.34.0")


@pytest.mark.usefixtures("newer")
def test_a_newer_vllm_is_tried_and_tested_at_the_start_and_after_an_update(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with VllmEngine(folder, **SHARED) as engine:
        said = "vLLM 0.34.0 is newer than the newest tested (0.33); its self-test passed (moe-replay's capture)"
        assert said in capfd.readouterr().err
        engine.update_weights(checkpoint_tensors(tiny_model("qwen3_moe", 1)), version=1)
        assert engine.weight_version == 1
        (sample,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0))[0]
        assert_sampled_from(tiny_model("qwen3_moe", 1), sample)


@pytest.mark.usefixtures("newer")
def test_an_update_that_loses_the_hook_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.model_loader import reload

    finalize = reload.finalize_layerwise_reload

    def rebuilt(model: Any, *arguments: Any) -> None:
        finalize(model, *arguments)
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.capture_fn = None

    monkeypatch.setattr(reload, "finalize_layerwise_reload", rebuilt)
    missing = r"layers 1, 2, 3 are zero: the hook is missing or has another name, no callback in model\.layers\.1"
    with VllmEngine(folder, **SHARED) as engine, pytest.raises(EngineError, match=missing):
        engine.update_weights(checkpoint_tensors(tiny_model("qwen3_moe", 1)), version=1)


def test_on_request_the_capture_of_any_version_is_tested(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with VllmEngine(folder, **SHARED, capture="checked") as engine:
        assert engine.capture == "kv_slot"
        assert 'with capture "checked": its self-test passed' in capfd.readouterr().err


def without_capture(select: Any) -> Any:
    """What a fused kernel does: experts are chosen, and the callback is not called."""

    def fused(router: Any, *arguments: Any, **options: Any) -> Any:
        kept, router.capture_fn = router.capture_fn, None
        try:
            return select(router, *arguments, **options)
        finally:
            router.capture_fn = kept

    return fused


def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    monkeypatch.setattr(BaseRouter, "on_routing", BaseRouter.set_capture_fn, raising=False)
    monkeypatch.delattr(BaseRouter, "set_capture_fn")
    monkeypatch.delattr(FusedMoERouter, "set_capture_fn")


def behind_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    monkeypatch.setattr(BaseRouter, "_select_experts", without_capture(BaseRouter._select_experts))


def in_another_layer_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer

    capture = RoutedExpertsCapturer.capture

    def reversed_capture(capturer: Any, layer_id: int, topk_ids: Any) -> None:
        capture(capturer, capturer.device_buffer.shape[1] - 1 - layer_id, topk_ids)

    monkeypatch.setattr(RoutedExpertsCapturer, "capture", reversed_capture)


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed, "the hook of route capture is missing or has another name in this vLLM: .*set_capture_fn"),
        (behind_a_fused_kernel, "all of layers 1, 2, 3 are zero: the hook is there and is not called"),
        (in_another_layer_order, r"another layer order \(layer 1 holds those of layer 2"),
    ],
)
def test_the_part_that_changed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Any, named: str) -> None:
    change(monkeypatch)
    with pytest.raises(EngineError, match=named):
        VllmEngine(folder, **SHARED)
