"""`moe-replay verify`: how far an engine and a trainer are apart on one batch, and how much of it is routing."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import Doc

from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.rollout.engine import TOKEN_VARIABLE, Capture, StartRequest
from moe_replay.rollout.registry import ENGINES, engine_spec, start_sampler
from moe_replay.tools.attribution.result import Attribution, Thresholds
from moe_replay.utils.secrets import READABLE_BY_ALL, find_token, has_password

if TYPE_CHECKING:
    from moe_replay.rollout.types import Sample

STDOUT, STDERR = 1, 2
DEFAULTS = Thresholds()
ENGINE_HELP = Doc(f"What samples: {', '.join(ENGINES)}, or module:name.")
RANDOM_PROMPTS = (8, 32)  # fewest and most tokens of a prompt of random tokens


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Sample one batch with an engine, score it natively, with R2 and with R3, and say how far they are apart.

    The status is 1 if the routes are misaligned or a threshold is not kept, and 2 if the options make no sense.
    """

    model: str = ""
    """Folder or name of the model; if not given, a tiny one that comes with the library."""
    engine: Annotated[str, ENGINE_HELP] = "vllm"
    url: tuple[str, ...] = ()
    """Addresses of servers that have the model."""
    token: str | None = None
    """Refused, since every user of the machine could read it: set $MOE_REPLAY_TOKEN or --token-file."""
    token_file: Path | None = None
    """File with the bearer token of the servers; else $MOE_REPLAY_TOKEN."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the engine computes in; auto: the type of the weights on disk. Servers have their own."""
    capture: Capture = "auto"
    """Capture that records routes (vllm): ours, in its worker; vllm: its own; checked: both; auto: ours if possible."""
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """More of the engine's own options, e.g. --engine-options gpu_memory_utilization 0.5. vLLM is started with
    enforce_eager, which saves a minute; enforce_eager False verifies CUDA graphs as well."""
    prompts: Path | None = None
    """JSONL or parquet file, or datasets folder, with a column prompt or messages; if not given, random tokens."""
    traces: Path | None = None
    """File of traces that somebody else recorded, in place of an engine: only the routes are compared."""
    samples: int = 32
    """Sequences of the batch."""
    max_tokens: int = 64
    """Tokens of a completion at most."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out."""
    temperature: float = 1.0
    """Sampling temperature."""
    seed: int = 0
    """Of sampling and of random prompts."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the trainer computes in; auto: bfloat16 on a GPU, as in training by default, float32 on a CPU."""
    attention: str = "sdpa"
    """Attention of the trainer: sdpa, eager, flash_attention_2, ..."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where the trainer computes; auto: a GPU if there is one."""
    packed: bool = True
    """Put sequences one after the other in a row, as in training; else in rows with padding."""
    tokens_per_micro_batch: int = 4096
    """Tokens that go through the trainer's model together."""
    max_k3: float = DEFAULTS.max_k3
    """k3 KL of trainer and rollout, with R3, at most."""
    max_beyond_two: float = DEFAULTS.max_beyond_two
    """Share of tokens whose probabilities differ by more than a factor of two, with R3, at most."""
    min_agreement: float = DEFAULTS.min_agreement
    """Share of native routes that are those of the rollout, at least."""
    output: Path | None = None
    """Folder for attribution.json and attribution.html."""
    json: bool = False
    """Print everything as JSON."""

    def __call__(self) -> None:
        """Sample, score, print, judge."""
        if problem := self._wrong_use():
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(ExitStatus.WRONG_INPUT)
        try:
            with stdout_on_stderr():
                found = self._of_traces() if self.traces else self._of_samples()
        except ImportError as missing:
            if isinstance(missing, MoeReplayError):
                raise
            raise MissingExtraError(
                f"verify needs {missing.name}", remedy="pip install 'moe-replay[train]'"
            ) from missing
        limits = Thresholds(max_k3=self.max_k3, max_beyond_two=self.max_beyond_two, min_agreement=self.min_agreement)
        failures = found.failures(limits)
        if self.output is not None:
            _write(found, self.output)
        if self.json:
            told = {"passed": not failures, "failures": failures} | json.loads(found.to_json())
            print(json.dumps(told, indent=1))
        else:
            print(found, "", *([f"FAILED: {failure}" for failure in failures] or ["passed"]), sep="\n")
        if failures:
            sys.exit(ExitStatus.CHECK_FAILED)

    def _wrong_use(self) -> str | None:
        """Return what makes no sense in the options; None if all of it does."""
        if any(map(has_password, self.url)):
            return f"a password {READABLE_BY_ALL}: use a token, in $MOE_REPLAY_TOKEN"
        if self.traces and (self.url or self.prompts):
            return "--traces takes the place of an engine: leave --url and --prompts out"
        if self._is_server and not self.url and not self.traces:
            return f"--engine {self.engine} needs the addresses of its servers: --url http://127.0.0.1:8000"
        if self.url and not self._is_server:
            return f"--engine {self.engine} runs in this process: leave --url out, or name a server's engine"
        if self.samples < 1 or self.max_tokens < 1 or self.tokens_per_micro_batch < 1:
            return "--samples, --max-tokens and --tokens-per-micro-batch must be at least 1"
        if self.temperature <= 0:
            return "--temperature must be above 0: greedy samples have no log-probs to compare"
        return None

    # ---- the two ways -------------------------------------------------------------------------------------------

    def _of_traces(self) -> Attribution:
        from moe_replay.tools.attribution.measure import attribute_traces
        from moe_replay.tools.inspect import read_traces

        folder, _ = self._sources()
        traces = list(read_traces(str(self.traces)))
        _tell(f"{len(traces)} traces of {self.traces}, compared with {folder}")
        return attribute_traces(
            self._trainer(folder),
            traces,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            packed=self.packed,
            labels={"model": self._name, "traces": str(self.traces), **self._trainer_labels()},
        )

    def _of_samples(self) -> Attribution:
        from moe_replay.tools.attribution.measure import attribute

        folder, file = self._sources()
        samples, engine = self._sampled(folder, self._prompts(folder, file), ends=file is not None)
        _tell(f"{len(samples)} samples, scored four times by the trainer")
        return attribute(
            self._trainer(folder),
            samples,
            temperature=self.temperature,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            packed=self.packed,
            labels={
                "model": self._name,
                "engine": engine if self._is_server else f"{engine} {self.rollout_dtype}",
                **self._trainer_labels(),
                "temperature": str(self.temperature),
            },
        )

    @property
    def _is_server(self) -> bool:
        return engine_spec(self.engine, key="--engine").is_server

    @property
    def _name(self) -> str:
        return self.model or "embedded default"

    def _sources(self) -> tuple[str, Path | None]:
        """The folder of the model, and the file of prompts if there is one."""
        from moe_replay.train.sources import model_folder

        if self.model:
            return model_folder(self.model), self.prompts
        from moe_replay import demo

        files = demo.prepare(status=_tell)
        return str(files.model), self.prompts or files.train

    # ---- rollout ------------------------------------------------------------------------------------------------

    def _prompts(self, folder: str, file: Path | None) -> list[list[int]]:
        """Token ids of as many prompts as samples, or of all that there are."""
        if file is None:
            import numpy as np

            from moe_replay.rollout.model_folder import read_config

            chance = np.random.default_rng(self.seed)
            config = read_config(folder, trust_remote_code=self.trust_remote_code)
            vocabulary = config.get_text_config().vocab_size
            lengths = chance.integers(*RANDOM_PROMPTS, self.samples, endpoint=True)
            return [chance.integers(vocabulary, size=length).tolist() for length in lengths]
        from moe_replay.train.data import load_prompts, read_rows
        from moe_replay.train.sources import load_tokenizer

        tokenizer = load_tokenizer(folder, trust_remote_code=self.trust_remote_code)
        loaded = load_prompts(read_rows(file)[: self.samples], tokenizer, self.max_prompt_tokens)
        return [list(prompt.token_ids) for prompt in loaded]

    def _sampled(self, folder: str, prompts: list[list[int]], *, ends: bool) -> tuple[list[Sample], str]:
        """Return the samples and the engine's name; the engine is closed before the trainer loads its model."""
        from moe_replay.rollout.types import SamplingParams
        from moe_replay.train.engines import within_model

        params = SamplingParams(
            n=-(-self.samples // len(prompts)),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=not ends,  # after random tokens, the end of a sequence means nothing
            seed=self.seed,
        )
        _tell(f"starting {self.engine} on {folder}")
        longest = max(map(len, prompts)) + self.max_tokens
        request = StartRequest(
            model=folder,
            max_length=within_model(longest, folder, trust_remote_code=self.trust_remote_code),
            dtype=self.rollout_dtype,
            urls=self.url,
            token=find_token(self.token, self.token_file, TOKEN_VARIABLE),
            trust_remote_code=self.trust_remote_code,
            capture=self.capture,
            options={**engine_spec(self.engine, key="--engine").quick_start, **self.engine_options},
        )
        began = time.monotonic()
        engine = start_sampler(self.engine, request, key="--engine")
        try:
            _tell(f"{engine.name}, started in {time.monotonic() - began:.0f} s, samples {len(prompts)} prompts")
            groups = engine.generate(prompts, params)
            return [sample for group in groups for sample in group][: self.samples], str(engine.name)
        finally:
            engine.close()

    # ---- trainer ------------------------------------------------------------------------------------------------

    def _trainer(self, folder: str) -> Any:
        import torch

        from moe_replay.rollout.model_folder import load_model
        from moe_replay.utils.device import device_type

        device = device_type(self.device)
        _warn_of_memory(folder, self._trainer_dtype, device, trust_remote_code=self.trust_remote_code)
        model = load_model(
            folder,
            trust_remote_code=self.trust_remote_code,
            dtype=getattr(torch, self._trainer_dtype),
            attn_implementation=self.attention,
        )
        return model.to(device)

    @property
    def _trainer_dtype(self) -> str:
        from moe_replay.utils.device import device_type

        if self.dtype != "auto":
            return self.dtype
        return "float32" if device_type(self.device) == "cpu" else "bfloat16"

    def _trainer_labels(self) -> dict[str, str]:
        from transformers import __version__

        return {"trainer": f"Transformers {__version__} {self._trainer_dtype}"}


def _warn_of_memory(folder: str, dtype: str, device: str, *, trust_remote_code: bool) -> None:
    """Say how much memory the trainer's model takes, and warn if there is less."""
    from moe_replay.rollout.model_folder import read_config
    from moe_replay.tools.memory_check import weights_memory

    needed, free = weights_memory(read_config(folder, trust_remote_code=trust_remote_code), dtype, device)
    if needed > free:
        _tell(
            f"warning: the trainer's model in {dtype} needs {needed / 2**30:.1f} GiB on {device}, where "
            f"{free / 2**30:.1f} are free: --dtype bfloat16 takes half of float32, --device cpu uses host memory"
        )


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Stdout is for the result alone; engines and their processes write to it as they like."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, STDOUT)
        os.close(kept)


def _write(found: Attribution, folder: Path) -> None:
    from moe_replay.report.attribution_report import write_attribution_report

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attribution.json").write_text(found.to_json(), encoding="utf-8")
    try:
        write_attribution_report(found, folder / "attribution.html")
    except MissingExtraError as missing:
        _tell(f"no attribution.html: {missing}")
    _tell(f"written to {folder}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
