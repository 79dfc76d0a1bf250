"""Python files as repositories: what is one, and how changes are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remora.errors import NotFoundError, UnavailableError
from remora.repository.functions import function_repository
from remora.repository.sources import function_source, open_repository
from remora.repository.written import WrittenRepository

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
