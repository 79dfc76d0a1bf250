"""What providers pass on unread, against the services' own models: CloudFormation properties and Azure's bodies.

AWS's model is botocore's, Azure's is in the classes of azure-ai-ml; both are data here, nothing is called.
"""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.terraform import ROOT, Verdict

WHEELS = ROOT / ".venv-stub" / "wheels"
# Which request takes what a resource's properties say, and what CloudFormation adds to it or names by reference.
REQUESTS = {
    "AWS::SageMaker::EndpointConfig": ("sagemaker", "CreateEndpointConfig", {}),
    "AWS::SageMaker::InferenceComponent": ("sagemaker", "CreateInferenceComponent", {}),
    "AWS::ApplicationAutoScaling::ScalableTarget": ("application-autoscaling", "RegisterScalableTarget", {}),
    "AWS::ApplicationAutoScaling::ScalingPolicy": (
        "application-autoscaling",
        "PutScalingPolicy",
        {
            "ServiceNamespace": "sagemaker",
            "ResourceId": "x",
            "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
        },
    ),
    "AWS::CloudWatch::Alarm": ("cloudwatch", "PutMetricAlarm", {}),
}
# Azure's resource types and the classes of the envelope that each takes.
BODIES = {
    "onlineEndpoints": ("OnlineEndpoint", "OnlineEndpointProperties"),
    "deployments": ("OnlineDeployment", "ManagedOnlineDeployment"),
    "models/versions": ("ModelVersion", "ModelVersionProperties"),
    "environments/versions": ("EnvironmentVersion", "EnvironmentVersionProperties"),
}

pytestmark = pytest.mark.timeout(600)


def test_every_cloudformation_property_is_one_of_the_service(tested: Callable[[str], Verdict]) -> None:
    pytest.importorskip("botocore", reason="botocore is not installed here: make test-infra")
    seen = set()
    for run, address, values in tested("aws-sagemaker").resources("modes.tftest.hcl"):
        if address.startswith("aws_cloudformation_stack.") and "template_body" in values:
            for name, resource in json.loads(values["template_body"])["Resources"].items():
                seen.add(resource["Type"])
                assert not list(complaints(resource)), f"{run}: {address}: {name}"
    assert seen == set(REQUESTS)


def complaints(resource: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a resource of a template: unknown properties, wrong types, values not among those allowed."""
    import botocore.session
    from botocore.validate import ParamValidator

    service, operation, added = REQUESTS[resource["Type"]]
    shape = botocore.session.get_session().get_service_model(service).operation_model(operation).input_shape
    properties = {name: value for name, value in resource["Properties"].items() if name != "ScalingTargetId"}
    known = resolved(properties | added)
    report = ParamValidator().validate(known, shape)
    if report.has_errors():
        yield report.generate_report()
    yield from strangers(known, shape, resource["Type"])


def resolved(value: Any) -> Any:
    """A template's value with text in place of its references, and numbers where CloudFormation takes their text."""
    if isinstance(value, dict):
        return "x" if set(value) <= {"Ref", "Fn::GetAtt"} else {key: resolved(each) for key, each in value.items()}
    return [resolved(each) for each in value] if isinstance(value, list) else value


def strangers(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Members that the shape does not have, and texts that its enumerations do not hold."""
    if shape.type_name == "structure":
        for key, each in value.items():
            if key not in shape.members:
                yield f"{where}.{key} does not exist"
            else:
                yield from strangers(each, shape.members[key], f"{where}.{key}")
    elif shape.type_name == "list":
        for each in value:
            yield from strangers(each, shape.member, where)
    elif shape.type_name == "string" and getattr(shape, "enum", None) and value not in shape.enum:
        yield f"{where} is {value}: one of {shape.enum}"


def test_a_property_that_does_not_exist_is_found() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed here: make test-infra")
    variant = {"VariantName": "x", "InferenceAmi": "y", "RoutingConfig": {"RoutingStrategy": "NEAREST"}}
    wrong = {"Type": "AWS::SageMaker::EndpointConfig", "Properties": {"ProductionVariants": [variant]}}
    said = "\n".join(complaints(wrong))
    assert "InferenceAmi" in said
    assert "NEAREST" in said


def test_every_body_for_azure_is_one_of_the_service(tested: Callable[[str], Verdict]) -> None:
    classes = azure_classes()
    seen = set()
    for run, address, values in tested("azure-ml").resources("deployments.tftest.hcl"):
        if not address.startswith("azapi_") or "body" not in values:
            continue
        kind = values["type"].split("@")[0].removeprefix("Microsoft.MachineLearningServices/workspaces/")
        kind = next(name for name in BODIES if kind.endswith(name))
        seen.add(kind)
        envelope, properties = BODIES[kind]
        body = {**values["body"]}
        found = [*unknown(classes, properties, body.pop("properties"), f"{kind}.properties")]
        found += unknown(classes, envelope, body, kind)
        assert not found, f"{run}: {address}"
    assert seen == set(BODIES)


Classes = dict[str, dict[str, str]]


def azure_classes() -> Classes:
    """The client's classes: for each, the names on the wire and the class or type of what they hold."""
    wheels = list(WHEELS.glob("azure_ai_ml-*.whl"))
    if not wheels:
        pytest.skip("the wheel of azure-ai-ml is fetched by make test-infra")
    archive = zipfile.ZipFile(wheels[0])
    source = archive.read("azure/ai/ml/_restclient/arm_ml_service/models/_models.py")
    own: Classes = {}
    bases: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            own[node.name] = dict(map(field, (each for each in node.body if isinstance(each, ast.AnnAssign))))

    def whole(name: str) -> dict[str, str]:
        inherited = [whole(base) for base in bases.get(name, ())]
        return {key: kind for part in [*inherited, own.get(name, {})] for key, kind in part.items()}

    return {name: whole(name) for name in own}


def field(node: ast.AnnAssign) -> tuple[str, str]:
    assert isinstance(node.target, ast.Name)
    named = [word.value for word in getattr(node.value, "keywords", ()) if word.arg == "name"]
    wire = named[0].value if named and isinstance(named[0], ast.Constant) else node.target.id
    return str(wire), ast.unparse(node.annotation)


def unknown(classes: Classes, name: str, value: dict[str, Any], where: str) -> Iterator[str]:
    """Keys of a body that the class does not have, down to where the client's types end."""
    for key, each in value.items():
        if key not in classes[name]:
            yield f"{where}.{key} does not exist"
            continue
        kind = classes[name][key].replace("_models.", "").strip("'\"").removeprefix("Optional[").strip("[]'\"")
        if isinstance(each, dict) and kind in classes:
            yield from unknown(classes, kind, each, f"{where}.{key}")


def test_a_key_that_does_not_exist_is_found() -> None:
    found = unknown(azure_classes(), "ManagedOnlineDeployment", {"requestSettings": {"maxConcurrent": 1}}, "body")
    assert list(found) == ["body.requestSettings.maxConcurrent does not exist"]
