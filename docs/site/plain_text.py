"""A hook of MkDocs: pages as plain Markdown next to their HTML, and llms.txt, which lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TITLE = "# moe-replay\n\n> GRPO post-training of MoE models with the rollout's expert routes replayed in the trainer.\n"


def on_post_build(*, config: Any) -> None:
    """Copy every page of the navigation, and write the list of them."""
    source, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [TITLE]
    for section in config["nav"]:
        ((title, entry),) = section.items()
        pages = [(title, entry)] if isinstance(entry, str) else [next(iter(page.items())) for page in entry]
        lines.append(f"## {title}\n" if not isinstance(entry, str) else "")
        for name, path in pages:
            text = (source / path).read_text(encoding="utf-8")
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            lines.append(f"- [{name}]({path}): {_first_sentence(text)}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _first_sentence(text: str) -> str:
    paragraphs = (part for part in text.split("\n\n") if part and not part.startswith(("#", "|", "```", "-", "!")))
    prose = " ".join(next(paragraphs, "").split())
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.split(r"(?<=\.) |(?<=。)", prose)[0])
