"""Engines by name: built in, or of the user's own."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from moe_replay.engines.base import Engine, StartRequest
from moe_replay.engines.pool import EnginePool
from moe_replay.engines.registry import ENGINES, EngineSpec, engine_spec, start_engine, start_sampler
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError, EngineOptionError, MissingExtraError
from moe_replay.records import SamplingParams
from moe_replay.train.config.sections import ModelConfig, RolloutConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.engines import start_request
from moe_replay.train.setup.preflight import check_packages
from moe_replay.utils.plugins import PluginError
from tests.engines.tiny import tiny_model

STARTED: list[StartRequest] = []
MY_SAMPLER = EngineSpec("tests.engines.test_registry:start_tiny", "samples only", takes_weights=False)
MY_SERVER = EngineSpec("tests.engines.test_registry:start_tiny", "servers of mine", is_server=True)
MY_ENGINE = EngineSpec(
    "tests.engines.test_registry:start_tiny",
    "takes everything",
    package="a_package_that_nobody_has",
    check_options="tests.engines.test_registry:check_colour",
    takes_capture=True,
    takes_lora=True,
)


def start_tiny(request: StartRequest) -> Engine:
    """An engine as a user would add one."""
    STARTED.append(request)
    return TransformersEngine(tiny_model("olmoe"), max_length=request.max_length, weight_version=request.weight_version)


def check_colour(capture: str, options: dict[str, str]) -> None:
    if "colour" in options:
        raise EngineOptionError("no colours here", remedy="Leave them out")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_of_the_registry_can_be_imported(name: str) -> None:
    spec = ENGINES[name]
    for path in (str(spec.start), spec.check_version, spec.check_options):
        module, _, function = path.partition(":")
        assert not path or callable(getattr(importlib.import_module(module), function))
    assert spec.description


@pytest.mark.parametrize("name", ["os:getcwd", "os:sep", "tests.engines.test_registry:STARTED"])
def test_what_is_no_engine_is_refused_with_the_recipe(name: str) -> None:
    with pytest.raises(ValidationError, match=f"rollout.engine: '{name}' is no engine"):
        TrainConfig.model_validate({"rollout": {"engine": name}})


def broken(request: StartRequest) -> Engine:
    raise KeyError("no such colour")


def test_an_error_of_a_users_engine_names_it() -> None:
    name = "tests.engines.test_registry:broken"
    with pytest.raises(EngineError, match=f"engine '{name}' raised KeyError: 'no such colour'"):
        start_engine(name, StartRequest(model="anything", max_length=12))


def test_a_function_of_the_users_own_is_an_engine() -> None:
    request = StartRequest(model="anything", max_length=12, weight_version=3, options={"colour": "blue"})
    engine = start_engine("tests.engines.test_registry:start_tiny", request)
    assert STARTED.pop() == request
    ((sample,),) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
    assert (len(sample.trace), sample.weight_version) == (12, 3)


def test_a_spec_of_the_users_own_says_that_it_is_a_server() -> None:
    assert not engine_spec("tests.engines.test_registry:start_tiny").is_server
    assert engine_spec("tests.engines.test_registry:MY_SERVER") is MY_SERVER
    rollout = {"engine": "tests.engines.test_registry:MY_SERVER"}
    with pytest.raises(ValidationError, match="needs server URLs"):
        TrainConfig.model_validate({"rollout": rollout})
    TrainConfig.model_validate({"rollout": rollout | {"urls": ["http://a:1"]}})


def test_settings_are_checked_by_what_a_spec_of_the_users_own_says() -> None:
    model = {"lora_rank": 8}
    rollout = {"engine": "tests.engines.test_registry:MY_ENGINE", "capture": "cross_check"}
    TrainConfig.model_validate({"rollout": rollout | {"lora": True}, "model": model})
    with pytest.raises(ValidationError, match=r"rollout\.capture: no colours here; Leave them out"):
        TrainConfig.model_validate({"rollout": rollout | {"options": {"colour": "blue"}}})
    with pytest.raises(ValidationError, match=r"rollout\.options: no colours here; Leave them out"):
        TrainConfig.model_validate({"rollout": rollout | {"capture": "auto", "options": {"colour": "blue"}}})
    server = {"engine": "tests.engines.test_registry:MY_SERVER", "urls": ["http://a:1"]}
    with pytest.raises(ValidationError, match=r"rollout\.lora: only vllm and rollout_server take"):
        TrainConfig.model_validate({"rollout": server | {"lora": True}, "model": model})


def test_the_package_of_a_spec_of_the_users_own_is_looked_for() -> None:
    config = TrainConfig.model_validate({"rollout": {"engine": "tests.engines.test_registry:MY_ENGINE"}})
    with pytest.raises(MissingExtraError, match=r"pip install a_package_that_nobody_has$"):
        check_packages(config)
    check_packages(config, starts_engine=False)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("vlm", "unknown engine 'vlm'.*did you mean 'vllm'"),
        ("tests.engines.test_registry:nothing", "cannot be loaded"),
        ("tests.engines.test_registry:MY_SAMPLER", "cannot be updated; set one of vllm, transformers, rollout_server"),
    ],
)
def test_a_config_refuses_an_engine_that_cannot_be_trained_with(engine: str, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        TrainConfig.model_validate({"rollout": {"engine": engine, "urls": ["http://a:1"]}})


def test_an_unknown_engine_is_named_with_its_setting() -> None:
    with pytest.raises(PluginError, match="--engine: rollout_server, sglang_server"):
        start_sampler("sglang", StartRequest(model="m"), key="--engine")


def test_a_capture_is_refused_by_engines_without_the_choice() -> None:
    asked = StartRequest(model="m", urls=("http://127.0.0.1:1",), capture="vllm")
    for name in ("transformers", "rollout_server", "sglang_server", "vllm_serve"):
        with pytest.raises(EngineError, match=f"{name} has no choice of captures.*use one of vllm"):
            start_sampler(name, asked)
    with pytest.raises(EngineError, match="no choice of captures"):
        start_engine("tests.engines.test_registry:start_tiny", asked)


def test_the_capture_of_a_run_reaches_its_engine() -> None:
    rollout = RolloutConfig(capture="cross_check")
    assert start_request(rollout, ModelConfig(), "m", 16).capture == "cross_check"


def test_servers_are_one_pool_with_the_token_of_the_environment(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_REPLAY_TOKEN", "from outside")
    request = StartRequest(model=str(tmp_path), urls=(f"http://127.0.0.1:{port}",) * 2)
    assert request.bearer_token == "from outside"
    assert replace(request, token="given").bearer_token == "given"
    for name in ("rollout_server", "sglang_server"):
        with pytest.raises(EngineError, match=r"does not take these options.*colour"):
            start_engine(name, replace(request, options={"colour": "blue"}))
        with pytest.raises(EngineError, match="cannot be reached"):  # a pool asks its servers what they have
            start_engine(name, request)


def test_a_pool_of_one_server(tmp_path: Path) -> None:
    from moe_replay.engines.server.app import build_app
    from tests.engines.serving import serving

    with serving(build_app(TransformersEngine(tiny_model("olmoe"), weight_version=4), "secret")) as url:
        engine = start_engine("rollout_server", StartRequest(model="m", urls=(url,), token="secret"))
        assert isinstance(engine, EnginePool)
        assert engine.weight_version == 4
        engine.close()
