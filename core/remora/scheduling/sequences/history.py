"""What became of sequences, and which requests were refused, as far as it is remembered [S02, S05, S06]. Pure.

Triton's texts say which rule a request broke. What this knows of the sequence says how that came about: it is for the
log and for `GET /v2/models/M/sequences`, and never changes an answer.
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
    """The last sequences of a model that ended, and the last requests that it refused. Not thread-safe.

    Args:
        instances: their names.
        idle_ns: how long a sequence may be silent.
    """

    def __init__(self, instances: Sequence[str], idle_ns: int) -> None:
        self._instances = instances
        self._texts = {
            DONE: "it was done",
            IDLE: f"it was silent for longer than max_sequence_idle_microseconds ({idle_ns // 1000})",
            CANCELLED: "one of its requests was cancelled",
            TIMEOUT: "it waited for a slot for longer than the timeout of a request",
            STOPPED: "the model stops",
        }
        self._ended: OrderedDict[int | str, tuple[Ended, int]] = OrderedDict()
        self._refused: deque[tuple[RefusedRequest, int]] = deque(maxlen=REFUSED_LIMIT)

    def note(self, ended: Iterable[Ended], now_ns: int) -> None:
        """Remember sequences that have just ended."""
        for each in ended:
            self._ended.pop(each.id, None)
            self._ended[each.id] = (each, now_ns)
            if len(self._ended) > ENDED_LIMIT:
                self._ended.popitem(last=False)

    def refuse(self, form: InferForm, error: RemoraError, live: bool, now_ns: int) -> str:
        """Remember a refused request; returns what explains the refusal, empty when its text says all.

        ``live`` says whether there is a sequence of that id, which then has been ended by a request before.
        """
        explanation = ""
        if form.sequence_id and not form.sequence_start:
            explanation = self._explain(form.sequence_id, live, now_ns)
        self._refused.append((RefusedRequest(form.sequence_id, form.id, error.message, explanation, 0), now_ns))
        return explanation

    def _explain(self, sequence_id: int | str, live: bool, now_ns: int) -> str:
        if live:
            return f"sequence {sequence_id} has got its END, or was cancelled: only START may follow"
        if sequence_id not in self._ended:
            return f"sequence {sequence_id} is not known: it has not begun, or has ended long ago"
        ended, at_ns = self._ended[sequence_id]
        where = "while it waited for a slot"
        if ended.place is not None:
            where = f"in slot {ended.place.slot} of instance '{self._instances[ended.place.instance]}'"
        return f"sequence {sequence_id} ended {(now_ns - at_ns) / 1e9:.3f} s ago {where}: {self._texts[ended.why]}"

    def ended(self, now_ns: int) -> list[PastSequence]:
        """Those that ended, the last one first."""
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
        """The requests that were refused, the last one first."""
        return [row._replace(ago_ns=now_ns - at_ns) for row, at_ns in reversed(self._refused)]
