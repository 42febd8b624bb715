"""The documentation is true to the repository: snippets of the README run, links lead somewhere, nothing is missing."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_public_api import public_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("", "src/moe_replay", "src/moe_replay/train")  # that paths in the text are relative to
ELSEWHERE = ("torch/",)
DOCS = ROOT / "docs"
SOURCES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))}
PEERS = ("verl", "ms-swift", "slime", "SkyRL", "NeMo-RL", "prime-rl", "Unsloth", "TRL")
CHINESE = ("README.zh.md", "docs/zh/index.md")
MOST_PAGES = 25
TOKEN = "only this test knows it"


def test_the_snippets_of_the_readme_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    from moe_replay.engines.server.app import build_app
    from moe_replay.engines.transformers import TransformersEngine
    from tests.engines.serving import serving
    from tests.models import tiny_qwen3_moe

    readme = (ROOT / "README.md").read_text()
    in_trainer, with_engine = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    tiny_qwen3_moe().save_pretrained(tmp_path)
    names: dict[str, Any] = {}
    exec(in_trainer.replace('"PATH"', repr(str(tmp_path))), names)
    routers = [site.module.weight for site in names["replay"].sites.values()]
    assert all(weight.grad.norm() > 0 for weight in routers)

    sampler = TransformersEngine.from_pretrained(tmp_path, max_length=32)
    with serving(build_app(sampler, TOKEN)) as url:
        filled = with_engine.replace("http://127.0.0.1:8000", url).replace('"TOKEN"', repr(TOKEN))
        exec(filled, names)
        assert names["engine"].weight_version == 1
    assert len(names["traces"]) == 16
    assert all(trace.covered_fraction > 0 for trace in names["traces"])


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links whose file or heading does not exist."""
    for file, heading in re.findall(r"\]\(([^)#\s:]*)(?:#([^)]*))?\)", text):
        target = page.parent / file if file else page
        if not target.exists():
            yield f"{page.name}: {file}"
        elif heading and heading not in anchors(target.read_text() if file else text):
            yield f"{page.name}: {file}#{heading}"


def dead_paths(page: Path, text: str) -> Iterator[str]:
    """Files that the text names in backticks and that do not exist."""
    for path in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|toml|txt|md))`", text):
        if not path.startswith(ELSEWHERE) and not any((ROOT / folder / path).exists() for folder in FOLDERS):
            yield f"{page.name}: {path}"


def anchors(text: str) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert [*dead_links(page, text), *dead_paths(page, text)] == []


def test_classes_that_the_terms_name_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    terms = (DOCS / "api.md").read_text().partition("## Terms")[2].partition("## Signatures")[0]
    named = re.findall(r"`((?:[A-Z][a-z]+){2,})\b", terms)
    assert named
    assert sorted({name for name in named if not re.search(rf"\bclass {name}\b", source)}) == []


def test_dead_links_and_paths_are_found() -> None:
    text = "# A b\n[x](missing.md) [y](docs/api.md#nothing) [z](#a-b) [ok](docs/api.md#errors)"
    text += " `tests/no.py` `train/loop.py`"
    page = ROOT / "README.md"
    assert list(dead_links(page, text)) == ["README.md: missing.md", "README.md: docs/api.md#nothing"]
    assert list(dead_paths(page, text)) == ["README.md: tests/no.py"]


# ---- the site --------------------------------------------------------------------------------------------------------


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


def test_every_page_but_lab_notes_is_in_the_navigation_once() -> None:
    entries = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(entries) == sorted(page for page in pages if not page.startswith("lab/"))
    assert len(entries) <= MOST_PAGES


def test_the_signatures_have_every_public_name() -> None:
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(f"{thing.__module__}.{thing.__qualname__}" for thing in public_names().values())


def fenced(text: str) -> list[str]:
    return re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", CHINESE)
def test_code_of_a_chinese_page_is_in_an_english_one(page: str) -> None:
    english = "\n".join(path.read_text() for path in PAGES if path.relative_to(ROOT).as_posix() not in CHINESE)
    chinese = (ROOT / page).read_text()
    assert [block for block in fenced(chinese) if block not in fenced(english)] == []
    commands = [code for code in re.findall(r"`(moe-replay [^`\n]+)`", chinese) if "[" not in code]
    assert [code for code in commands if code not in english] == []


def test_the_comparison_has_every_framework_in_every_table_and_a_date() -> None:
    text = (DOCS / "comparison.md").read_text()
    assert re.search(r"Last looked at:\s+20\d\d-\d\d-\d\d", text)
    tables = text.count("| **moe-replay** |")
    assert tables == 3
    assert [peer for peer in PEERS if text.count(f"| **{peer}** |") != tables] == []
    cited = {int(number) for number in re.findall(r"\[\[(\d+)\]\]", text)}
    assert cited == {int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)}


def test_the_recipes_of_the_first_run_are_valid() -> None:
    pytest.importorskip("pydantic")
    from moe_replay.train.config.train_config import TrainConfig

    own, recipe = re.findall(r"```toml\n(.*?)```", (DOCS / "first-run.md").read_text(), re.DOTALL)
    for text in (textwrap.dedent(own), recipe):
        assert TrainConfig.model_validate(tomllib.loads(text)).replay.mode == "r3"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page: Path) -> None:
    commands = {path.stem for path in (ROOT / "src/moe_replay/cli").glob("*.py")}
    named = re.findall(r"^(?:\$ )?moe-replay (\w+)", page.read_text(), re.MULTILINE)
    assert [name for name in named if name not in commands] == []
