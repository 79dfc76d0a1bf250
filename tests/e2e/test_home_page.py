"""The page at / in a real browser: forms, answers, errors, streams, code, and a narrow screen."""

from __future__ import annotations

import _ctypes
import hashlib
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, free_ports
from support.models.generation_models import tiny
from support.process.eventually import eventually
from support.servers.live_server import client, process, until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
PYTHON = os.environ.get("BROWSER_PYTHON", "")
SCREENSHOTS = ROOT / "build" / "screenshots"
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs an environment with playwright: make test-browser"),
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium"),
]

APP = """
import pathlib
import threading
import typing

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

class Mood(typing.NamedTuple):
    label: list[str]
    score: list[float]

@remora.model(batch=8, isolation="thread")
def mood(text: list[str]) -> Mood:
    return Mood(["<happy>"] * len(text), [0.75] * len(text))

@remora.model(isolation="thread")
def turn(picture: bytes) -> bytes:
    return picture

@remora.model(isolation="thread")
def speak(text: str) -> bytes:
    return (pathlib.Path(__file__).parent / "sound.wav").read_bytes()

@remora.model(isolation="thread")
def hear(sound: remora.Array[np.float32, -1]) -> int:
    return len(sound)

@remora.model(isolation="thread")
def endless(n: int):
    while not threading.Event().wait(0.01):
        yield {"n": n}
"""
TOTAL_TESTS = {
    "tests": [
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [2, 1], "data": [6, 15]}],
        }
    ]
}
SOUND_S = 0.5
KEY = "the-key-of-ann"


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"\x80" * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _wav() -> bytes:
    """Return half a second of a tone, 8,000 samples a second."""
    rate = 8000
    samples = b"".join(struct.pack("<h", int(8000 * math.sin(number / 3))) for number in range(int(SOUND_S * rate)))
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"fmt " + head + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@contextmanager
def _served(models: Path, *flags: str, **variables: str) -> Iterator[int]:
    """Serve models with more environment variables, and yield the port once the server is ready."""
    (port,) = free_ports(1)
    with process(models, port, {**os.environ, **variables}, *flags) as server:
        until(port, "/v2/health/ready", server)
        yield port


def _visit(kind: str, port: int, kept: Path, *more: str) -> str:
    """Return what a visit printed; see `home_page_browser`."""
    script = [
        PYTHON,
        str(ROOT / "tests" / "support" / "programs" / "home_page_browser.py"),
        kind,
        f"http://127.0.0.1:{port}/",
        str(kept),
    ]
    kept.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([*script, CHROMIUM, *more], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a visit to the page shows."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "app.py").write_text(APP)
    (folder / "total.tests.json").write_text(json.dumps(TOTAL_TESTS))
    (folder / "picture.png").write_bytes(_png(5, 3))
    (folder / "sound.wav").write_bytes(_wav())
    traced = f"--trace-config=triton,file={folder}/traces.json"
    with _served(folder / "app.py", traced, "--allow-metrics=true") as port:
        found: dict[str, Any] = json.loads(_visit("models", port, SCREENSHOTS, str(folder)))
        found["ran"] = {
            name: _ran(command, found[name]) for name, (program, command) in LANGUAGES.items() if shutil.which(program)
        }
    return found


LANGUAGES = {
    "curl": ("curl", ["bash"]),
    "plain JSON": ("curl", ["bash"]),
    "Python": (sys.executable, [sys.executable]),
    "tritonclient": (sys.executable, [sys.executable]),
    "JavaScript": ("node", ["node", "--input-type=module"]),
}
"""The program that the code of each tab needs, and the command that runs the code from its standard input."""


def _ran(command: list[str], code: str) -> str:
    """Return what copied code prints, or the error."""
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else done.stderr


FLOWER_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 3 }
output { name: "Y" data_type: TYPE_FP32 dims: 3 }
"""
FLOWER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in arrays]
"""
MEANING_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "VECTOR" data_type: TYPE_FP32 dims: 3 }
"""
MEANING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()
            rows = np.array([[len(text), text.count(b"e"), 1] for text in texts], np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", rows)]))
        return answers
"""


