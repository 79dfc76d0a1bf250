"""`remora bench load` with real servers and terminals that end, fill up or take more than a server can answer."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer
from remora.cli import main
from remora.errors import UnavailableError
from remora_tools.load import Plan, Results
from support.models.generation_models import tiny
from support.servers.hosting import ask
from support.servers.live_server import free_port, process, until, write_version

SHORT = ("--duration=3", "--window=0.2", "--warm-up=0.1")
TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job inherits that it is ignored
terminal = os.open(sys.argv[1], os.O_RDWR)  # a session without a terminal takes the first one that it opens
for number in (0, 1, 2):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, "-m", "remora", *sys.argv[2:]])
"""
"""Program that runs a command of remora in a terminal, whose name comes first."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("faults") / "models"
    write_version(models, 1)
    write_version(models, 1, name="other")
    tiny(models)
    with serving(models, "--backend-config=python,isolation=thread") as running:
        yield running


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the processes of each load by their windows, of which an exception ends the load."""

    def play(*loads: Sequence[Results | BaseException]) -> None:
        waiting = list(loads)

        @contextmanager
        def generators(plans: Sequence[Plan]) -> Iterator[Callable[[], Results]]:
            windows = iter(waiting.pop(0))

            def next_window() -> Results:
                window = next(windows)
                if isinstance(window, BaseException):
                    raise window
                return window

            yield next_window

        monkeypatch.setattr("remora_tools.bench_load._generators", generators)

    return play


def window(answers: int, failures: int = 0, cpu: float = 0.1) -> Results:
    found = Results(seconds=0.2, cpu=cpu, failures={"Connection refused": failures} if failures else {})
    for _ in range(answers):
        found.latency.record(1_000_000)
        found.service.record(1_000_000)
    return found


PLAYED = ("--path=/x", "--url=http://127.0.0.1:1", "--warm-up=0.01", "--window=0.2", "--duration=0.6")


def _url(server: RunningServer) -> tuple[str, ...]:
    return ("--url", f"http://127.0.0.1:{server.http}")


