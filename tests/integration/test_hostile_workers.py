"""What wrong, broken and malicious workers do to a run: nothing. Real gRPC, an aggregator in this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
import torch
import zstandard
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import gradwire
from gradwire import background
from gradwire.codec import Dense, TopK
from gradwire.config import ServerConfig
from gradwire.errors import ConfigError
from gradwire.manifest import Entry, Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1 import tensors_pb2
from gradwire.wire.schemas import entry_to_message
from gradwire_aggregator import servicer
from support import MANIFEST, RawWorker, aggregator, contribution, decoded, run_config

GOOD, BAD = contribution(1), contribution(2)


@contextlib.contextmanager
def refused(code: grpc.StatusCode, error: str | None = None, words: str = "") -> Iterator[None]:
    """The call inside ends with a status, the name of one of gradwire's errors, and words."""
    with pytest.raises(aio.AioRpcError) as caught:
        yield
    trailing = dict(caught.value.trailing_metadata() or ())
    assert (caught.value.code(), trailing.get("gradwire-error")) == (code, error)
    assert words in (caught.value.details() or "")


@dataclass
class Arena:
    """Round 0 is open, with a share for each of two workers."""

    address: str
    good: RawWorker
    bad: RawWorker
    good_share: pb.BeginResponse
    bad_share: pb.BeginResponse

    def bad_state(self) -> pb.WorkerState:
        (state,) = (each for each in self.good.state().workers if each.name == self.bad.name)
        return state

    def requires_good_alone(self) -> None:
        """The good worker's contribution closes the round, and is its aggregate."""
        answer = self.good.contribute(self.good_share, GOOD)
        assert (answer.verdict, answer.reason) == (pb.VERDICT_ACCEPTED, "")
        header, tensors = self.good.collect(0)
        assert [(each.worker, each.assignment, each.samples) for each in header.contributors] == [
            ("good", self.good_share.assignment, 4)
        ]
        for mine, theirs in zip(decoded(GOOD), decoded(tensors), strict=True):
            assert torch.equal(mine, theirs)
        assert (header.round, header.loss, list(header.learning_rates)) == (0, 1.0, [0.5])

    def requires_both(self) -> None:
        """Both shares count after all."""
        assert self.bad.contribute(self.bad_share, BAD).verdict == pb.VERDICT_ACCEPTED
        assert self.good.contribute(self.good_share, GOOD).verdict == pb.VERDICT_ACCEPTED
        header, _ = self.bad.collect(0)
        assert [each.worker for each in header.contributors] == ["bad", "good"]


@contextlib.contextmanager
def opened(**config: object) -> Iterator[Arena]:
    """An aggregator with two workers in an open round; "bad" was there first."""
    with (
        aggregator(run_config(**config)) as serving,
        RawWorker(serving.address, "bad") as bad,
        RawWorker(serving.address, "good") as good,
    ):
        bad.join()
        good.join()
        waiting = bad.begin_soon()
        good_share, bad_share = good.begin(), waiting.result(10)
        assert (good_share.order, bad_share.order) == (pb.ORDER_TRAIN, pb.ORDER_TRAIN)
        yield Arena(serving.address, good, bad, good_share, bad_share)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with opened() as arena:
        yield arena


# Bad content


def not_finite(messages):
    part = messages[2].part  # the bias
    part.packing = tensors_pb2.PACKING_NONE
    part.ClearField("values")
    part.values.append(struct.pack("<64f", *[0.0] * 63, float("nan")))


def index_out_of_range(messages):
    part = messages[1].part
    part.packing = tensors_pb2.PACKING_NONE
    part.ClearField("values")
    part.values.append(BAD[0].values)
    part.indices = b"\xff\xff" + BAD[0].indices[2:]


def bomb(messages):
    messages[1].part.values[0] = zstandard.ZstdCompressor().compress(bytes(32 << 20))


def garbage_frame(messages):
    messages[1].part.packing = tensors_pb2.PACKING_ZSTD
    messages[1].part.values[0] = b"garbage"


def unknown_form(messages):
    messages[1].part.form = 42


def unknown_packing(messages):
    messages[1].part.packing = 42


def unknown_tensor(messages):
    messages[1].part.tensor = 42


def swapped(messages):
    messages[1], messages[2] = messages[2], messages[1]


def left_out(messages):
    del messages[2]


