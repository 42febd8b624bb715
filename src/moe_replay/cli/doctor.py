"""`moe-replay doctor`: checks of this machine, with remedies."""

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
    """Check whether this machine can run routing replay. Exit with 1 if anything is broken."""

    model: str | None = None
    """Model folder, config.json or Hub name: check that its routers can be replayed."""
    recipe: str | None = None
    """Recipe with cluster.launcher = ray: check that its cluster can hold the run."""
    need: tuple[
        Literal["transformers", "megatron-core", "vllm", "sglang", "trl", "verl", "ms-swift", "ray", "gpu"], ...
    ] = ()
    """Required components; missing ones are reported as broken."""
    folder: str = "."
    """Folder for checkpoints and traces, whose free disk space is checked."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        from moe_replay.tools.doctor import Status, SystemInfo, diagnose, diagnose_cluster, diagnose_model

        system = SystemInfo.collect(self.folder)
        findings = diagnose(system, self.need)
        if self.model is not None:
            from moe_replay.weights.model_folder import read_config

            findings += diagnose_model(read_config(self.model))
        if self.recipe is not None:
            from moe_replay.train.config.file import load_config

            findings.append(diagnose_cluster(load_config(Path(self.recipe))))
        print(json.dumps([asdict(finding) for finding in findings], indent=2) if self.json else findings_text(findings))
        if any(finding.status is Status.BROKEN for finding in findings):
            sys.exit(ExitStatus.CHECK_FAILED)


def findings_text(findings: list[Finding]) -> str:
    """Format each finding on one line, followed by its remedy."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.subject:<{width}}  {finding.found}: {finding.text}")
        if finding.remedy:
            lines.append(f"{'':{width + 10}}-> {finding.remedy}")
    return "\n".join(lines)
