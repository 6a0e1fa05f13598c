#!/usr/bin/env python3
"""Time the report: write the past of a host with many runs, read it as the module does, build page, JSON and CSV.

Prints one line a figure and exits 1 where a target is missed. Wall time, so run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "plugins" / "plugin_utils")]
import ansible.module_utils  # noqa: E402

ansible.module_utils.__path__.append(str(ROOT / "library" / "module_utils"))
import past  # noqa: E402
from ansible.module_utils import sglang_history_read  # noqa: E402

SECONDS, PAGE_MB = 5.0, 5.0


def build(packed):
    """Return ``(seconds, {file: text})`` of one report, from what the hosts sent to the texts of the files."""
    begin = time.perf_counter()
    import sglang_report_data
    import sglang_report_page
    import sglang_report_plan

    plan = sglang_report_plan.parse((ROOT / "docs/plan.example.yml").read_text(encoding="utf-8"), "plan.example.yml")
    report = sglang_report_data.build({"gpu01": sglang_history_read.unpack(packed)}, plan)
    texts = sglang_report_page.files(report, ROOT / "plugins" / "data")
    return time.perf_counter() - begin, texts


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="benchmark runs in the ledger (default 10000)")
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="sg-report-") as folder:
        root = pathlib.Path(folder, "root")
        lines = past.write_root(root, count, raw=400)
        begin = time.perf_counter()
        history = sglang_history_read.read(str(root), 300)
        packed = sglang_history_read.pack(history)
        reading = time.perf_counter() - begin
    first, texts = build(packed)
    best = min(first, *(build(packed)[0] for _ in range(2)))
    page = len(texts["report.html"].encode()) / 1e6
    print(f"ledger: {lines} lines, {count} runs, {history['raw']['read']} raw results read")
    print(f"host: read and packed in {reading:.2f} s, {len(packed) / 1e6:.2f} MB to the controller")
    print(
        f"controller: first report {first:.2f} s with its libraries, best of three {best:.2f} s, target {SECONDS:g} s"
    )
    print("files: " + ", ".join(f"{name} {len(text) / 1e6:.2f} MB" for name, text in texts.items()))
    missed = [f"{first:.2f} s, target {SECONDS:g} s"] if first > SECONDS else []
    missed += [f"page of {page:.2f} MB, target {PAGE_MB:g} MB"] if page > PAGE_MB else []
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
