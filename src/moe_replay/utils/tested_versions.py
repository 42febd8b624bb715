"""The versions of each package that were run; one newer than all of them is tried, and the user is told.

pyproject.toml requires the oldest and bounds none from above; docs/first-run.md has this table, and
tests/test_versions.py holds all of them together.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import metadata

from moe_replay.errors import MissingExtraError

Release = tuple[int, ...]
TESTED: dict[str, tuple[Release, Release]] = {
    "torch": ((2, 6), (2, 15)),
    "transformers": ((4, 57), (5, 23)),
    "vllm": ((0, 30), (0, 33)),
    "sglang": ((0, 5, 23), (0, 5, 23)),
    "megatron-core": ((0, 12), (0, 19)),
    "trl": ((1, 16), (1, 16)),
    "peft": ((0, 20), (0, 21)),
    "ray": ((2, 50), (2, 60)),
}
"""Package -> oldest, which is also the least that is accepted, and newest."""
IN_CI: dict[str, tuple[Release, ...]] = {
    "torch": ((2, 13),),
    "transformers": ((4, 57), (5, 10), (5, 22)),
    "vllm": ((0, 30),),
    "sglang": (),
    "megatron-core": ((0, 12), (0, 16), (0, 19)),
    "trl": ((1, 16),),
    "peft": ((0, 21),),
    "ray": ((2, 60),),
}
"""Package -> the versions that `make test-all` runs; others by targets such as `make test-oldest`, or by hand."""
NAMES = {
    "torch": "torch",
    "transformers": "Transformers",
    "vllm": "vLLM",
    "megatron-core": "Megatron-Core",
    "trl": "TRL",
    "sglang": "SGLang",
    "peft": "PEFT",
    "ray": "Ray",
}
MEGATRON_TRAINER: Release = (0, 16)
"""The least Megatron-Core of the trainer's backend; routers are replayed from `TESTED` on."""


def release_numbers(version: str) -> Release:
    """Parse a version: `0.30.1rc2+cpu` is (0, 30, 1); empty if it does not begin with a number."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0]))


def dotted(release: Release) -> str:
    return ".".join(map(str, release))


def is_newer(package: str, version: str) -> bool:
    """Whether a version is newer than the newest that was run, patch releases aside."""
    newest = TESTED[package][1]
    return release_numbers(version)[: len(newest)] > newest


def check_megatron_trainer(version: str | None = None) -> None:
    """Raise for a Megatron-Core with which the trainer's backend does not work, although routers can be replayed.

    version   None: of the installed package; one without a version is not judged
    """
    if version is None:
        try:
            version = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            return
    numbers = release_numbers(version)
    if numbers and numbers < MEGATRON_TRAINER:
        raise MissingExtraError(
            'backend.kind = "megatron" needs a newer Megatron-Core',
            expected=f"at least {dotted(MEGATRON_TRAINER)}; in your own trainer routers are replayed from "
            f"{dotted(TESTED['megatron-core'][0])} on",
            found=version,
            remedy=f"pip install 'megatron-core>={dotted(MEGATRON_TRAINER)}'",
        )


@cache
def notice_if_newer(package: str, version: str = "") -> None:
    """Print a notice once, on stderr, if a package is newer than what was run; absent packages are ignored.

    version   of a server, where it is not the installed package
    """
    try:
        installed = version or metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    if is_newer(package, installed):
        name = NAMES[package]
        print(
            f"{name} {installed} is newer than the newest tested ({dotted(TESTED[package][1])}); it is tried",
            file=sys.stderr,
            flush=True,
        )
