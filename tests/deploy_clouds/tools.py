"""Command-line tools of the deployment pages (aws, gcloud, az, kubectl, docker, curl) beside a stand-in cloud.

They keep what a later command needs: logins, repositories, images, buckets, accounts. A command without its
prerequisite fails, and so does a command or flag that is not written here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from remora.cli import build_parser
from remora_deploy.deploy.plan import Call, find
from remora_deploy.images import IMAGES

_SWITCHES = ("--quiet", "--recursive", "--force", "--password-stdin", "--rm", "--wait")
_JSON_PATH = "jsonpath={.status.url}"
_ANYWHERE = {"--region", "--endpoint-url", "--cli-binary-format"}
"""Flags of AWS's command line itself."""
_GCLOUD: dict[tuple[str, ...], set[str]] = {
    ("auth", "login"): set(),
    ("auth", "application-default", "login"): set(),
    ("auth", "configure-docker"): set(),
    ("auth", "print-identity-token"): set(),
    ("services", "enable"): {"--project"},
    ("artifacts", "repositories", "create"): {"--repository-format", "--location", "--project"},
    ("artifacts", "repositories", "delete"): {"--location", "--project", "--quiet"},
    ("storage", "buckets", "create"): {"--location", "--project"},
    ("storage", "buckets", "add-iam-policy-binding"): {"--member", "--role"},
    ("storage", "rm"): {"--recursive"},
    ("iam", "service-accounts", "create"): {"--project"},
    ("iam", "service-accounts", "delete"): {"--project", "--quiet"},
    ("run", "services", "describe"): {"--region", "--project", "--format"},
    ("run", "jobs", "replace"): {"--region", "--project"},
    ("run", "jobs", "execute"): {"--region", "--project", "--wait"},
    ("run", "jobs", "delete"): {"--region", "--project", "--quiet"},
    ("storage", "rsync"): {"--recursive"},
}
_AZ: dict[tuple[str, ...], set[str]] = {
    ("login",): set(),
    ("account", "set"): {"--subscription"},
    ("extension", "add"): {"--name"},
    ("acr", "login"): {"--name"},
    ("ml", "datastore", "show"): {"--name", "--resource-group", "--workspace-name"},
    ("ml", "online-endpoint", "show"): {"--name", "--resource-group", "--workspace-name", "--query", "--output"},
    ("ml", "online-endpoint", "get-credentials"): {
        "--name", "--resource-group", "--workspace-name", "--query", "--output",
    },
    ("storage", "blob", "upload-batch"): {
        "--account-name", "--destination", "--source", "--destination-path", "--auth-mode",
    },
    ("storage", "blob", "delete-batch"): {"--account-name", "--source", "--pattern", "--auth-mode"},
}  # fmt: skip
_KUBECTL: dict[tuple[str, ...], set[str]] = {
    ("config", "current-context"): set(),
    ("create", "secret", "generic"): {"--from-literal"},
    ("create", "serviceaccount"): set(),
    ("annotate", "secret"): set(),
    ("patch", "serviceaccount"): {"--patch"},
    ("delete", "secret"): set(),
    ("delete", "serviceaccount"): set(),
    ("get",): {"-o"},
}


