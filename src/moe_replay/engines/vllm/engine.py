"""vLLM in this process as a rollout engine: samples with checked routes, weight updates in place, sleep and wake."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moe_replay.engines.base import Capture, Engine, LoraSpec, StartRequest, end_tokens
from moe_replay.engines.event_loop import AsyncSampler, while_alive
from moe_replay.engines.requests import EngineState, RequestBarrier, check_token_ids, parse_finish_reason, request_seed
from moe_replay.engines.vllm.arguments import (
    batch_options,
    engine_arguments,
    gpu_memory_fraction,
    not_started,
    translated_errors,
    without_launcher_variables,
)
from moe_replay.engines.vllm.capture import UNROUTED, RouteSource
from moe_replay.engines.vllm.console import engine_console, failure_file, noted_failure
from moe_replay.engines.vllm.lora import AdapterSlot, adapter_options, supported_adapters
from moe_replay.engines.vllm.masks import MASK_OPTION, MaskReturn
from moe_replay.engines.vllm.release import (
    INSTALL,
    NEWEST,
    WORKING_VERSIONS,
    VllmRelease,
    check_no_seed,
    on_cpu,
    returns_routes,
)
from moe_replay.engines.vllm.selftest import check_routes, prompt_ids, prompt_tokens, router_settings
from moe_replay.errors import EngineError, EngineName, EngineUnavailableError
from moe_replay.interop.capture import trace_from_capture, unrouted_trace
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.device import accelerator
from moe_replay.utils.misc import one_line
from moe_replay.utils.processes import list_shared_files, owned_folder
from moe_replay.utils.tested_versions import dotted
from moe_replay.weights.checkpoint import as_files, packed, safetensors_files
from moe_replay.weights.identity import CurrentWeights, Probe
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.model_folder import check_files
from moe_replay.weights.source import Weights
from moe_replay.weights.transfer import Receivers, Transfer, drive

CHUNK_BYTES = 256 * 2**20
INTERRUPT_S = 5.0
"""Seconds that an interrupted start has to end in order; its processes are killed immediately."""
T = TypeVar("T")


def start(request: StartRequest) -> Engine:
    check_files(Path(request.model))
    options: dict[str, Any] = {"max_model_len": request.max_length, "trust_remote_code": request.trust_remote_code}
    options |= {MASK_OPTION: True} if request.sampling_mask else {}
    if request.sleep and accelerator() is not None:  # on CPU there is no memory to free: it only stops sampling
        options["enable_sleep_mode"] = True
    if request.lora is not None:
        options |= adapter_options(request.lora)
    if (fraction := gpu_memory_fraction(request)) is not None:
        options["gpu_memory_utilization"] = fraction
    if accelerator() is not None:
        options |= batch_options(request)
    with without_launcher_variables(), engine_console():
        return request.call(
            VllmEngine,
            request.model,
            weight_version=request.weight_version,
            router_family=request.router_family,
            dtype=request.dtype,
            capture=request.capture,
            share_weights=request.share_weights,
            **options,
        )


class VllmEngine(AsyncSampler, Engine):
    """A model in vLLM. Options are vLLM's own engine arguments (dtype, max_model_len, tensor_parallel_size, ...).

    Example:
        engine = VllmEngine("Qwen/Qwen3-30B-A3B", dtype="bfloat16", max_model_len=8192)
        groups = engine.generate(prompts, SamplingParams(n=8, max_tokens=512))
    """

    name: EngineName
    topology: MoeTopology
    vocab_size: int
    lora: LoraSpec | None
    shares_weights: bool

    def __init__(
        self,
        model: str | Path,
        *,
        weight_version: int = 0,
        router_family: str | None = None,
        capture: Capture = "auto",
        share_weights: bool = False,
        **options: Any,
    ) -> None:
        release = VllmRelease.installed()
        release.check()
        self.name = release.name
        self._routes = RouteSource(capture, options, str(self.name), release.missing_for_capture)
        self.shares_weights = share_weights
        arguments = engine_arguments(self.name, str(model), self._routes.capture, options, share_weights=share_weights)
        super().__init__("vllm")
        self._is_interrupted = threading.Event()
        with ExitStack() as undo:
            undo.callback(self._loop.close)
            folder = undo.enter_context(owned_folder())
            undo.callback(self._routes.close)
            # One thread: more of them contend for the GIL, and the event loop waits for all of them.
            self._trace_thread = undo.enter_context(ThreadPoolExecutor(1, "traces"))
            self._adapter = AdapterSlot(folder)
            with self._interruptible():
                self._llm, self._replicas = self._loop.run(self._start(arguments, folder))
            list_shared_files(folder)
            self._resources = undo.pop_all()
        config = self._llm.model_config
        self.max_length: int = config.max_model_len
        self.vocab_size = config.get_vocab_size()
        self._masks = MaskReturn(self.name, options, self.vocab_size)
        self.topology = MoeTopology.from_config(config.hf_config, load_router_family(router_family))
        self._end_tokens = end_tokens(config.try_get_generation_config(), config.hf_text_config)
        self._sleep_mode_enabled: bool = config.enable_sleep_mode
        self.lora = supported_adapters(self._llm.vllm_config)
        self._crashes_on_seeds = on_cpu() and self._llm.vllm_config.scheduler_config.enable_chunked_prefill
        self._state = EngineState(str(self.name), weight_version)
        self._asleep: set[str] = set()  # parts of vLLM's memory
        self._barrier = RequestBarrier(self._loop.loop)
        self._closed = False
        if on_cpu():
            self._loop.run(self._call_workers("replay_allow_amx"))
        self._test_update = capture == "checked" or release.is_newer  # the first one, too
        if self._test_update:
            self._self_test(capture, release)

    @property
    def weight_version(self) -> int:
        return self._state.weight_version

    @property
    def capture(self) -> str:
        """The capture that records routes: "kv_slot", "vllm", or "cross_check" for both."""
        return self._routes.capture

    @property
    def weights_id(self) -> str:
        return self._state.weights_id

    def healthy(self) -> bool:
        return not self._closed and not self._llm.errored

    # ---- startup ------------------------------------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """End a start by Ctrl-C: vLLM's cannot be cancelled, but fails once its processes are killed."""
        others = multiprocessing.active_children()
        try:
            yield
        except KeyboardInterrupt:
            self._is_interrupted.set()
            idle, deadline = self._loop.ping(), time.monotonic() + INTERRUPT_S
            while not idle.wait(0.1) and time.monotonic() < deadline:
                for process in set(multiprocessing.active_children()) - set(others):
                    process.kill()
            self._loop.close(timeout_s=1.0)
            raise

    async def _start(self, arguments: Any, folder: Path) -> tuple[Any, Replicas]:
        from moe_replay.engines.vllm.processes import start_llm

        await asyncio.sleep(0)  # the import takes seconds: an interruption takes effect here
        failures = failure_file(folder)
        try:
            llm, close = start_llm(arguments, folder, self._is_interrupted)
        except Exception as failure:
            raise not_started(str(self.name), noted_failure(failures) or one_line(failure)) from failure
        if self._routes.capture != "kv_slot" and not returns_routes(llm.vllm_config):
            close()
            llm.shutdown()
            raise EngineError(f"{self.name} disabled the return of routes", expected=f"vLLM {WORKING_VERSIONS}")
        replicas = Replicas(llm, close)
        await self._routes.connect(replicas.call_workers, folder)
        return llm, replicas

    def _self_test(self, capture: str, release: VllmRelease) -> None:
        """Check the capture in a release that was not tested, or on request, and say so; close the engine if it fails.

        The first weight update repeats it.
        """
        try:
            self._loop.run(self._check_capture())
        except BaseException:
            self.close()
            raise
        newer = (
            f"is newer than the newest tested ({dotted(NEWEST)}); "
            if release.is_newer
            else f'with capture "{capture}": '
        )
        recorder = {"kv_slot": "moe-replay's capture", "vllm": "vLLM's own capture"}.get(self.capture, "both captures")
        print(f"{self.name} {newer}its self-test passed ({recorder})", file=sys.stderr, flush=True)

    async def _check_capture(self) -> None:
        """Raise unless every replica's routes of a new prompt are those that its routers chose."""
        config = self._llm.vllm_config
        tokens = prompt_tokens(config, self.max_length)
        for replica in range(self._replicas.count):
            request_id = self._barrier.new_request_id()
            prompt = prompt_ids(tokens, self.vocab_size, time.time_ns())
            await self._answered(self._replicas.call_workers("replay_watch_routers"))
            with self._routes.request(request_id, 1):
                target = replica if self._replicas.count > 1 else None
                output = await self._output(prompt, {"max_tokens": 1, **self._masks.scoring}, request_id, target)
                routed_experts = await self._routes.routed_experts(request_id, output.outputs[0], tokens)
            settings = router_settings(self.topology, config.model_config.hf_text_config)
            answers = await self._answered(self._replicas.call_workers("replay_watched", settings, str(tokens)))
            workers = len(answers) // self._replicas.count
            reported = [json.loads(answer) for answer in answers[replica * workers : (replica + 1) * workers]]
            chosen = {int(layer): np.array(ids) for answer in reported for layer, ids in answer["chosen"].items()}
            unhooked = sorted({name for answer in reported for name in answer["unhooked"]})
            check_routes(self.name, routed_experts, chosen, self.topology, unhooked, INSTALL)

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        if self._crashes_on_seeds:
            check_no_seed(params, str(self.name))
        check_token_ids(params.stop_token_ids, self.vocab_size, "a stop token")
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_tokens)}
        sampling = {
            "n": params.draws,
            "max_tokens": params.max_tokens,
            **self._masks.truncation(params),
            "seed": request_seed(params, prompt),
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,  # the model's end tokens are among the stop tokens, unless ignored
            "logprobs": 0,
        }
        async with self._barrier.request("request" if params.routes else UNROUTED) as request_id:
            self._state.require_ready()
            weights = CurrentWeights(self.weight_version, self.weights_id)  # cannot change while a request is running
            with self._routes.request(request_id, params.draws):
                output = await self._output(prompt, sampling, request_id)
                completions = sorted(output.outputs, key=lambda completion: completion.index)
                if [completion.index for completion in completions] != list(range(params.draws)):
                    raise EngineError(f"{self.name} lost samples", expected=params.draws, found=len(completions))
                routed_experts = [
                    await self._routes.routed_experts(request_id, completion, len(prompt)) if params.routes else None
                    for completion in completions
                ]

        def build() -> list[Sample]:
            ids, outputs = np.asarray(prompt, np.int32), zip(completions, routed_experts, strict=True)
            return [self._sample(ids, *output, weights, params, index) for index, output in enumerate(outputs)]

        # In a thread: the loop must stay free for the outputs of other requests.
        samples = await asyncio.get_running_loop().run_in_executor(self._trace_thread, build)
        return samples * (params.n // params.draws)

    def _sample(
        self,
        prompt: np.ndarray,
        output: Any,
        routed_experts: np.ndarray | None,
        weights: CurrentWeights,
        params: SamplingParams,
        index: int,
    ) -> Sample:
        """Return the sample of one of vLLM's completions, with its routes (rows, decoder layers, K)."""
        completion = np.asarray(output.token_ids, np.int32)
        reason = parse_finish_reason(output.finish_reason, self.name, index)
        aborted_before_prefill = reason is FinishReason.ABORT and not len(completion)
        if routed_experts is None and params.routes and not aborted_before_prefill:
            raise EngineError(f"{self.name} returned no routes", sample=index, expected=f"vLLM {WORKING_VERSIONS}")
        tokens = np.concatenate([prompt, completion])
        if params.routes:
            trace = trace_from_capture(
                routed_experts, tokens, self.topology, self.name, weight_version=weights.version, sample=index
            )
        else:
            trace = unrouted_trace(tokens, self.topology, weights.version)
        supports = getattr(getattr(output, "sampling_mask", None), "token_ids", None)
        return Sample(
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=_token_logprobs(output.logprobs),
            finish_reason=reason,
            trace=trace,
            weight_version=weights.version,
            weights_id=weights.weights_id,
            sampling_mask=self._masks.mask(supports, completion, params, index) if params.sampling_mask else None,
        )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        return self._loop.run(self._prompt_logprobs(token_ids))

    async def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        async with self._barrier.request(UNROUTED) as request_id:
            self._state.require_ready()
            return await self._prompt_logprobs_now(token_ids, request_id)

    async def _prompt_logprobs_now(
        self, token_ids: Sequence[int], request_id: str, replica: int | None = None
    ) -> np.ndarray:
        scoring = {"max_tokens": 1, "prompt_logprobs": 0, **self._masks.scoring}
        output = await self._output(token_ids, scoring, request_id, replica)
        return _token_logprobs(output.prompt_logprobs)[1:]

    async def _output(
        self, prompt: Sequence[int], sampling: dict[str, Any], request_id: str, replica: int | None = None
    ) -> Any:
        """Return vLLM's final output of one request, on any replica unless one is named."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        last = None
        check_token_ids(prompt, self.vocab_size)  # an id outside the vocabulary kills vLLM's processes
        with translated_errors(self.name):
            params = VllmParams(
                **sampling, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            ids = [int(token) for token in prompt]
            target = {"lora_request": self._adapter.request, "data_parallel_rank": replica}
            async for output in self._llm.generate({"prompt_token_ids": ids}, params, request_id, **target):
                last = output
        if last is None or not last.finished:
            raise EngineError(f"{self.name} ended a request without an output")
        return last

    async def _abort(self) -> None:
        await self._answered(self._llm.abort(list(self._barrier.active)))

    async def _answered(self, call: Awaitable[T]) -> T:
        """Return the result of a call to vLLM's processes; raise if they are dead and the call would never return."""
        return await while_alive(call, self._death)

    def _death(self) -> EngineUnavailableError | None:
        if not self._llm.errored:
            return None
        return EngineUnavailableError(f"{self.name} has died", remedy="Its log names the cause")

    def abort(self) -> None:
        self._loop.run(self._abort())

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights in place, in every worker; running requests are aborted, new ones wait.

        An iterator is read here, in the caller's thread: reading it may be a collective operation of the trainer.
        """
        self._check_ready_for(adapter=False)
        if isinstance(weights, Path):
            files = iter(safetensors_files(weights))
        else:
            files = as_files(packed(weights, CHUNK_BYTES))
        self._loop.run(self._begin_update("replay_begin_update"))
        with self._barrier.open_on_error():
            for file in files:
                self._loop.run(self._call_workers("replay_load", str(file.absolute())))
            self._loop.run(self._finish_update(version, probe, weights_id, "replay_finish_update"))

    def receive_weights(
        self, transfer: Transfer, version: int, probe: Probe | None = None, weights_id: str = ""
    ) -> None:
        """Replace all weights by a transfer, in which every worker takes part; its messages are read here."""
        self._check_ready_for(adapter=False)
        self._loop.run(self._begin_update())
        with self._barrier.open_on_error():
            drive(transfer, self._submit)
            self._loop.run(self._finish_update(version, probe, weights_id, "replay_finish_update"))

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace the adapter, with the guarantees of `update_weights`; the base weights stay.

        Needs `enable_lora=True`, and `max_lora_rank` for the rank of the adapter.
        """
        self._check_ready_for(adapter=True)
        folder = self._adapter.write(adapter, self._llm.vllm_config.lora_config.lora_dtype)
        self._loop.run(self._begin_update())
        with self._barrier.open_on_error():
            self._adapter.use(folder)
            self._loop.run(self._finish_update(version, probe, weights_id, "replay_load_adapter", str(folder)))

    def _check_ready_for(self, *, adapter: bool) -> None:
        if adapter != (self.lora is not None):
            remedy = "Start it with enable_lora=True" if adapter else "Use update_adapter"
            raise EngineError(f"{self.name} was started {'without' if adapter else 'with'} LoRA", remedy=remedy)
        if "weights" in self._asleep or "scheduling" in self._asleep:
            raise EngineError(
                f"{self.name} is asleep", remedy="Call wake() before the update: its weights are not loaded"
            )

    async def _begin_update(self, *methods: str) -> None:
        await self._barrier.close(self._abort)
        self._state.begin_update()
        with self._barrier.open_on_error():
            await self._answered(self._replicas.pause())
        for method in methods:
            await self._call_workers(method)

    async def _finish_update(
        self, version: int, probe: Probe | None, weights_id: str, method: str, *arguments: str
    ) -> None:
        with self._barrier.open_on_error():
            await self._call_workers(method, *arguments)
            await self._wake(set(self._asleep))
            if not await self._answered(self._replicas.reset_prefix_cache()):
                raise EngineError(f"{self.name} did not drop its prefix cache, which holds states of older weights")
            await self._answered(self._replicas.resume())
            if probe is not None:
                await self._check_probe(probe)
            if self._test_update:
                await self._check_capture()
                self._test_update = False
            self._state.end_update(version, weights_id)
        self._barrier.open()

    async def _check_probe(self, probe: Probe) -> None:
        """Raise unless every replica computes with the trainer's weights."""
        for replica in range(self._replicas.count):
            target = replica if self._replicas.count > 1 else None
            request_id = self._barrier.new_request_id(UNROUTED)
            logprobs = await self._prompt_logprobs_now(probe.token_ids, request_id, target)
            probe.check(logprobs, str(self.name) if target is None else f"{self.name}, replica {replica}")

    def _submit(self, method: str, argument: str) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._call_workers(method, argument), self._loop.loop)

    @cached_property
    def receivers(self) -> Receivers:
        """The receivers of weight transfers: every worker of vLLM."""
        answers = self._loop.run(self._answered(self._replicas.call_workers("replay_device")))
        workers = [answer.split("\n") for answer in answers]
        opens = set.intersection(*({*others} for _, _, *others in workers))
        return Receivers(workers[0][0], tuple(receiver for _, receiver, *_ in workers), tuple(sorted(opens)))

    async def _call_workers(self, method: str, *arguments: str) -> None:
        with self._barrier.open_on_error(), translated_errors(self.name):
            errors = await self._answered(self._replicas.call_workers(method, *arguments))
            failed = [(rank, error) for rank, error in enumerate(errors) if error]
            if failed:
                rank, error = failed[0]
                raise EngineError(
                    f"{self.name} could not update its weights: {error}",
                    found=f"worker {rank} of {len(errors)}, in {method}",
                    remedy="Send every weight under its checkpoint name, or an adapter of the configured modules",
                )

    def share_weights(self) -> str:
        """Return what a trainer on the same device opens the weights with; they are not updated from then on."""
        (message,) = self._loop.run(self._answered(self._replicas.call_workers("replay_share_weights")))
        return message

    def shared_digests(self) -> Mapping[str, str]:
        (answer,) = self._loop.run(self._answered(self._replicas.call_workers("replay_shared_digests")))
        return json.loads(answer)

    # ---- sleep and shutdown ----------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and the weights' memory, if the engine was started with `enable_sleep_mode=True` (GPU).

        level   1: the weights are kept in host memory; 2: they are dropped, and must all be sent again

        Weights that may be shared with a trainer (`share_weights`) stay where they are.
        """
        self._loop.run(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        if self.lora is not None or self.shares_weights:
            level = 1  # updates bring the adapter, never the base weights
        if not self._state.asleep:
            await self._barrier.close(self._abort)
            with self._barrier.open_on_error():
                await self._answered(self._llm.sleep(level=level if self._sleep_mode_enabled else 0))
                self._asleep = {"weights", "kv_cache"} if self._sleep_mode_enabled else {"scheduling"}
                self._state.asleep, self._state.weights_complete = True, self._state.weights_complete and level < 2
            self._barrier.open()

    def wake(self) -> None:
        self._loop.run(self._wake(set(self._asleep)))

    def wake_for_update(self) -> None:
        """Allocate the weights; the KV cache follows when an update has read all of its weights."""
        self._loop.run(self._wake(self._asleep - {"kv_cache"}))

    async def _wake(self, parts: set[str]) -> None:
        if parts:
            await self._answered(self._llm.wake_up(sorted(parts, reverse=True)))
            self._asleep = self._asleep - parts
            self._state.asleep = bool(self._asleep)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._resources:
                self._loop.run(self._shutdown())

    async def _shutdown(self) -> None:
        self._replicas.close()
        self._llm.shutdown()
        del self._llm, self._replicas  # else its destructor runs during interpreter shutdown


class Replicas:
    """The engine cores of a started vLLM: one for each data-parallel replica.

    vLLM's own calls go to all replicas and return the answer of the first: an update that failed in another one would
    count as a success. Here every worker of every replica answers.

    count   1 without data parallelism
    close   ends vLLM's process between the replicas; to be called before vLLM is shut down
    """

    def __init__(self, llm: Any, close: Callable[[], None]) -> None:
        self._llm, self._client = llm, llm.engine_core
        self._cores: list[Any] = list(getattr(self._client, "core_engines", ()))
        self.count = len(self._cores) or 1
        self.close = close

    async def call_workers(self, method: str, *arguments: str) -> list[Any]:
        """Return the answer of each worker, by replica and rank."""
        if self.count == 1:
            return await self._llm.collective_rpc(method, args=arguments)
        by_replica = await self._call_all("collective_rpc", method, None, arguments, None)
        return [answer for answers in by_replica for answer in answers]

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; False if a replica could not."""
        if self.count == 1:
            return await self._llm.reset_prefix_cache()
        return all(await self._call_all("reset_prefix_cache", False, False))

    async def pause(self) -> None:
        """Stop the steps of idle replicas, which follow the others: they would compute with half of the new weights."""
        if self.count > 1:
            await self._llm.pause_generation(mode="abort", clear_cache=False)

    async def resume(self) -> None:
        if self.count > 1:
            await self._llm.resume_generation()

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        calls = [self._client._call_utility_async(method, *arguments, engine=core) for core in self._cores]
        return await asyncio.gather(*calls)


def _token_logprobs(logprobs: Any) -> np.ndarray:
    """(T,) float32 from vLLM's flat log-probs: the first at each position is the token's; 0 if there is none."""
    if logprobs is None:
        return np.zeros(0, np.float32)
    if logprobs.start_indices == list(range(len(logprobs.logprobs))):  # one at each position, as for samples
        return np.asarray(logprobs.logprobs, np.float32)
    values = np.asarray([*logprobs.logprobs, 0.0], np.float32)
    starts, ends = np.asarray(logprobs.start_indices, int), np.asarray(logprobs.end_indices, int)
    return values[np.where(starts < ends, starts, -1)]
