"""encode and decode together, against an oracle in plain Python."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import codec
from gradwire.codec import Form, select
from gradwire.errors import ConfigError, MalformedTensor, NonFiniteGradient

# Few distinct magnitudes, both signs, both zeros and a subnormal: ties everywhere.
tied = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 2.0**-130, -(2.0**-130)])
smooth = st.floats(-(2.0**100), 2.0**100, width=32)
shapes = st.one_of(
    st.sampled_from([(), (1,), (0,), (3, 0, 2), (7, 13), (2, 3, 2, 3, 2), (31,), (16, 24), (1, 64), (64, 1)]),
    st.lists(st.integers(1, 9), max_size=5).map(tuple).filter(lambda shape: math.prod(shape) <= 400),
)


@st.composite
def schemes(draw, *, values=("bf16", "fp32")):
    layout = draw(st.sampled_from(["tiles", "flat"]))
    chunk = draw(st.integers(1, 10)) ** 2 if layout == "tiles" else draw(st.integers(1, 90))
    return codec.TopK(
        k=draw(st.integers(1, chunk)),
        chunk=chunk,
        layout=layout,
        values=draw(st.sampled_from(values)),
        indices=draw(st.sampled_from(["auto", "u8", "u16", "gap8"])),
        dense_below=draw(st.sampled_from([0, 0, 0, 50])),
    )


@st.composite
def tensors(draw, shape):
    numel = math.prod(shape)
    numbers = draw(st.lists(draw(st.sampled_from([tied, smooth])), min_size=numel, max_size=numel))
    return torch.tensor(numbers, dtype=torch.float32).view(shape)


def kept_by_hand(tensor, scheme):
    """What must arrive before rounding: Python's sort by (-magnitude, index) in each chunk of the geometry."""
    layout = codec.layout_of(scheme, tensor.shape)
    flat, out, start = layout.to_chunks(tensor).tolist(), [], 0
    for length, kept in zip(layout.lengths().tolist(), layout.kept_counts().tolist(), strict=True):
        chunk = flat[start : start + length]
        best = sorted(range(length), key=lambda index: (-abs(chunk[index]), index))[:kept]
        out += [chunk[index] if index in best else 0.0 for index in range(length)]
        start += length
    return layout.from_chunks(torch.tensor(out, dtype=torch.float32))


def rounded(tensor, values):
    return tensor.bfloat16().float() if values == "bf16" else tensor


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.int32).tolist()


@settings(max_examples=400)
@given(st.data(), shapes, schemes())
def test_kept_entries_arrive_exactly_and_the_rest_is_zero(data, shape, scheme):
    tensor = data.draw(tensors(shape))
    encoded = codec.encode(tensor, scheme)
    decoded = codec.decode(encoded, scheme, list(shape))
    dense = tensor.numel() < scheme.dense_below or tensor.numel() == 0
    expected = rounded(tensor if dense else kept_by_hand(tensor, scheme), scheme.values)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == torch.float32
    assert bits(decoded) == bits(expected)
    assert (encoded.form is Form.DENSE) == dense


@given(st.data(), shapes, st.sampled_from(["bf16", "fp32"]))
def test_dense_carries_every_element(data, shape, values):
    tensor = data.draw(tensors(shape))
    encoded = codec.encode(tensor, codec.Dense(values))
    assert encoded.nbytes == tensor.numel() * (2 if values == "bf16" else 4)
    assert bits(codec.decode(encoded, codec.Dense(values), shape)) == bits(rounded(tensor, values))


@pytest.mark.parametrize("layout", ["tiles", "flat"])
def test_keeping_everything_equals_dense(layout):
    tensor = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    scheme = codec.TopK(k=16, chunk=16, layout=layout, dense_below=0)
    decoded = codec.decode(codec.encode(tensor, scheme), scheme, (12, 20))
    assert torch.equal(decoded, codec.decode(codec.encode(tensor, codec.Dense()), codec.Dense(), (12, 20)))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t[3:, 1:],
        lambda t: t.view(8, 5, 8, 5).permute(2, 0, 3, 1),
        lambda t: t[:1].expand(40, 40),
        lambda t: t.flip(0),
    ],
)
@pytest.mark.parametrize("scheme", [codec.TopK(k=5, chunk=64, dense_below=0), codec.Dense()])
def test_strided_view_encodes_like_its_contiguous_copy(view, scheme):
    strided = view(torch.randn(40, 40, generator=torch.Generator().manual_seed(2)))
    assert codec.encode(strided, scheme) == codec.encode(strided.contiguous().clone(), scheme)


