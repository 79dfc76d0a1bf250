"""Deployment to AWS Lambda: a function, its versions, and the alias that clients call.

A new version is published and tested with a golden request before the alias moves to it, so clients never reach an
untested version. A version's description has the digest of its settings.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora_deploy.deploy import aws, versions
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.images import Needs, image_check, pinned
from remora_deploy.deploy.plan import (
    BUSY,
    GONE,
    Call,
    CallError,
    Check,
    Kept,
    Progress,
    Read,
    RefusedError,
    State,
    Step,
    advice,
    desired,
    digest_of,
    find,
)
from remora_deploy.deploy.shares import check_share
from remora_deploy.deploy.uploads import Source, source_of, upload_steps

add_place, connect = aws.add_place, aws.connect
_NAME = re.compile(r"[A-Za-z0-9-_]{1,64}")
ALIAS = "live"
_SERVICE = "lambda.amazonaws.com"
_ACCOUNT = "ACCOUNT"
_MB_PER_PROCESSOR = 1769
_MODELS = "REMORA_MODEL_REPOSITORY"
_DESTINATIONS = {
    "sqs": "sqs:SendMessage",
    "sns": "sns:Publish",
    "lambda": "lambda:InvokeFunction",
    "events": "events:PutEvents",
}
"""Right that a function's role needs for a destination, by the service in its ARN."""
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Desired state of a function.

    Attributes:
        image: container image in ECR.
        source: the models in S3; None for models in the image.
        role: ARN of the execution role; "" if one with the least policy is created.
        memory_mb, timeout_s, architecture: settings of the function.
        environ: environment of the function.
        traffic: percentage of the requests that the new version gets beside the current one; 100 replaces it.
        url: True for a function URL with IAM authentication.
        stream: True for answers in pieces, and a function URL that passes them on.
        on_success, on_failure: ARNs of queues, topics, functions or event buses for the results of asynchronous
            invocations; "" for none.
        retries: repetitions of a failed asynchronous invocation.
        keep: versions to retain besides those that serve.
    """

    image: str
    source: Source | None
    role: str = ""
    memory_mb: int = _MB_PER_PROCESSOR
    timeout_s: int = 30
    architecture: str = "amd64"
    environ: tuple[tuple[str, str], ...] = ()
    traffic: int = 100
    url: bool = False
    stream: bool = False
    on_success: str = ""
    on_failure: str = ""
    retries: int = 2
    keep: int = 3
    golden: Golden | None = None
    account: str = _ACCOUNT

    def check(self) -> None:
        """Raise ValueError for values that the platform would refuse."""
        if not 128 <= self.memory_mb <= 10240:
            raise ValueError(f"--memory={self.memory_mb}: expected 128 to 10240 MB")
        if not 1 <= self.timeout_s <= 900:
            raise ValueError(f"--timeout={self.timeout_s}: expected 1 to 900 seconds")
        check_share(self.traffic)
        versions.check_keep(self.keep)
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(f"--arch={self.architecture}: expected amd64 or arm64")
        if not 0 <= self.retries <= 2:
            raise ValueError(f"--retries={self.retries}: expected 0, 1 or 2")
        for flag, arn in (("--on-success", self.on_success), ("--on-failure", self.on_failure)):
            if arn and _service_of(arn) not in _DESTINATIONS:
                raise ValueError(f"{flag}={arn}: expected the ARN of a queue, a topic, a function or an event bus")


@dataclass(frozen=True, slots=True)
class LambdaFunction:
    """A function, as a `Platform`."""

    name: str
    region: str
    wanted: Wanted | None = None
    title: str = "Lambda"

    # -- before ------------------------------------------------------------------------------------------------------

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        wanted = self._wanted()
        needs = Needs("lambda", wanted.architecture, single=True)
        checks = [*aws.account_checks(self.region)]
        if wanted.source is not None:
            checks.append(aws.bucket_check(wanted.source.location, self.region))
        checks += [
            Check(
                "quota of concurrent executions",
                Call("lambda", "get_account_settings", {}),
                lambda answer: (
                    ""
                    if find(answer, "AccountLimit.UnreservedConcurrentExecutions", 1) >= 1
                    else "no unreserved execution is left of the account's quota"
                ),
                cure="aws service-quotas request-service-quota-increase --service-code lambda --quota-code L-B99A9384 "
                "--desired-value 1000",
                needed=False,
                absent="",
            ),
            image_check(wanted.image, needs),
        ]
        if wanted.role:
            checks.append(aws.trust_check(wanted.role, _SERVICE))
        return checks

    def settled(self, found: State) -> LambdaFunction:
        """Return the deployment with the image's digest and the account."""
        wanted = self._wanted()
        account = find(found, "account.Account", _ACCOUNT)
        return replace(self, wanted=replace(wanted, image=pinned(wanted.image, found), account=account))

    # -- state -------------------------------------------------------------------------------------------------------

    def reads(self) -> Sequence[Read]:
        """Return the reads of the function, its versions, alias, URL and role."""
        name = {"FunctionName": self.name}
        return [
            Read("function", lambda _: Call("lambda", "get_function", name)),
            Read("alias", lambda _: Call("lambda", "get_alias", {**name, "Name": ALIAS})),
            Read("versions", lambda _: Call("lambda", "list_versions_by_function", name)),
            Read("url", lambda _: Call("lambda", "get_function_url_config", {**name, "Qualifier": ALIAS})),
            Read("events", lambda _: Call("lambda", "get_function_event_invoke_config", {**name, "Qualifier": ALIAS})),
            *aws.role_reads(self._role),
            aws.streams_read(self._log_group),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Wait for a change in progress."""
        if state["function"] is None or _is_settled(find(state, "function.Configuration", {})):
            return ()
        return (self._wait(),)

    def sized(self, state: State) -> LambdaFunction:
        """Return the deployment unchanged: Lambda sets the number of instances."""
        return self

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        wanted = self._wanted()
        steps: list[Step] = [] if wanted.source is None else list(upload_steps(wanted.source))
        if not wanted.role:
            trust = aws.trust_of(_SERVICE, wanted.account)
            unused = lambda now: now["function"] is None  # noqa: E731
            steps += aws.role_steps(self._role, trust, self._statements(wanted), state, unused)
        exists = state["alias"] is not None
        if wanted.traffic != 100 and not exists:
            raise RefusedError(f"--traffic needs a function that serves; {self.name} does not exist yet")
        digest = self._digest(wanted)
        published = self._versions(state).get(digest, "")
        if wanted.traffic != 100 and published and versions.alone(self.shares(state)) == published:
            raise RefusedError(f"--traffic needs another version that serves; {self.name} has none")
        version: Any = published or Kept("version", "Version")
        if not published:
            steps += self._publish(wanted, digest, state)
        if published not in self._serving(state):
            ask = self._invoke(wanted.golden.body if wanted.golden else b"{}", version)
            steps += golden_step(wanted.golden, ask, self.answer_of)
        steps += self._move(wanted, version, state)
        steps += [*self._url(wanted, state), *self._asynchronous(wanted, state)]
        return [*steps, *self._prune(wanted, published, state)]

    def _publish(self, wanted: Wanted, digest: str, state: State) -> list[Step]:
        """Return the steps that bring the function's draft to the desired state and publish it."""
        settings = self._settings(wanted)
        before = state["function"]
        steps: list[Step] = []
        if before is None:
            create = {
                "FunctionName": self.name,
                "PackageType": "Image",
                "Code": {"ImageUri": wanted.image},
                "Architectures": [_ARCHITECTURES[wanted.architecture]],
                "TracingConfig": {"Mode": "Active"},
                **settings,
            }
            delete = Step("clean", Call("lambda", "delete_function", {"FunctionName": self.name}), accepts=GONE)
            call = Call("lambda", "create_function", create)
            steps += [Step("deploy", call, retries=BUSY, undo=(delete,)), self._wait()]
        else:
            steps += self._revise(wanted, settings, before)
        publish = Call("lambda", "publish_version", {"FunctionName": self.name, "Description": _described(digest)})
        version = {"FunctionName": self.name, "Qualifier": Kept("version", "Version")}
        drop = Step("clean", Call("lambda", "delete_function", version), accepts=GONE)
        undo = () if before is None else (drop,)
        return [*steps, Step("deploy", publish, retries=BUSY, keep="version", undo=undo), self._wait(version)]

    def _revise(self, wanted: Wanted, settings: Mapping[str, Any], before: Any) -> list[Step]:
        """Return the steps that update the draft, and take the update back on failure."""
        image = {"FunctionName": self.name, "ImageUri": wanted.image}
        code = Call("lambda", "update_function_code", {**image, "Architectures": [_ARCHITECTURES[wanted.architecture]]})
        old = find(before, "Configuration", {})
        kept = {key: old[key] for key in ("Role", "MemorySize", "Timeout") if key in old}
        kept |= {"FunctionName": self.name, "Environment": {"Variables": find(old, "Environment.Variables", {})}}
        back_code = Call("lambda", "update_function_code", {**image, "ImageUri": find(before, "Code.ImageUri", "")})
        back = Call("lambda", "update_function_configuration", kept)
        change = Call("lambda", "update_function_configuration", {"FunctionName": self.name, **settings})
        return [
            Step("deploy", code, retries=BUSY, undo=(Step("deploy", back_code, retries=BUSY), self._wait())),
            self._wait(),
            Step("deploy", change, retries=BUSY, undo=(Step("deploy", back, retries=BUSY), self._wait())),
            self._wait(),
        ]

    def _move(self, wanted: Wanted, version: Any, state: State) -> list[Step]:
        """Return the steps that move the alias, whose description retains the history."""
        alias = {"FunctionName": self.name, "Name": ALIAS}
        before = state["alias"]
        shares, history = self.shares(state), self._history(state)
        final = versions.after(history, shares, str(version), wanted.traffic)
        described = {"Description": _described_alias(final)}
        if before is None:
            create = Call("lambda", "create_alias", {**alias, "FunctionVersion": version, **described})
            undo = Step("traffic", Call("lambda", "delete_alias", alias), accepts=GONE)
            return [Step("traffic", create, undo=(undo,))]
        stable = versions.stable_of(history, shares, str(version))
        share = {} if wanted.traffic == 100 else {str(version): wanted.traffic / 100}
        main = version if wanted.traffic == 100 else stable
        weights = find(state, "alias.RoutingConfig.AdditionalVersionWeights", {})
        same = before.get("FunctionVersion") == main and weights == share
        if same and final == history:
            return []
        back = {
            **alias,
            **routing(before["FunctionVersion"], weights),
            "Description": find(state, "alias.Description", ""),
        }
        undo = Step("traffic", Call("lambda", "update_alias", back))
        target = {**alias, **routing(main, share), **described}
        return [Step("traffic", Call("lambda", "update_alias", target), undo=(undo,))]

    def _url(self, wanted: Wanted, state: State) -> list[Step]:
        """Return the step that creates the function URL, or changes how it passes answers on."""
        if not (wanted.url or wanted.stream):
            return []
        named = {"FunctionName": self.name, "Qualifier": ALIAS, "AuthType": "AWS_IAM"}
        mode = "RESPONSE_STREAM" if wanted.stream else "BUFFERED"
        if state["url"] is None:
            return [Step("deploy", Call("lambda", "create_function_url_config", {**named, "InvokeMode": mode}))]
        before = find(state, "url.InvokeMode", "BUFFERED")
        if before == mode:
            return []
        call = Call("lambda", "update_function_url_config", {**named, "InvokeMode": mode})
        back = Call("lambda", "update_function_url_config", {**named, "InvokeMode": before})
        return [Step("deploy", call, undo=(Step("deploy", back),))]

    def _asynchronous(self, wanted: Wanted, state: State) -> list[Step]:
        """Return the step that sets the destinations of asynchronous invocations, or removes them."""
        named = {"FunctionName": self.name, "Qualifier": ALIAS}
        places = {"OnSuccess": wanted.on_success, "OnFailure": wanted.on_failure}
        config = {
            "MaximumRetryAttempts": wanted.retries,
            "DestinationConfig": {key: {"Destination": arn} for key, arn in places.items() if arn},
        }
        before = {key: find(state, f"events.{key}") for key in config}
        remove = Step("deploy", Call("lambda", "delete_function_event_invoke_config", named), accepts=GONE)
        if not any(places.values()) and wanted.retries == 2:
            return [] if state["events"] is None else [remove]
        if before == config:
            return []
        put = Call("lambda", "put_function_event_invoke_config", {**named, **config})
        back = Step("deploy", Call("lambda", "put_function_event_invoke_config", {**named, **before}))
        return [Step("deploy", put, undo=(remove if state["events"] is None else back,))]

    def _prune(self, wanted: Wanted, version: str, state: State) -> list[Step]:
        """Return the steps that delete versions beyond those to keep."""
        history = self._history(state).observed(self.shares(state))
        retained = [each.version for each in reversed(history.served)][: wanted.keep]
        used = {*self._serving(state), *retained, version}
        drops = [str(each) for each in self._numbers(state) if str(each) not in used]
        return [
            Step(
                "clean",
                Call("lambda", "delete_function", {"FunctionName": self.name, "Qualifier": number}),
                accepts=GONE,
                extra=True,
            )
            for number in drops
        ]

    # -- the other commands ------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the alias differs from the desired state."""
        wanted = self._wanted()
        version = self._versions(state).get(self._digest(wanted), "")
        if not version:
            return ["the requested version is not published"]
        return versions.differences(self._history(state), self.shares(state), version, wanted.traffic)

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each version that the alias names."""
        return {version: round(100 * share) for version, share in self._serving(state).items() if share}

    def status(self, state: State) -> Sequence[str]:
        """Return the function's state in lines."""
        config = find(state, "function.Configuration")
        if config is None:
            return []
        shares = ", ".join(f"version {version} {share:.0%}" for version, share in self._serving(state).items())
        lines = [
            f"{self.name}: {config.get('State', '?')}, {config.get('MemorySize', '?')} MB, {config.get('Timeout')} s",
            f"alias {ALIAS}: {shares or 'none'}",
            versions.rollback_line(self.target, state),
        ]
        return [*lines, f"url: {state['url']['FunctionUrl']}"] if state["url"] else lines

    def reason(self, state: State) -> str:
        """Return Lambda's reason for a failure."""
        config = find(state, "function.Configuration", {})
        return str(config.get("LastUpdateStatusReason") or config.get("StateReason") or "")

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the reads of the function's newest log streams."""
        return aws.log_calls(self._log_group, state, lines)

    def log_text(self, answer: Any) -> str:
        """Return the messages of a stream."""
        return aws.log_text(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the invocation of the alias."""
        return self._invoke(body, ALIAS)

    def _invoke(self, body: bytes, version: Any) -> Call:
        return Call("lambda", "invoke", {"FunctionName": self.name, "Qualifier": version, "Payload": body})

    def answer_of(self, answer: Any) -> bytes:
        """Return the payload of an invocation. Raises CallError for a function error."""
        payload = answer.get("Payload", b"")
        if answer.get("FunctionError"):
            raise CallError("failed", f"the function failed: {payload[:500].decode('utf-8', 'replace')}")
        return bytes(payload)

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError."""
        numbers = {str(each) for each in self._numbers(state)}
        return self._history(state).target(self.name, self.shares(state), existing=numbers)

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the step to the version that served alone before."""
        target, shares = self.target(state), self.shares(state)
        history = self._history(state).observed(shares).rolled_back(target, shares)
        alias = {"FunctionName": self.name, "Name": ALIAS, **routing(target, {})}
        alias["Description"] = _described_alias(history)
        return [Step("traffic", Call("lambda", "update_alias", alias))]

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that delete the function and its role."""
        steps = []
        if state["function"] is not None:
            steps.append(Step("clean", Call("lambda", "delete_function", {"FunctionName": self.name}), accepts=GONE))
        if state["role"] is not None:
            steps += aws.delete_role_steps(self._role)
        return steps

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        wanted = self._wanted()
        update = "repeat the command without --traffic for all requests" if wanted.traffic != 100 else ""
        cost = f"by request and {wanted.memory_mb / 1024:.2f} GB of memory per second; nothing while idle"
        return advice(f"lambda {self.name}{aws.region_flag(self.region)}", cost, update)

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _role(self) -> str:
        return f"remora-{self.name}"

    @property
    def _log_group(self) -> str:
        return f"/aws/lambda/{self.name}"

    def _wanted(self) -> Wanted:
        return desired(self.wanted, self.name)

    def _settings(self, wanted: Wanted) -> dict[str, Any]:
        threads = max(1, wanted.memory_mb // _MB_PER_PROCESSOR)
        variables = {"OMP_NUM_THREADS": str(threads), **dict(wanted.environ)}
        if wanted.source is not None:
            variables[_MODELS] = wanted.source.location
        if wanted.stream:
            variables["REMORA_RESPONSE_MODE"] = "stream"
        role = wanted.role or f"arn:aws:iam::{wanted.account}:role/{self._role}"
        settings = {"Role": role, "MemorySize": wanted.memory_mb, "Timeout": wanted.timeout_s}
        return {**settings, "Environment": {"Variables": variables}}

    def _digest(self, wanted: Wanted) -> str:
        described = [wanted.image, wanted.architecture, self._settings(wanted)]
        return digest_of(described, 16)

    def _versions(self, state: State) -> dict[str, str]:
        """Return the versions by the digest in their description; of equal ones the newest."""
        found = sorted(self._listed(state), key=lambda each: int(each["Version"]))
        return {
            str(each.get("Description", "")).removeprefix("remora "): str(each["Version"])
            for each in found
            if each.get("State", "Active") not in ("Failed",)
        }

    def _listed(self, state: State) -> list[Any]:
        return [each for each in find(state, "versions.Versions", []) if str(each.get("Version", "")).isdigit()]

    def _numbers(self, state: State) -> list[int]:
        """Return the numbers of the versions, newest first."""
        return sorted((int(each["Version"]) for each in self._listed(state)), reverse=True)

    def _history(self, state: State) -> versions.History:
        """Return what the alias's description retains."""
        words = (each.partition("=") for each in str(find(state, "alias.Description", "")).split())
        return versions.history_of({name: value for name, _, value in words})

    def _serving(self, state: State) -> dict[str, float]:
        """Return the share of each version that serves."""
        current = find(state, "alias.FunctionVersion")
        if current is None:
            return {}
        more: dict[str, float] = find(state, "alias.RoutingConfig.AdditionalVersionWeights", {})
        return {current: 1.0 - sum(more.values()), **more}

    def _wait(self, arguments: Mapping[str, Any] | None = None) -> Step:
        """Return the step that waits until the function or a version is active."""

        def until(answer: Any) -> Progress:
            if not _is_settled(answer):
                return Progress(False, f"{answer.get('State')}, update {answer.get('LastUpdateStatus', 'none')}")
            failed = answer.get("State") == "Failed" or answer.get("LastUpdateStatus") == "Failed"
            reason = answer.get("LastUpdateStatusReason") or answer.get("StateReason") or "no reason is given"
            return Progress(failure=f"the function failed: {reason}" if failed else "", text="Active")

        call = Call("lambda", "get_function_configuration", arguments or {"FunctionName": self.name})
        return Step("deploy", call, until, every_s=2.0, limit_s=900.0)

    def _statements(self, wanted: Wanted) -> list[dict[str, Any]]:
        """Return the least policy: write logs and traces, read the models."""
        group = f"arn:aws:logs:*:{wanted.account}:log-group:{self._log_group}:*"
        statements = [
            aws.allow(["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"], group),
            aws.allow(["xray:PutTelemetryRecords", "xray:PutTraceSegments"], "*"),
        ]
        if wanted.source is not None:
            bucket, _, prefix = wanted.source.location.removeprefix("s3://").partition("/")
            below = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
            statements += [
                aws.allow(["s3:GetObject"], f"arn:aws:s3:::{bucket}/{prefix}*"),
                aws.allow(["s3:ListBucket"], f"arn:aws:s3:::{bucket}", Condition=below),
            ]
        for arn in filter(None, dict.fromkeys((wanted.on_success, wanted.on_failure))):
            statements.append(aws.allow([_DESTINATIONS[_service_of(arn)]], arn))
        return statements


def routing(version: Any, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the members of an alias that divide the invocations among versions."""
    return {"FunctionVersion": version, "RoutingConfig": {"AdditionalVersionWeights": dict(weights)}}


def _service_of(arn: str) -> str:
    """Return the service in an ARN, "" for another text."""
    parts = arn.split(":")
    return parts[2] if len(parts) >= 6 and parts[0] == "arn" else ""


def _is_settled(config: Mapping[str, Any]) -> bool:
    return config.get("State", "Active") != "Pending" and config.get("LastUpdateStatus") != "InProgress"


def _described_alias(history: versions.History) -> str:
    """Return the description of an alias, which retains what it served before."""
    return " ".join(f"{name}={value}" for name, value in versions.texts_of(history).items())


def _described(digest: str) -> str:
    return f"remora {digest}"


# -- command line ---------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    add = parser.add_argument
    add("--role", default="", metavar="ARN", help="execution role (default: one with the least policy is created)")
    add("--memory", type=int, default=_MB_PER_PROCESSOR, metavar="MB", help="memory (default %(default)s)")
    add("--timeout", type=int, default=30, metavar="S", help="limit of an invocation, in seconds (default 30)")
    add("--arch", default="amd64", metavar="ARCH", help="amd64 or arm64 (default %(default)s)")
    add("--traffic", type=int, default=100, metavar="PERCENT", help="share of the new version beside the current one")
    add("--url", action="store_true", help="create a function URL with IAM authentication")
    add("--stream", action="store_true", help="stream answers, through a function URL")
    add("--on-success", default="", metavar="ARN", help="destination of answers to asynchronous invocations")
    add("--on-failure", default="", metavar="ARN", help="destination of asynchronous invocations that failed")
    add("--retries", type=int, default=2, metavar="N", help="repetitions of a failed asynchronous one (default 2)")
    add("--keep", type=int, default=3, metavar="N", help="earlier versions to retain (default 3)")


def build(options: argparse.Namespace, golden: Golden | None) -> LambdaFunction:
    """Return the function of parsed options. Raises ValueError."""
    found = find_service(options)
    source = source_of(options.model, options.bucket, options.name, "s3://") if options.model else None
    wanted = Wanted(
        options.image,
        source,
        options.role,
        options.memory,
        options.timeout,
        options.arch,
        options.environ,
        options.traffic,
        options.url,
        options.stream,
        options.on_success,
        options.on_failure,
        options.retries,
        options.keep,
        golden,
    )
    wanted.check()
    return replace(found, wanted=wanted)


def find_service(options: argparse.Namespace) -> LambdaFunction:
    """Return a function by its name, without a desired state. Raises ValueError."""
    if not _NAME.fullmatch(options.name):
        raise ValueError(f"{options.name}: a name has at most 64 letters, digits, hyphens and underscores")
    return LambdaFunction(options.name, options.region or "")
