"""Groups of calls behind a shared secret: access checks and the flag's syntax."""

from __future__ import annotations

import pytest

from remora.protocols.restriction import GROUP_OF_ACTION, GROUP_OF_RPC, GROUPS, Restrictions, fill_in_secrets

LOCKS = Restrictions(["model-repository,statistics:admin-key=secret", "health:who=me=you"])


@pytest.mark.parametrize(
    ("group", "headers", "missing"),
    [
        ("statistics", {}, "admin-key"),
        ("model-repository", {"admin-key": b"guess"}, "admin-key"),
        ("model-repository", {"admin-key": b"secret"}, None),
        ("model-repository", {"admin-key": b""}, "admin-key"),
        ("health", {"who": b"me=you"}, None),
        ("inference", {}, None),
    ],
)
def test_a_restricted_group_needs_its_header_and_others_need_none(
    group: str, headers: dict[str, bytes], missing: str | None
) -> None:
    assert LOCKS.missing(group, headers.get) == missing


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("inference", "Got inference$"),
        ("inference:key", "Got inference:...$"),
        ("inference:=SECRET", "Got inference:=...$"),
        ("inference:key=", "Got inference:key=...$"),
        (":key=SECRET", "Got :key=...$"),
        ("inference:key:SECRET", "Got inference:...$"),
        ("inference:key SECRET", "Got inference:...$"),
        ("key=SECRET", "Got key=...$"),
        ("everything:key=SECRET", "^unknown restricted api 'everything'\n"),
        ("health,:key=SECRET", "^unknown restricted api ''\n"),
        ("health,health:key=SECRET", "^restricted api 'health' can not be specified in multiple config groups$"),
        ("health:key=@SECRET", "only the command line"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused_in_tritons_words_without_its_secret(entry: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        Restrictions([entry], "--http-restricted-api")
    assert "SECRET" not in str(refused.value)


def test_triton_calls_the_groups_of_grpc_protocols() -> None:
    for entries, says in (
        (("nonsense:key=value",), "unknown restricted protocol 'nonsense'"),
        (("health:key=value", "health:other=value"), "restricted protocol 'health' can not be"),
        (("health",), "--grpc-restricted-protocol option format is"),
    ):
        with pytest.raises(ValueError, match=says):
            Restrictions(entries, "--grpc-restricted-protocol")


def test_secrets_are_filled_in_where_an_entry_names_a_place() -> None:
    entries = ("health,trace:key=@/run/key", "logging:key=plain=@x")
    found = fill_in_secrets(entries, "--f", {"/run/key": "s=1"}.__getitem__)
    assert found == ("health,trace:key=s=1", "logging:key=plain=@x")


@pytest.mark.parametrize("secret", ["", "@other"])
def test_a_place_without_a_usable_secret_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match=r"--f=health:key=@\.\.\.: the secret"):
        fill_in_secrets(("health:key=@place",), "--f", lambda place: secret)


def test_every_action_and_rpc_belongs_to_a_group_that_can_be_restricted() -> None:
    assert set(GROUP_OF_ACTION.values()) == set(GROUPS)
    assert set(GROUP_OF_RPC.values()) == set(GROUPS)


@pytest.mark.parametrize(
    ("action", "rpc"),
    [
        ("live", "ServerLive"),
        ("ready", "ServerReady"),
        ("model_ready", "ModelReady"),
        ("server_metadata", "ServerMetadata"),
        ("model_metadata", "ModelMetadata"),
        ("infer", "ModelInfer"),
        ("generate", "ModelInfer"),
        ("generate_stream", "ModelStreamInfer"),
        ("model_config", "ModelConfig"),
        ("model_stats", "ModelStatistics"),
        ("all_stats", "ModelStatistics"),
        ("index", "RepositoryIndex"),
        ("load", "RepositoryModelLoad"),
        ("unload", "RepositoryModelUnload"),
        ("release", "RepositoryModelLoad"),
        ("system_shm", "SystemSharedMemoryRegister"),
        ("cuda_shm", "CudaSharedMemoryRegister"),
        ("trace", "TraceSetting"),
        ("recent_traces", "TraceSetting"),
        ("logging", "LogSettings"),
    ],
)
def test_a_call_belongs_to_the_same_group_over_http_and_grpc(action: str, rpc: str) -> None:
    assert GROUP_OF_ACTION[action] == GROUP_OF_RPC[rpc]


def test_calls_that_change_the_repository_are_not_among_those_that_read_statistics() -> None:
    assert {GROUP_OF_RPC[rpc] for rpc in ("RepositoryModelLoad", "RepositoryModelUnload")} == {"model-repository"}
    assert GROUP_OF_RPC["ModelStreamInfer"] == "inference"
    assert GROUP_OF_RPC["TraceSetting"] == "trace"


def test_nothing_is_restricted_by_default() -> None:
    assert not Restrictions()
