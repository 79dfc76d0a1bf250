"""Ensembles come and go with their models [E03, M12, M14], and requests keep what they run on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.backends import Backend
from remora.backends.registry import EnsembleBackend
from remora.errors import InternalError, InvalidArgumentError, NotFoundError
from remora.messages import InferForm, InputSpec, Outcome, OutputSpec, Response, Ticket
from remora.models import loader as loading
from remora.models.lifecycle import Lifecycle
from remora.models.loader import LoadPlan, ModelLoader
from remora.options import EngineOptions
from remora.scheduling.assembly import Steps
from support.engine.fakes import DOUBLER, FakeBackend, FakeClock, Replies, write_model
from support.process.eventually import eventually

PATIENCE_S = 30.0
TENSORS = DOUBLER.replace('backend: "fake"', "")
ASKED = InferForm((InputSpec("IN", "INT32", (1, 1)),))


class Bench:
    """A repository of doublers and ensembles of them."""

    def __init__(self, repository: Path, backend: FakeBackend) -> None:
        self.repository = repository
        self.backend = backend

    def ensemble(self, name: str, *steps: str, version: int = -1, batch: int = 8) -> None:
        """A chain; each step is a doubler or another ensemble."""
        names = ["IN", *(f"t{index}" for index in range(1, len(steps))), "OUT"]
        texts = "".join(
            f'step {{ model_name: "{step}" model_version: {version} '
            f'input_map {{ key: "IN" value: "{names[index]}" }} '
            f'output_map {{ key: "OUT" value: "{names[index + 1]}" }} }}'
            for index, step in enumerate(steps)
        )
        tensors = TENSORS.replace("max_batch_size: 8", f"max_batch_size: {batch}")
        config = f'platform: "ensemble" {tensors} ensemble_scheduling {{ {texts} }}'
        write_model(self.repository, name, config=config)

    def break_model(self, name: str) -> None:
        (self.repository / name / "1" / "broken").touch()

    def mend_model(self, name: str) -> None:
        (self.repository / name / "1" / "broken").unlink()

    def lifecycle(self, mode: str = "explicit", **settings: Any) -> Lifecycle:
        options = EngineOptions(model_repository=(self.repository,), model_control_mode=mode, **settings)
        return Lifecycle(options, ModelLoader(options, FakeClock()), FakeClock())

    def started(self, mode: str = "explicit", **settings: Any) -> Lifecycle:
        lifecycle = self.lifecycle(mode, **settings)
        assert lifecycle.start() == {}
        return lifecycle

    def opened(self, name: str) -> int:
        """How many times a model was opened."""
        return sum(model.source.name == name for model in self.backend.opened)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The doublers a, b and c, and nothing else yet."""
    backend = FakeBackend()

    def find(name: str) -> Backend:
        return EnsembleBackend() if name == "ensemble" else backend.find(name)

    monkeypatch.setattr(loading, "find_backend", find)
    for name in "abc":
        write_model(tmp_path, name)
    return Bench(tmp_path, backend)


def ready(lifecycle: Lifecycle) -> list[str]:
    return [model.name for model in lifecycle.ready_models()]


def doubled(lifecycle: Lifecycle, name: str) -> int:
    """What becomes of 1."""
    return int(answer_of(lifecycle, name, ASKED)[0, 0])


def answer_of(lifecycle: Lifecycle, name: str, form: InferForm) -> Any:
    """The one output of the answer about 1."""
    done = threading.Event()
    replies = Replies()

    def reply(ticket: Ticket, outcome: Outcome) -> None:
        replies(ticket, outcome)
        done.set()

    ticket = lifecycle.resolve(name).submit(form, [np.ones((1, 1), np.int32)], reply)
    assert done.wait(PATIENCE_S)
    outcome = replies.only(ticket)
    assert isinstance(outcome, Response), outcome
    return outcome.outputs[0].data


# -- strings ---------------------------------------------------------------------------------------------------------

TEXTS = TENSORS.replace("TYPE_INT32", "TYPE_STRING")
INNER, OUTER = TEXTS.replace('"IN"', '"TEXT"'), TEXTS.replace('"IN"', '"TEXTS"')


