"""Sizes are read as they are written, and what is none is refused by name."""

import numpy as np
import pytest

from jaxkfac.memory import parse_bytes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1),
        (2**63 + 1, 2**63 + 1),  # no float has it
        (np.int64(7), 7),
        (80e9, 80_000_000_000),
        ("80e9", 80_000_000_000),
        ("80GB", 80_000_000_000),
        ("80 gb", 80_000_000_000),
        (" 80 Gb ", 80_000_000_000),
        ("74.5GiB", 79_993_765_888),
        ("74.5 gib", 79_993_765_888),
        ("1.5kB", 1500),
        ("1KiB", 1024),
        ("3MB", 3_000_000),
        ("3MiB", 3 * 2**20),
        ("2TB", 2 * 10**12),
        ("2tib", 2 * 2**40),
        ("12 bytes", 12),
        ("1_000", 1000),
        ("2.01GB", 2_010_000_000),  # in floating point one less
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_decimal_and_binary_units_in_any_case(size, nbytes):
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size",
    [
        "80XB",
        "80G",
        "GB",
        "",
        "80 GB GB",
        "1.2.3GB",
        "0GB",
        "-3GB",
        0,
        -1,
        0.5,
        "nan",
        True,
        "1e999999999",
    ]
    + [float("nan"), float("inf")],
)
def test_what_is_no_size_is_refused_with_what_is_accepted(size):
    with pytest.raises(ValueError, match=r'device_bytes=.*: expected .*80e9.*"80GB".*"74.5GiB"'):
        parse_bytes(size, name="device_bytes")
