"""A plain PyTorch loop on scikit-learn's handwritten digits, made distributed. Five lines are new; they are marked.

pip install scikit-learn
gradwire aggregator examples/digits.toml          # on one machine
python examples/digits.py 127.0.0.1:50051         # as many times as you like, on any machine that reaches it
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import gradwire  # 1


def main(address: str) -> float:
    """Trains, and returns the accuracy on the digits kept apart."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, test = random_split(data, [1500, len(data) - 1500], torch.Generator().manual_seed(0))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with gradwire.connect(address) as session:  # 2
        optimizer = gradwire.DistributedOptimizer(adamw, session, model=model)  # 3
        for inputs, targets in session.loader(train, batch_size=25):  # 4: instead of a DataLoader
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss)  # 5: told the loss, for the run's records

    inputs, targets = map(torch.stack, zip(*test, strict=True))
    with torch.no_grad():
        accuracy = (model(inputs).argmax(dim=1) == targets).float().mean().item()
    print(f"accuracy on {len(test)} digits not trained on: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1])
