"""What `facet doctor` is told of this machine's engines."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from engines import probe


def test_the_facts_are_torchs_own() -> None:
    facts = probe.facts()
    assert facts["torch"] == torch.__version__
    assert facts["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert facts["int8"] == torch.backends.quantized.engine
    assert facts["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(("available", "why_not"), [(True, ""), (False, "no C compiler")])
def test_the_native_kernels_are_asked_whether_they_run(
    monkeypatch: pytest.MonkeyPatch, available: bool, why_not: str
) -> None:
    kernels = ModuleType("facet_native_of_a_test")
    vars(kernels).update(available=lambda: available, why_not=lambda: why_not, __spec__=object())
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(probe, "NATIVE_MODULE", kernels.__name__)
    facts = probe.facts()
    assert (facts["native"], facts["why_not"]) == (available, why_not)


def test_without_native_kernels_nothing_is_said_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NATIVE_MODULE", "facet_no_such_module")
    facts = probe.facts()
    assert (facts["native"], facts["why_not"]) == (None, "")
