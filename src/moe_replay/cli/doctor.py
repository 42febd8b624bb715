"""`moe-replay doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Literal

from moe_replay.tools.doctor import Finding, Status, diagnose, diagnose_model
from moe_replay.tools.system_info import Surroundings

_MARKS = {Status.OK: "ok    ", Status.NOTE: "note  ", Status.BROKEN: "BROKEN"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Say what routing replay can do on this machine. The status is 1 if something that is needed is broken."""

    model: str | None = None
    """Folder, config.json or name of a model whose routers are to be replayed."""
    need: tuple[Literal["transformers", "megatron-core", "vllm", "sglang", "trl", "gpu"], ...] = ()
    """What must be there; it is broken if it is absent."""
    folder: str = "."
    """Where checkpoints and traces will be written."""
    json: bool = False
    """Print everything as JSON."""

    def __call__(self) -> None:
        """Look at everything, then speak."""
        around = Surroundings.here(self.folder)
        findings = diagnose(around, self.need)
        if self.model is not None:
            from moe_replay.tools.model_config import model_config

            findings += diagnose_model(model_config(self.model), around)
        print(json.dumps([asdict(finding) for finding in findings], indent=2) if self.json else findings_text(findings))
        if any(finding.status is Status.BROKEN for finding in findings):
            sys.exit(1)


def findings_text(findings: list[Finding]) -> str:
    """One line for each finding, and one for its remedy."""
    wide = max(len(finding.subject) for finding in findings)
    lines = []
    for one in findings:
        lines.append(f"{_MARKS[one.status]}  {one.subject:<{wide}}  {one.found}: {one.text}")
        if one.remedy:
            lines.append(f"{'':{wide + 10}}-> {one.remedy}")
    return "\n".join(lines)
