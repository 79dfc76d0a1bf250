"""Python files as repositories: what is one, and how changes are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora import Engine
from remora.errors import InternalError, NotFoundError, UnavailableError
from remora.repository.functions import function_repository
from remora.repository.sources import function_source, open_repository
from remora.repository.written import WrittenRepository
from support.process.small_wheels import write_wheel

APP = "import remora\n\n@remora.model(isolation='thread')\ndef scale(x: float) -> float:\n    return {factor} * x\n"


def _write(file: Path, text: str, age_s: float = 0.0) -> None:
    file.write_text(text)
    if age_s:
        os.utime(file, (1e9 + age_s, 1e9 + age_s))


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "app.py"
    _write(file, APP.format(factor=2), 1)
    return file


@pytest.mark.parametrize("place", ["a/app.py", "app.py:f", "app.py:f,g", "module:f", "package.module:f,g"])
def test_files_and_modules_are_sources(place: str) -> None:
    assert function_source(place) == place


@pytest.mark.parametrize("place", ["models", "model.onnx", "s3://bucket/app.py.zip", "a/b", "C:\\models", "1"])
def test_other_places_are_not(place: str) -> None:
    assert function_source(place) == ""


def test_a_directory_with_an_app_is_a_source(app: Path) -> None:
    assert function_source(str(app.parent)) == str(app)
    assert isinstance(open_repository(app.parent, any_layout=True), WrittenRepository)
    assert not isinstance(open_repository(app.parent), WrittenRepository)


def test_a_directory_whose_app_declares_no_model_is_a_repository(app: Path) -> None:
    app.write_text("import fastapi\n\napp = fastapi.FastAPI()\n")
    assert function_source(str(app.parent)) == ""


def test_a_file_for_tritons_backend_is_not(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("class TritonPythonModel: ...")
    assert function_source(str(file)) == ""
    file.write_text("import remora")
    assert function_source(str(file)) == str(file)


def test_models_are_listed_and_fetched(app: Path) -> None:
    repository = function_repository(str(app))
    assert list(repository.models()) == ["scale"]
    assert list(repository.models("scale")) == ["scale"]
    assert repository.models("other") == {}
    folder = repository.fetch("scale")
    assert folder.filenames(1) == ("model.py",)
    assert repository.fingerprint("scale").keys() == {"config.json", "1/model.py"}
    assert repository.location == str(app)


def test_the_only_model_takes_the_configured_name(app: Path) -> None:
    assert list(function_repository(str(app), bare_name="other").models()) == ["other"]


def test_an_unchanged_file_is_not_imported_again(app: Path) -> None:
    repository = function_repository(str(app))
    repository.models()
    before = repository.fingerprint("scale")
    repository.models()
    assert repository.fingerprint("scale") == before


def test_a_changed_file_is_imported_again_while_the_old_files_stay(app: Path) -> None:
    repository = function_repository(str(app))
    (old,) = repository.models()["scale"]
    before = repository.fingerprint("scale")
    _write(app, APP.format(factor=3) + "\n@remora.model\ndef more(x: int) -> int:\n    return x\n", 2)
    assert list(repository.models()) == ["more", "scale"]
    assert repository.fingerprint("scale") != before
    assert old.versions[1].joinpath("model.py").is_file()


def test_a_change_that_fails_is_reported_once_and_the_models_stay(app: Path) -> None:
    repository = function_repository(str(app))
    repository.models()
    _write(app, "import nowhere_at_all\n", 2)
    with pytest.raises(UnavailableError, match="No module named 'nowhere_at_all'"):
        repository.models()
    assert list(repository.models()) == ["scale"]
    _write(app, APP.format(factor=4), 3)
    assert list(repository.models()) == ["scale"]


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no such file or directory: '.*gone\.py'"):
        function_repository(str(tmp_path / "gone.py:f")).models()
    with pytest.raises(NotFoundError, match="there is no model 'f'"):
        function_repository(str(tmp_path / "gone.py")).fetch("f")


# -- requirements.txt beside the file ---------------------------------------------------------------------------------

PACKED = """
import remora
import remora_probe

@remora.model
def answer(x: int) -> int:
    return x + remora_probe.ANSWER

@remora.model
def double(x: int) -> int:
    return 2 * x

both = remora.Pipeline(answer.wire(x="x", output="y"), double.wire(x="y", output="z"))
"""


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A file that imports a package of its requirements, which only a folder of wheels has."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "remora-probe", "1.2", "ANSWER = 42\n")
    (tmp_path / "requirements.txt").write_text("--no-index\n--find-links wheels\nremora-probe>=1\n")
    file = tmp_path / "app.py"
    file.write_text(PACKED)
    return file


def test_a_file_is_imported_and_run_with_the_packages_of_its_requirements(
    packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = f"python,environment-cache-directory={tmp_path / 'cache'}"
    with (
        caplog.at_level("INFO", logger="remora.models"),
        Engine(paths=[packed], backend_config=(setting,)) as engine,
    ):
        assert engine.infer("both", {"x": [1]})["z"].item() == 86
    assert f"'{tmp_path}': making an environment for {packed.with_name('requirements.txt')}" in caplog.text
    assert f"'{tmp_path}': installing remora" in caplog.text
    assert len([each for each in (tmp_path / "cache").iterdir() if each.is_dir()]) == 1


def test_every_function_has_the_requirements_and_a_pipeline_has_none(packed: Path, tmp_path: Path) -> None:
    settings = {"environment-cache-directory": str(tmp_path / "cache")}
    repository = function_repository(f"{packed}:both", settings=settings)
    assert sorted(repository.models()) == ["answer", "both", "double"]
    assert "requirements.txt" in repository.fingerprint("answer")
    assert "requirements.txt" not in repository.fingerprint("both")


def test_requirements_that_are_met_need_no_environment(app: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy>=1\n")
    repository = function_repository(str(app), settings={"environment-cache-directory": str(tmp_path / "cache")})
    assert list(repository.models()) == ["scale"]
    assert not (tmp_path / "cache").exists()


def test_changed_requirements_are_a_change_of_the_models(app: Path, tmp_path: Path) -> None:
    repository = function_repository(str(app))
    repository.models()
    before = repository.fingerprint("scale")
    _write(tmp_path / "requirements.txt", "numpy>=1\n", 2)
    repository.models()
    assert repository.fingerprint("scale") != before


def test_requirements_that_cannot_be_installed_fail_the_scan(app: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("--no-index\nremora-probe-that-is-nowhere\n")
    repository = function_repository(str(app), settings={"environment-cache-directory": str(tmp_path / "cache")})
    with pytest.raises(InternalError, match=r"cannot install .*requirements.txt of '.*remora-probe-that-is-nowhere"):
        repository.models()
