"""The weighted mean of contributions, against a dense mean in float64 and against examples by hand."""

import itertools
import math
import struct

import numpy as np
import pytest
import scipy.fft
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


def bf16(data):
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def values_of(encoded, scheme, counts):
    """The values of `encoded` in float64, of whatever type they are."""
    if scheme.values == "sign" and encoded.scales:
        signs, data = [], encoded.values
        for count, scale in zip(counts, bf16(encoded.scales), strict=True):
            size = -(-count // 8)
            ones = np.unpackbits(np.frombuffer(data[:size], np.uint8), bitorder="little")[:count]
            signs.append(np.where(ones == 1, -scale, scale))
            data = data[size:]
        return np.concatenate(signs)
    return np.frombuffer(encoded.values, "<f4").astype(np.float64) if scheme.values == "fp32" else bf16(encoded.values)


def coefficients_of(encoded, scheme, shape):
    """What `encoded` holds for every coefficient, in chunk order, in float64: NaN where it has no entry."""
    if encoded.form is Form.DENSE:
        flat = values_of(encoded, scheme, None)
        return codec.layout_of(scheme, shape).to_chunks(torch.from_numpy(flat).view(shape)).numpy()
    layout = codec.layout_of(scheme, shape)
    counts = np.frombuffer(encoded.counts, "<u2").astype(np.int64) if encoded.counts else layout.kept_counts()
    chosen = indices.unpack(encoded.form, encoded.indices, counts, layout.lengths())
    found = np.full(math.prod(shape), np.nan)
    found[chosen + indices.chunk_starts(counts, layout.length)] = values_of(encoded, scheme, counts)
    return found


def clipped(rows):
    """Rows scaled down to the median of their norms, the lower one in the middle."""
    norms = np.sqrt(np.nansum(rows**2, axis=1))
    median = np.sort(norms)[(len(norms) - 1) // 2]
    return rows * np.where(norms > median, median / np.where(norms > 0, norms, 1), 1)[:, None]


def mean_in_float64(encoded, weights, scheme, shape):
    """The oracle: (the mean coefficients, the sum of the magnitudes that went in); `encoded` may hold None."""
    rows = np.array([coefficients_of(each, scheme, shape) for each in encoded if each is not None])
    rows = clipped(rows) if scheme.clip == "median" else rows
    own = np.array([weight for each, weight in zip(encoded, weights, strict=True) if each is not None], np.float64)
    total = np.nansum(rows * own[:, None], axis=0)
    divisor = own @ ~np.isnan(rows) if scheme.normalization == "senders" else np.full(len(total), float(sum(weights)))
    return np.divide(total, divisor, out=np.zeros_like(total), where=divisor > 0), np.nansum(np.abs(rows), axis=0)


@st.composite
def rounds(draw, updates=("coefficients",)):
    """(contributions, weights, scheme, shape) of one round."""
    shape = draw(st.sampled_from([(40,), (8, 12), (3, 5, 4), (17,), (16, 16)]))
    chunk = draw(st.sampled_from([4, 16, 64, 256]))
    update = draw(st.sampled_from(updates))
    transforms = [{"transform": "dct", "update": update}]
    plain = [{"layout": "tiles"}, {"layout": "flat"}] if update == "coefficients" else []
    scheme = codec.TopK(
        k=draw(st.integers(1, chunk)),
        chunk=chunk,
        values=draw(st.sampled_from(["bf16", "fp32", "sign"])),
        dense_below=draw(st.sampled_from([0, 0, 0, 100])),
        normalization=draw(st.sampled_from(["contributors", "senders"])),
        clip=draw(st.sampled_from([None, "median"])),
        **draw(st.sampled_from(plain + transforms)),
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
    expected, scale = mean_in_float64(encoded, weights, scheme, shape)
    # float32 sums, then a rounding to 8 bits of mantissa (half a unit is 2^-9) where means are bf16.
    allowed = 2.0**-20 * scale + (2.0**-8 * np.abs(expected) if scheme.values != "fp32" else 0.0)
    assert (np.abs(np.nan_to_num(coefficients_of(mean, scheme, shape)) - expected) <= allowed + 1e-30).all()


@settings(max_examples=200)
@given(rounds(updates=["sign"]), st.sampled_from([1, 40, 1 << 20]))
def test_update_is_the_sign_of_the_mean_of_every_weight(data, block):
    encoded, weights, scheme, shape = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "BLOCK", block)
        mean = codec.average(encoded, weights, scheme=scheme, shape=shape)
        decoded = codec.decode(mean, scheme, shape)
    expected, scale = mean_in_float64(encoded, weights, scheme, shape)
    if math.prod(shape) < scheme.dense_below:
        assert mean.form is Form.DENSE
        return
    layout = codec.layout_of(scheme, shape)
    tiles = scipy.fft.idctn(expected.reshape(layout.chunks, *layout.tile), axes=(1, 2), norm="ortho")
    updates, signs = (each.reshape(layout.chunks, -1) for each in (tiles, layout.to_chunks(decoded).numpy()))
    # Where rounding may decide whether anything is left, it may decide the sign too.
    largest = scale.reshape(layout.chunks, -1).max(axis=1, keepdims=True)
    certain = np.abs(updates) > 2.0**-16 * largest
    assert (signs[certain] == np.sign(updates[certain])).all()
    untouched = (scale == 0).reshape(layout.chunks, -1).all(axis=1)
    assert (signs[untouched] == 0).all()
    assert set(signs[certain.any(axis=1)].reshape(-1).tolist()) <= {-1.0, 1.0}


@given(rounds())
def test_sparse_average_has_exactly_the_union_of_the_entries(data):
    encoded, weights, scheme, shape = data
    present = [coefficients_of(each, scheme, shape) for each in encoded if each is not None]
    mean = codec.average(encoded, weights, scheme=scheme, shape=shape)
    if mean.form is Form.DENSE:
        assert len(mean.values) == math.prod(shape) * (4 if scheme.values == "fp32" else 2)
        assert (mean.indices, mean.counts, mean.scales) == (b"", b"", b"")
        return
    union = ~np.isnan(present).all(axis=0)
    assert (~np.isnan(coefficients_of(mean, scheme, shape)) == union).all()
    layout = codec.layout_of(scheme, shape)
    ends = np.cumsum(layout.lengths())
    assert np.frombuffer(mean.counts, "<u2").tolist() == [int(row.sum()) for row in np.split(union, ends[:-1])]
    assert not mean.scales


@given(rounds())
def test_lone_worker_averages_to_itself_bit_for_bit(data):
    encoded, weights, scheme, shape = data
    alone = next(each for each in encoded if each is not None)
    mean = codec.average([alone], weights[:1], scheme=scheme, shape=shape)
    assert bits(codec.decode(mean, scheme, shape)) == bits(codec.decode(alone, scheme, shape))


@given(rounds(updates=["sign"]))
def test_update_of_a_lone_worker_is_the_sign_of_what_it_sent(data):
    encoded, weights, scheme, shape = data
    alone = next(each for each in encoded if each is not None)
    mean = codec.average([alone], weights[:1], scheme=scheme, shape=shape)
    decoded, sent = codec.decode(mean, scheme, shape), codec.decode(alone, scheme, shape)
    if math.prod(shape) < scheme.dense_below:
        assert bits(decoded) == bits(sent)
    else:
        assert mean.form is Form.SIGN
        layout = codec.layout_of(scheme, shape)
        touched = (np.nan_to_num(coefficients_of(alone, scheme, shape)).reshape(layout.chunks, -1) != 0).any(axis=1)
        assert np.frombuffer(mean.counts, "<u2").tolist() == (touched * layout.length).tolist()
        signs, weights_sent = layout.to_chunks(decoded).numpy(), layout.to_chunks(sent).numpy()
        expected = np.where(weights_sent < 0, -1.0, 1.0) * np.repeat(touched, layout.length)
        assert signs.tolist() == expected.tolist()


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


@pytest.mark.parametrize(
    "scheme",
    [
        codec.Dense(),
        flat(1, 4),
        flat(1, 4, normalization="senders", clip="median"),
        flat(1, 4, values="sign"),
        codec.TopK(k=1, chunk=4, transform="dct", update="sign", dense_below=0),
    ],
)
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


def signs_of(scheme, *texts):
    """Contributions to a tensor of 16 elements, in one chunk, from `index:value` words."""
    contributions = []
    for text in texts:
        tensor = torch.zeros(16)
        for word in text.split():
            index, value = word.split(":")
            tensor[int(index)] = float(value)
        contributions.append(codec.encode(tensor, scheme))
    return contributions


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("contributors", [0.5, -3.5, 3.0, 0.0]), ("senders", [2.0, -3.5, 4.0, 0.0])],
)
def test_signs_are_averaged_as_their_scales(normalization, expected):
    scheme = flat(2, 16, values="sign", normalization=normalization)
    # Their scales are 2 and 4.
    encoded = signs_of(scheme, "0:1 1:-3", "1:-5 2:3")
    assert [each.scales.hex() for each in encoded] == ["0040", "8040"]
    mean = codec.average(encoded, [1, 3], scheme=scheme, shape=(16,))
    assert codec.decode(mean, scheme, (16,)).tolist() == expected + [0.0] * 12
    values = np.array(expected[:3], "<f4").view("<u4") >> 16
    assert mean == codec.Encoded(Form.BITMAP, values.astype("<u2").tobytes(), bytes([7, 0]), bytes([3, 0]))


