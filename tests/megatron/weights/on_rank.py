"""What a rank does with a checkpoint: load it, run it, hand its weights and gradients back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.megatron import weights
from moe_replay.replay.adapters.megatron_settings import layout_for
from moe_replay.weights.model_folder import ModelError
from tests.distributed.megatron_models import Case, enable, fed, start
from tests.megatron.weights.models import BATCH, LENGTH, assert_same_bytes, saved_tensors, token_ids

MICRO_BATCHES = 2


def built(case: Case, folder: str, family: str | None = None, **settings: Any) -> list[Any]:
    """The chunks of this rank with the weights in a folder."""
    enable()
    start(case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp)
    chunks = weights.megatron_config(folder, family=family, **case.parallel_settings(), **settings).build()
    weights.load_hf(folder, chunks, family=family)
    return chunks


def traces(data: list[bytes]) -> list[mr.RouteTrace]:
    return [mr.RouteTrace.from_bytes(one) for one in data]


def chosen_sets(found: list[mr.RouteTrace]) -> np.ndarray:
    """(sequences, T, L, K), experts of a row in ascending order."""
    return np.sort(np.stack([trace.routed_experts for trace in found]), axis=-1)


# ---- one rank -------------------------------------------------------------------------------------------------------


def compare_alone(folder: str, family: str | None = None) -> dict[str, Any]:
    """Native and replayed logits and native routes against Transformers'; the checkpoint written again.

    family   `module:name` of a module in the folder
    """
    if family is not None:
        sys.path.insert(0, folder)
    (model,) = built(Case(1), folder, family)
    model.eval()
    reference = torch.load(f"{folder}/reference.pt", weights_only=True)
    ids = token_ids()
    layout = layout_for(model.config, [LENGTH] * BATCH)
    inputs = {**fed(layout, ids), "labels": None}
    inputs.pop("loss_mask")
    replay = mr.attach(model)
    earlier = traces(reference["earlier"])
    with torch.no_grad():
        with replay.record() as recording:
            native = model(**inputs)
        with replay.replay(mr.RouteBatch.from_traces(earlier, layout)):
            replayed = model(**inputs)
    routes = recording.traces(layout, ids)
    weights.export_hf([model], f"{folder}/again", like=folder, family=family)
    return {
        "native": _apart(native, reference["native_logits"]),
        "replayed": _apart(replayed, reference["logits"]),
        "moved": _apart(native, replayed),
        "same_routes": bool((chosen_sets(routes) == chosen_sets(traces(reference["native"]))).all()),
        "other_routes": float((chosen_sets(routes) != chosen_sets(earlier)).any(-1).mean()),
    }


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a log-probability."""
    return (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()


def write_again(folder: str, forms: list[tuple[str, str, int]]) -> None:
    """Load each checkpoint in a dtype, into a wrapped model, and write it beside itself, in files of so many bytes."""
    from megatron.core.transformer.module import Float16Module

    for form, dtype, file_bytes in forms:
        path = f"{folder}/{form}"
        settings = {"bf16": True} if dtype == "bfloat16" else {}
        chunks = built(Case(1), path, **settings)
        if settings:
            chunks = [Float16Module(chunk.config, chunk) for chunk in chunks]
        weights.export_hf(chunks, f"{path}/{dtype}", like=path, file_bytes=file_bytes)


def refusals(folder: str, broken: list[str]) -> dict[str, Any]:
    """What loading says of each broken folder, and whether the weights stayed as they were."""
    from transformers import AutoConfig

    chunks = built(Case(1), folder)
    before = [parameter.clone() for parameter in chunks[0].parameters()]
    messages = {name: _refusal(weights.load_hf, f"{folder}/{name}", chunks) for name in broken}
    kept = all(map(torch.equal, before, chunks[0].parameters()))
    weights.export_hf(chunks, f"{folder}/exported", like=f"{folder}/predicted and said so")
    unmapped = [*chunks]
    unmapped[0].decoder.layers[0].extra = nn.Linear(2, 2, bias=False)
    messages["parameter"] = _refusal(weights.load_hf, folder, unmapped)
    odd = AutoConfig.from_pretrained(folder, vocab_size=97)
    messages["vocabulary"] = _refusal(weights.megatron_config, odd, tensor_model_parallel_size=2)
    messages["expert shards"] = _refusal(
        weights.megatron_config, folder, tensor_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    return {"messages": messages, "kept": kept}


def _refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (weights.WeightMapError, ModelError) as error:
        return str(error)
    return "nothing"


# ---- several ranks --------------------------------------------------------------------------------------------------


class Training:
    """One step over micro-batches that replay Transformers' routes."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case = case
        self.chunks = built(case, folder)
        self.config = self.chunks[0].config
        self.reference = torch.load(f"{folder}/reference.pt", weights_only=True)
        self.models = [self._distributed(chunk) for chunk in self.chunks]
        self.replay = mr.attach(self.models)

    def _distributed(self, chunk: nn.Module) -> nn.Module:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        return DistributedDataParallel(self.config, DistributedDataParallelConfig(), chunk)

    def run(self) -> list[float]:
        """The losses of the micro-batches, on the last stage; gradients stay with the parameters."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config.finalize_model_grads_func = finalize_model_grads
        iterators = [iter(range(MICRO_BATCHES)) for _ in self.models]
        results = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=iterators if self.case.vpp else iterators[0],
            model=self.models if self.case.vpp else self.models[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH // MICRO_BATCHES,
            forward_only=False,
        )
        return [result["loss"].item() for result in results]

    def forward_step(self, numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Any]:
        number = next(numbers)
        part = slice(number * BATCH // MICRO_BATCHES, (number + 1) * BATCH // MICRO_BATCHES)
        layout = layout_for(self.config, [LENGTH] * (BATCH // MICRO_BATCHES))
        routes = traces(self.reference["earlier"])[part]
        batch = mr.RouteBatch.from_traces(routes, layout, self.replay.layers_of(model))
        with self.replay.replay(batch):
            losses = model(**fed(layout, token_ids()[part]))
        return losses, self.loss

    def loss(self, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach().clone()}


def compare_partitioned(case: Case, folder: str) -> dict[str, Any]:
    """Weights handed back are those read; losses and gradients are Transformers'."""
    training = Training(case, folder)
    exported = {name: tensor.clone() for name, tensor in weights.hf_tensors(training.models, like=folder)}
    assert_same_bytes(exported, saved_tensors(folder))
    losses = training.run()
    # Gradients go the way of weights: put in their place, they come back in the names of the checkpoint.
    with torch.no_grad():
        for chunk in training.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    expected = saved_tensors(f"{folder}/gradients")
    worst = (0.0, "")
    for name, found in weights.hf_tensors(training.models, like=folder):
        if not name.endswith("e_score_correction_bias"):
            apart = (found - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
            worst = max(worst, (apart.item(), name))
    return {"losses": losses, "expected": training.reference["loss"], "worst": worst[0], "name": worst[1]}
