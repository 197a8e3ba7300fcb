"""What `--address` may be; what is said where no Ray is names the address that was given."""

from __future__ import annotations

import socket

import pytest
import ray
from ray._private import services
from ray.exceptions import AuthenticationError
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.commands.ray_address import BadAddress, find_ray, not_joined, require_address

runner = CliRunner()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray is named or running, and this machine's address for others is loopback, too."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set())
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "address", ["head", "head:", ":6379", "head:0", "head:65536", "head:gcs", "http://head:8265", "ray://head:10001"]
)
def test_what_is_no_address_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(BadAddress, match=f"--address {address!r} is no address of a Ray cluster: give host:port"):
        require_address(address)
    for command in (["serve"], ["drain-node"]):
        result = runner.invoke(app, [*command, "--address", address])
        assert result.exit_code == 2
        assert repr(address) in " ".join(result.output.split())


def test_an_address_may_be_of_any_family() -> None:
    assert require_address("head:6379") == ("head", 6379)
    assert require_address("[::1]:6379") == ("::1", 6379)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nobody_at_an_address_is_said_of_that_address(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, host: str
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with pytest.raises(ConnectionError, match=f"^no Ray answers at {host}:{closed_port}: Connection refused$"):
        find_ray(f"{host}:{closed_port}")


def test_auto_without_a_ray_says_that_there_is_none() -> None:
    with pytest.raises(ConnectionError, match="no Ray runs on this machine for `auto` to find"):
        find_ray("auto")


def test_auto_names_where_it_has_an_address_from(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    there = f"127.0.0.1:{closed_port}"
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: there)
    with pytest.raises(ConnectionError, match=f"the Ray at {there}, which `auto` found, does not answer"):
        find_ray("auto")
    monkeypatch.setenv("RAY_ADDRESS", there)
    with pytest.raises(ConnectionError, match=f"no Ray answers at {there}, which `auto` takes from RAY_ADDRESS"):
        find_ray("auto")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(BadAddress, match="RAY_ADDRESS 'ray://head:10001' is no address"):
        find_ray("auto")


def test_a_ray_that_listens_is_found() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert find_ray(address) == address


def test_a_ray_that_cannot_be_joined_is_named_as_it_was_given() -> None:
    said = str(not_joined("auto", "10.0.0.1:6379", AuthenticationError("no token; see https://elsewhere")))
    assert said.startswith(
        "the Ray at 10.0.0.1:6379, which `auto` means, is joined with a token, and there is none here"
    )
    assert "https" not in said
    said = str(not_joined("10.0.0.1:6379", "10.0.0.1:6379", RuntimeError("Failed to connect\nmore")))
    assert said.startswith("what answers at 10.0.0.1:6379 could not be joined: Failed to connect. It must be a Ray of")
