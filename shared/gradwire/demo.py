"""`gradwire demo`: the whole thing on one machine, an aggregator and some workers, each a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer
from grpc import aio
from rich.console import Console

from gradwire import background
from gradwire.errors import ConfigError, GradwireError
from gradwire.signals import raise_on_stop
from gradwire.status import data_size
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1.aggregation_pb2_grpc import AggregationServiceStub
from gradwire.view import View
from gradwire.wire import calls
from gradwire.wire.channel import open_channel

INNER_BATCH: Final = 16
STOP_WITHIN_S: Final = 10.0

CONFIG: Final = """\
# Written by `gradwire demo`.
name = "demo"
rounds = {rounds}

[batch]
global_batch = {global_batch}
inner_batch = {inner_batch}

[round]
min_workers = {workers}

[server]
listen = "127.0.0.1:0"
http = "127.0.0.1:0"

[training]
method = "{method}"
evaluate_every = {evaluate_every}

[training.optimizer]
lr = {lr}
warmup_rounds = {warmup_rounds}

[training.compression]
residual_decay = {residual_decay}
"""


@dataclass(frozen=True)
class Recipe:
    """What suits a method on this task: 200 steps of each worker make the run."""

    inner_steps: int  # a round
    lr: float
    residual_decay: float = 0.0

    @property
    def rounds(self) -> int:
        return 200 // self.inner_steps


RECIPES: Final = {
    "sparseloco": Recipe(inner_steps=10, lr=0.004, residual_decay=0.9),
    "demo": Recipe(inner_steps=1, lr=0.002, residual_decay=0.999),
    "dense": Recipe(inner_steps=1, lr=0.003),
    "topk": Recipe(inner_steps=1, lr=0.3, residual_decay=0.9),
}


def demo(
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1, max=64)] = 2,
    device: Annotated[list[str] | None, typer.Option(help="Device of the workers in turn; may be repeated.")] = None,
    method: Annotated[str, typer.Option(help="sparseloco, demo, dense or topk.", metavar="METHOD")] = "sparseloco",
    rounds: Annotated[int | None, typer.Option(help="Default: 20 of 10 inner steps, or 200 of one.", min=1)] = None,
    folder: Annotated[Path, typer.Option(help="Where to put config, logs and checkpoint.")] = Path("runs"),
) -> None:
    """Train a small language model on this machine's Python source text, with workers that talk over gRPC."""
    console = Console()
    place = folder / time.strftime("demo-%Y%m%d-%H%M%S")
    config = write_config(place, method=method, workers=workers, rounds=rounds)
    with raise_on_stop():
        state = train(console, config, workers=workers, devices=device)
        _summarize(console, state, place)


def write_config(place: Path, *, method: str, workers: int, rounds: int | None = None) -> Path:
    """Writes the run's config to run.toml in `place`. Raises ConfigError for an unknown method, or where it can't."""
    recipe = RECIPES.get(method)
    if recipe is None:
        raise ConfigError(f"--method {method}: allowed are {', '.join(RECIPES)}")
    rounds = rounds or recipe.rounds
    text = CONFIG.format(
        method=method,
        rounds=rounds,
        workers=workers,
        global_batch=workers * recipe.inner_steps * INNER_BATCH,
        inner_batch=INNER_BATCH,
        evaluate_every=max(1, 20 // recipe.inner_steps),
        lr=recipe.lr,
        warmup_rounds=min(recipe.rounds, rounds) / 10,
        residual_decay=recipe.residual_decay,
    )
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / "run.toml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--folder {place.parent}: can't write there: {error.strerror}") from error
    return place / "run.toml"


