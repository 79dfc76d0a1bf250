"""Requests that were running when a worker process ended.

One of them may end every process that it reaches. After its first process a request is a suspect and runs alone, so
that it fails no others; if it ends a second one, it is refused. Requests are compared by their tensors and
parameters, not by their ids, which many clients make anew. Thread-safe.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from enum import Enum
from threading import Lock

from remora.errors import InvalidArgumentError, RemoraError, UnavailableError, about
from remora.messages import Array, Request
from remora.tensors import elements

FORGET_S = 300.0
"""How long a request stays suspected or refused, because its fault may have another cause that passes."""
MOST = 256
"""Requests that are remembered; the oldest are forgotten first."""
MOST_BYTES = 64 << 20
"""Larger requests are not remembered, because telling them apart would take too long."""


class Verdict(Enum):
    """What is known of a request."""

    TRUSTED = "has ended no process"
    SUSPECTED = "was running when a process ended"
    REFUSED = "has ended two processes, the second one alone"


class Suspects:
    """Memory of such requests, shared by the instances of a model version.

    Args:
        now_s: monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = Lock()
        self._known: dict[bytes, tuple[Verdict, float]] = {}

    def verdicts(self, requests: Sequence[Request]) -> list[Verdict] | None:
        """Return what is known of each request, or None if all are trusted.

        It costs nothing while no process has ended.
        """
        if not self._known:
            return None
        with self._lock:
            now_s = self._now_s()
            self._known = {key: row for key, row in self._known.items() if now_s < row[1]}
            if not self._known:
                return None
            trusted = (Verdict.TRUSTED, 0.0)
            found = [self._known.get(_digest(request), trusted)[0] for request in requests]
        return None if found.count(Verdict.TRUSTED) == len(found) else found

    def record_end(self, requests: Sequence[Request]) -> None:
        """Record the requests that were running when a process ended.

        A suspect is refused from now on if it ran alone; beside others, another may have been the cause again.
        """
        with self._lock:
            for request in requests:
                key = _digest(request)
                if key:
                    before = self._known.pop(key, None)
                    guilty = before is not None and len(requests) == 1
                    verdict = Verdict.REFUSED if guilty else Verdict.SUSPECTED
                    self._known[key] = verdict, self._now_s() + FORGET_S
            while len(self._known) > MOST:
                del self._known[next(iter(self._known))]

    def clear(self, request: Request) -> None:
        """Trust a suspect that has run alone and ended no process."""
        with self._lock:
            self._known.pop(_digest(request), None)


def parts_of(verdicts: Sequence[Verdict]) -> list[tuple[int, int]]:
    """Return begin and end of the requests that run together.

    These are trusted neighbours, and each other request alone.
    """
    parts: list[tuple[int, int]] = []
    for index, verdict in enumerate(verdicts):
        joins = index > 0 and verdict is verdicts[index - 1] is Verdict.TRUSTED
        parts.append((parts.pop()[0] if joins else index, index + 1))
    return parts


def refusal(request: Request) -> InvalidArgumentError:
    """Return the error of a refused request."""
    return InvalidArgumentError(
        about(
            request.form.id,
            "the request is refused: the model's process has ended twice while it ran this request. It is accepted "
            f"again after {FORGET_S / 60:g} minutes or when the model is loaded again",
        )
    )


def restarting(text: str, wait_s: float = 1.0) -> UnavailableError:
    """Return the error of a request that may be repeated after ``wait_s``."""
    error = UnavailableError(text, from_model=True)
    error.retry_after_s = max(math.ceil(wait_s), 1)
    return error


def error_of_end(error: RemoraError, requests: Sequence[Request]) -> RemoraError:
    """Return the error of requests whose process has ended.

    Any of several may be the cause, so the others may be repeated.
    """
    return error if len(requests) < 2 else restarting(error.message)


def _nbytes(array: Array) -> int:
    if array.dtype.hasobject:  # the array itself contains only addresses
        return sum(len(element) for step in elements.array_steps(array) for element in step)
    return array.nbytes


def _digest(request: Request) -> bytes:
    """Return what tells a request from others, or nothing for a large one."""
    if sum(map(_nbytes, request.inputs.values())) > MOST_BYTES:
        return b""
    parameters = sorted(request.form.parameters.items())
    found = hashlib.blake2b(repr(parameters).encode("utf-8", "surrogatepass"), digest_size=16)
    for name, array in sorted(request.inputs.items()):
        found.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode("utf-8", "surrogatepass"))
        data = elements.packed(elements.array_steps(array)) if array.dtype.hasobject else array.tobytes()
        found.update(data)
    return found.digest()
