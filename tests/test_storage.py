"""The JSON files of a user: written whole or not at all, and never a reason to fail."""

from __future__ import annotations

import json

import platformdirs
import pytest

from attention_ops import storage


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path / "deep" / "folder"))
    return tmp_path / "deep" / "folder"


def test_what_is_saved_comes_back(folder):
    assert storage.load("verdicts") == {}
    assert storage.save("verdicts", {"a": [1, 2]}) == folder / "verdicts.json"
    assert storage.load("verdicts") == {"a": [1, 2]}
    assert storage.load("tuning") == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("", "JSONDecodeError"),
        ("[1]", "it holds a list"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"\x00" * 64, "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ('{"a": ' + "9" * 5000 + "}", "ValueError"),
        (" " * 10_000_001, "it has more than 10000000 bytes"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_file_that_is_no_object_is_ignored_with_a_warning_and_replaced(folder, text, why):
    folder.mkdir(parents=True)
    (folder / "verdicts.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match=f"verdicts.json cannot be read and is ignored.*{why}"):
        assert storage.load("verdicts") == {}
    storage.save("verdicts", {"b": 1})
    assert storage.load("verdicts") == {"b": 1}


def test_a_failed_save_leaves_the_old_file(folder, monkeypatch):
    storage.save("verdicts", {"old": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        storage.save("verdicts", {"new": object()})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        storage.save("verdicts", {"new": 1})
    assert json.loads((folder / "verdicts.json").read_text()) == {"old": 1}
    assert [file.name for file in folder.iterdir()] == ["verdicts.json"]


def test_the_default_folder_is_the_users(monkeypatch):
    monkeypatch.delenv(storage.ENVIRONMENT)
    assert str(storage.folder()) == platformdirs.user_data_dir("attention-ops", appauthor=False)
