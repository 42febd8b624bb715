"""Dockerfile and compose file: what they copy exists, and the commands in them are commands of ours.

They are not built here: that needs Docker, a GPU and gigabytes.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moe_replay.cli.rollout import RolloutCommand
from moe_replay.train.config.file import load_config

yaml = pytest.importorskip("yaml")
tyro = pytest.importorskip("tyro")

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = {"MODEL": "Qwen/Qwen3-30B-A3B", "RECIPE": "recipe.toml"}


def command_of(service: str) -> list[str]:
    words = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["command"]
    return [re.sub(r"\$\{(\w+)[^}]*\}", lambda found: VARIABLES[found[1]], word) for word in words]


def instructions(name: str) -> list[str]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def test_the_server_and_the_trainer_of_the_compose_file_fit_together() -> None:
    name, *words = command_of("rollout")
    server: Any = tyro.cli(RolloutCommand, args=words)
    assert (name, server.model, server.engine) == ("rollout", VARIABLES["MODEL"], "vllm")
    name, recipe, *words = command_of("trainer")
    config = load_config(None, [*words, "--data.path", "data.jsonl"])
    assert (name, recipe) == ("train", "recipe.toml")
    assert config.model.path == server.model
    assert config.rollout.is_server
    assert config.rollout.urls == (f"http://rollout:{server.port}",)


def test_the_health_of_the_server_is_asked_where_it_answers() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["rollout"]
    assert service["healthcheck"]["test"][-1] == "http://127.0.0.1:8000/health"
    assert "/health" in (ROOT / "src/moe_replay/engines/server/app.py").read_text()


def test_the_image_copies_and_installs_what_there_is() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in instructions("COPY") for word in line.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = [line.partition("=")[2] for line in instructions("ARG") if line.startswith("EXTRAS=")]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()
    assert instructions("ENTRYPOINT") == ['["moe-replay"]']
