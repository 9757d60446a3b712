"""What code asks `pkg_resources`, which setuptools no longer has, about installed packages."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

from torch.torch_version import TorchVersion


class DistributionNotFound(Exception):
    """A package is not installed."""


def get_distribution(name: str) -> Any:
    """Return the `version` and the `parsed_version` of an installed package.

    Raises:
        DistributionNotFound: there is none of that name, whatever stands in for its modules.
    """
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise DistributionNotFound(name) from error
    return SimpleNamespace(version=version, parsed_version=TorchVersion(version))


FORMS = {
    "pkg_resources.DistributionNotFound": DistributionNotFound,
    "pkg_resources.get_distribution": get_distribution,
    "pkg_resources.parse_version": TorchVersion,
}
