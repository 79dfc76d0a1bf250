"""Google Cloud with Cloud Run and Vertex AI behind their REST calls, as a `Cloud`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from deploy_clouds.journeys import Local, refuse, version_of
from remora_deploy.deploy.plan import Call, find

RUN = "/v2/projects/p/locations/europe-west4/services"
VERTEX = "/v1/projects/p/locations/europe-west4"
NOT_READY = "Revision is not ready: the user-provided container failed the configured startup probe checks."


class FakeGoogle(Local):
    """One project and region. An operation is in progress for one read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, list[Any]] = {}
        self.readers = ["serviceAccount:reader@p"]
        self.count = 0
        self.service: dict[str, Any] | None = None
        self.revisions: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.endpoint: dict[str, Any] | None = None

    def answer(self, call: Call) -> Any:
        if call.target == "service":
            return self.asked(str(call.arguments["url"]))
        path, method = call.arguments["path"], call.arguments["method"]
        body = call.arguments.get("body")
        if "/operations/" in path:
            return self.read_operation(path)
        match call.target:
            case "cloudresourcemanager.googleapis.com":
                return {"permissions": [] if self.fault == "no rights" else body["permissions"]}
            case "serviceusage.googleapis.com":
                bucket = {"effectiveLimit": "0" if self.fault == "no quota" else "-1"}
                names = ("run.googleapis.com/cpu_allocation", "aiplatform.googleapis.com/custom_model_serving_cpus")
                metrics = [{"metric": name, "consumerQuotaLimits": [{"quotaBuckets": [bucket]}]} for name in names]
                return {"metrics": metrics} if path.endswith("Metrics") else {"state": "ENABLED"}
            case "storage.googleapis.com":
                reader = {"role": "roles/storage.objectViewer", "members": self.readers}
                return {"bindings": [reader]} if path.endswith("/iam") else {"location": "EUROPE-WEST4"}
            case "logging.googleapis.com":
                return {"entries": [{"textPayload": "cannot load model 'digits': no such operator"}]}
            case "run.googleapis.com":
                return self.run(method, path, body, call.arguments.get("query", {}))
        assert call.target == "europe-west4-aiplatform.googleapis.com", call
        return self.vertex(method, path, body, call.arguments.get("query", {}))

    def operation(self, finish: Callable[[], Any]) -> Any:
        self.count += 1
        name = f"projects/p/locations/europe-west4/operations/{self.count}"
        self.operations[name] = [1, finish]
        return {"name": name}

    def read_operation(self, path: str) -> Any:
        name = path.split("/", 2)[2]
        found = self.operations[name]
        if found[0]:
            if self.fault == "interrupted":
                self.fault = ""
                found[1]()  # the platform goes on by itself
                raise KeyboardInterrupt
            found[0] -= 1
            return {"name": name}
        try:
            return {"name": name, "done": True, "response": found[1]() or {}}
        except RuntimeError as error:
            return {"name": name, "done": True, "error": {"code": 9, "message": str(error)}}

    def fails(self) -> bool:
        return self.fault in ("rollback", "model broken never ready")

    def serving(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self.endpoint is not None:
            for key, share in self.endpoint["trafficSplit"].items():
                version = self.deployed_version(key)
                found[version] = found.get(version, 0) + share
        for each in find(self.service or {}, "trafficStatuses", []):
            version = self.of_revision(each["revision"])
            found[version] = found.get(version, 0) + each.get("percent", 0)
        return {version: share for version, share in found.items() if share}

    def counts(self) -> dict[str, int]:
        """Return the replicas of each version on Vertex AI, the least instances on Cloud Run."""
        if self.endpoint is not None:
            deployed = self.endpoint["deployedModels"]
            return {self.deployed_version(each["id"]): each["status"]["availableReplicaCount"] for each in deployed}
        shares = find(self.service or {}, "trafficStatuses", [])
        revisions = [each["revision"] for each in shares if each.get("percent")]
        least = {each: self.revisions[each]["template"]["scaling"]["minInstanceCount"] for each in revisions}
        return {self.of_revision(each): count for each, count in least.items()}

    def scale(self, count: int) -> None:
        """Let autoscaling run more replicas of the main version."""
        if self.endpoint is not None:
            split = self.endpoint["trafficSplit"]
            main = max(split, key=lambda each: split[each])
            for each in self.endpoint["deployedModels"]:
                if each["id"] == main:
                    each["status"] = {"availableReplicaCount": count}

    def main(self) -> str:
        shares = self.serving()
        return max(shares, key=lambda each: shares[each]) if shares else ""

    def judged(self, version: str) -> Any:
        if self.fault == "model broken" and version == "v2":
            raise refuse("failed", "500: the model is broken")
        return {"body": self.reply(version)}

    # -- Cloud Run ---------------------------------------------------------------------------------------------------

    def run(self, method: str, path: str, body: Any, query: dict[str, str]) -> Any:
        if path.startswith(f"{RUN}/digits/revisions"):
            if method == "DELETE":
                self.revisions.pop(path.rpartition("/")[2], None)
                return self.operation(lambda: None)
            names = [{"name": f"{path}/{name}", **each} for name, each in self.revisions.items()]
            return {"revisions": names}
        if method == "POST":
            assert path == RUN
            assert query == {"serviceId": "digits"}
            return self.operation(lambda: self.change_service(body))
        if self.service is None:
            raise refuse("missing", "Resource 'digits' of kind 'SERVICE' in region 'europe-west4' does not exist.")
        if method == "DELETE":
            return self.operation(self.delete_service)
        if method == "PATCH":
            return self.operation(lambda: self.change_service(body))
        return self.service

    def delete_service(self) -> None:
        self.service, self.revisions = None, {}

    def change_service(self, body: dict[str, Any]) -> None:
        assert set(body) <= {"template", "traffic", "annotations"}
        service = self.service = {"uri": "https://digits-x.a.run.app", **(self.service or {}), **body}
        template = service["template"]
        name = template["revision"]
        ready = {"type": "Ready", "state": "CONDITION_SUCCEEDED"}
        if name not in self.revisions:
            self.count += 1
            failed = {"type": "Ready", "state": "CONDITION_FAILED", "message": NOT_READY}
            conditions = [failed if self.fails() else ready]
            made = {"createTime": f"{self.count:04}", "template": template, "conditions": conditions}
            self.revisions[name] = {**made, "scaling": template["scaling"]}
        assert self.revisions[name]["template"] == template, "a revision cannot change"
        assert sum(each.get("percent", 0) for each in service["traffic"]) == 100
        broken = [each for each in service["traffic"] if find(self.revisions[each["revision"]], "conditions.0.message")]
        service["terminalCondition"] = {"state": "CONDITION_SUCCEEDED"}
        if broken or find(self.revisions[name], "conditions.0.message"):
            service["terminalCondition"] = {"state": "CONDITION_FAILED", "message": NOT_READY}
            raise RuntimeError(NOT_READY)
        service["trafficStatuses"] = [
            {**each, "uri": f"https://{each['tag']}---digits-x.a.run.app"} if "tag" in each else each
            for each in service["traffic"]
        ]

    def of_revision(self, name: str) -> str:
        variables = self.revisions[name]["template"]["containers"][0]["env"]
        return version_of(next(each["value"] for each in variables if each["name"] == "REMORA_MODEL_REPOSITORY"))

    def asked(self, url: str) -> Any:
        for each in (self.service or {}).get("trafficStatuses", []):
            if each.get("uri") == url:
                return self.judged(self.of_revision(each["revision"]))
        return self.judged(self.main())

    # -- Vertex AI ---------------------------------------------------------------------------------------------------

    def vertex(self, method: str, path: str, body: Any, query: dict[str, str]) -> Any:
        if path.startswith(f"{VERTEX}/models"):
            return self.models(method, path, body)
        if method == "POST" and path == f"{VERTEX}/endpoints":
            assert query == {"endpointId": "digits"}
            return self.operation(lambda: self.create_endpoint(body))
        if self.endpoint is None:
            raise refuse("missing", "Endpoint `digits` is not found.")
        verb = path.partition(":")[2]
        if verb == "rawPredict":
            return self.judged(self.main())
        if verb == "deployModel":
            return self.operation(lambda: self.deploy_model(body))
        if verb == "mutateDeployedModel":
            return self.operation(lambda: self.mutate(body))
        if verb == "undeployModel":
            return self.operation(lambda: self.undeploy_model(body))
        if method == "DELETE":
            assert not self.endpoint["deployedModels"], "an endpoint with models cannot be deleted"
            return self.operation(lambda: setattr(self, "endpoint", None))
        if method == "PATCH":
            (field,) = body
            assert query == {"updateMask": field}
            if field == "trafficSplit":
                self.split(body[field])
            else:
                assert field in ("predictRequestResponseLoggingConfig", "labels")
                self.endpoint |= body
            for key, value in self.endpoint.get("labels", {}).items():
                assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key), key
                assert re.fullmatch(r"[a-z0-9_-]{0,63}", value), value
        return self.endpoint

    def create_endpoint(self, body: dict[str, Any]) -> None:
        number = "projects/1/locations/r/endpoints/7"
        self.endpoint = {**body, "name": number, "deployedModels": [], "trafficSplit": {}}

    def models(self, method: str, path: str, body: Any) -> Any:
        verb = path.partition(":")[2]
        if verb == "upload":
            assert ("parentModel" in body) == bool(self.versions)
            return self.operation(lambda: self.add_version(body["model"]))
        if not self.versions:
            raise refuse("missing", "The Model does not exist.")
        if verb == "listVersions":
            return {"models": [{**each, "versionId": key} for key, each in self.versions.items()]}
        assert method == "DELETE"
        key = path.partition("@")[2].partition(":")[0]
        return self.operation(lambda: self.versions.pop(key) if key else self.versions.clear())

    def add_version(self, model: dict[str, Any]) -> Any:
        self.count += 1
        key = str(self.count)
        self.versions[key] = model
        return {"model": "projects/1/locations/r/models/digits", "modelVersionId": key}

    def split(self, split: dict[str, int]) -> None:
        assert self.endpoint is not None
        assert sum(split.values()) == 100, split
        assert set(split) <= {each["id"] for each in self.endpoint["deployedModels"]}, split
        self.endpoint["trafficSplit"] = split

    def deploy_model(self, body: dict[str, Any]) -> Any:
        assert self.endpoint is not None
        if self.fails():
            raise RuntimeError("Model server not ready: the health check of the container timed out.")
        self.count += 1
        key = str(self.count)
        version = body["deployedModel"]["model"].partition("@")[2]
        assert version in self.versions
        least = body["deployedModel"]["dedicatedResources"]["minReplicaCount"]
        made = {"id": key, "modelVersionId": version, "status": {"availableReplicaCount": least}}
        self.endpoint["deployedModels"].append({**body["deployedModel"], **made})
        self.split({key if each == "0" else each: share for each, share in body["trafficSplit"].items()})
        return {"deployedModel": {"id": key}}

    def mutate(self, body: dict[str, Any]) -> None:
        assert self.endpoint is not None
        names = ("minReplicaCount", "maxReplicaCount")
        assert body["updateMask"] == ",".join(f"dedicatedResources.{name}" for name in names)
        (found,) = [each for each in self.endpoint["deployedModels"] if each["id"] == body["deployedModel"]["id"]]
        limits = body["deployedModel"]["dedicatedResources"]
        found["dedicatedResources"] = {**found["dedicatedResources"], **limits}
        running = max(found["status"]["availableReplicaCount"], limits["minReplicaCount"])
        found["status"] = {"availableReplicaCount": min(running, limits["maxReplicaCount"])}

    def undeploy_model(self, body: dict[str, Any]) -> None:
        assert self.endpoint is not None
        gone = body["deployedModelId"]
        left = [each for each in self.endpoint["deployedModels"] if each["id"] != gone]
        assert len(left) < len(self.endpoint["deployedModels"]), f"{gone} is not deployed"
        self.endpoint["deployedModels"] = left
        split = body.get("trafficSplit") or {k: v for k, v in self.endpoint["trafficSplit"].items() if k != gone}
        if left and not sum(split.values()):
            raise RuntimeError("traffic split must sum to 100")
        self.endpoint["trafficSplit"] = {}
        if left:
            self.split({key: share for key, share in split.items() if key != gone})

    def deployed_version(self, key: str) -> str:
        assert self.endpoint is not None
        (version,) = [each["modelVersionId"] for each in self.endpoint["deployedModels"] if each["id"] == key]
        return version_of(self.versions[version]["artifactUri"])