def train(console: Console, config: Path, *, workers: int, devices: list[str] | None = None) -> pb.RunState:
    """Runs a config to its end with workers as processes of this machine; what the aggregator knows at the end.

    Logs and checkpoints go to the config's folder. Raises GradwireError if a process fails.
    """
    with Processes(config.parent).running() as processes:
        address = processes.start_aggregator(config)
        console.print(f"aggregator at {address}; config and logs in {config.parent}", highlight=False)
        threads = max(1, (os.cpu_count() or 1) // workers)
        for number in range(1, workers + 1):
            chosen = devices[(number - 1) % len(devices)] if devices else "auto"
            processes.start_worker(address, f"worker-{number}", chosen, threads)
        with View(console, "training").open() as view:
            state = background.run(_watch(address, view, processes))
        processes.wait()
    return state


@dataclass
class Processes:
    """The demo's child processes. Whatever happens, none of them outlives `running`."""

    place: Path
    _children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[Processes]:
        """Ends all children at the end."""
        try:
            yield self
        finally:
            for child in self._children.values():
                child.terminate()
            deadline = time.monotonic() + STOP_WITHIN_S
            for child in self._children.values():
                try:
                    child.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()

    def start_aggregator(self, config: Path) -> str:
        """Starts the aggregator and returns its address."""
        child = self._start("aggregator", ["aggregator", str(config)], threads=1)
        for line in child.stdout or ():
            _, found, address = line.partition("listening on ")
            if found:
                return address.strip()
        self.check(ended=True)
        raise GradwireError("the aggregator ended without saying why")

    def start_worker(self, address: str, name: str, device: str, threads: int) -> None:
        """Starts a worker."""
        arguments = ["worker", address, "--name", name, "--device", device, "--checkpoint", str(self.place)]
        self._start(name, [*arguments, "--give-up-after", "30"], threads)

    def check(self, *, ended: bool = False) -> None:
        """Raises GradwireError, with the end of its log, if a child failed. `ended`: it has to have ended."""
        for name, child in self._children.items():
            if ended:
                child.wait()
            if child.poll():
                raise GradwireError(f"{name} failed with exit code {child.returncode}:\n{self._tail(name)}")

    def wait(self) -> None:
        """Waits until all children have ended by themselves. Raises GradwireError if one failed."""
        self.check(ended=True)

    def _start(self, name: str, arguments: list[str], threads: int) -> subprocess.Popen[str]:
        with (self.place / f"{name}.log").open("w") as log:
            # In a session of its own, so that Ctrl-C reaches the demo alone, which then ends its children in order.
            child = subprocess.Popen(
                [sys.executable, "-m", "gradwire", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "aggregator" else log,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )
        self._children[name] = child
        return child

    def _tail(self, name: str) -> str:
        return "\n".join((self.place / f"{name}.log").read_text(errors="replace").splitlines()[-15:])


async def _watch(address: str, view: View, processes: Processes) -> pb.RunState:
    """Follows the run to its end; the last state."""
    state = pb.RunState()
    async with open_channel(address) as channel:
        call = AggregationServiceStub(channel).WatchRun(
            pb.WatchRunRequest(), metadata=calls.metadata(calls.token_from_environment())
        )
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=1.0)
                await asyncio.to_thread(processes.check)
                if not done:
                    continue
                message = reading.result()
                if not isinstance(message, pb.WatchRunResponse):  # the end of the stream
                    return state
                state = message.state
                view.update(state)
                reading = asyncio.ensure_future(call.read())
        except aio.AioRpcError as error:
            if state.phase == pb.PHASE_ENDED:
                return state
            raise GradwireError(f"lost the aggregator at {address}: {error.details()}") from error
        finally:
            reading.cancel()


def _summarize(console: Console, state: pb.RunState, place: Path) -> None:
    say = functools.partial(console.print, highlight=False, soft_wrap=True)
    measured = [each.held_out_loss for each in state.history if each.HasField("held_out_loss")]
    say()
    if measured and state.HasField("final_held_out_loss"):
        say(
            f"held-out loss: {measured[0]:.3f} before, [bold]{state.final_held_out_loss:.3f}[/bold] after "
            "(nats per byte)"
        )
    steps = state.samples_counted / INNER_BATCH
    sent = sum(each.upload_bytes for each in state.history)
    dense = 4 * state.parameters
    if steps and sent:
        say(
            f"uploaded: {data_size(sent / steps)} per inner step and worker; dense float32 gradients take "
            f"{data_size(dense)}: [bold]{dense * steps / sent:,.0f} times fewer[/bold]"
        )
    checkpoint = place / "worker-1.safetensors"
    if checkpoint.exists():
        say("the trained model goes on from `def `:", markup=False)
        say(_generate(checkpoint), markup=False, style="dim")
        say(f"checkpoint: {checkpoint}")


def _generate(checkpoint: Path) -> str:
    command = [sys.executable, "-m", "gradwire", "generate", str(checkpoint), "--length", "160"]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return answer.stdout.rstrip() if answer.returncode == 0 else f"(failed: {answer.stderr.strip()})"
