"""The page at / in a real browser: forms, answers, errors, streams, code, and a narrow screen."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, free_ports
from live_server import client, process, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
PYTHON = os.environ.get("BROWSER_PYTHON", "")
SCREENSHOTS = ROOT / "build" / "screenshots"
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs an environment with playwright: make test-browser"),
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium"),
]

APP = """
import numpy as np
import remora

@remora.model(batch=8, isolation="thread")
def total(x: remora.Array[np.float32, -1, 3]) -> remora.Array[np.float32, -1]:
    return x.sum(axis=1)

@remora.model(isolation="thread")
def refuse(x: float) -> float:
    raise remora.BadRequestError("not <today>")

@remora.model(isolation="thread")
def shout(text: str, mark: str = "!") -> str:
    return text.upper() + mark

@remora.model(isolation="thread")
def count(n: int):
    for index in range(n):
        yield {"index": index}

@remora.model(isolation="thread")
def keys(value: dict) -> list:
    return sorted(value)

@remora.model(isolation="thread")
def spread(n: int) -> list[float]:
    return [1 / n] * n

@remora.model(isolation="thread")
def turn(picture: bytes) -> bytes:
    return picture
"""


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x80" * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a visit to the page shows."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "app.py").write_text(APP)
    (folder / "picture.png").write_bytes(_png(5, 3))
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    with process(folder / "app.py", port, dict(os.environ)) as server:
        until(port, "/v2/health/ready", server)
        script = [PYTHON, str(ROOT / "tests" / "home_page_browser.py"), f"http://127.0.0.1:{port}/", str(SCREENSHOTS)]
        done = subprocess.run(
            [*script, CHROMIUM, str(folder / "picture.png")], capture_output=True, text=True, check=False, timeout=240
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_models_are_listed_with_their_state(seen: dict[str, Any]) -> None:
    assert len(seen["models"]) == 7
    assert all("ready" in each for each in seen["models"])


def test_numbers_are_sent_and_the_answer_is_a_table(seen: dict[str, Any]) -> None:
    assert "6\n15" in seen["numbers"]


def test_the_request_is_shown_as_code_that_runs(seen: dict[str, Any]) -> None:
    assert '"data":[1,2,3,4,5,6]' in seen["curl"]
    assert '"data":[1,2,3,4,5,6]' in seen["JavaScript"]
    assert seen["plain JSON"].endswith("""/models/total -d '{"x":[[1,2,3],[4,5,6]]}'""")
    for language in ("Python", "tritonclient"):
        compile(seen[language], language, "exec")


def test_a_wrong_value_and_a_refusal_are_shown_as_text(seen: dict[str, Any]) -> None:
    assert "x: expected numbers" in seen["invalid"]
    assert "400: not <today>" in seen["refused"]


def test_the_text_of_an_answer_is_never_markup(seen: dict[str, Any]) -> None:
    assert "<IMG SRC=X ONERROR=ALERT(1)>!" in seen["text"]
    assert seen["injected"] == 0


def test_a_stream_json_probabilities_and_images_are_drawn(seen: dict[str, Any]) -> None:
    assert "3 events" in seen["stream"]
    assert '"a",\n  "b"' in seen["json"]
    assert seen["probabilities"].count("0.250") == 4
    assert seen["image"] == [5, 3]


def test_the_page_needs_no_other_place_and_has_no_errors(seen: dict[str, Any]) -> None:
    assert seen["elsewhere"] == []
    assert seen["errors"] == []


def test_a_narrow_screen_needs_no_sideways_scrolling(seen: dict[str, Any]) -> None:
    assert seen["narrow_width"] == 360
    assert (SCREENSHOTS / "wide.png").stat().st_size > 10_000
    assert (SCREENSHOTS / "narrow.png").stat().st_size > 5_000


def test_the_explanation_and_the_start_are_readable_tables(seen: dict[str, Any]) -> None:
    assert "Why batches ran" in seen["explain"]
    assert "{" not in seen["explain"]
    assert "Ready after" in seen["start"]
    assert "import of the server" in seen["start"]


def test_the_page_is_small_and_paints_at_once(seen: dict[str, Any]) -> None:
    assert seen["bytes"] < 150_000
    assert seen["first_paint_ms"] < 100


# -- pictures of the README -------------------------------------------------------------------------------------------

IMAGES = ROOT / "docs" / "images"
PICTURES = ("page.png", "explain.png")
README_APP = """
import numpy as np
import remora

@remora.model(batch=32, max_delay="1ms", isolation="thread")
def distance(points: remora.Array[np.float32, -1, 2]) -> remora.Array[np.float32, -1]:
    return np.hypot(points[:, 0], points[:, 1])
"""


def test_the_pictures_of_the_readme_can_be_taken_again(tmp_path: Path) -> None:
    """With KEEP_PICTURES they replace those in docs/images (`make pictures`)."""
    (tmp_path / "app.py").write_text(README_APP)
    (port,) = free_ports(1)
    with process(tmp_path / "app.py", port, dict(os.environ)) as server:
        until(port, "/v2/health/ready", server)
        with client(port) as connection:
            for number in range(400):
                connection.request("POST", "/models/distance", json.dumps({"points": [[3, number]] * (number % 5 + 1)}))
                assert connection.getresponse().read()
        script = [PYTHON, str(ROOT / "tests" / "home_page_browser.py"), f"http://127.0.0.1:{port}/", str(tmp_path)]
        done = subprocess.run([*script, CHROMIUM], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    for name in PICTURES:
        assert 5_000 < (tmp_path / name).stat().st_size < 150_000
        if os.environ.get("KEEP_PICTURES"):
            IMAGES.mkdir(exist_ok=True)
            shutil.copyfile(tmp_path / name, IMAGES / name)
