"""History of ended sequences and refused requests [S02, S05, S06].

Triton's error texts name the rule that a request broke. The history adds how that came about, for the log and for `GET
/v2/models/M/sequences`; it never changes an answer. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from remora.calls import PastSequence, RefusedRequest
from remora.errors import RemoraError
from remora.messages import InferForm
from remora.scheduling.sequences.table import CANCELLED, DONE, IDLE, STOPPED, TIMEOUT, Ended

ENDED_LIMIT = 256
REFUSED_LIMIT = 32


class SequenceHistory:
    """The last ended sequences and the last refused requests of a model. Not thread-safe.

    Args:
        instances: their names.
        idle_ns: idle timeout of a sequence.
    """

    def __init__(self, instances: Sequence[str], idle_ns: int) -> None:
        self._instances = instances
        self._texts = {
            DONE: "it was complete",
            IDLE: f"it was idle for longer than max_sequence_idle_microseconds ({idle_ns // 1000})",
            CANCELLED: "one of its requests was cancelled",
            TIMEOUT: "the timeout of a queued request expired",
            STOPPED: "the model was stopped",
        }
        self._ended: OrderedDict[int | str, tuple[Ended, int]] = OrderedDict()
        self._refused: deque[tuple[RefusedRequest, int]] = deque(maxlen=REFUSED_LIMIT)

    def note(self, ended: Iterable[Ended], now_ns: int) -> None:
        """Record sequences that have just ended."""
        for each in ended:
            self._ended.pop(each.id, None)
            self._ended[each.id] = (each, now_ns)
            if len(self._ended) > ENDED_LIMIT:
                self._ended.popitem(last=False)

    def refuse(self, form: InferForm, error: RemoraError, live: bool, now_ns: int) -> str:
        """Record a refused request and return an explanation, or "" if the error text is sufficient.

        ``live`` is True if a sequence of that id exists; an earlier request has then ended it.
        """
        explanation = ""
        if form.sequence_id and not form.sequence_start:
            explanation = self._explain(form.sequence_id, live, now_ns)
        self._refused.append((RefusedRequest(form.sequence_id, form.id, error.message, explanation, 0), now_ns))
        return explanation

    def _explain(self, sequence_id: int | str, live: bool, now_ns: int) -> str:
        if live:
            return f"sequence {sequence_id} has received END or was cancelled: the next request must have START"
        if sequence_id not in self._ended:
            return f"sequence {sequence_id} is unknown: it has not begun, or ended long ago"
        ended, at_ns = self._ended[sequence_id]
        where = "while it waited for a slot"
        if ended.place is not None:
            where = f"in slot {ended.place.slot} of instance '{self._instances[ended.place.instance]}'"
        return f"sequence {sequence_id} ended {(now_ns - at_ns) / 1e9:.3f} s ago {where}: {self._texts[ended.why]}"

    def ended(self, now_ns: int) -> list[PastSequence]:
        """Return the ended sequences, newest first."""
        return [
            PastSequence(
                each.id,
                "" if each.place is None else self._instances[each.place.instance],
                -1 if each.place is None else each.place.slot,
                each.why,
                now_ns - at_ns,
            )
            for each, at_ns in reversed(self._ended.values())
        ]

    def refused(self, now_ns: int) -> list[RefusedRequest]:
        """Return the refused requests, newest first."""
        return [row._replace(ago_ns=now_ns - at_ns) for row, at_ns in reversed(self._refused)]
