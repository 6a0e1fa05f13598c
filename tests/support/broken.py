"""Change the patched copy of a sealed release before it starts, as a patch that went wrong would have."""

from __future__ import annotations


def broken(file, old, new):
    """Return a function of the release's ``site`` that replaces a text once in a file below ``sglang/srt``."""

    def change(site):
        path = site / "sglang" / "srt" / file
        text = path.read_text()
        assert text.count(old) >= 1, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new, 1))

    return change
