"""A replica's state as bytes, and on disk: safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from gradwire.device import to_host
from gradwire.errors import GradwireError, ManifestMismatch


def pack(state: Mapping[str, torch.Tensor]) -> bytes:
    """The tensors as safetensors bytes, dtypes and shapes exact."""
    data: bytes = save({name: to_host(tensor).clone() for name, tensor in state.items()})
    return data


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in safetensors bytes. Raises GradwireError where they aren't."""
    try:
        return load(data)
    except SafetensorError as error:
        raise GradwireError(f"the snapshot is damaged: {error}") from error


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, in hex, over names, and over the tensors' bytes in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        host = to_host(state[name])
        sha.update(name.encode() + b"\0" + host.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def restore(target: torch.Tensor, source: Mapping[str, torch.Tensor], name: str) -> None:
    """Copies `source[name]` into `target`. Raises ManifestMismatch where it is missing or has another shape."""
    tensor = source.get(name)
    if tensor is None or tensor.shape != target.shape:
        found = "nothing" if tensor is None else str(list(tensor.shape))
        raise ManifestMismatch(f"the snapshot holds {found} for {name}, this worker has {list(target.shape)}")
    with torch.no_grad():
        target.copy_(tensor)


def write_checkpoint(path: Path, state: Mapping[str, torch.Tensor], metadata: Mapping[str, object]) -> None:
    """Writes a checkpoint so that a crash leaves either the old file or the new one, never half of one.

    Raises GradwireError where it can't be written.
    """
    header = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    data = save({name: to_host(tensor).clone() for name, tensor in state.items()}, metadata=header)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise GradwireError(f"cannot write the checkpoint {path}: {error.strerror}") from error


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a checkpoint. Raises GradwireError where the file is none."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise GradwireError(f"cannot read the checkpoint {path}: {error}") from error
