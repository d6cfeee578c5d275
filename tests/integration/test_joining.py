"""The first minutes of a run: who is in, whose weights are the first."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio

from gradwire.codec import Dense
from gradwire.manifest import Entry, Manifest
from gradwire.v1 import aggregation_pb2 as pb
from support import RawWorker, aggregator, run_config

OTHER = Manifest("other", (Entry("weight", (3,), Dense()),))


def test_a_wrong_first_joiner_that_left_again_does_not_fix_what_the_run_trains() -> None:
    with aggregator(run_config()) as serving, RawWorker(serving.address, "lost", manifest=OTHER) as lost:
        lost.join(publish=False)
        lost.leave()
        with RawWorker(serving.address, "right") as right:
            assert right.join().start_from == pb.START_FROM_PUBLISH
            assert right.state().parameters == 64 * 64 + 64 + 1


def test_nobody_trains_before_the_first_weights_are_published() -> None:
    with aggregator(run_config(min_workers=1)) as serving, RawWorker(serving.address, "eager") as eager:
        eager.join(publish=False)
        answer = eager.begin_once(0)
        assert answer.order == pb.ORDER_WAIT
        assert answer.reason == "waiting for eager to publish its first weights"
        eager.publish()
        assert eager.begin(0).order == pb.ORDER_TRAIN


def test_a_snapshot_is_not_asked_for_from_behind_its_end() -> None:
    with aggregator(run_config()) as serving, RawWorker(serving.address, "a") as worker:
        worker.join()
        snapshot = serving.run.store.snapshot
        assert snapshot is not None
        request = pb.FetchSnapshotRequest(session=worker.session, offset=1 << 40, sha256=snapshot.sha256)
        with pytest.raises(aio.AioRpcError) as caught:
            worker.read_stream("FetchSnapshot", request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert worker.state().workers[0].download_bytes == 0


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines", "\x1b[31mred"])
def test_a_name_is_printable_and_of_bounded_length(name: str) -> None:
    with (
        aggregator(run_config()) as serving,
        RawWorker(serving.address, name) as worker,
        pytest.raises(aio.AioRpcError, match="1 to 128 bytes, all printable"),
    ):
        worker.join()
