"""What the names of a model's files and folders tell."""

from __future__ import annotations

import pytest

from remora.model_files import parse_version


@pytest.mark.parametrize(
    ("dirname", "version"),
    [
        ("1", 1),
        ("12", 12),
        ("0", 0),
        ("1abc", 1),
        (" 7", 7),
        ("+3", 3),
        ("01", None),
        ("00", None),
        ("abc", None),
        ("", None),
        ("-1", None),
        ("v1", None),
        ("\u0661", None),
        ("9223372036854775807", 9223372036854775807),
        ("9223372036854775808", None),
        ("9" * 10_000, None),
        ("warmup", None),
        ("initial_state", None),
        ("configs", None),
    ],
)
def test_a_version_is_the_number_in_front_of_a_directory_name(dirname: str, version: int | None) -> None:
    assert parse_version(dirname) == version
