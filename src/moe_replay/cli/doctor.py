"""`moe-replay doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_replay.errors import ExitStatus

if TYPE_CHECKING:
    from moe_replay.tools.doctor import Finding

_MARKS = {"ok": "ok    ", "note": "note  ", "broken": "BROKEN"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check what routing replay can do on this machine. Exits with 1 if anything is broken."""

    model: str | None = None
    """Folder, config.json or name of a model whose routers should be replayed."""
    recipe: str | None = None
    """Recipe with cluster.kind = ray whose cluster is checked: whether it can hold the run."""
    need: tuple[Literal["transformers", "megatron-core", "vllm", "sglang", "trl", "ray", "gpu"], ...] = ()
    """What must be present; reported as broken if absent."""
    folder: str = "."
    """Folder in which checkpoints and traces will be written."""
    json: bool = False
    """Print everything as JSON."""

    def __call__(self) -> None:
        """Run all checks and print the findings."""
        from moe_replay.tools.doctor import Status, diagnose, diagnose_model
        from moe_replay.tools.system_info import SystemInfo

        system = SystemInfo.collect(self.folder)
        findings = diagnose(system, self.need)
        if self.model is not None:
            from moe_replay.tools.model_config import model_config

            findings += diagnose_model(model_config(self.model), system)
        if self.recipe is not None:
            from moe_replay.tools.doctor_cluster import diagnose_cluster
            from moe_replay.train.config.file import load_config

            findings.append(diagnose_cluster(load_config(Path(self.recipe))))
        print(json.dumps([asdict(finding) for finding in findings], indent=2) if self.json else findings_text(findings))
        if any(finding.status is Status.BROKEN for finding in findings):
            sys.exit(ExitStatus.CHECK_FAILED)


def findings_text(findings: list[Finding]) -> str:
    """Format each finding on one line, followed by its remedy."""
    wide = max(len(finding.subject) for finding in findings)
    lines = []
    for one in findings:
        lines.append(f"{_MARKS[one.status]}  {one.subject:<{wide}}  {one.found}: {one.text}")
        if one.remedy:
            lines.append(f"{'':{wide + 10}}-> {one.remedy}")
    return "\n".join(lines)
