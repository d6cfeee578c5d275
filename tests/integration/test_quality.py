"""What compression costs on the demo's task, over real processes. Slow: `make test-slow`."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from processes import aggregator, worker

SEEDS = (0, 1, 2)
INNER_STEPS = 10

# The demo's task: 200 inner steps of 2 x 16 sequences, a tenth of them to warm up. Only what a round is differs.
RUN = """\
name = "{method}-{seed}"
seed = {seed}
rounds = {rounds}
[batch]
global_batch = {global_batch}
inner_batch = 16
shares = "fixed"
[round]
min_workers = 2
[server]
listen = "127.0.0.1:0"
http = ""
[training]
method = "{method}"
evaluate_every = 1000000
[training.optimizer]
lr = 0.004
warmup_rounds = {warmup_rounds}
[training.compression]
residual_decay = {residual_decay}
"""


def held_out_loss(folder: Path, method: str, seed: int, *, residual_decay: float = 0.9) -> float:
    """The loss of the final weights of a run with two workers; nats per byte."""
    steps = INNER_STEPS if method == "sparseloco" else 1
    config = folder / f"{method}-{seed}-{residual_decay}.toml"
    config.write_text(
        RUN.format(
            method=method,
            seed=seed,
            rounds=200 // steps,
            global_batch=32 * steps,
            warmup_rounds=20 / steps,
            residual_decay=residual_decay,
        )
    )
    with aggregator(config) as (server, address), worker(address, "one") as one, worker(address, "two") as two:
        assert one.wait(600) == 0
        assert two.wait(600) == 0
        assert server.wait() == 0
        found = re.search(r"held-out loss of the final weights: (\S+)", server.text)
    assert found is not None, server.text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sparseloco_keeps_up_with_dense_gradients_and_needs_its_residual(tmp_path: Path) -> None:
    dense = statistics.mean(held_out_loss(tmp_path, "dense", seed) for seed in SEEDS)
    sparse = statistics.mean(held_out_loss(tmp_path, "sparseloco", seed) for seed in SEEDS)
    blind = statistics.mean(held_out_loss(tmp_path, "sparseloco", seed, residual_decay=0.0) for seed in SEEDS)
    print(f"held-out loss: dense {dense:.4f}, sparseloco {sparse:.4f}, without error feedback {blind:.4f}")
    assert sparse <= 1.03 * dense
    assert blind >= 1.10 * sparse
