"""How long a whole round takes, against bare gRPC streams that move the same bytes: python -m benchmarks.round

The aggregator is the real one, in a process of its own; the workers are processes that send prepared messages.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from typing import Final

import torch

from benchmarks import gradients, links, machine, measure, prepare, report

LINKS: Final = "loopback,lan"


def main() -> None:
    """Measures, and prints the tables."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is put away
    torch.set_num_threads(1)
    start = time.monotonic()
    _say(f"making pseudo-gradients of {max(options.workers)} workers, {options.parameters / 1e6:g} M parameters")
    everything = prepare.contributions(options.parameters, max(options.workers))
    contribution = prepare.contribution_sizes(everything)
    aggregates, scenarios = {}, []
    for workers in options.workers:
        _say(f"averaging {workers} contributions here, for comparison")
        aggregates[workers] = prepare.aggregate(everything.of(workers))
    for link in options.links:
        if reason := links.unavailable(link):
            _say(f"{link} is left out: {reason}")
            continue
        for workers in options.workers:
            scenario = measure.run(link, everything.of(workers), aggregates[workers], options.repeats, _say)
            _say(f"{link}, {workers} workers: ratio {scenario.ratio:.2f}")
            scenarios.append(scenario)
    _say(f"took {time.monotonic() - start:.0f} s")
    if options.json:
        print(json.dumps(report.as_json(scenarios, contribution, aggregates), indent=2))
        return
    print()
    print(_title(everything))
    for lines in (
        report.round_table(scenarios),
        report.work_table(scenarios, aggregates),
        report.size_table(contribution, aggregates),
        report.memory_table(scenarios),
    ):
        print("\n" + "\n".join(lines))


def _title(made: prepare.Contributions) -> str:
    scheme = gradients.SCHEME
    count = f"{made.manifest.parameters / 1e6:.1f} M parameters in {len(made.manifest)} tensors"
    kept = f"top {scheme.k} of {scheme.chunk} in {scheme.layout}, {scheme.values}, mean over {scheme.normalization}"
    words = ", ".join(f"{name}: {profile.words}" for name, profile in links.PROFILES.items())
    return f"{count}; {kept}\n{machine.description()}, PyTorch {torch.__version__}; {words}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.round", description=__doc__)
    parser.add_argument("--workers", type=_numbers, default=[2, 8], help="how many, comma-separated; default 2,8")
    parser.add_argument("--parameters", type=int, default=32_000_000, help="of the model; default 32000000")
    parser.add_argument("--links", type=_words, default=_words(LINKS), help=f"comma-separated; default {LINKS}")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of each kind; default 9")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    if options.parameters < 1_000_000:
        parser.error("--parameters: 1000000 is the least")
    if unknown := set(options.links) - {"loopback", *links.PROFILES}:
        parser.error(f"--links: there is no {', '.join(sorted(unknown))}; known are {LINKS}")
    if options.repeats < 1:
        parser.error("--repeats: 1 is the least")
    return options


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 worker is the least")
    return numbers


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        sys.exit(f"the benchmark failed: {error}")
