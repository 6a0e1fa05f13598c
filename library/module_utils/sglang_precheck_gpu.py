"""GPUs, their driver, and what stands between them: read from ``nvidia-smi``, ``/sys`` and ``/proc``.

The checks have the form that :mod:`sglang_prechecks` describes.
"""

from __future__ import annotations

import re
import struct

from ansible.module_utils.sglang_prechecks import report

QUERY = (
    "index", "name", "uuid", "pci.bus_id", "driver_version", "compute_cap", "memory.total", "memory.used",
    "persistence_mode", "power.limit", "power.max_limit", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
# A GPU without a process holds less than this for the driver, MiB.
IDLE_MIB = 2048
_ACS_ID = 0x0D
# Source validation, request redirect, completion redirect: each sends peer-to-peer traffic up to the root.
_ACS_REDIRECT = 0x01 | 0x04 | 0x08


def csv(text):
    """Return the rows of ``nvidia-smi --format=csv,noheader,nounits`` as lists of cells."""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def number(text):
    """Return the number in a cell, None for ``[N/A]`` and its kind."""
    try:
        return float(text)
    except ValueError:
        return None


def query(host):
    """Return ``(gpus, exit status, text)``, one dict by the names of :data:`QUERY` for each GPU; asked once."""
    if "gpus" in host.cache:
        return host.cache["gpus"]
    status, out, err = host.run(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])
    gpus = [dict(zip(QUERY, row)) for row in csv(out) if len(row) == len(QUERY)] if status == 0 else []
    host.cache["gpus"] = gpus, status, (err.strip() or out.strip())
    return host.cache["gpus"]


def gpus(wanted, host):
    """The expected GPUs answer, are alike, and are free."""
    if wanted["device"] == "cpu":
        return [report("gpu", "info", "GPU checks are not exercised: the host is declared cpu")]
    found, status, text = query(host)
    if status == 127:
        return [
            report(
                "gpu-missing",
                "error",
                "the device is cuda and nvidia-smi is not there",
                text,
                "install the NVIDIA driver, or set sglang_device to cpu",
            )
        ]
    if status == 18 or "version mismatch" in text:
        return [
            report(
                "gpu-driver-mismatch",
                "error",
                "the loaded driver and its library have different versions",
                text,
                "reboot the host, and hold the driver packages against unattended upgrades",
            )
        ]
    if status:
        return [
            report(
                "gpu-driver",
                "error",
                f"nvidia-smi exits with {status}",
                text,
                "look for Xid in the kernel log; a GPU that is lost needs a reboot or a reseat",
            )
        ]
    wanted_count = wanted["gpu_count"]
    result = []
    if len(found) < max(wanted_count, 1):
        result.append(
            report(
                "gpu-count",
                "error",
                f"{len(found)} GPUs answer and {max(wanted_count, 1)} are expected",
                ", ".join(f"{gpu['index']} at {gpu['pci.bus_id']}" for gpu in found),
                "look for Xid in the kernel log and for the missing card in lspci",
            )
        )
    kinds = sorted({f"{gpu['name']} (compute capability {gpu['compute_cap']})" for gpu in found})
    if len(kinds) > 1:
        result.append(
            report(
                "gpu-mixed",
                "warning",
                "the GPUs are of different kinds",
                "; ".join(kinds),
                "choose alike ones with CUDA_VISIBLE_DEVICES",
            )
        )
    return result + _in_use(found, host) + _slow(found)


def _in_use(found, host):
    _status, out, _err = host.run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
                                   "--format=csv,noheader,nounits"])  # fmt: skip
    index = {gpu["uuid"]: gpu["index"] for gpu in found}
    result, explained = [], set()
    for row in csv(out):
        if len(row) < 4 or not row[1].isdigit():
            continue
        explained.add(row[0])
        if not host.is_ours(int(row[1])):
            result.append(
                report(
                    "gpu-memory-taken",
                    "error",
                    f"GPU {index.get(row[0], row[0])} is used by another program",
                    f"pid {row[1]}, {row[2]}, {row[3]} MiB",
                    "stop it; this deployment leaves it alone",
                )
            )
    for gpu in found:
        used = number(gpu["memory.used"])
        if gpu["uuid"] not in explained and used is not None and used > IDLE_MIB:
            result.append(
                report(
                    "gpu-memory-taken",
                    "warning",
                    f"GPU {gpu['index']} holds memory of no visible process",
                    f"{used:.0f} MiB",
                    "look for a process in a container, or reset the GPU",
                )
            )
    return result


def _slow(found):
    result = []
    for gpu in found:
        here = f"GPU {gpu['index']}"
        width, widest = number(gpu["pcie.link.width.current"]), number(gpu["pcie.link.width.max"])
        if width is not None and widest is not None and width < widest:
            result.append(
                report(
                    "gpu-pcie-width",
                    "warning",
                    f"{here} has {width:.0f} of {widest:.0f} PCIe lanes",
                    gpu["pci.bus_id"],
                    "reseat the card or its riser",
                )
            )
        limit, most = number(gpu["power.limit"]), number(gpu["power.max_limit"])
        if limit is not None and most is not None and limit < most:
            result.append(
                report(
                    "gpu-power",
                    "info",
                    f"{here} is limited to {limit:.0f} of {most:.0f} W",
                    "",
                    "compare measurements only at the same limit",
                )
            )
    off = [gpu["index"] for gpu in found if gpu["persistence_mode"] == "Disabled"]
    if off:
        result.append(
            report(
                "gpu-persistence",
                "warning",
                f"persistence mode is off on GPU {', '.join(off)}",
                "",
                "enable nvidia-persistenced; each start otherwise initialises the GPUs again",
            )
        )
    return result


