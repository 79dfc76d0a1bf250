"""AMLRequest, AMLResponse and rawhttp for scoring scripts, without a dependency on Flask.

Scripts import them as `azureml.contrib.services` and `azureml_inference_server_http.api`. A request has the attributes
of a Flask request that scripts use. A response behaves like Azure's, which splits header values at commas.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from wsgiref.headers import Headers

from remora.system.json_text import read_json
from remora_adapters.azureml.answers import FAILED

Run = TypeVar("Run", bound=Callable[..., Any])

_RAW = "_remora_rawhttp"
_PACKAGES = ("azureml.contrib.services", "azureml_inference_server_http.api")


def rawhttp(run: Run) -> Run:
    """Mark a ``run`` that takes the raw request."""
    setattr(run, _RAW, True)
    return run


def is_raw(run: Callable[..., Any]) -> bool:
    """Return True if `rawhttp` marked ``run``."""
    return getattr(run, _RAW, False) is True


def _convert_or_default(value: Any, default: Any, convert: Callable[[str], Any] | None) -> Any:
    """Return a converted value as Flask's ``get`` does, or the default if absent or invalid."""
    if value is None or convert is None:
        return default if value is None else value
    try:
        return convert(value)
    except (ValueError, TypeError):
        return default


class RequestHeaders(Headers):
    """Headers with Flask's behaviour.

    Names are in title case, lookup ignores case, repeated headers are joined, iteration yields pairs, and a missing
    header raises KeyError.
    """

    def __init__(self, sent: list[tuple[str, str]]) -> None:
        joined: dict[str, str] = {}
        for name, value in sent:
            name = name.title()
            joined[name] = f"{joined[name]},{value}" if name in joined else value
        super().__init__(list(joined.items()))

    def __getitem__(self, name: str) -> str:
        value: str | None = super().get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.items())

    def get(self, name: str, default: Any = None, type: Callable[[str], Any] | None = None) -> Any:  # noqa: A002 - Flask's name
        return _convert_or_default(super().get(name), default, type)


class MultiDict(dict[str, Any]):
    """Dictionary with several values per key, whose ``d[key]`` is the first."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._lists: dict[str, list[Any]] = {}
        for key, value in pairs:
            self._lists.setdefault(key, []).append(value)
        super().__init__({key: values[0] for key, values in self._lists.items()})

    def get(self, key: str, default: Any = None, type: Callable[[str], Any] | None = None) -> Any:  # noqa: A002 - Flask's name
        return _convert_or_default(super().get(key), default, type)

    def getlist(self, key: str) -> list[Any]:
        """Return all values of a key, or an empty list."""
        return list(self._lists.get(key, ()))

    def lists(self) -> list[tuple[str, list[Any]]]:
        """Return every key with all its values."""
        return [(key, list(values)) for key, values in self._lists.items()]

    def to_dict(self, flat: bool = True) -> dict[str, Any]:
        """Return the first value of each key, or all values in lists."""
        return dict(self) if flat else dict(self.lists())


class UploadedFile(io.BytesIO):
    """Uploaded file of a form, with the sender's metadata."""

    def __init__(self, name: str, filename: str, content_type: str, data: bytes) -> None:
        super().__init__(data)
        self.name = name
        self.filename = filename
        self.content_type = self.mimetype = content_type
        self.content_length = len(data)

    @property
    def stream(self) -> io.BytesIO:
        """The file itself, under Flask's name."""
        return self

    def save(self, path: str | Path) -> None:
        """Write the file's bytes."""
        Path(path).write_bytes(self.getvalue())


