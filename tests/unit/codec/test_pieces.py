"""Encoded tensors cut at chunk borders and joined again; nothing that doesn't fit is let through."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import codec
from gradwire.codec import Form, Joiner, Piece, indices
from gradwire.errors import ConfigError, MalformedTensor


def flat(k, chunk, **more):
    return codec.TopK(k=k, chunk=chunk, layout="flat", dense_below=0, **more)


SCHEME = flat(2, 10)  # 25 elements: chunks of 10, 10 and 5, keeping 2, 2 and 1
SHAPE = (25,)
SIGNS = flat(9, 10, values="sign")  # of the same chunks it keeps 9, 9 and 5
UPDATED = codec.TopK(k=2, chunk=9, transform="dct", update="sign", dense_below=0)  # 3 x 9 elements: 3 tiles of 3 x 3


@st.composite
def encoded_tensors(draw):
    """(encoded, scheme, shape, aggregate)"""
    shape = draw(st.sampled_from([(40,), (8, 12), (3, 5, 4), (17,), (16, 16), (0, 2), ()]))
    chunk = draw(st.sampled_from([4, 16, 64, 256, 576]))
    top_k = {
        "k": st.integers(1, chunk),
        "chunk": st.just(chunk),
        "values": st.sampled_from(["bf16", "fp32", "sign"]),
        "dense_below": st.sampled_from([0, 0, 100]),
    }
    scheme = draw(
        st.one_of(
            st.builds(codec.Dense, values=st.sampled_from(["bf16", "fp32"])),
            st.builds(codec.TopK, layout=st.sampled_from(["tiles", "flat"]), **top_k),
            st.builds(codec.TopK, transform=st.just("dct"), update=st.sampled_from(["coefficients", "sign"]), **top_k),
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensors = [torch.randn(shape, generator=generator) for _ in range(3)]
    if draw(st.booleans()):
        for tensor in tensors:
            tensor.view(-1)[: math.prod(shape) // 2] = 0.0  # chunks without an update
    encoded = [codec.encode(tensor, scheme) for tensor in tensors]
    if draw(st.booleans()):
        mean = codec.average(encoded, [1, 2, 3], scheme=scheme, shape=shape)
        return mean, scheme, shape, True
    return encoded[0], scheme, shape, False


@given(encoded_tensors(), st.integers(1, 600), st.sampled_from([1, 40, 1 << 20]))
def test_pieces_join_to_what_was_cut(data, limit, block):
    encoded, scheme, shape, aggregate = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "BLOCK", block)
        pieces = list(codec.cut(encoded, scheme=scheme, shape=shape, limit_bytes=limit))
        joiner = Joiner(scheme, shape, aggregate)
        for piece in pieces:
            joiner.add(piece)
        assert joiner.finish() == encoded
    assert all(piece.nbytes <= limit or piece.count == 1 for piece in pieces)
    assert sum(piece.nbytes for piece in pieces) == encoded.nbytes
    for piece in pieces:
        limits = codec.bounds(
            scheme,
            shape,
            form=piece.form,
            first=piece.first,
            count=piece.count,
            aggregate=aggregate,
            counts=piece.counts,
        )
        assert len(piece.values) == limits.values_bytes
        assert len(piece.scales) == limits.scales_bytes
        assert len(piece.indices) <= limits.indices_bytes


@given(encoded_tensors())
def test_tensor_that_fits_is_one_piece_and_an_empty_one_none(data):
    encoded, scheme, shape, _ = data
    pieces = list(codec.cut(encoded, scheme=scheme, shape=shape, limit_bytes=max(1, encoded.nbytes)))
    assert len(pieces) == (1 if math.prod(shape) else 0)
    if pieces:
        whole = encoded.form is Form.DENSE
        units = math.prod(shape) if whole else codec.layout_of(scheme, shape).chunks
        assert (pieces[0].first, pieces[0].count) == (0, units)


@given(encoded_tensors(), st.integers(40, 400))
def test_pieces_are_as_long_as_the_limit_allows(data, limit):
    encoded, scheme, shape, _ = data
    pieces = list(codec.cut(encoded, scheme=scheme, shape=shape, limit_bytes=limit))
    singles = list(codec.cut(encoded, scheme=scheme, shape=shape, limit_bytes=1))
    assert all(single.count == 1 for single in singles)
    for piece, after in itertools.pairwise(pieces):
        assert piece.nbytes + singles[after.first].nbytes > limit


def test_pieces_by_hand():
    tensor = torch.zeros(25)
    tensor[[1, 4, 10, 19, 22]] = torch.tensor([1.0, -1.0, 2.0, -2.0, 4.0])
    encoded = codec.encode(tensor, SCHEME)
    pieces = list(codec.cut(encoded, scheme=SCHEME, shape=SHAPE, limit_bytes=12))
    assert pieces == [
        Piece(Form.U8, 0, 2, bytes.fromhex("803f 80bf 0040 00c0"), indices=bytes([1, 4, 0, 9])),
        Piece(Form.U8, 2, 1, bytes.fromhex("8040"), indices=bytes([2])),
    ]


def test_signs_are_cut_with_their_scales():
    tensor = torch.zeros(25)
    tensor[[1, 4, 5, 10, 11, 19, 20, 22]] = torch.tensor([1.0, -1.0, 1.0, 2.0, 2.0, -5.0, -1.0, 4.0])
    scheme = flat(3, 10, values="sign")  # keeps 3, 3 and 2
    encoded = codec.encode(tensor, scheme)
    pieces = list(codec.cut(encoded, scheme=scheme, shape=SHAPE, limit_bytes=12))
    assert pieces == [
        Piece(Form.U8, 0, 2, bytes([0b010, 0b100]), bytes.fromhex("803f 4040"), indices=bytes([1, 4, 5, 0, 1, 9])),
        Piece(Form.U8, 2, 1, bytes([0b01]), bytes.fromhex("2040"), indices=bytes([0, 2])),
    ]
    for limit, counts in ((17, [3]), (16, [2, 1]), (11, [1, 2]), (10, [1, 1, 1])):
        cut = codec.cut(encoded, scheme=scheme, shape=SHAPE, limit_bytes=limit)
        assert [piece.count for piece in cut] == counts


def test_an_update_is_cut_with_its_counts():
    encoded = codec.Encoded(Form.SIGN, bytes([0xFF, 1, 7, 0]), counts=bytes([9, 0, 0, 0, 9, 0]))
    pieces = list(codec.cut(encoded, scheme=UPDATED, shape=(3, 9), limit_bytes=6))
    assert pieces == [
        Piece(Form.SIGN, 0, 2, bytes([0xFF, 1]), counts=bytes([9, 0, 0, 0])),
        Piece(Form.SIGN, 2, 1, bytes([7, 0]), counts=bytes([9, 0])),
    ]


def test_an_update_of_nothing_is_counts_alone():
    encoded = codec.average([codec.encode(torch.zeros(3, 9), UPDATED)], [1], scheme=UPDATED, shape=(3, 9))
    assert encoded == codec.Encoded(Form.SIGN, b"", counts=bytes(6))
    assert list(codec.cut(encoded, scheme=UPDATED, shape=(3, 9), limit_bytes=4)) == [
        Piece(Form.SIGN, 0, 2, b"", counts=bytes(4)),
        Piece(Form.SIGN, 2, 1, b"", counts=bytes(2)),
    ]


def test_dense_pieces_are_counted_in_elements():
    encoded = codec.encode(torch.arange(5.0), codec.Dense("fp32"))
    pieces = list(codec.cut(encoded, scheme=codec.Dense("fp32"), shape=(5,), limit_bytes=11))
    assert [(piece.first, piece.count) for piece in pieces] == [(0, 2), (2, 2), (4, 1)]


def test_cutting_to_nothing_is_refused():
    with pytest.raises(ConfigError, match="limit_bytes = 0"):
        codec.cut(codec.Encoded(Form.DENSE, b""), scheme=codec.Dense(), shape=(0,), limit_bytes=0)


def test_cutting_what_is_not_of_the_shape_is_malformed():
    with pytest.raises(MalformedTensor, match="bytes of values"):
        codec.cut(codec.Encoded(Form.DENSE, bytes(6)), scheme=codec.Dense(), shape=(4,), limit_bytes=9)


ONE = bytes.fromhex("803f")
FIRST = Piece(Form.U8, 0, 2, ONE * 4, indices=bytes([0, 1, 0, 1]))
FIRST_SIGNS = Piece(
    Form.U8, 0, 2, bytes([0xFF, 1, 7, 0]), bytes.fromhex("803f 0040"), indices=bytes([*range(9), *range(1, 10)])
)
LAST_SIGNS = Piece(Form.U8, 2, 1, bytes([0x1F]), bytes(2), indices=bytes(range(5)))
UPDATE = Piece(Form.SIGN, 0, 3, bytes([0xFF, 1, 7, 0]), counts=bytes([9, 0, 0, 0, 9, 0]))
UNION = Piece(Form.GAP8, 0, 3, ONE * 6, counts=bytes([3, 0, 2, 0, 1, 0]), indices=bytes([0, 0, 0, 1, 1, 4]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": Form.DENSE}, "form DENSE in a contribution: allowed here is U8, U16, GAP8"),
        ({"form": Form.BITMAP}, "form BITMAP"),
        ({"form": Form.SIGN}, "form SIGN in a contribution: allowed here is U8, U16, GAP8"),
        ({"form": 9}, "form 9"),
        ({"first": 1}, "begins at 1; the next one begins at 0"),
        ({"count": 0}, "of a tensor that has 3 chunks"),
        ({"count": 4}, "chunks 0 to 3 of a tensor that has 3 chunks"),
        ({"count": 2**62}, "of a tensor that has 3 chunks"),
        ({"count": 3}, "8 bytes of values; there should be 10"),
        ({"values": ONE * 3}, "6 bytes of values; there should be 8"),
        ({"values": ONE * 3 + b"\x80\x7f"}, "1 of 4 values are not finite"),
        ({"indices": bytes([0, 1, 0])}, "end early, in chunk 1"),
        ({"indices": bytes(5)}, "5 bytes of indices; there can be 4 at most"),
        ({"indices": bytes([0, 1, 1, 1])}, "chunk 1 don't ascend"),
        ({"indices": bytes([0, 10, 0, 1])}, "index 10 of chunk 0 is out of range"),
        ({"counts": bytes([2, 0, 2, 0])}, "contribution with counts"),
        ({"scales": b"\0\0"}, "2 bytes of scales"),
    ],
)
def test_malformed_contribution_piece_is_refused_and_changes_nothing(change, words):
    joiner = Joiner(SCHEME, SHAPE, aggregate=False)
    with pytest.raises(MalformedTensor) as caught:
        joiner.add(dataclasses.replace(FIRST, **change))
    assert words in str(caught.value)
    joiner.add(FIRST)
    joiner.add(Piece(Form.U8, 2, 1, ONE, indices=bytes([4])))
    assert joiner.finish() == codec.Encoded(Form.U8, ONE * 5, bytes([0, 1, 0, 1, 4]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": Form.SIGN}, "form SIGN in a contribution: allowed here is U8, U16, GAP8"),
        ({"form": Form.U16}, "the indices end early, in chunk 1"),
        ({"scales": b""}, "0 bytes of scales; there should be 4"),
        ({"scales": bytes(2)}, "2 bytes of scales; there should be 4"),
        ({"scales": bytes(3)}, "3 bytes of scales; there should be 4"),
        ({"scales": bytes(6)}, "6 bytes of scales; there should be 4"),
        ({"scales": bytes.fromhex("803f 00c0")}, "a scale is negative or not finite"),
        ({"scales": bytes.fromhex("0080 0040")}, "a scale is negative or not finite"),
        ({"scales": bytes.fromhex("807f 0040")}, "a scale is negative or not finite"),
        ({"scales": bytes.fromhex("803f c07f")}, "a scale is negative or not finite"),
        ({"scales": bytes.fromhex("803f ffff")}, "a scale is negative or not finite"),
        ({"values": bytes([0xFF, 3, 7, 0])}, "spare bits are set after the signs of a chunk"),
        ({"values": bytes([0xFF, 1, 7, 0x80])}, "spare bits are set after the signs of a chunk"),
        ({"values": bytes([0xFF, 1, 7])}, "3 bytes of values; there should be 4"),
        ({"values": bytes(36)}, "36 bytes of values; there should be 4"),
        ({"count": 3}, "4 bytes of values; there should be 5"),
        ({"counts": bytes([9, 0, 9, 0])}, "contribution with counts"),
        ({"indices": bytes([*range(9), *range(2, 11)])}, "index 10 of chunk 1 is out of range"),
    ],
)
def test_malformed_piece_of_signs_is_refused_and_changes_nothing(change, words):
    joiner = Joiner(SIGNS, SHAPE, aggregate=False)
    with pytest.raises(MalformedTensor) as caught:
        joiner.add(dataclasses.replace(FIRST_SIGNS, **change))
    assert words in str(caught.value)
    joiner.add(FIRST_SIGNS)
    with pytest.raises(MalformedTensor, match="0 bytes of scales"):
        joiner.add(dataclasses.replace(LAST_SIGNS, scales=b""))
    joiner.add(LAST_SIGNS)
    joined = joiner.finish()
    assert (joined.values, joined.scales) == (bytes([0xFF, 1, 7, 0, 0x1F]), bytes.fromhex("803f 0040 0000"))
    assert joined.indices == bytes([*range(9), *range(1, 10), *range(5)])
    assert not joined.counts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": Form.BITMAP}, "form BITMAP in an aggregate: allowed here is SIGN"),
        ({"form": Form.GAP8}, "form GAP8 in an aggregate: allowed here is SIGN"),
        ({"form": Form.DENSE}, "form DENSE in an aggregate: allowed here is SIGN"),
        ({"form": Form.U8}, "form U8 in an aggregate: allowed here is SIGN"),
        ({"counts": b""}, "0 bytes of counts for 3 chunks"),
        ({"counts": bytes([9, 0, 0, 0, 9])}, "5 bytes of counts for 3 chunks"),
        ({"counts": bytes([8, 0, 0, 0, 9, 0])}, "chunk 0 with a count of 8: possible are 0 or 9 (its length)"),
        ({"counts": bytes([9, 0, 2, 0, 9, 0])}, "chunk 1 with a count of 2: possible are 0 or 9 (its length)"),
        ({"counts": bytes([9, 0, 0, 0, 10, 0])}, "chunk 2 with a count of 10: possible are 0 or 9"),
        ({"counts": bytes([9, 0, 0, 0, 0xFF, 0xFF])}, "chunk 2 with a count of 65535"),
        ({"counts": bytes([9, 0, 9, 0, 9, 0])}, "4 bytes of values; there should be 6"),
        ({"counts": bytes(6)}, "4 bytes of values; there should be 0"),
        ({"values": bytes([0xFF, 1, 7])}, "3 bytes of values; there should be 4"),
        ({"values": bytes([0xFF, 3, 7, 0])}, "spare bits are set after the signs of a chunk"),
        ({"values": bytes([0xFF, 1, 7, 0x10])}, "spare bits are set after the signs of a chunk"),
        ({"scales": bytes(6)}, "6 bytes of scales; there should be 0"),
        ({"indices": b"\x00"}, "1 bytes of indices; there can be 0 at most"),
        ({"count": 4}, "chunks 0 to 3 of a tensor that has 3 chunks"),
    ],
)
def test_malformed_update_is_refused_and_changes_nothing(change, words):
    joiner = Joiner(UPDATED, (3, 9), aggregate=True)
    with pytest.raises(MalformedTensor) as caught:
        joiner.add(dataclasses.replace(UPDATE, **change))
    assert words in str(caught.value)
    joiner.add(UPDATE)
    assert joiner.finish() == codec.Encoded(Form.SIGN, UPDATE.values, counts=UPDATE.counts)


def test_update_of_a_small_tensor_has_to_be_dense():
    scheme = codec.TopK(k=2, chunk=9, transform="dct", update="sign", dense_below=28)
    with pytest.raises(MalformedTensor, match="form SIGN in an aggregate: allowed here is DENSE"):
        Joiner(scheme, (3, 9), aggregate=True).add(UPDATE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": Form.U8}, "form U8 in an aggregate: allowed here is GAP8, BITMAP, DENSE"),
        ({"form": Form.SIGN}, "form SIGN in an aggregate: allowed here is GAP8, BITMAP, DENSE"),
        ({"form": Form.DENSE}, "dense tensor with counts"),
        ({"scales": bytes(6)}, "6 bytes of scales; there should be 0"),
        ({"counts": b""}, "0 bytes of counts for 3 chunks"),
        ({"counts": bytes([3, 0, 2, 0, 1])}, "5 bytes of counts for 3 chunks"),
        ({"counts": bytes([3, 0, 1, 0, 2, 0])}, "chunk 1 with a count of 1: possible are 2"),
        ({"counts": bytes([3, 0, 2, 0, 6, 0])}, "chunk 2 with a count of 6: possible are 1 (sent by one worker) to 5"),
        ({"counts": bytes([0xFF, 0xFF, 2, 0, 1, 0])}, "chunk 0 with a count of 65535"),
        ({"counts": bytes([2, 0, 2, 0, 1, 0])}, "12 bytes of values; there should be 10"),
        ({"indices": bytes([0, 0, 0, 1, 1, 5])}, "index 5 of chunk 2 is out of range"),
    ],
)
@pytest.mark.parametrize("scheme", [SCHEME, flat(2, 10, values="sign")], ids=["bf16", "sign"])
def test_malformed_aggregate_piece_is_refused(change, words, scheme):
    joiner = Joiner(scheme, SHAPE, aggregate=True)
    with pytest.raises(MalformedTensor) as caught:
        joiner.add(dataclasses.replace(UNION, **change))
    assert words in str(caught.value)
    joiner.add(UNION)
    assert joiner.finish().counts == UNION.counts


def test_form_off_the_wire_may_be_a_plain_number():
    joiner = Joiner(SCHEME, SHAPE, aggregate=True)
    joiner.add(dataclasses.replace(UNION, form=4))
    assert joiner.finish().form is Form.GAP8


def test_form_does_not_change_within_a_tensor():
    joiner = Joiner(SCHEME, SHAPE, aggregate=False)
    joiner.add(FIRST)
    with pytest.raises(MalformedTensor, match="form GAP8 of a tensor that began in form U8"):
        joiner.add(Piece(Form.GAP8, 2, 1, ONE, indices=bytes([4])))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_piece_that_repeats_or_leaves_a_gap_is_refused(first):
    joiner = Joiner(SCHEME, SHAPE, aggregate=False)
    joiner.add(FIRST)
    with pytest.raises(MalformedTensor, match=f"begins at {first}; the next one begins at 2"):
        joiner.add(Piece(Form.U8, first, 1, ONE, indices=bytes([4])))


def test_missing_pieces_are_told_at_the_end():
    joiner = Joiner(SCHEME, SHAPE, aggregate=False)
    joiner.add(FIRST)
    with pytest.raises(MalformedTensor, match="after 2 of 3 chunks"):
        joiner.finish()


def test_small_tensor_has_to_be_dense():
    joiner = Joiner(codec.TopK(), (100,), aggregate=False)
    with pytest.raises(MalformedTensor, match="form GAP8 in a contribution: allowed here is DENSE"):
        joiner.add(Piece(Form.GAP8, 0, 1, ONE * 2, indices=b"\0\0"))


def test_fixed_index_form_admits_no_other():
    joiner = Joiner(flat(2, 10, indices="u16"), SHAPE, aggregate=False)
    with pytest.raises(MalformedTensor, match="allowed here is U16"):
        joiner.add(FIRST)


def test_empty_tensor_takes_no_piece():
    joiner = Joiner(codec.Dense(), (0, 3), aggregate=False)
    with pytest.raises(MalformedTensor, match="a tensor that has 0 elements"):
        joiner.add(Piece(Form.DENSE, 0, 1, ONE))
    assert joiner.finish() == codec.Encoded(Form.DENSE, b"")


@pytest.mark.parametrize(
    ("form", "values_bytes", "indices_bytes"),
    [(Form.U16, 10, 10), (Form.GAP8, 10, 5 + 0)],
)
def test_bounds_by_hand(form, values_bytes, indices_bytes):
    found = codec.bounds(SCHEME, SHAPE, form=form, first=0, count=3, aggregate=False)
    assert found == codec.Bounds(values_bytes, indices_bytes)


def test_bounds_of_signs_by_hand():
    found = codec.bounds(SIGNS, SHAPE, form=Form.U8, first=1, count=2, aggregate=False)
    assert found == codec.Bounds(2 + 1, 9 + 5, 4)
    counts = bytes([0, 0, 9, 0])
    found = codec.bounds(UPDATED, (3, 9), form=Form.SIGN, first=1, count=2, aggregate=True, counts=counts)
    assert found == codec.Bounds(2, 0, 0)


def test_gap8_bound_counts_the_longest_gaps():
    # 2 of 1000: at most 2 + floor(998 / 255) = 5 bytes, reached by 0 and 999: 00 ff ff ff e9.
    scheme = flat(2, 1000)
    assert codec.bounds(scheme, (1000,), form=Form.GAP8, first=0, count=1, aggregate=False).indices_bytes == 5


def test_bitmap_bound_is_whole_bytes_per_chunk():
    found = codec.bounds(SCHEME, SHAPE, form=Form.BITMAP, first=1, count=2, aggregate=True, counts=bytes([9, 0, 5, 0]))
    assert found == codec.Bounds(28, 3)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (2**63, 1), (0, 2**63), (3, 1), (1, 0)])
def test_range_outside_the_tensor_is_refused_before_anything_is_allocated(first, count):
    for form, scheme in ((Form.U8, SCHEME), (Form.DENSE, codec.Dense())):
        shape = SHAPE if form is Form.U8 else (3,)
        with pytest.raises(MalformedTensor, match="of a tensor that has 3"):
            codec.bounds(scheme, shape, form=form, first=first, count=count, aggregate=False)


@given(encoded_tensors(), st.integers(20, 300), st.data())
def test_damaged_pieces_are_malformed_or_join_to_a_valid_tensor(data, limit, draw):
    encoded, scheme, shape, aggregate = data
    joiner = Joiner(scheme, shape, aggregate)
    try:
        for piece in codec.cut(encoded, scheme=scheme, shape=shape, limit_bytes=limit):
            fields = ["values", "scales", "counts", "indices"]
            name = draw.draw(st.sampled_from([*fields, "first", "count", "form", "none"]))
            if name in fields and getattr(piece, name):
                field = bytearray(getattr(piece, name))
                field[draw.draw(st.integers(0, len(field) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
                del field[draw.draw(st.integers(max(0, len(field) - 2), len(field))) :]
                piece = dataclasses.replace(piece, **{name: bytes(field)})
            elif name in ("first", "count"):
                piece = dataclasses.replace(piece, **{name: draw.draw(st.integers(0, 2**64 - 1))})
            elif name == "form":
                piece = dataclasses.replace(piece, form=draw.draw(st.sampled_from(Form)))
            joiner.add(piece)
        joined = joiner.finish()
    except MalformedTensor:
        return
    assert torch.isfinite(codec.decode(joined, scheme, shape)).all()
