"""A package of the collection lies in one folder, under flat names, and imports as it did."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "flat_packages.py"
FILES = {
    "__init__.py": "LIMIT = 7\n",
    "attention/__init__.py": "from .base import Base, size\nfrom . import base as first\n",
    "attention/base.py": "import math\nfrom .. import LIMIT\n\nclass Base:\n    pass\n\ndef size():\n"
    "    from ..norms.base import name\n    return math.floor(LIMIT), name\n",
    "norms/base.py": "from own.attention.base import (\n    LIMIT,\n)\nname = f'norm {LIMIT}'\n",
    "unused.py": "raise ValueError\n",
}


@pytest.fixture
def flat_package() -> Any:
    """Return the function of the script."""
    spec = spec_from_file_location("flat_packages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flat_package


def test_files_of_one_name_are_kept_apart(
    flat_package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = flat_package(FILES.get, "own", ["attention"])
    names = ["attention.py", "attention_base.py", "norms_base.py", "package_root.py"]
    assert sorted(found) == names
    folder = tmp_path / "flat_own"
    folder.mkdir()
    for name, text in found.items():
        (folder / name).write_text(text)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module("flat_own.attention")
    assert made.size() == (7, "norm 7")
    assert made.first is sys.modules["flat_own.attention_base"]
    for name in [name for name in sys.modules if name.startswith("flat_own")]:
        del sys.modules[name]


def test_what_is_installed_stays_an_import_of_the_package(flat_package: Any) -> None:
    found = flat_package(FILES.get, "own", ["norms.base"], ["attention"])
    assert sorted(found) == ["norms_base.py"]
    assert "from own.attention.base import (" in found["norms_base.py"]
