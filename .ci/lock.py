"""Converter of pip's resolution report into constraint lines on stdout: one exact version a line, sorted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEADING = "# Exact versions of everything that make installs, on every machine. Written by make lock; do not edit."


def main(report: str) -> None:
    """Print one ``name==version`` line for each package of the report, the project itself left out."""
    metadata = [item["metadata"] for item in json.loads(Path(report).read_text())["install"]]
    lines = [f"{entry['name']}=={entry['version']}" for entry in metadata if entry["name"] != "remora"]
    print(HEADING, *sorted(lines, key=str.lower), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
