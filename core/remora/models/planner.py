"""Load plans, made from a repository or a load request without opening the model.

Every reason why a model cannot be planned gives the client the same text, Triton's; the cause is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from remora.errors import InternalError, InvalidArgumentError, NotFoundError
from remora.models.load_log import log_failure
from remora.models.loader import LoadPlan, ModelLoader
from remora.options import EngineOptions
from remora.repository import CacheSettings, ModelFolder, Repository
from remora.repository.catalog import Catalog, name_of
from remora.repository.sources import open_repository
from remora.startup import Ledger

_log = logging.getLogger("remora.models")


class PollFailedError(InternalError):
    """Raised for a model that is missing, ambiguous or cannot be planned."""


Selection = Callable[[str, ModelFolder], Callable[[list[int]], list[int]] | None]


class Planner:
    """Maker of load plans. Thread-safe because it is stateless.

    Args:
        catalog: the catalog of all repositories, as of the last scan.
        loader: reads configurations.
    """

    def __init__(self, catalog: Catalog, loader: ModelLoader) -> None:
        self._catalog = catalog
        self._loader = loader
        self.selection: Selection = lambda _key, _folder: None
        """Returns how a release selects versions, None for a model without a release."""

    def plan(self, key: str, parameters: Mapping[str, str | bytes]) -> LoadPlan:
        """Plan a model from its repository or from the request's parameters. Raises PollFailedError."""
        try:
            repository = self._source(key, parameters)
            files = repository.fingerprint(name_of(key))  # before the files are read, so that polls see later changes
            folder = repository.fetch(name_of(key), ())
            select = self.selection(key, folder)
            return self._loader.plan(folder, parameters, repository, files, select)
        except Exception as error:
            raise self.unpolled(key, error) from error

    def _source(self, key: str, parameters: Mapping[str, str | bytes]) -> Repository:
        """Return the repository with a model's files. Raises RemoraError."""
        if not brings_files(parameters):
            return self._catalog.only(key).repository
        from remora.repository.sent import SentModel, sent_files  # imported here because few requests send files

        files = sent_files(parameters)
        if "config" not in parameters:
            raise InvalidArgumentError("the load request contains files but no 'config'")
        return SentModel(name_of(key), files)

    def available(self, key: str) -> list[int]:
        """Return the versions in a model's repository. Raises RemoraError."""
        return sorted(self._catalog.only(key).repository.fetch(name_of(key), ()).versions)

    def unpolled(self, key: str, cause: Exception | None = None) -> PollFailedError:
        """Return Triton's error for a model that cannot be planned [M09].

        ``cause`` is logged and chained; by default it is the error of the catalog look-up.
        """
        if cause is None:
            try:
                self._catalog.only(key)
            except NotFoundError as error:
                cause = error
        log_failure(key, cause)
        failure = PollFailedError(f"failed to load '{key}', failed to poll from model repository")
        failure.__cause__ = cause
        return failure


def open_repositories(options: EngineOptions, ledger: Ledger) -> list[Repository]:
    """Open all repositories that the options name. Raises NotFoundError for an unsupported URL."""
    cache = CacheSettings(options.model_cache_directory, options.model_cache_byte_size)
    settings = options.backend_settings()
    python = {**settings.get("", {}), **settings.get("python", {})}
    return [
        *(
            open_repository(
                place,
                any_layout=True,
                bare_name=options.model_name,
                cache=cache,
                ledger=ledger,
                trust_pickle=options.trust_pickle,
                python_settings=python,
            )
            for place in options.paths
        ),
        *(open_repository(place, cache=cache, ledger=ledger) for place in options.model_repository),
    ]


def brings_files(parameters: Mapping[str, str | bytes]) -> bool:
    """Return True if a load request contains the model's files, so that no repository is read."""
    return any(parameter.startswith("file:") for parameter in parameters)
