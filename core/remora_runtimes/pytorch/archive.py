"""Kind and safety of a ``.pt`` or ``.pt2`` archive, determined before PyTorch reads it.

PyTorch's reader of exported programs falls back to pickle, looks call targets up by attribute, evaluates expressions of
sizes, and puts names into Python code that it runs. The allowed contents of those places are listed here; everything
else is refused. Compiled packages contain machine code: like Python models, they can do anything.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from remora.errors import InternalError
from remora.model_files import MACHINE_CODE
from remora.system.json_text import read_json

SCRIPT, EXPORTED, COMPILED = "TorchScript", "exported program", "AOTInductor package"

MAX_GRAPH_BYTES = 256 << 20
"""Largest description of a program's graph, or file of its code, in bytes, uncompressed."""

# The records at the end of a zip archive: end of central directory, its 64-bit form, and the locator of that.
_END, _LONG_END, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")

_TARGET = re.compile(r"torch\.ops(\.[A-Za-z_]\w*)+|_operator\.(\w+)|math\.\w+|torch\.sym_\w+|torch\._sym_\w+")
_OPERATORS = re.compile(
    "add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|xor|invert|not_|abs|lshift|rshift|"
    "getitem|index"
)
_OF_FILES = ("from_file", "save", "read_file", "write_file")
"""Operators of PyTorch and its libraries that read or write a file by its path."""
_FILES_IN_CODE = re.compile(rb"\b(%b|dist_c10d|dist_rpc)\b" % b"|".join(name.encode() for name in _OF_FILES))
_HIDDEN_NAME = re.compile(rb"\bgetattr\s*\([^)]*\\")
"""Attribute by a name with escapes, which PyTorch never writes."""
_HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.(cond|while_loop|map_impl|scan|wrap_with_set_grad_enabled)")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_DUNDER = re.compile(r"(^|\.)__")
_EXPRESSION = re.compile(r"[\w\s+\-*/(),<>=!&|~%.]*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_SYMBOL = re.compile(r"[suzf]{1,2}\d+")
_FUNCTIONS = re.compile(
    "FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|"
    "FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt|"
    "RoundDecimal|ToFloat|Identity|Max|Min|Piecewise|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge|[Tt]rue|[Ff]alse|oo|int_oo|"
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|ExprCondPair|Equality|Unequality|StrictLessThan|LessThan|"
    "StrictGreaterThan|GreaterThan|BooleanTrue|BooleanFalse|Tuple|positive|integer|nonnegative|real|precision"
)
_QUOTED = re.compile(r"'(?:[suzf]{1,2}\d+|[-+\d.e]+)'")


def archive_kind(path: Path) -> str:
    """Return `SCRIPT`, `EXPORTED` or `COMPILED`.

    Raises:
        InternalError: the file is of another kind, which the text names.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise InternalError(f"it is not an archive that PyTorch writes ({error})") from error
    if "archive_format" in names:
        return COMPILED if any(name.startswith(MACHINE_CODE) for name in names) else EXPORTED
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return SCRIPT
    if "data.pkl" in names:
        raise InternalError(
            "it was written by torch.save and would have to be unpickled, which can run code and is never done: "
            "save it with torch.jit.script(model).save(...) or torch.export.save(...)"
        )
    raise InternalError("it is a zip archive, but neither TorchScript nor torch.export wrote it")


def compiled_kind(path: Path) -> str:
    """Return the kind of instances that an AOTInductor package was compiled for, "CPU" or "GPU".

    Returns "" if the package does not tell. Its code reads raw memory and checks no device.
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("_metadata.json") and f"/{MACHINE_CODE}" in f"/{name}":
                try:
                    found = read_json(archive.read(name))
                except ValueError as error:
                    raise InternalError(f"its {name} is not JSON: {error}") from error
                device = found.get("AOTI_DEVICE_KEY") if isinstance(found, dict) else None
                if isinstance(device, str) and device:
                    return "CPU" if device == "cpu" else "GPU"
    return ""


def check_exported(path: Path, safely_loads: Callable[[io.BytesIO], object]) -> None:
    """Refuse an exported program that could run code while it is read or run.

    Args:
        path: the archive.
        safely_loads: reads a pickle of plain tensors and raises for any other: ``torch.load(weights_only=True)``.

    Raises:
        InternalError: the program is refused, with the reason.
    """
    _check_table(path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.lower(): info for info in archive.infolist()}  # PyTorch's reader ignores case
        if len(members) != len(archive.infolist()):
            raise InternalError("it has two members of one name, so the check and PyTorch could read different ones")
        if "version" in members:
            raise InternalError("it is in the format of torch 2.7 or older, whose reader runs code: export it again")
        pickled: set[str] = set()
        for name, info in members.items():
            if info.file_size > path.stat().st_size:
                raise InternalError(f"its {name} is compressed, which PyTorch never does, and too long")
            if name.endswith(".json"):
                pickled.update(_check_description(name, _read_text(archive, info)))
        for name, info in members.items():
            if name.endswith((".pt", ".pkl")) or name.rpartition("/")[2] in pickled:
                try:
                    safely_loads(io.BytesIO(archive.read(info)))
                except Exception as error:  # any error of the reader of plain tensors
                    raise InternalError(
                        f"its {name.partition('/')[2]} is a pickle of more than tensors, which is never read: "
                        "export the program with tensors as example inputs, weights and constants"
                    ) from error


def check_script(path: Path) -> None:
    """Refuse a TorchScript program that could read or write files other than its own.

    Its code runs also while it is read, so that only the text can be checked before.

    Raises:
        InternalError: the program is refused, with the reason.
    """
    _check_table(path)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.partition("/")[2].lower()  # PyTorch's reader ignores case
            if not (name.startswith("code/") and name.endswith(".py")):
                continue
            code = _read_text(archive, info)
            found = _FILES_IN_CODE.search(code) or _HIDDEN_NAME.search(code)
            if found is not None:
                used = found[0].decode("ascii", "replace")[:100]
                raise InternalError(
                    f"its code uses '{used}', with which a program reads and writes any file of this machine: "
                    "script the model without it"
                )


def _read_text(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a member with a description or code. Raises InternalError if it is too long."""
    if info.file_size > MAX_GRAPH_BYTES:
        raise InternalError(f"its {info.filename} is {info.file_size} bytes long; at most {MAX_GRAPH_BYTES} are read")
    return archive.read(info)


def _check_table(path: Path) -> None:
    """Check that the zip's table of members is where all readers look.

    Readers of zip archives search for it in different ways.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _LONG_END.size - _LOCATOR.size - _END.size))
        tail = file.read()
    mark, *_, length, begin, comment = _END.unpack(tail[-_END.size :])
    end, sound = size - _END.size, mark == b"PK\5\6" and not comment
    if tail[_LONG_END.size :].startswith(b"PK\6\7"):
        long_mark, *_, length, begin = _LONG_END.unpack_from(tail)
        end = _LOCATOR.unpack_from(tail, _LONG_END.size)[2]
        sound = sound and long_mark == b"PK\6\6" and end == size - len(tail)
    if not sound or begin + length != end:
        raise InternalError("its table of members is misplaced, so the check and PyTorch could read different members")


