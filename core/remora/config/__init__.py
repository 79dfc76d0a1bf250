"""Reading, completion and validation of model configurations, and their policies.

A configuration passes through `find_config` and `read_config` -> `infer_backend` -> completion by the backend ->
`normalise` -> `validate` -> `batch_policy`, `placements` and others. Only the first two access files.
"""

from __future__ import annotations

from remora.config.batching_choice import BatchingChoice, Trial
from remora.config.completing import ModelTensor, complete_from_tensors
from remora.config.datatypes import data_type_of, dtype_name
from remora.config.inferring import infer_backend
from remora.config.normalising import ANY_KIND, normalise
from remora.config.policies import (
    BatchPolicy,
    Placement,
    QueuePolicy,
    RatePolicy,
    SequenceControl,
    SequencePolicy,
    SequenceState,
    batch_policy,
    placements,
    rate_policies,
    select_versions,
    sequence_policy,
)
from remora.config.reading import find_config, parse_config, read_config, read_data
from remora.config.validating import check_names, validate, validate_written
from remora.config.writing import to_dict, to_json, to_text

__all__ = [
    "ANY_KIND",
    "BatchPolicy",
    "BatchingChoice",
    "ModelTensor",
    "Placement",
    "QueuePolicy",
    "RatePolicy",
    "SequenceControl",
    "SequencePolicy",
    "SequenceState",
    "Trial",
    "batch_policy",
    "check_names",
    "complete_from_tensors",
    "data_type_of",
    "dtype_name",
    "find_config",
    "infer_backend",
    "normalise",
    "parse_config",
    "placements",
    "rate_policies",
    "read_config",
    "read_data",
    "select_versions",
    "sequence_policy",
    "to_dict",
    "to_json",
    "to_text",
    "validate",
    "validate_written",
]
