"""The cpu image built and run by a plain user, who is root only in a new namespace."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import free_ports

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def open_models(models: Path) -> Iterator[Path]:
    """The models where a plain user reaches them: pytest's folders are its user's own."""
    place = Path(tempfile.mkdtemp(prefix="models-"))
    shutil.copytree(models, place, dirs_exist_ok=True)
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("uid", [0, 10001], ids=["as-root-of-its-namespace", "as-10001"])
def test_a_plain_user_builds_and_runs_it(
    uid: int, rootless_image: Any, open_models: Path, digits: Any, figures: list[str]
) -> None:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    assert (rootless_image.root / "opt" / "remora").stat().st_uid != 0
    with rootless_image.running(ports, uid=uid, mounts={"/mnt/models": open_models}, environment={}) as container:
        container.answer(f"http://127.0.0.1:{http}/v2/health/ready")
        figures.append(
            f"cpu, rootless, uid {uid}: ready {time.monotonic() - container.started_s:.2f} s after the start"
        )
        body = (digits.requests / "seven.json").read_bytes()
        assert json.loads(container.answer(f"http://127.0.0.1:{http}/v2/models/digits/infer", body))["outputs"]
        assert container.stop() == 0
