"""A kubectl that plays a cluster, failing as one does: usage scripted_cluster.py STATE.json ARGUMENT...

The state is what the cluster holds. Objects are refused until their definitions are established, deployments are
awaited by namespace, settings are the configmaps of the releases. `broken` in the state names what never gets ready.
"""

from __future__ import annotations

import fcntl
import json
import re
import sys
from pathlib import Path
from typing import Any

State = dict[str, Any]
INGRESS = (
    '{\n    "enableGatewayApi": false,\n    "ingressDomain": "example.com",\n    "disableIstioVirtualHost": false\n}\n'
)
# What a release's file brings: definitions, deployments by namespace, configmaps; and the definitions that it needs.
FILES: dict[str, State] = {
    "serving-crds.yaml": {
        "crds": [f"{kind}.serving.knative.dev" for kind in ("services", "configurations", "revisions", "routes")]
    },
    "serving-core.yaml": {
        "needs": ["services.serving.knative.dev"],
        "deployments": ["knative-serving"],
        "configmaps": {
            "config-network": {},
            "config-features": {},
            "config-deployment": {},
            "config-domain": {"_example": "..."},
        },
    },
    "kourier.yaml": {"deployments": ["kourier-system"]},
    "serving-default-domain.yaml": {"jobs": ["job/default-domain"]},
    "cert-manager.yaml": {
        "crds": ["certificates.cert-manager.io", "issuers.cert-manager.io"],
        "deployments": ["cert-manager"],
    },
    "kserve.yaml": {
        "needs": ["certificates.cert-manager.io"],
        "awaits": ["cert-manager"],
        "crds": [
            f"{kind}.serving.kserve.io" for kind in ("inferenceservices", "servingruntimes", "clusterservingruntimes")
        ],
        "deployments": ["kserve"],
        "configmaps": {"inferenceservice-config": {"ingress": INGRESS}},
    },
    "kserve-cluster-resources.yaml": {"needs": ["clusterservingruntimes.serving.kserve.io"], "awaits": ["kserve"]},
    "nvidia-device-plugin.yml": {"daemonsets": ["daemonset.apps/nvidia-device-plugin-daemonset"]},
}


class RefusalError(Exception):
    """An error of the cluster, in its words."""


def apply(state: State, file: str) -> None:
    brought = FILES[file]
    for name in brought.get("needs", ()):
        if state["crds"].get(name) != "Established":
            raise RefusalError(f'no matches for kind of "{name}"')
    for namespace in brought.get("awaits", ()):
        if state["deployments"].get(namespace) != "Available":
            raise RefusalError(f"failed calling webhook of {namespace}: no endpoints available")
    for name in brought.get("crds", ()):
        state["crds"].setdefault(name, "Pending")
    for namespace in brought.get("deployments", ()):
        state["deployments"].setdefault(namespace, "Pending")
    for name, data in brought.get("configmaps", {}).items():
        state["configmaps"].setdefault(name, dict(data))
    state["daemonsets"] += brought.get("daemonsets", ())
    state["jobs"] += brought.get("jobs", ())


def wait(state: State, condition: str, what: list[str]) -> None:
    if "deployment" in what:
        namespace = what[what.index("--namespace") + 1]
        if namespace not in state["deployments"]:
            raise RefusalError("error: no matching resources found")
        if namespace in state["broken"]:
            raise RefusalError("error: timed out waiting for the condition on deployments")
        if "--timeout=1s" not in what:
            state["deployments"][namespace] = "Available"
        elif state["deployments"][namespace] != "Available":
            raise RefusalError("error: timed out waiting for the condition on deployments")
    elif "crd" in what:
        for name in (each for each in what if "." in each):
            if name not in state["crds"]:
                raise RefusalError(f'Error from server (NotFound): customresourcedefinitions "{name}" not found')
            state["crds"][name] = condition
    else:
        job = next(each for each in what if each.startswith("job/"))
        if job not in state["jobs"] or "load balancer" in state["broken"]:
            raise RefusalError("error: timed out waiting for the condition on jobs/default-domain")
        state["configmaps"]["config-domain"]["10.0.0.1.sslip.io"] = ""


def get(state: State, what: list[str]) -> str:
    if what[0] == "--raw":
        return json.dumps({"major": "1", "minor": state["minor"], "gitVersion": state["version"]})
    if what[0] == "crd":
        if what[1] not in state["crds"]:
            raise RefusalError("Error from server (NotFound)")
        return what[1]
    if what[0] == "daemonset":
        return "\n".join(state["daemonsets"])
    if what[0] == "service":
        return (
            ""
            if "load balancer" in state["broken"] or "kourier-system" not in state["deployments"]
            else '[{"ip":"10.0.0.1"}]'
        )
    data = state["configmaps"].get(what[1])
    if data is None:
        raise RefusalError("Error from server (NotFound)")
    form = what[-1]
    if form == "json":
        return json.dumps({"kind": "ConfigMap", "metadata": {"name": what[1]}, "data": data})
    if "go-template" in form:
        return " ".join(data)
    (key,) = re.findall(r"\{\.data\.(.+)\}$", form)
    return str(data.get(key.replace("\\.", "."), ""))


def run(state: State, arguments: list[str], sent: str) -> str:
    verb, *rest = arguments
    if verb == "apply":
        apply(state, rest[-1].rpartition("/")[2])
    elif verb == "wait":
        wait(state, rest[0].rpartition("=")[2], rest[1:])
    elif verb == "get":
        return get(state, rest)
    elif verb == "patch":
        if rest[1] not in state["configmaps"]:
            raise RefusalError(f'Error from server (NotFound): configmaps "{rest[1]}" not found')
        state["configmaps"][rest[1]] |= json.loads(rest[-1])["data"]
    elif verb == "replace":
        manifest = json.loads(sent)
        state["configmaps"][manifest["metadata"]["name"]] = manifest["data"]
    elif verb != "rollout":
        raise RefusalError(f'error: unknown command "{verb}"')
    return ""


def main() -> int:
    path, arguments = Path(sys.argv[1]), sys.argv[2:]
    # Before the lock: what is piped in may come from another call that waits for it.
    sent = sys.stdin.read() if arguments[0] == "replace" else ""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state: State = json.loads(path.read_text())
        state["calls"].append(arguments)
        try:
            answer, status = run(state, arguments, sent), 0
        except RefusalError as refusal:
            print(refusal, file=sys.stderr)
            answer, status = "", 1
        path.write_text(json.dumps(state))
    print(answer)
    return status


if __name__ == "__main__":
    sys.exit(main())
