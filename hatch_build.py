"""The parts of the package's metadata that are computed when it is built: its version, and the links of its README.

The version is that of the newest tag `v1.2.3`; after it, the next one as a development release with the commit. A
source archive has its version in PKG-INFO. On a package index the README has no repository beside it, so its relative
links are made absolute.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
FIRST = "0.1.0"
"""The version that is worked towards while there is no tag."""

_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#|mailto:)([^)\s]+)(\))")


def version() -> str:
    """Return the version of this checkout or source archive."""
    archive = ROOT / "PKG-INFO"
    if archive.is_file():
        found = re.search(r"^Version: (\S+)$", archive.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    described = _git("describe", "--tags", "--long", "--match", "v[0-9]*")
    return from_description(described, _git("rev-parse", "--short", "HEAD"))


def from_description(described: str, commit: str) -> str:
    """Return the version for what `git describe` says; `described` is empty without tags, `commit` without git."""
    found = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)((?:a|b|rc)\d+)?-(\d+)-g[0-9a-f]+", described)
    if found is None:
        return f"{FIRST}.dev0+g{commit}" if commit else f"{FIRST}.dev0"
    major, minor, patch, before, distance = found.groups()
    if int(distance) == 0:
        return f"{major}.{minor}.{patch}{before or ''}"
    return f"{major}.{minor}.{int(patch) + (not before)}.dev{distance}+g{commit}"


def absolute_links(text: str, repository: str) -> str:
    """Return Markdown with links to files of the repository as addresses; pictures as raw files."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{repository}/{kind}/main/{link[2]}{link[3]}"

    return _LINK.sub(absolute, text)


def _git(*words: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # imported by a test where hatchling is not installed
    MetadataHookInterface: Any = object


class ReadmeHook(MetadataHookInterface):
    """Puts the README with absolute links into the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        readme = absolute_links(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def get_metadata_hook() -> type[ReadmeHook]:
    """Return the hook: hatchling asks for it by this name."""
    return ReadmeHook
