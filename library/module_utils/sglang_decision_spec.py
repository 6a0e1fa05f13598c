"""The argument spec of sglang_decision, for the module on the host and the action on the controller."""

from __future__ import annotations

# Variants whose runs tell which of two changes did it: neither, each alone, both.
ATTRIBUTED = ("baseline", "fewchan", "fusion", "fewchan_fusion")
# Figures of a run that a decision may need beside those it judges by.
FIGURES = ("decode_tok_s_p50", "ttft_ms_p50", "output_tok_s", "tpot_ms_p50")
# Keys of every result beside ``lines``.
RESULT = ("verdict", "outcome", "decision", "pending", "read", "skipped_reason")

ARGUMENTS = {
    "root": {"type": "path", "required": True},
    "release": {"type": "str", "required": True},
    "against": {"type": "str", "default": ""},
    "run": {"type": "dict", "required": True},
    "thresholds": {
        "type": "dict",
        "default": {"decode_tok_s_p50": -0.02, "ttft_ms_p50": 0.1, "known_answers": -0.02},
    },
    "false_alarm": {"type": "float", "default": 0.01},
    "start_spread": {"type": "float", "default": 0.003},
    "design": {"type": "str", "choices": ["stored", "interleaved"], "default": "stored"},
    "budget": {"type": "float", "default": 900},
    "on_inconclusive": {"type": "str", "choices": ["keep", "rollback"], "default": "rollback"},
    "promote": {"type": "bool", "default": True},
    "allreduce_us": {"type": "float", "default": 0},
    "deferred": {"type": "bool", "default": False},
    "read": {"type": "dict"},
    "event": {"type": "dict"},
}
