"""What an archive is, and which exported programs are refused before PyTorch reads them. Needs no PyTorch."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import InternalError
from remora_runtimes.pytorch import archive
from remora_runtimes.pytorch.archive import archive_kind, check_exported, check_script, compiled_kind

GRAPH: dict[str, Any] = {
    "graph_module": {
        "graph": {
            "nodes": [{"target": "torch.ops.aten.add.Tensor", "name": "add", "inputs": [{"name": "self", "arg": {}}]}]
        },
        "signature": {"in_spec": json.dumps([1, {"type": "builtins.dict", "context": '["x"]', "children_spec": []}])},
    }
}


def written(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, data in members.items():
            made.writestr(f"m/{name}", data)
    return path


def program(tmp_path: Path, graph: dict[str, Any], **members: bytes) -> Path:
    return written(
        tmp_path / "p.pt2", archive_format=b"pt2", **{"models/model.json": json.dumps(graph).encode()}, **members
    )


def changed(where: str, value: object) -> dict[str, Any]:
    graph = json.loads(json.dumps(GRAPH))
    node = graph["graph_module"]["graph"]["nodes"][0]
    node[where] = value
    return graph


def refuse(_: io.BytesIO) -> object:
    raise ValueError("not plain tensors")


def test_the_members_decide_the_kind_of_archive(tmp_path: Path) -> None:
    script = {"constants.pkl": b"", "code/m.py": b"", "data.pkl": b""}
    assert archive_kind(written(tmp_path / "a", **script)) == archive.SCRIPT
    assert archive_kind(written(tmp_path / "b", archive_format=b"pt2")) == archive.EXPORTED
    compiled = {"archive_format": b"pt2", "data/aotinductor/model/x.so": b""}
    assert archive_kind(written(tmp_path / "c", **compiled)) == archive.COMPILED


def test_a_pickle_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"written by torch\.save .* never done"):
        archive_kind(written(tmp_path / "a", **{"data.pkl": b"", "data/0": b""}))
    with pytest.raises(InternalError, match="neither TorchScript nor"):
        archive_kind(written(tmp_path / "b", readme=b""))
    (tmp_path / "c").write_bytes(b"\x80\x04N.")
    with pytest.raises(InternalError, match="not an archive that PyTorch writes"):
        archive_kind(tmp_path / "c")


def test_an_ordinary_program_is_let_through(tmp_path: Path) -> None:
    check_exported(program(tmp_path, GRAPH), refuse)


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.utils.cpp_extension.load",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "torch.ops.aten.__class__",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save",
        "torch.ops.debugprims.load_tensor.default",
        "torch.ops.higher_order.triton_kernel_wrapper_mutation",
        "#custom",
        "builtins.eval",
    ],
)
def test_only_operators_can_be_called(tmp_path: Path, target: str) -> None:
    with pytest.raises(InternalError, match="not an operator of PyTorch"):
        check_exported(program(tmp_path, changed("target", target)), refuse)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "exec(chr(105))",
        "open('/tmp/x')",
        "s0.__class__",
        "Symbol('s0').func",
        "Symbol('__import__(1)')",
        "(lambda: 0)()",
        "s0 if s0 else s0",
    ],
)
def test_sizes_are_arithmetic(tmp_path: Path, text: str) -> None:
    with pytest.raises(InternalError, match="more than arithmetic"):
        check_exported(program(tmp_path, changed("size", {"as_expr": {"expr_str": text}})), refuse)


@pytest.mark.parametrize("text", ["s0", "2*s77 + 1", "Max(Integer(1), Add(Symbol('s0', positive=True), Integer(-2)))"])
def test_arithmetic_is_let_through(tmp_path: Path, text: str) -> None:
    check_exported(program(tmp_path, changed("size", {"as_expr": {"expr_str": text}})), refuse)


@given(st.text(max_size=40))
def test_no_expression_with_a_foreign_word_attribute_or_text_is_let_through(text: str) -> None:
    if archive._is_harmless_expression(text):
        words = archive._WORD.findall(archive._QUOTED.sub("", text))
        assert all(archive._SYMBOL.fullmatch(word) or archive._FUNCTIONS.fullmatch(word) for word in words)
        assert "'" not in archive._QUOTED.sub("", text)
        assert '"' not in text


@pytest.mark.parametrize("name", ["x): pass\nimport os", "a b", "__builtins__", "x.__class__"])
def test_names_are_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InternalError, match="is not a valid name"):
        check_exported(program(tmp_path, changed("name", name)), refuse)
    graph = json.loads(json.dumps(GRAPH))
    spec = [1, {"type": "builtins.dict", "context": json.dumps([name]), "children_spec": []}]
    graph["graph_module"]["signature"]["in_spec"] = json.dumps(spec)
    with pytest.raises(InternalError, match="is not a valid name"):
        check_exported(program(tmp_path, graph), refuse)


def test_arguments_are_tuples_lists_and_dictionaries(tmp_path: Path) -> None:
    graph = json.loads(json.dumps(GRAPH))
    spec = json.dumps([1, {"type": "my.package.Type", "context": "", "children_spec": []}])
    graph["graph_module"]["signature"]["in_spec"] = spec
    with pytest.raises(InternalError, match=r"takes or returns a 'my\.package\.Type'"):
        check_exported(program(tmp_path, graph), refuse)


def test_every_pickle_in_it_must_be_of_plain_tensors(tmp_path: Path) -> None:
    config = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": True}}}).encode()
    for members in (
        {"data/sample_inputs/model.pt": b"x"},
        {"data/weights/weight_0": b"x", "data/weights/config.json": config},
    ):
        with pytest.raises(InternalError, match="pickle of more than tensors"):
            check_exported(program(tmp_path, GRAPH, **members), refuse)
        check_exported(program(tmp_path, GRAPH, **members), lambda file: None)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_what_is_checked_is_what_is_read(tmp_path: Path) -> None:
    path = program(tmp_path, GRAPH)
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("m/models/model.json", "{}")
    with pytest.raises(InternalError, match="two members of one name"):
        check_exported(path, refuse)


def test_names_are_the_same_to_pytorch_whatever_their_case(tmp_path: Path) -> None:
    harmful = json.dumps(changed("target", "torch.os.system")).encode()
    with pytest.raises(InternalError, match="two members of one name"):
        check_exported(program(tmp_path, GRAPH, **{"models/Model.json": harmful}), refuse)
    with pytest.raises(InternalError, match="not an operator of PyTorch"):
        check_exported(written(tmp_path / "q", **{"models/model.JSON": harmful}), refuse)
    config = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": True}}}).encode()
    for members in ({"data/sample_inputs/model.PT": b"x"}, {"data/Weight_0": b"x", "data/config.json": config}):
        with pytest.raises(InternalError, match="pickle of more than tensors"):
            check_exported(program(tmp_path, GRAPH, **members), refuse)


def long_form(data: bytes) -> bytes:
    """An archive as PyTorch ends it: with the records of long ones, however short it is."""
    *_, count, length, begin, _ = archive._END.unpack(data[-22:])
    ends = archive._LONG_END.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, begin)
    return data[:-22] + ends + archive._LOCATOR.pack(b"PK\6\7", 0, len(data) - 22, 1) + data[-22:]


def test_the_table_of_members_is_one_for_every_reader(tmp_path: Path) -> None:
    path = program(tmp_path, GRAPH)
    short = path.read_bytes()
    long = long_form(short)
    path.write_bytes(long)
    check_exported(path, refuse)
    elsewhere = bytearray(long)
    elsewhere[-22 - 20 + 8] ^= 1  # the way to the long record
    for data in (b"more" + short, b"more" + long, bytes(elsewhere), short[:-2] + b"\x01\0x", short[:-6] + bytes(6)):
        path.write_bytes(data)
        with pytest.raises(InternalError, match="table of members is misplaced"):
            check_exported(path, refuse)


def test_what_unpacks_to_more_than_the_archive_is_not_read(tmp_path: Path) -> None:
    path = program(tmp_path, GRAPH)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as made:
        made.writestr("m/data/sample_inputs/model.pt", bytes(1 << 20))
    with pytest.raises(InternalError, match="is compressed, which PyTorch never does"):
        check_exported(path, lambda file: None)


def test_the_old_format_and_what_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = program(tmp_path, GRAPH)
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("version", "8.1")
    with pytest.raises(InternalError, match=r"torch 2\.7 or older"):
        check_exported(path, refuse)
    with pytest.raises(InternalError, match="is not JSON"):
        check_exported(written(tmp_path / "q", **{"models/model.json": b"{"}), refuse)


@pytest.mark.parametrize(("device", "kind"), [("cpu", "CPU"), ("cuda", "GPU"), ("", ""), (None, "")])
def test_a_compiled_package_tells_the_kind_of_its_device(tmp_path: Path, device: str | None, kind: str) -> None:
    metadata = {} if device is None else {"AOTI_DEVICE_KEY": device}
    name = "data/aotinductor/model/c.wrapper_metadata.json"
    path = written(tmp_path / "p.pt2", archive_format=b"pt2", **{name: json.dumps(metadata).encode()})
    assert archive_kind(path) == "AOTInductor package"
    assert compiled_kind(path) == kind


def test_metadata_of_a_package_that_are_not_json_are_refused(tmp_path: Path) -> None:
    members = {"data/aotinductor/model/c.wrapper_metadata.json": b"{"}
    path = written(tmp_path / "p.pt2", archive_format=b"pt2", **members)
    with pytest.raises(InternalError, match=r"wrapper_metadata\.json is not JSON"):
        compiled_kind(path)


def script(path: Path, code: bytes, folder: str = "code") -> Path:
    return written(path, **{"constants.pkl": b"", "data.pkl": b"", f"{folder}/__torch__/m.py": code})


@pytest.mark.parametrize(
    ("code", "used"),
    [
        (b"  y = torch.from_file('/etc/passwd', False, 100)", "from_file"),
        (b"  _0 = ops.aten.save(x, '/tmp/x')", "save"),
        (b"  t = torch\n  t . save(x, '/tmp/x')", "save"),
        (b"  y = ops.image.read_file('/etc/passwd')", "read_file"),
        (b"  y = getattr(torch, \"fr\\x6fm_file\")('/etc/passwd')", "getattr"),
        (b"  s = __torch__.torch.classes.dist_c10d.FileStore('/tmp/x', 1)", "dist_c10d"),
    ],
)
def test_torchscript_that_reads_or_writes_any_file_is_refused_before_its_code_runs(
    code: bytes, used: str, tmp_path: Path
) -> None:
    for place, folder in enumerate(("code", "CODE")):
        with pytest.raises(InternalError, match=f"its code uses '{used}.*any file of this machine"):
            check_script(script(tmp_path / str(place), code, folder))


def test_ordinary_torchscript_is_let_through(tmp_path: Path) -> None:
    code = b'class M(Module):\n  def forward(self, x):\n    _0 = (getattr(self, "0")).forward(x, )\n    save_dir = 1\n'
    check_script(script(tmp_path / "m.pt", code))


def test_a_text_of_a_program_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_GRAPH_BYTES", 10)
    with pytest.raises(InternalError, match=r"its m/code/__torch__/m\.py is 11 bytes long; at most 10 are read"):
        check_script(script(tmp_path / "m.pt", b"x" * 11))
    path = written(tmp_path / "p.pt2", **{"archive_format": b"pt2", "models/model.json": b"x" * 11})
    with pytest.raises(InternalError, match=r"models/model\.json is 11 bytes long; at most 10 are read"):
        check_exported(path, lambda _: None)
