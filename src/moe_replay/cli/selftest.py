"""`moe-replay selftest`: whether routing replay works on two devices of this machine."""

from __future__ import annotations

import os
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_replay.errors import EngineOptionError, ExitStatus
from moe_replay.utils.processes import owned_folder

if TYPE_CHECKING:
    from moe_replay.tools.selftest import Item, Result

PROGRAM = "moe_replay.cli.main"
SHOWN_LINES = 30
LIMIT_S = {"cuda": 110.0, "cpu": 300.0}


@dataclass(frozen=True, kw_only=True)
class SelftestCommand:
    """Try what needs two GPUs: parallel engines, NCCL weight updates and expert-parallel trainers, each with R3.

    Takes a tiny random model, and on GPUs less than ten minutes. Exit with 1 if an item fails.
    """

    gpus: Literal[2] = 2
    """GPUs to use, the first ones that are visible."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the same items with gloo and shared memory in place of NCCL and CUDA IPC."""
    only: tuple[str, ...] = ()
    """Items to run; default: all."""
    engine: str = "vllm"
    """Engine of the items that try a trainer: vllm, transformers or module:name."""
    timeout_s: float | None = None
    """Time limit of an item in seconds; one that exceeds it has failed, and says where it stands. Default: 110, on CPUs
    300."""

    def __call__(self) -> None:
        from moe_replay.tools.selftest import ITEMS, Machine, run_items

        items = [item for item in ITEMS if not self.only or item.name in self.only]
        unknown = sorted({*self.only} - {item.name for item in ITEMS})
        if unknown:
            names = ", ".join(item.name for item in ITEMS)
            raise EngineOptionError("--only: no such item", expected=f"some of {names}", found=", ".join(unknown))
        gpus = visible_gpus() if self.device == "cuda" else ()
        if self.device == "cuda" and len(gpus) < self.gpus:
            raise EngineOptionError(
                "selftest needs two GPUs",
                found=len(gpus),
                remedy="Run it on a machine with two, or with --device cpu",
            )
        with owned_folder() as folder:
            limit_s = self.timeout_s or LIMIT_S[self.device]
            machine = Machine(self.device, gpus[: self.gpus], self.engine, limit_s, folder, PROGRAM)
            results = run_items(items, machine, lambda result: print(line(result), flush=True))
        counts = Counter[str](result.status for result in results)
        print(", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items() if counts[status]), flush=True)
        if counts["FAIL"]:
            sys.exit(ExitStatus.CHECK_FAILED)


_WORDS = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in named.split(",") if name] if named is not None else map(str, range(8))
    return tuple(name for name, _ in zip(names, range(torch.accelerator.device_count()), strict=False))


def line(result: Result) -> str:
    """Return an item's line; behind a failed one, the last lines of its processes."""
    item: Item = result.item
    text = f"{result.status}  {item.name:<12}  {item.about}: {result.text}"
    text += f" ({result.seconds:.0f} s)" if result.seconds else ""
    shown = "\n".join(result.output.splitlines()[-SHOWN_LINES:])
    return f"{text}\n{textwrap.indent(shown, '      | ')}" if shown else text
