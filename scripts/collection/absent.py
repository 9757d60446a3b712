"""Packages that a model's code imports and a small model makes no use of."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def stand_in_for_absent(folder: Path) -> None:
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
