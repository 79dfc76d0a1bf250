"""Going back on every platform: shares, counts and answers after each step, and the same when a step is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")

from deploy_clouds.journeys import Deployments, answer_of, refuse
from deploy_clouds.stages import STAGES

WHOLE = ("helm", "compose")
"""Platforms that replace what serves, without shares."""
SCALED = {"sagemaker": 4, "vertex": 4, "azureml": 4, "helm": 4, "knative": 2, "kserve": 2, "cloud-run": 2}
"""Instances that run before the first update; the others have no count."""
LEAST = ("--min", "2")
FIRST = {"knative": LEAST, "kserve": LEAST, "cloud-run": LEAST, "vertex": ("--max", "4")}
"""Flags of the first deployment, which later ones do not repeat."""

each_platform = pytest.mark.parametrize("platform", STAGES)


class Act(NamedTuple):
    """A command, and the shares that it must lead to."""

    words: tuple[str, ...]
    shares: dict[str, int]

    def __str__(self) -> str:
        return " ".join(self.words)

    def do(self, stage: Deployments) -> bool:
        version = max(self.shares, key=lambda each: self.shares[each])
        return stage.rollback(version) if self.words == ("rollback",) else stage.deploy(*self.words)


def journey_of(platform: str) -> list[Act]:
    first = ("v1", *FIRST.get(platform, ()))
    acts = [
        Act(first, {"v1": 100}),
        Act(("v2", "--traffic", "10"), {"v1": 90, "v2": 10}),
        Act(("v2",), {"v2": 100}),
        Act(("rollback",), {"v1": 100}),
        Act(("v3",), {"v3": 100}),
        Act(("rollback",), {"v1": 100}),
    ]
    return [each for each in acts if platform not in WHOLE or "--traffic" not in each.words]


def begin(platform: str) -> Deployments:
    return STAGES[platform]()


def check(stage: Deployments, platform: str, act: Act) -> None:
    """Compare all shares, the instances of what serves, and the answer of a client."""
    assert stage.cloud.serving() == act.shares, (str(act), stage.text())
    count = SCALED.get(platform)
    if len(act.shares) == 1:
        (version,) = act.shares
        assert stage.invoke() == answer_of(version)
        if count and stage.now_s and act.words[0] != "v1":
            assert stage.cloud.counts() == {version: count}, (str(act), stage.text())
    elif count and platform != "kserve":
        assert stage.cloud.counts()["v1"] == count, (str(act), stage.text())


def after(stage: Deployments, platform: str, act: Act) -> None:
    """Let load or a user bring the first version to the instances that later ones must keep."""
    if act.words[0] == "v1":
        stage.cloud.scale(SCALED.get(platform, 0))


@each_platform
def test_every_step_leads_to_its_shares_with_the_instances_that_ran(platform: str) -> None:
    stage = begin(platform)
    for act in journey_of(platform):
        assert act.do(stage), f"{act}: {stage.text()}"
        check(stage, platform, act)
        after(stage, platform, act)
    assert not stage.rollback(), "both other versions were taken back"
    assert "no earlier version" in stage.text()
    assert stage.cloud.serving() == {"v1": 100}
    assert stage.deploy("v2"), stage.text()
    assert stage.deploy("v3"), stage.text()
    assert stage.rollback("v2"), "a version that was taken back counts again once it is deployed again"
    assert stage.cloud.serving() == {"v2": 100}


@each_platform
def test_the_end_of_a_share_leaves_the_stable_version(platform: str) -> None:
    if platform in WHOLE:
        pytest.skip(f"{platform} has no shares of the traffic")
    stage = begin(platform)
    for words in (("v1",), ("v2", "--traffic", "60")):
        assert stage.deploy(*words), stage.text()
    assert stage.cloud.serving() == {"v1": 40, "v2": 60}
    assert stage.rollback("v1"), stage.text()
    assert stage.cloud.serving() == {"v1": 100}
    assert not stage.rollback()


def killed_before(perform: Callable[[Any], Any], call: Any) -> Any:
    raise KeyboardInterrupt


def killed_after(perform: Callable[[Any], Any], call: Any) -> Any:
    perform(call)
    raise KeyboardInterrupt


def throttled(perform: Callable[[Any], Any], call: Any) -> Any:
    raise refuse("busy", "Rate exceeded", "ThrottlingException")


def denied(perform: Callable[[Any], Any], call: Any) -> Any:
    raise refuse("denied", "not authorized to perform this call", "AccessDeniedException")


class Interrupted:
    """A cloud whose call of a number ends in another way, once."""

    def __init__(self, cloud: Any, number: int, way: Callable[[Callable[[Any], Any], Any], Any]) -> None:
        self._cloud, self._number, self._way = cloud, number, way
        self.made = 0

    def __call__(self, call: Any) -> Any:
        self.made += 1
        return self._way(self._cloud, call) if self.made == self._number else self._cloud(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cloud, name)


@pytest.mark.parametrize("way", [killed_before, killed_after, throttled, denied])
@each_platform
def test_a_step_that_is_interrupted_at_any_call_ends_as_one_that_is_not(
    platform: str, way: Callable[[Callable[[Any], Any], Any], Any]
) -> None:
    acts = journey_of(platform)
    stage = begin(platform)
    for number, act in enumerate(acts):
        start = deepcopy(stage.cloud)
        call = 0
        while interrupted(stage, platform, act, way, call := call + 1):
            where = f"{act}, {way.__name__} at call {call}"
            for later in acts[number + 1 :] if way is not throttled else []:  # because its own repetition ends an act
                assert later.do(stage), f"{where}, then {later}: {stage.text()}"
                check(stage, platform, later)
                after(stage, platform, later)
            stage.cloud = deepcopy(start)
        after(stage, platform, act)


def interrupted(stage: Deployments, platform: str, act: Act, way: Any, number: int) -> bool:
    """Do an act whose call of a number is interrupted, and again. Returns False if it has fewer calls."""
    whole = stage.cloud
    before = whole.serving()
    cut = Interrupted(whole, number, way)
    stage.cloud = cut  # type: ignore[assignment]
    done = False
    with suppress(KeyboardInterrupt):
        done = act.do(stage)
    stage.cloud = whole
    if cut.made >= number:
        assert done or way is not throttled, stage.text()
        assert whole.serving() in (before, act.shares), stage.text()
        if not done:
            act.do(stage)
        check(stage, platform, act)
        after(stage, platform, act)
    return cut.made >= number
