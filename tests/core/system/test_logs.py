"""The log of a process: what a change of its settings does to the lines that come out."""

from __future__ import annotations

import io
import logging
import re

import pytest

from remora.errors import UnavailableError
from remora.system.logs import Log, LogSettings


class Process:
    """A process with a separate log."""

    def __init__(self) -> None:
        self.root = logging.Logger("root")
        self.root.manager = logging.Manager(self.root)  # type: ignore[arg-type]  # or its levels would be remembered
        self.ours = self.root.getChild("remora")
        self.stream = io.StringIO()
        self.log = Log(self.ours)

    def lines(self) -> list[str]:
        """What comes out when one record of each severity goes in."""
        self.stream.seek(0)
        self.stream.truncate()
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            self.ours.log(severity, "said")
        return self.stream.getvalue().splitlines()

    def severities(self) -> str:
        return "".join(line.split()[-3] for line in self.lines())


@pytest.fixture
def process() -> Process:
    """One whose log is ours."""
    made = Process()
    made.log.set_up(LogSettings(), made.root, made.stream)
    return made


def test_a_change_of_the_settings_changes_the_lines_that_come_out(process: Process) -> None:
    assert process.severities() == "IWE"
    process.log.change({"log_warning": False})
    assert process.severities() == "IE"
    process.log.change({"log_info": False, "log_verbose_level": 1})
    assert process.severities() == "DE"
    process.log.change({"log_error": False, "log_verbose_level": 0})
    assert process.severities() == ""


def test_verbose_output_is_ours_alone_because_libraries_log_secrets(process: Process) -> None:
    process.log.change({"log_verbose_level": 3})
    assert process.severities() == "DIWE"
    process.lines()
    length = process.stream.tell()
    library = process.root.getChild("hpack")
    library.debug("authorization: SECRET")
    library.info("said")
    assert [line.split()[-3:] for line in process.stream.getvalue()[length:].splitlines()] == [
        ["I", "root.hpack:", "said"]
    ]


def test_the_format_changes_the_time_of_the_lines(process: Process) -> None:
    process.log.change({"log_format": "ISO8601"})
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I root\.remora: said", process.lines()[0])


def test_a_change_that_is_refused_changes_nothing(process: Process) -> None:
    with pytest.raises(UnavailableError):
        process.log.change({"log_info": False, "log_format": "x"})
    assert process.log.change({}) == LogSettings()
    assert process.severities() == "IWE"


def test_in_a_program_that_embeds_the_engine_only_our_own_level_moves() -> None:
    program = Process()
    program.log.change({"log_info": False})
    assert (program.ours.level, program.root.level, program.root.handlers) == (logging.WARNING, logging.NOTSET, [])
