"""Options of backends, processors and scheduling."""

from __future__ import annotations

from collections.abc import Mapping

from remora.options.fields import fragment, option

RATE_LIMITS = ("off", "execution_count")


@fragment
class BackendOptions:
    """Backends and the processors that they use."""

    __slots__ = ()

    backend_config: tuple[str, ...] = option("Backend setting. Repeatable.", metavar="BACKEND,KEY=VALUE", many=True)
    backend_directory: str = option(
        "Directory of custom backends: DIR/NAME/model.py, DIR/NAME/backend.py or DIR/NAME/libremora_NAME.so for "
        "backend NAME.",
        default="",
        metavar="DIR",
    )
    host_policy: tuple[str, ...] = option(
        "Processors for the instances of a host policy: NAME,numa-node=N or NAME,cpu-cores=0-3,8. NAME is the "
        "host_policy of an instance group, or cpu, gpu_0, gpu_1 ..., model. Repeatable.",
        metavar="NAME,KEY=VALUE",
        many=True,
    )
    model_load_gpu_limit: tuple[str, ...] = option(
        "Create no further instance on a GPU whose used memory exceeds this fraction. Repeatable.",
        metavar="DEVICE:FRACTION",
        many=True,
    )
    require_gpu: bool = option(
        "Report ready only while at least one model runs on a GPU. REMORA_REQUIRE_GPU=true in the environment of a "
        "server sets it too.",
        default=False,
    )
    min_supported_compute_capability: str = option(
        "Ignore GPUs below this compute capability.", default="6.0", metavar="N.N"
    )
    allow_gpu_metrics: bool = option("Report GPU metrics if the machine has GPUs.", default=True)

    def least_capability(self) -> tuple[int, int]:
        """Return the lowest compute capability of a GPU that is used. Raises ValueError."""
        major, _, minor = self.min_supported_compute_capability.partition(".")
        if not major.isdecimal() or not (minor or "0").isdecimal():
            text = self.min_supported_compute_capability
            raise ValueError(f"--min-supported-compute-capability={text}: expected a number such as 7.5")
        return int(major), int(minor or "0")

    def backend_settings(self) -> Mapping[str, Mapping[str, str]]:
        """Return ``--backend-config`` as backend -> key -> value, with "" for all backends.

        Raises ValueError for an entry that is not BACKEND,KEY=VALUE.
        """
        settings: dict[str, dict[str, str]] = {}
        for entry in self.backend_config:
            backend, comma, pair = entry.rpartition(",")
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise ValueError(f"--backend-config={entry}: expected BACKEND,KEY=VALUE such as python,key=value")
            settings.setdefault(backend if comma else "", {})[key] = value
        return settings


@fragment
class SchedulingOptions:
    """How requests are batched and instances scheduled."""

    __slots__ = ()

    derived_warmup: bool = option(
        "Warm up models without model_warmup by inferring zeros before they are ready, where that is cheap and safe.",
        default=False,
    )
    batching_delay: bool = option(
        "Honor the queue delays of the batchers. Turn off where requests arrive one at a time.",
        default=True,
    )
    delay_scheduler: int = option(
        "For tests: hold all batches until N requests are queued, then never delay again.",
        default=0,
        metavar="N",
    )
    refuse_late: bool = option(
        "Refuse a request on arrival if its response would miss the deadline.",
        default=False,
    )
    rate_limit: str = option(
        "execution_count: instances take the resources of their rate_limiter by priority. off: no rate limiter.",
        default="off",
        choices=RATE_LIMITS,
    )
    rate_limit_resource: tuple[str, ...] = option(
        "Units of a resource, per device or on one; default: what the most demanding instance needs. Repeatable.",
        metavar="NAME:COUNT[:DEVICE]",
        many=True,
    )
    backlog_delay_scheduler: int = option(
        "For tests, with --delay-scheduler: direct sequence batchers also wait for N requests without a slot.",
        default=0,
        metavar="N",
    )


def rate_limits(options: SchedulingOptions) -> dict[tuple[str, int | None], int] | None:
    """Return the units of each (resource, device) [I09], or None without a limiter.

    Device None means all devices. Raises ValueError for an entry that is not NAME:COUNT or NAME:COUNT:DEVICE.
    """
    stated: dict[tuple[str, int | None], int] = {}
    for entry in options.rate_limit_resource:
        name, *numbers = entry.split(":")
        if not name or len(numbers) not in (1, 2) or not all(text.isascii() and text.isdigit() for text in numbers):
            raise ValueError(
                f"--rate-limit-resource={entry}: expected NAME:COUNT or NAME:COUNT:DEVICE such as memory:4:0"
            )
        stated[name, int(numbers[1]) if len(numbers) == 2 else None] = int(numbers[0])
    return None if options.rate_limit == "off" else stated
