"""GPUs and their driver, as ``nvidia-smi`` shows them.

The checks have the form that :mod:`sglang_prechecks` describes.
"""

from __future__ import annotations

import re

from ansible.module_utils.sglang_prechecks import report

QUERY = (
    "index", "name", "uuid", "pci.bus_id", "driver_version", "compute_cap", "memory.total", "memory.used",
    "persistence_mode", "power.limit", "power.min_limit", "power.max_limit", "pstate",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
# A GPU without a process holds less than this for the driver, MiB.
IDLE_MIB = 2048


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
        message = "GPU checks are not exercised: the host is declared cpu"
        return [report("gpu", "info", message, "", "set sglang_device to cuda on a host with GPUs")]
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
    if found:
        drivers = ", ".join(sorted({gpu["driver_version"] for gpu in found}))
        advice = "compare measurements only at the same cards and driver"
        result.append(
            report("gpu", "info", f"{len(found)} GPUs answer", f"{'; '.join(kinds)}; driver {drivers}", advice)
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
        speed, fastest = number(gpu["pcie.link.gen.current"]), number(gpu["pcie.link.gen.max"])
        if speed is not None and fastest is not None and speed < fastest:
            # An idle card lowers its link and raises it under load.
            idle = gpu["pstate"] not in ("P0", "P1", "P2")
            result.append(
                report(
                    "gpu-pcie-gen",
                    "info" if idle else "warning",
                    f"{here} runs PCIe generation {speed:.0f} of {fastest:.0f}",
                    f"{gpu['pci.bus_id']}, {gpu['pstate']}",
                    "look again under load" if idle else "set the slot's speed in the firmware; check riser and cable",
                )
            )
        limit, most = number(gpu["power.limit"]), number(gpu["power.max_limit"])
        if limit is not None and most is not None and limit < most:
            result.append(
                report(
                    "gpu-power",
                    "info",
                    f"{here} is limited to {limit:.0f} of {most:.0f} W",
                    f"range {gpu['power.min_limit']} to {gpu['power.max_limit']} W",
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


def capability(wanted, host):
    """The GPUs have the compute capability that the inventory declares and that lint relied on."""
    declared = wanted["compute_capability"]
    if wanted["device"] == "cpu" or not declared:
        return []
    # A declared "12" means any of that major.
    other = [
        f"GPU {gpu['index']} has {gpu['compute_cap']}"
        for gpu in query(host)[0]
        if declared not in (gpu["compute_cap"], gpu["compute_cap"].split(".")[0])
    ]
    if not other:
        return []
    message = f"the inventory declares compute capability {declared}, and the GPUs have another"
    return [report("gpu-capability", "error", message, ", ".join(other), "correct sglang_compute_capability")]


def memory_sizes(text):
    """Return ``{bus id: {FB | BAR1: MiB}}`` from ``nvidia-smi -q -d MEMORY``, GPUs without both sections left out."""
    found = {}
    for part in re.split(r"(?m)^GPU (?=[0-9A-Fa-f]+:)", text)[1:]:
        sizes = re.findall(r"(?m)^ +(FB|BAR1) Memory Usage\n +Total +: (\d+) MiB$", part)
        if len(sizes) == 2:
            found[part.split()[0]] = {name: int(size) for name, size in sizes}
    return found


def bar1(wanted, host):
    """The whole memory of each GPU can be reached over PCIe."""
    if wanted["device"] == "cpu" or not query(host)[0]:
        return []
    status, out, err = host.run(["nvidia-smi", "-q", "-d", "MEMORY"])
    sizes = memory_sizes(out) if status == 0 else {}
    if not sizes:
        seen = (err.strip() or out.strip())[:200]
        message = "nvidia-smi does not say how large BAR1 is"
        return [report("gpu-bar1", "info", message, seen, "see lspci -vv for the largest memory region of the GPUs")]
    small = [
        f"{gpu} {size['BAR1']} MiB of {size['FB']} MiB" for gpu, size in sizes.items() if size["BAR1"] < size["FB"]
    ]
    if not small:
        return []
    return [
        report(
            "gpu-bar1",
            "warning",
            "the PCIe window (BAR1) of some GPUs is smaller than their memory, so peers reach a part of it",
            ", ".join(small),
            "switch above-4G decoding and resizable BAR on in the firmware",
        )
    ]


def peer_to_peer(wanted, host):
    """The driver allows each GPU to read each other one."""
    if wanted["device"] == "cpu":
        return []
    if not query(host)[0]:
        return []
    status, out, err = host.run(["nvidia-smi", "topo", "-p2p", "r"])
    if status:
        message = "nvidia-smi does not say which GPUs may read each other"
        return [report("gpu-p2p", "info", message, err.strip() or out.strip(), "try p2pBandwidthLatencyTest by hand")]
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


GPU_CHECKS = (gpus, capability, bar1, peer_to_peer)
