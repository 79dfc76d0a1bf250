"""Rules of access: the roles of keys, the operator's secrets, and pages of other sites."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from remora.protocols.cross_site import refuse_page
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.protocols.restriction import GROUP_OF_ACTION, Restrictions

if TYPE_CHECKING:
    from remora.protocols.openai.routes import Route as OpenAiRoute

Deny = Callable[[Head, str], HttpAnswer | None]
"""Returns the refusal of a request for an action by the roles of its API key, None if they permit it."""


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
        if not action:
            return None
        denied = self.denied(action, head)
        if denied is not None:
            return denied
        group = GROUP_OF_ACTION[action]
        key = self._missing_secret(group, head)
        if key is not None:
            return failure(403, f"This API is restricted, expecting header '{key}'", plain=True)
        # Inferences from pages of other sites are allowed, because such a page cannot read the answer without CORS
        # headers, which a proxy may add on purpose.
        reason = "" if group == "inference" else refuse_page(head.method, head.get, self._allowed_hosts)
        return failure(403, reason, plain=True) if reason else None

    def locked_openai(self, where: OpenAiRoute, head: Head) -> HttpAnswer | None:
        """Return the refusal of a request for a route of OpenAI in its form, or None.

        A missing or wrong secret is 401, because OpenAI's clients take 403 for a valid key without the permission.
        """
        from remora.protocols.openai.routes import refused, wants_key  # imported here, because most servers lack them

        denied = self.denied(where.v2_action, head)
        if denied is None and (key := self._missing_secret(GROUP_OF_ACTION[where.v2_action], head)) is not None:
            return wants_key(key)
        locked = denied or self.locked(where.v2_action, head)
        return None if locked is None else refused(locked)

    def denied(self, action: str, head: Head) -> HttpAnswer | None:
        """Return the refusal of a request for ``action`` by the roles of its API key, or None."""
        return None if self._deny is None else self._deny(head, action)

    def _missing_secret(self, group: str, head: Head) -> str | None:
        """Return the name of the header whose secret a request for a group lacks, or None."""
        if not self._restrictions:
            return None
        return self._restrictions.missing(group, lambda name: head.get(name.lower().encode()))
