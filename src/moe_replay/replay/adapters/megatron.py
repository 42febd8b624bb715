"""Where the routers of Megatron-Core chunks are, and how they are made to obey.

From 0.16 on a router asks an object of its own, `router.router_replay`, which experts to take. A `RouterPort` in its
place is all that replay needs: nothing of Megatron is patched, and its process-wide list of replay objects is never
looked at. Older versions ask nobody; `megatron_legacy.py` answers them.

Nothing here imports Megatron: its classes are known by name, so that an attached model may be wrapped or subclassed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.adapters.megatron_legacy import legacy_port
from moe_replay.replay.adapters.megatron_settings import check_replay_enabled, check_settings, megatron_version
from moe_replay.replay.choice import Choice
from moe_replay.replay.passes import Switch
from moe_replay.replay.site import Chunk, PortKind, RouterSite, RowOrder
from moe_replay.replay.topk import TopKInterceptor
from moe_replay.routes.topology import MoeTopology

AuxLoss = Literal["native", "replayed"]

CORE = "megatron.core."
ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
DECODER_LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
PREDICTION_LAYER = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer"
LANGUAGE_MODEL = "megatron.core.models.common.language_module.language_module.LanguageModule"
FIRST_WITH_REPLAY = (0, 16)

Modules = Mapping[str, Any]  # by name; nn.Module would not let its attributes be read


@dataclass(frozen=True, eq=False, slots=True)
class MegatronModel:
    """What this rank holds of a Megatron-Core model.

    chunks        in the order they were given
    topology      the routers of the whole model, on all ranks
    port          how its routers are driven
    rows          how it makes rows of its tokens
    native_sites  routers of multi-token prediction: no rollout has routes for them, so they choose by themselves
    """

    chunks: tuple[Chunk, ...]
    topology: MoeTopology
    port: PortKind
    rows: RowOrder
    native_sites: tuple[RouterSite, ...]


def is_megatron(models: Sequence[nn.Module]) -> bool:
    """Whether these are Megatron-Core models, wrapped or not."""
    return bool(models) and all(any(_is_a(module, CORE) for module in model.modules()) for model in models)


def find_chunks(
    models: Sequence[nn.Module], topology: MoeTopology | None = None, aux_loss: AuxLoss = "native"
) -> MegatronModel:
    """The pipeline chunks of this rank with their routers, by global decoder layer. Refuses what cannot be replayed."""
    inner = [_language_model(model) for model in models]
    config = inner[0].config
    version = megatron_version()
    check_settings(config)
    promised = topology or MoeTopology.from_config(config)
    chunks, native = [], []
    for model in inner:
        modules = dict(model.named_modules())
        sites = [_site(modules, name) for name, module in modules.items() if _is_a(module, ROUTER)]
        predicting = [site for site in sites if _enclosing(modules, site.name, PREDICTION_LAYER) is not None]
        chunk = Chunk((model,), tuple(site for site in sites if site not in predicting))
        _check_promise(promised, chunk, modules)
        chunks.append(chunk)
        native.extend(predicting)
    _check_each_layer_once(chunks)
    port: PortKind
    if version < FIRST_WITH_REPLAY:
        port = legacy_port(version, config, aux_loss)
    else:
        check_replay_enabled(config, [site for chunk in chunks for site in chunk.sites])
        port = ReplayedAuxLossPort if aux_loss == "replayed" else RouterPort
    return MegatronModel(tuple(chunks), promised, port, _row_order(config), tuple(native))


# ---- how a router is driven -----------------------------------------------------------------------------------------


class RouterPort:
    """Stands in for the replay object of one router; its methods are bound, so that a deep copy has its own."""

    def __init__(self, site: RouterSite, switch: Switch) -> None:
        self.site = site
        self.switch = switch
        self.router = cast(Any, site.module)
        self.native_replay = self.router.router_replay
        self.router.router_replay = self

    @staticmethod
    def is_on(module: Any) -> bool:
        """Whether a router has a port already."""
        return isinstance(module.router_replay, RouterPort)

    def remove(self) -> None:
        """Give the router its own replay object back."""
        self.router.router_replay = self.native_replay

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the router asks: scores (R, E) -> (their values (R, K), experts (R, K)), under the ticket in force."""
        ticket = self.switch.ticket
        if ticket is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        with_gradient = torch.is_grad_enabled()

        def own_choice() -> torch.Tensor:
            with torch.set_grad_enabled(with_gradient):  # 0.19 sorts the experts only where there are gradients
                return default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]

        choice = Choice(self.site, ticket.claim(self.site.layer))
        experts = choice.among(scores, own_choice)
        choice.keep()
        self.took(experts)
        return scores.gather(-1, experts), experts

    def took(self, experts: torch.Tensor) -> None:
        """The router takes these experts (R, K)."""


