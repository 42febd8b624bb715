"""Expert ids of more than a byte as planes: all low bytes, then the remaining bits, one plane each.

The layout is that of docs/trace-format.md. Both directions are bound by memory, not by arithmetic: an id is two bytes
in a trace, and each pass over a block costs about as much as any other.
"""

from __future__ import annotations

import numpy as np

ID_GROUP = 64  # ids are padded to a multiple of this, so that every plane is a whole number of 64-bit words
_BIT_8_OF_EIGHT_IDS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint16(256)


def smallest_id_bits(num_ids: int) -> int:
    """Return the bits of an id on the wire, at least 8."""
    return max(8, (num_ids - 1).bit_length())


def pack_ids(ids: np.ndarray, id_bits: int, out: np.ndarray) -> None:
    """Pack ids (n,) uint16, all below 2**id_bits, into out (n / 8 * id_bits,) uint8; n is a multiple of `ID_GROUP`."""
    np.copyto(out[: len(ids)], ids, casting="unsafe")  # keeps the low byte
    planes = out[len(ids) :].reshape(id_bits - 8, -1)
    for bit in range(id_bits - 1, 7, -1):  # from the top, where a comparison finds the bit
        planes[bit - 8] = np.packbits(ids >= (1 << bit), bitorder="little")
        if bit > 8:
            ids = ids & ((1 << bit) - 1)


def unpack_ids(block: np.ndarray, id_bits: int, out: np.ndarray) -> None:
    """Invert `pack_ids`, into out (n,) uint16."""
    eights = out.reshape(-1, 8)
    planes = block[len(out) :].reshape(id_bits - 8, -1)
    np.take(_BIT_8_OF_EIGHT_IDS, planes[0], axis=0, out=eights, mode="clip")  # "clip": "raise" would buffer
    for more, plane in enumerate(planes[1:], 1):
        eights |= np.take(_BIT_8_OF_EIGHT_IDS << more, plane, axis=0)
    out |= block[: len(out)]
