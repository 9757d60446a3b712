"""Where the content is: in a checkout its own folders, in a wheel the package's."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from onboard import content


def root_of(package: Path) -> Path:
    specification = importlib.util.spec_from_file_location("elsewhere", package / "__init__.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return Path(module.CONTENT_ROOT)


def test_another_package_s_project_file_makes_no_checkout(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "onboard" / "content"
    package.mkdir(parents=True)
    shutil.copy(str(content.__file__), package)
    (tmp_path / "site-packages" / "pyproject.toml").write_text("")
    assert root_of(package) == package


def test_a_checkout_is_one() -> None:
    assert (content.CONTENT_ROOT / "pyproject.toml").is_file()
