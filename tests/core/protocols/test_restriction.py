"""Groups of calls behind a shared secret: who may pass, and what an operator may write."""

from __future__ import annotations

import pytest

from remora.protocols.restriction import GROUP_OF_ACTION, GROUP_OF_RPC, GROUPS, Restrictions

LOCKS = Restrictions(["model-repository,statistics:admin-key=secret", "health:who=me=you"])


@pytest.mark.parametrize(
    ("group", "headers", "missing"),
    [
        ("statistics", {}, "admin-key"),
        ("model-repository", {"admin-key": b"guess"}, "admin-key"),
        ("model-repository", {"admin-key": b"secret"}, None),
        ("model-repository", {"admin-key": b""}, "admin-key"),
        ("health", {"who": b"me=you"}, None),
        ("inference", {}, None),
    ],
)
def test_a_restricted_group_needs_its_header_and_others_need_none(
    group: str, headers: dict[str, bytes], missing: str | None
) -> None:
    assert LOCKS.missing(group, headers.get) == missing


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("inference", "expected GROUP"),
        ("inference:key", "expected GROUP"),
        ("inference:=value", "expected GROUP"),
        ("everything:key=value", "unknown group 'everything'"),
        ("health,health:key=value", "restricted twice"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused(entry: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Restrictions([entry], "--http-restricted-api")


def test_every_action_and_rpc_belongs_to_a_group_that_can_be_restricted() -> None:
    assert set(GROUP_OF_ACTION.values()) == set(GROUPS)
    assert set(GROUP_OF_RPC.values()) == set(GROUPS)


def test_nothing_is_restricted_unless_it_is_asked_for() -> None:
    assert not Restrictions()
