"""A recipe on the embedded default: its method, with a model, data, lengths and sizes for a CPU."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from math import gcd
from typing import Any

from moe_replay.demo import RECIPE

METHOD: dict[str, tuple[str, ...]] = {
    "model": ("gradient_checkpointing", "lora_rank", "lora_alpha", "lora_targets", "lora_merge"),
    "backend": ("kind", "distributed_optimizer"),
    "rollout": ("temperature", "max_staleness", "max_turns", "reproducible"),
    "batch": ("packed",),
    "log": ("completions", "tensorboard", "traces"),
}
"""Keys of sections that are kept; of the sections in `WHOLE`, all are."""
WHOLE = ("replay", "algorithm", "optim")
ENVIRONMENT = "moe_replay.demo.environments:second_try"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear")
"""Layers of the embedded model that adapters can be put on."""
PROMPTS, SAMPLES, STEPS = 4, 4, 3


def shrink(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a recipe with everything that sizes a run taken from the embedded default.

    The method stays: replay, loss, optimizer, backend, LoRA, how far rollouts run ahead, several turns.
    """
    tiny = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    tiny |= {"name": f"{tables.get('name', 'run')}-tiny", "steps": STEPS, "checkpoint": {"every": 0}}
    tiny |= {name: dict(tables[name]) if isinstance(tables.get(name), dict) else {} for name in WHOLE}
    tiny |= {"seed": tables["seed"]} if "seed" in tables else {}
    for section, keys in METHOD.items():
        given = tables.get(section)
        kept = {key: given[key] for key in keys if key in given} if isinstance(given, dict) else {}
        tiny[section] = tiny.get(section, {}) | kept
    tiny["rollout"] |= {"prompts_per_step": PROMPTS, "num_generations": SAMPLES}
    tiny["rollout"]["dtype"] = "float32"  # vLLM in bfloat16 ends with an illegal instruction on some CPUs
    if find_spec("vllm") is None:
        tiny["rollout"] |= {"engine": "transformers", "options": {}}
    if "environment" in tables.get("rollout", {}):
        tiny["rollout"]["environment"] = ENVIRONMENT
    if targets := [name for name in tiny["model"].pop("lora_targets", ()) if name in LAYERS]:
        tiny["model"]["lora_targets"] = targets
    algorithm, optim = tiny["algorithm"], tiny["optim"]
    updates = algorithm.get("updates_per_rollout", algorithm.pop("steps_per_generation", 1))
    algorithm["updates_per_rollout"] = gcd(updates, PROMPTS * SAMPLES) if isinstance(updates, int) else updates
    optim.pop("warmup_steps", None)
    return tiny
