"""Config classes are imported without what transformers writes into their documentation."""

from transformers.utils import auto_docstring

from onboard.graph.undocumented import undocumented_classes


class LlamaConfig:
    """Own words."""


def test_documentation_stays_as_it_is_written() -> None:
    with undocumented_classes():
        assert auto_docstring(checkpoint="some/model")(LlamaConfig) is LlamaConfig
    assert LlamaConfig.__doc__ == "Own words."
