"""What the launch flags of each SGLang release are (plugins/data/sglang_flags.json), and values cast to them."""

from __future__ import annotations

import json

from ansible.module_utils.parsing.convert_bool import boolean
from packaging.version import Version

KINDS = {
    "bare": "takes no value, only true or false",
    "value": "takes one value",
    "list": "takes one or more values",
    "optional": "takes one value or none",
}


class FlagTable:
    """The flags of one release.

    :param data: the table written by tools/extract_sglang_flags.py.
    :param engine: declared SGLang version. A release that the table lacks is read as the newest known one before it,
        or the oldest one; ``exact`` is then false.
    """

    def __init__(self, data, engine):
        versions = [Version(item) for item in data["releases"]]
        wanted = Version(engine)
        older = [item for item in versions if item <= wanted]
        self.engine = engine
        self.release = str(max(older) if older else min(versions))
        self.exact = wanted in versions
        self.pins = data["pins"][self.release]
        self._order = {item: index for index, item in enumerate(data["releases"])}
        self._flags = data["flags"]

    def get(self, flag):
        """Return the record of one flag in this release, or None."""
        here = self._order[self.release]
        for run in self._flags.get(flag, ()):
            if self._order[run["since"]] <= here <= self._order[run["until"]]:
                return run
        return None

    def span(self, flag):
        """Return (first, last) release that knows a flag, or None where no release does."""
        runs = self._flags.get(flag)
        return (runs[0]["since"], runs[-1]["until"]) if runs else None

    def same(self, flag, one, other):
        """Return whether two values of a flag mean the same to this release, such as ``0.9`` and ``"0.90"``."""
        record = self.get(flag)
        if record and None not in (one, other):
            try:
                one, other = cast(one, record), cast(other, record)
            except ValueError:
                pass  # lint refuses it
        # False stands for "left out", which 0 is not.
        return (one is False) == (other is False) and (one == other or str(one) == str(other))

    def names(self):
        """Return the flags that this release knows."""
        return [flag for flag in self._flags if self.get(flag)]


def cast(value, record):
    """Return ``value`` as the flag's kind and type want it; ``False`` means "left out".

    :param value: from YAML or, as a string, from ``-e``.
    :param record: of the flag table.
    :raises ValueError: saying what the flag takes.
    """
    kind = record["kind"]
    if kind == "bare":
        try:
            return boolean(value)
        except TypeError:
            raise ValueError(KINDS[kind]) from None
    if value is False:
        return False
    if kind == "optional" and str(value).lower() in ("true", "yes", "on", "false", "no", "off"):
        return boolean(value)
    if kind == "list":
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ValueError("takes at least one value")
        return [scalar(item, record) for item in items]
    if isinstance(value, list):
        raise ValueError(KINDS[kind] + ", not a list")
    return scalar(value, record)


def scalar(value, record):
    """Return one value cast to the flag's type, checked against its choices.

    :raises ValueError: saying what the flag takes.
    """
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    if value is True or value is None or value == "":
        raise ValueError("takes a value")
    if record["type"] in ("int", "float"):
        try:
            number = float(value) if record["type"] == "float" else int(str(value))
        except ValueError:
            raise ValueError("takes an integer" if record["type"] == "int" else "takes a number") from None
        value = number
    choices = record.get("choices")
    if choices and str(value) not in choices:
        raise ValueError(f"takes one of {', '.join(choices)}")
    return value
