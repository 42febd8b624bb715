"""Whole runs on one process, with the Transformers engine: what is learned, kept, resumed and refused."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from moe_replay.errors import EngineError, ReplayStateError
from moe_replay.train.config.file import to_toml
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.learner import Learner
from moe_replay.train.loop import train
from moe_replay.train.rollout.rewards import RewardError
from moe_replay.train.run import DivergedError
from moe_replay.train.setup.memory_plan import MemoryPlan, plan_memory
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes
from tests.combinations import with_thorough, with_whole_runs
from tests.faults.forked import fork_command
from tests.faults.processes import wait_for_line

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]

# ---- rewards and environments that runs name by "module:function" ---------------------------------------------------

calls = count(1)


def interrupting(prompts: list, completions: list[str], **_: Any) -> list[float]:
    """Ctrl-C while the fifth group is scored, which is the first of step 2."""
    if next(calls) == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(c)) for c in completions]


def endless(prompts: list, completions: list[str], **_: Any) -> list[float]:
    """Finite, but not as a float32."""
    return [1e300 if i else 0.0 for i in range(len(completions))]


def broken(prompts: list, completions: list[str], **_: Any) -> list[float]:
    raise KeyError("ground truth")


def half_flat(prompts: list, completions: list[str], solution: list[str], **_: Any) -> list[float]:
    """Groups whose solution is even have no signal."""
    return [0.0 if int(solution[0]) % 2 == 0 else float(i) for i in range(len(completions))]


async def calculator(episode: Any) -> None:
    """A tool that says a number, twice, and lets the model go on."""
    while episode.can_continue:
        episode.observe("12")
        await episode.generate()


# ---- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "mode"),
    with_whole_runs(
        with_thorough(
            itertools.product(["float32", "bfloat16"], ["off", "r2", "r3"]), [("float32", "off"), ("bfloat16", "r2")]
        ),
        [("bfloat16", "off")],
    ),
)
def test_a_run_measures_what_replay_does(config: Config, metrics_of: Metrics, mode: str, rollout: str) -> None:
    folder = train(config(replay={"mode": mode}, rollout={"dtype": rollout}))
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    with_replay, native = (
        sum(line[f"mismatch/{name}/k3_kl"] for line in lines) for name in ("rollout_vs_old", "rollout_vs_native")
    )
    agreement = min(line["routing/agreement"] for line in lines)
    if rollout == "float32":  # the same model in the same precision: nothing differs
        assert agreement == 1.0
        assert with_replay < 1e-9
    else:  # routers really differ
        assert agreement < 1.0
        assert with_replay < native if mode == "r3" else with_replay == native
    for line in lines:
        assert ("routing/replayed_fraction" in line) == (mode != "off")
        assert math.isfinite(line["loss/total"])
        assert line["loss/skipped"] == 0
        layers = [name for name in line if name.startswith("routing/agreement/layer_")]
        assert "routing/agreement/layer_000" not in layers  # the dense one
        assert layers


def test_auto_says_what_it_picks(config: Config, metrics_of: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(steps=1, replay={"mode": "auto"}, algorithm={"updates_per_rollout": 4}))
    told = capsys.readouterr().out
    assert "routing replay: r3 (4 updates from sample to use" in told
    assert "weights reach the engine by http (the engine takes no other transport)" in told
    assert re.search(r"loading the policy: \S+\npolicy: ready after [0-9]+ s\n", told)


def test_packed_and_padded_batches_give_the_same_loss(config: Config, metrics_of: Metrics) -> None:
    runs = [
        metrics_of(train(config(f"packed-{packed}", batch={"packed": packed, "tokens_per_micro_batch": budget})))
        for packed, budget in ((True, 96), (False, 96), (True, 4096))
    ]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            for name in ("loss/total", "loss/grad_norm", "loss/entropy", "reward/mean"):
                assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), name


def test_a_ratio_other_than_one_in_the_first_update_stops_the_run(config: Config) -> None:
    class Anything:
        """A backend of which the check needs nothing else."""

        device = torch.device("cpu")

    learner = Learner(config(), Anything())  # type: ignore[arg-type]
    learner.check_first_update(0.0)
    with pytest.raises(ReplayStateError, match=r"first update.*exactly 1.*1e-07 apart"):
        learner.check_first_update(1e-7)
    with pytest.raises(ReplayStateError, match="nan apart"):
        learner.check_first_update(math.nan)


# ---- the algorithm --------------------------------------------------------------------------------------------------


def test_a_run_learns(config: Config, metrics_of: Metrics) -> None:
    made = config(
        steps=12,
        rollout={"prompts_per_step": 8, "num_generations": 8},
        optim={"lr": 3e-3},
        reward={"functions": ["tests.train.test_loop:short"]},
    )
    lines = metrics_of(train(made))
    assert sum(line["reward/mean"] for line in lines[-3:]) > sum(line["reward/mean"] for line in lines[:3]) + 1


def short(prompts: list, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-float(len(ids)) for ids in completion_ids]


def test_the_reference_is_the_model_that_training_began_with(config: Config, metrics_of: Metrics) -> None:
    lines = metrics_of(train(config(algorithm={"beta": 0.1, "updates_per_rollout": 1})))
    assert lines[0]["loss/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert lines[2]["loss/reference_kl"] > 1e-6


def test_lora_trains_adapters_and_keeps_the_base(config: Config, metrics_of: Metrics, demo_files: Any) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    made = config(
        model={"lora_rank": 4}, algorithm={"beta": 0.1, "updates_per_rollout": 1}, checkpoint={"export": True}
    )
    folder = train(made)
    lines = metrics_of(folder)
    assert lines[0]["loss/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert lines[2]["loss/reference_kl"] > 1e-7
    before = load_file(demo_files.model / "model.safetensors")
    after = load_file(folder / "checkpoints/step-00000003/hf/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed
    assert {name.split(".")[-2] for name in changed} <= {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_lora_on_experts_and_router_trains_with_gspo_and_r3(config: Config, metrics_of: Metrics) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers", "5")
    made = config(
        model={"lora_rank": 4, "lora_target_modules": ["all-linear", "router"], "lora_merge": False},
        algorithm={"importance_sampling_level": "sequence", "updates_per_rollout": 2},
        checkpoint={"export": True},
        steps=2,
    )
    folder = train(made)
    lines = metrics_of(folder)
    assert all(line["loss/grad_norm"] > 0 and line["routing/aligned"] != 0 for line in lines)
    exported = folder / "checkpoints/step-00000002"
    assert not (exported / "hf").exists()
    from peft import PeftConfig
    from safetensors.torch import load_file

    tensors = load_file(exported / "adapter/adapter_model.safetensors")
    assert all(tensor.any() for tensor in tensors.values())  # every part of the adapter was trained
    assert any(".mlp.gate.lora_B" in name for name in tensors)
    assert any(".experts.3.up_proj.lora_B" in name for name in tensors)
    assert PeftConfig.from_pretrained(str(exported / "adapter")).peft_type == "LORA"


def test_dynamic_sampling_refills(config: Config, metrics_of: Metrics) -> None:
    made = config(
        algorithm={"dynamic_sampling": True, "max_refills": 20},
        reward={"functions": ["tests.train.test_loop:half_flat"]},
    )
    lines = metrics_of(train(made))
    assert sum(line["completion/groups_dropped"] for line in lines) > 0
    assert all(line["reward/frac_groups_zero_std"] == 0 for line in lines)


def test_a_tool_speaks_without_loss_and_without_made_up_routes(config: Config, metrics_of: Metrics) -> None:
    made = config(
        rollout={"environment": "tests.train.test_loop:calculator", "max_turns": 3, "max_tokens": 4},
        log={"traces": 2},
    )
    folder = train(made)
    assert all(line["completion/length_max"] <= 3 * 4 for line in metrics_of(folder))  # of sampled tokens alone
    import moe_replay as mr

    with mr.TraceFile(folder / "traces/step-00000001.mrt") as file:
        for trace in (file[0], file[1]):
            assert trace.valid[:-1].all()  # the next turn's prefill routed what the tool said
            assert not trace.valid[-1].any()


def test_generation_may_run_ahead(config: Config, metrics_of: Metrics) -> None:
    made = config(steps=5, rollout={"max_staleness": 2, "reproducible": False}, replay={"mode": "r3"})
    lines = metrics_of(train(made))
    assert lines[0]["completion/staleness_max"] == 0
    assert 1 <= max(line["completion/staleness_max"] for line in lines) <= 2
    assert all(line["routing/replayed_fraction"] > 0.5 for line in lines)


# ---- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.whole_runs
def test_a_run_that_stopped_goes_on_as_if_it_had_not(config: Config, metrics_of: Metrics) -> None:
    whole = train(config("whole", steps=4, checkpoint={"every": 1}))
    parts = train(config("parts", steps=2))
    assert train(config("parts", steps=4)) == parts
    assert metrics_of(parts) == metrics_of(whole)
    folders = [folder / "checkpoints/step-00000004/policy" for folder in (whole, parts)]
    states = [weights_in(folder) for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    config: Config, metrics_of: Metrics, tmp_path: Path
) -> None:
    """By SIGKILL, in the middle of whatever it does after its second step."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config("killed", steps=1000, checkpoint={"every": 1})))
    with fork_command("train", str(recipe)) as run:
        wait_for_line(run.stdout, "step 2/1000")
        run.kill()
    assert run.returncode == -signal.SIGKILL
    steps = len(metrics_of(tmp_path / "killed")) + 2  # how far it came by then is up to the machine
    whole, killed = (config(name, steps=steps, checkpoint={"every": 1}) for name in ("whole", "killed"))
    assert metrics_of(train(killed)) == metrics_of(train(whole))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that a run of one process has saved; the name of one that is stored whole is that of the model's."""
    from safetensors.torch import load_file

    from moe_replay.train.backends import regions

    found = {}
    for stored, tensor in load_file(folder / "rank-00000.safetensors").items():
        name, shape, _ = regions.parse(stored)
        found[name if tuple(tensor.shape) == shape else stored] = tensor
    return found


