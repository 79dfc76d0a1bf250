"""What several repositories offer together: one key for each model, none for what is in two places."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from remora.errors import NotFoundError, UnavailableError
from remora.repository import ModelFolder
from remora.repository import catalog as offers_module
from remora.repository.catalog import Catalog, name_of
from remora.repository.local import LocalRepository
from support.engine.fakes import FakeClock, write_model
from support.engine.interleaving import Interleaving


def offers_of(*places: Path, namespacing: bool = False) -> Catalog:
    offers = Catalog([LocalRepository(place) for place in places], namespacing=namespacing)
    offers.scan()
    return offers


def test_models_of_all_places_are_offered_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    write_model(tmp_path / "two", "b")
    offers = offers_of(tmp_path / "one", tmp_path / "two")
    assert offers.models() == ["a", "b"]
    assert offers.only("b").folder.path == tmp_path / "two" / "b"
    assert "1/fake.bin" in offers.only("b").fingerprint()


def test_what_two_places_have_is_offered_by_none(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "m")
    write_model(tmp_path / "two", "m")
    offers = offers_of(tmp_path / "one", tmp_path / "two")
    assert offers.models() == []
    assert offers.all_keys() == ["m"]
    assert offers.is_ambiguous("m")
    with pytest.raises(NotFoundError, match=r"more than one place .* --model-namespacing"):
        offers.only("m")


def test_with_namespaces_both_are_offered_and_a_step_means_its_neighbour(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_model(one, "m")
    write_model(two, "m")
    write_model(two, "single")
    offers = offers_of(one, two, namespacing=True)
    assert offers.keys_of("m") == [f"{one}::m", f"{two}::m"]
    assert [name_of(key) for key in offers.models()] == ["m", "m", "single"]
    assert offers.near("m", f"{two}::ensemble") == f"{two}::m"
    assert offers.near("single", f"{one}::ensemble") == f"{two}::single"
    assert offers.near("m", "elsewhere::ensemble") == "elsewhere::m", "the namespace is ambiguous"


def test_a_look_at_one_name_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    offers = offers_of(tmp_path)
    write_model(tmp_path, "b")
    write_model(tmp_path, "c")
    offers.scan("b")
    assert offers.models() == ["a", "b"]


@pytest.mark.parametrize("seed", range(10))
def test_looks_at_two_names_at_a_time_find_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    stage = Interleaving(seed, FakeClock())
    monkeypatch.setattr(offers_module, "threading", stage.threading)

    class Slow(str):
        """A name whose comparison lets other threads have their turn."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            stage.pause()
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            return not self == other

    class SlowRepository(LocalRepository):
        def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
            return {Slow(key): folders for key, folders in super().models(name).items()}

    write_model(tmp_path, "x")
    offers = Catalog([SlowRepository(tmp_path)])
    offers.scan()
    for name in ("a", "b"):
        write_model(tmp_path, name)
        stage.start(offers.scan, name)
    stage.run()
    assert offers.models() == ["a", "b", "x"]


def test_a_place_that_cannot_be_looked_at_keeps_what_it_showed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Flaky(LocalRepository):
        down = False

        def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
            if self.down:
                raise UnavailableError("the network is down")
            return super().models(name)

    write_model(tmp_path, "a")
    repository = Flaky(tmp_path)
    offers = Catalog([repository])
    offers.scan()
    repository.down = True
    with caplog.at_level(logging.WARNING):
        offers.scan(forgiving=True)
    assert offers.models() == ["a"]
    assert "the network is down" in caplog.text
    with pytest.raises(UnavailableError):
        offers.scan()


class Scanning(LocalRepository):
    """Repository during whose next scan, after it has read the directory, something happens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.meanwhile: Callable[[], None] = lambda: None

    def models(self, name: str = "") -> dict[str, list[ModelFolder]]:
        found = super().models(name)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return found


@pytest.mark.parametrize("name", ["", "m"])
def test_an_older_scan_does_not_hide_a_model_that_was_found_meanwhile(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "a")
    place = Scanning(tmp_path)
    offers = Catalog([place])

    def find_another() -> None:
        write_model(tmp_path, "m")
        offers.scan("m")

    place.meanwhile = find_another
    offers.scan(name)
    assert offers.keys_of("m") == ["m"]


@pytest.mark.parametrize("name", ["", "a"])
def test_an_older_scan_does_not_bring_back_what_a_scan_of_all_has_missed(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "a")
    place = Scanning(tmp_path)
    offers = Catalog([place])

    def remove() -> None:
        shutil.rmtree(tmp_path / "a")
        offers.scan()

    place.meanwhile = remove
    offers.scan(name)
    assert offers.all_keys() == []
    write_model(tmp_path, "a")
    offers.scan(name)
    assert offers.all_keys() == ["a"]
