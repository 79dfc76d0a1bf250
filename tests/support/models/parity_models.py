"""The same small models in every format, with the framework's answers; what a format lacks is said.

A `Format` writes a model's files and gives a function that runs the model in the framework itself, without the engine.
Frameworks are imported when a test uses their format.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remora.messages import DTYPES, Array

Arrays = Mapping[str, Array]
Reference = Callable[[Arrays], dict[str, Array]]
NUMBERS = ("UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BOOL")
WIDE = (*NUMBERS, "UINT16", "UINT32", "UINT64")
_RANDOM = np.random.default_rng(7)
W1 = _RANDOM.standard_normal((16, 32)).astype("f4")
W2 = _RANDOM.standard_normal((32, 4)).astype("f4")
KERNELS = (_RANDOM.standard_normal((4, 3, 3, 3)) / 5).astype("f4")


class Model(NamedTuple):
    """One of the models: its configuration without a backend, and a request of three rows."""

    kind: str
    config: str
    inputs: dict[str, Array]
    datatype: str = "FP32"


def tensor(name: str, datatype: str, *dims: int) -> str:
    name_of = "STRING" if datatype == "BYTES" else datatype
    return f'{{ name: "{name}" data_type: TYPE_{name_of} dims: {list(dims)} }}'


def mlp() -> Model:
    """Two layers: FP32 rows of 16 to rows of 4."""
    config = f"max_batch_size: 8 input {tensor('x', 'FP32', 16)} output {tensor('y', 'FP32', 4)}"
    return Model("mlp", config, {"x": np.random.default_rng(1).standard_normal((3, 16)).astype("f4")})


def convolution() -> Model:
    """One convolution over images whose size varies."""
    config = f"max_batch_size: 8 input {tensor('x', 'FP32', 3, -1, -1)} output {tensor('y', 'FP32', 4, -1, -1)}"
    return Model("convolution", config, {"x": np.random.default_rng(2).standard_normal((3, 3, 9, 7)).astype("f4")})


def two() -> Model:
    """Two inputs and two outputs: the sum and the difference."""
    config = (
        f"max_batch_size: 8 input {tensor('a', 'FP32', 5)} input {tensor('b', 'FP32', 5)} "
        f"output {tensor('sum', 'FP32', 5)} output {tensor('difference', 'FP32', 5)}"
    )
    a, b = np.random.default_rng(3).standard_normal((2, 3, 5)).astype("f4")
    return Model("two", config, {"a": a, "b": b})


def single() -> Model:
    """A model that does not batch: y = x + 1."""
    config = f"input {tensor('x', 'FP32', 2, 3)} output {tensor('y', 'FP32', 2, 3)}"
    return Model("single", config, {"x": np.arange(6, dtype="f4").reshape(2, 3)})


def identity(datatype: str, width: int = 4) -> Model:
    """What came in, of any type and length; ``width`` 0 is a request without elements."""
    config = f"max_batch_size: 8 input {tensor('x', datatype, -1)} output {tensor('y', datatype, -1)}"
    return Model("identity", config, {"x": values(datatype, (3, width))}, datatype)


def strings() -> Model:
    """Text in, the same text out, one element a row."""
    config = f"max_batch_size: 8 input {tensor('x', 'BYTES', 1)} output {tensor('y', 'BYTES', 1)}"
    rows = np.array([["é".encode()], [b""], [b"a b"]], object)
    return Model("strings", config, {"x": rows}, "BYTES")


def values(datatype: str, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape))
    if datatype == "BYTES":
        array = np.empty(size, object)
        array[:] = [f"é{index}".encode() for index in range(size)]
        return array.reshape(shape)
    if datatype == "BOOL":
        return (np.arange(size) % 3 == 0).reshape(shape)
    return np.arange(size).astype(DTYPES[datatype]).reshape(shape)


class Format:
    """A framework's file format."""

    name = ""
    backend = ""
    needs: tuple[str, ...] = ()
    install = ""
    kinds: tuple[str, ...] = ("mlp", "convolution", "two", "single")
    datatypes: tuple[str, ...] = NUMBERS
    has_strings = False
    on_gpu = False
    """Whether PARITY_KIND says where its models are to run."""

    @property
    def place(self) -> str:
        """The kind of instance group that its models get."""
        return os.environ.get("PARITY_KIND", "KIND_CPU") if self.on_gpu else "KIND_CPU"

    def missing(self) -> str:
        """Why this format cannot be tested here, "" when it can."""
        lacking = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return f"{self.name}: {', '.join(lacking)} is not installed: {self.install}" if lacking else ""

    def models(self) -> list[Model]:
        makers = {"mlp": mlp, "convolution": convolution, "two": two, "single": single}
        found = [makers[kind]() for kind in self.kinds]
        found += [identity(datatype) for datatype in self.datatypes]
        found += [identity(self.datatypes[0], 0)] if self.datatypes else []
        return [*found, strings()] if self.has_strings else found

    def write(self, model: Model, directory: Path) -> Reference:
        """Write the model's directory; gives the model as the framework runs it."""
        version = directory / "1"
        version.mkdir(parents=True)
        text, reference = self.export(model, version)
        group = "" if self.place == "KIND_CPU" else f"instance_group {{ kind: {self.place} }}"
        (directory / "config.pbtxt").write_text(f"{text} {model.config} {group}")
        return reference

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        """Write the model's files; gives what the configuration says besides tensors, and the reference."""
        raise NotImplementedError


