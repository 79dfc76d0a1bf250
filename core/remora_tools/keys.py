"""Commands `remora keys`, which change a file of API keys.

Invariant: the file never holds a key, and is replaced as a whole, so that a running server reads the old or the new
one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from remora.api.http import KeyEntry, caller_of, digest_of, print_entries, read_entries
from remora.api.system import ROLES
from remora.cli.arguments import bind, count
from remora.cli.output import UsageError, columns

_PREFIX = "rk_"
_RANDOM_BYTES = 32


def add_keys(keys: argparse.ArgumentParser) -> None:
    """Add the verbs of `remora keys`."""
    keys.description = "Manage API keys."
    verbs = keys.add_subparsers(metavar="VERB", required=True)
    new = verbs.add_parser(
        "new",
        help="add a key and print it",
        description="Add a key to the file and print it, once, on the last line. The file holds only its hash.",
    )
    new.add_argument("--name", required=True, metavar="NAME", help="name of the key, for traces and errors")
    new.add_argument(
        "--role", required=True, action="append", choices=tuple(ROLES), help="what the key permits; repeatable"
    )
    for flag, kind, text in (
        ("--rate", count, "requests a second that the key may send (default: no limit)"),
        ("--burst", count, "requests at once beyond that rate (default: those of one second)"),
        ("--concurrent", count, "requests in flight at the same time (default: no limit)"),
    ):
        new.add_argument(flag, type=kind, default=0, metavar="N", help=text)
    listing = verbs.add_parser("list", help="list the keys", description="List the names and roles of the keys.")
    revoke = verbs.add_parser("revoke", help="remove a key", description="Remove a key from the file.")
    revoke.add_argument("--name", required=True, metavar="NAME", help="name of the key")
    for parser, verb in ((new, "new"), (listing, "list"), (revoke, "revoke")):
        parser.add_argument(
            "--file", required=True, type=Path, metavar="FILE", help="file of keys, as for serve --api-keys-file"
        )
        bind(parser, VERBS[verb])


def new(options: argparse.Namespace) -> int:
    """Add a key to the file and print it on the last line.

    A missing file is created.
    """
    entries = _read(options.file) if options.file.exists() else ()
    if any(entry.name == options.name for entry in entries):
        raise UsageError(f"{options.file} has a key '{options.name}': revoke it first, or choose another --name")
    roles = tuple(dict.fromkeys(options.role))
    try:
        caller_of(options.name, roles)
    except ValueError as error:
        raise UsageError(f"--name: {error}") from error
    key = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    today = datetime.now(UTC).date().isoformat()
    entry = KeyEntry(
        options.name, roles, digest_of(key.encode()).hex(), today, options.rate, options.burst, options.concurrent
    )
    _write(options.file, (*entries, entry))
    print(f"key '{options.name}' with the role {' and '.join(roles)} is in {options.file}; it is not shown again:")
    print(key)
    return 0


def show(options: argparse.Namespace) -> int:
    """Print the names, roles, days of creation and limits of the keys."""
    rows = [
        (each.name, ",".join(each.roles), each.created, *(f"{limit:g}" if limit else "-" for limit in each.limits))
        for each in _read(options.file)
    ]
    print(columns([("NAME", "ROLES", "CREATED", "REQUESTS/S", "BURST", "CONCURRENT"), *rows]))
    return 0


def revoke(options: argparse.Namespace) -> int:
    """Remove a key from the file."""
    entries = _read(options.file)
    kept = tuple(entry for entry in entries if entry.name != options.name)
    if len(kept) == len(entries):
        names = ", ".join(entry.name for entry in entries) or "none"
        raise UsageError(f"{options.file} has no key '{options.name}'; it has {names}")
    _write(options.file, kept)
    print(f"key '{options.name}' is revoked; running servers notice within a second")
    return 0


VERBS: Mapping[str, Callable[[argparse.Namespace], int]] = {"new": new, "list": show, "revoke": revoke}


def _read(path: Path) -> tuple[KeyEntry, ...]:
    """Return the entries of a file. Raises UsageError for a file that holds none, OSError."""
    try:
        return read_entries(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _write(path: Path, entries: tuple[KeyEntry, ...]) -> None:
    """Replace the file, which keeps its mode.

    A new file is readable by its owner alone. Raises OSError.
    """
    target = path.resolve()  # a link stays a link
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    descriptor, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(print_entries(entries))
        os.chmod(draft, mode)
        os.replace(draft, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
