"""Transformers checkpoints in Megatron-Core: the same model in every layout, and the same bytes on the way back.

For each layout: what Transformers computes with the routes that it recorded before its routers moved. Its loss and
the gradient of every weight must come out of Megatron-Core, in the names and shapes of the checkpoint.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_replay.weights.model_folder import load_model
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness
from tests.distributed.megatron_models import PRELOADED, Case
from tests.megatron.weights.models import (
    VARIANTS,
    assert_same_bytes,
    edit_config,
    save_checkpoint,
    save_reference,
    saved_tensors,
    tiny,
    token_ids,
)
from tests.megatron.weights.on_rank import compare_alone, compare_partitioned, refusals, write_again

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
harness.PRELOADED.extend(PRELOADED)

GROUPED = {"moe_grouped_gemm": True}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}  # gloo cannot gather the uneven parts of the other dispatcher

LAYOUTS = {
    "tp2": Case(2, tp=2),
    "ep2": Case(2, ep=2),
    "pp2-uneven": Case(2, pp=2, settings={"num_layers_in_first_pipeline_stage": 1}),
    "pp2-vpp2": Case(2, pp=2, vpp=2),
    "ep2-etp2": Case(4, ep=2, etp=2, settings=ALLGATHER),
    "tp2-ep2-etp2": Case(4, tp=2, ep=2, etp=2, settings=ALLGATHER),
    "tp2-pp2-ep2": Case(4, tp=2, pp=2, ep=2, etp=1),
    "grouped": Case(1, settings=GROUPED),
    "grouped-tp2-ep2-etp2": Case(4, tp=2, ep=2, etp=2, settings=ALLGATHER | GROUPED),
    "grouped-tp2-pp2-ep2": Case(4, tp=2, pp=2, ep=2, etp=1, settings=GROUPED),
}
PARTITIONED = [
    *(("qwen3_moe", layout) for layout in LAYOUTS),
    ("deepseek_v3", "tp2"),
    ("deepseek_v3", "pp2-vpp2"),
    ("deepseek_v3", "tp2-pp2-ep2"),
    ("qwen3_moe-one-group", "tp2"),  # fewer keys than ranks: a group of heads is cut
    ("qwen3_moe-tied", "tp2-pp2-ep2"),
    ("mixtral", "tp2-ep2-etp2"),
    ("olmoe", "tp2-pp2-ep2"),
    ("qwen2_moe", "tp2-pp2-ep2"),
    ("gpt_oss", "tp2-pp2-ep2"),
    ("qwen3_next", "tp2-pp2-ep2"),
    ("glm4_moe", "tp2-pp2-ep2"),
    ("minimax_m2", "tp2-pp2-ep2"),
    ("qwen3_5_moe_text", "tp2-pp2-ep2"),
]
THOROUGH = {  # what is cut in them is cut in the layouts with more at once
    *(("qwen3_moe", layout) for layout in ("tp2", "ep2", "tp2-ep2-etp2", "grouped", "grouped-tp2-pp2-ep2")),
    *(("deepseek_v3", layout) for layout in ("tp2", "pp2-vpp2")),
    *((variant, "tp2-pp2-ep2") for variant in ("qwen3_moe", "olmoe", "qwen2_moe")),
}
WHOLE_RUNS = {  # `make test` has experts grouped and cut in two ways, latent attention, and biases and sinks
    *(("qwen3_moe", "ep2-etp2"), ("qwen3_moe-tied", "tp2-pp2-ep2")),
    *(("mixtral", "tp2-ep2-etp2"), ("qwen3_next", "tp2-pp2-ep2"), ("glm4_moe", "tp2-pp2-ep2")),
    *(("minimax_m2", "tp2-pp2-ep2"), ("qwen3_5_moe_text", "tp2-pp2-ep2")),
}
TOLERANCE = 1e-5
# The norm after a delta net amplifies rounding errors where its output is small.
TOLERANCES = {"qwen3_next": 1e-4, "qwen3_5_moe_text": 1e-4}


@functools.cache
def references() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="weights-")


@functools.cache
def reference(variant: str) -> str:
    """The folder of a checkpoint and of what Transformers makes of it."""
    folder = Path(references().name, variant)
    save_reference(variant, folder)
    return str(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_model_and_the_same_routes(variant: str) -> None:
    assert_same_model(reference(variant), tolerance=TOLERANCES.get(variant, TOLERANCE))


def test_kimi_k2_is_read_as_deepseek_v3_without_its_code(tmp_path: Path) -> None:
    """With rotary settings as they are published, and a module that must not be loaded."""
    folder = tmp_path / "kimi"
    shutil.copytree(reference("deepseek_v3-yarn"), folder)
    shutil.rmtree(folder / "again", ignore_errors=True)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    (folder / "config.json").write_text(json.dumps(config))
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "none.None", "AutoModelForCausalLM": "none.None"})
    (found,) = harness.run_ranks(1, compare_alone, str(folder), None)
    assert found["native"] < TOLERANCE
    assert found["replayed"] < TOLERANCE
    assert found["same_routes"]
    assert_same_bytes(saved_tensors(folder / "again"), saved_tensors(folder))
    with torch.no_grad():
        logits = load_model(folder, dtype=torch.float32)(torch.from_numpy(np.stack(token_ids()))).logits
    torch.testing.assert_close(logits, torch.load(folder / "reference.pt", weights_only=True)["native_logits"])


def test_the_language_model_in_the_folder_of_a_multimodal_one(tmp_path: Path) -> None:
    folder, inner = tmp_path / "multimodal", Path(reference("qwen3_5_moe_text"))
    shutil.copytree(inner, folder, ignore=shutil.ignore_patterns("again", "*.safetensors*"))
    tensors = {re.sub(r"^model\.", "model.language_model.", name): part for name, part in saved_tensors(inner).items()}
    other = {"model.visual.blocks.0.attn.qkv.weight": torch.randn(4, 4), "mtp.norm.weight": torch.ones(4)}
    save_file(tensors | other, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    torch.testing.assert_close(logits(folder), logits(inner), rtol=0, atol=0)  # that is how Transformers reads it
    (found,) = harness.run_ranks(1, compare_alone, str(folder), None)
    assert max(found["native"], found["replayed"]) < TOLERANCES["qwen3_5_moe_text"]
    assert found["same_routes"]
    assert_same_bytes(saved_tensors(folder / "again"), tensors | other)


def test_the_family_of_the_documentation() -> None:
    folder = reference("dots1")
    page = Path(__file__).parents[2].joinpath("docs/megatron.md").read_text()
    code = re.search(r"<!-- dots1_weights.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) < 40
    Path(folder, "dots1_weights.py").write_text(code[1])
    assert_same_model(folder, "dots1_weights:DOTS1")


def assert_same_model(folder: str, family: str | None = None, tolerance: float = TOLERANCE) -> None:
    """Log-probs and routes as Transformers has them; the same bytes on the way back."""
    (found,) = harness.run_ranks(1, compare_alone, folder, family)
    assert found["native"] < tolerance
    assert found["replayed"] < tolerance
    assert found["same_routes"]
    assert found["other_routes"] > 0.3, "replayed routes would be taken natively"
    assert found["moved"] > 0.01
    assert_same_bytes(saved_tensors(f"{folder}/again"), saved_tensors(folder))
    torch.testing.assert_close(logits(f"{folder}/again"), logits(folder), rtol=0, atol=0)


def logits(folder: str | Path) -> torch.Tensor:
    """What Transformers computes with a checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(np.stack(token_ids()))).logits


