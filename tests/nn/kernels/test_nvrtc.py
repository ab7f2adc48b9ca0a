"""Compiled kernels are kept for later processes."""

import pytest

from fedloom.nn.kernels.hopper.nvrtc import CudaModule


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The options with which a file was compiled, every time it was."""
    monkeypatch.setenv("FEDLOOM_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    monkeypatch.setattr(CudaModule, "_compile", lambda self, file, source, options: calls.append(options) or b"binary")
    return calls


def cubin(*options):
    return CudaModule.__new__(CudaModule)._compiled("lstm.cu", list(options))


def test_a_file_is_compiled_once_for_the_same_options(compiled):
    assert [cubin("-DH=3"), cubin("-DH=3"), cubin("-DH=4")] == [b"binary"] * 3
    assert compiled == [["-DH=3"], ["-DH=4"]]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40] + b"x" + b[41:], lambda b: b""])
def test_a_damaged_file_is_compiled_again(damage, compiled, tmp_path):
    cubin("-DH=3")
    (file,) = (tmp_path / "fedloom" / "kernels").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert cubin("-DH=3") == b"binary"
    assert len(compiled) == 2
    assert cubin("-DH=3") == b"binary"
    assert len(compiled) == 2
