"""DeMo through a real aggregator: the reference's trajectories, and the same bits on all kinds of device."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import nn

import gradwire
from fleet import SEED, Points, digest, in_threads, mlp, run_config, squared_error, train
from gradwire.errors import ConfigError
from gradwire.samples import SampleOrder
from support import aggregator

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file}
    return json.loads(arrays.pop("config").tobytes()), {key: torch.from_numpy(each) for key, each in arrays.items()}


class Given(nn.Module):
    """Parameters w0, w1, ... with given first values."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        for number, value in enumerate(values):
            self.register_parameter(f"w{number}", nn.Parameter(value.clone()))


def replay(address: str, worker: int, config: dict[str, Any], arrays: dict[str, torch.Tensor], update: Any) -> Any:
    """Trains on the golden gradients; the parameters after each step."""
    model = Given([arrays[f"param{n}.init"] for n in range(len(config["shapes"]))])
    scheme = gradwire.TopK(
        k=config["topk"],
        chunk=config["chunk"] ** 2,
        transform="dct",
        values="fp32",
        dense_below=0,
        normalization="senders",
    )
    history = []
    with gradwire.connect(address, worker=f"worker-{worker}", give_up_after_s=20) as session:
        optimizer = gradwire.DeMo(
            model.parameters(),
            config["lr"],
            session,
            model=model,
            scheme=scheme,
            decay=config["decay"],
            update=update,
            weight_decay=config["wd"],
        )
        for _ in session.loader(Points(), batch_size=1):
            step = session.round
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = arrays[f"step{step}.worker{worker}.grad{number}"].clone()
            optimizer.step()
            history.append([parameter.detach().clone() for parameter in model.parameters()])
    return history


def update_in_float64(config: dict[str, Any], arrays: dict[str, torch.Tensor], step: int, number: int) -> np.ndarray:
    """What the reference's parameter moved by before the sign was taken, by scipy, from what its workers sent."""
    shape = config["shapes"][number]
    indices = [arrays[f"step{step}.worker{w}.indices{number}"].numpy() for w in range(config["workers"])]
    sent = [arrays[f"step{step}.worker{w}.values{number}"].numpy() for w in range(config["workers"])]
    tiles = arrays[f"step0.worker0.coeffs{number}"].shape
    grid, tile = (tiles[:2], tiles[2:]) if len(tiles) == 4 else ((1, tiles[0]), (1, tiles[1]))
    total, senders = np.zeros((*grid, np.prod(tile))), np.zeros((*grid, np.prod(tile)))
    for where, values in zip(indices, sent, strict=True):
        for row, col in np.ndindex(*grid):
            at = where.reshape(*grid, -1)[row, col]
            total[row, col, at] += values.reshape(*grid, -1)[row, col]
            senders[row, col, at] += 1
    mean = (total / np.maximum(senders, 1)).reshape(*grid, *tile)
    weights = scipy.fft.idctn(mean, type=2, norm="ortho", axes=(2, 3))
    return weights.transpose(0, 2, 1, 3).reshape(shape)


@pytest.mark.parametrize("update", ["sign", "coefficients"])
@pytest.mark.parametrize("name", ["demo_1worker", "demo_2workers_chunk64", "demo_3workers_chunk16_wd"])
def test_the_references_trajectories_come_out_of_a_real_run(name: str, update: Any) -> None:
    config, arrays = golden(name)
    workers, steps = config["workers"], config["steps"]
    with aggregator(run_config(rounds=steps, global_batch=workers, min_workers=workers)) as serving:
        jobs = [functools.partial(replay, serving.address, w, config, arrays, update) for w in range(workers)]
        histories = in_threads(*jobs)
    certain: dict[int, np.ndarray] = {}
    for step in range(steps):
        for number in range(len(config["shapes"])):
            # Where the update is within rounding of zero its sign is anybody's, and the weight differs from then on.
            clear = np.abs(update_in_float64(config, arrays, step, number)) > 1e-8
            certain[number] = certain.get(number, True) & clear
            assert certain[number].mean() > 0.99
            expected = arrays[f"step{step}.param{number}"]
            for history in histories:
                ours = history[step][number]
                np.testing.assert_allclose(ours[certain[number]], expected[certain[number]], rtol=0, atol=2e-7)


def test_one_worker_whose_tensors_travel_whole_is_sign_descent() -> None:
    def demo(model: nn.Module, session: gradwire.Session) -> Any:
        return gradwire.DeMo(model.parameters(), 0.01, session, model=model, scheme=gradwire.TopK(
            transform="dct", values="fp32", normalization="senders"), weight_decay=0.1)  # fmt: skip

    with aggregator(run_config(rounds=20, global_batch=8)) as serving:
        model = train(serving.address, "a", demo)
    alone, data = mlp(), Points()
    order = SampleOrder(SEED, len(data)).indices(0, 20 * 8).tolist()
    for number in range(20):
        batch = [torch.stack(each) for each in zip(*(data[i] for i in order[8 * number : 8 * number + 8]), strict=True)]
        alone.zero_grad()
        squared_error(alone, batch).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.mul_(1 - 0.01 * 0.1).sub_(0.01 * parameter.grad.sign())
    assert digest(model) == digest(alone)


def test_what_cannot_be_demo_is_refused() -> None:
    with aggregator(run_config(rounds=1, global_batch=1)) as serving:
        model = mlp()
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            with pytest.raises(ConfigError, match="needs transform 'dct'"):
                gradwire.DeMo(model.parameters(), 0.1, session, model=model, scheme=gradwire.TopK(), update="sign")
            with pytest.raises(ConfigError, match=r"decay = 1\.5: allowed is 0 to 1"):
                gradwire.DeMo(model.parameters(), 0.1, session, model=model, decay=1.5)
            with pytest.raises(ConfigError, match="lr = -1"):
                gradwire.DeMo(model.parameters(), -1.0, session, model=model)
            with pytest.raises(ConfigError, match="model="):
                gradwire.DeMo(model.parameters(), 0.1, session)
