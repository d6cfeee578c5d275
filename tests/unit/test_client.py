"""A stream that stands still is a failed one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from gradwire import client


def test_a_stream_that_brings_nothing_any_more_counts_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "QUIET_S", 0.05)
    received = []

    async def stream() -> AsyncIterator[int]:
        yield 1
        yield 2
        await asyncio.Event().wait()

    async def read() -> None:
        async for each in client._lively(stream()):
            received.append(each)

    with pytest.raises(aio.AioRpcError) as failed:
        asyncio.run(read())
    assert received == [1, 2]
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_stream_that_ends_has_ended() -> None:
    async def stream() -> AsyncIterator[int]:
        yield 1

    async def read() -> list[int]:
        return [each async for each in client._lively(stream())]

    assert asyncio.run(read()) == [1]