@pytest.mark.parametrize("normalization", ["contributors", "senders"])
@pytest.mark.parametrize("shape", [(64, 48), (1000,)])
def test_average_of_signs_is_the_mean_of_the_tensors_that_they_stand_for(normalization, shape):
    scheme = codec.TopK(k=20, chunk=256, values="sign", dense_below=0, normalization=normalization)
    generator = torch.Generator().manual_seed(7)
    encoded = [codec.encode(torch.randn(shape, generator=generator), scheme) for _ in range(4)]
    weights = np.array([5.0, 1.0, 3.0, 7.0])
    rows = np.array([codec.decode(each, scheme, shape).double().flatten().numpy() for each in encoded])
    divisor = weights @ (rows != 0) if normalization == "senders" else weights.sum()
    expected = weights @ rows / np.maximum(divisor, 1e-300)
    mean = codec.average(encoded, weights.tolist(), scheme=scheme, shape=shape)
    decoded = codec.decode(mean, scheme, shape).double().flatten().numpy()
    assert (np.abs(decoded - expected) <= 2.0**-8 * np.abs(expected) + 1e-6).all()
    assert np.count_nonzero(decoded) == np.count_nonzero(expected)


def test_contributions_that_cancel_leave_no_update():
    scheme = codec.TopK(k=1, chunk=4, transform="dct", update="sign", dense_below=0, indices="u8")
    one = codec.Encoded(Form.U8, bytes.fromhex("803f 803f"), bytes([1, 2]))
    other = codec.Encoded(Form.U8, bytes.fromhex("80bf 803f"), bytes([1, 2]))
    mean = codec.average([one, other], [1, 1], scheme=scheme, shape=(2, 4))
    assert mean == codec.Encoded(Form.SIGN, bytes([0b1100]), counts=bytes([0, 0, 4, 0]))
    assert codec.decode(mean, scheme, (2, 4)).tolist() == [[0, 0, 1, 1], [0, 0, -1, -1]]


