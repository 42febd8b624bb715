"""Run uv with the package indexes that pip is configured for.

python requirements/uv.py PROGRAM pip install --python .venv/bin/python ...

uv downloads in parallel and links files from one cache, so that an environment takes seconds instead of minutes; but it
reads neither pip's configuration files nor its variables.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def index_options(listed: str) -> list[str]:
    """Return uv's options for the package indexes in what `pip config list` says."""
    found: dict[str, None] = {}
    for key, places in re.findall(r"^\S*\.([\w-]+)='(.*)'$", listed, re.MULTILINE):
        if option := OPTIONS.get(key):
            found |= {f"{option}={place}": None for place in places.replace("\\n", " ").split()}
    return list(found)


def certificates(listed: str) -> dict[str, str]:
    """Return the variable that names pip's own file of certificates to uv, if it has one."""
    file = re.search(r"^\S*\.cert='(.*)'$", listed, re.MULTILINE)
    return {"SSL_CERT_FILE": file[1]} if file else {}


def main() -> None:
    """Replace this process by uv."""
    program, *words = sys.argv[1:]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    indexes = ["--index-strategy=unsafe-best-match", *index_options(listed)]  # all indexes alike, as in pip
    os.execve(program, [program, "--no-config", *words, *indexes], certificates(listed) | os.environ)


if __name__ == "__main__":
    main()
