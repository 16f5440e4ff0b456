from __future__ import annotations

import dataclasses
import json

import pytest

from overlap import hardware
from overlap.errors import ConfigError


@pytest.mark.parametrize("name", hardware.names())
def test_built_in_profiles_load(name: str):
    profile = hardware.load(name)
    assert profile.name == name
    assert profile.is_stream == (profile.device == "cuda")
    assert profile.flops_per_us("bfloat16") > 0


def test_h100_reaches_the_measured_gemm_rate():
    tflops = hardware.load("h100").flops_per_us("bfloat16") / 1e6
    assert tflops == pytest.approx(780, rel=0.01)


def test_a_dtype_without_a_peak_runs_at_the_float32_rate():
    h100 = hardware.load("h100")
    assert h100.flops_per_us("float64") == h100.flops_per_us("float32")


def test_a_group_larger_than_a_node_uses_the_network():
    h100 = hardware.load("h100")
    assert [h100.link_of(size) for size in (2, 8, 16)] == ["node", "node", "network"]
    assert h100.collective_us("all_to_all", 8, 1e6) < h100.collective_us("all_to_all", 16, 1e6)
    # A NIC of 50 GB/s carries 47; the latency is assumed.
    assert h100.collective_us("all_to_all", 16, 47e6) == h100.network_latency_us + 1000


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "num_bytes", "measured_us"),
    [
        ("h100", "all_to_all", 8, 2**29 * 7 / 8, 1490.4),
        ("h100", "all_reduce", 8, 2**30 * 7 / 8, 2111.1),
        ("h100", "all_gather", 2, 2**28, 1038.6),
        ("gb200", "reduce_scatter", 4, 2**29 * 3 / 4, 733.3),
    ],
)
def test_a_collective_inside_a_node_takes_what_nccl_takes(
    name: str, kind: str, ranks: int, num_bytes: float, measured_us: float
):
    us = hardware.load(name).collective_us(kind, ranks, num_bytes)
    assert us == pytest.approx(measured_us, rel=0.19)
    assert hardware.load(name).latency_of(kind, ranks) < 35


def test_a_number_of_ranks_that_was_not_measured_takes_the_nearest():
    h100, gb200 = hardware.load("h100"), hardware.load("gb200")
    assert h100.latency_of("all_gather", 7) == h100.latency_of("all_gather", 8)
    assert gb200.latency_of("all_gather", 64) == gb200.latency_of("all_gather", 4)
    assert h100.latency_of("p2p", 8) == h100.latency_us


def test_a_file_with_another_link_does_not_keep_the_fits_of_its_base(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100"\nnode_gbps = 225.0\n')
    mine = hardware.load(str(path))
    assert mine.collective_us("all_to_all", 8, 162e6) == mine.latency_us + 1000
    path.write_text('base = "h100"\n[fits]\n"all_to_all/8" = [10, 200]\n')
    assert hardware.load(str(path)).collective_us("all_to_all", 8, 2e6) == 20


def test_with_link_gives_that_many_megabits():
    profile = hardware.with_link(hardware.load("cpu"), 400)
    assert profile.name == "cpu+400mbit"
    assert profile.collective_us("all_to_all", 2, 50e3) == profile.network_latency_us + 1000


def test_with_link_refuses_a_link_that_moves_nothing():
    with pytest.raises(ConfigError, match=r"node_gbps expects a number above 0, found 0\.0"):
        hardware.with_link(hardware.load("cpu"), 0)


def test_an_unknown_name_lists_the_profiles():
    with pytest.raises(ConfigError) as error:
        hardware.load("h10")
    assert str(error.value) == (
        "no hardware profile 'h10'; did you mean 'h100'? the hardware profiles are: "
        "a100, b200, cpu, gb200, h100, h200"
    )


def test_a_file_may_build_on_a_profile(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100"\nnetwork_gbps = 46.0\n')
    assert hardware.load(str(path)) == dataclasses.replace(
        hardware.load("h100"), name="mine", network_gbps=46.0
    )


def test_a_json_file_that_says_everything_is_the_same_profile(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(dataclasses.asdict(hardware.load("cpu"))))
    assert hardware.load(str(path)) == hardware.load("cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "h100"\nnetwork = 46.0', "no field of a hardware profile 'network'; did you mean"),
        ("reached = 0.5", "hardware profile 'bad' does not say device, peak_tflops, memory_gbps"),
        ('base = "h100"\nreached = 1.5', "expects a number above 0 and at most 1, found 1.5"),
        ('base = "h100"\ngpus_per_node = "x"', "gpus_per_node expects a number above 0, found 'x'"),
        ('base = "h100"\ndevice = "tpu"', "no device of profile 'bad' 'tpu'"),
        ('base = "h100"\npeak_tflops = {}', "gives no peak_tflops for 'float32'"),
        ('base = "h100"\n[fits]\nall_to_all = [1, 2]', "fits expects latency and GB/s by kind and"),
        ("= 1", "cannot be read: "),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, text: str, message: str):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        hardware.load(str(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"gone.toml' cannot be read"):
        hardware.load(str(tmp_path / "gone.toml"))
