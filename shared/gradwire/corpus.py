"""The text that a run trains on, as bytes: a file, a folder of text files, or by default Python's own source.

What is read is a function of the files alone, never of the machine: the aggregator reads it once,
fingerprints it and serves it to the workers.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gradwire.errors import ConfigError

DEFAULT_MAX_BYTES: Final = 16 * 2**20

_HINT: Final = "give the path of a text file or a folder"

# Not the language's own prose and code: installed packages, tests, an editor, a grammar, compiled files.
_NOT_STDLIB: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A run's whole text. Raises ConfigError if it is empty."""

    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("the corpus is empty: there is nothing to train on")

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the bytes, 64 hex digits."""
        return hashlib.sha256(self.data).hexdigest()

    def split(self, held_out_fraction: float) -> tuple[bytes, bytes]:
        """The text as (train bytes, held-out bytes): the last part is held out.

        In a folder's text that is its last files, whole but for one: a model that only remembers files by heart gains
        nothing there, as it would with pieces held out of every file.

        Args:
            held_out_fraction: 0 to 0.9; the held-out part is rounded up to whole bytes.

        Raises:
            ConfigError: the fraction is out of range, or leaves nothing to train on.
        """
        if not 0 <= held_out_fraction <= 0.9:
            raise ConfigError(f"held_out_fraction = {held_out_fraction}: must be within 0 to 0.9")
        border = len(self.data) - math.ceil(len(self.data) * held_out_fraction)
        if border == 0:
            raise ConfigError(f"held_out_fraction = {held_out_fraction}: the corpus has only {len(self.data)} bytes")
        return self.data[:border], self.data[border:]


def read_corpus(path: Path | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Corpus:
    """Read at most `max_bytes` bytes of text.

    Args:
        path: a file, taken as it is; or a folder, of which all UTF-8 text files at any depth are joined by
            newlines, in the order of their relative paths written with '/', without hidden ones and symbolic
            links; or None for the source text of this Python's standard library.
        max_bytes: where to cut.

    Raises:
        ConfigError: the path is missing or can't be read, or there is no text there.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes = {max_bytes}: must be 1 or more")
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    try:
        if path is None:
            data = _join(_files(root, suffix=".py", skipped=_NOT_STDLIB), max_bytes)
        elif root.is_dir():
            data = _join(_files(root), max_bytes)
        else:
            data = _read(root, max_bytes)
    except FileNotFoundError as error:
        raise ConfigError(f"no file or folder {error.filename}: {_HINT}") from None
    except OSError as error:
        raise ConfigError(f"can't read {error.filename}: {error.strerror}") from error
    if not data:
        what = "holds no UTF-8 text file with anything in it" if root.is_dir() else "is empty"
        raise ConfigError(f"{root} {what}: {_HINT}")
    return Corpus(data)


def _files(root: Path, *, suffix: str = "", skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root`, except in folders named in `skipped`, in the same order everywhere."""
    found: list[str] = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        # Pruned in place: os.walk enters only what is left.
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        for name in names:
            file = Path(folder, name)
            # `is_file` leaves out pipes and sockets, on which a read would wait for ever.
            if name.endswith(suffix) and name[0] != "." and file.is_file() and not file.is_symlink():
                found.append(file.relative_to(root).as_posix())
    return (root / relative for relative in sorted(found))


def _join(paths: Iterable[Path], max_bytes: int) -> bytes:
    """The texts of `paths`, joined by newlines; it stops reading at `max_bytes`."""
    joined = bytearray()
    for path in paths:
        data = _read(path, max_bytes)
        if data and _is_text(data, whole=len(data) < max_bytes):
            joined += b"\n" + data if joined else data
        if len(joined) >= max_bytes:
            break
    return bytes(joined[:max_bytes])


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(max_bytes)


def _is_text(data: bytes, *, whole: bool) -> bool:
    """UTF-8 without NUL; where the file was cut (`whole` is false) its last character may be cut too."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _raise(error: OSError) -> None:
    """os.walk skips what it can't list, which would make two machines read different texts in silence."""
    raise error
