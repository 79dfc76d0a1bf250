"""Planning of a language model's steps: admission, prefill, decode and preemption. Pure.

Each step carries one token of every run that decodes and, within a budget, parts of prompts, so that a long prompt
delays no other request for longer than one step. Callers share rows and prompt tokens equally: of several callers with
waiting work, the one with the fewest computed tokens is next. What requests name themselves orders the work of their
caller alone: first the priority, then equal shares of its users.

Invariants: no part of a prompt makes a kernel compute a single position, because matrix products of one row are rounded
otherwise than those of several: a part has at least two tokens, and not one more than a multiple of four. Tokens of an
answer are always computed one at a time, also when a run that was put back is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from remora_llm.generation import Extension
from remora_llm.generation.rows import Copy, RowTable, Run

_LEAST_PART = 2
_BLOCK = 4
"""Kernels compute positions in blocks whose sizes are multiples of this number."""
_LEAST_REUSE = 16
_HEADROOM = 16
"""Tokens of memory for each run that must be free when another run is admitted."""


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Limits of a model's steps.

    Attributes:
        rows: number of the stepper's rows. At least one more than ``sequences``.
        sequences: maximum number of runs with a row.
        cache_tokens: maximum number of tokens in all rows.
        prefill_chunk: maximum number of tokens of a prompt that a run computes in one step.
        step_tokens: maximum number of tokens of a step. Runs that decode go first.
        prefix_cache: prompts of ended runs are reused.
        decode_first: see `Stepper`.
    """

    rows: int
    sequences: int
    cache_tokens: int
    prefill_chunk: int = 128
    step_tokens: int = 256
    prefix_cache: bool = True
    decode_first: bool = True


class StepPlan(NamedTuple):
    """One step: copies first, then the extensions, one for each of ``runs``."""

    copies: list[Copy]
    extensions: list[Extension]
    runs: list[Run]
    late: list[Run]
    """Runs whose deadline has passed; the caller removes them."""


@dataclass(slots=True)
class _User:
    """Runs and computed tokens of one user of a caller."""

    computed: float
    waiting: list[Run] = field(default_factory=list)
    running: int = 0


@dataclass(slots=True)
class _Caller:
    """Users, runs with a row and computed tokens of one caller."""

    number: int
    computed: float
    users: dict[str, _User] = field(default_factory=dict)
    running: int = 0

    @property
    def waiting(self) -> int:
        """Number of runs without a row."""
        return sum(len(user.waiting) for user in self.users.values())


_Turn = tuple[tuple[float, int, int], int, float, int]


