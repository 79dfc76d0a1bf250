"""Models that load and unload other models."""

from __future__ import annotations

import json

import pytest

from remora.errors import RemoraError
from support.models.calling_models import DOUBLER, Repository, told

CONTROL = """
try:
    {}
except pb_utils.TritonModelException as error:
    return str(error)
"""
FAILED = "Failed to {}: Failed to process the request for model 'asks_0', message: {}"


def controlled(repository: Repository, code: str, mode: str = "explicit") -> str:
    repository.model("doubler", DOUBLER)
    repository.teller("asks", CONTROL.format(code))
    loads = {"load_model": ("asks",)} if mode == "explicit" else {}
    return told(repository.serve(model_control_mode=mode, **loads), "asks")


def test_a_model_loads_calls_and_unloads_another(repository: Repository) -> None:
    code = """seen = [pb_utils.is_model_ready("doubler")]
    pb_utils.load_model(model_name="doubler")
    seen += [pb_utils.is_model_ready("doubler", version) for version in ("", "1", "2")]
    seen.append(ask("doubler", values(request)).exec().output_tensors()[0].as_numpy().tolist())
    pb_utils.unload_model("doubler")
    return str([*seen, pb_utils.is_model_ready("doubler")])"""
    assert controlled(repository, code) == "[False, True, True, False, [6], False]"


def test_a_model_loads_another_with_its_own_configuration(repository: Repository) -> None:
    config = {
        "backend": "python",
        "max_batch_size": 5,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
    }
    code = f"""pb_utils.load_model("doubler", config={json.dumps(config)!r})
    return str(ask("doubler", np.ones((2, 1), np.int32)).exec().output_tensors()[0].as_numpy().tolist())"""
    assert controlled(repository, code) == "[[2], [2]]"


@pytest.mark.parametrize(
    ("code", "mode", "expected"),
    [
        (
            "pb_utils.load_model('nope')",
            "explicit",
            FAILED.format("load model", "failed to load 'nope', failed to poll from model repository"),
        ),
        (
            "pb_utils.load_model('doubler')",
            "none",
            FAILED.format("load model", "explicit model load / unload is not allowed if polling is enabled"),
        ),
        (
            "pb_utils.unload_model('doubler')",
            "none",
            FAILED.format("unload model", "explicit model load / unload is not allowed if polling is enabled"),
        ),
        (
            "pb_utils.is_model_ready('doubler', 'x')",
            "none",
            FAILED.format(
                "check model readiness",
                "failed to get model version from specified version string 'x' (details: stol), version should be an "
                "integral value > 0",
            ),
        ),
    ],
)
def test_failed_model_control_raises_with_tritons_text(
    repository: Repository, code: str, mode: str, expected: str
) -> None:
    assert controlled(repository, code, mode) == expected


def test_files_of_another_type_are_refused(repository: Repository) -> None:
    code = "pb_utils.load_model('doubler', files={'file:1/model.py': 'text'})"
    repository.model("doubler", DOUBLER)
    repository.teller("asks", f"try:\n    {code}\nexcept TypeError as error:\n    return str(error)")
    said = told(repository.serve(model_control_mode="explicit", load_model=("asks",)), "asks")
    assert said == "load_model: files must map str to bytes, found 'file:1/model.py': str"


def test_a_model_that_loads_itself_while_it_loads_is_refused_and_not_waited_for(repository: Repository) -> None:
    for name, other in (("one", "two"), ("two", "one"), ("self", "self")):
        repository.model(name, DOUBLER + f"    def initialize(self, args):\n        pb_utils.load_model('{other}')\n")
    engine = repository.serve(model_control_mode="explicit")
    with pytest.raises(RemoraError, match="model 'one' is being loaded and waits for the code that requests this load"):
        engine.load("one")
    with pytest.raises(RemoraError, match="model 'self' is being loaded"):
        engine.load("self")


def test_a_model_may_call_others_while_it_is_initialized(repository: Repository) -> None:
    repository.model("doubler", DOUBLER)
    repository.teller("asks", "return self.seen")
    file = repository.root / "asks" / "1" / "model.py"
    file.write_text(
        file.read_text() + "\n    def initialize(self, args):\n        pb_utils.load_model('doubler')\n"
        "        response = ask('doubler', np.array([21], np.int32)).exec()\n"
        "        self.seen = str(response.output_tensors()[0].as_numpy().tolist())\n"
    )
    assert told(repository.serve(model_control_mode="explicit", load_model=("asks",)), "asks") == "[42]"