def test_strided_input_is_left_as_it_was():
    tensor = torch.randn(16, 16, requires_grad=True)
    before = tensor.detach().clone()
    codec.encode(tensor, codec.TopK(k=3, chunk=64, dense_below=0))
    assert torch.equal(tensor.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_float_dtypes_encode_like_their_float32_values(dtype):
    tensor = torch.randn(32, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    scheme = codec.TopK(k=7, chunk=64, dense_below=0, values="fp32")
    assert codec.encode(tensor, scheme) == codec.encode(tensor.float(), scheme)


def test_integers_are_refused_by_name():
    with pytest.raises(ConfigError, match="counter: only float tensors"):
        codec.encode(torch.zeros(3, dtype=torch.int64), codec.Dense(), name="counter")


@pytest.mark.parametrize("scheme", [codec.TopK(k=1, chunk=16, dense_below=0), codec.Dense(), codec.TopK()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_is_refused_by_name_and_number(scheme, bad):
    tensor = torch.ones(8, 8)
    tensor[1, 2] = tensor[5, 5] = bad
    with pytest.raises(NonFiniteGradient, match=r"head\.bias: 2 of 64 values are not finite"):
        codec.encode(tensor, scheme, name="head.bias")


def test_large_finite_values_whose_sum_overflows_are_not_refused():
    tensor = torch.full((8, 8), 3e38)
    decoded = codec.decode(codec.encode(tensor, codec.Dense()), codec.Dense(), (8, 8))
    assert torch.equal(decoded, tensor.bfloat16().float())


def test_float64_beyond_float32_is_refused():
    with pytest.raises(NonFiniteGradient, match="t: 1 of 2"):
        codec.encode(torch.tensor([1e300, 1.0], dtype=torch.float64), codec.Dense("fp32"), name="t")


def test_value_that_bf16_rounds_to_infinity_is_refused():
    with pytest.raises(NonFiniteGradient, match="t: 1 of 1"):
        codec.encode(torch.tensor([3.4e38, 1.0]), codec.TopK(k=1, chunk=4, layout="flat", dense_below=0), name="t")


def test_zeros_keep_their_lowest_indices():
    scheme = codec.TopK(k=2, chunk=4, layout="flat", dense_below=0)
    encoded = codec.encode(torch.tensor([-0.0, 0.0, 0.0, -0.0, 0.0, 1.0]), scheme)
    # Chunk one: indices 0 and 1 (values -0, +0). Chunk two has 2 of 4 coefficients: one entry, index 1, value 1.
    assert encoded == codec.Encoded(Form.U8, bytes.fromhex("0080 0000 803f"), bytes([0, 1, 1]))


@pytest.mark.parametrize("size", [5000, 100_003])
def test_ties_over_many_blocks_go_to_the_lower_index(size, monkeypatch):
    monkeypatch.setattr(select, "BLOCK", 2048)
    tensor = torch.randint(-3, 4, (size,), generator=torch.Generator().manual_seed(4)).float()
    scheme = codec.TopK(k=64, chunk=1024, layout="flat", values="fp32")
    decoded = codec.decode(codec.encode(tensor, scheme), scheme, (size,))
    assert torch.equal(decoded, kept_by_hand(tensor, scheme))


def test_golden_u8():
    # Flat chunks of 4, 1 kept: -3 at index 1; 4 at index 0. bf16 of -3 is c040, of 4 is 4080, little-endian.
    scheme = codec.TopK(k=1, chunk=4, layout="flat", dense_below=0)
    encoded = codec.encode(torch.tensor([1.0, -3.0, 2.0, 0.5, 4.0, 0.0, 0.0, 0.0]), scheme)
    assert encoded == codec.Encoded(Form.U8, bytes.fromhex("40c0 8040"), bytes.fromhex("01 00"))


def test_golden_u16_in_tiles():
    # 4 x 4 in tiles of 2 x 2, 1 kept: tile (0,0) holds 0 1 4 5: 5 at 3; (0,1): 7 at 3; (1,0): 13 at 3; (1,1): 15.
    tensor = torch.arange(16.0).view(4, 4)
    scheme = codec.TopK(k=1, chunk=4, indices="u16", values="fp32", dense_below=0)
    encoded = codec.encode(tensor, scheme)
    assert encoded.form is Form.U16
    assert encoded.indices == bytes.fromhex("0300 0300 0300 0300")
    assert encoded.values == struct.pack("<4f", 5, 7, 13, 15)


def test_golden_gap8():
    # One chunk of 400, 3 kept at 0, 10 and 300: gaps 0, 9 and 289 = 255 + 34.
    tensor = torch.zeros(400)
    tensor[0], tensor[10], tensor[300] = 1.0, -2.0, 0.5
    scheme = codec.TopK(k=3, chunk=400, layout="flat", dense_below=0)
    encoded = codec.encode(tensor, scheme)
    assert encoded == codec.Encoded(Form.GAP8, bytes.fromhex("803f 00c0 003f"), bytes.fromhex("00 09 ff22"))


def test_golden_dense():
    encoded = codec.encode(torch.tensor([[1.0, -2.0], [0.0, 0.5]]), codec.TopK())  # below dense_below
    assert encoded == codec.Encoded(Form.DENSE, bytes.fromhex("803f 00c0 0000 003f"))


@pytest.mark.parametrize(
    ("chunk", "k", "where", "form"),
    [
        (256, 2, [0, 255], Form.U8),  # U8 2 bytes, GAP8 2 bytes: a tie, U8
        (400, 1, [300], Form.U16),  # GAP8 ff 2d: 2 bytes as well: a tie, U16
        (400, 2, [1, 2], Form.GAP8),  # 2 bytes against 4
        (400, 1, [399], Form.U16),
    ],
)
def test_auto_takes_the_shortest_form(chunk, k, where, form):
    tensor = torch.zeros(chunk)
    tensor[where] = 1.0
    scheme = codec.TopK(k=k, chunk=chunk, layout="flat", dense_below=0)
    assert codec.encode(tensor, scheme).form is form


@pytest.mark.parametrize("scheme", [codec.TopK(), codec.Dense(), codec.TopK(k=2, chunk=4, dense_below=0)])
def test_empty_tensors_travel_as_nothing(scheme):
    encoded = codec.encode(torch.empty(0, 5), scheme)
    assert encoded == codec.Encoded(Form.DENSE, b"")
    assert codec.decode(encoded, scheme, (0, 5)).shape == (0, 5)


def test_bytes_for_an_empty_tensor_are_malformed():
    with pytest.raises(MalformedTensor, match="no elements"):
        codec.decode(codec.Encoded(Form.DENSE, b"12"), codec.Dense(), (0, 5))


def test_scalar_comes_back_as_scalar():
    scheme = codec.TopK(dense_below=0)
    assert codec.decode(codec.encode(torch.tensor(2.5), scheme), scheme, ()).item() == 2.5
    assert codec.decode(codec.encode(torch.tensor(2.5), scheme), scheme, ()).shape == ()


@given(st.data(), schemes())
def test_damaged_bytes_decode_to_a_tensor_or_are_malformed(data, scheme):
    tensor = data.draw(tensors((6, 7)))
    encoded = codec.encode(tensor, scheme)
    fields = {}
    for name in ("values", "indices"):
        field = bytearray(getattr(encoded, name))
        if field and data.draw(st.booleans()):
            field[data.draw(st.integers(0, len(field) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            del field[data.draw(st.integers(len(field) - 1, len(field))) :]
        fields[name] = bytes(field)
    form = data.draw(st.sampled_from([encoded.form, *Form]))
    damaged = codec.Encoded(form, counts=data.draw(st.sampled_from([b"", b"\x01\x00"])), **fields)
    try:
        decoded = codec.decode(damaged, scheme, (6, 7))
    except MalformedTensor:
        return
    assert decoded.shape == (6, 7)
    assert torch.isfinite(decoded).all()
