"""Which backend computes for a tensor: chosen by its device, never by a global switch."""

from __future__ import annotations

import logging
from functools import cache

import torch

from . import cpu
from .backend import REFERENCE, Backend

logger = logging.getLogger(__name__)


def backend_for(x: torch.Tensor) -> Backend:
    """The backend of ``x``'s device; the plain torch path where no kernels exist."""
    return _backend(x.device.type, x.device.index)


@cache
def _backend(device_type: str, index: int | None) -> Backend:
    if device_type == "cpu":
        return cpu.BACKEND
    if device_type == "meta":  # computes nothing
        return REFERENCE
    reason = why_no_kernels(device_type, index)
    if reason is None:
        from . import triton

        return triton.BACKEND
    logger.warning(
        "hot_hf: plain torch instead of kernels on %s: %s",
        device_type if index is None else f"{device_type}:{index}",
        reason,
    )
    return REFERENCE


def why_no_kernels(device_type: str, index: int | None = None) -> str | None:
    """Why the Triton kernels cannot serve a device, or None if they can. Never raises.

    ROCm devices are of type cuda in torch; mps, xpu, npu and others have no kernels here.
    """
    if device_type != "cuda":
        return f"there are none for devices of type {device_type}"
    try:
        from . import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install 'hot_hf[triton]'"
    except Exception as error:  # an installation that breaks while it is imported
        return f"Triton breaks when it is imported ({type(error).__name__}: {error}); reinstall it"
    try:
        triton.check_device(device_type, index)
    except Exception as error:  # the driver look-up raises what it likes: RuntimeError, AttributeError, OSError
        return f"{type(error).__name__}: {error}"
    return None
