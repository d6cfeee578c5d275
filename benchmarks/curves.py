"""`python -m benchmarks.curves`: the held-out loss of all four methods on the demo's task, drawn into one picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import matplotlib as mpl
import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console

from gradwire import demo
from gradwire.v1 import aggregation_pb2 as pb

WORKERS: Final = 2
PLACE: Final = Path("runs/curves")
PICTURE: Final = Path("docs/methods.png")
# Told apart without colour, too.
STYLES: Final = {
    "dense": ("#555555", "-", "s"),
    "sparseloco": ("#0072b2", "-", "o"),
    "demo": ("#d55e00", "--", "^"),
    "topk": ("#009e73", ":", "v"),
}


@dataclass(frozen=True)
class Curve:
    """One run: before each measured round the inner steps taken, the bytes a worker has uploaded, and the loss."""

    method: str
    steps: list[int]
    upload_bytes: list[float]
    losses: list[float]
    upload_per_round: float
    download_per_round: float


def main(
    picture: Annotated[Path, typer.Option(help="Where to draw.")] = PICTURE,
    saved: Annotated[Path | None, typer.Option(help="Draw what an earlier call measured (its curves.json).")] = None,
) -> None:
    """Train the demo by each method in turn (some minutes), and draw."""
    if saved is not None:
        curves = [Curve(**each) for each in json.loads(saved.read_text(encoding="utf-8"))]
    else:
        curves = [measured(method) for method in STYLES]
        (PLACE / "curves.json").write_text(json.dumps([asdict(each) for each in curves]), encoding="utf-8")
    draw(curves, picture)
    print(f"{'method':<12}{'held-out':>9}{'up a round':>13}{'down a round':>14}{'up in all':>12}")
    for each in curves:
        print(
            f"{each.method:<12}{each.losses[-1]:>9.3f}{each.upload_per_round / 1e3:>10.1f} kB"
            f"{each.download_per_round / 1e3:>11.1f} kB{each.upload_bytes[-1] / 1e6:>9.2f} MB"
        )
    print(f"drawn: {picture}")


def measured(method: str) -> Curve:
    """Runs the demo by a method."""
    config = demo.write_config(PLACE / method, method=method, workers=WORKERS)
    return curve_of(method, demo.train(Console(), config, workers=WORKERS))


def curve_of(method: str, state: pb.RunState) -> Curve:
    """What a run's state says of it. Bytes are those of one worker."""
    inner_steps = demo.RECIPES[method].inner_steps
    steps, sent, losses = [], [], []
    uploaded = 0.0
    for each in state.history:
        if each.HasField("held_out_loss"):
            steps.append(each.round * inner_steps)
            sent.append(uploaded)
            losses.append(each.held_out_loss)
        uploaded += each.upload_bytes / WORKERS
    return Curve(
        method=method,
        steps=[*steps, len(state.history) * inner_steps],
        upload_bytes=[*sent, uploaded],
        losses=[*losses, state.final_held_out_loss],
        upload_per_round=uploaded / len(state.history),
        download_per_round=sum(each.download_bytes for each in state.history) / len(state.history),
    )


def draw(curves: list[Curve], picture: Path) -> None:
    """Loss by inner steps, and by what a worker has uploaded."""
    mpl.use("Agg")
    figure, (by_step, by_byte) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for each in curves:
        color, line, marker = STYLES[each.method]
        name = f"{each.method}, {each.losses[-1]:.2f}"
        style = {"color": color, "linestyle": line, "marker": marker, "markersize": 4, "label": name}
        by_step.plot(each.steps, each.losses, **style)
        by_byte.plot([size / 1e6 for size in each.upload_bytes[1:]], each.losses[1:], **style)
    by_byte.set_xscale("log")
    label(by_step, "inner steps of 2 workers x 16 sequences", "held-out loss, nats per byte")
    label(by_byte, "uploaded by each worker, MB", "")
    by_step.set_ylim(1.8, 4.2)
    by_step.legend(title="method, loss at the end")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def label(axes: Axes, horizontal: str, vertical: str) -> None:
    """Names both axes."""
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    typer.run(main)
