"""Frozen weights in memory of an engine: the same results bit for bit, copies where memory does not fit, the probe."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_replay.errors import EngineError
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.backends.shared_base import SharedBase, SharedWeightsError
from moe_replay.train.config.one_copy import two_copies_because
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.shared import ExportedWeights, NamedRows, OpenedWeights, digests, place_of
from tests.models import random_ids, tiny_qwen3_moe
from tests.support.policy import all_weights
from tests.train.test_host_memory import bytes_away

pytest.importorskip("peft")
pytest.importorskip("transformers", "5")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "tie_word_embeddings": True}
    models = {
        "qwen3_moe": tiny_qwen3_moe(num_hidden_layers=2),
        "mixtral": MixtralForCausalLM(MixtralConfig(**sizes, **heads)),
    }
    made = {name: tmp_path_factory.mktemp(name) for name in models}
    for name, model in models.items():
        model.save_pretrained(made[name])
    return made


def weights_of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """The weights as an engine has them: q, k and v of a layer are one tensor, the vocabulary has rows of padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: nn.Parameter(one.detach().clone(), requires_grad=False) for name, one in model.named_parameters()}


def rows_of(weights: dict[str, nn.Parameter]) -> Iterator[NamedRows]:
    for name, one in weights.items():
        if re.search(r"\.[kv]_proj\.", name):
            continue
        if ".q_proj." in name:
            parts = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
            fused = nn.Parameter(torch.cat([weights[part] for part in parts]), requires_grad=False)
            first = 0
            for part in parts:
                yield NamedRows(part, fused, slice(first, first + len(weights[part])))
                first += len(weights[part])
        elif "embed_tokens" in name:
            yield NamedRows(name, nn.Parameter(torch.cat([one, torch.zeros(31, one.shape[1])]), requires_grad=False))
        else:
            yield NamedRows(name.replace(".mlp.", ".block_sparse_moe."), one)


def config_of(folder: Path, **sections: Any) -> TrainConfig:
    model = {
        **{"path": str(folder), "dtype": "float32", "lora_rank": 4},
        **{"lora_target_modules": ("all-linear", "router")},
        **sections.pop("model", {}),
    }
    return TrainConfig(model=model, data={"path": "x.jsonl"}, **sections)


def backend(folder: Path, base: SharedBase | None = None, **sections: Any) -> FsdpBackend:
    """A policy with adapters that are not zero."""
    torch.manual_seed(1)
    policy = FsdpBackend(config_of(folder, **sections), str(folder), CPU, base)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.to_local().normal_(0, 0.1)
    return policy