@pytest.mark.parametrize("kind", ["bf16", "sign"])
def test_lone_senders_values_are_themselves_before_signs_are_taken(kind):
    # One weight of the pair is the difference of the two coefficients. That is 0, so +, unless a product with a share
    # and a quotient by it have left one of them below the other.
    scheme = codec.TopK(
        k=1, chunk=4, transform="dct", update="sign", values=kind, dense_below=0, normalization="senders"
    )
    for number in (1.0, 1.5, 1.9921875):
        data = struct.pack("<f", number)[2:]
        fields = {"values": data} if kind == "bf16" else {"values": b"\x00", "scales": data}
        pair = [codec.Encoded(Form.U8, indices=bytes([index]), **fields) for index in range(2)]
        for weights in itertools.product(range(1, 12), repeat=2):
            mean = codec.average(pair, weights, scheme=scheme, shape=(2,))
            assert codec.decode(mean, scheme, (2,)).tolist() == [1.0, 1.0], (number, weights)


def test_overflowing_update_is_refused_by_name():
    scheme = codec.TopK(k=1, chunk=4, transform="dct", update="sign", values="fp32", dense_below=0, indices="u8")
    largest = codec.Encoded(Form.U8, np.array([torch.finfo(torch.float32).max], "<f4").tobytes(), b"\x00")
    with pytest.raises(NonFiniteGradient, match="head"):
        codec.average([largest] * 10, [1] * 10, scheme=scheme, shape=(2, 2), name="head")


