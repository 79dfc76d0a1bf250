"""Threads, options and providers of ONNX Runtime planned from a configuration, without ONNX Runtime."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from remora.backends.onnxruntime.plan import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    OPENVINO_PROVIDER,
    TENSORRT_PROVIDER,
    Device,
    concurrent_instances,
    first_device,
    plan_graphs,
    plan_providers,
    plan_session,
    requires_gpu,
)
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig

ALL = (TENSORRT_PROVIDER, CUDA_PROVIDER, OPENVINO_PROVIDER, CPU_PROVIDER)


def config(text: str = "", **parameters: str) -> ModelConfig:
    made = text_format.Parse(f'name: "m" {text}', ModelConfig())
    for key, value in parameters.items():
        made.parameters[key.replace("__", ".")].string_value = value
    return made


@pytest.mark.parametrize(
    ("text", "cpus", "threads"),
    [
        ("", 8, 4),
        ("", 1, 1),
        ("instance_group [{ kind: KIND_CPU }]", 8, 4),
        ("instance_group [{ kind: KIND_CPU count: 1 }]", 8, 8),
        ("instance_group [{ kind: KIND_CPU count: 3 }]", 8, 2),
        ("instance_group [{ kind: KIND_CPU count: 3 }, { kind: KIND_CPU count: 1 }]", 8, 2),
        ("instance_group [{ kind: KIND_CPU count: 1 }, { kind: KIND_CPU count: 7 passive: true }]", 8, 8),
        ("instance_group [{ kind: KIND_GPU gpus: [0, 1] }]", 8, 4),
    ],
)
def test_the_processors_are_shared_out_among_the_instances(text: str, cpus: int, threads: int) -> None:
    assert plan_session(config(text), {}, cpus).intra_op_threads == threads


def test_threads_that_are_given_are_taken() -> None:
    assert plan_session(config(intra_op_thread_count="3"), {"intra_op_thread_count": "5"}, 8).intra_op_threads == 3
    assert plan_session(config(), {"intra_op_thread_count": "5"}, 8).intra_op_threads == 5
    assert plan_session(config(intra_op_thread_count="0"), {}, 8).intra_op_threads == 4


def test_operators_run_in_parallel_only_if_configured() -> None:
    assert plan_session(config(inter_op_thread_count="4"), {}, 8).inter_op_threads == 1
    parallel = plan_session(config(execution_mode="1"), {}, 8)
    assert parallel.parallel
    assert parallel.inter_op_threads == 4
    assert plan_session(config(execution_mode="1", inter_op_thread_count="2"), {}, 8).inter_op_threads == 2


def test_waiting_threads_do_not_spin_unless_configured() -> None:
    assert plan_session(config(), {}, 2).entries["session.intra_op.allow_spinning"] == "0"
    spinning = config(session__intra_op__allow_spinning="1")
    assert plan_session(spinning, {}, 2).entries["session.intra_op.allow_spinning"] == "1"


@pytest.mark.parametrize(
    ("level", "expected"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_graph_levels_are_tritons(level: int, expected: str) -> None:
    assert plan_session(config(f"optimization {{ graph {{ level: {level} }} }}"), {}, 1).graph_level == expected


def test_memory_options_follow_the_configuration() -> None:
    plan = plan_session(config(enable_mem_arena="0", enable_mem_pattern="false"), {}, 1)
    assert (plan.mem_arena, plan.mem_pattern) == (False, False)
    shrink = plan_session(config(memory__enable_memory_arena_shrinkage="cpu:0"), {}, 1)
    assert shrink.run_entries == {"memory.enable_memory_arena_shrinkage": "cpu:0"}
    assert shrink.ignored == ()
    assert (shrink.mem_arena, shrink.mem_pattern) == (True, True)


def test_only_parameters_that_mean_nothing_are_ignored() -> None:
    plan = plan_session(config(colour="red", ep__x="1", session__y="2", gpu_mem_limit="3"), {}, 1)
    assert plan.ignored == ("colour",)
    assert plan.entries["ep.x"] == "1"
    assert plan.entries["session.y"] == "2"


@pytest.mark.parametrize("key", ["intra_op_thread_count", "execution_mode", "enable_mem_arena"])
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²", "9" * 5000])
def test_a_parameter_that_cannot_be_read_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"model 'm': parameter '{key}' is '"):
        plan_session(config(**{key: value}), {}, 1)


def test_instances_are_counted_as_triton_fills_them_in() -> None:
    assert concurrent_instances(config()) == 2
    assert concurrent_instances(config("instance_group [{ kind: KIND_GPU }]")) == 1
    assert concurrent_instances(config("instance_group [{ kind: KIND_CPU passive: true }]")) == 1


@pytest.mark.parametrize(
    ("text", "cuda", "expected"),
    [
        ("", False, Device("CPU")),
        ("", True, Device("GPU", 0)),
        ("instance_group [{ kind: KIND_CPU }]", True, Device("CPU")),
        ("instance_group [{ kind: KIND_AUTO gpus: [2] }]", True, Device("GPU", 2)),
        ("instance_group [{ kind: KIND_AUTO gpus: [2] }]", False, Device("CPU")),
        ("instance_group [{ kind: KIND_MODEL }]", True, Device("GPU", 0)),
        ("instance_group [{ kind: KIND_GPU gpus: [1] }]", False, Device("GPU", 1)),
    ],
)
def test_the_first_device_is_a_gpu_where_one_is_wanted_and_there(text: str, cuda: bool, expected: Device) -> None:
    assert first_device(config(text), ALL if cuda else (CPU_PROVIDER,)) == expected


def test_only_kind_gpu_requires_a_gpu() -> None:
    assert requires_gpu(config("instance_group [{ kind: KIND_CPU }, { kind: KIND_GPU }]"))
    assert not requires_gpu(config("instance_group [{ kind: KIND_AUTO gpus: [0] }]"))


def test_the_cpu_comes_last_in_every_chain() -> None:
    assert plan_providers(config(), Device(), ALL).names == (CPU_PROVIDER,)
    gpu = plan_providers(config(), Device("GPU", 3), ALL)
    assert gpu.chain == ((CUDA_PROVIDER, {"device_id": "3"}), (CPU_PROVIDER, {}))


def test_tensorrt_gets_its_options_by_its_own_names() -> None:
    made = config(
        'optimization { execution_accelerators { gpu_execution_accelerator [{ name: "tensorrt" '
        'parameters { key: "precision_mode" value: "FP16" } '
        'parameters { key: "max_workspace_size_bytes" value: "1024" } '
        'parameters { key: "trt_engine_cache_enable" value: "1" } }] } }'
    )
    (name, options), *rest = plan_providers(made, Device("GPU", 1), ALL).chain
    assert name == TENSORRT_PROVIDER
    assert options == {
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1024",
        "trt_engine_cache_enable": "1",
        "device_id": "1",
    }
    assert [each for each, _ in rest] == [CUDA_PROVIDER, CPU_PROVIDER]
    assert plan_providers(made, Device("GPU"), (CUDA_PROVIDER, CPU_PROVIDER)).missing == (TENSORRT_PROVIDER,)


def accelerated(kind: str, name: str, key: str = "", value: str = "") -> ModelConfig:
    made = config()
    added = getattr(made.optimization.execution_accelerators, f"{kind}_execution_accelerator").add(name=name)
    if key:
        added.parameters[key] = value
    return made


@pytest.mark.parametrize(
    ("made", "device", "text"),
    [
        (accelerated("gpu", "warp"), Device("GPU"), "unknown Execution Accelerator 'warp' is requested"),
        (accelerated("cpu", "warp"), Device(), "unknown Execution Accelerator 'warp' is requested"),
        (
            accelerated("gpu", "tensorrt", "segment_size", "1"),
            Device("GPU"),
            "unknown parameter 'segment_size' is provided for TensorRT Execution Accelerator",
        ),
        (
            accelerated("gpu", "tensorrt", "precision_mode", "FP8"),
            Device("GPU"),
            "unsupported precision mode 'FP8' is requested",
        ),
        (
            config(cudnn_conv_algo_search="7"),
            Device("GPU"),
            "unsupported cudnn_conv_algo_search value '7' is requested",
        ),
        (config(arena_extend_strategy="7"), Device("GPU"), "unsupported arena_extend_strategy value '7' is requested"),
    ],
)
def test_what_no_accelerator_knows_is_refused_with_tritons_text(made: ModelConfig, device: Device, text: str) -> None:
    with pytest.raises(ConfigError) as failure:
        plan_providers(made, device, ALL)
    assert str(failure.value) == text


def test_cudas_options_come_from_the_parameters_and_the_accelerator() -> None:
    made = accelerated("gpu", "cuda", "gpu_mem_limit", "5")
    made.parameters["gpu_mem_limit"].string_value = "4"
    made.parameters["cudnn_conv_algo_search"].string_value = "1"
    ((_, options), _) = plan_providers(made, Device("GPU"), ALL).chain
    assert options == {"gpu_mem_limit": "5", "cudnn_conv_algo_search": "HEURISTIC", "device_id": "0"}


def test_openvino_serves_a_cpu_on_request_and_its_absence_is_reported() -> None:
    made = accelerated("cpu", "openvino", "num_of_threads", "2")
    plan = plan_providers(made, Device(), ALL)
    assert plan.chain[0] == (OPENVINO_PROVIDER, {"device_type": "CPU", "num_of_threads": "2"})
    lacking = plan_providers(made, Device(), (CPU_PROVIDER,))
    assert lacking.names == (CPU_PROVIDER,)
    assert lacking.missing == (OPENVINO_PROVIDER,)
    assert plan_providers(made, Device("GPU"), ALL).names == (CUDA_PROVIDER, CPU_PROVIDER)


GRAPHED = 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [2] } '


def test_without_specifications_the_first_sets_of_shapes_get_a_graph() -> None:
    assert plan_graphs(config(GRAPHED)) is None
    plan = plan_graphs(config(GRAPHED + "optimization { cuda { graphs: true } }"))
    assert plan is not None
    assert [plan.wants([("x", (3, 2))], made) for made in (0, 15, 16)] == [True, True, False]


def test_specified_shapes_alone_get_a_graph_batch_first() -> None:
    specs = 'graph_spec { batch_size: 4 } graph_spec { batch_size: 1 input { key: "v" value { dim: 7 } } }'
    text = GRAPHED + 'input { name: "v" data_type: TYPE_FP32 dims: [-1] } optimization { cuda { graphs: true %s } }'
    plan = plan_graphs(config(text % specs))
    assert plan is not None
    wanted = [plan.wants([("x", (rows, 2)), ("v", (rows, length))], 15) for rows, length in ((4, 5), (1, 7), (1, 5))]
    assert wanted == [True, True, False]


def test_clients_cannot_have_a_graph_made_for_every_shape_that_a_specification_leaves_open() -> None:
    text = GRAPHED + 'input { name: "v" data_type: TYPE_FP32 dims: [-1] } optimization { cuda { graphs: true %s } }'
    for count, most in ((1, 16), (20, 20)):
        plan = plan_graphs(config(text % ("graph_spec { batch_size: 4 }" * count)))
        assert plan is not None
        shapes = [("x", (4, 2)), ("v", (4, 5))]
        assert [plan.wants(shapes, made) for made in (most - 1, most)] == [True, False]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ('input { key: "z" value { dim: 1 } }', "names 'z', which is not an input"),
        ("graph_lower_bound { batch_size: 1 }", "graph_lower_bound is not supported"),
    ],
)
def test_specifications_that_cannot_be_kept_are_refused(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_graphs(config(GRAPHED + f"optimization {{ cuda {{ graphs: true graph_spec {{ {spec} }} }} }}"))


ACCELERATED = 'execution_accelerators { gpu_execution_accelerator { name: "tensorrt" %s } }'


def test_only_the_cuda_provider_captures_graphs() -> None:
    graphs = "optimization { cuda { graphs: true } %s }"
    plan = plan_providers(config(graphs % ""), Device("GPU"), ALL)
    assert plan.chain[0] == (CUDA_PROVIDER, {"enable_cuda_graph": "1", "device_id": "0"})
    assert (plan.captures, plan.left_out) == (True, ())
    plan = plan_providers(config(graphs % (ACCELERATED % "")), Device("GPU"), ALL)
    assert plan.names == (TENSORRT_PROVIDER, CUDA_PROVIDER, CPU_PROVIDER)
    assert not any("graph" in option for _, options in plan.chain for option in options)
    assert (plan.captures, plan.left_out) == (False, ("cuda.graphs",))
    without = plan_providers(config(graphs % (ACCELERATED % "")), Device("GPU"), (CUDA_PROVIDER, CPU_PROVIDER))
    assert without.captures, "the CUDA provider is the first one then"
    assert not plan_providers(config(graphs % ""), Device("GPU"), ALL, graphs=False).captures


def test_tensorrts_own_switch_for_graphs_is_left_out() -> None:
    """Its provider replays the first graph for all shapes and addresses that come after it."""
    asked = ACCELERATED % 'parameters { key: "trt_cuda_graph_enable" value: "1" }'
    plan = plan_providers(config(f"optimization {{ {asked} }}"), Device("GPU"), ALL)
    assert plan.chain[0] == (TENSORRT_PROVIDER, {"device_id": "0"})
    assert plan.left_out == ("trt_cuda_graph_enable",)
