"""The kinds of input: which files are drawn, and what is asked of onboard with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from onboard.analysis.repository_source import survey_code
from onboard.analysis.spec import ModelSpec
from onboard.cli.main import run
from onboard.composition import compose
from onboard.errors import OnboardError
from onboard.registry import (
    RegistryEntry,
    all_entries,
    claim_names,
    load_entries,
    load_standalone,
    models_path,
)
from onboard.registry_text import insert_entry, set_fields
from onboard.workflow.phases.gather import require_causal_lm, require_consent_for_code
from tests.fuzz.mutations import as_json, damaged, documents, values

CORPUS = Path(__file__).parent / "corpus"
Files = dict[str, bytes]
Strategy = st.SearchStrategy[Files]


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    drawn: Callable[[], Strategy]
    """Paths below a temporary folder, `model/` and `root/` in it, and what they hold."""
    ask: Callable[[Path], int]
    """Is given that folder; returns an exit code, or raises `OnboardError`."""


def gathered(place: Path) -> int:
    """The phase gather, as the command line has it."""
    model, root = place / "model", place / "root"
    return run([str(model), "--root", str(root), "--until", "gather", "--device", "cpu"])


@cache
def configs() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_bytes()) for path in CORPUS.glob("config/*.json")}


@cache
def checkpoint() -> dict[str, bytes]:
    """The files of a tiny llama that passes, weights and tokenizer among them."""
    import tempfile

    from tests.support.checkpoints import save_checkpoint

    config = {key: value for key, value in configs()["llama"].items() if key != "model_type"}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), **config | {"vocab_size": 72})
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def in_model(**files: bytes) -> Files:
    return {f"model/{name}": data for name, data in files.items()}


def _config_keys() -> tuple[str, ...]:
    from transformers import LlamaConfig, MixtralConfig

    inner = ("sub_configs", "attribute_map", "use_return_dict", "quantization_config", "auto_map")
    more = ("text_config", "rope_scaling", "rope_parameters", "layer_types", "_name_or_path")
    return (*LlamaConfig().to_dict(), *MixtralConfig().to_dict(), *inner, *more)


def config_files() -> Strategy:
    """config.json of models of several types, beside weights of one."""
    base = in_model(**checkpoint())
    drawn = documents(list(configs().values()), _config_keys()).map(as_json)
    raw = damaged([as_json(each) for each in configs().values()])
    return (drawn | drawn | drawn | raw).map(lambda text: base | {"model/config.json": text})


def _header(document: Any, data: int) -> bytes:
    text = as_json(document)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def safetensors_files() -> Strategy:
    """Headers of a file of weights: values, lengths, bytes."""
    files = checkpoint()
    data = files["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), len(data) - 8 - length
    wrong = documents([header]).map(lambda document: _header(document, rest))
    lengths = st.integers(0, 2**64 - 1).map(lambda size: size.to_bytes(8, "little") + data[8:])
    raw = damaged([data[: 8 + length]]).map(lambda head: head + data[8 + length :])
    base = in_model(**files)
    return (wrong | wrong | lengths | raw).map(
        lambda file: base | {"model/model.safetensors": file}
    )


def index_files() -> Strategy:
    """Indexes of a sharded checkpoint."""
    files = dict(checkpoint())
    shard = files.pop("model.safetensors")
    length = int.from_bytes(shard[:8], "little")
    names = [name for name in json.loads(shard[8 : 8 + length]) if name != "__metadata__"]
    file = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file)}
    base = in_model(**files | {file: shard})
    drawn = documents([index]).map(as_json) | damaged([as_json(index)])
    return drawn.map(lambda text: base | {"model/model.safetensors.index.json": text})


def tokenizer_files() -> Strategy:
    """What lies beside a config: the tokenizer's files, and how text is generated."""
    files = checkpoint() | {"generation_config.json": as_json({"eos_token_id": 2, "top_p": 0.9})}
    names = sorted(
        name for name in files if name.endswith(".json") and name not in ("config.json",)
    )
    keys = ("auto_map", "tokenizer_class", "added_tokens_decoder", "chat_template", "eos_token_id")

    def one(name: str) -> Strategy:
        document = json.loads(files[name])
        drawn = documents([document], keys).map(as_json) | damaged([files[name]])
        return drawn.map(lambda text: in_model(**files | {name: text}))

    return st.sampled_from(names).flatmap(one)


