"""A Docker daemon with Compose, behind the words of docker, as a `Cloud`."""

from __future__ import annotations

import json
from typing import Any

from deploy_clouds.journeys import Local, refuse, version_of
from remora_deploy.deploy.plan import Call


class FakeDocker(Local):
    """One machine. A container that does not get healthy stays, as Compose leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.container: dict[str, Any] | None = None

    def answer(self, call: Call) -> Any:
        if call.target == "http":
            return self.http(call)
        words = [word for word in call.arguments["words"] if not word.startswith("--")]
        if words[0] == "compose":
            return getattr(self, f"compose_{words[1]}")(call.arguments.get("input", ""))
        return getattr(self, f"docker_{words[0]}")(words[1:])

    def docker_info(self, words: list[str]) -> Any:
        if self.fault == "no rights":
            raise refuse("denied", "permission denied while trying to connect to the Docker daemon socket")
        return {"MemTotal": 1 << 30 if self.fault == "no quota" else 1 << 34, "Runtimes": {"runc": {}}}

    def docker_image(self, words: list[str]) -> Any:
        return [{"Architecture": self.image(words[1])["architectures"][0], "Config": {"Labels": None}}]

    def docker_ps(self, words: list[str]) -> Any:
        return "digits-remora\n" if self.container else ""

    def docker_inspect(self, words: list[str]) -> Any:
        if self.container is None:
            raise refuse("missing", "Error: No such object: digits-remora")
        status = {"Status": "running", "Health": {"Status": self.container["health"]}}
        return [{"Config": {"Labels": self.container["labels"]}, "State": status}]

    def compose_version(self, text: str) -> Any:
        return "2.40.0\n"

    def compose_up(self, text: str) -> Any:
        service = json.loads(text)["services"]["remora"]
        broken = self.fault in ("rollback", "model broken never ready") and self.version(service) != "v0"
        if broken:
            self.fault = ""  # the next one, which undoes this, works
        before = self.container
        self.container = {**service, "health": "unhealthy" if broken else "healthy"}
        if self.fault == "interrupted":
            self.fault, self.container = "", before
            raise KeyboardInterrupt
        if broken:
            raise refuse("failed", "container digits-remora is unhealthy: not ready")

    def compose_down(self, text: str) -> Any:
        self.container = None

    def compose_logs(self, text: str) -> Any:
        return "cannot load model 'digits': no such operator\n"

    def version(self, service: Any) -> str:
        location = service["environment"]["REMORA_MODEL_REPOSITORY"]
        return version_of(service["volumes"][0].partition(":")[0] if "volumes" in service else location)

    def http(self, call: Call) -> Any:
        if not self.serving():
            raise refuse("unreachable", "connection refused")
        (version,) = self.serving()
        if self.fault == "model broken" and version == "v2":
            raise refuse("failed", "500: the model is broken")
        return {"status": 200, "body": self.reply(version)}

    def serving(self) -> dict[str, int]:
        healthy = self.container is not None and self.container["health"] == "healthy"
        return {self.version(self.container): 100} if healthy else {}
