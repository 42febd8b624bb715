"""Sampling with Transformers: batched, with a KV cache and exact routes; no other engine needs to be installed.

The engine samples from the module it is constructed with. A trainer may share its own module: then weight updates are
not needed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moe_replay.engines.base import Engine, StartRequest, check_prompts, end_tokens
from moe_replay.engines.event_loop import CLOSE_TIMEOUT_S
from moe_replay.engines.requests import EngineState, check_token_ids, per_prompt, prompt_hash
from moe_replay.errors import EngineName, EngineOptionError, EngineUnavailableError
from moe_replay.interop.capture import unrouted_trace
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_parts import narrowest_dtype
from moe_replay.sampling_mask import SamplingMask
from moe_replay.utils.device import device_type
from moe_replay.utils.misc import evaluating
from moe_replay.weights.checkpoint import load_into, read_tensors
from moe_replay.weights.identity import Probe
from moe_replay.weights.model_folder import ModelError, check_finite, load_model
from moe_replay.weights.source import Weights
from moe_replay.weights.staging import device_id, openable_devices, received_tensors
from moe_replay.weights.transfer import Receivers, Transfer

_ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
"""Event that is set when the caller no longer waits for the samples."""


def _is_abandoned() -> bool:
    abandoned = _ABANDONED.get()
    return abandoned is not None and abandoned.is_set()


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


class TransformersEngine(Engine):
    """A Transformers model as a rollout engine.

    model         a causal language model, on any device
    replay        its controller, if it is attached already
    router_family   of a model unknown to this release, for `attach`
    max_length    tokens of a sequence at most, prompt included; None: the limit in its config
    batch_size    sequences per batch
    """

    is_serial = True
    name: EngineName
    vocab_size: int | None

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
        self.vocab_size = getattr(_text_config(model), "vocab_size", None)
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
        return self._state.weights_id

    @property
    def receivers(self) -> Receivers:
        """The receiver of weight transfers: the process that this engine runs in."""
        device: torch.device = self.model.device
        return Receivers(device.type, (device_id(device),), tuple(openable_devices(device)))

    # ---- sampling -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        check_prompts(prompts, self.max_length)
        per_prompt(params, len(prompts))  # as many seeds as prompts
        for prompt in prompts:
            check_token_ids(prompt, self.vocab_size)
        prompts_per_batch = max(1, self.batch_size // params.n)
        groups: list[list[Sample]] = []
        with self._lock:
            self._require_open()
            self._state.require_ready()
            self._abort.clear()
            if _is_abandoned():
                return []
            for first in range(0, len(prompts), prompts_per_batch):
                batch = slice(first, first + prompts_per_batch)
                samples = self._sample(prompts[batch], replace(params, seeds=params.seeds[batch]))
                self._require_open()
                groups += [samples[start:stop] for start, stop in pairwise(range(0, len(samples) + 1, params.n))]
        return groups

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt. Prefer `generate`, which batches prompts."""
        abandoned = threading.Event()
        before = _ABANDONED.set(abandoned)
        try:
            return (await asyncio.to_thread(self.generate, [prompt], params))[0]
        finally:
            abandoned.set()  # matters if this call is cancelled: the thread would sample to the end
            _ABANDONED.reset(before)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        check_prompts([token_ids], self.max_length + 1)
        check_token_ids(token_ids, self.vocab_size)
        with self._lock:
            self._state.require_ready()
            return self._prompt_logprobs(token_ids)

    def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with torch.inference_mode(), evaluating(self.model):
            logprobs = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        with (
            torch.inference_mode(),
            evaluating(self.model),
            self._replay.record(every_pass=True) if params.routes else nullcontext() as recording,
        ):
            drawn = self._draw_all(_Batch.left_padded(prompts, self.model.device), prompts, params)
        routed_experts = None
        if recording is not None:
            routed_experts = _by_sample(recording.passes(), len(prompts), params.n, self.topology.num_experts)
        width = max(map(len, prompts))
        samples = []
        for row, (completion, logprobs, reason, mask) in enumerate(drawn):
            prompt = np.asarray(prompts[row // params.n], np.int32)
            tokens = np.concatenate([prompt, completion])
            of_sample = None if routed_experts is None else routed_experts[row, width - len(prompt) :]
            samples.append(
                Sample(
                    prompt_ids=prompt,
                    completion_ids=completion,
                    logprobs=logprobs,
                    finish_reason=reason,
                    trace=self._trace(tokens, of_sample),
                    weight_version=self.weight_version,
                    weights_id=self.weights_id,
                    sampling_mask=mask,
                )
            )
        return samples

    def _trace(self, tokens: np.ndarray, routed_experts: np.ndarray | None) -> RouteTrace:
        """Return the trace of tokens (T,) with routed_experts (at least T - 1, L, K); None: not requested."""
        topology = self.topology
        if routed_experts is None:
            return unrouted_trace(tokens, topology, self.weight_version)
        covered = np.arange(len(tokens)) < len(tokens) - 1  # the last token has been sampled, but never fed
        by_token = np.zeros((len(tokens), *routed_experts.shape[1:]), routed_experts.dtype)
        by_token[covered] = routed_experts[: len(tokens) - 1]
        return RouteTrace(
            tokens, by_token, topology.layers, covered, self.weight_version, num_experts=topology.num_experts
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
        free_tokens = torch.tensor([self.max_length - len(prompt) for prompt in prompts], device=device)
        limit = free_tokens.clamp(max=params.max_tokens).repeat_interleave(params.n)
        steps = int(limit.max())
        randoms = uniforms(prompts, steps, params).to(device)
        ends = torch.tensor(sorted({*params.stop_token_ids, *self._end_tokens(params)}), device=device)

        alive = torch.ones(rows, dtype=torch.bool, device=device)
        stopped, count = torch.zeros_like(alive), torch.zeros_like(limit)
        ids, logprobs = [], []
        collector = MaskCollector() if params.sampling_mask and params.is_truncated else None
        for step in range(steps):
            all_logprobs = sampled_logprobs(logits, params)
            token = draw(all_logprobs, randoms[:, step], params)
            if collector is not None:
                collector.add(all_logprobs)
            ids.append(token)
            logprobs.append(all_logprobs.gather(-1, token[:, None])[:, 0])
            count += alive
            stopped |= alive & torch.isin(token, ends)
            alive &= ~stopped & (count < limit)
            if not bool(alive.any()) or self._abort.is_set() or _is_abandoned():
                break
            batch = batch.next_column(token.where(alive, 0))
            logits = self._forward(batch, cache)
        lengths = count.tolist()
        masks: Sequence[SamplingMask | None] = [None] * rows
        if collector is not None:
            masks = collector.masks(lengths)
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
        self._load(read_tensors(weights), version, probe, weights_id)

    def receive_weights(
        self, transfer: Transfer, version: int, probe: Probe | None = None, weights_id: str = ""
    ) -> None:
        with closing(received_tensors(transfer, self.model.device)) as received:
            self._load(received, version, probe, weights_id)

    def receivers_by_url(self, weights_id: str = "") -> dict[str, Receivers | None]:
        """Take no transfers from the engine's own process: the caller's thread cannot send and receive."""
        return {"": None}

    def _load(self, tensors: Iterator[tuple[str, Tensor]], version: int, probe: Probe | None, weights_id: str) -> None:
        self.abort()
        with self._lock, self._state.update_to(version, weights_id):
            load_into(self.model, tensors)
            if probe is not None:
                probe.check(self._prompt_logprobs([int(token) for token in probe.token_ids]), str(self.name))

    def sleep(self, level: int = 1) -> None:
        """Refuse to sample until `wake`; there is no memory to free between calls."""
        self.abort()
        with self._lock:
            self._state.asleep = True

    def wake(self) -> None:
        self._state.asleep = False

    def abort(self) -> None:
        """End running samples after the current token."""
        self._abort.set()

    def close(self) -> None:
        """Detach the controller from the model, if this engine attached it; running calls raise."""
        self._is_closed = True
        self.abort()
        acquired = self._lock.acquire(timeout=CLOSE_TIMEOUT_S)  # else the routers of a forward would lose their hooks
        if self._attached_here:
            self._replay.detach()
        if acquired:
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
        return _Batch(token[:, None], torch.nn.functional.pad(self.mask, (0, 1), value=1), self.positions[:, -1:] + 1)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _by_sample(passes: Sequence[RouteBatch], prompts: int, n: int, num_experts: int) -> np.ndarray:
    """(B, columns, L, K) from the prefill of the prompts and one pass of B = prompts * n rows for each later token."""
    first, *later = [batch.routed_experts for batch in passes]  # (L, R, K)
    layers, _, top_k = first.shape
    columns = [first.view(layers, prompts, -1, top_k).repeat_interleave(n, dim=1)]
    columns += [routed_experts[:, :, None] for routed_experts in later]
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


# ---- sampling from logits --------------------------------------------------------------------------------------------


def sampled_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """(B, V) float32: log-probs of the distribution sampled from; greedy ones are at temperature 1."""
    scaled = logits.float() / (params.temperature or 1.0)
    if params.temperature == 0:
        return scaled.log_softmax(-1)
    if 0 < params.top_k < scaled.shape[-1]:
        threshold = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    if params.top_p < 1:
        descending, order = scaled.sort(dim=-1, descending=True)
        probabilities = descending.softmax(-1)
        # A token stays while those before it hold less than top_p: the likeliest one always does.
        dropped = probabilities.cumsum(-1) - probabilities >= params.top_p
        scaled = scaled.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    return scaled.log_softmax(-1)


def draw(logprobs: Tensor, uniform: Tensor, params: SamplingParams) -> Tensor:
    """(B,) token ids from log-probs (B, V), by inverse transform of uniform numbers (B,)."""
    if params.temperature == 0:
        return logprobs.argmax(-1)
    cumulated = logprobs.double().exp().cumsum(-1)
    # right=True: the first token whose interval ends beyond the number, so never one of probability zero
    tokens = torch.searchsorted(cumulated, uniform.double()[:, None] * cumulated[:, -1:], right=True)[:, 0]
    return tokens.clamp(max=logprobs.shape[-1] - 1)


class MaskCollector:
    """Collects the sampling masks of B rows, column by column."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._vocab_size = 0

    def add(self, logprobs: Tensor) -> None:
        """Add the next token of all rows, from the log-probs (B, V) of the distributions it is sampled from."""
        in_support = logprobs > -torch.inf
        rows, ids = in_support.nonzero(as_tuple=True)
        self._counts.append(in_support.sum(-1))
        self._rows.append(rows)
        self._ids.append(ids)
        self._vocab_size = logprobs.shape[-1]

    def masks(self, lengths: Sequence[int]) -> list[SamplingMask]:
        """Return the mask of each row's first `lengths[row]` tokens."""
        counts = torch.stack(self._counts, 1).cpu().numpy()
        order = torch.cat(self._rows).argsort(stable=True)
        ids = torch.cat(self._ids)[order].cpu().numpy()
        ends = np.concatenate([[0], np.cumsum(counts)])
        first = np.arange(len(counts)) * counts.shape[1]
        return [
            SamplingMask(self._vocab_size, counts[row, :length], ids[ends[start] : ends[start + length]])
            for row, (start, length) in enumerate(zip(first.tolist(), lengths, strict=True))
        ]


def uniforms(prompts: Sequence[Sequence[int]], steps: int, params: SamplingParams) -> Tensor:
    """(prompts * n, steps) in [0, 1). A seeded row depends only on the seed, its prompt and its sample index."""
    rows = []
    for prompt, own_params in zip(prompts, per_prompt(params, len(prompts)), strict=True):
        if own_params.seed is None:
            rows.append(torch.rand(params.n, steps, dtype=torch.float64))
            continue
        for sample in range(params.n):
            random = np.random.default_rng([own_params.seed, prompt_hash(prompt), sample])
            rows.append(torch.from_numpy(random.random((1, steps))))
    return torch.cat(rows)
