"""The training loop of `gradwire worker`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeAlias

import torch

from gradwire import device as devices
from gradwire.config import TrainingConfig
from gradwire.corpus import Corpus
from gradwire.errors import ConfigError
from gradwire.optim.demo import DeMo
from gradwire.optim.distributed import DistributedOptimizer
from gradwire.optim.sparseloco import SparseLoCo
from gradwire.schedule import learning_rate
from gradwire.session import Session
from gradwire.state import read_checkpoint, write_checkpoint
from gradwire_worker import models
from gradwire_worker.data import TextDataset
from gradwire_worker.metrics import Metrics

log = logging.getLogger("gradwire.worker")

HELD_OUT_BATCH: Final = 16
HELD_OUT_BATCHES: Final = 16

Optimizer: TypeAlias = DistributedOptimizer | DeMo | SparseLoCo


class Trainer:
    """One worker's part in a run with a configured model.

    session: connected, not joined yet; making the trainer joins it, and loads the run's weights.
    autocast: what the forward pass runs in; weights are float32 in any case.
    Raises ConfigError if the run has no [training] section, ManifestMismatch if its model is another.
    """

    def __init__(
        self, session: Session, device: torch.device, metrics: Metrics, autocast: AbstractContextManager[object]
    ) -> None:
        if session.config.training is None:
            raise ConfigError(f"run {session.run!r} has no [training] section: its workers are scripts of its own")
        self.session = session
        self.training: TrainingConfig = session.config.training
        train, held_out = Corpus(session.fetch_data()).split(self.training.data.held_out_fraction)
        self.dataset = TextDataset(train, context=self.training.model.context)
        self.held_out = TextDataset(held_out, context=self.training.model.context)
        self.model = models.build(self.training.model, seed=session.config.seed, device=device)
        self.optimizer = make_optimizer(self.training, self.model, session)
        self._device = device
        self._autocast = autocast
        self._metrics = metrics

    def run(self, on_round: Callable[[int], None] | None = None) -> None:
        """Trains until the run is over. `on_round` is called with the number of each round before it is trained."""
        for batch in self.session.loader(self.dataset, self.session.config.batch.inner_batch):
            if self.session.batch.index == 0:
                self._start_share(on_round)
            self._set_learning_rate()
            self.optimizer.zero_grad()
            with self.session.phase("compute"):
                with self._autocast:
                    loss = self.model.loss(batch.to(self._device))
                loss.backward()  # type: ignore[no-untyped-call]
                devices.synchronize(self._device)
            self._metrics.trained(tokens=batch.numel() - len(batch))
            self.optimizer.step(loss)
        self._metrics.round_over(self.session, self.optimizer.residual)
        if self.session.evaluate_last:
            self.session.report(self.evaluate())

    def evaluate(self) -> float:
        """Mean loss on the held-out text, in nats per byte."""
        with torch.no_grad(), self._autocast:
            batches = self.held_out.held_out_batches(HELD_OUT_BATCH, HELD_OUT_BATCHES)
            losses = [float(self.model.loss(batch.to(self._device))) for batch in batches]
        return sum(losses) / len(losses)

    def save(self, folder: Path) -> Path:
        """Writes weights, replicated optimizer state and residual to WORKER.safetensors in a folder."""
        path = folder / f"{self.session.worker}.safetensors"
        residual = {f"residual/{name}": tensor for name, tensor in self.optimizer.residual.state().items()}
        metadata = {
            "run": self.session.run,
            "run_id": self.session.run_id.hex(),
            "round": str(self.session.round),
            "model": self.training.model.model_dump_json(),
        }
        write_checkpoint(path, {**self.optimizer.snapshot(), **residual}, metadata)
        return path

    def resume(self, folder: Path) -> None:
        """Takes over the residual that an earlier process of this worker left in a folder, if it is of this run.

        Raises GradwireError where the checkpoint is damaged.
        """
        path = folder / f"{self.session.worker}.safetensors"
        if not path.exists():
            return
        tensors, metadata = read_checkpoint(path)
        if metadata.get("run_id") != self.session.run_id.hex():
            log.info("%s is of another run: the residual starts from zero", path)
            return
        kept = {key.removeprefix("residual/"): each for key, each in tensors.items() if key.startswith("residual/")}
        state = {"round": int(metadata["round"]), "residual": kept}
        self.optimizer.residual.load_state_dict(state, self.optimizer.manifest)

    def _start_share(self, on_round: Callable[[int], None] | None) -> None:
        self._metrics.round_over(self.session, self.optimizer.residual)
        if on_round is not None:
            on_round(self.session.round)
        share = self.session.share
        if share is not None and share.evaluate:
            self.session.report(self.evaluate())

    def _set_learning_rate(self) -> None:
        batch, optimizer = self.session.batch, self.training.optimizer
        rate = learning_rate(
            self.session.round + (batch.index + 1) / batch.batches,
            rounds=self.session.config.rounds,
            peak=optimizer.lr,
            warmup_rounds=optimizer.warmup_rounds,
            final_fraction=optimizer.final_lr_fraction,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def make_optimizer(training: TrainingConfig, model: torch.nn.Module, session: Session) -> Optimizer:
    """The optimizer of the run's method; making it joins the run."""
    config, compression = training.optimizer, training.compression
    clip_norm = config.clip_norm or None
    if training.method == "demo":
        return DeMo(
            model.parameters(),
            config.lr,
            session,
            model=model,
            scheme=training.top_k,
            decay=training.residual_decay,
            update=compression.update,
            weight_decay=config.weight_decay,
        )
    if training.method == "topk":
        sgd = torch.optim.SGD(model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)
        return DistributedOptimizer(
            sgd,
            session,
            model=model,
            scheme=training.top_k,
            clip_norm=clip_norm,
            residual_decay=training.residual_decay,
        )
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(model.parameters(), config.lr, betas, weight_decay=config.weight_decay)
    if training.method == "dense":
        return DistributedOptimizer(adamw, session, model=model, scheme=training.dense, clip_norm=clip_norm)
    return SparseLoCo(
        adamw,
        session,
        model=model,
        scheme=training.top_k,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        residual_decay=training.residual_decay,
        clip_norm=clip_norm,
    )
