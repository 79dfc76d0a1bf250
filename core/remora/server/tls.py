"""TLS of a port: its PEM files, the context made from them, and its renewal when they change.

Invariant: an error for an unreadable or invalid file names its flag.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from remora.errors import ConfigError
from remora.options import ServerOptions

_log = logging.getLogger("remora.server")

_LOOK_S = 1.0
"""Interval at which the files are checked for changes."""
_TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Suites with forward secrecy and authenticated encryption (RFC 9325 4.2, RFC 9113 9.2.2), as all of TLS 1.3."""
_DAYS = 30
_SUBJECT = "/CN=localhost/O=remora, self-signed"
_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:0:0:0:0:0:0:0:1"


class TlsFiles(NamedTuple):
    """Paths of PEM files, and the protocol whose flags name them.

    They are the server's private key, its certificate chain, and the CA certificates for clients.
    """

    protocol: str
    key: str
    cert: str
    root: str | None = None


def grpc_files(options: ServerOptions) -> TlsFiles | None:
    """Return the files of the gRPC port, None without TLS."""
    if not (options.grpc_use_ssl or options.grpc_use_ssl_mutual):
        return None
    root = options.grpc_root_cert if options.grpc_use_ssl_mutual else None
    return TlsFiles("grpc", options.grpc_server_key, options.grpc_server_cert, root)


def http_files(options: ServerOptions) -> TlsFiles | None:
    """Return the files of the HTTP port, None without TLS."""
    if not options.http_server_cert:
        return None
    return TlsFiles("http", options.http_server_key, options.http_server_cert, options.http_root_cert or None)


def read(flag: str, path: str) -> bytes:
    """Return the content of a file. Raises ConfigError, which names ``--<flag>``."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--{flag}: '{path}' cannot be read ({error.strerror}); TLS needs it") from error


class PortTls:
    """Current TLS context of a port. Use it in the loop's thread.

    With ``root``, clients need a certificate from that CA [R17].

    Args:
        files: PEM files.
        alpn: protocols of the port, the preferred one first.

    Raises ConfigError.
    """

    def __init__(self, files: TlsFiles, alpn: Sequence[str]) -> None:
        self._files = files
        self._alpn = list(alpn)
        self._seen = self._identity()
        self._failed = False
        self._change_level, self._error_level = logging.INFO, logging.ERROR
        self.context = self._make()
        """Context for new connections."""

    def log_no_changes(self) -> None:
        """Log renewals and their failures at the debug level, because another process logs them."""
        self._change_level = self._error_level = logging.DEBUG

    def follow(self) -> None:
        """Read the files again when they have changed, now and every second."""
        try:
            self.reread()
        finally:  # an error of one look must not end the renewal
            asyncio.get_running_loop().call_later(_LOOK_S, self.follow)

    def reread(self) -> None:
        """Read the files if they have changed, or could not be used.

        The previous certificate stays if they cannot be used.
        """
        seen = self._identity()
        if seen == self._seen and not self._failed:
            return
        known, self._seen = self._failed and seen == self._seen, seen
        self._failed = True
        try:
            self.context = self._make()
        except ConfigError as error:
            if not known:  # once for each change
                _log.log(self._error_level, "the certificate stays as it was: %s", error)
        else:
            self._failed = False
            text = "new connections get the certificate of --%s-server-cert that is now in %s"
            _log.log(self._change_level, text, self._files.protocol, self._files.cert)

    def _identity(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for path in self._files[1:]:
            try:
                status = os.stat(path) if path else None
            except OSError:
                status = None
            found.append((status.st_ino, status.st_size, status.st_mtime_ns) if status is not None else ())
        return found

    def _make(self) -> ssl.SSLContext:
        files, flag = self._files, self._files.protocol
        read(f"{flag}-server-key", files.key)
        read(f"{flag}-server-cert", files.cert)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # RFC 9113 9.2.1
        context.set_ciphers(_TLS_1_2_CIPHERS)
        context.set_alpn_protocols(self._alpn)
        try:
            context.load_cert_chain(files.cert, files.key, password=lambda: b"")  # never prompt for a password
        except (OSError, ValueError) as error:  # a renewal may remove a file between its check and here
            raise ConfigError(
                f"--{flag}-server-cert and --{flag}-server-key: '{files.cert}' and '{files.key}' are not a certificate "
                f"and its private key without a password ({_reason(error)})"
            ) from error
        if files.root is not None:
            roots = read(f"{flag}-root-cert", files.root)
            try:
                context.load_verify_locations(cadata=roots.decode("ascii", "replace"))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"--{flag}-root-cert: '{files.root}' is not a certificate ({_reason(error)})"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate CA is accepted as a root
        return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def make_self_signed(folder: Path) -> tuple[Path, Path]:
    """Return a certificate for localhost and its private key in a folder, for development.

    A certificate that is valid for another day is used again, so that clients may keep trusting it. Raises ConfigError
    without the program ``openssl``.
    """
    cert, key = folder / "localhost-cert.pem", folder / "localhost-key.pem"
    try:
        if key.exists() and cert.exists():
            check = ["openssl", "x509", "-checkend", "86400", "-noout", "-in", str(cert)]
            if not subprocess.run(check, capture_output=True, check=False).returncode:
                return cert, key
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-days", str(_DAYS), "-subj", _SUBJECT, "-addext", _NAMES,
                "-keyout", str(key), "-out", str(cert)]  # fmt: skip
        key.unlink(missing_ok=True)
        key.touch(0o600)  # before openssl writes it, so that it is never readable by others
        subprocess.run(make, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().rpartition("\n")[2]
        raise ConfigError(f"--http-self-signed: the program openssl cannot make a certificate: {reason}") from error
    return cert, key
