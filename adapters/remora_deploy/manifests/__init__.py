"""Deployment files computed from models, for `remora manifests`.

A platform is a module with a pure function ``render(facts) -> str``, which raises ValueError for values that the
platform refuses. Each computed number has a comment with its reason. `facts` opens and measures the models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, cast

from remora.errors import RemoraError
from remora_deploy.manifests.facts import SPOT, TASK, Choices, Facts
from remora_deploy.pod import GPU, Mode

if TYPE_CHECKING:
    from remora.traffic.releases import Release

PLATFORMS = (
    "azureml",
    "cloud-run",
    "compose",
    "helm",
    "knative",
    "kserve",
    "kubernetes",
    "lambda",
    "sagemaker",
    "vertex",
)
"""Supported platforms, one module of this package each."""

FETCHING = ("cloud-run", "helm", "knative", "kserve", "kubernetes")
"""Platforms whose pods download the models, so that a local path is useless to them."""
_PODS = frozenset(("least", "most", "service_account", "secret", "namespace", "spot", "gpu_resource"))
_JOBS = frozenset(("job", "tasks"))
_OF_SERVICES = frozenset(("least", "most", "port_name", "canary", "monitoring", "prometheus", "release"))
"""Choices that a job does not have."""
_USED = {
    "azureml": frozenset(("least", "instance", "release")),
    "cloud-run": frozenset(("least", "most", "service_account", "instance", "port_name", "canary", "release")) | _JOBS,
    "compose": frozenset(("secret",)),
    "helm": _PODS - {"namespace"} | {"monitoring", "prometheus"},
    "knative": _PODS | {"port_name", "canary", "monitoring", "release"},
    "kserve": _PODS | {"mode", "canary", "monitoring", "release"},
    "kubernetes": _PODS | _JOBS | {"monitoring", "prometheus"},
    "lambda": frozenset(("service_account", "release")),
    "sagemaker": frozenset(("least", "most", "service_account", "instance", "release")),
    "vertex": frozenset(("least", "most", "service_account", "instance", "canary", "spot", "release")),
}
"""Choices that a platform's files can express, beside the number of GPUs."""
_FLAGS = {"least": "min-replicas", "most": "max-replicas", "instance": "instance-type", "prometheus": "keda"}
_MODULES = {"cloud-run": "cloud_run", "lambda": "aws_lambda"}


def find_renderer(name: str) -> Callable[[Facts], str]:
    """Return the function that renders a platform's files.

    Raises ValueError for an unknown platform.
    """
    if name not in PLATFORMS:
        raise ValueError(f"there are no manifests for '{name}': expected one of {', '.join(PLATFORMS)}")
    return cast(Callable[[Facts], str], import_module(f"{__name__}.{_MODULES.get(name, name)}").render)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the flags that become `Choices`."""
    group = parser.add_argument_group("choices")
    group.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="GPUs of each replica, also from a machine without one (default: what the models require here)",
    )
    group.add_argument(
        "--gpu-resource",
        default=GPU,
        metavar="NAME",
        help="Kubernetes' name of a GPU, such as nvidia.com/mig-1g.10gb or nvidia.com/gpu.shared (default %(default)s)",
    )
    group.add_argument("--min-replicas", type=int, metavar="N", help="minimum of replicas (default: the platform's)")
    group.add_argument("--max-replicas", type=int, metavar="N", help="maximum of replicas (default: the platform's)")
    group.add_argument(
        "--instance-type", default="", metavar="TYPE", help="instance or machine type, or Cloud Run's GPU"
    )
    group.add_argument(
        "--service-account", default="", metavar="NAME", help="service account, or role, that may read the models"
    )
    group.add_argument(
        "--secret",
        default="",
        metavar="NAME",
        help="Kubernetes secret, or Compose environment file, with the keys of the storage",
    )
    group.add_argument("--namespace", default="", metavar="NAME", help="Kubernetes namespace")
    modes = [each.lower() for each in Mode]
    group.add_argument("--mode", choices=modes, default=modes[0], help="KServe's mode (default %(default)s)")
    group.add_argument("--spot", choices=tuple(SPOT), default="", help="use the spot nodes of this kind of cluster")
    group.add_argument(
        "--port-name",
        choices=("http1", "h2c"),
        default="http1",
        help="h2c sends gRPC to the port (default %(default)s)",
    )
    group.add_argument("--canary", type=int, metavar="PERCENT", help="share of the traffic for this revision")
    group.add_argument(
        "--release",
        nargs="?",
        const="",
        metavar="RELEASE",
        help="divide the traffic as a release does: a model's name, the file of a server's state, a release.yaml, or "
        "versions such as stable=2,canary=3:10%%,shadow=4:20%% (default: the only release in PATH)",
    )
    group.add_argument("--monitoring", action="store_true", help="add a PodMonitor and alerts (PrometheusRule)")
    group.add_argument(
        "--job",
        nargs=2,
        default=(),
        metavar=("INPUT", "OUTPUT"),
        help="print a job that scores the file at one URL into another, as `remora score`, in place of a service",
    )
    group.add_argument(
        "--tasks",
        type=int,
        default=1,
        metavar="N",
        help=f"parallel tasks of the job; {TASK} in INPUT and OUTPUT becomes 0 to N-1 (default %(default)s)",
    )
    group.add_argument("--keda", default="", metavar="URL", help="scale by KEDA with the Prometheus at this address")


def _release_of(options: argparse.Namespace) -> Release | None:
    """Return the release of the arguments. Raises ValueError."""
    if options.release is None:
        return None
    from remora.api.models import find_release  # because it imports the engine's models

    try:
        return find_release(options.release, options.paths)
    except RemoraError as error:
        raise ValueError(str(error)) from error


def choices_of(options: argparse.Namespace) -> Choices:
    """Return the choices of parsed arguments. Raises ValueError."""
    if not 0 <= options.gpus <= 64:
        raise ValueError(f"--gpus {options.gpus}: expected 0 to 64")
    found = Choices(
        gpus=options.gpus,
        gpu_resource=options.gpu_resource,
        least=options.min_replicas,
        most=options.max_replicas,
        service_account=options.service_account,
        secret=options.secret,
        namespace=options.namespace,
        mode=options.mode,
        spot=options.spot,
        instance=options.instance_type,
        port_name=options.port_name,
        canary=options.canary,
        release=_release_of(options),
        monitoring=options.monitoring,
        prometheus=options.keda,
        job=tuple(options.job),
        tasks=options.tasks,
    )
    changed = [field.name for field in fields(found) if getattr(found, field.name) != field.default]
    for name in sorted({*changed} - _USED[options.platform] - {"gpus"}):
        flag = _FLAGS.get(name, name.replace("_", "-"))
        raise ValueError(f"--{flag} has no place in the files of {options.platform}")
    for name in sorted({*changed} & _OF_SERVICES if found.job else ()):
        raise ValueError(f"--{_FLAGS.get(name, name.replace('_', '-'))} has no place in a job")
    found.check()
    return found
