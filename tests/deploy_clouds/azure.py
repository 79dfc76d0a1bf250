"""Azure ML's control plane and its endpoints behind their REST calls, as a `Cloud`."""

from __future__ import annotations

from typing import Any

from deploy_clouds.journeys import Local, refuse, version_of
from remora_deploy.deploy.plan import Call, find

WORKSPACE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
ENDPOINT = f"{WORKSPACE}/onlineEndpoints/digits"
NOT_READY = "User container has crashed or terminated: the readiness probe failed, so it is not ready."


class FakeAzure(Local):
    """One workspace. A resource is `Creating` or `Updating` for one read."""

    def __init__(self) -> None:
        super().__init__()
        self.resources: dict[str, dict[str, Any]] = {}
        self.count = 0

    def answer(self, call: Call) -> Any:
        if call.target == "service":
            return self.asked(call.arguments)
        assert call.target == "management.azure.com"
        assert call.arguments["query"]["api-version"]
        path, method = call.arguments["path"], call.arguments["method"]
        if path == WORKSPACE:
            return {"location": "westeurope"}
        if path.endswith("/permissions"):
            return {"value": [{"actions": [] if self.fault == "no rights" else ["*"], "notActions": []}]}
        if path.endswith("/usages"):
            limit = 0 if self.fault == "no quota" else 24
            return {"value": [{"name": {"value": "standardFSv2Family"}, "limit": limit, "currentValue": 0}]}
        if method == "PUT":
            return self.put(path, call.arguments["body"])
        if path.endswith(("/deployments", "/versions")):
            found = [each for key, each in self.resources.items() if key.rpartition("/")[0] == path]
            return {"value": found}
        if path.endswith("/listKeys"):
            return {"primaryKey": "key"} if ENDPOINT in self.resources else self.missing(path)
        if path.endswith("/getLogs"):
            return {"content": "cannot load model 'digits': no such operator"}
        if method == "DELETE":
            return self.delete(path)
        return self.get(path)

    def missing(self, path: str) -> Any:
        raise refuse("missing", f"The Resource '{path}' was not found.")

    def put(self, path: str, body: dict[str, Any]) -> Any:
        self.count += 1
        before = self.resources.get(path)
        properties = {**(before or {}).get("properties", {}), **body["properties"]}
        properties["provisioningState"] = "Updating" if before else "Creating"
        found = {**body, "name": path.rpartition("/")[2], "properties": properties, "waits": 1}
        found["systemData"] = {
            "createdAt": (before or {"systemData": {"createdAt": f"{self.count:04}"}})["systemData"]["createdAt"]
        }
        if path == ENDPOINT:
            names = {key.rpartition("/")[2] for key in self.resources if key.startswith(f"{ENDPOINT}/deployments/")}
            shares = {**properties.get("traffic", {}), **properties.get("mirrorTraffic", {})}
            assert {name for name, share in shares.items() if share} <= names, "traffic to a missing deployment"
            assert sum(properties.get("traffic", {}).values()) in (0, 100), "traffic values need to sum to 100"
            for key, value in body.get("tags", {}).items():
                assert len(key) <= 512, key
                assert len(value) <= 256, value
            properties["scoringUri"] = "https://digits.westeurope.inference.ml.azure.com/"
        elif "/deployments/" in path:
            assert properties["model"] in self.resources, "the model does not exist"
            assert properties["environmentId"] in self.resources, "the environment does not exist"
        else:
            properties["provisioningState"] = "Succeeded"
        self.resources[path] = found
        return found

    def get(self, path: str) -> Any:
        found = self.resources.get(path)
        if found is None:
            return self.missing(path)
        properties = found["properties"]
        if properties["provisioningState"] in ("Creating", "Updating"):
            if "/deployments/" in path and self.fault == "interrupted":
                self.fault = ""
                raise KeyboardInterrupt
            if found["waits"]:
                found["waits"] -= 1
            elif "/deployments/" in path and self.fault in ("rollback", "model broken never ready"):
                properties |= {"provisioningState": "Failed", "provisioningError": {"message": NOT_READY}}
            else:
                properties["provisioningState"] = "Succeeded"
        return found

    def delete(self, path: str) -> None:
        if path not in self.resources:
            self.missing(path)
        if "/deployments/" in path:
            name = path.rpartition("/")[2]
            assert not find(self.resources[ENDPOINT], "properties.traffic", {}).get(name), "it still gets traffic"
        self.resources = {key: each for key, each in self.resources.items() if not key.startswith(path)}

    def asked(self, arguments: Any) -> Any:
        if arguments["key"] != "key":
            raise refuse("denied", "401: key_auth_access_denied")
        assert arguments["url"] == "https://digits.westeurope.inference.ml.azure.com"
        name = arguments["headers"].get("azureml-model-deployment") or self.main()
        version = self.version_of_deployment(name)
        if self.fault == "model broken" and version == "v2":
            raise refuse("failed", "424: the model is broken")
        return {"body": self.reply(version)}

    def main(self) -> str:
        traffic = find(self.resources.get(ENDPOINT, {}), "properties.traffic", {})
        return max(traffic, key=lambda each: traffic[each]) if traffic else ""

    def version_of_deployment(self, name: str) -> str:
        deployment = self.resources[f"{ENDPOINT}/deployments/{name}"]
        return version_of(self.resources[deployment["properties"]["model"]]["properties"]["modelUri"])

    def serving(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, share in find(self.resources.get(ENDPOINT, {}), "properties.traffic", {}).items():
            if share:
                version = self.version_of_deployment(name)
                found[version] = found.get(version, 0) + share
        return found

    def counts(self) -> dict[str, int]:
        return {
            self.version_of_deployment(each["name"]): each["sku"]["capacity"]
            for key, each in self.resources.items()
            if key.startswith(f"{ENDPOINT}/deployments/")
        }

    def scale(self, count: int) -> None:
        self.resources[f"{ENDPOINT}/deployments/{self.main()}"]["sku"]["capacity"] = count
