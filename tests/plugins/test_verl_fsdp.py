"""R2 and R3 in the FSDP engine of the installed verl, on a CPU; `make test-plugins` runs every known version."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_replay as mr
from moe_replay.interop import from_verl

pytest.importorskip("verl", reason="runs in the environment of `make test-plugins`")

from moe_replay.integrations.hosts import HostError, ReplaySettings
from moe_replay.integrations.verl_fsdp import FsdpReplayMixin
from tests.distributed.harness import run_ranks
from tests.plugins import verl_cpu
from tests.plugins.verl_cpu import RESPONSE, Rollout, old_log_probs, update

DISAGREEING = 0.3  # noise on the rollout's routers, with which a third of their choices are others


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> None:
    verl_cpu.on_cpu()
    verl_cpu.open_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl") / "model"


@pytest.fixture(scope="module")
def engines(folder: Path) -> Callable[..., Any]:
    """Engines by their settings, each built once; a stopped one forgets what it has seen."""
    made: dict[tuple, Any] = {}

    def engine(mode: str | None = "R3", **settings: Any) -> Any:
        key = (mode, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in made:
            made[key] = verl_cpu.make_engine(folder, mode=mode, **settings)
        found = made[key]
        if found._replay is not None:
            found._step_metrics = type(found._step_metrics)(
                found._replay.topology, torch.device("cpu"), found._replay_settings
            )
        return found

    return engine


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return Rollout(noise=DISAGREEING)


def replayed_log_probs(rollout: Rollout) -> list[torch.Tensor]:
    """Log-probs of each sample under its routes, by Transformers and this library alone."""
    model = verl_cpu.tiny_model()
    replay = mr.attach(model)
    found = []
    for ids, mask, routed_experts in zip(rollout.ids, rollout.mask, rollout.routed_experts, strict=True):
        tokens = ids[mask.bool()]
        traces = from_verl([routed_experts[mask.bool()]], [tokens], topology=replay.topology)
        batch = mr.RouteBatch.from_traces(traces, mr.TokenLayout.packed([len(tokens)]))
        with torch.no_grad(), replay.replay(batch):
            every = model(tokens[None]).logits[0].log_softmax(-1)
        found.append(every[:-1].gather(-1, tokens[1:, None])[:, 0])
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_the_old_log_prob_pass_computes_with_the_routes_of_the_rollout(engines, rollout, padded) -> None:
    found = old_log_probs(engines(padded=padded), rollout.batch(rollout.routed_experts, padded=padded))
    assert "routed_experts" not in found  # verl refuses routes of the rollout and of this pass together
    for ours, verls in zip(replayed_log_probs(rollout), found["log_probs"].unbind(), strict=True):
        torch.testing.assert_close(verls[:-1], ours, atol=1e-4, rtol=1e-4)
    native = old_log_probs(engines(mode=None, padded=padded), rollout.batch(rollout.routed_experts, padded=padded))
    assert not torch.allclose(native["log_probs"].values(), found["log_probs"].values(), atol=1e-2)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_an_update_reports_what_it_replayed(engines, rollout, padded) -> None:
    scores = torch.randn(len(rollout.ids), RESPONSE, generator=torch.Generator().manual_seed(0)) - 5
    data = rollout.batch(rollout.routed_experts, padded=padded, rollout_log_probs=scores)
    metrics = update(engines(padded=padded), data)
    assert all(len(value) == 1 for name, value in metrics.items() if name.startswith("moe_replay/"))
    found = {name: value[0] for name, value in metrics.items() if name.startswith("moe_replay/")}
    assert not [name for name in found if "min" in name or "max" in name]  # verl would reduce them by it
    assert found["moe_replay/aligned"] == 1
    assert found["moe_replay/evidence"] < 5
    assert 0.1 < found["moe_replay/agreement"] < 0.8
    assert found["moe_replay/worst_agreement"] <= found["moe_replay/agreement"]
    assert found["moe_replay/worst_layer"] in (1, 2, 3, 4)
    tokens = int(rollout.mask.sum())
    assert found["moe_replay/covered"] == found["moe_replay/replayed"] == pytest.approx(1 - len(rollout.ids) / tokens)
    assert found["moe_replay/samples_without_routes"] == 0
    assert found["moe_replay/k3"] > 0
    assert found["moe_replay/k3_native"] not in (0, found["moe_replay/k3_paired"])
    assert found["moe_replay/k3_paired"] not in (0, found["moe_replay/k3"])  # of one of the two micro-batches


FAULTS = {
    "token_late": "one token late",
    "layer_late": "one layer late from layer 2 on",
    "dense_layer_routed": "routes in a layer that has no router",
    "zero_rows": "left rows of the capture unwritten",
    "all_zero": "all-zero capture",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_by_name(engines, rollout, fault) -> None:
    with pytest.raises(mr.MoeReplayError, match=FAULTS[fault]):
        update(engines(), rollout.batch(getattr(verl_cpu, fault)(rollout)))


def test_swapped_samples_stop_the_run(engines) -> None:
    alike = Rollout(noise=DISAGREEING, equal=True)
    with pytest.raises(mr.AlignmentError, match=r"another sample|other tokens|other sequences|better than chance"):
        for _ in range(8):
            old_log_probs(engines(), alike.batch(verl_cpu.samples_swapped(alike)))


def test_a_fault_may_warn_instead(engines, rollout, caplog) -> None:
    engine = engines(router_replay={"on_misalignment": "warn"})
    assert update(engine, rollout.batch(verl_cpu.token_late(rollout)))["moe_replay/aligned"] == [0]
    assert "one token late" in caplog.text
    assert update(engine, rollout.batch(rollout.routed_experts))["moe_replay/aligned"] == [1]


def test_r2_records_in_the_old_log_prob_pass_and_replays_in_updates(engines, rollout) -> None:
    engine = engines(mode="R2")
    recorded = old_log_probs(engine, rollout.batch(None))["routed_experts"]
    assert recorded.dtype == torch.int16
    assert [len(rows) for rows in recorded.unbind()] == rollout.mask.sum(1).tolist()
    first = rollout.batch(None)
    first["routed_experts"] = recorded
    metrics = update(engine, first)
    assert metrics["moe_replay/agreement"] == [1]
    assert metrics["moe_replay/replayed"] == [1]
    for site in engine._replay.sites.values():
        site.module.weight.data.add_(0.1 * torch.randn_like(site.module.weight.data))
    assert update(engine, first)["moe_replay/agreement"][0] < 0.9


def test_padding_samples_of_verl_route_natively_and_are_counted(engines, rollout) -> None:
    data = rollout.batch(rollout.routed_experts)
    padding = rollout.batch(torch.zeros_like(rollout.routed_experts))
    data["response_mask"][4:] = 0
    data["routed_experts"] = torch.nested.as_nested_tensor(
        [*data["routed_experts"].unbind()[:4], *padding["routed_experts"].unbind()[4:]], layout=torch.jagged
    )
    metrics = update(engines(), data)
    assert metrics["moe_replay/samples_without_routes"] == [2]
    assert metrics["moe_replay/covered"][0] < 0.8


@pytest.mark.parametrize(("mode", "remedy"), [("R3", "enable_rollout_routing_replay=True"), ("R2", "bypass_mode")])
def test_a_batch_without_routes_is_refused(engines, rollout, mode, remedy) -> None:
    with pytest.raises(HostError, match=remedy):
        update(engines(mode=mode), rollout.batch(None))


def test_the_reference_of_lora_routes_natively(engines, rollout) -> None:
    engine = engines(lora=True)
    data = rollout.batch(rollout.routed_experts)
    replayed = old_log_probs(engine, data)["log_probs"].values()
    with engine.disable_adapter():
        reference = old_log_probs(engine, data)["log_probs"].values()
    plain = old_log_probs(engines(mode=None), data)["log_probs"].values()
    torch.testing.assert_close(reference, plain, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(replayed, plain, atol=1e-2)
    assert update(engine, data)["moe_replay/aligned"] == [1]


def test_a_reference_worker_has_nothing_attached() -> None:
    class Reference:
        engine_config = SimpleNamespace(router_replay={"mode": "R3"}, forward_only=True)

        def initialize(self) -> None:
            self.module = None

    engine = type("Engine", (FsdpReplayMixin, Reference), {})()
    engine.initialize()
    assert engine._replay is None


def test_the_metrics_reach_what_the_trainer_logs_and_the_error_leaves_the_worker(folder, rollout, monkeypatch) -> None:
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers import engine_workers
    from verl.workers.config import TrainingWorkerConfig

    ranks = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    for name in ("set_numa_affinity", "initialize_global_process_group_ray"):
        monkeypatch.setattr(engine_workers, name, lambda **_: None)
    model, engine, optimizer = verl_cpu.configs(folder, mode="R3")
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    worker = engine_workers.TrainingWorker(config)
    worker.reset()
    worker.flops_counter = None
    worker.set_loss_fn(verl_cpu.loss)
    settings = {"mini_batch_size": 6, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": True}}

    def batch(routed_experts: torch.Tensor) -> Any:
        data = rollout.batch(routed_experts)
        tensordict_utils.assign_non_tensor(data, **settings)
        return data

    output = worker.train_mini_batch(batch(rollout.routed_experts))
    logged = reduce_metrics(rename_dict(tensordict_utils.get(output, "metrics"), "actor/"))
    assert logged["actor/moe_replay/aligned"] == 1
    assert 0.1 < logged["actor/moe_replay/agreement"] < 0.8
    with pytest.raises(mr.AlignmentError, match="one token late"):
        worker.train_mini_batch(batch(verl_cpu.token_late(rollout)))


# ---- Ulysses ---------------------------------------------------------------------------------------------------------


def on_ulysses_rank(folder: str) -> list[Any]:
    engine = verl_cpu.make_engine(Path(folder), mode="R2", ulysses_sequence_parallel_size=2)
    rollout = Rollout()
    recorded = old_log_probs(engine, rollout.batch(None))["routed_experts"]
    data = rollout.batch(None)
    data["routed_experts"] = recorded
    metrics = update(engine, data)
    shifted = rollout.batch(None)
    rows = [torch.cat([rows[:1], rows[:-1]]) for rows in recorded.unbind()]
    shifted["routed_experts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    try:
        update(engine, shifted)
        stopped = ""
    except mr.AlignmentError as error:
        stopped = str(error)
    return [recorded.values(), {name: v[0] for name, v in metrics.items() if name.startswith("moe_replay/")}, stopped]


@pytest.mark.distributed
def test_ulysses_ranks_replay_their_part_of_each_micro_batch(folder) -> None:
    if not folder.exists():
        verl_cpu.tiny_model().save_pretrained(folder)
    first, second = run_ranks(2, on_ulysses_rank, str(folder))
    assert torch.equal(first[0], second[0])
    assert first[0][:, 1:].any(-1).all()  # every row of every layer that routes was recorded on one of the ranks
    assert first[1] == second[1]
    assert first[1]["moe_replay/agreement"] == first[1]["moe_replay/replayed"] == first[1]["moe_replay/aligned"] == 1
    assert first[2] == second[2]
    assert "one token late" in first[2]


# ---- settings and versions -------------------------------------------------------------------------------------------


def test_settings_come_from_verl_or_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("MOE_REPLAY_CHECK_EVERY", "7")
    monkeypatch.setenv("MOE_REPLAY_ON_MISALIGNMENT", "warn")
    found = ReplaySettings.read({"mode": "R3", "on_misalignment": "stop", "record_file": None, "_target_": "x"})
    assert found == ReplaySettings(mode="R3", check_every=7, on_misalignment="stop")
    assert ReplaySettings.read({"mode": "R3", "check_every": 0}).check_every == 0
    with pytest.raises(HostError, match="record_file"):
        ReplaySettings.read({"mode": "R3", "record_file": "routes"})
    with pytest.raises(HostError, match=r"disabled or R2 or R3.*'r4'"):
        ReplaySettings.read({"mode": "r4"})


ORDER = """
import sys
from tests.plugins.verl_cpu import on_cpu
on_cpu()
import moe_replay.integrations.verl
assert not {"megatron", "vllm", "sglang", "verl.workers.engine"} & set(sys.modules)
import verl.workers.engine as engine
by_backend = engine.EngineRegistry._engines["language_model"]
(found,) = {by_backend[name]["cuda"] for name in ("fsdp", "fsdp2")}
print(found.__name__, issubclass(found, engine.FSDPEngineWithLMHead), engine.fsdp.transformer_impl.__spec__.loader)
"""


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess:
    command, environment = [sys.executable, "-c", code], os.environ | variables
    return subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)


def test_the_engine_is_replaced_when_verl_imports_it() -> None:
    done = in_a_process(ORDER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("ReplayingFSDPEngineWithLMHead True <_frozen_importlib")


OTHER_VERSION = """
from importlib import metadata
metadata.version = lambda name: "9.9.9"
import moe_replay.integrations.verl
"""


def test_another_version_is_refused_when_the_module_is_imported() -> None:
    assert "expected verl 0.8.0, 0.9.0, 0.9.1, found 9.9.9" in in_a_process(OTHER_VERSION).stderr
    assert in_a_process(OTHER_VERSION, MOE_REPLAY_ALLOW_VERSION="9.9.9").returncode == 0


OTHER_SIGNATURE = """import moe_replay.integrations.verl_fsdp as ours
ours.PARAMETERS["FSDPEngineWithLMHead.forward_step"] = ("self", "batch")
import moe_replay.integrations.verl
"""


def test_another_signature_is_refused_when_verl_imports_the_engine() -> None:
    done = in_a_process(ORDER.replace("import moe_replay.integrations.verl\n", OTHER_SIGNATURE))
    assert "FSDPEngineWithLMHead.forward_step of verl" in done.stderr
    assert "expected (self, batch), found (self, micro_batch, loss_function, forward_only)" in done.stderr


def test_an_engine_that_ignores_the_mode_refuses_it() -> None:
    from verl.workers.engine import EngineRegistry

    import moe_replay.integrations.verl  # noqa: F401

    if "fsdp_turbo" not in EngineRegistry._engines["language_model"]:
        pytest.skip("this verl has no fsdp_turbo")
    engine = EngineRegistry._engines["language_model"]["fsdp_turbo"]["cuda"]
    config = SimpleNamespace(router_replay={"mode": "R3"}, forward_only=False)
    with pytest.raises(HostError, match=r"FSDPTurboEngineWithLMHead ignores router_replay.mode"):
        engine(model_config=None, engine_config=config, optimizer_config=None, checkpoint_config=None)
    config.router_replay["mode"] = "disabled"
    with pytest.raises(AttributeError):  # verl's own constructor, which needs more than this
        engine(model_config=None, engine_config=config, optimizer_config=None, checkpoint_config=None)
