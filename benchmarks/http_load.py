"""A client that loads a server: streams of `/v1/completions` with random prompts of token ids.

    python benchmarks/http_load.py http://127.0.0.1:8000 --vocabulary 128256 [--model model]
                                   [--requests 64] [--clients 64] [--shortest 1024]
                                   [--longest 1024] [--tokens 256] [--rate R] [--seed 1]

It prints one line of JSON: seconds, tokens a second, and spreads of the time to the first token and
of the time of each further one, in milliseconds. Without a rate every client asks again as soon as
it has its answer. With one, requests come as a Poisson process of so many a second, whether earlier
ones have ended or not; the time to a first token counts from there, also where all clients are
taken. Events are looked at no further than counting needs, so that one core reads what a GPU
writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Load:
    """What is asked for."""

    vocabulary: int
    model: str = "model"
    requests: int = 64
    clients: int = 64
    shortest: int = 1024
    longest: int = 1024
    tokens: int = 256
    rate: float = 0.0
    """Requests a second; 0: as many as there are clients for."""
    seed: int = 1


@dataclass(frozen=True)
class Answer:
    """When an answer came, in seconds since it could have been asked for."""

    first: float
    last: float
    tokens: int


def bodies(load: Load) -> list[bytes]:
    """Return the requests' bodies."""
    draw = random.Random(f"{load.seed} bodies")
    told = {"model": load.model, "max_tokens": load.tokens, "temperature": 0, "ignore_eos": True}
    told |= {"stream": True, "stream_options": {"include_usage": True}}
    lengths = [draw.randint(load.shortest, load.longest) for _ in range(load.requests)]
    prompts = [[draw.randrange(1, load.vocabulary) for _ in range(length)] for length in lengths]
    return [json.dumps({**told, "prompt": prompt}).encode() for prompt in prompts]


def arrivals(load: Load) -> list[float]:
    """Return when the requests come, in seconds since the first."""
    draw, now, found = random.Random(f"{load.seed} arrivals"), 0.0, []
    for _ in range(load.requests):
        found.append(now)
        now += draw.expovariate(load.rate) if load.rate else 0.0
    return found


async def ask(address: str, body: bytes, start: float) -> Answer:
    """Send one request and read its stream to the end."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read()
    first = last = 0.0
    usage = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            if b'"usage"' in line and b'"choices": []' in line.replace(b'":[]', b'": []'):
                usage = line
            else:
                last = time.perf_counter()
                first = first or last
    writer.close()
    tokens = int(json.loads(usage[6:])["usage"]["completion_tokens"])
    return Answer(first - start, last - start, tokens)


async def run(address: str, load: Load) -> dict[str, Any]:
    """Ask for everything; return the figures."""
    free, found = asyncio.Semaphore(load.clients), bodies(load)
    begin = time.perf_counter()

    async def one(body: bytes, arrival: float) -> Answer:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        async with free:
            came = begin + arrival if load.rate else time.perf_counter()
            return await ask(address, body, came)

    tasks = [one(body, at) for body, at in zip(found, arrivals(load), strict=True)]
    answers = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begin
    assert all(each.tokens == load.tokens for each in answers), [each.tokens for each in answers]
    return figures(answers, seconds) | {"load": asdict(load)}


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return what came of some requests that took so long together."""
    tokens = sum(each.tokens for each in answers)
    further = [(each.last - each.first) / max(each.tokens - 1, 1) for each in answers]
    return {
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(answers) / seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_ms": spread([each.first for each in answers]),
        "further_token_ms": spread(further),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 90th and 99th percentile and the most, in milliseconds."""
    ordered = sorted(seconds)
    shares = {"p50": statistics.median(ordered)}
    shares |= {f"p{q}": ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (90, 99)}
    return {name: round(1e3 * each, 2) for name, each in {**shares, "most": ordered[-1]}.items()}


def main() -> None:
    """Load a server, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--model", default="model")
    for name, default in {"requests": 64, "clients": 64, "tokens": 256, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.0)
    told = vars(parser.parse_args())
    print(json.dumps(asyncio.run(run(told.pop("address"), Load(**told)))))


if __name__ == "__main__":
    main()
