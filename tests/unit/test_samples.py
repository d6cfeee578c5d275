import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError
from gradwire.samples import SampleOrder


def test_pinned_order() -> None:
    # These values are a contract: workers with other numpy versions or other processors must draw the same
    # samples. If this test fails, it is the code that has to change back.
    order = SampleOrder(0, 10)
    assert order.indices(0, 10).tolist() == PINNED_EPOCH_0
    assert order.indices(10, 20).tolist() == PINNED_EPOCH_1
    assert SampleOrder(2**64 - 1, 10).indices(0, 10).tolist() == PINNED_LAST_SEED


@given(seed=st.integers(0, 2**64 - 1), length=st.integers(1, 50), epoch=st.integers(0, 1000))
def test_each_epoch_is_a_permutation(seed: int, length: int, epoch: int) -> None:
    drawn = SampleOrder(seed, length).indices(epoch * length, (epoch + 1) * length)

    assert drawn.dtype == np.int64
    assert sorted(drawn.tolist()) == list(range(length))


@given(seed=st.integers(0, 99), length=st.integers(1, 30), cuts=st.lists(st.integers(0, 100), max_size=8))
def test_any_cut_into_ranges_gives_the_same_samples(seed: int, length: int, cuts: list[int]) -> None:
    order = SampleOrder(seed, length)
    borders = [0, *sorted(cuts), 100]
    joined = np.concatenate([order.indices(a, b) for a, b in pairwise(borders)])

    assert joined.tolist() == order.indices(0, 100).tolist()
    assert [order.index(number) for number in range(100)] == joined.tolist()


def test_epochs_and_seeds_differ() -> None:
    first = SampleOrder(1, 1000)
    assert first.indices(0, 1000).tolist() != first.indices(1000, 2000).tolist()
    assert first.indices(0, 1000).tolist() != SampleOrder(2, 1000).indices(0, 1000).tolist()


def test_a_caller_can_write_to_what_it_got() -> None:
    order = SampleOrder(3, 10)
    before = order.indices(0, 10).tolist()
    order.indices(0, 10)[:] = 0

    assert order.indices(0, 10).tolist() == before


def test_threads_see_one_order() -> None:
    expected = SampleOrder(5, 100).indices(0, 2000)
    wrong: list[int] = []

    def draw(first: int) -> None:
        order = SampleOrder(5, 100)
        for number in range(first, 2000, 7):
            if order[number] != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=draw, args=(first,)) for first in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_empty_range_is_empty() -> None:
    assert SampleOrder(0, 10).indices(7, 7).tolist() == []


def test_empty_dataset_is_an_error() -> None:
    with pytest.raises(ConfigError, match="0 samples"):
        SampleOrder(0, 0)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range_is_an_error(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed = {seed}"):
        SampleOrder(seed, 10)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_range_that_is_none_is_an_error(start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        SampleOrder(0, 10).indices(start, stop)


PINNED_EPOCH_0 = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
PINNED_EPOCH_1 = [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]
PINNED_LAST_SEED = [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]
