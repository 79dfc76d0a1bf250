"""Backends by name: remora's and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from remora import plugins
from remora.backends.registry import find_backend
from remora.errors import ConfigError, InvalidArgumentError


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
