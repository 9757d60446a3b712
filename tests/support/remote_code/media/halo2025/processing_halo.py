"""Halo: a text's <image-1> becomes as many tokens as the picture's tiles have features."""

import re

import requests
import torch
import torchvision
from torchvision import io
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessingKwargs, ProcessorMixin, Unpack


class HaloProcessorKwargs(ProcessingKwargs, total=False):
    _defaults = {"text_kwargs": {"padding": False}, "images_kwargs": {}}


def fetch_video(path):
    if torchvision.__version__ < "0.19" or path.startswith("http"):
        path = requests.get(path).content
    return io.read_video(path)


class HaloProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, tokens_per_tile=4, **kwargs):
        self.image_token = kwargs.get("image_token", "<picture>")
        self.tokens_per_tile = tokens_per_tile
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, videos=None, **kwargs: Unpack[HaloProcessorKwargs]):
        options = self._merge_kwargs(HaloProcessorKwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        texts, found = [text] if isinstance(text, str) else text, []

        def written(match):
            given = self.image_processor(images=[images[int(match[1]) - 1]], return_tensors="pt")
            found.append(given)
            return f"<start>{self.image_token * len(given['pixel_values']) * self.tokens_per_tile}<end>"

        texts = [re.sub(r"<image-(\d+)>", written, each) for each in texts]
        given = dict(self.tokenizer(texts, **options["text_kwargs"]))
        if found:
            given["pixel_values"] = torch.cat([each["pixel_values"] for each in found])
            given["image_sizes"] = torch.cat([each["image_sizes"] for each in found])
        return BatchFeature(given)
