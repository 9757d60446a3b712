"""The errors that users see: one line that says what was wrong, what was found and what to do."""

from __future__ import annotations

import sys
import traceback

INTERRUPTED = 130
EXIT_CODES = {
    0: "done",
    1: "it failed: a phase or a comparison did, files have drifted, or the Hub cannot be reached",
    2: "the request is invalid: a wrong option or configuration, or a model that does not exist",
    3: "it needs your consent: the model does not fit, or brings code of its own",
    INTERRUPTED: "interrupted",
}
"""What commands exit with."""


class OnboardError(Exception):
    """A failure to tell the user about without a traceback; `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


def exit_code(error: BaseException | None) -> int:
    """Return what a command exits with that ended in `error`, 0 without one."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, OnboardError) else 1


class UsageError(OnboardError):
    """The command line or a configuration file asks for something that does not exist."""

    exit_code = 2


CONSENT = "ONBOARD_TRUST_REMOTE_CODE"
"""The environment variable that, set to 1, lets generated tests run the code that a model
brings.
"""


class UntranslatableError(OnboardError):
    """Code of the model has no translation; `block` is the class that it is in, "" where that is not
    known.
    """

    def __init__(self, message: str, *, hint: str = "", block: str = "") -> None:
        super().__init__(message, hint=hint)
        self.block = block


class ProofError(OnboardError):
    """A generated file does not do what it was made from; `blocks` are the classes in whose code it
    shows, the innermost first, none where that is not known.
    """

    def __init__(self, message: str, *, hint: str = "", blocks: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.blocks = blocks


class ConsentRequiredError(OnboardError):
    """Going on needs the user's word: the model does not fit, or its repository brings code to
    run.
    """

    exit_code = 3


class NoSuchModelError(UsageError):
    """What was given as a model is none that can be found."""


class NotFiniteError(OnboardError):
    """The model computed logits that are NaN or infinite."""


class TooLongError(OnboardError):
    """Texts of a limit's length are more than the model's code is right for: `longest` tokens."""

    def __init__(self, message: str, *, hint: str = "", longest: int) -> None:
        super().__init__(message, hint=hint)
        self.longest = longest


class NoCachedFormError(OnboardError):
    """Something in the model carries state from token to token and has no cached form yet: it can
    only prefill.
    """


class NotCausalError(OnboardError):
    """A token changes what the model says of those before it: no mode can go on with what it has
    computed of a text.
    """


class EagerDiffersError(OnboardError):
    """Eager attention, which every mode is compared with, computes something else than the attention
    that users of the model get: no mode runs it.
    """


_NOT_TO_BLAME = {"", "__main__", "onboard", "repository_code", "torch", "transformers"}
"""Whose modules fail with old code, or with everything: no package that may be taken away."""


def unfit_package(error: BaseException) -> OnboardError | None:
    """Return what to say of an error, or of one behind it, that an installed package raised while it
    was imported, as one made for another torch does; None for other errors.
    """
    raised: BaseException | None = error
    while raised is not None:
        package = _fails_in(raised)
        if package not in _NOT_TO_BLAME and not isinstance(raised, ModuleNotFoundError):
            return _does_not_fit(package, raised)
        raised = raised.__cause__ or raised.__context__
    return None


def _fails_in(error: BaseException) -> str:
    """Return the package of the module whose import an error ended, the innermost; "" for none: what
    was imported to its end is kept.
    """
    names = [
        str(frame.f_globals.get("__name__"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    return names[-1].split(".")[0] if names and names[-1] not in sys.modules else ""


def _does_not_fit(package: str, error: BaseException) -> OnboardError:
    from importlib.metadata import packages_distributions, version

    said = " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")
    names = packages_distributions().get(package)
    name = names[0] if names else package
    which = f"{name} {version(name)}" if names else package
    fitting = f"Install one that fits what else is here (pip install --upgrade {name})"
    return OnboardError(
        f"the package {which} is installed, and fails as it is imported ({said})",
        hint=f"{fitting}, or take it away (pip uninstall {name}): what is missing is stood in for",
    )
