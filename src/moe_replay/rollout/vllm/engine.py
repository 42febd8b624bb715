"""vLLM started by this process: its outputs are returned as samples with checked routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.rollout.adapter import Adapter
from moe_replay.rollout.engine import Capture, Engine, StartRequest, end_tokens
from moe_replay.rollout.loop import AsyncSampler, while_alive
from moe_replay.rollout.request_barrier import RequestBarrier
from moe_replay.rollout.request_limits import check_token_ids
from moe_replay.rollout.sampling import request_seed
from moe_replay.rollout.state import EngineState
from moe_replay.rollout.types import Probe, Sample, SamplingParams
from moe_replay.rollout.vllm.adapter import AdapterSlot, adapter_options, room_for_adapters
from moe_replay.rollout.vllm.arguments import (
    engine_arguments,
    on_cpu,
    translated_errors,
    without_launcher_variables,
)
from moe_replay.rollout.vllm.capture import RouteSource, token_logprobs
from moe_replay.rollout.vllm.console import engine_console, failure_file, noted_failure
from moe_replay.rollout.vllm.masks import MASK_OPTION, MaskReturn
from moe_replay.rollout.vllm.memory import memory_share, not_started
from moe_replay.rollout.vllm.outputs import OutputReader
from moe_replay.rollout.vllm.release import WORKING_VERSIONS, VllmRelease, returns_routes
from moe_replay.rollout.vllm.replicas import Replicas
from moe_replay.rollout.vllm.route_channel import UNROUTED
from moe_replay.rollout.weights.checkpoint import as_files, safetensors_files
from moe_replay.rollout.weights.chunks import packed
from moe_replay.rollout.weights.identity import CurrentWeights
from moe_replay.rollout.weights.transfer import Receivers, Transfer, drive
from moe_replay.rollout.weights.types import Weights
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.device import accelerator
from moe_replay.utils.messages import one_line
from moe_replay.utils.processes import list_shared_files, owned_folder

CHUNK_BYTES = 256 * 2**20
T = TypeVar("T")


def start(request: StartRequest) -> Engine:
    """Start vLLM in this process."""
    options: dict[str, Any] = {"max_model_len": request.max_length, "trust_remote_code": request.trust_remote_code}
    options |= {MASK_OPTION: True} if request.sampling_mask else {}
    if request.sleep and accelerator() is not None:  # on CPU there is no memory to free: it only stops sampling
        options["enable_sleep_mode"] = True
    if request.lora is not None:
        options |= adapter_options(request.lora)
    if (share := memory_share(request)) is not None:
        options["gpu_memory_utilization"] = share
    with without_launcher_variables(), engine_console():
        return request.call(
            VllmEngine,
            request.model,
            weight_version=request.weight_version,
            router_family=request.router_family,
            dtype=request.dtype,
            capture=request.capture,
            **options,
        )


class VllmEngine(AsyncSampler):
    """A model in vLLM. Options are vLLM's own engine arguments (dtype, max_model_len, tensor_parallel_size, ...).

    Example:
        engine = VllmEngine("Qwen/Qwen3-30B-A3B", dtype="bfloat16", max_model_len=8192)
        groups = engine.generate(prompts, SamplingParams(n=8, max_tokens=512))
    """

    def __init__(
        self,
        model: str | Path,
        *,
        weight_version: int = 0,
        router_family: str | None = None,
        capture: Capture = "auto",
        **options: Any,
    ) -> None:
        release = VllmRelease.installed()
        release.check()
        self.name = release.name
        self._routes = RouteSource(capture, options, str(self.name), release.lacks_for_capture)
        arguments = engine_arguments(self.name, str(model), self._routes.capture, options)
        super().__init__("vllm")
        with ExitStack() as undo:
            undo.callback(self._loop.close)
            notes = undo.enter_context(owned_folder())
            undo.callback(self._routes.close)
            # One thread: more of them fight for the interpreter's lock, and the event loop waits for all of them.
            self._trace_thread = undo.enter_context(ThreadPoolExecutor(1, "traces"))
            self._adapter = AdapterSlot(notes)
            self._llm, self._replicas = self._loop.run(self._start(arguments, notes))
            list_shared_files(notes)
            self._resources = undo.pop_all()
        config = self._llm.model_config
        self.max_length: int = config.max_model_len
        self.vocab_size: int = config.get_vocab_size()
        self._masks = MaskReturn(self.name, options, self.vocab_size)
        self.topology = MoeTopology.from_config(config.hf_config, load_router_family(router_family))
        self._outputs = OutputReader(self.name, self.topology, self._masks)
        self._end_tokens = end_tokens(config.try_get_generation_config(), config.hf_text_config)
        self._sleep_mode_enabled: bool = config.enable_sleep_mode
        self.lora = room_for_adapters(self._llm.vllm_config)
        self._crashes_on_seeds = on_cpu() and self._llm.vllm_config.scheduler_config.enable_chunked_prefill
        self._state = EngineState(str(self.name), weight_version)
        self._asleep: set[str] = set()  # parts of vLLM's memory
        self._barrier = RequestBarrier(self._loop.loop)
        self._closed = False
        if on_cpu():
            self._loop.run(self._call_workers("replay_allow_amx"))

    @property
    def weight_version(self) -> int:
        return self._state.weight_version

    @property
    def capture(self) -> str:
        """The capture that records routes: "ours", "vllm", or "checked" for both."""
        return self._routes.capture

    @property
    def weights_id(self) -> str:
        """Id of the update that the weights come from."""
        return self._state.weights_id

    def healthy(self) -> bool:
        """Whether vLLM's processes are alive."""
        return not self._closed and not self._llm.errored

    # ---- startup ------------------------------------------------------------------------------------------------

    async def _start(self, arguments: Any, folder: Path) -> tuple[Any, Replicas]:
        from moe_replay.rollout.vllm.processes import start_llm

        notes = failure_file(folder)
        try:
            llm, close = start_llm(arguments)
        except (
            *(ValueError, TypeError, LookupError, AttributeError),
            *(ImportError, NotImplementedError, AssertionError, RuntimeError),
        ) as failure:
            raise not_started(str(self.name), noted_failure(notes) or one_line(failure)) from failure
        if self._routes.capture != "ours" and not returns_routes(llm.vllm_config):
            close()
            llm.shutdown()
            raise EngineError(f"{self.name} disabled the return of routes", expected=f"vLLM {WORKING_VERSIONS}")
        replicas = Replicas(llm, close)
        await self._routes.connect(replicas, folder)
        return llm, replicas

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt; runs in the engine's own loop."""
        self._check_seed(params)
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
            async with self._routes.request(request_id, params.draws) as captured:
                output = await self._output(prompt, sampling, request_id)
                completions = sorted(output.outputs, key=lambda completion: completion.index)
                if [completion.index for completion in completions] != list(range(params.draws)):
                    raise EngineError(f"{self.name} lost samples", expected=params.draws, found=len(completions))
                routes = [await captured(one, len(prompt)) if params.routes else None for one in completions]
        # In a thread: the loop must stay free for the outputs of other requests.
        build = partial(self._outputs.samples, prompt, completions, routes, weights, params)
        samples = await asyncio.get_running_loop().run_in_executor(self._trace_thread, build)
        return samples * (params.n // params.draws)

    def _check_seed(self, params: SamplingParams) -> None:
        """Raise if a seed would crash vLLM: on CPU with chunked prefill it cannot rewind the generator of a request."""
        if params.seed is not None and params.temperature > 0 and self._crashes_on_seeds:
            raise EngineError(
                f"{self.name} on CPU cannot sample with a seed and chunked prefill",
                found=f"seed {params.seed}",
                remedy="Start the engine with enable_chunked_prefill=False, or sample without a seed",
            )

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
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
        return token_logprobs(output.prompt_logprobs)[1:]

    async def _output(
        self, prompt: Sequence[int], sampling: dict[str, Any], request_id: str, replica: int | None = None
    ) -> Any:
        """Return vLLM's final output of one request, on any replica unless one is named."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        last = None
        check_token_ids(prompt, self.vocab_size)  # vLLM's processes would die of others
        with translated_errors(self.name):
            params = VllmParams(
                **sampling, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            ids = [int(token) for token in prompt]
            where = {"lora_request": self._adapter.request, "data_parallel_rank": replica}
            async for output in self._llm.generate({"prompt_token_ids": ids}, params, request_id, **where):
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
        """Abort running requests; unfinished samples come back with `FinishReason.ABORT`."""
        self._loop.run(self._abort())

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights in place, in every worker; running requests are aborted, new ones wait.

        An iterator is read here, in the caller's thread: reading it may be a collective operation of the trainer.
        """
        self._check_ready_for(adapter=False)
        if isinstance(weights, Transfer):
            self._loop.run(self._begin_update())
            with self._barrier.open_on_error():
                drive(weights, self._submit)
                self._loop.run(self._finish_update(version, probe, weights_id, "replay_finish_update"))
            return
        if isinstance(weights, Path):
            files = iter(safetensors_files(weights))
        else:
            files = as_files(packed(weights, CHUNK_BYTES))
        self._loop.run(self._begin_update("replay_begin_update"))
        with self._barrier.open_on_error():
            for file in files:
                self._loop.run(self._call_workers("replay_load", str(file.absolute())))
            self._loop.run(self._finish_update(version, probe, weights_id, "replay_finish_update"))

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace the adapter, with the promises of `update_weights`; the base is what the engine was started with.

        Needs `enable_lora=True`, and `max_lora_rank` for the rank of the adapter.
        """
        self._check_ready_for(adapter=True)
        folder = self._adapter.write(adapter)
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
                raise EngineError(f"{self.name} did not drop its prefix cache, which is of older weights")
            await self._answered(self._replicas.resume())
            if probe is not None:
                await self._check_probe(probe)
            self._state.end_update(version, weights_id)
        self._barrier.open()

    async def _check_probe(self, probe: Probe) -> None:
        """Raise unless every replica computes with the trainer's weights."""
        for replica in range(self._replicas.count):
            chosen = replica if self._replicas.count > 1 else None
            found = await self._prompt_logprobs_now(probe.token_ids, self._barrier.new_request_id(UNROUTED), chosen)
            probe.check(found, str(self.name) if chosen is None else f"{self.name}, replica {replica}")

    def _submit(self, method: str, argument: str) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._call_workers(method, argument), self._loop.loop)

    @cached_property
    def receivers(self) -> Receivers:
        """The receivers of weight transfers: every worker of vLLM."""
        devices = self._loop.run(self._answered(self._replicas.call_workers("replay_device")))
        return Receivers(devices[0].partition(" ")[0], tuple(device.partition(" ")[2] for device in devices))

    async def _call_workers(self, method: str, *arguments: str) -> None:
        with self._barrier.open_on_error(), translated_errors(self.name):
            errors = await self._answered(self._replicas.call_workers(method, *arguments))
            failed = [(rank, error) for rank, error in enumerate(errors) if error]
            if failed:
                rank, error = failed[0]
                raise EngineError(
                    f"{self.name} could not update its weights: {error}",
                    found=f"worker {rank} of {len(errors)}, in {method}",
                    remedy="Send every weight under its name in the checkpoint, or an adapter of the modules asked for",
                )

    # ---- sleep and shutdown ----------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and the memory of the weights, where `enable_sleep_mode=True` was given (GPU).

        level   1: the weights are kept in host memory; 2: they are dropped, and all of them must be sent again
        """
        self._loop.run(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        level = level if self.lora is None else 1  # an adapter is no update of the base
        if not self._state.asleep:
            await self._barrier.close(self._abort)
            with self._barrier.open_on_error():
                await self._answered(self._llm.sleep(level=level if self._sleep_mode_enabled else 0))
                self._asleep = {"weights", "kv_cache"} if self._sleep_mode_enabled else {"scheduling"}
                self._state.asleep, self._state.weights_complete = True, self._state.weights_complete and level < 2
            self._barrier.open()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._loop.run(self._wake(set(self._asleep)))

    def wake_for_update(self) -> None:
        """Take memory for the weights; the KV cache follows when an update has read all of its weights."""
        self._loop.run(self._wake(self._asleep - {"kv_cache"}))

    async def _wake(self, parts: set[str]) -> None:
        if parts:
            await self._answered(self._llm.wake_up(sorted(parts, reverse=True)))
            self._asleep = self._asleep - parts
            self._state.asleep = bool(self._asleep)

    def close(self) -> None:
        """End vLLM's processes."""
        if not self._closed:
            self._closed = True
            with self._resources:
                self._loop.run(self._shutdown())

    async def _shutdown(self) -> None:
        self._replicas.close()
        self._llm.shutdown()
        del self._llm, self._replicas  # else its destructor runs during interpreter shutdown
