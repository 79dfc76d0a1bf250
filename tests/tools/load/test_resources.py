"""Readings of a server's metrics, with and without GPUs, and their mean."""

from __future__ import annotations

from remora_tools.load.resources import Usage, mean_usage, read_usage

TRITONS = """# HELP nv_cpu_utilization CPU utilization rate [0.0 - 1.0]
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization 0.25
nv_cpu_memory_used_bytes 1048576000
nv_gpu_utilization{gpu_uuid="GPU-a"} 0.5
nv_gpu_utilization{gpu_uuid="GPU-b"} 1
nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 2097152
nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 1048576
nv_gpu_power_usage{gpu_uuid="GPU-a"} 70.5
nv_gpu_power_usage{gpu_uuid="GPU-b"} NaN
nv_inference_count{model="m",version="1"} 7
"""


def test_gpus_are_added_up_and_their_shares_averaged() -> None:
    assert read_usage(TRITONS).columns() == {
        "cpu %": 25.0,
        "memory MiB": 1000.0,
        "gpu %": 75.0,
        "gpu memory MiB": 3.0,
        "gpu W": 70.5,
    }


def test_the_memory_of_the_container_goes_before_that_of_the_machine() -> None:
    assert read_usage(TRITONS + "remora_memory_used_bytes 52428800\n").columns()["memory MiB"] == 50.0


def test_what_the_metrics_lack_is_absent() -> None:
    assert read_usage("") == Usage()
    assert read_usage("nv_cpu_utilization broken\nnv_gpu_power_usage\n").columns() == {}


def test_a_mean_counts_the_readings_that_have_a_value() -> None:
    mean = mean_usage([Usage(cpu=0.2), Usage(cpu=0.4, gpu=0.5), Usage()])
    assert mean.columns() == {"cpu %": 30.0, "gpu %": 50.0}
    assert mean_usage([]) == Usage()
