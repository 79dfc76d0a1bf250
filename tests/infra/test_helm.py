"""The Helm chart, rendered by the tests' own small renderer and held to what manifests are; and Helm's word on both.

Helm comes as the library in a wheel (make test-infra fetches it) and installs into an API that believes everything.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import charts, manifests
from infra.cluster import KINDS as KNOWN
from infra.cluster import believing
from infra.helm_library import Helm, HelmError
from infra.manifests import Manifest
from infra.terraform import INFRA, ROOT
from remora import __version__
from remora_deploy.pod import Pod, Scaling, deployment

CHART = INFRA / "helm" / "remora"
ALL = {"autoscaling": {"enabled": True}, "serviceMonitor": {"enabled": True}}
CLAIM = {"models": {"claim": "models"}}
LABEL = {"matchLabels": {"app.kubernetes.io/name": "remora"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "claim": CLAIM,
    "all of it": ALL | CLAIM,
    "gpus": {"gpu": {"count": 1}, "image": {"tag": "cuda13"}, "maxBatchSize": 32, "instances": 2, **ALL, **CLAIM},
    "mig": {"gpu": {"count": 1, "resource": "nvidia.com/mig-1g.10gb"}, "image": {"tag": "cuda13"}, **CLAIM},
    "keda": {"keda": {"enabled": True, "prometheus": "http://prometheus:9090"}, **CLAIM},
    "places": {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "kubernetes.io/hostname", "labelSelector": LABEL}
                ]
            }
        },
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": LABEL}
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        **CLAIM,
    },
    "names": {
        "fullnameOverride": "vision",
        "serviceAccount": {"create": False, "name": "theirs"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        **CLAIM,
    },
    "volumes": {
        "extraVolumes": [{"name": "cache", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache", "readOnly": True}],
        "envFrom": [{"secretRef": {"name": "keys"}}],
        **CLAIM,
    },
    "ingress": {
        "ingress": {"enabled": True, "host": "models.example.com", "className": "nginx", "tlsSecret": "tls"},
        "networkPolicy": {"ingressNamespace": "ingress-nginx", "metadataServer": "eks"},
        **CLAIM,
    },
    "bucket": {
        "models": {"uri": "s3://example-models/repository"},
        "arguments": ["--strict-readiness=false"],
    },
    "digest": {"image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": [{"name": "pull"}]}, **CLAIM},
    "no policy": {"networkPolicy": {"enabled": False}, "environment": [{"name": "A", "value": "b"}], **CLAIM},
}
KINDS = {"Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount"}


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


def test_the_default_and_the_optional_resources_are_created() -> None:
    assert {each["kind"] for each in objects()} == KINDS
    assert {each["kind"] for each in objects(**ALL)} == KINDS | {"HorizontalPodAutoscaler", "ServiceMonitor"}


@pytest.mark.parametrize(("batch", "instances", "aimed"), [(16, 1, "22"), (1, 1, "1"), (32, 2, "89"), (8, 3, "33")])
def test_scaling_aims_at_what_the_manifests_compute(batch: int, instances: int, aimed: str) -> None:
    values = {"maxBatchSize": batch, "instances": instances, **ALL}
    (metric,) = one("HorizontalPodAutoscaler", **values)["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == aimed
    annotations = one("Deployment", **values)["metadata"]["annotations"]
    assert int(aimed) == manifests.target_of(annotations)


def test_a_gpu_is_requested_where_the_nodes_are() -> None:
    pod = one("Deployment", **VARIANTS["gpus"])["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"remora.dev/pool": "gpu"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "--require-gpu" in pod["containers"][0]["args"]


def test_the_environment_decides_whether_a_gpu_is_required() -> None:
    off = {"environment": [{"name": "REMORA_REQUIRE_GPU", "value": "false"}]}
    pod = one("Deployment", **{**VARIANTS["gpus"], **off})["spec"]["template"]["spec"]
    assert "--require-gpu" not in pod["containers"][0]["args"], "the flag would win"


GPU_VALUES = {"gpu": {"count": 1}, "image": {"tag": "cuda13"}, "resources": {"cpu": "3", "memory": "12Gi"}}
ON_CLAIM = Pod("remora:cpu", claim="models", memory="2Gi", account="shop")
ON_GPU = replace(ON_CLAIM, image="remora:cuda13", cpu="3", memory="12Gi", gpus=1)
PODS: dict[str, tuple[dict[str, Any], Pod]] = {
    "claim": (CLAIM, ON_CLAIM),
    "gpu": (GPU_VALUES | CLAIM, replace(ON_GPU, node_labels=(("remora.dev/pool", "gpu"),))),
}
BUCKET = "s3://example-models/repository"


def without_empty(value: Any) -> Any:
    """Objects as Kubernetes reads them, which ignores empty lists."""
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items() if each not in (None, [])}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("values", "pod"), PODS.values(), ids=PODS)
def test_the_chart_has_the_deployment_that_manifests_print(values: dict[str, Any], pod: Pod) -> None:
    labels = {"app.kubernetes.io/name": "remora", "app.kubernetes.io/instance": "shop"}
    made = deployment({"name": "shop", "labels": labels}, pod, Scaling(start_s=600, batch=(16, 1)), 2)
    assert without_empty(one("Deployment", **values)) == made


def test_the_chart_has_the_container_of_a_bucket_that_manifests_print() -> None:
    rendered = without_empty(one("Deployment", **VARIANTS["bucket"] | {"arguments": []}))["spec"]["template"]["spec"]
    made = deployment({"name": "shop", "labels": {"a": "b"}}, Pod("remora:cpu", BUCKET, memory="2Gi"), Scaling(), 2)
    pod = made["spec"]["template"]["spec"]
    (theirs,), (ours,) = rendered["containers"], pod["containers"]
    # The chart's user belongs to the pod, because sidecars from its values share it.
    context = rendered["securityContext"] | theirs.pop("securityContext")
    assert ours.pop("securityContext").items() <= context.items()
    assert theirs == ours
    assert rendered["volumes"] == pod["volumes"]


def test_models_come_from_a_claim_or_from_a_bucket() -> None:
    claim, bucket = one("Deployment", **CLAIM), one("Deployment", **VARIANTS["bucket"])
    assert "--model-repository=/models" in claim["spec"]["template"]["spec"]["containers"][0]["args"]
    pod = bucket["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][0] == "--model-repository=s3://example-models/repository"
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]


def test_models_are_named_by_one_setting() -> None:
    """`--set models.uri=...` alone is enough, as the page has it."""
    assert not complaints({"models": {"uri": "s3://example-models/repository"}})


def test_every_object_has_the_name_that_is_asked_for() -> None:
    made = objects(**VARIANTS["names"])
    assert {each["metadata"]["name"] for each in made} == {"vision", "vision-test"}
    assert "ServiceAccount" not in {each["kind"] for each in made}
    pod = one("Deployment", **VARIANTS["names"])["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == "theirs"
    assert pod["metadata"]["annotations"] == {"a": "b"}
    assert pod["metadata"]["labels"]["c"] == "d"


def test_keda_asks_the_prometheus_that_is_named() -> None:
    (trigger,) = one("ScaledObject", **VARIANTS["keda"])["spec"]["triggers"]
    assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
    assert "service='shop'" in trigger["metadata"]["query"]
    assert int(trigger["metadata"]["threshold"]) == manifests.target_of(
        one("Deployment", **CLAIM)["metadata"]["annotations"]
    )
    assert "replicas" not in one("Deployment", **VARIANTS["keda"])["spec"]


def test_a_collector_and_a_metadata_server_are_let_through_where_they_are() -> None:
    def open_to(**values: Any) -> set[int]:
        rules = one("NetworkPolicy", **values)["spec"]["egress"]
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert {4317, 4318} <= open_to(**CLAIM)
    assert 80 not in open_to(**CLAIM)
    assert 80 in open_to(**VARIANTS["ingress"])
    assert 988 in open_to(networkPolicy={"metadataServer": "gke"}, **CLAIM)


def test_the_test_of_a_release_may_call_it_and_asks_its_service() -> None:
    pod = one("Pod", **CLAIM)
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["labels"] == {"remora.dev/client": "true"}
    assert "http://shop:8000/v2/health/ready" in pod["spec"]["containers"][0]["args"][0]


def test_the_readme_lists_every_value() -> None:
    readme = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"])
    for key, value in values.items():
        names = [f"{key}.{name}" for name in value] if isinstance(value, dict) and value else [key]
        assert not [name for name in names if f"`{name}`" not in readme], key


def test_a_digest_wins_over_the_tag() -> None:
    image = one("Deployment", **VARIANTS["digest"])["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"remora@sha256:{'0' * 64}"


def test_the_drain_fits_into_the_grace_period_whatever_it_is() -> None:
    for seconds in (1, 30, 600):
        assert not list(manifests.broken_rules(objects(drainSeconds=seconds)))


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_values_fit_their_schema(values: dict[str, Any]) -> None:
    assert not complaints(values)


SENSELESS: list[dict[str, Any]] = [
    {"replicaCount": 2, **CLAIM},
    {"image": {"tag": "latest"}, **CLAIM},
    {"image": {"digest": "sha256:1"}, **CLAIM},
    {"models": {"claim": "", "uri": ""}},
    {"gpu": {"count": -1}, **CLAIM},
    {"gpu": {"count": 1}, **CLAIM},
    {"maxBatchSize": "16", **CLAIM},
    {"serviceAccount": {"create": False}, **CLAIM},
    {"ingress": {"enabled": True}, **CLAIM},
    {"keda": {"enabled": True}, "autoscaling": {"enabled": True}, **CLAIM},
    {"networkPolicy": {"metadataServer": "azure"}, **CLAIM},
]


@pytest.mark.parametrize("values", SENSELESS, ids=str)
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


WORDS = [
    ("a {{ .Values.n }} b", "a 3 b"),
    ("{{ .Values.n | quote }}", '"3"'),
    ("x\n{{- if .Values.on }}\ny\n{{- else }}\nz\n{{- end }}", "x\ny"),
    ("x\n{{- if not .Values.on }}\ny\n{{- else }}\nz\n{{- end }}", "x\nz"),
    ("{{- range .Values.list }}\n- {{ . | quote }}\n{{- end }}", '\n- "p"\n- "q"'),
    ("{{ div (mul 14 .Values.n 2) 10 }}", "8"),
    ("k: {{ toYaml .Values.map | nindent 2 }}", "k: \n  a: 1"),
    ("k: {{ toYaml .Values.none | nindent 2 }}", "k: \n  []"),
    ('{{ printf "%s-%v" .Release.Name 7 }}', "r-7"),
]
WORD_VALUES = {"n": 3, "on": True, "list": ["p", "q"], "map": {"a": 1}, "none": []}


@pytest.mark.parametrize(("template", "text"), WORDS)
def test_the_renderer_speaks_the_words_of_the_templates(template: str, text: str) -> None:
    assert charts.rendered(template, {"Values": WORD_VALUES, "Release": {"Name": "r"}}) == text


@pytest.mark.parametrize(
    "template", ["{{ lookup 1 }}", "{{ .Values.absent }}", "{{ if .Values.n }}", "{{ end }}", "{{ $x }}"]
)
def test_the_renderer_refuses_what_it_does_not_know(template: str) -> None:
    with pytest.raises(ValueError, match=r"not among|no such|never closed|closes nothing"):
        charts.rendered(template, {"Values": {"n": 1}})


def test_templates_are_kept_where_the_renderer_finds_them() -> None:
    assert {path.suffix for path in Path(CHART / "templates").iterdir()} == {".yaml", ".txt"}


# -- Helm's own word --------------------------------------------------------------------------------------------------


@pytest.fixture
def made() -> list[str]:
    return []


@pytest.fixture
def helm(made: list[str], tmp_path: Path) -> Iterator[Helm]:
    library = ROOT / ".venv-stub" / "helm" / "libhelm_sdkpy.so"
    if not library.exists() or platform.machine() != "x86_64":
        pytest.skip("Helm's library, for x86_64 alone, is fetched by make test-infra; our renderer stands for it here")
    with believing(manifests.KUBERNETES, made) as address:
        context = {"name": "it", "context": {"cluster": "it", "user": "it"}}
        clusters = [{"name": "it", "cluster": {"server": address}}]
        known = {"apiVersion": "v1", "kind": "Config", "current-context": "it", "contexts": [context]}
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps({**known, "clusters": clusters, "users": [{"name": "it", "user": {}}]}))
        yield Helm(library, file)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_helm_renders_what_the_renderer_does_and_installs_it(
    values: dict[str, Any], helm: Helm, made: list[str]
) -> None:
    release = helm.install(CHART, "shop", values)
    (hook,) = release["hooks"]
    assert yaml.safe_load(hook["manifest"]) == one("Pod", **values)
    theirs = [each for each in yaml.safe_load_all(release["manifest"]) if each]
    ours = [each for each in objects(**values) if each["kind"] != "Pod"]
    assert sorted(theirs, key=lambda each: str(each["kind"])) == sorted(ours, key=lambda each: str(each["kind"]))
    assert release["info"]["status"] == "deployed"
    assert release["info"]["notes"].strip() == charts.render(CHART, "shop", **values)["NOTES.txt"].strip()
    plurals = {kind: plural for kinds in KNOWN.values() for plural, kind in kinds.items()}
    assert sorted(path.rpartition("/")[2] for path in made if not path.endswith("/secrets")) == sorted(
        plurals[each["kind"]] for each in ours
    )


@pytest.mark.parametrize("values", SENSELESS, ids=str)
def test_helm_refuses_values_that_make_no_sense(values: dict[str, Any], helm: Helm, made: list[str]) -> None:
    with pytest.raises(HelmError, match="schema"):
        helm.install(CHART, "shop", values)
    assert not made


def test_helm_refuses_a_template_that_is_wrong(helm: Helm, tmp_path: Path) -> None:
    broken = tmp_path / "remora"
    shutil.copytree(CHART, broken)
    (broken / "templates" / "service.yaml").write_text("{{ .Values.service.port }}")
    with pytest.raises(HelmError, match=r"service\.yaml"):
        helm.install(broken, "shop", {})


def test_helm_means_by_the_words_what_the_renderer_does(helm: Helm, tmp_path: Path) -> None:
    """Each word in separate brackets: what a tag trims stays inside."""
    chart = tmp_path / "words"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: words\nversion: 0.1.0\n")
    (chart / "values.yaml").write_text(json.dumps(WORD_VALUES))
    notes = "\n".join(f"<{place}>{template}</{place}>" for place, (template, _) in enumerate(WORDS))
    (chart / "templates" / "NOTES.txt").write_text(notes)
    told = helm.install(chart, "r", {})["info"]["notes"]
    assert told == "\n".join(f"<{place}>{text}</{place}>" for place, (_, text) in enumerate(WORDS))
