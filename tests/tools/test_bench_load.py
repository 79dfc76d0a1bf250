"""`remora bench load` against real servers, and against doubles that stall, fail and stream."""

from __future__ import annotations

import csv
import json
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import EXTRA_FLAGS, free_ports
from remora.cli import main
from remora.server.tls import make_self_signed
from support.models.load_models import write_counter
from support.process.eventually import eventually
from support.servers.live_server import CONFIG, write_version

SHORT = ("--duration=3", "--window=0.2", "--warm-up=0.1", "--quiet", "--json-out")
METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}


class Double(BaseHTTPRequestHandler):
    """Server of one model, which answers by ``act``, keeps the requests, and has the statistics of a list."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    act: Callable[[Double], None]
    bodies: list[tuple[int, bytes]]
    statistics: list[bytes]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = {"m": json.dumps(METADATA).encode(), "other": json.dumps(METADATA).encode(), "metrics": METRICS}
        name = self.path.removeprefix("/v2/models/").strip("/")
        if name == "m/stats" and self.statistics:
            found[name] = self.statistics.pop(0)
        self.reply(200 if name in found else 404, found.get(name, b"{}"))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        length = int(self.headers.get("Inference-Header-Content-Length", len(body)))
        self.bodies.append((self.client_address[1], body[:length]))
        type(self).act(self)

    def reply(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def double(
    act: Callable[[Double], None], statistics: Sequence[bytes] = ()
) -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    bodies: list[tuple[int, bytes]] = []
    fields = {"act": staticmethod(act), "bodies": bodies, "statistics": list(statistics)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("D", (Double,), fields))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients go away amid answers
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def bench(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["bench", "load", *SHORT, *words]) == code
    shown = capsys.readouterr()
    return json.loads(shown.out) if code == 0 else shown.err


@pytest.fixture(scope="module")
def server(digits: Any, serving: Any) -> Iterator[Any]:
    with serving(digits.models) as running:
        yield running


@pytest.mark.parametrize(
    "words",
    [(), ("--encoding=json",), ("--grpc",), ("--grpc", "--stream"), ("--processes=2",), ("--batch=3",), ("--rate=50",)],
    ids=str,
)
def test_a_real_server_is_measured_with_its_share(
    words: tuple[str, ...], server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "remora_tools.bench_load.usable_cpus", lambda: 2
    )  # a saturated generator gets no more processes
    words = tuple(word if word != "--grpc" else f"--grpc=127.0.0.1:{server.grpc}" for word in words)
    load = () if "--rate=50" in words else ("--concurrency=2,4",)
    levels = bench(capsys, "digits", "--url", f"http://127.0.0.1:{server.http}", *words, *load)
    assert len(levels) == len(load) + 1
    for level in levels:
        assert level["requests"] > 0
        assert level["failures"] == {}
        times = level["latency_us"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
        assert 0 < level["server_us"]["whole"] < level["latency_us"]["max"]
        assert level["server_rows_per_batch"] >= (3 if "--batch=3" in words else 1)
        assert level["generator"]["processes"] == (2 if "--processes=2" in words else 1)


DECOUPLED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for _ in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_grpc_stream_has_the_times_of_its_responses(
    tmp_path: Path, serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_version(tmp_path / "models", 1)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(
        CONFIG.replace("max_batch_size: 8", "") + "model_transaction_policy { decoupled: true }"
    )
    (tmp_path / "models" / "m" / "1" / "model.py").write_text(DECOUPLED)
    with serving(tmp_path / "models", "--backend-config=python,isolation=thread") as running:
        words = ("--url", f"http://127.0.0.1:{running.http}", f"--grpc=127.0.0.1:{running.grpc}")
        level = bench(capsys, "m", *words, "--stream")[0]
        assert level["failures"] == {}
        assert level["requests"] > 0
        assert 0 < level["first_event_us"]["p50"] <= level["latency_us"]["max"]
        assert "between_events_us" in level
        refused = bench(capsys, "m", *words, "--stream", "--version=1", "--input", "IN=1,2", code=1)
        assert "IN" in refused


@contextmanager
def _with_tls(models: Path, folder: Path, environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Start a server with a certificate on both ports and yield the ports of HTTP and gRPC."""
    cert, key = make_self_signed(folder)
    http, grpc = free_ports(2)
    flags = [f"--http-server-cert={cert}", f"--http-server-key={key}", f"--grpc-server-cert={cert}"]
    flags += [f"--grpc-server-key={key}", "--grpc-use-ssl=true", "--allow-metrics=false", *EXTRA_FLAGS]
    flags += [f"--http-port={http}", f"--grpc-port={grpc}", "--backend-config=python,isolation=thread"]
    command = [sys.executable, "-m", "remora", "serve", str(models), *flags]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    context = ssl.create_default_context(cafile=str(cert))

    def ready() -> bool:
        with urllib.request.urlopen(f"https://localhost:{http}/readyz", context=context) as reply:
            return bool(reply.status == 200)

    try:
        eventually(ready, process=server)
        yield http, grpc
    finally:
        server.kill()
        server.communicate()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl, which makes a certificate, is absent")
