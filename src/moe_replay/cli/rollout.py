"""`moe-replay rollout`: serve a model for sampling with routes."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moe_replay.errors import MissingExtraError

if TYPE_CHECKING:
    from moe_replay.rollout.engine import Engine


@dataclass(frozen=True, kw_only=True)
class RolloutCommand:
    """Serve a model for sampling with routes, over HTTP."""

    model: str
    """Folder or name of the model."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but the loopback lets other machines in, with the token."""
    port: int = 8000
    """Port to listen on."""
    token: str | None = None
    """Bearer token that clients send; else $MOE_REPLAY_TOKEN, else one is made up and printed."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples."""
    dtype: str = "auto"
    """Type of the weights, e.g. bfloat16."""
    max_length: int | None = None
    """Tokens of a sequence at most, prompt included; the model's own limit if not given."""
    max_requests: int = 256
    """Prompts under way at once; beyond that clients are sent elsewhere."""
    weight_version: int = 0
    """Version of the weights that the server starts with."""
    vllm: dict[str, int | float | bool | str] = field(default_factory=dict)
    """More of vLLM's engine arguments, e.g. --vllm tensor_parallel_size 2 enable_sleep_mode True."""

    def __call__(self) -> None:
        """Start the engine, then listen until told to stop."""
        try:
            import uvicorn

            from moe_replay.rollout.server_app import build_app
        except ImportError as missing:
            raise MissingExtraError(
                f"the rollout server needs {missing.name}", remedy="pip install 'moe-replay[serve]'"
            ) from missing

        token = self.token or os.environ.get("MOE_REPLAY_TOKEN")
        if not token:
            token = secrets.token_urlsafe(32)
            print(f"token: {token}", flush=True)
        engine = self._start()
        try:
            uvicorn.run(
                build_app(engine, token, self.max_requests), host=self.host, port=self.port, log_level="warning"
            )
        finally:
            engine.close()

    def _start(self) -> Engine:
        if self.engine == "transformers":
            from moe_replay.rollout.transformers import TransformersEngine

            return TransformersEngine.from_pretrained(
                self.model, max_length=self.max_length, weight_version=self.weight_version, dtype=self.dtype
            )
        from moe_replay.rollout.vllm import VllmEngine

        return VllmEngine(
            self.model,
            weight_version=self.weight_version,
            dtype=self.dtype,
            max_model_len=self.max_length,
            **self.vllm,
        )
