"""The routers of Megatron-Core chunks and the hooks that drive them.

From 0.16 on a router calls its `router.router_replay` object to choose experts. A `MegatronHook` in its place is all
that replay needs: nothing of Megatron is patched, and its process-wide list of replay objects is never used. Without
Transformer Engine, a name that routers read and Megatron never sets is set (`bind_missing_gemm`). Versions before 0.16
have no replay object: the result of their `topk` is replaced (`LegacyHook`).

Nothing here imports Megatron: its classes are recognised by name, so that an attached model may be wrapped or
subclassed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.active import ActivePass, RouterHook
from moe_replay.replay.adapters.megatron_settings import (
    bind_missing_gemm,
    check_replay_enabled,
    check_settings,
    megatron_version,
)
from moe_replay.replay.site import Chunk, RouterSite, boundary_modules, outwards
from moe_replay.replay.topk import Choice, Native, RouterCall, TopKHandler, TopKHook, TopKInterceptor, log_of
from moe_replay.routes.layout import RowOrder
from moe_replay.routes.topology import MoeLayer, MoeTopology

AuxLoss = Literal["native", "replayed"]

CORE = "megatron.core."
ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
DECODER_LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
PREDICTION_LAYER = "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer"
LANGUAGE_MODEL = "megatron.core.models.common.language_module.language_module.LanguageModule"
FIRST_WITH_REPLAY = (0, 16)

Modules = Mapping[str, Any]  # by name; nn.Module would not let its attributes be read


class MegatronModel(NamedTuple):
    """This rank's part of a Megatron-Core model."""

    chunks: tuple[Chunk, ...]  # in the order they were given
    topology: MoeTopology  # the routers of the whole model, on all ranks
    hook: type[RouterHook]  # of its routers
    rows: RowOrder  # how it flattens tokens into rows
    # routers of multi-token prediction: no rollout has routes for them, so they always route natively
    native_sites: tuple[RouterSite, ...]


def is_megatron(models: Sequence[nn.Module]) -> bool:
    """Return whether these are Megatron-Core models, wrapped or not."""
    return bool(models) and all(any(_is_a(module, CORE) for module in model.modules()) for model in models)


def find_chunks(
    models: Sequence[nn.Module], topology: MoeTopology | None = None, aux_loss: AuxLoss = "native"
) -> MegatronModel:
    """Return this rank's chunks with their routers by global decoder layer; refuse what cannot be replayed."""
    inner = [language_model(model) for model in models]
    config = inner[0].config
    version = megatron_version()
    bind_missing_gemm()
    check_settings(config)
    declared = topology or _declared(inner[0])
    chunks, native = [], []
    for model in inner:
        modules = dict(model.named_modules())
        sites = [_site(modules, name) for name, module in modules.items() if _is_a(module, ROUTER)]
        predicting = [site for site in sites if _enclosing(modules, site.name, PREDICTION_LAYER) is not None]
        decoder_sites = tuple(site for site in sites if site not in predicting)
        predicting = [replace(site, layer=_prediction_index(modules, site, declared.num_layers)) for site in predicting]
        chunk = Chunk((model,), decoder_sites, boundary_modules(model, decoder_sites))
        _check_topology(declared, chunk, modules)
        chunks.append(chunk)
        native.extend(predicting)
    _check_each_layer_once(chunks)
    hook: type[RouterHook]
    if version < FIRST_WITH_REPLAY:
        hook = legacy_hook(version, config, aux_loss)
    else:
        check_replay_enabled(config, [site for chunk in chunks for site in chunk.sites])
        hook = ReplayedAuxLossHook if aux_loss == "replayed" else MegatronHook
    return MegatronModel(tuple(chunks), declared, hook, _row_order(config), tuple(native))


# ---- hooks of routers -----------------------------------------------------------------------------------------------


