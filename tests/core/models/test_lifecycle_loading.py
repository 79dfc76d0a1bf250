"""Loads, reloads and unloads, with configurations and files from the request."""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import Any

import pytest

from remora.calls import IndexEntry
from remora.errors import (
    InternalError,
    InvalidArgumentError,
    RemoraError,
    RetiredError,
    UnavailableError,
)
from remora.messages import InferForm, InputSpec, Response
from remora.models.lifecycle import Lifecycle
from support.engine.fakes import DOUBLER, Replies, write_model
from support.engine.lifecycle_bench import ALL, PATIENCE_S, Bench, answer_of, settle, versions

# -- load and unload ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["load", "unload"])
def test_clients_may_change_nothing_outside_explicit_mode(bench: Bench, call: str) -> None:
    lifecycle = bench.started("none")
    with pytest.raises(UnavailableError, match=r"^explicit model load / unload is not allowed if polling is enabled$"):
        lifecycle.load("m", {}) if call == "load" else lifecycle.unload("m")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (None, {}),
        ("no config {", {}),
        ('name: "other"\n' + DOUBLER, {}),
        (DOUBLER, {"config": "{not json"}),
        (DOUBLER, {"nope": "x"}),
    ],
    ids=["nowhere", "unreadable", "another-name", "override-unreadable", "unknown-parameter"],
)
def test_what_cannot_be_planned_is_one_text(bench: Bench, config: str | None, parameters: dict[str, str]) -> None:
    if config is not None:
        write_model(bench.repository, "m", config=config)
    lifecycle = bench.started()
    with pytest.raises(RemoraError) as failed:
        lifecycle.load("m", parameters)
    if "nope" not in parameters:
        assert str(failed.value) == "failed to load 'm', failed to poll from model repository"
        assert isinstance(failed.value, InternalError)
    assert lifecycle.state("m") is None
    assert lifecycle.is_ready()


@pytest.mark.parametrize("name", ["..", "../m", "a/b", "/etc", ".", ""])
def test_a_name_is_never_a_path(bench: Bench, name: str) -> None:
    write_model(bench.repository, "m")
    with pytest.raises(InternalError, match="failed to poll from model repository"):
        bench.started().load(name, {})


def test_a_load_that_fails_says_which_version_and_why(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=("1", "2"), config=ALL)
    bench.break_version("m", "1")
    lifecycle = bench.started()
    text = "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: the model is broken;\n"
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(text)}$"):
        lifecycle.load("m", {})
    assert versions(lifecycle, "m") == []
    settle(lifecycle)
    assert [model.closed for model in bench.backend.opened] == [1]


