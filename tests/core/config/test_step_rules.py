"""What an ensemble and its models must keep between them, in Triton's words [E03, E05]."""

from __future__ import annotations

import pytest

from remora.config.step_rules import check_steps
from remora.errors import ConfigError
from remora.proto.model_config_pb2 import ModelConfig
from support.engine.fakes import config_of


def tensor(kind: str, text: str) -> str:
    """``"IN INT32 1,2"``, with a question mark behind the name for an optional one."""
    name, datatype, dims = text.split()
    optional = " optional: true" if name.endswith("?") else ""
    return f'{kind} {{ name: "{name.rstrip("?")}" data_type: TYPE_{datatype} dims: [{dims}]{optional} }}'


def model(inputs: str, outputs: str, *, batch: int = 0, decoupled: bool = False, more: str = "") -> ModelConfig:
    """A configuration; tensors are divided by semicolons."""
    rows = [tensor("input", row) for row in inputs.split(";")] + [tensor("output", row) for row in outputs.split(";")]
    policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
    return config_of(f'name: "e" max_batch_size: {batch} {" ".join(rows)} {policy} {more}')


def ensemble(inputs: str, outputs: str, *steps: str, batch: int = 0) -> ModelConfig:
    """Steps as ``"model I=IN,J=x O=OUT"``."""
    texts = []
    for step in steps:
        name, *sides = step.split()
        maps = [
            f'{kind} {{ key: "{pair.split("=")[0]}" value: "{pair.split("=")[1]}" }}'
            for kind, side in zip(("input_map", "output_map"), sides, strict=True)
            for pair in side.split(",")
        ]
        texts.append(f'step {{ model_name: "{name}" {" ".join(maps)} }}')
    more = f'platform: "ensemble" ensemble_scheduling {{ {" ".join(texts)} }}'
    return model(inputs, outputs, batch=batch, more=more)


ONE = {
    "m": model("I INT32 1", "O INT32 1"),
    "batched": model("I INT32 1", "O INT32 1", batch=4),
    "fp": model("I FP32 1", "O FP32 1"),
    "two": model("I INT32 1;J INT32 1", "O INT32 1"),
    "maybe": model("I INT32 1;J? INT32 1", "O INT32 1"),
    "many": model("I INT32 1", "O INT32 1", decoupled=True),
    "wide": model("I INT32 2", "O INT32 3"),
    "any": model("I INT32 -1", "O INT32 -1"),
    "matrix": model("I INT32 -1,1", "O INT32 -1,1"),
}
IO = ("IN INT32 1", "OUT INT32 1")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            ensemble("IN INT32 1", "OUT FP32 1", "fp I=IN O=OUT"),
            "in ensemble e, ensemble tensor IN: inconsistent data type: TYPE_INT32 is inferred from model e while "
            "TYPE_FP32 is inferred from model fp",
        ),
        (
            ensemble("IN INT32 1", "OUT FP32 1", "m I=IN O=x", "fp I=x O=OUT"),
            "in ensemble e, ensemble tensor x: inconsistent data type: TYPE_INT32 is inferred from model m while "
            "TYPE_FP32 is inferred from model fp",
        ),
        (
            ensemble("IN INT32 2", "OUT INT32 1", "m I=IN O=OUT"),
            "in ensemble e, ensemble tensor IN: inconsistent shape: [2] is inferred from model e while [1] is inferred "
            "from model m",
        ),
        (
            ensemble("IN INT32 2", "OUT INT32 1", "wide I=IN O=OUT", batch=2),
            "in ensemble e, ensemble tensor OUT: inconsistent shape: [-1,1] is inferred from model e while [3] is "
            "inferred from model wide",
        ),
        (
            ensemble(*IO, "batched I=IN O=OUT", batch=8),
            "ensemble e allows maximum batch size 8, but it contains model batched which only allows maximum batch "
            "size to be 4",
        ),
        (
            ensemble(*IO, "m X=IN O=OUT"),
            "in ensemble e, ensemble tensor IN is mapping to non-existing input X in model m",
        ),
        (
            ensemble(*IO, "m I=IN X=OUT"),
            "in ensemble e, ensemble tensor OUT is mapped from non-existing output X in model m",
        ),
        (
            ensemble(*IO, "two I=IN O=OUT"),
            "in ensemble e, input J in model two is not mapped to any ensemble tensors",
        ),
        (
            ensemble("IN INT32 1;B INT32 1", "OUT INT32 1", "many I=IN O=x", "two I=x,J=B O=OUT"),
            "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
        ),
        (
            ensemble(*IO, "many I=IN O=x", "many I=IN O=y", "two I=x,J=y O=z", "m I=z O=OUT"),
            "in ensemble e, step of model 'two' receives inputs originated from different decoupled models",
        ),
        (
            ensemble("IN INT32 1", "OUT INT32 1;P INT32 1", "many I=IN O=OUT", "m I=IN O=P"),
            "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_tritons_words(config: ModelConfig, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_steps(config, ONE)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "config",
    [
        ensemble(*IO, "m I=IN O=x", "m I=x O=OUT"),
        ensemble(*IO, "maybe I=IN O=OUT"),
        ensemble(*IO, "m I=IN O=OUT", batch=8),
        ensemble(*IO, "batched I=IN O=OUT", batch=4),
        ensemble("IN INT32 7", "OUT INT32 9", "any I=IN O=OUT"),
        ensemble("IN INT32 -1,1", "OUT INT32 -1,1", "batched I=IN O=OUT"),
        ensemble("IN INT32 1", "OUT INT32 1;IN INT32 1", "m I=IN O=OUT"),
    ],
)
def test_what_fits_is_let_through_and_is_not_decoupled(config: ModelConfig) -> None:
    assert check_steps(config, ONE) is False


@pytest.mark.parametrize(
    "config",
    [
        ensemble(*IO, "many I=IN O=OUT"),
        ensemble(*IO, "many I=IN O=x", "m I=x O=y", "two I=x,J=y O=OUT"),
        ensemble(*IO, "many I=IN O=x", "many I=x O=OUT"),
        ensemble(*IO, "m I=x O=OUT", "many I=IN O=x"),
    ],
)
def test_an_ensemble_with_a_decoupled_step_is_decoupled(config: ModelConfig) -> None:
    assert check_steps(config, ONE) is True
