"""Hooks of plug-ins: parts of other packages are found, and a command imports no other command."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from remora import plugins
from remora.cli import main
from remora.errors import UnsupportedError


def entry(name: str, value: str, kind: str) -> EntryPoint:
    return EntryPoint(name, value, f"remora.{kind}")


def test_a_row_of_a_package_that_is_not_installed_is_not_present() -> None:
    assert not plugins.is_present("remora_of_nobody.part:Part")


def test_a_feature_whose_package_is_not_installed_names_it() -> None:
    with pytest.raises(UnsupportedError, match=r"^--thing needs the package remora_of_nobody, which is not installed$"):
        plugins.load_for("--thing", "remora_of_nobody.part:Part")


def test_a_command_imports_no_other_command(child_environment: dict[str, str]) -> None:
    code = "import sys; from remora.cli import main; main(['version']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env=child_environment, capture_output=True, text=True)
    loaded = {name for name in found.stdout.split() if name.startswith(("remora_", "remora.cli."))}
    assert loaded <= {f"remora.cli.{name}" for name in ("arguments", "commands", "output", "stderr", "versions")}


def hello(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name")
    parser.set_defaults(command=lambda options: print(f"hello {options.name}") or 0)


def test_a_command_of_another_package_runs_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        return [entry("hello", f"{__name__}:hello", "commands")] if group == "remora.commands" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert main(["hello", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "hello" in capsys.readouterr().out.partition("Other packages:")[2]


@pytest.mark.parametrize("words", [["broken"], ["serve", "--host-platform=broken", "."]])
def test_a_part_that_cannot_be_loaded_is_named_with_the_reason(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        return [entry("broken", "no_such_module:part", group.removeprefix("remora."))]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    with pytest.raises(SystemExit):
        sys.exit(main(words))
    said = capsys.readouterr().err
    assert (
        "no_such_module:part cannot be loaded as 'broken': ModuleNotFoundError: No module named 'no_such_module'"
        in said
    )


def test_no_entry_point_is_read_for_a_name_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(**_: Any) -> list[EntryPoint]:
        raise AssertionError("entry points are read")

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    with pytest.raises(SystemExit):
        main(["version", "--help"])
