"""Command `remora bench coldstart`, which measures starts of a server."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from remora.cli.client import HttpClient, call_json, model_path, raise_for_status, request_headers
from remora.cli.output import UsageError
from remora.cli.stderr import print_error
from remora.errors import RemoraError, UnavailableError
from remora.startup import over_budget, verdict
from remora.system.json_text import read_json
from remora_tools.client.startup import as_text

_PAUSE_S = 0.005


def coldstart(options: argparse.Namespace) -> int:
    """Measure starts and return 1 if the median exceeds its budget.

    Raises RemoraError, OSError, UsageError.
    """
    if options.rounds < 1:
        raise UsageError("--rounds must be 1 or more")
    before = read_json(options.baseline.read_text(encoding="utf-8")) if options.baseline else None
    reports = [_measure(options) for _ in range(options.rounds)]
    report = sorted(reports, key=lambda each: each["first_answer_ms"] or each["total_ms"])[len(reports) // 2]
    if options.save:
        options.save.write_text(json.dumps(report, indent=2), encoding="utf-8")
    excess = over_budget(report, options.budget, before) if options.budget else ""
    if options.json_out:
        print(json.dumps(report, indent=2))
    else:
        print(f"{verdict(report, options.budget or 0.0, options.rounds)}\n")
        print(as_text(report, imports=options.imports))
    if excess:
        print_error("remora bench coldstart", excess)
    return 1 if excess else 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, send one request to each model and return the startup report."""
    port, *others = _free_ports(3)
    flags = [f"--http-port={port}", f"--grpc-port={others[0]}", f"--metrics-port={others[1]}"]
    words = [sys.executable, "-m", "remora", "serve", *options.paths, *flags, *options.serve]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
        client = HttpClient(f"http://127.0.0.1:{port}", options.timeout, request_headers(options))
        try:
            _wait(server, client, options.timeout)
            for entry in call_json(client, "POST", "/v2/repository/index", {"ready": True}):
                _ask_once(client, entry["name"])
            report = _finished(client, time.monotonic() + options.timeout)
        except UnavailableError as error:
            log.seek(0)
            tail = log.read().decode(errors="replace").strip().splitlines()[-5:]
            raise UnavailableError(f"{error}. The end of its log: {' / '.join(tail)}") from error
        finally:
            client.close()
            server.send_signal(signal.SIGTERM)
            server.wait()
    return report


def _wait(server: subprocess.Popen[bytes], client: HttpClient, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and server.poll() is None:
        try:
            if client.exchange("GET", "/v2/health/ready").status == 200:
                return
        except RemoraError:
            pass
        time.sleep(_PAUSE_S)
    raise UnavailableError("the server did not become ready")


def _finished(client: HttpClient, end_s: float) -> dict[str, Any]:
    """Return the report after the whole startup, because HTTP answers before gRPC is up."""
    while True:
        report: dict[str, Any] = call_json(client, "GET", "/v2/startup")
        if report["ready"] or time.monotonic() > end_s:
            return report
        time.sleep(_PAUSE_S)


def _ask_once(client: HttpClient, model: str) -> None:
    """Send a generated request and only print an error response."""
    from remora_tools.client.infer import arguments_of, encode_request, read_metadata
    from remora_tools.client.inputs import InferRequest, random_inputs

    path = model_path(model)
    try:
        needed = read_metadata(call_json(client, "GET", path)).inputs
        request = InferRequest(tuple(random_inputs(needed, {}, arguments_of(client, path))))
        body, header_length = encode_request(request)
        raise_for_status(client, client.exchange("POST", f"{path}/infer", body, header_length))
    except RemoraError as error:
        print_error("remora bench coldstart", f"no answer from '{model}': {error}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
