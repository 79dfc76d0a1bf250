"""Users, passwords and queries of URLs, which logs, errors and answers must not show."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?:(?<=://)|^(?!.*://)).*(?=@)|(?<=\?).+", re.DOTALL)
"""User with password, which lasts to the last "@", and query."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Beginning of a URL, also where a path has dropped its second slash."""
_IN_TEXT = re.compile(
    r"((?<=http):/{1,2}|(?<=https):/{1,2})(?!\*\*\*@)[^\s/@'\"]+(?=@)"
    r"|(:/{1,2})[^\s/@'\"]*:[^\s@'\"]*(?=@)"
    r"|(:/{1,2}[^\s?'\"]+\?)[^\s'\":,]+"
)
"""User with password, and query, of a URL amid other text; of a web URL also a user alone, which may be a token."""


def without_secrets(url: str) -> str:
    """Return a URL with asterisks in the places of user with password, and of the query."""
    return _SECRET.sub("***", url)


def begins_as_url(place: str) -> bool:
    """Return True if a text begins as a URL, also one whose second slash a path has dropped."""
    return _SCHEME.match(place) is not None


def shown_place(place: str) -> str:
    """Return a path or a name as it is, and a URL without secrets.

    Every text that repeats what may be either uses it.
    """
    return without_secrets(place) if begins_as_url(place) else place


def hide_secrets(text: str) -> str:
    """Return a text, such as an error, with asterisks for the secrets of its URLs."""
    return _IN_TEXT.sub(_hidden, _IN_TEXT.sub(_hidden, text))  # twice: the user first, then the query of the same URL


def _hidden(found: re.Match[str]) -> str:
    return f"{found[1] or found[2] or found[3]}***"