def test_servers_with_tls_are_measured(
    tmp_path: Path,
    child_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_version(tmp_path / "models", 1)
    with _with_tls(tmp_path / "models", tmp_path, child_environment) as (http, grpc):
        url = f"https://localhost:{http}"
        assert "certificate verify failed" in bench(capsys, "m", "--url", url, code=1)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "localhost-cert.pem"))
        for words in ((), (f"--grpc=grpcs://localhost:{grpc}",), (f"--grpc=grpcs://localhost:{grpc}", "--stream")):
            level = bench(capsys, "m", "--url", url, "--concurrency=2", *words)[0]
            assert (level["failures"], level["requests"] > 0) == ({}, True), words
        large = bench(capsys, "m", "--url", url, "--batch=8", f"--grpc=grpcs://localhost:{grpc}", "--stream")[0]
        assert large["server_rows_per_batch"] >= 8


def test_the_server_has_answered_what_is_reported(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def answered() -> int:
        url = f"http://127.0.0.1:{server.http}/v2/models/digits/stats"
        with urllib.request.urlopen(url) as reply:
            count = json.load(reply)["model_stats"][0]["inference_stats"]["success"]["count"]
        return int(count)

    before = answered()
    words = ("digits", "--url", f"http://127.0.0.1:{server.http}", "--concurrency=3", "--fixed", "--duration=1")
    level = bench(capsys, *words)[0]
    sent = answered() - before
    assert level["requests"] <= sent, "the warm-up counts only in the server"
    assert level["seconds"] >= 0.5


def test_results_are_written_as_csv_and_page(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--csv", str(tmp_path / "r.csv"), "--html", str(tmp_path / "r.html"))
    levels = bench(capsys, "digits", "--url", f"http://127.0.0.1:{server.http}", *words)
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [float(row["requests_per_s"]) for row in rows] == [level["requests_per_s"] for level in levels]
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_requests_come_from_a_file_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "requests.jsonl").write_text('{"x": [[1, 2]]}\n{"x": [[3, 4]]}\n')
    with double(lambda handler: handler.reply(200)) as (url, bodies):
        words = ("m", "--url", url, "--encoding=json", "--requests", str(tmp_path / "requests.jsonl"))
        level = bench(capsys, *words)[0]
    sent = [json.loads(body)["inputs"][0]["data"] for _, body in bodies]
    assert sent[:4] in ([[1.0, 2.0], [3.0, 4.0]] * 2, [[3.0, 4.0], [1.0, 2.0]] * 2)
    assert level["server_us"] == {}, "a server without statistics is measured all the same"


def test_an_open_loop_counts_the_time_that_requests_wait_for_a_stalled_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One answer stalls; a closed view sees one slow request, the schedule sees all that were due meanwhile."""
    pause, lock, count = threading.Event(), threading.Lock(), [0]

    def act(handler: Double) -> None:
        with lock:
            count[0] += 1
            if count[0] == 30:
                pause.wait(0.6)
        handler.reply(200)

    with double(act) as (url, _):
        words = ("m", "--url", url, "--rate=100", "--arrivals=constant", "--connections=1", "--fixed", "--duration=1.6")
        level = bench(capsys, *words)[0]
    assert level["latency_us"]["max"] >= 590_000
    assert level["latency_us"]["p90"] >= 1.5 * level["service_us"]["p90"]
    assert level["latency_us"]["mean"] >= level["service_us"]["mean"] + 50_000


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_have_ids_and_their_first_and_last_requests_are_marked(
    length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with double(lambda handler: handler.reply(200)) as (url, bodies):
        bench(capsys, "m", "--url", url, f"--sequence={length}", "--concurrency=2")
    by_connection: dict[int, list[dict[str, Any]]] = {}
    for port, body in bodies:
        by_connection.setdefault(port, []).append(json.loads(body)["parameters"])
    assert len(by_connection) == 2
    ids = [
        {each["sequence_id"] for each in sent[place : place + length]}
        for sent in by_connection.values()
        for place in range(0, len(sent) - length + 1, length)
    ]
    assert all(len(each) == 1 for each in ids)
    assert len(set.union(*ids)) == len(ids), "each sequence has another id"
    for sent in by_connection.values():
        flags = [(each["sequence_start"], each["sequence_end"]) for each in sent]
        places = [number % length for number in range(len(sent))]
        assert flags == [(place == 0, place == length - 1) for place in places]


@pytest.mark.parametrize(
    ("seed", "words"), [(1, ()), (2, ("--encoding=json",)), (3, ("--grpc",)), (4, ("--grpc", "--stream"))], ids=str
)
def test_a_server_gets_whole_sequences(
    seed: int, words: tuple[str, ...], sequences: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each load has another seed, because the last one has left sequences open."""
    words = tuple(word if word != "--grpc" else f"--grpc=127.0.0.1:{sequences.grpc}" for word in words)
    url = f"http://127.0.0.1:{sequences.http}"
    level = bench(capsys, "m", "--url", url, "--sequence=3", "--concurrency=3", f"--seed={seed}", *words)[0]
    assert level["failures"] == {}
    assert level["requests"] > 3
    wrong = bench(capsys, "m", "--url", url, "--sequence=4", f"--seed={seed + 10}", *words)[0]
    assert sum(wrong["failures"].values()) > 0, "the model counts the requests of a sequence"


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("sequences") / "models"
    write_counter(models, "m", length=3)
    with serving(models, "--backend-config=python,isolation=thread") as running:
        yield running


def test_a_failed_request_ends_its_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    with double(lambda handler: handler.reply(503)) as (url, bodies):
        bench(capsys, "m", "--url", url, "--sequence=3", code=1)
    assert len(bodies) > 1
    assert all(json.loads(body)["parameters"]["sequence_start"] for _, body in bodies)


def test_the_models_of_a_mix_get_requests_by_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    paths: list[str] = []

    def act(handler: Double) -> None:
        paths.append(handler.path)
        handler.reply(200)

    with double(act) as (url, _):
        bench(capsys, "m=3", "other", "--url", url)
    names = "".join(path.split("/")[3][0] for path in paths)
    assert "mommm" in names or "mmomm" in names
    assert abs(names.count("m") - 3 * names.count("o")) <= 3


METRICS = b'nv_cpu_utilization 0.5\nnv_gpu_utilization{gpu_uuid="a"} 0.25\n'


def test_the_use_of_the_machine_comes_from_the_metrics(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with double(lambda handler: handler.reply(200)) as (url, _):
        words = ("m", "--url", url, "--metrics-url", f"{url}/metrics")
        assert bench(capsys, *words)[0]["machine"] == {"cpu %": 50.0, "gpu %": 25.0}
        assert bench(capsys, "m", "--url", url)[0]["machine"] == {}
        assert "404" in bench(capsys, *words[:3], "--metrics-url", f"{url}/absent", code=1)
    url = f"http://127.0.0.1:{server.http}"
    machine = bench(capsys, "digits", "--url", url, "--metrics-url", f"http://127.0.0.1:{server.metrics}/metrics")
    assert 0 <= machine[0]["machine"]["cpu %"] <= 100
    assert machine[0]["machine"]["memory MiB"] > 0


def test_a_server_whose_statistics_cannot_be_read_once_has_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"success": {"count": 1_000_000, "ns": 10**12}}
    row = {"inference_stats": times, "execution_count": 10, "inference_count": 10}
    whole = json.dumps({"model_stats": [row]}).encode()
    damaged: list[Any] = [row | {"inference_count": "none"}]
    for first in (b"", b"{}", json.dumps({"model_stats": damaged}).encode()):
        with double(lambda handler: handler.reply(200), [first, *[whole] * 5]) as (url, _):
            assert bench(capsys, "m", "--url", url)[0]["server_us"] == {}


def test_windows_are_shown_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with double(lambda handler: handler.reply(200)) as (url, _):
        words = ["bench", "load", "m", "--url", url, *SHORT[:2], "--warm-up=0.2", "--rate=50", "--connections=2"]
        assert main(words) == 0
        assert "window" not in capsys.readouterr().err, "a log gets no line that is rewritten"
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert main(words) == 0
    shown = capsys.readouterr().err
    assert "\r50/s poisson, warm-up: " in shown
    assert "\r50/s poisson, window 1: " in shown
    assert "req/s, p99 " in shown


def test_a_saturated_generator_gets_more_processes_and_says_when_there_are_no_more(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any use of a processor counts as saturation here, so that a fast machine takes part, too."""
    monkeypatch.setattr("remora_tools.bench_load._SATURATED", 1e-9)
    monkeypatch.setattr("remora_tools.bench_load.usable_cpus", lambda: 4)
    words = ["bench", "load", "digits", "--url", f"http://127.0.0.1:{server.http}", "--concurrency=8", *SHORT[:3]]
    assert main([*words, "--json-out"]) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.err.splitlines() if "again" in line] == [
        "the generator is saturated: again with 2 processes",
        "the generator is saturated: again with 3 processes",
    ]
    (level,) = json.loads(shown.out)
    assert level["generator"]["processes"] == 3
    assert level["notes"][0].startswith("the generator is saturated (")


def test_failures_are_counted_by_reason_and_do_not_count_as_answers(capsys: pytest.CaptureFixture[str]) -> None:
    number = [0]

    def act(handler: Double) -> None:
        number[0] += 1
        if number[0] % 3 == 0:
            handler.reply(503)
        elif number[0] % 3 == 1:
            handler.close_connection = True
            handler.connection.close()
        else:
            handler.reply(200)

    with double(act) as (url, _):
        level = bench(capsys, "m", "--url", url)[0]
    assert level["requests"] > 0
    assert level["failures"]["HTTP 503"] > 0
    assert sum(level["failures"].values()) > level["failures"]["HTTP 503"]


def test_any_path_is_measured_and_streams_have_times_of_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "body.json").write_text('{"stream": true}')

    def act(handler: Double) -> None:
        handler.reply(200, b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n", Content_Type="text/event-stream")

    with double(act) as (url, bodies):
        words = ("--path=/v1/completions", "--body", str(tmp_path / "body.json"), "--url", url)
        level = bench(capsys, *words)[0]
    assert json.loads(bodies[0][1]) == {"stream": True}
    assert 0 < level["first_event_us"]["p50"] <= level["latency_us"]["max"]
    assert "between_events_us" in level


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), 2, "expected a MODEL, or --path"),
        (("m", "--rate=5", "--concurrency=1"), 2, "choose --concurrency (closed loop) or --rate"),
        (("m", "other", "--sequence=2"), 2, "--sequence takes one MODEL, without --path"),
        (("m", "--url=http://127.0.0.1:1"), 1, "cannot connect to http://127.0.0.1:1"),
        (("--path=/x", "--url=http://127.0.0.1:1"), 1, "cannot connect to 127.0.0.1:1: Connection refused"),
        (("--path=/x", "--url=ftp://h"), 2, "--url: expected http://HOST:PORT"),
        (("--path=/x", "--grpc=h"), 2, "--grpc: expected HOST:PORT"),
        (("--path=/x", "--grpc=grpcs://u:pw@h:1"), 2, "--grpc: expected HOST:PORT or grpcs://HOST:PORT without user"),
        (("--path=/x", "--grpc=http://h:1"), 2, "expected HOST:PORT or grpcs://HOST:PORT"),
        (("m", "--stream"), 2, "--stream needs --grpc"),
    ],
)
def test_a_wrong_call_is_explained(
    words: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in bench(capsys, *words, code=code)


def test_a_weight_of_a_mix_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "load", "m=0"])
    assert "expected a number from 1 to 99999 after MODEL=, got 'm=0'" in capsys.readouterr().err
