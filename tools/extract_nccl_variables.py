#!/usr/bin/env python3
"""Write plugins/data/nccl_variables.json from NCCL's source at the releases that SGLang's torch pins load.

    python tools/extract_nccl_variables.py NCCL_CLONE 2.27.5 2.28.9 2.29.7 2.30.7 > plugins/data/nccl_variables.json

A variable is what the library reads: a parameter macro or a look-up in the environment.
Result: ``releases`` (oldest first) and ``variables``: name -> ``[since, until, kind]``; kind is int or str.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

PARAM = re.compile(r'NCCL_PARAM\s*\(\s*\w+\s*,\s*"([A-Z0-9_]+)"')
TYPED = re.compile(r"DEFINE_NCCL_PARAM\s*\(\s*\w+\s*,[^,]+,\s*(NCCL_[A-Z0-9_]+)")
READ = re.compile(
    r'(?:ncclGetEnv|getenv|envGet\w*|ncclEnv\w*)\s*\(\s*"(NCCL_[A-Z0-9_]+)"|^\s*\{?\s*"(NCCL_[A-Z0-9_]+)"\s*,', re.M
)


def variables(clone, release):
    """Return {name: kind} of what one release reads from the environment."""
    command = ["git", "-C", clone, "grep", "-hE", "-A2", 'NCCL_PARAM|"NCCL_[A-Z0-9_]+"', f"v{release}-1", "--", "src"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = {first or second for first, second in READ.findall(text)}
    names.update(TYPED.findall(text))
    for line in text.splitlines():
        if "ncclGetLevel(" in line or "strcmp(key," in line:
            names.update(re.findall(r'"(NCCL_[A-Z0-9_]+)"', line))
    return {**dict.fromkeys(names, "str"), **{f"NCCL_{name}": "int" for name in PARAM.findall(text)}}


def main(clone, releases):
    """Print the table as JSON, one variable a line."""
    table = {}
    for release in releases:
        for name, kind in variables(clone, release).items():
            table.setdefault(name, [release, release, kind])[1:] = [release, kind]
    lines = [f"  {json.dumps(name)}: {json.dumps(span)}" for name, span in sorted(table.items())]
    print('{"releases": ' + json.dumps(releases) + ',\n"variables": {\n' + ",\n".join(lines) + "\n}}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
