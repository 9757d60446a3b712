"""Whatever is wrong with the input: one line, the right exit code, and no file changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import gpu
from onboard.cli.main import run
from onboard.errors import ConsentRequiredError
from onboard.workflow.phase import RunOptions
from onboard.workflow.phase_runner import load_phase, open_run
from tests.support.checkpoints import edit_config, save_checkpoint, tree
from tests.support.hub_server import HubServer, Repository
from tests.support.warm import Warm, started

Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("healthy") / "tiny", shard_size="20KB")


@pytest.fixture
def checkpoint(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "tiny"))


@pytest.fixture(params=["empty", "used"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A root that does not exist yet, and one that has content."""
    folder = tmp_path / "root"
    if request.param == "used":
        for name in (
            "models/modeling_llama.py",
            "registry/models.yaml",
            ".onboard/other/state.json",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"# {name}\n")
    return folder


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 1
    return found


def poison(folder: Path, value: float) -> None:
    tensors = load_file(shards(folder)[-1])
    next(iter(tensors.values())).view(-1)[3] = value
    save_file(tensors, shards(folder)[-1], {"format": "pt"})


def untie(folder: Path) -> None:
    """Give a model whose config ties its head to the embedding another head."""
    edit_config(folder, tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    change_tensors(folder, lambda t: t.update({"lm_head.weight": 2 * t[name]}))


def truncate(folder: Path) -> None:
    with shards(folder)[0].open("r+b") as file:
        file.truncate(shards(folder)[0].stat().st_size - 100)


def truncate_inside_header(folder: Path) -> None:
    with shards(folder)[0].open("r+b") as file:
        file.truncate(50)


def escape_folder(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../tiny2/model.safetensors")
    path.write_text(json.dumps(index))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the tensors of all shards, changed, as one file."""
    tensors = {
        name: tensor for shard in shards(folder) for name, tensor in load_file(shard).items()
    }
    change(tensors)
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantise_to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


def save_encoder(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    save_checkpoint(folder, "bert", is_decoder=False)


PARTS = ("blocks", "scales")
UP = "model.layers.1.mlp.up_proj.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

BROKEN: dict[str, tuple[Break, int, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), 1, "has no config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{'a': 1}") and None,
        1,
        "is not valid JSON",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]") and None,
        1,
        "holds a list",
    ),
    "config nests too deep": (
        lambda f: (f / "config.json").write_text("[" * 99999) and None,
        1,
        "is not valid JSON",
    ),
    "config is binary": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\0") and None,
        1,
        "is not valid JSON",
    ),
    "no model_type": (lambda f: edit_config(f, model_type=None), 1, "has no model_type"),
    "unknown model_type": (
        lambda f: edit_config(f, model_type="nonesuch"),
        1,
        "does not know the model type",
    ),
    "model_type with code": (
        lambda f: edit_config(f, model_type="x'); import os; ('"),
        1,
        "is not a name",
    ),
    "model_type with a path": (
        lambda f: edit_config(f, model_type="../../evil"),
        1,
        "is not a name",
    ),
    "activation with code": (
        lambda f: edit_config(f, hidden_act='silu"); import os; ("'),
        1,
        "cannot build",
    ),
    "rope type with code": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "'\n\nevil()"}),
        1,
        "cannot build",
    ),
    "text for a number": (lambda f: edit_config(f, hidden_size="32; evil()"), 1, "cannot build"),
    "negative vocabulary": (lambda f: edit_config(f, vocab_size=-1), 1, "has vocab_size -1"),
    "architecture with code": (
        lambda f: edit_config(f, architectures=["LlamaForCausalLM", "x'); evil("]),
        1,
        "which are no names",
    ),
    "architectures are no list": (
        lambda f: edit_config(f, architectures="LlamaForCausalLM"),
        1,
        "which are no names",
    ),
    "encoder": (
        lambda f: edit_config(f, model_type="bert", architectures=["BertForMaskedLM"]),
        1,
        "BertForMaskedLM is not",
    ),
    "encoder without architectures": (
        lambda f: edit_config(f, model_type="modernbert", architectures=None),
        1,
        "is not a",
    ),
    "encoder that transformers would take for a decoder": (
        save_encoder,
        1,
        "is not causal",
    ),
    "encoder-decoder": (
        lambda f: edit_config(f, model_type="t5", is_encoder_decoder=True),
        1,
        "encoder-decoder",
    ),
    "remote code": (
        lambda f: edit_config(
            f, model_type="nonesuch", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
        ),
        3,
        "--trust-remote-code",
    ),
    "truncated weights": (truncate, 1, "is cut off"),
    "truncated header": (truncate_inside_header, 1, "is cut off"),
    "missing shard": (lambda f: shards(f)[0].unlink(), 1, "lacks model-00001"),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("model*")] and None,
        1,
        "has no safetensors weights",
    ),
    "weight files without a tensor": (
        lambda f: change_tensors(f, dict.clear),
        1,
        "have no tensor in them",
    ),
    "NaN": (lambda f: poison(f, float("nan")), 1, "holds NaN"),
    "infinity": (lambda f: poison(f, float("-inf")), 1, "holds infinity"),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(UP)), 1, f"it has no {UP}"),
    "extra tensor": (
        lambda f: change_tensors(f, lambda t: t.update({"model.layers.1.mlp.bias": torch.ones(4)})),
        1,
        "the model has no use for model.layers.1.mlp.bias",
    ),
    "a head of its own that is tied": (
        untie,
        1,
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({UP: torch.ones(3, 5)})),
        1,
        f"{UP} is [3, 5], not [48, 32]",
    ),
    "integer weights": (
        lambda f: change_tensors(f, lambda t: t.update({UP: t[UP].to(torch.int32)})),
        1,
        f"{UP} is int32, not floating-point numbers",
    ),
    "fp8 by its config": (
        lambda f: edit_config(f, quantization_config=FP8),
        1,
        "its config.json says that it is quantised (fp8, 128 x 128 blocks), and no tensor is",
    ),
    "fp8 by its tensors": (
        lambda f: change_tensors(f, quantise_to_fp8),
        1,
        "the checkpoint is quantised (",
    ),
    "MXFP4 by its names": (
        lambda f: change_tensors(
            f,
            lambda t: t.update(
                {
                    f"model.layers.0.mlp.experts.down_proj_{part}": torch.zeros(
                        2, dtype=torch.uint8
                    )
                    for part in PARTS
                }
            ),
        ),
        1,
        "the checkpoint is quantised (mxfp4",
    ),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0", "model": 3}') and None,
        1,
        "does not load",
    ),
    "generation config that is refused": (
        lambda f: (f / "generation_config.json").write_text('{"max_new_tokens": -4}') and None,
        1,
        "transformers refuses",
    ),
    "generation config is no JSON": (
        lambda f: (f / "generation_config.json").write_text("{") and None,
        1,
        "transformers refuses",
    ),
    "end beyond the vocabulary": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [97, 98]}') and None,
        1,
        "eos_token_id is [97, 98], and the vocabulary has 97 tokens: no text would end",
    ),
    "index that leaves the folder": (escape_folder, 1, "is no safetensors file beside it"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoint(
    case: str, checkpoint: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it, code, message = BROKEN[case]
    break_it(checkpoint)
    assert_refused([str(checkpoint), "--root", str(root)], root, code, message, capsys)


def test_state_of_an_earlier_run_survives(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    assert run([str(checkpoint), "--root", str(root), "--until", "survey"]) == 0
    poison(checkpoint, float("nan"))
    assert_refused([str(checkpoint), "--root", str(root)], root, 1, "holds NaN", capsys)


def test_model_larger_than_memory(
    checkpoint: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus = [gpu.Gpu("small", 40_000, 40_000), gpu.Gpu("large", 10**9, 10**9)]
    monkeypatch.setattr(gpu, "list_gpus", lambda: gpus)
    size = sum(
        tensor.nbytes for shard in shards(checkpoint) for tensor in load_file(shard).values()
    )
    assert size > 40_000, (
        "one of the two, which a run uses, is too small; both together are not asked"
    )
    message = (
        f"This model requires ~{gpu.gigabytes(size)} GB but the system only has 4e-05 GB on the one of 2 GPUs "
        "that a run uses. "
        "Onboarding is likely to fail at the run phase. Use --yes"
    )
    assert_refused([str(checkpoint), "--root", str(root)], root, 3, message, capsys)
    assert run([str(checkpoint), "--root", str(root), "--until", "gather", "--yes"]) == 0


def test_half_the_memory_in_half_the_precision(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(
        tensor.nbytes for shard in shards(checkpoint) for tensor in load_file(shard).values()
    )
    monkeypatch.setattr(gpu, "system_memory", lambda: gpu.Memory(size // 2, size // 2))
    context = open_run(str(checkpoint), tmp_path / "root", RunOptions(device="cpu", weights=True))
    with pytest.raises(ConsentRequiredError):
        load_phase("gather").run(context)
    context.options.dtype = "bfloat16"
    assert "fits in" in load_phase("gather").run(context).summary
    context.options.dtype, context.options.weights = "float32", False
    assert "exceeds" in load_phase("gather").run(context).summary, "what needs no weights goes on"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a system without a GPU")
def test_no_gpu(checkpoint: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(
        [str(checkpoint), "--root", str(root), "--device", "cuda"], root, 2, "has no GPU", capsys
    )


def test_root_is_a_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("text")
    said = {tmp_path / "file": "is a file", tmp_path / "file" / "below": "is not a folder"}
    for root, message in said.items():
        assert run([str(checkpoint), "--root", str(root)]) == 2
        assert_one_line(capsys.readouterr().err, message)
    assert (tmp_path / "file").read_text() == "text"


def test_read_only_root(
    checkpoint: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert_refused([str(checkpoint), "--root", str(root)], root, 1, "cannot be written", capsys)


def test_no_such_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(["/no/such/folder", "--root", str(root)], root, 2, "there is no folder", capsys)
    assert_refused(["a b", "--root", str(root)], root, 2, "neither a folder nor a Hub id", capsys)


def assert_refused(
    arguments: list[str], root: Path, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(root)
    capsys.readouterr()
    assert run(arguments) == code
    assert_one_line(capsys.readouterr().err, message)
    assert tree(root) == before
    assert root.exists() == bool(before)


def assert_one_line(stderr: str, message: str) -> None:
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("onboard: ")
    assert message in last
    assert "Traceback" not in stderr
    assert "internal error" not in stderr


@pytest.fixture(scope="module")
def hub(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    broken = {
        name: Path(shutil.copytree(healthy, tmp_path_factory.mktemp(name) / "tiny"))
        for name in ("nan", "short")
    }
    poison(broken["nan"], float("nan"))
    shards(broken["short"])[0].unlink()
    repositories = {"acme/tiny": Repository(healthy), "acme/gated": Repository(healthy, gated=True)}
    repositories |= {f"acme/{name}": Repository(folder) for name, folder in broken.items()}
    with HubServer(repositories) as server:
        yield server


@pytest.fixture(scope="module")
def on_hub(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """What the libraries read of the environment as they are imported is told to the process that
    commands are forked from; their cache is one, and nothing whole is in it.
    """
    home = str(tmp_path_factory.mktemp("cache") / "hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        with started(HF_ENDPOINT=hub.url, HF_HOME=home) as warm:
            yield warm


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["acme/nonesuch"], 2, "there is no model acme/nonesuch"),
        (["acme/gated"], 1, "access to acme/gated is restricted"),
        (["acme/tiny", "--revision", "v9"], 1, "has no revision 'v9'"),
        (["acme/tiny", "--offline"], 2, "is not complete in the cache"),
        (["acme/nan"], 1, "holds NaN"),
        (["acme/short"], 1, "lacks model-00001"),
    ],
)
@pytest.mark.parametrize("root", ["used"], indirect=True)
def test_hub_refuses(
    on_hub: Warm, arguments: list[str], code: int, message: str, root: Path
) -> None:
    before = tree(root)
    process = on_hub("onboard", *arguments, "--root", root, "--json")
    assert process.returncode == code
    assert_one_line(process.stderr, message)
    document = json.loads(process.stdout)
    assert document["status"] == "failed"
    assert message in document["error"]["message"]
    assert tree(root) == before


def test_no_network(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    process = subprocess.run(
        [sys.executable, "-m", "onboard", "acme/tiny", "--root", str(tmp_path / "root")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert process.returncode == 1
    assert_one_line(process.stderr, "cannot be reached")
    assert not (tmp_path / "root").exists()
