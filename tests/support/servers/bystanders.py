"""A client that sends small requests while another one attacks, and what the server makes it wait."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from support.process.processor_time import Account, caused_s

HOLD_PROBE = Path(__file__).parents[2] / "security" / "hold_probe"


class Holds:
    """Folder in which the probes of processes write how long the interpreter was held; see `hold_probe`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """Return an environment whose Python processes have the probe."""
        path = os.pathsep.join(filter(None, (str(HOLD_PROBE), inherited.get("PYTHONPATH"))))
        return {**inherited, "PYTHONPATH": path, "REMORA_HOLDS": str(self._folder)}

    def of(self, process: int) -> list[float]:
        """Return all holds of a process until now, in seconds. Fails for a process without the probe."""
        return [int(line) / 1e3 for line in (self._folder / str(process)).read_text().splitlines()]


class Bystander:
    """Client with one connection at a time. Its waits are information; what the server caused of them has a bound."""

    def __init__(
        self, port: int, process: int, *, path: str, body: bytes | None = None, every_s: float, timeout_s: float
    ) -> None:
        self._port, self._process, self._path, self._body = port, process, path, body
        self._every_s, self._timeout_s = every_s, timeout_s
        self.waits_s: list[float] = []
        self.caused_s: list[float] = []
        self.failed: list[str] = []

    def ask_until(self, ended: Callable[[float], bool], first: threading.Event | None = None) -> None:
        """Send requests until ``ended`` is true, which gets the pause to wait for, as `threading.Event.wait` does.

        The event ``first`` is set by the first answer, which does not count.
        """
        account = Account(self._process, [(self._process, self._process), (os.getpid(), threading.get_native_id())])
        with closing(account), closing(self._connection()) as connection:
            while not ended(self._every_s):
                self._ask(connection, account)
                if first is not None and not first.is_set():
                    self.waits_s.clear()
                    self.caused_s.clear()
                    first.set()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)

    def _ask(self, connection: http.client.HTTPConnection, account: Account) -> None:
        began = account.look()
        try:
            connection.request("GET" if self._body is None else "POST", self._path, self._body)
            with connection.getresponse() as reply:
                reply.read()
                if reply.status != 200:
                    self.failed.append(str(reply.status))
        except (OSError, http.client.HTTPException) as error:
            self.failed.append(repr(error))
            connection.close()  # the next request opens another one
        ended = account.look()
        self.waits_s.append(ended.at_s - began.at_s)
        self.caused_s.append(caused_s(began, ended))
