"""Experts as grouped GEMMs: what `SequentialMLP` computes, forward and backward, with the same names of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_replay.errors import MissingExtraError, UnsupportedRouterError
from moe_replay.megatron import grouped_experts
from moe_replay.megatron.weights.local_shards import expert_views
from tests.distributed import harness
from tests.distributed.megatron_models import PRELOADED, enable, make_config, start

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.distributed
harness.PRELOADED.extend(PRELOADED)

CLAMPED = {"activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0, "add_bias_linear": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16},
    "biased": CLAMPED,
    "ungated": {"gated_linear_unit": False},
}
COUNTS = {"all": [4, 0, 7, 1, 0, 0, 2, 3], "none": [0] * 8}


def both_kinds(settings: dict[str, Any], counts: list[int]) -> dict[str, float]:
    """How far the two kinds of experts are apart, with the same weights: outputs and gradients."""
    enable()
    start()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    config = make_config(**settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    single: Any = SequentialMLP(8, config, parts, groups)
    for expert in single.local_experts:  # a reduction over one rank, after which 0.16.1 cannot add a bias in place
        expert.linear_fc2.explicit_expert_comm = True
    grouped: Any = grouped_experts.GroupedExperts(8, config, groups)
    names = dict(single.named_parameters())
    for name, view in views(grouped, config):
        names[name].data.normal_(0, 0.5)
        view.copy_(names[name].data)
    tokens = torch.tensor(counts)
    random = torch.Generator().manual_seed(0)
    rows, probs = torch.randn(sum(counts), 32, generator=random), torch.rand(sum(counts), generator=random)
    weight = torch.randn(sum(counts), 32, generator=random)
    outputs, inputs = [], []
    for experts in (single, grouped):
        entered = rows.to(config.params_dtype).requires_grad_(), probs.clone().requires_grad_()
        output, bias = experts(entered[0], tokens, entered[1])
        assert bias is None
        (output.float() * weight).sum().backward()
        outputs.append(output)
        inputs.append([part.grad for part in entered])
    found = {"output": apart(*outputs), "rows": apart(inputs[0][0], inputs[1][0]), "probs": apart(*zip_last(inputs))}
    for parameter in grouped.parameters():
        assert parameter.grad is not None
        parameter.data.copy_(parameter.grad)
    for name, view in views(grouped, config):
        gradient = names[name].grad
        found[name] = apart(torch.zeros_like(names[name]) if gradient is None else gradient, view)
    return found


def zip_last(inputs: list[list[Tensor]]) -> list[Tensor]:
    return [one[1] for one in inputs]


def views(grouped: Any, config: Any) -> list[tuple[str, Tensor]]:
    """Each weight of each expert, by its name in `SequentialMLP`."""
    return [
        (of_expert.removeprefix("decoder.mlp.experts."), view)
        for name, parameter in grouped.named_parameters()
        for of_expert, view, _ in expert_views(f"decoder.mlp.experts.{name}", parameter, config)
    ]


def apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return (one.float() - other.float()).abs().max().item() if one.numel() else 0.0


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_as_one_expert_after_another(name: str, counts: list[int]) -> None:
    (found,) = harness.run_ranks(1, both_kinds, SETTINGS[name], counts)
    assert len(found) == 3 + 8 * (4 if "add_bias_linear" in SETTINGS[name] else 2)
    tolerance = 0.2 if name == "bf16" else 1e-5
    assert max(found.values()) < tolerance, max(found.items(), key=lambda item: item[1])


# ---- adapters -------------------------------------------------------------------------------------------------------


def in_float64(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """torch's kernel has no float64: one expert after another."""
    counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat([part @ one for part, one in zip(rows.split(counts), weight, strict=True)])


