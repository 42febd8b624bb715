"""The real vLLM with LoRA: it gets the adapter alone, and samples and routes as Transformers does with that adapter."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from moe_replay.engines.base import LoraSpec, StartRequest
from moe_replay.engines.server.app import build_app
from moe_replay.engines.server.client import start as connect_to_servers
from moe_replay.errors import EngineError, EngineOptionError
from moe_replay.records import SamplingParams
from moe_replay.train.backends import lora
from moe_replay.train.config.sections import ModelConfig
from moe_replay.train.loop import train
from moe_replay.weights.identity import Probe
from moe_replay.weights.lora_adapter import PREFIX, Adapter, module_names, write_adapter
from tests.combinations import with_thorough
from tests.engines.serving import serving
from tests.engines.tiny import assert_sampled_from, reference
from tests.real_vllm.conftest import NEEDS_VLLM, SHARED
from tests.train.runs import tiny_config

pytest.importorskip("peft")
pytest.importorskip("transformers", "5")

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "router")
PARAMS = SamplingParams(n=2, max_tokens=8)
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1]]
PROBE = [number % 11 + 1 for number in range(40)]


@pytest.fixture(scope="module")
def engine(demo_files: Any) -> Iterator[Any]:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.engines.vllm.engine import start

    options = {name: value for name, value in SHARED.items() if name != "dtype"}
    request = StartRequest(
        model=str(demo_files.model),
        max_length=256,
        dtype="float32",
        lora=LoraSpec(4, ("gate", "k_proj", "o_proj", "q_proj", "v_proj")),
        options={**options, "enable_prefix_caching": True, "capture": "cross_check"},
    )
    started = start(request)
    yield started
    llm = weakref.ref(started._llm)
    started.close()
    gc.collect()
    assert llm() is None  # its destructor would fail while the interpreter ends


def base_model(files: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32).eval()


def adapted(files: Any, seed: int, targets: tuple[str, ...] = TARGETS) -> nn.Module:
    """The model of the engine with an adapter that is not zero."""
    model = base_model(files)
    torch.manual_seed(seed)
    lora.add_adapters(model, ModelConfig(lora_rank=4, lora_alpha=8, lora_target_modules=targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3)
    return model.eval()


def adapter_of(model: nn.Module) -> Adapter:
    return Adapter(
        lora.adapter_state(model, model.state_dict(), lora.adapted_weights(model), lambda whole: whole), 4, 8
    )


def probe(model: nn.Module) -> Probe:
    return Probe(token_ids=PROBE, logprobs=reference(model, np.array(PROBE)).logprobs, tolerance=1e-3)


def assert_samples_are_of(model: nn.Module, engine: Any, version: int, weights_id: str) -> None:
    for group in engine.generate(PROMPTS, PARAMS):
        for sample in group:
            assert (sample.weight_version, sample.weights_id) == (version, weights_id)
            assert_sampled_from(model, sample)


def test_the_adapter_alone_makes_the_policy(engine: Any, demo_files: Any) -> None:
    base, first, second = base_model(demo_files), adapted(demo_files, 1), adapted(demo_files, 2)
    assert_samples_are_of(base, engine, 0, "")
    engine.update_adapter(adapter_of(first), 1, probe(first), weights_id="one")
    assert_samples_are_of(first, engine, 1, "one")  # the same prompts: nothing of the prefix cache is left
    routes = [reference(model, np.array(PROBE)).trace.routed_experts for model in (base, first)]
    assert (np.sort(routes[0]) != np.sort(routes[1])).any()
    engine.update_adapter(adapter_of(second), 2, probe(second), weights_id="two")
    assert_samples_are_of(second, engine, 2, "two")


def test_adapters_are_written_in_the_type_that_vllm_computes_them_in(
    engine: Any, demo_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM itself rounds them: half the bytes of float32, the same values."""
    policy = adapted(demo_files, 1)
    monkeypatch.setattr(engine._llm.vllm_config.lora_config, "lora_dtype", torch.bfloat16)
    engine.update_adapter(adapter_of(policy), 1)
    written = load_file(Path(engine._adapter.request.lora_path, "adapter_model.safetensors"))
    given = dict(adapter_of(policy).tensors)
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in given.items())


