"""Deployment to Amazon SageMaker: an endpoint, its configurations, its role and its scaling.

Configurations and models have a digest in their names. The last ones are retained, because a rollback, a scale-out and
the endpoint itself need them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remora_deploy.deploy import aws, versions
from remora_deploy.deploy import sagemaker_versions as serving
from remora_deploy.deploy.golden import Golden, golden_step
from remora_deploy.deploy.images import pinned
from remora_deploy.deploy.plan import (
    BUSY,
    GONE,
    Call,
    CallError,
    Check,
    Progress,
    Read,
    RefusedError,
    State,
    Step,
    advice,
    desired,
    find,
)
from remora_deploy.deploy.sagemaker_calls import (
    CANARY,
    INSTANCE,
    RETAINED,
    VARIANT,
    Plan,
    Rollout,
    config_call,
    endpoint_call,
    model_call,
    named_config,
    same_but_counts,
    scaled,
)
from remora_deploy.deploy.sagemaker_checks import ACCOUNT, Wanted, checks_of, statements_of
from remora_deploy.deploy.sagemaker_scaling import instance_of, scale_steps, unscale_steps
from remora_deploy.deploy.shares import shown
from remora_deploy.deploy.uploads import source_of, upload_steps

_LEAST_CANARY = 2
"""Instances of which a canary can be a part."""
add_place = aws.add_place
_WAITING = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")


@dataclass(frozen=True, slots=True)
class SageMaker:
    """An endpoint, as a `Platform`."""

    name: str
    region: str
    wanted: Wanted | None = None
    title: str = "SageMaker"

    # -- before ------------------------------------------------------------------------------------------------------

    def checks(self) -> Sequence[Check]:
        """Return the checks before a deployment."""
        return checks_of(self._wanted(), self.region)

    def settled(self, found: State) -> SageMaker:
        """Return the deployment with the image's digest and the account."""
        wanted = self._wanted()
        account = str(find(found, "account.Account", wanted.account))
        plan = replace(wanted.plan, image=pinned(wanted.plan.image, found))
        if wanted.create_role:
            plan = replace(plan, role=f"arn:aws:iam::{account}:role/{self._role}")
        return replace(self, wanted=replace(wanted, plan=plan, account=account))

    # -- state -------------------------------------------------------------------------------------------------------

    def reads(self) -> Sequence[Read]:
        """Return the reads of the endpoint, its configurations, models, scaling and role."""
        mine = {"NameContains": f"{self.name}-", "SortBy": "CreationTime", "SortOrder": "Descending"}
        target = {"ServiceNamespace": "sagemaker", "ResourceIds": [scaled(self.name)["ResourceId"]]}
        policies = {"ServiceNamespace": "sagemaker", "ResourceId": scaled(self.name)["ResourceId"]}

        def config(state: State) -> Call | None:
            name = find(state, "endpoint.EndpointConfigName")
            return name and Call("sagemaker", "describe_endpoint_config", {"EndpointConfigName": name})

        def tags(state: State) -> Call | None:
            arn = find(state, "endpoint.EndpointArn")
            return arn and Call("sagemaker", "list_tags", {"ResourceArn": arn})

        def previous(state: State) -> Call | None:
            name = self._previous(state)
            return Call("sagemaker", "describe_endpoint_config", {"EndpointConfigName": name}) if name else None

        return [
            Read("endpoint", lambda _: Call("sagemaker", "describe_endpoint", {"EndpointName": self.name})),
            Read("config", config),
            Read("configs", lambda _: Call("sagemaker", "list_endpoint_configs", mine)),
            Read("models", lambda _: Call("sagemaker", "list_models", mine)),
            Read("tags", tags),
            Read("previous", previous),
            Read("scaling", lambda _: Call("application-autoscaling", "describe_scalable_targets", target)),
            Read("scaling_policies", lambda _: Call("application-autoscaling", "describe_scaling_policies", policies)),
            *aws.role_reads(self._role),
            aws.streams_read(self._log_group),
        ]

    def settle(self, state: State) -> Sequence[Step]:
        """Wait for a change in progress."""
        if find(state, "endpoint.EndpointStatus") not in _WAITING:
            return ()

        def until(answer: Any) -> Progress:
            status = find({"endpoint": answer}, "endpoint.EndpointStatus", "")
            return Progress(status not in _WAITING, f"an earlier change: {status}")

        return (Step("deploy", self._describe(), until, accepts=GONE, every_s=10.0),)

    def sized(self, state: State) -> SageMaker:
        """Return the deployment with the count that runs, within the requested limits."""
        wanted = self._wanted()
        plan, running = wanted.plan, serving.main_count(state)
        if not running or plan.serverless or plan.is_trial:
            return self
        if plan.sized:
            plan = replace(plan, count=min(max(running, plan.least, 1), plan.most))
        else:
            plan = replace(plan, least=running, most=running, count=running)
        return replace(self, wanted=replace(wanted, plan=plan))

    def steps(self, state: State) -> Sequence[Step]:
        """Return the steps to the desired state."""
        wanted = self._wanted()
        plan = wanted.plan
        steps: list[Step] = list(upload_steps(wanted.source))
        if wanted.create_role:
            trust = aws.trust_of("sagemaker.amazonaws.com", wanted.account)
            statements = statements_of(wanted)
            steps += aws.role_steps(self._role, trust, statements, state, lambda now: now["endpoint"] is None)
        failed = find(state, "endpoint.EndpointStatus") == "Failed"
        if failed and not wanted.replace:
            raise RefusedError(
                f"endpoint {self.name} failed before: {self.reason(state) or 'no reason is known'}. SageMaker cannot "
                "update it; repeat the command with --replace to delete it first"
            )
        if failed:
            steps += self._delete_endpoint()
        exists = state["endpoint"] is not None and not failed
        if plan.is_trial and not exists:
            raise RefusedError(f"--traffic and --shadow need an endpoint that serves; {self.name} does not exist yet")
        version = serving.version_of(self.name, plan.model_name)
        if plan.is_trial and serving.is_alone(self.name, state) == version:
            raise RefusedError(f"--traffic and --shadow need another version that serves; {self.name} has none")
        if exists and plan.rollout.kind == "canary" and max(plan.count, plan.least) < _LEAST_CANARY:
            raise RefusedError("--rollout canary moves at most half of the instances first, and there is one instance")
        current = serving.running_config(state) if exists else {}
        config = config_call(plan, current.pop("ProductionVariants", ()), serving.without_shadows(current))
        name = config.arguments["EndpointConfigName"]
        before = serving.observed(self.name, state) if exists else versions.History()
        place = serving.place_of(self.name, name)
        final = before if plan.is_trial else before.deployed(version, plan.count or plan.least, place)
        if exists and same_but_counts(find(state, "endpoint.EndpointConfigName", ""), name):
            steps += self._counted(plan, state)
            name = find(state, "endpoint.EndpointConfigName")
            before = serving.history(state)  # with the counts that it has, because nothing changes
            final = before if plan.is_trial else before.deployed(version, plan.count, serving.place_of(self.name, name))
        else:
            steps += serving.record_steps(state, before) if exists else []
            steps += self._create(plan, config, state)
            steps += self._move(plan, name, state, () if exists else serving.tags_of(final), exists=exists)
        if not plan.answers and not plan.shadow:  # because a shadow's answers are dropped
            ask = self.ask(state, wanted.golden.body if wanted.golden else b"")
            variant = VARIANT if plan.traffic == 100 else CANARY
            if plan.traffic != 100:
                ask = ask._replace(arguments={**ask.arguments, "TargetVariant": CANARY})
            steps += golden_step(wanted.golden, ask, lambda answer: serving.answer_by(variant, answer))
        if exists:
            steps += serving.record_steps({**state, "tags": {"Tags": serving.tags_of(before)}}, final)
        return [*steps, *scale_steps(plan, state), *self._prune(plan, name, final, state)]

    def _create(self, plan: Plan, config: Call, state: State) -> list[Step]:
        """Return the steps that create what is missing of model and configuration."""
        steps = []
        if plan.model_name not in _names(state, "models.Models", "ModelName"):
            delete = Call("sagemaker", "delete_model", {"ModelName": plan.model_name})
            undo = (Step("deploy", delete, accepts=GONE),)
            steps.append(Step("deploy", model_call(plan), retries=BUSY, undo=undo, undo_if=_is_quiet))
        name = config.arguments["EndpointConfigName"]
        if name not in _names(state, "configs.EndpointConfigs", "EndpointConfigName"):
            delete = Call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name})
            undo = (Step("deploy", delete, accepts=GONE),)
            steps.append(
                Step(
                    "deploy",
                    config,
                    undo=undo,
                    undo_if=lambda now: _is_quiet(now) and find(now, "endpoint.EndpointConfigName") != name,
                )
            )
        return steps

    def _move(
        self, plan: Plan, config: str, state: State, tags: Sequence[Mapping[str, str]], *, exists: bool
    ) -> list[Step]:
        """Return the steps that create the endpoint, or bring it to another configuration."""
        scales = find(state, "scaling.ScalableTargets.0") is not None
        instances = serving.main_count(state) if scales and (plan.is_trial or not plan.sized or plan.most > 1) else 0
        several = len(serving.counts(state)) > 1
        if several:  # because guardrails exclude an endpoint with several variants
            plan = replace(plan, rollout=Rollout())
        change = endpoint_call(plan, config, exists=exists, instances=instances)
        if not exists:
            undo = tuple(self._delete_endpoint())
            change = change._replace(arguments={**change.arguments, "Tags": list(tags)})
            return [Step("deploy", change, retries=BUSY, undo=undo), self._wait(config)]
        step = Step(
            "deploy",
            change,
            undo=self._undo(state),
            undo_if=lambda now: _is_quiet(now) and find(now, "endpoint.EndpointConfigName") == config,
        )
        replaced = not plan.is_trial and instance_of(state, "config") != plan.instance
        return [*(unscale_steps(self.name, state) if replaced else []), step, self._wait(config)]

    def _undo(self, state: State) -> tuple[Step, ...]:
        """Return the steps back to what serves now, with the counts that run now."""
        earlier = find(state, "endpoint.EndpointConfigName")
        running = named_config(self.name, serving.running_config(state))
        name = running.arguments["EndpointConfigName"]
        create: list[Step] = []
        if same_but_counts(earlier, name) and earlier != name:
            if name not in self._configs(state):
                create.append(Step("deploy", running, accepts=frozenset({"exists"})))
            earlier = name
        back = Call("sagemaker", "update_endpoint", {"EndpointName": self.name, "EndpointConfigName": earlier})
        return (*create, Step("deploy", back), self._wait(earlier))

    def _wait(self, config: str) -> Step:
        """Return the step that waits until the endpoint serves by a configuration."""

        def until(answer: Any) -> Progress:
            status, serving = answer["EndpointStatus"], answer.get("EndpointConfigName")
            reason = answer.get("FailureReason", "")
            if status in _WAITING:
                return Progress(False, status)
            if status != "InService":
                return Progress(failure=f"the endpoint is {status}: {reason or 'SageMaker gives no reason'}")
            if serving != config:
                return Progress(
                    failure=f"SageMaker rolled the update back, and {serving} serves: "
                    f"{reason or 'it gives no reason; see the log and the alarms'}"
                )
            return Progress(True, "InService")

        return Step("deploy", self._describe(), until, every_s=10.0, limit_s=7200.0)

    def _counted(self, plan: Plan, state: State) -> list[Step]:
        """Return the step that changes the number of instances, unless scaling does."""
        scales = plan.least != plan.most
        if plan.serverless or scales or plan.is_trial or not plan.sized:
            return []
        variants = find(state, "endpoint.ProductionVariants", [])
        counts = {each.get("VariantName"): each.get("DesiredInstanceCount") for each in variants}
        if counts.get(VARIANT) in (None, plan.least):
            return []

        def call(count: int) -> Call:
            desired = [{"VariantName": VARIANT, "DesiredInstanceCount": count}]
            arguments = {"EndpointName": self.name, "DesiredWeightsAndCapacities": desired}
            return Call("sagemaker", "update_endpoint_weights_and_capacities", arguments)

        return [
            Step("deploy", call(plan.least), undo=(Step("deploy", call(counts[VARIANT])),)),
            self._wait(find(state, "endpoint.EndpointConfigName")),
        ]

    # -- scaling and the objects of earlier deployments ----------------------------------------------------------------

    def _prune(self, plan: Plan, config: str, history: versions.History, state: State) -> list[Step]:
        """Return the steps that delete configurations and models beyond those to keep."""
        retained = [each for each in reversed(history.served) if each.version != history.last][: self._wanted().keep]
        current = find(state, "config.ProductionVariants", []) + find(state, "config.ShadowProductionVariants", [])
        models = {plan.model_name, *(str(each.get("ModelName")) for each in current)}
        models |= {f"{self.name}-{each.version}" for each in (*retained, *history.served[-1:])}
        configs = {config, find(state, "endpoint.EndpointConfigName", "")}
        configs |= {f"{self.name}-{each.place}" for each in (*retained, *history.served[-1:])}
        drops = [
            Call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name})
            for name in self._configs(state)
            if name not in configs
        ]
        drops += [
            Call("sagemaker", "delete_model", {"ModelName": name})
            for name in _names(state, "models.Models", "ModelName", self.name)
            if name not in models
        ]
        return [Step("clean", call, accepts=GONE, extra=True) for call in drops]

    def _configs(self, state: State) -> list[str]:
        """Return this endpoint's configurations, newest first."""
        return _names(state, "configs.EndpointConfigs", "EndpointConfigName", self.name)

    def _previous(self, state: State) -> str:
        """Return the configuration of the version that a rollback returns to, or ""."""
        try:
            version = self.target(state)
        except RefusedError:
            return ""
        place = serving.observed(self.name, state).entry(version).place
        return f"{self.name}-{place}" if place else ""

    # -- the other commands --------------------------------------------------------------------------------------------

    def differences(self, state: State) -> Sequence[str]:
        """Return how the endpoint differs from the plan."""
        plan = self._wanted().plan
        endpoint = state["endpoint"]
        if endpoint is None:
            return ["the endpoint does not exist"]
        found = []
        if endpoint["EndpointStatus"] != "InService":
            found.append(f"the endpoint is {endpoint['EndpointStatus']}")
        version = serving.version_of(self.name, plan.model_name)
        shares, copies = self.shares(state), serving.copies(self.name, state)
        if plan.shadow:
            found += [] if version in copies else [f"{version} gets no copies of the requests"]
            return found + ([] if len(shares) == 1 else [f"{shown(shares)} answer, and not one version"])
        found += versions.differences(serving.history(state), shares, version, plan.traffic)
        variants = find(state, "config.ProductionVariants", [])
        if not plan.serverless and all(each.get("InstanceType") != plan.instance for each in variants):
            found.append(f"its instances are not {plan.instance}")
        return found

    def shares(self, state: State) -> dict[str, int]:
        """Return the percentage of each version that answers."""
        return serving.shares(self.name, state)

    def status(self, state: State) -> Sequence[str]:
        """Return the endpoint's state in lines."""
        endpoint = state["endpoint"]
        if endpoint is None:
            return []
        lines = [f"{self.name}: {endpoint['EndpointStatus']} by {endpoint.get('EndpointConfigName', 'nothing')}"]
        if endpoint.get("FailureReason"):
            lines.append(f"reason: {endpoint['FailureReason']}")
        for each in [*endpoint.get("ProductionVariants", []), *endpoint.get("ShadowProductionVariants", [])]:
            lines.append(
                f"variant {each.get('VariantName')}: {each.get('CurrentInstanceCount', '?')} of "
                f"{each.get('DesiredInstanceCount', '?')} instances, weight {each.get('CurrentWeight', 1):g}"
            )
        target = find(state, "scaling.ScalableTargets.0")
        if target:
            lines.append(f"scaling: {target.get('MinCapacity')} to {target.get('MaxCapacity')} instances")
        lines.append(f"traffic: {shown(self.shares(state))}")
        return [*lines, versions.rollback_line(self.target, state)]

    def reason(self, state: State) -> str:
        """Return SageMaker's reason for a failure."""
        return str(find(state, "endpoint.FailureReason", ""))

    def logs(self, state: State, lines: int) -> Sequence[Call]:
        """Return the reads of the endpoint's newest log streams."""
        return aws.log_calls(self._log_group, state, lines)

    def log_text(self, answer: Any) -> str:
        """Return the messages of a stream."""
        return aws.log_text(answer)

    def ask(self, state: State, body: bytes) -> Call:
        """Return the invocation of the endpoint."""
        arguments = {"EndpointName": self.name, "ContentType": "application/json", "Body": body}
        return Call("sagemaker-runtime", "invoke_endpoint", arguments)

    def answer_of(self, answer: Any) -> bytes:
        """Return the body of an invocation."""
        body = answer.get("Body", b"")
        if not isinstance(body, bytes):
            raise CallError("failed", "the invocation has no body")
        return body

    def target(self, state: State) -> str:
        """Return the version that a rollback returns to. Raises RefusedError."""
        return serving.target(self.name, state, self._configs(state))

    def rollback(self, state: State) -> Sequence[Step]:
        """Return the steps to the version that served alone before, with the instances that run now."""
        version = self.target(state)
        before = serving.observed(self.name, state)
        config = serving.config_back(self.name, state, version)
        name = config.arguments["EndpointConfigName"]
        gone = [*self.shares(state), *serving.copies(self.name, state)]
        create = [] if name in self._configs(state) else [Step("deploy", config)]
        arguments: dict[str, Any] = {"EndpointName": self.name, "EndpointConfigName": name}
        unscale = []
        if instance_of(state, "config") != str(config.arguments["ProductionVariants"][0].get("InstanceType", "")):
            unscale = unscale_steps(self.name, state)
        elif find(state, "scaling.ScalableTargets.0"):
            arguments |= RETAINED
        again = [replace(undo, extra=True) for step in unscale for undo in step.undo]
        change = Step("traffic", Call("sagemaker", "update_endpoint", arguments))
        record = serving.record_steps(state, before.rolled_back(version, gone))
        return [*record, *create, *unscale, change, self._wait(name), *again]

    def undeploy(self, state: State) -> Sequence[Step]:
        """Return the steps that delete the endpoint with all that belongs to it."""
        steps = unscale_steps(self.name, state)
        if state["endpoint"] is not None:
            steps += self._delete_endpoint()
        for name in self._configs(state):
            call = Call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name})
            steps.append(Step("clean", call, accepts=GONE))
        for name in _names(state, "models.Models", "ModelName", self.name):
            steps.append(Step("clean", Call("sagemaker", "delete_model", {"ModelName": name}), accepts=GONE))
        if state["role"] is not None:
            steps += aws.delete_role_steps(self._role)
        return steps

    def advice(self, state: State) -> Sequence[tuple[str, str]]:
        """Return the commands that follow a deployment."""
        wanted = self._wanted()
        plan = wanted.plan
        count = plan.least if plan.least == plan.most else f"{plan.least} to {plan.most}"
        cost = f"{count} x {plan.instance}"
        if plan.serverless:
            cost = "by request"
        elif wanted.price:
            cost += f", {wanted.price * plan.least:.2f} per hour at least"
        return advice(f"sagemaker {self.name}{aws.region_flag(self.region)}", f"{cost}, until it is removed")

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _log_group(self) -> str:
        return f"/aws/sagemaker/Endpoints/{self.name}"

    @property
    def _role(self) -> str:
        return f"remora-{self.name}"

    def _wanted(self) -> Wanted:
        return desired(self.wanted, self.name)

    def _describe(self) -> Call:
        return Call("sagemaker", "describe_endpoint", {"EndpointName": self.name})

    def _delete_endpoint(self) -> list[Step]:
        delete = Step("deploy", Call("sagemaker", "delete_endpoint", {"EndpointName": self.name}), accepts=GONE)

        def until(answer: Any) -> Progress:
            return Progress(answer is None, "deleted" if answer is None else str(answer.get("EndpointStatus")))

        return [delete, Step("deploy", self._describe(), until, accepts=GONE)]


