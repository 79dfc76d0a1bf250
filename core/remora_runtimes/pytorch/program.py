"""TorchScript, exported programs and AOTInductor packages behind one interface.

Plain pickles are refused. A program is a callable with the known facts about its arguments. Instances share a program,
or have copies that share the memory that is never written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.api.backends import DATATYPE_BY_NAME, DeviceArray
from remora.backends.arrays import texts
from remora.backends.model_files import import_framework
from remora.calls import TensorInfo
from remora.errors import InternalError, UnsupportedError
from remora.messages import DTYPES, Array
from remora_runtimes.pytorch.archive import COMPILED, EXPORTED, SCRIPT, archive_kind, check_exported, check_script


class Program(NamedTuple):
    """Loaded program.

    ``arguments`` names the positional arguments, empty if unknown; ``dictionary`` is True if it takes one dictionary of
    tensors. ``inputs`` and ``outputs`` are declared by the program, None in formats without declarations. ``writes`` is
    True if it may write to its inputs. ``kept`` are the addresses of memory that it writes to or returns itself.
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
    """Import PyTorch. Raises ConfigError if that fails."""
    torch = import_framework("torch", model, "PyTorch", "torch")
    # Inputs are views of received bytes. Programs that write to inputs get copies, so this warning does not apply.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
    return torch


def load_program(torch: Any, path: Path, device: Any, *, runners: int, compiling: Mapping[str, Any] | None) -> Program:
    """Load a file's program on ``device``, or on its author's choice of device for None.

    Raises:
        InternalError: the file is not such a program, or could run code while it is read.
        Exception: PyTorch's own errors for a file that it cannot read.
    """
    kind = archive_kind(path)
    if kind == SCRIPT:
        if compiling is not None:
            raise UnsupportedError("TorchScript cannot be compiled: export the model with torch.export for that")
        check_script(path)
        return _script(torch, path, device)
    if kind == EXPORTED:
        return _exported(torch, path, device, compiling)
    return _compiled(torch, path, device, runners)


def share_parameters(torch: Any, path: Path, device: Any, first: Program) -> Program:
    """Return another copy of a TorchScript program that shares the first one's parameters.

    Its buffers and attributes are separate.
    """
    other = _script(torch, path, device)
    theirs = dict(first.call.named_parameters())  # type: ignore[attr-defined]
    for name, parameter in other.call.named_parameters():  # type: ignore[attr-defined]
        parameter.data = theirs[name].data
    return other


def _script(torch: Any, path: Path, device: Any) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated but widely used
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
    """Return the kinds of all nodes of a TorchScript graph, with loops and branches."""
    kinds: set[str] = set()
    waiting = list(graph.nodes())
    while waiting:
        node = waiting.pop()
        kinds.add(node.kind())
        for block in node.blocks():
            waiting += block.nodes()
    return kinds


def _exported(torch: Any, path: Path, device: Any, compiling: Mapping[str, Any] | None) -> Program:
    check_exported(path, lambda file: torch.load(file, weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about format versions, addressed to exporters
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
    """Return a program for a device.

    Nodes of a program exported on a CPU create tensors there, so the nodes must move as well as the weights.
    """
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
    complete = tuple(info for info in infos if info is not None)
    return complete if len(complete) == len(infos) else None


def _addresses(tensors: Sequence[Any]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())


def datatype_name(dtype: object) -> str:
    """Return the wire's name of a ``torch.dtype``, or ""."""
    return DATATYPE_BY_NAME.get(str(dtype).removeprefix("torch."), "")


def to_value(torch: Any, name: str, datatype: str, array: Array) -> Any:
    """Return a program's argument for an array.

    It must not be written to, because it may be the bytes of a request.

    Raises:
        InvalidArgumentError: an element of a BYTES input is not UTF-8.
    """
    if datatype == "BYTES":
        return texts(f"input '{name}'", array)
    if isinstance(array, DeviceArray):  # shares the device's memory, which the caller must not write to
        return torch.from_dlpack(array)
    if not array.flags.c_contiguous or not array.size:  # an empty array may have unusual strides
        array = array.copy()
    if datatype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(
    torch: Any, name: str, datatype: str, value: Any, kept: Collection[int], *, cast: bool, keep_on_device: bool = False
) -> Array:
    """Return a result as an array of the configured type, a `DeviceArray` if ``keep_on_device``.

    Args:
        torch: the module.
        name: name of the output, for errors.
        datatype: wire name of the configured type.
        value: a tensor, or a list of text for BYTES.
        kept: addresses of memory that the program writes to again; tensors there are copied.
        cast: convert another floating type to the configured one, as mixed precision needs it.

    Raises:
        InternalError: the result has another type, with Triton's text.
    """
    if datatype == "BYTES":
        return _texts(name, value)
    if not isinstance(value, torch.Tensor):
        raise InternalError(f"output '{name}' is a {type(value).__name__}, not a tensor", from_model=True)
    actual = datatype_name(value.dtype)
    if actual != datatype and cast and value.is_floating_point() and datatype in ("FP16", "FP32", "FP64"):
        value, actual = value.to(getattr(torch, f"float{datatype[2:]}")), datatype
    if actual != datatype:
        raise InternalError(
            f"configuration unexpected datatype TYPE_{datatype} for output '{name}', model provides "
            f"{'TYPE_' + actual if actual else value.dtype}",
            from_model=True,
        )
    value = value.detach()
    if value.device.type != "cpu" and not keep_on_device:
        value = value.cpu()
    elif kept and value.numel() and value.untyped_storage().data_ptr() in kept:
        value = value.clone()
    value = value.contiguous().resolve_neg()
    if keep_on_device:
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
