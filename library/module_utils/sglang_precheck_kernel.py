"""What the kernel says about the GPUs: errors in its log, the way between the cards, the driver's parameters.

The checks have the form that :mod:`sglang_prechecks` describes.
"""

from __future__ import annotations

import re
import struct

from ansible.module_utils.sglang_precheck_gpu import query
from ansible.module_utils.sglang_prechecks import report

_ACS_ID = 0x0D
# Source validation, request redirect, completion redirect: each sends peer-to-peer traffic up to the root.
_ACS_REDIRECT = 0x01 | 0x04 | 0x08
# Bytes of a configuration space that the kernel shows to an account without CAP_SYS_ADMIN.
_HEADER = 64
# From NVIDIA's list of Xid errors: those that were seen under inference.
XID = {
    8: "GPU stopped processing",
    13: "illegal instruction or access of a kernel",
    31: "invalid memory access of a program",
    43: "a program's fault stopped its channel",
    45: "channels were torn down after another fault",
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    63: "memory page retired or row remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's firmware did not answer",
    120: "the GPU's firmware failed",
}


def xid(wanted, host):
    """The kernel has logged no GPU error since the boot."""
    if wanted["device"] == "cpu":
        return []
    status, out, err = host.run(["dmesg"])
    if status:
        seen = err.strip()
        advice = "run precheck with become, or set kernel.dmesg_restrict=0"
        message = "the kernel log cannot be read, so Xid errors are not excluded"
        return [report("gpu-xid", "info", message, seen, advice)]
    lines = [line.strip() for line in out.splitlines() if re.search(r"NVRM: Xid", line)]
    if not lines:
        return []
    numbers = [int(match.group(1)) for match in (re.search(r"Xid \([^)]*\): (\d+)", line) for line in lines) if match]
    known = [f"{number} = {XID[number]}" for number in sorted(set(numbers)) if number in XID]
    return [
        report(
            "gpu-xid",
            "warning",
            f"the kernel log has {len(lines)} Xid errors since the boot",
            "; ".join([lines[-1], *known]),
            "measurements of this boot are suspect; a memory or bus error wants a reboot and then a look at the card",
        )
    ]


def sysfs_name(bus_id):
    """Return the name in ``/sys/bus/pci/devices`` of a bus id of nvidia-smi, which has eight digits of domain."""
    return re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus_id.lower())


def acs_control(config):
    """Return the ACS control register of a PCI configuration space, None without ACS or where it is unreadable."""
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
    translated, redirected, closed = [], set(), set()
    for gpu in query(host)[0]:
        device = f"/sys/bus/pci/devices/{sysfs_name(gpu['pci.bus_id'])}"
        kind = (host.read(f"{device}/iommu_group/type") or "").strip()
        if kind.startswith("DMA"):
            translated.append(f"GPU {gpu['index']} {kind}")
        for bridge in re.findall(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", host.realpath(device))[:-1]:
            config = host.read(f"/sys/bus/pci/devices/{bridge}/config", binary=True)
            control = acs_control(config)
            if control is not None and control & _ACS_REDIRECT:
                redirected.add(f"{bridge} {control:#06x}")
            elif config is not None and len(config) <= _HEADER:
                closed.add(bridge)
    found = []
    if translated and redirected:
        found.append(
            report(
                "p2p-hang",
                "warning",
                "the IOMMU translates and ACS redirects: on such hosts the first all-reduce may never return",
                f"{'; '.join(translated)}; {', '.join(sorted(redirected))}",
                "boot with iommu=pt and switch ACS off, or deploy the variant p2p_off",
            )
        )
    if translated:
        found.append(
            report(
                "iommu",
                "warning",
                "the IOMMU translates the GPUs' addresses",
                "; ".join(translated),
                "boot with iommu=pt or iommu=off",
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
    if closed:
        found.append(
            report(
                "acs-unread",
                "info",
                "this account sees too little of the PCI bridges to tell whether ACS redirects",
                ", ".join(sorted(closed)),
                "run precheck with become",
            )
        )
    return found


def kernel_modules(wanted, host):
    """The driver's module parameters suit peer-to-peer."""
    if wanted["device"] == "cpu":
        return []
    found = []
    value = host.read("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    if value is not None and value.strip() not in ("Y", "1"):
        found.append(
            report(
                "uvm-hmm",
                "warning",
                "nvidia_uvm runs with heterogeneous memory management",
                f"uvm_disable_hmm={value.strip()}",
                "set options nvidia_uvm uvm_disable_hmm=1 and reload the module if peer-to-peer locks up",
            )
        )
    match = re.search(r'(?m)^RegistryDwords: "(.*)"$', host.read("/proc/driver/nvidia/params") or "")
    if match:
        words = match.group(1)
        found.append(
            report(
                "nvidia-params",
                "info",
                f"the driver runs {'with' if words else 'without'} registry settings of its own",
                f"NVreg_RegistryDwords={words}",
                "compare measurements only at the same settings; on boards without a PCIe switch, kernels that read "
                "their peers want ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2",
            )
        )
    return found


KERNEL_CHECKS = (xid, pci_path, kernel_modules)
