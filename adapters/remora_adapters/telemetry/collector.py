"""Client of an OpenTelemetry collector, by OTLP over HTTP.

Imported only by the senders of metrics and logs, and of spans for the attributes.
"""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.sdk.resources import Resource
from opentelemetry.util.re import parse_env_headers

from remora.api.system import AnswerTooLongError, Limits, NoAnswerError, fetch, is_http_url
from remora.errors import ConfigError

_SERVICE = "triton-inference-server"
_LOCAL = "http://localhost:4318"
_TIMEOUT_S = 10.0
_LONGEST_ANSWER = 65_536


class Message(Protocol):
    """Request of a signal's service."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return the request's bytes."""


class Collector:
    """Collector of one signal, ``metrics`` or ``logs``.

    Args:
        signal: name of the signal.
        base: the collector's URL without ``/v1/metrics``; "" leaves it to OpenTelemetry's variables and its default.
        environ: source of these variables: endpoint, headers, certificates, timeout (seconds) and compression, each for
            the signal or for all of them.

    Raises:
        ConfigError: the URL is not one of HTTP, or a certificate cannot be read.
    """

    def __init__(self, signal: str, base: str, environ: Mapping[str, str]) -> None:
        def variable(name: str) -> str:
            prefix = "OTEL_EXPORTER_OTLP_"
            return environ.get(f"{prefix}{signal.upper()}_{name}", "") or environ.get(f"{prefix}{name}", "")

        whole = "" if base else environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "")
        base = base or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or _LOCAL
        url = whole or f"{base.rstrip('/')}/v1/{signal}"
        if not is_http_url(url):  # its text may hold a part of a password
            raise ConfigError(
                f"the collector of {signal} needs a URL such as http://collector:4318: give it as otlp=URL or set "
                "OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        parts = urlsplit(url)
        self.place = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        """The URL without what may be secret."""
        self._url = url
        self._headers = {
            "Content-Type": "application/x-protobuf",
            **parse_env_headers(variable("HEADERS"), liberal=True),
        }
        self._zipped = variable("COMPRESSION") == "gzip"
        if self._zipped:
            self._headers["Content-Encoding"] = "gzip"
        timeout = variable("TIMEOUT")
        self._timeout_s = float(timeout) if timeout.replace(".", "", 1).isdecimal() else _TIMEOUT_S
        self._tls = _tls(variable) if parts.scheme == "https" else None

    def send(self, message: Message) -> bytes:
        """Send a request and return the body of its answer. Blocks; raises ConnectionError."""
        body = message.SerializeToString()
        limits = Limits(self._timeout_s, _LONGEST_ANSWER)
        try:
            answer = fetch(
                self._url,
                limits,
                body=gzip.compress(body, 1) if self._zipped else body,
                headers=self._headers,
                tls=self._tls,
            )
        except AnswerTooLongError:
            return b""  # the collector has accepted the request
        except NoAnswerError as error:
            raise ConnectionError(f"the collector at {self.place} cannot be reached: {error}") from None
        if not answer.is_success:
            raise ConnectionError(f"the collector at {self.place} answered {answer.status}")
        return answer.body


def _tls(variable: Any) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=variable("CERTIFICATE") or None)
        if variable("CLIENT_CERTIFICATE"):
            context.load_cert_chain(variable("CLIENT_CERTIFICATE"), variable("CLIENT_KEY") or None)
    except OSError as error:
        raise ConfigError(f"the certificates of OTEL_EXPORTER_OTLP_... cannot be read: {error}") from error
    return context


def server_resource(attributes: Mapping[str, str]) -> Resource:
    """Return the attributes of this server.

    ``attributes`` override ``OTEL_RESOURCE_ATTRIBUTES``.
    """
    own = Resource.create()  # from the environment; an unset service name becomes "unknown_service..."
    named = str(own.attributes.get("service.name", "")).startswith("unknown_service")
    return own.merge(Resource({**({"service.name": _SERVICE} if named else {}), **attributes}))


def key_values(members: Mapping[str, Any]) -> list[KeyValue]:
    """Return members as attributes; values other than JSON's become their text."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in members.items()]


def any_value(value: Any) -> AnyValue:
    """Return a value of JSON as OpenTelemetry's."""
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int() if -(2**63) <= value < 2**63:
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case Mapping():
            return AnyValue(kvlist_value=KeyValueList(values=key_values(value)))
        case list() | tuple():
            return AnyValue(array_value=ArrayValue(values=[any_value(each) for each in value]))
        case _:
            return AnyValue(string_value=str(value))
