"""Plans of memory as JSON, read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from onboard.cache.budget import CachePlan, Limits, MemoryPlan
from onboard.cache.resources import CacheResource, KVPagedResource, StateResource

_FORMS: dict[str, type[KVPagedResource] | type[StateResource]] = {
    "pages": KVPagedResource,
    "states": StateResource,
}


@dataclass(frozen=True)
class DType:
    """What is known of a torch.dtype without torch."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


def written_plan(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan as JSON; resources one after another that are alike are written once."""
    sizes = {
        field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "cache"
    }
    groups = [(resource, len(list(same))) for resource, same in groupby(plan.cache.resources)]
    return {
        "sizes": sizes,
        "limits": asdict(plan.cache.limits),
        "resources": [[*_form(r), n] for r, n in groups],
    }


def _form(resource: CacheResource) -> tuple[str, dict[str, Any]]:
    name = next(name for name, form in _FORMS.items() if type(resource) is form)
    values = {field.name: getattr(resource, field.name) for field in fields(resource)}
    return name, values | {"dtype": [str(resource.dtype), resource.dtype.itemsize]}


def read_plan(document: dict[str, Any]) -> MemoryPlan:
    """Return the plan that was written; raises `KeyError`, `TypeError` or `ValueError` where it was
    not one.
    """
    cache = CachePlan(Limits(**document["limits"]), tuple(_resources(document["resources"])))
    sizes = document["sizes"]
    return MemoryPlan(cache=cache, **sizes | {"chosen": tuple(sizes["chosen"])})


def _resources(groups: list[Any]) -> Iterator[CacheResource]:
    for name, values, count in groups:
        own: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        own["dtype"] = DType(*values["dtype"])
        yield from [_FORMS[name](**own)] * count
