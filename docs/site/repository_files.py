"""A hook of MkDocs: files of the repository that pages link to become part of the site.

Pages are read on a code host as well, where `../examples/plain_loop.py` leads to the file. On the site there is no such
folder, so the file is copied to `files/examples/plain_loop.py` and the link is changed to it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)]*)?\)")
INSIDE = "files"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page with its links to files outside of docs/ leading to copies of them."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def changed(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link["path"]))
        if target.is_relative_to(config.docs_dir) or not target.is_file():
            return link[0]  # what does not exist is a warning of MkDocs, and so an error
        uri = PurePosixPath(INSIDE, target.relative_to(ROOT).as_posix())
        if files.get_file_from_path(str(uri)) is None:
            files.append(_copied(config, uri, target))
        up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
        return f"]({up}{uri}{'' if target.suffix != '.md' else '.txt'})"

    return LINK.sub(changed, markdown)


def _copied(config: Any, uri: PurePosixPath, target: Path) -> File:
    name = f"{uri}.txt" if target.suffix == ".md" else str(uri)  # a page of the repository is shown as it is written
    return File.generated(config, name, content=target.read_bytes())
