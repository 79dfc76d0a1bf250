"""Programs of PyTorch behind one face: TorchScript, exported programs, AOTInductor packages; the law: no plain pickles.

A program is a callable and what is known of its arguments. Instances may share one, or have copies that share what
nothing writes to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.backends.arrays import texts
from remora.backends.model_files import import_framework
from remora.backends.pytorch.archive import COMPILED, EXPORTED, SCRIPT, archive_kind, check_exported
from remora.calls import TensorInfo
from remora.config.datatypes import DATATYPE_BY_NAME
from remora.errors import InternalError, UnsupportedError
from remora.messages import DTYPES, Array
from remora.tensors.device import DeviceArray


class Program(NamedTuple):
    """A loaded program.

    ``arguments`` names what can be given by place, empty when unknown; ``dictionary``: it takes one dictionary of
    tensors. ``inputs`` and ``outputs`` are what it declares, None where the format does not tell. ``writes`` says
    that it may write to its inputs. ``kept`` are the addresses of the memory that it writes to or gives out itself.
    """

    call: Callable[..., Any]
    kind: str
    arguments: tuple[str, ...] = ()
    dictionary: bool = False
    inputs: tuple[TensorInfo, ...] | None = None
    outputs: tuple[TensorInfo, ...] | None = None
    writes: bool = True
    kept: frozenset[int] = frozenset()
    stateless: bool = False


def load_torch(model: str) -> Any:
    """PyTorch. Raises ConfigError when it cannot be imported."""
    torch = import_framework("torch", model, "PyTorch", "torch")
    # Inputs are views of what was received. Programs that write to theirs get copies, so this warning has no object.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
    return torch


def load_program(torch: Any, path: Path, device: Any, *, runners: int, compiling: Mapping[str, Any] | None) -> Program:
    """The program of a file, on ``device``; None leaves it where its author put it.

    Raises:
        InternalError: the file is no such program, or could run code while it is read.
        Exception: PyTorch's own errors for a file that it cannot read.
    """
    kind = archive_kind(path)
    if kind == SCRIPT:
        if compiling is not None:
            raise UnsupportedError("TorchScript cannot be compiled: export the model with torch.export for that")
        return _script(torch, path, device)
    if kind == EXPORTED:
        return _exported(torch, path, device, compiling)
    return _compiled(torch, path, device, runners)


def share_parameters(torch: Any, path: Path, device: Any, first: Program) -> Program:
    """Another copy of a TorchScript program with its own buffers and attributes, and the first one's parameters."""
    other = _script(torch, path, device)
    theirs = dict(first.call.named_parameters())  # type: ignore[attr-defined]
    for name, parameter in other.call.named_parameters():  # type: ignore[attr-defined]
        parameter.data = theirs[name].data
    return other


def _script(torch: Any, path: Path, device: Any) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is old, and what people have
        module = torch.jit.load(str(path), map_location=device)
        module.eval()
        graph = module.inlined_graph
    arguments = module.forward.schema.arguments[1:]  # the first is the module
    kinds = [str(argument.type) for argument in arguments]
    nodes = _node_kinds(graph)
    return Program(
        module,
        SCRIPT,
        arguments=tuple(argument.name for argument in arguments),
        dictionary=len(kinds) == 1 and kinds[0] == "Dict[str, Tensor]",
        writes=any(kind.endswith("_") and not kind.endswith("__") for kind in nodes),
        kept=_addresses([*module.parameters(), *module.buffers()]),
        stateless="prim::SetAttr" not in nodes and not any(True for _ in module.buffers()),
    )


def _node_kinds(graph: Any) -> set[str]:
    """The kinds of all nodes of a TorchScript graph, those in loops and branches included."""
    found: set[str] = set()
    waiting = list(graph.nodes())
    while waiting:
        node = waiting.pop()
        found.add(node.kind())
        for block in node.blocks():
            waiting += block.nodes()
    return found