@pytest.fixture(scope="module")
def chatted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a visit to the page of a server with a language model and embeddings shows."""
    models = tmp_path_factory.mktemp("language") / "models"
    tiny(models)
    for name, config, code in (("meaning", MEANING_CONFIG, MEANING), ("flower", FLOWER_CONFIG, FLOWER)):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(config)
        (models / name / "1" / "model.py").write_text(code)
    (models / "flower" / "labels.txt").write_text("rose\ntulip\niris\n")
    controlled = ("--model-control-mode=explicit", "--load-model=*")
    with _served(models, "--openai", "--allow-metrics=true", *controlled) as port:
        found: dict[str, Any] = json.loads(_visit("openai", port, SCREENSHOTS))
        eventually(lambda: _rows(port, "vllm:num_requests_running") == [0])
        found["aborted"] = sum(_rows(port, "vllm:request_success_total", 'finished_reason="abort"'))
    return found


PYNVML = """
from types import SimpleNamespace

def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return f"GPU-{index}"
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetName(handle): return "H200"
def nvmlDeviceGetCudaComputeCapability(handle): return [9, 0]
def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=80 << 30, used=(20 if handle == "GPU-0" else 10) << 30)
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=37, memory=5)
def nvmlDeviceGetPowerUsage(handle): return 65_000
def nvmlDeviceGetEnforcedPowerLimit(handle): return 700_000
def nvmlDeviceGetTotalEnergyConsumption(handle): return 1_000
"""


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page shows of a server with two GPUs; the driver's library and the module of NVML are stand-ins."""
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "pynvml.py").write_text(PYNVML)
    (folder / "libnvidia-ml.so.1").symlink_to(_ctypes.__file__)
    (folder / "app.py").write_text(README_APP)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": path}
    with _served(folder / "app.py", "--allow-metrics=true", **environment) as port:
        found: dict[str, Any] = json.loads(_visit("gpus", port, SCREENSHOTS))
    return found


