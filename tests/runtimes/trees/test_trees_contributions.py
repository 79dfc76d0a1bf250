"""``treeshap_output`` equals the library's own contributions and sums up to the margin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Placement, Source
from remora.errors import ConfigError
from remora.messages import Response
from remora.testing.backend import request_of, run
from remora_runtimes.trees import TreesBackend
from support.engine.fakes import config_of
from support.models import parity_models as parity

FORMS = [form for form in parity.FORMATS if isinstance(form, parity.Trees)]
SHAPES = {"regression": "7", "binary": "7", "multiclass": "3, 7"}


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
@pytest.mark.parametrize("kind", SHAPES)
def test_contributions_sum_up_to_what_the_forest_says(form: Any, kind: str, tmp_path: Path) -> None:
    reason = form.missing()
    if reason:
        pytest.skip(reason)
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    random = np.random.default_rng(5)
    rows = random.standard_normal((300, 6)).astype("f4")
    score = rows[:, 0] + rows[:, 1] * rows[:, 2]
    labels = {"regression": score, "binary": score > 0, "multiclass": np.digitize(score, [-0.5, 0.5])}[kind]
    grown = form.grow(kind, rows, labels.astype("f4" if kind == "regression" else "i8"), version)
    config = config_of(
        f'name: "m" backend: "fil" max_batch_size: 8 output {{ name: "output__0" data_type: TYPE_FP32 dims: 1 }} '
        f'output {{ name: "treeshap_output" data_type: TYPE_FP32 dims: [ {SHAPES[kind]} ] }}'
    )
    model = TreesBackend().open(Source("m", 1, tmp_path / "m", version, tmp_path), config)
    if form.name == "treelite_checkpoint":
        with pytest.raises(ConfigError, match="which its library does not compute"):
            model.complete(config)
        return
    model.complete(config)
    given = rows[:3]
    (answer,) = run(model.instance(config, Placement("m_0")), request_of({"input__0": given}, ("treeshap_output",)))
    assert isinstance(answer, Response)
    found = answer.outputs[0].data
    assert found.shape == ((3, 3, 7) if kind == "multiclass" else (3, 7))
    margin = grown.predict(given, **{"output_margin" if form.name.startswith("xgboost") else "raw_score": True})
    np.testing.assert_allclose(found.sum(-1), margin, rtol=1e-4, atol=1e-4)
