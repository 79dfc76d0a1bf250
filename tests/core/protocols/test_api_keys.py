"""Keys, roles and permissions, and their files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.options.roles import CONTROL, DEPLOY, INFER, METADATA, READ, ROLES
from remora.protocols import api_keys
from remora.protocols.api_keys import (
    OPEN,
    KeyEntry,
    Keys,
    call_of,
    caller_of,
    credential_of,
    hashed_entries,
    is_credential,
    parse_word,
    permission_of_action,
    permission_of_call,
    print_entries,
    read_entries,
)
from remora.protocols.restriction import GROUP_OF_ACTION, GROUP_OF_RPC, GROUPS

DIGEST = hashlib.sha256(b"secret").hexdigest()
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)
ENTRIES = st.lists(
    st.builds(
        KeyEntry,
        NAMES,
        st.lists(st.sampled_from(sorted(ROLES)), min_size=1, unique=True).map(tuple),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        st.dates().map(str),
        st.integers(0, 1000) | st.floats(0, 1000),
        st.integers(0, 1000),
        st.integers(0, 1000),
    ),
    unique_by=lambda entry: entry.name,
)


@given(ENTRIES)
def test_a_file_of_keys_is_read_as_it_was_written(entries: list[KeyEntry]) -> None:
    assert read_entries(print_entries(entries)) == tuple(entries)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", 'expected {"keys": [...]}'),
        ('{"keys": {}}', 'expected {"keys": [...]}'),
        ('{"keys": [3]}', "key 1: expected a name"),
        ('{"keys": [{"name": "a", "roles": ["infer"]}]}', "key 1: expected 64 hexadecimal digits"),
        ('{"keys": [{"name": "a", "roles": ["infer"], "sha256": "secret"}]}', "key 1: expected 64 hexadecimal digits"),
        (print_entries([KeyEntry("a", ("all",), DIGEST.upper())]), "key 1: expected 64 hexadecimal digits"),
        (print_entries([KeyEntry("a", ("all",), DIGEST, "", 0, True)]), "expected a whole number from 0 on as burst"),
        (f'{{"keys": [{{"name": "a", "roles": "infer", "sha256": "{DIGEST}"}}]}}', "key 1: expected a name and a list"),
        (f'{{"keys": [{{"name": "a", "roles": [], "sha256": "{DIGEST}"}}]}}', "got none"),
        (f'{{"keys": [{{"name": "a", "roles": ["root"], "sha256": "{DIGEST}"}}]}}', "got root"),
        (f'{{"keys": [{{"name": "a b", "roles": ["infer"], "sha256": "{DIGEST}"}}]}}', "not the name of a key"),
        (f'{{"keys": [{{"name": "a", "key": "secret", "sha256": "{DIGEST}"}}]}}', "unknown member 'key'"),
        (print_entries([KeyEntry("a", ("all",), DIGEST, "", -1.0)]), "key 'a': expected a number from 0 on"),
        (print_entries([KeyEntry("a", ("all",), DIGEST, "", 0, 1.5)]), "expected a whole number from 0 on as burst"),  # type: ignore[arg-type]
        (
            print_entries([KeyEntry("a", ("all",), DIGEST), KeyEntry("a", ("infer",), DIGEST)]),
            "two keys have the name 'a'",
        ),
    ],
)
def test_a_damaged_file_of_keys_is_refused_without_its_values(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        read_entries(text)
    assert "secret" not in str(caught.value)


def test_each_role_grants_what_the_documentation_lists() -> None:
    assert dict(ROLES) == {
        "infer": {INFER, METADATA},
        "read": {READ, METADATA},
        "control": {CONTROL, READ, METADATA},
        "deploy": {DEPLOY, CONTROL, READ, METADATA},
        "all": {INFER, METADATA, READ, CONTROL, DEPLOY},
    }


def test_the_page_about_keys_has_a_row_for_each_role() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page.partition("| Role | Permits |")[2].partition("\n\n")[0], re.M) == list(
        ROLES
    )


def test_a_callers_limits_are_those_of_its_key() -> None:
    limited, free = KeyEntry("a", ("all",), DIGEST, "", 5.0, 2, 3), KeyEntry("b", ("all",), "0" * 64)
    keys = Keys([limited, free])
    caller = keys.find(b"secret")
    assert caller is not None
    assert caller.limits == (5.0, 2, 3)
    assert caller_of("b", ("all",), free.limits).limits is None


@pytest.mark.parametrize(
    ("rpc", "permission"),
    [
        ("ServerLive", OPEN),
        ("ServerReady", OPEN),
        ("ModelReady", METADATA),
        ("ModelMetadata", METADATA),
        ("ModelInfer", INFER),
        ("ModelStreamInfer", INFER),
        ("ModelConfig", READ),
        ("ModelStatistics", READ),
        ("RepositoryIndex", READ),
        ("SystemSharedMemoryStatus", READ),
        ("RepositoryModelLoad", CONTROL),
        ("RepositoryModelUnload", CONTROL),
        ("CudaSharedMemoryRegister", CONTROL),
        ("TraceSetting", CONTROL),
        ("LogSettings", CONTROL),
    ],
)
def test_each_call_of_grpc_needs_a_permission(rpc: str, permission: str) -> None:
    assert permission_of_call(f"/inference.GRPCInferenceService/{rpc}") == permission


def test_each_group_of_calls_needs_a_permission_that_some_role_grants() -> None:
    granted = {each for permissions in ROLES.values() for each in permissions}
    assert set(api_keys.GROUP_PERMISSIONS) == set(GROUPS)
    for action in GROUP_OF_ACTION:
        assert permission_of_action(action, "POST") in granted | {OPEN}
    for rpc in GROUP_OF_RPC:
        assert permission_of_call(f"/inference.GRPCInferenceService/{rpc}") in granted | {OPEN}


@pytest.mark.parametrize(
    ("action", "method", "permission"),
    [
        ("live", "GET", OPEN),
        ("model_ready", "GET", METADATA),
        ("infer", "POST", INFER),
        ("index", "POST", READ),
        ("load", "POST", CONTROL),
        ("logging", "GET", READ),
        ("logging", "POST", CONTROL),
        ("system_shm", "POST", CONTROL),
    ],
)
def test_an_action_that_changes_the_server_needs_control(action: str, method: str, permission: str) -> None:
    assert permission_of_action(action, method) == permission


@pytest.mark.parametrize("path", ["", "/", "/a/b", "/inference.GRPCInferenceService/None", "/grpc.reflection.v1.X/Y"])
def test_an_unknown_call_needs_a_key(path: str) -> None:
    assert permission_of_call(path) == METADATA


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ((), None),
        (((b"authorization", b"Bearer abc"),), b"abc"),
        (((b"Authorization", b"bearer  abc "),), b"abc"),
        (((b"authorization", b"Basic abc"),), None),
        (((b"authorization", b"Bearer "),), None),
        (((b"X-API-Key", b" abc "),), b"abc"),
        (((b"x-api-key", b""), (b"authorization", b"Bearer abc")), None),
        (((b"authorization", b"Bearer abc"), (b"x-api-key", b"def")), b"def"),
    ],
)
def test_a_key_is_read_from_either_header(headers: tuple[tuple[bytes, bytes], ...], key: bytes | None) -> None:
    assert credential_of(headers) == key
    fields = tuple((name.lower(), value) for name, value in headers)
    for path in (b"", b"/inference.GRPCInferenceService/ModelInfer"):
        assert call_of((*fields, (b":path", path), (b"te", b"trailers"))) == (path, key)


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("X-Api-Key", "", True),
        ("authorization", "Bearer k", True),
        ("Authorization", " bearer\tk", True),
        ("authorization", "Basic dTpw", False),
        ("x-api-key-id", "k", False),
    ],
)
def test_a_header_that_may_hold_a_key_is_a_credential(name: str, value: str, holds: bool) -> None:
    assert is_credential(name, value) is holds


def test_only_the_whole_key_is_found() -> None:
    keys = Keys([KeyEntry("a", ("infer", "read"), DIGEST)])
    caller = keys.find(b"secret")
    assert caller is not None
    assert (caller.name, caller.permissions) == ("a", {INFER, METADATA, READ})
    for wrong in (b"", b"secre", b"secret ", b"Secret", DIGEST.encode(), bytes.fromhex(DIGEST)):
        assert keys.find(wrong) is None


def test_a_word_holds_the_digest_of_the_key_at_its_place() -> None:
    (word,) = hashed_entries(["ci:infer,read=@place"], {"place": "secret\n"}.__getitem__)
    assert word == f"ci:infer,read=sha256:{DIGEST}"
    assert parse_word(word) == KeyEntry("ci", ("infer", "read"), DIGEST)
    assert hashed_entries([word], {}.__getitem__) == (word,)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ci:infer=secret", "the process list would show the key"),
        ("secret", "expected NAME:ROLE"),
        ("ci=@place", "expected NAME:ROLE"),
        ("ci:infer=@nothing", "the key is empty"),
        ("ci:root=@place", "got root"),
        ("ci:infer=sha256:abc", "expected 64 hexadecimal digits"),
    ],
)
def test_a_word_that_is_no_entry_is_refused_without_its_secret(word: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        hashed_entries([word], {"place": "secret", "nothing": " \n"}.__getitem__)
    assert "secret" not in str(caught.value)
