"""Scheduler of one model version: submission, instances and shutdown.

`batching` decides, without side effects, which requests run together. A batch runs in an instance's thread
(`thread_dispatch`), or in the caller's event loop, or is begun there on a remote instance (`loop_dispatch`).
Invariants:

1. Each ticket is answered exactly once, whatever its batch does.
2. A failing batch answers its tickets and the instance continues.
3. Answers of one batch reach a mailbox in one delivery.
4. No answer is delivered while the lock is held.
5. An unhealthy instance gets work only if all instances are unhealthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from remora.backends import Instance
from remora.calls import SequenceReport
from remora.errors import RemoraError, UnavailableError
from remora.messages import Ticket
from remora.scheduling.batching import Plan, Queue
from remora.scheduling.costs import CostModel
from remora.scheduling.delivery import OrderedDelivery, deliver, stopping
from remora.scheduling.expiry import QueueTimeouts
from remora.scheduling.loop_dispatch import LoopDispatch
from remora.scheduling.pool import BatchRunner, DispatchPolicy, Pool
from remora.scheduling.running import OpenRequests, Recorder, Runner, StreamRunner
from remora.scheduling.slots import Slots
from remora.scheduling.thread_dispatch import NoThreadError, ThreadDispatch
from remora.signature import Signature
from remora.system.clock import Clock

if TYPE_CHECKING:
    from remora.scheduling.rate_limiter import Turn


_SWEEP_AFTER = 64
"""Minimum number of submissions between two sweeps of cancelled requests."""
_USUAL = DispatchPolicy()


class RequestScheduler(Protocol):
    """Any scheduler of requests, wrapped or not."""

    costs: CostModel

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket, or raise UnavailableError and leave it unanswered."""

    @property
    def pending(self) -> int:
        """Queued requests [P04]."""

    @property
    def oldest_ns(self) -> int:
        """Arrival of the queued request that has waited longest, or 0."""

    @property
    def running(self) -> int:
        """Requests in an execution."""

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and finish the queued ones. Returns False on timeout."""

    def fail_pending(self, error: RemoraError) -> None:
        """Answer all queued requests with ``error``."""


class ModelScheduler(RequestScheduler, Protocol):
    """The scheduler of one model version."""

    @property
    def open_sequences(self) -> int:
        """Number of sequences that have begun and not ended."""

    def keeps_sequence(self, sequence_id: int | str) -> bool:
        """Return True if a sequence of this id is open."""

    def report(self) -> SequenceReport | None:
        """Return the state of the sequence batcher, None without one."""


class Scheduler:
    """Requests and instances of one model version.

    Args:
        queue: decides on batches; this scheduler's lock guards it.
        instances: at least one.
        signature: converts outputs to their wire shape.
        recorder: records every execution and failure.
        clock: read here and nowhere below.
        policy: how batches are run.
        costs: learns the durations of batches; by default not shared.
        turns: one for each instance that shares resources with others [I08]; empty without a rate limiter.
    """

    open_sequences = 0

    def __init__(
        self,
        queue: Queue,
        instances: Sequence[Instance],
        signature: Signature,
        recorder: Recorder,
        clock: Clock,
        policy: DispatchPolicy = _USUAL,
        *,
        turns: Sequence[Turn] = (),
        costs: CostModel | None = None,
    ) -> None:
        self._now = clock.monotonic_ns
        self._pool = pool = Pool(queue, Slots(instances), self._now)
        self._sweep_in = _SWEEP_AFTER
        self._ordered = OrderedDelivery() if policy.ordered else None
        self._deliver = deliver if self._ordered is None else self._ordered.deliver
        self.costs = CostModel() if costs is None else costs
        accounts = (signature, recorder, self._now, self.costs)
        self._open_requests = OpenRequests(self._left_open, pool.count_answered)
        runner = Runner(*accounts, self._open_requests, self._deliver)
        streaming = StreamRunner(*accounts, self._open_requests) if policy.decoupled else None
        self._batches = BatchRunner(pool, runner, streaming, recorder, self._deliver)
        turn_of = dict(zip(pool.slots, turns, strict=True)) if turns else {}
        self._threads = ThreadDispatch(pool, self._batches, turn_of, enabled=policy.threads)
        timeouts = QueueTimeouts(pool, self._refuse_expired, enabled=policy.threads)
        self._timeouts = timeouts if queue.has_timeouts else None
        self._loop = LoopDispatch(pool, self._batches, self._threads, self.costs, policy)
        self._loop.update_capabilities(instances)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket. Its reply delivers the answer. Any thread may call.

        Raises UnavailableError if the queue is full [D12], the scheduler is stopping [D17] or no thread can start; the
        ticket is then not answered.
        """
        ticket.arrival_ns = ticket.arrival_ns or self._now()
        self._sweep_in -= 1  # without the lock, because a lost count is harmless
        if self._sweep_in <= 0:
            self._drop_cancelled()
        pool, mailbox = self._pool, ticket.mailbox
        try:
            with pool.lock:
                if pool.stopping:
                    raise stopping()
                pool.queue.push(ticket)
                if self._ordered is not None:
                    self._ordered.expect(ticket)
                if self._timeouts is not None:
                    self._timeouts.expect()
                if pool.armed or not self._loop.arm(mailbox) or mailbox is None:
                    return
            self._loop.defer(mailbox)
        except NoThreadError as error:
            if self._refuse_queued([ticket], error):
                raise

    def submit_all(self, tickets: Sequence[Ticket]) -> list[tuple[int, RemoraError]]:
        """Queue tickets of one mailbox in one step. Any thread may call.

        Returns the index and the error of each ticket that a full queue refuses [D12]. Raises UnavailableError if the
        scheduler is stopping [D17] or no thread can start.
        """
        now_ns = self._now()
        self._sweep_in -= len(tickets)
        if self._sweep_in <= 0:
            self._drop_cancelled()
        refused: list[tuple[int, RemoraError]] = []
        pool, mailbox = self._pool, tickets[0].mailbox
        push, arms = pool.queue.push, False
        try:
            with pool.lock:
                if pool.stopping:
                    raise stopping()
                for index, ticket in enumerate(tickets):
                    ticket.arrival_ns = now_ns
                    try:
                        push(ticket)
                    except UnavailableError as error:
                        refused.append((index, error))
                        continue
                    if self._ordered is not None:
                        self._ordered.expect(ticket)
                    if not arms and not pool.armed:  # by the first request, as for requests that arrive one by one
                        arms = self._loop.arm(mailbox)
                if self._timeouts is not None:
                    self._timeouts.expect()
            if arms and mailbox is not None:
                self._loop.defer(mailbox)
        except NoThreadError as error:
            known = {tickets[at] for at, _ in refused}
            kept = {*tickets[: index + 1]} - self._refuse_queued(tickets, error) - known  # a loop has taken them
            if not kept:
                raise
            refused += [(at, error) for at, ticket in enumerate(tickets) if ticket not in kept | known]
        return refused

    def _refuse_queued(self, tickets: Sequence[Ticket], error: RemoraError) -> set[Ticket]:
        """Refuse the queued requests, and return those of ``tickets``, unanswered.

        See `BatchRunner.refuse_queued`.
        """
        refused = self._batches.refuse_queued(error, tickets)
        if self._ordered is not None:
            self._ordered.forget(refused)
            self._deliver([])  # the answers that waited for those
        return refused

    def _drop_cancelled(self) -> None:
        """Answer the cancelled requests in the queue.

        Clients could otherwise add any number of them behind a busy instance. Their number is bounded by that of the
        other requests or _SWEEP_AFTER, and the cost by one check per submission.
        """
        with self._pool.lock:
            dropped = self._pool.queue.drop_cancelled()
            self._sweep_in = max(_SWEEP_AFTER, len(self._pool.queue))
        if dropped:
            self._deliver(self._batches.drop(dropped))

    def _refuse_expired(self, dropped: Sequence[tuple[Ticket, RemoraError]]) -> None:
        """Answer the requests that a queue timeout has removed."""
        self._deliver(self._batches.drop(dropped))

    @property
    def pending(self) -> int:
        return len(self._pool.queue)

    @property
    def oldest_ns(self) -> int:
        with self._pool.lock:
            return self._pool.queue.oldest_ns

    @property
    def running(self) -> int:
        """Requests in an execution, or whose answers are being delivered."""
        return self._pool.running

    def keeps_sequence(self, sequence_id: int | str) -> bool:
        """Return False, because only a sequence batcher keeps sequences."""
        return False

    def report(self) -> SequenceReport | None:
        """Return None, because only a sequence batcher has a report."""
        return None

    def step(self, index: int = 0) -> Plan:
        """Let one instance poll the queue once and run the plan, for tests without threads."""
        slot = [*self._pool.slots][index]
        with self._pool.lock:
            plan = self._pool.take(slot)
        self._batches.run(slot, plan)
        self._open_requests.catch_up()
        return plan

    def _left_open(self) -> None:
        """Start the thread for late answers.

        Open requests count as running until answered.
        """
        if self._threads.enabled:
            with self._pool.lock:
                self._open_requests.start(next(iter(self._pool.slots)).instance.name)

    # -- instances --------------------------------------------------------------------------------------------------

    def set_instances(self, instances: Sequence[Instance]) -> None:
        """Replace the instances, and wait until the removed ones have answered their requests.

        Any thread may call. Not for decoupled models, nor for instances that share resources.
        """
        pool = self._pool
        with pool.lock:
            retired = pool.slots.set(instances)
            self._loop.update_capabilities(instances)
            pool.changed.notify_all()
            if len(pool.queue) and not pool.armed:
                with suppress(NoThreadError):  # the end of a removed instance's batch tries again
                    self._threads.wake()
            pool.removals += 1
            removed = [slot.instance for slot in retired]
            pool.changed.wait_for(
                lambda: not any(slot.busy for slot in retired) and not self._open_requests.any_open(removed)
            )
            pool.removals -= 1

    # -- shutdown ---------------------------------------------------------------------------------------------------

    def stop_waiting(self) -> None:
        """Dispatch without queue delays from now on, while more requests may still arrive.

        A wrapping scheduler calls this when it stops.
        """
        with self._pool.lock:
            self._pool.queue.stop_waiting()
            self._pool.changed.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, run queued ones at once and end the threads.

        Returns False on timeout; None waits without limit.
        """
        end_ns = None if timeout_s is None else self._now() + int(timeout_s * 1e9)
        pool = self._pool
        with pool.lock:
            pool.stopping = True
            pool.queue.stop_waiting()
            pool.armed = False
            pool.changed.notify_all()
            if len(pool.queue) and not any(slot.thread for slot in pool.slots):
                try:
                    self._threads.wake()
                except NoThreadError:
                    return False
        for slot in pool.slots:
            if slot.thread is not None:
                slot.thread.join(self._left_s(end_ns))
                if slot.thread.is_alive():
                    return False
        with pool.lock:
            done = pool.changed.wait_for(lambda: not pool.running and not len(pool.queue), self._left_s(end_ns))
        if done:
            self._open_requests.close()
        return done

    def _left_s(self, end_ns: int | None) -> float | None:
        return None if end_ns is None else max(end_ns - self._now(), 0) / 1e9

    def fail_pending(self, error: RemoraError) -> None:
        """Answer queued and open requests with ``error``, after a stop timed out."""
        with self._pool.lock:
            tickets = self._pool.queue.drain()
            self._pool.changed.notify_all()
        self._deliver([(ticket, error) for ticket in tickets])
        self._open_requests.end_all(error)
