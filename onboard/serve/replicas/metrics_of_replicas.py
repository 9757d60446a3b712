"""Counts of several replicas in one answer to Prometheus: each sample says whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def labelled(texts: Mapping[str, str]) -> list[Metric]:
    """Return the counts of replicas, given as texts by their names; samples have `replica`."""
    found: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = found.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "replica": name}
                known.add_sample(sample.name, labels, sample.value)
    return list(found.values())


def metrics_text(registry: CollectorRegistry, further: Iterable[Metric]) -> bytes:
    """Return a registry's counts and further ones in Prometheus's format."""
    own = CollectorRegistry()
    own.register(_Given([*registry.collect(), *further]))
    return bytes(generate_latest(own))


class _Given(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
