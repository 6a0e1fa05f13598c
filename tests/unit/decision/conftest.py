"""The decision's functions, and runs as the ledger gives them."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "plugins" / "plugin_utils"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))

# What decides runs on the controller alone; under the other Pythons there is only what hosts get.
if importlib.util.find_spec("scipy") is None:
    collect_ignore = ["test_action.py", "test_meaning.py", "test_simulation.py", "test_verdict.py"]
