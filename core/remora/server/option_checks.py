"""Checks of the server options and the host's extra ports before any port opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from remora import plugins
from remora.errors import RemoraError
from remora.options import ServerOptions
from remora.protocols.cross_site import SharedOrigins, is_loopback
from remora.protocols.header_patterns import open_header_pattern

if TYPE_CHECKING:
    from remora.protocols.forwarding import TrustedProxies
    from remora.server.key_check import KeyCheck
    from remora.server.token_check import TokenCheck


class PortPlace(Protocol):
    """Port of a host, as far as its place goes."""

    @property
    def what(self) -> str:
        """Its name in messages."""

    @property
    def address(self) -> str:
        """Address that it listens to."""

    @property
    def port(self) -> int:
        """Its number, 0 for any free one."""


class StartError(Exception):
    """Error that prevents the server from starting; its text is for the operator."""


def export_log(destination: str) -> None:
    """Send the log records of this process to the destination of ``--log-export`` from now on.

    Raises ValueError.
    """
    kind, _, url = destination.partition("=")
    if kind == "off":
        return
    if kind != "otlp":
        from remora.system.url_secrets import without_secrets

        raise ValueError(f"--log-export={without_secrets(kind)}: expected off, otlp or otlp=URL")
    from remora.system import logs
    from remora.system.environment import variables

    try:
        export = plugins.load_for("--log-export=otlp", plugins.LOG_EXPORT)(url, variables())
    except ImportError as error:
        from remora.system.install_advice import install_command

        raise ValueError(f"--log-export=otlp needs: {install_command('otel')} ({error})") from error
    except RemoraError as error:
        raise ValueError(str(error)) from error
    logs.OURS.export_to(export.put, export.close)


_MOST_LEEWAY_S = 600
_MIN_CORES, _CORES_A_FRONT, _MOST_FRONTS = 4, 3, 6


def front_count(text: str, cores: int) -> int:
    """Return the number of front processes for the option ``--frontends``.

    ``auto`` means 0 on fewer than four cores, else one for each three, at most six. Raises ValueError.
    """
    if text == "auto":
        return min(cores // _CORES_A_FRONT, _MOST_FRONTS) if cores >= _MIN_CORES else 0
    if not (text.isascii() and text.isdigit() and len(text) < 4):
        raise ValueError(f"--frontends={text}: expected a number of processes, or auto")
    return int(text)


def check_ports(options: ServerOptions, extra_ports: Sequence[PortPlace]) -> None:
    """Raise StartError if options contradict each other or two ports have the same number.

    Raises ValueError for text that is not an origin.
    """
    if options.allow_grpc:
        _check_tls(options)
    if bool(options.http_server_cert) != bool(options.http_server_key):
        raise StartError("--http-server-cert and --http-server-key are needed together")
    if options.http_root_cert and not options.http_server_cert:
        raise StartError("--http-root-cert needs --http-server-cert and --http-server-key")
    SharedOrigins(options.cors_origin)  # raises ValueError
    if options.grpc_on_http_port:
        _check_shared_port(options)
    if options.frontends != "0" and options.allow_grpc and options.grpc_transport == "grpcio":
        raise StartError("--frontends: grpcio serves in one process, --grpc-transport=own does not; leave one out")
    used: dict[int, str] = {}
    for on, port, what in (
        (options.allow_http, options.http_port, "HTTP"),
        (options.allow_grpc, options.grpc_port, "gRPC"),
        (options.allow_metrics, options.metrics_port, "metrics"),
        *((True, port.port, port.what) for port in extra_ports),
    ):
        if on and port and port in used:
            raise StartError(
                f"The server cannot listen to {used[port]} requests and {what} requests at the same address and "
                f"port {options.http_address}:{port}"
            )
        if on:
            used[port] = what


def _check_shared_port(options: ServerOptions) -> None:
    if options.grpc_use_ssl or options.grpc_use_ssl_mutual:
        raise StartError("--grpc-on-http-port: --http-server-cert is the TLS of that port; leave --grpc-use-ssl out")
    if not options.allow_http:
        raise StartError("--grpc-on-http-port: with --allow-http=false there is no such port; leave one out")
    if options.grpc_transport == "grpcio" and not options.allow_grpc:
        raise StartError("--grpc-transport=grpcio serves gRPC's separate port alone, and --allow-grpc=false closes it")


def _check_tls(options: ServerOptions) -> None:
    """Raise StartError if a file name for gRPC's TLS is missing."""
    mutual = options.grpc_use_ssl_mutual
    if not (options.grpc_use_ssl or mutual):
        return
    files = {"--grpc-server-cert": options.grpc_server_cert, "--grpc-server-key": options.grpc_server_key}
    if mutual:
        files["--grpc-root-cert"] = options.grpc_root_cert
    missing = [flag for flag, path in files.items() if not path]
    if missing:
        raise StartError(f"--grpc-use-ssl{'-mutual' if mutual else ''} needs {' and '.join(missing)}")


