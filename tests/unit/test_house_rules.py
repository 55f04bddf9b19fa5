"""The house rules that no linter knows: imports, and what must never be written.

`make check` runs this file alone, so it needs nothing but the sources and the venv.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests.deadlines import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "workers", "producers", "consumers", "demo", "bench")
FOLDERS = (*PACKAGES, "sluice", "examples", "tests", "scripts")
HEAVY = ("torch", "transformers", "vllm")
THIS = Path(__file__).resolve()


@cache
def sources() -> dict[str, str]:
    """Every Python file of the project, by its path from the root."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path != THIS}


_LOOKED_AT = (ast.Import, ast.ImportFrom, ast.ExceptHandler)


@cache
def statements() -> list[tuple[str, ast.AST]]:
    """Every import and handler with its file. Most of a tree is expressions, which hold none; the rest isn't kept."""
    found: list[tuple[str, ast.AST]] = []
    for path, text in sources().items():
        open_: list[ast.AST] = [ast.parse(text)]
        while open_:
            node = open_.pop()
            if isinstance(node, _LOOKED_AT):
                found.append((path, node))
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                open_ += getattr(node, part, ())
    return found


def nodes(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    return ((path, node) for path, node in statements() if isinstance(node, kind))


def imported_modules() -> Iterator[tuple[str, str]]:
    """(file, absolute module name) of every import statement."""
    for path, node in nodes((ast.Import, ast.ImportFrom)):
        if isinstance(node, ast.Import):
            yield from ((path, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield path, node.module


def assert_none(offenders: list[str]) -> None:
    assert not offenders, "\n  " + "\n  ".join(offenders)


def test_nothing_is_pickled() -> None:
    """One module narrows what PyTorch itself would unpickle."""
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
    found = {(str(path), module) for path, module in imported_modules() if module.split(".")[0] in banned}
    assert_none([f"{path}: imports {module}" for path, module in found if not path.endswith("training/shards.py")])


def test_no_error_is_swallowed() -> None:
    """`except:`, `except Exception:` or `except BaseException:` with nothing but `pass` or `...` inside."""
    offenders = []
    for path, node in nodes(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        if broad and all(ast.unparse(step) in ("pass", "...", "continue") for step in node.body):
            offenders.append(f"{path}:{node.lineno}")
    assert_none(offenders)


def test_the_real_thing_is_tested() -> None:
    """Redis, vLLM and transformers are never replaced by a double."""
    doubles = {"fakeredis", "mockredis", "birdisle"}
    offenders = [f"{p}: imports {m}" for p, m in imported_modules() if m.split(".")[0] in doubles]
    target = re.compile(r"(?:patch(?:\.object|\.dict)?|setattr|setitem)\(\s*[\"']?(?:redis|arq|vllm|transformers)\b")
    created = re.compile(r"(?:Mock|create_autospec)\([^)]*(?:[Rr]edis|vllm|LLM|transformers)")
    for path, text in sources().items():
        for number, line in enumerate(text.splitlines(), 1):
            if target.search(line) or created.search(line):
                offenders.append(f"{path}:{number}: {line.strip()}")
    assert_none(offenders)


# a deadline of two digits or more (below, it is a pause between two looks) of what is no gate that holds something up
_DEADLINE = re.compile(
    r"asyncio\.timeout\(\d\d|wait_for\(.*, \d\d[\d.]*\)|monotonic\(\) \+ \d\d"
    r"|(?<!gate)\.(?:wait|communicate|result|join|terminate)\((?:timeout=)?\d\d|(?:text=True|check=\w+),.* timeout=\d\d"
    r"|eventually\(.*[\"'], [\d.]+\)|ClientTimeout\((?:total=)?\d|set_default_timeout\(\d|set_options\(timeout=\d"
)
_TIME = r"\w+(?:_ms|_s|seconds)(?:_p\d\d)?(?:\"\])*"
_TIMES_COMPARED = re.compile(rf"assert .*{_TIME} (?:<|>) [a-z_]+(?:\[\"\w+\"\])*\[\"{_TIME}")
_OTHER_DEADLINES = ("tests/soak/", "tests/clients/talks/", "tests/gpu/")


def test_deadlines_of_tests_are_far_off() -> None:
    """A machine may be several times slower than the one that a test was written on."""
    here = {p: text for p, text in sources().items() if p.startswith("tests/") and not p.startswith(_OTHER_DEADLINES)}
    lines = [(p, n, line) for p, text in here.items() for n, line in enumerate(text.splitlines(), 1)]
    assert_none([f"{p}:{n}: use tests.deadlines: {line.strip()}" for p, n, line in lines if _DEADLINE.search(line)])


def test_no_time_that_was_measured_is_compared_with_another() -> None:
    """Which of two took longer is up to the machine."""
    lines = [(p, n, line) for p, text in sources().items() for n, line in enumerate(text.splitlines(), 1)]
    assert_none([f"{p}:{n}: {line.strip()}" for p, n, line in lines if _TIMES_COMPARED.search(line)])


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"[\"'\s=(](?:/work|/root|/home/\w+|/Users/\w+)/", "a path of one machine"),
        (r"\b(?:TODO|FIXME|XXX|HACK)\b", "an unfinished note"),
        (
            r"\b(?:pypi|pythonhosted|download\.pytorch|registry\.npmjs)\.org\b",
            "a registry's host",
        ),
    ],
)
def test_no_text_contains(pattern: str, what: str) -> None:
    texts = dict(sources())
    top = [path for path in ROOT.glob("*.*") if path.name != ".git"]  # a file, where this is a second work tree
    others = [*top, *(ROOT / name for name in ("Makefile", "Dockerfile", "NOTICE")), *ROOT.glob(".ci/*")]
    for folder, ending in (("docs", "md"), ("configs", "yaml"), ("requirements", "txt"), ("pipeline", "lua")):
        others += (ROOT / folder).rglob(f"*.{ending}")
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in others if path.is_file()}
    found = re.compile(pattern)
    lines = [(p, n, line) for p, text in texts.items() for n, line in enumerate(text.splitlines(), 1)]
    assert_none([f"{p}:{n}: {what}: {line.strip()[:90]}" for p, n, line in lines if found.search(line)])


