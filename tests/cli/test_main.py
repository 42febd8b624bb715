"""The command as a whole: list of commands, versions, exit codes, and how fast it says what it can do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import moe_replay as mr
from moe_replay.cli.main import COMMANDS, main
from moe_replay.cli.train import SCHEMA
from moe_replay.demo import RECIPE
from moe_replay.errors import EXIT_CODES, AlignmentError, EngineError, ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.train.config.reference import schema_text
from moe_replay.train.output.run_folder import RunWriteError
from moe_replay.train.rollout.rewards import RewardError
from moe_replay.train.run import DivergedError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "moe_replay.cli.main"]


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert isinstance(left.value.code, int)
    return left.value.code


# ---- what it says about itself ---------------------------------------------------------------------------------------


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"moe-replay {mr.__version__}\n"


def test_the_help_lists_every_command_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines() if re.match(r"  [a-z]+ ", line)] == list(COMMANDS)
    assert EXIT_CODES.rstrip() in told
    assert status() == 2
    assert capsys.readouterr().out == told


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_a_help_text_needs_neither_torch_nor_numpy(words: list[str]) -> None:
    """They are what makes a command start slowly."""
    code = "import sys; from moe_replay.cli.main import main\ntry: main(sys.argv[1:])\n" + (
        "except SystemExit: pass\nprint(sorted({'torch', 'numpy', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
    assert "usage: moe-replay" in done.stdout
    assert EXIT_CODES in done.stdout
    assert done.stdout.endswith("[]\n"), done.stderr


@pytest.mark.slow
def test_names_of_the_package_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, moe_replay as mr; assert 'torch' not in sys.modules; assert set(mr.__all__) <= set(dir(mr));"
        "assert mr.attach is sys.modules['moe_replay.replay.controller'].attach; mr.attach_nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "module 'moe_replay' has no attribute 'attach_nothing'" in done.stderr


def test_settings_are_read_and_ray_is_driven_without_torch(tmp_path: Path) -> None:
    """A recipe with an error is refused at once; ranks and engines import what they need."""
    (tmp_path / "recipe.toml").write_text('model.path = ""\n[rollout]\nengine = "vllm"\n')
    code = (
        "import sys, moe_replay.cluster.control, moe_replay.cluster.driver\n"
        "from pathlib import Path\nfrom moe_replay.train.config.file import load_config\n"
        "print(load_config(Path(sys.argv[1]), []).rollout.engine, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, tmp_path / "recipe.toml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout == "vllm False\n", done.stderr


# ---- exit codes ------------------------------------------------------------------------------------------------------


def test_the_table_in_the_documentation_is_this_one() -> None:
    told = (ROOT / "docs" / "tools.md").read_text()
    assert re.findall(r"^\| \*\*(\d+)\*\* \|", told, re.MULTILINE) == [str(int(one)) for one in ExitStatus]
    assert re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE) == [str(int(one)) for one in ExitStatus]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    positional = {"convert": "nonsense", "report": "run", "compare": "run", "cluster": "status", "completion": "bash"}
    positional["plugin"] = "ms-swift"
    words = [positional[name]] if name in positional else []
    assert status(name, *words, "--nonsense", "1") == ExitStatus.WRONG_INPUT
    assert "nonsense" in "".join(capsys.readouterr())


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("inspec", "file") == ExitStatus.WRONG_INPUT
    assert "inspec: no such command" in (told := capsys.readouterr().err)
    assert "Did you mean inspect?" in told


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AlignmentError("shifted"), 1),
        (DivergedError("not finite"), 1),
        (MoeReplayError("a wrong setting"), 2),
        (EngineError("it died"), 3),
        (MissingExtraError("no vLLM"), 3),
        (RewardError("it raised"), 3),
        (RunWriteError("disk full"), 3),
    ],
)
def test_a_run_that_ends_with_an_error(
    error: MoeReplayError, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: object, **_: object) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "moe_replay.train.loop", SimpleNamespace(train=train))
    assert status("train") == expected
    assert capsys.readouterr().err == f"error: {error}\n"


UNEXPECTED = """
import sys
from moe_replay.cli import main as cli
class Command:
    @classmethod
    def from_arguments(cls, words): return cls()
    def __call__(self): raise {error}
