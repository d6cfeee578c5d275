"""The weighted mean of contributions, against a dense mean in float64 and against examples by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import codec
from gradwire.codec import Form, indices
from gradwire.errors import ConfigError, MalformedTensor, NonFiniteGradient


def flat(k, chunk, **more):
    return codec.TopK(k=k, chunk=chunk, layout="flat", dense_below=0, **more)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.int32).tolist()


def sent_mask(encoded, scheme, shape):
    """Where `encoded` has an entry, zeros included."""
    ones = codec.Encoded(encoded.form, b"\x80\x3f" * (len(encoded.values) // 2), encoded.indices)
    if scheme.values == "fp32":
        ones = codec.Encoded(encoded.form, b"\0\0\x80\x3f" * (len(encoded.values) // 4), encoded.indices)
    return codec.decode(ones, scheme, shape).double()


def mean_in_float64(encoded, weights, scheme, shape):
    """The dense oracle; `encoded` may hold None."""
    by_senders = getattr(scheme, "normalization", "contributors") == "senders"
    total, divisor = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for each, weight in zip(encoded, weights, strict=True):
        if each is not None:
            total += weight * codec.decode(each, scheme, shape).double()
            divisor += weight * (sent_mask(each, scheme, shape) if by_senders else 1.0)
        elif not by_senders:
            divisor += weight
    return torch.where(divisor > 0, total / divisor.clamp(min=1e-300), 0.0)


@st.composite
def rounds(draw):
    """(contributions, weights, scheme, shape) of one round."""
    shape = draw(st.sampled_from([(40,), (8, 12), (3, 5, 4), (17,), (16, 16)]))
    chunk = draw(st.sampled_from([4, 16, 64, 256]))
    scheme = codec.TopK(
        k=draw(st.integers(1, chunk)),
        chunk=chunk,
        layout=draw(st.sampled_from(["tiles", "flat"])),
        values=draw(st.sampled_from(["bf16", "fp32"])),
        dense_below=draw(st.sampled_from([0, 0, 0, 100])),
        normalization=draw(st.sampled_from(["contributors", "senders"])),
    )
    workers = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensors = [torch.randn(shape, generator=generator) for _ in range(workers)]
    if draw(st.booleans()):
        tensors = [tensor.round() for tensor in tensors]  # zeros and ties
    encoded = [codec.encode(tensor, scheme) for tensor in tensors]
    absent = draw(st.sets(st.integers(0, workers - 1), max_size=workers - 1))
    encoded = [None if number in absent else each for number, each in enumerate(encoded)]
    weights = draw(st.lists(st.integers(1, 1000), min_size=workers, max_size=workers))
    return encoded, weights, scheme, shape


@settings(max_examples=300)
@given(rounds(), st.sampled_from([1, 40, 1 << 20]))
def test_average_is_the_weighted_mean(data, block):
    encoded, weights, scheme, shape = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "BLOCK", block)
        mean = codec.average(encoded, weights, scheme=scheme, shape=shape)
        decoded = codec.decode(mean, scheme, shape).double()
    expected = mean_in_float64(encoded, weights, scheme, shape)
    scale = sum(codec.decode(each, scheme, shape).abs().double() for each in encoded if each is not None)
    # float32 sums, then a rounding to 8 bits of mantissa (half a unit is 2^-9) where values are bf16.
    allowed = 2.0**-20 * scale + (2.0**-8 * expected.abs() if scheme.values == "bf16" else 0.0)
    assert ((decoded - expected).abs() <= allowed + 1e-30).all()


@given(rounds())
def test_sparse_average_has_exactly_the_union_of_the_entries(data):
    encoded, weights, scheme, shape = data
    present = [each for each in encoded if each is not None]
    mean = codec.average(encoded, weights, scheme=scheme, shape=shape)
    if mean.form is Form.DENSE:
        assert len(mean.values) == math.prod(shape) * (2 if scheme.values == "bf16" else 4)
        assert (mean.indices, mean.counts) == (b"", b"")
        return
    union = sum(sent_mask(each, scheme, shape) for each in present) > 0
    counts = np.frombuffer(mean.counts, "<u2").astype(np.int64)
    layout = codec.layout_of(scheme, shape)
    rows = layout.to_chunks(union).split(layout.lengths().tolist())
    assert counts.tolist() == [int(row.sum()) for row in rows]
    chosen = [index for row in rows for index in row.nonzero().view(-1).tolist()]
    assert indices.unpack(mean.form, mean.indices, counts, layout.lengths()).tolist() == chosen


@given(rounds(), st.randoms())
def test_average_does_not_depend_on_the_order_of_arrival(data, random):
    encoded, weights, scheme, shape = data
    arrived = list(enumerate(zip(encoded, weights, strict=True)))
    random.shuffle(arrived)
    ordered = [contribution for _, contribution in sorted(arrived, key=lambda entry: entry[0])]
    first = codec.average(encoded, weights, scheme=scheme, shape=shape)
    assert codec.average(*zip(*ordered, strict=True), scheme=scheme, shape=shape) == first


@given(rounds())
def test_lone_worker_averages_to_itself_bit_for_bit(data):
    encoded, weights, scheme, shape = data
    alone = next(each for each in encoded if each is not None)
    mean = codec.average([alone], weights[:1], scheme=scheme, shape=shape)
    assert bits(codec.decode(mean, scheme, shape)) == bits(codec.decode(alone, scheme, shape))


@pytest.mark.parametrize("scheme", [flat(2, 4), flat(2, 4, normalization="senders"), codec.Dense()])
def test_negative_zero_of_a_lone_worker_survives(scheme):
    tensor = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    encoded = codec.encode(tensor, scheme)
    decoded = codec.decode(codec.average([encoded], [3], scheme=scheme, shape=(4,)), scheme, (4,))
    assert bits(decoded) == bits(codec.decode(encoded, scheme, (4,)))
    assert math.copysign(1.0, decoded[0].item()) == -1.0


def by_hand(normalization):
    """Three workers keep 1 of 100 each: 3 at 7, 6 at 7 and -5 at 9; weights 1, 2, 1."""
    scheme = flat(1, 100, normalization=normalization, values="fp32")
    tensors = [torch.zeros(100) for _ in range(3)]
    tensors[0][7], tensors[1][7], tensors[2][9] = 3.0, 6.0, -5.0
    encoded = [codec.encode(tensor, scheme) for tensor in tensors]
    return scheme, encoded


def test_contributors_divide_by_all_weights():
    scheme, encoded = by_hand("contributors")
    mean = codec.average(encoded, [1, 2, 1], scheme=scheme, shape=(100,))
    # 3 / 4 + 6 * 2 / 4 = 3.75 and -5 / 4; gaps 7 and 9 - 7 - 1 = 1; one chunk with 2 entries.
    values = np.array([3.75, -1.25], "<f4").tobytes()
    assert mean == codec.Encoded(Form.GAP8, values, bytes([7, 1]), bytes([2, 0]))


def test_senders_divide_by_their_own_weights_and_a_lone_one_is_copied():
    scheme, encoded = by_hand("senders")
    mean = codec.average(encoded, [1, 2, 1], scheme=scheme, shape=(100,))
    values = np.array([5.0, -5.0], "<f4").tobytes()  # (3 + 2 * 6) / 3
    assert mean == codec.Encoded(Form.GAP8, values, bytes([7, 1]), bytes([2, 0]))


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 999), st.integers(1, 999))
def test_lone_senders_value_is_copied_whatever_the_weights(number, weight, other):
    scheme = flat(1, 4, normalization="senders", values="fp32")
    values = np.array([number], "<f4").tobytes()
    first = codec.Encoded(Form.U8, values, b"\x01")
    second = codec.Encoded(Form.U8, np.array([1.0], "<f4").tobytes(), b"\x02")
    mean = codec.average([first, second], [weight, other], scheme=scheme, shape=(4,))
    decoded = codec.decode(mean, scheme, (4,))
    assert decoded[1:2].numpy().astype("<f4").tobytes() == values


def test_worker_without_a_gradient_is_a_zero_among_contributors():
    scheme, encoded = by_hand("contributors")
    mean = codec.average([encoded[0], None], [1, 3], scheme=scheme, shape=(100,))
    assert codec.decode(mean, scheme, (100,))[7].item() == 0.75


def test_worker_without_a_gradient_is_no_sender():
    scheme, encoded = by_hand("senders")
    mean = codec.average([encoded[0], None, encoded[1]], [1, 3, 2], scheme=scheme, shape=(100,))
    assert codec.decode(mean, scheme, (100,))[7].item() == 5.0


@pytest.mark.parametrize("scheme", [codec.Dense("fp32"), codec.TopK(values="fp32")])
def test_worker_without_a_gradient_is_a_zero_in_a_dense_average(scheme):
    encoded = codec.encode(torch.tensor([4.0, 8.0]), scheme)
    mean = codec.average([None, encoded], [1, 3], scheme=scheme, shape=(2,))
    assert codec.decode(mean, scheme, (2,)).tolist() == [3.0, 6.0]


def test_dense_tensor_is_divided_by_its_senders():
    scheme = codec.TopK(values="fp32", normalization="senders")
    one, two = (codec.encode(torch.tensor([value, -value]), scheme) for value in (1.0, 4.0))
    mean = codec.average([one, None, two], [1, 7, 2], scheme=scheme, shape=(2,))
    assert codec.decode(mean, scheme, (2,)).tolist() == [3.0, -3.0]


@pytest.mark.parametrize("scheme", [codec.Dense(), flat(1, 4), flat(1, 4, normalization="senders")])
def test_no_gradient_anywhere_gives_none(scheme):
    assert codec.average([None, None], [1, 1], scheme=scheme, shape=(8,)) is None


def test_empty_tensor_averages_to_nothing():
    empty = codec.Encoded(Form.DENSE, b"")
    assert codec.average([empty, empty], [1, 1], scheme=flat(1, 4), shape=(0, 3)) == empty


@pytest.mark.parametrize(
    ("count", "form"),
    [
        (16, Form.GAP8),  # 2 x 16 + 2 + gaps, about 40 bytes; a bitmap would take 32 of them
        (60, Form.BITMAP),  # 120 + 2 + 32 bytes; gaps would take 60 in place of 32
        (250, Form.DENSE),  # 512 bytes against 500 + 2 + 32
    ],
)
def test_average_takes_the_shortest_form(count, form):
    scheme = flat(count, 256)
    tensor = torch.zeros(256)
    tensor[torch.arange(count)] = 1.0
    encoded = codec.encode(tensor, scheme)
    assert codec.average([encoded], [1], scheme=scheme, shape=(256,)).form is form


def test_golden_bitmap():
    # One chunk of 16, 3 of it kept: 0, 2 and 9. A bitmap is 2 bytes, 05 02; gaps would be 3: 00 01 06.
    tensor = torch.zeros(16)
    tensor[[0, 2, 9]] = torch.tensor([1.0, -2.0, 0.5])
    scheme = flat(3, 16)
    mean = codec.average([codec.encode(tensor, scheme)], [1], scheme=scheme, shape=(16,))
    assert mean == codec.Encoded(
        Form.BITMAP, bytes.fromhex("803f 00c0 003f"), bytes.fromhex("05 02"), bytes.fromhex("03 00")
    )


def test_dense_form_of_tiles_is_row_major():
    tensor = torch.arange(1.0, 17.0).view(4, 4)
    scheme = codec.TopK(k=4, chunk=4, dense_below=0, values="fp32")
    mean = codec.average([codec.encode(tensor, scheme)], [1], scheme=scheme, shape=(4, 4))
    assert mean == codec.Encoded(Form.DENSE, np.arange(1, 17).astype("<f4").tobytes())


def test_sum_runs_in_the_order_given_in_float32():
    scheme = codec.Dense("fp32")
    numbers, weights = [1.0, 2.0**24, -(2.0**24)], [1, 1, 1]
    for order in itertools.permutations(range(3)):
        encoded = [codec.encode(torch.tensor([numbers[each]]), scheme) for each in order]
        mean = codec.decode(codec.average(encoded, weights, scheme=scheme, shape=(1,)), scheme, (1,))
        third, expected = np.float32(1 / 3), np.float32(-0.0)
        for each in order:
            expected = expected + third * np.float32(numbers[each])
        assert mean.item() == float(expected)


def test_overflowing_average_is_refused_by_name():
    scheme = codec.Dense("fp32")
    largest = codec.encode(torch.full((4,), torch.finfo(torch.float32).max), scheme)
    # float32(1/10) is above 1/10 by more than a rounding can hide, so ten of them make more than the largest number.
    with pytest.raises(NonFiniteGradient, match="head: 4 of 4"):
        codec.average([largest] * 10, [1] * 10, scheme=scheme, shape=(4,), name="head")


@pytest.mark.parametrize("weights", [[1], [0, 0], [1, -1], [float("nan"), 1], [float("inf"), 1]])
def test_impossible_weights_are_refused(weights):
    encoded = codec.encode(torch.ones(4), codec.Dense())
    with pytest.raises(ConfigError, match="weights"):
        codec.average([encoded, encoded], weights, scheme=codec.Dense(), shape=(4,))


@pytest.mark.parametrize(
    "wrong",
    [
        codec.Encoded(Form.DENSE, bytes(16)),
        codec.Encoded(Form.BITMAP, bytes(4), b"\x01\x01", bytes([1, 0, 1, 0])),
        codec.Encoded(Form.U8, bytes(2), b"\x01\x01"),
        codec.Encoded(Form.U8, bytes(4), b"\x01"),
        codec.Encoded(Form.U8, bytes(4), b"\x01\x04"),
        codec.Encoded(Form.U8, bytes(4), b"\x01\x01", bytes([1, 0, 1, 0])),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_contribution_of_another_scheme_or_shape_is_malformed(wrong, first):
    scheme = flat(1, 4)
    right = codec.encode(torch.ones(8), scheme)
    contributions = [wrong, right] if first else [right, wrong]
    with pytest.raises(MalformedTensor):
        codec.average(contributions, [1, 1], scheme=scheme, shape=(8,))
