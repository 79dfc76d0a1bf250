"""Backend for forests of decision trees, compatible with Triton's FIL backend [C16].

It has FIL's name and parameters. The library that grew a forest runs it (docs/decisions/0021). Outputs are those of
FIL: values, class numbers or probabilities, in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remora.api.backends import concurrent_instances
from remora.backends import Instance, Placement, Source
from remora.backends.model_files import (
    default_max_batch,
    get_bool,
    get_parameter,
    load_failure,
    model_path,
    require_file,
    warn_of_unused,
)
from remora.backends.ragged import array_instance
from remora.calls import TensorInfo
from remora.config import complete_from_tensors
from remora.errors import ConfigError
from remora.messages import Array, Tensor
from remora.model_files import NAMED_OUTPUTS
from remora.proto.model_config_pb2 import ModelConfig
from remora_runtimes.trees.forests import Forest, lightgbm_forest, treelite_forest, xgboost_forest

_INPUT, _OUTPUT, _CONTRIBUTIONS = "input__0", "output__0", "treeshap_output"
_TYPES: Mapping[str, tuple[str, Callable[[str, Path, int], Forest]]] = {
    "xgboost_ubj": ("xgboost.ubj", xgboost_forest),
    "xgboost_json": ("xgboost.json", xgboost_forest),
    "lightgbm": ("model.txt", lightgbm_forest),
    "treelite_checkpoint": ("checkpoint.tl", treelite_forest),
}
_LABEL, _PROBABILITIES = "label", "probabilities"
_USED = frozenset({"model_type", "output_class", "is_classifier", "predict_proba", "threshold", NAMED_OUTPUTS})
# These change how FIL stores its trees and do not affect answers.
_WITHOUT_EFFECT = frozenset(
    {"storage_type", "algo", "blocks_per_sm", "threads_per_tree", "transfer_threshold", "chunk_size", "layout",
     "use_experimental_optimizations", "xgboost_allow_unknown_field"}
)  # fmt: skip


class TreePlan(NamedTuple):
    """Requested form of a forest's output.

    ``classes`` requests class numbers; ``threshold`` applies to binary ones. ``named`` requests the outputs of a
    classifier under the names that estimators of other libraries have: ``label`` (INT64) and ``probabilities``.
    """

    model_type: str
    classes: bool
    probabilities: bool
    threshold: float
    named: bool = False


class TreesBackend:
    """Backend for the files of XGBoost, LightGBM and Treelite.

    They are ``xgboost.json``, ``xgboost.ubj``, ``model.txt`` and ``checkpoint.tl``.
    """

    name = "fil"
    preferred_kinds = ("CPU",)

    def open(self, source: Source, config: ModelConfig) -> TreesModel:
        """Load the forest.

        Raises:
            NotFoundError: there is no model file.
            ConfigError: a parameter is invalid, or the library is not installed.
            InternalError: the library cannot read the file.
        """
        kind = _model_type(config, source)
        path = require_file(model_path(source, config, _TYPES[kind][0]), source, "*.json", "*.ubj", "*.txt", "*.tl")
        try:
            forest = _TYPES[kind][1](source.name, path, max(1, source.cpus // concurrent_instances(config)))
        except ConfigError:
            raise
        except Exception as error:  # each library has other classes of errors
            raise load_failure(source, path, str(error).strip().partition("\nStack trace")[0]) from error
        plan = plan_trees(config, source.settings, kind, forest.classes)
        warn_of_unused(config, _USED | _WITHOUT_EFFECT, "fil")
        return TreesModel(source, forest, plan)


class TreesModel:
    """Opened forest, shared by all instances."""

    def __init__(self, source: Source, forest: Forest, plan: TreePlan) -> None:
        self._source = source
        self.forest = forest
        self._plan = plan

    def complete(self, config: ModelConfig) -> None:
        """Fill in omitted fields of ``config``, and check the others. Raises ConfigError."""
        dims = next((list(row.dims) for row in config.output if row.name == _OUTPUT), [])
        width = output_width(self._plan, self.forest)
        if self._plan.probabilities and self.forest.classes == 2 and dims == [1]:
            width = 1
        outputs = [TensorInfo(_OUTPUT, "FP32", (-1, width))]
        if self._plan.named:
            outputs = [
                TensorInfo(_LABEL, "INT64", (-1, 1)),
                TensorInfo(_PROBABILITIES, "FP32", (-1, self.forest.classes)),
            ]
        if any(row.name == _CONTRIBUTIONS for row in config.output):  # costly, so computed only if configured
            outputs.append(TensorInfo(_CONTRIBUTIONS, "FP32", (-1, *contributions_shape(config.name, self.forest))))
        complete_from_tensors(
            config,
            [TensorInfo(_INPUT, "FP32", (-1, self.forest.features))],
            outputs,
            default_max_batch=default_max_batch(self._source.settings),
            independent="a forest computes each row alone",
        )

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance on the CPU. Raises ConfigError if it is placed on a GPU."""
        if placement.kind == "GPU":
            raise ConfigError(
                f"model '{config.name}' asks for a GPU, but forests run on the CPU here: set the instance group's kind "
                "to KIND_CPU or KIND_AUTO"
            )
        forest, plan = self.forest, self._plan
        dims = {row.name: tuple(row.dims) for row in config.output}

        labels = plan._replace(classes=True, probabilities=False)
        both = plan._replace(probabilities=True)

        def run(inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
            rows = inputs[_INPUT]
            table = np.ascontiguousarray(rows if config.max_batch_size else rows.reshape(-1, forest.features))
            values = forest.predict(table) if wanted != (_CONTRIBUTIONS,) else table

            def answer(name: str) -> Tensor:
                if name == _CONTRIBUTIONS:
                    assert forest.contributions is not None  # otherwise `complete` has refused the configuration
                    return Tensor(name, "FP32", forest.contributions(table).reshape(len(table), *dims[name]))
                if name == _LABEL:
                    return Tensor(name, "INT64", finished(values, labels, forest.classes, 1).astype(np.int64))
                if name == _PROBABILITIES:
                    return Tensor(name, "FP32", finished(values, both, forest.classes, forest.classes))
                return Tensor(name, "FP32", finished(values, plan, forest.classes, (*dims.get(name, ()), 1)[0]))

            return [answer(name) for name in wanted]

        return array_instance(placement.name, config, run, quick=True)

    def close(self) -> None:
        """Do nothing, because the library frees the forest."""


def plan_trees(config: ModelConfig, settings: Mapping[str, str], kind: str, classes: int) -> TreePlan:
    """Return the output that the parameters request of a forest with ``classes``.

    Raises ConfigError.
    """
    classifier = get_bool(config, settings, "is_classifier", default=classes > 0)
    output_class = get_bool(config, settings, "output_class", default=classifier)
    probabilities = get_bool(config, settings, "predict_proba", default=False)
    text = get_parameter(config, settings, "threshold") or "0.5"
    try:
        threshold = float(text)
    except ValueError as error:
        raise ConfigError(f"model '{config.name}': parameter 'threshold' is '{text}'; it must be a number") from error
    if (output_class or probabilities) and not classes:
        raise ConfigError(
            f"model '{config.name}' asks for classes, but its forest is a regression: set output_class and "
            "predict_proba to false"
        )
    named = classes > 0 and get_bool(config, settings, NAMED_OUTPUTS, default=False)
    return TreePlan(kind, output_class, probabilities, threshold, named)


def output_width(plan: TreePlan, forest: Forest) -> int:
    """Return the number of values in a row of the output."""
    if plan.probabilities:
        return forest.classes
    return 1 if plan.classes else forest.width


def contributions_shape(model: str, forest: Forest) -> tuple[int, ...]:
    """Return the shape of a row of ``treeshap_output``.

    It is a value for each feature and one more, for each of the forest's values if there are several. Raises
    ConfigError if the forest cannot compute it, which is tried with a row of zeros.
    """
    if forest.contributions is None:
        raise ConfigError(
            f"model '{model}' asks for {_CONTRIBUTIONS}, which its library does not compute: have XGBoost or "
            "LightGBM grow the forest, or leave the output out"
        )
    try:
        values = forest.contributions(np.zeros((1, forest.features), np.float32))
    except Exception as error:  # each library has other classes of errors
        reason = str(error).strip().partition("\nStack trace")[0]
        raise ConfigError(f"model '{model}' asks for {_CONTRIBUTIONS}: {reason[:300]}; leave the output out") from error
    each, several = forest.features + 1, values.shape[1] // (forest.features + 1)
    return (several, each) if several > 1 else (each,)


def finished(values: Array, plan: TreePlan, classes: int, width: int) -> Array:
    """Return a forest's values in the requested form.

    A binary classifier's only value is the probability of its second class; probabilities of width 2 contain both.
    """
    if plan.probabilities:
        if classes == 2 and values.shape[1] == 1 and width == 2:
            return np.concatenate([1 - values, values], axis=1)
        return values[:, -1:] if width == 1 else values
    if not plan.classes:
        return values
    if classes == 2:
        chosen: Array = (values[:, -1:] > plan.threshold).astype(np.float32)
        return chosen
    numbers: Array = np.argmax(values, axis=1).astype(np.float32)[:, None]
    return numbers


def _model_type(config: ModelConfig, source: Source) -> str:
    """Return the parameter ``model_type``, or the type of the file's name. Raises ConfigError."""
    configured = get_parameter(config, source.settings, "model_type")
    if configured == "xgboost":
        raise ConfigError(
            f"model '{config.name}': XGBoost has removed its old binary format: load the model with an older XGBoost "
            "and save it as xgboost.ubj, with model_type xgboost_ubj"
        )
    if configured:
        if configured not in _TYPES:
            types = ", ".join(_TYPES)
            raise ConfigError(
                f"model '{config.name}': parameter 'model_type' is '{configured}'; it must be one of {types}"
            )
        return configured
    name = config.default_model_filename
    endings = {".ubj": "xgboost_ubj", ".json": "xgboost_json", ".txt": "lightgbm", ".tl": "treelite_checkpoint"}
    if name:
        return endings.get(Path(name).suffix, "xgboost_json")
    present = [kind for kind, (file, _) in _TYPES.items() if (source.path / file).is_file()]
    return present[0] if present else "xgboost_json"
