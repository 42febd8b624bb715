"""The gates of every Transformers family, told a second time.

The formulas are written by hand in float64, from the router's input, its current weights and the replayed experts. They
call no code of a model. Where a family stands in the table says what it is (R rows, E columns, K experts of a row):

    softmax over all experts, then the chosen ones, renormalised or not      mixtral, qwen, olmoe, deepseek_v2, ...
    softmax over the chosen experts                                          gpt_oss, granitemoe, ...
    sigmoid (or sqrt-softplus) of the chosen ones, renormalised or not       deepseek_v3, glm, minimax_m2, ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_replay.replay.site import RouterSite
from tests.replay.adapters.families import RELEASE

Config = Any
Parameters = tuple[Tensor, ...]
Formula = partial[Tensor]
FormulaOf = Callable[[Config, Parameters], Formula]

# ---- formulas: logits (R, E), experts (R, K) -> gates (R, K) --------------------------------------------------------


def softmax_kept(logits: Tensor, experts: Tensor, scale: float = 1.0) -> Tensor:
    return scale * _softmax(logits).gather(-1, experts)


def softmax_renormalised(logits: Tensor, experts: Tensor, eps: float = 0.0, scale: float = 1.0) -> Tensor:
    kept = softmax_kept(logits, experts)
    return scale * kept / (kept.sum(-1, keepdim=True) + eps)


def softmax_floored(logits: Tensor, experts: Tensor, floor: float) -> Tensor:
    """Renormalised by their sum, or by `floor` where the sum is less."""
    kept = softmax_kept(logits, experts)
    return kept / kept.sum(-1, keepdim=True).clamp(min=floor)


def softmax_by_norm(logits: Tensor, experts: Tensor, p: float) -> Tensor:
    """Divided by their Lp norm."""
    kept = softmax_kept(logits, experts)
    return kept / kept.pow(p).sum(-1, keepdim=True).pow(1 / p)


def softmax_times_expert_scale(logits: Tensor, experts: Tensor, expert_scale: Tensor) -> Tensor:
    return softmax_renormalised(logits, experts) * expert_scale[experts]


def softmax_or_skipped(logits: Tensor, experts: Tensor, skip: int) -> Tensor:
    """Expert `skip` is none: its gate is zero."""
    return softmax_kept(logits, experts) * (experts != skip)


def softmax_of_chosen(logits: Tensor, experts: Tensor, scale: float = 1.0) -> Tensor:
    return scale * _softmax(logits.gather(-1, experts))


def sigmoid_kept(logits: Tensor, experts: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    return scale / (1 + (-logits.gather(-1, experts)).exp())


def sigmoid_renormalised(logits: Tensor, experts: Tensor, eps: float = 0.0, scale: float | Tensor = 1.0) -> Tensor:
    kept = sigmoid_kept(logits, experts)
    return scale * kept / (kept.sum(-1, keepdim=True) + eps)


def sqrt_softplus_renormalised(logits: Tensor, experts: Tensor, scale: float = 1.0) -> Tensor:
    kept = logits.gather(-1, experts).exp().log1p().sqrt()
    return scale * kept / kept.sum(-1, keepdim=True)


def _softmax(logits: Tensor) -> Tensor:
    powers = (logits - logits.amax(-1, keepdim=True).detach()).exp()
    return powers / powers.sum(-1, keepdim=True)


SPREADING = (softmax_kept, softmax_or_skipped)
"""Formulas whose denominator holds every logit, so that experts which were not chosen get a gradient as well."""

# ---- logits: router input (R, H) -> (R, E) --------------------------------------------------------------------------


def linear(config: Config, parameters: Parameters, hidden: Tensor) -> Tensor:
    return hidden @ parameters[0].T


def linear_with_bias(config: Config, parameters: Parameters, hidden: Tensor) -> Tensor:
    return hidden @ parameters[0].T + parameters[1]


def _linear_of_norm(config: Config, parameters: Parameters, hidden: Tensor) -> Tensor:
    """gemma4: projects the root-mean-square norm of its input, times a learned scale."""
    weight, scale, _ = parameters
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    return (normed * scale / config.hidden_size**0.5) @ weight.T


def _soft_capped(config: Config, parameters: Parameters, hidden: Tensor) -> Tensor:
    logits, cap = linear(config, parameters, hidden), config.moe_router_logit_softcapping
    return cap * torch.tanh(logits / cap) if cap else logits


def _multiplied(config: Config, parameters: Parameters, hidden: Tensor) -> Tensor:
    return linear(config, parameters, hidden) * config.output_multiplier


# ---- which family has which -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """How a family makes its gates.

    formula     with the settings of a config and the learned parameters filled in
    parameters  what of the router the gates are made from, by name; the first has one row for each logit
    logits      from the router's input
    input_of    the submodule whose input is projected; "" for the router itself
    shared      shared experts that have a logit and a gate beside the routed ones
    """

    formula: FormulaOf
    parameters: tuple[str, ...] = ("weight",)
    logits: Callable[[Config, Parameters, Tensor], Tensor] = linear
    input_of: str = ""
    shared: Callable[[Config], int] = lambda config: 0


def _qwen(config: Config, parameters: Parameters) -> Formula:
    return partial(softmax_renormalised if config.norm_topk_prob else softmax_kept)


def _deepseek_v2(config: Config, parameters: Parameters) -> Formula:
    return partial(softmax_kept, scale=config.routed_scaling_factor)


def _scaled(kept: Callable[..., Tensor], renormalised: Callable[..., Tensor], eps: float) -> FormulaOf:
    """Scaled by `routed_scaling_factor`, renormalised by `norm_topk_prob`."""

    def formula(config: Config, parameters: Parameters) -> Formula:
        scale = config.routed_scaling_factor
        return partial(renormalised, eps=eps, scale=scale) if config.norm_topk_prob else partial(kept, scale=scale)

    return formula


def _sigmoid_by_setting(config: Config, parameters: Parameters) -> Formula:
    return partial(sigmoid_renormalised if config.norm_topk_prob else sigmoid_kept)


def _deepseek_v4(config: Config, parameters: Parameters) -> Formula:
    known = {"sqrtsoftplus": sqrt_softplus_renormalised, "sigmoid": sigmoid_renormalised}
    return partial(known[config.scoring_func], scale=config.routed_scaling_factor)


def _cohere2(config: Config, parameters: Parameters) -> Formula:
    if config.expert_selection_fn == "softmax":
        return partial(softmax_of_chosen)
    return _sigmoid_by_setting(config, parameters)


def _dbrx(config: Config, parameters: Parameters) -> Formula:
    p = config.ffn_config.moe_normalize_expert_weights
    return partial(softmax_kept) if p is None else partial(softmax_by_norm, p=p)


QWEN = Gate(_qwen)
DEEPSEEK_V2 = Gate(_deepseek_v2)
DEEPSEEK_V3 = Gate(_scaled(sigmoid_kept, sigmoid_renormalised, eps=1e-20))
RENORMALISED = Gate(lambda config, parameters: partial(softmax_renormalised))
OF_CHOSEN = Gate(lambda config, parameters: partial(softmax_of_chosen))
SIGMOID = Gate(lambda config, parameters: partial(sigmoid_renormalised))
SIGMOID_BY_SETTING = Gate(_sigmoid_by_setting)
GRANITE = OF_CHOSEN if RELEASE >= 5 else Gate(OF_CHOSEN.formula, ("layer.weight",))

GATES: dict[str, Gate] = {
    "afmoe": Gate(lambda c, p: partial(sigmoid_renormalised, eps=1e-20, scale=c.route_scale), ("gate.weight",)),
    "aria_text": OF_CHOSEN,
    "axk1": DEEPSEEK_V3,
    "axk2": DEEPSEEK_V3,
    "bailing_hybrid": DEEPSEEK_V3,
    "beam": SIGMOID_BY_SETTING,  # scaled after the experts
    "cohere2_moe": Gate(_cohere2),
    "dbrx": Gate(_dbrx, ("router.layer.weight" if RELEASE >= 5 else "layer.weight",)),
    "deepseek_ocr2_text": DEEPSEEK_V2,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3,
    "deepseek_v4": Gate(_deepseek_v4),  # renormalised whatever norm_topk_prob says
    "dots1": DEEPSEEK_V3,
    "ernie4_5_moe": Gate(lambda c, p: partial(softmax_floored, floor=c.moe_norm_min)),
    "exaone_moe": DEEPSEEK_V3,
    "flex_olmo": QWEN,
    "flint": SIGMOID_BY_SETTING,
    "gemma4_text": Gate(
        lambda c, p: partial(softmax_times_expert_scale, expert_scale=p[2]),
        ("proj.weight", "scale", "per_expert_scale"),
        _linear_of_norm,
    ),
    "glm4_moe": DEEPSEEK_V3,
    "glm4_moe_lite": DEEPSEEK_V3,
    "glm4v_moe_text": DEEPSEEK_V3,
    "glm5_next_text": DEEPSEEK_V3,
    "glm_moe_dsa": DEEPSEEK_V3,
    "gpt_oss": Gate(OF_CHOSEN.formula, ("weight", "bias"), linear_with_bias),
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": GRANITE,
    "granitemoeshared": GRANITE,
    "hunyuan_v1_moe": Gate(RENORMALISED.formula, ("wg.weight",)),
    "hy_v3": Gate(lambda c, p: partial(sigmoid_renormalised, eps=1e-20, scale=c.router_scaling_factor)),
    "hy_v4": DEEPSEEK_V3,
    "inkling2_text": Gate(lambda c, p: partial(sigmoid_renormalised, eps=1e-20, scale=c.routed_scaling_factor)),
    "inkling_text": Gate(
        lambda c, p: partial(sigmoid_renormalised, scale=c.route_scale * p[1]),  # routed and shared experts together
        ("weight", "global_scale"),
        shared=lambda config: config.n_shared_experts,
    ),
    "jamba": Gate(lambda c, p: partial(softmax_kept)),
    "jetmoe": Gate(OF_CHOSEN.formula, ("layer.weight",)),
    "kimi_linear": DEEPSEEK_V3,
    "kolibri1": SIGMOID_BY_SETTING,  # chooses by logit + bias, not by score + bias
    "laguna": Gate(SIGMOID.formula, logits=_soft_capped),  # scaled after the experts
    "lfm2_moe": Gate(_scaled(sigmoid_kept, sigmoid_renormalised, eps=1e-6)),
    "llama4_text": Gate(lambda c, p: partial(sigmoid_kept)),  # scales the input of the experts
    "longcat_flash": Gate(_deepseek_v2, ("classifier.weight",)),
    "mellum": QWEN,
    "mimo_v2_flash": DEEPSEEK_V3,
    "minimax": RENORMALISED,
    "minimax_m2": SIGMOID,
    "minimax_m3_vl_text": SIGMOID,  # scaled after the experts
    "mistral4": Gate(_scaled(softmax_kept, softmax_renormalised, eps=1e-20)),
    "mistral_large4_text": Gate(lambda c, p: partial(softmax_renormalised, eps=1e-20, scale=c.routed_scaling_factor)),
    "mixtral": RENORMALISED,
    "muse_spark_text": Gate(
        lambda c, p: partial(sigmoid_renormalised, eps=1e-15, scale=c.routed_scaling_factor), logits=_multiplied
    ),
    "nemotron_h": DEEPSEEK_V3,
    "olmoe": QWEN,
    "openai_privacy_filter": Gate(
        lambda c, p: partial(softmax_of_chosen, scale=1 / c.num_experts_per_tok), ("weight", "bias"), linear_with_bias
    ),
    "qwen2_moe": QWEN,
    "qwen3_5_moe_text": RENORMALISED,
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_omni_moe_text": QWEN,
    "qwen3_vl_moe_text": RENORMALISED,
    "qwen4_exp_text": QWEN,
    "solar_open": DEEPSEEK_V3,
    "step3p5": SIGMOID,  # scaled after the experts
    "unlimited_ocr_text": DEEPSEEK_V2,
    # Its router is a network of three layers; only the last one is told again, from what the others give it.
    "zaya": Gate(
        lambda c, p: partial(softmax_or_skipped, skip=c.num_experts),
        ("router_mlp.out_proj.weight",),
        input_of="router_mlp.out_proj",
    ),
}

# ---- what a router should hand out ----------------------------------------------------------------------------------


@dataclass
class Expected:
    """gates (R, E) in float64, made from `parameters` (name -> float64 leaf) by a formula that `spreads` or not."""

    gates: Tensor
    parameters: dict[str, Tensor]
    formula: Formula

    @property
    def spreads(self) -> bool:
        return self.formula.func in SPREADING


def expected_gates(model_type: str, hidden: Tensor, experts: Tensor, site: RouterSite, config: Config) -> Expected:
    """The gates of the experts (R, K) by the family's formula, for a router whose projection is given hidden (R, H)."""
    gate = GATES[model_type]
    values = {name: site.module.get_parameter(name).detach().double().requires_grad_() for name in gate.parameters}
    parameters = tuple(values.values())
    logits = gate.logits(config, parameters, hidden.double())
    shared = torch.arange(site.num_experts, site.num_experts + gate.shared(config)).expand(len(experts), -1)
    chosen = torch.cat([experts, shared], -1)
    formula = gate.formula(config, parameters)
    return Expected(torch.zeros_like(logits).scatter(-1, chosen, formula(logits, chosen)), values, formula)
