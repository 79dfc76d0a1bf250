"""Simulation of models that serve one load together. Pure and repeatable.

As in `simulation`, batches are the plans of the queues that serve, and only instances, processors and clients are
simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from remora.api.models import BatchQueue
from remora.config import BatchPolicy
from remora.messages import Ticket
from remora_tools.deciders.simulation import Cost, request_at

_WARM_UP = 5
"""The first 1/5 of the answers is not counted, because the queues are still filling."""


class Station(NamedTuple):
    """A model: batching, cost of a batch by rows, instances, and processors that a batch uses."""

    policy: BatchPolicy
    cost: Cost
    instances: int
    cores: float = 0.0


class Offered(NamedTuple):
    """A load: ``connections`` of a closed loop, or Poisson arrivals ``per_s``.

    It ends when ``requests`` are answered. The requests take the routes in turn and have ``rows`` rows. A front uses
    ``front_ns`` for each request, one after the other.
    """

    connections: int = 0
    per_s: float = 0.0
    requests: int = 600
    rows: int = 1
    front_ns: float = 0.0


class Answered(NamedTuple):
    """Answers per second, and the time from sending to the answer by route."""

    rate_per_s: float
    latencies_ns: tuple[list[int], ...]


class _Journey:
    """A request on its way through the stations of its route."""

    __slots__ = ("begin_ns", "route", "step")

    def __init__(self, route: int, begin_ns: int) -> None:
        self.route = route
        self.begin_ns = begin_ns
        self.step = 0


class _State:
    """The queue of a station and its idle instances."""

    __slots__ = ("idle", "queue", "station", "wake_ns")

    def __init__(self, station: Station) -> None:
        self.station = station
        self.queue = BatchQueue(station.policy)
        self.idle = station.instances
        self.wake_ns = 0


def simulate_network(
    stations: Sequence[Station], routes: Sequence[Sequence[int]], offered: Offered, *, cores: float
) -> Answered:
    """Serve a load with stations that share ``cores`` processors.

    A route lists the stations that a request visits, in order. A batch that starts while the running batches need more
    processors than there are takes longer in proportion.
    """
    return _Network(stations, routes, offered, cores).run()


class _Network:
    def __init__(
        self, stations: Sequence[Station], routes: Sequence[Sequence[int]], offered: Offered, cores: float
    ) -> None:
        self._states = [_State(station) for station in stations]
        self._routes = routes
        self._offered = offered
        self._cores = cores
        self._in_use = 0.0
        self._front_free_ns = 0.0
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._number = 0
        self._sent = 0
        self._random = Random(0)
        self._ends: list[int] = []
        self._latencies: list[list[int]] = [[] for _ in routes]

    def run(self) -> Answered:
        offered = self._offered
        for _ in range(min(offered.connections, offered.requests)):
            self._send(1)
        if offered.per_s:
            self._at(1, self._arrive_open)
        while self._events and len(self._ends) < offered.requests:
            now, _, event = heapq.heappop(self._events)
            event(now)
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2](now)
            for state in self._states:
                self._dispatch(state, now)
        return self._result()

    def _result(self) -> Answered:
        skipped = len(self._ends) // _WARM_UP
        span_ns = self._ends[-1] - self._ends[skipped] if len(self._ends) > skipped + 1 else 0
        rate = (len(self._ends) - skipped - 1) / span_ns * 1e9 if span_ns else 0.0
        return Answered(rate, tuple(each[len(each) // _WARM_UP :] for each in self._latencies))

    def _at(self, ns: int, event: Callable[[int], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (ns, self._number, event))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _arrive_open(self, now: int) -> None:
        self._send(now)
        gap = self._random.expovariate(self._offered.per_s) * 1e9
        self._at(now + int(gap) + 1, self._arrive_open)

    def _send(self, now: int) -> None:
        journey = _Journey(self._sent % len(self._routes), now)
        self._sent += 1
        self._front_free_ns = max(self._front_free_ns, now) + self._offered.front_ns
        self._at(int(self._front_free_ns), partial(self._queue, journey))

    def _queue(self, journey: _Journey, now: int) -> None:
        ticket = request_at(now, self._offered.rows)
        ticket.context = journey
        self._states[self._routes[journey.route][journey.step]].queue.push(ticket)

    # -- batches ------------------------------------------------------------------------------------------------------

    def _dispatch(self, state: _State, now: int) -> None:
        station = state.station
        while state.idle:
            plan = state.queue.poll(now)
            if not plan.tickets:
                if plan.wake_ns and plan.wake_ns != state.wake_ns:
                    state.wake_ns = plan.wake_ns
                    self._at(plan.wake_ns, lambda at: None)
                return
            state.idle -= 1
            self._in_use += station.cores
            slower = max(self._in_use / self._cores, 1.0)
            end_ns = now + max(int(station.cost(plan.rows) * slower), 1)
            self._at(end_ns, partial(self._end, state, plan.tickets))

    def _end(self, state: _State, tickets: Sequence[Ticket], now: int) -> None:
        state.idle += 1
        self._in_use -= state.station.cores
        for ticket in tickets:
            journey = ticket.context
            assert isinstance(journey, _Journey)
            journey.step += 1
            if journey.step < len(self._routes[journey.route]):
                self._queue(journey, now)
                continue
            self._ends.append(now)
            self._latencies[journey.route].append(now - journey.begin_ns)
            if self._offered.connections:
                self._send(now)
