"""A worker that gets a share, sends half of its contribution, says so, and then hangs until it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import torch
from prometheus_client import CollectorRegistry

import gradwire
from gradwire import device as devices
from gradwire.client import Client
from gradwire.v1 import aggregation_pb2 as pb
from gradwire_worker.metrics import Metrics
from gradwire_worker.trainer import Trainer


async def half(self: Client, header: pb.ContributeHeader, rest: Any) -> pb.ContributeResponse:
    call = self._stub.Contribute(metadata=self._metadata)
    await call.write(pb.ContributeRequest(header=header))
    for message in rest[: len(rest) // 2]:
        await call.write(message)
    print(f"half of round {header.round} is sent", flush=True)
    await asyncio.Event().wait()
    raise AssertionError("never reached")


Client.contribute = half  # type: ignore[method-assign]
torch.set_num_threads(1)
session = gradwire.connect(sys.argv[1], worker=sys.argv[2])

Trainer(session, devices.pick("cpu"), Metrics(CollectorRegistry()), contextlib.nullcontext()).run()
