"""The files of gRPC's TLS; the law: what cannot be read or used is said with the flag that names it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from remora.errors import ConfigError


class TlsFiles(NamedTuple):
    """Paths of PEM files: the server's private key, its certificates, and those of who vouches for clients."""

    key: str
    cert: str
    root: str | None = None


def read(flag: str, path: str) -> bytes:
    """What a file says. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--grpc-{flag}: '{path}' cannot be read ({error.strerror}); TLS needs it") from error


def context_of(files: TlsFiles, alpn: str) -> ssl.SSLContext:
    """Return the context of a server [R17]; with ``root`` clients need a certificate that it vouches for.

    Raises ConfigError.
    """
    read("server-key", files.key)
    read("server-cert", files.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # RFC 9113 9.2.1
    context.set_alpn_protocols([alpn])
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")  # nobody is there to be asked
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--grpc-server-cert and --grpc-server-key: '{files.cert}' and '{files.key}' are not a certificate and its "
            f"private key without a password ({_reason(error)})"
        ) from error
    if files.root is not None:
        roots = read("root-cert", files.root)
        try:
            context.load_verify_locations(cadata=roots.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--grpc-root-cert: '{files.root}' is no certificate ({_reason(error)})") from error
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever is named vouches, be it below another
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
