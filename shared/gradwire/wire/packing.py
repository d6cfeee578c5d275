"""Lossless packing of a part's bytes: byte planes of the values, each plane and each other field one zstd frame.

The exponents of neighbouring kept values are much alike and their mantissas are not, so the planes are packed apart.
Unpacking never allocates more than the size that the manifest allows: the size a frame claims is checked first.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from gradwire.errors import MalformedTensor

LEVEL = 3

# Compressors and decompressors are not safe to share between threads.
_local = threading.local()


def pack(data: bytes) -> bytes:
    """`data` as one zstd frame with its content size in the header."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    frame: bytes = _local.compressor.compress(data)
    return frame


def unpack(frame: bytes, *, at_most: int) -> bytes:
    """The content of one zstd frame. Raises MalformedTensor if it isn't one, or holds more than `at_most` bytes."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > at_most:  # also where the frame doesn't say: that is 2^64 - 1
            raise MalformedTensor(f"a packed field claims {size} bytes where at most {at_most} can be")
        if size == 0:
            raise MalformedTensor("a packed field is empty; what is empty travels as no bytes at all")
        data: bytes = _local.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedTensor(f"a packed field can't be unpacked: {error}") from error
    return data


def planes(values: bytes, width: int) -> list[bytes]:
    """The byte planes of `values`, `width` bytes a value, least significant first."""
    table = np.frombuffer(values, np.uint8).reshape(-1, width)
    return [table[:, plane].tobytes() for plane in range(width)]


def from_planes(parts: list[bytes]) -> bytes:
    """The values whose byte planes these are. All planes have the same length."""
    return np.stack([np.frombuffer(part, np.uint8) for part in parts], axis=1).tobytes()
