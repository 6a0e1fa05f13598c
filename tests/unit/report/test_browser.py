"""The page in a real browser: quiet console, no request, no sideways scrolling, and no accessibility finding of axe.

`make browser` installs what this needs and runs it; without that it is skipped.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import pytest

pytest.importorskip("matplotlib", reason="only the controller has matplotlib")
pytest.importorskip("scipy", reason="only the controller has scipy")
import sglang_report_data as data
import sglang_report_page as page
import sglang_report_plan as plan

ROOT = pathlib.Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".cache/browser/bin/python"
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def seen(history, tmp_path_factory):
    """Return what the browser saw, by width and colour scheme."""
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    missing = [] if chromium else [f"none of {', '.join(NAMES)} is installed"]
    missing += [] if PYTHON.exists() else ["playwright is not in .cache/browser"]
    if missing:
        reason = f"{' and '.join(missing)}: make browser installs both"
        pytest.fail(reason) if os.environ.get("SGLANG_TEST_BROWSER") == "required" else pytest.skip(reason)
    folder = tmp_path_factory.mktemp("page")
    items = plan.parse((ROOT / "docs/plan.example.yml").read_text(), "plan.example.yml")
    probe = {
        "time": "2026-01-05T03:00:00.000Z",
        "event": "probe",
        "variant": "fewchan",
        "verdict": "passed",
        "results": [{"name": "base", "outcome": "ok", "predicted": {"decode": 1.5}}],
    }
    past = dict(history, events=[*history["events"], probe], problems=["ledger.jsonl line 7 is torn and is skipped"])
    for name, text in page.files(data.build({"gpu01": past}, items, ["gpu02"]), ROOT / "plugins/data").items():
        (folder / name).write_text(text)
    pictures = pathlib.Path(os.environ.get("SGLANG_TEST_PICTURES") or folder) / "report"
    command = [PYTHON, ROOT / "tests/support/look_at_page.py", chromium, folder / "report.html", pictures]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_console_is_quiet_and_nothing_is_loaded(seen):
    assert seen.keys() == {"phone-light", "desktop-dark"}
    for name, found in seen.items():
        assert found["console"] == [], name
        assert [url.rpartition("/")[2] for url in found["requests"]] == ["report.html"], name


def test_nothing_spills_over(seen):
    for name, found in seen.items():
        assert found["scroll"] <= 0 and found["spilling"] == [], name


def test_axe_finds_nothing(seen):
    assert {name: found["axe"] for name, found in seen.items() if found["axe"]} == {}
    assert all(found["images"] == 12 for found in seen.values())


def test_another_pair_of_releases_can_be_chosen(seen):
    for before, after in (found["pair"] for found in seen.values()):
        assert before and after and before != after
