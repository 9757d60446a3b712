import pytest
import torch

from onboard.cache.pages import PageAllocator
from onboard.cache.resources import KVPagedResource
from onboard.errors import OnboardError


def test_a_cache_has_the_documented_layout_and_size() -> None:
    resource = KVPagedResource(num_kv_heads=3, head_dim=5, dtype=torch.bfloat16, page_size=4)
    cache = resource.allocate(7, torch.device("cpu"))
    assert cache.shape == (7, 3, 4, 5)
    assert cache.dtype == torch.bfloat16
    assert cache.nbytes == 7 * resource.bytes_per_page


def test_pages_are_handed_out_once_and_never_page_zero() -> None:
    allocator = PageAllocator(6)
    pages = allocator.take(3) + allocator.take(2)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0
    with pytest.raises(OnboardError, match="1 cache pages are needed and 0 are free"):
        allocator.take(1)
    allocator.give_back(pages[:2])
    assert sorted(allocator.take(2)) == sorted(pages[:2])


def test_freeing_a_page_twice_is_a_bug() -> None:
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    allocator.give_back(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.give_back(pages)