def _is_quiet(state: State) -> bool:
    """Return True if no change is in progress, so that objects may be deleted."""
    return find(state, "endpoint.EndpointStatus") not in _WAITING


def _names(state: State, path: str, key: str, endpoint: str = "") -> list[str]:
    """Return the names of a listing; with ``endpoint`` only those that a deployment of it made."""
    made = re.compile(rf"{re.escape(endpoint)}-[0-9a-f]{{10}}")
    names = [str(each.get(key)) for each in find(state, path, [])]
    return [name for name in names if made.fullmatch(name)] if endpoint else names


# -- command line ---------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a deployment."""
    add = parser.add_argument
    add("--role", default="", metavar="ARN", help="execution role (default: one with the least policy is created)")
    add("--instance-type", default=INSTANCE, metavar="TYPE", help="type (default %(default)s)")
    add("--instances", type=int, metavar="N", help="minimum (default: what runs, 1 for a new endpoint)")
    add("--max-instances", type=int, default=0, metavar="N", help="maximum; enables scaling")
    add("--target", type=float, default=8.0, metavar="N", help="requests per instance (default 8)")
    add("--startup-timeout", type=int, default=600, metavar="S", help="startup timeout, in seconds (default 600)")
    add("--multi-model", action="store_true", help="take --model as a prefix of archives")
    add("--async", dest="answers", default="", metavar="S3", help="asynchronous endpoint with answers in this location")
    add("--serverless", default="", metavar="MB:CONCURRENCY", help="no instances; memory and concurrency")
    add("--traffic", type=int, default=100, metavar="PERCENT", help="share of the new version beside the current one")
    add(
        "--shadow",
        type=int,
        default=0,
        metavar="PERCENT",
        help="requests copied to the new version; answers are dropped",
    )
    add("--capture", default="", metavar="S3", help="capture requests and answers in this location")
    add("--capture-percent", type=int, default=100, metavar="PERCENT", help="captured share (default 100)")
    add("--rollout", default="all-at-once", metavar="KIND", help="all-at-once, canary, linear or rolling")
    add("--rollout-step", type=int, default=25, metavar="PERCENT", help="instances in a step (default 25)")
    add("--bake", type=int, default=300, metavar="S", help="time after each step, in seconds (default 300)")
    add("--alarm", action="append", default=[], metavar="NAME", help="alarm that takes an update back; repeatable")
    add("--keep", type=int, default=3, metavar="N", help="earlier versions to retain (default 3)")
    add("--replace", action="store_true", help="delete an endpoint that failed, and create it again")
    add("--hourly-price", type=float, default=0.0, metavar="X", help="price of an instance, for the summary")
    add("--via", choices=("boto3", "sdk"), default="boto3", help="client; sdk: the sagemaker SDK with its defaults")