def a_step(model: str, name: str, tensor: str) -> str:
    return (
        f'platform: "ensemble" %s ensemble_scheduling {{ step {{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "{name}" value: "{tensor}" }} output_map {{ key: "OUT" value: "OUT" }} }} }}'
    )


def test_a_truncated_string_is_reported_and_counted_by_the_model_that_reads_it(bench: Bench) -> None:
    write_model(bench.repository, "reader", config=f'backend: "fake" {TEXTS}')
    write_model(bench.repository, "inner", config=a_step("reader", "IN", "TEXT") % INNER)
    write_model(bench.repository, "outer", config=a_step("inner", "TEXT", "TEXTS") % OUTER)
    lifecycle = bench.started("none")
    torn = [(9).to_bytes(4, "little") + b"ab"]
    asked = InferForm((InputSpec("TEXTS", "BYTES", (1, 1)),))
    with pytest.raises(InvalidArgumentError) as caught:
        lifecycle.resolve("outer").submit(asked, torn, Replies())
    assert caught.value.message == (
        "in ensemble 'outer', in ensemble 'inner', incomplete string data for inference input 'IN', expecting string "
        "of length 9 but only 2 bytes available"
    )
    assert caught.value.from_model, "no checks of the server found it"
    names = ("outer", "inner", "reader")
    assert [lifecycle.resolve(name).stats().fail.count for name in names] == [1, 1, 1]


# -- coming ---------------------------------------------------------------------------------------------------------


def test_an_ensemble_brings_its_models(bench: Bench) -> None:
    bench.ensemble("e", "a", "b")
    lifecycle = bench.started()
    lifecycle.load("e", {})
    assert ready(lifecycle) == ["a", "b", "e"]
    assert doubled(lifecycle, "e") == 4


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_at_start_an_ensemble_waits_for_its_models_whatever_their_names(bench: Bench, mode: str) -> None:
    bench.ensemble("aa", "zz", "c")
    bench.ensemble("zz", "b")
    lifecycle = bench.started(mode, load_model=() if mode == "none" else ("aa",))
    assert doubled(lifecycle, "aa") == 4
    assert [bench.opened(name) for name in "bc"] == [1, 1]


def test_a_model_that_serves_already_is_not_loaded_again(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("a",))
    lifecycle.load("e", {})
    assert bench.opened("a") == 1


@pytest.mark.parametrize(
    ("steps", "version", "text"),
    [
        (("nope",), -1, "ensemble e contains models that are not available or ambiguous: nope"),
        (("a",), 7, "ensemble 'e' depends on 'a' whose required version 7 is not loaded."),
        (
            ("bad",),
            -1,
            "ensemble 'e' depends on 'bad' which has no loaded version. Model 'bad' loading failed with error: version "
            "1 is at UNAVAILABLE state: Invalid argument: the model is broken;",
        ),
        (("e",), -1, "an ensemble cannot be composed of itself: e -> e. Take one of these steps out"),
        (
            ("other",),
            -1,
            "ensemble 'e' depends on 'other' which is not valid. Model 'other' failed with error: an ensemble cannot "
            "be composed of itself: e -> other -> e. Take one of these steps out",
        ),
        (
            ("small",),
            -1,
            "ensemble e allows maximum batch size 8, but it contains model small which only allows maximum batch size "
            "to be 2",
        ),
    ],
)
def test_an_ensemble_that_cannot_serve_says_why(bench: Bench, steps: tuple[str, ...], version: int, text: str) -> None:
    bench.ensemble("e", *steps, version=version)
    bench.ensemble("other", "e")
    write_model(bench.repository, "bad")
    bench.break_model("bad")
    write_model(bench.repository, "small", config=DOUBLER.replace("size: 8", "size: 2"))
    lifecycle = bench.started()
    with pytest.raises(InvalidArgumentError) as caught:
        lifecycle.load("e", {})
    assert str(caught.value) == f"load failed for model 'e': {text}\n"
    assert "e" not in ready(lifecycle)


