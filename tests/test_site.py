"""The site has every page, the troubleshooting page every error, the reference every public name."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.test_public_api import public_names

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))}
PEERS = ("verl", "ms-swift", "slime", "SkyRL", "NeMo-RL", "prime-rl", "Unsloth", "TRL")


def error_classes() -> set[str]:
    """The public subclasses of `MoeReplayError` anywhere in the package, by name."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"MoeReplayError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return {name for name in found if not name.startswith("_")}


def test_every_error_is_in_troubleshooting_and_nothing_else() -> None:
    named = set(re.findall(r"`(\w+Error)`", (DOCS / "troubleshooting.md").read_text()))
    classes = error_classes()
    assert len(classes) > 40
    assert sorted(classes - named) == []
    assert sorted(named - classes) == []


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    quoted = re.findall(r"^\| `\w+Error`: (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = "\n".join(
        node.value
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    parts = [part.strip() for text in quoted for one in re.findall(r"\*(.+?)\*", text) for part in one.split("...")]
    assert len(parts) > 10
    assert [part for part in parts if part.removesuffix(" replay") not in messages] == []


def test_every_page_is_in_the_navigation_once() -> None:
    entries = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(entries) == pages


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(f"{thing.__module__}.{thing.__qualname__}" for thing in public_names().values())


def test_the_comparison_has_every_framework_in_every_table_and_a_date() -> None:
    text = (DOCS / "comparison.md").read_text()
    assert re.search(r"Last looked at:\s+20\d\d-\d\d-\d\d", text)
    tables = text.count("| **moe-replay** |")
    assert tables == 3
    assert [peer for peer in PEERS if text.count(f"| **{peer}** |") != tables] == []
    cited = {int(number) for number in re.findall(r"\[\[(\d+)\]\]", text)}
    assert cited == {int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)}


def test_the_recipe_of_the_first_run_is_valid() -> None:
    pytest.importorskip("pydantic")
    from moe_replay.train.config.train_config import TrainConfig

    (recipe,) = re.findall(r"```toml\n(.*?)```", (DOCS / "first-run.md").read_text(), re.DOTALL)
    config = TrainConfig.model_validate(tomllib.loads(recipe))
    assert config.replay.mode == "r3"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_commands_of_a_page_exist(page: Path) -> None:
    commands = {path.stem for path in (ROOT / "src/moe_replay/cli").glob("*.py")}
    named = re.findall(r"^(?:\$ )?moe-replay (\w+)", page.read_text(), re.MULTILINE)
    assert [name for name in named if name not in commands] == []
