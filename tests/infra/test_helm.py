"""The Helm chart, rendered by the tests' own small renderer (Helm itself is not run) and held to what manifests are."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import charts, manifests
from infra.manifests import Manifest
from infra.terraform import INFRA
from remora import __version__

CHART = INFRA / "helm" / "remora"
ALL = {"autoscaling": {"enabled": True}, "serviceMonitor": {"enabled": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all of it": ALL,
    "gpus": {"gpu": {"count": 1}, "image": {"tag": "gpu"}, "maxBatchSize": 32, "instances": 2, **ALL},
    "bucket": {
        "models": {"claim": "", "uri": "s3://example-models/repository"},
        "arguments": ["--strict-readiness=false"],
    },
    "digest": {"image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": [{"name": "pull"}]}},
    "no policy": {"networkPolicy": {"enabled": False}, "environment": [{"name": "A", "value": "b"}]},
}
KINDS = {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount"}


def objects(**values: Any) -> list[Manifest]:
    files = charts.render(CHART, "shop", **values)
    return [each for name, text in files.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text) if each]


def one(kind: str, **values: Any) -> Manifest:
    return next(each for each in objects(**values) if each["kind"] == kind)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_rendered_object_fits_its_schema_and_keeps_the_rules(values: dict[str, Any]) -> None:
    for module in ("jsonschema", "kubernetes_validate"):
        pytest.importorskip(module, reason=f"{module} is not installed here: make test-infra")
    rendered = objects(**values)
    assert not [(each["kind"], problem) for each in rendered for problem in manifests.misfits(each, {})]
    assert not list(manifests.broken_rules(rendered))


def test_what_is_made_by_default_and_what_when_asked() -> None:
    assert {each["kind"] for each in objects()} == KINDS
    assert {each["kind"] for each in objects(**ALL)} == KINDS | {"HorizontalPodAutoscaler", "ServiceMonitor"}


@pytest.mark.parametrize(("batch", "instances", "aimed"), [(16, 1, "22"), (1, 1, "1"), (32, 2, "89"), (8, 3, "33")])
def test_scaling_aims_at_what_the_manifests_compute(batch: int, instances: int, aimed: str) -> None:
    values = {"maxBatchSize": batch, "instances": instances, **ALL}
    (metric,) = one("HorizontalPodAutoscaler", **values)["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == aimed
    annotations = one("Deployment", **values)["metadata"]["annotations"]
    assert int(aimed) == manifests.target_of(annotations)


def test_a_gpu_is_asked_for_where_the_nodes_are() -> None:
    pod = one("Deployment", **VARIANTS["gpus"])["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"remora.dev/pool": "gpu"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_models_come_from_a_claim_or_from_a_bucket() -> None:
    claim, bucket = one("Deployment"), one("Deployment", **VARIANTS["bucket"])
    assert "--model-repository=/models" in claim["spec"]["template"]["spec"]["containers"][0]["args"]
    pod = bucket["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][0] == "--model-repository=s3://example-models/repository"
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]


def test_a_digest_wins_over_the_tag() -> None:
    image = one("Deployment", **VARIANTS["digest"])["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"remora@sha256:{'0' * 64}"


def test_the_drain_fits_into_the_grace_period_whatever_it_is() -> None:
    for seconds in (1, 30, 600):
        assert not list(manifests.broken_rules(objects(drainSeconds=seconds)))


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_values_fit_their_schema(values: dict[str, Any]) -> None:
    assert not complaints(values)


@pytest.mark.parametrize(
    "values",
    [
        {"replicaCount": 2},
        {"image": {"tag": "latest"}},
        {"image": {"digest": "sha256:1"}},
        {"models": {"claim": "models", "uri": "s3://example-models/repository"}},
        {"models": {"claim": "", "uri": ""}},
        {"gpu": {"count": -1}},
        {"maxBatchSize": "16"},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    assert complaints(values)


def complaints(values: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed here: make test-infra")
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    for key, value in values.items():
        known[key] = {**known.get(key, {}), **value} if isinstance(value, dict) else value
    schema = json.loads((CHART / "values.schema.json").read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(known)]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_the_notes_name_what_was_installed() -> None:
    assert "shop:8000" in charts.render(CHART, "shop")["NOTES.txt"]


def test_helm_agrees() -> None:
    """Where Helm is at hand it judges its own language."""
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed: the chart was rendered by the tests' own renderer alone")
    subprocess.run(["helm", "lint", "--strict", str(CHART)], check=True, capture_output=True)
    done = subprocess.run(["helm", "template", "shop", str(CHART)], check=True, capture_output=True, text=True)
    theirs = [each for each in yaml.safe_load_all(done.stdout) if each]
    assert sorted(theirs, key=lambda each: str(each["kind"])) == sorted(objects(), key=lambda each: str(each["kind"]))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a {{ .Values.n }} b", "a 3 b"),
        ("{{ .Values.n | quote }}", '"3"'),
        ("x\n{{- if .Values.on }}\ny\n{{- else }}\nz\n{{- end }}", "x\ny"),
        ("x\n{{- if not .Values.on }}\ny\n{{- else }}\nz\n{{- end }}", "x\nz"),
        ("{{- range .Values.list }}\n- {{ . | quote }}\n{{- end }}", '\n- "p"\n- "q"'),
        ("{{ div (mul 14 .Values.n 2) 10 }}", "8"),
        ("k: {{ toYaml .Values.map | nindent 2 }}", "k: \n  a: 1"),
        ("k: {{ toYaml .Values.none | nindent 2 }}", "k: \n  []"),
        ('{{ printf "%s-%v" .Release.Name 7 }}', "r-7"),
    ],
)
def test_the_renderer_speaks_the_words_of_the_templates(template: str, text: str) -> None:
    values = {"n": 3, "on": True, "list": ["p", "q"], "map": {"a": 1}, "none": []}
    assert charts.rendered(template, {"Values": values, "Release": {"Name": "r"}}) == text


@pytest.mark.parametrize(
    "template", ["{{ lookup 1 }}", "{{ .Values.absent }}", "{{ if .Values.n }}", "{{ end }}", "{{ $x }}"]
)
def test_the_renderer_refuses_what_it_does_not_know(template: str) -> None:
    with pytest.raises(ValueError, match=r"not among|no such|never closed|closes nothing"):
        charts.rendered(template, {"Values": {"n": 1}})


def test_templates_are_kept_where_the_renderer_finds_them() -> None:
    assert {path.suffix for path in Path(CHART / "templates").iterdir()} == {".yaml", ".txt"}