class Onnx(Format):
    name = backend = "onnxruntime"
    on_gpu = True
    needs = ("onnx", "onnxruntime")
    install = "pip install '.[demo]'"
    datatypes = (*WIDE, "BYTES")

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        import onnx
        import onnxruntime
        from onnx import helper, numpy_helper

        element = {"FP32": "FLOAT", "FP16": "FLOAT16", "FP64": "DOUBLE", "BYTES": "STRING"}.get(
            model.datatype, model.datatype
        )
        kind = onnx.TensorProto.DataType.Value(element)
        dims: dict[str, list[Any]] = {"mlp": ["n", 16], "convolution": ["n", 3, "h", "w"], "two": ["n", 5]}
        shape = dims.get(model.kind, [2, 3] if model.kind == "single" else ["n", "w"])
        out = {"mlp": ["n", 4], "convolution": ["n", 4, "h2", "w2"]}.get(model.kind, shape)
        node = helper.make_node
        nodes, names = {
            "mlp": ([node("MatMul", ["x", "w1"], ["h"]), node("Relu", ["h"], ["r"]),
                     node("MatMul", ["r", "w2"], ["y"])], ["y"]),
            "convolution": ([node("Conv", ["x", "k"], ["y"])], ["y"]),
            "two": ([node("Add", ["a", "b"], ["sum"]), node("Sub", ["a", "b"], ["difference"])], ["sum", "difference"]),
            "single": ([node("Add", ["x", "one"], ["y"])], ["y"]),
        }.get(model.kind, ([node("Identity", ["x"], ["y"])], ["y"]))  # fmt: skip
        weights = {
            "mlp": {"w1": W1, "w2": W2},
            "convolution": {"k": KERNELS},
            "single": {"one": np.ones(1, "f4")},
        }.get(model.kind, {})
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(name, kind, shape) for name in model.inputs],
            [helper.make_tensor_value_info(name, kind, out) for name in names],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(made, version / "model.onnx")
        session = onnxruntime.InferenceSession(made.SerializeToString())

        def reference(inputs: Arrays) -> dict[str, Array]:
            texts = {name: decoded(array) if array.dtype == object else array for name, array in inputs.items()}
            return dict(zip(names, map(encoded, session.run(names, texts)), strict=True))

        return 'backend: "onnxruntime"', reference


