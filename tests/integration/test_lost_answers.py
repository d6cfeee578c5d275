"""What becomes of a contribution when only its answer is lost."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from grpc import aio
from torch import nn

import gradwire
from fleet import mlp, run_config, train, weights
from gradwire.client import Client
from gradwire.v1 import aggregation_pb2 as pb
from support import aggregator

SCHEME = gradwire.TopK(k=2, chunk=16, layout="flat", dense_below=0, normalization="senders")


def run_once(monkeypatch: pytest.MonkeyPatch | None) -> tuple[nn.Module, dict[str, torch.Tensor], int]:
    """Six rounds alone; with a monkeypatch, the answers of the even rounds' contributions are lost once."""
    lost: set[int] = set()
    contribute = Client.contribute

    async def forgetful(self: Client, header: pb.ContributeHeader, rest: Any) -> pb.ContributeResponse:
        answer = await contribute(self, header, rest)
        if header.round % 2 == 0 and header.round not in lost:
            lost.add(header.round)
            empty = aio.Metadata()
            raise aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details="lost on purpose")
        return answer

    if monkeypatch is not None:
        monkeypatch.setattr(Client, "contribute", forgetful)
    made = []

    def make(model: nn.Module, session: gradwire.Session) -> Any:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made.append(gradwire.SparseLoCo(adamw, session, model=model, scheme=SCHEME))
        return made[0]

    with aggregator(run_config(rounds=6, global_batch=16)) as serving:
        model = train(serving.address, "a", make, model=mlp())
        counted = serving.run.rounds.plan.counted.total
    return model, made[0].residual.state(), counted


def test_a_contribution_that_counted_settles_the_residual_though_its_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, residual, counted = run_once(None)
    again, residual_again, counted_again = run_once(monkeypatch)
    assert counted == counted_again == 6 * 16
    for name, tensor in weights(model).items():
        assert torch.equal(weights(again)[name], tensor)
    assert any(tensor.any() for tensor in residual.values())
    for name, tensor in residual.items():
        assert torch.equal(residual_again[name], tensor)
