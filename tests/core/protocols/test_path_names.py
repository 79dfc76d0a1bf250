"""Names in paths: what is decoded, and that no name becomes another path."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.path_names import decode_name
from remora.protocols.rest.routes import typed_route
from remora_llm.openai.routes import find_route


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        ("scale", "scale"),
        ("sc%61le", "scale"),
        ("a%20b", "a b"),
        ("a+b", "a+b"),
        ("%C3%A4", "ä"),
        ("a%3Fb%23c", "a?b#c"),
        ("..", ".."),
        ("%2e%2e", ".."),
        ("a%252Fb", "a%2Fb"),  # decoded once
        ("a%2Fb", None),
        ("a%2fb", None),
        ("a/b", None),
        ("a%00", None),
        ("a%0d%0a", None),
        ("%ff", None),
        ("%c0%af", None),  # a slash in an overlong form
        ("%ed%a0%80", None),  # a lone surrogate
        ("a%", None),
        ("a%4", None),
        ("a%zz", None),
    ],
)
def test_a_segment_is_decoded_once_and_is_a_name_or_nothing(segment: str, name: str | None) -> None:
    assert decode_name(segment) == name
    typed, managed = typed_route(f"/models/{segment}"), find_route(f"/v1/models/{segment}/load")
    assert (typed.model if typed is not None else None) == name
    assert (managed.model if managed is not None and managed.action == "load" else None) == name
    versioned = typed_route(f"/models/{segment}/versions/3")
    assert (None if versioned is None else (versioned.model, versioned.version)) == (name and (name, 3))
    shown = find_route(f"/v1/models/{segment}")
    assert shown is not None
    wanted = "a/b" if segment.lower() == "a%2fb" else segment  # looked up, as names of adapters are
    assert (shown.action, shown.model) == ("model", wanted if name is None else name)


@pytest.mark.parametrize("path", ["/v1/models/models/m/unload", "/v1/models/a%2Fmodels%2Fm/unload", "/v1/models//load"])
def test_a_name_with_a_slash_manages_no_model(path: str) -> None:
    where = find_route(path)
    assert where is None or where.method == "GET"


@given(st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable() and "/" not in text))
def test_any_name_comes_through_a_path(name: str) -> None:
    typed = typed_route(f"/models/{quote(name, safe='')}")
    assert typed is not None
    assert typed.model == name


@given(st.binary(min_size=1, max_size=20))
def test_any_bytes_are_a_name_without_a_slash_or_nothing(content: bytes) -> None:
    name = decode_name("".join(f"%{byte:02X}" for byte in content))
    assert name is None or (name.encode() == content and "/" not in name and "\0" not in name)
