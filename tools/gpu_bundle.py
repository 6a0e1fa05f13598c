#!/usr/bin/env python3
"""Build one archive with all that a GPU machine without network needs: the real server, Ansible, and this project.

    gpu_bundle.py [--output FILE] [--limit-mib 64] [--kimi]

The packages are those of tests/gpu/bundle.in, at their pinned versions, for Python 3.12; torch and its libraries come
with the machine. Of sglang-kernel only the part for SM90 is kept: the others outweigh the rest a hundred times.
With --kimi it is a second archive for the same folder, with nothing but the packages of tests/gpu/bundle-kimi.in, which
tests/gpu/kimi_stage.py needs besides.
Unpack it there and run project/tests/gpu/run.py. Downloads stay in .cache/gpu-bundle: a second build takes a minute.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "gpu-bundle"
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17",
             "manylinux2014", "manylinux1")  # fmt: skip
# Kernels of other GPUs, and of attention backends that the tests do not use.
DROPPED = (
    "sgl_kernel/flash_ops.abi3.so", "sgl_kernel/flashmla_ops.abi3.so", "sgl_kernel/sm100", "bin", "share",
    "IPython/*/tests", "ansible_test",
)  # fmt: skip
# Installed by pip on the machine itself, as on any host without systemd.
AS_WHEEL = ("supervisor",)
KEEP_OUT = (".git", ".venv", ".cache", ".embedded", ".ansible", "__pycache__")


def wanted(name):
    """Return the pinned requirements of a list under tests/gpu as lines."""
    lines = (ROOT / "tests" / "gpu" / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def download(wheels, requirements):
    """Fetch the wheels that are not there yet."""
    have = {tuple(path.name.split("-")[:2]) for path in wheels.glob("*.whl")}
    missing = [item for item in requirements if tuple(item.replace("-", "_").split("==")) not in have]
    if missing:
        target = ["--python-version", PYTHON, "--implementation", "cp", "--abi", f"cp{PYTHON.replace('.', '')}"]
        target += ["--abi", "abi3", "--abi", "none"]
        for platform in PLATFORMS:
            target += ["--platform", f"{platform}_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
        subprocess.run([*command, *target, *missing], check=True)


def unpack(wheels, site):
    """Lay the wheels out as a directory of packages, without what is dropped."""
    import zipfile

    for wheel in sorted(wheels.glob("*.whl")):
        if wheel.name.startswith(AS_WHEEL):
            continue
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.startswith(tuple(DROPPED))]
            archive.extractall(site, names)
        # What a wheel puts into purelib or platlib by name belongs to the packages as well.
        for data in site.glob("*.data"):
            for part in ("purelib", "platlib"):
                if (data / part).is_dir():
                    shutil.copytree(data / part, site, dirs_exist_ok=True)
            shutil.rmtree(data)
    for pattern in DROPPED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def project(target):
    """Copy the files of the project that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in names:
        source = ROOT / name
        if not source.exists() or name.split("/")[0] in KEEP_OUT:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name, follow_symlinks=False)


def main():
    """Build the archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="in .cache/gpu-bundle by default")
    parser.add_argument("--limit-mib", type=int, default=64)
    parser.add_argument("--packages-only", action="store_true", help="leave the project's own files out")
    parser.add_argument("--kimi", action="store_true", help="what kimi_stage.py needs besides, in an archive")
    options = parser.parse_args()
    suffix = "-kimi" if options.kimi else ""
    output = options.output or CACHE / f"gpu-bundle{suffix}.tar.xz"
    wheels, tree = CACHE / f"wheels{suffix}", CACHE / f"tree{suffix}"
    wheels.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "site").mkdir(parents=True)
    (tree / "wheels").mkdir()
    download(wheels, wanted(f"bundle{suffix}.in"))
    unpack(wheels, tree / "site")
    for wheel in wheels.glob("*.whl"):
        if wheel.name.startswith(AS_WHEEL):
            shutil.copy(wheel, tree / "wheels")
    if not (options.packages_only or options.kimi):
        project(tree / "project")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Sorted names put alike files beside one another, which is worth some megabytes.
    command = ["tar", "--sort=name", "--owner=0", "--group=0", "--mtime=@0", "-C", tree, "-I", "xz -T0 -6", "-cf"]
    subprocess.run([*command, output, "."], check=True)
    size = output.stat().st_size / 2**20
    print(f"{output}: {size:.1f} MiB")
    if size > options.limit_mib:
        sys.exit(
            f"the archive has more than {options.limit_mib} MiB; find the largest part with: du -ah {tree} | sort -h"
        )


if __name__ == "__main__":
    main()
