"""Hardware profiles: what the cost model knows about a machine.

Figures are per device. A `peak` or link rate comes from a data sheet, a `reached` fraction from
measurement; each profile says which in `sources`. A profile file (TOML or JSON) holds the same
names as the fields of `Profile`; it may name a built-in one in `base` and give only what differs:

    base = "h100"
    network_gbps = 46.0
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap.errors import ConfigError, unknown_name


@dataclasses.dataclass(frozen=True)
class Profile:
    """One kind of machine, as the cost model and the simulator see it.

    name: how it is called in options and reports.
    device: "cpu" or "cuda".
    peak_tflops: dense peak in TFLOP/s by dtype name (`float32`, `bfloat16`, ...); a dtype that is
        not named runs at the float32 rate.
    reached: fraction of the peak that a large matrix product reaches.
    memory_gbps, memory_reached: memory bandwidth in GB/s, and the fraction that kernels reach.
    node_gbps, network_gbps: what one device sends to devices of its node and to other nodes, in
        GB/s per direction.
    link_reached, network_reached: fraction of the node's link and of the network's rate that a
        large collective reaches.
    gpus_per_node: groups up to this size are taken to lie inside one node.
    latency_us, network_latency_us: time of an empty collective inside a node and between nodes.
    launch_us: host time to issue one node.
    host_read_us: time that the host needs to read one device value, on top of the drain.
    contention: compute beside communication takes 1 + contention times as long; 0 where
        communication needs no compute units.
    is_stream: the host runs ahead of the device, whose stream keeps issue order (CUDA); False:
        the host runs the kernels itself.
    fits: two-term fits of measured collectives inside a node, which replace `latency_us` and
        `node_gbps`: microseconds of an empty one and the GB/s that one device sends, by kind and
        number of ranks, such as "all_to_all/8". Another number of ranks takes the nearest.
    nominal_size: what a symbolic size other than the batch counts as, such as the sequence length
        that is usual on such a machine.
    sources: where each figure comes from, by field name.
    """

    name: str
    device: str
    peak_tflops: Mapping[str, float]
    reached: float
    memory_gbps: float
    memory_reached: float
    node_gbps: float
    network_gbps: float
    link_reached: float
    network_reached: float
    gpus_per_node: int
    latency_us: float
    network_latency_us: float
    launch_us: float
    host_read_us: float
    contention: float
    is_stream: bool
    nominal_size: int = 4096
    fits: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, Any])
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise unknown_name(f"device of profile {self.name!r}", self.device, ("cpu", "cuda"))
        if "float32" not in self.peak_tflops:
            raise ConfigError(f"profile {self.name!r} gives no peak_tflops for 'float32'")
        for field in ("reached", "memory_reached", "link_reached", "network_reached"):
            self._check(field, low=0.0, high=1.0)
        for field in ("memory_gbps", "node_gbps", "network_gbps", "gpus_per_node", "nominal_size"):
            self._check(field, low=0.0)
        for field in (*_LATENCIES, "launch_us", "host_read_us", "contention"):
            self._check(field, low=-1e-12)
        for name, fit in self.fits.items():
            if not _FIT_NAME.fullmatch(name) or len(fit) != 2 or fit[0] < 0 or fit[1] <= 0:
                raise ConfigError(
                    f"profile {self.name!r}: fits expects latency and GB/s by kind and number of "
                    f"ranks, as 'all_to_all/8' = (13.1, 289.9), found {name!r} = {fit!r}"
                )

    def _check(self, field: str, low: float, high: float = float("inf")) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            upper = "" if high == float("inf") else f" and at most {high:g}"
            raise ConfigError(
                f"profile {self.name!r}: {field} expects a number above {max(low, 0):g}{upper}, "
                f"found {value!r}"
            )

    def flops_per_us(self, dtype_name: str) -> float:
        """Rate that a large matrix product of this dtype reaches, in FLOP per microsecond."""
        peak = self.peak_tflops.get(dtype_name, self.peak_tflops["float32"])
        return peak * 1e6 * self.reached

    def memory_bytes_per_us(self) -> float:
        return self.memory_gbps * 1e3 * self.memory_reached

    def link_of(self, group_size: int) -> str:
        """The link that a group of this size uses: "node" or "network"."""
        return "node" if group_size <= self.gpus_per_node else "network"

    def latency_of(self, kind: str, group_size: int) -> float:
        """Time of an empty collective of a kind, such as "all_to_all", in microseconds."""
        return self._alpha_beta(kind, group_size)[0]

    def collective_us(self, kind: str, group_size: int, num_bytes: float) -> float:
        """Time of a collective in which every rank sends `num_bytes`."""
        alpha_us, gbps = self._alpha_beta(kind, group_size)
        return alpha_us + num_bytes / (gbps * 1e3)

    def _alpha_beta(self, kind: str, group_size: int) -> tuple[float, float]:
        if self.link_of(group_size) == "network":
            return self.network_latency_us, self.network_gbps * self.network_reached
        measured = [
            int(name.rpartition("/")[2]) for name in self.fits if name.startswith(f"{kind}/")
        ]
        if not measured:
            return self.latency_us, self.node_gbps * self.link_reached
        nearest = min(measured, key=lambda ranks: (abs(math.log(ranks / group_size)), -ranks))
        return self.fits[f"{kind}/{nearest}"]


_OPTIONAL = ("fits", "sources")
_LATENCIES = ("latency_us", "network_latency_us")
_REPLACED_BY_FITS = ("node_gbps", "link_reached", "latency_us")
_FIT_NAME = re.compile(r"[a-z_]+/[1-9][0-9]*")
_NVIDIA = "NVIDIA data sheet, dense"
_GEMM = "median of measured BF16 GEMMs with m = 16384, n and k >= 2048"
_NCCL = "NCCL 2.29 on one node: bus bandwidth of 0.5 GB all-gathers and all-to-alls"
_FITS = "two-term fits of NCCL 2.29.2, published with aiconfigurator-core 0.12; good to 6 to 19 %"
_NIC = "a NIC carries 46 to 48 of its 50 GB/s"
_SMS = "a model: communication kernels hold 20 SMs while they run"
_HOST = "a model: one kernel launch, one event and copy back"

# fmt: off
_H100_FITS = {
    "all_gather/2": (11.4, 228.4), "all_gather/4": (13.7, 283.1), "all_gather/8": (16.4, 306.6),
    "all_reduce/2": (14.3, 285.3), "all_reduce/4": (16.1, 324.0), "all_reduce/8": (26.3, 398.0),
    "all_to_all/2": (13.0, 264.3), "all_to_all/4": (13.0, 275.1), "all_to_all/8": (13.1, 289.9),
    "reduce_scatter/2": (10.0, 217.9), "reduce_scatter/4": (11.1, 279.8),
    "reduce_scatter/8": (13.2, 309.1),
}
_H200_FITS = {
    "all_gather/2": (11.3, 231.5), "all_gather/4": (13.4, 288.1), "all_gather/8": (17.3, 312.2),
    "all_reduce/2": (13.6, 288.5), "all_reduce/4": (15.8, 327.2), "all_reduce/8": (27.1, 410.6),
    "all_to_all/2": (12.1, 273.8), "all_to_all/4": (12.1, 294.5), "all_to_all/8": (13.0, 290.2),
    "reduce_scatter/2": (9.7, 221.6), "reduce_scatter/4": (11.3, 285.8),
    "reduce_scatter/8": (13.7, 311.6),
}
_B200_FITS = {
    "all_gather/2": (13.9, 418.1), "all_gather/4": (16.7, 527.8), "all_gather/8": (21.6, 558.3),
    "all_reduce/2": (15.2, 501.4), "all_reduce/4": (20.8, 578.5), "all_reduce/8": (31.4, 602.0),
    "all_to_all/2": (15.4, 322.6), "all_to_all/4": (16.9, 471.6), "all_to_all/8": (18.8, 524.0),
    "reduce_scatter/2": (12.6, 388.3), "reduce_scatter/4": (16.1, 516.9),
    "reduce_scatter/8": (20.9, 556.9),
}
_GB200_FITS = {
    "all_gather/2": (14.2, 417.7), "all_gather/4": (17.0, 526.0),
    "all_reduce/2": (15.6, 500.4), "all_reduce/4": (21.8, 577.7),
    "all_to_all/2": (16.1, 324.7), "all_to_all/4": (16.5, 470.9),
    "reduce_scatter/2": (13.1, 388.9), "reduce_scatter/4": (16.0, 512.3),
}
_CPU = Profile(
    name="cpu", device="cpu",
    peak_tflops={"float32": 0.1, "float64": 0.05, "bfloat16": 0.1}, reached=0.9,
    memory_gbps=24.0, memory_reached=0.75,
    node_gbps=1.25, network_gbps=1.25, link_reached=0.95, network_reached=0.95,
    gpus_per_node=1, latency_us=200.0, network_latency_us=200.0,
    launch_us=8.0, host_read_us=1.0, contention=0.0, is_stream=False,
    nominal_size=128,
    sources={
        "peak_tflops": "one AVX-512 core of a server CPU; large fp32 GEMMs reach 60 to 100 GFLOP/s",
        "memory_gbps": "one core, between results in its cache (40) and freshly mapped ones (6)",
        "network_gbps": "10 Gbit/s Ethernet; see with_link",
        "latency_us": "a 4 KiB gloo all-to-all, as network_latency_us",
        "launch_us": "a node of a graph of small tensors, run from Python, its allocation included",
    },
)
_H100 = Profile(
    name="h100", device="cuda",
    peak_tflops={"float32": 67.0, "bfloat16": 989.0, "float16": 989.0, "float8_e4m3fn": 1979.0},
    reached=0.79, memory_gbps=3350.0, memory_reached=0.8,
    node_gbps=450.0, network_gbps=50.0, link_reached=0.72, network_reached=0.94,
    gpus_per_node=8, latency_us=13.0, network_latency_us=26.0,
    launch_us=5.0, host_read_us=10.0, contention=0.18, is_stream=True, fits=_H100_FITS,
    sources={
        "peak_tflops": _NVIDIA, "reached": _GEMM, "memory_reached": "rule of thumb",
        "link_reached": _NCCL, "latency_us": "two-term fit of NCCL 2.29, all-to-all on 8 GPUs",
        "network_reached": _NIC, "network_latency_us": "assumed: twice that inside a node",
        "fits": _FITS, "contention": _SMS, "launch_us": _HOST, "host_read_us": _HOST,
    },
)
# fmt: on


def _like_h100(name: str, **changes: Any) -> Profile:
    return dataclasses.replace(_H100, name=name, **changes)


_BUILT_IN = {
    profile.name: profile
    for profile in (
        _CPU,
        _like_h100(
            "a100",
            peak_tflops={"float32": 19.5, "bfloat16": 312.0, "float16": 312.0},
            memory_gbps=2000.0,
            node_gbps=300.0,
            network_gbps=25.0,
            fits={},
            sources=dict(_H100.sources) | {"reached": "assumed as on H100"},
        ),
        _H100,
        _like_h100("h200", reached=0.78, memory_gbps=4800.0, fits=_H200_FITS),
        _like_h100(
            "b200",
            peak_tflops={
                "float32": 75.0,
                "bfloat16": 2250.0,
                "float16": 2250.0,
                "float8_e4m3fn": 4500.0,
            },
            reached=0.67,
            memory_gbps=7700.0,
            node_gbps=900.0,
            link_reached=0.65,
            latency_us=19.0,
            fits=_B200_FITS,
            contention=0.16,
        ),
        _like_h100(
            "gb200",
            peak_tflops={
                "float32": 80.0,
                "bfloat16": 2500.0,
                "float16": 2500.0,
                "float8_e4m3fn": 5000.0,
            },
            reached=0.66,
            memory_gbps=8000.0,
            node_gbps=900.0,
            network_gbps=100.0,
            link_reached=0.58,
            gpus_per_node=72,
            latency_us=19.0,
            fits=_GB200_FITS,
            contention=0.16,
        ),
    )
}


def names() -> tuple[str, ...]:
    """Names of the built-in profiles."""
    return tuple(_BUILT_IN)


def load(name_or_path: str) -> Profile:
    """The built-in profile of that name, or the one in a .toml or .json file.

    Raises ConfigError for an unknown name, an unreadable file, or a field that is unknown, missing
    or out of range.
    """
    if name_or_path in _BUILT_IN:
        return _BUILT_IN[name_or_path]
    path = Path(name_or_path)
    if path.suffix not in (".toml", ".json"):
        raise unknown_name("hardware profile", name_or_path, _BUILT_IN)
    return _from_fields(_read(path), default_name=path.stem)


def with_link(profile: Profile, mbit: float) -> Profile:
    """`profile` with every link at `mbit` megabits per second, all of it usable.

    Raises ConfigError unless `mbit` is above 0.
    """
    gbps = mbit / 8e3
    return dataclasses.replace(
        profile,
        name=f"{profile.name}+{mbit:g}mbit",
        node_gbps=gbps,
        network_gbps=gbps,
        link_reached=1.0,
        network_reached=1.0,
        fits={},
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"hardware profile {str(path)!r} cannot be read: {error}") from error


def _from_fields(fields: dict[str, Any], default_name: str) -> Profile:
    valid = [field.name for field in dataclasses.fields(Profile)]
    fields = {"name": default_name} | fields
    if isinstance(fields.get("fits"), dict):
        fields["fits"] = {kind: tuple(fit) for kind, fit in fields["fits"].items()}
    elif any(field in fields for field in _REPLACED_BY_FITS):
        fields["fits"] = {}  # those of a base are of another link
    base = fields.pop("base", None)
    for field in fields:
        if field not in valid:
            raise unknown_name("field of a hardware profile", field, [*valid, "base"])
    if base is not None:
        return dataclasses.replace(load(base), **fields)
    missing = [field for field in valid if field not in fields and field not in _OPTIONAL]
    if missing:
        raise ConfigError(
            f"hardware profile {default_name!r} does not say {', '.join(missing)}; add them, or "
            "name a built-in profile as base"
        )
    return Profile(**fields)
