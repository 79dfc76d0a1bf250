"""Circles of calls: examples, and random systems of models in which all requests end and no refusal is needless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from remora.models.call_circles import Wait, Waits


class Model:
    def __init__(self, name: str, count: int) -> None:
        self.instances = [f"{name}_{index}" for index in range(count)]


class Asked:
    """A request; ``start_ns`` and ``request`` are what a ticket has."""

    def __init__(self) -> None:
        self.start_ns = 0

    @property
    def request(self) -> object:
        return self


def waiting(waits: Waits, holder: object | None, made_for: Asked, callee: Model) -> Asked | None:
    """The request of a call that was admitted."""
    wait = Wait(holder, (made_for,), callee)
    if not waits.admit(wait):
        return None
    wait.ticket = Asked()
    return wait.ticket


def test_a_call_to_an_idle_instance_of_its_own_model_is_admitted_and_the_last_one_refused() -> None:
    model, waits, request = Model("m", 3), Waits(), Asked()
    for instance in model.instances[:2]:
        called = waiting(waits, instance, request, model)
        assert called is not None
        called.start_ns, request = 1, called
    assert waiting(waits, model.instances[2], request, model) is None


def test_a_circle_between_requests_is_refused_where_it_closes() -> None:
    waits, left, right = Waits(), Model("left", 1), Model("right", 1)
    assert waiting(waits, "left_0", Asked(), right) is not None
    assert waiting(waits, "right_0", Asked(), left) is None, "each holds what the other one waits for"


def test_a_call_is_admitted_again_when_what_it_would_wait_for_has_ended() -> None:
    waits, model = Waits(), Model("m", 2)
    other = Wait("m_1", (Asked(),), model)
    assert waits.admit(other)
    assert waiting(waits, "m_0", Asked(), model) is None
    waits.end(other)
    waits.end(other)
    assert waiting(waits, "m_0", Asked(), model) is not None


def test_a_call_that_runs_on_an_instance_without_calls_goes_on() -> None:
    waits, left, right = Waits(), Model("left", 1), Model("right", 1)
    called = waiting(waits, "left_0", Asked(), right)
    assert called is not None
    called.start_ns = 1
    assert waiting(waits, "right_0", Asked(), left) is not None, "'right_0' has left the call to run by itself"


def test_an_instance_that_comes_later_may_answer() -> None:
    waits, model, other = Waits(), Model("m", 1), Model("other", 1)
    assert waiting(waits, "other_0", Asked(), model) is not None
    model.instances.append("m_1")
    assert waiting(waits, "m_0", Asked(), other) is not None


def test_code_that_holds_no_instance_closes_a_circle_too() -> None:
    waits, model, streaming = Waits(), Model("m", 1), Model("streaming", 1)
    called = waiting(waits, "m_0", Asked(), streaming)
    assert called is not None
    called.start_ns = 1
    assert waiting(waits, None, called, model) is None, "'m_0' waits for the request that this call is made for"


# -- random systems -------------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """A request to a model, and the calls that its execution makes: one after the other, or all at once."""

    model: int
    calls: tuple[Script, ...] = ()
    gathers: bool = False


@dataclass(eq=False)
class Running:
    """A request from its queue to its end."""

    script: Script
    wait: Wait | None = None
    asked: Asked = field(default_factory=Asked)
    instance: str = ""
    made: int = 0
    open: list[Running] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        left = self.made < len(self.script.calls)
        return bool(self.instance) and (not self.open or (self.script.gathers and left))


class System:
    """Models, what runs on them, and what waits. With ``waits`` None, nothing is refused."""

    def __init__(self, counts: list[int], scripts: list[Script], waits: Waits | None) -> None:
        self.models = [Model(f"m{index}", count) for index, count in enumerate(counts)]
        self.waits = waits
        self.queued = [Running(script) for script in scripts]
        self.running: list[Running] = []
        self.parents: dict[Running, Running] = {}
        self.refused = 0

    def choices(self) -> Iterator[tuple[Running, str]]:
        """What may happen next: a request gets an instance, or one that runs goes on."""
        busy = {each.instance for each in self.running}
        for each in self.queued:
            for instance in self.models[each.script.model].instances:
                if instance not in busy:
                    yield each, instance
        for each in self.running:
            if each.may_go_on:
                yield each, ""

    def do(self, each: Running, instance: str) -> None:
        if instance:
            self.queued.remove(each)
            self.running.append(each)
            each.instance = instance
            each.asked.start_ns = 1
        elif each.made < len(each.script.calls):
            self._call(each)
        else:
            self._finish(each)

    def _call(self, each: Running) -> None:
        script = each.script.calls[each.made]
        each.made += 1
        child = Running(script)
        if self.waits is not None:
            wait = Wait(each.instance, (each.asked,), self.models[script.model])
            if not self.waits.admit(wait):
                assert self.cannot_end(each, script), "a call was refused that could have been answered"
                self.refused += 1
                return
            wait.ticket = child.asked
            child.wait = wait
        self.parents[child] = each
        each.open.append(child)
        self.queued.append(child)

    def _finish(self, each: Running) -> None:
        self.running.remove(each)
        parent = self.parents.pop(each, None)
        if parent is not None:
            parent.open.remove(each)
        if each.wait is not None and self.waits is not None:
            self.waits.end(each.wait)

    def cannot_end(self, caller: Running, script: Script) -> bool:
        """Whether a call made now would never run, however all others do: with them, nothing refused, and each of them
        making none of the calls that it has not made yet, so that they end as soon as they can."""
        open_ones = {each: list(each.open) for each in self.running}
        queued = {each: each.script.model for each in self.queued}
        mine = Running(script)
        queued[mine] = script.model
        open_ones[caller] = [*open_ones[caller], mine]
        on = {each: each.instance for each in self.running}
        while True:
            done = [each for each, children in open_ones.items() if not children]
            for each in done:
                del open_ones[each], on[each]
                for children in open_ones.values():
                    if each in children:
                        children.remove(each)
            idle = [
                (each, instance)
                for each, model in queued.items()
                for instance in self.models[model].instances
                if instance not in on.values()
            ]
            if idle:
                # What gets an instance here ends at once and frees it: the order makes no difference.
                each, instance = idle[0]
                del queued[each]
                if each is mine:
                    return False
                on[each], open_ones[each] = instance, []
            elif not done:
                return True


MODELS = st.sampled_from([0, 1, 2])
scripts = st.recursive(
    MODELS.map(Script),
    lambda inner: st.tuples(MODELS, st.lists(inner, max_size=3).map(tuple), st.booleans()).map(
        lambda made: Script(*made)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=3), st.lists(scripts, min_size=1, max_size=6), st.randoms())
def test_every_request_ends_and_only_calls_that_never_would_are_refused(
    counts: list[int], asked: list[Script], random: object
) -> None:
    system = System(counts, asked, Waits())
    while choices := list(system.choices()):
        system.do(*random.choice(choices))  # type: ignore[attr-defined]
    assert not system.queued, "a request waits for ever"
    assert not system.running, "an execution waits for ever"
    assert not system.waits._waits, "a call is left behind"  # type: ignore[union-attr]
