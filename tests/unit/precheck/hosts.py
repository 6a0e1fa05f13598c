"""Hosts made of text: what the commands and files of a GPU machine answer, without the machine.

All of it, ``captured/`` too, is written by hand in the format in which such a machine answers. None of it was captured
from an eight-GPU host: this project had none. ``captured/README.md`` says what each text follows.
"""

from __future__ import annotations

import fnmatch
import pathlib
import struct
import types

from ansible.module_utils.sglang_engine import EngineError
from ansible.module_utils.sglang_patch_site import SiteError
from ansible.module_utils.sglang_precheck_engine import PACKAGES
from ansible.module_utils.sglang_precheck_gpu import QUERY
from ansible.module_utils.sglang_precheck_host import Host

GB = 1 << 30
CAPTURED = pathlib.Path(__file__).parent / "captured"
SITE = "/opt/ml-env/lib/python3.11/site-packages"
NCCL = f"{SITE}/nvidia/nccl/lib/libnccl.so.2"
CARD = {
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "driver_version": "580.95.05",
    "compute_cap": "12.0",
    "memory.total": "97887",
    "memory.used": "3",
    "persistence_mode": "Enabled",
    "power.limit": "600.00",
    "power.min_limit": "300.00",
    "power.max_limit": "600.00",
    "pstate": "P8",
    "pcie.link.gen.current": "5",
    "pcie.link.gen.max": "5",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}
BUSES = ["01", "11", "61", "71", "81", "91", "E1", "F1"]


def card(index, **change):
    """Return the CSV line of one GPU."""
    values = dict(CARD, index=str(index), uuid=f"GPU-{index:08x}", **{"pci.bus_id": f"00000000:{BUSES[index]}:00.0"})
    values.update({key.replace("__", "."): value for key, value in change.items()})
    return ", ".join(values[name] for name in QUERY)


def matrix(count, bad=()):
    """Return the output of ``nvidia-smi topo -p2p r``; ``bad`` holds pairs that get CNS."""
    lines = [" \t\x1b[4m" + "".join(f"GPU{column}\t" for column in range(count)) + "\x1b[0m"]
    for row in range(count):
        cells = ["X" if row == column else "CNS" if (row, column) in bad else "OK" for column in range(count)]
        lines.append(f" GPU{row}\t" + "".join(f"{cell}\t" for cell in cells))
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"


def captured(name):
    """Return one captured output."""
    return (CAPTURED / name).read_text(encoding="utf-8")


def config_space(acs=None, size=4096):
    """Return a PCI configuration space with an AER capability, and an ACS one whose control register is given."""
    raw = bytearray(size)
    if size > 0x100:
        struct.pack_into("<I", raw, 0x100, 0x0001 | 1 << 16 | (0x140 << 20 if acs is not None else 0))
    if size > 0x148 and acs is not None:
        struct.pack_into("<IHH", raw, 0x140, 0x000D | 1 << 16, 0x7F, acs)
    return bytes(raw)


