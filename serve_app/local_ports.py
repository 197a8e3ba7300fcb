"""What may be bound: loopback freely, anything wider only with an API key, and no port that is taken."""

from __future__ import annotations

import ipaddress
import socket


class BindRefused(Exception):
    """The address cannot or must not be served on; the message says why and what to do."""


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. A name is looked up, and each of its addresses must be
    loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(
        ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses
    )


def reachable_address(host: str, port: int) -> str:
    """host:port as a client on this machine writes it in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def require_key_beyond_loopback(host: str | None, *, has_keys: bool) -> None:
    """Raises BindRefused for an open server that others can reach. None: HTTP is not served at all."""
    if host is not None and not has_keys and not is_loopback(host):
        raise BindRefused(
            f"serving on {host} lets others in, and no API key is set: set one (--api-key-file, --api-key or "
            "MOORAGE_API_KEYS) or serve on 127.0.0.1"
        )


def require_free_port(host: str, port: int) -> None:
    """Raises BindRefused if nothing can listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            raise BindRefused(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
            ) from None