def test_every_module_of_ours_that_is_imported_is_there() -> None:
    """pyright only warns of a module that is missing, as those of optional packages may be."""
    offenders = []
    for path, module in imported_modules():
        file = ROOT / module.replace(".", "/")
        if module.startswith("sluice.") and not (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()):
            offenders.append(f"{path}: imports {module}")
    assert_none(offenders)


IMPORTED_EXTRAS = ("otel", "data", "accelerate", "lora", "wandb", "vllm", "bench")


def test_every_import_is_a_declared_dependency() -> None:
    """What the packages import is the standard library, the project, or named in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requires = [*project["dependencies"], *(line for name in IMPORTED_EXTRAS for line in extras[name])]
    declared = {re.split(r"[\s\[<>=!~;(]", line)[0].lower().replace("_", "-") for line in requires}
    # other builds have other names; triton comes with torch on GPUs; verl pins an older transformers, so it is no extra
    optional = {"vllm", "triton", "trackio", "verl"}
    owners = metadata.packages_distributions()
    offenders = set()
    for path, module in imported_modules():
        top = module.split(".")[0]
        known = top == "sluice" or top in sys.stdlib_module_names or top in optional or top in FOLDERS
        providers = {name.lower().replace("_", "-") for name in owners.get(top, ())}
        if path.startswith(PACKAGES) and not known and not providers & declared:
            offenders.add(f"{path}: imports {top}, which pyproject.toml does not name")
    assert_none(sorted(offenders))


@pytest.mark.parametrize(
    "start", ["import sluice.pipeline", "from sluice.pipeline.cli.main import main; main(['--help'])"]
)
def test_the_start_is_light(start: str) -> None:
    """Neither the kernel nor `sluice --help` imports an engine, or an event loop."""
    script = (
        "import sys\ntry:\n    exec(sys.argv[1])\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('HEAVY', [name for name in {(*HEAVY, 'asyncio')} if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, start]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"
