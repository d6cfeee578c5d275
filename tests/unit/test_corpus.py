import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.corpus import Corpus, read_corpus
from gradwire.errors import ConfigError
from gradwire_worker.data import TextDataset


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_folder_is_read_in_the_order_of_posix_paths(tmp_path: Path) -> None:
    # "a-b" < "a/c" < "a0" as text, though a walk would meet the folder "a" last or first.
    write(tmp_path, {"a0": b"3", "a/c": b"2", "a-b": b"1", "B": b"0"})

    assert read_corpus(tmp_path).data == b"0\n1\n2\n3"


def test_folder_skips_binary_hidden_and_empty_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "good": "größe".encode(),
            "nul": b"a\0b",
            "latin1": "größe".encode("latin-1"),
            ".hidden": b"no",
            ".git/config": b"no",
            "deep/.cache/x": b"no",
            "deep/more/y": b"yes",
            "empty": b"",
        },
    )

    assert read_corpus(tmp_path).data == b"yes\n" + "größe".encode()


def test_folder_skips_symbolic_links(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"secret": b"no"})
    inside = write(tmp_path / "inside", {"text": b"yes"})
    try:
        os.symlink(outside / "secret", inside / "file")
        os.symlink(outside, inside / "folder")
    except OSError:
        pytest.skip("this system lets nobody create symbolic links")

    assert read_corpus(inside).data == b"yes"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in this system's folders")
def test_folder_skips_a_pipe_instead_of_waiting_for_it(tmp_path: Path) -> None:
    write(tmp_path, {"text": b"yes"})
    os.mkfifo(tmp_path / "pipe")

    assert read_corpus(tmp_path).data == b"yes"


def test_text_is_cut_at_max_bytes_even_within_a_character(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"123", "b": "4ö".encode(), "c": b"never read"})

    assert read_corpus(tmp_path, max_bytes=6).data == b"123\n4" + "ö".encode()[:1]
    assert read_corpus(tmp_path / "b", max_bytes=2).data == b"4" + "ö".encode()[:1]
    # A folder whose first file alone is longer, and cut inside a character, still counts as text.
    assert read_corpus(write(tmp_path / "d", {"x": "äöü".encode()}), max_bytes=3).data == "äö".encode()[:3]


def test_file_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, {"weights.bin": b"\0\xff\r\n"})

    corpus = read_corpus(tmp_path / "weights.bin")

    assert corpus.data == b"\0\xff\r\n"
    assert corpus.fingerprint == hashlib.sha256(b"\0\xff\r\n").hexdigest()


def test_missing_and_empty_paths_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"empty": b"", "folder/nul": b"\0"})
    for name, what in {"nothing": "no file or folder", "empty": "is empty", "folder": "no UTF-8"}.items():
        with pytest.raises(ConfigError, match=what) as error:
            read_corpus(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(ConfigError, match="max_bytes = 0"):
        read_corpus(tmp_path, max_bytes=0)
    with pytest.raises(ConfigError, match="empty"):
        Corpus(b"")


def test_unreadable_folder_is_an_error_not_a_shorter_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": b"1", "locked/b": b"2"})
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ConfigError, match=r"can't read .*locked: Permission denied"):
        read_corpus(tmp_path)


def test_default_text_is_the_standard_library_without_its_tests() -> None:
    corpus = read_corpus(max_bytes=3_000_000)

    assert len(corpus.data) == 3_000_000
    assert b"class ArgumentParser" in corpus.data
    assert b"class OrderedDict" in corpus.data
    assert corpus == read_corpus(max_bytes=3_000_000)


def test_default_text_leaves_out_what_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = ["site-packages/torch", "test", "json/tests", "idlelib", "lib2to3", "__pycache__"]
    write(tmp_path, {f"{folder}/x.py": b"no" for folder in skipped})
    write(tmp_path, {"json/x.py": b"yes", "LICENSE.txt": b"no"})
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))

    assert read_corpus().data == b"yes"


def test_a_python_without_library_source_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "zipped"))

    with pytest.raises(ConfigError, match=r"zipped: give the path"):
        read_corpus()


@given(data=st.binary(min_size=2, max_size=300), fraction=st.floats(min_value=0.001, max_value=0.5))
def test_the_last_part_is_held_out(data: bytes, fraction: float) -> None:
    train, held_out = Corpus(data).split(fraction)
    assert train + held_out == data
    assert train
    assert len(held_out) - 1 < fraction * len(data) <= len(held_out) + 1e-9


def test_nothing_is_held_out_of_a_split_at_zero() -> None:
    assert Corpus(b"abc").split(0) == (b"abc", b"")


@pytest.mark.parametrize("fraction", [-0.1, 0.95, 1.0, float("nan")])
def test_split_fraction_out_of_range_is_named(fraction: float) -> None:
    with pytest.raises(ConfigError, match=f"held_out_fraction = {fraction}"):
        Corpus(bytes(100)).split(fraction)


def test_text_too_short_to_split_is_an_error() -> None:
    with pytest.raises(ConfigError, match="only 1 bytes"):
        Corpus(b"a").split(0.05)


def test_samples_are_windows_that_share_one_byte() -> None:
    dataset = TextDataset(bytes(range(10)), context=3)

    assert [dataset[i].tolist() for i in range(len(dataset))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert dataset[0].dtype == torch.int64
    for index in (-1, 3):
        with pytest.raises(IndexError):
            dataset[index]


def test_writing_to_a_sample_leaves_the_text_alone() -> None:
    dataset = TextDataset(b"abcdefg", context=2)
    dataset[1].zero_()

    assert dataset[1].tolist() == [*b"cde"]


def test_text_shorter_than_a_window_is_an_error() -> None:
    assert len(TextDataset(bytes(129), context=128)) == 1
    with pytest.raises(ConfigError, match=r"128 bytes.*context = 128 needs 129"):
        TextDataset(bytes(128), context=128)
    with pytest.raises(ConfigError, match="context = 0"):
        TextDataset(bytes(128), context=0)


def test_held_out_batches_are_whole_and_spread_over_the_text() -> None:
    dataset = TextDataset(bytes(range(101)), context=1)  # 100 samples; sample i starts with byte i

    batches = list(dataset.held_out_batches(5, 4))
    assert [tuple(batch.shape) for batch in batches] == [(5, 2)] * 4
    assert torch.cat(batches)[:, 0].tolist() == list(range(0, 100, 5))

    assert [len(batch) for batch in dataset.held_out_batches(30, 10)] == [30, 30, 30]
    assert [len(batch) for batch in dataset.held_out_batches(1000, 10)] == [100]
