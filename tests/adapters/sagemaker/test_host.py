"""What the container makes of its environment and of the model's folder; Triton's start script is the measure (N08)."""

from __future__ import annotations

from pathlib import Path

import pytest

from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host
from remora_adapters import sagemaker
from remora_adapters.sagemaker.settings import Rules
from support.engine.fakes import write_model
from support.servers.sagemaker_door import opened


def environ(base: Path, **more: str) -> dict[str, str]:
    return {"SAGEMAKER_BASE_DIR": str(base), **more}


def test_the_only_model_of_a_repository_answers(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "one")
    host = sagemaker.host(environ(tmp_path))
    assert (host.engine.model_control_mode, host.engine.load_model) == ("explicit", ("one",))
    assert host.engine.paths == (tmp_path / "model",)


def test_of_several_models_one_must_be_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / "model", name)
    with pytest.raises(ValueError, match=r"2 models .one, two.: set SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"):
        sagemaker.host(environ(tmp_path))
    host = sagemaker.host(environ(tmp_path, SAGEMAKER_TRITON_DEFAULT_MODEL_NAME="two"))
    assert host.engine.load_model == ("two",)
    with pytest.raises(ValueError, match="no such folder"):
        sagemaker.host(environ(tmp_path, SAGEMAKER_TRITON_DEFAULT_MODEL_NAME="three"))


def test_a_folder_that_is_not_a_model_is_not_counted(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "one")
    (tmp_path / "model" / "tokenizer").mkdir()
    (tmp_path / "model" / "tokenizer" / "vocabulary.txt").write_text("a b c")
    assert sagemaker.host(environ(tmp_path)).engine.load_model == ("one",)


def test_a_model_alone_in_the_folder_is_served_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path, "model")
    host = sagemaker.host(environ(tmp_path))
    assert (host.engine.paths, host.engine.load_model) == ((tmp_path / "model",), ())


def test_an_inference_script_becomes_a_model_beside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model" / "code").mkdir(parents=True)
    (tmp_path / "model" / "code" / "inference.py").write_text("def predict_fn(data, model): return data")
    host = sagemaker.host(environ(tmp_path, SAGEMAKER_MODEL_SERVER_WORKERS="3"))
    (generated,) = host.engine.paths
    config = (Path(generated) / "inference" / "config.pbtxt").read_text()
    assert "count: 3" in config
    assert not Path(generated).is_relative_to(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").rglob("*")) == ["code", "inference.py"]


def test_what_a_script_requires_is_what_its_model_requires(tmp_path: Path) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text("def predict_fn(data, model): return data")
    (code / "requirements.txt").write_text("emoji==2.14.1\n")
    (generated,) = sagemaker.host(environ(tmp_path)).engine.paths
    assert (Path(generated) / "inference" / "requirements.txt").read_text() == "emoji==2.14.1\n"


def test_a_script_that_lies_elsewhere_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "evil.py").write_text("")
    (tmp_path / "model" / "inference.py").symlink_to(tmp_path / "evil.py")
    assert sagemaker.host(environ(tmp_path)).engine.paths == (tmp_path / "model",)


def test_a_multi_model_endpoint_starts_with_no_model(tmp_path: Path) -> None:
    host = sagemaker.host(environ(tmp_path, SAGEMAKER_MULTI_MODEL="true"))
    assert (host.engine.model_control_mode, host.engine.load_model) == ("explicit", ())


def test_it_listens_on_the_given_port_alone_and_ends_before_it_is_killed(tmp_path: Path) -> None:
    write_model(tmp_path, "model")
    host = sagemaker.host(environ(tmp_path, SAGEMAKER_BIND_TO_PORT="18080"))
    server = host.server
    assert (server.http_address, server.http_port) == ("0.0.0.0", 18080)
    assert not server.allow_grpc
    assert not server.allow_metrics
    assert host.engine.exit_timeout_secs < 30


