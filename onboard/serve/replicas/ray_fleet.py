"""Replicas on a Ray cluster: started, replaced when they end, restarted one after the other."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from onboard.errors import OnboardError, UsageError
from onboard.parallel.ray_cluster import LOCAL, cluster, import_ray, last_line
from onboard.serve.replicas.live_replicas import LIVE
from onboard.serve.replicas.passed_on import Asked, Head, Part, ReplicaLostError
from onboard.serve.serve_settings import ServeSettings

_NEEDING = "--replicas needs"
_DEPLOYMENT = "model"
_HEALTH_SECONDS = 5.0
"""Between two looks at a replica; one that dies is seen at once."""
_STARTS = 3
"""Times that a replica may fail to start."""


@dataclass(frozen=True)
class FleetSettings:
    """What replicas are started with."""

    replicas: int
    model: str
    told: ServeSettings
    options: Mapping[str, Any]
    """Those of `LLM`."""
    gpus: int = 0
    """Of each replica; 0: it computes on a core."""


@dataclass
class RayFleet:
    """Replicas that run; they are `Replicas` for a front."""

    ray: Any
    settings: FleetSettings
    name: str = field(default_factory=lambda: f"onboard-{secrets.token_hex(4)}")
    """Of the application in the cluster."""
    _round: int = 0
    """How many times they were restarted."""
    _handle: Any = None

    @property
    def live(self) -> Set[str]:
        """The names of those that take requests."""
        return frozenset(LIVE)

    async def ask(self, asked: Asked, to: str | None) -> AsyncGenerator[Head | Part, None]:
        """Yield a replica's answer, that of `to` if it is there; leaving cancels it.

        Raises `ReplicaLostError` where it ends before the answer does.
        """
        errors = self.ray.exceptions
        answer = self._handle.options(stream=True).answer.remote(asked, to=to)
        try:
            async for part in answer:
                yield part
        except errors.RayTaskError:
            raise
        except (errors.RayActorError, errors.RaySystemError, errors.WorkerCrashedError) as error:
            raise ReplicaLostError from error
        finally:
            with suppress(Exception):  # nothing is left to be cancelled
                answer.cancel()

    def start(self) -> list[str]:
        """Start the replicas, or restart them; return what is to be told of the model.

        Of those that run at most a fifth, and at least one, are replaced at a time, once their
        requests have ended or the time for that is over. Raises `OnboardError` where new ones fail.
        """
        serve = _ray_serve()
        serve.start(proxy_location="Disabled")
        try:
            self._handle = serve.run(self._application(serve), name=self.name, route_prefix=None)
        except RuntimeError as error:
            raise OnboardError(
                f"replicas have not started: {self._reason(serve, error)}"
            ) from error
        self._round += 1
        found: list[str] = self._handle.facts.remote().result()
        return found

    def end(self) -> None:
        """End the replicas."""
        _ray_serve().delete(self.name)

    def _application(self, serve: Any) -> Any:
        from onboard.serve.replicas.ray_replica import ModelReplica, NamedRouter

        settings = self.settings
        path = f"{NamedRouter.__module__}.{NamedRouter.__qualname__}"
        deployment = serve.deployment(ModelReplica).options(
            name=_DEPLOYMENT,
            num_replicas=settings.replicas,
            max_ongoing_requests=4 * settings.told.max_running,  # it refuses them itself
            max_constructor_retry_count=_STARTS,
            health_check_period_s=_HEALTH_SECONDS,
            graceful_shutdown_timeout_s=settings.told.drain_seconds,
            graceful_shutdown_wait_loop_s=0.2,
            request_router_config={"request_router_class": path},
            ray_actor_options={
                **({"num_gpus": settings.gpus} if settings.gpus else {"num_cpus": 1}),
                # What differs has them restarted
                "runtime_env": {"env_vars": {"ONBOARD_ROUND": str(self._round)}},
            },
        )
        return deployment.bind(settings.model, settings.told, settings.options)

    def _reason(self, serve: Any, error: RuntimeError) -> str:
        """Return the error of a replica that has not started, in one line."""
        status = serve.status().applications.get(self.name)
        message = "" if status is None else status.deployments[_DEPLOYMENT].message
        lines = [line.strip() for line in message.splitlines() if "Error: " in line]
        return lines[-1] if lines else last_line(error)


def _fitted(settings: FleetSettings, gpus: int) -> FleetSettings:
    """Return settings for a cluster with as many GPUs; raise `UsageError` if they do not suffice:
    Ray would wait for more.
    """
    if settings.options.get("device") == "auto" and not gpus:
        return replace(settings, gpus=0)
    if (wanted := settings.gpus * settings.replicas) > gpus:
        raise UsageError(
            f"{settings.replicas} replicas want {wanted} GPUs and the cluster has {gpus}",
            hint="Give fewer --replicas, or --device cpu",
        )
    return settings


@contextmanager
def fleet(settings: FleetSettings, address: str) -> Iterator[tuple[RayFleet, list[str]]]:
    """Start replicas on a cluster; yield them, and what is to be told of the model."""
    ray = import_ray(_NEEDING, address)
    with cluster(ray, address, settings.replicas):
        made = RayFleet(ray, _fitted(settings, int(ray.cluster_resources().get("GPU", 0))))
        try:
            yield made, made.start()
        finally:
            made.end()
            if address == LOCAL:
                _ray_serve().shutdown()


def _ray_serve() -> Any:
    """Return the module; its news are for its operators, not for ours."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    return serve
