"""CUDA C++ to machine code by NVRTC, which PyTorch brings; what was compiled is kept for the next start."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.user_cache import keep, user_cache


def compiled(source: str, macros: Mapping[str, int], architecture: str) -> bytes:
    """Return the machine code (cubin) of a source behind `common.cuh`, with macros, for an architecture
    such as "sm_90a".

    Raises:
        OnboardError: NVRTC is not there, or does not take the source.
    """
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    text += _common() + source
    name = f"{torch.version.cuda} {architecture}\n{text}"
    folder = user_cache("cuda")
    path = folder and folder / f"{hashlib.sha256(name.encode()).hexdigest()}.cubin"
    if path is not None and path.is_file():
        return path.read_bytes()
    code = _compile(text, (f"--gpu-architecture={architecture}", "--std=c++17"))
    if path is not None:
        keep(path, code)
    return code


@cache
def _common() -> str:
    return Path(__file__).with_name("common.cuh").read_text(encoding="utf-8")


@cache
def _library() -> Any:
    """Return NVRTC: as the system finds it, or from the packages that PyTorch's wheels ask for."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major or '*'}"
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    packaged = sorted(str(file) for folder in folders for file in folder.rglob(name))
    for candidate in (name, *packaged):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OnboardError(
        f"{name} is not found, by which kernels are compiled",
        hint="Install nvidia-cuda-nvrtc of the CUDA release that torch.version.cuda names",
    )


def _compile(text: str, options: tuple[str, ...]) -> bytes:
    nvrtc, program = _library(), ctypes.c_void_p()
    handle = ctypes.byref(program)
    _check(nvrtc.nvrtcCreateProgram(handle, text.encode(), b"kernel.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            said = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise OnboardError(f"a kernel does not compile: {said.decode(errors='replace')}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(result: int) -> None:
    if result:
        raise OnboardError(f"NVRTC ended with error {result}")
