"""Halo: pictures in tiles beside a text model of transformers, in the manner of 2025."""

import copy

from transformers.configuration_utils import PretrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig


class HaloConfig(PretrainedConfig):
    model_type = "halo_vl"
    is_composition = True
    sub_configs = {"vision_config": SiglipVisionConfig, "text_config": Qwen2Config}

    def __init__(
        self, vision_config=None, text_config=None, fold=2, layer=-1, image_token_index=1,
        initializer_range=0.02, **kwargs
    ):
        super().__init__(**kwargs)
        text_config = text_config or {"architectures": ["Qwen2ForCausalLM"]}
        kinds = {"Qwen2ForCausalLM": Qwen2Config, "LlamaForCausalLM": LlamaConfig}
        self.vision_config = SiglipVisionConfig(**(vision_config or {}))
        self.text_config = kinds[text_config["architectures"][0]](**text_config)
        self.fold = fold
        self.layer = layer
        self.image_token_index = image_token_index
        self.initializer_range = initializer_range
        self.tie_word_embeddings = self.text_config.tie_word_embeddings

    def to_dict(self):
        output = copy.deepcopy(self.__dict__)
        output["vision_config"] = self.vision_config.to_dict()
        output["text_config"] = self.text_config.to_dict()
        output["model_type"] = self.__class__.model_type
        output["_attn_implementation_autoset"] = self._attn_implementation_autoset
        return output