def grpc_restrictions(options: ServerOptions) -> tuple[str, ...]:
    """Return gRPC's restrictions; on a shared port they default to those of HTTP."""
    shared = options.http_restricted_api if options.grpc_on_http_port else ()
    return options.grpc_restricted_protocol or shared


def open_key_check(options: ServerOptions, now: Callable[[], float]) -> KeyCheck | None:
    """Return the check of API keys and tokens that the options ask for, None without any.

    ``now`` returns monotonic seconds. Raises ValueError.
    """
    tokens = _open_token_check(options, now)
    if tokens is None and not (options.api_key or options.api_keys_file):
        return None
    from remora.server.key_check import KeyCheck  # imported here, because few servers have keys

    proxies = open_proxies(options)
    client_of = None if proxies is None else proxies.client_of
    return KeyCheck(options.api_key, options.api_keys_file, now, tokens, client_of)


def _open_token_check(options: ServerOptions, now: Callable[[], float]) -> TokenCheck | None:
    audiences = tuple(filter(None, options.jwt_audience))
    if not options.jwt_jwks:
        if options.jwt_issuer or audiences or options.jwt_role or options.jwt_limit:
            raise ValueError("--jwt-issuer, --jwt-audience, --jwt-role and --jwt-limit need --jwt-jwks=FILE|URL")
        return None
    if not (options.jwt_issuer and audiences):  # keys of large issuers sign the tokens of all their customers
        raise ValueError("--jwt-jwks needs --jwt-issuer and --jwt-audience, so that only tokens for this server count")
    if not 0 <= options.jwt_leeway_secs <= _MOST_LEEWAY_S:
        raise ValueError(f"--jwt-leeway-secs={options.jwt_leeway_secs}: expected 0 to {_MOST_LEEWAY_S}")
    from remora.protocols.tokens import TokenTerms, read_limits, read_roles
    from remora.server.token_check import TokenCheck

    terms = TokenTerms(
        options.jwt_issuer,
        audiences,
        options.jwt_leeway_secs,
        options.jwt_roles_claim,
        read_roles(options.jwt_role),
        read_limits(options.jwt_limit),
    )
    return TokenCheck(options.jwt_jwks, terms, now)


def open_proxies(options: ServerOptions) -> TrustedProxies | None:
    """Return the trusted proxies, None without any. Raises ValueError."""
    if not options.trusted_proxy:
        return None
    from remora.protocols.forwarding import TrustedProxies  # imported here, because few servers trust proxies

    return TrustedProxies(options.trusted_proxy)


def exposure(options: ServerOptions, extra_ports: Sequence[PortPlace] = ()) -> str:
    """Return a warning about ports beyond this machine that every client may use, or "".

    API keys, tokens, client certificates and a restriction of inference count as protection, and for the metrics a
    restriction of statistics. Only the ports of HTTP and gRPC check client certificates.
    """
    if options.api_key or options.api_keys_file or options.jwt_jwks:
        return ""
    on_http = _restricts(options.http_restricted_api)
    on_grpc = _restricts(grpc_restrictions(options))
    ports = (
        (options.allow_http, options.http_address, options.http_root_cert or on_http),
        (options.grpc_on_http_port, options.http_address, options.http_root_cert or on_grpc),
        (options.allow_grpc, options.grpc_address or options.http_address, options.grpc_use_ssl_mutual or on_grpc),
        *((True, port.address, on_http) for port in extra_ports),
    )
    open_to = sorted({address for on, address, guarded in ports if on and not guarded and not is_loopback(address)})
    found = [f"every client that reaches {' or '.join(open_to)} may use this server"] if open_to else []
    address = options.metrics_address or options.http_address
    guarded = address in open_to or _restricts(options.http_restricted_api, "statistics")
    if options.allow_metrics and not guarded and not is_loopback(address):
        found.append(f"every client that reaches {address} may read the metrics of this server")
    if not found:
        return ""
    return (
        f"{'; '.join(found)}. --api-keys-file=FILE requires API keys; make one with: remora keys new --file FILE "
        "--name NAME --role all"
    )


def _restricts(entries: Sequence[str], group: str = "inference") -> bool:
    """Return True if an entry of restricted APIs covers a group."""
    return any(group in entry.partition(":")[0].split(",") for entry in entries)


def compile_pattern(text: str, flag: str) -> re.Pattern[str] | None:
    """Compile a pattern from the command line, case-insensitive [H25]. Raises StartError."""
    if not text:
        return None
    try:
        return open_header_pattern(text)
    except ValueError as error:
        raise StartError(f"{flag}={text[:200]}: not a regular expression: {error}") from error


def access_share(text: str) -> float:
    """Return the share of successful requests that ``--access-log`` selects, -1 if it is off.

    Raises ValueError.
    """
    fixed = {"off": -1.0, "errors": 0.0, "all": 1.0}
    if text in fixed:
        return fixed[text]
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise ValueError(f"--access-log={text}: expected all, errors, off, or a share such as 0.01")
    return share


def logs_requests(options: ServerOptions) -> bool:
    """Return True if the options select an access log or ids of requests. Raises ValueError."""
    return access_share(options.access_log) >= 0.0 or options.request_ids
