"""vLLM inside this process: its engine core runs beside us, its answers come back as samples with checked routes."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_replay.errors import EngineError, EngineName, EngineUnavailableError, MissingExtraError
from moe_replay.interop.capture import trace_from_capture
from moe_replay.rollout.engine import Engine, StartRequest, end_tokens
from moe_replay.rollout.gate import Gate
from moe_replay.rollout.loop import AsyncEngine
from moe_replay.rollout.state import EngineState
from moe_replay.rollout.types import FinishReason, Probe, Sample, SamplingParams, Weights
from moe_replay.rollout.weights import as_files, packed, safetensors_files
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

# Variables by which a launcher tells a trainer its process group: the engine's own processes form another group.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
WORKING_VERSIONS = "0.30.0 (tested); docs/engines.md says what is known of others"
CHUNK_BYTES = 256 * 2**20


def start(request: StartRequest) -> Engine:
    """Start vLLM in this process."""
    options = {"max_model_len": request.max_length, **request.options}
    if request.sleep and torch.cuda.is_available():  # on CPU there is no memory to free: it only stops sampling
        options.setdefault("enable_sleep_mode", True)
    with _without_launcher_variables():
        return VllmEngine(request.model, weight_version=request.weight_version, dtype=request.dtype, **options)


@contextmanager
def _without_launcher_variables() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class VllmEngine(AsyncEngine):
    """A model in vLLM. Options are vLLM's own engine arguments (dtype, max_model_len, tensor_parallel_size, ...).

    Example:
        engine = VllmEngine("Qwen/Qwen3-30B-A3B", dtype="bfloat16", max_model_len=8192)
        groups = engine.generate(prompts, SamplingParams(n=8, max_tokens=512))
    """

    def __init__(self, model: str | Path, *, weight_version: int = 0, **options: Any) -> None:
        self.name = EngineName("vLLM", _vllm_version())
        arguments = self._arguments(str(model), options)
        super().__init__("vllm")
        with ExitStack() as undo:
            undo.callback(self._loop.close)
            self._llm = self._loop.run(self._start(arguments))
            undo.pop_all()
        config = self._llm.model_config
        self.max_length: int = config.max_model_len
        self.topology = MoeTopology.from_config(config.hf_config)
        self._end_tokens = end_tokens(config.try_get_generation_config(), config.hf_text_config)
        self._can_sleep: bool = config.enable_sleep_mode
        self._seeds_are_deadly = _on_cpu() and self._llm.vllm_config.scheduler_config.enable_chunked_prefill
        self._state = EngineState(str(self.name), weight_version)
        self._gate = Gate(self._loop.loop)
        self._closed = False
        if _on_cpu():
            self._loop.run(self._in_workers("replay_allow_amx"))

    @property
    def weight_version(self) -> int:
        return self._state.weight_version

    def healthy(self) -> bool:
        """Whether vLLM's processes are alive."""
        return not self._closed and not self._llm.errored

    # ---- start --------------------------------------------------------------------------------------------------

    def _arguments(self, model: str, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs

        if "enable_return_routed_experts" not in {field.name for field in dataclasses.fields(AsyncEngineArgs)}:
            raise EngineError(
                f"{self.name} cannot return routes", expected=f"vLLM {WORKING_VERSIONS}", found=self.name.version
            )
        ours: dict[str, Any] = {
            "model": model,
            "enable_return_routed_experts": True,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
            "worker_extension_cls": "moe_replay.rollout.vllm_worker.WeightUpdates",
            "skip_tokenizer_init": True,  # token ids in, token ids out: nothing is ever re-tokenised
            "generation_config": "vllm",  # the model's own defaults would change the sampling behind our back
        }
        taken = sorted(ours.keys() & options.keys())
        if taken:
            raise EngineError("options of vLLM that moe-replay sets itself", found=", ".join(taken))
        unknown = sorted(options.keys() - {field.name for field in dataclasses.fields(AsyncEngineArgs)})
        if unknown:
            raise EngineError(f"{self.name} has no such options", found=", ".join(unknown))
        defaults: dict[str, Any] = {"disable_log_stats": True}
        if _on_cpu() and "max_num_batched_tokens" not in options:
            defaults["enable_chunked_prefill"] = False  # or seeds could not be used: see _check_seed
        return AsyncEngineArgs(**defaults | options | ours)

    async def _start(self, arguments: Any) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            llm = AsyncLLM.from_engine_args(arguments)
        except (ValueError, NotImplementedError, AssertionError, RuntimeError) as refusal:
            raise EngineError(
                f"{self.name} did not start with routes: {refusal}",
                expected=f"vLLM {WORKING_VERSIONS}",
                remedy="Its own messages above name the cause; without routes it cannot be used here",
            ) from refusal
        if not llm.model_config.enable_return_routed_experts:
            llm.shutdown()
            raise EngineError(f"{self.name} switched the return of routes off", expected=f"vLLM {WORKING_VERSIONS}")
        return llm

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """`params.n` samples of one prompt; runs in the engine's own loop."""
        self._check_seed(params)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_tokens)}
        asked = {
            "n": params.draws,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": _seed_of(prompt, params),
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,  # the model's end tokens are among the stop tokens, where they count
            "logprobs": 0,
        }
        async with self._gate.request() as number:
            self._state.require_ready()
            version = self.weight_version  # cannot change while a request is under way
            output = await self._output(prompt, asked, number)
        answers = sorted(output.outputs, key=lambda answer: answer.index)
        if [answer.index for answer in answers] != list(range(params.draws)):
            raise EngineError(f"{self.name} lost samples", expected=params.draws, found=len(answers))
        ids = np.asarray(prompt, np.int32)
        samples = [self._to_sample(ids, answer, version, index) for index, answer in enumerate(answers)]
        return samples * (params.n // params.draws)

    def _check_seed(self, params: SamplingParams) -> None:
        """On CPU vLLM dies of a seeded request whose prompt it prefills in chunks: it winds the generator back."""
        if params.seed is not None and params.temperature > 0 and self._seeds_are_deadly:
            raise EngineError(
                f"{self.name} on CPU cannot sample with a seed while it prefills in chunks",
                found=f"seed {params.seed}",
                remedy="Start the engine with enable_chunked_prefill=False, or sample without a seed",
            )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        return self._loop.run(self._prompt_logprobs(token_ids))

    async def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        async with self._gate.request() as number:
            self._state.require_ready()
            return await self._prompt_logprobs_now(token_ids, number)

    async def _prompt_logprobs_now(self, token_ids: Sequence[int], number: str) -> np.ndarray:
        output = await self._output(token_ids, {"max_tokens": 1, "prompt_logprobs": 0}, number)
        return _flat(output.prompt_logprobs)[1:]

    async def _output(self, prompt: Sequence[int], asked: dict[str, Any], number: str) -> Any:
        """vLLM's answer to one request, when it is whole."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        last = None
        with self._in_our_words():
            params = VllmParams(**asked, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            ids = [int(token) for token in prompt]
            async for output in self._llm.generate({"prompt_token_ids": ids}, params, number):
                last = output
        if last is None or not last.finished:
            raise EngineError(f"{self.name} ended a request without an answer")
        return last

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except VLLMClientError as refusal:
            raise EngineError(f"{self.name} refused a request: {refusal}") from refusal
        except (EngineDeadError, EngineGenerateError) as failure:
            raise EngineUnavailableError(
                f"{self.name} failed: {failure}", remedy="Its own messages name the cause"
            ) from failure

    def _to_sample(self, prompt: np.ndarray, answer: Any, version: int, index: int) -> Sample:
        completion = np.asarray(answer.token_ids, np.int32)
        tokens = np.concatenate([prompt, completion])
        reason = _finish_reason(answer.finish_reason, self.name)
        if answer.routed_experts is not None:
            trace = trace_from_capture(
                answer.routed_experts, tokens, self.topology, self.name, weight_version=version, sample=index
            )
        elif reason is FinishReason.ABORT and not len(completion):  # before its prompt was through
            trace = RouteTrace.uncovered(
                tokens, self.topology.layers, self.topology.top_k, version, num_experts=self.topology.num_experts
            )
        else:
            raise EngineError(f"{self.name} returned no routes", sample=index, expected=f"vLLM {WORKING_VERSIONS}")
        return Sample(
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=_flat(answer.logprobs),
            finish_reason=reason,
            trace=trace,
            weight_version=version,
        )

    async def _abort(self) -> None:
        await self._llm.abort(list(self._gate.under_way))

    def abort(self) -> None:
        """End what is being sampled; unfinished samples come back with `FinishReason.ABORT`."""
        self._loop.run(self._abort())

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Replace all weights in place, in every worker; what is being sampled is aborted first, what comes waits.

        An iterator is read here, in the caller's thread: reading it may be a collective operation of the trainer.
        """
        if self._state.asleep:
            raise EngineError(f"{self.name} sleeps", remedy="Call wake() before the update: its weights are not there")
        if isinstance(weights, Path):
            files = iter(safetensors_files(weights))
        else:
            files = as_files(packed(weights, CHUNK_BYTES))
        self._loop.run(self._begin_update())
        with self._gate.or_open():
            for file in files:
                self._loop.run(self._in_workers("replay_load", str(file.absolute())))
            self._loop.run(self._finish_update(version, probe))

    async def _begin_update(self) -> None:
        await self._gate.shut(self._abort)
        self._state.begin_update()
        await self._in_workers("replay_begin_update")

    async def _finish_update(self, version: int, probe: Probe | None) -> None:
        with self._gate.or_open():
            await self._in_workers("replay_finish_update")
            if not await self._llm.reset_prefix_cache():
                raise EngineError(f"{self.name} kept cached prefixes of older weights")
            if probe is not None:
                found = await self._prompt_logprobs_now(probe.token_ids, self._gate.new_name())
                probe.check(found, str(self.name))
            self._state.end_update(version)
        self._gate.open()

    async def _in_workers(self, method: str, *arguments: str) -> None:
        with self._gate.or_open(), self._in_our_words():
            answers = await self._llm.collective_rpc(method, args=arguments)
            wrong = [(rank, answer) for rank, answer in enumerate(answers) if answer]
            if wrong:
                rank, answer = wrong[0]
                raise EngineError(
                    f"{self.name} could not update its weights: {answer}",
                    found=f"worker {rank} of {len(answers)}, in {method}",
                    remedy="Send every weight, in the names and shapes of the model's checkpoint",
                )

    # ---- life ---------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory, where `enable_sleep_mode=True` was given (GPU)."""
        self._loop.run(self._sleep())

    async def _sleep(self) -> None:
        if not self._state.asleep:
            await self._gate.shut(self._abort)
            with self._gate.or_open():
                await self._llm.sleep(level=1 if self._can_sleep else 0)
                self._state.asleep = True
            self._gate.open()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._loop.run(self._wake())

    async def _wake(self) -> None:
        if self._state.asleep:
            await self._llm.wake_up(None if self._can_sleep else ["scheduling"])
            self._state.asleep = False

    def close(self) -> None:
        """End vLLM's processes."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._shutdown())
            self._loop.close()

    async def _shutdown(self) -> None:
        self._llm.shutdown()
        del self._llm  # or its own destructor runs when the interpreter has half gone


def _seed_of(prompt: Sequence[int], params: SamplingParams) -> int | None:
    """The prompt is part of the seed, or else one seed would draw alike for all prompts."""
    return None if params.seed is None else params.seed ^ zlib.crc32(np.asarray(prompt, np.int32).tobytes())


def _vllm_version() -> str:
    try:
        import vllm
    except ImportError as missing:
        raise MissingExtraError(
            "vLLM is not installed",
            expected=f"vLLM {WORKING_VERSIONS}",
            remedy="pip install 'moe-replay[vllm]'; on CPU see requirements/test.txt",
        ) from missing
    return vllm.__version__


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _finish_reason(reason: str | None, engine: EngineName) -> FinishReason:
    if reason not in tuple(FinishReason):
        raise EngineError(f"{engine} ended a sample for a reason of its own", expected=list(FinishReason), found=reason)
    return FinishReason(reason)


def _flat(logprobs: Any) -> np.ndarray:
    """(T,) float32: the first entry at each position, which is the token itself; 0 where there is none."""
    if logprobs is None:
        return np.zeros(0, np.float32)
    values = np.asarray([*logprobs.logprobs, 0.0], np.float32)
    starts, ends = np.asarray(logprobs.start_indices, int), np.asarray(logprobs.end_indices, int)
    return values[np.where(starts < ends, starts, -1)]
