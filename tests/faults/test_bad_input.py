"""Bad input ends with one error that names the file and line or the key, and with status 2; never with a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="the trainer's own dependency")
pytest.importorskip("tyro", reason="the command line needs tyro")
pytest.importorskip("starlette", reason="the server comes with vLLM")
pytest.importorskip("transformers", reason="tiny models")

from moe_replay.cli.main import main
from moe_replay.demo import RECIPE
from moe_replay.distributed.ranks import OtherRankError
from moe_replay.engines.base import StartRequest
from moe_replay.engines.registry import start_engine
from moe_replay.engines.server.app import build_app
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError, EngineOptionError, MoeReplayError
from moe_replay.tools.dry_run import parallel_of, work_of
from moe_replay.train.config.file import load_config
from moe_replay.train.rollout.prompts import DataError, Rows, load_prompts, read_rows
from moe_replay.train.setup import launch
from moe_replay.weights.model_folder import ModelError, read_config
from tests.combinations import with_whole_runs
from tests.engines.serving import serving
from tests.engines.tiny import tiny_model

SERVED = ["--rollout.engine", "rollout_server", "--rollout.urls"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What `moe-replay train` prints before it exits with status 2; nothing is trained."""
    trained: list[Any] = []
    loop = SimpleNamespace(train=lambda config, **_: trained.append(config))
    monkeypatch.setitem(sys.modules, "moe_replay.train.loop", loop)

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as left:
            main(["train", *map(str, words)])
        printed = capsys.readouterr()
        assert (left.value.code, trained) == (2, [])
        assert printed.out == "" or "--dry-run" in words
        return printed.err

    return run


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--output", ""], "output: empty path"),
        (["--rollout.temperature", "inf"], "rollout.temperature: should be a finite number"),
        (["--reward.weights", "nan"], "reward.weights.0: should be a finite number"),
        (["--optim.lr", "inf"], "optim.lr: should be a finite number"),
        (["--optim.betas", "nan", "0.5"], "optim.betas.0: should be a finite number"),
        (["--optim.max-grad-norm", "nan"], "optim.max_grad_norm: should be"),
        (["--rollout.prompts-per-step", 10**12], "use at most 1048576"),
        (["--rollout.num-generations", 10**12, "--algorithm.updates-per-rollout", "7"], "use at most 1048576"),
        (["--rollout.max-staleness", 10**12], "rollout.max_staleness: should be less than or equal to 1000"),
        (["--steps", 10**30], "steps: 1000000000000000000000000000000 is too large"),
        (["--steps", "9" * 5000], "steps: Unable to parse input string as an integer"),
        (["--backend.kind", "megatron", "--backend.tensor-parallel", 10**12], "backend.tensor_parallel: "),
        (["--seed", 2**63], "seed: should be less than"),
        (["--data.path", "a\0b"], r"data.path: 'a\x00b' is not valid text"),
        (["--data.path", "caf\udce9"], r"data.path: 'caf\udce9' is not valid text"),
        (["--data.path", "a" * 300], "data.path: a file name of more than 255 bytes"),
        (["--model.path", f"b/{'é' * 200}", "--data.path", "x"], "model.path: a file name of more than 255 bytes"),
        (["--output", "a" * 300], "output: a file name of more than 255 bytes"),
        ([*SERVED, "http://"], "rollout.urls: 'http://' has no host"),
        ([*SERVED, "http://a:99999"], "Port out of range"),
        ([*SERVED, "http://a:0"], "port 0"),
        ([*SERVED, "http://a:b"], "cannot be used: Port could not be cast"),
        ([*SERVED, "http://[::1"], "cannot be used: Invalid IPv6 URL"),
        ([*SERVED, "http://a b"], "contains white space"),
        ([*SERVED, "http://a?b"], "has a query or a fragment"),
        ([*SERVED, "ftp://a"], "write http://a"),
        ([*SERVED, "http://a", "http://a"], "'http://a' is listed twice"),
        ([*SERVED, "http://a", "--rollout.min-servers", "2"], "rollout.min_servers: 2 of 1 servers"),
    ],
)
def test_a_value_that_cannot_be_used(ended: Callable[..., str], words: list[object], told: str) -> None:
    lines = ended(*words).splitlines()
    assert lines[0] == "error: the configuration is invalid"
    assert len(lines) == 2
    assert told in lines[1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"steps = " + b"9" * 5000, "is not valid TOML: Exceeds the limit"),
        (b"x = " + b"[" * 10_000, "is not valid TOML: it is nested too deeply"),
        ("steps = 1".encode("utf-16"), "Save it as text in UTF-8"),
        (b'name = "caf\xe9"', "Save it as text in UTF-8"),
        (b"rollout = 5", "rollout: should be a valid dictionary"),
        (b"[rollout]\noptions = 5\n", "rollout.options: should be a valid dictionary"),
        (b"[rollout.options]\na = 99999999999999999999\n", "rollout.options.a: "),
        (b"[optim]\nlr = nan\n", "optim.lr: should be a finite number"),
    ],
)
def test_a_recipe_that_cannot_be_used(ended: Callable[..., str], tmp_path: Path, content: bytes, told: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(content)
    printed = ended(recipe, "--rollout.options", "b", "1")
    assert printed.startswith(f"error: {recipe} is ")
    assert told in printed


def test_a_recipe_that_is_no_file(ended: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path, tmp_path / "pipe.toml", tmp_path / "none.toml"):
        assert ended(path).startswith(f"error: {path} cannot be read: ")


def test_a_config_of_a_model_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="the model cannot be read"):
        read_config(tmp_path)


