"""The codec against runs of the DeMo reference implementation; tests/golden/README.md says what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire import codec
from gradwire.codec import dct, indices

GOLDEN = Path(__file__).parents[2] / "golden"
RUNS = ["demo_1worker", "demo_2workers_chunk64", "demo_3workers_chunk16_wd"]


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    with np.load(GOLDEN / f"{request.param}.npz") as file:
        arrays = {key: file[key] for key in file}
    return json.loads(arrays.pop("config").tobytes()), {key: torch.from_numpy(each) for key, each in arrays.items()}


def scheme_of(config, **more):
    chunk = config["chunk"] ** 2
    options = {"transform": "dct", "values": "fp32", "dense_below": 0, "normalization": "senders", **more}
    return codec.TopK(k=min(config["topk"], chunk), chunk=chunk, **options)


def test_coefficients_are_the_references(run):
    config, golden = run
    for number, shape in enumerate(config["shapes"]):
        layout = codec.layout_of(scheme_of(config), shape)
        for worker in range(config["workers"]):
            tensor = config["lr"] * golden[f"step0.worker{worker}.grad{number}"]
            ours = dct.transform(layout.to_chunks(tensor), layout.tile_or_row)
            expected = golden[f"step0.worker{worker}.coeffs{number}"].reshape(-1)
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_indices_values_and_residuals_are_the_references(run):
    config, golden = run
    scheme = scheme_of(config)
    for number, shape in enumerate(config["shapes"]):
        layout = codec.layout_of(scheme, shape)
        for worker in range(config["workers"]):
            residual = torch.zeros(shape)
            for step in range(config["steps"]):
                key = f"step{step}.worker{worker}."
                total = residual * config["decay"] + config["lr"] * golden[f"{key}grad{number}"]
                sent = codec.encode(total, scheme)
                chosen = indices.unpack(sent.form, sent.indices, layout.kept_counts(), layout.lengths())
                assert chosen.tolist() == golden[f"{key}indices{number}"].reshape(-1).tolist()
                kept = torch.frombuffer(bytearray(sent.values), dtype=torch.float32)
                torch.testing.assert_close(kept, golden[f"{key}values{number}"].reshape(-1), atol=1e-6, rtol=0)
                residual = total - codec.decode(sent, scheme, shape)
                torch.testing.assert_close(residual, golden[f"{key}residual{number}"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("update", ["coefficients", "sign"])
def test_averages_move_the_parameters_as_the_reference_did(run, update):
    config, golden = run
    scheme = scheme_of(config, update=update)
    for number, shape in enumerate(config["shapes"]):
        before = golden[f"param{number}.init"]
        for step in range(config["steps"]):
            sent = []
            for worker in range(config["workers"]):
                # What the worker sent is what left its momentum.
                key = f"step{step}.worker{worker}."
                earlier = golden.get(f"step{step - 1}.worker{worker}.residual{number}", torch.zeros(shape))
                sent.append(
                    codec.encode(earlier * config["decay"] + config["lr"] * golden[f"{key}grad{number}"], scheme)
                )
            mean = codec.average(sent, [1.0] * len(sent), scheme=scheme, shape=shape)
            ours = before * (1 - config["lr"] * config["wd"]) - config["lr"] * codec.decode(mean, scheme, shape).sign()
            after = golden[f"step{step}.param{number}"]
            # Where the reference's decoded update is within rounding of zero, its sign is anybody's.
            assert ((ours - after).abs() > 1e-6).float().mean() < 1e-4
            before = after
