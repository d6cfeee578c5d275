"""`gradwire worker HOST:PORT` and `gradwire generate CHECKPOINT`."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from prometheus_client import CollectorRegistry, start_http_server

import gradwire
from gradwire import device as devices
from gradwire.config import ModelConfig
from gradwire.errors import ConfigError, GradwireError
from gradwire.signals import Stopped, raise_on_stop
from gradwire.state import read_checkpoint
from gradwire_worker import models
from gradwire_worker.metrics import Metrics
from gradwire_worker.trainer import Trainer

log = logging.getLogger("gradwire.worker")


def worker(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the aggregator.", metavar="HOST:PORT")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="Of the forward pass: float32, bf16, or auto: bf16 where it is faster.", metavar="P")
    ] = "float32",
    name: Annotated[str | None, typer.Option(help="This worker's name; default: the host's, with a suffix.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run that is meant; default: whichever it is.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for weights and residual; a restarted worker goes on with its residual.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between checkpoints.", min=1)] = 10,
    http: Annotated[str, typer.Option(help="HOST:PORT of /metrics; port 0: a free one; empty: none.")] = "127.0.0.1:0",
    give_up_after: Annotated[float | None, typer.Option(help="Seconds to try to reach the aggregator.")] = None,
) -> None:
    """Train on this machine for the run at HOST:PORT, until it is over."""
    chosen = devices.pick(device)
    autocast = devices.autocast(chosen, precision)
    if checkpoint is not None:
        _require_writable(checkpoint)
    metrics = Metrics(registry := CollectorRegistry())
    with raise_on_stop(), _serve_metrics(http, registry):
        session = gradwire.connect(address, run=run, worker=name, give_up_after_s=give_up_after, on_phase=metrics.phase)
        reason, written = "failed", ""
        try:
            trainer = Trainer(session, chosen, metrics, autocast)
            if checkpoint is not None:
                trainer.resume(checkpoint)
            try:
                trainer.run(_saver(trainer, checkpoint, checkpoint_every))
                reason = "finished"
            finally:
                if checkpoint is not None and session.consistent:
                    written = str(trainer.save(checkpoint))
                    log.info("checkpoint of round %d: %s", session.round, written)
        except Stopped as signal:
            reason = f"stopped by {signal}"
            raise
        except GradwireError as error:
            reason = f"failed: {error}"
            raise
        finally:
            session.leave(reason, checkpoint=written)


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint that a worker wrote.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    length: Annotated[int, typer.Option(help="Bytes to generate.", min=1)] = 300,
    temperature: Annotated[float, typer.Option(help="0: the likeliest byte each time.", min=0)] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
) -> None:
    """Let a trained model write."""
    tensors, metadata = read_checkpoint(checkpoint)
    if "model" not in metadata:
        raise ConfigError(f"{checkpoint} doesn't say which model it is of; give one that `gradwire worker` wrote")
    weights = {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith(("weight/", "buffer/"))}
    try:
        model = models.build(ModelConfig.model_validate_json(metadata["model"]), seed=0, device=torch.device("cpu"))
        model.load_state_dict(weights)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{checkpoint} doesn't hold the model it speaks of: {error}") from error
    text = model.generate(
        prompt.encode(), length=length, temperature=temperature, generator=torch.Generator().manual_seed(seed)
    )
    print(prompt + text.decode("utf-8", errors="replace"))


def _saver(trainer: Trainer, folder: Path | None, every: int) -> Callable[[int], None]:
    def save(round_: int) -> None:
        if folder is not None and round_ and round_ % every == 0:
            trainer.save(folder)

    return save


def _require_writable(folder: Path) -> None:
    """Raises ConfigError now rather than after hours of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--checkpoint {folder}: can't write there: {error.strerror}") from error


@contextlib.contextmanager
def _serve_metrics(address: str, registry: CollectorRegistry) -> Iterator[None]:
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http {address}: not HOST:PORT, such as 127.0.0.1:9465")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise ConfigError(f"--http {address}: can't listen there ({error.strerror}); choose another port") from error
    log.info("metrics: http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
