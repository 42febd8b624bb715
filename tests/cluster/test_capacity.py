"""Whether a cluster can hold a run, from numbers alone."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.cli.main import main
from moe_replay.cluster.capacity import CapacityError, Demand, Node, Resources, check_capacity, demand_of
from moe_replay.errors import ExitStatus
from moe_replay.train.config.file import load_config

GIB = 2**30


def node(name: str, cpus: float, gpus: float = 0, memory: float = 0, used: Resources | None = None) -> Node:
    has = Resources(cpus, gpus, memory)
    return Node(name, has.minus(used or Resources()), has)


def demand(*settings: str, gpus: float = 8) -> Demand:
    words = ["--cluster.launcher", "ray", "--rollout.engine", "vllm", *settings]
    return demand_of(load_config(None, words), [node("a", 64, gpus)])


def test_what_a_recipe_asks_for() -> None:
    asked = demand(
        *("--cluster.trainer_nodes", "2", "--cluster.ranks_per_node", "8", "--cluster.cpus_per_rank", "4"),
        *("--cluster.engines", "6", "--rollout.options", "tensor_parallel_size", "4"),
    )
    assert asked == Demand(2, Resources(32, 8), 6, Resources(1, 4))


def test_engines_on_the_trainers_gpus_ask_for_no_others() -> None:
    asked = demand(
        *("--cluster.trainer_nodes", "2", "--cluster.ranks_per_node", "8", "--cluster.engines", "4"),
        *("--cluster.placement", "colocated", "--rollout.options", "tensor_parallel_size", "4"),
    )
    assert (asked.trainer_nodes, asked.trainer, asked.engines) == (2, Resources(10, 8), 0)


def test_a_run_on_cpus_asks_for_no_gpu() -> None:
    sizes = ("--cluster.ranks_per_node", "2", "--cluster.engines", "2")
    asked = demand("--backend.device", "cpu", *sizes)
    assert asked == demand(*sizes, gpus=0) == Demand(1, Resources(2, 0), 2, Resources(1, 0))
    assert demand("--backend.device", "cuda", *sizes, gpus=0).trainer == Resources(2, 2)


def test_a_run_that_fits_says_how() -> None:
    told = check_capacity([node("a", 64, 8), node("b", 64, 8)], Demand(1, Resources(8, 8), 2, Resources(1, 4)))
    assert told == "1 trainer node with 8 GPUs, 8 CPUs each, 2 engines with 4 GPUs, 1 CPU each on 2 nodes"


def test_the_trainer_gets_machines_that_engines_do_not_need() -> None:
    nodes = [node("big", 64, 8), node("small", 8, 2)]
    demand = Demand(1, Resources(2, 2), 2, Resources(1, 4))
    check_capacity(nodes, demand)
    with pytest.raises(CapacityError, match="1 of 2 engines fit next to the trainer"):
        check_capacity(nodes[:1], demand)
    with pytest.raises(CapacityError, match="2 of 3 engines fit next to the trainer"):
        check_capacity(nodes, demand._replace(engines=3))


@pytest.mark.parametrize(
    ("nodes", "asked", "problem", "remedy"),
    [
        (
            [node("a", 64, 4), node("b", 64, 8)],
            Demand(2, Resources(8, 8), 0, Resources(1, 1)),
            "1 of 2 trainer nodes found, each needs 8 GPUs, 8 CPUs on one machine",
            "Add 1 machine with 8 GPUs, 8 CPUs free, or set cluster.trainer_nodes = 1",
        ),
        (
            [node("a", 64, 8)],
            Demand(1, Resources(4, 4), 3, Resources(1, 2)),
            "2 of 3 engines fit next to the trainer, each needs 2 GPUs, 1 CPU on one machine",
            "Add machines with 2 GPUs, 1 CPU free for 1 engine, or set cluster.engines = 2",
        ),
        (
            [node("a", 64, 2), node("b", 64, 2)],  # together there are 4, but not on one machine
            Demand(1, Resources(4, 4), 0, Resources(1, 1)),
            "0 of 1 trainer node found, each needs 4 GPUs, 4 CPUs on one machine",
            "Add 1 machine with 4 GPUs, 4 CPUs free, or lower cluster.ranks_per_node",
        ),
        (
            [node("a", 4, 0, 8 * GIB)],
            Demand(1, Resources(2, 0, 16 * GIB), 0, Resources(1)),
            "0 of 1 trainer node found, each needs 2 CPUs, 16.0 GiB on one machine",
            "Add 1 machine with 2 CPUs, 16.0 GiB free",
        ),
        (
            [node("a", 8, 8, used=Resources(1, 4))],
            Demand(1, Resources(8, 8), 0, Resources(1, 1)),
            "0 of 1 trainer node found",
            "Wait for the other jobs that hold these resources",
        ),
        ([], Demand(1, Resources(1), 0, Resources(1)), "0 of 1 trainer node", "found no nodes"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(nodes: list[Node], asked: Demand, problem: str, remedy: str) -> None:
    with pytest.raises(CapacityError) as failed:
        check_capacity(nodes, asked)
    assert f"the cluster is too small for the run: {problem}" in str(failed.value)
    assert remedy in str(failed.value)


SMALL = st.integers(0, 5)


@given(
    cpus=st.lists(SMALL, max_size=4),
    trainer_nodes=st.integers(1, 3),
    trainer=st.integers(1, 4),
    engines=SMALL,
    engine=st.integers(1, 3),
)
def test_a_run_fits_if_any_placement_does(
    cpus: list[int], trainer_nodes: int, trainer: int, engines: int, engine: int
) -> None:
    """Against all ways to choose the trainer's machines."""
    asked = Demand(trainer_nodes, Resources(trainer), engines, Resources(engine))
    possible = any(
        sum(chosen) == trainer_nodes
        and all(has >= trainer * one for has, one in zip(cpus, chosen, strict=True))
        and sum((has - trainer * one) // engine for has, one in zip(cpus, chosen, strict=True)) >= engines
        for chosen in product((0, 1), repeat=len(cpus))
    )
    try:
        check_capacity([node(str(number), has) for number, has in enumerate(cpus)], asked)
        assert possible
    except CapacityError:
        assert not possible


# ---- in commands -----------------------------------------------------------------------------------------------------


def test_a_dry_run_says_how_the_cluster_holds_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["train", "--cluster.launcher", "ray", "--cluster.engines", "2", "--backend.device", "cpu", "--dry-run"]
    main(words)
    told = capsys.readouterr().out
    fits = "1 trainer node with 1 CPU each, 2 engines with 1 CPU each on 1 node"
    assert told.endswith(f"\ncluster  {fits}\n")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--cluster.trainer_nodes", "2"])
    assert ended.value.code == ExitStatus.CHECK_FAILED
    assert "not ready: the cluster is too small for the run: 1 of 2 trainer nodes" in capsys.readouterr().err


def test_doctor_says_whether_the_cluster_holds_a_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model.path = ""\n[cluster]\nlauncher = "ray"\nengines = 2\n[backend]\ndevice = "cpu"\n')
    main(["doctor", "--recipe", str(recipe)])
    assert re.search(r"ok +cluster +this machine: holds 1 trainer node with 1 CPU", capsys.readouterr().out)
    recipe.write_text('model.path = ""\n[cluster]\nlauncher = "ray"\nranks_per_node = 4\n[backend]\ndevice = "cuda"\n')
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--recipe", str(recipe)])
    assert ended.value.code == ExitStatus.CHECK_FAILED
    assert re.search(r"BROKEN +cluster .* each needs 4 GPUs, 4 CPUs on one machine", capsys.readouterr().out)
