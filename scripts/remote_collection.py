"""Small checkpoints of models with code of their own, as public repositories have it.

    python scripts/remote_collection.py fill CLONES OUT [NAME ...]
    PYTHONPATH=<transformers of their year> python scripts/remote_collection.py weights OUT NAME ...
    PYTHONPATH=<transformers of their year> python scripts/remote_collection.py judge OUT NAME LOGITS
    python scripts/remote_collection.py check OUT [NAME ...]

`remote_collection.yaml` names repository, path and commit of each. CLONES is a folder with a git
repository `<owner>+<name>` of each, which the reader has cloned: nothing is fetched here, and none
of the files become part of this project. `fill` writes code and a small config; `weights` writes
random weights, from the repository's own class, with the transformers that it was written for;
`judge` writes the logits of that class for the tokens in LOGITS (`ids`) beside them (`logits`),
those of each token by the text up to it where the table says `by_prefix`. Where it says
`loaded_alone`, the class sets first values of other shapes than its checkpoints have; `kernels_of`
names a package for whose kernels the class casts to half precision, which is left out in float32, or
asserts that it is that, on a GPU, which is not asked. `modules` names those of a package that become
files of one folder, with what they import of it but for what is below `installed`.

`check` does all of it for models that are filled: it runs the whole command, generates with the
model file that came of it, and has the repository's class judge the texts. It prints a line a
model: onboarded, refused and why, WRONG, or not judged, where that class itself does not run; "not
as expected" where the table says otherwise, and then the exit code is 1. OLD_TRANSFORMERS is a
folder with the transformers of the years, a folder each (`pip install --target
$OLD_TRANSFORMERS/4.33 transformers==4.33.3`), and of what models need besides (einops, ...) in
`common`, plain code in place of packages whose kernels need a GPU (fla's `chunk_simple_gla`,
mamba_ssm's `rmsnorm_fn`); what `kernels_of` names has plain code in a folder of its name. Where
there is no folder of a year, the installed one is taken.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".yaml")
_WORDS = 60
"""Tokens that the tokenizer of small checkpoints has."""
_PROMPTS, _TOKENS = (1, 9, 40, 110), 132
"""Lengths of prompts, and of each with what is generated behind it."""
_BASE_FIELDS = {
    *("architectures", "auto_map", "model_type", "attn_implementation", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "transformers_version", "torch_dtype"),
    "_name_or_path",
}
"""Fields of config.json that the base of a config class takes."""
_SAME = 1e-4
"""Largest error of a text's log-probabilities, relative."""
_SECONDS = 900