def repeated(messages):
    messages.insert(2, messages[1])


def absent_twice(messages):
    messages[0].header.absent[:] = [1, 1]


def absent_but_sent(messages):
    messages[0].header.absent[:] = [1]


def too_many_samples(messages):
    messages[0].header.samples = 4_000_000


def no_samples(messages):
    messages[0].header.samples = 0


def wrong_crc(messages):
    messages[-1].commit.crc32 ^= 1


def wrong_parts(messages):
    messages[-1].commit.parts += 1


def wrong_bytes(messages):
    messages[-1].commit.payload_bytes -= 1


def second_header(messages):
    messages.insert(1, messages[0])


def abstention_amid_parts(messages):
    messages.insert(2, pb.ContributeRequest(abstain=pb.Abstain(reason="changed my mind")))


def nothing_amid_parts(messages):
    messages.insert(2, pb.ContributeRequest())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (not_finite, "layer.bias: 1 of 64 values are not finite"),
        (index_out_of_range, "layer.weight: "),
        (bomb, "layer.weight: a packed field claims 33554432 bytes where at most 64 can be"),
        (garbage_frame, "layer.weight: a packed field can't be unpacked"),
        (unknown_form, "layer.weight: form 42 is unknown"),
        (unknown_packing, "layer.weight: packing 42 is unknown"),
        (unknown_tensor, "tensor 42, and the manifest has 3"),
        (swapped, "layer.bias: a part out of order"),
        (left_out, "scale: a part out of order"),
        (repeated, "layer.weight: a piece that begins at 0"),
        (absent_twice, "without a gradient is not ascending"),
        (absent_but_sent, "layer.bias: a part out of order"),
        (too_many_samples, "the header says 4000000 samples, the assignment has 4"),
        (no_samples, "the header says 0 samples, the assignment has 4"),
        (wrong_crc, "the commit says crc32 = "),
        (wrong_parts, "the commit says parts = 4, but what arrived has 3"),
        (wrong_bytes, "the commit says payload_bytes = "),
        (second_header, "a header amid the parts"),
        (abstention_amid_parts, "a abstain amid the parts"),
        (nothing_amid_parts, "unknown kind amid the parts"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_content_is_rejected_with_the_reason_and_the_round_goes_on(arena, spoil, words):
    messages = arena.bad.messages(arena.bad_share, BAD)
    spoil(messages)
    answer = arena.bad.send(messages)
    assert answer.verdict == pb.VERDICT_REJECTED
    assert words in answer.reason

    state = arena.bad_state()
    assert (state.accepted, state.refused) == (0, 1)
    assert state.last_refusal == f"round 0: rejected: {answer.reason}"
    assert any(f"bad: round 0: rejected: {answer.reason}" == event.text for event in arena.good.state().events)
    arena.requires_good_alone()


def test_a_rejected_worker_is_told_to_collect_and_may_go_on(arena):
    messages = arena.bad.messages(arena.bad_share, BAD)
    wrong_crc(messages)
    assert arena.bad.send(messages).verdict == pb.VERDICT_REJECTED
    assert arena.bad.begin_once().order == pb.ORDER_COLLECT
    assert arena.bad.contribute(arena.bad_share, BAD).verdict == pb.VERDICT_LATE
    arena.requires_good_alone()
    waiting = arena.bad.begin_soon(1)
    assert arena.good.begin(1).order == pb.ORDER_TRAIN
    share = waiting.result(10)
    assert (share.ranges[0].start, share.ranges[0].stop) == (0, 4)  # its own, which did not count
    assert arena.bad.contribute(share, BAD, round_=1).verdict == pb.VERDICT_ACCEPTED


def test_a_worker_that_abstains_is_named_with_its_reason(arena):
    abstention = pb.Abstain(
        session=arena.bad.session, assignment=arena.bad_share.assignment, reason="w: 3 of 9 values are not finite"
    )
    assert arena.bad.send([pb.ContributeRequest(abstain=abstention)]).verdict == pb.VERDICT_ACCEPTED
    assert arena.bad_state().last_refusal == "round 0: abstained: w: 3 of 9 values are not finite"
    arena.requires_good_alone()


def test_an_absent_tensor_is_no_error(arena):
    assert arena.bad.contribute(arena.bad_share, [None, None, BAD[2]]).verdict == pb.VERDICT_ACCEPTED
    assert arena.good.contribute(arena.good_share, [None, GOOD[1], GOOD[2]]).verdict == pb.VERDICT_ACCEPTED
    header, tensors = arena.good.collect(0)
    assert list(header.absent) == [0]
    assert tensors[0] is None
    assert torch.equal(decoded(tensors[1:], Manifest("", MANIFEST.entries[1:]))[0], decoded(GOOD)[1] / 2)


@pytest.mark.parametrize("seconds", [math.nan, 5e-324, math.inf, -1.0])
def test_a_nonsense_training_time_does_not_stop_the_run(seconds, monkeypatch):
    monkeypatch.setattr(servicer, "PATIENCE_S", 1.0)
    with opened(shares="throughput") as arena:
        arena.bad.contribute(arena.bad_share, BAD, train_seconds=seconds)
        assert arena.good.contribute(arena.good_share, GOOD).verdict == pb.VERDICT_ACCEPTED
        arena.good.collect(0)
        waiting = arena.bad.begin_soon(1)
        share = arena.good.begin_once(1)
        waiting.cancel()
        assert share.order == pb.ORDER_TRAIN
        for worker in arena.good.state().workers:
            assert math.isfinite(worker.samples_per_second)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_nobody_is_given_learning_rates_that_are_not_finite(arena, rate):
    # "bad" has been in for longest, so its rates would be everybody's.
    arena.bad.contribute(arena.bad_share, BAD, learning_rates=[rate])
    arena.good.contribute(arena.good_share, GOOD)
    header, _ = arena.good.collect(0)
    assert [value for value in header.learning_rates if not math.isfinite(value)] == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_does_not_become_everybodys(arena, loss):
    arena.bad.contribute(arena.bad_share, BAD, loss=loss)
    arena.good.contribute(arena.good_share, GOOD)
    header, _ = arena.good.collect(0)
    assert math.isfinite(header.loss)
    assert math.isfinite(arena.good.state().history[0].loss)


# Bytes that are no messages


@pytest.mark.parametrize("call", ["Contribute", "Join", "PublishSnapshot"])
def test_broken_protobuf_ends_the_call_and_nothing_else(arena, call):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, words=call):
        arena.bad.stream_bytes(call, [b"\xff\xff\xff\xff"])
    arena.requires_both()


