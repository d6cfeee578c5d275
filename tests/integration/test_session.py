"""How a session tries again, gives up, and waits."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import gradwire
from fleet import run_config
from gradwire import background, errors
from gradwire.retry import Retry
from gradwire.wire.channel import new_server
from support import aggregator


@contextmanager
def failing_server(code: grpc.StatusCode, calls: Counter[str]) -> Iterator[str]:
    """An aggregator that answers every GetRun with a status."""

    async def get_run(request: bytes, context: Any) -> bytes:
        calls["GetRun"] += 1
        await context.abort(code, "on purpose")
        return b""

    async def start() -> tuple[Any, int]:
        server = new_server()
        handler = grpc.unary_unary_rpc_method_handler(get_run)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("gradwire.v1.AggregationService", {"GetRun": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = background.run(start())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        background.run(server.stop(0))


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_failures_that_are_not_absence_are_tried_a_few_times_only(code: grpc.StatusCode) -> None:
    calls: Counter[str] = Counter()
    with failing_server(code, calls) as address, pytest.raises(errors.Unavailable, match="on purpose"):
        gradwire.connect(address, give_up_after_s=60)
    assert calls["GetRun"] == Retry().attempts


def test_what_trying_again_cannot_help_is_not_tried_again() -> None:
    calls: Counter[str] = Counter()
    with (
        failing_server(grpc.StatusCode.FAILED_PRECONDITION, calls) as address,
        pytest.raises(errors.GradwireError, match="on purpose"),
    ):
        gradwire.connect(address, give_up_after_s=60)
    assert calls["GetRun"] == 1


def test_an_aggregator_that_stays_away_is_given_up_with_the_reason() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers, and nobody else gets the port
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(errors.Unavailable, match=r"gave up after .*GetRun at 127\.0\.0\.1"):
            gradwire.connect(address, give_up_after_s=1)


def test_delays_grow_to_the_longest_and_are_jittered() -> None:
    retry = Retry(first_s=0.1, longest_s=2.0)
    delays = [delay for delay, _ in zip(retry.delays(), range(10), strict=False)]
    limits = [min(0.1 * 2**n, 2.0) for n in range(10)]
    assert all(limit / 2 <= delay <= limit for delay, limit in zip(delays, limits, strict=True))


def test_a_session_connected_before_the_aggregator_starts_waits_for_it() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    config = run_config(rounds=1, global_batch=8)
    config = config.model_copy(update={"server": config.server.model_copy(update={"listen": f"127.0.0.1:{port}"})})
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(gradwire.connect(f"127.0.0.1:{port}", give_up_after_s=30).run)
    )
    waiting.start()
    with aggregator(config):
        waiting.join(30)
    assert found == ["test"]


def test_the_config_arrives_as_it_was_given() -> None:
    config = run_config(rounds=3, global_batch=8, training={"model": {"dim": 16, "heads": 2}})
    with aggregator(config) as serving:
        session = gradwire.connect(serving.address)
        session.leave()
    assert session.config == config.model_copy(update={"server": session.config.server})


def test_another_run_name_is_refused() -> None:
    with (
        aggregator(run_config(rounds=1, global_batch=8)) as serving,
        pytest.raises(errors.ManifestMismatch, match="run: 'other' here, 'test'"),
    ):
        gradwire.connect(serving.address, run="other")


def test_the_token_is_wanted_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_TOKEN", raising=False)
    with aggregator(run_config(rounds=1, global_batch=8), token="secret") as serving:
        with pytest.raises(errors.Unauthenticated, match="none came"):
            gradwire.connect(serving.address)
        with pytest.raises(errors.Unauthenticated, match="this one is wrong"):
            gradwire.connect(serving.address, token="guess")
        assert gradwire.connect(serving.address, token="secret").run == "test"
        monkeypatch.setenv("GRADWIRE_TOKEN", "secret")
        assert gradwire.connect(serving.address).run == "test"


def joined(address: str, model: nn.Module, *, data_sha256: bytes = b"") -> gradwire.DistributedOptimizer:
    session = gradwire.connect(address, data_sha256=data_sha256)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        return gradwire.DistributedOptimizer(sgd, session, model=model)
    finally:
        session.leave()


def test_another_model_is_refused_with_the_first_difference() -> None:
    with aggregator(run_config(rounds=1, global_batch=8)) as serving:
        joined(serving.address, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        with pytest.raises(errors.ManifestMismatch, match=r"1\.weight: \[3, 8\] here, \[2, 8\] in the run"):
            joined(serving.address, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))


def test_another_data_set_is_refused() -> None:
    with aggregator(run_config(rounds=1, global_batch=8)) as serving:
        joined(serving.address, nn.Linear(2, 2), data_sha256=bytes(32))
        with pytest.raises(errors.ManifestMismatch, match=r"data: SHA-256 01010101.* here, 00000000.* in the run"):
            joined(serving.address, nn.Linear(2, 2), data_sha256=bytes([1] * 32))


def test_another_protocol_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with aggregator(run_config(rounds=1, global_batch=8)) as serving:
        monkeypatch.setattr("gradwire.session.PROTOCOL", 99)
        with pytest.raises(errors.ManifestMismatch, match="speaks protocol version 1, this worker 99"):
            gradwire.connect(serving.address)


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:", ":50051", "127.0.0.1:99999", "host:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not HOST:PORT"):
        gradwire.connect(address)
