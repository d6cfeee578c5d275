"""A scheme that can't be carried out is refused when it is written down."""

import dataclasses

import pytest

from gradwire import codec
from gradwire.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"k": 0}, ["TopK.k", "0", "1 <= k <= 4096"]),
        ({"k": 65, "chunk": 64}, ["TopK.k", "65", "1 <= k <= 64"]),
        ({"k": True}, ["TopK.k", "True", "integer"]),
        ({"k": 1.5}, ["TopK.k", "1.5", "integer"]),
        ({"chunk": 32769, "layout": "flat"}, ["TopK.chunk", "32769", "32768"]),
        ({"chunk": 0}, ["TopK.chunk", "0"]),
        ({"chunk": 128}, ["TopK.chunk", "128", "perfect squares", "flat"]),
        ({"layout": "rows"}, ["TopK.layout", "rows", "tiles", "flat"]),
        ({"values": "fp16"}, ["TopK.values", "fp16", "bf16", "fp32"]),
        ({"transform": "dct", "layout": "flat"}, ["TopK.transform", "dct", "tiles", "flat"]),
        ({"update": "signs"}, ["TopK.update", "signs", "coefficients", "sign"]),
        ({"update": "sign"}, ["TopK.update", "sign", "dct"]),
        ({"clip": "mean"}, ["TopK.clip", "mean", "median", "None"]),
        ({"transform": "fft"}, ["TopK.transform", "fft", "None"]),
        ({"indices": "u32"}, ["TopK.indices", "u32", "gap8"]),
        ({"indices": "u8"}, ["TopK.indices", "u8", "256", "4096"]),
        ({"dense_below": -1}, ["TopK.dense_below", "-1", ">= 0"]),
        ({"normalization": "workers"}, ["TopK.normalization", "workers", "senders"]),
    ],
)
def test_impossible_scheme_is_refused_with_field_value_and_what_is_allowed(fields, words):
    with pytest.raises(ConfigError) as caught:
        codec.TopK(**fields)
    for word in words:
        assert word in str(caught.value)


def test_dense_with_unknown_values_is_refused():
    with pytest.raises(ConfigError, match=r"Dense\.values = 'int8'"):
        codec.Dense(values="int8")
    with pytest.raises(ConfigError, match=r"Dense\.values = 'sign'"):
        codec.Dense(values="sign")


def test_schemes_are_values_that_hash_and_do_not_change():
    assert hash(codec.TopK(k=8)) == hash(codec.TopK(k=8))
    assert codec.TopK(k=8) != codec.TopK(k=9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.TopK().k = 3


def test_nbytes_is_the_length_of_all_four_fields():
    assert codec.Encoded(codec.Form.GAP8, b"1234", b"12", b"1", b"123").nbytes == 10