def test_broken_protobuf_amid_a_contribution_ends_the_call_and_nothing_else(arena):
    first, second, *_ = (each.SerializeToString() for each in arena.bad.messages(arena.bad_share, BAD))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, words="Contribute"):
        arena.bad.stream_bytes("Contribute", [first, second, b"\x0a\xff"])
    assert arena.bad_state().refused == 0
    arena.requires_both()


def test_broken_protobuf_in_a_single_request_ends_the_call(arena):
    async def call():
        await arena.bad.channel.unary_unary("/gradwire.v1.AggregationService/Begin")(b"\x0a\xff", timeout=10)

    with refused(grpc.StatusCode.INVALID_ARGUMENT, words="Begin"):
        background.run(call())
    arena.requires_both()


@pytest.mark.parametrize("kind", ["nothing", "a part", "a commit", "an empty message"])
def test_a_contribution_that_does_not_start_with_its_header_is_refused(arena, kind):
    _, part, *_, commit = arena.bad.messages(arena.bad_share, BAD)
    first = {"nothing": [], "a part": [part], "a commit": [commit], "an empty message": [pb.ContributeRequest()]}[kind]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", "starts with its header"):
        arena.bad.send(first)
    arena.requires_both()


# Commits


@pytest.mark.parametrize("sent", [1, 2, 4])
def test_a_contribution_without_a_commit_counts_as_nothing(arena, sent):
    messages = arena.bad.messages(arena.bad_share, BAD)
    assert messages[sent:]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", "without a commit"):
        arena.bad.send(messages[:sent])
    state = arena.bad_state()
    assert (state.accepted, state.refused, state.share) == (0, 0, 4)
    arena.requires_both()


def test_a_contribution_that_is_broken_off_counts_as_nothing(arena):
    arena.bad.break_off(arena.bad.messages(arena.bad_share, BAD)[:-1])
    state = arena.bad_state()
    assert (state.accepted, state.refused, state.share) == (0, 0, 4)
    arena.requires_both()


