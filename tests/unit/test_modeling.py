from __future__ import annotations

from pathlib import Path

import pytest

from onboard.modeling import load_model_file, registered_model

SOURCE = """\
from torch import nn
from onboard.modeling import register_causal_lm


class Model(nn.Module):
    mark = {mark!r}


register_causal_lm("ModelingTestConfig", Model)
"""


def test_the_file_loaded_last_counts_and_equal_bytes_run_once(tmp_path: Path) -> None:
    files = []
    for mark in "ab":
        files.append(tmp_path / mark / "modeling_x.py")
        files[-1].parent.mkdir()
        files[-1].write_text(SOURCE.format(mark=mark))
    seen = []
    for file in (files[0], files[1], files[0]):
        load_model_file(file)
        seen.append(registered_model("ModelingTestConfig"))
    assert [model.mark for model in seen] == ["a", "b", "a"]
    assert seen[0] is seen[2]


def test_a_file_that_fails_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "modeling_y.py"
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_model_file(file)
