"""What recomputed layers were given waits in host memory: the same gradients, by the routes of their forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("transformers")

import moe_replay as mr
from moe_replay.train.backends import fsdp_loading
from moe_replay.train.backends.compilation import CompiledLayers
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.backends.fsdp_loading import recompute_layers
from moe_replay.train.loop import train
from moe_replay.weights.model_folder import ModelError
from tests.combinations import with_thorough
from tests.models import gradients, random_ids, recorded, tiny_qwen3_moe
from tests.replay.adapters.families import available_families, tiny_model

FAMILIES = tuple(family for family in available_families() if family != "jetmoe")  # Transformers cannot recompute it
QUICK = ("qwen3_moe", "gpt_oss", "deepseek_v3")
COPIES = {"gemma4_text": 6, "longcat_flash": 2, "zaya": 5}
"""Of a forward, where there is not one for each layer: embeddings of each layer, two layers in one, a residual."""
FED = [random_ids(2, width, seed=width, vocabulary=40) for width in (7, 11, 11)]


class Copies:
    """What autograd has packed into host memory, and how much of it has been read back."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0

    def hooks(self, **options: Any) -> torch.autograd.graph.saved_tensors_hooks:
        assert options == {"pin_memory": True}
        real = torch.autograd.graph.save_on_cpu(**options)

        def pack(tensor: Tensor) -> Any:
            packed = real.pack_hook(tensor)
            assert packed[1].untyped_storage()._cdata != tensor.untyped_storage()._cdata, "a copy, on a CPU too"
            assert torch.equal(packed[1], tensor)
            self.packed.append(packed[1])
            return packed

        def unpack(packed: Any) -> Tensor:
            self.unpacked += 1
            return real.unpack_hook(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    found = Copies()
    monkeypatch.setattr(fsdp_loading, "save_on_cpu", found.hooks)
    return found


def outcome(model: Any, replay: mr.RouterReplay, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Record, move the routers, then replay three micro-batches, whose backwards run in another order."""
    batches = recorded(replay, run, FED)
    losses = []
    for ids, batch in zip(FED, batches, strict=True):
        with replay.replay(batch):
            losses.append(run(ids).float().square().mean())
    for number in (1, 2, 0):
        losses[number].backward()
    return {"loss": torch.stack(losses).detach(), **gradients(model)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", with_thorough(FAMILIES, [name for name in FAMILIES if name not in QUICK]))
def test_gradients_are_those_without_offload(family: str, copies: Copies) -> None:
    outcomes = []
    for offloaded in (False, True):
        model = tiny_model(family).train()
        recompute_layers(model, offloaded=offloaded)
        outcomes.append(outcome(model, mr.attach(model), lambda ids, m=model: m(input_ids=ids, use_cache=False)[0]))
        assert bool(copies.packed) is offloaded
    assert_same(outcomes[1], outcomes[0])
    number = COPIES.get(family) or tiny_model(family).config.get_text_config().num_hidden_layers
    assert len(copies.packed) == copies.unpacked == number * len(FED)
    fed = [tuple(ids.shape) for ids in FED for _ in range(number)]
    assert [tuple(one.shape[:2]) for one in copies.packed] == fed


# ---- a policy --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(num_hidden_layers=4).save_pretrained(made)
    return made


def entering(policy: FsdpBackend) -> list[StorageWeakRef]:
    """Return what becomes a list of the memory that enters decoder layers in forwards."""
    found: list[StorageWeakRef] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            found.append(StorageWeakRef(inputs[0].untyped_storage()))

    for layer in policy.model.model.layers:
        layer.register_forward_pre_hook(note)
    return found


@pytest.mark.parametrize("model", [{}, {"base_dtype": "fp8"}], ids=["bfloat16", "fp8"])
def test_autograd_lets_go_of_the_hidden_states_of_a_policy_with_adapters(
    model: dict[str, Any], folder: Path, group: None, copies: Copies
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers", "5")
    from tests.train.test_shared_base import backend

    outcomes, freed = [], []
    for recomputed in (True, "offload"):
        policy = backend(folder, model={"dtype": "bfloat16", "gradient_checkpointing": recomputed, **model})
        memory = entering(policy)
        logits = policy.model.train()(input_ids=FED[0]).logits
        freed.append([reference.expired() for reference in memory])
        logits.square().mean().backward()
        outcomes.append({n: p.grad.full_tensor() for n, p in policy.model.named_parameters() if p.grad is not None})
        outcomes[-1]["logits"] = logits.detach()
        policy.close()
    assert_same(outcomes[1], outcomes[0])
    assert len(outcomes[0]) > 8
    # Transformers has the first layer's require a gradient, for frozen embeddings: a leaf, which autograd keeps.
    assert freed == [[False] * 4, [False, True, True, True]]
    assert len(copies.packed) == copies.unpacked == 4
    assert {tuple(one.shape) for one in copies.packed} == {(*FED[0].shape, 32)}


def test_compiled_layers(copies: Copies) -> None:
    outcomes = []
    for offloaded in (False, True):
        model = tiny_qwen3_moe(num_hidden_layers=3, experts_implementation="batched_mm").train()
        recompute_layers(model, offloaded=offloaded)
        replay, layers = mr.attach(model), CompiledLayers("aot_eager")
        replay.keep_routers_eager()
        layers.add(model.model.layers)
        outcomes.append(outcome(model, replay, lambda ids, m=model: m(input_ids=ids, use_cache=False).logits))
        assert layers.failure is None
    assert_same(outcomes[1], outcomes[0])
    assert len(copies.packed) == copies.unpacked == 3 * len(FED)


def test_a_head_behind_the_context(copies: Copies) -> None:
    """The memory of the hidden states names no pass any more; that of the position embeddings does."""
    outcomes = []
    for offloaded in (False, True):
        model: Any = tiny_qwen3_moe(num_hidden_layers=3).train()
        recompute_layers(model, offloaded=offloaded)
        replay = mr.attach(model)
        hidden = []

        def body(ids: Tensor, model: Any = model) -> Tensor:
            return model.model(input_ids=ids, use_cache=False).last_hidden_state

        batches = recorded(replay, body, FED)
        for ids, batch in zip(FED, batches, strict=True):
            with replay.replay(batch):
                hidden.append(body(ids))
        sum(model.lm_head(one).square().mean() for one in hidden).backward()
        outcomes.append(gradients(model))
    assert_same(outcomes[1], outcomes[0])
    assert copies.unpacked == 3 * len(FED)


def test_layers_that_are_given_no_positional_tensor_are_refused() -> None:
    model: Any = tiny_qwen3_moe(num_hidden_layers=2).train()
    recompute_layers(model, offloaded=True)
    with pytest.raises(ModelError, match=r"cannot be offloaded.*keywords only"):
        model.model.layers[1](hidden_states=torch.zeros(1, 2, 32))


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_a_run_is_the_same(mode: str, config: Any, metrics_of: Any, copies: Copies) -> None:
    pytest.importorskip("peft")
    lines = {}
    for recomputed in (True, "offload"):
        model = {"gradient_checkpointing": recomputed, "lora_rank": 4, "lora_target_modules": ["all-linear"]}
        made = train(config(str(recomputed), steps=2, model=model, replay={"mode": mode}))
        lines[recomputed] = metrics_of(made)
        assert bool(copies.packed) is (recomputed == "offload")
    assert lines["offload"] == lines[True]
    assert len(copies.packed) == copies.unpacked
