"""`remora release`: arguments, the requests that they become, and the text of the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remora.cli import main
from remora.cli.client import ApiAnswer
from remora.cli.output import UsageError
from remora_tools.client import release as command

STATUS: dict[str, Any] = {
    "model": "m",
    "stage": "running",
    "stable": 2,
    "automatic": True,
    "arms": [
        {"alias": "stable", "version": 2, "weight": 90.0, "ready": True, "answers": 9, "errors": 0, "mean_ms": 1.5},
        {"alias": "canary", "version": 3, "weight": 10.0, "ready": False},
    ],
    "aliases": {"old": 1},
    "rejected": [4],
    "steps": [50.0],
    "judgement": "the canary has 1 of\nthe 100 answers",
    "warning": "",
    "events": [{"at_ms": 1, "action": "start canary version 3 with 10 %", "reason": "command"}],
}


class _Server:
    """Client that keeps the requests and answers with a status."""

    name = "http://test"

    def __init__(self, answer: ApiAnswer) -> None:
        self.answer = answer
        self.sent: list[tuple[str, str, Any]] = []

    def exchange(self, method: str, path: str, body: bytes = b"", header_length: int | None = None) -> ApiAnswer:
        self.sent.append((method, path, json.loads(body) if body else None))
        return self.answer

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> _Server:
    found = _Server(ApiAnswer(200, None, json.dumps(STATUS).encode()))
    monkeypatch.setattr(command, "open_client", lambda _options: found)
    return found


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (["start", "m", "3", "--canary", "10%"], {"action": "start", "version": 3, "weight": "10%"}),
        (
            ["start", "m", "3", "--canary=5", "--steps=25%,50%", "--auto", "--bake=2m", "--alpha=0.01", "--least=9"],
            {
                "action": "start",
                "version": 3,
                "weight": "5",
                "steps": ["25%", "50%"],
                "automatic": True,
                "rules": {"bake_s": 120.0, "alpha": 0.01, "least": 9},
            },
        ),
        (
            ["start", "m", "3", "--name=b", "--sticky=header:x", "--log", "--reason=test"],
            {
                "action": "start",
                "version": 3,
                "weight": "0",
                "alias": "b",
                "sticky": "header:x",
                "log": True,
                "reason": "test",
            },
        ),
        (["weight", "m", "25%"], {"action": "weight", "weight": "25%"}),
        (["promote", "m", "--reason", "good"], {"action": "promote", "reason": "good"}),
        (["rollback", "m", "--name", "b"], {"action": "rollback", "alias": "b"}),
        (["alias", "m", "old", "1"], {"action": "alias", "alias": "old", "version": 1}),
        (["alias", "m", "old"], {"action": "alias", "alias": "old"}),
        (
            ["shadow", "m", "3", "--share=5%", "--tolerance=1e-3"],
            {"action": "shadow", "version": 3, "weight": "5%", "tolerance": 0.001, "top_k": 0},
        ),
        (["shadow", "m"], {"action": "shadow"}),
        (["end", "m"], {"action": "end"}),
        (["end", "m", "--serve-latest"], {"action": "end", "serve_latest": True}),
    ],
)
def test_a_command_becomes_one_request(words: list[str], sent: dict[str, Any], server: _Server) -> None:
    assert main(["release", *words]) == 0
    assert server.sent == [("POST", "/v2/models/m/release", sent)]


@pytest.mark.parametrize(
    "words", [["--steps=25%"], ["--bake=2m"], ["--alpha=0.01"], ["--slow-ms=0"], ["--least=9"], ["--least=9", "--log"]]
)
def test_options_of_the_judgement_are_refused_without_auto(
    words: list[str], server: _Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["release", "start", "m", "3", *words]) == 2
    option = words[0].partition("=")[0]
    assert f"{option}: only with --auto, because people decide without it" in capsys.readouterr().err
    assert server.sent == []


def test_the_status_is_read_and_printed(server: _Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["release", "status", "m"]) == 0
    assert server.sent == [("GET", "/v2/models/m/release", None)]
    assert capsys.readouterr().out == (
        "m: a release is running, judged automatically\n"
        "ARM     VERSION  WEIGHT  STATE      ANSWERS  ERRORS  SLOW  MEAN\n"
        "stable  2        90 %    ready      9        0       0     1.5 ms\n"
        "canary  3        10 %    not ready  0        0       0     -\n"
        "aliases: old=1\n"
        "rolled back: 4\n"
        "next weights: 50 %\n"
        "judgement: the canary has 1 of the 100 answers\n"
        "- start canary version 3 with 10 %: command\n"
    )
    assert main(["release", "status", "m", "--json-out"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_a_model_without_a_release_is_one_line() -> None:
    assert command.print_status({"model": "m", "stage": "none", "stable": 2, "arms": []}) == (
        "m: no release, version 2 serves"
    )


def test_a_shadow_and_its_latest_differences_are_shown() -> None:
    shadow = {
        "title": "version 4",
        "weight": 50.0,
        "compared": 7,
        "differing": 2,
        "failed": 1,
        "dropped": 0,
        "samples": ["x"],
    }
    text = command.print_status({**STATUS, "shadow": shadow})
    assert "shadow: version 4 gets copies of 50 %: 7 compared, 2 differing, 1 failed, 0 dropped\n  x\n" in text


def test_an_event_without_a_reason_ends_with_its_action() -> None:
    event = {"at_ms": 1, "action": "copy 20 % to version 4", "reason": ""}
    assert command.print_status({**STATUS, "events": [event]}).endswith("\n- copy 20 % to version 4")


def test_another_server_is_recognised(server: _Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = ApiAnswer(200, None, b'["hello"]')
    assert main(["release", "status", "m"]) == 1
    assert "did not answer /v2/models/m/release with a release" in capsys.readouterr().err


def test_the_servers_reason_is_shown(server: _Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = ApiAnswer(400, None, b'{"error":"version 2 is stable already"}')
    assert main(["release", "start", "m", "2"]) == 1
    assert "version 2 is stable already" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert command.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1m", "1w"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a duration such as 90s, 10m or 2h"):
        command.seconds_of(text)
