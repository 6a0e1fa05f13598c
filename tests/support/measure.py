"""Run measurements of sglang_bench with an interpreter that has requests and no Ansible, as the engine's has not.

    measure.py '[{"url": "http://127.0.0.1:30000", "workload": "decode", ...}, ...]'

Prints one JSON line for each: the result document, with ``raw_records`` when it has the key ``raw``.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
# As the module's arguments have them.
DEFAULTS = {
    "release": None,
    "model": None,
    "api": "chat",
    "workload": "concurrency",
    "requests": 0,
    "concurrency": 0,
    "levels": [1, 2, 4, 8, 16, 32, 64],
    "rate": 2.0,
    "burstiness": 1.0,
    "input_tokens": 0,
    "output_tokens": 0,
    "prompts_file": None,
    "unique_prompts": True,
    "tokenizer": None,
    "flush_cache": False,
    "warmup": None,
    "timeout": 120,
    "request_timeout": 60,
    "ignore_eos": True,
    "temperature": 0.0,
    "max_failed": 0.0,
    "limits": {},
    "api_key": None,
    "validate_certs": True,
    "seed": None,
    "run": None,
    "variant": None,
}


def main(text):
    """Measure once for each dict of a JSON list."""
    for name, path in (("ansible", []), ("ansible.module_utils", [str(ROOT / "library" / "module_utils")])):
        # The functions need only the name under which a module finds them.
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = path
    from ansible.module_utils.sglang_bench_record import write
    from ansible.module_utils.sglang_bench_run import measure
    from ansible.module_utils.sglang_bench_workload import resolve

    for wanted in json.loads(text):
        with_records = wanted.pop("raw", False)
        params = {**resolve({**DEFAULTS, **wanted}), "url": wanted["url"], "model": wanted.get("model") or "default"}
        document, raw = measure(params)
        with tempfile.TemporaryDirectory() as directory:
            write(document, raw, directory)
        print(json.dumps({**document, "raw_records": raw} if with_records else document), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
