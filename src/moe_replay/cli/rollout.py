"""`moe-replay rollout`: serve a model for sampling with routes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from moe_replay.errors import EngineError, MissingExtraError
from moe_replay.rollout.engine import TOKEN_VARIABLE, Capture, Engine, LoraSpec, StartRequest
from moe_replay.rollout.registry import ENGINES, engine_names, engine_spec, start_engine
from moe_replay.rollout.request_limits import RequestLimits
from moe_replay.utils.secrets import find_token

SERVED = [name for name, spec in ENGINES.items() if not spec.is_server]
ENGINE_HELP = Doc(f"What samples: {', '.join(SERVED)}, or module:name.")


@dataclass(frozen=True, kw_only=True)
class RolloutCommand:
    """Serve a model for sampling with routes, over HTTP."""

    model: str
    """Folder or name of the model."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than the loopback lets other machines connect, with the token."""
    port: int = 8000
    """Port to listen on."""
    token: str | None = None
    """Refused, since every user of the machine could read it: set $MOE_REPLAY_TOKEN or --token-file."""
    token_file: Path | None = None
    """File with the bearer token that clients send; else $MOE_REPLAY_TOKEN, else a random one is printed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    engine: Annotated[str, ENGINE_HELP] = "vllm"
    dtype: str = "auto"
    """Dtype of the engine, e.g. bfloat16; auto: that of the weights on disk."""
    max_length: int | None = None
    """Tokens of a sequence at most, prompt included; the model's own limit if not given."""
    max_requests: int = 256
    """Prompts sampled at once; further requests are answered with 503."""
    weight_version: int = 0
    """Version of the weights in `model`."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    """What one client may ask for."""
    capture: Capture = "auto"
    """Capture that records routes (vllm): ours, in its worker; vllm: its own; checked: both; auto: ours if possible."""
    lora_rank: int = 0
    """Take LoRA adapters of up to this rank in place of weights (vllm): model.lora_rank of the recipe."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Layers with room for adapters: model.lora_targets of the recipe."""
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """More of the engine's own options, e.g. --engine-options tensor_parallel_size 2 enable_sleep_mode True."""

    def __call__(self) -> None:
        """Start the engine and serve requests until a signal, then return."""
        try:
            import uvicorn  # noqa: F401  looked for before the engine is started

            from moe_replay.rollout.server.app import build_app
            from moe_replay.rollout.server.serve import Server, listening
        except ImportError as missing:
            raise MissingExtraError(
                f"the rollout server needs {missing.name}", remedy="pip install 'moe-replay[serve]'"
            ) from missing

        token = find_token(self.token, self.token_file, TOKEN_VARIABLE)
        if not token:
            token = secrets.token_urlsafe(32)
            print(f"token: {token}", flush=True)
        with listening(self.host, self.port) as opened:
            server = Server(opened, self.limits)
            server.run(self._start, lambda engine: build_app(engine, token, self.max_requests, self.limits))

    def _start(self) -> Engine:
        if engine_spec(self.engine, key="--engine").is_server:
            raise EngineError(
                f"--engine {self.engine} is reached over HTTP already", expected=f"one of {', '.join(SERVED)}"
            )
        request = StartRequest(
            model=self.model,
            max_length=self.max_length,
            dtype=self.dtype,
            weight_version=self.weight_version,
            trust_remote_code=self.trust_remote_code,
            capture=self.capture,
            lora=self._lora(),
            options=self.engine_options,
        )
        return start_engine(self.engine, request, key="--engine")

    def _lora(self) -> LoraSpec | None:
        if not self.lora_rank:
            return None
        if not engine_spec(self.engine, key="--engine").takes_lora:
            expected = " or ".join(engine_names(lambda spec: spec.takes_lora and not spec.is_server))
            raise EngineError(f"--lora-rank: {self.engine} takes no adapters", expected=f"--engine {expected}")
        from moe_replay.train.config.sections import ModelConfig
        from moe_replay.train.engines import lora_spec

        trusted = self.trust_remote_code
        adapter = ModelConfig(lora_rank=self.lora_rank, lora_targets=self.lora_targets, trust_remote_code=trusted)
        return lora_spec(adapter, self.model)
