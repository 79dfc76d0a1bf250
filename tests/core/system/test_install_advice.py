"""The advice on what to install: from where this installation came, and never an unknown package of an index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from remora.system.install_advice import checkout_origin, command_for, install_command

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "d0865891e0b1d1a7a1b4a05a4f1c4cbd6f7ba1d2"
REQUIREMENTS = (
    "numpy<3,>=1.26",
    "uvloop<0.24,>=0.21; sys_platform != 'win32'",
    "onnxruntime<2,>=1.18; extra == 'onnx'",
    "tritonclient[grpc,http] (<3,>=2.41) ; python_version > '3' and extra == \"clients\"",
    "hpack; extra == 'pair'",
    "orjson<4,>=3.10; extra == 'pair'",
)


@pytest.mark.parametrize(
    ("origin", "extra", "command"),
    [
        ({}, "onnx", "pip install 'onnxruntime>=1.18,<2'"),
        ({}, "pair", "pip install hpack 'orjson>=3.10,<4'"),
        ({}, "clients", "pip install 'tritonclient[grpc,http]>=2.41,<3'"),
        ({}, "unheard-of", "install the packages of remora's extra 'unheard-of'"),
        ({"url": "file:///no/such/wheel-1.whl", "archive_info": {}}, "onnx", "pip install 'onnxruntime>=1.18,<2'"),
        (
            {"url": "https://example.org/a.whl", "archive_info": {}},
            "onnx",
            "pip install 'remora[onnx] @ https://example.org/a.whl'",
        ),
        (
            {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            "onnx",
            f"pip install 'remora[onnx] @ git+https://example.org/r.git@{COMMIT}'",
        ),
        (
            {
                "url": "https://example.org/r.git",
                "vcs_info": {"vcs": "git", "commit_id": COMMIT},
                "subdirectory": "python",
            },
            "onnx",
            f"pip install 'remora[onnx] @ git+https://example.org/r.git@{COMMIT}#subdirectory=python'",
        ),
    ],
)
def test_the_command_installs_from_where_this_installation_came(
    origin: dict[str, Any], extra: str, command: str
) -> None:
    assert command_for(extra, origin, REQUIREMENTS) == command


def test_a_checkout_is_installed_again_with_the_extra(tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    there: Sequence[tuple[dict[str, Any], str]] = (
        ({"url": checkout.as_uri(), "dir_info": {"editable": True}}, f"pip install -e '{checkout}[onnx]'"),
        ({"url": checkout.as_uri(), "dir_info": {}}, f"pip install '{checkout}[onnx]'"),
    )
    for origin, command in there:
        assert command_for("onnx", origin, REQUIREMENTS) == command


def test_a_checkout_that_is_not_installed_is_found_beside_the_code(tmp_path: Path) -> None:
    assert checkout_origin(tmp_path) == {}
    assert command_for("onnx", checkout_origin(ROOT), ()) == f"pip install -e '{ROOT}[onnx]'"


def test_this_installation_has_an_answer_for_every_extra_of_a_backend() -> None:
    from remora.plugins import BACKENDS

    for extra in filter(None, (runtime.extra for runtime in BACKENDS.values())):
        assert install_command(extra).startswith("pip install ")


def test_no_text_installs_a_package_of_this_name_from_an_index() -> None:
    """There is none: a reader of such a line would run the code of a stranger."""
    line = re.compile(r"""pip install (?:[\w.,'"\[\]<>=~-]+ )*['"]?remora(\[[^\]]*\])?(?=['"\s`]|$)(?! @ )""")
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts += [path for folder in ("core", "adapters", "tests", "containers") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path != Path(__file__).resolve()
        for match in line.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
