"""Names that a repository's files have only where a package is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onboard.analysis.repository import make_package
from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.tiny.conditional_names import bind_absent, only_if
from onboard.hf.old import attention_forms, packages

TRIED = """
def is_there():
    return False

try:
    from flash_attn.flash_attn_interface import flash_attn_unpadded_func as attend
except ImportError:
    try:
        from flash_attn import flash_attn_varlen_func as attend
    except ImportError:
        attend = None

if is_there():
    from flash_attn import flash_attn_func
    WIDE = "window_size" in flash_attn_func.__code__.co_varnames

try:
    import unheard_kernels as kernels
except ImportError:
    kernels = None

try:
    from flash_attn import rms_norm
    raise ImportError("it is of another version")
except ImportError:
    norm = rms_norm = None
"""


@pytest.fixture
def imported(tmp_path: Path) -> Iterator[Any]:
    def of(text: str) -> Any:
        (tmp_path / "modeling_x.py").write_text(text)
        make_package(tmp_path)
        return importlib.import_module(f"{PACKAGE}.modeling_x")

    before = set(sys.modules), set(packages._FINDER.packages)
    packages._FINDER.packages = set()  # whatever other tests have left
    yield of
    for name in sys.modules.keys() - before[0]:
        if name.split(".")[0] in (PACKAGE, "flash_attn"):
            del sys.modules[name]
    packages._FINDER.packages = before[1]


def test_it_is_said_under_which_test_alone_code_has_a_name(imported: Any) -> None:
    lines = "if has_kernels():\n    from kernels import fast as quick\n    WIDE = True\nOTHER = 1\n"
    imported(f"has_kernels = bool\n{lines}")
    where = ("has_kernels()", "modeling_x.py:2")
    assert [only_if(name) for name in ("quick", "WIDE")] == [where] * 2
    assert [only_if(name) for name in ("OTHER", "unheard")] == [None] * 2


def test_code_gets_what_it_has_only_where_a_package_is_installed(imported: Any) -> None:
    if not packages.has_forms("flash_attn"):
        pytest.fail("flash_attn is installed: the code has its own")
    module = imported(TRIED)
    assert module.attend is None
    assert not hasattr(module, "WIDE")
    facts = bind_absent()
    assert module.attend is attention_forms.flash_attn_varlen_func
    assert module.flash_attn_func is attention_forms.flash_attn_func
    assert module.WIDE
    assert module.kernels is None
    assert module.norm is None
    assert "modeling_x.py:5 has attend all the same" in facts
    assert not any("kernels" in fact for fact in facts)
    assert bind_absent() == []
