"""Which implementation of an operation a call gets."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch

from kernels import native
from kernels.dispatch import ByDevice
from kernels.paged_attention import attention_is_row_invariant, probe


def test_the_cpu_takes_the_library_as_soon_as_there_is_one_and_other_devices_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[CDLL | None] = []

    def bind(library: CDLL) -> str:
        bound.append(library)
        return "native"

    table = ByDevice[str]("reference", bind)
    monkeypatch.setattr(native, "shared_object", lambda: None)
    assert [table[False], table[True], table.kind(False)] == ["reference", "reference", "torch"]
    library = CDLL(None)
    monkeypatch.setattr(native, "shared_object", lambda: library)
    assert [table[False], table[False], table[True], table.kind(False)] == ["native", "native", "reference", "native"]
    assert bound == [library]


def test_attention_says_that_it_depends_on_the_batch_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.rows_agree.__wrapped__(9, 3, 64, "cpu", torch.get_num_threads())
    honest = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: honest(a, b) * (1 + len(a) * 1e-6))
    assert not probe.rows_agree.__wrapped__(9, 3, 64, "cpu", torch.get_num_threads())
    if native.status()[0]:
        assert attention_is_row_invariant(9, 3, 64, "cpu")