def test_the_same_contribution_again_is_a_duplicate(arena):
    assert arena.bad.contribute(arena.bad_share, BAD).verdict == pb.VERDICT_ACCEPTED
    for _ in range(2):
        assert arena.bad.contribute(arena.bad_share, BAD).verdict == pb.VERDICT_DUPLICATE
    state = arena.bad_state()
    assert (state.accepted, state.refused, state.samples) == (1, 0, 4)
    arena.good.contribute(arena.good_share, GOOD)
    header, tensors = arena.good.collect(0)
    assert [(each.worker, each.samples) for each in header.contributors] == [("bad", 4), ("good", 4)]
    bad, good = decoded(BAD)[1], decoded(GOOD)[1]
    assert torch.equal(decoded(tensors)[1], bad * 0.5 + good * 0.5)


def test_another_content_after_a_commit_is_rejected_and_the_first_counts(arena):
    assert arena.bad.contribute(arena.bad_share, BAD).verdict == pb.VERDICT_ACCEPTED
    answer = arena.bad.contribute(arena.bad_share, contribution(3))
    assert answer.verdict == pb.VERDICT_REJECTED
    assert "another content was accepted" in answer.reason
    arena.good.contribute(arena.good_share, GOOD)
    _, tensors = arena.good.collect(0)
    assert torch.equal(decoded(tensors)[1], decoded(BAD)[1] * 0.5 + decoded(GOOD)[1] * 0.5)


def test_a_contribution_after_the_round_is_late(arena):
    messages = arena.bad.messages(arena.bad_share, BAD)
    wrong_crc(messages)
    arena.bad.send(messages)
    arena.requires_good_alone()
    answer = arena.bad.contribute(arena.bad_share, BAD)
    assert answer.verdict == pb.VERDICT_LATE
    assert answer.reason == "round 0 is over; the current one is 1"
    assert arena.bad_state().refused == 2


def test_a_contribution_after_the_deadline_is_late():
    with opened(deadline_s=0.3, gather_s=0.2) as arena, RawWorker(arena.address, "slow") as slow:
        slow.join()
        arena.requires_both()
        futures = [slow.begin_soon(1), arena.bad.begin_soon(1)]
        good_share = arena.good.begin(1)
        slow_share, bad_share = (future.result(10) for future in futures)
        assert slow_share.order == pb.ORDER_TRAIN
        assert arena.bad.contribute(bad_share, BAD, round_=1).verdict == pb.VERDICT_ACCEPTED
        assert arena.good.contribute(good_share, GOOD, round_=1).verdict == pb.VERDICT_ACCEPTED
        header, _ = arena.good.collect(1)
        assert [each.worker for each in header.contributors] == ["bad", "good"]
        assert slow.contribute(slow_share, BAD, round_=1).verdict == pb.VERDICT_LATE
        (state,) = (each for each in slow.state().workers if each.name == "slow")
        assert state.last_refusal.startswith("late: round 1 is over")


@pytest.mark.parametrize("round_", [1, 7])
def test_a_contribution_to_another_round_is_late(arena, round_):
    answer = arena.bad.contribute(arena.bad_share, BAD, round_=round_)
    assert answer.verdict == pb.VERDICT_LATE
    arena.requires_both()


def test_a_contribution_to_the_assignment_of_another_is_late(arena):
    answer = arena.bad.contribute(arena.good_share, BAD)
    assert answer.verdict == pb.VERDICT_LATE
    assert "is not bad's" in answer.reason
    arena.requires_both()


# Sessions


def test_a_new_incarnation_revokes_what_the_old_one_had(arena):
    old_session = arena.bad.session
    arena.bad.incarnation = bytes(16)
    arena.bad.join()
    answer = arena.bad.contribute(arena.bad_share, BAD)
    assert answer.verdict == pb.VERDICT_LATE
    assert "its worker was started anew" in answer.reason
    with refused(grpc.StatusCode.ALREADY_EXISTS, "Superseded", "'bad'"):
        arena.bad.unary("Heartbeat", pb.HeartbeatRequest(session=old_session))
    arena.bad_share = arena.bad.begin()
    assert arena.bad_share.order == pb.ORDER_TRAIN
    arena.requires_both()