def test_additional_arguments_are_flags(tmp_path: Path) -> None:
    write_model(tmp_path, "model")
    host = sagemaker.host(
        environ(tmp_path, SAGEMAKER_TRITON_ADDITIONAL_ARGS="--exit-timeout-secs=7 --backend-config=python,a=b")
    )
    assert (host.engine.exit_timeout_secs, host.engine.backend_config) == (7, ("python,a=b",))
    assert host.engine.paths == (tmp_path / "model",)


def test_a_variable_without_effect_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    variables = environ(tmp_path, SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_TRITON_THREAD_COUNT="8")
    with opened(sagemaker.host(variables)):
        assert "SAGEMAKER_TRITON_THREAD_COUNT has no effect: one event loop" in caplog.text


def test_the_limit_of_gpu_memory_is_the_engines(tmp_path: Path) -> None:
    variables = environ(tmp_path, SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT="0.8")
    assert sagemaker.host(variables).engine.model_load_gpu_limit[:2] == ("0:0.8", "1:0.8")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["serve"], []),
        (["serve", "--log-verbose=1"], ["--log-verbose=1"]),
        (["--log-verbose=1", "serve"], ["--log-verbose=1"]),
        (["--log-verbose=1"], ["--log-verbose=1"]),
        (["--load-model", "serve", "serve"], ["--load-model", "serve"]),
        ([], []),
    ],
)
def test_an_entry_point_may_have_flags_behind_which_the_platform_puts_its_argument(
    words: list[str], flags: list[str]
) -> None:
    assert sagemaker.command_of(words) == ["serve", "--host-platform", "sagemaker", *flags]


def test_a_port_outside_the_safe_range_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "model")
    outside = environ(
        tmp_path,
        SAGEMAKER_SAFE_PORT_RANGE="18000-18010",
        SAGEMAKER_TRITON_ALLOW_METRICS="true",
        SAGEMAKER_TRITON_METRICS_PORT="9000",
    )
    with pytest.raises(ValueError, match="cannot listen to metrics requests at port 9000"):
        sagemaker.host(outside)


def test_tritons_flag_opens_its_front_end_beside_v2() -> None:
    options = ServerOptions(allow_sagemaker=True, sagemaker_port=9080)
    door = sagemaker.extra_port(options, {})
    assert (door.what, door.address, door.port) == ("SageMaker", "0.0.0.0", 9080)
    with pytest.raises(ValueError, match="cannot listen to HTTP requests at port 8000"):
        sagemaker.extra_port(ServerOptions(allow_sagemaker=True, sagemaker_safe_port_range="9000-9010"), {})


def test_tritons_front_end_pings_ready_whatever_the_start_script_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Rules] = []
    monkeypatch.setattr(sagemaker, "_front", lambda rules, scratch: seen.append(rules))
    for environ in ({"SAGEMAKER_MULTI_MODEL": "true"}, {"SAGEMAKER_TRITON_PING_MODE": "live"}):
        sagemaker.extra_port(ServerOptions(allow_sagemaker=True), environ)
    assert [rules.ping_live for rules in seen] == [False, True]


def test_tritons_front_end_registers_models_in_mode_explicit_only(tmp_path: Path) -> None:
    front = sagemaker.extra_port(ServerOptions(allow_sagemaker=True), {}).front
    for mode, text in (
        ("none", b"repository registration is not allowed if model control mode is not EXPLICIT"),
        ("explicit", b"expected a path of the form /opt/ml/models/<hash>/model[/<subdir>]"),
    ):
        engine = EngineOptions(paths=(tmp_path,), model_control_mode=mode)
        with opened(Host(engine, ServerOptions(allow_grpc=False, allow_metrics=False), front)) as door:
            reply = door.ask("POST", "/models", b'{"model_name": "one", "url": "/somewhere"}')
            assert (reply.status, text in reply.body) == (400, True)
            assert door.ask("DELETE", "/models").status == 404