@pytest.mark.parametrize(
    ("variant", "layout"), with_whole_runs(with_thorough(PARTITIONED, THOROUGH), WHOLE_RUNS), ids=str
)
def test_partitioned_as_transformers(variant: str, layout: str) -> None:
    case, tolerance = LAYOUTS[layout], TOLERANCES.get(variant, TOLERANCE)
    ranks = harness.run_ranks(case.size, compare_partitioned, case, reference(variant))
    assert any(rank["losses"] for rank in ranks)
    for number, rank in enumerate(ranks):
        if rank["losses"]:
            assert sum(rank["losses"]) / len(rank["losses"]) == pytest.approx(rank["expected"], abs=tolerance)
        assert rank["worst"] < tolerance, f"rank {number}: {rank['name']} is {rank['worst']:.1e} apart"


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_every_form_of_checkpoint_keeps_its_bytes(tmp_path: Path, variant: str) -> None:
    save_checkpoint(tiny(variant), tmp_path / "fused", save_original_format=False)
    save_checkpoint(tiny(variant).bfloat16(), tmp_path / "half", max_shard_size="40KB")
    assert any(name.endswith("experts.gate_up_proj") for name in saved_tensors(tmp_path / "fused"))
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    forms = [("fused", "float32", 2**30), ("half", "bfloat16", 2**14), ("half", "float32", 2**30)]
    harness.run_ranks(1, write_again, str(tmp_path), forms)
    for form, dtype, file_bytes in forms:
        out = tmp_path / form / dtype
        assert_same_bytes(saved_tensors(out), saved_tensors(tmp_path / form))
        assert (len(list(out.glob("*.safetensors"))) > 1) == (file_bytes < 2**20)
    torch.testing.assert_close(logits(tmp_path / "half" / "bfloat16"), logits(tmp_path / "half"), rtol=0, atol=0)


