"""Recorded exchanges of raw bytes over HTTP/1: half-closed, pipelined, slow and early refused requests.

A case is a list of steps: bytes to send, a half-close, or both, and the number of answers to wait for before the next
step. The outcome is the list of statuses and bodies, and whether the server ended the connection. The outcomes in
`raw_http1.jsonl` are a real Triton's. Where this server differs on purpose, the case has its outcome and the reason.

    python tests/oracle/raw_http1.py --oracle DIR     # record Triton's outcomes again, in place
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDING = Path(__file__).parent / "raw_http1.jsonl"
MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            time.sleep(array.reshape(-1)[0] / 1000)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return responses
"""
CONFIG = """backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [-1] }
"""
GAP_S = 0.05
"""Pause between two steps, so that the server reads their bytes apart."""
QUIET_S = 0.3
"""Time in which the server must send no more than it should."""
RECORDED_S = 5.0
"""Time for Triton to send what it sends. Without an end of the connection, there is no sign that it has."""
RECORDINGS = 3
PATIENCE_S = 60.0
AT_ONCE = 4
MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """Steps on one connection, the outcomes that Triton was seen to give, and ours if it differs."""

    id: str
    steps: tuple[dict[str, Any], ...]
    triton: tuple[dict[str, Any], ...]
    here: dict[str, Any] | None = None
    reason: str = ""

    @property
    def expected(self) -> dict[str, Any]:
        """The outcome that this server must have, with bodies only where they are Triton's."""
        return self.triton[0] if self.here is None else self.here

    def matches(self, outcome: dict[str, Any]) -> bool:
        """True if an outcome of this server is the expected one."""
        return (outcome if self.here is None else without_bodies(outcome)) == self.expected


def without_bodies(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the statuses of an outcome, and its end."""
    return {"statuses": [answer["status"] for answer in outcome["answers"]], "closed": outcome["closed"]}


def recording() -> tuple[dict[str, str], list[Case]]:
    """Return the reasons of intended differences by their names, and the cases."""
    first, *rows = map(json.loads, RECORDING.read_text(encoding="utf-8").splitlines())
    return first["reasons"], [
        Case(**{**row, "steps": tuple(row["steps"]), "triton": tuple(row["triton"])}) for row in rows
    ]


def write_model(repository: Path) -> None:
    """Write the model ``wait``, which returns its input after as many milliseconds as the first number."""
    version = repository / "wait" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)


def outcomes(port: int, cases: Sequence[Case], wanted: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Play all cases, some at once, each on a new connection. Without a wanted outcome all that comes is read."""

    def play(case: Case, outcome: dict[str, Any] | None) -> dict[str, Any]:
        return Exchange(port).play(case.steps, outcome)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(play, cases, wanted))


class Exchange:
    """Connection of a client, and the bytes that have come on it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._closed = False

    def play(self, steps: Sequence[dict[str, Any]], wanted: dict[str, Any] | None) -> dict[str, Any]:
        """Send the steps, and return the outcome as soon as it is the wanted one or its time is over."""
        with self._socket:
            for step in steps:
                self._send(step)
                self._read(PATIENCE_S if "answers" in step else GAP_S, step.get("answers", MANY))
            if wanted is None:
                self._read(RECORDED_S, MANY)
            else:
                count = len(wanted.get("statuses", wanted.get("answers", ())))
                self._read(PATIENCE_S, count, closed=wanted["closed"])
                self._read(QUIET_S, MANY)
        return {"answers": answers_in(self._received), "closed": self._closed}

    def _send(self, step: dict[str, Any]) -> None:
        try:
            self._socket.settimeout(PATIENCE_S)
            self._socket.sendall(step.get("send", "").encode("latin-1") * step.get("times", 1))
            if step.get("half_close"):
                self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the server has closed; what it had sent is read

    def _read(self, seconds: float, count: int, *, closed: bool = False) -> None:
        """Read for some time at most, until so many answers have come, or until the end if it is wanted."""
        end = time.monotonic() + seconds
        while not self._closed and (closed or len(answers_in(self._received)) < count):
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                part = self._socket.recv(1 << 16)
            except TimeoutError:
                return
            except ConnectionResetError:
                part = b""
            self._closed = not part
            self._received += part


def answers_in(data: bytes) -> list[dict[str, Any]]:
    """Return the whole responses in the bytes of a server."""
    found = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body, data = data[end + 4 :], b""
        if fields.get("transfer-encoding") == "chunked":
            body, rest = dechunked(body)
            if rest is None:
                break
            data = rest
        elif body.startswith(b"HTTP/1."):  # behind the answer to a HEAD, which has no body
            body, data = b"", body
        else:
            size = int(fields.get("content-length", 0))
            if len(body) < size:
                break
            body, data = body[:size], body[size:]
        found.append({"status": int(first.split()[1]), "body": body.decode("utf-8", "backslashreplace")})
    return found


def dechunked(data: bytes) -> tuple[bytes, bytes | None]:
    """Return a chunked body and the bytes behind it, or None for them as long as the body is incomplete."""
    body = b""
    while (end := data.find(b"\r\n")) >= 0:
        size = int(data[:end], 16)
        if len(data) < end + 4 + size:
            break
        body, data = body + data[end + 2 : end + 2 + size], data[end + 4 + size :]
        if size == 0:
            return body, data
    return body, None


def record(port: int) -> None:
    """Write the outcomes of a real Triton, all that it gives to several plays of a case."""
    reasons, cases = recording()
    plays = [outcomes(port, cases, [None] * len(cases)) for _ in range(RECORDINGS)]
    lines = [json.dumps({"reasons": reasons}, ensure_ascii=False)]
    for case, *seen in zip(cases, *plays, strict=True):
        row: dict[str, Any] = {"id": case.id, "steps": case.steps}
        row["triton"] = [outcome for number, outcome in enumerate(seen) if outcome not in seen[:number]]
        if case.here is not None:
            row |= {"here": case.here, "reason": case.reason}
        lines.append(json.dumps(row))
    RECORDING.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases recorded in {RECORDING}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracle", type=Path, required=True, help="the folder of run_triton.sh")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from support.servers.real_triton import triton_server

    with tempfile.TemporaryDirectory(prefix="raw-http1-") as folder:
        write_model(Path(folder) / "models")
        subprocess.run([options.oracle / "run_triton.sh", "--setup-only"], check=True)
        log = Path(folder) / "triton.log"
        with triton_server(Path(folder) / "models", log, options.oracle / "run_triton.sh") as ports:
            record(ports[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
