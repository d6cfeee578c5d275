"""A stream that stands still is a failed one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from gradwire import client
from gradwire.v1 import aggregation_pb2 as pb


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


class Broken:
    """A call whose connection broke while it wrote, as gRPC's core reports it; or that was refused."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=details)

    async def write(self, message: object) -> None:
        raise self._error

    async def done_writing(self) -> None:
        raise self._error

    def __await__(self) -> Any:
        async def answer() -> None:
            raise self._error

        return answer().__await__()


@pytest.mark.parametrize(
    ("details", "code"),
    [
        ("Internal error from Core", grpc.StatusCode.UNAVAILABLE),  # tried again for as long as the config says
        ("Contribute failed inside the aggregator", grpc.StatusCode.INTERNAL),  # a few times
    ],
)
def test_a_connection_that_breaks_while_it_is_written_to_counts_as_unavailable(
    details: str, code: grpc.StatusCode
) -> None:
    call = Broken(grpc.StatusCode.INTERNAL, details)
    with pytest.raises(aio.AioRpcError) as failed:
        asyncio.run(client.Client("127.0.0.1:1", None)._send(lambda metadata: call, ["part"]))
    assert failed.value.code() is code


def test_an_upload_to_a_port_where_nobody_listens_is_unavailable_every_time() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    async def upload() -> set[grpc.StatusCode]:
        connection = client.Client(address, None)
        await connection.open()
        codes = set()
        for _ in range(30):
            with pytest.raises(aio.AioRpcError) as failed:
                await connection.contribute(pb.ContributeHeader(), [pb.ContributeRequest()] * 20)
            codes.add(failed.value.code())
        await connection.close()
        return codes

    assert asyncio.run(upload()) == {grpc.StatusCode.UNAVAILABLE}
