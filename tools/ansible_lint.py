#!/usr/bin/env python3
"""Run ansible-lint with this project's module_utils importable.

Its `args` rule imports a module to read the argument spec; without this it would skip, with a warning, every module
that imports `ansible.module_utils.sglang_*`. Arguments are those of ansible-lint.
"""

from __future__ import annotations

import pathlib
import sys

import ansible.module_utils
from ansiblelint.__main__ import main

ansible.module_utils.__path__.append(str(pathlib.Path(__file__).resolve().parents[1] / "library" / "module_utils"))

if __name__ == "__main__":
    sys.exit(main())