def both_kinds_of_adapters(rank: int, counts: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """What adapters of single and of grouped experts compute in float64: outputs and gradients of both."""
    enable()
    start()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from moe_replay.megatron import lora

    torch.nn.functional.grouped_mm = in_float64
    config = make_config(params_dtype=torch.float64)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    single: Any = SequentialMLP(8, config, parts, groups)
    grouped: Any = grouped_experts.GroupedExperts(8, config, groups)
    torch.manual_seed(0)
    names = dict(single.named_parameters())
    for name, view in views(grouped, config):
        view.copy_(names[name].data.normal_(0, 0.5))
    of_single, of_grouped = [], []
    for name, kind, layer in (("weight1", "column", "linear_fc1"), ("weight2", "row", "linear_fc2")):
        sharding = lora.Sharding(kind, groups.expt_tp, sequence=False, expert=True)
        together: Any = lora.GroupedAdapter(getattr(grouped, name), sharding, rank, 1.5)
        grouped.lora[name] = together
        torch.nn.init.normal_(together.up, 0, 0.3)
        torch.nn.init.normal_(together.down, 0, 0.3)
        of_grouped += [together.down, together.up]
        rows = torch.arange(together.up.shape[1])
        for expert, owner in enumerate(getattr(one, layer) for one in single.local_experts):
            owner.lora = lora.LoraAdapter(owner.weight, [lora.Part(name, rows, 0, ())], sharding, rank, 1.5)
            owner.lora.down.data.copy_(together.down[expert])
            owner.lora.up.data.copy_(together.up[expert])
            owner.register_forward_hook(lora._add_to_output)
        adapters = [getattr(one, layer).lora for one in single.local_experts]
        of_single += [[one.down for one in adapters], [one.up for one in adapters]]
    for parameter in (*names.values(), grouped.weight1, grouped.weight2):
        parameter.requires_grad_(False)
    rows, probs = torch.randn(sum(counts), 32, dtype=torch.float64), torch.rand(sum(counts), dtype=torch.float64)
    weight = torch.randn_like(rows)
    outputs, inputs = [], []
    for experts in (single, grouped):
        entered = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        output, _ = experts(entered[0], torch.tensor(counts), entered[1])
        (output * weight).sum().backward()
        outputs.append(output.detach())
        inputs.append(entered[0].grad)
    assert grouped.weight1.grad is None
    gradients = [
        (torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in each]), together.grad)
        for each, together in zip(of_single, of_grouped, strict=True)
    ]
    for adapter in grouped.lora.values():
        adapter.enabled = False
    plain, _ = grouped(rows, torch.tensor(counts), probs)
    named = zip(("down1", "up1", "down2", "up2"), gradients, strict=True)
    return {"output": tuple(outputs), "rows": tuple(inputs), "changed": (plain, outputs[1]), **dict(named)}


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_adapters_as_of_one_expert_after_another(rank: int, counts: list[int]) -> None:
    (found,) = harness.run_ranks(1, both_kinds_of_adapters, rank, counts)
    plain, adapted = found.pop("changed")
    assert not any(counts) or (plain - adapted).abs().max() > 0.1
    for name, (single, grouped) in found.items():
        torch.testing.assert_close(grouped, single, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")
        assert not any(counts) or grouped.any(), name


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_experts_of_megatrons_grouped_layout() -> None:
    """GroupedMLP views its weights as (experts, in, out) when it multiplies."""
    config = SimpleNamespace(num_moe_experts=6, expert_model_parallel_size=2, hidden_size=4)
    first, second = torch.arange(4 * 3 * 10.0).view(4, 30), torch.arange(3 * 5 * 4.0).view(15, 4)
    for name, whole, shape, sharded in (("weight1", first, (10, 4), 0), ("weight2", second, (4, 5), 1)):
        each = list(expert_views(f"decoder.layers.0.mlp.experts.{name}", whole, config))
        number = name[-1]
        assert [one[0] for one in each] == [
            f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc{number}.weight" for expert in range(3)
        ]
        multiplied = whole.view(3, *reversed(shape))
        for (_, view, partition_dim), used in zip(each, multiplied, strict=True):
            torch.testing.assert_close(view, used.T)
            assert tuple(view.shape) == shape
            assert partition_dim == sharded
        each[1][1].zero_()
        assert not multiplied[1].any(), "a view is a copy"


# ---- refused ---------------------------------------------------------------------------------------------------------


def settings_of(**changes: Any) -> Any:
    plain = {
        "recompute_modules": None,
        "recompute_granularity": None,
        "fp8": None,
        "moe_apply_probs_on_input": False,
        "hidden_size": 32,
        "moe_ffn_hidden_size": 16,
        "params_dtype": torch.bfloat16,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": None,
    }
    return SimpleNamespace(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8": "hybrid"}, "found fp8"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "found recompute_modules"),
        ({"expert_tensor_parallel_size": 4}, "multiples of 16 bytes, found .*moe_ffn_hidden_size 16 in 4 shards"),
        ({"hidden_size": 36}, "multiples of 16 bytes, found hidden_size 36"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    grouped_experts.check(settings_of())
    with pytest.raises(UnsupportedRouterError, match=f"{message}.*moe_grouped_gemm = false"):
        grouped_experts.check(settings_of(**changes))


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(MissingExtraError, match=r"expected torch 2\.10 or later.*moe_grouped_gemm = false"):
        grouped_experts.check(settings_of())