def test_a_server_takes_the_adapter_alone(engine: Any, demo_files: Any) -> None:
    first, second = adapted(demo_files, 1), adapted(demo_files, 2)
    with serving(build_app(engine, "open sesame")) as url:
        spec = LoraSpec(4, ("gate", "k_proj", "o_proj", "q_proj", "v_proj"))
        request = StartRequest(model=str(demo_files.model), urls=(url,), token="open sesame", lora=spec)
        pool: Any = connect_to_servers(request)
        pool.update_adapter(adapter_of(first), 4, probe(first), weights_id="four")
        assert pool.bytes_sent == sum(tensor.nbytes for _, tensor in adapter_of(first).tensors)
        assert_samples_are_of(first, pool, 4, "four")
        with pytest.raises(EngineError, match="does not compute with the weights"):
            pool.update_adapter(adapter_of(first), 5, probe(second), weights_id="five")
        pool.update_adapter(adapter_of(second), 5, probe(second), weights_id="six")
        assert_samples_are_of(second, pool, 5, "six")
        pool.close()


def test_what_is_not_the_policy_is_never_sampled_from(engine: Any, demo_files: Any) -> None:
    first, second = adapted(demo_files, 1), adapted(demo_files, 2)
    with pytest.raises(EngineError, match="does not compute with the weights"):
        engine.update_adapter(adapter_of(first), 3, probe(second))
    with pytest.raises(EngineError, match="did not succeed"):
        engine.generate(PROMPTS, PARAMS)
    other = adapted(demo_files, 1, ("gate_proj", "up_proj", "down_proj"))
    with pytest.raises(EngineError, match=r"no room for [0-9]+ modules of the adapter.*replay_load_adapter"):
        engine.update_adapter(adapter_of(other), 3)
    with pytest.raises(EngineError, match="started with LoRA"):
        engine.update_weights([], 3)
    engine.update_adapter(adapter_of(first), 3, probe(first), weights_id="three")
    assert_samples_are_of(first, engine, 3, "three")


@pytest.mark.parametrize("served", with_thorough([False, True], [True]), ids=["in this process", "by a server"])
def test_training_with_r3_and_gspo_sends_the_adapter_alone(
    engine: Any, demo_files: Any, tmp_path: Path, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_REPLAY_TOKEN", "open sesame")
    with serving(build_app(engine, "open sesame")) as url:
        where = {"engine": "rollout_server", "urls": [url]} if served else {"engine": "vllm"}
        made = tiny_config(
            demo_files.model,
            demo_files.train,
            tmp_path / "run",
            model={"lora_rank": 4, "lora_alpha": 8, "lora_target_modules": TARGETS, "lora_merge": False},
            algorithm={"importance_sampling_level": "sequence", "updates_per_rollout": 2},
            rollout={**where, "lora": True, "probe_tolerance": 1e-3},
            checkpoint={"export": True},
            steps=2,
        )
        folder = train(made) if served else train(made, engine)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["routing/aligned"] != 0 and line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["mismatch/rollout_vs_old/logprob_abs_diff/mean"] < 1e-4 for line in lines)
    from peft import PeftModel

    policy = PeftModel.from_pretrained(base_model(demo_files), str(folder / "checkpoints/step-00000002/adapter"))
    assert engine.weight_version == 2
    assert_samples_are_of(policy, engine, 2, engine.weights_id)


