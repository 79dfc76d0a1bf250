"""Routes of a released model's requests among its versions, and counts of the answers.

The table of models puts a `Router` in front of the versions of a released model. Each look-up then returns a
`RoutedModel` for one request, which chooses the version when it gets the request. Other models are looked up as always.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from remora.api.models import Carrier
from remora.errors import RemoraError, RetiredError
from remora.messages import Data, InferForm, Outcome, Reply, Ticket, split_outcome
from remora.models.served_model import ServedModel
from remora.traffic.releases import (
    BY_REQUEST,
    HUNDRED,
    STICKY_HEADER,
    STICKY_PARAMETER,
    Release,
    arm_of,
    bucket_of,
    hash_of,
)
from remora_tools.rollout.judgement import CALIBRATION, Observed, Rate, latency_limit_ns
from remora_tools.rollout.recordings import Step
from remora_tools.rollout.shadowing import Shadowing

_log = logging.getLogger("remora.releases")

JUDGE_EVERY_NS = 100_000_000
_MAX_LOGGED_ID = 128
COPY_HEADER = b"x-remora-copy"
"""Header of copies that another server sends; they are not copied again."""


class _Count:
    """Answers of one version in the current step."""

    __slots__ = ("answers", "errors", "ns", "slow", "timed")

    def __init__(self) -> None:
        self.answers = self.errors = self.slow = self.timed = self.ns = 0


class Tally:
    """Counts of the answers of a release's versions in its current step. Thread-safe.

    Args:
        stable: the version whose first latencies set the limit of a slow answer.
        limit_ns: that limit, 0 to take it from the stable version.
    """

    def __init__(self, stable: int, limit_ns: int = 0) -> None:
        self._lock = threading.Lock()
        self._stable = stable
        self._limit_ns = limit_ns
        self._samples: list[int] = []
        self._counts: dict[int, _Count] = {}

    def record(self, version: int, latency_ns: int, *, failed: bool) -> None:
        """Count an answer. Latencies of failures do not count, because a failure may be quick."""
        with self._lock:
            row = self._counts.get(version) or self._counts.setdefault(version, _Count())
            row.answers += 1
            row.ns += latency_ns
            if failed:
                row.errors += 1
            elif self._limit_ns:
                row.timed += 1
                row.slow += latency_ns > self._limit_ns
            elif version == self._stable:
                self._samples.append(latency_ns)
                if len(self._samples) >= CALIBRATION:
                    self._limit_ns = latency_limit_ns(self._samples)

    def observed(self, canary: int) -> Observed:
        """Return the rates of the canary and the stable version."""
        with self._lock:
            own = self._counts.get(canary) or _Count()
            other = self._counts.get(self._stable) or _Count()
            return Observed(
                Rate(own.errors, own.answers),
                Rate(other.errors, other.answers),
                Rate(own.slow, own.timed),
                Rate(other.slow, other.timed),
            )

    def rows(self) -> dict[int, dict[str, float]]:
        """Return the counts by version, with the mean latency in milliseconds."""
        with self._lock:
            return {
                version: {
                    "answers": row.answers,
                    "errors": row.errors,
                    "slow": row.slow,
                    "mean_ms": round(row.ns / row.answers / 1e6, 3) if row.answers else 0.0,
                }
                for version, row in self._counts.items()
            }

    @property
    def limit_ns(self) -> int:
        """Limit of a slow answer, 0 while it is unknown."""
        return self._limit_ns


class Router:
    """Chooser of the version of each request to one model. Thread-safe.

    Args:
        release: the release of the model.
        tally: counts the answers.
        now: monotonic clock, in nanoseconds.
        shadowing: runs the copies for a shadow; None without one.
        judge: called at most once per `JUDGE_EVERY_NS`, after an answer; must not block.
    """

    def __init__(
        self,
        release: Release,
        tally: Tally,
        now: Callable[[], int],
        judge: Callable[[], None] = lambda: None,
        shadowing: Shadowing | None = None,
    ) -> None:
        self.release = release
        self.tally = tally
        self.now = now
        self._judge = judge
        self.shadowing = shadowing
        self._judge_ns = 0
        self._unnamed = count(1)
        self.by_header = b""
        """Lower-case name of the header that identifies a client, empty for none."""
        self._parameter = ""
        if release.sticky.startswith(STICKY_HEADER):
            self.by_header = release.sticky[len(STICKY_HEADER) :].lower().encode()
        elif release.sticky.startswith(STICKY_PARAMETER):
            self._parameter = release.sticky[len(STICKY_PARAMETER) :]

    def primary(self, ready: Mapping[int, ServedModel]) -> ServedModel | None:
        """Return the stable version, another of the release if it is not ready, else the highest."""
        for version in (self.release.stable, *(arm.version for arm in self.release.arms)):
            if version in ready:
                return ready[version]
        return ready[max(ready)] if ready else None

    def splits(self, ready: Mapping[int, ServedModel]) -> bool:
        """Return True if requests may go to several versions, or be copied."""
        shadow, shadowing = self.release.shadow, self.shadowing
        if shadow is None or shadowing is None or not shadowing.recorder.is_open or self.divides(ready):
            return self.divides(ready)
        return not shadow.is_version or shadow.version in ready or shadowing.recorder.has_sequences

    def divides(self, ready: Mapping[int, ServedModel]) -> bool:
        """Return True if requests may go to several versions."""
        return any(arm.version in ready for arm in self.release.arms)

    def reply_recording(
        self,
        form: InferForm,
        data: Sequence[Data],
        reply: Reply,
        model: ServedModel,
        ready: Mapping[int, ServedModel],
        carrier: Carrier | None,
    ) -> Reply:
        """Return the reply to a request to ``model``, which may record a copy for the shadow.

        A sequence of which a request is not recorded is not copied.
        """
        shadowing = self.shadowing
        if shadowing is None or not shadowing.recorder.is_open:
            return reply
        recorder = shadowing.recorder
        if not self._is_copied(form, model, ready, carrier):
            if form.sequence_id:
                recorder.forget(form.sequence_id)
            return reply
        if form.sequence_id and not form.sequence_start:
            return recorder.continue_sequence(form, data, reply, model.version_text, self.now())
        return recorder.begin(form, data, reply, model.name, model.version_text, self.now())

    def _is_copied(
        self, form: InferForm, model: ServedModel, ready: Mapping[int, ServedModel], carrier: Carrier | None
    ) -> bool:
        """Return True if a request is one of those that the shadow gets.

        Copies are not copied, and neither are requests whose outputs are classes.
        """
        shadow, shadowing = self.release.shadow, self.shadowing
        if shadow is None or shadowing is None or form.raw or any(each.classes for each in form.outputs):
            return False
        if shadow.is_version and (shadow.version == model.version or shadow.version not in ready):
            return False
        if carrier is not None and carrier(COPY_HEADER):
            return False
        if form.sequence_id:
            if shadow.is_version and any(arm.version == shadow.version for arm in self.release.arms):
                return False  # copies would take the slots of clients' sequences there
            if not form.sequence_start:
                return True
        sampled = shadow.weight >= HUNDRED or (
            bucket_of(self.release.salt, f"\0shadow {next(self._unnamed)}") < shadow.weight
        )
        return sampled and not shadowing.refusal(model)

    def route(self, ready: Mapping[int, ServedModel]) -> RoutedModel:
        """Return the model for one request."""
        return RoutedModel(self, ready)

    def version_of(self, alias: str) -> int | None:
        """Return the version of an alias, or None."""
        return self.release.version_of(alias)

    def choose(self, ready: Mapping[int, ServedModel], form: InferForm | None, carrier: Carrier | None) -> ServedModel:
        """Return the version for a request.

        A sequence stays where it began. A request without an identity goes to a random version.
        """
        key = ""
        if form is not None and form.sequence_id:
            if not form.sequence_start:
                for model in ready.values():
                    if model.keeps(form):
                        return model
            key = str(form.sequence_id)
        elif not (self.release.arms or self.release.logged):
            pass  # every request goes to the same version
        elif self.by_header:
            key = (carrier(self.by_header) or b"").decode("latin-1") if carrier is not None else ""
        elif form is not None:
            key = form.id if self.release.sticky == BY_REQUEST else str(form.parameters.get(self._parameter, ""))
        chosen = None
        if self.release.arms:
            arm = arm_of(self.release.arms, bucket_of(self.release.salt, key or f"\0{next(self._unnamed)}"))
            chosen = ready.get(arm.version) if arm is not None else None
        if chosen is None:
            chosen = self.primary(ready)
        assert chosen is not None  # a look-up needs a ready version
        if self.release.logged:
            self._log_choice(key, form.id if form is not None else "", chosen)
        return chosen

    def _log_choice(self, key: str, request_id: str, chosen: ServedModel) -> None:
        """Log which version a request gets.

        The client is a hash, because its identity may be secret.
        """
        fields = {
            "model": chosen.name,
            "version": chosen.version_text,
            "arm": self.release.alias_of(chosen.version),
            "client": f"{hash_of(self.release.salt, key):016x}" if key else "",
            "request": request_id[:_MAX_LOGGED_ID],
        }
        _log.info(
            "assignment: %s", " ".join(f"{name}={value!r}" for name, value in fields.items()), extra={"fields": fields}
        )

    def record(self, version: int, outcome: object, begin_ns: int) -> None:
        """Count an answer. Cancelled requests do not count."""
        failed = isinstance(outcome, RemoraError)
        if isinstance(outcome, RemoraError) and outcome.code == "CANCELLED":
            return
        now_ns = self.now()
        self.tally.record(version, now_ns - begin_ns, failed=failed)
        if now_ns >= self._judge_ns:
            self._judge_ns = now_ns + JUDGE_EVERY_NS
            self._judge()


class RoutedModel:
    """Model for one request of a release: the version is chosen when the request is submitted.

    It delegates to that version, and before the choice to the stable one.
    """

    __slots__ = ("_carrier", "_chosen", "_ready", "_router")

    is_plain = False
    is_routed = True
    queues_together = False

    def __init__(self, router: Router, ready: Mapping[int, ServedModel]) -> None:
        self._router = router
        self._ready = ready
        self._chosen: ServedModel | None = None
        self._carrier: Carrier | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen or self._router.primary(self._ready), name)

    @property
    def is_divided(self) -> bool:
        """True if the request might have gone to another version; False if it is only copied."""
        return self._router.divides(self._ready)

    def identify(self, carrier: Carrier | None) -> None:
        """Set the headers of the request."""
        self._carrier = carrier

    def bind(self, form: InferForm | None = None) -> ServedModel:
        """Choose the version, once, and return it."""
        if self._chosen is None:
            self._chosen = self._router.choose(self._ready, form, self._carrier)
        return self._chosen

    def bind_to(self, carrier: Carrier) -> ServedModel:
        """Choose the version by the headers of the request, once, and return it."""
        self.identify(carrier)
        return self.bind()

    def bind_version(self, model: ServedModel) -> None:
        """Choose a version that the caller keeps open."""
        self._chosen = model

    def counter(self) -> Callable[[object], None]:
        """Return the function that counts the end of a request that begins now."""
        router, version, begin_ns = self._router, self.bind().version, self._router.now()
        return lambda outcome: router.record(version, outcome, begin_ns)

    def acquire(self) -> bool:
        """Choose the version and keep it open (see `ServedModel.acquire`)."""
        return self.bind().acquire()

    def split(self, form: InferForm, data: Sequence[Data]) -> list[Data]:
        """Split as `ServedModel.split` does, by the version that will run the request."""
        return self.bind(form).split(form, data)

    def submit(self, form: InferForm, data: Sequence[Data], reply: Reply, **how: Any) -> Ticket:
        """Submit to the chosen version as `ServedModel.submit` does, and count the answer."""
        router, model = self._router, self.bind(form)
        recorded = router.reply_recording(form, data, reply, model, self._ready, self._carrier)
        if not self.is_divided:
            try:
                return model.submit(form, data, recorded, **how)
            except BaseException:
                _abandon(recorded)
                raise
        begin_ns = router.now()

        def counted(ticket: Ticket, outcome: Outcome) -> None:
            final, content = split_outcome(outcome)
            if final:
                router.record(model.version, content, begin_ns)
            recorded(ticket, outcome)

        try:
            return model.submit(form, data, counted, **how)
        except BaseException as error:
            _abandon(recorded)
            if isinstance(error, RemoraError) and not isinstance(error, RetiredError):
                router.record(model.version, error, begin_ns)
            raise


def _abandon(reply: Reply) -> None:
    """Forget the copy of a request that was refused."""
    if isinstance(reply, Step):
        reply.abandon()