def build(options: argparse.Namespace, golden: Golden | None) -> SageMaker:
    """Return the endpoint of parsed options. Raises ValueError."""
    memory, _, concurrency = options.serverless.partition(":")
    if options.serverless and not (memory.isdigit() and concurrency.isdigit()):
        raise ValueError(f"--serverless={options.serverless}: expected MB:CONCURRENCY, such as 2048:20")
    source = source_of(options.model, options.bucket, options.name, "s3://", packed=bool(options.serverless))
    least = 1 if options.instances is None else options.instances
    plan = Plan(
        options.name,
        options.image,
        source.location,
        options.role or f"arn:aws:iam::{ACCOUNT}:role/remora-{options.name}",
        instance=options.instance_type,
        least=least,
        most=options.max_instances or max(least, 1),
        sized=options.instances is not None or bool(options.max_instances),
        target=options.target,
        startup_s=options.startup_timeout,
        multi_model=options.multi_model,
        answers=options.answers,
        serverless=(int(memory), int(concurrency)) if options.serverless else None,
        environ=options.environ,
        traffic=options.traffic,
        shadow=options.shadow,
        capture=options.capture,
        capture_share=options.capture_percent,
        rollout=Rollout(options.rollout, options.rollout_step, options.bake, tuple(options.alarm)),
    )
    plan.check()
    versions.check_keep(options.keep)
    price = options.hourly_price
    wanted = Wanted(plan, source, not options.role, options.replace, options.keep, golden, price)
    return SageMaker(options.name, options.region or "", wanted)


def find_service(options: argparse.Namespace) -> SageMaker:
    """Return an endpoint by its name, without a desired state."""
    return SageMaker(options.name, options.region or "")


def connect(options: argparse.Namespace) -> aws.AwsCalls:
    """Return the connection, and complete the region. Raises RefusedError without the SDK."""
    calls = aws.AwsCalls
    if getattr(options, "via", "boto3") == "sdk":
        from remora_deploy.deploy.sagemaker_sdk import SdkCalls

        calls = SdkCalls
    return aws.connect(options, calls)
