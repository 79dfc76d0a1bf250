"""Tests of ``remora_llm.generation.planner`` and ``remora_llm.generation.rows``: safety, maximality and promptness."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora_llm.generation.planner import Planner, PlannerLimits, StepPlan
from remora_llm.generation.rows import Run
from remora_llm.generation.tasks import Task


class Simulation:
    """Runs over rows that are lists of tokens, as a stepper has them."""

    def __init__(self, **limits: int | bool) -> None:
        chosen: dict[str, int | bool] = {"rows": 5, "sequences": 4, "cache_tokens": 4096} | limits
        self.limits = PlannerLimits(**chosen)
        self.planner = Planner(self.limits)
        self.rows: list[list[int]] = [[] for _ in range(self.limits.rows)]
        self.alive: dict[Run, int] = {}
        self.first_step: dict[Run, int] = {}
        self.steps = 0
        self._order = 0

    def add(self, prompt: list[int], answer: int, user: str = "", priority: int = 0, caller: str = "") -> Run:
        task = Task(tuple(prompt), max(answer, 1), caller=caller, user=user, priority=priority)
        run = Run(task, 0, self._order)
        self._order += 1
        self.alive[run] = answer
        self.planner.add(run)
        return run

    def step(self) -> StepPlan:
        plan = self.planner.plan(0)
        self.steps += 1
        for source, target, tokens in plan.copies:
            assert source != target
            assert tokens <= len(self.rows[source])
            self.rows[target] = self.rows[source][:tokens]
        assert len({each.row for each in plan.extensions}) == len(plan.extensions)
        decoding = sorted(each.row for each in plan.extensions if len(each.tokens) == 1 and each.start)
        assert decoding == list(range(len(decoding)))
        for run, (row, start, tokens, wanted) in zip(plan.runs, plan.extensions, strict=True):
            assert len(self.rows[row]) >= start
            self.rows[row][start:] = tokens
            # whatever was copied, shared or computed again: the row holds the run's own tokens
            assert self.rows[row] == run.tokens[: len(self.rows[row])]
            if start < len(run.prompt):
                assert start + len(tokens) <= len(run.prompt)
                assert len(tokens) % 4 != 1 or len(run.prompt) == 1
            else:
                assert len(tokens) == 1
            self.first_step.setdefault(run, self.steps)
            if wanted and run.decodes:
                assert start + len(tokens) == len(run.tokens)
                run.tokens.append((sum(run.tokens) * 31 + len(run.tokens)) % 997)
                if run.generated >= self.alive[run]:
                    self.end(run)
        assert self.planner.cache_tokens <= self.limits.cache_tokens
        assert len(self.planner.running) <= self.limits.sequences
        return plan

    def end(self, run: Run) -> None:
        del self.alive[run]
        self.planner.remove(run)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.sampled_from([64, 150, 4096]))
def test_rows_hold_what_their_runs_need_and_everything_ends(seed: int, prefix_cache: bool, memory: int) -> None:
    chance = random.Random(seed)
    simulation = Simulation(cache_tokens=memory, prefix_cache=prefix_cache, prefill_chunk=16, step_tokens=24)
    shared = [[chance.randrange(100) for _ in range(30)] for _ in range(2)]
    for _ in range(60):
        if chance.random() < 0.4:
            prompt = [*chance.choice(shared)[: chance.randrange(31)], chance.randrange(100)]
            answer = chance.randrange(1, 30)
            simulation.add(prompt, answer, chance.choice("abc"), chance.randrange(2))
        if simulation.alive and chance.random() < 0.15:
            simulation.end(chance.choice(list(simulation.alive)))
        simulation.step()
    for _ in range(20_000):
        if not simulation.alive:
            break
        simulation.step()
    assert not simulation.alive
    assert simulation.planner.is_idle
    assert simulation.planner.running == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_no_step_is_empty_while_there_is_work_and_every_run_that_can_write_does(seed: int) -> None:
    chance = random.Random(seed)
    simulation = Simulation(prefill_chunk=16, step_tokens=24)
    for _ in range(12):
        simulation.add([chance.randrange(100) for _ in range(chance.randrange(1, 60))], chance.randrange(1, 20))
    while simulation.alive:
        writing = {run for run in simulation.planner.running if run.decodes}
        plan = simulation.step()
        assert plan.extensions
        assert writing <= set(plan.runs)
        waiting = sum(simulation.planner.waiting_by_caller.values())
        assert not waiting or len(plan.runs) + len(simulation.planner.running) >= simulation.limits.sequences


def test_a_long_prompt_delays_writers_by_no_step_and_is_read_in_parts() -> None:
    simulation = Simulation(prefill_chunk=8, step_tokens=16)
    writer = simulation.add([1, 2, 3], 100)
    simulation.step()
    reader = simulation.add(list(range(200)), 1)
    while reader in simulation.alive:
        before = writer.generated
        plan = simulation.step()
        assert writer.generated == before + 1
        assert sum(len(each.tokens) for each in plan.extensions) <= 16


def test_a_short_request_beside_a_user_with_forty_long_prompts_begins_within_two_steps() -> None:
    simulation = Simulation(rows=17, sequences=16, cache_tokens=1 << 20)
    for _ in range(40):
        simulation.add(list(range(1000)), 500, user="many")
    for _ in range(30):
        simulation.step()
    short = simulation.add([1, 2, 3, 4], 3, user="one")
    begin = simulation.steps
    while short in simulation.alive:
        simulation.step()
    assert simulation.first_step[short] - begin <= 2
    assert simulation.steps - begin <= 2 * 3 + 2  # alone it takes three steps


def test_users_get_equal_shares_whatever_number_of_requests_they_have() -> None:
    simulation = Simulation(rows=5, sequences=4, cache_tokens=1 << 20)
    for user, count in (("a", 30), ("b", 3), ("c", 3)):
        for _ in range(count):
            simulation.add(list(range(40)), 60, user=user)
    computed: Counter[str] = Counter()
    for _ in range(150):
        for run, extension in zip((plan := simulation.step()).runs, plan.extensions, strict=True):
            computed[run.task.user] += len(extension.tokens)
    assert computed["b"] >= 0.2 * sum(computed.values())
    assert computed["c"] >= 0.2 * sum(computed.values())


@pytest.mark.parametrize("claims", ["users", "priorities", "both"])
def test_callers_get_equal_shares_whatever_users_and_priorities_their_requests_name(claims: str) -> None:
    simulation = Simulation(rows=5, sequences=4, cache_tokens=1 << 20, prefix_cache=False)
    for number in range(40):
        named = {"user": f"{number}"} if claims != "priorities" else {}
        simulation.add([1] * 40, 60, caller="a", **named, priority=-number if claims != "users" else 0)  # type: ignore[arg-type]
        simulation.add([1] * 40, 60, caller="b", priority=5)
    computed: Counter[str] = Counter()
    for _ in range(200):
        for run, extension in zip((plan := simulation.step()).runs, plan.extensions, strict=True):
            computed[run.task.caller] += len(extension.tokens)
    assert 0.45 <= computed["a"] / sum(computed.values()) <= 0.55


def test_a_callers_first_request_gets_a_row_from_the_caller_with_most_whatever_that_claims() -> None:
    simulation = Simulation(rows=5, sequences=4, cache_tokens=1 << 20)
    urgent = [simulation.add([1, 2, 3], 50, caller="a", user=f"{number}", priority=-9) for number in range(20)]
    simulation.step()
    late = simulation.add([4, 5, 6], 5, caller="b", priority=9)
    simulation.step()
    assert late.row >= 0
    assert sum(run.row >= 0 for run in urgent) == 3


def test_within_a_caller_priority_and_users_count_as_before() -> None:
    simulation = Simulation(rows=3, sequences=2)
    low = [simulation.add([1, 2, 3], 50, caller="a", user="u", priority=1) for _ in range(4)]
    simulation.step()
    high = simulation.add([4, 5, 6], 5, caller="a", user="v", priority=0)
    simulation.step()
    assert high.row >= 0
    assert sum(run.row >= 0 for run in low) == 1


def test_a_better_priority_goes_first_and_takes_a_row() -> None:
    simulation = Simulation(rows=3, sequences=2)
    low = [simulation.add([1, 2, 3], 50, priority=1) for _ in range(4)]
    simulation.step()
    high = simulation.add([4, 5, 6], 5, priority=0)
    simulation.step()
    assert high.row >= 0
    assert sum(run.row >= 0 for run in low) == 1
    assert sum(run.queue.preemptions for run in low) == 1


def test_the_newest_of_the_user_with_most_rows_is_put_back_when_memory_is_full() -> None:
    simulation = Simulation(rows=5, sequences=4, cache_tokens=160, prefix_cache=False)
    first = simulation.add(list(range(20)), 60, user="a")
    second = simulation.add(list(range(20, 40)), 60, user="a")
    other = simulation.add(list(range(40, 60)), 60, user="b")
    while not simulation.planner.preemptions:
        simulation.step()
    assert (first.queue.preemptions, second.queue.preemptions, other.queue.preemptions) == (0, 1, 0)


@pytest.mark.parametrize("left", [*range(1, 70), 127, 128, 129, 130, 257])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 16, 64, 1000])
def test_parts_leave_no_single_position(left: int, budget: int) -> None:
    planner = Simulation(prefill_chunk=128).planner
    for must in (False, True):
        part = planner._part(left, budget, must=must)
        assert part <= left
        assert part <= max(min(budget, 128), 3 if must else 0)
        assert part > 0 or not must
        assert left - part != 1 or not part
        assert part == left == 1 or part % 4 != 1


@pytest.mark.parametrize("ended", [True, False], ids=["an ended request", "a running request"])
def test_a_prompt_is_reused_for_its_own_caller_alone(ended: bool) -> None:
    simulation = Simulation(rows=7, sequences=4, prefill_chunk=64)
    first = simulation.add([9] * 40, 2 if ended else 500, caller="a")
    while first in simulation.alive if ended else not first.decodes:
        simulation.step()
    others = {caller: simulation.add([9] * 40, 1, caller=caller) for caller in ("b", "", "a")}
    while any(run in simulation.alive for run in others.values()):
        simulation.step()
    assert {caller: run.cached for caller, run in others.items()} == {"b": 0, "": 0, "a": 38}


def test_prompts_are_shared_only_up_to_their_common_beginning() -> None:
    simulation = Simulation(rows=5, sequences=1, prefill_chunk=64)
    for tail in ([1], [2], [1]):
        run = simulation.add([9] * 40 + tail, 2)
        while run in simulation.alive:
            simulation.step()
        assert run.cached in (0, 39)
    assert simulation.planner.prefix_hits == 2 * 39
