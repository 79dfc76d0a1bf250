"""Settings of the log and of traces over V2 REST."""

from __future__ import annotations

import pytest

from remora.errors import MalformedError
from remora.protocols.rest.management import print_settings, read_log, read_trace
from remora.system.logs import LogSetting, LogSettings
from remora.tracing.settings import TraceSetting, TraceSettings


def test_a_body_names_what_changes() -> None:
    assert read_log(b'{"log_info":false,"nothing":1}') == LogSetting({"log_info": False})
    body = b'{"trace_level":["TIMESTAMPS"],"trace_rate":null,"trace_count":"5"}'
    changes = {"trace_level": ("TIMESTAMPS",), "trace_rate": None, "trace_count": ("5",)}
    assert read_trace("m", body) == TraceSetting("m", changes)


def test_null_changes_nothing_in_the_log() -> None:
    body = b'{"log_file":null,"log_info":null,"log_verbose_level":null,"log_format":null,"log_error":false}'
    assert read_log(body) == LogSetting({"log_error": False})


def test_a_file_is_left_to_the_engine_to_refuse_whatever_else_is_wrong() -> None:
    assert read_log(b'{"log_info":1,"log_file":"x"}') == LogSetting({"log_file": "x"})
    assert read_trace("m", b'{"trace_rate":1,"trace_file":"x"}') == TraceSetting("m", {"trace_file": None})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"log_info":1}', "attempt to access JSON non-boolean as boolean"),
        (b'{"log_verbose_level":-1}', "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (b'{"log_format":true}', "attempt to access JSON non-string as string"),
    ],
)
def test_a_log_setting_of_another_type_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        read_log(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"trace_rate":7}', "attempt to access JSON non-string as string"),
        (b'{"trace_level":"OFF"}', "attempt to access JSON non-array as array"),
        (b'{"trace_level":[1]}', "attempt to access JSON non-string as string"),
    ],
)
def test_a_trace_setting_of_another_type_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        read_trace("", body)


def test_settings_are_printed_in_tritons_order() -> None:
    assert print_settings(LogSettings()) == (
        b'{"log_file":"","log_info":true,"log_warning":true,"log_error":true,'
        b'"log_verbose_level":0,"log_format":"default"}'
    )
    assert print_settings(TraceSettings(trace_level=("TIMESTAMPS", "TENSORS"))) == (
        b'{"trace_level":["TIMESTAMPS","TENSORS"],"trace_rate":"1000","trace_count":"-1","log_frequency":"0",'
        b'"trace_file":"","trace_mode":"triton"}'
    )
