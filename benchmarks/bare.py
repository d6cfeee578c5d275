"""What the ratio divides by: a grpc.aio server in the middle of a star that takes bytes and hands out bytes.

Same library, options and event loop as the aggregator's, and not a line of work: uploads are read and forgotten; when
all of a round are in, everybody gets the prepared messages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.recorded import read_messages
from gradwire import background
from gradwire.wire.channel import new_server

SERVICE: Final = "gradwire.benchmark.Bare"


class Bare:
    """The two streams. A round is over when all of its workers have uploaded."""

    def __init__(self, workers: int, messages: list[bytes]) -> None:
        self._workers = workers
        self._messages = messages
        self._uploads = 0
        self._uploaded = asyncio.Condition()

    async def upload(self, requests: AsyncIterator[bytes], context: object) -> bytes:
        """Reads a stream to its end."""
        async for _ in requests:
            pass
        async with self._uploaded:
            self._uploads += 1
            self._uploaded.notify_all()
        return b""

    async def download(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        """The messages, once all have uploaded. The request is the number of the round, counted from 0."""
        async with self._uploaded:
            await self._uploaded.wait_for(lambda: self._uploads >= (int(request) + 1) * self._workers)
        for message in self._messages:
            yield message


def handler(bare: Bare) -> grpc.GenericRpcHandler:
    """`bare` as a service. Without serializers, messages are the bytes that they are."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Upload": grpc.stream_unary_rpc_method_handler(bare.upload),
        "Download": grpc.unary_stream_rpc_method_handler(bare.download),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


async def serve(host: str, workers: int, messages: list[bytes]) -> None:
    """Serves until cancelled; prints the address first."""
    server = new_server()
    server.add_generic_rpc_handlers((handler(Bare(workers, messages)),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    print(f"{host}:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("workers", type=int)
    parser.add_argument("messages", type=Path)
    options = parser.parse_args()
    with contextlib.closing(background.new_event_loop()) as loop, contextlib.suppress(KeyboardInterrupt):
        loop.run_until_complete(serve(options.host, options.workers, read_messages(options.messages)))


if __name__ == "__main__":
    main()
