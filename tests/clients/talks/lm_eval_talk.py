"""Evaluations of lm-eval over /v1/completions: what the model says after a prompt, and which answer is likelier.

Prints the scores by task.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

base_url, answer, tokenizer = sys.argv[1:]
with TemporaryDirectory() as folder:
    os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
    rows = [{"question": f"Say it, {at}.", "answer": truth} for at, truth in enumerate((answer, answer, "another"))]
    data = Path(folder) / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{question}}\n",
    }  # fmt: skip
    said = {
        "task": "said", **common, "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    chosen = {
        "task": "chosen", **common, "output_type": "multiple_choice", "target_delimiter": "",
        "doc_to_choice": [answer, "another"], "doc_to_target": "{{[0, 0, 1][question[8] | int]}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    model = LocalCompletionsAPI(
        base_url=f"{base_url}/completions", model="policy", tokenizer=tokenizer, tokenizer_backend="huggingface",
        num_concurrent=2, max_retries=1,
    )  # fmt: skip
    results = simple_evaluate(model, tasks=[said, chosen], bootstrap_iters=0)
print(json.dumps({name: results["results"][name] for name in ("said", "chosen")}, default=str))
