"""Group of OpenAI's routes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from remora.errors import ConfigError
from remora.protocols.rest.answer import HttpAnswer
from remora_llm.openai.routes import MANAGES, Route, denied, find_route, speaks_openai, unknown_path

if TYPE_CHECKING:
    from remora.messages import Buffer
    from remora.models.served_model import ServedModel
    from remora.protocols.http1 import Head
    from remora.server.http.access_rules import Denied
    from remora.server.http.exchange import Answerer, Cancellable, Exchange
    from remora.server.http.route_groups import RouteParts
    from remora_llm.routes.openai import OpenAiRoutes


def action_of(_method: str, path: str) -> str | None:
    """See `RouteGroup.action_of`."""
    where = find_route(path)
    return None if where is None else where.v2_action


def refuse(denial: Denied, path: str) -> HttpAnswer:
    """See `RouteGroup.refuse`."""
    return denied(denial.answer, denial.header) if speaks_openai(path) else denial.answer


def task_of(model: ServedModel) -> str:
    """Return "text", "embeddings" or "score" if the routes could use a model so, else ""."""
    from remora_llm.openai.mapping import derive_use  # imported here, because key checks do not need it

    if model.generation is not None:
        return "text"
    try:
        use = derive_use(model.config)
    except ConfigError:  # the routes report it
        return ""
    return use.task if use is not None else ""


def serve(parts: RouteParts) -> OpenAiGroup:
    """See `RouteGroup.serve`."""
    return OpenAiGroup(parts)


class OpenAiGroup:
    """OpenAI's routes in one server.

    They answer where a language model is, or always with ``--openai``; else their paths are as unknown as any other.
    """

    def __init__(self, parts: RouteParts) -> None:
        self._parts = parts
        self._routes: OpenAiRoutes | None = None

    @property
    def routes(self) -> OpenAiRoutes:
        """Handler of the routes, imported by its first use."""
        if self._routes is None:
            from remora_llm.routes.openai import OpenAiRoutes

            self._routes = OpenAiRoutes(self._parts)
        return self._routes

    def bind(self, head: Head) -> Answerer:
        """See `OpenGroup.bind`."""
        where = find_route(head.path)
        assert where is not None  # because its path has an action
        return partial(self._answer, where, head)

    def unknown(self, head: Head) -> HttpAnswer | None:
        """See `OpenGroup.unknown`."""
        return unknown_path(head.path) if speaks_openai(head.path) and self._generates() else None

    def _answer(self, where: Route, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        if where.action in MANAGES and head.method == where.method:
            # Also before the first language model is loaded.
            return self.routes.manage(where, head, body, exchange, self._parts.v2)
        generates = self._generates()
        if not generates and where.method == "POST":
            # The request waits for its model, as over V2, which may have become ready since the look above.
            generates = not self._parts.engine.readiness().started or self._generates()
        if not generates:
            return self._parts.v2(head)(body, exchange)
        return self.routes.handle(where, head, body, exchange)

    def _generates(self) -> bool:
        engine = self._parts.engine
        return self._parts.options.openai or any(model.generation is not None for model in engine.models())
