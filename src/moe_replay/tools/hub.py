"""`push_folder`: an exported model to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.utils.messages import one_line


class HubPushError(MoeReplayError):
    """A model that could not be sent to the Hub; it is still on disk."""

    exit_status = ExitStatus.FAILED


def push_folder(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload a folder to a model repository, which is created if it does not exist; return its address.

    The token is huggingface_hub's: $HF_TOKEN, or what `hf auth login` stored.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError as missing:
        raise MissingExtraError("a push needs huggingface_hub", remedy="pip install 'moe-replay[train]'") from missing
    api = HfApi(library_name="moe-replay")
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=f"Weights of {folder.parent.name}"
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise HubPushError(
            f"the model could not be pushed to {repository}: {type(error).__name__}: {one_line(error)}",
            remedy=f"Once that is mended: hf upload {repository} {folder}",
        ) from error
    return str(created)
