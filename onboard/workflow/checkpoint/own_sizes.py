"""Whether transformers' own model runs at the sizes of a checkpoint's config.

All later comparisons are of a small model, whose sizes go together whatever those of the config do.
"""

from __future__ import annotations

from typing import Any

from onboard.errors import OnboardError


def check_own_sizes(model: Any) -> None:
    """Run a transformers model of the meta device; no weight is needed to see whether shapes fit.

    What fails in small as well tells nothing of sizes: much code asks tensors for values, which the
    meta device has not.

    Raises:
        OnboardError: the model fails, and not in small.
    """
    from onboard.analysis.tiny.tiny_config import one_line

    failure = _failure(model)
    if failure is None or not _runs_in_small(model.config):
        return
    raise OnboardError(
        f"transformers' own {type(model).__name__} fails with this config: {one_line(failure)}",
        hint="Compare the sizes in config.json with those of the released model",
    )


def _failure(model: Any) -> RuntimeError | None:
    """Return what a text of three tokens fails with on the meta device, if shapes may be why."""
    import torch

    from onboard.hf.quiet import quiet_transformers

    try:
        with torch.no_grad(), quiet_transformers():
            model.eval()(input_ids=torch.ones(1, 3, dtype=torch.int64, device="meta"))
    except RuntimeError as error:
        return None if isinstance(error, NotImplementedError) else error
    except Exception:  # it wants other inputs than a text, say
        return None
    return None


def _runs_in_small(config: Any) -> bool:
    """Whether the model runs, made in the same way, with sizes that go together."""
    import torch

    from onboard.analysis.tiny.tiny_config import tiny_config
    from onboard.hf.hf_model import build_reference

    try:
        with torch.device("meta"):
            small = build_reference(tiny_config(config))
    except Exception:  # whatever the config's values do; the analysis says why
        return False
    return _failure(small) is None
