"""The errors that users see: one line that says what was wrong, what was found and what to do."""

from __future__ import annotations

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
