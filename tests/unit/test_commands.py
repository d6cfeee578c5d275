"""What the commands refuse before they start."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gradwire import demo
from gradwire.config import RunConfig, read_config
from gradwire.errors import ConfigError, GradwireError
from gradwire.state import write_checkpoint
from gradwire_aggregator.command import _with_addresses
from gradwire_worker.command import _require_writable, _serve_metrics, generate


@pytest.mark.parametrize("address", ["50051", "here", "0.0.0.0:", "0.0.0.0:99999"])
def test_an_address_to_listen_on_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"server.*HOST:PORT"):
        _with_addresses(RunConfig(), address, None)


def test_an_address_on_the_command_line_wins() -> None:
    assert _with_addresses(RunConfig(), "0.0.0.0:1234", "").server.model_dump() == {
        "listen": "0.0.0.0:1234",
        "http": "",
    }


@pytest.mark.parametrize("address", ["9465", "127.0.0.1:99999", "127.0.0.1:http"])
def test_an_address_for_metrics_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="not HOST:PORT"), _serve_metrics(address, CollectorRegistry()):
        pass


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="can't write there"):
        _require_writable(tmp_path / "taken")
    _require_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []


@pytest.mark.parametrize("model", [None, "{}", '{"dim": -1}', "nonsense"])
def test_a_checkpoint_that_is_not_a_workers_is_refused(tmp_path: Path, model: str | None) -> None:
    path = tmp_path / "other.safetensors"
    write_checkpoint(path, {}, {} if model is None else {"model": model})
    with pytest.raises(GradwireError, match=r"other\.safetensors"):
        generate(path)


@pytest.mark.parametrize("method", demo.RECIPES)
def test_the_demo_writes_a_config_for_every_method(tmp_path: Path, method: str) -> None:
    config = read_config(demo.write_config(tmp_path, method=method, workers=3))
    assert config.training is not None
    assert config.training.method == method
    # 200 inner steps of 16 sequences for each worker.
    assert config.rounds * config.batch.global_batch == 200 * 16 * 3


def test_the_demo_refuses_a_method_that_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--method magic: allowed are sparseloco, demo, dense, topk"):
        demo.write_config(tmp_path, method="magic", workers=2)
