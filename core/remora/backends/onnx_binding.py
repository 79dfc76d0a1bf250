"""Runs of an ONNX Runtime session on tensors on its device; the law: one thread at a time, and nothing moves twice.

Inputs are bound where they are: a tensor on the device at its address, an array of the host after one copy through
memory that the device reads without a detour. Outputs are made on the device. They stay there, or come back in one
copy each. With CUDA graphs the memory of inputs and outputs is fixed for each set of shapes: a graph replays addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from remora.backends.onnx_plan import GraphPlan
from remora.backends.transfers import Places, Transfer
from remora.device_arrays import Block, DeviceArray, Memory
from remora.messages import DTYPES, Array, Tensor

_BFLOAT16 = 16  # TensorProto.DataType.BFLOAT16
_NEVER = -1
"""The graph number that means "run without a graph"."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class _Fixed(NamedTuple):
    """Memory and binding of one set of shapes, and the number of its graph."""

    binding: Any
    inputs: Mapping[str, Block]
    outputs: Sequence[DeviceArray]
    options: Any


class Binding:
    """One instance's way to run a session.

    Args:
        runtime: the module ``onnxruntime``.
        inner: the session.
        memory: of the session's device.
        transfer: to and from there.
        types: the wire's datatypes of all inputs and outputs.
        entries: configuration entries of each run.
        graphs: which sets of shapes get a CUDA graph; None where there are none.
    """

    def __init__(
        self,
        runtime: Any,
        inner: Any,
        memory: Memory,
        transfer: Transfer,
        types: Mapping[str, str],
        entries: Mapping[str, str],
        graphs: GraphPlan | None = None,
    ) -> None:
        self._runtime = runtime
        self._inner = inner
        self._memory = memory
        self._transfer = transfer
        self._types = types
        self._entries = entries
        self._graphs = graphs
        self._device = ("cpu", 0) if memory.device[0] == 1 else ("cuda", memory.device[1])
        # What the Python classes check costs ten times what they call; the engine and the C++ classes check it as well.
        session = getattr(inner, "_sess", None)
        self._call = getattr(session, "run_with_iobinding", None)
        self._plain = self._options({} if graphs is None else {"gpu_graph_id": str(_NEVER)})
        self._fixed: dict[tuple[Shapes, tuple[str, ...]], _Fixed] = {}
        self._places = Places(memory)

    def run(self, inputs: Mapping[str, Array], wanted: tuple[str, ...], *, stays: bool) -> list[Tensor]:
        """The outputs ``wanted``, in that order; on the device where they may stay. Raises what ONNX Runtime raises."""
        made = self._graph_run(inputs, wanted) if self._graphs is not None else None
        if made is None:
            made = self._run(inputs, wanted, self._plain)
        elif stays:  # the next run writes over a graph's outputs
            made = [array.as_shared().apart() for array in made]
        data: Sequence[Any] = made if stays else self._transfer.to_host(made)
        return [Tensor(name, self._types[name], value) for name, value in zip(wanted, data, strict=True)]

    def close(self) -> None:
        """Let memory and graphs go."""
        self._fixed.clear()
        self._places.close()
        self._transfer.close()

    def _run(self, inputs: Mapping[str, Array], wanted: tuple[str, ...], options: Any) -> list[DeviceArray]:
        binding = self._inner.io_binding()
        copies: list[tuple[int, Array]] = []
        for name, given in inputs.items():
            address = self._places.of(name, given, copies)
            self._bind(binding.bind_input, name, given.shape, address)
        self._transfer.to_device(copies)
        for name in wanted:
            binding.bind_output(name, *self._device)
        self._execute(binding, options)
        values = binding.get_outputs()
        # The values are parts of the binding, so each keeps it alive.
        return [
            DeviceArray(self._types[name], value.shape(), self._memory, value.data_ptr(), (value, binding))
            for name, value in zip(wanted, values, strict=True)
        ]

    def _execute(self, binding: Any, options: Any) -> None:
        """Run the session, and wait for its device."""
        inner = getattr(binding, "_iobinding", None)
        if self._call is None or inner is None:
            self._inner.run_with_iobinding(binding, options)
        else:
            self._call(inner, options)
        binding.synchronize_outputs()

    def _bind(self, bind: Callable[..., None], name: str, shape: Sequence[int], address: int) -> None:
        datatype = self._types[name]
        kind: Any = _BFLOAT16 if datatype == "BF16" else DTYPES[datatype]
        bind(name, *self._device, kind, list(shape), address)

    # -- CUDA graphs ------------------------------------------------------------------------------------------------

    def _graph_run(self, inputs: Mapping[str, Array], wanted: tuple[str, ...]) -> list[DeviceArray] | None:
        """The outputs, in memory that the next run of the same shapes writes to; None for shapes without a graph."""
        assert self._graphs is not None
        shapes: Shapes = tuple(sorted((name, tuple(array.shape)) for name, array in inputs.items()))
        fixed = self._fixed.get((shapes, wanted))
        if fixed is None:
            if not self._graphs.wants(shapes, len(self._fixed)):
                return None
            # Once without: it tells the outputs' shapes, and lets the libraries choose their kernels.
            fixed = self._prepare(inputs, wanted, self._run(inputs, wanted, self._plain))
            self._fixed[shapes, wanted] = fixed
        copies: list[tuple[int, Array]] = []
        for name, given in inputs.items():
            if isinstance(given, DeviceArray):
                if given.nbytes:
                    self._memory.copy(fixed.inputs[name].address, given.address, given.nbytes)
            else:
                copies.append((fixed.inputs[name].address, np.ascontiguousarray(given)))
        self._transfer.to_device(copies)
        self._execute(fixed.binding, fixed.options)
        return [DeviceArray(out.datatype, out.shape, out.memory, out.address, out.owner) for out in fixed.outputs]

    def _prepare(self, inputs: Mapping[str, Array], wanted: tuple[str, ...], found: Sequence[DeviceArray]) -> _Fixed:
        binding = self._inner.io_binding()
        blocks = {name: self._memory.take(array.nbytes) for name, array in inputs.items()}
        for name, array in inputs.items():
            self._bind(binding.bind_input, name, array.shape, blocks[name].address)
        outputs = []
        for name, example in zip(wanted, found, strict=True):
            block = self._memory.take(example.nbytes)
            self._bind(binding.bind_output, name, example.shape, block.address)
            outputs.append(DeviceArray(example.datatype, example.shape, self._memory, block.address, block.owner))
        return _Fixed(binding, blocks, outputs, self._options({"gpu_graph_id": str(len(self._fixed) + 1)}))

    def _options(self, more: Mapping[str, str]) -> Any:
        options = self._runtime.RunOptions()
        for key, value in {**self._entries, **more}.items():
            options.add_run_config_entry(key, value)
        return options
