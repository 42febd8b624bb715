"""Megatron-Core's config: settings under which routes cannot be replayed, and the layout of its rows."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.site import RouterSite
from moe_replay.routes.layout import TokenLayout
from moe_replay.utils.tested_versions import TESTED, notice_if_newer

KNOWN_FROM = TESTED["megatron-core"][0]
TOP_K_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
GRAPH_SCOPES_WITHOUT_ROUTERS = {"attn", "mlp", "mamba"}  # scopes of CUDA graphs that a router is never part of


class Refusal(NamedTuple):
    """A setting that is incompatible with replay."""

    setting: str  # its name in the config
    reason: str  # its effect on the routes
    remedy: str = ""  # what to set instead; "": switch it off
    applies: Callable[[Any], bool] | None = None  # whether a config has it on; None: where it is true


def megatron_version() -> tuple[int, int]:
    """Return (major, minor) of the Megatron-Core that is loaded."""
    text = getattr(sys.modules.get("megatron.core"), "__version__", None)
    numbers = re.match(r"(\d+)\.(\d+)", text or "")
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    if version is None or version < KNOWN_FROM:
        raise UnsupportedRouterError(
            "unknown version of Megatron-Core",
            expected="megatron.core.__version__ of at least 0.12",
            found=text,
            remedy="0.12 to 0.15 are driven at their topk, newer ones through router.router_replay",
        )
    notice_if_newer("megatron-core", text)
    return version


def check_settings(config: Any) -> None:
    """Raise for the first setting that makes replay wrong or impossible."""
    for refusal in REFUSALS:
        value = getattr(config, refusal.setting, None)  # a setting unknown to a version is off
        if value if refusal.applies is None else refusal.applies(config):
            raise UnsupportedRouterError(
                f"{refusal.setting} cannot be replayed: {refusal.reason}",
                found=f"{refusal.setting}={value!r}",
                remedy=refusal.remedy or f"Set {refusal.setting}=False",
            )


def check_replay_enabled(config: Any, sites: Sequence[RouterSite]) -> None:
    """Raise unless every router has the replay object through which it can be driven."""
    for site in sites:
        replay = getattr(site.module, "router_replay", None)
        if not callable(getattr(replay, "get_replay_topk", None)):
            raise UnsupportedRouterError(
                f"the router {site} has no replay object",
                layer=site.layer,
                expected="router.router_replay with get_replay_topk, as in Megatron-Core 0.16",
                found=f"{type(replay).__name__}, moe_enable_routing_replay="
                f"{getattr(config, 'moe_enable_routing_replay', 'unknown to this version')}",
                remedy="Build the model with moe_enable_routing_replay=True in its TransformerConfig",
            )


def _has_old_graphs(setting: str) -> Callable[[Any], bool]:
    """Whether a setting of CUDA graphs is on in a version without `cuda_graph_impl`."""
    return lambda config: getattr(config, setting, False) and not hasattr(config, "cuda_graph_impl")


def balancing_kinds(config: Any) -> set[str]:
    """Return how the routers of a model balance their experts."""
    kinds = config.moe_router_load_balancing_type
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _captures_routers(config: Any) -> bool:
    if getattr(config, "cuda_graph_impl", "none") == "none":
        return False
    scopes = getattr(config, "cuda_graph_scope", None) or ["full"]
    names = {getattr(scope, "name", scope) for scope in ([scopes] if isinstance(scopes, str) else scopes)}
    return not names <= GRAPH_SCOPES_WITHOUT_ROUTERS


def _mixes_p2p_directions(config: Any) -> bool:
    interleaved = (config.virtual_pipeline_model_parallel_size or 1) > 1
    return config.pipeline_model_parallel_size == 2 and interleaved and config.batch_p2p_comm


WRONG_EXPERT_GRADIENTS = (
    "without expert parallelism, Megatron-Core sums the gradients of experts that are sharded otherwise than the other "
    "weights over the wrong ranks, without any error"
)


def has_wrong_expert_gradients(tensor_parallel: int, expert_tensor_parallel: int | None, expert_parallel: int) -> bool:
    """Return whether Megatron-Core gets the gradients of experts wrong at these sizes (`WRONG_EXPERT_GRADIENTS`)."""
    return expert_parallel == 1 and expert_tensor_parallel not in (None, tensor_parallel)


def _shards_experts_alone(config: Any) -> bool:
    expert_size = getattr(config, "expert_tensor_parallel_size", None)
    return has_wrong_expert_gradients(config.tensor_model_parallel_size, expert_size, config.expert_model_parallel_size)


_CAPTURED = "a captured router repeats the routes of the micro-batch it was captured with"
REFUSALS = (
    Refusal("moe_router_fusion", "the fused kernel chooses the experts itself and never calls the replay object"),
    Refusal(
        "moe_router_load_balancing_type",
        "sinkhorn and similar types balance experts over the batch and never call the replay object",
        f"Use one of {sorted(TOP_K_BALANCING)}",
        lambda config: not balancing_kinds(config) <= TOP_K_BALANCING,
    ),
    Refusal(
        "moe_expert_capacity_factor",
        "a full expert drops tokens that were routed to it",
        "Set moe_expert_capacity_factor=None (dropless)",
        lambda config: config.moe_expert_capacity_factor is not None,
    ),
    Refusal("moe_token_dropping", "tokens that were routed to an expert are dropped"),
    Refusal(
        "moe_router_force_load_balancing",
        "the router's scores are replaced by random ones",
        "Set moe_router_force_load_balancing=False; it is for benchmarks",
    ),
    Refusal(
        "moe_tp_extend_ep",
        "MindSpeed's router then chooses for the tokens of all tensor-parallel ranks, not for its own rows",
    ),
    Refusal(
        "fix_router",
        "MindSpeed's router then sends tokens to experts round-robin, regardless of their scores",
        "Set fix_router=False; it is for benchmarks",
    ),
    Refusal(
        "moe_fb_overlap", "MindSpeed then runs the layers of two micro-batches in turns, outside the model's forward"
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "the combined schedule runs the layers of two micro-batches in turns, outside the model's forward",
    ),
    Refusal("enable_cuda_graph", _CAPTURED, applies=_has_old_graphs("enable_cuda_graph")),
    Refusal("external_cuda_graph", _CAPTURED, applies=_has_old_graphs("external_cuda_graph")),
    Refusal(
        "cuda_graph_impl",
        _CAPTURED,
        f"Set cuda_graph_impl='none', or a cuda_graph_scope of {sorted(GRAPH_SCOPES_WITHOUT_ROUTERS)}",
        _captures_routers,
    ),
    Refusal(
        "batch_p2p_comm",
        "with two pipeline stages, interleaved, batched messages of the two directions can be mistaken for each other, "
        "and gradients are wrong without any error",
        "Set overlap_p2p_comm=True, batch_p2p_comm=False",
        _mixes_p2p_directions,
    ),
    Refusal(
        "expert_tensor_parallel_size",
        WRONG_EXPERT_GRADIENTS,
        "Set it to tensor_model_parallel_size, or use expert parallelism",
        _shards_experts_alone,
    ),
)


# ---- a missing name --------------------------------------------------------------------------------------------------


def bind_missing_gemm() -> None:
    """Set `te_general_gemm` to None where Transformer Engine is missing; Megatron-Core then multiplies by torch.

    moe_utils.py imports the name together with Transformer Engine, and compares it with None in every forward of a
    router: without Transformer Engine that is a NameError, on a GPU as on a CPU.
    """
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "RouterGatingLinearFunction") and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


# ---- the token in each row of this rank's routers --------------------------------------------------------------------


def column_multiple(config: Any) -> int:
    """Return what each packed sequence, and the width of a padded batch, must be a multiple of."""
    context = config.context_parallel_size
    return (2 * context if context > 1 else 1) * _sequence_shards(config)


def layout_for(config: Any, lengths: Sequence[int], *, packed: bool = False, width: int | None = None) -> TokenLayout:
    """Return this rank's layout for sequences of these lengths: sbhd, padded on the right, or packed (thd).

    Rows are sequence-major; context parallelism is zigzag, sequence parallelism contiguous. `width` is the width
    fed, over all context-parallel ranks; where None, the smallest that the parallelism allows.
    """
    from megatron.core import parallel_state

    multiple = column_multiple(config)
    if packed:
        layout = TokenLayout.packed(lengths, pad_each_to_multiple_of=multiple).pad_to(width, multiple_of=multiple)
    else:
        layout = TokenLayout.padded(lengths).pad_to(width, multiple_of=multiple)
    if config.context_parallel_size > 1:
        layout = layout.context_parallel(parallel_state.get_context_parallel_rank(), config.context_parallel_size)
    shards = _sequence_shards(config)
    if shards > 1:
        layout = layout.sequence_parallel(parallel_state.get_tensor_model_parallel_rank(), shards)
    return layout.sequence_major()


def _sequence_shards(config: Any) -> int:
    return config.tensor_model_parallel_size if config.sequence_parallel else 1