class Planner:
    """State of all runs of a model. Not thread-safe; the caller passes the time."""

    def __init__(self, limits: PlannerLimits) -> None:
        self._limits = limits
        self._rows = RowTable(limits.rows, decode_first=limits.decode_first)
        self._callers: dict[str, _Caller] = {}
        self._copies: list[Copy] = []
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0

    @property
    def running(self) -> list[Run]:
        """The runs with a row, by row."""
        return self._rows.owners

    @property
    def waiting_by_caller(self) -> dict[str, int]:
        """Number of runs without a row by caller."""
        return {name: caller.waiting for name, caller in self._callers.items()}

    @property
    def cache_tokens(self) -> int:
        """Number of tokens in memory, those for reuse included."""
        return self._rows.owned_tokens + self._rows.kept_tokens

    @property
    def reusable_tokens(self) -> int:
        """Number of tokens in memory for reuse."""
        return self._rows.kept_tokens

    @property
    def is_idle(self) -> bool:
        """True if the plan has no work."""
        return not self._callers

    def add(self, run: Run) -> None:
        """Queue a run."""
        task = run.task
        caller = self._callers.get(task.caller)
        if caller is None:
            caller = self._callers[task.caller] = _Caller(run.order, _least(self._callers.values()))
        user = caller.users.get(task.user)
        if user is None:
            user = caller.users[task.user] = _User(_least(caller.users.values()))
        user.waiting.append(run)

    def _of(self, run: Run) -> tuple[_Caller, _User]:
        caller = self._callers[run.task.caller]
        return caller, caller.users[run.task.user]

    def _count_rows(self, run: Run, change: int) -> None:
        for share in self._of(run):
            share.running += change

    def remove(self, run: Run, *, keep: bool = True) -> None:
        """Forget a run that has ended. Its prompt is kept for reuse."""
        caller, user = self._of(run)
        if run.row >= 0:
            self._copies += self._rows.release(run, keep=keep and self._limits.prefix_cache)
            self._count_rows(run, -1)
        else:
            user.waiting.remove(run)
        if not user.running and not user.waiting:
            del caller.users[run.task.user]
        if not caller.users:
            del self._callers[run.task.caller]

    def lose_rows(self) -> list[Run]:
        """Forget the contents of all rows and return their runs, which the caller removes."""
        lost = self._rows.owners
        self._rows.clear()
        self._copies.clear()
        for run in lost:
            self._count_rows(run, -1)
            self._of(run)[1].waiting.append(run)
        return lost

    def plan(self, now_ns: int) -> StepPlan:
        """Decide the next step. Its extensions count as computed."""
        late = [run for run in self._all() if run.task.deadline_ns and run.task.deadline_ns <= now_ns]
        for run in late:
            self.remove(run)
        for run in self._rows.owners:
            if run.decodes and not run.promoted:
                self._copies += self._rows.promote(run)
        self._admit(now_ns)
        extensions: list[Extension] = []
        runs: list[Run] = []
        decoding = self._decoding_within_memory(now_ns)
        self._prefill(self._limits.step_tokens - len(decoding), len(decoding), extensions, runs)
        for run in decoding:
            fresh = run.computed == len(run.tokens) - 1
            token = run.tokens[run.computed]
            extensions.append(Extension(run.row, run.computed, (token,), 1 if fresh else 0))
            runs.append(run)
        for run, extension in zip(runs, extensions, strict=True):
            run.computed += len(extension.tokens)
            run.steps += 1
            run.rows_beside += len(runs) - 1
            for share in self._of(run):
                share.computed += len(extension.tokens)
        copies, self._copies = self._copies, []
        return StepPlan(copies, extensions, runs, late)

    # -- Admission -----------------------------------------------------------------------------------------------------

    def _all(self) -> Iterable[Run]:
        users = (user for caller in self._callers.values() for user in caller.users.values())
        return [*self._rows.owners, *(run for user in users for run in user.waiting)]

    def _admit(self, now_ns: int) -> None:
        while (run := self._next_waiting()) is not None:
            if len(self._rows.owners) >= self._limits.sequences and not self._make_way(run, now_ns):
                return
            if not self._fits(run):
                return
            self._of(run)[1].waiting.remove(run)
            self._count_rows(run, 1)
            run.queue.admit(now_ns)
            reuse = self._limits.prefix_cache and run.task.reuse and run.task.prompt_logprobs is None
            shares = run.leader is not None and run.task.prompt_logprobs is None and run.task.reuse
            self._copies += self._rows.take(run, reuse=reuse or shares, least=1 if shares else _LEAST_REUSE)
            if not run.generated:
                self.prefix_queries += len(run.prompt)
                self.prefix_hits += run.computed
            self._trim()

    def _next_waiting(self) -> Run | None:
        """Return the run to admit next, the first in the order of `_turn`."""
        best: tuple[_Turn, Run] | None = None
        for caller in self._callers.values():
            for user in caller.users.values():
                for run in user.waiting:
                    leader = run.leader
                    if leader is not None and leader.row >= 0 and not leader.decodes:
                        continue  # its prompt is being computed for this run, too
                    key = self._turn(run)
                    if best is None or key < best[0]:
                        best = key, run
        return None if best is None else best[1]

    def _turn(self, run: Run) -> _Turn:
        """Return a key that is smaller for runs that are next.

        The least served caller, then its best priority, then its least served user, then arrival. Equally served
        callers are ordered by their rows and arrival, so that no priority counts between them.
        """
        caller, user = self._of(run)
        return (caller.computed, caller.running, caller.number), run.task.priority, user.computed, run.order

    def _fits(self, run: Run) -> bool:
        """Return True if there is memory for a run's tokens beside those of the others."""
        owned = self._rows.owned_tokens
        pending = sum(len(each.tokens) - each.computed for each in self._rows.owners)
        needed = owned + pending + len(run.tokens) + _HEADROOM * (len(self._rows.owners) + 1)
        return needed <= self._limits.cache_tokens or not self._rows.owners

    def _make_way(self, run: Run, now_ns: int) -> bool:
        """Put back another run for the sake of this one, if there is one that gives way.

        Runs give way to the first row of a caller if their own has more than an equal share of the rows; within a
        caller, to runs of a better priority, and to the first row of a user likewise.
        """
        owners = self._rows.owners
        caller, user = self._of(run)
        share = max(self._limits.sequences // len(self._callers), 1)
        own = [each for each in owners if each.task.caller == run.task.caller]
        worse = [each for each in own if each.task.priority > run.task.priority]
        if not worse and not caller.running:
            worse = [each for each in owners if self._of(each)[0].running > share]
        if not worse and not user.running:
            part = max(share // len(caller.users), 1)
            # never a better priority, whose run would take the row back at once
            peers = [each for each in own if each.task.priority == run.task.priority]
            worse = [each for each in peers if self._of(each)[1].running > part]
        if not worse:
            return False
        self._put_back(max(worse, key=self._entitlement), now_ns)
        return True

    def _entitlement(self, run: Run) -> tuple[int, int, int, int]:
        """Return a key that is larger for runs that should be put back sooner."""
        caller, user = self._of(run)
        return caller.running, run.task.priority, user.running, run.order

    def _put_back(self, run: Run, now_ns: int) -> None:
        self._copies += self._rows.release(run, keep=self._limits.prefix_cache)
        self._count_rows(run, -1)
        self._of(run)[1].waiting.insert(0, run)
        run.queue.put_back(now_ns)
        self.preemptions += 1

    # -- Memory and parts ----------------------------------------------------------------------------------------------

    def _decoding_within_memory(self, now_ns: int) -> list[Run]:
        """Return the runs that decode in this step, in the order of their rows.

        Runs are put back until one more token of each fits into memory.
        """
        while True:
            decoding = [run for run in self._rows.owners if run.decodes]
            if self._rows.owned_tokens + len(decoding) <= self._limits.cache_tokens or len(self._rows.owners) < 2:
                return decoding
            self._put_back(max(self._rows.owners, key=self._entitlement), now_ns)

    def _trim(self) -> None:
        """Forget kept prompts until the memory's limit holds."""
        while self.cache_tokens > self._limits.cache_tokens and self._rows.drop_oldest():
            pass

    def _prefill(self, budget: int, decoding: int, extensions: list[Extension], runs: list[Run]) -> None:
        """Append parts of prompts within the budget, at least one if nothing else runs."""
        room = self._limits.cache_tokens - self._rows.owned_tokens - decoding
        reading = [run for run in self._rows.owners if not run.decodes]
        reading.sort(key=self._turn)
        for run in reading:
            part = self._part(run.left, min(budget, room), must=not decoding and not runs)
            if not part:
                continue
            begin = run.computed
            tokens = run.tokens[begin : begin + part]
            last = begin + part == len(run.prompt)
            fresh = not run.generated  # otherwise its first token is known
            wanted = 1 if last and fresh else 0
            if run.task.prompt_logprobs is not None and fresh:
                wanted = part
            extensions.append(Extension(run.row, begin, tokens, wanted))
            runs.append(run)
            budget -= part
            room -= part
        while self.cache_tokens + decoding + sum(len(each.tokens) for each in extensions) > self._limits.cache_tokens:
            if not self._rows.drop_oldest():
                return

    def _part(self, left: int, budget: int, *, must: bool) -> int:
        """Return the number of prompt tokens to compute, 0 for none.

        The rest is never a single token, and no part leaves a single token over in blocks of four.
        """
        if left <= 1:
            return left if budget >= 1 or must else 0
        part = min(left, self._limits.prefill_chunk, max(budget, 0))
        while part >= _LEAST_PART and (part % _BLOCK == 1 or left - part == 1):
            part -= 1
        if part >= _LEAST_PART:
            return part
        least = _LEAST_PART if left != _LEAST_PART + 1 else left
        return least if must else 0


def _least(shares: Iterable[_Caller | _User]) -> float:
    """Return the computed tokens of the least served one.

    A new one starts level with it, because idle time earns no credit.
    """
    return min((each.computed for each in shares), default=0.0)
