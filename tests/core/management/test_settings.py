"""Settings of a running server: whose they are, and what a refused change leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.engine import Engine
from remora.errors import InvalidArgumentError, UnsupportedError
from remora.management.settings import LiveSettings
from remora.models import loader as loading
from remora.options import EngineOptions
from remora.tracing.settings import Changes, TraceSetting, TraceSettings
from support.engine.fakes import FakeBackend, FakeClock, write_model


def settings_of(**options: object) -> LiveSettings:
    return LiveSettings(lambda name: name in ("a", "b"), EngineOptions(**options), FakeClock())  # type: ignore[arg-type]


@pytest.fixture
def settings() -> LiveSettings:
    return settings_of()


def test_a_models_own_setting_outlives_the_servers_and_is_gone_when_it_is_taken_back(settings: LiveSettings) -> None:
    settings.perform(TraceSetting("a", {"trace_rate": ("3",)}))
    settings.perform(TraceSetting("", {"trace_rate": ("7",)}))
    assert settings.perform(TraceSetting("a")) == TraceSettings(trace_rate="3")
    assert settings.perform(TraceSetting("b")) == TraceSettings(trace_rate="7")
    assert settings.perform(TraceSetting("a", {"trace_rate": None})) == TraceSettings(trace_rate="7")
    assert settings.perform(TraceSetting("", {"trace_rate": None})) == TraceSettings()


def test_what_is_taken_back_is_again_as_the_command_line_says() -> None:
    settings = settings_of(trace_config=("rate=5", "triton,file=/tmp/t.json"))
    settings.perform(TraceSetting("", {"trace_rate": ("7",)}))
    taken_back = settings.perform(TraceSetting("", {"trace_rate": None}))
    assert taken_back == TraceSettings(trace_rate="5", trace_file="/tmp/t.json")


def test_an_unknown_model_has_no_settings(settings: LiveSettings) -> None:
    with pytest.raises(InvalidArgumentError, match="Request for unknown model : nope"):
        settings.perform(TraceSetting("nope", {"trace_rate": ("3",)}))


def test_a_change_is_made_whole_or_not_at_all(settings: LiveSettings) -> None:
    with pytest.raises(InvalidArgumentError):
        settings.perform(TraceSetting("", {"trace_rate": ("3",), "trace_count": ("x",)}))
    assert settings.perform(TraceSetting()) == TraceSettings()


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ((), {"trace_level": ("TIMESTAMPS",)}, "trace file name is not given"),
        (("triton,file=/tmp/t",), {"trace_level": ("TENSORS",), "trace_rate": ("0",)}, "sample rate must be non-zero"),
    ],
)
def test_settings_that_could_trace_nothing_are_refused_in_tritons_words(
    options: tuple[str, ...], changes: Changes, reason: str
) -> None:
    settings = settings_of(trace_config=options)
    before = settings.perform(TraceSetting())
    with pytest.raises(InvalidArgumentError, match=f"Attempting to set invalid trace setting :{reason}"):
        settings.perform(TraceSetting("", changes))
    assert settings.perform(TraceSetting()) == before
    assert not settings.traces.on


def test_a_file_that_cannot_be_written_is_refused_when_tracing_is_turned_on(tmp_path: Path) -> None:
    settings = settings_of(trace_config=(f"triton,file={tmp_path}/no/trace.json",))
    with pytest.raises(UnsupportedError, match="is not writable"):
        settings.perform(TraceSetting("", {"trace_level": ("TIMESTAMPS",)}))
    assert settings.perform(TraceSetting()).trace_level == ("OFF",)  # type: ignore[union-attr]


def test_tracing_can_be_on_for_one_model_alone(tmp_path: Path) -> None:
    settings = settings_of(trace_config=(f"triton,file={tmp_path}/trace.json",))
    settings.perform(TraceSetting("a", {"trace_level": ("TIMESTAMPS",)}))
    assert settings.traces.on
    settings.perform(TraceSetting("a", {"trace_level": None}))
    assert not settings.traces.on
    settings.traces.close()


def test_a_model_that_does_not_serve_has_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    with Engine(tmp_path, model_control_mode="explicit", load_model=("m",), clock=FakeClock()) as engine:
        assert engine.perform(TraceSetting("m")).trace_level == ("OFF",)
        engine.unload("m")
        with pytest.raises(InvalidArgumentError, match="Request for unknown model : m"):
            engine.perform(TraceSetting("m"))
