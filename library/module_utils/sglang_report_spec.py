"""The argument spec of sglang_report, for its documentation and for the action on the controller."""

from __future__ import annotations

ARGUMENTS = {
    "histories": {"type": "dict", "required": True},
    "unread": {"type": "list", "elements": "str", "default": []},
    "directory": {"type": "path", "required": True},
    "plan": {"type": "str", "default": ""},
    "baseline": {"type": "str", "default": "baseline"},
    "start_spread": {"type": "dict", "default": {}},
}
