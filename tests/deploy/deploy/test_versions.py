"""What a service served before: the target of a rollback, and the texts that retain a history."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_deploy.deploy import versions
from remora_deploy.deploy.plan import RefusedError
from remora_deploy.deploy.versions import LIMIT, History, Served

NAMES = ("a1", "b2", "c3", "d4")


def history(*served: str, back: tuple[str, ...] = ()) -> History:
    return History(tuple(map(Served, served)), frozenset(back))


@pytest.mark.parametrize(
    ("found", "shares", "target"),
    [
        (history("v1", "v2"), {"v2": 100}, "v1"),
        (history("v1", "v2"), {"v1": 90, "v2": 10}, "v2"),
        (history("v1"), {"v1": 90, "v2": 10}, "v1"),
        (history("v1"), {"v1": 40, "v2": 60}, "v1"),
        (history("v1"), {"v2": 100}, "v1"),
        (history("v2", "v1", "v3", back=("v2",)), {"v3": 100}, "v1"),
        (history("v1", "v2", "v3", back=("v2",)), {"v3": 100}, "v1"),
        (history("v1", "v2", "v1"), {"v1": 100}, "v2"),
        (history(), {"v1": 90, "v2": 10}, "v1"),
    ],
)
def test_a_rollback_returns_to_what_served_alone_before_and_was_not_taken_back(
    found: History, shares: dict[str, int], target: str
) -> None:
    assert found.target("digits", shares) == target


@pytest.mark.parametrize(
    ("found", "shares"),
    [
        (history(), {"v1": 100}),
        (history("v1"), {"v1": 100}),
        (history("v2", "v1", back=("v2",)), {"v1": 100}),
        (history(), {}),
    ],
)
def test_without_such_a_version_a_rollback_is_refused(found: History, shares: dict[str, int]) -> None:
    with pytest.raises(RefusedError, match="digits has no earlier version"):
        found.target("digits", shares)


def test_a_version_that_no_longer_exists_is_passed_over() -> None:
    assert history("v1", "v2", "v3").target("digits", {"v3": 100}, existing={"v1", "v3"}) == "v1"


def test_the_end_of_copies_leaves_the_version_that_answers() -> None:
    assert history("v1", "v2").target("digits", {"v2": 100}, trial=True) == "v2"


def test_a_version_is_a_target_again_when_it_is_deployed_again() -> None:
    found = history("v1", "v2").rolled_back("v1", ["v2"])
    assert found.taken_back == {"v2"}
    again = found.observed({"v1": 100}).deployed("v2").deployed("v3")
    assert again.target("digits", {"v3": 100}) == "v2"


def test_a_service_that_another_program_changed_is_retained_too() -> None:
    found = history("v1").observed({"v2": 100}, 4).deployed("v3")
    assert [each.version for each in found.served] == ["v1", "v2", "v3"]
    assert found.entry("v2").instances == 4


def test_the_last_version_that_served_alone_is_the_stable_one_even_with_fewer_requests() -> None:
    assert versions.stable_of(history("v1"), {"v1": 40, "v2": 60}, "v3") == "v1"
    assert versions.stable_of(history(), {"v1": 40, "v2": 60}, "v3") == "v2"
    assert versions.stable_of(history("v1"), {"v1": 100}, "v1") == ""


def test_every_version_with_a_wrong_share_is_named() -> None:
    assert versions.differences(history("v1"), {"v1": 90, "v2": 10}, "v2", 10) == []
    assert versions.differences(history("v1", "v2"), {"v1": 10, "v2": 90}, "v2", 100) == [
        "v2 gets 90 percent, not 100",
        "v1 gets 10 percent, not 0",
    ]
    assert versions.different({"v1": 90, "v3": 10}, {"v1": 90, "v2": 10}) == [
        "v2 gets 0 percent, not 10",
        "v3 gets 10 percent, not 0",
    ]


ACTS = st.lists(st.tuples(st.sampled_from(("deploy", "share", "rollback")), st.sampled_from(NAMES)), max_size=30)


@given(ACTS)
def test_no_rollback_returns_to_a_version_that_was_taken_back_since_its_deployment(acts: list[tuple[str, str]]) -> None:
    found = History()
    shares: dict[str, int] = {}
    alone: list[str] = []
    bad: set[str] = set()
    for act, version in acts:
        if act == "deploy":
            found = versions.after(found, shares, version, 100)
            shares, bad = {version: 100}, bad - {version}
            alone.append(version)
        elif act == "share" and versions.alone(shares) not in ("", version):
            found = versions.after(found, shares, version, 10)
            shares = {versions.alone(shares): 90, version: 10}
        elif act == "rollback":
            try:
                target = found.observed(shares).target("digits", shares)
            except RefusedError:
                assert not [each for each in alone if each not in bad and each != versions.alone(shares)]
                continue
            assert target in alone
            assert target not in bad
            assert target != versions.alone(shares)
            bad |= {each for each in shares if each != target and each in alone}
            found = found.observed(shares).rolled_back(target, shares)
            shares = {target: 100}
            alone.append(target)
        assert versions.history_of(versions.texts_of(found)) == found


TOKENS = st.from_regex(r"(?:[a-z][a-z0-9-]{0,8}-)?[0-9a-fx]{1,10}", fullmatch=True)


@given(
    st.lists(
        st.builds(Served, TOKENS, st.integers(0, 999), st.just("")), max_size=LIMIT, unique_by=lambda each: each.version
    )
)
def test_a_history_is_read_as_it_was_written_in_the_letters_of_a_label(served: list[Served]) -> None:
    found = History(tuple(served), frozenset(each.version for each in served[::2]))
    texts = versions.texts_of(found)
    assert versions.history_of(texts) == found
    assert all(re.fullmatch(r"[a-z0-9_-]*", text) for text in texts.values())


@pytest.mark.parametrize("count", [0, 3])
def test_a_name_of_another_program_that_ends_like_a_number_of_instances_is_read_as_written(count: int) -> None:
    found = History((Served("hello-00001-jx2", count), Served("v1x2x3", count, "abc")))
    assert versions.history_of(versions.texts_of(found)) == found


def test_a_place_is_retained_where_the_platform_has_one() -> None:
    found = History((Served("0123456789", 4, "abcdef0123"),))
    assert versions.texts_of(found, "remora:") == {
        "remora:served": "0123456789x4.abcdef0123",
        "remora:taken-back": "",
    }
    assert versions.history_of(versions.texts_of(found, "remora:"), "remora:") == found


@given(st.dictionaries(st.sampled_from(("remora-served", "remora-taken-back")), st.text(max_size=80)))
def test_texts_that_another_program_wrote_are_no_error(texts: dict[str, str]) -> None:
    found = versions.history_of(texts)
    assert found.taken_back <= {each.version for each in found.served}


def test_six_numbers_of_versions_with_their_replicas_fit_into_a_label() -> None:
    found = History(tuple(Served(str(9990 + each), 100) for each in range(LIMIT)))
    assert all(len(text) <= 63 for text in versions.texts_of(found).values())