# Clipping


def clip_mean(tensors, weights=None, **scheme):
    """The mean of float32 tensors, some of them None, that are clipped to the median of their norms."""
    scheme = codec.TopK(**{"values": "fp32", "clip": "median", "normalization": "senders", **scheme})
    tensors = [None if each is None else torch.tensor(each) for each in tensors]
    shape = next(each.shape for each in tensors if each is not None)
    encoded = [None if each is None else codec.encode(each, scheme) for each in tensors]
    mean = codec.average(encoded, weights or [1] * len(tensors), scheme=scheme, shape=shape)
    return codec.decode(mean, scheme, shape).tolist()


SPARSE = {"k": 1, "chunk": 4, "layout": "flat", "dense_below": 0}


def test_of_two_workers_the_larger_is_scaled_to_the_smaller():
    for pair in ([[3.0, 4.0], [6.0, -8.0]], [[6.0, -8.0], [3.0, 4.0]]):
        assert clip_mean(pair) == [3.0, 0.0]
        assert clip_mean(pair, normalization="contributors") == [3.0, 0.0]


def test_median_of_an_even_number_is_the_lower_one_in_the_middle():
    # Norms of 1, 2, 4 and 8: the last two become 2.
    assert clip_mean([[8.0], [1.0], [4.0], [-2.0]]) == [0.75]
    # Norms of 1, 2, 4, 8 and 16: the last two become 4.
    assert clip_mean([[16.0], [8.0], [1.0], [4.0], [-2.0]], [2, 2, 2, 1, 1]) == [2.5]


def test_worker_without_a_gradient_does_not_count_for_the_median():
    # Norms of 2, 4 and 8 become 2, 4 and 4; with zeros for the others the median would be 0 or 2.
    tensors = [[8.0], None, [2.0], None, [4.0], None]
    assert clip_mean(tensors, [2, 1, 4, 1, 2, 1]) == [3.0]
    assert clip_mean(tensors, [2, 1, 4, 3, 2, 4], normalization="contributors") == [1.5]


@pytest.mark.parametrize("others", [[], [None], [None, None]])
def test_lone_worker_is_not_clipped(others):
    number = 0.1 + 2.0**-20
    expected = torch.tensor([number, -7.3]).tolist()
    assert clip_mean([[number, -7.3], *others], [3] * (1 + len(others))) == expected
    sparse = [0.0, number, 0.0, 0.0]
    assert clip_mean([sparse, *others], [3] * (1 + len(others)), **SPARSE) == torch.tensor(sparse).tolist()


def test_workers_of_one_norm_are_left_as_they_are():
    assert clip_mean([[5.0, 0.0], [-3.0, 4.0], [0.0, 5.0]], [1, 1, 2]) == [0.5, 3.5]


def test_norm_is_that_of_what_was_sent():
    # Norms of 3 and 4 as sent, of 5.8 and 4 as computed.
    assert clip_mean([[3.0, 2.9, 2.9, 2.9], [4.0, 0.0, 0.0, 0.0]], **SPARSE) == [3.0, 0.0, 0.0, 0.0]


def test_norm_of_signs_is_that_of_their_scales():
    # Both are sent as 3 and 3, though 6 and 0 is the longer of the two.
    tensors = [[4.0, 2.0, 0.0, 0.0], [6.0, 0.0, 0.0, 0.0]]
    assert clip_mean(tensors, **SPARSE | {"k": 2, "values": "sign"}) == [3.0, 3.0, 0.0, 0.0]


def test_norm_is_of_the_whole_tensor_and_not_of_a_chunk():
    # Norms of 5 and 10; the second's first chunk is shorter than the first's, and scaled all the same.
    tensors = [[3.0, 0, 0, 0, 4.0, 0, 0, 0], [0.0, 0, 0, 6.0, 8.0, 0, 0, 0]]
    assert clip_mean(tensors, **SPARSE) == [3.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0]


