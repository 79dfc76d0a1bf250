"""Helm's releases on a cluster, behind the words of helm and kubectl, as a `Cloud`."""

from __future__ import annotations

import json
from typing import Any

from deploy_clouds.cluster import FakeCluster
from deploy_clouds.journeys import refuse, version_of
from remora_deploy.deploy.plan import Call


class FakeHelm(FakeCluster):
    """One release. An upgrade whose pods never get ready ends as failed, and the old pods serve."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[dict[str, Any]] = []
        self.pods = ""

    def answer(self, call: Call) -> Any:
        if call.target != "helm":
            return super().answer(call)
        words = [word for word in call.arguments["words"] if not word.startswith("--")]
        if words[0] == "show":
            return "name: remora\n"
        if words[0] == "get":
            words = ["values", *words[2:]]
        if words[0] != "upgrade" and not self.history:
            raise refuse("missing", "Error: release: not found")
        return getattr(self, f"helm_{words[0]}")(words[1:], call.arguments.get("input", ""))

    def helm_status(self, words: list[str], text: str) -> Any:
        return {"info": {"status": self.history[-1]["status"]}, "version": self.history[-1]["revision"]}

    def helm_values(self, words: list[str], text: str) -> Any:
        return self.history[-1]["values"]

    def helm_history(self, words: list[str], text: str) -> Any:
        return self.history

    def helm_upgrade(self, words: list[str], text: str) -> Any:
        if self.history and self.history[-1]["status"].startswith("pending"):
            raise refuse("busy", "another operation (install/upgrade/rollback) is in progress")
        values = json.loads(text)
        self.add("pending-upgrade", values)
        if self.fault == "interrupted":
            self.fault = ""
            raise KeyboardInterrupt
        if self.fault in ("rollback", "model broken never ready"):
            self.history[-1]["status"] = "failed"
            raise refuse("failed", "Error: UPGRADE FAILED: context deadline exceeded: pods are not ready")
        self.deployed()

    def helm_rollback(self, words: list[str], text: str) -> Any:
        (values,) = [each["values"] for each in self.history if str(each["revision"]) == words[1]]
        self.add("pending-rollback", values)
        self.deployed()

    def helm_uninstall(self, words: list[str], text: str) -> Any:
        self.history, self.pods = [], ""

    def add(self, status: str, values: Any) -> None:
        self.history.append({"revision": len(self.history) + 1, "status": status, "values": values})

    def deployed(self) -> None:
        for each in self.history:
            if each["status"] == "deployed":
                each["status"] = "superseded"
        self.history[-1]["status"] = "deployed"
        self.pods = version_of(self.history[-1]["values"]["models"]["uri"])

    def do_create(self, words: Any, flags: dict[str, str], text: str) -> Any:
        assert flags["raw"] == "/api/v1/namespaces/default/services/http:digits:8000/proxy/v2/models/digits/infer"
        if not self.pods:
            raise refuse("missing", "no endpoints available for service")
        if self.fault == "model broken" and self.pods == "v2":
            raise refuse("failed", "Error from server (InternalError): the model is broken")
        return json.loads(self.reply(self.pods))

    def serving(self) -> str:
        return self.pods
