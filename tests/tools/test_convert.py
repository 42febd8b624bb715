"""`moe-replay convert`: commands of ms-swift and verl into recipes that our configuration accepts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.cli.main import main
from moe_replay.tools.convert import ConversionError, convert
from moe_replay.tools.convert.shell_script import read_script
from moe_replay.tools.convert.shell_words import ScriptError
from moe_replay.train.config.file import load_config
from moe_replay.train.config.train_config import TrainConfig

SWIFT = r"""
# the layout of a large run
export MODEL=Qwen/Qwen3-30B-A3B-Instruct-2507
MAX=${MAX_TOKENS:-8192}
NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron rlhf \
    --rlhf_type grpo \
    --model "$MODEL" \
    --save_safetensors true --context_parallel_size 2 --tensor_model_parallel_size 2 \
    --expert_model_parallel_size 4 --pipeline_model_parallel_size 2 \
    --dataset open-r1/DAPO-Math-17k-Processed \
    --global_batch_size 64 --micro_batch_size 2 --steps_per_generation 2 --num_generations 8 \
    --reward_funcs accuracy format \
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.3 --vllm_tensor_parallel_size 4 \
    --vllm_max_model_len 16384 --max_length 8192 --max_completion_length ${MAX} \
    --lr 5e-5 --bf16 true --beta 0.00 --importance_sampling_level sequence \
    --epsilon 3e-4 --epsilon_high 4e-4 --overlong_filter true --loss_type grpo --sleep_level 2 \
    --recompute_granularity selective --dataloader_num_workers 8 --finetune \
    --attention_backend flash --temperature 1.0 --padding_free true --sequence_parallel true \
    --report_to wandb \
    --router_replay_mode R3 # or R2

swift rollout --model Qwen/Qwen3-30B-A3B-Instruct-2507 --vllm_tensor_parallel_size 2 \
   --vllm_max_model_len 10240 --vllm_engine_kwargs '{"enable_return_routed_experts": true, "max_num_seqs": 64}'
"""

VERL = r"""
#!/usr/bin/env bash
set -xeuo pipefail
MODE=${MODE:-R3}
prompt=1024; answer=$((prompt * 2))
if [ "$MODE" = "R3" ]; then RECORD=True; else RECORD=False; fi
DATA=(
    data.train_files="['math/train.parquet']"  # one file
    data.train_batch_size=64
    data.max_prompt_length=${prompt}
    data.max_response_length=${answer}
)
ACTOR=(
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((prompt + answer) * 4))
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.router_replay.mode=$MODE
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    ++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
)
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    "${DATA[@]}" "${ACTOR[@]}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=$RECORD \
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=8 \
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_training_steps=100 \
    trainer.save_freq=-1 "$@" 2>&1 | tee log.txt
