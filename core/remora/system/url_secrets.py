"""Users, passwords and queries of URLs, which logs, errors and answers must not show."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?:(?<=://)|^(?!.*://)).*(?=@)|(?<=\?).+", re.DOTALL)
"""User with password, which lasts to the last "@", and query."""


def without_secrets(url: str) -> str:
    """Return a URL with asterisks in the places of user with password, and of the query."""
    return _SECRET.sub("***", url)
