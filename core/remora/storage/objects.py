"""Buckets of S3, Google and Azure, and files of web servers, through obstore.

It is imported on first use. obstore retries requests that fail before their first byte, with backoff; interrupted
bodies are retried here. Error texts of this module contain no query (where signatures are) and no secret of the
settings.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from remora.errors import InvalidArgumentError, NotFoundError, RemoraError, UnavailableError, UnsupportedError
from remora.storage import ChangedError, Secret, StoredObject, is_plain
from remora.storage.credentials import StorageSettings
from remora.storage.location import Location
from remora.system.install_advice import install_command

_log = logging.getLogger("remora.models")

_MOST_OBJECTS = 100_000
_BODY_TRIALS = 4
_ONE_FILE = re.compile(
    r"\.(?:onnx|tar|tgz|zip|tar\.(?:gz|bz2|xz)|joblib|pkl|pickle|skops|cbm|ubj|bst|lgb|pt|pt2|safetensors)$",
    re.IGNORECASE,
)
_QUERY = re.compile(r"\?[^\s)\"',]*")
_CODE = re.compile(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?")
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "http": "s3"}
_Answer = TypeVar("_Answer")
_BAD_NAME = "InvalidPathError"
_REFUSED = re.compile(r"UnauthenticatedError|PermissionDeniedError|status code: 40[13] ")
"""Matches an error's class or text, because a refused listing has no specific class."""


class ObjectStorage:
    """The objects below a path of a bucket, as a `Storage`.

    Args:
        location: the bucket and the path.
        settings: returns the store's settings; called again, once, when credentials are refused [M22].
        retries: maximum of retries per request.
    """

    def __init__(self, location: Location, settings: Callable[[], StorageSettings], retries: int = 5) -> None:
        self._place = location
        self._settings = settings
        self._retries = retries
        self._lock = threading.Lock()
        self._store: Any = None
        self._secrets: tuple[str, ...] = ()
        self._may_be_file = location.cloud == "http" or _ONE_FILE.search(location.path) is not None
        self._folder = location.path
        """The base of object paths: the location, or its parent if it is a single file."""

    @property
    def location(self) -> str:
        """The URL, without secrets."""
        return self._place.url

    @property
    def identity(self) -> str:
        """The location with its endpoint, which the same URL does not imply (see `Storage`)."""
        place, config = self._place, self._settings().config
        endpoint = place.endpoint or config.get("endpoint") or config.get("base_url") or ""
        return "\n".join((place.cloud, str(endpoint), str(config.get("account_name", "")), place.bucket, place.path))

    def listing(self, prefix: str = "") -> list[StoredObject]:
        """List objects (see `Storage`).

        A location with a file suffix is first looked up as a single file.
        """
        if self._may_be_file and not prefix:
            item = self._ask(self._head)
            if item is not None:
                self._folder = self._place.path.rpartition("/")[0]
                return [item]
        self._folder = self._place.path
        return self._ask(lambda store: self._list(store, prefix))

    def find(self) -> StoredObject:
        """Return the object at the location itself, which `read` then reads. Raises NotFoundError."""
        item = self._ask(self._head)
        if item is None:
            raise NotFoundError(f"there is no file '{self.location}'. Check bucket and path")
        self._folder = self._place.path.rpartition("/")[0]
        return item

    def upload(self, file: Path) -> None:
        """Write a local file to the location, in parts if it is large. Raises RemoraError, OSError."""

        def put(store: Any) -> None:
            import obstore

            obstore.put(store, self._place.path, file)

        file.stat()  # raises the system's error for a missing file
        self._ask(put, verb="written")

    def read(self, item: StoredObject, start: int, end: int) -> memoryview:
        """Read a range of an object, with retries (see `Storage`)."""
        for trial in range(1, _BODY_TRIALS + 1):
            try:
                return self._ask(lambda store: self._read(store, item, start, end))
            except _BrokenOffError as error:
                level = logging.WARNING if trial == _BODY_TRIALS else logging.DEBUG
                _log.log(
                    level, "%s/%s was interrupted between %d and %d: %s", self.location, item.path, start, end, error
                )
        raise UnavailableError(
            f"cannot read '{item.path}' of '{self.location}': interrupted {_BODY_TRIALS} times. Check the network"
        )

    # -- one request each --------------------------------------------------------------------------------------------

    def _head(self, store: Any) -> StoredObject | None:
        import obstore

        try:
            return _stored(obstore.head(store, self._place.path), self._place.name)
        except FileNotFoundError:
            if self._place.cloud == "http":  # web servers have no listing
                raise
            return None

    def _list(self, store: Any, prefix: str) -> list[StoredObject]:
        import obstore

        below = "/".join(part for part in (self._folder, prefix) if part)
        cut = len(self._folder) + 1 if self._folder else 0
        found: list[StoredObject] = []

        def keep(page: Sequence[Any]) -> None:
            found.extend(_stored(meta, meta["path"][cut:]) for meta in page if is_plain(meta["path"][cut:]))
            if len(found) > _MOST_OBJECTS:
                raise UnavailableError(f"'{self.location}' holds more than {_MOST_OBJECTS} files: name a folder in it")

        def walk(folder: str) -> None:
            before = len(found)
            try:
                for page in obstore.list(store, folder or None, chunk_size=1000):
                    keep(page)
            except Exception as error:
                if type(error).__name__ != _BAD_NAME:
                    raise
                # obstore aborts a listing that contains a name such as "a/../b"; by folder only that one is lost.
                del found[before:]
                try:
                    level = obstore.list_with_delimiter(store, folder or None)
                except Exception as at_level:
                    # The first error names the object; any other error, such as of the network, is raised itself.
                    raise (error if type(at_level).__name__ == _BAD_NAME else at_level) from None
                keep(level["objects"])
                for each in level["common_prefixes"]:
                    try:
                        walk(str(each))
                    except Exception as inner:
                        if type(inner).__name__ != _BAD_NAME:
                            raise
                        _log.error("'%s' of '%s' is left out: %s", each[cut:], self.location, self._shown(inner))

        walk(below)
        return found

    def _read(self, store: Any, item: StoredObject, start: int, end: int) -> memoryview:
        import obstore

        path = "/".join(part for part in (self._folder, item.path) if part)
        options: Any = {"if_match": item.etag} if item.etag.startswith('"') or item.etag.isalnum() else {}
        if (start, end) != (0, item.size):
            options["range"] = (start, end)
        answer = obstore.get(store, path, options=options)
        if answer.meta["size"] != item.size:
            raise ChangedError(f"'{item.path}' of '{self.location}' has {answer.meta['size']} bytes, not {item.size}")
        try:
            body = memoryview(answer.buffer())
        except Exception as error:  # obstore's own classes, which add nothing to the text
            raise _BrokenOffError(self._shown(error)) from None
        if len(body) != end - start:
            raise _BrokenOffError(f"received {len(body)} of {end - start} bytes")
        return body

    # -- the store ---------------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[Any], _Answer], verb: str = "read") -> _Answer:
        """Return the result of a request. Raises RemoraError for any error of obstore.

        Args:
            request: calls obstore with the open store.
            verb: participle in the text of a refused request.
        """
        for last in (False, True):
            store = self._open(again=last)
            try:
                return request(store)
            except (RemoraError, _BrokenOffError):
                raise
            except Exception as error:
                if last or not _is_refusal(error):
                    raise self._error_of(error, verb) from None
        raise AssertionError("not reached")

    def _open(self, *, again: bool) -> Any:
        with self._lock:
            if self._store is None or again:
                try:
                    import obstore.store
                except ImportError:
                    extra = _EXTRAS[self._place.cloud]
                    raise UnsupportedError(
                        f"cannot open '{self.location}': obstore is not installed. Install it with: "
                        f"{install_command(extra)}"
                    ) from None
                settings = self._settings()
                secrets = [value.reveal() for value in settings.config.values() if isinstance(value, Secret)]
                if settings.keys is not None:
                    secrets += [settings.keys.secret.reveal(), settings.keys.token.reveal()]
                self._secrets = tuple(secret for secret in secrets if secret)
                try:
                    self._store = open_store(obstore.store, self._place, settings, self._retries)
                except Exception as error:
                    raise InvalidArgumentError(f"cannot open '{self.location}': {self._shown(error)}") from None
                _log.debug("credentials for %s come from %s", self.location, settings.source)
            return self._store

    def _error_of(self, error: Exception, verb: str) -> RemoraError:
        """Convert an error of obstore, keeping the storage's code and message."""
        kind, text, place = type(error).__name__, self._shown(error), self.location
        if kind == "PreconditionError":
            return ChangedError(f"a file of '{place}' was replaced while it was read")
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text or "ContainerNotFound" in text:
            return NotFoundError(f"there is no '{place}': {text}. Check bucket and path")
        if _is_refusal(error):
            return UnavailableError(f"'{place}' may not be {verb}: {text}. Check the credentials and their rights")
        if "redirect" in text.lower() and self._place.cloud == "s3":
            text += ". The bucket is in another region: set AWS_REGION"
        return UnavailableError(f"cannot reach '{place}': {text}")

    def _shown(self, error: Exception) -> str:
        """Return an error's text in one line, without queries and secrets."""
        text = str(error).partition("\n\nDebug source")[0]
        code = _CODE.search(text)
        text = text.partition("<?xml")[0].partition("<Error>")[0] + (
            ": ".join(filter(None, code.groups())) if code else ""
        )
        text = _QUERY.sub("?...", " ".join(text.split()))
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _is_refusal(error: Exception) -> bool:
    return _REFUSED.search(f"{type(error).__name__} {error}") is not None


