"""Training through a real aggregator against the same training in plain PyTorch."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import gradwire
from fleet import Points, digest, in_threads, mlp, run_config, squared_error, train, weights
from gradwire import background, errors, state
from gradwire.samples import SampleOrder
from gradwire.status import get_run
from gradwire.v1 import aggregation_pb2 as pb
from gradwire_aggregator.rounds import Phase
from support import aggregator

SEED = 7
ROUNDS = 20


def dense(optimizer: Any) -> Any:
    return lambda model, session: gradwire.DistributedOptimizer(
        optimizer(model.parameters()), session, model=model, scheme=gradwire.Dense("fp32")
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sparseloco(**options: Any) -> Any:
    return lambda model, session: gradwire.SparseLoCo(adamw(model.parameters()), session, model=model, **options)


def train_alone(make: Any, *, rounds: int, global_batch: int, batch_size: int, model: nn.Module) -> nn.Module:
    """The same loop without gradwire: one optimizer step a round on the mean over the round's batches."""
    data, order = Points(), SampleOrder(SEED, len(Points()))
    optimizer = make(model.parameters())
    for number in range(rounds):
        indices = order.indices(number * global_batch, (number + 1) * global_batch).tolist()
        optimizer.zero_grad()
        for start in range(0, global_batch, batch_size):
            batch = default_collate([data[i] for i in indices[start : start + batch_size]])
            loss = squared_error(model, batch) * (batch_size / global_batch)
            loss.backward()
        optimizer.step()
    return model


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for name, tensor in weights(left).items():
        assert torch.equal(tensor, weights(right)[name]), name


def assert_close(left: nn.Module, right: nn.Module, tolerance: float) -> None:
    """Relative L2 distance of each tensor."""
    for name, tensor in weights(left).items():
        distance = (tensor - weights(right)[name]).norm() / tensor.norm()
        assert distance <= tolerance, (name, float(distance))


@pytest.mark.parametrize("make", [adamw, sgd])
def test_one_worker_dense_is_bit_identical_to_training_alone(make: Any) -> None:
    with aggregator(run_config(rounds=ROUNDS, global_batch=8)) as serving:
        distributed = train(serving.address, "a", dense(make))
    alone = train_alone(make, rounds=ROUNDS, global_batch=8, batch_size=8, model=mlp())
    assert_same(distributed, alone)


def test_one_worker_accumulating_batches_is_bit_identical_to_accumulating_alone() -> None:
    # 4 batches of 8 in a share of 32: weights of a quarter are exact, so the sums are the same to the bit.
    with aggregator(run_config(rounds=ROUNDS, global_batch=32)) as serving:
        distributed = train(serving.address, "a", dense(adamw))
    alone = train_alone(adamw, rounds=ROUNDS, global_batch=32, batch_size=8, model=mlp())
    assert_same(distributed, alone)


def test_two_workers_dense_equal_one_on_the_same_global_batch() -> None:
    with aggregator(run_config(rounds=ROUNDS, global_batch=16, min_workers=2)) as serving:
        one, two = in_threads(
            lambda: train(serving.address, "a", dense(sgd)), lambda: train(serving.address, "b", dense(sgd))
        )
    alone = train_alone(sgd, rounds=ROUNDS, global_batch=16, batch_size=16, model=mlp())
    assert_same(one, two)
    assert_close(alone, one, 1e-5)


def test_shares_of_different_size_are_weighted_by_their_samples() -> None:
    # 3 units of 8 samples for two workers: one trains 16, the other 8.
    with aggregator(run_config(rounds=ROUNDS, global_batch=24, inner_batch=8, min_workers=2)) as serving:
        one, two = in_threads(
            lambda: train(serving.address, "a", dense(sgd)), lambda: train(serving.address, "b", dense(sgd))
        )
    alone = train_alone(sgd, rounds=ROUNDS, global_batch=24, batch_size=24, model=mlp())
    assert_same(one, two)
    assert_close(alone, one, 1e-5)


@pytest.mark.parametrize("normalization", ["contributors", "senders"])
def test_top_k_of_everything_equals_dense(normalization: Any) -> None:
    scheme = gradwire.TopK(k=16, chunk=16, layout="flat", values="fp32", dense_below=0, normalization=normalization)

    def top_k(model: nn.Module, session: gradwire.Session) -> Any:
        return gradwire.DistributedOptimizer(sgd(model.parameters()), session, model=model, scheme=scheme)

    def two_workers(make: Any) -> nn.Module:
        with aggregator(run_config(rounds=10, global_batch=16, min_workers=2)) as serving:
            model, _ = in_threads(lambda: train(serving.address, "a", make), lambda: train(serving.address, "b", make))
        return model

    results = [two_workers(top_k), two_workers(dense(sgd))]
    if normalization == "contributors":
        assert_same(*results)
    else:
        assert_close(*results, 1e-6)