def table() -> dict[str, dict[str, Any]]:
    """Return what is known of each model of the collection."""
    import yaml

    return dict(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def fill(clones: Path, out: Path, *names: str) -> None:
    """Write code and config of the named models, or of all."""
    for name, entry in table().items():
        if not names or name in names:
            _fill_one(clones, out / name, entry)


def _fill_one(clones: Path, folder: Path, entry: dict[str, Any]) -> None:
    clone = clones / entry["repository"].replace("/", "+")
    git_folder = clone / "repo" if (clone / "repo").is_dir() else clone
    renamed = entry.get("rename", {})
    modules = {
        Path(file).stem: Path(renamed.get(file, file)).stem
        for file in entry["files"]
        if file.endswith(".py")
    }
    of_config, _, _ = entry["config"].get("auto_map", {}).get("AutoConfig", "").partition(".")
    modules.setdefault(of_config or "-", of_config)
    for file in entry["files"]:
        path = f"{entry['path']}/{file}" if "path" in entry else file
        command = ["git", "-C", str(git_folder), "show", f"{entry['commit']}:{path}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        target = folder / renamed.get(file, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_with_neighbours(text, modules), encoding="utf-8")
    if "modules" in entry:
        _fill_flat(git_folder, folder, entry)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config.pop("quantization_config", None)
    config |= entry["config"]
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if config.get(name) is not None and config[name] > _WORDS:
            config[name] = token
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    _write_config_class(folder, config)


def _fill_flat(git_folder: Path, folder: Path, entry: dict[str, Any]) -> None:
    """Write the modules of a package that an entry names, and what they import of it, in one folder."""
    sys.path.append(str(TABLE.parents[1]))  # run as a file, it finds no neighbour
    from scripts.flat_packages import flat_package

    @functools.cache
    def read(path: str) -> str | None:
        place = f"{entry['commit']}:{entry['path']}/{path}"
        command = ["git", "-C", str(git_folder), "show", place]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if found.returncode else found.stdout

    folder.mkdir(parents=True, exist_ok=True)
    package, installed = Path(entry["path"]).name, entry.get("installed", ())
    for name, text in flat_package(read, package, entry["modules"], installed).items():
        (folder / name).write_text(text, encoding="utf-8")


def _write_config_class(folder: Path, config: dict[str, Any]) -> None:
    """Write the config class that auto_map names, where the repository has the model's file alone:
    it takes the fields of its config.
    """
    module, _, name = config["auto_map"].get("AutoConfig", "").partition(".")
    if not name or (folder / f"{module}.py").exists():
        return
    fields = {key: value for key, value in config.items() if key not in _BASE_FIELDS}
    taken = "".join(f", {key}={value!r}" for key, value in fields.items())
    lines = [
        "from transformers import PretrainedConfig",
        "",
        f"class {name}(PretrainedConfig):",
        f"    model_type = {config['model_type']!r}",
        '    keys_to_ignore_at_inference = ["past_key_values"]',
        "",
        f"    def __init__(self{taken}, **kwargs):",
        *(f"        self.{key} = {key}" for key in fields),
        "        super().__init__(**kwargs)",
    ]
    (folder / f"{module}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_neighbours(text: str, modules: dict[str, str]) -> str:
    """Import modules of the same folder, by their new names, and transformers by its name where a
    file is from its own tree, as code on the Hub does: config classes, too, that are not beside it.
    """
    for old, new in modules.items():
        here = rf"^([ \t]*)from (?!transformers\b)\.*(?:\w+\.)*{old} import"
        text = re.sub(here, rf"\1from .{new} import", text, flags=re.M)
    text = re.sub(r"^([ \t]*)from \.\.\.(?=\w)", r"\1from transformers.", text, flags=re.M)
    own = "|".join(modules) or "-"
    absent = rf"^from \.(?!(?:{own})\b)(configuration_(\w+)) import"
    return re.sub(absent, r"from transformers.models.\2.\1 import", text, flags=re.M)


def weights(out: Path, *names: str) -> None:
    """Write random weights of the named models."""
    for name in names:
        try:
            _save_weights(out / name)
        except Exception as error:  # the next one may work
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")


def _save_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = _own_model(folder)
    model.tie_weights()  # as loading does, whatever the constructor has left
    generator = torch.Generator().manual_seed(1)
    seen: dict[int, str] = {}
    tensors = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, tensor in model.state_dict(keep_vars=True).items():
        if seen.setdefault(id(tensor), key) == key:
            if key in parameters:
                tensor.data.copy_(_random(key, tensor, generator))
            tensors[key] = tensor.detach().float().contiguous().clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    print(folder.name, len(tensors), "tensors")


def stand_in(folder: Path) -> None:
    """Write a weight file of one tensor, for a model whose own class cannot be made: why it is refused
    is for its code to say.
    """
    import torch
    from safetensors.torch import save_file

    save_file({"none": torch.zeros(1)}, str(folder / "model.safetensors"))


def _random(key: str, tensor: Any, generator: Any) -> Any:
    import torch

    if tensor.dim() > 1:
        return torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
    center = 0.0 if key.endswith("bias") else 1.0
    return torch.randn(tensor.shape, generator=generator) * 0.3 + center


def judge(out: Path, name: str, logits: Path) -> None:
    """Add the logits [batch, length, vocabulary] of the repository's own class to a file."""
    import torch
    from safetensors.torch import load_file, save_file

    model = _own_model(out / name)
    own = model.state_dict()
    loaded = load_file(str(out / name / "model.safetensors"))
    missing = [
        key for key in model.load_state_dict(loaded, strict=False).missing_keys if key in own
    ]
    print("not in the file:", missing)
    model.tie_weights()
    ids = load_file(str(logits))["ids"]
    model = model.float().eval()
    with torch.no_grad():  # text by text: some code takes several only with their mask
        of_last = _whole(model, ids[:1]).shape[1] == 1
        of_text = _by_prefix if of_last or table()[name].get("by_prefix") else _whole
        texts = [of_text(model, text[None]) for text in ids]
    save_file({"ids": ids, "logits": torch.cat(texts).contiguous()}, str(logits))


def _whole(model: Any, text: Any) -> Any:
    """Return the logits of a text, [1, length, vocabulary], or [1, 1, vocabulary] of its last token
    where its class gives no others.
    """
    taken = inspect.signature(model.forward).parameters.values()
    caches = any(item.name == "use_cache" or item.kind is item.VAR_KEYWORD for item in taken)
    how = {"use_cache": False} if caches else {}
    try:
        output = model(input_ids=text, **how)
    except TypeError:  # it wants images, which its language model does without
        output = model.language_model(input_ids=text, **how)
    except AttributeError:  # it wants to be told that all tokens count
        output = model(input_ids=text, attention_mask=text.new_ones(text.shape), **how)
    except RuntimeError:  # it wants to be told where its tokens are
        output = model(input_ids=text, position_ids=_positions(text), **how)
    if isinstance(output, (tuple, dict)) and not hasattr(output, "logits"):
        parts = output if isinstance(output, tuple) else [output["logits"]]
        size = model.config.vocab_size
        output = next(
            item
            for item in parts
            if hasattr(item, "logits") or getattr(item, "shape", (0,))[-1:] == (size,)
        )
    logits = getattr(output, "logits", output)
    return logits.float() if logits.dim() == 3 else logits[:, None].float()


def _positions(text: Any) -> Any:
    import torch

    return torch.arange(text.shape[1]).expand_as(text)


def _by_prefix(model: Any, text: Any) -> Any:
    """Return of each token the last logits of the text up to it: what comes later changes what a
    model whose tables depend on the text's length says of earlier tokens.
    """
    import torch

    rows = [_whole(model, text[:, :end])[:, -1:] for end in range(1, text.shape[1] + 1)]
    return torch.cat(rows, dim=1)


def check(out: Path, *names: str) -> None:
    """Onboard and judge the named models, or all; print a line a model."""
    found = [
        _check_one(out, name, entry)
        for name, entry in table().items()
        if not names or name in names
    ]
    sys.exit(not all(found))


def _check_one(out: Path, name: str, entry: dict[str, Any]) -> bool:
    start, root = time.monotonic(), Path(tempfile.mkdtemp(prefix=f"{name}-"))
    found, expected = (
        _verdict(out, name, entry, root),
        entry.get("expect", "onboarded"),
    )
    as_expected = _is_expected(found, expected)
    said = "" if as_expected else f"; not as expected ({expected}), see {root}"
    print(f"{name}: {found}, {time.monotonic() - start:.0f} s{said}", flush=True)
    if as_expected:
        shutil.rmtree(root)
    return as_expected


def _is_expected(found: str, expected: str) -> bool:
    kind, _, reason = expected.partition(": ")
    return found.startswith(kind) and reason in found


def _verdict(out: Path, name: str, entry: dict[str, Any], root: Path) -> str:
    """Return what became of a model."""
    old = Path(os.environ["OLD_TRANSFORMERS"])
    folders = (entry["transformers"], "common", entry.get("kernels_of", "common"))
    path = ":".join(str(old / folder) for folder in folders)
    then = {"PYTHONPATH": path, "HF_HOME": str(root / "home")}
    if entry.get("kernels_of"):
        then["PYTHONOPTIMIZE"] = "1"  # assertions say what those kernels take
    if not (out / name / "model.safetensors").is_file():
        _run([__file__, "weights", str(out), name], then)
    if not (out / name / "model.safetensors").is_file():
        _run([__file__, "stand_in", str(out / name)], {})
    words = ["--trust-remote-code", "--device", "cpu", "--yes", "--root", str(root)]
    if failed := _run(["-m", "onboard", str(out / name), *words], {}):
        return f"refused: {failed.removeprefix('onboard: ')}"
    logits = root / "logits.safetensors"
    steps = [("generate", {}), ("judge", then), ("compare", {})]
    for step, environment in steps:
        places = [str(out), name, *([] if step == "judge" else [str(root)]), str(logits)]
        if failed := _run([__file__, step, *places], environment):
            return f"{'not judged' if step == 'judge' else f'WRONG: {step}'}: {failed}"
    return f"onboarded, {(root / 'error.txt').read_text()}"


def _run(words: list[str], environment: dict[str, str]) -> str:
    """Run Python; return the last line of what it said if it failed."""
    command = [sys.executable, "-W", "ignore", *words]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    try:
        done = subprocess.run(
            command, env=settings, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"ended after {_SECONDS} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
    return lines[-1][:300] if done.returncode else ""


def generate(out: Path, name: str, root: Path, logits: Path) -> None:
    """Write texts (`ids`) that the onboarded model generates, and their log-probabilities."""
    import torch
    from safetensors.torch import save_file

    from onboard import LLM, SamplingParams

    llm = LLM(str(out / name), root=root, device="cpu", dtype="float32")
    everything = SamplingParams(max_tokens=1, logprobs=2**31)
    [probe] = llm.generate({"prompt_token_ids": [3]}, everything)
    vocabulary = len((probe.logprobs or [{}])[0])
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    found = {}
    for length in _PROMPTS:
        prompt = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=_TOKENS - length, temperature=0.0, logprobs=vocabulary, ignore_eos=True
        )
        [output] = llm.generate({"prompt_token_ids": prompt}, params)
        rows = [[step[token] for token in range(vocabulary)] for step in output.logprobs or ()]
        found[f"ours.{length}"] = torch.tensor(rows)
        found.setdefault("ids", torch.zeros(0, _TOKENS, dtype=torch.long))
        text = torch.tensor([[*prompt, *output.token_ids]])
        found["ids"] = torch.cat((found["ids"], text))
    save_file(
        {key: value.contiguous() for key, value in found.items() if key != "ids"},
        root / "ours.safetensors",
    )
    save_file({"ids": found["ids"]}, logits)


def compare(out: Path, name: str, root: Path, logits: Path) -> None:
    """Compare what was generated with what was judged; exit with a line where they differ."""
    from safetensors.torch import load_file

    ours, judged = load_file(root / "ours.safetensors"), load_file(logits)["logits"]
    worst = 0.0
    for length, row in zip(_PROMPTS, judged, strict=True):
        mine, theirs = ours[f"ours.{length}"], row[length - 1 : -1].log_softmax(-1)
        error = (mine - theirs).square().mean() / theirs.square().mean()
        worst = max(worst, float(error.nan_to_num(float("inf")).sqrt()))
    (root / "error.txt").write_text(f"error {worst:.1e}")
    if not worst <= _SAME:
        sys.exit(f"the log-probabilities differ by {worst:.1e}, relative")


def _own_model(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _copy_modules(folder)
    _stand_in_for_absent(folder)
    torch.manual_seed(0)
    if not torch.cuda.is_available():  # some constructors put tables there
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
        torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
        torch.cuda.default_stream = lambda *_: None  # type: ignore[assignment]
        for mark in ("mark", "range_push", "range_pop"):
            setattr(torch.cuda.nvtx, mark, lambda *_: None)
        _change_arguments(_on_cpu)
    if table()[folder.name].get("kernels_of"):
        _change_arguments(_in_float32)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    config.torch_dtype = torch.float32
    config._name_or_path = str(folder)  # which a class of its own may leave out
    asked = json.loads((folder / "config.json").read_text()).get("attn_implementation")
    how = {"attn_implementation": asked} if asked else {}
    if table()[folder.name].get("loaded_alone"):
        return _without_first_values(config, how).float().eval()
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, **how)
    except TypeError:  # transformers before 4.36 hands it to the class
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    except ValueError as error:
        model = _made_otherwise(folder, config, str(error))
    except AttributeError:  # what sets first values fails
        model = _without_first_values(config, how)
    return model.float().eval()


def _without_first_values(config: Any, how: dict[str, Any]) -> Any:
    """Make a model as loading a checkpoint does, which sets no first values."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    told = "_enable" in inspect.signature(no_init_weights).parameters  # before 4.53
    with no_init_weights(**({"_enable": True} if told else {})):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=True, **how)


def _made_otherwise(folder: Path, config: Any, error: str) -> Any:
    """Make a model whose inner model takes eager attention alone, or whose class names another config
    class than auto_map does, as whoever uses that code does.
    """
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if "scaled_dot_product_attention" in error:
        how = {"trust_remote_code": True, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_config(config, **how)
    if "config_class" not in error:
        raise ValueError(error)
    name = config.auto_map["AutoModelForCausalLM"]
    return get_class_from_dynamic_module(name, str(folder))(config)


def _on_cpu(item: Any) -> Any:
    """Return the CPU for a GPU, `device="cuda"`, and anything else as it is."""
    import torch

    on_gpu = isinstance(item, str | torch.device) and str(item).startswith("cuda")
    return "cpu" if on_gpu else item


def _in_float32(item: Any) -> Any:
    """Return float32 for a dtype in half precision, and anything else as it is."""
    import torch

    half = isinstance(item, torch.dtype) and item in (torch.bfloat16, torch.float16)
    return torch.float32 if half else item


def _change_arguments(changed: Any) -> None:
    """Have torch's functions and methods get other arguments than the code says, from here on."""
    from torch.overrides import TorchFunctionMode

    class Changed(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*map(changed, args), **{k: changed(v) for k, v in (kwargs or {}).items()})

    Changed().__enter__()  # type: ignore[no-untyped-call]


def _stand_in_for_absent(folder: Path) -> None:
    """Let packages and files be missing that a small model makes no use of: transformers asks for
    those that any line imports, and Python for those that a file imports whatever happens.
    """
    from transformers import dynamic_module_utils

    beside = dynamic_module_utils.get_relative_imports

    def there(file: Any) -> list[str]:
        return [name for name in beside(file) if (folder / f"{name}.py").is_file()]

    dynamic_module_utils.get_relative_imports = there
    dynamic_module_utils.check_imports = there
    imported = {name for file in folder.glob("*.py") for name in _imports(file)}
    _leave_docstrings()
    sys.meta_path.append(_Absent({x for x in imported if importlib.util.find_spec(x) is None}))


def _leave_docstrings() -> None:
    """Let decorators that write docstrings take any arguments, as those of earlier years did."""
    from transformers import utils

    places = [utils, importlib.import_module("transformers.file_utils")]
    for decorator in ("add_code_sample_docstrings", "replace_return_docstrings"):
        for place in (each for each in places if hasattr(each, decorator)):
            setattr(place, decorator, lambda *_, **__: lambda function: function)


def _imports(file: Path) -> set[str]:
    """Return the packages that a file imports outside of functions and conditions."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages and what is in them: classes of which there are no objects."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        known = fullname.partition(".")[0] in self.packages
        return importlib.util.spec_from_loader(fullname, self, is_package=True) if known else None

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _absent_class(f"{module.__name__}.{name}")

        module.__getattr__ = attribute  # type: ignore[method-assign]


def _absent_class(name: str) -> type:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError(f"{name} is not here")

    of_shape = classmethod(lambda cls, _: cls)  # as annotations of tensors have
    return type(name, (), {"__init__": refuse, "__class_getitem__": of_shape})


def _copy_modules(folder: Path) -> None:
    """Copy all modules to where transformers runs them: of those that a local folder's modules
    import it finds the neighbours only there.
    """
    from transformers.dynamic_module_utils import create_dynamic_module
    from transformers.utils import HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME

    place = Path(TRANSFORMERS_DYNAMIC_MODULE_NAME) / folder.name
    create_dynamic_module(place)
    for file in folder.glob("*.py"):
        shutil.copy(file, Path(HF_MODULES_CACHE) / place / file.name)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    commands: dict[str, Any] = {
        each.__name__: each for each in (fill, weights, stand_in, judge, check, generate, compare)
    }
    paths = {"fill": (0, 1), "judge": (0, 2), "generate": (0, 2, 3), "compare": (0, 2, 3)}
    places = paths.get(command, (0,))
    commands[command](*(Path(x) if i in places else x for i, x in enumerate(rest)))
