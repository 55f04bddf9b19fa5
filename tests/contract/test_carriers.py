"""What every carrier of weights promises: the published bytes or an error that says why, whatever happens on the way.

The S3 server is moto's, an emulator.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import s3fs
from safetensors.numpy import save_file

from sluice.pipeline.errors import LeaseLost, WeightsError
from sluice.pipeline.weights import delta, versions
from sluice.pipeline.weights.carriers import Carrier, Directory
from sluice.pipeline.weights.host_cache import HostCache
from sluice.pipeline.weights.object_store import ObjectStore
from sluice.pipeline.weights.store import Store
from sluice.pipeline.wire.messages import WeightVersion
from tests.deadlines import HANG_S
from tests.object_stores import BUCKET, Relay, s3_server, use

KINDS = ("directory", "store-file", "store-s3", "delta-file", "delta-s3")
STORES = KINDS[1:]
DELTAS = KINDS[3:]
SHARDS = 3
ANCHOR_EVERY = 4


def no_fence() -> None:
    """This publisher owns the run."""


@dataclass
class Site:
    """A trainer's host, a store, and any number of workers' hosts."""

    kind: str
    home: Path
    url: str
    address: str = ""

    @property
    def root(self) -> Path:
        return self.home / "weights"

    def carrier(self, host: str, *, cache_bytes: int = 1 << 40, quiet_s: float = 60.0) -> Carrier:
        if self.kind == "directory":
            return Directory(self.root)
        root = self.root if host == "trainer" else self.home / "nothing-here"
        cache = HostCache(self.home / f"cache-{host}", cache_bytes, wait_s=20.0)
        every = ANCHOR_EVERY if self.kind in DELTAS else 1
        return Store(root, ObjectStore(self.url, quiet_s=quiet_s), cache, anchor_every=every)

    def objects(self) -> dict[str, Callable[[bytes | None], bytes]]:
        """Each stored file by name; called with bytes it replaces them, with None it only reads."""
        if self.kind in ("directory", "store-file", "delta-file"):
            top = self.root if self.kind == "directory" else Path(urlsplit(self.url).path)
            return {str(path.relative_to(top)): _file_at(path) for path in sorted(top.rglob("*")) if path.is_file()}
        fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        top = urlsplit(self.url)
        return {
            path.removeprefix(f"{top.netloc}{top.path}/"): _object_at(fs, path)
            for path in sorted(fs.find(f"{top.netloc}{top.path}"))
        }


def _file_at(path: Path) -> Callable[[bytes | None], bytes]:
    def access(data: bytes | None) -> bytes:
        if data is not None:
            path.unlink()  # it may be linked with another one
            path.write_bytes(data)
        return path.read_bytes()

    return access


def _object_at(fs: s3fs.S3FileSystem, path: str) -> Callable[[bytes | None], bytes]:
    def access(data: bytes | None) -> bytes:
        if data is not None:
            fs.pipe_file(path, data)
        return bytes(fs.cat_file(path))  # pyright: ignore[reportArgumentType]

    return access


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address, pytest.MonkeyPatch.context() as patch:
        use(patch, address)
        s3fs.S3FileSystem(skip_instance_cache=True).makedirs(BUCKET, exist_ok=True)
        yield address


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    kind = request.param
    if kind.endswith("s3"):
        address = request.getfixturevalue("server")
        use(request.getfixturevalue("monkeypatch"), address)
        return Site(kind, tmp_path, f"s3://{BUCKET}/{tmp_path.name}", address)
    return Site(kind, tmp_path, f"file://{tmp_path}/store")


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("site", kinds, indirect=True)


def trained(home: Path, number: int, *, rows: int = 64) -> Path:
    """A model of some shards; from one number to the next few values change, and one shard doesn't."""
    path = home / f"model-{number}"
    path.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for shard in range(SHARDS):
        values = draw.integers(0, 1 << 16, (rows, 64), dtype=np.uint16)
        values[shard, : number if shard else 0] ^= 1
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file({f"w{shard}": values, f"b{shard}": values[0].astype(np.float32)}, path / name)
    (path / "config.json").write_text('{"model_type": "none"}')
    (path / "tokenizer.json").write_text(json.dumps({"words": list(range(500))}))
    return path


