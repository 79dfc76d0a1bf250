"""Group of the routes of plain JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.protocols.rest.answer import HttpAnswer, Refusal
from remora.protocols.rest.routes import typed_route

if TYPE_CHECKING:
    from remora.models.served_model import ServedModel
    from remora.server.http.access_rules import Denied
    from remora.server.http.route_groups import OpenGroup, RouteParts


def action_of(_method: str, path: str) -> str | None:
    """See `RouteGroup.action_of`."""
    try:
        return None if typed_route(path) is None else "infer"
    except Refusal:
        return "infer"  # the service answers with the refusal


def refuse(denied: Denied, _path: str) -> HttpAnswer:
    """See `RouteGroup.refuse`."""
    return denied.answer


def task_of(_model: ServedModel) -> str:
    """See `RouteGroup.task_of`."""
    return ""


def serve(parts: RouteParts) -> OpenGroup:
    """See `RouteGroup.serve`."""
    from remora.server.http.predict import TypedRoutes  # imported here, because key checks ask the group without it

    return TypedRoutes(parts)
