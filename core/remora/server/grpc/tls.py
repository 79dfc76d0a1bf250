"""TLS files of gRPC and the server's TLS context.

Invariant: an error for an unreadable or invalid file names its flag.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from remora.errors import ConfigError


class TlsFiles(NamedTuple):
    """Paths of PEM files: the server's private key, its certificate chain, and the CA certificates for clients."""

    key: str
    cert: str
    root: str | None = None


def read(flag: str, path: str) -> bytes:
    """Return the content of a file. Raises ConfigError, which names ``--grpc-<flag>``."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--grpc-{flag}: '{path}' cannot be read ({error.strerror}); TLS needs it") from error


def context_of(files: TlsFiles, alpn: str) -> ssl.SSLContext:
    """Return the TLS context of a server [R17].

    With ``root``, clients need a certificate from that CA. Raises ConfigError.
    """
    read("server-key", files.key)
    read("server-cert", files.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # RFC 9113 9.2.1
    context.set_alpn_protocols([alpn])
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")  # never prompt for a password
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
            raise ConfigError(f"--grpc-root-cert: '{files.root}' is not a certificate ({_reason(error)})") from error
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate CA is accepted as a root
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
