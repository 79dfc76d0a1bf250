"""The container's environment: each variable's meaning, and that a misfit is refused with its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.models.placement import parse_gpu_limits
from remora_adapters.sagemaker.settings import settings_of


def test_without_variables_it_is_an_endpoint_with_one_model_on_8080() -> None:
    settings = settings_of({})
    assert (settings.port, settings.folder, settings.multi_model) == (8080, Path("/opt/ml"), False)
    assert (settings.grpc_port, settings.metrics_port) == (0, 0)
    assert settings.max_body_bytes == 1 << 30
    assert not settings.rules.ping_live
    assert settings.rules.kind == "infer"


def test_a_multi_model_endpoint_pings_live_by_default() -> None:
    assert settings_of({"SAGEMAKER_MULTI_MODEL": "true"}).rules.ping_live
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "ready"}
    assert not settings_of(environ).rules.ping_live
    assert settings_of({"SAGEMAKER_TRITON_PING_MODE": "live"}).rules.ping_live


def test_other_listeners_take_the_safe_ranges_first_ports() -> None:
    environ = {
        "SAGEMAKER_SAFE_PORT_RANGE": "18000-18010",
        "SAGEMAKER_TRITON_ALLOW_GRPC": "true",
        "SAGEMAKER_TRITON_ALLOW_METRICS": "1",
    }
    settings = settings_of(environ)
    assert (settings.grpc_port, settings.metrics_port, settings.ports) == (18000, 18001, range(18000, 18011))
    assert settings_of(environ | {"SAGEMAKER_TRITON_GRPC_PORT": "18007"}).grpc_port == 18007


def test_batch_transform_and_toolkit_variables_are_read() -> None:
    settings = settings_of(
        {
            "SAGEMAKER_MAX_PAYLOAD_IN_MB": "50",
            "SAGEMAKER_BATCH_STRATEGY": "SINGLE_RECORD",
            "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS": "4",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "3",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT": "20",
            "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv",
            "SAGEMAKER_PROGRAM": "serve_me.py",
        }
    )
    rules = settings.rules
    assert (rules.payload_mb, rules.strategy, rules.transforms) == (50, "SINGLE_RECORD", 4)
    assert (rules.timeout_ms, rules.accept) == (20_000, "text/csv")
    assert (settings.workers, settings.script, settings.max_body_bytes) == (3, "serve_me.py", 50 << 20)


def test_what_limits_the_load_of_gpus_holds_for_each_that_an_instance_can_have() -> None:
    assert settings_of({}).gpu_limits == ()
    limits = settings_of({"SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": "0.8"}).gpu_limits
    assert parse_gpu_limits(limits) == dict.fromkeys(range(16), 0.8)


def test_ignored_variables_of_tritons_script_are_reported_with_the_reason() -> None:
    assert settings_of({}).unused == ()
    settings = settings_of({"SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE": "16777216", "SAGEMAKER_TRITON_THREAD_COUNT": "8"})
    assert settings.unused == (
        ("SAGEMAKER_TRITON_THREAD_COUNT", "one event loop serves all connections"),
        ("SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE", "Python models need no room in /dev/shm"),
    )


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "40"}, (0, False, False, True)),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "10"}, (1, True, True, True)),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "2"}, (2, True, True, True)),
        ({"SAGEMAKER_TRITON_LOG_VERBOSE": "true"}, (1, True, True, True)),
        ({"SAGEMAKER_TRITON_LOG_INFO": "false", "SAGEMAKER_TRITON_LOG_WARNING": "false"}, (0, False, False, True)),
        ({"SAGEMAKER_TRITON_LOG_ERROR": "false"}, (0, True, True, False)),
    ],
)
def test_both_families_of_log_variables_hold(environ: dict[str, str], shown: tuple[int, bool, bool]) -> None:
    assert settings_of(environ).log == shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "http"),
        ("SAGEMAKER_BIND_TO_PORT", "70000"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "8000"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "9000-8000"),
        ("SAGEMAKER_MULTI_MODEL", "perhaps"),
        ("SAGEMAKER_TRITON_INFERENCE_TYPE", "train"),
        ("SAGEMAKER_TRITON_PING_MODE", "dead"),
        ("SAGEMAKER_BATCH_STRATEGY", "MultiRecord"),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "-1"),
        ("SAGEMAKER_BIND_TO_PORT", "0"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "0-10"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "1-" + "9" * 5000),
        ("SAGEMAKER_TRITON_GRPC_PORT", "0"),
        ("SAGEMAKER_TRITON_METRICS_PORT", "0"),
        ("SAGEMAKER_MODEL_SERVER_WORKERS", "100000"),
        ("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", "80%"),
        ("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", "1.5"),
        ("SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT", "nan"),
        ("SAGEMAKER_TRITON_ADDITIONAL_ARGS", "--log-verbose='1"),
    ],
    ids=lambda text: text[:40],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_variables_name(name: str, value: str) -> None:
    on = {"SAGEMAKER_TRITON_ALLOW_GRPC": "true", "SAGEMAKER_TRITON_ALLOW_METRICS": "true"}
    with pytest.raises(ValueError, match=f"{name}={value[:30]}"):
        settings_of({**on, name: value})
