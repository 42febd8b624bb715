"""`moe-replay verify`: the mismatch between an engine and a trainer on one batch, and the part due to routing."""

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

from moe_replay.engines.base import TOKEN_VARIABLE, Capture, StartRequest
from moe_replay.engines.registry import ENGINES, engine_spec, start_sampler
from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError, needs_extra
from moe_replay.utils.secrets import READABLE_BY_ALL, find_token, has_password
from moe_replay.verification.attribution import Attribution
from moe_replay.verification.signatures import gate
from moe_replay.verification.thresholds import Thresholds, failures, inexact

if TYPE_CHECKING:
    from moe_replay.records import Sample

STDOUT, STDERR = 1, 2
DEFAULTS = Thresholds()
ENGINE_HELP = Doc(f"Rollout engine: {', '.join(ENGINES)}, or module:name.")
RANDOM_PROMPTS = (8, 32)  # minimum and maximum length in tokens


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Sample a batch with a rollout engine, score it natively, with R2 and with R3, and measure the mismatch.

    Exit with 1 if the routes are misaligned or a threshold is exceeded, with 2 for invalid options.
    """

    model: str = ""
    """Model folder or Hub name; default: the embedded tiny model."""
    engine: Annotated[str, ENGINE_HELP] = "vllm"
    url: tuple[str, ...] = ()
    """Addresses of servers that serve the model."""
    token: str | None = None
    """Rejected: command lines are visible to all users. Use $MOE_REPLAY_TOKEN or --token-file."""
    token_file: Path | None = None
    """File with the bearer token of the servers; default: $MOE_REPLAY_TOKEN."""
    trust_remote_code: bool = False
    """Allow custom Python code from the model folder."""
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Engine dtype; auto: dtype of the checkpoint. Ignored for servers."""
    capture: Capture = "auto"
    """Route capture (vllm). kv_slot: in our worker; vllm: its own; cross_check: both; auto: kv_slot if possible."""
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Extra engine options, e.g. --engine-options gpu_memory_utilization 0.5. vLLM starts with enforce_eager to save a
    minute; enforce_eager False also verifies CUDA graphs."""
    prompts: Path | None = None
    """JSONL or parquet file, or datasets folder, with a prompt or messages column; default: random tokens."""
    traces: Path | None = None
    """Trace file to compare instead of sampling; only routes are compared."""
    samples: int = 32
    """Sequences in the batch."""
    max_tokens: int = 64
    """Maximum completion length in tokens."""
    max_prompt_length: int = 512
    """Maximum prompt length in tokens; longer prompts are dropped."""
    temperature: float = 1.0
    """Sampling temperature."""
    seed: int = 0
    """Seed for sampling and random prompts."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Trainer dtype; auto: bfloat16 on a GPU, as in training by default, float32 on a CPU."""
    base_dtype: Literal["fp8"] | None = None
    """fp8: round the trainer's weights as model.base_dtype does, to measure the mismatch that it causes."""
    attention: str = "sdpa"
    """Attention implementation of the trainer: sdpa, eager, flash_attention_2, ..."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Trainer device; auto: a GPU if available."""
    packed: bool = True
    """Pack sequences into one row, as in training; otherwise pad them."""
    tokens_per_micro_batch: int = 4096
    """Tokens per micro-batch of the trainer."""
    max_k3: float = DEFAULTS.max_k3
    """Fail above this k3 KL (R3)."""
    max_frac_ratio_gt2: float = DEFAULTS.max_frac_ratio_gt2
    """Fail above this fraction of tokens whose probabilities differ by more than a factor of two (R3)."""
    min_agreement: float = DEFAULTS.min_agreement
    """Fail below this fraction of native routes that match the rollout."""
    gate: bool = False
    """Fail by limits measured on planted faults too, and name the likely fault."""
    exact: bool = False
    """Fail unless native routes and log-probs equal the rollout's bit for bit: for exact kernels on both sides."""
    output: Path | None = None
    """Folder for attribution.json and attribution.html."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        if problem := self._usage_problem():
            raise MoeReplayError(problem)
        if self.output is not None:
            _make_folder(self.output)
        with needs_extra("verify needs {}", "train"), stdout_on_stderr():
            attribution = self._of_traces() if self.traces else self._of_samples()
        limits = Thresholds(
            max_k3=self.max_k3, max_frac_ratio_gt2=self.max_frac_ratio_gt2, min_agreement=self.min_agreement
        )
        problems = failures(attribution, limits)
        problems += gate(attribution) if self.gate else []
        problems += inexact(attribution) if self.exact else []
        if self.output is not None:
            _write(attribution, self.output)
        if self.json:
            result = {"passed": not problems, "failures": problems} | json.loads(attribution.to_json())
            print(json.dumps(result, indent=1))
        else:
            print(attribution, "", *([f"FAILED: {problem}" for problem in problems] or ["passed"]), sep="\n")
        if problems:
            sys.exit(ExitStatus.CHECK_FAILED)

    def _usage_problem(self) -> str | None:
        if any(map(has_password, self.url)):
            return f"a password {READABLE_BY_ALL}: use a token, in $MOE_REPLAY_TOKEN"
        if self.traces and (self.url or self.prompts):
            return "--traces replaces the engine: leave --url and --prompts out"
        if self._is_server and not self.url and not self.traces:
            return f"--engine {self.engine} needs --url, e.g. --url http://127.0.0.1:8000"
        if self.url and not self._is_server:
            return f"--engine {self.engine} runs in this process: leave --url out, or select a server engine"
        if self.samples < 1 or self.max_tokens < 1 or self.tokens_per_micro_batch < 1:
            return "--samples, --max-tokens and --tokens-per-micro-batch must be at least 1"
        if self.temperature <= 0:
            return "--temperature must be above 0: greedy samples have no log-probs to compare"
        return None

    # ---- attribution --------------------------------------------------------------------------------------------

    def _of_traces(self) -> Attribution:
        from moe_replay.tools.attribution import attribute_traces
        from moe_replay.tools.inspect import read_traces

        folder, _ = self._sources()
        traces = list(read_traces(str(self.traces)))
        _log(f"comparing {len(traces)} traces from {self.traces} with {folder}")
        return attribute_traces(
            self._trainer(folder),
            traces,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            packed=self.packed,
            labels={"model": self._name, "traces": str(self.traces), **self._trainer_labels()},
        )

    def _of_samples(self) -> Attribution:
        from moe_replay.tools.attribution import attribute

        folder, file = self._sources()
        samples, engine = self._sampled(folder, self._prompts(folder, file), ends=file is not None)
        _log(f"scoring {len(samples)} samples in four trainer passes")
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
        return self.model or "embedded tiny model"

    def _sources(self) -> tuple[str, Path | None]:
        """Return the model folder, and the prompt file if there is one."""
        from moe_replay.train.setup.sources import model_folder

        if self.model:
            return model_folder(self.model), self.prompts
        from moe_replay import demo

        files = demo.prepare(status=_log)
        return str(files.model), self.prompts or files.train

    # ---- rollout ------------------------------------------------------------------------------------------------

    def _prompts(self, folder: str, file: Path | None) -> list[list[int]]:
        """Return the token ids of up to `samples` prompts."""
        if file is None:
            import numpy as np

            from moe_replay.weights.model_folder import read_config

            rng = np.random.default_rng(self.seed)
            config = read_config(folder, trust_remote_code=self.trust_remote_code)
            vocabulary = config.get_text_config().vocab_size
            lengths = rng.integers(*RANDOM_PROMPTS, self.samples, endpoint=True)
            return [rng.integers(vocabulary, size=length).tolist() for length in lengths]
        from moe_replay.train.rollout.prompts import load_prompts, read_rows
        from moe_replay.train.setup.sources import load_tokenizer

        tokenizer = load_tokenizer(folder, trust_remote_code=self.trust_remote_code)
        loaded = load_prompts(read_rows(file)[: self.samples], tokenizer, self.max_prompt_length)
        return [list(prompt.token_ids) for prompt in loaded]

    def _sampled(self, folder: str, prompts: list[list[int]], *, ends: bool) -> tuple[list[Sample], str]:
        """Return the samples and the engine name; the engine is closed before the trainer loads its model."""
        from moe_replay.records import SamplingParams
        from moe_replay.train.setup.engines import within_model

        params = SamplingParams(
            n=-(-self.samples // len(prompts)),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=not ends,  # meaningless after random tokens
            seed=self.seed,
        )
        _log(f"starting {self.engine} on {folder}")
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
        start = time.monotonic()
        engine = start_sampler(self.engine, request, key="--engine")
        try:
            _log(f"{engine.name} started in {time.monotonic() - start:.0f} s, sampling {len(prompts)} prompts")
            groups = engine.generate(prompts, params)
            return [sample for group in groups for sample in group][: self.samples], str(engine.name)
        finally:
            engine.close()

    # ---- trainer ------------------------------------------------------------------------------------------------

    def _trainer(self, folder: str) -> Any:
        import torch

        from moe_replay.utils.device import device_type
        from moe_replay.weights.model_folder import load_model

        device = device_type(self.device)
        _warn_about_memory(folder, self._trainer_dtype, device, trust_remote_code=self.trust_remote_code)
        model = load_model(
            folder,
            trust_remote_code=self.trust_remote_code,
            dtype=getattr(torch, self._trainer_dtype),
            attn_implementation=self.attention,
        )
        if self.base_dtype is not None:
            from moe_replay.train.backends.fp8_base import round_weights

            round_weights(model)
        return model.to(device)

    @property
    def _trainer_dtype(self) -> str:
        from moe_replay.utils.device import device_type

        if self.dtype != "auto":
            return self.dtype
        return "float32" if device_type(self.device) == "cpu" else "bfloat16"

    def _trainer_labels(self) -> dict[str, str]:
        from transformers import __version__

        rounded = "" if self.base_dtype is None else f", weights rounded to {self.base_dtype}"
        return {"trainer": f"Transformers {__version__} {self._trainer_dtype}{rounded}"}


def _warn_about_memory(folder: str, dtype: str, device: str, *, trust_remote_code: bool) -> None:
    """Warn if the trainer's model does not fit into free memory."""
    from moe_replay.tools.memory_check import weights_memory
    from moe_replay.weights.model_folder import read_config

    needed, free = weights_memory(read_config(folder, trust_remote_code=trust_remote_code), dtype, device)
    if needed > free:
        _log(
            f"warning: the trainer's model in {dtype} needs {needed / 2**30:.1f} GiB on {device}, but only "
            f"{free / 2**30:.1f} GiB are free; use --dtype bfloat16 (half of float32) or --device cpu (host memory)"
        )


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr: engine processes print to stdout, which is reserved for the result."""
    sys.stdout.flush()
    saved = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, STDOUT)
        os.close(saved)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoeReplayError(f"--output cannot be written: {error}", remedy="Choose another folder") from error


def _write(attribution: Attribution, folder: Path) -> None:
    from moe_replay.report.attribution_report import write_attribution_report

    (folder / "attribution.json").write_text(attribution.to_json(), encoding="utf-8")
    try:
        write_attribution_report(attribution, folder / "attribution.html")
    except MissingExtraError as missing:
        _log(f"no attribution.html: {missing}")
    _log(f"results written to {folder}")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
