"""Routes and counts of a release, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remora.errors import CancelledError, InternalError, RetiredError, UnavailableError
from remora.messages import InferForm, OutputSpec, Request, Response, Streamed, Ticket
from remora.traffic.releases import HUNDRED, Arm, Release, Shadow
from remora_tools.rollout.judgement import CALIBRATION, Rate
from remora_tools.rollout.recordings import MAX_WAITING, Recorder, Recording
from remora_tools.rollout.routing import COPY_HEADER, JUDGE_EVERY_NS, Router, Tally
from support.engine.fakes import FakeClock

MS = 1_000_000
TICKET = Ticket(Request(InferForm(()), {}, (), 1, None), lambda *_: None)


class _Version:
    """Model version that answers when the test says so."""

    name = "m"

    def __init__(self, version: int, *sequences: int) -> None:
        self.version, self.version_text = version, str(version)
        self.sequences = sequences
        self.replies: list[Any] = []
        self.refusal: Exception | None = None

    def keeps(self, form: InferForm) -> bool:
        return form.sequence_id in self.sequences

    def acquire(self) -> bool:
        return True

    def split(self, form: InferForm, data: object) -> list[int]:
        return [self.version]

    def submit(self, form: InferForm, data: object, reply: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.replies.append(reply)


def _router(*arms: Arm, clock: FakeClock | None = None, sticky: str = "request", judge: Any = lambda: None) -> Router:
    release = Release(2, arms, sticky=sticky, salt="s")
    return Router(release, Tally(2), (clock or FakeClock()).monotonic_ns, judge)


def _ready(*versions: _Version) -> Any:
    return {model.version: model for model in versions}


HALF = Arm("canary", 3, 5000)
ALL = Arm("canary", 3, 10_000)
OTHER = Shadow(0, HUNDRED, model="other")


def test_the_stable_version_stands_for_the_model_and_others_replace_it() -> None:
    router = _router(HALF)
    one, two, three = _Version(1), _Version(2), _Version(3)
    assert router.primary(_ready(one, two, three)) is two
    assert router.primary(_ready(one, three)) is three
    assert router.primary(_ready(one)) is one
    assert router.primary({}) is None


def test_requests_are_divided_only_while_an_arm_is_ready() -> None:
    assert _router(HALF).splits(_ready(_Version(2), _Version(3)))
    assert not _router(HALF).splits(_ready(_Version(2)))
    assert not _router().splits(_ready(_Version(2), _Version(3)))


def test_a_request_whose_arm_is_not_ready_goes_to_the_stable_version() -> None:
    two = _Version(2)
    assert _router(ALL).choose(_ready(two), InferForm(()), None) is two


def test_a_sequence_stays_where_it_began() -> None:
    two, three = _Version(2, 7), _Version(3)
    router = _router(ALL)
    assert router.choose(_ready(two, three), InferForm((), sequence_id=7), None) is two
    assert router.choose(_ready(two, three), InferForm((), sequence_id=7, sequence_start=True), None) is three
    assert router.choose(_ready(two, three), InferForm((), sequence_id=8), None) is three


def test_all_requests_of_a_sequence_go_to_one_version() -> None:
    ready = _ready(_Version(2), _Version(3))
    router = _router(HALF)
    for number in range(1, 50):
        chosen = {
            router.choose(ready, InferForm((), id=str(step), sequence_id=number, sequence_start=not step), None)
            for step in range(5)
        }
        assert len(chosen) == 1


def test_requests_without_an_identity_are_spread() -> None:
    ready = _ready(_Version(2), _Version(3))
    router = _router(HALF)
    found = [router.choose(ready, InferForm(()), None).version for _ in range(400)]
    assert 140 < found.count(3) < 260
    by_header = _router(HALF, sticky="header:X-User")
    assert {by_header.choose(ready, None, None).version for _ in range(50)} == {2, 3}


def test_a_header_names_the_client() -> None:
    ready = _ready(_Version(2), _Version(3))
    router = _router(HALF, sticky="header:X-User")
    for user in range(30):
        headers = {b"x-user": b"user %d" % user}
        assert len({router.choose(ready, InferForm((), id=str(each)), headers.get).version for each in range(5)}) == 1


def test_the_choice_is_logged_if_wanted_and_never_with_the_identity(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remora.releases")
    ready = _ready(_Version(2), _Version(3))
    headers = {b"x-user": b"secret"}
    quiet = _router(ALL, sticky="header:X-User")
    quiet.choose(ready, InferForm((), id="r1"), headers.get)
    assert caplog.records == []
    loud = Router(quiet.release._replace(logged=True), Tally(2), FakeClock().monotonic_ns)
    for number in (1, 2):
        loud.choose(ready, InferForm((), id=f"r{number}"), headers.get)
    first, second = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert (first["model"], first["version"], first["arm"], first["request"]) == ("m", "3", "canary", "r1")
    assert first["client"] == second["client"] != ""
    assert "secret" not in caplog.text


def test_a_request_binds_once_and_then_names_its_version() -> None:
    two, three = _Version(2), _Version(3)
    routed = _router(ALL).route(_ready(two, three))
    assert routed.version_text == "2"  # not chosen yet
    routed.submit(InferForm(()), [], lambda *_: None)
    assert routed.version_text == "3"
    assert routed.bind() is three
    assert _router(ALL).route(_ready(two, three)).acquire()


def test_the_version_that_splits_a_request_runs_it() -> None:
    router, splitters = _router(HALF), set[int]()
    for _ in range(100):
        versions = _Version(2), _Version(3)
        routed: Any = router.route(_ready(*versions))
        (splitter,) = routed.split(InferForm(()), [])
        routed.submit(InferForm(()), [], lambda *_: None)
        assert [each.version for each in versions if each.replies] == [splitter]
        splitters.add(splitter)
    assert splitters == {2, 3}


def test_answers_are_counted_by_version_and_cancelled_requests_are_not() -> None:
    clock = FakeClock()
    router = _router(ALL, clock=clock)
    three = _Version(3)
    heard: list[object] = []
    answers = (
        Response([]),
        InternalError("bad"),
        InternalError("on purpose", answered=True),
        CancelledError("gone"),
        Streamed(Response([]), False),
        Streamed(None, True),
    )
    for answer in answers:
        router.route(_ready(three)).submit(InferForm(()), [], lambda _, outcome: heard.append(outcome))
        clock.advance(2 * MS)
        three.replies[-1](None, answer)
    assert heard == list(answers)
    row = router.tally.rows()[3]
    assert (row["answers"], row["errors"], row["mean_ms"]) == (4, 2, 2.0)


def test_a_refused_request_counts_as_failed_and_a_retired_version_does_not() -> None:
    router, three = _router(ALL), _Version(3)
    for refusal, errors in ((RetiredError("replaced"), 0), (UnavailableError("full"), 1)):
        three.refusal = refusal
        with pytest.raises(type(refusal)):
            router.route(_ready(three)).submit(InferForm(()), [], lambda *_: None)
        assert router.tally.observed(3).canary_errors == Rate(errors, errors)


def _shadowed(*arms: Arm, recorder: Any, shadow: Shadow = OTHER) -> Router:
    release = Release(2, arms, salt="s", shadow=shadow)
    shadowing: Any = SimpleNamespace(recorder=recorder, refusal=lambda model: "")
    return Router(release, Tally(2), FakeClock().monotonic_ns, shadowing=shadowing)


def test_requests_are_routed_for_a_shadow_only_while_it_records() -> None:
    ready = _ready(_Version(2))
    recorder = Recorder(lambda recording: None, lambda: 0, 1.0)
    router = _shadowed(recorder=recorder)
    assert router.splits(ready)
    assert not router.route(ready).is_divided
    recorder.close()
    assert not router.splits(ready)
    assert _shadowed(ALL, recorder=recorder).splits(_ready(_Version(2), _Version(3)))


def test_a_request_that_is_copied_and_refused_leaves_no_recording() -> None:
    two = _Version(2)
    two.refusal = UnavailableError("full")
    offered: list[Recording] = []
    router = _shadowed(recorder=Recorder(offered.append, lambda: 0, 1.0))
    for _ in range(MAX_WAITING + 1):
        with pytest.raises(UnavailableError):
            router.route(_ready(two)).submit(InferForm(()), [], lambda *_: None)
    two.refusal = None
    router.route(_ready(two)).submit(InferForm(()), [], lambda *_: None)
    two.replies[-1](TICKET, Response([]))
    assert len(offered) == 1
    assert router.tally.rows() == {}  # no release runs


def _step(router: Router, ready: Any, headers: Any = None, **members: Any) -> None:
    """Send a request of sequence 7 to version 2 and answer it."""
    routed = router.route(ready)
    routed.identify((headers or {}).get)
    routed.submit(InferForm((), sequence_id=7, **members), [], lambda *_: None)
    ready[2].replies[-1](TICKET, Response([]))


@pytest.mark.parametrize(
    ("shadow", "arms", "headers", "members", "copied"),
    [
        (OTHER, (), {}, {}, 1),
        (OTHER._replace(weight=0), (), {}, {}, 1),  # requests after the start are not sampled
        (OTHER._replace(weight=0), (), {}, {"sequence_start": True}, 0),
        (OTHER, (), {}, {"raw": True}, 0),
        (OTHER, (), {}, {"outputs": (OutputSpec("y", 3),)}, 0),
        (OTHER, (), {COPY_HEADER: b"1"}, {}, 0),
        (Shadow(4, HUNDRED), (), {}, {}, 0),  # the version is not ready
        (Shadow(2, HUNDRED), (), {}, {}, 0),  # the version answers the request itself
        (Shadow(3, HUNDRED), (Arm("canary", 3, 0),), {}, {}, 0),  # clients begin sequences there
    ],
)
def test_a_sequence_of_which_a_request_is_skipped_is_not_copied(
    shadow: Shadow, arms: tuple[Arm, ...], headers: Any, members: Any, copied: int
) -> None:
    offered: list[Recording] = []
    recorder = Recorder(offered.append, lambda: 0, 1.0)
    ready = _ready(_Version(2), _Version(3))
    _step(_shadowed(recorder=recorder), ready, sequence_start=True)
    _step(_shadowed(*arms, recorder=recorder, shadow=shadow), ready, headers, **members)
    _step(_shadowed(recorder=recorder), ready, sequence_end=True)
    assert [len(recording.steps) for recording in offered] == [3] * copied


def test_requests_are_routed_while_a_sequence_is_recorded_although_the_shadow_is_not_ready() -> None:
    recorder = Recorder(lambda recording: None, lambda: 0, 1.0)
    router = _shadowed(recorder=recorder, shadow=Shadow(3, HUNDRED))
    ready = _ready(_Version(2), _Version(3))
    alone = {2: ready[2]}
    assert not router.splits(alone)
    _step(router, ready, sequence_start=True)
    assert router.splits(alone)
    _step(router, alone)
    assert not router.splits(alone)


def test_the_judgement_is_looked_at_after_an_answer_but_not_too_often() -> None:
    clock, looks = FakeClock(), []
    router = _router(ALL, clock=clock, judge=lambda: looks.append(clock.now_ns))
    for _ in range(5):
        router.record(3, Response([]), clock.now_ns)
    assert len(looks) == 1
    clock.advance(JUDGE_EVERY_NS)
    router.record(3, Response([]), clock.now_ns)
    assert len(looks) == 2


def test_latencies_count_against_a_limit_from_the_stable_version() -> None:
    tally = Tally(2)
    tally.record(3, 10**12, failed=False)
    for _ in range(CALIBRATION):
        tally.record(2, 10 * MS, failed=False)
    assert tally.limit_ns == 12.5 * MS
    for latency in (12 * MS, 13 * MS, 14 * MS):
        tally.record(3, latency, failed=False)
    tally.record(3, 14 * MS, failed=True)
    observed = tally.observed(3)
    assert (observed.canary_slow, observed.stable_slow) == (Rate(2, 3), Rate(0, 0))
    assert observed.canary_errors == Rate(1, 5)


def test_a_given_limit_counts_from_the_first_answer() -> None:
    tally = Tally(2, 5 * MS)
    tally.record(2, 6 * MS, failed=False)
    assert tally.observed(3).stable_slow == Rate(1, 1)
