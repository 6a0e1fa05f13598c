"""Find a variant's patches in the patch catalogue."""

from __future__ import annotations

import pathlib

from ansible.module_utils.sglang_patching import EntryError, load_entries
from ansible.module_utils.sglang_variant_schema import VariantError, refuse


def load(names, directory):
    """Return the catalogue entries of ``names`` in full, each with its ``digest``.

    :param directory: folder of the patch catalogue; not looked at without names.
    :raises VariantError: a patch is not in the catalogue, lacks one that it requires, or has a file that is malformed.
    """
    if not names:
        return []
    if not directory or not pathlib.Path(directory).is_dir():
        raise VariantError([refuse("patch-unknown", "patch_dir is no folder", directory, "give the patch catalogue")])
    try:
        return load_entries(names, str(directory))
    except EntryError as error:
        raise VariantError([refuse("patch-unknown", str(error), f"patches {', '.join(names)}")]) from None
