"""Log and trace settings that clients change at run time, each change atomically."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from remora.errors import InvalidArgumentError
from remora.options import EngineOptions
from remora.system import logs
from remora.system.clock import Clock
from remora.system.environment import variables
from remora.system.logs import LogSetting, LogSettings
from remora.tracing.settings import Changes, TraceSetting, TraceSettings, checked, invalid, merged
from remora.tracing.tracer import Traces


class LiveSettings:
    """The current log and trace settings. Thread-safe.

    Args:
        knows: returns True if a model of that name exists.
        options: the defaults until a client changes them.
        clock: the engine's.
        traces: another engine's, whose settings are shared; None creates new ones.

    Raises:
        ValueError: options that cannot be parsed.
        InvalidArgumentError, UnsupportedError: options that are invalid or not supported.
    """

    def __init__(
        self, knows: Callable[[str], bool], options: EngineOptions, clock: Clock, traces: Traces | None = None
    ) -> None:
        self._knows = knows
        self._lock = Lock()
        self._defaults = TraceSettings.of(options)
        self._changes: dict[str, Changes] = {}  # by model; "" has the server's
        if reason := invalid(self._defaults):
            raise InvalidArgumentError(f"--trace-config: {reason}")
        self.traces = traces or Traces(self._defaults, clock, variables())

    def perform(self, call: LogSetting | TraceSetting) -> LogSettings | TraceSettings:
        """Apply the changes of a call and return the current settings.

        Raises RemoraError and changes nothing.
        """
        if isinstance(call, LogSetting):
            return logs.OURS.change(call.changes)
        if call.model and not self._knows(call.model):
            raise InvalidArgumentError(f"Request for unknown model : {call.model}")
        changes = checked(call.changes)
        with self._lock:
            if changes:
                self._change(call.model, changes)
            return self.traces.shown(call.model)

    def _change(self, model: str, changes: Changes) -> None:
        own = {**self._changes, model: merged(self._changes.get(model, {}), changes)}
        kept = {name: each for name, each in own.items() if each}
        servers = self._defaults.over(kept.get("", {}))
        settings = {name: servers.over(each) for name, each in kept.items() if name} | {"": servers}
        for each in settings.values():
            if reason := invalid(each):
                raise InvalidArgumentError(f"Attempting to set invalid trace setting :{reason}")
        self.traces.apply(settings, renewed=model)
        self._changes = kept
