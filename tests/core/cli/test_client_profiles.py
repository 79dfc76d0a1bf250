"""Profiles of servers: which URL and headers a command uses, and which files are refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from remora.cli.arguments import DEFAULT_URL
from remora.cli.client import choose_server, profiles_path, request_headers
from remora.cli.output import UsageError

FILE = """
[staging]
url = "https://staging.example"
api_key = "@key"
headers = { x-team = "a", x-gate = "@env:GATE" }

[bare]
url = "http://bare.example:9000"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "profiles.toml").write_text(FILE)
    (tmp_path / "key").write_text("secret\n")
    return {"REMORA_PROFILES": str(tmp_path / "profiles.toml"), "GATE": "open"}


def options_of(**more: Any) -> argparse.Namespace:
    given = {"url": "", "profile": "", "header": [], "header_variable": "x-other=1", "api_key_variable": "other"}
    return argparse.Namespace(**given | more)


def chosen(environ: dict[str, str], **more: Any) -> tuple[str, dict[str, str]]:
    options = options_of(**more)
    choose_server(options, DEFAULT_URL, environ)
    return options.url, request_headers(options)


PLAIN = {"x-other": "1", "x-api-key": "other"}


def test_a_profile_has_the_url_and_the_secrets_of_its_server_alone(environ: dict[str, str]) -> None:
    headers = {"x-team": "a", "x-gate": "open", "x-api-key": "secret"}
    assert chosen(environ, profile="staging") == ("https://staging.example", headers)
    assert chosen(environ, profile="bare") == ("http://bare.example:9000", {})
    assert chosen(environ, profile="bare", header=["authorization=x"])[1] == {"authorization": "x"}


def test_the_variable_names_a_profile_unless_the_command_names_a_server(environ: dict[str, str]) -> None:
    environ["REMORA_PROFILE"] = "staging"
    assert chosen(environ)[0] == "https://staging.example"
    assert chosen(environ, profile="bare")[0] == "http://bare.example:9000"
    assert chosen(environ, url="http://other:1") == ("http://other:1", PLAIN)
    assert chosen(environ, repository=Path("models")) == (DEFAULT_URL, PLAIN)


def test_without_a_profile_the_default_holds(environ: dict[str, str]) -> None:
    assert chosen(environ) == (DEFAULT_URL, PLAIN)
    assert chosen({}) == (DEFAULT_URL, PLAIN)


def test_the_file_is_among_the_settings_of_the_user() -> None:
    assert profiles_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/remora/profiles.toml")
    assert profiles_path({}) == Path.home() / ".config/remora/profiles.toml"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[other]\nurl='x'", "has other"),
        ("", "has no profiles"),
        ("[p", "profiles.toml: "),
        ("p = 1", "has p"),
        ("[p]", "expected a URL as url"),
        ("[p]\nurl = 1", "expected a URL as url"),
        ("[p]\nurl = 'x'\nkey = 'y'", "unknown member 'key'"),
        ("[p]\nurl = 'x'\napi_key = 'top-secret'", "api_key: expected @FILE or @env:VARIABLE"),
        ("[p]\nurl = 'x'\napi_key = '@env:NONE'", "the variable NONE is not set"),
        ("[p]\nurl = 'x'\nheaders = ['top-secret']", "expected a table of texts as headers"),
    ],
)
def test_a_wrong_file_is_explained_without_its_secrets(environ: dict[str, str], text: str, reason: str) -> None:
    Path(environ["REMORA_PROFILES"]).write_text(text)
    with pytest.raises(UsageError, match=reason) as caught:
        chosen(environ, profile="p")
    assert "top-secret" not in str(caught.value)


def test_a_missing_file_is_named(environ: dict[str, str]) -> None:
    environ["REMORA_PROFILES"] += ".none"
    with pytest.raises(UsageError, match=r"there is no file .*profiles\.toml\.none"):
        chosen(environ, profile="p")


def test_a_missing_key_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "key").unlink()
    with pytest.raises(OSError, match="key"):
        chosen(environ, profile="staging")


def test_a_profile_and_a_url_contradict_each_other(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="leave --url out"):
        chosen(environ, profile="staging", url="http://x")