def publish(carrier: Carrier, site: Site, number: int, *, parent: int | None = None, **model: int) -> WeightVersion:
    source = site.home / f"model-{number}"
    if not source.exists():
        trained(site.home, number, **model)
    manifest = WeightVersion(version=number, path="", digest="", parent=number - 1 if parent is None else parent)
    return carrier.publish(source, manifest, no_fence)


def assert_same(found: Path, source: Path) -> None:
    """Bit for bit, and nothing more."""
    assert {file.name for file in found.iterdir()} - {versions.MANIFEST} == {file.name for file in source.iterdir()}
    for file in source.iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes(), file.name


@on(*KINDS)
def test_a_worker_gets_each_version_as_it_was_published(site: Site) -> None:
    trainer, worker = site.carrier("trainer"), site.carrier("worker")
    for number in range(ANCHOR_EVERY * 2 + 1):
        manifest = publish(trainer, site, number)
        assert_same(worker.fetch(manifest), site.home / f"model-{number}")
        worker.keep(manifest)


@on("store-file", "store-s3")
def test_what_a_closed_worker_held_makes_room(site: Site) -> None:
    trainer = site.carrier("trainer")
    old, new = (publish(trainer, site, number) for number in range(2))
    room = int(1.5 * sum(file.stat().st_size for file in (site.home / "model-0").iterdir()))
    worker, other = (site.carrier("host", cache_bytes=room) for _ in range(2))
    worker.fetch(old)
    with pytest.raises(WeightsError, match="cache_gb"):
        other.fetch(new)
    worker.close()
    worker.close()
    assert_same(other.fetch(new), site.home / "model-1")


@on(*KINDS)
@pytest.mark.parametrize("newest", [0, 3, 4, 6])
def test_a_late_worker_gets_any_version_that_is_kept(site: Site, newest: int) -> None:
    trainer = site.carrier("trainer")
    manifests = [publish(trainer, site, number) for number in range(newest + 1)]
    for number in (newest, 0):
        assert_same(site.carrier(f"late-{number}").fetch(manifests[number]), site.home / f"model-{number}")


@on(*STORES)
def test_the_trainers_directory_is_not_needed(site: Site) -> None:
    manifest = publish(site.carrier("trainer"), site, 0)
    shutil.rmtree(site.root)
    assert_same(site.carrier("worker").fetch(manifest), site.home / "model-0")


@on(*DELTAS)
def test_a_delta_is_a_part_of_the_bytes(site: Site) -> None:
    trainer = site.carrier("trainer")
    sizes = []
    for number in range(ANCHOR_EVERY + 1):
        before = set(site.objects())
        publish(trainer, site, number, rows=2048)
        sizes.append(sum(len(read(None)) for name, read in site.objects().items() if name not in before))
    assert all(size < 0.1 * sizes[0] for size in sizes[1:ANCHOR_EVERY])
    assert sizes[ANCHOR_EVERY] > 0.9 * sizes[0]  # the next anchor


@on(*KINDS)
def test_publishing_again_is_the_same_version(site: Site) -> None:
    trainer = site.carrier("trainer")
    first, again = publish(trainer, site, 0), publish(site.carrier("trainer"), site, 0)
    assert (first.path, first.digest, first.shards) == (again.path, again.digest, again.shards)
    trained(site.home, 9)
    other = WeightVersion(version=0, path="", digest="", parent=-1)
    with pytest.raises(WeightsError, match="already holds other weights"):
        trainer.publish(site.home / "model-9", other, no_fence)


def _damages(raw: bytes, site: Site) -> dict[str, bytes]:
    middle = len(raw) // 2
    if site.kind.endswith("s3"):  # the same code reads them; requests take their time
        return {"flipped": raw[:middle] + bytes([raw[middle] ^ 4]) + raw[middle + 1 :], "truncated": raw[:middle]}
    flipped = {at: raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :] for at in (0, middle, len(raw) - 1)}
    return {
        **{f"flipped at {at}": data for at, data in flipped.items()},
        "truncated": raw[:middle],
        "empty": b"",
        "longer": raw + b"\0",
    }


@on("delta-s3")
def test_damage_in_a_bucket_is_refused_and_named(site: Site) -> None:
    check_damage(site)


@on("directory", "store-file", "delta-file")
def test_damage_to_any_object_is_refused_and_named(site: Site) -> None:
    check_damage(site)


