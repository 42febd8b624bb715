"""The released verl on a CPU: a platform for its engines, a tiny model, and batches as its agent loop leaves them."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_replay as mr
from moe_replay.interop import to_verl
from tests.models import perturb_routers, tiny_qwen3_moe

LAYERS, EXPERTS, TOP_K = 5, 16, 4
PROMPT, RESPONSE = 9, 20
EXTERNAL = "moe_replay.integrations.verl"


@cache
def on_cpu() -> None:
    """Let verl's engines compute on a CPU. Before anything else of verl is imported."""
    os.environ["VERL_PLATFORM"] = "cpu"
    _without_flash_attention()
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.mem_get_info = lambda *_: (0, 0)  # type: ignore[attr-defined]
    try:
        from verl.plugin.platform import platform_manager

        from tests.plugins.verl_main_ppo_cpu import PlatformCPU
    except ImportError:  # verl 0.8 falls back to a CPU by itself
        return
    platform_manager._current_platform = PlatformCPU()  # verl reads it while it is imported


def _without_flash_attention() -> None:
    """The four functions of flash_attn that verl up to 0.9.0 unpads batches with."""

    def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
        return rows[indices]

    def unpad_input(hidden: Tensor, mask: Tensor, unused_mask: Any = None) -> tuple:
        lengths = mask.sum(-1, dtype=torch.int32)
        indices = mask.flatten().nonzero().flatten()
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return hidden.flatten(0, 1)[indices], indices, ends, int(lengths.max()), lengths

    def pad_input(hidden: Tensor, indices: Tensor, batch: int, width: int) -> Tensor:
        out = hidden.new_zeros(batch * width, *hidden.shape[1:])
        out[indices] = hidden
        return out.view(batch, width, *hidden.shape[1:])

    def rearrange(*args: Any, **kwargs: Any) -> Any:
        import einops

        return einops.rearrange(*args, **kwargs)

    padding = types.ModuleType("flash_attn.bert_padding")
    vars(padding).update({f.__name__: f for f in (index_first_axis, unpad_input, pad_input, rearrange)})
    package = types.ModuleType("flash_attn")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    vars(package)["bert_padding"] = padding
    import verl  # what it does not need is not pretended: Transformers asks for the metadata of flash_attn

    if tuple(map(int, verl.__version__.split(".")[:3])) < (0, 9, 1):
        sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}


def tiny_model(seed: int = 0) -> Any:
    """Five layers, the first of them dense, with routers that decide and experts that matter."""
    model = tiny_qwen3_moe(
        seed, num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=64, vocab_size=256
    )
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(40)
        if "embed" in name or ".experts." in name:
            parameter.data.mul_(20)
    return model


def make_engine(folder: Path, **settings: Any) -> Any:
    """verl's FSDP2 engine from its own constructors, of the class that its registry has."""
    on_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.engine import EngineRegistry

    configured = configs(folder, **settings)
    made = EngineRegistry._engines["language_model"]["fsdp2"]["cpu"](*configured, CheckpointConfig())
    made.initialize()
    return made


def configs(
    folder: Path, *, mode: str | None, padded: bool = False, lora: bool = False, **settings: Any
) -> tuple[Any, Any, Any]:
    """verl's settings of a model, of an engine and of an optimizer; with an engine for CPUs in its registry."""
    on_cpu()
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    by_device = EngineRegistry._engines["language_model"]["fsdp2"]
    by_device.setdefault("cpu", FSDPEngineWithLMHead)
    if not folder.exists():
        tiny_model().save_pretrained(folder)
    adapters = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"} if lora else {}
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        external_lib=EXTERNAL,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=not padded,
        enable_gradient_checkpointing=True,
        **adapters,
    )
    replay = {} if mode is None else {"router_replay": {"mode": mode, **settings.pop("router_replay", {})}}
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        mixed_precision={"param_dtype": "fp32"},
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=3,
        infer_micro_batch_size_per_gpu=3,
        fsdp_size=-1,
        **replay,
        **settings,
    )
    return model, engine, FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)


