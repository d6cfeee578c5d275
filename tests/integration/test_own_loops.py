"""Training loops as people have them: one worker through a real aggregator equals the same loop in one process.

The same loop runs twice, on `session.loader` with one of gradwire's optimizers, and on the same batches with a plain
torch optimizer: AdamW or SGD against DistributedOptimizer (equal to the bit) and SparseLoCo without compression (up to
the rounding of its outer step), descent along the sign against DeMo (its tensors here travel whole; equal to the bit).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import gradwire
from fleet import SEED, Points, in_threads, mlp, run_config, squared_error, weights
from gradwire.errors import ConfigError, ManifestMismatch
from gradwire.samples import SampleOrder
from support import aggregator

ROUNDS = 6
BATCH = 8
EVERYTHING = gradwire.TopK(k=16, chunk=16, layout="flat", values="fp32", dense_below=0, normalization="senders")
WHOLE = gradwire.TopK(transform="dct", values="fp32", normalization="senders")


class SignDescent(torch.optim.Optimizer):
    """w = w (1 - lr * weight_decay) - lr * sign(gradient), the closed form of DeMo where everything is sent."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    wide = self.state[parameter].setdefault("wide", parameter.float())
                    wide.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * gradient.float().sign())
                    parameter.copy_(wide)


Groups = Callable[[nn.Module], Any]


@dataclasses.dataclass(frozen=True)
class Method:
    """One of gradwire's optimizers, and the plain one that it has to equal."""

    name: str
    distributed: Callable[[Any, nn.Module, gradwire.Session, type], Any]
    plain: Callable[[Any, type], torch.optim.Optimizer]
    exact: bool


def _wrap(optimizer: Any, model: nn.Module, session: gradwire.Session) -> Any:
    return gradwire.DistributedOptimizer(optimizer, session, model=model, scheme=gradwire.Dense("fp32"))


METHODS = [
    Method(
        "DistributedOptimizer", lambda p, model, session, kind: _wrap(kind(p, lr=0.05), model, session),
        lambda p, kind: kind(p, lr=0.05), exact=True,
    ),
    Method(
        "SparseLoCo",
        lambda p, model, session, kind: gradwire.SparseLoCo(kind(p, lr=0.05), session, model=model, scheme=EVERYTHING),
        lambda p, kind: kind(p, lr=0.05), exact=False,
    ),
    Method(
        "DeMo", lambda p, model, session, kind: gradwire.DeMo(p, 0.05, session, model=model, scheme=WHOLE),
        lambda p, kind: SignDescent(p, lr=0.05), exact=True,
    ),
]  # fmt: skip


class Tied(nn.Module):
    """Tokens in, tokens out, by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 6)
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.head(self.embedding(tokens(x)).mean(1)))


class Sparse(nn.Module):
    """An embedding with sparse gradients, of which a batch touches a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens(x)).mean(1) * self.scale


class Odd(nn.Module):
    """Frozen, unused, empty and scalar parameters, and a branch that not every batch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 3).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(8, 3)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (self.body(x) + self.frozen(x)) * self.scalar + self.empty.sum()
        return out + self.sometimes(x) if x.sum() > 0 else out


class Mixed(nn.Module):
    """A bf16 layer between float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)).to(torch.bfloat16)).float())


def tokens(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :4] * 5).long().abs() % 16


def built(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return kind()

    return build


def all_parameters(model: nn.Module) -> Any:
    return model.parameters()


def two_groups(model: nn.Module) -> Any:
    """The last layer at its own rate; with decay, which Adam and SGD apply in their own ways."""
    *body, weight, bias = model.parameters()
    return [{"params": body}, {"params": [weight, bias], "lr": 0.002, "weight_decay": 0.1}]


def without_the_last(model: nn.Module) -> Any:
    *some, _, _ = model.parameters()
    return some


@dataclasses.dataclass(frozen=True)
class Loop:
    """One way to write a training loop."""

    name: str
    model: Callable[[], nn.Module] = mlp
    groups: Groups = all_parameters
    optimizer: Any = torch.optim.AdamW
    batch_size: int = BATCH
    micro_batches: int = 1
    autocast: bool = False
    scaler: bool = False
    scheduler: Callable[[Any], Any] | None = None
    exact: bool = True
    scale: float = 256.0
    weight: float = 1.0  # of the loss


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)


