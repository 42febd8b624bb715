"""A plain loop over a Transformers model: what the same work takes without replay, checks, metrics and sharding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from moe_replay.records import Trajectory

HEAD_ROWS = 2048


class PlainLoop:
    """Scores and updates packed sequences of equal length; layers are recomputed and, on CUDA, compiled."""

    def __init__(self, folder: Path, device: torch.device, trajectories: Sequence[Trajectory], budget: int) -> None:
        from transformers import AutoModelForCausalLM

        on_gpu = device.type == "cuda"
        length = len(trajectories[0])
        rows = budget // length * length
        attention = _varlen(length, rows, device) if on_gpu else "sdpa"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        self._model = model.to(device).train()
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        if on_gpu:
            for layer in self._model.model.layers:
                layer.compile()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-7, fused=True)
        ids = torch.cat([torch.from_numpy(one.token_ids).long() for one in trajectories]).to(device)
        advantages = torch.cat([torch.full((length,), one.advantage) for one in trajectories]).to(device)
        self._batches = list(zip(ids.split(rows), advantages.split(rows), strict=True))
        self._positions = (torch.arange(rows, device=device) % length)[None]
        self._scored = self._positions[0] >= length // 2 - 1  # the half that was sampled, but for its last token's next
        self._scored &= self._positions[0] < length - 1

    def score(self) -> None:
        """Compute the log-probs of all sequences."""
        with torch.no_grad():
            for ids, _ in self._batches:
                self._logprobs(ids)

    def update(self) -> None:
        """Take one step of the surrogate with ratios of 1."""
        for ids, advantages in self._batches:
            logprobs = self._logprobs(ids)
            kept = advantages[self._scored[: len(ids)]]
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * kept).mean() / len(self._batches)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _logprobs(self, ids: Tensor) -> Tensor:
        positions, scored = self._positions[:, : len(ids)], self._scored[: len(ids)]
        hidden = self._model.model(input_ids=ids[None], position_ids=positions, use_cache=False).last_hidden_state[0]
        targets = ids.roll(-1)[scored]
        parts = zip(hidden[scored].split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
        return torch.cat([checkpoint(self._slice, rows, ids, use_reentrant=False) for rows, ids in parts])

    def _slice(self, rows: Tensor, targets: Tensor) -> Tensor:
        return -cross_entropy(linear(rows, self._model.lm_head.weight).float(), targets, reduction="none")


def _varlen(length: int, rows: int, device: torch.device) -> str:
    """Register attention over packed sequences of this length with Transformers; return its name."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any = None, **_: Any) -> Any:
        q, k, v = (tensor.transpose(1, 2)[0] for tensor in (q, k, v))
        repeats = q.shape[1] // k.shape[1]
        if not takes_gqa:
            k, v = (tensor.repeat_interleave(repeats, 1) for tensor in (k, v))
        bounds = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=device)
        options = {"enable_gqa": True} if takes_gqa and repeats > 1 else {}
        q, k, v = (tensor.contiguous() for tensor in (q, k, v))
        output = varlen_attn(q, k, v, bounds, bounds, length, length, window_size=(-1, 0), scale=scaling, **options)
        return output[None], None

    AttentionInterface.register("plain_varlen", attention)
    AttentionMaskInterface.register("plain_varlen", lambda *args, **settings: None)
    return "plain_varlen"
