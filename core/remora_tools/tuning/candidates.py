"""Candidates for the settings of models, and how far they are from the present ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from remora_tools.tuning import ModelSpace, Plan, Runtime, Settings

_MOST_CONNECTIONS = 1024
_DELAYS = (0.0, 0.5, 1.0)
"""Queue delays as parts of the duration of a full batch."""


def batch_sizes(limit: int) -> tuple[int, ...]:
    """Return 1 and the powers of 2 up to the limit, and the limit."""
    return tuple(sorted({1 << power for power in range(limit.bit_length()) if 1 << power <= limit} | {limit}))


def slots_of(present: Settings, cores: int, threads: bool, providers: Sequence[str]) -> tuple[tuple[int, Runtime], ...]:
    """Return the (instances, runtime) pairs to try, the present one first.

    Args:
        present: the present settings.
        cores: processors of the machine.
        threads: True if the threads of an operator can be set.
        providers: accelerators to try beside the present one.
    """
    counts = sorted({1, present.instances, *(1 << power for power in range(cores.bit_length()))})
    found = [(present.instances, present.runtime)]
    for instances in counts:
        sizes: Iterable[int] = (0,)
        if threads:
            sizes = sorted({max(cores // instances, 1), present.runtime.threads, 1, max(cores // 2, 1), cores} - {0})
        for size in sizes:
            if instances * size > 2 * cores and (instances, size) != (present.instances, present.runtime.threads):
                continue
            found += [
                (instances, Runtime(size, name)) for name in dict.fromkeys((present.runtime.provider, *providers))
            ]
    return tuple(dict.fromkeys(found))


def settings_of(space: ModelSpace, cost: Callable[[Runtime, int], float], limit_ns: int) -> list[Settings]:
    """Return the candidates of a model, the present settings first.

    Args:
        space: batch sizes, instances and runtimes.
        cost: duration of a batch in nanoseconds by runtime and rows.
        limit_ns: batches and delays that take longer are left out.
    """
    found = [space.present]
    for instances, runtime in space.slots:
        if not space.batches:
            found.append(space.present._replace(instances=instances, runtime=runtime))
        for batch in space.batches:
            full_ns = cost(runtime, batch)
            if batch > 1 and full_ns > limit_ns:
                continue
            for part in _DELAYS if batch > 1 else (0.0,):
                delay_us = rounded_us(part * full_ns)
                if delay_us * 1000 < limit_ns:
                    found.append(
                        with_batch(space.present, batch, delay_us)._replace(instances=instances, runtime=runtime)
                    )
    return list(dict.fromkeys(found))


def with_batch(present: Settings, batch: int, delay_us: int = 0) -> Settings:
    """Return settings that form batches of ``batch`` rows.

    max_batch_size is never below the present one, because clients may send requests of that size.
    """
    limit = max(batch, present.limit)
    if batch == 1:
        return present._replace(dynamic=False, preferred=(), delay_us=0)
    preferred = (batch,) if batch < limit else ()
    return present._replace(limit=limit, dynamic=True, preferred=preferred, delay_us=delay_us)


def rounded_us(ns: float) -> int:
    """Return a duration in microseconds with a first digit of 1, 2 or 5 and zeros."""
    us = ns / 1000
    if us < 1:
        return 0
    unit = 10 ** math.floor(math.log10(us))
    return int(unit * min((1, 2, 5, 10), key=lambda digit: abs(digit - us / unit)))


def ladder(most: float) -> list[int]:
    """Return the numbers of connections to try: powers of 2 up to ``most``."""
    top = int(min(max(most, 1), _MOST_CONNECTIONS))
    return [1 << power for power in range(top.bit_length())]


def changed(plan: Plan, present: Plan) -> list[tuple[int, str]]:
    """Return the (model, field) pairs in which a plan differs from the present one."""
    found = []
    for model, (new, old) in enumerate(zip(plan, present, strict=True)):
        if (new.limit, new.dynamic, new.preferred) != (old.limit, old.dynamic, old.preferred):
            found.append((model, "batch"))
        found += [(model, name) for name in ("delay_us", "instances") if getattr(new, name) != getattr(old, name)]
        if new.runtime != old.runtime:
            found.append((model, "runtime"))
    return found


def reverted(plan: Plan, present: Plan, model: int, field: str) -> Plan:
    """Return the plan with one field of one model as it is at present."""
    old = present[model]
    fields = ("limit", "dynamic", "preferred") if field == "batch" else (field,)
    new = plan[model]._replace(**{name: getattr(old, name) for name in fields})
    return (*plan[:model], new, *plan[model + 1 :])


def complexity(plan: Plan, present: Plan) -> tuple[int, int, int, int]:
    """Return a key that is smaller for simpler plans: fewer changes, instances, delays and rows."""
    return (
        len(changed(plan, present)),
        sum(each.instances for each in plan),
        sum(each.delay_us for each in plan),
        sum(each.batch for each in plan),
    )


def is_neighbour(plan: Plan, other: Plan) -> bool:
    """Return True if one model differs by one step: batch size, delay, instances or threads.

    Instances and threads may change together, because threads usually share the processors.
    """
    several = [(new, old) for new, old in zip(plan, other, strict=True) if new != old]
    if len(several) != 1:
        return False
    ((new, old),) = several
    fields = {field for _, field in changed((new,), (old,))}
    if "delay_us" in fields and (new.delay_us > 0) > (old.delay_us > 0) and len(fields) > 1:
        return False
    steps = abs(math.log2(new.batch / old.batch)), abs(math.log2(new.instances / old.instances))
    if fields <= {"batch", "delay_us"}:
        return steps[0] <= 1
    if new.runtime.provider != old.runtime.provider:
        return fields == {"runtime"}
    return "batch" not in fields and steps[1] <= 1
