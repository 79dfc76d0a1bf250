"""Patterns of headers and metadata that become parameters. Pure."""

from __future__ import annotations

import re

_MOST_CHARACTERS = 4096
"""Longest pattern, so that one of a few lines is compiled at once."""


def open_header_pattern(text: str, *, case_sensitive: bool = False) -> re.Pattern[str]:
    """Compile the pattern of an operator.

    Raises ValueError with the reason, whatever Python's compiler raises: it has other errors for deep patterns and for
    large numbers.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, more than {_MOST_CHARACTERS}")
    try:
        return re.compile(text, 0 if case_sensitive else re.IGNORECASE)
    except RecursionError:
        raise ValueError("its groups are nested too deep") from None
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from error
