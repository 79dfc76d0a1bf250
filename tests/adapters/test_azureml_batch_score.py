"""The scoring script of batch deployments, driven as Azure's executor drives it: init once, then run per mini-batch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora_adapters.azureml import batch_score
from support.servers.hosting import write_scale, write_words

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

Run = Callable[[Any], list[str]]
ROWS = np.arange(20, dtype=np.float32).reshape(5, 4)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    mounted = tmp_path / "scale" / "1"
    write_scale(mounted / "repository" / "scale", config="max_batch_size: 2")
    monkeypatch.setenv("AZUREML_MODEL_DIR", str(mounted))
    batch_score.init()
    yield batch_score.run
    batch_score._engine.pop().stop()


def request_of(rows: np.ndarray[Any, Any]) -> str:
    given = {"name": "x", "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    return json.dumps({"inputs": [given]})


def test_each_file_of_a_mini_batch_is_one_answer(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    np.savetxt(tmp_path / "b.csv", ROWS[:2], delimiter=",")
    (tmp_path / "c.json").write_text(request_of(ROWS[:1]))
    answers = [json.loads(line) for line in run([str(tmp_path / name) for name in ("a.npy", "b.csv", "c.json")])]
    assert [each["file"] for each in answers] == ["a.npy", "b.csv", "c.json"]
    for answer, rows in zip(answers, (ROWS, ROWS[:2], ROWS[:1]), strict=True):
        assert answer["outputs"] == {"y": (rows * 2).tolist()}, "rows beyond the batch size are split and put together"


def test_files_that_fail_are_logged_and_left_out(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.save(tmp_path / "good.npy", ROWS)
    np.save(tmp_path / "narrow.npy", ROWS[:, :3])
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "image.png").write_bytes(b"png")
    names = ["narrow.npy", "pickled.npy", "broken.json", "other.json", "image.png", "missing.csv"]
    with caplog.at_level(logging.ERROR, "remora.azureml"):
        answers = run([str(tmp_path / name) for name in [*names, "good.npy"]])
    assert [json.loads(line)["file"] for line in answers] == ["good.npy"]
    for name in names:
        assert any(record.getMessage().startswith(f"{name}: ") for record in caplog.records), name


def test_each_row_of_a_table_is_one_answer(run: Run) -> None:
    class Table:
        """The part of a DataFrame that the script reads."""

        def to_numpy(self) -> Any:
            return ROWS.astype(object)

    assert [json.loads(line) for line in run(Table())] == [{"y": row} for row in (ROWS * 2).tolist()]


def test_the_variable_selects_one_of_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scale(tmp_path / "models" / "scale")
    write_words(tmp_path / "models" / "words")
    monkeypatch.setenv("AZUREML_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("REMORA_DEFAULT_MODEL", "words")
    (tmp_path / "word.json").write_text(
        json.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["é"]}]})
    )
    batch_score.init()
    try:
        (answer,) = batch_score.run([str(tmp_path / "word.json")])
    finally:
        batch_score._engine.pop().stop()
    assert json.loads(answer)["outputs"] == {"y": ["é"]}


def test_a_copy_of_the_script_runs_in_a_process_of_its_executor(tmp_path: Path, child_environment: Any) -> None:
    write_scale(tmp_path / "models" / "scale")
    np.save(tmp_path / "a.npy", ROWS)
    copy = tmp_path / "code" / "batch_driver.py"
    copy.parent.mkdir()
    copy.write_text(Path(batch_score.__file__).read_text())
    program = "import batch_driver, sys; batch_driver.init(); print(*batch_driver.run(sys.argv[1:]), sep='\\n')"
    environment = {**child_environment, "AZUREML_MODEL_DIR": str(tmp_path / "models")}
    environment["PYTHONPATH"] = f"{copy.parent}:{environment['PYTHONPATH']}"
    words = [sys.executable, "-c", program, str(tmp_path / "a.npy")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"]["y"] == (ROWS * 2).tolist()
