"""The interface of rollout engines: required members, optional members with their defaults, and start arguments.

An engine of another project subclasses `Engine` (to train with) or `Sampler` (to evaluate and verify with) and is named
by `rollout.engine = "module:name"`. Members under `TYPE_CHECKING` are attributes: an instance attribute, a class
attribute or a property will do.
"""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from moe_replay.errors import EngineError, EngineName, EngineOptionError

if TYPE_CHECKING:
    import numpy as np

    from moe_replay.records import Sample, SamplingParams
    from moe_replay.routes.topology import MoeTopology
    from moe_replay.weights.identity import CurrentWeights, Probe
    from moe_replay.weights.lora_adapter import Adapter
    from moe_replay.weights.source import Weights
    from moe_replay.weights.transfer import Receivers, Transfer

TOKEN_VARIABLE = "MOE_REPLAY_TOKEN"
Capture = Literal["auto", "kv_slot", "vllm", "cross_check", "checked"]
"""Route capture in vLLM. kv_slot: in our worker; vllm: its own; cross_check: both; auto: kv_slot if possible;
checked: as auto, with a self-test at the start and after the first weight update."""
OLD_CAPTURE_NAMES = {"ours": "kv_slot"}
REFUSALS = {
    "foreign_weights": "samples of weights that it was not sent (it restarted, or someone else updates it)",
    "answer": "answers that cannot be true, or cannot be read",
}
"""Reasons for refusing answers of a server: name in metrics -> text."""
Refusals = Mapping[tuple[str, str], int]
"""Number of refused answers by (URL of the server, reason in `REFUSALS`)."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter that an engine will be sent: its rank, and the last names of the modules it changes.

    Of an engine: the largest rank and the modules that it has room for; no modules: all.
    """

    rank: int
    modules: tuple[str, ...]

    def has_room_for(self, adapter: LoraSpec) -> bool:
        return adapter.rank <= self.rank and (not self.modules or {*adapter.modules} <= {*self.modules})


class ServerState(NamedTuple):
    """Whether a server is used.

    cause            why it is not; empty: it is
    is_quarantined   excluded until it accepts the next weight update
    """

    cause: str
    is_quarantined: bool


class Sampler(ABC):
    """Sampling with routes: all that rollouts, evaluation and `moe-replay verify` need."""

    if TYPE_CHECKING:

        @property
        def name(self) -> EngineName:
            """Required. Engine and version, for labels and errors."""

        @property
        def topology(self) -> MoeTopology:
            """Required. The layers of the model that route."""

        @property
        def weight_version(self) -> int:
            """Required. Version of the weights that are sampled from now; samples are stamped with it."""

        @property
        def is_serial(self) -> bool:
            """Whether calls must not overlap, or wait for each other: first turns then come in one `generate`."""

        @property
        def vocab_size(self) -> int | None:
            """Tokens that the model knows; None: not known, and token ids are not checked."""

    else:
        is_serial, vocab_size = False, None

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """Return `params.n` samples for each prompt, in the order of the prompts.

        `requests.per_prompt(params, len(prompts))` has the seed of each.
        """

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt; may run concurrently with other calls unless the engine is serial."""
        return (await asyncio.to_thread(self.generate, [prompt], params))[0]

    def healthy(self) -> bool:
        """Whether the engine is alive, ready to sample or not."""
        return True

    def close(self) -> None:  # noqa: B027  most engines have nothing to release
        """Release all resources."""


class Engine(Sampler):
    """A sampler that also takes the trainer's weights, proves that it has them, and frees memory on request."""

    if TYPE_CHECKING:

        @property
        def weights_id(self) -> str:
            """Required. Id of the update that the weights come from; samples are stamped with it. Empty: of none."""

        @property
        def lora(self) -> LoraSpec | None:
            """Adapters that the engine has room for; None: it takes merged weights only."""

        @property
        def receivers(self) -> Receivers | None:
            """Workers that take part in transfers of weights (`ipc`, `nccl`); None: it takes tensors only."""

        @property
        def shares_weights(self) -> bool:
            """Whether a trainer on the same device may compute with the memory of the base weights."""

        @property
        def bytes_sent(self) -> int | None:
            """Bytes that the last update sent to a server, the most to any; None: not known."""

        @property
        def server_states(self) -> Mapping[str, ServerState]:
            """States of the servers that the engine consists of, by URL."""

        @property
        def refusals(self) -> Refusals:
            """Requests so far whose answer was refused."""

    else:
        lora = receivers = bytes_sent = None
        shares_weights = False
        server_states, refusals = {}, {}

    @abstractmethod
    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""

    # ---- weights ------------------------------------------------------------------------------------------------

    @abstractmethod
    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights in place, drop cached prefixes, and stamp later samples with `version` and `weights_id`.

        Running requests are aborted first, so that no sample mixes two versions unnoticed. After an update that
        fails, or whose result contradicts `probe`, the engine refuses to sample until an update succeeds.
        """

    def receive_weights(
        self, transfer: Transfer, version: int, probe: Probe | None = None, weights_id: str = ""
    ) -> None:
        """Replace all weights as `update_weights` does, from memory of the trainer that `receivers` read."""
        raise EngineError(f"{self.name} takes no transfers of weights", remedy='Set weight_sync.transport = "http"')

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace the LoRA adapter, with the promises of `update_weights`."""
        raise EngineError(f"{self.name} takes no adapters", remedy="Set rollout.lora = false")

    def receivers_by_url(self, weights_id: str = "") -> Mapping[str, Receivers | None]:
        """Return the receivers of all servers that can be reached and lack these weights; "": of this process."""
        return {"": self.receivers}

    def share_weights(self) -> str:
        """Return what a trainer on the same device opens the base weights with; no update changes them from then on.

        Only where `shares_weights`. Their memory stays as it is until the engine is closed, asleep or not.
        """
        raise EngineError(f"{self.name} does not share its weights", remedy="Set rollout.share_weights = false")

    def shared_digests(self) -> Mapping[str, str]:
        """Return digests of the weights that `share_weights` has named, by their place in the model."""
        return {}

    # ---- memory -------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free the memory that sampling needs, while the trainer works on the same device.

        level   2: the weights need not be kept, since an update with all of them comes next
        """

    def wake(self) -> None:
        """Undo `sleep`."""

    def wake_for_update(self) -> None:
        """Undo `sleep` before an update with all weights.

        Memory that only sampling needs can be left until the update has read all weights, when the trainer may have
        freed its own.
        """
        self.wake()

    def abort(self) -> None:
        """Abort running requests; unfinished samples come back with `FinishReason.ABORT`."""

    # ---- servers ------------------------------------------------------------------------------------------------

    def server_count(self) -> int:
        """Return how many servers the engine consists of; 1 in this process."""
        return 1

    def unreachable(self) -> list[str]:
        """Return the URLs of the servers that do not answer."""
        return []

    def exclude(self, url: str, cause: str) -> None:
        """Do not use a server again, because its samples are not believed. May be repeated."""

    def lacks_weights(self) -> bool:
        """Whether a server that can be reached has lost the weights that it was sent."""
        return False

    def wait_for_servers(self) -> bool:
        """Wait while no server can be reached, if lost ones are replaced; return whether one can be then."""
        return False

    def follow_update(self, version: int, weights_id: str) -> None:
        """Hold requests back while another process updates the servers, and accept samples of that update."""
        raise self._not_shared()

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Use the servers that the process which has sent the update uses, and release waiting requests."""
        raise self._not_shared()

    def _not_shared(self) -> EngineError:
        return EngineError(
            f"{self.name} cannot be used by several processes",
            expected="a pool of servers",
            remedy="Set rollout.workers = 1",
        )


