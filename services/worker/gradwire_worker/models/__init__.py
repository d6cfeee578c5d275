"""The models that a run's config can name."""

from __future__ import annotations

import torch

from gradwire.config import ModelConfig
from gradwire_worker.models.transformer import Transformer

__all__ = ["Transformer", "build"]


def build(config: ModelConfig, *, seed: int, device: torch.device | str) -> Transformer:
    """The model that `config` describes, float32, on `device`, its weights drawn from `seed`.

    The draw is made on the CPU, so that it is the same whatever the device, and leaves every global generator
    as it was. The seed may be any int64.
    """
    # `torch.manual_seed` would seed the accelerators' generators too, and this fork restores only the CPU's.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = Transformer(
            dim=config.dim,
            layers=config.layers,
            heads=config.heads,
            context=config.context,
            vocab=config.vocab,
            ffn_dim=config.ffn_dim,
        )
    return model.to(device)