LOOPS = [
    Loop("plain"),
    Loop("tied weights", built(Tied)),
    # Rows that a batch names twice are added up first, and then applied: not in the order of plain SGD.
    Loop("sparse embedding gradients", built(Sparse), optimizer=torch.optim.SGD, exact=False),
    Loop("frozen, unused, empty, scalar parameters and missing gradients", built(Odd)),
    # Not with Adam: the bias before the norm has no gradient but for noise, which Adam would blow up.
    Loop("BatchNorm", lambda: mlp(norm=True), optimizer=torch.optim.SGD),
    Loop("bf16 and float32 parameters", built(Mixed)),
    Loop("DataParallel", lambda: nn.DataParallel(mlp())),
    Loop("torch.compile", lambda: torch.compile(mlp(), backend="eager")),
    Loop("compiled within DataParallel", lambda: nn.DataParallel(torch.compile(mlp(), backend="eager"))),
    Loop("autocast", autocast=True),
    Loop("GradScaler", scaler=True),
    Loop("autocast and GradScaler", autocast=True, scaler=True),
    Loop("gradients of micro-batches", micro_batches=4),
    Loop("parameter groups", groups=two_groups),
    Loop("parameters in no group", groups=without_the_last),
    Loop("ExponentialLR", scheduler=exponential),
    Loop("LambdaLR", scheduler=warm_up, optimizer=torch.optim.SGD),
    Loop("schedule by group", groups=two_groups, scheduler=exponential),
]


def run(loop: Loop, model: nn.Module, optimizer: Any, batches: Iterable[Any]) -> nn.Module:
    """The loop itself."""
    plain = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, gradwire.DeMo)
    scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale, enabled=loop.scaler)
    stepping = getattr(optimizer, "optimizer", getattr(optimizer, "inner", optimizer))
    scheduler = loop.scheduler(stepping) if loop.scheduler else None
    for inputs, targets in batches:
        optimizer.zero_grad()
        mean = torch.zeros(())
        for some in zip(inputs.chunk(loop.micro_batches), targets.chunk(loop.micro_batches), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=loop.autocast):
                loss = loop.weight * squared_error(model, some) / loop.micro_batches
            scaler.scale(loss).backward()
            mean = mean + loss.detach()
        scaler.step(optimizer, *(() if plain else (mean,)))
        scaler.update()
        if scheduler is not None:
            scheduler.step()
    return model


def alone(loop: Loop, method: Method, steps: int = ROUNDS) -> nn.Module:
    model, data, order = loop.model(), Points(), SampleOrder(SEED, len(Points()))
    indices = order.indices(0, steps * BATCH).tolist()
    batches = [default_collate([data[i] for i in indices[s : s + BATCH]]) for s in range(0, len(indices), BATCH)]
    return run(loop, model, method.plain(loop.groups(model), loop.optimizer), batches)


def through(address: str, loop: Loop, method: Method, worker: str) -> nn.Module:
    model = loop.model()
    with gradwire.connect(address, worker=worker, give_up_after_s=20) as session:
        optimizer = method.distributed(loop.groups(model), model, session, loop.optimizer)
        return run(loop, model, optimizer, session.loader(Points(), batch_size=loop.batch_size))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_one_worker_equals_the_loop_in_one_process(loop: Loop, method: Method) -> None:
    expected = weights(alone(loop, method))
    with aggregator(run_config(rounds=ROUNDS, global_batch=BATCH)) as serving:
        found = weights(through(serving.address, loop, method, "a"))
        names = [entry.name for entry in serving.run.manifest or ()]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        if (method.exact and loop.exact) or not tensor.is_floating_point():
            assert torch.equal(found[name], tensor), name
        else:
            assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm() + 1e-7, name
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in names)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_two_workers_end_with_the_same_weights(loop: Loop, method: Method) -> None:
    with aggregator(run_config(rounds=3, global_batch=2 * BATCH, inner_batch=BATCH, min_workers=2)) as serving:
        one, two = in_threads(
            lambda: weights(through(serving.address, loop, method, "a")),
            lambda: weights(through(serving.address, loop, method, "b")),
        )
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("method", [METHODS[0], METHODS[2]], ids=lambda method: method.name)
def test_gradients_add_up_over_the_batches_of_a_share(method: Method) -> None:
    """4 batches of 2 in a share of 8: quarters are exact, so the sums are those of micro-batches to the bit."""
    expected = weights(alone(Loop("micro-batches", micro_batches=4), method))
    with aggregator(run_config(rounds=ROUNDS, global_batch=BATCH, inner_batch=2)) as serving:
        found = weights(through(serving.address, Loop("batches", batch_size=2), method, "a"))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_loop_that_is_left_halfway_and_entered_again_trains_its_share_from_the_start(method: Method) -> None:
    loop = Loop("batches", batch_size=2, optimizer=torch.optim.SGD)
    results = []
    for left in (False, True):
        with aggregator(run_config(rounds=3, global_batch=BATCH, inner_batch=2)) as serving:
            model = loop.model()
            with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
                optimizer = method.distributed(loop.groups(model), model, session, loop.optimizer)
                for batch in session.loader(Points(), batch_size=2) if left else ():
                    optimizer.zero_grad()
                    squared_error(model, batch).backward()
                    optimizer.step()
                    if (session.round, session.batch.index) == (1, 2):
                        break
                results.append(weights(run(loop, model, optimizer, session.loader(Points(), batch_size=2))))
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name


