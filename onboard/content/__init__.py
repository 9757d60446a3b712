"""Content folders (templates, models, registry, transforms), importable as
`onboard.content.<folder>`.

In a checkout they are the repository's top-level folders; in an installed wheel they lie in this
package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parents[1]

# Folders of our own tell a checkout: a `pyproject.toml` may lie beside any installed package.
_OF_A_CHECKOUT = ("transforms/default.yaml", "templates", "registry/models.yaml")

CONTENT_ROOT: Path = (
    _CHECKOUT if all((_CHECKOUT / name).exists() for name in _OF_A_CHECKOUT) else _PACKAGE
)
"""The folder that holds `templates`, `models`, `registry` and `transforms`."""

__path__ = [str(CONTENT_ROOT)]


def content_path(*parts: str, root: Path | None = None) -> Path:
    """Return `root/parts` when the user's root has that file, the shipped one otherwise."""
    if root is not None and (candidate := root.joinpath(*parts)).exists():
        return candidate
    return CONTENT_ROOT.joinpath(*parts)
