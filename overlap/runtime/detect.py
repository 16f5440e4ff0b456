"""What this process runs on: hardware profile and kernels where the user leaves them open, and its
place, which a cost table is held to."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap import hardware
from overlap.cost_table import Place
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


def place(device: torch.device) -> Place:
    """Where this process computes and communicates."""
    is_job = dist.is_initialized()
    backend = dist.get_backend() if is_job else "none"
    is_emulated = backend == link_group.EMULATED
    mbit = link.process_link().config.bandwidth_mbit if is_emulated else 0.0
    return Place(
        torch=torch.__version__,
        device=_device_name(device),
        threads=torch.get_num_threads(),
        kernels=os.environ.get("MKL_CBWR", ""),
        ranks=dist.get_world_size() if is_job else 1,
        backend=backend,
        link=f"{mbit:g} Mbit/s" if is_emulated else "",
    )


def known_place(device: torch.device) -> dict[str, Any]:
    """The fields of `Place` that this process can tell: all of them on a rank of a real job; a fake
    one has torch and its number of ranks, and the table says for which machine it compiles."""
    fields = dataclasses.asdict(place(device))
    is_fake = dist.is_initialized() and dist.get_backend() == "fake"
    return {name: fields[name] for name in (("torch", "ranks") if is_fake else fields)}


def _device_name(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
