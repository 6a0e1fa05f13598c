"""The API key that a client of a release's server needs, and the secrets of its environment."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re

API_KEY_ENV = "SGLANG_DEPLOY_API_KEY_FILE"
# What is never part of a harmless name, as words in lower case that are joined by _.
_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|authorization|(^|_)pass$|_pwd$|api_?key|(^|_)(hf|access|auth|bearer)_?token(_|$)"
    r"|(access|auth|private)_?keys?$"
)
# A path to a secret is none.
_PATH = re.compile(r"_(file|path|dir)$")
# "token" and "key" at the end of a name are secrets, but for these kinds of them.
_HARMLESS = frozenset(
    "bos cls draft eos first image input inter last mask max new next num output pad per prompt sep special stop unk "
    "cache foreign group hash partition primary public routing sort variant".split()
)
# What a value is replaced by where the name alone tells that it is a secret.
HIDDEN = "(not shown)"


def names_secret(name):
    """Return whether a variable, a flag or a key of this name holds a secret, which nothing may show or record."""
    text = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).lower()).strip("_")
    if _PATH.search(text):
        return False
    *before, last = text.split("_")
    if last == "key" or last.endswith("token"):
        return bool(before or last != "key") and not (before and before[-1] in _HARMLESS)
    return bool(_SECRET.search(text))


def masked(env):
    """Return a copy of ``{name: value}`` without the values whose names are those of secrets."""
    return {name: HIDDEN if names_secret(name) and value else value for name, value in env.items()}


def hide_secrets(module, within=None):
    """Return the parameter ``env`` and keep the values whose names are those of secrets out of the module's output.

    A short value is hidden where its name stands beside it; looked for everywhere it would blot out results, as 1 does.

    :param within: the parameter, a dict, that holds ``env``; None: it is a parameter itself.
    """
    params = module.params[within] if within else module.params
    env = params["env"]
    for name, value in env.items():
        if names_secret(name) and len(str(value)) >= 8:
            # Inside JSON a quote or a backslash is written in another way.
            module.no_log_values.update({str(value), json.dumps(str(value))[1:-1]})
    # What Ansible shows as the invocation.
    params["env"] = masked(env)
    return env


def problem_of(key, key_file):
    """Return why sglang_server_api_key cannot be used, as a text that holds nothing of it; empty where it can."""
    if key and key_file:
        return "sglang_server_api_key and sglang_server_api_key_file exclude each other: give one."
    if key and not re.fullmatch(r"[!-~]{16,}", str(key)):
        return "sglang_server_api_key needs 16 or more printable characters without spaces or line ends."
    return ""


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
    if not key:
        return None
    module.no_log_values.add(key)
    return key
