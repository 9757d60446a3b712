"""What a user has agreed to have run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Consent:
    """Agreement to run code of a model's repository; it comes from a person, never from a file."""

    code: bool = False
    """It may run, in a sandbox."""
    unsandboxed: bool = False
    """It may run where the system lacks a wall of the sandbox."""


NO_CONSENT = Consent()
