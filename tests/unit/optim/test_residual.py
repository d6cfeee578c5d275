"""Error feedback, against the definition written out with torch alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devices import KINDS, Kind
from gradwire.codec import Dense, TopK, decode
from gradwire.errors import ConfigError, NonFiniteGradient
from gradwire.manifest import Entry, Manifest, Role
from gradwire.optim.residual import Residual

SCHEME = TopK(k=2, chunk=8, layout="flat", values="fp32", dense_below=0)


def manifest(*names: str) -> Manifest:
    return Manifest("test", tuple(Entry(name, (8,), SCHEME) for name in names))


def keep_two_largest(tensor: torch.Tensor) -> torch.Tensor:
    """What top-2 of 8 sends, by sorting: the larger magnitude first, ties to the lower index."""
    order = sorted(range(8), key=lambda i: (-abs(float(tensor[i])), i))[:2]
    kept = torch.zeros(8)
    kept[order] = tensor[order]
    return kept


def test_what_was_left_behind_decays_and_is_added_to_the_next_update() -> None:
    one = manifest("w")
    residual, expected = Residual(0.5), torch.zeros(8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        update = torch.randn(8, generator=generator)
        total = 0.5 * expected + update
        (sent,) = residual.compress(one, {"w": update})
        residual.settle(counted=True)
        assert sent is not None
        assert torch.equal(decode(sent, SCHEME, (8,)), keep_two_largest(total))
        expected = total - keep_two_largest(total)
        assert torch.equal(residual.state()["w"], expected)
    assert residual.norm() == pytest.approx(float(expected.norm()))


def test_bf16_rounding_stays_in_the_residual() -> None:
    scheme = TopK(k=8, chunk=8, layout="flat", values="bf16", dense_below=0)
    residual, update = Residual(1.0), torch.tensor([1.001, 2.0, 3.003, 4.0, 5.005, 6.0, 7.007, 8.0])
    residual.compress(Manifest("test", (Entry("w", (8,), scheme),)), {"w": update})
    residual.settle(counted=True)
    assert torch.equal(residual.state()["w"], update - update.to(torch.bfloat16).to(torch.float32))


def test_a_contribution_that_did_not_count_leaves_the_residual_of_before_the_round() -> None:
    residual = Residual(1.0)
    residual.compress(manifest("w"), {"w": torch.arange(8.0)})
    residual.settle(counted=True)
    before = residual.state()["w"].clone()
    residual.compress(manifest("w"), {"w": torch.ones(8)})
    residual.settle(counted=False)
    assert torch.equal(residual.state()["w"], before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_a_value_that_cannot_be_sent_is_named_and_touches_nothing(bad: float) -> None:
    scheme = TopK(k=2, chunk=8, layout="flat", values="bf16", dense_below=0)
    entries = tuple(Entry(name, (8,), scheme) for name in ("first", "second"))
    residual = Residual(1.0)
    residual.compress(Manifest("test", entries), {"first": torch.arange(8.0), "second": torch.arange(8.0)})
    residual.settle(counted=True)
    before = {name: tensor.clone() for name, tensor in residual.state().items()}
    with pytest.raises(NonFiniteGradient, match="second"):
        residual.compress(Manifest("test", entries), {"first": torch.ones(8), "second": torch.full((8,), bad)})
    residual.settle(counted=True)
    assert all(torch.equal(residual.state()[name], tensor) for name, tensor in before.items())


def test_the_residual_follows_the_name_and_not_the_place() -> None:
    residual = Residual(1.0)
    updates = {"a": torch.arange(8.0), "b": -torch.arange(8.0) * 10}
    residual.compress(manifest("a", "b"), updates)
    residual.settle(counted=True)
    before = {name: tensor.clone() for name, tensor in residual.state().items()}
    zeros = {name: torch.zeros(8) for name in updates}
    residual.compress(manifest("b", "a"), zeros)
    residual.settle(counted=True)
    for name, tensor in before.items():
        assert torch.equal(residual.state()[name], tensor - keep_two_largest(tensor))


def test_a_missing_gradient_is_not_a_zero_and_keeps_its_residual() -> None:
    residual = Residual(0.5)
    residual.compress(manifest("a"), {"a": torch.arange(8.0)})
    residual.settle(counted=True)
    before = residual.state()["a"].clone()
    assert residual.compress(manifest("a"), {"a": None}) == [None]
    residual.settle(counted=True)
    assert torch.equal(residual.state()["a"], before)


def test_buffers_are_sent_as_they_are_without_feedback() -> None:
    one = Manifest("test", (Entry("mean", (8,), Dense("fp32"), Role.BUFFER),))
    residual, value = Residual(1.0), torch.randn(8)
    (sent,) = residual.compress(one, {"mean": value})
    residual.settle(counted=True)
    assert sent is not None
    assert sent.values == value.numpy().tobytes()
    assert residual.state() == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", ["bf16", "fp32", "sign"])
def test_the_residual_is_the_cpus_on_every_kind(values: Any, kind: Kind) -> None:
    scheme = TopK(k=5, chunk=64, values=values, dense_below=0)
    entries = Manifest("test", (Entry("w", (24, 16), scheme),))
    here, there = Residual(0.9), Residual(0.9)
    generator = torch.Generator().manual_seed(3)
    for number in range(4):
        update = torch.randn(24, 16, generator=generator)
        expected = here.compress(entries, {"w": update})
        here.settle(counted=number != 2)
        moved = update.to(kind.device)
        with kind.running():
            sent = there.compress(entries, {"w": moved})
            there.settle(counted=number != 2)
        assert sent == expected
    assert torch.equal(there.state()["w"].cpu(), here.state()["w"])


def test_a_decay_out_of_range_is_refused() -> None:
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"decay = .*: allowed is 0 to 1"):
            Residual(decay)
