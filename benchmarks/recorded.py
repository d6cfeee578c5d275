"""Messages in a file, each behind its length, so that several processes move the very same bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_LENGTH: Final = struct.Struct("<I")


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    """Writes all of `messages`."""
    with path.open("wb") as file:
        for message in messages:
            file.write(_LENGTH.pack(len(message)) + message)


def read_messages(path: Path) -> list[bytes]:
    """All messages in a file that `write_messages` wrote."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        messages.append(data[at : at + length])
        at += length
    return messages
