"""Memory of released models, for LoRA and for full training, on usual machines: the table in docs/tools.md.

    python -m tests.support.released_models

The folder `released` has the shapes of the models as config.json files, without weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.memory_plan import plan_memory
from moe_replay.utils.misc import GIB
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes

FOLDER = Path(__file__).with_name("released")
NAMES = {
    "olmoe-1b-7b": "OLMoE-1B-7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "moonlight-16b-a3b": "Moonlight-16B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B, text",
    "mixtral-8x7b": "Mixtral-8x7B",
    "glm-4.5-air": "GLM-4.5-Air",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "deepseek-v3": "DeepSeek-V3",
}
"""File in `FOLDER` -> name of the model."""
MACHINES = {"1 x 80": (1, 79.6), "1 x 141": (1, 139.8), "8 x 80": (8, 79.6), "64 x 80": (64, 79.6)}
"""GPUs in words, as sold -> their number, and GiB of each."""
GPUS_PER_NODE = 8
KV_CACHE_GIB = 8
MOST_GPUS = 4096
SETTINGS: dict[str, dict[str, Any]] = {
    "": {"rollout": {"sleep": True}},
    "o": {"rollout": {"sleep": True}, "backend": {"offload": True}},
    "c": {"rollout": {"sleep": True, "lora": True, "share_weights": True}},
    "co": {"rollout": {"sleep": True, "lora": True, "share_weights": True}, "backend": {"offload": True}},
    "s": {"rollout": {"engine": "rollout_server", "urls": ["http://engine:8000"]}},
    "so": {"rollout": {"engine": "rollout_server", "urls": ["http://engine:8000"]}, "backend": {"offload": True}},
    "8o": {"rollout": {"sleep": True}, "backend": {"offload": True}, "model": {"base_dtype": "fp8"}},
    "8s": {"rollout": {"engine": "rollout_server", "urls": ["http://engine:8000"]}, "model": {"base_dtype": "fp8"}},
}
"""Mark in the table -> settings, in the order in which they are tried."""
ONE_COPY = ("mixtral", "olmoe", "qwen3_moe")
"""Model types whose tensors are laid out in vLLM as in Transformers (tests/real_vllm/test_one_copy.py)."""
TWO_COPIES = tuple(mark for mark in SETTINGS if not {*mark} & {*"c8"})
TRAINING: dict[str, dict[str, Any]] = {"LoRA": {"lora_rank": 16}, "full": {}}


@dataclass(frozen=True)
class Fit:
    """The first settings with which a run fits: their mark in the table, and the GiB of its fullest phase."""

    mark: str
    peak_gib: float

    def __str__(self) -> str:
        return f"{self.peak_gib:.0f}{f' {self.mark}' * bool(self.mark)}"


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """A row of the table: one model with one kind of training.

    active   parameters that a token meets
    fits     by machine; None: it fits with none of the settings
    fewest   the fewest GPUs of 80 GB on which it fits, a power of two; None: more than `MOST_GPUS`
    """

    name: str
    parameters: int
    active: int
    training: str
    fits: Mapping[str, Fit | None]
    fewest: int | None


def plan_released() -> Iterator[ReleasedModel]:
    """Yield each released model, with LoRA and with full training."""
    for file, name in NAMES.items():
        config = read_config(str(FOLDER / f"{file}.json"))
        sizes = ModelSizes.of(config)
        inactive = sizes.experts * (1 - sizes.top_k / sizes.num_experts)
        for training in TRAINING:
            tried = TWO_COPIES
            if training == "LoRA":
                tried = tuple(mark for mark in SETTINGS if "c" not in mark or config.model_type in ONE_COPY)
            counts = (2**power for power in range(MOST_GPUS.bit_length()))
            yield ReleasedModel(
                name=name,
                parameters=sizes.total,
                active=round(sizes.total - inactive),
                training=training,
                fits={words: find_fit(sizes, training, *machine, tried) for words, machine in MACHINES.items()},
                fewest=next((count for count in counts if find_fit(sizes, training, count, 79.6, tried)), None),
            )


def find_fit(
    sizes: ModelSizes, training: str, gpus: int, gpu_gib: float, tried: Sequence[str] = TWO_COPIES
) -> Fit | None:
    """Return the first of the tried `SETTINGS` with which a run fits."""
    for mark in tried:
        if "8" in mark and gpus > 1:
            continue  # weights in 8 bits are of one rank
        plan = plan_memory(_config(training, SETTINGS[mark], gpus), sizes, gpus=gpus, gpu_gib=gpu_gib)
        if plan.fits:
            return Fit(mark, max(plan.totals.values()) / GIB)
    return None


def _config(training: str, settings: Mapping[str, Any], gpus: int) -> TrainConfig:
    rollout: dict[str, Any] = {"max_tokens": 7168, **settings.get("rollout", {})}
    if "urls" not in rollout:
        options = {"tensor_parallel_size": min(gpus, GPUS_PER_NODE), "kv_cache_memory_bytes": KV_CACHE_GIB * GIB}
        rollout |= {"engine": "vllm", "dtype": "bfloat16", "options": options}
    tables = {
        "model": {"path": "released", "dtype": "bfloat16", **TRAINING[training], **settings.get("model", {})},
        "data": {"path": "prompts.jsonl", "max_prompt_length": 1024},
        "batch": {"tokens_per_micro_batch": 8192},
        "rollout": rollout,
        "backend": {"reshard_after_forward": True, **settings.get("backend", {})},
    }
    return TrainConfig.model_validate(tables)


def released_table(rows: list[ReleasedModel]) -> str:
    """Return the rows as a Markdown table."""
    header = ["model", "parameters", "training", *MACHINES, "fewest 80 GB GPUs"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        fits = ["no" if fit is None else str(fit) for fit in row.fits.values()]
        fewest = "none" if row.fewest is None else str(row.fewest)
        size = f"{row.parameters / 1e9:.1f} B, {row.active / 1e9:.1f} B active"
        lines.append([row.name, size, row.training, *fits, fewest])
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


if __name__ == "__main__":
    print(released_table(list(plan_released())))
