"""`moe-replay rollout`: a rollout server that returns routes with samples."""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from moe_replay.engines.base import TOKEN_VARIABLE, Capture, Engine, LoraSpec, StartRequest
from moe_replay.engines.registry import ENGINES, engine_names, engine_spec, start_engine
from moe_replay.engines.requests import RequestLimits
from moe_replay.errors import EngineError, EngineOptionError, needs_extra
from moe_replay.utils.misc import is_loopback
from moe_replay.utils.secrets import check_token, find_token

SERVED = [name for name, spec in ENGINES.items() if not spec.is_server]
ENGINE_HELP = Doc(f"Rollout engine: {', '.join(SERVED)}, or module:name.")


@dataclass(frozen=True, kw_only=True)
class RolloutCommand:
    """Serve a model over HTTP and return routes with samples."""

    model: str
    """Model folder or Hub name."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback, other machines can connect with the token."""
    port: int = 8000
    """Port to listen on."""
    token: str | None = None
    """Rejected: command lines are visible to all users. Use $MOE_REPLAY_TOKEN or --token-file."""
    token_file: Path | None = None
    """File with the bearer token; default: $MOE_REPLAY_TOKEN, or a random token, which is printed."""
    trust_remote_code: bool = False
    """Allow custom Python code from the model folder."""
    engine: Annotated[str, ENGINE_HELP] = "vllm"
    dtype: str = "auto"
    """Engine dtype, e.g. bfloat16; auto: dtype of the checkpoint."""
    max_length: int | None = None
    """Maximum sequence length in tokens, including the prompt; default: the model's limit."""
    max_requests: int = 256
    """Maximum concurrent prompts; further requests get status 503."""
    weight_version: int = 0
    """Weight version of `model`."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    """Limits per request."""
    capture: Capture = "auto"
    """Route capture (vllm). kv_slot: in our worker; vllm: its own; cross_check: both; auto: kv_slot if possible;
    checked: auto with a self-test at the start."""
    lora_rank: int = 0
    """Accept LoRA adapters up to this rank in weight updates (vllm); same as model.lora_rank of the recipe."""
    lora_target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Layers with LoRA adapters; same as model.lora_target_modules of the recipe."""
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Extra engine options, e.g. --engine-options tensor_parallel_size 2 enable_sleep_mode True."""

    def __call__(self) -> None:
        with needs_extra("the rollout server needs {}", "serve"):
            import uvicorn  # noqa: F401  fail before the engine starts

            from moe_replay.engines.server.app import build_app
            from moe_replay.engines.server.serve import Server, listening
        self._check_numbers()
        token = find_token(self.token, self.token_file, TOKEN_VARIABLE)
        if token:
            check_token(token, TOKEN_VARIABLE, is_public=not is_loopback(self.host))
        else:
            token = secrets.token_urlsafe(32)
            print(f"token: {token}", flush=True)
        with listening(self.host, self.port) as opened:
            server = Server(opened, self.limits)
            server.run(self._start, lambda engine: build_app(engine, token, self.max_requests, self.limits))

    def _check_numbers(self) -> None:
        names = ("port", "max_length", "max_requests", "weight_version", "lora_rank")
        numbers = {name: getattr(self, name) for name in names}
        numbers |= {f"limits.{name}": value for name, value in asdict(self.limits).items()}
        for name, value in numbers.items():
            least = 0 if name in ("port", "weight_version", "lora_rank") else 1 if isinstance(value, int) else 1e-3
            if value is not None and not least <= value < math.inf:
                option = f"--{name.replace('_', '-')}"
                raise EngineOptionError(f"{option} is out of range", expected=f"at least {least}", found=value)

    def _start(self) -> Engine:
        if engine_spec(self.engine, key="--engine").is_server:
            raise EngineError(f"--engine {self.engine} is already a server", expected=f"one of {', '.join(SERVED)}")
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
        from moe_replay.train.setup.engines import lora_spec

        trusted = self.trust_remote_code
        adapter = ModelConfig(
            lora_rank=self.lora_rank, lora_target_modules=self.lora_target_modules, trust_remote_code=trusted
        )
        return lora_spec(adapter, self.model)
