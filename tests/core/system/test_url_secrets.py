"""Secrets of URLs, hidden."""

from __future__ import annotations

import pytest

from remora.system.url_secrets import hide_secrets, shown_place, without_secrets


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot use https://user:pw@h/x?a=SIG, so", "cannot use https://***@h/x?***, so"),
        ("'https://user:pw@h/x?a=SIG&b=c' is 'http://u:p:w@a'", "'https://***@h/x?***' is 'http://***@a'"),
        ("https://h/x?sig=SIG: nope", "https://h/x?***: nope"),
        ("no file htp:/user:pw@h/x", "no file htp:/***@h/x"),
        ("no https://TOKEN@h/x and http://:pw@h/y", "no https://***@h/x and http://***@h/y"),
        ("abfss://container@account/x http://h:80/x a@b: c?", "abfss://container@account/x http://h:80/x a@b: c?"),
    ],
)
def test_the_urls_in_a_text_lose_their_secrets(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("a@b?.csv", "a@b?.csv"),
        ("s3://b/x", "s3://b/x"),
        ("htp:/u:pw@h/x", "***@h/x"),
        ("s3://u:pw@b/x", "s3://***@b/x"),
    ],
)
def test_a_path_is_shown_as_it_is_and_a_url_without_secrets(place: str, shown: str) -> None:
    assert shown_place(place) == shown
