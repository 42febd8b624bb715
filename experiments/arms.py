"""One arm of the study: what differs between runs, and the settings of `moe-replay train` that it stands for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.scales import Scale

Precision = Literal["bf16", "fp8", "fp32"]
LR = 3e-5
"""Learning rate where a study does not vary it: the edge, by `experiments.edge`."""
MARGIN = 0.05
"""Of policy margin: the difference between logarithms of routing weights up to which the recorded expert is taken."""
DTYPES = {"bf16": "bfloat16", "fp8": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A run.

    mode          routes that the trainer replays
    updates       optimizer steps on each rollout
    rollout       precision of the engine
    trainer       precision of the trainer
    correction    algorithm.rollout_correction
    top_p         1: the whole distribution is sampled from
    mask          replay the sampling mask where top_p < 1
    staleness     steps that samples may be behind the weights
    lr            learning rate
    lora          adapters of rank 16 on attention and experts, with frozen routers and ten times the learning rate
    policy        what is taken of a recorded route (replay.policy)
    """

    mode: Literal["off", "r2", "r3"]
    updates: int = 4
    rollout: Precision = "bf16"
    trainer: Literal["bf16", "fp32"] = "bf16"
    correction: Literal["off", "token_truncate"] = "off"
    top_p: float = 1.0
    mask: bool = True
    staleness: int = 0
    lr: float = LR
    seed: int = 0
    lora: bool = False
    policy: Literal["ids", "ids+gates", "margin"] = "ids"

    @property
    def name(self) -> str:
        """Name of its folder and of its file of results: the mode, what is not the default, learning rate and seed."""
        default = Arm(mode=self.mode)
        changed = {
            key: value
            for key, value in asdict(self).items()
            if key not in ("mode", "lr", "seed") and value != getattr(default, key)
        }
        parts = [f"{key}_{value:g}" if isinstance(value, float) else f"{key}_{value}" for key, value in changed.items()]
        return "-".join([self.mode, *parts, f"lr_{self.lr:g}", f"seed_{self.seed}"]).lower().replace("+", "_and_")

    def settings(self, scale: Scale, data: Path, output: Path, device: str) -> dict[str, Any]:
        """Return the config of the run."""
        cpu = device == "cpu"
        adapters = {"lora_rank": 16, "lora_target_modules": ["all-linear"]} if self.lora else {}
        return {
            "name": self.name,
            "output": str(output),
            "steps": scale.rl_steps,
            "seed": self.seed,
            "model": {"path": str(data / "model"), "dtype": "float32" if cpu else DTYPES[self.trainer]} | adapters,
            "backend": {"device": device},
            "data": {
                "path": str(data / "train.jsonl"),
                "eval_path": str(data / "eval.jsonl"),
                "max_prompt_length": 512,
            },
            "rollout": {
                "engine": "transformers" if cpu else "vllm",
                "dtype": "float32" if cpu else DTYPES[self.rollout],
                "prompts_per_step": scale.prompts,
                "num_generations": scale.samples,
                "max_tokens": scale.max_tokens,
                "max_staleness": self.staleness,
                "top_p": self.top_p,
                "sampling_mask": "auto" if self.mask else "off",
                "options": {} if cpu else self._engine_options(scale),
            },
            "replay": {
                "mode": self.mode,
                "score_native_every": 10 if self.mode == "r3" else 0,
                "policy": self.policy,
                "margin": MARGIN if self.policy == "margin" else None,
            },
            "algorithm": {"updates_per_rollout": self.updates, "rollout_correction": self.correction},
            "optim": {"lr": 10 * self.lr if self.lora else self.lr},
            "reward": {"functions": ["experiments.task:exact"]},
            "batch": {"tokens_per_micro_batch": 8192},
            "eval": {"every": scale.eval_every, "prompts": scale.eval_prompts},
            "checkpoint": {"every": 20, "keep": 1, "export": False, "at_end": True},
        }

    def _engine_options(self, scale: Scale) -> dict[str, Any]:
        sequences = scale.prompts * scale.samples
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": scale.kv_gib * 2**30,
            "gpu_memory_utilization": 0.05,  # the cache has its size, and other runs share the GPU
            "max_model_len": scale.context,
            "max_num_seqs": sequences,
            # Graphs without compiled code: several runs that start at once would compile the same for minutes.
            "compilation_config": json.dumps(
                {
                    "mode": 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, *range(32, sequences + 1, 32)],
                }
            ),
        }
        return options | ({"quantization": "fp8"} if self.rollout == "fp8" else {})
