"""The exactness certificate: which kernels of this machine give a row the same bits alone and among
others. It is measured (`overlap.probe`), kept as a file, and identified by a digest.

    products      of rows with a matrix, by dtype and class of (K, N): from how many rows on
    elementwise   functions that are not rounded alike by every code path, by dtype: the number of
                  elements that rows have to be a multiple of, 1 where position never matters
    rows          what reads a whole row (softmax, norms, sums), by dtype and class of its length
    attention     by dtype and class of (channels of queries, channels of values)

A class holds the sizes up to a power of two and above the one before. What is not in it is not
certified. A certificate holds for the environment that it was measured in: another device, another
torch, other settings of MKL or of threads have another file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overlap.errors import ConfigError

FOLDER_VARIABLE = "OVERLAP_CACHE"
COMMAND = "overlap hardware --probe"
_SETTINGS = ("MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "MKL_DYNAMIC")


def class_of(size: int) -> int:
    """The power of two that a size belongs to."""
    return 1 << max(size - 1, 0).bit_length()


def key(*sizes: int) -> str:
    """How the classes of some sizes are written, as "256x1024"."""
    return "x".join(str(class_of(size)) for size in sizes)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was found; all maps are by dtype name, as "float32".

    environment: what it holds for.
    max_rows: every number of rows up to it was tried.
    path: where it was read, "" for none.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    max_rows: int = 0
    products: Mapping[str, Mapping[str, int]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, int]]
    )
    elementwise: Mapping[str, Mapping[str, int]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, int]]
    )
    rows: Mapping[str, Mapping[str, tuple[str, ...]]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, tuple[str, ...]]]
    )
    attention: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict[str, tuple[str, ...]]
    )
    path: str = dataclasses.field(default="", compare=False)

    def least_rows(self, dtype: torch.dtype, inner: int, columns: int) -> int | None:
        """From how many rows of `inner` elements on a product with a matrix of `columns` columns
        gives each the same bits; None where it does not."""
        return self.products.get(name_of(dtype), {}).get(key(inner, columns))

    def multiple_of(self, dtype: torch.dtype, function: str) -> int | None:
        """What the length of a row has to be a multiple of; None where nothing helps."""
        return self.elementwise.get(name_of(dtype), {}).get(function)

    def has_rows(self, dtype: torch.dtype, function: str, length: int) -> bool:
        return key(length) in self.rows.get(name_of(dtype), {}).get(function, ())

    def has_attention(self, dtype: torch.dtype, channels: int, value_channels: int) -> bool:
        return key(channels, value_channels) in self.attention.get(name_of(dtype), ())

    @property
    def is_empty(self) -> bool:
        return not self.environment

    @property
    def digest(self) -> str:
        """Equal for certificates that say the same; "none" for the empty one."""
        return "none" if self.is_empty else _digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        del fields["path"]
        return json.loads(json.dumps(fields))

    def __str__(self) -> str:
        if self.is_empty:
            return f"no certificate: no kernel counts as row-invariant; make one with {COMMAND}"
        products = {dtype: len(classes) for dtype, classes in self.products.items()}
        return (
            f"certificate {self.digest} ({self.path or 'not saved'}), up to {self.max_rows} rows: "
            + ", ".join(
                f"{dtype} {products.get(dtype, 0)} classes of products, {len(functions)} functions"
                for dtype, functions in self.elementwise.items()
            )
        )


NONE = Certificate()


def environment(device: torch.device) -> dict[str, str]:
    """What decides which kernels run, and how."""
    is_cpu = device.type == "cpu"
    name = _cpu_name() if is_cpu else torch.cuda.get_device_name(device)
    return {
        "device": f"{device.type} {name}",
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability() if is_cpu else "",
        "threads": str(torch.get_num_threads()),
        **{setting: os.environ.get(setting, "") for setting in _SETTINGS},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def path_of(environment: Mapping[str, str]) -> Path:
    """Where the certificate of an environment lies: in OVERLAP_CACHE, or the user's cache."""
    folder = os.environ.get(FOLDER_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "overlap"
    return (Path(folder) if folder else base) / f"exact-{_digest(environment)}.json"


def load(device: torch.device) -> Certificate:
    """The certificate of this process's environment, the empty one if there is none.

    Raises ConfigError for a file that is none.
    """
    path = path_of(environment(device))
    if not path.exists():
        return NONE
    try:
        found = Certificate(**_frozen(json.loads(path.read_text())), path=str(path))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"certificate {str(path)!r} cannot be read: {error}; make it again with {COMMAND}"
        ) from error
    if dict(found.environment) != environment(device):
        raise ConfigError(f"certificate {str(path)!r} is of another environment; run {COMMAND}")
    return found


def save(certificate: Certificate) -> Path:
    path = path_of(certificate.environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(certificate.to_json(), indent=1) + "\n")
    return path


def _frozen(value: Any) -> Any:
    """Lists as tuples, so that what is read equals what was saved."""
    match value:
        case dict():
            return {name: _frozen(item) for name, item in value.items()}
        case list():
            return tuple(map(_frozen, value))
        case _:
            return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
