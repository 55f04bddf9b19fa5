"""Images are decoded in processes that can be killed: whatever a file does, the caller gets an answer in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from sluice.pipeline.config.types import ImagesConfig
from sluice.pipeline.errors import RequestError
from sluice.pipeline.images.decoders import Decoders
from sluice.pipeline.images.paths import SourceUnavailable
from sluice.pipeline.images.pixels import open_image
from tests.deadlines import HANG_S
from tests.pictures import encoded, gif_of_zeros, huge_png, png, png_of_chunks, progressive_jpeg

FOREVER_S = 600.0


def children(of: int | None = None) -> list[int]:
    """Processes of this command whose parent is `of`."""
    tasks = Path(f"/proc/{of or os.getpid()}/task").glob("*/children")
    found = [int(pid) for task in tasks for pid in _read(task).split()]  # a thread may end meanwhile
    return [pid for pid in found if "sluice.pipeline.images.decode_process" in _read(Path(f"/proc/{pid}/cmdline"))]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def until(holds: Callable[[], bool], what: str, limit_s: float = HANG_S) -> None:
    """Wait for it, or fail naming it."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    made = Decoders(ImagesConfig(decode_timeout_s=FOREVER_S))
    yield made
    made.close()
    assert not children()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_the_pixels_are_those_of_the_reader(decoders: Decoders, kind: str) -> None:
    data = encoded(Image.effect_noise((301, 77), 90).convert("RGB"), kind)
    made, plain = decoders.decode(data, "x"), open_image(data, ImagesConfig(), "x")
    assert (type(made), made.mode, made.size, made.info) == (Image.Image, "RGB", plain.size, {})
    assert made.tobytes() == plain.tobytes()


def test_one_process_takes_many_images_and_their_errors(decoders: Decoders) -> None:
    assert not children(), "none before the first image"
    for _ in range(3):
        assert decoders.decode(png(), "x").size == (8, 6)
        with pytest.raises(RequestError, match=r"^the picture é\ud800: is 60000 x 60000 pixels"):
            decoders.decode(huge_png(), "the picture é\ud800")
        with pytest.raises(RequestError, match=r"^x: is damaged or not a PNG"):
            decoders.decode(png()[:40], "x")
    assert len(children()) == 1


def test_a_large_picture_comes_whole(decoders: Decoders) -> None:
    data = encoded(Image.linear_gradient("L").resize((5000, 4000)), "PNG", compress_level=1)
    assert decoders.decode(data, "x").tobytes() == open_image(data, ImagesConfig(), "x").tobytes()


def test_the_process_knows_no_secrets_and_no_torch(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_GATEWAY_API_KEY", "secret")
    decoders.decode(png(), "x")
    [pid] = children()
    assert "SLUICE" not in _read(Path(f"/proc/{pid}/environ"))
    assert "libtorch" not in _read(Path(f"/proc/{pid}/maps"))


def test_a_progressive_jpeg_of_many_scans_is_ended_and_the_next_image_decoded() -> None:
    decoders = Decoders(ImagesConfig(decode_timeout_s=3, decode_processes=1))
    try:
        with pytest.raises(RequestError, match=r"^x: not decoded within 3 s \(images\.decode_timeout_s\)"):
            decoders.decode(progressive_jpeg(), "x")
        assert not children()
        decoders.limits = ImagesConfig(decode_timeout_s=FOREVER_S, decode_processes=1)
        assert decoders.decode(png(), "x").size == (8, 6)
    finally:
        decoders.close()


@pytest.mark.parametrize("make", [gif_of_zeros, png_of_chunks])
def test_what_is_slow_to_read_before_its_pixels_is_ended_as_well(make: Callable[[], bytes]) -> None:
    decoders = Decoders(ImagesConfig(decode_timeout_s=0.05))
    try:
        with pytest.raises(RequestError, match=r"^x: not decoded within 0\.05 s"):
            decoders.decode(make(), "x")
    finally:
        decoders.close()


def test_a_decoder_that_gets_no_processor_time_is_the_host_s_trouble() -> None:
    decoders = Decoders(ImagesConfig(decode_timeout_s=0.4, decode_processes=1))
    try:
        until(lambda: started(decoders), "the first process")
        [pid] = children()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SourceUnavailable, match=r"^x: not decoded within 0\.4 s .* got only 0\.0 s"):
            decoders.decode(png(), "x")
        assert pid not in children()
    finally:
        decoders.close()


def started(decoders: Decoders) -> bool:
    """Whether an image was decoded; on a busy machine, the first may be late."""
    try:
        return decoders.decode(png(), "x").size == (8, 6)
    except SourceUnavailable:
        return False


