"""Model policy: a table of desired and current states with the expected action, and general invariants."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.models.policy import Action, CurrentState, Revision, next_action, revision_of
from remora.repository import ModelFolder
from support.engine.fakes import DOUBLER, config_of


def revision(versions: str = "1:a", *, shared: str = "s", config: str = "c", instances: str = "i") -> Revision:
    """``"1:a 2:b"``: versions 1 and 2 with the stamps a and b."""
    stamps = {int(pair[0]): pair[2:] for pair in versions.split()}
    return Revision(stamps, shared, config.encode(), instances.encode())


def has(revision: Revision, *ready: int, adjustable: bool = True) -> CurrentState:
    return CurrentState(revision, frozenset(ready), adjustable)


@pytest.mark.parametrize(
    ("wanted", "current", "action"),
    [
        (None, None, None),
        (None, has(revision()), None),
        (None, has(revision("1:a 2:b"), 1, 2), Action(retire=(1, 2))),
        (revision(), None, Action(open=(1,))),
        (revision(), has(revision()), Action(open=(1,))),
        (revision(), has(revision(), 1), None),
        (revision(""), None, Action()),
        (revision(""), has(revision(), 1), Action(retire=(1,))),
        (revision("1:new"), has(revision("1:a"), 1), Action(open=(1,), retire=(1,))),
        (revision(shared="new"), has(revision(), 1), Action(open=(1,), retire=(1,))),
        (revision(config="new"), has(revision(), 1), Action(open=(1,), retire=(1,))),
        (revision("2:b"), has(revision("1:a"), 1), Action(open=(2,), retire=(1,))),
        (revision("1:a 2:b"), has(revision("1:a"), 1), Action(open=(2,), keep=(1,))),
        (revision("1:a"), has(revision("1:a 2:b"), 1, 2), Action(keep=(1,), retire=(2,))),
        (revision(instances="new"), has(revision(), 1), Action(adjust=(1,))),
        (revision(instances="new"), has(revision(), 1, adjustable=False), Action(open=(1,), retire=(1,))),
        (revision("1:a 2:b", instances="new"), has(revision("1:a"), 1), Action(open=(2,), adjust=(1,))),
        (revision("1:new", instances="new"), has(revision(), 1), Action(open=(1,), retire=(1,))),
        (revision()._replace(bound="x"), has(revision(), 1), Action(open=(1,), retire=(1,))),
    ],
)
def test_one_action_follows_from_desired_and_current_state(
    wanted: Revision | None, current: CurrentState | None, action: Action | None
) -> None:
    assert next_action(wanted, current) == action


REVISIONS = st.builds(
    revision,
    st.dictionaries(st.integers(1, 4), st.sampled_from("ab")).map(
        lambda stamps: " ".join(f"{number}:{stamp}" for number, stamp in stamps.items())
    ),
    config=st.sampled_from("cd"),
    instances=st.sampled_from("ij"),
)
STANDINGS = st.builds(
    lambda revision, left_out, adjustable: CurrentState(revision, frozenset(revision.versions) - left_out, adjustable),
    REVISIONS,
    st.frozensets(st.integers(1, 4), max_size=2),
    st.booleans(),
)


@given(REVISIONS, st.none() | STANDINGS)
def test_after_the_action_exactly_the_desired_versions_serve(wanted: Revision, current: CurrentState | None) -> None:
    action = next_action(wanted, current)
    before = set(current.ready) if current else set()
    if action is None:
        assert before == set(wanted.versions)
        return
    after = (before - set(action.retire)) | set(action.open)
    assert after == set(wanted.versions)
    assert sorted((*action.open, *action.adjust, *action.keep)) == sorted(wanted.versions), "each exactly once"
    assert set(action.adjust) | set(action.keep) <= before


@given(REVISIONS.filter(lambda revision: bool(revision.versions)), st.none() | STANDINGS)
def test_what_was_done_once_need_not_be_done_again(wanted: Revision, current: CurrentState | None) -> None:
    assert next_action(wanted, CurrentState(wanted, frozenset(wanted.versions), True)) is None


# -- revisions ------------------------------------------------------------------------------------------------------

FOLDER = ModelFolder("m", Path("/r/m"), Path("/r"), {1: Path("/r/m/1"), 2: Path("/r/m/2abc")})
FILES = {"config.pbtxt": 1, "configs/x.pbtxt": 1, "1/model.onnx": 1, "2abc/model.onnx": 1, "labels.txt": 1}


def revision(**changed: int) -> Revision:
    names = {"config": "config.pbtxt", "custom": "configs/x.pbtxt", "one": "1/model.onnx", "two": "2abc/model.onnx"}
    files = {**FILES, **{names.get(key, key): stamp for key, stamp in changed.items()}}
    return revision_of(FOLDER, config_of(DOUBLER), [1, 2], files)


def test_a_version_is_stamped_by_its_own_files_alone() -> None:
    assert revision(two=2).versions[1] == revision().versions[1]
    assert revision(two=2).versions[2] != revision().versions[2]
    assert revision(two=2).shared == revision().shared


def test_files_beside_the_versions_belong_to_all_of_them() -> None:
    assert revision(labels=2).shared != revision().shared


def test_a_configuration_counts_by_what_it_says_and_not_by_when_it_was_written() -> None:
    assert revision(config=2, custom=2) == revision()


def test_instance_groups_and_the_version_policy_do_not_change_what_a_version_is() -> None:
    text = DOUBLER + "version_policy { all { } } instance_group { count: 3 }"
    other = revision_of(FOLDER, config_of(text), [1, 2], FILES)
    assert other.config == revision().config
    assert other.instances != revision().instances


def test_a_bare_file_is_stamped_by_itself() -> None:
    folder = ModelFolder("a", Path("/r"), Path("/r"), {1: Path("/r/a.onnx")})
    before, after = (revision_of(folder, config_of(""), [1], {"a.onnx": stamp}) for stamp in (1, 2))
    assert before.versions != after.versions
