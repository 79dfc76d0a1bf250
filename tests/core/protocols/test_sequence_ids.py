"""Texts that may name a sequence."""

import pytest

from remora.errors import UnsupportedError
from remora.protocols.sequence_ids import checked_id


@pytest.mark.parametrize("text", ["", "alpha", "x" * 128, "é" * 64, "\udcff" * 128])
def test_a_text_of_at_most_128_bytes_is_an_id(text: str) -> None:
    assert checked_id(text) == text


@pytest.mark.parametrize("text", ["x" * 129, "é" * 65, "\udcff" * 129])
def test_a_longer_text_is_refused_with_tritons_text(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^string correlation ID cannot be longer than 128 characters$"):
        checked_id(text)
