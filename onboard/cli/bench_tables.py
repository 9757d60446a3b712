"""The tables of `onboard bench`."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onboard.cli.terminal import one_line
from onboard.gpu import gib


def show(document: dict[str, Any]) -> None:
    """Print a measurement's document as tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    hardware = document["hardware"]
    console.print(
        Text(f"{document['model_id']}, {document['dtype']}, {hardware['device']}", style="bold")
    )
    console.print(
        f"measured here: {hardware['read_bandwidth'] / 1e9:,.0f} GB/s read, "
        f"{hardware['matmul_rate'] / 1e12:,.2f} TFLOP/s in matrix products; seed {document['seed']}"
    )
    console.print(_startup(document["startup"]))
    peers = list(
        dict.fromkeys(name for result in document["results"] for name in result.get("peers", {}))
    )
    console.print(_table("decode", document["results"], peers))
    console.print(_table("prefill", document["results"], peers))
    if any("drafts" in result for result in document["results"]):
        console.print(_drafts(document["results"]))
    for fact in [*_missing(document["results"]), *document["facts"]]:
        console.print(Text(f"note: {one_line(fact)}", style="dim"))


def _missing(results: list[dict[str, Any]]) -> list[str]:
    """Say why figures are missing: a shape that does not fit, a peer that failed."""
    lines = []
    for result in results:
        shape = f"batch {result['max_concurrency']}, context {result['input_len']:,}"
        if not result["fits"]:
            lines.append(f"{shape}: {result['reason']}")
        failed = {
            name: peer["error"] for name, peer in result.get("peers", {}).items() if "error" in peer
        }
        lines.extend(f"{shape}: {name} failed: {error}" for name, error in failed.items())
    return lines


def _startup(startup: dict[str, Any]) -> Text:
    stages = (
        f"{stage['name']} {stage['seconds']:.2f}"
        for stage in startup["stages"]
        if stage["seconds"] >= 0.005
    )
    return Text(f"start to first token {startup['seconds']:.2f} s: {', '.join(stages)}")


def _table(kind: str, results: list[dict[str, Any]], peers: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=kind, title_justify="left")
    columns = _DECODE if kind == "decode" else _PREFILL
    for name in ("batch", "context", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for peer in peers:
        table.add_column(f"{peer} ms", justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            str(result["max_concurrency"]), f"{result['input_len']:,}", *_cells(kind, result, peers)
        )
    return table


def _drafts(results: list[dict[str, Any]]) -> Table:
    """Return what simulated drafts bring, beside decoding without."""
    table = Table(box=SIMPLE_HEAD, title="drafts", title_justify="left")
    names = (
        "batch",
        "context",
        "tokens",
        "right",
        "accepted",
        "step ms",
        "tok/s",
        "plain",
        "ratio",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        if (found := result.get("drafts")) is None:
            continue
        step = found["step_ms"]
        table.add_row(
            str(result["max_concurrency"]),
            f"{result['input_len']:,}",
            str(found["num_tokens"]),
            f"{found['acceptance']:.2f}",
            f"{found['accepted_share']:.2f} of {found['expected_share']:.2f}",
            "" if step is None else _ms(step),
            f"{found['tokens_per_second']:,.0f}",
            f"{found['plain_tokens_per_second']:,.0f}",
            f"{found['ratio']:.2f}",
        )
    return table


_DECODE = (
    "step ms", "floor ms", "share", "tpot p50/p90/p99", "itl p50/p90/p99", "out tok/s", "all tok/s", "peak",
)  # fmt: skip
_PREFILL = ("prefill ms", "floor ms", "share", "ttft p50/p90/p99", "tok/s")


def _cells(kind: str, result: dict[str, Any], peers: list[str]) -> list[str]:
    if not result["fits"]:
        return [
            "does not fit",
            *[""] * (len(_DECODE if kind == "decode" else _PREFILL) - 1 + 2 * len(peers)),
        ]
    key = "decode_step" if kind == "decode" else "prefill"
    own = result[f"{key}_ms"]
    cells = [_ms(own), _ms(result["floor"][f"{key}_ms"]), f"{result['share_of_floor'][key]:.2f}"]
    if kind == "decode":
        throughputs = [
            f"{result[name]:,.0f}" for name in ("output_throughput", "total_token_throughput")
        ]
        cells += [_spread(result, "tpot"), _spread(result, "itl"), *throughputs]
        cells.append(gib(result["peak_memory_without_spare_cache"]))
    else:
        tokens = result["max_concurrency"] * result["input_len"]
        cells += [_spread(result, "ttft"), f"{1e3 * tokens / own:,.0f}"]
    for peer in peers:
        found = result["peers"].get(peer, {})
        cells += (
            [_ms(found[f"{key}_ms"]), f"{found[f'{key}_ms'] / own:.2f}"]
            if f"{key}_ms" in found
            else ["failed", ""]
        )
    return cells


def _spread(result: dict[str, Any], name: str) -> str:
    return " ".join(_ms(result[f"{each}_{name}_ms"]) for each in ("median", "p90", "p99"))


def _ms(value: float) -> str:
    return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"