def test_an_ensemble_whose_own_words_are_wrong_cannot_be_polled(bench: Bench) -> None:
    write_model(bench.repository, "e", config=f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ }}')
    with pytest.raises(InternalError, match="failed to load 'e', failed to poll from model repository"):
        bench.started().load("e", {})


def test_an_ensemble_without_a_version_folder_gets_a_hint_after_tritons_text(bench: Bench) -> None:
    write_model(bench.repository, "m")
    bench.ensemble("e", "m")
    (bench.repository / "e" / "1").rename(bench.repository / "e" / "first")
    lifecycle = bench.started()
    with pytest.raises(InvalidArgumentError) as refusal:
        lifecycle.load("e", {})
    first, hint = str(refusal.value).splitlines()
    assert (
        first
        == "load failed for model 'e': at least one version must be available under the version policy of model 'e'"
    )
    assert "make an empty folder 1/" in hint
    config = bench.repository / "e" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { specific { versions: 3 } }")
    (bench.repository / "e" / "1").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"version policy of model 'e'\n$"):
        lifecycle.load("e", {})


def test_at_start_a_broken_model_is_tried_once_and_named_for_both(bench: Bench) -> None:
    bench.ensemble("e", "a")
    bench.break_model("a")
    failures = bench.lifecycle("none").start()
    assert sorted(failures) == ["a", "e"]
    assert "depends on 'a' which has no loaded version" in str(failures["e"])


