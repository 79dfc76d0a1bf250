"""Which steps run when: each once, only when its inputs are there, as early as that allows [E02, E05, E07]."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from remora.scheduling.ensembles import plan as ensembles
from remora.scheduling.ensembles.plan import EnsemblePlan, EnsembleRun, EnsembleStep, Progress, Start
from support.engine.fakes import config_of


def step(number: int, inputs: str, outputs: str, *, model: str = "", decoupled: bool = False) -> EnsembleStep:
    """A step whose model calls its tensors as the ensemble does; names are single letters."""
    pairs = [tuple((name, name) for name in names) for names in (inputs, outputs)]
    return EnsembleStep(number, model or f"m{number}", -1, pairs[0], pairs[1], decoupled, ())


def plan_of(
    *steps: EnsembleStep, inputs: str = "a", outputs: str, optional: str = "", max_inflight: int = 0
) -> EnsemblePlan:
    return EnsemblePlan(steps, inputs, optional, outputs, max_inflight)


def begun(plan: EnsemblePlan, requested: str = "", **given: object) -> tuple[EnsembleRun[object], Progress[object]]:
    run: EnsembleRun[object] = EnsembleRun(plan, tuple(requested) or plan.outputs)
    return run, run.begin(given or {"a": "A"})


def numbers(starts: Iterable[Start[object]]) -> list[int]:
    return [start.step.number for start in starts]


# -- one answer -----------------------------------------------------------------------------------------------------


def test_a_step_starts_when_the_last_of_its_inputs_is_there() -> None:
    plan = plan_of(step(0, "a", "b"), step(1, "a", "c"), step(2, "bc", "d"), outputs="d")
    run, first = begun(plan)
    assert numbers(first.starts) == [0, 1]
    assert run.answered(first.starts[1], {"c": "C"}, final=True) == Progress([], [])
    last = run.answered(first.starts[0], {"b": "B"}, final=True)
    assert numbers(last.starts) == [2]
    assert last.starts[0].inputs == {"b": "B", "c": "C"}
    assert run.answered(last.starts[0], {"d": "D"}, final=True) == Progress([], [{"d": "D"}], ended=True)


def test_what_nothing_wanted_depends_on_does_not_run() -> None:
    plan = plan_of(step(0, "a", "bx"), step(1, "b", "c"), step(2, "x", "d"), outputs="cd")
    run, first = begun(plan, "c")
    assert numbers(first.starts) == [0]
    assert numbers(run.answered(first.starts[0], {"b": 1, "x": 2}, final=True).starts) == [1]


def test_a_step_does_not_change_what_the_request_gave() -> None:
    plan = plan_of(step(0, "a", "ab"), step(1, "ab", "c"), outputs="c")
    run, first = begun(plan)
    assert numbers(first.starts) == [0]
    (second,) = run.answered(first.starts[0], {"a": "other", "b": "B"}, final=True).starts
    assert second.inputs == {"a": "A", "b": "B"}


def test_outputs_come_in_the_configurations_order_turned_round() -> None:
    plan = plan_of(step(0, "a", "xyz"), outputs="yxz")
    run, first = begun(plan)
    (answer,) = run.answered(first.starts[0], {"x": 1, "y": 2, "z": 3}, final=True).answers
    assert list(answer) == ["z", "x", "y"]


def test_an_optional_input_that_is_not_given_is_left_out_of_the_step() -> None:
    plan = plan_of(step(0, "ab", "c"), inputs="ab", optional="b", outputs="c")
    _, first = begun(plan)
    assert first.starts[0].inputs == {"a": "A"}


def test_a_needed_input_that_is_not_given_leaves_the_run_stuck() -> None:
    plan = plan_of(step(0, "ab", "c"), inputs="ab", outputs="c")
    assert begun(plan)[1] == Progress([], [], ended=True, stuck=True)


def test_a_missing_input_does_not_hide_that_another_step_still_runs() -> None:
    plan = plan_of(step(0, "a", "c"), step(1, "b", "d"), inputs="ab", outputs="cd")
    run, first = begun(plan)
    assert not first.ended
    assert run.answered(first.starts[0], {"c": 1}, final=True) == Progress([], [], ended=True, stuck=True)


def test_an_output_that_a_step_does_not_return_counts_as_missing() -> None:
    plan = plan_of(step(0, "a", "bc"), step(1, "bc", "d"), outputs="dc")
    run, first = begun(plan)
    second = run.answered(first.starts[0], {"b": "B"}, final=True)
    assert second.starts[0].inputs == {"b": "B"}
    (answer,) = run.answered(second.starts[0], {"d": "D"}, final=True).answers
    assert answer == {"d": "D"}


def test_an_input_can_be_an_output_as_well() -> None:
    plan = plan_of(step(0, "a", "b"), outputs="ab")
    run, first = begun(plan)
    assert run.answered(first.starts[0], {"b": "B"}, final=True).answers == [{"b": "B", "a": "A"}]


def test_a_tensor_on_two_inputs_of_a_model_is_awaited_once_and_shared() -> None:
    twice = EnsembleStep(0, "m", -1, (("L", "a"), ("R", "a")), (("o", "b"),), False, ())
    plan = EnsemblePlan([twice], "a", "", "b")
    run, first = begun(plan)
    assert first.starts[0].inputs == {"L": "A", "R": "A"}
    assert run.is_shared("a")
    assert not run.is_shared("b")


def test_a_tensor_is_shared_when_the_answer_takes_it_besides_a_step() -> None:
    plan = plan_of(step(0, "a", "b"), step(1, "b", "c"), outputs="bc")
    assert begun(plan)[0].is_shared("b")
    assert not begun(plan, "c")[0].is_shared("b")


def test_values_are_released_after_their_last_reader() -> None:
    plan = plan_of(step(0, "a", "b"), step(1, "b", "c"), outputs="c")
    run, first = begun(plan)
    run.answered(run.answered(first.starts[0], {"b": "B"}, final=True).starts[0], {"c": "C"}, final=True)
    assert not run._values


# -- many answers ---------------------------------------------------------------------------------------------------


def decoupled_plan() -> EnsemblePlan:
    return plan_of(step(0, "a", "b", decoupled=True), step(1, "b", "c"), outputs="c")


def test_each_response_of_a_decoupled_step_runs_the_next_one() -> None:
    run, first = begun(decoupled_plan())
    assert run.streamed
    responses = [run.answered(first.starts[0], {"b": value}, final=False).starts[0] for value in "xyz"]
    assert [(start.iteration, start.inputs["b"]) for start in responses] == [(0, "x"), (1, "y"), (2, "z")]
    assert run.open(plan_step(run, 1)) == 3
    assert run.answered(first.starts[0], None, final=True) == Progress([], [])
    assert run.answered(responses[0], {"c": 1}, final=True).answers == [{"c": 1}]
    assert run.answered(responses[1], {"c": 2}, final=True).answers == [{"c": 2}]
    assert run.answered(responses[2], {"c": 3}, final=True) == Progress([], [{"c": 3}], ended=True)


def plan_step(run: EnsembleRun[object], number: int) -> EnsembleStep:
    return run._plan.steps[number]


def test_answers_keep_the_order_of_the_responses_whatever_finishes_first() -> None:
    run, first = begun(decoupled_plan())
    one, two = (run.answered(first.starts[0], {"b": value}, final=False).starts[0] for value in "xy")
    assert run.answered(two, {"c": 2}, final=True).answers == []
    assert run.answered(one, {"c": 1}, final=True).answers == [{"c": 1}, {"c": 2}]


def test_tensors_of_the_same_response_meet_again() -> None:
    plan = plan_of(step(0, "a", "b", decoupled=True), step(1, "b", "c"), step(2, "bc", "d"), outputs="d")
    run, first = begun(plan)
    one, two = (run.answered(first.starts[0], {"b": value}, final=False).starts[0] for value in "xy")
    assert run.answered(two, {"c": "Y"}, final=True).starts[0].inputs == {"b": "y", "c": "Y"}
    assert run.answered(one, {"c": "X"}, final=True).starts[0].inputs == {"b": "x", "c": "X"}


def test_a_decoupled_step_behind_another_counts_its_own_responses() -> None:
    plan = plan_of(step(0, "a", "b", decoupled=True), step(1, "b", "c", decoupled=True), outputs="c")
    run, first = begun(plan)
    one, two = (run.answered(first.starts[0], {"b": value}, final=False).starts[0] for value in "xy")
    answers = [
        run.answered(start, {"c": value}, final=False).answers for start, value in ((one, 1), (two, 2), (one, 3))
    ]
    assert answers == [[{"c": 1}], [{"c": 2}], [{"c": 3}]]


def test_no_response_at_all_is_an_end_and_no_failure() -> None:
    run, first = begun(decoupled_plan())
    assert run.answered(first.starts[0], None, final=True) == Progress([], [], ended=True)


def test_a_decoupled_step_that_never_ran_for_lack_of_an_input_is_stuck() -> None:
    plan = plan_of(step(0, "ab", "c", decoupled=True), inputs="ab", outputs="c")
    assert begun(plan)[1].stuck


def test_a_plan_knows_when_a_later_step_runs_on_the_same_model() -> None:
    plan = plan_of(
        step(0, "a", "b", model="m"), step(1, "b", "c", model="n"), step(2, "c", "d", model="m"), outputs="d"
    )
    assert [plan.returns_to(each) for each in plan.steps] == [True, False, False]


# -- from a configuration -------------------------------------------------------------------------------------------


def test_a_plan_follows_the_configuration() -> None:
    config = config_of("""
        name: "e" platform: "ensemble"
        input { name: "IN" data_type: TYPE_INT32 dims: 1 }
        input { name: "MORE" data_type: TYPE_INT32 dims: 1 optional: true }
        output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
        ensemble_scheduling {
          step {
            model_name: "x" model_version: 3
            input_map { key: "I" value: "IN" } output_map { key: "O" value: "t" }
          }
          step {
            model_name: "y" model_version: -1
            input_map { key: "I" value: "t" } output_map { key: "O" value: "OUT" }
          }
          step { model_name: "y" input_map { key: "I" value: "MORE" } output_map { key: "O" value: "u" } }
          max_inflight_requests: 7
        }""")
    plan = EnsemblePlan.of(config, {"y"})
    assert plan.models == (("x", 3), ("y", -1))
    assert [(each.inputs, each.outputs, each.decoupled) for each in plan.steps] == [
        ((("I", "IN"),), (("O", "t"),), False),
        ((("I", "t"),), (("O", "OUT"),), True),
        ((("I", "MORE"),), (("O", "u"),), True),
    ]
    assert (plan.inputs, plan.optional, plan.outputs) == (frozenset({"IN", "MORE"}), frozenset({"MORE"}), ("OUT",))
    assert (plan.max_inflight, plan.source("OUT"), plan.source("t")) == (7, 1, -1)


# -- any flow -------------------------------------------------------------------------------------------------------


class Flow(NamedTuple):
    """A random ensemble: its plan, the requested outputs, and the order in which steps finish."""

    plan: EnsemblePlan
    requested: tuple[str, ...]
    given: frozenset[str]
    choices: list[int]


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    names = list("abc")
    optional = draw(st.sets(st.sampled_from("abc")))
    steps: list[EnsembleStep] = []
    for number in range(draw(st.integers(1, 8))):
        reads = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
        makes = [f"t{number}{suffix}" for suffix in "xy"[: draw(st.integers(1, 2))]]
        pairs = [tuple((name.upper(), name) for name in side) for side in (reads, makes)]
        steps.append(EnsembleStep(number, f"m{number % 3}", -1, pairs[0], pairs[1], False, ()))
        names += makes
    made = [name for name in names if len(name) > 1]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, unique=True))
    requested = draw(st.lists(st.sampled_from(outputs), min_size=1, unique=True))
    given = draw(st.sets(st.sampled_from("abc")).map(frozenset)) | (frozenset("abc") - optional)
    order = draw(st.permutations(steps))
    plan = EnsemblePlan(order, "abc", optional, outputs)
    return Flow(plan, tuple(requested), given, draw(st.lists(st.integers(0, 99), min_size=9, max_size=9)))


def needed_by(flow: Flow) -> set[int]:
    """The steps that the requested outputs depend on, found the slow way."""
    wanted = set(flow.requested)
    found: set[int] = set()
    for _ in flow.plan.steps:
        for each in flow.plan.steps:
            if wanted & {tensor for _, tensor in each.outputs}:
                found.add(each.number)
                wanted |= {tensor for _, tensor in each.inputs}
    return found


def play(flow: Flow, kind: type[EnsembleRun[object]] = EnsembleRun) -> None:
    """Run a flow, finishing steps in its order, and hold it to the laws."""
    run = kind(flow.plan, flow.requested)
    needed = needed_by(flow)
    there: dict[str, object] = dict.fromkeys("abc")
    there.update((name, f"given {name}") for name in flow.given)
    progress = run.begin({name: there[name] for name in flow.given})
    ran: list[int] = []
    under_way: list[Start[object]] = []
    for choice in flow.choices:
        for start in progress.starts:
            assert start.step.number not in ran, "a step ran twice"
            assert start.inputs == {
                name: there[tensor] for name, tensor in start.step.inputs if there[tensor] is not None
            }
            ran.append(start.step.number)
        under_way += progress.starts
        ready = {each.number for each in flow.plan.steps if all(tensor in there for _, tensor in each.inputs)}
        assert set(ran) == ready & needed, "a step waits for nothing, or one ran without need"
        assert progress.ended == (not under_way)
        if progress.ended:
            break
        assert not progress.answers
        start = under_way.pop(choice % len(under_way))
        made: dict[str, object] = {name: f"made {tensor}" for name, tensor in start.step.outputs}
        there.update((tensor, made[name]) for name, tensor in start.step.outputs)
        progress = run.answered(start, made, final=True)
    assert progress.answers == [{name: there[name] for name in flow.plan.outputs if name in flow.requested}]
    assert not progress.stuck
    assert not run._values, "a value was kept that no step needs"


@given(flows())
def test_any_flow_runs_each_needed_step_once_and_as_early_as_it_can(flow: Flow) -> None:
    play(flow)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("needed.add(maker.number)", "needed.update(step.number for step in self.steps)"),
        ("missing = self._waiting.get(key, needs) - 1", "missing = self._waiting.get(key, needs) - 2"),
        ("if not kept.left:", "if False:"),
        ("ended = not any(self._open.values())", "ended = not starts"),
        ("for name in self._flow.places:", "for name in self._flow.places[:1]:"),
        ("if kept.given:", "if True:"),
    ],
)
def test_a_planted_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    source = inspect.getsource(ensembles)
    assert right in source
    mutant = types.ModuleType("ensembles_with_a_mistake")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(right, wrong), mutant.__name__, "exec"), mutant.__dict__)

    # Found is enough: the example is not shrunk.
    @settings(max_examples=300, database=None, report_multiple_bugs=False, print_blob=False, phases=[Phase.generate])
    @given(flows())
    def play_with_it(flow: Flow) -> None:
        plan = flow.plan
        turned = mutant.EnsemblePlan(plan.steps, plan.inputs, plan.optional, plan.outputs[::-1])
        play(flow._replace(plan=turned), mutant.EnsembleRun)

    with pytest.raises((AssertionError, IndexError, KeyError)):
        play_with_it()


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=4, unique=True), max_size=12))
def test_a_memoised_flow_equals_a_new_one(wanted: list[list[str]]) -> None:
    def plan() -> EnsemblePlan:
        return plan_of(step(0, "a", "b", decoupled=True), step(1, "a", "c"), step(2, "bc", "d"), outputs="dcba")

    kept = plan()
    for requested in wanted * 2:
        assert kept.flow(tuple(requested)) == plan().flow(tuple(requested))