def test_a_failed_reload_leaves_what_serves_in_service(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    before = lifecycle.resolve("m")
    bench.break_version("m", "1")
    with pytest.raises(InvalidArgumentError):
        lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    write_model(bench.repository, "m", versions=("2",))
    bench.break_version("m", "2")
    with pytest.raises(InvalidArgumentError):
        lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    assert bench.backend.opened[0].closed == 0


def test_a_model_without_versions_cannot_be_loaded(bench: Bench) -> None:
    write_model(bench.repository, "m", versions=())
    lifecycle = bench.started()
    with pytest.raises(InvalidArgumentError, match="at least one version must be available under the version policy"):
        lifecycle.load("m", {})
    assert not lifecycle.is_ready()


def test_a_reload_takes_over_and_what_was_replaced_is_closed(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    write_model(bench.repository, "m", versions=("2",))
    lifecycle.load("m", {})
    settle(lifecycle)
    assert versions(lifecycle, "m") == [2]
    first, second = bench.backend.opened
    assert (first.closed, first.instances[0].closed) == (1, 1)
    assert second.closed == 0
    assert lifecycle.index(ready=False) == [
        IndexEntry("m", "1", "UNAVAILABLE", "unloaded"),
        IndexEntry("m", "2", "READY"),
    ]
    assert lifecycle.is_ready()


def test_a_config_in_the_request_counts_until_the_next_load_without_one(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started()
    override = """{"backend": "fake", "max_batch_size": 3,
                   "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
                   "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}]}"""
    lifecycle.load("m", {"config": override})
    assert lifecycle.resolve("m").signature.max_batch_size == 3
    lifecycle.load("m", {})
    assert lifecycle.resolve("m").signature.max_batch_size == 8


def test_unloading_twice_or_what_is_not_there_is_fine(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    for name in ("m", "m", "nope"):
        lifecycle.unload(name)
    settle(lifecycle)
    assert bench.backend.opened[0].closed == 1
    assert lifecycle.state("nope") is None


def test_an_unloaded_model_can_come_back(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    lifecycle.unload("m")
    lifecycle.load("m", {})
    assert lifecycle.resolve("m").version == 1


def test_an_unload_answers_at_once_and_lets_what_runs_finish(bench: Bench) -> None:
    running, may_end, answered = threading.Event(), threading.Event(), threading.Event()

    def during() -> None:
        running.set()
        assert may_end.wait(PATIENCE_S)

    bench.backend.during = during
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    replies = Replies()

    def reply(*answer: Any) -> None:
        replies(*answer)
        answered.set()

    ticket = lifecycle.resolve("m").submit(InferForm((InputSpec("IN", "INT32", (1, 1)),)), [b"\x07\x00\x00\x00"], reply)
    assert running.wait(PATIENCE_S)
    lifecycle.unload("m")
    assert bench.backend.opened[0].closed == 0
    may_end.set()
    assert answered.wait(PATIENCE_S)
    settle(lifecycle)
    assert replies.only(ticket).outputs[0].data.tolist() == [[14]]  # type: ignore[union-attr]
    assert bench.backend.opened[0].closed == 1


def test_loads_of_one_model_take_turns_and_nothing_is_left_open(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started()
    threads = [threading.Thread(target=lifecycle.load, args=("m", {})) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert lifecycle.stop(PATIENCE_S)
    assert [model.closed for model in bench.backend.opened] == [1] * len(bench.backend.opened)


# -- reloads that change little ---------------------------------------------------------------------------------------


def test_a_reload_of_what_did_not_change_does_nothing(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    before = lifecycle.resolve("m")
    lifecycle.load("m", {})
    assert lifecycle.resolve("m") is before
    assert len(bench.backend.opened) == 1


def test_a_version_that_comes_leaves_the_others_as_they_are(bench: Bench) -> None:
    write_model(bench.repository, "m", config=ALL)
    lifecycle = bench.started(load_model=("m",))
    first = lifecycle.resolve("m")
    write_model(bench.repository, "m", versions=("2",), config=ALL)
    lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1, 2]
    assert lifecycle.resolve("m", 1) is first


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
def test_instances_come_and_go_in_place(bench: Bench, before: int, after: int) -> None:
    folder = write_model(bench.repository, "m", config=DOUBLER + f"instance_group {{ count: {before} }}")
    lifecycle = bench.started(load_model=("m",))
    model = lifecycle.resolve("m")
    (folder / "config.pbtxt").write_text(DOUBLER + f"instance_group {{ count: {after} }}")
    lifecycle.load("m", {})
    assert lifecycle.resolve("m") is model
    assert model.config.instance_group[0].count == after
    (opened,) = bench.backend.opened
    assert [instance.closed for instance in opened.instances].count(0) == after
    assert len(opened.instances) == max(before, after), "what was there already stays"
    assert answer_of(model) == 14


def test_new_instances_that_fail_leave_the_model_as_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    (folder / "config.pbtxt").write_text(DOUBLER + "instance_group { count: 2 }")

    def instance(*_: object) -> None:
        raise InternalError("no memory")

    monkeypatch.setattr(bench.backend.opened[0], "instance", instance)
    with pytest.raises(InvalidArgumentError, match="no memory"):
        lifecycle.load("m", {})
    model = lifecycle.resolve("m")
    assert answer_of(model) == 14
    assert model.config.instance_group[0].count != 2
    assert lifecycle.is_ready()


def test_a_request_resolved_before_its_model_was_replaced_is_resolved_again(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    stale = lifecycle.resolve("m")
    write_model(bench.repository, "m", versions=("2",))
    lifecycle.load("m", {})
    settle(lifecycle)
    with pytest.raises(RetiredError):
        answer_of(stale)
    assert answer_of(lifecycle.resolve("m")) == 14
    assert not any(stale.statistics.failures.values())


@pytest.mark.parametrize(("retries", "loads"), [(0, False), (1, False), (2, True)])
def test_a_load_that_fails_is_tried_again_as_often_as_the_option_says(bench: Bench, retries: int, loads: bool) -> None:
    write_model(bench.repository, "m")
    failures = [InternalError("the licence server is away")] * 2

    def opening() -> None:
        if failures:
            raise failures.pop()

    bench.backend.opening = opening
    lifecycle = bench.lifecycle("none", model_load_retry_count=retries)
    assert (lifecycle.start() == {}) is loads


SEQUENCES = (
    DOUBLER
    + """
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }
"""
)


def ask_sequence(
    lifecycle: Lifecycle, *, start: bool = False, end: bool = False, sequence: int = 5
) -> Response | RemoraError:
    """The answer to a request of a sequence."""
    replies, answered = Replies(), threading.Event()

    def reply(*answer: Any) -> None:
        replies(*answer)
        answered.set()

    form = InferForm((InputSpec("IN", "INT32", (1, 1)),), sequence_id=sequence, sequence_start=start, sequence_end=end)
    ticket = lifecycle.resolve("m").submit(form, [b"\x07\x00\x00\x00"], reply)
    assert answered.wait(PATIENCE_S)
    return replies.only(ticket)


def test_a_sequence_ends_where_it_began_though_another_version_has_taken_over(bench: Bench) -> None:
    write_model(bench.repository, "m", config=SEQUENCES)
    lifecycle = bench.started(load_model=("m",))
    ask = partial(ask_sequence, lifecycle)
    assert isinstance(ask(start=True), Response)
    write_model(bench.repository, "m", versions=("2",), config=SEQUENCES)
    lifecycle.load("m", {})
    old, new = (opened.instances[0] for opened in bench.backend.opened)
    assert isinstance(ask(), Response)
    assert isinstance(ask(start=True, sequence=6), Response), "a new one begins with what serves now"
    assert (len(old.batches), len(new.batches)) == (2, 1)
    assert bench.backend.opened[0].closed == 0
    assert isinstance(ask(end=True), Response)
    settle(lifecycle)
    assert bench.backend.opened[0].closed == 1
    assert lifecycle.resolve("m").predecessor is None


def test_a_sequence_finds_back_through_two_swaps(bench: Bench) -> None:
    write_model(bench.repository, "m", config=SEQUENCES)
    lifecycle = bench.started(load_model=("m",))
    ask = partial(ask_sequence, lifecycle)
    assert isinstance(ask(start=True), Response)
    for version in ("2", "3"):
        write_model(bench.repository, "m", versions=(version,), config=SEQUENCES)
        lifecycle.load("m", {})
    assert isinstance(ask(), Response)
    assert isinstance(ask(end=True), Response)
    settle(lifecycle)
    assert [opened.closed for opened in bench.backend.opened] == [1, 1, 0]
    assert lifecycle.resolve("m").predecessor is None


def test_a_new_version_is_not_linked_to_one_that_is_unloaded_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(bench.repository, "m", config=SEQUENCES)
    lifecycle = bench.started(load_model=("m",))
    assert isinstance(ask_sequence(lifecycle, start=True), Response)
    loads, may_close = lifecycle.models.loads, threading.Event()
    hand_over, end = loads._hand_over, loads._end

    def end_later(*what: Any) -> None:
        assert may_close.wait(PATIENCE_S)
        end(*what)

    def hand_over_later(*what: Any) -> Any:
        lifecycle.unload("m")
        return hand_over(*what)

    monkeypatch.setattr(loads, "_end", end_later)
    monkeypatch.setattr(loads, "_hand_over", hand_over_later)
    write_model(bench.repository, "m", versions=("2",), config=SEQUENCES)
    lifecycle.load("m", {})
    monkeypatch.undo()
    may_close.set()
    settle(lifecycle)
    assert lifecycle.resolve("m").predecessor is None
    with pytest.raises(InvalidArgumentError, match="must specify the START flag"):
        ask_sequence(lifecycle)


# -- what comes with the request --------------------------------------------------------------------------------------

SENT = {"config": '{"backend": "fake"}', "file:7/fake.bin": b"x"}


def test_files_in_the_request_are_a_separate_model(bench: Bench) -> None:
    lifecycle = bench.started()
    lifecycle.load("sent", SENT)
    assert versions(lifecycle, "sent") == [7]
    assert lifecycle.index(ready=False) == [], "no repository has it"
    home = bench.backend.opened[0].source.path
    assert (home / "fake.bin").read_bytes() == b"x"
    lifecycle.load("sent", SENT)
    assert len(bench.backend.opened) == 1, "the same files again"
    lifecycle.load("sent", {**SENT, "file:7/fake.bin": b"y"})
    assert len(bench.backend.opened) == 2


def test_a_model_of_the_repository_is_overridden_until_the_next_load_without_files(bench: Bench) -> None:
    write_model(bench.repository, "m")
    lifecycle = bench.started(load_model=("m",))
    lifecycle.load("m", SENT)
    assert versions(lifecycle, "m") == [7]
    lifecycle.load("m", {})
    assert versions(lifecycle, "m") == [1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"file:1/fake.bin": b""},
        {**SENT, "file:../x": b""},
        {**SENT, "file:/etc/x": b""},
        {"config": "{", **SENT, "file:1": b""},
    ],
    ids=["without-config", "climbs", "absolute", "a-file-and-a-folder"],
)
def test_files_that_cannot_be_taken_are_one_text(bench: Bench, parameters: dict[str, str | bytes]) -> None:
    lifecycle = bench.started()
    with pytest.raises(InternalError, match=r"^failed to load 'sent', failed to poll from model repository$"):
        lifecycle.load("sent", {"file:1/x/y": b"", **parameters} if "file:1" in parameters else parameters)
    assert lifecycle.state("sent") is None


# -- labels ---------------------------------------------------------------------------------------------------------

LABELLED = DOUBLER.replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"')


def test_labels_are_the_lines_of_the_outputs_file(bench: Bench) -> None:
    (write_model(bench.repository, "m", config=LABELLED) / "labels.txt").write_text("one\ntwo\n")
    assert bench.started("none").resolve("m").labels_of("OUT") == ("one", "two")


@pytest.mark.parametrize("name", ["nope.txt", "../secret.txt"])
def test_labels_that_cannot_be_read_or_lie_elsewhere_fail_the_load(bench: Bench, name: str) -> None:
    write_model(bench.repository, "m", config=LABELLED.replace("labels.txt", name))
    (bench.repository / "secret.txt").write_text("secret")
    (error,) = bench.lifecycle("none").start().values()
    assert name in str(error)
    assert "secret\n" not in str(error)
    assert str(bench.repository) not in str(error), (
        "clients get this text, and the repository's place is the server's secret"
    )
