"""bfloat16 values as two planes of bytes, the upper byte of each value and the lower one.

The high bytes (sign and exponent) of activations repeat, zstd takes half of them away; the low
bytes are noise and stay plain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Plane = bytes | memoryview


def split(bits: NDArray[np.uint16]) -> tuple[memoryview, memoryview]:
    """The high and the low plane of values given as their bits, in row order.

    By arithmetic on whole values: copying every other byte takes ten times as long.
    """
    values = bits.reshape(-1)
    high, low = np.empty(values.size, np.uint8), np.empty(values.size, np.uint8)
    np.right_shift(values, 8, out=high, casting="unsafe")
    np.copyto(low, values, casting="unsafe")
    return high.data, low.data


def joined(high: Plane, low: Plane) -> NDArray[np.uint16]:
    """The bits of the values of two planes of one length, flat; one copy."""
    bits = np.multiply(np.frombuffer(high, np.uint8), 256, dtype=np.uint16)
    np.add(bits, np.frombuffer(low, np.uint8), out=bits)
    return bits


def all_finite(high: Plane, low: Plane) -> bool:
    """True if no value is infinite or NaN, that is, has all eight exponent bits set."""
    upper = np.frombuffer(high, np.uint8)
    # values below 2^127, and that is what towers give, need no look at the low bytes
    if upper.max(initial=0) < 0xFF and upper.view(np.int8).max(initial=0) < 0x7F:
        return True
    lower = np.frombuffer(low, np.uint8)
    return not bool(np.any(((upper & 0x7F) == 0x7F) & ((lower & 0x80) == 0x80)))
