"""Tests lm-evaluation-harness with a task of four questions, in which it scores answers by their log-probabilities."""

import json
import os
import subprocess
import sys
from pathlib import Path

from the_server import KEY, MODEL, ROOT

TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    {"question": "Hello, how are", "choices": [" you", " stone"], "answer": 0},
    {"question": "I am fine, thank", "choices": [" window", " you"], "answer": 1},
    {"question": "Do you like", "choices": [" music", " of"], "answer": 0},
    {"question": "See you", "choices": [" later", " the the"], "answer": 0},
]


def test_local_completions(base_url: str, tmp_path: Path) -> None:
    data = tmp_path / "tiny.jsonl"
    data.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    model = f"model={MODEL},base_url={base_url}/v1/completions,num_concurrent=2,max_retries=1,tokenized_requests=True"
    model += f",tokenizer_backend=huggingface,tokenizer={ROOT / 'model' / 'bundled'},max_length=1024"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--include_path", str(tmp_path), "--tasks", "tiny", "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (result,) = (tmp_path / "out").rglob("results*.json")
    scores = json.loads(result.read_text())["results"]["tiny"]
    assert scores["acc,none"] >= 0.75  # a model that scored at random would have half of them
