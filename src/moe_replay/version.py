"""The version of the package: written beside this file when it is built, from the tags of the repository."""

from __future__ import annotations

from pathlib import Path

UNBUILT = "0.1.0.dev0"
"""In a checkout that is used without having been installed."""


def _version() -> str:
    written = Path(__file__).with_name("VERSION")
    return written.read_text(encoding="utf-8").strip() if written.is_file() else UNBUILT


__version__ = _version()