def check_damage(site: Site) -> None:
    """All objects of an anchor and of a delta, one after the other; each is then whole again, and is believed."""
    trainer = site.carrier("trainer")
    manifests = [publish(trainer, site, number) for number in range(2)]
    checked = 0
    for name, access in site.objects().items():
        if site.kind == "directory" and not name.endswith(".safetensors"):
            continue  # nothing else is checked there
        raw = access(None)
        for what, damage in _damages(raw, site).items():
            access(damage)
            for manifest in manifests:
                host = f"{checked}-{manifest.version}"
                carrier = site.carrier(host)
                if not _needs(site, manifest, name):
                    assert_same(carrier.fetch(manifest), site.home / f"model-{manifest.version}")
                else:
                    with pytest.raises(WeightsError, match=f"version|{site.url}"):
                        assert carrier.fetch(manifest) == f"{name} {what}: believed"
                shutil.rmtree(site.home / f"cache-{host}", ignore_errors=True)
            checked += 1
        access(raw)
    assert checked >= 2 * 2 * SHARDS
    for manifest in manifests:
        assert_same(site.carrier("after").fetch(manifest), site.home / f"model-{manifest.version}")


def _needs(site: Site, manifest: WeightVersion, name: str) -> bool:
    """Whether this version is made from the object."""
    number = int(name.split("/")[0].removeprefix("v").split("-")[0])
    if site.kind in DELTAS and manifest.version == 1 and number == 0:
        return True  # the anchor; all its files are used
    return number == manifest.version


@on(*STORES)
def test_a_lost_object_is_named_and_the_next_anchor_serves(site: Site) -> None:
    trainer, worker = site.carrier("trainer"), site.carrier("worker")
    first = publish(trainer, site, 0)
    worker.fetch(first)
    manifests = [publish(trainer, site, number) for number in range(1, ANCHOR_EVERY + 1)]
    lost = next(name for name in site.objects() if name.startswith("v000001-") and "model-00002" in name)
    _remove(site, lost)
    for manifest in manifests[: -1 if site.kind in DELTAS else 1]:
        with pytest.raises(WeightsError, match="is not in the store: retired, or lost"):
            worker.fetch(manifest)
    assert_same(worker.fetch(first), site.home / "model-0")  # what it serves stays
    assert_same(worker.fetch(manifests[-1]), site.home / f"model-{ANCHOR_EVERY}")


def _remove(site: Site, name: str) -> None:
    if site.kind.endswith("s3"):
        top = urlsplit(site.url)
        s3fs.S3FileSystem(skip_instance_cache=True).rm_file(f"{top.netloc}{top.path}/{name}")
    else:
        (Path(urlsplit(site.url).path) / name).unlink()


