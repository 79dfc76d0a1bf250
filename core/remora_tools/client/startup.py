"""Command `remora startup`, which reports the start of a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from remora.cli.client import call_json, open_client
from remora.cli.output import columns


def startup(options: argparse.Namespace) -> int:
    """Print the startup report of a running server. Raises RemoraError without a server."""
    client = open_client(options)
    try:
        report = call_json(client, "GET", "/v2/startup")
    finally:
        client.close()
    print(json.dumps(report, indent=2) if options.json_out else as_text(report, imports=options.imports))
    return 0


def as_text(report: dict[str, Any], *, imports: bool) -> str:
    """Return a report as text: the result, and one table per part, imports on request."""
    state = "ready" if report["ready"] else "not ready yet,"
    first = report["first_answer_ms"]
    answered = f", first answer after {first:.0f} ms" if first else ""
    parts = [f"{state} after {report['total_ms']:.0f} ms{answered}"]
    parts.append(_table("phase", [(each["phase"], each) for each in report["phases"]]))
    if report["models"]:
        parts.append(
            _table("beside", [(f"{each['model'] or '(all)'} {each['step']}", each) for each in report["models"]])
        )
    if report["imports"] and imports:
        parts.append(_table("slow import", [(each["module"], each) for each in report["imports"]]))
    elif report["imports"]:
        parts.append(f"slow imports: {len(report['imports'])}, shown with --imports")
    return "\n\n".join(parts)


def _table(what: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    lines = [(what, "from", "ms", "")]
    for name, each in rows:
        size = f"{each['bytes'] / 1e6:.1f} MB, {each['mb_per_s']:.0f} MB/s" if "bytes" in each else ""
        lines.append((name, f"{each['begin_ms']:.0f}", f"{each['ms']:.1f}", size or each.get("within", "")))
    return columns(lines)
