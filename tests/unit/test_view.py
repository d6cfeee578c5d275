"""The terminal's view of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gradwire.v1 import aggregation_pb2 as pb
from gradwire.view import View, curve


def rounds(count: int) -> pb.RunState:
    history = [
        pb.RoundRecord(round=n, loss=4.0 - n, contributors=2, upload_bytes=1500, seconds=0.5) for n in range(count)
    ]
    return pb.RunState(round=count, rounds=9, history=history, reason="open: 1 of 2 workers answered")


def test_without_a_terminal_every_round_is_one_line_said_once() -> None:
    out = io.StringIO()
    with View(Console(file=out, force_terminal=False), "training").open() as view:
        for count in (0, 1, 3):
            view.update(rounds(count))
    assert out.getvalue().splitlines() == [
        "open: 1 of 2 workers answered",
        "round 1/9, loss 4.000, 2 workers, 1.5 kB up, 0.5 s",
        "round 2/9, loss 3.000, 2 workers, 1.5 kB up, 0.5 s",
        "round 3/9, loss 2.000, 2 workers, 1.5 kB up, 0.5 s",
    ]


def test_on_a_terminal_the_curve_and_the_workers_are_drawn() -> None:
    out = io.StringIO()
    state = rounds(3)
    state.workers.add(name="worker-1", device="cpu (x86_64)", present=True, accepted=3)
    with View(Console(file=out, force_terminal=True, width=120), "training").open() as view:
        view.update(state)
    text = out.getvalue()
    assert "3/9" in text
    assert "training loss" in text
    assert "worker-1" in text


def test_a_falling_curve_falls() -> None:
    lines = curve([3.0, 2.0, 1.0], width=3, height=3).splitlines()
    assert lines == ["  3.000 │█  ", "        │██ ", "  1.000 │███"]


@pytest.mark.parametrize("values", [[1.0], [2.0] * 500, list(range(500))])
def test_a_curve_of_any_length_fits(values: list[float]) -> None:
    lines = curve(values, width=40, height=5).splitlines()
    assert len(lines) == 5
    assert all(len(line) <= 40 + 9 for line in lines)
