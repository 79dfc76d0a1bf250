"""What sets requests apart, what the local cache keeps, and what it costs [K01, K02, P07]."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from remora.cache import ENTRY_BYTES, KEY_BYTES, TENSOR_BYTES, CacheStats, LocalCache, cost_of, request_key
from remora.messages import Array, InferForm, Request, Response, Tensor
from remora.options import EngineOptions, cache_settings, cache_size
from support.engine.fakes import FakeClock

KEYS = st.integers(0, 9).map(lambda number: bytes([number]) * KEY_BYTES)


def asked(requested: tuple[str, ...] = ("OUT",), **inputs: Array) -> Request:
    return Request(InferForm(()), inputs, requested, 1, None)


def key(request: Request, scope: bytes = b"m") -> bytes:
    made = request_key(scope, request)
    assert made is not None
    return made


def texts(*values: bytes) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def answer(*values: int, size: int = 0) -> Response:
    data = np.zeros(size, np.uint8) if size else np.array(values, np.int32)
    return Response([Tensor("OUT", "UINT8" if size else "INT32", data)])


def cache(size: int = 1 << 20) -> LocalCache:
    return LocalCache(size, FakeClock().monotonic_ns)


# -- the key ----------------------------------------------------------------------------------------------------------


def test_the_same_request_has_the_same_key_whatever_it_says_besides() -> None:
    one = Request(InferForm((), id="a", parameters={"p": 1}), {"IN": np.arange(4)}, ("OUT",), 1, None)
    other = Request(InferForm((), id="b", priority=2), {"IN": np.arange(4)}, ("OUT",), 1, None)
    assert key(one) == key(other)
    assert len(key(one)) == KEY_BYTES


def test_inputs_are_known_by_name_in_any_order() -> None:
    one, two = np.zeros(2), np.ones(2)
    assert key(asked(A=one, B=two)) == key(asked(B=two, A=one))
    assert key(asked(A=one, B=two)) != key(asked(A=two, B=one))


def test_whatever_may_change_the_answer_changes_the_key() -> None:
    base = np.zeros((2, 1), np.int32)
    keys = [
        key(asked(IN=base)),
        key(asked(IN=base), b"other model"),
        key(asked(IN=base.reshape(1, 2))),
        key(asked(IN=base.view(np.float32))),
        key(asked(IN=base.view(np.int16))),
        key(asked(IN=base + 1)),
        key(asked(OTHER=base)),
        key(asked(IN=base, OTHER=base)),
        key(asked(("OUT", "MORE"), IN=base)),
        key(asked(("MORE", "OUT"), IN=base)),
        key(asked(IN=np.zeros((0, 2), np.int32))),
        key(asked(IN=np.zeros((2, 0), np.int32))),
        key(asked()),
    ]
    assert len(set(keys)) == len(keys)


def test_a_view_with_gaps_has_the_key_of_its_values() -> None:
    wide = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert key(asked(IN=wide[:, ::2])) == key(asked(IN=wide[:, ::2].copy()))
    assert key(asked(IN=wide.T)) == key(asked(IN=np.ascontiguousarray(wide.T)))


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_texts_share_a_key_only_when_each_element_is_equal(one: list[bytes], other: list[bytes]) -> None:
    assert (key(asked(IN=texts(*one))) == key(asked(IN=texts(*other)))) == (one == other)


@given(*[arrays_of.arrays(np.uint8, arrays_of.array_shapes(min_side=0, max_side=3, max_dims=2))] * 2)
def test_arrays_share_a_key_only_when_shape_and_values_are_equal(one: Array, other: Array) -> None:
    same = one.shape == other.shape and bool((one == other).all())
    assert (key(asked(IN=one)) == key(asked(IN=other))) == same


def test_elements_that_share_their_bytes_differently_share_no_key() -> None:
    assert len({key(asked(IN=texts(*values))) for values in ((b"ab", b""), (b"a", b"b"), (b"", b"ab"))}) == 3


def test_a_request_with_values_that_are_not_bytes_has_no_key() -> None:
    assert request_key(b"m", asked(IN=np.array([object()], object))) is None


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_what_was_kept_is_found_and_counted() -> None:
    kept = cache()
    assert kept.lookup(b"k") is None
    kept.insert(b"k", Response([Tensor("OUT", "INT32", np.array([1, 2], np.int32))], {"p": "v"}))
    found = kept.lookup(b"k")
    assert found is not None
    assert (found.outputs[0].name, found.outputs[0].datatype) == ("OUT", "INT32")
    assert found.outputs[0].data.tolist() == [1, 2]
    assert found.parameters == {"p": "v"}
    stats = kept.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.lookups, stats.evictions) == (1, 1, 1, 2, 0)


@pytest.mark.parametrize("data", [np.array([1, 2], np.int32), texts(b"a", b"b")])
def test_kept_values_do_not_change_with_their_sources(data: Array) -> None:
    kept = cache()
    before = data.tolist()
    kept.insert(b"k", Response([Tensor("OUT", "X", data)], {"p": 1}))
    data[0] = data[1]
    found = kept.lookup(b"k")
    assert found is not None
    found.outputs.clear()
    found.parameters["p"] = 2
    again = kept.lookup(b"k")
    assert again is not None
    assert again.outputs[0].data.tolist() == before
    assert again.parameters == {"p": 1}
    with pytest.raises(ValueError, match="read-only"):
        again.outputs[0].data[0] = data[1]
    with pytest.raises(ValueError, match="WRITEABLE"):
        again.outputs[0].data.flags.writeable = True


def test_the_answer_not_used_for_the_longest_time_goes_first() -> None:
    cost = cost_of(answer(size=100))
    assert cost is not None
    kept = cache(2 * cost)
    for name in (b"a", b"b"):
        kept.insert(name, answer(size=100))
    assert kept.lookup(b"a") is not None
    kept.insert(b"c", answer(size=100))
    assert kept.lookup(b"b") is None
    assert kept.lookup(b"a") is not None
    assert kept.lookup(b"c") is not None
    assert kept.stats().evictions == 1
    assert kept.stats().util == 1.0


def test_an_answer_larger_than_the_cache_is_not_kept_and_drives_nothing_out() -> None:
    kept = cache(2000)
    kept.insert(b"small", answer(1))
    kept.insert(b"large", answer(size=2000))
    assert kept.lookup(b"large") is None
    assert kept.lookup(b"small") is not None
    assert kept.stats().evictions == 0


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    kept = cache(0)
    kept.insert(b"k", answer(1))
    assert kept.lookup(b"k") is None
    assert kept.stats() == CacheStats(0.0, 0, 0, 1, 0, 0, 0)


def test_texts_cost_what_their_elements_take() -> None:
    short = cost_of(Response([Tensor("OUT", "BYTES", texts(b""))]))
    long = cost_of(Response([Tensor("OUT", "BYTES", texts(b"x" * 5000))]))
    assert short is not None
    assert long == short + 5000
    assert short > ENTRY_BYTES + TENSOR_BYTES


def test_an_answer_that_holds_objects_is_not_kept() -> None:
    kept = cache()
    kept.insert(b"k", Response([Tensor("OUT", "BYTES", np.array([object()], object))]))
    assert kept.lookup(b"k") is None


def test_keeping_an_answer_again_changes_nothing() -> None:
    kept = cache()
    kept.insert(b"k", answer(1))
    before = kept.stats()
    kept.insert(b"k", answer(2))
    found = kept.lookup(b"k")
    assert found is not None
    assert found.outputs[0].data.tolist() == [1]
    assert kept.stats().util == before.util


class Interrupted(list[Tensor]):
    """Outputs that are looked at twice, counted and copied; before the second time ``act`` is called."""

    looks = 0

    def __init__(self, outputs: list[Tensor], act: Callable[[], None]) -> None:
        super().__init__(outputs)
        self.act = act

    def __iter__(self) -> Iterator[Tensor]:
        self.looks += 1
        if self.looks == 2:
            self.act()
        return super().__iter__()


def test_two_misses_of_the_same_request_keep_one_answer_and_pay_for_one() -> None:
    kept = cache(10_000)
    slower = answer(size=100)
    slower.outputs = Interrupted(slower.outputs, lambda: kept.insert(b"k", answer(size=200)))
    kept.insert(b"k", slower)
    found = kept.lookup(b"k")
    assert found is not None
    assert found.outputs[0].data.size == 200
    assert kept.stats().util * 10_000 == pytest.approx(cost_of(found))


def test_room_that_an_answer_being_copied_has_taken_is_not_given_away() -> None:
    kept = cache(5000)
    slower = answer(size=3000)
    slower.outputs = Interrupted(slower.outputs, lambda: kept.insert(b"other", answer(size=3000)))
    kept.insert(b"k", slower)
    assert kept.lookup(b"other") is None
    assert kept.lookup(b"k") is not None


def test_an_answer_that_memory_is_too_short_for_gives_its_room_back() -> None:
    def fail() -> None:
        raise MemoryError

    kept = cache()
    unlucky = answer(1)
    unlucky.outputs = Interrupted(unlucky.outputs, fail)
    kept.insert(b"k", unlucky)
    assert kept.lookup(b"k") is None
    assert kept.stats().util == 0


@given(st.lists(st.tuples(KEYS, st.integers(1, 2000)), max_size=60), st.integers(0, 8000))
def test_the_cache_holds_no_more_than_its_size_and_only_what_was_put_in(
    inserts: list[tuple[bytes, int]], size: int
) -> None:
    kept = cache(size)
    first: dict[bytes, set[int]] = {}
    for name, length in inserts:
        kept.insert(name, answer(size=length))
        first.setdefault(name, set()).add(length)
        held = 0
        for known in first:
            found = kept.lookup(known)
            if found is not None:
                assert found.outputs[0].data.size in first[known]
                held += cost_of(found) or 0
        assert held <= size
        assert kept.stats().util * size == pytest.approx(held)


def test_many_threads_leave_the_count_of_bytes_right() -> None:
    kept = cache(20_000)

    def work(seed: int) -> None:
        for number in range(300):
            name = bytes([(seed * 7 + number) % 11])
            if kept.lookup(name) is None:
                kept.insert(name, answer(size=1 + (seed + number) % 3000))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [kept.lookup(bytes([name])) for name in range(11)]
    assert kept.stats().util * 20_000 == pytest.approx(sum(cost_of(found) or 0 for found in held if found))


def test_every_load_of_a_model_has_its_own_scope() -> None:
    kept = cache()
    scopes = [kept.scope("m", 1), kept.scope("m", 1), kept.scope("m", 2), kept.scope("n", 1)]
    assert len(set(scopes)) == 4


def test_every_change_of_the_models_begins_an_epoch() -> None:
    kept = cache()
    epochs = []
    for _ in range(3):
        epochs.append(kept.epoch)
        kept.models_changed()
    assert all(before < after for before, after in pairwise(epochs))


# -- the options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (EngineOptions(), None),
        (EngineOptions(cache_config=("local,size=4096",)), ("local", {"size": "4096"})),
        (EngineOptions(response_cache_byte_size=4096), ("local", {"size": "4096"})),
        (
            EngineOptions(cache_config=("redis,host=h", "redis,port=1", "redis,password=a=b,c")),
            ("redis", {"host": "h", "port": "1", "password": "a=b,c"}),
        ),
    ],
)
def test_the_flags_say_which_cache_and_what_of_it(
    options: EngineOptions, settings: tuple[str, dict[str, str]] | None
) -> None:
    assert cache_settings(options) == settings


def test_the_local_cache_has_a_size() -> None:
    assert cache_size({"size": "4096"}) == 4096
    assert cache_size({"size": "0"}) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (EngineOptions(cache_config=("local",)), "--cache-config=local,...: expected CACHE,KEY=VALUE"),
        (EngineOptions(cache_config=("local,size",)), "expected CACHE,KEY=VALUE"),
        (EngineOptions(cache_config=(",size=1",)), "expected CACHE,KEY=VALUE"),
        (EngineOptions(cache_config=("local,size=1", "other,a=b")), "there is no cache 'other'; there is local, redis"),
        (
            EngineOptions(cache_config=("local,size=1", "redis,host=h")),
            "found multiple cache configurations",
        ),
        (EngineOptions(cache_config=("local,length=1",)), "no setting 'length'; it has size"),
        (EngineOptions(cache_config=("local,size=1MB",)), "size=1MB: expected a number of bytes"),
        (EngineOptions(cache_config=("local,size=-1",)), "size=-1: expected a number of bytes"),
        (EngineOptions(response_cache_byte_size=-1), "size=-1: expected a number of bytes"),
        (
            EngineOptions(cache_config=("local,size=1",), response_cache_byte_size=1),
            "Incompatible flags",
        ),
    ],
)
def test_a_flag_that_cannot_be_obeyed_is_refused_with_the_reason(options: EngineOptions, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        read(options)


def read(options: EngineOptions) -> object:
    """The size of the cache that the options ask for."""
    _, given = cache_settings(options) or ("", {})
    return cache_size(given)


def test_a_refusal_never_repeats_a_password() -> None:
    for entry in ("redis,password", "rediss,password=s3cret"):
        options = EngineOptions(cache_config=(entry, "redis,host=h", "redis,port=1"))
        with pytest.raises(ValueError, match="cache-config") as caught:
            read(options)
        assert "s3cret" not in str(caught.value)
