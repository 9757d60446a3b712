"""Halo: a picture in as many square tiles as suit its sides, and as a whole."""

import numpy as np
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_utils import to_numpy_array


class HaloImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]

    def __init__(self, size=None, max_tiles=6, use_thumbnail=True, image_mean=None, image_std=None, **kwargs):
        super().__init__(**kwargs)
        self.size = size or {"height": 16, "width": 16}
        self.max_tiles = max_tiles
        self.use_thumbnail = use_thumbnail
        self.image_mean = image_mean or [0.5, 0.5, 0.5]
        self.image_std = image_std or [0.5, 0.5, 0.5]

    def tiles(self, image):
        side, (width, height) = self.size["height"], image.size
        shapes = [(i, j) for i in range(1, 4) for j in range(1, 4) if i * j <= self.max_tiles]
        columns, rows = min(shapes, key=lambda each: (abs(each[0] / each[1] - width / height), each))
        large = image.resize((side * columns, side * rows), Image.BICUBIC)
        boxes = [(x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(rows) for x in range(columns)]
        found = [large.crop(box) for box in boxes]
        if self.use_thumbnail and len(found) > 1:
            found.append(image.resize((side, side), Image.BICUBIC))
        return found

    def preprocess(self, images, return_tensors=None, **kwargs):
        sizes, pixels = [], []
        for image in images:
            for tile in self.tiles(image.convert("RGB")):
                values = to_numpy_array(tile).astype(np.float32) / 255
                values = (values - np.array(self.image_mean)) / np.array(self.image_std)
                pixels.append(values.transpose(2, 0, 1).astype(np.float32))
            sizes.append((image.height, image.width))
        return BatchFeature({"pixel_values": np.stack(pixels), "image_sizes": sizes}, tensor_type=return_tensors)
