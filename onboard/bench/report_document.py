"""The report of a measurement as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import transformers

from onboard import __version__
from onboard.bench.metrics import metrics
from onboard.bench.peers import PeerRun
from onboard.bench.whole_measurement import Report, Result
from onboard.bench.work import Work


def document(report: Report) -> dict[str, Any]:
    """Return everything; names as vLLM's benchmarks have them, and our own for what these do not
    measure.
    """
    subject, ceilings = report.subject, report.ceilings
    return {
        "date": report.date.strftime("%Y%m%d-%H%M%S"),
        "backend": "onboard",
        "model_id": subject.name,
        "mode": subject.runtime.mode,
        "random_weights": subject.random_weights,
        "dtype": str(report.dtype).removeprefix("torch."),
        "seed": report.settings.seed,
        "repeats": report.settings.repeats,
        "versions": {
            "onboard": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": asdict(ceilings),
        "device_type": report.device.type,
        "world_size": report.world_size,
        "startup": {
            "seconds": report.startup.total,
            "stages": [asdict(span) for span in report.startup.spans],
        },
        "results": [_result(result, report) for result in report.results],
        "facts": report.facts,
    }


def _result(result: Result, report: Report) -> dict[str, Any]:
    measured, shape = result.measured, result.shape
    if measured is None:
        own = {
            "max_concurrency": shape.batch,
            "input_len": shape.context,
            "output_len": shape.output,
        }
        return {**own, "fits": False, "reason": result.reason}
    floors = floor(result, report)
    return {
        **metrics(measured),
        "fits": True,
        "prefill_ms": 1e3 * measured.prefill,
        "decode_step_ms": 1e3 * measured.decode_step,
        "floor": floors,
        "share_of_floor": shares(measured.prefill, measured.decode_step, floors),
        "peak_memory": measured.peak_memory,
        "peak_memory_without_spare_cache": peak_without_spare(result, report),
        **({"drafts": result.drafted.as_dict(measured.runs)} if result.drafted else {}),
        **({"profile": result.profile.as_dict()} if result.profile else {}),
        "peers": {name: _peer(peer, result, floors) for name, peer in result.peers.items()},
    }


def _peer(peer: PeerRun | str, result: Result, floors: dict[str, Any]) -> dict[str, Any]:
    if isinstance(peer, str):
        return {"error": peer}
    return {
        **peer.as_dict(result.shape),
        "share_of_floor": shares(peer.prefill, peer.decode_step, floors),
    }


def work_of(result: Result, report: Report) -> dict[str, Work]:
    """Return the least work of a shape's prefill and of its mean decode step."""
    assert result.measured is not None
    return {
        "prefill": report.work.prefill(result.shape, result.measured.prefill_hits),
        "decode_step": report.work.decode(result.shape, result.measured.decode_hits),
    }


def floor(result: Result, report: Report) -> dict[str, Any]:
    """Return the least times in ms, and what they follow from."""
    assert result.measured is not None
    found: dict[str, Any] = {}
    for name, work in work_of(result, report).items():
        found[f"{name}_ms"] = 1e3 * report.ceilings.seconds(work.num_bytes, work.operations)
        found[f"{name}_bytes"], found[f"{name}_operations"] = work.num_bytes, work.operations
    if hits := result.measured.decode_hits:
        found["experts_hit"] = sum(hits) / len(hits)
    return found


def shares(prefill: float, decode_step: float, floors: dict[str, Any]) -> dict[str, float]:
    """Return the floors over the times (seconds) that were measured: 1 is as fast as the machine
    can be.
    """
    return {
        "prefill": floors["prefill_ms"] / (1e3 * prefill),
        "decode_step": floors["decode_step_ms"] / (1e3 * decode_step),
    }


def peak_without_spare(result: Result, report: Report) -> int:
    """Return the peak with caches just large enough for this shape, as a peer's grow; the process's
    peak on a CPU.
    """
    assert result.measured is not None
    spare = max(0, report.caches - result.cache_bytes) if report.device.type == "cuda" else 0
    return result.measured.peak_memory - spare
