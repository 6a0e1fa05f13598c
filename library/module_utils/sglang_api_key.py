"""The API key that a client of a release's server needs, and the secrets of its environment."""

from __future__ import annotations

import re

API_KEY_ENV = "SGLANG_DEPLOY_API_KEY_FILE"
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY)$", re.I)


def hide_secrets(module):
    """Keep the values of the parameter ``env`` whose names are those of secrets out of the module's output."""
    for name, value in module.params["env"].items():
        if SECRET_NAME.search(name) and len(str(value)) >= 8:
            module.no_log_values.add(str(value))


def key_for(module, launch):
    """Return the parameter ``api_key``, or else the key in the file that the release's launch.json names, or None.

    The module's output never shows it.

    :param launch: the release's ``launch.json`` as a dict; may be empty.
    :raises OSError: the file cannot be read.
    """
    if module.params["api_key"]:
        return module.params["api_key"]
    path = launch.get("env", {}).get(API_KEY_ENV)
    if not path:
        return None
    with open(path, encoding="utf-8") as handle:
        key = handle.read().strip()
    module.no_log_values.add(key)
    return key