def planned_memory(config: TrainConfig) -> MemoryPlan:
    """What `moe-replay plan` says of a run on one rank."""
    return plan_memory(config, ModelSizes.of(read_config(config.model.path)), gpus=1, gpu_gib=80.0)


@pytest.mark.parametrize("kind", with_whole_runs(["fsdp", "megatron"], ["megatron"]))
def test_checkpoints_without_the_optimizer_keep_the_weights(
    config: Config, metrics_of: Metrics, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "megatron":
        moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)  # left by an earlier backward
    settings: dict[str, Any] = {"backend": {"kind": kind}, "algorithm": {"updates_per_rollout": 1}}
    whole = train(config("whole", steps=3, **settings))
    lean = train(config("lean", steps=2, checkpoint={"optimizer": False}, **settings))
    kept = weights_in(lean / "checkpoints/step-00000002/policy")
    assert not [name for name in kept if "exp_avg" in name]
    assert [name for name in weights_in(whole / "checkpoints/step-00000003/policy") if "exp_avg" in name]
    capsys.readouterr()
    train(config("lean", steps=3, **settings))
    assert "resuming after step 2 without the optimizer's state" in capsys.readouterr().out
    expected, found = metrics_of(whole)[2], metrics_of(lean)[2]
    assert found["reward/mean"] == expected["reward/mean"]  # of the same weights
    assert found["loss/grad_norm"] == expected["loss/grad_norm"]
    ends = [weights_in(folder / "checkpoints/step-00000003/policy") for folder in (whole, lean)]
    assert ends[0].keys() == ends[1].keys()
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0])  # but another step was taken
    for folder, step, optimizer in ((whole, 3, True), (lean, 2, False)):
        planned = planned_memory(config("planned", checkpoint={"optimizer": optimizer}, **settings))
        written = (folder / f"checkpoints/step-{step:08d}/policy/rank-00000.safetensors").stat().st_size
        assert written == pytest.approx(planned.saved, rel=0.05)  # names and step counts are not planned
        assert planned.staged == planned.saved