class AMLRequest:
    """Request as a script sees it, with case-insensitive ``headers``."""

    def __init__(self, method: str, path: str, query: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.method = method
        self.path = path
        self.query_string = query.encode()
        self.full_path = f"{path}?{query}"
        self.headers = RequestHeaders(headers)
        self.data = body
        self.stream = io.BytesIO(body)
        self.args = MultiDict(parse_qsl(query, keep_blank_values=True))
        self.host = self.headers.get("host") or "localhost"
        self.host_url = self.url_root = f"http://{self.host}/"
        self.base_url = f"http://{self.host}{path}"
        self.url = f"{self.base_url}{'?' if query else ''}{query}"
        self._parts: tuple[MultiDict, MultiDict] | None = None

    @property
    def content_type(self) -> str | None:
        kind: str | None = self.headers.get("content-type")
        return kind

    @property
    def mimetype(self) -> str:
        return (self.content_type or "").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int:
        return len(self.data)

    @property
    def is_json(self) -> bool:
        kind = self.mimetype
        return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))

    @property
    def json(self) -> Any:
        return self.get_json()

    def get_data(self, cache: bool = True, as_text: bool = False, parse_form_data: bool = False) -> Any:
        """Return the body, as text with ``as_text``."""
        return self.data.decode("utf-8", "replace") if as_text else self.data

    def get_json(self, force: bool = False, silent: bool = False, cache: bool = True) -> Any:
        """Return the body's JSON. For invalid JSON raises ValueError, or returns None if ``silent``."""
        try:
            if not (force or self.is_json):
                raise ValueError("the content type is not application/json")
            return read_json(self.data)
        except ValueError:
            if silent:
                return None
            raise

    @property
    def form(self) -> MultiDict:
        return self._form()[0]

    @property
    def files(self) -> MultiDict:
        return self._form()[1]

    @property
    def values(self) -> MultiDict:
        lists = [*self.args.lists(), *self.form.lists()]
        return MultiDict((key, value) for key, values in lists for value in values)

    def _form(self) -> tuple[MultiDict, MultiDict]:
        if self._parts is None:
            if self.mimetype == "application/x-www-form-urlencoded":
                fields = parse_qsl(self.data.decode("utf-8", "replace"), keep_blank_values=True)
                self._parts = MultiDict(fields), MultiDict([])
            elif self.mimetype == "multipart/form-data":
                self._parts = _parse_multipart(self.content_type or "", self.data)
            else:
                self._parts = MultiDict([]), MultiDict([])
        return self._parts


def _parse_multipart(content_type: str, body: bytes) -> tuple[MultiDict, MultiDict]:
    """Parse the fields and files of a form."""
    start = f"Content-Type: {content_type}\r\nMIME-Version: 1.0\r\n\r\n".encode("latin-1", "replace")
    message: Message = BytesParser(policy=HTTP).parsebytes(start + body)
    fields: list[tuple[str, Any]] = []
    files: list[tuple[str, Any]] = []
    for part in message.get_payload() if message.is_multipart() else ():
        if not isinstance(part, Message):
            continue
        name = str(part.get_param("name", "", "content-disposition") or "")
        payload = part.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        filename = part.get_filename()
        if filename is None:
            fields.append((name, data.decode("utf-8", "replace")))
        else:
            files.append((name, UploadedFile(name, filename, part.get_content_type(), data)))
    return MultiDict(fields), MultiDict(files)


class AMLResponse:
    """Response that a script creates.

    Args:
        message: text, bytes, or with ``json_str`` any JSON value. None is an empty JSON object.
        status_code: the HTTP status.
        response_headers: a value with commas becomes several headers of the same name, as in Azure's server.
        json_str: serialize ``message`` as JSON.
        run_function_failed: value of the header FAILED.

    Raises TypeError for a message that is not serializable as JSON.
    """

    def __init__(
        self,
        message: Any,
        status_code: int,
        response_headers: Mapping[str, str] | None = None,
        json_str: bool = False,
        run_function_failed: bool = False,
    ) -> None:
        is_json = json_str or message is None
        text = json.dumps({} if message is None else message) if is_json else message
        self.data = text.encode() if isinstance(text, str) else bytes(text)
        self.status_code = status_code
        self.headers = Headers([("Content-Type", "application/json" if is_json else "text/html; charset=utf-8")])
        extra_headers = dict(response_headers or {})
        if message is not None and not json_str and "Content-Type" in extra_headers:
            del self.headers["Content-Type"]
        self.headers[FAILED] = str(run_function_failed)
        for name, value in extra_headers.items():
            for one in value.split(","):
                self.headers.add_header(name, one.strip())

    def get_data(self, as_text: bool = False) -> Any:
        """Return the body, as text with ``as_text``."""
        return self.data.decode() if as_text else self.data


def register_modules(modules: dict[str, ModuleType] | None = None) -> None:
    """Register this module under Azure's names, even where Azure's packages are installed."""
    registry = sys.modules if modules is None else modules
    for package in _PACKAGES:
        parts = package.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in registry:
                registry[name] = ModuleType(name)
                registry[name].__path__ = []
        request, response = ModuleType(f"{package}.aml_request"), ModuleType(f"{package}.aml_response")
        vars(request).update(AMLRequest=AMLRequest, rawhttp=rawhttp)
        vars(response).update(AMLResponse=AMLResponse)
        registry[request.__name__], registry[response.__name__] = request, response
        vars(registry[package]).update(aml_request=request, aml_response=response)
