"""Counters and times for Prometheus, by the names that vLLM's users know."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """What a server has counted; `model` is the name that it serves."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self.registry.register(_EngineState(engine, model))
        names = list(self._labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(f"vllm:{name}", text, names, registry=self.registry, buckets=buckets)
            return made.labels(**self._labels)

        self._first = histogram("time_to_first_token_seconds", "To the first token.", _SECONDS)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens.", _SECONDS)
        self._each = histogram(
            "request_time_per_output_token_seconds", "Of a request's tokens on average.", _SECONDS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _SECONDS
        )
        self._whole = histogram("e2e_request_latency_seconds", "Of whole requests.", _SECONDS)
        self._outputs = histogram("request_params_n", "Outputs that were asked for.", _LENGTHS)
        self._most = histogram("request_params_max_tokens", "Most tokens of an output.", _LENGTHS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of prompts.", _LENGTHS)
        self._output = histogram("request_generation_tokens", "Tokens of outputs.", _LENGTHS)
        self._ended = Counter(
            "vllm:request_success",
            "Outputs that have ended, by how.",
            [*names, "finished_reason"],
            registry=self.registry,
        )

    def watch(self, prompt_tokens: int, params: SamplingParams) -> Watch:
        """Return what times one prompt from now on."""
        self._prompt.observe(prompt_tokens)
        self._outputs.observe(params.n)
        if params.max_tokens is not None:
            self._most.observe(params.max_tokens)
        return Watch(self)

    def text(self) -> bytes:
        """Return all of it in Prometheus's format."""
        return bytes(generate_latest(self.registry))


class Watch:
    """Times one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._first = self._last = perf_counter()
        self._tokens = 0

    def took(self, tokens: int) -> None:
        """Record that tokens have come."""
        now, metrics = perf_counter(), self._metrics
        if tokens and not self._tokens:
            self._first = now
            metrics._first.observe(now - self._start)
        elif tokens:
            metrics._between.observe((now - self._last) / tokens)
        self._last, self._tokens = now, self._tokens + tokens

    def ended(self, reason: str) -> None:
        """Record that an output has ended."""
        self._metrics._ended.labels(**self._metrics._labels, finished_reason=reason).inc()

    def done(self) -> None:
        """Record that the request has ended."""
        metrics, decode = self._metrics, self._last - self._first
        metrics._whole.observe(perf_counter() - self._start)
        metrics._output.observe(self._tokens)
        metrics._decode.observe(decode)
        if self._tokens > 1:
            metrics._each.observe(decode / (self._tokens - 1))


class _EngineState(Collector):
    """What the engine knows of itself, read when it is asked for."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._labels = ["model_name"], [model]

    def collect(self) -> Iterator[Any]:
        engine, stats = self._engine, self._engine.stats
        groups = engine.cache.groups
        usable = sum(group.allocator.num_usable for group in groups)
        free = sum(group.allocator.num_free for group in groups)
        prompted = stats.prompt_tokens + stats.reused_tokens
        gauges = {
            "num_requests_running": (len(engine.scheduler.running), "Outputs in the batch."),
            "num_requests_waiting": (len(engine.scheduler.waiting), "Outputs that wait."),
            "kv_cache_usage_perc": (1 - free / max(usable, 1), "Share of pages in use, 0 to 1."),
        }
        counters = {
            "prompt_tokens": (prompted, "Prompt tokens, computed or found in the cache."),
            "prefix_cache_queries": (prompted, "Prompt tokens looked for in the cache."),
            "generation_tokens": (stats.generated_tokens, "Tokens that were generated."),
            "num_preemptions": (stats.preemptions, "Outputs that lost their pages."),
            "prefix_cache_hits": (stats.reused_tokens, "Prompt tokens found in the cache."),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, text) in values.items():
                metric = family(f"vllm:{name}", text, labels=self._labels[0])
                metric.add_metric(self._labels[1], value)
                yield metric
