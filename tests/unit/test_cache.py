"""What is kept between runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gradwire import cache

DATA = b"some text"
SHA256 = hashlib.sha256(DATA).digest()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gradwire"


def test_what_was_saved_is_found_by_its_hash(folder: Path) -> None:
    assert cache.load(SHA256) is None
    cache.save(DATA)
    assert cache.load(SHA256) == DATA
    assert [each.name for each in folder.iterdir()] == [SHA256.hex()]


def test_damaged_bytes_are_not_handed_out(folder: Path) -> None:
    cache.save(DATA)
    (folder / SHA256.hex()).write_bytes(b"something else")
    assert cache.load(SHA256) is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    cache.save(DATA)
    assert cache.load(SHA256) is None


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    cache.save(DATA)
    assert cache.load(SHA256) is None
