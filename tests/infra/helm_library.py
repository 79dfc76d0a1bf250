"""Helm as the library in a wheel: one process for each call, because Go's runtime cannot share one.

As a script: LIBRARY KUBECONFIG CHART RELEASE, the values as JSON on stdin; prints {"lint": ..., "release": ...} or
{"error": ...} as JSON.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

_AT_ONCE = {"wait": False, "timeout_seconds": 30, "server_side_apply": "false"}


class HelmError(Exception):
    """What Helm minds."""


class Helm(NamedTuple):
    """Helm with a cluster to install into."""

    library: Path
    kubeconfig: Path

    def install(self, chart: Path, release: str, values: dict[str, Any]) -> dict[str, Any]:
        """Lint and install a chart: Helm's release, with what it rendered. Raises HelmError with Helm's own words."""
        command = [sys.executable, __file__, *map(str, (self.library, self.kubeconfig, chart, release))]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise HelmError(answer["error"])
        # Severity 1 is advice, such as an icon.
        if any(message["Severity"] > 1 for message in answer["lint"]["Messages"] or ()):
            raise HelmError(f"lint: {answer['lint']}")
        return dict(answer["release"])


def main(library: str, kubeconfig: str, chart: str, release: str) -> dict[str, Any]:
    helm = ctypes.CDLL(library)
    helm.helm_sdkpy_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_uint64(), ctypes.c_char_p()

    def ask(function: str, *arguments: Any) -> None:
        if getattr(helm, f"helm_sdkpy_{function}")(*arguments):
            raise HelmError(helm.helm_sdkpy_last_error().decode())

    values, options = sys.stdin.read().encode(), json.dumps(_AT_ONCE).encode()
    try:
        ask("config_create", b"default", kubeconfig.encode(), None, b"{}", ctypes.byref(handle))
        ask("lint", handle, chart.encode(), ctypes.byref(answer))
        lint = json.loads(answer.value or b"")
        ask("install", handle, release.encode(), chart.encode(), values, b"", options, ctypes.byref(answer))
    except HelmError as error:
        return {"error": str(error)}
    return {"lint": lint, "release": json.loads(answer.value or b"")}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
