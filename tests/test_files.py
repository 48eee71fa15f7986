"""Files are whole or absent, whatever stops the writing."""

import json
from pathlib import Path

import pytest

from data.files import (
    read_json,
    replace_dir,
    require_disk,
    sha256,
    stable_hash,
    write_json,
    write_text,
)
from recipes.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_is_written_under_its_name_only(tmp_path):
    write_text(tmp_path / "a" / "b.txt", "one\ntwo\n")
    write_text(tmp_path / "a" / "b.txt", "three\n")
    assert (tmp_path / "a" / "b.txt").read_text() == "three\n"
    assert names(tmp_path / "a") == ["b.txt"]


def test_failed_write_keeps_the_earlier_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"x": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert read_json(path) == {"x": 1}
    assert names(tmp_path) == ["a.json"]


def test_p72_replaced_folder_loses_nothing_on_failure(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old.txt").write_text("old")
    (tmp_path / "neighbour.txt").write_text("mine")

    def stop_halfway() -> None:
        with replace_dir(tmp_path / "run") as temporary:
            (temporary / "new.txt").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()
    assert names(tmp_path) == ["neighbour.txt", "run"]
    assert names(tmp_path / "run") == ["old.txt"]


def test_replaced_folder_holds_the_new_files_only(tmp_path):
    for name in ("first.txt", "second.txt"):
        with replace_dir(tmp_path / "deep" / "run") as temporary:
            (temporary / name).write_text(name)
    assert names(tmp_path / "deep") == ["run"]
    assert names(tmp_path / "deep" / "run") == ["second.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[" * 50_000, "not valid JSON: brackets are nested too deep"),
        ("9" * 5_000, "not valid JSON: Exceeds the limit"),
    ],
)
def test_unreadable_json_names_the_file(tmp_path, text, message):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"a.json: {message}"):
        read_json(path)


def test_short_disk_is_told_before_anything_is_written(tmp_path):
    require_disk(tmp_path / "not" / "yet", 1, "states")
    with pytest.raises(UserError, match=r"states need 1000000000\.0 GB, but .* GB free"):
        require_disk(tmp_path / "not" / "yet", 10**18, "states")
    assert names(tmp_path) == []


def test_digests(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256(tmp_path / "abc").startswith("ba7816bf8f01cfea")
    assert stable_hash({"a": 1, "b": [2]}) == stable_hash({"b": [2], "a": 1})
    assert stable_hash({"a": 1}) != stable_hash({"a": 1.5})
    assert len(stable_hash(json.loads("[]"))) == 16
