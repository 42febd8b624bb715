"""Routing replay for TRL's `GRPOTrainer`, without a fork of it.

    from trl import GRPOTrainer
    from moe_replay.integrations.trl import RouterReplayMixin

    class Trainer(RouterReplayMixin, GRPOTrainer):
        pass

    Trainer(model=..., reward_funcs=..., args=..., train_dataset=..., replay="r3").train()

It uses private methods of TRL, so it accepts only the versions it was tested with.
docs/trl.md says where routes come from and what is logged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from moe_replay.engines.base import Engine
from moe_replay.errors import MoeReplayError
from moe_replay.integrations.trl_generation import EngineGeneration, GenerationWatch
from moe_replay.integrations.trl_passes import (
    ComparingPass,
    RecordingPass,
    ReplayingPass,
    ReplayMetrics,
    RoutedPass,
    RoutedSample,
    rollout_logprobs,
)
from moe_replay.records import SamplingParams
from moe_replay.replay.controller import attach
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.tested_versions import TESTED, dotted, notice_if_newer, release_numbers

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

ReplayMode = Literal["off", "observe", "r2", "r3"]
SAMPLES = "moe_replay_samples"  # our entry in TRL's batches, a list next to its tensors
ROUTES = "routes"  # returned by a rollout_func with prompt_ids, completion_ids and logprobs


class TrlError(MoeReplayError):
    """A TRL, or settings of it, with which routes cannot be replayed."""


class RouterReplayMixin(_Trainer):
    """Mixin that comes before `GRPOTrainer` among the bases of a class. It adds two arguments to TRL's own.

    replay   off: TRL unchanged, nothing is attached
             observe: routes of the rollout are compared with those of training, nothing is replayed
             r2: updates replay the routes of the old-log-prob pass
             r3: the old-log-prob pass and the updates replay the routes of the rollout
    engine   samples in place of TRL's own generation; its weights are updated after every step (engines/base.py)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base.__name__ for base in cls.__mro__]
        if "GRPOTrainer" not in bases or bases.index("GRPOTrainer") < bases.index("RouterReplayMixin"):
            raise TrlError(
                "RouterReplayMixin comes before GRPOTrainer among the bases of a trainer",
                expected=f"class {cls.__name__}(RouterReplayMixin, GRPOTrainer)",
                found=", ".join(base.__name__ for base in cls.__bases__),
            )

    def __init__(self, *args: Any, replay: ReplayMode = "r3", engine: Engine | None = None, **kwargs: Any) -> None:
        _check_trl(version("trl"), next(base for base in type(self).__mro__ if base.__name__ == "GRPOTrainer"))
        arguments = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        _check_settings(arguments, replay, engine)  # before TRL starts a vLLM that would not be used
        super().__init__(*args, **kwargs)
        self.replay_mode = replay
        self._samples: list[RoutedSample] | None = None  # of the batch that TRL is scoring; None: no replay
        self._updating = False  # whether it scores for an update
        self._logps: torch.Tensor | None = None  # log-probs of the update
        self._engine: EngineGeneration | None = None
        if engine is not None:
            self._generate_with(engine)
        if replay != "off":
            self.router_replay = attach(self._language_model)
            self._replay_metrics = ReplayMetrics(self.router_replay.topology, self.accelerator.device)
            self._adapters = self._adapter_status()

    def _generate_with(self, engine: Engine) -> None:
        """Put the engine in the place of TRL's vLLM: TRL then syncs weights and applies its importance correction."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise TrlError(
                "weights that are sharded over ranks cannot be sent to an engine",
                remedy="Sample in a rollout_func that keeps its engine up to date",
            )
        if self.max_completion_length is None:
            raise TrlError("an engine needs a limit on completions", remedy="Set max_completion_length")
        params = SamplingParams(
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            stop_token_ids=tuple(self.eos_token_ids),
        )
        self._engine = EngineGeneration(engine, self._unwrapped, params, self.accelerator, self._updates_done)
        self.vllm_generation: Any = self._engine
        self.use_vllm = True
        self._last_loaded_step = -1

    def _updates_done(self) -> int:
        return self.state.global_step  # train() begins with a new state

    # ---- the models ---------------------------------------------------------------------------------------------

    @property
    def _unwrapped(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    @property
    def _language_model(self) -> nn.Module:
        """The policy without any wrapper: the model that `generate` runs."""
        from accelerate.utils import is_peft_model

        model: Any = self._unwrapped
        return model.get_base_model() if is_peft_model(model) else model

    def _adapter_status(self) -> tuple[Any, Any] | None:
        """Return the enabled and active adapters: with PEFT the reference is the policy with its adapters disabled."""
        from accelerate.utils import is_peft_model

        model: Any = self._unwrapped
        if not is_peft_model(model):
            return None
        status = model.get_model_status()
        return status.enabled, status.active_adapters

    def _is_reference(self, model: Any) -> bool:
        return model is self.ref_model or self._adapter_status() != self._adapters

    # ---- rollout ------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.replay_mode == "off" or not self._unwrapped.training:  # evaluation routes natively
            return super()._generate_and_score_completions(inputs)
        self._samples = []
        try:
            output = super()._generate_and_score_completions(inputs)
            return output | {SAMPLES: self._samples}
        finally:
            self._samples = None

    def _generate(self, prompts: list) -> Any:
        result = super()._generate(prompts)
        if self._samples is None:
            return result
        prompt_ids, completion_ids, _, _, logprobs, extra_fields, *_ = result
        if self.rollout_func is not None:
            traces = extra_fields.pop(ROUTES, None)  # TRL passes extra fields to the reward functions
            self._samples = self._from_rollout_func(prompt_ids, completion_ids, logprobs, traces)
        elif not self._samples:  # neither an engine nor a single call of TRL's own generate filled them
            self._samples = _plain_samples(prompt_ids, completion_ids, logprobs)
        return result

    def _from_rollout_func(
        self, prompts: Any, completions: Any, logprobs: Any, traces: Sequence[RouteTrace] | None
    ) -> list[RoutedSample]:
        samples = _plain_samples(prompts, completions, logprobs)
        if self.replay_mode == "r2":
            return samples
        if traces is None or len(traces) != len(samples):
            raise TrlError(
                "the rollout_func returned no routes, or not of each sample",
                expected=f'"{ROUTES}": a list of {len(samples)} RouteTrace',
                found="none" if traces is None else len(traces),
                remedy='With replay="r2" no routes of the rollout are needed',
            )
        for index, (sample, trace) in enumerate(zip(samples, traces, strict=True)):
            if tuple(trace.token_ids.tolist()) != sample.token_ids:
                raise TrlError(
                    "a trace is of other tokens than its sample",
                    sample=index,
                    expected=f"prompt and completion, {len(sample.token_ids)} tokens",
                    found=trace,
                )
        return [replace(sample, trace=trace) for sample, trace in zip(samples, traces, strict=True)]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        # In TRL's tool loop a call is for a part of the samples, with prompts that hold their first turns.
        if self._samples is None or self.tools or self.use_vllm or self.use_transformers_continuous_batching:
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            if self._samples is not None and self._engine is not None:
                self._samples = self._engine.samples
            return result
        recorder = None if self.replay_mode == "r2" else self.router_replay
        watch = GenerationWatch(self._language_model, recorder, self.temperature)
        with watch.watching():
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._samples = watch.samples(prompt_ids, completion_ids, self._updates_done())
        return completion_ids, logprobs

    # ---- scoring ------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        routed = model
        if self._samples is not None and (self._updating or not self._is_reference(model)):
            routed = self._routed(model, input_ids.shape[1] - logits_to_keep)
        result = super()._get_per_token_logps_and_entropies(
            routed, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if isinstance(routed, RecordingPass):
            self._samples = routed.recorded
        if self._updating:
            self._logps = result[0].detach()
        return result

    def _routed(self, model: Any, prompt_width: int) -> RoutedPass | Any:
        """Return what TRL calls in place of the policy, in the old-log-prob pass or in an update."""
        assert self._samples is not None
        around = (model, self.router_replay, self._samples, prompt_width)
        if not self._updating:
            if self.replay_mode == "r2":
                return RecordingPass(*around)
            return ReplayingPass(*around) if self.replay_mode == "r3" else model
        if any(sample.trace is None for sample in self._samples):  # r2, and TRL makes no old-log-prob pass
            self._replay_metrics.add_uncovered(sum(len(sample.token_ids) for sample in self._samples))
            return model
        kind = ComparingPass if self.replay_mode == "observe" else ReplayingPass
        return kind(*around, metrics=self._replay_metrics)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if SAMPLES not in inputs:
            return super()._compute_loss(model, inputs)
        self._samples, self._updating = inputs[SAMPLES], True
        try:
            loss = super()._compute_loss(model, inputs)
            self._add_logprobs(inputs, inputs[SAMPLES])
        finally:
            self._samples, self._updating, self._logps = None, False, None
        return loss

    def _add_logprobs(self, inputs: Any, samples: Sequence[RoutedSample]) -> None:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        old, train = inputs.get("old_per_token_logps"), self._logps
        rollout = rollout_logprobs(samples, mask)
        self._replay_metrics.add_logprobs("rollout_vs_old", rollout, old, mask)
        self._replay_metrics.add_logprobs("rollout_vs_train", rollout, train, mask)
        self._replay_metrics.add_logprobs("old_vs_train", old, train, mask)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.replay_mode != "off" and self._unwrapped.training:
            for name, value in self._replay_metrics.flush().items():
                self._metrics["train"][name] = [value]
        super().log(logs, start_time)


def _check_settings(arguments: Mapping[str, Any], replay: str, engine: Engine | None) -> None:
    """Raise where TRL's arguments and ours are incompatible."""
    settings = arguments.get("args")
    own_rollout = arguments.get("rollout_func") is not None
    tools = bool(arguments.get("tools")) or arguments.get("environment_factory") is not None
    vllm = settings is not None and settings.use_vllm
    continuous = settings is not None and settings.use_transformers_continuous_batching
    filters = settings is not None and (
        settings.repetition_penalty != 1.0 or settings.min_p is not None or settings.generation_kwargs is not None
    )
    engine_only = engine is not None
    routes = replay in ("observe", "r3") and not own_rollout  # to be recorded inside TRL
    rules = [
        (replay not in get_args(ReplayMode), "unknown way to replay", f"One of {', '.join(get_args(ReplayMode))}"),
        (engine_only and own_rollout, "both an engine and a rollout_func", "Give one of them"),
        (engine_only and (vllm or continuous), "both an engine and a backend of TRL's own", "Leave out use_..."),
        (engine_only and filters, "min_p, repetition_penalty or generation_kwargs with an engine", "Leave them out"),
        (
            engine_only and tools,
            "both an engine and TRL's tool loop, which samples with a backend of TRL's own",
            "Run the turns in a rollout_func that keeps its engine up to date; with r2 or off, leave out the engine",
        ),
        (
            routes and vllm,
            "TRL's own vLLM returns no routes",
            "Give engine=VllmEngine(...) or RolloutClient(...) instead",
        ),
        (routes and continuous, "continuous batching mixes samples in one pass", "Switch it off"),
        (routes and tools, "TRL's tool loop cuts samples into calls", "Run the turns in a rollout_func with routes"),
    ]
    for broken, problem, remedy in rules:
        if broken:
            raise TrlError(problem, found=f"replay={replay!r}", remedy=remedy)


