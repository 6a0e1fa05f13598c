"""The catalogue and small engines for the tests of the patches."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import shapes  # noqa: E402

NAMES = ["sm120_allreduce_fusion", "flashinfer_sm120_gate"]


@pytest.fixture(scope="session")
def catalogue():
    """Return the folder of the catalogue."""
    return pathlib.Path(__file__).resolve().parents[3] / "roles" / "sglang_patches" / "files"


@pytest.fixture
def entries(catalogue):
    """Return both entries of the catalogue: the fusion patch and FlashInfer's gate."""
    from ansible.module_utils.sglang_patching import load_entries

    return load_entries(NAMES, catalogue)


class Engine:
    """A folder on PYTHONPATH with small packages, and a release beside it."""

    def __init__(self, root):
        self.root = root / "engine"
        self.release = root / "release"
        self.site = self.release / "site"
        self.release.mkdir()

    def add(self, package, version, files=None):
        """Write a package of the shape of a release."""
        known = shapes.SGLANG if package == "sglang" else shapes.FLASHINFER
        return shapes.write(self.root, package, version, files or known[version])

    def metadata(self, distribution, version, folder=None, editable=False):
        """Write what an installer leaves beside a package."""
        info = (folder or self.root) / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if editable:
            info.joinpath("direct_url.json").write_text(
                json.dumps({"url": "file:///x", "dir_info": {"editable": True}})
            )

    def args(self, entries, **more):
        """Return the module's arguments."""
        arguments = {
            "python": sys.executable,
            "env": {"PYTHONPATH": os.pathsep.join([str(self.site), str(self.root)])},
            "chdir": str(self.release),
            "site": str(self.site),
            "entries": entries,
        }
        return {**arguments, **more}


@pytest.fixture
def engine(tmp_path):
    """Return an empty :class:`Engine`."""
    return Engine(tmp_path)
