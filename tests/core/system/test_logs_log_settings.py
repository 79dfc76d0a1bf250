"""What is logged, as clients change it."""

from __future__ import annotations

import logging

import pytest

from remora.errors import RemoraError, UnavailableError, UnsupportedError
from remora.system.logs import LogSettings

SEVERITIES = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (LogSettings(), SEVERITIES[1:]),
        (LogSettings(log_verbose_level=1), SEVERITIES),
        (LogSettings(log_info=False), SEVERITIES[2:]),
        (LogSettings(log_warning=False), (logging.INFO, logging.ERROR, logging.CRITICAL)),
        (LogSettings(log_error=False), (logging.INFO, logging.WARNING)),
        (LogSettings(log_info=False, log_warning=False, log_error=False), ()),
    ],
)
def test_each_severity_has_its_own_switch(settings: LogSettings, shown: tuple[int, ...]) -> None:
    assert tuple(severity for severity in SEVERITIES if settings.shows(severity)) == shown
    assert settings.level() == min(shown, default=logging.CRITICAL + 1)


@pytest.mark.parametrize(("asked", "kept"), [(3, 3), (2**32 + 1, 1), (2**31, 0), (2**32 - 1, 0), (2**40, 0)])
def test_a_verbose_level_is_a_signed_32_bit_number_and_never_below_nothing(asked: int, kept: int) -> None:
    assert LogSettings().changed({"log_verbose_level": asked}).log_verbose_level == kept


def test_a_change_leaves_what_it_does_not_name() -> None:
    settings = LogSettings(log_info=False).changed({"log_verbose_level": 2, "nothing": True})
    assert settings == LogSettings(log_info=False, log_verbose_level=2)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"log_file": "x"}, UnsupportedError, "log file location can not be updated through network protocol"),
        ({"log_format": "x"}, UnavailableError, "invalid argument for --log_format, got: x"),
    ],
)
def test_what_cannot_be_set_is_refused_in_tritons_words(
    changes: dict[str, bool | int | str], kind: type[RemoraError], message: str
) -> None:
    with pytest.raises(RemoraError) as caught:
        LogSettings().changed(changes)
    assert (type(caught.value), caught.value.message) == (kind, message)
