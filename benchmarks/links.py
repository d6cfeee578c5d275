"""Hosts that talk over a network of their own: loopback as it is, or emulated links between network namespaces.

A namespace has no name and lives as long as the process that holds it, which ends when this one does; the router ends
likewise, and its devices with it. So nothing is left behind, however a benchmark ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROUTER_SOURCE: Final = Path(__file__).with_name("router.c")
TOOLS: Final = ("ip", "cc", "nsenter", "unshare")


@dataclass(frozen=True)
class Profile:
    """What every host's link does. Both directions alike."""

    words: str
    megabits: int
    one_way_delay_us: int
    queue_ms: int  # a packet that would wait longer for a link is dropped


PROFILES: Final = {
    "lan": Profile("1 Gbit/s each way, 0.5 ms round trip", megabits=1000, one_way_delay_us=250, queue_ms=20)
}


@dataclass(frozen=True)
class Host:
    """Where a process runs: its address, and what goes before its command line."""

    address: str
    prefix: tuple[str, ...] = ()


def unavailable(link: str) -> str:
    """Why a link can't be had on this machine; empty if it can."""
    if link == "loopback":
        return ""
    if not sys.platform.startswith("linux"):
        return "emulated links need Linux"
    if os.geteuid() != 0:
        return "emulated links need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"emulated links need the commands {', '.join(missing)}"
    return "" if Path("/dev/net/tun").exists() else "emulated links need /dev/net/tun"


@contextlib.contextmanager
def hosts(link: str, count: int) -> Iterator[list[Host]]:
    """`count` hosts that reach each other over `link`."""
    if link == "loopback":
        yield [Host("127.0.0.1")] * count
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-links-")))
        devices = [f"gw{os.getpid()}n{number}" for number in range(1, count + 1)]
        _start_router(stack, folder, PROFILES[link], devices)
        holders = [_hold_namespace(stack) for _ in devices]
        for number, (device, holder) in enumerate(zip(devices, holders, strict=True), 1):
            _move_in(device, holder, f"10.83.0.{number}")
        yield [Host(f"10.83.0.{number}", _enter(holder)) for number, holder in enumerate(holders, 1)]


def _start_router(stack: contextlib.ExitStack, folder: Path, profile: Profile, devices: list[str]) -> None:
    program = folder / "router"
    subprocess.run(["cc", "-O2", "-o", program, ROUTER_SOURCE], check=True)
    rate = f"{profile.megabits}:{profile.megabits}"
    settings = {"DELAY_US": str(profile.one_way_delay_us), "QUEUE_MS": str(profile.queue_ms)}
    router = _child(stack, [str(program), *(f"{device}:{rate}" for device in devices)], settings)
    if not router.stdout or router.stdout.readline().strip() != b"ready":
        raise RuntimeError("the router of the emulated links did not start")


def _hold_namespace(stack: contextlib.ExitStack) -> int:
    """The process that keeps a new network namespace: it ends when its standard input closes."""
    holder = _child(stack, ["unshare", "--net", "--", "sh", "-c", "echo ready; exec cat"], {})
    if not holder.stdout or holder.stdout.readline().strip() != b"ready":
        raise RuntimeError("no network namespace could be made")
    return holder.pid


def _child(stack: contextlib.ExitStack, command: list[str], settings: dict[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own, so that Ctrl-C reaches it only through the closed pipe, after the others are done.
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **settings},
        start_new_session=True,
    )

    def end() -> None:
        if child.stdin:
            child.stdin.close()
        child.wait(timeout=5)

    stack.callback(end)
    return child


def _enter(holder: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder}/ns/net", "--")


def _move_in(device: str, holder: int, address: str) -> None:
    subprocess.run(["ip", "link", "set", device, "netns", str(holder), "name", "link0"], check=True)
    for command in (
        "ip link set lo up",
        f"ip addr add {address}/24 dev link0",
        "ip link set link0 mtu 1500 txqueuelen 5000 gso_max_size 16384",
        "ip link set link0 up",
        # By route: a new namespace may not be allowed to choose its default.
        "ip route replace 10.83.0.0/24 dev link0 congctl cubic",
        "sysctl -q -w net.ipv4.tcp_no_metrics_save=1",
    ):
        subprocess.run([*_enter(holder), *command.split()], check=True)