def test_lone_senders_value_is_copied_as_clipped():
    tensors = [[0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 6.0, 0.0]]
    assert clip_mean(tensors, [1, 9], **SPARSE) == [0.0, 3.0, 3.0, 0.0]
    assert clip_mean(tensors, [1, 3], normalization="contributors", **SPARSE) == [0.0, 0.75, 2.25, 0.0]


def test_median_of_zero_clips_to_nothing():
    assert clip_mean([[0.0, 0.0], [3.0, 4.0]]) == [0.0, 0.0]
    assert clip_mean([[0.0] * 4, [3.0, 4.0, 0.0, 0.0], [0.0] * 4], **SPARSE) == [0.0] * 4


def test_largest_numbers_are_clipped_without_overflow():
    largest = torch.finfo(torch.float32).max
    assert clip_mean([[largest, largest], [1.0, 1.0]]) == [1.0, 1.0]


def test_every_product_of_the_clip_is_rounded_to_float32():
    generator = torch.Generator().manual_seed(3)
    tensors = [(torch.randn(5, generator=generator) * size).tolist() for size in (1.0, 3.0)]
    rows = np.array(tensors, np.float32)
    norms = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    shorter, longer = np.argsort(norms)
    rows[longer] *= np.float32(norms[shorter] / norms[longer])
    half = np.float32(0.5)
    assert clip_mean(tensors, normalization="contributors") == (half * rows[0] + half * rows[1]).tolist()


@pytest.mark.parametrize("layout", [{"layout": "flat"}, {"layout": "tiles"}, {"transform": "dct"}])
@pytest.mark.parametrize("normalization", ["contributors", "senders"])
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_clipped_tensors_of_very_different_sizes_average_to_their_float64_mean(workers, normalization, layout):
    scheme = codec.TopK(
        k=9, chunk=64, values="fp32", dense_below=0, normalization=normalization, clip="median", **layout
    )
    generator = torch.Generator().manual_seed(workers)
    sizes = [1.0, 1e-6, 1e6, 30.0, 0.02]
    encoded = [codec.encode(torch.randn(24, 40, generator=generator) * size, scheme) for size in sizes[:workers]]
    weights = [7, 1, 2, 30, 5][:workers]
    mean = codec.average(encoded, weights, scheme=scheme, shape=(24, 40))
    expected, scale = mean_in_float64(encoded, weights, scheme, (24, 40))
    assert (np.abs(np.nan_to_num(coefficients_of(mean, scheme, (24, 40))) - expected) <= 2.0**-20 * scale).all()


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
        codec.Encoded(Form.U8, bytes(4), b"\x01\x01", scales=bytes(4)),
        codec.Encoded(Form.U8, bytes(2), b"\x01\x01", scales=bytes(4)),
        codec.Encoded(Form.SIGN, bytes(2), counts=bytes([4, 0, 4, 0])),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_contribution_of_another_scheme_or_shape_is_malformed(wrong, first):
    scheme = flat(1, 4)
    right = codec.encode(torch.ones(8), scheme)
    contributions = [wrong, right] if first else [right, wrong]
    with pytest.raises(MalformedTensor):
        codec.average(contributions, [1, 1], scheme=scheme, shape=(8,))


@pytest.mark.parametrize(
    "wrong",
    [
        codec.Encoded(Form.U8, bytes(2), b"\x01\x01"),
        codec.Encoded(Form.U8, bytes(2), b"\x01\x01", scales=bytes(2)),
        codec.Encoded(Form.U8, bytes(2), b"\x01\x01", scales=bytes(6)),
        codec.Encoded(Form.U8, bytes(1), b"\x01\x01", scales=bytes(4)),
        codec.Encoded(Form.U8, bytes(4), b"\x01\x01"),
        codec.Encoded(Form.U8, bytes(4), b"\x01\x01", bytes([1, 0, 1, 0])),
        codec.Encoded(Form.SIGN, bytes(2), counts=bytes([4, 0, 4, 0])),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_contribution_without_its_signs_or_scales_is_malformed(wrong, first):
    scheme = flat(1, 4, values="sign")
    right = codec.encode(torch.ones(8), scheme)
    contributions = [wrong, right] if first else [right, wrong]
    with pytest.raises(MalformedTensor):
        codec.average(contributions, [1, 1], scheme=scheme, shape=(8,))
