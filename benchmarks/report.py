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
# Bytes per entry that others put on the wire, from their sources: an int64 index and a float32; u16 and bf16;
# 12-bit indices with quantised values.
OTHERS: Final = {"DeMo": 12.0, "Psyche": 4.0, "templar": 2.5}
MB: Final = 1e6


def round_table(scenarios: Sequence[Scenario], aggregates: dict[int, Aggregate]) -> list[str]:
    """Times, ratio and throughput, and where the time goes."""
    lines = [
        "A round, from the first byte up to the last byte down; medians, ms (bare grpc.aio streams in brackets)",
        f"{'link':<10}{'workers':>8}{'MB up':>8}{'MB down':>9}{'ours':>8}{'bare':>8}{'ratio':>8}{'goal':>6}"
        f"{'MB/s':>7}   {'upload':<14}{'between':<14}{'download':<14}{'other load':>10}",
    ]
    for each in scenarios:
        ours, bare = median(each.ours), median(each.bare)
        moved = each.up_bytes + each.down_bytes
        legs = [
            f"{mine * 1e3:.0f} ({theirs * 1e3:.0f})"
            for mine, theirs in (
                (ours.upload, bare.upload),
                (ours.between, bare.between),
                (ours.download, bare.download),
            )
        ]
        load = f"{each.other_cores:.1f} cores" if each.other_cores is not None else "unknown"
        lines.append(
            f"{each.link:<10}{each.workers:>8}{each.up_bytes / MB:>8.1f}{each.down_bytes / MB:>9.1f}"
            f"{ours.total * 1e3:>8.0f}{bare.total * 1e3:>8.0f}{each.ratio:>8.2f}{GOAL.get(each.link, '-'):>6}"
            f"{moved / ours.total / MB:>7.0f}   " + "".join(f"{leg:<14}" for leg in legs) + f"{load:>10}"
        )
    lines += ["", "What the aggregator does in a round: CPU ms of one thread, alone (wall ms, as its /metrics say)"]
    lines.append(
        f"{'workers':>8}{'unpack+check':>14}{'average':>9}{'pack':>7}{'sum':>7}{'all of it':>11}   averaging phase"
    )
    for workers, made in aggregates.items():
        mine = [each for each in scenarios if each.workers == workers]
        stages = [workers * made.check_s, made.average_s, made.pack_s]
        used = min((each.aggregator_cpu_s for each in mine), default=0.0)
        walls = ", ".join(
            f"{each.link} {sorted(each.averaging_s)[len(each.averaging_s) // 2] * 1e3:.0f}" for each in mine
        )
        check, average, pack, all_three = (f"{seconds * 1e3:.0f}" for seconds in (*stages, sum(stages)))
        lines.append(f"{workers:>8}{check:>14}{average:>9}{pack:>7}{all_three:>7}{used * 1e3:>11.0f}   {walls}")
    return lines


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
    rounds = [{**dataclasses.asdict(each), "ratio": each.ratio, "memory_goal": memory_goal(each)} for each in scenarios]
    sizes = [dataclasses.asdict(each) for each in contribution]
    return {"machine": machine.description(), "rounds": rounds, "contribution": sizes, "aggregates": made}


def _size(each: Sizes) -> str:
    return f"{each.form:<8}{each.plain:>7.2f}{each.packed:>8.2f}"
