"""Deployment to this machine by Docker Compose: one container, which a new version replaces.

The container's labels retain the documents of the versions that served, so that nothing else is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remora.system.json_text import read_json
from remora_deploy.deploy import plan, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.images import Needs, problem_of
from remora_deploy.deploy.plan import BUSY, Call, Check, Read, State, Step, desired, find
from remora_deploy.deploy.programs import Programs, body_of, command, http
from remora_deploy.deploy.uploads import Source, digest_of, upload_steps
from remora_deploy.pod import with_required_gpu

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?")
_DOCUMENTS, _VERSION, _PREFIX = "remora.documents", "remora.version", "remora."
_UID = 10001
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Desired state of a container.

    Attributes:
        image: container image, local or in a registry.
        source: the models; a local folder is copied below a digest of its content.
        memory: memory limit, such as 4g.
        gpus: number of GPUs, 0 for none.
        environ: environment of the server.
        startup_s: time limit of the start.
    """

    image: str
    source: Source
    memory: str = "4g"
    gpus: int = 0
    environ: tuple[tuple[str, str], ...] = ()
    startup_s: int = 600
    golden: Golden | None = None


@dataclass(frozen=True, slots=True)
class Compose:
    """A project of Docker Compose, as a `Platform`."""

    name: str
    port: int = 8000
    path: str = ""
    wanted: Wanted | None = None
    title: str = "Docker Compose"

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        wanted = self._wanted()
        needs = Needs("container", gpu=wanted.gpus > 0)
        return [
            Check(
                "docker",
                command("docker", ["info", "--format={{json .}}"]),
                lambda answer: _machine_problem(answer, wanted),
                cure="start the daemon: systemctl start docker, or pass a smaller --memory",
            ),
            Check(
                "docker compose",
                command("docker", ["compose", "version", "--short"]),
                cure="install the Compose plugin: apt-get install docker-compose-plugin",
            ),
            Check(
                f"image {wanted.image}",
                command("docker", ["image", "inspect", wanted.image]),
                lambda answer: problem_of(_facts(answer), needs),
                cure=f"docker pull {wanted.image}",
                absent="this machine has no such image",
            ),
            Check(
                f"port {self.port}",
                command("docker", ["ps", f"--filter=publish={self.port}", "--format={{.Names}}"]),
                lambda answer: "" if str(answer).split() in ([], [self._container]) else f"{answer.strip()} uses it",
                cure="pass another --port",
            ),
        ]

    def settled(self, found: State) -> Compose:
        """Return the deployment unchanged: a local image has no digest of a registry."""
        return self

    def reads(self) -> Sequence[Read]:
        """Return the read of the container."""
        return [Read("container", lambda _: command("docker", ["inspect", self._container], name=self._container))]

    def settle(self, state: State) -> Sequence[Step]:
        """Return no step: Compose continues what was interrupted."""
        return ()

    def sized(self, state: State) -> Compose:
        """Return the deployment unchanged: a machine has one container."""
        return self

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        wanted = self._wanted()
        steps: list[Step] = list(upload_steps(wanted.source))
        document = self._document(wanted)
        version = _digest(document)
        history = self._history(state).observed(self._desired_shares(state))
        record = history.deployed(version)
        if self._version(state) != version or not self._runs(state) or record != self._history(state):
            up = self._up(document, record, state, wanted.startup_s)
            before = self._documents(state).get(self._version(state))
            back = self._up(before, self._history(state), state, wanted.startup_s) if before else self._down()
            steps.append(Step("deploy", up, undo=(Step("deploy", back),)))
        ask = self.ask(state, wanted.golden.body if wanted.golden else b"")
        return [*steps, *golden_step(wanted.golden, ask, body_of)]

    def _document(self, wanted: Wanted) -> dict[str, Any]:
        """Return the container of the Compose file, without its labels."""
        models = wanted.source.location
        local = "://" not in models
        environ = with_required_gpu(dict(wanted.environ), gpu=wanted.gpus > 0)
        variables = {"REMORA_MODEL_REPOSITORY": "/models" if local else models, **environ}
        document: dict[str, Any] = {
            "image": wanted.image,
            "container_name": self._container,
            "command": ["python", "-m", "remora_adapters.container"],
            "entrypoint": [],
            "environment": variables,
            "ports": [f"127.0.0.1:{self.port}:8000"],
            "read_only": True,
            "user": f"{_UID}:{_UID}",
            "tmpfs": ["/tmp"],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "mem_limit": wanted.memory,
            "restart": "unless-stopped",
            "stop_grace_period": "30s",
            "healthcheck": {
                "test": ["CMD", "python", "-c", _PROBE],
                "interval": "5s",
                "timeout": "5s",
                "retries": 3,
                "start_period": f"{wanted.startup_s}s",
                "start_interval": "1s",
            },
        }
        if local:
            document["volumes"] = [f"{models.rstrip('/')}:/models:ro"]
        if wanted.gpus:
            device = {"driver": "nvidia", "count": wanted.gpus, "capabilities": ["gpu"]}
            document["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        return document

    def _up(self, document: Mapping[str, Any], history: versions.History, state: State, startup_s: int) -> Call:
        version = _digest(document)
        known = {**self._documents(state), version: document}
        kept = {each.version: known[each.version] for each in history.served if each.version in known}
        labels = {_VERSION: version, **versions.texts_of(history, _PREFIX), _DOCUMENTS: json.dumps(kept)}
        project = {"name": self.name, "services": {"remora": _escaped({**document, "labels": labels})}}
        words = ["compose", "--file=-", "up", "--detach", "--wait", f"--wait-timeout={startup_s}", "--remove-orphans"]
        return command("docker", words, json.dumps(project), self.name)

    def _down(self) -> Call:
        return command("docker", ["compose", f"--project-name={self.name}", "down", "--timeout=30"], name=self.name)

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the container differs from the desired state."""
        wanted = _digest(self._document(self._wanted()))
        if self._version(state) != wanted:
            return [f"version {self._version(state) or 'none'} runs, not {wanted}"]
        return [] if self._runs(state) else [f"the container is {self._condition(state)}"]

    def status(self, state: State) -> Sequence[str]:
        """Return the container's state in lines."""
        if self._item(state) is None:
            return []
        document = self._documents(state).get(self._version(state), {})
        return [
            f"{self.name}: {self._condition(state)}, version {self._version(state)}",
            f"image: {document.get('image', 'unknown')}",
            f"url: http://127.0.0.1:{self.port}",
            versions.rollback_line(self.target, state),
        ]

    def shares(self, state: State) -> dict[str, int]:
        """Return all requests for the version that runs."""
        return self._desired_shares(state) if self._runs(state) else {}

    def _desired_shares(self, state: State) -> dict[str, int]:
        return {self._version(state): 100} if self._version(state) else {}

    def reason(self, state: State) -> str:
        """Return why the container is not healthy."""
        item = self._item(state)
        return str(find(item, "State.Error", "") or "") if item else ""

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the read of the container's log."""
        words = ["compose", f"--project-name={self.name}", "logs", f"--tail={lines}", "--no-color", "--no-log-prefix"]
        return [] if self._item(state) is None else [command("docker", words, name=self.name)]

    def log_text(self, answer: Any) -> str:
        """Return the text of the log."""
        return str(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the request to the published port."""
        return http("POST", f"http://127.0.0.1:{self.port}{self.path or f'/v2/models/{self.name}/infer'}", body)

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of a response."""
        return body_of(answer)

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError."""
        shares = self._desired_shares(state)
        return self._history(state).target(self.name, shares, existing=self._documents(state))

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the step to the version that served before."""
        target, shares = self.target(state), self._desired_shares(state)
        history = self._history(state).observed(shares).rolled_back(target, shares)
        return [Step("traffic", self._up(self._documents(state)[target], history, state, 600), retries=BUSY)]

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the step that removes the container."""
        return [] if self._item(state) is None else [Step("clean", self._down())]

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        port = f" --port {self.port}" if self.port != 8000 else ""
        update = "repeat the command with another model or image; requests fail while the container is replaced"
        return plan.advice(f"compose {self.name}{port}", "this machine", update)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _container(self) -> str:
        return f"{self.name}-remora"

    def _wanted(self) -> Wanted:
        return desired(self.wanted, self.name)

    def _item(self, state: State) -> Any:
        found = state["container"]
        return found[0] if isinstance(found, list) and found else None

    def _label(self, state: State, name: str) -> str:
        labels = find(self._item(state) or {}, "Config.Labels", {})
        return str(labels.get(name, ""))

    def _version(self, state: State) -> str:
        return self._label(state, _VERSION)

    def _history(self, state: State) -> versions.History:
        """Return what the container's labels retain."""
        return versions.history_of(find(self._item(state) or {}, "Config.Labels", {}), _PREFIX)

    def _documents(self, state: State) -> dict[str, Any]:
        """Return the documents that the labels retain, by version."""
        text = self._label(state, _DOCUMENTS)
        return dict(read_json(text)) if text else {}

    def _condition(self, state: State) -> str:
        item = self._item(state) or {}
        return str(find(item, "State.Health.Status") or find(item, "State.Status", "missing"))

    def _runs(self, state: State) -> bool:
        return self._condition(state) in ("healthy", "running")


_PROBE = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"


def _escaped(value: Any) -> Any:
    """Return a value with Compose's variables escaped, because a document has none."""
    if isinstance(value, Mapping):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _digest(document: Mapping[str, Any]) -> str:
    return plan.digest_of(document, 12)


def _facts(answer: Any) -> dict[str, Any]:
    """Return the description of a local image as `images.inspect` gives it."""
    item = answer[0] if isinstance(answer, list) and answer else {}
    labels = find(item, "Config.Labels", {})
    return {"media_type": "", "architectures": [str(find(item, "Architecture", "amd64"))], "labels": labels}


def _machine_problem(answer: Any, wanted: Wanted) -> str:
    if not isinstance(answer, Mapping):
        return "docker info has no answer"
    match = re.fullmatch(r"(\d+)([kmg])", wanted.memory.lower())
    if match and answer.get("MemTotal") and int(match[1]) * _UNITS[match[2]] > answer["MemTotal"]:
        return f"--memory={wanted.memory} exceeds the {answer['MemTotal'] / 2**30:.1f} GiB, the quota of this machine"
    if wanted.gpus and "nvidia" not in find(answer, "Runtimes", {}):
        return "docker has no NVIDIA runtime: install nvidia-container-toolkit"
    return ""


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests to the container."""
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="port on loopback (default %(default)s)")
    parser.add_argument("--path", default="", metavar="PATH", help="path of requests (default /v2/models/NAME/infer)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    add = parser.add_argument
    add("--memory", default="4g", metavar="SIZE", help="memory limit (default %(default)s)")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of the container (default 0)")
    add("--startup-timeout", type=int, default=600, metavar="S", help="time limit of the start, in seconds")


def build(options: argparse.Namespace, golden: Golden | None) -> Compose:
    """Return the project of parsed options. Raises ValueError."""
    if not re.fullmatch(r"\d+[kmg]", options.memory.lower()):
        raise ValueError(f"--memory={options.memory}: expected a size such as 512m or 4g")
    source = Source(options.model)
    if "://" not in options.model:
        folder = Path(options.model)
        if not options.model or not folder.is_dir():
            raise ValueError(f"--model={options.model}: expected a folder or a location in a bucket")
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        copies = Path(options.bucket) if options.bucket else Path(data) / "remora" / "models"
        source = Source(str(copies.resolve() / options.name / digest_of(folder)), str(folder))
    wanted = Wanted(
        options.image, source, options.memory, options.gpus, options.environ, options.startup_timeout, golden
    )
    return replace(find_service(options), wanted=wanted)


def find_service(options: argparse.Namespace) -> Compose:
    """Return a project by its name, without a desired state. Raises ValueError."""
    if not _NAME.fullmatch(options.name):
        raise ValueError(f"{options.name}: expected lower-case letters, digits, hyphens and underscores")
    if not 1 <= options.port <= 65535:
        raise ValueError(f"--port={options.port}: expected 1 to 65535")
    return Compose(options.name, options.port, options.path)


def connect(options: argparse.Namespace) -> Programs:
    """Return the connection. Raises RefusedError without docker."""
    return Programs("docker")
