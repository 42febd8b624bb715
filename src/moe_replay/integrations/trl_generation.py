"""Routes of TRL's rollouts: recorded during TRL's own `generate`, or from an engine in place of TRL's vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.engines.base import Engine
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.engines.vllm.engine import VllmEngine
from moe_replay.errors import AlignmentError, EngineError
from moe_replay.integrations.trl_passes import RoutedSample, batch_layout
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.replay.controller import Recording, RouterReplay
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.trace import RouteTrace
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe

PROBE_TOKENS = 64


class GenerationWatch:
    """Records token ids, routes and log-probs while Transformers generates.

    model        the language model whose `generate` runs, without wrappers
    replay       its controller, where routes are needed
    temperature  of the log-probs, as TRL scores them; filters such as top-p have no part in those
    """

    def __init__(self, model: nn.Module, replay: RouterReplay | None, temperature: float) -> None:
        self.model = model
        self.replay = replay
        self.temperature = temperature
        self._fed: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._logits: Tensor | None = None
        self._recording: Recording | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the one call of `generate` inside this context."""
        recording: AbstractContextManager[Recording | None] = (
            nullcontext() if self.replay is None else self.replay.record(every_pass=True)
        )
        handle = self.model.register_forward_hook(self._seen, with_kwargs=True)
        try:
            with recording as self._recording:
                yield
        finally:
            handle.remove()

    def _seen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"]
        if self._logits is not None:
            columns = sum(fed.shape[1] for fed in self._fed)
            if ids.shape[1] not in (1, columns + 1):  # with a cache, and without one
                raise AlignmentError(
                    "generation did not feed one token after the other",
                    expected=f"1 or {columns + 1} columns",
                    found=ids.shape[1],
                    remedy="Assisted decoding and prefill in chunks are not supported here",
                )
            ids = ids[:, -1:]
            self._logprobs.append(self._of(ids[:, 0]))
        self._fed.append(ids)
        self._logits = output.logits[:, -1].detach()

    def _of(self, tokens: Tensor) -> Tensor:
        """Return (B,) log-probs of tokens after the last pass."""
        assert self._logits is not None
        all_logprobs = (self._logits.float() / self.temperature).log_softmax(-1)
        return all_logprobs.gather(-1, tokens[:, None])[:, 0]

    def samples(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], weight_version: int
    ) -> list[RoutedSample]:
        """Return the samples with log-probs and, if recorded, routes; the last token of each was never fed.

        With ZeRO-3 or FSDP a rank that has its samples feeds their last column until the other ranks have theirs.
        """
        fed = torch.cat(self._fed, dim=1)
        width = self._fed[0].shape[1]
        drawn = max(map(len, completions))
        last = torch.tensor([ids[-1] for ids in completions], device=fed.device)
        longest = [row for row, ids in enumerate(completions) if len(ids) == drawn]
        fed, repeated = fed.tensor_split([width + drawn - 1], dim=1)
        if fed.shape != (len(prompts), width + drawn - 1) or not (repeated == last[:, None])[longest].all():
            raise AlignmentError(
                "generation fed other tokens than it returned",
                expected=f"({len(prompts)}, {width} + {drawn - 1}) token ids, then none but the last",
                found=f"({fed.shape[0]}, {fed.shape[1]} + {repeated.shape[1]})",
                remedy="Beam search is not supported here",
            )
        logprobs = torch.stack([*self._logprobs, self._of(last)], dim=1).cpu()
        samples = [
            RoutedSample((*prompt, *completion), len(prompt), logprobs=logprobs[row, : len(completion)].tolist())
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        traces = self._traces(samples, fed, width, weight_version)
        return [replace(sample, trace=trace) for sample, trace in zip(samples, traces, strict=True)]

    def _traces(
        self, samples: Sequence[RoutedSample], fed: Tensor, prompt_width: int, weight_version: int
    ) -> Sequence[RouteTrace | None]:
        without_last = [RoutedSample(sample.token_ids[:-1], sample.prompt_length) for sample in samples]
        layout = batch_layout(without_last, prompt_width, fed.shape[1])
        ids = [sample.token_ids for sample in without_last]
        layout.check_fed(ids, fed.cpu().numpy())
        if self.replay is None or self._recording is None:
            return [None] * len(samples)
        passes = self._recording.passes()
        routed_experts = {layer: self._columns(passes, layer, fed.shape[1]) for layer in self.replay.layers}
        traces = RouteBatch.recorded(routed_experts, self.replay.topology, fed).to_traces(ids, layout, weight_version)
        return [trace.append_tokens(s.token_ids[-1:]) for trace, s in zip(traces, samples, strict=True)]

    def _columns(self, passes: Sequence[RouteBatch], layer: int, columns: int) -> Tensor:
        """Return (B * columns, K): of each pass the columns that were new in it."""
        by_pass = [
            routes.layer(layer)[0].unflatten(0, (fed.shape[0], -1))[:, -fed.shape[1] :]
            for routes, fed in zip(passes, self._fed, strict=True)
        ]
        return torch.cat(by_pass, dim=1)[:, :columns].flatten(0, 1)


class EngineGeneration:
    """The interface of TRL's vLLM (`sync_weights`, `generate`) on top of an engine that returns routes.

    An engine in this process belongs to this rank. Any other serves all ranks: rank 0 sends the weights.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, params: SamplingParams, accelerator: Any, step: Callable[[], int]
    ) -> None:
        self.engine = engine
        self.model = model  # unwrapped, but for PEFT
        self.params = params
        self.accelerator = accelerator
        self.step = step  # number of updates so far: the version of the weights
        self.samples: list[RoutedSample] = []
        self._stale = True

    def sync_weights(self) -> None:
        """Mark the engine's weights as stale: the next `generate` updates them, and has a prompt to check them with."""
        self._stale = True

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any, num_generations: int, profiler: AbstractContextManager
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Return prompt ids, completion ids and log-probs (nested as in TRL), one of each per prompt."""
        if images is not None:
            raise EngineError("engines with routes take token ids only", found="images")
        if self._stale:
            self._update(prompts[0])
            self._stale = False
        with profiler:
            drawn = [_whole(sample) for sample in self._sample(prompts)]
        self.samples = [
            RoutedSample(tuple(s.trace.token_ids.tolist()), len(s.prompt_ids), s.trace, s.logprobs.tolist())
            for s in drawn
        ]
        logprobs = [[[value] for value in sample.logprobs.tolist()] for sample in drawn]
        return [s.prompt_ids.tolist() for s in drawn], [s.completion_ids.tolist() for s in drawn], logprobs, None

    def _sample(self, prompts: Sequence[Sequence[int]]) -> list[Sample]:
        """Sample once per prompt. TRL repeats each prompt; the engine gets it once, with n samples."""
        counts = Counter(map(tuple, prompts))
        drawn: dict[tuple[int, ...], list[Sample]] = {}
        for n in sorted(set(counts.values())):
            group = [prompt for prompt, count in counts.items() if count == n]
            drawn |= dict(zip(group, self.engine.generate(group, replace(self.params, n=n)), strict=True))
        return [drawn[tuple(prompt)].pop(0) for prompt in prompts]

    def _update(self, prompt: Sequence[int]) -> None:
        version = self.step()
        if self._is_ours or self.accelerator.is_main_process:
            with merged_weights(self.model) as weights:
                self.engine.update_weights(weights, version, self._probe(prompt))
        self.accelerator.wait_for_everyone()

    @property
    def _is_ours(self) -> bool:
        return isinstance(self.engine, (TransformersEngine, VllmEngine))

    def _probe(self, prompt: Sequence[int]) -> Probe | None:
        tokens = [int(token) for token in prompt[:PROBE_TOKENS]]
        if len(tokens) < 2:
            return None
        ids = torch.tensor([tokens], device=self.accelerator.device)
        with torch.no_grad(), self.accelerator.autocast():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return Probe(token_ids=tokens, logprobs=logprobs.cpu().numpy())


@contextmanager
def merged_weights(model: nn.Module) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the weights of a model as in its checkpoint, with PEFT's adapters merged inside this context."""
    from accelerate.utils import is_peft_model

    if not is_peft_model(model):
        yield checkpoint_tensors(model)
        return
    peft_model: Any = model
    language_model = peft_model.get_base_model()
    peft_model.merge_adapter()
    try:
        yield checkpoint_tensors(language_model, _without_adapters(language_model.state_dict()))
    finally:
        peft_model.unmerge_adapter()


def _without_adapters(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their names without PEFT."""
    for name, tensor in state.items():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def _whole(sample: Sample) -> Sample:
    if sample.finish_reason is FinishReason.ABORT:
        raise EngineError(
            "a sample was aborted", remedy="Another process aborts or updates this engine; give each run its own"
        )
    return sample