def test_a_failed_reload_leaves_the_ensemble_serving(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    bench.ensemble("e", "nope")
    with pytest.raises(InvalidArgumentError):
        lifecycle.load("e", {})
    assert doubled(lifecycle, "e") == 2


# -- going ----------------------------------------------------------------------------------------------------------


def test_without_its_model_an_ensemble_goes_and_with_it_comes_back(bench: Bench) -> None:
    bench.ensemble("e", "a")
    bench.ensemble("outer", "e", "b")
    lifecycle = bench.started(load_model=("outer",))
    lifecycle.unload("a")
    assert ready(lifecycle) == ["b"]
    with pytest.raises(NotFoundError, match="'e' has no available versions"):
        lifecycle.resolve("e")
    lifecycle.load("a", {})
    assert ready(lifecycle) == ["a", "b", "e", "outer"]
    assert doubled(lifecycle, "outer") == 4


def test_an_ensemble_that_was_unloaded_does_not_come_back_by_itself(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    lifecycle.unload("e")
    lifecycle.unload("a")
    lifecycle.load("a", {})
    assert ready(lifecycle) == ["a"]


def test_an_ensemble_that_no_longer_fits_goes_until_it_fits(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    write_model(bench.repository, "a", config=DOUBLER.replace("size: 8", "size: 2"))
    lifecycle.load("a", {})
    assert ready(lifecycle) == ["a"]
    write_model(bench.repository, "a")
    lifecycle.load("a", {})
    assert ready(lifecycle) == ["a", "e"]


def test_a_model_that_becomes_decoupled_makes_its_ensemble_decoupled(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    assert not lifecycle.resolve("e").decoupled
    write_model(bench.repository, "a", config=DOUBLER + "model_transaction_policy { decoupled: true }")
    lifecycle.load("a", {})
    assert lifecycle.resolve("e").decoupled
    assert lifecycle.resolve("e").config.model_transaction_policy.decoupled


def test_unloading_with_dependents_takes_what_was_loaded_for_the_ensemble_alone(bench: Bench) -> None:
    bench.ensemble("e", "a", "b", "c")
    bench.ensemble("other", "c")
    lifecycle = bench.started(load_model=("b", "e", "other"))
    lifecycle.unload("e", unload_dependents=True)
    assert ready(lifecycle) == ["b", "c", "other"]


def test_models_that_an_earlier_unload_left_are_still_loaded_for_the_ensemble_alone(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    lifecycle.unload("e")
    lifecycle.load("e", {})
    lifecycle.unload("e", unload_dependents=True)
    assert ready(lifecycle) == []


def test_unloading_an_ensemble_leaves_its_models(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    lifecycle.unload("e")
    assert ready(lifecycle) == ["a"]


# -- requests under way ---------------------------------------------------------------------------------------------


def test_a_model_is_closed_when_the_ensembles_requests_have_done_with_it(bench: Bench) -> None:
    bench.ensemble("e", "a", "b")
    lifecycle = bench.started(load_model=("e",))
    inside, go_on = threading.Event(), threading.Event()

    def during() -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)

    (a,) = [model for model in bench.backend.opened if model.source.name == "a"]
    a.instances[0].during = during
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(doubled(lifecycle, "e")))
    asking.start()
    assert inside.wait(PATIENCE_S)
    lifecycle.unload("e", unload_dependents=True)
    assert ready(lifecycle) == []
    go_on.set()
    asking.join(PATIENCE_S)
    assert answers == [4]
    assert lifecycle.wait_until_closed(PATIENCE_S)
    assert {model.source.name: model.closed for model in bench.backend.opened} == {"a": 1, "b": 1}


def test_a_stop_finishes_the_ensembles_requests(bench: Bench) -> None:
    bench.ensemble("e", "b", "a")
    lifecycle = bench.started(load_model=("e",))
    inside, go_on = threading.Event(), threading.Event()

    def during() -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)

    (b,) = [model for model in bench.backend.opened if model.source.name == "b"]
    b.instances[0].during = during
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(doubled(lifecycle, "e")))
    asking.start()
    assert inside.wait(PATIENCE_S)
    stopping = threading.Thread(target=lifecycle.stop, args=(PATIENCE_S,))
    stopping.start()
    go_on.set()
    stopping.join(PATIENCE_S)
    asking.join(PATIENCE_S)
    assert answers == [4]


def test_what_is_being_closed_cannot_be_acquired(bench: Bench) -> None:
    lifecycle = bench.started(load_model=("a",))
    model = lifecycle.acquire("a")
    assert not model.close(0.0), "it is still lent"
    assert not model.acquire()
    model.release()
    assert model.close(PATIENCE_S)


def test_the_ensembles_numbers_stand_beside_those_of_its_models(bench: Bench) -> None:
    bench.ensemble("e", "a", "a")
    lifecycle = bench.started(load_model=("e",))
    doubled(lifecycle, "e")
    own, step = (lifecycle.resolve(name).statistics.snapshot(name, "1") for name in ("e", "a"))
    assert (own.inference_count, own.execution_count, own.success.count, own.queue.count) == (1, 1, 1, 1)
    assert (step.inference_count, step.execution_count, step.success.count) == (2, 2, 2)
    assert own.compute_infer.ns == step.compute_infer.ns
    assert [(row.batch_size, row.compute_infer.count) for row in own.batches] == [(1, 1)]


def test_an_ensembles_failure_is_counted_as_no_execution(bench: Bench) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    (a,) = [model for model in bench.backend.opened if model.source.name == "a"]
    a.instances[0].failure = RuntimeError("no")
    done = threading.Event()
    lifecycle.resolve("e").submit(ASKED, [np.ones((1, 1), np.int32)], lambda _ticket, _outcome: done.set())
    assert done.wait(PATIENCE_S)
    statistics = lifecycle.resolve("e").statistics
    own = statistics.snapshot("e", "1")
    assert (own.fail.count, own.execution_count, own.success.count) == (1, 0, 0)
    assert statistics.failures["OTHER"] == 1


# -- classes --------------------------------------------------------------------------------------------------------

LABELLED = DOUBLER.replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"')


def test_the_classes_of_an_ensemble_are_called_as_the_model_calls_them_where_they_come_from(bench: Bench) -> None:
    (write_model(bench.repository, "c", config=LABELLED) / "labels.txt").write_text("one\ntwo\n")
    bench.ensemble("inner", "a", "c")
    bench.ensemble("outer", "b", "inner")
    bench.ensemble("plain", "c", "a")
    lifecycle = bench.started("none")
    names = {name: lifecycle.resolve(name).labels_of("OUT") for name in ("c", "inner", "outer", "plain")}
    assert names == {"c": ("one", "two"), "inner": ("one", "two"), "outer": ("one", "two"), "plain": ()}


def test_an_ensembles_own_names_for_classes_hold(bench: Bench) -> None:
    (write_model(bench.repository, "c", config=LABELLED) / "labels.txt").write_text("one\ntwo\n")
    bench.ensemble("own", "a", "c")
    config = bench.repository / "own" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"'))
    (bench.repository / "own" / "labels.txt").write_text("uno\n")
    lifecycle = bench.started("none")
    asked = InferForm(ASKED.inputs, (OutputSpec("OUT", 2),))
    assert answer_of(lifecycle, "own", asked).tolist() == [[b"4:0:uno"]]
    assert answer_of(lifecycle, "c", asked).tolist() == [[b"2:0:one"]]


def test_an_ensemble_that_is_unloaded_while_it_is_composed_again_stays_unloaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    models = lifecycle.models
    open_again = models.open

    def unload_first(name: str, *what: Any) -> None:
        if name == "e":
            lifecycle.unload("e")
        open_again(name, *what)

    lifecycle.unload("a")
    assert ready(lifecycle) == []
    monkeypatch.setattr(models, "open", unload_first)
    lifecycle.load("a", {})
    assert ready(lifecycle) == ["a"]


def test_an_ensemble_that_is_loaded_anew_while_it_is_composed_again_has_its_new_configuration(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    models, is_loading, is_composing = lifecycle.models, threading.Event(), threading.Event()
    open_now, loading = models.open, threading.Thread(target=lambda: lifecycle.load("e", {}))

    def open_late(name: str, plan: LoadPlan, steps: Steps | None) -> None:
        if name == "e" and plan.config.max_batch_size == 4 and not is_loading.is_set():
            is_loading.set()
            assert is_composing.wait(PATIENCE_S)
        elif name == "e" and is_loading.is_set() and not is_composing.is_set():
            is_composing.set()
            eventually(lambda: models._ensembles._plans["e"] is not plan)
        open_now(name, plan, steps)

    monkeypatch.setattr(models, "open", open_late)
    bench.ensemble("e", "a", batch=4)
    loading.start()
    assert is_loading.wait(PATIENCE_S)
    lifecycle.unload("a")
    lifecycle.load("a", {})
    loading.join(PATIENCE_S)
    assert lifecycle.resolve("e").config.max_batch_size == 4


def test_an_ensemble_that_is_composed_again_as_it_was_before_its_load_ends_has_its_new_configuration(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ensemble("e", "a")
    lifecycle = bench.started(load_model=("e",))
    models, is_open, is_composed = lifecycle.models, threading.Event(), threading.Event()
    open_now, loading = models.open, threading.Thread(target=lambda: lifecycle.load("e", {}))

    def open_and_wait(name: str, plan: LoadPlan, steps: Steps | None) -> None:
        open_now(name, plan, steps)
        if name == "e" and not is_open.is_set():
            is_open.set()
            assert is_composed.wait(PATIENCE_S)

    monkeypatch.setattr(models, "open", open_and_wait)
    bench.ensemble("e", "a", batch=4)
    loading.start()
    assert is_open.wait(PATIENCE_S)
    lifecycle.unload("a")
    lifecycle.load("a", {})
    is_composed.set()
    loading.join(PATIENCE_S)
    assert lifecycle.resolve("e").config.max_batch_size == 4


def test_an_ensemble_loads_a_model_again_that_is_evicted_for_another_of_its_models(bench: Bench) -> None:
    for name in "abc":
        (bench.repository / name / "1" / "fake.bin").write_bytes(b"0123456789")
    bench.ensemble("old", "a")
    bench.ensemble("new", "a", "b")
    clock = FakeClock()
    options = EngineOptions(model_repository=(bench.repository,), model_control_mode="ondemand", model_memory_budget=50)
    lifecycle = Lifecycle(options, ModelLoader(options, clock), clock)
    assert lifecycle.start() == {}
    for name in ("old", "c", "new"):
        clock.advance(1_000_000_000)
        lifecycle.wait_for(name, -1, PATIENCE_S)
    assert doubled(lifecycle, "new") == 4
    lifecycle.stop(PATIENCE_S)
