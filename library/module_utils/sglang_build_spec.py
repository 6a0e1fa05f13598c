"""What sglang_patch and sglang_launch take whatever release it is: for them, and for sglang_release, which builds
one in one call."""

from __future__ import annotations

# What is asked of a release's copies, whatever release it is.
PATCHES = {
    "env": {"type": "dict", "default": {}},
    "entries": {"type": "list", "elements": "dict", "required": True},
    "engine_version": {"type": "str", "default": ""},
    "capabilities": {"type": "list", "elements": "str", "default": []},
    "allow_experimental": {"type": "bool", "default": False},
}

# What the operator says about a server, whatever release it belongs to.
LAUNCH = {
    "provider": {"type": "str", "choices": ["auto", "supervisor", "systemd"], "default": "auto"},
    "unit": {"type": "str", "default": "sglang-server"},
    "install_unit": {"type": "bool", "default": False},
    "model_path": {"type": "str", "required": True},
    "served_model_name": {"type": "str", "default": ""},
    "host": {"type": "str", "default": "127.0.0.1"},
    "port": {"type": "int", "default": 30000},
    "tp_size": {"type": "int", "default": 1},
    "args": {"type": "dict", "default": {}},
    "env": {"type": "dict", "default": {}},
    "expect_env": {"type": "dict", "default": {}},
    "user": {"type": "str", "default": ""},
    "stop_timeout": {"type": "int", "default": 60},
    "log_keep": {"type": "int", "default": 5},
    "log_max_mb": {"type": "int", "default": 100},
    "restart_limit": {"type": "int", "default": 3},
    "restart_minutes": {"type": "int", "default": 120},
    "restart_on_hang": {"type": "bool", "default": False},
    "probe_interval": {"type": "int", "default": 15},
    "hang_seconds": {"type": "int", "default": 30},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "api_key_file": {"type": "path", "default": "", "no_log": False},
}