class Tools:
    """The tools of one user, beside a cloud. ``run`` returns what a command prints."""

    def __init__(self, cloud: Any) -> None:
        self.cloud = cloud
        self.logins: set[str] = set()
        self.repositories: set[str] = set()
        self.images: set[str] = set()
        self.buckets: set[str] = set()
        self.objects: set[str] = set()
        """Names of service accounts, secrets and APIs."""
        self.token = ""
        self.writers: list[str] = []
        """Service accounts that may write to the bucket."""
        self.jobs: dict[str, Any] = {}

    def run(self, line: str) -> str:
        """Run a command line with pipes, substitutions and redirections."""
        text = ""
        for part in re.split(r"\s\|\s", line):
            text = self._run(shlex.split(self._substituted(part)), text)
        return text

    def _substituted(self, line: str) -> str:
        """Replace each ``$(command)`` by what it prints."""
        return re.sub(r"\$\(((?:[^()]|\([^()]*\))+)\)", lambda match: self.run(match[1]).strip(), line)

    def _run(self, words: Sequence[str], text: str) -> str:
        program, *rest = words
        flags: dict[str, str] = {}
        plain = []
        at = 0
        while at < len(rest):
            word = rest[at]
            if word == ">":
                break
            if word.startswith("-") and word != "-":
                name, equals, value = word.partition("=")
                switch = name in _SWITCHES or (program == "docker" and name == "-d")
                if not equals and not switch and at + 1 < len(rest):
                    at += 1
                    value = rest[at]
                flags[name] = value
            else:
                plain.append(word)
            at += 1
        answer = getattr(self, f"run_{program}")(plain, flags, text)
        return answer if isinstance(answer, str) else ""

    def known(self, plain: Sequence[str], flags: dict[str, str], table: dict[tuple[str, ...], set[str]]) -> list[str]:
        """Return the arguments behind the longest known command."""
        fitting = [each for each in table if tuple(plain[: len(each)]) == each]
        assert fitting, f"unknown command {plain}"
        command = max(fitting, key=len)
        assert set(flags) <= table[command], (command, set(flags) - table[command])
        return list(plain[len(command) :])

    # -- images and deployments --------------------------------------------------------------------------------------

    def build(self, words: Sequence[str]) -> None:
        """Build an image as `remora image build`; a push needs the registry's login and a repository."""
        options = build_parser().parse_args(words)
        assert options.name in IMAGES
        if options.push:
            host, _, path = options.tag.partition("/")
            assert host in self.logins, f"not logged in to {host}"
            if ".dkr.ecr." in host or host.endswith("-docker.pkg.dev"):
                assert any(part in self.repositories for part in path.partition(":")[0].split("/")), path
        self.images.add(options.tag)

    def before_deployment(self, options: Any) -> None:
        """Fail for what a deployment needs and the page has not made."""
        assert options.image in self.images, f"{options.image} was not built"
        bucket = getattr(options, "bucket", "")
        if bucket:
            assert bucket.partition("://")[2].partition("/")[0] in self.buckets, bucket
            assert Path(options.model).is_dir()
        for name in (getattr(options, "service_account", ""), getattr(options, "storage_secret", "")):
            assert not name or name in self.objects, f"{name} was not created"
        if "azureml" in options.model:
            assert options.model.partition("/paths/")[2] in self.objects, f"{options.model} was not uploaded"

    # -- tools -------------------------------------------------------------------------------------------------------

    def run_docker(self, plain: list[str], flags: dict[str, str], text: str) -> str:
        match plain:
            case ["login", host]:
                assert "--password-stdin" not in flags or text.strip() == "PASSWORD"
                self.logins.add(host)
            case ["run", image, *_]:
                assert image in self.images
            case ["stop", name]:
                assert name == "digits-run"
            case ["image", "rm", image]:
                self.images.remove(image)
            case _:
                raise AssertionError(f"unknown command docker {plain}")
        return ""

    def run_aws(self, plain: list[str], flags: dict[str, str], text: str) -> str | None:
        match plain:
            case ["configure"]:
                return ""
            case ["s3", "mb", url]:
                assert "--region" in flags
                self.buckets.add(url.removeprefix("s3://"))
                return ""
            case ["s3", "rb", url]:
                assert "--force" in flags
                self.buckets.remove(url.removeprefix("s3://"))
                return ""
        check_aws(["aws", *plain, *(word for pair in flags.items() for word in pair)])
        match plain:
            case ["ecr", "create-repository"]:
                self.repositories.add(flags["--repository-name"])
            case ["ecr", "delete-repository"]:
                self.repositories.remove(flags["--repository-name"])
            case ["ecr", "get-login-password"]:
                return "PASSWORD"
            case ["logs", "delete-log-group"]:
                assert self.cloud.serving() == {}, "what is removed writes no log"
            case ["lambda", "invoke", _]:
                body = _file(flags["--payload"])
                arguments = {"FunctionName": flags["--function-name"], "Qualifier": flags["--qualifier"]}
                assert "FunctionError" not in self.cloud(Call("lambda", "invoke", {**arguments, "Payload": body}))
            case ["sagemaker-runtime", "invoke-endpoint", _]:
                arguments = {"EndpointName": flags["--endpoint-name"], "Body": _file(flags["--body"])}
                assert self.cloud(Call("sagemaker-runtime", "invoke_endpoint", arguments))["Body"]
            case _:
                raise AssertionError(f"unknown command aws {plain}")
        return None

    def run_gcloud(self, plain: list[str], flags: dict[str, str], text: str) -> str:
        rest = self.known(plain, flags, _GCLOUD)
        match plain[:-1] if rest else plain:
            case ["auth", "configure-docker"]:
                self.logins.add(rest[0])
            case ["auth", "print-identity-token"]:
                self.token = "TOKEN"
                return self.token
            case ["artifacts", "repositories", "create"]:
                assert flags["--repository-format"] == "docker"
                self.repositories.add(rest[0])
            case ["artifacts", "repositories", "delete"]:
                self.repositories.remove(rest[0])
            case ["storage", "buckets", "create"]:
                self.buckets.add(rest[0].removeprefix("gs://"))
            case ["storage", "buckets", "add-iam-policy-binding"]:
                assert rest[0].removeprefix("gs://") in self.buckets
                assert flags["--member"].removeprefix("serviceAccount:") in self.objects
                self.cloud.readers.append(flags["--member"])
                if flags["--role"] == "roles/storage.objectUser":
                    self.writers.append(flags["--member"].removeprefix("serviceAccount:"))
            case ["storage", "rsync", source]:
                assert Path(source).is_dir()
                self.objects.add(rest[-1])
            case ["storage", "rm"]:
                assert rest[0].removeprefix("gs://").partition("/")[0] in self.buckets
            case ["iam", "service-accounts", "create"]:
                self.objects.add(f"{rest[0]}@{flags['--project']}.iam.gserviceaccount.com")
            case ["iam", "service-accounts", "delete"]:
                self.objects.remove(rest[0])
            case ["run", "jobs", "replace"]:
                document = yaml.safe_load(Path(rest[0]).read_text())
                assert document["apiVersion"] == "run.googleapis.com/v1"
                self.jobs[document["metadata"]["name"]] = document["spec"]["template"]["spec"]
            case ["run", "jobs", "execute"]:
                self.execute(self.jobs[rest[0]])
            case ["run", "jobs", "delete"]:
                del self.jobs[rest[0]]
            case ["run", "services", "describe"]:
                assert flags["--format"] == "value(status.url)"
                return str(self.cloud.service["uri"])
        return ""

    def execute(self, execution: Any) -> None:
        """Check what the tasks of a job need; their command must be one that the image has."""
        task = execution["template"]["spec"]
        (container,) = task["containers"]
        assert container["image"] in self.images
        assert task["serviceAccountName"] in self.writers, "the account may not write the output"
        words = [*container["command"], *container["args"]]
        assert words[:3] == ["python", "-m", "remora"]
        options = build_parser().parse_args(words[3:])
        assert options.models in self.objects, f"{options.models} was not uploaded"

    def run_az(self, plain: list[str], flags: dict[str, str], text: str) -> str:
        self.known(plain, flags, _AZ)
        match plain:
            case ["acr", "login"]:
                self.logins.add(f"{flags['--name']}.azurecr.io")
            case ["storage", "blob", "upload-batch"]:
                assert Path(flags["--source"]).is_dir()
                self.objects.add(flags["--destination-path"])
            case ["ml", "online-endpoint", "show"]:
                assert flags["--query"] == "scoring_uri"
                return "https://digits.westeurope.inference.ml.azure.com/"
            case ["ml", "online-endpoint", "get-credentials"]:
                assert flags["--query"] == "primaryKey"
                self.token = "key"
                return self.token
        return ""

    def run_kubectl(self, plain: list[str], flags: dict[str, str], text: str) -> str:
        rest = self.known(plain, flags, _KUBECTL)
        match plain:
            case ["create", *_]:
                self.objects.add(rest[0])
            case ["delete", _, name]:
                self.objects.remove(name)
            case ["annotate", "secret", name, *_] | ["patch", "serviceaccount", name]:
                assert name in self.objects
            case ["get", kind, name]:
                assert flags["-o"] == _JSON_PATH
                kinds = [key for key, owner in self.cloud.objects if owner == name and not key.startswith("revisions")]
                assert kind in ("ksvc", "inferenceservice")
                return str(find(self.cloud.objects[kinds[-1], name], "status.url"))
        return ""

    def run_curl(self, plain: list[str], flags: dict[str, str], text: str) -> str:
        (url,) = plain
        body = _file(flags.get("-d") or flags["--json"])
        assert body
        if self.token:
            assert flags["-H"] == f"Authorization: Bearer {self.token}"
        if self.cloud.__class__.__name__ == "FakeGoogle":
            root = str(self.cloud.service["uri"])
            assert url.startswith(f"{root}/v2/")
            return str(self.cloud.asked(root)["body"])
        if self.cloud.__class__.__name__ == "FakeAzure":
            root, _, path = url.partition(".com/")
            assert path == "v2/models/digits/infer"
            asked = {"key": self.token, "url": f"{root}.com", "headers": {}}
            return str(self.cloud.asked(asked)["body"])
        return str(self.cloud.http(Call("http", "POST", {"url": url, "body": body}))["body"])


def _file(value: str) -> bytes:
    """Return the file that a flag of aws or curl names."""
    return Path(re.sub(r"^(fileb?://|@)", "", value)).read_bytes()


def check_aws(words: Sequence[str]) -> None:
    """Compare a call of AWS's command line with the service's own model."""
    from botocore import session, xform_name

    loaded = session.get_session()
    service, operation = words[1:3]
    flags = {word.partition("=")[0] for word in words[3:] if word.startswith("--")} - _ANYWHERE
    if (service, operation) == ("ecr", "get-login-password"):
        return  # a command of the tool itself
    model = loaded.get_service_model(service)
    names = {xform_name(name, "-"): name for name in model.operation_names}
    shape = model.operation_model(names[operation]).input_shape
    members = {xform_name(name, "-"): name for name in shape.members}
    assert {flag.removeprefix("--") for flag in flags} <= set(members), words
    needed = {name for name in shape.required_members if f"--{xform_name(name, '-')}" not in flags}
    assert not needed, words
