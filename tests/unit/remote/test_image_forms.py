"""What stands in for torchvision in image processors: compared with Pillow and with numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from onboard.hf.old.image_forms import (
    FUNCTIONAL,
    FastImageOptions,
    FastImageProcessor,
    InterpolationMode,
    group_images_by_shape,
    reorder_images,
)

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


def picture(width: int, height: int) -> Any:
    seed = random.randrange(2**31)
    print("seed", seed)
    noise = np.random.default_rng(seed).integers(
        0, 256, (height // 4, width // 4, 3), dtype=np.uint8
    )
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def levels(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy()).int()


@pytest.mark.parametrize(
    ("mode", "of_pillow"),
    [
        (InterpolationMode.BILINEAR, Image.Resampling.BILINEAR),
        (InterpolationMode.BICUBIC, Image.Resampling.BICUBIC),
    ],
)
@pytest.mark.parametrize("size", [(20, 36), (90, 44), (40, 64)])
def test_images_are_resized_as_pillow_does(
    mode: Any, of_pillow: Any, size: tuple[int, int]
) -> None:
    image = picture(64, 40)
    found = FUNCTIONAL.resize(FUNCTIONAL.pil_to_tensor(image), size, interpolation=mode)
    assert found.dtype == torch.uint8
    expected = levels(image.resize(size[::-1], of_pillow))
    assert int((found.int() - expected).abs().max()) <= 1
    batch = torch.stack([FUNCTIONAL.pil_to_tensor(image)] * 2)
    assert torch.equal(FUNCTIONAL.resize(batch, size, interpolation=mode)[1], found)


def test_one_number_is_the_shorter_edge() -> None:
    image = FUNCTIONAL.pil_to_tensor(picture(64, 40))
    assert FUNCTIONAL.resize(image, 20).shape == (3, 20, 32)
    assert FUNCTIONAL.resize(image.transpose(1, 2), [20]).shape == (3, 32, 20)
    assert FUNCTIONAL.resize(image, 20, max_size=24).shape == (3, 15, 24)


def test_borders_and_parts() -> None:
    image = torch.arange(2 * 3 * 5).view(2, 3, 5)
    padded = FUNCTIONAL.pad(image, padding=[1, 2, 3, 4], fill=7)
    assert padded.shape == (2, 3 + 2 + 4, 5 + 1 + 3)
    assert torch.equal(FUNCTIONAL.crop(padded, 2, 1, 3, 5), image)
    assert int((padded == 7).sum()) == 2 * (9 * 9 - 15) + int((image == 7).sum())
    assert torch.equal(FUNCTIONAL.pad(image, [1, 2]), FUNCTIONAL.pad(image, [1, 2, 1, 2]))
    assert torch.equal(FUNCTIONAL.center_crop(padded, (1, 3)), padded[:, 4:5, 3:6])


class Options(FastImageOptions, total=False):
    tiles: int


class Tiled(FastImageProcessor):
    resample = 3
    image_mean = MEAN
    image_std = STD
    size: Any = {"height": 16, "width": 24}
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    valid_kwargs = Options


def test_a_processor_computes_what_its_fields_say() -> None:
    image = picture(64, 40)
    made = Tiled(tiles=3, image_std=[0.25, 0.5, 1.0])
    assert (made.tiles, made.image_std) == (3, [0.25, 0.5, 1.0])
    assert made.size["height"] == 16
    found = made.preprocess([image, image], return_tensors="pt")["pixel_values"]
    assert found.shape == (2, 3, 16, 24)
    small = levels(image.resize((24, 16), Image.Resampling.BICUBIC)).double() / 255
    mean, std = (torch.tensor(each).view(3, 1, 1).double() for each in (MEAN, made.image_std))
    torch.testing.assert_close(found[1].double(), (small - mean) / std, atol=1 / 60, rtol=0)
    plain = made.preprocess([image], do_resize=False, do_normalize=False, return_tensors="pt")
    expected = levels(image).double() / 255
    torch.testing.assert_close(plain["pixel_values"][0].double(), expected, atol=1e-6, rtol=0)


def test_images_come_back_in_their_order() -> None:
    images = [torch.full((3, size, 4), float(index)) for index, size in enumerate([5, 7, 5, 9, 7])]
    grouped, places = group_images_by_shape(images)
    assert {tuple(each.shape) for each in grouped.values()} == {
        (2, 3, 5, 4),
        (2, 3, 7, 4),
        (1, 3, 9, 4),
    }
    for found, image in zip(reorder_images(grouped, places), images, strict=True):
        assert torch.equal(found, image)
