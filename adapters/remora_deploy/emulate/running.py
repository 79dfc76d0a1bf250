"""Command `remora emulate`, which runs a platform's checks and prints the results.

The exit status is 0 if no check failed, 1 otherwise, and 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from remora.cli.stderr import print_error
from remora_deploy.emulate import EmulateSettings, Failed, Inapplicable, Platform, Skipped, adapter_of, find_platform
from remora_deploy.emulate.stage import Stage

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Verdict(NamedTuple):
    """Result of one check, with the observation or the reason for skipping in ``found``.

    ``applies`` is False for a skipped check that concerns servers or models of another kind.
    """

    id: str
    what: str
    why: str
    outcome: str
    found: str = ""
    applies: bool = True


def run_checks(platform: Platform, settings: EmulateSettings, only: Iterable[str] = ()) -> list[Verdict]:
    """Start the server if there is a command, and run the checks in order.

    Raises OSError if the command cannot be started, ValueError for an unknown check.
    """
    wanted = set(only)
    unknown = wanted - {check.id for check in platform.checks}
    if unknown:
        raise ValueError(f"{platform.title} has no check {', '.join(sorted(unknown))}: see --list")
    verdicts = []
    with Stage(platform, settings) as stage:
        stage.wait_until_ready()
        for check in platform.checks:
            if wanted and check.id not in wanted:
                continue
            outcome, found, applies = PASSED, "", True
            try:
                if not (stage.ready or check.early):
                    raise Skipped("the server never became ready")
                check.run(stage)
            except Failed as failure:
                outcome, found = FAILED, str(failure)
            except Skipped as reason:
                outcome, found, applies = SKIPPED, str(reason), not isinstance(reason, Inapplicable)
            verdicts.append(Verdict(check.id, check.what, check.why, outcome, found, applies))
    return verdicts


def serve_api(platform: Platform, settings: EmulateSettings, port: int) -> int:
    """Start the server and serve its platform's client API on a loopback port until interrupted.

    Raises ValueError for a platform without an emulated client API, and OSError as `run_checks` does.
    """
    if platform.api is None:
        raise ValueError(f"the client API of {platform.title} is not emulated")
    with Stage(platform, settings) as stage:
        stage.wait_until_ready()
        if not stage.ready:
            print_error(platform.title, "the server never became ready")
            return 1
        with platform.api(stage, port):
            print(f"{platform.title}: http://127.0.0.1:{port} is the clients' API", flush=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0


def format_report(title: str, verdicts: list[Verdict]) -> str:
    """Return the report as text, with the observation and the reason for each failed check.

    Checks that do not apply are left out, unless there are no others.
    """
    verdicts = [verdict for verdict in verdicts if verdict.applies] or verdicts
    width = max((len(verdict.id) for verdict in verdicts), default=0)
    lines = []
    for verdict in verdicts:
        lines.append(f"{verdict.outcome:7}  {verdict.id:{width}}  {verdict.what}")
        if verdict.found:
            lines.append(f"{'':7}  {'':{width}}  {'seen: ' if verdict.outcome == FAILED else ''}{verdict.found}")
        if verdict.outcome == FAILED:
            lines.append(f"{'':7}  {'':{width}}  why it matters: {verdict.why}")
    counts = [sum(verdict.outcome == outcome for verdict in verdicts) for outcome in (PASSED, FAILED, SKIPPED)]
    return "\n".join([*lines, f"{title}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped"])


def run(options: argparse.Namespace) -> int:
    """Run the command `remora emulate`."""
    try:
        platform = find_platform(options.platform)
        if options.list:
            for check in platform.checks:
                print(f"{check.id}: {check.what}\n    {check.why}")
            return 0
        if options.api:
            return serve_api(platform, _settings(options), options.api)
        verdicts = run_checks(platform, _settings(options), options.only)
    except (ValueError, OSError) as error:
        print_error("remora emulate", error)
        return 2
    if options.format == "json":
        print(json.dumps([verdict._asdict() for verdict in verdicts], indent=1))
    else:
        print(format_report(platform.title, verdicts))
    return 1 if any(verdict.outcome == FAILED for verdict in verdicts) else 0


def _settings(options: argparse.Namespace) -> EmulateSettings:
    """Return settings from the command line.

    Raises ValueError for conflicting arguments, OSError for a missing file.
    """
    target = [word for word in options.target if word != "--"]
    if not target:
        raise ValueError("no target: pass the server's URL, or -- and the command that starts it")
    is_url = target[0].startswith(("http://", "https://"))
    if is_url and len(target) > 1:
        raise ValueError(f"unexpected arguments after a URL target: {' '.join(target[1:])}")
    if target[0].startswith("https://"):
        raise ValueError("platforms reach containers over plain HTTP: pass an http:// URL")
    model = options.model
    if not is_url and len(target) == 1 and Path(target[0]).is_dir():
        model = model or Path(target[0])
        target = [sys.executable, "-m", adapter_of(options.platform)]
    elif not is_url and len(target) == 1 and Path(target[0]).is_file() and not os.access(target[0], os.X_OK):
        raise ValueError(f"'{target[0]}' is a file and no command: pass the folder with the models, or -- COMMAND")
    return EmulateSettings(
        command=() if is_url else tuple(target),
        url=target[0] if is_url else "",
        model=model.resolve() if model else None,
        body=options.body.read_bytes() if options.body else b"",
        content_type=options.content_type,
        environ=_pairs("--env", options.env),
        startup_s=options.startup_timeout,
        patience=options.patience,
        given=_pairs("--with", options.given),
    )


def _pairs(flag: str, entries: Iterable[str]) -> dict[str, str]:
    for entry in entries:
        if "=" not in entry:
            raise ValueError(f"{flag} {entry}: expected NAME=VALUE")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}
