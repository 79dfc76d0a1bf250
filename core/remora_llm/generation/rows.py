"""Assignment of a stepper's rows to runs, and of prompts for reuse. Pure.

Invariants: the runs that decode have the first rows, without gaps; a row has at most one owner; a copy never reads
tokens that an earlier copy of the same list has overwritten.

A prompt is reused for the caller that sent it alone, because the tokens that were saved are visible to a client.

Only tokens of prompts are reused, because a token that was computed in a decode step may differ in its last bits from
one that was computed with the tokens beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remora_llm.generation.tasks import Task

_Prompt = npt.NDArray[np.int32]


class QueueTimes:
    """Times and preemptions of a run in the queue for a row.

    Attributes:
        arrival_ns: when the engine got the task.
        admitted_ns: when the run got its first row, 0 without one.
        preempted_ns: when the run was put back, 0 if it waits for no row again.
        grammar_ns, preemptions, put_back_ns: see `Usage`.
    """

    __slots__ = ("admitted_ns", "arrival_ns", "grammar_ns", "preempted_ns", "preemptions", "put_back_ns")

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.admitted_ns = 0
        self.preempted_ns = 0
        self.grammar_ns = 0
        self.preemptions = 0
        self.put_back_ns = 0

    def admit(self, now_ns: int) -> None:
        """Record that the run got a row."""
        self.admitted_ns = self.admitted_ns or now_ns
        if self.preempted_ns:
            self.put_back_ns += now_ns - self.preempted_ns
            self.preempted_ns = 0

    def put_back(self, now_ns: int) -> None:
        """Record that the run lost its row to another."""
        self.preemptions += 1
        self.preempted_ns = now_ns


class Run:
    """State of one choice of a task, owned by the planner.

    Attributes:
        tokens: prompt and answer.
        prompt: the prompt as an array.
        computed: number of tokens that are in the row.
        row: -1 without a row.
        cached: number of prompt tokens that the prefix cache saved.
        promoted: the row is among those that decode.
        order: number of the run by arrival.
        leader: the run of choice 0, whose prompt the other choices wait for.
        queue: its times without a row.

    Its times are those of `Usage`; ``first_ns`` and ``last_ns`` are when its first and last tokens were written.
    """

    __slots__ = (
        "answer_steps_ns", "cached", "choice", "computed", "first_ns", "last_ns", "leader", "loop_ns", "order",
        "other_steps_ns", "promoted", "prompt", "prompt_steps_ns", "queue", "row", "rows_beside", "steps", "task",
        "tokens",
    )  # fmt: skip

    def __init__(self, task: Task, choice: int, order: int = 0, arrival_ns: int = 0, leader: Run | None = None) -> None:
        self.task = task
        self.choice = choice
        self.order = order
        self.leader = leader
        self.tokens: list[int] = list(task.prompt)
        self.prompt: _Prompt = leader.prompt if leader is not None else np.asarray(task.prompt, np.int32)
        self.computed = 0
        self.row = -1
        self.cached = 0
        self.promoted = False
        self.queue = QueueTimes(arrival_ns)
        self.first_ns = 0
        self.last_ns = 0
        self.prompt_steps_ns = 0
        self.answer_steps_ns = 0
        self.other_steps_ns = 0
        self.loop_ns = 0
        self.steps = 0
        self.rows_beside = 0

    @property
    def decodes(self) -> bool:
        """True if the prompt is computed."""
        return self.computed >= len(self.prompt)

    @property
    def left(self) -> int:
        """Number of prompt tokens that are not computed."""
        return max(len(self.prompt) - self.computed, 0)

    @property
    def generated(self) -> int:
        """Number of tokens of the answer."""
        return len(self.tokens) - len(self.prompt)


class Copy(NamedTuple):
    """Copy of the first ``tokens`` tokens of a row to another row."""

    source: int
    target: int
    tokens: int


class RowTable:
    """Owners and reusable prompts of all rows.

    Args:
        rows: number of rows.
        decode_first: the runs that decode must have the first rows.
    """

    def __init__(self, rows: int, *, decode_first: bool = True) -> None:
        self._owners: list[Run | None] = [None] * rows
        self._kept: list[_Prompt | None] = [None] * rows
        self._callers = [""] * rows
        """The callers of the kept prompts."""
        self._used: list[int] = [0] * rows
        self._decode_first = decode_first
        self._tick = 0
        self.decoding = 0
        """Number of rows that decode."""

    @property
    def owned_tokens(self) -> int:
        """Number of tokens in rows with an owner."""
        return sum(run.computed for run in self._owners if run is not None)

    @property
    def kept_tokens(self) -> int:
        """Number of tokens in rows without an owner, for reuse."""
        return sum(len(kept) for kept in self._kept if kept is not None)

    @property
    def owners(self) -> list[Run]:
        """The runs with rows, by row."""
        return [run for run in self._owners if run is not None]

    def find(self, run: Run) -> tuple[int, int]:
        """Return the row with the longest reusable prefix of a run's prompt, and its length.

        At least two tokens of the prompt are left to compute. Returns (-1, 0) without a prompt to reuse.
        """
        best, length = -1, 0
        most = len(run.prompt) - 2
        for row, (owner, kept) in enumerate(zip(self._owners, self._kept, strict=True)):
            there = kept if owner is None else owner.prompt[: owner.computed]
            caller = self._callers[row] if owner is None else owner.task.caller
            if there is None or owner is run or caller != run.task.caller:
                continue
            size = min(len(there), most)
            if size <= length:
                continue
            differing = np.flatnonzero(there[:size] != run.prompt[:size])
            size = int(differing[0]) if len(differing) else size
            if size > length:
                best, length = row, size
        return best, length

    def take(self, run: Run, *, reuse: bool, least: int) -> list[Copy]:
        """Give a run a row, with at least ``least`` tokens of its prompt if they are in another one."""
        self._tick += 1
        source, length = self.find(run) if reuse else (-1, 0)
        if length < least:
            source, length = -1, 0
        kept = self._kept[source] if source >= 0 else None
        if kept is not None and (len(kept) == length or not self._has_empty()):
            row, copies = source, []  # the run continues in that row
        else:
            row = self._free_row(avoid=source)
            copies = [Copy(source, row, length)] if length else []
        if source >= 0:
            self._used[source] = self._tick
        self._kept[row] = None
        self._owners[row] = run
        run.row, run.computed, run.cached = row, length, length
        return copies

    def promote(self, run: Run) -> list[Copy]:
        """Move a run whose prompt is computed to the rows that decode."""
        row, target = run.row, self.decoding
        self.decoding += 1
        run.promoted = True
        if row == target or not self._decode_first:
            return []
        copies: list[Copy] = []
        occupant = self._owners[target]
        if occupant is not None:
            spare = self._free_row(avoid=row)
            copies.append(Copy(target, spare, occupant.computed))
            self._owners[spare], occupant.row = occupant, spare
            self._kept[spare] = None
        elif (kept := self._kept[target]) is not None:
            self._kept[target] = None
            spare = self._empty_row(avoid=target)
            if spare >= 0:
                copies.append(Copy(target, spare, len(kept)))
                self._kept[spare], self._used[spare] = kept, self._used[target]
                self._callers[spare] = self._callers[target]
        copies.append(Copy(row, target, run.computed))
        self._owners[row], self._owners[target], run.row = None, run, target
        return copies

    def release(self, run: Run, *, keep: bool) -> list[Copy]:
        """Take the row from a run and close the gap. ``keep`` its prompt for reuse if there is room."""
        row = run.row
        self._tick += 1
        self._owners[row], run.row = None, -1
        prompt = run.prompt[: min(run.computed, len(run.prompt))] if keep else run.prompt[:0]
        promoted, run.promoted, run.computed = run.promoted, False, 0
        if not promoted:
            self._keep(row, prompt, run.task.caller)
            return []
        self.decoding -= 1
        last = self.decoding
        if row == last or not self._decode_first:
            self._keep(row, prompt, run.task.caller)
            return []
        copies: list[Copy] = []
        if len(prompt):
            spare = self._free_row(avoid=row)
            copies.append(Copy(row, spare, len(prompt)))
            self._keep(spare, prompt, run.task.caller)
        moved = self._owners[last]
        assert moved is not None
        copies.append(Copy(last, row, moved.computed))
        self._owners[last], self._owners[row], moved.row = None, moved, row
        return copies

    def drop_oldest(self) -> bool:
        """Forget the kept prompt that was used least recently. Return False if there is none."""
        kept = [row for row, each in enumerate(self._kept) if each is not None]
        if not kept:
            return False
        self._kept[min(kept, key=self._used.__getitem__)] = None
        return True

    def clear(self) -> None:
        """Forget all owners and prompts, because the contents of the rows are undefined."""
        for run in self.owners:
            run.row, run.computed, run.promoted = -1, 0, False
        size = len(self._owners)
        self._owners, self._kept, self.decoding = [None] * size, [None] * size, 0

    def _keep(self, row: int, prompt: _Prompt, caller: str) -> None:
        self._kept[row] = prompt if len(prompt) else None
        self._callers[row] = caller
        self._used[row] = self._tick

    def _has_empty(self) -> bool:
        return self._empty_row(avoid=-1) >= 0

    def _empty_row(self, avoid: int) -> int:
        """Return a row with neither owner nor prompt, preferably behind those that decode, or -1."""
        rows: list[int] = [*range(self.decoding, len(self._owners)), *range(self.decoding)]
        for row in rows:
            if row != avoid and self._owners[row] is None and self._kept[row] is None:
                return row
        return -1

    def _free_row(self, avoid: int) -> int:
        """Return a row without an owner, forgetting a kept prompt if necessary."""
        row = self._empty_row(avoid)
        if row >= 0:
            return row
        free = [(self._used[each], each) for each, owner in enumerate(self._owners) if owner is None and each != avoid]
        return min(free)[1]
