"""The Hub's real client, in a process of its own, against a Hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from onboard.errors import OnboardError
from onboard.hub import LocalSource, has_weights, open_source, read_config, shard_names
from tests.support.hub_server import HubServer, Repository, commit

SMALL = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.json": "{}",
    "modeling_x.py": "X = 1\n",
}
HEAVY = (
    "pytorch_model.bin",
    "model.gguf",
    "consolidated.safetensors",
    "onnx/model.onnx",
    "original/weights.pth",
)


def make_repository(folder: Path, *, sharded: bool) -> Path:
    folder.mkdir(parents=True)
    for name, text in SMALL.items():
        (folder / name).write_text(text)
    for name in HEAVY:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"weights")
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return folder
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"model-{name}.safetensors")
    weight_map = {name: f"model-{name}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        name: make_repository(tmp_path / name, sharded=name == "sharded")
        for name in ("single", "sharded", "tag")
    }


@pytest.fixture
def hub(folders: dict[str, Path]) -> Iterator[HubServer]:
    (folders["tag"] / "config.json").write_text('{"model_type": "tagged"}')
    repositories = {
        "acme/single": Repository(folders["single"], revisions={"v1": folders["tag"]}),
        "acme/sharded": Repository(folders["sharded"]),
        "acme/gated": Repository(folders["single"], gated=True),
    }
    with HubServer(repositories) as server:
        yield server


class Client:
    """Runs code that has `source` with a cache of its own; the value of `result` comes back."""

    def __init__(self, url: str, home: Path) -> None:
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        self.environment = {**os.environ, **environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def run(self, code: str, model: str, **options: Any) -> Any:
        program = f"""
import json
from onboard.errors import OnboardError
from onboard.hub import open_source
source = open_source({model!r}, **{options!r})
try:
    {code}
except OnboardError as error:
    result = str(error)
