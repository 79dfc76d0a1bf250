"""Releases in an engine: routes, loads, judgement, and a restart amid a release."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora.calls import Metrics, ModelRelease
from remora.engine import Engine
from remora.errors import InternalError, InvalidArgumentError, NotFoundError, RemoraError
from remora.models.release_store import ReleaseStore
from remora.traffic.releases import Arm, Release
from support.engine.fakes import FakeClock
from support.models.released_engine import released_engine
from support.process.eventually import eventually
from support.servers.live_server import write_version

LENIENT = {"bake_s": 0, "least": 10, "error_margin": 0.4, "slow_margin": 0.4}
"""Rules of a quick judgement."""
FAILING = "raise ValueError('broken file')"


def _release(engine: Engine, action: str = "", model: str = "m", **parameters: Any) -> dict[str, Any]:
    return engine.perform(ModelRelease(model, action, parameters))


def _answers(engine: Engine, count: int, model: str = "m", **how: Any) -> list[int]:
    """Return the versions that answer ``count`` requests; version N multiplies by N."""
    results = [engine.infer(model, {"IN": np.array([[1]], np.int32)}, **how) for _ in range(count)]
    assert all(int(result["OUT"][0, 0]) == result.model_version for result in results)
    return [result.model_version for result in results]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_version(root, 1)
    write_version(root, 2)
    return root


def _add_version_three(repository: Path, **how: str) -> None:
    write_version(repository, 3, **how)


# -- routes -----------------------------------------------------------------------------------------------------------


def test_a_canary_gets_its_share_and_is_promoted(repository: Path) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository)
        assert _answers(engine, 3) == [2, 2, 2]
        status = _release(engine, "start", version=3, weight="30%")
        assert [(row["alias"], row["version"], row["weight"]) for row in status["arms"]] == [
            ("stable", 2, 70.0),
            ("canary", 3, 30.0),
        ]
        found = _answers(engine, 300)
        assert 35 < found.count(3) < 150  # 4e-13 of all salts are outside
        assert _release(engine)["arms"][1]["answers"] == found.count(3)
        _release(engine, "weight", weight="100%")
        assert set(_answers(engine, 20)) == {3}
        status = _release(engine, "promote", reason="it is good")
        assert (status["stage"], status["stable"], status["events"][-1]["reason"]) == ("settled", 3, "it is good")
        assert set(_answers(engine, 5)) == {3}
        eventually(lambda: [model.version for model in engine.models()] == [3])


def test_a_rolled_back_version_is_unloaded_and_stays_so(repository: Path) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository)
        _release(engine, "start", version=3, weight=50)
        assert set(_answers(engine, 60)) == {2, 3}
        _release(engine, "rollback")
        assert set(_answers(engine, 20)) == {2}
        eventually(lambda: [model.version for model in engine.models()] == [2])
    with released_engine(repository) as engine:
        assert set(_answers(engine, 5)) == {2}
        _release(engine, "end", serve_latest=True)
        assert set(_answers(engine, 5)) == {3}


@pytest.mark.parametrize("between", ["nothing", "a restart", "a shadow", "another declaration", "an alias"])
def test_the_end_of_a_release_does_not_let_a_rolled_back_version_serve(repository: Path, between: str) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository)
        _release(engine, "start", version=3, weight=20)
        _release(engine, "rollback", reason="prices are absurd")
        if between == "a shadow":
            _release(engine, "shadow", version=3)
            _release(engine, "shadow")
        elif between == "an alias":
            _release(engine, "alias", alias="old", version=3)
            _release(engine, "alias", alias="old")
    if between == "another declaration":
        (repository / "m" / "release.yaml").write_text("stable: 2\n")
        with released_engine(repository) as engine:
            with pytest.raises(RemoraError, match=r"release\.yaml declares it .* remove the file first"):
                _release(engine, "end", serve_latest=True)
            (repository / "m" / "release.yaml").unlink()
    with released_engine(repository) as engine:
        with pytest.raises(RemoraError, match=r"version 3 would serve, which was rolled back \(prices are absurd\)"):
            _release(engine, "end")
        assert set(_answers(engine, 5)) == {2}
        write_version(repository, 4)
        _release(engine, "end")
        assert set(_answers(engine, 5)) == {4}


def test_a_rollback_that_a_restart_would_undo_has_a_warning(repository: Path) -> None:
    with released_engine(repository) as engine:
        engine._lifecycle.releases._store.path = None
        _add_version_three(repository)
        assert _release(engine, "start", version=3, weight=20)["warning"] == ""
        assert "a restart of the server undoes it" in _release(engine, "rollback")["warning"]


def test_a_model_without_a_release_is_looked_up_directly(repository: Path) -> None:
    with released_engine(repository) as engine:
        model = engine.models()[0]
        assert engine.resolve("m") is model
        _release(engine, "start", version=1, weight=0)
        assert engine.resolve("m") is not model
        _release(engine, "rollback")
        assert engine.resolve("m") is model


def test_a_request_for_a_version_goes_past_the_release(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=100)
        assert _answers(engine, 5, version=2) == [2] * 5


def test_the_same_request_id_stays_with_its_version(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=50)
        found = {number: set(_answers(engine, 3, id=f"user {number}")) for number in range(40)}
        assert all(len(versions) == 1 for versions in found.values())
        assert set.union(*found.values()) == {1, 2}


def test_a_parameter_may_name_the_client(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=50, sticky="parameter:tenant")
        found = [set(_answers(engine, 3, parameters={"tenant": f"t{number}"})) for number in range(40)]
        assert all(len(versions) == 1 for versions in found)
        assert set.union(*found) == {1, 2}


def test_aliases_name_versions_for_clients(repository: Path) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository)
        _release(engine, "start", version=3, weight=1)
        _release(engine, "alias", alias="old", version=1)
        found = [_answers(engine, 1, f"m@{name}")[0] for name in ("stable", "canary", "old", "latest")]
        assert found == [2, 3, 1, 3]
        for name in ("m@nobody", "x@stable", "m@"):
            with pytest.raises(NotFoundError, match=f"Request for unknown model: '{name}' is not found"):
                _answers(engine, 1, name)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "parameters", "text"),
    [
        ("start", {"version": 7, "weight": 10}, "names version 7, which the model's repository does not have: it has"),
        ("start", {"version": 1, "weight": "101%"}, "expected 0 to 100 percent"),
        ("start", {"version": 1, "weight": "ten"}, "expected 0 to 100 percent"),
        ("start", {"version": 2, "weight": 10}, "version 2 is stable already"),
        ("start", {"version": True}, "expected the number of a version"),
        ("start", {}, "version: expected the number of a version"),
        ("start", {"version": 1, "colour": "blue"}, "unknown member 'colour'"),
        ("start", {"version": 1, "steps": 5}, "steps: expected a list"),
        (
            "start",
            {"version": 1, "rules": {"alpha": 2}, "automatic": True},
            "alpha is 2: expected a number from 1e-09 to 0.5",
        ),
        ("start", {"version": 1, "rules": {"beta": 2}, "automatic": True}, "rules: unknown member 'beta'"),
        ("start", {"version": 1, "log": 1}, "log: expected true or false"),
        ("start", {"version": 1, "steps": ["50%"]}, 'steps: only with "automatic": true'),
        (
            "start",
            {"version": 1, "rules": {"least": 9}, "automatic": False},
            "because people decide without it; add it, or leave rules out",
        ),
        ("start", {"version": 1, "automatic": "yes"}, "automatic: expected true or false"),
        ("start", {"version": 1, "sticky": "moon"}, "expected request, header:NAME"),
        ("promote", {}, "there is no arm 'canary': no release runs"),
        ("rollback", {}, "no release is running"),
        ("weight", {"weight": 5}, "there is no arm 'canary'"),
        ("end", {}, "the model has no release"),
        ("end", {"serve_latest": 1}, "serve_latest: expected true or false"),
        ("fly", {}, "release action 'fly' is not known: there are start, weight, promote"),
    ],
)
def test_a_wrong_command_is_refused_and_changes_nothing(
    repository: Path, action: str, parameters: dict[str, Any], text: str
) -> None:
    with released_engine(repository) as engine:
        before = _release(engine)
        with pytest.raises(RemoraError) as refusal:
            _release(engine, action, **parameters)
        assert text in str(refusal.value)
        assert _release(engine) == before
        assert engine.readiness().ready
        assert _answers(engine, 2) == [2, 2]


def test_an_unknown_model_has_no_release(repository: Path) -> None:
    with released_engine(repository) as engine, pytest.raises(NotFoundError, match="model 'nothing' is not served"):
        _release(engine, model="nothing")


def test_a_version_that_cannot_be_loaded_is_not_released(repository: Path) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository, initialize=FAILING)
        with pytest.raises(InvalidArgumentError, match=r"version 3 of model 'm' is not released: .*broken file"):
            _release(engine, "start", version=3, weight=10)
        assert _answers(engine, 5) == [2] * 5
        assert _release(engine)["stage"] == "none"
        assert engine.readiness().ready


@pytest.mark.parametrize("action", ["start", "shadow"])
def test_a_command_that_fails_keeps_the_counts_of_the_running_arms(repository: Path, action: str) -> None:
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=50)
        _answers(engine, 60)
        _add_version_three(repository, initialize=FAILING)
        before = _release(engine)["arms"]
        members: dict[str, Any] = {"alias": "other", "weight": 10} if action == "start" else {}
        with pytest.raises(InvalidArgumentError, match="broken file"):
            _release(engine, action, version=3, **members)
        after = _release(engine)["arms"]
        assert after == before
        assert sum(arm["answers"] for arm in after) == 60


def test_a_full_disk_refuses_a_start_and_lets_a_rollback_pass(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=10)
        monkeypatch.setattr(ReleaseStore, "write", full)
        with pytest.raises(InternalError, match=r"cannot be written to .*No space left on device; nothing has changed"):
            _release(engine, "weight", weight=20)
        assert _release(engine)["arms"][1]["weight"] == 10
        status = _release(engine, "rollback")
        assert status["stage"] == "settled"
        assert "No space left on device" in status["warning"]
        assert _answers(engine, 5) == [2] * 5
        monkeypatch.undo()
        assert _release(engine)["warning"] == ""
    with released_engine(repository) as engine:
        assert _release(engine)["rejected"] == [1]


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_with_the_release(repository: Path) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository)
        _release(engine, "start", version=3, weight=50)
        before = {number: _answers(engine, 1, id=f"user {number}") for number in range(30)}
    with released_engine(repository) as engine:
        assert _release(engine)["stage"] == "running"
        assert {number: _answers(engine, 1, id=f"user {number}") for number in range(30)} == before


def test_a_canary_that_is_broken_at_a_restart_is_rolled_back(repository: Path) -> None:
    with released_engine(repository) as engine:
        _add_version_three(repository)
        _release(engine, "start", version=3, weight=50)
    (repository / "m" / "3" / "model.py").write_text("raise ValueError('damaged')")
    with released_engine(repository) as engine:
        assert _answers(engine, 5) == [2] * 5
        status = _release(engine)
        assert (status["stage"], status["rejected"]) == ("settled", [3])
        assert "damaged" in status["events"][-1]["reason"]
        assert engine.readiness().ready


def test_a_damaged_state_file_is_refused_with_its_place(repository: Path) -> None:
    file = repository / ".remora" / "releases.json"
    file.parent.mkdir()
    file.write_text('{"releases": {"m": 5}}')
    with pytest.raises(InternalError, match=r"stored releases in '.*releases\.json' cannot be read"):
        Engine(model_repository=(repository,)).start()


def test_the_state_may_be_kept_in_another_folder(repository: Path, tmp_path: Path) -> None:
    with released_engine(repository, release_directory=str(tmp_path / "state")) as engine:
        status = _release(engine, "start", version=1, weight=10)
        assert status["stored"] == str(tmp_path / "state" / "releases.json")
        assert list(json.loads((tmp_path / "state" / "releases.json").read_text())["releases"]) == ["m"]
    assert not (repository / ".remora").exists()


def test_a_primary_that_is_swapped_under_a_canary_keeps_the_release(repository: Path) -> None:
    with released_engine(repository, model_control_mode="explicit", load_model=("m",)) as engine:
        _release(engine, "start", version=1, weight=50)
        (repository / "m" / "2" / "model.py").touch()
        before = {model.version: model for model in engine.models()}
        engine.load("m")
        after = {model.version: model for model in engine.models()}
        assert (after[1] is before[1], after[2] is before[2]) == (True, False)
        assert set(_answers(engine, 60)) == {1, 2}


# -- declared releases ------------------------------------------------------------------------------------------------


def test_a_file_declares_a_release(repository: Path) -> None:
    (repository / "m" / "release.yaml").write_text("stable: 1\ncanary: 2\nweight: 50%\naliases: {champion: 1}\n")
    with released_engine(repository) as engine:
        assert set(_answers(engine, 60)) == {1, 2}
        assert _release(engine)["aliases"] == {"champion": 1}
        _release(engine, "promote")
    with released_engine(repository) as engine:  # the same file does not begin the release again
        assert _answers(engine, 10) == [2] * 10


def test_a_declared_release_that_was_never_stored_begins_again_and_the_log_says_so(
    repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (repository / "m" / "release.yaml").write_text("stable: 1\ncanary: 2\nweight: 50%\n")
    monkeypatch.setattr(ReleaseStore, "write", full)
    with released_engine(repository) as engine:
        assert "the next start begins the release again, also after a rollback" in caplog.text
        assert _release(engine, "rollback")["rejected"] == [2]
    monkeypatch.undo()  # the file is as after a kill
    caplog.clear()
    with released_engine(repository) as engine:
        assert _release(engine)["stage"] == "running"
        assert "begins the release again" not in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("canary: 2", "expected a mapping with at least 'stable'"),
        ("stable: 1\ncanary: 9", "names version 9, which the model's repository does not have"),
        ("stable: 1\nweigth: 9", "unknown member 'weigth'"),
        ("stable: 1\ncanary: 2\nweight: 300%", "expected 0 to 100 percent"),
        (
            "stable: 1\ncanary: 2\nsteps: [50%]\nrules: {least: 9}",
            "because people decide without it; add it, or leave steps and rules out",
        ),
        ("stable: 1\nweight: 10%\nsteps: [50%]", "steps, weight: only with a canary; add 'canary' with its version"),
        ("stable: [", "release.yaml"),
    ],
)
def test_a_wrong_declaration_fails_the_load_with_the_reason(
    repository: Path, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (repository / "m" / "release.yaml").write_text(text)
    with pytest.raises(InternalError, match="failed to load 'm', failed to poll from model repository"):
        Engine(model_repository=(repository,), backend_config=("python,isolation=thread",)).start()
    assert reason in caplog.text


# -- judgement --------------------------------------------------------------------------------------------------------


def test_an_automatic_release_rolls_back_a_version_that_fails(repository: Path) -> None:
    folder = repository / "m" / "3"
    with released_engine(repository, clock=FakeClock()) as engine:
        clock: Any = engine._clock
        folder.mkdir()
        text = (repository / "m" / "2" / "model.py").read_text()
        (folder / "model.py").write_text(text.replace("arrays = [", "raise ValueError('bad')\n        arrays = ["))
        _release(engine, "start", version=3, weight=50, automatic=True)
        for number in range(400):
            clock.advance(200_000_000)
            with suppress(RemoraError):
                engine.infer("m", {"IN": np.array([[1]], np.int32)}, id=str(number))
            if _release(engine)["stage"] == "settled":
                break
        status = eventually(lambda: status if (status := _release(engine))["stage"] == "settled" else None)
        assert (status["stage"], status["stable"], status["rejected"]) == ("settled", 2, [3])
        assert "failed answers" in status["events"][-1]["reason"]
        assert set(_answers(engine, 20)) == {2}


def test_an_automatic_release_takes_its_steps_and_promotes(repository: Path) -> None:
    rules = {"bake_s": 60, "least": 10, "error_margin": 0.4, "slow_margin": 0.4}
    with released_engine(repository, clock=FakeClock()) as engine:
        clock: Any = engine._clock
        _release(engine, "start", version=1, weight=40, steps=["60%"], rules=rules, automatic=True)
        weights = []
        for _ in range(3000):
            clock.advance(500_000_000)
            _answers(engine, 1)
            status = _release(engine)
            if status["stage"] == "settled":
                break
            weights.append(status["arms"][1]["weight"])
        assert list(dict.fromkeys(weights)) == [40.0, 60.0]
        assert (status["stable"], status["arms"][0]["version"]) == (1, 1)
        assert "promote version 1" in status["events"][-1]["action"]


def _answer_until(engine: Engine, action: str) -> dict[str, Any]:
    """Return the status after the answer that led to an action, or after many."""
    for _ in range(3000):
        engine._clock.advance(500_000_000)  # type: ignore[attr-defined]
        _answers(engine, 1)
        if (status := _release(engine))["events"][-1]["action"] == action:
            break
    return status


def test_a_step_of_all_requests_has_the_latency_limit_of_the_step_before(repository: Path) -> None:
    with released_engine(repository, clock=FakeClock()) as engine:
        _release(engine, "start", version=1, weight=40, steps=["100%"], rules=LENIENT, automatic=True)
        actions = [event["action"] for event in _answer_until(engine, "promote version 1")["events"]]
        assert actions == ["start canary version 1 with 40 %", "canary has 100 %", "promote version 1"]


def test_a_step_of_all_requests_keeps_its_latency_limit_over_restarts_and_changes(repository: Path) -> None:
    with released_engine(repository, clock=FakeClock()) as engine:
        _release(engine, "start", version=1, weight=40, steps=["100%"], rules=LENIENT, automatic=True)
        limit_ms = _answer_until(engine, "canary has 100 %")["slow_limit_ms"]
        assert limit_ms > 0
    with released_engine(repository, clock=FakeClock()) as engine:
        assert _release(engine)["slow_limit_ms"] == limit_ms
        _release(engine, "alias", alias="champion", version=2)
    with released_engine(repository, clock=FakeClock()) as engine:
        status = _answer_until(engine, "promote version 1")
        assert (status["stage"], status["stable"], status["slow_limit_ms"]) == ("settled", 1, 0)


def test_a_step_with_requests_to_the_stable_version_and_a_new_release_set_their_own_latency_limit(
    repository: Path,
) -> None:
    rules = {**LENIENT, "slow_ms": 50}
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=40, rules=rules, automatic=True)
        _release(engine, "rollback")
        _release(engine, "start", version=1, weight=100, rules=LENIENT, automatic=True)
        assert _release(engine)["slow_limit_ms"] == 0
    stored = ReleaseStore(repository / ".remora" / "releases.json")
    stored.write({"m": stored.read()["m"]._replace(slow_limit_ns=1_250_000)})
    with released_engine(repository) as engine:
        assert _release(engine)["slow_limit_ms"] == 1.25
        assert _release(engine, "weight", weight=90)["slow_limit_ms"] == 0
        assert _release(engine, "weight", weight=100)["slow_limit_ms"] == 0


def test_a_state_file_of_an_earlier_version_goes_on_without_the_latency_limit(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=100, rules=LENIENT, automatic=True)
    file = repository / ".remora" / "releases.json"
    document = json.loads(file.read_text())
    del document["releases"]["m"]["slow_limit_ns"]
    file.write_text(json.dumps(document))
    with released_engine(repository) as engine:
        assert set(_answers(engine, 20)) == {1}
        assert "the latency limit is not known" in _release(engine)["judgement"]


def test_a_release_that_starts_with_all_requests_and_no_latency_limit_waits_for_people(repository: Path) -> None:
    rules = {"bake_s": 0, "least": 10, "error_margin": 0.4}
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=100, rules=rules, automatic=True)
        assert set(_answers(engine, 100)) == {1}
        status = _release(engine)
        assert (status["stage"], status["slow_limit_ms"]) == ("running", 0)
        assert status["judgement"] == (
            "the latency limit is not known: the stable version has given 0 of the 200 good answers that set it, and "
            "the release has no limit in milliseconds"
        )


def test_people_decide_over_a_release_that_is_not_automatic(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "start", version=1, weight=50)
        _answers(engine, 50)
        status = _release(engine)
        assert (status["stage"], status["automatic"], status["judgement"]) == ("running", False, "")


# -- metrics and the store --------------------------------------------------------------------------------------------


def test_metrics_show_the_weights_and_answers_of_each_arm(repository: Path) -> None:
    with released_engine(repository) as engine:
        assert "remora_release" not in engine.perform(Metrics())
        _release(engine, "start", version=1, weight=25)
        found = _answers(engine, 40)
        text = engine.perform(Metrics())
        assert 'remora_release_weight{model="m",version="2",alias="stable"} 0.75' in text
        assert f'remora_release_answers{{model="m",version="1",alias="canary"}} {found.count(1)}' in text


def test_metrics_have_a_row_for_each_stored_arm_of_one_version(repository: Path) -> None:
    arms = (Arm("canary", 1, 1000), Arm("b", 1, 3000))
    ReleaseStore(repository / ".remora" / "releases.json").write({"m": Release(2, arms)})
    with released_engine(repository) as engine:
        text = engine.perform(Metrics())
        for version, alias, weight in ((2, "stable", 0.6), (1, "canary", 0.1), (1, "b", 0.3)):
            assert f'remora_release_weight{{model="m",version="{version}",alias="{alias}"}} {weight}' in text


def test_the_store_replaces_its_file_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ReleaseStore(tmp_path / "a" / "releases.json")
    assert store.read() == {}
    store.write({"m": Release(2)})
    monkeypatch.setattr("remora.models.release_store.os.replace", lambda *_: (_ for _ in ()).throw(OSError("torn")))
    with pytest.raises(OSError, match="torn"):
        store.write({"m": Release(3)})
    assert store.read() == {"m": Release(2)}
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["releases.json"]


# -- shadows ----------------------------------------------------------------------------------------------------------


def test_a_shadow_gets_copies_and_differences_are_counted(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "shadow", version=1)
        assert _answers(engine, 20, id="r1") == [2] * 20
        shadow = eventually(
            lambda: row if (row := _release(engine)["shadow"])["compared"] + row["dropped"] >= 20 else None
        )
        assert shadow["differing"] == shadow["compared"] > 0
        assert "r1: OUT: 1 of 1 elements differ, by at most 1" in shadow["samples"]
        assert _release(engine, "shadow")["shadow"] is None
        eventually(lambda: [model.version for model in engine.models()] == [2])
        assert engine.resolve("m") is engine.models()[0]


def test_a_tolerance_and_a_share_apply_to_copies(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "shadow", version=1, weight="50%", tolerance=2)
        _answers(engine, 100)
        shadow = eventually(lambda: row if (row := _release(engine)["shadow"])["compared"] >= 10 else None)
        assert shadow["differing"] == 0
        assert shadow["compared"] + shadow["dropped"] < 90


def test_a_shadow_survives_a_restart_and_a_broken_one_is_ended(repository: Path) -> None:
    with released_engine(repository) as engine:
        _release(engine, "shadow", version=1)
    with released_engine(repository) as engine:
        assert _release(engine)["shadow"]["version"] == 1
    (repository / "m" / "1" / "model.py").write_text("raise ValueError('damaged')")
    with released_engine(repository) as engine:
        assert _answers(engine, 3) == [2] * 3
        status = _release(engine)
        assert status["shadow"] is None
        assert "damaged" in status["events"][-1]["reason"]


def test_a_wrong_shadow_is_refused(repository: Path) -> None:
    with released_engine(repository) as engine:
        for parameters, text in (
            ({"version": 2}, "version 2 is stable: a shadow is another version"),
            ({"version": 1, "weight": 0}, "expected above 0 to 100 percent"),
            ({"version": 1, "tolerance": -1}, "tolerance: expected a number from 0 on"),
            ({"version": 1, "top_k": True}, "top_k: expected a whole number"),
            ({"version": 8}, "names version 8"),
            ({}, "there is no shadow"),
        ):
            with pytest.raises(RemoraError) as refusal:
                _release(engine, "shadow", **parameters)  # type: ignore[arg-type]
            assert text in str(refusal.value)
        assert _answers(engine, 2) == [2, 2]


def test_differences_of_a_shadowed_canary_end_it(repository: Path) -> None:
    with released_engine(repository, clock=FakeClock()) as engine:
        clock: Any = engine._clock
        _release(engine, "start", version=1, weight=1, automatic=True)
        _release(engine, "shadow", version=1)
        for _ in range(200):
            clock.advance(200_000_000)
            _answers(engine, 1)
            if _release(engine)["stage"] == "settled":
                break
        status = eventually(lambda: found if (found := _release(engine))["stage"] == "settled" else None)
        assert "differing answers" in next(
            event["reason"] for event in status["events"] if event["action"].startswith("roll back")
        )