_USED_METHODS: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_generate_single_turn": ("prompt_ids",),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    "_compute_loss": ("model", "inputs"),
}
"""Methods that TRL keeps to itself and replay overrides, with the parameters that it relies on."""


def _check_trl(installed: str, trainer: type) -> None:
    """Raise for a TRL that is too old or whose methods have changed; one newer than those tested is tried."""
    oldest = TESTED["trl"][0]
    if release_numbers(installed) < oldest:
        raise TrlError("this version of TRL is too old", expected=f"at least {dotted(oldest)}", found=installed)
    for name, expected in _USED_METHODS.items():
        method = getattr(trainer, name, None)
        parameters = () if method is None else tuple(inspect.signature(method).parameters)
        if parameters[1 : len(expected) + 1] != expected:
            raise TrlError(
                f"TRL's method {name} has changed, and replay overrides it",
                expected=f"({', '.join(expected)}, ...)",
                found=f"TRL {installed}: " + ("no such method" if method is None else f"({', '.join(parameters[1:])})"),
                remedy=f"Install trl {dotted(oldest)}",
            )
    notice_if_newer("trl", installed)


def _plain_samples(prompts: Any, completions: Any, logprobs: Any) -> list[RoutedSample]:
    of_samples = logprobs or [None] * len(prompts)
    return [
        RoutedSample((*prompt, *completion), len(prompt), logprobs=values)
        for prompt, completion, values in zip(prompts, completions, of_samples, strict=True)
    ]
