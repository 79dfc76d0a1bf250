"""What follows a traced request, as those see it who make further requests for it; the law: they learn nothing else."""

from __future__ import annotations

from typing import Any, Protocol


class RequestTrace(Protocol):
    """A traced request (``remora.tracing``). ``context`` is what calls to other services carry, or ""."""

    @property
    def id(self) -> int: ...

    @property
    def context(self) -> str: ...

    def over(self, model: Any, /) -> Any:
        """The model for one request that is made for this one."""

    def taken(self, request: Any, /) -> None:
        """The request was checked, and is about to be queued."""
