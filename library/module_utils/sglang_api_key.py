"""The API key that a client of a release's server needs, and the secrets of its environment."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re

API_KEY_ENV = "SGLANG_DEPLOY_API_KEY_FILE"
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|API_?KEY)$", re.I)


def hide_secrets(module):
    """Keep the values of the parameter ``env`` whose names are those of secrets out of the module's output."""
    for name, value in module.params["env"].items():
        if SECRET_NAME.search(name) and len(str(value)) >= 8:
            module.no_log_values.add(str(value))


def key_path(root, key):
    """Return the file that holds this API key: every release starts with the key that it was built with."""
    return os.path.join(root, "secrets", "api_key-" + hashlib.sha256(key.encode()).hexdigest()[:12])


def unnamed_keys(root, removed=()):
    """Return the key files of a root, ``secrets/api_key...``, that no release names; none where that is not known.

    :param removed: names of directories in releases/ that do not count.
    """
    named = set()
    for path in glob.glob(os.path.join(glob.escape(root), "releases", "*", "launch.json")):
        if os.path.basename(os.path.dirname(path)) not in removed:
            try:
                with open(path, encoding="utf-8") as handle:
                    named.add(os.path.basename(json.load(handle).get("env", {}).get(API_KEY_ENV, "")))
            except (OSError, ValueError, AttributeError):
                return []
    files = sorted(glob.glob(os.path.join(glob.escape(root), "secrets", "api_key*")))
    return [os.path.relpath(path, root) for path in files if os.path.basename(path) not in named]


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
