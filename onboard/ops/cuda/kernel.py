"""A compiled kernel on a device: how it is loaded and launched, by the driver's own functions."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from onboard.errors import OnboardError

_MOST_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_LARGE_CLUSTERS = 14
"""CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: of up to sixteen programs."""
_CLUSTER, _OVERLAP = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and ..._PROGRAMMATIC_STREAM_SERIALIZATION"""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """A function of a module of machine code, loaded on the current device."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        """Load it, for `threads` of a program, which has `shared` bytes of memory.

        Raises:
            OnboardError: the driver refuses.
        """
        torch.cuda.current_stream()  # PyTorch makes the device's context
        self._driver, self._function = driver(), ctypes.c_void_p()
        self._module = ctypes.c_void_p()  # which stays loaded as long as the process
        self.threads, self.shared = threads, shared
        check(self._driver.cuModuleLoadData(ctypes.byref(self._module), code))
        function = ctypes.byref(self._function)
        check(self._driver.cuModuleGetFunction(function, self._module, name.encode()))
        for attribute, value in ((_MOST_SHARED_MEMORY, shared), (_LARGE_CLUSTERS, 1)):
            check(self._driver.cuFuncSetAttribute(self._function, attribute, value))

    def clusters(self, cluster: int) -> int:
        """Return how many clusters of so many programs the device has at a time."""
        count = ctypes.c_int()
        configuration = self._configuration((cluster, 1), cluster)
        ask = self._driver.cuOccupancyMaxActiveClusters
        check(ask(ctypes.byref(count), self._function, ctypes.byref(configuration)))
        return count.value

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure, cluster: int) -> None:
        """Run it on the current stream: it may start before the kernel in front has ended
        (programmatic dependent launch), and `cluster` neighbouring programs share their memories.

        Raises:
            OnboardError: the driver refuses.
        """
        configuration = self._configuration(grid, cluster)
        given = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        launch = self._driver.cuLaunchKernelEx
        check(launch(ctypes.byref(configuration), self._function, given, None))

    def _configuration(self, grid: tuple[int, int], cluster: int) -> _Configuration:
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[:3] = _CLUSTER, (cluster, 1, 1)
        attributes[1].id, attributes[1].value[0] = _OVERLAP, 1
        return _Configuration(
            (ctypes.c_uint * 3)(*grid, 1), (ctypes.c_uint * 3)(self.threads, 1, 1), self.shared,
            torch.cuda.current_stream().cuda_stream, attributes, 2,
        )  # fmt: skip


@cache
def driver() -> Any:
    """Return the CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def check(result: int) -> None:
    """Go on if a function of the driver has returned 0.

    Raises:
        OnboardError: with what the driver says, if not.
    """
    if result:
        said = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(said))
        text = said.value.decode() if said.value else f"error {result}"
        raise OnboardError(f"the CUDA driver refuses a kernel: {text}")
