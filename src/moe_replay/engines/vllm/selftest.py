"""Self-test of route capture in a loaded model: the routes of a prompt against what the model's routers computed.

For releases of vLLM that are newer than those tested, and with capture "checked". In the worker, `RouterWatch` reads
the outputs of the routers' own linear layers by forward hooks and chooses experts from them: nothing that the capture
hooks is involved, and layers are numbered by the names of the modules. In the engine, `check_routes` compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_replay.errors import EngineError, EngineName
from moe_replay.routes.topology import MoeTopology

PROMPT_TOKENS = 48
AGREEMENT = 0.9
"""Least fraction of choices in which recorded routes and routers agree, in every layer."""
_ROUTER = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:.*\.)?(?:gate|router)(?:\.base_layer)?")
_REMEDY = "Use a tested vLLM: {install}; or report this with the model and the version"


def prompt_ids(tokens: int, vocabulary: int, seed: int) -> list[int]:
    """Return a prompt that no cached prefix holds."""
    return np.random.default_rng([seed, tokens]).integers(0, vocabulary, tokens).tolist()


def prompt_tokens(vllm_config: Any, max_length: int) -> int:
    """Return how long the prompt must be: CUDA graphs run no hooks, so longer than the largest of them."""
    graphs = vllm_config.compilation_config
    sizes = [*(getattr(graphs, "cudagraph_capture_sizes", None) or ()), 0]
    used = getattr(getattr(graphs, "cudagraph_mode", None), "name", "NONE") != "NONE"
    return min(max(PROMPT_TOKENS, max(sizes) + 1 if used else 0), max_length - 1)


# ---- in the worker ---------------------------------------------------------------------------------------------------


class RouterWatch:
    """Records what the routers of a model compute, until `stop`; the model runs uncompiled meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self._outputs: dict[int, list[Tensor]] = {}
        self._biases: dict[int, Tensor] = {}
        self._compiled: list[Any] = []
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if getattr(module, "do_not_compile", True) is False:
                module.do_not_compile = True  # type: ignore[assignment]
                self._compiled.append(module)
            match = _ROUTER.fullmatch(name)
            if match is not None and not name.endswith(".base_layer"):
                self._watch(module, int(match["layer"]))

    def _watch(self, module: nn.Module, layer: int) -> None:
        bias = getattr(module, "e_score_correction_bias", None)
        if isinstance(bias, Tensor):
            self._biases[layer] = bias

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            if isinstance(logits, Tensor) and logits.dim() >= 2:
                self._outputs.setdefault(layer, []).append(logits.detach().flatten(0, -2).float().clone())

        self._hooks.append(module.register_forward_hook(keep))

    def stop(self) -> None:
        """Remove the hooks, and run the model compiled again if it was."""
        for hook in self._hooks:
            hook.remove()
        for module in self._compiled:
            module.do_not_compile = False

    def chosen(self, settings: Mapping[int, tuple[int, int, int, int]], tokens: int) -> dict[int, list[list[int]]]:
        """Return the experts that the routers chose for the first tokens, by layer.

        settings   layer -> experts, top-k, groups of experts and how many of them are kept (1 and 1: no groups)
        """
        chosen = {}
        for layer, outputs in self._outputs.items():
            experts, top_k, groups, kept = settings.get(layer, (0, 0, 1, 1))
            logits = torch.cat([output for output in outputs if output.shape[-1] == experts] or [torch.zeros(0, 1)])
            if len(logits) >= tokens:
                scores = choice_scores(logits[:tokens], self._biases.get(layer), groups, kept)
                chosen[layer] = scores.topk(top_k, dim=-1).indices.tolist()
        return chosen


def choice_scores(logits: Tensor, bias: Tensor | None, groups: int, kept: int) -> Tensor:
    """(T, E): scores whose top-k are the chosen experts; experts of groups that are not kept have -inf."""
    scores = logits if bias is None else logits.sigmoid() + bias.to(logits.device, torch.float32)
    if groups <= 1:
        return scores
    by_group = scores.unflatten(-1, (groups, -1))
    group_scores = by_group.amax(-1) if bias is None else by_group.topk(2, dim=-1).values.sum(-1)
    keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, group_scores.topk(kept, dim=-1).indices, True)
    return by_group.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(1)


