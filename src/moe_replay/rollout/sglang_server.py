"""The client of an SGLang server that was started with `--enable-return-routed-experts`: its native `/generate`.

SGLang answers a request that resumes an aborted one like any other: with the routes of the whole sequence, those of
its cached prefix included. `Session` keeps what it has and takes what is new.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.errors import EngineError, EngineName
from moe_replay.rollout.engine import Engine, StartRequest
from moe_replay.rollout.http import HttpClient
from moe_replay.rollout.pool import connect
from moe_replay.rollout.sglang_wire import NO_PENALTIES, Answer, generate_request, request_seed
from moe_replay.rollout.state import EngineState
from moe_replay.rollout.types import FinishReason, Probe, Sample, SamplingParams, Weights
from moe_replay.rollout.weights import packed, safetensors_files
from moe_replay.routes.topology import MoeTopology

CHUNK_BYTES = 2**30


def start(request: StartRequest) -> Engine:
    """Connect to the servers at `request.urls`."""
    return connect(SglangServer, request)


class SglangServer(HttpClient):
    """An SGLang server, reached over HTTP.

    model_path       folder or name of the model it serves; left out: the folder that the server names
    topology         of that model; left out: from its config
    weight_version   of the weights that the server was started with
    shared_folder    where weights that come as an iterator are written for the server to read: it must see that folder
    token            the server's `--api-key`; its `--admin-api-key`, where it has one, to update weights

    Example:
        engine = SglangServer("http://127.0.0.1:30000")
    """

    def __init__(
        self,
        url: str,
        *,
        model_path: str | Path | None = None,
        topology: MoeTopology | None = None,
        weight_version: int = 0,
        shared_folder: Path | None = None,
        token: str | None = None,
        max_concurrent: int = 64,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(url, token=token, max_concurrent=max_concurrent, timeout=timeout)
        self._given_path = model_path
        self._given_topology = topology
        self._first_version = weight_version
        self._shared_folder = shared_folder
        self._state = EngineState(f"SGLang at {self.url}", weight_version)
        self._open = asyncio.Event()  # not set while weights change: what comes waits
        self._open.set()
        self._tempered = False

    # ---- what it is ---------------------------------------------------------------------------------------------

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """How the server was started."""
        return self._call("GET", "/server_info")

    @cached_property
    def name(self) -> EngineName:
        return EngineName("SGLang", self._settings["version"])

    @cached_property
    def topology(self) -> MoeTopology:
        if self._given_topology is not None:
            return self._given_topology
        path = self._given_path or self._settings["model_path"]
        if self._given_path is None and not Path(path).is_dir():
            raise EngineError(
                f"{self._state.engine} serves a model that cannot be read from here",
                found=path,
                remedy="Say model_path= (a folder or a name that Transformers knows) or topology=",
            )
        from transformers import AutoConfig

        return MoeTopology.from_config(AutoConfig.from_pretrained(path))

    @property
    def weight_version(self) -> int:
        """What the server says of its weights now."""
        return self._numbered(self._call("GET", "/model_info")["weight_version"])

    def _numbered(self, version: str) -> int:
        """SGLang stamps samples with a text: `default` until the first update, then what the update said."""
        if version == "default":
            return self._first_version
        if not version.isdecimal():
            raise EngineError(
                f"{self._state.engine} has weights of a version that is no number",
                found=version,
                remedy="Update its weights through this engine, or with a number as weight_version",
            )
        return int(version)

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        return await self._sample_from(prompt, params, 0)

    async def generate_from(self, prompt: Sequence[int], params: SamplingParams, first_token: int) -> list[Sample]:
        """Like `generate_one`, but routes of tokens before `first_token` are not sent: they come back as uncovered.

        For a sequence that goes on: `RouteTrace.continued_by` keeps the routes that its earlier part has already.
        """
        if not 0 <= first_token <= len(prompt):
            raise EngineError(
                "routes can be left out for tokens of the prompt only",
                expected=f"first_token from 0 to {len(prompt)}",
                found=first_token,
            )

        async def in_turn() -> list[Sample]:
            async with self._semaphore:
                return await self._sample_from(prompt, params, first_token)

        return await self._loop.run_async(in_turn())

    async def _sample_from(self, prompt: Sequence[int], params: SamplingParams, first_token: int) -> list[Sample]:
        await self._open.wait()
        self._state.require_ready()
        await asyncio.to_thread(lambda: (self.name, self.topology))  # asked for once, and not in this loop
        if params.temperature not in (0.0, 1.0) and not self._tempered:
            await self._check_temperature(int(prompt[0]))
        answers = await self._answers(generate_request(prompt, params, first_token), prompt, params)
        ids = np.asarray(prompt, np.int32)
        samples = [
            Answer(content, self.name, index).to_sample(ids, self.topology, self._numbered, first_token)
            for index, content in enumerate(answers)
        ]
        if any(sample.finish_reason is not FinishReason.ABORT for sample in samples):
            await self._open.wait()  # it may have waited inside the server, for weights that are yet to be proved
            self._state.require_ready()
        return samples * (params.n // params.draws)

    async def _answers(self, request: dict[str, Any], prompt: Sequence[int], params: SamplingParams) -> list[Any]:
        """One for each sample. A server that samples by seeds gives all n of a request the same: they go one by one."""
        if params.temperature > 0 and self._settings.get("enable_deterministic_inference"):
            sampling = request["sampling_params"]
            one_by_one = [
                request
                | {"sampling_params": sampling | {"n": 1, "sampling_seed": request_seed(prompt, params.seed, number)}}
                for number in range(params.draws)
            ]
            answers = await asyncio.gather(*(self._generate(one) for one in one_by_one))
        elif params.temperature > 0 and params.seed is not None:
            raise EngineError(
                f"{self._state.engine} ignores seeds",
                found=f"seed {params.seed}",
                remedy="Start it with --enable-deterministic-inference, or sample without a seed",
            )
        else:
            answers = await self._generate(request)
            answers = answers if isinstance(answers, list) else [answers]
        if len(answers) != params.draws:
            raise EngineError(f"{self.name} lost samples", expected=params.draws, found=len(answers))
        return answers

    async def _generate(self, request: dict[str, Any]) -> Any:
        return (await self._post("/generate", request)).json()

    async def _check_temperature(self, token: int) -> None:
        """Raise unless log-probs are at the sampling temperature: the server's environment decides, and is not told."""
        gaps = []
        for temperature in (1.0, 2.0):
            sampling = {"max_new_tokens": 1, "temperature": temperature} | NO_PENALTIES
            request = {"input_ids": [token], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 8}
            likeliest = (await self._generate(request))["meta_info"]["output_top_logprobs"][0]
            gaps.append(likeliest[0][0] - likeliest[-1][0])
        if abs(gaps[1] - gaps[0] / 2) > abs(gaps[1] - gaps[0]):
            raise EngineError(
                f"{self._state.engine} reports log-probs of another temperature than it samples at",
                expected=f"differences between tokens half as large at temperature 2 ({gaps[0] / 2:.4g})",
                found=f"{gaps[1]:.4g}",
                remedy="Start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment, or sample at temperature 1",
            )
        self._tempered = True

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        self._state.require_ready()
        return self._prompt_logprobs(token_ids)

    def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        request = {
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0} | NO_PENALTIES,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self._call("POST", "/generate", json=request)
        _, *rest = answer["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in rest] != request["input_ids"][1:]:
            raise EngineError(f"{self._state.engine} scored another sequence than it was sent")
        return np.asarray([logprob for logprob, *_ in rest], np.float32)

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Replace all weights from a folder that the server can read; an iterator is written to one first.

        SGLang does not notice weights that are missing: give a `probe`.
        """
        if isinstance(weights, Path):
            self._update(weights, version, probe)
            return
        with tempfile.TemporaryDirectory(dir=self._shared_folder, prefix="moe-replay-") as folder:
            for number, chunk in enumerate(packed(weights, CHUNK_BYTES)):
                Path(folder, f"model-{number:05d}.safetensors").write_bytes(chunk)
            self._update(Path(folder), version, probe)

    def _update(self, folder: Path, version: int, probe: Probe | None) -> None:
        safetensors_files(folder)
        order = {"model_path": str(folder.absolute()), "weight_version": str(version), "flush_cache": True}
        with self._closed(), self._state.update_to(version):
            with self._paused():
                self._order("/update_weights_from_disk", order)
                self._order("/flush_cache")
            if probe is not None:
                probe.check(self._prompt_logprobs(probe.token_ids), str(self.name))

    @contextmanager
    def _closed(self) -> Iterator[None]:
        """What comes in the meantime waits."""
        loop = self._loop.loop
        loop.call_soon_threadsafe(self._open.clear)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self._open.set)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """What the server samples, for all of its clients, is aborted; what comes to it waits there."""
        self._order("/pause_generation", {"mode": "abort"})
        try:
            yield
        finally:
            self._order("/continue_generation")

    def _order(self, path: str, content: dict[str, Any] | None = None) -> None:
        """A request whose answer says no more than that it was done."""
        self._loop.run(self._post(path, content or {}))

    # ---- life ---------------------------------------------------------------------------------------------------

    @property
    def _releasable(self) -> list[str]:
        """Weights that SGLang keeps no copy of would be garbage after it wakes: then they stay."""
        return ["kv_cache", "weights"] if self._settings.get("enable_weights_cpu_backup") else ["kv_cache"]

    def sleep(self) -> None:
        """Abort what is sampled and free its memory, where the server was started with `--enable-memory-saver`."""
        if not self._state.asleep:
            with self._closed(), self._paused():
                self._order("/release_memory_occupation", {"tags": self._releasable})
                self._state.asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._state.asleep:
            self._order("/resume_memory_occupation", {"tags": self._releasable})
            self._state.asleep = False

    def abort(self) -> None:
        """End what the server samples, for all of its clients."""
        self._order("/abort_request", {"abort_all": True})
