"""Demo of the digits example: build the model if missing, serve it and classify one image.

`make serve` runs it; Ctrl-C ends it. It needs only the standard library: its client is a complete V2 client.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHADES = " .:-=+*#%@"
DARKEST = 16
SIDE = 8
READY = "READY"
"""Prefix of the line that the server prints when all its ports are open."""


def picture(pixels: list[float]) -> str:
    """Return an image of 8 x 8 pixels from 0 to 16 as text, two characters per pixel."""
    shades = [SHADES[int(pixel / DARKEST * (len(SHADES) - 1))] * 2 for pixel in pixels]
    return "\n".join("".join(shades[row : row + SIDE]).rstrip() for row in range(0, SIDE * SIDE, SIDE))


def guesses(answer: dict[str, object]) -> list[tuple[float, str]]:
    """Return probability and name of the classes in a V2 response, from strings ``value:index[:label]``."""
    outputs = answer["outputs"]
    if not isinstance(outputs, list):
        raise TypeError(f"expected a list of outputs, got {outputs!r}")
    found = []
    for text in outputs[0]["data"]:
        value, _, name = text.partition(":")
        index, _, label = name.partition(":")
        found.append((float(value), label or index))
    return found


def post(url: str, body: bytes) -> dict[str, object]:
    """Return the JSON response to a POST.

    Raises:
        urllib.error.URLError: the request failed.
    """
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        reply: dict[str, object] = json.load(answer)
    return reply


def wait_until_ready(server: subprocess.Popen[str]) -> bool:
    """Return True once the child prints that it is ready, False if it ends before; forward its lines.

    A connection to the port would not prove it, because another server can listen there.
    """
    assert server.stderr is not None
    for line in server.stderr:
        print(line, end="", file=sys.stderr, flush=True)
        if line.startswith(READY):
            threading.Thread(target=print_lines, args=(server,), name="output of the server", daemon=True).start()
            return True
    return False


def print_lines(server: subprocess.Popen[str]) -> None:
    """Forward the remaining lines of the child."""
    for line in server.stderr or ():
        print(line, end="", file=sys.stderr, flush=True)


def is_taken(port: int) -> bool:
    """Return True if a program listens on this port of the machine."""
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def show_first_inference(url: str, request: Path) -> None:
    """Send one image, and print it with the predicted classes and the equivalent curl command."""
    body = request.read_bytes()
    answer = post(f"{url}/v2/models/digits/infer", body)
    print(f"\n{picture(json.loads(body)['inputs'][0]['data'])}\n")
    for probability, name in guesses(answer):
        print(f"  {probability:6.1%}  {name}")
    shown = os.path.relpath(request)
    print(
        f"\nThe same by hand:\n  curl -s {url}/v2/models/digits/infer -d @{shown}\n\nServing until Ctrl-C.", flush=True
    )


def serve(models: Path, http_port: int) -> int:
    """Run the server as a child process until it ends, and return its exit status."""
    ports = {"http": http_port, "grpc": http_port + 1, "metrics": http_port + 2}
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    command = [sys.executable, "-m", "remora", "serve", str(models), *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    # This process only waits, because Ctrl-C also reaches the server, which then shuts down.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    url = f"http://localhost:{http_port}"
    if wait_until_ready(server):
        try:
            show_first_inference(url, models.parent / "requests" / "seven.json")
        except (urllib.error.URLError, LookupError, TypeError, ValueError) as error:
            print(f"the first inference failed: {error}", file=sys.stderr)
            server.terminate()
            server.wait()
            return 1
    elif taken := [str(port) for port in ports.values() if is_taken(port)]:
        remedy = f"For other ports: make serve PORT={http_port + 10}"
        print(f"port {' and '.join(taken)}: another program listens there. {remedy}", file=sys.stderr)
    return server.wait()


def main() -> int:
    """Run the command line: folder of the models, and first of three ports (HTTP, gRPC, metrics)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, default=HERE / "models")
    parser.add_argument("--http-port", type=int, default=8000)
    options = parser.parse_args()
    if not (options.models / "digits" / "1" / "model.onnx").exists():
        subprocess.run([sys.executable, str(HERE / "build.py"), "--models", str(options.models)], check=True)
    return serve(options.models, options.http_port)


if __name__ == "__main__":
    sys.exit(main())
