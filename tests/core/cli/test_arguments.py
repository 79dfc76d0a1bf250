"""The command line without a model: usage, exit codes, versions, and what a command may import."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from remora import __version__
from remora.cli import main
from remora.cli.output import columns, one_line, reason_of
from remora.errors import ConfigError, InternalError

WRONG = (
    ["infer"],
    ["infer", "m", "--version", "-1"],
    ["infer", "m", "--version", "x"],
    ["infer", "m", "--npy", "x.npy"],
    ["infer", "m", "--input", "=1"],
    ["infer", "m", "--shape", "x=1x-3"],
    ["infer", "m", "--shape", "x=1,3"],
    ["infer", "m", "--timeout", "0"],
    ["infer", "m", "--timeout", "nan"],
    ["infer", "m", "--url", "http://h:1", "--repository", "r"],
    ["config"],
    ["config", "show"],
    ["config", "check"],
    ["config", "show", "m", "--format", "toml"],
    ["models"],
    ["models", "load"],
    ["models", "unload"],
    ["models", "drop", "m"],
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["infer", "m"], "no inputs: pass"),
        (["infer", "m", "--random", "--repeat", "0"], "--repeat must be 1 or more"),
        (["infer", "m", "--random", "--url", "ftp://h"], "expected http://HOST:PORT"),
        (["models", "list", "--url", "http://h:port"], "--url: expected http://HOST:PORT"),
        (["models", "list", "--url", "http://"], "expected http://HOST:PORT"),
        (["models", "load", "m", "--file", "1/model.onnx=x"], "--file requires --config"),
    ],
)
def test_arguments_that_do_not_go_together_end_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"remora {arguments[0]}")
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_a_command_that_needs_no_arrays_imports_none(child_environment: dict[str, str]) -> None:
    code = (
        "import json, sys; from remora.cli import main; main(['models', 'list', '--url', 'http://127.0.0.1:1']); "
        "print(json.dumps(sorted(sys.modules)))"
    )
    probe = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    loaded = json.loads(probe.stdout)
    assert not {"numpy", "onnxruntime", "google.protobuf", "importlib.metadata", "yaml"} & set(loaded)


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
