"""One copy of frozen weights with the real vLLM: the trainer computes with the memory of its worker."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moe_replay.engines.base import LoraSpec, StartRequest
from moe_replay.engines.vllm.shared import SHARED as SHARED_KEY
from moe_replay.engines.vllm.shared import LastingWeights, checkpoint_rows
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.train.backends.shared_base import SharedBase, SharedWeightsError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.loop import train
from moe_replay.train.setup import launch
from moe_replay.weights.shared import ExportedWeights, OpenedWeights, digests, place_of
from tests.combinations import with_thorough
from tests.engines.tiny import tiny_model
from tests.real_vllm.conftest import NEEDS_VLLM, SHARED
from tests.real_vllm.forks import EngineProcess
from tests.real_vllm.test_lora import PROBE, adapted, adapter_of, assert_samples_are_of, probe
from tests.train.runs import closeness, tiny_config

pytest.importorskip("peft")
pytest.importorskip("transformers", "5")

LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_merge": False}


def start_engine(demo_files: Any) -> Any:
    from moe_replay.engines.vllm.engine import start

    options = {name: value for name, value in SHARED.items() if name != "dtype"}
    request = StartRequest(
        model=str(demo_files.model),
        max_length=256,
        dtype="float32",
        lora=LoraSpec(4, ("k_proj", "o_proj", "q_proj", "v_proj")),
        share_weights=True,
        options={**options, "enable_prefix_caching": True},
    )
    return start(request)


@pytest.fixture(scope="module")
def engine(demo_files: Any) -> Iterator[Any]:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    started = start_engine(demo_files)
    yield started
    started.close()


def run_of(files: Any, output: Path, **rollout: Any) -> Any:
    return tiny_config(
        files.model,
        files.train,
        output,
        model=LORA,
        rollout={"engine": "vllm", "lora": True, "probe_tolerance": 1e-3, **rollout},
        steps=2,
    )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time")} for line in lines]


def corrupting(prompts: list, completions: list[str], **rest: Any) -> list[float | None]:
    """A reward that changes a weight of the engine, in memory that the trainer has too."""
    opened = OpenedWeights(os.environ["TEST_EXPORT"], torch.device("cpu"))
    opened.tensors[place_of("model.norm.weight")][0] += 1
    return closeness(prompts, completions, **rest)


def test_runs_with_one_copy_and_with_two_are_the_same_bit_for_bit(
    engine: Any, demo_files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.share_weights()
    before = engine.shared_digests()
    one = train(run_of(demo_files, tmp_path / "one", sleep=True), engine)
    said = capsys.readouterr().out
    assert re.search(r"frozen weights: [0-9.]+ KiB in 15 tensors are the engine's memory, [0-9.]+ KiB are copies", said)
    assert "(mlp.experts.down_proj, mlp.experts.gate_up_proj), of other values" in said, "packed by vLLM on CPU"
    assert engine.shared_digests() == before
    two = train(run_of(demo_files, tmp_path / "two", sleep=True, share_weights=False), engine)
    assert "a copy each (rollout.share_weights = false)" in capsys.readouterr().out
    lines = metrics_of(one)
    assert lines == metrics_of(two)
    assert all(line["loss/grad_norm"] > 0 and line["routing/replayed_fraction"] > 0.5 for line in lines)
    assert engine.shared_digests() == before


def test_sleep_wake_and_new_adapters_leave_the_memory_as_it_is(engine: Any, demo_files: Any) -> None:
    opened = OpenedWeights(engine.share_weights(), torch.device("cpu")).tensors
    before = engine.shared_digests()
    assert digests(opened) == {place: before[place] for place in opened}
    for version in (7, 8):
        policy = adapted(demo_files, version, ("q_proj", "k_proj", "v_proj", "o_proj"))
        engine.sleep(2)
        assert engine.shared_digests() == before
        engine.wake_for_update()
        engine.update_adapter(adapter_of(policy), version, probe(policy))
        assert engine.shared_digests() == before
        assert_samples_are_of(policy, engine, version, "")
    assert digests(opened) == {place: before[place] for place in opened}
    with pytest.raises(EngineError, match="was started with LoRA"):
        engine.update_weights([], 9)


def test_a_run_stops_when_the_memory_changes(
    engine: Any, demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = engine.share_weights()
    monkeypatch.setenv("TEST_EXPORT", export)
    norm = OpenedWeights(export, torch.device("cpu")).tensors[place_of("model.norm.weight")]
    values = norm.clone()
    config = run_of(demo_files, tmp_path / "run", probe_tolerance=100.0)
    reward = config.reward.model_copy(update={"functions": (f"{__name__}:corrupting",)})
    try:
        with pytest.raises(SharedWeightsError, match=r"have changed, as the trainer sees them.*1 of 15.*norm\.weight"):
            train(config.model_copy(update={"reward": reward}), engine)
    finally:
        norm.copy_(values)


@pytest.mark.parametrize("is_shared", [False, True])
def test_shared_weights_are_not_in_the_memory_that_sleep_frees(is_shared: bool) -> None:
    class Worker:
        vllm_config = SimpleNamespace(additional_config={SHARED_KEY: True} if is_shared else {})

        def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[str]:
            return nullcontext(f"pool of {tag}")

    worker = type("Mixed", (LastingWeights, Worker), {})()
    entered = {}
    for tag in ("weights", "kv_cache"):
        with worker._maybe_get_memory_pool_context(tag) as entered[tag]:
            pass
    assert entered == {"weights": None if is_shared else "pool of weights", "kv_cache": "pool of kv_cache"}
    from moe_replay.engines.vllm.capture_worker import MIXINS

    assert all(LastingWeights in mixins for name, mixins in MIXINS.items() if name.startswith("Gpu"))


def export_unpacked(family: str, folder: Path, pipe: Connection) -> None:
    """vLLM's own model with the layout that it computes with on a GPU, in a process that keeps it until it is told."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
        initialize_model_parallel(1)
        model: Any = initialize_model(config)
        loader = DefaultModelLoader(config.load_config)
        model.load_weights(loader.get_all_weights(config.model_config, model))
    adapted_layer = nn.Module()  # as vLLM wraps a layer for adapters
    attention = model.model.layers[1].self_attn
    adapted_layer.base_layer, attention.qkv_proj = attention.qkv_proj, adapted_layer
    exported = ExportedWeights(checkpoint_rows(model), torch.device("cpu"))
    pipe.send_bytes(exported.message().encode())
    pipe.recv_bytes()
    pipe.send_bytes(json.dumps(exported.digests()).encode())


