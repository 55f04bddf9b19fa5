"""A delta gives the new file bit for bit, or an error that names the file; never other weights."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sluice.pipeline.errors import WeightsError
from sluice.pipeline.weights import delta

DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=6)


def model(layout: list[tuple[str, tuple[int, ...]]], seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        f"t{place}": draw.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
        if dtype != "bool"
        else draw.integers(0, 2, shape).astype(bool)
        for place, (dtype, shape) in enumerate(layout)
    }


def changed(tensors: dict[str, Any], seed: int, share: float) -> dict[str, Any]:
    """Some bytes of it are others."""
    draw, made = np.random.default_rng(seed), {}
    for name, values in tensors.items():
        raw = np.frombuffer(values.tobytes(), dtype=np.uint8).copy()
        hit = draw.random(raw.size) < share
        raw[hit] ^= 1
        made[name] = raw.view(values.dtype).reshape(values.shape)
    return made


def saved(path: Path, tensors: dict[str, Any]) -> Path:
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, path)
    return path


def _pieces(file: Path, random: Any) -> list[memoryview]:
    """All of its bytes: those before the tensors, and the others cut anywhere, as tensors cut them."""
    raw = memoryview(file.read_bytes())
    head = 8 + int.from_bytes(raw[:8], "little")
    cuts = sorted(random.randrange(head, len(raw) + 1) for _ in range(random.randrange(5)))
    return [raw[begin:end] for begin, end in pairwise([0, head, *cuts, len(raw)])]


@settings(deadline=None)
@given(TENSORS, st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 64), st.randoms())
def test_a_chain_of_deltas_gives_the_newest_file_bit_for_bit(
    layout: list[tuple[str, tuple[int, ...]]], shares: list[float], segment: int, random: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_SEGMENT", 8 * segment)  # many frames a file
        root = Path(folder)
        tensors = model(layout, random.randrange(1 << 30))
        files, deltas = [saved(root / "0.safetensors", tensors)], []
        for number, share in enumerate(shares, 1):
            tensors = changed(tensors, random.randrange(1 << 30), share)
            files.append(saved(root / f"{number}.safetensors", tensors))
            deltas.append(root / f"{number}.delta")
            made = delta.encode(files[-2], files[-1], deltas[-1])
            assert made.size == deltas[-1].stat().st_size
            assert made.digest == delta.digest_of_file(deltas[-1])
            assert made.base == delta.digest_of_file(files[-2])
            assert made.result == delta.digest_of_file(files[-1])
            assert delta.encode(files[-2], _pieces(files[-1], random), root / "of-memory") == made
            assert (root / "of-memory").read_bytes() == deltas[-1].read_bytes()
        for first in range(len(files)):
            found = delta.apply(files[first], deltas[first:], root / "out")
            assert (root / "out").read_bytes() == files[-1].read_bytes()
            assert found == delta.digest_of_file(files[-1])


@settings(deadline=None)
@given(TENSORS, TENSORS, st.randoms())
def test_another_layout_has_no_delta(before: Any, after: Any, random: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        old, new = (
            saved(root / f"{n}.safetensors", model(one, random.randrange(99))) for n, one in enumerate((before, after))
        )
        if delta.same_layout(old, new):
            assert [np.dtype(d).itemsize * np.prod(s) for d, s in before] == [
                np.dtype(d).itemsize * np.prod(s) for d, s in after
            ]
            return
        with pytest.raises(WeightsError, match="publish the whole file"):
            delta.encode(old, new, root / "delta")


@settings(deadline=None)
@given(st.data())
def test_damage_is_refused_or_changes_nothing(data: st.DataObject) -> None:
    """Any flipped byte, any cut, anything more: an error of ours, or the whole new file."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        layout: list[Any] = data.draw(TENSORS)
        tensors = model(layout, 1)
        old, new = saved(root / "a.safetensors", tensors), saved(root / "b.safetensors", changed(tensors, 2, 0.3))
        delta.encode(old, new, root / "delta")
        raw = bytearray((root / "delta").read_bytes())
        match data.draw(st.sampled_from(("flip", "cut", "more"))):
            case "flip":
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del raw[data.draw(st.integers(0, len(raw) - 1)) :]
            case _:
                raw += data.draw(st.binary(min_size=1, max_size=9))
        (root / "delta").write_bytes(raw)
        try:
            delta.apply(old, [root / "delta"], root / "out")
        except WeightsError:
            return
        assert (root / "out").read_bytes() == new.read_bytes()


def test_a_delta_of_another_base_is_refused_by_name(tmp_path: Path) -> None:
    files = [saved(tmp_path / f"{n}.safetensors", model([("float32", (5, 5))], n)) for n in range(3)]
    for newer in (1, 2):
        delta.encode(files[newer - 1], files[newer], tmp_path / f"{newer}.delta")
    with pytest.raises(WeightsError, match=r"0\.safetensors.*2\.delta is of"):
        delta.apply(files[0], [tmp_path / "2.delta"], tmp_path / "out")
    with pytest.raises(WeightsError, match="is followed by one of"):
        delta.apply(files[0], [tmp_path / "2.delta", tmp_path / "1.delta"], tmp_path / "out")
    saved(tmp_path / "small.safetensors", model([("float32", (2, 2))], 1))
    with pytest.raises(WeightsError, match="a delta is for a file of"):
        delta.apply(tmp_path / "small.safetensors", [tmp_path / "1.delta"], tmp_path / "out")
    (tmp_path / "none.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(WeightsError, match="not a safetensors file"):
        delta.apply(tmp_path / "none.safetensors", [tmp_path / "1.delta"], tmp_path / "out")


def test_few_changed_values_are_few_bytes(tmp_path: Path) -> None:
    """1.6 % of the values of a bfloat16 tensor, each by its lowest bit: at most 3 % of the bytes."""
    draw = np.random.default_rng(0)
    values = (draw.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    after = values ^ (draw.random(values.size) < 0.016).astype(np.uint16)
    for name, each in (("a", values), ("b", after)):
        header = b'{"w":{"dtype":"BF16","shape":[%d],"data_offsets":[0,%d]}}' % (each.size, each.nbytes)
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + each.tobytes())
    made = delta.encode(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    assert made.size < 0.03 * values.nbytes
    assert delta.apply(tmp_path / "a", [tmp_path / "delta"], tmp_path / "out") == made.result
