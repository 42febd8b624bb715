"""Tokens and passwords: read from files or the environment, and masked in logs and errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

from moe_replay.errors import MoeReplayError

MASK = "***"
_PASSWORD = re.compile(r"(?P<before>[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@:]*:)(?P<password>[^\s/?#]*)@")

_SECRET_NAME = re.compile(r"(?:^|[._])(?:token|password|secret|api_key)$")
READABLE_BY_ALL = "on the command line can be read by every user of the machine"

MIN_TOKEN_CHARACTERS = 16


class SecretError(MoeReplayError):
    """A token that is given where others can read it, or that cannot be read."""


def find_token(argument: str | None, file: Path | None, variable: str) -> str | None:
    """Return the token in a file, else in an environment variable, else None; one on a command line is refused.

    Every user of a machine can list the arguments of all processes.
    """
    remedy = f"Set ${variable}, or name a file that only you can read: --token-file FILE"
    if argument is not None:
        raise SecretError(f"a token {READABLE_BY_ALL}", remedy=remedy)
    if file is None:
        return os.environ.get(variable)
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(f"the file of the token cannot be read: {error}", remedy=remedy) from error
    if not token or len(token.split()) > 1:
        raise SecretError(f"{file} holds no token", expected="one word", remedy=remedy)
    return token


def check_token(token: str, variable: str, *, is_public: bool) -> None:
    """Raise for a token that no header can carry, or that others could guess.

    is_public   other machines can try tokens
    """
    remedy = f"Use a random one, or leave ${variable} unset: the server makes one and prints it"
    if not token.strip() or not token.isprintable():
        raise SecretError("the token is blank, or has control characters", remedy=remedy)
    if is_public and len(token) < MIN_TOKEN_CHARACTERS:
        raise SecretError(
            "the token is too short for a server that other machines reach",
            expected=f"at least {MIN_TOKEN_CHARACTERS} characters",
            found=len(token),
            remedy=remedy,
        )


def mask_passwords(text: str) -> str:
    """Return a text with the passwords of its URLs masked: `http://user:***@host`."""
    return _PASSWORD.sub(rf"\g<before>{MASK}@", text)


def is_secret_name(key: str) -> bool:
    return _SECRET_NAME.search(key) is not None


def has_password(url: str) -> bool:
    return _PASSWORD.search(url) is not None


def is_masked(url: str) -> bool:
    match = _PASSWORD.search(url)
    return match is not None and match["password"] == MASK
