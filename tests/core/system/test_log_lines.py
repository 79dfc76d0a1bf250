"""Forms of log records: JSON objects that log services read, and lines for people."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest

from remora.system.log_lines import JsonLines, TextLines, trace_members, utc
from remora.system.logs import Log, LogSettings


def record(name: str = "remora.server", level: int = logging.INFO, message: str = "said", **more: Any) -> Any:
    made = logging.LogRecord(name, level, "file.py", 1, message, (), None)
    made.created = 1_700_000_000.25
    vars(made).update(more)
    return made


def read(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(made)
    assert "\n" not in line
    return dict(json.loads(line))


def test_a_record_is_one_object_with_the_names_that_log_services_read() -> None:
    assert read(record()) == {
        "timestamp": "2023-11-14T22:13:20.250Z",
        "severity": "INFO",
        "level": "INFO",
        "logger": "remora.server",
        "message": "said",
    }


def test_a_warning_has_the_names_of_cloud_logging_and_of_lambda() -> None:
    line = read(record(level=logging.WARNING))
    assert (line["severity"], line["level"]) == ("WARNING", "WARN")


def test_a_text_of_several_lines_stays_on_one_line() -> None:
    assert read(record(message="first\nsecond\x1b[31m"))["message"] == "first\nsecond\x1b[31m"


def test_an_exception_is_a_member_with_its_traceback() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        line = read(record(exc_info=sys.exc_info()))
    assert line["message"] == "said"
    assert line["stack_trace"].startswith("Traceback")
    assert line["stack_trace"].endswith("ValueError: why")


def test_the_logger_of_a_models_code_names_the_model() -> None:
    assert read(record(name="remora.model.resnet.v1"))["model"] == "resnet.v1"


def test_the_fields_of_a_record_are_members_and_unknown_values_become_text() -> None:
    line = read(record(fields={"model": "m", "version": "3", "path": {1}}))
    assert (line["model"], line["version"], line["path"]) == ("m", "3", "{1}")


def test_a_trace_has_the_names_of_opentelemetry_and_of_cloud_logging() -> None:
    assert trace_members("ab", "cd") == {
        "trace_id": "ab",
        "span_id": "cd",
        "logging.googleapis.com/trace": "ab",
        "logging.googleapis.com/spanId": "cd",
    }
    assert trace_members("ab", "").keys() == {"trace_id", "logging.googleapis.com/trace"}
    assert trace_members("", "cd") == {}


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "1970-01-01T00:00:00.000Z"), (1.9996, "1970-01-01T00:00:01.999Z")])
def test_times_are_utc_with_milliseconds(seconds: float, text: str) -> None:
    assert utc(seconds) == text


def test_colours_mark_warnings_and_errors_and_leave_information_plain() -> None:
    lines = TextLines(coloured=True)
    assert "\x1b" not in lines.format(record())
    assert lines.format(record(level=logging.WARNING)).startswith("\x1b[33m")
    assert lines.format(record(level=logging.ERROR)).endswith("said\x1b[0m")


class Terminal(io.StringIO):
    """Stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_colour", "coloured"), [(Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)]
)
def test_only_a_terminal_gets_colours_unless_its_user_wants_none(
    stream: io.StringIO, no_colour: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    root = logging.Logger("root")
    root.manager = logging.Manager(root)  # type: ignore[arg-type]  # or its levels would be remembered
    ours = root.getChild("remora")
    Log(ours).set_up(LogSettings(), root, stream)
    ours.error("said")
    assert ("\x1b" in stream.getvalue()) == coloured


def test_a_log_changes_to_json_and_back() -> None:
    root, stream = logging.Logger("root"), io.StringIO()
    root.manager = logging.Manager(root)  # type: ignore[arg-type]  # as above
    ours = root.getChild("remora")
    log = Log(ours)
    log.set_up(LogSettings(log_format="json"), root, stream)
    assert log.is_json
    ours.info("said")
    log.change({"log_format": "default"})
    ours.info("said")
    first, second = stream.getvalue().splitlines()
    assert json.loads(first)["message"] == "said"
    assert second.endswith(" I root.remora: said")
    assert not log.is_json


FORGED = "2026-01-01 00:00:00,000 E remora.keys: forged"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x1c", "\x85", "\u2028"])
def test_a_text_forges_no_record(end: str) -> None:
    line = TextLines(coloured=False).format(record(message=f"no backend 'x{end}{FORGED}'{end}"))
    assert [each for each in line.splitlines()[1:] if not each.startswith("    ")] == []
    assert FORGED in line


@pytest.mark.parametrize("control", ["\x1b[31m", "\x1b]0;title\x07", "\x08", "\x9b31m", "\x7f"])
def test_a_text_moves_no_cursor_and_sets_no_colour(control: str) -> None:
    line = TextLines(coloured=False).format(record(message=f"a{control}b\tc"))
    assert all(character.isprintable() or character == "\t" for character in line)


def test_further_lines_and_tracebacks_are_indented() -> None:
    try:
        raise ValueError(f"a\n{FORGED}\x1b[31m")
    except ValueError:
        failed = record(message="failed:\n\nat: x", exc_info=sys.exc_info())
    first, *others = TextLines(coloured=False).format(failed).split("\n")
    assert first.endswith("failed:")
    assert others[:2] == ["    at: x", "    Traceback (most recent call last):"]
    assert all(line.startswith("    ") for line in others)
    assert others[-1] == f"    {FORGED}\\x1b[31m"