def test_error_feedback_sends_what_was_left_behind() -> None:
    # k = 1 of 16 with plain SGD: without the residual most coordinates would hardly ever move.
    scheme = gradwire.TopK(k=1, chunk=16, layout="flat", dense_below=0)

    def final_loss(decay: float) -> float:
        def make(model: nn.Module, session: gradwire.Session) -> Any:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            return gradwire.DistributedOptimizer(optimizer, session, model=model, scheme=scheme, residual_decay=decay)

        with aggregator(run_config(rounds=60, global_batch=32)) as serving:
            model = train(serving.address, "a", make, batch_size=32)
        with torch.no_grad():
            return float(squared_error(model, default_collate([Points()[i] for i in range(96)])))

    assert final_loss(1.0) < 0.8 * final_loss(0.0)


def test_sparseloco_alone_and_uncompressed_equals_local_training() -> None:
    scheme = gradwire.TopK(k=16, chunk=16, layout="flat", values="fp32", dense_below=0, normalization="senders")
    with aggregator(run_config(rounds=10, global_batch=32)) as serving:
        distributed = train(serving.address, "a", sparseloco(scheme=scheme))
    alone = train_alone(adamw, rounds=40, global_batch=8, batch_size=8, model=mlp())
    # The outer step w - (w - w') is w' up to one rounding a round.
    assert_close(alone, distributed, 1e-6)


def test_inner_steps_accumulate_gradients_of_several_batches() -> None:
    scheme = gradwire.TopK(k=16, chunk=16, layout="flat", values="fp32", dense_below=0, normalization="senders")
    with aggregator(run_config(rounds=10, global_batch=32)) as serving:
        distributed = train(serving.address, "a", sparseloco(scheme=scheme, inner_steps=2))
    alone = train_alone(adamw, rounds=20, global_batch=16, batch_size=8, model=mlp())
    assert_close(alone, distributed, 1e-6)


def test_sparseloco_weights_and_buffers_are_bit_identical_on_all_workers_at_every_rounds_end() -> None:
    seen: dict[int, set[str]] = defaultdict(set)

    def note(session: gradwire.Session, model: nn.Module) -> None:
        if session.batch.index == 0:
            # The integer counter of BatchNorm is each worker's own.
            tensors = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
            seen[session.round].add(state.digest(tensors))

    make = sparseloco(scheme=gradwire.TopK(k=4, chunk=64, dense_below=16, normalization="senders"))
    with aggregator(run_config(rounds=12, global_batch=48, inner_batch=8, min_workers=3)) as serving:
        models = in_threads(
            *(
                lambda name=name: train(  # type: ignore[misc]
                    serving.address, name, make, model=mlp(seed=ord(name), norm=True), on_batch=note
                )
                for name in "abc"
            )
        )
    assert len(seen) == 12
    assert all(len(digests) == 1 for digests in seen.values())
    assert len({digest(nn.Sequential(model[0], model[2], model[3])) for model in models}) == 1


def demo(model: nn.Module, session: gradwire.Session) -> Any:
    scheme = gradwire.TopK(k=8, chunk=64, transform="dct", dense_below=16, normalization="senders")
    return gradwire.DeMo(model.parameters(), 0.01, session, model=model, scheme=scheme, weight_decay=0.1)


@pytest.mark.parametrize(
    "make",
    [dense(adamw), sparseloco(), sparseloco(outer_momentum=0.9, outer_lr=0.5), demo],
    ids=["dense", "sparseloco", "sparseloco with outer momentum", "demo"],
)
def test_a_late_joiner_catches_up_and_ends_with_the_same_weights(make: Any) -> None:
    config = run_config(rounds=30, global_batch=16, inner_batch=8, snapshot_every=4)
    join_now, rounds_seen = threading.Event(), []

    def go(session: gradwire.Session, model: nn.Module) -> None:
        if session.round == 10:
            join_now.set()
        if session.round == 25:
            joined.wait(30)  # so that the joiner gets a share before the run is over

    joined = threading.Event()

    def late(serving: Any) -> nn.Module:
        assert join_now.wait(30)

        def note(session: gradwire.Session, model: nn.Module) -> None:
            rounds_seen.append(session.round)
            joined.set()

        return train(serving.address, "late", make, model=mlp(seed=99), on_batch=note)

    with aggregator(config) as serving:
        first, second = in_threads(lambda: train(serving.address, "first", make, on_batch=go), lambda: late(serving))
        contributors = [each.contributors for each in serving.run.record.rounds]
        assert serving.run.store.snapshots[0].round > 0  # so it didn't have to start from round 0
    assert_same(first, second)
    assert min(rounds_seen) >= 10
    assert contributors[:10] == [1] * 10
    assert max(contributors) == 2


def test_a_worker_that_only_yields_nan_abstains_and_holds_up_nobody() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        return squared_error(model, batch) * float("nan")

    with aggregator(run_config(rounds=6, global_batch=16, min_workers=2)) as serving:
        good, bad = in_threads(
            lambda: train(serving.address, "good", sparseloco()),
            lambda: train(serving.address, "bad", sparseloco(), loss_of=spoiled),
        )
        record = serving.run.record
        plan = serving.run.rounds.plan
    assert_same(good, bad)
    assert all(torch.isfinite(tensor).all() for tensor in weights(good).values())
    assert [each.contributors for each in record.rounds] == [1] * 6
    assert record.workers["bad"].accepted == 0
    assert "0.weight" in record.workers["bad"].last_refusal
    # Nothing of its shares is lost: it is counted by the other, in the pool, or skipped with the reason.
    accounted = plan.counted.total + sum(p.stop - p.start for p in [*plan.pool, *plan.skipped])
    assert accounted == plan.high_water