class MegatronHook(RouterHook):
    """Replaces the replay object of one router."""

    def __init__(self, site: RouterSite, active: ActivePass) -> None:
        self.router = cast(Any, site.module)
        self.native_replay = self.router.router_replay
        late_gates = "with an expert bias Megatron-Core reads them after the choice of experts"
        super().__init__(site, active, late_gates if self.router.enable_expert_bias else None)

    @staticmethod
    def is_installed(module: Any) -> bool:
        return isinstance(module.router_replay, MegatronHook)

    def install(self) -> None:
        if not self.is_installed(self.router):
            self.router.router_replay = self

    def remove(self) -> None:
        if self.router.router_replay is self:
            self.router.router_replay = self.native_replay

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the router's experts under the active pass: scores (R, E) -> (values (R, K), experts (R, K))."""
        forward_pass = self.active.for_router()
        if forward_pass is None:
            self.put_plan(None)
            return default_compute_topk(scores, topk, num_groups, group_topk)
        with_gradient = torch.is_grad_enabled()

        def native_choice() -> torch.Tensor:
            with torch.set_grad_enabled(with_gradient):  # 0.19 sorts the experts only where there are gradients
                return default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]

        routes = forward_pass.claim(self.site.layer)
        self.put_plan(routes.plan)
        choice = Choice(self.site, routes)
        routed_experts = choice.select(scores, native_choice, lambda: self._log_weights(scores))
        values = choice.gate_scores(scores.gather(-1, routed_experts))
        choice.store()
        self.on_choice(routed_experts)
        return values, routed_experts

    def _log_weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (R, E) the logarithm of routing weights, of the scores that the router chooses by."""
        if self.router.score_function == "sigmoid":
            return log_of(scores if self.router.expert_bias is None else scores - self.router.expert_bias)
        return log_of(scores if self.router.config.moe_router_pre_softmax else scores.softmax(-1))

    def on_choice(self, routed_experts: torch.Tensor) -> None:
        """Receive the experts (R, K) that the router takes."""


class ReplayedAuxLossHook(TopKHandler, MegatronHook):
    """Makes the load-balancing losses count the experts that were taken.

    The router chooses a second time for them, by a plain `topk`, whose result is replaced here.
    """

    def __init__(self, site: RouterSite, active: ActivePass) -> None:
        self._routed_experts: torch.Tensor | None = None
        self.native_routing = cast(Any, site.module).routing
        super().__init__(site, active)

    def install(self) -> None:
        """Put this hook in place of the router's own replay object and method."""
        super().install()
        if self.router.router_replay is self:
            self.router.routing = self.routing

    def remove(self) -> None:
        if self.router.router_replay is self:
            del self.router.routing
        super().remove()

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router's own method with the result of its second `topk` replaced."""
        if self.active.for_router() is None:
            return self.native_routing(*args, **kwargs)
        try:
            with TopKInterceptor(self):
                return self.native_routing(*args, **kwargs)
        finally:
            self._routed_experts = None

    def on_choice(self, routed_experts: torch.Tensor) -> None:
        self._routed_experts = routed_experts

    def topk(self, native: Native, scores: torch.Tensor, k: int) -> Any:
        """Return the first choice for every later `topk` over the experts."""
        chosen, site = self._routed_experts, self.site
        if chosen is None or (k, *scores.shape) != (site.top_k, len(chosen), site.num_experts):
            return native()
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


# ---- finding the routers --------------------------------------------------------------------------------------------


def _is_a(module: nn.Module, name: str) -> bool:
    """Return whether a class in the MRO has this full name, or lies in this package where the name ends with a dot."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    return any(full == name or (name.endswith(".") and full.startswith(name)) for full in names)


def language_model(model: nn.Module) -> Any:
    """Return the module whose forward is the forward of the chunk, inside DDP and Float16Module."""
    models = list(_outermost(model))
    if len(models) != 1:
        raise UnsupportedRouterError(
            "a Megatron-Core chunk must hold one language model",
            expected=f"one {LANGUAGE_MODEL}",
            found=[type(module).__name__ for module in models] or type(model).__name__,
            remedy="Attach the language model itself rather than what is around it",
        )
    return models[0]


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the language models inside a module; what is inside of them is not searched."""
    if _is_a(module, LANGUAGE_MODEL):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _row_order(config: Any) -> RowOrder:
    from megatron.core import parallel_state

    # The dispatcher "alltoall_seq" of 0.12 and 0.13 gathers the scores of all shards before the choice.
    if not config.sequence_parallel or config.moe_token_dispatcher_type == "alltoall_seq":
        return RowOrder("sequence", (0, 1))
    return RowOrder("sequence", (parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size))


