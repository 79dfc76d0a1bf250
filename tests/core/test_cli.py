"""Flags made from option dataclasses, in the forms that Triton takes [V05]."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from conftest import needs
from remora.cli import _warn_of_exposure, add_options, checked_options, main, read_options
from remora.options import EngineOptions, ServerOptions
from remora.server.host import ExtraPort, Host, v2_alone


def options_of(*arguments: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineOptions)
    options = read_options(parser.parse_args(arguments), EngineOptions())
    assert isinstance(options, EngineOptions)
    return options


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("TRUE", True), ("On", True), ("1", True), ("false", False), ("off", False), ("0", False)],
)
def test_a_boolean_has_tritons_spellings(word: str, value: bool) -> None:
    assert options_of(f"--strict-readiness={word}").strict_readiness is value


@pytest.mark.parametrize("word", ["yes", "2", ""])
def test_another_spelling_of_a_boolean_is_refused(word: str) -> None:
    with pytest.raises(SystemExit):
        options_of(f"--strict-readiness={word}")


@pytest.mark.parametrize("word", ["explicit", "EXPLICIT", "Explicit"])
def test_a_choice_may_be_in_any_case(word: str) -> None:
    assert options_of(f"--model-control-mode={word}").model_control_mode == "explicit"


@pytest.mark.parametrize(("word", "level"), [("3", 3), ("True", 1), ("false", 0)])
def test_the_verbose_level_may_be_a_boolean(word: str, level: int) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServerOptions)
    options = read_options(parser.parse_args([f"--log-verbose={word}"]), ServerOptions())
    assert options.log_verbose == level


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit):
        options_of("--model-control-mode=never")


SECRETS = [
    (
        ("--http-restricted-api=health:key=SECRET", "--http-restricted-api=health:other=SECRET"),
        "can not be specified in",
    ),
    (("--http-restricted-api=nonsense:key=SECRET",), "unknown restricted api 'nonsense'"),
    (("--grpc-restricted-protocol=nonsense:key=SECRET",), "unknown restricted protocol 'nonsense'"),
    (("--http-restricted-api=health=SECRET",), "option format is '<config name>:<setting>=<value>'. Got health=..."),
    (
        ("--http-restricted-api=health:key=@/nowhere",),
        "/nowhere that should hold a secret cannot be read: No such file",
    ),
    (("--http-restricted-api=health:key=@env:REMORA_NO_SUCH",), "REMORA_NO_SUCH that should hold a secret is not set"),
    (("--http-max-input-size=0",), "--http-max-input-size=0: expected more than 0 bytes"),
    (("--http-max-input-size=-5",), "--http-max-input-size=-5: expected more than 0 bytes"),
    (("--grpc-max-message-size=0",), "--grpc-max-message-size=0: expected more than 0 bytes"),
    (
        ("--cache-config=local,size=1048576", "--response-cache-byte-size=1048576"),
        "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
        "Please provide one or the other.",
    ),
    (
        ("--cache-config=local,size=1048576", "--cache-config=redis,password=SECRET"),
        "found multiple cache configurations, but only a single cache is currently supported\n",
    ),
    (("--cache-config=nosuch,key=SECRET",), "there is no cache 'nosuch'"),
]


@pytest.mark.parametrize(("flags", "says"), SECRETS)
def test_what_cannot_be_served_with_ends_the_start_with_1_and_shows_no_secret(
    flags: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), *flags]) == 1
    shown = capsys.readouterr()
    assert says in shown.err
    assert "SECRET" not in shown.err + shown.out


def test_secrets_come_from_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("from a file\n")
    monkeypatch.setenv("REMORA_TEST_KEY", "from a variable")
    options = checked_options(
        ServerOptions(
            http_restricted_api=(f"health:key=@{tmp_path / 'key'}",),
            grpc_restricted_protocol=("health:key=@env:REMORA_TEST_KEY",),
        )
    )
    assert options.http_restricted_api == ("health:key=from a file",)
    assert options.grpc_restricted_protocol == ("health:key=from a variable",)


def test_reload_excludes_models_that_clients_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--reload", "--model-control-mode=explicit"]) == 2
    assert "--reload excludes --model-control-mode=explicit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("serve", "--htp-port", "1", "m"), "--htp-port; did you mean --http-port?"),
        (("serve", "--port=1", "m"), "--port; did you mean --http-port?"),
        (("serve", "--host", "1", "m"), "--host; did you mean --http-address?"),
        (("serve", "--workers", "2"), "--workers; one process serves all models"),
        (("serve", "--qqq"), "--qqq\n"),
        (("config", "check", "m", "--opn"), "--opn; did you mean --open?"),
        pytest.param(("infer", "m", "--workers"), "--workers\n", marks=needs("remora_tools")),
        pytest.param(("explain", "m", "other"), "other\n", marks=needs("remora_tools")),
    ],
)
def test_an_unknown_flag_gets_the_usage_of_its_command_and_the_nearest_flag(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.rpartition("error: ")
    command = " ".join(words[: 2 if words[0] == "config" else 1])
    assert usage.startswith(f"usage: remora {command} ")
    assert error.startswith("unrecognized arguments: ")
    assert hint in error


@pytest.mark.parametrize("value", ["99999", "65536", "-1", "http", "1_0"])
@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port", "--sagemaker-port"])
def test_a_port_out_of_range_is_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "models", f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"expected a port, 0 to 65535, got '{value}'" in capsys.readouterr().err


@needs("remora_deploy")
@pytest.mark.parametrize(("command", "platform"), [("emulate", "vertex"), ("manifests", "knative")])
def test_the_help_of_a_command_lists_its_platforms(
    command: str, platform: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"{platform}" in capsys.readouterr().out.split("PLATFORM", 2)[2]


def test_the_help_lists_every_command_once_in_a_group_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["nonsense"])
    choices = re.findall(r"'?([a-z][a-z-]+)'?(?=[,)])", capsys.readouterr().err.partition("choose from")[2])
    listed = re.findall(r"^  ([a-z][a-z-]+) ", shown, re.MULTILINE)
    assert sorted(listed) == sorted(choices)
    assert "serve" in listed
    assert "Other:" not in shown


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


@needs("remora_deploy")
@needs("remora_tools")
def test_the_help_begins_with_five_commands_to_start_with(capsys: pytest.CaptureFixture[str]) -> None:
    groups = re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", help_of(capsys, "--help"), re.MULTILINE)
    assert [title for title, _ in groups[:2]] == ["options", "Start here"]
    assert [row.split()[0] for row in groups[1][1].splitlines()] == ["serve", "init", "infer", "bench", "deploy"]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_of_serve_shows_the_basic_options_and_counts_the_others(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = [field for kind in (EngineOptions, ServerOptions) for field in dataclasses.fields(kind)]
    basic = {f"--{field.name.replace('_', '-')}" for field in declared if field.metadata["basic"]} - {"--paths"}
    shown = help_of(capsys, "serve", flag)
    listed = re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.MULTILINE)
    assert set(listed) == basic | {"--help", "--help-all", "--host-platform"}
    assert len(listed) <= 20
    others = sum(not field.metadata["basic"] for field in declared)
    assert shown.endswith(f"\n\nremora serve --help-all shows the other {others} options.\n")


def test_all_options_of_serve_are_shown_by_help_all_under_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "serve", "--help-all")
    for kind in (EngineOptions, ServerOptions):
        heading = f"\n{(kind.__doc__ or '').rstrip('.')}:\n"
        group = shown.partition(heading)[2].partition("\n\n")[0]
        flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind) if field.name != "paths"]
        assert re.findall(r"^  (--[a-z0-9-]+)", group, re.MULTILINE) == flags


def test_a_misspelled_flag_is_named_without_its_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--http-restricted-apis=health:key=SECRET"], ["--http-restricted-apis", "health:key=SECRET"]):
        with pytest.raises(SystemExit):
            main(["serve", str(tmp_path), *words])
        shown = capsys.readouterr().err
        assert "--http-restricted-apis; did you mean --http-restricted-api?" in shown
        assert "SECRET" not in shown


@pytest.mark.parametrize(
    ("host", "warned"),
    [
        (Host(), False),
        (Host(server=ServerOptions(metrics_address="0.0.0.0")), True),
        (Host(server=ServerOptions(grpc_address="0.0.0.0")), True),
        (Host(extra_ports=(ExtraPort("second", "0.0.0.0", 4711, v2_alone),)), True),
        (Host(extra_ports=(ExtraPort("second", "127.0.0.1", 4711, v2_alone),)), False),
    ],
)
def test_each_port_beyond_this_machine_that_every_client_may_use_has_a_warning(
    host: Host, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_exposure(host)
    assert ("every client that reaches 0.0.0.0 may" in caplog.text) is warned
