"""What a worker keeps between runs: corpora, by their SHA-256, so that a restart doesn't download one again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire.link import Link
from gradwire.v1 import aggregation_pb2 as pb


def fetched(link: Link, data: pb.DataInfo) -> bytes:
    """A run's corpus, from the cache where it was fetched before. Raises GradwireError if it arrives damaged."""
    kept = load(data.sha256)
    if kept is not None:
        return kept
    received = bytearray()
    link.call("FetchData", lambda: link.client.fetch_data(received))
    if hashlib.sha256(received).digest() != data.sha256:
        raise GradwireError(f"the corpus from {link.client.address} arrived damaged; start the worker again")
    save(bytes(received))
    return bytes(received)


def load(sha256: bytes) -> bytes | None:
    """The bytes with this SHA-256, None where they aren't kept, or were damaged."""
    with contextlib.suppress(OSError, RuntimeError):
        data = (_folder() / sha256.hex()).read_bytes()
        if hashlib.sha256(data).digest() == sha256:
            return data
    return None


def save(data: bytes) -> None:
    """Keeps bytes. A folder that can't be written to is no error: the next start downloads again."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{secrets.token_hex(8)}.partial"
        try:
            partial.write_bytes(data)
            partial.replace(folder / hashlib.sha256(data).hexdigest())
        finally:
            partial.unlink(missing_ok=True)


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "gradwire"