@pytest.mark.parametrize("session", [b"", b"nobody's session"])
def test_an_unknown_session_is_not_found(arena, session):
    arena.bad.session = session
    expired = (grpc.StatusCode.NOT_FOUND, "SessionExpired")
    with refused(*expired):
        arena.bad.begin_once()
    with refused(*expired):
        arena.bad.contribute(arena.bad_share, BAD)
    with refused(*expired):
        arena.bad.collect(0)
    with refused(*expired):
        arena.bad.publish()
    for call, request in (
        ("Heartbeat", pb.HeartbeatRequest(session=session)),
        ("Leave", pb.LeaveRequest(session=session)),
    ):
        with refused(*expired):
            arena.bad.unary(call, request)


def test_a_share_that_came_back_goes_to_the_next_that_asks_at_once(arena, monkeypatch):
    monkeypatch.setattr(servicer, "PATIENCE_S", 60.0)
    arena.bad.leave()
    arena.bad.incarnation = bytes(16)
    arena.bad.join()
    share = arena.bad.begin_soon().result(2)
    assert share.order == pb.ORDER_TRAIN
    assert [(each.start, each.stop) for each in share.ranges] == [
        (each.start, each.stop) for each in arena.bad_share.ranges
    ]


def test_a_share_that_comes_back_wakes_one_that_waits(arena, monkeypatch):
    monkeypatch.setattr(servicer, "PATIENCE_S", 60.0)
    with RawWorker(arena.address, "third") as third:
        third.join()
        waiting = third.begin_soon()
        third.unary("Heartbeat", pb.HeartbeatRequest(session=third.session))
        arena.bad.leave()
        assert waiting.result(2).order == pb.ORDER_TRAIN


def test_a_round_to_come_can_not_be_asked_for(arena):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", "round 1 is asked for, the current one is 0"):
        arena.bad.begin_once(1)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", "round 1 is asked for, the current one is 0"):
        arena.bad.collect(1)
    arena.requires_both()


def test_long_words_are_cut(arena):
    words = "x" * 900_000
    arena.bad.unary("Heartbeat", pb.HeartbeatRequest(session=arena.bad.session, activity=words))
    abstention = pb.Abstain(session=arena.bad.session, assignment=arena.bad_share.assignment, reason=words)
    arena.bad.send([pb.ContributeRequest(abstain=abstention)])
    state = arena.bad_state()
    assert len(state.activity) == 128
    assert len(state.last_refusal) < 1100
    arena.requires_good_alone()


def test_many_workers_with_long_descriptions_do_not_make_the_run_unreadable():
    # A worker that can't GetRun can't join: the answer has to fit a message however many have been here.
    async def crowd(run):
        for number in range(2000):
            words = "\N{GRINNING FACE}" * 128
            member = run.join(f"{number}", incarnation=bytes(16), device=words, manifest=MANIFEST, data=b"")
            member.activity = words

    with aggregator(run_config()) as serving, RawWorker(serving.address, "late") as late:
        background.run(crowd(serving.run))
        assert late.state().round == 0


# Joining


def manifest_with(**shapes: tuple[int, ...]) -> Manifest:
    shape_of = {entry.name: shapes.get(entry.name.replace(".", "_"), entry.shape) for entry in MANIFEST}
    return Manifest(MANIFEST.method, tuple(Entry(entry.name, shape_of[entry.name], entry.scheme) for entry in MANIFEST))


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (manifest_with(layer_weight=(64, 32)), "layer.weight: [64, 32] here, [64, 64] in the run"),
        (Manifest("other", MANIFEST.entries), "method: other here, test in the run"),
        (Manifest("test", MANIFEST.entries[:2]), "scale: [] in the run, no such tensor here"),
        (Manifest("test", (*MANIFEST, Entry("more", (3,), Dense()))), "more: [3] here, no such tensor in the run"),
        (Manifest("test", MANIFEST.entries[1:]), "tensor 'layer.bias' here, 'layer.weight' in its place in the run"),
        (
            Manifest("test", (Entry("layer.weight", (64, 64), TopK(k=5, chunk=256)), *MANIFEST.entries[1:])),
            "layer.weight: TopK(k=5,",
        ),
    ],
)
def test_a_worker_with_another_model_is_refused_with_the_first_difference(arena, manifest, words):
    with (
        RawWorker(arena.address, "other", manifest=manifest) as other,
        refused(grpc.StatusCode.FAILED_PRECONDITION, "ManifestMismatch", words),
    ):
        other.join()
    assert [each.name for each in arena.good.state().workers] == ["bad", "good"]
    arena.requires_both()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"protocol": 2}, "protocol version: 2 here, 1 at the aggregator"),
        ({"protocol": 0}, "protocol version: 0 here, 1 at the aggregator"),
        ({"run": "another"}, "run: 'another' here, 'test' at the aggregator"),
    ],
)
def test_a_worker_of_another_run_or_protocol_is_refused(arena, header, words):
    with (
        RawWorker(arena.address, "other") as other,
        refused(grpc.StatusCode.FAILED_PRECONDITION, "ManifestMismatch", words),
    ):
        other.join(**header)
    arena.requires_both()


