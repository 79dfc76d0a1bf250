"""Credentials for a storage location, from the given environment and files.

Pure; secrets stay wrapped. Triton's credential file, if set, is used exclusively [M22]; then Triton's variables
[M19-M21]; then those of the platform: shared AWS profiles here, and the rest (web identity, container and machine
roles, Google's application default credentials, Azure's managed identities) by obstore, which reads their variables.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from remora.errors import InvalidArgumentError, UnsupportedError
from remora.storage import Secret
from remora.storage.location import Location
from remora.system.json_text import read_json

FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"

ReadText = Callable[[str], str]
"""Returns a file's text. Raises OSError."""

_CREDENTIAL_FILE_KEYS = {"s3": "s3", "gs": "gs", "az": "as"}
_TRUE = ("1", "true", "yes", "on")


class AwsKeys(NamedTuple):
    """Known AWS keys that do not expire while a server runs."""

    key_id: str
    secret: Secret
    token: Secret = Secret("")


class StorageSettings(NamedTuple):
    """Settings to open a store with.

    Attributes:
        config: obstore's settings for the cloud; secret values are wrapped.
        keys: AWS keys; they bypass obstore's reading of the environment, so that the two do not mix.
        allow_http: True if the endpoint has no TLS.
        source: a description of where the credentials come from.
    """

    config: Mapping[str, str | bool | Secret]
    keys: AwsKeys | None = None
    allow_http: bool = False
    source: str = "the platform"


def settings_for(location: Location, environ: Mapping[str, str], read_text: ReadText) -> StorageSettings:
    """Return the settings for one location.

    Raises InvalidArgumentError for an invalid credential file or profile, UnsupportedError for a profile that requires
    a login.
    """
    if location.cloud == "http":
        return StorageSettings({}, None, location.endpoint.startswith("http://"), "nothing")
    entry = _entry(location, environ, read_text)
    if location.cloud == "s3":
        return _aws(location, environ, read_text, entry)
    if location.cloud == "gs":
        return _google(environ, entry)
    return _azure(location, environ, entry)


def _entry(location: Location, environ: Mapping[str, str], read_text: ReadText) -> Any:
    """Return the entry of Triton's credential file with the longest matching prefix.

    Returns None without a file.
    """
    path = environ.get(FILE_VARIABLE)
    if not path:
        return None
    kind = _CREDENTIAL_FILE_KEYS[location.cloud]
    try:
        document = read_json(read_text(path))
        entries = document.get(kind, {})
        prefixes = [prefix for prefix in entries if location.url.startswith(prefix)]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        # Without the parser's message, which may quote secrets.
        reason = error.strerror if isinstance(error, OSError) else "it is not the JSON that Triton documents"
        raise InvalidArgumentError(f"cannot read {FILE_VARIABLE} '{path}': {reason}") from None
    if not prefixes:
        raise InvalidArgumentError(
            f"{FILE_VARIABLE} '{path}' has no credentials for '{location.url}': add an entry to its \"{kind}\" "
            'whose key is a prefix of that, or "" for all'
        )
    return entries[max(prefixes, key=len)]


# -- S3 ---------------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """Result of a source of AWS credentials.

    ``source`` is "" if it decides nothing but perhaps the region.
    """

    source: str = ""
    keys: AwsKeys | None = None
    region: str = ""
    signed: bool = True


class _AwsQuery(NamedTuple):
    """What the sources of AWS credentials read.

    ``entry`` is the entry of Triton's credential file, if it is set.
    """

    environ: Mapping[str, str]
    read_text: ReadText
    entry: Mapping[str, Any] | None


def _aws(location: Location, environ: Mapping[str, str], read_text: ReadText, entry: Any) -> StorageSettings:
    query = _AwsQuery(environ, read_text, entry if isinstance(entry, dict) or entry is None else {})
    region, found = "", _Found()
    for source in _AWS_SOURCES:
        found = source(query)
        region = region or found.region
        if found.source:
            break
    endpoint = location.endpoint or _aws_endpoint(environ)
    config: dict[str, str | bool | Secret] = {"endpoint": endpoint} if endpoint else {}
    if not found.signed:
        config["skip_signature"] = True
    config["region"] = region or "us-east-1"
    return StorageSettings(config, found.keys, endpoint.startswith("http://"), found.source)


def _from_entry(query: _AwsQuery) -> _Found:
    """Return the keys and the region of Triton's credential file."""
    entry = query.entry or {}
    region = str(entry.get("region") or "")
    if not entry.get("key_id"):
        return _Found(region=region)
    secret, token = (Secret(str(entry.get(name) or "")) for name in ("secret_key", "session_token"))
    return _Found(FILE_VARIABLE, AwsKeys(str(entry["key_id"]), secret, token), region)


