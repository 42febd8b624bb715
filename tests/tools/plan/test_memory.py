"""The memory of a run by plan's arithmetic: what the parts are, and that both recipes of Qwen3-30B fit 80 GB."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")

from moe_replay.errors import LayoutError
from moe_replay.tools.plan.costs import plan_speed, plan_traffic
from moe_replay.tools.plan.proposal import propose
from moe_replay.train.backends import lora
from moe_replay.train.config.file import load_config
from moe_replay.train.config.sections import ModelConfig
from moe_replay.train.setup import launch
from moe_replay.train.setup.memory_plan import GIB, MemoryPlan, plan_memory, smallest_remedy, with_memory_used
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes
from tests.models import tiny_qwen3_moe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
QWEN3_30B: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048},
    **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    **{"tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
CARD_GIB = 79.6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3-30b")
    (made / "config.json").write_text(json.dumps(QWEN3_30B))
    return made


@pytest.fixture(scope="module")
def sizes(folder: Path) -> ModelSizes:
    return ModelSizes.of(read_config(folder))


def plan(sizes: ModelSizes, recipe: str, *overrides: str) -> MemoryPlan:
    config = load_config(RECIPES / f"qwen3-30b-a3b-{recipe}.toml", overrides)
    return plan_memory(config, sizes, gpus=8, gpu_gib=CARD_GIB)


def test_parameters_are_counted_by_kind(sizes: ModelSizes) -> None:
    assert sizes.total == 30_532_122_624, "as the model's page says: 30.5 billion"
    assert sizes.experts == 48 * 128 * 3 * 2048 * 768
    assert sizes.embedding == 151936 * 2048
    assert not sizes.tied


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("qwen3-30b-*.toml")))
def test_the_recipes_fit_eight_cards_of_80_gb(sizes: ModelSizes, recipe: str) -> None:
    """Or as many as the recipe itself asks for."""
    config = load_config(RECIPES / f"{recipe}.toml")
    gpus = 1 if recipe.endswith("-1gpu") else config.cluster.ranks if config.cluster.launcher == "ray" else 8
    found = plan_memory(config, sizes, gpus=gpus, gpu_gib=CARD_GIB)
    assert found.fits, str(found)
    assert "DOES NOT FIT" not in str(found)


def test_one_card_holds_the_frozen_weights_once(sizes: ModelSizes) -> None:
    def on_one(*overrides: str) -> MemoryPlan:
        config = load_config(RECIPES / "qwen3-30b-a3b-lora-1gpu.toml", overrides)
        return plan_memory(config, sizes, gpus=1, gpu_gib=CARD_GIB)

    once, twice = on_one(), on_one("--rollout.share_weights", "false")
    assert once.fits
    assert not twice.fits
    weights, adapters = 2 * sizes.total, sizes.adapter_parameters(16, ["all-linear"])
    for phase, parts in once.phases.items():
        assert parts["shared weights"] == weights
        assert parts.get("weights", 0) == 0
        assert "engine weights" not in parts
        assert parts.get("adapters", 0) == (0 if phase == "sample" else 4 * adapters)
    assert once.phases["optimizer step"]["optimizer state"] == 8 * adapters
    assert once.phases["forward, backward"]["gradients"] == 4 * adapters
    assert once.host == 12 * adapters, "the trainer's alone: vLLM keeps no second copy there while it sleeps"
    assert twice.host == 12 * adapters + weights + weights
    assert twice.phases["sample"]["engine"] == sum(once.phases["sample"][name] for name in ("shared weights", "engine"))
    assert max(on_one("--backend.offload", "false").totals.values()) > max(once.totals.values())
    attention = on_one("--model.lora_target_modules", '["q_proj", "o_proj"]')
    of_experts = [memory.phases["sample"]["engine"] > 14 * GIB for memory in (once, attention)]
    assert of_experts == [True, False], "vLLM holds 7 GiB more for adapters of experts while it samples"


def test_frozen_weights_in_8_bits_take_half(sizes: ModelSizes) -> None:
    def on_one(*overrides: str) -> MemoryPlan:
        alone = ("--rollout.share_weights", "false", *overrides)
        return plan_memory(load_config(RECIPES / "qwen3-30b-a3b-lora-1gpu.toml", alone), sizes, gpus=1, gpu_gib=141.0)

    plain, narrow = on_one().phases["score"], on_one("--model.base_dtype", "fp8").phases["score"]
    others = 2 * 2 * sizes.embedding  # embedding and head stay in bfloat16
    assert narrow["weights"] == pytest.approx(others + (plain["weights"] - others) / 2, rel=1e-3)
    assert narrow["gathered"] >= 2 * sizes.largest, "one tensor is dequantised at a time"
    with pytest.raises(LayoutError, match="for one rank"):
        plan(sizes, "lora", "--model.base_dtype", "fp8")


@pytest.mark.parametrize(
    "targets", [("q_proj", "o_proj"), ("all-linear",), ("gate_proj", "up_proj"), ("down_proj", "router")]
)
def test_adapters_are_counted_as_peft_makes_them(targets: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    model = tiny_qwen3_moe()
    sizes = ModelSizes.of(model.config)
    lora.add_adapters(model, ModelConfig(lora_rank=4, lora_target_modules=targets))
    made = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sizes.adapter_parameters(4, targets) == made
    more = sizes.adapter_parameters(4, targets, split=True) - made
    assert more == (4 * 3 * 8 * 32 if {"all-linear", "up_proj"} & {*targets} else 0), "one more lora_A an expert"


def test_adapters_on_megatron_are_what_is_trained(sizes: ModelSizes) -> None:
    whole = plan(sizes, "megatron").phases["optimizer step"]
    found = plan(sizes, "megatron", "--model.lora_rank", "16", "--algorithm.beta", "0.1").phases["optimizer step"]
    assert found["weights"] == whole["weights"]
    assert found["reference"] == 0, "the policy without its adapters"
    trained = sizes.adapter_parameters(16, ["q_proj", "k_proj", "v_proj", "o_proj"]) / sizes.total
    assert found["adapters"] == pytest.approx(trained * whole["weights"])
    for name in ("gradients", "optimizer state"):
        assert found[name] == pytest.approx(trained * whole[name])


@pytest.mark.parametrize("recipe", ["fsdp", "megatron"])
def test_without_offload_they_do_not(sizes: ModelSizes, recipe: str) -> None:
    found = plan(sizes, recipe, "--backend.offload", "false")
    assert not found.fits
    assert "forward, backward" in str(found).split("DOES NOT FIT")[0]
    assert not found.host


def test_ranks_that_share_sequences_divide_activations(sizes: ModelSizes) -> None:
    alone, shared = (
        plan(sizes, "fsdp", "--backend.context_parallel", str(size), "--model.gradient_checkpointing", "true")
        for size in (1, 4)
    )
    for phase in ("score", "forward, backward"):
        assert shared.phases[phase]["activations"] == pytest.approx(alone.phases[phase]["activations"] / 4)
        assert shared.phases[phase]["weights"] == alone.phases[phase]["weights"]


def test_bytes_of_the_trainer(sizes: ModelSizes) -> None:
    parameters = sizes.total
    found = plan(sizes, "fsdp").phases["optimizer step"]
    assert found["weights"] + found["gradients"] + found["optimizer state"] == pytest.approx(16 * parameters / 8)
    one_step = plan(sizes, "megatron").phases["optimizer step"]
    held = one_step["weights"] + one_step["gradients"] + one_step["optimizer state"]
    assert 18 * parameters / 8 < held < 18.5 * parameters / 8, "embeddings are on some stages only, experts on one rank"


def test_logits_follow_the_chunk_and_activations_the_micro_batch(sizes: ModelSizes) -> None:
    base = plan(sizes, "fsdp").phases["forward, backward"]
    whole = plan(sizes, "fsdp", "--batch.logit_chunk", "16384").phases["forward, backward"]
    assert whole["logits"] > base["logits"] + 15360 * 151936 * 14 - 1
    longer = plan(sizes, "fsdp", "--batch.tokens_per_micro_batch", "32768").phases["forward, backward"]
    assert longer["activations"] == pytest.approx(2 * base["activations"])
    every_layer = plan(sizes, "fsdp", "--model.gradient_checkpointing", "false").phases["forward, backward"]
    assert every_layer["activations"] > 10 * base["activations"]


def test_hidden_states_in_host_memory(sizes: ModelSizes, folder: Path) -> None:
    def long(choice: str) -> MemoryPlan:
        return plan(sizes, "long", "--model.gradient_checkpointing", choice)

    config = load_config(RECIPES / "qwen3-30b-a3b-long.toml")
    tokens = config.batch.tokens_per_micro_batch / config.backend.context_parallel
    states = 2 * 2048 * tokens
    kept, offloaded = long("true"), long("offload")
    difference = kept.phases["forward, backward"]["activations"] - offloaded.phases["forward, backward"]["activations"]
    assert difference == 47 * states, "of 48 layers those of one are on the device"
    pinned = 2 ** math.ceil(math.log2(states))  # as torch's allocator of pinned memory rounds
    assert offloaded.host - kept.host == 8 * 48 * pinned
    assert kept.phases["score"] == offloaded.phases["score"]
    proposed = propose(
        load_config(RECIPES / "qwen3-30b-a3b-long.toml", ["--model.gradient_checkpointing", "offload"]),
        sizes,
        read_config(folder),
        gpus=8,
        gpu_gib=CARD_GIB,
    )
    assert 'gradient_checkpointing = "offload"' in str(proposed)


def test_the_engine_on_the_same_cards(sizes: ModelSizes) -> None:
    found = plan(sizes, "megatron")
    assert found.phases["sample"]["engine"] == pytest.approx(0.8 * CARD_GIB * GIB)
    assert set(found.phases["sample"]) == {"engine", "context"}, "the trainer is in host memory"
    assert found.phases["weight sync"]["engine weights"] == pytest.approx(2 * sizes.total / 8)
    assert found.host > 14 * sizes.total
    kept = plan(sizes, "megatron", "--rollout.sleep_level", "1")
    assert kept.host - found.host == pytest.approx(2 * sizes.total)
    halves = ("--rollout.engines_per_node", "2", "--rollout.options", "tensor_parallel_size", "4")
    asleep, gone = (plan(sizes, "megatron", "--rollout.sleep_level", level, *halves) for level in "12")
    assert asleep.host - gone.host == pytest.approx(2 * 2 * sizes.total), "each engine keeps its own copy"
    replicas = plan(sizes, "megatron", "--rollout.options", "tensor_parallel_size", "2", "data_parallel_size", "4")
    share = 2 * (sizes.experts / 8 + (sizes.total - sizes.experts) / 2)
    assert replicas.phases["weight sync"]["engine weights"] == pytest.approx(share)
    options = ["--rollout.options", "tensor_parallel_size", "1", "gpu_memory_utilization", "0.5"]
    with pytest.raises(LayoutError, match="do not fit into its GPU memory"):
        plan(sizes, "megatron", *options)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moe_replay.cli.plan import PlanCommand

    recipe = str(RECIPES / "qwen3-30b-a3b-megatron.toml")
    PlanCommand(model=str(folder), recipe=recipe)()
    assert "optimizer step" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        PlanCommand(model=str(folder), recipe=recipe, gpu_gib=40.0)()
    assert ended.value.code == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_stages_are_counted_one_by_one(sizes: ModelSizes) -> None:
    """Of 48 layers the first two are dense here; embedding and head are on the outer stages."""
    experts, others = sizes.by_layer[0]
    uneven = replace(sizes, by_layer=((0, others), (0, others), *sizes.by_layer[2:]))
    words = ["--backend.pipeline_parallel", "4", "--backend.tensor_parallel", "1", "--backend.context_parallel", "1"]
    words += ["--backend.expert_parallel", "2"]
    config = load_config(RECIPES / "qwen3-30b-a3b-megatron.toml", words)
    found = plan_memory(config, uneven, gpus=8, gpu_gib=CARD_GIB)
    assert len(found.stages) == 4
    assert max(found.stages) == max(found.totals.values())
    even = plan_memory(config, sizes, gpus=8, gpu_gib=CARD_GIB)
    fewer = 2 * experts / 2  # of two layers, half on each rank; 2 bytes of weights and 4 of gradients
    assert even.stages[0] - found.stages[0] == pytest.approx(6 * fewer)
    assert found.stages[1:] == even.stages[1:]
    assert even.phases["optimizer step"]["weights"] == 2 * (12 * (experts / 2 + others) + sizes.embedding)
    assert "fullest phase of each pipeline stage in GiB: 0: " in str(found)
    ends = ["--backend.megatron", "num_layers_in_first_pipeline_stage", "9", "num_layers_in_last_pipeline_stage", "9"]
    config = load_config(RECIPES / "qwen3-30b-a3b-megatron.toml", [*words, *ends])
    middle = plan_memory(config, sizes, gpus=8, gpu_gib=CARD_GIB)
    assert middle.stages[0] < even.stages[0]
    assert middle.stages[1] > even.stages[1]


def test_the_remedy_fits(sizes: ModelSizes) -> None:
    overrides = ["--backend.offload", "false", "--batch.tokens_per_micro_batch", "65536"]
    config = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml", overrides)
    assert not plan(sizes, "fsdp", *overrides).fits
    remedy = smallest_remedy(config, sizes, gpus=8, gpu_gib=CARD_GIB)
    assert remedy is not None
    assert "GPUs" not in remedy
    words = [word for change in remedy.split(" and ") for word in f"--{change}".split(" = ")]
    assert plan(sizes, "fsdp", *overrides, *words).fits
    assert (smallest_remedy(config, sizes, gpus=1, gpu_gib=CARD_GIB) or "").startswith(("2 GPUs", "4 GPUs", "8 GPUs"))
    assert smallest_remedy(config, sizes, gpus=1, gpu_gib=2.0) is None


def test_a_remedy_of_a_pipeline(sizes: ModelSizes) -> None:
    config = load_config(RECIPES / "qwen3-30b-a3b-megatron.toml")
    remedy = smallest_remedy(config, sizes, gpus=8, gpu_gib=60.0)
    assert remedy == "16 GPUs"  # among which the recipe divides the optimizer


def test_the_command_says_it_as_json_with_the_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moe_replay.cli.plan import PlanCommand

    recipe = str(RECIPES / "qwen3-30b-a3b-megatron.toml")
    with pytest.raises(SystemExit) as ended:
        PlanCommand(model=str(folder), recipe=recipe, gpu_gib=60.0, json=True)()
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert not said["fits"]
    assert said["remedy"]
    assert len(said["stages"]) == 2
    assert [cost["kind"] for cost in said["weight_sync"]] == ["ipc", "nccl", "http"]
    with pytest.raises(SystemExit):
        PlanCommand(model=str(folder), recipe=recipe, gpu_gib=60.0)()
    assert f"it fits with {said['remedy']}" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["gpus", "gpu_gib", "gpu_tflops", "mfu", "ranks_per_node", "gbit"])
def test_nothing_is_planned_for_no_gpus(option: str, folder: Path) -> None:
    from moe_replay.cli.plan import PlanCommand

    settings: dict[str, Any] = {option: 0}
    with pytest.raises(LayoutError, match=f"--{option.replace('_', '-')} is not a positive number: found 0"):
        PlanCommand(model=str(folder), recipe=str(RECIPES / "qwen3-30b-a3b-fsdp.toml"), **settings)()


def test_an_engine_wider_than_a_machine_is_refused(folder: Path, tmp_path: Path) -> None:
    from moe_replay.cli.plan import PlanCommand

    text = (RECIPES / "qwen3-30b-a3b-megatron.toml").read_text()
    recipe = tmp_path / "wide.toml"
    recipe.write_text(re.sub(r"tensor_parallel_size = \d+", "tensor_parallel_size = 32", text))
    with pytest.raises(LayoutError, match=r"an engine runs on one machine: expected at most 8 GPUs .*, found 32"):
        PlanCommand(model=str(folder), recipe=str(recipe))()


def test_engines_of_a_cluster_have_gpus_of_their_own(sizes: ModelSizes) -> None:
    apart = plan(sizes, "ray").phases["forward, backward"]
    shared = plan(
        sizes,
        "ray",
        "--cluster.placement",
        "colocated",
        "--rollout.max_staleness",
        "0",
        "--algorithm.rollout_correction",
        "off",
    ).phases["forward, backward"]
    assert not apart.get("engine")
    assert shared["engine"] > sizes.total


def test_operations_of_a_forward(sizes: ModelSizes) -> None:
    """3.3 billion active parameters, as the model's page says; by hand for one layer's parts, and attention."""
    attention, gate = 2048 * 4096 * 2 + 2 * 2048 * 512, 2048 * 128
    matrices = 48 * (attention + gate + 8 * 3 * 2048 * 768)
    flops = sizes.forward_flops([4096, 1024], scored=1000)
    assert flops.parameters == pytest.approx(2 * (5120 * matrices + 1000 * 151936 * 2048), rel=1e-3)  # norms are small
    assert flops.attention == pytest.approx(48 * 2 * 4096 * (4096**2 + 1024**2), rel=1e-3)
    assert flops.update(frozen=False) == pytest.approx(3 * flops.forward)
    assert flops.update(frozen=True) == pytest.approx(2 * flops.parameters + 3 * flops.attention)


def test_layers_with_a_window_or_without_attention_count_less(sizes: ModelSizes) -> None:
    windows = (4, None, 0, *[0] * 45)
    pairs = (1 + 2 + 3 + 4 + 4 + 4) + (6 * 7 // 2)
    assert replace(sizes, windows=windows).forward_flops([6], scored=0).attention == 4 * 4096 * pairs


@pytest.mark.parametrize(
    ("setting", "score"), [("auto", 0.75), ("always", 1.0), ("rollout", 0.0), ("auto --algorithm.beta 0.1", 1.75)]
)
def test_the_time_of_passes(sizes: ModelSizes, setting: str, score: float) -> None:
    overrides = ["--algorithm.updates-per-rollout", "4", "--replay.mode", "r3", "--algorithm.rollout-correction", "off"]
    overrides += ["--algorithm.old-logprobs", *setting.split()]
    config = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml", overrides)
    found = plan_speed(config, sizes, gpus=8, peak_tflops=1000.0, mfu=0.5)
    assert found.score / found.train == pytest.approx(score / 3)
    assert found.seconds == pytest.approx((found.score + found.train) / 4)
    assert "at 50% of 1000 TFLOP/s on 8 GPUs" in str(found)


AUTO = ["--model.gradient-checkpointing", "auto", "--backend.reshard-after-forward", "auto"]


@pytest.mark.parametrize(
    ("gib", "recomputes", "reshards"),
    [(60.0, True, True), (79.6, True, True), (140.0, True, False), (240.0, False, True), (400.0, False, False)],
)
def test_memory_that_is_left_is_used(sizes: ModelSizes, gib: float, recomputes: bool, reshards: bool) -> None:
    config = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml", AUTO)
    decided = with_memory_used(config, sizes, gpus=8, gpu_gib=gib)
    assert decided.model.gradient_checkpointing is recomputes
    assert decided.backend.reshard_after_forward is reshards
    assert plan_memory(config, sizes, gpus=8, gpu_gib=gib) == plan_memory(decided, sizes, gpus=8, gpu_gib=gib)
    choices = [
        "--model.gradient-checkpointing",
        str(not recomputes),
        "--backend.reshard-after-forward",
        str(not reshards),
    ]
    chosen = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml", choices)
    assert with_memory_used(chosen, sizes, gpus=8, gpu_gib=gib) is chosen


def test_weights_that_stay_gathered_are_those_of_all_layers(sizes: ModelSizes) -> None:
    freed, kept = (
        plan(sizes, "fsdp", "--backend.reshard-after-forward", choice).phases["forward, backward"]
        for choice in ("True", "False")
    )
    by_layer = [experts + dense for experts, dense in sizes.by_layer]
    assert kept["gathered"] - freed["gathered"] == 2 * (sum(by_layer) - 2 * max(by_layer))


@pytest.mark.parametrize(
    ("device", "gib", "decided", "told"),
    [
        ("cpu", 0, (False, True), ""),
        ("cuda", 400, (False, False), "layers are not recomputed, gathered weights are kept (so that 15% of 400 GiB"),
        ("cuda", 60, (True, True), "layers are recomputed, gathered weights are freed (so that 15% of 60 GiB"),
    ],
)
def test_a_run_decides_by_its_device_what_memory_is_used_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, gib: int, decided: tuple[bool, bool], told: str
) -> None:
    def choices(folder: Path) -> tuple[bool, bool]:
        found = launch.with_memory_decided(config, str(folder), torch.device(device), lines.append)
        return found.model.gradient_checkpointing, found.backend.reshard_after_forward

    lines: list[str] = []
    module = SimpleNamespace(mem_get_info=lambda device: (0, gib * GIB))
    monkeypatch.setattr(launch, "device_module", lambda device: module)
    monkeypatch.setattr(launch, "world_size", lambda: 8)
    config = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml", AUTO)
    assert choices(folder) == decided
    assert told in "".join(lines)
    assert bool(lines) == bool(told)
    assert choices(folder / "nowhere") == ((True, True) if device == "cuda" else (False, True))


# ---- expert parallel on FSDP2 ----------------------------------------------------------------------------------------


def test_divided_experts_are_not_gathered(sizes: ModelSizes) -> None:
    alone, divided = (
        plan(sizes, "fsdp", "--backend.reshard-after-forward", "True", "--backend.expert_parallel", size).phases[
            "forward, backward"
        ]
        for size in ("1", "8")
    )
    of_layer = sizes.experts / sizes.layers
    # Two gathered layers, and gradients of one in bfloat16 and twice in float32
    assert alone["gathered"] - divided["gathered"] == pytest.approx((2 * 2 + 2 + 8) * of_layer * 7 / 8)
    assert divided["activations"] - alone["activations"] == 2 * 16384 * 8 * 2048 * 2
    assert divided["weights"] == alone["weights"], "sharded over all ranks with and without"
    with pytest.raises(LayoutError, match="do not divide"):
        plan(sizes, "fsdp", "--backend.expert_parallel", "3")


def test_bytes_of_a_micro_batch(sizes: ModelSizes) -> None:
    """tests/distributed/test_expert_parallel.py counts the same bytes in collectives."""
    config = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml")
    alone = plan_traffic(config, sizes, gpus=8)
    assert alone.gathered == 2 * (2 * sizes.total - 2 * sizes.embedding - 2048)
    assert alone.exchanged == 0
    config = load_config(RECIPES / "qwen3-30b-a3b-fsdp.toml", ["--backend.expert_parallel", "8"])
    divided = plan_traffic(config, sizes, gpus=8)
    assert alone.gathered - divided.gathered == 2 * 2 * sizes.experts
    assert divided.exchanged == 6 * 48 * 16384 * 8 * 2048 * 2
    half = plan_traffic(config, sizes, gpus=16)
    assert half.gathered - divided.gathered == 2 * 2 * sizes.experts / 8
    assert "to experts and back 144.0 GiB" in str(divided)


def test_a_proposal_is_the_recipe_for_long_sequences(sizes: ModelSizes, folder: Path) -> None:
    config = load_config(RECIPES / "qwen3-30b-a3b-long.toml", ["--model.gradient_checkpointing", "auto"])
    proposal = propose(config, sizes, read_config(folder), gpus=8, gpu_gib=CARD_GIB)
    best = proposal.best
    assert best is not None
    assert best.memory.fits
    assert best.settings["backend.expert_parallel"] == 8
    assert best.settings["backend.context_parallel"] == 2
    assert best.settings["model.gradient_checkpointing"] is True
    fitting = [layout for layout in proposal.layouts if layout.memory.fits]
    assert all(best.cost <= layout.cost for layout in fitting)
    assert "expert_parallel = 8" in str(proposal)
    few = propose(config, sizes, read_config(folder), gpus=2, gpu_gib=CARD_GIB)
    assert few.gpus > 2
    assert "no layout fits on 2 GPUs" in str(few)
    none = propose(config, sizes, read_config(folder), gpus=1, gpu_gib=1.0)
    assert none.best is None
    assert none.gpus == 1


def test_the_command_proposes_a_layout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moe_replay.cli.plan import PlanCommand

    PlanCommand(model=str(folder), auto=True, gpus=8, length=32768, json=True)()
    said = json.loads(capsys.readouterr().out)
    assert said["settings"]["backend.expert_parallel"] == 8
    with pytest.raises(SystemExit) as ended:
        PlanCommand(model=str(folder), auto=True, gpus=2, length=32768)()
    assert ended.value.code == 1
    assert "no layout fits on 2 GPUs" in capsys.readouterr().out