def test_a_worker_with_other_data_is_refused():
    with (
        aggregator(run_config()) as serving,
        RawWorker(serving.address, "first") as first,
        RawWorker(serving.address, "other") as other,
        RawWorker(serving.address, "same") as same,
        RawWorker(serving.address, "unknown") as unknown,
    ):
        first.join(data_sha256=b"\xaa" * 32)
        words = "data: SHA-256 bbbbbbbbbbbbbbbb... here, aaaaaaaaaaaaaaaa... in the run"
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "ManifestMismatch", words):
            other.join(data_sha256=b"\xbb" * 32)
        same.join(data_sha256=b"\xaa" * 32)
        unknown.join()
        assert [each.name for each in same.state().workers] == ["first", "same", "unknown"]


def test_a_worker_that_does_not_care_which_run_it_is_may_join(arena):
    with RawWorker(arena.address, "third") as third:
        assert third.join(run="").start_from == pb.START_FROM_SNAPSHOT


ENTRIES = [entry_to_message(entry) for entry in MANIFEST]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"worker": ""}, "a worker's name has 1 to 128 bytes"),
        ({"worker": "ä" * 65}, "a worker's name has 1 to 128 bytes"),
        ({"incarnation": b"short"}, "an incarnation has 16 bytes"),
        ({"data_sha256": b"short"}, "a data fingerprint has 32 bytes"),
        ({"manifest_sha256": bytes(32)}, "fingerprint is not that of its entries"),
        ({"entries": 2}, "the manifest has 3 entries, its header announced 2"),
        ({"entry_messages": ENTRIES[:2]}, "the manifest has 2 entries, its header announced 3"),
        ({"entry_messages": [*ENTRIES, ENTRIES[0]]}, "the manifest has 4 entries, its header announced 3"),
        ({"entry_messages": [ENTRIES[0], ENTRIES[0], ENTRIES[1]]}, "names 'layer.weight' twice"),
        ({"entry_messages": [*ENTRIES[:2], tensors_pb2.ManifestEntry(name="x")]}, "x: role 0 is unknown"),
        (
            {"entry_messages": [*ENTRIES[:2], tensors_pb2.ManifestEntry(name="x", role=1)]},
            "x: its scheme is of a kind unknown",
        ),
    ],
)
def test_a_broken_join_is_refused_and_does_not_become_the_runs_manifest(change, words):
    with (
        aggregator(run_config(min_workers=1)) as serving,
        RawWorker(serving.address, "bad") as bad,
        RawWorker(serving.address, "good") as good,
    ):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", words):
            bad.join(**change)
        assert list(good.state().workers) == []
        assert good.join().start_from == pb.START_FROM_PUBLISH
        assert good.begin().order == pb.ORDER_TRAIN


def test_a_join_without_a_header_is_refused(arena):
    for requests in ([], [pb.JoinRequest(entries=pb.ManifestEntries(entries=ENTRIES))]):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", "a join starts with its header"):
            arena.bad.stream("Join", requests)
    arena.requires_both()


# Snapshots


def test_only_the_one_that_was_asked_publishes(arena):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", "good was not asked for a snapshot"):
        arena.good.publish()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"size": 3}, "longer than the 3 bytes"),
        ({"size": 300}, "not what its header announced"),
        ({"sha256": bytes(32)}, "not what its header announced"),
        ({"size": 1 << 40}, "too large"),
        ({"round_": 1}, "of no use"),
    ],
)
def test_a_snapshot_that_is_not_what_it_says_is_refused_and_another_may_come(header, words):
    with (
        aggregator(run_config(min_workers=1)) as serving,
        RawWorker(serving.address, "bad") as bad,
        RawWorker(serving.address, "good") as good,
    ):
        bad.join(publish=False)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError", words):
            bad.publish(**header)
        assert serving.run.store.snapshot is None
        bad.leave()
        assert good.join().start_from == pb.START_FROM_PUBLISH
        assert serving.run.store.snapshot.path.read_bytes() == b"the first weights"


