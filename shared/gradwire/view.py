"""A run as it goes, drawn in the terminal; plain lines where there is none."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gradwire.status import data_size, worker_table
from gradwire.v1 import aggregation_pb2 as pb

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
CURVE_HEIGHT: Final = 8
CURVE_WIDTH: Final = 60


@dataclass
class View:
    """Shows the states of a run one after another. `update` is what WatchRun's messages go to."""

    console: Console
    title: str
    _live: Live | None = None
    _state: pb.RunState = field(default_factory=pb.RunState)
    _started: float = field(default_factory=time.monotonic)
    _shown_rounds: int = 0
    _shown_reason: str = ""

    @contextmanager
    def open(self) -> Iterator[View]:
        """Draws until the context ends."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(self._draw(), console=self.console, refresh_per_second=4) as self._live:
            yield self

    def update(self, state: pb.RunState) -> None:
        """Shows a newer state."""
        self._state = state
        if self._live is not None:
            self._live.update(self._draw())
        else:
            self._print_news()

    def _print_news(self) -> None:
        state = self._state
        for each in state.history:
            if each.round < self._shown_rounds:
                continue
            self._shown_rounds = each.round + 1
            parts = [f"round {each.round + 1}/{state.rounds}"]
            if each.HasField("loss"):
                parts.append(f"loss {each.loss:.3f}")
            if each.HasField("held_out_loss"):
                parts.append(f"held-out {each.held_out_loss:.3f} before it")
            parts.append(f"{each.contributors} workers")
            parts.append(f"{data_size(each.upload_bytes)} up")
            parts.append(f"{each.seconds:.1f} s")
            self.console.print(", ".join(parts), highlight=False)
        if not state.history and state.reason != self._shown_reason:
            self._shown_reason = state.reason
            self.console.print(state.reason, highlight=False, markup=False)

    def _draw(self) -> RenderableType:
        state = self._state
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
        )
        task = progress.add_task(self.title, total=max(state.rounds, 1), completed=state.round)
        progress.tasks[task].start_time = progress.get_time() - (time.monotonic() - self._started)
        losses = [each.loss for each in state.history if each.HasField("loss")]
        parts: list[RenderableType] = [progress, Text(state.reason or "starting", style="dim")]
        if losses:
            parts += [Text("training loss, nats per byte", style="bold"), Text(curve(losses))]
        if state.workers:
            parts += [Text(""), worker_table(state)]
        if state.metrics_address:
            parts.append(Text(f"metrics: http://{state.metrics_address}/metrics", style="dim"))
        return Group(*parts)


def curve(values: Sequence[float], *, width: int = CURVE_WIDTH, height: int = CURVE_HEIGHT) -> str:
    """Values as a bar chart of text, `height` lines of at most `width` columns; long series are averaged down."""
    columns = _resample(values, width)
    low, high = min(columns), max(columns)
    span = high - low or 1.0
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_cell((value - low) / span * (height - 1) + 1 - row) for value in columns)
        label = f"{low + span * row / max(1, height - 1):7.3f}" if row in (0, height - 1) else " " * 7
        lines.append(f"{label} │{cells}")
    return "\n".join(lines)


def _cell(filled: float) -> str:
    return _BLOCKS[max(0, min(8, math.floor(filled * 8)))]


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        repeat = max(1, min(4, width // len(values)))
        return [value for value in values for _ in range(repeat)]
    edges = [round(number * len(values) / width) for number in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
