"""`onboard serve`: an onboarded model behind the interfaces that clients speak."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.extras import import_extra
from onboard.cli.model_argument import check_config, registered_names, say_division
from onboard.cli.options import Device, DTypeName, ModeName
from onboard.cli.prompting.adapter_options import Lora, adapters_of
from onboard.cli.prompting.media_options import (
    GivenMedia,
    MediaDomain,
    TrustRemoteCode,
    Unsandboxed,
)
from onboard.cli.setting_options import settings_of
from onboard.cli.terminal import one_line

_KEY = "ONBOARD_API_KEY"
_Strict = Annotated[
    bool, typer.Option("--strict", help="Fail at a fallback, or an untested model.")
]
_MaxRunning = Annotated[
    int, typer.Option(help="Requests answered at a time; more are told to come again.")
]
_Name = Annotated[
    list[str] | None,
    typer.Option("--name", help="Name of the model in requests; repeatable.", show_default="MODEL"),
]
_ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="Key that clients have to show, one of several; repeatable.",
        envvar=_KEY,
        show_default="none",
    ),
]
_DrainSeconds = Annotated[float, typer.Option(help="How long requests may go on after SIGTERM.")]
_Replicas = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Serve by as many replicas on a Ray cluster, a GPU or more each; SIGHUP restarts them.",
        show_default="none, in this process",
    ),
]
_Address = Annotated[
    str | None,
    typer.Option(
        help="Address of the replicas' Ray cluster.", show_default="RAY_ADDRESS, or on this machine"
    ),
]
_HERE = ("127.0.0.1", "::1", "localhost")


def serve(
    model: options.Model,
    root: options.Root = Path(),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8000,
    name: _Name = None,
    lora: Lora = None,
    api_key: _ApiKey = None,
    allowed_media_domain: MediaDomain = None,
    max_running: _MaxRunning = 256,
    drain_seconds: _DrainSeconds = 30.0,
    config: options.Config = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    mode: options.Mode = ModeName.GRAPH,
    world_size: options.WorldSize = None,
    replicas: _Replicas = None,
    address: _Address = None,
    max_seq_len: options.MaxSeqLen = None,
    max_batch_size: options.MaxBatchSize = None,
    kv_cache_dtype: options.KVCacheDType = None,
    attn_backend: options.AttnBackend = None,
    compile_backend: options.AnyCompileBackend = None,
    draft: options.Draft = None,
    revision: options.Revision = None,
    set_: options.Set = None,
    strict: _Strict = False,
    trust_remote_code: TrustRemoteCode = False,
    unsandboxed: Unsandboxed = False,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> None:
    """Serve an onboarded model over HTTP.

    It speaks OpenAI's interfaces and Anthropic's messages, and listens on this machine alone unless
    --host says otherwise.
    """
    doors = {"host": host, "port": port, "api_keys": api_key or []}
    limits = {"max_running": max_running, "drain_seconds": drain_seconds}
    sizes: Any = {"max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    sizes |= {"attn_backend": attn_backend, "compile_backend": compile_backend}
    sizes |= {"lora": adapters_of(lora), "kv_cache_config__dtype": kv_cache_dtype}
    settings = settings_of(set_, revision=revision, speculative__draft=draft, **sizes)
    where: dict[str, Any] = {"device": device.value, "dtype": dtype.value, "mode": mode.value}
    where["world_size"] = world_size
    libraries = import_extra("onboard.serve.server", "serve", "serving needs")
    told = libraries.ServeSettings(names=name or [model], **doors, **limits)
    with registered_names(model, root):
        runtime = check_config(model, root, config, where, settings)
        say_division(runtime, model, root, {**where, **settings})
        door = libraries.listen(told)
        where["media"] = GivenMedia(domains=allowed_media_domain or []).limits
        where |= {"trust_remote_code": trust_remote_code, "unsandboxed": unsandboxed}
        given = {"root": root, "config": config, "strict": strict, "settings": settings, **where}
        if replicas is not None:
            _serve_replicas(model, told, door, replicas, address, libraries, given)
            return
        service = libraries.load_service(model, told, **given)
    _say(told, libraries.describe(told, door), service.llm.llm.engine.facts)
    libraries.serve(service, door)


def _serve_replicas(
    model: str,
    told: Any,
    door: Any,
    replicas: int,
    address: str | None,
    libraries: Any,
    given: Mapping[str, Any],
) -> None:
    from onboard.parallel.ray_cluster import cluster_address, import_ray

    where = cluster_address(address)
    import_ray("--replicas needs", where)
    front = import_extra("onboard.serve.replicas.front_server", "ray", "--replicas needs")
    found = libraries.describe(told, door)
    front.serve_replicas(
        model,
        told,
        door,
        replicas=replicas,
        address=where,
        gpus=0 if given["device"] == "cpu" else given["world_size"] or 1,
        say=lambda facts: _say(told, found, facts),
        **given,
    )


def _say(told: Any, found: Mapping[str, Any], facts: Sequence[str]) -> None:
    for fact in facts:
        print(f"note: {one_line(fact)}", file=sys.stderr)
    if not told.api_keys and told.host not in _HERE:
        print(f"note: whoever reaches it may use it; {_KEY} sets a key", file=sys.stderr)
    print(f"serving {found['model']} at {found['address']}, process {os.getpid()}", flush=True)
