"""Search for the fastest batch size, against models with known batch times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora_tools.deciders.batch_size import BatchSearch

PLENTY_NS = 10**15


def search(limit: int, fixed_ns: int, row_ns: int, budget_ns: int = PLENTY_NS) -> tuple[BatchSearch, list[int]]:
    """Measure a model whose batch takes ``fixed_ns + row_ns * rows``."""
    found = BatchSearch(limit, budget_ns)
    tried = []
    while (size := found.next_size()) is not None:
        tried.append(size)
        found.record(size, fixed_ns + row_ns * size)
    return found, tried


@given(limit=st.integers(1, 5000), fixed_ns=st.integers(1, 10**9), row_ns=st.integers(1, 10**7))
def test_no_measured_size_is_much_faster_and_none_is_beyond_the_limit(limit: int, fixed_ns: int, row_ns: int) -> None:
    found, tried = search(limit, fixed_ns, row_ns)
    rates = {size: size / (fixed_ns + row_ns * size) for size in tried}
    assert max(tried) == limit, "throughput of this model grows with every size"
    assert rates[found.best] >= 0.95 * max(rates.values())
    assert not [size for size in tried if size < found.best and rates[size] >= 0.95 * max(rates.values())]


def test_the_search_ends_where_throughput_falls() -> None:
    found = BatchSearch(4096, PLENTY_NS)
    while (size := found.next_size()) is not None:
        found.record(size, 1000 if size <= 64 else size * size)  # such as beyond a processor's cache
    assert found.best == 64
    assert max(found.rows_per_s) == 256


def test_a_slow_first_batch_does_not_decide() -> None:
    found = BatchSearch(4, PLENTY_NS)
    times = {1: [10**9, 100, 100], 4: [10**9, 110, 110]}
    while (size := found.next_size()) is not None:
        found.record(size, times[size].pop(0))
    assert found.best == 4


@given(budget_ns=st.integers(1, 10**8), row_ns=st.integers(1, 10**6))
def test_the_search_overruns_its_budget_by_at_most_one_batch(budget_ns: int, row_ns: int) -> None:
    _, tried = search(4096, 0, row_ns, budget_ns)
    spent_ns = sum(row_ns * size for size in tried[:-1])
    assert spent_ns < budget_ns or len(tried) == 1


def test_a_model_without_batches_gets_one_row() -> None:
    found, tried = search(1, 100, 100)
    assert set(tried) == {1}
    assert found.best == 1
    assert BatchSearch(8, PLENTY_NS).best == 1, "before any measurement"
