"""Decoding and encoding of the management RPCs."""

from __future__ import annotations

from typing import Any

import pytest

from remora.calls import Call
from remora.errors import InvalidArgumentError
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.management import RPCS
from remora.system.logs import LogSetting


def log(**settings: dict[str, Any]) -> Call:
    return RPCS["LogSettings"].decode(pb.LogSettingsRequest(settings=settings).SerializeToString())  # type: ignore[arg-type]


def test_log_settings_are_read_by_name() -> None:
    asked = log(log_info={"bool_param": False}, log_verbose_level={"uint32_param": 3}, nothing={"bool_param": True})
    assert asked == LogSetting({"log_info": False, "log_verbose_level": 3})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_info": {"uint32_param": 1}}, "expect boolean for 'log_info'"),
        ({"log_verbose_level": {"bool_param": True}}, "expect int32 for 'log_verbose_level'"),
        ({"log_format": {"bool_param": True}}, "expect string for 'log_format'"),
        ({"log_format": {"string_param": "x"}}, "invalid argument for log_format, got: x"),
    ],
)
def test_a_log_setting_that_cannot_be_is_refused_with_tritons_text(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        log(**settings)
    assert str(refused.value) == text


@pytest.mark.parametrize("value", [{}, {"bool_param": True}, {"string_param": "x"}])
def test_a_log_file_of_any_kind_is_left_to_the_engine_to_refuse(value: dict[str, Any]) -> None:
    asked = log(log_file=value, log_info={"uint32_param": 1}, log_format={"string_param": "x"})
    assert isinstance(asked, LogSetting)
    assert "log_file" in asked.changes
