"""Secrets of URLs, hidden."""

from __future__ import annotations

import pytest

from remora.system.url_secrets import without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:1/a", "http://h:1/a"),
        ("http://u:p@h:1/a?b=c", "http://***@h:1/a?***"),
        ("http://u:p/q?r#s@h@i/a", "http://***@i/a"),
        ("u:p@h:1", "***@h:1"),
    ],
)
def test_user_and_query_are_hidden(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