class ReplayedAuxLossPort(RouterPort):
    """Makes the load-balancing losses count the experts that were taken.

    The router chooses a second time for them, by a plain `topk`; that is the question which is answered here.
    """

    def __init__(self, site: RouterSite, switch: Switch) -> None:
        super().__init__(site, switch)
        self._taken: torch.Tensor | None = None
        self.native_routing = self.router.routing
        self.router.routing = self.routing

    def remove(self) -> None:
        """Give the router its own replay object and method back."""
        super().remove()
        del self.router.routing

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        """The router's own method, with its second question answered."""
        if self.switch.ticket is None:
            return self.native_routing(*args, **kwargs)
        try:
            with TopKInterceptor(self):
                return self.native_routing(*args, **kwargs)
        finally:
            self._taken = None

    def took(self, experts: torch.Tensor) -> None:
        self._taken = experts

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """After the first choice, every `topk` over the experts has its result."""
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if self._taken is None or (k, *scores.shape) != (self.site.top_k, len(self._taken), self.site.num_experts):
            return func(*args, **kwargs)
        return torch.return_types.topk((scores.gather(-1, self._taken), self._taken))


# ---- where the routers are ------------------------------------------------------------------------------------------


def _is_a(module: nn.Module, name: str) -> bool:
    """Whether a class along the MRO has this full name, or lies in this package where the name ends with a dot."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    return any(found == name or (name.endswith(".") and found.startswith(name)) for found in names)


def _language_model(model: nn.Module) -> Any:
    """The module whose forward is the forward of the chunk, inside DDP and Float16Module."""
    found = [module for module in model.modules() if _is_a(module, LANGUAGE_MODEL)]
    if len(found) != 1:
        raise UnsupportedRouterError(
            "a Megatron-Core chunk must hold one language model",
            expected=f"one {LANGUAGE_MODEL}",
            found=[type(module).__name__ for module in found] or type(model).__name__,
            remedy="Attach the language model itself rather than what is around it",
        )
    return found[0]


def _row_order(config: Any) -> RowOrder:
    from megatron.core import parallel_state

    # The dispatcher "alltoall_seq" of 0.12 and 0.13 gathers the scores of all shards before the choice.
    if not config.sequence_parallel or config.moe_token_dispatcher_type == "alltoall_seq":
        return RowOrder("sequence", (0, 1))
    return RowOrder("sequence", (parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size))


def _outwards(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _enclosing(modules: Modules, name: str, kind: str) -> Any:
    """The nearest module of a kind around the one of this name."""
    return next((modules[outer] for outer in _outwards(name) if _is_a(modules[outer], kind)), None)


def _site(modules: Modules, name: str) -> RouterSite:
    router = modules[name]
    layer = _enclosing(modules, name, DECODER_LAYER)
    number = None if layer is None else layer.layer_number
    if number is None or router.layer_number != number:
        raise UnsupportedRouterError(
            f"the router {name} does not say the number of the layer it stands in",
            expected=f"layer_number {number}, that of its {DECODER_LAYER.rpartition('.')[2]}",
            found=router.layer_number,
            remedy="Build the model with Megatron's own specs, so that every router is told its layer",
        )
    config = router.config
    return RouterSite(
        layer=number - 1,
        name=name,
        module=router,
        num_experts=config.num_moe_experts,
        top_k=router.topk,
        num_groups=config.moe_router_num_groups or 0 if config.moe_router_group_topk else 0,
        groups_kept=config.moe_router_group_topk or 0,
    )


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_promise(promised: MoeTopology, chunk: Chunk, modules: Modules) -> None:
    """A router that is missed is an error, never a layer that routes natively without anybody knowing."""
    present = {
        module.layer_number - 1
        for name, module in modules.items()
        if _is_a(module, DECODER_LAYER) and _enclosing(modules, name, PREDICTION_LAYER) is None
    }
    expected = [moe for moe in promised.moe_layers if moe.layer in present]
    found = MoeTopology.from_sites(chunk.sites, promised.num_layers).moe_layers if chunk.sites else ()
    if tuple(expected) != found:
        raise UnsupportedRouterError(
            "the routers of a chunk are not those that its config promises",
            expected=f"(layer, experts, top_k) {[(m.layer, m.num_experts, m.top_k) for m in expected]}",
            found=[(m.layer, m.num_experts, m.top_k) for m in found],
            remedy="moe_layer_freq and the layer spec must agree; or pass topology=MoeTopology(...)",
        )


def _check_each_layer_once(chunks: Sequence[Chunk]) -> None:
    layers = [layer for chunk in chunks for layer in chunk.layers]
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise UnsupportedRouterError(
            "two chunks of one rank hold the same decoder layer",
            layer=", ".join(map(str, twice)),
            expected="each layer once",
            found=[chunk.layers for chunk in chunks],
            remedy="Give attach() the chunks of one model, each built with its own vp_stage",
        )
