"""Groups of HTTP routes beside V2's, and the group of a path.

A group is one object with all that is known of its paths. The check of keys, the restrictions and the service of a port
ask it, so that no path is served about which one of them does not know: a path without an action has no route.

remora's groups are rows of `remora.plugins.ROUTES` and imported by their first request. Those of other packages are
entry points in the group ``remora.routes``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from remora import plugins
from remora.protocols.rest.routes import HOME, METRICS_PATHS
from remora.server.http.probes import PATHS as PROBES

if TYPE_CHECKING:  # a front process asks groups without serving them
    from remora.engine import Engine
    from remora.messages import Mailbox
    from remora.models.served_model import ServedModel
    from remora.options import ServerOptions
    from remora.protocols.http1 import Head
    from remora.protocols.rest.answer import HttpAnswer
    from remora.server.http.access_rules import AccessRules, Denied
    from remora.server.http.exchange import Answerer
    from remora.server.http.large_bodies import LargeBodies
    from remora.server.http.waiting import Wait

_log = logging.getLogger("remora.http")

_RESERVED = ("/v2", *sorted(METRICS_PATHS | PROBES))
"""Beginnings of the server's own paths beside `HOME`, which no group may take."""


class RouteParts(NamedTuple):
    """Parts of a server from which a group's service is made.

    ``when_loaded`` repeats work that raised LoadingError, ``large`` decodes and prints large bodies in threads, and
    ``access`` has the rules of access, which permit a head before it is bound. ``v2`` binds heads for V2.
    """

    engine: Engine
    mailbox: Mailbox | None
    options: ServerOptions
    large: LargeBodies | None
    access: AccessRules
    when_loaded: Wait
    v2: Callable[[Head], Answerer]


class OpenGroup(Protocol):
    """Service of a group in one server. Use it in the event loop's thread."""

    def bind(self, head: Head) -> Answerer:
        """Return what answers requests with this head, whose path has an action.

        It depends on the head alone, because the result is memoized.
        """

    def unknown(self, head: Head) -> HttpAnswer | None:
        """Return the answer to a path without an action, None for V2's."""


class RouteGroup(Protocol):
    """All that is known of a group's paths: an object or a module."""

    def action_of(self, method: str, path: str) -> str | None:
        """Return the action of V2 whose permission a request needs, None without a route.

        Actions are the keys of `remora.protocols.restriction.GROUP_OF_ACTION`.
        """

    def refuse(self, denied: Denied, path: str) -> HttpAnswer:
        """Return a refusal in the form that the clients of this path read."""

    def task_of(self, model: ServedModel) -> str:
        """Return what these paths do with a model, such as "text", or ""; the page shows it."""

    def serve(self, parts: RouteParts) -> OpenGroup:
        """Return the service of the paths."""


def find_group(path: str) -> RouteGroup | None:
    """Return the group of a path, None for V2's own and for unknown paths."""
    row = row_of(path)
    return None if row is None else load_group(row)


def task_of(model: ServedModel) -> str:
    """Return what the groups of this project do with a model; see `RouteGroup.task_of`."""
    groups = (load_group(row) for row in plugins.ROUTES if plugins.is_present(row.target))
    return next(filter(None, (group.task_of(model) for group in groups)), "")


def row_of(path: str) -> plugins.Routes | None:
    """Return the row of a path's group, None for V2's own and for unknown paths."""
    for row in plugins.ROUTES:
        if path.startswith(row.prefixes):
            return row if plugins.is_present(row.target) else None
    if path == HOME or path.startswith(_RESERVED):
        return None
    return next((row for row in installed_rows() if path.startswith(row.prefixes)), None)


@cache
def installed_rows() -> tuple[plugins.Routes, ...]:
    """Return the groups of other packages.

    An entry point is a group whose attribute ``prefixes`` has the beginnings of its paths. One that takes a path of the
    server is left out, and the log says so.
    """
    found = []
    for entry in plugins.installed("routes"):
        try:
            prefixes = tuple(plugins.load_installed(entry).prefixes)
        except Exception:
            _log.exception("the routes '%s' cannot be loaded", entry.name)
            continue
        taken = (*_RESERVED, *(prefix for row in plugins.ROUTES for prefix in row.prefixes))
        wrong = [each for each in prefixes if len(each) < 2 or each[0] != "/" or each.startswith(taken)]
        if wrong:
            _log.error("the routes '%s' are left out: %s is a path of the server", entry.name, ", ".join(wrong))
        else:
            found.append(plugins.Routes(prefixes, entry.value))
    return tuple(found)


@cache
def load_group(row: plugins.Routes) -> RouteGroup:
    """Return the group of a row."""
    group: RouteGroup = plugins.load(row.target)
    return group
