"""Workers come and go, are killed and fall asleep: rounds keep closing, and who is left has the same weights."""

from __future__ import annotations

import contextlib
import random
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from faults.ledgers import assert_nothing_lost_nothing_twice
from processes import Process, aggregator, tiny_config, worker

ROUNDS = 500
EVENTS = 20
ALIVE = (3, 6)
LEASE_S = 2.0


@pytest.mark.timeout(400)
def test_twenty_workers_come_go_die_and_sleep_and_nothing_is_lost(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rounds=ROUNDS, min_workers=2, deadline_s=4.0, lease_s=LEASE_S)
    chance, data = random.Random("churn"), tmp_path / "data"
    alive: dict[str, Process] = {}
    asleep: dict[str, Process] = {}
    happened: list[str] = []
    with contextlib.ExitStack() as stack, aggregator(config, "--data", str(data)) as (server, address):

        def start() -> None:
            name = f"w{len(happened):02}-{len(alive)}"
            alive[name] = stack.enter_context(worker(address, name, "--checkpoint", str(tmp_path)))

        for _ in range(ALIVE[0]):
            start()
        while len(happened) < EVENTS:
            for _ in range(4):
                server.wait_for("counted:")
            if len(alive) < ALIVE[1] and (len(alive) <= ALIVE[0] or chance.random() < 0.4):
                start()
                happened.append("start")
            elif asleep and chance.random() < 0.5:
                name, sleeper = asleep.popitem()
                sleeper.signal(signal.SIGCONT)
                alive[name] = sleeper
                happened.append(f"wake {name}")
            else:
                name = chance.choice(sorted(alive))
                gone = alive.pop(name)
                if chance.random() < 0.5:
                    gone.signal(signal.SIGKILL)
                    happened.append(f"kill {name}")
                else:
                    gone.signal(signal.SIGSTOP)
                    asleep[name] = gone
                    happened.append(f"sleep {name}")
        for name, sleeper in asleep.items():
            sleeper.signal(signal.SIGCONT)
            alive[name] = sleeper
        ends = {name: each.wait(200) for name, each in alive.items()}
        assert server.wait() == 0
        text = server.text
    assert set(ends.values()) == {0}, {name: alive[name].text for name, code in ends.items() if code}
    assert {event.split()[0] for event in happened} == {"start", "kill", "sleep", "wake"}
    assert len(re.findall(r"round \d+ counted:", text)) == ROUNDS
    assert "Traceback" not in text
    assert_nothing_lost_nothing_twice(data, rounds=ROUNDS)
    weights = [
        {key: value for key, value in load_file(tmp_path / f"{name}.safetensors").items() if key.startswith("weight/")}
        for name in alive
    ]
    for other in weights[1:]:
        assert all(torch.equal(value, other[key]) for key, value in weights[0].items())
