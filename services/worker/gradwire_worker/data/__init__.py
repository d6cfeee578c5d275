"""What a run's samples are."""

from gradwire_worker.data.text import TextDataset

__all__ = ["TextDataset"]
