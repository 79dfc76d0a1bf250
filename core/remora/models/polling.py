"""Polls of the repositories, which bring the models to what the repositories contain [M06]."""

from __future__ import annotations

import logging
import threading

from remora.errors import RemoraError
from remora.models.load_log import CHANGE, GONE, Failures, occasion
from remora.models.model_set import ModelSet
from remora.repository.catalog import Catalog

_log = logging.getLogger("remora.models")


class RepositoryPolls:
    """Polls on request and in a thread. Thread-safe.

    Args:
        models: the models to load and unload.
        catalog: the models that the repositories offer.
        failures: the failures of each model that are already logged.
        only_serving: True if a poll loads no model that does not serve already.
    """

    def __init__(self, models: ModelSet, catalog: Catalog, failures: Failures, *, only_serving: bool) -> None:
        self._models = models
        self._catalog = catalog
        self._only_serving = only_serving
        self._ended = threading.Event()
        self._files: dict[str, object] = {}
        self._failures = failures

    def poll(self) -> dict[str, RemoraError]:
        """Reconcile the loaded models with the repositories and return the failures."""
        models, table = self._models, self._models.table
        known = table.known()  # before the scan, which may miss the folder of a model that is loaded during it
        self._catalog.scan(forgiving=True)
        offered = self._catalog.models()
        wanted = [key for key in offered if table.newest(key) is not None] if self._only_serving else offered
        with occasion(GONE):
            for key in known:
                if key not in offered:
                    models.drop(key)
                    table.forget(key)
        with occasion(CHANGE, self._failures):
            failures = models.load_many([key for key in wanted if self._is_changed(key)])
            if not self._only_serving:
                models.request_loads(wanted)
            models.reconcile_ensembles()
        return failures

    def _is_changed(self, key: str) -> bool:
        served = self._models.served_files(key)
        try:
            files = self._catalog.only(key).fingerprint()
            self._see(key, files)
            return served is None or files != served
        except (RemoraError, OSError):
            return True  # the load of this model will report the error

    def _see(self, key: str, files: object) -> None:
        """Log the failures of a model again if its files have changed since the last poll."""
        if self._files.setdefault(key, files) != files:
            self._files[key] = files
            self._failures.pop(key, None)

    def start(self, interval_s: float) -> None:
        """Poll in a thread until `stop`."""
        threading.Thread(target=self._keep_polling, args=(interval_s,), name="remora poll", daemon=True).start()

    def stop(self) -> None:
        """End the thread after the poll in progress."""
        self._ended.set()

    def _keep_polling(self, interval_s: float) -> None:
        while not self._ended.wait(interval_s):
            try:
                self.poll()
            except Exception:  # one failed poll must not stop the polling
                _log.exception("polling the repositories failed")