def test_vllms_own_loader_reads_an_adapter_of_experts(demo_files: Any, tmp_path: Path) -> None:
    """Its kernels for them need a GPU; names, ranks and how it packs the experts of a layer do not."""
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    policy = adapted(demo_files, 3, ("all-linear",))
    write_adapter(adapter_of(policy), tmp_path)
    tensors = dict(adapter_of(policy).tensors)
    projections = ("gate_proj", "down_proj", "up_proj")
    layer = next(name for name in tensors if ".experts.0." in name).removeprefix(PREFIX).partition(".experts.")[0]
    numbers = {int(name.split(".experts.")[1].partition(".")[0]) for name in tensors if ".experts." in name}
    parts = [f"experts.{number}.{name}" for number in sorted(numbers) for name in projections]
    known = {*parts, *projections, "q_proj", "k_proj", "v_proj", "o_proj"}
    helper = PEFTHelper.from_local_dir(str(tmp_path), 256)
    read = LoRAModel.from_local_checkpoint(str(tmp_path), known, helper, device="cpu")
    packed = PackedLoRALayerWeights.pack_moe([read.loras[f"{layer}.{part}"] for part in parts], layer).optimize()
    for index, projection in enumerate(projections):
        for number in numbers:
            down, up = (tensors[name] for name in module_names(f"{layer}.experts.{number}.{projection}"))
            found = packed.lora_b[index][number] @ packed.lora_a[index][number]
            torch.testing.assert_close(found, 2.0 * up @ down)  # alpha 8, rank 4


def loaded_by_a_worker(layers: dict[str, Any]) -> str:
    """What a worker with these layers says to an adapter of all of them."""
    from moe_replay.engines.vllm.worker import WeightUpdates

    manager = SimpleNamespace(modules=layers, get_adapter=lambda number: SimpleNamespace(loras=layers))
    runner = SimpleNamespace(add_lora=lambda request: True, lora_manager=SimpleNamespace(_adapter_manager=manager))
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
    worker: Any = SimpleNamespace(model_runner=runner, vllm_config=config)
    return WeightUpdates.replay_load_adapter(worker, "folder")


@pytest.mark.parametrize("with_experts", [False, True], ids=["routers", "routers and experts"])
def test_routers_that_vllm_computes_without_their_adapters_are_found_and_called(
    with_experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own replacement of layers, with wrappers that need no GPU; the layer of experts calls the router."""
    manager_module = pytest.importorskip("vllm.lora.model_manager", reason=NEEDS_VLLM)
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.fused_moe import MoERunner

    from moe_replay.engines.vllm.lora import call_adapted_routers, unadapted_routers

    class Experts(MoERunner):
        def __init__(self, gate: nn.Module) -> None:
            nn.Module.__init__(self)
            self.gate = gate

    class Wrapper(BaseLayerWithLoRA):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

    model, block = nn.Module(), nn.Module()
    model.config, model.mlp = None, block
    block.gate = nn.Linear(4, 2)
    block.experts = experts = Experts(block.gate)
    monkeypatch.setattr(manager_module, "from_layer", lambda layer, *_: Wrapper(layer))
    manager = object.__new__(manager_module.LoRAModelManager)
    manager.model, manager.modules = model, {}
    manager.lora_config = SimpleNamespace(target_modules=["gate", "experts"] if with_experts else ["gate"], max_loras=1)
    manager.supports_mm = manager._is_non_gated_moe = manager._is_3d_moe_model = False
    manager.punica_wrapper_mapping = {manager_module.DEFAULT_LANGUAGE_WRAPPER_KEY: object()}
    manager.packed_modules_mapping, manager.packed_modules = {}, {}
    manager.supported_modules_to_save = set()
    manager._create_lora_modules()
    adapted = isinstance(experts.gate, BaseLayerWithLoRA)
    assert adapted is not with_experts  # if a later vLLM adapts both: nothing is left for `AdaptedRouters` to do
    assert unadapted_routers(manager.modules) == (set() if adapted else {"mlp.gate"})
    refusal = loaded_by_a_worker(manager.modules)
    assert ("computes 1 routers without their adapters" in refusal) is with_experts
    call_adapted_routers(manager.modules)
    assert loaded_by_a_worker(manager.modules) == ""
    assert experts.gate is manager.modules["mlp.gate"]
    assert not unadapted_routers(manager.modules)


def test_experts_on_cpu_are_refused_before_anything_starts() -> None:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.engines.vllm.engine import start

    with pytest.raises(EngineOptionError, match=r"vLLM on CPU does not support.*rollout\.lora = false"):
        start(StartRequest(model="nowhere", lora=LoraSpec(4, ("experts", "q_proj"))))
    with pytest.raises(EngineOptionError, match="at most 512"):
        start(StartRequest(model="nowhere", lora=LoraSpec(1024, ("q_proj",))))
