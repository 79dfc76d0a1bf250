"""Language models bound to the caller of one request.

A caller is the name of the API key or the subject of the token that the server has checked. All requests without one
have the same caller, "", because a header that is not checked could make one client any number of callers, or the
caller whose prompts are reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remora.messages import Data, InferForm, Reply, Ticket


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
