"""The search against servers in closed form: quality, number of trials, noise, memory, rates and failures."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora_tools.tuning import (
    CostResult,
    CostTrial,
    Decision,
    Goal,
    Load,
    LoadResult,
    LoadTrial,
    ModelSpace,
    Plan,
    Refused,
    Result,
    Runtime,
    Settings,
    System,
    Trial,
)
from remora_tools.tuning.candidates import ladder
from remora_tools.tuning.search import Search
from support.engine.served_model_formula import CORES, Formula, goal_of, plan_of

NEAR = 0.95


def search(formula: Formula, goal: Goal, system: System | None = None) -> Decision:
    """Search until the end and return the decision."""
    found = Search(system or formula.system(), goal)
    while (trial := found.next_trial()) is not None:
        found.record(formula.run(trial))
        assert len(formula.trials) < 500, "the search does not end"
    return found.decision()


def quality(formula: Formula, goal: Goal, decision: Decision) -> float:
    """Return the decision's throughput as a part of the best one of the whole grid, both without noise."""
    best = max(formula.best_rate(plan, goal.slo) for plan in formula.grid(formula.system()))
    got = formula.best_rate(decision.best.plan, goal.slo) if decision.best and decision.holds else 0.0
    return got / best if best else 1.0


def grid_trials(formula: Formula) -> int:
    """Return the measurements of the whole grid."""
    return len(formula.grid(formula.system())) * len(ladder(math.inf))


def random_formula(random: Random, noise: float) -> tuple[Formula, Goal]:
    formula = Formula(
        fixed_ns=10 ** random.uniform(4.3, 6.8),
        row_ns=10 ** random.uniform(3, 6.3),
        parallel=random.choice([0, 0.5, 0.9]),
        cores=random.choice([0, 0.3, 1]),
        front_ns=10 ** random.uniform(4, 5),
        noise=noise,
        seed=random.randrange(1 << 30),
    )
    return formula, goal_of(10 ** random.uniform(0.5, 2))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_tenth_of_the_grid_finds_nearly_its_best_throughput(noise: float) -> None:
    random = Random(f"{noise}")
    found = []
    for _ in range(20):
        formula, goal = random_formula(random, noise)
        found.append(quality(formula, goal, search(formula, goal)))
        assert len(formula.trials) <= grid_trials(formula) / 10
    near = sum(each >= NEAR for each in found)
    assert near >= 0.95 * len(found), sorted(found)[:5]


@settings(max_examples=25, deadline=None)
@given(st.floats(4.3, 6.8), st.floats(3, 6), st.floats(0.5, 2), st.sampled_from([0.0, 0.3, 1.0]))
def test_without_noise_the_result_holds_the_objective_and_beats_the_present(
    fixed: float, row: float, limit: float, cores: float
) -> None:
    formula, goal = Formula(10**fixed, 10**row, cores=cores), goal_of(10**limit)
    decision = search(formula, goal)
    present = formula.best_rate(formula.system().present, goal.slo)
    if decision.holds:
        assert decision.best is not None
        rate, latency = formula.exact(decision.best.plan, decision.best.load)
        assert latency <= goal.slo.limit_ns
        assert rate >= 0.97 * present
    else:
        assert not present


def test_ties_go_to_the_present_settings() -> None:
    # The event loop limits the throughput, so that no setting matters.
    formula = Formula(fixed_ns=20_000, row_ns=100, cores=0.0, front_ns=500_000, noise=0.02)
    decision = search(formula, goal_of(100))
    assert plan_of(decision.best) == formula.system().present
    assert "no other configuration" in decision.why[0]


def test_a_better_batch_size_is_explained() -> None:
    formula = Formula(fixed_ns=5e6, row_ns=1e4, cores=1.0, noise=0.01)
    decision = search(formula, goal_of(50))
    (best,) = plan_of(decision.best)
    assert best.batch >= 32
    assert any(text.startswith(f"m: batches of {best.batch}: predicted") for text in decision.why)


