"""Halo: a tower of transformers, a projection, and a text model that gets embeddings."""

import inspect

import torch
from peft import get_peft_model
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.utils import add_start_docstrings, logging

from .configuration_halo import HaloConfig

logger = logging.get_logger(__name__)


@add_start_docstrings("Halo without a head.", "")
class HaloPreTrainedModel(PreTrainedModel):
    config_class = HaloConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_flash_attn_2 = True
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)


class HaloForConditionalGeneration(HaloPreTrainedModel, GenerationMixin):
    def __init__(self, config: HaloConfig):
        super().__init__(config)
        config.vision_config._attn_implementation = "flash_attention_2"
        self.vision_model = SiglipVisionModel(config.vision_config)
        kinds = {"Qwen2ForCausalLM": Qwen2ForCausalLM, "LlamaForCausalLM": LlamaForCausalLM}
        asked = config.text_config._attn_implementation
        assert asked == "flash_attention_2", f"the text model must use flash_attention_2, not {asked}"
        self.language_model = kinds[config.text_config.architectures[0]](config.text_config)
        width, out = config.vision_config.hidden_size * config.fold**2, config.text_config.hidden_size
        self.mlp1 = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out), nn.GELU(), nn.Linear(out, out))
        if getattr(config, "use_lora", False):
            self.language_model = get_peft_model(self.language_model, config.use_lora)
        parameters = inspect.signature(self.forward).parameters
        assert not any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def extract_feature(self, pixel_values):
        found = self.vision_model(pixel_values=pixel_values, output_hidden_states=True, return_dict=True)
        found = found.hidden_states[self.config.layer]
        fold, side = self.config.fold, int(found.shape[1] ** 0.5)
        tiles, width = found.shape[0], found.shape[-1]
        found = found.reshape(tiles, side // fold, fold, side // fold, fold, width)
        found = found.permute(0, 1, 3, 2, 4, 5).reshape(tiles, (side // fold) ** 2, fold * fold * width)
        return self.mlp1(found)

    def forward(
        self, pixel_values, input_ids=None, attention_mask=None, position_ids=None, image_flags=None,
        past_key_values=None, labels=None, use_cache=None
    ):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        features = self.extract_feature(pixel_values)[image_flags.squeeze(-1) == 1]
        embeds[input_ids == self.config.image_token_index] = features.flatten(0, 1)
        return self.language_model(
            inputs_embeds=embeds, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache
        )

    @torch.no_grad()
    def generate(self, pixel_values=None, input_ids=None, attention_mask=None, image_sizes=None, **options):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            batch, length, width = embeds.shape
            embeds = embeds.reshape(batch * length, width)
            chosen = input_ids.reshape(batch * length) == self.config.image_token_index
            assert chosen.sum() != 0
            embeds[chosen] = self.extract_feature(pixel_values).reshape(-1, width).to(embeds.device)
            embeds = embeds.reshape(batch, length, width)
        return self.language_model.generate(
            inputs_embeds=embeds, attention_mask=attention_mask, use_cache=True, **options
        )

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()