def _levels(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
    assert main(["bench", "load", *SHORT, "--quiet", "--json-out", *words]) == code
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


# -- requests ---------------------------------------------------------------------------------------------------------


def test_the_models_of_a_mix_share_the_requests_that_a_server_counts(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def answered(name: str) -> int:
        reply = ask(server.http, "GET", f"/v2/models/{name}/stats")
        return int(json.loads(reply.body)["model_stats"][0]["inference_stats"]["success"]["count"])

    before = answered("m"), answered("other")
    (level,) = _levels(capsys, "m=3", "other", *_url(server))
    assert level["failures"] == {}
    first, second = answered("m") - before[0], answered("other") - before[1]
    assert second > 0
    assert abs(first - 3 * second) <= 3


def test_the_requests_of_a_file_reach_a_server_in_turn(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requests.jsonl").write_text('{"IN": [[1]]}\n{"IN": [[1]]}\n{"IN": [[1, 2]]}\n')
    (level,) = _levels(capsys, "m", "--requests", str(tmp_path / "requests.jsonl"), *_url(server))
    assert level["requests"] > 3
    assert abs(level["requests"] - 2 * level["failures"]["HTTP 400"]) <= 2, "the third has another shape"
    assert "shape" in level["failure_reasons"]["HTTP 400"]


@pytest.mark.parametrize("stream", [True, False])
def test_answers_of_a_language_model_have_the_times_and_rates_of_their_tokens(
    stream: bool, server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    (tmp_path / "body.json").write_text(json.dumps(body))
    words = ("--path=/v1/completions", "--body", str(tmp_path / "body.json"))
    (level,) = _levels(capsys, *words, "--concurrency=2", *_url(server))
    assert level["failures"] == {}
    assert ("first_event_us" in level, "between_events_us" in level, "tokens_per_s" in level) == (stream,) * 3
    if stream:
        assert level["tokens_per_s"] == pytest.approx(6 * level["requests_per_s"], rel=0.01)
        assert level["first_event_us"]["p50"] > 0, "only further events may arrive together"
        for times in (level["first_event_us"], level["between_events_us"]):
            assert 0 <= times["p50"] <= times["p99"] <= times["max"] <= level["latency_us"]["max"]


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_server_that_dies_leaves_the_results_until_then(tmp_path: Path, child_environment: dict[str, str]) -> None:
    write_version(tmp_path / "models", 1)
    port = free_port()
    loads = ("--concurrency=" + ",".join(map(str, range(1, 50))), "--csv", str(tmp_path / "r.csv"))
    command = [sys.executable, "-m", "remora", "bench", "load", "m", f"--url=http://127.0.0.1:{port}", "--json-out"]
    with process(tmp_path / "models", port, child_environment) as running:
        until(port, "/readyz", running)
        with subprocess.Popen(
            [*command, *SHORT, *loads],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment,
        ) as load:
            assert load.stderr is not None
            assert load.stderr.readline().startswith("1 connections")
            running.kill()
            out, err = load.communicate()
    assert load.returncode == 1
    assert f"cannot connect to 127.0.0.1:{port}: Connection refused" in err
    levels = json.loads(out)
    assert 1 <= len(levels) < 49
    assert (levels[0]["failures"], levels[0]["requests"] > 0) == ({}, True)
    assert not any(level["failures"] for level in levels[:-1])
    assert (tmp_path / "r.csv").read_text().count("\n") == 1 + len(levels)


def _read(terminal: int, until_seen: bytes) -> bytes:
    """Return what a terminal shows until a text or, for an empty one, until the last program has closed it."""
    shown = b""
    with suppress(OSError):  # EIO after the last close
        while not (until_seen and until_seen in shown) and (data := os.read(terminal, 4096)):
            shown += data
    return shown


def test_control_c_in_a_terminal_prints_what_was_measured(
    server: RunningServer, child_environment: dict[str, str]
) -> None:
    ours, theirs = os.openpty()
    words = ("bench", "load", "m", *_url(server), "--duration=600", "--window=0.2", "--fixed", "--processes=2")
    command = [sys.executable, "-c", TERMINAL, os.ttyname(theirs), *words, "--concurrency=2"]
    with subprocess.Popen(command, env=child_environment, start_new_session=True, pass_fds=[theirs]) as load:
        try:
            os.close(theirs)  # the load has it open from the start, and its end ends what can be read
            shown = _read(ours, b"window 2: ")
            os.write(ours, b"\x03")
            shown += _read(ours, b"")
            assert load.wait() == 130
        finally:
            load.kill()
            os.close(ours)
    text = shown.decode()
    assert "warm-up: " in text
    assert "req/s, p99 " in text
    assert "2 connections: the load ended early: it was interrupted" in text
    assert "Traceback" not in text


SATURATED = "the generator is saturated (95% of a processor): the server can do more"


@pytest.mark.parametrize(
    ("repetition", "requests", "notes"),
    [
        (
            [KeyboardInterrupt()],
            15,
            [SATURATED, "the repetition with 2 processes ended early: it was interrupted"],
        ),
        (
            [UnavailableError("a process of the load generator ended")],
            15,
            [SATURATED, "the repetition with 2 processes ended early: a process of the load generator ended"],
        ),
        ([window(7), KeyboardInterrupt()], 7, ["the load ended early: it was interrupted"]),
    ],
    ids=["interrupted-at-once", "failed-at-once", "interrupted-later"],
)
def test_a_repetition_that_ends_early_leaves_what_was_measured(
    repetition: list[Results | BaseException],
    requests: int,
    notes: list[str],
    play: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remora_tools.bench_load.usable_cpus", lambda: 4)
    play([window(5, cpu=0.95)] * 3, repetition)
    code = main(["bench", "load", *PLAYED, "--concurrency=8", "--json-out"])
    assert code == (130 if isinstance(repetition[-1], KeyboardInterrupt) else 1)
    (level,) = json.loads(capsys.readouterr().out)
    assert (level["requests"], level["notes"]) == (requests, notes)


@pytest.mark.parametrize(
    ("windows", "code", "notes"),
    [
        ([window(5), window(5, failures=1), window(0, failures=3)], 1, ["all requests of the last window failed"]),
        ([window(5), window(0, failures=3), window(1, failures=3)], 0, []),
        ([window(5), window(5), window(0)], 0, []),
        ([window(0), window(0), window(0)], 1, []),
    ],
    ids=["lost", "back-again", "slow", "never-there"],
)
def test_the_exit_code_shows_that_a_server_is_lost(
    windows: list[Results], code: int, notes: list[str], play: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    play(windows)
    assert main(["bench", "load", *PLAYED, "--json-out"]) == code
    (level,) = json.loads(capsys.readouterr().out)
    assert level["notes"] == notes


def test_a_file_for_results_that_cannot_be_written_is_refused_before_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.html").write_text("old")
    missing = tmp_path / "missing" / "r.csv"
    words = ["bench", "load", "m", "--url=http://127.0.0.1:1", "--html", str(tmp_path / "old.html")]
    assert main([*words, "--csv", str(missing)]) == 1
    assert f"No such file or directory: '{missing}'" in capsys.readouterr().err
    assert main([*words, "--csv", str(tmp_path / "new.csv")]) == 1
    assert "cannot connect" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


def test_a_full_disk_at_the_end_costs_no_results(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "m", *SHORT, *_url(server), "--csv=/dev/full"]) == 1
    shown = capsys.readouterr()
    assert "1 connections" in shown.out
    assert "No space left on device" in shown.err


def test_a_full_disk_keeps_the_files_of_an_earlier_load(
    play: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit of the size of files, which is the process's own, stands for the end of the disk."""
    for name in ("r.csv", "r.html"):
        (tmp_path / name).write_text("old")
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words in (["--csv", str(tmp_path / "r.csv")], ["--html", str(tmp_path / "r.html")]):
        play([window(5)] * 3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            assert main(["bench", "load", *PLAYED, *words]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        assert "File too large" in capsys.readouterr().err
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"r.csv": "old", "r.html": "old"}


def test_a_rate_far_above_what_can_be_sent_ends_in_time_and_is_noted(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (level,) = _levels(capsys, "m", "--rate=1000000", *_url(server))
    assert level["requests"] > 0
    assert any("of 1e+06 requests per second were answered" in note for note in level["notes"])


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "1e7", "fast", "1,,2"])
def test_a_wrong_rate_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "load", "m", f"--rate={rate}"])
    assert "expected requests per second, above 0 to 1,000,000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x94\x00", "is not text in UTF-8"),
        (b"", "is empty: expected a JSON document per line"),
        (b'{"IN": [[1]]}\n{"IN', "line 2 is not JSON"),
        (b'{"OTHER": [[1]]}', "has no input 'OTHER'; its inputs are IN"),
    ],
)
def test_a_damaged_file_of_requests_is_refused(
    content: bytes, reason: str, server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requests.jsonl").write_bytes(content)
    assert main(["bench", "load", "m", *_url(server), "--requests", str(tmp_path / "requests.jsonl")]) == 1
    assert reason in capsys.readouterr().err


def test_an_unknown_model_is_named(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "absent", *_url(server)]) == 1
    assert "Request for unknown model: 'absent' is not found" in capsys.readouterr().err
