"""Buckets of S3, Google and Azure, and files of web servers, through obstore; it is imported when one is opened.

obstore repeats what fails before its first byte, with growing pauses; a body that breaks off is asked for again here.
No error text that leaves this module has a query (where signatures are) or a secret of the settings in it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from remora.errors import InvalidArgumentError, NotFoundError, RemoraError, UnavailableError, UnsupportedError
from remora.storage import ChangedError, Secret, StoredObject, is_plain
from remora.storage.credentials import StorageSettings
from remora.storage.location import Location
from remora.system.install_advice import install_command

_log = logging.getLogger("remora.models")

_MOST_OBJECTS = 100_000
_BODY_TRIALS = 4
_ONE_FILE = re.compile(r"\.(?:onnx|tar|tgz|zip|tar\.(?:gz|bz2|xz))$", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s)\"',]*")
_CODE = re.compile(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?")
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "http": "s3"}
_Answer = TypeVar("_Answer")
_BAD_NAME = "InvalidPathError"
_REFUSED = re.compile(r"UnauthenticatedError|PermissionDeniedError|status code: 40[13] ")
"""In an error's class, or in its text: a listing that is refused is of no class of its own."""


class ObjectStorage:
    """What lies below a path of a bucket, as a `Storage`.

    Args:
        location: the bucket and the path.
        settings: gives what the store is opened with; asked again when credentials are refused, once [M22].
        retries: how often a request is repeated.
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
        """What the paths of objects are relative to: the location, or the folder it is in when it is a file."""

    @property
    def location(self) -> str:
        """The URL, without secrets."""
        return self._place.url

    @property
    def identity(self) -> str:
        """See `Storage`: the same URL may mean another endpoint in another environment."""
        place, config = self._place, self._settings().config
        endpoint = place.endpoint or config.get("endpoint") or config.get("base_url") or ""
        return "\n".join((place.cloud, str(endpoint), str(config.get("account_name", "")), place.bucket, place.path))

    def listing(self, prefix: str = "") -> list[StoredObject]:
        """See `Storage`. A location that ends like a file is looked for as one first, and then has one object."""
        if self._may_be_file and not prefix:
            item = self._ask(self._head)
            if item is not None:
                self._folder = self._place.path.rpartition("/")[0]
                return [item]
        self._folder = self._place.path
        return self._ask(lambda store: self._list(store, prefix))

    def read(self, item: StoredObject, start: int, end: int) -> memoryview:
        """See `Storage`."""
        for trial in range(1, _BODY_TRIALS + 1):
            try:
                return self._ask(lambda store: self._read(store, item, start, end))
            except _BrokenOffError as error:
                level = logging.WARNING if trial == _BODY_TRIALS else logging.DEBUG
                _log.log(level, "%s/%s broke off between %d and %d: %s", self.location, item.path, start, end, error)
        raise UnavailableError(
            f"cannot read '{item.path}' of '{self.location}': it broke off {_BODY_TRIALS} times. Check the network"
        )

    # -- one request each --------------------------------------------------------------------------------------------

    def _head(self, store: Any) -> StoredObject | None:
        import obstore

        try:
            return _stored(obstore.head(store, self._place.path), self._place.name)
        except FileNotFoundError:
            if self._place.cloud == "http":  # there is no listing to look into
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
                raise UnavailableError(
                    f"'{self.location}' holds more than {_MOST_OBJECTS} files: name the folder that the models are in"
                )

        def walk(folder: str) -> None:
            before = len(found)
            try:
                for page in obstore.list(store, folder or None, chunk_size=1000):
                    keep(page)
            except Exception as error:
                if type(error).__name__ != _BAD_NAME:
                    raise
                # obstore gives up a listing that holds a name such as "a/../b". Folder by folder only one is lost.
                del found[before:]
                try:
                    level = obstore.list_with_delimiter(store, folder or None)
                except Exception as at_level:
                    # The first error names the whole object; another reason, such as the network, is its own.
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
        except Exception as error:  # obstore's own classes, and none of them says more than its text
            raise _BrokenOffError(self._shown(error)) from None
        if len(body) != end - start:
            raise _BrokenOffError(f"{len(body)} bytes came of {end - start}")
        return body

    # -- the store ---------------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[Any], _Answer]) -> _Answer:
        """What a request gives. Raises RemoraError: whatever obstore raises becomes one."""
        for last in (False, True):
            store = self._open(again=last)
            try:
                return request(store)
            except (RemoraError, _BrokenOffError):
                raise
            except Exception as error:
                if last or not _is_refusal(error):
                    raise self._error_of(error) from None
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
                    self._store = _open_store(obstore.store, self._place, settings, self._retries)
                except Exception as error:
                    raise InvalidArgumentError(f"cannot open '{self.location}': {self._shown(error)}") from None
                _log.debug("credentials for %s come from %s", self.location, settings.source)
            return self._store

    def _error_of(self, error: Exception) -> RemoraError:
        """In our words, with the storage's code and message."""
        kind, text, place = type(error).__name__, self._shown(error), self.location
        if kind == "PreconditionError":
            return ChangedError(f"a file of '{place}' was replaced while it was read")
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text or "ContainerNotFound" in text:
            return NotFoundError(f"there is no '{place}': {text}. Check bucket and path")
        if _is_refusal(error):
            return UnavailableError(f"'{place}' may not be read: {text}. Check the credentials and their rights")
        if "redirect" in text.lower() and self._place.cloud == "s3":
            text += ". The bucket is in another region: set AWS_REGION"
        return UnavailableError(f"cannot reach '{place}': {text}")

    def _shown(self, error: Exception) -> str:
        """What an error says, in one line, without queries and secrets."""
        text = str(error).partition("\n\nDebug source")[0]
        told = _CODE.search(text)
        text = text.partition("<?xml")[0].partition("<Error>")[0] + (
            ": ".join(filter(None, told.groups())) if told else ""
        )
        text = _QUERY.sub("?...", " ".join(text.split()))
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _is_refusal(error: Exception) -> bool:
    return _REFUSED.search(f"{type(error).__name__} {error}") is not None


class _BrokenOffError(Exception):
    """A body ended before its end."""


def _stored(meta: Any, path: str) -> StoredObject:
    """A server without ETags has at least times."""
    return StoredObject(path, int(meta["size"]), meta["e_tag"] or f"modified {meta['last_modified'].isoformat()}")


def _open_store(stores: Any, place: Location, settings: StorageSettings, retries: int) -> Any:
    """obstore's store for the bucket."""
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
            return stores.GCSStore(place.bucket, config=config, **options)
        case "az":
            return stores.AzureStore(place.bucket, config=config, **options)
        case _:
            return stores.HTTPStore.from_url(place.endpoint, **options)
