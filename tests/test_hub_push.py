"""Uploading an export, against a stand-in for huggingface_hub.HfApi (no hub is asked)."""

from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from huggingface_hub import CommitInfo, HfApi

from recipes.errors import UserError
from train.hub_push import push_folder


class Hub:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self.error = [], error

    def create_repo(self, name, *, private, exist_ok):
        self.calls.append(("create", name, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message, allow_patterns):
        if self.error:
            raise self.error
        self.calls.append(("upload", repo_id, folder_path.name, sorted(allow_patterns)))
        return SimpleNamespace(commit_url="https://hub/org/name/commit/1")


def test_push_makes_the_repository_and_uploads_the_four_files(tmp_path):
    hub = Hub()
    assert push_folder(hub, tmp_path / "export", "org/name", True).endswith("/commit/1")
    files = ["README.md", "config.json", "draftsmith.json", "model.safetensors"]
    assert hub.calls == [
        ("create", "org/name", True, True),
        ("upload", "org/name", "export", files),
    ]


def test_push_calls_the_library_as_it_is(tmp_path):
    api = create_autospec(HfApi, instance=True)  # refuses a call that the real one would
    url = "https://huggingface.co/org/name/commit/1"
    api.upload_folder.return_value = CommitInfo(url, "Export", "", "1")
    assert push_folder(api, tmp_path / "export", "org/name", False) == url
    with pytest.raises(TypeError, match="folder_path"):
        api.upload_folder(repo_id="org/name", folder=tmp_path)


def test_push_without_a_connection_is_one_error(tmp_path):
    with pytest.raises(UserError, match="--push org/name: no route"):
        push_folder(Hub(OSError("no route")), tmp_path, "org/name", False)
