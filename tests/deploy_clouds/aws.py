"""AWS with SageMaker, Lambda, IAM and their companions, as a `Cloud`.

Every call is checked against botocore's models.
"""

# ruff: noqa: N803 - arguments have AWS's names

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.validate import ParamValidator

from deploy_clouds.journeys import Local, refuse, version_of
from remora_deploy.deploy.plan import Call

_SESSION = botocore.session.get_session()
ACCOUNT = "123456789012"
_ENDPOINT = f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:endpoint/digits"


@cache
def _operations(service: str) -> Mapping[str, Any]:
    """Return the shapes of a service's arguments by the name of the operation."""
    model = _SESSION.get_service_model(service)
    return {xform_name(name): model.operation_model(name).input_shape for name in model.operation_names}


@cache
def _validator() -> ParamValidator:
    return ParamValidator()


def problems(call: Call) -> str:
    """Return what AWS's own model of a service has against a call."""
    shape = _operations(call.target)[call.operation]
    return str(_validator().validate(call.arguments, shape).generate_report()) if shape is not None else ""


class FakeAws(Local):
    """One account in one region. An endpoint is `Updating` for two descriptions before a change is final."""

    def __init__(self) -> None:
        super().__init__()
        self.roles: dict[str, str] = {}
        self.roles_new = 2
        self.role_policies: dict[str, str] = {}
        self.models: dict[str, Any] = {}
        self.configs: dict[str, Any] = {}
        self.endpoint: dict[str, Any] | None = None
        self.tags: dict[str, str] = {}
        self.pending: dict[str, Any] | None = None
        self.waits = 0
        self.target: dict[str, Any] | None = None
        self.policies: dict[str, Any] = {}
        self.alarms: set[str] = set()
        self.count = 0
        self.function: dict[str, Any] | None = None
        self.versions: dict[str, dict[str, Any]] = {}
        self.alias: dict[str, Any] | None = None
        self.url = ""
        self.events: dict[str, Any] | None = None

    def answer(self, call: Call) -> Any:
        assert not problems(call), (call, problems(call))
        name = f"{call.target.replace('-', '_')}_{call.operation}"
        if self.fault == "no rights" and call.operation in ("get_bucket_location", "create_model", "create_function"):
            raise refuse("denied", f"not authorized to perform: {call.operation}", "AccessDeniedException")
        if not hasattr(self, name):
            raise AssertionError(f"the stand-in of AWS has no {call.target} {call.operation}")
        return getattr(self, name)(**call.arguments)

    def serving(self) -> dict[str, int]:
        if self.alias is not None:
            more = self.alias.get("RoutingConfig", {}).get("AdditionalVersionWeights", {})
            weights = {self.alias["FunctionVersion"]: 1 - sum(more.values()), **more}
            found: dict[str, int] = {}
            for number, weight in weights.items():
                version = self._of_function(self.versions[number])
                found[version] = found.get(version, 0) + round(100 * weight)
            return found
        if self.endpoint is None or self.endpoint["EndpointStatus"] not in ("InService", "Updating"):
            return {}
        config = self.configs[self.endpoint["EndpointConfigName"]]
        weights = {each["VariantName"]: each["CurrentWeight"] for each in self.endpoint["ProductionVariants"]}
        whole = sum(weights.values())
        found = {}
        for variant, weight in weights.items():
            version = self._version(config, variant)
            found[version] = found.get(version, 0) + round(100 * weight / whole)
        return found

    def counts(self) -> dict[str, int]:
        """Return the desired instances of each version."""
        if self.endpoint is None:
            return {}
        config = self.configs[self.endpoint["EndpointConfigName"]]
        variants = self.endpoint["ProductionVariants"]
        return {self._version(config, each["VariantName"]): each["DesiredInstanceCount"] for each in variants}

    def scale(self, count: int) -> None:
        """Set the instances of the main variant, as scaling does."""
        if self.endpoint is not None:
            self.endpoint["ProductionVariants"][0].update(DesiredInstanceCount=count, CurrentInstanceCount=count)

    def _version(self, config: dict[str, Any], variant: str = "AllTraffic") -> str:
        models = {each["VariantName"]: each["ModelName"] for each in config["ProductionVariants"]}
        container = self.models[models[variant]]["PrimaryContainer"]
        source = container.get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri") or container["ModelDataUrl"]
        return version_of(source)

    # -- what is around ------------------------------------------------------------------------------------------------

    def sts_get_caller_identity(self) -> Any:
        return {"Account": ACCOUNT}

    def s3_get_bucket_location(self, Bucket: str) -> Any:
        return {"LocationConstraint": "eu-west-1"}

    def service_quotas_list_service_quotas(self, **_: Any) -> Any:
        value = 0.0 if self.fault == "no quota" else 4.0
        return {"Quotas": [{"QuotaName": "ml.c6i.xlarge for endpoint usage", "Value": value}]}

    def iam_get_role(self, RoleName: str) -> Any:
        if RoleName not in self.roles:
            raise refuse("missing", f"The role with name {RoleName} cannot be found.", "NoSuchEntity")
        trust = json.loads(self.roles[RoleName])
        return {"Role": {"AssumeRolePolicyDocument": trust, "Arn": f"arn:aws:iam::{ACCOUNT}:role/{RoleName}"}}

    def iam_create_role(self, RoleName: str, AssumeRolePolicyDocument: str, **_: Any) -> Any:
        self.roles[RoleName] = AssumeRolePolicyDocument

    def iam_put_role_policy(self, RoleName: str, PolicyDocument: str, **_: Any) -> Any:
        assert RoleName in self.roles
        self.role_policies[RoleName] = PolicyDocument

    def iam_get_role_policy(self, RoleName: str, **_: Any) -> Any:
        if RoleName not in self.role_policies:
            raise refuse("missing", "The role policy cannot be found.", "NoSuchEntity")
        return {"PolicyDocument": json.loads(self.role_policies[RoleName])}

    def iam_delete_role_policy(self, RoleName: str, **_: Any) -> Any:
        del self.role_policies[RoleName]

    def iam_delete_role(self, RoleName: str) -> Any:
        del self.roles[RoleName]

    def cloudwatch_describe_alarms(self, AlarmNames: list[str]) -> Any:
        return {"MetricAlarms": [{"AlarmName": name} for name in AlarmNames if name in self.alarms]}

    def cloudwatch_delete_alarms(self, AlarmNames: list[str]) -> Any:
        self.alarms -= set(AlarmNames)

    def cloudwatch_put_metric_alarm(self, AlarmName: str, AlarmActions: list[str], **_: Any) -> Any:
        assert AlarmActions == ["arn-of-digits-wake"]
        self.alarms.add(AlarmName)

    def logs_describe_log_streams(self, logGroupName: str, **_: Any) -> Any:
        return {"logStreams": [{"logStreamName": "AllTraffic/i-1"}]}

    def logs_get_log_events(self, **_: Any) -> Any:
        return {"events": [{"message": "cannot load model 'digits': no such operator"}]}

    # -- SageMaker --------------------------------------------------------------------------------------------------

    def sagemaker_create_model(self, ModelName: str, **arguments: Any) -> Any:
        assert ModelName not in self.models, "Cannot create already existing model"
        self.models[ModelName] = arguments

    def sagemaker_delete_model(self, ModelName: str) -> Any:
        if self.models.pop(ModelName, None) is None:
            raise refuse("missing", "Could not find model")

    def sagemaker_create_endpoint_config(self, EndpointConfigName: str, **arguments: Any) -> Any:
        assert EndpointConfigName not in self.configs
        for variant in arguments["ProductionVariants"]:
            assert variant["ModelName"] in self.models, "Could not find model"
        self.count += 1
        self.configs[EndpointConfigName] = {**arguments, "CreationTime": self.count}

    def sagemaker_delete_endpoint_config(self, EndpointConfigName: str) -> Any:
        assert self.endpoint is None or self.endpoint["EndpointConfigName"] != EndpointConfigName, "it is in use"
        if self.configs.pop(EndpointConfigName, None) is None:
            raise refuse("missing", "Could not find endpoint configuration")

    def sagemaker_describe_endpoint_config(self, EndpointConfigName: str) -> Any:
        if EndpointConfigName not in self.configs:
            raise refuse("missing", "Could not find endpoint configuration")
        return {"EndpointConfigName": EndpointConfigName, **self.configs[EndpointConfigName]}

    def sagemaker_list_endpoint_configs(self, NameContains: str, **_: Any) -> Any:
        newest = sorted(self.configs, key=lambda name: -self.configs[name]["CreationTime"])
        return {"EndpointConfigs": [{"EndpointConfigName": name} for name in newest if NameContains in name]}

    def sagemaker_list_models(self, NameContains: str, **_: Any) -> Any:
        return {"Models": [{"ModelName": name} for name in self.models if NameContains in name]}

    def sagemaker_create_endpoint(self, EndpointName: str, EndpointConfigName: str, Tags: Any = ()) -> Any:
        if self.endpoint is not None:
            raise refuse("exists", "Cannot create already existing endpoint", "ValidationException")
        self.tags = {each["Key"]: each["Value"] for each in Tags}
        self._change("Creating", EndpointConfigName, None, {})

    def sagemaker_add_tags(self, ResourceArn: str, Tags: Any) -> Any:
        assert self.endpoint is not None
        assert ResourceArn == _ENDPOINT
        for each in Tags:
            assert re.fullmatch(r"[\w .:/=+\-@]{1,128}", each["Key"]), each
            assert re.fullmatch(r"[\w .:/=+\-@]{0,256}", each["Value"]), each
            self.tags[each["Key"]] = each["Value"]

    def sagemaker_list_tags(self, ResourceArn: str) -> Any:
        assert ResourceArn == _ENDPOINT
        return {"Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()]}

    def sagemaker_update_endpoint(
        self,
        EndpointName: str,
        EndpointConfigName: str,
        RetainAllVariantProperties: bool = False,
        ExcludeRetainedVariantProperties: Any = (),
        **_: Any,
    ) -> Any:
        assert self.endpoint is not None
        if self.endpoint["EndpointStatus"] != "InService":
            raise refuse("invalid", f"Cannot update endpoint in {self.endpoint['EndpointStatus']}")
        if EndpointConfigName not in self.configs:
            raise refuse("missing", "Could not find endpoint configuration")
        before = self.endpoint["EndpointConfigName"]
        types = {
            self.configs[name]["ProductionVariants"][0].get("InstanceType") for name in (before, EndpointConfigName)
        }
        if self.target is not None and len(types) > 1:
            raise refuse("invalid", "The instance type cannot change: deregister the scalable target.")
        excluded = {each["VariantPropertyType"] for each in ExcludeRetainedVariantProperties}
        kept = {"DesiredInstanceCount", "DesiredWeight"} - excluded if RetainAllVariantProperties else set()
        running = {each["VariantName"]: each for each in self.endpoint["ProductionVariants"]}
        retained = {name: {key: each[key] for key in kept} for name, each in running.items()}
        self._change("Updating", EndpointConfigName, before, retained)

    def _change(self, status: str, config: str, before: str | None, retained: dict[str, Any]) -> None:
        undone = self.fault in ("rollback", "model broken never ready")
        final: dict[str, Any] = {"EndpointStatus": "InService", "EndpointConfigName": config}
        variants = []
        for each in self.configs[config]["ProductionVariants"]:
            name, count = each["VariantName"], each.get("InitialInstanceCount", 0)
            wanted = {"DesiredInstanceCount": count, "DesiredWeight": each.get("InitialVariantWeight", 1.0)}
            wanted |= retained.get(name, {})
            current = {key.replace("Desired", "Current"): value for key, value in wanted.items()}
            variants.append({"VariantName": name, **wanted, **current})
        if undone:
            reason = "The primary container for production variant AllTraffic did not pass the ping health check."
            final = {"EndpointStatus": "InService" if before else "Failed", "FailureReason": reason}
            final["EndpointConfigName"] = before or config
            variants = self.endpoint["ProductionVariants"] if self.endpoint is not None else variants
        self.pending, self.waits = {**final, "ProductionVariants": variants}, 2
        self.endpoint = {
            **(self.endpoint or {"EndpointConfigName": config, "ProductionVariants": variants}),
            "EndpointStatus": status,
        }

    def sagemaker_describe_endpoint(self, EndpointName: str) -> Any:
        if self.fault == "interrupted" and self.pending is not None and self.waits == 1:
            self.fault = ""
            raise KeyboardInterrupt
        if self.pending is not None:
            self.waits -= 1
            if self.waits < 0:
                self.endpoint, self.pending = self.pending, None
        if self.endpoint is None:
            raise refuse("missing", 'Could not find endpoint "digits"', "ValidationException")
        return {"EndpointName": EndpointName, "EndpointArn": _ENDPOINT, **self.endpoint}

    def sagemaker_delete_endpoint(self, EndpointName: str) -> Any:
        self.endpoint = self.pending = None
        self.tags = {}

    def sagemaker_update_endpoint_weights_and_capacities(self, DesiredWeightsAndCapacities: Any, **_: Any) -> Any:
        assert self.endpoint is not None
        for wanted in DesiredWeightsAndCapacities:
            for variant in self.endpoint["ProductionVariants"]:
                if variant["VariantName"] == wanted["VariantName"]:
                    variant["DesiredInstanceCount"] = wanted["DesiredInstanceCount"]
                    variant["CurrentInstanceCount"] = wanted["DesiredInstanceCount"]

    def sagemaker_runtime_invoke_endpoint(self, Body: bytes, TargetVariant: str = "AllTraffic", **_: Any) -> Any:
        assert self.endpoint is not None
        version = self._version(self.configs[self.endpoint["EndpointConfigName"]], TargetVariant)
        if self.fault == "model broken" and version == "v2":
            raise refuse("failed", "Received server error (500) from primary with message: broken", "ModelError")
        return {"Body": self.reply(version), "InvokedProductionVariant": TargetVariant}

    def application_autoscaling_describe_scalable_targets(self, **_: Any) -> Any:
        return {"ScalableTargets": [self.target] if self.target else []}

    def application_autoscaling_describe_scaling_policies(self, **_: Any) -> Any:
        return {"ScalingPolicies": list(self.policies.values())}

    def application_autoscaling_register_scalable_target(self, **arguments: Any) -> Any:
        self.target = arguments

    def application_autoscaling_deregister_scalable_target(self, **_: Any) -> Any:
        self.target, self.policies = None, {}

    def application_autoscaling_put_scaling_policy(self, PolicyName: str, **arguments: Any) -> Any:
        if self.target is None:
            raise refuse("missing", "No scalable target registered for service namespace", "ObjectNotFoundException")
        self.policies[PolicyName] = {"PolicyName": PolicyName, **arguments}
        return {"PolicyARN": f"arn-of-{PolicyName}"}

    # -- Lambda ------------------------------------------------------------------------------------------------------

    def _of_function(self, version: dict[str, Any]) -> str:
        return version_of(version["Environment"]["Variables"]["REMORA_MODEL_REPOSITORY"])

    def lambda_get_account_settings(self) -> Any:
        return {"AccountLimit": {"UnreservedConcurrentExecutions": 0 if self.fault == "no quota" else 900}}

    def _existing(self) -> dict[str, Any]:
        if self.function is None:
            raise refuse("missing", "Function not found", "ResourceNotFoundException")
        return self.function

    def lambda_get_function(self, FunctionName: str) -> Any:
        found = self._existing()
        return {"Configuration": found, "Code": {"ImageUri": found["ImageUri"]}}

    def lambda_create_function(self, Code: Any, Role: str, **settings: Any) -> Any:
        assert self.function is None
        if Role.rpartition("/")[2] not in self.roles or self.roles_new:
            self.roles_new -= 1
            raise refuse("busy", "The role defined for the function cannot be assumed by Lambda.")
        self.function = {**settings, "Role": Role, "ImageUri": Code["ImageUri"], "State": "Pending"}
        self.waits = 2

    def lambda_update_function_code(self, ImageUri: str, **_: Any) -> Any:
        self._idle()
        self._existing().update(ImageUri=ImageUri, LastUpdateStatus="InProgress")
        self.waits = 2

    def lambda_update_function_configuration(self, FunctionName: str, **settings: Any) -> Any:
        self._idle()
        self._existing().update(settings, LastUpdateStatus="InProgress")
        self.waits = 2

    def _idle(self) -> None:
        if self._existing().get("LastUpdateStatus") == "InProgress":
            raise refuse("busy", "The operation cannot be performed at this time. An update is in progress")

    def lambda_get_function_configuration(self, FunctionName: str, Qualifier: str = "") -> Any:
        if self.fault == "interrupted" and self.waits == 1 and self.versions:
            self.fault = ""
            raise KeyboardInterrupt
        found = self.versions[Qualifier] if Qualifier else self._existing()
        self.waits -= 1
        if self.waits <= 0:
            found["State"] = "Active"
            if found.get("LastUpdateStatus") == "InProgress" or self.fault == "model broken never ready":
                broken = self.fault in ("rollback", "model broken never ready")
                found["LastUpdateStatus"] = "Failed" if broken else "Successful"
                found["LastUpdateStatusReason"] = "not ready: the image cannot be pulled" if broken else ""
            if self.fault == "rollback" and found.get("LastUpdateStatus") is None:
                found.update(State="Failed", StateReason="not ready: the image cannot be pulled")
        return found

    def lambda_publish_version(self, Description: str, **_: Any) -> Any:
        self._idle()
        self.count += 1
        self.versions[str(self.count)] = {**self._existing(), "Version": str(self.count), "Description": Description}
        return {"Version": str(self.count)}

    def lambda_list_versions_by_function(self, **_: Any) -> Any:
        self._existing()
        return {"Versions": [{"Version": "$LATEST"}, *self.versions.values()]}

    def lambda_delete_function(self, FunctionName: str, Qualifier: str = "") -> Any:
        if Qualifier:
            assert self.alias is None or self.alias["FunctionVersion"] != Qualifier, "the alias needs it"
            del self.versions[Qualifier]
        else:
            self.function, self.versions, self.alias, self.url = None, {}, None, ""

    def lambda_get_alias(self, **_: Any) -> Any:
        if self.alias is None:
            raise refuse("missing", "Alias not found", "ResourceNotFoundException")
        return self.alias

    def lambda_create_alias(self, FunctionName: str, **alias: Any) -> Any:
        assert alias["FunctionVersion"] in self.versions
        self.alias = alias

    def lambda_update_alias(self, FunctionName: str, **alias: Any) -> Any:
        assert {alias["FunctionVersion"], *alias["RoutingConfig"]["AdditionalVersionWeights"]} <= self.versions.keys()
        assert len(alias.get("Description", "")) <= 256
        self.alias = {**(self.alias or {}), **alias}

    def lambda_delete_alias(self, **_: Any) -> Any:
        self.alias = None

    def lambda_get_function_url_config(self, **_: Any) -> Any:
        if not self.url:
            raise refuse("missing", "no URL", "ResourceNotFoundException")
        return {"FunctionUrl": "https://x.lambda-url.eu-west-1.on.aws/", "InvokeMode": self.url}

    def lambda_create_function_url_config(self, InvokeMode: str = "BUFFERED", **_: Any) -> Any:
        assert not self.url
        self.url = InvokeMode

    def lambda_update_function_url_config(self, InvokeMode: str, **_: Any) -> Any:
        assert self.url
        self.url = InvokeMode

    def lambda_get_function_event_invoke_config(self, **_: Any) -> Any:
        if self.events is None:
            raise refuse("missing", "no configuration", "ResourceNotFoundException")
        return self.events

    def lambda_put_function_event_invoke_config(self, FunctionName: str, Qualifier: str, **config: Any) -> Any:
        allowed = json.loads(self.role_policies["remora-digits"])["Statement"]
        for place in config["DestinationConfig"].values():
            assert any(each["Resource"] == place["Destination"] for each in allowed), "the role may not send there"
        self.events = config

    def lambda_delete_function_event_invoke_config(self, **_: Any) -> Any:
        self.events = None

    def lambda_invoke(self, Qualifier: str, Payload: bytes, **_: Any) -> Any:
        version = self.versions[self.alias["FunctionVersion"] if self.alias and Qualifier == "live" else Qualifier]
        assert version["State"] == "Active"
        if self.fault.startswith("model broken") and self._of_function(version) in ("v2", "v1"):
            return {"FunctionError": "Unhandled", "Payload": b'{"errorMessage": "the model is broken"}'}
        return {"Payload": self.reply(self._of_function(version))}
