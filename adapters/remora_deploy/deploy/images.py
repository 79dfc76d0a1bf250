"""Container image of a deployment: its registry's description and the platform's needs.

The manifest's media type, the architecture, and the labels ``remora.cuda`` and ``remora.platform`` are compared with
the platform's needs before anything is created, because platforms report a mismatch late or, for a driver, not at all.
"""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from remora.api.system import Answer, Limits, NoAnswerError, fetch
from remora.system.json_text import read_json
from remora_deploy.deploy.plan import Call, CallError, Check, Kind, State, find

_DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
_OCI = "application/vnd.oci.image.manifest.v1+json"
_INDEXES = ("application/vnd.docker.distribution.manifest.list.v2+json", "application/vnd.oci.image.index.v1+json")
_TIMEOUT_S = 30.0
_LIMITS = Limits(_TIMEOUT_S, 8 << 20)
_HUB = "registry-1.docker.io"
_LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')

Login = Callable[[str], tuple[str, str] | None]
"""Returns user and password for a registry's host, None for an anonymous request."""


class ImageName(NamedTuple):
    """Parts of an image's reference. ``reference`` is a tag or a digest."""

    host: str
    repository: str
    reference: str


class Needs(NamedTuple):
    """What a platform requires of an image.

    Attributes:
        platform: the platform's name in the label ``remora.platform``; images without a platform run everywhere.
        architecture: processor architecture.
        docker_only: True if manifests of OCI are refused.
        single: True if an index of several images is refused.
        gpu: True if the machines have GPUs.
        cuda: newest major version of CUDA that the platform's driver supports; 0 if unknown.
    """

    platform: str = ""
    architecture: str = "amd64"
    docker_only: bool = False
    single: bool = False
    gpu: bool = False
    cuda: int = 0


def parse_image(image: str) -> ImageName:
    """Parse a reference by Docker's rules. Raises ValueError."""
    rest, at, digest = image.partition("@")
    head, slash, tail = rest.partition("/")
    if slash and ("." in head or ":" in head or head == "localhost"):
        host, path = head, tail
    else:
        host, path = _HUB, rest if slash else f"library/{rest}"
    path, colon, tag = path.partition(":")
    if not re.fullmatch(rf"{_PART}(?:/{_PART})*", path) or (at and not digest.startswith("sha256:")):
        raise ValueError(f"{image!r}: expected an image such as REGISTRY/remora:cpu or REGISTRY/remora@sha256:...")
    return ImageName(host, path, digest if at else tag if colon else "latest")


def pinned(image: str, found: State) -> str:
    """Return a reference by the digest that its check found, because a tag may move."""
    digest = str(find(found, "image.digest", ""))
    if not digest.startswith("sha256:"):
        return image
    rest = image.partition("@")[0]
    head, slash, tail = rest.rpartition("/")
    return f"{head}{slash}{tail.partition(':')[0]}@{digest}"


def image_check(image: str, needs: Needs) -> Check:
    """Return the check of an image; its answer is kept as ``image``."""
    return Check(
        f"image {image}",
        Call("registry", "inspect", {"image": image, "architecture": needs.architecture}),
        lambda facts: problem_of(facts, needs),
        cure=f"build it for this platform and push it: docker buildx build --platform linux/{needs.architecture} "
        f"--provenance=false --sbom=false --output type=image,oci-mediatypes=false,push=true --tag {image} ...; "
        f"after docker login {image.partition('/')[0]}",
        absent="the registry has no such image",
        keep="image",
    )


def problem_of(facts: Mapping[str, Any], needs: Needs) -> str:
    """Return why a platform cannot run an image, or ""."""
    media, architectures, labels = facts["media_type"], facts["architectures"], facts["labels"]
    if needs.single and media in _INDEXES:
        return f"its media type {media} is refused by the platform: it is an index, and one image is required"
    if needs.docker_only and ".oci." in media:
        return f"its media type {media} is refused by the platform: only Docker's media types are accepted"
    if needs.architecture not in architectures:
        return f"it is for {', '.join(architectures) or 'no architecture'}, and the machines are {needs.architecture}"
    platform = labels.get("remora.platform", "")
    if platform and needs.platform and platform not in ("any", "container", needs.platform):
        return f"it is built for {platform}, not for {needs.platform} (label remora.platform)"
    return _gpu_problem(labels.get("remora.cuda"), needs)


def _gpu_problem(cuda: str | None, needs: Needs) -> str:
    """Return why a labelled image does not use the platform's GPUs, or ""."""
    if cuda is None or not needs.gpu:
        return ""
    major = re.match(r"\d+", cuda)
    if major is None or major[0] == "0":
        return "it has no CUDA (label remora.cuda), and the machines have GPUs, which would stay idle"
    if needs.cuda and int(major[0]) > needs.cuda:
        return (
            f"it needs CUDA {major[0]}, and the platform's driver supports {needs.cuda}: use an image for {needs.cuda}"
        )
    return ""


# -- the registry ---------------------------------------------------------------------------------------------------


