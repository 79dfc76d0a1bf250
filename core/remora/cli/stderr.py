"""Errors of the commands on standard error, without the secrets of their URLs.

Invariant: every error of a command is printed by `print_error` or by `Parser`.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


def without_url_secrets(text: object) -> str:
    """Return a text with asterisks for the users, passwords and queries of its URLs."""
    from remora.system.url_secrets import hide_secrets  # imported here, because most commands succeed

    return hide_secrets(str(text))


def print_error(command: str, reason: object) -> None:
    """Print why a command failed."""
    print(f"{command}: {without_url_secrets(reason)}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Parser of arguments, and of those of its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after the usage and the reason."""
        super().error(without_url_secrets(message))
