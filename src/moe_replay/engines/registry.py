"""Rollout engines by name. A new engine is one file with a `start` function, and one line in `ENGINES`.

    def start(request: StartRequest) -> Engine: ...

Outside of this package, `rollout.engine = "module:name"` names such a function or class, or an `EngineSpec`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from moe_replay.engines.base import Engine, Sampler, StartRequest, check_interface
from moe_replay.errors import EngineError, EngineOptionError
from moe_replay.utils.misc import printable
from moe_replay.utils.plugins import PluginError, import_path, resolve, user_code

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
    option_names    names that `options` may have, as `module:function` that returns them, or the `module:Class` whose
                    keyword arguments they are; called only where the package is installed; empty: not known before
    quick_start     options that start it sooner and let it sample more slowly, for a few samples
    returns_masks   can return the sampling mask of its samples, in some release at least
    takes_capture   lets the user choose which capture records routes (`StartRequest.capture`)
    takes_lora      can be sent an adapter by itself, in place of merged weights
    takes_transfers   can be sent weights by ipc and nccl
    """

    start: str | Start
    description: str
    is_server: bool = False
    takes_weights: bool = True
    package: str = ""
    extra: str = ""
    check_version: str = ""
    check_options: str = ""
    option_names: str = ""
    quick_start: Mapping[str, Any] = field(default_factory=dict)
    returns_masks: bool = True
    takes_capture: bool = False
    takes_lora: bool = False
    takes_transfers: bool = True


ENGINES: dict[str, EngineSpec] = {
    "vllm": EngineSpec(
        "moe_replay.engines.vllm.engine:start",
        "vLLM in this process",
        package="vllm",
        extra="vllm",
        check_version="moe_replay.engines.vllm.release:check_version",
        check_options="moe_replay.engines.vllm.release:check_options",
        option_names="moe_replay.engines.vllm.release:option_names",
        quick_start={"enforce_eager": True},
        takes_capture=True,
        takes_lora=True,
    ),
    "transformers": EngineSpec(
        "moe_replay.engines.transformers:start", "Transformers in this process", package="transformers", extra="train"
    ),
    "rollout_server": EngineSpec(
        "moe_replay.engines.server.client:start",
        "`moe-replay rollout` servers",
        option_names="moe_replay.engines.server.client:RolloutClient",
        is_server=True,
        takes_lora=True,
    ),
    "sglang_server": EngineSpec(
        "moe_replay.engines.sglang.client:start",
        "SGLang servers",
        option_names="moe_replay.engines.sglang.client:SglangClient",
        is_server=True,
        returns_masks=False,
        takes_transfers=False,
    ),
    "vllm_serve": EngineSpec(
        "moe_replay.engines.vllm_serve.client:start",
        "vLLM's own servers, `vllm serve`",
        option_names="moe_replay.engines.vllm_serve.client:VllmServeClient",
        is_server=True,
        takes_transfers=False,
    ),
}


def engine_spec(name: str, *, key: str = "rollout.engine") -> EngineSpec:
    """Return the engine called `name`, built in or `module:name`; `key` is the setting that holds it, for errors."""
    resolved = resolve(name, ENGINES, kind="engine", key=key)
    if isinstance(resolved, EngineSpec):
        return resolved
    if not _takes_one_argument(resolved):
        raise PluginError(
            f"{name!r} is no engine",
            expected="an EngineSpec, or a function or class that takes a StartRequest",
            found=printable(resolved, repr)[:100],
            remedy="docs/extending.md has an example",
        )
    return EngineSpec(resolved, name)


def _takes_one_argument(start: Any) -> bool:
    try:
        inspect.signature(start).bind(None)
    except TypeError:  # not callable, or with other parameters
        return False
    except ValueError:  # a builtin without a signature
        return callable(start)
    return True


def start_sampler(name: str, request: StartRequest, *, key: str = "rollout.engine") -> Sampler:
    """Start an engine on a model, or connect to the servers that have it, for sampling only."""
    sampler = _start(name, replace(request, sample_only=True), key)
    check_interface(sampler, Sampler, name)
    return sampler


def _start(name: str, request: StartRequest, key: str) -> Sampler:
    spec = engine_spec(name, key=key)
    if request.capture != "auto" and not spec.takes_capture:
        raise EngineOptionError(
            f"{name} has no choice of captures",
            found=f"capture {request.capture}",
            remedy=f"Leave capture out, or use one of {', '.join(engine_names(lambda spec: spec.takes_capture))}",
        )
    start = import_path(spec.start, kind="engine", key=key) if isinstance(spec.start, str) else spec.start
    if name in ENGINES:
        return start(request)
    with user_code(f"engine {name!r}", EngineError):
        return start(request)


def start_engine(name: str, request: StartRequest, *, key: str = "rollout.engine") -> Engine:
    """Start an engine, or connect to its servers, for training: it must take new weights."""
    if not engine_spec(name, key=key).takes_weights:
        raise EngineError(
            f"{name} cannot be given new weights",
            expected=f"{key}: {', '.join(trainable_engines())}",
            remedy="Use it for evaluation only",
        )
    engine = _start(name, request, key)
    check_interface(engine, Engine, name)
    return cast(Engine, engine)


def check_option_names(name: str, options: Mapping[str, Any]) -> None:
    """Raise for options that the engine called `name` does not have, where that is known before it starts."""
    spec = engine_spec(name)
    if not spec.option_names or not options:
        return
    source = import_path(spec.option_names, kind="engine", key="rollout.engine")
    names = _keyword_arguments(source) if isinstance(source, type) else source()
    if unknown := sorted(options.keys() - names):
        near = difflib.get_close_matches(unknown[0], sorted(names), n=1)
        raise EngineOptionError(
            f"rollout.options: {name} does not have these options",
            found=", ".join(unknown),
            remedy=f"Did you mean {near[0]!r}?" if near else "Compare rollout.options with docs/engines.md",
        )


def _keyword_arguments(client: type) -> set[str]:
    """Return the keyword arguments of a class and of the classes that it passes others on to."""
    constructors = [vars(base)["__init__"] for base in client.mro() if "__init__" in vars(base)]
    parameters = [parameter for init in constructors for parameter in inspect.signature(init).parameters.values()]
    return {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def engine_names(condition: Callable[[EngineSpec], bool]) -> list[str]:
    """Names of the built-in engines that meet a condition."""
    return [name for name, spec in ENGINES.items() if condition(spec)]


def trainable_engines() -> list[str]:
    """Names of the built-in engines that take weights."""
    return engine_names(lambda spec: spec.takes_weights)


def server_engines() -> list[str]:
    """Names of the built-in engines that are reached by URLs and take weights."""
    return engine_names(lambda spec: spec.takes_weights and spec.is_server)