@pytest.mark.parametrize("make", [gradwire.DistributedOptimizer, gradwire.SparseLoCo])
def test_a_parameter_that_is_no_float_is_refused_by_name(make: Any) -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with (
        aggregator(run_config(rounds=1, global_batch=BATCH)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
        pytest.raises(ConfigError, match=r"phase is torch\.complex64"),
    ):
        make(torch.optim.SGD(model.parameters(), lr=0.1), session, model=model)


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    with aggregator(run_config(rounds=3, global_batch=BATCH)) as serving:
        model, rate = mlp(), torch.tensor(0.05)
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            adamw = torch.optim.AdamW(model.parameters(), lr=rate, capturable=False, foreach=False)
            optimizer = gradwire.DistributedOptimizer(adamw, session, model=model, scheme=gradwire.Dense("fp32"))
            run(Loop("plain"), model, optimizer, session.loader(Points(), batch_size=BATCH))
    assert adamw.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def test_a_bf16_and_a_float32_model_train_together() -> None:
    """The mean is float32, and comes back in each parameter's own dtype."""
    loops = {"a": Loop("float32"), "b": Loop("bf16", lambda: mlp().to(torch.bfloat16))}

    def job(address: str, worker: str) -> dict[str, torch.Tensor]:
        model = loops[worker].model()
        with gradwire.connect(address, worker=worker, give_up_after_s=20) as session:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = gradwire.SparseLoCo(sgd, session, model=model, scheme=EVERYTHING)
            for inputs, targets in session.loader(Points(), batch_size=BATCH):
                dtype = next(model.parameters()).dtype
                optimizer.zero_grad()
                loss = squared_error(model, (inputs.to(dtype), targets.to(dtype)))
                loss.backward()
                optimizer.step(loss)
        return weights(model)

    with aggregator(run_config(rounds=5, global_batch=2 * BATCH, inner_batch=BATCH, min_workers=2)) as serving:
        wide, narrow = in_threads(lambda: job(serving.address, "a"), lambda: job(serving.address, "b"))
    for name, tensor in wide.items():
        assert (tensor.dtype, narrow[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(tensor.to(torch.bfloat16), narrow[name]), name
        assert not torch.equal(tensor, mlp().state_dict()[name])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_gradients_that_are_cleared_at_the_end_of_the_loop_are_not_mixed_with_replayed_ones(method: Method) -> None:
    """backward, step, zero_grad: the second worker replays four rounds before its first batch."""

    def go_on(model: nn.Module, optimizer: Any, session: gradwire.Session, until: int) -> None:
        for batch in session.loader(Points(), batch_size=BATCH):
            squared_error(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.round == until:
                break

    results = []
    for stops in ([8], [4, 8]):
        with aggregator(run_config(rounds=8, global_batch=BATCH)) as serving:
            for until in stops:
                model = mlp()
                with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
                    sgd = torch.optim.SGD
                    go_on(model, method.distributed(model.parameters(), model, session, sgd), session, until)
            results.append(weights(model))
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_overflow_that_was_clipped_away_is_still_one(method: Method) -> None:
    """scaler.unscale_ finds it; what the loop does to the gradients afterwards doesn't undo that."""
    with aggregator(run_config(rounds=1, global_batch=BATCH)) as serving:
        model = mlp()
        before = weights(model)
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            optimizer = method.distributed(model.parameters(), model, session, torch.optim.SGD)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for batch in session.loader(Points(), batch_size=BATCH):
                optimizer.zero_grad()
                scaler.scale(squared_error(model, batch) * float("inf")).backward()
                scaler.unscale_(optimizer)
                for parameter in model.parameters():
                    parameter.grad.nan_to_num_(0.0, 0.1, -0.1)
                scaler.step(optimizer)
                scaler.update()
    assert scaler.get_scale() == 4.0
    for name, tensor in before.items():
        assert torch.equal(weights(model)[name], tensor), name


def test_workers_with_other_parameter_groups_are_told_apart_at_join() -> None:
    def two(model: nn.Module) -> Any:
        *body, last = model.parameters()
        return [{"params": body}, {"params": [last], "lr": 0.2}]

    for make in (dense_of, demo_of):
        with (
            aggregator(run_config(rounds=1, global_batch=BATCH)) as serving,
            gradwire.connect(serving.address, worker="a", give_up_after_s=20) as first,
            gradwire.connect(serving.address, worker="b", give_up_after_s=20) as second,
        ):
            model, other = mlp(), mlp()
            make(model.parameters(), model, first)
            with pytest.raises(ManifestMismatch, match=r"method: \S+ groups=[0-9a-f]{8} here"):
                make(two(other), other, second)


def dense_of(groups: Any, model: nn.Module, session: gradwire.Session) -> Any:
    return gradwire.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.1), session, model=model)


def demo_of(groups: Any, model: nn.Module, session: gradwire.Session) -> Any:
    return gradwire.DeMo(groups, 0.1, session, model=model)


def test_a_joiners_weight_decay_is_the_runs_and_its_device_settings_are_its_own() -> None:
    with (
        aggregator(run_config(rounds=1, global_batch=BATCH)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as first,
        gradwire.connect(serving.address, worker="b", give_up_after_s=20) as second,
    ):
        one, two = mlp(), mlp()
        gradwire.DistributedOptimizer(
            torch.optim.AdamW(one.parameters(), weight_decay=0.5, foreach=False, amsgrad=True), first, model=one
        )
        adamw = torch.optim.AdamW(two.parameters(), weight_decay=0.0, foreach=True)
        gradwire.DistributedOptimizer(adamw, second, model=two)
    (group,) = adamw.param_groups
    assert (group["weight_decay"], group["amsgrad"], group["foreach"]) == (0.5, True, True)


@pytest.mark.parametrize("name", ["DistributedOptimizer", "DeMo"])
def test_more_groups_than_anybody_has_are_trained(name: str) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(50))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((branch(x) for branch in self.branches), torch.zeros(3))

    model = built(Parallel)()
    groups = [{"params": [p], "lr": 0.001 * (1 + n % 3)} for n, p in enumerate(model.parameters())]
    before = weights(model)
    with aggregator(run_config(rounds=2, global_batch=BATCH)) as serving:
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            optimizer = (dense_of if name == "DistributedOptimizer" else demo_of)(groups, model, session)
            list(steps(optimizer, session, model))
        assert serving.run.rounds.plan.counted.total == 2 * BATCH
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_a_bf16_model_follows_demos_small_steps() -> None:
    """Steps of 1e-4 are below the spacing of bf16 for weights above 0.03: the weights follow float32 ones."""
    models = []
    with aggregator(run_config(rounds=40, global_batch=2 * BATCH, inner_batch=BATCH, min_workers=2)) as serving:

        def job(worker: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            model = mlp().to(dtype)
            models.append(model)
            with gradwire.connect(serving.address, worker=worker, give_up_after_s=20) as session:
                optimizer = gradwire.DeMo(model.parameters(), 1e-4, session, model=model)
                for inputs, targets in session.loader(Points(), batch_size=BATCH):
                    optimizer.zero_grad()
                    loss = squared_error(model, (inputs.to(dtype), targets.to(dtype)))
                    loss.backward()
                    optimizer.step(loss)
            return weights(model)

        narrow, wide = in_threads(lambda: job("a", torch.bfloat16), lambda: job("b", torch.float32))
    for name, tensor in wide.items():
        assert torch.equal(tensor.to(torch.bfloat16), narrow[name]), name
    moved = (narrow["0.weight"] != mlp().to(torch.bfloat16).state_dict()["0.weight"]).float().mean()
    assert moved > 0.5


def test_a_closure_in_place_of_the_loss_is_refused() -> None:
    model = mlp()
    with (
        aggregator(run_config(rounds=1, global_batch=BATCH)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
    ):
        optimizer = made("SparseLoCo", model, session)
        for batch in session.loader(Points(), batch_size=BATCH):
            with pytest.raises(gradwire.GradwireError, match="not a closure"):
                optimizer.step(lambda batch=batch: squared_error(model, batch))
            break


def test_an_inner_optimizer_that_makes_its_state_at_once_keeps_it() -> None:
    class Eager(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"] = torch.zeros_like(parameter)

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"] += parameter.grad
            return super().step(closure)

    with aggregator(run_config(rounds=3, global_batch=2 * BATCH, inner_batch=BATCH, min_workers=2)) as serving:

        def job(worker: str) -> dict[str, torch.Tensor]:
            model = mlp()
            with gradwire.connect(serving.address, worker=worker, give_up_after_s=20) as session:
                optimizer = gradwire.SparseLoCo(Eager(model.parameters(), 0.1), session, model=model)
                list(steps(optimizer, session, model))
            return weights(model)

        one, two = in_threads(lambda: job("a"), lambda: job("b"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize("way", ["several batches an inner step", "scaler"])
def test_sparse_adam_inside_sparseloco_gets_sparse_gradients(way: str) -> None:
    model = nn.Sequential(nn.Embedding(64, 3, sparse=True))
    before = weights(model)
    with (
        aggregator(run_config(rounds=2, global_batch=BATCH, inner_batch=4)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
    ):
        inner = torch.optim.SparseAdam(model.parameters(), lr=0.05)
        steps_of = 1 if way != "scaler" else None
        optimizer = gradwire.SparseLoCo(inner, session, model=model, inner_steps=steps_of, scheme=EVERYTHING)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaler")
        for inputs, targets in session.loader(Points(), batch_size=4):
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(tokens(inputs)).mean(1), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
    touched = (weights(model)["0.weight"] != before["0.weight"]).any(1)
    assert touched[:16].any()
    assert not touched[16:].any()  # no batch names these rows


def test_a_mean_that_is_only_signs_is_refused() -> None:
    model, scheme = mlp(), gradwire.TopK(transform="dct", update="sign")
    with (
        aggregator(run_config(rounds=1, global_batch=BATCH)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
        pytest.raises(ConfigError, match="update = 'sign' leaves no gradient"),
    ):
        gradwire.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), session, model=model, scheme=scheme)


def test_demo_with_all_coefficients_of_every_tile_is_sign_descent() -> None:
    """Through transform, aggregate of signs and back; where the gradient is clearly not zero."""
    scheme = gradwire.TopK(k=64, chunk=64, transform="dct", values="fp32", dense_below=0, normalization="senders")
    loop = Loop("plain")
    plain = alone(loop, METHODS[2], steps=1)
    with aggregator(run_config(rounds=1, global_batch=BATCH)) as serving:
        model = loop.model()
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            optimizer = gradwire.DeMo(model.parameters(), 0.05, session, model=model, scheme=scheme, update="sign")
            for batch in session.loader(Points(), batch_size=BATCH):
                optimizer.zero_grad()
                squared_error(model, batch).backward()
                gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
                optimizer.step()
    for name, gradient in gradients.items():
        clear = gradient.abs() > 1e-5
        assert clear.float().mean() > 0.9
        assert torch.equal(weights(model)[name][clear], weights(plain)[name][clear]), name


OVERFLOWING = Loop("GradScaler that starts too high", scaler=True, scale=2.0**127, weight=64.0)


@pytest.mark.parametrize("method", [METHODS[0], METHODS[2]], ids=lambda method: method.name)
def test_a_share_whose_scaled_gradients_overflow_is_trained_again_at_a_lower_scale(method: Method) -> None:
    with aggregator(run_config(rounds=16, global_batch=BATCH, share_attempts=100)) as serving:
        found = weights(through(serving.address, OVERFLOWING, method, "a"))
        counted = serving.run.rounds.plan.counted
        refusal = serving.run.record.workers["a"].last_refusal
    assert "the scaled gradients overflowed" in refusal
    assert 1 < counted.total // BATCH < 16
    assert counted.ranges == [(0, counted.total)]  # nothing was left out
    expected = weights(alone(Loop("plain", weight=64.0), method, steps=counted.total // BATCH))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_an_inner_step_whose_scaled_gradients_overflow_is_left_out() -> None:
    expected = weights(alone(OVERFLOWING, METHODS[1]))
    with aggregator(run_config(rounds=ROUNDS, global_batch=BATCH)) as serving:
        found = weights(through(serving.address, OVERFLOWING, METHODS[1], "a"))
        assert serving.run.rounds.plan.counted.total == ROUNDS * BATCH
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-6 * tensor.norm() + 1e-7, name


def test_sparse_adam_gets_sparse_gradients() -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            return nn.Sequential(nn.Embedding(64, 3, sparse=True))

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(tokens(batch[0])).mean(1), batch[1])

    expected, data, order = build(), Points(), SampleOrder(SEED, len(Points())).indices(0, 6 * BATCH).tolist()
    adam = torch.optim.SparseAdam(expected.parameters(), lr=0.05)
    for start in range(0, len(order), BATCH):
        adam.zero_grad()
        loss_of(expected, default_collate([data[i] for i in order[start : start + BATCH]])).backward()
        adam.step()
    with aggregator(run_config(rounds=6, global_batch=BATCH)) as serving:
        model = build()
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            inner = torch.optim.SparseAdam(model.parameters(), lr=0.05)
            optimizer = gradwire.DistributedOptimizer(inner, session, model=model, scheme=gradwire.Dense("fp32"))
            for batch in session.loader(data, batch_size=BATCH):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step(loss)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), atol=1e-6, rtol=0)


def steps(optimizer: Any, session: gradwire.Session, model: nn.Module) -> Iterator[int]:
    """A plain loop; yields the round after each step."""
    for batch in session.loader(Points(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = squared_error(model, batch)
        loss.backward()
        optimizer.step(loss)
        yield session.round


COMPRESSED = gradwire.TopK(k=2, chunk=16, layout="flat", dense_below=0, normalization="senders")
COMPRESSED_DCT = gradwire.TopK(k=2, chunk=16, transform="dct", dense_below=0, normalization="senders")


def made(name: str, model: nn.Module, session: gradwire.Session) -> Any:
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    match name:
        case "DistributedOptimizer":
            return gradwire.DistributedOptimizer(adamw, session, model=model, scheme=COMPRESSED)
        case "SparseLoCo":
            return gradwire.SparseLoCo(adamw, session, model=model, scheme=COMPRESSED)
        case _:
            return gradwire.DeMo(model.parameters(), 0.01, session, model=model, scheme=COMPRESSED_DCT)


@pytest.mark.parametrize("name", ["DistributedOptimizer", "SparseLoCo", "DeMo"])
def test_state_dict_goes_on_where_it_was_saved(name: str, tmp_path: Path) -> None:
    """A worker that ends after round 3 and a new one with its state_dict end as one that never stopped does."""
    results = []
    for interrupted in (False, True):
        with aggregator(run_config(rounds=8, global_batch=BATCH)) as serving:
            model = mlp()
            with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
                optimizer = made(name, model, session)
                for number in steps(optimizer, session, model):
                    if interrupted and number == 4:
                        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
                        break
            if interrupted:
                model = mlp(seed=5)
                with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
                    optimizer = made(name, model, session)
                    assert session.round == 0  # it starts from the snapshot, and replays what it missed
                    optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
                    list(steps(optimizer, session, model))
        results.append(weights(model))
    for key, tensor in results[0].items():
        assert torch.equal(results[1][key], tensor), key


def test_a_state_dict_of_another_round_leaves_the_residual_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    with aggregator(run_config(rounds=4, global_batch=BATCH)) as serving:
        model = mlp()
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            optimizer = made("SparseLoCo", model, session)
            taken = steps(optimizer, session, model)
            next(taken)
            saved = optimizer.state_dict()
            next(taken)
            optimizer.load_state_dict(saved)
            next(taken)
    assert "the checkpoint's residual is of round 1, this is round 2: it starts from zero" in caplog.text


def test_a_state_dict_of_another_model_is_refused() -> None:
    with aggregator(run_config(rounds=4, global_batch=BATCH)) as serving:
        model = mlp()
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            optimizer = made("DistributedOptimizer", model, session)
            state = {"gradwire": {"round": 0, "residual": {"0.weight": torch.zeros(3)}}}
            with pytest.raises(ConfigError, match=r"residual of 0\.weight with shape \[3\]; the run has \[32, 8\]"):
                optimizer.load_state_dict(state)


def test_a_plain_optimizer_loads_the_state_dict_of_a_wrapped_one() -> None:
    with aggregator(run_config(rounds=3, global_batch=BATCH)) as serving:
        model = mlp()
        with gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session:
            optimizer = made("DistributedOptimizer", model, session)
            list(steps(optimizer, session, model))
    plain = torch.optim.AdamW(mlp().parameters())
    plain.load_state_dict(optimizer.state_dict())
    (group,) = plain.param_groups
    assert group["lr"] == 0.01
    assert [float(plain.state[p]["step"]) for p in group["params"]] == [3.0] * 4


@pytest.mark.parametrize("name", ["DistributedOptimizer", "SparseLoCo", "DeMo"])
@pytest.mark.parametrize("way", ["added", "unfrozen"])
def test_a_parameter_that_comes_later_is_refused(name: str, way: str) -> None:
    model = mlp()
    model[2].bias.requires_grad_(False)
    with (
        aggregator(run_config(rounds=4, global_batch=BATCH)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
    ):
        optimizer = made(name, model, session)
        taken = steps(optimizer, session, model)
        next(taken)
        if way == "added":
            getattr(optimizer, "optimizer", getattr(optimizer, "inner", optimizer)).add_param_group(
                {"params": [nn.Parameter(torch.ones(5))]}
            )
        else:
            model[2].bias.requires_grad_(True)
        shape = r"\[5\]" if way == "added" else r"\[3\]"
        with pytest.raises(ConfigError, match=f"shape {shape} that is not exchanged"):
            next(taken)


@pytest.mark.parametrize("wrap", [gradwire.DistributedOptimizer, gradwire.SparseLoCo])
def test_an_optimizer_that_needs_a_closure_is_refused(wrap: Any) -> None:
    model = mlp()
    with (
        aggregator(run_config(rounds=1, global_batch=BATCH)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
        pytest.raises(ConfigError, match=r"LBFGS .* closure"),
    ):
        wrap(torch.optim.LBFGS(model.parameters()), session, model=model)


class Counting(torch.optim.SGD):
    """Keeps a number in its groups, as schedule-free optimizers do, that its step depends on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["taken"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(group["taken"])
        return super().step(closure)


def test_a_joiner_gets_the_numbers_that_an_optimizer_keeps_in_its_groups() -> None:
    def worker(address: str, name: str, seed: int) -> tuple[dict[str, torch.Tensor], int]:
        model = mlp(seed=seed)
        with gradwire.connect(address, worker=name, give_up_after_s=20) as session:
            counting = Counting(model.parameters(), 0.1)
            optimizer = gradwire.DistributedOptimizer(counting, session, model=model)
            list(steps(optimizer, session, model))
        return weights(model), counting.param_groups[0]["taken"]

    config = run_config(rounds=12, global_batch=BATCH, snapshot_every=2)
    with aggregator(config) as serving:
        model = mlp()
        with gradwire.connect(serving.address, worker="first", give_up_after_s=20) as session:
            optimizer = gradwire.DistributedOptimizer(Counting(model.parameters(), 0.1), session, model=model)
            for number in steps(optimizer, session, model):
                if number == 9:
                    break
        assert serving.run.store.snapshots[0].round > 0
        second, taken = worker(serving.address, "second", seed=9)
        replayed = serving.run.store.snapshots[0].round
    assert replayed > 0
    assert taken == 12
    expected = weights(alone_counting(12))
    for name, tensor in expected.items():
        assert (second[name] - tensor).norm() <= 1e-2 * tensor.norm(), name


def alone_counting(steps_taken: int) -> nn.Module:
    loop = Loop("counting", optimizer=Counting)
    method = dataclasses.replace(METHODS[0], plain=lambda p, kind: kind(p, lr=0.1))
    return alone(loop, method, steps=steps_taken)
