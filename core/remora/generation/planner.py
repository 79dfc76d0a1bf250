"""Planning of a language model's steps: admission, prefill, decode and preemption. Pure.

Each step carries one token of every run that decodes and, within a budget, parts of prompts, so that a long prompt
delays no other request for longer than one step. Users share rows and prompt tokens equally: of several users with
waiting work, the one with the fewest computed tokens is next.

Invariants: no part of a prompt makes a kernel compute a single position, because matrix products of one row are rounded
otherwise than those of several: a part has at least two tokens, and not one more than a multiple of four. Tokens of an
answer are always computed one at a time, also when a run that was put back is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from remora.generation import Extension
from remora.generation.rows import Copy, RowTable, Run

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
    """Runs and computed tokens of one user."""

    computed: float
    waiting: list[Run] = field(default_factory=list)
    running: int = 0


class Planner:
    """State of all runs of a model. Not thread-safe; the caller passes the time."""

    def __init__(self, limits: PlannerLimits) -> None:
        self._limits = limits
        self._rows = RowTable(limits.rows, decode_first=limits.decode_first)
        self._users: dict[str, _User] = {}
        self._copies: list[Copy] = []
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0

    @property
    def running(self) -> list[Run]:
        """The runs with a row, by row."""
        return self._rows.owners

    @property
    def waiting(self) -> int:
        """Number of runs without a row."""
        return sum(len(user.waiting) for user in self._users.values())

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
        return not self._users

    def add(self, run: Run) -> None:
        """Queue a run."""
        name = run.task.user
        user = self._users.get(name)
        if user is None:
            # A new user starts level with the least served one: idle time earns no credit.
            least = min((each.computed for each in self._users.values()), default=0.0)
            user = self._users[name] = _User(least)
        user.waiting.append(run)

    def remove(self, run: Run, *, keep: bool = True) -> None:
        """Forget a run that has ended. Its prompt is kept for reuse."""
        user = self._users[run.task.user]
        if run.row >= 0:
            self._copies += self._rows.release(run, keep=keep and self._limits.prefix_cache)
            user.running -= 1
        else:
            user.waiting.remove(run)
        if not user.running and not user.waiting:
            del self._users[run.task.user]

    def lose_rows(self) -> list[Run]:
        """Forget the contents of all rows and return their runs, which the caller removes."""
        lost = self._rows.owners
        self._rows.clear()
        self._copies.clear()
        for run in lost:
            user = self._users[run.task.user]
            user.running -= 1
            user.waiting.append(run)
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
            self._users[run.task.user].computed += len(extension.tokens)
        copies, self._copies = self._copies, []
        return StepPlan(copies, extensions, runs, late)

    # -- Admission -----------------------------------------------------------------------------------------------------

    def _all(self) -> Iterable[Run]:
        return [*self._rows.owners, *(run for user in self._users.values() for run in user.waiting)]

    def _admit(self, now_ns: int) -> None:
        while (run := self._next_waiting()) is not None:
            if len(self._rows.owners) >= self._limits.sequences and not self._make_way(run, now_ns):
                return
            if not self._fits(run):
                return
            user = self._users[run.task.user]
            user.waiting.remove(run)
            user.running += 1
            run.admitted_ns = run.admitted_ns or now_ns
            if run.preempted_ns:
                run.put_back_ns += now_ns - run.preempted_ns
                run.preempted_ns = 0
            reuse = self._limits.prefix_cache and run.task.reuse and run.task.prompt_logprobs is None
            shares = run.leader is not None and run.task.prompt_logprobs is None and run.task.reuse
            self._copies += self._rows.take(run, reuse=reuse or shares, least=1 if shares else _LEAST_REUSE)
            if not run.generated:
                self.prefix_queries += len(run.prompt)
                self.prefix_hits += run.computed
            self._trim()

    def _next_waiting(self) -> Run | None:
        """Return the run to admit next: by priority, then the least served user, then arrival."""
        best: tuple[tuple[int, float, int], Run] | None = None
        for user in self._users.values():
            for run in user.waiting:
                leader = run.leader
                if leader is not None and leader.row >= 0 and not leader.decodes:
                    continue  # its prompt is being computed for this run, too
                key = (run.task.priority, user.computed, run.order)
                if best is None or key < best[0]:
                    best = key, run
        return None if best is None else best[1]

    def _fits(self, run: Run) -> bool:
        """Return True if there is memory for a run's tokens beside those of the others."""
        owned = self._rows.owned_tokens
        pending = sum(len(each.tokens) - each.computed for each in self._rows.owners)
        needed = owned + pending + len(run.tokens) + _HEADROOM * (len(self._rows.owners) + 1)
        return needed <= self._limits.cache_tokens or not self._rows.owners

    def _make_way(self, run: Run, now_ns: int) -> bool:
        """Put back a run of a user with more than an equal share of the rows, if there is one.

        Only for the first row of a user, and for runs of a better priority.
        """
        owners = self._rows.owners
        worse = [each for each in owners if each.task.priority > run.task.priority]
        if not worse and not self._users[run.task.user].running:
            share = max(self._limits.sequences // len(self._users), 1)
            # never a better priority, whose run would take the row back at once
            peers = [each for each in owners if each.task.priority == run.task.priority]
            worse = [each for each in peers if self._users[each.task.user].running > share]
        if not worse:
            return False
        self._put_back(max(worse, key=self._entitlement), now_ns)
        return True

    def _entitlement(self, run: Run) -> tuple[int, int, int]:
        """Return a key that is larger for runs that should be put back sooner."""
        return run.task.priority, self._users[run.task.user].running, run.order

    def _put_back(self, run: Run, now_ns: int) -> None:
        user = self._users[run.task.user]
        self._copies += self._rows.release(run, keep=self._limits.prefix_cache)
        user.running -= 1
        user.waiting.insert(0, run)
        run.preemptions += 1
        run.preempted_ns = now_ns
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
        reading.sort(key=lambda run: (run.task.priority, self._users[run.task.user].computed, run.order))
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