def _declared(model: Any) -> MoeTopology:
    """Return the routers that a model declares: in its config, or in the pattern of a hybrid model (M*E-)."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the latter before 0.17
    pattern = next((value for name in names if (value := getattr(model, name, None))), None)
    if pattern is None:
        return MoeTopology.from_config(model.config)
    kinds = pattern.partition("/")[0].replace("|", "")  # what follows is of multi-token prediction
    experts, top_k = model.config.num_moe_experts, model.config.moe_router_topk
    moe_layers = tuple(MoeLayer(layer, experts, top_k) for layer, kind in enumerate(kinds) if kind == "E")
    return MoeTopology(len(kinds), moe_layers, "megatron")


def _prediction_index(modules: Modules, site: RouterSite, num_layers: int) -> int:
    """Return the decoder index of a layer of multi-token prediction. They follow the decoder's layers, whatever
    number their version gives them: 0.16 continues counting, 0.19 starts again."""
    outer = next(name for name in outwards(site.name) if _is_a(modules[name], PREDICTION_LAYER))
    depth, inside = modules[outer].layer_number - 1, site.name[len(outer) + 1 :].split(".")
    position = next((i for i, part in enumerate(inside) if part.isdigit()), None)
    if position is None:
        return num_layers + depth
    layers = modules[".".join([outer, *inside[:position]])]
    return num_layers + depth * len(layers) + int(inside[position])


def _enclosing(modules: Modules, name: str, kind: str) -> Any:
    return next((modules[outer] for outer in outwards(name) if _is_a(modules[outer], kind)), None)


def _site(modules: Modules, name: str) -> RouterSite:
    router = modules[name]
    layer = _enclosing(modules, name, DECODER_LAYER)
    number = None if layer is None else layer.layer_number
    if number is None or router.layer_number != number:
        raise UnsupportedRouterError(
            f"the router {name} has another layer number than the layer it is in",
            expected=f"layer_number {number}, that of its {DECODER_LAYER.rpartition('.')[2]}",
            found=router.layer_number,
            remedy="Build the model with Megatron's own specs, so that every router knows its layer",
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


def _check_topology(declared: MoeTopology, chunk: Chunk, modules: Modules) -> None:
    """Raise unless the routers found are those of the config: a missed one would route natively, silently."""
    present = {
        module.layer_number - 1
        for name, module in modules.items()
        if _is_a(module, DECODER_LAYER) and _enclosing(modules, name, PREDICTION_LAYER) is None
    }
    expected = [moe for moe in declared.moe_layers if moe.layer in present]
    actual = MoeTopology.from_sites(chunk.sites, declared.num_layers).moe_layers if chunk.sites else ()
    if tuple(expected) != actual:
        raise UnsupportedRouterError(
            "the routers of a chunk are not those that its config declares",
            expected=f"(layer, experts, top_k) {[(m.layer, m.num_experts, m.top_k) for m in expected]}",
            found=[(m.layer, m.num_experts, m.top_k) for m in actual],
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


# ---- Megatron-Core 0.12 to 0.15: no replay object, so the result of `topk` is replaced -------------------------------

FIRST_WITH_TWO_CHOICES = (0, 14)  # since then the router chooses a second time for its load-balancing losses


def legacy_hook(version: tuple[int, int], config: Any, aux_loss: AuxLoss) -> type[RouterHook]:
    if aux_loss == "replayed":
        return ReplayedAuxLossLegacyHook
    has_aux_loss = config.moe_router_load_balancing_type != "none" and config.moe_aux_loss_coeff
    if version < FIRST_WITH_TWO_CHOICES and has_aux_loss:
        raise UnsupportedRouterError(
            f"the load-balancing loss of Megatron-Core {version[0]}.{version[1]} counts the experts that were taken",
            expected="aux_loss='replayed'",
            found="aux_loss='native', the default",
            remedy="Call attach(model, aux_loss='replayed'), or set moe_aux_loss_coeff=0",
        )
    return LegacyHook


class ReplayedAuxLossCall(RouterCall):
    """Replaces the result of every `topk` over the experts: for the dispatch, and for the load-balancing losses."""

    def topk(self, native: Native, scores: torch.Tensor, k: int) -> Any:
        """Return the choice of the first call for every later one.

        Scores inside groups have three dimensions: that `topk` chooses groups, never experts.
        """
        routed_experts = self.choice.routed_experts
        if scores.dim() != 2:
            return native()
        if routed_experts is not None and scores.shape[-1] == self.site.num_experts:
            return torch.return_types.topk((scores.gather(-1, routed_experts), routed_experts))
        return super().topk(native, scores, k)


class NativeAuxLossCall(ReplayedAuxLossCall):
    """Replaces the result of the first `topk` over the experts alone: the dispatch."""

    def topk(self, native: Native, scores: torch.Tensor, k: int) -> Any:
        """Leave every call after the choice to the load-balancing losses."""
        return native() if self.choice.routed_experts is not None else super().topk(native, scores, k)


class LegacyHook(TopKHook):
    """Hook of an old router; its load-balancing losses count its own choice."""

    call_type = NativeAuxLossCall


class ReplayedAuxLossLegacyHook(TopKHook):
    """Hook of an old router; its load-balancing losses count the experts taken."""

    call_type = ReplayedAuxLossCall
