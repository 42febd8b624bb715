"""Updates of a model that copies weights past their loaders, with vLLM's own reload and no engine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from moe_replay.engines.vllm.weights import CopiedWeights

pytest.importorskip("vllm")


class Layer(nn.Module):
    """One decoder layer: a module with experts, and one with sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.attn = nn.Module(), nn.Module()
        self.experts.w13_weight, self.experts.w2_weight = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
        self.attn.sinks = nn.Parameter(torch.zeros(4))


class GptOssInSmall(nn.Module):
    """Copies every tensor into the parameter of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def updated(model: nn.Module, chunks: list[dict[str, torch.Tensor]], *, with_memory: bool = True) -> CopiedWeights:
    """Send weights in chunks, as the worker extension does."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    copied = CopiedWeights(model)
    for chunk in chunks:
        if with_memory:
            copied.expect(chunk)
        copied.process(model.load_weights(chunk.items()) if with_memory else None)  # type: ignore[operator]
        if not with_memory:
            model.load_weights(chunk.items())  # type: ignore[operator]
    finalize_layerwise_reload(model, None)
    return copied


@pytest.mark.slow
def test_weights_arrive_in_the_memory_that_cuda_graphs_read() -> None:
    model = GptOssInSmall()
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    new = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    names = sorted(new)
    updated(model, [{name: new[name] for name in names[:2]}, {name: new[name] for name in names[2:]}])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, new[name]), name
        assert parameter.data_ptr() == addresses[name]


def test_without_memory_they_would_go_nowhere() -> None:
    model = GptOssInSmall()
    new = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    updated(model, [new], with_memory=False)
    assert all((parameter == 0).all() for parameter in model.parameters())


def test_a_module_that_lacks_a_weight_is_not_converted() -> None:
    model = GptOssInSmall()
    new = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    del new["layers.1.experts.w2_weight"]
    updated(model, [new])
    values = {name: float(parameter.mean()) for name, parameter in model.named_parameters()}
    assert values["layers.0.experts.w2_weight"] == values["layers.1.attn.sinks"] == 1
    assert values["layers.1.experts.w13_weight"] == values["layers.1.experts.w2_weight"] == 0  # as before


def test_other_models_have_none() -> None:
    class Other(GptOssInSmall):
        """Loads through loaders."""

    copied = CopiedWeights(Other())
    copied.expect(["layers.0.attn.sinks"])
    copied.process({"layers.0.attn.sinks"})
    assert copied._waiting == {}


@pytest.mark.parametrize(("rows", "missing"), [(0, []), (5, ["head"])])
def test_a_worker_whose_part_of_the_vocabulary_is_padding_misses_nothing(rows: int, missing: list[str]) -> None:
    """vLLM pads a small vocabulary, and the last worker of a tensor-parallel engine may have padding alone."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbeddingShardIndices
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from moe_replay.engines.vllm.worker import _unloaded

    model = nn.Module()
    head = model.head = nn.Linear(4, 32, bias=False)
    head.num_embeddings_padded = 64
    head.shard_indices = VocabParallelEmbeddingShardIndices(32, 64, 64, 64, 32, 32 + rows, 64, 64)  # type: ignore[assignment]
    get_layerwise_info(head).kernel_tensors = ({"weight": head.weight}, {})  # as in an update that brought it nothing
    assert _unloaded(model) == (missing, [])
