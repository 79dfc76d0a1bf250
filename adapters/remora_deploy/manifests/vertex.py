"""Flag files for `gcloud ai`, which uploads a model and deploys it to an endpoint."""

from __future__ import annotations

from typing import Any

from remora.system.url_secrets import shown_place
from remora.traffic.releases import Release
from remora_deploy.manifests import releases
from remora_deploy.manifests.documents import document
from remora_deploy.manifests.facts import Facts

_MACHINE = {False: "n2-standard-4", True: "g2-standard-8"}
_ACCELERATOR = "nvidia-l4"


def render(facts: Facts) -> str:
    """Return two YAML documents, for ``--flags-file``.

    Raises ValueError for models outside of Google's storage.
    """
    choices = facts.choices
    choices.check()
    if not facts.location.startswith("gs://"):
        raise ValueError(f"{shown_place(facts.location)}: Vertex AI reads models from gs:// only: pass --models")
    if choices.least == 0:
        raise ValueError("--min-replicas 0: a deployed model has at least one replica")
    model, rows = facts.busiest, max(facts.busiest.max_batch_size, 1)
    reasons = {
        "--container-predict-route": f"Two batches of {rows} for each of {model.instances} instances of "
        f"'{model.name}' are {facts.concurrency} requests at a time for each replica.",
        "--container-env-vars": "Not ready while the GPU is idle.",
        "--machine-type": f"The process had {facts.memory_mib} MiB with all models loaded.",
        "--traffic-split": "0 is this deployment; name the id of the one that serves, which keeps the rest.",
    }
    if choices.release is not None:
        return _release(facts, choices.release, reasons)
    upload = document(_upload(facts), reasons, "gcloud ai models upload --region=REGION --flags-file=THIS")
    deploy = document(
        _deploy(facts), reasons, "gcloud ai endpoints deploy-model ENDPOINT --region=REGION --flags-file=THIS"
    )
    return f"{upload}---\n{deploy}"


def _release(facts: Facts, release: Release, reasons: dict[str, str]) -> str:
    """Return upload and deployment of the newest version, with the shares of all versions."""
    version = releases.newest(release)
    one = releases.facts_of(facts, version)._replace(name=releases.name_of(facts, version))
    deployed = _deploy(one)
    shares = [
        (f"DEPLOYED_V{each}" if each != version else "0", share)
        for each, share in releases.whole_percents(release).items()
    ]
    deployed["--traffic-split"] = ",".join(f"{name}={share}" for name, share in shares)
    reasons["--traffic-split"] = "0 is this deployment; name the ids of those that serve: gcloud ai endpoints describe."
    header = "gcloud ai endpoints deploy-model ENDPOINT --region=REGION --flags-file=THIS"
    return "---\n".join(
        (
            document(_upload(one), reasons, "gcloud ai models upload --region=REGION --flags-file=THIS"),
            document(deployed, reasons, f"{header}\n{releases.notes(release)}"),
        )
    )


def _upload(facts: Facts) -> dict[str, Any]:
    return {
        "--model-id": facts.name,
        "--display-name": facts.name,
        "--container-image-uri": facts.image,
        "--artifact-uri": facts.location,
        "--container-command": "python,-m,remora_adapters.vertex",
        "--container-ports": 8080,
        "--container-health-route": "/health",
        "--container-predict-route": "/predict",
        "--container-env-vars": "REMORA_REQUIRE_GPU=true" if facts.gpu else None,
    }


def _deploy(facts: Facts) -> dict[str, Any]:
    least, most = facts.replicas(1, 4)
    choices = facts.choices
    share = choices.canary
    return {
        "--model": facts.name,
        "--display-name": facts.name,
        "--machine-type": choices.instance or _MACHINE[facts.gpu],
        "--accelerator": f"type={_ACCELERATOR},count={facts.gpus}" if facts.gpu else None,
        "--min-replica-count": least,
        "--max-replica-count": most,
        "--service-account": choices.service_account,
        "--traffic-split": "0=100" if share is None else f"0={share},DEPLOYED={100 - share}",
        "--spot": True if choices.spot else None,
    }