def _rows(port: int, name: str, label: str = "") -> list[float]:
    """Return the values of a metric, of the rows with a label."""
    with client(port) as connection:
        connection.request("GET", "/v2/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(name + "{") and label in line]


def test_a_model_chosen_again_keeps_what_was_typed_and_a_view_takes_no_input_while_another_loads(
    seen: dict[str, Any],
) -> None:
    assert seen["typed"] == ["[[7, 8, 9]]", True]


def test_all_models_are_listed_with_their_state(seen: dict[str, Any]) -> None:
    assert len(seen["models"]) == 11
    assert all("ready" in each for each in seen["models"])


def test_numbers_are_sent_and_the_answer_is_a_table(seen: dict[str, Any]) -> None:
    assert "6\n15" in seen["numbers"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_copied_code_of_the_request_runs(seen: dict[str, Any], language: str) -> None:
    if language not in seen["ran"]:
        pytest.skip(f"{LANGUAGES[language][0]} is not installed")
    assert re.search(r"\b6(\.0?)?[],\s[]+15\b", seen["ran"][language]), seen["ran"][language]


def test_the_plain_request_has_one_list_for_each_row(seen: dict[str, Any]) -> None:
    assert seen["plain JSON"].endswith("""/models/total -d '{"x":[[1,2,3],[4,5,6]]}'""")


def test_models_are_read_only_unless_their_control_is_allowed(seen: dict[str, Any], chatted: dict[str, Any]) -> None:
    assert seen["controls"] == 0
    assert re.search(r"flower.*\n?.*unavailable", chatted["unloaded"])


def test_classes_are_bars_with_their_labels(seen: dict[str, Any], chatted: dict[str, Any]) -> None:
    assert seen["scores"].split("\n")[:2] == ["<happy>", "0.750"]
    shown = [line for line in chatted["labels"].split("\n") if line]
    assert shown[1:8] == ["row 1", "tulip", "3.00", "iris", "2.00", "rose", "1.00"]
    assert shown[8:11] == ["row 2", "iris", "6.00"]


def test_the_form_begins_with_the_first_golden_test(seen: dict[str, Any]) -> None:
    assert seen["first"] == "[[1,2,3],[4,5,6]]"


def test_a_wrong_value_and_a_refusal_are_shown_as_text(seen: dict[str, Any]) -> None:
    assert "x: expected numbers" in seen["invalid"]
    assert "400: not <today>" in seen["refused"]


def test_the_text_of_an_answer_is_never_markup(seen: dict[str, Any]) -> None:
    assert "<IMG SRC=X ONERROR=ALERT(1)>!" in seen["text"]
    assert seen["injected"] == 0


def test_a_stream_json_probabilities_and_images_are_drawn(seen: dict[str, Any]) -> None:
    assert '{"index":0}\n{"index":1}\n' in seen["stream"].replace(" ", "")
    assert "3 events" in seen["stream"]
    assert '"a",\n  "b"' in seen["json"]
    assert seen["probabilities"].count("0.250") == 4
    assert seen["image"] == [5, 3]


def test_the_page_needs_no_other_place_and_has_no_errors(seen: dict[str, Any]) -> None:
    assert seen["elsewhere"] == []
    assert seen["errors"] == []


def test_sound_is_played_and_a_file_of_sound_becomes_samples(seen: dict[str, Any]) -> None:
    assert seen["spoken_s"] == pytest.approx(SOUND_S)
    assert int(seen["heard"]) == pytest.approx(SOUND_S * 16_000, rel=0.01)


def test_a_stream_can_be_stopped_which_frees_its_instance(seen: dict[str, Any]) -> None:
    assert "stopped" in seen["stopped"]


def test_charts_show_rate_latency_queue_and_batches(seen: dict[str, Any]) -> None:
    names = ["Requests per second", "Latency, ms", "Requests", "Rows of a batch, mean", "batches by rows"]
    assert list(seen["charts"]) == names
    server = seen["server"]
    for name in (
        "Memory of the server, MiB",
        "Memory of all processes, MiB",
        "Processors, %",
        "Open connections",
        "Requests per second",
        "Latency, ms",
    ):
        assert name in server


def test_the_last_traces_are_bars_with_the_time_of_each_phase(seen: dict[str, Any]) -> None:
    for phase in ("HTTP, total/1", "receive", "queue", "compute", "send", "µs"):
        assert phase in seen["traces"]
    assert "total/1" in seen["server"]


def test_the_page_can_be_used_by_the_keyboard_alone(seen: dict[str, Any]) -> None:
    reached = [each for each in seen["keyboard"] if each]
    for name in ("server-view", "input-x", "Send", "curl", "Copy", "Explain this model", "Show the last traces"):
        assert any(each.startswith(name) for each in reached), (name, reached)


def test_a_chat_streams_stops_and_frees_its_row(chatted: dict[str, Any]) -> None:
    question, answer = chatted["chat"]
    assert question == "What is two plus two?"
    assert answer
    assert chatted["attempts"]
    assert chatted["aborted"] >= 1
    assert chatted["continued"][0] == "The baker"
    assert (chatted["errors"], chatted["elsewhere"]) == ([], [])
    assert (SCREENSHOTS / "chat.png").stat().st_size > 5_000


def test_answers_of_openais_routes_are_in_the_charts_and_counts(chatted: dict[str, Any]) -> None:
    assert re.search(r"answered\s+[1-9]", chatted["live"])
    assert re.search(r"stopped\s+[1-9]", chatted["live"])
    charts = chatted["charts"]
    assert list(charts) == ["Requests per second", "Latency, ms", "Requests", "First token, ms", "Tokens per second"]
    assert re.match(r"p50 \d", charts["First token, ms"])
    most = float(re.search(r"at most ([\d.]+)", charts["Tokens per second"])[1])  # type: ignore[index]
    assert most > 0
    assert "at most 0.0 " not in chatted["embeddings"]["Requests per second"]


def test_gpus_have_charts_of_their_use_and_memory(gpus: dict[str, Any]) -> None:
    charts = gpus["charts"]
    assert charts["GPU 0, %"].startswith("37, ")
    assert charts["GPU 0, memory, MiB"].startswith("20480, ")
    assert charts["GPU 1, memory, MiB"].startswith("10240, ")
    assert (gpus["errors"], gpus["elsewhere"]) == ([], [])


def test_without_traces_the_page_says_how_to_turn_them_on(chatted: dict[str, Any]) -> None:
    assert "--trace-config level=TIMESTAMPS" in chatted["traces"]


def test_embeddings_are_compared_by_their_cosines(chatted: dict[str, Any]) -> None:
    cells = [float(each) for each in chatted["cosines"] if each]
    assert len(cells) == 9
    assert cells[0] == cells[1] == cells[4] == 1
    assert cells[2] == cells[6] < 1


@pytest.fixture(scope="module")
def signed_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a visit to the page of a server that requires an API key shows."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "app.py").write_text(APP)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "keys.json").write_text(json.dumps({"keys": [{"name": "ann", "roles": ["all"], "sha256": digest}]}))
    with _served(folder / "app.py", f"--api-keys-file={folder}/keys.json") as port:
        found: dict[str, Any] = json.loads(_visit("keys", port, SCREENSHOTS, KEY))
    return found


def test_without_a_key_the_page_shows_no_data_and_asks_for_one(signed_in: dict[str, Any]) -> None:
    title, models, text = signed_in["before"]
    assert (title, models) == ("remora", 0)
    assert "total" not in text


def test_a_wrong_key_is_refused_and_a_right_one_opens_models_and_pages(signed_in: dict[str, Any]) -> None:
    assert "the API key is not valid on this server" in signed_in["refused"]
    assert "6" in signed_in["answer"]
    assert "total" in signed_in["docs"]
    assert any(link.endswith("/v2/status") for link in signed_in["links"])
    assert (signed_in["errors"], signed_in["elsewhere"]) == ([], [])


def test_a_link_is_shown_here_unless_another_view_or_tab_is_chosen(signed_in: dict[str, Any]) -> None:
    assert signed_in["kept"]
    assert signed_in["taken over"] == []


def test_requests_wait_while_a_key_is_asked_for(signed_in: dict[str, Any]) -> None:
    assert signed_in["sent meanwhile"] == [KEY, KEY]


def test_the_key_stays_in_the_tab_and_goes_to_this_server_in_a_header(signed_in: dict[str, Any]) -> None:
    assert signed_in["stores"] == [1, 0, ""]
    assert {key for _, key in signed_in["sent"]} == {None, "wrong", KEY}
    assert not [url for url, _ in signed_in["sent"] if KEY in url or "wrong" in url]
    wrong = [url for url, key in signed_in["sent"] if key == "wrong"]
    assert len(wrong) <= 3  # it is not sent again and again, because wrong keys are limited
    assert signed_in["after"] == [0, 0]


def test_a_narrow_screen_needs_no_sideways_scrolling(seen: dict[str, Any]) -> None:
    assert seen["narrow_width"] == 360
    assert seen["narrow_server_width"] == 360
    assert (SCREENSHOTS / "wide.png").stat().st_size > 10_000
    assert (SCREENSHOTS / "narrow.png").stat().st_size > 5_000


def test_the_colours_follow_the_system(seen: dict[str, Any]) -> None:
    light, dark = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in seen["backgrounds"])
    assert dark < 150 < 600 < light


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
    with _served(tmp_path / "app.py") as port:
        with client(port) as connection:
            for number in range(400):
                connection.request("POST", "/models/distance", json.dumps({"points": [[3, number]] * (number % 5 + 1)}))
                assert connection.getresponse().read()
        _visit("pictures", port, tmp_path)
    for name in PICTURES:
        assert 5_000 < (tmp_path / name).stat().st_size < 150_000
        if os.environ.get("KEEP_PICTURES"):
            IMAGES.mkdir(exist_ok=True)
            shutil.copyfile(tmp_path / name, IMAGES / name)
