"""The real release packages: downloaded once without dependencies, unpacked for a test, and the table of what was seen.

``SGLANG_RELEASE_CACHE`` names the cache of wheels (default ``.cache/releases`` in the checkout). With
``SGLANG_WRITE_TABLE=1`` a complete run writes the table into docs/patches.md.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("SGLANG_RELEASE_CACHE") or ROOT / ".cache" / "releases")
DOCUMENT = ROOT / "docs" / "patches.md"
MARKS = "<!-- results: begin -->", "<!-- results: end -->"
HEAD = ["package", "version", "result", "family", "files patched", "admitted before", "admitted after"]


def wheel(distribution, version):
    """Return the cached wheel of a release for CPython 3.11 on x86-64, downloading it first; skip where that fails."""
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    found = sorted(CACHE.glob(pattern))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none"]
        command += ["--platform", "manylinux_2_34_x86_64", "--platform", "any", "--dest", str(CACHE)]
        try:
            done = subprocess.run(
                [*command, f"{distribution}=={version}"], capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{distribution} {version} could not be downloaded in 300 s")
        found = sorted(CACHE.glob(pattern))
        if not found:
            pytest.skip(f"{distribution} {version} could not be downloaded: {done.stderr.strip()[-300:]}")
    return found[0]


@pytest.fixture
def unpacked(tmp_path):
    """Return ``unpack(distribution, version)`` which gives a folder for PYTHONPATH with the release in it."""

    def unpack(distribution, version):
        folder = tmp_path / f"{distribution}-{version}"
        with zipfile.ZipFile(wheel(distribution, version)) as archive:
            # What is not Python plays no part here and is most of the bytes.
            wanted = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(folder, wanted)
        return folder

    return unpack


@pytest.fixture(scope="session")
def table():
    """Collect one row per release; compare them with docs/patches.md at the end, or write them there."""
    rows = []
    yield rows
    text = "\n".join("| " + " | ".join(row) + " |" for row in [HEAD, ["---"] * len(HEAD), *rows])
    print(f"\n{text}")
    if os.environ.get("SGLANG_WRITE_TABLE") == "1":
        before, rest = DOCUMENT.read_text().split(MARKS[0])
        DOCUMENT.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    document = DOCUMENT.read_text()
    stale = [row[1] for row in rows if "| " + " | ".join(row) + " |" not in document]
    assert not stale, f"docs/patches.md says something else about {', '.join(stale)}: run with SGLANG_WRITE_TABLE=1"