def test_the_export_is_what_was_trained(config: Config, demo_files: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = train(config(checkpoint={"export": True}))
    exported = folder / "checkpoints/step-00000003/hf"
    model = AutoModelForCausalLM.from_pretrained(exported)
    held = weights_in(folder / "checkpoints/step-00000003/policy")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, held[f"model.{name}"]), name
    written = sum(file.stat().st_size for file in exported.glob("*.safetensors"))
    assert written == pytest.approx(planned_memory(config(checkpoint={"export": True})).exported, rel=0.05)
    before = AutoModelForCausalLM.from_pretrained(demo_files.model).state_dict()
    assert not torch.equal(model.state_dict()["model.norm.weight"], before["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(exported)("1+2=")["input_ids"]


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_saves_and_ends(config: Config, metrics_of: Metrics) -> None:
    folder = train(config(steps=50, reward={"functions": ["tests.train.test_loop:interrupting"]}))
    steps = [line["step"] for line in metrics_of(folder)]
    assert steps in ([1], [1, 2])  # step 2 is sampled while step 1 is logged
    assert (folder / f"checkpoints/step-{steps[-1]:08d}").is_dir()


def test_gradients_that_are_not_finite_change_nothing_and_then_stop(
    config: Config, metrics_of: Metrics, tmp_path: Path
) -> None:
    made = config(
        steps=9,
        reward={"functions": ["tests.train.test_loop:endless"]},
        optim={"max_skipped_updates": 3},
        checkpoint={"export": True},
        algorithm={"updates_per_rollout": 1, "advantage": "dr_grpo"},
    )
    with pytest.raises(DivergedError, match="4 updates in a row"):
        train(made)
    lines = metrics_of(tmp_path / "run")
    assert [line["loss/skipped"] for line in lines] == [1, 1, 1, 1]
    saved = weights_in(tmp_path / "run/checkpoints/step-00000004/policy")
    from safetensors.torch import load_file

    start = load_file(Path(made.model.path) / "model.safetensors")
    assert torch.equal(saved["model.model.norm.weight"], start["model.norm.weight"])


def test_a_reward_that_fails_is_named(config: Config) -> None:
    with pytest.raises(RewardError, match=r"tests\.train\.test_loop:broken"):
        train(config(reward={"functions": ["tests.train.test_loop:broken"]}))


async def failing(episode: Any) -> None:
    raise ZeroDivisionError("by the tool")


async def talkative(episode: Any) -> None:
    while True:
        await episode.generate()


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ("failing", r"environment failing raised ZeroDivisionError: by the tool \[sample row \d+\]"),
        ("talkative", r"no further turn is allowed.*at most 2 turns"),
    ],
)
def test_an_environment_that_misbehaves_is_named(config: Config, environment: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(config(rollout={"environment": f"tests.train.test_loop:{environment}", "max_turns": 2}))


def test_an_environment_that_is_not_there_is_named(config: Config) -> None:
    with pytest.raises(ValueError, match=r"environment 'tests\.nowhere:play' cannot be loaded"):
        train(config(rollout={"environment": "tests.nowhere:play"}))


def test_an_engine_without_the_interface_is_refused_before_a_model_is_loaded(config: Config) -> None:
    with pytest.raises(EngineError, match=r"the engine SimpleNamespace is no Engine: expected a subclass of"):
        train(config(model={"path": "nowhere"}), cast(Any, SimpleNamespace()))


def test_an_engine_with_other_weights_is_found_out(config: Config, demo_files: Any) -> None:
    """An engine that says it took the weights and did not."""
    from moe_replay.engines.transformers import TransformersEngine
    from moe_replay.errors import EngineError

    class Forgetful(TransformersEngine):
        def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
            kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            super().update_weights(weights, version, None, weights_id)
            if version:
                self.model.load_state_dict(kept)
            if probe is not None:
                probe.check(self.prompt_logprobs(probe.token_ids), str(self.name))

    engine = Forgetful.from_pretrained(demo_files.model)
    try:
        with pytest.raises(EngineError, match="does not compute with the weights"):
            train(config(steps=8, optim={"lr": 0.02}, rollout={"probe_tolerance": 0.02}), engine)
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
def test_routes_of_another_layer_stop_the_run_before_anything_is_learned(
    config: Config, demo_files: Any, tmp_path: Path, mode: str
) -> None:
    """An engine that reports every layer's routes one layer late: shapes, ids and token ids are all in order."""
    import numpy as np

    import moe_replay as mr
    from moe_replay.engines.transformers import TransformersEngine

    class Late(TransformersEngine):
        def _sample(self, prompts: Any, params: Any) -> Any:
            return [replace(sample, trace=late(sample.trace)) for sample in super()._sample(prompts, params)]

    def late(trace: mr.RouteTrace) -> mr.RouteTrace:
        experts = np.roll(trace.routed_experts, 1, axis=1)
        return mr.RouteTrace(
            trace.token_ids, experts, trace.layers, trace.valid, trace.token_versions[0], num_experts=trace.num_experts
        )

    engine = Late.from_pretrained(demo_files.model)
    try:
        with pytest.raises(mr.AlignmentError, match=r"not those of the tokens they are used for.*layer"):
            train(config(replay={"mode": mode}, rollout={"prompts_per_step": 8}), engine)
    finally:
        engine.close()
    assert not (tmp_path / "run/metrics.jsonl").read_text()


def test_episodes_end_where_the_sequence_is_full() -> None:
    import numpy as np

    from moe_replay.engines.session import Session
    from moe_replay.train.rollout.environments import Episode, EpisodeError
    from moe_replay.train.rollout.prompts import Prompt

    class Words:
        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [7] * len(text)}

    episode = Episode(
        prompt=Prompt(3, "", (1, 2, 3, 4), {}),
        session=Session([1, 2, 3, 4]),
        engine=None,  # type: ignore[arg-type]  never asked
        params=None,  # type: ignore[arg-type]
        tokenizer=Words(),
        max_length=8,
        max_turns=5,
    )
    assert episode.can_continue
    episode.observe("a tool that talks and talks")
    np.testing.assert_array_equal(episode.session.token_ids, [1, 2, 3, 4, 7, 7, 7])  # one place is left to speak
    episode.observe("and talks")
    assert len(episode.session) == 7
    assert episode.can_continue
    episode.session.observe([9])
    assert not episode.can_continue
    with pytest.raises(EpisodeError, match=r"no further turn.*row 3.*8 tokens"):
        asyncio.run(episode.generate())


def test_a_run_that_saves_nothing_leaves_no_checkpoint(config: Config) -> None:
    folder = train(config(steps=1, checkpoint={"every": 0, "at_end": False}))
    assert (folder / "metrics.jsonl").exists()
    assert list((folder / "checkpoints").iterdir()) == []