def logits_and_gradients(policy: FsdpBackend) -> dict[str, torch.Tensor]:
    logits = policy.model.train()(input_ids=random_ids(2, 12)).logits
    logits.square().mean().backward()
    found = {n: p.grad.full_tensor() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy._optimizer.step()
    policy._optimizer.zero_grad()
    return found | {
        "logits": logits.detach(),
        "after": policy.model.eval()(input_ids=random_ids(2, 12)).logits.detach(),
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_policy_in_memory_of_the_engine_computes_the_same_bit_for_bit(
    family: str, folders: dict[str, Path], group: None
) -> None:
    plain = backend(folders[family])
    expected, sent = logits_and_gradients(plain), dict(all_weights(plain))
    exported = ExportedWeights(rows_of(weights_of(folders[family])), CPU)
    base = SharedBase(exported.message(), CPU)
    policy = backend(folders[family], base)
    base.check(before := exported.digests())
    assert not base.copied_bytes
    frozen = {p.untyped_storage().data_ptr() for p in policy.model.parameters() if not p.requires_grad}
    assert len(frozen) == 1, "all frozen parameters are in the one memory that was opened"
    assert base.num_bytes == sum(p.nbytes for p in policy.model.parameters() if not p.requires_grad)
    found = logits_and_gradients(policy)
    assert found.keys() == expected.keys()
    assert len([name for name in found if ".experts." in name]) > 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    merged = dict(all_weights(policy))
    assert all(torch.equal(merged[name], values) for name, values in sent.items())
    base.check(exported.digests())
    assert exported.digests() == before
    policy.close()
    assert exported.digests() == before
    plain.close()


def test_what_does_not_fit_is_copied_and_named(folders: dict[str, Path], group: None) -> None:
    weights = weights_of(folders["qwen3_moe"])
    expert = next(name for name in weights if name.endswith("experts.down_proj"))
    weights[expert].data = weights[expert].data.flip(0)
    norms = [name for name in weights if name.endswith("input_layernorm.weight")]
    weights[norms[0]].data = weights[norms[0]].data.double()
    weights[norms[1]].data = torch.ones(7)
    missing = next(name for name in weights if name.endswith("mlp.gate.weight"))
    transposed = next(name for name in weights if name.endswith("mlp.down_proj.weight"))
    weights[transposed].data = weights[transposed].data.T.contiguous().T
    rows = [row for row in rows_of(weights) if place_of(row.name) != place_of(missing)]
    rows += [NamedRows("visual.layers.1.o_proj.weight", weights[expert])]  # a second tensor in its place
    base = SharedBase(ExportedWeights(rows, CPU).message(), CPU)
    policy, plain = backend(folders["qwen3_moe"], base), backend(folders["qwen3_moe"])
    expected = logits_and_gradients(plain)
    assert all(torch.equal(values, expected[name]) for name, values in logits_and_gradients(policy).items())
    text = "\n".join(base.describe())
    assert re.search(r"KiB in 1 tensors \(mlp\.experts\.down_proj\), of other values", text)
    assert "(input_layernorm.weight), float64 in the engine, float32 in the trainer" in text
    assert "(input_layernorm.weight), of another shape in the engine" in text
    names = ", ".join(sorted(["mlp.down_proj.weight", "mlp.gate.weight", "self_attn.o_proj.weight"]))
    assert f"3 tensors ({names}), repacked or under another name" in text
    assert (
        base.copied_bytes
        == sum(
            weights[name].numel() * 4
            for name in (expert, missing, transposed, "model.layers.1.self_attn.o_proj.weight")
        )
        + 2 * 32 * 4
    )
    policy.close()
    plain.close()


def test_a_change_of_the_memory_is_found_on_either_side(folders: dict[str, Path], group: None) -> None:
    weights = weights_of(folders["qwen3_moe"])
    exported = ExportedWeights(rows_of(weights), CPU)
    base = SharedBase(exported.message(), CPU)
    policy = backend(folders["qwen3_moe"], base)
    first = exported.digests()
    base.check(first)
    others = dict(first, **{place_of("layers.1.mlp.gate.weight"): "0" * 32})
    with pytest.raises(
        SharedWeightsError, match=r"as the engine sees them.*1 of [0-9]+ tensors.*gate\.weight of layer 1"
    ):
        base.check(others)
    norm = weights["model.norm.weight"]
    norm.data[3] += 1
    with pytest.raises(SharedWeightsError, match=r"as the trainer sees them.*norm\.weight.*share_weights = false"):
        base.check(exported.digests())
    norm.data[3] -= 1
    base.check(exported.digests())
    policy.close()


def test_memory_of_the_engine_is_not_offloaded(folders: dict[str, Path], group: None) -> None:
    exported = ExportedWeights(rows_of(weights_of(folders["qwen3_moe"])), CPU)
    base = SharedBase(exported.message(), CPU)
    sections = {"backend": {"offload": True}, "rollout": {"engine": "vllm", "sleep": True}}
    policy = backend(folders["qwen3_moe"], base, **sections)
    before = policy.model.eval()(input_ids=random_ids(2, 12)).logits.detach()
    policy.offload()
    away = sum(map(bytes_away, policy._offload._memory.values()))
    assert away == sum(p.to_local().nbytes for p in policy.model.parameters() if p.requires_grad)
    base.check(exported.digests())
    policy.reload()
    assert torch.equal(policy.model.eval()(input_ids=random_ids(2, 12)).logits, before)
    policy.close()


def test_the_trainer_holds_less_memory(tmp_path: Path, group: None) -> None:
    sizes = {"num_hidden_layers": 1, "mlp_only_layers": [], "vocab_size": 400_000, "tie_word_embeddings": True}
    tiny_qwen3_moe(**sizes).save_pretrained(tmp_path)
    exported = ExportedWeights(rows_of(weights_of(tmp_path)), CPU)
    message, own_bytes = exported.message(), {}
    for name in ("own", "shared"):
        before = private_bytes()
        policy = backend(tmp_path, SharedBase(message, CPU) if name == "shared" else None)
        own_bytes[name] = private_bytes() - before
        policy.close()
        del policy
    assert own_bytes["own"] - own_bytes["shared"] > 0.9 * 400_000 * 32 * 4, own_bytes


def private_bytes() -> int:
    """Memory of all tensors of this process that no other process shares."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if line.split()[1][3] == "s"]
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"]
    sizes = dict(map(memory_of, tensors))
    return sum(size for start, size in sizes.items() if not any(low <= start < high for low, high in ranges))


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins, and its bytes; none of tensors that a compiler has left behind."""
    try:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return 0, 0


def test_messages_that_cannot_be_true_are_refused() -> None:
    weight = NamedRows("norm.weight", nn.Parameter(torch.ones(8)))
    exported = ExportedWeights([weight], CPU)
    message = json.loads(exported.message())
    assert torch.equal(OpenedWeights(json.dumps(message), CPU).tensors[place_of("norm.weight")], torch.ones(8))
    for change, words in [
        ({"device": "elsewhere"}, "on another device"),
        ({"tensors": [message["tensors"][0] | {"shape": [1000]}]}, "not within its memory"),
        ({"tensors": [message["tensors"][0] | {"memory": 1}]}, "no known type or memory"),
        ({"memories": [message["memories"][0] | {"file": "/etc/hostname"}]}, "not one in memory"),
        ({"memories": [message["memories"][0] | {"file": "/proc/1/fd/99999"}]}, "cannot be opened"),
        ({"code": "1"}, "unreadable"),
    ]:
        with pytest.raises(EngineError, match=words):
            OpenedWeights(json.dumps(message | change), CPU)


def test_digests_see_values_signs_and_order() -> None:
    values = torch.arange(12.0).view(3, 4)
    changed = values.clone()
    changed[2, 3] += 1e-6
    different = [values, values.flip(0), values.T.contiguous(), changed, -values, values.bfloat16(), values[:2]]
    assert len({digests({"": one})[""] for one in different}) == len(different)
    assert digests({"": values.clone()}) == digests({"": values})
    assert digests({"": torch.zeros(1)}) != digests({"": -torch.zeros(1)})


@pytest.mark.parametrize(
    ("sections", "ranks", "device", "words"),
    [
        ({}, 1, "cpu", None),
        ({}, 1, "cuda", "set rollout.options.kv_cache_memory_bytes"),
        ({"rollout": {"options": {"kv_cache_memory_bytes": 2**30}}}, 1, "cuda", None),
        ({"rollout": {"share_weights": False}}, 1, "cpu", "share_weights = false"),
        ({"rollout": {"engines_per_node": 1}}, 1, "cpu", "not vLLM in the process"),
        ({"rollout": {"engine": "rollout_server", "urls": ["http://a:1"]}}, 1, "cpu", "not vLLM in the process"),
        ({"backend": {"kind": "megatron"}}, 1, "cpu", "Megatron-Core"),
        ({}, 2, "cpu", "2 ranks"),
        ({"rollout": {"options": {"tensor_parallel_size": 2}}}, 1, "cpu", "over 2 devices"),
    ],
)
def test_when_there_is_one_copy(
    sections: dict[str, Any], ranks: int, device: str, words: str | None, tmp_path: Path
) -> None:
    rollout = {"engine": "vllm", "lora": True, **sections.get("rollout", {})}
    found = two_copies_because(config_of(tmp_path, **{**sections, "rollout": rollout}), ranks, device)
    assert (found is None) if words is None else words in str(found)
