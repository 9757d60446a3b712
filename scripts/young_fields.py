"""The fields that config classes of transformers gained after the oldest release that is supported,
written to onboard/assets/young_fields.yaml.

`python scripts/young_fields.py FOLDER`, where FOLDER holds the oldest release (`pip install --target
FOLDER transformers==VERSION`), compares it with the installed one; a test says when that has to be
done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from onboard.hf.architecture import language_model_types
from onboard.hf.young_fields import YOUNG_FIELDS, plain_default

_SCRIPT = Path(__file__).resolve()
_ROOT = _SCRIPT.parents[1]
_HEAD = """\
# Fields with a plain default that config classes of language models have in the newer of these
# releases of transformers and not in the older; scripts/young_fields.py writes them. A model file
# that reads such a field has the default, too.
releases: [{old}, {new}]
fields:
"""


def fields() -> dict[str, list[str]]:
    """Return the fields with plain defaults by the names of the installed language models' config
    classes, those of their parts included.
    """
    classes: set[type[PreTrainedConfig]] = set()
    for model_type in language_model_types():
        if model_type in CONFIG_MAPPING:
            made = CONFIG_MAPPING[model_type]
            classes |= {made, *getattr(made, "sub_configs", {}).values()}
    return {
        cls.__name__: [
            each.name
            for each in dataclasses.fields(cls)
            if plain_default(cls, each.name) is not None
        ]
        for cls in classes
        if dataclasses.is_dataclass(cls)
    }


def young(old: dict[str, list[str]], new: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the fields that classes of both releases have in the new one alone."""
    more = {name: sorted({*new[name]} - {*old[name]}) for name in sorted(new.keys() & old.keys())}
    return {name: names for name, names in more.items() if names}


def main(folder: str) -> None:
    """Write the file."""
    paths = os.pathsep.join([folder, str(_ROOT)])
    asked = [sys.executable, "-W", "ignore", str(_SCRIPT)]
    answer = subprocess.run(
        asked, env=os.environ | {"PYTHONPATH": paths}, check=True, capture_output=True, text=True
    )
    old, fields_then = json.loads(answer.stdout.splitlines()[-1])
    lines = [
        f"  {name}: [{', '.join(names)}]\n" for name, names in young(fields_then, fields()).items()
    ]
    text = _HEAD.format(old=old, new=transformers.__version__) + "".join(lines)
    YOUNG_FIELDS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        print(json.dumps([transformers.__version__, fields()]))
