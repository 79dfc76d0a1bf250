"""Concealment of secrets in the command line that the process list shows.

Invariant: only bytes of secrets change, and the length of the command line stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_PAIRS = (b"--http-restricted-api", b"--grpc-restricted-protocol", b"--api-key", b"--header", b"--env")
"""Flags with values of the form ``NAME=SECRET``."""
_PUBLIC = (b"@", b"sha256:")
"""Beginnings of values that name the place of a secret, or have its hash. Those of variables (`--env`) are literal."""
_SETTINGS = re.compile(rb"(?<=,password=).+", re.DOTALL)
"""Secret of ``--cache-config=redis,password=SECRET``."""
_IN_URL = re.compile(rb"(?<=://)(?:[^/?#\s@:]*:\S*|[^/?#\s]*)(?=@)|(?<=\?)[^#\s]+")
"""User with password, and query, of a URL: signed URLs carry their signature there.

A password lasts to the last "@", because people write "/", "?" and "#" in it without encoding them.
"""
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Places of arg_start and arg_end in /proc/PID/stat, counted from the state."""


class Span(NamedTuple):
    """Bytes of a command line that are a secret."""

    begin: int
    end: int


def secrets_in(words: Sequence[bytes]) -> list[Span]:
    """Return the secrets of a command line whose words are followed by one byte each. Pure."""
    found, at, flag = [], 0, b""
    for word in words:
        begin, awaiting = 0, b""
        if word.startswith(b"--"):
            flag, equals, _ = word.partition(b"=")
            begin, awaiting = len(flag) + len(equals), b"" if equals else flag
        found += [Span(at + begin + each.begin, at + begin + each.end) for each in _in_value(flag, word[begin:])]
        flag = awaiting  # "" after a value, because the next word is a positional argument
        at += len(word) + 1
    return found


def _in_value(flag: bytes, value: bytes) -> Iterator[Span]:
    if flag in _PAIRS:
        name, equals, secret = value.partition(b"=")
        if secret and (flag == b"--env" or not secret.startswith(_PUBLIC)):
            yield Span(len(name) + len(equals), len(value))
    elif flag == b"--cache-config":
        yield from (Span(*each.span()) for each in _SETTINGS.finditer(value))
    elif b"://" in value:
        yield from (Span(*each.span()) for each in _IN_URL.finditer(value))


def conceal() -> None:
    """Overwrite the secrets in the command line of this process, where the system permits it.

    It is readable by all users of the machine. Parse the arguments from a copy, as `sys.argv` is.
    """
    try:
        with open("/proc/self/cmdline", "rb") as file:
            spans = secrets_in(file.read().split(b"\0"))
        if not spans:
            return
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            for span in spans:
                if begin > 0 and begin + span.end < end:
                    memory.seek(begin + span.begin)
                    memory.write(b"*" * (span.end - span.begin))
    except (OSError, ValueError, IndexError):  # another system, or a sandbox that forbids it
        return
