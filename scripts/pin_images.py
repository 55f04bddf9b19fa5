"""Write the digests of the container images into docker-compose.yml and the Dockerfile: tags can be moved.

    python scripts/pin_images.py            # ask for every digest, then write them all, or nothing
    python scripts/pin_images.py --check    # exit 1 where an image has none

It asks through docker buildx, skopeo or crane, as installed, with that program's own registries and keys. Where none is
there or a registry cannot be reached it says so, changes nothing and ends with 1: no digest is made up.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("docker-compose.yml", "Dockerfile")
TIMEOUT_S = 60
OURS = "sluice"  # built here, from what is pinned
_IMAGE = re.compile(r"^(\s*image: |ARG PYTHON_IMAGE=)([\w./-]+:[\w.-]+)(@sha256:[0-9a-f]{64})?$", re.MULTILINE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
CLIENTS = {
    "docker": ["buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}"],
    "skopeo": ["inspect", "--format", "{{.Digest}}"],
    "crane": ["digest"],
}


class Unreachable(Exception):
    """No digest can be had; says why."""


def images(text: str) -> dict[str, str]:
    """Image with its tag → its digest, empty where there is none."""
    found = {name: digest or "" for _, name, digest in _IMAGE.findall(text)}
    return {name: digest for name, digest in found.items() if name.partition(":")[0] != OURS}


def pinned(text: str, digests: dict[str, str]) -> str:
    """The same text with these digests."""
    return _IMAGE.sub(lambda m: f"{m[1]}{m[2]}@{digests[m[2]]}" if m[2] in digests else m[0], text)


def ask(image: str) -> str:
    """The digest of an image, `sha256:…`. Raises Unreachable."""
    reasons = [f"no client to query the registry with; install one of {', '.join(CLIENTS)}"]
    for client in filter(shutil.which, CLIENTS):
        shown = f"docker://{image}" if client == "skopeo" else image
        command = [client, *CLIENTS[client], shown]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            reasons.append(f"{client} did not answer within {TIMEOUT_S} s")
            continue
        if done.returncode == 0 and (digest := _DIGEST.fullmatch(done.stdout.strip())):
            return digest[0]
        said = (done.stderr or done.stdout).strip().splitlines()
        reasons.append(f"{client} reports: {said[0] if said else 'nothing'}")
    raise Unreachable(f"{image}: {'; '.join(reasons[1:] or reasons)}")


def main(root: Path, *, check: bool, asker: Callable[[str], str] = ask) -> int:
    """The exit code."""
    texts = {name: (root / name).read_text() for name in FILES}
    every = {image: digest for text in texts.values() for image, digest in images(text).items()}
    if check:
        bare = sorted(image for image, digest in every.items() if not digest)
        print(f"without a digest: {', '.join(bare)}" if bare else "every image has its digest")
        return 1 if bare else 0
    try:
        digests = {image: asker(image) for image in sorted(every)}
    except Unreachable as error:
        print(f"nothing was changed: {error}", file=sys.stderr)
        return 1
    for name, text in texts.items():
        (root / name).write_text(pinned(text, digests))
    print("\n".join(f"{image} {digest}" for image, digest in digests.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT, check="--check" in sys.argv[1:]))