class Bystander:
    """A replica without a model."""

    manifest = MANIFEST
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.loaded = False

    def apply(self, aggregate):
        pass

    def snapshot(self):
        return {"w": torch.zeros(1)}

    def load_snapshot(self, state):
        self.loaded = True


def test_those_that_wait_for_the_first_weights_do_not_wait_for_one_that_left(monkeypatch):
    monkeypatch.setattr(servicer, "PATIENCE_S", 0.1)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        aggregator(run_config()) as serving,
        RawWorker(serving.address, "first") as first,
    ):
        assert first.join(publish=False).start_from == pb.START_FROM_PUBLISH
        session = gradwire.connect(serving.address, worker="second", give_up_after_s=0.5)
        joining = pool.submit(session.join, Bystander())
        while "second" not in serving.run.roster.members:
            first.unary("Heartbeat", pb.HeartbeatRequest(session=first.session))
        first.leave()
        try:
            joining.result(2)  # it is the first joiner now
        finally:
            session.leave()
        assert serving.run.store.snapshot is not None


# The server


def test_a_run_with_a_token_lets_nobody_in_without_it():
    with (
        aggregator(run_config(), token="open sesame") as serving,
        RawWorker(serving.address, "none") as none,
        RawWorker(serving.address, "wrong", token="open") as wrong,
        RawWorker(serving.address, "right", token="open sesame") as right,
    ):
        denied = (grpc.StatusCode.UNAUTHENTICATED, "Unauthenticated")
        for worker, words in ((none, "none came"), (wrong, "this one is wrong")):
            with refused(*denied, words):
                worker.state()
            with refused(*denied, words):
                worker.join()
            with refused(*denied, words):
                worker.begin_once()
            with refused(*denied, words):
                worker.collect()
            with refused(*denied, words):
                worker.send([pb.ContributeRequest()])
            with refused(*denied, words):
                worker.stream_bytes("Contribute", [b"\xff"])
        right.join()
        assert [each.name for each in right.state().workers] == ["right"]


def test_a_refusal_does_not_give_the_token_away():
    with (
        aggregator(run_config(), token="open sesame") as serving,
        RawWorker(serving.address, "wrong", token="close") as wrong,
        pytest.raises(aio.AioRpcError) as caught,
    ):
        wrong.state()
    assert "sesame" not in str(caught.value)


def test_health_says_serving(arena):
    async def check(service):
        stub = health_pb2_grpc.HealthStub(arena.good.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status

    for service in ("", "gradwire.v1.AggregationService"):
        assert background.run(check(service)) == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service_and_its_calls(arena):
    async def ask(**request):
        stub = reflection_pb2_grpc.ServerReflectionStub(arena.good.channel)
        async for answer in stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=10
        ):
            return answer
        return None

    services = {each.name for each in background.run(ask(list_services="")).list_services_response.service}
    assert {"gradwire.v1.AggregationService", "grpc.health.v1.Health"} <= services
    described = background.run(ask(file_containing_symbol="gradwire.v1.AggregationService"))
    assert b"Contribute" in b"".join(described.file_descriptor_response.file_descriptor_proto)


def test_a_port_in_use_is_an_error_that_names_it():
    with aggregator(run_config()) as serving:
        second = run_config().model_copy(update={"server": ServerConfig(listen=serving.address, http="")})
        words = f"server.listen = '{serving.address}': can't listen there"
        with pytest.raises(ConfigError, match=words), aggregator(second):
            pass
        with RawWorker(serving.address, "ann") as ann:
            assert ann.state().round == 0  # the first one goes on


def test_a_metrics_port_in_use_is_an_error_that_names_it():
    with aggregator(run_config()) as serving:
        second = run_config().model_copy(update={"server": ServerConfig(listen="127.0.0.1:0", http=serving.address)})
        words = f"server.http = '{serving.address}': can't listen there"
        with pytest.raises(ConfigError, match=words), aggregator(second):
            pass
