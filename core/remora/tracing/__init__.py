"""Sampling, records and delivery of request traces [T04-T08].

`sampling`, `context` and `records` are pure. `tracer` follows requests; the thread of `writer` hands finished traces to
a file (`trace_file`) or a collector. Tracing never delays, changes or loses a request.
"""

from __future__ import annotations

from typing import Any, Protocol


class Capture(Protocol):
    """Capture of requests with their responses, which `remora.plugins.CAPTURE` opens."""

    def wrap_model(self, model: Any) -> Any:
        """Return a model that captures the requests that are submitted to it."""

    def close(self) -> None:
        """Write what is captured, and end the capture."""
