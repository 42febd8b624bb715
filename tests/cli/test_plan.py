"""`moe-replay plan`: from a config to a plan, and to status 1 for an impossible layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_replay.cli.main import main
from moe_replay.demo import RECIPE
from tests.support.released_models import FOLDER, find_fit, plan_released, released_table

pytest.importorskip("tyro", reason="the command line needs tyro")
transformers = pytest.importorskip("transformers", reason="configs are read by Transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=48,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        vocab_size=151936,
    )
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--auto", "--length", "10", "--prompt", "10"], "no completion fits behind the prompt: expected --length abo"),
        (["--auto", "--length", "1"], "no completion fits behind the prompt: expected --length above 1"),
        (["--prompt", "-3"], "--prompt is negative: found -3"),
    ],
)
def test_a_prompt_that_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert failure(capsys, "--model", str(folder), *words).startswith(f"error: {expected}")


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "error: no model to plan for: expected --model MODEL, or --recipe RECIPE\n"
    assert failure(capsys) == failure(capsys, "--auto") == expected
    expected = "error: the recipe trains the embedded model. Name a model to plan for: --model MODEL\n"
    assert failure(capsys, "--recipe", str(RECIPE)) == failure(capsys, "--recipe", str(RECIPE), "--auto") == expected


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["plan", *words])
    assert left.value.code == 2
    return capsys.readouterr().err


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_plan_of_a_folder_and_of_its_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--tp",
        "4",
        "--cp",
        "2",
        "--pp",
        "4",
        "--world",
        "16384",
        "--ep",
        "64",
        "--etp",
        "1",
        "--sequences",
        "8192",
        "--length",
        "4096",
        "--micro-batch",
        "2",
    ]
    found = told(capsys, "--model", str(folder), *words)
    assert told(capsys, "--model", str(folder / "config.json"), *words) == found
    assert (found["parallel"]["dp"], found["work"]["micro_batches"]) == (512, 8)
    assert found["rows"] == 2 * 4096 // 8
    assert found["stages"][3]["routing_layers"] == [list(range(36, 48))]
    assert found["stages"][0]["batch_bytes"] == 1024 * (12 * 8 + 1)
    main(["plan", "--model", str(folder), *words])
    assert "16384 ranks on 2048 nodes" in capsys.readouterr().out


def test_one_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(folder), "--pp", "2", "--vpp", "2", "--dp", "2", "--rank", "3"]
    found = told(capsys, *words)
    assert found["coordinates"] == {"tp": 0, "cp": 0, "dp": 1, "pp": 1, "etp": 0, "ep": 0, "edp": 1}
    assert found["routing_layers"] == [list(range(12, 24)), list(range(36, 48))]
    main(["plan", *words])
    assert "rows: 8192" in capsys.readouterr().out


def test_uneven_stages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", str(folder), "--pp", "3", "--chunk-layers", "15", "17", "16")
    assert [len(stage["routing_layers"][0]) for stage in found["stages"]] == [15, 17, 16]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--tp 3", "attention heads"),
        ("--ep 3 --dp 3 --sequences 3", "experts cannot"),
        ("--pp 5", "decoder layers"),
        ("--world 10 --tp 4", "world size does not fit"),
        ("--world 16 --tp 4 --dp 2", "world size does not fit"),
        ("--dp 3", "sequences of a step"),
        ("--micro-batch 0", "sequences of a step"),
        ("--rank 1", "no such rank"),
        ("--tp 4 --etp 1", "wrong ranks"),
        ("--width 1000", "input width"),
    ],
)
def test_what_cannot_be(folder: Path, words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=reason) as ended:
        main(["plan", "--model", str(folder), *words.split()])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


SIZES = {
    "OLMoE-1B-7B": (6.9, 1.3),
    "DeepSeek-V2-Lite": (15.7, 2.7),
    "Moonlight-16B-A3B": (16.0, 2.9),
    "gpt-oss-20b": (20.9, 4.2),
    "Qwen3-30B-A3B": (30.5, 3.4),
    "Qwen3.5-35B-A3B, text": (34.7, 3.5),
    "Mixtral-8x7B": (46.7, 12.9),
    "GLM-4.5-Air": (106.9, 13.4),
    "Qwen3-235B-A22B": (235.1, 22.2),
    "DeepSeek-V3": (671.0, 37.6),
}
"""Billions of parameters that the configs amount to, and those that a token meets, embedding and head included."""


@pytest.mark.slow
def test_the_table_of_released_models_is_in_the_docs() -> None:
    table = released_table(list(plan_released())) + "\n"
    page = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text()
    printed = page.partition("<!-- released -->\n")[2].partition("<!-- /released -->")[0]
    assert printed == table, "the output of `python -m tests.support.released_models` belongs into docs/tools.md"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    sizes = {name: size for name, size, *_ in rows}
    assert sizes == {name: f"{total} B, {active} B active" for name, (total, active) in SIZES.items()}
    assert [row[2] for row in rows] == ["LoRA", "full"] * len(SIZES)


def test_a_released_model_fits_as_the_plan_of_a_recipe_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moe_replay.weights.model_folder import read_config
    from moe_replay.weights.model_sizes import ModelSizes

    config = FOLDER / "qwen3-30b-a3b.json"
    fit = find_fit(ModelSizes.of(read_config(str(config))), "full", 8, 79.6)
    assert fit is not None
    assert fit.mark == "o"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        [model]
        path = "{config}"
        [data]
        path = "prompts.jsonl"
        max_prompt_length = 1024
        [batch]
        tokens_per_micro_batch = 8192
        [backend]
        offload = true
        [rollout]
        max_tokens = 7168
        sleep = true
        dtype = "bfloat16"
        options = {{ tensor_parallel_size = 8, kv_cache_memory_bytes = {8 * 2**30} }}
        """
    )
    plan = told(capsys, "--recipe", str(recipe), "--gpus", "8")
    assert max(sum(parts.values()) for parts in plan["phases"].values()) / 2**30 == pytest.approx(fit.peak_gib)
