"""The command line without a model: usage, exit codes and versions."""

from __future__ import annotations

import platform

import pytest

from remora import __version__
from remora.cli import main
from remora.cli.output import columns, one_line, reason_of
from remora.errors import ConfigError, InternalError

WRONG = (
    ["config"],
    ["config", "show"],
    ["config", "check"],
    ["config", "show", "m", "--format", "toml"],
)


def test_version_names_remora_python_and_the_runtimes_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    rows = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert rows["remora"] == __version__
    assert rows["python"] == platform.python_version()
    assert "numpy" in rows


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_ends_with_2_and_says_why(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns([("a", "bb"), ("ccc", "d", "e"), ()]) == "a    bb\nccc  d   e\n"
    assert columns([]) == ""


def test_a_reason_is_one_line() -> None:
    assert one_line(" a\n\tb  c\n") == "a b c"


def test_a_reason_takes_in_what_its_causes_add_and_repeats_nothing() -> None:
    root = ConfigError("no such\nfolder")
    middle = InternalError("failed to load: no such folder")
    middle.__cause__ = root
    foreign = ValueError("not shown")
    root.__cause__ = foreign
    top = InternalError("cannot start")
    top.__cause__ = middle
    assert reason_of(top) == "cannot start: failed to load: no such folder"


def test_an_error_that_is_its_own_cause_is_reported_once() -> None:
    error = ConfigError("in a circle")
    error.__cause__ = error
    assert reason_of(error) == "in a circle"


def test_an_error_without_words_is_called_by_its_name() -> None:
    assert reason_of(OSError()) == "OSError"
