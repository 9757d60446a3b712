"""A model's own code as generated tests import it."""

from __future__ import annotations

import os
from pathlib import Path

from onboard.analysis.repository import install
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.errors import CONSENT, ConsentRequiredError, OnboardError
from onboard.hub import read_config


def repository_code(folder: Path) -> None:
    """Make the copy of a repository's code in `folder` importable as the package `repository_code`.

    Raises:
        ConsentRequiredError: the environment variable ONBOARD_TRUST_REMOTE_CODE is not 1.
        OnboardError: there is no copy.
    """
    if os.environ.get(CONSENT) != "1":
        raise ConsentRequiredError(
            f"these tests run the code in {folder}", hint=f"Read it, then set {CONSENT}=1"
        )
    if not (folder / "config.json").is_file():
        way = "onboard MODEL --trust-remote-code --until test"
        raise OnboardError(
            f"the code that the model brings is not in {folder}",
            hint=f"This copies it there: {way}",
        )
    config = read_config(folder)
    install(folder, config)
    build_tiny(load_config(config))  # which gives its forward what that needs to run
