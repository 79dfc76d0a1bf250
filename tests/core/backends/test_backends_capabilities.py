"""Capabilities of instances, declared or read from the attributes of API 1.3."""

from __future__ import annotations

from typing import Any

import pytest

from remora.backends import Capabilities, Execution, capabilities_of
from support.engine.fakes import FakeInstance, ticket_of


def test_an_instance_without_optional_attributes_has_no_capabilities() -> None:
    assert capabilities_of(FakeInstance()) == Capabilities()
    assert capabilities_of(FakeInstance()).trouble == ""


def test_declared_capabilities_take_precedence_over_attributes() -> None:
    instance: Any = FakeInstance()
    instance.remote, instance.trouble = True, "its process has ended"
    instance.capabilities = declared = Capabilities(answers_late=True)
    assert capabilities_of(instance) is declared


@pytest.mark.parametrize("name", ["remote", "ahead", "answers_late", "fatal"])
def test_a_flag_of_an_older_backend_counts(name: str) -> None:
    instance: Any = FakeInstance()
    setattr(instance, name, True)
    assert capabilities_of(instance) == Capabilities(**{name: True})


def test_devices_of_an_older_backend_count() -> None:
    instance: Any = FakeInstance()
    instance.devices = frozenset({(2, 0)})
    assert capabilities_of(instance).devices == {(2, 0)}


def test_trouble_of_an_older_backend_is_read_at_each_access() -> None:
    instance: Any = FakeInstance()
    instance.trouble = ""
    capabilities = capabilities_of(instance)
    assert capabilities.unhealthy_reason is not None
    assert capabilities.trouble == ""
    instance.trouble = "its process has ended"
    assert capabilities.trouble == "its process has ended"


def test_names_from_before_version_1_5_still_work() -> None:
    request = ticket_of().request
    execution = Execution([request])
    execution.again = frozenset({0})
    assert execution.rescheduled == execution.again == {0}
    request.keep_on_device = True
    assert request.stays
