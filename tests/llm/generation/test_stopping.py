"""Tests of ``remora_llm.generation.stopping``."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from remora_llm.generation.stopping import StopSearch

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that ends first (of several, the longest), by trying every end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def search(parts: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    searching = StopSearch(stops)
    shown = [searching.feed(part) for part in parts]
    if searching.matched is None:
        shown.append(searching.flush())
    return shown, searching.matched


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_the_result_is_that_of_the_whole_text_whatever_the_parts(parts: list[str], stops: list[str]) -> None:
    shown, matched = search(parts, stops)
    assert ("".join(shown), matched) == reference("".join(parts), stops)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_text_is_released_as_soon_as_no_stop_string_can_begin_in_it(parts: list[str], stops: list[str]) -> None:
    searching = StopSearch(stops)
    seen = released = ""
    for part in parts:
        seen += part
        released += searching.feed(part)
        if searching.matched is None:
            held = seen[len(released) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_everything_is_released_at_once() -> None:
    assert search(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_nothing_follows_a_match() -> None:
    searching = StopSearch(["\n\n"])
    assert [searching.feed(part) for part in ("one\n", "\ntwo", "three")] == ["one", "", ""]
    assert searching.flush() == ""


def test_twice_the_text_takes_about_twice_the_time() -> None:
    def spent(count: int) -> float:
        searching = StopSearch(["a" * 100 + "b"])
        begin = time.thread_time()
        for _ in range(count):
            searching.feed("a" * 50)
        return time.thread_time() - begin

    spent(100)
    shorts, longs = zip(*[(spent(400), spent(3200)) for _ in range(5)], strict=True)
    assert min(longs) < 8 * 3 * min(shorts)
