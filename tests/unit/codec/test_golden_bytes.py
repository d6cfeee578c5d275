"""The same coefficients give the same bytes: on every kind of device, and as a reference in plain numpy wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from devices import KINDS
from gradwire import codec

with np.load(Path(__file__).parents[2] / "golden" / "encodings.npz") as file:
    GOLDEN = {key: file[key] for key in file}
CASES = [(number, GOLDEN[f"case{number}.name"].tobytes().decode()) for number in range(int(GOLDEN["cases"]))]


def scheme_of(number):
    options = json.loads(GOLDEN[f"case{number}.scheme"].tobytes())
    return codec.Dense(options["values"]) if options.pop("kind") == "dense" else codec.TopK(**options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "name"), CASES, ids=[name for _, name in CASES])
def test_the_bytes_are_the_references(number, name, kind):
    tensor = torch.from_numpy(GOLDEN[f"case{number}.tensor"]).to(kind.device)
    with kind.running():
        encoded = codec.encode(tensor, scheme_of(number))
    assert int(encoded.form) == int(GOLDEN[f"case{number}.form"])
    for field in ("values", "indices", "scales"):
        assert getattr(encoded, field) == GOLDEN[f"case{number}.{field}"].tobytes(), field
    assert not encoded.counts


@pytest.mark.parametrize(("number", "name"), CASES, ids=[name for _, name in CASES])
def test_a_strided_view_has_the_bytes_of_its_contiguous_copy(number, name):
    tensor = torch.from_numpy(GOLDEN[f"case{number}.tensor"])
    strided = torch.empty((*tensor.shape, 3))[..., 1].copy_(tensor)
    assert codec.encode(strided, scheme_of(number)) == codec.encode(tensor, scheme_of(number))