def _exported(torch: Any, path: Path, device: Any, compiling: Mapping[str, Any] | None) -> Program:
    check_exported(path, lambda file: torch.load(file, weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about versions of the format, to whoever exports
        program = _moved(torch.export.load(str(path)), device)
        module = program.module(check_guards=False)
        if device is not None:
            module.to(device)
    call = module if compiling is None else torch.compile(module, **compiling)
    signature = program.graph_signature
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = [name for name in signature.user_inputs if isinstance(name, str)]
    inputs = [_info(torch, name, values.get(name)) for name in names]
    results = _result_names(program.call_spec.out_spec, len(signature.user_outputs))
    outputs = [
        _info(torch, shown, values.get(name))
        for shown, name in zip(results, signature.user_outputs, strict=True)
        if isinstance(name, str)
    ]
    return Program(
        call,
        EXPORTED,
        arguments=tuple(names),
        inputs=_all_known(inputs),
        outputs=_all_known(outputs),
        writes=bool(signature.user_inputs_to_mutate),
        kept=_addresses([*module.parameters(), *module.buffers()]),
        stateless=not signature.buffers_to_mutate,
    )


def _moved(program: Any, device: Any) -> Any:
    """A program for a device: exported on a CPU, its nodes create tensors there, and not only its weights must move."""
    if device is None or device.type == "cpu":
        return program
    passes = __import__("torch.export.passes", fromlist=["move_to_device_pass"])
    return passes.move_to_device_pass(program, device)


def _compiled(torch: Any, path: Path, device: Any, runners: int) -> Program:
    package = __import__("torch._inductor.package", fromlist=["load_package"])
    index = -1 if device is None or device.type == "cpu" else device.index
    return Program(package.load_package(str(path), num_runners=runners, device_index=index), COMPILED, stateless=True)


def _result_names(spec: Any, count: int) -> Sequence[str]:
    if spec is not None and spec.type in (dict,) and len(spec.context) == count:
        return [str(key) for key in spec.context]
    return [f"OUTPUT__{index}" for index in range(count)]


def _info(torch: Any, name: str, value: Any) -> TensorInfo | None:
    if not isinstance(value, torch.Tensor) or not datatype_name(value.dtype):
        return None
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return TensorInfo(name, datatype_name(value.dtype), shape)


def _all_known(infos: Sequence[TensorInfo | None]) -> tuple[TensorInfo, ...] | None:
    known = tuple(info for info in infos if info is not None)
    return known if len(known) == len(infos) else None


def _addresses(tensors: Sequence[Any]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())


def datatype_name(dtype: object) -> str:
    """The wire's name of a ``torch.dtype``, "" when it has none."""
    return DATATYPE_BY_NAME.get(str(dtype).removeprefix("torch."), "")


def to_value(torch: Any, name: str, datatype: str, array: Array) -> Any:
    """What a program takes for an array. It must not be written to: it may be the bytes of a request.

    Raises:
        InvalidArgumentError: an element of a BYTES input is not UTF-8.
    """
    if datatype == "BYTES":
        return texts(f"input '{name}'", array)
    if isinstance(array, DeviceArray):  # of its own: the law that nobody writes to it is the taker's to keep
        return torch.from_dlpack(array)
    if not array.flags.c_contiguous or not array.size:  # without elements it may still have strange strides
        array = array.copy()
    if datatype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(
    torch: Any, name: str, datatype: str, value: Any, kept: Collection[int], *, cast: bool, stays: bool = False
) -> Array:
    """The array of a result, of the type that the configuration gives it; a `DeviceArray` where it ``stays``.

    Args:
        torch: the module.
        name: the output's, for errors.
        datatype: the wire's name of its type.
        value: a tensor, or a list of text for BYTES.
        kept: the addresses of memory that the program writes to again; tensors in there are copied.
        cast: convert another floating type to this one, as mixed precision needs it.

    Raises:
        InternalError: the result is of another type, with Triton's text.
    """
    if datatype == "BYTES":
        return _texts(name, value)
    if not isinstance(value, torch.Tensor):
        raise InternalError(f"output '{name}' is a {type(value).__name__}, not a tensor", from_model=True)
    found = datatype_name(value.dtype)
    if found != datatype and cast and value.is_floating_point() and datatype in ("FP16", "FP32", "FP64"):
        value, found = value.to(getattr(torch, f"float{datatype[2:]}")), datatype
    if found != datatype:
        raise InternalError(
            f"configuration unexpected datatype TYPE_{datatype} for output '{name}', model provides "
            f"{'TYPE_' + found if found else value.dtype}",
            from_model=True,
        )
    value = value.detach()
    if value.device.type != "cpu" and not stays:
        value = value.cpu()
    elif kept and value.numel() and value.untyped_storage().data_ptr() in kept:
        value = value.clone()
    value = value.contiguous().resolve_neg()
    if stays:
        return DeviceArray.of(value).as_array()
    if datatype == "BF16":
        bits: Array = value.view(torch.int16).numpy().view(DTYPES["BF16"])
        return bits
    array: Array = value.numpy()
    return array


def _texts(name: str, value: Any) -> Array:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise InternalError(f"output '{name}' is a {type(value).__name__}, not a list of strings", from_model=True)
    array = np.empty(len(value), object)
    array[:] = [text.encode() for text in value]
    return array