def test_the_largest_micro_batch_is_planned_at_once() -> None:
    """A dry run plans no more sequences than a step has."""
    config = load_config(RECIPE, ["--batch.tokens-per-micro-batch", str(2**31 - 1)])
    work = work_of(config, parallel_of(config.backend, 1))
    assert (len(work.lengths), work.micro_batches) == (config.rollout.sequences, 1)


def test_limits_may_be_infinite() -> None:
    config = load_config(None, ["--optim.max-grad-norm", "inf", "--algorithm.clip-high", "inf"])
    assert (config.optim.max_grad_norm, config.algorithm.clip_high) == (float("inf"), float("inf"))


def test_a_number_of_ranks_that_is_none(ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE is not a positive integer: found 'two'" in ended("--dry-run")


def test_a_number_of_ranks_without_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(launch.LaunchError, match="WORLD_SIZE is 2, but RANK is not set"):
        launch.process_group(torch.device("cpu")).__enter__()


@pytest.mark.parametrize("rank", ["2", "-1", "first", ""])
def test_a_rank_beyond_their_number(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.LaunchError, match=f"expected 0 <= RANK < WORLD_SIZE, found RANK = '{rank}'"):
        launch.process_group(torch.device("cpu")).__enter__()


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(launch, "device_type", lambda kind: "cuda")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    with pytest.raises(launch.LaunchError, match="on this machine: expected at most 2, one per device, found 3 ranks"):
        launch.choose_device(load_config(None))


# ---- data ------------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer of characters with a chat template that demands what templates of real models demand."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        from jinja2 import Environment
        from jinja2.exceptions import TemplateError

        if conversation[0]["role"] == "tool":
            raise TemplateError("conversations start with a user")
        return Environment().from_string("{{ messages[0].role + messages[0].content }}").render(messages=conversation)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"prompt": "caf\xe9"}', "line 2 is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "line 2 is not valid JSON"),
        (b'{"prompt": "\\ud83d"}', "line 2 has half of a surrogate pair"),
        (b'{"prompt": "a", "b": {"c": "\\uDE00"}}', "line 2 has half of a surrogate pair"),
        (b"[" * 100_000, "line 2 is nested too deeply"),
        (b'{"a":' * 100_000, "line 2 is nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "line 2 cannot be read"),
        (b"null", "line 2 is not a JSON object: expected {...}, found NoneType"),
        (b"\x00\x01\x02", "line 2 is not valid JSON"),
        (b"<html>", "line 2 is not valid JSON"),
    ],
)
def test_a_line_that_cannot_be_read(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + content + b"\n")
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}, {told}")
    assert "\n" not in str(caught.value)


def test_a_file_in_utf_16_or_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "a"}'.encode("utf-16"))
    with pytest.raises(DataError, match=r"line 1 is UTF-16: expected UTF-8\. Convert"):
        read_rows(path)
    path.write_bytes('{"prompt": "a"}'.encode("utf-8-sig"))
    assert read_rows(path) == [{"prompt": "a"}]


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user"} | fields]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "a prompt has no messages"),
        (None, "neither text nor messages"),
        ({"role": "user", "content": "a"}, "neither text nor messages"),
        ([None], "neither text nor messages"),
        ([{"content": "a"}], "a message without a role"),
        ([{"role": 5, "content": "a"}], "a message without a role"),
        (message(), "message 0 of a prompt has no text as its content"),
        (message(content=None), "found NoneType"),
        (message(content=7), "found int"),
        (message(content=[{"type": "text", "text": "a"}]), "Join the text of its parts"),
        (
            [{"role": "tool", "content": "a"}],
            "template does not take these messages: TemplateError: conversations",
        ),
        ("\ud83d", "cannot be tokenized: UnicodeEncodeError"),
    ],
)
def test_a_prompt_that_cannot_be_used(tmp_path: Path, prompt: Any, told: str) -> None:
    pytest.importorskip("jinja2", reason="chat templates")
    rows = Rows([{"prompt": "fine"}, {"prompt": prompt}], tmp_path / "rows.jsonl", lines=[1, 3])
    with pytest.raises(DataError) as caught:
        load_prompts(rows, Words(), 100)
    assert f"[sample {tmp_path / 'rows.jsonl'}, line 3]" in str(caught.value)
    assert told in str(caught.value)


