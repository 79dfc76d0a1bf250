"""Models out of buckets: how fast they come, what a second start costs, and what round trips cost a first one.

Ratios of pairs measured one after the other, medians. The storage is moto (where `make test-storage` has installed it)
for the speed of downloads, and the tests' own double where time is to be added.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, first_answer_ms, free_port
from models import mlp
from remora.storage import Secret
from remora.storage.cache import ModelCache
from remora.storage.credentials import AwsKeys, StorageSettings
from remora.storage.downloads import ranges_of
from remora.storage.location import parse_location
from remora.storage.objects import ObjectStorage
from support.servers.object_store import ObjectStore, Seen, object_store

HERE = Path(__file__).resolve().parent
MOTO = HERE.parent / ".venv-storage" / "bin" / "python"
ROUNDS = 5
SIZE = 200_000_000
TRIP_S = 0.03
THROTTLE_BYTES_PER_S = 25e6
"""A gigabyte in 40 s: what people report of pods that fetch their models is slower still."""


def settings(url: str) -> StorageSettings:
    return StorageSettings({"endpoint": url, "region": "us-east-1"}, AwsKeys("AK", Secret("sk")), allow_http=True)


def start_moto(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with open(Path(folder) / "moto.log", "wb") as log:
        process = subprocess.Popen([MOTO, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=5).close()
            return process, url
        except OSError:
            time.sleep(0.1)


def throughput() -> None:
    """A model of 200 MB: ranges into a file of the cache, checked, against raw reads of obstore into memory."""
    with tempfile.TemporaryDirectory() as folder:
        for name, start in (("moto", start_moto), ("the double", start_double)):
            if name == "moto" and not MOTO.exists():
                print("SKIPPED throughput from moto: it is not installed: make test-storage")
                continue
            process, url = start(folder)
            try:
                compare(name, url, Path(folder))
            finally:
                process.terminate()
                process.wait()


def start_double(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """The tests' double in a separate process, with the model in it."""
    code = (
        "import os, sys, threading; from object_store import object_store\n"
        "with object_store() as store:\n"
        f"    store.put('bucket', 'r/m/1/model.onnx', os.urandom({SIZE}), etag='\"0123456789abcdef-24\"')\n"
        "    print(store.url, flush=True); threading.Event().wait()"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip()


def compare(name: str, url: str, folder: Path) -> None:
    import obstore
    from obstore.store import S3Store

    keys = {"access_key_id": "AK", "secret_access_key": "sk"}
    store: Any = S3Store("bucket", endpoint=url, region="us-east-1", client_options={"allow_http": True}, **keys)
    path = "r/m/1/model.onnx"
    if name == "moto":  # in parts, as the clouds' tools upload what is large
        obstore.put(store, path, os.urandom(SIZE), chunk_size=8 << 20)

    def one_read() -> None:
        assert len(obstore.get_range(store, path, start=0, end=SIZE)) == SIZE

    def ranged_reads() -> None:
        for start, end in ranges_of(SIZE):
            obstore.get_range(store, path, start=start, end=end)

    def ours() -> None:
        storage = ObjectStorage(parse_location("s3://bucket/r"), lambda: settings(url))
        files = {item.path.removeprefix("m/"): item for item in storage.listing("m")}
        ModelCache(folder / "cache", 1 << 40, "boot").fetch(storage, "m", files)

    speeds: list[list[float]] = []
    for _ in range(ROUNDS + 1):
        row = []
        for read in (one_read, ranged_reads, ours):
            begin = time.perf_counter()
            read()
            row.append(SIZE / 1e6 / (time.perf_counter() - begin))
        shutil.rmtree(folder / "cache")
        speeds.append(row)
    whole, ranged, mine = (statistics.median(column) for column in zip(*speeds[1:], strict=True))
    ratios = [statistics.median(row[2] / row[number] for row in speeds[1:]) for number in (0, 1)]
    print(f"200 MB from {name}, one raw read into memory: {whole:.0f} MB/s")
    print(f"200 MB from {name}, raw reads of 8 MiB, one after the other, into memory: {ranged:.0f} MB/s")
    print(
        f"200 MB from {name}, 8 MiB ranges into the cache, checked: {mine:.0f} MB/s, {ratios[0]:.2f} x one read, "
        f"{ratios[1]:.2f} x the same ranges"
    )


def put_repository(store: ObjectStore, repository: Path) -> None:
    for path in repository.rglob("*"):
        if path.is_file():
            store.put("bucket", f"r/{path.relative_to(repository)}", path.read_bytes())


def starter(store: ObjectStore, folder: Path) -> tuple[Callable[[str, str], float], int]:
    """Starts a server of a place with a cache, and measures exec to first answer, in ms."""
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "AK",
        "AWS_SECRET_ACCESS_KEY": "sk",
    }

    def start(place: str, cache: str) -> float:
        flags = ["--allow-grpc=false", "--allow-metrics=false", f"--model-cache-directory={folder / cache}"]
        return first_answer_ms([REMORA, "serve", place, f"--http-port={port}", *flags], port, environment)

    return start, port


class Throttle:
    """All connections together get so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free = 0.0

    def __call__(self, seconds: float) -> None:
        with self._lock:
            begin = max(self._free, time.perf_counter())
            self._free = begin + seconds
        time.sleep(max(0.0, begin + seconds - time.perf_counter()))


def second_start() -> None:
    """A 207 MB model from a storage that gives 25 MB/s in all, and once more."""
    with tempfile.TemporaryDirectory() as name, object_store() as store:
        folder = Path(name)
        put_repository(store, mlp(folder / "models", width=7160))
        start, _ = starter(store, folder)
        start(str(folder / "models"), "none")  # bytecode
        store.bytes_per_s, store.pause = THROTTLE_BYTES_PER_S, Throttle(THROTTLE_BYTES_PER_S)
        first = start("s3://bucket/r", "cache")
        store.requests.clear()
        seconds = [start("s3://bucket/r", "cache") for _ in range(3)]
        gets = store.count("GET")
        local = statistics.median(start(str(folder / "models"), "none") for _ in range(3))
    second = statistics.median(seconds)
    print(f"207 MB from a storage of {THROTTLE_BYTES_PER_S / 1e6:.0f} MB/s, exec to first answer: {first:.0f} ms")
    print(f"the same from the cache: {second:.0f} ms, {first / second:.1f} x sooner, {gets} GETs in 3 starts")
    print(f"the same from a folder: {local:.0f} ms")


def round_trips() -> None:
    """A small model with 30 ms added to each connection and each request, against the same model on disk."""
    with tempfile.TemporaryDirectory() as name, object_store() as store:
        folder = Path(name)
        put_repository(store, mlp(folder / "models"))
        start, _ = starter(store, folder)
        start("s3://bucket/r", "warm")
        store.requests.clear()

        def wait(seen: Seen) -> None:
            time.sleep(TRIP_S)

        store.before, store.connected = wait, lambda: time.sleep(TRIP_S)
        local, cloud = [], []
        for number in range(2 * ROUNDS + 1):
            local.append(start(str(folder / "models"), "none"))
            cloud.append(start("s3://bucket/r", f"cache-{number}"))
    more = statistics.median(far - near for far, near in zip(cloud, local, strict=True))
    print(f"a small model on disk, exec to first answer: {statistics.median(local):.0f} ms")
    print(
        f"the same from S3, {TRIP_S * 1e3:.0f} ms a round trip: {statistics.median(cloud):.0f} ms, "
        f"{more:.0f} ms more, {more / TRIP_S / 1e3:.1f} round trips"
    )


if __name__ == "__main__":
    for part in (throughput, second_start, round_trips):
        part()