def inspect(image: str, architecture: str, login: Login) -> dict[str, Any]:
    """Return digest, media type, architectures and labels of an image. Raises CallError."""
    try:
        name = parse_image(image)
    except ValueError as error:
        raise CallError("invalid", str(error)) from error
    registry = _Registry(name, login)
    digest, media, manifest = registry.manifest(name.reference)
    architectures: list[str] = []
    if media in _INDEXES:
        entries = [each for each in manifest.get("manifests", []) if isinstance(each, dict)]
        by_architecture = {str(each.get("platform", {}).get("architecture")): each for each in entries}
        architectures = [each for each in by_architecture if each != "unknown"]  # unknown: attestations
        chosen = by_architecture.get(architecture)
        if chosen is None:
            return {"digest": digest, "media_type": media, "architectures": architectures, "labels": {}}
        _, _, manifest = registry.manifest(str(chosen.get("digest")))
    config = registry.blob(str(manifest.get("config", {}).get("digest")))
    labels = (config.get("config") or {}).get("Labels") or {}
    return {
        "digest": digest,
        "media_type": media,
        "architectures": architectures or [str(config.get("architecture", ""))],
        "labels": {str(key): str(value) for key, value in labels.items()},
    }


class _Registry:
    """Reads of one repository; credentials go to HTTPS and loopback only."""

    def __init__(self, name: ImageName, login: Login) -> None:
        local = _LOCAL.fullmatch(name.host)
        self._root = f"{'http' if local else 'https'}://{name.host}/v2/{name.repository}"
        self._name = name
        self._login = login
        self._headers: dict[str, str] = {}

    def manifest(self, reference: str) -> tuple[str, str, dict[str, Any]]:
        accept = ", ".join((_DOCKER, _OCI, *_INDEXES))
        headers, body = self._get(f"{self._root}/manifests/{reference}", {"Accept": accept})
        found = _parse(body)
        media = str(found.get("mediaType") or headers.get("content-type", "").partition(";")[0])
        return headers.get("docker-content-digest", reference), media, found

    def blob(self, digest: str) -> dict[str, Any]:
        return _parse(self._get(f"{self._root}/blobs/{digest}", {})[1])

    def _get(self, url: str, headers: dict[str, str]) -> tuple[Mapping[str, str], bytes]:
        answer = self._fetch(url, {**headers, **self._headers})
        challenge = answer.headers.get("www-authenticate", "")
        if answer.status == 401 and challenge:
            self._headers = {"Authorization": self._authorize(challenge)}
            answer = self._fetch(url, {**headers, **self._headers})
        return answer.headers, self._checked(answer)

    def _fetch(self, url: str, headers: Mapping[str, str]) -> Answer:
        try:
            return fetch(url, _LIMITS, headers=headers, redirects=True)
        except NoAnswerError as error:
            raise CallError("unreachable", f"{self._name.host} cannot be reached: {error}") from error

    def _checked(self, answer: Answer) -> bytes:
        kinds: dict[int, Kind] = {401: "denied", 403: "denied", 404: "missing", 429: "busy"}
        if not answer.is_success:
            raise CallError(kinds.get(answer.status, "failed"), f"{self._name.host} answers {answer.status}")
        return answer.body

    def _authorize(self, challenge: str) -> str:
        """Return the value of the header that a challenge asks for."""
        known = self._login(self._name.host)
        basic = f"Basic {base64.b64encode(':'.join(known).encode()).decode()}" if known else ""
        if challenge.lower().startswith("basic"):
            if not basic:
                raise CallError("denied", f"{self._name.host} requires a login")
            return basic
        fields = dict(_CHALLENGE.findall(challenge))
        realm = urlsplit(fields.get("realm", ""))
        if realm.scheme != "https" and not _LOCAL.fullmatch(realm.netloc):
            raise CallError("denied", f"{self._name.host} names a token server without TLS: {realm.netloc}")
        scope = fields.get("scope") or f"repository:{self._name.repository}:pull"
        query = urlencode({"service": fields.get("service", ""), "scope": scope})
        given = self._fetch(f"{fields['realm']}?{query}", {"Authorization": basic} if basic else {})
        answer = _parse(self._checked(given))
        return f"Bearer {answer.get('token') or answer.get('access_token') or ''}"


def _parse(body: bytes) -> dict[str, Any]:
    try:
        found = read_json(body)
    except ValueError as error:
        raise CallError("failed", f"the registry's answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CallError("failed", "the registry's answer is not a JSON object")
    return found


def docker_login(config: Path) -> Login:
    """Return the logins of `docker login`, from its configuration file and credential helpers."""

    def login(host: str) -> tuple[str, str] | None:
        try:
            known = read_json(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        key = "https://index.docker.io/v1/" if host == _HUB else host
        program = known.get("credHelpers", {}).get(key) or known.get("credsStore")
        if program and re.fullmatch(r"[\w.-]+", program):
            found = _from_program(f"docker-credential-{program}", key)
            if found is not None:
                return found
        encoded = known.get("auths", {}).get(key, {}).get("auth")
        if not encoded:
            return None
        user, _, password = base64.b64decode(encoded).decode().partition(":")
        return user, password

    return login


def _from_program(program: str, host: str) -> tuple[str, str] | None:
    try:
        done = subprocess.run([program, "get"], input=host, capture_output=True, text=True, timeout=_TIMEOUT_S)
        found = read_json(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return (found["Username"], found["Secret"]) if {"Username", "Secret"} <= found.keys() else None
