"""The commands as processes: killed, stopped, started in any order, and refused."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from gradwire import background
from gradwire.status import get_run
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1.aggregation_pb2_grpc import AggregationServiceStub
from gradwire.wire.channel import open_channel
from processes import GRACE_S, aggregator, process, tiny_config, worker

UPLOADER = str(Path(__file__).with_name("uploader.py"))


def states(address: str) -> Iterator[pb.RunState]:
    """The states of a run, as WatchRun tells them."""

    async def open_stream() -> object:
        return AggregationServiceStub(open_channel(address)).WatchRun(pb.WatchRunRequest())

    call = background.run(open_stream())

    async def read() -> object:
        return await call.read()  # type: ignore[attr-defined]

    while isinstance(message := background.run(read()), pb.WatchRunResponse):
        yield message.state


def test_a_worker_killed_while_it_uploads_leaves_no_trace_and_training_goes_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rounds=12, min_workers=2, deadline_s=20, lease_s=2)
    with aggregator(config) as (server, address), worker(address, "good", "--checkpoint", str(tmp_path)) as good:
        with process(UPLOADER, address, "victim") as victim:
            victim.wait_for("half of round 0 is sent")
            victim.signal(signal.SIGKILL)
            victim.wait()
        # min_workers is 2: the lost share goes to whoever comes next, and the round closes with it.
        with worker(address, "next") as following:
            assert good.wait() == 0
            assert following.wait() == 0
        assert server.wait() == 0
        text = server.text
    assert "victim: not heard of for 2 s" in text
    rounds = re.findall(r"round (\d+) counted: (\d) contributions, (\d+) samples", text)
    assert [(int(r), int(w), int(s)) for r, w, s in rounds] == [(r, 2, 16) for r in range(12)]
    weights = load_file(tmp_path / "good.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_at_the_deadline_the_share_of_a_worker_that_hangs_goes_to_one_that_waits(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rounds=3, deadline_s=4, lease_s=30)
    with aggregator(config) as (server, address), process(UPLOADER, address, "slow") as slow:
        slow.wait_for("half of round 0 is sent")
        slow.signal(signal.SIGSTOP)
        with worker(address, "good") as good:
            server.wait_for("slow: round 0: late: nothing came within 4 s")
            assert good.wait() == 0  # the share went to it, and it trained on alone
        text = server.text
    assert re.findall(r"round (\d) counted: (\d) contributions, (\d+) samples", text) == [
        (number, "1", "16") for number in "012"
    ]


def test_a_worker_waits_for_the_aggregator_and_a_restarted_one_is_back_in_the_next_round(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    address = f"127.0.0.1:{port}"
    config = tiny_config(tmp_path, min_workers=2, port=port)
    with worker(address, "early") as early:
        early.wait_for("cannot reach the aggregator")
        with aggregator(config) as (server, _), worker(address, "other"):
            early.wait_for("joined run tiny")
            with worker(address, "again") as again:
                again.wait_for("joined run tiny")
                seen = states(address)
                next(s for s in seen if any(w.name == "again" and w.accepted > 0 for w in s.workers))
                again.signal(signal.SIGKILL)
                again.wait()
            with worker(address, "again") as back:
                server.wait_for("again joined on cpu")
                server.wait_for("again joined on cpu")
                now = get_run(address).state.round
                back.wait_for("joined run tiny")
                latest = next(s for s in seen if sum(r.contributors == 3 for r in s.history if r.round > now) >= 20)
                # It replays what it missed, and from then on all three are in every round.
                counted = [record.contributors for record in latest.history if record.round > now]
                first = counted.index(3)
                assert counted[first:] == [3] * len(counted[first:])


def test_sigterm_ends_every_process_in_order(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, min_workers=2)
    with aggregator(config) as (server, address):
        with worker(address, "one", "--checkpoint", str(tmp_path)) as one, worker(address, "two") as two:
            server.wait_for("round 3 counted")
            one.signal(signal.SIGTERM)
            assert one.wait(GRACE_S) == 0
            server.wait_for("one: left: stopped by SIGTERM")
            two.signal(signal.SIGINT)
            assert two.wait(GRACE_S) == 0
            assert "Traceback" not in one.text + two.text
        with worker(address, "three") as three, worker(address, "four"):
            three.wait_for("joined run tiny")
            server.signal(signal.SIGTERM)
            assert server.wait(GRACE_S) == 0
        assert "Traceback" not in server.text
    assert (tmp_path / "one.safetensors").exists()


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_a_port_in_use_is_a_message_and_not_a_stack(tmp_path: Path, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with process("-m", "gradwire", "aggregator", str(tiny_config(tmp_path)), option, address) as child:
            assert child.wait() == 1
    assert f"{address!r}: can't listen there" in child.text
    assert "Traceback" not in child.text


def test_a_worker_of_another_run_and_an_old_checkpoint_reader_are_refused_with_a_reason(tmp_path: Path) -> None:
    with aggregator(tiny_config(tmp_path)) as (_, address):
        with worker(address, "lost", "--run", "another") as lost:
            assert lost.wait() == 1
        assert lost.output[-1] == f"gradwire: run: 'another' here, 'tiny' at {address}"
        with worker(address, "blind", "--device", "tpu") as blind:
            assert blind.wait() == 1
        assert "--device tpu: allowed are auto, cpu, cuda, cuda:N and mps" in blind.text


def test_metrics_of_both_sides_are_served(tmp_path: Path) -> None:
    with aggregator(tiny_config(tmp_path)) as (server, address), worker(address, "one") as one:
        worker_url = one.wait_for("metrics: ").partition("metrics: ")[2].strip()
        server.wait_for("round 2 counted")
        address_of_metrics = get_run(address).state.metrics_address
        ours = urllib.request.urlopen(f"http://{address_of_metrics}/metrics").read().decode()
        theirs = urllib.request.urlopen(worker_url).read().decode()
    for series in (
        "gradwire_round ",
        'gradwire_rounds_total{result="counted"} ',
        "gradwire_round_seconds_count ",
        'gradwire_phase_seconds_count{phase="open"} ',
        'gradwire_contributions_total{result="accepted"} ',
        'gradwire_payload_bytes_total{direction="upload"} ',
        'gradwire_workers{device="cpu"} 1.0',
        "gradwire_compression_ratio ",
        "gradwire_loss ",
    ):
        assert series in ours, series
    for phase in ("data", "compute", "encode", "upload", "wait", "download", "apply"):
        count = re.search(rf'gradwire_worker_phase_seconds_count{{phase="{phase}"}} (\d+)', theirs)
        assert count is not None, phase
        assert int(count[1]) > 0, phase
    assert float(re.search(r"^gradwire_worker_residual_norm (\S+)", theirs, re.M)[1]) > 0  # type: ignore[index]
    assert float(re.search(r"^gradwire_worker_tokens_per_second (\S+)", theirs, re.M)[1]) > 0  # type: ignore[index]


def test_the_demo_leaves_nothing_behind_when_it_is_interrupted(tmp_path: Path) -> None:
    with process("-m", "gradwire", "demo", "--folder", str(tmp_path)) as demo:
        demo.wait_for("round 1/")
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) == 3
        demo.signal(signal.SIGINT)
        assert demo.wait(2 * GRACE_S) == 0
    assert not [child for child in children if child.is_running()]
    assert "Traceback" not in demo.text


def test_status_shows_the_run_and_says_so_when_there_is_none(tmp_path: Path) -> None:
    with aggregator(tiny_config(tmp_path)) as (server, address), worker(address, "one"):
        server.wait_for("round 1 counted")
        with process("-m", "gradwire", "status", address) as status:
            assert status.wait() == 0
        with process("-m", "gradwire", "health", address) as health:
            assert health.wait() == 0
    assert "run tiny: round" in status.text
    assert "one" in status.text
    assert health.text == "SERVING"
    with process("-m", "gradwire", "status", address) as status:
        assert status.wait() == 1
    assert f"gradwire: no aggregator answers at {address}" in status.text


@pytest.mark.parametrize("method", ["demo", "dense", "topk"])
def test_the_demo_trains_by_every_method(tmp_path: Path, method: str) -> None:
    with process("-m", "gradwire", "demo", "--folder", str(tmp_path), "--method", method, "--rounds", "4") as demo:
        assert demo.wait(60) == 0
    before, after = re.search(r"held-out loss: (\S+) before, (\S+) after", demo.text).groups()  # type: ignore[union-attr]
    assert float(after) < float(before)