class _Waking(Formula):
    """A server in which a single request waits for threads to wake, and requests under load do not."""

    def run(self, trial: Trial) -> Result:
        result = super().run(trial)
        if isinstance(result, CostResult):
            return result._replace(front_ns=20 * self.front_ns)
        assert isinstance(result, LoadResult)
        return result._replace(front=result.rate_per_s * self.front_ns / 1e9)


@pytest.mark.parametrize("fixed_ns", [1e6, 3e6, 1e7])
def test_the_wait_of_a_single_request_does_not_limit_the_predictions(fixed_ns: float) -> None:
    formula, goal = _Waking(fixed_ns, row_ns=1e3, cores=0.0, front_ns=5e4), goal_of(50)
    decision = search(formula, goal)
    assert quality(formula, goal, decision) >= NEAR
    loads = [trial for trial in formula.trials if isinstance(trial, LoadTrial)]
    best = formula.best_rate(plan_of(decision.best), goal.slo)
    near = [formula.exact(trial.plan, trial.load)[0] >= NEAR * best for trial in loads]
    assert any(near[:5]), "the simulation finds a good plan before the neighbours are tried"


# -- an open loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "instances"), [(30.0, 1), (90.0, 2), (170.0, 4)])
def test_a_rate_is_held_with_the_fewest_instances(rate: float, instances: int) -> None:
    # A request takes 20 ms of sleep and cannot share a batch with profit: an instance answers 50 of them a second.
    formula = Formula(fixed_ns=0.0, row_ns=20e6, cores=0.0, limit=8)
    system = formula.system(Settings(8, False, (), 0, 4))
    decision = search(formula, goal_of(400, rate), system)
    assert decision.holds
    assert plan_of(decision.best)[0].instances == instances


def test_present_settings_that_hold_the_rate_cheapest_stay() -> None:
    formula = Formula(fixed_ns=1e6, row_ns=1e4, noise=0.02)
    decision = search(formula, goal_of(50, rate=50.0))
    assert plan_of(decision.best) == formula.system().present


def test_a_rate_beyond_the_machine_names_the_closest_configuration() -> None:
    formula = Formula(fixed_ns=10e6, row_ns=10e6, cores=1.0)
    decision = search(formula, goal_of(30, rate=5_000.0))
    assert not decision.holds
    assert decision.best is not None
    assert "of 5000 requests per second are answered" in decision.why[0]


# -- limits and failures ----------------------------------------------------------------------------------------------


def test_an_objective_below_the_fastest_call_is_refused_with_the_closest_latency() -> None:
    formula = Formula(fixed_ns=50e6, row_ns=1e6)
    decision = search(formula, goal_of(5))
    assert not decision.holds
    assert decision.best is not None
    assert decision.why[0].startswith("no configuration holds p99<=5ms: in the closest one p99 is ")


def test_memory_limits_the_instances() -> None:
    formula = Formula(fixed_ns=5e6, row_ns=1e6, cores=0.0, instance_bytes=400 << 20)
    free = search(formula, goal_of(100))
    assert plan_of(free.best)[0].instances == CORES
    bound = search(formula, goal_of(100, memory=1 << 30))
    assert plan_of(bound.best)[0].instances == 2


def test_the_budget_ends_the_search() -> None:
    formula = Formula(fixed_ns=5e6, row_ns=1e5, parallel=0.9)
    decision = search(formula, goal_of(100, budget_s=8.0))
    spent = sum(0.2 if isinstance(trial, CostTrial) else trial.seconds for trial in formula.trials)
    assert spent <= 8.5
    assert decision.holds


def test_the_present_settings_are_measured_however_short_the_time() -> None:
    decision = search(Formula(fixed_ns=5e6, row_ns=1e5), goal_of(100, budget_s=0.01))
    assert decision.best == decision.present
    assert decision.holds


def test_a_decision_is_valid_at_any_time() -> None:
    formula = Formula(fixed_ns=5e6, row_ns=1e5, parallel=0.5)
    found, seen = Search(formula.system(), goal_of(100)), []
    assert found.decision().best is None
    while (trial := found.next_trial()) is not None:
        found.record(formula.run(trial))
        seen.append(found.decision())
    rates = [decision.best.rate_per_s for decision in seen if decision.best is not None and decision.holds]
    assert rates == sorted(rates)


