"""How to register a dataset with LLaMA-Factory: an entry of dataset_info.json and a sample record, by stage.

Source: LLaMA-Factory data/parser.py (DatasetAttr) and data/converter.py.
"""

from __future__ import annotations

import json
from typing import Any

from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.trainers.trainer import DATASET_TO_FILL_IN

_CHAT_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def dataset_entry(job: Job, model: Model) -> tuple[str, str]:
    """Return an entry of dataset_info.json for the job's (first) dataset and a record of its file, as JSON text."""
    name = (job.dataset or "").split(",")[0].strip() or DATASET_TO_FILL_IN
    if name == DATASET_TO_FILL_IN:
        name = "my_data"
    entry: dict[str, Any] = {"file_name": name if name.endswith((".json", ".jsonl")) else f"{name}.json"}
    record: dict[str, Any]
    if job.stage == "pt":
        entry["columns"] = {"prompt": "text"}
        record = {"text": "A whole document."}
    elif job.stage == "dpo":
        entry |= {"ranking": True, "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}}
        record = {"prompt": "A question?", "chosen": "The better answer.", "rejected": "The worse answer."}
    else:
        columns = {"messages": "messages"} | ({"images": "images"} if model.vision is not None else {})
        entry |= {"formatting": "sharegpt", "columns": columns, "tags": {**_CHAT_TAGS, "system_tag": "system"}}
        question = "<image>A question?" if model.vision is not None else "A question?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "The answer."}]
        record = {"messages": turns} | ({"images": ["path/to/image.png"]} if model.vision is not None else {})
    lines = ",\n".join(f"    {_json(key)}: {_json(value)}" for key, value in entry.items())
    return f"{{\n  {_json(name)}: {{\n{lines}\n  }}\n}}", f"[{_json(record)}]"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
