"""Commands `remora release`, which divide the requests to a model among its versions."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from remora.cli.client import call_json, model_path, open_client
from remora.cli.output import UsageError, columns, one_line
from remora.errors import MalformedError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_JUDGED = ("steps", "bake", "alpha", "slow_ms", "least")
"""Options of `remora release start` that only a release with --auto uses."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def release(options: argparse.Namespace) -> int:
    """Run `remora release VERB`.

    Raises RemoraError with the server's reason.
    """
    client = open_client(options)
    try:
        path = f"{model_path(options.model)}/release"
        members = _MEMBERS[options.verb](options)
        if members is None:
            status = call_json(client, "GET", path)
        else:
            members = {name: value for name, value in members.items() if value not in (None, "", [], {})}
            status = call_json(client, "POST", path, {"action": options.verb, **members})
        if not isinstance(status, dict) or not isinstance(status.get("arms"), list):
            raise MalformedError(f"{client.name} did not answer {path} with a release: is it a remora server?")
    finally:
        client.close()
    print(json.dumps(status, indent=2) if options.json_out else print_status(status))
    return 0


def print_status(status: Mapping[str, Any]) -> str:
    """Return the state of a release as text, a table of its arms and the latest decisions."""
    lines = [f"{status['model']}: {_headline(status)}"]
    rows = [_arm(row) for row in status["arms"]]
    if rows:
        lines.append(columns([("ARM", "VERSION", "WEIGHT", "STATE", "ANSWERS", "ERRORS", "SLOW", "MEAN"), *rows]))
    shadow = status.get("shadow")
    if shadow:
        counts = ", ".join(f"{shadow.get(name, 0)} {name}" for name in ("compared", "differing", "failed", "dropped"))
        warning = shadow.get("warning", "")
        lines.append(
            f"shadow: {shadow['title']} gets copies of {shadow['weight']:g} %: "
            f"{counts if 'compared' in shadow else warning}"
        )
        if warning and "compared" in shadow:
            lines.append(f"  {one_line(warning)}")
        lines += [f"  {one_line(sample)}" for sample in shadow.get("samples", [])[-5:]]
    for title, value in (
        ("aliases", ", ".join(f"{name}={version}" for name, version in status.get("aliases", {}).items())),
        ("rolled back", ", ".join(map(str, status.get("rejected", [])))),
        ("next weights", ", ".join(f"{step:g} %" for step in status.get("steps", []))),
        ("judgement", status.get("judgement", "")),
        ("warning", status.get("warning", "")),
    ):
        if value:
            lines.append(f"{title}: {one_line(value)}")
    lines += [_event(event) for event in status.get("events", [])[-5:]]
    return "\n".join(lines)


def _event(event: Mapping[str, Any]) -> str:
    reason = one_line(event["reason"])
    return f"- {event['action']}: {reason}" if reason else f"- {event['action']}"


def _headline(status: Mapping[str, Any]) -> str:
    if status["stage"] == "none":
        return f"no release, version {status['stable']} serves"
    if status["stage"] == "settled":
        return f"version {status['stable']} is stable, no release is running"
    return "a release is running" + (", judged automatically" if status.get("automatic") else "")


def _arm(row: Mapping[str, Any]) -> tuple[str, ...]:
    answers = row.get("answers", 0)
    return (
        str(row["alias"]),
        str(row["version"]),
        f"{row['weight']:g} %",
        "ready" if row["ready"] else "not ready",
        str(answers),
        str(row.get("errors", 0)),
        str(row.get("slow", 0)),
        f"{row['mean_ms']:g} ms" if answers else "-",
    )


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as ``90``, ``10m`` or ``2h``. Raises UsageError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--bake {text[:40]}: expected a duration such as 90s, 10m or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def _start(options: argparse.Namespace) -> dict[str, Any]:
    judged = [f"--{name.replace('_', '-')}" for name in _JUDGED if getattr(options, name) not in (None, "")]
    if judged and not options.auto:
        raise UsageError(f"{', '.join(judged)}: only with --auto, because people decide without it")
    rules: dict[str, Any] = {
        "bake_s": seconds_of(options.bake) if options.bake else None,
        "alpha": options.alpha,
        "slow_ms": options.slow_ms,
        "least": options.least,
    }
    return {
        "version": options.version_number,
        "weight": options.canary,
        "alias": options.name,
        "steps": [step for step in options.steps.split(",") if step.strip()],
        "sticky": options.sticky,
        "automatic": options.auto or None,
        "log": options.log or None,
        "rules": {name: value for name, value in rules.items() if value is not None},
        "reason": options.reason,
    }


def _shadow(options: argparse.Namespace) -> dict[str, Any]:
    if options.version_number is None and not (options.other_model or options.to):
        return {}
    return {
        "version": options.version_number,
        "model": options.other_model,
        "url": options.to,
        "compare": options.compare,
        "weight": options.share,
        "tolerance": options.tolerance,
        "top_k": options.top_k,
    }


_MEMBERS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any] | None]] = {
    "start": _start,
    "weight": lambda options: {"weight": options.share, "alias": options.name, "reason": options.reason},
    "promote": lambda options: {"alias": options.name, "reason": options.reason},
    "rollback": lambda options: {"alias": options.name, "reason": options.reason},
    "alias": lambda options: {"alias": options.alias, "version": options.version_number},
    "shadow": _shadow,
    "end": lambda options: {"serve_latest": options.serve_latest or None},
    "status": lambda _options: None,
}