def _from_variables(query: _AwsQuery) -> _Found:
    """Return the region of the AWS tools' variables, and their keys unless a credential file replaces them."""
    environ = query.environ
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    if query.entry is not None or not environ.get("AWS_ACCESS_KEY_ID"):
        return _Found(region=region)
    secret, token = (Secret(environ.get(name, "")) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"))
    return _Found("the environment", AwsKeys(environ["AWS_ACCESS_KEY_ID"], secret, token), region)


def _from_profile(query: _AwsQuery) -> _Found:
    """Return the keys and the region of a profile in AWS's shared files."""
    name = query.environ.get("AWS_PROFILE", "") if query.entry is None else str(query.entry.get("profile") or "")
    keys, region = _aws_profile(name, query.environ, query.read_text)
    return _Found(f"AWS profile '{name or 'default'}'" if keys is not None else "", keys, region)


def _unsigned(query: _AwsQuery) -> _Found:
    """Decide for unsigned requests where they are allowed and the platform has no keys.

    Requesting a machine role would take seconds on a machine without one.
    """
    if any(query.environ.get(name) for name in _PLATFORM_KEYS) or not _is_true(query.environ, *_UNSIGNED):
        return _Found()
    return _Found("nothing: requests are not signed", signed=False)


def _from_platform(query: _AwsQuery) -> _Found:
    """Leave the keys to obstore, which requests them from the platform."""
    return _Found("the platform" if query.entry is None else FILE_VARIABLE)


_AWS_SOURCES = (_from_entry, _from_variables, _from_profile, _unsigned, _from_platform)
"""Sources of AWS credentials in the order in which they are tried; the first one that decides is used."""

_UNSIGNED = ("awsAnonymousCredential", "AWS_EC2_METADATA_DISABLED", "AWS_SKIP_SIGNATURE")
_PLATFORM_KEYS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def _aws_endpoint(environ: Mapping[str, str]) -> str:
    """Return the endpoint of the AWS tools' variables, or of KServe's."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if environ.get(name):
            return environ[name].rstrip("/")
    host = environ.get("S3_ENDPOINT", "").rstrip("/")
    if not host or "://" in host:
        return host
    return f"{'https' if environ.get('S3_USE_HTTPS', '1').lower() in _TRUE else 'http'}://{host}"


class _Profile(NamedTuple):
    keys: AwsKeys | None = None
    region: str = ""


def _aws_profile(name: str, environ: Mapping[str, str], read_text: ReadText) -> _Profile:
    """Return a profile of AWS's shared files, empty if there is none and ``name`` is empty."""
    home = environ.get("HOME", "")
    files = (
        (environ.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials", name or "default"),
        (environ.get("AWS_CONFIG_FILE") or f"{home}/.aws/config", f"profile {name}" if name else "default"),
    )
    values: dict[str, str] = {}
    for path, section in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(read_text(path))
        except OSError:
            continue
        except configparser.Error:
            raise InvalidArgumentError(f"cannot read the AWS profiles in '{path}': it is not a profile file") from None
        if parser.has_section(section):
            values = {**dict(parser.items(section)), **values}
    if "aws_access_key_id" in values:
        secret, token = (Secret(values.get(key, "")) for key in ("aws_secret_access_key", "aws_session_token"))
        return _Profile(AwsKeys(values["aws_access_key_id"], secret, token), values.get("region", ""))
    if name and not values:
        raise InvalidArgumentError(f"there is no AWS profile '{name}' in {' or '.join(path for path, _ in files)}")
    if name and any(key in values for key in ("sso_session", "sso_start_url", "role_arn", "credential_process")):
        raise UnsupportedError(
            f"AWS profile '{name}' has to log in first: export its keys, with "
            f"'aws configure export-credentials --profile {name} --format env'"
        )
    return _Profile(None, values.get("region", ""))


# -- Google -----------------------------------------------------------------------------------------------------------


def _google(environ: Mapping[str, str], entry: Any) -> StorageSettings:
    emulator = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    if emulator:
        url = emulator if "://" in emulator else f"http://{emulator}"
        return StorageSettings({"base_url": url, "skip_signature": True}, None, url.startswith("http://"), "nothing")
    if entry is not None:
        if not isinstance(entry, str) or not entry:
            raise InvalidArgumentError(f'{FILE_VARIABLE}: an entry of "gs" is the path of a key file')
        return StorageSettings({"application_credentials": entry}, source=FILE_VARIABLE)
    path = environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if path:
        return StorageSettings({"application_credentials": path}, source="GOOGLE_APPLICATION_CREDENTIALS")
    return StorageSettings({})


# -- Azure ------------------------------------------------------------------------------------------------------------


def _azure(location: Location, environ: Mapping[str, str], entry: Any) -> StorageSettings:
    if entry is None:
        values = {
            "account_str": environ.get("AZURE_STORAGE_ACCOUNT") or environ.get("AZURE_STORAGE_ACCOUNT_NAME"),
            "account_key": environ.get("AZURE_STORAGE_KEY") or environ.get("AZURE_STORAGE_ACCOUNT_KEY"),
            "auth_type": environ.get("AZURE_STORAGE_AUTH_TYPE"),
            "client_id": environ.get("AZURE_STORAGE_CLIENT_ID"),
        }
        source = "the environment"
    else:
        values, source = entry if isinstance(entry, dict) else {}, FILE_VARIABLE
    account = location.account or str(values.get("account_str") or "")
    if not account:
        raise InvalidArgumentError(
            f"'{location.url}' does not say which Azure account it is in: set AZURE_STORAGE_ACCOUNT, or write "
            "as://ACCOUNT/CONTAINER/PATH"
        )
    endpoint = location.endpoint or environ.get("AZURE_STORAGE_ENDPOINT", "").rstrip("/")
    config: dict[str, str | bool | Secret] = {"account_name": account}
    if endpoint:
        config["endpoint"] = endpoint
    if values.get("client_id"):
        config["client_id"] = str(values["client_id"])
    auth = str(values.get("auth_type") or "")
    if location.sas:
        config |= {"sas_key": location.sas, "credential_type": "sas_token"}
        source = "the URL"
    elif auth == "managed_identity":
        config["credential_type"] = auth
    elif values.get("account_key") and auth in ("", "key"):
        config |= {"account_key": Secret(str(values["account_key"])), "credential_type": "access_key"}
    elif auth not in ("", "default", "key"):
        raise InvalidArgumentError(f"AZURE_STORAGE_AUTH_TYPE is '{auth}': expected key, managed_identity or default")
    else:
        source = "the platform"
    return StorageSettings(config, None, endpoint.startswith("http://"), source)


def _is_true(environ: Mapping[str, str], *names: str) -> bool:
    return any(environ.get(name, "").lower() in _TRUE for name in names)
