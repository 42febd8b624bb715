"""Rollout engines by name. A new engine is one file with a `start` function, and one line in `ENGINES`.

    def start(request: StartRequest) -> Engine: ...

Outside of this package, `rollout.engine = "module:name"` names such a function, or an `EngineSpec` of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from moe_replay.errors import EngineError, EngineOptionError
from moe_replay.rollout.engine import Engine, Sampler, StartRequest
from moe_replay.utils.plugins import import_path, resolve

Start = Callable[[StartRequest], Sampler]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Properties of an engine that are known before it starts.

    start           function, or the `module:function` that it is imported from when it is needed
    description     one line for help texts and docs
    is_server       runs in separate processes and is reached by URLs
    takes_weights   is an `Engine`; otherwise it only samples, and cannot be trained with
    package         that must be installed here to start it; empty: none
    extra           of moe-replay that installs this package; empty: the package itself is named
    check_version   of the installed package, as `module:function`: raises for a release that cannot be used
    check_options   `module:function` of capture and options, called while a recipe is read: raises `EngineOptionError`
    quick_start     options that start it sooner and let it sample more slowly, for a few samples
    returns_masks   can return the sampling mask of its samples, in some release at least
    start_sampler   in place of `start` where the engine need only sample; None: the same
    takes_capture   lets the user choose which capture records routes (`StartRequest.capture`)
    takes_lora      can be sent an adapter by itself, in place of merged weights
    takes_delta     can be sent changed weights by themselves
    """

    start: str | Start
    description: str
    is_server: bool = False
    takes_weights: bool = True
    package: str = ""
    extra: str = ""
    check_version: str = ""
    check_options: str = ""
    quick_start: Mapping[str, Any] = field(default_factory=dict)
    returns_masks: bool = True
    takes_capture: bool = False
    takes_lora: bool = False
    takes_delta: bool = False
    start_sampler: str | Start | None = None


ENGINES: dict[str, EngineSpec] = {
    "vllm": EngineSpec(
        "moe_replay.rollout.vllm.engine:start",
        "vLLM in this process",
        package="vllm",
        extra="vllm",
        check_version="moe_replay.rollout.vllm.release:check_version",
        check_options="moe_replay.rollout.vllm.capture_choice:chosen_capture",
        quick_start={"enforce_eager": True},
        takes_capture=True,
        takes_lora=True,
    ),
    "transformers": EngineSpec(
        "moe_replay.rollout.transformers:start", "Transformers in this process", package="transformers", extra="train"
    ),
    "vllm_server": EngineSpec(
        "moe_replay.rollout.server.client:start",
        "`moe-replay rollout` servers",
        is_server=True,
        takes_lora=True,
        takes_delta=True,
    ),
    "sglang_server": EngineSpec(
        "moe_replay.rollout.sglang.server:start", "SGLang servers", is_server=True, returns_masks=False
    ),
    "plain_vllm_server": EngineSpec(
        "moe_replay.rollout.plain_vllm.engine:start",
        "vLLM's own servers, `vllm serve`",
        is_server=True,
        start_sampler="moe_replay.rollout.plain_vllm.client:start",
    ),
}


def engine_spec(name: str, *, key: str = "rollout.engine") -> EngineSpec:
    """Return the engine called `name`, built in or `module:name`; `key` is the setting that holds it, for errors."""
    found = resolve(name, ENGINES, kind="engine", key=key)
    return found if isinstance(found, EngineSpec) else EngineSpec(found, name)


def start_sampler(name: str, request: StartRequest, *, key: str = "rollout.engine") -> Sampler:
    """Start an engine on a model, or connect to the servers that have it, for sampling only."""
    spec = engine_spec(name, key=key)
    return _start(name, spec, spec.start_sampler or spec.start, request, key)


def _start(name: str, spec: EngineSpec, start: str | Start, request: StartRequest, key: str) -> Sampler:
    if request.capture != "auto" and not spec.takes_capture:
        raise EngineOptionError(
            f"{name} has no choice of captures",
            found=f"capture {request.capture}",
            remedy=f"Leave capture out, or use one of {', '.join(engine_names(lambda spec: spec.takes_capture))}",
        )
    return (import_path(start, kind="engine", key=key) if isinstance(start, str) else start)(request)


def start_engine(name: str, request: StartRequest, *, key: str = "rollout.engine") -> Engine:
    """Start an engine, or connect to its servers, for training: it must take new weights."""
    spec = engine_spec(name, key=key)
    sampler = _start(name, spec, spec.start, request, key)
    if not _takes_weights(sampler):
        sampler.close()
        raise EngineError(
            f"{name} cannot be given new weights",
            expected=f"{key}: {', '.join(trainable_engines())}",
            remedy="Use it for evaluation only",
        )
    return sampler


def engine_names(condition: Callable[[EngineSpec], bool]) -> list[str]:
    """Names of the built-in engines that meet a condition."""
    return [name for name, spec in ENGINES.items() if condition(spec)]


def trainable_engines() -> list[str]:
    """Names of the built-in engines that take weights."""
    return engine_names(lambda spec: spec.takes_weights)


def server_engines() -> list[str]:
    """Names of the built-in engines that are reached by URLs and take weights."""
    return engine_names(lambda spec: spec.takes_weights and spec.is_server)


def _takes_weights(sampler: Sampler) -> TypeGuard[Engine]:
    return callable(getattr(sampler, "update_weights", None))
