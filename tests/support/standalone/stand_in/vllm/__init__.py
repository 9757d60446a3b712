"""What an exported plugin uses of vLLM, by its names and arguments (`vllm_interface.json`):
attention by hand.
"""


class ModelRegistry:
    """Holds what was registered."""

    models: dict[str, str] = {}

    @classmethod
    def register_model(cls, model_arch: str, model_cls: str) -> None:
        cls.models[model_arch] = model_cls