print(json.dumps(result))
"""
        command = [sys.executable, "-c", program]
        process = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    return Client(hub.url, tmp_path / "hf")


LIST = "sorted(path.name for path in folder.rglob('*') if path.is_file())"


@pytest.mark.parametrize("model", ["single", "sharded"])
def test_config_and_code_first_weights_on_demand(
    model: str, hub: HubServer, client: Client, folders: dict[str, Path]
) -> None:
    code = f"folder = source.files(); result = [{LIST}, source.config(), source.revision]"
    names, config, revision = client.run(code, f"acme/{model}")
    index = ["model.safetensors.index.json"] if model == "sharded" else []
    assert names == sorted([*SMALL, *index])
    assert hub.downloads() == {*SMALL, *index}
    assert (config, revision) == ({"model_type": "llama"}, commit(folders[model]))
    shards = (
        ["model-a.safetensors", "model-b.safetensors"]
        if model == "sharded"
        else ["model.safetensors"]
    )
    assert client.run(f"folder = source.weights(); result = {LIST}", f"acme/{model}") == sorted(
        [*SMALL, *index, *shards]
    )
    assert hub.downloads() == {*SMALL, *index, *shards}


def test_offline_from_the_cache(hub: HubServer, client: Client) -> None:
    client.run("result = str(source.weights())", "acme/single")
    hub.requests.clear()
    code = "result = [source.config(), len(str(source.weights()))]"
    assert client.run(code, "acme/single", offline=True)[0] == {"model_type": "llama"}
    assert hub.requests == []


def test_offline_without_the_weights(hub: HubServer, client: Client) -> None:
    client.run("result = source.config()", "acme/sharded")
    assert client.run("result = source.config()", "acme/sharded", offline=True) == {
        "model_type": "llama"
    }
    message = client.run("result = str(source.weights())", "acme/sharded", offline=True)
    assert "acme/sharded (revision main) is not complete in the cache" in message


def test_revisions(client: Client, folders: dict[str, Path]) -> None:
    code = "result = [source.config()['model_type'], source.revision]"
    tagged = ["tagged", commit(folders["tag"])]
    assert client.run(code, "acme/single", revision="v1") == tagged
    assert client.run(code, "acme/single", revision=tagged[1]) == tagged
    assert client.run(code, "acme/single") == ["llama", commit(folders["single"])]
    assert "has no revision 'v2'" in client.run(code, "acme/single", revision="v2")


def test_weights_are_of_the_revision_of_the_config(
    hub: HubServer, client: Client, folders: dict[str, Path]
) -> None:
    """The branch is resolved once: it may move on before the weights are fetched."""
    client.run("result = [source.config(), str(source.weights())]", "acme/sharded")
    assert sum(request.endswith("/acme/sharded/revision/main") for request in hub.requests) == 1
    downloads = [request for request in hub.requests if "/resolve/" in request]
    assert downloads
    assert all(f"/resolve/{commit(folders['sharded'])}/" in request for request in downloads)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("acme/nonesuch", {}, "there is no model acme/nonesuch on http://127.0.0.1"),
        (
            "acme/gated",
            {},
            "access to acme/gated is restricted. Accept its terms at http://127.0.0.1",
        ),
        ("acme/single", {"offline": True}, "is not complete in the cache"),
        ("acme//x", {}, "there is no folder 'acme//x'"),
        ("-acme", {}, "'-acme' is neither a folder nor a Hub id"),
    ],
)
def test_failures_are_one_line(
    client: Client, model: str, options: dict[str, Any], message: str
) -> None:
    text = (
        client.run("result = source.config()", model, **options)
        if "//" not in model
        else open_error(model)
    )
    assert message in text
    assert "\n" not in text


def open_error(model: str) -> str:
    with pytest.raises(OnboardError) as caught:
        open_source(model)
    return str(caught.value)


def test_no_network(tmp_path: Path) -> None:
    client = Client("http://127.0.0.1:9", tmp_path / "hf")
    assert "http://127.0.0.1:9 cannot be reached for acme/x" in client.run(
        "result = source.config()", "acme/x"
    )


def test_the_cache_serves_when_the_network_is_down(
    hub: HubServer, client: Client, tmp_path: Path
) -> None:
    client.run("result = source.config()", "acme/single")
    down = Client("http://127.0.0.1:9", tmp_path / "hf")
    assert down.run("result = source.config()", "acme/single") == {"model_type": "llama"}


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:40], lambda _: b""])
def test_a_damaged_file_of_the_cache_is_named(
    client: Client, damage: Callable[[bytes], bytes]
) -> None:
    """The client gives it out for ever, unless it is deleted where it is."""
    folder = Path(client.run("result = str(source.weights())", "acme/single"))
    stored = (folder / "model.safetensors").resolve()
    stored.write_bytes(damage(stored.read_bytes()))
    read = "from onboard.graph.weight_load.safetensors_folder import Checkpoint as C"
    names = f"{read}; result = sorted(C(source.weights()).names())"
    assert f"Delete {stored}," in client.run(names, "acme/single")
    stored.unlink()
    assert client.run(names, "acme/single") == ["a", "b"]


def test_a_broken_hub_is_named(tmp_path: Path) -> None:
    """A repository whose id has no answer but an error page."""
    with HubServer({}) as server:
        server._api = lambda request, parts: (  # type: ignore[method-assign]
            request.send_response(400),
            request.send_header("Content-Length", "0"),
            request.end_headers(),
        )
        message = Client(server.url, tmp_path / "hf").run("result = source.config()", "acme/x")
    assert f"{server.url} failed for acme/x" in message


class Unsteady(HubServer):
    """Fails the first time that it is asked for a file of weights, and after that `lasting` times."""

    def __init__(
        self, repositories: dict[str, Repository], failure: int | None, lasting: int
    ) -> None:
        super().__init__(repositories)
        self.failure, self.left = failure, 1 + lasting
        """A status; None: the answer ends early."""

    def _resolve(
        self, request: BaseHTTPRequestHandler, name: str, revision: str, path: str
    ) -> None:
        is_next = path.endswith(".safetensors") and request.command == "GET" and self.left > 0
        if not is_next:
            super()._resolve(request, name, revision, path)
            return
        self.left -= 1
        request.send_response(200 if self.failure is None else self.failure)
        request.send_header("Content-Length", "0" if self.failure else "1000")
        request.end_headers()
        request.close_connection = True


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize("failure", [429, 500, 503, None])
@pytest.mark.parametrize("what", ["source.tensors.keys()", "os.listdir(source.weights())"])
def test_a_hub_that_fails_once_is_asked_again(
    folders: dict[str, Path], tmp_path: Path, failure: int | None, what: str
) -> None:
    with Unsteady({"acme/single": Repository(folders["single"])}, failure, 0) as server:
        client = Client(server.url, tmp_path / "hf")
        found = client.run(f"import os; result = sorted({what})", "acme/single")
        assert server.left == 0
    expected = {"a", "b"} if "tensors" in what else {"model.safetensors"}
    assert isinstance(found, list), found
    assert expected <= set(found)


@pytest.mark.parametrize(("failure", "hint"), [(503, "Try again"), (403, "what HF_TOKEN may read")])
def test_what_does_not_pass_is_one_line(
    folders: dict[str, Path], tmp_path: Path, failure: int, hint: str
) -> None:
    with Unsteady({"acme/single": Repository(folders["single"])}, failure, 99) as server:
        client = Client(server.url, tmp_path / "hf")
        message = client.run("result = list(source.tensors)", "acme/single")
        assert server.left >= 95, "it is asked three times at most"
    assert f"{server.url} failed for acme/single" in message
    assert message.endswith(hint)
    assert ".. " not in message


def test_local_folder(folders: dict[str, Path]) -> None:
    source = open_source(str(folders["sharded"]))
    assert isinstance(source, LocalSource)
    assert source.revision is None
    assert source.config() == {"model_type": "llama"}
    assert source.files() == source.weights() == folders["sharded"]
    with pytest.raises(OnboardError, match="has no revision 'v1'"):
        open_source(str(folders["single"]), revision="v1")
    with pytest.raises(OnboardError, match="is a file"):
        open_source(str(folders["single"] / "config.json"))


def test_missing_shards(folders: dict[str, Path]) -> None:
    source = open_source(str(folders["sharded"]))
    assert has_weights(source.files())
    (folders["sharded"] / "model-a.safetensors").unlink()
    assert not has_weights(source.files())
    with pytest.raises(OnboardError, match=r"lacks model-a\.safetensors, which its index names"):
        source.weights()
    (folders["sharded"] / "model-b.safetensors").unlink()
    with pytest.raises(OnboardError, match=r"lacks model-a\.safetensors and 1 more files"):
        source.weights()


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 3, "*.safetensors"],
)
def test_an_index_stays_in_its_folder(folders: dict[str, Path], name: Any) -> None:
    (folders["sharded"] / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": name}})
    )
    with pytest.raises(OnboardError, match="which is no safetensors file beside it"):
        shard_names(folders["sharded"])


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}'])
def test_a_damaged_index(folders: dict[str, Path], text: str) -> None:
    (folders["sharded"] / "model.safetensors.index.json").write_text(text)
    with pytest.raises(OnboardError, match="is not an index|is not valid JSON"):
        shard_names(folders["sharded"])


@pytest.mark.parametrize("name", [3, None, "", "a b", "../x", "x'", "x\n", "-x"])
def test_model_types_that_are_no_names(tmp_path: Path, name: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(OnboardError, match="which is not a name"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt-sw3", "qwen2_5_vl", "blip-2", "qwen2.5"])
def test_model_types(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    assert read_config(tmp_path) == {"model_type": name}


OWN = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


@pytest.mark.parametrize(
    ("name", "plain"),
    [("My Model", "My_Model"), ("tiny 1.5+", "tiny_1_5_"), ("3b-chat", "_3b-chat"), ("own", "own")],
)
def test_people_name_models_with_code_of_their_own_as_they_like(
    tmp_path: Path, name: str, plain: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **OWN}))
    assert read_config(tmp_path) == {"model_type": plain, **OWN}


@pytest.mark.parametrize("name", ["../x", "a/b", "x'", "x\n", " x", "x" * 101])
def test_but_not_with_what_leads_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **OWN}))
    with pytest.raises(OnboardError, match="which is not a name"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('class A:\n    x = 1\n    model_type = "odd-1"', "odd-1"),
        ('class A:\n    model_type: str = "odd"', "odd"),
        ('class B:\n    model_type = "base"\nclass A(B):\n    pass', "base"),
        ('class B:\n    model_type = "base"\nclass A(B):\n    model_type = "odd"', "odd"),
        ('class A:\n    model_type = "llama"', "llama_own_code"),
    ],
)
def test_a_config_class_declares_the_type(tmp_path: Path, text: str, found: str) -> None:
    classes = {"AutoConfig": "configuration_x.A", "AutoModelForCausalLM": "modeling_x.M"}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": classes}))
    (tmp_path / "configuration_x.py").write_text(text)
    assert read_config(tmp_path)["model_type"] == found


@pytest.mark.parametrize(
    "named", ["other/repo--configuration_x.A", "configuration_x.B", "../a.A", 3]
)
def test_a_class_elsewhere_declares_none(tmp_path: Path, named: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": named}}))
    (tmp_path / "configuration_x.py").write_text('class A:\n    model_type = "odd"')
    with pytest.raises(OnboardError, match="has no model_type, and its auto_map"):
        read_config(tmp_path)