class FakeHost(Host):
    """A host with everything right; each attribute may be changed by a test."""

    def __init__(self, gpu_count=8):
        super().__init__("/opt/sglang")
        self.environ = {"HOME": "/root"}
        self.commands = {
            "--query-gpu": (0, "\n".join(card(index) for index in range(gpu_count)) + "\n", ""),
            "--query-compute-apps": (0, "", ""),
            "MEMORY": (0, captured("memory.txt"), ""),
            "topo": (0, matrix(gpu_count), ""),
            "dmesg": (0, "[    1.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n", ""),
        }
        self.files = {
            "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "Y\n",
            "/proc/driver/nvidia/params": captured("params.txt"),
            "/usr/lib/python3.11/sitecustomize.py": "# apport\n",
            NCCL: "elf",
        }
        self.accounts = {"sglang": types.SimpleNamespace(pw_name="sglang", pw_dir="/srv/sglang")}
        self.directories = {"/", "/opt"}
        self.closed = set()
        self.volumes = {"/": (100 * GB, 10**7, 1)}
        self.ours = set()
        self.holders = []
        self.models = {}
        self.state = {
            "present": True,
            "python": "/opt/ml-env/bin/python3",
            "python_version": "3.11.9",
            "version": "0.5.20",
            "packages": {
                "sglang": "0.5.20",
                "torch": "2.13.0",
                "flashinfer-python": "0.6.18",
                "sglang-kernel": "0.4.7",
                "triton": "3.5.1",
                "transformers": "5.0.0",
                "nvidia-nccl-cu13": "2.29.7",
            },
            "origins": {name: f"{SITE}/{name}" for name in PACKAGES},
        }
        self.places = {name: [f"{SITE}/{name}"] for name in PACKAGES}
        self.versions = {NCCL: "2.29.7"}
        self.workers = {}
        self.patch_results = []
        self.pythons = {"/usr/bin/python3": "3.11.2"}
        self.lock_limit = None
        self.problems = []

    def run(self, argv):
        """Answer by the word of the command line that names the question."""
        for key, answer in self.commands.items():
            if any(word == key or word.startswith(key + "=") for word in argv):
                return answer
        return 127, "", f"{argv[0]}: not found"

    def read(self, path, binary=False):
        """Return a file of this host."""
        return self.files.get(path)

    def realpath(self, path):
        """Put each device behind a root port of its own."""
        name = path.rsplit("/", 1)[-1]
        return f"/sys/devices/pci0000:00/0000:00:{name[5:7]}.1/{name}"

    def existing(self, path):
        """Return the nearest known directory."""
        while path not in self.directories and path != "/":
            path = path.rsplit("/", 1)[0] or "/"
        return path

    def is_directory(self, path):
        """Say whether a path is a known directory."""
        return path in self.directories

    def writable(self, path):
        """Say whether a path is not closed."""
        return path not in self.closed

    def free(self, path):
        """Return the figures of the volume with the longest fitting mount point."""
        return self.volumes[max((mount for mount in self.volumes if path.startswith(mount)), key=len)]

    def account(self, user):
        """Return a known account."""
        return self.accounts.get(user)

    def can_enter(self, path, user):
        """Say whether a path is not closed."""
        return path not in self.closed

    def memlock(self):
        """Return the set limit."""
        return self.lock_limit

    def python(self, path):
        """Return the version of a known interpreter."""
        if path not in self.pythons:
            raise EngineError(f"the interpreter {path} does not exist")
        return {"python_version": self.pythons[path]}

    def engine(self, declared):
        """Return the set state."""
        return self.state

    def candidates(self, python, packages, env):
        """Return the set places, or raise the set error."""
        if isinstance(self.places, SiteError):
            raise self.places
        return {name: {"candidates": self.places[name], "distributions": []} for name in packages}

    def python_path(self, python, env):
        """Return the path of a virtual environment on a distribution's Python."""
        if isinstance(self.places, SiteError):
            raise self.places
        return ["/usr/lib/python3.11", SITE]

    def judge_patches(self, wanted):
        """Return the set results, or raise the set error; keep what was asked."""
        self.asked = wanted
        if isinstance(self.patch_results, Exception):
            raise self.patch_results
        return self.patch_results

    def glob(self, pattern):
        """Return the known files that match."""
        return sorted(path for path in self.files if fnmatch.fnmatch(path, pattern))

    def read_link(self, path):
        """Return a known file as its own target."""
        return path if path in self.files else None

    def version_of_library(self, path):
        """Return the set version."""
        return self.versions.get(path)

    def mapped(self, name):
        """Return the set files."""
        return self.workers

    def model_problems(self, declared, user, digests):
        """Return the set problems, and one for each digest."""
        return self.problems + [f"{name} has another SHA-256" for name in digests]

    def listeners(self, port):
        """Return the set holders of a port; a holder without a port holds each."""
        return [item for item in self.holders if item.get("port", port) == port]

    def is_ours(self, pid):
        """Say whether a pid was declared ours."""
        return pid in self.ours

    def served_models(self, url, limit=2.0):
        """Return the models of a URL."""
        return self.models.get(url, [])
