"""An exported folder to the Hugging Face hub."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from recipes.errors import UserError


def push_folder(api: Any, folder: Path, name: str, private: bool) -> str:
    """Upload a folder, in one commit, to a repository that is made if it is not there.

    Args:
        api: a huggingface_hub.HfApi.
        name: ORG/NAME.

    Returns:
        The address of the commit.

    Raises:
        UserError: no access, a bad name or no connection.
    """
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=f"Export of {folder.name}",
            allow_patterns=["config.json", "model.safetensors", "draftsmith.json", "README.md"],
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"--push {name}: {error}; `hf auth login` gives access, HF_ENDPOINT names another hub"
        ) from error
    return str(commit.commit_url)
