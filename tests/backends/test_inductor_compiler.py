"""The script in front of the C++ compiler that Inductor calls: a compiler that somebody kills."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from compile_stage.backends import inductor
from compile_stage.core.errors import NothingCompiledError

pytest.importorskip("torch", reason="the backend inductor needs torch")

pytestmark = pytest.mark.skipif(not inductor._compiler_version(), reason="there is no C++ compiler here")


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_compiler_that_is_killed_is_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Broken: a compiler that is killed for want of memory while Inductor tries the vector instructions is taken for
    one that lacks them. The code came in AVX2 in place of AVX-512, or without vectors, and nothing said so."""
    kills, compiler = tmp_path / "kills", tmp_path / "g++"
    kills.write_text("x" * times)
    compiler.write_text(
        f"""#!/bin/sh
if [ -s '{kills}' ]; then
    rest=$(cut -c2- '{kills}'); printf '%s' "$rest" > '{kills}'
    kill -9 $$
fi
echo warned >&2
exec '{shutil.which(inductor._compiler())}' "$@"
"""
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    script = inductor._wrap_compiler(tmp_path)
    (tmp_path / "a.cpp").write_text('extern "C" int answer() { return 42; }')
    done = subprocess.run(
        [script, "-c", "a.cpp", "-o", "a.o"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if times < 2:
        inductor._demand_unkilled(tmp_path)
        assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (0, "", "warned")
        assert (tmp_path / "a.o").stat().st_size > 0
        return
    assert done.returncode == 137
    with pytest.raises(NothingCompiledError, match="killed again"):
        inductor._demand_unkilled(tmp_path)


def test_a_compiler_whose_own_process_is_killed_is_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: it is the process below g++ that takes the memory and is killed, and g++ then ends with code 1, as for
    any error in a program."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        f"#!/bin/sh\necho again >> '{tmp_path}/runs'\n"
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2\nexit 1\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    done = subprocess.run([inductor._wrap_compiler(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Killed signal" in done.stderr
    assert (tmp_path / "runs").read_text().splitlines() == ["again"] * 2
    with pytest.raises(NothingCompiledError, match="memory may have run out"):
        inductor._demand_unkilled(tmp_path)
