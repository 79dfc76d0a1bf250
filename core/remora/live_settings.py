"""What clients may set while the server runs: the log and traces; the law: a change happens whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from remora.errors import InvalidArgumentError
from remora.log_settings import LogSetting, LogSettings
from remora.system import logs
from remora.trace_settings import Changes, TraceSetting, TraceSettings, checked, merged


class LiveSettings:
    """Keeps the settings. Thread-safe.

    Args:
        knows: whether there is a model of that name.
    """

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self._lock = Lock()
        self._traces: dict[str, Changes] = {}  # by model; the server's own are under ""

    def perform(self, call: LogSetting | TraceSetting) -> LogSettings | TraceSettings:
        """Make the change, if any, and return what holds then. Raises RemoraError and changes nothing."""
        if isinstance(call, LogSetting):
            return logs.OURS.change(call.changes)
        if call.model and not self._knows(call.model):
            raise InvalidArgumentError(f"Request for unknown model : {call.model}")
        changes = checked(call.changes)
        with self._lock:
            for_all = self._traces.get("", {})
            own = merged(self._traces.get(call.model, {}), changes)
            if changes:
                self._traces[call.model] = own
            return TraceSettings().over({**for_all, **own} if call.model else own)
