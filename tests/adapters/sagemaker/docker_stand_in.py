"""Stands in for `docker` where no daemon runs: starts what SageMaker's local mode composes as a process.

Understood is what the SDKs say: `compose version`, and `compose -f FILE up ...` for a file with one service. Its
volumes become links below a folder in place of /opt/ml, its published port the server's, its variables the process's;
its command is handed to our entry point. Everything else fails, as `docker` does when there is no daemon.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import yaml

_INSIDE = "/opt/ml/"
_PORT = "8080"


def main(arguments: list[str]) -> int:
    """Answer a command, or become the process that it asks for."""
    if arguments[:2] == ["compose", "version"]:
        print("Docker Compose version v2.0.0, as far as a stand-in goes")
        return 0
    if arguments[:2] == ["compose", "-f"] and arguments[3:4] == ["up"]:
        become(Path(arguments[2]))
    print(f"no daemon: {' '.join(arguments)}", file=sys.stderr)
    return 1


def become(file: Path) -> None:
    """Run the file's one service in place of this process."""
    (service,) = yaml.safe_load(file.read_text())["services"].values()
    base = Path(tempfile.mkdtemp(dir=file.parent))
    for volume in service["volumes"]:
        outside, inside = volume.split(":")[:2]
        (base / inside.removeprefix(_INSIDE)).symlink_to(outside)
    (port,) = [outside for outside, inside in (each.split(":") for each in service["ports"]) if inside == _PORT]
    variables = dict(pair.split("=", 1) for pair in service["environment"])
    given = {**os.environ, "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_BIND_TO_PORT": port, **variables}
    os.execve(sys.executable, [sys.executable, "-m", "remora_adapters.sagemaker", service["command"]], given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