def xid(wanted, host):
    """The kernel has logged no GPU error since the boot."""
    if wanted["device"] == "cpu":
        return []
    status, out, err = host.run(["dmesg"])
    if status:
        return [report("gpu-xid", "info", "the kernel log cannot be read, so Xid errors are not excluded", err.strip())]
    lines = [line.strip() for line in out.splitlines() if re.search(r"NVRM: Xid", line)]
    if not lines:
        return []
    return [
        report(
            "gpu-xid",
            "warning",
            f"the kernel log has {len(lines)} Xid errors since the boot",
            lines[-1],
            "look the number up; measurements of this boot are suspect",
        )
    ]


def peer_to_peer(wanted, host):
    """The driver allows each GPU to read each other one."""
    if wanted["device"] == "cpu":
        return []
    status, out, _err = host.run(["nvidia-smi", "topo", "-p2p", "r"])
    if status:
        return []
    bad = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines():
        cells = line.split()
        if len(cells) > 2 and re.match(r"^GPU\d+$", cells[0]) and not re.match(r"^GPU\d+$", cells[1]):
            bad += [
                f"{cells[0]}-GPU{column}={cell}" for column, cell in enumerate(cells[1:]) if cell not in ("X", "OK")
            ]
    if not bad:
        return []
    return [
        report(
            "gpu-p2p",
            "warning",
            "the driver refuses peer-to-peer between some GPUs",
            ", ".join(bad[:8]),
            "expect traffic through host memory; use the variant p2p_off",
        )
    ]


def sysfs_name(bus_id):
    """Return the name in ``/sys/bus/pci/devices`` of a bus id of nvidia-smi, which has eight digits of domain."""
    return re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus_id.lower())


def acs_control(config):
    """Return the ACS control register of a PCI configuration space, None without ACS or or unreadable."""
    offset, seen = 0x100, set()
    while len(config or b"") >= offset + 4 and offset >= 0x100 and offset not in seen:
        seen.add(offset)
        header = struct.unpack_from("<I", config, offset)[0]
        if header & 0xFFFF == _ACS_ID and len(config) >= offset + 8:
            return struct.unpack_from("<H", config, offset + 6)[0]
        offset = header >> 20
    return None


def pci_path(wanted, host):
    """Nothing on the way between the GPUs redirects their traffic: with IOMMU and ACS both on, all-reduce hangs."""
    if wanted["device"] == "cpu":
        return []
    translated, redirected = [], set()
    for gpu in query(host)[0]:
        device = f"/sys/bus/pci/devices/{sysfs_name(gpu['pci.bus_id'])}"
        kind = (host.read(f"{device}/iommu_group/type") or "").strip()
        if kind.startswith("DMA"):
            translated.append(f"GPU {gpu['index']} {kind}")
        for bridge in re.findall(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", host.realpath(device))[:-1]:
            control = acs_control(host.read(f"/sys/bus/pci/devices/{bridge}/config", binary=True))
            if control is not None and control & _ACS_REDIRECT:
                redirected.add(f"{bridge} {control:#06x}")
    found = []
    if translated:
        found.append(
            report(
                "iommu",
                "warning",
                "the IOMMU translates the GPUs' addresses",
                "; ".join(translated),
                "boot with iommu=pt or iommu=off; with ACS redirect as well, peer-to-peer hangs",
            )
        )
    if redirected:
        found.append(
            report(
                "acs",
                "warning",
                "ACS redirects peer-to-peer traffic on the GPUs' path",
                ", ".join(sorted(redirected)),
                "switch ACS off on root ports and switch ports, in the firmware or with setpci",
            )
        )
    return found


def kernel_modules(wanted, host):
    """The driver's module parameters suit peer-to-peer."""
    value = host.read("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm") if wanted["device"] == "cuda" else None
    if value is None or value.strip() in ("Y", "1"):
        return []
    return [
        report(
            "uvm-hmm",
            "warning",
            "nvidia_uvm runs with heterogeneous memory management",
            f"uvm_disable_hmm={value.strip()}",
            "set options nvidia_uvm uvm_disable_hmm=1 and reload the module if peer-to-peer locks up",
        )
    ]


def nccl_leftovers(wanted, host):
    """No file gives NCCL settings that no variant knows of."""
    account = host.account(wanted["user"]) if wanted["user"] else None
    home = account.pw_dir if account else host.environ.get("HOME", "/root")
    found = []
    for path in ("/etc/nccl.conf", f"{home}/.nccl.conf"):
        lines = [line.strip() for line in (host.read(path) or "").splitlines()]
        settings = [line for line in lines if line and not line.startswith("#")]
        if settings:
            found.append(
                report(
                    "nccl-conf",
                    "warning",
                    f"{path} holds NCCL settings that reach every server",
                    "; ".join(settings),
                    "remove them, and name what is wanted in a variant",
                )
            )
    return found


GPU_CHECKS = (gpus, xid, peer_to_peer, pci_path, kernel_modules, nccl_leftovers)
