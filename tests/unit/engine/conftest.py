"""A wheel that calls itself sglang, and the arguments that build an engine of it without network."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile

import pytest

VERSION = "0.5.9"


def write_wheel(folder, name, version, source):
    """Write a pure-Python wheel with one package of one file and return its path."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name_in_archive, text in files.items():
            archive.writestr(name_in_archive, text)
    return path


@pytest.fixture
def wheels(tmp_path):
    """A folder with a wheel of sglang."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "sglang", VERSION, f'__version__ = "{VERSION}"\n')
    return folder


@pytest.fixture
def arguments(tmp_path, wheels):
    """Arguments of the module sglang_engine_env that build the fake engine."""
    return {
        "declared": {
            "mode": "build",
            "version": VERSION,
            "root": str(tmp_path / "engines"),
            "base_python": sys.executable,
            "lock_digest": "abc",
            "cpu_only": False,
        },
        "lock": f"# python: >=3.9,<4.0\nsglang=={VERSION}\n",
        "pip_args": ["--no-index", f"--find-links={wheels}"],
        "timeout": 120,
    }
