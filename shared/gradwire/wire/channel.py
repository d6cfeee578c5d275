"""Channels and servers with one table of options, since the two sides have to agree on most of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import grpc
from grpc import aio

from gradwire.errors import ConfigError

PROTOCOL: Final = 1
PAYLOAD_BYTES: Final = 512 * 1024  # unpacked payload of one part, and data of one message of a byte stream
MESSAGE_BYTES: Final = 1024 * 1024  # a whole message; nothing either side sends comes near

Options = Sequence[tuple[str, int]]

_COMMON: Final[Options] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # A peer that vanished without a word is noticed after 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT: Final[Options] = (
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)

SERVER: Final[Options] = (
    *_COMMON,
    # Both sides ping every 20 s; the server has to allow what the client does.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A second aggregator on the same port is an error, not a lottery.
    ("grpc.so_reuseport", 0),
)

_LOOPBACK: Final = ("localhost", "127.", "[::1]", "::1")

if sys.platform == "darwin":
    # The c-ares resolver fails on some Macs. Read when gRPC first resolves a name.
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")


def open_channel(address: str) -> aio.Channel:
    """A channel to HOST:PORT. A proxy from the environment is used, but never for this machine itself.

    Raises ConfigError if the address is of another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not HOST:PORT, such as 192.168.1.20:50051")
    options = [*CLIENT, ("grpc.enable_http_proxy", 0)] if address.startswith(_LOOPBACK) else [*CLIENT]
    return aio.insecure_channel(address, options=options, compression=grpc.Compression.NoCompression)


def new_server() -> aio.Server:
    """A server without services or ports."""
    return aio.server(options=list(SERVER))
