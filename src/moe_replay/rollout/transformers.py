"""Sampling with Transformers: batched, with a KV cache and exact routes; needs no other engine installed.

It samples from the module that it is given, so a trainer may share its own: then weights need no update.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moe_replay.errors import EngineName, EngineOptionError, EngineUnavailableError
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.rollout.engine import Engine, StartRequest, check_prompts, end_tokens
from moe_replay.rollout.loop import CLOSE_TIMEOUT_S
from moe_replay.rollout.model_folder import ModelError, check_finite, load_model
from moe_replay.rollout.request_limits import check_token_ids
from moe_replay.rollout.sampling import Supports, draw, sampled_logprobs, uniforms
from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.rollout.state import EngineState
from moe_replay.rollout.types import FinishReason, Probe, Sample, SamplingParams, unrouted_trace
from moe_replay.rollout.weights.checkpoint import load_into, read_tensors
from moe_replay.rollout.weights.receiver import received_tensors
from moe_replay.rollout.weights.staging import device_id
from moe_replay.rollout.weights.transfer import Receivers, Transfer
from moe_replay.rollout.weights.types import Weights
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_parts import narrowest_dtype
from moe_replay.utils.device import device_type
from moe_replay.utils.eval_mode import evaluating


def start(request: StartRequest) -> Engine:
    """Load the model into this process, on a GPU if there is one."""
    try:
        return request.call(
            TransformersEngine.from_pretrained,
            request.model,
            max_length=request.max_length,
            weight_version=request.weight_version,
            dtype=request.dtype,
            router_family=request.router_family,
            trust_remote_code=request.trust_remote_code,
            device_map=device_type(),
        )
    except ModelError as error:
        if request.options and "unexpected keyword argument" in str(error):
            raise EngineOptionError(
                "the Transformers engine does not have one of these options",
                found=", ".join(request.options),
                remedy="rollout.options are those of Transformers' from_pretrained, and batch_size",
            ) from error
        raise


class TransformersEngine:
    """A Transformers model as a rollout engine.

    model         a causal language model, on whatever device it is
    replay        its controller, if it is attached already
    router_family   of a model unknown to this release, for `attach`
    max_length    tokens of a sequence at most, prompt included; None: the limit in its config
    batch_size    sequences sampled at once
    """

    one_call_at_a_time = True
    receives_in_caller = True  # transfers come from other processes

    def __init__(
        self,
        model: nn.Module,
        *,
        replay: RouterReplay | None = None,
        router_family: str | None = None,
        max_length: int | None = None,
        batch_size: int = 64,
        weight_version: int = 0,
    ) -> None:
        from transformers import __version__

        if not isinstance(batch_size, int) or batch_size < 1:
            raise EngineOptionError("batch_size is not a number of sequences", found=repr(batch_size))
        self.name = EngineName("Transformers", __version__)
        self.model: Any = model
        self.max_length = max_length or _text_config(model).max_position_embeddings
        self.vocab_size: int | None = getattr(_text_config(model), "vocab_size", None)
        self.batch_size = batch_size
        self._attached_here = replay is None
        self._replay = replay or attach(model, router_family or ())
        self._state = EngineState(str(self.name), weight_version)
        self._lock = threading.Lock()
        self._abort = threading.Event()
        self._is_closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        max_length: int | None = None,
        weight_version: int = 0,
        router_family: str | None = None,
        batch_size: int = 64,
        **options: Any,
    ) -> TransformersEngine:
        """Load a model by folder or name; options are those of Transformers' `from_pretrained` (dtype, device_map)."""
        device = options.get("device_map")
        if isinstance(device, str) and device in ("cpu", "cuda", "npu") and find_spec("accelerate") is None:
            del options["device_map"]  # which Transformers leaves to accelerate
            model = load_model(path, **options).to(device)
        else:
            model = load_model(path, **options)
        check_finite(model.named_parameters(), path)
        return cls(
            model,
            max_length=max_length,
            weight_version=weight_version,
            router_family=router_family,
            batch_size=batch_size,
        )

    @property
    def topology(self) -> MoeTopology:
        return self._replay.topology

    @property
    def weight_version(self) -> int:
        return self._state.weight_version

    @property
    def weights_id(self) -> str:
        """Id of the update that the weights come from."""
        return self._state.weights_id

    @property
    def receivers(self) -> Receivers:
        """The receiver of weight transfers: the process that this engine runs in."""
        device: torch.device = self.model.device
        return Receivers(device.type, (device_id(device),))

    def healthy(self) -> bool:
        """Always: the engine runs in this process."""
        return True

    # ---- sampling -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """Return `params.n` samples for each prompt, in the order of the prompts."""
        check_prompts(prompts, self.max_length)
        for prompt in prompts:
            check_token_ids(prompt, self.vocab_size)
        at_once = max(1, self.batch_size // params.n)
        groups: list[list[Sample]] = []
        with self._lock:
            self._require_open()
            self._state.require_ready()
            self._abort.clear()
            for first in range(0, len(prompts), at_once):
                samples = self._sample(prompts[first : first + at_once], params)
                self._require_open()
                groups += [samples[start:stop] for start, stop in pairwise(range(0, len(samples) + 1, params.n))]
        return groups

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt. Prefer `generate`, which batches prompts."""
        return (await asyncio.to_thread(self.generate, [prompt], params))[0]

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        check_prompts([token_ids], self.max_length + 1)
        check_token_ids(token_ids, self.vocab_size)
        with self._lock:
            return self._prompt_logprobs(token_ids)

    def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with torch.inference_mode(), evaluating(self.model):
            logprobs = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """Sample n completions of each prompt, all in one batch."""
        with (
            torch.inference_mode(),
            evaluating(self.model),
            self._replay.record(every_pass=True) if params.routes else nullcontext() as recording,
        ):
            drawn = self._draw_all(_Batch.left_padded(prompts, self.model.device), prompts, params)
        routes = None
        if recording is not None:
            routes = _routes_by_sample(recording.passes(), len(prompts), params.n, self.topology.num_experts)
        width = max(map(len, prompts))
        samples = []
        for row, (completion, logprobs, reason, mask) in enumerate(drawn):
            prompt = np.asarray(prompts[row // params.n], np.int32)
            tokens = np.concatenate([prompt, completion])
            own = None if routes is None else routes[row, width - len(prompt) :]
            samples.append(
                Sample(
                    prompt_ids=prompt,
                    completion_ids=completion,
                    logprobs=logprobs,
                    finish_reason=reason,
                    trace=self._trace(tokens, own),
                    weight_version=self.weight_version,
                    weights_id=self.weights_id,
                    sampling_mask=mask,
                )
            )
        return samples

    def _trace(self, tokens: np.ndarray, routes: np.ndarray | None) -> RouteTrace:
        """Return the trace of tokens (T,) with routes (at least T - 1, L, K); None: they were not asked for."""
        topology = self.topology
        if routes is None:
            return unrouted_trace(tokens, topology, self.weight_version)
        covered = np.arange(len(tokens)) < len(tokens) - 1  # the last token has been sampled, but never fed
        experts = np.zeros((len(tokens), *routes.shape[1:]), routes.dtype)
        experts[covered] = routes[: len(tokens) - 1]
        return RouteTrace(
            tokens, experts, topology.layers, covered, self.weight_version, num_experts=topology.num_experts
        )

    def _draw_all(
        self, batch: _Batch, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> Iterator[tuple[np.ndarray, np.ndarray, FinishReason, SamplingMask | None]]:
        """Completion ids, log-probs, finish reason and sampling mask of each of the B = prompts * n rows."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        logits = self._forward(batch, cache).repeat_interleave(params.n, dim=0)
        if params.n > 1:
            cache.batch_repeat_interleave(params.n)
        batch = batch.repeated(params.n)
        rows, device = len(logits), logits.device
        room = torch.tensor([self.max_length - len(prompt) for prompt in prompts], device=device)
        limit = room.clamp(max=params.max_tokens).repeat_interleave(params.n)
        steps = int(limit.max())
        numbers = uniforms(prompts, steps, params).to(device)
        ends = torch.tensor(sorted({*params.stop_token_ids, *self._end_tokens(params)}), device=device)

        alive = torch.ones(rows, dtype=torch.bool, device=device)
        stopped, count = torch.zeros_like(alive), torch.zeros_like(limit)
        ids, logprobs = [], []
        supports = Supports() if params.sampling_mask and params.is_truncated else None
        for step in range(steps):
            every = sampled_logprobs(logits, params)
            token = draw(every, numbers[:, step], params)
            if supports is not None:
                supports.add(every)
            ids.append(token)
            logprobs.append(every.gather(-1, token[:, None])[:, 0])
            count += alive
            stopped |= alive & torch.isin(token, ends)
            alive &= ~stopped & (count < limit)
            if not bool(alive.any()) or self._abort.is_set():
                break
            batch = batch.next_column(token.where(alive, 0))
            logits = self._forward(batch, cache)
        lengths = count.tolist()
        masks: Sequence[SamplingMask | None] = [None] * rows
        if supports is not None:
            masks = supports.masks(lengths)
        elif params.sampling_mask:
            masks = [SamplingMask.whole(length, logits.shape[-1]) for length in lengths]
        return _by_row(torch.stack(ids, 1), torch.stack(logprobs, 1), lengths, stopped, alive, masks)

    def _forward(self, batch: _Batch, cache: Any) -> Tensor:
        """(B, V) logits after the last column."""
        return self.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _end_tokens(self, params: SamplingParams) -> tuple[int, ...]:
        return () if params.ignore_eos else end_tokens(self.model.generation_config, self.model.config)

    # ---- weights and sleep ------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Copy new weights into the module, in place."""
        tensors = None if isinstance(weights, Transfer) else read_tensors(weights)
        self.abort()
        with self._lock, self._state.update_to(version, weights_id):
            if isinstance(weights, Transfer):
                with closing(received_tensors(weights, self.model.device)) as received:
                    load_into(self.model, received)
            elif tensors is not None:
                load_into(self.model, tensors)
            if probe is not None:
                probe.check(self._prompt_logprobs([int(token) for token in probe.token_ids]), str(self.name))

    def sleep(self) -> None:
        """Refuse to sample; there is no memory to free between calls."""
        self.abort()
        with self._lock:
            self._state.asleep = True

    def wake(self) -> None:
        self._state.asleep = False

    def abort(self) -> None:
        """End running samples after the current token."""
        self._abort.set()

    def close(self) -> None:
        """Detach the controller from the model, if this engine attached it; calls that are running raise."""
        self._is_closed = True
        self.abort()
        ended = self._lock.acquire(timeout=CLOSE_TIMEOUT_S)  # else the routers of a forward would lose their hooks
        if self._attached_here:
            self._replay.detach()
        if ended:
            self._lock.release()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailableError(f"{self.name}: the engine is closed")


class _Batch(NamedTuple):
    """Inputs of one forward: ids and positions of its columns, and the mask of all columns so far."""

    ids: Tensor
    mask: Tensor
    positions: Tensor

    @classmethod
    def left_padded(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> _Batch:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        padding = torch.tensor([[width - len(prompt)] for prompt in prompts], device=device)
        columns = torch.arange(width, device=device)
        return cls(ids, (columns >= padding).long(), (columns - padding).clamp(min=0))

    def repeated(self, n: int) -> _Batch:
        return _Batch(*(tensor.repeat_interleave(n, dim=0) for tensor in self))

    def next_column(self, token: Tensor) -> _Batch:
        """Return the inputs of the next column."""
        return _Batch(token[:, None], torch.nn.functional.pad(self.mask, (0, 1), value=1), self.positions[:, -1:] + 1)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _routes_by_sample(passes: Sequence[RouteBatch], prompts: int, n: int, num_experts: int) -> np.ndarray:
    """(B, columns, L, K) from the prefill of the prompts and one pass of B = prompts * n rows for each later token."""
    first, *later = [batch.experts for batch in passes]  # (L, R, K)
    layers, _, top_k = first.shape
    columns = [first.view(layers, prompts, -1, top_k).repeat_interleave(n, dim=1)]
    columns += [experts[:, :, None] for experts in later]
    by_sample = torch.cat(columns, dim=2).permute(1, 2, 0, 3).contiguous().cpu().numpy()
    return by_sample.view(narrowest_dtype(num_experts))


def _by_row(
    ids: Tensor,
    logprobs: Tensor,
    lengths: Sequence[int],
    stopped: Tensor,
    alive: Tensor,
    masks: Sequence[SamplingMask | None],
) -> Iterator[tuple[np.ndarray, np.ndarray, FinishReason, SamplingMask | None]]:
    all_ids, all_logprobs = ids.to(torch.int32).cpu().numpy(), logprobs.float().cpu().numpy()
    for row, (tokens, ended, unfinished) in enumerate(zip(lengths, stopped.tolist(), alive.tolist(), strict=True)):
        reason = FinishReason.STOP if ended else FinishReason.ABORT if unfinished else FinishReason.LENGTH
        yield all_ids[row, :tokens], all_logprobs[row, :tokens], reason, masks[row]
