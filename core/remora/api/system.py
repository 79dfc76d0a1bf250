"""Names for plug-ins: the process and its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.api import lazily

if TYPE_CHECKING:
    from remora.options.observation import SHADOW_PROCESSORS
    from remora.options.roles import ROLES
    from remora.system import locks, tuning
    from remora.system.cpus import memory_in_use_bytes, memory_limit_bytes, usable_cpus
    from remora.system.environment import keep_runtimes_quiet, start_vllm_processes_afresh
    from remora.system.http_client import (
        Answer,
        AnswerTooLongError,
        Connection,
        Incoming,
        Limits,
        NoAnswerError,
        NoAnswerInTimeError,
        fetch,
        is_http_url,
    )
    from remora.system.log_lines import Line
    from remora.system.machine import memory_bytes, usage_with_children
    from remora.system.temporary_folders import TemporaryFolder
    from remora.system.threads import run_in_daemon, start_daemon
    from remora.system.tuning import give_back

__getattr__ = lazily(
    __name__,
    {
        "remora.options.observation": "SHADOW_PROCESSORS",
        "remora.options.roles": "ROLES",
        "remora.system": "locks tuning",
        "remora.system.cpus": "memory_in_use_bytes memory_limit_bytes usable_cpus",
        "remora.system.environment": "keep_runtimes_quiet start_vllm_processes_afresh",
        "remora.system.http_client": (
            "Answer AnswerTooLongError Connection Incoming Limits NoAnswerError NoAnswerInTimeError fetch is_http_url"
        ),
        "remora.system.log_lines": "Line",
        "remora.system.machine": "memory_bytes usage_with_children",
        "remora.system.temporary_folders": "TemporaryFolder",
        "remora.system.threads": "run_in_daemon start_daemon",
        "remora.system.tuning": "give_back",
    },
)
