"""Which tensors of a model are exchanged, under which names, in which dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.codec import Dense, TopK
from gradwire.errors import ConfigError, ManifestMismatch
from gradwire.manifest import Role
from gradwire.optim.accumulate import GradientMean, set_gradients
from gradwire.optim.tensors import strip, tensors_of


@pytest.mark.parametrize(
    "name", ["a.w", "module.a.w", "_orig_mod.a.w", "module._orig_mod.a.w", "_orig_mod.module.module.a.w"]
)
def test_wrappers_leave_no_trace_in_names(name: str) -> None:
    assert strip(name) == "a.w"


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    plain = tensors_of(torch.optim.SGD(model.parameters(), 0.1), model)
    compiled = tensors_of(torch.optim.SGD(model.parameters(), 0.1), torch.compile(model))
    assert list(compiled.trained) == list(plain.trained) == ["0.weight", "0.bias"]


def test_each_kind_of_tensor_goes_where_it_belongs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.zeros(3), persistent=False)
    model[0].bias.requires_grad_(False)
    tensors = tensors_of(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), model)
    assert list(tensors.trained) == ["0.weight", "1.weight", "1.bias"]
    assert list(tensors.frozen) == ["0.bias"]
    assert list(tensors.averaged) == ["1.running_mean", "1.running_var"]
    assert list(tensors.kept) == ["1.num_batches_tracked"]  # int64: never averaged, or it would come back as float
    manifest = tensors.manifest("test", TopK())
    assert [(e.name, e.role, e.scheme) for e in manifest][-1] == ("1.running_var", Role.BUFFER, Dense("fp32"))
    assert manifest.parameters == 16 + 4 + 4


def test_tied_weights_are_one_tensor() -> None:
    first, second = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert list(tensors_of(torch.optim.SGD(model.parameters(), 0.1), model).trained) == ["0.weight"]


def test_names_may_come_from_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    assert list(tensors_of(torch.optim.SGD(model.named_parameters(), 0.1), None).trained) == ["weight", "bias"]
    with pytest.raises(ConfigError, match="pass model="):
        tensors_of(torch.optim.SGD(model.parameters(), 0.1), None)


def test_an_optimizer_that_trains_nothing_of_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="trains no parameter"):
        tensors_of(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="2 parameters that are not in the model"):
        tensors_of(torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], 0.1), model)


def test_a_snapshot_restores_every_tensor_and_refuses_another_shape() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)

    source, target = model(1), model(2)
    source[1].num_batches_tracked.fill_(7)  # type: ignore[index]
    state = tensors_of(torch.optim.SGD(source.parameters(), 0.1), source).snapshot()
    tensors = tensors_of(torch.optim.SGD(target.parameters(), 0.1), target)
    tensors.restore(state)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)
        assert target.state_dict()[name].dtype == tensor.dtype
    with pytest.raises(ManifestMismatch, match=r"0\.weight.*\[4, 4\]"):
        tensors.restore({**state, "weight/0.weight": torch.zeros(4, 5)})


def test_a_sparse_embedding_gradient_is_coalesced() -> None:
    embedding = nn.Embedding(6, 2, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    mean = GradientMean({"weight": embedding.weight})
    mean.add(1.0)
    expected = torch.zeros(6, 2)
    expected[1], expected[4] = 2.0, 1.0
    assert torch.equal(mean.take()["weight"], expected)


def test_gradients_are_weighted_and_missing_ones_stay_missing() -> None:
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    mean = GradientMean({"used": used, "unused": unused})
    for gradient, weight in (([1.0, 2.0], 0.25), ([3.0, 4.0], 0.75)):
        used.grad = torch.tensor(gradient)
        mean.add(weight)
    taken = mean.take()
    assert taken.keys() == {"used"}
    assert torch.equal(taken["used"], torch.tensor([2.5, 3.5]))
    assert mean.take() == {}


def test_an_average_comes_back_in_each_parameters_own_dtype() -> None:
    half, full = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2))
    set_gradients({"half": half, "full": full}, {"half": torch.tensor([1.0, 2.0])})
    assert half.grad is not None
    assert half.grad.dtype is torch.bfloat16
    assert full.grad is None
