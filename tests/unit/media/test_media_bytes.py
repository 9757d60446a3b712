"""Where images and sounds are read from, and how many."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from onboard.errors import UsageError
from onboard.media.media_bytes import MediaBytes, as_source
from onboard.media.media_limits import MediaLimits


def reader(**limits: object) -> MediaBytes:
    return MediaBytes(MediaLimits.model_validate({"max_media_bytes": 100, **limits}))


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_files_urls_and_bytes_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    for source in (
        tmp_path / "a",
        b"one",
        data_url(b"one"),
        data_url(b"one").upper()[:5] + data_url(b"one")[5:],
    ):
        assert reader().read(source) == b"one"


def test_a_text_of_a_client_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    for text in (
        str(tmp_path / "a"),
        f"file://{tmp_path}/a",
        "a",
        "",
        "ftp://host/a",
        "http://host/a",
    ):
        with pytest.raises(UsageError, match="no place of an image"):
            reader().read(text)
    assert as_source(str(tmp_path / "a")) == tmp_path / "a"
    assert as_source(f"file://{tmp_path}/a") == f"file://{tmp_path}/a"
    assert as_source("https://host/a") == "https://host/a"
    assert as_source("data:x") == "data:x"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"x" * 101, "101 bytes"),
        (data_url(b"x" * 101), "101 bytes|more than 100"),
        (data_url(b"x" * 10_000), "more than 100 bytes"),
        ("data:image/png,abc", "is not taken"),
        ("data:image/png;base64", "is not taken"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64,\u00e9", "not base64"),
        (Path("/nowhere/a"), "No such file"),
        (Path("/dev/zero"), "a device, not a regular file"),
        ("https://host.example/a", "no host that"),
    ],
)
def test_what_is_no_source_is_refused_in_one_line(source: str | bytes | Path, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        reader().read(source)
    assert "\n" not in str(refused.value)


def test_a_fifo_and_a_large_file_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="a FIFO"):
        reader().read(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match="at most 100 are taken"):
        reader().read(tmp_path / "large")


def test_a_prompt_has_a_number_of_them() -> None:
    one = reader(max_media=2)
    one.read(b"a")
    one.read(b"b")
    with pytest.raises(UsageError, match="more than 2 images and sounds"):
        one.read(b"c")