def test_the_call_of_a_tool_needs_no_content() -> None:
    pytest.importorskip("jinja2", reason="chat templates")
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    rows = [{"prompt": [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "b"}]}]
    assert len(load_prompts(rows, Words(), 100)) == 1


def test_tokens_that_the_model_does_not_have() -> None:
    rows = [{"prompt": "abc"}, {"prompt": "abz"}]
    assert len(load_prompts(rows, Words(), 100, vocab_size=ord("z") + 1)) == 2
    with pytest.raises(DataError, match=r"row 1.*below 122, the model's vocabulary, found 122.*of another model"):
        load_prompts(rows, Words(), 100, vocab_size=ord("z"))


def test_what_is_no_file_of_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        read_rows(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        read_rows(tmp_path / f"{'a' * 300}.jsonl")
    pytest.importorskip("datasets", reason="needs datasets")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="is not a datasets folder, or damaged"):
        read_rows(tmp_path / "folder.jsonl")


def refusal(path: Path) -> str:
    """One line that names the path; empty if it can be read."""
    try:
        read_rows(path)
    except DataError as error:
        told = str(error)
    else:
        return ""
    assert told.startswith(str(path))
    assert "\n" not in told
    return told


def test_a_damaged_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    rows = [{"prompt": "abc" * number} for number in range(50)]
    for number, damage in enumerate((b"", b"{", b"[]", b"\xff" * 500)):
        for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
            folder = tmp_path / f"{number} {name}"
            datasets.Dataset.from_list(rows).save_to_disk(str(folder))
            (folder / name).write_bytes(damage)
            assert refusal(folder) or read_rows(folder) == rows  # the description is not always needed


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    rows, path = [{"prompt": "abc" * number} for number in range(50)], tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, write_page_checksum=True)
    whole, random, refused = path.read_bytes(), np.random.default_rng(0), 0
    damaged = [whole[: len(whole) // 2], b"", b"PAR1", b"\0" * len(whole), whole[:4] + b"\0" * 40 + whole[44:]]
    for position in random.integers(0, len(whole), 60).tolist():
        damaged.append(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
    for content in damaged:
        path.write_bytes(content)
        refused += bool(refusal(path))
    assert refused > len(damaged) // 2


# ---- names and options that do not exist -----------------------------------------------------------------------------

MEGATRON = ["--backend.kind", "megatron", "--backend.megatron"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model.attn_implementation", "spda"], "model.attn_implementation: Transformers has no such attention"),
        (["--model.attn_implementation", ""], "model.attn_implementation: Transformers has no such attention"),
        (["--reward.functions", "no_such_module:f"], "reward 'no_such_module:f' cannot be loaded: No module named"),
        (["--reward.functions", "verl:no_such_module:f"], "'no_such_module:f' cannot be loaded: No module named"),
        (["--reward.functions", "os:path"], "reward.functions: 'os:path' is not callable"),
        (["--rollout.environment", "os:nothing"], "environment 'os:nothing' cannot be loaded"),
        (["--algorithm.advantage", "os:sep"], "algorithm.advantage: 'os:sep' is not callable"),
        (["--log.sinks", "a..b:c"], "metric sink 'a..b:c' cannot be loaded"),
        (["--rollout.engine", "..:c"], "engine '..:c' cannot be loaded"),
        ([*MEGATRON, "recompute_granularty", "full"], "Did you mean 'recompute_granularity'?"),
        ([*MEGATRON, "no_such_setting", "1"], "backend.megatron.no_such_setting: Megatron-Core has no such setting"),
    ],
)
def test_names_that_do_not_exist_are_found_before_anything_is_loaded(
    ended: Callable[..., str], words: list[str], told: str
) -> None:
    pytest.importorskip("megatron.core" if words[0] == "--backend.kind" else "transformers")
    assert told in ended(*words, "--dry-run")


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"max_length": 5, "weights": 1}, {"batch_size": "x"}])
def test_options_that_an_engine_does_not_have(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    tiny_model("olmoe").save_pretrained(tmp_path)
    with pytest.raises(EngineOptionError) as caught:
        start_engine("transformers", StartRequest(model=str(tmp_path), max_length=32, options=options))
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    engine = start_engine("transformers", StartRequest(model=str(tmp_path), max_length=32, options={"batch_size": 3}))
    assert engine.healthy()
    engine.close()


def test_options_that_a_client_does_not_have() -> None:
    pytest.importorskip("tenacity")
    request = StartRequest(model="m", urls=("http://127.0.0.1:1",), options={"enforce_eager": True})
    for name in ("rollout_server", "sglang_server"):
        with pytest.raises(EngineOptionError, match=r"does not take these options.*enforce_eager"):
            start_engine(name, request)


@pytest.mark.parametrize("where", ["taken", "impossible", "elsewhere", "nonsense"])
def test_a_port_that_cannot_be_listened_on(where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if where == "taken" else 99999 if where == "impossible" else 0
        host = {"elsewhere": "192.0.2.1", "nonsense": "a" * 300}.get(where, "127.0.0.1")
        with pytest.raises(SystemExit) as left:
            main(["rollout", "--model", str(tmp_path), "--port", str(port), "--host", host])
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: cannot listen on {host} port {port}: ")
    assert told.count("\n") == 1


# ---- once for all ranks ----------------------------------------------------------------------------------------------


def raising(error: MoeReplayError) -> Any:
    def train(config: Any, **_: Any) -> None:
        raise error

    return SimpleNamespace(train=train)


def known(error: MoeReplayError) -> MoeReplayError:
    error.known_on_all_ranks = True
    return error


@pytest.mark.parametrize(
    ("rank", "error", "told", "status"),
    [
        ("0", known(MoeReplayError("no such file")), "error on rank 0: no such file\n", 2),
        ("1", known(MoeReplayError("no such file")), "", 2),
        ("1", MoeReplayError("not on this machine"), "error on rank 1: not on this machine\n", 2),
        ("0", OtherRankError("failed on rank 1", exit_status=2), "error on rank 0: failed on rank 1\n", 2),
        ("2", OtherRankError("failed on rank 1"), "", 3),
        ("0", EngineError("it died"), "error on rank 0: it died\n", 3),
    ],
)
def test_an_error_of_all_ranks_is_printed_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    error: MoeReplayError,
    told: str,
    status: int,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setitem(sys.modules, "moe_replay.train.loop", raising(error))
    with pytest.raises(SystemExit) as left:
        main(["train"])
    assert (capsys.readouterr().err, left.value.code) == (told, status)


@pytest.mark.distributed
@pytest.mark.whole_runs
def test_torchrun_prints_it_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moe_replay.cli.main"]
    done = subprocess.run([*command, "train", "--steps", "0"], capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert done.stderr.count("the configuration is invalid") == 1
    assert done.stderr.count("error on rank 0: ") == 1


# ---- options of one engine are not those of another ------------------------------------------------------------------


def test_another_engine_does_not_get_the_options_of_the_recipes(tmp_path: Path) -> None:
    assert load_config(RECIPE).rollout.options
    assert load_config(RECIPE, ["--rollout.engine", "vllm"]).rollout.options == load_config(RECIPE).rollout.options
    other = ["--rollout.engine", "transformers"]
    assert load_config(RECIPE, other).rollout.options == {}
    for words in ([*other, "--rollout.options", "batch_size", "3"], ["--rollout.options", "batch_size", "3", *other]):
        assert load_config(RECIPE, words).rollout.options == {"batch_size": 3}
    assert load_config(RECIPE, [*SERVED, "http://a"]).rollout.options == {}


@pytest.mark.parametrize("engine", with_whole_runs(["transformers", "rollout_server"], ["rollout_server"]))
def test_the_embedded_recipe_trains_with_another_engine(
    engine: str,
    demo_files: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The recipe names vLLM and options of vLLM; the quick model stands in for the one that it would make."""
    monkeypatch.setattr("moe_replay.demo.prepare", lambda **_: demo_files)
    monkeypatch.setenv("MOE_REPLAY_TOKEN", "secret")
    sizes = [
        "--steps",
        "1",
        "--rollout.prompts-per-step",
        "2",
        "--replay.score-native-every",
        "0",
        "--checkpoint.no-export",
    ]
    words = ["train", "--output", str(tmp_path / "run"), *sizes, "--rollout.engine", engine]
    with ExitStack() as stack:
        if engine == "rollout_server":
            pytest.importorskip("starlette")
            served = TransformersEngine.from_pretrained(demo_files.model)
            stack.callback(served.close)
            words += ["--rollout.urls", stack.enter_context(serving(build_app(served, "secret"))), "--log.no-report"]
        main(words)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    report = tmp_path / "run" / "report.html"
    assert report.is_file() == (engine != "rollout_server")
    assert (f"report: {report}" in capsys.readouterr().out) == report.is_file()
