"""Find a variant's patches in the patch catalogue: one YAML file for each, with its name inside."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib

import yaml
from ansible.module_utils.sglang_variant import VariantError, near, refuse


def load(names, directory):
    """Return the catalogue entries of ``names`` in full, each with the ``sha256`` of its canonical JSON.

    :param directory: folder of the patch catalogue.
    :raises VariantError: a patch is not in the catalogue, or the file is no YAML dict.
    """
    if not names:
        return []
    folder = pathlib.Path(directory or "")
    if not directory or not folder.is_dir():
        raise VariantError(
            [refuse("patch-unknown", "patch_dir is no folder", str(directory), "give the patch catalogue")]
        )
    known = {path.stem: path for path in sorted(folder.glob("*.yml"))}
    missing = [
        refuse(
            "patch-unknown",
            f"patch {name!r} is not in the catalogue",
            f"files: {', '.join(known) or 'none'}",
            near(name, known),
        )
        for name in names
        if name not in known
    ]
    if missing:
        raise VariantError(missing)
    return [read(name, known[name]) for name in names]


def read(name, path):
    """Return one entry with its digest. :raises VariantError: it is unreadable or names another patch."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        entry = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # a safe loader, the fast one where built
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise VariantError([refuse("patch-unreadable", f"{path.name} cannot be read", str(error))]) from None
    if not isinstance(entry, dict) or entry.get("name") != name:
        seen = entry.get("name") if isinstance(entry, dict) else type(entry).__name__
        raise VariantError(
            [refuse("patch-unreadable", f"{os.fspath(path.name)} must hold the patch {name!r}", repr(seen))]
        )
    canonical = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return {**entry, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}
