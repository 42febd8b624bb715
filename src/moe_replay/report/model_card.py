"""The README.md of an exported model, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from moe_replay.errors import ExitStatus, MoeReplayError, needs_extra
from moe_replay.report.page import MISSING, format_metric
from moe_replay.report.record import RunRecord, Series, read_run
from moe_replay.report.run_report import MODES, k3_native_and_replayed
from moe_replay.train.checkpoint.manifest import EXPORT
from moe_replay.utils.misc import one_line
from moe_replay.version import __version__

_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_MISMATCH = (
    ("k3 KL per token", "k3_kl"),
    ("mean \\|Δ log p\\|", "logprob_abs_diff/mean"),
    ("largest \\|Δ log p\\|", "logprob_abs_diff/max"),
    ("tokens off by a factor of 2", "frac_ratio_gt2"),
    ("effective samples", "ess"),
)
_TRAINING = (
    ("data", "data.path"),
    ("rewards", "reward.functions"),
    ("loss", "algorithm.loss_aggregation"),
    ("updates per rollout", "algorithm.updates_per_rollout"),
    ("learning rate", "optim.lr"),
    ("trainer", "backend.kind"),
    ("trainer dtype", "model.dtype"),
    ("rollout engine", "rollout.engine"),
    ("rollout dtype", "rollout.dtype"),
)


def newest_export(folder: Path) -> Path | None:
    exports = sorted(path for path in (folder / "checkpoints").glob(f"step-*/{EXPORT}") if path.is_dir())
    return next((path for path in reversed(exports) if path.parent.suffix == ""), None)


def write_model_card(folder: Path) -> Path | None:
    """Write README.md into the newest export of a run and return its path; None without an export."""
    export = newest_export(folder)
    if export is None:
        return None
    card = export / "README.md"
    card.write_text(model_card(read_run(folder), int(export.parent.name.removeprefix("step-"))), encoding="utf-8")
    return card


def model_card(run: RunRecord, step: int) -> str:
    """Return the model card after a step: replay mode, mismatch of rollout and trainer, and training settings."""
    mode = MODES.get(run.mode, "unknown")
    rows = [(name, run.setting(key, "")) for name, key in _TRAINING]
    training = [f"| {name} | `{value}` |" for name, value in rows if value]
    return "\n".join(
        [
            *("---", *_front_matter(run), "---", "", f"# {run.label}", ""),
            f"Trained with [moe-replay](https://github.com/moe-replay/moe-replay) {__version__} for {step} steps.",
            *("", "## Routing replay", "", f"{mode}{f' ({run.reason})' if run.reason else ''}.", "", *_mismatch(run)),
            *("", "## Training", "", "| | |", "|---|---|", *training, ""),
            f"Reward: {_number(run, 'reward/mean', 'start')} at the start, {_number(run, 'reward/mean', 'end')} "
            "at the end (means over the first and the last tenth of the steps).",
            "",
        ]
    )


def _front_matter(run: RunRecord) -> Iterator[str]:
    yield "library_name: transformers"
    yield "tags: [moe-replay, grpo, reinforcement-learning, mixture-of-experts, routing-replay]"
    for key, setting in (("base_model", "model.path"), ("datasets", "data.path")):
        name = run.setting(setting, "")
        if _ON_HUB.fullmatch(name) and not Path(name).exists():
            yield f"{key}: [{name}]" if key == "datasets" else f"{key}: {name}"


def _mismatch(run: RunRecord) -> Iterator[str]:
    """Yield the table of rollout-trainer mismatch: medians over steps, with and without replay."""
    without, _ = k3_native_and_replayed(run)
    is_compared = run.scored_with_replay and len(without.values) > 0
    scored = "replayed" if run.scored_with_replay else "native routing"
    yield f"| rollout against trainer, median over steps | {scored} |" + (" native routing |" if is_compared else "")
    yield "|---|---|" + ("---|" if is_compared else "")
    for name, key in _MISMATCH:
        pairs = ["rollout_vs_old", *(["rollout_vs_native"] if is_compared else [])]
        cells = [format_metric(f"/{key}", run[f"mismatch/{pair}/{key}"].median) for pair in pairs]
        if set(cells) != {MISSING}:
            yield f"| {name} | {' | '.join(cells)} |"
    aligned: Series = run["routing/aligned"]
    checked = f"{int((aligned.finite == 1).sum())} of {len(aligned.finite)} steps" if len(aligned.finite) else MISSING
    yield ""
    yield (
        f"Native routing agreed with the rollout in {_number(run, 'routing/agreement', 'median')} of all (token, "
        f"layer) pairs (median over steps); routes were aligned in {checked}."
    )


def _number(run: RunRecord, metric: str, statistic: str) -> str:
    return format_metric(metric, getattr(run[metric], statistic))


# ---- upload ----------------------------------------------------------------------------------------------------------


class HubPushError(MoeReplayError):
    """A failed upload; the model is still on disk."""

    exit_status = ExitStatus.FAILED


def push_folder(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload a folder to a model repository, created if needed, and return its address.

    The token is huggingface_hub's: $HF_TOKEN, or the one of `hf auth login`.
    """
    with needs_extra("pushing to the Hub needs huggingface_hub", "train"):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    api = HfApi(library_name="moe-replay")
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=f"Weights of {folder.parent.name}"
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise HubPushError(
            f"pushing the model to {repository} failed: {type(error).__name__}: {one_line(error)}",
            remedy=f"After fixing that: hf upload {repository} {folder}",
        ) from error
    return str(created)
