"""What is logged and how, as data; the law: a change is decided here and made in `remora.system.logs` alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from remora.errors import UnavailableError, UnsupportedError

FORMATS: Final = ("default", "ISO8601")


_NOTHING: Final[Mapping[str, bool | int | str]] = {}


class LogSetting(NamedTuple):
    """The call: change what is logged; without changes, ask. -> LogSettings"""

    changes: Mapping[str, bool | int | str] = _NOTHING


class LogSettings(NamedTuple):
    """Triton's settings of the log (spec T09), in the order in which clients see them.

    Each severity has a switch of its own: a log may show errors and no warnings. ``log_verbose_level`` above 0 adds
    what is for debugging. ``log_file`` is empty, for standard error: no client chooses a file.
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    def changed(self, changes: Mapping[str, bool | int | str]) -> LogSettings:
        """These settings with others in place of some; keys that nobody knows change nothing, as in Triton.

        Raises UnsupportedError for a file, UnavailableError (Triton's code) for a format that does not exist.
        """
        if "log_file" in changes:
            raise UnsupportedError("log file location can not be updated through network protocol")
        form = changes.get("log_format", self.log_format)
        if form not in FORMATS:
            raise UnavailableError(f"invalid argument for --log_format, got: {form}")
        known: dict[str, Any] = {key: value for key, value in changes.items() if key in self._fields}
        if "log_verbose_level" in known:  # Triton's is a signed 32-bit number, and below nothing there is nothing
            known["log_verbose_level"] = max((known["log_verbose_level"] + 2**31) % 2**32 - 2**31, 0)
        return self._replace(**known)

    def shows(self, severity: int) -> bool:
        """Whether a record of this severity, in numbers of the module ``logging``, is written."""
        if severity >= logging.ERROR:
            return self.log_error
        if severity >= logging.WARNING:
            return self.log_warning
        return self.log_info if severity >= logging.INFO else self.log_verbose_level > 0

    def level(self) -> int:
        """The least severity that is written: what is below it need not be made."""
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            if self.shows(severity):
                return severity
        return logging.CRITICAL + 1
