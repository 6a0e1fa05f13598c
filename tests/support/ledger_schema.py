"""Hold the ledger of a real deployment against docs/ledger.schema.json."""

from __future__ import annotations

import json
import pathlib

import jsonschema

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "ledger.schema.json"
SCHEMA = json.loads(PATH.read_text(encoding="utf-8"))
EVENTS = SCHEMA["properties"]["event"]["enum"]
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def complaints(lines):
    """Return one text for each way in which a ledger's lines are not of the schema; a torn line is skipped."""
    found = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        found += [
            f"line {number}, {event.get('event')}: {error.json_path}: {error.message}"
            for error in _VALIDATOR.iter_errors(event)
        ]
    return found


def check(root):
    """Assert that the ledger below ``root``, where there is one, is of the schema."""
    ledger = pathlib.Path(root) / "ledger.jsonl"
    if ledger.is_file():
        found = complaints(ledger.read_text(encoding="utf-8", errors="replace").splitlines())
        assert not found, "events belong into docs/ledger.md and docs/ledger.schema.json:\n" + "\n".join(found)
