"""What clients of Azure's server get, as plain data; the law: nothing here needs a script (spec clouds 2.2)."""

from __future__ import annotations

import json
from typing import NamedTuple

FAILED = "x-ms-run-function-failed"
"""The header that says whether the script failed: ``True`` or ``False``."""


class AzureAnswer(NamedTuple):
    """What a client gets."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def message_answer(status: int, message: str, *, failed: bool = False) -> AzureAnswer:
    """Azure's form of an error."""
    headers = [("Content-Type", "application/json"), (FAILED, str(failed))]
    return AzureAnswer(status, headers, json.dumps({"message": message}).encode())


def empty_answer() -> AzureAnswer:
    """The answer to OPTIONS where the script has none."""
    return AzureAnswer(200, [("Content-Type", "text/html; charset=utf-8"), (FAILED, "False")], b"")
