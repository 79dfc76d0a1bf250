"""What a repository or a load request has of a model now, as a plan to load it; the law: nothing is opened here.

Whatever keeps a model from being planned ends in one text, Triton's, for the client; the cause is for the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from remora.errors import InternalError, InvalidArgumentError, NotFoundError
from remora.models.load_log import log_failure
from remora.models.loader import LoadPlan, ModelLoader
from remora.options import EngineOptions
from remora.repository import CacheSettings, Repository
from remora.repository.catalog import Catalog, name_of
from remora.repository.sources import open_repository
from remora.startup import Ledger

_log = logging.getLogger("remora.models")


class PollFailedError(InternalError):
    """A model that no repository has, or two, or not in a form that can be planned."""


class Planner:
    """Makes plans. Thread-safe: it holds nothing of its own.

    Args:
        offers: what all repositories have, as the last look saw it.
        loader: reads configurations.
    """

    def __init__(self, offers: Catalog, loader: ModelLoader) -> None:
        self._offers = offers
        self._loader = loader

    def plan(self, key: str, parameters: Mapping[str, str | bytes]) -> LoadPlan:
        """A model as the repository has it, or as the request's parameters bring it. Raises PollFailedError."""
        try:
            repository = self._source(key, parameters)
            folder = repository.fetch(name_of(key), ())
            return self._loader.plan(folder, parameters, repository, repository.fingerprint(folder.name))
        except Exception as error:
            raise self.unpolled(key, error) from error

    def _source(self, key: str, parameters: Mapping[str, str | bytes]) -> Repository:
        """Where a model's files are. Raises RemoraError."""
        if not brings_files(parameters):
            return self._offers.only(key).repository
        from remora.repository.sent import SentModel, sent_files  # few requests bring files

        files = sent_files(parameters)
        if "config" not in parameters:
            raise InvalidArgumentError("files were sent without a 'config' to serve them with")
        return SentModel(name_of(key), files)

    def unpolled(self, key: str, cause: Exception | None = None) -> PollFailedError:
        """The one text for what cannot be planned [M09]; the cause, by default why there is no one place for it,
        goes to the log and along with the error."""
        if cause is None:
            try:
                self._offers.only(key)
            except NotFoundError as error:
                cause = error
        log_failure(key, cause)
        failure = PollFailedError(f"failed to load '{key}', failed to poll from model repository")
        failure.__cause__ = cause
        return failure


def open_repositories(options: EngineOptions, ledger: Ledger) -> list[Repository]:
    """Every place that the options name. Raises NotFoundError for a URL that nothing understands."""
    cache = CacheSettings(options.model_cache_directory, options.model_cache_byte_size)
    return [
        *(
            open_repository(place, any_layout=True, bare_name=options.model_name, cache=cache, ledger=ledger)
            for place in options.paths
        ),
        *(open_repository(place, cache=cache, ledger=ledger) for place in options.model_repository),
    ]


def brings_files(parameters: Mapping[str, str | bytes]) -> bool:
    """Whether a load request brings the model's files, so that no repository is asked."""
    return any(parameter.startswith("file:") for parameter in parameters)
