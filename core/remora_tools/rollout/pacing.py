"""Times at which copies for a shadow may run beside the requests of clients. Pure.

A copy that runs on the server takes a processor that a request may need next. Copies therefore run one after the other
while no request of the model waits or runs, and rest in proportion to what they cost. At most a small part of the
requests then meets a copy, so that the copies do not move the high percentiles of the latency.
"""

from __future__ import annotations

SETTLE_NS = 1_000_000
"""Time between an answer and the copy of its request, so that the answer is sent first."""
POLL_NS = 5_000_000
"""Time between two checks of a model that is busy."""
MAX_BUSY_WAIT_NS = 1_000_000_000
"""Time after which a copy runs beside requests, because a model that is always busy would not be compared otherwise."""
MAX_STEP_WAIT_NS = 100_000_000
"""The same between two requests of a sequence, which the shadow ends if it is idle for too long."""


def wait_ns(now_ns: int, *, offered_ns: int, ran_ns: int, rested_ns: int, busy: bool) -> int:
    """Return how long the oldest copy must wait, 0 if it may run now.

    Args:
        now_ns: time of the engine's monotonic clock, as all others.
        offered_ns: when the copy was offered.
        ran_ns: when the latest copy ended.
        rested_ns: end of the rest that followed it.
        busy: True if requests of the model wait or run.
    """
    begin_ns = max(offered_ns + SETTLE_NS, rested_ns)
    if now_ns < begin_ns:
        return begin_ns - now_ns
    return POLL_NS if busy and now_ns < max(offered_ns, ran_ns) + MAX_BUSY_WAIT_NS else 0


def step_wait_ns(now_ns: int, *, ran_ns: int, busy: bool) -> int:
    """Return how long the next copy of a sequence must wait, 0 if it may run now.

    Args:
        now_ns, busy: as for `wait_ns`.
        ran_ns: when the copy before it ended.
    """
    return POLL_NS if busy and now_ns < ran_ns + MAX_STEP_WAIT_NS else 0


def rest_ns(cost_ns: int, processors: float) -> int:
    """Return how long copies rest after one that took ``cost_ns`` of a processor.

    They then use ``processors`` on average, such as 0.02.
    """
    return int(cost_ns * max(1 / processors - 1, 0))
