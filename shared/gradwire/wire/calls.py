"""What every call carries, and how its end becomes one of gradwire's errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from grpc import aio

from gradwire import errors
from gradwire.errors import GradwireError
from gradwire.wire.channel import PAYLOAD_BYTES

TOKEN_KEY: Final = "authorization"
TOKEN_VARIABLE: Final = "GRADWIRE_TOKEN"

Metadata = tuple[tuple[str, str], ...]


def metadata(token: str | None) -> Metadata:
    """The metadata of a call: the bearer token, where the run has one."""
    return ((TOKEN_KEY, f"Bearer {token}"),) if token else ()


def token_from_environment() -> str | None:
    """The run's token, from GRADWIRE_TOKEN."""
    return os.environ.get(TOKEN_VARIABLE) or None


def error_from(call_error: aio.AioRpcError) -> GradwireError:
    """The exception that a failed call stands for."""
    trailing = call_error.trailing_metadata() or ()
    names = [str(value) for key, value in trailing if key == errors.ERROR_KEY]
    return errors.from_status(names[0] if names else None, call_error.code(), call_error.details() or "no details")


def slices(data: bytes, offset: int = 0) -> Iterator[bytes]:
    """`data` from `offset` on in pieces that fit a message."""
    for start in range(offset, len(data), PAYLOAD_BYTES):
        yield data[start : start + PAYLOAD_BYTES]
