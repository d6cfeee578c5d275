"""`gradwire aggregator run.toml`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import Annotated

import torch
import typer

from gradwire import background
from gradwire.config import RunConfig, parse_config, read_config
from gradwire.corpus import Corpus, read_corpus
from gradwire.errors import GradwireError
from gradwire.signals import stop_event
from gradwire.wire.calls import TOKEN_VARIABLE, token_from_environment
from gradwire_aggregator.server import serve

log = logging.getLogger("gradwire.aggregator")


def aggregator(
    config: Annotated[Path, typer.Argument(help="The run's config; docs/config.md has the keys.")],
    listen: Annotated[str | None, typer.Option(help="HOST:PORT for workers, instead of the config's.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the run; a run that is there goes on. Default: none is kept.")
    ] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT of /metrics, instead of the config's.")] = None,
) -> None:
    """Serve a run: take contributions, average them, hand the aggregate to every worker."""
    run_config = _with_addresses(read_config(config), listen, http)
    training = run_config.training
    corpus = None
    if training is not None:
        path = Path(training.data.path) if training.data.path else None
        corpus = read_corpus(path, max_bytes=training.data.max_bytes)
    torch.set_num_threads(1)  # averaging goes in steps too short to be shared
    loop = background.new_event_loop()
    with contextlib.closing(loop):
        loop.run_until_complete(_serve(run_config, corpus, data))


def _with_addresses(config: RunConfig, listen: str | None, http: str | None) -> RunConfig:
    changes = {key: value for key, value in (("listen", listen), ("http", http)) if value is not None}
    values = config.model_dump(exclude_none=True)
    values["server"] |= changes
    return parse_config(values, source="--listen or --http")


async def _serve(config: RunConfig, corpus: Corpus | None, data: Path | None) -> None:
    stop = stop_event()
    token = token_from_environment()
    async with serve(config, corpus, data=data, token=token) as serving:
        print(f"run {config.name!r}: {config.rounds} rounds, listening on {serving.address}", flush=True)
        if serving.metrics_address:
            print(f"metrics: http://{serving.metrics_address}/metrics", flush=True)
        print(_how_to_join(serving.address, token is not None), flush=True)
        run = serving.run
        ended = asyncio.create_task(run.wait_until_over())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({ended, stopped, serving.driver}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            stopped.cancel()
        if serving.driver.done():
            error = serving.driver.exception()
            if isinstance(error, GradwireError):
                raise error
            log.critical("the run can't go on", exc_info=error)
            raise GradwireError("the aggregator failed inside; its log says where")
        log.info("stopping" if stop.is_set() else "the run is over and all workers have left")


def _how_to_join(address: str, token: bool) -> str:
    host, _, port = address.rpartition(":")
    prefix = f"{TOKEN_VARIABLE}=... " if token else ""
    if host in ("0.0.0.0", "[::]", "::"):
        return f"on the next machine, type: {prefix}gradwire worker {_own_address()}:{port}"
    if host == "localhost" or host.startswith(("127.", "[::1]")):
        return (
            f"on this machine, type: {prefix}gradwire worker {address}\n"
            f"(other machines can't reach {host}; start with --listen 0.0.0.0:{port} for them)"
        )
    return f"on the next machine, type: {prefix}gradwire worker {address}"


def _own_address() -> str:
    """This machine's address as its network sees it. Nothing is sent: the socket only picks a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
