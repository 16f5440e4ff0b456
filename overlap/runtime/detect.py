"""What this process runs on, where the user leaves it open: hardware profile and kernels."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap import hardware
from overlap.hardware import Profile
from overlap.runtime import link, link_group


def profile(name: str, device: torch.device) -> Profile:
    """The profile called `name`; for "auto" the one of `device`, with the emulated link's rate
    where one is in use. Equal on all ranks of a job with equal devices.

    Raises ConfigError for an unknown name, and for a GPU that no built-in profile describes.
    """
    if name != "auto":
        return hardware.load(name)
    if device.type == "cpu":
        found = hardware.load("cpu")
        if dist.is_initialized() and dist.get_backend() == link_group.EMULATED:
            return hardware.with_link(found, link.process_link().config.bandwidth_mbit)
        return found
    return hardware.load(_gpu_profile(torch.cuda.get_device_name(device)))


def inner(name: str, device: torch.device) -> str:
    """Who generates the kernels, "eager" or "inductor"; "auto" is eager on the CPU."""
    if name != "auto":
        return name
    return "eager" if device.type == "cpu" else "inductor"


def _gpu_profile(device_name: str) -> str:
    lower = device_name.lower()
    known = [profile for profile in hardware.names() if profile in lower and profile != "cpu"]
    return max(known, key=len) if known else lower
