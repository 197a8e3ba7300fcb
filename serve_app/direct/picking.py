"""A choice of the sticky router without a call: whom it would ask first. Ray 2.60 has this for its own use alone."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import ReplicaID

from serve_app.routing.sticky_router import HERE, PICK


async def pick(engines: DeploymentHandle, routing_key: str | None, *, here: str | None = None) -> ReplicaID:
    """The replica that a turn with this key belongs to. `here`: the replica that asks, which keeps a turn that is at
    home nowhere.

    Raises DeploymentUnavailableError or RuntimeError if there is none.
    """
    handle = engines.options(session_id=routing_key) if routing_key else engines
    async with handle.choose_replica(_reserve=False, **{PICK: True, HERE: here}) as selection:
        replica: ReplicaID = selection._replica.replica_id
        return replica
