"""Tiny Transformers checkpoints of each family, and what Transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import moe_replay as mr
from tests.models import perturb_routers

VOCABULARY = 96
LENGTH, BATCH = 12, 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": None,  # an embedding of Transformers has no gradient for it
    "use_cache": False,
}
_QWEN3 = _SIZES | {
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "num_experts": 8,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
_DEEPSEEK = _SIZES | {
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_nextn_predict_layers": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}

_GLM = _SIZES | {
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
_QWEN2 = _SIZES | {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "mlp_only_layers": [1],
}
_GPT_OSS = _SIZES | {
    "num_local_experts": 8,
    "head_dim": 16,
    "sliding_window": 4,
    "swiglu_limit": 0.7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
_QWEN3_NEXT = _QWEN2 | {
    "rms_norm_eps": 1e-2,  # else the norm after a delta net amplifies rounding errors where its output is near zero
    "norm_topk_prob": True,
    "head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_QWEN3_5 = {name: value for name, value in _QWEN3_NEXT.items() if name not in ("mlp_only_layers", "norm_topk_prob")}
_QWEN3_5 = {name: value for name, value in _QWEN3_5.items() if name != "intermediate_size"}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", _QWEN3),
    "qwen3_moe-unnormalized": ("qwen3_moe", _QWEN3 | {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_moe-every-second": ("qwen3_moe", _QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_moe-tied": ("qwen3_moe", _QWEN3 | {"tie_word_embeddings": True}),
    "qwen3_moe-one-group": ("qwen3_moe", _QWEN3 | {"num_key_value_heads": 1}),
    "qwen2_moe": ("qwen2_moe", _QWEN2),
    "qwen2_moe-normalized": ("qwen2_moe", _QWEN2 | {"norm_topk_prob": True, "qkv_bias": False}),
    "glm4_moe": ("glm4_moe", _GLM),
    "glm4_moe-plain": ("glm4_moe", _GLM | {"attention_bias": False, "use_qk_norm": False}),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "gpt_oss-plain": (
        "gpt_oss",
        _GPT_OSS | {"rope_parameters": _PLAIN_ROPE, "layer_types": ["full_attention"] * 4},
    ),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _QWEN3_5),
    "minimax_m2": (
        "minimax_m2",
        _SIZES
        | {"num_local_experts": 8, "head_dim": 16, "rope_parameters": _PLAIN_ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("mixtral", _SIZES | {"num_local_experts": 8}),
    "olmoe": ("olmoe", _SIZES | {"num_experts": 8}),
    "olmoe-normalized": ("olmoe", _SIZES | {"num_experts": 8, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3-ungrouped": ("deepseek_v3", _DEEPSEEK | {"n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    "deepseek_v3-other-epsilon": ("deepseek_v3", _DEEPSEEK | {"rms_norm_eps": 1e-2}),
    "deepseek_v3-yarn": ("deepseek_v3", _DEEPSEEK | {"rope_parameters": _YARN}),
}
DOTS1 = _SIZES | {
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
EXAMPLES = {"dots1": ("dots1", DOTS1)}  # families of docs/megatron.md
DENSE_FIRST, DENSE_LAST = "qwen3_moe-dense-first", "qwen3_moe-dense-last"
CHUNKS_WITHOUT_ROUTERS = {  # with two pipeline stages, a whole chunk at the beginning or at the end of the model
    DENSE_FIRST: ("qwen3_moe", _QWEN3 | {"mlp_only_layers": [0, 1]}),
    DENSE_LAST: ("qwen3_moe", _QWEN3 | {"mlp_only_layers": [2, 3]}),
}


def tiny(variant: str, seed: int = 0) -> nn.Module:
    """A random model whose every weight matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, settings = (VARIANTS | EXAMPLES | CHUNKS_WITHOUT_ROUTERS)[variant]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2)
        else:
            parameter.data.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0.0, 0.2)
    return model


def token_ids() -> list[np.ndarray]:
    """Four sequences of one length."""
    return list(np.random.default_rng(0).integers(1, VOCABULARY, (BATCH, LENGTH)))


def save_checkpoint(model: Any, folder: Path, **options: Any) -> None:
    """As Transformers writes it."""
    model.save_pretrained(folder, **options)


def save_reference(variant: str, folder: Path) -> None:
    """Routes recorded, routers moved, routes replayed: checkpoint, gradients, and the rest in `reference.pt`."""
    model: Any = tiny(variant)
    replay = mr.attach(model)
    ids, layout = token_ids(), mr.TokenLayout.padded([LENGTH] * BATCH)
    grid = torch.from_numpy(np.stack(ids))

    def recorded() -> tuple[list[bytes], Tensor]:
        with torch.no_grad(), replay.record() as recording:
            logits = model(grid).logits
        return [trace.to_bytes() for trace in recording.traces(layout, ids)], logits

    earlier, _ = recorded()
    perturb_routers(replay, scale=0.7)
    native, native_logits = recorded()
    batch = mr.RouteBatch.from_traces([mr.RouteTrace.from_bytes(data) for data in earlier], layout)
    with replay.replay(batch):
        logits = model(grid).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), grid.roll(-1, 1).flatten())
    loss.backward()
    replay.detach()
    save_checkpoint(model, folder)
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    save_checkpoint(model, folder / "gradients")
    torch.save(
        {
            "earlier": earlier,
            "native": native,
            "native_logits": native_logits,
            "logits": logits.detach(),
            "loss": loss.item(),
        },
        folder / "reference.pt",
    )


def saved_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, read without anything of ours."""
    from safetensors.torch import load_file

    return {
        name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings in a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    different = [
        name
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
    ]
    assert not different, f"tensors differ: {different}"


def quantize_folder(folder: Path, block: tuple[int, int] = (16, 24)) -> dict[str, Tensor]:
    """Store the projections of a folder in 8 bits with a scale per block, as DeepSeek does: what they amount to."""
    from safetensors.torch import save_file

    values = saved_tensors(folder)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in values.items():
        if not name.endswith("_proj.weight") and "_proj_with_mqa" not in name and "_b_proj" not in name:
            stored[name] = meant[name] = tensor
            continue
        rows, columns = (-(-size // length) for size, length in zip(tensor.shape, block, strict=True))
        scales, exact = torch.empty(rows, columns), torch.empty_like(tensor)
        eighth = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                at = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
                scales[row, column] = tensor[at].abs().max() / 448
                eighth[at] = (tensor[at] / scales[row, column]).to(torch.float8_e4m3fn)
                exact[at] = eighth[at].float() * scales[row, column]
        stored |= {name: eighth, f"{name}_scale_inv": scales}
        meant[name] = exact
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    return meant
