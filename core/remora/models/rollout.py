"""Protocols of releases and shadows, which the parts of `remora.plugins` implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from remora.calls import ReleaseShare
    from remora.models.served_model import ServedModel
    from remora.tracing.arrival import Carrier


class RoutedModel(Protocol):
    """Model for one request of a release, which chooses the version at submission.

    All other attributes are those of the chosen version, and before the choice of the stable one.
    """

    @property
    def version_text(self) -> str:
        """The version that answers."""

    @property
    def is_divided(self) -> bool:
        """True if the request might have gone to another version; False if it is only copied."""

    def identify(self, carrier: Carrier | None) -> None:
        """Set the headers of the request."""

    def bind_to(self, carrier: Carrier) -> ServedModel:
        """Choose the version by the headers of the request, once, and return it."""

    def bind_version(self, model: ServedModel) -> None:
        """Choose a version that the caller keeps open."""

    def counter(self) -> Callable[[object], None]:
        """Return the function that counts the end of a request that begins now."""


class Shadows(Protocol):
    """Destinations of copied requests, as the options name them."""

    def close(self) -> None:
        """Close the log of differences."""


class Releases(Protocol):
    """Releases of all models of an engine. Thread-safe.

    A part opens them from the models, the clock, a `remora.models.release_store.ReleaseStore` and the shadows.
    """

    @property
    def stored_at(self) -> str:
        """The file of the releases, "" without one."""

    def select(self, key: str, by_policy: list[int], available: list[int]) -> list[int]:
        """Return the versions to load: those of the version policy and those of the release."""

    def declare(self, key: str, text: bytes, available: list[int]) -> None:
        """Apply the release file of a model's repository. Raises RemoraError."""

    def failed(self, key: str, reasons: Mapping[int, str]) -> bool:
        """Return True if the release goes on without the versions that could not be loaded."""

    def perform(self, name: str, action: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        """Perform a command and return the status of the release. Raises RemoraError."""

    def shares(self) -> list[ReleaseShare]:
        """Return the share of each version for the metrics."""

    def close(self) -> None:
        """Store what could not be stored before, and end the copies to shadows."""
