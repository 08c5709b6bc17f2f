"""Hosts files: what they say, and that a wrong one is told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.hosts import Host
from compile_stage.policy.hosts import load_host, read_hosts


def test_a_host_is_what_the_file_says_or_what_ssh_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: another device than the named one would be reached, or a path looked up where nobody wrote it."""
    file = tmp_path / "hosts.yaml"
    board = "board: {ssh: pi@board, port: 2222, config: ssh.conf, baseline: fp32}"
    file.write_text(f"hosts:\n  {board}\n  p: {{adb: R5, folder: /d}}\n")
    found = load_host("board", file)
    expected = Host(
        name="board", transport="ssh", address="pi@board", port=2222, config=str(tmp_path / "ssh.conf"), baseline="fp32"
    )
    assert found == expected
    assert load_host("p", file).transport == "adb"
    assert load_host("other@board.lan", file) == Host(
        name="other@board.lan", transport="ssh", address="other@board.lan"
    )
    with pytest.raises(UsageError, match="did you mean 'board'"):
        load_host("bord", file)
    monkeypatch.chdir(tmp_path)
    assert load_host("board") == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("board: {ssh: b}", "holds the key `hosts`"),
        ("hosts: {b: {ssh: '-oProxyCommand=sh'}}", "is no address"),
        ("hosts: {b: {ssh: a, adb: c}}", "either ssh or adb"),
        ("hosts: {b: {ssh: a, pyton: x}}", "did you mean 'python'"),
        ("hosts: {b: {ssh: a, python: 'python3; rm -rf ~'}}", "a shell would read otherwise"),
        ("hosts: {b: {ssh: a, folder: '$(id)'}}", "a shell would read otherwise"),
        ("hosts: {b: {ssh: a, port: 99999}}", "between 1 and 65535"),
        ("hosts: {b: {ssh: a, baseline: best}}", "baseline must be one of"),
        ("hosts: {b: {adb: a, port: 22}}", "are for ssh"),
        ("hosts: {b: 1}", "it is no map"),
        ("hosts: [", "the hosts file is wrong"),
    ],
)
def test_what_is_wrong_in_a_hosts_file_is_told_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    """Broken: a file of hosts could run a program here or there, or be wrong without a word."""
    file = tmp_path / "hosts.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says) as raised:
        read_hosts(file)
    assert str(file) in str(raised.value)
    assert raised.value.code == Code.USAGE  # its page is not about policies
    assert set(raised.value.codes) <= {Code.NOT_YAML}


@pytest.mark.parametrize("name", ["-oProxyCommand=sh", "a b", "a;b", ""])
def test_an_address_is_never_an_option(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the name of a host could run a program."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileStageError, match="no address that ssh takes"):
        load_host(name)
