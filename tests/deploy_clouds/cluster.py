"""A Kubernetes cluster with the controllers of Knative and KServe, behind the words of kubectl, as a `Cloud`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from deploy_clouds.journeys import Local, refuse, version_of
from remora_deploy.deploy.plan import Call, find

KSVC, REVISION, ISVC = (
    "services.serving.knative.dev",
    "revisions.serving.knative.dev",
    "inferenceservices.serving.kserve.io",
)
RUNTIME = "servingruntimes.serving.kserve.io"
_KINDS = {"Service": KSVC, "InferenceService": ISVC, "ServingRuntime": RUNTIME}
_PLAIN = ("namespace", "crd", "serviceaccount", "secret")


class FakeCluster(Local):
    """One namespace. A revision is `Unknown` for two reads before it is ready or has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.count = 0
        self.features: dict[str, str] = {}
        """Knative's config-features, all of which are disabled by default."""

    # -- kubectl -----------------------------------------------------------------------------------------------------

    def answer(self, call: Call) -> Any:
        if call.target == "http":
            return self.http(call)
        assert call.target == "kubectl", call
        words = list(call.arguments["words"])
        if "--namespace=knative-serving" in words:
            return {"data": self.features}
        at = words.index("--namespace")
        assert words[at + 1] == "default"
        del words[at : at + 2]
        flags = dict(word.lstrip("-").partition("=")[::2] for word in words if word.startswith("--"))
        plain = [word for word in words if not word.startswith("--")]
        return getattr(self, f"do_{plain[0]}")(plain[1:], flags, call.arguments.get("input", ""))

    def do_auth(self, words: Sequence[str], flags: dict[str, str], text: str) -> Any:
        if self.fault == "no rights":
            raise refuse("denied", "no - RBAC: not authorized")
        return "yes\n"

    def do_get(self, words: Sequence[str], flags: dict[str, str], text: str) -> Any:
        if "raw" in flags:
            return {"gitVersion": "v1.33.1"}
        kind = words[0]
        if kind in _PLAIN:
            return {"kind": kind}
        if kind == "resourcequota":
            used = {"requests.cpu": "7", "requests.memory": "1Gi"}
            return {
                "items": [{"status": {"hard": {"requests.cpu": "8"}, "used": used}}] if self.fault == "no quota" else []
            }
        if kind == "nodes":
            return {"items": [{"status": {"nodeInfo": {"architecture": "amd64"}, "allocatable": {"cpu": "4"}}}]}
        if kind == "pods":
            return {"items": []}
        if "selector" in flags:
            name = flags["selector"].partition("=")[2]
            return {
                "items": [each for (kinds, _), each in self.objects.items() if kinds == kind and each["owner"] == name]
            }
        found = self.objects.get((kind, words[1]))
        if found is None:
            raise refuse("missing", f'Error from server (NotFound): {kind} "{words[1]}" not found')
        self.progress(kind, found)
        return found

    def do_logs(self, words: Sequence[str], flags: dict[str, str], text: str) -> Any:
        return "cannot load model 'digits': no such operator\n"

    def do_delete(self, words: Sequence[str], flags: dict[str, str], text: str) -> Any:
        kind, name = words
        self.objects.pop((kind, name), None)
        if kind in (KSVC, ISVC):
            self.objects = {key: each for key, each in self.objects.items() if each["owner"] != name}

    def do_apply(self, words: Sequence[str], flags: dict[str, str], text: str) -> Any:
        assert "server-side" in flags
        document = json.loads(text)
        return self.store(_KINDS[document["kind"]], document)

    def do_patch(self, words: Sequence[str], flags: dict[str, str], text: str) -> Any:
        kind, name = words
        document = dict(self.objects[kind, name])
        change = json.loads(flags["patch"])
        document["metadata"] = merged(document["metadata"], change.get("metadata", {}))
        document["spec"] = merged(document["spec"], change.get("spec", {}))
        return self.store(kind, document)

    def store(self, kind: str, document: dict[str, Any]) -> Any:
        name = document["metadata"]["name"]
        before = self.objects.get((kind, name), {})
        generation = find(before, "metadata.generation", 0) + (before.get("spec") != document["spec"])
        metadata = {**document["metadata"], "generation": generation}
        self.objects[kind, name] = {**before, **document, "metadata": metadata, "owner": ""}
        if kind == KSVC:
            self.reconcile_knative(self.objects[kind, name])
        elif kind == RUNTIME:
            self.objects[kind, name]["owner"] = document["metadata"]["labels"]["remora.dev/service"]
        else:
            self.start_kserve(self.objects[kind, name])
        return self.objects[kind, name]

    def progress(self, kind: str, found: dict[str, Any]) -> None:
        """Let a controller work, which needs two reads for anything that starts."""
        if kind == REVISION and found["waits"]:
            if self.fault == "interrupted" and found["waits"] == 1:
                self.fault = ""
                raise KeyboardInterrupt
            found["waits"] -= 1
            if not found["waits"]:
                failed = self.fault in ("rollback", "model broken never ready")
                self.conclude(found, not failed, "ExitCode1", "not ready: the container failed with 1")
                self.reconcile_knative(self.objects[KSVC, found["owner"]])
        elif kind == ISVC:
            self.progress_kserve(found)

    def conclude(self, found: dict[str, Any], ready: bool, reason: str = "", message: str = "") -> None:
        entry = {"type": "Ready", "status": "True" if ready else "False"}
        entry |= {} if ready else {"reason": reason, "message": message}
        found["status"] = {
            **found.get("status", {}),
            "observedGeneration": find(found, "metadata.generation", 0),
            "conditions": [entry],
        }

    # -- Knative -------------------------------------------------------------------------------------------------------

    def reconcile_knative(self, service: dict[str, Any]) -> None:
        name = service["metadata"]["name"]
        template = service["spec"]["template"]
        revision = template["metadata"]["name"]
        if template["spec"].get("tolerations") and self.features.get("kubernetes.podspec-tolerations") != "enabled":
            raise refuse("invalid", "admission webhook denied the request: must not set the field(s): tolerations")
        if (REVISION, revision) not in self.objects:
            self.count += 1
            metadata = {"name": revision, "creationTimestamp": f"2026-01-01T00:00:{self.count:02}Z"}
            metadata["annotations"] = template["metadata"].get("annotations", {})
            self.objects[REVISION, revision] = {
                "metadata": metadata, "spec": template["spec"], "owner": name, "waits": 2,
            }  # fmt: skip
        assert self.objects[REVISION, revision]["spec"] == template["spec"], "a revision cannot change"
        targets = []
        for target in service["spec"]["traffic"]:
            assert (REVISION, target["revisionName"]) in self.objects, f"{target} does not exist"
            host = f"{target['tag']}-{name}" if "tag" in target else name
            targets.append({**target, "url": f"http://{host}.default.example.com"})
        ready = all(self.is_ready(target["revisionName"]) for target in targets)
        if ready:
            service.setdefault("status", {})["traffic"] = targets
        self.conclude(service, ready, "RevisionMissing", "a revision is not ready")
        service["status"]["url"] = f"http://{name}.default.example.com"
        if not ready:
            service["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "Deploying"}]

    def is_ready(self, revision: str) -> bool:
        conditions = find(self.objects[REVISION, revision], "status.conditions", [])
        return any(each["status"] == "True" for each in conditions)

    # -- KServe, in the mode Knative -----------------------------------------------------------------------------------

    def start_kserve(self, service: dict[str, Any]) -> None:
        """Begin a revision for another model; the newest two that got ready share the traffic."""
        model = service["spec"]["predictor"]["model"]
        assert (RUNTIME, model["runtime"]) in self.objects, "the runtime does not exist"
        ready = service.setdefault("ready", [])
        service["pending"] = None if ready and ready[-1] == model else model
        if len(ready) > 1 and ready[-2] == model and "canaryTrafficPercent" not in service["spec"]["predictor"]:
            service["ready"], service["pending"] = [model], None
        service["waits"] = 2
        service.setdefault("status", {})["observedGeneration"] = -1

    def progress_kserve(self, service: dict[str, Any]) -> None:
        if self.fault == "interrupted" and service["pending"] and service["waits"] == 1:
            self.fault = ""
            raise KeyboardInterrupt
        service["waits"] = max(service["waits"] - 1, 0)
        if service["waits"]:
            return
        failed = service["pending"] is not None and self.fault in ("rollback", "model broken never ready")
        if service["pending"] is not None and not failed:
            service["ready"], service["pending"] = [*service["ready"], service["pending"]][-2:], None
        self.conclude(service, bool(service["ready"]), "PredictorNotReady", "not ready")
        service["status"] |= {
            "url": "http://digits.default.example.com",
            "modelStatus": {
                "transitionStatus": "BlockedByFailedLoad" if failed else "UpToDate",
                "lastFailureInfo": {"message": "not ready: the model cannot be loaded"} if failed else {},
            },
            "components": {"predictor": {"traffic": self.targets_of_kserve(service)}},
        }

    def targets_of_kserve(self, service: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the shares of the newest revision and of the one before, as KServe's status has them."""
        ready = service["ready"]
        if not ready:
            return []
        share = service["spec"]["predictor"].get("canaryTrafficPercent", 100) if len(ready) > 1 else 100
        if service["pending"] is not None:
            share = 0 if len(ready) > 1 else 100
        host = "digits-predictor.default.example.com"
        newest = {"tag": "latest", "latestRevision": True, "percent": share, "url": f"http://latest-{host}"}
        found = [{**newest, "version": version_of(ready[-1]["storageUri"])}]
        if share < 100:
            before = {"tag": "prev", "percent": 100 - share, "url": f"http://prev-{host}"}
            found.append({**before, "version": version_of(ready[-2]["storageUri"])})
        return found

    def version_of_kserve(self, host: str) -> str:
        service = self.objects[ISVC, "digits"]
        ready = service["ready"]
        if not ready:
            return ""
        share = service["spec"]["predictor"].get("canaryTrafficPercent", 100)
        newest = host.startswith("latest-") or share > 50 or len(ready) == 1
        return version_of((ready[-1] if newest else ready[-2])["storageUri"])

    # -- requests ------------------------------------------------------------------------------------------------------

    def http(self, call: Call) -> Any:
        url = call.arguments["url"]
        host = urlsplit(url).hostname or ""
        version = self.version_at(host)
        if not version:
            raise refuse("missing", f"404: no route to {host}")
        if self.fault == "model broken" and version == "v2":
            raise refuse("failed", "500: the model is broken")
        return {"status": 200, "body": self.reply(version)}

    def version_at(self, host: str) -> str:
        if (ISVC, "digits") in self.objects:
            return self.version_of_kserve(host)
        service = self.objects.get((KSVC, "digits"))
        targets = find(service or {}, "status.traffic", [])
        tag = host.removesuffix(".default.example.com").removesuffix("digits").rstrip("-")
        chosen = [each for each in targets if each.get("tag") == tag] if tag else targets
        if not chosen:
            return ""
        target = max(chosen, key=lambda each: each.get("percent", 0))
        return _model(self.objects[REVISION, target["revisionName"]]["spec"])

    def serving(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if (ISVC, "digits") in self.objects:
            targets = self.targets_of_kserve(self.objects[ISVC, "digits"])
            shares = [(each["version"], each["percent"]) for each in targets]
        else:
            targets = find(self.objects.get((KSVC, "digits"), {}), "status.traffic", [])
            shares = [(self.of_revision(each["revisionName"]), each.get("percent", 0)) for each in targets]
        for version, share in shares:
            found[version] = found.get(version, 0) + share
        return {version: share for version, share in found.items() if share}

    def of_revision(self, name: str) -> str:
        return _model(self.objects[REVISION, name]["spec"])

    def counts(self) -> dict[str, int]:
        """Return the least replicas of what serves."""
        if (ISVC, "digits") in self.objects:
            predictor = self.objects[ISVC, "digits"]["spec"]["predictor"]
            return {version_of(predictor["model"]["storageUri"]): predictor["minReplicas"]}
        targets = find(self.objects.get((KSVC, "digits"), {}), "status.traffic", [])
        found = {}
        for each in targets:
            if each.get("percent"):
                annotations = self.objects[REVISION, each["revisionName"]]["metadata"]["annotations"]
                found[self.of_revision(each["revisionName"])] = int(annotations["autoscaling.knative.dev/min-scale"])
        return found


def _model(spec: dict[str, Any]) -> str:
    variables = {each["name"]: each["value"] for each in spec["containers"][0]["env"]}
    return version_of(variables["REMORA_MODEL_REPOSITORY"])


def merged(old: Any, new: Any) -> Any:
    """Return the merge patch of two values (RFC 7386)."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    both = {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
    return {key: value for key, value in both.items() if value is not None}
