"""The probe finds kernels that are not row-invariant; certificates are kept, named and compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlap import certificate, cli, probe
from overlap.certificate import NONE, Certificate
from overlap.errors import ConfigError

CPU = torch.device("cpu")
SMALL = 1 << 12


def rounds_few_rows_otherwise(x: Tensor) -> Tensor:
    """A product as MKL has it by default: another kernel for fewer than 16 rows."""
    matrix = torch.ones(x.shape[1], 4)
    return x @ matrix if len(x) >= 16 else (x * 3) @ matrix / 3


def rounds_the_remainder_otherwise(x: Tensor) -> Tensor:
    """A function whose vectorised loop of 16 elements leaves a remainder to other code."""
    y = torch.exp(x)
    last = y.shape[-1] - y.shape[-1] % 16
    return torch.cat([y[..., :last], y[..., last:] * (1 + 2**-20)], -1)


def reads_its_neighbour(x: Tensor) -> Tensor:
    return x * 3 + x.roll(1, 0) * 1e-6


def test_a_product_with_another_kernel_for_few_rows_is_found() -> None:
    extent = probe.Extent(max_rows=64, few_rows=20)
    rows = torch.randn(64, 33)
    assert probe.row_invariant_from(rounds_few_rows_otherwise, rows, extent) == 16
    few = dataclasses.replace(extent, few_rows=12)
    assert probe.row_invariant_from(rounds_few_rows_otherwise, rows, few) is None
    assert probe.row_invariant_from(lambda x: x * 2, rows, extent) == 1


def test_a_remainder_that_is_rounded_otherwise_asks_for_whole_vectors() -> None:
    assert probe.multiple_of(rounds_the_remainder_otherwise, torch.float32, SMALL) == 16
    assert probe.multiple_of(F.relu, torch.float32, SMALL) == 1
    assert probe.multiple_of(reads_its_neighbour, torch.float32, SMALL) is None


def test_functions_that_nothing_helps_are_left_out() -> None:
    known = {"relu": F.relu, "neighbour": reads_its_neighbour}
    found = {
        name: probe.multiple_of(kernel, torch.float32, SMALL) for name, kernel in known.items()
    }
    assert found == {"relu": 1, "neighbour": None}


def test_rows_that_meet_are_found() -> None:
    rows = torch.randn(40, 8)
    assert not probe.is_exact_by_rows(lambda x: x - x.mean(0), rows, range(1, 4))
    assert probe.is_exact_by_rows(lambda x: x * 2, rows, range(1, 34))


def test_only_the_backward_counts_too() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore
            return x.clone()

        @staticmethod
        def backward(ctx, above):  # pyright: ignore
            return above + above.sum()

    assert not probe.is_exact_by_rows(Backward.apply, torch.randn(40, 8), (3,))


@pytest.mark.parametrize("dtype", probe.DTYPES)
def test_arithmetic_is_exact_without_a_certificate(dtype: torch.dtype) -> None:
    """What `overlap.exactness` takes for granted."""
    kernels = [
        torch.relu, torch.square, torch.abs, lambda x: x.clamp(-1, 1), lambda x: x.pow(3),
        lambda x: x * 1.7, lambda x: x / 3, lambda x: x + x * 0.3, lambda x: x.maximum(x * 2),
        lambda x: x.masked_fill(x > 1, 0.0), lambda x: x.float().bfloat16(),
        lambda x: torch.sqrt(x.abs()), lambda x: x.round(), lambda x: x / (x.abs() + 1),
    ]  # fmt: skip
    for kernel in kernels:
        assert probe.multiple_of(kernel, dtype, 1 << 16) == 1


# ---- files ---------------------------------------------------------------------------------------


def some_certificate() -> Certificate:
    return Certificate(
        certificate.environment(CPU),
        128,
        {"float32": {"8x16": 4, "64x64": 1}},
        {"float32": {"silu": 16, "exp": 1}},
        {"float32": {"softmax": ("8",)}},
        {"float32": ("16x16",)},
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(certificate.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_what_a_certificate_covers() -> None:
    found = some_certificate()
    assert found.least_rows(torch.float32, 8, 16) == found.least_rows(torch.float32, 5, 9) == 4
    assert found.least_rows(torch.float32, 9, 16) is None
    assert found.least_rows(torch.bfloat16, 8, 16) is None
    assert found.multiple_of(torch.float32, "silu") == 16
    assert found.multiple_of(torch.float32, "gelu") is None
    assert found.has_rows(torch.float32, "softmax", 7)
    assert not found.has_rows(torch.float32, "softmax", 4)
    assert found.has_attention(torch.float32, 16, 9)


def test_a_certificate_is_kept_in_a_file(cache: Path) -> None:
    assert certificate.load(CPU) is NONE
    saved = some_certificate()
    path = certificate.save(saved)
    assert path.parent == cache
    found = certificate.load(CPU)
    assert found == saved and found.digest == saved.digest and found.path == str(path)
    assert str(path) in str(found) and found.digest in str(found)


def test_other_settings_have_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate.save(some_certificate())
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert certificate.load(CPU).is_empty


def test_a_file_of_another_environment_is_an_error(cache: Path) -> None:
    path = certificate.save(some_certificate())
    fields = json.loads(path.read_text())
    fields["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="of another environment"):
        certificate.load(CPU)


@pytest.mark.parametrize("text", ["{", "{}x", '{"lines": 1}', "[]"])
def test_a_file_that_is_none_is_an_error(cache: Path, text: str) -> None:
    certificate.path_of(certificate.environment(CPU)).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read.*overlap hardware --probe"):
        certificate.load(CPU)


def test_digests_tell_certificates_apart() -> None:
    one = some_certificate()
    other = dataclasses.replace(one, products={"float32": {"8x16": 4}})
    assert len({one.digest, other.digest, NONE.digest}) == 3
    assert dataclasses.replace(one, path="elsewhere").digest == one.digest


def test_the_command_makes_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "probe", lambda device: some_certificate())
    assert cli.run(["hardware", "--probe", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["digest"] == certificate.load(CPU).digest
    assert Path(document["path"]).parent == cache
