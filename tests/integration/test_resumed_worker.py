"""A worker that ends and is started again, with the checkpoint that it left."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

import gradwire
from fleet import run_config
from gradwire.corpus import Corpus
from gradwire_worker.metrics import Metrics
from gradwire_worker.trainer import Trainer
from support import aggregator

CORPUS = Corpus(b"the quick brown fox jumps over the lazy dog. " * 200)
TRAINING: dict[str, Any] = {
    "method": "topk",
    "evaluate_every": 1000,
    "model": {"dim": 16, "layers": 1, "heads": 2, "context": 16},
    "optimizer": {"lr": 0.1, "warmup_rounds": 0.5},
    "compression": {"k": 4, "chunk": 64, "dense_below": 64},
}


class Stop(Exception):
    """Ends a process in the middle of a run."""


def train(address: str, folder: Path, *, save_at: int = -1, stop_at: int = -1) -> Trainer:
    """One process life of worker `a`."""
    with gradwire.connect(address, worker="a", give_up_after_s=20) as session:
        trainer = Trainer(session, torch.device("cpu"), Metrics(CollectorRegistry()), contextlib.nullcontext())
        trainer.resume(folder)

        def on_round(number: int) -> None:
            if number == save_at:
                trainer.save(folder)
            if number == stop_at:
                raise Stop

        with contextlib.suppress(Stop):
            trainer.run(on_round)
    return trainer


def run(folder: Path, lives: list[dict[str, int]]) -> Trainer:
    with aggregator(run_config(rounds=10, global_batch=8, inner_batch=4, training=TRAINING), CORPUS) as serving:
        return [train(serving.address, folder, **life) for life in lives][-1]


def assert_same(one: Trainer, other: Trainer) -> None:
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_it_goes_on_with_its_residual_where_it_was_saved_for_its_next_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never_ended = run(tmp_path / "none", [{}])
    with caplog.at_level("INFO"):
        resumed = run(tmp_path, [{"save_at": 6, "stop_at": 6}, {}])
    assert "goes on with the checkpoint's residual of round 6" in caplog.text
    assert_same(never_ended, resumed)


def test_it_starts_from_zero_where_rounds_have_passed_since_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, [{"save_at": 4, "stop_at": 6}, {}])
    assert "the checkpoint's residual is of round 4, this is round 6: it starts from zero" in caplog.text


def test_the_checkpoint_of_another_run_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, [{"save_at": 3, "stop_at": 3}])
    with caplog.at_level("INFO"):
        again = run(tmp_path, [{}])
    assert "is of another run: the residual starts from zero" in caplog.text
    assert_same(again, run(tmp_path / "none", [{}]))
