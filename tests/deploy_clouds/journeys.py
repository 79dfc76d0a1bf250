"""Control planes that fail the way the platforms do, and the commands that deploy to them without time passing.

A `Cloud` answers calls as data. `fault` scripts the next deployment: "no rights", "no quota", "wrong image",
"model broken", "rollback" or "interrupted". `serving` is the share of the requests that each version answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from remora_deploy.deploy import command
from remora_deploy.deploy.golden import Golden
from remora_deploy.deploy.plan import Call, CallError, Platform
from remora_deploy.deploy.running import Runner

FAULTS = ("no rights", "no quota", "wrong image", "model broken", "rollback", "interrupted")
REQUEST = b'{"inputs": []}'


class Cloud(Protocol):
    """A control plane, and the service that it runs."""

    fault: str
    calls: list[Call]

    def __call__(self, call: Call) -> Any: ...

    def serving(self) -> dict[str, int]:
        """Return the percentage of the requests that each version answers."""

    def counts(self) -> dict[str, int]:
        """Return the instances of each version; {} where the platform sets them by load alone."""

    def scale(self, count: int) -> None:
        """Set the instances of the main version, as scaling or a user does."""


class Local:
    """The calls that no control plane answers: uploads, registries, values. Subclasses add their own targets."""

    fault = ""

    def __init__(self) -> None:
        self.reply: Callable[[str], bytes] = answer_of
        self.calls: list[Call] = []
        self.uploaded: list[str] = []

    def __call__(self, call: Call) -> Any:
        self.calls.append(call)
        match call.target:
            case "local":
                return call.arguments["value"]
            case "storage":
                self.uploaded.append(call.arguments["name"])
                return "1 files, 0.1 MB"
            case "registry":
                return self.image(call.arguments["image"])
        return self.answer(call)

    def answer(self, call: Call) -> Any:
        raise AssertionError(f"unknown call {call}")

    def counts(self) -> dict[str, int]:
        return {}

    def scale(self, count: int) -> None:
        pass

    def image(self, image: str) -> dict[str, Any]:
        architecture = "arm64" if self.fault == "wrong image" else "amd64"
        return {
            "digest": "sha256:" + image.encode().hex().ljust(64, "0")[-64:],
            "media_type": "application/vnd.docker.distribution.manifest.v2+json",
            "architectures": [architecture],
            "labels": {"remora.platform": "any"},
        }


def version_of(location: str) -> str:
    """Return the version in a model's location, such as v1 of s3://bucket/models/v1/."""
    return location.rstrip("/").rpartition("/")[2]


def answer_of(version: str) -> bytes:
    return json.dumps({"outputs": [{"name": "y", "datatype": "BYTES", "shape": [1], "data": [version]}]}).encode()


def golden(version: str) -> Golden:
    return Golden(REQUEST, answer_of(version))


class Deployments:
    """Runs the commands of one platform against a cloud. Time passes by sleeping only."""

    def __init__(
        self, platform: str, cloud: Cloud, flags: Callable[[str], Sequence[str]], place: Sequence[str] = ()
    ) -> None:
        self.platform, self.cloud, self.flags, self.place = platform, cloud, flags, place
        self.lines: list[str] = []
        self.now_s = 0.0

    def build(self, version: str, *more: str) -> Platform:
        words = [self.platform, "digits", *self.place, *self.flags(version), *more]
        module, _, options = command.parse(words)
        return module.build(options, golden(version))

    def service(self) -> Platform:
        module, _, options = command.parse(["status", self.platform, "digits", *self.place])
        return module.find_service(options)

    def runner(self) -> Runner:
        def sleep(seconds: float) -> None:
            self.now_s += seconds

        return Runner(self.cloud, self.lines.append, lambda: self.now_s, sleep)

    def deploy(self, version: str, *more: str) -> bool:
        self.lines.clear()
        return self.runner().deploy(self.build(version, *more))

    def text(self) -> str:
        return "\n".join(self.lines)

    def invoke(self) -> bytes:
        return self.runner().invoke(self.service(), REQUEST)

    def rollback(self, version: str = "") -> bool:
        """Roll back; with a version a golden request must be answered by it."""
        self.lines.clear()
        return self.runner().rollback(self.service(), golden(version) if version else None)

    def undeploy(self) -> bool:
        self.lines.clear()
        service = self.service()
        return self.runner().change(service, service.undeploy, "removed")

    def status(self) -> bool:
        self.lines.clear()
        return self.runner().status(self.service())


def refuse(kind: Any, text: str, code: str = "") -> CallError:
    return CallError(kind, text, code)


def changing(calls: Sequence[Call], reading: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the operations that are not reads."""
    words = ("describe", "list", "get", "filter", "simulate", "inspect", "echo")
    quiet = ("GET ", "POST entries:list", "POST p:test", "POST digits:rawPredict", "POST listKeys", "POST getLogs")
    return [
        str(call)
        for call in calls
        if call.target != "service"
        and not call.operation.startswith(quiet)
        and not call.operation.startswith(words)
        and call.operation not in reading
        and not {"version", "logs"} & set(call.arguments.get("words", ()))
    ]