@on(*DELTAS)
def test_a_damaged_cached_version_is_replaced_from_the_anchor(site: Site) -> None:
    trainer, worker = site.carrier("trainer"), site.carrier("worker")
    cached = worker.fetch(publish(trainer, site, 0))
    shard = sorted(cached.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xee")
    second = publish(trainer, site, 1)
    assert_same(site.carrier("worker").fetch(second), site.home / "model-1")


@on(*KINDS)
def test_what_is_retired_goes_and_what_is_needed_stays(site: Site) -> None:
    trainer = site.carrier("trainer")
    manifests = [publish(trainer, site, number) for number in range(ANCHOR_EVERY + 3)]
    kept = ANCHOR_EVERY + 1
    trainer.remove(range(kept))
    for manifest in manifests[kept:]:
        assert_same(site.carrier(f"late-{manifest.version}").fetch(manifest), site.home / f"model-{manifest.version}")
    left = {int(name.split("/")[0].removeprefix("v").split("-")[0]) for name in site.objects()}
    assert left == {*([ANCHOR_EVERY] if site.kind in DELTAS else []), *range(kept, ANCHOR_EVERY + 3)}
    with pytest.raises(WeightsError, match=r"not in the store|is not there"):
        site.carrier("late").fetch(manifests[0])


@on(*STORES)
def test_a_trainer_that_went_back_makes_no_delta_of_a_lost_version(site: Site) -> None:
    """Versions 0, 1, 2; killed and back to 1: version 3 follows 1. Workers at 2 and at 1 get it, and late ones."""
    trainer = site.carrier("trainer")
    manifests = [publish(trainer, site, number) for number in range(3)]
    hosts = {number: site.carrier(f"at-{number}") for number in (1, 2)}
    for number, host in hosts.items():
        host.fetch(manifests[number])
    third = publish(site.carrier("trainer"), site, 3, parent=1)
    for host in (*hosts.values(), site.carrier("late")):
        assert_same(host.fetch(third), site.home / "model-3")


@on(*DELTAS)
@pytest.mark.parametrize("change", ["another shape", "one tensor more", "other values", "the parent is damaged"])
def test_what_has_no_delta_is_whole(site: Site, change: str) -> None:
    trainer, source = site.carrier("trainer"), trained(site.home, 1)
    publish(trainer, site, 0)
    values = np.random.default_rng(7).integers(0, 1 << 16, (64, 64), dtype=np.uint16)
    small, first = values[:3], sorted(source.glob("*.safetensors"))[0]
    match change:
        case "another shape":
            save_file({"w0": values.reshape(32, 128), "b0": small}, first)
        case "one tensor more":
            save_file({"w0": values, "b0": small, "c0": small}, first)
        case "other values":
            for shard, file in enumerate(sorted(source.glob("*.safetensors"))):
                noise = np.random.default_rng(100 + shard).integers(0, 1 << 16, (64, 64), dtype=np.uint16)
                save_file({f"w{shard}": noise, f"b{shard}": noise[0].astype(np.float32)}, file)
        case _:
            local = sorted((site.root / "v000000").glob("*.safetensors"))[1]
            raw = local.read_bytes()
            local.unlink()
            local.write_bytes(raw[:-1] + b"\xee")
    manifest = publish(trainer, site, 1)
    assert not any(name.endswith(".delta") for name in site.objects())
    assert_same(site.carrier("worker").fetch(manifest), source)


def told_ahead(trainer: Carrier, site: Site, number: int, source: Path) -> WeightVersion:
    """Published as a trainer does that has the bytes of `source` in memory while it writes them."""
    with trainer.ahead(number - 1) as watch:
        for file in sorted(source.glob("*.safetensors")):
            if watch is None:
                break
            raw = memoryview(file.read_bytes())
            head = 8 + int.from_bytes(raw[:8], "little")
            watch(file.name, [raw[:head], raw[head:]])
    return publish(trainer, site, number)


@on(*KINDS)
def test_a_version_that_is_told_ahead_is_the_same_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, worker = site.carrier("trainer"), site.carrier("worker")
    worker.fetch(told_ahead(trainer, site, 0, trained(site.home, 0)))
    source = trained(site.home, 1)
    real = delta.encode

    def only_ahead(base: Path, new: Any, out: Path) -> delta.Encoded:
        assert not isinstance(new, Path), "made twice"
        return real(base, new, out)

    with monkeypatch.context() as patch:
        patch.setattr(delta, "encode", only_ahead)
        manifest = told_ahead(trainer, site, 1, source)
    assert_same(worker.fetch(manifest), source)
    assert not list(site.root.glob(".v*"))


@on(*DELTAS)
@pytest.mark.parametrize("fault", ["other bytes", "another layout", "the parent is damaged"])
def test_what_was_told_ahead_is_used_only_if_it_fits(site: Site, fault: str) -> None:
    trainer, worker = site.carrier("trainer"), site.carrier("worker")
    worker.fetch(publish(trainer, site, 0))
    told = trained(site.home, 2 if fault == "other bytes" else 1)
    if fault == "another layout":
        for file in told.glob("*.safetensors"):
            save_file({"other": np.zeros(3, dtype=np.uint16)}, file)
        told = told.rename(site.home / "told")
    elif fault == "the parent is damaged":
        local = sorted((site.root / "v000000").glob("*.safetensors"))[1]
        raw = local.read_bytes()
        local.unlink()
        local.write_bytes(raw[:-1] + b"\xee")
    manifest = told_ahead(trainer, site, 1, told)
    assert_same(worker.fetch(manifest), site.home / "model-1")
    assert not list(site.root.glob(".v*"))


@on("delta-file")
def test_files_that_are_not_written_leave_nothing_of_what_was_told(site: Site) -> None:
    trainer = site.carrier("trainer")
    publish(trainer, site, 0)

    def cut_short() -> None:
        with trainer.ahead(0) as watch:
            assert watch is not None
            for file in trained(site.home, 1).glob("*.safetensors"):
                watch(file.name, [memoryview(file.read_bytes())])
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        cut_short()
    assert not list(site.root.glob(".v*"))
    assert_same(site.carrier("worker").fetch(publish(trainer, site, 1)), site.home / "model-1")


_STORE = "sluice.pipeline.weights.object_store.ObjectStore"
PHASES = [
    "sluice.pipeline.weights.versions.link_files",
    "sluice.pipeline.weights.versions.fsync_directory",
    "sluice.pipeline.weights.store.Store._contents_of",
    "sluice.pipeline.weights.store.Store._upload",
    "sluice.pipeline.weights.delta.encode",
    f"{_STORE}.put",
    f"{_STORE}.put_bytes",
]


@on("delta-s3")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_publisher_killed_in_any_phase_publishes_again(site: Site, phase: str, when: str) -> None:
    """Nothing of it is believed, what it has uploaded is used, and nothing else is left of it."""
    publish(site.carrier("trainer"), site, 0)
    process = multiprocessing.get_context("spawn").Process(target=_publish_and_die, args=(site, phase, when))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 9
    sent = set(site.objects())
    manifest = publish(site.carrier("trainer"), site, 1)
    assert sent <= set(site.objects())
    assert_same(site.carrier("worker").fetch(manifest), site.home / "model-1")
    site.carrier("trainer").remove([])
    assert not list(site.root.glob(".v*.tmp"))


def _publish_and_die(site: Site, phase: str, when: str) -> None:
    place, _, name = phase.rpartition(".")
    holder = resolve_name(place)
    real = getattr(holder, name)

    def die(*args: object, **options: object) -> None:
        if when == "after":
            real(*args, **options)
        os._exit(9)

    setattr(holder, name, die)
    publish(site.carrier("trainer"), site, 1)


@on("store-s3", "delta-s3")
def test_a_restarted_publisher_uploads_nothing_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(site.carrier("trainer"), site, 0)

    def cut(*_: object) -> None:
        raise LeaseLost("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put_bytes", cut)
        with pytest.raises(LeaseLost):
            publish(site.carrier("trainer"), site, 1)
    port = urlsplit(site.address).port
    assert port is not None
    relay = Relay(port)
    try:
        use(monkeypatch, relay.address)
        relay.budget = 1 << 40
        publish(site.carrier("trainer"), site, 1)
        assert relay.budget is not None
        assert (1 << 40) - relay.budget < 40_000  # questions, answers and contents.json; the files are 3 × 8 kB more
    finally:
        relay.close()


@on(*KINDS)
def test_a_publisher_that_lost_the_run_publishes_nothing(site: Site) -> None:
    """Its fence raises; the trainer that has replaced it publishes other weights under the same number."""

    def fenced() -> None:
        raise LeaseLost("another trainer owns the run")

    old = site.carrier("trainer")
    publish(old, site, 0)
    stale = trained(site.home, 8)
    with pytest.raises(LeaseLost):
        old.publish(stale, WeightVersion(version=1, path="", digest="", parent=0), fenced)
    manifest = publish(site.carrier("trainer"), site, 1)
    assert_same(site.carrier("worker").fetch(manifest), site.home / "model-1")


@on("store-file", "delta-s3")
def test_two_publishers_of_one_number_never_mix(site: Site) -> None:
    """The stale one's directory of versions is elsewhere, and it passes its fence before it is stopped."""
    other = Site(site.kind, site.home / "stale", site.url, site.address)
    publish(site.carrier("trainer"), site, 0)
    trained(other.home, 8).rename(other.home / "model-1")
    publish(other.carrier("trainer"), other, 1)
    manifest = publish(site.carrier("trainer"), site, 1)
    assert_same(site.carrier("worker").fetch(manifest), site.home / "model-1")
    site.carrier("trainer").remove([])  # the stale one's objects go
    assert {name.split("/")[0] for name in site.objects() if name.startswith("v000001")} == {
        manifest.path.rsplit("/", 1)[-1]
    }
    assert_same(site.carrier("late").fetch(manifest), site.home / "model-1")


@on("store-s3", "delta-s3")
@pytest.mark.parametrize("side", ["publish", "fetch"])
def test_cut_connections_cost_time_alone(site: Site, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = urlsplit(site.address).port
    assert port is not None
    relay = Relay(port)
    try:
        size = 3 << 20  # of a file: the cuts are in the middle of it
        if side == "publish":
            use(monkeypatch, relay.address)
        trainer = site.carrier("trainer")
        relay.budget = size
        manifest = publish(trainer, site, 0, rows=size // 128)
        use(monkeypatch, relay.address)
        relay.budget = size + size // 2 if relay.budget is not None else None
        relay.budget = relay.budget or size // 2
        assert_same(site.carrier("worker").fetch(manifest), site.home / "model-0")
        assert relay.cuts == (2 if side == "publish" else 1)
    finally:
        relay.close()


@on("store-s3")
def test_a_connection_that_is_silent_is_left_for_another(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(site.carrier("trainer"), site, 0)
    port = urlsplit(site.address).port
    assert port is not None
    relay = Relay(port)
    try:
        use(monkeypatch, relay.address)
        relay.silent = 1
        assert_same(site.carrier("worker", quiet_s=20).fetch(manifest), site.home / "model-0")
        assert relay.silent == 0
    finally:
        relay.close()


@on("store-s3")
def test_a_store_that_is_away_is_named_without_credentials(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(site.carrier("trainer"), site, 0)
    use(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match=r"s3://.* failed \d+ times .* is the store reachable") as caught:
        site.carrier("worker", quiet_s=0.5).fetch(manifest)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
    with pytest.raises(WeightsError, match="failed"):
        publish(site.carrier("trainer", quiet_s=0.5), site, 1)
    site.carrier("trainer", quiet_s=0.5).remove([])  # a warning


@on("store-file", "delta-file")
def test_a_full_disk_is_named_and_nothing_of_it_is_believed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, worker = site.carrier("trainer"), site.carrier("worker")
    first = publish(trainer, site, 0)
    worker.fetch(first)
    second = publish(trainer, site, 1)

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(delta, "apply", full)
        patch.setattr(ObjectStore, "get", full)
        with pytest.raises(WeightsError, match=r"the disk is full.*weights\.cache_dir"):
            worker.fetch(second)
    assert not list((site.home / "cache-worker").glob(".*.tmp"))
    assert_same(worker.fetch(first), site.home / "model-0")
    assert_same(worker.fetch(second), site.home / "model-1")


@on("store-file", "delta-file")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_one_host_whose_disk_is_full_keeps_its_version_and_others_go_on(site: Site) -> None:
    """Of a real size: its version and its neighbour's files fill it."""
    trainer, worker, other = site.carrier("trainer"), site.carrier("worker"), site.carrier("other")
    disk = site.home / "cache-worker"
    disk.mkdir()
    first = publish(trainer, site, 0, rows=2048)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert_same(worker.fetch(first), site.home / "model-0")
        worker.keep(first)
        (disk / "of-others").write_bytes(bytes(700_000))
        second = publish(trainer, site, 1, rows=2048)
        with pytest.raises(WeightsError, match=r"the disk is full.*weights\.cache_dir"):
            worker.fetch(second)
        assert_same(worker.fetch(first), site.home / "model-0")
        assert_same(other.fetch(second), site.home / "model-1")
        (disk / "of-others").unlink()
        assert_same(worker.fetch(second), site.home / "model-1")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _fetch_and_die(site: Site, manifest: WeightVersion) -> None:
    def die(*_: object, **__: object) -> None:
        os._exit(9)

    versions.verify = die  # all files are there, and none is believed yet
    site.carrier("worker").fetch(manifest)


@on("store-file", "delta-file")
def test_a_killed_downloader_leaves_nothing_believed(site: Site) -> None:
    manifest = publish(site.carrier("trainer"), site, 0)
    process = multiprocessing.get_context("spawn").Process(target=_fetch_and_die, args=(site, manifest))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 9
    cache = site.home / "cache-worker"
    assert [path for path in cache.iterdir() if path.is_dir() and path.name.startswith(".")]
    assert not [path for path in cache.iterdir() if not path.name.startswith(".")]
    assert_same(site.carrier("worker").fetch(manifest), site.home / "model-0")
    assert not list(cache.glob(".*.tmp"))
