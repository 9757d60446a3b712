"""What the `adapter_config.json` of a low-rank adapter says, in the format of PEFT.

The file is somebody else's. What would change what an adapter computes, and is not computed here,
is refused by its name, known fields as well as those that are not known yet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError, UsageError
from onboard.untrusted.bounds import LORA_RANK, read_json

CONFIG_FILE = "adapter_config.json"
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules"}
_SAYS_NOTHING = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("task_type", "megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "lora_dropout"),
    "fan_in_fan_out",
}
"""Fields about training, or about which layers have an adapter, which the tensors say, too."""
_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Fields that may have these values alone; other initial weights have changed the model's own."""
_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}")


@dataclass(frozen=True)
class AdapterConfig:
    """How much of each layer's low-rank product is added."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Of layers whose path ends so; the first that fits counts."""
    alphas: Mapping[str, float]
    rank_stabilised: bool
    targets: tuple[str, ...] | None
    """Ends of the paths of the layers that have one; None: it is not said by their names."""

    def rank_of(self, layer: str) -> int:
        """Return the rank that a layer's matrices have."""
        return next((r for end, r in self.ranks.items() if is_end(end, layer)), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return what a layer's product is multiplied with: alpha / r, or alpha / sqrt(r)
        (Kalajdzievski 2023, arXiv:2312.03732).
        """
        alpha = next((a for end, a in self.alphas.items() if is_end(end, layer)), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def targets_layer(self, layer: str) -> bool:
        """Whether a layer is one of those that are said to have an adapter."""
        return self.targets is None or any(is_end(end, layer) for end in self.targets)


def is_end(end: str, path: str) -> bool:
    """Whether a dotted path is `end`, or ends with it."""
    return path == end or path.endswith(f".{end}")


def read_adapter_config(folder: Path, name: str) -> AdapterConfig:
    """Read the config of the adapter `name`; raise `OnboardError` for one that is none, or wants
    what is not computed.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UsageError(
            f"the adapter {name}: {folder} has no {CONFIG_FILE}",
            hint="Give the folder that PEFT's save_pretrained has written",
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise _refusal(name, "is no JSON object")
    _check_fields(values, name)
    targets = values.get("target_modules")
    return AdapterConfig(
        rank=_rank(values.get("r"), "r", name),
        alpha=_number(values.get("lora_alpha"), "lora_alpha", name),
        ranks={k: _rank(v, k, name) for k, v in _ends(values, "rank_pattern", name).items()},
        alphas={k: _number(v, k, name) for k, v in _ends(values, "alpha_pattern", name).items()},
        rank_stabilised=values.get("use_rslora") is True,
        targets=tuple(map(str, targets)) if isinstance(targets, list) else None,
    )


def _check_fields(values: Mapping[str, Any], name: str) -> None:
    for field, value in values.items():
        if field in _ONLY:
            if not any(value is each or value == each for each in _ONLY[field]):
                raise _refusal(name, f"has {field} {value!r:.80}")
        elif value and field not in _READ | _SAYS_NOTHING:
            raise _refusal(name, f"has {field!r:.80}")
    if values.get("peft_type") != "LORA":
        raise _refusal(name, "does not say that it is LORA")


def _refusal(name: str, what: str) -> OnboardError:
    return OnboardError(
        f"the adapter {name}: {CONFIG_FILE} {what}, which is not computed here",
        hint="Merge the adapter into its model, and onboard that",
    )


def _rank(value: object, field: str, name: str) -> int:
    if type(value) is not int or value < 1:
        raise OnboardError(
            f"the adapter {name}: the rank {field!r:.80} is {value!r:.80}",
            hint="It is a whole number from 1 on",
        )
    LORA_RANK.check(value, f"the adapter {name}")
    return value


def _number(value: object, field: str, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(found := float(value)):  # type: ignore[arg-type]
        raise OnboardError(
            f"the adapter {name}: {field!r:.80} is {value!r:.80}", hint="It is a number"
        )
    return found


def _ends(values: Mapping[str, Any], field: str, name: str) -> Mapping[str, Any]:
    """Return a field's map from ends of layers' paths; expressions, of which a hostile one can take
    hours, are refused.
    """
    found = values.get(field) or {}
    if not isinstance(found, dict):
        raise _refusal(name, f"has {field} {found!r:.80}")
    for end in found:
        if not _NAME.fullmatch(end):
            raise _refusal(name, f"has the expression {end!r:.80} in {field}")
    return found
