"""Finding a model's file, importing its framework, reading its parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from remora.backends import Source
from remora.backends.model_files import (
    default_max_batch,
    get_bool,
    get_int,
    import_framework,
    load_failure,
    model_path,
    require_file,
)
from remora.errors import ConfigError, NotFoundError
from remora.system.install_advice import install_command
from support.engine.fakes import config_of


def source(tmp_path: Path) -> Source:
    (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
    return Source("m", 1, tmp_path / "m", tmp_path / "m" / "1", tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\b"])
def test_a_file_name_cannot_leave_the_version_directory(tmp_path: Path, name: str) -> None:
    config = config_of("")
    config.default_model_filename = name
    with pytest.raises(ConfigError, match="leaves the version's directory"):
        model_path(source(tmp_path), config, "model.x")


def test_a_missing_file_is_reported_with_those_that_exist(tmp_path: Path) -> None:
    made = source(tmp_path)
    (made.path / "net.x").touch()
    with pytest.raises(NotFoundError, match=r"unable to find '1/model.x' for model 'm', there is net.x: rename it"):
        require_file(model_path(made, config_of(""), "model.x"), made, "*.x")


def test_a_missing_framework_is_reported_with_the_line_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=rf"model 'm' needs Nothing, .*: {re.escape(install_command('nothing'))}"):
        import_framework("there_is_no_such_module", "m", "Nothing", "nothing")


def test_a_failure_to_load_shows_no_path_of_this_machine_and_knows_git_lfs(tmp_path: Path) -> None:
    made = source(tmp_path)
    file = made.path / "model.x"
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    text = str(load_failure(made, file, f"no good:\n {file} and {file.parent}/other"))
    assert text == (
        "model 'm': cannot load '1/model.x': no good: 1/model.x and other; the file is a Git LFS pointer: "
        "run git lfs pull"
    )


def test_parameters_come_before_settings_and_are_checked() -> None:
    config = config_of('name: "m" parameters { key: "A" value { string_value: "true" } }')
    assert get_bool(config, {"A": "false"}, "A", default=False)
    assert not get_bool(config, {"B": "false"}, "B", default=True)
    assert get_int(config, {"N": " 3 "}, "N") == 3
    assert get_int(config, {}, "N") == 0
    with pytest.raises(ConfigError, match="must be 1, 0, true or false"):
        get_bool(config, {"C": "yes"}, "C", default=True)
    with pytest.raises(ConfigError, match="must be a whole number"):
        get_int(config, {"N": "-1"}, "N")
    with pytest.raises(ConfigError, match="default-max-batch-size"):
        default_max_batch({"default-max-batch-size": "many"})


def test_a_damaged_file_is_named_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"0" * 3000)
    source = Source("m", 1, tmp_path, path, tmp_path)
    text = str(load_failure(source, path, "[ONNXRuntimeError] : 7 : Protobuf parsing failed."))
    assert text.endswith("; the file is incomplete or of another format: it has 3,000 bytes")