def test_neighbours_are_decoded_meanwhile_and_close_ends_what_runs() -> None:
    decoders = Decoders(ImagesConfig(decode_timeout_s=FOREVER_S, decode_processes=2))
    with ThreadPoolExecutor(4) as threads:
        slow = threads.submit(decoders.decode, progressive_jpeg(), "slow")
        for neighbour in [threads.submit(decoders.decode, png(), "x") for _ in range(20)]:
            assert neighbour.result(FOREVER_S).size == (8, 6)
        assert not slow.done()
        assert len(children()) == 2
        decoders.close()
        with pytest.raises(RequestError, match=r"^slow: the image decoders were closed meanwhile"):
            slow.result(HANG_S)
    assert not children()
    with pytest.raises(RequestError, match=r"^x: the image decoders are closed"):
        decoders.decode(png(), "x")


def test_who_waits_for_a_process_is_told_that_the_decoders_were_closed() -> None:
    decoders = Decoders(ImagesConfig(decode_timeout_s=FOREVER_S, decode_processes=1))
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(decoders.decode, progressive_jpeg(), "slow")
        until(lambda: bool(children()), "the first process")
        waiting = threads.submit(decoders.decode, png(), "waiting")
        decoders.close()
        for one in (slow, waiting):
            with pytest.raises(RequestError, match="closed"):
                one.result(HANG_S)


def test_memory_is_bounded() -> None:
    decoders = Decoders(ImagesConfig(decode_mb=256, decode_timeout_s=FOREVER_S))
    try:
        data = encoded(Image.new("RGB", (7000, 5000), "red"), "PNG", compress_level=1)
        with pytest.raises(RequestError, match=r"^x: decoding it takes more memory than images\.decode_mb .*256"):
            decoders.decode(data, "x")
        assert decoders.decode(png(), "x").size == (8, 6)
    finally:
        decoders.close()


def test_a_process_that_dies_over_an_image_is_told_and_replaced(decoders: Decoders) -> None:
    decoders.decode(png(), "x")
    [pid] = children()
    before = _cpu(pid)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(decoders.decode, progressive_jpeg(), "slow")
        until(lambda: _cpu(pid) > before, "the decode to begin")
        os.kill(pid, signal.SIGSEGV)
        with pytest.raises(RequestError, match=r"^slow: its decoder ended \(SIGSEGV\)"):
            slow.result(HANG_S)
    assert decoders.decode(png(), "x").size == (8, 6)


def test_a_process_that_died_between_two_images_fails_none(decoders: Decoders) -> None:
    decoders.decode(png(), "x")
    [pid] = children()
    os.kill(pid, signal.SIGKILL)
    until(lambda: _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] in ([], ["Z"]), "its death")
    assert decoders.decode(png(), "x").size == (8, 6)
    assert len(children()) == 1


_PARENT = """
import sys
from sluice.pipeline.config.types import ImagesConfig
from tests.pictures import png, progressive_jpeg
from sluice.pipeline.images.decoders import Decoders
from sluice.pipeline.images.paths import SourceUnavailable
decoders = Decoders(ImagesConfig(decode_timeout_s=600))
decoders.decode(png(), "x")
slow = progressive_jpeg()
print("ready", flush=True)
sys.stdin.read(1)
decoders.decode(slow, "x")
"""


def test_a_process_ends_with_its_parent_in_the_middle_of_a_decode() -> None:
    root = Path(__file__).resolve().parents[4]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _PARENT], cwd=root, text=True, stdin=pipe, stdout=pipe) as parent:
        try:
            assert parent.stdin is not None
            assert parent.stdout is not None
            assert parent.stdout.readline() == "ready\n"
            [pid] = children(parent.pid)
            before = _cpu(pid)
            parent.stdin.write("!")
            parent.stdin.flush()
            until(lambda: _cpu(pid) > before, "the decode to begin")
        finally:
            parent.kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the decode process")


def _cpu(pid: int) -> int:
    """Ticks of user time."""
    return int(_read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[11])


def test_many_threads_at_once(decoders: Decoders) -> None:
    barrier, colors = threading.Barrier(8), ["red", "lime", "blue", "white"]

    def ask(at: int) -> tuple[int, ...]:
        barrier.wait(HANG_S)
        found = decoders.decode(png(colors[at % 4]), "x").getpixel((0, 0))
        assert isinstance(found, tuple)
        return found

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(8)))
    assert found == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)] * 2
    assert len(children()) <= 2
