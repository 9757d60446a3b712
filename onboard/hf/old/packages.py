"""Packages that a model's code imports and that are not installed.

Most serve training, or kernels of a GPU. What a forward pass may need of them has its torch form
here; any other name can be imported, and says which package to install when it is called.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from onboard.hf.old import (
    attention_forms,
    distributions,
    einops_forms,
    recurrent_forms,
)
from onboard.hf.old.fla import linear_attention_forms
from onboard.hf.old.gone import Gone
from onboard.hf.old.layers import norm_forms


def _first(item: Any, *_: Any, **__: Any) -> Any:
    return item


def _nothing(*_: Any, **__: Any) -> None:
    return None


FORMS: dict[str, Any] = {
    "einops.rearrange": einops_forms.rearrange,
    "einops.repeat": einops_forms.repeat,
    "einops.einsum": einops_forms.einsum,
    "timm.models.layers.drop_path": _first,
    "timm.layers.drop_path": _first,
    "accelerate.init_empty_weights": contextlib.nullcontext,
    "transformers_stream_generator.init_stream_support": _nothing,
    **attention_forms.FORMS,
    **distributions.FORMS,
    **linear_attention_forms.FORMS,
    **norm_forms.FORMS,
    **recurrent_forms.FORMS,
}
"""What names of packages that are missing compute, in inference."""
WHOLE = ("einops",)
"""Packages whose every use is in `FORMS`: code that asks whether they are there is told so."""
_INSTALLED_AS = dict(
    fla="flash-linear-attention", cv2="opencv-python", PIL="pillow",
    sklearn="scikit-learn", skimage="scikit-image", bs4="beautifulsoup4", yaml="pyyaml",
)  # fmt: skip
"""What is installed for a package, where another name would get something else."""
_FOLDERS = {
    *("lib", "libs", "utils", "util", "model", "models", "modules", "layers", "ops", "kernels"),
    *("src", "core", "common", "quant", "quantization", "helpers", "tools", "config", "configs"),
}
"""What projects call folders of their own: packages of these names are somebody else's."""
_NEAR = "which import it with a dot before its name then"
"""As transformers finds neighbours; without the dot it looks for what is installed."""


class _Absent(ModuleType):
    """A module of a package that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, leaf: str) -> Any:
        if leaf.startswith("__"):
            raise AttributeError(f"{leaf} of {self.__name__}, which is not installed")
        full = f"{self.__name__}.{leaf}"
        package = full.split(".")[0]
        return FORMS.get(full) or FORMS.get(f"{package}..{leaf}", Gone(full, to_install))


def to_install(*packages: str) -> str:
    """Return the command that installs packages, and every one that is stood in for in part; what
    can only be a folder of the code's own project is named as that. A package that nothing
    is known of here may have another name where it is installed from, which its project says.
    """
    lacking = _FINDER.packages.union(packages)
    wanted = sorted(lacking.difference(WHOLE) or lacking)
    names = [_INSTALLED_AS.get(n, n.replace("_", "-")) for n in wanted if n not in _FOLDERS]
    folders = ", ".join(name for name in wanted if name in _FOLDERS)
    own = f"Put {folders}, of the code's own project, beside its files, {_NEAR}" if folders else ""
    sure = _FOLDERS.union(_INSTALLED_AS, (form.partition(".")[0] for form in FORMS))
    unsure = " or ".join(name for name in wanted if name not in sure)
    otherwise = f", or what the project of {unsure} says" if unsure else ""
    return "; ".join(
        filter(None, (own, f"pip install {' '.join(names)}{otherwise}" if names else ""))
    )


def is_missing(package: str) -> bool:
    """Whether a package is not installed; one that is stood in for is missing, too."""
    return package in _FINDER.packages or (
        package not in sys.modules and find_spec(package) is None
    )


def stands_in(package: str) -> bool:
    """Whether a package is stood in for."""
    return package in _FINDER.packages


def has_forms(package: str) -> bool:
    """Whether a package is not installed, and something of it has a form here."""
    return is_missing(package) and any(name.split(".")[0] == package for name in FORMS)


def missing(packages: Iterable[str]) -> list[str]:
    """Return those of the packages that are neither installed nor stood in for, sorted."""
    wanted = {name for name in packages if name not in _FINDER.packages}
    return sorted(name for name in wanted if is_missing(name))


_CALLED = {"flash_attn": "flashattention"}
"""What a package is called where it is spoken of, by the name that it is imported by."""


class _Finder(MetaPathFinder, Loader):
    """Finds every module of the packages that are stood in for."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for any module of these packages."""
        known = name.split(".")[0] in self.packages
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module, whose every name stands for something."""
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


_FINDER = _Finder()


def stand_in(module: str) -> list[str]:
    """Make the package of a module importable, with all its modules; return what to say of it."""
    package = module.split(".")[0]
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    _FINDER.packages.add(package)
    importlib.invalidate_caches()
    return [f"the package {package} is not installed; what is imported of it is stood in for"]


def provide_whole() -> list[str]:
    """Stand in for the packages that nothing is missing of."""
    return [fact for name in missing(WHOLE) for fact in stand_in(name)]


def asked_for(error: BaseException, packages: Iterable[str]) -> list[str]:
    """Return the missing packages that an error's text names, however it writes them."""
    text = re.sub(r"\W|_", "", str(error)).lower()
    said = {name: (name.replace("_", "").lower(), _CALLED.get(name, name)) for name in packages}
    return [name for name in missing(said) if any(word in text for word in said[name])]