class Rollout:
    """Samples of random tokens with the routes of a model, as an engine returns them: T-1 rows, all decoder layers.

    ids, mask           (B, P + R): prompts padded on the left, responses on the right
    routed_experts      (B, P + R, L, K) int16
    """

    def __init__(self, count: int = 6, seed: int = 1, noise: float = 0.0, *, equal: bool = False) -> None:
        model = tiny_model()
        replay = mr.attach(model)
        self.topology = replay.topology
        if noise:
            perturb_routers(replay, noise, seed)
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.zeros(count, PROMPT + RESPONSE, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        self.routed_experts = torch.zeros(*self.ids.shape, LAYERS, TOP_K, dtype=torch.int16)
        for row in range(count):
            prompt, response = (
                (PROMPT, RESPONSE)
                if equal
                else [int(torch.randint(n // 2, n + 1, (1,), generator=generator)) for n in (PROMPT, RESPONSE)]
            )
            tokens = torch.randint(3, 256, (prompt + response,), generator=generator)
            place = slice(PROMPT - prompt, PROMPT + response)
            self.ids[row, place], self.mask[row, place] = tokens, 1
            with torch.no_grad(), replay.record() as recording:
                model(tokens[None])
            (trace,) = recording.traces(mr.TokenLayout.packed([len(tokens)]), [tokens.tolist()])
            rows = to_verl([trace], self.topology).values()
            self.routed_experts[row, PROMPT - prompt : PROMPT + response - 1] = rows[:-1]

    def batch(self, routed_experts: Tensor | None, *, padded: bool = False, **further: Any) -> Any:
        """The batch as verl's trainer hands it to a worker."""
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import left_right_2_no_padding

        tensors = {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            "position_ids": (self.mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": self.mask[:, PROMPT:],
            "prompts": self.ids[:, :PROMPT],
            "responses": self.ids[:, PROMPT:],
            **({} if routed_experts is None else {"routed_experts": routed_experts}),
            **further,
        }
        settings = {
            "temperature": 1.0,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 3,
            "use_remove_padding": not padded,
        }
        made = tensordict_utils.get_tensordict({k: v.clone() for k, v in tensors.items()}, non_tensor_dict=settings)
        return left_right_2_no_padding(made)


def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
    return -model_output["log_probs"].values().mean(), {"pg_loss": 0.0}


def old_log_probs(engine: Any, data: Any) -> dict[str, Any]:
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]


def update(engine: Any, data: Any) -> dict[str, Any]:
    """One update: its metrics."""
    with engine.train_mode():
        return engine.train_batch(data, loss)["metrics"]


def token_late(rollout: Rollout) -> Tensor:
    """The routes of each token one token late."""
    late = torch.zeros_like(rollout.routed_experts)
    for row, mask in enumerate(rollout.mask):
        (places,) = mask.nonzero(as_tuple=True)
        late[row, places[1:-1]] = rollout.routed_experts[row, places[:-2]]
        late[row, places[0]] = rollout.routed_experts[row, places[0]]
    return late


def layer_late(rollout: Rollout) -> Tensor:
    late = rollout.routed_experts.clone()
    late[:, :, 2:] = rollout.routed_experts[:, :, 1:-1]
    return late


def dense_layer_routed(rollout: Rollout) -> Tensor:
    return torch.cat([rollout.routed_experts[:, :, 1:], rollout.routed_experts[:, :, -1:]], 2)


def zero_rows(rollout: Rollout) -> Tensor:
    holes = rollout.routed_experts.clone()
    holes[:, PROMPT + 2 : PROMPT + 6] = 0
    return holes


def all_zero(rollout: Rollout) -> Tensor:
    return torch.zeros_like(rollout.routed_experts)


def samples_swapped(rollout: Rollout) -> Tensor:
    return rollout.routed_experts[[1, 0, *range(2, len(rollout.ids))]]


Fault = Callable[[Rollout], Tensor]


def open_process_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
