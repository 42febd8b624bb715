"""Megatron-Core, partitioned in every way it can be, against the whole model that replays the same routes.

For each layout: the loss of every micro-batch and the gradient of every parameter. The routers have moved since the
routes were recorded, so that natively most tokens would go elsewhere.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness
from tests.distributed.megatron_models import FULL, PRELOADED, Case, save_reference
from tests.distributed.megatron_partition import run_case

pytest.importorskip("megatron.core")
harness.PRELOADED.extend(PRELOADED)

ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
GROUPS = FULL | {"recompute_num_layers": 2}


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


CASES = {
    # one rank: every kind of layer, every way to recompute
    "1": Case(1),
    "1-alltoall": Case(1, settings=ALLTOALL),
    "1-full": Case(1, settings=FULL),
    "1-full-by-2": Case(1, settings=GROUPS),
    "1-block": Case(1, settings=BLOCK),
    "1-selective-moe": Case(1, settings=selective("moe")),
    "1-selective-layernorm-mlp": Case(1, settings=selective("layernorm", "mlp", "core_attn")),
    "1-packed": Case(1, packed=True),
    "1-packed-full": Case(1, packed=True, settings=FULL | ALLTOALL),
    "1-presoftmax-gqa": Case(1, "presoftmax", settings=FULL),
    "1-top1": Case(1, "top1", settings=FULL),
    "1-mla": Case(1, "mla", settings=FULL),
    "1-deepseek": Case(1, "deepseek", settings=FULL | ALLTOALL),
    "1-deepseek-shared-overlap": Case(1, "deepseek", settings=ALLTOALL | {"moe_shared_expert_overlap": True}),
    "1-mtp": Case(1, "mtp", settings=FULL),
    "1-losses": Case(1, "losses", settings=FULL),
    # two ranks
    "dp2": Case(2, settings=FULL),
    "dp2-overlap": Case(2, overlap=True, settings=selective("moe")),
    "tp2": Case(2, tp=2),
    "tp2-alltoall-full": Case(2, tp=2, settings=FULL | ALLTOALL),
    "tp2-packed": Case(2, tp=2, packed=True, settings=selective("moe")),
    "tp2-ep2-etp1": Case(2, tp=2, ep=2, etp=1, settings=ALLTOALL | FULL),
    "tp2-deepseek": Case(2, "deepseek", tp=2, settings=ALLTOALL),
    "ep2": Case(2, ep=2),
    "ep2-alltoall": Case(2, ep=2, settings=ALLTOALL | FULL),
    "ep2-deepseek": Case(2, "deepseek", ep=2, settings=ALLTOALL | FULL),
    "pp2": Case(2, pp=2),
    "pp2-full": Case(2, pp=2, settings=FULL),
    "pp2-deallocated": Case(2, pp=2, settings=FULL | {"deallocate_pipeline_outputs": True}),
    "pp2-selective-moe": Case(2, pp=2, settings=selective("moe")),
    "pp2-uneven": Case(2, pp=2, settings=FULL | {"num_layers_in_first_pipeline_stage": 3}),
    "pp2-stage-without-routers": Case(2, pp=2, settings=FULL | {"num_layers_in_first_pipeline_stage": 1}),
    "pp2-packed": Case(2, pp=2, packed=True, settings=FULL),
    "pp2-varying": Case(2, pp=2, varying=True, settings=FULL | ALLTOALL),
    "pp2-mtp": Case(2, "mtp", pp=2, settings=FULL),
    "pp2-losses": Case(2, "losses", pp=2, settings=FULL),
    "pp2-every-second": Case(2, "every second", pp=2, settings=FULL),
    "pp2-first-dense": Case(2, "first dense", pp=2, settings=BLOCK),
    "pp2-vpp2": Case(2, pp=2, vpp=2, settings=FULL),
    "pp2-vpp4": Case(2, pp=2, vpp=4, settings=FULL),
    "pp2-vpp2-selective": Case(2, pp=2, vpp=2, settings=selective("moe", "layernorm")),
    "pp2-vpp2-varying": Case(2, pp=2, vpp=2, varying=True, settings=FULL | ALLTOALL),
    "pp2-vpp2-mtp": Case(2, "mtp", pp=2, vpp=2, settings=FULL),
    "pp2-vpp2-custom": Case(2, pp=2, vpp=2, settings=FULL | {"pipeline_model_parallel_layout": "Et*3|t*2|t|t*2L"}),
    "cp2": Case(2, cp=2),
    "cp2-full": Case(2, cp=2, settings=FULL | ALLTOALL),
    "cp2-packed": Case(2, cp=2, packed=True, settings=FULL),
    "cp2-ep2": Case(2, cp=2, ep=2, settings=ALLTOALL),
    "dp2-sharded-optimizer": Case(2, optimizer="sharded", settings=FULL),
    "dp2-sharded-optimizer-overlap": Case(2, optimizer="sharded", overlap=True, settings=FULL),
    "ep2-sharded-optimizer": Case(2, ep=2, optimizer="sharded", settings=FULL | ALLTOALL),
    "pp2-optimizer": Case(2, pp=2, optimizer="whole", settings=FULL),
    "bf16-dp2-sharded-optimizer": Case(2, "bf16", optimizer="sharded", settings=FULL),
    "bf16-dp2": Case(2, "bf16", settings=FULL),
    "bf16-pp2": Case(2, "bf16", pp=2, settings=FULL),
    # four ranks
    "tp2-dp2-ep2-etp2": Case(4, tp=2, ep=2, settings=FULL),
    "tp2-dp2-ep2-etp1": Case(4, tp=2, ep=2, etp=1, settings=ALLTOALL | FULL),
    "tp2-ep4-etp1": Case(4, tp=2, ep=4, etp=1, settings=ALLTOALL),
    "tp2-pp2": Case(4, tp=2, pp=2, settings=FULL | ALLTOALL),
    "tp2-pp2-vpp2-packed": Case(4, tp=2, pp=2, vpp=2, packed=True, settings=FULL),
    "tp2-cp2": Case(4, tp=2, cp=2, settings=FULL),
    "tp2-cp2-packed": Case(4, tp=2, cp=2, packed=True, settings=FULL | ALLTOALL),
    "ep2-pp2": Case(4, ep=2, pp=2, settings=FULL | ALLTOALL),
    "ep2-pp2-vpp2": Case(4, ep=2, pp=2, vpp=2, settings=FULL | ALLTOALL),
    "cp2-pp2": Case(4, cp=2, pp=2, settings=FULL),
    "pp4": Case(4, pp=4, settings=FULL),
    "pp4-vpp2": Case(4, pp=4, vpp=2, settings=FULL),
    "dp4-overlap": Case(4, overlap=True, settings=FULL),
    # eight ranks
    "tp2-cp2-pp2-ep2": Case(8, tp=2, cp=2, pp=2, ep=2, etp=1, settings=FULL | ALLTOALL),
}

# Layouts whose parts, and pairs of parts, are in others: `1-full` in every other layout with FULL, `tp2-cp2` in
# `tp2-cp2-packed`, and so on.
THOROUGH = {
    *("1-alltoall", "1-full", "1-block", "1-selective-moe", "1-packed", "1-deepseek", "1-mtp", "1-losses"),
    *("dp2", "dp2-sharded-optimizer", "bf16-dp2", "tp2-deepseek", "ep2-alltoall", "cp2-full", "cp2-packed"),
    *("pp2-full", "pp2-selective-moe", "pp2-packed", "pp2-varying", "pp2-mtp", "pp2-vpp2"),
    *("tp2-dp2-ep2-etp1", "tp2-pp2", "tp2-cp2", "ep2-pp2", "cp2-pp2", "pp4", "dp4-overlap"),
}


# `make test` has one rank, each kind of parallelism on two, and four ranks with TP, PP and VPP.
WHOLE_RUNS = {
    *("1-mla", "1-presoftmax-gqa", "1-top1", "1-deepseek-shared-overlap", "bf16-dp2-sharded-optimizer"),
    *("pp2-vpp2-mtp", "bf16-pp2", "tp2-packed", "tp2-ep2-etp1", "ep2-sharded-optimizer"),
    *("pp2-losses", "pp2-every-second", "pp2-first-dense", "pp2-vpp2-varying"),
    *("tp2-dp2-ep2-etp2", "tp2-ep4-etp1", "tp2-cp2-packed", "ep2-pp2-vpp2", "pp4-vpp2", "tp2-cp2-pp2-ep2"),
}


@functools.cache
def reference_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="megatron-")


@functools.cache
def reference(variant: str = "hybrid", varying: bool = False) -> tuple[str, list[float]]:
    """The whole model, on as many micro-batches as any layout needs: where its outcome lies, and its losses."""
    same_model = [case for case in CASES.values() if (case.variant, case.varying) == (variant, varying)]
    micro_batches = max(case.micro_batches * case.dp for case in same_model)
    path = str(Path(reference_folder().name, f"{variant}-{varying}"))
    (losses,) = harness.run_ranks(1, save_reference, path, variant, micro_batches, varying)
    return path, losses


def tolerance(case: Case) -> tuple[float, float]:
    """Of a loss, and of a gradient relative to its size: rounding."""
    return (2e-3, 3e-2) if case.variant == "bf16" else (2e-6, 2e-6)


@pytest.mark.parametrize("name", with_whole_runs(with_thorough(CASES, THOROUGH), WHOLE_RUNS))
def test_partitioned_as_whole(name: str) -> None:
    case = CASES[name]
    path, expected = reference(case.variant, case.varying)
    ranks = harness.run_ranks(case.size, run_case, case, path)
    loss_tolerance, gradient_tolerance = tolerance(case)
    for dp in range(case.dp):
        # Context-parallel ranks hold parts of a loss, tensor-parallel ones the same.
        parts = [rank["losses"] for rank in ranks if rank["dp"] == dp and rank["losses"]]
        losses = [sum(of_one) / case.tp for of_one in zip(*parts, strict=True)]
        own = slice(dp * case.micro_batches, (dp + 1) * case.micro_batches)
        assert losses == pytest.approx(expected[own], abs=loss_tolerance)
    for number, rank in enumerate(ranks):
        assert rank["worst"] <= gradient_tolerance, f"rank {number}: {rank['name']} is {rank['worst']:.1e} apart"
