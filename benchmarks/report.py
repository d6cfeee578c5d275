"""The results in words, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from benchmarks import machine
from benchmarks.measure import Scenario, median
from benchmarks.prepare import Aggregate, Sizes

GOAL: Final = {"lan": 1.3}  # of the ratio; on loopback it is only told
MEMORY_BASE: Final = 300 * 2**20
MEMORY_FACTOR: Final = 3
# Bytes per entry in the formats of others.
OTHERS: Final = {"DeMo": 12.0, "Psyche": 4.0, "templar": 2.5}
MB: Final = 1e6


def round_table(scenarios: Sequence[Scenario]) -> list[str]:
    """Times, ratio and throughput, leg by leg."""
    lines = [
        "A round, from the first byte up to the last byte down, ms; in brackets the same through bare grpc.aio streams",
        f"{'link':<10}{'workers':>7}{'MB up':>7}{'MB down':>9}{'ours':>7}{'bare':>6}{'ratio':>7}{'fastest':>9}"
        f"{'goal':>6}{'MB/s':>6}   {'upload':<12}{'between':<11}{'download':<12}others",
    ]
    for each in scenarios:
        ours, bare = median(each.ours), median(each.bare)
        legs = [
            f"{getattr(ours, leg) * 1e3:.0f} ({getattr(bare, leg) * 1e3:.0f})"
            for leg in ("upload", "between", "download")
        ]
        load = f"{each.other_cores:.1f} cores" if each.other_cores is not None else "unknown"
        lines.append(
            f"{each.link:<10}{each.workers:>7}{each.up_bytes / MB:>7.1f}{each.down_bytes / MB:>9.1f}"
            f"{ours.total * 1e3:>7.0f}{bare.total * 1e3:>6.0f}{each.ratio:>7.2f}{each.best_ratio:>9.2f}"
            f"{GOAL.get(each.link, '-'):>6}{(each.up_bytes + each.down_bytes) / ours.total / MB:>6.0f}   "
            f"{legs[0]:<12}{legs[1]:<11}{legs[2]:<12}{load}"
        )
    return [
        *lines,
        "Medians; fastest: the ratio of the fastest of each. upload: to the last answer; between: to the first byte",
        "of an aggregate; others: the cores that other programs kept busy meanwhile.",
    ]


def work_table(scenarios: Sequence[Scenario], aggregates: dict[int, Aggregate]) -> list[str]:
    """What the aggregator's time goes into."""
    lines = [
        "What the server does in a round, ms",
        f"{'workers':>7}{'unpack+check':>14}{'average':>9}{'pack':>6}{'sum':>6}   aggregator, bare, averaging phase",
    ]
    for workers, made in aggregates.items():
        stages = (workers * made.check_s, made.average_s, made.pack_s)
        check, average, pack, all_three = (f"{seconds * 1e3:.0f}" for seconds in (*stages, sum(stages)))
        whole = "; ".join(
            f"{each.link} {each.aggregator_cpu_s * 1e3:.0f}, {each.bare_cpu_s * 1e3:.0f}, "
            f"{sorted(each.averaging_s)[len(each.averaging_s) // 2] * 1e3:.0f}"
            for each in scenarios
            if each.workers == workers
        )
        lines.append(f"{workers:>7}{check:>14}{average:>9}{pack:>6}{all_three:>6}   {whole}")
    return [
        *lines,
        "The stages and their sum: CPU time of one thread, alone, of the same code. Then the whole CPU time of the",
        "aggregator and of the bare server, and the wall time of averaging, packing and storing, as /metrics says.",
    ]


def size_table(contribution: Sequence[Sizes], aggregates: dict[int, Aggregate]) -> list[str]:
    """Bytes per entry by form."""
    others = ", ".join(f"{name} {size:g}" for name, size in OTHERS.items())
    lines = [f"Bytes per entry, index and value; elsewhere: {others}", f"{'':<32}{'form':<8}{'plain':>7}{'packed':>8}"]
    lines += [f"{'contribution':<32}{_size(each)}" for each in contribution]
    for workers, made in aggregates.items():
        title = f"aggregate of {workers}, {made.union:.1f} x entries"
        lines += [f"{title:<32}{_size(each)}" for each in made.sizes]
    return lines


def memory_table(scenarios: Sequence[Scenario]) -> list[str]:
    """Peak resident memory of the aggregator against the goal."""
    lines = ["Resident memory of the aggregator, MiB: at most, above what it had when it began to listen"]
    for each in scenarios:
        if each.base_memory is None or each.peak_memory is None:
            return [*lines, "  can't be told on this system"]
        grown, goal = (each.peak_memory - each.base_memory) / 2**20, memory_goal(each) / 2**20
        base = each.base_memory / 2**20
        lines.append(f"  {each.link}, {each.workers} workers: {grown:.0f} of {goal:.0f} allowed, above {base:.0f}")
    return lines


def memory_goal(scenario: Scenario) -> int:
    """300 MiB + 3 x the round's compressed bytes: all contributions and one aggregate."""
    return MEMORY_BASE + MEMORY_FACTOR * (scenario.up_bytes + scenario.down_bytes // scenario.workers)


def as_json(
    scenarios: Sequence[Scenario], contribution: Sequence[Sizes], aggregates: dict[int, Aggregate]
) -> dict[str, Any]:
    """All of it; times in seconds, sizes in bytes."""
    made = {
        workers: {
            "union": each.union,
            "check_s": each.check_s,
            "average_s": each.average_s,
            "pack_s": each.pack_s,
            "sizes": [dataclasses.asdict(size) for size in each.sizes],
        }
        for workers, each in aggregates.items()
    }
    rounds = [
        {
            **dataclasses.asdict(each),
            "ratio": each.ratio,
            "best_ratio": each.best_ratio,
            "memory_goal": memory_goal(each),
        }
        for each in scenarios
    ]
    sizes = [dataclasses.asdict(each) for each in contribution]
    return {"machine": machine.description(), "rounds": rounds, "contribution": sizes, "aggregates": made}


def _size(each: Sizes) -> str:
    return f"{each.form:<8}{each.plain:>7.2f}{each.packed:>8.2f}"
