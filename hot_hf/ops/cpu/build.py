"""Compile ``kernels.cpp`` once per machine and load it; the plain torch path stands in where that fails."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from ctypes import Structure, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch

logger = logging.getLogger("hot_hf")

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = [SOURCE.with_name(name) for name in ("epilogue.h", "product.h", "quantize.h", "vectors.h")]
# -ffp-contract=off: a fused multiply-add would change integers. -O3 takes twice as long to compile and is no faster.
FLAGS = ("-O2", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINK = ("-std=c++17", "-fPIC", "-shared", "-w")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of kernels.cpp
SIGNATURES = {
    "hot_hf_quantize": (
        *(c_void_p, c_int, c_int64, c_int64, c_int64, c_int, c_int, c_float),  # x and its transform
        *(c_void_p, c_void_p, c_int),  # row_scale, keep, kept
        *(c_int, c_int, c_int, c_int, c_uint64, c_int64, c_int64),  # qmax, per_tensor, packed, rounding and its numbers
        *(c_void_p, c_void_p, c_int),  # q, scale, threads
        c_void_p,  # ByRow or None
    ),
    "hot_hf_epilogue": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int, c_float),
        *(c_void_p, c_int, c_int64, c_int),
    ),
    "hot_hf_amx": (),
    "hot_hf_product_bytes": (c_int64, c_int64, c_int64, c_int),
    "hot_hf_product": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),  # a and b, each with its two strides
        *(c_int, c_int64, c_int64, c_int64),  # b_packed, rows, cols, depth
        *(c_void_p, c_int64, c_void_p, c_int64, c_int, c_float),  # scales and transform
        *(c_void_p, c_int, c_int64, c_void_p, c_int),  # out, its dtype and columns, scratch, threads
    ),
    "hot_hf_unpack": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),
}


class ByRow(Structure):
    """``HotHfByRow`` of kernels.cpp."""

    _fields_ = [
        ("block", c_int),
        ("factor", c_float),
        ("qmax", c_int),
        ("seed", c_uint64),
        ("number_row", c_int64),
        ("q", c_void_p),
        ("scale", c_void_p),
    ]


_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_tried = False


def library() -> ctypes.CDLL | None:
    """The compiled kernels, built and loaded at the first call; None where they cannot be (said once in the log)."""
    return _library if _tried else _load()


def check(failed: int, *found: object) -> None:
    """Raise where a kernel refused its arguments: its result was never written."""
    if failed:
        raise RuntimeError(f"hot_hf: a CPU kernel refused its arguments ({', '.join(map(str, found))})")


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of c++, g++, clang++ on the path."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def cache_directory() -> Path:
    """``$HOT_HF_CACHE``, else hot_hf under the user's cache directory."""
    chosen = os.environ.get("HOT_HF_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hot_hf"


def _cpu_flags() -> str:
    """What -march=native depends on: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _load() -> ctypes.CDLL | None:
    global _library, _tried
    with _lock:
        if not _tried:
            try:
                _library = _build_and_open()
            except _Unavailable as reason:
                logger.warning(
                    "hot_hf: no CPU kernels (%s); quantizers run in plain torch, several times slower", reason
                )
            _tried = True
    return _library


class _Unavailable(Exception):
    pass


def _build_and_open() -> ctypes.CDLL:
    if os.environ.get("HOT_HF_CPU_KERNELS") == "0":
        raise _Unavailable("HOT_HF_CPU_KERNELS=0")
    cxx = compiler()
    if cxx is None:
        raise _Unavailable("no C++ compiler: install g++ or clang++, or set CXX")
    try:
        version = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60).stdout
        sources = (path.read_text() for path in (SOURCE, *HEADERS))
        parts = (*sources, version, platform.machine(), _cpu_flags(), *FLAGS, *LINK)
        name = f"cpu-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
        path = _writable_cache() / name
        if not path.exists():
            _compile(cxx, path)
        return _open(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise _Unavailable(f"{type(error).__name__}: {error}") from error


def _writable_cache() -> Path:
    """The cache directory, or one of this process alone where it cannot be written. Never one that others can write."""
    path = cache_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK) and (not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="hot_hf_"))


def _compile(cxx: str, path: Path) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        command = [cxx, *FLAGS, *LINK, "-o", str(fresh), str(SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode:
            reason = result.stderr.strip().splitlines()
            raise _Unavailable(f"{cxx} failed: {reason[0] if reason else result.returncode}")
        os.replace(fresh, path)  # atomic: another process may be building the same file
    logger.warning("hot_hf: built the CPU kernels in %.1f s, once: %s", time.perf_counter() - start, path)


def _open(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))  # releases the GIL in calls
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int64 if name.endswith("_bytes") else c_int
    return loaded
