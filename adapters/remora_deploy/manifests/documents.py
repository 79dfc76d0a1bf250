"""YAML text of documents, with the reason for a value as a comment above it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_OTHER_TYPES = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))
"""Words that YAML reads as something else than text."""

Reasons = Mapping[str, str]
"""Comment by field name."""


def document(fields: Mapping[str, Any], reasons: Reasons, header: str = "") -> str:
    """Return a mapping as a YAML document, after a comment.

    Fields that are None or empty are left out.
    """
    return "".join(f"# {line}\n" for line in header.splitlines()) + "".join(
        f"{line}\n" for line in _lines(fields, reasons)
    )


def documents(rows: Sequence[Mapping[str, Any]], reasons: Reasons, header: str = "") -> str:
    """Return several documents, the comment above the first."""
    first, *rest = rows
    return "---\n".join([document(first, reasons, header), *(document(each, reasons) for each in rest)])


def _lines(fields: Mapping[str, Any], reasons: Reasons) -> Iterator[str]:
    """Yield a mapping as YAML blocks, with scalars as JSON because YAML reads them the same."""
    for key, value in fields.items():
        if value is None or value == [] or value == "":
            continue
        if key in reasons:
            yield f"# {reasons[key]}"
        if isinstance(value, dict) and value:
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(value, reasons))
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            yield f"{key}:"
            for each in value:
                first, *rest = _lines(each, reasons)
                if first.startswith("#"):
                    yield "  -"
                    yield from (f"    {line}" for line in (first, *rest))
                else:
                    yield f"  - {first}"
                    yield from (f"    {line}" for line in rest)
        else:
            yield f"{key}: {_scalar(value)}"


def _scalar(value: object) -> str:
    """Return a value in flow style, text without quotes where YAML reads it back as text."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OTHER_TYPES:
        return value
    return json.dumps(value)
