"""Only regular files that lie below a root are read, whatever the path says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.paths import Roots, SourceUnavailable


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`roots/a` and `roots/b` are roots; `secret` lies beside them, and links lead in and out."""
    base = tmp_path_factory.mktemp("tree")
    for file in ("roots/a/one", "roots/a/sub/two", "roots/b/one", "roots/b/three", "secret", "roots/ab/four"):
        (base / file).parent.mkdir(parents=True, exist_ok=True)
        (base / file).write_bytes(b"secret" if file in ("secret", "roots/ab/four") else file.encode())
    (base / "roots/a/out").symlink_to(base / "secret")
    (base / "roots/a/up").symlink_to(base)
    (base / "roots/a/across").symlink_to(base / "roots/b/three")
    (base / "roots/a/loop").symlink_to("loop")
    (base / "entry").symlink_to(base / "roots/a")
    os.mkfifo(base / "roots/a/fifo")
    return base


def read(tree: Path, name: str) -> bytes:
    roots = Roots([str(tree / "entry"), str(tree / "roots/b")])
    return roots.read(roots.find("image", name), 100, "image")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one", b"roots/a/one"),
        ("sub/two", b"roots/a/sub/two"),
        ("sub/../one", b"roots/a/one"),
        ("three", b"roots/b/three"),
        ("across", b"roots/b/three"),
        ("{tree}/roots/b/one", b"roots/b/one"),
        ("{tree}/entry/one", b"roots/a/one"),
    ],
)
def test_a_file_below_a_root_is_read(tree: Path, name: str, content: bytes) -> None:
    assert read(tree, name.format(tree=tree)) == content


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("out", "outside the configured roots"),
        ("up/secret", "outside the configured roots"),
        ("../../secret", "outside the configured roots"),
        ("../ab/four", "outside the configured roots"),  # a root's name is the beginning of this one
        ("{tree}/secret", "outside the configured roots"),
        ("{tree}/no such file", "outside the configured roots"),  # does not tell what exists out there
        ("none", "no such file below images.roots"),
        ("one/more", "no such file below images.roots"),
        ("x" * 300, "File name too long"),
        ("loop", "not a regular file"),
        ("sub", "not a regular file"),
        (".", "not a regular file"),
        ("fifo", "not a regular file"),
        ("/dev/zero", "outside the configured roots"),
        ("one\0.png", "NUL"),
        ("\ud800", "broken Unicode"),
    ],
)
def test_all_else_is_refused_with_the_reason(tree: Path, name: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        read(tree, name.format(tree=tree))
    assert str(caught.value).startswith("image: ")
    assert not isinstance(caught.value, SourceUnavailable)


def test_a_device_below_a_root_is_not_opened() -> None:
    with pytest.raises(RequestError, match="not a regular file"):
        Roots(["/dev"]).find("image", "zero")


def test_without_roots_the_key_is_named() -> None:
    with pytest.raises(RequestError, match=r"set images\.roots"):
        Roots([]).find("image", "one")


def test_a_link_that_was_put_there_after_the_check_opens_nothing(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    roots = Roots([str(root)])
    found = roots.find("image", "sub/file")
    (root / "sub").rename(root / "old")
    (root / "sub").symlink_to(outside)
    with pytest.raises(RequestError, match="cannot be read"):
        roots.read(found, 100, "image")


def test_a_file_that_changes_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    roots = Roots([str(tmp_path)])
    found = roots.find("image", "file")
    (tmp_path / "file").write_bytes(b"newer")
    with pytest.raises(RequestError, match="changed while being read"):
        roots.read(found, 100, "image")


def test_a_root_that_is_away_is_the_host_s_trouble(tmp_path: Path) -> None:
    """But not one that is made with its first file."""
    here, away = str(tmp_path), str(tmp_path / "away")
    (tmp_path / "file").write_bytes(b"x")
    assert Roots([away, here]).find("image", "file").size == 1
    with pytest.raises(SourceUnavailable, match=r"^image: .*/away is not a directory; check the disk"):
        Roots([here, away]).find("image", "none")
    with pytest.raises(RequestError, match="no such file") as caught:
        Roots([here, away], may_lack=away).find("image", "none")
    assert not isinstance(caught.value, SourceUnavailable)


def test_an_empty_root_is_taken_for_a_mount_point_without_its_disk(tmp_path: Path) -> None:
    """But not one that is made with its first file."""
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    with pytest.raises(SourceUnavailable, match=r"^image: .*/empty is empty; check the disk and the mounts"):
        Roots([empty, str(tmp_path)]).find("image", "none")
    with pytest.raises(RequestError, match="no such file") as caught:
        Roots([empty], may_lack=empty).find("image", "none")
    assert not isinstance(caught.value, SourceUnavailable)
    (tmp_path / "empty/other").write_bytes(b"x")
    with pytest.raises(RequestError, match="no such file") as caught:
        Roots([empty]).find("image", "none")
    assert not isinstance(caught.value, SourceUnavailable)


def test_an_absolute_path_is_missing_whatever_another_root_lacks(tmp_path: Path) -> None:
    """Else one deleted picture would stop a trainer, which retries what it can't reach."""
    full, empty = tmp_path / "full", tmp_path / "empty"
    for root in (full, empty):
        root.mkdir()
    (full / "other.png").write_bytes(b"x")
    roots = Roots([str(full), str(empty), str(tmp_path / "away")])
    with pytest.raises(RequestError, match="no such file") as error:
        roots.find("image", str(full / "gone.png"))
    assert not isinstance(error.value, SourceUnavailable)
    for name in (str(empty / "gone.png"), str(tmp_path / "away" / "gone.png"), "gone.png"):
        with pytest.raises(SourceUnavailable):
            roots.find("image", name)


def test_an_error_of_the_device_is_the_host_s_trouble() -> None:
    roots = Roots(["/proc/self"])
    with pytest.raises(SourceUnavailable, match=r"^image: cannot be read \(Input/output error\)"):
        roots.read(roots.find("image", "mem"), 100, "image")


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(101))
    roots = Roots([str(tmp_path)])
    with pytest.raises(RequestError, match="has at least 101 bytes"):
        roots.read(roots.find("image", "file"), 100, "image")


PARTS = st.sampled_from(
    ["..", ".", "", "one", "sub", "two", "up", "out", "roots", "a", "ab", "b", "secret", "four", "~"]
)


@given(st.lists(PARTS, max_size=8), st.booleans())
def test_no_path_leads_out(tree: Path, parts: list[str], absolute: bool) -> None:
    name = "/".join([str(tree), *parts] if absolute else parts)
    try:
        content = read(tree, name)
    except RequestError:
        return
    assert content.startswith((b"roots/a/", b"roots/b/"))
