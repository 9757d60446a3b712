"""A replica as an actor of Ray Serve, and the way that requests find it
(https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from onboard.serve.app import create_app
from onboard.serve.replicas.passed_on import Asked, Head, Part
from onboard.serve.replicas.replica_call import ReplicaCall
from onboard.serve.serve_settings import ServeSettings


class ModelReplica:
    """A model on some node, and its server's application."""

    def __init__(self, model: str, told: ServeSettings, options: Mapping[str, Any]) -> None:
        from onboard.serve.server import load_service

        self._service = load_service(model, told, **options)
        self._service.start()
        self._app = create_app(self._service)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, asked: Asked, to: str | None) -> AsyncGenerator[Head | Part, None]:
        """Yield the answer to a request; `to` was for the router."""
        async for part in ReplicaCall(self._app, asked, self._name).parts():
            yield part

    async def facts(self, to: str | None = None) -> list[str]:
        """Return what a user is told of the model."""
        return list(self._service.llm.llm.engine.facts)

    def check_health(self) -> None:
        """Raise an error where the model takes no more prompts: the replica is replaced."""
        if not self._service.llm.thread.is_alive:
            raise RuntimeError("the engine has ended")

    def __del__(self) -> None:
        self._service.close()


class NamedRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that it names, and to any other one if that one is gone.

    The front chooses: it sees all requests, and their ends.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the named replica, then the others."""
        name = None
        if pending_request is not None:
            name = pending_request.kwargs.get("to")
            pending_request.routing_context.should_backoff = True
        named = [each for each in candidate_replicas if each.replica_id.unique_id == name]
        others = [each for each in candidate_replicas if each.replica_id.unique_id != name]
        return [named, others]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are."""
        from onboard.serve.replicas.live_replicas import LIVE

        super().update_replicas(replicas)
        LIVE.clear()
        LIVE.update(each.replica_id.unique_id for each in replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Take in that one is gone, before the controller tells."""
        from onboard.serve.replicas.live_replicas import LIVE

        super().on_replica_actor_died(replica_id)
        LIVE.discard(replica_id.unique_id)
