"""Shares of the traffic: limits, splits, tags and the target of a rollback."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.models.release_sources import parse_release
from remora_deploy.deploy import shares

percents = st.integers(1, 100)


@given(percents)
def test_a_split_gives_all_requests_to_the_stable_version_and_the_new_one(percent: int) -> None:
    found = shares.split("stable", "new", percent)
    assert sum(found.values()) == 100
    assert found["new"] == percent
    assert set(found) <= {"new", "stable"}


@given(st.dictionaries(st.sampled_from("abc"), percents, min_size=1), st.sampled_from("abcd"))
def test_targets_keep_the_shares_and_tag_one_version(known: dict[str, int], version: str) -> None:
    targets = shares.tagged(known, "revision", version, "candidate", type="T")
    assert shares.shares_of(targets, "revision") == known
    assert [each["revision"] for each in targets if each.get("tag") == "candidate"] == [version]
    assert {each["type"] for each in targets} == {"T"}


def test_a_target_without_a_revision_means_the_latest_one() -> None:
    assert shares.shares_of([{"percent": 30}, {"revision": "a", "percent": 70}], "revision", "b") == {"b": 30, "a": 70}


@pytest.mark.parametrize(
    ("requested", "limits"),
    [((None, None), (2, 5)), ((3, None), (3, 5)), ((7, None), (7, 7)), ((None, 1), (1, 1)), ((0, 9), (0, 9))],
)
def test_limits_that_were_not_requested_are_those_of_what_serves(
    requested: tuple[int | None, int | None], limits: tuple[int, int]
) -> None:
    assert shares.limits_of(requested, (2, 5)) == limits


def test_shares_are_shown_as_text() -> None:
    assert shares.shown({"a": 90, "b": 10}) == "a 90 percent, b 10 percent"
    assert shares.shown({}) == "none"


@pytest.mark.parametrize("percent", [0, 101])
def test_a_share_outside_of_1_to_100_is_refused(percent: int) -> None:
    with pytest.raises(ValueError, match="1 to 100 percent"):
        shares.check_share(percent)


@pytest.mark.parametrize(("least", "most"), [(-1, 1), (2, 1), (0, 0)])
def test_limits_without_a_replica_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="the maximum must be at least 1"):
        shares.check_replicas(least, most)


@pytest.mark.parametrize(
    ("release", "flags"),
    [("stable=2,canary=3:10%", {"traffic": 10}), ("stable=2,shadow=3:20%", {"shadow": 20})],
)
def test_a_release_of_one_version_is_a_share_or_copies(release: str, flags: dict[str, int]) -> None:
    assert shares.flags_of(parse_release(release)) == flags


@pytest.mark.parametrize("release", ["stable=2", "stable=2,canary=3:10%,shadow=4:10%", "stable=2,canary=3:0.5%"])
def test_a_release_that_one_deployment_cannot_express_is_refused(release: str) -> None:
    with pytest.raises(ValueError, match=r"one deployment adds one version|whole percentage"):
        shares.flags_of(parse_release(release))