cli.COMMANDS["inspect"] = type("Source", (), {{"load": lambda self: Command}})()
sys.argv[1:] = ["inspect"]
cli.main()
"""


@pytest.mark.parametrize(("error", "expected"), [("OSError('no device')", 3), ("KeyboardInterrupt", 130)])
def test_what_nobody_expects(error: str, expected: int) -> None:
    code = UNEXPECTED.format(error=error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == expected
    assert ("OSError: no device" in done.stderr) is (expected == 3)


def test_every_limit_of_the_server_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit):
        main(["rollout", "--help"])
    told = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name, text in (("max-samples", "Maximum samples per request"), ("update-s", "Timeout for the whole body")):
        assert re.search(rf"--limits\.{name} \S+ {text}", told), told


@pytest.mark.parametrize("words", ["--help", "train --help", "inspect --help"])
def test_a_reader_that_has_seen_enough(words: str) -> None:
    """`| head` ends the command as SIGPIPE ends others, without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run([*COMMAND, *words.split()], stdout=closed, stderr=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stderr) == (141, b"")


# ---- shell completion and the schema of recipes ----------------------------------------------------------------------


COMPLETE = """
complete() { shift $(($# - 2)); function=$1; }
eval "$(moe-replay completion bash)"
next() { COMP_WORDS=(moe-replay "$@"); COMP_CWORD=$#; COMPREPLY=(); $function; echo "${COMPREPLY[@]}"; }
"""


def test_completion_in_bash(tmp_path: Path) -> None:
    pytest.importorskip("tyro", reason="completion is tyro's")
    command = tmp_path / "moe-replay"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moe_replay.cli.main "$@"\n')
    command.chmod(0o755)
    lines = {
        "tr": ["train"],
        "train recipe.toml --algorithm.rollout": [
            "--algorithm.rollout-correction",
            "--algorithm.rollout-correction-low",
            "--algorithm.rollout-correction-high",
        ],
        "train --replay.mode ''": ["off", "r2", "r3", "auto"],
        "train --dry": ["--dry-run"],
        "verify --device ''": ["auto", "cpu", "cuda", "npu"],
        "doctor --need v": ["vllm", "verl"],
        "cluster status --eng": ["--engines"],
        "conv": ["convert"],
        "train rec": [],  # a file, which the shell completes
    }
    script = COMPLETE + "\n".join(f"next {line}" for line in lines)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert dict(zip(lines, map(str.split, done.stdout.splitlines()), strict=True)) == lines, done.stderr


def test_completion_for_an_unknown_shell() -> None:
    assert status("completion", "tcsh") == ExitStatus.WRONG_INPUT


def test_the_schema_in_the_package_is_that_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--schema"])
    remedy = "python -m moe_replay.train.config.reference > docs/config.md"
    assert capsys.readouterr().out == schema_text() == SCHEMA.read_text(), remedy


def test_the_schema_accepts_the_recipes_and_what_the_configuration_accepts() -> None:
    schema = json.loads(SCHEMA.read_text())
    validator = pytest.importorskip("jsonschema").Draft7Validator(schema)
    for recipe in [*(ROOT / "recipes").glob("*.toml"), RECIPE]:
        assert list(validator.iter_errors(tomllib.loads(recipe.read_text()))) == [], recipe
    accepted = [{"replay": {"mode": "R3"}}, {"router_replay_mode": "R2"}, {"log": {"sinks": ["mine:sink"]}}]
    assert all(validator.is_valid(tables) for tables in accepted)
    refused = [{"replay": {"mod": "r3"}}, {"replay": {"mode": "r4"}}, {"steps": 0}, {"rollout": {"top_p": 2.0}}]
    assert not any(validator.is_valid(tables) for tables in refused)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_names_the_schema(recipe: Path) -> None:
    named = re.match(r"#:schema (\S+)\n", recipe.read_text())
    assert named
    assert (recipe.parent / named[1]).resolve() == SCHEMA.resolve()


def test_the_plugin_of_ms_swift_is_one_import(capsys) -> None:
    main(["plugin", "ms-swift"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("import moe_replay.integrations.ms_swift ")
    assert find_spec("moe_replay.integrations.ms_swift")
