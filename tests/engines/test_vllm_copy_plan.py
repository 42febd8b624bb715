"""Copies of weights learned from vLLM's own loaders: the same parameters as they make, or no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_replay.engines.vllm.weights import CopyPlan, CopyRecorder
from moe_replay.errors import EngineError

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow  # importing vLLM takes seconds

EXPERTS, HIDDEN, WIDTH = 3, 4, 2
Loader = Callable[..., None]


def parameter(*shape: int, loader: Loader, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)
    made.weight_loader = loader  # type: ignore[attr-defined]
    return made


def whole(param: Tensor, loaded: Tensor) -> None:
    param.data.copy_(loaded)


def converted(param: Tensor, loaded: Tensor) -> None:
    param.data.copy_(loaded * 2)


def into_expert(param: Tensor, loaded: Tensor, expert: int, part: str) -> None:
    if part == "down":
        param.data[expert].copy_(loaded)
    else:
        param.data[expert].narrow(0, 0 if part == "gate" else WIDTH, WIDTH).copy_(loaded)


class Experts(nn.Module):
    """As vLLM fuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = parameter(EXPERTS, 2 * WIDTH, HIDDEN, loader=into_expert)
        self.w2 = parameter(EXPERTS, HIDDEN, WIDTH, loader=into_expert)


class Layer(nn.Module):
    """A layer with a router in float32, whose checkpoint may be in bfloat16, and half of another rank's rows."""

    def __init__(self, loader: Loader = whole) -> None:
        super().__init__()
        self.experts = Experts()
        self.gate = nn.Module()
        self.gate.weight = parameter(EXPERTS, HIDDEN, loader=loader)
        self.rows = nn.Module()
        self.rows.weight = parameter(2, HIDDEN, loader=lambda param, loaded: param.data.copy_(loaded.narrow(0, 2, 2)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            target: Any
            if name.startswith("experts."):
                _, number, part = name.split(".")
                target = self.experts.w2 if part == "down" else self.experts.w13
                target.weight_loader(target, tensor, int(number), part)
            elif name in ("gate", "rows"):
                target = getattr(self, name).weight
                target.weight_loader(target, tensor)


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    tensors = {"gate": torch.randn(EXPERTS, HIDDEN, dtype=dtype), "rows": torch.randn(4, HIDDEN, dtype=dtype)}
    for number in range(EXPERTS):
        for part in ("gate", "up", "down"):
            shape = (HIDDEN, WIDTH) if part == "down" else (WIDTH, HIDDEN)
            tensors[f"experts.{number}.{part}"] = torch.randn(shape, dtype=dtype)
    return list({**tensors, "of another rank": torch.randn(2)}.items())


def reloaded(
    layer: Layer, tensors: list[tuple[str, Tensor]], recorder: CopyRecorder | None = None, chunk: int = 100
) -> Layer:
    """Update a layer as vLLM does, with so many tensors at a time."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(layer)
    if recorder is None:
        layer.load_weights(tensors)
    else:
        for start in range(0, len(tensors), chunk):
            own = [(name, tensor.clone()) for name, tensor in tensors[start : start + chunk]]
            recorder.announce(own)
            with recorder:
                layer.load_weights(own)
            del own  # memory that vLLM does not keep is used again
    with recorder or nullcontext():
        finalize_layerwise_reload(layer, None)  # type: ignore[arg-type]
    return layer


def new_layer(loader: Loader = whole) -> Layer:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    layer = Layer(loader)
    record_metadata_for_reloading(layer)
    return layer


def learned(layer: Layer, chunk: int = 100) -> tuple[CopyPlan | None, str]:
    recorder = CopyRecorder()
    reloaded(layer, checkpoint(0), recorder, chunk)
    return recorder.plan()


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("chunk", [100, 4, 1])
def test_later_updates_are_the_copies_of_the_first(chunk: int) -> None:
    layer = new_layer()
    plan, reason = learned(layer, chunk)
    assert plan is not None, reason
    addresses = [tensor.data_ptr() for tensor in layer.state_dict().values()]
    buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in checkpoint(1)])  # as they arrive
    offset, views = 0, []
    for name, tensor in checkpoint(1):
        views.append((name, buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)))
        offset += tensor.nbytes
    plan.load(views)
    assert same(layer, reloaded(new_layer(), checkpoint(1)))
    assert not same(layer, reloaded(new_layer(), checkpoint(0)))
    assert [tensor.data_ptr() for tensor in layer.state_dict().values()] == addresses


def test_a_tensor_in_another_type_is_cast_as_the_loader_does() -> None:
    layer = new_layer()
    plan, _ = learned(layer)
    assert plan is not None
    plan.load(checkpoint(2, torch.float32))
    assert same(layer, reloaded(new_layer(), checkpoint(2, torch.float32)))


def test_tensors_that_were_not_there_before_are_named_and_nothing_is_copied() -> None:
    layer = new_layer()
    plan, _ = learned(layer)
    assert plan is not None
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(EngineError, match=r"no such tensor.*experts.9.up"):
        plan.load([*checkpoint(1), ("experts.9.up", torch.zeros(WIDTH, HIDDEN))])
    with pytest.raises(EngineError, match=r"wrong shape of experts.0.up"):
        plan.load([*checkpoint(1), ("experts.0.up", torch.zeros(1, HIDDEN))])
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_there_is_no_plan_if_part_of_a_parameter_was_not_copied() -> None:
    layer, recorder = new_layer(), CopyRecorder()
    reloaded(layer, [one for one in checkpoint(0) if one[0] != "experts.1.up"], recorder)
    plan, reason = recorder.plan()
    assert plan is None
    assert "experts.0" in reason


def test_there_is_no_plan_if_a_loader_computes() -> None:
    plan, reason = learned(new_layer(converted))
    assert plan is None
    assert "gate is converted" in reason


def test_there_is_no_plan_if_the_layout_is_changed_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Swap(QuantizeMethodBase):
        """Exchanges the halves of fused weights, as some kernels want them; in a new tensor, or in place."""

        def __init__(self, in_place: bool) -> None:
            self.in_place = in_place

        def create_weights(self, *_: Any, **__: Any) -> None: ...

        def apply(self, *_: Any, **__: Any) -> Any: ...

        def process_weights_after_loading(self, layer: Any) -> None:
            swapped = layer.w13.data.roll(WIDTH, 1)
            if self.in_place:
                layer.w13.data.copy_(swapped)
            else:
                layer.w13 = nn.Parameter(swapped, requires_grad=False)

    for in_place in (False, True):
        layer = new_layer()
        layer.experts.quant_method = Swap(in_place)  # type: ignore[assignment]
        plan, reason = learned(layer)
        assert plan is None
        assert "layout" in reason or "changed" in reason
