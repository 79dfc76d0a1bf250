"""Arguments of the commands that talk to a server: usage, exit codes, and what they may import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from remora.cli import main

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
    ["models"],
    ["models", "load"],
    ["models", "unload"],
    ["models", "drop", "m"],
)


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