def spec_files() -> Strategy:
    text = (CORPUS / "spec" / "llama.yaml").read_bytes()
    document = yaml.safe_load(text)
    drawn = documents([document]).map(lambda each: yaml.safe_dump(each, allow_unicode=True))
    return (drawn.map(_encoded) | damaged([text])).map(lambda data: {"root/spec.yaml": data})


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def read_spec(place: Path) -> int:
    """Read a spec; what is read can be written, and is the same when it is read again."""
    from onboard.workflow.files import FileWriter

    spec = ModelSpec.from_yaml(FileWriter().read(place / "root" / "spec.yaml"))
    again = ModelSpec.from_yaml(spec.to_yaml())
    assert again.to_yaml() == spec.to_yaml()
    return 0


def registry_files() -> Strategy:
    """models.yaml and the configs that its entries name."""
    texts = {path.name: path.read_bytes() for path in CORPUS.glob("registry/*.yaml")}

    def one(name: str) -> Strategy:
        document = yaml.safe_load(texts[name])
        drawn = documents([document]).map(lambda each: yaml.safe_dump(each, sort_keys=False))
        files = {
            f"root/registry/{'' if each == 'models.yaml' else 'configs/'}{each}": text
            for each, text in texts.items()
        }
        path = next(path for path in files if path.endswith(f"/{name}"))
        return (drawn.map(_encoded) | damaged([texts[name]])).map(lambda text: files | {path: text})

    return st.sampled_from(sorted(texts)).flatmap(one)


NEW = RegistryEntry(name="new/model", config_id="new", yaml_extra=["new.yaml"])


def use_registry(place: Path) -> int:
    """List, compose, claim a name; an entry that is added, or changed, is read again as it is."""
    root = place / "root"
    entries = load_entries(root)
    for entry in entries:
        _try(lambda entry=entry: compose(entry, root))
        _try(lambda entry=entry: load_standalone(root / "registry" / "configs" / entry.standalone))
    all_entries(root)
    _try(lambda: claim_names("new/model", root))
    text = insert_entry(models_path(root).read_text("utf-8"), NEW)
    (place / "root" / "registry" / "models.yaml").write_text(text, "utf-8")
    assert load_entries(root) == [*entries, *([NEW] if NEW not in entries else [])]
    changed = set_fields(text, NEW.name, {"status": "passed"})
    assert set_fields(changed, NEW.name, {"status": "passed"}) == changed
    return 0


def _try(do: Callable[[], object]) -> None:
    with suppress(OnboardError):
        do()


def source_files() -> Strategy:
    """Code of a repository, which is read and not run."""
    texts = {path.name: path.read_bytes() for path in CORPUS.glob("source/*.py")}
    config = configs()["own_code"]
    maps = documents([config], ("auto_map",)) | st.just(config) | st.just(config)

    def one(name: str) -> Strategy:
        return st.tuples(damaged([texts[name]]), maps).map(
            lambda drawn: in_model(**texts | {name: drawn[0], "config.json": as_json(drawn[1])})
        )

    return st.sampled_from(sorted(texts)).flatmap(one)


def look_at_code(place: Path) -> int:
    """Ask for consent, then look at the code; nobody consents."""
    from onboard.hub import read_config

    config = read_config(place / "model")
    try:
        require_consent_for_code(config, place / "model", trusted=False)
    finally:
        survey_code(place / "model", config)
    require_causal_lm(config)
    return 0


def settings() -> Strategy:
    from onboard.config import RuntimeConfig

    document = RuntimeConfig().model_dump(mode="json")
    return documents([document]).map(lambda each: {"root/settings.json": as_json(each)})


def use_settings(place: Path) -> int:
    from onboard.config import RuntimeConfig, with_settings
    from onboard.runtime.limits import ON_CPU, settled

    found = json.loads((place / "root" / "settings.json").read_bytes())
    if not isinstance(found, dict):
        return 0
    runtime = with_settings(RuntimeConfig(), found)
    settled(runtime, object(), 0, ON_CPU)
    return 0


KINDS = {
    "config": Kind(config_files, gathered),
    "safetensors": Kind(safetensors_files, gathered),
    "index": Kind(index_files, gathered),
    "tokenizer": Kind(tokenizer_files, gathered),
    "spec": Kind(spec_files, read_spec),
    "registry": Kind(registry_files, use_registry),
    "source": Kind(source_files, look_at_code),
    "settings": Kind(settings, use_settings),
}

__all__ = ["KINDS", "Files", "Kind", "values"]