"""


def loaded(text: str, tmp_path: Path) -> TrainConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return load_config(path)


def converted(trainer: str, command: str, tmp_path: Path) -> tuple[TrainConfig, str]:
    text, problems = convert(trainer, [command])
    assert problems == []
    return loaded(text, tmp_path), text


# ---- ms-swift --------------------------------------------------------------------------------------------------------


def test_the_example_of_ms_swift(tmp_path: Path) -> None:
    config, text = converted("swift", SWIFT, tmp_path)
    assert config.model.path == "Qwen/Qwen3-30B-A3B-Instruct-2507"
    assert (config.backend.kind, config.backend.tensor_parallel, config.backend.context_parallel) == ("megatron", 2, 2)
    assert (config.backend.pipeline_parallel, config.backend.expert_parallel) == (2, 4)
    assert config.backend.expert_tensor_parallel == 1  # ms-swift's default, which is not ours
    assert config.backend.megatron == {"recompute_granularity": "selective", "attention_backend": "flash"}
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (16, 8)
    assert config.algorithm.updates_per_rollout == 2
    assert (config.data.max_prompt_tokens, config.rollout.max_tokens, config.max_length) == (8192, 8192, 16384)
    assert config.batch.tokens_per_micro_batch == 2 * 16384
    assert (config.algorithm.level, config.algorithm.loss) == ("sequence", "grpo")
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.beta) == (3e-4, 4e-4, 0.0)
    assert config.rollout.options == {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 4}
    assert (config.rollout.sleep, config.rollout.sleep_level) == (True, 2)
    assert config.replay.mode == "r3"
    assert config.reward.functions == ("accuracy", "format")
    assert (config.optim.lr, config.optim.schedule, config.optim.betas) == (5e-5, "cosine", (0.9, 0.95))
    assert "torchrun --nproc-per-node 8 -m moe_replay.cli.main train" in text
    for left_out in ("--dataloader_num_workers 8", "--sequence_parallel true", "--finetune"):
        assert f"#   {left_out}: " in text


def test_the_rollout_command_of_ms_swift_becomes_that_of_our_server() -> None:
    text, _ = convert("swift", [SWIFT])
    assert (
        "moe-replay rollout --model Qwen/Qwen3-30B-A3B-Instruct-2507 --max-length 10240 "
        "--engine-options tensor_parallel_size 2 max_num_seqs 64" in text
    )


def test_every_option_is_a_setting_or_a_comment() -> None:
    text, _ = convert("swift", [SWIFT])
    written = {word[2:] for word in SWIFT.split() if word.startswith("--")} - {"vllm_engine_kwargs", "rlhf_type"}
    assert sorted(name for name in written if name not in text) == ["use_vllm"]  # vLLM is the default


def test_defaults_that_differ_are_written_down(tmp_path: Path) -> None:
    config, text = converted("swift", "megatron rlhf --rlhf_type grpo --model m --dataset d.jsonl", tmp_path)
    assert (config.rollout.temperature, config.algorithm.beta, config.rollout.max_tokens) == (0.9, 0.04, 512)
    assert (config.replay.mode, config.seed, config.rollout.prompts_per_step) == ("off", 42, 2)
    assert "temperature = 0.9" in text
    assert "--temperature: the default" in text
    assert "num_generations" not in tomllib.loads(text)["rollout"]  # 8 in both


def test_the_batch_of_swift_rlhf_is_that_of_trl(tmp_path: Path) -> None:
    """Sequences of a rollout: per device x ranks x steps_per_generation; an update takes some of these passes."""
    command = (
        "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --tuner_type full --use_vllm true "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --steps_per_generation 8 --num_generations 16 "
        "--max_steps 100"
    )
    config, _ = converted("swift", command, tmp_path)
    assert config.backend.kind == "fsdp"
    assert (config.rollout.prompts_per_step, config.algorithm.updates_per_rollout) == (2 * 4 * 8 // 16, 4)
    assert config.steps == 25  # 100 updates
    assert (config.model.lora_rank, config.optim.lr, config.model.gradient_checkpointing) == (0, 1e-5, True)


def test_servers_of_ms_swift(tmp_path: Path) -> None:
    command = (
        "megatron rlhf --rlhf_type grpo --model m --dataset d.jsonl --vllm_mode server --vllm_server_host a b "
        "--vllm_server_port 8000 8001 --vllm_tensor_parallel_size 2"
    )
    config, text = converted("swift", command, tmp_path)
    assert (config.rollout.engine, config.rollout.urls) == ("vllm_server", ("http://a:8000", "http://b:8001"))
    assert not config.rollout.options  # the engine's own, on the server
    assert "moe-replay rollout --engine-options tensor_parallel_size 2" in text


def test_lora_of_swift_rlhf(tmp_path: Path) -> None:
    command = "swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --tuner_type lora --target_modules q_proj v_proj"
    config, _ = converted("swift", command, tmp_path)
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 32.0)
    assert config.model.lora_targets == ("q_proj", "v_proj")
    full, text = converted("swift", f"{command.replace('lora ', 'full ')} --lora_rank 4", tmp_path)
    assert full.model.lora_rank == 0
    assert "#   --lora_rank: of no use without --tuner_type lora" in text


def test_lora_on_megatron(tmp_path: Path) -> None:
    command = "megatron rlhf --rlhf_type grpo --model m --dataset d.jsonl --tuner_type lora --vllm_enable_lora true"
    config, _ = converted("swift", command, tmp_path)
    assert (config.backend.kind, config.model.lora_rank, config.model.lora_targets) == ("megatron", 8, ("all-linear",))
    assert config.rollout.lora


def test_arguments_without_a_launcher_are_those_of_training(tmp_path: Path) -> None:
    text, _ = convert("swift", ["--model", "m", "--dataset", "d.jsonl", "--tensor_model_parallel_size=2"])
    config = loaded(text, tmp_path)
    assert (config.backend.kind, config.backend.tensor_parallel) == ("megatron", 2)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--loss_type cispo", "--loss_type cispo: only grpo, bnpo, dapo, dr_grpo can be converted"),
        ("--reward_funcs accuracy mine", "--reward_funcs mine: a function of yours"),
        ("--min_p 0.1", "--min_p 0.1: tokens are sampled from the policy itself"),
        ("--top_k 50", "--top_k 50: set rollout.top_k"),
        ("--no_such_option 3", "--no_such_option 3: no counterpart is known"),
        ("--num_generations many", "many"),
        ("--lr $LR", "--lr $LR: the script does not assign LR; set optim.lr"),
        ("--dataset a.jsonl b.jsonl#500", "b.jsonl#500: all rows are used, not 500"),
        ("--report_to swanlab", "--report_to swanlab: a metric sink of your own"),
        ("--lr_warmup_fraction 0.1", "--lr_warmup_fraction 0.1: set optim.warmup_steps"),
        ("--vllm_engine_kwargs nonsense", "not a JSON object"),
    ],
)
def test_what_cannot_be_converted_is_a_comment_and_the_rest_is_valid(flags: str, told: str, tmp_path: Path) -> None:
    _, text = converted("swift", f"megatron rlhf --rlhf_type grpo --model m --dataset d.jsonl {flags}", tmp_path)
    assert any(told in line for line in text.splitlines() if line.startswith("#   "))


def test_other_methods_than_grpo_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"only GRPO.*--rlhf_type dpo"):
        convert("swift", ["megatron rlhf --rlhf_type dpo --model m"])


# ---- verl ------------------------------------------------------------------------------------------------------------


def test_a_script_of_verl(tmp_path: Path) -> None:
    config, text = converted("verl", VERL, tmp_path)
    assert (config.backend.kind, config.backend.expert_parallel) == ("megatron", 8)
    assert config.backend.megatron == {"moe_router_dtype": "fp32", "recompute_num_layers": 1}
    assert (config.data.path, config.data.max_prompt_tokens, config.rollout.max_tokens) == (
        "math/train.parquet",
        1024,
        2048,
    )
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (64, 16)
    assert (config.algorithm.updates_per_rollout, config.batch.tokens_per_micro_batch) == (4, 12288)
    assert (config.algorithm.level, config.algorithm.loss) == ("sequence", "grpo")
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.beta) == (3e-4, 4e-4, 0.0)
    assert (config.replay.mode, config.steps, config.checkpoint.every) == ("r3", 100, 0)
    assert config.log.wandb
    assert config.reward.functions == ("verl:verl.utils.reward_score:default_compute_score",)
    assert "actor_rollout_ref.ref.megatron.expert_model_parallel_size=8: the reference model runs" in text


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.actor.megatron.router_replay.mode"]
)
def test_the_replay_mode_of_verl_under_both_of_its_names(key: str, tmp_path: Path) -> None:
    words = [f"{key}=R2", "actor_rollout_ref.model.path=m", "data.train_files=d.parquet"]
    text, problems = convert("verl", words)
    assert problems == []
    assert loaded(text, tmp_path).replay.mode == "r2"


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.beta", 0.001),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01", "algorithm.beta", 0.01),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "algorithm.clip_high", 0.3),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.baseline", "none"),
        ("algorithm.adv_estimator=rloo", "algorithm.baseline", "leave_one_out"),
        ("actor_rollout_ref.rollout.name=sglang", "rollout.engine", "sglang_server"),
        ("async_training.staleness_threshold=0.5", "rollout.max_staleness", 1),
        ("custom_reward_function.path=rewards/mine.py", "reward.functions", ("verl:mine:compute_score",)),
        ("trainer.resume_mode=disable", "resume", False),
        ("actor_rollout_ref.rollout.free_cache_engine=False", "rollout.sleep", False),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=64", "rollout.options", 64),
        ("data.train_files=[a.parquet,b.parquet]", "data.path", "a.parquet"),
    ],
)
def test_options_of_verl(options: str, key: str, value: Any, tmp_path: Path) -> None:
    command = f"python -m verl.trainer.main_ppo data.train_files=d.parquet actor_rollout_ref.model.path=m {options}"
    config, _ = converted("verl", command, tmp_path)
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    assert (found["max_num_seqs"] if key == "rollout.options" else found) == value


def test_what_our_configuration_does_not_accept_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_batch_size=10"
    with pytest.raises(SystemExit) as left:
        main(["convert", "verl", command])
    printed = capsys.readouterr()
    assert left.value.code == 1
    assert "# Not valid yet:\n#   data.path: no prompts" in printed.out
    assert "not valid yet: data.path: no prompts" in printed.err


# ---- the command and scripts -----------------------------------------------------------------------------------------


def test_a_file_a_text_and_words_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["megatron", "rlhf", "--rlhf_type", "grpo", "--model", "m", "--dataset", "d.jsonl"]
    (tmp_path / "train.sh").write_text(" \\\n  ".join(words))
    printed = []
    for arguments in ([str(tmp_path / "train.sh")], [" ".join(words)], words):
        main(["convert", "swift", *arguments])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert loaded(printed[0], tmp_path).model.path == "m"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nemo", "x y"], "no such trainer: expected swift or verl"),
        (["swift", "ls -l"], "no command of ms-swift was found"),
        (["verl", "ls -l"], "no command of verl was found"),
        (["swift", "no-such-file.sh"], "cannot be read"),
        (["swift", "megatron rlhf --model 'm"], "a quote or bracket is not closed"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", *arguments])
    printed = capsys.readouterr()
    assert (printed.out, left.value.code) == ("", 2)
    assert told in printed.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "--help"])
    assert "moe-replay convert swift train.sh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1\nrun $A ${A} '$A' \"$A b\" \\$A", ["run", "1", "1", "$A", "1 b", "$A"]),
        ("run ${A:-x} ${B-y} ${C:+z}", ["run", "x", "y"]),
        ('A=\nrun ${A:-x} "${A-y}"', ["run", "x", ""]),
        ("A='a b'\nrun $A \"$A\"", ["run", "a", "b", "a b"]),
        ('A=(x \'y z\')\nA+=(w)\nrun "${A[@]}" "${NONE[@]}" "$@"', ["run", "x", "y z", "w"]),
        ('A=(\n)\nrun "${A[@]}" b', ["run", "b"]),
        ("A=2\nrun $((A * 3 + 1)) $((7 / 2)) $(((A + 1) % 2))", ["run", "7", "3", "1"]),
        ("run $(date) $UNKNOWN", ["run", "$(date)", "$UNKNOWN"]),
        ("A=${B:=5}\nrun $A $B", ["run", "5", "5"]),
        ('if [ -z "$A" ]; then A=1; fi\nif [ $A != 1 ]; then A=2; else A=3; fi\nrun $A', ["run", "3"]),
        ("A=1\nif [ $A = 2 ]; then A=x; elif [ $A = 1 ]; then A=y; else A=z; fi\nrun $A", ["run", "y"]),
        ("if [ a = a ] && [ b = c ]; then A=1; else A=2; fi\nrun $A", ["run", "2"]),
        ("run a \\\n  b # comment\n", ["run", "a", "b"]),
        ("run a 2>&1 > log.txt b", ["run", "a", "b"]),
    ],
)
def test_what_the_words_of_a_script_stand_for(script: str, words: list[str]) -> None:
    assert read_script(script).commands[-1].words == words


def test_assignments_in_front_of_a_command_are_for_it_alone() -> None:
    script = read_script("A=1 first $A\nsecond $A\nexport B=2\nthird $B")
    assert [command.words for command in script.commands] == [["first", "1"], ["second", "$A"], ["third", "2"]]
    assert script.commands[0].variables["A"] == "1"


def test_parts_that_are_not_followed_are_named() -> None:
    script = read_script("for i in 1 2; do\n  run $i\ndone\nfoo() {\n  run x\n}\nif test -f y; then run y; fi\nlast")
    assert [command.words for command in script.commands] == [["last"]]
    assert script.skipped == ["for i in 1 2", "foo ( ) {", "if test -f y"]


@pytest.mark.parametrize("script", ["run 'a", 'run "a', "run ${A", "run $((1 + 2"])
def test_a_script_that_does_not_end_is_refused(script: str) -> None:
    with pytest.raises(ScriptError, match="not closed"):
        read_script(script)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    convert("swift", [f"A=$(touch {touched}) megatron rlhf --model m --dataset `touch {touched}` --lr $((1+1))"])
    assert not touched.exists()


# ---- docs/coming-from.md ---------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
BESIDE = re.findall(r"```sh\n(.*?)```\n\n```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "recipe"), BESIDE, ids=["swift", "verl"])
def test_the_recipes_of_the_page_load_and_are_what_the_commands_mean(command: str, recipe: str, tmp_path: Path) -> None:
    trainer = "verl" if "verl.trainer" in command else "swift"
    text, problems = convert(trainer, [command])
    assert problems == []
    assert loaded(recipe, tmp_path) == loaded(text, tmp_path)
    remarks = [line for line in text.splitlines() if line.startswith("#   ") and not line.endswith("RECIPE.toml")]
    assert [line for line in remarks if line not in recipe] == []


def test_the_server_of_the_page_is_what_the_command_means() -> None:
    command = re.findall(r"```sh\n(swift rollout.*?)```\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
    ((theirs, ours),) = command
    assert ours in convert("swift", [theirs])[0]
