"""What the engine takes from the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnkeep.engine import environment


def test_idle_threads_do_not_spin_and_threads_are_those_asked_for() -> None:
    found = environment.engine_environment(3, {"PATH": "x", "OMP_NUM_THREADS": "9"})
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["PATH"] == "x"


def test_what_the_user_set_stays() -> None:
    found = environment.engine_environment(None, {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "9"})
    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"]) == ("active", "9")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx512f avx2", False),
        ("", False),
    ],
)
def test_bf16_is_found_in_the_cpu_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(environment, "_PROC", tmp_path)
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    assert environment.has_bf16_instructions() is expected


@pytest.mark.parametrize(
    ("available_kib", "limit", "expected_mib"),
    [
        (4 * 1024 * 1024, "max", 1024),
        (400 * 1024 * 1024, "max", 2048),
        (100 * 1024, "max", 64),
        (4 * 1024 * 1024, str(1024 * 1024 * 1024), 192),
    ],
)
def test_default_memory_is_a_bounded_share_of_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available_kib: int, limit: str, expected_mib: int
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available_kib} kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{256 * 1024 * 1024}\n")
    monkeypatch.setattr(environment, "_PROC", tmp_path)
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    assert environment.default_memory_bytes() == expected_mib * 1024 * 1024


def test_a_cpu_quota_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(64)))
    assert environment.num_usable_cores() == 64
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert environment.num_usable_cores() == 2