def unhooked_layers(model: nn.Module) -> list[str]:
    """Return the MoE layers whose router holds no callback of a capture, by name."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    unhooked = []
    for name, module in model.named_modules():
        if isinstance(module, MoERunner):
            holders = (module, getattr(module, "router", None), getattr(module, "routed_experts", None))
            names = ("capture_fn", "routing_sink", "routing_replay_capture_fn")
            if all(getattr(holder, attribute, None) is None for holder in holders for attribute in names):
                unhooked.append(name)
    return unhooked


# ---- in the engine ---------------------------------------------------------------------------------------------------


def router_settings(topology: MoeTopology, config: Any) -> str:
    """Return the settings of each layer for the workers, as JSON."""
    groups, kept = int(getattr(config, "n_group", None) or 1), int(getattr(config, "topk_group", None) or 1)
    return json.dumps({moe.layer: [moe.num_experts, moe.top_k, groups, kept] for moe in topology.moe_layers})


def check_routes(
    engine: EngineName,
    routed_experts: np.ndarray | None,
    reference: Mapping[int, np.ndarray],
    topology: MoeTopology,
    unhooked: list[str],
    install: str,
) -> None:
    """Raise unless the recorded routes of a prompt are those that the routers chose; the error names the part.

    routed_experts   (T, decoder layers, K)
    reference        layer -> (T, K), chosen by the routers
    unhooked         MoE layers of vLLM that hold no callback
    """
    remedy = _REMEDY.format(install=install)
    layers = [layer for layer in topology.layers if layer < topology.num_layers]
    unseen = [layer for layer in layers if layer not in reference]
    if unseen:
        raise EngineError(
            f"self-test of {engine}: the outputs of the routers cannot be read, so the capture cannot be checked",
            found=f"nothing of layers {_some(unseen)}: other module names, compiled code or a CUDA graph",
            remedy=f"Start once with enforce_eager=True. {remedy}",
        )
    tokens = len(next(iter(reference.values())))
    if routed_experts is None or routed_experts.ndim != 3 or len(routed_experts) < tokens:
        shape = "no routes" if routed_experts is None else f"shape {routed_experts.shape}"
        raise EngineError(
            f"self-test of {engine}: routes do not cover the prompt",
            expected=f"{tokens} tokens, {topology.num_layers} layers",
            found=shape,
            remedy=remedy,
        )
    recorded = {layer: routed_experts[:tokens, layer] for layer in layers if layer < routed_experts.shape[1]}
    agreements = {layer: agreement(recorded[layer], reference[layer]) if layer in recorded else 0.0 for layer in layers}
    disagreeing = {layer: share for layer, share in agreements.items() if share < AGREEMENT}
    if disagreeing:
        raise EngineError(
            f"self-test of {engine}: recorded routes are not those of the model's routers: "
            f"{_cause(recorded, reference, disagreeing, unhooked)}",
            expected=f"at least {AGREEMENT:.0%} of choices equal in every layer",
            found=", ".join(f"layer {layer} {share:.0%}" for layer, share in list(disagreeing.items())[:4]),
            remedy=remedy,
        )


def agreement(recorded: np.ndarray, reference: np.ndarray) -> float:
    """Return which fraction of the reference (T, K) was recorded, in any order."""
    return float((reference[:, :, None] == recorded[:, None, :].astype(np.int64)).any(-1).mean())


def _cause(
    recorded: Mapping[int, np.ndarray],
    reference: Mapping[int, np.ndarray],
    disagreeing: Mapping[int, float],
    unhooked: list[str],
) -> str:
    """Return what explains the routes of the wrong layers: no hook, other layers, or other tokens."""
    zero = [layer for layer in disagreeing if layer not in recorded or not recorded[layer].any()]
    filled = [layer for layer in disagreeing if layer not in zero]
    moved = {}
    for layer in filled:
        best = max(reference, key=lambda candidate: agreement(recorded[layer], reference[candidate]))
        if agreement(recorded[layer], reference[best]) >= AGREEMENT:
            moved[layer] = best
    if moved:
        pairs = ", ".join(
            f"layer {layer} holds those of layer {candidate}" for layer, candidate in list(moved.items())[:3]
        )
        return f"another layer order ({pairs})"
    if zero:
        hook = (
            f"the hook is missing or has another name, no callback in {_some(unhooked)}"
            if unhooked
            else "the hook is there and is not called, so vLLM routes elsewhere, as in a fused kernel"
        )
        return f"all of layers {_some(zero)} are zero: {hook}"
    for name, rows in (("early", (slice(None, -1), slice(1, None))), ("late", (slice(1, None), slice(None, -1)))):
        if all(agreement(recorded[layer][rows[0]], reference[layer][rows[1]]) >= AGREEMENT for layer in filled):
            return f"another token order (rows {name} by one)"
    return "neither another layer nor a neighbouring token explains them"


def _some(names: list[Any]) -> str:
    return ", ".join(str(name) for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
