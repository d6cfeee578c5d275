"""State as bytes and on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from gradwire import state
from gradwire.errors import GradwireError

TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "bf16": torch.randn(3, 5).to(torch.bfloat16),
    "count": torch.tensor(2**40),
    "mask": torch.tensor([True, False]),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "five": torch.randn(1, 2, 3, 2, 1),
}


def test_every_dtype_and_shape_survives_exactly() -> None:
    back = state.unpack(state.pack(TENSORS))
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)


def test_damaged_bytes_are_refused() -> None:
    with pytest.raises(GradwireError, match="damaged"):
        state.unpack(state.pack(TENSORS)[:-1])


def test_the_digest_is_sha256_over_names_and_bytes() -> None:
    tensors = {"b": torch.tensor([1.0]), "a": torch.tensor([2], dtype=torch.int16)}
    expected = hashlib.sha256(b"a\0" + b"\x02\x00" + b"b\0" + b"\x00\x00\x80\x3f").hexdigest()
    assert state.digest(tensors) == expected


def test_a_checkpoint_is_read_back_with_what_was_said_of_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "w.safetensors"
    state.write_checkpoint(path, TENSORS, {"round": "3"})
    tensors, metadata = state.read_checkpoint(path)
    assert metadata == {"round": "3"}
    assert torch.equal(tensors["strided"], TENSORS["strided"])
    assert [each.name for each in path.parent.iterdir()] == ["w.safetensors"]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    state.write_checkpoint(path, {"a": torch.zeros(1)}, {})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.os, "fsync", full)
    with pytest.raises(GradwireError, match="No space"):
        state.write_checkpoint(path, {"a": torch.ones(1)}, {})
    assert torch.equal(state.read_checkpoint(path)[0]["a"], torch.zeros(1))


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(GradwireError, match=r"x\.safetensors"):
        state.read_checkpoint(path)
    with pytest.raises(GradwireError, match="missing"):
        state.read_checkpoint(tmp_path / "missing")
