"""The examples, run as their heads say."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from processes import Process, aggregator, process

EXAMPLES = Path(__file__).parents[2] / "examples"


def nearest_centroid_accuracy() -> float:
    """What a classifier that only knows each digit's mean image reaches on the same digits kept apart."""
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    means = torch.stack([images[train][targets[train] == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(images[test], means).argmin(dim=1)
    return (nearest == targets[test]).float().mean().item()


@pytest.mark.parametrize("workers", [1, 3])
def test_digits_trains_with_any_number_of_workers(workers: int) -> None:
    config = EXAMPLES / "digits.toml"
    with aggregator(config, "--listen", "127.0.0.1:0", "--http", "") as (server, address):
        with contextlib.ExitStack() as stack:
            scripts: list[Process] = [
                stack.enter_context(process(str(EXAMPLES / "digits.py"), address)) for _ in range(workers)
            ]
            assert [script.wait() for script in scripts] == [0] * workers
        assert server.wait() == 0
    accuracies = {float(script.output[-1].rpartition(" ")[2]) for script in scripts}
    assert len(accuracies) == 1  # they end with the same weights
    assert accuracies.pop() > nearest_centroid_accuracy()
    assert "round 199 counted" in server.text
