"""Image processors that compute with torchvision, where that is not installed: the functions that they
call, and the base class that transformers had for them before version 5, in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
import torch
from transformers import image_utils
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature, get_size_dict
from transformers.image_utils import ChannelDimension, SizeDict

NOTE = "torchvision is not installed; torch computes what image processors call of it"


class InterpolationMode(Enum):
    """How pixels between others are found, as torchvision calls it."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


_OF_PILLOW = {
    0: InterpolationMode.NEAREST_EXACT,
    2: InterpolationMode.BILINEAR,
    3: InterpolationMode.BICUBIC,
}
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)


def resize(
    image: torch.Tensor,
    size: Sequence[int] | int,
    interpolation: Any = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> torch.Tensor:
    """Return images [..., channels, height, width] of another size; whole numbers stay whole.

    `size` is height and width, or the shorter edge.
    """
    mode = _OF_PILLOW.get(interpolation, interpolation)
    height, width = image.shape[-2:]
    if isinstance(size, int) or len(size) == 1:
        short = size if isinstance(size, int) else size[0]
        scale = short / min(height, width)
        if max_size is not None and scale * max(height, width) > max_size:
            scale = max_size / max(height, width)
        size = [int(scale * height), int(scale * width)]
    if tuple(size) == (height, width):
        return image
    options: dict[str, Any] = {"mode": mode.value, "size": list(size)}
    if mode in _SMOOTH:
        options |= {"align_corners": False, "antialias": bool(antialias)}
    flat = image.reshape(-1, *image.shape[-3:])
    native = image.is_floating_point() or (image.dtype == torch.uint8 and mode in _SMOOTH)
    found = torch.nn.functional.interpolate(flat if native else flat.float(), **options)
    found = found if native else found.round().to(image.dtype)
    return found.reshape(*image.shape[:-2], *size)


def pad(
    image: torch.Tensor, padding: Sequence[int] | int, fill: float = 0, **_: Any
) -> torch.Tensor:
    """Return images with borders: left, top, right, bottom, or left and right, top and bottom."""
    sides = [padding] * 4 if isinstance(padding, int) else list(padding) * (4 // len(padding))
    left, top, right, bottom = sides
    return torch.nn.functional.pad(image, [left, right, top, bottom], value=fill)


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """Return a part of images."""
    return image[..., top : top + height, left : left + width]


def center_crop(image: torch.Tensor, output_size: Sequence[int] | int) -> torch.Tensor:
    """Return the middle of images."""
    height, width = [output_size] * 2 if isinstance(output_size, int) else output_size
    top, left = (image.shape[-2] - height + 1) // 2, (image.shape[-1] - width + 1) // 2
    return crop(image, top, left, height, width)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """Return (image - mean) / std, for each channel."""
    mean, std = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    scaled: torch.Tensor = (image - mean) / std
    return scaled


def pil_to_tensor(image: Any) -> torch.Tensor:
    """Return an image of Pillow, [channels, height, width] uint8."""
    values = torch.from_numpy(np.array(image))
    return values.unsqueeze(0) if values.dim() == 2 else values.permute(2, 0, 1).contiguous()


FUNCTIONAL = SimpleNamespace(
    InterpolationMode=InterpolationMode,
    **{each.__name__: each for each in (resize, pad, crop, center_crop, normalize, pil_to_tensor)},
)
FORMS: dict[str, Any] = {
    "torchvision..functional": FUNCTIONAL,
    "torchvision..InterpolationMode": InterpolationMode,
}
"""Package and name -> what it computes."""


class FastImageOptions(TypedDict, total=False):
    """What such a processor may be called with."""

    do_resize: Any
    size: Any
    default_to_square: Any
    resample: Any
    do_center_crop: Any
    crop_size: Any
    do_rescale: Any
    rescale_factor: Any
    do_normalize: Any
    image_mean: Any
    image_std: Any
    do_convert_rgb: Any
    return_tensors: Any
    data_format: Any
    input_data_format: Any
    device: Any


class FastImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """`BaseImageProcessorFast` as transformers 4.48 to 4.57 had it; what a subclass does not say is
    None.
    """

    resample: Any = None
    image_mean: Any = None
    image_std: Any = None
    size: Any = None
    default_to_square = True
    crop_size: Any = None
    do_resize: Any = None
    do_center_crop: Any = None
    do_rescale: Any = None
    rescale_factor = 1 / 255
    do_normalize: Any = None
    do_convert_rgb: Any = None
    data_format = ChannelDimension.FIRST
    valid_kwargs: Any = FastImageOptions

    def __init__(self, **kwargs: Any) -> None:
        known = self.valid_kwargs.__annotations__
        others = {name: value for name, value in kwargs.items() if name not in known}
        super().__init__(**others)
        for name in known:
            given = kwargs.get(name)
            own = deepcopy(getattr(type(self), name, None)) if given is None else given
            setattr(self, name, own)
        for name in ("size", "crop_size"):
            if (value := getattr(self, name)) is not None:
                square = self.default_to_square if name == "size" else True
                setattr(self, name, get_size_dict(value, default_to_square=square, param_name=name))

    def resize(self, image: Any, size: Any, interpolation: Any = None, **kwargs: Any) -> Any:
        """Return images of a size that is known, or whose shorter edge is."""
        wanted = [size.height, size.width] if size.height and size.width else size.shortest_edge
        chosen = interpolation or InterpolationMode.BILINEAR
        return resize(image, wanted, chosen, size.longest_edge, kwargs.get("antialias", True))

    def center_crop(self, image: Any, size: Any, **_: Any) -> Any:
        """Return the middle of images."""
        return center_crop(image, (size["height"], size["width"]))

    def rescale_and_normalize(
        self,
        images: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
    ) -> Any:
        """Return (images * rescale_factor - mean) / std in float32, of what is asked for."""
        if do_rescale and do_normalize:  # in one step, which rounds once
            mean, std = (torch.tensor(each) / rescale_factor for each in (image_mean, image_std))
            return normalize(images.to(torch.float32), mean, std)
        if do_normalize:
            return normalize(images.to(torch.float32), image_mean, image_std)
        return images * rescale_factor if do_rescale else images

    def _prepare_images_structure(self, images: Any, *_: Any, **__: Any) -> Any:
        return image_utils.make_flat_list_of_images(images)

    def _process_image(
        self,
        image: Any,
        do_convert_rgb: Any = None,
        input_data_format: Any = None,
        device: Any = None,
    ) -> torch.Tensor:
        if hasattr(image, "convert"):
            return pil_to_tensor(image.convert("RGB") if do_convert_rgb else image).to(device)
        values = torch.as_tensor(image)
        layout = input_data_format or image_utils.infer_channel_dimension_format(values)
        return (values.permute(2, 0, 1) if layout == ChannelDimension.LAST else values).to(device)

    def _prepare_input_images(self, images: Any, **options: Any) -> list[torch.Tensor]:
        return [
            self._process_image(each, **options) for each in self._prepare_images_structure(images)
        ]

    def _further_process_kwargs(
        self, size: Any = None, crop_size: Any = None, default_to_square: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        square = self.default_to_square if default_to_square is None else default_to_square
        sizes = {
            name: None
            if value is None
            else SizeDict(**get_size_dict(value, default_to_square=own, param_name=name))
            for name, value, own in (("size", size, square), ("crop_size", crop_size, True))
        }
        for name in ("image_mean", "image_std"):
            kwargs[name] = (
                tuple(kwargs[name]) if isinstance(kwargs.get(name), list) else kwargs.get(name)
            )
        return {**kwargs, **sizes, "default_to_square": default_to_square}

    def _validate_preprocess_kwargs(self, **_: Any) -> None:
        """Take any."""

    def preprocess(self, images: Any, *_: Any, **kwargs: Any) -> BatchFeature:
        """Return `pixel_values` of images."""
        for name in self.valid_kwargs.__annotations__:
            kwargs.setdefault(name, getattr(self, name, None))
        how = {name: kwargs.pop(name) for name in ("do_convert_rgb", "input_data_format", "device")}
        found = self._prepare_input_images(images, **how)
        kwargs = self._further_process_kwargs(**kwargs)
        resample = kwargs.pop("resample")
        kwargs["interpolation"] = _OF_PILLOW.get(resample, resample)
        for name in ("default_to_square", "data_format"):
            kwargs.pop(name, None)
        return self._preprocess(found, **kwargs)

    def _preprocess(self, images: Any, *_: Any, **kwargs: Any) -> BatchFeature:
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        scaling = [kwargs[name] for name in names]
        found = []
        for image in images:
            if kwargs["do_resize"]:
                image = self.resize(image, kwargs["size"], kwargs["interpolation"])
            if kwargs["do_center_crop"]:
                image = self.center_crop(image, kwargs["crop_size"])
            found.append(self.rescale_and_normalize(image, *scaling))
        tensors = kwargs.get("return_tensors")
        pixels = torch.stack(found) if tensors else found
        return BatchFeature({"pixel_values": pixels}, tensor_type=tensors)


def group_images_by_shape(images: Sequence[torch.Tensor], **_: Any) -> tuple[Any, Any]:
    """Return shape -> stacked images, and where each image went: shape and place."""
    grouped: dict[Any, list[torch.Tensor]] = {}
    places = {}
    for index, image in enumerate(images):
        same = grouped.setdefault(image.shape[1:], [])
        places[index] = (image.shape[1:], len(same))
        same.append(image)
    return {shape: torch.stack(same) for shape, same in grouped.items()}, places


def reorder_images(grouped: Mapping[Any, Any], places: Mapping[int, Any]) -> list[Any]:
    """Return grouped images in their first order."""
    return [grouped[shape][place] for shape, place in (places[i] for i in range(len(places)))]


def stand_in_for_torchvision() -> list[str]:
    """Have transformers' names for processors with torchvision mean these; return what to say."""
    from transformers import image_processing_backends, utils

    own = {
        "BaseImageProcessorFast": FastImageProcessor,
        "DefaultFastImageProcessorKwargs": FastImageOptions,
        "group_images_by_shape": group_images_by_shape,
        "reorder_images": reorder_images,
        "BASE_IMAGE_PROCESSOR_FAST_DOCSTRING": "",
        "BASE_IMAGE_PROCESSOR_FAST_DOCSTRING_PREPROCESS": "",
    }
    for name, value in own.items():
        setattr(image_processing_backends, name, value)
    image_utils.pil_torch_interpolation_mapping.update(_OF_PILLOW)
    utils.is_torchvision_v2_available = lambda: True  # so that functions are asked for there
    return [NOTE]
