"""Models out of real emulators: moto for S3, azurite for Azure. `make test-storage` installs them."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from conftest import ROOT, end, free_ports
from remora.cli import main
from remora.repository import CacheSettings, Repository
from remora.repository.sources import open_repository
from support.models import onnx_models
from support.servers.moto_server import running_moto, wait_for

PEERS = ROOT / ".venv-storage"
AZURITE = PEERS / "node_modules" / ".bin" / "azurite-blob"
# The account that azurite has from the beginning; its key is in its documentation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BIG = bytes(range(256)) * (40 << 10)  # 10 MiB: two ranges
FILES = {"m/config.pbtxt": b'name: "m"', "m/1/model.bin": BIG, "n/1/model.bin": b"small"}


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running moto."""
    with running_moto(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running azurite's account. An option turns its telemetry off."""
    if not AZURITE.exists():
        pytest.skip("azurite is not installed: make test-storage, where npm is")
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("azurite")
    flags = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    process = subprocess.Popen([AZURITE, *flags, "--skipApiVersionCheck", "--disableTelemetry"])
    try:
        wait_for(process, f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        end(process)


def opened(place: str, folder: Path) -> Repository:
    return open_repository(place, cache=CacheSettings(str(folder)))


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an object into moto's bucket ``models``; Triton's variables say how to read it."""
    from obstore.store import S3Store

    for name, value in (
        ("AWS_ACCESS_KEY_ID", "AK"),
        ("AWS_SECRET_ACCESS_KEY", "sk"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    urllib.request.urlopen(urllib.request.Request(f"{moto}/models", method="PUT"), timeout=60).close()
    store: Any = S3Store(
        "models", endpoint=moto, access_key_id="AK", secret_access_key="sk", client_options={"allow_http": True}
    )
    return lambda key, content, **options: store.put(key, content, **options)


def check(repository: Repository, put: Callable[..., None], prefix: str) -> None:
    """Everything that the lifecycle asks of a place."""
    assert set(repository.models()) == {"m", "n"}
    before = repository.fingerprint("m")
    folder = repository.fetch("m")
    assert (folder.versions[1] / "model.bin").read_bytes() == BIG
    assert (folder.path / "config.pbtxt").read_bytes() == FILES["m/config.pbtxt"]
    repository.models()
    assert repository.fingerprint("m") == before
    put(f"{prefix}m/1/model.bin", BIG[::-1])
    repository.models()
    assert repository.fingerprint("m") != before
    assert (repository.fetch("m").versions[1] / "model.bin").read_bytes() == BIG[::-1]
    assert (folder.versions[1] / "model.bin").read_bytes() == BIG


def test_moto_is_a_repository(moto: str, bucket: Callable[..., None], tmp_path: Path) -> None:
    for key, content in FILES.items():
        bucket(f"repo/{key}", content)
    check(opened(f"s3://{moto}/models/repo", tmp_path), bucket, "repo/")


def test_an_object_that_came_in_parts_is_read_whole(moto: str, bucket: Callable[..., None], tmp_path: Path) -> None:
    bucket("parts/m/1/model.bin", BIG, use_multipart=True, chunk_size=5 << 20)
    repository = opened(f"s3://{moto}/models/parts", tmp_path)
    repository.models()
    ((etag, size),) = repository.fingerprint("m").values()  # type: ignore[misc]
    assert (etag.strip('"')[-2:], size) == ("-2", len(BIG)), "its ETag is not a checksum"
    assert (repository.fetch("m").versions[1] / "model.bin").read_bytes() == BIG


def test_more_than_a_page_of_files_is_seen(moto: str, bucket: Callable[..., None], tmp_path: Path) -> None:
    for number in range(1005):
        bucket(f"many/m{number}/1/model.bin", b"x")
    assert len(opened(f"s3://{moto}/models/many", tmp_path).models()) == 1005


@pytest.fixture
def container(azurite: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The container ``models``; the variables of this process have its account and key."""
    from obstore.store import AzureStore

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite)
    make_container(azurite)
    return AzureStore(
        "models", account_name=ACCOUNT, account_key=KEY, endpoint=azurite, client_options={"allow_http": True}
    )


@pytest.mark.parametrize("place", ["as://{account}/models/repo", "az://models/repo"])
def test_azurite_is_a_repository(container: Any, tmp_path: Path, place: str) -> None:
    for key, content in FILES.items():
        container.put(f"repo/{key}", content)
    check(opened(place.format(account=ACCOUNT), tmp_path), container.put, "repo/")


@pytest.mark.parametrize("rows", [3, 1_000_000])
def test_rows_of_azurite_are_scored(container: Any, tmp_path: Path, rows: int) -> None:
    """The results of a million rows take 16 MB, which are sent in parts."""
    onnx.save(onnx_models.identity("FP32", ("n", 2)), tmp_path / "model.onnx")
    values = np.arange(2 * rows, dtype="f4").reshape(-1, 2)
    np.save(tmp_path / "in.npy", values)
    container.put("data/in.npy", tmp_path / "in.npy")
    model = str(tmp_path / "model.onnx")
    assert main(["score", model, "az://models/data/in.npy", "az://models/data/out.npy", "--quiet"]) == 0
    (tmp_path / "out.npy").write_bytes(container.get("data/out.npy").bytes())
    assert np.array_equal(np.load(tmp_path / "out.npy"), values)


def test_images_of_azurite_are_scored(container: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")
    onnx.save(onnx_models.identity("UINT8", ("n", 2, 2, 3)), tmp_path / "model.onnx")
    for number in range(3):
        image.new("RGB", (2, 2), (number, 0, 255)).save(tmp_path / "a.png")
        container.put(f"photos/{number}/a.png", (tmp_path / "a.png").read_bytes())
    words = ["score", str(tmp_path / "model.onnx"), "az://models/photos", "az://models/out.jsonl", "--keep=path"]
    assert main([*words, "--quiet"]) == 0
    found = [json.loads(line) for line in bytes(container.get("out.jsonl").bytes()).splitlines()]
    assert {row["path"]: row["y"] for row in found} == {f"{n}/a.png": [[[n, 0, 255]] * 2] * 2 for n in range(3)}


def make_container(url: str) -> None:
    """obstore makes none, so the request is signed here (shared key)."""
    import base64
    import email.utils
    import hashlib
    import hmac

    date, version = email.utils.formatdate(usegmt=True), "2021-12-02"
    what = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/models\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), what.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(f"{url}/models?restype=container", None, headers, method="PUT")
    with suppress(urllib.error.HTTPError):  # it is there from the test before
        urllib.request.urlopen(request, timeout=60).close()
