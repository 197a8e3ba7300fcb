"""What Serve calls in each of its processes that speak HTTP, before they listen. An environment variable names it."""

from __future__ import annotations

import resource
from dataclasses import replace

import uvicorn.config
from starlette.middleware import Middleware

from serve_app.cluster.proxy.front import Front
from serve_app.cluster.proxy.limits import ProxyLimits
from serve_app.cluster.proxy.protocol import BoundedProtocol


def front() -> list[Middleware]:
    """The middleware that stands before Serve's own. Serve leaves the choice of the HTTP protocol to uvicorn, and lets
    nobody make another, so uvicorn's own choice is replaced, in this process alone.

    Raises ValueError for a limit in the environment that is none."""
    limits = ProxyLimits.from_environment()
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Half of what this process may have open; Ray needs some, too.
    limits = replace(limits, connections=min(limits.connections, descriptors // 2))
    BoundedProtocol.limits = limits
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{BoundedProtocol.__module__}:{BoundedProtocol.__name__}"
    return [Middleware(Front, limits=limits)]
