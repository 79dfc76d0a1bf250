"""Profiles of the command line: servers by name, with a URL and references to their secrets, in a TOML file."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remora.cli.output import UsageError

_MEMBERS = ("url", "api_key", "headers")
_SECRET = "expected @FILE or @env:VARIABLE, because the file of profiles holds no secrets"


def profiles_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the file of profiles, ``REMORA_PROFILES`` or in the user's settings."""
    named = environ.get("REMORA_PROFILES")
    if named:
        return Path(named)
    settings = environ.get("XDG_CONFIG_HOME")
    return (Path(settings) if settings else Path.home() / ".config") / "remora" / "profiles.toml"


def choose_server(options: argparse.Namespace, default_url: str, environ: Mapping[str, str] = os.environ) -> None:
    """Set the URL and the headers of a command by its profile, ``--url``, or the default.

    A profile replaces the variables ``REMORA_HEADERS`` and ``REMORA_API_KEY``, so that no server gets the secrets of
    another one. Raises UsageError, OSError.
    """
    if options.profile and options.url:
        raise UsageError("--profile has a URL: leave --url out, or --profile")
    local = bool(options.url) or getattr(options, "repository", None) is not None
    name = options.profile or ("" if local else environ.get("REMORA_PROFILE", ""))
    if name:
        path = profiles_path(environ)
        _apply(options, path, name, _read(path, name), environ)
    options.url = options.url or default_url


def _read(path: Path, name: str) -> Mapping[str, Any]:
    """Return a profile of the file. Raises UsageError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--profile {name}: there is no file {path}; write [{name}] and url = ... into it") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    profile = document.get(name)
    if not isinstance(profile, dict):
        raise UsageError(f"--profile {name}: {path} has {', '.join(document) or 'no profiles'}")
    unknown = sorted(profile.keys() - set(_MEMBERS))
    if unknown:
        members = ", ".join(_MEMBERS)
        raise UsageError(f"{path}: profile '{name}' has the unknown member '{unknown[0]}': expected {members}")
    return profile


def _apply(
    options: argparse.Namespace, path: Path, name: str, profile: Mapping[str, Any], environ: Mapping[str, str]
) -> None:
    place = f"{path}: profile '{name}'"
    url, headers = profile.get("url"), profile.get("headers", {})
    if not isinstance(url, str) or not url:
        raise UsageError(f"{place}: expected a URL as url")
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise UsageError(f"{place}: expected a table of texts as headers")
    lines = [f"{header}={_value(f'{place}: {header}', value, path, environ)}" for header, value in headers.items()]
    key = profile.get("api_key", "")
    if not isinstance(key, str) or (key and not key.startswith("@")):
        raise UsageError(f"{place}: api_key: {_SECRET}")
    options.url = url
    options.header_variable = "\n".join(lines)
    options.api_key_variable = _value(f"{place}: api_key", key, path, environ)


def _value(place: str, text: str, path: Path, environ: Mapping[str, str]) -> str:
    """Return a value, or what ``@env:VARIABLE`` and ``@FILE`` refer to.

    Raises UsageError, OSError.
    """
    if not text.startswith("@"):
        return text
    if not text.startswith("@env:"):
        return (path.parent / Path(text[1:]).expanduser()).read_text(encoding="utf-8").strip()
    secret = environ.get(text[len("@env:") :])
    if not secret:
        raise UsageError(f"{place}: the variable {text[len('@env:') :]} is not set")
    return secret