class ServedEngine(Engine):
    """An engine behind a URL: a member of a pool.

    drains   samples are stamped by the client, so that none may be in flight during an update
    """

    url: str
    drains = False

    @abstractmethod
    def current_weights(self) -> CurrentWeights:
        """Return the version and id of the weights, as the server reports them."""

    @property
    def weight_version(self) -> int:
        return self.current_weights().version

    @property
    def weights_id(self) -> str:
        return self.current_weights().weights_id

    @abstractmethod
    def follow_update(self, version: int, weights_id: str) -> None:
        """Accept samples of weights that another process sends to the server."""


def check_interface(started: Any, interface: type[Sampler], name: str) -> None:
    """Raise unless a user's engine has the members of an interface; `name` is that of the engine."""
    if not isinstance(started, interface):
        raise EngineError(
            f"{name} is no {interface.__name__}",
            expected=f"a subclass of moe_replay.engines.base.{interface.__name__}",
            found=type(started).__name__,
            remedy="docs/extending.md has an example",
        )
    required = {"name", "topology", "weight_version"} | ({"weights_id"} if interface is Engine else set())
    missing = sorted(required - {*dir(started)})
    if missing:
        raise EngineError(
            f"{name} lacks members of {interface.__name__}",
            expected=", ".join(sorted(required)),
            found=f"no {', '.join(missing)}",
            remedy="Set them in __init__",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """Arguments that an engine is started or connected with; each engine's `start` takes one.

    model            folder or name of the model
    max_length       tokens of a sequence at most, prompt included; None: the model's own limit
    dtype            of the engine's computation; "auto": the type of the weights on disk
    weight_version   of the weights in `model`
    router_family    description of the routers of a model unknown to this release: "module:name"
    trust_remote_code   run Python code that comes with the model
    max_sequences    sequences that will be sampled at a time at most; None: not known
    sleep            whether `sleep` will be called
    sampling_mask    whether samples will be requested with their sampling mask
    capture          which capture records routes, in an engine that has several (`EngineSpec.takes_capture`)
    urls, token      of servers that run already; without a token, that of $MOE_REPLAY_TOKEN
    min_servers      of `urls` that must be reachable; None: all
    sample_only      weights will not be updated
    lora             of the adapter that updates will consist of; None: updates have all weights
    share_weights    whether a trainer on the same device will compute with the memory of the base weights
    options          the engine's own, passed on as they are
    """

    model: str
    max_length: int | None = None
    dtype: str = "auto"
    weight_version: int = 0
    router_family: str | None = None
    trust_remote_code: bool = False
    max_sequences: int | None = None
    sleep: bool = False
    sampling_mask: bool = False
    capture: Capture = "auto"
    urls: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    min_servers: int | None = None
    sample_only: bool = False
    lora: LoraSpec | None = None
    share_weights: bool = False
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
