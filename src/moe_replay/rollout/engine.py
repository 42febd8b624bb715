"""The interfaces of rollout engines, and what one is started with."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from moe_replay.errors import EngineError, EngineName, EngineOptionError

if TYPE_CHECKING:
    import numpy as np

    from moe_replay.rollout.types import Probe, Sample, SamplingParams
    from moe_replay.rollout.weights.transfer import Receivers
    from moe_replay.rollout.weights.types import Weights
    from moe_replay.routes.topology import MoeTopology

TOKEN_VARIABLE = "MOE_REPLAY_TOKEN"
Capture = Literal["auto", "ours", "vllm", "checked"]
"""Which capture records routes in vLLM. auto: ours where it can be used; checked: both, and they must agree."""
T = TypeVar("T")


class Sampler(Protocol):
    """Engine interface for sampling with routes: all that rollouts, evaluation and attribution need."""

    @property
    def name(self) -> EngineName:
        """Engine and version, for labels and errors."""
        ...

    @property
    def topology(self) -> MoeTopology:
        """The layers of the model that route."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that are sampled from now."""
        ...

    def healthy(self) -> bool:
        """Whether the engine is alive, ready to sample or not."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """Return `params.n` samples for each prompt, in the order of the prompts."""
        ...

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt; may run concurrently with other calls."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Engine(Sampler, Protocol):
    """A sampler that also takes the trainer's weights, proves that it has them, and frees memory on request."""

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        ...

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights in place, drop cached prefixes, and stamp later samples with `version` and `weights_id`.

        Running requests are aborted first, so that no sample mixes two versions unnoticed. After an update that
        fails, or whose result contradicts `probe`, the engine refuses to sample until an update succeeds.
        """
        ...

    def sleep(self) -> None:
        """Free the memory that sampling needs, while the trainer works on the same device.

        An engine may take a `level`: with 2 it need not keep its weights, since an update with all of them comes next.
        """
        ...

    def wake(self) -> None:
        """Undo `sleep`.

        An engine may also have `wake_for_update`, which is called if an update comes next: memory that only sampling
        needs can then be left until the update has read all weights, when the trainer may have freed its own.
        """
        ...

    def abort(self) -> None:
        """Abort running requests; unfinished samples come back with `FinishReason.ABORT`."""
        ...


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter that an engine will be sent: its rank, and the last names of the modules it changes.

    Of an engine: the largest rank and the modules that it has room for; no modules: all.
    """

    rank: int
    modules: tuple[str, ...]

    def has_room_for(self, adapter: LoraSpec) -> bool:
        """Whether an engine of this kind can take an adapter."""
        return adapter.rank <= self.rank and (not self.modules or {*adapter.modules} <= {*self.modules})


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """Arguments that an engine is started or connected with; each engine's `start` takes one.

    model            folder or name of the model
    max_length       tokens of a sequence at most, prompt included; None: the model's own limit
    dtype            of the engine's computation; "auto": the type of the weights on disk
    weight_version   of the weights in `model`
    router_family    description of the routers of a model unknown to this release: "module:name"
    trust_remote_code   run Python code that comes with the model
    sleep            whether `sleep` will be called
    sampling_mask    whether samples will be asked for with their sampling mask
    capture          which capture records routes, in an engine that has several (`EngineSpec.takes_capture`)
    urls, token      of servers that run already; without a token, that of $MOE_REPLAY_TOKEN
    min_servers      of `urls` that must be reachable; None: all
    lora             of the adapter that updates will consist of; None: updates have all weights
    options          the engine's own, passed on as they are
    """

    model: str
    max_length: int | None = None
    dtype: str = "auto"
    weight_version: int = 0
    router_family: str | None = None
    trust_remote_code: bool = False
    sleep: bool = False
    sampling_mask: bool = False
    capture: Capture = "auto"
    urls: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    min_servers: int | None = None
    lora: LoraSpec | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> StartRequest:
        """Return the request of which `dataclasses.asdict` has made these fields, JSON or not."""
        lora = fields["lora"]
        spec = None if lora is None else LoraSpec(lora["rank"], tuple(lora["modules"]))
        values: dict[str, Any] = {**fields, "urls": tuple(fields["urls"]), "lora": spec}
        return cls(**values)

    @property
    def bearer_token(self) -> str | None:
        """The token to send to servers."""
        return self.token or os.environ.get(TOKEN_VARIABLE)

    def call(self, client: Callable[..., T], *arguments: Any, **settings: Any) -> T:
        """Construct a client with `settings`, which `options` may override; an unknown option is an error."""
        try:
            return client(*arguments, **{**settings, **self.options})
        except TypeError as mismatch:
            raise EngineOptionError(
                f"{client.__name__} does not take these options",
                found=mismatch,
                remedy="Compare rollout.options with docs/engines.md",
            ) from mismatch


def devices_per_engine(options: Mapping[str, Any]) -> int:
    """Return how many devices an engine with these options of vLLM computes on."""
    sizes = ("tensor", "pipeline", "data", "prefill_context")
    return math.prod(int(options.get(f"{name}_parallel_size") or 1) for name in sizes)


def put_to_sleep(engine: Engine, level: int) -> None:
    """Have an engine free its memory, and with level 2 drop its weights, if it can."""
    if level > 1 and "level" in inspect.signature(engine.sleep).parameters:
        engine.sleep(level=level)  # type: ignore[call-arg]
    else:
        engine.sleep()


def receivers_of(engine: Engine) -> Receivers | None:
    """Return what takes part in transfers of weights to an engine (its `receivers`); None if it takes none."""
    return getattr(engine, "receivers", None)


def wake_for_update(engine: Engine) -> None:
    """Wake an engine that is sent weights next."""
    getattr(engine, "wake_for_update", engine.wake)()


def end_tokens(*configs: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the first config that has any."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Raise at the first prompt that is empty or leaves no room for a new token."""
    for sample, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_length:
            raise EngineError(
                "a prompt is empty or as long as a sequence may be",
                sample=sample,
                expected=f"1 to {max_length - 1} tokens",
                found=f"{len(prompt)} tokens",
                remedy="Truncate or drop such prompts, or start the engine with a larger max_length",
            )
