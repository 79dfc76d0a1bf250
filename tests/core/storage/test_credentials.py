"""Which credentials a location is opened with; and that none of them is ever shown."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from remora.errors import InvalidArgumentError, UnsupportedError
from remora.storage import Secret
from remora.storage.credentials import AwsKeys, StorageSettings, settings_for
from remora.storage.location import parse_location

CREDENTIALS = {
    "s3": {
        "": {"key_id": "DEFAULT", "secret_key": "s0", "region": "eu-north-1", "session_token": "", "profile": ""},
        "s3://team": {"key_id": "TEAM", "secret_key": "s1", "region": "eu-west-1", "session_token": "t1"},
        "s3://team-b/deep": {"key_id": "DEEP", "secret_key": "s2", "region": "us-west-2"},
    },
    "gs": {"": "/keys/all.json", "gs://special": "/keys/special.json"},
    "as": {"as://mine/box": {"account_str": "mine", "account_key": "a2V5"}, "": {"account_str": "other"}},
}
FILES = {
    "/c.json": json.dumps(CREDENTIALS),
    "/home/.aws/credentials": "[default]\naws_access_key_id=DEF\naws_secret_access_key=sd\n"
    "[work]\naws_access_key_id=WORK\naws_secret_access_key=sw\naws_session_token=tw\n",
    "/home/.aws/config": "[default]\nregion=eu-central-1\n[profile work]\nregion=ap-south-1\n[profile sso]\n"
    "sso_start_url=https://x\n",
}


def settings(url: str, environ: Mapping[str, str], files: Mapping[str, str] = FILES) -> StorageSettings:
    def read(path: str) -> str:
        try:
            return files[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory", path) from None

    return settings_for(parse_location(url), environ, read)


def test_triton_variables_open_s3() -> None:
    found = settings(
        "s3://b/p",
        {
            "AWS_ACCESS_KEY_ID": "AK",
            "AWS_SECRET_ACCESS_KEY": "sk",
            "AWS_SESSION_TOKEN": "tk",
            "AWS_DEFAULT_REGION": "eu-west-3",
        },
    )
    assert found.keys == AwsKeys("AK", Secret("sk"), Secret("tk"))
    assert found.config["region"] == "eu-west-3"


@pytest.mark.parametrize(
    ("url", "key"),
    [("s3://other/x", "DEFAULT"), ("s3://team/x", "TEAM"), ("s3://team-b/x", "TEAM"), ("s3://team-b/deep/x", "DEEP")],
)
def test_the_longest_prefix_of_the_credential_file_wins(url: str, key: str) -> None:
    found = settings(url, {"TRITON_CLOUD_CREDENTIAL_PATH": "/c.json", "AWS_ACCESS_KEY_ID": "ENV"})
    assert found.keys is not None
    assert found.keys.key_id == key


def test_the_credential_file_takes_over_from_the_environment_entirely() -> None:
    found = settings("s3://x/y", {"TRITON_CLOUD_CREDENTIAL_PATH": "/c.json", "AWS_SESSION_TOKEN": "stray"})
    assert found.keys == AwsKeys("DEFAULT", Secret("s0"), Secret(""))
    assert found.config["region"] == "eu-north-1"


def test_the_credential_file_names_key_files_for_google() -> None:
    environ = {"TRITON_CLOUD_CREDENTIAL_PATH": "/c.json", "GOOGLE_APPLICATION_CREDENTIALS": "/other.json"}
    assert settings("gs://special/m", environ).config == {"application_credentials": "/keys/special.json"}
    assert settings("gs://any/m", environ).config == {"application_credentials": "/keys/all.json"}


def test_a_location_without_an_entry_is_refused_with_what_to_add() -> None:
    with pytest.raises(InvalidArgumentError, match='add an entry to its "as"'):
        settings("as://a/c/p", {"TRITON_CLOUD_CREDENTIAL_PATH": "/c.json"}, {"/c.json": '{"as": {"as://b": {}}}'})


@pytest.mark.parametrize("content", ["{", "[]", '{"s3": 5}', "null"])
def test_a_credential_file_that_is_none_is_refused_without_its_content(content: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot read TRITON_CLOUD_CREDENTIAL_PATH '/c\.json'"):
        settings("s3://b/p", {"TRITON_CLOUD_CREDENTIAL_PATH": "/c.json"}, {"/c.json": content})


def test_shared_profiles_come_after_the_variables() -> None:
    home = {"HOME": "/home"}
    default, work = settings("s3://b", home), settings("s3://b", {**home, "AWS_PROFILE": "work"})
    assert default.keys == AwsKeys("DEF", Secret("sd"))
    assert default.config["region"] == "eu-central-1"
    assert work.keys == AwsKeys("WORK", Secret("sw"), Secret("tw"))
    assert work.config["region"] == "ap-south-1"


def test_a_profile_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no AWS profile 'gone'"):
        settings("s3://b", {"HOME": "/home", "AWS_PROFILE": "gone"})


def test_a_profile_that_must_log_in_says_how() -> None:
    with pytest.raises(UnsupportedError, match="export-credentials --profile sso"):
        settings("s3://b", {"HOME": "/home", "AWS_PROFILE": "sso"})


def test_without_keys_the_platform_is_queried_unless_it_is_known_to_have_none() -> None:
    assert settings("s3://b", {}).keys is None
    assert "skip_signature" not in settings("s3://b", {}).config
    assert settings("s3://b", {"AWS_EC2_METADATA_DISABLED": "true"}).config["skip_signature"] is True
    role = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}
    assert "skip_signature" not in settings("s3://b", role).config


@pytest.mark.parametrize(
    ("environ", "endpoint", "plain"),
    [
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000", True),
        ({"AWS_ENDPOINT_URL_S3": "https://a", "AWS_ENDPOINT_URL": "http://b"}, "https://a", False),
        ({"S3_ENDPOINT": "minio:9000", "S3_USE_HTTPS": "0"}, "http://minio:9000", True),
        ({"S3_ENDPOINT": "minio:9000"}, "https://minio:9000", False),
    ],
)
def test_another_s3_is_named_as_the_aws_tools_or_kserve_do(environ: dict[str, str], endpoint: str, plain: bool) -> None:
    found = settings("s3://b", environ)
    assert (found.config["endpoint"], found.allow_http) == (endpoint, plain)


AZURE = [
    ({"AZURE_STORAGE_KEY": "a2V5"}, {"account_key": Secret("a2V5"), "credential_type": "access_key"}),
    (
        {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_CLIENT_ID": "id", "AZURE_STORAGE_KEY": "a2V5"},
        {"client_id": "id", "credential_type": "managed_identity"},
    ),
    ({"AZURE_STORAGE_AUTH_TYPE": "default", "AZURE_STORAGE_KEY": "a2V5"}, {}),
    ({}, {}),
]


@pytest.mark.parametrize(("environ", "expected"), AZURE)
def test_triton_variables_open_azure(environ: dict[str, str], expected: dict[str, object]) -> None:
    assert settings("as://acct/c/p", environ).config == {"account_name": "acct", **expected}


def test_an_azure_account_may_come_from_the_environment_and_must_come_from_somewhere() -> None:
    assert settings("az://c/p", {"AZURE_STORAGE_ACCOUNT": "acct"}).config["account_name"] == "acct"
    with pytest.raises(InvalidArgumentError, match="set AZURE_STORAGE_ACCOUNT"):
        settings("az://c/p", {})


def test_a_signed_url_needs_nothing_else() -> None:
    found = settings("https://acct.blob.core.windows.net/c/p?sig=x", {"AZURE_STORAGE_KEY": "a2V5"})
    assert found.config["sas_key"] == Secret("sig=x")
    assert found.config["credential_type"] == "sas_token"


def test_an_unknown_auth_type_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected key, managed_identity or default"):
        settings("as://a/c", {"AZURE_STORAGE_AUTH_TYPE": "magic"})


def test_no_secret_is_in_what_is_printed() -> None:
    secrets = ["s3cr3t-key", "t0ken", "a2V5c2VjcmV0", "sig-secret"]
    found = [
        settings(
            "s3://b", {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": secrets[0], "AWS_SESSION_TOKEN": secrets[1]}
        ),
        settings("as://a/c", {"AZURE_STORAGE_KEY": secrets[2]}),
        settings(f"https://a.blob.core.windows.net/c?sig={secrets[3]}", {}),
    ]
    shown = f"{found} {found!r}"
    assert not [secret for secret in secrets if secret in shown]


def test_an_emulator_of_google_needs_no_credentials() -> None:
    found = settings("gs://b/p", {"STORAGE_EMULATOR_HOST": "127.0.0.1:4443"})
    assert found.config == {"base_url": "http://127.0.0.1:4443", "skip_signature": True}
    assert found.allow_http
