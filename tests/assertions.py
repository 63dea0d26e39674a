"""Comparisons that say how far off a value is, in bits."""

from typing import Any

import numpy as np

_INTEGER = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def assert_same_bits(actual: Any, expected: Any, what: str = "") -> None:
    """Every bit the same, and the type: the sign of a zero and the payload of a NaN count too."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    differ = _bits(actual) != _bits(expected)
    if differ.any():
        raise AssertionError(_worst(actual, expected, np.where(differ, 1, 0), what, "bits differ"))


def assert_ulps(actual: Any, expected: Any, dtype: Any, ulps: int, what: str = "") -> None:
    """At most `ulps` representable values of `dtype` apart; NaN only where NaN is expected.

    Zeros of either sign are one value, so the smallest numbers of either sign are 2 apart.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == np.dtype(dtype), f"{what}: {actual.dtype}, expected {np.dtype(dtype)}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    expected = expected.astype(dtype)
    distance = ulps_between(actual, expected)
    if (distance > ulps).any():
        distance = np.where(distance > ulps, distance, 0)
        raise AssertionError(_worst(actual, expected, distance, what, f"more than {ulps} ulps off"))


def ulps_between(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How many representable values apart, int64; NaN to NaN is 0, NaN to a number the most."""
    distance = np.abs(_order(actual) - _order(expected))
    nan, expected_nan = np.isnan(actual), np.isnan(expected)
    distance = np.where(nan & expected_nan, 0, distance)
    return np.where(nan != expected_nan, np.iinfo(np.int64).max, distance)


def assert_same_bits_on_every_device(actual: Any, expected: Any, what: str = "") -> None:
    """Every device's copy equals its part of `expected`, bit for bit.

    Reading a sharded array looks at one copy of each part only, and would miss copies that drifted.
    """
    expected = np.asarray(expected)
    for shard in actual.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index], f"{what} on {shard.device}")


def _bits(x: np.ndarray) -> np.ndarray:
    return np.atleast_1d(x).view(_INTEGER[x.dtype.itemsize])


def _order(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the numbers, one apart for neighbours."""
    bits = _bits(x).astype(np.int64).reshape(x.shape)
    lowest = np.int64(-(2 ** (8 * x.dtype.itemsize - 1)))
    return np.where(bits < 0, lowest - bits, bits)


def _worst(
    actual: np.ndarray, expected: np.ndarray, distance: np.ndarray, what: str, problem: str
) -> str:
    flat = int(np.argmax(distance))
    index = tuple(int(i) for i in np.unravel_index(flat, actual.shape)) if actual.ndim else ()
    return (
        f"{what}: {problem} in {np.count_nonzero(distance)} of {actual.size} values; "
        f"at {index} got {actual[index]!r}, expected {expected[index]!r}"
    )
