"""Identity of callers of language models, and models bound to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from remora.messages import Data, InferForm, Reply, Ticket

Carrier = Callable[[bytes], bytes | None]
"""Returns a header by its lower-case name."""
_BEARER = b"bearer "


def caller_of(carrier: Carrier, name: str) -> str:
    """Return the name of a request's key, or a digest of its credential, "" without one.

    ``name`` is "" if this server checks no keys. ``X-API-Key`` precedes ``Authorization``, because a platform in front
    may use the latter itself.
    """
    if name:
        return name
    key = (carrier(b"x-api-key") or b"").strip()
    if not key:
        key = (carrier(b"authorization") or b"").strip()
        if key[: len(_BEARER)].lower() == _BEARER:
            key = key[len(_BEARER) :].strip()
    return blake2b(key, digest_size=8).hexdigest() if key else ""


class CallerModel:
    """Model version that knows the caller of the one request submitted to it.

    Otherwise it delegates to the version.
    """

    __slots__ = ("_caller", "_model")

    def __init__(self, model: Any, caller: str) -> None:
        self._model = model
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def submit(self, form: InferForm, data: Sequence[Data], reply: Reply, **how: Any) -> Ticket:
        """Submit as ``ServedModel.submit`` does, with the caller."""
        ticket: Ticket = self._model.submit(form, data, reply, caller=self._caller, **how)
        return ticket