def test_more_workers_than_samples_leaves_some_without_a_share_and_all_in_the_run() -> None:
    with aggregator(run_config(rounds=8, global_batch=8, inner_batch=8, min_workers=1)) as serving:
        models = in_threads(
            *(lambda name=name: train(serving.address, name, dense(adamw)) for name in "abc")  # type: ignore[misc]
        )
        samples = serving.run.rounds.plan.counted.ranges
    alone = train_alone(adamw, rounds=8, global_batch=8, batch_size=8, model=mlp())
    assert samples == [(0, 64)]
    for model in models:
        assert_same(model, alone)


def test_frozen_tied_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.body = nn.Linear(8, 3)
            self.twin = self.body
            self.frozen = nn.Linear(8, 3).requires_grad_(False)
            self.unused = nn.Linear(3, 3)
            self.scalar = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.twin(x) + self.frozen(x)) * self.scalar

    torch.manual_seed(3)
    with aggregator(run_config(rounds=5, global_batch=8)) as serving:
        distributed = train(serving.address, "a", dense(adamw), model=Odd())
        names = [entry.name for entry in serving.run.manifest or ()]
    alone = train_alone(adamw, rounds=5, global_batch=8, batch_size=8, model=Odd())
    assert names == ["scalar", "body.weight", "body.bias", "unused.weight", "unused.bias"]
    # Also the unused ones: no gradient is not a zero gradient, which would let AdamW decay them.
    assert_same(distributed, alone)


def test_a_worker_whose_lease_ended_comes_back_by_itself() -> None:
    config = run_config(rounds=8, global_batch=16, lease_s=1.0, heartbeat_s=0.2, gather_s=0.0)
    lost = threading.Event()

    with aggregator(config) as serving:

        def sleep(session: gradwire.Session, model: nn.Module) -> None:
            if session.round == 2 and not lost.is_set():
                # As if the lid were closed: no heartbeat until the aggregator has given this worker up.
                session._link._heartbeat.cancel()  # type: ignore[union-attr]
                session._link._heartbeat = None
                while serving.run.roster.members["sleepy"].present:
                    background.run(serving.run.changed(5))
                lost.set()

        model = train(serving.address, "sleepy", dense(adamw), on_batch=sleep)
        events = [text for _, text in serving.run.record.events]
        counted = serving.run.rounds.plan.counted
        assert serving.run.rounds.phase is Phase.ENDED
    assert lost.is_set()
    assert any("not heard of for 1 s" in text for text in events)
    assert torch.isfinite(model[0].weight).all()
    assert counted.total == 8 * 16


def test_a_new_process_takes_over_the_name_and_the_old_one_is_told() -> None:
    config = run_config(rounds=6, global_batch=8, gather_s=0.0)
    started, replaced = threading.Event(), threading.Event()

    def hold(session: gradwire.Session, model: nn.Module) -> None:
        if session.round == 2:
            started.set()
            assert replaced.wait(30)

    def old(address: str) -> str:
        with pytest.raises(errors.Superseded) as caught:
            train(address, "same", dense(adamw), on_batch=hold)
        return str(caught.value)

    def new(address: str) -> nn.Module:
        assert started.wait(30)

        def note(session: gradwire.Session, model: nn.Module) -> None:
            replaced.set()

        return train(address, "same", dense(adamw), model=mlp(seed=5), on_batch=note)

    with aggregator(config) as serving:
        told, model = in_threads(lambda: old(serving.address), lambda: new(serving.address))
    alone = train_alone(adamw, rounds=6, global_batch=8, batch_size=8, model=mlp())
    assert "same" in told
    assert_same(model, alone)  # it loaded snapshot 0 and replayed what the old process had contributed


def test_a_loop_that_forgets_to_step_is_told_so() -> None:
    with (
        aggregator(run_config(rounds=2, global_batch=8)) as serving,
        gradwire.connect(serving.address, worker="a") as session,
    ):
        dense(adamw)(mlp(), session)
        with pytest.raises(gradwire.GradwireError, match=r"optimizer.step\(\) was not called"):
            list(session.loader(Points(), batch_size=8))


def test_status_tells_what_happened() -> None:
    with aggregator(run_config(rounds=3, global_batch=8)) as serving:
        train(serving.address, "a", dense(adamw))
        now = get_run(serving.address).state
    (worker,) = now.workers
    assert (now.round, now.rounds, now.phase) == (3, 3, pb.PHASE_ENDED)
    assert (worker.name, worker.accepted, worker.samples, worker.present) == ("a", 3, 24, False)
    assert [each.round for each in now.history] == [0, 1, 2]
    assert now.samples_counted == 24
    assert all(each.loss > 0 for each in now.history)
