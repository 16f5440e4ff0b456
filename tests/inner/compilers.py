"""What stands in for Inductor or for the compiler behind it: neither takes seconds a run."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx
from torch._inductor.async_compile import AsyncCompile

from overlap.inner.runs import Kernels, digest_of
from overlap.inner.subject import Subject


def interpreted(subject: Subject) -> Kernels:
    """The run as it is, called operator by operator."""
    body = fx.Interpreter(subject.body())

    def function(operands: list[Any]) -> Any:
        values = list(operands)
        operands.clear()
        return body.run(*values)

    takes_all = (True,) * len(subject.inputs)
    return Kernels(function, (), takes_all, "", digest_of([subject.key()]), "")


def leave_out_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor generates its code, and every C++ kernel of it does nothing."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