@pytest.mark.parametrize("family", with_thorough(["qwen3_moe", "mixtral", "olmoe"], ["mixtral", "olmoe"]))
def test_a_policy_in_the_layout_of_vllm_on_a_gpu_needs_no_copies(family: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.train.backends.fsdp import FsdpBackend

    cpu = torch.device("cpu")
    tiny_model(family).save_pretrained(tmp_path)
    here, there = multiprocessing.Pipe()
    process = get_context("fork").Process(target=export_unpacked, args=(family, tmp_path, there))
    process.start()
    model = {"path": str(tmp_path), "dtype": "float32", "lora_rank": 4, "lora_target_modules": ("all-linear",)}
    config = TrainConfig(model=model, data={"path": "x.jsonl"})
    ids = torch.tensor([PROBE])
    try:
        base = SharedBase(here.recv_bytes().decode(), cpu)
        with launch.process_group(cpu):
            torch.manual_seed(1)
            own = FsdpBackend(config, str(tmp_path), cpu)
            expected = own.model.eval()(input_ids=ids).logits
            torch.manual_seed(1)
            shared = FsdpBackend(config, str(tmp_path), cpu, base)
            assert torch.equal(shared.model.eval()(input_ids=ids).logits, expected)
            assert not base.copied_bytes, "\n".join(base.describe())
            here.send_bytes(b"now")
            base.check(json.loads(here.recv_bytes()))
            shared.close()
    finally:
        process.kill()
        process.join()


@pytest.mark.thorough
def test_the_memory_outlives_an_engine_that_is_killed_and_the_next_one_has_the_same(demo_files: Any) -> None:
    found = []
    for _ in range(2):
        started = start_engine(demo_files)
        opened = OpenedWeights(started.share_weights(), torch.device("cpu")).tensors
        before = digests(opened)
        assert before.items() <= started.shared_digests().items()
        for process in multiprocessing.active_children():
            if isinstance(process, EngineProcess):
                process.kill()
        with pytest.raises(EngineUnavailableError):
            started.shared_digests()
        assert digests(opened) == before
        started.close()
        found.append(before)
    assert found[0] == found[1]
