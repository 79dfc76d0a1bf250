"""Backends by name: remora's and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from remora import plugins
from remora.backends.registry import backend_in, find_backend
from remora.errors import ConfigError, InvalidArgumentError, UnsupportedError


class OfAnotherApi:
    """Backend of another package for an API that this server does not have."""

    name, api_version = "any", "99.0"


@pytest.mark.parametrize("name", ["other", "fil"])
def test_a_backend_of_another_package_is_checked_also_in_place_of_one_that_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "is_present", lambda target: False)
    entries: list[EntryPoint] = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    with pytest.raises(InvalidArgumentError, match=f"unable to find backend library for backend '{name}'"):
        find_backend(name)
    entries.append(EntryPoint(name, f"{__name__}:OfAnotherApi", "remora.backends"))
    with pytest.raises(ConfigError, match=f"'{name}' is written for version 99.0 of the backend API"):
        find_backend(name)


def test_a_native_library_names_the_package_that_would_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "is_present", lambda target: False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "libremora_mine.so").touch()
    with pytest.raises(UnsupportedError, match="library of backend 'mine' needs the package remora_runtimes"):
        backend_in(tmp_path, "mine")
