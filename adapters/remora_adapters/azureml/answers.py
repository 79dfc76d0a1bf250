"""Answers of Azure's server as plain data, independent of scripts."""

from __future__ import annotations

import json
from typing import NamedTuple

FAILED = "x-ms-run-function-failed"
"""Header that is ``True`` if the script failed and ``False`` otherwise."""


class AzureAnswer(NamedTuple):
    """Status, headers and body of an answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def message_answer(status: int, message: str, *, failed: bool = False) -> AzureAnswer:
    """Return an error in Azure's form."""
    headers = [("Content-Type", "application/json"), (FAILED, str(failed))]
    return AzureAnswer(status, headers, json.dumps({"message": message}).encode())


def empty_answer() -> AzureAnswer:
    """Return the answer to OPTIONS for a script without a handler for it."""
    return AzureAnswer(200, [("Content-Type", "text/html; charset=utf-8"), (FAILED, "False")], b"")
