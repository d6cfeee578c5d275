"""docker-compose.yml, for real: images are built, the run trains, Prometheus watches it, and nothing stays behind."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
BUILD_DEADLINE_S = 1200.0  # PyTorch is downloaded and unpacked in it, where the build cache is empty
UP_DEADLINE_S = 240.0
ROUNDS_DEADLINE_S = 180.0
DOWN_DEADLINE_S = 120.0
POLL_S = 1.0


class Project:
    """One compose project with a name and ports of its own."""

    def __init__(self) -> None:
        self.name = f"gradwire-test-{secrets.token_hex(4)}"
        free_ports = {"AGGREGATOR_PORT": "0", "METRICS_PORT": "0", "PROMETHEUS_PORT": "0"}
        tag = os.environ.get("PROMETHEUS_TAG") or _local_prometheus_tag()
        self._environment = os.environ | free_ports | ({"PROMETHEUS_TAG": tag} if tag else {})

    def compose(self, *arguments: str, timeout_s: float) -> None:
        """Runs `docker compose`; its output goes to the test's. Raises CalledProcessError or TimeoutExpired."""
        command = ["docker", "compose", "--progress", "plain", "--project-name", self.name, *arguments]
        print("$", *command, flush=True)
        subprocess.run(
            command, cwd=ROOT, env=self._environment, timeout=timeout_s, check=True, stdin=subprocess.DEVNULL
        )

    def port(self, service: str, port: int) -> str:
        """HOST:PORT on this machine of a service's port."""
        return _docker("compose", "--project-name", self.name, "port", service, str(port), env=self._environment)

    def leftovers(self) -> list[str]:
        """Containers, volumes, networks and images of the project that are still there."""
        label = f"label=com.docker.compose.project={self.name}"
        return [
            f"{kind} {each}"
            for kind, command in (
                ("container", ["ps", "--all", "--quiet", "--filter", label]),
                ("volume", ["volume", "ls", "--quiet", "--filter", label]),
                ("network", ["network", "ls", "--quiet", "--filter", label]),
                ("image", ["image", "ls", "--quiet", "--filter", f"reference={self.name}-*"]),
            )
            for each in _docker(*command).split()
        ]


class Prometheus:
    """Prometheus' HTTP API."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def query(self, expression: str) -> dict[tuple[str, str], float]:
        """The newest value of every series that `expression` selects, by its job and instance."""
        url = f"http://{self._address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with self._opener.open(url, timeout=10) as response:
            answer = json.load(response)
        series = answer["data"]["result"]
        return {(each["metric"]["job"], each["metric"]["instance"]): float(each["value"][1]) for each in series}


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project that is taken down at the end, whatever happened; its logs are printed if the test failed."""
    try:
        _docker("info", "--format", "{{.ServerVersion}}")
        _docker("compose", "version")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no Docker engine with compose answers: {getattr(error, 'stderr', None) or error}")
    project = Project()
    failed_before = request.session.testsfailed
    try:
        yield project
    finally:
        if request.session.testsfailed > failed_before:
            project.compose("ps", "--all", timeout_s=30)
            project.compose("logs", "--no-color", timeout_s=30)
        project.compose("down", "--volumes", "--rmi", "local", "--remove-orphans", timeout_s=DOWN_DEADLINE_S)


@pytest.mark.timeout(0)  # a timeout would end the process before it has cleaned up; every step has its own deadline
def test_prometheus_sees_the_rounds_of_the_aggregator_and_both_workers(project: Project) -> None:
    project.compose("build", timeout_s=BUILD_DEADLINE_S)
    project.compose("up", "--detach", "--wait", timeout_s=UP_DEADLINE_S)
    prometheus = Prometheus(project.port("prometheus", 9090))
    deadline = time.monotonic() + ROUNDS_DEADLINE_S

    up = _poll(lambda: prometheus.query("up"), lambda found: sorted(found.values()) == [1, 1, 1], deadline)
    assert sorted(job for job, _ in up) == ["gradwire-aggregator", "gradwire-worker", "gradwire-worker"]
    targets = {job: {instance for each, instance in up if each == job} for job, _ in up}

    first = _poll(lambda: prometheus.query("gradwire_round"), lambda found: len(found) == 1, deadline)
    assert {instance for _, instance in first} == targets["gradwire-aggregator"]
    before = max(first.values())
    _poll(lambda: prometheus.query("gradwire_round"), lambda found: max(found.values(), default=0) > before, deadline)
    workers = _poll(
        lambda: prometheus.query("gradwire_worker_round"),
        lambda found: len(found) == 2 and min(found.values()) > 0,
        deadline,
    )
    assert {instance for _, instance in workers} == targets["gradwire-worker"]

    project.compose("down", "--volumes", "--rmi", "local", timeout_s=DOWN_DEADLINE_S)
    assert project.leftovers() == []


def _poll(read: Callable[[], T], is_right: Callable[[T], bool], deadline: float) -> T:
    """What `read` gives, once it is right. Prometheus may refuse connections at first."""
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = found = read()
            if is_right(found):
                return found
        except OSError as error:
            last = error
        time.sleep(POLL_S)
    pytest.fail(f"not seen in time; at last: {last}")


def _docker(*arguments: str, env: dict[str, str] | None = None) -> str:
    command = ["docker", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip()


def _local_prometheus_tag() -> str | None:
    """The tag of an image that is here already, which spares a download."""
    tags = _docker("image", "ls", "--format", "{{.Tag}}", "prom/prometheus").split()
    return tags[0] if tags else None
