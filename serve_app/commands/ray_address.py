"""`--address`: what may stand there, and whether a Ray answers. Errors name the address as it was given."""

from __future__ import annotations

import os
import socket

from serve_app.commands.ray_startup import first_line
from serve_app.local_ports import is_loopback

VARIABLE = "RAY_ADDRESS"
_CONNECT_SECONDS = 5.0


class BadAddress(ConnectionError):
    """What was given is no address of a Ray cluster."""


def find_ray(address: str) -> str:
    """The host:port of the Ray that is meant by host:port or `auto`, which something listens on. At once, where Ray
    itself would try for minutes. Raises BadAddress, or ConnectionError if nothing is there."""
    if address != "auto":
        return _answering(address, "--address", f"no Ray answers at {address}")
    configured = os.environ.get(VARIABLE)
    if configured and configured != "auto":
        return _answering(configured, VARIABLE, f"no Ray answers at {configured}, which `auto` takes from {VARIABLE}")
    from ray._private import services

    try:
        discovered = services.get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise ConnectionError(
            "no Ray runs on this machine for `auto` to find; name one that runs elsewhere by its host:port"
        ) from None
    return _answering(discovered, "auto", f"the Ray at {discovered}, which `auto` found, does not answer")


def not_joined(address: str, where: str, error: Exception) -> ConnectionError:
    """For a Ray that answers at `where`, which `address` means, and that `ray.init` could not join."""
    from ray.exceptions import AuthenticationError

    named = address if address == where else f"{where}, which `{address}` means,"
    if isinstance(error, AuthenticationError):
        return ConnectionError(
            f"the Ray at {named} is joined with a token, and there is none here: set RAY_AUTH_TOKEN, or put it into "
            "~/.ray/auth_token (`ray get-auth-token` prints it on its head); a Ray without tokens wants "
            "RAY_AUTH_MODE=disabled"
        )
    return ConnectionError(
        f"what answers at {named} could not be joined: {first_line(error)}. It must be a Ray of the same version, "
        "whose token is in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def require_address(address: str, given_by: str = "--address") -> tuple[str, int]:
    """Host and port. `given_by`: what an error names. Raises BadAddress."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise BadAddress(
            f"{given_by} {address!r} is no address of a Ray cluster: give host:port, with the port of its GCS (6379 by "
            "default), or `auto` for the one on this machine"
        )
    return host.strip("[]"), int(port)


def _answering(address: str, given_by: str, failure: str) -> str:
    host, port = require_address(address, given_by)
    if is_loopback(host):  # as Ray does: a cluster knows its nodes by addresses that others can reach
        import ray

        host = ray.util.get_node_ip_address()
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{failure}: {error.strerror or error}") from None
    return address
