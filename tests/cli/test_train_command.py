"""`moe-replay train`: its arguments, its help and its dry run. What it trains is tested with the trainer."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")
pytest.importorskip("tyro", reason="the command line needs tyro")

from moe_replay.cli.main import main
from moe_replay.demo import RECIPE
from moe_replay.demo.model import FULL, build_tokenizer
from moe_replay.train.config.file import load_config
from moe_replay.train.config.train_config import TrainConfig
from tests.faults.forked import fork_command
from tests.faults.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
}


MOONLIGHT_16B_A3B = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """What the loop was given."""
    given: list[TrainConfig] = []
    monkeypatch.setitem(
        sys.modules, "moe_replay.train.loop", SimpleNamespace(train=lambda config, **_: given.append(config))
    )
    return given


def model_folder(folder: Path, config: dict[str, Any] = QWEN3_30B_A3B) -> Path:
    """A folder that a dry run takes for a model: a config, a tokenizer, and a file for weights, which is not read."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


def dry_run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a dry run prints; the data of a recipe and its cluster may not be here, and nothing else is missing."""
    status: object = 0
    try:
        main(["train", *map(str, words), "--dry-run"])
    except SystemExit as left:
        status = left.code
    printed = capsys.readouterr()
    problems = printed.err.splitlines()
    assert all(line.startswith(("not ready: no data at ", "not ready: the cluster is too small")) for line in problems)
    assert bool(status) == bool(problems)
    return printed.out


def not_ready(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a dry run finds that would stop the run."""
    with pytest.raises(SystemExit) as left:
        main(["train", *map(str, words), "--dry-run"])
    printed = capsys.readouterr()
    assert printed.out.startswith("replay ")
    assert left.value.code == 2
    return printed.err


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as left:
        main(["train", *map(str, words)])
    printed = capsys.readouterr()
    assert (printed.out, left.value.code) == ("", 2)
    return printed.err.removesuffix("\n")


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_a_module_in_the_working_directory_can_be_named(
    trained: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_of_this_folder.py").write_text(
        "from moe_replay.engines.registry import EngineSpec\n"
        "mine = EngineSpec('engine_of_this_folder:start', 'mine', is_server=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as a console script has it
    main(["train", "--rollout.engine", "engine_of_this_folder:mine", "--rollout.urls", "http://127.0.0.1:1"])
    assert trained[0].rollout.is_server


def test_a_recipe_and_overrides_reach_the_loop(trained: list[TrainConfig]) -> None:
    main(["train", str(RECIPE), "--router-replay-mode", "R2", "--optim.lr", "1e-6"])
    (config,) = trained
    assert config == load_config(RECIPE, ["--replay.mode", "r2", "--optim.lr", "1e-6"])
    assert (config.replay.mode, config.name) == ("r2", "tiny")


def test_neither_is_needed(trained: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_replay.utils.device.cpu_has_bfloat16", lambda: True)
    main(["train"])
    main(["train", "--steps", "3"])
    assert trained == [load_config(RECIPE), load_config(RECIPE, ["--steps", "3"])]


def test_options_without_a_recipe_have_to_fit_the_embedded_one_alone(
    trained: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--algorithm.updates_per_rollout", "128", "--rollout.dtype", "float32"]  # of 16 x 8 sequences, not 8 x 8
    main(["train", *words])
    assert trained == [load_config(RECIPE, words)]
    told = failure(capsys, "--replay.mode", "r4", "--model.path", "")
    assert told.startswith("error: the configuration is invalid\n  replay.mode: should be")


@pytest.mark.parametrize(
    ("has_bfloat16", "words", "expected"),
    [(True, [], "bfloat16"), (False, [], "float16"), (False, ["--rollout.dtype", "float32"], "float32")],
)
def test_the_embedded_default_samples_in_what_the_cpu_has(
    trained: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, words: list[str], expected: str
) -> None:
    monkeypatch.setattr("moe_replay.utils.device.cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr("moe_replay.utils.device.accelerator", lambda: None)
    main(["train", *words])
    assert trained[0].rollout.dtype == expected


def test_a_model_of_ones_own_is_not_trained_by_the_recipe_of_the_embedded_one(trained: list[TrainConfig]) -> None:
    words = ["--model.path", "folder", "--data.path", "rows.jsonl"]
    main(["train", *words])
    assert trained == [load_config(None, words)]


def test_an_error_is_a_text_and_nothing_is_trained(
    capsys: pytest.CaptureFixture[str], trained: list[TrainConfig], tmp_path: Path
) -> None:
    assert failure(capsys, "--replay.mdoe", "r2") == "error: --replay.mdoe: no such option; did you mean --replay.mode?"
    assert failure(capsys, tmp_path / "none.toml").startswith(f"error: {tmp_path / 'none.toml'} cannot be read")
    assert "Put the recipe before all options" in failure(capsys, "--steps", 3, "recipe.toml")
    assert trained == []


def test_only_the_first_rank_tells_of_a_wrong_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert failure(capsys, "--steps", 0).startswith("error on rank 0: ")
    monkeypatch.setenv("RANK", "1")
    assert failure(capsys, "--steps", 0) == ""
    main(["train", "--help"])
    assert capsys.readouterr().out == ""


def test_the_help_is_there_without_loading_transformers() -> None:
    code = (
        "import sys; from moe_replay.cli.main import main; main(['train', '-h']); print('transformers' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert told.startswith("usage: moe-replay train [RECIPE.toml]")
    assert "--replay.mode " in told
    assert told.endswith("False\n")


# ---- dry run ---------------------------------------------------------------------------------------------------------


def test_the_dry_run_of_qwen_on_megatron(capsys: pytest.CaptureFixture[str], qwen: Path) -> None:
    told = dry_run(capsys, ROOT / "recipes" / "qwen3-30b-a3b-megatron.toml", "--model.path", qwen)
    assert told.startswith("replay   r3: as configured\n")
    assert "megatron on 8 ranks, the minimum for this layout" in told
    assert "16 prompts x 8 generations = 128 sequences; 2 updates of 64" in told
    assert "48 decoder layers, 48 of them route, top 8 of 128" in told
    assert "tp 2 with sequence parallel, cp 2, pp 2, vpp 1, dp 1; experts: ep 4, etp 1" in told
    assert "16,384 per micro-batch" in told
    assert [line.split()[-1] for line in told.splitlines() if line[:2] in ("0 ", "1 ")] == ["0-23", "24-47"]


def test_the_dry_run_of_qwen_on_fsdp(
    capsys: pytest.CaptureFixture[str], qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    told = dry_run(capsys, ROOT / "recipes" / "qwen3-30b-a3b-fsdp.toml", "--model.path", qwen)
    assert "fsdp on 8 ranks\n" in told
    assert "rollout_server at http://127.0.0.1:8000" in told
    assert "16 micro-batches on each of 8 data-parallel ranks" in told


def test_the_dry_run_of_the_librarys_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry_run(capsys, RECIPE)
    assert "replay   r3: as configured" in told
    assert "the embedded tiny model" in told
    assert f"top {FULL.top_k} of {FULL.num_experts}\n" in told


def test_the_dry_run_says_why_auto_chose(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry_run(capsys, RECIPE, "--replay.mode", "auto", "--steps-per-generation", 8)
    assert told.startswith("replay   r3: 8 updates from sample to use")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend.pipeline-parallel", "5"], "decoder layers cannot be divided evenly"),
        (["--backend.expert-parallel", "3"], "experts cannot be divided evenly"),
        (["--backend.tensor-parallel", "3"], "attention heads cannot be divided evenly"),
        (["--rollout.max-tokens", "40000"], "longer than the model's context: expected at most 40960"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], qwen: Path
) -> None:
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-megatron.toml"
    assert told in not_ready(capsys, recipe, "--model.path", qwen, *words)


def test_adapters_that_vllm_does_not_take_are_an_error(capsys: pytest.CaptureFixture[str], qwen: Path) -> None:
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-lora.toml"
    words = (recipe, "--model.path", qwen, "--model.lora-target-modules", "q_proj", "down_proj", "--rollout.lora")
    assert "adapters of all projections of an expert, or of none" in not_ready(capsys, *words, "true")
    dry_run(capsys, *words, "false")


def test_adapters_of_experts_and_routers_can_be_sent_alone(capsys: pytest.CaptureFixture[str], qwen: Path) -> None:
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-lora.toml"
    targets = ("--model.lora-target-modules", "all-linear", "router")
    dry_run(capsys, recipe, "--model.path", qwen, *targets, "--rollout.lora", "true")


def test_ranks_that_the_layout_does_not_divide_are_an_error(
    capsys: pytest.CaptureFixture[str], qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-megatron.toml"
    assert "a multiple of 8" in not_ready(capsys, recipe, "--model.path", qwen)


def test_a_model_that_cannot_be_read_is_said_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = not_ready(capsys, ROOT / "recipes" / "qwen3-30b-a3b-fsdp.toml", "--model.path", tmp_path)
    assert "not ready: the model cannot be read" in told
    assert f"not ready: model.path: no weights in {tmp_path}" in told
    assert f"not ready: no tokenizer in {tmp_path}" in told


def test_a_dense_model_can_only_be_trained_without_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model_folder(tmp_path, {"model_type": "qwen3"})
    recipe = ROOT / "recipes" / "qwen3-30b-a3b-fsdp.toml"
    assert "has no routers" in not_ready(capsys, recipe, "--model.path", tmp_path)
    assert "has no routers" in dry_run(capsys, recipe, "--model.path", tmp_path, "--replay.mode", "off")


@pytest.mark.distributed
@pytest.mark.whole_runs
def test_of_several_ranks_one_speaks() -> None:
    """torchrun itself: tests/faults/test_bad_input.py."""
    outputs = []
    for rank in range(2):
        with fork_command("train", "--help", environment={"RANK": str(rank), "WORLD_SIZE": "2"}) as done:
            outputs.append(done.communicate(LIMIT_S)[0])
        assert done.returncode == 0, outputs
    assert outputs[0].count("usage: moe-replay train") == 1
    assert outputs[1] == ""


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_loaded_and_is_in_the_docs(recipe: Path) -> None:
    assert load_config(recipe).replay.mode == "r3"
    assert f"recipes/{recipe.name}" in (ROOT / "docs" / "first-run.md").read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_dry_run_of_every_recipe(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where the environment of a recipe is imported from
    shape = MOONLIGHT_16B_A3B if "moonlight" in recipe.stem else QWEN3_30B_A3B
    model_folder(tmp_path, shape)
    told = dry_run(capsys, recipe, "--model.path", tmp_path)
    assert told.startswith("replay   r3: as configured\n")
    assert f"{shape['num_hidden_layers']} decoder layers" in told
    assert "Layout not checked" not in told


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_tried_on_the_embedded_model(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    told = dry_run(capsys, recipe, "--tiny")
    assert "the embedded tiny model" in told
    assert "on 1 rank" in told
    given, tiny = load_config(recipe), load_config(recipe, tiny=True)
    assert tiny.name == f"{given.name}-tiny"
    assert (tiny.replay, tiny.optim) == (given.replay, given.optim)
    assert tiny.algorithm.model_copy(update={"updates_per_rollout": 1}) == given.algorithm.model_copy(
        update={"updates_per_rollout": 1}
    )
    assert (tiny.backend.kind, tiny.batch.packed) == (given.backend.kind, given.batch.packed)
    assert tiny.model.lora_rank == given.model.lora_rank
    assert tiny.model.lora_target_modules == given.model.lora_target_modules
    assert tiny.rollout.max_staleness == given.rollout.max_staleness
    assert (tiny.rollout.environment is None) == (given.rollout.environment is None)
    assert (tiny.model.path, tiny.data.path, tiny.rollout.is_server) == ("", "", False)


def test_the_command_line_wins_over_the_sizes_of_tiny(trained: list[TrainConfig]) -> None:
    main(["train", str(RECIPES[0]), "--tiny", "--steps", "7", "--rollout.engine", "transformers"])
    (config,) = trained
    assert (config.steps, config.rollout.engine, config.rollout.options) == (7, "transformers", {})
    main(["train", "--tiny"])
    assert (trained[1].model.path, trained[1].steps) == ("", 3)


def test_tiny_without_vllm_samples_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_replay.train.config.file.find_spec", lambda name: None)
    assert load_config(RECIPES[0], tiny=True).rollout.engine == "transformers"


# ---- what would stop a run is found before it begins -----------------------------------------------------------------

REWARDS_OF_MY_OWN = """
def needs(prompts, completions, answer, level=1, **columns): return [1.0 for _ in completions]
def needs_nothing(prompts, completions, completion_ids, **columns): return [1.0 for _ in completions]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model's config, rewards and data, that a recipe can name."""
    model_folder(tmp_path)
    (tmp_path / "rewards_of_my_own.py").write_text(REWARDS_OF_MY_OWN)
    rows = [{"prompt": "1+1", "solution": "2", "answer": "2"}, {"prompt": "1+2", "solution": "3"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(f'[model]\npath = "{tmp_path}"\n[data]\npath = "data.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def ready(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Status of a dry run, and what it says would stop the run."""
    try:
        main(["train", "recipe.toml", "--dry-run", *words])
        code: object = 0
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    assert printed.out.startswith("replay ")
    return code, printed.err


@pytest.mark.usefixtures("own")
def test_a_dry_run_finds_a_column_that_a_reward_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert ready(capsys) == (0, "")
    assert ready(capsys, "--reward.functions", "rewards_of_my_own:needs_nothing") == (0, "")
    code, told = ready(capsys, "--reward.functions", "accuracy", "rewards_of_my_own:needs")
    assert code == 2
    assert (
        "reward 'rewards_of_my_own:needs' needs a column that a row does not have [sample data.jsonl, line 2]" in told
    )
    assert "expected a column 'answer', found columns ['prompt', 'solution']" in told


@pytest.mark.usefixtures("own")
def test_a_dry_run_warns_of_settings_without_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4096")
    main(["train", "recipe.toml", "--dry-run", "--rollout.max-turns", "3", "--cluster.ranks-per-node", "8"])
    printed = capsys.readouterr().out
    assert "warning  rollout.max_turns = 3 has no effect without rollout.environment\n" in printed
    assert 'warning  cluster.ranks_per_node = 8 has no effect without cluster.launcher = "ray"\n' in printed
    assert "warning  4096 ranks share " in printed


@pytest.mark.usefixtures("own")
def test_a_rank_of_adapters_above_that_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    _, told = ready(capsys, "--model.lora-rank", "1000000")
    assert "model.lora_rank: adapters would be larger than the weights they adapt: expected at most 2048" in told


@pytest.mark.usefixtures("own")
def test_a_dry_run_finds_data_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = ready(capsys, "--data.path", "nowhere.jsonl")
    assert (code, told.count("\n")) == (2, 1)
    assert "not ready: no data at nowhere.jsonl" in told


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend.device", "npu"], "the device npu needs torch_npu"),
        (["--weight-sync.transport", "ipc", "--rollout.options", "tensor_parallel_size", "2"], None),
        (["--rollout.options", "tensor_paralel_size", "2"], "Did you mean 'tensor_parallel_size'?"),
        (["--rollout.engine", "transformers", "--output", "data.jsonl"], "data.jsonl is not a folder"),
        (["--rollout.engine", "transformers", "--output", "data.jsonl/run"], "data.jsonl is not a folder"),
        (["--output", "used", "--resume", "false"], "used already contains a run"),
        (["--algorithm.beta", "0.1", "--model.reference", "nowhere"], "model.reference: no weights in nowhere"),
        (["--data.max-prompt-length", "2"], "every prompt is empty or too long: expected at most 2 tokens"),
        (["--eval.every", "5", "--data.eval-path", "nowhere.jsonl"], "no data at nowhere.jsonl"),
        (["--data.epochs", "1", "--optim.warmup-steps", "99"], "longer than the run"),
        (["--rollout.environment", "nowhere:play"], "environment 'nowhere:play' cannot be loaded"),
        (["--model.attn-implementation", "flsh"], "Transformers has no such attention"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(
    words: list[str], told: str | None, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "used").mkdir()
    (own / "used" / "metrics.jsonl").touch()
    code, said = ready(capsys, *words)
    assert (code != 0, said.count("not ready: ")) == ((False, 0) if told is None else (True, 1))
    assert (told or "") in said
    assert not (own / "runs").exists()


NOT_FOR_A_DRY_RUN = (
    *(
        "vllm",
        "ray",
        "megatron",
        "peft",
        "accelerate",
        "datasets",
        "math_verify",
        "sympy",
        "wandb",
        "matplotlib",
        "tyro",
    ),
    *("transformers.modeling_utils", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("moe_replay.megatron.weights", "moe_replay.train.checkpoint.checkpoint"),
)


@pytest.mark.parametrize("words", [(), ("--backend.kind", "megatron"), ("--reward.functions", "math_verify")])
def test_a_dry_run_imports_neither_engines_nor_models(own: Path, words: tuple[str, ...]) -> None:
    """They take most of the time of a command that reads a few small files."""
    if find_spec("vllm") is None or ("megatron" in words and find_spec("megatron") is None):
        pytest.skip("the recipe needs packages that are not installed")
    code = (
        "import sys\nfrom moe_replay.cli.main import main\n"
        f"main(['train', 'recipe.toml', '--dry-run', *{words}])\n"
        f"print('loaded:', [name for name in {NOT_FOR_A_DRY_RUN} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=own, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.endswith("loaded: []\n"), done.stderr
    assert "tokens   at most" in done.stdout


def test_a_dry_run_collects_no_garbage_and_leaves_the_collector_as_it_was(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import gc\ncollects = gc.isenabled()\ndef score(completions, **columns): return [1.0 for _ in completions]\n"
    )
    (own / "watching_rewards.py").write_text(code)
    monkeypatch.delitem(sys.modules, "watching_rewards", raising=False)
    assert gc.isenabled()
    ready(capsys, "--reward.functions", "watching_rewards:score")
    assert not sys.modules["watching_rewards"].collects
    assert gc.isenabled()


def test_the_process_of_a_dry_run_ends_without_collecting_garbage(own: Path) -> None:
    code = (
        "import atexit, gc\nfrom moe_replay.cli.main import main\n"
        "atexit.register(lambda: print('left to collect:', gc.collect(), gc.get_freeze_count() > 10_000))\nmain()"
    )
    words = ["train", "recipe.toml", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=own, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.endswith("left to collect: 0 True\n"), done.stdout + done.stderr


@pytest.mark.usefixtures("own")
def test_a_dry_run_finds_all_problems(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = ready(
        capsys,
        *("--output", "data.jsonl", "--model.lora-rank", "4096", "--rollout.environment", "nowhere:play"),
        *(
            "--reward.functions",
            "nowhere:reward",
            "--data.path",
            "nowhere.jsonl",
            "--model.attn-implementation",
            "flsh",
        ),
    )
    assert code == 2
    assert [line.split()[2] for line in told.splitlines()] == [
        *("environment", "reward", "model.attn_implementation:", "the", "no", "model.lora_rank:")
    ]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("words", "absent", "told"),
    [
        ((), "vllm", "rollout.engine = \"vllm\" needs the package vllm. pip install 'moe-replay[vllm]'"),
        (("--rollout.engine", "transformers"), "math_verify", "the reward 'math_verify' needs the package math_verify"),
        (("--model.lora-rank", "8"), "peft", "model.lora_rank needs the package peft. pip install 'moe-replay[lora]'"),
        (("--backend.kind", "megatron"), "megatron", "pip install 'moe-replay[megatron]'"),
        (("--log.wandb",), "wandb", "log.wandb needs the package wandb. pip install 'moe-replay[wandb]'"),
    ],
)
def test_a_dry_run_finds_a_package_that_is_missing(
    words: tuple[str, ...], absent: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object:
        return None if name == absent else find_spec(name)

    monkeypatch.setattr("moe_replay.train.setup.preflight.find_spec", find)
    monkeypatch.setattr("moe_replay.utils.plugins.find_spec", find)
    code, said = ready(capsys, *words)
    assert code == 3
    assert told in said


@pytest.mark.usefixtures("own")
def test_a_dry_run_names_all_packages_that_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ("vllm", "math_verify")
    monkeypatch.setattr(
        "moe_replay.train.setup.preflight.find_spec", lambda name: None if name in absent else find_spec(name)
    )
    code, told = ready(capsys)
    assert code == 3
    assert "needs the package vllm; the reward 'math_verify' needs the package math_verify" in told
    assert "pip install 'moe-replay[train,vllm]'" in told


@pytest.mark.usefixtures("own")
def test_a_dry_run_finds_a_release_that_is_too_old(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("moe_replay.train.setup.preflight.version", lambda package: "0.20.0")
    code, told = ready(capsys)
    assert code != 0
    assert "vLLM 0.20.0 cannot be used for rollouts with routes" in told


def test_a_run_finds_it_before_the_warm_start(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before a download: nothing of the model is looked at."""

    def find_sources(config: object, status: object) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr("moe_replay.train.setup.sources.find_sources", find_sources)
    words = ["train", "--output", str(own / "run"), "--rollout.engine", "transformers"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--data.path", "data.jsonl", "--reward.functions", "rewards_of_my_own:needs"])
    assert left.value.code == 2
    assert "expected a column 'answer'" in capsys.readouterr().err
    monkeypatch.setattr("moe_replay.train.setup.preflight.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 3
    assert "needs the package transformers" in capsys.readouterr().err


@pytest.mark.usefixtures("own")
def test_memory_is_checked_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-30B-A3B in float32 with AdamW: 16 bytes for each of 30.5e9 parameters, and 2 in the engine."""
    monkeypatch.setattr("moe_replay.tools.memory_check.host_memory", lambda: 500 * 2**30)
    code, told = ready(capsys, "--backend.device", "cpu")
    assert code == 1
    assert "the run does not fit into host memory: expected at most 500.0 GiB, found 511.8 GiB" in told
    with pytest.raises(SystemExit) as left:
        main(["train", "recipe.toml", "--backend.device", "cpu"])
    assert left.value.code == 1
    assert "does not fit into host memory" in capsys.readouterr().err
    monkeypatch.setattr("moe_replay.tools.memory_check.host_memory", lambda: 640 * 2**30)
    assert ready(capsys, "--backend.device", "cpu") == (0, "")


@pytest.mark.usefixtures("own")
def test_memory_of_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(mem_get_info=lambda: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr("moe_replay.tools.memory_check.accelerator", lambda: "cuda")
    monkeypatch.setattr("moe_replay.tools.dry_run.accelerator", lambda: "cuda")
    monkeypatch.setattr("torch.get_device_module", lambda kind: gpu)
    monkeypatch.setenv("WORLD_SIZE", "8")
    code, told = ready(capsys, "--model.gradient-checkpointing", "true")
    assert code == 1
    assert "the run is estimated not to fit into GPU memory: expected at most 80.0 GiB" in told
    served = ["--rollout.engine", "rollout_server", "--rollout.urls", "http://127.0.0.1:1"]
    main(["train", "recipe.toml", "--dry-run", "--model.gradient-checkpointing", "true", *served])
    assert "of 80.0 GiB on the fullest of 8 GPUs, in phase 'forward, backward'" in capsys.readouterr().out


@pytest.mark.usefixtures("own")
def test_engines_that_do_not_share_the_gpus_of_a_machine_evenly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_replay.utils.device.accelerator", lambda: "cuda")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["--rollout.engine", "vllm", "--rollout.options", "tensor_parallel_size", "4"]
    _, told = ready(capsys, *words, "--rollout.engines-per-node", "3")
    assert "rollout.engines_per_node = 2 engines of 4 GPUs each, found 3 engines of 4 GPUs each" in told
    _, told = ready(capsys, *words, "--rollout.engines-per-node", "2")
    assert "share the devices" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rollout.engines-per-node", "2"], "vllm (2 on every trainer node, 4 GPUs each)"),
        (["--cluster.launcher", "ray", "--cluster.engines", "3"], "vllm (3 on separate GPUs, 4 GPUs each)"),
        (
            [
                "--cluster.launcher",
                "ray",
                "--cluster.engines",
                "4",
                "--cluster.trainer-nodes",
                "2",
                "--cluster.placement",
                "colocated",
            ],
            "vllm (4 on the 2 trainer nodes, 4 GPUs each)",
        ),
    ],
)
def test_where_engines_are_started(words: list[str], told: str) -> None:
    from moe_replay.tools.dry_run import dry_run as report

    options = ["--rollout.engine", "vllm", "--rollout.options", "tensor_parallel_size", "2", "data_parallel_size", "2"]
    assert told in report(load_config(None, [*options, *words])).report


def test_sequences_of_a_step_are_divided_evenly(capsys: pytest.CaptureFixture[str], qwen: Path) -> None:
    """Sixteen sequences of which fifteen fit: two micro-batches of eight."""
    words = ["--model.path", qwen, "--data.path", "x.jsonl", "--batch.tokens-per-micro-batch", 15 * 1024]
    sizes = ["--rollout.prompts-per-step", 2, "--rollout.num-generations", 8, "--rollout.max-tokens", 512]
    told = dry_run(capsys, *words, *sizes)
    assert "= 16 sequences" in told
    assert "2 micro-batches on each of 1 data-parallel ranks, 8 sequences with 8,192 tokens in each" in told
    assert "16,384 tokens in all" in told