def test_what_does_not_fit_is_refused_before_a_weight_is_written(tmp_path: Path) -> None:
    model = tiny("deepseek_v3", seed=1)
    save_checkpoint(tiny("deepseek_v3"), tmp_path)
    whole = saved_tensors(tmp_path)
    gate, bias = "model.layers.2.mlp.experts.5.gate_proj.weight", "model.layers.3.mlp.gate.e_score_correction_bias"
    router, predicted = "model.layers.2.mlp.gate.weight", {"model.layers.4.eh_proj.weight": torch.ones(2)}
    changes = {
        "missing": ({name: tensor for name, tensor in whole.items() if name != gate}, {}),
        "unexpected": (whole | {"model.layers.2.mlp.gate.bias": torch.ones(8)}, {}),
        "shape": (whole | {bias: torch.ones(9)}, {}),
        "type": (whole | {router: whole[router].to(torch.int8)}, {}),
        "family": (whole, {"model_type": "qwen9_moe"}),
        "predicted": (whole | predicted, {}),
        "predicted and said so": (whole | predicted, {"num_nextn_predict_layers": 1}),
    }
    for name, (tensors, settings) in changes.items():
        save_checkpoint(model, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors")
        edit_config(tmp_path / name, **settings)
    (found,) = harness.run_ranks(1, refusals, str(tmp_path), list(changes))
    said = found["messages"]
    assert found["kept"]
    assert_same_bytes(saved_tensors(tmp_path / "exported"), whole | predicted)
    for name, expected in {
        "missing": rf"1 tensors are missing from the checkpoint \(deepseek_v3\), the first is {gate} \[layer 2\]: "
        r"expected shape \(16, 32\) for decoder\.layers\.\{layer\}\.mlp\.experts",
        "unexpected": r"are not in the model, the first is model\.layers\.2\.mlp\.gate\.bias.*of shape \(8,\)",
        "shape": rf"{bias} \(deepseek_v3\) .*router\.expert_bias.*expected shape \(8,\), found shape \(9,\)",
        "type": rf"{router} in .*type that the model cannot have: expected BF16, F16, F32, F64, found I8",
        "family": r"expected one of deepseek_v3, .*found 'qwen9_moe'.*how to add a family",
        "predicted": r"the first is model\.layers\.4\.eh_proj\.weight",
        "predicted and said so": "nothing",
        "parameter": r"deepseek_v3 has no rule for the parameter decoder\.layers\.\{layer\}\.extra\.weight",
        "vocabulary": r"vocab_size divisible by tensor_model_parallel_size 2, found 97",
        "expert shards": r"gradients of experts.*expert_tensor_parallel_size 2.*found 1 with",
    }.items():
        assert re.search(expected, said[name]), f"{name}: {said[name]}"
