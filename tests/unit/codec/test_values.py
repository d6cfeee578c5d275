"""bf16 and float32 values as bytes, against torch and against the bits by hand."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.codec import values
from gradwire.errors import MalformedTensor, NonFiniteGradient

finite_bf16 = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 3.39e38)


def bf16_bits(number: float) -> int:
    """Round to nearest even by integer arithmetic on the float32 bits."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@given(st.lists(finite_bf16, max_size=40))
def test_bf16_rounds_to_nearest_even(numbers):
    packed = values.pack(torch.tensor(numbers, dtype=torch.float32), "bf16", name="t")
    assert packed == b"".join(struct.pack("<H", bf16_bits(number)) for number in numbers)


@given(st.lists(finite_bf16, min_size=1, max_size=40))
def test_bf16_comes_back_as_torch_rounds_it(numbers):
    tensor = torch.tensor(numbers, dtype=torch.float32)
    back = values.unpack(values.pack(tensor, "bf16", name="t"), "bf16")
    assert back.dtype == torch.float32
    assert back.view(torch.int32).tolist() == tensor.bfloat16().float().view(torch.int32).tolist()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
def test_fp32_travels_bit_for_bit(numbers):
    packed = values.pack(torch.tensor(numbers, dtype=torch.float32), "fp32", name="t")
    assert packed == struct.pack(f"<{len(numbers)}f", *numbers)
    assert struct.pack(f"<{len(numbers)}f", *values.unpack(packed, "fp32").tolist()) == packed


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (1.0, 0x3F80),
        (-0.0, 0x8000),
        (1.00390625, 0x3F80),  # 1 + 2^-8 is halfway: to even, down
        (1.01171875, 0x3F82),  # 1 + 3 * 2^-8 is halfway: to even, up
        (2.0**-133, 0x0001),  # the smallest subnormal
        (2.0**-134, 0x0000),  # half of it: to even, zero
        (3.3895313892515355e38, 0x7F7F),  # the largest
    ],
)
def test_bf16_bits_of_known_numbers(number, bits):
    assert values.pack(torch.tensor([number]), "bf16", name="t") == struct.pack("<H", bits)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(3.4e38, "bf16"), (-3.4e38, "bf16"), (float("inf"), "fp32"), (float("nan"), "fp32"), (float("nan"), "bf16")],
)
def test_values_that_the_kind_cannot_hold_are_refused_by_name_and_number(number, kind):
    with pytest.raises(NonFiniteGradient, match=r"layer\.weight: 2 of 3 .* not finite"):
        values.pack(torch.tensor([number, 1.0, number]), kind, name="layer.weight")


def test_part_of_a_value_is_malformed():
    with pytest.raises(MalformedTensor, match="3 bytes"):
        values.unpack(b"abc", "bf16")


@pytest.mark.parametrize("data", [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x01\x00\xff\xff"])
def test_received_infinities_and_nans_are_malformed(data):
    with pytest.raises(MalformedTensor, match=r"1 of .* not finite"):
        values.check(data, b"", "bf16", np.array([len(data) // 2]))


def test_signs_start_on_a_byte_in_every_chunk_least_significant_bit_first():
    entries = torch.tensor([-1.0, 2.0, -3.0, 0.0, -0.0, -4.0, -5.0, 6.0, -7.0, -8.0, 9.0])
    signs, scales = values.pack_signs(entries, np.array([9, 2]), name="t")
    # 1 0 1 0 0 1 1 0 | 1 | 1 0 from the lowest bit on; zeros count as positive.
    assert signs == bytes([0b01100101, 0b1, 0b01])
    # Means 28/9 = 3.111 and 17/2 = 8.5: bf16 3.109375 is 0x4047, 8.5 is 0x4108.
    assert scales == bytes.fromhex("47400841")
    assert values.unpack_signs(signs, scales, np.array([9, 2])).tolist() == [
        -3.109375, 3.109375, -3.109375, 3.109375, 3.109375, -3.109375, -3.109375, 3.109375, -3.109375, -8.5, 8.5,
    ]  # fmt: skip


def test_a_scale_is_summed_in_float32_in_order():
    entries = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    _, scales = values.pack_signs(entries, np.array([4]), name="t")
    # Each 1 is lost against 2^24 in turn; exactly it would be (2^24 + 3) / 4, the same bf16 here, so look at more.
    assert scales == struct.pack("<H", 0x4A80)
    many = torch.cat([torch.tensor([2.0**24]), torch.ones(2**20)])
    _, scales = values.pack_signs(many, np.array([len(many)]), name="t")
    expected = torch.tensor(2.0**24 / len(many)).to(torch.bfloat16).view(torch.int16).item()
    assert scales == struct.pack("<h", expected)


@pytest.mark.parametrize("scale", [b"\x80\x7f", b"\xc0\x7f", b"\x80\x80", b"\x00\x80"])
def test_a_scale_that_is_negative_or_not_finite_is_malformed(scale):
    with pytest.raises(MalformedTensor, match="scale"):
        values.check(b"\x01", scale, "sign", np.array([3]))


def test_bits_after_the_last_sign_of_a_chunk_are_malformed():
    values.check(b"\xff\x07\x01", b"", "sign", np.array([11, 0, 1]))
    for data in (b"\xff\x08\x01", b"\xff\x07\x02"):
        with pytest.raises(MalformedTensor, match="spare bits"):
            values.check(data, b"", "sign", np.array([11, 0, 1]))


def test_a_mean_magnitude_that_overflows_is_refused_by_name():
    with pytest.raises(NonFiniteGradient, match="layer"):
        values.pack_signs(torch.full((4,), 3e38), np.array([4]), name="layer")
