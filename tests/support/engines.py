"""Engines and models that look like real ones from outside, for what needs no real server."""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
import subprocess
import sys
import sysconfig

from deployment import ROOT

TESTS = ROOT / "tests"


def make_engine(folder, version):
    """Make a virtual environment with the scripted server as sglang VERSION, and the files that the patches touch.

    :returns: path of its interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return fill_engine(folder, version, sysconfig.get_path("purelib"))


def fill_engine(folder, version, packages):
    """Put the scripted server into an empty virtual environment; return the path of its interpreter.

    :param packages: directory with the engine's other packages, of which the modules need requests.
    """
    (site,) = pathlib.Path(folder).glob("lib/python*/site-packages")
    shapes = ROOT / "tests" / "unit" / "patches" / "shapes.py"
    subprocess.run([sys.executable, shapes, site, version], check=True)
    shutil.copytree(TESTS / "fake_sglang" / "sglang", site / "sglang", dirs_exist_ok=True)
    shutil.copytree(TESTS / "fake_sglang" / "faults", site / "faults")
    for name, number in {"sglang": version, "torch": "2.9.1"}.items():
        info = site / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    # The prechecks ask whether an engine could import it; the scripted server never does.
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    (site / "packages.pth").write_text(packages + "\n")
    return f"{folder}/bin/python3"


def safetensors(path, name="w"):
    """Write a whole weight file of one tensor."""
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")


def model(folder, pointer=False, shards=("model-1.safetensors", "model-2.safetensors"), present=1):
    """Write a model directory of which ``present`` shards are there; return its path."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, name in enumerate(shards[:present]):
        if pointer:
            (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        else:
            safetensors(folder / name, f"w{number}")
    return str(folder)


def fault(**script):
    """Return the variables of a deploy whose server follows a script of faults."""
    return {"sglang_variant_overrides": {"env": {"FAKE_SGLANG_SCRIPT": json.dumps(script)}}}
