"""Names for plug-ins: models that serve, their releases and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.api import lazily

if TYPE_CHECKING:
    from remora.config.function_arguments import (
        NOT_DESCRIBED,
        Argument,
        FunctionArguments,
        function_arguments,
        read_arguments,
    )
    from remora.models.ensembles import step_models
    from remora.models.load_log import occasion
    from remora.models.loader import ModelLoader
    from remora.models.planner import Planner, open_repositories
    from remora.models.release_members import (
        CANARY_MEMBERS,
        SHADOW_MEMBERS,
        declared_release,
        flag_of,
        missing_version,
        plan_of,
        shadow_of,
        text_of,
        unstored_rollback,
        version_of,
    )
    from remora.models.release_sources import find_release
    from remora.models.release_store import ReleaseStore
    from remora.models.rollout import RoutedModel
    from remora.models.table import LoadingError, ModelTable
    from remora.scheduling.batching import BatchQueue, Plan
    from remora.tracing.arrival import Arrival, Carrier
    from remora.tracing.context import SpanContext
    from remora.tracing.records import Span, spans_of
    from remora.tracing.trace_file import open_private
    from remora.tracing.writer import DroppedError, Finished, TraceWriter

__getattr__ = lazily(
    __name__,
    {
        "remora.config.function_arguments": (
            "Argument FunctionArguments NOT_DESCRIBED function_arguments read_arguments"
        ),
        "remora.models.ensembles": "step_models",
        "remora.models.load_log": "occasion",
        "remora.models.loader": "ModelLoader",
        "remora.models.planner": "Planner open_repositories",
        "remora.models.release_members": (
            "CANARY_MEMBERS SHADOW_MEMBERS declared_release flag_of missing_version plan_of shadow_of text_of "
            "unstored_rollback version_of"
        ),
        "remora.models.release_sources": "find_release",
        "remora.models.release_store": "ReleaseStore",
        "remora.models.rollout": "RoutedModel",
        "remora.models.table": "LoadingError ModelTable",
        "remora.scheduling.batching": "BatchQueue Plan",
        "remora.tracing.arrival": "Arrival Carrier",
        "remora.tracing.context": "SpanContext",
        "remora.tracing.records": "Span spans_of",
        "remora.tracing.trace_file": "open_private",
        "remora.tracing.writer": "DroppedError Finished TraceWriter",
    },
)
