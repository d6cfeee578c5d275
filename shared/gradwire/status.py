"""`gradwire status HOST:PORT` and `gradwire health HOST:PORT`: a look at a run from outside."""

from __future__ import annotations

import sys
from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradwire import background
from gradwire.errors import Unavailable
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1.aggregation_pb2_grpc import AggregationServiceStub
from gradwire.wire import calls
from gradwire.wire.channel import open_channel

Address = Annotated[str, typer.Argument(help="HOST:PORT of the aggregator.", metavar="HOST:PORT")]
TIMEOUT_S = 10.0
WIDE = 160  # columns where there is no terminal to fit


def status(
    address: Address,
    json: Annotated[bool, typer.Option("--json", help="Print the state as JSON.")] = False,
) -> None:
    """Show where a run stands: round, phase and its reason, workers, losses, bytes."""
    answer = get_run(address)
    if json:
        text = json_format.MessageToJson(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(text)
    else:
        show(answer, Console(width=None if sys.stdout.isatty() else WIDE))


def health(address: Address) -> None:
    """Exit 0 if the aggregator serves, by the gRPC health service; for health checks of containers."""
    answer = background.run(_check(address))
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)


def get_run(address: str) -> pb.GetRunResponse:
    """The run at an address. Raises Unavailable if nobody answers within 10 s."""
    return background.run(_get_run(address))


def show(answer: pb.GetRunResponse, console: Console) -> None:
    """Prints a run for a reader."""
    state = answer.state
    phase = pb.Phase.Name(state.phase).removeprefix("PHASE_").lower()
    console.print(f"run [bold]{answer.run}[/bold]: round {state.round} of {state.rounds}, {phase}", highlight=False)
    console.print(state.reason, highlight=False, markup=False)
    if state.parameters:
        console.print(f"{state.parameters:,} parameters, {state.samples_counted:,} samples counted", highlight=False)
    if state.samples_skipped:
        console.print(f"{state.samples_skipped:,} samples skipped after too many attempts", highlight=False)
    if state.history:
        console.print(_losses(state), highlight=False)
    console.print(worker_table(state))
    for event in state.events[-5:]:
        when = event.time.ToDatetime().strftime("%H:%M:%S")
        console.print(f"{when} {event.text}", highlight=False, markup=False)
    if state.metrics_address:
        console.print(f"metrics: http://{state.metrics_address}/metrics", highlight=False)


def worker_table(state: pb.RunState) -> Table:
    """The workers of a run as a table."""
    table = Table("worker", "device", "doing", "samples/s", "share", "sent", "received", "counted", "refused", box=None)
    for worker in state.workers:
        table.add_row(
            escape(worker.name),
            escape(worker.device),
            escape(worker.activity if worker.present else f"gone: {worker.activity}"),
            f"{worker.samples_per_second:.1f}" if worker.samples_per_second else "-",
            str(worker.share),
            data_size(worker.upload_bytes),
            data_size(worker.download_bytes),
            str(worker.accepted),
            escape(f"{worker.refused} ({worker.last_refusal})") if worker.refused else "0",
        )
    return table


def data_size(count: float) -> str:
    """Bytes for a reader: 1.5 kB, 3.2 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _losses(state: pb.RunState) -> str:
    last = state.history[-1]
    held_out = [each.held_out_loss for each in state.history if each.HasField("held_out_loss")]
    parts = [f"last round: {last.seconds:.1f} s, {last.contributors} contributions"]
    if last.HasField("loss"):
        parts.append(f"training loss {last.loss:.3f}")
    if held_out:
        parts.append(f"held-out loss {held_out[-1]:.3f}")
    return ", ".join(parts)


async def _get_run(address: str) -> pb.GetRunResponse:
    metadata = calls.metadata(calls.token_from_environment())
    async with open_channel(address) as channel:
        try:
            stub = AggregationServiceStub(channel)
            return await stub.GetRun(pb.GetRunRequest(), metadata=metadata, timeout=TIMEOUT_S)
        except aio.AioRpcError as error:
            raise _unreachable(address, error) from error


async def _check(address: str) -> health_pb2.HealthCheckResponse:
    async with open_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answer: health_pb2.HealthCheckResponse = await stub.Check(  # type: ignore[attr-defined]
                request, timeout=TIMEOUT_S
            )
            return answer
        except aio.AioRpcError as error:
            raise _unreachable(address, error) from error


def _unreachable(address: str, error: aio.AioRpcError) -> Exception:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"no aggregator answers at {address}: {error.details()}")
    return calls.error_from(error)
