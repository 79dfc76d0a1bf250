"""Tests of ``remora.server.http.access_rules``."""

from __future__ import annotations

from remora.protocols.http1 import Head
from remora.protocols.restriction import Restrictions
from remora.server.http.access_rules import AccessRules

SECRET = Restrictions(("inference,metadata:authorization=Bearer key",), "--http-restricted-api")


def test_a_missing_secret_stays_403_on_v2s_routes() -> None:
    answer = AccessRules(SECRET, (), None).locked(
        "infer", Head("POST", "/v2/models/m/infer", ((b"host", b"localhost"),))
    )
    assert answer is not None
    assert (answer.status, b"expecting header 'authorization'" in bytes(answer.body[0])) == (403, True)
