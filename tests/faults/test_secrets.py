"""Tokens and passwords stay out of command lines, files, logs and errors; files get the permissions of the umask."""

from __future__ import annotations

import base64
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_replay.errors import EngineError, MoeReplayError
from moe_replay.train.checkpoint.checkpoint import Checkpoints, TrainerState
from moe_replay.train.config.file import load_config, to_toml
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.run_folder import Run
from moe_replay.utils.files import Write
from moe_replay.utils.secrets import SecretError, find_token, mask_passwords
from tests.train.policy import SmallPolicy

SECRET = "s3cret-token"
VARIABLE = "MOE_REPLAY_TOKEN"


# ---- command lines ---------------------------------------------------------------------------------------------------


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_token(None, None, VARIABLE) is None
    monkeypatch.setenv(VARIABLE, "of the environment")
    assert find_token(None, None, VARIABLE) == "of the environment"
    (tmp_path / "token").write_text(f"{SECRET}\n")
    assert find_token(None, tmp_path / "token", VARIABLE) == SECRET


@pytest.mark.parametrize("content", [None, b"", b" \n", f"{SECRET} more".encode(), b"\xff\xfe"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(SecretError, match="token") as raised:
        find_token(None, tmp_path / "token", VARIABLE)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("command", ["rollout", "verify"])
def test_a_token_on_a_command_line_is_refused(command: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    pytest.importorskip("uvicorn")
    from moe_replay.cli.main import main
    from tests.models import tiny_qwen3_moe

    tiny_qwen3_moe().save_pretrained(tmp_path)
    options = ["--url", "http://127.0.0.1:9", "--engine", "rollout_server"] if command == "verify" else []
    with pytest.raises(SystemExit) as ended:
        main([command, "--model", str(tmp_path), "--token", SECRET, *options])
    assert ended.value.code == 2
    said = "".join(capfd.readouterr())
    assert "can be read by every user" in said
    assert "--token-file" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "words",
    [
        ["--rollout.token", SECRET],
        [f"--rollout.token={SECRET}"],
        ["--rollout.token", SECRET, "two"],
        ["--rollout.urls", "http://a:8000", f"http://me:{SECRET}@b:8000"],
        ["--rollout.options", "timeout", "3", "hf_token", SECRET],
    ],
)
def test_the_trainer_takes_no_secret_from_its_command_line(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="can be read by every user") as raised:
        load_config(None, words)
    assert SECRET not in str(raised.value)


def test_settings_that_only_sound_like_it_are_taken() -> None:
    config = load_config(None, ["--algorithm.importance_sampling_level", "token", "--rollout.max_tokens", "3"])
    assert (config.algorithm.importance_sampling_level, config.rollout.max_tokens) == ("token", 3)


# ---- files and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:pw@host:80/a", "http://me:***@host:80/a"),
        ("two: http://:pw@h and https://u:p%40w@h/", "two: http://:***@h and https://u:***@h/"),
        ("http://me:p@w@host", "http://me:***@host"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("http://me@host", "http://me@host"),
        ("no url: a:b@c", "no url: a:b@c"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, masked: str) -> None:
    assert mask_passwords(text) == masked
    assert mask_passwords(masked) == masked


def server_config(output: Path, **rollout: Any) -> TrainConfig:
    urls = (f"http://me:{SECRET}@10.0.0.2:8000", "http://10.0.0.3:8000")
    return TrainConfig(output=output, rollout={"engine": "rollout_server", "urls": urls, "token": SECRET, **rollout})


def test_nothing_secret_is_in_a_run_folder(tmp_path: Path) -> None:
    config = server_config(tmp_path / "run", options={"api_key": SECRET, "timeout": 3})
    with Run.open(config) as run:
        run.begin(after=0)
        run.log(1, {"a": 1.0})
    content = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert [path for path, text in content.items() if SECRET.encode() in text] == []
    written = tomllib.loads((run.folder / "config.toml").read_text())["rollout"]
    assert written["urls"] == ["http://me:***@10.0.0.2:8000", "http://10.0.0.3:8000"]
    assert written["options"] == {"timeout": 3}
    with pytest.raises(ConfigError, match=r"password of http://me:\*\*\*@10\.0\.0\.2:8000 is masked"):
        load_config(run.folder / "config.toml")


@pytest.mark.parametrize(
    "rollout",
    [
        f'token = ["{SECRET}"]',
        f'token = "{SECRET}\\u0000"',
        f'options = {{ api_key = {{ value = "{SECRET}" }} }}',
        f'urls = ["http://me:{SECRET}\\u0000@host"]',
        f'urls = ["ftp://me:{SECRET}@host"]',
        f'urls = ["me:{SECRET}@host:8000"]',
        f'urls = ["http://me:{SECRET}/x@host:8000"]',
        f'urls = ["http://me:{SECRET}@host:99999"]',
        f'urls = ["http://me:{SECRET}@host", "http://me:{SECRET}@host"]',
        f'urls = "http://me:{SECRET}@host"',
    ],
)
def test_errors_of_settings_do_not_quote_secrets(tmp_path: Path, rollout: str) -> None:
    (tmp_path / "recipe.toml").write_text(f'[rollout]\nengine = "rollout_server"\n{rollout}\n')
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "recipe.toml")
    assert SECRET not in str(raised.value)


def test_a_dry_run_shows_no_password(tmp_path: Path) -> None:
    from moe_replay.tools.dry_run import dry_run

    report = dry_run(server_config(tmp_path)).report
    assert "http://me:***@10.0.0.2:8000" in report
    assert SECRET not in report
    assert SECRET not in repr(server_config(tmp_path)).replace(f"http://me:{SECRET}@", "")  # urls are what was given


@pytest.fixture
def echoing() -> Iterator[tuple[str, list[str]]]:
    """A server that refuses everything and quotes the headers, and the authorizations that it was sent."""
    pytest.importorskip("uvicorn")
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from tests.engines.serving import serving

    seen: list[str] = []

    async def refuse(request: Request) -> Response:
        seen.append(request.headers.get("authorization", ""))
        return PlainTextResponse(f"denied: {dict(request.headers)}", 400)

    with serving(Starlette(routes=[Route("/{path:path}", refuse, methods=["GET", "POST"])])) as url:
        yield url, seen


@pytest.mark.parametrize("form", ["token", "password"])
def test_clients_send_secrets_and_do_not_show_them(
    echoing: tuple[str, list[str]], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    from moe_replay.engines.server.client import RolloutClient
    from moe_replay.records import SamplingParams

    url, seen = echoing
    with_password = url.replace("http://", f"http://me:{SECRET}@")
    client = RolloutClient(url, token=SECRET) if form == "token" else RolloutClient(with_password)
    with caplog.at_level(logging.DEBUG), client, pytest.raises(EngineError) as raised:
        client.generate([[1]], SamplingParams())
    basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert seen[-1] == (f"Bearer {SECRET}" if form == "token" else f"Basic {basic}")
    assert SECRET not in str(raised.value)
    assert SECRET not in client.url
    raw = "httpcore.http11"  # at DEBUG, every header that is sent
    logged = [record for record in caplog.records if record.name != raw]
    assert not [record for record in logged if SECRET in record.getMessage()]


def test_a_server_that_is_not_there_is_named_without_its_password(port: int) -> None:
    pytest.importorskip("httpx")
    from moe_replay.engines.server.client import RolloutClient
    from moe_replay.records import SamplingParams

    with RolloutClient(f"http://me:{SECRET}@127.0.0.1:{port}") as client, pytest.raises(MoeReplayError) as raised:
        client.generate([[1]], SamplingParams())
    assert f"http://me:***@127.0.0.1:{port}" in str(raised.value)
    assert SECRET not in str(raised.value)


# ---- permissions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "of_files", "of_folders"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_files_of_a_run_have_the_permissions_of_the_umask(
    tmp_path: Path, umask: int, of_files: int, of_folders: int
) -> None:
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    (like / "config.json").chmod(0o600)
    policy = SmallPolicy()
    save_rank_files = rank_files(policy)
    before = os.umask(umask)
    try:
        with Run.open(TrainConfig(output=tmp_path / "run")) as run:
            run.begin(after=0)
            run.log(1, {"a": 1.0})
            policy.stage = save_rank_files  # type: ignore[method-assign]
            Checkpoints(run.checkpoints).save(policy, TrainerState(step=1, version=1, data={}), like)
    finally:
        os.umask(before)
    paths = [run.folder, *run.folder.rglob("*")]
    names = {path.name for path in paths}
    assert {"config.toml", "metrics.jsonl", "log.txt", "manifest.json", "model.safetensors", "layout.json"} <= names
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in paths}
    expected = {name: of_folders if (tmp_path / name).is_dir() else of_files for name in modes}
    assert modes == expected


def rank_files(policy: SmallPolicy) -> Callable[[], Write]:
    """Save as the FSDP backend does."""
    from moe_replay.train.backends.fsdp import FsdpState
    from moe_replay.train.setup import launch

    def stage() -> Write:
        with launch.process_group(torch.device("cpu")):
            return FsdpState(policy.model, policy.optimizer).stage()

    return stage


def test_to_toml_keeps_plain_urls(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path, rollout={"engine": "rollout_server", "urls": ("http://h:1/a@b",)})
    assert tomllib.loads(to_toml(config))["rollout"]["urls"] == ["http://h:1/a@b"]