class _BrokenOffError(Exception):
    """Raised when a body ends early."""


def _stored(meta: Any, path: str) -> StoredObject:
    """Convert obstore's metadata. The modification time replaces a missing ETag."""
    return StoredObject(path, int(meta["size"]), meta["e_tag"] or f"modified {meta['last_modified'].isoformat()}")


def open_store(stores: Any, place: Location, settings: StorageSettings, retries: int) -> Any:
    """Open the store for the bucket with ``stores``, which is the module `obstore.store`."""
    config = {key: value.reveal() if isinstance(value, Secret) else value for key, value in settings.config.items()}
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": settings.allow_http,
            "connect_timeout": timedelta(seconds=5),
            "read_timeout": timedelta(seconds=30),
            "timeout": timedelta(minutes=10),
        },
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(minutes=2)},
    }
    match place.cloud:
        case "s3":
            if settings.keys is not None:
                key_id, secret, token = settings.keys
                known = {
                    "access_key_id": key_id,
                    "secret_access_key": secret.reveal(),
                    "token": token.reveal() or None,
                    "expires_at": None,
                }
                options["credential_provider"] = lambda: known
            return stores.S3Store(place.bucket, config=config, **options)
        case "gs":
            if config.get("skip_signature"):  # an emulator: writes ask for a token in spite of it
                options["credential_provider"] = lambda: {"token": "emulator", "expires_at": None}
            return stores.GCSStore(place.bucket, config=config, **options)
        case "az":
            return stores.AzureStore(place.bucket, config=config, **options)
        case _:
            return stores.HTTPStore.from_url(place.endpoint, **options)
