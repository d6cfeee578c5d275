"""bf16 and float32 values as bytes, against torch and against the bits by hand."""

import struct

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
        values.check_finite(data, "bf16")
