"""An extension of Griffe: the tables of names in docstrings become lists.

Docstrings of this library describe parameters and attributes in two columns, a name and what it is:

    width   number of columns
    side    where the padding is
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"^(?P<name>\*{0,2}\w+(?:, \w+)*)  +(?P<text>\S.*)$")


class DocstringTables(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(_as_list(part) for part in obj.docstring.value.split("\n\n"))


def _as_list(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or not ROW.match(lines[0]):
        return paragraph
    items: list[str] = []
    for line in lines:
        row = ROW.match(line)
        if row:
            items.append(f"- `{row['name']}`: {row['text']}")
        else:
            items.append(f"  {line.strip()}")
    return "\n".join(items)