class Torch(Format):
    """TorchScript."""

    name, backend = "torchscript", "pytorch"
    on_gpu = True
    needs = ("torch",)
    install = "make test-torch"
    datatypes = (*WIDE, "BF16")
    has_strings = True

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        import warnings

        import torch

        module = torch_module(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(module).save(str(version / "model.pt"))
        return 'backend: "pytorch"', torch_reference(model, module)


class TorchExport(Format):
    """Programs of torch.export."""

    name, backend = "torch.export", "pytorch"
    on_gpu = True
    needs = ("torch",)
    install = "make test-torch"
    datatypes = (*NUMBERS, "BF16")

    def program(self, model: Model) -> tuple[Any, Any]:
        import torch

        module = torch_module(model)
        tensors = {name: torch_tensor(model.datatype, array) for name, array in model.inputs.items()}
        varies = {"convolution": (0, 2, 3), "single": (), "identity": (0, 1)}.get(model.kind, (0,))
        shapes = tuple(dict.fromkeys(varies, torch.export.Dim.AUTO) for _ in tensors)
        return torch.export.export(module, tuple(tensors.values()), dynamic_shapes=shapes), module

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        import torch

        program, module = self.program(model)
        torch.export.save(program, version / "model.pt2")
        return 'backend: "pytorch"', torch_reference(model, module)

    def models(self) -> list[Model]:
        return [model for model in super().models() if model.inputs["x" if "x" in model.inputs else "a"].size]


class TorchCompiled(TorchExport):
    """AOTInductor packages. Compiling is slow, so there are two models, each compiled once."""

    name = "aotinductor"
    kinds = ("mlp", "two")
    datatypes = ()

    def __init__(self) -> None:
        self._packages: dict[str, bytes] = {}

    def missing(self) -> str:
        return super().missing() or ("" if shutil.which("g++") else "aotinductor: there is no g++ to compile with")

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        import torch

        package = version / "model.pt2"
        if model.kind in self._packages:
            package.write_bytes(self._packages[model.kind])
            return 'platform: "torch_aoti"', torch_reference(model, torch_module(model))
        program, module = self.program(model)
        torch._inductor.aoti_compile_and_package(program, package_path=str(package))
        self._packages[model.kind] = package.read_bytes()
        return 'platform: "torch_aoti"', torch_reference(model, module)


def torch_tensor(datatype: str, array: Array) -> Any:
    import torch

    if datatype == "BF16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def torch_reference(model: Model, module: Any) -> Reference:
    import torch

    names = ["sum", "difference"] if model.kind == "two" else ["y"]

    def reference(inputs: Arrays) -> dict[str, Array]:
        if model.kind == "strings":
            return {"y": encoded(np.array(module([text.decode() for text in inputs["x"].ravel()]), object)[:, None])}
        with torch.no_grad():
            result = module(*[torch_tensor(model.datatype, array) for array in inputs.values()])
        found = result if isinstance(result, tuple) else (result,)
        arrays = [
            each.view(torch.int16).numpy().view("u2") if model.datatype == "BF16" else each.numpy() for each in found
        ]
        return dict(zip(names, arrays, strict=True))

    return reference


def torch_module(model: Model) -> Any:
    import torch

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.from_numpy(W1.copy()))
            self.second = torch.nn.Parameter(torch.from_numpy(W2.copy()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.first) @ self.second

    class Convolution(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = torch.nn.Parameter(torch.from_numpy(KERNELS.copy()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv2d(x, self.kernels)

    class Two(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a - b

    class Single(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Identity(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    class Strings(torch.nn.Module):
        def forward(self, x: list[str]) -> list[str]:
            return x

    kinds = {"mlp": Layers, "convolution": Convolution, "two": Two, "single": Single, "strings": Strings}
    return kinds.get(model.kind, Identity)().eval()


class PythonModel(Format):
    """Triton's Python models, in a thread."""

    name = backend = "python"
    datatypes = (*WIDE, "BYTES")
    has_strings = True

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        (version / "model.py").write_text(PYTHON_MODEL)
        np.savez(version / "weights.npz", w1=W1, w2=W2, k=KERNELS)
        parameters = {"ISOLATION": "thread", "kind": model.kind}
        text = " ".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        )
        return f'backend: "python" {text}', lambda inputs: compute(model, inputs)


class Native(Format):
    """Shared libraries, compiled from C; "two" is the example of the documentation."""

    name = backend = "native"
    kinds = ("mlp", "two", "single")
    datatypes = (*WIDE, "BF16", "BYTES")
    has_strings = True

    def missing(self) -> str:
        return "" if shutil.which("cc") else "native: there is no C compiler (cc)"

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        kind = {"mlp": "MLP", "single": "SINGLE", "two": ""}.get(model.kind, "IDENTITY")
        build_native(version / "model.so", kind)
        return 'backend: "native"', lambda inputs: compute(model, inputs)


def build_native(library: Path, kind: str, *defines: str) -> None:
    """Compile one of the models in C; without a kind the documentation's example."""
    from remora_runtimes.native import INCLUDE

    tests = Path(__file__).resolve().parents[2]
    example = tests.parent / "docs" / "examples" / "native-backend" / "addsub.c"
    source = tests / "runtimes" / "native_models.c" if kind else example
    rows = {"W1": W1, "W2": W2} if kind == "MLP" else {}
    texts = [
        f"static const float {name}[{array.shape[0]}][{array.shape[1]}] = {{"
        + ",".join("{" + ",".join(f"{value!r}f" for value in row) + "}" for row in array.tolist())
        + "};"
        for name, array in rows.items()
    ]
    (library.parent / "weights.h").write_text("\n".join(texts))
    asked = [f"-DMODEL={kind}", *(["-DWEIGHTS"] if rows else []), *defines] if kind else []
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    places = [f"-I{INCLUDE}", f"-I{library.parent}"]
    subprocess.run(["cc", *flags, *places, *asked, str(source), "-o", str(library)], check=True)


class Trees(Format):
    """Forests of decision trees, each grown here by its library: values, class numbers, probabilities."""

    backend = "fil"
    datatypes = ()
    model_type = ""
    install = "make test-trees"

    def models(self) -> list[Model]:
        rows = np.random.default_rng(11).standard_normal((3, 6)).astype("f4")
        return [
            Model(kind, self.configured(width, **parameters), {"input__0": rows})
            for kind, width, parameters in (
                ("regression", 1, {"output_class": "false"}),
                ("binary", 1, {"output_class": "true"}),
                ("binary-probabilities", 2, {"output_class": "true", "predict_proba": "true"}),
                ("multiclass", 1, {"output_class": "true"}),
                ("multiclass-probabilities", 3, {"output_class": "true", "predict_proba": "true"}),
            )
        ]

    def configured(self, width: int, **parameters: str) -> str:
        given = {"model_type": self.model_type, **parameters}
        text = " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in given.items())
        tensors = f"input {tensor('input__0', 'FP32', 6)} output {tensor('output__0', 'FP32', width)}"
        return f"max_batch_size: 8 {text} {tensors}"

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        random = np.random.default_rng(5)
        features = random.standard_normal((300, 6)).astype("f4")
        score = features[:, 0] + features[:, 1] * features[:, 2]
        kind, _, probabilities = model.kind.partition("-")
        labels = {"regression": score, "binary": score > 0, "multiclass": np.digitize(score, [-0.5, 0.5])}[kind]
        grown = self.grow(kind, features, labels.astype("f4" if kind == "regression" else "i8"), version)

        def reference(inputs: Arrays) -> dict[str, Array]:
            rows = inputs["input__0"]
            found = grown.predict_proba(rows) if probabilities else grown.predict(rows)
            return {"output__0": np.asarray(found, "f4").reshape(len(rows), -1)}

        return f'backend: "{self.backend}"', reference

    def grow(self, kind: str, features: Array, labels: Array, version: Path) -> Any:
        """Train, save into ``version``; gives an estimator with scikit-learn's methods."""
        raise NotImplementedError


class XGBoostJson(Trees):
    name, model_type, filename = "xgboost_json", "xgboost_json", "xgboost.json"
    needs = ("xgboost", "sklearn")

    def grow(self, kind: str, features: Array, labels: Array, version: Path) -> Any:
        import xgboost

        maker = xgboost.XGBRegressor if kind == "regression" else xgboost.XGBClassifier
        grown = maker(n_estimators=10, max_depth=4, n_jobs=1).fit(features, labels)
        grown.get_booster().save_model(version / self.filename)
        return grown


class XGBoostUbj(XGBoostJson):
    name, model_type, filename = "xgboost_ubj", "xgboost_ubj", "xgboost.ubj"


class LightGbm(Trees):
    name = model_type = "lightgbm"
    needs = ("lightgbm", "sklearn")

    def grow(self, kind: str, features: Array, labels: Array, version: Path) -> Any:
        import lightgbm

        maker = lightgbm.LGBMRegressor if kind == "regression" else lightgbm.LGBMClassifier
        grown = maker(n_estimators=10, n_jobs=1, verbose=-1).fit(features, labels)
        grown.booster_.save_model(version / "model.txt")
        return grown


class Treelite(Trees):
    name = model_type = "treelite_checkpoint"
    needs = ("treelite", "sklearn")

    def grow(self, kind: str, features: Array, labels: Array, version: Path) -> Any:
        import treelite
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

        maker = RandomForestRegressor if kind == "regression" else RandomForestClassifier
        grown = maker(n_estimators=10, max_depth=5, random_state=1).fit(features, labels)
        treelite.sklearn.import_model(grown).serialize(str(version / "checkpoint.tl"))
        return grown


class OpenVino(Format):
    """OpenVINO's own files."""

    name = backend = "openvino"
    needs = ("openvino",)
    install = "make test-openvino"
    datatypes = ("FP32", "FP16", "BF16", "INT8", "UINT8", "INT32", "INT64", "BOOL")
    has_strings = True

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        import openvino
        import openvino.opset13 as ops

        kinds = {"FP32": "f32", "FP16": "f16", "BF16": "bf16", "BOOL": "boolean", "BYTES": "string"}
        kind = getattr(
            openvino.Type, kinds.get(model.datatype) or model.datatype.lower().replace("uint", "u").replace("int", "i")
        )
        shapes = {"mlp": [-1, 16], "convolution": [-1, 3, -1, -1], "two": [-1, 5], "single": [2, 3]}
        shape = shapes.get(model.kind, [-1, -1])
        given = [ops.parameter(shape, dtype=kind, name=name) for name in model.inputs]
        for node, name in zip(given, model.inputs, strict=True):
            node.output(0).set_names({name})
        x = given[0]
        if model.kind == "mlp":
            hidden = ops.relu(ops.matmul(x, ops.constant(W1), False, False))
            found = {"y": ops.matmul(hidden, ops.constant(W2), False, False)}
        elif model.kind == "convolution":
            found = {"y": ops.convolution(x, ops.constant(KERNELS), [1, 1], [0, 0], [0, 0], [1, 1])}
        elif model.kind == "two":
            found = {"sum": ops.add(*given), "difference": ops.subtract(*given)}
        elif model.kind == "single":
            found = {"y": ops.add(x, ops.constant(np.ones(1, "f4")))}
        else:
            found = {"y": ops.reshape(x, ops.shape_of(x), False)}
        for name, node in found.items():
            node.output(0).set_names({name})
        made = openvino.Model([ops.result(node) for node in found.values()], given, "m")
        openvino.save_model(made, version / "model.xml", compress_to_fp16=False)
        compiled = openvino.Core().compile_model(made, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

        def reference(inputs: Arrays) -> dict[str, Array]:
            texts = [decoded(a).astype(np.str_) if a.dtype == object else a for a in inputs.values()]
            answer = compiled(texts)
            return {
                name: encoded(answer[at].astype(object))
                if model.datatype == "BYTES"
                else answer[at].copy().view("u2" if model.datatype == "BF16" else answer[at].dtype)
                for at, name in enumerate(found)
            }

        return 'backend: "openvino"', reference


class OpenVinoOnnx(Onnx):
    """ONNX files on OpenVINO."""

    name, backend = "openvino-onnx", "openvino"
    needs = ("openvino", "onnx", "onnxruntime")
    install = "make test-openvino"
    datatypes = ("FP32", "INT64")

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        _, reference = super().export(model, version)
        return 'backend: "openvino"', reference


class TensorFlow(Format):
    """SavedModels."""

    name = backend = "tensorflow"
    needs = ("tensorflow",)
    install = "make test-tensorflow"
    datatypes = (*NUMBERS, "BF16", "BYTES")
    has_strings = True

    def export(self, model: Model, version: Path) -> tuple[str, Reference]:
        import tensorflow as tf

        kinds = {"FP32": "float32", "FP16": "float16", "FP64": "float64", "BF16": "bfloat16", "BYTES": "string"}
        kind = tf.as_dtype(kinds.get(model.datatype, model.datatype.lower()))
        shapes = {
            "mlp": [None, 16],
            "convolution": [None, 3, None, None],
            "two": [None, 5],
            "single": [2, 3],
            "strings": [None, 1],
        }
        shape = shapes.get(model.kind, [None, None])
        specs = [tf.TensorSpec(shape, kind, name=name) for name in model.inputs]

        def compute_it(*given: Any) -> dict[str, Any]:
            x = given[0]
            if model.kind == "two":
                return {"sum": given[0] + given[1], "difference": given[0] - given[1]}
            if model.kind == "mlp":
                return {"y": tf.nn.relu(x @ W1) @ W2}
            if model.kind == "convolution":
                images = tf.transpose(x, [0, 2, 3, 1])
                found = tf.nn.conv2d(images, KERNELS.transpose(2, 3, 1, 0), 1, "VALID")
                return {"y": tf.transpose(found, [0, 3, 1, 2])}
            return {"y": x + 1 if model.kind == "single" else tf.identity(x)}

        module = tf.Module()
        if len(specs) == 2:
            module.run = tf.function(lambda a, b: compute_it(a, b), input_signature=specs)
        else:
            module.run = tf.function(lambda x: compute_it(x), input_signature=specs)
        tf.saved_model.save(module, str(version / "model.savedmodel"), signatures=module.run)

        def reference(inputs: Arrays) -> dict[str, Array]:
            given = [tf.constant(array) for array in inputs.values()]
            if model.datatype == "BF16":
                given = [tf.bitcast(each, tf.bfloat16) for each in given]
            answer = {name: np.asarray(value.numpy()) for name, value in compute_it(*given).items()}
            return {name: a.view("u2") if model.datatype == "BF16" else a for name, a in answer.items()}

        return 'platform: "tensorflow_savedmodel"', reference


PYTHON_MODEL = """
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kind = json.loads(args["model_config"])["parameters"]["kind"]["string_value"]
        weights = np.load(Path(args["model_repository"], args["model_version"], "weights.npz"))
        self.w1, self.w2, self.k = weights["w1"], weights["w2"], weights["k"]

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in self.run(request).items()])
                for request in requests]

    def run(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if self.kind == "two":
            return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}
        x = inputs["x"]
        if self.kind == "mlp":
            return {"y": np.maximum(x @ self.w1, 0) @ self.w2}
        if self.kind == "convolution":
            windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
            return {"y": np.einsum("nchwij,ocij->nohw", windows, self.k).astype("f4")}
        return {"y": x + 1 if self.kind == "single" else x}
"""


def compute(model: Model, inputs: Arrays) -> dict[str, Array]:
    """The models in numpy."""
    if model.kind == "two":
        return {"sum": inputs["a"] + inputs["b"], "difference": inputs["a"] - inputs["b"]}
    x = inputs["x"]
    if model.kind == "mlp":
        return {"y": np.maximum(x @ W1, 0) @ W2}
    if model.kind == "convolution":
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
        return {"y": np.einsum("nchwij,ocij->nohw", windows, KERNELS).astype("f4")}
    return {"y": x + 1 if model.kind == "single" else x.copy()}


def decoded(array: Array) -> Array:
    flat = np.empty(array.size, object)
    flat[:] = [element.decode() for element in array.ravel()]
    return flat.reshape(array.shape)


def encoded(array: Array) -> Array:
    if array.dtype != object:
        return array
    flat = np.empty(array.size, object)
    flat[:] = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
    return flat.reshape(array.shape)


FORMATS: tuple[Format, ...] = (
    Onnx(),
    PythonModel(),
    Native(),
    Torch(),
    TorchExport(),
    TorchCompiled(),
    XGBoostJson(),
    XGBoostUbj(),
    LightGbm(),
    Treelite(),
    OpenVino(),
    OpenVinoOnnx(),
    TensorFlow(),
)