class _Refusing(Formula):
    """A model that loads with one instance alone."""

    def run(self, trial: Trial) -> Result:
        if trial.plan[0].instances > 1:
            self.trials.append(trial)
            return Refused("out of memory", 0.1)
        return super().run(trial)


def test_configurations_that_do_not_load_are_left_out() -> None:
    decision = search(_Refusing(fixed_ns=5e6, row_ns=1e6, cores=0.0), goal_of(100))
    assert decision.holds
    assert plan_of(decision.best)[0].instances == 1


class _Failing(Formula):
    """A model whose requests fail in batches above 8."""

    def run(self, trial: Trial) -> Result:
        result = super().run(trial)
        if isinstance(result, LoadResult) and trial.plan[0].batch > 8:
            return result._replace(failures=3)
        return result


def test_a_configuration_with_failed_requests_is_never_the_best() -> None:
    decision = search(_Failing(fixed_ns=5e6, row_ns=1e4), goal_of(100))
    assert decision.holds
    assert plan_of(decision.best)[0].batch <= 8


def test_nothing_that_loads_gives_the_reason() -> None:
    class Broken(Formula):
        def run(self, trial: Trial) -> Result:
            self.trials.append(trial)
            return Refused("the file is damaged", 0.1)

    decision = search(Broken(fixed_ns=1e6, row_ns=1e6), goal_of(100))
    assert decision.best is None
    assert decision.why == ("nothing was measured: the file is damaged",)


# -- several models ---------------------------------------------------------------------------------------------------


class _Chain:
    """Two models in a row; the second one takes ten times as long and gains from batches."""

    def __init__(self) -> None:
        self.models = (Formula(fixed_ns=2e5, row_ns=2e5, cores=0.0), Formula(fixed_ns=5e6, row_ns=1e5, cores=0.0))
        self.trials = 0

    def system(self) -> System:
        spaces = [model.system().models[0] for model in self.models]
        return System((spaces[0]._replace(name="a"), spaces[1]._replace(name="b")), ((0, 1),), CORES, 1, 64)

    def exact(self, plan: Plan, load: Load) -> tuple[float, float]:
        found = [model.exact((each,), load) for model, each in zip(self.models, plan, strict=True)]
        rate = min(each[0] for each in found)
        return rate, max(sum(each[1] for each in found) / 2, load.connections / rate * 1e9)

    def run(self, trial: Trial) -> Result:
        self.trials += 1
        if isinstance(trial, LoadTrial):
            rate, latency = self.exact(trial.plan, trial.load)
            return LoadResult(rate, latency, 0, trial.seconds)
        costs = [model.run(CostTrial((each,), trial.rows)) for model, each in zip(self.models, trial.plan, strict=True)]
        for each in costs:
            if isinstance(each, Refused):
                return each
        one, other = costs
        assert not isinstance(one, LoadResult | Refused)
        assert not isinstance(other, LoadResult | Refused)
        return one._replace(costs=[*one.costs, *other.costs])


def test_the_models_of_a_chain_are_tuned_together() -> None:
    chain, goal = _Chain(), goal_of(50)
    found = Search(chain.system(), goal)
    while (trial := found.next_trial()) is not None:
        found.record(chain.run(trial))
    decision = found.decision()
    first, second = plan_of(decision.best)
    assert decision.best is not None
    present = max(
        rate
        for rate, latency in (chain.exact(chain.system().present, Load(count)) for count in ladder(math.inf))
        if latency <= goal.slo.limit_ns
    )
    assert decision.best.rate_per_s > 3 * present
    assert second.instances * second.batch > first.instances
    assert chain.trials < 150


def test_a_model_that_cannot_batch_gets_instances() -> None:
    formula = Formula(fixed_ns=10e6, row_ns=0.0, cores=0.0, limit=1)
    present = Settings(0, False, (), 0, 1)
    space = ModelSpace("m", present, (), tuple((count, Runtime()) for count in (1, 2, 4)))
    decision = search(formula, goal_of(100), System((space,), ((0,),), CORES))
    assert plan_of(decision.best) == (Settings(0, False, (), 0, 4),)