def _check_description(name: str, data: bytes) -> Iterator[str]:
    """Check one of the archive's JSON files and yield the names of its pickled members."""
    try:
        document = read_json(data)
    except ValueError as error:
        raise InternalError(f"its {name} is not JSON: {error}") from error
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if value.get("use_pickle"):
                yield str(value.get("path_name")).lower()
            waiting += value.values()
            for key, item in value.items():
                _check_entry(key, item, waiting)


def _check_entry(key: str, item: Any, waiting: list[Any]) -> None:
    if not isinstance(item, str):
        if key == "forward_arg_names":
            waiting += [{"name": each} for each in item or ()]
        return
    if key == "target" and not _is_harmless_target(item):
        raise InternalError(f"its graph calls '{item[:100]}', which is not an operator of PyTorch")
    if key == "expr_str" and not _is_harmless_expression(item):
        raise InternalError(f"its graph has the size '{item[:100]}', which is more than arithmetic")
    if key in ("name", "graph_name") and item and (not _NAME.fullmatch(item) or _DUNDER.search(item)):
        raise InternalError(f"its graph uses the name '{item[:100]}', which is not a valid name")
    if key in ("in_spec", "out_spec"):
        waiting.append(_parsed_spec(item))


def _parsed_spec(text: str) -> Any:
    """Return the names of arguments and keys in a tree specification, to be checked."""
    try:
        _, spec = read_json(text)
    except (ValueError, TypeError) as error:
        raise InternalError("its graph has a specification of arguments that cannot be read") from error
    names, waiting = [], [spec]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            raise InternalError("its graph has a specification of arguments that cannot be read")
        kind, context = node.get("type"), node.get("context")
        if kind not in (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"):
            raise InternalError(f"its graph takes or returns a '{kind}'; only tuples, lists and dictionaries are read")
        if isinstance(context, str) and context not in ("", "null"):
            keys = read_json(context)
            names += [{"name": key} for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
        waiting += node.get("children_spec") or []
    return names


def _is_harmless_target(target: str) -> bool:
    match = _TARGET.fullmatch(target)
    if match is None or _DUNDER.search(target) or not {*_OF_FILES, "debugprims"}.isdisjoint(target.split(".")):
        return False
    if target.startswith("torch.ops.higher_order."):
        return _HIGHER_ORDER.fullmatch(target) is not None
    return match[2] is None or _OPERATORS.fullmatch(match[2]) is not None


def _is_harmless_expression(text: str) -> bool:
    text = _QUOTED.sub("0", text)  # names of symbols and numbers, as SymPy prints them
    words = _WORD.findall(text)
    return (
        len(text) <= 10_000
        and _EXPRESSION.fullmatch(text) is not None
        and re.search(r"\.\s*[A-Za-z_(]", text) is None
        and all(_SYMBOL.fullmatch(word) or _FUNCTIONS.fullmatch(word) for word in words)
    )
