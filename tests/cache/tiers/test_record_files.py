"""Files of the disk tier: whole or not there, whatever happened to them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from turnkeep.cache.tiers.record import Bytes, RecordName
from turnkeep.cache.tiers.record_files import (
    FoundFile,
    RecordFileError,
    file_bytes,
    file_name,
    read_record,
    scan,
    write_record,
)

LAYOUT = bytes(range(32))
NAME = RecordName("snapshot", b"k" * 32, b"p" * 32, 16, suffix=b"abcd" * 3, boundary="turn_end", owner=b"o" * 16)
RUN = RecordName("pages", b"q" * 32, b"p" * 32, 32, page_keys=(b"r" * 32, b"q" * 32))


def content(num_bytes: int = 1000) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)


def faults(folder: Path, layout: bytes = LAYOUT) -> list[str]:
    return [found.fault for found in scan(folder, layout) if isinstance(found, RecordFileError)]


@pytest.mark.parametrize("name", [NAME, RUN])
def test_a_record_is_read_as_it_was_written(name: RecordName, tmp_path: Path) -> None:
    write_record(tmp_path, LAYOUT, name, content())
    assert (read_record(tmp_path, LAYOUT, name) == content()).all()
    (found,) = scan(tmp_path, LAYOUT)
    assert isinstance(found, FoundFile)
    assert (found.name, found.num_bytes) == (name, 1000)
    size = (tmp_path / file_name(name)).stat().st_size
    assert size == found.file_bytes == file_bytes(name, 1000)


def test_a_file_cut_anywhere_is_never_used(tmp_path: Path) -> None:
    write_record(tmp_path, LAYOUT, NAME, content(50))
    path = tmp_path / file_name(NAME)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert faults(tmp_path) == ["truncated"], length
        with pytest.raises(RecordFileError):
            read_record(tmp_path, LAYOUT, NAME)


def test_a_flipped_bit_anywhere_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    write_record(tmp_path, LAYOUT, NAME, content(60))
    path = tmp_path / file_name(NAME)
    whole = path.read_bytes()
    random_bits = random.Random(3)
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << random_bits.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(RecordFileError):
            read_record(tmp_path, LAYOUT, NAME)


def test_records_of_another_layout_and_files_of_others_are_left_out(tmp_path: Path) -> None:
    write_record(tmp_path, b"x" * 32, NAME, content())
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "picture.pages").write_bytes(b"\x89PNG" * 20)
    assert sorted(faults(tmp_path)) == ["foreign", "foreign"]
    with pytest.raises(RecordFileError):
        read_record(tmp_path, LAYOUT, NAME)


def test_a_record_under_a_wrong_name_is_foreign(tmp_path: Path) -> None:
    write_record(tmp_path, LAYOUT, NAME, content())
    os.rename(tmp_path / file_name(NAME), tmp_path / file_name(RUN))
    assert faults(tmp_path) == ["foreign"]
    with pytest.raises(RecordFileError):
        read_record(tmp_path, LAYOUT, RUN)


def test_half_written_files_go_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / (file_name(NAME) + ".part")).write_bytes(b"half")
    write_record(tmp_path, LAYOUT, NAME, content())
    (folder / file_name(NAME)).symlink_to(tmp_path / file_name(NAME))
    assert faults(folder) == ["missing"]
    assert [path.name for path in folder.iterdir()] == [file_name(NAME)]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_record(tmp_path, LAYOUT, NAME, content())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    assert list(scan(tmp_path / "gone", LAYOUT)) == []
    with pytest.raises(RecordFileError) as error:
        read_record(tmp_path / "gone", LAYOUT, NAME)
    assert error.value.fault == "missing"
