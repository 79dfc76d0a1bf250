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
        self.replicas = 0

    def answer(self, call: Call) -> Any:
        if call.target != "helm":
            return super().answer(call)
        words = [word for word in call.arguments["words"] if not word.startswith("--")]
        flags = dict(word.lstrip("-").partition("=")[::2] for word in call.arguments["words"] if word.startswith("--"))
        if words[0] == "show":
            return "name: remora\n"
        if words[0] == "get":
            words = ["values", *words[2:]]
        if words[0] != "upgrade" and not self.history:
            raise refuse("missing", "Error: release: not found")
        return getattr(self, f"helm_{words[0]}")(words[1:], call.arguments.get("input", ""), flags)

    def helm_status(self, words: list[str], text: str, flags: dict[str, str]) -> Any:
        return {"info": {"status": self.history[-1]["status"]}, "version": self.history[-1]["revision"]}

    def helm_values(self, words: list[str], text: str, flags: dict[str, str]) -> Any:
        number = int(flags.get("revision", len(self.history)))
        return self.history[number - 1]["values"]

    def helm_history(self, words: list[str], text: str, flags: dict[str, str]) -> Any:
        return self.history

    def helm_upgrade(self, words: list[str], text: str, flags: dict[str, str]) -> Any:
        if self.history and self.history[-1]["status"].startswith("pending"):
            raise refuse("busy", "another operation (install/upgrade/rollback) is in progress")
        values = json.loads(text)
        self.add("pending-upgrade", values, "Preparing upgrade")
        if self.fault == "interrupted":
            self.fault = ""
            raise KeyboardInterrupt
        if self.fault in ("rollback", "model broken never ready"):
            self.history[-1]["status"] = "failed"
            self.history[-1]["description"] = "Upgrade failed: context deadline exceeded"
            raise refuse("failed", "Error: UPGRADE FAILED: context deadline exceeded: pods are not ready")
        self.history[-1]["description"] = flags.get("description", "Upgrade complete")
        self.deployed()

    def helm_rollback(self, words: list[str], text: str, flags: dict[str, str]) -> Any:
        (values,) = [each["values"] for each in self.history if str(each["revision"]) == words[1]]
        self.add("pending-rollback", values, f"Rollback to {words[1]}")
        self.deployed()

    def helm_uninstall(self, words: list[str], text: str, flags: dict[str, str]) -> Any:
        self.history, self.pods, self.replicas = [], "", 0

    def add(self, status: str, values: Any, description: str) -> None:
        revision = {"revision": len(self.history) + 1, "status": status, "values": values}
        self.history.append({**revision, "description": description})

    def deployed(self) -> None:
        for each in self.history:
            if each["status"] == "deployed":
                each["status"] = "superseded"
        self.history[-1]["status"] = "deployed"
        self.pods = version_of(self.history[-1]["values"]["models"]["uri"])
        self.replicas = self.history[-1]["values"]["replicas"]

    def do_get(self, words: Any, flags: dict[str, str], text: str) -> Any:
        if words[0] == "deployments":
            return {"items": [{"spec": {"replicas": self.replicas}}] if self.replicas else []}
        return super().do_get(words, flags, text)

    def do_scale(self, words: Any, flags: dict[str, str], text: str) -> Any:
        assert list(words) == ["deployment", "digits"]
        self.replicas = int(flags["replicas"])

    def do_create(self, words: Any, flags: dict[str, str], text: str) -> Any:
        assert flags["raw"] == "/api/v1/namespaces/default/services/http:digits:8000/proxy/v2/models/digits/infer"
        if not self.pods:
            raise refuse("missing", "no endpoints available for service")
        if self.fault == "model broken" and self.pods == "v2":
            raise refuse("failed", "Error from server (InternalError): the model is broken")
        return json.loads(self.reply(self.pods))

    def serving(self) -> dict[str, int]:
        return {self.pods: 100} if self.pods else {}

    def counts(self) -> dict[str, int]:
        return {self.pods: self.replicas} if self.pods else {}

    def scale(self, count: int) -> None:
        self.replicas = count
