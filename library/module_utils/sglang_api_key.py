"""The API key that a client of a release's server needs."""

from __future__ import annotations

API_KEY_ENV = "SGLANG_DEPLOY_API_KEY_FILE"


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
