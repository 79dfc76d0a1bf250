"""Parsed heads of requests for V2, computed once for equal heads."""

from __future__ import annotations

from collections.abc import Callable

from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, Refusal
from remora.protocols.rest.content_encoding import choose_encoding
from remora.protocols.rest.routes import HOME, METRICS_PATHS, PAGES, Route, route
from remora.server.http import deadlines
from remora.server.http.probes import PATHS as PROBES

Refuse = Callable[[str, Head], HttpAnswer | None]
"""Returns the refusal of a request for an action such as "infer", or None if the request is allowed."""


class BodyPlan:
    """Facts of a head about the request's body and the answer's encoding.

    ``json_length`` is the length of a binary body's JSON, 0 without a valid ``header_length``. ``encoding`` and
    ``accept`` are content encodings, empty for none.
    """

    __slots__ = ("accept", "encoding", "header_length", "json_length")

    def __init__(self, head: Head) -> None:
        length = self.header_length = head.get(b"inference-header-content-length")
        self.json_length = int(length) if length and length.isdigit() and len(length) < 16 else 0
        encoding = head.get(b"content-encoding") or b""
        self.encoding = b"" if encoding == b"identity" else encoding
        accept = head.get(b"accept-encoding")
        self.accept = choose_encoding(accept) if accept else ""


class HeadPlan(BodyPlan):
    """Parsed request head, kept in the head's memo entry."""

    __slots__ = (
        "generates",
        "infers",
        "locked",
        "model",
        "refusal",
        "route",
        "timeout_ns",
        "version",
    )

    def __init__(self, head: Head, refuse: Refuse) -> None:
        super().__init__(head)
        self.route: Route | None = None
        self.refusal: HttpAnswer | None = None
        self.locked = False  # refused because of a missing secret or a cross-site page: skip all other checks
        action = ""
        self.infers = False  # an inference without a deadline, the usual case
        self.generates: Route | None = None
        self.timeout_ns = 0
        try:
            where = route(head.method, head.path)
            action = where.action
            infers = where.action == "infer"
            generates = where.action in ("generate", "generate_stream")
            if infers or generates:
                self.timeout_ns = deadlines.timeout_ns(head.get(deadlines.HEADER), plain=infers)
            self.route = where
            self.infers = infers and not self.timeout_ns
            self.generates = where if generates else None
        except Refusal as refusal:
            self.refusal = refusal.answer
            action = action or refusal.action
        if (refused := refuse(action or action_of_page(head.path), head)) is not None:
            self.route = self.generates = None
            self.infers, self.timeout_ns, self.locked = False, 0, True
            self.refusal = refused
        self.model = self.route.model if self.route else ""
        self.version = self.route.version if self.route else -1


def action_of_page(path: str) -> str:
    """Return the action of a path outside V2, or "" for an unknown path, which needs no secret."""
    if path in METRICS_PATHS:
        return "metrics"
    if path in PROBES:
        return "live"
    if path == HOME:
        return "home"
    return "pages" if path in PAGES else ""
