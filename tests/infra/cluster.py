"""A Kubernetes API without validation: it knows the kinds that a chart may make, and refuses others.

It answers discovery, says that nothing is there yet, and takes what is made: enough for a client that installs once.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = {
    "v1": {"services": "Service", "serviceaccounts": "ServiceAccount", "secrets": "Secret"},
    "apps/v1": {"deployments": "Deployment"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
}
_VERBS = ["create", "delete", "get", "list", "patch", "update"]


def _discovery(version: str) -> dict[str, Any]:
    groups = []
    for name in KINDS.keys() - {"v1"}:
        group, _, number = name.partition("/")
        here = {"groupVersion": name, "version": number}
        groups.append({"name": group, "versions": [here], "preferredVersion": here})
    pages: dict[str, Any] = {
        "/version": {"major": version.split(".")[0], "minor": version.split(".")[1], "gitVersion": f"v{version}.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1/namespaces/default/secrets": {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []},
    }
    for name, kinds in KINDS.items():
        known = [{"name": plural, "namespaced": True, "kind": kind, "verbs": _VERBS} for plural, kind in kinds.items()]
        place = f"/api/{name}" if name == "v1" else f"/apis/{name}"
        pages[place] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": known}
    return pages


@contextmanager
def believing(version: str, made: list[str]) -> Iterator[str]:
    """The address of such an API; the paths of what is made there are added to ``made``."""
    pages = _discovery(version)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self._send(200 if page else 404, "application/json", json.dumps(page or missing).encode())

        def do_POST(self) -> None:
            made.append(self.path.partition("?")[0])
            self._echo(201)

        def do_PUT(self) -> None:
            self._echo(200)

        def _echo(self, status: int) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(status, self.headers["Content-Type"], body)

        def _send(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Keep the tests' output their own."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
