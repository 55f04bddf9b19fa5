"""What a process of ours imports of torch and transformers, and what they needn't take along."""

from __future__ import annotations

import subprocess
import sys

from sluice.pipeline.run.imports import TAKEN_ALONG
from tests.deadlines import HANG_S

OF_OUR_PROCESSES = (
    "sluice.consumers.training.trainer",
    "sluice.workers.engine.hf",
    "sluice.workers.scorer.model",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
)


def seen(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_taken_along_that_no_process_of_ours_uses_and_users_find_it_afterwards() -> None:
    code = f"""
import gc, sys
from importlib import import_module
from sluice.pipeline.run.imports import TAKEN_ALONG, import_slow
import_slow()
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
[import_module(name) for name in {OF_OUR_PROCESSES!r}]
print(*(name for name in TAKEN_ALONG if name in sys.modules))
[import_module(name) for name in TAKEN_ALONG]
import sklearn.metrics
"""
    assert seen(code) == ""


def test_without_it_they_are_taken_along() -> None:
    """Else there would be nothing to hide."""
    code = "import sys, transformers.generation.utils, transformers.modeling_utils\n"
    code += f"print(*(name for name in {TAKEN_ALONG!r} if name in sys.modules))"
    assert seen(code).split() == list(TAKEN_ALONG)


def test_what_is_imported_already_stays() -> None:
    code = "import sklearn.metrics, sys\nfrom sluice.pipeline.run.imports import import_slow\nimport_slow()\n"
    code += (
        "import transformers.generation.candidate_generator as used\nprint(used.roc_curve is sklearn.metrics.roc_curve)"
    )
    assert seen(code) == "True"


def test_an_import_that_fails_says_so_and_leaves_the_collector_on() -> None:
    code = "import gc\nfrom sluice.pipeline.run import imports\nimports._WITH_THEM = ('no_such_torch',)\n"
    code += "try: imports.import_slow('no_such_module_of_ours')\n"
    code += "except ModuleNotFoundError as error: print(error.name, gc.isenabled())"
    assert seen(code) == "no_such_module_of_ours True"
