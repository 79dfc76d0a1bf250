"""Rules of access: the roles of keys, the operator's secrets, and pages of other sites."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from remora.protocols.cross_site import refuse_page
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.protocols.restriction import GROUP_OF_ACTION, Restrictions

Deny = Callable[[Head, str], HttpAnswer | None]
"""Returns the refusal of a request for an action by the roles of its API key, None if they permit it."""


class Denied(NamedTuple):
    """Refusal of a request in V2's form; ``header`` is the one whose secret it lacks, or ""."""

    answer: HttpAnswer
    header: str = ""


class AccessRules:
    """Rules of one server.

    Args:
        restrictions: groups of calls that need a secret header.
        allowed_hosts: hosts whose web pages may change the server's state.
        deny: refuses by the roles of API keys; None without keys.
    """

    def __init__(self, restrictions: Restrictions, allowed_hosts: Container[str], deny: Deny | None) -> None:
        self._restrictions = restrictions
        self._allowed_hosts = allowed_hosts
        self._deny = deny

    def locked(self, action: str, head: Head) -> HttpAnswer | None:
        """Return the refusal of a request for ``action``, such as "infer", or None if allowed.

        Every route that reaches a model calls this first, because a restriction of V2 alone could be bypassed.
        """
        refusal = self.refusal(action, head)
        return None if refusal is None else refusal.answer

    def refusal(self, action: str, head: Head) -> Denied | None:
        """Return why `locked` refuses a request, or None."""
        if not action:
            return None
        denied = self.denied(action, head)
        if denied is not None:
            return Denied(denied)
        group = GROUP_OF_ACTION[action]
        key = self._missing_secret(action, head)
        if key is not None:
            return Denied(failure(403, f"This API is restricted, expecting header '{key}'", plain=True), key)
        # Inferences from pages of other sites are allowed, because such a page cannot read the answer without CORS
        # headers, which a proxy may add on purpose.
        reason = "" if group == "inference" else refuse_page(head.method, head.get, self._allowed_hosts)
        return Denied(failure(403, reason, plain=True)) if reason else None

    def denied(self, action: str, head: Head) -> HttpAnswer | None:
        """Return the refusal of a request for ``action`` by the roles of its API key, or None."""
        return None if self._deny is None else self._deny(head, action)

    def _missing_secret(self, action: str, head: Head) -> str | None:
        """Return the name of the header whose secret a request for ``action`` lacks, or None."""
        if not self._restrictions:
            return None
        return self._restrictions.missing(GROUP_OF_ACTION[action], lambda name: head.get(name.lower().encode()))
