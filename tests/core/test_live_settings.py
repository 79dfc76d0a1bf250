"""Settings of a running server: whose they are, and what a refused change leaves."""

from __future__ import annotations

import pytest

from remora.errors import InvalidArgumentError
from remora.live_settings import LiveSettings
from remora.trace_settings import TraceSetting, TraceSettings


@pytest.fixture
def settings() -> LiveSettings:
    return LiveSettings(lambda name: name in ("a", "b"))


def test_a_models_own_setting_outlives_the_servers_and_is_gone_when_it_is_taken_back(settings: LiveSettings) -> None:
    settings.perform(TraceSetting("a", {"trace_rate": ("3",)}))
    settings.perform(TraceSetting("", {"trace_rate": ("7",)}))
    assert settings.perform(TraceSetting("a")) == TraceSettings(trace_rate="3")
    assert settings.perform(TraceSetting("b")) == TraceSettings(trace_rate="7")
    assert settings.perform(TraceSetting("a", {"trace_rate": None})) == TraceSettings(trace_rate="7")
    assert settings.perform(TraceSetting("", {"trace_rate": None})) == TraceSettings()


def test_a_model_that_nobody_knows_has_no_settings(settings: LiveSettings) -> None:
    with pytest.raises(InvalidArgumentError, match="Request for unknown model : nope"):
        settings.perform(TraceSetting("nope", {"trace_rate": ("3",)}))


def test_a_change_is_made_whole_or_not_at_all(settings: LiveSettings) -> None:
    with pytest.raises(InvalidArgumentError):
        settings.perform(TraceSetting("", {"trace_rate": ("3",), "trace_count": ("x",)}))
    assert settings.perform(TraceSetting()) == TraceSettings()
