"""`moe-replay plan`: from a config to a plan, and to status 1 for an impossible layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_replay.cli.main import main

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
