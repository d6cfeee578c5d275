"""Wiring: the run behind gRPC, health, reflection and /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from gradwire.config import RunConfig
from gradwire.corpus import Corpus
from gradwire.errors import ConfigError
from gradwire.wire.channel import new_server
from gradwire_aggregator.handlers import SERVICE, service_handler
from gradwire_aggregator.ledger import Ledger
from gradwire_aggregator.metrics import Metrics
from gradwire_aggregator.run import Run
from gradwire_aggregator.servicer import Servicer
from gradwire_aggregator.store import Store

log = logging.getLogger("gradwire.aggregator")


@dataclass(frozen=True)
class Serving:
    """A running aggregator."""

    run: Run
    address: str  # HOST:PORT that workers connect to
    metrics_address: str  # HOST:PORT of /metrics; empty where there is none
    driver: asyncio.Task[None]  # ends only if it failed, and then the run can't go on


@contextlib.asynccontextmanager
async def serve(
    config: RunConfig,
    corpus: Corpus | None,
    *,
    data: Path | None = None,
    token: str | None = None,
    grace_s: float = 3.0,
) -> AsyncIterator[Serving]:
    """Serves a run until the context ends; calls that are under way then get `grace_s` seconds to finish.

    data: the run's folder; a run that is there goes on. None: one that ends with the context.
    Raises ConfigError where an address can't be listened on, or the folder is of another run; GradwireError where what
    is in the folder is damaged.
    """
    registry = CollectorRegistry()
    with contextlib.ExitStack() as stack:
        folder = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")))
        ledger = stack.enter_context(contextlib.closing(Ledger(folder)))
        store = Store(folder, ledger.kept_aggregates(), ledger.snapshots())
        metrics_address = _serve_metrics(config.server.http, registry, stack.callback)
        run = Run(config, corpus, store, ledger, Metrics(registry))
        stack.callback(run.close)
        server = new_server()
        server.add_generic_rpc_handlers((service_handler(Servicer(run, metrics_address=metrics_address), token),))
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        host = config.server.listen.rpartition(":")[0]
        try:
            port = server.add_insecure_port(config.server.listen)
        except RuntimeError as error:
            raise ConfigError(_in_use("server.listen", config.server.listen)) from error
        await server.start()
        for name in ("", SERVICE):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        driver = asyncio.create_task(run.drive())
        try:
            yield Serving(run, f"{host}:{port}", metrics_address, driver)
        finally:
            await checks.enter_graceful_shutdown()
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
            await server.stop(grace_s)


def _serve_metrics(address: str, registry: CollectorRegistry, on_exit: Callable[..., object]) -> str:
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise ConfigError(_in_use("server.http", address)) from error

    def stop(server: WSGIServer = server) -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    on_exit(stop)
    return f"{host}:{server.server_port}"


def _in_use(key: str, address: str) -> str:
    return (
        f"{key} = {address!r}: can't listen there; another program may use the port, or the address may not be this "
        "machine's. Choose another port (0 takes a free one), or stop the other program"
    )
